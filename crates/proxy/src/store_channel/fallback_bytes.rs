//! [`FallbackBytes`]: how much payload the control socket carries in place of DMA.

/// Counts the payload of requests that continue over the control socket after a failure of DMA.
pub(super) struct FallbackBytes {
    kept: u64,
    sent: u64,
    kept_total: metrics::Counter,
    sent_total: metrics::Counter,
}

impl FallbackBytes {
    pub(super) fn new() -> FallbackBytes {
        FallbackBytes {
            kept: 0,
            sent: 0,
            kept_total: metrics::counter!("outboard_proxy_kept_bytes"),
            sent_total: metrics::counter!("outboard_proxy_fallback_bytes"),
        }
    }

    /// Counts bytes that DMA had already moved, so they are not sent again.
    pub(super) fn keep(&mut self, bytes: usize) {
        self.kept += bytes as u64;
        self.kept_total.increment(bytes as u64);
    }

    /// Counts bytes that the control socket carries.
    pub(super) fn send(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        self.sent_total.increment(bytes as u64);
    }

    /// Bytes that DMA had already moved when it failed, in this incarnation.
    pub(super) fn kept(&self) -> u64 {
        self.kept
    }

    /// Bytes that the control socket has carried in place of DMA, in this incarnation.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }
}
