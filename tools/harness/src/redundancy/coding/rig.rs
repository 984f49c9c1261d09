//! The node under test: the host's roles run on one CPU, the DPU's roles on another.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::cpus::{Division, on};
use crate::Result;
use crate::evaluation::processes::Threads;
use crate::node::{BenchResult, BenchSpec, Node, NodePlacement};
use crate::redundancy::settings::RedundancySettings;
use crate::redundancy::watch::{WatchedState, wait_until, wait_until_whole};

/// The node of an experiment.
#[derive(Debug, Clone, Copy)]
pub struct CodingNode {
    /// Name of the node's directory.
    pub name: &'static str,
    /// Redundancy of the pool [`POOL`].
    pub redundancy: &'static str,
    /// Number of targets: one for each fragment.
    pub targets: u32,
    /// Size of each target, in the syntax of the command line.
    pub target_size: &'static str,
}

impl CodingNode {
    /// The node of most experiments.
    pub fn usual(settings: &RedundancySettings) -> CodingNode {
        let target_size = settings.target_size();
        CodingNode { name: "coding", redundancy: "ec:4+2", targets: 6, target_size }
    }
}

/// Name of the pool with parity.
pub const POOL: &str = "ec";
/// Name of the pool without redundancy.
pub const SINGLE: &str = "single";

/// The node, and the CPUs of its roles and clients.
#[derive(Debug)]
pub struct CodingRig {
    /// The node. Its commands run on any CPU, unless the caller restricts them.
    pub(super) node: Node,
    dir: PathBuf,
    shape: CodingNode,
    set_bytes: u64,
    is_degraded: AtomicBool,
    /// The CPUs of the host, of the DPU and of the clients.
    pub cpus: Division,
}

/// A kind of load: one or more sets of writes that run at the same time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pattern {
    /// Name of the pattern in the results.
    pub name: &'static str,
    /// Each set of writes: object size in the syntax of the command line, object size in bytes, and
    /// number of writes in flight.
    pub loads: &'static [(&'static str, u64, u32)],
    /// Number of reads of [`READ`] in flight at the same time, while one target is out of use. With
    /// 0 reads, all targets are in use.
    pub degraded_reads: u32,
}

impl Pattern {
    /// Sets of writes, while all targets are in use.
    pub const fn writes(name: &'static str, loads: &'static [(&'static str, u64, u32)]) -> Pattern {
        Pattern { name, loads, degraded_reads: 0 }
    }

    /// As [`writes`](Self::writes), with reads that reconstruct data at the same time.
    pub const fn with_degraded_reads(self, degraded_reads: u32) -> Pattern {
        Pattern { degraded_reads, ..self }
    }
}

/// Size of the objects of degraded reads, in the syntax of the command line and in bytes.
pub const READ: (&str, u64) = ("16MiB", 16 << 20);
/// The target that is out of use during degraded reads.
const OUT: &str = "5";
/// Maximum time until the node has noticed that a target is out of use.
const PATIENCE: Duration = Duration::from_secs(60);

/// The results of a run. All figures but `read_mb_per_s` and `errors` are those of the writes.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct WriteRun {
    /// Throughput in 10^6 bytes of objects per second.
    pub mb_per_s: f64,
    /// Throughput of the degraded reads; 0 if there are none.
    pub read_mb_per_s: f64,
    /// Median latency in µs of the set of writes with the largest median.
    pub p50_us: f64,
    /// 99th percentile of latency in µs of the set of writes with the largest 99th percentile.
    pub p99_us: f64,
    /// Number of failed writes and reads.
    pub errors: u64,
    /// Number of coding tasks that were assigned to the host. Reconstructions do not count.
    pub host_tasks: u64,
    /// Number of coding tasks that were assigned to the DPU.
    pub offload_tasks: u64,
    /// Number of coding tasks that were assigned to the DPU because the host was busy.
    pub busy_tasks: u64,
    /// Number of coding tasks that the scheduler refused.
    pub refused: u64,
    /// CPU time of the host's coding threads, in percent of the run's duration.
    pub coding_cpu_percent: f64,
    /// CPU time of the store's process, including the host's coding threads but not the emulated
    /// accelerator, in percent of the run's duration.
    pub store_cpu_percent: f64,
}

/// The fields of `outboard status --json` about coding.
#[derive(Debug, Clone, Deserialize)]
pub struct CodingFigures {
    /// Whether the host counts as busy.
    pub host_busy: bool,
    /// CPU utilization of the host in percent, without coding threads and without threads that
    /// emulate the DPU.
    pub host_utilization_percent: f64,
    /// Percentage of time in which a thread waits for a CPU of the host. `None` if the system does
    /// not report it.
    pub host_pressure_percent: Option<f64>,
    /// Number of coding tasks that the scheduler has refused since the osd's start.
    pub refused: u64,
    /// Number of coding tasks that were assigned to the host in the last second.
    pub alpha: u64,
    /// Number of coding tasks that were assigned to the DPU in the last second.
    pub beta: u64,
    host: PlaceFigures,
    offload: PlaceFigures,
}

#[derive(Debug, Clone, Deserialize)]
struct PlaceFigures {
    sent: Sent,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Sent {
    mode: u64,
    busy: u64,
    cool_down: u64,
    probe: u64,
    explore: u64,
}

#[derive(Debug, Deserialize)]
struct CodingOutput {
    coding: Option<CodingFigures>,
}

impl Sent {
    fn all(self) -> u64 {
        self.mode + self.busy + self.cool_down + self.probe + self.explore
    }
}

impl CodingFigures {
    /// Returns three numbers of coding tasks since the osd's start: tasks that were assigned to the
    /// host, tasks that were assigned to the DPU, and tasks that were assigned to the DPU because
    /// the host was busy.
    #[must_use]
    pub fn sent(&self) -> [u64; 3] {
        [self.host.sent.all(), self.offload.sent.all(), self.offload.sent.busy]
    }
}

impl CodingRig {
    /// Creates and starts the node. `offload` is the part of the DPU that computes parity: `dpu`
    /// (its cores) or `accelerator`.
    ///
    /// # Errors
    /// If the node does not start.
    pub fn up(
        dir: &Path,
        shape: CodingNode,
        offload: &str,
        settings: &RedundancySettings,
    ) -> Result<CodingRig> {
        let cpus = Division::here()?;
        let dir = dir.join(shape.name);
        let node = handle(&dir, offload, &cpus)?;
        let (set_bytes, is_degraded) = (settings.set_bytes(), AtomicBool::new(false));
        let rig = CodingRig { node, dir, shape, set_bytes, is_degraded, cpus };
        rig.node.up_quietly(NodePlacement::Dpu, shape.targets, shape.target_size)?;
        for (pool, redundancy) in [(POOL, shape.redundancy), (SINGLE, "single")] {
            rig.node.run_quietly(&["pool", "create", pool, "--redundancy", redundancy])?;
        }
        Ok(rig)
    }

