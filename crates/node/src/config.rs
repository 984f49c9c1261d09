//! Configuration of a node and of its roles.
//!
//! [`Config`] declares each key once: type, default, range and description. These declarations
//! determine the file that the first `up` writes ([`config_file`](crate::config_file)), the names
//! of environment variables, and `docs/configuration.md` ([`keys`](crate::keys)).

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use base::fault::{Fault, FaultError};
use messenger::{ReceiveQueueKind, StackChoice, StackOptions};
use serde::Deserialize;
use wire::{ChannelTuning, CodingMode, CodingOffload, Placement};

use super::cpus::{Cpus, ThreadCount};
use super::logging::parse_filter;
use super::machine_memory::machine_memory;
use super::units::{self, ByteSize, MemoryAmount, OutOfRange, Period};

const MIB: u64 = 1 << 20;

/// The effective configuration, which combines the environment, the file and the defaults.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct Config {
    /// Placement of the osd. "dpu": osd and store are two processes, joined by the host-DPU
    /// channel. "host": one process contains osd and store; benchmarks use this placement as the
    /// baseline.
    #[config(default = "dpu")]
    pub placement: Placement,
    /// Address that clients connect to. The first `up` writes it into the file: port 7400, or the
    /// next free port. Port 0 selects a free port at every start; `outboard status` shows the port.
    #[config(default = "127.0.0.1:7400")]
    pub listen: String,
    /// Files or raw block devices, one per target. Paths are relative to the node's directory. The
    /// list cannot change after the node's first start.
    #[config(default = [])]
    pub targets: Vec<PathBuf>,
    /// Size of the target files that `up` creates. Existing files and devices keep their size. `up`
    /// writes each new file completely, so the file occupies its full size at once.
    #[config(default = "8GiB")]
    pub target_size: ByteSize,
    /// The store role.
    #[config(nested)]
    pub store: StoreSection,
    /// The channel between host and DPU.
    #[config(nested)]
    pub channel: ChannelSection,
    /// The osd role.
    #[config(nested)]
    pub osd: OsdSection,
    /// Erasure coding.
    #[config(nested)]
    pub coding: CodingSection,
    /// Transports for clients.
    #[config(nested)]
    pub network: NetworkSection,
    /// The control plane.
    #[config(nested)]
    pub control: ControlSection,
    /// The gateway, which serves virtual disks.
    #[config(nested)]
    pub gateway: GatewaySection,
    /// Logs.
    #[config(nested)]
    pub log: LogSection,
    /// Metrics.
    #[config(nested)]
    pub metrics: MetricsSection,
    /// The supervisor's restarts of roles.
    #[config(nested)]
    pub supervise: SuperviseSection,
    /// Faults for tests.
    #[config(nested)]
    pub debug: DebugSection,
}

/// Configuration keys of section `store`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, confique::Config)]
pub struct StoreSection {
    /// CPUs of a store whose osd emulates a DPU: "auto" (all CPUs that the emulated DPU does not
    /// use), "any", or a list such as "2,4-7".
    #[config(default = "auto")]
    pub cpus: Cpus,
    /// Number of event loops of a store that serves an osd in another process: threads that divide
    /// targets and attachments among them. "auto" (one for every four CPUs of the store, at most one
    /// per target and at most 16), or 1 to 64.
    #[config(default = "auto")]
    pub loops: ThreadCount,
    /// Memory for cached pages and values of the index, for all targets together: a size, or a
    /// percentage of the machine's memory, such as "12%". If the process's cgroup or one of its
    /// parents has a memory limit below the machine's memory, the percentage refers to the limit.
    /// Valid sizes are 4MiB to 4TiB. A percentage yields at least 4MiB and at most 4TiB. A target
    /// uses at most its equal share. It needs memory in addition: up to the size of its log for
    /// changes that no checkpoint has written, up to as much again for small overwrites, 33MiB for
    /// index pages that are being written, up to 80MiB to know which objects exist, and one
    /// thousandth of the size of the index.
    #[config(default = "12%", validate(StoreSection::CACHE.contains(&cache_bytes(*cache)), "must be 4MiB to 4TiB"))]
    pub cache: MemoryAmount,
    /// Memory for bounce buffers, per target. Reads and writes use bounce buffers if the memory of
    /// their data is unsuitable for direct I/O.
    #[config(default = "32MiB", validate(within(buffers.0, MIB, 1 << 40), "must be 1MiB to 1TiB"))]
    pub buffers: ByteSize,
}

