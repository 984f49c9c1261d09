//! Memory that is shared between processes, given to drives, or written by (emulated) DMA.
//!
//! An [`Arena`] is one page-aligned mapping: anonymous, or a memfd that another process maps too. [`ArenaBuf`] is
//! the exclusive use of a range of it. The reasons for `unsafe` are
//! three: `mmap` itself, slices of mapped memory, and the promise that two `ArenaBuf`s never overlap, which whoever
//! calls [`Arena::carve`] keeps (in this crate: [`crate::pool`]).
//!
//! **Memory another process can write.** A peer that holds the same memfd can change bytes under a slice at any time.
//! Control structures (ring entries, headers) are therefore never looked at in place: [`Arena::copy_out`] copies them
//! once, and the copy is validated and used. Payload is looked at in place, but only as uninterpreted bytes: nothing
//! that memory safety depends on is read from it, and checksums catch what changed.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Copies of at least that many bytes go past the caches.
#[cfg(target_arch = "x86_64")]
const PAST_CACHES: usize = 64 << 10;

/// Why memory could not be made or mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemError {
    /// The operating system refused.
    #[error(
        "cannot {action} {len} bytes of memory: {source}; lower the configured buffer sizes or raise the limit"
    )]
    Os {
        /// What was attempted.
        action: &'static str,
        /// Size asked for, in bytes.
        len: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// A memfd from a peer is not sealed against shrinking, or does not have the size that the peer announced.
    #[error(
        "memory offered by the peer is refused: {0}; the peer must send a memfd of the announced size, sealed against shrinking and growing"
    )]
    Refused(String),
}

/// One mapping of memory, page aligned, unmapped when the last handle and the last [`ArenaBuf`] are gone.
#[derive(Debug)]
pub struct Arena {
    base: *mut u8,
    len: usize,
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping is plain memory without thread affinity. Access goes through `ArenaBuf`s, which do not overlap,
// or through `copy_out`/`copy_in`, which copy bytes that no reference aliases (see there).
unsafe impl Send for Arena {}
// SAFETY: as for `Send`.
unsafe impl Sync for Arena {}

impl Arena {
    /// Private memory of `len` bytes, in transparent huge pages where the system gives any.
    ///
    /// # Errors
    /// If the system has not that much memory to give.
    pub fn anonymous(len: usize) -> Result<Arc<Arena>, MemError> {
        let len = round_to_pages(len);
        // SAFETY: a fresh private mapping; it aliases nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|e| os("map", len, e))?;
        let arena = Arena { base: base.cast(), len, fd: None };
        arena.advise_huge();
        Ok(Arc::new(arena))
    }

