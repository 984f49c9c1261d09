//! [`Driver`]: runs a mounted target, on its own thread or as a task of another event loop.

use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use base::thread::ThreadClass;
use futures::channel::oneshot;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, Sleep};

use super::core::Core;
use super::drive::Drive;
use super::index::Index;
use super::mailbox::{Mailbox, MailboxState};
use super::messages::{BlockingWork, CoreEvent, load};
use super::uring::IoRing;
use crate::Result;

/// After this idle time, the store records in the log that the whole log was flushed.
const IDLE: Duration = Duration::from_millis(5);
/// Maximum number of commands that one round of the driver takes from the mailbox.
const BATCH: usize = 256;
/// Number of threads that read the index for calls.
const LOADERS: usize = 2;
/// Maximum number of loads that one of the [`LOADERS`] threads takes at once.
const LOADS_AT_ONCE: usize = 8;

/// Runs a mounted target. The driver owns the target's state and I/O ring.
///
/// While it runs, the driver never blocks on the drive, so a thread with other work can run it
/// ([`run`](Self::run)). Then calls from that thread, and their replies, need not wake another
/// thread. The target replies to calls only while its driver runs.
#[must_use = "a target replies to calls only while its driver runs"]
pub struct Driver {
    core: Core,
    ring: IoRing,
    mailbox: Mailbox,
    load_queue: mpsc::Sender<Vec<BlockingWork>>,
    checkpoint_queue: mpsc::Sender<BlockingWork>,
    workers: Vec<JoinHandle<()>>,
}

/// Measures how long the target has been idle.
struct IdleTimer {
    counting: bool,
    timer: Pin<Box<Sleep>>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("target", &self.core.superblock.uuid).finish_non_exhaustive()
    }
}

impl Driver {
    /// Creates the driver of target number `number`, and starts its worker threads.
    pub(super) fn new(
        core: Core,
        ring: IoRing,
        mailbox: Mailbox,
        drive: Arc<dyn Drive>,
        index: Arc<Index>,
        number: usize,
    ) -> Result<Driver> {
        let (load_queue, jobs) = mpsc::channel();
        let jobs = Arc::new(Mutex::new(jobs));
        let mut workers = Vec::new();
        for i in 0..LOADERS {
            let (jobs, index, mailbox) = (Arc::clone(&jobs), Arc::clone(&index), mailbox.clone());
            let work = move || loader(&jobs, &index, &mailbox);
            workers.push(base::thread::spawn(ThreadClass::Store, &format!("idx{number}.{i}"), work)?);
        }
        let (checkpoint_queue, jobs) = mpsc::channel();
        let to_store = mailbox.clone();
        let work = move || checkpointer(&jobs, drive.as_ref(), &index, &to_store);
        workers.push(base::thread::spawn(ThreadClass::Store, &checkpoint_thread(number), work)?);
        Ok(Driver { core, ring, mailbox, load_queue, checkpoint_queue, workers })
    }

    /// Runs the target on this thread, which does no other work, until the target is unmounted or
    /// its handle is dropped.
    pub(super) fn run_alone(mut self) {
        let shared = Arc::clone(&self.mailbox.shared);
        self.begin();
        while !self.is_over() {
            if let Err(error) = self.turn_alone(&shared) {
                self.fail(&error);
            }
        }
        join(self.close());
    }

    /// Processes all new events, then sleeps until the next event if no work is left.
    fn turn_alone(&mut self, shared: &MailboxState) -> io::Result<()> {
        self.work()?;
        if self.core.closed {
            return Ok(());
        }
        let timeout = self.is_quiet().then_some(IDLE);
        self.ring.wait(timeout, || shared.is_ready())?;
        if timeout.is_some() && !shared.is_ready() && !self.ring.has_completions() {
            self.core.idle();
            self.hand_out()?;
        }
        Ok(())
    }

