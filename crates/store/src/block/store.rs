//! [`BlockStore`]: the handle of a mounted target, and the threads behind it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use base::BoxFuture;
use base::block::{BLOCK, Payload};
use base::mem::{Arena, ArenaBuf};
use base::thread::ThreadClass;
use bytes::Bytes;
use crossbeam_queue::SegQueue;
use futures::channel::oneshot;
use uuid::Uuid;

use super::alloc::Room;
use super::core::{Core, Limits, next_stage};
use super::drive::{Drive, FileDrive};
use super::index::Index;
use super::messages::{Command, Event, Reply, Work, load, refuse};
use super::query::Query;
use super::recovery::{Sizes, mkfs, mount};
use super::uring::{Ring, Waker};
use crate::{
    CollectionId, ObjectId, ObjectStore, Page, ReadData, Result, StageId, Stat, StatFs, StoreError,
    Transaction,
};

/// After this long without activity the log is told that everything in it was flushed.
const IDLE: Duration = Duration::from_millis(5);
/// Commands taken at once.
const BATCH: usize = 256;
/// Commands left for a thread that sleeps.
const MOST_LEFT: usize = 64;
/// Threads that read the index for calls.
const LOADERS: usize = 2;
/// Loads that one of them is given at once.
const LOADS_AT_ONCE: usize = 8;

/// How to make a target.
#[derive(Debug, Clone, Default)]
pub struct MkfsOptions {
    /// Size of the file to be made, in bytes; `None` for what is there already: a file, or a block device.
    pub size: Option<u64>,
    /// The target's uuid; a random one if `None`.
    pub uuid: Option<Uuid>,
    /// Size of the log, in bytes; an eighth of the target, at most 64 MiB, if `None`.
    pub log_bytes: Option<u64>,
    /// Size of the index, in bytes; a sixteenth of the target if `None`.
    pub index_bytes: Option<u64>,
}

/// How to mount a target.
#[derive(Debug, Clone)]
pub struct MountOptions {
    /// The uuid that the target must have, if known.
    pub expected_uuid: Option<Uuid>,
    /// Number of the target, for its threads' names.
    pub index: usize,
    /// Memory for index pages, in bytes.
    pub index_cache_bytes: usize,
    /// Memory for decoded entries of the index, in bytes.
    pub metadata_cache_bytes: usize,
    /// Memory for reads without a destination and for writes from unaligned memory, in bytes.
    pub buffer_bytes: usize,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        MountOptions {
            expected_uuid: None,
            index: 0,
            index_cache_bytes: 32 << 20,
            metadata_cache_bytes: 16 << 20,
            buffer_bytes: 32 << 20,
        }
    }
}

/// An [`ObjectStore`] on a file or block device. See the crate's `docs/format.md` for what lies there.
///
/// One thread owns the target's state and its I/O ring; calls are messages to it. Dropping the last handle without
/// [`umount`](ObjectStore::umount) is like a crash of the process: nothing acknowledged is lost.
#[derive(Debug)]
pub struct BlockStore {
    mailbox: Mailbox,
    room: Arc<Room>,
    last_stage: Arc<AtomicU64>,
    uuid: Uuid,
    path: PathBuf,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The way to the target's thread.
#[derive(Debug, Clone)]
struct Mailbox {
    shared: Arc<MailboxState>,
    waker: Waker,
}

#[derive(Debug, Default)]
struct MailboxState {
    commands: SegQueue<Command>,
    events: SegQueue<Event>,
    /// Memory to be registered with the ring.
    arenas: SegQueue<Arc<Arena>>,
    gone: AtomicBool,
    abandoned: AtomicBool,
    /// Calls wait for space.
    starved: AtomicBool,
}

impl Mailbox {
    fn command(&self, command: Command) {
        self.shared.commands.push(command);
        self.waker.wake();
        if self.shared.gone.load(Ordering::SeqCst) {
            self.shared.refuse_all();
        }
    }

    /// Leaves a command for which the target's thread need not be woken: it comes before the next one, and nobody waits
    /// for it.
    fn leave(&self, command: Command) {
        if self.shared.starved.load(Ordering::SeqCst) || self.shared.commands.len() >= MOST_LEFT {
            return self.command(command);
        }
        self.shared.commands.push(command);
        // The thread says that calls starve, and then looks whether a command was left, before it sleeps.
        if self.shared.starved.load(Ordering::SeqCst) {
            self.waker.wake();
        }
        if self.shared.gone.load(Ordering::SeqCst) {
            self.shared.refuse_all();
        }
    }

