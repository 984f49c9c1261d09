//! The mode `hybrid:auto`: adapts the ratio α:β of tasks for the host to tasks for the DPU. The
//! ratio depends on the load and on the measured cost of tasks at each coding place.
//!
//! These rules apply to the task at the head of the queue whenever a coding place has a free slot:
//!
//! 1. **Both places have a free slot.** The task goes to the place with the earlier predicted
//!    completion. A host that keeps up never has a queue, so a slower DPU receives no tasks.
//! 2. **Only one place (p) has a free slot.** The task goes to p if p is predicted to finish it
//!    before the other place (q) could finish the whole queue. Then the whole queue is not finished
//!    later than it would be by q alone, and all tasks behind the head move up.
//! 3. **Only p has a free slot, and the queue is a standing queue.** At nearly every moment of
//!    about the last [`MEMORY`] or longer, q had more work than it could do. Then every task that p
//!    executes shortens the queue. This rule matters if the queue is short and p is slow: rule 2
//!    would then leave p idle forever. At least as many tasks as q has lanes stay in the queue, so
//!    that q does not run dry. Acting on a standing queue but not on a burst is the idea of CoDel
//!    (Nichols and Jacobson, "Controlling Queue Delay", 2012).
//! 4. Otherwise the task waits for q.
//!
//! While there is a queue, both places are kept busy. Each place then receives tasks at the rate at
//! which it executes them. So α:β equals the ratio of the service rates, which is optimal, and no
//! search for the ratio is needed. Without a queue, the rules only minimize latency.
//!
//! The cost of tasks at a coding place is learned from its finished tasks. A place without recent
//! tasks is explored: one task at a time, at most one task in a hundred. The DPU is explored only
//! while there is a queue, or if this costs little time.

use std::time::Duration;

use base::clock::Instant;

use super::estimate::MEMORY;
use super::station::Station;
use super::{CodingPlace, Reason};

/// Age at which an estimate is stale.
const STALE: Duration = Duration::from_millis(250);
/// At most one in this number of tasks explores a coding place.
const EXPLORING: f64 = 100.0;
/// Maximum number of allowed explorations that can accumulate.
const MAX_CREDIT: f64 = 4.0;
/// Without a queue, the DPU is explored only if it is slower than the host by at most this factor.
const LITTLE_LOST: f64 = 2.0;
/// A queue is a standing queue if it existed for at least this share of the recent time.
const STANDS: f64 = 0.9;

/// Size of the queue, including the task at its head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Backlog {
    pub(super) tasks: usize,
    pub(super) bytes: u64,
    /// Size of the task at the head.
    pub(super) head_bytes: u64,
}

/// State of the mode `hybrid:auto`, except the cost estimates.
#[derive(Debug)]
pub(super) struct Auto {
    /// Number of explorations that are allowed now.
    credit: f64,
    /// For each coding place: the share of the recent time in which its slots were full and more
    /// tasks needed it than it has lanes.
    stood: [f64; 2],
    stands: [bool; 2],
    at: Option<Instant>,
}

impl Auto {
    pub(super) fn new() -> Auto {
        Auto { credit: 1.0, stood: [0.0; 2], stands: [false; 2], at: None }
    }

    /// Updates the shares of time in `stood` after a change of the queue or of the tasks in
    /// service. The caller has already started all tasks that need not wait.
    pub(super) fn observe(&mut self, queued: usize, stations: &[Station; 2], now: Instant) {
        let since = self.at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let kept = (-since.as_secs_f64() / MEMORY.as_secs_f64()).exp();
        for place in CodingPlace::BOTH {
            let at = place as usize;
            self.stood[at] = kept * self.stood[at] + (1.0 - kept) * f64::from(u8::from(self.stands[at]));
            // If the other place did not exist, the tasks in service there would wait in the queue
            // for this place.
            let beyond = queued + stations[place.other() as usize].movable();
            self.stands[at] = stations[at].is_full() && beyond > stations[at].capacity.lanes;
        }
    }

    /// Records that a task was started, and for which reason. An exploration uses up one credit.
    pub(super) fn sent(&mut self, reason: Reason) {
        let cost = if reason == Reason::Explore { 1.0 } else { 0.0 };
        self.credit = (self.credit + 1.0 / EXPLORING - cost).clamp(0.0, MAX_CREDIT);
    }

    /// Chooses the place of the task at the head of the queue; `None` if the task waits for a slot.
    pub(super) fn choose(
        &self,
        backlog: Backlog,
        stations: &[Station; 2],
        now: Instant,
    ) -> Option<(CodingPlace, Reason)> {
        let [host, offload] = stations;
        match (host.is_full(), offload.is_full()) {
            (true, true) => None,
            (false, false) => Some(self.between_both(backlog, stations, now)),
            (false, true) => self.without(CodingPlace::Host, backlog, stations, now),
            (true, false) => self.without(CodingPlace::Offload, backlog, stations, now),
        }
    }

    fn between_both(&self, backlog: Backlog, stations: &[Station; 2], now: Instant) -> (CodingPlace, Reason) {
        let [host, offload] = [CodingPlace::Host, CodingPlace::Offload]
            .map(|p| stations[p as usize].completion(backlog.head_bytes, now));
        // While one of the costs is unknown, assume that the host is faster.
        let offload_is_faster = matches!((host, offload), (Some(host), Some(offload)) if offload < host);
        let (best, other) = match offload_is_faster {
            true => (CodingPlace::Offload, CodingPlace::Host),
            false => (CodingPlace::Host, CodingPlace::Offload),
        };
        let little_is_lost = other == CodingPlace::Host
            || matches!((host, offload), (Some(host), Some(offload)) if offload <= LITTLE_LOST * host);
        if little_is_lost && self.may_explore(&stations[other as usize], now) {
            return (other, Reason::Explore);
        }
        (best, Reason::Mode)
    }

    /// Decides whether the task goes to `place` while the other place has no free slot. Returns
    /// `None` if the task waits for the other place.
    fn without(
        &self,
        place: CodingPlace,
        backlog: Backlog,
        stations: &[Station; 2],
        now: Instant,
    ) -> Option<(CodingPlace, Reason)> {
        let (station, other) = (&stations[place as usize], &stations[place.other() as usize]);
        let done = station.completion(backlog.head_bytes, now);
        let drained = other.drained(backlog.tasks, backlog.bytes, now);
        let is_sooner = matches!((done, drained), (Some(done), Some(drained)) if done <= drained);
        let stands = self.stood[place.other() as usize] >= STANDS && backlog.tasks > other.capacity.lanes;
        match () {
            () if is_sooner || stands => Some((place, Reason::Mode)),
            () if self.may_explore(station, now) => Some((place, Reason::Explore)),
            () => None,
        }
    }

    fn may_explore(&self, station: &Station, now: Instant) -> bool {
        // A place with such a task in service will update its estimate anyway.
        self.credit >= 1.0
            && station.movable() == 0
            && !station.is_full()
            && station.estimate.is_older_than(STALE, now)
    }
}
