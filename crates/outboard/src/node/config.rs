//! Configuration of a node and of its roles: defaults, then the file, then the environment, then flags.
//!
//! [`KEYS`] is the one list of what can be configured. The file that the first `up` writes, the check for unknown keys,
//! the names of environment variables and `docs/configuration.md` all follow from it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::units::{ByteSize, Period};

/// Name of the file within a node's directory.
pub const FILE: &str = "outboard.toml";

/// One thing that can be configured.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Section of the file, empty for the top.
    pub section: &'static str,
    /// Name within the section.
    pub name: &'static str,
    /// Its value if nothing else is said, as TOML.
    pub default: &'static str,
    /// What it means: unit, range, consequence.
    pub about: &'static str,
}

const fn key(section: &'static str, name: &'static str, default: &'static str, about: &'static str) -> Key {
    Key { section, name, default, about }
}

/// Everything that can be configured.
pub const KEYS: &[Key] = &[
    key(
        "",
        "placement",
        "\"dpu\"",
        "Where requests are handled: \"dpu\" (osd and store are two processes joined by the host-DPU channel) or \"host\" (one process, the baseline).",
    ),
    key(
        "",
        "listen",
        "\"127.0.0.1:0\"",
        "Address that clients connect to. Port 0 takes a free one; `outboard status` says which.",
    ),
    key(
        "",
        "targets",
        "[]",
        "Files or raw block devices, one per target; relative to the node's directory. The set is fixed once the node has started.",
    ),
    key(
        "",
        "target_size",
        "\"8GiB\"",
        "Size of target files that `up` makes. Existing ones and devices keep theirs. Written in full, so it takes that much space at once.",
    ),
    key("store", "index_cache", "\"32MiB\"", "Memory for index pages, per target."),
    key("store", "metadata_cache", "\"16MiB\"", "Memory for decoded metadata, per target."),
    key(
        "store",
        "buffers",
        "\"32MiB\"",
        "Memory for reads and writes whose own memory cannot go to the drive directly, per target.",
    ),
    key(
        "channel",
        "window",
        "\"64MiB\"",
        "Host memory that a session's payload passes through: 1MiB to 4GiB, a multiple of 4KiB.",
    ),
    key("channel", "requests", "256", "Most requests to the store that are unanswered at a time: 1 to 1024."),
    key(
        "osd",
        "staging",
        "\"128MiB\"",
        "Memory for payload between client and store; requests wait when it is used up. At least 8MiB, a multiple of 4MiB.",
    ),
    key(
        "osd",
        "store_patience",
        "\"30s\"",
        "How long requests wait for a store that is restarting before clients are told to retry.",
    ),
    key("osd", "transfer_timeout", "\"30s\"", "How long one transfer from or to a client may take."),
    key(
        "osd",
        "session_expiry",
        "\"24h\"",
        "Clients that changed nothing for that long lose the record of what they did; a retry that comes later is refused.",
    ),
    key(
        "osd",
        "orphan_grace",
        "\"1h\"",
        "Parts of an unfinished upload are removed when they are that old and their uploader has gone.",
    ),
    key("osd", "collect_interval", "\"10m\"", "Pause between two searches for such parts."),
    key(
        "osd",
        "requests_per_connection",
        "256",
        "Most requests of one client worked on at a time: 1 to 4096.",
    ),
    key("osd", "sessions", "4096", "Most clients known at a time: 1 to 65536."),
    key(
        "log",
        "level",
        "\"info\"",
        "What is logged: error, warn, info, debug, trace, or a filter such as \"info,osd=debug\".",
    ),
    key("log", "format", "\"text\"", "\"text\" or \"json\" (one object per line)."),
    key(
        "log",
        "max_size",
        "\"16MiB\"",
        "A role's log file larger than this is renamed to *.log.1 when the role starts, replacing the one before.",
    ),
    key(
        "metrics",
        "listen",
        "\"127.0.0.1:0\"",
        "Address of each process's Prometheus page. With a port other than 0, the supervisor takes it and the roles the ones that follow: store (or node) +1, osd +2.",
    ),
    key("supervise", "backoff_min", "\"100ms\"", "Pause before a dead role is restarted; doubles each time."),
    key("supervise", "backoff_max", "\"5s\"", "Longest pause before a restart."),
    key(
        "supervise",
        "steady_after",
        "\"10s\"",
        "A role that was ready for this long starts again at backoff_min.",
    ),
    key(
        "supervise",
        "ready_timeout",
        "\"120s\"",
        "A role that is not ready after this is killed and counts as dead. Recovery of a large log takes its time.",
    ),
    key(
        "supervise",
        "stop_timeout",
        "\"30s\"",
        "A role that has not stopped after this is killed; nothing acknowledged is lost.",
    ),
];

