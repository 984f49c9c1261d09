//! [`OfiEndpoint`]: an endpoint of libfabric below a link.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::collections::HashMap;
use base::mem::{Arena, ArenaBuf};
use bytes::Bytes;
use fabric::{Access, Endpoint, ExposedMemory, GatherBytes, MemoryRegion, PeerBuffer, PostError};

use super::port::{Port, PostedBuffer};
use crate::transport::packets::{Buffers, LandingBuffer, Landings, Link, Registration};
use crate::transport::packets::{NotRegistered, RemoteRange};

/// The device that handles a link's connection events. The endpoint keeps the device alive.
pub(super) trait Watcher: Send + Sync {
    /// Reports that a link has ended.
    fn is_less_used(&self);
}

/// An endpoint of libfabric, with its port.
pub(crate) struct OfiEndpoint {
    id: u64,
    pub(super) port: Arc<Port<Link>>,
    watcher: Arc<dyn Watcher>,
    endpoint: Mutex<Option<Endpoint>>,
    /// Receive buffers in the endpoint's own receive queue.
    posted: Mutex<PostedBuffers>,
    /// Whether an injected fault makes the endpoint lose all packets and transfers.
    loses: AtomicBool,
}

#[derive(Default)]
struct PostedBuffers {
    buffers: HashMap<u64, PostedBuffer>,
    last_token: u64,
}

impl OfiEndpoint {
    pub(super) fn new(watcher: Arc<dyn Watcher>, port: &Arc<Port<Link>>, endpoint: Endpoint) -> OfiEndpoint {
        let (id, endpoint) = (endpoint.token(), Mutex::new(Some(endpoint)));
        let (posted, loses) = (Mutex::default(), AtomicBool::new(false));
        OfiEndpoint { id, port: Arc::clone(port), watcher, endpoint, posted, loses }
    }

    fn endpoint(&self) -> MutexGuard<'_, Option<Endpoint>> {
        // No code panics while it holds the mutex, here and below.
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn posted(&self) -> MutexGuard<'_, PostedBuffers> {
        self.posted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn establish(&self, data: &[u8]) -> Result<(), String> {
        match &*self.endpoint() {
            Some(endpoint) => endpoint.establish(data).map_err(|e| e.to_string()),
            None => Err("the link is closed".into()),
        }
    }

    /// Makes the endpoint lose all packets and transfers in both directions from now on.
    pub(super) fn lose_everything(&self) {
        self.loses.store(true, Ordering::Relaxed);
    }

    /// Whether the endpoint loses all packets and transfers.
    pub(super) fn loses_everything(&self) -> bool {
        self.loses.load(Ordering::Relaxed)
    }

    /// Posts an operation, unless the endpoint is closed or loses everything. A lost operation
    /// counts as posted, but never completes.
    fn post(&self, post: impl FnOnce(&Endpoint) -> Result<(), PostError>) -> Option<Result<(), PostError>> {
        let endpoint = self.endpoint();
        let endpoint = endpoint.as_ref()?;
        Some(if self.loses_everything() { Ok(()) } else { post(endpoint) })
    }

    /// Takes the buffer that was posted to the endpoint's own queue with `token`.
    pub(super) fn take_posted(&self, token: u64) -> Option<ArenaBuf> {
        self.posted().buffers.remove(&token).map(PostedBuffer::into_buf)
    }

    #[allow(unsafe_code)]
    fn post_own(&self, buf: ArenaBuf, region: &MemoryRegion) -> Result<(), String> {
        let endpoint = self.endpoint();
        let Some(endpoint) = &*endpoint else { return Ok(()) };
        let mut posted = self.posted();
        posted.last_token += 1;
        let token = posted.last_token;
        // SAFETY: the buffer is in `posted`, where no code accesses its bytes, until its receive has
        // completed or `close` has closed the endpoint.
        let into = unsafe { region.slice_of_lent(&buf) }.map_err(|e| e.to_string())?;
        posted.buffers.insert(token, PostedBuffer::new(buf, self.port.tenant()));
        endpoint.receive(into, token).map_err(|e| {
            posted.buffers.remove(&token);
            e.to_string()
        })
    }

    fn exposed(&self, memory: ExposedMemory, access: Access) -> Result<Registration, String> {
        self.port.common.control.check_memory()?;
        let region = MemoryRegion::expose(&self.port.domain, memory, access);
        region.map(Registration::Ofi).map_err(|e| e.to_string())
    }

