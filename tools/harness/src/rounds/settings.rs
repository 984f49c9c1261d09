//! The extent of measurements in rounds, read from the environment.

use std::path::PathBuf;

use crate::Result;
use crate::report::say;

/// The extent of the measurements, and the directories that they use.
#[derive(Debug, Clone)]
pub struct RoundSettings {
    /// `QUICK=1`: uses little data and one round, as a test of the program.
    pub quick: bool,
    /// `OUTBOARD_BENCH_ROUNDS`: number of rounds, each of which repeats all runs.
    pub rounds: u32,
    /// `OUTBOARD_BENCH_SECONDS`: duration of each run, in seconds.
    pub seconds: u32,
    /// The directory for targets, inside `OUTBOARD_BENCH_DIR`. Its drive is the measured drive.
    pub work: PathBuf,
    /// The directory for results and drawings, in `OUTBOARD_REPORT_DIR`.
    pub out: PathBuf,
}

impl RoundSettings {
    /// Reads the settings of the program `outboard-NAME` from the environment. By default, a run takes
    /// `seconds`.
    #[must_use]
    pub fn from_env(name: &str, seconds: u32) -> RoundSettings {
        let quick = std::env::var("QUICK").is_ok_and(|v| !v.is_empty() && v != "0");
        let work = path("OUTBOARD_BENCH_DIR").unwrap_or_else(std::env::temp_dir);
        let out = path("OUTBOARD_REPORT_DIR").unwrap_or_else(|| PathBuf::from("report"));
        RoundSettings {
            quick,
            rounds: number("OUTBOARD_BENCH_ROUNDS", if quick { 1 } else { 5 }),
            seconds: number("OUTBOARD_BENCH_SECONDS", seconds),
            work: work.join(format!("outboard-{name}-{}", std::process::id())),
            out: out.join(name),
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
}

fn number(name: &str, default: u32) -> u32 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).filter(|v| *v > 0).unwrap_or(default)
}

fn path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}
