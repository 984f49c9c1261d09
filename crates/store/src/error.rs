//! Errors of a store. They cross the host–DPU channel, so they are plain data.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Result of a store's call.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Why a call failed. A failed transaction has changed nothing.
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
    /// An object or collection of that name exists already.
    #[error("{0} exists already")]
    Exists(String),
    /// The collection to be removed still has objects.
    #[error("collection {0} is not empty; remove its objects first")]
    NotEmpty(String),
    /// Not enough free space. Nothing was changed; removing objects still works.
    #[error(
        "no space for {area} on target {target}: {needed} bytes needed, {free} free; remove objects, which works on a full target"
    )]
    NoSpace {
        /// Uuid of the target.
        target: Uuid,
        /// What is full.
        area: Area,
        /// Bytes that the call would have taken.
        needed: u64,
        /// Bytes free in that area, without the reserve.
        free: u64,
    },
    /// An object is spread over several targets, and too few of them are there.
    #[error("{there} of the targets that have a piece of it can be used, {needed} are needed: {detail}")]
    TooFewTargets {
        /// Targets that can be used.
        there: usize,
        /// Targets needed.
        needed: usize,
        /// Which are missing, and what to do.
        detail: String,
    },
    /// An argument is out of its range, or the transaction contradicts itself.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// The transaction, or the result of one call, exceeds a limit of the store.
    #[error("too large: {what} is {size} bytes, at most {limit} are possible; split it")]
    TooLarge {
        /// What is too large.
        what: String,
        /// Its size, in bytes.
        size: u64,
        /// The most that is possible, in bytes.
        limit: u64,
    },
    /// The payload of a call does not match the checksum that came with it.
    #[error("payload is damaged: {0}; send it again")]
    BadPayload(String),
    /// Stored data differs from the data that was written. Other objects are not affected.
    #[error("{what} is corrupt: {detail}; run fsck and restore the object from a copy")]
    Corrupt {
        /// Object, extent, log record or index page.
        what: String,
        /// What does not fit.
        detail: String,
    },
    /// The named stage does not exist: it was never made, was released or used up, or was lost with
    /// the store's process.
    #[error("stage {0} does not exist; stage the data again")]
    NoSuchStage(u64),
    /// A write or flush failed earlier. Acknowledged changes are safe. The store accepts no more
    /// changes until a remount.
    #[error(
        "the store refuses writes since a failed {0}; it is mounted anew by itself once the drive works; check the drive"
    )]
    Poisoned(String),
    /// Another process has the target mounted, or uses the device for something else.
    #[error(
        "target {0} is in use by another process, or has a file system that is mounted; stop or unmount that first"
    )]
    InUse(String),
    /// The target was made by another version of the format.
    #[error(
        "target has format version {found}, this program reads version {supported}; use the program that made it"
    )]
    WrongVersion {
        /// On the target.
        found: u32,
        /// Of this program.
        supported: u32,
    },
    /// The target is not the one that was asked for.
    #[error("target has uuid {found}, expected {expected}; check which drive is where")]
    WrongUuid {
        /// On the target.
        found: String,
        /// Asked for.
        expected: String,
    },
    /// The file or device is not an Outboard target.
    #[error(
        "{0} is not an Outboard target; check which file or drive it is (a new node's `outboard up` makes targets, on a drive only with --format)"
    )]
    NotATarget(String),
    /// The store is being unmounted or its process has ended. It is unknown whether the call took
    /// effect.
    #[error("store is not reachable: {0}; retry")]
    Disconnected(String),
    /// The drive or the operating system failed.
    #[error("I/O error: {0}")]
    Io(String),
    /// The target could not be mounted when its store was started.
    #[error("the target is not there: {0}")]
    Absent(String),
}

/// A part of a target that can be full.
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
