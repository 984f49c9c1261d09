//! [`ThrashedNode`]: a node in its own directory, with its processes and the files of its targets.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use identity::{Credentials, Trust};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use crate::plan::RoundConfig;

/// Maximum duration of a command, except `up`.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum duration of `up`. `up` itself gives up earlier.
const UP_TIMEOUT: Duration = Duration::from_secs(240);

/// A node in its own directory. Dropping this value stops the node and kills what does not stop.
#[derive(Debug)]
pub struct ThrashedNode {
    program: PathBuf,
    dir: PathBuf,
    config: RoundConfig,
}

/// The fields of `outboard status --json` that this program uses.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct NodeSummary {
    /// Targets of the node.
    pub targets: Vec<TargetSummary>,
    /// Pools of the node; empty while the osd does not answer.
    pub pools: Vec<PoolSummary>,
    /// Problems of the node.
    pub problems: Vec<String>,
}

/// A target in the output of `outboard status --json`.
#[derive(Debug, Clone, Deserialize)]
pub struct TargetSummary {
    /// Number of the target.
    pub id: Option<usize>,
    /// State of the target.
    pub state: Option<String>,
    /// Why the target cannot be queried.
    pub error: Option<String>,
}

/// A pool in the output of `outboard status --json`.
#[derive(Debug, Clone, Deserialize)]
pub struct PoolSummary {
    /// Number of placement groups with too few targets.
    pub degraded: u32,
    /// Number of placement groups that cannot serve requests.
    pub unavailable: u32,
}

/// A process in the supervisor's record `run/state.json`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ProcessRecord {
    /// `supervisor`, `store`, `osd` or `node`.
    pub role: String,
    /// Process id; 0 before the first start.
    pub pid: i32,
    /// State of the process.
    pub state: String,
}

#[derive(Debug, Deserialize)]
struct SupervisorRecord {
    processes: Vec<ProcessRecord>,
}

/// Result of `outboard scrub --json`.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct ScrubSummary {
    /// Number of damaged fragments.
    pub damaged: u64,
    /// Number of inconsistent objects.
    pub inconsistent: u64,
}

impl NodeSummary {
    /// Returns whether all pools have all their targets.
    pub fn is_whole(&self) -> bool {
        !self.pools.is_empty() && self.pools.iter().all(|pool| pool.degraded + pool.unavailable == 0)
    }

    /// Returns the numbers of the targets that are not in use or not in sync.
    pub fn targets_not_in(&self) -> Vec<usize> {
        let is_in = |target: &&TargetSummary| target.state.as_deref() == Some("in") && target.error.is_none();
        let others = self.targets.iter().filter(|target| !is_in(target));
        others.filter_map(|target| target.id).collect()
    }

    /// Returns the numbers of the targets in a state of `outboard target ls`.
    pub fn targets_in_state(&self, state: &str) -> Vec<usize> {
        let those = self.targets.iter().filter(|target| target.state.as_deref() == Some(state));
        those.filter_map(|target| target.id).collect()
    }
}

impl ThrashedNode {
    /// Prepares a node in `dir`, which the first [`up`](Self::up) creates.
    pub fn new(program: &Path, dir: &Path, config: RoundConfig) -> ThrashedNode {
        ThrashedNode { program: program.to_owned(), dir: dir.to_owned(), config }
    }

    /// Returns the administrator's identity, with which clients connect to the node.
    ///
    /// # Errors
    /// If the node's directory has no valid credentials.
    pub fn trust(&self) -> Result<Trust, String> {
        let credentials = Credentials::load(&self.dir.join("credentials.toml")).map_err(|e| e.to_string())?;
        Ok(credentials.trust())
    }

    /// Returns the file of a target.
    pub fn image(&self, target: usize) -> PathBuf {
        self.dir.join(format!("targets/{target}.img"))
    }

    /// Runs a command, and returns its standard output.
    ///
    /// # Errors
    /// If the command fails or takes longer than a minute. The error contains its standard error.
    pub fn run(&self, args: &[&str]) -> Result<String, String> {
        self.run_within(args, COMMAND_TIMEOUT)
    }

