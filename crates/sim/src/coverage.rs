//! Counts the effects of faults and the reactions of the code under test, so that a run of many
//! simulations shows which effects never occur.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

use crate::plan::FaultKind;

/// The effect of [`FaultKind::DamageLogEnd`].
pub(crate) const BITS_AT_LOG_ENDS: &str = "drive: bits flipped at log ends";

/// The effect of [`FaultKind::Shards`].
pub(crate) const SHARDED_STARTS: &str = "node: starts of an osd with several shards";

/// Effects that only one kind of fault has.
const OF_ONE_KIND: &[(FaultKind, &str)] = &[
    (FaultKind::FlipInWrite, "drive: bits flipped in writes"),
    (FaultKind::DamageLogEnd, BITS_AT_LOG_ENDS),
    (FaultKind::FlipInMemory, "memory: bits flipped in reads"),
    (FaultKind::FlipInMemory, "memory: bits flipped in writes"),
    (FaultKind::Shards, SHARDED_STARTS),
    (FaultKind::Shards, "metric: outboard_osd_shard_messages_total"),
    (FaultKind::Witness, "witness: failed writes"),
    (FaultKind::Witness, "witness: late writes"),
    (FaultKind::Witness, "witness: losses"),
    (FaultKind::Witness, "witness: older copies"),
];

/// Names of the other effects that must occur in any large number of simulations with all kinds of
/// faults.
pub const EXPECTED: &[&str] = &[
    "answer: changed",
    "answer: listed",
    "answer: queried",
    "answer: read",
    "channel: connections cut",
    "channel: connections held",
    "channel: connections refused",
    "drive: absent errors",
    "drive: bits flipped at rest",
    "drive: bits flipped in reads",
    "drive: flush errors",
    "drive: lost sectors",
    "drive: power failures",
    "drive: read errors",
    "drive: stalls",
    "drive: write errors",
    "engine: corrupted transfers",
    "engine: device failures",
    "engine: device hangs",
    "engine: dropped doorbells",
    "engine: failed transfers",
    "engine: resets",
    "engine: stalled transfers",
    "guest: permitted writes",
    "guest: refused writes",
    "metric: outboard_faults_fired",
    "metric: outboard_messenger_resumes",
    "metric: outboard_osd_changes_copied_total",
    "metric: outboard_osd_degraded_reads_total",
    "metric: outboard_osd_duplicates_total",
    "metric: outboard_osd_changes_withdrawn_total",
    "metric: outboard_osd_fragments_repaired_total",
    "metric: outboard_osd_group_undone_total",
    "metric: outboard_osd_members_rebuilt_total",
    "metric: outboard_osd_members_went_back_total",
    "metric: outboard_osd_sessions_expired_total",
    "metric: outboard_osd_target_failures_total",
    "metric: outboard_osd_target_returns_total",
    "metric: outboard_store_checkpoints_total",
    "metric: outboard_store_remounts_total",
    "network: breaks",
    "network: cuts",
    "network: delays",
    "network: flips",
    "network: half_breaks",
    "network: held",
    "network: ignored",
    "network: late",
    "network: late_reports",
    "network: losses",
    "network: refusals",
    "network: refused_memory",
    "network: stalls",
    "operator: pool created",
    "operator: pool removed",
    "operator: target forgotten",
    "operator: target in",
    "operator: target out",
    "operator: target replaced",
    "refusal: ConditionFailed",
    "refusal: NoSpace",
    "targets: filled",
    "unknown: timed out",
];

/// Number of occurrences of an effect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct EffectCount {
    total: u64,
    /// Number of simulations in which the effect occurred.
    simulations: u64,
}

/// How often each effect occurred, in one or more simulations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage {
    counts: BTreeMap<String, EffectCount>,
}

impl Coverage {
    /// Adds occurrences of an effect in one simulation.
    pub fn add(&mut self, effect: impl Into<String>, count: u64) {
        let effect = self.counts.entry(effect.into()).or_default();
        effect.total += count;
        effect.simulations = effect.total.min(1);
    }

    /// Adds the counts of other simulations.
    pub fn merge(&mut self, other: &Coverage) {
        for (name, count) in &other.counts {
            let sum = self.counts.entry(name.clone()).or_default();
            sum.total += count.total;
            sum.simulations += count.simulations;
        }
    }

    /// Returns the expected effects that have not occurred: [`EXPECTED`], and each kind of fault
    /// that is not in `off`, with its own effect.
    #[must_use]
    pub fn missing(&self, off: &[FaultKind]) -> Vec<String> {
        let faults = FaultKind::ALL.iter().filter(|kind| !off.contains(kind));
        let faults = faults.map(|kind| format!("fault: {}", kind.name()));
        let effects = OF_ONE_KIND.iter().filter(|(kind, _)| !off.contains(kind)).map(|(_, name)| *name);
        let expected = EXPECTED.iter().copied().chain(effects).map(str::to_owned).chain(faults);
        expected.filter(|name| self.counts.get(name).is_none_or(|count| count.total == 0)).collect()
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<50} {:>12} {:>12}", "effect", "occurrences", "simulations")?;
        for (name, EffectCount { total, simulations }) in &self.counts {
            writeln!(f, "{name:<50} {total:>12} {simulations:>12}")?;
        }
        Ok(())
    }
}

/// Records the counters of the code under test, without their labels.
#[derive(Default)]
pub struct CounterRecorder {
    counters: RefCell<BTreeMap<String, Arc<AtomicU64>>>,
}

impl CounterRecorder {
    /// Adds the counters of events to `coverage`. Counters of bytes and times are omitted.
    pub fn add_to(&self, coverage: &mut Coverage) {
        for (name, counter) in &*self.counters.borrow() {
            if !name.ends_with("_bytes") && !name.contains("nanoseconds") {
                coverage.add(format!("metric: {name}"), counter.load(Ordering::Relaxed));
            }
        }
    }
}

impl Recorder for CounterRecorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let mut counters = self.counters.borrow_mut();
        if let Some(counter) = counters.get(key.name()) {
            return Counter::from_arc(Arc::clone(counter));
        }
        let counter = Arc::new(AtomicU64::new(0));
        counters.insert(key.name().to_owned(), Arc::clone(&counter));
        Counter::from_arc(counter)
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_and_missing_effects_are_named() {
        let recorder = CounterRecorder::default();
        metrics::with_local_recorder(&recorder, || {
            metrics::counter!("outboard_store_remounts_total", "target" => "1").increment(2);
            metrics::counter!("outboard_osd_pulled_bytes").increment(2);
        });
        let mut one = Coverage::default();
        recorder.add_to(&mut one);
        one.add("fault: kill", 1);
        one.add("fault: kill", 1);
        one.add("fault: pause", 0);
        let mut sum = one.clone();
        sum.merge(&one);
        let text = sum.to_string();
        let row = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            line[name.len()..].split_whitespace().map(|n| n.parse().unwrap()).collect::<Vec<u64>>()
        };
        assert_eq!(row("fault: kill"), [4, 2]);
        assert_eq!(row("fault: pause"), [0, 0]);
        assert_eq!(row("metric: outboard_store_remounts_total"), [4, 2]);
        assert!(!text.contains("pulled_bytes"));
        let missing = sum.missing(&[FaultKind::Cut]);
        assert!(missing.contains(&"fault: pause".to_owned()));
        assert!(!missing.contains(&"fault: kill".to_owned()) && !missing.contains(&"fault: cut".to_owned()));
        assert!(!missing.contains(&"metric: outboard_store_remounts_total".to_owned()));
    }
}
