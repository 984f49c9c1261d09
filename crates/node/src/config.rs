//! Configuration of a node and of its roles: defaults, then the file, then the environment, then flags.
//!
//! [`Config`] declares each key once: type, default, range and description. The file that the first `up` writes, the names of
//! environment variables and `docs/configuration.md` follow from it ([`keys`]).

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::fault::{Fault, FaultError};
use confique::Layer;
use messenger::{ReceiveQueueKind, StackChoice, StackOptions};
use serde::Deserialize;
use toml::{Table, Value};
use wire::{CodingMode, CodingOffload, Placement};

use super::cpus::Cpus;
use super::debug::Tuning;
use super::keys::{Key, keys};
use super::units::{ByteSize, OutOfRange, Period};

const MIB: u64 = 1 << 20;

/// Name of the file within a node's directory.
pub const FILE: &str = "outboard.toml";

/// The values that hold.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct Config {
    /// Processes that handle requests. "dpu": osd and store are two processes joined by the
    /// host-DPU channel. "host": one process does both; this is the baseline.
    #[config(default = "dpu")]
    pub placement: Placement,
    /// Address that clients connect to. The first `up` writes it into the file: port 7400, or the
    /// next free port. Port 0 selects a free port at every start; `outboard status` shows the port.
    #[config(default = "127.0.0.1:7400")]
    pub listen: String,
    /// Files or raw block devices, one per target. Paths are relative to the node's directory. The
    /// list is fixed once the node has started.
    #[config(default = [])]
    pub targets: Vec<PathBuf>,
    /// Size of the target files that `up` creates. Existing files and devices keep their size. `up`
    /// writes each new file completely, so the file occupies its full size at once.
    #[config(default = "8GiB")]
    pub target_size: ByteSize,
    /// The store role.
    #[config(nested)]
    pub store: Store,
    /// The channel between host and DPU.
    #[config(nested)]
    pub channel: Channel,
    /// The osd role.
    #[config(nested)]
    pub osd: Osd,
    /// Erasure coding.
    #[config(nested)]
    pub coding: Coding,
    /// How clients connect.
    #[config(nested)]
    pub network: Network,
    /// Logs.
    #[config(nested)]
    pub log: Log,
    /// Metrics.
    #[config(nested)]
    pub metrics: Metrics,
    /// How the supervisor restarts roles.
    #[config(nested)]
    pub supervise: Supervise,
    /// Faults for tests.
    #[config(nested)]
    pub debug: Debug,
}

/// Section `store`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, confique::Config)]
pub struct Store {
    /// CPUs of a store whose osd emulates a DPU: "auto" (all CPUs that the emulated DPU does not
    /// use), "any", or a list such as "2,4-7".
    #[config(default = "auto")]
    pub cpus: Cpus,
    /// Memory for index pages, per target.
    #[config(default = "32MiB", validate(within(index_cache.0, MIB, 1 << 40), "must be 1MiB to 1TiB"))]
    pub index_cache: ByteSize,
    /// Memory for decoded metadata, per target.
    #[config(default = "64MiB", validate(within(metadata_cache.0, MIB, 1 << 40), "must be 1MiB to 1TiB"))]
    pub metadata_cache: ByteSize,
    /// Memory for bounce buffers, per target. Reads and writes use them if their own memory is
    /// unsuitable for direct I/O.
    #[config(default = "32MiB", validate(within(buffers.0, MIB, 1 << 40), "must be 1MiB to 1TiB"))]
    pub buffers: ByteSize,
}