/// Where requests are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// The OSD and the store are two processes joined by the host–DPU channel.
    Dpu,
    /// One process, the store called directly: the baseline.
    Host,
}

impl Placement {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Placement::Dpu => "dpu",
            Placement::Host => "host",
        }
    }
}

/// The values that hold.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// See [`KEYS`], as for all of these.
    pub placement: Placement,
    pub listen: String,
    pub targets: Vec<PathBuf>,
    pub target_size: ByteSize,
    pub store: Store,
    pub channel: Channel,
    pub osd: Osd,
    pub log: Log,
    pub metrics: Metrics,
    pub supervise: Supervise,
}

/// Section `store`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Store {
    pub index_cache: ByteSize,
    pub metadata_cache: ByteSize,
    pub buffers: ByteSize,
}

/// Section `channel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channel {
    pub window: ByteSize,
    pub requests: usize,
}

/// Section `osd`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Osd {
    pub staging: ByteSize,
    pub store_patience: Period,
    pub transfer_timeout: Period,
    pub session_expiry: Period,
    pub orphan_grace: Period,
    pub collect_interval: Period,
    pub requests_per_connection: usize,
    pub sessions: usize,
}

/// Section `log`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    pub level: String,
    pub format: LogFormat,
    pub max_size: ByteSize,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

/// Section `metrics`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    pub listen: String,
}

/// Section `supervise`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Supervise {
    pub backoff_min: Period,
    pub backoff_max: Period,
    pub steady_after: Period,
    pub ready_timeout: Period,
    pub stop_timeout: Period,
}

/// Why a configuration does not hold.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}; check the path and its permissions", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    /// The file is no TOML.
    #[error("{} is not valid TOML: {reason}; correct it", path.display())]
    Syntax { path: PathBuf, reason: String },
    /// The file has a key that means nothing.
    #[error("{}: unknown key `{key}`; {hint}", path.display())]
    UnknownKey { path: PathBuf, key: String, hint: String },
    /// A value is of the wrong kind or out of its range.
    #[error("{origin}: {reason}; `docs/configuration.md` and the generated file say what is possible")]
    Invalid { origin: String, reason: String },
}

impl Key {
    /// `section.name`, or `name` at the top.
    pub fn path(&self) -> String {
        if self.section.is_empty() { self.name.to_owned() } else { format!("{}.{}", self.section, self.name) }
    }

    /// The environment variable that overrides the file. The log level is asked for often enough to have a short one.
    pub fn env(&self) -> String {
        if self.path() == "log.level" {
            return "OUTBOARD_LOG".to_owned();
        }
        format!("OUTBOARD_{}", self.path().replace('.', "_").to_uppercase())
    }

    fn default_value(&self) -> Value {
        let table: Table = format!("v = {}", self.default).parse().expect("the defaults in KEYS are TOML");
        table["v"].clone()
    }

    /// A value as text (from the environment) of the kind that the key has.
    fn parse(&self, text: &str) -> Value {
        match self.default_value() {
            Value::Array(_) => Value::Array(text.split(':').map(|t| Value::String(t.to_owned())).collect()),
            Value::Integer(_) => text.parse().map_or_else(|_| Value::String(text.to_owned()), Value::Integer),
            _ => Value::String(text.to_owned()),
        }
    }
}

/// Puts `value` at `key`.
fn set(table: &mut Table, key: &Key, value: Value) {
    if key.section.is_empty() {
        table.insert(key.name.to_owned(), value);
    } else if let Value::Table(section) =
        table.entry(key.section).or_insert_with(|| Value::Table(Table::new()))
    {
        section.insert(key.name.to_owned(), value);
    }
}

