//! Where each piece of coding work is done: the host's processor or the DPU.
//!
//! This is Algorithm 1 of Ryu et al., "Evaluation of Erasure Coding and Opportunistic Offloading Algorithms using DPU in
//! Distributed Storage Systems", as admission: whoever has work asks for a place ([`Scheduler::admit`]), does the work there
//! itself, and says how it went ([`TaskSlot::done`], [`TaskSlot::failed`]). Work waits in one bounded queue, first come first
//! served; a place takes no more at a time than it needs to be at full speed. While the host's processor is busy all of it
//! goes to the offload; otherwise the [`CodingMode`] decides. Beyond the paper: a place that fails is left alone and probed
//! (`base::health`), and `hybrid:auto` finds α:β by itself (`auto`).
//!
//! For one thread: it is neither `Send` nor `Sync`, and takes no locks but those of `base::health`. Its clock is tokio's.

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
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use wire::CodingMode;

use self::admission::{COOL_DOWN, TaskAdmission, TaskInService, TaskOutcome};
use self::meters::SchedulerMeters;
pub use self::snapshot::{PlaceSnapshot, Snapshot, offload_state};

/// Where a piece of work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodingPlace {
    /// By the host's processor.
    Host,
    /// By the DPU: its accelerator or its cores.
    Offload,
}

/// Why a task goes where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    Mode,
    Busy,
    CoolDown,
    Probe,
    Explore,
}

/// How much a place takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Most tasks in service at a time, at least `lanes`: as many as the place needs to be at full speed. For a device that
    /// works in batches, about two batches.
    pub slots: usize,
    /// How many tasks it works on side by side, at least 1: its threads; 1 for a device that takes one batch at a time.
    pub lanes: usize,
}

/// Settings of a [`Scheduler`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The mode to begin with.
    pub mode: CodingMode,
    /// Most tasks that wait, at least 1.
    pub queue: usize,
    /// What the host takes.
    pub host: Capacity,
    /// What the offload takes.
    pub offload: Capacity,
    /// How long a place that failed is left alone.
    pub cool_down: Duration,
}

impl Default for SchedulerConfig {
    fn default() -> SchedulerConfig {
        SchedulerConfig {
            mode: CodingMode::LatencySensitive,
            queue: 1024,
            host: Capacity { slots: 1, lanes: 1 },
            offload: Capacity { slots: 32, lanes: 1 },
            cool_down: COOL_DOWN,
        }
    }
}

/// Why a task gets no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TaskRefused {
    /// Too many wait already.
    #[error("{waiting} tasks wait for erasure coding already: slow down, or let the coding queue be longer")]
    QueueFull {
        /// Tasks that wait.
        waiting: usize,
    },
}

/// The scheduler. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Scheduler(Rc<Shared>);

#[derive(Debug)]
struct Shared {
    admission: RefCell<TaskAdmission<oneshot::Sender<TaskSlot>>>,
    meters: SchedulerMeters,
}

/// A place for one task. Dropped without a report, it says nothing about the place.
#[derive(Debug)]
#[must_use = "the place is kept until this is dropped"]
pub struct TaskSlot {
    scheduler: Scheduler,
    /// Taken when the task ends.
    ticket: Option<TaskInService>,
    place: CodingPlace,
}

impl CodingPlace {
    /// Both, in order.
    const BOTH: [CodingPlace; 2] = [CodingPlace::Host, CodingPlace::Offload];

    /// For people and metrics: `host` or `offload`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            CodingPlace::Host => "host",
            CodingPlace::Offload => "offload",
        }
    }

    fn other(self) -> CodingPlace {
        match self {
            CodingPlace::Host => CodingPlace::Offload,
            CodingPlace::Offload => CodingPlace::Host,
        }
    }
}

impl Reason {
    /// All, in order.
    const ALL: [Reason; 5] = [Reason::Mode, Reason::Busy, Reason::CoolDown, Reason::Probe, Reason::Explore];

    fn name(self) -> &'static str {
        match self {
            Reason::Mode => "mode",
            Reason::Busy => "busy",
            Reason::CoolDown => "cool-down",
            Reason::Probe => "probe",
            Reason::Explore => "explore",
        }
    }
}

impl Scheduler {
    /// A scheduler with nothing to do. The host counts as not busy.
    #[must_use]
    pub fn new(config: SchedulerConfig) -> Scheduler {
        Scheduler(Rc::new(Shared {
            admission: RefCell::new(TaskAdmission::new(config)),
            meters: SchedulerMeters::new(),
        }))
    }

    /// Waits for a place for a task of so many bytes of data. First come, first served. May be dropped at any time.
    ///
    /// # Errors
    /// If too many wait already.
    pub async fn admit(&self, work_bytes: u64) -> Result<TaskSlot, TaskRefused> {
        let (sender, receiver) = oneshot::channel();
        let pushed = self.0.admission.borrow_mut().push(work_bytes, sender);
        let id = pushed.inspect_err(|_| self.0.meters.refused())?;
        // After the receiver, so that a queued task is gone before its receiver is.
        let _queued = InQueue { scheduler: self, id };
        self.dispatch();
        Ok(receiver.await.expect("a task leaves the queue with a slot, unless its caller has gone"))
    }

    /// Changes the mode; what is in service goes on.
    pub fn set_mode(&self, mode: CodingMode) {
        self.0.admission.borrow_mut().set_mode(mode);
        self.dispatch();
    }

    /// Whether the host's processor is busy ([`super::host_load`]).
    pub fn set_host_busy(&self, busy: bool) {
        self.0.admission.borrow_mut().set_host_busy(busy);
        self.0.meters.host_busy(busy);
        self.dispatch();
    }

    /// What it does.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of(&self.0.admission.borrow().view(), now())
    }

    /// Sends off what need not wait.
    fn dispatch(&self) {
        loop {
            let next = self.0.admission.borrow_mut().next(now());
            let Some((waiter, ticket, reason)) = next else { break };
            self.0.meters.sent(ticket.place, reason);
            let slot = TaskSlot { scheduler: self.clone(), place: ticket.place, ticket: Some(ticket) };
            // If its caller has gone, the slot comes back and frees the place.
            drop(waiter.send(slot));
        }
        self.0.meters.show(&self.0.admission.borrow().view());
    }
}

/// Takes a task whose caller has gone out of the queue.
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
    /// Where the work is to be done.
    #[must_use]
    pub fn place(&self) -> CodingPlace {
        self.place
    }

    /// The work is done: the time since the slot was given is what it took.
    pub fn done(mut self) {
        self.end(TaskOutcome::Done);
    }

    /// The work is done, and the place says that it took that long: without what it waited for there.
    pub fn done_in(mut self, took: Duration) {
        self.end(TaskOutcome::DoneIn(took));
    }

    /// The place failed. It is left alone for a while; the work can be admitted again.
    pub fn failed(mut self, why: &str) {
        self.end(TaskOutcome::Failed(why));
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
    tokio::time::Instant::now().into_std()
}
