//! Configuration of an OSD.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use array::CodingConfig;
use wire::{OffloadStatus, Placement};

use crate::clock::WallClock;

/// Configuration of an OSD. The defaults suit a production node; tests shorten the times.
#[derive(Debug, Clone)]
pub struct OsdConfig {
    /// Placement of the node. With `Host`, the OSD measures the time of the stores' calls; with
    /// `Dpu`, the proxy does.
    pub placement: Placement,
    /// Name of the engine that moves data between OSD and store. Shown in the node's status.
    pub engine: String,
    /// Whether that engine is emulated. Shown in the node's status.
    pub emulated: bool,
    /// Time limit for one pull from a client or one push to a client.
    pub transfer_timeout: Duration,
    /// Longest time that a request waits for an unreachable store. After that, the client gets a
    /// transient error.
    pub store_patience: Duration,
    /// Time after which placement groups continue without a target that has not answered, if enough
    /// other targets answer.
    pub target_timeout: Duration,
    /// When the OSD tries unused targets again.
    pub target_retry: TargetRetry,
    /// Pause between two checks for members that need a rebuild.
    pub upkeep_interval: Duration,
    /// Maximum rate of rebuilds and scrubs, in bytes per second; 0 for no limit.
    pub rebuild_rate: u64,
    /// Maximum share of the time that rebuilds and scrubs take while clients are served, in
    /// percent.
    pub rebuild_share: u32,
    /// Most dirty notes per placement group. If more objects change while a target is away, the
    /// target's rebuild copies all objects of the group.
    pub missed_objects_per_pg: usize,
    /// A session loses its results after it has changed nothing for this time. Only time in which
    /// the node runs counts.
    pub session_expiry: Duration,
    /// Minimum age of an orphaned part before the collector removes it. Its uploader must also have
    /// been disconnected for this time. Must be longer than clients take to reconnect.
    pub orphan_grace: Duration,
    /// Pause between two runs of the collector.
    pub collect_interval: Duration,
    /// Most requests of one connection that the OSD executes at a time.
    pub requests_per_connection: usize,
    /// Most sessions that the OSD keeps at a time.
    pub sessions: usize,
    /// Most objects per placement group whose state is cached.
    pub cached_objects_per_pg: usize,
    /// Most segments of one transfer in flight at a time; 1 transfers them one after the other. May
    /// be changed at any time.
    pub segments_in_flight: Arc<AtomicUsize>,
    /// Reports the health of the offload between OSD and store. Shown in the node's status.
    pub offload: Option<OffloadSource>,
    /// Where the OSD computes parity.
    pub coding: CodingConfig,
    /// Clock for the times of object changes and pool creations.
    pub clock: WallClock,
}

/// When the OSD tries a target again that placement groups do not use.
#[derive(Debug, Clone, Copy)]
pub struct TargetRetry {
    /// Pause between two probes of a slow target.
    pub slow_pause: Duration,
    /// Longest cool-down of a target that has become slow several times in a row.
    pub slow_pause_max: Duration,
    /// Longest time that a probe may take to bring a target back into use.
    pub probe_max: Duration,
    /// Pause before the first probe of a target that has reported an I/O error. The pause doubles
    /// with each failed probe and each relapse.
    pub failing_pause: Duration,
    /// Upper limit of `failing_pause`'s growth.
    pub failing_pause_max: Duration,
    /// Most relapses in a row after I/O errors. After one more, the OSD gives the target up.
    pub relapses_max: u32,
    /// After a target has reported an I/O error or refused a write, requests that need the target
    /// wait for this time. Later requests fail.
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

/// Reports the health of an offload.
#[derive(Clone)]
pub struct OffloadSource(pub Arc<dyn Fn() -> OffloadStatus + Send + Sync>);

impl std::fmt::Debug for OffloadSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OffloadSource")
    }
}

impl OsdConfig {
    pub(crate) fn segments_in_flight(&self) -> usize {
        self.segments_in_flight.load(Ordering::Relaxed).max(1)
    }

    /// Returns whether the OSD calls the store directly instead of through the host–DPU channel.
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
            offload: None,
            coding: CodingConfig::default(),
            clock: WallClock::default(),
        }
    }
}
