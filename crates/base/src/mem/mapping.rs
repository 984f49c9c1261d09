//! [`Mapping`]: maps memory at addresses that allow huge pages.
//!
//! A drive's driver, a page table walk and a registration with the kernel handle memory page by
//! page. One 2 MiB page costs them a fraction of the time that 512 small pages cost. Ordinary
//! memory can use huge pages only if its address and its offset in the memfd agree modulo the huge
//! page size. Every mapping of at least that size is therefore aligned accordingly.

use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::io::Result;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Size of a huge page in bytes: the range of one second-level page table entry, on x86-64 and on
/// ARM with 4 KiB pages.
pub const HUGE_PAGE: usize = 2 << 20;

/// One mapping, readable and writable, unmapped when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    base: *mut u8,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of the memfd, shared, or of private memory if there is no memfd.
    pub(super) fn new(fd: Option<&OwnedFd>, len: usize) -> Result<Mapping> {
        Mapping::of(fd, 0..len, MapFlags::empty())
    }

    /// Maps a part of a memfd, shared.
    pub(super) fn part(fd: &OwnedFd, range: Range<usize>) -> Result<Mapping> {
        Mapping::of(Some(fd), range, MapFlags::empty())
    }

    /// Maps a part of a memfd, shared, and allocates its pages at once.
    pub(super) fn populated_part(fd: &OwnedFd, range: Range<usize>) -> Result<Mapping> {
        Mapping::of(Some(fd), range, MapFlags::POPULATE)
    }

    fn of(fd: Option<&OwnedFd>, range: Range<usize>, flags: MapFlags) -> Result<Mapping> {
        let (start, len) = (range.start as u64, range.len());
        if len < HUGE_PAGE {
            // SAFETY: a fresh mapping at an address that the kernel chooses; it aliases nothing.
            let base = unsafe { map(std::ptr::null_mut(), len, fd.map(|fd| (fd, start)), flags) }?;
            return Ok(Mapping { base, len });
        }
        let room = Mapping::reserve(len, range.start % HUGE_PAGE)?;
        // SAFETY: the new mapping replaces the reservation that this function has just made.
        // Nothing refers to it.
        unsafe { map(room.base, len, fd.map(|fd| (fd, start)), flags | MapFlags::FIXED) }?;
        Ok(room)
    }

    /// Reserves addresses for `len` bytes, `offset` bytes after a multiple of [`HUGE_PAGE`],
    /// without memory behind them.
    fn reserve(len: usize, offset: usize) -> Result<Mapping> {
        let all = len.checked_add(2 * HUGE_PAGE).ok_or(rustix::io::Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping that cannot be accessed.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), all, ProtFlags::empty(), flags) }?
                .cast::<u8>();
        let before = start.align_offset(HUGE_PAGE) + offset;
        let base = start.wrapping_add(before);
        let outside = [(start, before), (base.wrapping_add(len), 2 * HUGE_PAGE - before)];
        for (part, len) in outside.into_iter().filter(|(_, len)| *len > 0) {
            // SAFETY: this is a part of the fresh mapping outside the part that is kept. If
            // unmapping it fails, it costs only addresses.
            let _ = unsafe { rustix::mm::munmap(part.cast(), len) };
        }
        Ok(Mapping { base, len })
    }

    /// Start of the mapping.
    pub(super) fn base(&self) -> *mut u8 {
        self.base
    }

    /// Asks for huge pages for memory that has not been touched yet. Best effort.
    pub(super) fn prefer_huge(&self) {
        // SAFETY: advice about our own mapping; it does not change its content.
        let _ = unsafe { rustix::mm::madvise(self.base.cast(), self.len, Advice::LinuxHugepage) };
    }

    /// Asks for small pages only. Best effort.
    pub(super) fn avoid_huge(&self) {
        // SAFETY: as in `prefer_huge`.
        let _ = unsafe { rustix::mm::madvise(self.base.cast(), self.len, Advice::LinuxNoHugepage) };
    }

    /// Moves the bytes `index * HUGE_PAGE..(index + 1) * HUGE_PAGE` of the mapping into one huge
    /// page. Returns true if these bytes are in one huge page afterwards.
    pub(super) fn gather(&self, index: usize) -> bool {
        /// `MADV_COLLAPSE`, since Linux 6.1. It works with all settings for transparent huge pages
        /// except "deny".
        const COLLAPSE: libc::c_int = 25;
        if index >= self.len / HUGE_PAGE || !self.base.addr().is_multiple_of(HUGE_PAGE) {
            return false;
        }
        let at = self.base.wrapping_add(index * HUGE_PAGE);
        // SAFETY: advice about our own mapping, which keeps its content. The first call allocates
        // memory, because addresses without memory cannot be gathered.
        unsafe {
            rustix::mm::madvise(at.cast(), 4096, Advice::LinuxPopulateWrite).is_ok()
                && libc::madvise(at.cast(), HUGE_PAGE, COLLAPSE) == 0
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the owner of the mapping also owns everything that refers to the mapped memory.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

/// Maps `len` bytes at the address `at`: bytes of the memfd from an offset on, or private memory.
///
/// # Safety
/// With [`MapFlags::FIXED`], nothing may refer to the memory at `at` that the new mapping replaces.
unsafe fn map(at: *mut u8, len: usize, of: Option<(&OwnedFd, u64)>, flags: MapFlags) -> Result<*mut u8> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the caller's promise; a memfd's size is sealed, so no access can fault past its end.
    let base = unsafe {
        match of {
            Some((fd, start)) => {
                rustix::mm::mmap(at.cast(), len, access, flags | MapFlags::SHARED, fd, start)
            }
            None => rustix::mm::mmap_anonymous(at.cast(), len, access, flags | MapFlags::PRIVATE),
        }
    }?;
    Ok(base.cast())
}
