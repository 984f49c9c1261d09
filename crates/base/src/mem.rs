//! Memory that is shared between processes, or is accessed by drives or by real or emulated DMA.
//!
//! An [`Arena`] is one page-aligned mapping: anonymous, or a memfd that another process maps, too.
//! An [`ArenaBuf`] is a buffer with exclusive use of a range of an arena. [`DeviceMemory`] is
//! another mapping of the same bytes, for an emulated device. `unsafe` code is needed for four
//! things: `mmap` itself, slices of mapped memory, copies of bytes that other threads or processes
//! may be writing, and the promise that two `ArenaBuf`s never overlap. The caller of `Arena::carve`
//! keeps that promise (in this crate: [`crate::pool`]).
//!
//! [`guarded`] maps memory of front ends, such as virtual machine monitors, which cannot be forced to
//! seal the size of their memory.
//!
//! **Huge pages.** The cost of direct I/O grows with the number of pages. Shared memory uses 2 MiB
//! pages that the administrator has set aside, if enough are free. Otherwise it uses ordinary
//! memory. [`Arena::gather`] moves ordinary memory into huge pages, which takes time but needs no
//! system setting.
//!
//! **Outside access.** Devices, peers and other mappings access memory without regard to the
//! references of this process. Without further steps, they get only pages that no allocator owns
//! ([`Arena::admit`]). This process accesses these pages only by copies, so outside access needs no
//! contract. [`OutsideAccess`] is the right to give them an arena with buffers, and states the
//! contract.
//!
//! **Memory that another process can write.** A peer with the same memfd can violate that contract
//! and change bytes under a slice at any time. No code of this process can prevent the change. Code
//! therefore never reads control structures (ring entries, headers) in place: [`Arena::copy_out`]
//! copies them once, and the code validates and uses the copy. Code reads payload in place, but
//! only as uninterpreted bytes. Memory safety never depends on payload, and checksums detect
//! changes of payload.

mod concurrent;
mod device;
pub mod guarded;
mod mapping;
mod outside;
mod uses;

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

pub use device::DeviceMemory;
pub use mapping::HUGE_PAGE;
use mapping::Mapping;
pub use outside::OutsideAccess;
use uses::Uses;

/// `f_type` of the file system of huge pages, statfs(2).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Number of attempts to move memory that is in use into huge pages, and the pause between two
/// attempts.
const GATHER_ATTEMPTS: u32 = 5;
const GATHER_PAUSE: Duration = Duration::from_millis(10);

/// Why memory could not be allocated or mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemError {
    /// The operating system refused the operation.
    #[error(
        "cannot {action} {len} bytes of memory: {source}; lower the configured buffer sizes or raise the limit"
    )]
    Os {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// Requested size, in bytes.
        len: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// A memfd from a peer is not sealed against shrinking, or does not have the size that the peer
    /// announced. Also returned for a range that cannot be mapped for a device.
    #[error(
        "memory offered by the peer is refused: {0}; the peer must send a memfd of the announced size, sealed against shrinking and growing"
    )]
    Refused(String),
    /// A device or a peer would get access to a buffer's memory.
    #[error(
        "an allocator owns pages in the {len} bytes at offset {offset} of an arena; devices and peers get access to buffers only by an OutsideAccess"
    )]
    Allocated {
        /// Start of the range, in bytes from the start of the arena.
        offset: usize,
        /// Length of the range, in bytes.
        len: usize,
    },
}

/// One page-aligned mapping of memory. It is unmapped when the last handle and the last
/// [`ArenaBuf`] have been dropped.
#[derive(Debug)]
pub struct Arena {
    base: *mut u8,
    /// Number of usable bytes. The mapping may be longer: it may end with a whole huge page.
    len: usize,
    fd: Option<OwnedFd>,
    /// Size of a huge page in bytes, if the memory is in huge pages that were set aside.
    page: Option<usize>,
    /// Number of [`ArenaRegistration`]s of this arena.
    registrations: AtomicUsize,
    /// Which pages are copied in and out, and which pages allocators own.
    uses: Uses,
    mapping: Mapping,
}