    fn memory(&self, arena: Arc<Arena>) {
        self.shared.arenas.push(arena);
        self.waker.wake();
    }

    fn event(&self, event: Event) {
        self.shared.events.push(event);
        self.waker.wake();
    }
}

impl MailboxState {
    fn refuse_all(&self) {
        while let Some(command) = self.commands.pop() {
            refuse(command, &StoreError::Disconnected("the target is unmounted".into()));
        }
    }

    fn is_ready(&self) -> bool {
        !self.commands.is_empty()
            || !self.events.is_empty()
            || !self.arenas.is_empty()
            || self.abandoned.load(Ordering::SeqCst)
    }
}

impl BlockStore {
    /// Makes a target at `path`, writing all of it once; `progress` is told bytes done and bytes in all. Returns its uuid.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if it is mounted, [`StoreError::InvalidArgument`] if it is too small.
    pub fn mkfs(path: &Path, options: &MkfsOptions, mut progress: impl FnMut(u64, u64)) -> Result<Uuid> {
        let drive: Arc<dyn Drive> = Arc::new(FileDrive::open(path, options.size)?);
        let sizes =
            Sizes { uuid: options.uuid, log_bytes: options.log_bytes, index_bytes: options.index_bytes };
        mkfs(&drive, &sizes, &mut progress)
    }

    /// Mounts the target at `path`: recovers what the log has, and starts the target's threads.
    ///
    /// # Errors
    /// [`StoreError::InUse`], [`StoreError::WrongUuid`], [`StoreError::WrongVersion`], [`StoreError::NotATarget`], or
    /// [`StoreError::Corrupt`] if fsck is needed.
    pub fn mount(path: &Path, options: &MountOptions) -> Result<Arc<BlockStore>> {
        let file = Arc::new(FileDrive::open(path, None)?);
        let drive: Arc<dyn Drive> = Arc::clone(&file) as Arc<dyn Drive>;
        let limits = Limits { cache_bytes: options.metadata_cache_bytes, buffer_bytes: options.buffer_bytes };
        let (core, index) = mount(&drive, options.expected_uuid, options.index_cache_bytes, &limits)?;
        let uuid = core.superblock.uuid;
        let ring = Ring::new(file)?;
        let mailbox = Mailbox { shared: Arc::default(), waker: ring.waker() };
        prepare(core.pool.arena(), &mailbox);
        let (load_queue, jobs) = mpsc::channel();
        let jobs = Arc::new(Mutex::new(jobs));
        let mut workers = Vec::new();
        for i in 0..LOADERS {
            let (jobs, index, mailbox) = (Arc::clone(&jobs), Arc::clone(&index), mailbox.clone());
            let name = format!("idx{}.{i}", options.index);
            workers.push(base::thread::spawn(ThreadClass::Store, &name, move || {
                loader(&jobs, &index, &mailbox)
            })?);
        }
        let (checkpoint_queue, jobs) = mpsc::channel();
        let to_store = mailbox.clone();
        let name = format!("ckpt{}", options.index);
        workers.push(base::thread::spawn(ThreadClass::Store, &name, move || {
            checkpointer(&jobs, drive.as_ref(), &index, &to_store);
        })?);
        let (room, last_stage) = (Arc::clone(core.alloc.room()), Arc::clone(&core.last_stage));
        let target = Target { core, ring, mailbox: mailbox.clone(), load_queue, checkpoint_queue, workers };
        let thread =
            base::thread::spawn(ThreadClass::Store, &options.index.to_string(), move || target.run())?;
        let path = path.to_owned();
        let thread = Mutex::new(Some(thread));
        Ok(Arc::new(BlockStore { mailbox, room, last_stage, uuid, path, thread }))
    }

