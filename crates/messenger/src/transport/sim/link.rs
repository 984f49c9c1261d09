//! The operations of simulated links: packets, and one-sided transfers.
//!
//! The order of operations is that of a reliable connection of RDMA: packets and writes arrive in
//! the order in which they were posted. A read may be executed after later packets have arrived.
//! Some links behave like the hardware of RDMA, and others like the driver `siw` and the provider
//! `tcp` of libfabric ([`SimLink::is_software`]).

use std::collections::{BTreeMap, VecDeque};
use std::task::{Poll, Waker};
use std::time::Duration;

use base::clock::Instant;
use base::mem::ArenaBuf;
use bytes::Bytes;
use fabric::{ExposedMemory, Operation, PeerBuffer, PostError};
use rand::Rng;

use super::faults::count;
use super::state::{EndIndex, ProcessId, SimEvent, State, TransportId};
use super::stream::StreamPiece;
use crate::transport::ConnectTicket;
use crate::transport::packets::RemoteRange;

/// Maximum number of bytes of a one-sided transfer that move together.
const CHUNK_BYTES: usize = 64 << 10;

/// Maximum number of operations that have not arrived. At this limit, the queue is full.
const QUEUE_DEPTH: usize = 16;

/// Minimum and maximum time for which a link tries to reach its peer.
const GIVE_UP: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));

/// Pause after which a lost packet is sent again, and the number of times that it is sent.
const RETRANSMISSION: (Duration, u32) = (Duration::from_millis(50), 7);

/// Maximum pause of the responder between two chunks of a read.
const CHUNK_PAUSE: Duration = Duration::from_millis(2);

/// What a link has in addition to the pieces in flight.
pub(super) struct SimLink {
    pub(super) ticket: ConnectTicket,
    /// The token that packets to the accepting end carry.
    pub(super) accept_token: u64,
    /// Whether the link completes sends and writes before they have arrived, and continues accesses
    /// in progress after the registration of their memory has ended.
    is_software: bool,
    ends: [LinkEnd; 2],
}

#[derive(Default)]
struct LinkEnd {
    /// Buffers for packets.
    posted: VecDeque<ArenaBuf>,
    /// What the end's process has not seen yet, each with the time when it becomes visible.
    completions: VecDeque<(Instant, SimCompletion)>,
    /// This end's reads in progress, by token: the buffer, and the offset of the read in it.
    reads: BTreeMap<u64, (PeerBuffer, usize)>,
    /// The peer's reads in progress.
    responses: VecDeque<ReadResponse>,
    /// The peer's write in progress.
    writing: Option<WriteTarget>,
}

/// A read of the peer that this end answers.
struct ReadResponse {
    token: u64,
    key: u64,
    /// `None` once the memory was released.
    memory: Option<Bytes>,
    at: usize,
    sent: usize,
    len: usize,
}

/// The destination of a write in progress.
struct WriteTarget {
    key: u64,
    /// `None` once the memory was released.
    memory: Option<PeerBuffer>,
}

/// What an end of a link reports to its process.
#[derive(Debug)]
pub(super) enum SimCompletion {
    /// A packet of this length in bytes has arrived.
    Received(ArenaBuf, usize),
    /// An operation has ended. Reads have a token.
    Done(Operation, u64),
    /// The link has failed.
    Failed(String),
}

/// An operation on its way, or the answer to one.
pub(super) enum LinkOperation {
    Packet {
        data: Bytes,
        notify: bool,
    },
    Write {
        key: u64,
        at: usize,
        data: Bytes,
        is_first: bool,
        is_last: bool,
        notify: bool,
    },
    ReadRequest {
        token: u64,
        key: u64,
        at: usize,
        len: usize,
    },
    ReadData {
        token: u64,
        at: usize,
        data: Bytes,
        is_last: bool,
    },
    Ack(Operation),
    /// The peer refused an operation.
    Refused(&'static str),
}

/// Memory that peers may access.
pub(super) struct ExposedRegion {
    process: ProcessId,
    memory: ExposedMemory,
}

/// Memory whose registration has ended, with the ends of links whose peers may still use it.
pub(super) struct KeptMemory {
    process: ProcessId,
    users: Vec<(TransportId, EndIndex)>,
    memory: ExposedMemory,
}

impl LinkOperation {
    pub(super) fn len(&self) -> usize {
        match self {
            LinkOperation::Packet { data, .. }
            | LinkOperation::Write { data, .. }
            | LinkOperation::ReadData { data, .. } => data.len(),
            LinkOperation::ReadRequest { .. } | LinkOperation::Ack(_) | LinkOperation::Refused(_) => 0,
        }
    }

