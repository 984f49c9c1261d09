//! The thread of the engine `ofi`. It handles the callers' commands, the network device and the
//! peers. The module [`chains`] executes the chains.

mod chains;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base::clock::Instant;
use base::collections::HashMap;
use base::fault::{Action, Faults, Site};
use base::mem::{DeviceMemory, OutsideAccess};
use fabric::{
    Access, Completion, Endpoint, EndpointAddress, EndpointQueues, FabricError, FabricEvent, Info, Library,
    MemoryRegion, Operation,
};
use tokio::sync::oneshot;

use super::alarm::wait_for;
use super::bounce::BounceBuffer;
use super::faults::damage;
use super::flow::{ActiveChain, Flow};
use super::greeting::Greeting;
use super::hazards::Footprint;
use super::lane::{OperationQueue, WINDOW};
use super::line::{self, EngineEndpoint};
use super::port::{EngineDomain, query};
use super::rung::Rung;
use super::shared::{OfiCommand, OfiItem, Shared};
use super::token::Token;
use super::{OfiOffer, OfiOptions, QUEUES};
use crate::dma::{ChainFailure, PeerId, QueueId};
use crate::{ChannelError, RegionId, Result};
use base::spinner::Spinner;

/// Size of the completion queue. It has room for the current peer and one peer that is still being
/// detached. Each connection needs room for a window of transfers, one read that confirms writes,
/// and its messages.
const DEPTH: usize = 2 * QUEUES * (WINDOW + 1 + line::DEPTH);
/// Delay before a retry when the provider's queue is full although this thread has no operation in
/// progress.
const RETRY: Duration = Duration::from_millis(1);
/// Maximum number of attempts in a row to connect to a peer with other local ports. Over iWARP,
/// rdma_cm may choose a port that TCP uses.
const PORT_TRIES: u32 = 16;

/// Memory of this process that a caller has registered.
struct Local {
    /// `None` while no network device is open, or if the registration failed.
    registered: Option<RegisteredLocal>,
    memory: OutsideAccess,
}

/// The registration of local memory with the network device.
struct RegisteredLocal {
    region: MemoryRegion,
    /// The memory's bytes, for copies from bounce buffers. `None` if the device writes to the
    /// memory.
    bytes: Option<DeviceMemory>,
}

/// A store's process that the engine is attached to.
struct Remote {
    offer: OfiOffer,
    rung: Arc<Rung>,
    /// One connection per queue. Empty if the connections are closed.
    lanes: Vec<OperationQueue>,
    state: PeerState,
    /// Number of attempts to connect so far.
    attempt: u32,
}

enum PeerState {
    /// The connections are being opened.
    Connecting(Opening),
    /// All connections are established.
    Up,
    /// The connections are closed. The next chain for the peer opens them again.
    Down,
}

/// The connections to a peer that are being opened.
struct Opening {
    deadline: Instant,
    /// Sends the result to a caller that attaches.
    reply: Option<oneshot::Sender<Result<usize>>>,
    /// Number of attempts that failed because TCP uses a local port.
    ports_in_use: u32,
}

/// How the loss of a peer is reported.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tell {
    /// Only by failing the peer's chains, if there are any.
    Chains,
    /// By failing the peer's chains. If there are none, by a completion with tag 0.
    Always,
}

pub(super) struct EngineWorker {
    shared: Arc<Shared>,
    library: Library,
    faults: Faults,
    /// Random number that identifies the engine.
    number: u64,
    connect_timeout: Duration,
    /// The maximum length of a transfer, in bytes.
    max_transfer: usize,
    /// Whether reads use bounce buffers even if the provider does not expose local memory.
    always_bounce: bool,
    flows: [Flow; QUEUES],
    /// Items that must wait until their queue has no chain in progress.
    held: [Option<OfiItem>; QUEUES],
    peers: HashMap<PeerId, Remote>,
    locals: HashMap<RegionId, Local>,
    windows: HashMap<RegionId, (PeerId, Range<usize>)>,
    port: Option<EngineDomain>,
    /// Failures of connections that the provider does not name.
    unassigned: Vec<FabricError>,
    /// Whether new completions must be reported.
    completed: bool,
    /// Whether the provider's queue was full, so that the thread must soon try again to post.
    retry: bool,
    running: bool,
    bytes_metric: metrics::Counter,
    transfers_metric: metrics::Counter,
    bounced_metric: metrics::Counter,
}

