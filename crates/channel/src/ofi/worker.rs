//! The engine's thread.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use base::fault::{Action, Faults, Site};
use base::mem::Arena;
use fabric::{
    Access, Completion, Endpoint, Event, Info, Library, MemoryRegion, Operation, PostError, Target,
};
use tokio::sync::oneshot;

use super::alarm::wait_for;
use super::engine::{Command, Item, Rung, Shared};
use super::faults::{Fate, damage, damaged_copy};
use super::flow::{Flow, Work};
use super::greeting::Greeting;
use super::hazards::Footprint;
use super::lane::{Lane, WINDOW, scratch};
use super::line::{self, Line};
use super::port::{Port, query};
use super::spinner::Spinner;
use super::{OfiOffer, QUEUES};
use crate::dma::{Failed, PeerId, QueueId};
use crate::{ChannelError, Place, RegionId, Result, Transfer};

/// Room in the completion queue: for the peer in use and one that has not been forgotten yet. Each lane has a window of
/// transfers, one probe beside it, and the messages of its line.
const DEPTH: usize = 2 * QUEUES * (WINDOW + 1 + line::DEPTH);
/// When the provider is full without anything of ours being under way, it is asked again after that.
const RETRY: Duration = Duration::from_millis(1);

/// Memory of this process.
struct Local {
    /// `None` while there is no port, or if it could not be registered.
    registered: Option<MemoryRegion>,
    arena: Arc<Arena>,
}

/// A store's process.
struct Remote {
    offer: OfiOffer,
    rung: Arc<Rung>,
    /// By queue. None if the connections are closed.
    lanes: Vec<Lane>,
    state: State,
    /// How often it was tried to connect.
    attempt: u32,
}

enum State {
    /// To be given up then; who attaches, waits for the connections to stand.
    Connecting(Instant, Option<oneshot::Sender<Result<usize>>>),
    Up,
    /// Connects again when a chain wants to go there.
    Down,
}

/// Who is told that a peer is lost.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tell {
    /// Its chains, if there are any.
    Chains,
    /// Its chains; if there are none, a completion with tag 0 says so.
    Always,
}

/// Where a transfer goes.
struct Plan {
    peer: PeerId,
    footprint: Footprint,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    library: Library,
    faults: Faults,
    connect_timeout: Duration,
    flows: [Flow; QUEUES],
    /// What must wait until its queue has no chain under way.
    held: [Option<Item>; QUEUES],
    peers: HashMap<PeerId, Remote>,
    locals: HashMap<RegionId, Local>,
    windows: HashMap<RegionId, (PeerId, Range<usize>)>,
    port: Option<Port>,
    /// There are completions to tell of.
    completed: bool,
    /// The provider was full.
    retry: bool,
    running: bool,
    bytes_metric: metrics::Counter,
    transfers_metric: metrics::Counter,
}

impl Worker {
    pub(super) fn new(
        shared: Arc<Shared>,
        library: Library,
        faults: Faults,
        connect_timeout: Duration,
    ) -> Worker {
        Worker {
            shared,
            library,
            faults,
            connect_timeout,
            flows: Default::default(),
            held: Default::default(),
            peers: HashMap::new(),
            locals: HashMap::new(),
            windows: HashMap::new(),
            port: None,
            completed: false,
            retry: false,
            running: true,
            bytes_metric: metrics::counter!("outboard_channel_dma_bytes"),
            transfers_metric: metrics::counter!("outboard_channel_dma_transfers"),
        }
    }

    pub(super) fn run(mut self) {
        let mut spinner = Spinner::default();
        while self.running {
            let worked = self.turn();
            if std::mem::take(&mut self.completed) {
                self.shared.waker.wake();
            }
            let spin = Duration::from_nanos(self.shared.spin_ns.load(Ordering::Relaxed));
            if worked {
                spinner.worked();
            } else if self.running && !spinner.look_again(spin) {
                self.sleep();
            }
        }
        self.reset("the engine has stopped", Tell::Chains);
        self.peers.values().for_each(|peer| peer.rung.close());
        self.shared.waker.wake();
    }