    /// Whether the operation's receiver waits for it, so that it fails if it does not arrive.
    pub(super) fn is_answer(&self) -> bool {
        matches!(self, LinkOperation::ReadData { .. } | LinkOperation::Ack(_) | LinkOperation::Refused(_))
    }
}

impl State {
    pub(super) fn new_link(&mut self, ticket: ConnectTicket) -> SimLink {
        SimLink {
            ticket,
            accept_token: self.random.random(),
            is_software: self.random.random_bool(0.5),
            ends: [LinkEnd::default(), LinkEnd::default()],
        }
    }

    fn link_end(&mut self, id: TransportId, end: EndIndex) -> Option<&mut LinkEnd> {
        Some(&mut self.transports.get_mut(&id)?.link.as_mut()?.ends[end])
    }

    fn is_software(&self, id: TransportId) -> bool {
        self.transports.get(&id).and_then(|t| t.link.as_ref()).is_some_and(|link| link.is_software)
    }

    // Operations of a process.

    /// Posts a buffer for one packet.
    pub(super) fn post_receive(&mut self, id: TransportId, end: EndIndex, buf: ArenaBuf) {
        if self.usable(id, end).is_some()
            && let Some(link) = self.link_end(id, end)
        {
            link.posted.push_back(buf);
        }
    }

    /// Posts operations, which arrive in order. Returns `None` if the end is closed.
    pub(super) fn post(
        &mut self,
        id: TransportId,
        end: EndIndex,
        operations: Vec<LinkOperation>,
        completes: Option<Operation>,
    ) -> Option<Result<(), PostError>> {
        if self.transports.get(&id).is_none_or(|t| t.ends[end].is_closed) {
            return None;
        }
        // If the link has failed, its process learns this from a completion.
        if self.usable(id, end).is_none() {
            return Some(Ok(()));
        }
        if self.transports.get(&id)?.stream.directions[end].pieces() >= QUEUE_DEPTH {
            count(&self.counts.full_queues);
            return Some(Err(PostError::Full));
        }
        for operation in operations {
            self.send_operation(id, end, operation);
        }
        if let Some(operation) = completes.filter(|_| self.is_software(id)) {
            self.complete(id, end, SimCompletion::Done(operation, 0));
        }
        Some(Ok(()))
    }

    /// Divides a write into chunks.
    pub(super) fn chunks(to: RemoteRange, data: &Bytes, notify: bool) -> Vec<LinkOperation> {
        let starts = (0..data.len()).step_by(CHUNK_BYTES);
        let chunk = |start: usize| {
            let end = data.len().min(start + CHUNK_BYTES);
            LinkOperation::Write {
                key: to.region.key,
                at: to.offset + start,
                data: data.slice(start..end),
                is_first: start == 0,
                is_last: end == data.len(),
                notify,
            }
        };
        starts.map(chunk).collect()
    }

    /// Posts a read of the peer's memory into `buffer`, from its byte `at` on.
    pub(super) fn post_read(
        &mut self,
        id: TransportId,
        end: EndIndex,
        (buffer, at): (PeerBuffer, usize),
        from: RemoteRange,
        token: u64,
    ) -> Option<Result<(), PostError>> {
        let RemoteRange { region, offset, len } = from;
        let request = LinkOperation::ReadRequest { token, key: region.key, at: offset, len };
        let posted = self.post(id, end, vec![request], None)?;
        if posted.is_ok()
            && let Some(link) = self.link_end(id, end)
        {
            link.reads.insert(token, (buffer, at));
        }
        Some(posted)
    }

    /// Exposes memory of a process to its peers. Returns the key.
    pub(super) fn expose(&mut self, process: ProcessId, memory: ExposedMemory) -> u64 {
        let key = self.random.random();
        self.regions.insert(key, ExposedRegion { process, memory });
        key
    }

