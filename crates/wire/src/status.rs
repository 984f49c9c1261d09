//! The status of a node, which commands show to operators and tools evaluate.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{CodingMode, CodingOffload, OffloadState, Placement, Redundancy};

/// Properties of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolInfo {
    /// Number of the pool; never reused.
    pub id: u32,
    /// Name of the pool.
    pub name: String,
    /// Number of placement groups.
    pub pg_count: u32,
    /// Redundancy scheme of the pool.
    pub redundancy: Redundancy,
    /// Time of creation, in milliseconds since 1970.
    pub made_ms: u64,
}

/// Space of a target, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    /// Size of the data area.
    pub total: u64,
    /// Free bytes of the data area.
    pub free: u64,
    /// Bytes of stages: data on the drive that no transaction refers to yet.
    pub staged: u64,
    /// Number of free extents in the data area.
    pub free_extents: u64,
    /// Length of the longest free extent.
    pub largest_free_extent: u64,
    /// Free bytes of the index.
    pub index_free: u64,
    /// Size of the index.
    pub index_total: u64,
    /// Free bytes of the log. A checkpoint makes the log's used bytes free.
    pub log_free: u64,
    /// Size of the log.
    pub log_total: u64,
    /// Memory of the cached values of the index, approximately.
    pub cache_used: u64,
    /// Maximum memory of the cached values of the index.
    pub cache_limit: u64,
}

/// Health of a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolHealth {
    /// Name of the pool.
    pub pool: String,
    /// Number of placement groups.
    pub groups: u32,
    /// Placement groups that are degraded: they work with fewer targets than they should have.
    pub degraded: u32,
    /// Placement groups that have too few targets to work, or that were not checked yet.
    pub unavailable: u32,
}

/// Status of the running rebuild, and totals of all rebuilds since the osd started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebuildStatus {
    /// The target that the rebuild writes to, if any.
    pub target: Option<Uuid>,
    /// The pool whose objects are being rebuilt.
    pub pool: Option<String>,
    /// Number of objects rebuilt since the osd started.
    pub objects: u64,
    /// Number of bytes that rebuilds wrote since the osd started.
    pub bytes: u64,
    /// Maximum rate, in bytes per second; 0 for no limit.
    pub rate_limit: u64,
    /// Reason of the last failure of a rebuild. The rebuild was started again after this failure.
    pub last_failure: Option<String>,
}

/// Adds the rebuilds of another shard. Keeps the first running rebuild and the first failure. All
/// shards together have one rate limit.
impl AddAssign for RebuildStatus {
    fn add_assign(&mut self, other: RebuildStatus) {
        if self.target.is_none() {
            (self.target, self.pool) = (other.target, other.pool);
        }
        self.objects += other.objects;
        self.bytes += other.bytes;
        self.rate_limit = self.rate_limit.max(other.rate_limit);
        self.last_failure = self.last_failure.take().or(other.last_failure);
    }
}

/// Progress of a scrub.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// Whether the scrub is running.
    pub running: bool,
    /// Number of placement groups to scrub; 0 if the pool has not been scrubbed.
    pub groups: u32,
    /// Number of placement groups already scrubbed.
    pub groups_done: u32,
    /// Number of objects scrubbed.
    pub objects: u64,
    /// Number of bytes read, summed over all fragments.
    pub bytes: u64,
    /// Number of fragments that were unreadable or had wrong content.
    pub damaged: u64,
    /// Number of damaged fragments that were repaired.
    pub repaired: u64,
    /// Number of objects whose fragments are readable but contradict each other.
    pub inconsistent: u64,
    /// Number of objects whose data has a size that differs from the size in the object's record.
    pub wrong_size: u64,
    /// Number of objects of wrong size whose data was extended to the size in the object's record.
    pub resized: u64,
    /// Reason why the scrub ended early, if it did.
    pub failure: Option<String>,
}

/// Adds the progress of another shard. Keeps the first failure.
impl AddAssign for ScrubStatus {
    fn add_assign(&mut self, other: ScrubStatus) {
        self.groups += other.groups;
        self.groups_done += other.groups_done;
        self.objects += other.objects;
        self.bytes += other.bytes;
        self.damaged += other.damaged;
        self.repaired += other.repaired;
        self.inconsistent += other.inconsistent;
        self.wrong_size += other.wrong_size;
        self.resized += other.resized;
        self.running |= other.running;
        self.failure = self.failure.take().or(other.failure);
    }
}

/// State of a target, which decides whether placement groups with redundancy use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetState {
    /// The target is used.
    Up,
    /// The target did not answer in time, and is being probed. Placement groups that cannot work
    /// without the target wait for it; all other groups continue without it.
    Slow,
    /// The target reported an I/O error, and is being probed.
    Failing,
    /// The target has failed. It is used again after a remount, or when the operator requests it.
    Failed,
}

