//! Requests of operators about virtual disks. The control plane passes them to a gateway, which executes
//! them.

use serde::{Deserialize, Serialize};

/// A request about the disks of a pool of the caller's tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRequest {
    /// Name of the pool.
    pub pool: String,
    /// What to do.
    pub command: DiskCommand,
}

/// What to do with disks. A snapshot is named by its disk and its own name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DiskCommand {
    /// Creates a disk that reads as zeros.
    Create {
        /// Name of the disk.
        disk: String,
        /// Size, in bytes.
        size: u64,
        /// Size of a chunk, in bytes; 0 selects the default.
        chunk: u64,
    },
    /// Lists the disks, in the order of their names.
    List,
    /// Describes a disk.
    Stat {
        /// Name of the disk.
        disk: String,
    },
    /// Removes a disk.
    Remove {
        /// Name of the disk.
        disk: String,
        /// Whether to remove its snapshots, too.
        with_snapshots: bool,
    },
    /// Changes the size of a disk.
    Resize {
        /// Name of the disk.
        disk: String,
        /// New size, in bytes.
        size: u64,
        /// Whether the disk may become smaller, and lose data.
        shrinks: bool,
    },
    /// Takes a snapshot.
    Snapshot {
        /// Name of the disk.
        disk: String,
        /// Name of the snapshot.
        snapshot: String,
    },
    /// Removes a snapshot.
    RemoveSnapshot {
        /// Name of the disk.
        disk: String,
        /// Name of the snapshot.
        snapshot: String,
    },
    /// Creates a disk with the content of a snapshot.
    Clone {
        /// Name of the disk.
        disk: String,
        /// Name of the snapshot.
        snapshot: String,
        /// Name of the new disk, in the same pool.
        clone: String,
    },
    /// Makes a clone independent of the disk of which it is a clone.
    Flatten {
        /// Name of the disk.
        disk: String,
    },
    /// Returns the space of a disk.
    Usage {
        /// Name of the disk.
        disk: String,
    },
    /// Attaches a disk to a gateway.
    Attach {
        /// Name of the disk.
        disk: String,
        /// The front end that the gateway begins to serve.
        front_end: FrontEnd,
        /// Name of the gateway; `None` if there is only one.
        gateway: Option<String>,
        /// Whether to take the disk over from another gateway.
        takes_over: bool,
        /// Whether the front end may only read.
        is_read_only: bool,
    },
    /// Detaches a disk from its gateway.
    Detach {
        /// Name of the disk.
        disk: String,
    },
}

impl DiskCommand {
    /// Returns the disk of the command; `None` if it concerns all disks of the pool.
    #[must_use]
    pub fn disk(&self) -> Option<&str> {
        match self {
            DiskCommand::List => None,
            DiskCommand::Create { disk, .. }
            | DiskCommand::Stat { disk }
            | DiskCommand::Remove { disk, .. }
            | DiskCommand::Resize { disk, .. }
            | DiskCommand::Snapshot { disk, .. }
            | DiskCommand::RemoveSnapshot { disk, .. }
            | DiskCommand::Clone { disk, .. }
            | DiskCommand::Flatten { disk }
            | DiskCommand::Usage { disk }
            | DiskCommand::Attach { disk, .. }
            | DiskCommand::Detach { disk } => Some(disk),
        }
    }

    /// Returns whether the command changes a disk or its attachment.
    #[must_use]
    pub fn is_change(&self) -> bool {
        !matches!(self, DiskCommand::List | DiskCommand::Stat { .. } | DiskCommand::Usage { .. })
    }

    /// Returns whether an earlier attempt of the command has taken effect, if `disks` are the disks of its
    /// pool. Returns false for commands whose effect the disks do not show, or that a gateway may execute
    /// twice.
    #[must_use]
    pub fn has_taken_effect(&self, disks: &[DiskInfo]) -> bool {
        let find = |name: &str| disks.iter().find(|disk| disk.name == name);
        let has_snapshot = |disk: &str, snapshot: &str| {
            let is_kept = |kept: &SnapshotInfo| kept.name == snapshot && !kept.is_removing;
            find(disk).is_some_and(|disk| disk.snapshots.iter().any(is_kept))
        };
        match self {
            DiskCommand::Create { disk, size, chunk } => {
                find(disk).is_some_and(|disk| disk.size == *size && (*chunk == 0 || disk.chunk == *chunk))
            }
            DiskCommand::Remove { disk, .. } => find(disk).is_none(),
            DiskCommand::Snapshot { disk, snapshot } => has_snapshot(disk, snapshot),
            DiskCommand::RemoveSnapshot { disk, snapshot } => !has_snapshot(disk, snapshot),
            DiskCommand::Clone { disk, snapshot, clone } => {
                let parent = format!("{disk}@{snapshot}");
                find(clone).is_some_and(|clone| clone.parent.as_ref() == Some(&parent))
            }
            DiskCommand::Detach { disk } => find(disk).is_some_and(|disk| disk.gateway.is_none()),
            DiskCommand::List
            | DiskCommand::Stat { .. }
            | DiskCommand::Usage { .. }
            | DiskCommand::Resize { .. }
            | DiskCommand::Flatten { .. }
            | DiskCommand::Attach { .. } => false,
        }
    }
}

/// How a guest or client reaches an attached disk. Its text form is `vhost-user:PATH` or `nbd:ADDRESS`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FrontEnd {
    /// A vhost-user-blk device at the UNIX socket with this path.
    VhostUser(String),
    /// An NBD export at this address: `HOST:PORT`, or the path of a UNIX socket.
    Nbd(String),
}

