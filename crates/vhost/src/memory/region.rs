//! [`GuestRegion`] and [`SharedRecord`]: mapped files of the front end. This is the only module of
//! the crate with `unsafe` code.

use std::os::fd::AsFd;

use base::mem::guarded::{GuardError, GuardedMapping};
use vm_memory::volatile_memory::{Error as VolatileError, VolatileSlice, compute_offset};
use vm_memory::{
    GuestAddress, GuestMemoryError, GuestMemoryRegion, GuestMemoryRegionBytes, GuestUsize,
    MemoryRegionAddress,
};

use super::MemoryRange;

/// A part of a memory table that is mapped as a whole.
#[derive(Debug)]
pub struct GuestRegion {
    range: MemoryRange,
    mapping: GuardedMapping,
}

impl GuestRegion {
    /// Maps a region from its file. The last address of the range must exist.
    pub(super) fn map(range: MemoryRange, file: impl AsFd) -> Result<GuestRegion, GuardError> {
        let mapping = GuardedMapping::new(file, range.file_offset, range.size)?;
        Ok(GuestRegion { range, mapping })
    }

    /// Returns where the region is.
    #[must_use]
    pub fn range(&self) -> &MemoryRange {
        &self.range
    }

    /// Returns true if the file was found to be shorter than the region.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.mapping.is_broken()
    }
}

impl GuestMemoryRegion for GuestRegion {
    type B = ();

    fn len(&self) -> GuestUsize {
        self.range.size
    }

    fn start_addr(&self) -> GuestAddress {
        GuestAddress(self.range.guest_address)
    }

    fn bitmap(&self) {}

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_>, GuestMemoryError> {
        let start = usize::try_from(offset.0).map_err(|_| GuestMemoryError::InvalidBackendAddress)?;
        Ok(slice(&self.mapping, start, count)?)
    }
}

impl GuestMemoryRegionBytes for GuestRegion {}

/// The memory file with the records of requests in flight.
#[derive(Debug)]
pub(crate) struct SharedRecord {
    mapping: GuardedMapping,
}

impl SharedRecord {
    /// Maps a range of the file.
    pub(crate) fn map(file: impl AsFd, offset: u64, len: u64) -> Result<SharedRecord, GuardError> {
        GuardedMapping::new(file, offset, len).map(|mapping| SharedRecord { mapping })
    }

    /// Returns the bytes `start..start + count`.
    pub(crate) fn slice(&self, start: usize, count: usize) -> Result<VolatileSlice<'_>, VolatileError> {
        slice(&self.mapping, start, count)
    }

    /// Returns true if the file was found to be shorter than the range.
    pub(crate) fn is_broken(&self) -> bool {
        self.mapping.is_broken()
    }
}

fn slice(mapping: &GuardedMapping, start: usize, count: usize) -> Result<VolatileSlice<'_>, VolatileError> {
    let end = compute_offset(start, count)?;
    if end > mapping.len() {
        return Err(VolatileError::OutOfBounds { addr: end });
    }
    // SAFETY: the range was checked, and the mapping lives as long as the slice. No references to
    // the memory exist, because the mapping hands out its address only to this function, and
    // `VolatileSlice` accesses memory by copies and atomic operations only.
    Ok(unsafe { VolatileSlice::new(mapping.base().add(start), count) })
}
