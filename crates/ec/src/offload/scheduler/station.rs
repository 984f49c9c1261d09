//! [`Station`]: the state of one coding place, with its tasks in service, their cost, and the
//! health of the place.

use std::time::Duration;

use base::clock::Instant;
use base::health::{HealthState, OffloadHealth};

use super::estimate::{Cost, PlaceEstimate};
use super::{Capacity, Reason};

/// A task in service.
#[derive(Debug)]
struct StationTask {
    id: u64,
    bytes: u64,
    /// True if the task can run only at this place.
    is_only: bool,
    /// Time when a lane started the task; `None` while the task waits inside the place.
    running: Option<Instant>,
}

/// Health of a coding place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StationHealth {
    /// The place works.
    Usable,
    /// The place has failed; the next task may be the probe.
    ProbeDue,
    /// The place has failed and is not used.
    Down,
}

/// State of one coding place.
#[derive(Debug)]
pub(super) struct Station {
    pub(super) capacity: Capacity,
    pub(super) health: OffloadHealth,
    pub(super) estimate: PlaceEstimate,
    /// Number of tasks sent to this place, by reason.
    pub(super) sent: [u64; Reason::ALL.len()],
    /// The tasks in service, in the order of arrival; at most `capacity.slots`.
    serving: Vec<StationTask>,
    /// True if a probe has begun but its task was abandoned. Then the next task becomes the probe.
    probe_vacant: bool,
}

impl Station {
    pub(super) fn new(name: &'static str, capacity: Capacity, cool_down: Duration) -> Station {
        let lanes = capacity.lanes.max(1);
        Station {
            capacity: Capacity { lanes, slots: capacity.slots.max(lanes) },
            health: OffloadHealth::new(name, cool_down),
            estimate: PlaceEstimate::default(),
            sent: Default::default(),
            serving: Vec::new(),
            probe_vacant: false,
        }
    }

    pub(super) fn in_service(&self) -> usize {
        self.serving.len()
    }

    /// Number of tasks in service that could also run at the other place.
    pub(super) fn movable(&self) -> usize {
        self.serving.iter().filter(|task| !task.is_only).count()
    }

    pub(super) fn is_full(&self) -> bool {
        self.serving.len() >= self.capacity.slots
    }

    pub(super) fn standing(&self, now: Instant) -> StationHealth {
        match self.health.report().state {
            HealthState::Active => StationHealth::Usable,
            HealthState::CoolingDown(until) if until <= now => StationHealth::ProbeDue,
            HealthState::Probing if self.probe_vacant => StationHealth::ProbeDue,
            HealthState::CoolingDown(_) | HealthState::Probing => StationHealth::Down,
        }
    }

    /// Begins a probe: the next task that is sent to this place is the probe.
    pub(super) fn begin_probe(&mut self, now: Instant) {
        let begun = self.health.begin_probe(now) || std::mem::take(&mut self.probe_vacant);
        debug_assert!(begun, "a probe must be due");
    }

    pub(super) fn vacate_probe(&mut self) {
        self.probe_vacant = true;
    }

    pub(super) fn begin(&mut self, id: u64, bytes: u64, now: Instant) {
        self.put(StationTask { id, bytes, is_only: false, running: None }, now);
    }

    /// Starts a task that can run only at this place.
    pub(super) fn begin_only(&mut self, id: u64, bytes: u64, now: Instant) {
        self.put(StationTask { id, bytes, is_only: true, running: None }, now);
    }

    fn put(&mut self, task: StationTask, now: Instant) {
        debug_assert!(!self.is_full(), "a full place must not receive a task");
        self.serving.push(task);
        self.run_next(now);
    }

