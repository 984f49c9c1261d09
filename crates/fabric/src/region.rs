//! The description of memory that one side sends to the other.

use serde::{Deserialize, Serialize};

use crate::{FabricError, Result};

/// The permitted uses of a registered region. A narrower permission limits what a peer can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Only this process's own operations, unless the provider
    /// [exposes](crate::Info::exposes_local_memory) all local memory.
    Local,
    /// Messages that this process sends and receives. No provider exposes this memory.
    Messages,
    /// Data that this process sends or writes to remote memory. No provider exposes this memory.
    Outgoing,
    /// The destination of this process's reads of remote memory. Providers that
    /// [expose](crate::Info::exposes_local_memory) local memory let peers write to it.
    ReadSink,
    /// Peers that have the key may read it.
    RemoteRead,
    /// Peers that have the key may write it.
    RemoteWrite,
    /// Peers that have the key may read and write it. This process's own operations may also use
    /// it.
    Remote,
}

impl Access {
    /// Whether peers may be able to reach the region.
    pub(crate) fn is_remote(self) -> bool {
        matches!(self, Access::ReadSink | Access::RemoteRead | Access::RemoteWrite | Access::Remote)
    }
}

/// A peer's region, as the peer described it. The description is not verified: the peer's provider
/// checks each access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// The secret key that permits access.
    pub key: u64,
    /// The address that the peer's provider gives to the region's first byte: an address in the
    /// peer's process, or 0.
    pub base: u64,
    /// Length of the region, in bytes.
    pub len: u64,
}

/// A position in a [`RemoteRegion`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSlice {
    pub(crate) key: u64,
    pub(crate) address: u64,
    pub(crate) len: usize,
}

impl RemoteRegion {
    /// Returns the `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`] if the range is not inside the region.
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