    /// The target's uuid.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Where the target is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn call<T: Send + 'static>(
        &self,
        make: impl FnOnce(Reply<T>) -> Command,
    ) -> BoxFuture<'static, Result<T>> {
        let (reply, answer) = oneshot::channel();
        self.mailbox.command(make(reply));
        Box::pin(async {
            answer
                .await
                .unwrap_or_else(|_| Err(StoreError::Disconnected("the target's thread has ended".into())))
        })
    }

    fn query<T: Send + 'static>(
        &self,
        cid: &CollectionId,
        make: impl FnOnce(Reply<T>) -> Query,
    ) -> BoxFuture<'static, Result<T>> {
        self.call(|reply| Command::Query(cid.clone(), make(reply)))
    }
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

/// Brings memory together in huge pages and then has it registered with the ring. In the background: it takes
/// milliseconds per page, and until then requests have their memory pinned one by one.
fn prepare(arena: &Arc<Arena>, mailbox: &Mailbox) {
    let (memory, to_store) = (Arc::clone(arena), mailbox.clone());
    let register = move || {
        let (huge, len) = (memory.gather(), memory.len());
        tracing::info!(len, huge, set_aside = memory.is_set_aside(), "memory for direct I/O is ready");
        to_store.memory(memory);
    };
    if let Err(error) = base::thread::spawn(ThreadClass::Store, "mem", register) {
        tracing::warn!(%error, "memory is registered as it is");
        mailbox.memory(Arc::clone(arena));
    }
}

/// Reads the index for calls, so that the target's thread need not wait.
fn loader(jobs: &Mutex<mpsc::Receiver<Vec<Work>>>, index: &Index, mailbox: &Mailbox) {
    loop {
        let batch = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(batch) = batch else { return };
        for job in batch {
            if let Work::Load { op, generation, needs } = job {
                let found = load(index, &needs);
                mailbox.event(Event::Loaded { op, generation, needs, found });
            }
        }
    }
}

fn checkpointer(jobs: &mpsc::Receiver<Work>, drive: &dyn Drive, index: &Index, mailbox: &Mailbox) {
    while let Ok(job) = jobs.recv() {
        if let Work::Checkpoint(checkpoint) = job {
            mailbox.event(Event::Checkpointed(checkpoint.run(drive, index)));
        }
    }
}

/// What the target's thread owns.
struct Target {
    core: Core,
    ring: Ring,
    mailbox: Mailbox,
    load_queue: mpsc::Sender<Vec<Work>>,
    checkpoint_queue: mpsc::Sender<Work>,
    workers: Vec<JoinHandle<()>>,
}

impl Target {
    fn run(mut self) {
        let shared = Arc::clone(&self.mailbox.shared);
        if let Err(error) = self.ring.enable() {
            self.core.poison(&format!("I/O ring ({error})"));
            shared.abandoned.store(true, Ordering::SeqCst);
        }
        while !self.core.closed && !shared.abandoned.load(Ordering::SeqCst) {
            if let Err(error) = self.turn(&shared) {
                self.core.poison(&format!("I/O ring ({error})"));
                break;
            }
        }
        self.core.alloc.room().close();
        shared.gone.store(true, Ordering::SeqCst);
        shared.refuse_all();
        let Target { core, ring, load_queue, checkpoint_queue, workers, .. } = self;
        drop((load_queue, checkpoint_queue));
        // The ring waits for the requests under way; the workers finish what they have.
        drop(ring);
        drop(core);
        for worker in workers {
            if worker.join().is_err() {
                tracing::error!("a worker of the target has panicked");
            }
        }
    }

    /// Takes what has come, moves everything on, and sleeps if there is nothing to do.
    fn turn(&mut self, shared: &MailboxState) -> std::io::Result<()> {
        let mut busy = false;
        while let Some(arena) = shared.arenas.pop() {
            self.ring.register(&arena);
        }
        for done in self.ring.completions() {
            self.core.complete(Event::Io(done));
            busy = true;
        }
        while let Some(event) = shared.events.pop() {
            self.core.complete(event);
            busy = true;
        }
        for command in std::iter::from_fn(|| shared.commands.pop()).take(BATCH) {
            self.core.handle(command);
            busy = true;
        }
        if busy {
            self.core.advance();
        }
        shared.starved.store(self.core.is_starved(), Ordering::SeqCst);
        self.hand_out()?;
        if self.core.closed {
            return Ok(());
        }
        let timeout = (self.core.wants_idle() && self.ring.in_flight() == 0).then_some(IDLE);
        self.ring.wait(timeout, || shared.is_ready())?;
        if timeout.is_some() && !shared.is_ready() && !self.ring.has_completions() {
            self.core.idle();
            self.hand_out()?;
        }
        Ok(())
    }

