//! What a role tells its supervisor: lines of JSON on its standard output. The first line says that the role is ready, or
//! why it is not.

use std::io::Write;
use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};

use super::state::MountedTarget;

/// Longest announcement that is read, in bytes.
pub const MAX_ANNOUNCEMENT: u64 = 64 << 10;

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Announcement {
    /// The role does its work.
    Ready(Ready),
    /// It cannot; the text says what, why and what to do. The process ends.
    Failed(String),
    /// The event loop with that name goes round. Only a role that is ready says so, from time to time.
    Heartbeat(String),
    /// The role has found that it hangs, for this reason, although its event loops go round.
    Hung(String),
    /// The role is not ready yet, and gets on.
    Progress,
    /// A signal has asked the role to stop. Its event loops give no more heartbeats.
    Stopping,
}

/// What others need to know of a role that is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Where its metrics are, as `host:port`.
    pub metrics: Option<String>,
    /// Where clients connect to, if it serves any.
    pub endpoint: Option<String>,
    /// Name of the engine that moves data between osd and store, if it has one.
    pub engine: Option<String>,
    /// Whether that engine is emulated.
    #[serde(default)]
    pub emulated: bool,
    /// The targets that it has mounted.
    #[serde(default)]
    pub targets: Vec<MountedTarget>,
    /// The event loops that send heartbeats from now on.
    #[serde(default)]
    pub loops: Vec<String>,
}

impl Announcement {
    /// Writes the line. Whoever started the role may have gone: then nobody needs it.
    pub fn send(&self) {
        let line = serde_json::to_string(self).expect("plain data has a JSON form");
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }

    /// Writes the line in one call, or drops it where that would block ([`do_not_block`] was called).
    pub fn send_or_drop(&self) {
        let line = serde_json::to_string(self).expect("plain data has a JSON form") + "\n";
        // A supervisor that does not read does not need it now.
        let _ = rustix::io::write(std::io::stdout(), line.as_bytes());
    }
}

/// Makes standard output, a pipe to the supervisor, refuse what does not fit: a supervisor that has stopped reading must not
/// stop the role.
///
/// # Errors
/// The system's.
pub fn do_not_block() -> std::io::Result<()> {
    let out = std::io::stdout();
    let flags = rustix::fs::fcntl_getfl(out.as_fd())?;
    Ok(rustix::fs::fcntl_setfl(out.as_fd(), flags | rustix::fs::OFlags::NONBLOCK)?)
}