impl StoreSection {
    /// Valid values of `store.cache`, in bytes.
    const CACHE: RangeInclusive<u64> = 4 * MIB..=1 << 42;

    /// Returns the memory for caches on this machine, in bytes.
    pub fn cache_bytes(&self) -> u64 {
        cache_bytes(self.cache)
    }
}

fn cache_bytes(cache: MemoryAmount) -> u64 {
    cache.bytes(machine_memory(), &StoreSection::CACHE)
}

/// Configuration keys of section `channel`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct ChannelSection {
    /// Size of the host memory that payload passes through between osd and store: 8MiB to 4GiB, a
    /// multiple of 4KiB.
    #[config(default = "64MiB", validate(within(window.0, 8 * MIB, 4096 * MIB) && window.0.is_multiple_of(4096), "must be 8MiB to 4GiB, a multiple of 4KiB"))]
    pub window: ByteSize,
    /// Maximum number of unanswered requests to the store: 1 to 1024.
    #[config(default = 256, validate((1..=1024).contains(requests), "must be 1 to 1024"))]
    pub requests: usize,
    /// DMA engine that moves payload between osd and store. "shm" is emulated and works on one
    /// machine. "ofi:PROVIDER" uses one-sided transfers of libfabric: "ofi:verbs" needs RDMA,
    /// "ofi:tcp" works on every machine.
    #[config(default = "shm")]
    pub engine: EngineKind,
    /// Address at which the store accepts the osd's connections of the engine ofi. The network must
    /// be trusted. The IP address selects the network device.
    #[config(default = "127.0.0.1:0")]
    pub ofi_listen: SocketAddr,
    /// Speed of the emulated engine. "memcpy": as fast as memory can be copied. "bf3-paper": as
    /// slow as the BlueField-3 that the authors of DoCeph measured: each payload chain takes 2.4 ms
    /// plus 0.38 ms per MB, one chain at a time. "bf3-serial": each request takes this time, even if
    /// several requests are in flight.
    #[config(default = "memcpy")]
    pub profile: EngineProfile,
    /// Maximum length of a DMA transfer: 4KiB to 2MiB, a multiple of 4KiB. The engine's own limit
    /// also applies.
    #[config(default = "2MiB")]
    pub max_transfer: ByteSize,
    /// Number of DMA queues to use: 1 to 64, at most as many as the engine has. One queue is
    /// reserved for short requests. With 1, short requests wait for long requests.
    #[config(default = 5)]
    pub queues: usize,
    /// Number of windows of host memory (16MiB each) that stay registered for DMA: 0 to 1048576.
    /// With 0, each request registers its window anew, like a DPU that caches no registrations.
    #[config(default = 64)]
    pub region_cache: usize,
    /// How long the osd polls for further DMA completions after each completion, in microseconds,
    /// before it sleeps: 0 to 10000. Polling stops by itself when it rarely finds a completion.
    #[config(default = 50)]
    pub poll_us: u64,
    /// How long the store polls for further doorbells after each doorbell, in microseconds: 0 to
    /// 10000. Polling uses the host's CPU time.
    #[config(default = 0, validate(ChannelSection::POLL_US.contains(host_poll_us), "must be 0 to 10000"))]
    pub host_poll_us: u64,
    /// A DMA transfer that takes longer than this counts as failed. The request of the transfer
    /// continues over the control socket.
    #[config(default = "2s", validate(ms_within(overdue, 10, 600_000), "must be 10ms to 10m"))]
    pub overdue: Period,
    /// Time after a DMA failure in which DMA is not used. A small test transfer then decides
    /// whether DMA is used again.
    #[config(default = "5s", validate(ms_within(cool_down, 10, 3_600_000), "must be 10ms to 1h"))]
    pub cool_down: Period,
    /// The store verifies the checksums of the payload of every Nth request, where N is this value.
    /// With a value above 1, the store may store damaged data. With 0, the store verifies no
    /// requests. After a DMA failure, the store verifies each of the next 256 requests, even with
    /// 0. Data of which the store computes parity is always verified.
    #[config(default = 1)]
    pub verify_every: u32,
}

impl ChannelSection {
    /// Valid values of `channel.region_cache`.
    pub const REGION_CACHE: RangeInclusive<u64> = 0..=1 << 20;
    /// Valid values of `channel.max_transfer`, in bytes.
    pub const MAX_TRANSFER: RangeInclusive<u64> = 4096..=channel::MAX_TRANSFER as u64;
    /// `channel.max_transfer` is a multiple of this size.
    pub const MAX_TRANSFER_UNIT: ByteSize = ByteSize(4096);
    /// Valid values of `channel.queues`.
    pub const QUEUES: RangeInclusive<u64> = 1..=64;
    /// Valid values of `channel.poll_us` and `channel.host_poll_us`.
    pub const POLL_US: RangeInclusive<u64> = 0..=10_000;

