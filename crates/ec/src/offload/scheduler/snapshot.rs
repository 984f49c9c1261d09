//! What the scheduler does, as plain data for `status`.

use std::time::Instant;

use base::health::HealthReport;
use serde::{Deserialize, Serialize};
use wire::{CodingHealth, CodingMode, CodingSent, OffloadState};

use super::Reason;
use super::admission::AdmissionView;
use super::station::Station;

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
pub fn offload_state(state: base::health::HealthState) -> OffloadState {
    match state {
        base::health::HealthState::Active => OffloadState::Active,
        base::health::HealthState::CoolingDown(_) => OffloadState::CoolingDown,
        base::health::HealthState::Probing => OffloadState::Probing,
    }
}

impl Snapshot {
    pub(super) fn of(view: &AdmissionView<'_>, now: Instant) -> Snapshot {
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
fn health(report: HealthReport) -> CodingHealth {
    CodingHealth {
        state: offload_state(report.state),
        failures: report.failures,
        failed_probes: report.failed_probes,
        recoveries: report.recoveries,
        last_failure: report.last_failure,
    }
}
