//! The error of a command: what was attempted, what went wrong, and what to do about it.

use std::any::Any;
use std::fmt::Display;

/// Result of a command.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// A command's failure, as text for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    doing: String,
    why: String,
    usage: bool,
    refusal: bool,
}

impl Failure {
    /// Creates a failure: `doing` failed because of `why`. Like the errors of all crates, `why`
    /// ends with what to do about it.
    pub fn new<E: Display + 'static>(doing: impl Into<String>, why: E) -> Failure {
        let refusal = (&why as &dyn Any).downcast_ref().is_some_and(client::Error::is_refusal);
        Failure { doing: doing.into(), why: why.to_string(), usage: false, refusal }
    }

    /// Creates a failure for an invalid command line, with exit status 2.
    pub fn usage(doing: impl Into<String>, why: impl Display + 'static) -> Failure {
        Failure { usage: true, ..Failure::new(doing, why) }
    }

    /// Returns what went wrong, without the attempted action.
    #[must_use]
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Returns whether the node has refused the command because the user has no right to it.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        self.refusal
    }

    /// Returns whether the command line is invalid.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        self.usage
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.doing, self.why)
    }
}

/// Adds the attempted action to an error.
pub trait Doing<T> {
    /// Turns an error into a [`Failure`]. `doing` names the attempted action, such as "starting the
    /// role".
    fn doing(self, doing: impl Into<String>) -> Result<T>;
}

impl<T, E: Display + 'static> Doing<T> for std::result::Result<T, E> {
    fn doing(self, doing: impl Into<String>) -> Result<T> {
        self.map_err(|e| Failure::new(doing, e))
    }
}
