//! The state of a simulated network: hosts, processes, listeners, transports and future events.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::Waker;
use std::time::Duration;

use base::clock::Instant;
use fabric::ExposedMemory;
use rand::Rng;
use rand::rngs::StdRng;

use super::CutKind;
use super::faults::{SimCounts, SimFaults, SimRoute, count};
use super::link::{ExposedRegion, KeptMemory, SimLink};
use super::stream::SimStream;
use crate::transport::ConnectTicket;

/// Maximum number of transports that wait to be accepted.
const BACKLOG: usize = 128;

/// Pause between two attempts of a host to reach another host to which it connects.
const CONNECT_RETRY: Duration = Duration::from_secs(1);

/// Maximum time from the end of a cut until a host sends again.
const RESEND_MAX: Duration = Duration::from_millis(500);

/// First port that is given to a listener that does not choose a port.
const FIRST_PORT: u16 = 32_768;

/// Index of a host.
pub(super) type HostId = usize;

/// Index of a process. A host has one process after another.
pub(super) type ProcessId = usize;

/// Number of a transport.
pub(super) type TransportId = u64;

/// One end of a transport: 0 for the dialling end, 1 for the accepting end. Data in direction `end`
/// was sent by `end`.
pub(super) type EndIndex = usize;

/// Something that happens at a certain time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SimEvent {
    /// A connect request reaches the listener.
    Request(TransportId),
    /// The answer to a connect request reaches the dialling end.
    Answer(TransportId),
    /// The first piece of data in a direction arrives.
    Arrive(TransportId, EndIndex),
    /// An end learns that the transport is broken.
    Reset(TransportId, EndIndex),
    /// A completion of a link becomes visible.
    Report(TransportId, EndIndex),
    /// An end of a link answers a read of its peer.
    Respond(TransportId, EndIndex),
    /// An end of a link gives up if its peer is still unreachable.
    GiveUp(TransportId, EndIndex),
}

pub(super) struct SimProcess {
    pub(super) host: HostId,
    pub(super) is_alive: bool,
}

/// The address of a listener.
pub(super) type Address = (HostId, u16);

pub(super) struct ListeningPort {
    process: ProcessId,
    accepts_links: bool,
    waiting: VecDeque<TransportId>,
    waker: Option<Waker>,
}

/// The progress of a connect request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DialState {
    Pending,
    Refused,
    Connected,
}

/// One transport.
pub(super) struct SimTransport {
    pub(super) ends: [SimEnd; 2],
    pub(super) dialing: DialState,
    to: Address,
    /// Data on its way, and what arrived over a stream.
    pub(super) stream: SimStream,
    /// `None` for a stream.
    pub(super) link: Option<SimLink>,
}

/// What a transport knows about one of its ends.
#[derive(Default)]
pub(super) struct SimEnd {
    pub(super) process: ProcessId,
    pub(super) host: HostId,
    /// Whether the end's process has closed the transport or has ended.
    pub(super) is_closed: bool,
    /// Whether the end has learned that the transport is broken.
    pub(super) is_reset: bool,
    /// Waits for the answer to a connect request, or for data.
    pub(super) reader: Option<Waker>,
    /// Waits for room for more data.
    pub(super) writer: Option<Waker>,
    /// Waits for completions of a link.
    pub(super) completions: Option<Waker>,
}

pub(super) struct State {
    pub(super) random: StdRng,
    pub(super) faults: SimFaults,
    pub(super) counts: Arc<SimCounts>,
    pub(super) is_calm: bool,
    pub(super) is_frozen: bool,
    are_links_down: bool,
    /// Whether the network needs its task.
    pub(super) needs_task: bool,
    pub(super) has_task: bool,
    /// Tasks to wake once the mutex is released.
    pub(super) wakers: Vec<Waker>,
    pub(super) routes: BTreeMap<(HostId, HostId), SimRoute>,
    pub(super) cuts: BTreeMap<(HostId, HostId), CutKind>,
    pub(super) transports: BTreeMap<TransportId, SimTransport>,
    /// Memory that peers may access, by key.
    pub(super) regions: BTreeMap<u64, ExposedRegion>,
    pub(super) kept: Vec<KeptMemory>,
    /// Memory to drop once the mutex is released.
    pub(super) trash: Vec<ExposedMemory>,
    names: Vec<String>,
    processes: Vec<SimProcess>,
    listeners: BTreeMap<Address, ListeningPort>,
    last_transport: TransportId,
    last_port: u16,
    events: BinaryHeap<Reverse<(Instant, u64, SimEvent)>>,
    last_event: u64,
    /// Time of the first event.
    began: Option<Instant>,
    trace: u64,
}