/// Section `channel`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct Channel {
    /// Size of the host memory that payload passes through between osd and store: 8MiB to 4GiB, a
    /// multiple of 4KiB.
    #[config(default = "64MiB", validate(within(window.0, 8 * MIB, 4096 * MIB) && window.0.is_multiple_of(4096), "must be 8MiB to 4GiB, a multiple of 4KiB"))]
    pub window: ByteSize,
    /// Maximum number of unanswered requests to the store: 1 to 1024.
    #[config(default = 256, validate((1..=1024).contains(requests), "must be 1 to 1024"))]
    pub requests: usize,
    /// DMA engine that moves payload between osd and store. "shm" is emulated and works on one
    /// machine. "ofi:PROVIDER" uses one-sided transfers of libfabric: "ofi:verbs" needs RDMA,
    /// "ofi:tcp" works anywhere.
    #[config(default = "shm")]
    pub engine: Engine,
    /// Address at which the osd reaches the store with the engine ofi. The network must be trusted.
    /// The IP address selects the network device.
    #[config(default = "127.0.0.1:0")]
    pub ofi_listen: SocketAddr,
    /// Speed of the emulated engine. "memcpy": as fast as memory can be copied. "bf3-paper": as
    /// slow as the BlueField-3 that DoCeph measured: each payload chain takes 2.4 ms plus 0.38 ms
    /// per MB, one chain at a time.
    #[config(default = "memcpy")]
    pub profile: Profile,
    /// Maximum length of a DMA transfer: 4KiB to 2MiB, a multiple of 4KiB. The engine's own limit
    /// also applies.
    #[config(default = "2MiB")]
    pub max_transfer: ByteSize,
    /// Number of DMA queues to use: 1 to 64, at most as many as the engine has. One queue is
    /// reserved for short requests. With 1, short requests wait for long ones.
    #[config(default = 5)]
    pub queues: usize,
    /// Number of windows of host memory (16MiB each) that stay registered for DMA. With 0, each
    /// request registers its window anew, like a DPU without such a cache.
    #[config(default = 64)]
    pub region_cache: usize,
    /// How long the osd polls for further DMA completions after each completion, in microseconds,
    /// before it sleeps: 0 to 10000. Polling stops by itself when it rarely finds a completion.
    #[config(default = 50)]
    pub poll_us: u64,
    /// How long the store polls for further doorbells after each doorbell, in microseconds: 0 to
    /// 10000. Polling uses the host's CPU time.
    #[config(default = 0, validate(*host_poll_us <= 10_000, "must be 0 to 10000"))]
    pub host_poll_us: u64,
    /// A DMA transfer that takes longer than this has failed. Its request continues over the
    /// control socket.
    #[config(default = "2s", validate(ms_within(overdue, 10, 600_000), "must be 10ms to 10m"))]
    pub overdue: Period,
    /// Pause after a DMA failure. Then a small transfer decides whether DMA is used again.
    #[config(default = "5s", validate(ms_within(cool_down, 10, 3_600_000), "must be 10ms to 1h"))]
    pub cool_down: Period,
    /// The store verifies the checksums of payload that arrives by DMA in one of this many
    /// requests. 0 verifies none. After a failure the store verifies the next 256 requests in any
    /// case.
    #[config(default = 64)]
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
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct Debug {
    /// Faults to inject, e.g. ["dma.transfer=fail,probability=0.001"]; see `outboard debug fault
    /// --help`. In the environment variable, colons separate the faults.
    #[config(default = [], validate = are_faults)]
    pub faults: Vec<String>,
}

