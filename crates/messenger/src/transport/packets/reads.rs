//! The one-sided reads of a link that are in progress, and the buffers that they fill.

use std::ops::Range;
use std::sync::Arc;

use base::clock::Instant;
use base::collections::HashMap;
use base::mem::ArenaBuf;
use fabric::{FabricError, PeerBuffer, PostError, Slice};
use tokio::sync::oneshot;

use super::Registration;

/// The destination of one-sided reads. The buffer has no other owner while a read may write to it.
#[derive(Debug)]
pub(crate) struct LandingBuffer {
    /// `None` once this destination is no longer used.
    buf: Option<PeerBuffer>,
    /// The registration of the buffer. `None` once this destination is no longer used.
    region: Option<Registration>,
}

/// A one-sided read in progress.
pub(super) struct RmaRead {
    landing: Arc<LandingBuffer>,
    deadline: Instant,
    done: oneshot::Sender<()>,
}

impl RmaRead {
    /// Whether the caller no longer waits for the end of the read.
    pub(super) fn is_abandoned(&self) -> bool {
        self.done.is_closed()
    }

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

    /// Whether a read is in progress whose caller no longer waits for its end.
    pub(super) fn has_abandoned(&self) -> bool {
        self.active.values().any(RmaRead::is_abandoned)
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
    /// Creates a destination from `buf`, which is inside `region`.
    pub(super) fn new(buf: PeerBuffer, region: Registration) -> Arc<LandingBuffer> {
        Arc::new(LandingBuffer { buf: Some(buf), region: Some(region) })
    }

    /// The destination of a read over libfabric into the `len` bytes at `at` of the buffer.
    ///
    /// # Errors
    /// If the range is outside the buffer, or this destination is no longer used.
    pub(in crate::transport) fn slice(&self, at: usize, len: usize) -> Result<Slice<'_>, PostError> {
        match (&self.buf, &self.region) {
            (Some(buf), Some(Registration::Ofi(region))) => Ok(region.slice_of(buf, at, len)?),
            _ => Err(FabricError::Unregistered { len }.into()),
        }
    }

    /// The buffer, unless this destination is no longer used.
    pub(in crate::transport) fn buffer(&self) -> Option<&PeerBuffer> {
        self.buf.as_ref()
    }

    /// Returns the buffer, or `None` if a read still uses it.
    pub(crate) fn into_buffer(self: Arc<Self>) -> Option<ArenaBuf> {
        let mut landing = Arc::into_inner(self)?;
        landing.end()
    }

    /// The bytes of `range` of the buffer. No read may write to them, now or later.
    #[allow(unsafe_code)]
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        // SAFETY: a pull reads each range once, and calls this function after the read. Only
        // providers that expose local memory let the peer change the bytes, which violates the
        // protocol. The bytes are payload, and are only compared with their checksums.
        self.buf.as_ref().map_or(&[], |buf| unsafe { buf.bytes(range) })
    }

    #[allow(unsafe_code)]
    fn end(&mut self) -> Option<ArenaBuf> {
        if let Some(region) = self.region.take() {
            // SAFETY: no read is in progress, because each read keeps its destination until the
            // read has ended or the endpoint is closed. No peer has the key of the region.
            unsafe { region.settle() };
        }
        self.buf.take().and_then(PeerBuffer::into_inner)
    }
}

impl Drop for LandingBuffer {
    fn drop(&mut self) {
        drop(self.end());
    }
}
