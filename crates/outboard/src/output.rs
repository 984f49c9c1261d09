//! Writes to standard output. If the reader of the output closes the pipe, as `head` does, the
//! program ends without an error message.
//!
//! Clients of the node choose names and values freely, so these may contain control characters.
//! Control characters could move the cursor, rewrite earlier lines or make the terminal type text.
//! Therefore this module escapes them if the output is a terminal.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal, Write};

/// Prints a line on standard output.
pub fn line(text: impl Display) {
    written(writeln!(std::io::stdout(), "{}", shown(&text.to_string())));
}

/// Prints text on standard output, without a line feed at its end.
pub fn raw(text: impl Display) {
    written(write!(std::io::stdout(), "{}", shown(&text.to_string())));
}

/// Prepares a name or a value for use within a line of output. If standard output is a terminal,
/// all control characters are escaped, including line feeds and tabs.
pub fn name(text: &str) -> Cow<'_, str> {
    if std::io::stdout().is_terminal() { escaped(text, "") } else { text.into() }
}

/// Escapes control characters, except line feeds and tabs, if standard output is a terminal.
fn shown(text: &str) -> Cow<'_, str> {
    if std::io::stdout().is_terminal() { escaped(text, "\n\t") } else { text.into() }
}

/// Escapes control characters, except line feeds and tabs, if standard error is a terminal.
pub fn shown_as_error(text: &str) -> Cow<'_, str> {
    if std::io::stderr().is_terminal() { escaped(text, "\n\t") } else { text.into() }
}

/// Returns true if a terminal may act on the character instead of showing it. This applies to
/// control characters, and to characters that change the direction of text.
fn acts(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Escapes all characters of `text` on which a terminal acts, except the `allowed` characters.
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

/// Escapes all characters of a JSON text on which a terminal acts, except line feeds. The result is
/// equivalent JSON: these characters occur only within strings, where JSON allows a numeric escape
/// for every character.
pub fn json_escaped(json: &str) -> String {
    let mut result = String::with_capacity(json.len());
    for c in json.chars() {
        if acts(c) && c != '\n' {
            // Each of these characters fits into four hexadecimal digits.
            result.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            result.push(c);
        }
    }
    result
}

/// Prints a value as JSON, if `wanted`. Without it, a command that has changed something prints nothing.
pub fn json_if(wanted: bool, value: &impl serde::Serialize) {
    if wanted {
        json(value);
    }
}

/// Prints a value on standard output as indented JSON.
pub fn json(value: &impl serde::Serialize) {
    match serde_json::to_string_pretty(value) {
        Ok(text) => line(json_escaped(&text)),
        Err(e) => note(format!("cannot print the result as JSON: {e}")),
    }
}

/// Prints a message for the user on standard error.
pub fn note(text: impl Display) {
    // If standard error is closed, the message is lost.
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
    fn characters_that_control_a_terminal_are_escaped() {
        let hostile = "a\u{1b}[2J\u{9b}31m\r\n\u{7f}\u{202e}b";
        assert_eq!(escaped(hostile, ""), r"a\u{1b}[2J\u{9b}31m\r\n\u{7f}\u{202e}b");
        assert_eq!(escaped("one\ttwo\nthree", "\n\t"), "one\ttwo\nthree");
        assert!(matches!(escaped("Grüße, 世界 \\", ""), Cow::Borrowed(_)));
        let json = json_escaped(&serde_json::to_string_pretty(&[hostile]).unwrap());
        assert!(!json.contains(|c: char| acts(c) && c != '\n'), "{json:?}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&json).unwrap(), [hostile]);
    }
}
