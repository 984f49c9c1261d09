//! Offload health: whether an accelerator is used, and when it is tried again.
//!
//! One state machine for everything that work is offloaded to (a DMA engine, later RDMA or a coding engine):
//!
//! ```text
//!              a failure                 the cool-down is over
//!   ┌────────┐ ─────────▶ ┌──────────────┐ ─────────▶ ┌─────────┐
//!   │ Active │            │ CoolingDown  │            │ Probing │
//!   └────────┘ ◀───────── └──────────────┘ ◀───────── └─────────┘
//!        ▲                                  it failed      │
//!        └─────────────────────────────────────────────────┘
//!                             the probe succeeded
//! ```
//!
//! While it is not active, work takes the path that always works. DoCeph, section 4, has the flag and the expiry; the
//! probe is a single small piece of work whose result decides. Time comes from the caller, so that tests need not wait.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Where an offload stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthState {
    /// It is used.
    Active,
    /// It failed, and is left alone until then.
    CoolingDown(Instant),
    /// One piece of work tries it out.
    Probing,
}

impl HealthState {
    /// For people and metrics: `active`, `cooling down` or `probing`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            HealthState::Active => "active",
            HealthState::CoolingDown(_) => "cooling down",
            HealthState::Probing => "probing",
        }
    }

    /// As a gauge: 0, 1 or 2.
    fn level(self) -> f64 {
        match self {
            HealthState::Active => 0.0,
            HealthState::CoolingDown(_) => 1.0,
            HealthState::Probing => 2.0,
        }
    }
}

/// What is known of an offload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthReport {
    /// Where it stands.
    pub state: HealthState,
    /// How often it was found failing while it was active.
    pub failures: u64,
    /// How often a probe failed.
    pub failed_probes: u64,
    /// How often a probe brought it back.
    pub recoveries: u64,
    /// Why it failed last.
    pub last_failure: Option<String>,
}

/// The state machine. Shared between threads.
#[derive(Debug)]
pub struct OffloadHealth {
    name: &'static str,
    cool_down: Duration,
    report: Mutex<HealthReport>,
}

impl OffloadHealth {
    /// Active from the start. `name` is the label of its metrics, `cool_down` how long it is left alone after a failure.
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

    /// What is known of it.
    #[must_use]
    pub fn report(&self) -> HealthReport {
        self.lock().clone()
    }

    /// It failed: it is left alone from now on. Further failures before the probe change nothing. Returns whether it was
    /// active.
    pub fn failed(&self, why: &str, now: Instant) -> bool {
        let mut report = self.lock();
        if report.state != HealthState::Active {
            return false;
        }
        report.failures += 1;
        report.last_failure = Some(why.to_owned());
        self.enter(&mut report, HealthState::CoolingDown(now + self.cool_down));
        tracing::warn!(offload = self.name, cool_down = ?self.cool_down, "offload failed, going on without it: {why}");
        true
    }

    /// When a probe is due; `None` while it is active or being probed.
    #[must_use]
    pub fn probe_at(&self) -> Option<Instant> {
        match self.lock().state {
            HealthState::CoolingDown(until) => Some(until),
            HealthState::Active | HealthState::Probing => None,
        }
    }

    /// Starts the probe if the cool-down is over; whether it did.
    pub fn begin_probe(&self, now: Instant) -> bool {
        let mut report = self.lock();
        let due = matches!(report.state, HealthState::CoolingDown(until) if until <= now);
        if due {
            self.enter(&mut report, HealthState::Probing);
        }
        due
    }

    /// The probe has ended: it is used again, or left alone once more.
    pub fn probed(&self, result: Result<(), &str>, now: Instant) {
        let mut report = self.lock();
        if report.state != HealthState::Probing {
            return;
        }
        match result {
            Ok(()) => {
                report.recoveries += 1;
                self.enter(&mut report, HealthState::Active);
                tracing::warn!(offload = self.name, "offload works again");
            }
            Err(why) => {
                report.failed_probes += 1;
                report.last_failure = Some(why.to_owned());
                self.enter(&mut report, HealthState::CoolingDown(now + self.cool_down));
                tracing::warn!(offload = self.name, "offload still fails: {why}");
            }
        }
    }

    /// Begins anew, because what it depends on was replaced: as good as unknown, so it is used.
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
    fn it_cools_down_is_probed_and_used_again() {
        let health = OffloadHealth::new("test", Duration::from_secs(2));
        let start = Instant::now();
        let is_active = || health.report().state == HealthState::Active;
        assert!(is_active() && health.probe_at().is_none());
        assert!(health.failed("a transfer failed", start));
        assert!(!health.failed("another one", start), "it has failed already");
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
        assert!(is_active(), "nobody was probing");
    }
}
