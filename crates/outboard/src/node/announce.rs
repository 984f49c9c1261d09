//! What a role says when it is ready, or why it is not: one line of JSON on its standard output.

use std::io::Write;

use serde::{Deserialize, Serialize};

use super::state::Target;

/// Longest announcement that is read, in bytes.
pub const MAX_ANNOUNCEMENT: u64 = 64 << 10;

/// The line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Announcement {
    /// The role does its work.
    Ready(Ready),
    /// It cannot; the text says what, why and what to do. The process ends.
    Failed(String),
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
    pub targets: Vec<Target>,
}

impl Announcement {
    /// Writes the line. Whoever started the role may have gone: then nobody needs it.
    pub fn send(&self) {
        let line = serde_json::to_string(self).expect("plain data has a JSON form");
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}
