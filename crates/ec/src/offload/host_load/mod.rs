//! Whether the host's processor is busy (`isCpuBusy` of Algorithm 1).
//!
//! What counts is what the host itself wants of its CPUs, apart from what this module is asked about:
//!
//! - **Utilization** of the host's CPUs: all time but idle and I/O wait. Time stolen by a hypervisor counts, as the host does
//!   not have it. What is taken out:
//!   - Time of threads that **stand for the DPU** (its software and its emulated devices) on those CPUs: on a real node that
//!     work is not on the host. It is not there for the host either, so it is taken out of the whole, too: the host is as busy as
//!     the part that it takes of what is left to it.
//!   - Time of the **coding done on the host**: if it counted, the host would be busy because it codes, the work would move
//!     away, the host would be idle, the work would come back. It yields to other work, so what it takes is free as far as the
//!     question goes.
//! - **Pressure** (PSI, `some`): the part of the time during which some task waited for a CPU. It shows a crowded host before
//!   utilization does, such as many tasks on few CPUs. But it is of the whole machine and has no owner: coding waits, and so do
//!   threads that stand for the DPU. So it only counts while utilization, with those taken out, is above a floor: then there is
//!   somebody else to wait. Without PSI (older kernels, `psi=0`), or where the host has only some of the machine's CPUs,
//!   utilization alone decides.
//!
//! Busy begins at once and ends only after a while below lower thresholds, so that work does not go back and forth.

mod proc;

use std::time::{Duration, Instant};

pub use proc::{HostCpus, HostCpusError};
use serde::{Deserialize, Serialize};

/// Shorter intervals than that are not looked at: the kernel counts CPU time in ticks of up to 10 ms.
const LEAST_INTERVAL: Duration = Duration::from_millis(50);

/// Counters of the host, all since some time before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadCounters {
    /// Time of the host's CPUs together, whatever they did.
    pub all: Duration,
    /// Time during which they were not idle.
    pub busy: Duration,
    /// Of that, the time of threads that stand for the DPU.
    pub dpu: Duration,
    /// Of that, the time that erasure coding on the host took.
    pub coding: Duration,
    /// Time during which some task waited for a CPU, by the clock on the wall; `None` if the kernel does not say.
    pub pressure: Option<Duration>,
}

/// Whether the host's processor is busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadLevel {
    /// It has time for coding.
    Calm,
    /// It has not.
    Busy,
}

/// When the host counts as busy. Parts are 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// It is busy from this utilization on…
    pub busy_utilization: f64,
    /// …or from this pressure on, if utilization is at least `floor`.
    pub busy_pressure: f64,
    /// Below this utilization pressure does not count.
    pub floor: f64,
    /// It is calm again after utilization was below this…
    pub calm_utilization: f64,
    /// …and pressure below that (or did not count)…
    pub calm_pressure: f64,
    /// …for so long.
    pub calm_after: Duration,
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
        }
    }
}

/// The judgement. Time and counters come from the caller, two to ten times a second.
#[derive(Debug)]
pub struct HostLoad {
    thresholds: Thresholds,
    load: LoadLevel,
    last: Option<(Instant, LoadCounters)>,
    /// Since when it could be calm again, while it is busy.
    calming: Option<Instant>,
    /// Utilization and pressure of the last interval.
    parts: (f64, Option<f64>),
}

impl HostLoad {
    /// Calm until it is known to be otherwise.
    #[must_use]
    pub fn new(thresholds: Thresholds) -> HostLoad {
        HostLoad { thresholds, load: LoadLevel::Calm, last: None, calming: None, parts: (0.0, None) }
    }

    /// Looks at the time since the sample before. Samples that follow within 50 ms change nothing.
    pub fn sample(&mut self, at: Instant, reading: LoadCounters) -> LoadLevel {
        let Some((last_at, last)) = self.last else {
            self.last = Some((at, reading));
            return self.load;
        };
        let passed = at.saturating_duration_since(last_at);
        if passed < LEAST_INTERVAL {
            return self.load;
        }
        self.last = Some((at, reading));
        if let Some(utilization) = utilization(&last, &reading) {
            self.parts = (utilization, pressure(&last, &reading, passed));
            // What is seen now was so since the last sample.
            self.judge(last_at, at);
        }
        self.load
    }

    /// The last interval's utilization, 0 to 1, without the DPU's part and coding.
    #[must_use]
    pub fn utilization(&self) -> f64 {
        self.parts.0
    }

    /// The last interval's pressure, 0 to 1, if the kernel tells.
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

/// The part of the time left to the host during which it was busy with other things than coding; `None` if no time was.
fn utilization(before: &LoadCounters, now: &LoadCounters) -> Option<f64> {
    let since = |field: fn(&LoadCounters) -> Duration| field(now).saturating_sub(field(before)).as_secs_f64();
    let all = since(|reading| reading.all);
    // The counters are not read at one moment, and a thread that has ended takes its time along.
    let busy = since(|reading| reading.busy).min(all);
    let dpu = since(|reading| reading.dpu).min(busy);
    let coding = since(|reading| reading.coding).min(busy - dpu);
    let left = all - dpu;
    match all > 0.0 {
        // All of it went to what stands for the DPU: nothing is known of the host, which counts as calm.
        true if left <= 0.0 => Some(0.0),
        true => Some((busy - dpu - coding) / left),
        false => None,
    }
}

/// The part of the time during which some task waited.
fn pressure(before: &LoadCounters, now: &LoadCounters, passed: Duration) -> Option<f64> {
    let waited = now.pressure?.saturating_sub(before.pressure?);
    Some((waited.as_secs_f64() / passed.as_secs_f64()).min(1.0))
}

#[cfg(test)]
mod tests;
