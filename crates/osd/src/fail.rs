//! [`Fail`]: the reason why a step of a request failed.

use messenger::MessengerError;
use store::StoreError;

/// Result of a step of a request.
pub(crate) type StepResult<T> = Result<T, Fail>;

/// Reason why a step of a request failed.
#[derive(Debug, Clone)]
pub(crate) enum Fail {
    /// The store is unreachable or has failed: queued changes may or may not be durable. The caller
    /// repeats the step. A change first looks up the recorded result of its earlier attempt.
    Lost(String),
    /// The request is refused with this error.
    Refused(wire::Error),
    /// What the step saw depended on a pending change of the object that has failed. The caller
    /// repeats the step at once.
    Withdrawn,
}

impl From<wire::Error> for Fail {
    fn from(e: wire::Error) -> Fail {
        Fail::Refused(e)
    }
}

impl From<wire::NameError> for Fail {
    fn from(e: wire::NameError) -> Fail {
        Fail::Refused(e.into())
    }
}

impl From<StoreError> for Fail {
    fn from(e: StoreError) -> Fail {
        use wire::Error as E;
        Fail::Refused(match e {
            StoreError::Disconnected(why) => return Fail::Lost(why),
            // The redo log may contain the change. The replay at the next mount decides whether the
            // change takes effect.
            e @ StoreError::Poisoned(_) => return Fail::Lost(e.to_string()),
            // The change was computed from changes that have failed.
            StoreError::GuardFailed(_) => return Fail::Withdrawn,
            // A new incarnation of the store discards all staged data.
            StoreError::NoSuchStage(id) => return Fail::Lost(format!("staged data {id} no longer exists")),
            StoreError::NoSpace { target, area, needed, free } => {
                E::NoSpace { target: target.to_string(), area: area.to_string(), needed, free }
            }
            StoreError::TooLarge { what, size, limit } => E::TooLarge { what, size, limit },
            StoreError::Corrupt { what, detail } => E::Corrupt(format!("{what} ({detail})")),
            StoreError::BadPayload(detail) => E::TransferFailed(detail),
            StoreError::NoSuchObject(name) => E::NoSuchObject(name),
            StoreError::InvalidArgument(detail) => E::BadRequest(detail),
            other => E::TargetFailed(other.to_string()),
        })
    }
}

impl From<MessengerError> for Fail {
    fn from(e: MessengerError) -> Fail {
        Fail::Refused(match e {
            // The client cannot read its own data, so pulling the data again would not help.
            MessengerError::Source(why) => wire::Error::SourceFailed(why),
            e => wire::Error::TransferFailed(e.to_string()),
        })
    }
}

impl From<base::pool::PoolError> for Fail {
    fn from(e: base::pool::PoolError) -> Fail {
        let base::pool::PoolError::TooLarge { wanted, largest } = e else {
            return Fail::Refused(wire::Error::BadRequest(e.to_string()));
        };
        let what = "size of the staging buffer".into();
        Fail::Refused(wire::Error::TooLarge { what, size: wanted as u64, limit: largest as u64 })
    }
}

/// Returns the error for the client if the store did not become reachable in time.
pub(crate) fn unavailable(why: String) -> wire::Error {
    wire::Error::Unavailable(why)
}

/// Converts the failure of a step into the error that the client receives.
pub(crate) fn refusal(fail: Fail) -> wire::Error {
    match fail {
        Fail::Refused(e) => e,
        Fail::Lost(why) => unavailable(why),
        Fail::Withdrawn => unavailable("another change of the object has failed".into()),
    }
}