    /// Memory of `len` bytes behind a memfd called `name`, sealed so that nobody can change its size.
    ///
    /// # Errors
    /// If the system has not that much memory to give.
    pub fn shared(name: &str, len: usize) -> Result<Arc<Arena>, MemError> {
        let len = round_to_pages(len);
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| os("create", len, e))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(|e| os("size", len, e))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| os("seal", len, e))?;
        Arena::map(fd, len)
    }

    /// Maps a memfd that a peer made and announced as `len` bytes long.
    ///
    /// # Errors
    /// [`MemError::Refused`] unless it is sealed against shrinking and growing and has exactly that size.
    pub fn from_peer(fd: OwnedFd, len: usize) -> Result<Arc<Arena>, MemError> {
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|e| MemError::Refused(format!("its seals cannot be read ({e})")))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(MemError::Refused(format!("its seals are {seals:?}")));
        }
        let size = rustix::fs::fstat(&fd).map_err(|e| os("inspect", len, e))?.st_size;
        if u64::try_from(size) != Ok(len as u64) || len == 0 || len != round_to_pages(len) {
            return Err(MemError::Refused(format!("it is {size} bytes long, announced as {len}")));
        }
        Arena::map(fd, len)
    }

    fn map(fd: OwnedFd, len: usize) -> Result<Arc<Arena>, MemError> {
        // SAFETY: a fresh shared mapping of a memfd whose size is sealed, so no access can fault past its end.
        let base = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &fd, 0)
        }
        .map_err(|e| os("map", len, e))?;
        let arena = Arena { base: base.cast(), len, fd: Some(fd) };
        arena.advise_huge();
        Ok(Arc::new(arena))
    }

    /// A mapping of its own of a part of this memory, as a device's registration of it would be: the pages are there
    /// from the start.
    ///
    /// # Errors
    /// If the range is not made of whole pages inside the arena, the arena is private memory, or the system has no room.
    pub fn window(&self, range: std::ops::Range<usize>) -> Result<Arc<Arena>, MemError> {
        let pages = range.start.is_multiple_of(4096) && range.len().is_multiple_of(4096);
        let Some(fd) = self.fd.as_ref().filter(|_| pages && !range.is_empty() && range.end <= self.len)
        else {
            return Err(MemError::Refused(format!("{range:?} is no part of {} shared bytes", self.len)));
        };
        // SAFETY: a fresh shared mapping of a range that lies inside a memfd whose size is sealed.
        let base = unsafe {
            let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
            rustix::mm::mmap(std::ptr::null_mut(), range.len(), prot, flags, fd, range.start as u64)
        }
        .map_err(|e| os("map", range.len(), e))?;
        Ok(Arc::new(Arena { base: base.cast(), len: range.len(), fd: None }))
    }

    fn advise_huge(&self) {
        // Best effort: without huge pages everything works, with more CPU per direct write.
        // SAFETY: advice about our own mapping; it does not change its content.
        let _ = unsafe { rustix::mm::madvise(self.base.cast(), self.len, Advice::LinuxHugepage) };
    }

    /// Size in bytes, a multiple of the page size.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an arena has at least one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A duplicate of the memfd, to hand to a peer; `None` for anonymous memory.
    ///
    /// # Errors
    /// If the process is out of file descriptors.
    pub fn share_fd(&self) -> std::io::Result<Option<OwnedFd>> {
        self.fd
            .as_ref()
            .map(|fd| File::from(fd.as_fd().try_clone_to_owned()?).try_clone().map(OwnedFd::from))
            .transpose()
    }

    /// Where `bytes` lies in this arena, in bytes from its start; `None` if it is not (wholly) in it.
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

    /// Copies `out.len()` bytes at `offset` out of the arena: the only way to read what a peer may be writing.
    /// Returns `false`, having copied nothing, if the range is not inside the arena.
    #[must_use]
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) -> bool {
        if offset.checked_add(out.len()).is_none_or(|end| end > self.len) {
            return false;
        }
        // SAFETY: the source range was checked; `out` is a live exclusive slice of ours and no part of a mapping that
        // callers hold references into at this range (ring areas are never carved). A concurrent writer in another
        // process can only make the copied bytes arbitrary, which callers validate.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(offset), out.as_mut_ptr(), out.len()) };
        true
    }

    /// Copies `data` into the arena at `offset`: how a ring entry is written.
    /// Returns `false`, having copied nothing, if the range is not inside the arena.
    #[must_use]
    pub fn copy_in(&self, offset: usize, data: &[u8]) -> bool {
        if offset.checked_add(data.len()).is_none_or(|end| end > self.len) {
            return false;
        }
        // SAFETY: the destination range was checked, and callers write only areas that are never carved.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.base.add(offset), data.len()) };
        true
    }

    /// Copies `len` bytes from `src_offset` of `src` to `dst_offset` of `self`: the byte mover of an emulated DMA
    /// engine. Returns `false`, having copied nothing, if either range is not inside its arena.
    #[must_use]
    pub fn copy_from(&self, dst_offset: usize, src: &Arena, src_offset: usize, len: usize) -> bool {
        let outside = |offset: usize, limit: usize| offset.checked_add(len).is_none_or(|end| end > limit);
        if outside(dst_offset, self.len) || outside(src_offset, src.len) {
            return false;
        }
        // SAFETY: both ranges were checked. Like a DMA engine, this writes memory whose owner has promised not to touch it
        // until the completion.
        unsafe { copy_past_caches(src.base.add(src_offset), self.base.add(dst_offset), len) };
        true
    }

    /// The exclusive use of `len` bytes at `offset`; `release` runs when the last user is done.
    ///
    /// # Safety
    /// Until `release` has run, no other `ArenaBuf` of this arena may overlap the range, and nothing may
    /// `copy_in`/`copy_from` into it but a transfer that the holder of this buffer asked for.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub(crate) unsafe fn carve(self: &Arc<Self>, offset: usize, len: usize, release: Release) -> ArenaBuf {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "range outside the arena");
        ArenaBuf { arena: Arc::clone(self), offset, len, release: Some(release) }
    }
}

/// Copies `len` bytes; what is long goes past the caches, as a DMA engine's writes do: whoever reads it next is a drive
/// or another core, and lines that are written whole need not be read first.
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
        // SAFETY: both ranges are the caller's, `line` is inside, and `dst` is aligned; SSE2 is part of x86-64.
        unsafe {
            let lanes: [__m128i; 4] =
                std::array::from_fn(|i| _mm_loadu_si128(src.add(line + i * LANE).cast()));
            for (i, lane) in lanes.into_iter().enumerate() {
                _mm_stream_si128(dst.add(line + i * LANE).cast(), lane);
            }
        }
    }
    // Such writes are weakly ordered: they must be seen before the completion is.
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

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: every `ArenaBuf` holds an `Arc` of the arena, so nothing refers to the mapping any more.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

/// What returns a range to its allocator.
pub(crate) type Release = Box<dyn FnOnce() + Send + Sync>;

/// The exclusive use of a range of an [`Arena`]: writable until frozen into shared [`Bytes`], returned to its
/// allocator when the last user drops it.
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

    /// Whether the buffer has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes from the start of the arena.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The arena that the buffer is part of.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Shortens the buffer to its first `len` bytes; the whole range is still returned together.
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
        // SAFETY: `carve`'s contract makes the range ours alone and it was checked against the mapping.
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

fn os(action: &'static str, len: usize, e: rustix::io::Errno) -> MemError {
    MemError::Os { action, len, source: e.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn copies_of_every_length_and_alignment_are_exact() {
        const LEN: usize = 256 << 10;
        let (from, to) = (Arena::anonymous(LEN).unwrap(), Arena::anonymous(LEN).unwrap());
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
    fn a_peer_can_neither_shrink_memory_nor_offer_memory_that_can_shrink() {
        let ours = Arena::shared("test", 8192).unwrap();
        let fd = ours.share_fd().unwrap().unwrap();
        assert!(rustix::fs::ftruncate(&fd, 4096).is_err(), "the seal holds");
        let loose = rustix::fs::memfd_create("loose", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&loose, 8192).unwrap();
        assert!(matches!(Arena::from_peer(loose, 8192), Err(MemError::Refused(_))));
        assert!(matches!(Arena::from_peer(fd, 12288), Err(MemError::Refused(_))), "wrong size");
    }
}
