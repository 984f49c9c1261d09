//! The node under test: the host's roles run on one CPU, the DPU's roles on another.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::cpus::{Division, on};
use crate::Result;
use crate::evaluation::processes::Threads;
use crate::node::{BenchResult, BenchSpec, Node, NodePlacement};
use crate::redundancy::settings::RedundancySettings;

/// Targets of the node: as many as 4+2 has fragments.
const TARGETS: u32 = 6;
/// The pool with parity.
pub const POOL: &str = "ec";
/// The pool without.
pub const SINGLE: &str = "single";

/// The node, and who is where.
#[derive(Debug)]
pub struct CodingRig {
    /// The node, whose commands run on any CPU.
    pub(super) node: Node,
    dir: PathBuf,
    target_size: &'static str,
    set_bytes: u64,
    /// Which CPUs are whose.
    pub cpus: Division,
}

/// One kind of load: writes of a size, so many in flight; several go on at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pattern {
    /// For people.
    pub name: &'static str,
    /// Object size as the command line has it, bytes, writes in flight.
    pub loads: &'static [(&'static str, u64, u32)],
}

/// What a run of writes came to.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct WriteRun {
    /// 10^6 bytes of objects per second.
    pub mb_per_s: f64,
    /// Of the slowest load, in µs.
    pub p50_us: f64,
    /// Of the slowest load, in µs.
    pub p99_us: f64,
    /// Writes that failed.
    pub errors: u64,
    /// Pieces coded by the host.
    pub host_tasks: u64,
    /// Pieces coded by the DPU.
    pub offload_tasks: u64,
    /// Of those, because the host was busy.
    pub busy_tasks: u64,
    /// Pieces refused.
    pub refused: u64,
    /// What coding took of the host's CPU, in percent of the time.
    pub coding_cpu_percent: f64,
    /// What the store's process took of it, coding included, in percent of the time.
    pub store_cpu_percent: f64,
}

/// The parts of `outboard status --json` that speak of coding.
#[derive(Debug, Clone, Deserialize)]
pub struct CodingFigures {
    /// Whether the host counts as busy.
    pub host_busy: bool,
    /// How busy it is, without coding and what stands for the DPU.
    pub host_utilization_percent: f64,
    /// How long something waits for a CPU.
    pub host_pressure_percent: Option<f64>,
    /// Pieces refused since the start.
    pub refused: u64,
    /// Pieces sent to the host in the last second.
    pub alpha: u64,
    /// Pieces sent to the DPU in the last second.
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
    /// Pieces sent to the host and to the DPU since the start, and of the latter those sent because the host was busy.
    #[must_use]
    pub fn sent(&self) -> [u64; 3] {
        [self.host.sent.all(), self.offload.sent.all(), self.offload.sent.busy]
    }
}

impl CodingRig {
    /// Starts the node. `offload` is what of the DPU codes: `dpu` or `accelerator`.
    ///
    /// # Errors
    /// If it does not start.
    pub fn up(dir: &Path, offload: &str, settings: &RedundancySettings) -> Result<CodingRig> {
        let cpus = Division::here()?;
        let dir = dir.join("coding");
        let node = handle(&dir, offload, &cpus)?;
        let (target_size, set_bytes) = (settings.target_size(), settings.set_bytes());
        let rig = CodingRig { node, dir, target_size, set_bytes, cpus };
        rig.node.up_quietly(NodePlacement::Dpu, TARGETS, rig.target_size)?;
        for (pool, redundancy) in [(POOL, "ec:4+2"), (SINGLE, "single")] {
            rig.node.run_quietly(&["pool", "create", pool, "--redundancy", redundancy])?;
        }
        Ok(rig)
    }

    /// Starts the node again, with another part of the DPU coding.
    ///
    /// # Errors
    /// If it does not stop or start.
    pub fn restart(&mut self, offload: &str) -> Result<()> {
        self.node.down()?;
        self.node = handle(&self.dir, offload, &self.cpus)?;
        self.node.up_quietly(NodePlacement::Dpu, TARGETS, self.target_size)
    }

    /// Runs a command of `outboard` that prints JSON, where clients are.
    ///
    /// # Errors
    /// If it fails or prints something else.
    pub fn json<T: serde::de::DeserializeOwned>(&self, args: &[&str]) -> Result<T> {
        on(&self.cpus.clients, || self.node.json(args))
    }

    /// Changes where parity is computed.
    ///
    /// # Errors
    /// If the node refuses.
    pub fn set_mode(&self, mode: &str) -> Result<()> {
        on(&self.cpus.clients, || self.node.run_quietly(&["ec", "mode", mode]))
    }

    /// What coding does.
    ///
    /// # Errors
    /// If the node does not say.
    pub fn coding(&self) -> Result<CodingFigures> {
        let status: CodingOutput = self.json(&["status", "--json"])?;
        status.coding.ok_or_else(|| "the node does not say where parity is computed".into())
    }

