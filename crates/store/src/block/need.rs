//! Data that a call waits for.

use bytes::Bytes;

/// An item that must be loaded before a call can continue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Need {
    /// The value of a key of the index.
    Key(Bytes),
    /// At most `limit` entries of the index with `from <= key < to`.
    Range { from: Bytes, to: Bytes, limit: usize },
    /// The content of a block of the data area.
    Block(u64),
}
