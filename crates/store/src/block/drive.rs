//! The drive below a target: a file, a block device, or a simulated drive in tests.

use std::cell::RefCell;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::block::BLOCK_SIZE;
use base::fault::{Action, Faults, Site};

use rustix::fs::FlockOperation;

use super::batch::{self, WritePiece};
use super::flush_gate::FlushGate;
use crate::{Result, StoreError};

/// Blocking access to a drive, for the index and for creation, recovery and checks of targets.
/// Offsets and lengths must be multiples of the block size. Buffers need no alignment. Any thread
/// may call the methods.
pub(crate) trait Drive: std::fmt::Debug + Send + Sync {
    /// Size, in bytes.
    fn size(&self) -> u64;
    /// Fills `out` with the bytes at `offset`.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;
    /// Writes `data` at `offset`. The data is durable after a [`flush`](Drive::flush) that starts
    /// after this method has returned.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Writes all pieces, which are sorted by their offsets and do not overlap, in any order. The
    /// data is durable after a [`flush`](Drive::flush) that starts after this method has returned.
    /// After an error, any of the pieces may be on the drive. Calls `completed` with the number of
    /// bytes of each part that was written.
    fn write_all(&self, pieces: &[WritePiece], completed: &mut dyn FnMut(usize)) -> io::Result<()> {
        batch::write_each(self, pieces, completed)
    }
    /// Makes all completed writes durable.
    fn flush(&self) -> io::Result<()>;
    /// Number of threads that should read at the same time if much is to be read. A drive on which
    /// the order of reads must not depend on the scheduling of threads returns 1.
    fn parallel_reads(&self) -> usize {
        1
    }
}

/// Number of threads that read a real drive at the same time.
pub(super) const PARALLEL_READS: usize = 8;
/// Maximum number of reads of [`read_stable`].
const STABLE_READS: usize = 5;

/// Fills `out` with the bytes at `offset`, and reads them again if they are not intact: bits may
/// flip on the way from the drive. Succeeds if the bytes are intact, or if two reads in a row return
/// the same bytes, which are then damaged on the drive.
///
/// # Errors
/// If the drive fails, or if each read returns other bytes.
pub(crate) fn read_stable(
    drive: &dyn Drive,
    offset: u64,
    out: &mut [u8],
    is_intact: impl Fn(&[u8]) -> bool,
) -> io::Result<()> {
    let mut last = Vec::new();
    for _ in 0..STABLE_READS {
        drive.read_at(offset, out)?;
        if *out == last[..] || is_intact(out) {
            return Ok(());
        }
        last = out.to_vec();
    }
    let what = format!(
        "each of {STABLE_READS} reads of {} bytes at {offset} returns other bytes; check the drive, its cable and its controller",
        out.len()
    );
    Err(io::Error::other(what))
}

/// Counts the completed blocking calls of selected threads to files and devices. A growing count
/// shows that a recovery or a checkpoint makes progress, even on a slow drive.
#[derive(Debug, Clone, Default)]
pub struct DriveCalls(Arc<AtomicU64>);

thread_local! {
    static COUNTED: RefCell<Option<DriveCalls>> = const { RefCell::new(None) };
}

impl DriveCalls {
    /// From now on, counts the calls of the current thread in this counter, and in no other
    /// counter.
    pub fn count_this_thread(&self) {
        COUNTED.set(Some(self.clone()));
    }

    /// Returns the number of calls that have completed so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the counter of the current thread's calls.
    pub(super) fn of_this_thread() -> Option<DriveCalls> {
        COUNTED.with_borrow(Clone::clone)
    }

    /// Counts `calls` completed calls.
    pub(crate) fn add(&self, calls: u64) {
        self.0.fetch_add(calls, Ordering::Relaxed);
    }

