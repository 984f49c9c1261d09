//! One-sided transfers of a link: reads of the peer's memory into buffers, and writes into it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use base::mem::ArenaBuf;
use bytes::Bytes;
use fabric::{Access, Exposed, MemoryRegion, Part, RemoteRegion};
use tokio::sync::oneshot;

use super::link::{Link, LinkFailed};

/// A buffer that is being read into. It has no other owner until nothing writes to it any more.
#[derive(Debug)]
pub(crate) struct Landing {
    /// Both are taken when it ends.
    buf: Option<Arc<ArenaBuf>>,
    region: Option<MemoryRegion>,
    /// Offset of the buffer in the region.
    base: usize,
}

/// A read under way.
pub(super) struct Read {
    landing: Arc<Landing>,
    deadline: Instant,
    done: oneshot::Sender<()>,
}

impl Read {
    pub(super) fn finish(self) {
        drop(self.landing);
        // Whoever asked may have gone away.
        let _ = self.done.send(());
    }
}

/// The reads under way, by token.
#[derive(Default)]
pub(super) struct Reads {
    last: u64,
    active: HashMap<u64, Read>,
}

impl Reads {
    pub(super) fn take(&mut self, token: u64) -> Option<Read> {
        self.active.remove(&token)
    }

    pub(super) fn put_back(&mut self, token: u64, read: Read) {
        self.active.insert(token, read);
    }
}

impl Link {
    /// Makes ready to read into `buf`.
    pub(crate) fn land(&self, buf: ArenaBuf) -> Result<Arc<Landing>, (ArenaBuf, String)> {
        let buf = Arc::new(buf);
        let exposes = self.port.domain.info().exposes_local_memory();
        let (region, base) = if exposes {
            let memory = Exposed::Buffer(Arc::clone(&buf));
            (self.exposed(memory, Access::ReadSink), 0)
        } else {
            (self.port.region(buf.arena(), Access::Local), buf.offset())
        };
        match region {
            Ok(region) => Ok(Arc::new(Landing { buf: Some(buf), region: Some(region), base })),
            Err(e) => match Arc::into_inner(buf) {
                Some(buf) => Err((buf, e)),
                None => unreachable!("a region that was not made keeps nothing"),
            },
        }
    }

    /// Reads `len` bytes at `from` of the peer's memory to `at` of a landing; before `deadline`, after which the link is
    /// [overdue](Self::is_overdue). Whoever goes away meanwhile leaves the memory with the link.
    pub(crate) async fn read(
        &self,
        landing: &Arc<Landing>,
        at: usize,
        from: RemoteRegion,
        (offset, len): (usize, usize),
        deadline: Instant,
    ) -> Result<(), LinkFailed> {
        let bad = |e: fabric::FabricError| LinkFailed(e.to_string());
        let remote = from.slice(offset, len).map_err(bad)?;
        let region = landing.region.as_ref().ok_or_else(|| LinkFailed("the landing has ended".into()))?;
        let into = region.slice(landing.base + at, len).map_err(bad)?;
        let (done, finished) = oneshot::channel();
        let mut token = 0;
        self.reads(|reads| {
            reads.last += 1;
            token = reads.last;
            reads.active.insert(token, Read { landing: Arc::clone(landing), deadline, done });
        });
        // Not posted, it is not under way: also if this future is dropped while it waits for room.
        let mut unposted = Unposted { link: Some(self), token };
        self.post(|endpoint| endpoint.read(into, remote, token)).await?;
        unposted.link = None;
        finished.await.map_err(|_| self.failure().unwrap_or(LinkFailed("the connection is closed".into())))
    }

    /// Writes to `offset` of the peer's memory. It is in place when a packet that is sent later has arrived. `parts` are kept
    /// until they are sent.
    pub(crate) async fn write(
        &self,
        bytes: &Bytes,
        to: RemoteRegion,
        offset: usize,
    ) -> Result<(), LinkFailed> {
        let remote = to.slice(offset, bytes.len()).map_err(|e| LinkFailed(e.to_string()))?;
        let region = self.port.region_of(bytes).map_err(|_| LinkFailed("unregistered memory".into()))?;
        let mut parts = vec![Part { bytes: bytes.clone(), region }];
        let notify = self.wants_completion(&parts);
        self.post(|endpoint| endpoint.write_parts(&mut parts, remote, 0, notify)).await
    }

    /// Whether `bytes` can be written to a peer's memory from where they are.
    pub(crate) fn can_write(&self, bytes: &Bytes) -> bool {
        self.port.region_of(bytes).is_ok()
    }

    /// Whether a read takes longer than it was given: only closing the link gives its memory back.
    pub(crate) fn is_overdue(&self) -> bool {
        let now = Instant::now();
        let mut overdue = false;
        self.reads(|reads| overdue = reads.active.values().any(|read| read.deadline <= now));
        overdue
    }

    /// Whether a read is under way.
    pub(crate) fn is_reading(&self) -> bool {
        let mut is_reading = false;
        self.reads(|reads| is_reading = !reads.active.is_empty());
        is_reading
    }

    /// Exposes memory to the peer, for it to read or to write.
    pub(crate) fn expose(&self, memory: Exposed) -> Result<MemoryRegion, String> {
        let access = match memory {
            Exposed::Bytes(_) => Access::RemoteRead,
            Exposed::Buffer(_) => Access::RemoteWrite,
        };
        self.exposed(memory, access)
    }

    fn exposed(&self, memory: Exposed, access: Access) -> Result<MemoryRegion, String> {
        self.port.common.control.check_memory()?;
        MemoryRegion::expose(&self.port.domain, memory, access).map_err(|e| e.to_string())
    }

    /// Bytes of memory that were withdrawn while the peer may have been using them: kept until the link is closed.
    pub(crate) fn quarantined_bytes(&self) -> usize {
        self.port.domain.quarantined_bytes()
    }

    /// Memory of `len` bytes for a peer to write to; `None` if there is none.
    pub(crate) fn room(&self, len: usize) -> Option<ArenaBuf> {
        self.port.common.landings.take(len)
    }
}

impl Landing {
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

impl Drop for Landing {
    fn drop(&mut self) {
        drop(self.end());
    }
}

/// Takes a read out of the table that was never posted.
struct Unposted<'a> {
    /// `None` once it was posted.
    link: Option<&'a Link>,
    token: u64,
}

impl Drop for Unposted<'_> {
    fn drop(&mut self) {
        let mut read = None;
        if let Some(link) = self.link {
            link.reads(|reads| read = reads.take(self.token));
        }
        drop(read);
    }
}
