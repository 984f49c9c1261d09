//! The permitted uses of registered memory, and the description of memory that one side sends to
//! the other.

use serde::{Deserialize, Serialize};

use crate::{FabricError, Result};

/// The permitted uses of a registered region. A narrower permission limits what a peer can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Only this process's own operations may use the memory. If the provider
    /// [exposes](crate::Info::exposes_local_memory) local memory, peers may use it too.
    Local,
    /// Messages that this process sends and receives. No provider lets peers write to this memory.
    Messages,
    /// Data that this process sends or writes to remote memory. No provider lets peers write to
    /// this memory.
    Outgoing,
    /// The destination of this process's reads of remote memory. Providers that
    /// [expose](crate::Info::exposes_local_memory) local memory let peers write to this memory.
    ReadSink,
    /// Peers with the key may read the memory.
    RemoteRead,
    /// Peers with the key may write to the memory.
    RemoteWrite,
    /// Peers with the key may read and write the memory. This process's own operations may also use
    /// the memory.
    Remote,
}

impl Access {
    /// Whether peers may be able to access the region.
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
    /// The address by which an access names the region's first byte. It is an address in the peer's
    /// process, or 0 if the provider counts from the region's start.
    pub base: u64,
    /// Length of the region, in bytes.
    pub len: u64,
}

/// A range of a [`RemoteRegion`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSlice {
    pub(crate) key: u64,
    pub(crate) address: u64,
    pub(crate) len: usize,
}

impl RemoteRegion {
    /// Returns the range of `len` bytes at `offset`.
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
    fn slices_outside_a_memory_region_are_refused() {
        let region = RemoteRegion { key: 7, base: u64::MAX - 100, len: 200 };
        assert_eq!(region.slice(10, 90).unwrap().address, u64::MAX - 90);
        for (offset, len) in [(0, 201), (200, 1), (usize::MAX, 2), (150, 10)] {
            assert!(matches!(region.slice(offset, len), Err(FabricError::OutOfRange { .. })));
        }
        assert!(region.slice(100, 100).is_ok());
    }
}
