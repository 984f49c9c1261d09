//! Schedules coding tasks: chooses the host's processor or the DPU for each task.
//!
//! The scheduler implements Algorithm 1 of Ryu et al., "Evaluation of Erasure Coding and
//! Opportunistic Offloading Algorithms using DPU in Distributed Storage Systems", in the form of
//! admission control. A caller with a task requests a slot at a coding place
//! ([`Scheduler::admit`]), executes the task at this place, and reports the outcome
//! ([`TaskSlot::done`], [`TaskSlot::failed`]). Tasks wait in one bounded FIFO queue. A coding place
//! receives only as many tasks at a time as it needs to run at full speed. While the host's
//! processor is busy, all tasks go to the DPU. Otherwise the [`CodingMode`] decides. Two features
//! go beyond the paper: a failed place is not used during a cool-down and is then probed
//! (`base::health`), and `hybrid:auto` adapts the ratio α:β of tasks for the host to tasks for the
//! DPU (`auto`).
//!
//! The scheduler is used by one thread: it is neither `Send` nor `Sync`. It takes no locks except
//! those of `base::health`. It uses tokio's clock.

mod admission;
mod auto;

mod estimate;
mod meters;
mod mode;
mod recent;
#[cfg(test)]
mod simulation;
mod snapshot;
mod station;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use base::clock::Instant;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use wire::CodingMode;

use self::admission::{COOL_DOWN, TaskAdmission, TaskInService, TaskOutcome};
use self::meters::SchedulerMeters;
pub use self::snapshot::{PlaceSnapshot, Snapshot, health_status};

/// The place where a coding task runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodingPlace {
    /// The host's processor.
    Host,
    /// The DPU: its accelerator or its cores.
    Offload,
}

/// Reason why the scheduler chose the coding place of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    Mode,
    Busy,
    CoolDown,
    Probe,
    Explore,
    Only,
}

/// Capacity of a coding place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Maximum number of tasks in service, at least `lanes`: as many as the place needs to run at
    /// full speed. For a device that works in batches, the number of tasks of about two batches.
    pub slots: usize,
    /// Number of coding lanes, at least 1. A coding lane executes one task at a time, in parallel
    /// with the other lanes of the place. Each thread of a processor is a coding lane. A device
    /// that executes one batch at a time has one coding lane.
    pub lanes: usize,
}

/// Settings of a [`Scheduler`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Initial mode.
    pub mode: CodingMode,
    /// Maximum number of waiting tasks, at least 1.
    pub queue: usize,
    /// Capacity of the host.
    pub host: Capacity,
    /// Capacity of the DPU.
    pub offload: Capacity,
    /// Time for which a coding place is not used after a failure.
    pub cool_down: Duration,
    /// What the two coding places are.
    pub level: Level,
}

/// What the two coding places of a scheduler are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// The host and the DPU.
    Node,
    /// The cores and the accelerator of a DPU, which take the places of host and DPU. A task has been
    /// admitted by the scheduler of the node.
    Dpu,
}

impl Level {
    /// Names of the coding places for display and metrics.
    fn names(self) -> [&'static str; 2] {
        match self {
            Level::Node => ["host", "offload"],
            Level::Dpu => ["cores", "accelerator"],
        }
    }

    /// Names of the coding places as offloads, in logs and in metrics of their health.
    fn offloads(self) -> [&'static str; 2] {
        match self {
            Level::Node => ["ec-host", "ec"],
            Level::Dpu => ["ec-cores", "ec-accelerator"],
        }
    }
}

impl Default for SchedulerConfig {
    fn default() -> SchedulerConfig {
        SchedulerConfig {
            mode: CodingMode::LatencySensitive,
            queue: 1024,
            host: Capacity { slots: 1, lanes: 1 },
            offload: Capacity { slots: 32, lanes: 1 },
            cool_down: COOL_DOWN,
            level: Level::Node,
        }
    }
}

/// Reason why a task was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TaskRefused {
    /// Too many tasks are waiting.
    #[error(
        "{waiting} coding tasks are already waiting; send fewer requests, or configure a longer coding queue"
    )]
    QueueFull {
        /// Number of waiting tasks.
        waiting: usize,
    },
}

/// The scheduler. Clones share one state.
#[derive(Debug, Clone)]
pub struct Scheduler(Rc<Shared>);

#[derive(Debug)]
struct Shared {
    admission: RefCell<TaskAdmission<oneshot::Sender<TaskSlot>>>,
    meters: SchedulerMeters,
}

/// A slot at a coding place for one task. If the slot is dropped without a report, it is free
/// again, and the scheduler learns nothing about the place.
#[derive(Debug)]
#[must_use = "the slot stays occupied until this value is dropped"]
pub struct TaskSlot {
    scheduler: Scheduler,
    /// The task in service; `None` after the task has ended.
    ticket: Option<TaskInService>,
    place: CodingPlace,
}

impl CodingPlace {
    /// Both coding places, in the order of their indices.
    const BOTH: [CodingPlace; 2] = [CodingPlace::Host, CodingPlace::Offload];

    fn other(self) -> CodingPlace {
        match self {
            CodingPlace::Host => CodingPlace::Offload,
            CodingPlace::Offload => CodingPlace::Host,
        }
    }
}

impl Reason {
    /// All reasons, in the order of their indices.
    const ALL: [Reason; 6] =
        [Reason::Mode, Reason::Busy, Reason::CoolDown, Reason::Probe, Reason::Explore, Reason::Only];

