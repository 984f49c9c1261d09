//! The settings: how much is measured, and in which directory.

use std::path::PathBuf;

use crate::Result;
use crate::report::say;

/// What the environment says.
#[derive(Debug, Clone)]
pub struct RedundancySettings {
    /// `QUICK=1`: little data and one round, to see that it works.
    pub quick: bool,
    /// `OUTBOARD_BENCH_ROUNDS`: how often everything is repeated.
    pub rounds: u32,
    /// `OUTBOARD_BENCH_SECONDS`: how long each run takes.
    pub seconds: u32,
    /// Where targets are made, below `OUTBOARD_BENCH_DIR`: that drive is what is measured.
    pub work: PathBuf,
    /// `OUTBOARD_REDUNDANCY_OFFLOAD`: what of the DPU codes, `dpu` (its cores) or `accelerator`.
    pub offload: String,
    /// The one experiment of the part that is asked for, if not all are.
    pub only: Option<String>,
    /// Where tables and plots go: `redundancy` in `OUTBOARD_REPORT_DIR`.
    pub out: PathBuf,
}

impl RedundancySettings {
    /// Reads the environment.
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

    /// Writes a file to where figures go.
    ///
    /// # Errors
    /// If that fails.
    pub fn save(&self, name: &str, text: &str) -> Result<()> {
        std::fs::create_dir_all(&self.out)?;
        let path = self.out.join(name);
        std::fs::write(&path, text)?;
        say(format!("  {}", path.display()));
        Ok(())
    }

    /// Size of each target, as the command line has it.
    #[must_use]
    pub fn target_size(&self) -> &'static str {
        if self.quick { "768MiB" } else { "1536MiB" }
    }

    /// Bytes of the objects of one size in one pool.
    #[must_use]
    pub fn set_bytes(&self) -> u64 {
        if self.quick { 128 << 20 } else { 512 << 20 }
    }

    /// Objects of 4 MiB that a node is filled with for a rebuild.
    #[must_use]
    pub fn rebuild_objects(&self) -> u64 {
        if self.quick { 256 } else { 768 }
    }

    /// MiB of the file that fio reads and writes.
    #[must_use]
    pub fn fio_mib(&self) -> u32 {
        if self.quick { 768 } else { 2048 }
    }
}
