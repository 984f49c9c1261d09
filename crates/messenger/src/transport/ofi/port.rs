//! One protection domain: its completion queue, receive buffers, registered memory and links.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base::collections::HashMap;
use base::mem::{Arena, ArenaBuf};
use bytes::Bytes;
use fabric::{
    Access, CompletionQueue, Domain, EndpointQueues, EventQueue, Fabric, Info, MemoryRegion, ReceiveQueue,
    RemoteRegion,
};
use tokio::sync::Notify;

use super::Common;
use super::tenants::{DomainSlot, ReceiveSlot, TenantUse};
use crate::transport::packets::NotRegistered;
use crate::transport::packets::packet::FIRST_GRANT;

/// Fraction of a shared queue's receives up to which existing links may enlarge their windows, as
/// numerator and denominator. The rest is reserved for new links.
const SHARES: (usize, usize) = (3, 4);

/// Number of operations for which a completion queue is opened. If the device refuses, the number
/// is halved, down to [`DEPTH_MIN`].
const DEPTH: usize = 4 << 10;

/// Minimum number of operations for which a completion queue is opened.
const DEPTH_MIN: usize = 256;

/// Token of the shared receive queue. No endpoint has this token.
pub(super) const SHARED_QUEUE: u64 = u64::MAX;

/// Maximum number of arenas whose registration is kept.
const REGIONS: usize = 64;

/// A protection domain with its queues and its links of type `L`. The links keep it alive.
pub(super) struct Port<L> {
    /// The shared receive queue. This field is dropped before the domain and the completion queue,
    /// because it depends on them.
    receives: Option<ReceiveQueue>,
    pub(super) domain: Domain,
    pub(super) completions: CompletionQueue,
    pub(super) common: Arc<Common>,
    /// Maximum number of links.
    links_max: usize,
    /// Maximum number of receives that are posted to the shared queue.
    receives_max: usize,
    state: Mutex<State<L>>,
    /// Wakes the poller when the last link has ended or the port must not be used any more.
    over: Notify,
    /// Whether the poller has stopped or the port has failed.
    stopped: AtomicBool,
    /// This field is dropped last, so that the tenant's right returns after the domain is closed.
    slot: DomainSlot,
}

/// A receive buffer in a queue of the device.
pub(super) struct PostedBuffer {
    buf: ArenaBuf,
    _slot: ReceiveSlot,
}

impl PostedBuffer {
    pub(super) fn new(buf: ArenaBuf, tenant: &Arc<TenantUse>) -> PostedBuffer {
        PostedBuffer { buf, _slot: tenant.hold_receive() }
    }

    /// Takes the buffer, whose receive has completed.
    pub(super) fn into_buf(self) -> ArenaBuf {
        self.buf
    }
}

struct State<L> {
    links: HashMap<u64, Weak<L>>,
    /// Links by the token that packets from their peers carry.
    tokens: HashMap<u64, Weak<L>>,
    /// Buffers in the shared receive queue, by the token with which they were posted.
    posted: HashMap<u64, PostedBuffer>,
    /// Number of buffers in `posted` that were posted for links that have ended.
    surplus: u32,
    /// Links that owe their peers credits.
    due: Vec<Weak<L>>,
    next_token: u64,
    /// Registered arenas with their addresses, oldest registration first.
    regions: Vec<(usize, MemoryRegion)>,
}

impl<L> State<L> {
    /// Number of buffers in the shared queue that were posted for existing links.
    fn receives(&self) -> usize {
        self.posted.len() - (self.surplus as usize).min(self.posted.len())
    }
}

impl<L> Port<L> {
    /// Opens the domain that `info` names, for the tenant of `slot`.
    pub(super) fn open(
        fabric: &Fabric,
        info: Info,
        common: Arc<Common>,
        slot: DomainSlot,
    ) -> fabric::Result<Arc<Port<L>>> {
        let domain = Domain::open(fabric, info)?;
        let (completions, depth) = open_queue(&domain)?;
        let receives = match common.config.receive_queue {
            super::ReceiveQueueKind::Shared => {
                Some(ReceiveQueue::open(domain.info(), &completions, SHARED_QUEUE)?)
            }
            super::ReceiveQueueKind::PerConnection => None,
        };
        let links_max = domain.info().endpoints_per_queue(depth, receives.is_some());
        let receives_max = domain.info().shared_receive_depth().min(depth / 2);
        let state = Mutex::new(State {
            links: HashMap::default(),
            tokens: HashMap::default(),
            posted: HashMap::default(),
            surplus: 0,
            due: Vec::new(),
            next_token: 0,
            regions: Vec::new(),
        });
        let (over, stopped) = (Notify::new(), AtomicBool::new(false));
        Ok(Arc::new(Port {
            receives,
            domain,
            completions,
            common,
            links_max,
            receives_max,
            state,
            over,
            stopped,
            slot,
        }))
    }

