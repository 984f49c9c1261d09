//! The queue of coding tasks and the choice of their coding places, without asynchronous code. The
//! caller passes the time.

use std::collections::VecDeque;
use std::time::Duration;

use base::clock::Instant;
use wire::CodingMode;

use super::auto::{Auto, Backlog};
use super::mode::RatioInterleaver;
use super::recent::Recent;
use super::station::{Station, StationHealth};
use super::{CodingPlace, Reason, SchedulerConfig, TaskRefused};

/// A task in the queue. `W` is the channel to its caller.
#[derive(Debug)]
struct QueuedTask<W> {
    id: u64,
    bytes: u64,
    waiter: W,
}

/// A task in service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskInService {
    id: u64,
    bytes: u64,
    pub(super) place: CodingPlace,
    /// True if the task is a probe: its outcome decides whether the place is used again.
    is_probe: bool,
    /// True if the task can run only at this place. It is of another kind than the tasks that the
    /// scheduler places, so its time does not tell how long they take.
    is_only: bool,
}

/// Outcome of a task in service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TaskOutcome<'a> {
    Done,
    /// Done, with the time that a lane spent on it.
    DoneIn(Duration),
    Failed(&'a str),
    /// The caller has dropped its slot without reporting an outcome.
    Abandoned,
}

/// The scheduler's state.
#[derive(Debug)]
pub(super) struct TaskAdmission<W> {
    mode: CodingMode,
    host_busy: bool,
    turns: RatioInterleaver,
    auto: Auto,
    queue: VecDeque<QueuedTask<W>>,
    queue_bytes: u64,
    queue_limit: usize,
    next_id: u64,
    refused: u64,
    recent: Recent,
    /// The state of each coding place, in the order of [`CodingPlace`].
    stations: [Station; 2],
}

/// The state that a snapshot shows.
pub(super) struct AdmissionView<'a> {
    pub(super) mode: CodingMode,
    pub(super) host_busy: bool,
    pub(super) queued: usize,
    pub(super) queued_bytes: u64,
    pub(super) refused: u64,
    pub(super) recent: &'a Recent,
    pub(super) stations: &'a [Station; 2],
}

impl<W> TaskAdmission<W> {
    pub(super) fn new(config: SchedulerConfig) -> TaskAdmission<W> {
        let [host, offload] = config.level.offloads();
        let station = |name, capacity| Station::new(name, capacity, config.cool_down);
        TaskAdmission {
            mode: config.mode,
            host_busy: false,
            turns: RatioInterleaver::default(),
            auto: Auto::new(),
            queue: VecDeque::new(),
            queue_bytes: 0,
            queue_limit: config.queue,
            next_id: 0,
            refused: 0,
            recent: Recent::default(),
            stations: [station(host, config.host), station(offload, config.offload)],
        }
    }

    pub(super) fn set_mode(&mut self, mode: CodingMode) {
        self.mode = mode;
        self.turns = RatioInterleaver::default();
    }

    pub(super) fn set_host_busy(&mut self, busy: bool) {
        self.host_busy = busy;
    }

    pub(super) fn is_host_busy(&self) -> bool {
        self.host_busy
    }

