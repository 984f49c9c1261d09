//! The settings of a report, read from the environment.

use std::path::PathBuf;

use super::workload::{Case, MIB, PAPER_SIZES};

/// How much is measured, and where.
#[derive(Debug, Clone)]
pub struct EvaluationSettings {
    /// `QUICK=1`: two sizes, one round.
    pub quick: bool,
    /// `ROUNDS`: how often everything is repeated.
    pub rounds: u32,
    /// `SECONDS`: how long each run takes, but for secondary ones (`seconds_of`).
    pub seconds: u32,
    /// `CEPH=0`: no Ceph.
    pub ceph: bool,
    /// `OUTBOARD_REPORT_WORK`: where targets and backing files are made; that drive is what is measured.
    pub work: PathBuf,
    /// `OUTBOARD_REPORT_DIR`: where the report goes.
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

    /// Seconds of a run: two at most where no threshold hangs on it.
    #[must_use]
    pub fn seconds_of(&self, case: &Case) -> u32 {
        if case.is_secondary() { self.secondary_seconds() } else { self.seconds }
    }

    /// Seconds of a run that no threshold hangs on.
    #[must_use]
    pub fn secondary_seconds(&self) -> u32 {
        self.seconds.min(2)
    }

    /// Seconds of each run of fio; a drive's own figure settles sooner than a system's.
    #[must_use]
    pub fn fio_seconds(&self) -> u32 {
        self.seconds.min(2)
    }

    /// Objects of 4 KiB in the large set, which is left out of a quick run: 1 GiB. A node's caches have 128 MiB in all, as have Ceph's
    /// while that set is read.
    #[must_use]
    pub fn large_set(&self) -> Option<u64> {
        (!self.quick).then_some(262_144)
    }

    /// GiB of a node's target: the usual sets of all sizes, and the large set where there is one.
    #[must_use]
    pub fn target_gib(&self) -> u64 {
        if self.quick { 3 } else { 5 }
    }

    /// GiB that the OSD's file should have and must have.
    #[must_use]
    pub fn ceph_gib(&self) -> (u64, u64) {
        if self.quick { (7, 6) } else { (7, 5) }
    }
}
