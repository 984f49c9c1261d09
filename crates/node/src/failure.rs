//! What a command says when it fails: what was being done, what went wrong, and what to do about it.

use std::fmt::Display;

/// Result of a command.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// A command's failure, for a person to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    doing: String,
    why: String,
    usage: bool,
}

impl Failure {
    /// `doing` failed because of `why`, which ends in what to do about it (as the errors of all crates do).
    pub fn new(doing: impl Into<String>, why: impl Display) -> Failure {
        Failure { doing: doing.into(), why: why.to_string(), usage: false }
    }

    /// The command line itself is wrong: exit status 2.
    pub fn usage(doing: impl Into<String>, why: impl Display) -> Failure {
        Failure { usage: true, ..Failure::new(doing, why) }
    }

    /// Whether the command line itself is wrong.
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

/// Adds what was being done to an error.
pub trait Doing<T> {
    /// Turns an error into a [`Failure`] of `doing`.
    fn doing(self, doing: impl Into<String>) -> Result<T>;
}

impl<T, E: Display> Doing<T> for std::result::Result<T, E> {
    fn doing(self, doing: impl Into<String>) -> Result<T> {
        self.map_err(|e| Failure::new(doing, e))
    }
}
