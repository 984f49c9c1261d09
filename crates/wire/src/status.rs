//! State of a node, for people and their tools.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{CodingMode, CodingOffload, OffloadState, Placement, Redundancy};

/// A pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolInfo {
    /// Its number; never used again.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Number of placement groups.
    pub pg_count: u32,
    /// How its objects are kept from being lost with a target.
    pub redundancy: Redundancy,
    /// When it was made, in milliseconds since 1970.
    pub made_ms: u64,
}

/// Space of a target, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    /// For data, in all.
    pub total: u64,
    /// For data, free.
    pub free: u64,
    /// Taken by data that is being written.
    pub staged: u64,
    /// Number of pieces that the free space is in.
    pub free_extents: u64,
    /// Length of the longest of them.
    pub largest_free_extent: u64,
    /// Free bytes of the index.
    pub index_free: u64,
    /// Size of the index.
    pub index_total: u64,
}

/// How a pool with redundancy is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolHealth {
    /// Its name.
    pub pool: String,
    /// Number of its placement groups.
    pub groups: u32,
    /// Those that go on with fewer targets than they should have.
    pub degraded: u32,
    /// Those that have too few targets to go on, or have not been looked at yet.
    pub unavailable: u32,
}

/// What is being rebuilt, and what has been since the OSD was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebuildStatus {
    /// The target that is being written, if any.
    pub target: Option<Uuid>,
    /// The pool whose objects those are.
    pub pool: Option<String>,
    /// Objects rebuilt.
    pub objects: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Most bytes a second; 0 for no limit.
    pub rate_limit: u64,
    /// Why a rebuild had to start again last.
    pub last_failure: Option<String>,
}

/// How a scrub stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// Whether it goes on.
    pub running: bool,
    /// Placement groups to be looked at; 0 if there never was a scrub.
    pub groups: u32,
    /// Placement groups that have been.
    pub groups_done: u32,
    /// Objects looked at.
    pub objects: u64,
    /// Bytes read, of all fragments.
    pub bytes: u64,
    /// Fragments that could not be read or were not what they should be.
    pub damaged: u64,
    /// Those of them that were made anew.
    pub repaired: u64,
    /// Objects whose fragments can be read and contradict each other.
    pub inconsistent: u64,
    /// Objects whose data does not have the size that is recorded of them.
    pub wrong_size: u64,
    /// Those of them that were given that size.
    pub resized: u64,
    /// Why it ended early.
    pub failure: Option<String>,
}

/// Whether placement groups with redundancy use a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetState {
    /// It is used.
    Up,
    /// It has not answered in time, and is tried again. Only placement groups that cannot do without it wait for it.
    Slow,
    /// It has reported an I/O error, and is tried again.
    Failing,
    /// It has failed. It is used again when its store has mounted it anew, or when the operator says so.
    Failed,
}

/// A target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetStatus {
    /// Its id.
    pub uuid: Uuid,
    /// The operator has taken it out.
    pub out: bool,
    /// Placement groups have gone on without it, and it has not caught up yet.
    pub behind: bool,
    /// Whether it is used.
    pub state: TargetState,
    /// Why placement groups with redundancy do not use it.
    pub failure: Option<String>,
    /// Time until it is tried again, in milliseconds; `None` if it is used, is being tried, or will not be tried.
    pub next_try_ms: Option<u64>,
    /// Its space, or why it cannot be asked.
    pub space: Result<Space, String>,
}

/// Requests that were carried out, and where their time went: from a request's arrival at the OSD until its answer was
/// handed to the connection. The phases are exclusive and add up to the total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseTimes {
    /// Number of requests.
    pub count: u64,
    /// All of their time, in ns.
    pub total_ns: u64,
    /// The store on the host worked, and nothing was being transferred between DPU and host, in ns.
    pub host_ns: u64,
    /// Something was being transferred, in ns.
    pub dma_ns: u64,
    /// Something waited for its transfer, and neither of the above, in ns.
    pub dma_wait_ns: u64,
    /// The rest, in ns: the network, the messenger, the OSD's own work.
    pub others_ns: u64,
}

/// Times of requests since the OSD was started, by what they asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestTimes {
    /// Changes of objects.
    pub write: PhaseTimes,
    /// Reads of objects' data.
    pub read: PhaseTimes,
    /// Everything else.
    pub other: PhaseTimes,
}

/// How the offload of moving data between OSD and store stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadStatus {
    /// State of its circuit breaker.
    pub state: OffloadState,
    /// How often it failed.
    pub failures: u64,
    /// How often a probe found it still failing.
    pub failed_probes: u64,
    /// How often a probe found it working again.
    pub recoveries: u64,
    /// Why it failed last, or is not in use.
    pub last_failure: Option<String>,
    /// Bytes of memory that a late transfer may still touch.
    pub quarantined_bytes: u64,
    /// Bytes that had arrived when it failed and were not sent again, in this session with the store.
    pub kept_bytes: u64,
    /// Bytes that went by the socket in its place, in this session with the store.
    pub fallback_bytes: u64,
    /// Faults that are armed on purpose.
    pub faults: Vec<String>,
}

