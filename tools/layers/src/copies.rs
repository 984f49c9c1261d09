//! Number of bytes that a layer copies in user space, from the layer's own metrics.

use std::sync::OnceLock;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

/// Metrics of the copies of the messenger.
pub const MESSENGER: &[&str] = &["outboard_messenger_copied_bytes"];

/// Metrics of the copies of the channel. Transfers of the DMA engine are not copies.
pub const CHANNEL: &[&str] = &[
    "outboard_proxy_entry_copy_bytes",
    "outboard_proxy_staging_copy_bytes",
    "outboard_proxy_landing_copy_bytes",
    "outboard_proxy_range_copy_bytes",
    "outboard_channel_socket_copy_bytes",
];

static METRICS: OnceLock<PrometheusHandle> = OnceLock::new();

/// Records the metrics of this process from now on.
pub fn record() {
    METRICS.get_or_init(|| {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        // This fails if the process already has another recorder. `copied_bytes` then returns 0.
        let _ = metrics::set_global_recorder(recorder);
        handle
    });
}

/// Returns the sum of these metrics of this process.
pub fn copied_bytes(metrics: &[&str]) -> u64 {
    let text = METRICS.get().map(PrometheusHandle::render).unwrap_or_default();
    let samples = text.lines().filter_map(|line| line.split_once(' '));
    samples
        .filter(|(name, _)| metrics.contains(name))
        .filter_map(|(_, value)| value.parse::<u64>().ok())
        .sum()
}
