//! Logging to standard error. The supervisor redirects the standard error of its roles to log
//! files.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal};
use std::path::Path;

use tracing_subscriber::EnvFilter;

use super::config::{LogFormat, LogSection};
use super::units::ByteSize;

/// Starts logging in this process.
///
/// # Errors
/// If the configured level is invalid.
pub fn start(log: &LogSection) -> Result<(), String> {
    let filter = EnvFilter::try_new(&log.level).map_err(|e| {
        format!("log level {:?} is not valid ({e}); use error, warn, info, debug or trace", log.level)
    })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_thread_names(true)
        // If standard error cannot be written, reporting this error there would fail too and cause
        // a panic.
        .log_internal_errors(false)
        .with_target(true);
    match log.format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

/// Opens a log file for appending. A file larger than `max` is first renamed to `*.log.1`.
///
/// # Errors
/// If the operating system reports an error.
pub fn open_file(path: &Path, max: ByteSize) -> io::Result<File> {
    if std::fs::metadata(path).is_ok_and(|m| m.len() > max.0) {
        std::fs::rename(path, path.with_extension("log.1"))?;
    }
    OpenOptions::new().create(true).append(true).open(path)
}

/// Returns the last `lines` lines of a log file, for an error message.
pub fn tail(path: &Path, lines: usize) -> String {
    let Ok(text) = std::fs::read_to_string(path) else { return String::new() };
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
