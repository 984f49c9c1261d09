//! [`Hardware`]: a real drive below a driver, accessed by io_uring and by worker threads.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::task::{Context, Poll};
use std::thread::JoinHandle;

use base::mem::Arena;
use base::thread::ThreadClass;
use futures::channel::oneshot;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::backend::DriverBackend;
use super::checkpoint::CheckpointPart;
use super::drive::{Drive, PARALLEL_READS};
use super::index::Index;
use super::io::{IoDone, IoRequest};
use super::mailbox::Mailbox;
use super::messages::{BlockingWork, CoreEvent, load};
use super::uring::IoRing;
use crate::Result;

/// Number of threads that read the index for calls.
pub(super) const LOADERS: usize = PARALLEL_READS;

/// The I/O ring and the worker threads of a target on a real drive.
pub(super) struct Hardware {
    pub(super) ring: IoRing,
    /// Reports completions to the driver's task; `None` if the driver has its own thread.
    event: Option<AsyncFd<OwnedFd>>,
    load_queue: mpsc::Sender<Vec<BlockingWork>>,
    checkpoint_queue: mpsc::Sender<BlockingWork>,
    workers: Vec<JoinHandle<()>>,
}

impl Hardware {
    /// Starts the worker threads of target number `number`.
    pub(super) fn new(
        ring: IoRing,
        mailbox: &Mailbox,
        drive: Arc<dyn Drive>,
        index: Arc<Index>,
        number: usize,
    ) -> Result<Hardware> {
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
        Ok(Hardware { ring, event: None, load_queue, checkpoint_queue, workers })
    }

    /// Closes the I/O ring. Returns the worker threads, which complete their current work.
    pub(super) fn stop(self) -> Vec<JoinHandle<()>> {
        let Hardware { ring, event, load_queue, checkpoint_queue, workers } = self;
        drop((load_queue, checkpoint_queue));
        // Dropping the ring waits for its outstanding requests.
        drop((ring, event));
        workers
    }
}

impl DriverBackend for Hardware {
    fn enable(&mut self) -> io::Result<()> {
        self.ring.enable()
    }

    fn listen(&mut self) -> io::Result<()> {
        #[expect(
            deprecated,
            reason = "its replacement is unsafe; an OwnedFd always returns the same descriptor"
        )]
        let event = self.ring.notify().and_then(|fd| AsyncFd::with_interest(fd, Interest::READABLE))?;
        self.event = Some(event);
        Ok(())
    }

    fn poll(&mut self, cx: &mut Context<'_>) {
        let Some(event) = &self.event else { return };
        while let Poll::Ready(Ok(mut ready)) = event.poll_read_ready(cx) {
            ready.clear_ready();
        }
    }

    fn register(&mut self, arena: &Arc<Arena>) {
        self.ring.register(arena);
    }

    fn submit(&mut self, request: IoRequest) -> io::Result<()> {
        self.ring.submit(request)
    }

    fn start(&mut self) -> io::Result<bool> {
        self.ring.start()
    }

    fn completions(&mut self) -> Vec<IoDone> {
        self.ring.completions()
    }

    fn in_flight(&self) -> usize {
        self.ring.in_flight()
    }

    fn load(&mut self, loads: Vec<BlockingWork>) -> io::Result<()> {
        self.load_queue.send(loads).map_err(|_| ended())
    }

    fn checkpoint(&mut self, checkpoint: BlockingWork) -> io::Result<()> {
        self.checkpoint_queue.send(checkpoint).map_err(|_| ended())
    }

    /// Blocks the thread until the outstanding drive requests have completed. The future waits for
    /// a running checkpoint and for the closing of the index without blocking the thread, because
    /// closing the index of a failed drive may take as long as the drive's timeouts.
    fn close(self) -> impl Future<Output = ()> {
        let workers = self.stop();
        let (ended, end) = oneshot::channel();
        let join_all = move || {
            join(workers);
            // The caller may have been cancelled; ignore the error.
            let _ = ended.send(());
        };
        if let Err(error) = base::thread::spawn(ThreadClass::Store, "end", join_all) {
            tracing::warn!(%error, "cannot create the thread that waits for the end of the target's worker threads; the driver ends without waiting for them");
        }
        // An error means that the waiting thread was not created.
        async move {
            let _ = end.await;
        }
    }
}

fn ended() -> io::Error {
    io::Error::other("a worker thread of the target has ended")
}

pub(super) fn join(workers: Vec<JoinHandle<()>>) {
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
    // Checkpoints may take long, but transactions should not wait for the CPU meanwhile.
    base::thread::become_background();
    let to_core = mailbox.clone();
    let whole = CheckpointPart::whole(Arc::new(move |progress| {
        // The checkpoint makes progress even if it makes no call to the drive for a long time.
        to_core.shared.checkpoint_calls.add(1);
        to_core.event(CoreEvent::CheckpointAdvanced(progress));
    }));
    while let Ok(job) = jobs.recv() {
        match job {
            BlockingWork::Checkpoint(checkpoint) => {
                mailbox.event(CoreEvent::Checkpointed(checkpoint.run(drive, index, &whole)));
            }
            BlockingWork::Discard(changes) => drop(changes),
            BlockingWork::Load { .. } => {}
        }
    }
}
