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
