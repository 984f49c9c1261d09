//! What a command says when it fails: what was being done, what went wrong, and what to do about it.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use crate::output;

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

    /// Prints the failure to standard error and gives the exit status that fits it.
    pub fn report(&self) -> ExitCode {
        // Nothing can be done if standard error itself is gone.
        let _ = writeln!(std::io::stderr(), "outboard: {}", output::shown_as_error(&self.to_string()));
        ExitCode::from(if self.usage { 2 } else { 1 })
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
