//! Writes results to standard output, and messages to standard error.

use std::fmt::Display;
use std::io::Write;

/// Prints a line of a result. Ends the program if the reader of the output has gone.
pub fn line(text: impl Display) {
    raw(format_args!("{text}\n"));
}

/// Prints text of a result without ending the line.
pub fn raw(text: impl Display) {
    let mut out = std::io::stdout();
    if write!(out, "{text}").and_then(|()| out.flush()).is_err() {
        std::process::exit(1);
    }
}

/// Prints a result as JSON, indented.
pub fn json(result: &impl serde::Serialize) {
    match serde_json::to_string_pretty(result) {
        Ok(text) => line(text),
        Err(e) => note(format!("the result cannot be shown as JSON: {e}")),
    }
}

/// Prints a message for the user.
pub fn note(text: impl Display) {
    // Nothing can be done if standard error itself is gone.
    let _ = writeln!(std::io::stderr(), "outboard-layers: {text}");
}
