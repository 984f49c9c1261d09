//! One protection domain: its queue of completions, its receive buffers, its registered memory, and the task that drives it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Poll;

use base::mem::{Arena, ArenaBuf};
use base::spinner::Spinner;
use bytes::Bytes;
use fabric::{
    Access, Completion, CompletionQueue, Domain, EndpointQueues, EventQueue, Fabric, Info, MemoryRegion,
    Operation, ReceiveQueue, Waitable,
};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use super::Common;
use super::descriptor::{Descriptor, is_readable};
use super::link::Link;
use super::packet::{FIRST_GRANT, HEADER_BYTES, PacketHeader};

/// Of the receives that a shared queue has room for, so many parts of [`SHARES`] may go to links that want more than they began
/// with. The rest is for new ones.
const SHARES: (usize, usize) = (3, 4);

/// Operations that may be under way; a device with smaller queues gets half as many, and so on.
const DEPTH: usize = 4 << 10;
const DEPTH_MIN: usize = 256;

/// Token of the shared receive queue, which no endpoint has.
const SHARED_QUEUE: u64 = u64::MAX;

/// Tasks that a message goes through, one after the other, until it is answered: the session's, its user's, the session's.
const HOPS: usize = 4;

/// Arenas whose registration is kept.
const REGIONS: usize = 64;

/// A protection domain and what belongs to it. Lives as long as a link in it.
pub(super) struct Port {
    /// First, since they are made from what comes after.
    receives: Option<ReceiveQueue>,
    pub(super) domain: Domain,
    pub(super) completions: CompletionQueue,
    pub(super) common: Arc<Common>,
    /// Most links.
    links_max: usize,
    /// Most receives of the shared queue.
    receives_max: usize,
    state: Mutex<State>,
    /// The last link is gone, or the domain must not be used any more.
    over: Notify,
    /// Nobody drives it any more.
    stopped: AtomicBool,
}

#[derive(Default)]
struct State {
    links: HashMap<u64, Weak<Link>>,
    /// By what peers must put in their packets.
    tokens: HashMap<u64, Weak<Link>>,
    /// Buffers of the shared receive queue, by the token they were posted with.
    posted: HashMap<u64, ArenaBuf>,
    /// Those among them that were posted for links which are gone.
    surplus: u32,
    /// Links that owe their peers credits.
    due: Vec<Weak<Link>>,
    next_token: u64,
    /// Registered arenas, by address; the one used last is the last.
    regions: Vec<(usize, MemoryRegion)>,
}

impl State {
    /// Buffers of the shared queue that links of today were promised.
    fn receives(&self) -> usize {
        self.posted.len() - (self.surplus as usize).min(self.posted.len())
    }
}

