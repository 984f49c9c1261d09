//! The samples, which are the measured values of each run.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::stats::{Estimate, Rounds, estimate};
use super::workload::{AccessMode, Case, TestedSystem};
use crate::Result;
use crate::node::{BenchBreakdown, BenchResult, ClassUsage, ProcessUse};

/// The results of one run.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// Number of the round, from 1.
    pub round: u32,
    /// The case that was run.
    #[serde(flatten)]
    pub case: Case,
    /// Number of completed operations.
    pub ops: u64,
    /// Throughput in 10^6 bytes per second.
    pub mb_per_s: f64,
    /// Operations per second.
    pub iops: f64,
    /// Mean latency in µs.
    pub latency_us_mean: f64,
    /// 99th percentile of latency in µs. `None` for Ceph, because `rados bench` does not report it.
    pub latency_us_p99: Option<f64>,
    /// CPU time of the storage host per operation, in µs: of the store (dpu), of the node's process
    /// (host), or of the OSD (Ceph).
    pub host_cpu_us_per_op: f64,
    /// CPU time of all server processes, including emulated hardware, and of the client, per
    /// operation in µs.
    pub node_cpu_us_per_op: f64,
    /// CPU time of the client per operation in µs, which is a part of `node_cpu_us_per_op`.
    pub client_cpu_us_per_op: f64,
    /// User CPU time of the server processes per operation in µs; 0 for Ceph, where it is not measured.
    pub user_us_per_op: f64,
    /// System CPU time of the server processes per operation in µs; 0 for Ceph.
    pub system_us_per_op: f64,
    /// How often threads of the server processes slept and were woken, per operation; 0 for Ceph.
    pub wake_ups_per_op: f64,
    /// CPU time and context switches per operation by part, without the client.
    pub parts: BTreeMap<Subsystem, PartUse>,
    /// Breakdown of a write's mean latency at the client, if known. A breakdown that contains only
    /// zeros counts as unknown.
    pub breakdown_us: Option<BenchBreakdown>,
}

/// The medians of a case over all rounds.
#[derive(Debug, Clone, Serialize)]
pub struct Medians {
    /// The case that was run.
    #[serde(flatten)]
    pub case: Case,
    /// Throughput in 10^6 bytes per second.
    pub mb_per_s: Option<Estimate>,
    /// Operations per second.
    pub iops: Option<Estimate>,
    /// Mean latency in µs.
    pub latency_us_mean: Option<Estimate>,
    /// CPU time of the storage host per operation, in µs.
    pub host_cpu_us_per_op: Option<Estimate>,
    /// CPU time of all processes per operation, in µs.
    pub node_cpu_us_per_op: Option<Estimate>,
    /// CPU time of the client per operation in µs, which is a part of `node_cpu_us_per_op`.
    pub client_cpu_us_per_op: Option<Estimate>,
}

/// The subsystem of a thread, in the terms of figure 5 of the DoCeph paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Subsystem {
    /// Connections and frames; Ceph's `msgr-worker` threads.
    Messenger,
    /// The store and its drive; Ceph's `bstore` threads.
    ObjectStore,
    /// Execution of requests; Ceph's `tp_osd_tp` threads.
    Osd,
    /// An osd thread that also runs the messenger, if its time is not divided between the two.
    OsdAndMessenger,
    /// The channel between DPU and host, in software.
    Channel,
    /// libfabric for the engine `ofi`, on the DPU. Its provider `tcp` does the work of a NIC in software.
    Fabric,
    /// libfabric for the engine `ofi`, on the host.
    FabricHost,
    /// The emulated DMA engine, which would otherwise be hardware.
    Dma,
    /// Erasure coding in software on the DPU, in separate threads.
    Coding,
    /// The emulated coding engine, which would otherwise be hardware.
    CodingDevice,
    /// RocksDB's background threads (Ceph).
    Rocksdb,
    /// All other threads.
    Other,
}

/// The resource use of a part per operation.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PartUse {
    /// CPU time in µs.
    pub cpu_us: f64,
    /// Number of context switches.
    pub switches: f64,
    /// Number of polls of tasks; 0 if the threads do not count them.
    pub polls: f64,
    /// Number of wake-ups of threads for this part; 0 if the threads do not count them.
    pub wake_ups: f64,
}

