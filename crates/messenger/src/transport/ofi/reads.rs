//! The one-sided reads of a link that are in progress, and the buffers that they fill.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use base::mem::ArenaBuf;
use fabric::MemoryRegion;
use tokio::sync::oneshot;

/// The destination of one-sided reads. The buffer has no other owner while a read may write to it.
#[derive(Debug)]
pub(crate) struct LandingBuffer {
    /// `None` once this destination is no longer used.
    buf: Option<Arc<ArenaBuf>>,
    /// The registration of the buffer. `None` once this destination is no longer used.
    region: Option<MemoryRegion>,
    /// Offset of the buffer in the region.
    base: usize,
}

/// A one-sided read in progress.
pub(super) struct RmaRead {
    landing: Arc<LandingBuffer>,
    deadline: Instant,
    done: oneshot::Sender<()>,
}

impl RmaRead {
    pub(super) fn finish(self) {
        drop(self.landing);
        // The caller may have been cancelled; ignore the error.
        let _ = self.done.send(());
    }
}

/// The reads in progress, by token.
#[derive(Default)]
pub(super) struct RmaReads {
    last: u64,
    active: HashMap<u64, RmaRead>,
}

impl RmaReads {
    /// Registers a read into `landing`. The read must end before `deadline`. The end of the read is
    /// reported to `done`. Returns the token of the read.
    pub(super) fn begin(
        &mut self,
        landing: Arc<LandingBuffer>,
        deadline: Instant,
        done: oneshot::Sender<()>,
    ) -> u64 {
        self.last += 1;
        self.active.insert(self.last, RmaRead { landing, deadline, done });
        self.last
    }

    /// Whether a read has exceeded its deadline.
    pub(super) fn is_overdue(&self) -> bool {
        let now = Instant::now();
        self.active.values().any(|read| read.deadline <= now)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    pub(super) fn take(&mut self, token: u64) -> Option<RmaRead> {
        self.active.remove(&token)
    }

    pub(super) fn put_back(&mut self, token: u64, read: RmaRead) {
        self.active.insert(token, read);
    }
}

impl LandingBuffer {
    /// Creates a destination from `buf`, which begins at byte `base` of `region`.
    pub(super) fn new(buf: Arc<ArenaBuf>, region: MemoryRegion, base: usize) -> Arc<LandingBuffer> {
        Arc::new(LandingBuffer { buf: Some(buf), region: Some(region), base })
    }

    /// The region that contains the buffer, and the position of the buffer's byte `at` in this
    /// region. Returns `None` if this destination is no longer used.
    pub(super) fn place(&self, at: usize) -> Option<(&MemoryRegion, usize)> {
        self.region.as_ref().map(|region| (region, self.base + at))
    }

    /// Returns the buffer, or `None` if a read still uses it.
    pub(crate) fn into_buffer(self: Arc<Self>) -> Option<ArenaBuf> {
        let mut landing = Arc::into_inner(self)?;
        landing.end()
    }

    /// The content of the buffer. The caller may use only those parts to which no read writes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buf.as_ref().map_or(&[], |buf| buf)
    }

    fn end(&mut self) -> Option<ArenaBuf> {
        if let Some(region) = self.region.take() {
            // No read is in progress, because each read keeps its destination until the read has
            // ended or the endpoint is closed.
            region.settle();
        }
        self.buf.take().and_then(Arc::into_inner)
    }
}

impl Drop for LandingBuffer {
    fn drop(&mut self) {
        drop(self.end());
    }
}
