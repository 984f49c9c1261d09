//! [`Worker`]: threads that execute coding tasks. The DPU's accelerator, the DPU's cores and the
//! host's processor have one worker each.
//!
//! A task is a closure, and the caller that submits the task waits for the result. The queue is
//! bounded. A worker without an [`EngineRate`] returns each result at once. A worker with an
//! `EngineRate` emulates a device: it takes all waiting tasks as one batch, computes them, and
//! sleeps until the device would have finished.
//!
//! A worker without threads computes each task in the call that submits the task, and delays the
//! result on the clock of the Tokio runtime. Simulations, which run on one thread, use such workers.

use std::collections::VecDeque;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use base::clock::Instant;
use base::fault::{Action, Faults, Site};
use base::thread::{ThreadClass, catch_panic, cpu_time, spawn};
use metrics::{Counter, counter};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::batch::{CodingWork, EngineRate};

/// Duration of a task on a processor whose threads are simulated, in nanoseconds per KiB of data.
/// One core of a fast processor needs about this time.
const SIMULATED_NS_PER_KIB: u64 = 100;

/// Reason why a task has no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    /// The queue is full.
    #[error("{waiting} tasks are already waiting for the worker {name:?}; submit fewer tasks at a time")]
    QueueFull {
        /// Name of the worker.
        name: &'static str,
        /// Number of waiting tasks.
        waiting: usize,
    },
    /// The worker has stopped.
    #[error("the worker {0:?} has been shut down; run the task on another worker")]
    Stopped(&'static str),
    /// The task panicked.
    #[error("the task panicked: {0}; this is a bug, please report it")]
    Panicked(String),
    /// A fault was injected.
    #[error("a fault was injected at {}; run the task on another worker, or clear the fault", Site::EcOffload.name())]
    Injected,
}

/// Statistics of a worker, for the command `status`. The counts begin when the worker starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStats {
    /// Name of the worker.
    pub name: String,
    /// Number of waiting tasks.
    pub queued: usize,
    /// Number of finished tasks.
    pub tasks: u64,
    /// Data of the finished tasks, in bytes.
    pub bytes: u64,
    /// Number of batches. If the worker does not work in batches, each task counts as one batch.
    pub batches: u64,
    /// Number of tasks without a result: a fault was injected, or the task panicked.
    pub failed: u64,
    /// CPU time used for the tasks, in nanoseconds; simulated time if the worker has no threads.
    pub cpu_ns: u64,
    /// Number of batches for which this machine needed more time than the emulated device would
    /// have needed.
    pub overruns: u64,
}

/// Settings of a worker.
pub(super) struct WorkerSettings {
    pub(super) name: &'static str,
    pub(super) class: ThreadClass,
    /// Number of threads. With 0 threads, the submitting thread computes the tasks.
    pub(super) threads: usize,
    /// Maximum number of waiting tasks.
    pub(super) queue: usize,
    /// For a device: its speed, and the maximum number of bytes of data in a batch of several
    /// tasks.
    pub(super) device: Option<(EngineRate, u64)>,
    pub(super) faults: Faults,
}

/// Executes coding tasks, usually on threads of its own. Dropping the worker stops the threads and
/// abandons the tasks that have no result yet.
pub struct Worker {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    settings: WorkerSettings,
    state: Mutex<State>,
    /// Signals that tasks are waiting, or that the worker stops.
    changed: Condvar,
    meters: WorkerMeters,
}

#[derive(Default)]
struct State {
    queue: VecDeque<QueuedJob>,
    stopping: bool,
}

/// A closure that computes a task. The closure's argument is true if a fault is injected; then the
/// task fails. The closure returns `None` if no caller waits for the result.
type CodingJob = Box<dyn FnOnce(bool) -> Option<ComputedJob> + Send>;

struct ComputedJob {
    /// True if the task has a result.
    is_done: bool,
    /// Sends the result to the caller.
    answer: Box<dyn FnOnce() + Send>,
}

