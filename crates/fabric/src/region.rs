//! What a side tells the other of its memory.

use serde::{Deserialize, Serialize};

use crate::{FabricError, Result};

/// What a registered region may be used for, and by whom. The less, the less a peer can do with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// This process's own operations only, unless the provider [exposes](crate::Info::exposes_local_memory) all of it.
    Local,
    /// This process's messages, in and out. No provider exposes it.
    Messages,
    /// What this process sends, or writes to remote memory. No provider exposes it.
    Outgoing,
    /// What this process reads remote memory into, and nothing else; providers that
    /// [expose](crate::Info::exposes_local_memory) it let peers write it.
    ReadSink,
    /// Peers that have the key may read it.
    RemoteRead,
    /// Peers that have the key may write it.
    RemoteWrite,
    /// Peers that have the key may read and write it; this process's own operations, too.
    Remote,
}

impl Access {
    /// Whether peers may be able to reach the region.
    pub(crate) fn is_remote(self) -> bool {
        matches!(self, Access::ReadSink | Access::RemoteRead | Access::RemoteWrite | Access::Remote)
    }
}

/// A region of a peer, as it described it. Nothing in it is proven: the peer's provider checks each access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// Permits the access; a secret.
    pub key: u64,
    /// What the peer's provider calls the region's first byte: an address of the peer's process, or 0.
    pub base: u64,
    /// Length, in bytes.
    pub len: u64,
}

/// A place in a [`RemoteRegion`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSlice {
    pub(crate) key: u64,
    pub(crate) address: u64,
    pub(crate) len: usize,
}

impl RemoteRegion {
    /// The `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`].
    pub fn slice(&self, offset: usize, len: usize) -> Result<RemoteSlice> {
        let inside = offset.checked_add(len).is_some_and(|end| end as u64 <= self.len);
        match self.base.checked_add(offset as u64) {
            Some(address) if inside => Ok(RemoteSlice { key: self.key, address, len }),
            _ => Err(FabricError::OutOfRange { offset, len, region_len: self.len as usize }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_stay_inside() {
        let region = RemoteRegion { key: 7, base: u64::MAX - 100, len: 200 };
        assert_eq!(region.slice(10, 90).unwrap().address, u64::MAX - 90);
        for (offset, len) in [(0, 201), (200, 1), (usize::MAX, 2), (150, 10)] {
            assert!(matches!(region.slice(offset, len), Err(FabricError::OutOfRange { .. })));
        }
        assert!(region.slice(100, 100).is_ok());
    }
}
