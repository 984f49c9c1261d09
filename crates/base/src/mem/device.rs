//! Memory as a device accesses it: through addresses that no software uses.
//!
//! A device copies bytes at any time after a transfer was posted, regardless of references to the
//! bytes. The emulated device therefore has its own mapping. A change through this mapping has the
//! same effect on references in this process as a change by another process or by hardware. So the
//! mapping contains an allocator's pages only if it was created by an [`OutsideAccess`], whose
//! contract covers every copy of the device.

use std::ops::Range;
use std::os::fd::OwnedFd;

use super::mapping::Mapping;
use super::{Arena, MemError, OutsideAccess, os, round_to_pages};

/// Copies of at least this many bytes bypass the caches.
#[cfg(target_arch = "x86_64")]
const PAST_CACHES: usize = 64 << 10;

/// A mapping that only its holder accesses, one thread at a time, and only by copies.
///
/// It may move to another thread but cannot be shared, so no two accesses to the mapping coincide.
/// No references to the mapping exist, so a copy cannot change bytes under a reference.
#[derive(Debug)]
pub struct DeviceMemory {
    base: *mut u8,
    len: usize,
    _mapping: Mapping,
}

// SAFETY: the mapping is plain memory without thread affinity. The type is not `Sync`, because of
// its pointer.
unsafe impl Send for DeviceMemory {}

impl DeviceMemory {
    /// Allocates `len` bytes of memory that no other mapping contains.
    ///
    /// # Errors
    /// If the system does not have enough memory.
    pub fn private(len: usize) -> Result<DeviceMemory, MemError> {
        let len = round_to_pages(len);
        let mapping = Mapping::new(None, len).map_err(|e| os("map", len, e))?;
        mapping.prefer_huge();
        Ok(DeviceMemory::of(mapping, 0, len))
    }

    /// Maps a part of an arena by a call of `map`.
    fn map(
        arena: &Arena,
        range: Range<usize>,
        map: fn(&OwnedFd, Range<usize>) -> rustix::io::Result<Mapping>,
    ) -> Result<DeviceMemory, MemError> {
        let (mapping, before) = arena.map_again(range.clone(), map)?;
        Ok(DeviceMemory::of(mapping, before, range.len()))
    }

    fn of(mapping: Mapping, offset: usize, len: usize) -> DeviceMemory {
        let base = mapping.base().wrapping_add(offset);
        DeviceMemory { base, len, _mapping: mapping }
    }

    /// Copies `len` bytes from `src_offset` of `src` to `dst_offset` of this memory. The ranges may
    /// overlap. Returns `false` and copies nothing if a range is not inside its memory.
    #[must_use]
    pub fn copy_from(&self, dst_offset: usize, src: &DeviceMemory, src_offset: usize, len: usize) -> bool {
        if !src.contains(src_offset, len) || !self.contains(dst_offset, len) {
            return false;
        }
        // SAFETY: both ranges were checked. Only this thread accesses the two mappings, and nothing
        // refers to bytes in them.
        unsafe { copy_past_caches(src.base.add(src_offset), self.base.add(dst_offset), len) };
        true
    }

    /// Inverts the byte at `offset`. Returns `false` and changes nothing if `offset` is not inside
    /// this memory.
    #[must_use]
    pub fn invert(&self, offset: usize) -> bool {
        if !self.contains(offset, 1) {
            return false;
        }
        let at = self.base.wrapping_add(offset);
        // SAFETY: the offset was checked. This thread alone accesses the mapping, and nothing
        // refers to bytes in it. The accesses are volatile, because other mappings of the byte may
        // change it.
        unsafe { at.write_volatile(!at.read_volatile()) };
        true
    }

    /// Copies `out.len()` bytes at `offset` out of this memory. Returns `false` and copies nothing
    /// if the range is not inside this memory.
    #[must_use]
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) -> bool {
        if !self.contains(offset, out.len()) {
            return false;
        }
        // SAFETY: the source was checked, and this thread alone accesses the mapping. `out` is not
        // in the mapping, because nothing refers to bytes in it.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(offset), out.as_mut_ptr(), out.len()) };
        true
    }

    /// Copies `data` into this memory at `offset`. Returns `false` and copies nothing if the range
    /// is not inside this memory.
    #[must_use]
    pub fn copy_in(&self, offset: usize, data: &[u8]) -> bool {
        if !self.contains(offset, data.len()) {
            return false;
        }
        // SAFETY: as in `copy_out`.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.base.add(offset), data.len()) };
        true
    }

    fn contains(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }
}

impl Arena {
    /// Maps the bytes of `range` for a device. The system allocates the pages when they are first
    /// touched. No allocator can own the pages afterwards. See also [`OutsideAccess::for_device`].
    ///
    /// # Errors
    /// If the range does not consist of whole pages inside the arena, an allocator already owns one
    /// of the pages, the arena is private memory, or the system does not have enough memory.
    pub fn for_device(&self, range: Range<usize>) -> Result<DeviceMemory, MemError> {
        self.admit(range.start, range.len())?;
        DeviceMemory::map(self, range, Mapping::part)
    }

    /// Maps the bytes of `range` for a device and allocates all pages at once, as a device's
    /// registration would. See [`for_device`](Self::for_device).
    ///
    /// # Errors
    /// As for [`for_device`](Self::for_device).
    pub fn pinned_for_device(&self, range: Range<usize>) -> Result<DeviceMemory, MemError> {
        self.admit(range.start, range.len())?;
        DeviceMemory::map(self, range, Mapping::populated_part)
    }
}

impl OutsideAccess {
    /// Maps the bytes of `range` for a device. The system allocates the pages when they are first
    /// touched.
    ///
    /// # Errors
    /// If the range does not consist of whole pages inside the arena, the arena is private memory,
    /// or the system does not have enough memory.
    pub fn for_device(&self, range: Range<usize>) -> Result<DeviceMemory, MemError> {
        DeviceMemory::map(self.arena(), range, Mapping::part)
    }
}

/// Copies `len` bytes. Long copies bypass the caches, like a DMA engine's writes. The next reader
/// of the bytes is a drive or another core, so this core does not need them in its cache. In
/// addition, the core need not read a cache line before it overwrites the complete line.
///
/// # Safety
/// As for [`std::ptr::copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_past_caches(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LANE: usize = size_of::<__m128i>();
    const LINE: usize = 4 * LANE;
    let apart = (src as usize).abs_diff(dst as usize) >= len;
    let aligned = (dst as usize).is_multiple_of(LINE) && len.is_multiple_of(LINE);
    if len < PAST_CACHES || !apart || !aligned {
        // SAFETY: the caller's promise.
        return unsafe { std::ptr::copy(src, dst, len) };
    }
    for line in (0..len).step_by(LINE) {
        // SAFETY: both ranges belong to the caller, `line` is inside them, and `dst` is aligned.
        // SSE2 is part of x86-64.
        unsafe {
            let lanes: [__m128i; 4] =
                std::array::from_fn(|i| _mm_loadu_si128(src.add(line + i * LANE).cast()));
            for (i, lane) in lanes.into_iter().enumerate() {
                _mm_stream_si128(dst.add(line + i * LANE).cast(), lane);
            }
        }
    }
    // These writes are weakly ordered. The fence makes them visible before the completion of the
    // transfer.
    // SAFETY: SSE is part of x86-64.
    unsafe { _mm_sfence() };
}

/// Copies `len` bytes.
///
/// # Safety
/// As for [`std::ptr::copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_past_caches(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy(src, dst, len) };
}
