//! How the node's errors travel as gRPC statuses.

use tonic::{Code, Status};
use wire::Error;

/// Converts the node's error to a status. The details contain the error in JSON form.
pub(crate) fn status_of(error: &Error) -> Status {
    let code = match error {
        Error::NoSuchPool(_) | Error::NoSuchObject(_) | Error::NoSuchAccount(_) => Code::NotFound,
        Error::PoolExists(_) | Error::Exists(_) | Error::AccountExists(_) => Code::AlreadyExists,
        Error::PoolNotEmpty(_) | Error::CommandRefused(_) | Error::ConditionFailed { .. } => {
            Code::FailedPrecondition
        }
        Error::BadName(_) | Error::BadRequest(_) | Error::TooLarge { .. } => Code::InvalidArgument,
        Error::OutOfRange { .. } => Code::OutOfRange,
        Error::NotPermitted { .. } | Error::NotAdministrator { .. } => Code::PermissionDenied,
        Error::Busy { .. } | Error::NoSpace { .. } => Code::ResourceExhausted,
        Error::Unavailable(_) | Error::TransferFailed(_) => Code::Unavailable,
        Error::Corrupt(_) | Error::WrongSize { .. } => Code::DataLoss,
        _ => Code::Unknown,
    };
    let details = serde_json::to_vec(error).expect("plain data has a JSON form");
    Status::with_details(code, error.to_string(), details.into())
}

/// Returns the node's error in a status; `None` if the status has another origin.
pub(crate) fn error_in(status: &Status) -> Option<Error> {
    serde_json::from_slice(status.details()).ok()
}

#[cfg(test)]
mod tests {
    use wire::AdministratorOf;

    use super::*;

    #[test]
    fn an_error_survives_its_form_as_a_status() {
        for error in [
            Error::PoolExists("p".into()),
            Error::CommandRefused("no".into()),
            Error::Unavailable("the store is starting".into()),
        ] {
            let status = status_of(&error);
            assert_eq!(error_in(&status), Some(error.clone()));
            assert_eq!(status.message(), error.to_string());
        }
        let refused = Error::NotAdministrator {
            user: "t/u".into(),
            what: "arm faults".into(),
            of: AdministratorOf::Node,
        };
        assert_eq!(status_of(&refused).code(), Code::PermissionDenied);
        assert_eq!(status_of(&Error::NoSuchAccount("t/u".into())).code(), Code::NotFound);
        assert_eq!(status_of(&Error::AccountExists("t/u".into())).code(), Code::AlreadyExists);
        assert_eq!(error_in(&Status::unavailable("the server is gone")), None);
    }
}