/// Where the parity of staged data is computed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingStatus {
    /// The coding mode.
    pub mode: CodingMode,
    /// The offload; `None` where there is no DPU.
    pub engine: Option<CodingOffload>,
    /// Whether that stands for hardware that is not there.
    pub emulated: bool,
    /// The host's processor is busy: everything goes to the offload.
    pub host_busy: bool,
    /// How busy it was when it was last looked at, without coding and whatever stands for the DPU, in percent.
    pub host_utilization_percent: u32,
    /// Part of the time during which something waited for it, in percent, if the kernel tells.
    pub host_pressure_percent: Option<u32>,
    /// Tasks that wait for a place.
    pub queued: u64,
    /// Their data, in bytes.
    pub queued_bytes: u64,
    /// Tasks refused because too many waited.
    pub refused: u64,
    /// Tasks sent to the host during the last second.
    pub alpha: u64,
    /// Tasks sent to the offload during the last second.
    pub beta: u64,
    /// The host.
    pub host: CodingPlaceStatus,
    /// The offload.
    pub offload: CodingPlaceStatus,
}

/// A place where parity is computed. Counts are since the OSD was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingPlaceStatus {
    /// Tasks there.
    pub in_service: u64,
    /// Most of them at a time.
    pub slots: u64,
    /// Tasks sent there, by reason.
    pub sent: CodingSent,
    /// What a task is taken to cost whatever its size, in ns; absent if nothing was measured.
    pub ns_per_task: Option<u64>,
    /// What a megabyte (10^6 bytes) is taken to add, in ns.
    pub ns_per_mb: Option<u64>,
    /// Whether it works.
    pub health: CodingHealth,
}

/// Tasks sent to a place, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingSent {
    /// As the mode has it.
    pub mode: u64,
    /// The host was busy.
    pub busy: u64,
    /// The other place was cooling down.
    pub cool_down: u64,
    /// To find out whether the place works again.
    pub probe: u64,
    /// To find out what the place costs.
    pub explore: u64,
}

impl CodingSent {
    /// All tasks.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.mode + self.busy + self.cool_down + self.probe + self.explore
    }
}

/// Whether a place works.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodingHealth {
    /// State of its circuit breaker.
    pub state: OffloadState,
    /// How often it failed.
    pub failures: u64,
    /// How often a probe found it still failing.
    pub failed_probes: u64,
    /// How often a probe found it working again.
    pub recoveries: u64,
    /// Why it failed last.
    pub last_failure: Option<String>,
}

/// The limits of the listener, and what it refused and reclaimed since the OSD was started, by what was short: `handshakes`,
/// `sessions`, `detached` (sessions that wait for their clients), `descriptors`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ConnectionStatus {
    /// Most sessions at a time; fewer than configured if the limit on open files is low.
    pub max_sessions: u64,
    /// Most handshakes at a time.
    pub max_handshakes: u64,
    /// Handshakes and sessions that lost their place to another client.
    pub reclaimed: Vec<(String, u64)>,
    /// Connections that got no place; of `descriptors`, failed attempts to accept one.
    pub refused: Vec<(String, u64)>,
}

/// State of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// The node's id.
    pub node: Uuid,
    /// Processes that handle requests and hold targets.
    pub placement: Placement,
    /// Name of the engine that moves data between OSD and store.
    pub engine: String,
    /// Whether that engine stands for hardware that is not there.
    pub emulated: bool,
    /// Process id of the OSD.
    pub osd_pid: u32,
    /// Seconds since the OSD was started.
    pub uptime_seconds: u64,
    /// Number of the node's map.
    pub map_epoch: u64,
    /// How pools with redundancy are.
    pub health: Vec<PoolHealth>,
    /// What is being rebuilt.
    pub rebuild: RebuildStatus,
    /// The targets, in the order of their numbers.
    pub targets: Vec<TargetStatus>,
    /// The pools.
    pub pools: Vec<PoolInfo>,
    /// Other paths than TCP that clients can come by: what kind, and where the OSD listens.
    pub paths: Vec<(String, String)>,
    /// Number of sessions that are connected.
    pub sessions: u32,
    /// How many of them go by such a path now, so that bulk data moves by itself (RDMA).
    pub sessions_one_sided: u32,
    /// How many connections there may be, and which had to be refused or given up.
    pub connections: ConnectionStatus,
    /// Number of requests being worked on.
    pub requests: u32,
    /// How the offload between OSD and store stands, if there is one.
    pub offload: Option<OffloadStatus>,
    /// Where parity is computed.
    pub coding: CodingStatus,
    /// Bytes of staging memory: all, now free, fewest that were ever free.
    pub staging: [u64; 3],
    /// Where the time of requests went.
    pub times: RequestTimes,
    /// What the OSD's thread spent its time on, in ns since it was started: names of thread classes (`msgr`, `osd`,
    /// `chan`), each with the time inside tasks of that class.
    pub thread_ns: Vec<(String, u64)>,
}
