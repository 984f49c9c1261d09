//! The result of a measurement.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;
use wire::{Placement, Role};

use super::accounting::{self, ProcessCost};
use super::breakdown::{OpBreakdown, OsdMeasurement};
use super::load::LoadResult;
use super::record::OpRecord;
use super::{BenchArgs, Workload};
use node::failure::Result;
use node::units::ByteSize;

/// The results of a benchmark. The JSON form is stable: fields are never removed, but new fields
/// may be added.
#[derive(Debug, Serialize)]
pub struct BenchReport {
    pub workload: Workload,
    pub object_size: u64,
    /// Number of bytes that one operation reads or writes.
    pub block_size: u64,
    pub in_flight: u32,
    pub clients: u32,
    /// Number of objects.
    pub objects: u64,
    /// Rate at which operations were due, per second; missing in a closed loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<u32>,
    /// Placement of the osd; `None` if the node does not report it.
    pub placement: Option<Placement>,
    /// Time from the start of the measurement to the end of its last operation.
    pub seconds: f64,
    /// Whether SIGINT ended the measurement early; missing if not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub interrupted: bool,
    pub ops: u64,
    pub errors: u64,
    /// Throughput in 10^6 bytes of object data per second.
    pub mb_per_s: f64,
    pub iops: f64,
    /// Number of operations that were due, and could not be started before the end; missing in a closed
    /// loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_started: Option<u64>,
    #[serde(flatten)]
    pub over_time: OverTime,
    pub latency_us: Latency,
    /// Reads and writes separately, by `read` and `write`; kinds without latencies are missing.
    pub by_kind: BTreeMap<&'static str, KindReport>,
    /// Breakdown of the osd's part of the latency; missing if the osd did not report it or was
    /// restarted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub breakdown_us: Option<OpBreakdown>,
    /// CPU time of the storage host per operation; see `--help`. `None` if the node did not report it.
    pub host_cpu_us_per_op: Option<f64>,
    /// CPU time of all processes per operation, including this process and emulated hardware. `None` if
    /// a role of the node did not report its use.
    pub node_cpu_us_per_op: Option<f64>,
    pub processes: Vec<ProcessCost>,
}

/// The number of operations over time.
#[derive(Debug, Serialize)]
pub struct OverTime {
    /// Number of operations that completed in each whole second of the measurement.
    pub per_second: Vec<u64>,
    /// The smallest of these numbers.
    pub min_per_second: u64,
    /// Longest time without a completed operation in ms, rounded down to 10 ms. A pause at the end of
    /// the measurement counts up to the next completion.
    pub longest_pause_ms: u64,
}

/// The operations of one kind.
#[derive(Debug, Serialize)]
pub struct KindReport {
    pub ops: u64,
    pub iops: f64,
    #[serde(flatten)]
    pub over_time: OverTime,
    pub latency_us: Latency,
}

