//! Errors of virtual disks.

use disk::DiskError;

/// Result of an operation on disks.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why an operation on disks failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such disk.
    #[error("there is no disk \"{0}\"; see `outboard disk ls`")]
    NoSuchDisk(String),
    /// There is no such snapshot.
    #[error("the disk \"{disk}\" has no snapshot \"{snapshot}\"; see `outboard disk stat`")]
    NoSuchSnapshot {
        /// Name of the disk.
        disk: String,
        /// Name of the snapshot.
        snapshot: String,
    },
    /// There is a disk or snapshot with this name already.
    #[error("{0} exists already; choose another name, or remove it first")]
    Exists(String),
    /// The disk is attached elsewhere.
    #[error(
        "the disk \"{disk}\" is attached to {owner}; detach it there first, or take it over with --force"
    )]
    Attached {
        /// Name of the disk.
        disk: String,
        /// The owner.
        owner: String,
    },
    /// Something else uses the disk or snapshot.
    #[error("{0}")]
    InUse(String),
    /// Another operator has changed the disk at the same time.
    #[error("the disk \"{0}\" was changed at the same time; try again")]
    Conflict(String),
    /// An argument is outside its range.
    #[error("{0}")]
    Argument(String),
    /// The record of a disk is damaged, or of a later version of Outboard.
    #[error(
        "the record of {what} cannot be read: {why}; if a later version of Outboard has written it, use that version"
    )]
    BadRecord {
        /// The object with the record.
        what: String,
        /// Why.
        why: String,
    },
    /// The storage failed.
    #[error(transparent)]
    Client(#[from] client::Error),
}

/// Converts an error of the client into that of a disk's request.
pub(crate) fn disk_error(e: &client::Error) -> DiskError {
    use client::Error as C;
    match e {
        C::Node(wire::Error::NoSpace { .. }) => DiskError::NoSpace(e.to_string()),
        C::Node(wire::Error::Corrupt(_) | wire::Error::WrongSize { .. }) => DiskError::Damaged(e.to_string()),
        C::Fenced(_) | C::Closed => DiskError::Detached(e.to_string()),
        _ => DiskError::Failed(e.to_string()),
    }
}
