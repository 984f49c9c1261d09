//! Writes to standard output. If the reader of the output closes the pipe, as `head` does, the
//! process ends without an error message.

use std::fmt::Display;
use std::io::{ErrorKind, Write, stdout};

/// Prints a line on standard output, and ends the process if that is not possible.
pub fn line(text: impl Display) {
    if let Err(e) = writeln!(stdout().lock(), "{text}") {
        let is_failure = e.kind() != ErrorKind::BrokenPipe;
        if is_failure {
            // If standard error is closed too, the message is lost.
            let _ = writeln!(std::io::stderr(), "outboard-sim: cannot write to standard output: {e}");
        }
        std::process::exit(i32::from(is_failure));
    }
}
