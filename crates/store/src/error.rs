//! Errors of a store. They travel over the channel between host and DPU, so they consist of
//! serializable data only.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Result of a call to a store.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Reason why a call to a store failed. A failed transaction has changed nothing, with two
/// exceptions: after [`Poisoned`](Self::Poisoned) and [`Disconnected`](Self::Disconnected), the
/// outcome of the transaction is unknown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The collection does not exist.
    #[error("collection {0} does not exist; create it first")]
    NoSuchCollection(String),
    /// The object does not exist.
    #[error("object {0} does not exist")]
    NoSuchObject(String),
    /// The xattr does not exist.
    #[error("xattr {0} does not exist")]
    NoSuchXattr(String),
    /// An object or collection with this id exists already.
    #[error("object or collection {0} exists already")]
    Exists(String),
    /// The collection cannot be removed, because it still has objects.
    #[error("collection {0} is not empty; remove its objects first")]
    NotEmpty(String),
    /// Too little space is free. The call changed nothing. Objects can still be removed.
    #[error(
        "no space for {area} on target {target}: {needed} bytes needed, {free} free; remove objects, which works on a full target"
    )]
    NoSpace {
        /// Uuid of the target.
        target: Uuid,
        /// Part of the target that is full.
        area: Area,
        /// Number of bytes that the call needs.
        needed: u64,
        /// Number of free bytes in that area, without the reserve.
        free: u64,
    },
    /// The object is stored on several targets, and too few of these targets are available.
    #[error("{there} of the object's targets are available, but {needed} are needed: {detail}")]
    TooFewTargets {
        /// Number of available targets.
        there: usize,
        /// Number of targets needed.
        needed: usize,
        /// Names the missing targets and says what to do.
        detail: String,
    },
    /// An argument is out of range, or the transaction contradicts itself.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// A part of the request, or the size of its result, exceeds a limit of the store.
    #[error("the request is too large, split it: {what} is {size}, but the limit is {limit}")]
    TooLarge {
        /// Name of the size or count that exceeds its limit.
        what: String,
        /// Actual size in bytes, or actual count.
        size: u64,
        /// Maximum size in bytes, or maximum count.
        limit: u64,
    },
    /// The payload of a call does not match the checksum that was sent with it.
    #[error("the payload is damaged: {0}; send the request again")]
    BadPayload(String),
    /// Stored data differs from the data that was written. Other objects are not affected.
    #[error("{what} is corrupt: {detail}; run fsck and restore the object from a copy")]
    Corrupt {
        /// Name of the damaged item, for example an object, a block, a log record or the index.
        what: String,
        /// Description of the damage.
        detail: String,
    },
    /// The named stage does not exist. It was never allocated, was released, or was lost when the
    /// store's process ended.
    #[error("stage {0} does not exist: it was released, or the store has restarted; stage the data again")]
    NoSuchStage(u64),
    /// A write or flush failed earlier. Acknowledged changes are safe. Whether changes that were
    /// not acknowledged took effect is unknown. The store accepts no more changes until a remount.
    #[error(
        "the store refuses writes after a failed {0}; check the drive; the target is remounted automatically once the drive works"
    )]
    Poisoned(String),
    /// Another process has the target mounted, or uses the device for something else.
    #[error(
        "target {0} is in use by another process, or contains a mounted file system; stop the process or unmount the file system first"
    )]
    InUse(String),
    /// The version of the target's on-disk format is not the version that this program supports.
    #[error(
        "the target has format version {found}, but this program reads version {supported}; use the program that created the target"
    )]
    WrongVersion {
        /// Format version of the target.
        found: u32,
        /// Format version that this program supports.
        supported: u32,
    },
    /// The target's UUID is not the UUID that the caller expected.
    #[error(
        "the target has UUID {found}, but UUID {expected} was expected; check that the path names the right drive"
    )]
    WrongUuid {
        /// UUID of the target.
        found: String,
        /// UUID that the caller expected.
        expected: String,
    },
    /// The file or device is not an Outboard target.
    #[error(
        "{0} is not an Outboard target; check that the path names the right file or drive (`outboard up` creates the targets of a new node; to use a drive as a target, add --format)"
    )]
    NotATarget(String),
    /// The store is being unmounted or its process has ended. It is unknown whether the call took
    /// effect.
    #[error("the store is not reachable: {0}; retry")]
    Disconnected(String),
    /// The drive or the operating system failed.
    #[error("I/O error: {0}")]
    Io(String),
    /// The target could not be mounted when its store was started.
    #[error("the target is not available: {0}")]
    Absent(String),
    /// A guard of the transaction does not hold ([`Op::GuardXattr`](crate::Op::GuardXattr),
    /// [`Op::GuardOmap`](crate::Op::GuardOmap)).
    #[error("a guard of the transaction does not hold: {0}; read the current value and try again")]
    GuardFailed(String),
}

/// A part of a target that can run out of space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Area {
    /// Blocks for the data of objects.
    Data,
    /// The index, which contains names, xattrs, extent maps and omaps of objects.
    Index,
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Area::Data => "data",
            Area::Index => "the index",
        })
    }
}

impl From<std::io::Error> for StoreError {
    fn from(e: std::io::Error) -> Self {
        StoreError::Io(e.to_string())
    }
}