/// Latency of the operations that succeeded. With a rate, it includes operations that failed or were
/// not started.
#[derive(Debug, Serialize)]
pub struct Latency {
    pub mean: f64,
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

/// The counts of a measurement.
pub struct MeasuredCounts {
    /// Time from the start of the measurement to the end of its last operation.
    pub seconds: f64,
    /// Time in which operations started.
    pub measured: Duration,
    /// Whether SIGINT ended the measurement early.
    pub interrupted: bool,
    pub load: LoadResult,
    /// CPU use of each process.
    pub used: Vec<ProcessCost>,
    /// The osd's measurements, if it reported them.
    pub window: Option<OsdMeasurement>,
}

impl OverTime {
    fn of(record: &OpRecord, measured: Duration) -> OverTime {
        let per_second = record.per_second(measured.as_secs());
        let pause = record.longest_pause(measured);
        OverTime {
            min_per_second: per_second.iter().copied().min().unwrap_or(0),
            per_second,
            longest_pause_ms: u64::try_from(pause.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

impl Latency {
    /// Returns the latency of the operations of a histogram, in ns.
    pub fn of(latency_ns: &Histogram<u64>) -> Latency {
        let us = |ns: u64| ns as f64 / 1e3;
        Latency {
            mean: latency_ns.mean() / 1e3,
            p50: us(latency_ns.value_at_quantile(0.5)),
            p99: us(latency_ns.value_at_quantile(0.99)),
            p999: us(latency_ns.value_at_quantile(0.999)),
            max: us(latency_ns.max()),
        }
    }
}

fn placement_name(placement: Option<Placement>) -> &'static str {
    placement.map_or("unknown", Placement::as_str)
}

impl BenchReport {
    /// Computes the results.
    ///
    /// # Errors
    /// As for [`OpRecord::merge`].
    pub fn new(
        args: &BenchArgs,
        placement: Option<Placement>,
        counts: MeasuredCounts,
    ) -> Result<BenchReport> {
        let MeasuredCounts { seconds, measured, interrupted, load, used: processes, window } = counts;
        let kinds = [("read", &load.reads), ("write", &load.writes)];
        let of_kind = |record: &OpRecord| KindReport {
            ops: record.ops(),
            iops: record.ops() as f64 / seconds,
            over_time: OverTime::of(record, measured),
            latency_us: Latency::of(record.latency()),
        };
        let by_kind = kinds.iter().filter(|(_, record)| !record.latency().is_empty());
        let by_kind = by_kind.map(|(name, record)| (*name, of_kind(record))).collect();
        let mut all = load.reads.clone();
        all.merge(&load.writes)?;
        let ops = all.ops();
        // The use of a role that does not report it is unknown, and so is each sum that contains it.
        let reported = |role: &Role| processes.iter().any(|p| p.role == role.as_str());
        let are_known = placement.is_some_and(|p| accounting::roles(p).iter().all(reported));
        let cpu = |of: &dyn Fn(&ProcessCost) -> bool| -> f64 {
            let seconds: f64 = processes.iter().filter(|p| of(p)).map(|p| p.cpu_seconds).sum();
            seconds * 1e6 / ops.max(1) as f64
        };
        let host_is_known = processes.iter().any(accounting::is_host);
        Ok(BenchReport {
            workload: args.workload,
            object_size: args.object_size.0,
            block_size: args.block_bytes(),
            in_flight: args.in_flight,
            clients: args.clients,
            objects: args.object_count(),
            rate: args.rate,
            placement,
            seconds,
            interrupted,
            ops,
            errors: load.errors,
            mb_per_s: ops as f64 * args.block_bytes() as f64 / seconds / 1e6,
            iops: ops as f64 / seconds,
            not_started: args.rate.map(|_| load.not_started),
            over_time: OverTime::of(&all, measured),
            latency_us: Latency::of(all.latency()),
            by_kind,
            breakdown_us: window.and_then(|w| w.per_op(ops)),
            host_cpu_us_per_op: host_is_known.then(|| cpu(&accounting::is_host)),
            node_cpu_us_per_op: are_known.then(|| cpu(&|_| true)),
            processes,
        })
    }
}

impl fmt::Display for OverTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in the worst second {}   longest pause {} ms", self.min_per_second, self.longest_pause_ms)
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "mean {:.0}   p50 {:.0}   p99 {:.0}   p99.9 {:.0}   max {:.0}",
            self.mean, self.p50, self.p99, self.p999, self.max
        )
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {}", self.workload, ByteSize(self.block_size))?;
        if self.block_size < self.object_size {
            write!(f, " in objects of {}", ByteSize(self.object_size))?;
        }
        write!(f, ", {} in flight", self.in_flight)?;
        if self.clients > 1 {
            write!(f, " of {} clients", self.clients)?;
        }
        if let Some(rate) = self.rate {
            write!(f, ", {rate} op/s due")?;
        }
        let placement = placement_name(self.placement);
        writeln!(
            f,
            ", {} objects, {placement} placement, {:.1} s{}",
            self.objects,
            self.seconds,
            if self.interrupted { ", interrupted" } else { "" }
        )?;
        write!(f, "  {} operations, {} errors", self.ops, self.errors)?;
        if let Some(not_started) = self.not_started {
            write!(f, ", {not_started} not started in time")?;
        }
        writeln!(f, "\n  {:.1} MB/s   {:.0} op/s   {}", self.mb_per_s, self.iops, self.over_time)?;
        writeln!(f, "  latency µs: {}", self.latency_us)?;
        for (kind, of_kind) in self.by_kind.iter().filter(|_| self.by_kind.len() > 1) {
            writeln!(f, "    {kind:<5} {:.0} op/s   {}", of_kind.iops, of_kind.over_time)?;
            writeln!(f, "      latency µs: {}", of_kind.latency_us)?;
        }
        if let Some(breakdown) = &self.breakdown_us {
            writeln!(f, "  latency by phase, mean µs: {breakdown}")?;
        }
        let known = |us: Option<f64>| us.map_or("unknown".to_owned(), |us| format!("{us:.1}"));
        let (host, node) = (known(self.host_cpu_us_per_op), known(self.node_cpu_us_per_op));
        writeln!(f, "  CPU µs per operation: host {host}   node {node}")?;
        if self.processes.is_empty() {
            return Ok(());
        }
        let heads = ["µs/op", "user", "system", "switches/op", "polls/op", "wake-ups/op"];
        let [cpu, user, system, switches, polls, wake_ups] = heads;
        writeln!(
            f,
            "    {:<13} {cpu:>9} {user:>8} {system:>8} {switches:>12} {polls:>9} {wake_ups:>12}",
            "process"
        )?;
        let ops = self.ops.max(1) as f64;
        let us = |seconds: f64| format!("{:.1}", seconds * 1e6 / ops);
        let each = |count: u64| format!("{:.2}", count as f64 / ops);
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        for p in &self.processes {
            let (cpu, user, system) = (us(p.cpu_seconds), us(p.user_seconds), us(p.system_seconds));
            let (switches, wake_ups, mib) =
                (each(p.context_switches), each(p.wake_ups), p.peak_resident_bytes >> 20);
            writeln!(
                f,
                "    {:<13} {cpu:>9} {user:>8} {system:>8} {switches:>12} {:>9} {wake_ups:>12}  peak {mib} MiB",
                p.role, "-"
            )?;
            for (class, used) in p.by_class.iter().filter(|(_, u)| u.cpu_seconds * 1e6 / ops >= 0.05) {
                let (user, system) =
                    (or_dash(used.user_seconds.map(us)), or_dash(used.system_seconds.map(us)));
                let (switches, polls, wake_ups) = (
                    or_dash(used.context_switches.map(each)),
                    or_dash(used.polls.map(each)),
                    or_dash(used.wake_ups.map(each)),
                );
                let cpu = us(used.cpu_seconds);
                let estimated = if used.estimated { "  (CPU estimated)" } else { "" };
                writeln!(
                    f,
                    "      {class:<11} {cpu:>9} {user:>8} {system:>8} {switches:>12} {polls:>9} {wake_ups:>12}{estimated}",
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn report(args: &BenchArgs, load: LoadResult) -> BenchReport {
        let measured = Duration::from_millis(1500);
        let (used, window, interrupted) = (Vec::new(), None, true);
        let counts = MeasuredCounts { seconds: 1.6, measured, interrupted, load, used, window };
        BenchReport::new(args, None, counts).unwrap()
    }

    #[test]
    fn a_kind_whose_operations_were_not_started_has_a_latency() {
        let mut load = LoadResult::new().unwrap();
        load.reads.complete(MS, MS);
        load.writes.without_success(500 * MS, 3);
        let args = BenchArgs { rate: Some(4), ..BenchArgs::of(Workload::Randrw) };
        let report = report(&args, load);
        assert_eq!(report.by_kind.keys().collect::<Vec<_>>(), [&"read", &"write"]);
        let writes = &report.by_kind["write"];
        assert!(writes.ops == 0 && writes.latency_us.p50 > 490_000.0, "{writes:?}");
    }

    #[test]
    fn a_kind_without_operations_is_missing() {
        let mut load = LoadResult::new().unwrap();
        load.reads.complete(MS, MS);
        let report = report(&BenchArgs::of(Workload::Read), load);
        assert_eq!(report.by_kind.keys().collect::<Vec<_>>(), [&"read"]);
    }

    #[test]
    fn an_interrupted_measurement_counts_the_whole_seconds_and_the_pause_up_to_its_end() {
        let mut load = LoadResult::new().unwrap();
        load.writes.complete(MS, MS);
        load.writes.complete(1200 * MS, MS);
        let args = BenchArgs { seconds: 10, ..BenchArgs::of(Workload::Write) };
        let report = report(&args, load);
        assert_eq!((report.over_time.per_second.as_slice(), report.over_time.min_per_second), (&[1][..], 1));
        assert_eq!((report.over_time.longest_pause_ms, report.iops), (1190, 2.0 / 1.6));
        assert!(report.to_string().contains("1.6 s, interrupted"), "{report}");
    }
}