impl EngineWorker {
    /// Creates the worker of an engine whose transfers have at most `max_transfer` bytes.
    pub(super) fn new(
        shared: Arc<Shared>,
        library: Library,
        max_transfer: usize,
        options: &OfiOptions,
    ) -> EngineWorker {
        EngineWorker {
            shared,
            library,
            faults: options.faults.clone(),
            number: base::entropy::random(),
            connect_timeout: options.attach_timeout,
            max_transfer,
            always_bounce: options.always_bounce,
            flows: Default::default(),
            held: Default::default(),
            peers: HashMap::default(),
            locals: HashMap::default(),
            windows: HashMap::default(),
            port: None,
            unassigned: Vec::new(),
            completed: false,
            retry: false,
            running: true,
            bytes_metric: metrics::counter!("outboard_channel_dma_bytes"),
            transfers_metric: metrics::counter!("outboard_channel_dma_transfers"),
            bounced_metric: metrics::counter!("outboard_channel_dma_bounced_bytes"),
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

    /// Does all work that is ready. Returns `false` if there was none.
    fn turn(&mut self) -> bool {
        self.retry = false;
        let mut worked = self.take_commands();
        worked |= self.poll();
        self.give_up_overdue();
        worked |= self.close_spoiled_port();
        for queue in 0..QUEUES {
            worked |= self.advance(queue);
        }
        // If the connection to a peer is lost here, its chains fail, and the next turn finishes
        // them.
        worked |= self.flush();
        worked
    }

    fn has_input(&self) -> bool {
        let mut queues = self.shared.queues.iter().zip(&self.flows);
        !self.shared.commands.is_empty() || queues.any(|(q, flow)| !flow.blocked && !q.items.is_empty())
    }

    fn sleep(&self) {
        let deadlines = self.peers.values().filter_map(|peer| match peer.state {
            PeerState::Connecting(Opening { deadline, .. }) => Some(deadline),
            PeerState::Up | PeerState::Down => None,
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
                OfiCommand::Local(id, memory) => {
                    let registered = self.port.as_ref().and_then(|port| {
                        let registered = register(port, &memory, self.bounces(port.domain.info()));
                        registered
                            .inspect_err(|e| tracing::error!("DPU memory cannot be registered: {e}"))
                            .ok()
                    });
                    self.locals.insert(id, Local { registered, memory });
                }
                OfiCommand::Attach { id, offer, rung, reply } => {
                    let state = PeerState::Down;
                    self.peers.insert(id, Remote { offer, rung, lanes: Vec::new(), state, attempt: 0 });
                    match (self.connect(id), self.peers.get_mut(&id)) {
                        (Ok(()), Some(Remote { state: PeerState::Connecting(opening), .. })) => {
                            opening.reply = Some(reply)
                        }
                        (Err(e), _) => {
                            self.peers.remove(&id);
                            // The caller may have been cancelled; ignore the error.
                            let _ = reply.send(Err(e));
                        }
                        // Dropping the reply tells the caller that the engine has stopped.
                        (Ok(()), _) => {}
                    }
                }
                OfiCommand::Window(id, peer, range) => drop(self.windows.insert(id, (peer, range))),
                // The caller of a reset needs no report.
                OfiCommand::Reset => self.reset("the engine was reset", Tell::Chains),
                OfiCommand::Stop => self.running = false,
            }
        }
        worked
    }

    /// Whether reads must use bounce buffers: the provider lets peers write to the memory that
    /// receives the data of reads, or the options request it.
    fn bounces(&self, info: &Info) -> bool {
        self.always_bounce || info.exposes_local_memory()
    }

    /// Starts to connect to a peer. If connections are already being opened, replaces them. Opens
    /// the device again if necessary.
    fn connect(&mut self, id: PeerId) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&id) else { return Ok(()) };
        peer.attempt += 1;
        let (offer, attempt) = (peer.offer.clone(), peer.attempt);
        let info = query(self.library, &offer.provider, EndpointAddress::Connect(offer.address))?;
        self.open_port(&info, &offer)?;
        let port = self.port.as_ref().ok_or_else(|| ChannelError::protocol("no network device is open"))?;
        let mut lanes = Vec::with_capacity(QUEUES);
        for queue in 0..QUEUES {
            let token = Token::new(id.0, attempt, queue).encode();
            let endpoint =
                Endpoint::connecting(&info, EndpointQueues::new(&port.events, &port.completions), token)?;
            let line = EngineEndpoint::new(endpoint, &port.domain)?;
            let greeting = Greeting { queue, attempt, secret: offer.secret, engine: self.number };
            line.endpoint.establish(&greeting.encode())?;
            lanes.push(OperationQueue::new(line));
        }
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.lanes = lanes;
            if !matches!(peer.state, PeerState::Connecting(_)) {
                let deadline = Instant::now() + self.connect_timeout;
                peer.state = PeerState::Connecting(Opening { deadline, reply: None, ports_in_use: 0 });
            }
        }
        Ok(())
    }

    /// Handles the failure of an attempt to connect to a peer. If TCP used a local port that
    /// rdma_cm chose, starts to connect with other ports.
    fn connecting_failed(&mut self, id: PeerId, error: &FabricError) {
        let Some(Remote { state: PeerState::Connecting(opening), .. }) = self.peers.get_mut(&id) else {
            return;
        };
        opening.ports_in_use += u32::from(error.is_address_in_use());
        if !error.is_address_in_use() || opening.ports_in_use >= PORT_TRIES {
            return self.lose(id, &error.to_string(), Tell::Always);
        }
        tracing::debug!("peer {}: connects with other local ports: {error}", id.0);
        self.shared.ports_in_use.fetch_add(1, Ordering::Relaxed);
        if let Err(e) = self.connect(id) {
            self.lose(id, &e.to_string(), Tell::Always);
        }
    }

    /// Whether the connections to a peer are established. Starts to open them if they are closed.
    fn reach(&mut self, id: PeerId) -> Result<bool, String> {
        match self.peers.get(&id).map(|peer| &peer.state) {
            None => Err("the peer is not attached".to_owned()),
            Some(PeerState::Up) => Ok(true),
            Some(PeerState::Connecting(..)) => Ok(false),
            Some(PeerState::Down) => self.connect(id).map(|()| false).map_err(|e| e.to_string()),
        }
    }

    /// Closes the connections to peers that have not answered in time.
    fn give_up_overdue(&mut self) {
        let overdue = |peer: &Remote| match peer.state {
            PeerState::Connecting(Opening { deadline, .. }) => deadline <= Instant::now(),
            PeerState::Up | PeerState::Down => false,
        };
        let ids: Vec<PeerId> =
            self.peers.iter().filter(|(_, peer)| overdue(peer)).map(|(id, _)| *id).collect();
        for id in ids {
            self.lose(id, "the peer did not accept the connections in time", Tell::Always);
        }
    }

    /// Ensures that the open network device suits `info` and that all local memory is registered
    /// with it.
    fn open_port(&mut self, info: &Info, offer: &OfiOffer) -> Result<()> {
        self.close_spoiled_port();
        if self.port.as_ref().is_some_and(|port| port.suits(info)) {
            return Ok(());
        }
        if self.peers.values().any(|peer| !peer.lanes.is_empty()) {
            let what = format!(
                "{} is not reachable through the network device that connects another peer",
                offer.address
            );
            return Err(ChannelError::Refused(what));
        }
        self.close_port();
        let target = EndpointAddress::Connect(offer.address);
        let port = EngineDomain::open(query(self.library, &offer.provider, target)?, DEPTH)?;
        let bounces = self.bounces(info);
        for local in self.locals.values_mut() {
            local.registered = Some(register(&port, &local.memory, bounces)?);
        }
        self.port = Some(port);
        Ok(())
    }

    /// Closes a network device whose domain is unusable, and all its connections. The next chain
    /// opens them again. Returns `true` if the device was closed.
    fn close_spoiled_port(&mut self) -> bool {
        let spoiled = self.port.as_ref().is_some_and(|port| port.domain.is_spoiled());
        if spoiled {
            let peers: Vec<PeerId> = self.peers.keys().copied().collect();
            for peer in peers {
                self.lose(peer, "the device is opened again after a failure", Tell::Always);
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

    /// Handles the network device's events and completions. Returns `false` if there were none.
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
        // Handle successful completions first: a doorbell may have arrived together with the end of
        // its connection. Handle failed completions last: an event explains better than a failed
        // completion why a connection ended.
        let (well, failed): (Vec<_>, Vec<_>) = completions.into_iter().partition(|c| c.result.is_ok());
        well.iter().for_each(|completion| self.completed(completion));
        events.into_iter().for_each(|event| self.happened(event));
        self.connections_failed();
        failed.iter().for_each(|completion| self.completed(completion));
        worked
    }

    fn happened(&mut self, event: FabricEvent) {
        match event {
            FabricEvent::Connected { endpoint, .. } => self.connected(endpoint),
            FabricEvent::Closed { endpoint } => {
                self.lose_connection(endpoint, "the peer closed the connection")
            }
            FabricEvent::Failed { endpoint, error, data } => {
                let reason = String::from_utf8_lossy(&data);
                let reason = reason.trim_end_matches('\0');
                self.lose_connection(endpoint, &format!("{error}: {reason}"));
            }
            FabricEvent::SomeFailed { error } => self.unassigned.push(error),
            _ => {}
        }
    }

    /// The peer and the queue of the connection whose endpoint has this token. `None` if newer
    /// connections have replaced the connection.
    fn connection(&self, endpoint: u64) -> Option<(PeerId, QueueId)> {
        let token = Token::decode(endpoint);
        let id = PeerId(token.owner);
        self.peers.get(&id).filter(|peer| token.is_of(peer.attempt)).map(|_| (id, token.queue))
    }

    /// Closes the connections to the peer of this endpoint, unless newer connections have replaced
    /// them.
    fn lose_connection(&mut self, endpoint: u64, why: &str) {
        if let Some((id, _)) = self.connection(endpoint) {
            self.lose(id, why, Tell::Always);
        }
    }

    /// Handles failures of connections that were being opened. The provider does not say which ones
    /// failed. Several failures of one poll count as one failed attempt.
    fn connections_failed(&mut self) {
        let errors = std::mem::take(&mut self.unassigned);
        let serious = errors.iter().find(|error| !error.is_address_in_use());
        let Some(error) = serious.or(errors.first()) else { return };
        let connecting = |peer: &Remote| matches!(peer.state, PeerState::Connecting(..));
        let ids = self.peers.iter().filter(|(_, peer)| connecting(peer)).map(|(id, _)| *id);
        for id in ids.collect::<Vec<_>>() {
            self.connecting_failed(id, error);
        }
    }

    fn connected(&mut self, endpoint: u64) {
        let Some(port) = &self.port else { return };
        let bounces = self.bounces(port.domain.info());
        let Some((id, queue)) = self.connection(endpoint) else { return };
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let Some(lane) = peer.lanes.get_mut(queue) else { return };
        lane.line.established = true;
        if !peer.lanes.iter().all(|lane| lane.line.established) {
            return;
        }
        // Buffers are allocated only now, because attempts to connect may fail often.
        for lane in peer.lanes.iter_mut().filter(|_| bounces) {
            match BounceBuffer::open(&port.domain, self.max_transfer) {
                Ok(buffer) => lane.bounce = Some(buffer),
                Err(e) => return self.lose(id, &format!("no bounce buffer: {e}"), Tell::Always),
            }
        }
        let max = port.domain.info().max_msg_size();
        if let PeerState::Connecting(Opening { reply: Some(reply), .. }) =
            std::mem::replace(&mut peer.state, PeerState::Up)
        {
            // The caller may have been cancelled; the peer is then being detached.
            let _ = reply.send(Ok(max));
        }
    }

    fn completed(&mut self, completion: &Completion) {
        let Some((id, queue)) = self.connection(completion.endpoint) else { return };
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
            Operation::Read | Operation::Write => self.moved(id, queue, completion.token),
        }
    }

    /// Handles the successful completion of a read or a write with this operation number.
    fn moved(&mut self, id: PeerId, queue: QueueId, number: u64) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let Some(lane) = peer.lanes.get_mut(queue) else { return };
        let Some((chain, footprint)) = lane.complete(number) else { return };
        let Footprint { read, local: (region, range), .. } = footprint;
        let Some(work) = self.flows[queue].get(chain) else { return };
        let local = self.locals.get(&region);
        if read && let Some(buffer) = &mut lane.bounce {
            let bytes = local.and_then(|local| local.registered.as_ref()?.bytes.as_ref());
            if !bytes.is_some_and(|bytes| buffer.deliver(number, bytes, range.clone())) {
                return self.lose(id, "the destination of a read is not registered", Tell::Always);
            }
            self.shared.bounced.fetch_add(range.len() as u64, Ordering::Relaxed);
            self.bounced_metric.increment(range.len() as u64);
        }
        if work.complete(number)
            && let Some(local) = local
            && let Err(e) = damage(&local.memory, range.start, range.len())
        {
            tracing::error!("an injected fault could not damage the data: {e}");
        }
        let len = range.len() as u64;
        self.shared.bytes.fetch_add(len, Ordering::Relaxed);
        self.shared.transfers.fetch_add(1, Ordering::Relaxed);
        self.bytes_metric.increment(len);
        self.transfers_metric.increment(1);
    }

    /// Closes the connections to a peer and fails the peer's chains. After that, none of its
    /// transfers accesses memory.
    fn lose(&mut self, id: PeerId, why: &str, tell: Tell) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let detached = peer.rung.is_detached();
        let state = std::mem::replace(&mut peer.state, PeerState::Down);
        let lanes = std::mem::take(&mut peer.lanes);
        if lanes.is_empty() {
            return;
        }
        let confirmed: Vec<u64> = lanes.iter().map(|lane| lane.confirmed).collect();
        drop(lanes);
        tracing::debug!("peer {}: {why}", id.0);
        if let PeerState::Connecting(Opening { reply: Some(reply), .. }) = state {
            // The caller may have been cancelled; ignore the error.
            let _ = reply.send(Err(ChannelError::Refused(why.to_owned())));
            return;
        }
        let mut told = false;
        for (flow, confirmed) in self.flows.iter_mut().zip(confirmed) {
            let concerned = |work: &&mut ActiveChain| {
                work.peer == Some(id) || work.awaits.iter().any(|(p, number)| *p == id && *number > confirmed)
            };
            for work in flow.iter_mut().filter(concerned) {
                work.abandon(why, confirmed);
                told = true;
            }
            // The remaining chains await only writes of this peer that are already confirmed.
            flow.iter_mut().for_each(|work| work.awaits.retain(|(p, _)| *p != id));
        }
        if !told && tell == Tell::Always && !detached {
            // Untagged chains that looked complete, and doorbells of both sides, may have been
            // lost.
            let (now, why) = (Instant::now(), why.to_owned());
            let result = Err(ChainFailure { done: 0, why });
            self.shared.completions.push(crate::ChainCompletion {
                tag: 0,
                result,
                started: now,
                finished: now,
            });
            self.completed = true;
        }
    }

    /// Cancels all chains and closes the connections to all peers.
    fn reset(&mut self, why: &str, tell: Tell) {
        let peers: Vec<PeerId> = self.peers.keys().copied().collect();
        for peer in peers {
            self.lose(peer, why, tell);
        }
        let mut forgotten = Vec::new();
        for queue in 0..QUEUES {
            // A chain that was started fails with its peer. Cancel the chains without a peer as
            // well.
            self.flows[queue].iter_mut().for_each(|work| work.abandon(why, 0));
            self.finish(queue);
            while let Some(item) = self.held[queue].take().or_else(|| self.shared.queues[queue].items.pop()) {
                match item {
                    OfiItem::Chain(chain) => {
                        let mut work = ActiveChain::new(chain);
                        work.abandon(why, 0);
                        self.flows[queue].push(work);
                        self.finish(queue);
                    }
                    // The reset does not apply to items that were posted after it.
                    OfiItem::Reset => break,
                    item => forgotten.push(item),
                }
            }
        }
        // Handling these items may also take commands, among them another reset.
        forgotten.into_iter().for_each(|item| self.forget(item));
    }

    /// Removes a region or a peer once the thread has taken its item from every queue. Handles
    /// commands first, because the command that created the region or the peer may still be queued.
    fn forget(&mut self, item: OfiItem) {
        match item {
            OfiItem::Chain(_) | OfiItem::Reset => {}
            OfiItem::Unregister(id) => {
                if let Some(id) = Arc::into_inner(id) {
                    self.take_commands();
                    self.locals.remove(&id);
                    self.windows.remove(&id);
                }
            }
            OfiItem::Detach(id) => {
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
}

/// Registers local memory with the network device. If reads use bounce buffers, the device and the
/// peers get no right to write to the memory.
fn register(port: &EngineDomain, memory: &OutsideAccess, bounces: bool) -> Result<RegisteredLocal> {
    let access = if bounces { Access::Outgoing } else { Access::Local };
    let region = MemoryRegion::register_outside(&port.domain, memory, access)?;
    let (_, len) = memory.arena().as_raw();
    let bytes = bounces.then(|| memory.for_device(0..len)).transpose()?;
    Ok(RegisteredLocal { region, bytes })
}
