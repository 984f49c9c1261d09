//! One-sided transfers of a link: reads of the peer's memory into buffers, and writes into it.

use std::sync::Arc;

use base::clock::Instant;
use base::mem::ArenaBuf;
use bytes::Bytes;
use fabric::{ExposedMemory, GatherBytes, PeerBuffer, RemoteRegion};
use tokio::sync::oneshot;

use super::link::{Link, LinkFailed};
use super::reads::LandingBuffer;
use super::{Registration, RemoteRange};

impl Link {
    /// Registers `buf` as a destination of one-sided reads. If the registration fails, returns
    /// `buf` and the reason.
    pub(crate) fn land(&self, buf: ArenaBuf) -> Result<Arc<LandingBuffer>, (ArenaBuf, String)> {
        let arena = Arc::clone(buf.arena());
        let buf = PeerBuffer::new(buf);
        match self.endpoint.land(&buf, &arena) {
            Ok(region) => Ok(LandingBuffer::new(buf, region)),
            Err(e) => match buf.into_inner() {
                Some(buf) => Err((buf, e)),
                None => unreachable!("a failed registration keeps no reference to the buffer"),
            },
        }
    }

    /// Reads `len` bytes at `offset` of the peer's region `from`, and writes them to `landing` from
    /// its byte `at` on. If the read has not ended at `deadline`, the link becomes
    /// [overdue](Self::is_overdue). If the returned future is dropped, the link keeps the memory
    /// until the read has ended.
    pub(crate) async fn read(
        &self,
        landing: &Arc<LandingBuffer>,
        at: usize,
        from: RemoteRegion,
        (offset, len): (usize, usize),
        deadline: Instant,
    ) -> Result<(), LinkFailed> {
        let bad = |e: fabric::FabricError| LinkFailed(e.to_string());
        from.slice(offset, len).map_err(bad)?;
        let remote = RemoteRange { region: from, offset, len };
        let (done, finished) = oneshot::channel();
        let token = self.reads(|reads| reads.begin(Arc::clone(landing), deadline, done));
        // The guard removes the read if it was not posted, for example because this future was
        // dropped while it waited for room in the provider's queue.
        let mut unposted = UnpostedRead { link: Some(self), token };
        self.post(|endpoint| endpoint.read(landing, at, remote, token)).await?;
        unposted.link = None;
        finished.await.map_err(|_| self.failure().unwrap_or(LinkFailed("the connection is closed".into())))
    }

    /// Writes `bytes` at `offset` of the peer's region `to`. The data is in the peer's memory
    /// before any packet that is sent later arrives. The memory of `bytes` is kept until the data
    /// is sent.
    pub(crate) async fn write(
        &self,
        bytes: &Bytes,
        to: RemoteRegion,
        offset: usize,
    ) -> Result<(), LinkFailed> {
        to.slice(offset, bytes.len()).map_err(|e| LinkFailed(e.to_string()))?;
        let remote = RemoteRange { region: to, offset, len: bytes.len() };
        let region = self
            .endpoint
            .region_of(bytes)
            .map_err(|_| LinkFailed("the data is not in registered memory".into()))?;
        let mut parts = vec![GatherBytes { bytes: bytes.clone(), region }];
        // The bytes may be the last ones of a large buffer.
        let notify = self.wants_completion(&parts, true);
        self.post(|endpoint| endpoint.write_parts(&mut parts, remote, notify)).await
    }

    /// Whether `bytes` can be written to a peer's memory without a copy.
    pub(crate) fn can_write(&self, bytes: &Bytes) -> bool {
        self.endpoint.region_of(bytes).is_ok()
    }

    /// Whether a read has exceeded its deadline. Only closing the link releases the memory of such
    /// a read.
    pub(crate) fn is_overdue(&self) -> bool {
        self.reads(|reads| reads.is_overdue())
    }

    /// Whether a read is in progress whose future was dropped. The peer must not learn meanwhile
    /// that this side no longer uses the memory.
    pub(crate) fn has_abandoned_reads(&self) -> bool {
        self.reads(|reads| reads.has_abandoned())
    }

    /// Waits until a read has ended whose future was dropped.
    pub(crate) async fn abandoned_read_ended(&self) {
        self.abandoned.notified().await;
    }

    /// Whether a read is in progress.
    pub(crate) fn is_reading(&self) -> bool {
        self.reads(|reads| !reads.is_empty())
    }

    /// Exposes memory to the peer: bytes for reading, or a buffer for writing.
    pub(crate) fn expose(&self, memory: ExposedMemory) -> Result<Registration, String> {
        self.endpoint.expose(memory)
    }

    /// Amount of memory that was withdrawn while a peer might still use it, in bytes. The memory is
    /// kept until the peer's link is closed.
    pub(crate) fn quarantined_bytes(&self) -> usize {
        self.endpoint.quarantined_bytes()
    }

    /// Takes a buffer of `len` bytes that can be exposed for writing. Returns `None` if the system
    /// lacks this much memory.
    pub(crate) fn room(&self, len: usize) -> Option<ArenaBuf> {
        self.endpoint.landings().take(len)
    }
}

/// Removes a read from the table of reads when it is dropped, unless the read was posted.
struct UnpostedRead<'a> {
    /// `None` once the read was posted.
    link: Option<&'a Link>,
    token: u64,
}

impl Drop for UnpostedRead<'_> {
    fn drop(&mut self) {
        let read = self.link.and_then(|link| link.reads(|reads| reads.take(self.token)));
        // Release the memory of the read only after the mutex is released.
        drop(read);
    }
}