/// A handle to an arena that only records a registration of the memory with the kernel or a device.
#[derive(Debug)]
pub struct ArenaRegistration {
    arena: Arc<Arena>,
}

impl ArenaRegistration {
    /// Adds a registration of `arena`.
    #[must_use]
    pub fn new(arena: &Arc<Arena>) -> ArenaRegistration {
        let arena = Arc::clone(arena);
        arena.registrations.fetch_add(1, Ordering::SeqCst);
        ArenaRegistration { arena }
    }

    /// The memory.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Returns true if registrations are the only handles to the memory. While other threads create
    /// or drop handles, the result may be `false` although only registrations are left. It is never
    /// `true` while another handle exists.
    #[must_use]
    pub fn is_all_there_is(&self) -> bool {
        // A registration is counted only after its handle was created, and is no longer counted
        // when its handle is dropped. So there are never more counted registrations than handles.
        // If the two numbers are equal, and the number of registrations did not change while they
        // were compared, there is no other handle.
        let registrations = self.arena.registrations.load(Ordering::SeqCst);
        Arc::strong_count(&self.arena) == registrations
            && self.arena.registrations.load(Ordering::SeqCst) == registrations
    }
}

impl Drop for ArenaRegistration {
    fn drop(&mut self) {
        self.arena.registrations.fetch_sub(1, Ordering::SeqCst);
    }
}

// SAFETY: the mapping is plain memory without thread affinity. Its pages are accessed either
// through `ArenaBuf`s, which do not overlap, or by `copy_out` and `copy_in`, which are defined even
// if other threads access the same bytes.
unsafe impl Send for Arena {}
// SAFETY: as for `Send`.
unsafe impl Sync for Arena {}

impl Arena {
    /// Allocates `len` bytes of private memory, in transparent huge pages if the system has any.
    ///
    /// # Errors
    /// If the system does not have enough memory.
    pub fn anonymous(len: usize) -> Result<Arc<Arena>, MemError> {
        let len = round_to_pages(len);
        let mapping = Mapping::new(None, len).map_err(|e| os("map", len, e))?;
        mapping.prefer_huge();
        Ok(Arena::of(mapping, len, None, None))
    }

    /// Allocates `len` bytes of private memory in small pages. Pages that are never touched use no
    /// memory.
    ///
    /// # Errors
    /// If the system does not have enough memory.
    pub fn by_pages(len: usize) -> Result<Arc<Arena>, MemError> {
        let len = round_to_pages(len);
        let mapping = Mapping::new(None, len).map_err(|e| os("map", len, e))?;
        mapping.avoid_huge();
        Ok(Arena::of(mapping, len, None, None))
    }

    /// Allocates `len` bytes of shared memory behind a memfd called `name`, sealed against changes
    /// of its size. Uses huge pages that were set aside, if enough of them are free.
    ///
    /// # Errors
    /// If the system does not have enough memory.
    pub fn shared(name: &str, len: usize) -> Result<Arc<Arena>, MemError> {
        let len = round_to_pages(len);
        match Arena::set_aside(name, len) {
            Some(arena) => Ok(arena),
            None => Arena::ordinary(name, len),
        }
    }

