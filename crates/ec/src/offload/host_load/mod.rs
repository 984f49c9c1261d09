//! Decides whether the host's processor is busy. The decision corresponds to `isCpuBusy` in
//! Algorithm 1 of Ryu et al. ([`scheduler`](super::scheduler) names the paper).
//!
//! The decision depends on the load that the host itself puts on its CPUs:
//!
//! - **Utilization** of the host's CPUs: all time except idle and I/O wait. Time stolen by a
//!   hypervisor counts as busy, because the host cannot use it. Two parts of the time are excluded:
//!   - Time of threads that **emulate the DPU** on these CPUs: the DPU's software and its emulated
//!     devices. On a node with a real DPU, this work does not run on the host. The time is also
//!     subtracted from the total, because it is not available to the host. So utilization is the
//!     busy share of the remaining time.
//!   - Time of **coding on the host**. If this time counted, coding would make the host busy and
//!     the tasks would move to the DPU; then the host would be idle and the tasks would move back.
//!     Coding threads yield to other work, so their time counts as free.
//! - **Pressure** (PSI, `some`): the share of time in which at least one thread waited for a CPU.
//!   Pressure shows contention earlier than utilization does, for example with many threads on few
//!   CPUs. But pressure covers the whole machine, including waiting coding threads and threads that
//!   emulate the DPU. Therefore pressure counts only while utilization is above a floor, because
//!   then threads of other work must be waiting. Utilization alone decides if PSI is unavailable
//!   (older kernels, kernel parameter `psi=0`), or if the host has only some of the machine's CPUs.
//!
//! The state changes to busy immediately, but it changes to calm only after a period below lower
//! thresholds. This hysteresis keeps the tasks from moving back and forth.

mod proc;

use std::time::Duration;

use base::clock::Instant;

pub use proc::{HostCpus, HostCpusError};
use serde::{Deserialize, Serialize};

/// Minimum time between two samples: the kernel counts CPU time in ticks of up to 10 ms.
const LEAST_INTERVAL: Duration = Duration::from_millis(50);
/// Age at which a sample no longer describes the load.
const CURRENT: Duration = Duration::from_secs(2);

/// Cumulative counters of the load of the host's CPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadCounters {
    /// Total time of the host's CPUs, busy or idle.
    pub all: Duration,
    /// Time in which the CPUs were not idle.
    pub busy: Duration,
    /// Part of `busy` used by threads that emulate the DPU.
    pub dpu: Duration,
    /// Part of `busy` used by erasure coding on the host.
    pub coding: Duration,
    /// Part of `busy` used by the store itself: for drives, the index and the channel. 0 if it was not
    /// read, because it counts as other work.
    pub store: Duration,
    /// Wall-clock time in which at least one thread waited for a CPU; `None` if the kernel does not
    /// report it.
    pub pressure: Option<Duration>,
}

/// Load of the host's processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadLevel {
    /// The processor has time for coding.
    Calm,
    /// The processor has no time for coding.
    Busy,
}

/// Thresholds of the host's load. Utilization and pressure range from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// The host is busy at this utilization or above.
    pub busy_utilization: f64,
    /// The host is busy at this pressure or above, if utilization is at least `floor`.
    pub busy_pressure: f64,
    /// Below this utilization, pressure does not count.
    pub floor: f64,
    /// The host becomes calm after its utilization was below this value for `calm_after`.
    pub calm_utilization: f64,
    /// Pressure must also be below this value for `calm_after`, unless utilization is below
    /// `floor`.
    pub calm_pressure: f64,
    /// Time for which utilization and pressure must stay below their calm thresholds.
    pub calm_after: Duration,
    /// Whether the work of the store itself counts. If not, its time counts as free, like the time of
    /// coding.
    pub counts_store: bool,
}

impl Default for Thresholds {
    fn default() -> Thresholds {
        Thresholds {
            busy_utilization: 0.9,
            busy_pressure: 0.4,
            floor: 0.4,
            calm_utilization: 0.75,
            calm_pressure: 0.2,
            calm_after: Duration::from_millis(500),
            counts_store: true,
        }
    }
}

/// Decides whether the host is busy. The caller passes the time and the counters, two to ten times
/// per second. After a longer pause the load is unknown, and an unknown load counts as calm.
#[derive(Debug)]
pub struct HostLoad {
    thresholds: Thresholds,
    load: LoadLevel,
    last: Option<(Instant, LoadCounters)>,
    /// While the host is busy: the start of the period in which utilization and pressure have been
    /// below their calm thresholds.
    calming: Option<Instant>,
    /// Utilization and pressure of the last interval.
    parts: (f64, Option<f64>),
}