    /// Ends the access of peers to memory. If `is_settled` is false, peers may still be accessing
    /// the memory.
    pub(super) fn withdraw(&mut self, key: u64, is_settled: bool) {
        let Some(ExposedRegion { process, memory }) = self.regions.remove(&key) else { return };
        let mut users = Vec::new();
        for (id, transport) in &mut self.transports {
            let Some(link) = &mut transport.link else { continue };
            for (at, end) in link.ends.iter_mut().enumerate() {
                if transport.ends[at].process != process || transport.ends[at].is_closed {
                    continue;
                }
                users.push((*id, at));
                if is_settled {
                    let read = end.responses.iter_mut().filter(|r| r.key == key);
                    read.for_each(|r| self.trash.extend(r.memory.take().map(ExposedMemory::Bytes)));
                    let written = end.writing.as_mut().filter(|w| w.key == key);
                    let written = written.and_then(|w| w.memory.take());
                    self.trash.extend(written.map(ExposedMemory::Buffer));
                }
            }
        }
        if is_settled || users.is_empty() {
            self.trash.push(memory);
        } else {
            self.kept.push(KeptMemory { process, users, memory });
        }
    }

    /// Amount of memory that is kept because a peer might still use it, in bytes.
    pub(super) fn kept_bytes(&self, process: ProcessId) -> usize {
        let own = self.kept.iter().filter(|kept| kept.process == process);
        own.map(|kept| match &kept.memory {
            ExposedMemory::Bytes(bytes) => bytes.len(),
            ExposedMemory::Buffer(buffer) => buffer.len(),
        })
        .sum()
    }

    /// Releases all memory that a closed end of a link used.
    pub(super) fn release(&mut self, id: TransportId, end: EndIndex) {
        let Some(link) = self.link_end(id, end) else { return };
        let LinkEnd { posted, completions, reads, responses, writing } = std::mem::take(link);
        drop((posted, completions, responses));
        self.trash.extend(reads.into_values().map(|(buffer, _)| ExposedMemory::Buffer(buffer)));
        self.trash.extend(writing.and_then(|w| w.memory).map(ExposedMemory::Buffer));
        for kept in &mut self.kept {
            kept.users.retain(|user| *user != (id, end));
        }
        let free = self.kept.extract_if(.., |kept| kept.users.is_empty());
        self.trash.extend(free.map(|kept| kept.memory));
    }

    /// Takes the next completion of an end. Registers `waker` if there is none. Returns `None` if
    /// the end is closed.
    pub(super) fn take_completion(
        &mut self,
        id: TransportId,
        end: EndIndex,
        waker: &Waker,
    ) -> Poll<Option<SimCompletion>> {
        let Some(transport) = self.transports.get_mut(&id).filter(|t| !t.ends[end].is_closed) else {
            return Poll::Ready(None);
        };
        let Some(link) = &mut transport.link else { return Poll::Ready(None) };
        let completions = &mut link.ends[end].completions;
        if completions.front().is_some_and(|(at, _)| *at <= Instant::now()) {
            return Poll::Ready(completions.pop_front().map(|(_, completion)| completion));
        }
        transport.ends[end].completions = Some(waker.clone());
        Poll::Pending
    }

    // The network.

    fn send_operation(&mut self, id: TransportId, end: EndIndex, mut operation: LinkOperation) {
        let mut extra = Duration::ZERO;
        let mut tries = 0;
        if self.one_in(self.faults.lose_one_in, |counts| &counts.losses) {
            tries = 1;
            while tries < RETRANSMISSION.1 && self.random.random_bool(0.4) {
                tries += 1;
            }
            extra = RETRANSMISSION.0 * tries;
        }
        if operation.len() > 0 && self.one_in(self.faults.flip_one_in, |counts| &counts.flips) {
            let bit = self.random.random_range(0..operation.len() * 8);
            operation.flip(bit);
        }
        let len = operation.len() as u64;
        let breaks = self.transports.get_mut(&id).is_some_and(|transport| {
            let direction = &mut transport.stream.directions[end];
            let breaks = len > direction.life;
            direction.life = direction.life.saturating_sub(len);
            breaks
        });
        self.send_piece(id, end, StreamPiece::Operation(operation), extra);
        if (breaks && !self.is_calm) || tries == RETRANSMISSION.1 {
            self.send_piece(id, end, StreamPiece::Break, Duration::ZERO);
        }
    }

    /// Reports something to the process of an end.
    fn complete(&mut self, id: TransportId, end: EndIndex, completion: SimCompletion) {
        let mut at = Instant::now();
        if self.one_in(self.faults.report_late_one_in, |counts| &counts.late_reports) {
            at += self.up_to(self.faults.stall.min(Duration::from_millis(500)));
        }
        let Some(link) = self.link_end(id, end) else { return };
        at = link.completions.back().map_or(at, |(last, _)| at.max(*last));
        link.completions.push_back((at, completion));
        self.schedule(at, SimEvent::Report(id, end));
    }