    /// Allocates shared memory in huge pages that were set aside. Returns `None` if too few huge
    /// pages are free, or if `len` is less than one huge page.
    fn set_aside(name: &str, len: usize) -> Option<Arc<Arena>> {
        if len < HUGE_PAGE {
            return None;
        }
        let flags =
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let fd = rustix::fs::memfd_create(name, flags).ok()?;
        let size = len.checked_next_multiple_of(HUGE_PAGE)? as u64;
        rustix::fs::ftruncate(&fd, size).ok()?;
        // Allocate the pages now. If a page were missing later, touching it would kill the process.
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, size).ok()?;
        seal(&fd).ok()?;
        Arena::map(fd, len).ok()
    }

    fn ordinary(name: &str, len: usize) -> Result<Arc<Arena>, MemError> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| os("create", len, e))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(|e| os("size", len, e))?;
        seal(&fd).map_err(|e| os("seal", len, e))?;
        Arena::map(fd, len)
    }

    /// Maps a memfd from a peer, which announced `len` bytes. No allocator can own pages of the
    /// arena, because the peer can change the bytes at any time.
    ///
    /// # Errors
    /// [`MemError::Refused`] unless the memfd is sealed against shrinking and growing, and has
    /// exactly the announced size. A memfd in huge pages must have the announced size, rounded up
    /// to whole huge pages.
    pub fn from_peer(fd: OwnedFd, len: usize) -> Result<Arc<Arena>, MemError> {
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|e| MemError::Refused(format!("its seals cannot be read ({e})")))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(MemError::Refused(format!("its seals are {seals:?}")));
        }
        let size = rustix::fs::fstat(&fd).map_err(|e| os("inspect", len, e))?.st_size;
        let page = huge_page_of(&fd).map_err(|e| os("inspect", len, e))?;
        let due = len.checked_next_multiple_of(page.unwrap_or(1)).filter(|_| len > 0 && is_in_pages(len));
        if due.is_none_or(|due| u64::try_from(size) != Ok(due as u64)) {
            return Err(MemError::Refused(format!(
                "the memory file has {size} bytes, but the peer announced {len}"
            )));
        }
        let arena = Arena::map(fd, len)?;
        arena.admit(0, len)?;
        Ok(arena)
    }

    /// Maps all of a memfd. The memfd has `len` bytes, rounded up to whole huge pages if it is in
    /// huge pages.
    fn map(fd: OwnedFd, len: usize) -> Result<Arc<Arena>, MemError> {
        let page = huge_page_of(&fd).map_err(|e| os("inspect", len, e))?;
        let size = len.next_multiple_of(page.unwrap_or(1));
        let mapping = Mapping::new(Some(&fd), size).map_err(|e| os("map", size, e))?;
        if page.is_none() {
            mapping.prefer_huge();
        }
        Ok(Arena::of(mapping, len, Some(fd), page))
    }

    /// Maps a part of this memory a second time, by a call of `map`. Returns the mapping, and the
    /// offset of the part in the mapping.
    fn map_again(
        &self,
        range: Range<usize>,
        map: fn(&OwnedFd, Range<usize>) -> rustix::io::Result<Mapping>,
    ) -> Result<(Mapping, usize), MemError> {
        let pages = is_in_pages(range.start) && is_in_pages(range.len());
        let Some(fd) = self.fd.as_ref().filter(|_| pages && !range.is_empty() && range.end <= self.len)
        else {
            return Err(MemError::Refused(format!(
                "{range:?} is not a range of whole pages in {} shared bytes",
                self.len
            )));
        };
        // Huge pages that were set aside can only be mapped as a whole.
        let page = self.page.unwrap_or(1);
        let whole = range.start - range.start % page..range.end.next_multiple_of(page);
        let before = range.start - whole.start;
        let mapping = map(fd, whole).map_err(|e| os("map", range.len(), e))?;
        Ok((mapping, before))
    }

    fn of(mapping: Mapping, len: usize, fd: Option<OwnedFd>, page: Option<usize>) -> Arc<Arena> {
        let (registrations, uses) = (AtomicUsize::new(0), Uses::new(len));
        let arena = Arc::new(Arena { base: mapping.base(), len, fd, page, registrations, uses, mapping });
        enter(&arena);
        arena
    }

    /// Returns the arena of this process that contains all of `bytes`, if there is one. The code of
    /// a device uses this function to find the memory of data to send, because callers pass data as
    /// [`bytes::Bytes`].
    #[must_use]
    pub fn containing(bytes: &[u8]) -> Option<Arc<Arena>> {
        let start = bytes.as_ptr() as usize;
        let arena = arenas().range(..=start).next_back().and_then(|(_, arena)| arena.upgrade())?;
        arena.offset_of(bytes).map(|_| arena)
    }

    /// Returns true if the memory is in huge pages that the administrator has set aside.
    #[must_use]
    pub fn is_set_aside(&self) -> bool {
        self.page.is_some()
    }

    /// Moves the memory into huge pages as far as possible. Returns the number of bytes that are
    /// then in huge pages.
    ///
    /// The call allocates all pages of the memory. It takes milliseconds per huge page. Other
    /// threads can use the memory during the call. The call retries a huge page that is in use a
    /// few times.
    pub fn gather(&self) -> usize {
        if self.is_set_aside() {
            return self.len;
        }
        let mut scattered: Vec<usize> = (0..self.len / HUGE_PAGE).collect();
        for attempt in 0..GATHER_ATTEMPTS {
            if attempt > 0 && !scattered.is_empty() {
                std::thread::sleep(GATHER_PAUSE);
            }
            scattered.retain(|&index| !self.mapping.gather(index));
        }
        (self.len / HUGE_PAGE - scattered.len()) * HUGE_PAGE
    }

    /// Size in bytes, a multiple of the page size.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always returns false: an arena has at least one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a duplicate of the memfd for a peer, or `None` for anonymous memory. No allocator can
    /// own pages of the arena after this call. See also [`OutsideAccess::share_fd`].
    ///
    /// # Errors
    /// If an allocator already owns pages of the arena, or if the process is out of file
    /// descriptors.
    pub fn share_fd(&self) -> std::io::Result<Option<OwnedFd>> {
        if self.fd.is_some() {
            self.admit(0, self.len).map_err(std::io::Error::other)?;
        }
        self.duplicate_fd()
    }

    fn duplicate_fd(&self) -> std::io::Result<Option<OwnedFd>> {
        self.fd
            .as_ref()
            .map(|fd| File::from(fd.as_fd().try_clone_to_owned()?).try_clone().map(OwnedFd::from))
            .transpose()
    }

    /// Admits outside access to the `len` bytes at `offset`: by devices, by peers and by other
    /// mappings. No allocator can own the pages of these bytes afterwards.
    ///
    /// # Errors
    /// [`MemError::Allocated`] if an allocator already owns one of the pages, or if the range is not
    /// inside the arena.
    pub fn admit(&self, offset: usize, len: usize) -> Result<(), MemError> {
        let end = offset.checked_add(len).filter(|&end| end <= self.len);
        let is_admitted = end.is_some_and(|end| self.uses.claim_for_copies(offset..end));
        if is_admitted { Ok(()) } else { Err(MemError::Allocated { offset, len }) }
    }

    /// Returns the offset of `bytes` in this arena, in bytes; `None` if the arena does not contain
    /// all of `bytes`.
    #[must_use]
    pub fn offset_of(&self, bytes: &[u8]) -> Option<usize> {
        let offset = (bytes.as_ptr() as usize).checked_sub(self.base as usize)?;
        (offset.checked_add(bytes.len())? <= self.len).then_some(offset)
    }

    /// Address and length of the mapping, for registering it with the kernel or a device.
    #[must_use]
    pub fn as_raw(&self) -> (*mut u8, usize) {
        (self.base, self.len)
    }

    /// Copies `out.len()` bytes at `offset` out of the arena. This is the only way to read bytes
    /// that a peer or another thread may be writing. Bytes that change during the copy have
    /// arbitrary values in `out`.
    ///
    /// Returns `false` and copies nothing if the range is not inside the arena, or if one of its
    /// pages belongs to an allocator. After a copy, no allocator can own these pages any more.
    #[must_use]
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) -> bool {
        let Some(at) = self.copied(offset, out.len()) else { return false };
        // SAFETY: the source is inside the mapping, and its pages are accessed only by these
        // copies. No slice of these pages exists, so `out` is not one either. `out` is borrowed
        // exclusively.
        unsafe { concurrent::copy(at, out.as_mut_ptr(), out.len()) };
        true
    }

    /// Copies `data` into the arena at `offset`, for example a ring entry. After concurrent copies
    /// into the same bytes, each byte has the value from one of the copies.
    ///
    /// Returns `false` and copies nothing if the range is not inside the arena, or if one of its
    /// pages belongs to an allocator. After a copy, no allocator can own these pages any more.
    #[must_use]
    pub fn copy_in(&self, offset: usize, data: &[u8]) -> bool {
        let Some(at) = self.copied(offset, data.len()) else { return false };
        // SAFETY: as in `copy_out`, with source and destination exchanged. `data` is borrowed, so
        // it does not change.
        unsafe { concurrent::copy(data.as_ptr(), at, data.len()) };
        true
    }

    /// Claims the pages of `len` bytes at `offset` for copies, and returns the address of the
    /// bytes. Returns `None` if the bytes are not inside the arena, or an allocator owns one of the
    /// pages.
    fn copied(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len).filter(|&end| end <= self.len)?;
        self.uses.claim_for_copies(offset..end).then(|| self.base.wrapping_add(offset))
    }

    /// Assigns `len` bytes at `offset` to an allocator, which may [`carve`](Self::carve) them.
    ///
    /// # Panics
    /// If the range is not inside the arena, or one of its pages is used already: it belongs to
    /// another allocator, or bytes of it were copied in or out.
    pub(crate) fn allocate_from(&self, offset: usize, len: usize) {
        let end = offset.checked_add(len).filter(|&end| end <= self.len).expect("range outside the arena");
        assert!(
            self.uses.claim_for_allocator(offset..end),
            "bytes {offset}..{end} of an arena are in use already"
        );
    }

    /// Returns a buffer with exclusive use of `len` bytes at `offset`. `release` runs when the last
    /// user drops the bytes.
    ///
    /// # Safety
    /// The range must have been assigned to the caller by [`allocate_from`](Self::allocate_from).
    /// Until `release` has run, no other `ArenaBuf` of this arena may overlap it.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub(crate) unsafe fn carve(self: &Arc<Self>, offset: usize, len: usize, release: Release) -> ArenaBuf {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "range outside the arena");
        ArenaBuf { arena: Arc::clone(self), offset, len, release: Some(release) }
    }
}