impl State {
    pub(super) fn new(random: StdRng, faults: SimFaults, counts: Arc<SimCounts>) -> State {
        State {
            random,
            faults,
            counts,
            is_calm: false,
            is_frozen: false,
            are_links_down: false,
            needs_task: false,
            has_task: false,
            wakers: Vec::new(),
            routes: BTreeMap::new(),
            cuts: BTreeMap::new(),
            transports: BTreeMap::new(),
            regions: BTreeMap::new(),
            kept: Vec::new(),
            trash: Vec::new(),
            names: Vec::new(),
            processes: Vec::new(),
            listeners: BTreeMap::new(),
            last_transport: 0,
            last_port: FIRST_PORT,
            events: BinaryHeap::new(),
            last_event: 0,
            began: None,
            trace: 0,
        }
    }

    // Hosts and processes.

    pub(super) fn host(&mut self, name: &str) -> HostId {
        self.names.iter().position(|known| known == name).unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        })
    }

    pub(super) fn name(&self, host: HostId) -> &str {
        &self.names[host]
    }

    /// The living process on a host, or a new one.
    pub(super) fn process_on(&mut self, name: &str) -> ProcessId {
        let host = self.host(name);
        let known = self.processes.iter().position(|process| process.host == host && process.is_alive);
        known.unwrap_or_else(|| {
            self.processes.push(SimProcess { host, is_alive: true });
            self.processes.len() - 1
        })
    }

    pub(super) fn process(&self, process: ProcessId) -> &SimProcess {
        &self.processes[process]
    }

    /// The IP address of a host.
    pub(super) fn ip(host: HostId) -> IpAddr {
        let [.., high, low] = (host + 1).to_be_bytes();
        Ipv4Addr::new(10, 0, high, low).into()
    }

    /// Finds the host and port that `HOST:PORT` names.
    pub(super) fn resolve(&self, endpoint: &str) -> Option<Address> {
        let (host, port) = endpoint.rsplit_once(':')?;
        let at = match host.parse::<IpAddr>() {
            Ok(ip) => (0..self.names.len()).find(|at| State::ip(*at) == ip),
            Err(_) => self.names.iter().position(|name| name == host),
        };
        Some((at?, port.parse().ok()?))
    }

    // Time.

    pub(super) fn next_event(&self) -> Option<Instant> {
        self.events.peek().map(|Reverse((at, ..))| *at)
    }

    pub(super) fn schedule(&mut self, at: Instant, event: SimEvent) {
        self.began.get_or_insert_with(Instant::now);
        self.needs_task = true;
        self.last_event += 1;
        self.events.push(Reverse((at, self.last_event, event)));
    }

    /// Executes all events whose time has come.
    pub(super) fn execute_due(&mut self) {
        let now = Instant::now();
        while self.next_event().is_some_and(|at| at <= now)
            && let Some(Reverse((_, _, event))) = self.events.pop()
        {
            match event {
                SimEvent::Request(id) => self.on_request(id),
                SimEvent::Answer(id) => self.on_answer(id),
                SimEvent::Arrive(id, from) => self.on_arrive(id, from),
                SimEvent::Reset(id, end) => self.on_reset(id, end),
                SimEvent::Report(id, end) => self.on_report(id, end),
                SimEvent::Respond(id, end) => self.on_respond(id, end),
                SimEvent::GiveUp(id, end) => self.on_give_up(id, end),
            }
        }
    }

    pub(super) fn trace(&self) -> u64 {
        self.trace
    }

    /// Adds an event to the hash of all deliveries.
    pub(super) fn record(&mut self, id: TransportId, end: EndIndex, what: &[u8]) {
        let time = self.began.map_or(Duration::ZERO, |began| began.elapsed());
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        for part in [time, id, end as u64, what.len() as u64, base::block::crc32c(what).into()] {
            // FNV-1a over 64-bit units; the multiplication also moves high bits down.
            self.trace = (self.trace ^ part).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
        }
    }

    // Faults.

    /// Decides whether a fault with the probability `1 / n` occurs, and counts it.
    pub(super) fn one_in(&mut self, n: u32, counter: impl Fn(&SimCounts) -> &AtomicU64) -> bool {
        let occurs = n > 0 && !self.is_calm && self.random.random_ratio(1, n);
        if occurs {
            count(counter(&self.counts));
        }
        occurs
    }

    /// A random time of at most `most`.
    pub(super) fn up_to(&mut self, most: Duration) -> Duration {
        if most.is_zero() { most } else { most.mul_f64(self.random.random_range(0.0..1.0)) }
    }

    /// The cut on the way from one host to another. A frozen network is cut everywhere.
    pub(super) fn obstacle(&self, from: HostId, to: HostId) -> Option<CutKind> {
        let frozen = self.is_frozen.then_some(CutKind::Silent);
        self.cuts.get(&(from, to)).copied().or(frozen)
    }

    pub(super) fn route(&self, from: HostId, to: HostId) -> SimRoute {
        self.routes.get(&(from, to)).copied().unwrap_or(self.faults.route)
    }

    /// The time that a piece of data needs from one host to another.
    pub(super) fn travel(&mut self, from: HostId, to: HostId) -> Duration {
        let SimRoute { latency, jitter, .. } = self.route(from, to);
        let mut time = latency;
        if !jitter.is_zero() {
            count(&self.counts.delays);
            time += self.up_to(jitter);
        }
        if self.one_in(self.faults.stall_one_in, |counts| &counts.stalls) {
            time += self.up_to(self.faults.stall);
        }
        time
    }

    pub(super) fn cut(&mut self, from: HostId, to: HostId, kind: CutKind) {
        self.cuts.insert((from, to), kind);
        if kind == CutKind::Reset {
            let between = |t: &SimTransport| {
                let hosts = (t.ends[0].host, t.ends[1].host);
                hosts == (from, to) || hosts == (to, from)
            };
            self.break_where(between);
        }
    }

    pub(super) fn set_links_down(&mut self, is_down: bool) {
        self.are_links_down = is_down;
        if is_down {
            self.break_where(|t| t.link.is_some());
        }
    }

    pub(super) fn break_all(&mut self) -> usize {
        self.break_where(|_| true)
    }

    /// Breaks transports at once. Both ends notice.
    fn break_where(&mut self, which: impl Fn(&SimTransport) -> bool) -> usize {
        let is_whole = |t: &SimTransport| {
            t.dialing == DialState::Connected && !t.ends.iter().any(|end| end.is_reset || end.is_closed)
        };
        let ids: Vec<TransportId> =
            self.transports.iter().filter(|(_, t)| is_whole(t) && which(t)).map(|(id, _)| *id).collect();
        for id in &ids {
            count(&self.counts.cuts);
            self.on_reset(*id, 0);
            self.on_reset(*id, 1);
        }
        ids.len()
    }

    /// Continues the transports that a cut or frozen network held, if the way is free again.
    pub(super) fn resume_held(&mut self) {
        let held: Vec<(TransportId, EndIndex)> = self
            .transports
            .iter_mut()
            .flat_map(|(id, t)| {
                let directions = t.stream.directions.iter_mut().enumerate();
                directions.filter_map(|(from, d)| std::mem::take(&mut d.is_held).then_some((*id, from)))
            })
            .collect();
        for (id, from) in held {
            let at = Instant::now() + self.up_to(RESEND_MAX);
            self.schedule(at, SimEvent::Arrive(id, from));
        }
    }

    /// Ends the process on a host.
    pub(super) fn sever(&mut self, host: HostId) {
        let Some(process) = self.processes.iter().position(|p| p.host == host && p.is_alive) else { return };
        self.processes[process].is_alive = false;
        let gone: Vec<Address> =
            self.listeners.iter().filter(|(_, l)| l.process == process).map(|(at, _)| *at).collect();
        for address in gone {
            self.unlisten(address);
        }
        let ends: Vec<(TransportId, EndIndex)> = self
            .transports
            .iter()
            .flat_map(|(id, t)| {
                let ends = t.ends.iter().enumerate();
                ends.filter(|(_, end)| end.process == process && !end.is_closed).map(|(at, _)| (*id, at))
            })
            .collect();
        for (id, end) in ends {
            // The system may still send data that it took from the process before its end.
            let sends_rest = self.random.random_bool(0.5);
            if !sends_rest && let Some(transport) = self.transports.get_mut(&id) {
                transport.stream.drop_some_in_flight(end, &mut self.random);
            }
            self.close(id, end, !sends_rest);
        }
    }

    // Connecting.

    /// Begins to listen. A port of 0 chooses a free port.
    pub(super) fn listen(&mut self, process: ProcessId, port: u16, accepts_links: bool) -> Option<Address> {
        let host = self.processes[process].host;
        let port = match port {
            0 => {
                self.last_port = self.last_port.checked_add(1).unwrap_or(FIRST_PORT);
                self.last_port
            }
            chosen => chosen,
        };
        if !self.processes[process].is_alive || self.listeners.contains_key(&(host, port)) {
            return None;
        }
        self.needs_task = true;
        self.listeners.insert(
            (host, port),
            ListeningPort { process, accepts_links, waiting: VecDeque::new(), waker: None },
        );
        Some((host, port))
    }

    /// Stops listening. Transports that wait to be accepted break.
    pub(super) fn unlisten(&mut self, address: Address) {
        let Some(listener) = self.listeners.remove(&address) else { return };
        for id in listener.waiting {
            self.close(id, 1, true);
        }
    }

    /// Stops listening, unless the process has ended before.
    pub(super) fn unlisten_of(&mut self, process: ProcessId, address: Address) {
        if self.listeners.get(&address).is_some_and(|listener| listener.process == process) {
            self.unlisten(address);
        }
    }

    /// Takes the next transport that waits to be accepted. Returns `None` after registering
    /// `waker`.
    pub(super) fn accept(&mut self, process: ProcessId, at: Address, waker: &Waker) -> Option<TransportId> {
        let listener = self.listeners.get_mut(&at).filter(|listener| listener.process == process)?;
        let next = listener.waiting.pop_front();
        if next.is_none() {
            listener.waker = Some(waker.clone());
        }
        next
    }

    /// Sends a connect request: with a ticket for a link, without for a stream.
    pub(super) fn dial(
        &mut self,
        process: ProcessId,
        to: Address,
        ticket: Option<ConnectTicket>,
    ) -> TransportId {
        self.last_transport += 1;
        let id = self.last_transport;
        let from = self.processes[process].host;
        let dialing = SimEnd { process, host: from, ..SimEnd::default() };
        // The accepting process is known when the listener answers.
        let accepting = SimEnd { process: usize::MAX, host: to.0, ..SimEnd::default() };
        let stream = SimStream::new(self);
        let link = ticket.map(|ticket| self.new_link(ticket));
        let dialing_state = DialState::Pending;
        self.transports.insert(
            id,
            SimTransport { ends: [dialing, accepting], dialing: dialing_state, to, stream, link },
        );
        if !self.one_in(self.faults.ignore_one_in, |counts| &counts.ignored) {
            let at = Instant::now() + self.travel(from, to.0);
            self.schedule(at, SimEvent::Request(id));
        }
        id
    }

    fn on_request(&mut self, id: TransportId) {
        let Some(transport) = self.transports.get(&id) else { return };
        let (to, from, is_link) = (transport.to, transport.ends[0].host, transport.link.is_some());
        let obstacle = self.obstacle(from, to.0).or(self.obstacle(to.0, from));
        if obstacle == Some(CutKind::Silent) {
            count(&self.counts.held);
            return self.schedule(Instant::now() + CONNECT_RETRY, SimEvent::Request(id));
        }
        let is_down = is_link && self.are_links_down;
        let refused = is_down
            || obstacle.is_some()
            || self.one_in(self.faults.refuse_one_in, |counts| &counts.refusals);
        match self.listeners.get_mut(&to).filter(|listener| !refused && listener.accepts_links == is_link) {
            None => self.settle(id, DialState::Refused),
            Some(listener) if listener.waiting.len() == BACKLOG => {
                self.schedule(Instant::now() + CONNECT_RETRY, SimEvent::Request(id));
            }
            Some(listener) => {
                listener.waiting.push_back(id);
                self.wakers.extend(listener.waker.take());
                let process = listener.process;
                if let Some(transport) = self.transports.get_mut(&id) {
                    transport.ends[1].process = process;
                }
                // A link is answered when the process has posted buffers for packets.
                if !is_link {
                    self.answer(id);
                }
            }
        }
    }

    /// Answers a connect request.
    pub(super) fn answer(&mut self, id: TransportId) {
        let Some(transport) = self.transports.get(&id) else { return };
        let at = Instant::now() + self.travel(transport.to.0, transport.ends[0].host);
        let Some(transport) = self.transports.get_mut(&id) else { return };
        // No data arrives before the answer.
        transport.stream.directions[1].last_arrival = at;
        self.schedule(at, SimEvent::Answer(id));
    }

    /// Declines a connect request. The listener no longer uses the transport.
    pub(super) fn decline(&mut self, id: TransportId) {
        self.settle(id, DialState::Refused);
        if let Some(transport) = self.transports.get_mut(&id) {
            transport.ends[1].is_closed = true;
        }
        self.forget_if_over(id);
    }

    fn on_answer(&mut self, id: TransportId) {
        let Some(transport) = self.transports.get(&id) else { return };
        match self.obstacle(transport.to.0, transport.ends[0].host) {
            Some(CutKind::Silent) => self.schedule(Instant::now() + CONNECT_RETRY, SimEvent::Answer(id)),
            Some(CutKind::Reset) => self.settle(id, DialState::Refused),
            None => self.settle(id, DialState::Connected),
        }
    }

    fn settle(&mut self, id: TransportId, outcome: DialState) {
        let Some(transport) = self.transports.get_mut(&id) else { return };
        transport.dialing = outcome;
        self.wakers.extend(transport.ends[0].reader.take());
        self.record(id, 0, &[u8::from(outcome == DialState::Connected)]);
    }

    // Ends of transports.

    /// An end learns that the transport is broken.
    pub(super) fn on_reset(&mut self, id: TransportId, end: EndIndex) {
        let Some(transport) = self.transports.get_mut(&id) else { return };
        let this = &mut transport.ends[end];
        if std::mem::replace(&mut this.is_reset, true) {
            return;
        }
        self.wakers.extend(this.reader.take());
        self.wakers.extend(this.writer.take());
        transport.stream.drop_some_in_flight(end, &mut self.random);
        self.record(id, end, b"reset");
        self.on_link_failure(id, end, "the link is broken");
        self.forget_if_over(id);
    }

    /// Tells an end that the transport is broken, unless the way to it is cut.
    pub(super) fn send_reset(&mut self, id: TransportId, to: EndIndex) {
        let Some(transport) = self.transports.get(&id) else { return };
        let (from, host) = (transport.ends[1 - to].host, transport.ends[to].host);
        if self.obstacle(from, host).is_none() {
            let at = Instant::now() + self.travel(from, host);
            self.schedule(at, SimEvent::Reset(id, to));
        }
    }

    /// Closes an end of a transport. If `is_abrupt` is false, data that was sent still arrives.
    pub(super) fn close(&mut self, id: TransportId, end: EndIndex, is_abrupt: bool) {
        let Some(transport) = self.transports.get_mut(&id) else { return };
        if std::mem::replace(&mut transport.ends[end].is_closed, true) {
            return;
        }
        self.wakers.extend(transport.ends[end].completions.take());
        let (was_reset, is_link) = (transport.ends[end].is_reset, transport.link.is_some());
        if is_link {
            self.release(id, end);
        }
        if was_reset {
            // The device of a link still tries to tell the peer that the link ends.
            if is_link && self.random.random_bool(0.5) {
                self.send_reset(id, 1 - end);
            }
            return self.forget_if_over(id);
        }
        let Some(transport) = self.transports.get_mut(&id) else { return };
        let is_connected = transport.dialing == DialState::Connected || end == 1;
        if !is_connected {
            // The listener may already have the transport.
            if transport.ends[1].process == usize::MAX {
                self.transports.remove(&id);
                return;
            }
            self.send_reset(id, 1);
        } else if is_abrupt || transport.stream.has_unread(end) {
            if is_link {
                transport.stream.drop_some_in_flight(end, &mut self.random);
            }
            self.send_reset(id, 1 - end);
        } else {
            self.finish(id, end);
        }
        self.forget_if_over(id);
    }

    /// Forgets a transport that no process uses any more.
    fn forget_if_over(&mut self, id: TransportId) {
        if self.transports.get(&id).is_some_and(|t| t.ends.iter().all(|end| end.is_closed)) {
            self.transports.remove(&id);
        }
    }

    /// The address of a listener, for dialling.
    pub(super) fn endpoint((host, port): Address) -> String {
        SocketAddr::new(State::ip(host), port).to_string()
    }
}