    /// Returns the tuning of the channel with which an osd starts.
    pub fn tuning(&self) -> ChannelTuning {
        ChannelTuning {
            pipeline: true,
            region_cache: self.region_cache as u64,
            max_transfer: self.max_transfer.0,
            dma_queues: self.queues as u64,
            poll_us: self.poll_us,
        }
    }

    /// Checks that the values of a tuning are valid. The same limits apply to the configuration.
    ///
    /// # Errors
    /// The error names the first value that is not allowed.
    pub fn check_tuning(tuning: &ChannelTuning) -> Result<(), OutOfRange> {
        units::within("channel.region_cache", tuning.region_cache, ChannelSection::REGION_CACHE)?;
        units::within("channel.max_transfer", tuning.max_transfer, ChannelSection::MAX_TRANSFER)?;
        let (max_transfer, unit) = (ByteSize(tuning.max_transfer), ChannelSection::MAX_TRANSFER_UNIT);
        units::multiple("channel.max_transfer", max_transfer, unit)?;
        units::within("channel.queues", tuning.dma_queues, ChannelSection::QUEUES)?;
        units::within("channel.poll_us", tuning.poll_us, ChannelSection::POLL_US)
    }
}

/// DMA engine that moves payload between osd and store.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum EngineKind {
    /// Emulated engine: a thread copies between two memories of this machine.
    Shm,
    /// One-sided transfers with this libfabric provider.
    Ofi(String),
}

impl TryFrom<String> for EngineKind {
    type Error = String;

    fn try_from(text: String) -> Result<EngineKind, String> {
        match text.split_once(':') {
            None if text == "shm" => Ok(EngineKind::Shm),
            Some(("ofi", provider)) if !provider.is_empty() => Ok(EngineKind::Ofi(provider.to_owned())),
            _ => Err(format!("{text:?} is neither \"shm\" nor \"ofi:PROVIDER\", e.g. \"ofi:verbs\"")),
        }
    }
}

/// Speed of the emulated engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineProfile {
    /// As fast as memory can be copied.
    Memcpy,
    /// As slow as the BlueField-3 that the authors of DoCeph measured.
    Bf3Paper,
    /// As slow as `Bf3Paper`, but requests that share a chain do not share its fixed time.
    Bf3Serial,
}

/// Configuration keys of section `debug`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct DebugSection {
    /// Faults to inject, e.g. ["dma.transfer=fail,probability=0.001"]; see `outboard debug fault
    /// --help`. In the environment variable, colons separate the faults.
    #[config(default = [], validate = are_faults)]
    pub faults: Vec<String>,
}