impl Subsystem {
    /// Returns the subsystem's name in the report.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Subsystem::Messenger => "Messenger",
            Subsystem::ObjectStore => "ObjectStore",
            Subsystem::Osd => "osd",
            Subsystem::OsdAndMessenger => "osd + messenger",
            Subsystem::Channel => "host–DPU channel",
            Subsystem::Fabric => "libfabric on the DPU",
            Subsystem::FabricHost => "libfabric on the host",
            Subsystem::Dma => "DMA (emulated)",
            Subsystem::Coding => "erasure coding",
            Subsystem::CodingDevice => "coding engine (emulated)",
            Subsystem::Rocksdb => "RocksDB",
            Subsystem::Other => "other",
        }
    }

    /// Returns the subsystem of a thread class of a process of a node. `split` says whether the node
    /// divides the time of the osd's threads between osd and messenger.
    #[must_use]
    pub fn of_class(role: &str, class: &str, split: bool) -> Subsystem {
        match class {
            "msgr" => Subsystem::Messenger,
            "store" => Subsystem::ObjectStore,
            "osd" if split => Subsystem::Osd,
            "osd" => Subsystem::OsdAndMessenger,
            "chan" => Subsystem::Channel,
            "ofi" if role == "store" => Subsystem::FabricHost,
            "ofi" => Subsystem::Fabric,
            "dma" => Subsystem::Dma,
            "ec" => Subsystem::Coding,
            "eca" => Subsystem::CodingDevice,
            _ => Subsystem::Other,
        }
    }

    /// Returns the subsystem of a thread of ceph-osd. The first three thread names are those in
    /// section 5.2 of the DoCeph paper.
    #[must_use]
    pub fn of_ceph_thread(name: &str) -> Subsystem {
        let begins = |prefix: &str| name.starts_with(prefix);
        match () {
            () if begins("msgr-worker") => Subsystem::Messenger,
            () if begins("bstore") => Subsystem::ObjectStore,
            () if begins("tp_osd_tp") => Subsystem::Osd,
            () if begins("rocksdb") => Subsystem::Rocksdb,
            () => Subsystem::Other,
        }
    }
}

impl Sample {
    /// Converts the result of a run of `outboard bench`.
    ///
    /// # Errors
    /// If a process of the node did not report its CPU time.
    pub fn of_bench(round: u32, case: Case, result: &BenchResult) -> Result<Sample> {
        let unknown = "a process of the node did not report its CPU time, or was restarted during the run";
        let host_cpu_us_per_op = result.host_cpu_us_per_op.ok_or(unknown)?;
        let node_cpu_us_per_op = result.node_cpu_us_per_op.ok_or(unknown)?;
        let per_op = |seconds: f64| seconds * 1e6 / result.ops.max(1) as f64;
        let is_write = matches!(case.mode, AccessMode::Write | AccessMode::Randwrite);
        let client = result.processes.iter().filter(|p| p.role == "client").map(|p| p.cpu_seconds).sum();
        Ok(Sample {
            round,
            case,
            ops: result.ops,
            mb_per_s: result.mb_per_s,
            iops: result.iops,
            latency_us_mean: result.latency_us.mean,
            latency_us_p99: Some(result.latency_us.p99),
            host_cpu_us_per_op,
            node_cpu_us_per_op,
            client_cpu_us_per_op: per_op(client),
            user_us_per_op: per_op(servers(result).map(|p| p.user_seconds).sum()),
            system_us_per_op: per_op(servers(result).map(|p| p.system_seconds).sum()),
            wake_ups_per_op: servers(result).map(|p| p.wake_ups).sum::<f64>() / result.ops.max(1) as f64,
            parts: parts_of_bench(result),
            breakdown_us: result
                .breakdown_us
                .filter(|b| is_write && b.host_write + b.dma > 0.0)
                .map(|b| of_client(b, result.latency_us.mean)),
        })
    }

    /// Returns the CPU use of the storage host during this run, in % of a core.
    #[must_use]
    pub fn host_cpu_percent(&self) -> f64 {
        self.host_cpu_us_per_op * self.iops / 1e4
    }
}

/// Converts the osd's breakdown to a breakdown of the client's latency. Time outside of the osd
/// counts as *others*.
fn of_client(osd: BenchBreakdown, latency_us: f64) -> BenchBreakdown {
    BenchBreakdown { total: latency_us, others: osd.others + (latency_us - osd.total).max(0.0), ..osd }
}