    pub(super) fn view(&self) -> AdmissionView<'_> {
        AdmissionView {
            mode: self.mode,
            host_busy: self.host_busy,
            queued: self.queue.len(),
            queued_bytes: self.queue_bytes,
            refused: self.refused,
            recent: &self.recent,
            stations: &self.stations,
        }
    }

    /// Whether [`begin_at`](Self::begin_at) would start a task.
    pub(super) fn can_begin_at(&self, place: CodingPlace, now: Instant) -> bool {
        let station = &self.stations[place as usize];
        !station.is_full() && station.standing(now) != StationHealth::Down
    }

    /// Whether a place is usable, or may be probed.
    pub(super) fn has_usable_place(&self, now: Instant) -> bool {
        self.stations.iter().any(|station| station.standing(now) != StationHealth::Down)
    }

    /// Appends a task to the queue and returns its number. [`TaskAdmission::next`] starts the task.
    pub(super) fn push(&mut self, bytes: u64, waiter: W) -> Result<u64, TaskRefused> {
        let waiting = self.queue.len();
        // Even a task that need not wait passes through the queue, so the limit is at least 1.
        let room = self.queue_limit.max(1);
        if waiting >= room {
            self.refused += 1;
            return Err(TaskRefused::QueueFull { waiting });
        }
        let id = self.next_id;
        self.next_id += 1;
        self.queue.push_back(QueuedTask { id, bytes, waiter });
        self.queue_bytes += bytes;
        Ok(id)
    }

    /// Removes a task from the queue if it is still there.
    pub(super) fn cancel(&mut self, id: u64) {
        if let Ok(at) = self.queue.binary_search_by_key(&id, |task| task.id)
            && let Some(task) = self.queue.remove(at)
        {
            self.queue_bytes -= task.bytes;
        }
    }

    /// Starts the task at the head of the queue if it need not wait. After any change, including a
    /// change of mode or load, the caller must repeat this until it returns `None`.
    pub(super) fn next(&mut self, now: Instant) -> Option<(W, TaskInService, Reason)> {
        let Some((place, reason)) = self.place_of_head(now) else {
            self.auto.observe(self.queue.len(), &self.stations, now);
            return None;
        };
        let QueuedTask { id, bytes, waiter } = self.queue.pop_front()?;
        self.queue_bytes -= bytes;
        let station = &mut self.stations[place as usize];
        let is_probe = reason == Reason::Probe;
        if is_probe {
            station.begin_probe(now);
        }
        station.begin(id, bytes, now);
        station.sent[reason as usize] += 1;
        self.auto.sent(reason);
        self.recent.sent(place, now);
        if let (CodingMode::Hybrid(ratio), false) = (self.mode, self.host_busy) {
            self.turns.taken(ratio);
        }
        Some((waiter, TaskInService { id, bytes, place, is_probe, is_only: false }, reason))
    }

    /// Starts a task that can run only at this place, unless the place is full or not usable. If
    /// tasks are waiting although the place has a free slot, they wait for the other place.
    pub(super) fn begin_at(&mut self, place: CodingPlace, bytes: u64, now: Instant) -> Option<TaskInService> {
        if !self.can_begin_at(place, now) {
            return None;
        }
        let station = &mut self.stations[place as usize];
        let is_probe = station.standing(now) == StationHealth::ProbeDue;
        if is_probe {
            station.begin_probe(now);
        }
        let id = self.next_id;
        self.next_id += 1;
        station.begin_only(id, bytes, now);
        station.sent[Reason::Only as usize] += 1;
        self.auto.observe(self.queue.len(), &self.stations, now);
        Some(TaskInService { id, bytes, place, is_probe, is_only: true })
    }

    /// Chooses the coding place of the task at the head of the queue, with the reason. Returns
    /// `None` if the queue is empty or the task must wait.
    fn place_of_head(&self, now: Instant) -> Option<(CodingPlace, Reason)> {
        let head_bytes = self.queue.front()?.bytes;
        let [host, offload] = CodingPlace::BOTH.map(|place| self.stations[place as usize].standing(now));
        let only = match (host, offload) {
            // If both places are down, the host must execute the task.
            (_, StationHealth::Down) => Some(CodingPlace::Host),
            (StationHealth::Down, _) => Some(CodingPlace::Offload),
            _ => None,
        };
        let (place, reason) = match (only, self.asked_for()) {
            (Some(place), asked) if asked != Some(place) => (place, Reason::CoolDown),
            (_, Some(place)) => (place, if self.host_busy { Reason::Busy } else { Reason::Mode }),
            (_, None) => {
                let backlog = Backlog { tasks: self.queue.len(), bytes: self.queue_bytes, head_bytes };
                self.auto.choose(backlog, &self.stations, now)?
            }
        };
        let station = &self.stations[place as usize];
        if station.is_full() {
            return None;
        }
        let probe_due = [host, offload][place as usize] == StationHealth::ProbeDue;
        Some((place, if probe_due { Reason::Probe } else { reason }))
    }

    /// Returns the coding place that Algorithm 1 of Ryu et al. selects by load or mode; `None` if
    /// `hybrid:auto` decides.
    fn asked_for(&self) -> Option<CodingPlace> {
        match self.mode {
            _ if self.host_busy => Some(CodingPlace::Offload),
            CodingMode::LatencySensitive => Some(CodingPlace::Host),
            CodingMode::Async => Some(CodingPlace::Offload),
            CodingMode::Hybrid(ratio) => Some(self.turns.next(ratio)),
            CodingMode::Auto => None,
        }
    }

    /// Records the end of a task in service.
    pub(super) fn end(&mut self, ticket: TaskInService, outcome: TaskOutcome<'_>, now: Instant) {
        let station = &mut self.stations[ticket.place as usize];
        let seen = station.end(ticket.id, now);
        match outcome {
            TaskOutcome::Done | TaskOutcome::DoneIn(_) => {
                let took = if let TaskOutcome::DoneIn(told) = outcome { told } else { seen };
                if !ticket.is_only {
                    station.estimate.learn(ticket.bytes, took, now);
                }
                if ticket.is_probe {
                    station.health.probed(Ok(()), now);
                }
            }
            TaskOutcome::Failed(why) if ticket.is_probe => station.health.probed(Err(why), now),
            TaskOutcome::Failed(why) => drop(station.health.failed(why, now)),
            TaskOutcome::Abandoned if ticket.is_probe => station.vacate_probe(),
            TaskOutcome::Abandoned => {}
        }
    }
}

/// Default time for which a coding place is not used after a failure.
pub(super) const COOL_DOWN: Duration = Duration::from_secs(2);