impl HostLoad {
    /// Creates the state of a calm host.
    #[must_use]
    pub fn new(thresholds: Thresholds) -> HostLoad {
        HostLoad { thresholds, load: LoadLevel::Calm, last: None, calming: None, parts: (0.0, None) }
    }

    /// Evaluates the load since the previous sample. Ignores a sample that is taken less than 50 ms
    /// after the previous sample.
    pub fn sample(&mut self, at: Instant, reading: LoadCounters) -> LoadLevel {
        let Some((last_at, last)) = self.last else {
            self.last = Some((at, reading));
            return self.load;
        };
        let passed = at.saturating_duration_since(last_at);
        if passed < LEAST_INTERVAL {
            return self.load;
        }
        if passed > CURRENT {
            self.forget();
            self.last = Some((at, reading));
            return self.load;
        }
        self.last = Some((at, reading));
        if let Some(utilization) = utilization(&last, &reading, self.thresholds.counts_store) {
            self.parts = (utilization, pressure(&last, &reading, passed));
            // The current values describe the whole time since the last sample.
            self.judge(last_at, at);
        }
        self.load
    }

    /// Whether the last sample at `now` is recent enough to describe the load.
    #[must_use]
    pub fn is_current(&self, now: Instant) -> bool {
        self.last.is_some_and(|(at, _)| now.saturating_duration_since(at) <= CURRENT)
    }

    /// Forgets all samples. The load is then unknown, which counts as calm.
    pub fn forget(&mut self) {
        (self.load, self.last, self.calming, self.parts) = (LoadLevel::Calm, None, None, (0.0, None));
    }

    /// Utilization of the last interval, 0 to 1, without coding and without threads that emulate
    /// the DPU.
    #[must_use]
    pub fn utilization(&self) -> f64 {
        self.parts.0
    }

    /// Pressure of the last interval, 0 to 1, if the kernel reports it.
    #[must_use]
    pub fn pressure(&self) -> Option<f64> {
        self.parts.1
    }

    fn judge(&mut self, since: Instant, at: Instant) {
        let (utilization, pressure) = self.parts;
        let limits = &self.thresholds;
        let counted = pressure.filter(|_| utilization >= limits.floor).unwrap_or(0.0);
        let is_busy = utilization >= limits.busy_utilization || counted >= limits.busy_pressure;
        let is_calm = utilization < limits.calm_utilization && counted < limits.calm_pressure;
        match self.load {
            LoadLevel::Calm if is_busy => {
                self.load = LoadLevel::Busy;
                self.calming = None;
                tracing::debug!(utilization, pressure, "the host's processor is busy");
            }
            LoadLevel::Busy if is_calm => {
                let since = *self.calming.get_or_insert(since);
                if at.saturating_duration_since(since) >= limits.calm_after {
                    self.load = LoadLevel::Calm;
                    tracing::debug!(utilization, pressure, "the host's processor is not busy any more");
                }
            }
            LoadLevel::Busy => self.calming = None,
            LoadLevel::Calm => {}
        }
    }
}

/// Returns the share of the host's CPU time that was used by work other than coding, and other than
/// the store's unless `counts_store` is true. The time of threads that emulate the DPU is not part of
/// the host's CPU time. Returns `None` if no CPU time has passed.
fn utilization(before: &LoadCounters, now: &LoadCounters, counts_store: bool) -> Option<f64> {
    let since = |field: fn(&LoadCounters) -> Duration| field(now).saturating_sub(field(before)).as_secs_f64();
    let all = since(|reading| reading.all);
    // The counters are read at different moments, and the time of an ended thread disappears. So
    // the sum of `dpu` and `coding` may exceed `busy`.
    let busy = since(|reading| reading.busy).min(all);
    let dpu = since(|reading| reading.dpu).min(busy);
    let coding = since(|reading| reading.coding).min(busy - dpu);
    let store = if counts_store { 0.0 } else { since(|reading| reading.store).min(busy - dpu - coding) };
    let left = all - dpu;
    match all > 0.0 {
        // Threads that emulate the DPU used all the CPU time. The host's load is unknown and counts
        // as calm.
        true if left <= 0.0 => Some(0.0),
        true => Some((busy - dpu - coding - store) / left),
        false => None,
    }
}

/// Returns the share of time in which at least one thread waited for a CPU.
fn pressure(before: &LoadCounters, now: &LoadCounters, passed: Duration) -> Option<f64> {
    let waited = now.pressure?.saturating_sub(before.pressure?);
    Some((waited.as_secs_f64() / passed.as_secs_f64()).min(1.0))
}

#[cfg(test)]
mod tests;