    fn run_within(&self, args: &[&str], timeout: Duration) -> Result<String, String> {
        let name = format!("outboard {}", args.join(" "));
        let parent = self.dir.parent().unwrap_or(&self.dir);
        // Output goes to files, because a detached node keeps the command's output open.
        let (out, err) = (tempfile::tempfile_in(parent), tempfile::tempfile_in(parent));
        let (out, err) = out.and_then(|out| Ok((out, err?))).map_err(|e| format!("{name}: {e}"))?;
        let clone = |file: &File| file.try_clone().map_err(|e| format!("{name}: {e}"));
        let mut child = Command::new(&self.program)
            .args(args)
            .env("OUTBOARD_DIR", &self.dir)
            .env_remove("OUTBOARD_ENDPOINT")
            .current_dir(parent)
            .stdin(Stdio::null())
            .stdout(clone(&out)?)
            .stderr(clone(&err)?)
            .spawn()
            .map_err(|e| format!("{name}: {e}"))?;
        let deadline = Instant::now() + timeout;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                Ok(None) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(format!("{name}: no result after {} s: {}", timeout.as_secs(), text(&err)));
                }
                Err(e) => return Err(format!("{name}: {e}")),
            }
        };
        match status.success() {
            true => Ok(text(&out)),
            false => Err(format!("{name} failed ({status}): {}", text(&err).trim())),
        }
    }

    /// Starts the node, and returns its address for clients.
    ///
    /// # Errors
    /// If the node does not start.
    pub fn up(&self) -> Result<String, String> {
        let RoundConfig { placement, targets, target_size, .. } = &self.config;
        let targets = targets.to_string();
        let (placement, size) = (placement.as_str(), target_size.as_str());
        let args = ["up", "--detach", "--listen", "127.0.0.1:0", "--placement", placement];
        let output = match self.dir.join("outboard.toml").exists() {
            true => self.run_within(&args, UP_TIMEOUT)?,
            false => self.run_within(
                &[&args[..], &["--targets", &targets, "--target-size", size]].concat(),
                UP_TIMEOUT,
            )?,
        };
        output.lines().last().map(str::to_owned).ok_or_else(|| "outboard up printed no address".to_owned())
    }

    /// Stops the node.
    ///
    /// # Errors
    /// If the node does not stop.
    pub fn down(&self) -> Result<(), String> {
        self.run(&["down"]).map(|_| ())
    }

    /// Returns the node's state.
    ///
    /// # Errors
    /// If the state cannot be determined.
    pub fn summary(&self) -> Result<NodeSummary, String> {
        let json = self.run(&["status", "--json"])?;
        serde_json::from_str(&json).map_err(|e| format!("cannot parse the output of outboard status: {e}"))
    }

    /// Scrubs the pool.
    ///
    /// # Errors
    /// If the scrub fails or finds damage that it cannot repair.
    pub fn scrub(&self, pool: &str) -> Result<ScrubSummary, String> {
        let json = self.run(&["scrub", pool, "--json"])?;
        serde_json::from_str(&json).map_err(|e| format!("cannot parse the output of outboard scrub: {e}"))
    }

    /// Returns the supervisor's record of the processes, as far as they are alive.
    pub fn processes(&self) -> Vec<ProcessRecord> {
        let record = fs::read(self.dir.join("run/state.json")).ok();
        let record = record.and_then(|json| serde_json::from_slice::<SupervisorRecord>(&json).ok());
        let all = record.map_or(Vec::new(), |record| record.processes);
        all.into_iter().filter(|process| self.is_ours(process.pid)).collect()
    }

    /// Returns the process of a role, if it is alive.
    pub fn process(&self, role: &str) -> Option<ProcessRecord> {
        self.processes().into_iter().find(|process| process.role == role)
    }

    /// Returns whether the process is alive and belongs to this node, and not to a process that has
    /// received the same id later.
    fn is_ours(&self, pid: i32) -> bool {
        let Ok(arguments) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let dir = self.dir.as_os_str().as_encoded_bytes();
        let names_dir = |bytes: &[u8]| bytes.windows(dir.len()).any(|window| window == dir);
        pid > 0
            && !matches!(state_of(pid), None | Some('Z' | 'X'))
            && (names_dir(&arguments) || names_dir(&environment))
    }

    /// Sends a signal to a process of this node.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn signal(&self, process: &ProcessRecord, signal: Signal) -> Result<(), String> {
        let ended = || format!("the {} ({}) has ended", process.role, process.pid);
        if !self.is_ours(process.pid) {
            return Err(ended());
        }
        let pid = Pid::from_raw(process.pid).ok_or_else(ended)?;
        kill_process(pid, signal).map_err(|_| ended())
    }

    /// Kills a process, and waits until it has ended.
    ///
    /// # Errors
    /// If the process has ended before, or does not end.
    pub fn kill(&self, process: &ProcessRecord) -> Result<(), String> {
        self.signal(process, Signal::KILL)?;
        wait(Duration::from_secs(20), || !self.is_ours(process.pid))
            .then_some(())
            .ok_or_else(|| format!("the {} ({}) survives SIGKILL", process.role, process.pid))
    }

    /// Kills all processes of the node.
    ///
    /// # Errors
    /// If a process does not end.
    pub fn kill_all(&self) -> Result<usize, String> {
        let mut killed = 0;
        // A supervisor may start roles while it is being killed, so look again.
        for _ in 0..10 {
            let processes = self.processes();
            if processes.is_empty() {
                break;
            }
            for process in &processes {
                killed += usize::from(self.signal(process, Signal::KILL).is_ok());
            }
            wait(Duration::from_secs(20), || processes.iter().all(|process| !self.is_ours(process.pid)));
        }
        match self.processes().is_empty() {
            true => Ok(killed),
            false => Err(format!("processes survive SIGKILL: {:?}", self.processes())),
        }
    }
}

impl Drop for ThrashedNode {
    fn drop(&mut self) {
        for process in self.processes() {
            let _ = self.signal(&process, Signal::CONT);
        }
        let _ = self.down();
        let _ = self.kill_all();
    }
}

/// Returns the state of a process, such as `S`, or `T` if it is stopped.
pub fn state_of(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Waits until `is_so` returns true. Returns false if this takes longer than `timeout`.
pub fn wait(timeout: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn text(file: &File) -> String {
    use std::os::unix::fs::FileExt;
    let len = file.metadata().map_or(0, |metadata| metadata.len());
    let mut bytes = vec![0; len as usize];
    let _ = file.read_exact_at(&mut bytes, 0);
    String::from_utf8_lossy(&bytes).into_owned()
}
