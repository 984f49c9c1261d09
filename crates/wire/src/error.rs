//! Errors that the OSD answers with.

use serde::{Deserialize, Serialize};

use crate::{NameError, SessionId};

/// Result of a request.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a request was refused. Unless said otherwise it has changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such pool.
    #[error("pool {0} does not exist; create it, or check its name with `pool ls`")]
    NoSuchPool(String),
    /// The pool exists already.
    #[error("pool {0} exists already; use it, or choose another name")]
    PoolExists(String),
    /// The pool to be removed has objects.
    #[error("pool {0} is not empty; remove its objects first, or force the removal")]
    PoolNotEmpty(String),
    /// A name is not one.
    #[error("bad name: {0}")]
    BadName(#[from] NameError),
    /// The object does not exist.
    #[error("object {0} does not exist; check its name with `ls`")]
    NoSuchObject(String),
    /// The object exists, and was to be created.
    #[error("object {0} exists already; remove it first, or write without the exclusive flag")]
    Exists(String),
    /// A condition does not hold.
    #[error("condition {index} does not hold: {detail}; read the object again and decide anew")]
    ConditionFailed {
        /// Which of the request's conditions, from 0.
        index: u16,
        /// What was found instead.
        detail: String,
    },
    /// A range or number is outside what is possible.
    #[error("{what} is out of range: {detail}")]
    OutOfRange {
        /// What it is.
        what: String,
        /// Found and possible values.
        detail: String,
    },
    /// Something is larger than its limit.
    #[error("{what} is {size}, at most {limit} is possible; split it")]
    TooLarge {
        /// What it is.
        what: String,
        /// Its size, in bytes or as a count.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// The request contradicts itself or cannot be decoded.
    #[error("bad request: {0}; use a client of the node's version")]
    BadRequest(String),
    /// Data did not arrive, or not as it was sent.
    #[error("transfer of the data failed: {0}; send it again")]
    TransferFailed(String),
    /// A target is full. Removing objects works.
    #[error(
        "no space for {area} on target {target}: {needed} bytes needed, {free} free; remove objects, which works on a full target"
    )]
    NoSpace {
        /// Number of the target, as `target ls` has it.
        target: String,
        /// What of it is full: its data, or its index.
        area: String,
        /// Bytes that the request would have taken.
        needed: u64,
        /// Bytes free there, without the room that is kept back.
        free: u64,
    },
    /// Stored data is not what was written.
    #[error("{0} is corrupt; run fsck and restore it from a copy")]
    Corrupt(String),
    /// The op is not possible on a striped object.
    #[error("{name} is striped, so {what} is not possible on it; write it whole with put")]
    Striped {
        /// The object.
        name: String,
        /// What was asked for.
        what: String,
    },
    /// The object is no longer the version that was asked for.
    #[error("the object has changed (version {found} instead of {wanted}); start again")]
    Changed {
        /// Version asked for.
        wanted: u64,
        /// Version found; 0 if the object is gone.
        found: u64,
    },
    /// Whether the request was carried out can no longer be told: its result has left the session's window.
    #[error(
        "the request is too old to be repeated, whether it took effect is unknown; look at the object and decide"
    )]
    RequestExpired,
    /// The store cannot be reached now. The request may take effect or not; repeat it *as a retry* to find out.
    #[error("the store is not available: {0}; retry")]
    Unavailable(String),
    /// A target refuses writes after a failure.
    #[error("the target refuses the request: {0}")]
    TargetFailed(String),
    /// The session was opened anew on another connection, or never opened on this one.
    #[error("this connection has no session: {0}; reconnect")]
    NoSession(String),
    /// Client and OSD have no version in common.
    #[error("the node speaks versions {oldest} to {newest} of the object protocol; use a matching client")]
    WrongVersion {
        /// Oldest version of the node.
        oldest: u16,
        /// Newest version of the node.
        newest: u16,
    },
    /// The node has as many sessions, pools or requests as it can hold.
    #[error("too many {what}: the limit is {limit}; {advice}")]
    Busy {
        /// What there are too many of.
        what: String,
        /// The limit.
        limit: u64,
        /// What to do.
        advice: String,
    },
    /// The client offered data and then could not produce it.
    #[error("the data to be written could not be read: {0}; check where it comes from")]
    SourceFailed(String),
    /// The store has another size of the object's data than the object's record says. Sizes are in bytes.
    #[error(
        "{name} is damaged: the store has {stored} bytes of it and its record says {recorded}; run \"outboard \
         scrub --repair POOL\", or write the object whole with put"
    )]
    WrongSize {
        /// The object.
        name: String,
        /// Size of the data in the store.
        stored: u64,
        /// Size that is recorded with the object.
        recorded: u64,
    },
    /// The session that the client presented cannot be gone on with. Nothing of it was sent on this connection.
    #[error("session {session} is refused: {why}; open a new one")]
    SessionRefused {
        /// The session.
        session: SessionId,
        /// What is wrong with it.
        why: String,
    },
    /// An attempt at the change may have taken effect, and its result cannot be read now.
    #[error("whether the change took effect is unknown: {0}; look at the object, then decide")]
    OutcomeUnknown(String),
}

impl Error {
    /// Whether the same request, repeated as a retry, may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Error::Unavailable(_) | Error::TransferFailed(_) | Error::NoSession(_))
    }
}
