//! [`Registration`]: memory that an endpoint may access.

use fabric::{MemoryRegion, RemoteRegion};

use crate::transport::sim::SimRegion;

/// Registered memory. The registration ends when its last clone is dropped. If a peer may still be
/// using the memory then, the memory is kept until the peer's link is closed.
#[derive(Debug, Clone)]
pub(crate) enum Registration {
    Ofi(MemoryRegion),
    Sim(SimRegion),
    /// The simulated network needs no registration for this side's own operations.
    Unneeded,
}

impl Registration {
    /// The description that a peer needs to access the memory.
    pub(crate) fn remote(&self) -> RemoteRegion {
        match self {
            Registration::Ofi(region) => region.remote(),
            Registration::Sim(region) => region.remote(),
            Registration::Unneeded => RemoteRegion { key: 0, base: 0, len: 0 },
        }
    }

    /// Records that the peer with the key has ended all its accesses. The memory is then released
    /// as soon as the registration ends.
    ///
    /// # Safety
    /// As for [`MemoryRegion::settle`]: no access of a peer to the memory may be in progress or
    /// begin later.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn settle(&self) {
        match self {
            // SAFETY: the caller's promise.
            Registration::Ofi(region) => unsafe { region.settle() },
            Registration::Sim(region) => region.settle(),
            Registration::Unneeded => {}
        }
    }
}
