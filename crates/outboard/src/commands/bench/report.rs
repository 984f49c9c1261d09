//! The result of a measurement.

use std::fmt;

use base::thread::ThreadClass;
use hdrhistogram::Histogram;
use serde::{Serialize, Serializer};
use wire::Placement;

use super::accounting::{self, ProcessCost};
use super::breakdown::{OpBreakdown, OsdMeasurement};
use super::{BenchArgs, Workload};
use node::units::ByteSize;

/// The results of a benchmark. The JSON form is stable: fields are never removed, but new fields
/// may be added.
#[derive(Debug, Serialize)]
pub struct BenchReport {
    pub workload: Workload,
    pub object_size: u64,
    pub in_flight: u32,
    /// Placement of the osd; `None` (in JSON `unknown`) if only the node's address is known.
    #[serde(serialize_with = "placement_or_unknown")]
    pub placement: Option<Placement>,
    /// Duration of the measurement.
    pub seconds: f64,
    pub ops: u64,
    pub errors: u64,
    /// Throughput in 10^6 bytes of object data per second.
    pub mb_per_s: f64,
    pub iops: f64,
    pub latency_us: Latency,
    /// Breakdown of the osd's part of the latency; missing if the osd did not report it or was
    /// restarted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub breakdown_us: Option<OpBreakdown>,
    /// CPU time of the storage host per operation; see `--help`.
    pub host_cpu_us_per_op: f64,
    /// CPU time of all processes per operation, including this process and emulated hardware.
    pub node_cpu_us_per_op: f64,
    pub processes: Vec<ProcessCost>,
}

/// Latency of the operations that succeeded.
#[derive(Debug, Serialize)]
pub struct Latency {
    pub mean: f64,
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

/// The counts of a measurement.
pub struct MeasuredCounts<'a> {
    pub seconds: f64,
    pub latency_ns: &'a Histogram<u64>,
    pub errors: u64,
    /// CPU use of each process.
    pub used: Vec<ProcessCost>,
    /// The osd's measurements, if it reported them.
    pub window: Option<OsdMeasurement>,
}

fn placement_name(placement: Option<Placement>) -> &'static str {
    placement.map_or("unknown", Placement::as_str)
}

fn placement_or_unknown<S: Serializer>(placement: &Option<Placement>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(placement_name(*placement))
}

impl BenchReport {
    /// Computes the results.
    pub fn new(args: &BenchArgs, placement: Option<Placement>, outcome: MeasuredCounts<'_>) -> BenchReport {
        let MeasuredCounts { seconds, latency_ns, errors, used: mut processes, window } = outcome;
        if let Some(window) = &window {
            let osd = processes.iter_mut().filter(|p| p.pid == window.pid);
            osd.for_each(|p| p.divide(ThreadClass::Osd, &window.thread_ns));
        }
        let ops = latency_ns.len();
        let us = |ns: u64| ns as f64 / 1e3;
        let cpu = |of: &dyn Fn(&ProcessCost) -> bool| -> f64 {
            let seconds: f64 = processes.iter().filter(|p| of(p)).map(|p| p.cpu_seconds).sum();
            seconds * 1e6 / ops.max(1) as f64
        };
        BenchReport {
            workload: args.workload,
            object_size: args.object_size.0,
            in_flight: args.in_flight,
            placement,
            seconds,
            ops,
            errors,
            mb_per_s: ops as f64 * args.object_size.0 as f64 / seconds / 1e6,
            iops: ops as f64 / seconds,
            latency_us: Latency {
                mean: latency_ns.mean() / 1e3,
                p50: us(latency_ns.value_at_quantile(0.5)),
                p99: us(latency_ns.value_at_quantile(0.99)),
                p999: us(latency_ns.value_at_quantile(0.999)),
                max: us(latency_ns.max()),
            },
            breakdown_us: window.and_then(|w| w.per_op(ops)),
            host_cpu_us_per_op: cpu(&accounting::is_host),
            node_cpu_us_per_op: cpu(&|_| true),
            processes,
        }
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let l = &self.latency_us;
        writeln!(
            f,
            "{:?} of {}, {} in flight, {} placement, {:.1} s",
            self.workload,
            ByteSize(self.object_size),
            self.in_flight,
            placement_name(self.placement),
            self.seconds
        )?;
        writeln!(f, "  {} operations, {} errors", self.ops, self.errors)?;
        writeln!(f, "  {:.1} MB/s   {:.0} op/s", self.mb_per_s, self.iops)?;
        writeln!(
            f,
            "  latency µs: mean {:.0}   p50 {:.0}   p99 {:.0}   p99.9 {:.0}   max {:.0}",
            l.mean, l.p50, l.p99, l.p999, l.max
        )?;
        if let Some(breakdown) = &self.breakdown_us {
            writeln!(f, "  latency by phase, mean µs: {breakdown}")?;
        }
        writeln!(
            f,
            "  CPU µs per operation: host {:.1}   node {:.1}",
            self.host_cpu_us_per_op, self.node_cpu_us_per_op
        )?;
        let per_op = |seconds: f64| seconds * 1e6 / self.ops.max(1) as f64;
        for p in &self.processes {
            let switches = p.context_switches as f64 / self.ops.max(1) as f64;
            let mib = p.peak_resident_bytes >> 20;
            writeln!(
                f,
                "    {:<11} {:>8.1} µs/op  {switches:>6.2} switches/op  peak {mib} MiB",
                p.role,
                per_op(p.cpu_seconds)
            )?;
            for (class, used) in p.by_class.iter().filter(|(_, u)| per_op(u.cpu_seconds) >= 0.05) {
                let per_op_switches = |count: u64| format!("{:.2}", count as f64 / self.ops.max(1) as f64);
                let switches = used.context_switches.map_or("-".to_owned(), per_op_switches);
                let estimated = if used.estimated { "  (CPU estimated)" } else { "" };
                writeln!(
                    f,
                    "      {class:<9} {:>8.1} µs/op  {switches:>6} switches/op{estimated}",
                    per_op(used.cpu_seconds)
                )?;
            }
        }
        Ok(())
    }
}
