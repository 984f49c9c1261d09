//! Configuration of an osd.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use array::CodingConfig;
use base::BoxFuture;
use base::clock::WallClock;
use base::process::OwnUsage;
use identity::ProofKey;
use uuid::Uuid;

use crate::audit_log::AuditAt;
use crate::debug_controls::DebugAt;
use crate::directory::Directory;
use crate::gateways::GatewaysAt;
use wire::{OffloadStatus, Placement};

use crate::witness::WitnessAt;

/// Configuration of an osd. The defaults suit a production node; tests shorten the times.
#[derive(Debug, Clone)]
pub struct OsdConfig {
    /// Placement of the node. With `Host`, the osd measures how long calls to the stores take. With
    /// `Dpu`, the proxy measures this time.
    pub placement: Placement,
    /// Name of the DMA engine that moves data between osd and store. Shown in the node's status.
    pub engine: String,
    /// Whether the DMA engine is emulated. Shown in the node's status.
    pub emulated: bool,
    /// Time limit for one pull from a client or one push to a client.
    pub transfer_timeout: Duration,
    /// Maximum time that a request waits for an unreachable store. After this time, the client gets
    /// a transient error.
    pub store_patience: Duration,
    /// Time limit for an answer of a target. After this time, placement groups continue without the
    /// target if enough other targets answer.
    pub target_timeout: Duration,
    /// Schedule of the probes that the osd sends to failed targets.
    pub target_retry: TargetRetry,
    /// Pause between two runs of each upkeep task, for example of the search for members that need
    /// a rebuild.
    pub upkeep_interval: Duration,
    /// Maximum rate of rebuilds and scrubs, in bytes per second; 0 for no limit.
    pub rebuild_rate: u64,
    /// Maximum share of time, in percent, during which rebuilds and scrubs may work while the osd
    /// serves clients.
    pub rebuild_share: u32,
    /// Maximum number of dirty notes per placement group. If more objects change while a target is
    /// unavailable, the rebuild of this target copies all objects of the group.
    pub missed_objects_per_pg: usize,
    /// Idle time after which a session loses its results. A session is idle while it changes
    /// nothing. Only time in which the node runs counts.
    pub session_expiry: Duration,
    /// Minimum age at which the collector removes an orphaned part. The client that uploaded the
    /// part must also have been disconnected for this time. The time must be longer than clients
    /// take to reconnect.
    pub orphan_grace: Duration,
    /// Pause between two runs of the collector.
    pub collect_interval: Duration,
    /// Maximum number of requests of one session that the osd executes at a time on a connection.
    pub requests_per_connection: usize,
    /// Maximum number of sessions that the osd keeps at a time.
    pub sessions: usize,
    /// Maximum number of objects per placement group whose state is cached.
    pub cached_objects_per_pg: usize,
    /// Maximum number of segments of one transfer in flight at a time. With the value 1, the
    /// segments move one after the other. The value may be changed at any time.
    pub segments_in_flight: Arc<AtomicUsize>,
    /// Maximum length of a segment, in bytes: the longest transfer of the DMA engine. The largest buffer
    /// of the staging memory is a further limit.
    pub segment: usize,
    /// Source of the DMA engine's health, which the node's status shows. `None` if the node uses no
    /// DMA engine.
    pub offload: Option<OffloadSource>,
    /// Asks the store's process for its use of its machine. `None` if the stores are in this process.
    pub store_usage: Option<UsageSource>,
    /// Configuration of where and how parity is computed.
    pub coding: CodingConfig,
    /// Id of the osd's process. Shown in the node's status.
    pub pid: u32,
    /// Clock for the times of object changes and pool creations.
    pub clock: WallClock,
    /// Where the osd stores its witness. If `None`, the osd keeps the witness in memory. After a
    /// restart, it then cannot tell whether missing targets have newer data.
    pub witness: Option<WitnessAt>,
    /// Time between two writes of the node's age while clients change objects. If an older copy
    /// replaces the content of a target, a pool without redundancy may not notice the loss of changes
    /// of this time.
    pub age_interval: Duration,
    /// Targets of which the operator has accepted the loss while the node was stopped.
    pub forgotten: Vec<Uuid>,
    /// UUID of the node, if the node has run before. The osd then creates no new node.
    pub node: Option<Uuid>,
    /// The DPU's secret key, with which the osd recognises the ids of sessions that it has made. The
    /// default is valid in this process only.
    pub dpu_key: ProofKey,
    /// Changes whenever the key of the node's own administrator changes. Capabilities from before are
    /// invalid.
    pub admin_revision: u64,
    /// Whether the operator accepts a map that the DPU has not sealed, because the DPU's key was lost.
    pub accepts_altered_map: bool,
    /// The users in the node's map. The osd keeps it up to date, and
    /// listeners look up the keys of their peers in it.
    pub users: Directory,
    /// The audit log.
    pub audit: AuditAt,
    /// Address of the node's control plane, which the osd tells its clients.
    pub control: Option<String>,
    /// Faults and switches of the process.
    pub debug: DebugAt,
    /// The gateways that execute requests about disks.
    pub gateways: GatewaysAt,
}