impl std::fmt::Display for FrontEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FrontEnd::VhostUser(path) => write!(f, "vhost-user:{path}"),
            FrontEnd::Nbd(address) => write!(f, "nbd:{address}"),
        }
    }
}

impl std::str::FromStr for FrontEnd {
    type Err = String;

    fn from_str(text: &str) -> Result<FrontEnd, String> {
        match text.split_once(':') {
            Some(("vhost-user", path)) if path.starts_with('/') => Ok(FrontEnd::VhostUser(path.to_owned())),
            Some(("vhost-user", path)) => Err(format!("\"{path}\" is not an absolute path of a socket")),
            Some(("nbd", address)) if address.starts_with('/') || address.contains(':') => {
                Ok(FrontEnd::Nbd(address.to_owned()))
            }
            Some(("nbd", address)) => {
                Err(format!("\"{address}\" is neither HOST:PORT nor an absolute path of a socket"))
            }
            _ => Err(format!("\"{text}\" names no front end; write vhost-user:PATH or nbd:ADDRESS")),
        }
    }
}

/// The answer to a request about disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DiskReply {
    /// The request was executed.
    Done,
    /// The disks that the request names.
    Disks(Vec<DiskInfo>),
    /// The space of a disk.
    Usage(DiskSpace),
    /// The disk is attached, and the front end can connect to this address.
    Attached(FrontEnd),
    /// The gateway has executed nothing, because the disk is attached to another gateway, which must execute
    /// the command. The control plane then asks the next gateway, so callers do not see this answer.
    NotHere,
}

/// A disk, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskInfo {
    /// Name.
    pub name: String,
    /// Size, in bytes.
    pub size: u64,
    /// Size of a chunk, in bytes.
    pub chunk: u64,
    /// Time of the creation, in milliseconds since 1970.
    pub created_ms: u64,
    /// Serial number.
    pub serial: String,
    /// Namespace globally unique identifier, as 32 hexadecimal digits.
    pub nguid: String,
    /// The snapshots, oldest first.
    pub snapshots: Vec<SnapshotInfo>,
    /// The snapshot of which the disk is a clone: `DISK@SNAPSHOT`.
    pub parent: Option<String>,
    /// Whether the disk is being flattened.
    pub is_flattening: bool,
    /// The gateway to which the disk is attached.
    pub gateway: Option<String>,
    /// Time of the attachment, in milliseconds since 1970.
    pub attached_ms: Option<u64>,
}

/// A snapshot, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    /// Name.
    pub name: String,
    /// Size of the disk at that time, in bytes.
    pub size: u64,
    /// Time of the snapshot, in milliseconds since 1970.
    pub created_ms: u64,
    /// Whether the snapshot is being removed.
    pub is_removing: bool,
}

/// Space of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DiskSpace {
    /// Size, in bytes.
    pub size: u64,
    /// Drive space of the disk's own chunks, without copies and parity, in bytes.
    pub allocated: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_show_whether_a_command_has_taken_effect() {
        let snapshot = |name: &str, is_removing| SnapshotInfo {
            name: name.into(),
            size: 4096,
            created_ms: 1,
            is_removing,
        };
        let disk = |name: &str| DiskInfo {
            name: name.into(),
            size: 4096,
            chunk: 512,
            created_ms: 1,
            serial: String::new(),
            nguid: String::new(),
            snapshots: vec![snapshot("s", false), snapshot("leaving", true)],
            parent: None,
            is_flattening: false,
            gateway: None,
            attached_ms: None,
        };
        let clone = DiskInfo { parent: Some("d@s".into()), gateway: Some("g".into()), ..disk("c") };
        let disks = [clone, disk("d")];
        let create = |disk: &str, size, chunk| DiskCommand::Create { disk: disk.into(), size, chunk };
        let remove = |disk: &str| DiskCommand::Remove { disk: disk.into(), with_snapshots: true };
        let take = |snapshot: &str| DiskCommand::Snapshot { disk: "d".into(), snapshot: snapshot.into() };
        let drop =
            |snapshot: &str| DiskCommand::RemoveSnapshot { disk: "d".into(), snapshot: snapshot.into() };
        let clone_to = |disk: &str, clone: &str| DiskCommand::Clone {
            disk: disk.into(),
            snapshot: "s".into(),
            clone: clone.into(),
        };
        let detach = |disk: &str| DiskCommand::Detach { disk: disk.into() };
        for (command, expected) in [
            (create("d", 4096, 0), true),
            (create("d", 4096, 512), true),
            (create("d", 4096, 1024), false),
            (create("d", 8192, 0), false),
            (create("new", 4096, 0), false),
            (remove("d"), false),
            (remove("gone"), true),
            (take("s"), true),
            (take("leaving"), false),
            (take("t"), false),
            (drop("s"), false),
            (drop("leaving"), true),
            (drop("t"), true),
            (clone_to("d", "c"), true),
            (clone_to("e", "c"), false),
            (clone_to("d", "d"), false),
            (detach("d"), true),
            (detach("c"), false),
            (detach("gone"), false),
            (DiskCommand::Flatten { disk: "d".into() }, false),
        ] {
            assert_eq!(command.has_taken_effect(&disks), expected, "{command:?}");
        }
    }

    #[test]
    fn a_front_end_is_read_as_it_is_shown() {
        for text in ["vhost-user:/run/vm.sock", "nbd:127.0.0.1:10809", "nbd:[::1]:10809", "nbd:/run/nbd.sock"]
        {
            assert_eq!(text.parse::<FrontEnd>().unwrap().to_string(), text);
        }
        for text in ["", "nbd", "nbd:host", "vhost-user:x", "iscsi:/x"] {
            assert!(text.parse::<FrontEnd>().is_err(), "{text}");
        }
    }
}