    /// Removes a task. Returns the time that a lane spent on the task: since the task's start, or
    /// since the end of its predecessor on the lane.
    pub(super) fn end(&mut self, id: u64, now: Instant) -> Duration {
        let at =
            self.serving.iter().position(|task| task.id == id).expect("a task in service ends only once");
        let running = self.serving.remove(at).running;
        self.run_next(now);
        running.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Assigns tasks that wait inside the place to free lanes, in order.
    fn run_next(&mut self, now: Instant) {
        let running = self.serving.iter().filter(|task| task.running.is_some()).count();
        let free = self.capacity.lanes.saturating_sub(running);
        for task in self.serving.iter_mut().filter(|task| task.running.is_none()).take(free) {
            task.running = Some(now);
        }
    }

    /// Lane time that the tasks in service still need, in seconds.
    fn remaining(&self, cost: Cost, now: Instant) -> f64 {
        let left = |task: &StationTask| {
            let spent = task.running.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
            (cost.of(1, task.bytes) - spent.as_secs_f64()).max(0.0)
        };
        self.serving.iter().map(left).sum()
    }

    /// Predicts the number of seconds until a task that is sent to this place now would be done;
    /// `None` if unknown.
    pub(super) fn completion(&self, bytes: u64, now: Instant) -> Option<f64> {
        let cost = self.estimate.cost()?;
        let waits = match self.serving.len() < self.capacity.lanes {
            true => 0.0,
            false => self.remaining(cost, now) / self.capacity.lanes as f64,
        };
        Some(waits + cost.of(1, bytes))
    }

    /// Predicts the number of seconds until this place would finish its tasks in service and the
    /// given additional work; `None` if unknown.
    pub(super) fn drained(&self, tasks: usize, bytes: u64, now: Instant) -> Option<f64> {
        let cost = self.estimate.cost()?;
        Some((self.remaining(cost, now) + cost.of(tasks, bytes)) / self.capacity.lanes as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn station(lanes: usize, slots: usize) -> Station {
        Station::new("ec-test", Capacity { slots, lanes }, 100 * MS)
    }

    #[test]
    fn a_waiting_task_is_timed_from_the_end_of_its_predecessor() {
        let (mut station, now) = (station(1, 3), Instant::now());
        (0..3).for_each(|id| station.begin(id, 1000, now));
        assert!(station.is_full());
        assert_eq!(station.end(0, now + 4 * MS), 4 * MS);
        assert_eq!(station.end(1, now + 10 * MS), 6 * MS);
        assert_eq!(station.end(2, now + 11 * MS), MS);
    }

    #[test]
    fn the_lanes_of_a_coding_place_execute_tasks_in_parallel() {
        let (mut station, now) = (station(2, 4), Instant::now());
        (0..3).for_each(|id| station.begin(id, 1000, now));
        assert_eq!(station.end(1, now + 3 * MS), 3 * MS);
        assert_eq!(station.end(2, now + 5 * MS), 2 * MS, "task 2 started in the lane of task 1");
        assert_eq!(station.end(0, now + 9 * MS), 9 * MS);
    }

    #[test]
    fn predictions_of_completion_times_include_the_tasks_in_service() {
        let (mut station, now) = (station(2, 4), Instant::now());
        assert!(station.completion(1, now).is_none() && station.drained(1, 1, now).is_none());
        station.estimate.learn(1000, 10 * MS, now);
        let is = |actual: Option<f64>, ms: f64| (actual.unwrap() - ms / 1e3).abs() < 1e-9;
        assert!(is(station.completion(1000, now), 10.0));
        station.begin(0, 1000, now);
        assert!(is(station.completion(1000, now), 10.0), "the other lane is free");
        station.begin(1, 3000, now);
        assert!(is(station.completion(1000, now), 30.0));
        assert!(is(station.completion(1000, now + 4 * MS), 26.0), "each lane has done 4 ms");
        assert!(is(station.drained(2, 4000, now), 40.0));
    }

    #[test]
    fn a_new_probe_may_begin_after_a_probe_was_abandoned() {
        let (mut station, now) = (station(1, 1), Instant::now());
        station.health.failed("broken", now);
        assert_eq!(station.standing(now), StationHealth::Down);
        let later = now + 100 * MS;
        assert_eq!(station.standing(later), StationHealth::ProbeDue);
        station.begin_probe(later);
        assert_eq!(station.standing(later), StationHealth::Down, "one probe at a time");
        station.vacate_probe();
        assert_eq!(station.standing(later), StationHealth::ProbeDue);
        station.begin_probe(later);
        station.health.probed(Ok(()), later);
        assert_eq!(station.standing(later), StationHealth::Usable);
    }
}
