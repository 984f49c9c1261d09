//! Errors of the client.

use std::fmt;
use std::time::Duration;

use control::ControlError;
use identity::IdentityError;
use messenger::MessengerError;

/// Result of a call to the client library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How long a call has waited, and for what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waited {
    /// Time limit of the call.
    pub after: Duration,
    /// Why the client could not reach the node at the end; `None` if it was connected.
    pub why: Option<String>,
}

impl From<Duration> for Waited {
    fn from(after: Duration) -> Waited {
        Waited { after, why: None }
    }
}

impl fmt::Display for Waited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.why {
            Some(why) => write!(f, "{:?}: {why}", self.after),
            None => write!(f, "{:?}; check that the node runs", self.after),
        }
    }
}

/// Reason why a call to the client library failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name is invalid. Nothing was sent.
    #[error("bad name: {0}")]
    Name(#[from] wire::NameError),
    /// The node refused the request.
    #[error(transparent)]
    Node(#[from] wire::Error),
    /// The network failed, and reconnecting does not help.
    #[error(transparent)]
    Network(#[from] MessengerError),
    /// The control plane failed, and another attempt does not help.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The node accepts the capability of the session no longer, and the control plane has not issued
    /// another one yet. The client tries again.
    #[error("{why}, and there is no new one yet: {error}")]
    NoCapability {
        /// Why the node refuses the capability.
        why: String,
        /// Why there is no new one.
        error: Box<Error>,
    },
    /// No answer arrived in time. A change may have taken effect.
    #[error("no answer arrived within {0}; then check whether the request took effect")]
    TimedOut(Waited),
    /// A change was sent, but its result cannot be learnt, for the given reason. The change may
    /// have taken effect.
    #[error(
        "it is unknown whether the change took effect: {0}; read the object, then decide whether to repeat the change"
    )]
    OutcomeUnknown(Box<Error>),
    /// The node's answer is invalid.
    #[error("the node's answer is invalid: {0}; use a client of the same version as the node")]
    Protocol(String),
    /// Another client has fenced this one, which was an exclusive owner. The change had no effect.
    #[error("another owner has taken over ({0}); attach again to take over in turn")]
    Fenced(wire::Error),
    /// The client was closed.
    #[error("the client was closed; connect again")]
    Closed,
    /// The caller's own file, reader or writer failed.
    #[error("local I/O failed: {0}; the object was not changed")]
    Io(#[from] std::io::Error),
    /// An argument is outside its range. Nothing was sent.
    #[error("{0}")]
    Argument(String),
    /// The engine lacks a feature that the request needs. Nothing was changed.
    #[error("not supported: {0}")]
    Unsupported(String),
}

impl Error {
    /// Converts an error into the error for a change that was sent before and has an unknown
    /// outcome.
    pub(crate) fn of_unknown_outcome(self) -> Error {
        Error::OutcomeUnknown(Box::new(self))
    }

    /// Returns whether the call failed because the object, or its pool, does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Node(wire::Error::NoSuchObject(_) | wire::Error::NoSuchPool(_)))
    }

    /// Returns whether the node has refused the request because the user has no right to it, or because
    /// it does not accept the user's key or capability.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        use wire::Error as Refusal;
        match self {
            Error::Node(e) | Error::Control(ControlError::Refused(e)) => matches!(
                e,
                Refusal::NotPermitted { .. }
                    | Refusal::NotAdministrator { .. }
                    | Refusal::CapabilityRefused { .. }
            ),
            Error::Control(e) => matches!(e, ControlError::NotPermitted(_)),
            Error::Network(e) => matches!(e, MessengerError::KeyRefused(_)),
            _ => false,
        }
    }

    /// Returns whether another attempt of the same request may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Error::Node(e) => e.is_transient(),
            Error::Control(e) => matches!(e, ControlError::Unreachable { .. }),
            _ => false,
        }
    }

    /// Returns whether a change that failed with this error may have taken effect. After every
    /// other error, the change had no effect.
    #[must_use]
    pub fn may_have_taken_effect(&self) -> bool {
        matches!(
            self,
            Error::TimedOut(_)
                | Error::OutcomeUnknown(_)
                | Error::Closed
                | Error::Node(wire::Error::RequestExpired | wire::Error::OutcomeUnknown(_))
        )
    }

    /// Returns whether a condition did not hold: the object's state differs from the caller's
    /// expectation.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        use wire::Error as E;
        matches!(self, Error::Node(E::ConditionFailed { .. } | E::Exists(_) | E::Changed { .. }))
    }
}

/// Whether the node does not accept this client's key, or is another node than the client expects.
pub(crate) fn refuses_client(e: &MessengerError) -> bool {
    matches!(e, MessengerError::KeyRefused(_) | MessengerError::Identity(IdentityError::OtherServer { .. }))
}
