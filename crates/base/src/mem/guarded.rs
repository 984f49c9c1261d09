//! [`GuardedMapping`]: a mapping of a file that an untrusted process can shrink.
//!
//! An access after the end of a shrunk file raises SIGBUS, which kills the process by default. A
//! front end such as a virtual machine monitor cannot be forced to seal its memory. So the first
//! [`GuardedMapping`] of a process installs a handler of SIGBUS. If the faulting address is in a
//! guarded mapping, the handler marks the mapping as broken, and replaces it by anonymous memory
//! that reads as zeros. The interrupted access then continues. The owner of the mapping checks
//! [`GuardedMapping::is_broken`] after its accesses, and before it uses their results. All other
//! signals go to the handler that was installed before, which by default ends the process.
//!
//! The handler reads a table of fixed size with atomic operations only. It takes no locks and
//! allocates nothing, so it is async-signal-safe (signal-safety(7)). A single replacement covers the
//! whole mapping. So a front end that shrinks a large file costs one fault, and does not use up the
//! mappings of the process.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use libc::{c_int, c_void, siginfo_t};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Maximum number of guarded mappings in a process.
pub const GUARDED_MAX: usize = 32 << 10;

/// `f_type` of the file system of huge pages, statfs(2).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Size of the smallest page of all supported processors, in bytes.
const PAGE: u64 = 4096;

/// Why a file could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// The range to map is empty, or lies outside the file.
    #[error("{len} bytes at offset {offset} are not a range of the memory file, which has {size} bytes")]
    OutsideFile {
        /// Start of the range in the file, in bytes.
        offset: u64,
        /// Length of the range, in bytes.
        len: u64,
        /// Size of the file, in bytes.
        size: u64,
    },
    /// The process has too many guarded mappings.
    #[error("the process already has {GUARDED_MAX} mappings of memory of other processes")]
    TooMany,
    /// The operating system refused the operation.
    #[error("cannot {action} the memory file: {source}")]
    Os {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A shared, readable and writable mapping of a range of a file. See the [module](self).
///
/// The other process may change the bytes at any time. Code must access them only through raw
/// pointers, by copies or by atomic operations, and never through references.
#[derive(Debug)]
pub struct GuardedMapping {
    /// Address of the first byte of the range. The mapping may begin earlier, at a page boundary.
    base: *mut u8,
    len: usize,
    index: usize,
}

// SAFETY: the mapping is plain memory without thread affinity. This type only hands out its address.
unsafe impl Send for GuardedMapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for GuardedMapping {}

impl GuardedMapping {
    /// Maps `len` bytes at `offset` of `file`, which may be in huge pages.
    ///
    /// # Errors
    /// If the range is empty or outside the file, or the operating system refuses the mapping.
    pub fn new(file: impl AsFd, offset: u64, len: u64) -> Result<GuardedMapping, GuardError> {
        let file = file.as_fd();
        let refused = |action| move |e: rustix::io::Errno| GuardError::Os { action, source: e.into() };
        let size = rustix::fs::fstat(file).map_err(refused("inspect"))?.st_size.cast_unsigned();
        let end = offset.checked_add(len).filter(|end| len > 0 && *end <= size);
        let outside = || GuardError::OutsideFile { offset, len, size };
        let end = end.ok_or_else(outside)?;
        let kind = rustix::fs::fstatfs(file).map_err(refused("inspect"))?;
        let is_huge = u64::try_from(kind.f_type) == Ok(HUGETLBFS_MAGIC);
        let page = if is_huge { u64::try_from(kind.f_bsize).unwrap_or(PAGE).max(PAGE) } else { PAGE };
        // Huge pages can only be mapped as a whole, so the mapping may begin before the range.
        let start = offset - offset % page;
        let end = end.checked_next_multiple_of(page).ok_or_else(outside)?;
        let (Ok(mapped), Ok(len), Ok(before)) =
            (usize::try_from(end - start), usize::try_from(len), usize::try_from(offset - start))
        else {
            return Err(outside());
        };
        install()?;
        let index = claim().ok_or(GuardError::TooMany)?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address that the kernel chooses; it aliases nothing.
        let start =
            match unsafe { rustix::mm::mmap(std::ptr::null_mut(), mapped, access, flags, file, start) } {
                Ok(start) => start,
                Err(e) => {
                    give_back(index);
                    return Err(refused("map")(e));
                }
            };
        // SAFETY: advice about our own mapping, which does not change its content. Best effort.
        let _ = unsafe { rustix::mm::madvise(start, mapped, Advice::LinuxDontDump) };
        SLOTS[index].enter(start as usize, mapped, page as usize);
        Ok(GuardedMapping { base: start.cast::<u8>().wrapping_add(before), len, index })
    }

    /// Address of the first byte of the range. It is valid as long as the mapping exists.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Length of the range, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the range has no bytes, which is never the case.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns true if an access has found that the file is shorter than the mapping. Bytes that
    /// this thread has read before the call are from the file if the result is `false`.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        // The fence orders the caller's reads of the mapping before the load of the flag.
        fence(Ordering::Acquire);
        SLOTS[self.index].broken.load(Ordering::Acquire)
    }
}

