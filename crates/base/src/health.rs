//! Offload health: decides whether to use an accelerator, and when to try the accelerator again
//! after a failure.
//!
//! One state machine serves every kind of offload, for example a DMA engine or a coding engine:
//!
//! ```text
//!              a failure                 the cool-down has ended
//!   ┌────────┐ ─────────▶ ┌──────────────┐ ─────────▶ ┌─────────┐
//!   │ Active │            │ CoolingDown  │            │ Probing │
//!   └────────┘ ◀───────── └──────────────┘ ◀───────── └─────────┘
//!        ▲                              the probe failed   │
//!        └─────────────────────────────────────────────────┘
//!                             the probe succeeded
//! ```
//!
//! While the offload is not active, the caller does the work without it. The failure flag and the
//! cool-down come from the paper about DoCeph, section 4. The probe is one small piece of work. Its
//! result decides whether the offload is used again. The caller passes the current time, so that
//! tests need not wait.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::Instant;

/// State of an offload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthState {
    /// The offload is in use.
    Active,
    /// The offload failed and is not used before this time.
    CoolingDown(Instant),
    /// One piece of work tests the offload.
    Probing,
}

impl HealthState {
    /// Name for display and metrics: `active`, `cooling down` or `probing`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            HealthState::Active => "active",
            HealthState::CoolingDown(_) => "cooling down",
            HealthState::Probing => "probing",
        }
    }

    /// Value of the state in the metric `outboard_offload_state`.
    fn level(self) -> f64 {
        match self {
            HealthState::Active => 0.0,
            HealthState::CoolingDown(_) => 1.0,
            HealthState::Probing => 2.0,
        }
    }
}

/// State and counters of an offload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthReport {
    /// Current state.
    pub state: HealthState,
    /// Number of failures in the active state.
    pub failures: u64,
    /// Number of failed probes.
    pub failed_probes: u64,
    /// Number of successful probes.
    pub recoveries: u64,
    /// Reason of the last failure.
    pub last_failure: Option<String>,
}

/// State machine of one offload. Threads may share it.
#[derive(Debug)]
pub struct OffloadHealth {
    name: &'static str,
    cool_down: Duration,
    report: Mutex<HealthReport>,
}

impl OffloadHealth {
    /// Creates the state machine in the active state. `name` labels the metrics. `cool_down` is the
    /// pause after a failure.
    #[must_use]
    pub fn new(name: &'static str, cool_down: Duration) -> OffloadHealth {
        let report = HealthReport {
            state: HealthState::Active,
            failures: 0,
            failed_probes: 0,
            recoveries: 0,
            last_failure: None,
        };
        metrics::gauge!("outboard_offload_state", "offload" => name).set(0.0);
        OffloadHealth { name, cool_down, report: Mutex::new(report) }
    }

    fn lock(&self) -> MutexGuard<'_, HealthReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, report: &mut HealthReport, state: HealthState) {
        report.state = state;
        metrics::gauge!("outboard_offload_state", "offload" => self.name).set(state.level());
        metrics::counter!("outboard_offload_transitions", "offload" => self.name, "to" => state.name())
            .increment(1);
    }

    /// Returns the state and the counters.
    #[must_use]
    pub fn report(&self) -> HealthReport {
        self.lock().clone()
    }

    /// Records a failure of an active offload, and begins the cool-down. Returns true if the
    /// offload was active; otherwise the call changes nothing.
    pub fn failed(&self, why: &str, now: Instant) -> bool {
        let mut report = self.lock();
        if report.state != HealthState::Active {
            return false;
        }
        report.failures += 1;
        report.last_failure = Some(why.to_owned());
        self.enter(&mut report, HealthState::CoolingDown(now + self.cool_down));
        tracing::warn!(offload = self.name, cool_down = ?self.cool_down, "the offload failed; continuing without it during its cool-down: {why}");
        true
    }

    /// Returns the time at which a probe is due; `None` while the offload is active or being
    /// probed.
    #[must_use]
    pub fn probe_at(&self) -> Option<Instant> {
        match self.lock().state {
            HealthState::CoolingDown(until) => Some(until),
            HealthState::Active | HealthState::Probing => None,
        }
    }

    /// Begins a probe if the cool-down has ended. Returns true if a probe was begun.
    pub fn begin_probe(&self, now: Instant) -> bool {
        let mut report = self.lock();
        let due = matches!(report.state, HealthState::CoolingDown(until) if until <= now);
        if due {
            self.enter(&mut report, HealthState::Probing);
        }
        due
    }

    /// Ends the probe: the offload becomes active after a success, or cools down again after a
    /// failure.
    pub fn probed(&self, result: Result<(), &str>, now: Instant) {
        let mut report = self.lock();
        if report.state != HealthState::Probing {
            return;
        }
        match result {
            Ok(()) => {
                report.recoveries += 1;
                self.enter(&mut report, HealthState::Active);
                tracing::warn!(offload = self.name, "the offload works again");
            }
            Err(why) => {
                report.failed_probes += 1;
                report.last_failure = Some(why.to_owned());
                self.enter(&mut report, HealthState::CoolingDown(now + self.cool_down));
                tracing::warn!(offload = self.name, "the offload still fails: {why}");
            }
        }
    }

    /// Makes the offload active without a probe, because the device or peer that it depends on was
    /// replaced.
    pub fn renewed(&self) {
        let mut report = self.lock();
        if report.state != HealthState::Active {
            self.enter(&mut report, HealthState::Active);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_offload_cools_down_is_probed_and_then_used_again() {
        let health = OffloadHealth::new("test", Duration::from_secs(2));
        let start = Instant::now();
        let is_active = || health.report().state == HealthState::Active;
        assert!(is_active() && health.probe_at().is_none());
        assert!(health.failed("a transfer failed", start));
        assert!(!health.failed("another transfer failed", start), "the offload has already failed");
        assert!(!is_active());
        assert_eq!(health.probe_at(), Some(start + Duration::from_secs(2)));
        assert!(!health.begin_probe(start + Duration::from_secs(1)), "too early");
        let later = start + Duration::from_secs(2);
        assert!(health.begin_probe(later));
        assert!(!health.begin_probe(later), "one probe at a time");
        health.probed(Err("no"), later);
        assert_eq!(health.probe_at(), Some(later + Duration::from_secs(2)));
        assert!(health.begin_probe(later + Duration::from_secs(2)));
        health.probed(Ok(()), later);
        assert!(is_active());
        let report = health.report();
        assert_eq!((report.failures, report.failed_probes, report.recoveries), (1, 1, 1));
        health.probed(Err("a late answer"), later);
        assert!(is_active(), "no probe was in progress");
    }
}
