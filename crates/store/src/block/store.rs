//! [`BlockStore`]: the handle of a mounted target.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::thread::JoinHandle;

use base::block::BLOCK;
use base::fault::Faults;
use base::mem::Arena;
use base::thread::ThreadClass;
use futures::channel::oneshot;
use uuid::Uuid;

use super::alloc::Room;
use super::core::{Core, MemoryLimits};
use super::drive::{Drive, FileDrive};
use super::driver::Driver;
use super::hardware::{Hardware, checkpoint_thread};
use super::mailbox::{Mailbox, MailboxState};
use super::messages::CoreCommand;
use super::mount::mount;
use super::recovery::{TargetSizes, layout, mkfs};
use super::staged::next_stage;
use super::superblock::Superblock;
use super::uring::IoRing;
use crate::{Result, StoreError, StoreFuture, StoreReply, StoreRequest, Submit, ready};

/// Options for creating a target.
#[derive(Debug, Clone, Default)]
pub struct MkfsOptions {
    /// Size of the new file, in bytes; `None` to use an existing file or a block device.
    pub size: Option<u64>,
    /// The target's uuid; a random uuid if `None`.
    pub uuid: Option<Uuid>,
    /// Size of the log, in bytes. The default (`None`) is 1/32 of the target, but at least 64 MiB and
    /// at most 256 MiB, and at most an eighth of the target.
    pub log_bytes: Option<u64>,
    /// Size of the index, in bytes. The default (`None`) is about a sixteenth of the target, at least
    /// 2 MiB, and a size that the index can use completely: a power of two, or a multiple of 4 GiB.
    pub index_bytes: Option<u64>,
}

impl MkfsOptions {
    fn sizes(&self) -> TargetSizes {
        TargetSizes { uuid: self.uuid, log_bytes: self.log_bytes, index_bytes: self.index_bytes }
    }
}

/// Options for mounting a target.
#[derive(Debug, Clone)]
pub struct MountOptions {
    /// The uuid that the target must have; `None` to accept any uuid.
    pub expected_uuid: Option<Uuid>,
    /// Number of the target, which is part of its threads' names.
    pub index: usize,
    /// Memory for cached pages and values of the index, in bytes.
    pub cache_bytes: usize,
    /// Total size of the buffers for reads without a destination and for writes from unaligned
    /// memory, in bytes.
    pub buffer_bytes: usize,
    /// Faults injected into the drive.
    pub faults: Faults,
    /// Stages get numbers above this number. A process that mounts a target several times must use
    /// a different range for each mount.
    pub stages_after: u64,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        MountOptions {
            expected_uuid: None,
            index: 0,
            cache_bytes: 64 << 20,
            buffer_bytes: 32 << 20,
            faults: Faults::default(),
            stages_after: 0,
        }
    }
}

impl MountOptions {
    pub(super) fn limits(&self) -> MemoryLimits {
        MemoryLimits::new(self.cache_bytes, self.buffer_bytes)
    }
}

/// An [`ObjectStore`](crate::ObjectStore) on a file or block device. `docs/format.md` describes the
/// format.
///
/// One [`Driver`] owns the target's state and its I/O ring. Calls are messages to the driver.
/// Dropping the last handle without [`umount`](crate::StoreCalls::umount) is like a crash of the
/// process: no acknowledged change is lost.
#[derive(Debug)]
pub struct BlockStore {
    mailbox: Mailbox,
    room: Arc<Room>,
    last_stage: Arc<AtomicU64>,
    uuid: Uuid,
    path: PathBuf,
    /// Number of the target, as in [`MountOptions::index`].
    index: usize,
    /// Whether the I/O ring makes use of registered memory.
    registers: bool,
    /// The thread that runs the target, if the target has its own thread.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Reports whether calls on a target wait for a checkpoint, and whether the checkpoint makes
/// progress. Any thread may call the methods at any time, and the calls are cheap.
#[derive(Debug, Clone)]
pub struct CheckpointWatch {
    shared: Arc<MailboxState>,
    index: usize,
}

impl CheckpointWatch {
    /// Returns the progress of the checkpoint that calls wait for; `None` if no call waits for a
    /// checkpoint, or the checkpoint waits until the drive has executed another flush. The progress is
    /// a number that grows whenever one of the checkpoint's calls to the drive returns, and with each
    /// hundredth of the checkpoint.
    #[must_use]
    pub fn awaited(&self) -> Option<u64> {
        let is_awaited = self.shared.awaits_checkpoint.load(Ordering::Relaxed);
        let is_stuck_in_drive = self.shared.flush_gate.has_waiting();
        (is_awaited && !is_stuck_in_drive && !self.shared.gone.load(Ordering::Relaxed))
            .then(|| self.shared.checkpoint_calls.count())
    }

