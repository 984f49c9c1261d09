//! [`ConnectionSlot`]: the slot that a server's connection holds in its listener.

use crate::Result;

/// The slot that a server's connection holds in its listener. The connection reports events that
/// decide whether it may keep the slot. Dropping this value frees the slot.
pub(crate) trait ConnectionSlot: Send + Sync {
    /// Marks the connection as detached, because it has lost its transport.
    fn hold(&self) -> Result<()>;

    /// Marks the connection as having a transport again.
    fn release(&self);

    /// Records activity of the peer beyond heartbeats, which protects the connection from losing
    /// its slot to another client.
    fn heard(&self);
}
