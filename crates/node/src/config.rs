//! Configuration of a node and of its roles.
//!
//! [`Config`] declares each key once: type, default, range and description. The file that the first `up`
//! writes ([`config_file`](crate::config_file)), the names of environment variables and
//! `docs/configuration.md` follow from it ([`keys`](crate::keys)).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use base::fault::{Fault, FaultError};
use messenger::{ReceiveQueueKind, StackChoice, StackOptions};
use serde::Deserialize;
use wire::{CodingMode, CodingOffload, Placement};

use super::cpus::Cpus;
use super::debug::Tuning;
use super::units::{ByteSize, OutOfRange, Period};

const MIB: u64 = 1 << 20;

/// The values that hold.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct Config {
    /// Where requests are handled: "dpu" (osd and store are two processes joined by the host-DPU channel)
    /// or "host" (one process, the baseline).
    #[config(default = "dpu")]
    pub placement: Placement,
    /// Address that clients connect to. The first `up` writes it into the file: port 7400, or the next one
    /// that is free. Port 0 takes a free port at every start; `outboard status` says which.
    #[config(default = "127.0.0.1:7400")]
    pub listen: String,
    /// Files or raw block devices, one per target; relative to the node's directory. The set is fixed once
    /// the node has started.
    #[config(default = [])]
    pub targets: Vec<PathBuf>,
    /// Size of target files that `up` makes. Existing ones and devices keep theirs. Written in full, so it
    /// takes that much space at once.
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
    /// CPUs of a store whose osd stands for a DPU: "auto" (those that the emulated DPU does not have),
    /// "any", or a list.
    #[config(default = "auto")]
    pub cpus: Cpus,
    /// Memory for index pages, per target.
    #[config(default = "32MiB", validate(within(index_cache.0, MIB, 1 << 40), "must be 1MiB to 1TiB"))]
    pub index_cache: ByteSize,
    /// Memory for decoded metadata, per target.
    #[config(default = "64MiB", validate(within(metadata_cache.0, MIB, 1 << 40), "must be 1MiB to 1TiB"))]
    pub metadata_cache: ByteSize,
    /// Memory for reads and writes whose own memory cannot go to the drive directly, per target.
    #[config(default = "32MiB", validate(within(buffers.0, MIB, 1 << 40), "must be 1MiB to 1TiB"))]
    pub buffers: ByteSize,
}

/// Section `channel`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct Channel {
    /// Host memory that a session's payload passes through: 8MiB to 4GiB, a multiple of 4KiB.
    #[config(default = "64MiB", validate(within(window.0, 8 * MIB, 4096 * MIB) && window.0.is_multiple_of(4096), "must be 8MiB to 4GiB, a multiple of 4KiB"))]
    pub window: ByteSize,
    /// Most requests to the store that are unanswered at a time: 1 to 1024.
    #[config(default = 256, validate((1..=1024).contains(requests), "must be 1 to 1024"))]
    pub requests: usize,
    /// What moves payload between osd and store: "shm" (emulated, on one machine), or "ofi:PROVIDER",
    /// one-sided transfers by libfabric: "ofi:verbs" where there is RDMA, "ofi:tcp" anywhere.
    #[config(default = "shm")]
    pub engine: Engine,
    /// Address at which the store can be reached by the engine ofi, in a trusted network. Its IP address
    /// chooses the device.
    #[config(default = "127.0.0.1:0")]
    pub ofi_listen: SocketAddr,
    /// How fast the emulated engine is: "memcpy", or "bf3-paper" (as DoCeph measured a BlueField-3: payload
    /// takes 2.4 ms and 0.38 ms per MB, one chain at a time).
    #[config(default = "memcpy")]
    pub profile: Profile,
    /// Longest DMA transfer: 4KiB to 2MiB, a multiple of 4KiB. The engine's own limit holds in any case.
    #[config(default = "2MiB")]
    pub max_transfer: ByteSize,
    /// Queues of the DMA engine that are used: 1 to 64, at most what it has. One is for short requests;
    /// with 1 they wait for long ones.
    #[config(default = 5)]
    pub queues: usize,
    /// Parts of host memory (16MiB each) that stay open to DMA. 0 opens one anew for every request, as a
    /// DPU without such a cache would.
    #[config(default = 64)]
    pub region_cache: usize,
    /// How long the DPU's side looks for completions after one has come, in microseconds, before it sleeps:
    /// 0 to 10000. It stops by itself where that does not pay.
    #[config(default = 50)]
    pub poll_us: u64,
    /// The same for the store's side, whose CPU time is the host's: 0 to 10000.
    #[config(default = 0, validate(*host_poll_us <= 10_000, "must be 0 to 10000"))]
    pub host_poll_us: u64,
    /// A DMA transfer that takes longer counts as failed: its request goes on by the socket.
    #[config(default = "2s", validate(ms_within(overdue, 10, 600_000), "must be 10ms to 10m"))]
    pub overdue: Period,
    /// How long DMA is left alone after it has failed; then a small transfer decides whether it is used
    /// again.
    #[config(default = "5s", validate(ms_within(cool_down, 10, 3_600_000), "must be 10ms to 1h"))]
    pub cool_down: Period,
    /// The store compares the payload of one in so many requests with its checksums when it has come by
    /// DMA; 0 for none. After a failure it looks at the next 256 in any case.
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
    /// What goes wrong on purpose, e.g. ["dma.transfer=fail,probability=0.001"]; see `outboard debug fault
    /// --help`. In the environment separated by colons.
    #[config(default = [], validate = are_faults)]
    pub faults: Vec<String>,
}