/// Status of a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetStatus {
    /// Id of the target.
    pub uuid: Uuid,
    /// Whether the operator has taken the target out of use.
    pub out: bool,
    /// Whether the operator has accepted the loss of what only this target has.
    pub forgotten: bool,
    /// Whether the target has gone back to an earlier state, so that pools without redundancy do not
    /// use it.
    pub went_back: bool,
    /// Whether the target lacks changes that placement groups made without it.
    pub behind: bool,
    /// State of the target.
    pub state: TargetState,
    /// Reason why placement groups with redundancy do not use the target.
    pub failure: Option<String>,
    /// Time until the next probe, in milliseconds. `None` if the target is in use, is being probed,
    /// or will not be probed.
    pub next_try_ms: Option<u64>,
    /// Space of the target, or the reason why it is unknown.
    pub space: Result<Space, String>,
}

/// Number and times of completed requests. A request's time runs from its arrival at the osd until
/// its reply is passed to the connection. The phases do not overlap and add up to the total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseTimes {
    /// Number of requests.
    pub count: u64,
    /// Total time of all requests, in ns.
    pub total_ns: u64,
    /// Time in which the store on the host worked and no data moved between DPU and host, in ns.
    pub host_ns: u64,
    /// Time in which data moved between DPU and host, in ns.
    pub dma_ns: u64,
    /// Time in which a transfer waited to start while the store did no work and no data moved, in
    /// ns.
    pub dma_wait_ns: u64,
    /// Remaining time, in ns: network, messenger and the osd's own work.
    pub others_ns: u64,
}

impl AddAssign for PhaseTimes {
    fn add_assign(&mut self, other: PhaseTimes) {
        self.count += other.count;
        self.total_ns += other.total_ns;
        self.host_ns += other.host_ns;
        self.dma_ns += other.dma_ns;
        self.dma_wait_ns += other.dma_wait_ns;
        self.others_ns += other.others_ns;
    }
}

/// Times of requests since the osd started, by kind of request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestTimes {
    /// Times of requests that changed objects.
    pub write: PhaseTimes,
    /// Times of requests that read data of objects.
    pub read: PhaseTimes,
    /// Times of all other requests.
    pub other: PhaseTimes,
}

impl AddAssign for RequestTimes {
    fn add_assign(&mut self, other: RequestTimes) {
        self.write += other.write;
        self.read += other.read;
        self.other += other.other;
    }
}

/// Health of an offload, or of a coding place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthStatus {
    /// State of the circuit breaker.
    pub state: OffloadState,
    /// Number of failures.
    pub failures: u64,
    /// Number of probes that failed.
    pub failed_probes: u64,
    /// Number of times that a probe succeeded after a failure.
    pub recoveries: u64,
    /// Reason of the last failure, or the reason why the offload is not in use.
    pub last_failure: Option<String>,
}

/// Adds the health as another shard sees it. Keeps the state that is further from normal use.
impl AddAssign for HealthStatus {
    fn add_assign(&mut self, other: HealthStatus) {
        if other.state as u8 > self.state as u8 {
            self.state = other.state;
        }
        self.failures += other.failures;
        self.failed_probes += other.failed_probes;
        self.recoveries += other.recoveries;
        self.last_failure = self.last_failure.take().or(other.last_failure);
    }
}

/// Status of the offload that moves data between osd and store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadStatus {
    /// Health of the offload.
    pub health: HealthStatus,
    /// Bytes of memory in quarantine, because a late transfer may still access them.
    pub quarantined_bytes: u64,
    /// Number of bytes that had already arrived when the offload failed, and that were therefore
    /// not sent again. Counted since the osd attached to the store.
    pub kept_bytes: u64,
    /// Number of bytes sent over the control socket instead of by the offload. Counted since the
    /// osd attached to the store.
    pub fallback_bytes: u64,
    /// Faults that a test or operator has armed.
    pub faults: Vec<String>,
}

/// Adds the offload of another shard. All shards have the same armed faults.
impl AddAssign for OffloadStatus {
    fn add_assign(&mut self, other: OffloadStatus) {
        self.health += other.health;
        self.quarantined_bytes += other.quarantined_bytes;
        self.kept_bytes += other.kept_bytes;
        self.fallback_bytes += other.fallback_bytes;
    }
}

