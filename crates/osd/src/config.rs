//! How an OSD behaves.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use array::CodingConfig;
use wire::{OffloadStatus, Placement};

use crate::clock::WallClock;

/// How an OSD behaves. The defaults suit a node; tests shorten times.
#[derive(Debug, Clone)]
pub struct OsdConfig {
    /// Placement of the node. With `Host`, the OSD books the time of the stores' calls; with `Dpu`, the proxy does.
    pub placement: Placement,
    /// Name of the engine that moves data between OSD and store, for the status.
    pub engine: String,
    /// Whether that engine is emulated, for the status.
    pub emulated: bool,
    /// How long one pull from a client, or one push to it, may take.
    pub transfer_timeout: Duration,
    /// How long a request waits for a store that is not there before it is given back to the client as transient.
    pub store_patience: Duration,
    /// After that long placement groups go on without a target that has not answered, if enough others answer.
    pub target_timeout: Duration,
    /// When targets that are not used are tried again.
    pub target_retry: TargetRetry,
    /// Pause between two looks at what is to be rebuilt.
    pub upkeep_interval: Duration,
    /// Most bytes a second that rebuilds and scrubs move; 0 for no limit.
    pub rebuild_rate: u64,
    /// Part of the time that rebuilds and scrubs may take while clients are served, in percent.
    pub rebuild_share: u32,
    /// Objects of a placement group that are noted by name when they change while a target is away; should there be more, the
    /// target gets everything anew when it comes back.
    pub missed_objects_per_pg: usize,
    /// Sessions that changed nothing for that long, while the node ran, lose their results.
    pub session_expiry: Duration,
    /// Parts of striped objects that no head names are removed when they are that old and their uploader has been gone
    /// that long. Must be longer than clients take to reconnect.
    pub orphan_grace: Duration,
    /// Pause between two runs of the collector.
    pub collect_interval: Duration,
    /// Most requests of one connection worked on at a time.
    pub requests_per_connection: usize,
    /// Most sessions known at a time.
    pub sessions: usize,
    /// Objects whose state is kept in memory, per placement group.
    pub cached_objects_per_pg: usize,
    /// Segments of one transfer in flight at a time; 1 has them one after the other. May be changed at any time.
    pub segments_in_flight: Arc<AtomicUsize>,
    /// How the offload between OSD and store stands, for the status.
    pub offload: Option<OffloadSource>,
    /// Where parity is computed.
    pub coding: CodingConfig,
    /// The time of day that objects and pools are stamped with.
    pub clock: WallClock,
}

/// When a target that placement groups do not use is tried again.
#[derive(Debug, Clone, Copy)]
pub struct TargetRetry {
    /// Pause between probes of a target that did not answer in time.
    pub slow_pause: Duration,
    /// The longest pause before a slow target is used again that has been slow several times in a row.
    pub slow_pause_max: Duration,
    /// A probe that takes longer does not bring a target back.
    pub probe_max: Duration,
    /// Pause before the first probe of a target that has reported an I/O error; doubles with each probe that fails, and with
    /// each relapse.
    pub failing_pause: Duration,
    /// The longest of those pauses.
    pub failing_pause_max: Duration,
    /// A target that reports I/O errors again, after so many returns in a row, is given up.
    pub relapses_max: u32,
    /// For that long after a target has reported an I/O error or refused a write, requests that need it wait. After that they
    /// fail.
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

/// Tells how an offload stands.
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

    /// Whether the store is called directly, rather than through the host–DPU channel.
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
