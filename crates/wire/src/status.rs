//! State of a node, as people and tools see it.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{CodingMode, CodingOffload, OffloadState, Placement, Redundancy};

/// A pool.
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
    /// Bytes of staged data.
    pub staged: u64,
    /// Number of free extents in the data area.
    pub free_extents: u64,
    /// Length of the longest free extent.
    pub largest_free_extent: u64,
    /// Free bytes of the index.
    pub index_free: u64,
    /// Size of the index.
    pub index_total: u64,
}

/// Health of a pool with redundancy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolHealth {
    /// Name of the pool.
    pub pool: String,
    /// Number of placement groups.
    pub groups: u32,
    /// Placement groups that are degraded: they work with fewer targets than they should have.
    pub degraded: u32,
    /// Placement groups with too few targets to work, or not checked yet.
    pub unavailable: u32,
}

/// The running rebuild, and totals since the OSD started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebuildStatus {
    /// The target that the rebuild writes to, if any.
    pub target: Option<Uuid>,
    /// The pool whose objects are being rebuilt.
    pub pool: Option<String>,
    /// Objects rebuilt.
    pub objects: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Maximum rate, in bytes per second; 0 for no limit.
    pub rate_limit: u64,
    /// Reason of the last restart of a rebuild.
    pub last_failure: Option<String>,
}

/// Progress of a scrub.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// Whether the scrub is running.
    pub running: bool,
    /// Number of placement groups to scrub; 0 if there never was a scrub.
    pub groups: u32,
    /// Number of placement groups already scrubbed.
    pub groups_done: u32,
    /// Objects scrubbed.
    pub objects: u64,
    /// Bytes read from all fragments.
    pub bytes: u64,
    /// Fragments that were unreadable or wrong.
    pub damaged: u64,
    /// Damaged fragments that were repaired.
    pub repaired: u64,
    /// Objects whose fragments are readable but contradict each other.
    pub inconsistent: u64,
    /// Objects whose data differs in size from their record.
    pub wrong_size: u64,
    /// Objects of the wrong size whose data was set to the recorded size.
    pub resized: u64,
    /// Reason why the scrub ended early, if it did.
    pub failure: Option<String>,
}

/// Whether placement groups with redundancy use a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetState {
    /// The target is used.
    Up,
    /// The target has not answered in time, and is being probed. Only placement groups that cannot
    /// work without the target wait for it.
    Slow,
    /// The target has reported an I/O error, and is being probed.
    Failing,
    /// The target has failed. It is used again after a remount, or when the operator requests it.
    Failed,
}

/// A target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetStatus {
    /// Id of the target.
    pub uuid: Uuid,
    /// Whether the operator has taken the target out of use.
    pub out: bool,
    /// Whether the target lacks changes that placement groups made without it.
    pub behind: bool,
    /// Whether the target is used.
    pub state: TargetState,
    /// Reason why placement groups with redundancy do not use the target.
    pub failure: Option<String>,
    /// Time until the next probe, in milliseconds. `None` if the target is in use, is being probed,
    /// or will not be probed.
    pub next_try_ms: Option<u64>,
    /// Space of the target, or the reason why it is unknown.
    pub space: Result<Space, String>,
}

/// Number and times of completed requests. A request's time runs from its arrival at the OSD until
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
    /// Time in which a transfer waited to start, and neither the store worked nor data moved, in
    /// ns.
    pub dma_wait_ns: u64,
    /// Remaining time, in ns: network, messenger and the OSD's own work.
    pub others_ns: u64,
}

/// Times of requests since the OSD started, by kind of request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestTimes {
    /// Changes of objects.
    pub write: PhaseTimes,
    /// Reads of objects' data.
    pub read: PhaseTimes,
    /// All other requests.
    pub other: PhaseTimes,
}

/// Health of the offload that moves data between OSD and store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadStatus {
    /// State of its circuit breaker.
    pub state: OffloadState,
    /// Number of failures.
    pub failures: u64,
    /// Number of probes that failed.
    pub failed_probes: u64,
    /// Number of recoveries found by a probe.
    pub recoveries: u64,
    /// Reason of the last failure, or why the offload is not in use.
    pub last_failure: Option<String>,
    /// Bytes of memory in quarantine, because a late transfer may still access them.
    pub quarantined_bytes: u64,
    /// Bytes that had already arrived when the offload failed, and were not sent again, during this
    /// attachment to the store.
    pub kept_bytes: u64,
    /// Bytes that went over the control socket instead, during this attachment to the store.
    pub fallback_bytes: u64,
    /// Faults that a test or operator has armed.
    pub faults: Vec<String>,
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
    /// Last measured utilization of the host's processor, in percent, without coding tasks and
    /// without the emulation of the DPU.
    pub host_utilization_percent: u32,
    /// Share of time in which some task waited for the host's processor, in percent. `None` if the
    /// kernel does not report it.
    pub host_pressure_percent: Option<u32>,
    /// Coding tasks that wait for a place.
    pub queued: u64,
    /// Data of the waiting tasks, in bytes.
    pub queued_bytes: u64,
    /// Coding tasks refused because too many were waiting.
    pub refused: u64,
    /// Tasks sent to the host during the last second.
    pub alpha: u64,
    /// Tasks sent to the offload during the last second.
    pub beta: u64,
    /// State of the host as a coding place.
    pub host: CodingPlaceStatus,
    /// State of the offload as a coding place.
    pub offload: CodingPlaceStatus,
}