    pub(super) fn on_report(&mut self, id: TransportId, end: EndIndex) {
        if let Some(transport) = self.transports.get_mut(&id) {
            self.wakers.extend(transport.ends[end].completions.take());
        }
    }

    /// An end learns that its link has failed.
    pub(super) fn on_link_failure(&mut self, id: TransportId, end: EndIndex, why: &str) {
        if self.link_end(id, end).is_some() {
            self.complete(id, end, SimCompletion::Failed(why.to_owned()));
        }
    }

    /// Schedules the failure of a link that cannot reach its peer.
    pub(super) fn give_up_later(&mut self, id: TransportId, from: EndIndex) {
        if self.transports.get(&id).is_some_and(|t| t.link.is_some()) {
            let at = Instant::now() + GIVE_UP.0 + self.up_to(GIVE_UP.1 - GIVE_UP.0);
            self.schedule(at, SimEvent::GiveUp(id, from));
        }
    }

    pub(super) fn on_give_up(&mut self, id: TransportId, from: EndIndex) {
        if self.is_frozen {
            return;
        }
        let Some(direction) = self.transports.get(&id).map(|t| &t.stream.directions[from]) else { return };
        if direction.is_held {
            count(&self.counts.given_up);
            let waits = direction.has_answers();
            self.on_reset(id, from);
            if waits {
                self.on_reset(id, 1 - from);
            }
        }
    }

    /// Executes an operation that has arrived at end `to`.
    pub(super) fn execute(&mut self, id: TransportId, to: EndIndex, operation: LinkOperation) {
        match operation {
            LinkOperation::Packet { data, notify } => {
                let Some(mut buf) = self.link_end(id, to).and_then(|link| link.posted.pop_front()) else {
                    count(&self.counts.not_ready);
                    return self.refuse(id, to, "the receiver has posted no buffer");
                };
                buf[..data.len()].copy_from_slice(&data);
                self.record(id, to, &data);
                self.complete(id, to, SimCompletion::Received(buf, data.len()));
                self.acknowledge(id, to, Operation::Send, notify);
            }
            LinkOperation::Write { key, at, data, is_first, is_last, notify } => {
                self.record(id, to, &data);
                match self.write_target(id, to, key, is_first) {
                    Some(memory) if at + data.len() <= memory.len() => write_to(&memory, at, &data),
                    _ => return self.refuse(id, to, "the key or the range of a write is wrong"),
                }
                if is_last {
                    if let Some(link) = self.link_end(id, to) {
                        link.writing = None;
                    }
                    self.acknowledge(id, to, Operation::Write, notify);
                }
            }
            LinkOperation::ReadRequest { token, key, at, len } => {
                self.record(id, to, b"read");
                let memory = match self.region(id, to, key) {
                    Some(ExposedMemory::Bytes(bytes)) if at + len <= bytes.len() => bytes,
                    _ => return self.refuse(id, to, "the key or the range of a read is wrong"),
                };
                let response = ReadResponse { token, key, memory: Some(memory), at, sent: 0, len };
                let Some(link) = self.link_end(id, to) else { return };
                link.responses.push_back(response);
                if link.responses.len() == 1 {
                    self.schedule(Instant::now(), SimEvent::Respond(id, to));
                }
            }
            LinkOperation::ReadData { token, at, data, is_last } => {
                self.record(id, to, &data);
                let Some(link) = self.link_end(id, to) else { return };
                let Some((buffer, start)) = link.reads.get(&token) else { return };
                write_to(buffer, start + at, &data);
                if is_last {
                    let read = link.reads.remove(&token);
                    self.trash.extend(read.map(|(buffer, _)| ExposedMemory::Buffer(buffer)));
                    self.complete(id, to, SimCompletion::Done(Operation::Read, token));
                }
            }
            LinkOperation::Ack(operation) => {
                self.complete(id, to, SimCompletion::Done(operation, 0));
            }
            LinkOperation::Refused(why) => {
                self.record(id, to, why.as_bytes());
                self.on_link_failure(id, to, why);
                self.on_reset(id, to);
            }
        }
    }