    pub(super) fn queues<'a>(&'a self, events: &'a EventQueue) -> EndpointQueues<'a> {
        let receives = self.receives.as_ref();
        EndpointQueues { receives, sparse: true, ..EndpointQueues::new(events, &self.completions) }
    }

    fn lock(&self) -> MutexGuard<'_, State<L>> {
        // No code panics in the middle of a change, so a poisoned mutex is safe to use.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a link. The link's endpoint has the token `id`, and packets from the link's peer carry
    /// `own_token`.
    pub(super) fn enter(&self, id: u64, own_token: u64, link: &Arc<L>) {
        let mut state = self.lock();
        state.links.insert(id, Arc::downgrade(link));
        state.tokens.insert(own_token, Arc::downgrade(link));
    }

    /// The link whose endpoint has the token `id`.
    pub(super) fn link(&self, id: u64) -> Option<Arc<L>> {
        self.lock().links.get(&id).and_then(Weak::upgrade)
    }

    /// The link to which packets with `token` belong.
    pub(super) fn link_of_packets(&self, token: u64) -> Option<Arc<L>> {
        self.lock().tokens.get(&token).and_then(Weak::upgrade)
    }

    /// Returns any link of the port, if one exists.
    pub(super) fn any_link(&self) -> Option<Arc<L>> {
        self.lock().links.values().find_map(Weak::upgrade)
    }

    pub(super) fn links(&self) -> Vec<Arc<L>> {
        self.lock().links.values().filter_map(Weak::upgrade).collect()
    }

    /// Whether no link is left.
    pub(super) fn is_unused(&self) -> bool {
        self.lock().links.is_empty()
    }

    /// Empties the list of links that owe their peers credits, and returns these links.
    pub(super) fn take_due(&self) -> Vec<Weak<L>> {
        std::mem::take(&mut self.lock().due)
    }

    /// Takes the buffer that was posted to the shared queue with `token`.
    pub(super) fn take_posted(&self, token: u64) -> Option<ArenaBuf> {
        self.lock().posted.remove(&token).map(PostedBuffer::into_buf)
    }

    /// Shows the buffer that was posted to the shared queue with `token`, whose receive has completed.
    pub(super) fn peek_posted<T>(&self, token: u64, look: impl FnOnce(&ArenaBuf) -> T) -> Option<T> {
        self.lock().posted.get(&token).map(|posted| look(&posted.buf))
    }

    /// Marks the port as stopped, so that it gets no more links.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Waits until the last link has ended or [`is_less_used`](Self::is_less_used) is called.
    pub(super) async fn changed(&self) {
        self.over.notified().await;
    }

    pub(super) fn shared_receives(&self) -> Option<&ReceiveQueue> {
        self.receives.as_ref()
    }

    /// Removes a link that has ended. A shared queue still holds `posted` buffers that were posted
    /// for the link.
    pub(super) fn leave(&self, id: u64, token: u64, posted: u32) {
        let mut state = self.lock();
        state.links.remove(&id);
        state.tokens.remove(&token);
        if self.receives.is_some() {
            state.surplus += posted;
        }
        let is_empty = state.links.is_empty();
        drop(state);
        if is_empty {
            self.over.notify_one();
        }
    }

    /// Wakes the poller, which then checks whether the port is still usable and has links.
    pub(super) fn is_less_used(&self) {
        self.over.notify_one();
    }

    /// Whether the port is usable.
    pub(super) fn is_good(&self) -> bool {
        !self.domain.is_spoiled() && !self.stopped.load(Ordering::Relaxed)
    }

    /// Whether the port is usable and has room for one more link.
    pub(super) fn has_room(&self) -> bool {
        let state = self.lock();
        let first = FIRST_GRANT as usize;
        let has_receives = state.receives() + first <= self.receives_max;
        let may_post = state.surplus as usize >= first || self.tenant().check_receives(first).is_ok();
        state.links.len() < self.links_max && has_receives && may_post && self.is_good()
    }