impl Drop for GuardedMapping {
    fn drop(&mut self) {
        let (start, len) = SLOTS[self.index].leave();
        // The slot is cleared first. Otherwise the handler could replace another mapping that gets
        // the same address.
        // SAFETY: the owner of this value also owns everything that refers to the mapped memory.
        let _ = unsafe { rustix::mm::munmap(start as *mut c_void, len) };
        give_back(self.index);
    }
}

/// Number of mappings that broke since the start of the process. A caller with many mappings
/// compares this number before it looks for the mapping that broke.
#[must_use]
pub fn broken_count() -> u64 {
    fence(Ordering::Acquire);
    BROKEN.load(Ordering::Acquire)
}

/// An entry of the table that the handler reads.
#[derive(Debug)]
struct GuardSlot {
    /// Address of the mapping, or 0 if the slot is free.
    start: AtomicUsize,
    /// Length of the mapping, in bytes.
    len: AtomicUsize,
    /// Page size of the mapped file, in bytes.
    page: AtomicUsize,
    broken: AtomicBool,
}

static SLOTS: [GuardSlot; GUARDED_MAX] = [const { GuardSlot::new() }; GUARDED_MAX];
/// Number of slots at the start of the table that have been in use.
static SLOTS_USED: AtomicUsize = AtomicUsize::new(0);
/// Slots below [`SLOTS_USED`] that are free. The handler does not use this list.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static BROKEN: AtomicU64 = AtomicU64::new(0);
/// The handler that was installed before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

impl GuardSlot {
    const fn new() -> GuardSlot {
        GuardSlot {
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
        }
    }

    fn enter(&self, start: usize, len: usize, page: usize) {
        self.broken.store(false, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.start.store(start, Ordering::SeqCst);
    }

    fn leave(&self) -> (usize, usize) {
        (self.start.swap(0, Ordering::SeqCst), self.len.load(Ordering::Relaxed))
    }

    /// Replaces the mapping if it contains `address`. Returns whether the access can be repeated.
    fn replace(&self, address: usize) -> bool {
        let (start, len) = (self.start.load(Ordering::SeqCst), self.len.load(Ordering::Relaxed));
        if start == 0 || !(start..start + len).contains(&address) {
            return false;
        }
        // The flag is set before any thread can read zeros from the new mapping.
        if !self.broken.swap(true, Ordering::SeqCst) {
            BROKEN.fetch_add(1, Ordering::SeqCst);
        }
        let page = self.page.load(Ordering::Relaxed);
        let page_start = address - address % page;
        // A system that does not overcommit memory may refuse a large replacement.
        [(start, len), (page_start, page)].into_iter().any(|(at, len)| {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
            // SAFETY: the range belongs to a guarded mapping that exists, because a thread is
            // accessing it. Its owner uses raw pointers only, for which any change of the bytes is
            // allowed.
            unsafe { libc::mmap(at as *mut c_void, len, access, flags, -1, 0) != libc::MAP_FAILED }
        })
    }
}

fn claim() -> Option<usize> {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    free.pop().or_else(|| {
        let next = SLOTS_USED.load(Ordering::Relaxed);
        (next < GUARDED_MAX).then(|| SLOTS_USED.store(next + 1, Ordering::SeqCst)).map(|()| next)
    })
}

fn give_back(index: usize) {
    FREE.lock().unwrap_or_else(PoisonError::into_inner).push(index);
}

/// Installs the handler, once per process.
fn install() -> Result<(), GuardError> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(());
    }
    // SAFETY: all bytes of the structure may be zero.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the pointers are valid for the call, and the first call changes nothing.
    let mut result = unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut previous) };
    if result == 0 {
        PREVIOUS.get_or_init(|| previous);
        // SAFETY: as above.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = handle;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler has the type that SA_SIGINFO requires, and is async-signal-safe.
        result = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
    }
    if result != 0 {
        return Err(GuardError::Os {
            action: "install a signal handler for",
            source: io::Error::last_os_error(),
        });
    }
    *installed = true;
    Ok(())
}

extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes valid information. `errno` belongs to this thread. The interrupted
    // code must not see a change of it.
    let (code, address, errno) =
        unsafe { ((*info).si_code, (*info).si_addr() as usize, *libc::__errno_location()) };
    // A signal that a process has sent has no address.
    let is_fault = code > 0;
    let used = SLOTS_USED.load(Ordering::SeqCst);
    if !is_fault || !SLOTS[..used].iter().any(|slot| slot.replace(address)) {
        pass_on(signal, info, context, is_fault);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Lets the handler that was installed before handle the signal.
fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void, is_fault: bool) {
    let previous = PREVIOUS.get().filter(|p| ![libc::SIG_DFL, libc::SIG_IGN].contains(&p.sa_sigaction));
    match previous {
        Some(previous) if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: a handler that was installed with SA_SIGINFO has this type.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(previous.sa_sigaction) };
            handler(signal, info, context);
        }
        Some(previous) => {
            // SAFETY: a handler that was installed without SA_SIGINFO has this type.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(previous.sa_sigaction) };
            handler(signal);
        }
        None => {
            // SAFETY: these calls are async-signal-safe. After the return, the default action ends
            // the process: the access faults again, or the signal sent here is delivered.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if !is_fault {
                    libc::raise(signal);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::MemfdFlags;

    use super::*;

    fn memfd(size: u64) -> OwnedFd {
        let fd = rustix::fs::memfd_create("guarded", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, size).unwrap();
        fd
    }

    fn read(mapping: &GuardedMapping, at: usize) -> u8 {
        assert!(at < mapping.len());
        // SAFETY: the offset is inside the mapping, and the access is volatile.
        unsafe { mapping.base().add(at).read_volatile() }
    }

    fn write(mapping: &GuardedMapping, at: usize, value: u8) {
        assert!(at < mapping.len());
        // SAFETY: as in `read`.
        unsafe { mapping.base().add(at).write_volatile(value) }
    }

    #[test]
    fn a_shrunk_file_breaks_its_mapping_only() {
        let files = [memfd(16 << 10), memfd(16 << 10)];
        let [lost, other] = files.each_ref().map(|file| GuardedMapping::new(file, 4096, 12 << 10).unwrap());
        for mapping in [&lost, &other] {
            write(mapping, 0, 7);
            write(mapping, 8192, 9);
        }
        let before = broken_count();
        rustix::fs::ftruncate(&files[0], 4096 + 100).unwrap();
        assert_eq!(read(&other, 8192), 9);
        assert!(!lost.is_broken());
        assert_eq!(read(&lost, 8192), 0);
        assert!(lost.is_broken() && !other.is_broken());
        assert!(broken_count() > before);
        write(&lost, 8192, 1);
        assert_eq!([read(&lost, 0), read(&lost, 8192), read(&other, 0)], [0, 1, 7]);
    }

    #[test]
    fn the_slot_of_a_broken_mapping_is_used_again() {
        for _ in 0..100 {
            let file = memfd(4096);
            let mapping = GuardedMapping::new(&file, 0, 4096).unwrap();
            assert!(!mapping.is_broken());
            rustix::fs::ftruncate(&file, 0).unwrap();
            write(&mapping, 17, 1);
            assert!(mapping.is_broken());
        }
    }

    #[test]
    fn a_range_outside_the_file_is_refused() {
        let file = memfd(8192);
        for (offset, len) in [(0, 0), (0, 8193), (4096, 4097), (8192, 1), (u64::MAX, 1), (4096, u64::MAX)] {
            let mapping = GuardedMapping::new(&file, offset, len);
            assert!(matches!(mapping, Err(GuardError::OutsideFile { .. })), "{offset} {len}: {mapping:?}");
        }
        assert_eq!(GuardedMapping::new(&file, 100, 5000).unwrap().len(), 5000);
    }

    #[test]
    #[ignore = "ends the process; its parent starts it"]
    fn child_process_faults_outside_guarded_mappings() {
        let file = memfd(4096);
        let _guarded = GuardedMapping::new(&file, 0, 4096).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping; the access ends the process.
        unsafe {
            let at = rustix::mm::mmap(std::ptr::null_mut(), 4096, access, MapFlags::SHARED, &file, 0);
            rustix::fs::ftruncate(&file, 0).unwrap();
            at.unwrap().cast::<u8>().read_volatile();
        }
    }

    #[test]
    fn a_fault_outside_guarded_mappings_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        let name = "mem::guarded::tests::child_process_faults_outside_guarded_mappings";
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", name])
            .output()
            .unwrap()
            .status;
        assert_eq!(status.signal(), Some(libc::SIGBUS));
    }
}
