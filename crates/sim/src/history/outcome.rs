//! Outcomes of calls.

use bytes::Bytes;
use client::engine::ReadReply;
use wire::{Error as E, Mutated, QueryAnswer};

use super::Seen;

/// Outcome of a call that ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Answer to a change.
    Changed(Mutated),
    /// Answer to a read.
    Read(ReadAnswer),
    /// Answer to a query.
    Queried(Vec<QueryAnswer>),
    /// Namespace and name of each listed object.
    Listed(Vec<(String, String)>),
    /// Answer to an administrative command.
    Done,
    /// The call failed and changed nothing.
    Refused(RefusedCall),
    /// The call failed, and a change may have taken effect. The text is the error.
    Unknown(String),
}

/// Answer to a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadAnswer {
    /// Version of the object; `None` if the client did not learn it.
    pub version: Option<u64>,
    /// Size of the object; `None` if the client did not learn it.
    pub object_size: Option<u64>,
    /// The data.
    pub data: Seen,
}

/// Reason why a call failed that changed nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedCall {
    /// The kind of the error.
    pub kind: RefusalKind,
    /// The error's message.
    pub text: String,
}

/// Kind of the error of a call that changed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// The condition with this index does not hold.
    ConditionFailed(u16),
    /// The object exists.
    Exists,
    /// The object does not exist.
    NoSuchObject,
    /// The pool does not exist.
    NoSuchPool,
    /// The object has another version than the read requires, or changed during a long read.
    Changed {
        /// Required version.
        wanted: u64,
        /// Actual version; 0 if the object does not exist.
        found: u64,
    },
    /// A count, a name or a size exceeds its limit.
    Limit,
    /// The request contradicts itself.
    BadRequest,
    /// The op is not possible on a striped object.
    Striped,
    /// A target is full.
    NoSpace,
    /// Stored data is damaged.
    Damaged,
    /// The node, the network or the client could not execute the request.
    Failed,
}

impl RefusalKind {
    /// Returns the kind of an error.
    #[must_use]
    pub fn of(error: &client::Error) -> RefusalKind {
        match error {
            client::Error::Node(e) => match e {
                E::ConditionFailed { index, .. } => RefusalKind::ConditionFailed(*index),
                E::Exists(_) => RefusalKind::Exists,
                E::NoSuchObject(_) => RefusalKind::NoSuchObject,
                E::NoSuchPool(_) => RefusalKind::NoSuchPool,
                E::Changed { wanted, found } => RefusalKind::Changed { wanted: *wanted, found: *found },
                E::TooLarge { .. } | E::OutOfRange { .. } | E::BadName(_) => RefusalKind::Limit,
                E::BadRequest(_) => RefusalKind::BadRequest,
                E::Striped { .. } => RefusalKind::Striped,
                E::NoSpace { .. } => RefusalKind::NoSpace,
                E::Corrupt(_) | E::WrongSize { .. } => RefusalKind::Damaged,
                _ => RefusalKind::Failed,
            },
            client::Error::Name(_) | client::Error::Argument(_) => RefusalKind::Limit,
            _ => RefusalKind::Failed,
        }
    }
}

impl From<&client::Error> for RefusedCall {
    fn from(error: &client::Error) -> RefusedCall {
        RefusedCall { kind: RefusalKind::of(error), text: error.to_string() }
    }
}

impl Outcome {
    /// Describes the kind of the outcome in a few words, for counts.
    #[must_use]
    pub fn kind(&self) -> String {
        match self {
            Outcome::Changed(_) => "answer: changed".into(),
            Outcome::Read(_) => "answer: read".into(),
            Outcome::Queried(_) => "answer: queried".into(),
            Outcome::Listed(_) => "answer: listed".into(),
            Outcome::Done => "answer: done".into(),
            Outcome::Refused(refusal) => match refusal.kind {
                RefusalKind::ConditionFailed(_) => "refusal: ConditionFailed".into(),
                RefusalKind::Changed { .. } => "refusal: Changed".into(),
                kind => format!("refusal: {kind:?}"),
            },
            Outcome::Unknown(why) if why.contains("too old to be repeated") => "unknown: expired".into(),
            Outcome::Unknown(why) if why.contains("is refused") => "unknown: session refused".into(),
            Outcome::Unknown(why) if why.contains("no answer arrived") => "unknown: timed out".into(),
            Outcome::Unknown(_) => "unknown: other".into(),
        }
    }

    fn refused(error: &client::Error) -> Outcome {
        Outcome::Refused(error.into())
    }

    /// Returns the outcome of a change.
    #[must_use]
    pub fn of_change(result: &client::Result<Mutated>) -> Outcome {
        match result {
            Ok(mutated) => Outcome::Changed(*mutated),
            Err(e) if e.may_have_taken_effect() => Outcome::Unknown(e.to_string()),
            Err(e) => Outcome::refused(e),
        }
    }

    /// Returns the outcome of a read with [`client::engine::Sink::Bytes`]. A striped object counts
    /// as damaged, because histories do not contain striped objects.
    #[must_use]
    pub fn of_read(result: &client::Result<ReadReply>) -> Outcome {
        match result {
            Ok(ReadReply::Data { version, object_size, chunks, .. }) => {
                let data = Seen::recognise_chunks(chunks.iter().map(|chunk| &chunk[..]));
                Outcome::Read(ReadAnswer { version: Some(*version), object_size: Some(*object_size), data })
            }
            Ok(ReadReply::Striped { .. }) => Outcome::Refused(RefusedCall {
                kind: RefusalKind::Damaged,
                text: "the object is striped, but no call made it striped".into(),
            }),
            Err(e) => Outcome::refused(e),
        }
    }

    /// Returns the outcome of a read that returned only bytes.
    #[must_use]
    pub fn of_bytes(result: &client::Result<Bytes>) -> Outcome {
        match result {
            Ok(bytes) => {
                let data = Seen::recognise(bytes);
                Outcome::Read(ReadAnswer { version: None, object_size: None, data })
            }
            Err(e) => Outcome::refused(e),
        }
    }

    /// Returns the outcome of a query.
    #[must_use]
    pub fn of_query(result: &client::Result<Vec<QueryAnswer>>) -> Outcome {
        match result {
            Ok(answers) => Outcome::Queried(answers.clone()),
            Err(e) => Outcome::refused(e),
        }
    }

    /// Returns the outcome of a listing: the namespace and name of each object.
    #[must_use]
    pub fn of_listing(result: &client::Result<Vec<(String, String)>>) -> Outcome {
        match result {
            Ok(names) => Outcome::Listed(names.clone()),
            Err(e) => Outcome::refused(e),
        }
    }

    /// Returns the outcome of an administrative command.
    #[must_use]
    pub fn of_command<T>(result: &client::Result<T>) -> Outcome {
        match result {
            Ok(_) => Outcome::Done,
            Err(e) => Outcome::refused(e),
        }
    }
}
