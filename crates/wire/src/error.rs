//! Errors that the osd returns.

use serde::{Deserialize, Serialize};

use crate::{NameError, SessionId};

/// Result of a request.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Whose administrators may do something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdministratorOf {
    /// The node.
    Node,
    /// The tenant that the request concerns, or the node.
    TenantOrNode,
}

impl std::fmt::Display for AdministratorOf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            AdministratorOf::Node => "the node",
            AdministratorOf::TenantOrNode => "the tenant or of the node",
        })
    }
}

/// Reason why a request failed. A failed request has changed nothing, unless the variant says
/// otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The pool does not exist.
    #[error("pool {0} does not exist; create it, or check its name with `pool ls`")]
    NoSuchPool(String),
    /// The pool exists already.
    #[error("pool {0} exists already; use it, or choose another name")]
    PoolExists(String),
    /// The pool cannot be removed because it contains objects.
    #[error("pool {0} is not empty; remove its objects first, or force the removal")]
    PoolNotEmpty(String),
    /// A name is not valid.
    #[error("bad name: {0}")]
    BadName(#[from] NameError),
    /// The object does not exist.
    #[error("object {0} does not exist; check its name with `ls`")]
    NoSuchObject(String),
    /// The object cannot be created because it already exists.
    #[error("object {0} exists already; remove it first, or write without the exclusive flag")]
    Exists(String),
    /// A condition does not hold.
    #[error(
        "condition {index} does not hold: {detail}; read the object again, then decide whether to repeat the change"
    )]
    ConditionFailed {
        /// Index of the condition in the request, from 0.
        index: u16,
        /// Reason why the condition does not hold.
        detail: String,
    },
    /// A range or number is outside its valid values.
    #[error("{what} is out of range: {detail}")]
    OutOfRange {
        /// Name of the range or number.
        what: String,
        /// The actual value, and the valid values.
        detail: String,
    },
    /// A size or count exceeds its limit.
    #[error("{what} is {size}, but the maximum is {limit}; reduce it, or use several smaller requests")]
    TooLarge {
        /// Name of the size or count.
        what: String,
        /// Actual size in bytes, or actual count.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// The request contradicts itself or cannot be decoded.
    #[error("bad request: {0}; use a client of the same version as the node")]
    BadRequest(String),
    /// The data did not arrive, or arrived damaged.
    #[error("the data could not be transferred: {0}; send the request again")]
    TransferFailed(String),
    /// A target is full. Objects can still be removed.
    #[error(
        "no space for {area} on target {target}: {needed} bytes needed, {free} free; remove objects, which works on a full target"
    )]
    NoSpace {
        /// Number of the target, as `target ls` shows it.
        target: String,
        /// The full area of the target: data or index.
        area: String,
        /// Bytes that the request needs.
        needed: u64,
        /// Free bytes in the area, without the reserve.
        free: u64,
    },
    /// Stored data differs from the data that was written.
    #[error("{0} is corrupt; run fsck, then restore the data from a copy")]
    Corrupt(String),
    /// The op is not possible on a striped object.
    #[error("{name} is striped, so {what} is not possible on it; replace the whole object with put")]
    Striped {
        /// The object.
        name: String,
        /// The requested op.
        what: String,
    },
    /// The object no longer has the requested version.
    #[error("the object has changed (version {found} instead of {wanted}); repeat the operation")]
    Changed {
        /// Requested version.
        wanted: u64,
        /// Actual version; 0 if the object no longer exists.
        found: u64,
    },
    /// The osd does not know whether it executed the request, because the request's result may have
    /// been removed.
    #[error(
        "the request is too old to be repeated, so it is unknown whether it took effect; read the object, then decide \
         whether to send a new request"
    )]
    RequestExpired,
    /// The store is unreachable. The request may or may not take effect. Send the request again *as
    /// a retry*, with the same request number, to learn the outcome.
    #[error("the store is not available: {0}; retry")]
    Unavailable(String),
    /// A target refuses changes after a failure.
    #[error("the target refuses the request: {0}")]
    TargetFailed(String),
    /// The session was resumed on another connection, or was never opened on this connection.
    #[error("this connection has no session: {0}; reconnect")]
    NoSession(String),
    /// Client and osd support no common protocol version.
    #[error(
        "the node speaks versions {oldest} to {newest} of the object protocol; use a client that speaks one of them"
    )]
    WrongVersion {
        /// Oldest version that the node supports.
        oldest: u16,
        /// Newest version that the node supports.
        newest: u16,
    },
    /// The node has reached its limit of sessions, pools or requests.
    #[error("too many {what}: the limit is {limit}; {advice}")]
    Busy {
        /// The resource whose limit is reached.
        what: String,
        /// The limit.
        limit: u64,
        /// Advice for the user.
        advice: String,
    },
    /// The client offered data, but then could not read it from the data's source.
    #[error(
        "the client could not read the data to be written: {0}; check the file or stream that the data comes from"
    )]
    SourceFailed(String),
    /// The size of the object's data in the store differs from the size in the object's record.
    /// Sizes are in bytes.
    #[error(
        "{name} is damaged: the store has {stored} bytes of its data, but its record says {recorded}; run \"outboard \
         scrub --repair POOL\", or replace the whole object with put"
    )]
    WrongSize {
        /// The object.
        name: String,
        /// Size of the data in the store.
        stored: u64,
        /// Size in the object's record.
        recorded: u64,
    },
    /// The osd does not resume the session that the client presented. On this connection, the osd
    /// executed no request of the session.
    #[error("session {session} is refused: {why}; open a new session")]
    SessionRefused {
        /// The session.
        session: SessionId,
        /// Reason of the refusal.
        why: String,
    },
    /// An attempt of the change may have taken effect, but the result of the attempt cannot be read
    /// now.
    #[error(
        "it is unknown whether the change took effect: {0}; read the object, then decide whether to repeat the change"
    )]
    OutcomeUnknown(String),
    /// The state of the node does not permit an operator's command.
    #[error("the node refuses the command: {0}")]
    CommandRefused(String),
    /// The pool cannot list its objects in the order of their names.
    #[error(
        "pool {0} cannot list its objects in order, because an earlier version of Outboard created it; list them \
         without order, or copy them to a new pool (docs/operations.md, \"Pools of earlier versions\")"
    )]
    NotOrdered(String),
    /// The user has no right to do this.
    #[error(
        "{user} has no right to {verb} {place}; an administrator of the tenant can give it: outboard grant {user} --pool \
         {place} --rights {verb}"
    )]
    NotPermitted {
        /// Name of the user: `TENANT/USER`.
        user: String,
        /// The missing right.
        verb: String,
        /// The objects: the text form of a [`Scope`](crate::Scope).
        place: String,
    },
    /// Only an administrator may do this.
    #[error("{user} may not {what}; only an administrator of {of} may")]
    NotAdministrator {
        /// Name of the user: `TENANT/USER`.
        user: String,
        /// The refused action.
        what: String,
        /// Whose administrators may do it.
        of: AdministratorOf,
    },
    /// The osd does not accept the capability of the session, or has none. It executed nothing. Get a new
    /// capability from the control plane, and open the session with it.
    #[error("{why}; get a new capability from the control plane")]
    CapabilityRefused {
        /// Reason of the refusal.
        why: String,
        /// Address of the control plane, if the osd knows it.
        control: Option<String>,
    },
    /// The tenant or user does not exist.
    #[error("{0} does not exist; check its name with `outboard tenant ls` or `outboard user ls`")]
    NoSuchAccount(String),
    /// The tenant or user exists already.
    #[error("{0} exists already; use it, or choose another name")]
    AccountExists(String),
    /// Another shard of the osd serves the placement group that the request names. Send the request
    /// again, as the same attempt, to shard `group mod shards`.
    #[error(
        "another of the {shards} shards of the node serves this object; use a client that sends each request to the \
         shard of its placement group"
    )]
    WrongShard {
        /// Number of placement groups of the pool.
        groups: u32,
        /// Number of shards of the osd.
        shards: u16,
    },
}

impl Error {
    /// Returns true if a retry of the same request may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Error::Unavailable(_) | Error::TransferFailed(_) | Error::NoSession(_))
    }
}
