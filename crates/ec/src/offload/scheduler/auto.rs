//! The mode `hybrid:auto`: α:β follows the load and what the places turn out to cost.
//!
//! For the task at the head of the queue, whenever a place could take it:
//!
//! 1. **Both places could.** It goes where it is predicted to be done first. A host that keeps up never has a queue, so an
//!    offload that is slower gets nothing.
//! 2. **One could (p), and the other (q) has no slot free.** It goes to p if p is predicted to be done with it before q
//!    would be through with the whole queue: somebody in this queue has to wait that long for q, and all but this task
//!    wait less for its having gone elsewhere.
//! 3. **Likewise, if the queue is a standing one**: for [`MEMORY`] and more, q had more to do than it could at nearly every
//!    moment, so whatever p does is gained. This matters where few callers wait for a slow p: rule 2 would leave p idle
//!    for good. At least as many tasks as q has lanes are left in the queue, so q does not run dry meanwhile. That a queue
//!    which has stood for some time is worth acting on, and a burst is not, is the idea of CoDel (Nichols and Jacobson,
//!    "Controlling Queue Delay", 2012).
//! 4. Otherwise it waits for q.
//!
//! While there is a queue both places are kept at work, so each takes tasks at the rate at which it does them: α:β is
//! the ratio of the service rates, which is the best one, and no ratio has to be searched for. While there is none, the
//! rules are about latency only.
//!
//! What a place costs is known from the work it did. One that had none for a while is explored: one task at a time, at most
//! one in a hundred, and the offload only while there is a queue or if little is lost by it.

use std::time::{Duration, Instant};

use super::estimate::MEMORY;
use super::station::Station;
use super::{CodingPlace, Reason};

/// An estimate that is older than this is stale.
const STALE: Duration = Duration::from_millis(250);
/// Of so many tasks, one may explore.
const EXPLORING: f64 = 100.0;
/// Most explorations that may be saved up.
const MAX_CREDIT: f64 = 4.0;
/// The offload is explored without need only if it was not slower than the host by more than this factor.
const LITTLE_LOST: f64 = 2.0;
/// A queue stands if it was there for this part of the time.
const STANDS: f64 = 0.9;

/// The queue, its head included.
#[derive(Debug, Clone, Copy)]
pub(super) struct Backlog {
    pub(super) tasks: usize,
    pub(super) bytes: u64,
    /// The task at the head.
    pub(super) head_bytes: u64,
}

/// What the choice rests on besides the estimates.
#[derive(Debug)]
pub(super) struct Auto {
    /// Explorations that may be made.
    credit: f64,
    /// For each place as the one that is short of slots: the part of the recent time during which it was.
    stood: [f64; 2],
    stands: [bool; 2],
    at: Option<Instant>,
}

impl Auto {
    pub(super) fn new() -> Auto {
        Auto { credit: 1.0, stood: [0.0; 2], stands: [false; 2], at: None }
    }

    /// The queue or what is in service has changed, and all that can be sent off was.
    pub(super) fn observe(&mut self, queued: usize, stations: &[Station; 2], now: Instant) {
        let since = self.at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let kept = (-since.as_secs_f64() / MEMORY.as_secs_f64()).exp();
        for place in CodingPlace::BOTH {
            let at = place as usize;
            self.stood[at] = kept * self.stood[at] + (1.0 - kept) * f64::from(u8::from(self.stands[at]));
            // What the other place has would be queued, were it not there.
            let beyond = queued + stations[place.other() as usize].in_service();
            self.stands[at] = stations[at].is_full() && beyond > stations[at].capacity.lanes;
        }
    }

    /// A task was sent off.
    pub(super) fn sent(&mut self, reason: Reason) {
        let cost = if reason == Reason::Explore { 1.0 } else { 0.0 };
        self.credit = (self.credit + 1.0 / EXPLORING - cost).clamp(0.0, MAX_CREDIT);
    }

    /// Where the head of the queue goes now; `None` if it waits for a slot.
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
        // As long as one is unknown, the host is the place that is fast.
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

    /// Whether the task goes to `place`, as the other one has no slot.
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
        // What it has in service will tell.
        self.credit >= 1.0 && station.in_service() == 0 && station.estimate.is_older_than(STALE, now)
    }
}