    // The operations of a `LinkEndpoint`, which documents them.

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn provider(&self) -> &str {
        &self.port.common.config.provider
    }

    pub(crate) fn buffers(&self) -> &Buffers {
        &self.port.common.buffers
    }

    pub(crate) fn landings(&self) -> &Landings {
        &self.port.common.landings
    }

    pub(crate) fn inject_max(&self) -> usize {
        self.port.domain.info().inject_size()
    }

    pub(crate) fn parts_max(&self) -> usize {
        self.port.domain.info().send_parts_max()
    }

    pub(crate) fn enter(&self, own_token: u64, link: &Arc<Link>) {
        self.port.enter(self.id, own_token, link);
    }

    pub(crate) fn leave(&self, own_token: u64, outstanding: u32) {
        self.port.leave(self.id, own_token, outstanding);
    }

    pub(crate) fn close(&self) -> bool {
        let Some(endpoint) = self.endpoint().take() else { return false };
        drop(endpoint);
        // The memory may be released only after the endpoint is closed.
        let posted = std::mem::take(&mut self.posted().buffers);
        drop(posted);
        true
    }

    pub(crate) fn may_grow(&self, more: u32) -> bool {
        self.port.may_grow(more)
    }

    pub(crate) fn is_due(&self, link: &Arc<Link>) {
        self.port.is_due(link);
    }

    /// Posts to the shared queue of the port if the port has one, and otherwise to the endpoint's
    /// own queue.
    pub(crate) fn post_receive(&self, buf: ArenaBuf) -> Result<(), String> {
        let region = self.port.region(buf.arena(), Access::Messages)?;
        match self.port.shared_receives() {
            Some(queue) => self.port.post_shared(queue, buf, &region),
            None => self.post_own(buf, &region),
        }
    }

    pub(crate) fn inject(&self, packet: &[u8]) -> Option<Result<(), PostError>> {
        self.post(|endpoint| endpoint.inject(packet))
    }

    pub(crate) fn send_parts(
        &self,
        parts: &mut Vec<GatherBytes>,
        notify: bool,
    ) -> Option<Result<(), PostError>> {
        self.post(|endpoint| endpoint.send_parts(parts, 0, notify))
    }

    pub(crate) fn write_parts(
        &self,
        parts: &mut Vec<GatherBytes>,
        to: RemoteRange,
        notify: bool,
    ) -> Option<Result<(), PostError>> {
        self.post(|endpoint| endpoint.write_parts(parts, to.region.slice(to.offset, to.len)?, 0, notify))
    }

    pub(crate) fn read(
        &self,
        landing: &LandingBuffer,
        at: usize,
        from: RemoteRange,
        token: u64,
    ) -> Option<Result<(), PostError>> {
        self.post(|endpoint| {
            let remote = from.region.slice(from.offset, from.len)?;
            endpoint.read(landing.slice(at, from.len)?, remote, token)
        })
    }

    pub(crate) fn packet_region(&self, arena: &Arc<Arena>) -> Result<Option<MemoryRegion>, String> {
        if !self.port.domain.info().mr_mode().local {
            return Ok(None);
        }
        self.port.region(arena, Access::Messages).map(Some)
    }

    pub(crate) fn region_of(&self, bytes: &Bytes) -> Result<Option<MemoryRegion>, NotRegistered> {
        self.port.region_of(bytes)
    }

    pub(crate) fn land(&self, buf: &PeerBuffer, arena: &Arc<Arena>) -> Result<Registration, String> {
        if self.port.domain.info().exposes_local_memory() {
            self.exposed(ExposedMemory::Buffer(buf.clone()), Access::ReadSink)
        } else {
            self.port.region(arena, Access::Local).map(Registration::Ofi)
        }
    }

    pub(crate) fn expose(&self, memory: ExposedMemory) -> Result<Registration, String> {
        let access = match memory {
            ExposedMemory::Bytes(_) => Access::RemoteRead,
            ExposedMemory::Buffer(_) => Access::RemoteWrite,
        };
        self.exposed(memory, access)
    }

    pub(crate) fn quarantined_bytes(&self) -> usize {
        self.port.domain.quarantined_bytes()
    }
}

impl Drop for OfiEndpoint {
    fn drop(&mut self) {
        self.close();
        self.watcher.is_less_used();
    }
}