/// Callback that returns a range to its allocator.
pub(crate) type Release = Box<dyn FnOnce() + Send + Sync>;

/// A buffer with exclusive use of a range of an [`Arena`]. It is writable until it is frozen into
/// shared [`Bytes`]. The range returns to its allocator when the last user drops it.
pub struct ArenaBuf {
    arena: Arc<Arena>,
    offset: usize,
    len: usize,
    release: Option<Release>,
}

impl ArenaBuf {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the buffer has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Offset of the buffer from the start of the arena, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The arena that the buffer is part of.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Shortens the buffer to its first `len` bytes. On release, the allocator still gets the whole
    /// range.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Makes the content immutable and shareable without a copy.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl std::fmt::Debug for ArenaBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArenaBuf")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl std::ops::Deref for ArenaBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: by the contract of `carve`, no other buffer uses the range. By the contract of
        // `OutsideAccess::new`, no outside access changes it. `carve` has checked that the range is
        // inside the mapping.
        unsafe { std::slice::from_raw_parts(self.arena.base.add(self.offset), self.len) }
    }
}

impl std::ops::DerefMut for ArenaBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.arena.base.add(self.offset), self.len) }
    }
}

impl AsRef<[u8]> for ArenaBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for ArenaBuf {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release();
        }
    }
}

