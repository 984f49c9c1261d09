//! One protection domain: its completion queue, receive buffers, registered memory and links.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base::mem::{Arena, ArenaBuf};
use bytes::Bytes;
use fabric::{
    Access, CompletionQueue, Domain, EndpointQueues, EventQueue, Fabric, Info, MemoryRegion, ReceiveQueue,
};
use tokio::sync::Notify;

use super::Common;
use super::packet::FIRST_GRANT;

/// Of the receives that a shared queue has room for, so many parts of [`SHARES`] may go to links that want more than they began
/// with. The rest is for new ones.
const SHARES: (usize, usize) = (3, 4);

/// Operations that may be under way; a device with smaller queues gets half as many, and so on.
const DEPTH: usize = 4 << 10;
const DEPTH_MIN: usize = 256;

/// Token of the shared receive queue, which no endpoint has.
pub(super) const SHARED_QUEUE: u64 = u64::MAX;

/// Arenas whose registration is kept.
const REGIONS: usize = 64;

/// A protection domain and what belongs to it, with links of type `L`. Lives as long as a link in it.
pub(super) struct Port<L> {
    /// First, since they are made from what comes after.
    receives: Option<ReceiveQueue>,
    pub(super) domain: Domain,
    pub(super) completions: CompletionQueue,
    pub(super) common: Arc<Common>,
    /// Most links.
    links_max: usize,
    /// Most receives of the shared queue.
    receives_max: usize,
    state: Mutex<State<L>>,
    /// The last link is gone, or the domain must not be used any more.
    over: Notify,
    /// Nobody drives it any more.
    stopped: AtomicBool,
}

struct State<L> {
    links: HashMap<u64, Weak<L>>,
    /// By what peers must put in their packets.
    tokens: HashMap<u64, Weak<L>>,
    /// Buffers of the shared receive queue, by the token they were posted with.
    posted: HashMap<u64, ArenaBuf>,
    /// Those among them that were posted for links which are gone.
    surplus: u32,
    /// Links that owe their peers credits.
    due: Vec<Weak<L>>,
    next_token: u64,
    /// Registered arenas, by address; the one used last is the last.
    regions: Vec<(usize, MemoryRegion)>,
}

impl<L> State<L> {
    /// Buffers of the shared queue that links of today were promised.
    fn receives(&self) -> usize {
        self.posted.len() - (self.surplus as usize).min(self.posted.len())
    }
}

impl<L> Port<L> {
    /// Opens the domain that `info` names.
    pub(super) fn open(fabric: &Fabric, info: Info, common: Arc<Common>) -> fabric::Result<Arc<Port<L>>> {
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
            links: HashMap::new(),
            tokens: HashMap::new(),
            posted: HashMap::new(),
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
        }))
    }

    pub(super) fn queues<'a>(&'a self, events: &'a EventQueue) -> EndpointQueues<'a> {
        let receives = self.receives.as_ref();
        EndpointQueues { receives, sparse: true, ..EndpointQueues::new(events, &self.completions) }
    }

    fn lock(&self) -> MutexGuard<'_, State<L>> {
        // Nothing panics while it holds the lock with the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A link is made, whose endpoint has the token `id`; packets to it bear `own_token`.
    pub(super) fn enter(&self, id: u64, own_token: u64, link: &Arc<L>) {
        let mut state = self.lock();
        state.links.insert(id, Arc::downgrade(link));
        state.tokens.insert(own_token, Arc::downgrade(link));
    }

    /// The link whose endpoint has the token `id`.
    pub(super) fn link(&self, id: u64) -> Option<Arc<L>> {
        self.lock().links.get(&id).and_then(Weak::upgrade)
    }

    /// The link to which packets with `token` go.
    pub(super) fn link_of_packets(&self, token: u64) -> Option<Arc<L>> {
        self.lock().tokens.get(&token).and_then(Weak::upgrade)
    }

    /// Any link.
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

    /// Takes the links that owe their peers credits.
    pub(super) fn take_due(&self) -> Vec<Weak<L>> {
        std::mem::take(&mut self.lock().due)
    }

    /// The buffer of the shared queue that was posted with `token`.
    pub(super) fn take_posted(&self, token: u64) -> Option<ArenaBuf> {
        self.lock().posted.remove(&token)
    }

    /// No more links are made in it.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Resolves when a link has ended or the port was stopped.
    pub(super) async fn changed(&self) {
        self.over.notified().await;
    }

    pub(super) fn shared_receives(&self) -> Option<&ReceiveQueue> {
        self.receives.as_ref()
    }

    /// A link is gone, for which there are still `posted` buffers if the queue is shared.
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

    /// Whoever drives the port looks whether there is a link left.
    pub(super) fn is_less_used(&self) {
        self.over.notify_one();
    }

    /// Whether links may be made in it.
    pub(super) fn is_good(&self) -> bool {
        !self.domain.is_spoiled() && !self.stopped.load(Ordering::Relaxed)
    }

    /// Whether one more link may be made in it.
    pub(super) fn has_room(&self) -> bool {
        let state = self.lock();
        let has_receives = state.receives() + FIRST_GRANT as usize <= self.receives_max;
        state.links.len() < self.links_max && has_receives && self.is_good()
    }

    /// Whether a link may have `more` receives posted at a time than it had.
    pub(super) fn may_grow(&self, more: u32) -> bool {
        let most = self.receives_max / SHARES.1 * SHARES.0;
        self.receives.is_none() || self.lock().receives() + more as usize <= most
    }

    /// `link` owes its peer credits; they are sent when nothing else was.
    pub(super) fn is_due(&self, link: &Arc<L>) {
        self.lock().due.push(Arc::downgrade(link));
    }

    /// Posts one buffer of `region` to the shared queue, unless there is one too many in it.
    pub(super) fn post_shared(
        &self,
        queue: &ReceiveQueue,
        buf: ArenaBuf,
        region: &MemoryRegion,
    ) -> Result<(), String> {
        let (offset, len) = (buf.offset(), buf.len());
        let mut state = self.lock();
        if state.surplus > 0 {
            state.surplus -= 1;
            return Ok(());
        }
        state.next_token += 1;
        let token = state.next_token;
        state.posted.insert(token, buf);
        let posted = region
            .slice(offset, len)
            .map_err(fabric::PostError::from)
            .and_then(|into| queue.receive(into, token));
        posted.map_err(|e| {
            state.posted.remove(&token);
            e.to_string()
        })
    }

    /// The registration of an arena for this process's own use, made if there is none yet.
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

    /// A region that `bytes` lie in, for sending; `Ok(None)` if the provider needs none, and an error if they are in no arena.
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

    /// What an arena is registered for: packets are but messages; others are moved to and from.
    pub(super) fn access_of(&self, arena: &Arc<Arena>) -> Access {
        if self.common.buffers.own(arena) {
            Access::Messages
        } else if self.domain.info().exposes_local_memory() {
            // What is read into would be open to peers: that is registered for each read.
            Access::Outgoing
        } else {
            Access::Local
        }
    }
}

/// Bytes that are in no memory which could be registered.
pub(super) struct NotRegistered;

/// Opens a queue; returns for how many operations, too.
fn open_queue(domain: &Domain) -> fabric::Result<(CompletionQueue, usize)> {
    let mut depth = DEPTH;
    loop {
        match CompletionQueue::open(domain, depth) {
            Err(_) if depth > DEPTH_MIN => depth /= 2,
            opened => return opened.map(|queue| (queue, depth)),
        }
    }
}