/// Configuration keys of section `osd`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct OsdSection {
    /// CPUs of an osd that emulates a DPU: "auto" (the last quarter of the machine's CPUs, at least
    /// one), "any", or a list such as "2,4-7".
    #[config(default = "auto")]
    pub cpus: Cpus,
    /// Number of shards of the osd: threads that divide placement groups, connections and the channel
    /// among them. "auto" (one for each CPU of an osd that emulates or runs on a DPU, at most 16, and
    /// at most as many as there are free ports in a row; one if `network.stacks` names a port), or 1
    /// to 64. Shard n listens to the port of `listen` plus n.
    #[config(default = "auto")]
    pub shards: ThreadCount,
    /// Whether to start with a map of the node that this DPU has not sealed. If keys/dpu was lost, set
    /// it for one start, with OUTBOARD_OSD_ACCEPT_ALTERED_MAP=true. Then check tenants, users and
    /// rights, because the storage host may have changed them.
    #[config(default = false)]
    pub accept_altered_map: bool,
    /// Memory for the data of reads, and of writes that the osd pulls from clients. When this memory
    /// is used up, these requests wait. At least 8MiB, a multiple of 4MiB. Writes of up to 256KiB
    /// contain their data and use other memory: up to 256KiB for each of the requests that are
    /// executed (osd.requests_per_connection), and per connection 4MiB for waiting requests. The
    /// shards divide this memory; each has at least 8MiB.
    #[config(default = "128MiB", validate(within(staging.0, 8 * MIB, 1 << 40) && staging.0.is_multiple_of(4 * MIB), "must be 8MiB to 1TiB, a multiple of 4MiB"))]
    pub staging: ByteSize,
    /// How long a request waits for a store that restarts, or for an unresponsive target that the
    /// request needs. After this time, the osd tells the client to retry.
    #[config(default = "30s")]
    pub store_patience: Period,
    /// Maximum time of one bulk transfer from or to a client.
    #[config(default = "30s")]
    pub transfer_timeout: Period,
    /// How long a target of a redundant pool may take to answer: 100ms to 10m. After this time, the
    /// pool continues without the target, if enough other targets answer.
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
    /// an object changed while a target was missing. Above the limit, a returning target gets a
    /// copy of every object.
    #[config(default = 65536, validate((1..=16_777_216).contains(missed_objects_per_pg), "must be 1 to 16777216"))]
    pub missed_objects_per_pg: usize,
    /// The results of a client's requests expire after the client has changed nothing for this
    /// long. Only the time that the node runs counts. A retry after the expiry is refused.
    #[config(default = "24h")]
    pub session_expiry: Period,
    /// File of the witness, which knows the last state of each redundant placement group. A relative
    /// path starts at the node's directory. The file must not be on a drive of the node's targets.
    #[config(default = "witness")]
    pub witness: String,
    /// The parts of an unfinished upload are removed when they are this old and their uploader has
    /// disconnected.
    #[config(default = "1h")]
    pub orphan_grace: Period,
    /// Pause between two searches for parts of unfinished uploads.
    #[config(default = "10m")]
    pub collect_interval: Period,
    /// Maximum number of requests of one session that are executed at a time on a connection: 1 to
    /// 4096.
    #[config(default = 256, validate((1..=4096).contains(requests_per_connection), "must be 1 to 4096"))]
    pub requests_per_connection: usize,
    /// Maximum number of sessions, and of client connections to each shard: 1 to 65536; fewer
    /// connections if the limit on open files is low. At the limit, a new connection replaces the
    /// longest-silent connection of an address with more than its fair share.
    #[config(default = 4096, validate((1..=65_536).contains(sessions), "must be 1 to 65536"))]
    pub sessions: usize,
    /// Maximum number of connections whose handshake is incomplete: 1 to 65536; fewer if the limit
    /// on open files is low. A handshake may take up to 5 s. At the limit, a new handshake replaces
    /// the oldest handshake of an address with more than its fair share.
    #[config(default = 256, validate((1..=65_536).contains(handshakes), "must be 1 to 65536"))]
    pub handshakes: usize,
}

impl OsdSection {
    /// Returns the number of shards of an osd of this process that emulates a DPU; 1 if the operating
    /// system does not report the CPUs.
    pub fn shards(&self) -> u16 {
        self.shards.shards(self.cpus).unwrap_or(1)
    }
}

