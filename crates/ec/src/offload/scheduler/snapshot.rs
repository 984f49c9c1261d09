//! What the scheduler does, as plain data for `status`.

use std::time::{Duration, Instant};

use base::health::Report;
use serde::{Deserialize, Serialize};
use wire::{CodingHealth, CodingMode, CodingSent, OffloadState};

use super::admission::View;
use super::station::Station;
use super::{Place, Reason};

/// The recent tasks are counted by so many slices of time…
const SLICES: usize = 10;
/// …each that long: one second in all.
const SLICE: Duration = Duration::from_millis(100);

/// The scheduler at one moment. Counts are since it was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The mode.
    pub mode: CodingMode,
    /// Whether the host's processor is busy, so that all work goes to the offload.
    pub host_busy: bool,
    /// Tasks that wait for a place.
    pub queued: usize,
    /// Their data, in bytes.
    pub queued_bytes: u64,
    /// Tasks refused because the queue was full.
    pub refused: u64,
    /// Tasks sent to the host during the last second.
    pub alpha: u64,
    /// Tasks sent to the offload during the last second.
    pub beta: u64,
    /// The host.
    pub host: PlaceSnapshot,
    /// The offload.
    pub offload: PlaceSnapshot,
}

/// One place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlaceSnapshot {
    /// Tasks in service.
    pub in_service: usize,
    /// Most tasks in service at a time.
    pub slots: usize,
    /// Tasks sent there, by reason.
    pub sent: CodingSent,
    /// What a task is taken to cost whatever its size, in microseconds of a lane; absent if nothing was measured.
    pub us_per_task: Option<f64>,
    /// What a megabyte (10^6 bytes) is taken to add, in microseconds of a lane.
    pub us_per_mb: Option<f64>,
    /// Whether it works.
    pub health: CodingHealth,
}

/// Returns a state of the circuit breaker without its times.
#[must_use]
pub fn offload_state(state: base::health::State) -> OffloadState {
    match state {
        base::health::State::Active => OffloadState::Active,
        base::health::State::CoolingDown(_) => OffloadState::CoolingDown,
        base::health::State::Probing => OffloadState::Probing,
    }
}

impl Snapshot {
    pub(super) fn of(view: &View<'_>, now: Instant) -> Snapshot {
        let [alpha, beta] = view.recent.counts(now);
        let [host, offload] = view.stations;
        Snapshot {
            mode: view.mode,
            host_busy: view.host_busy,
            queued: view.queued,
            queued_bytes: view.queued_bytes,
            refused: view.refused,
            alpha,
            beta,
            host: PlaceSnapshot::of(host),
            offload: PlaceSnapshot::of(offload),
        }
    }
}

impl PlaceSnapshot {
    fn of(station: &Station) -> PlaceSnapshot {
        let sent = |reason: Reason| station.sent[reason as usize];
        let cost = station.estimate.cost();
        PlaceSnapshot {
            in_service: station.in_service(),
            slots: station.capacity.slots,
            sent: CodingSent {
                mode: sent(Reason::Mode),
                busy: sent(Reason::Busy),
                cool_down: sent(Reason::CoolDown),
                probe: sent(Reason::Probe),
                explore: sent(Reason::Explore),
            },
            us_per_task: cost.map(|cost| cost.per_task * 1e6),
            us_per_mb: cost.map(|cost| cost.per_byte * 1e12),
            health: health(station.health.report()),
        }
    }
}

/// Returns a circuit breaker's report as plain data.
fn health(report: Report) -> CodingHealth {
    CodingHealth {
        state: offload_state(report.state),
        failures: report.failures,
        failed_probes: report.failed_probes,
        recoveries: report.recoveries,
        last_failure: report.last_failure,
    }
}

/// Tasks of the last second, by place.
#[derive(Debug, Default)]
pub(super) struct Recent {
    slices: [[u64; 2]; SLICES],
    /// The slice that is being filled, and when it began.
    current: usize,
    since: Option<Instant>,
}

impl Recent {
    pub(super) fn sent(&mut self, place: Place, now: Instant) {
        let since = *self.since.get_or_insert(now);
        let over = slices_between(since, now);
        for _ in 0..over.min(SLICES) {
            self.current = (self.current + 1) % SLICES;
            self.slices[self.current] = [0; 2];
        }
        if over > 0 {
            self.since = Some(if over < SLICES { since + SLICE * over as u32 } else { now });
        }
        self.slices[self.current][place as usize] += 1;
    }

    /// How many went to the host and to the offload.
    fn counts(&self, now: Instant) -> [u64; 2] {
        let over = self.since.map_or(SLICES, |since| slices_between(since, now)).min(SLICES);
        // Slices that are due to be filled anew are too old.
        let old = |at: usize| (1..=over).any(|ahead| (self.current + ahead) % SLICES == at);
        let recent = (0..SLICES).filter(|&at| !old(at)).map(|at| self.slices[at]);
        recent.fold([0; 2], |[host, offload], [h, o]| [host + h, offload + o])
    }
}

fn slices_between(since: Instant, now: Instant) -> usize {
    let over = now.saturating_duration_since(since).as_millis() / SLICE.as_millis();
    usize::try_from(over).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_second_counts() {
        let (mut recent, start) = (Recent::default(), Instant::now());
        assert_eq!(recent.counts(start), [0, 0]);
        for ms in 0..3000 {
            let place = if ms % 4 == 0 { Place::Offload } else { Place::Host };
            recent.sent(place, start + Duration::from_millis(ms));
        }
        let at = |ms| recent.counts(start + Duration::from_millis(ms));
        assert_eq!(at(2999), [750, 250]);
        assert_eq!(at(3499), [375, 125], "half of it is over");
        assert_eq!(at(5000), [0, 0]);
        assert_eq!(recent.counts(start), [750, 250], "time does not go back");
        recent.sent(Place::Host, start + Duration::from_secs(60));
        assert_eq!(recent.counts(start + Duration::from_secs(60)), [1, 0]);
    }
}