fn round_to_pages(len: usize) -> usize {
    len.max(1).next_multiple_of(4096)
}

fn is_in_pages(len: usize) -> bool {
    len.is_multiple_of(4096)
}

/// Forbids all later changes of the memfd's size.
fn seal(fd: &OwnedFd) -> rustix::io::Result<()> {
    rustix::fs::fcntl_add_seals(fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
}

/// Returns the page size of a memfd in bytes if it consists of huge pages that were set aside.
fn huge_page_of(fd: &OwnedFd) -> rustix::io::Result<Option<usize>> {
    let fs = rustix::fs::fstatfs(fd)?;
    // The width and the sign of both fields depend on the architecture.
    let is_huge = fs.f_type as u64 & 0xffff_ffff == HUGETLBFS_MAGIC;
    Ok(is_huge.then_some(fs.f_bsize as usize))
}

fn os(action: &'static str, len: usize, e: rustix::io::Errno) -> MemError {
    MemError::Os { action, len, source: e.into() }
}

/// All arenas of the process, by the address of their first byte. Arenas do not overlap. The weak
/// handle of a dropped arena stays until the next arena is created.
static ARENAS: Mutex<BTreeMap<usize, Weak<Arena>>> = Mutex::new(BTreeMap::new());

fn arenas() -> MutexGuard<'static, BTreeMap<usize, Weak<Arena>>> {
    // No code panics while it holds the lock.
    ARENAS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a new arena to `ARENAS`.
fn enter(arena: &Arc<Arena>) {
    let mut arenas = arenas();
    arenas.retain(|_, arena| arena.strong_count() > 0);
    arenas.insert(arena.as_raw().0 as usize, Arc::downgrade(arena));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{BufferPool, Lease};

    #[test]
    fn two_mappings_of_one_memfd_see_the_same_bytes() {
        let ours = Arena::shared("test", 8192).unwrap();
        let theirs = Arena::from_peer(ours.share_fd().unwrap().unwrap(), 8192).unwrap();
        assert!(ours.copy_in(5000, b"hello"));
        let mut out = [0; 5];
        assert!(theirs.copy_out(5000, &mut out));
        assert_eq!(&out, b"hello");
        assert!(!theirs.copy_out(8190, &mut out), "a range past the end is refused");
        assert!(!theirs.copy_in(usize::MAX, b"x"), "an overflowing range is refused");
    }

    #[test]
    fn is_all_there_is_returns_true_only_if_all_handles_are_registrations() {
        let arena = Arena::anonymous(4096).unwrap();
        let (one, other) = (ArenaRegistration::new(&arena), ArenaRegistration::new(&arena));
        assert!(!one.is_all_there_is() && !other.is_all_there_is());
        drop(arena);
        assert!(one.is_all_there_is() && other.is_all_there_is());
        let used = Arc::clone(one.arena());
        assert!(!other.is_all_there_is());
        drop((used, one));
        assert!(other.is_all_there_is());
    }

    #[test]
    fn device_copies_are_exact_for_any_length_and_alignment() {
        const LEN: usize = 256 << 10;
        let (from, to) = (DeviceMemory::private(LEN).unwrap(), DeviceMemory::private(LEN).unwrap());
        let bytes: Vec<u8> = (0..LEN).map(|i| (i * 31 + (i >> 8)) as u8).collect();
        assert!(from.copy_in(0, &bytes));
        for (src, dst, len) in [
            (0, 0, LEN),
            (0, 64, 128 << 10),
            (1, 128, 64 << 10),
            (3, 5, 100_003),
            (64, 0, (64 << 10) - 64),
            (4096, 4096, (64 << 10) + 64),
        ] {
            assert!(to.copy_in(0, &vec![0xee; LEN]));
            assert!(to.copy_from(dst, &from, src, len));
            let mut out = vec![0; LEN];
            assert!(to.copy_out(0, &mut out));
            assert_eq!(out[dst..dst + len], bytes[src..src + len], "{len} from {src} to {dst}");
            assert!(out[..dst].iter().chain(&out[dst + len..]).all(|b| *b == 0xee), "nothing else changed");
        }
        assert!(from.copy_from(64, &from, 0, 128 << 10), "ranges may overlap");
        let mut out = vec![0; 128 << 10];
        assert!(from.copy_out(64, &mut out));
        assert_eq!(out, bytes[..128 << 10]);
    }

    #[test]
    fn pages_of_an_allocator_are_not_copied_and_copied_pages_are_not_allocated() {
        let arena = Arena::anonymous(16384).unwrap();
        assert!(arena.copy_in(4095, b"x"));
        let _pool = BufferPool::new(Arc::clone(&arena), 8192, 4096);
        assert!(!arena.copy_in(8191, b"xy") && !arena.copy_out(8192, &mut [0]), "the pool owns these pages");
        assert!(arena.copy_in(8191, b"x"));
        for taken in [0, 4096, 8192, 12288] {
            let arena = Arc::clone(&arena);
            let second = std::panic::catch_unwind(|| Lease::new(arena, taken, 4096));
            assert!(second.is_err(), "page {taken} is in use");
        }
    }

    #[test]
    fn a_device_accesses_the_bytes_of_an_arena_through_its_own_addresses() {
        let arena = Arena::shared("test", 16384).unwrap();
        // SAFETY: the devices and this thread access the buffer in turn.
        let access = unsafe { OutsideAccess::new(&arena) };
        let mut buf = BufferPool::new(Arc::clone(&arena), 8192, 4096).try_alloc(4096).unwrap().unwrap();
        let (whole, part) = (access.for_device(0..16384).unwrap(), access.for_device(4096..16384).unwrap());
        assert!(whole.copy_in(100, b"payload") && part.copy_from(4096, &whole, 100, 7));
        assert_eq!(&buf[..7], b"payload");
        buf[0] = 0x0f;
        assert!(part.invert(4096));
        assert_eq!(buf[0], 0xf0);
        assert!(
            !part.invert(12288)
                && !part.copy_from(12288, &whole, 0, 1)
                && !whole.copy_from(0, &part, 12288, 1)
        );
        assert!(
            Arena::anonymous(4096).unwrap().for_device(0..4096).is_err(),
            "private memory cannot be mapped a second time"
        );
    }

    #[test]
    fn outside_access_to_an_allocators_pages_is_refused() {
        let arena = Arena::shared("test", 16384).unwrap();
        let _pool = BufferPool::new(Arc::clone(&arena), 8192, 4096);
        let refused = |range| matches!(arena.for_device(range), Err(MemError::Allocated { .. }));
        assert!(refused(8192..12288) && refused(4096..12288));
        assert!(arena.share_fd().is_err() && arena.admit(8191, 2).is_err());
        assert!(OutsideAccess::of_copied(&arena).is_err());
        assert!(arena.pinned_for_device(0..8192).is_ok() && arena.admit(8191, 1).is_ok());
        assert!(arena.admit(16384, 1).is_err() && arena.admit(usize::MAX, 2).is_err());

        let given = Arena::shared("test", 8192).unwrap();
        let theirs = Arena::from_peer(given.share_fd().unwrap().unwrap(), 8192).unwrap();
        for arena in [given, theirs] {
            let allocator = std::panic::catch_unwind(|| Lease::new(arena, 0, 4096));
            assert!(allocator.is_err(), "the other mapping can change bytes under a buffer");
        }
    }

    #[test]
    fn a_peer_can_neither_shrink_memory_nor_offer_memory_that_can_shrink() {
        let ours = Arena::shared("test", 8192).unwrap();
        let fd = ours.share_fd().unwrap().unwrap();
        assert!(rustix::fs::ftruncate(&fd, 4096).is_err(), "the seal forbids shrinking");
        let loose = rustix::fs::memfd_create("loose", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&loose, 8192).unwrap();
        assert!(matches!(Arena::from_peer(loose, 8192), Err(MemError::Refused(_))));
        assert!(matches!(Arena::from_peer(fd, 12288), Err(MemError::Refused(_))), "wrong size");
    }

    #[test]
    fn from_peer_refuses_lengths_that_no_memfd_can_have() {
        for len in [0, 1, 8191, usize::MAX, usize::MAX - 4095] {
            let fd = Arena::shared("test", 8192).unwrap().share_fd().unwrap().unwrap();
            assert!(matches!(Arena::from_peer(fd, len), Err(MemError::Refused(_))), "{len}");
        }
    }

    /// A memory size that needs three huge pages, and does not fill the last one.
    const LARGE: usize = 2 * HUGE_PAGE + 8192;

    fn is_one_memory(ours: &Arc<Arena>, theirs: &Arc<Arena>) {
        assert_eq!((ours.len(), theirs.len()), (LARGE, LARGE));
        for at in [0, HUGE_PAGE - 3, LARGE - 6] {
            assert!(ours.copy_in(at, b"abcdef"));
            let mut seen = [0; 6];
            assert!(theirs.copy_out(at, &mut seen));
            assert_eq!(&seen, b"abcdef");
        }
        assert!(
            !ours.copy_in(LARGE - 5, b"abcdef"),
            "the bytes of the last huge page beyond the length are not accessible"
        );
        for range in [0..LARGE, 4096..8192, HUGE_PAGE - 4096..2 * HUGE_PAGE + 4096, LARGE - 4096..LARGE] {
            let part = ours.pinned_for_device(range.clone()).unwrap();
            assert!(ours.copy_in(range.start, b"first") && ours.copy_in(range.end - 4, b"last"));
            let (mut first, mut last) = ([0; 5], [0; 4]);
            assert!(part.copy_out(0, &mut first) && part.copy_out(range.len() - 4, &mut last));
            assert_eq!((&first, &last), (b"first", b"last"), "{range:?}");
            assert!(!part.copy_out(range.len() - 3, &mut last));
        }
        assert!(ours.pinned_for_device(LARGE - 4096..LARGE + 4096).is_err());
    }

    #[test]
    #[ignore = "needs 8 free huge pages: echo 8 > /proc/sys/vm/nr_hugepages"]
    fn huge_pages_that_are_set_aside_are_used_and_can_be_mapped_by_a_peer() {
        let ours = Arena::set_aside("test", LARGE).expect("free huge pages");
        assert!(ours.is_set_aside());
        assert_eq!(ours.gather(), LARGE);
        let fd = || ours.share_fd().unwrap().unwrap();
        is_one_memory(&ours, &Arena::from_peer(fd(), LARGE).unwrap());
        for wrong in [LARGE - HUGE_PAGE, LARGE + HUGE_PAGE, HUGE_PAGE, 4096] {
            assert!(matches!(Arena::from_peer(fd(), wrong), Err(MemError::Refused(_))), "{wrong}");
        }
        assert!(rustix::fs::ftruncate(fd(), HUGE_PAGE as u64).is_err(), "the seal forbids shrinking");
    }

    #[test]
    fn more_huge_pages_than_are_set_aside_cannot_be_allocated() {
        assert!(Arena::set_aside("test", 1 << 46).is_none());
        assert!(Arena::set_aside("test", HUGE_PAGE - 4096).is_none(), "a huge page would be partly wasted");
    }

    /// Gathers anonymous memory and shared memory, and checks that both keep their content. Returns
    /// how many bytes of each are then in huge pages.
    fn gathered() -> [usize; 2] {
        let shared = Arena::ordinary("test", LARGE).unwrap();
        let theirs = Arena::from_peer(shared.share_fd().unwrap().unwrap(), LARGE).unwrap();
        [Arena::anonymous(LARGE).unwrap(), shared].map(|arena| {
            assert!(!arena.is_set_aside());
            assert!(arena.as_raw().0.addr().is_multiple_of(HUGE_PAGE));
            for at in (0..LARGE).step_by(4096) {
                assert!(arena.copy_in(at, &at.to_le_bytes()));
            }
            let huge = arena.gather();
            for at in (0..LARGE).step_by(4096) {
                let mut seen = [0; 8];
                assert!(arena.copy_out(at, &mut seen));
                assert_eq!(usize::from_le_bytes(seen), at);
            }
            if arena.share_fd().unwrap().is_some() {
                is_one_memory(&arena, &theirs);
            }
            huge
        })
    }

    #[test]
    fn gathering_ordinary_memory_keeps_its_content() {
        assert!(gathered().iter().all(|huge| *huge <= 2 * HUGE_PAGE));
    }

    #[test]
    #[ignore = "needs Linux 6.1 and memory that is not too fragmented"]
    fn ordinary_memory_is_gathered_into_transparent_huge_pages() {
        assert_eq!(gathered(), [2 * HUGE_PAGE; 2]);
    }

    #[test]
    fn containing_finds_only_the_arena_that_contains_the_bytes() {
        let arenas = [Arena::anonymous(1 << 20).unwrap(), Arena::anonymous(1 << 20).unwrap()];
        for arena in &arenas {
            let pool = BufferPool::new(Arc::clone(arena), 0, 64 << 10);
            let bytes = pool.try_alloc(5000).unwrap().unwrap().freeze();
            assert!(Arc::ptr_eq(&Arena::containing(&bytes[10..4000]).unwrap(), arena));
        }
        assert!(Arena::containing(&[1, 2, 3]).is_none());
        let bytes = BufferPool::new(Arena::anonymous(1 << 20).unwrap(), 0, 4096).try_alloc(1).unwrap();
        assert!(Arena::containing(&bytes.unwrap()).is_some());
    }
}
