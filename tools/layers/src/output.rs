//! Writes results to standard output, and messages to standard error.

use std::fmt::Display;
use std::io::Write;

/// Prints a line of a result. Ends the program if standard output is closed.
pub fn line(text: impl Display) {
    raw(format_args!("{text}\n"));
}

/// Prints text of a result without ending the line. Ends the program if standard output is closed.
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
        Err(e) => note(format!("cannot print the result as JSON: {e}")),
    }
}

/// Prints a message for the user.
pub fn note(text: impl Display) {
    // Ignore an error: if standard error is closed, messages cannot be shown.
    let _ = writeln!(std::io::stderr(), "outboard-layers: {text}");
}
