//! The settings of a report, read from the environment.

use std::path::PathBuf;

use super::plan::{LINKED, Subjects};
use super::workload::{Case, MIB, PAPER_SIZES, TestedSystem};

/// Size of the target of a node in a network namespace of its own, in GiB.
pub const LINKED_GIB: u64 = 2;

/// The extent of the measurements, and the directories that they use.
#[derive(Debug, Clone)]
pub struct EvaluationSettings {
    /// `QUICK=1`: measures only two sizes in one round.
    pub quick: bool,
    /// `ROUNDS`: number of rounds.
    pub rounds: u32,
    /// `SECONDS`: duration of each run, except of secondary runs (`seconds_of`).
    pub seconds: u32,
    /// Whether to measure Ceph. `CEPH=0` turns it off.
    pub ceph: bool,
    /// `OUTBOARD_REPORT_WORK`: directory for targets and backing files. Its drive is the measured
    /// drive.
    pub work: PathBuf,
    /// `OUTBOARD_REPORT_DIR`: directory for the report.
    pub out: PathBuf,
}

impl EvaluationSettings {
    /// Reads the settings from the environment.
    #[must_use]
    pub fn from_env() -> EvaluationSettings {
        let text = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let number = |name: &str, default: u32| {
            text(name).and_then(|v| v.parse().ok()).filter(|v| *v > 0).unwrap_or(default)
        };
        let quick = text("QUICK").is_some_and(|v| v != "0");
        let out = text("OUTBOARD_REPORT_DIR").map_or_else(|| PathBuf::from("report"), PathBuf::from);
        let work = text("OUTBOARD_REPORT_WORK").map_or_else(|| out.clone(), PathBuf::from);
        EvaluationSettings {
            quick,
            rounds: number("ROUNDS", if quick { 1 } else { 7 }),
            seconds: number("SECONDS", if quick { 5 } else { 3 }),
            ceph: text("CEPH").is_none_or(|v| v != "0"),
            work: work.join(format!("work-{}", std::process::id())),
            out,
        }
    }

    /// Object sizes to measure, in bytes.
    #[must_use]
    pub fn sizes(&self) -> Vec<u64> {
        if self.quick {
            return vec![4096, 4 * MIB];
        }
        [4096, 65_536].into_iter().chain(PAPER_SIZES).collect()
    }

    /// Duration of a run of `case` in seconds: at most 2 if no threshold depends on the run.
    #[must_use]
    pub fn seconds_of(&self, case: &Case) -> u32 {
        if case.is_secondary() { self.secondary_seconds() } else { self.seconds }
    }

    /// Duration of a run on which no threshold depends, in seconds.
    #[must_use]
    pub fn secondary_seconds(&self) -> u32 {
        self.seconds.min(2)
    }

    /// Duration of each run of fio, in seconds. It is at most 2, because the throughput of fio
    /// becomes stable sooner than the throughput of a node.
    #[must_use]
    pub fn fio_seconds(&self) -> u32 {
        self.seconds.min(2)
    }

    /// Number of 4 KiB objects in the large set (1 GiB). `None` in a quick run, which omits the
    /// set. The caches of a node have 128 MiB in total. Ceph's caches are reduced to the same size
    /// while the set is read.
    #[must_use]
    pub fn large_set(&self) -> Option<u64> {
        (!self.quick).then_some(262_144)
    }

    /// Size of a node's target in GiB. The target stores the usual sets of all object sizes, and
    /// the large set if the run has one and the system is measured with it.
    #[must_use]
    pub fn target_gib(&self, config: TestedSystem) -> u64 {
        let has_large_set = [TestedSystem::Host, TestedSystem::DpuMemcpy].contains(&config);
        if has_large_set && !self.quick { 5 } else { 3 }
    }

    /// Size of the targets of all nodes in GiB.
    #[must_use]
    pub fn all_targets_gib(&self) -> u64 {
        let Subjects { configs, engines, .. } = Subjects::all();
        let engines = if self.quick { engines[..1].to_vec() } else { engines };
        let nodes = configs.into_iter().chain(engines).filter(|config| *config != TestedSystem::Ceph);
        let linked = if self.quick { 0 } else { LINKED.len() as u64 * LINKED_GIB };
        nodes.map(|config| self.target_gib(config)).sum::<u64>() + linked
    }

    /// Preferred and minimum size of the osd's file, in GiB.
    #[must_use]
    pub fn ceph_gib(&self) -> (u64, u64) {
        if self.quick { (7, 6) } else { (7, 5) }
    }
}