/// The result of a task that the submitting thread has computed, and the time at which the caller
/// gets it.
struct InlineResult {
    due: Instant,
    computed: ComputedJob,
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
    /// If the system cannot create another thread.
    pub(super) fn start(settings: WorkerSettings) -> io::Result<Worker> {
        let (class, threads) = (settings.class, settings.threads);
        // If starting a thread fails, dropping the worker stops the threads that have started.
        let mut worker = Worker::inline(settings);
        for number in 0..threads {
            let shared = Arc::clone(&worker.shared);
            worker.threads.push(spawn(class, &number.to_string(), move || shared.run())?);
        }
        Ok(worker)
    }

    /// Creates a worker without threads.
    pub(super) fn inline(settings: WorkerSettings) -> Worker {
        let meters = WorkerMeters::of(settings.name);
        let shared = Arc::new(Shared { settings, state: Mutex::default(), changed: Condvar::new(), meters });
        Worker { shared, threads: Vec::new() }
    }

    /// Returns the name for display, which shows whether the worker is emulated.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.shared.settings.name
    }

    /// Queues a task immediately, and returns a future of its result. A task is skipped if its
    /// caller has dropped the future before the task starts.
    ///
    /// # Errors
    /// If the queue is full, the worker has stopped, the task panicked, or a fault was injected.
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
            // If the caller has dropped its future, the result is not needed.
            Some(ComputedJob { is_done, answer: Box::new(move || drop(sender.send(result))) })
        });
        let item = QueuedJob { work, job };
        let name = self.name();
        let taken = match self.simulated_duration(work) {
            Some(duration) => Ok(self.shared.compute_inline(item, duration)),
            None => self.shared.take(item).map(|()| None),
        };
        async move {
            if let Some(InlineResult { due, computed }) = taken? {
                tokio::time::sleep_until(due).await;
                (computed.answer)();
            }
            receiver.await.unwrap_or(Err(WorkerError::Stopped(name)))
        }
    }

    /// Returns the simulated duration of a task, or `None` if threads compute the tasks.
    #[must_use]
    pub fn simulated_duration(&self, work: CodingWork) -> Option<Duration> {
        self.threads.is_empty().then(|| match self.shared.settings.device {
            Some((rate, _)) => rate.of_batch(&[work]),
            None => Duration::from_nanos(work.bytes.div_ceil(1024) * SIMULATED_NS_PER_KIB),
        })
    }

    /// Returns the worker's statistics.
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
                tracing::error!(worker = self.shared.settings.name, "a thread of the worker has panicked");
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

    /// Computes a task on the calling thread. Returns `None` if no caller waits for the result.
    fn compute_inline(&self, item: QueuedJob, duration: Duration) -> Option<InlineResult> {
        let mut due = Instant::now() + duration;
        let fault = self.settings.faults.hit(Site::EcOffload);
        if let Some(Action::Stall(late)) = fault {
            due += late;
        }
        let computed = (item.job)(fault == Some(Action::Fail))?;
        self.meters.batches.fetch_add(1, Ordering::Relaxed);
        self.meters.cpu_ns.fetch_add(duration.as_nanos() as u64, Ordering::Relaxed);
        self.meters.count(item.work, computed.is_done);
        Some(InlineResult { due, computed })
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

    /// Sleeps until the emulated device would have finished the computed batch. Returns `false` if
    /// the worker stops earlier.
    fn keep_pace(&self, due: Instant) -> bool {
        if due <= Instant::now() {
            self.meters.overruns.fetch_add(1, Ordering::Relaxed);
            self.meters.overruns_metric.increment(1);
            return true;
        }
        self.sleep_until(due)
    }

    /// Waits for tasks. Returns `None` when the worker stops.
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

    /// Sleeps until `due`. Returns `false` if the worker stops earlier.
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