/// State of parity computation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingStatus {
    /// The coding mode.
    pub mode: CodingMode,
    /// The offload that computes parity; `None` without a DPU.
    pub engine: Option<CodingOffload>,
    /// Whether the offload is emulated.
    pub emulated: bool,
    /// Whether the host's processor is busy. While it is busy, all coding tasks go to the offload.
    pub host_busy: bool,
    /// Last measured utilization of the host's processor, in percent. It excludes coding tasks and
    /// the emulation of the DPU.
    pub host_utilization_percent: u32,
    /// Share of time in which at least one task of the operating system waited for the host's
    /// processor, in percent. `None` if the kernel does not report this share.
    pub host_pressure_percent: Option<u32>,
    /// Number of coding tasks that wait for a free coding place.
    pub queued: u64,
    /// Size of the data of the waiting coding tasks, in bytes.
    pub queued_bytes: u64,
    /// Number of coding tasks refused because too many were waiting.
    pub refused: u64,
    /// Number of coding tasks sent to the host during the last second.
    pub alpha: u64,
    /// Number of coding tasks sent to the offload during the last second.
    pub beta: u64,
    /// State of the host as a coding place.
    pub host: CodingPlaceStatus,
    /// State of the offload as a coding place.
    pub offload: CodingPlaceStatus,
    /// State of the DPU's devices, if it computes parity with both.
    pub devices: Option<DpuDevices>,
}

/// State of the devices of a DPU that computes parity with both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DpuDevices {
    /// The DPU's cores.
    pub cores: CodingPlaceStatus,
    /// The DPU's accelerator.
    pub accelerator: CodingPlaceStatus,
}

/// Adds the tasks of another shard. All shards have the same mode and engine.
impl AddAssign for CodingStatus {
    fn add_assign(&mut self, other: CodingStatus) {
        self.host_busy |= other.host_busy;
        self.queued += other.queued;
        self.queued_bytes += other.queued_bytes;
        self.refused += other.refused;
        self.alpha += other.alpha;
        self.beta += other.beta;
        self.host += other.host;
        self.offload += other.offload;
        if let (Some(devices), Some(other)) = (&mut self.devices, other.devices) {
            devices.cores += other.cores;
            devices.accelerator += other.accelerator;
        }
    }
}

/// State of a coding place. Counts are since the start of the osd.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingPlaceStatus {
    /// Number of tasks running at the place.
    pub in_service: u64,
    /// Maximum number of tasks running at a time.
    pub slots: u64,
    /// Number of tasks sent to the place, by reason.
    pub sent: CodingSent,
    /// Estimated fixed time per task, in ns; `None` before the first measurement.
    pub ns_per_task: Option<u64>,
    /// Estimated additional time per megabyte (10^6 bytes), in ns; `None` before the first
    /// measurement.
    pub ns_per_mb: Option<u64>,
    /// Health of the place.
    pub health: HealthStatus,
}

/// Adds the tasks of another shard. Keeps the estimates of the first shard that has any.
impl AddAssign for CodingPlaceStatus {
    fn add_assign(&mut self, other: CodingPlaceStatus) {
        self.in_service += other.in_service;
        self.slots += other.slots;
        self.sent += other.sent;
        self.ns_per_task = self.ns_per_task.or(other.ns_per_task);
        self.ns_per_mb = self.ns_per_mb.or(other.ns_per_mb);
        self.health += other.health;
    }
}

/// Number of tasks sent to a coding place, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingSent {
    /// Tasks that the coding mode sent to this place.
    pub mode: u64,
    /// Tasks sent because the host was busy.
    pub busy: u64,
    /// Tasks sent because the other coding place was in its cool-down.
    pub cool_down: u64,
    /// Tasks sent to probe whether the place works again.
    pub probe: u64,
    /// Tasks sent to measure the place's time per task.
    pub explore: u64,
    /// Tasks that could run only at this place.
    pub only: u64,
}

impl AddAssign for CodingSent {
    fn add_assign(&mut self, other: CodingSent) {
        self.mode += other.mode;
        self.busy += other.busy;
        self.cool_down += other.cool_down;
        self.probe += other.probe;
        self.explore += other.explore;
        self.only += other.only;
    }
}

impl CodingSent {
    /// Returns the number of tasks, summed over all reasons.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.mode + self.busy + self.cool_down + self.probe + self.explore + self.only
    }
}

/// Number of events since the osd started, by the resource that was exhausted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ShortageCounts {
    /// Handshakes in progress.
    pub handshakes: u64,
    /// Connections.
    pub connections: u64,
    /// Connections that wait for their clients.
    pub detached: u64,
    /// File descriptors.
    pub descriptors: u64,
    /// Sessions.
    pub sessions: u64,
}

impl AddAssign for ShortageCounts {
    fn add_assign(&mut self, other: ShortageCounts) {
        self.handshakes += other.handshakes;
        self.connections += other.connections;
        self.detached += other.detached;
        self.descriptors += other.descriptors;
        self.sessions += other.sessions;
    }
}