/// Section `osd`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, confique::Config)]
pub struct Osd {
    /// CPUs of an osd that stands for a DPU: "auto" (an emulated DPU has the last quarter of the machine's,
    /// at least one), "any", or a list such as "2,4-7".
    #[config(default = "auto")]
    pub cpus: Cpus,
    /// Memory for payload between client and store; requests wait when it is used up. At least 8MiB, a
    /// multiple of 4MiB.
    #[config(default = "128MiB", validate(within(staging.0, 8 * MIB, 1 << 40) && staging.0.is_multiple_of(4 * MIB), "must be 8MiB to 1TiB, a multiple of 4MiB"))]
    pub staging: ByteSize,
    /// How long requests wait for a store that is restarting, or for a target that they need and that does
    /// not answer, before clients are told to retry.
    #[config(default = "30s")]
    pub store_patience: Period,
    /// How long one transfer from or to a client may take.
    #[config(default = "30s")]
    pub transfer_timeout: Period,
    /// How long a target may take to answer where others have the object, too; after that they go on
    /// without it, if enough of them answer: 100ms to 10m.
    #[config(default = "10s", validate(ms_within(target_timeout, 100, 600_000), "must be 100ms to 10m"))]
    pub target_timeout: Period,
    /// Most bytes a second that rebuilds and scrubs move; 0 for no limit. `outboard target rate` changes it
    /// while the node runs.
    #[config(default = "0B")]
    pub rebuild_rate: ByteSize,
    /// Part of the time that rebuilds and scrubs take while clients are served, in percent: 1 to 100.
    #[config(default = 25, validate((1..=100).contains(rebuild_share), "must be 1 to 100"))]
    pub rebuild_share: u32,
    /// Objects of a placement group that are noted by name when they change while a target is away: 1 to
    /// 16777216. Beyond that the target gets everything anew when it comes back.
    #[config(default = 65536, validate((1..=16_777_216).contains(missed_objects_per_pg), "must be 1 to 16777216"))]
    pub missed_objects_per_pg: usize,
    /// Clients that changed nothing for that long, while the node ran, lose the record of what they did; a
    /// retry that comes later is refused.
    #[config(default = "24h")]
    pub session_expiry: Period,
    /// Parts of an unfinished upload are removed when they are that old and their uploader has gone.
    #[config(default = "1h")]
    pub orphan_grace: Period,
    /// Pause between two searches for such parts.
    #[config(default = "10m")]
    pub collect_interval: Period,
    /// Most requests of one client worked on at a time: 1 to 4096.
    #[config(default = 256, validate((1..=4096).contains(requests_per_connection), "must be 1 to 4096"))]
    pub requests_per_connection: usize,
    /// Most clients known at a time: 1 to 65536; fewer if the limit on open files is low. One more takes
    /// the place of the longest-silent client at an address with more than its fair share.
    #[config(default = 4096, validate((1..=65_536).contains(sessions), "must be 1 to 65536"))]
    pub sessions: usize,
    /// Most connections at a time whose clients have not introduced themselves yet, which they may take 5 s
    /// for: 1 to 65536; fewer if the limit on open files is low. One more takes the place of the oldest one
    /// at an address with more than its fair share.
    #[config(default = 256, validate((1..=65_536).contains(handshakes), "must be 1 to 65536"))]
    pub handshakes: usize,
}

