//! Guest memory: the memory of the virtual machine, as far as the front end has shared it.
//!
//! [`GuestRam`] is a memory table: a set of [`GuestRegion`]s, each a mapping of a file of the front
//! end. A table never changes. When the front end adds or removes regions, the session makes a new
//! table. Requests in flight keep the regions of their table mapped.
//!
//! The guest changes its memory at any time, so all accesses are copies or atomic operations of
//! `vm_memory`. The front end can shrink its files at any time, too. Then the mapping reads as zeros
//! and counts as broken (`base::mem::guarded`).

#[expect(unsafe_code, reason = "makes slices of mapped memory")]
mod region;
mod segments;

use std::os::fd::AsFd;
use std::sync::Arc;

use base::mem::guarded::GuardError;
use serde::{Deserialize, Serialize};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestRegionCollection, GuestRegionCollectionError};

pub use region::GuestRegion;
pub(crate) use region::SharedRecord;
pub use segments::Segments;

/// Maximum number of regions in a memory table: the number of slots that QEMU can use.
pub const REGIONS_MAX: usize = 509;

/// A region of guest memory, as the front end describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRange {
    /// Address in the guest.
    pub guest_address: u64,
    /// Size, in bytes.
    pub size: u64,
    /// Address in the front end's process. The addresses of rings are of this kind.
    pub user_address: u64,
    /// Offset of the region in its file, in bytes.
    pub file_offset: u64,
}

/// Why a memory table cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestRamError {
    /// A region is empty, or its last address does not exist.
    #[error("the memory region {0:x?} is empty or ends after the last address")]
    Range(MemoryRange),
    /// Two regions contain the same address of the guest or of the front end.
    #[error("the memory region {0:x?} overlaps another one")]
    Overlap(MemoryRange),
    /// A region to remove does not exist.
    #[error("the memory region {0:x?} does not exist")]
    Unknown(MemoryRange),
    /// The table has too many regions.
    #[error("the front end has more than {REGIONS_MAX} memory regions")]
    TooMany,
    /// A region cannot be mapped.
    #[error("the memory region {0:x?} cannot be mapped: {1}")]
    Map(MemoryRange, #[source] GuardError),
}

/// A memory table. See the [module](self).
#[derive(Debug, Clone, Default)]
pub struct GuestRam {
    regions: GuestRegionCollection<GuestRegion>,
    /// The same regions, in the same order.
    list: Vec<Arc<GuestRegion>>,
}

impl GuestRam {
    /// Maps regions, each from its file.
    ///
    /// # Errors
    /// If a region cannot be mapped, or the regions overlap.
    pub fn map<F: AsFd>(regions: &[(MemoryRange, F)]) -> Result<GuestRam, GuestRamError> {
        regions.iter().try_fold(GuestRam::default(), |ram, (range, file)| ram.with(*range, file))
    }

    /// Returns a table with an additional region.
    ///
    /// # Errors
    /// If the region cannot be mapped, or overlaps another one.
    pub fn with(&self, range: MemoryRange, file: impl AsFd) -> Result<GuestRam, GuestRamError> {
        let ends = [range.guest_address, range.user_address].map(|start| start.checked_add(range.size));
        if range.size == 0 || ends.contains(&None) {
            return Err(GuestRamError::Range(range));
        }
        if self.list.len() >= REGIONS_MAX {
            return Err(GuestRamError::TooMany);
        }
        let overlap = |start: fn(&MemoryRange) -> u64, other: &MemoryRange| {
            start(&range) < start(other) + other.size && start(other) < start(&range) + range.size
        };
        let overlaps = self.list.iter().map(|region| region.range()).any(|other| {
            overlap(|range| range.guest_address, other) || overlap(|range| range.user_address, other)
        });
        if overlaps {
            return Err(GuestRamError::Overlap(range));
        }
        let region = GuestRegion::map(range, file).map_err(|e| GuestRamError::Map(range, e))?;
        let mut list = self.list.clone();
        list.push(Arc::new(region));
        GuestRam::of(list).map_err(|_| GuestRamError::Overlap(range))
    }

    /// Returns a table without a region. The offset of the range in its file does not matter.
    ///
    /// # Errors
    /// If no region has this range.
    pub fn without(&self, range: MemoryRange) -> Result<GuestRam, GuestRamError> {
        let place = |range: &MemoryRange| (range.guest_address, range.size, range.user_address);
        let found = self.list.iter().position(|region| place(region.range()) == place(&range));
        let mut list = self.list.clone();
        list.remove(found.ok_or(GuestRamError::Unknown(range))?);
        GuestRam::of(list).map_err(|_| GuestRamError::Unknown(range))
    }

    fn of(mut list: Vec<Arc<GuestRegion>>) -> Result<GuestRam, GuestRegionCollectionError> {
        list.sort_by_key(|region| region.range().guest_address);
        let regions = match list.is_empty() {
            true => GuestRegionCollection::new(),
            false => GuestRegionCollection::from_arc_regions(list.clone())?,
        };
        Ok(GuestRam { regions, list })
    }

    /// Returns the guest address of an address in the front end's process.
    #[must_use]
    pub fn guest_address(&self, user_address: u64) -> Option<GuestAddress> {
        let ranges = self.list.iter().map(|region| region.range());
        let offset_in = |range: &MemoryRange| {
            user_address.checked_sub(range.user_address).filter(|offset| *offset < range.size)
        };
        ranges.filter_map(|range| Some(GuestAddress(range.guest_address + offset_in(range)?))).next()
    }

    /// Returns true if a file of the table was found to be shorter than its region.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.list.iter().any(|region| region.is_broken())
    }

    /// Returns the region with an address, and the offset of the address in the region, in bytes.
    pub(crate) fn locate(&self, address: u64) -> Option<(&Arc<GuestRegion>, u64)> {
        let after = self.list.partition_point(|region| region.range().guest_address <= address);
        let region = &self.list[after.checked_sub(1)?];
        let offset = address - region.range().guest_address;
        (offset < region.range().size).then_some((region, offset))
    }
}

impl GuestMemoryBackend for GuestRam {
    type R = GuestRegion;

    fn num_regions(&self) -> usize {
        self.list.len()
    }

    fn find_region(&self, address: GuestAddress) -> Option<&GuestRegion> {
        self.regions.find_region(address)
    }

    fn iter(&self) -> impl Iterator<Item = &GuestRegion> {
        self.list.iter().map(AsRef::as_ref)
    }
}
