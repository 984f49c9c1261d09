//! Writes to standard output. A closed pipe, such as one to `head`, ends the program quietly.
//!
//! Any client of the node can choose names and values. On a terminal, this module escapes their
//! control characters, because control characters could move the cursor, rewrite earlier lines or
//! make the terminal type text.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal, Write};

/// Prints a line.
pub fn line(text: impl Display) {
    written(writeln!(std::io::stdout(), "{}", shown(&text.to_string())));
}

/// Prints text without ending the line.
pub fn raw(text: impl Display) {
    written(write!(std::io::stdout(), "{}", shown(&text.to_string())));
}

/// Returns a name or a value for use within a line of output. On a terminal, line feeds are escaped
/// too.
pub fn name(text: &str) -> Cow<'_, str> {
    if std::io::stdout().is_terminal() { escaped(text, "") } else { text.into() }
}

/// Returns text as standard output shows it.
fn shown(text: &str) -> Cow<'_, str> {
    if std::io::stdout().is_terminal() { escaped(text, "\n\t") } else { text.into() }
}

/// Returns text as standard error shows it.
pub fn shown_as_error(text: &str) -> Cow<'_, str> {
    if std::io::stderr().is_terminal() { escaped(text, "\n\t") } else { text.into() }
}

/// Whether a terminal may act on the character instead of showing it. Control characters and
/// characters that change the direction of text do so.
fn acts(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Escapes each character that a terminal acts on, except the `allowed` characters.
fn escaped<'a>(text: &'a str, allowed: &str) -> Cow<'a, str> {
    let is_escaped = |c: char| acts(c) && !allowed.contains(c);
    if !text.contains(is_escaped) {
        return text.into();
    }
    let mut result = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_escaped(c) { result.extend(c.escape_default()) } else { result.push(c) }
    }
    result.into()
}

/// Escapes JSON so that no character acts on a terminal. Outside of strings, JSON contains no
/// control characters but line feeds. Within strings, JSON allows numeric escapes for every
/// character.
pub fn json_escaped(json: &str) -> String {
    let mut result = String::with_capacity(json.len());
    for c in json.chars() {
        if acts(c) && c != '\n' {
            // All of them lie in the basic plane.
            result.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            result.push(c);
        }
    }
    result
}

/// Prints a value as JSON, indented.
pub fn json(value: &impl serde::Serialize) {
    match serde_json::to_string_pretty(value) {
        Ok(text) => line(json_escaped(&text)),
        Err(e) => note(format!("cannot be shown as JSON: {e}")),
    }
}

/// Prints a message for the user on standard error.
pub fn note(text: impl Display) {
    // Nothing can be done if standard error itself is gone.
    let _ = writeln!(std::io::stderr(), "outboard: {}", shown_as_error(&text.to_string()));
}

fn written(result: std::io::Result<()>) {
    if let Err(e) = result.and_then(|()| std::io::stdout().flush()) {
        if e.kind() != ErrorKind::BrokenPipe {
            note(format!("cannot write to standard output: {e}"));
        }
        std::process::exit(i32::from(e.kind() != ErrorKind::BrokenPipe));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_on_a_terminal_is_escaped() {
        let hostile = "a\u{1b}[2J\u{9b}31m\r\n\u{7f}\u{202e}b";
        assert_eq!(escaped(hostile, ""), r"a\u{1b}[2J\u{9b}31m\r\n\u{7f}\u{202e}b");
        assert_eq!(escaped("one\ttwo\nthree", "\n\t"), "one\ttwo\nthree");
        assert!(matches!(escaped("Grüße, 世界 \\", ""), Cow::Borrowed(_)));
        let json = json_escaped(&serde_json::to_string_pretty(&[hostile]).unwrap());
        assert!(!json.contains(|c: char| acts(c) && c != '\n'), "{json:?}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&json).unwrap(), [hostile]);
    }
}