    /// Sends the next chunk of the peer's first read.
    pub(super) fn on_respond(&mut self, id: TransportId, end: EndIndex) {
        if self.usable(id, end).is_none() {
            return;
        }
        let is_software = self.is_software(id);
        let key = self.link_end(id, end).and_then(|link| link.responses.front().map(|r| r.key));
        let Some(key) = key else { return };
        let is_registered = self.regions.contains_key(&key);
        let Some(response) = self.link_end(id, end).and_then(|link| link.responses.front_mut()) else {
            return;
        };
        let Some(memory) = response.memory.clone() else {
            count(&self.counts.released_accesses);
            return self.refuse(id, end, "the memory of a read was released");
        };
        if !is_registered && !is_software {
            count(&self.counts.withdrawn_accesses);
            return self.refuse(id, end, "the registration of a read's memory has ended");
        }
        let len = (response.len - response.sent).min(CHUNK_BYTES);
        let start = response.at + response.sent;
        let (token, at) = (response.token, response.sent);
        response.sent += len;
        let is_last = response.sent == response.len;
        let data = memory.slice(start..start + len);
        if !is_registered {
            count(&self.counts.withdrawn_accesses);
        }
        self.send_operation(id, end, LinkOperation::ReadData { token, at, data, is_last });
        let Some(link) = self.link_end(id, end) else { return };
        if is_last {
            link.responses.pop_front();
        }
        if !link.responses.is_empty() {
            let pause = if self.is_calm { Duration::ZERO } else { self.up_to(CHUNK_PAUSE) };
            let free_at = self.transports.get(&id).map(|t| t.stream.directions[end].free_at);
            let at = (Instant::now() + pause).max(free_at.unwrap_or_else(Instant::now));
            self.schedule(at, SimEvent::Respond(id, end));
        }
    }

    fn acknowledge(&mut self, id: TransportId, end: EndIndex, operation: Operation, notify: bool) {
        if notify && !self.is_software(id) {
            self.send_operation(id, end, LinkOperation::Ack(operation));
        }
    }

    /// Refuses an operation of the peer, which ends the link at both ends.
    fn refuse(&mut self, id: TransportId, end: EndIndex, why: &'static str) {
        count(&self.counts.refused_operations);
        self.send_operation(id, end, LinkOperation::Refused(why));
        // The answer is sent although this end has failed.
        self.on_link_failure(id, end, why);
        if let Some(transport) = self.transports.get_mut(&id) {
            transport.ends[end].is_reset = true;
        }
    }

    /// The exposed memory of the process at `end` with this key.
    fn region(&self, id: TransportId, end: EndIndex, key: u64) -> Option<ExposedMemory> {
        let process = self.transports.get(&id)?.ends[end].process;
        let region = self.regions.get(&key).filter(|region| region.process == process)?;
        Some(region.memory.clone())
    }

    /// The memory for the next chunk of a write.
    fn write_target(
        &mut self,
        id: TransportId,
        to: EndIndex,
        key: u64,
        is_first: bool,
    ) -> Option<PeerBuffer> {
        let registered = match self.region(id, to, key) {
            Some(ExposedMemory::Buffer(buffer)) => Some(buffer),
            _ => None,
        };
        if is_first {
            let link = self.link_end(id, to)?;
            link.writing = registered.clone().map(|memory| WriteTarget { key, memory: Some(memory) });
            return registered;
        }
        if registered.is_some() {
            return registered;
        }
        count(&self.counts.withdrawn_accesses);
        let is_software = self.is_software(id);
        let writing = self.link_end(id, to)?.writing.as_ref()?;
        match writing.memory.clone() {
            // The access continues in memory that is kept for it.
            Some(memory) => is_software.then_some(memory),
            None => {
                count(&self.counts.released_accesses);
                None
            }
        }
    }
}

impl LinkOperation {
    /// Flips a bit of the data.
    fn flip(&mut self, bit: usize) {
        if let LinkOperation::Packet { data, .. }
        | LinkOperation::Write { data, .. }
        | LinkOperation::ReadData { data, .. } = self
        {
            let mut flipped = data.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            *data = flipped.into();
        }
    }
}

/// Writes data of a peer to a buffer of this side.
#[allow(unsafe_code)]
fn write_to(buffer: &PeerBuffer, at: usize, data: &[u8]) {
    // SAFETY: this is an operation in progress of the simulated network, which keeps the buffer. A
    // link reads a range only after the operation that fills it has ended.
    unsafe { buffer.copy_in(at, data) };
}