/// Section `osd`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, confique::Config)]
pub struct Osd {
    /// CPUs of an osd that emulates a DPU: "auto" (the last quarter of the machine's CPUs, at least
    /// one), "any", or a list such as "2,4-7".
    #[config(default = "auto")]
    pub cpus: Cpus,
    /// Memory for payload between client and store. When it is used up, requests wait. At least
    /// 8MiB, a multiple of 4MiB.
    #[config(default = "128MiB", validate(within(staging.0, 8 * MIB, 1 << 40) && staging.0.is_multiple_of(4 * MIB), "must be 8MiB to 1TiB, a multiple of 4MiB"))]
    pub staging: ByteSize,
    /// How long a request waits for a store that restarts, or for an unresponsive target that it
    /// needs. After this time the client is told to retry.
    #[config(default = "30s")]
    pub store_patience: Period,
    /// Maximum time of one transfer from or to a client.
    #[config(default = "30s")]
    pub transfer_timeout: Period,
    /// How long a target of a redundant pool may take to answer: 100ms to 10m. After this time the
    /// other targets continue without it, if enough of them answer.
    #[config(default = "10s", validate(ms_within(target_timeout, 100, 600_000), "must be 100ms to 10m"))]
    pub target_timeout: Period,
    /// Maximum bytes per second that rebuilds and scrubs move; 0 for no limit. `outboard target
    /// rate` changes the limit while the node runs.
    #[config(default = "0B")]
    pub rebuild_rate: ByteSize,
    /// Share of time that rebuilds and scrubs take while clients are served, in percent: 1 to 100.
    #[config(default = 25, validate((1..=100).contains(rebuild_share), "must be 1 to 100"))]
    pub rebuild_share: u32,
    /// Maximum number of dirty notes per placement group: 1 to 16777216. A dirty note records that
    /// an object changed while a target was away. Above the limit, a returning target gets a copy
    /// of every object.
    #[config(default = 65536, validate((1..=16_777_216).contains(missed_objects_per_pg), "must be 1 to 16777216"))]
    pub missed_objects_per_pg: usize,
    /// The results of a client's requests expire after the client has changed nothing for this
    /// long. Only the time that the node runs counts. A retry after the expiry is refused.
    #[config(default = "24h")]
    pub session_expiry: Period,
    /// The parts of an unfinished upload are removed when they are this old and their uploader has
    /// disconnected.
    #[config(default = "1h")]
    pub orphan_grace: Period,
    /// Pause between two searches for parts of unfinished uploads.
    #[config(default = "10m")]
    pub collect_interval: Period,
    /// Maximum number of requests of one client that are executed at a time: 1 to 4096.
    #[config(default = 256, validate((1..=4096).contains(requests_per_connection), "must be 1 to 4096"))]
    pub requests_per_connection: usize,
    /// Maximum number of client connections: 1 to 65536; fewer if the limit on open files is low.
    /// At the limit, a new connection replaces the longest-silent connection of an address with
    /// more than its fair share.
    #[config(default = 4096, validate((1..=65_536).contains(sessions), "must be 1 to 65536"))]
    pub sessions: usize,
    /// Maximum number of connections whose handshake is incomplete: 1 to 65536; fewer if the limit
    /// on open files is low. A handshake may take 5 s. At the limit, a new handshake replaces the
    /// oldest one of an address with more than its fair share.
    #[config(default = 256, validate((1..=65_536).contains(handshakes), "must be 1 to 65536"))]
    pub handshakes: usize,
}

/// Section `coding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, confique::Config)]
pub struct Coding {
    /// Where the parity of large writes is computed. "latency-sensitive": by the host's processor.
    /// "async": by the DPU. "hybrid:A:B": of A + B pieces, A by the host and B by the DPU.
    /// "hybrid:auto": by both, in proportion to their measured cost. While the host is busy, the
    /// DPU computes the parity in every mode. `outboard ec mode` changes the mode while the node
    /// runs.
    #[config(default = "async")]
    pub mode: CodingMode,
    /// Part of the DPU that computes parity: its cores ("dpu"), or the "accelerator". The
    /// accelerator emulates the one of a BlueField-3, at its measured speed, and works on host
    /// memory.
    #[config(default = "dpu")]
    pub offload: CodingOffload,
    /// Number of threads on the DPU's cores that compute parity: 1 to 64.
    #[config(default = 1, validate((1..=64).contains(dpu_threads), "must be 1 to 64"))]
    pub dpu_threads: usize,
    /// Number of threads on the host's processor that compute parity: 1 to 64.
    #[config(default = 1, validate((1..=64).contains(host_threads), "must be 1 to 64"))]
    pub host_threads: usize,
    /// Maximum number of pieces that wait for parity computation: 1 to 65536.
    #[config(default = 1024, validate((1..=65_536).contains(queue), "must be 1 to 65536"))]
    pub queue: usize,
    /// How long a coding place is not used after it has failed: 10ms to 1h.
    #[config(default = "2s", validate(ms_within(cool_down, 10, 3_600_000), "must be 10ms to 1h"))]
    pub cool_down: Period,
}