    /// Returns the name of the thread that runs checkpoints.
    #[must_use]
    pub fn thread(&self) -> String {
        format!("{}-{}", ThreadClass::Store.prefix(), checkpoint_thread(self.index))
    }
}

impl BlockStore {
    /// Creates a target at `path` and writes every byte of the target once. `progress` receives the
    /// number of bytes written so far and the total number of bytes. Returns the target's uuid.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if the file or device is in use, [`StoreError::InvalidArgument`] if it
    /// is too small.
    pub fn mkfs(path: &Path, options: &MkfsOptions, mut progress: impl FnMut(u64, u64)) -> Result<Uuid> {
        let drive: Arc<dyn Drive> = Arc::new(FileDrive::open_unused(path, options.size)?);
        mkfs(&drive, &options.sizes(), &mut progress)
    }

    /// Checks whether a target with these options fits on a drive of `size` bytes. Changes nothing.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] if the drive is too small.
    pub fn check_size(size: u64, options: &MkfsOptions) -> Result<()> {
        layout(size, &options.sizes()).map(drop)
    }

    /// Checks whether the file or device at `path` can become a target with its present size.
    /// Changes nothing.
    ///
    /// # Errors
    /// Those of [`mkfs`](Self::mkfs).
    pub fn check_device(path: &Path, options: &MkfsOptions) -> Result<()> {
        BlockStore::check_size(FileDrive::open_unused(path, None)?.size(), options)
    }

    /// Reads the uuid of the target at `path`, without mounting or recovering the target.
    ///
    /// # Errors
    /// [`StoreError::InUse`], [`StoreError::WrongVersion`], [`StoreError::NotATarget`] or
    /// [`StoreError::Corrupt`].
    pub fn uuid_at(path: &Path) -> Result<Uuid> {
        Ok(Superblock::read(&FileDrive::open_unused(path, None)?)?.uuid)
    }

    /// Mounts the target at `path`: replays its log and starts its threads.
    ///
    /// # Errors
    /// [`StoreError::InUse`], [`StoreError::WrongUuid`], [`StoreError::WrongVersion`],
    /// [`StoreError::NotATarget`], or [`StoreError::Corrupt`] if fsck is needed.
    pub fn mount(path: &Path, options: &MountOptions) -> Result<Arc<BlockStore>> {
        let (mut store, driver) = BlockStore::prepare(path, options)?;
        let run = move || driver.run_alone();
        store.thread =
            Mutex::new(Some(base::thread::spawn(ThreadClass::Store, &options.index.to_string(), run)?));
        Ok(Arc::new(store))
    }

    /// Like [`mount`](Self::mount), but the caller must [run](Driver::run) the returned driver,
    /// which does the target's work.
    ///
    /// # Errors
    /// Those of [`mount`](Self::mount).
    pub fn mount_driven(path: &Path, options: &MountOptions) -> Result<(Arc<BlockStore>, Driver)> {
        let (store, driver) = BlockStore::prepare(path, options)?;
        Ok((Arc::new(store), driver))
    }

    fn prepare(path: &Path, options: &MountOptions) -> Result<(BlockStore, Driver)> {
        let file = FileDrive::open(path, None)?.with_faults(options.faults.clone());
        let drive = Arc::new(file.clone());
        BlockStore::prepare_on(file, drive, path, options)
    }

    /// Mounts the target at `path`, which is open as `file`. `drive` executes the blocking reads,
    /// writes and flushes.
    pub(super) fn prepare_on(
        file: FileDrive,
        drive: Arc<dyn Drive>,
        path: &Path,
        options: &MountOptions,
    ) -> Result<(BlockStore, Driver)> {
        let (core, index) = mount(&drive, options.expected_uuid, &options.limits())?;
        core.stages.last().store(options.stages_after, Ordering::Relaxed);
        file.make_private(path)?;
        let flush_gate = Arc::clone(file.gate());
        let ring = IoRing::new(file)?;
        flush_gate.set_ring(ring.waker());
        let shared = Arc::new(MailboxState { flush_gate, ..MailboxState::default() });
        let mailbox = Mailbox { shared, waker: ring.waker() };
        register(core.pool.arena(), &mailbox);
        let store = BlockStore::of(&core, &mailbox, path, options.index, true);
        let hardware = Hardware::new(ring, &mailbox, drive, index, options.index)?;
        Ok((store, Driver::on_hardware(core, hardware, mailbox)))
    }