    fn hand_out(&mut self) -> std::io::Result<()> {
        for request in std::mem::take(&mut self.core.output.io) {
            self.ring.submit(request)?;
        }
        let is_load = |work: &Work| matches!(work, Work::Load { .. });
        let (mut loads, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.core.output.work).into_iter().partition(is_load);
        let ended = || std::io::Error::other("a worker thread has ended");
        while !loads.is_empty() {
            // Several at once, so that a worker is woken once for them, but not all for one worker.
            let later = loads.split_off(loads.len().min(LOADS_AT_ONCE));
            self.load_queue.send(std::mem::replace(&mut loads, later)).map_err(|_| ended())?;
        }
        for work in rest {
            self.checkpoint_queue.send(work).map_err(|_| ended())?;
        }
        Ok(())
    }
}

impl ObjectStore for BlockStore {
    fn stage(&self, len: u64) -> BoxFuture<'static, Result<StageId>> {
        if len > 0 && self.room.promise(len.div_ceil(BLOCK)) {
            let id = next_stage(&self.last_stage);
            self.mailbox.leave(Command::StagePromised(id, len));
            return Box::pin(std::future::ready(Ok(id)));
        }
        self.call(|reply| Command::Stage(len, reply))
    }

    fn stage_write(&self, stage: StageId, offset: u64, payload: Payload) -> BoxFuture<'static, Result<()>> {
        self.call(|reply| Command::StageWrite(stage, offset, payload, reply))
    }

    fn stage_release(&self, stage: StageId) {
        self.mailbox.leave(Command::StageRelease(stage));
    }

    fn queue_transaction(&self, transaction: Transaction) -> BoxFuture<'static, Result<()>> {
        self.call(|reply| Command::Transaction(transaction, reply))
    }

    fn read(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        offset: u64,
        len: u64,
        dest: Option<ArenaBuf>,
    ) -> BoxFuture<'static, Result<ReadData>> {
        self.query(cid, |reply| Query::Read { oid: oid.clone(), offset, len, dest, reply })
    }

    fn stat(&self, cid: &CollectionId, oid: &ObjectId) -> BoxFuture<'static, Result<Stat>> {
        self.query(cid, |reply| Query::Stat(oid.clone(), reply))
    }

    fn get_xattr(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        name: Bytes,
    ) -> BoxFuture<'static, Result<Bytes>> {
        self.query(cid, |reply| Query::GetXattr(oid.clone(), name, reply))
    }

    fn get_xattrs(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>> {
        self.query(cid, |reply| Query::GetXattrs(oid.clone(), reply))
    }

    fn omap_get_header(&self, cid: &CollectionId, oid: &ObjectId) -> BoxFuture<'static, Result<Bytes>> {
        self.query(cid, |reply| Query::OmapGetHeader(oid.clone(), reply))
    }

    fn omap_get(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        keys: Vec<Bytes>,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>> {
        self.query(cid, |reply| Query::OmapGet(oid.clone(), keys, reply))
    }

    fn omap_iterate(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        from: Bytes,
        limit: usize,
    ) -> BoxFuture<'static, Result<Page<(Bytes, Bytes)>>> {
        self.query(cid, |reply| Query::OmapIterate(oid.clone(), from, limit, reply))
    }

    fn list(
        &self,
        cid: &CollectionId,
        from: Option<ObjectId>,
        limit: usize,
    ) -> BoxFuture<'static, Result<Page<ObjectId>>> {
        self.query(cid, |reply| Query::List(from, limit, reply))
    }

    fn collections(&self) -> BoxFuture<'static, Result<Vec<CollectionId>>> {
        self.call(Command::Collections)
    }

    fn statfs(&self) -> BoxFuture<'static, Result<StatFs>> {
        self.call(Command::StatFs)
    }

    fn register_memory(&self, arena: &Arc<Arena>) {
        prepare(arena, &self.mailbox);
    }

    fn umount(&self) -> BoxFuture<'static, Result<()>> {
        self.call(Command::Umount)
    }
}