    /// Counts a completed call of the current thread.
    fn returned() {
        COUNTED.with_borrow(|calls| {
            if let Some(calls) = calls {
                calls.0.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
}

/// A file or block device, locked for this process. It is open for direct I/O if the file system
/// supports that. Clones share the open file, which is unlocked when the last of them is dropped.
#[derive(Debug, Clone)]
pub(crate) struct FileDrive {
    file: Arc<LockedFile>,
    size: u64,
    faults: Faults,
    gate: Arc<FlushGate>,
}

/// An open file with a lock.
#[derive(Debug)]
struct LockedFile(File);

impl std::ops::Deref for LockedFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // Unlock explicitly: an I/O ring keeps the file open briefly while it is closed, although
        // all its requests have completed.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

impl FileDrive {
    /// Opens and locks the target at `path`. With `create`, creates the file if it does not exist,
    /// and sets the size of a regular file to `create` bytes.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if another process has locked the target.
    pub(crate) fn open(path: &Path, create: Option<u64>) -> Result<FileDrive> {
        FileDrive::open_with(path, create, 0)
    }

    /// Like [`open`](Self::open), for a path that need not be a target. Refuses a block device that
    /// is mounted or that another process has opened exclusively.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub(crate) fn open_unused(path: &Path, create: Option<u64>) -> Result<FileDrive> {
        let is_device = std::fs::metadata(path).is_ok_and(|there| there.file_type().is_block_device());
        FileDrive::open_with(path, create.filter(|_| !is_device), if is_device { libc::O_EXCL } else { 0 })
    }

    fn open_with(path: &Path, create: Option<u64>, more_flags: i32) -> Result<FileDrive> {
        let name = path.display().to_string();
        let open = |flags: i32| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(create.is_some())
                .truncate(false)
                .custom_flags(flags | more_flags)
                .mode(PRIVATE)
                .open(path)
        };
        let open = || match open(libc::O_DIRECT | libc::O_CLOEXEC) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => open(libc::O_CLOEXEC),
            other => other,
        };
        let file = unless_in_use(open, |e| e.kind() == io::ErrorKind::ResourceBusy);
        let mut file = file.map_err(|e| match e.kind() {
            io::ErrorKind::ResourceBusy => StoreError::InUse(name.clone()),
            _ => StoreError::Io(format!("cannot open {name}: {e}")),
        })?;
        lock(&file, &name)?;
        if let (Some(size), true) = (create, file.metadata()?.is_file()) {
            file.set_len(size)?;
        }
        let size = file.seek(SeekFrom::End(0))?;
        Ok(FileDrive {
            file: Arc::new(LockedFile(file)),
            size,
            faults: Faults::default(),
            gate: Arc::default(),
        })
    }

    /// Makes the drive inject the given faults.
    pub(crate) fn with_faults(mut self, faults: Faults) -> FileDrive {
        self.faults = faults;
        self
    }

    /// Fails if an injected fault hits this write or flush.
    pub(crate) fn injected(&self) -> io::Result<()> {
        match self.faults.hit(Site::DriveWrite) {
            Some(Action::Fail) => Err(io::Error::from_raw_os_error(libc::EIO)),
            _ => Ok(()),
        }
    }

    /// Removes all access rights to a target's file except the owner's. Does not change devices,
    /// because the operator controls access to them. Call this method only after the file was
    /// identified as a target.
    pub(crate) fn make_private(&self, path: &Path) -> Result<()> {
        let (name, metadata) = (path.display().to_string(), self.file.metadata()?);
        if !metadata.is_file() || metadata.mode() & 0o077 == 0 {
            return Ok(());
        }
        match self.file.set_permissions(Permissions::from_mode(PRIVATE)) {
            Ok(()) => {
                tracing::warn!(path = name, "other users could read the target; its mode was changed to 0600")
            }
            Err(e) => {
                tracing::error!(
                    path = name,
                    "other users can read the target, and its mode cannot be changed: {e}; change the mode of the file to 0600"
                )
            }
        }
        Ok(())
    }

    /// Returns the gate of the drive's flushes. The I/O ring flushes the drive without
    /// [`flush`](Drive::flush), and must use the gate.
    pub(crate) fn gate(&self) -> &Arc<FlushGate> {
        &self.gate
    }

    /// The open file, for the I/O ring.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Mode of a target's file. Read access to the file gives access to all objects.
const PRIVATE: u32 = 0o600;

fn lock(file: &File, name: &str) -> Result<()> {
    let lock = || rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive);
    unless_in_use(lock, |e| *e == rustix::io::Errno::WOULDBLOCK).map_err(|e| match e {
        rustix::io::Errno::WOULDBLOCK => StoreError::InUse(name.to_owned()),
        _ => StoreError::Io(format!("cannot lock {name}: {e}")),
    })
}

/// Repeats `attempt` for half a second while it fails because the file is in use. The kernel closes
/// the files of a killed process, and those of an I/O ring, only when it has completed their I/O.
fn unless_in_use<T, E>(
    mut attempt: impl FnMut() -> std::result::Result<T, E>,
    is_in_use: impl Fn(&E) -> bool,
) -> std::result::Result<T, E> {
    const TRIES: usize = 25;
    for _ in 1..TRIES {
        match attempt() {
            Err(e) if is_in_use(&e) => std::thread::sleep(Duration::from_millis(20)),
            other => return other,
        }
    }
    attempt()
}

impl FileDrive {
    fn read_aligned(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if is_aligned(out) {
            return self.file.read_exact_at(out, offset);
        }
        let (mut memory, start) = aligned(out.len());
        let bounce = &mut memory[start..start + out.len()];
        self.file.read_exact_at(bounce, offset)?;
        out.copy_from_slice(bounce);
        Ok(())
    }

    fn write_aligned(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if is_aligned(data) {
            return self.file.write_all_at(data, offset);
        }
        let (mut memory, start) = aligned(data.len());
        let bounce = &mut memory[start..start + data.len()];
        bounce.copy_from_slice(data);
        self.file.write_all_at(bounce, offset)
    }
}

/// Returns memory that contains `len` block-aligned bytes, and the offset of these bytes in the
/// memory.
fn aligned(len: usize) -> (Vec<u8>, usize) {
    let memory = vec![0; len + BLOCK_SIZE];
    let start = memory.as_ptr().align_offset(BLOCK_SIZE);
    (memory, start)
}

fn is_aligned(memory: &[u8]) -> bool {
    (memory.as_ptr() as usize).is_multiple_of(BLOCK_SIZE)
}

impl Drive for FileDrive {
    fn size(&self) -> u64 {
        self.size
    }

    fn parallel_reads(&self) -> usize {
        PARALLEL_READS
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let result = self.read_aligned(offset, out);
        DriveCalls::returned();
        result
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let result = self.injected().and_then(|()| self.write_aligned(offset, data));
        DriveCalls::returned();
        result
    }

    fn write_all(&self, pieces: &[WritePiece], completed: &mut dyn FnMut(usize)) -> io::Result<()> {
        batch::write(self, pieces, |bytes| {
            DriveCalls::returned();
            completed(bytes);
        })
    }

    fn flush(&self) -> io::Result<()> {
        let result = self.gate.run(|| self.injected().and_then(|()| self.file.sync_data()));
        DriveCalls::returned();
        result
    }
}