/// Section `coding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, confique::Config)]
pub struct Coding {
    /// Where the parity of large writes is computed: "latency-sensitive" (the host's processor), "async"
    /// (the DPU), "hybrid:A:B" (of A + B pieces A by the host), "hybrid:auto" (both, by what they turn out
    /// to cost). While the host is busy, the DPU in any case. `outboard ec mode` changes it while the node
    /// runs.
    #[config(default = "async")]
    pub mode: CodingMode,
    /// What of the DPU computes: its cores ("dpu"), or "accelerator": as a BlueField-3's, which works on
    /// host memory; emulated, and as slow as that was found to be.
    #[config(default = "dpu")]
    pub offload: CodingOffload,
    /// Threads of the DPU's cores that compute parity: 1 to 64.
    #[config(default = 1, validate((1..=64).contains(dpu_threads), "must be 1 to 64"))]
    pub dpu_threads: usize,
    /// Threads of the host's processor that do: 1 to 64.
    #[config(default = 1, validate((1..=64).contains(host_threads), "must be 1 to 64"))]
    pub host_threads: usize,
    /// Most pieces of work that wait: 1 to 65536.
    #[config(default = 1024, validate((1..=65_536).contains(queue), "must be 1 to 65536"))]
    pub queue: usize,
    /// How long a place that failed is left alone: 10ms to 1h.
    #[config(default = "2s", validate(ms_within(cool_down, 10, 3_600_000), "must be 10ms to 1h"))]
    pub cool_down: Period,
}

/// Section `network`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct Network {
    /// How clients can connect beside TCP, which always works: "auto" (RDMA, if the machine has it), "tcp"
    /// (not at all), or a list such as "ofi:verbs" or "ofi:verbs@192.0.2.1:7701", the best first; "ofi:tcp"
    /// is the same over TCP.
    #[config(default = "auto", deserialize_with = stacks)]
    pub stacks: StackChoice,
    /// Whose receive buffers are, over RDMA: "shared" by the connections of a tenant, or "per-connection"
    /// for devices that cannot share them.
    #[config(default = "shared")]
    pub receive_queue: ReceiveQueue,
    /// How long the osd looks for messages after one has come over RDMA, in microseconds, before it sleeps:
    /// 0 to 10000. It stops by itself where that does not pay.
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
    /// What is logged: error, warn, info, debug, trace, or a filter such as "info,osd=debug".
    #[config(env = "OUTBOARD_LOG", default = "info", validate = is_filter)]
    pub level: String,
    /// "text" or "json" (one object per line).
    #[config(default = "text")]
    pub format: LogFormat,
    /// A role's log file larger than this is renamed to *.log.1 when the role starts, replacing the one
    /// before.
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
    /// Address of each process's Prometheus page. With a port other than 0, the supervisor takes it and the
    /// roles the ones that follow: store (or node) +1, osd +2.
    #[config(default = "127.0.0.1:0")]
    pub listen: String,
}

/// Section `supervise`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, confique::Config)]
pub struct Supervise {
    /// Pause before a dead role is restarted; doubles each time.
    #[config(default = "100ms", validate(ms_within(backoff_min, 1, 3_600_000), "must be 1ms to 1h"))]
    pub backoff_min: Period,
    /// Longest pause before a restart.
    #[config(default = "5s")]
    pub backoff_max: Period,
    /// A role that was ready for this long starts again at backoff_min.
    #[config(default = "10s")]
    pub steady_after: Period,
    /// A role that is not ready and has shown no progress for this long is killed and counts as dead. The
    /// recovery of a large log is progress while its drive answers.
    #[config(default = "120s")]
    pub ready_timeout: Period,
    /// A role that has not stopped after this is killed; nothing acknowledged is lost.
    #[config(default = "30s")]
    pub stop_timeout: Period,
    /// A role whose event loop gives no heartbeat for this long hangs, and so does one whose target has had
    /// calls wait this long for a checkpoint that makes no progress: it is killed and started again. 600ms
    /// to 1h; 0s switches the watchdog off. Time in which the supervisor does not run either, as on a
    /// paused machine, does not count.
    #[config(default = "30s", validate(hung_after.0.is_zero() || ms_within(hung_after, 600, 3_600_000), "must be 600ms to 1h, or 0s"))]
    pub hung_after: Period,
}

/// Why values do not hold.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotPossible {
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
    #[error("supervise.backoff_min ({min}) exceeds supervise.backoff_max ({max})")]
    Backoff { min: Period, max: Period },
}

impl Config {
    /// What is to go wrong on purpose.
    ///
    /// # Errors
    /// If one of them means nothing.
    pub fn faults(&self) -> Result<Vec<Fault>, FaultError> {
        self.debug.faults.iter().map(|text| text.parse()).collect()
    }

    /// Checks the rules that concern several values.
    ///
    /// # Errors
    /// If values do not fit together.
    pub(crate) fn check(&self) -> Result<(), NotPossible> {
        self.channel.tuning().check()?;
        let Supervise { backoff_min: min, backoff_max: max, .. } = self.supervise;
        if min > max {
            return Err(NotPossible::Backoff { min, max });
        }
        Ok(())
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
