//! The settings of the measurement, read from the environment.

use std::path::PathBuf;

use crate::Result;
use crate::report::say;

/// The extent of the measurements, what they measure, and the directories that they use.
#[derive(Debug, Clone)]
pub struct RedundancySettings {
    /// `QUICK=1`: uses little data and one round, as a test of the program.
    pub quick: bool,
    /// `OUTBOARD_BENCH_ROUNDS`: number of rounds, each of which repeats all runs.
    pub rounds: u32,
    /// `OUTBOARD_BENCH_SECONDS`: duration of each run, in seconds.
    pub seconds: u32,
    /// The directory for targets, inside `OUTBOARD_BENCH_DIR`. Its drive is the measured drive.
    pub work: PathBuf,
    /// `OUTBOARD_REDUNDANCY_OFFLOAD`: the part of the DPU that computes parity, `dpu` (its cores)
    /// or `accelerator`.
    pub offload: String,
    /// The only experiment of the part to run. `None` runs all experiments.
    pub only: Option<String>,
    /// The directory for results and drawings: `redundancy` in `OUTBOARD_REPORT_DIR`.
    pub out: PathBuf,
}

impl RedundancySettings {
    /// Reads the settings from the environment.
    #[must_use]
    pub fn from_env() -> RedundancySettings {
        let number = |name: &str, default: u32| {
            std::env::var(name).ok().and_then(|v| v.parse().ok()).filter(|v| *v > 0).unwrap_or(default)
        };
        let path = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let quick = std::env::var("QUICK").is_ok_and(|v| !v.is_empty() && v != "0");
        let work = path("OUTBOARD_BENCH_DIR").unwrap_or_else(std::env::temp_dir);
        let out = path("OUTBOARD_REPORT_DIR").unwrap_or_else(|| PathBuf::from("report"));
        RedundancySettings {
            quick,
            rounds: number("OUTBOARD_BENCH_ROUNDS", if quick { 1 } else { 5 }),
            seconds: number("OUTBOARD_BENCH_SECONDS", 3),
            work: work.join(format!("outboard-redundancy-{}", std::process::id())),
            offload: std::env::var("OUTBOARD_REDUNDANCY_OFFLOAD").unwrap_or_else(|_| "dpu".to_owned()),
            only: None,
            out: out.join("redundancy"),
        }
    }

    /// Writes a file to the directory for results, and prints its path.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, name: &str, text: &str) -> Result<()> {
        std::fs::create_dir_all(&self.out)?;
        let path = self.out.join(name);
        std::fs::write(&path, text)?;
        say(format!("  wrote {}", path.display()));
        Ok(())
    }

    /// Size of each target, in the syntax of the command line.
    #[must_use]
    pub fn target_size(&self) -> &'static str {
        if self.quick { "768MiB" } else { "1536MiB" }
    }

    /// Total size of the objects of one size in one pool, in bytes.
    #[must_use]
    pub fn set_bytes(&self) -> u64 {
        if self.quick { 128 << 20 } else { 512 << 20 }
    }

    /// Number of 4 MiB objects that a node stores for the measurement of rebuilds.
    #[must_use]
    pub fn rebuild_objects(&self) -> u64 {
        if self.quick { 256 } else { 768 }
    }

    /// Size of the file that fio reads and writes, in MiB.
    #[must_use]
    pub fn fio_mib(&self) -> u32 {
        if self.quick { 768 } else { 2048 }
    }
}