    /// Does what there is to do; `false` if that was nothing.
    fn turn(&mut self) -> bool {
        self.retry = false;
        let mut worked = self.take_commands();
        worked |= self.poll();
        self.give_up_overdue();
        worked |= self.close_spoiled_port();
        for queue in 0..QUEUES {
            worked |= self.advance(queue);
        }
        // What is lost here fails chains, which are finished in the next turn.
        worked |= self.flush();
        worked
    }

    fn has_input(&self) -> bool {
        let mut queues = self.shared.queues.iter().zip(&self.flows);
        !self.shared.commands.is_empty() || queues.any(|(q, flow)| !flow.blocked && !q.items.is_empty())
    }

    fn sleep(&self) {
        let deadlines = self.peers.values().filter_map(|peer| match peer.state {
            State::Connecting(until, _) => Some(until),
            State::Up | State::Down => None,
        });
        let deadlines = deadlines.chain(self.flows.iter().filter_map(Flow::stalled));
        let waits = deadlines.map(|until| until.saturating_duration_since(Instant::now()).max(RETRY));
        let timeout = waits.chain(self.retry.then_some(RETRY)).min();
        let wait = |alarm: std::os::fd::BorrowedFd<'_>| match &self.port {
            Some(port) => port.wait(&[alarm], timeout),
            None => wait_for(alarm, timeout),
        };
        self.shared.alarm.sleep(|| self.has_input(), wait);
    }

    fn take_commands(&mut self) -> bool {
        let mut worked = false;
        while let Some(command) = self.shared.commands.pop() {
            worked = true;
            match command {
                Command::Local(id, arena) => {
                    let registered = self.port.as_ref().and_then(|port| register(port, &arena));
                    self.locals.insert(id, Local { registered, arena });
                }
                Command::Attach { id, offer, rung, reply } => {
                    let state = State::Down;
                    self.peers.insert(id, Remote { offer, rung, lanes: Vec::new(), state, attempt: 0 });
                    match (self.connect(id), self.peers.get_mut(&id)) {
                        (Ok(()), Some(Remote { state: State::Connecting(_, asks), .. })) => {
                            *asks = Some(reply)
                        }
                        (Err(e), _) => {
                            self.peers.remove(&id);
                            // Whoever asked may have given up.
                            let _ = reply.send(Err(e));
                        }
                        // Without a reply, whoever asked hears that the engine has stopped.
                        (Ok(()), _) => {}
                    }
                }
                Command::Window(id, peer, range) => drop(self.windows.insert(id, (peer, range))),
                // Whoever asked for it knows.
                Command::Reset => self.reset("the engine was reset", Tell::Chains),
                Command::Stop => self.running = false,
            }
        }
        worked
    }

    /// Starts connecting to a peer, anew if need be.
    fn connect(&mut self, id: PeerId) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&id) else { return Ok(()) };
        peer.attempt += 1;
        let (offer, attempt) = (peer.offer.clone(), peer.attempt);
        let info = query(self.library, &offer.provider, Target::Connect(offer.address))?;
        if info.exposes_local_memory() {
            let what =
                "over iWARP the store's process could write all DPU memory; use RoCE or InfiniBand, or tcp";
            return Err(ChannelError::Refused(what.to_owned()));
        }
        self.open_port(&info, &offer)?;
        let port = self.port.as_ref().ok_or_else(|| ChannelError::protocol("no port"))?;
        let mut lanes = Vec::with_capacity(QUEUES);
        for queue in 0..QUEUES {
            let token = token_of(id, queue);
            let endpoint = Endpoint::connecting(&info, &port.events, &port.completions, token)?;
            let line = Line::new(endpoint, &port.domain)?;
            let greeting = Greeting { queue, attempt, secret: offer.secret };
            line.endpoint.establish(&greeting.encode())?;
            lanes.push(Lane::new(line));
        }
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.lanes = lanes;
            peer.state = State::Connecting(Instant::now() + self.connect_timeout, None);
        }
        Ok(())
    }

    /// Peers that do not answer.
    fn give_up_overdue(&mut self) {
        let overdue = |peer: &Remote| match peer.state {
            State::Connecting(until, _) => until <= Instant::now(),
            State::Up | State::Down => false,
        };
        let ids: Vec<PeerId> =
            self.peers.iter().filter(|(_, peer)| overdue(peer)).map(|(id, _)| *id).collect();
        for id in ids {
            self.lose(id, "the peer does not answer", Tell::Always);
        }
    }

    /// Sees to it that the port suits `info`, with all local memory registered.
    fn open_port(&mut self, info: &Info, offer: &OfiOffer) -> Result<()> {
        self.close_spoiled_port();
        if self.port.as_ref().is_some_and(|port| port.suits(info)) {
            return Ok(());
        }
        if self.peers.values().any(|peer| !peer.lanes.is_empty()) {
            let what = format!("{} is reached by another device than the peer in use", offer.address);
            return Err(ChannelError::Refused(what));
        }
        self.close_port();
        let target = Target::Connect(offer.address);
        let port = Port::open(query(self.library, &offer.provider, target)?, DEPTH)?;
        for local in self.locals.values_mut() {
            local.registered = Some(MemoryRegion::register(&port.domain, &local.arena, Access::Local)?);
        }
        self.port = Some(port);
        Ok(())
    }

    /// If the port's domain cannot be used any more: closes it and all connections. The next chain opens them again.
    fn close_spoiled_port(&mut self) -> bool {
        let spoiled = self.port.as_ref().is_some_and(|port| port.domain.is_spoiled());
        if spoiled {
            let peers: Vec<PeerId> = self.peers.keys().copied().collect();
            for peer in peers {
                self.lose(peer, "the device is opened anew after a failure", Tell::Always);
            }
            self.close_port();
        }
        spoiled
    }

    fn close_port(&mut self) {
        for local in self.locals.values_mut() {
            local.registered = None;
        }
        self.port = None;
    }

    /// Takes what the port has; `false` if that is nothing.
    fn poll(&mut self) -> bool {
        let Some(port) = &self.port else { return false };
        let (mut events, mut completions) = (Vec::new(), Vec::new());
        let polled = match self.faults.hit(Site::DmaDevice) {
            Some(Action::Fail) => Err(ChannelError::Transfer("a fault was injected".to_owned())),
            _ => port.poll(&mut events, &mut completions),
        };
        if let Err(e) = polled {
            self.reset(&format!("the device failed: {e}"), Tell::Always);
            self.close_port();
            return true;
        }
        let worked = !events.is_empty() || !completions.is_empty();
        // A doorbell may have come together with the end of its connection, and events say better why that ended.
        let (well, failed): (Vec<_>, Vec<_>) = completions.into_iter().partition(|c| c.result.is_ok());
        well.iter().for_each(|completion| self.completed(completion));
        events.into_iter().for_each(|event| self.happened(event));
        failed.iter().for_each(|completion| self.completed(completion));
        worked
    }

    fn happened(&mut self, event: Event) {
        match event {
            Event::Connected { endpoint, .. } => self.connected(endpoint),
            Event::Closed { endpoint } => {
                self.lose(peer_of(endpoint), "the peer closed the connection", Tell::Always)
            }
            Event::Failed { endpoint, error, data } => {
                let reason = String::from_utf8_lossy(&data);
                let reason = reason.trim_end_matches('\0');
                self.lose(peer_of(endpoint), &format!("{error}: {reason}"), Tell::Always);
            }
            Event::SomeFailed { error } => {
                let connecting = |peer: &Remote| matches!(peer.state, State::Connecting(..));
                let ids = self.peers.iter().filter(|(_, peer)| connecting(peer)).map(|(id, _)| *id);
                for id in ids.collect::<Vec<_>>() {
                    self.lose(id, &error.to_string(), Tell::Always);
                }
            }
            _ => {}
        }
    }

    fn connected(&mut self, endpoint: u64) {
        let max = self.port.as_ref().map_or(0, |port| port.domain.info().max_msg_size());
        let Some(peer) = self.peers.get_mut(&peer_of(endpoint)) else { return };
        let Some(lane) = peer.lanes.get_mut(queue_of(endpoint)) else { return };
        lane.line.established = true;
        if peer.lanes.iter().all(|lane| lane.line.established)
            && let State::Connecting(_, Some(reply)) = std::mem::replace(&mut peer.state, State::Up)
        {
            // Whoever asked may have given up; then the peer is being detached.
            let _ = reply.send(Ok(max));
        }
    }

    fn completed(&mut self, completion: &Completion) {
        let (id, queue) = (peer_of(completion.endpoint), queue_of(completion.endpoint));
        if let Err(e) = &completion.result {
            return self.lose(id, &format!("{:?} failed: {e}", completion.operation), Tell::Always);
        }
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let Some(lane) = peer.lanes.get_mut(queue) else { return };
        match completion.operation {
            Operation::Receive => match lane.line.received(completion) {
                Ok(0) => {}
                Ok(count) => peer.rung.ring(count),
                Err(e) => self.lose(id, &e.to_string(), Tell::Always),
            },
            Operation::Send => lane.line.sent(completion),
            operation => {
                let done = lane.complete(completion.token, operation == Operation::Read);
                let Some(done) = done else { return };
                let work = done.chain.and_then(|chain| self.flows[queue].get(chain));
                if let Some((transfer, corrupt)) = work.and_then(|work| work.complete(done.number)) {
                    let Place { region, offset } = transfer.dst;
                    if corrupt && let Some(local) = self.locals.get(&region) {
                        damage(&local.arena, offset, transfer.len);
                    }
                    let len = transfer.len as u64;
                    self.shared.bytes.fetch_add(len, Ordering::Relaxed);
                    self.shared.transfers.fetch_add(1, Ordering::Relaxed);
                    self.bytes_metric.increment(len);
                    self.transfers_metric.increment(1);
                }
            }
        }
    }

    /// Closes the connections to a peer, after which nothing of it touches memory, and fails its chains.
    fn lose(&mut self, id: PeerId, why: &str, tell: Tell) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let detached = peer.rung.is_detached();
        let state = std::mem::replace(&mut peer.state, State::Down);
        let lanes = std::mem::take(&mut peer.lanes);
        if lanes.is_empty() {
            return;
        }
        let confirmed: Vec<u64> = lanes.iter().map(|lane| lane.confirmed).collect();
        drop(lanes);
        tracing::debug!("peer {}: {why}", id.0);
        if let State::Connecting(_, Some(reply)) = state {
            // Whoever asked may have given up.
            let _ = reply.send(Err(ChannelError::Refused(why.to_owned())));
            return;
        }
        let mut told = false;
        for (flow, confirmed) in self.flows.iter_mut().zip(confirmed) {
            let concerned = |work: &&mut Work| {
                work.peer == Some(id) || work.awaits.iter().any(|(p, number)| *p == id && *number > confirmed)
            };
            for work in flow.iter_mut().filter(concerned) {
                work.abandon(why, confirmed);
                told = true;
            }
            // What others await of this peer is confirmed already.
            flow.iter_mut().for_each(|work| work.awaits.retain(|(p, _)| *p != id));
        }
        if !told && tell == Tell::Always && !detached {
            // Chains without a tag that were thought to be done, and doorbells of either side, may have got lost.
            let (now, why) = (Instant::now(), why.to_owned());
            let result = Err(Failed { done: 0, why });
            self.shared.completions.push(crate::Completion { tag: 0, result, started: now, finished: now });
            self.completed = true;
        }
    }

    /// Gives up every chain, and every peer with it.
    fn reset(&mut self, why: &str, tell: Tell) {
        let peers: Vec<PeerId> = self.peers.keys().copied().collect();
        for peer in peers {
            self.lose(peer, why, tell);
        }
        let mut forgotten = Vec::new();
        for queue in 0..QUEUES {
            // With the peers gone, each chain that is taken up fails; those without a peer are no use either.
            self.flows[queue].iter_mut().for_each(|work| work.abandon(why, 0));
            self.finish(queue);
            while let Some(item) = self.held[queue].take().or_else(|| self.shared.queues[queue].items.pop()) {
                match item {
                    Item::Chain(chain) => {
                        let mut work = Work::new(chain);
                        work.abandon(why, 0);
                        self.flows[queue].push(work);
                        self.finish(queue);
                    }
                    // What was posted after the reset is not concerned.
                    Item::Reset => break,
                    item => forgotten.push(item),
                }
            }
        }
        // Commands may come with these, another reset among them.
        forgotten.into_iter().for_each(|item| self.forget(item));
    }

    /// Carries on with a queue as far as it goes; `false` if nothing could be done.
    fn advance(&mut self, queue: QueueId) -> bool {
        let mut worked = self.finish(queue);
        loop {
            self.flows[queue].blocked = false;
            let unposted = self.flows[queue].last().filter(|(_, work)| !work.is_posted()).map(|(n, _)| n);
            if let Some(number) = unposted {
                if !self.push_on(queue, number) {
                    self.flows[queue].blocked = true;
                    break;
                }
                worked = true;
                continue;
            }
            worked |= self.finish(queue);
            let resetting = matches!(self.held[queue], Some(Item::Reset));
            if resetting || self.held[queue].is_some() && !self.flows[queue].is_empty() {
                self.flows[queue].blocked = true;
                break;
            }
            match self.held[queue].take().or_else(|| self.shared.queues[queue].items.pop()) {
                None => break,
                Some(Item::Chain(chain)) => {
                    self.flows[queue].push(Work::new(chain));
                    // What it uses was registered before it was posted. A reset that comes with it concerns it, too.
                    self.take_commands();
                    self.settle(queue);
                }
                Some(Item::Reset) => self.held[queue] = Some(Item::Reset),
                Some(item) if self.flows[queue].is_empty() => self.forget(item),
                Some(item) => self.held[queue] = Some(item),
            }
            worked = true;
        }
        worked
    }

    /// Ends a region or a peer once this has come out of every queue. What made it was asked for before, but perhaps not seen
    /// yet.
    fn forget(&mut self, item: Item) {
        match item {
            Item::Chain(_) | Item::Reset => {}
            Item::Unregister(id) => {
                if let Some(id) = Arc::into_inner(id) {
                    self.take_commands();
                    self.locals.remove(&id);
                    self.windows.remove(&id);
                }
            }
            Item::Detach(id) => {
                if let Some(id) = Arc::into_inner(id) {
                    self.take_commands();
                    self.lose(id, "the peer was detached", Tell::Chains);
                    if let Some(peer) = self.peers.remove(&id) {
                        peer.rung.close();
                    }
                }
            }
        }
    }

    /// Posts the next transfer or rings the doorbell of the queue's last chain; `false` if that has to wait.
    fn push_on(&mut self, queue: QueueId, number: u64) -> bool {
        let Some((_, work)) = self.flows[queue].last() else { return false };
        let Some(transfer) = work.next() else { return self.ring(queue) };
        let result = self.plan(&transfer).and_then(|plan| match self.may_go(queue, plan.peer)? {
            true => self.post(queue, number, plan),
            false => Ok(false),
        });
        let Some(work) = self.flows[queue].get(number) else { return true };
        match result {
            Ok(true) => {}
            Ok(false) => return false,
            Err(why) => work.fail(&why),
        }
        self.settle(queue);
        true
    }

    /// What a transfer means.
    fn plan(&self, transfer: &Transfer) -> Result<Plan, String> {
        let Transfer { src, dst, len } = *transfer;
        let window = |id: RegionId| self.windows.get(&id);
        let (read, here, there) = match (window(src.region), window(dst.region)) {
            (Some(window), None) => (true, dst, (src.offset, window)),
            (None, Some(window)) => (false, src, (dst.offset, window)),
            (None, None) if !self.locals.contains_key(&src.region) => {
                return Err(format!("{:?} is not registered", src.region));
            }
            (None, None) => return Err(format!("{:?} is not registered with a peer", dst.region)),
            (Some(_), Some(_)) => return Err("both ends are peer memory".to_owned()),
        };
        let local =
            self.locals.get(&here.region).ok_or_else(|| format!("{:?} is not registered", here.region))?;
        let (at, (peer, window)) = there;
        let end = |offset: usize, limit: usize| offset.checked_add(len).filter(|end| *end <= limit);
        let (Some(here_end), Some(_)) = (end(here.offset, local.arena.len()), end(at, window.len())) else {
            return Err(format!("{transfer:?} is outside its regions"));
        };
        let start = window.start + at;
        let footprint =
            Footprint { read, local: (here.region, here.offset..here_end), remote: start..start + len };
        Ok(Plan { peer: *peer, footprint })
    }

    /// Whether the connections to a peer stand; if they are closed, begins to open them.
    fn reach(&mut self, id: PeerId) -> Result<bool, String> {
        match self.peers.get(&id).map(|peer| &peer.state) {
            None => Err("the peer is not attached".to_owned()),
            Some(State::Up) => Ok(true),
            Some(State::Connecting(..)) => Ok(false),
            Some(State::Down) => self.connect(id).map(|()| false).map_err(|e| e.to_string()),
        }
    }

    /// Whether no fault holds up the next transfer of the queue's last chain, which is for that peer.
    fn may_go(&mut self, queue: QueueId, peer: PeerId) -> Result<bool, String> {
        let Some((_, work)) = self.flows[queue].last() else { return Ok(false) };
        match *work.fate.get_or_insert_with(|| Fate::of_transfer(&self.faults)) {
            Fate::Fails => Err("a fault was injected".to_owned()),
            Fate::Stalls(until) if until > Instant::now() => {
                // What a device holds up ends with the connection.
                work.peer.get_or_insert(peer);
                Ok(false)
            }
            Fate::Goes | Fate::Corrupts | Fate::Stalls(_) => Ok(true),
        }
    }

    /// Posts a transfer; `false` if there is no room yet.
    fn post(&mut self, queue: QueueId, number: u64, plan: Plan) -> Result<bool, String> {
        let Plan { peer: id, footprint } = plan;
        let Some(work) = self.flows[queue].get(number) else { return Ok(true) };
        if *work.peer.get_or_insert(id) != id {
            return Err("one chain for several peers".to_owned());
        }
        if !self.reach(id)? {
            return Ok(false);
        }
        let Some(work) = self.flows[queue].get(number) else { return Ok(true) };
        let peer = self.peers.get_mut(&id).ok_or("the peer is not attached")?;
        let lane = peer.lanes.get_mut(queue).ok_or("there is no connection to the peer")?;
        let local = self.locals.get(&footprint.local.0).and_then(|local| local.registered.as_ref());
        let local = local.ok_or("the memory could not be registered")?;
        if !lane.has_room_for(&footprint) {
            return Ok(false);
        }
        let read = footprint.read;
        let (from, len) = (footprint.local.1.start, footprint.local.1.len());
        let copy = match (&self.port, self.locals.get(&footprint.local.0)) {
            (Some(port), Some(local)) if !read && work.fate == Some(Fate::Corrupts) => {
                Some(damaged_copy(port, &local.arena, from, len).map_err(|e| e.to_string())?)
            }
            _ => None,
        };
        let slice = copy.as_ref().map_or_else(|| local.slice(from, len), |copy| copy.slice(0, len));
        let posted = slice
            .map_err(PostError::from)
            .and_then(|slice| lane.post(number, footprint, slice, &peer.offer.memory));
        match posted {
            Ok(posted) => {
                work.has_posted(posted, read);
                work.copies.extend(copy);
                Ok(true)
            }
            Err(PostError::Full) => {
                self.retry = true;
                Ok(false)
            }
            Err(e) => {
                self.lose(id, &e.to_string(), Tell::Always);
                Err(e.to_string())
            }
        }
    }

    /// Rings the doorbell of the queue's last chain, once its reads are done.
    fn ring(&mut self, queue: QueueId) -> bool {
        let Some((_, work)) = self.flows[queue].last() else { return false };
        let Some((id, count)) = work.chain.ring else { return false };
        if !work.has_read() {
            return false;
        }
        if *work.peer.get_or_insert(id) != id {
            work.fail("one chain for several peers");
            self.settle(queue);
            return true;
        }
        let reached = self.reach(id);
        let lane = self.peers.get_mut(&id).and_then(|peer| peer.lanes.get_mut(queue));
        let Some((_, work)) = self.flows[queue].last() else { return false };
        match (reached, lane) {
            (Ok(true), Some(lane)) => {
                if self.faults.hit(Site::DmaDoorbell) != Some(Action::Drop) {
                    lane.line.ring(count);
                    self.shared.doorbells.fetch_add(1, Ordering::Relaxed);
                }
                work.rung = true;
            }
            (Ok(_), _) => return false,
            (Err(why), _) => work.fail(&why),
        }
        self.settle(queue);
        true
    }

    /// If all of the queue's last chain is posted, and it will have a completion: notes what this awaits.
    fn settle(&mut self, queue: QueueId) {
        let Some((_, work)) = self.flows[queue].last() else { return };
        if !work.is_posted() || work.chain.tag.is_none() && !work.has_failed() {
            return;
        }
        let lanes = self.peers.iter().filter_map(|(id, peer)| Some((*id, peer.lanes.get(queue)?)));
        let unconfirmed = lanes.filter(|(_, lane)| lane.confirmed < lane.last_write);
        work.awaits = unconfirmed.map(|(id, lane)| (id, lane.last_write)).collect();
    }

    /// Takes out the chains that are complete; `true` if there were some.
    fn finish(&mut self, queue: QueueId) -> bool {
        let mut worked = false;
        let peers = &self.peers;
        let confirmed = |id: PeerId, number: u64| {
            let lane = peers.get(&id).and_then(|peer| peer.lanes.get(queue));
            lane.is_none_or(|lane| lane.confirmed >= number)
        };
        while let Some(work) = self.flows[queue].pop_finished(confirmed) {
            worked = true;
            if work.has_failed() {
                self.shared.failed.fetch_add(1, Ordering::Relaxed);
            }
            if let Some(completion) = work.finish() {
                self.shared.completions.push(completion);
                self.completed = true;
            }
            self.completed |= self.shared.chain_ended(queue);
        }
        worked
    }

    /// Sends doorbells, and asks for the confirmations that chains await; `true` if that has cost a peer.
    fn flush(&mut self) -> bool {
        let Some(port) = &self.port else { return false };
        let mut lost = Vec::new();
        for (id, peer) in &mut self.peers {
            for (lane, flow) in peer.lanes.iter_mut().zip(&mut self.flows) {
                let awaited = flow.iter_mut().flat_map(|work| &work.awaits).filter(|(p, _)| p == id);
                let awaited = awaited.map(|(_, number)| *number).find(|number| *number > lane.confirmed);
                let sent = lane.line.flush();
                let asked = awaited.map_or(Ok(()), |number| {
                    scratch(port)
                        .map_err(PostError::from)
                        .and_then(|s| lane.confirm(number, s, &peer.offer.memory))
                });
                self.retry |= matches!(sent, Ok(false)) || matches!(asked, Err(PostError::Full));
                match (sent, asked) {
                    (Err(e), _) => lost.push((*id, e.to_string())),
                    (_, Err(PostError::Failed(e))) => lost.push((*id, e.to_string())),
                    _ => {}
                }
            }
        }
        let any = !lost.is_empty();
        for (id, why) in lost {
            self.lose(id, &why, Tell::Always);
        }
        any
    }
}

fn register(port: &Port, arena: &Arc<Arena>) -> Option<MemoryRegion> {
    let registered = MemoryRegion::register(&port.domain, arena, Access::Local);
    registered.inspect_err(|e| tracing::error!("DPU memory cannot be registered: {e}")).ok()
}

/// Endpoints are named by peer and queue.
fn token_of(peer: PeerId, queue: QueueId) -> u64 {
    u64::from(peer.0) << 8 | queue as u64
}

fn peer_of(token: u64) -> PeerId {
    PeerId((token >> 8) as u32)
}

fn queue_of(token: u64) -> QueueId {
    (token & 0xff) as usize
}