    /// Redundancy of the pool [`POOL`].
    pub fn redundancy(&self) -> &'static str {
        self.shape.redundancy
    }

    /// Restarts the node with `offload` as the part of the DPU that computes parity.
    ///
    /// # Errors
    /// If the node does not stop or start.
    pub fn restart(&mut self, offload: &str) -> Result<()> {
        self.node.down()?;
        self.node = handle(&self.dir, offload, &self.cpus)?;
        self.node.up_quietly(NodePlacement::Dpu, self.shape.targets, self.shape.target_size)
    }

    /// Runs a command of `outboard` on the clients' CPUs, and returns its JSON output.
    ///
    /// # Errors
    /// If the command fails, or its output is not the expected JSON.
    pub fn json<T: serde::de::DeserializeOwned>(&self, args: &[&str]) -> Result<T> {
        on(&self.cpus.clients, || self.node.json(args))
    }

    /// Sets the coding mode.
    ///
    /// # Errors
    /// If the node refuses the mode.
    pub fn set_mode(&self, mode: &str) -> Result<()> {
        on(&self.cpus.clients, || self.node.run_quietly(&["ec", "mode", mode]))
    }

    /// Queries the node's status of coding.
    ///
    /// # Errors
    /// If the node does not answer, or its status contains nothing about coding.
    pub fn coding(&self) -> Result<CodingFigures> {
        let status: CodingOutput = self.json(&["status", "--json"])?;
        status.coding.ok_or_else(|| "the node's status does not contain the key `coding`".into())
    }

    /// Runs the writes of `pattern` for `seconds` in the current coding mode.
    ///
    /// # Errors
    /// If the node or a command fails.
    pub fn write(&self, pool: &str, pattern: &Pattern, seconds: u32) -> Result<WriteRun> {
        self.degrade(pattern.degraded_reads > 0)?;
        let before = self.coding()?;
        let store = self.node.process("store", Duration::ZERO)?.0;
        let (threads, began) = (Threads::of(store), Instant::now());
        let mut found = self.all_loads(pool, pattern, seconds)?;
        let errors = found.iter().map(|f| f.errors).sum();
        // The reads are the last load.
        let reads = found.split_off(pattern.loads.len());
        let (elapsed, now) = (began.elapsed().as_secs_f64(), Threads::of(store));
        let cpu_percent = |counts: &dyn Fn(&str) -> bool| {
            let used = now.since(&threads).filter(|(name, _)| counts(name)).map(|(_, used)| used.cpu_seconds);
            100.0 * used.sum::<f64>() / elapsed
        };
        let after = self.coding()?;
        let [host, offload, busy] = [0, 1, 2].map(|i| after.sent()[i].saturating_sub(before.sent()[i]));
        Ok(WriteRun {
            mb_per_s: found.iter().map(|f| f.mb_per_s).sum(),
            read_mb_per_s: reads.iter().map(|f| f.mb_per_s).sum(),
            p50_us: found.iter().map(|f| f.latency_us.p50).fold(0.0, f64::max),
            p99_us: found.iter().map(|f| f.latency_us.p99).fold(0.0, f64::max),
            errors,
            host_tasks: host,
            offload_tasks: offload,
            busy_tasks: busy,
            refused: after.refused.saturating_sub(before.refused),
            coding_cpu_percent: cpu_percent(&|name| name.starts_with("ech-")),
            // The emulated accelerator belongs to the DPU, although its threads run in the store's
            // process.
            store_cpu_percent: cpu_percent(&|name| !name.starts_with("eca-")),
        })
    }