/// Schedule of the probes that the osd sends to a failed target. Placement groups do not use the
/// target until it answers a probe in time.
#[derive(Debug, Clone, Copy)]
pub struct TargetRetry {
    /// Pause before the first probe of a target that is slow again soon after its return (a
    /// relapse). The pause doubles with each further relapse. A target that is slow for the first
    /// time is probed at once.
    pub slow_pause: Duration,
    /// Maximum length of the pause when `slow_pause` is doubled repeatedly.
    pub slow_pause_max: Duration,
    /// Maximum duration of a probe that brings a target back into use. A slower answer leads to
    /// another probe.
    pub probe_max: Duration,
    /// Pause before the first probe of a target that has reported an I/O error. The pause doubles
    /// with each failed probe and each relapse.
    pub failing_pause: Duration,
    /// Maximum length of the pause when `failing_pause` is doubled repeatedly.
    pub failing_pause_max: Duration,
    /// Maximum number of relapses in a row. A relapse is an I/O error of a target that the osd uses
    /// again after earlier I/O errors. At the next relapse, the osd gives the target up and sends no
    /// more probes.
    pub relapses_max: u32,
    /// Time during which requests wait for a target after it has reported an I/O error or refused a
    /// write. After this time, requests that need the target fail.
    pub hopeful_for: Duration,
}

impl Default for TargetRetry {
    fn default() -> Self {
        TargetRetry {
            slow_pause: Duration::from_millis(250),
            slow_pause_max: Duration::from_secs(4),
            probe_max: Duration::from_secs(1),
            failing_pause: Duration::from_secs(1),
            failing_pause_max: Duration::from_secs(10),
            relapses_max: 5,
            hopeful_for: Duration::from_secs(20),
        }
    }
}

/// Function that reports the health of the DMA offload between osd and store.
#[derive(Clone)]
pub struct OffloadSource(pub Arc<dyn Fn() -> OffloadStatus + Send + Sync>);

impl std::fmt::Debug for OffloadSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OffloadSource")
    }
}

/// Function that asks another process for its use of its machine.
#[derive(Clone)]
pub struct UsageSource(pub Arc<dyn Fn() -> BoxFuture<'static, store::Result<OwnUsage>> + Send + Sync>);

impl std::fmt::Debug for UsageSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UsageSource")
    }
}

impl OsdConfig {
    pub(crate) fn segments_in_flight(&self) -> usize {
        self.segments_in_flight.load(Ordering::Relaxed).max(1)
    }

    /// Returns whether the osd calls the store directly instead of through the host–DPU channel.
    pub(crate) fn store_is_here(&self) -> bool {
        self.placement == Placement::Host
    }
}

impl Default for OsdConfig {
    fn default() -> Self {
        OsdConfig {
            placement: Placement::Host,
            engine: "none".into(),
            emulated: false,
            transfer_timeout: Duration::from_secs(30),
            store_patience: Duration::from_secs(30),
            target_timeout: Duration::from_secs(10),
            target_retry: TargetRetry::default(),
            upkeep_interval: Duration::from_millis(500),
            rebuild_rate: 0,
            rebuild_share: 25,
            missed_objects_per_pg: 65_536,
            session_expiry: Duration::from_secs(24 * 3600),
            orphan_grace: Duration::from_secs(3600),
            collect_interval: Duration::from_secs(1800),
            requests_per_connection: 256,
            sessions: 4096,
            cached_objects_per_pg: 4096,
            segments_in_flight: Arc::new(AtomicUsize::new(3)),
            segment: 2 << 20,
            offload: None,
            store_usage: None,
            coding: CodingConfig::default(),
            pid: std::process::id(),
            clock: WallClock::default(),
            witness: None,
            age_interval: Duration::from_secs(10),
            forgotten: Vec::new(),
            node: None,
            dpu_key: ProofKey::default(),
            admin_revision: 0,
            accepts_altered_map: false,
            users: Directory::default(),
            audit: AuditAt::default(),
            control: None,
            debug: DebugAt::default(),
            gateways: GatewaysAt::default(),
        }
    }
}