impl ShortageCounts {
    /// Returns the number of events, summed over all resources.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.handshakes + self.connections + self.detached + self.descriptors + self.sessions
    }
}

/// Limits of the listener, and counts of refused and reclaimed connections since the osd started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ConnectionStatus {
    /// Maximum number of simultaneous connections. A low limit on open files reduces the configured
    /// number.
    pub max_connections: u64,
    /// Maximum number of simultaneous handshakes.
    pub max_handshakes: u64,
    /// Number of handshakes and connections that were dropped in favour of another client.
    pub reclaimed: ShortageCounts,
    /// Number of connections refused because a limit was reached. For `descriptors`, the number of
    /// failed attempts to accept a connection.
    pub refused: ShortageCounts,
}

/// A transport other than TCP that clients can use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathStatus {
    /// Kind of the transport, for example `ofi:verbs`.
    pub name: String,
    /// The osd's address on this transport.
    pub endpoint: String,
}

/// Staging memory of the osd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StagingStatus {
    /// Total size, in bytes.
    pub total_bytes: u64,
    /// Free bytes now.
    pub free_bytes: u64,
    /// Lowest number of free bytes since the osd started.
    pub least_free_bytes: u64,
}

/// Adds the memory of another shard. The sum of the lowest numbers of free bytes is a lower bound.
impl AddAssign for StagingStatus {
    fn add_assign(&mut self, other: StagingStatus) {
        self.total_bytes += other.total_bytes;
        self.free_bytes += other.free_bytes;
        self.least_free_bytes += other.least_free_bytes;
    }
}

/// Time that the osd's thread spent in tasks since it started, in ns, by thread class of the task.
/// The JSON keys are the names of the thread classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ThreadTimes {
    /// Tasks of connections.
    #[serde(rename = "msgr")]
    pub messenger: u64,
    /// Tasks of requests.
    pub osd: u64,
    /// Tasks of the channel.
    #[serde(rename = "chan")]
    pub channel: u64,
}

impl AddAssign for ThreadTimes {
    fn add_assign(&mut self, other: ThreadTimes) {
        self.messenger += other.messenger;
        self.osd += other.osd;
        self.channel += other.channel;
    }
}

/// State of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// The node's id.
    pub node: Uuid,
    /// Where the osd runs.
    pub placement: Placement,
    /// Name of the engine that moves data between osd and store.
    pub engine: String,
    /// Whether the engine is emulated.
    pub emulated: bool,
    /// Process id of the osd.
    pub osd_pid: u32,
    /// Seconds since the osd started.
    pub uptime_seconds: u64,
    /// Map epoch of the node.
    pub map_epoch: u64,
    /// Whether the osd accepts a map that this DPU has not sealed (`osd.accept_altered_map`).
    pub accepts_altered_map: bool,
    /// Health of the pools with redundancy.
    pub health: Vec<PoolHealth>,
    /// State of rebuilds.
    pub rebuild: RebuildStatus,
    /// The targets, ordered by number.
    pub targets: Vec<TargetStatus>,
    /// The pools.
    pub pools: Vec<PoolInfo>,
    /// Transports other than TCP that clients can use.
    pub paths: Vec<PathStatus>,
    /// Number of connected sessions.
    pub sessions: u32,
    /// Number of connected sessions that use one-sided transfers (RDMA) for bulk data now.
    pub sessions_one_sided: u32,
    /// Limits on connections, and counts of refused and reclaimed connections.
    pub connections: ConnectionStatus,
    /// Number of requests in progress.
    pub requests: u32,
    /// Status of the offload between osd and store, if there is one.
    pub offload: Option<OffloadStatus>,
    /// State of parity computation.
    pub coding: CodingStatus,
    /// Staging memory.
    pub staging: StagingStatus,
    /// Times of requests, by kind and phase.
    pub times: RequestTimes,
    /// Time that the osd's threads spent in tasks, in ns, summed over the shards.
    pub thread_ns: ThreadTimes,
    /// The osd's shards, by number.
    pub shards: Vec<ShardStatus>,
}

/// State of one shard of the osd.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardStatus {
    /// Address that the shard listens to.
    pub endpoint: String,
    /// Number of sessions that have a connection to the shard.
    pub sessions: u32,
    /// Number of requests in progress.
    pub requests: u32,
    /// Number of requests that have ended since the osd started.
    pub completed: u64,
    /// Number of messages that the shard has sent to other shards since the osd started.
    pub messages: u64,
    /// Time that the shard's thread spent in tasks, in ns.
    pub thread_ns: ThreadTimes,
    /// Staging memory of the shard.
    pub staging: StagingStatus,
}