    /// Creates the handle of a target. `registers` says whether the I/O ring makes use of registered
    /// memory.
    pub(super) fn of(
        core: &Core,
        mailbox: &Mailbox,
        path: &Path,
        index: usize,
        registers: bool,
    ) -> BlockStore {
        BlockStore {
            mailbox: mailbox.clone(),
            room: Arc::clone(core.alloc.room()),
            last_stage: Arc::clone(core.stages.last()),
            uuid: core.superblock.uuid,
            path: path.to_owned(),
            index,
            registers,
            thread: Mutex::new(None),
        }
    }

    /// Returns a watch of the target's checkpoints.
    #[must_use]
    pub fn checkpoint_watch(&self) -> CheckpointWatch {
        CheckpointWatch { shared: Arc::clone(&self.mailbox.shared), index: self.index }
    }

    /// The target's uuid.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Returns a future that resolves once a write or flush of the target has failed, with a
    /// description of the failure. After the failure, the target refuses all writes until a
    /// remount. Any thread may await the future.
    pub fn failure(&self) -> impl Future<Output = String> + Send + 'static {
        let mut failure = self.mailbox.shared.failure.subscribe();
        async move {
            match failure.wait_for(Option::is_some).await.as_deref() {
                Ok(Some(reason)) => reason.clone(),
                _ => "the target's thread has ended".to_owned(),
            }
        }
    }

    /// Returns the path of the target.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Future that waits for the allocation of a stage. If the future is dropped after the allocation,
/// it releases the stage.
struct Staging {
    answer: oneshot::Receiver<Result<StoreReply>>,
    mailbox: Mailbox,
}

impl Future for Staging {
    type Output = Result<StoreReply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<StoreReply>> {
        let answer = Pin::new(&mut self.answer).poll(cx);
        answer.map(|answer| answer.unwrap_or_else(|_| Err(thread_ended(&self.mailbox.shared))))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // From here on, sending the reply fails, and then the sender releases the stage.
        self.answer.close();
        if let Ok(Some(Ok(StoreReply::Stage(stage)))) = self.answer.try_recv() {
            self.mailbox.leave(CoreCommand::StageRelease(stage));
        }
    }
}

fn thread_ended(shared: &MailboxState) -> StoreError {
    shared.end_reason("the target's thread has ended")
}

impl Drop for BlockStore {
    fn drop(&mut self) {
        self.mailbox.shared.abandoned.store(true, Ordering::SeqCst);
        self.mailbox.waker.wake();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the target's thread has panicked");
        }
    }
}

/// Gathers the memory of `arena` into huge pages, and then registers the memory with the I/O ring.
/// Gathering runs on a separate thread, because it takes milliseconds per page. Until the
/// registration, the kernel pins the memory separately for each request.
fn register(arena: &Arc<Arena>, mailbox: &Mailbox) {
    let (memory, to_store) = (Arc::clone(arena), mailbox.clone());
    let gather = move || {
        let (huge, len) = (memory.gather(), memory.len());
        tracing::info!(len, huge, set_aside = memory.is_set_aside(), "memory for direct I/O is ready");
        to_store.memory(memory);
    };
    if let Err(error) = base::thread::spawn(ThreadClass::Store, "mem", gather) {
        tracing::warn!(%error, "memory for direct I/O is registered without huge pages, because no thread could be created");
        mailbox.memory(Arc::clone(arena));
    }
}

impl Submit for BlockStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        match request {
            StoreRequest::Stage { len } if len > 0 && self.room.promise(len.div_ceil(BLOCK)) => {
                let id = next_stage(&self.last_stage);
                self.mailbox.leave(CoreCommand::StagePromised(id, len));
                ready(Ok(StoreReply::Stage(id)))
            }
            StoreRequest::Stage { .. } => {
                Box::pin(Staging { answer: self.request(request), mailbox: self.mailbox.clone() })
            }
            StoreRequest::StageRelease { stage } => {
                self.mailbox.leave(CoreCommand::StageRelease(stage));
                ready(Ok(StoreReply::Done))
            }
            request => {
                let answer = self.request(request);
                let shared = Arc::clone(&self.mailbox.shared);
                Box::pin(async move { answer.await.unwrap_or_else(|_| Err(thread_ended(&shared))) })
            }
        }
    }

    fn register_memory(&self, arena: &Arc<Arena>) {
        if self.registers {
            register(arena, &self.mailbox);
        }
    }
}

impl BlockStore {
    fn request(&self, request: StoreRequest) -> oneshot::Receiver<Result<StoreReply>> {
        let (reply, answer) = oneshot::channel();
        self.mailbox.command(CoreCommand::Request(request, reply));
        answer
    }
}