/// Configuration keys of section `coding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, confique::Config)]
pub struct CodingSection {
    /// Where the parity of large writes is computed. "latency-sensitive": by the host's processor.
    /// "async": by the DPU. "hybrid:A:B": of every A + B coding tasks, A by the host and B by the
    /// DPU. "hybrid:auto": by both, in a ratio that follows the load and the measured speed of
    /// both. While the host is busy, the DPU computes the parity in every mode. `outboard ec mode`
    /// changes the mode while the node runs.
    #[config(default = "async")]
    pub mode: CodingMode,
    /// Part of the DPU that computes parity: its cores ("dpu"), the "accelerator", or "both", in which
    /// case each task runs on the device that is predicted to finish it sooner. The accelerator is
    /// emulated: it has the measured speed of the accelerator of a BlueField-3, and works on host
    /// memory.
    #[config(default = "dpu")]
    pub offload: CodingOffload,
    /// Number of threads on the DPU's cores that compute parity and reconstruct large fragments: 1
    /// to 64. The shards of the osd divide these threads; each has at least one.
    #[config(default = 1, validate((1..=64).contains(dpu_threads), "must be 1 to 64"))]
    pub dpu_threads: usize,
    /// Number of threads on the host's processor that compute parity: 1 to 64. Each shard of the osd
    /// reckons with an equal part of these threads, and with at least one.
    #[config(default = 1, validate((1..=64).contains(host_threads), "must be 1 to 64"))]
    pub host_threads: usize,
    /// Maximum number of coding tasks that wait for parity computation: 1 to 65536. The shards of the
    /// osd divide this number; each has at least one.
    #[config(default = 1024, validate((1..=65_536).contains(queue), "must be 1 to 65536"))]
    pub queue: usize,
    /// How long a coding place is not used after it has failed: 10ms to 1h.
    #[config(default = "2s", validate(ms_within(cool_down, 10, 3_600_000), "must be 10ms to 1h"))]
    pub cool_down: Period,
    /// Utilization of the host's CPUs at which the host counts as busy, in percent: 1 to 100. The work
    /// of coding itself does not count.
    #[config(default = 90, validate((1..=100).contains(busy_utilization), "must be 1 to 100"))]
    pub busy_utilization: u32,
    /// Utilization below which a busy host becomes calm, in percent: 1 to 100, at most
    /// `coding.busy_utilization`.
    #[config(default = 75, validate((1..=100).contains(calm_utilization), "must be 1 to 100"))]
    pub calm_utilization: u32,
    /// Share of time in which threads wait for a CPU (PSI) at which the host counts as busy, in percent:
    /// 1 to 100. It counts only while the utilization is at least 40 %, and not beside an emulated DPU.
    #[config(default = 40, validate((1..=100).contains(busy_pressure), "must be 1 to 100"))]
    pub busy_pressure: u32,
    /// Share of time in which threads wait for a CPU below which a busy host becomes calm, in percent: 1
    /// to 100, at most `coding.busy_pressure`.
    #[config(default = 20, validate((1..=100).contains(calm_pressure), "must be 1 to 100"))]
    pub calm_pressure: u32,
    /// How long the load must stay below the calm limits before a busy host becomes calm: 100ms to 1h.
    #[config(default = "500ms", validate(ms_within(calm_after, 100, 3_600_000), "must be 100ms to 1h"))]
    pub calm_after: Period,
    /// Whether the store's own work (drives, index, channel) counts for the utilization of the host. On a
    /// host with few CPUs, it can make the host busy whenever clients write; with `false`, only other
    /// programs do.
    #[config(default = true)]
    pub count_store: bool,
}

/// Configuration keys of section `network`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct NetworkSection {
    /// Transports that clients can use in addition to TCP, which always works. "auto": RDMA, if the
    /// machine has it. "tcp": none. Or a list such as "ofi:verbs" or "ofi:verbs@192.0.2.1:7701",
    /// the best first. "ofi:tcp" is libfabric over TCP. Shard n of the osd listens to a named port
    /// plus n.
    #[config(default = "auto", deserialize_with = stacks)]
    pub stacks: StackChoice,
    /// Receive buffers over RDMA: "shared" by all connections of a tenant, or "per-connection" for
    /// devices without shared receive queues.
    #[config(default = "shared")]
    pub receive_queue: ReceiveQueueKind,
    /// How long the osd polls for further messages after each message over RDMA, in microseconds,
    /// before it sleeps: 0 to 10000. Polling stops by itself when it rarely finds a message.
    #[config(default = 20, validate(*poll_us <= 10_000, "must be 0 to 10000"))]
    pub poll_us: u32,
}

fn stacks<'de, D: serde::Deserializer<'de>>(text: D) -> Result<StackChoice, D::Error> {
    String::deserialize(text)?.parse().map_err(serde::de::Error::custom)
}

impl NetworkSection {
    /// Returns the options of the messenger's network stack.
    pub fn options(&self) -> StackOptions {
        let spin = Duration::from_micros(self.poll_us.into());
        StackOptions { receive_queue: self.receive_queue, spin, ..StackOptions::default() }
    }
}

/// Configuration keys of section `control`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct ControlSection {
    /// Address of the control plane (gRPC), over which the node is administered: "auto" (a free port at
    /// the host of `listen`, which the osd uses again at its next starts) or an address with a port. The
    /// osd tells its clients the address.
    #[config(default = "auto")]
    pub listen: String,
}

impl ControlSection {
    /// Returns the address; `None` if the osd chooses the port.
    pub fn address(&self) -> Option<&str> {
        Some(self.listen.as_str()).filter(|listen| *listen != "auto")
    }
}

/// Configuration keys of section `gateway`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct GatewaySection {
    /// Whether `outboard up` also runs a gateway and a holder, which serve virtual disks to virtual
    /// machines and NBD clients of this machine.
    #[config(default = false)]
    pub enabled: bool,
    /// Name of the gateway. It must stay the same, because a gateway that starts again takes its own disks
    /// over.
    #[config(default = "gateway")]
    pub name: String,
    /// Credential file of the gateway's user.
    #[config(default = "credentials.toml")]
    pub credentials: String,
}

