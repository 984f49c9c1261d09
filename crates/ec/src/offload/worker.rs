//! Threads that do pieces of work in turn: what the DPU's accelerator and its cores have in common.
//!
//! A piece of work is a closure; whoever hands it over waits for what it returns. The queue is bounded. A worker without a
//! [`EngineRate`] answers each piece at once. One with a pace takes what waits as one batch, computes it, and answers when the
//! device that it stands for would have: until then it sleeps.

use std::collections::VecDeque;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use base::fault::{Action, Faults, Site};
use base::thread::{ThreadClass, catch_panic, cpu_time, spawn};
use metrics::{Counter, counter};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::batch::{CodingWork, EngineRate};

/// Why there is no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    /// The queue is full.
    #[error("{waiting} pieces of work wait for the {name} already: hand over less at a time")]
    QueueFull {
        /// The worker.
        name: &'static str,
        /// How many wait.
        waiting: usize,
    },
    /// The worker has ended.
    #[error("the {0} has been shut down: do the work elsewhere")]
    Stopped(&'static str),
    /// The work panicked.
    #[error("the work panicked: {0}; this is a fault of the program, please report it")]
    Panicked(String),
    /// A fault was injected.
    #[error("a fault was injected at {}: do the work elsewhere, or clear the fault", Site::EcOffload.name())]
    Injected,
}

/// What a worker has done, for `status`. Counts are since it was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStats {
    /// What it is.
    pub name: String,
    /// Pieces of work that wait.
    pub queued: usize,
    /// Pieces of work done.
    pub tasks: u64,
    /// Their data, in bytes.
    pub bytes: u64,
    /// Batches, if it is a device that works in batches; otherwise the same as `tasks`.
    pub batches: u64,
    /// Pieces of work that gave no result: a fault was injected, or they panicked.
    pub failed: u64,
    /// CPU time that it has used for them, in nanoseconds.
    pub cpu_ns: u64,
    /// Batches for which this machine took longer than the emulated device would have: the emulation was too slow.
    pub overruns: u64,
}

/// What a worker is.
pub(super) struct WorkerSettings {
    pub(super) name: &'static str,
    pub(super) class: ThreadClass,
    pub(super) threads: usize,
    /// Most pieces of work that wait.
    pub(super) queue: usize,
    /// For a device: how long a batch takes it, and the most data of a batch of more than one piece, in bytes.
    pub(super) device: Option<(EngineRate, u64)>,
    pub(super) faults: Faults,
}

/// The threads. They end when this is dropped; work that was not answered is then given up.
pub struct Worker {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    settings: WorkerSettings,
    state: Mutex<State>,
    /// There is something to do, or the end has come.
    changed: Condvar,
    meters: WorkerMeters,
}

#[derive(Default)]
struct State {
    queue: VecDeque<QueuedJob>,
    stopping: bool,
}

/// Computes, unless it is made to fail; `None` if nobody waits for the result.
type CodingJob = Box<dyn FnOnce(bool) -> Option<ComputedJob> + Send>;

struct ComputedJob {
    /// Whether there is a result.
    is_done: bool,
    /// Tells the caller.
    answer: Box<dyn FnOnce() + Send>,
}

struct QueuedJob {
    work: CodingWork,
    job: CodingJob,
}

struct WorkerMeters {
    tasks: AtomicU64,
    bytes: AtomicU64,
    batches: AtomicU64,
    failed: AtomicU64,
    cpu_ns: AtomicU64,
    overruns: AtomicU64,
    tasks_metric: Counter,
    bytes_metric: Counter,
    failed_metric: Counter,
    overruns_metric: Counter,
}

impl Worker {
    /// # Errors
    /// If the system has no room for another thread.
    pub(super) fn start(settings: WorkerSettings) -> io::Result<Worker> {
        let (class, threads) = (settings.class, settings.threads.max(1));
        let meters = WorkerMeters::of(settings.name);
        let shared = Arc::new(Shared { settings, state: Mutex::default(), changed: Condvar::new(), meters });
        // Dropped on failure, it ends the threads that have been started.
        let mut worker = Worker { shared, threads: Vec::new() };
        for number in 0..threads {
            let shared = Arc::clone(&worker.shared);
            worker.threads.push(spawn(class, &number.to_string(), move || shared.run())?);
        }
        Ok(worker)
    }

