//! Describes the machine and the software of a run.

use std::path::Path;
use std::process::Command;

use serde::Serialize;

/// The machine, and the versions of the programs that the report uses.
#[derive(Debug, Clone, Serialize)]
pub struct Environment {
    /// Start of the run, UTC.
    pub date: String,
    /// Model of the processor.
    pub cpu: String,
    /// Number of CPUs that this process may use.
    pub cpus: usize,
    /// Size of the memory.
    pub memory: String,
    /// Kernel release.
    pub kernel: String,
    /// Default TCP congestion control of the system.
    pub tcp_congestion_control: String,
    /// Operating system.
    pub system: String,
    /// File system and device of the targets.
    pub drive: String,
    /// Commit of the sources.
    pub commit: String,
    /// `outboard --version`.
    pub outboard: String,
    /// `fio --version`.
    pub fio: String,
    /// `ceph --version`.
    pub ceph: String,
    /// `rustc --version`.
    pub rustc: String,
}

impl Environment {
    /// Describes this machine. `work` is the directory of the targets.
    #[must_use]
    pub fn here(work: &Path) -> Environment {
        let file = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, key: &str, separator: char| {
            let line = text.lines().find(|l| l.starts_with(key))?;
            Some(line.split_once(separator)?.1.trim().trim_matches('"').to_owned())
        };
        let unknown = || "unknown".to_owned();
        let outboard = std::env::current_exe().map(|p| p.with_file_name("outboard").display().to_string());
        let work = work.display().to_string();
        Environment {
            date: said("date", &["-u", "+%Y-%m-%d %H:%M UTC"]),
            cpu: field(&file("/proc/cpuinfo"), "model name", ':').unwrap_or_else(unknown),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            memory: field(&file("/proc/meminfo"), "MemTotal", ':').unwrap_or_else(unknown),
            kernel: file("/proc/sys/kernel/osrelease").trim().to_owned(),
            tcp_congestion_control: file("/proc/sys/net/ipv4/tcp_congestion_control").trim().to_owned(),
            system: field(&file("/etc/os-release"), "PRETTY_NAME", '=').unwrap_or_else(unknown),
            drive: said("findmnt", &["-n", "-o", "SOURCE,FSTYPE", "-T", &work]),
            commit: commit(),
            outboard: said(&outboard.unwrap_or_default(), &["--version"]),
            fio: said("fio", &["--version"]),
            ceph: said("ceph", &["--version"]),
            rustc: said("rustc", &["--version"]),
        }
    }
}

fn commit() -> String {
    let commit = said("git", &["rev-parse", "--short=12", "HEAD"]);
    let changed = said("git", &["status", "--porcelain", "--untracked-files=no"]);
    if changed.is_empty() || commit == ABSENT {
        commit
    } else {
        format!("{commit}, with uncommitted changes")
    }
}

/// The description of a program that cannot be run.
const ABSENT: &str = "not available";

/// Returns the first line of a program's output, or [`ABSENT`] if the program fails.
fn said(program: &str, args: &[&str]) -> String {
    let Ok(output) = Command::new(program).args(args).stderr(std::process::Stdio::null()).output() else {
        return ABSENT.to_owned();
    };
    if !output.status.success() {
        return ABSENT.to_owned();
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let words: Vec<&str> = text.lines().next().unwrap_or_default().split_ascii_whitespace().collect();
    words.join(" ")
}