/// Section `network`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct Network {
    /// Transports that clients can use in addition to TCP, which always works. "auto": RDMA, if the
    /// machine has it. "tcp": none. Or a list such as "ofi:verbs" or "ofi:verbs@192.0.2.1:7701",
    /// the best first. "ofi:tcp" is libfabric over TCP.
    #[config(default = "auto", deserialize_with = stacks)]
    pub stacks: StackChoice,
    /// Receive buffers over RDMA: "shared" by all connections of a tenant, or "per-connection" for
    /// devices without shared receive queues.
    #[config(default = "shared")]
    pub receive_queue: ReceiveQueue,
    /// How long the osd polls for further messages after each message over RDMA, in microseconds,
    /// before it sleeps: 0 to 10000. Polling stops by itself when it rarely finds a message.
    #[config(default = 20, validate(*poll_us <= 10_000, "must be 0 to 10000"))]
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
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct Log {
    /// Log level: error, warn, info, debug, trace, or a filter such as "info,osd=debug".
    #[config(env = "OUTBOARD_LOG", default = "info", validate = is_filter)]
    pub level: String,
    /// Log format: "text", or "json" with one object per line.
    #[config(default = "text")]
    pub format: LogFormat,
    /// Maximum size of a role's log file. When the role starts with a larger file, it renames the
    /// file to *.log.1 and replaces the previous *.log.1.
    #[config(default = "16MiB")]
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
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct Metrics {
    /// Address of each process's Prometheus page. If the port is not 0, the supervisor uses it, and
    /// the roles use the following ports: store (or node) +1, osd +2.
    #[config(default = "127.0.0.1:0")]
    pub listen: String,
}

/// Section `supervise`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, confique::Config)]
pub struct Supervise {
    /// Pause before a dead role is restarted. The pause doubles with each restart.
    #[config(default = "100ms", validate(ms_within(backoff_min, 1, 3_600_000), "must be 1ms to 1h"))]
    pub backoff_min: Period,
    /// Maximum pause before a restart.
    #[config(default = "5s")]
    pub backoff_max: Period,
    /// After a role was ready for this long, its next restart begins with backoff_min again.
    #[config(default = "10s")]
    pub steady_after: Period,
    /// A starting role that shows no progress for this long is killed and counts as dead. The
    /// recovery of a large log counts as progress while the drive answers.
    #[config(default = "120s")]
    pub ready_timeout: Period,
    /// A role that has not stopped after this time is killed. No acknowledged change is lost.
    #[config(default = "30s")]
    pub stop_timeout: Period,
    /// A hung role is killed and restarted. A role hangs if its event loop gives no heartbeat for
    /// this long, or if calls wait this long for a checkpoint that makes no progress. 600ms to 1h;
    /// 0s switches the watchdog off. Time in which the supervisor does not run, as on a paused
    /// machine, does not count.
    #[config(default = "30s", validate(hung_after.0.is_zero() || ms_within(hung_after, 600, 3_600_000), "must be 600ms to 1h, or 0s"))]
    pub hung_after: Period,
}

/// Why a configuration does not hold.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}; check the path and its permissions", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no TOML.
    #[error("{} is not valid TOML: {reason}; correct it", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where, and what is wrong.
        reason: String,
    },
    /// The file has a key that means nothing.
    #[error("{}: unknown key `{key}`; {hint}", path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The key, with its section.
        key: String,
        /// What may be meant.
        hint: String,
    },
    /// A value is of the wrong kind or out of its range.
    #[error("{origin}: {reason}; `docs/configuration.md` and the generated file say what is possible")]
    Invalid {
        /// File and environment variables that the values came from.
        origin: String,
        /// Which value, and what is wrong.
        reason: String,
    },
}

