//! Standard output. A reader that goes away, as `head` does, ends the program quietly.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

/// Prints a line.
pub fn line(text: impl Display) {
    written(writeln!(std::io::stdout(), "{text}"));
}

/// Prints text as it is.
pub fn raw(text: impl Display) {
    written(write!(std::io::stdout(), "{text}"));
}

/// Prints a value as JSON, indented.
pub fn json(value: &impl serde::Serialize) {
    match serde_json::to_string_pretty(value) {
        Ok(text) => line(text),
        Err(e) => note(format!("cannot be shown as JSON: {e}")),
    }
}

/// Says something to the user beside the output proper, on standard error.
pub fn note(text: impl Display) {
    // Nothing can be done if standard error itself is gone.
    let _ = writeln!(std::io::stderr(), "outboard: {text}");
}

fn written(result: std::io::Result<()>) {
    if let Err(e) = result.and_then(|()| std::io::stdout().flush()) {
        if e.kind() != ErrorKind::BrokenPipe {
            note(format!("cannot write to standard output: {e}"));
        }
        std::process::exit(i32::from(e.kind() != ErrorKind::BrokenPipe));
    }
}