impl Port {
    /// Opens the domain that `info` names.
    pub(super) fn open(fabric: &Fabric, info: Info, common: Arc<Common>) -> fabric::Result<Arc<Port>> {
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
        let (state, over, stopped) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
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

    /// Runs the port in the background of this runtime, until its last link is gone.
    pub(super) fn start(self: &Arc<Self>) -> std::io::Result<()> {
        let asleep = Descriptor::register(self.completions.clone())?;
        crate::spawn(drive(Arc::downgrade(self), asleep));
        Ok(())
    }

    pub(super) fn queues<'a>(&'a self, events: &'a EventQueue) -> EndpointQueues<'a> {
        let receives = self.receives.as_ref();
        EndpointQueues { receives, sparse: true, ..EndpointQueues::new(events, &self.completions) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock with the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self, link: &Arc<Link>) {
        let mut state = self.lock();
        state.links.insert(link.id(), Arc::downgrade(link));
        state.tokens.insert(link.own_token(), Arc::downgrade(link));
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
    fn is_good(&self) -> bool {
        !self.domain.is_spoiled() && !self.stopped.load(Ordering::Relaxed)
    }

    /// Whether one more link may be made in it.
    pub(super) fn has_room(&self) -> bool {
        let state = self.lock();
        let has_receives = state.receives() + FIRST_GRANT as usize <= self.receives_max;
        state.links.len() < self.links_max && has_receives && self.is_good()
    }

    /// Whether a link may have `more` receives posted at a time than it had.
    fn may_grow(&self, more: u32) -> bool {
        let most = self.receives_max / SHARES.1 * SHARES.0;
        self.receives.is_none() || self.lock().receives() + more as usize <= most
    }

    /// `link` owes its peer credits; they are sent when nothing else was.
    pub(super) fn is_due(&self, link: &Arc<Link>) {
        self.lock().due.push(Arc::downgrade(link));
    }

    /// Ends all links: the domain is of no more use.
    fn fail_all(&self, why: &str) {
        let links: Vec<Arc<Link>> = self.lock().links.values().filter_map(Weak::upgrade).collect();
        for link in links {
            link.fail(why);
        }
    }

    /// The port is of no more use.
    pub(super) fn fail(&self, why: &str) {
        self.stopped.store(true, Ordering::Relaxed);
        self.fail_all(why);
        self.over.notify_one();
    }

    /// Posts one buffer for `link`'s packets.
    pub(super) fn post(&self, link: &Link, buf: ArenaBuf) -> Result<(), String> {
        let region = self.region(buf.arena(), Access::Messages)?;
        let Some(queue) = &self.receives else { return link.post_own(buf, &region) };
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

    /// Takes what has ended; `false` if that was nothing.
    fn poll(&self, completions: &mut Vec<Completion>) -> bool {
        if let Err(e) = self.completions.poll(completions) {
            tracing::warn!(error = %e, "a completion queue has failed");
            self.fail("its completion queue has failed");
            return false;
        }
        let worked = !completions.is_empty();
        for completion in completions.drain(..) {
            match completion.operation {
                Operation::Receive => self.on_receive(completion),
                Operation::Send | Operation::Write | Operation::Read => {
                    let link = self.lock().links.get(&completion.endpoint).and_then(Weak::upgrade);
                    if let Some(link) = link {
                        link.on_completion(completion);
                    }
                }
            }
        }
        if self.domain.is_spoiled() {
            self.fail_all("the domain is opened anew after a transfer was broken off");
            self.over.notify_one();
        }
        worked
    }

    fn on_receive(&self, completion: Completion) {
        let own = (completion.endpoint != SHARED_QUEUE)
            .then(|| self.lock().links.get(&completion.endpoint).and_then(Weak::upgrade))
            .flatten();
        let buf = match &own {
            Some(link) => link.take_posted(completion.token),
            None => self.lock().posted.remove(&completion.token),
        };
        let Some(mut buf) = buf else { return };
        if let Err(e) = completion.result {
            match own {
                Some(link) => link.fail(&e.to_string()),
                // A connection that ends takes its receives along; the queue's own stay.
                None => tracing::debug!(error = %e, "a shared receive has failed"),
            }
            return;
        }
        buf.truncate(completion.len);
        let header = PacketHeader::decode(&buf);
        let sender = header.and_then(|header| {
            let known = self.lock().tokens.get(&header.token).and_then(Weak::upgrade)?;
            // With queues of its own a link is known without the token, which must still be right.
            own.as_ref().is_none_or(|own| Arc::ptr_eq(own, &known)).then_some((known, header))
        });
        let Some((link, header)) = sender else {
            match own {
                Some(link) => link.fail("a packet came that is not of this connection"),
                None => {
                    metrics::counter!("outboard_messenger_stray_packets").increment(1);
                    drop(buf);
                    self.repost_stray();
                }
            }
            return;
        };
        self.take_packet(&link, header, buf);
    }

    /// Posts a buffer for one that a stray packet took: somebody was promised it.
    fn repost_stray(&self) {
        // Without a link nobody was.
        let Some(link) = self.lock().links.values().find_map(Weak::upgrade) else { return };
        if let Some(fresh) = self.common.buffers.take()
            && let Err(why) = self.post(&link, fresh)
        {
            tracing::warn!(why, "a receive buffer is lost");
        }
    }

    /// Hands a packet to its link, in its buffer, and posts another one in its place. When there is none left, the packet is
    /// copied instead: so senders never wait for readers that keep what they got.
    fn take_packet(&self, link: &Arc<Link>, header: PacketHeader, buf: ArenaBuf) {
        let fresh = self.common.buffers.take();
        let content = match &fresh {
            Some(_) => buf.freeze().slice(HEADER_BYTES..),
            None => {
                metrics::counter!("outboard_messenger_copied_packets").increment(1);
                Bytes::copy_from_slice(&buf[HEADER_BYTES..])
            }
        };
        let wanted = link.on_packet(header, content);
        // One takes the place of the packet's own.
        let wanted = if wanted > 1 && !self.may_grow(wanted) { 1 } else { wanted };
        let more = std::iter::from_fn(|| self.common.buffers.take());
        for buf in fresh.into_iter().chain(more).take(wanted as usize) {
            if let Err(why) = self.post(link, buf) {
                link.fail(&why);
                return;
            }
            link.on_posted();
        }
    }

    /// Grants packets to peers that nothing was sent to meanwhile.
    fn return_credits(&self) {
        let due = std::mem::take(&mut self.lock().due);
        for link in due.iter().filter_map(Weak::upgrade) {
            link.grant();
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

/// Lets the other tasks of this thread run, and goes on after them. Unlike `tokio::task::yield_now` this does not have the
/// runtime ask the system for events each time: it does so now and then in any case.
async fn let_others_run() {
    let mut has_yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// The queue's descriptor in the runtime's loop. While spinning pays it is not there: each packet would wake a loop that is awake.
type Asleep = AsyncFd<Descriptor<CompletionQueue>>;

/// The one poller: takes completions while there are any, looks again for a while if that pays, and sleeps on the queue's
/// descriptor in the same loop as everything else of this thread.
async fn drive(port: Weak<Port>, asleep: Asleep) {
    if let Err(e) = drive_until_over(&port, asleep).await {
        tracing::warn!(error = %e, "a completion queue cannot be waited for");
    }
    if let Some(port) = port.upgrade() {
        port.stopped.store(true, Ordering::Relaxed);
        port.fail_all("its port is closed");
    }
}

async fn drive_until_over(port: &Weak<Port>, asleep: Asleep) -> std::io::Result<()> {
    let mut spinner = Spinner::default();
    let mut completions = Vec::new();
    let mut all_have_run = false;
    let mut asleep = Some(asleep);
    loop {
        let Some(port) = port.upgrade() else { return Ok(()) };
        port.common.control.thaw().await;
        if port.poll(&mut completions) {
            if spinner.worked() {
                asleep = None;
            }
            all_have_run = false;
            // What came is handled now, and answers take the credits along.
            drop(port);
            for _ in 0..HOPS {
                let_others_run().await;
            }
            continue;
        }
        port.return_credits();
        if !all_have_run && spinner.look_again(port.common.config.spin) {
            drop(port);
            let_others_run().await;
            continue;
        }
        // Sleeping and waking costs more than looking once more when nobody else has anything to do.
        if !std::mem::replace(&mut all_have_run, true) {
            drop(port);
            tokio::task::yield_now().await;
            continue;
        }
        all_have_run = false;
        let fd = match &asleep {
            Some(fd) => fd,
            None => asleep.insert(Descriptor::register(port.completions.clone())?),
        };
        let may_sleep =
            port.domain.fabric().may_sleep(&[&port.completions]).map_err(std::io::Error::other)?;
        if !may_sleep || is_readable(port.completions.wait_fd()) {
            drop(port);
            let_others_run().await;
            continue;
        }
        tokio::select! {
            readable = fd.readable() => readable?.clear_ready(),
            () = port.over.notified() => {
                if port.lock().links.is_empty() || !port.is_good() {
                    return Ok(());
                }
            }
        }
    }
}