    /// Runs the target as a task of a Tokio runtime with I/O and time enabled, until the target is
    /// unmounted or its handle is dropped. Once polled, the task must stay on its thread. At the
    /// end, the task waits for outstanding drive requests, and then for a running checkpoint and
    /// the closing of the index. The wait for drive requests blocks the thread. The wait for the
    /// checkpoint and the index does not block the thread, because closing the index of a failed
    /// drive may take as long as the drive's timeouts.
    pub async fn run(mut self) {
        self.begin();
        #[expect(
            deprecated,
            reason = "its replacement is unsafe; an OwnedFd always returns the same descriptor"
        )]
        let event = self.ring.notify().and_then(|fd| AsyncFd::with_interest(fd, Interest::READABLE));
        match event {
            Ok(event) => {
                let mut idle = IdleTimer { counting: false, timer: Box::pin(tokio::time::sleep(IDLE)) };
                poll_fn(|cx| self.poll(cx, &event, &mut idle)).await;
            }
            Err(error) => self.fail(&error),
        }
        let (ended, end) = oneshot::channel();
        let workers = self.close();
        let join_all = move || {
            join(workers);
            // The caller may have been cancelled; ignore the error.
            let _ = ended.send(());
        };
        if let Err(error) = base::thread::spawn(ThreadClass::Store, "end", join_all) {
            tracing::warn!(%error, "cannot create the thread that waits for the end of the target's worker threads; the driver ends without waiting for them");
        }
        // An error means that the waiting thread was not created.
        let _ = end.await;
    }

    fn poll(&mut self, cx: &mut Context<'_>, event: &AsyncFd<OwnedFd>, idle: &mut IdleTimer) -> Poll<()> {
        // From here on, a command, an event or a completion wakes this task.
        self.mailbox.waker.listen(cx.waker());
        while let Poll::Ready(Ok(mut ready)) = event.poll_read_ready(cx) {
            ready.clear_ready();
        }
        match self.turn() {
            Err(error) => self.fail(&error),
            // Lets the other tasks of the thread run first, because they may add work for the next
            // round.
            Ok(true) => {
                idle.counting = false;
                cx.waker().wake_by_ref();
            }
            Ok(false) => self.rest(cx, idle),
        }
        if self.is_over() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Processes new events. Returns whether events were processed or more are ready.
    fn turn(&mut self) -> io::Result<bool> {
        let busy = self.work()?;
        let more = self.ring.start()?;
        Ok(busy || more || self.mailbox.shared.is_ready())
    }

    /// Calls [`Core::idle`] when the target has been idle for [`IDLE`].
    fn rest(&mut self, cx: &mut Context<'_>, idle: &mut IdleTimer) {
        if !self.is_quiet() {
            return;
        }
        if !std::mem::replace(&mut idle.counting, true) {
            idle.timer.as_mut().reset(Instant::now() + IDLE);
        }
        if idle.timer.as_mut().poll(cx).is_ready() {
            idle.counting = false;
            self.core.idle();
            cx.waker().wake_by_ref();
        }
    }

    fn begin(&mut self) {
        if let Err(error) = self.ring.enable() {
            self.fail(&error);
        }
    }

    /// Handles a failure after which the I/O ring is unusable.
    fn fail(&mut self, error: &io::Error) {
        self.core.poison(&format!("operation of the I/O ring ({error})"));
        self.tell_failure();
        self.mailbox.shared.abandoned.store(true, Ordering::SeqCst);
    }

    /// Publishes the reason for which the target refuses writes, if it refuses them.
    fn tell_failure(&self) {
        if let Some(reason) = &self.core.poisoned {
            let is_news =
                |told: &mut Option<String>| told.is_none() && told.replace(reason.clone()).is_none();
            self.mailbox.shared.failure.send_if_modified(is_news);
        }
    }

    fn is_over(&self) -> bool {
        self.core.closed || self.mailbox.shared.abandoned.load(Ordering::SeqCst)
    }

    /// Whether no work is in progress, but the log does not record yet that the whole log was
    /// flushed.
    fn is_quiet(&self) -> bool {
        self.core.wants_idle() && self.ring.in_flight() == 0
    }

    /// Refuses all further calls and closes the I/O ring. Returns the worker threads, which
    /// complete their current work.
    fn close(self) -> Vec<JoinHandle<()>> {
        self.core.alloc.room().close();
        self.mailbox.shared.gone.store(true, Ordering::SeqCst);
        self.mailbox.shared.awaits_checkpoint.store(false, Ordering::Relaxed);
        self.mailbox.shared.refuse_all();
        let Driver { core, ring, load_queue, checkpoint_queue, workers, .. } = self;
        drop((load_queue, checkpoint_queue));
        // Dropping the ring waits for its outstanding requests.
        drop(ring);
        drop(core);
        workers
    }

    /// Processes new events and hands out the resulting work. Returns whether it found any event.
    fn work(&mut self) -> io::Result<bool> {
        let shared = Arc::clone(&self.mailbox.shared);
        let mut busy = false;
        while let Some(arena) = shared.arenas.pop() {
            self.ring.register(&arena);
        }
        for done in self.ring.completions() {
            self.core.complete(CoreEvent::Io(done));
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
        self.tell_failure();
        shared.awaits_checkpoint.store(self.core.awaits_checkpoint(), Ordering::Relaxed);
        self.hand_out()?;
        Ok(busy)
    }

    fn hand_out(&mut self) -> io::Result<()> {
        for request in std::mem::take(&mut self.core.output.io) {
            self.ring.submit(request)?;
        }
        let is_load = |work: &BlockingWork| matches!(work, BlockingWork::Load { .. });
        let (mut loads, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.core.output.work).into_iter().partition(is_load);
        let ended = || io::Error::other("a worker thread of the target has ended");
        while !loads.is_empty() {
            // Send loads in batches, so that one wake-up serves several loads. Limit the batches,
            // so that several workers share the loads.
            let later = loads.split_off(loads.len().min(LOADS_AT_ONCE));
            self.load_queue.send(std::mem::replace(&mut loads, later)).map_err(|_| ended())?;
        }
        for work in rest {
            self.checkpoint_queue.send(work).map_err(|_| ended())?;
        }
        Ok(())
    }
}

fn join(workers: Vec<JoinHandle<()>>) {
    for worker in workers {
        if worker.join().is_err() {
            tracing::error!("a worker thread of the target has panicked");
        }
    }
}

/// Reads the index for calls, so that the target's thread need not wait.
fn loader(jobs: &Mutex<mpsc::Receiver<Vec<BlockingWork>>>, index: &Index, mailbox: &Mailbox) {
    loop {
        let batch = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(batch) = batch else { return };
        for job in batch {
            if let BlockingWork::Load { op, generation, needs } = job {
                let found = load(index, &needs);
                mailbox.event(CoreEvent::Loaded { op, generation, needs, found });
            }
        }
    }
}

/// Name of the checkpoint thread of target number `number`, without the class prefix.
pub(super) fn checkpoint_thread(number: usize) -> String {
    format!("ckpt{number}")
}

fn checkpointer(jobs: &mpsc::Receiver<BlockingWork>, drive: &dyn Drive, index: &Index, mailbox: &Mailbox) {
    mailbox.shared.checkpoint_calls.count_this_thread();
    while let Ok(job) = jobs.recv() {
        if let BlockingWork::Checkpoint(checkpoint) = job {
            mailbox.event(CoreEvent::Checkpointed(checkpoint.run(drive, index)));
        }
    }
}