    fn name(self) -> &'static str {
        match self {
            Reason::Mode => "mode",
            Reason::Busy => "busy",
            Reason::CoolDown => "cool-down",
            Reason::Probe => "probe",
            Reason::Explore => "explore",
            Reason::Only => "only",
        }
    }
}

impl Scheduler {
    /// Creates an idle scheduler. At first, the host counts as not busy.
    #[must_use]
    pub fn new(config: SchedulerConfig) -> Scheduler {
        Scheduler(Rc::new(Shared {
            admission: RefCell::new(TaskAdmission::new(config)),
            meters: SchedulerMeters::new(config.level),
        }))
    }

    /// Waits for a slot for a task with `work_bytes` bytes of data. Tasks receive slots in FIFO
    /// order. The future may be dropped at any time.
    ///
    /// # Errors
    /// If too many tasks are waiting already.
    pub async fn admit(&self, work_bytes: u64) -> Result<TaskSlot, TaskRefused> {
        let (sender, receiver) = oneshot::channel();
        let pushed = self.0.admission.borrow_mut().push(work_bytes, sender);
        let id = pushed.inspect_err(|_| self.0.meters.refused())?;
        // `_queued` is declared after the receiver and is therefore dropped first: the task leaves
        // the queue before its receiver is dropped.
        let _queued = InQueue { scheduler: self, id };
        self.dispatch();
        Ok(receiver.await.expect("the task of a waiting caller leaves the queue only with a slot"))
    }

    /// Whether [`admit_at`](Self::admit_at) would give a slot now.
    #[must_use]
    pub fn can_admit_at(&self, place: CodingPlace) -> bool {
        self.0.admission.borrow().can_begin_at(place, now())
    }

    /// Takes a slot for a task that can run only at this place. The scheduler does not learn from
    /// the task's time, because such tasks are of another kind. Never waits: returns `None` if the
    /// place has no free slot, or is not used because it has failed. After a failure, the task may
    /// be the probe.
    pub fn admit_at(&self, place: CodingPlace, work_bytes: u64) -> Option<TaskSlot> {
        let ticket = self.0.admission.borrow_mut().begin_at(place, work_bytes, now())?;
        self.0.meters.sent(place, Reason::Only);
        self.0.meters.show(&self.0.admission.borrow().view());
        Some(TaskSlot { scheduler: self.clone(), place, ticket: Some(ticket) })
    }

    /// Changes the mode. Tasks in service continue.
    pub fn set_mode(&self, mode: CodingMode) {
        self.0.admission.borrow_mut().set_mode(mode);
        self.dispatch();
    }

    /// Sets whether the host's processor is busy ([`super::host_load`]).
    pub fn set_host_busy(&self, busy: bool) {
        self.0.admission.borrow_mut().set_host_busy(busy);
        self.0.meters.host_busy(busy);
        self.dispatch();
    }

    /// Whether the host's processor counts as busy.
    #[must_use]
    pub fn is_host_busy(&self) -> bool {
        self.0.admission.borrow().is_host_busy()
    }

    /// Returns the scheduler's state.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of(&self.0.admission.borrow().view(), now())
    }

    /// Starts all tasks that need not wait.
    fn dispatch(&self) {
        loop {
            let next = self.0.admission.borrow_mut().next(now());
            let Some((waiter, ticket, reason)) = next else { break };
            self.0.meters.sent(ticket.place, reason);
            let slot = TaskSlot { scheduler: self.clone(), place: ticket.place, ticket: Some(ticket) };
            // If the caller has dropped its future, dropping the slot frees the place.
            drop(waiter.send(slot));
        }
        self.0.meters.show(&self.0.admission.borrow().view());
    }
}

/// Removes a task from the queue if its caller drops the future.
struct InQueue<'a> {
    scheduler: &'a Scheduler,
    id: u64,
}

impl Drop for InQueue<'_> {
    fn drop(&mut self) {
        self.scheduler.0.admission.borrow_mut().cancel(self.id);
    }
}

impl TaskSlot {
    /// The place where the task must run.
    #[must_use]
    pub fn place(&self) -> CodingPlace {
        self.place
    }

    /// Reports that the task is done. The scheduler measures the time that a coding lane of the
    /// place spent on the task.
    pub fn done(mut self) {
        self.end(TaskOutcome::Done);
    }

    /// Reports that the task is done. `took` is the time that the place spent on the task, without
    /// waiting time.
    pub fn done_in(mut self, took: Duration) {
        self.end(TaskOutcome::DoneIn(took));
    }

    /// Reports a failure of the place, which begins a cool-down. The caller may request another
    /// slot for the task. Returns whether a place remains that has not failed.
    pub fn failed(mut self, why: &str) -> bool {
        self.end(TaskOutcome::Failed(why));
        self.scheduler.0.admission.borrow().has_usable_place(now())
    }

    fn end(&mut self, outcome: TaskOutcome<'_>) {
        if let Some(ticket) = self.ticket.take() {
            self.scheduler.0.admission.borrow_mut().end(ticket, outcome, now());
            self.scheduler.dispatch();
        }
    }
}

impl Drop for TaskSlot {
    fn drop(&mut self) {
        self.end(TaskOutcome::Abandoned);
    }
}

fn now() -> Instant {
    Instant::now()
}
