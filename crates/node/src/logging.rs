//! Logging to standard error. The supervisor redirects the standard error of its roles to log
//! files.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal};
use std::path::Path;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::config::{LogFormat, LogSection};
use super::units::ByteSize;

/// Starts logging in this process.
///
/// # Errors
/// If the configured level is invalid.
pub fn start(log: &LogSection) -> Result<(), String> {
    let filter = parse_filter(&log.level).map_err(|why| format!("log level {:?} is {why}", log.level))?;
    let builder = tracing_subscriber::fmt()
        // `filter` decides.
        .with_max_level(LevelFilter::TRACE)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_thread_names(true)
        // If standard error cannot be written, reporting this error there would fail too and cause
        // a panic.
        .log_internal_errors(false)
        .with_target(true);
    match log.format {
        LogFormat::Text => builder.finish().with(filter).init(),
        LogFormat::Json => builder.json().finish().with(filter).init(),
    }
    Ok(())
}

/// Parses a filter: levels separated by commas, each preceded by the target for which it applies and
/// `=`, except for the level that applies to all other targets. An example is `info,osd=debug`.
///
/// # Errors
/// If the filter is not valid: the rest of a sentence that begins with the name of the filter.
pub(super) fn parse_filter(filter: &str) -> Result<Targets, String> {
    let is_target = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
    };
    filter.split(',').try_fold(Targets::new(), |targets, part| {
        let (target, level) =
            part.rsplit_once('=').map_or((None, part), |(target, level)| (Some(target), level));
        let invalid = || format!("not a valid filter (at {part:?}); use error, warn, info, debug or trace");
        let level: LevelFilter =
            (!level.is_empty()).then(|| level.parse().ok()).flatten().ok_or_else(invalid)?;
        match target {
            None => Ok(targets.with_default(level)),
            Some(target) if is_target(target) => Ok(targets.with_target(target, level)),
            Some(_) => Err(invalid()),
        }
    })
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

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn a_filter_names_levels_and_targets() {
        let filter = parse_filter("info,osd=debug,osd::map=off").unwrap();
        let cases = [
            ("osd::pg", Level::DEBUG, true),
            ("osd::pg", Level::TRACE, false),
            ("osd::map::start", Level::ERROR, false),
            ("node::role", Level::INFO, true),
            ("node::role", Level::DEBUG, false),
        ];
        for (target, level, is_enabled) in cases {
            assert_eq!(filter.would_enable(target, &level), is_enabled, "{target} {level}");
        }
        for invalid in ["", "=", "=,=", "inof", "osd", "osd=", "osd=loud", "=debug", "info,", "o-d=info"] {
            assert!(parse_filter(invalid).unwrap_err().contains("use error, warn"), "{invalid}");
        }
    }
}
