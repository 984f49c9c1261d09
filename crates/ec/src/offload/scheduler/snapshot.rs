//! The scheduler's state as plain data, for the command `status`.

use base::clock::Instant;
use base::health::{HealthReport, HealthState};
use serde::{Deserialize, Serialize};
use wire::{CodingMode, CodingSent, HealthStatus, OffloadState};

use super::Reason;
use super::admission::AdmissionView;
use super::station::Station;

/// The scheduler's state at one moment. Counts begin at the creation of the scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Current mode.
    pub mode: CodingMode,
    /// True if the host's processor is busy, so that all tasks go to the DPU.
    pub host_busy: bool,
    /// Number of waiting tasks.
    pub queued: usize,
    /// Data of the waiting tasks, in bytes.
    pub queued_bytes: u64,
    /// Number of tasks refused because the queue was full.
    pub refused: u64,
    /// Number of tasks sent to the host during the last second.
    pub alpha: u64,
    /// Number of tasks sent to the DPU during the last second.
    pub beta: u64,
    /// State of the host as a coding place.
    pub host: PlaceSnapshot,
    /// State of the DPU as a coding place.
    pub offload: PlaceSnapshot,
}

/// State of one coding place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlaceSnapshot {
    /// Number of tasks in service.
    pub in_service: usize,
    /// Maximum number of tasks in service.
    pub slots: usize,
    /// Number of tasks sent to this place, by reason.
    pub sent: CodingSent,
    /// Estimated fixed cost of a task, in microseconds of one lane's time; `None` before the first
    /// measurement.
    pub us_per_task: Option<f64>,
    /// Estimated additional cost of a megabyte (10^6 bytes), in microseconds of one lane's time.
    pub us_per_mb: Option<f64>,
    /// Health of the place.
    pub health: HealthStatus,
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
                only: sent(Reason::Only),
            },
            us_per_task: cost.map(|cost| cost.per_task * 1e6),
            us_per_mb: cost.map(|cost| cost.per_byte * 1e12),
            health: health_status(station.health.report()),
        }
    }
}

/// Returns the health of an offload as the node reports it, without the end of the cool-down.
#[must_use]
pub fn health_status(report: HealthReport) -> HealthStatus {
    let HealthReport { state, failures, failed_probes, recoveries, last_failure } = report;
    let state = match state {
        HealthState::Active => OffloadState::Active,
        HealthState::CoolingDown(_) => OffloadState::CoolingDown,
        HealthState::Probing => OffloadState::Probing,
    };
    HealthStatus { state, failures, failed_probes, recoveries, last_failure }
}