/// Why values do not hold.
#[derive(Debug, thiserror::Error)]
enum NotPossible {
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
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
        let mut table = file;
        let mut origin = origin.to_owned();
        for key in keys() {
            if let Some(text) = env(&key.env()) {
                set(&mut table, key, key.parse(&text));
                let _ = write!(origin, ", {}", key.env());
            }
        }
        let invalid = |reason: String| ConfigError::Invalid { origin: origin.clone(), reason };
        let layer: <Config as confique::Config>::Layer =
            table.try_into().map_err(|e: toml::de::Error| invalid(key_first(&e.to_string())))?;
        let config = <Config as confique::Config>::from_layer(layer.with_fallback(Layer::default_values()))
            .map_err(|e| invalid(e.to_string()))?;
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
        self.channel.tuning().check()?;
        let Supervise { backoff_min: min, backoff_max: max, .. } = self.supervise;
        if min > max {
            return Err(NotPossible::Backoff { min, max });
        }
        Ok(())
    }
}

/// A message about a value, with its key first.
fn key_first(message: &str) -> String {
    let message = message.trim();
    match message.rsplit_once("\nin `") {
        Some((what, key)) => {
            format!("{}: {}", key.trim_end_matches('`'), what.trim_start_matches("validation failed: "))
        }
        None => message.to_owned(),
    }
}

fn within(value: u64, least: u64, most: u64) -> bool {
    (least..=most).contains(&value)
}

fn ms_within(period: &Period, least: u128, most: u128) -> bool {
    (least..=most).contains(&period.0.as_millis())
}

fn is_filter(level: &String) -> Result<(), String> {
    match tracing_subscriber::EnvFilter::try_new(level) {
        Ok(_) => Ok(()),
        Err(e) => Err(format!("no filter ({e}); use error, warn, info, debug or trace")),
    }
}

#[expect(clippy::ptr_arg, reason = "the derived code passes the field's type")]
fn are_faults(faults: &Vec<String>) -> Result<(), FaultError> {
    faults.iter().try_for_each(|text| text.parse::<Fault>().map(drop))
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
    keys().iter().find(|key| key.path() == path).map(Key::env)
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
            Value::Table(section) if keys().iter().any(|k| k.section == name) => {
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
    if let Some(key) = keys().iter().find(|k| k.section == section && k.name == name) {
        return Ok(key);
    }
    let elsewhere = keys().iter().find(|k| k.name == name).map(Key::path);
    let all = || keys().iter().map(Key::path).collect::<Vec<_>>().join(", ");
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
    for key in keys() {
        if key.section != section {
            section = key.section;
            let _ = write!(text, "\n[{section}]\n");
        }
        text.push('\n');
        for line in key.about {
            let _ = writeln!(text, "#{line}");
        }
        let _ = writeln!(text, "# Environment: {}", key.env());
        match chosen.iter().find(|(path, _)| *path == key.path()) {
            Some((_, value)) => {
                let _ = writeln!(text, "{} = {value}", key.name);
            }
            None => {
                let _ = writeln!(text, "# {} = {}", key.name, key.default_value());
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
            let error = load(text, &[]).unwrap_err().to_string();
            // The error names the key, apart from its section.
            let key = text.lines().last().unwrap().split(' ').next().unwrap();
            assert!(error.contains(key), "{text}: {error}");
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
        for key in keys() {
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

    /// `docs/configuration.md` has a row `| key | environment | default | meaning |` for each key, and no other rows. With
    /// `UPDATE_DOCS=1` the test writes them.
    #[test]
    fn the_documentation_agrees() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
        let text = std::fs::read_to_string(&path).unwrap();
        let expected: Vec<String> = keys()
            .iter()
            .map(|k| format!("| `{}` | `{}` | `{}` | {} |", k.path(), k.env(), k.default_value(), k.text()))
            .collect();
        let is_row = |line: &&str| line.starts_with("| `");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            let (head, tail) = text.split_at(text.find("| `").unwrap());
            let tail: Vec<&str> = tail.lines().skip_while(is_row).collect();
            std::fs::write(&path, format!("{head}{}\n{}\n", expected.join("\n"), tail.join("\n"))).unwrap();
            return;
        }
        let documented: Vec<&str> = text.lines().filter(is_row).collect();
        assert_eq!(documented, expected, "the table is old; UPDATE_DOCS=1 writes it");
    }
}
