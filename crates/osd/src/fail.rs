//! Why a step of a request did not succeed.

use messenger::MessengerError;
use store::StoreError;

/// Result of a step.
pub(crate) type StepResult<T> = Result<T, Fail>;

/// Why a step did not succeed.
#[derive(Debug, Clone)]
pub(crate) enum Fail {
    /// The store or its drive has failed: queued changes may or may not be durable. The caller looks up the outcome and retries.
    Lost(String),
    /// The request is refused.
    Refused(wire::Error),
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
            // The log may contain the change. Replay at the next mount decides.
            e @ StoreError::Poisoned(_) => return Fail::Lost(e.to_string()),
            // Stages live as long as the store's incarnation.
            StoreError::NoSuchStage(id) => return Fail::Lost(format!("stage {id} is gone")),
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
            // Pulling again would not help.
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
        let what = "data of one step".into();
        Fail::Refused(wire::Error::TooLarge { what, size: wanted as u64, limit: largest as u64 })
    }
}

/// Returns the error for the client if the store did not come back in time.
pub(crate) fn unavailable(why: String) -> wire::Error {
    wire::Error::Unavailable(why)
}

/// Returns the error for the client.
pub(crate) fn refusal(fail: Fail) -> wire::Error {
    match fail {
        Fail::Refused(e) => e,
        Fail::Lost(why) => unavailable(why),
    }
}
