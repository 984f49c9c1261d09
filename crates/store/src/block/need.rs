//! Data that a call waits for.

use bytes::Bytes;

/// Something that must be loaded before a call can go on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Need {
    /// The value of a key of the index.
    Key(Bytes),
    /// Entries of the index from the first key to before the second.
    Range { from: Bytes, to: Bytes, limit: usize },
    /// The content of a block of the data region.
    Block(u64),
}