    /// The tenant to which the port belongs.
    pub(super) fn tenant(&self) -> &Arc<TenantUse> {
        self.slot.tenant()
    }

    /// Whether `more` additional buffers may be posted for a link.
    pub(super) fn may_grow(&self, more: u32) -> bool {
        let (more, most) = (more as usize, self.receives_max / SHARES.1 * SHARES.0);
        self.tenant().check_receives(more).is_ok()
            && (self.receives.is_none() || self.lock().receives() + more <= most)
    }

    /// Records that `link` owes its peer credits. The poller sends the credits if no other packet
    /// carries them before.
    pub(super) fn is_due(&self, link: &Arc<L>) {
        self.lock().due.push(Arc::downgrade(link));
    }

    /// Posts one buffer of `region` to the shared queue. If the queue still holds a buffer that was
    /// posted for a link that has ended, the existing buffer suffices, and `buf` is dropped.
    #[allow(unsafe_code)]
    pub(super) fn post_shared(
        &self,
        queue: &ReceiveQueue,
        buf: ArenaBuf,
        region: &MemoryRegion,
    ) -> Result<(), String> {
        let mut state = self.lock();
        if state.surplus > 0 {
            state.surplus -= 1;
            return Ok(());
        }
        state.next_token += 1;
        let token = state.next_token;
        // SAFETY: the buffer is in `posted`, where no code accesses its bytes, until its receive has
        // completed. The port drops `posted` last: links hold the port until their endpoints are
        // closed, and the field `receives` then closes the queue.
        let into = unsafe { region.slice_of_lent(&buf) }.map_err(|e| e.to_string())?;
        state.posted.insert(token, PostedBuffer::new(buf, self.tenant()));
        queue.receive(into, token).map_err(|e| {
            state.posted.remove(&token);
            e.to_string()
        })
    }

    /// The registration of an arena for this process's own use. Registers the arena if necessary.
    pub(super) fn region(&self, arena: &Arc<Arena>, access: Access) -> Result<MemoryRegion, String> {
        let key = arena.as_raw().0 as usize;
        let mut state = self.lock();
        let at = state
            .regions
            .iter()
            .position(|(k, r)| *k == key && r.arena().is_some_and(|a| Arc::ptr_eq(a, arena)));
        if let Some(at) = at {
            return Ok(state.regions[at].1.clone());
        }
        self.common.control.check_memory()?;
        let region = MemoryRegion::register(&self.domain, arena, access).map_err(|e| e.to_string())?;
        if state.regions.len() == REGIONS {
            state.regions.remove(0);
        }
        state.regions.push((key, region.clone()));
        Ok(region)
    }

    /// The registered arenas, as a peer would name them.
    pub(super) fn registered(&self) -> Vec<RemoteRegion> {
        self.lock().regions.iter().map(|(_, region)| region.remote()).collect()
    }

    /// The registration of the memory of `bytes`, for sending. Returns `Ok(None)` if the provider
    /// needs no registration.
    ///
    /// # Errors
    /// If `bytes` are in no arena, or the arena cannot be registered.
    pub(super) fn region_of(&self, bytes: &Bytes) -> Result<Option<MemoryRegion>, NotRegistered> {
        if !self.domain.info().mr_mode().local {
            return Ok(None);
        }
        let arena = base::mem::Arena::containing(bytes).ok_or(NotRegistered)?;
        let access = self.access_of(&arena);
        self.region(&arena, access).map(Some).map_err(|e| {
            tracing::debug!(error = %e, "memory cannot be registered for sending");
            NotRegistered
        })
    }

    /// The access for which an arena is registered. The arenas of packets are used only for
    /// messages. Other arenas are also used for one-sided transfers.
    pub(super) fn access_of(&self, arena: &Arc<Arena>) -> Access {
        if self.common.buffers.own(arena) {
            Access::Messages
        } else if self.domain.info().exposes_local_memory() {
            // Peers could write to memory that is registered for reads. So such memory is
            // registered for each read separately.
            Access::Outgoing
        } else {
            Access::Local
        }
    }
}

/// Opens a completion queue. Also returns the number of operations for which it was opened.
fn open_queue(domain: &Domain) -> fabric::Result<(CompletionQueue, usize)> {
    let mut depth = DEPTH;
    loop {
        match CompletionQueue::open(domain, depth) {
            Err(_) if depth > DEPTH_MIN => depth /= 2,
            opened => return opened.map(|queue| (queue, depth)),
        }
    }
}