    /// Writes for some seconds, in the mode that the node is in.
    ///
    /// # Errors
    /// If the node fails, or not one write succeeds.
    pub fn write(&self, pool: &str, pattern: &Pattern, seconds: u32) -> Result<WriteRun> {
        let before = self.coding()?;
        let store = self.node.process("store", Duration::ZERO)?.0;
        let (threads, began) = (Threads::of(store), Instant::now());
        let found = self.all_loads(pool, pattern, seconds)?;
        let (elapsed, now) = (began.elapsed().as_secs_f64(), Threads::of(store));
        let cpu_percent = |counts: &dyn Fn(&str) -> bool| {
            let used = now.since(&threads).filter(|(name, _)| counts(name)).map(|(_, used)| used.cpu_seconds);
            100.0 * used.sum::<f64>() / elapsed
        };
        let after = self.coding()?;
        let [host, offload, busy] = [0, 1, 2].map(|i| after.sent()[i].saturating_sub(before.sent()[i]));
        Ok(WriteRun {
            mb_per_s: found.iter().map(|f| f.mb_per_s).sum(),
            p50_us: found.iter().map(|f| f.latency_us.p50).fold(0.0, f64::max),
            p99_us: found.iter().map(|f| f.latency_us.p99).fold(0.0, f64::max),
            errors: found.iter().map(|f| f.errors).sum(),
            host_tasks: host,
            offload_tasks: offload,
            busy_tasks: busy,
            refused: after.refused.saturating_sub(before.refused),
            coding_cpu_percent: cpu_percent(&|name| name.starts_with("ech-")),
            // The emulated accelerator is of the DPU, though its threads are in the store's process.
            store_cpu_percent: cpu_percent(&|name| !name.starts_with("eca-")),
        })
    }

    fn all_loads(&self, pool: &str, pattern: &Pattern, seconds: u32) -> Result<Vec<BenchResult>> {
        let one = |(size, bytes, in_flight): &(&str, u64, u32)| {
            // More than are in flight, so that none is written twice at a time.
            let objects = (self.set_bytes / bytes).max(u64::from(*in_flight) + 2).to_string();
            let workload = BenchSpec { mode: "write", object_size: size, in_flight: *in_flight, seconds };
            let run = || self.node.bench_with(pool, workload, &["--objects", &objects]);
            // A thread's failure is handed on as what it says.
            on(&self.cpus.clients, run).map_err(|e| e.to_string())
        };
        std::thread::scope(|scope| {
            let running: Vec<_> = pattern.loads.iter().map(|load| scope.spawn(move || one(load))).collect();
            let ended = running.into_iter().map(|thread| thread.join().map_err(|_| "a load panicked")?);
            ended.map(|found: std::result::Result<_, String>| found.map_err(Into::into)).collect()
        })
    }
}

fn handle(dir: &Path, offload: &str, cpus: &Division) -> Result<Node> {
    let node = Node::new(dir)?.with_env("OUTBOARD_CODING_OFFLOAD", offload);
    let node = node.with_env("OUTBOARD_STORE_CPUS", &cpus.host.to_string());
    Ok(node.with_env("OUTBOARD_OSD_CPUS", &cpus.dpu.to_string()))
}

impl WriteRun {
    /// Part of the pieces that the host coded, in percent.
    #[must_use]
    pub fn host_percent(&self) -> f64 {
        100.0 * self.host_tasks as f64 / (self.host_tasks + self.offload_tasks).max(1) as f64
    }

    /// Part of the pieces that went to the DPU because the host was busy, in percent.
    #[must_use]
    pub fn busy_percent(&self) -> f64 {
        100.0 * self.busy_tasks as f64 / (self.host_tasks + self.offload_tasks).max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_status_says_of_coding_is_understood() {
        let place = r#"{"in_service":0,"slots":4,"sent":{"mode":35,"busy":2,"cool_down":0,"probe":1,"explore":3},"ns_per_mb":1}"#;
        let text = format!(
            r#"{{"mode":"async","engine":"dpu","host_busy":true,"host_utilization_percent":100,"host_pressure_percent":null,
            "refused":0,"alpha":1,"beta":2,"host":{place},"offload":{place}}}"#
        );
        let coding: CodingFigures = serde_json::from_str(&text).unwrap();
        assert_eq!(coding.sent(), [41, 41, 2]);
        assert!(coding.host_busy && coding.host_pressure_percent.is_none());
    }

    #[test]
    fn shares_are_of_all_pieces() {
        let run = WriteRun { host_tasks: 1, offload_tasks: 3, busy_tasks: 2, ..WriteRun::default() };
        assert_eq!((run.host_percent(), run.busy_percent()), (25.0, 50.0));
        assert_eq!(WriteRun::default().host_percent(), 0.0);
    }
}