impl Config {
    /// Reads `file` (none: defaults only) and lays what `env` says over it.
    ///
    /// # Errors
    /// The file is unreadable or no TOML, has an unknown key, or a value is out of its range.
    pub fn load(file: Option<&Path>, env: impl Fn(&str) -> Option<String>) -> Result<Config, ConfigError> {
        let mut table = Table::new();
        KEYS.iter().for_each(|key| set(&mut table, key, key.default_value()));
        let mut origin = "configuration".to_owned();
        if let Some(path) = file {
            origin = path.display().to_string();
            overlay(&mut table, read(path)?, path)?;
        }
        for key in KEYS {
            if let Some(text) = env(&key.env()) {
                set(&mut table, key, key.parse(&text));
                let _ = write!(origin, ", {}", key.env());
            }
        }
        let invalid = |reason: String| ConfigError::Invalid { origin: origin.clone(), reason };
        let config: Config =
            table.try_into().map_err(|e: toml::de::Error| invalid(e.to_string().trim().to_owned()))?;
        config.check().map_err(invalid)?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        const MIB: u64 = 1 << 20;
        let within = |key: &str, value: u64, least: u64, most: u64| {
            let ok = (least..=most).contains(&value);
            if ok { Ok(()) } else { Err(format!("{key} is {value}, it must be {least} to {most}")) }
        };
        let multiple = |key: &str, value: ByteSize, of: ByteSize| {
            let ok = value.0.is_multiple_of(of.0);
            if ok { Ok(()) } else { Err(format!("{key} is {value}, it must be a multiple of {of}")) }
        };
        for (key, size) in [
            ("store.index_cache", self.store.index_cache),
            ("store.metadata_cache", self.store.metadata_cache),
            ("store.buffers", self.store.buffers),
        ] {
            within(key, size.0, MIB, 1 << 40)?;
        }
        within("channel.window", self.channel.window.0, MIB, 4096 * MIB)?;
        multiple("channel.window", self.channel.window, ByteSize(4096))?;
        within("channel.requests", self.channel.requests as u64, 1, 1024)?;
        within("osd.staging", self.osd.staging.0, 8 * MIB, 1 << 40)?;
        multiple("osd.staging", self.osd.staging, ByteSize(4 * MIB))?;
        within("osd.requests_per_connection", self.osd.requests_per_connection as u64, 1, 4096)?;
        within("osd.sessions", self.osd.sessions as u64, 1, 65_536)?;
        let s = &self.supervise;
        within("supervise.backoff_min in ms", s.backoff_min.0.as_millis() as u64, 1, 3_600_000)?;
        if s.backoff_min > s.backoff_max {
            let (min, max) = (s.backoff_min, s.backoff_max);
            return Err(format!("supervise.backoff_min ({min}) exceeds supervise.backoff_max ({max})"));
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<Table, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
    text.parse().map_err(|e: toml::de::Error| ConfigError::Syntax {
        path: path.to_owned(),
        reason: e.to_string().trim().to_owned(),
    })
}

fn overlay(table: &mut Table, file: Table, path: &Path) -> Result<(), ConfigError> {
    for (name, value) in file {
        match value {
            Value::Table(section) if KEYS.iter().any(|k| k.section == name) => {
                for (inner, value) in section {
                    set(table, find(&name, &inner, path)?, value);
                }
            }
            value => set(table, find("", &name, path)?, value),
        }
    }
    Ok(())
}

fn find(section: &str, name: &str, path: &Path) -> Result<&'static Key, ConfigError> {
    if let Some(key) = KEYS.iter().find(|k| k.section == section && k.name == name) {
        return Ok(key);
    }
    let elsewhere = KEYS.iter().find(|k| k.name == name).map(Key::path);
    let all = || KEYS.iter().map(Key::path).collect::<Vec<_>>().join(", ");
    let hint = elsewhere.map_or_else(|| format!("known ones: {}", all()), |p| format!("did you mean `{p}`?"));
    let key = if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") };
    Err(ConfigError::UnknownKey { path: path.to_owned(), key, hint })
}

/// The text of a configuration file: every key with what it means; those in `chosen` set, the others at their defaults
/// and commented out.
pub fn generate(chosen: &[(&str, Value)]) -> String {
    let mut text = String::from(
        "# Configuration of this Outboard node. Keys that are commented out show their default.\n\
         # Order of precedence: flags, environment variables, this file, defaults.\n",
    );
    let mut section = "";
    for key in KEYS {
        if key.section != section {
            section = key.section;
            let _ = write!(text, "\n[{section}]\n");
        }
        let _ = write!(text, "\n# {}\n# Environment: {}\n", key.about, key.env());
        match chosen.iter().find(|(path, _)| *path == key.path()) {
            Some((_, value)) => {
                let _ = writeln!(text, "{} = {value}", key.name);
            }
            None => {
                let _ = writeln!(text, "# {} = {}", key.name, key.default);
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str, env: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Config::load(Some(file.path()), |name| {
            env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        })
    }

    #[test]
    fn environment_goes_over_file_goes_over_defaults() {
        let text = "placement = \"host\"\nlisten = \"127.0.0.1:7\"\n[supervise]\nbackoff_max = \"9s\"\n";
        let env = [
            ("OUTBOARD_LISTEN", "127.0.0.1:8"),
            ("OUTBOARD_LOG", "debug"),
            ("OUTBOARD_TARGETS", "a:b"),
            ("OUTBOARD_OSD_SESSIONS", "7"),
        ];
        let config = load(text, &env).unwrap();
        assert_eq!(config.placement, Placement::Host);
        assert_eq!(config.listen, "127.0.0.1:8");
        assert_eq!((config.log.level.as_str(), config.osd.sessions), ("debug", 7));
        assert_eq!(config.targets, [PathBuf::from("a"), PathBuf::from("b")]);
        assert_eq!(config.supervise.backoff_max.to_string(), "9s");
        assert_eq!(config.target_size, ByteSize(8 << 30));
    }

    #[test]
    fn unknown_keys_are_named() {
        for (text, named) in [
            ("placment = \"host\"", "`placment`"),
            ("[supervise]\nbackof = \"1s\"", "`supervise.backof`"),
            ("level = \"info\"", "`log.level`"),
            ("[nosuch]\nx = 1", "`nosuch`"),
        ] {
            let error = load(text, &[]).unwrap_err();
            assert!(matches!(error, ConfigError::UnknownKey { .. }), "{error}");
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn wrong_values_are_refused() {
        for text in [
            "placement = \"moon\"",
            "target_size = \"eight\"",
            "log = 3",
            "[supervise]\nbackoff_min = \"10s\"",
            "[supervise]\nbackoff_min = \"0ms\"",
            "[osd]\nsessions = 0",
            "[osd]\nstaging = \"9MiB\"",
            "[channel]\nwindow = \"1KiB\"",
        ] {
            assert!(load(text, &[]).is_err(), "{text}");
        }
        assert!(matches!(load("a = ", &[]), Err(ConfigError::Syntax { .. })));
        assert!(matches!(load("", &[("OUTBOARD_TARGET_SIZE", "x")]), Err(ConfigError::Invalid { .. })));
        assert!(matches!(load("", &[("OUTBOARD_OSD_SESSIONS", "x")]), Err(ConfigError::Invalid { .. })));
    }

    #[test]
    fn the_generated_file_has_every_key_and_means_the_defaults() {
        let targets = Value::Array(vec![Value::String("targets/0.img".into())]);
        let text = generate(&[("targets", targets)]);
        let config = load(&text, &[]).unwrap();
        assert_eq!(config.targets, [PathBuf::from("targets/0.img")]);
        let defaults = load("", &[]).unwrap();
        assert_eq!(Config { targets: vec![], ..config }, defaults);
        for key in KEYS {
            let line = format!("{} = ", key.name);
            assert!(text.lines().any(|l| l.trim_start_matches("# ").starts_with(&line)), "{}", key.path());
        }
    }

    /// `docs/configuration.md` has a row `| key | environment | default | meaning |` for each key, and no other rows.
    #[test]
    fn the_documentation_agrees() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
        let text = std::fs::read_to_string(path).unwrap();
        let documented: Vec<&str> = text.lines().filter(|l| l.starts_with("| `")).collect();
        let expected: Vec<String> = KEYS
            .iter()
            .map(|k| format!("| `{}` | `{}` | `{}` | {} |", k.path(), k.env(), k.default, k.about))
            .collect();
        assert_eq!(documented, expected, "the table should read:\n{}", expected.join("\n"));
    }
}