/// State of a coding place. Counts start when the OSD starts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingPlaceStatus {
    /// Number of tasks running at the place.
    pub in_service: u64,
    /// Maximum number of tasks running at a time.
    pub slots: u64,
    /// Number of tasks sent to the place, by reason.
    pub sent: CodingSent,
    /// Estimated fixed cost per task, in ns; `None` before the first measurement.
    pub ns_per_task: Option<u64>,
    /// Estimated additional cost per megabyte (10^6 bytes), in ns.
    pub ns_per_mb: Option<u64>,
    /// Health of the place.
    pub health: CodingHealth,
}

/// Number of tasks sent to a coding place, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingSent {
    /// Tasks that the coding mode sent to this place.
    pub mode: u64,
    /// Tasks sent because the host was busy.
    pub busy: u64,
    /// Tasks sent because the other place was in its cool-down.
    pub cool_down: u64,
    /// Tasks sent to probe whether the place works again.
    pub probe: u64,
    /// Tasks sent to measure the place's cost.
    pub explore: u64,
}

impl CodingSent {
    /// Returns the number of tasks for all reasons.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.mode + self.busy + self.cool_down + self.probe + self.explore
    }
}

/// Health of a coding place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingHealth {
    /// State of its circuit breaker.
    pub state: OffloadState,
    /// Number of failures.
    pub failures: u64,
    /// Number of probes that failed.
    pub failed_probes: u64,
    /// Number of recoveries found by a probe.
    pub recoveries: u64,
    /// Reason of the last failure.
    pub last_failure: Option<String>,
}

/// Limits of the listener, and counts of refused and reclaimed connections since the OSD started.
/// Each count names the scarce resource: `handshakes`, `sessions` (connections), `detached`
/// (connections that wait for their clients) or `descriptors`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ConnectionStatus {
    /// Most connections at a time. A low limit on open files reduces the configured number.
    pub max_sessions: u64,
    /// Most handshakes at a time.
    pub max_handshakes: u64,
    /// Handshakes and connections that lost their place to another client.
    pub reclaimed: Vec<(String, u64)>,
    /// Connections refused for lack of a place. For `descriptors`, failed attempts to accept a
    /// connection.
    pub refused: Vec<(String, u64)>,
}

/// State of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// The node's id.
    pub node: Uuid,
    /// Where the OSD runs.
    pub placement: Placement,
    /// Name of the engine that moves data between OSD and store.
    pub engine: String,
    /// Whether the engine is emulated.
    pub emulated: bool,
    /// Process id of the OSD.
    pub osd_pid: u32,
    /// Seconds since the OSD started.
    pub uptime_seconds: u64,
    /// Map epoch of the node.
    pub map_epoch: u64,
    /// Health of the pools with redundancy.
    pub health: Vec<PoolHealth>,
    /// State of rebuilds.
    pub rebuild: RebuildStatus,
    /// The targets, ordered by number.
    pub targets: Vec<TargetStatus>,
    /// The pools.
    pub pools: Vec<PoolInfo>,
    /// Transports other than TCP that clients can use: the kind and the OSD's address.
    pub paths: Vec<(String, String)>,
    /// Number of connected sessions.
    pub sessions: u32,
    /// Number of connected sessions that use one-sided transfers (RDMA) for bulk data now.
    pub sessions_one_sided: u32,
    /// Limits on connections, and counts of refused and reclaimed ones.
    pub connections: ConnectionStatus,
    /// Number of requests in progress.
    pub requests: u32,
    /// Health of the offload between OSD and store, if there is one.
    pub offload: Option<OffloadStatus>,
    /// State of parity computation.
    pub coding: CodingStatus,
    /// Bytes of staging memory: total, now free, and the minimum ever free.
    pub staging: [u64; 3],
    /// Times of requests, by kind and phase.
    pub times: RequestTimes,
    /// Time of the OSD's thread since it started, in ns. Each entry is a thread class (`msgr`,
    /// `osd` or `chan`) and the time in tasks of that class.
    pub thread_ns: Vec<(String, u64)>,
}
