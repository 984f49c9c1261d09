//! The reads of a link that are in progress, and the buffers that they fill.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use base::mem::ArenaBuf;
use fabric::MemoryRegion;
use tokio::sync::oneshot;

/// A buffer that is being read into. It has no other owner until nothing writes to it any more.
#[derive(Debug)]
pub(crate) struct LandingBuffer {
    /// Both are taken when it ends.
    buf: Option<Arc<ArenaBuf>>,
    region: Option<MemoryRegion>,
    /// Offset of the buffer in the region.
    base: usize,
}

/// A read under way.
pub(super) struct RmaRead {
    landing: Arc<LandingBuffer>,
    deadline: Instant,
    done: oneshot::Sender<()>,
}

impl RmaRead {
    pub(super) fn finish(self) {
        drop(self.landing);
        // Whoever asked may have gone away.
        let _ = self.done.send(());
    }
}

/// The reads under way, by token.
#[derive(Default)]
pub(super) struct RmaReads {
    last: u64,
    active: HashMap<u64, RmaRead>,
}

impl RmaReads {
    /// Enters a read into `landing`, to be ended before `deadline`. `done` hears of its end. Gives its token.
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

    /// Whether a read takes longer than it was given.
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
    /// Of `buf`, which lies at `base` of `region`.
    pub(super) fn new(buf: Arc<ArenaBuf>, region: MemoryRegion, base: usize) -> Arc<LandingBuffer> {
        Arc::new(LandingBuffer { buf: Some(buf), region: Some(region), base })
    }

    /// The region, and where `at` bytes from the buffer's start are in it; `None` if it has ended.
    pub(super) fn place(&self, at: usize) -> Option<(&MemoryRegion, usize)> {
        self.region.as_ref().map(|region| (region, self.base + at))
    }

    /// The buffer, if nothing writes to it any more.
    pub(crate) fn into_buffer(self: Arc<Self>) -> Option<ArenaBuf> {
        let mut landing = Arc::into_inner(self)?;
        landing.end()
    }

    /// What is in it. To be looked at only where nothing is being read into.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buf.as_ref().map_or(&[], |buf| buf)
    }

    fn end(&mut self) -> Option<ArenaBuf> {
        if let Some(region) = self.region.take() {
            // Reads keep their landing until they have ended or the endpoint is closed.
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
