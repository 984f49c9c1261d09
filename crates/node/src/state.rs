//! The supervisor's record of the state of a node's processes: `run/state.json`.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use wire::Placement;
pub use wire::Role;

use super::dir::{DirError, NodeDir};
use super::durable::replace_file;

/// The state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessState {
    /// The process runs, but is not ready yet.
    Starting,
    /// The process is ready.
    Running,
    /// The process hangs, and is being killed.
    Hung,
    /// The process has died. The supervisor restarts it after a pause.
    Waiting,
    /// The process has ended. The supervisor does not restart it.
    Stopped,
}

impl ProcessState {
    /// Returns the state's name in output and files.
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

/// A target, as announced by the process that mounted it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedTarget {
    /// Path of the target's file or device.
    pub path: PathBuf,
    /// UUID of the target.
    pub uuid: Uuid,
}

/// One process of the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Role of the process.
    pub role: Role,
    /// Process id of the role's current or last process; 0 before the first start.
    pub pid: u32,
    /// State of the process. Older versions of Outboard call the field `phase`.
    #[serde(alias = "phase")]
    pub state: ProcessState,
    /// Start time in clock ticks since the machine's boot. Together with the pid it identifies the
    /// process.
    pub start_ticks: Option<u64>,
    /// Start time, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// How often the role was restarted after its process died.
    pub restarts: u64,
    /// How often a process of the role was killed because it hung.
    #[serde(default)]
    pub hangs: u64,
    /// How the role's previous process ended; `None` if none has ended yet.
    pub last_exit: Option<String>,
    /// Address of the process's metrics, as `host:port`.
    pub metrics: Option<String>,
}

/// The supervisor's record of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeState {
    /// Whether the osd runs on the DPU or on the host.
    pub placement: Placement,
    /// Address for clients; `None` until the osd is ready for the first time.
    pub endpoint: Option<String>,
    /// Address of the control plane; `None` until the osd is ready for the first time.
    #[serde(default)]
    pub control: Option<String>,
    /// Name of the engine that moves data between osd and store.
    pub engine: Option<String>,
    /// Whether the engine between osd and store is emulated.
    pub emulated: bool,
    /// The targets that the roles have mounted.
    pub targets: Vec<MountedTarget>,
    /// The processes, the supervisor first.
    pub processes: Vec<Process>,
}

impl NodeState {
    /// Reads the state of the node in `dir`; `None` if the state is missing or invalid.
    pub fn load(dir: &NodeDir) -> Option<NodeState> {
        serde_json::from_slice(&std::fs::read(dir.state()).ok()?).ok()
    }

    /// Replaces the state file atomically.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn save(&self, dir: &NodeDir) -> Result<(), DirError> {
        let text = serde_json::to_string_pretty(self).expect("plain data has a JSON form");
        replace_file(&dir.state(), &text)
    }

    /// Returns the process of `role`.
    #[cfg(test)]
    pub fn process(&self, role: Role) -> Option<&Process> {
        self.processes.iter().find(|p| p.role == role)
    }
}

impl Process {
    /// Creates the record of a process that has not been started.
    pub fn new(role: Role) -> Process {
        Process {
            role,
            pid: 0,
            state: ProcessState::Starting,
            start_ticks: None,
            started_unix_ms: unix_ms(),
            restarts: 0,
            hangs: 0,
            last_exit: None,
            metrics: None,
        }
    }

    /// Records that a new process of the role was started.
    pub fn set_pid(&mut self, pid: u32) {
        self.pid = pid;
        self.start_ticks = start_ticks(pid);
        self.started_unix_ms = unix_ms();
    }

    /// Returns whether the process is alive. A different process that has reused the pid does not
    /// count.
    pub fn is_alive(&self) -> bool {
        self.start_ticks.is_some() && start_ticks(self.pid) == self.start_ticks
    }

    /// Returns the time since the start of the process.
    pub fn uptime(&self) -> Duration {
        Duration::from_millis(unix_ms().saturating_sub(self.started_unix_ms))
    }
}

/// Returns the current time, in milliseconds since 1970.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Returns the start time of process `pid`, in clock ticks since the machine's boot
/// (proc_pid_stat(5), field 22); `None` if the process does not exist or is a zombie.
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
    fn a_process_is_not_alive_after_its_end_or_if_its_pid_was_reused() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut process = Process::new(Role::Store);
        assert!(!process.is_alive());
        process.set_pid(child.id());
        assert!(process.is_alive());
        let earlier = Process { start_ticks: process.start_ticks.map(|t| t - 1), ..process.clone() };
        assert!(!earlier.is_alive(), "a process that was started later has reused the pid");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    #[test]
    fn a_saved_node_state_can_be_loaded_and_an_invalid_state_file_is_ignored() {
        let root = tempfile::tempdir().unwrap();
        let dir = NodeDir::create(root.path()).unwrap();
        assert_eq!(NodeState::load(&dir), None);
        let state = NodeState {
            placement: Placement::Dpu,
            endpoint: Some("127.0.0.1:1".into()),
            control: Some("127.0.0.1:2".into()),
            engine: Some("shm".into()),
            emulated: true,
            targets: vec![MountedTarget { path: "targets/0.img".into(), uuid: Uuid::from_u128(1) }],
            processes: vec![Process::new(Role::Supervisor)],
        };
        state.save(&dir).unwrap();
        assert_eq!(NodeState::load(&dir), Some(state));
        std::fs::write(dir.state(), "{").unwrap();
        assert_eq!(NodeState::load(&dir), None);
    }

    #[test]
    fn a_state_file_of_an_older_version_can_be_loaded() {
        let process = Process { state: ProcessState::Waiting, ..Process::new(Role::Osd) };
        let text = serde_json::to_string(&process).unwrap();
        let older = text.replace(r#""state":"waiting""#, r#""phase":"waiting""#);
        assert_ne!(older, text);
        assert_eq!(serde_json::from_str::<Process>(&older).unwrap(), process);
    }
}
