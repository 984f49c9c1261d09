//! Configuration of a node and of its roles: defaults, then the file, then the environment, then flags.
//!
//! [`KEYS`] says what can be configured.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::fault::{Fault, FaultError};
use messenger::{ReceiveQueueKind, StackChoice, StackOptions};
use serde::Deserialize;
use toml::{Table, Value};
use wire::{CodingMode, CodingOffload, Placement};

use super::cpus::Cpus;
use super::debug::Tuning;
use super::keys::{KEYS, Key};
use super::units::{ByteSize, OutOfRange, Period, multiple, within};

/// Name of the file within a node's directory.
pub const FILE: &str = "outboard.toml";

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
    pub coding: Coding,
    pub network: Network,
    pub log: Log,
    pub metrics: Metrics,
    pub supervise: Supervise,
    pub debug: Debug,
}

/// Section `store`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Store {
    pub cpus: Cpus,
    pub index_cache: ByteSize,
    pub metadata_cache: ByteSize,
    pub buffers: ByteSize,
}

/// Section `channel`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channel {
    pub window: ByteSize,
    pub requests: usize,
    pub engine: Engine,
    pub ofi_listen: SocketAddr,
    pub profile: Profile,
    pub max_transfer: ByteSize,
    pub queues: usize,
    pub region_cache: usize,
    pub poll_us: u64,
    pub host_poll_us: u64,
    pub overdue: Period,
    pub cool_down: Period,
    pub verify_every: u32,
}

impl Channel {
    /// How the osd uses the channel unless it is told otherwise.
    pub fn tuning(&self) -> Tuning {
        Tuning {
            pipeline: true,
            region_cache: self.region_cache,
            max_transfer: self.max_transfer,
            dma_queues: self.queues,
            poll_us: self.poll_us,
        }
    }
}

/// What moves payload between osd and store.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Engine {
    /// Emulated: a thread that copies between two memories of this machine.
    Shm,
    /// One-sided transfers by this provider of libfabric.
    Ofi(String),
}

impl TryFrom<String> for Engine {
    type Error = String;

    fn try_from(text: String) -> Result<Engine, String> {
        match text.split_once(':') {
            None if text == "shm" => Ok(Engine::Shm),
            Some(("ofi", provider)) if !provider.is_empty() => Ok(Engine::Ofi(provider.to_owned())),
            _ => Err(format!("{text:?} is neither \"shm\" nor \"ofi:PROVIDER\", e.g. \"ofi:verbs\"")),
        }
    }
}

/// How fast the emulated engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// As fast as memory is copied.
    Memcpy,
    /// As DoCeph measured a BlueField-3.
    Bf3Paper,
}

/// Section `debug`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Debug {
    pub faults: Vec<String>,
}

/// Section `osd`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Osd {
    pub cpus: Cpus,
    pub staging: ByteSize,
    pub store_patience: Period,
    pub transfer_timeout: Period,
    pub target_timeout: Period,
    pub rebuild_rate: ByteSize,
    pub rebuild_share: u32,
    pub missed_objects_per_pg: usize,
    pub session_expiry: Period,
    pub orphan_grace: Period,
    pub collect_interval: Period,
    pub requests_per_connection: usize,
    pub sessions: usize,
    pub handshakes: usize,
}

/// Section `coding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coding {
    pub mode: CodingMode,
    pub offload: CodingOffload,
    pub dpu_threads: usize,
    pub host_threads: usize,
    pub queue: usize,
    pub cool_down: Period,
}

/// Section `network`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    #[serde(deserialize_with = "stacks")]
    pub stacks: StackChoice,
    pub receive_queue: ReceiveQueue,
    pub poll_us: u32,
}

fn stacks<'de, D: serde::Deserializer<'de>>(text: D) -> Result<StackChoice, D::Error> {
    String::deserialize(text)?.parse().map_err(serde::de::Error::custom)
}

/// Whose receive buffers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReceiveQueue {
    /// Connections share them.
    Shared,
    /// Each connection has its own.
    PerConnection,
}