    /// What it is, for people; says so if it is emulated.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.shared.settings.name
    }

    /// Hands a piece of work over, at once; the result is waited for. Work whose caller does not wait any more is not
    /// begun.
    ///
    /// # Errors
    /// If the queue is full, the worker has ended, the work panicked, or a fault was injected.
    pub fn submit<R, F>(
        &self,
        work: CodingWork,
        compute: F,
    ) -> impl Future<Output = Result<R, WorkerError>> + Send + use<R, F>
    where
        R: Send + 'static,
        F: FnOnce() -> R + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let job: CodingJob = Box::new(move |fails| {
            let result = match fails {
                true => Err(WorkerError::Injected),
                false if sender.is_closed() => return None,
                false => catch_panic(AssertUnwindSafe(compute)).map_err(WorkerError::Panicked),
            };
            let is_done = result.is_ok();
            // If the caller does not wait any more, nobody misses the result.
            Some(ComputedJob { is_done, answer: Box::new(move || drop(sender.send(result))) })
        });
        let (name, taken) = (self.name(), self.shared.take(QueuedJob { work, job }));
        async move {
            taken?;
            receiver.await.unwrap_or(Err(WorkerError::Stopped(name)))
        }
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> WorkerStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let meters = &self.shared.meters;
        WorkerStats {
            name: self.name().to_owned(),
            queued: self.shared.lock().queue.len(),
            tasks: count(&meters.tasks),
            bytes: count(&meters.bytes),
            batches: count(&meters.batches),
            failed: count(&meters.failed),
            cpu_ns: count(&meters.cpu_ns),
            overruns: count(&meters.overruns),
        }
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.stats().fmt(f)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let given_up = {
            let mut state = self.shared.lock();
            state.stopping = true;
            std::mem::take(&mut state.queue)
        };
        self.shared.changed.notify_all();
        drop(given_up);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!(worker = self.shared.settings.name, "a thread had panicked");
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, item: QueuedJob) -> Result<(), WorkerError> {
        let mut state = self.lock();
        let (name, waiting) = (self.settings.name, state.queue.len());
        if waiting >= self.settings.queue.max(1) {
            return Err(WorkerError::QueueFull { name, waiting });
        }
        state.queue.push_back(item);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    fn run(&self) {
        while let Some(batch) = self.next_batch() {
            let started = Instant::now();
            let (work, computed): (Vec<CodingWork>, Vec<ComputedJob>) =
                batch.into_iter().filter_map(|item| self.compute(item)).unzip();
            if work.is_empty() {
                continue;
            }
            self.meters.batches.fetch_add(1, Ordering::Relaxed);
            if let Some((pace, _)) = self.settings.device
                && !self.keep_pace(started + pace.of_batch(&work))
            {
                return;
            }
            computed.into_iter().for_each(|computed| (computed.answer)());
        }
    }

    /// A batch has been computed, which the device would have done by then. `false` if the end came before.
    fn keep_pace(&self, due: Instant) -> bool {
        if due <= Instant::now() {
            self.meters.overruns.fetch_add(1, Ordering::Relaxed);
            self.meters.overruns_metric.increment(1);
            return true;
        }
        self.sleep_until(due)
    }

    /// Waits for work; `None` at the end.
    fn next_batch(&self) -> Option<Vec<QueuedJob>> {
        let idle = |state: &mut State| state.queue.is_empty() && !state.stopping;
        let mut state = self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
        let first = state.queue.pop_front()?;
        let mut bytes = first.work.bytes;
        let mut batch = vec![first];
        let fits = |bytes: u64| self.settings.device.is_some_and(|(_, limit)| bytes <= limit);
        while let Some(next) = state.queue.front().map(|item| item.work.bytes)
            && fits(bytes.saturating_add(next))
        {
            bytes += next;
            batch.extend(state.queue.pop_front());
        }
        Some(batch)
    }

    fn compute(&self, item: QueuedJob) -> Option<(CodingWork, ComputedJob)> {
        let fault = self.settings.faults.hit(Site::EcOffload);
        if let Some(Action::Stall(late)) = fault {
            self.sleep_until(Instant::now() + late);
        }
        let before = cpu_time();
        let computed = (item.job)(fault == Some(Action::Fail));
        let used = (cpu_time() - before).as_nanos() as u64;
        self.meters.cpu_ns.fetch_add(used, Ordering::Relaxed);
        let computed = computed?;
        self.meters.count(item.work, computed.is_done);
        Some((item.work, computed))
    }

    /// Sleeps; `false` if the end came before.
    fn sleep_until(&self, due: Instant) -> bool {
        let mut state = self.lock();
        while !state.stopping {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let woken = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
            state = woken.0;
        }
        false
    }
}

impl WorkerMeters {
    fn of(name: &'static str) -> WorkerMeters {
        WorkerMeters {
            tasks: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            batches: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            cpu_ns: AtomicU64::new(0),
            overruns: AtomicU64::new(0),
            tasks_metric: counter!("outboard_ec_worker_tasks_total", "worker" => name),
            bytes_metric: counter!("outboard_ec_worker_bytes", "worker" => name),
            failed_metric: counter!("outboard_ec_worker_failed_total", "worker" => name),
            overruns_metric: counter!("outboard_ec_worker_overruns_total", "worker" => name),
        }
    }

    fn count(&self, work: CodingWork, is_done: bool) {
        if is_done {
            self.tasks.fetch_add(1, Ordering::Relaxed);
            self.bytes.fetch_add(work.bytes, Ordering::Relaxed);
            self.tasks_metric.increment(1);
            self.bytes_metric.increment(work.bytes);
        } else {
            self.failed.fetch_add(1, Ordering::Relaxed);
            self.failed_metric.increment(1);
        }
    }
}

#[cfg(test)]
mod tests;
