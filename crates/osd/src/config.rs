//! How an OSD behaves.

use std::time::Duration;

/// How an OSD behaves. The defaults suit a node; tests shorten times.
#[derive(Debug, Clone)]
pub struct OsdConfig {
    /// `dpu` or `host`, for the status. With `host`, the time of the stores' calls is booked here; with `dpu`, by the proxy.
    pub placement: String,
    /// Name of the engine that moves data between OSD and store, for the status.
    pub engine: String,
    /// Whether that engine is emulated, for the status.
    pub emulated: bool,
    /// How long one pull from a client, or one push to it, may take.
    pub transfer_timeout: Duration,
    /// How long a request waits for a store that is not there before it is given back to the client as transient.
    pub store_patience: Duration,
    /// Sessions that changed nothing for that long lose their results.
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
    /// Segments of one transfer in flight at a time.
    pub segments_in_flight: usize,
}

impl OsdConfig {
    /// Whether the store is called directly, rather than through the host–DPU channel.
    pub(crate) fn store_is_here(&self) -> bool {
        self.placement == "host"
    }
}

impl Default for OsdConfig {
    fn default() -> Self {
        OsdConfig {
            placement: "host".into(),
            engine: "none".into(),
            emulated: false,
            transfer_timeout: Duration::from_secs(30),
            store_patience: Duration::from_secs(30),
            session_expiry: Duration::from_secs(24 * 3600),
            orphan_grace: Duration::from_secs(3600),
            collect_interval: Duration::from_secs(1800),
            requests_per_connection: 256,
            sessions: 4096,
            cached_objects_per_pg: 4096,
            segments_in_flight: 3,
        }
    }
}