impl Network {
    /// How the messenger's stack is to behave.
    pub fn options(&self) -> StackOptions {
        let receive_queue = match self.receive_queue {
            ReceiveQueue::Shared => ReceiveQueueKind::Shared,
            ReceiveQueue::PerConnection => ReceiveQueueKind::PerConnection,
        };
        let spin = Duration::from_micros(self.poll_us.into());
        StackOptions { receive_queue, spin, ..StackOptions::default() }
    }
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
    pub hung_after: Period,
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

/// Why values do not hold.
#[derive(Debug, thiserror::Error)]
enum NotPossible {
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
    #[error("debug.faults: {0}")]
    Faults(#[from] FaultError),
    #[error("log.level {level:?} is no filter ({why}); use error, warn, info, debug or trace")]
    LogLevel { level: String, why: String },
    #[error("supervise.backoff_min ({min}) exceeds supervise.backoff_max ({max})")]
    Backoff { min: Period, max: Period },
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
        let Some(path) = file else { return Config::over(Table::new(), "configuration", env) };
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
        Config::of_text(&text, path, env)
    }

    /// Takes the text of a file at `path`, which need not be there yet, and lays what `env` says over it.
    ///
    /// # Errors
    /// As for [`load`](Config::load).
    pub fn of_text(
        text: &str,
        path: &Path,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Config, ConfigError> {
        let mut table = Table::new();
        overlay(&mut table, parse(text, path)?, path)?;
        Config::over(table, &path.display().to_string(), env)
    }

    fn over(file: Table, origin: &str, env: impl Fn(&str) -> Option<String>) -> Result<Config, ConfigError> {
        let mut table = Table::new();
        let mut origin = origin.to_owned();
        for key in KEYS {
            let in_file = match key.section {
                "" => file.get(key.name),
                section => file.get(section).and_then(|section| section.get(key.name)),
            };
            set(&mut table, key, in_file.cloned().unwrap_or_else(|| key.default_value()));
            if let Some(text) = env(&key.env()) {
                set(&mut table, key, key.parse(&text));
                let _ = write!(origin, ", {}", key.env());
            }
        }
        let invalid = |reason: String| ConfigError::Invalid { origin: origin.clone(), reason };
        let config: Config =
            table.try_into().map_err(|e: toml::de::Error| invalid(e.to_string().trim().to_owned()))?;
        config.check().map_err(|e| invalid(e.to_string()))?;
        Ok(config)
    }

    /// What is to go wrong on purpose.
    ///
    /// # Errors
    /// If one of them means nothing.
    pub fn faults(&self) -> Result<Vec<Fault>, FaultError> {
        self.debug.faults.iter().map(|text| text.parse()).collect()
    }

    fn check(&self) -> Result<(), NotPossible> {
        const MIB: u64 = 1 << 20;
        for (key, size) in [
            ("store.index_cache", self.store.index_cache),
            ("store.metadata_cache", self.store.metadata_cache),
            ("store.buffers", self.store.buffers),
        ] {
            within(key, size.0, MIB, 1 << 40)?;
        }
        // Data of up to 4 MiB goes in one piece with its transaction.
        within("channel.window", self.channel.window.0, 8 * MIB, 4096 * MIB)?;
        multiple("channel.window", self.channel.window, ByteSize(4096))?;
        within("channel.requests", self.channel.requests as u64, 1, 1024)?;
        self.channel.tuning().check()?;
        within("channel.overdue in ms", self.channel.overdue.0.as_millis() as u64, 10, 600_000)?;
        within("channel.cool_down in ms", self.channel.cool_down.0.as_millis() as u64, 10, 3_600_000)?;
        self.faults()?;
        if let Err(e) = tracing_subscriber::EnvFilter::try_new(&self.log.level) {
            return Err(NotPossible::LogLevel { level: self.log.level.clone(), why: e.to_string() });
        }
        within("osd.staging", self.osd.staging.0, 8 * MIB, 1 << 40)?;
        multiple("osd.staging", self.osd.staging, ByteSize(4 * MIB))?;
        within("osd.requests_per_connection", self.osd.requests_per_connection as u64, 1, 4096)?;
        within("osd.target_timeout in ms", self.osd.target_timeout.0.as_millis() as u64, 100, 600_000)?;
        within("osd.rebuild_share", self.osd.rebuild_share.into(), 1, 100)?;
        within("osd.missed_objects_per_pg", self.osd.missed_objects_per_pg as u64, 1, 16_777_216)?;
        within("osd.sessions", self.osd.sessions as u64, 1, 65_536)?;
        within("osd.handshakes", self.osd.handshakes as u64, 1, 65_536)?;
        within("coding.dpu_threads", self.coding.dpu_threads as u64, 1, 64)?;
        within("coding.host_threads", self.coding.host_threads as u64, 1, 64)?;
        within("coding.queue", self.coding.queue as u64, 1, 65_536)?;
        within("coding.cool_down in ms", self.coding.cool_down.0.as_millis() as u64, 10, 3_600_000)?;
        within("network.poll_us", self.network.poll_us.into(), 0, 10_000)?;
        let s = &self.supervise;
        within("supervise.backoff_min in ms", s.backoff_min.0.as_millis() as u64, 1, 3_600_000)?;
        if !s.hung_after.0.is_zero() {
            within("supervise.hung_after in ms", s.hung_after.0.as_millis() as u64, 600, 3_600_000)?;
        }
        if s.backoff_min > s.backoff_max {
            let (min, max) = (s.backoff_min, s.backoff_max);
            return Err(NotPossible::Backoff { min, max });
        }
        Ok(())
    }
}

fn parse(text: &str, path: &Path) -> Result<Table, ConfigError> {
    text.parse().map_err(|e: toml::de::Error| ConfigError::Syntax {
        path: path.to_owned(),
        reason: e.to_string().trim().to_owned(),
    })
}

/// Whether a key at the top of the file is set: by the environment, or by the text of a file.
pub fn is_set(name: &str, text: &str, env: impl Fn(&str) -> Option<String>) -> bool {
    let in_file = text.parse::<Table>().is_ok_and(|table| table.contains_key(name));
    in_file || env_of(name).is_some_and(|variable| env(&variable).is_some())
}

/// The environment variable of a key, by the path of the key.
pub fn env_of(path: &str) -> Option<String> {
    KEYS.iter().find(|key| key.path() == path).map(Key::env)
}

/// The text of a configuration file with a key at the top set, which was not set before.
pub fn remember(text: &str, name: &str, value: &Value) -> String {
    let (line, default) = (format!("{name} = {value}\n"), format!("# {name} = "));
    // The generated file has the key in its place, commented out.
    match text.split_inclusive('\n').position(|l| l.starts_with(&default)) {
        Some(at) => text
            .split_inclusive('\n')
            .enumerate()
            .map(|(n, old)| if n == at { line.as_str() } else { old })
            .collect(),
        None => line + text,
    }
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
            "[supervise]\nhung_after = \"1ms\"",
            "[log]\nlevel = \"=,=\"",
            "[osd]\nsessions = 0",
            "[osd]\nstaging = \"9MiB\"",
            "[osd]\ncpus = \"most\"",
            "[channel]\nwindow = \"3MiB\"",
            "[channel]\nqueues = 65",
            "[channel]\npoll_us = 10001",
            "[channel]\nmax_transfer = \"4MiB\"",
            "[channel]\nprofile = \"fast\"",
            "[channel]\nengine = \"ofi\"",
            "[coding]\nmode = \"hybrid:0:0\"",
            "[coding]\noffload = \"gpu\"",
            "[coding]\ndpu_threads = 0",
            "[debug]\nfaults = [\"everything=breaks\"]",
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

    #[test]
    fn a_key_that_is_remembered_is_set_and_nothing_else_changes() {
        let listen = Value::String("127.0.0.1:7401".to_owned());
        for text in [generate(&[]), "targets = [\"a\"]\n[log]\nlevel = \"debug\"\n".to_owned(), String::new()]
        {
            assert!(!is_set("listen", &text, |_| None));
            let remembered = remember(&text, "listen", &listen);
            assert!(is_set("listen", &remembered, |_| None), "{remembered}");
            let before = load(&text, &[]).unwrap();
            assert_eq!(load(&remembered, &[]).unwrap(), Config { listen: "127.0.0.1:7401".into(), ..before });
        }
        assert!(is_set("listen", "", |name| (name == "OUTBOARD_LISTEN").then(String::new)));
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
