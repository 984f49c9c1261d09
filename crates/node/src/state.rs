//! What runs on a node, as the supervisor knows it: `run/state.json`.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use wire::Placement;

use super::dir::{DirError, NodeDir, replace_file};

/// A process's part in a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Starts the others and restarts them.
    Supervisor,
    /// Owns the targets.
    Store,
    /// Handles requests, over a channel to a store.
    Osd,
    /// Handles requests and owns the targets: `placement = host`.
    Node,
}

impl Role {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Supervisor => "supervisor",
            Role::Store => "store",
            Role::Osd => "osd",
            Role::Node => "node",
        }
    }
}

/// What a process is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessState {
    /// Runs, and is not ready yet.
    Starting,
    /// Ready.
    Running,
    /// Gives no heartbeat, and is being killed.
    Hung,
    /// Dead, to be restarted after a pause.
    Waiting,
    /// Ended, and is not to be restarted.
    Stopped,
}

impl ProcessState {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            ProcessState::Starting => "starting",
            ProcessState::Running => "running",
            ProcessState::Hung => "hung",
            ProcessState::Waiting => "waiting",
            ProcessState::Stopped => "stopped",
        }
    }
}

/// A target, as the process that mounted it announced it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedTarget {
    /// File or device.
    pub path: PathBuf,
    /// Its identity.
    pub uuid: String,
}

/// One process of the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its part.
    pub role: Role,
    /// Process id, of the last one if it is dead; 0 before the first.
    pub pid: u32,
    /// What it is doing.
    pub phase: ProcessState,
    /// When this process was started, in clock ticks since the machine was: with the pid, what tells it from others.
    pub start_ticks: Option<u64>,
    /// When this process was started, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// How often the role was started again after it had died.
    pub restarts: u64,
    /// How often a process of the role was killed because it hung.
    #[serde(default)]
    pub hangs: u64,
    /// How the last one ended, if one has.
    pub last_exit: Option<String>,
    /// Where its metrics are, as `host:port`.
    pub metrics: Option<String>,
}

/// What the supervisor knows of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeState {
    /// Where requests are handled.
    pub placement: Placement,
    /// Where clients connect to; known once the osd was ready.
    pub endpoint: Option<String>,
    /// Name of the engine that moves data between osd and store.
    pub engine: Option<String>,
    /// Whether that engine is emulated.
    pub emulated: bool,
    /// The targets.
    pub targets: Vec<MountedTarget>,
    /// The processes, the supervisor first.
    pub processes: Vec<Process>,
}

impl NodeState {
    /// Reads the state of the node in `dir`; `None` if there is none that can be understood.
    pub fn load(dir: &NodeDir) -> Option<NodeState> {
        serde_json::from_slice(&std::fs::read(dir.state()).ok()?).ok()
    }

    /// Writes the state, in one step.
    ///
    /// # Errors
    /// The system's.
    pub fn save(&self, dir: &NodeDir) -> Result<(), DirError> {
        let text = serde_json::to_string_pretty(self).expect("plain data has a JSON form");
        replace_file(&dir.state(), &text)
    }

    /// The process of `role`.
    #[cfg(test)]
    pub fn process(&self, role: Role) -> Option<&Process> {
        self.processes.iter().find(|p| p.role == role)
    }
}

impl Process {
    /// A process that has not been started.
    pub fn new(role: Role) -> Process {
        Process {
            role,
            pid: 0,
            phase: ProcessState::Starting,
            start_ticks: None,
            started_unix_ms: unix_ms(),
            restarts: 0,
            hangs: 0,
            last_exit: None,
            metrics: None,
        }
    }

    /// Another process of the role has been started.
    pub fn set_pid(&mut self, pid: u32) {
        self.pid = pid;
        self.start_ticks = start_ticks(pid);
        self.started_unix_ms = unix_ms();
    }

    /// Whether the process lives (and is not another one that has got its pid since).
    pub fn is_alive(&self) -> bool {
        self.start_ticks.is_some() && start_ticks(self.pid) == self.start_ticks
    }

    /// How long the process has been there.
    pub fn uptime(&self) -> Duration {
        Duration::from_millis(unix_ms().saturating_sub(self.started_unix_ms))
    }
}

/// Now, in milliseconds since 1970.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// When process `pid` was started, in clock ticks since the machine was (proc_pid_stat(5), field 22); `None` if it is
/// not there or has ended and only waits to be collected.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    if fields.next()? == "Z" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_the_living_from_the_dead() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut process = Process::new(Role::Store);
        assert!(!process.is_alive());
        process.set_pid(child.id());
        assert!(process.is_alive());
        let earlier = Process { start_ticks: process.start_ticks.map(|t| t - 1), ..process.clone() };
        assert!(!earlier.is_alive(), "the pid went to a process that was started later");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    #[test]
    fn survives_being_written_and_read() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        assert_eq!(NodeState::load(&dir), None);
        let state = NodeState {
            placement: Placement::Dpu,
            endpoint: Some("127.0.0.1:1".into()),
            engine: Some("shm".into()),
            emulated: true,
            targets: vec![MountedTarget { path: "targets/0.img".into(), uuid: "u".into() }],
            processes: vec![Process::new(Role::Supervisor)],
        };
        state.save(&dir).unwrap();
        assert_eq!(NodeState::load(&dir), Some(state));
        std::fs::write(dir.state(), "{").unwrap();
        assert_eq!(NodeState::load(&dir), None);
    }
}