    /// Takes a target out of use, or uses all targets again.
    fn degrade(&self, is_degraded: bool) -> Result<()> {
        if self.is_degraded.swap(is_degraded, Ordering::Relaxed) == is_degraded {
            return Ok(());
        }
        self.node.run_quietly(&["target", if is_degraded { "out" } else { "in" }, OUT])?;
        if is_degraded {
            wait_until(&self.node, PATIENCE, "degraded", WatchedState::is_degraded_and_idle).map(drop)
        } else {
            wait_until_whole(&self.node).map(drop)
        }
    }

    fn all_loads(&self, pool: &str, pattern: &Pattern, seconds: u32) -> Result<Vec<BenchResult>> {
        let one = |mode: &'static str, (size, bytes, in_flight): (&'static str, u64, u32)| {
            // More objects than writes in flight, so that no object is written twice at the same
            // time.
            let objects = (self.set_bytes / bytes).max(u64::from(in_flight) + 2).to_string();
            let workload = BenchSpec { mode, object_size: size, in_flight, seconds };
            let run = || self.node.bench_with(pool, workload, &["--objects", &objects]);
            // The result must be `Send`, so the thread returns the error's message.
            on(&self.cpus.clients, run).map_err(|e| e.to_string())
        };
        std::thread::scope(|scope| {
            let reads =
                (pattern.degraded_reads > 0).then_some(("read", (READ.0, READ.1, pattern.degraded_reads)));
            let all = pattern.loads.iter().map(|load| ("write", *load)).chain(reads);
            let running: Vec<_> = all.map(|(mode, load)| scope.spawn(move || one(mode, load))).collect();
            let ended = running.into_iter().map(|thread| thread.join().map_err(|_| "a load panicked")?);
            ended.map(|found: std::result::Result<_, String>| found.map_err(Into::into)).collect()
        })
    }
}

fn handle(dir: &Path, offload: &str, cpus: &Division) -> Result<Node> {
    // The host has one CPU. Its load by the store must not decide instead of the coding mode.
    let node = Node::new(dir)?.with_env("OUTBOARD_CODING_OFFLOAD", offload);
    let node = node.with_env("OUTBOARD_CODING_COUNT_STORE", "false");
    let node = node.with_env("OUTBOARD_STORE_CPUS", &cpus.host.to_string());
    Ok(node.with_env("OUTBOARD_OSD_CPUS", &cpus.dpu.to_string()))
}

impl WriteRun {
    /// Returns the percentage of coding tasks that were assigned to the host.
    #[must_use]
    pub fn host_percent(&self) -> f64 {
        100.0 * self.host_tasks as f64 / (self.host_tasks + self.offload_tasks).max(1) as f64
    }

    /// Returns the percentage of coding tasks that were assigned to the DPU because the host was
    /// busy.
    #[must_use]
    pub fn busy_percent(&self) -> f64 {
        100.0 * self.busy_tasks as f64 / (self.host_tasks + self.offload_tasks).max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_coding_is_parsed_and_tasks_are_summed_over_reasons() {
        let place = r#"{"in_service":0,"slots":4,"sent":{"mode":35,"busy":2,"cool_down":0,"probe":1,"explore":3,"only":7},"ns_per_mb":1}"#;
        let text = format!(
            r#"{{"mode":"async","engine":"dpu","host_busy":true,"host_utilization_percent":100,"host_pressure_percent":null,
            "refused":0,"alpha":1,"beta":2,"host":{place},"offload":{place}}}"#
        );
        let coding: CodingFigures = serde_json::from_str(&text).unwrap();
        assert_eq!(coding.sent(), [41, 41, 2]);
        assert!(coding.host_busy && coding.host_pressure_percent.is_none());
    }

    #[test]
    fn percentages_refer_to_all_coding_tasks_of_the_run() {
        let run = WriteRun { host_tasks: 1, offload_tasks: 3, busy_tasks: 2, ..WriteRun::default() };
        assert_eq!((run.host_percent(), run.busy_percent()), (25.0, 50.0));
        assert_eq!(WriteRun::default().host_percent(), 0.0);
    }
}
