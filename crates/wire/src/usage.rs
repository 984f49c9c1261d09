//! What a node's processes use of their machines.

use base::process::OwnUsage;
use serde::{Deserialize, Serialize};

/// The role of a process in a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Starts and restarts the other roles.
    Supervisor,
    /// Owns the targets.
    Store,
    /// Handles requests, and reaches a store over a channel.
    Osd,
    /// Handles requests and owns the targets: `placement = host`.
    Node,
    /// Keeps the connections of front ends.
    Holder,
    /// Serves front ends on virtual disks.
    Gateway,
}

impl Role {
    /// Returns the role's name in output and files.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Supervisor => "supervisor",
            Role::Store => "store",
            Role::Osd => "osd",
            Role::Node => "node",
            Role::Holder => "holder",
            Role::Gateway => "gateway",
        }
    }
}

/// The use of a process of the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleUsage {
    /// Role of the process.
    pub role: Role,
    /// What the process reports.
    pub usage: OwnUsage,
}
