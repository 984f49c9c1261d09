//! The settings of a report, read from the environment.

use std::path::PathBuf;

use super::workload::{Case, MIB, PAPER_SIZES};

/// The amount and the place of the measurements.
#[derive(Debug, Clone)]
pub struct EvaluationSettings {
    /// `QUICK=1`: two sizes, one round.
    pub quick: bool,
    /// `ROUNDS`: number of rounds.
    pub rounds: u32,
    /// `SECONDS`: duration of each run, except of secondary runs (`seconds_of`).
    pub seconds: u32,
    /// `CEPH=0`: measure no Ceph.
    pub ceph: bool,
    /// `OUTBOARD_REPORT_WORK`: directory for targets and backing files. Its drive is the measured
    /// drive.
    pub work: PathBuf,
    /// `OUTBOARD_REPORT_DIR`: directory for the report.
    pub out: PathBuf,
}

impl EvaluationSettings {
    /// Reads the environment.
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

    /// Object sizes.
    #[must_use]
    pub fn sizes(&self) -> Vec<u64> {
        if self.quick {
            return vec![4096, 4 * MIB];
        }
        [4096, 65_536].into_iter().chain(PAPER_SIZES).collect()
    }

    /// Seconds of a run: at most two if no threshold depends on it.
    #[must_use]
    pub fn seconds_of(&self, case: &Case) -> u32 {
        if case.is_secondary() { self.secondary_seconds() } else { self.seconds }
    }

    /// Seconds of a run on which no threshold depends.
    #[must_use]
    pub fn secondary_seconds(&self) -> u32 {
        self.seconds.min(2)
    }

    /// Seconds of each run of fio. A drive's throughput settles sooner than a system's.
    #[must_use]
    pub fn fio_seconds(&self) -> u32 {
        self.seconds.min(2)
    }

    /// Number of 4 KiB objects in the large set (1 GiB); a quick run omits the set. A node's caches
    /// have 128 MiB in total, and so have Ceph's caches while that set is read.
    #[must_use]
    pub fn large_set(&self) -> Option<u64> {
        (!self.quick).then_some(262_144)
    }

    /// GiB of a node's target. It holds the usual sets of all sizes, and the large set if there is
    /// one.
    #[must_use]
    pub fn target_gib(&self) -> u64 {
        if self.quick { 3 } else { 5 }
    }

    /// Preferred and least size of the OSD's file, in GiB.
    #[must_use]
    pub fn ceph_gib(&self) -> (u64, u64) {
        if self.quick { (7, 6) } else { (7, 5) }
    }
}
