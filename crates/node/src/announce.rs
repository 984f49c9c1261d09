//! Announcements of a role to its supervisor: lines of JSON on the role's standard output. One of
//! the lines says that the role is ready, or why it cannot become ready.

use std::io::Write;
use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::state::MountedTarget;

/// Maximum length of an announcement, in bytes.
pub const MAX_ANNOUNCEMENT: u64 = 64 << 10;

/// One announcement, which is one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Announcement {
    /// The role is ready.
    Ready(Ready),
    /// The role cannot become ready. The text says what failed, why, and what to do. The process
    /// then ends.
    Failed(String),
    /// The event loop with this name is alive. Only a role that is ready sends heartbeats.
    Heartbeat(String),
    /// The role hangs for this reason, although its event loops are alive.
    Hung(String),
    /// The role is not ready yet, but makes progress.
    Progress,
    /// A signal has asked the role to stop. Its event loops send no more heartbeats.
    Stopping,
}

/// Properties of a role that is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Address of the role's metrics, as `host:port`.
    pub metrics: Option<String>,
    /// Address for clients, if the role serves clients.
    pub endpoint: Option<String>,
    /// Address of the control plane, if the role serves clients.
    #[serde(default)]
    pub control: Option<String>,
    /// UUID of the node, if the role serves clients.
    #[serde(default)]
    pub node: Option<Uuid>,
    /// UUIDs of the node's targets in the order of their numbers, if the role serves clients.
    #[serde(default)]
    pub numbered: Vec<Uuid>,
    /// Name of the engine that moves data between osd and store, if the role uses an engine.
    pub engine: Option<String>,
    /// Whether the engine between osd and store is emulated.
    #[serde(default)]
    pub emulated: bool,
    /// The targets that the role has mounted.
    #[serde(default)]
    pub targets: Vec<MountedTarget>,
    /// The event loops that send heartbeats from now on.
    #[serde(default)]
    pub loops: Vec<String>,
}

impl Announcement {
    /// Writes the announcement as one line. Ignores an error, because the supervisor may have
    /// ended.
    pub fn send(&self) {
        let line = serde_json::to_string(self).expect("plain data has a JSON form");
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }

    /// Writes the announcement as one line with one system call, or drops it if the write would
    /// block. The caller must have called [`do_not_block`] before.
    pub fn send_or_drop(&self) {
        let line = serde_json::to_string(self).expect("plain data has a JSON form") + "\n";
        // Ignore the error: a supervisor that does not read does not need the announcement.
        let _ = rustix::io::write(std::io::stdout(), line.as_bytes());
    }
}

/// Makes standard output, a pipe to the supervisor, non-blocking. A supervisor that does not read
/// then cannot block the role.
///
/// # Errors
/// If the operating system reports an error.
pub fn do_not_block() -> std::io::Result<()> {
    let out = std::io::stdout();
    let flags = rustix::fs::fcntl_getfl(out.as_fd())?;
    Ok(rustix::fs::fcntl_setfl(out.as_fd(), flags | rustix::fs::OFlags::NONBLOCK)?)
}
