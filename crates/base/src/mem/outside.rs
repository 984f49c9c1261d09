//! [`OutsideAccess`]: the right to let devices and peers access the buffers of an arena.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{Arena, MemError};

/// The right to let devices, peers and other mappings access all bytes of an arena, including the
/// bytes of buffers. Functions that give such access to buffers take this type. The owner of the
/// right controls who gets it. Buffers and allocators do not reveal it.
#[derive(Debug, Clone)]
pub struct OutsideAccess(Arc<Arena>);

impl OutsideAccess {
    /// Creates the right for an arena in which allocators own pages.
    ///
    /// # Safety
    /// An access is *outside* if it is made neither through an [`ArenaBuf`](super::ArenaBuf) or its
    /// frozen [`Bytes`](bytes::Bytes), nor by [`Arena::copy_in`] or [`Arena::copy_out`]. The caller
    /// must ensure for all users of the right that
    /// - no outside access changes bytes while a buffer that this process may read covers them, and
    /// - no outside access reads or changes bytes while a buffer that this process may change
    ///   covers them.
    ///
    /// A buffer does not count while its owner lends it to one outside access and does not use it.
    /// For accesses that a peer makes on its own, the protocol with the peer must provide the same
    /// guarantee. The [parent module](super) states how code bounds the damage by a peer that
    /// violates the protocol.
    #[must_use]
    pub unsafe fn new(arena: &Arc<Arena>) -> OutsideAccess {
        OutsideAccess(Arc::clone(arena))
    }

    /// Creates the right for an arena that this process accesses only by copies. No allocator can
    /// own pages of the arena afterwards.
    ///
    /// # Errors
    /// [`MemError::Allocated`] if an allocator already owns pages of the arena.
    pub fn of_copied(arena: &Arc<Arena>) -> Result<OutsideAccess, MemError> {
        arena.admit(0, arena.len())?;
        Ok(OutsideAccess(Arc::clone(arena)))
    }

    /// The arena.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.0
    }

    /// Returns a duplicate of the memfd for a peer, or `None` for anonymous memory.
    ///
    /// # Errors
    /// If the process is out of file descriptors.
    pub fn share_fd(&self) -> std::io::Result<Option<OwnedFd>> {
        self.0.duplicate_fd()
    }
}