fn servers(result: &BenchResult) -> impl Iterator<Item = &ProcessUse> {
    result.processes.iter().filter(|p| p.role != "client")
}

fn parts_of_bench(result: &BenchResult) -> BTreeMap<Subsystem, PartUse> {
    let classes =
        || servers(result).flat_map(|p| p.by_class.iter().map(|(class, used)| (&p.role, class, used)));
    let split = classes().any(|(_, class, _)| class == "msgr");
    let parts = classes().map(|(role, class, used)| (Subsystem::of_class(role, class, split), *used));
    sum_parts(parts, result.ops)
}

/// Sums the resource use by part, per operation.
pub fn sum_parts(
    used: impl Iterator<Item = (Subsystem, ClassUsage)>,
    ops: u64,
) -> BTreeMap<Subsystem, PartUse> {
    let ops = ops.max(1) as f64;
    let mut parts: BTreeMap<Subsystem, PartUse> = BTreeMap::new();
    for (part, class) in used {
        let sum = parts.entry(part).or_default();
        sum.cpu_us += class.cpu_seconds * 1e6 / ops;
        sum.switches += class.context_switches / ops;
        sum.polls += class.polls / ops;
        sum.wake_ups += class.wake_ups / ops;
    }
    parts
}

/// A ceiling of the machine, measured in every round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CeilingKind {
    /// O_DIRECT writes of a size, the better of depth 1 and 16.
    DriveWrite,
    /// O_DIRECT reads of a size, the better of depth 1 and 16.
    DriveRead,
    /// O_DIRECT random reads of 4 KiB at depth 16.
    DriveRandread,
    /// One TCP connection over loopback.
    Loopback,
    /// Bytes that the receiver of this connection gets per second of its CPU time.
    LoopbackReceiver,
    /// Copying memory with one thread.
    Memcpy,
}

/// One measurement of a ceiling.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Ceiling {
    /// Number of the round.
    pub round: u32,
    /// The kind of ceiling.
    pub kind: CeilingKind,
    /// Bytes per operation. It is 0 for a ceiling without operations, such as loopback TCP.
    pub size: u64,
    /// Throughput in 10^6 bytes per second.
    pub mb_per_s: f64,
}

/// CPU use of an idle process.
#[derive(Debug, Clone, Serialize)]
pub struct Idle {
    /// Number of the round.
    pub round: u32,
    /// The system.
    pub config: TestedSystem,
    /// The process: its role or its daemon's name.
    pub process: String,
    /// CPU in % of a core.
    pub cpu_percent: f64,
}

/// All measured values.
#[derive(Debug, Default, Serialize)]
pub struct Measurements {
    /// The results of runs.
    pub samples: Vec<Sample>,
    /// The measured ceilings.
    pub ceilings: Vec<Ceiling>,
    /// The CPU use of idle processes.
    pub idle: Vec<Idle>,
    /// CPU time of a start of `rados`, in s, which is subtracted from the client's CPU time in
    /// every run of Ceph. `None` if Ceph is not measured.
    pub rados_start_cpu_seconds: Option<f64>,
    /// Failed measurements and their reasons.
    pub problems: Vec<String>,
}

impl Measurements {
    /// Returns the value of `figure` in each round of a case. Omits rounds for which `figure`
    /// returns `None`.
    pub fn rounds_if(&self, case: &Case, figure: impl Fn(&Sample) -> Option<f64>) -> Rounds {
        let of_case = self.samples.iter().filter(|s| s.case == *case);
        of_case.filter_map(|s| Some((s.round, figure(s)?))).collect()
    }

    /// Returns the value of `figure` in each round of a case.
    pub fn rounds(&self, case: &Case, figure: impl Fn(&Sample) -> f64) -> Rounds {
        self.rounds_if(case, |s| Some(figure(s)))
    }

    /// Returns the value of a ceiling in each round, in 10^6 bytes per second.
    #[must_use]
    pub fn ceiling(&self, kind: CeilingKind, size: u64) -> Rounds {
        let of_kind = self.ceilings.iter().filter(|c| c.kind == kind && c.size == size);
        of_kind.map(|c| (c.round, c.mb_per_s)).collect()
    }

    /// Returns the CPU use of an idle system in each round, in % of a core, summed over the
    /// system's processes that `which` accepts.
    pub fn idle(&self, config: TestedSystem, which: impl Fn(&str) -> bool) -> Rounds {
        let mut rounds = Rounds::new();
        for idle in self.idle.iter().filter(|i| i.config == config && which(&i.process)) {
            *rounds.entry(idle.round).or_default() += idle.cpu_percent;
        }
        rounds
    }