/// Configuration keys of section `log`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct LogSection {
    /// Log level: error, warn, info, debug, trace, or a filter such as "info,osd=debug".
    #[config(env = "OUTBOARD_LOG", default = "info", validate = is_filter)]
    pub level: String,
    /// Log format: "text", or "json" with one object per line.
    #[config(default = "text")]
    pub format: LogFormat,
    /// Maximum size of a role's log file. If the file is larger when the role starts, the
    /// supervisor renames it to *.log.1, which replaces the previous *.log.1.
    #[config(default = "16MiB")]
    pub max_size: ByteSize,
    /// Maximum size of the file of the audit log, log/audit.jsonl. A file that has reached it is
    /// renamed, and the last four are kept.
    #[config(default = "4MiB")]
    pub audit_size: ByteSize,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Configuration keys of section `metrics`.
#[derive(Debug, Clone, PartialEq, Eq, confique::Config)]
pub struct MetricsSection {
    /// Address of each process's Prometheus page. If the port is not 0, the supervisor uses this
    /// port, and the roles use the next ports: store (or node) +1, osd +2.
    #[config(default = "127.0.0.1:0")]
    pub listen: String,
}

/// Configuration keys of section `supervise`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, confique::Config)]
pub struct SuperviseSection {
    /// Pause before a dead role is restarted. The pause doubles with each restart.
    #[config(default = "100ms", validate(ms_within(backoff_min, 1, 3_600_000), "must be 1ms to 1h"))]
    pub backoff_min: Period,
    /// Maximum pause before a restart.
    #[config(default = "5s")]
    pub backoff_max: Period,
    /// After a role has been ready for this long, the pause before its next restart is backoff_min
    /// again.
    #[config(default = "10s")]
    pub steady_after: Period,
    /// A starting role that shows no progress for this long is killed and counts as dead. The
    /// recovery of a large log counts as progress while the drive answers.
    #[config(default = "120s")]
    pub ready_timeout: Period,
    /// Maximum time that a role may take to stop. After this time the role is killed, which loses
    /// no acknowledged change.
    #[config(default = "30s")]
    pub stop_timeout: Period,
    /// A hung role is killed and restarted. A role hangs if its event loop gives no heartbeat for
    /// this long, or if calls wait this long for a checkpoint that makes no progress. 600ms to 1h;
    /// 0s switches the watchdog off. Time in which the supervisor does not run, as on a paused
    /// machine, does not count.
    #[config(default = "30s", validate(hung_after.0.is_zero() || ms_within(hung_after, 600, 3_600_000), "must be 600ms to 1h, or 0s"))]
    pub hung_after: Period,
}

/// Reason why values are out of range, or contradict each other.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotPossible {
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
    #[error("supervise.backoff_min ({min}) exceeds supervise.backoff_max ({max})")]
    Backoff { min: Period, max: Period },
    #[error(
        "coding.calm_{what} ({calm}) exceeds coding.busy_{what} ({busy}), so the host would be busy and calm at once"
    )]
    Calm { what: &'static str, calm: u32, busy: u32 },
}

impl Config {
    /// Returns the faults to inject.
    ///
    /// # Errors
    /// If a fault cannot be parsed.
    pub fn faults(&self) -> Result<Vec<Fault>, FaultError> {
        self.debug.faults.iter().map(|text| text.parse()).collect()
    }

    /// Checks the tuning of the channel, and the rules that involve several values.
    ///
    /// # Errors
    /// If values contradict each other, or if a value of the channel is out of range.
    pub(crate) fn check(&self) -> Result<(), NotPossible> {
        ChannelSection::check_tuning(&self.channel.tuning())?;
        let SuperviseSection { backoff_min: min, backoff_max: max, .. } = self.supervise;
        if min > max {
            return Err(NotPossible::Backoff { min, max });
        }
        let limits = &self.coding;
        for (what, calm, busy) in [
            ("utilization", limits.calm_utilization, limits.busy_utilization),
            ("pressure", limits.calm_pressure, limits.busy_pressure),
        ] {
            if calm > busy {
                return Err(NotPossible::Calm { what, calm, busy });
            }
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

#[expect(clippy::ptr_arg, reason = "the derived code passes the field's type")]
fn is_filter(level: &String) -> Result<(), String> {
    parse_filter(level).map(drop)
}

#[expect(clippy::ptr_arg, reason = "the derived code passes the field's type")]
fn are_faults(faults: &Vec<String>) -> Result<(), FaultError> {
    faults.iter().try_for_each(|text| text.parse::<Fault>().map(drop))
}