    /// Returns every measured case, in order.
    #[must_use]
    pub fn cases(&self) -> Vec<&Case> {
        let cases: BTreeSet<&Case> = self.samples.iter().map(|s| &s.case).collect();
        cases.into_iter().collect()
    }

    /// Returns the medians of every case.
    #[must_use]
    pub fn medians(&self) -> Vec<Medians> {
        let of = |case: &Case, figure: fn(&Sample) -> f64| estimate(self.rounds(case, figure).into_values());
        let medians = |case: &Case| Medians {
            case: case.clone(),
            mb_per_s: of(case, |s| s.mb_per_s),
            iops: of(case, |s| s.iops),
            latency_us_mean: of(case, |s| s.latency_us_mean),
            host_cpu_us_per_op: of(case, |s| s.host_cpu_us_per_op),
            node_cpu_us_per_op: of(case, |s| s.node_cpu_us_per_op),
            client_cpu_us_per_op: of(case, |s| s.client_cpu_us_per_op),
        };
        self.cases().into_iter().map(medians).collect()
    }

    /// Whether any run of the system was measured.
    #[must_use]
    pub fn has(&self, config: TestedSystem) -> bool {
        self.samples.iter().any(|s| s.case.config == config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ceph_threads_belong_to_the_subsystems_of_the_paper() {
        assert_eq!(Subsystem::of_ceph_thread("msgr-worker-2"), Subsystem::Messenger);
        assert_eq!(Subsystem::of_ceph_thread("bstore_kv_sync"), Subsystem::ObjectStore);
        assert_eq!(Subsystem::of_ceph_thread("tp_osd_tp"), Subsystem::Osd);
        assert_eq!(Subsystem::of_ceph_thread("rocksdb:low0"), Subsystem::Rocksdb);
        assert_eq!(Subsystem::of_ceph_thread("safe_timer"), Subsystem::Other);
    }

    #[test]
    fn a_run_with_unknown_cpu_time_has_a_result_but_gives_no_sample() {
        let result: BenchResult = serde_json::from_str(
            r#"{"ops":1,"errors":0,"mb_per_s":1,"iops":1,"latency_us":{"mean":1,"p50":1,"p99":1},
            "host_cpu_us_per_op":null,"node_cpu_us_per_op":null}"#,
        )
        .unwrap();
        assert_eq!((result.host_cpu_us_per_op, result.node_cpu_us_per_op), (None, None));
        let case = Case::new(TestedSystem::DpuMemcpy, AccessMode::Write, 4096);
        assert!(Sample::of_bench(1, case, &result).is_err());
    }

    #[test]
    fn an_osd_thread_counts_as_osd_and_messenger_unless_its_time_is_divided() {
        let bench = |classes: &str| -> BenchResult {
            serde_json::from_str(&format!(
                r#"{{"ops":1000,"errors":0,"mb_per_s":1,"iops":1,"latency_us":{{"mean":1,"p50":1,"p99":1}},
                "host_cpu_us_per_op":0,"node_cpu_us_per_op":0,"processes":[
                {{"role":"client","cpu_seconds":9,"by_class":{{"main":{{"cpu_seconds":9,"context_switches":9}}}}}},
                {{"role":"osd","cpu_seconds":1,"by_class":{{{classes}}}}}]}}"#
            ))
            .unwrap()
        };
        let use_of =
            |name: &str, s: f64| format!(r#""{name}":{{"cpu_seconds":{s},"context_switches":2000}}"#);
        let whole = parts_of_bench(&bench(&use_of("osd", 1.0)));
        assert_eq!(whole.keys().copied().collect::<Vec<_>>(), [Subsystem::OsdAndMessenger]);
        assert_eq!(whole[&Subsystem::OsdAndMessenger].cpu_us, 1000.0);
        assert_eq!(whole[&Subsystem::OsdAndMessenger].switches, 2.0);
        let split = parts_of_bench(&bench(
            &[use_of("osd", 0.4), r#""msgr":{"cpu_seconds":0.6,"estimated":true}"#.to_owned()].join(","),
        ));
        assert_eq!(split.keys().copied().collect::<Vec<_>>(), [Subsystem::Messenger, Subsystem::Osd]);
    }
}
