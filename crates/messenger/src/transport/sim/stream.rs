//! The data on its way between the two ends of a transport, and the bytes of a simulated stream.

use std::collections::VecDeque;
use std::io;
use std::task::{Poll, Waker};
use std::time::Duration;

use base::clock::Instant;
use bytes::{Buf, Bytes, BytesMut};
use rand::Rng;
use rand::rngs::StdRng;

use super::faults::count;
use super::link::LinkOperation;
use super::state::{EndIndex, SimEvent, State, TransportId};

/// Maximum number of bytes in one direction that the receiver has not read.
const WINDOW_BYTES: usize = 256 << 10;

/// The two directions of a stream. StreamDirection 0 goes from the dialling end to the accepting end.
pub(super) struct SimStream {
    pub(super) directions: [StreamDirection; 2],
}

/// One direction of a stream.
pub(super) struct StreamDirection {
    /// Data that has not arrived, in order. An event exists for the first piece, unless it is held.
    in_flight: VecDeque<(Instant, StreamPiece)>,
    /// Whether the first piece waits until a cut or frozen network is passable again.
    pub(super) is_held: bool,
    /// Arrival of the last piece that was sent.
    pub(super) last_arrival: Instant,
    /// When the link is free for the next piece.
    pub(super) free_at: Instant,
    received: BytesMut,
    /// Number of bytes that were sent and not read.
    unread: usize,
    /// Whether the sender has ended the stream.
    is_finished: bool,
    /// Whether the receiver knows that the stream has ended.
    has_ended: bool,
    /// Number of bytes after which the stream breaks.
    pub(super) life: u64,
}

pub(super) enum StreamPiece {
    /// Bytes of a stream.
    Data(Bytes),
    /// An operation of a link.
    Operation(LinkOperation),
    End,
    Break,
}

impl SimStream {
    pub(super) fn new(state: &mut State) -> SimStream {
        let mut direction = || {
            let mean = state.faults.break_after_bytes;
            let life = if mean == 0 { u64::MAX } else { state.random.random_range(0..2 * mean) };
            let now = Instant::now();
            StreamDirection {
                in_flight: VecDeque::new(),
                is_held: false,
                last_arrival: now,
                free_at: now,
                received: BytesMut::new(),
                unread: 0,
                is_finished: false,
                has_ended: false,
                life,
            }
        };
        SimStream { directions: [direction(), direction()] }
    }

    /// Drops a random part of the data that `end` has sent and that has not arrived. The rest still
    /// arrives.
    pub(super) fn drop_some_in_flight(&mut self, end: EndIndex, random: &mut StdRng) {
        let in_flight = &mut self.directions[end].in_flight;
        in_flight.truncate(random.random_range(0..=in_flight.len()));
    }

    /// Whether `end` has data that its process has not read.
    pub(super) fn has_unread(&self, end: EndIndex) -> bool {
        !self.directions[1 - end].received.is_empty()
    }
}

impl StreamDirection {
    /// Number of pieces that have not arrived.
    pub(super) fn pieces(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether the receiver waits for the answer to one of its operations.
    pub(super) fn has_answers(&self) -> bool {
        let answer = |piece: &StreamPiece| matches!(piece, StreamPiece::Operation(o) if o.is_answer());
        self.in_flight.iter().any(|(_, piece)| answer(piece))
    }
}

impl State {
    /// Sends the first bytes of `slices`. Registers `waker` if there is no room.
    pub(super) fn write(
        &mut self,
        id: TransportId,
        end: EndIndex,
        slices: &[io::IoSlice<'_>],
        waker: &Waker,
    ) -> Poll<io::Result<usize>> {
        let Some((from, to)) = self.usable(id, end) else {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        };
        let piece_max = self.faults.piece_max;
        let is_divided = !self.route(from, to).jitter.is_zero() && !self.is_calm;
        let most = if is_divided { self.random.random_range(1..=piece_max) } else { piece_max };
        let Some(transport) = self.transports.get_mut(&id) else { return Poll::Pending };
        let direction = &mut transport.stream.directions[end];
        if direction.is_finished {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let room = most.min(WINDOW_BYTES.saturating_sub(direction.unread));
        if room == 0 {
            transport.ends[end].writer = Some(waker.clone());
            return Poll::Pending;
        }
        let mut data = BytesMut::with_capacity(room.min(slices.iter().map(|slice| slice.len()).sum()));
        for slice in slices {
            let len = slice.len().min(room - data.len());
            data.extend_from_slice(&slice[..len]);
        }
        let len = data.len();
        if len == 0 {
            return Poll::Ready(Ok(0));
        }
        let life = direction.life;
        direction.life = life.saturating_sub(len as u64);
        direction.unread += len;
        let breaks = len as u64 > life && !self.is_calm;
        if breaks {
            data.truncate(life as usize);
        }
        if !data.is_empty() && self.one_in(self.faults.flip_one_in, |counts| &counts.flips) {
            let bit = self.random.random_range(0..data.len() * 8);
            data[bit / 8] ^= 1 << (bit % 8);
        }
        self.send_piece(id, end, StreamPiece::Data(data.freeze()), Duration::ZERO);
        if breaks {
            self.send_piece(id, end, StreamPiece::Break, Duration::ZERO);
        }
        Poll::Ready(Ok(len))
    }

    /// Ends the stream in the direction from `end`.
    pub(super) fn finish(&mut self, id: TransportId, end: EndIndex) {
        let Some(transport) = self.transports.get_mut(&id) else { return };
        if !std::mem::replace(&mut transport.stream.directions[end].is_finished, true) {
            self.send_piece(id, end, StreamPiece::End, Duration::ZERO);
        }
    }

    /// Reads bytes into `buf`. Registers `waker` if there are none.
    pub(super) fn read(
        &mut self,
        id: TransportId,
        end: EndIndex,
        buf: &mut tokio::io::ReadBuf<'_>,
        waker: &Waker,
    ) -> Poll<io::Result<()>> {
        let reset = || Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        let Some(transport) = self.transports.get_mut(&id) else { return reset() };
        let direction = &mut transport.stream.directions[1 - end];
        if !direction.received.is_empty() {
            let len = buf.remaining().min(direction.received.len());
            buf.put_slice(&direction.received[..len]);
            direction.received.advance(len);
            direction.unread = direction.unread.saturating_sub(len);
            self.wakers.extend(transport.ends[1 - end].writer.take());
            return Poll::Ready(Ok(()));
        }
        if direction.has_ended {
            return Poll::Ready(Ok(()));
        }
        if transport.ends[end].is_reset || transport.ends[end].is_closed {
            return reset();
        }
        transport.ends[end].reader = Some(waker.clone());
        Poll::Pending
    }

    /// The hosts of a transport on which `end` can send: its own host and the peer's host.
    pub(super) fn usable(&self, id: TransportId, end: EndIndex) -> Option<(usize, usize)> {
        let ends = &self.transports.get(&id)?.ends;
        let is_usable = !ends[end].is_reset && !ends[end].is_closed;
        is_usable.then_some((ends[end].host, ends[1 - end].host))
    }

    /// Sends a piece of data, which needs the time `extra` in addition to the usual time.
    pub(super) fn send_piece(&mut self, id: TransportId, end: EndIndex, piece: StreamPiece, extra: Duration) {
        let Some(transport) = self.transports.get(&id) else { return };
        let (from, to) = (transport.ends[end].host, transport.ends[1 - end].host);
        let (travel, bandwidth) = (self.travel(from, to), self.route(from, to).bandwidth);
        let Some(transport) = self.transports.get_mut(&id) else { return };
        let direction = &mut transport.stream.directions[end];
        let len = match &piece {
            StreamPiece::Data(data) => data.len(),
            StreamPiece::Operation(operation) => operation.len(),
            StreamPiece::End | StreamPiece::Break => 0,
        };
        let sending = bandwidth.map_or(0.0, |bandwidth| len as f64 / bandwidth as f64);
        direction.free_at = direction.free_at.max(Instant::now()) + Duration::from_secs_f64(sending);
        let at = direction.last_arrival.max(direction.free_at + travel + extra);
        direction.last_arrival = at;
        direction.in_flight.push_back((at, piece));
        if direction.in_flight.len() == 1 && !direction.is_held {
            self.schedule(at, SimEvent::Arrive(id, end));
        }
    }

    /// The first piece of data from `from` arrives.
    pub(super) fn on_arrive(&mut self, id: TransportId, from: EndIndex) {
        let Some(transport) = self.transports.get(&id) else { return };
        let to = 1 - from;
        if self.obstacle(transport.ends[from].host, transport.ends[to].host).is_some() {
            if let Some(transport) = self.transports.get_mut(&id) {
                transport.stream.directions[from].is_held = true;
            }
            count(&self.counts.held);
            return self.give_up_later(id, from);
        }
        let Some(transport) = self.transports.get_mut(&id) else { return };
        let direction = &mut transport.stream.directions[from];
        let is_due = direction.in_flight.front().is_some_and(|(at, _)| *at <= Instant::now());
        let Some((_, piece)) = (if is_due { direction.in_flight.pop_front() } else { None }) else { return };
        let next = direction.in_flight.front().map(|(at, _)| *at);
        if let Some(next) = next {
            self.schedule(next, SimEvent::Arrive(id, from));
        }
        self.deliver(id, from, piece);
    }

    fn deliver(&mut self, id: TransportId, from: EndIndex, piece: StreamPiece) {
        let Some(transport) = self.transports.get_mut(&id) else { return };
        let to = 1 - from;
        let receiver = &mut transport.ends[to];
        if receiver.is_closed || receiver.is_reset {
            if !matches!(piece, StreamPiece::End) {
                count(&self.counts.late);
                self.send_reset(id, from);
            }
            return;
        }
        match piece {
            StreamPiece::Data(data) => {
                transport.stream.directions[from].received.extend_from_slice(&data);
                self.wakers.extend(receiver.reader.take());
                self.record(id, to, &data);
            }
            StreamPiece::End => {
                transport.stream.directions[from].has_ended = true;
                self.wakers.extend(receiver.reader.take());
                self.record(id, to, b"end");
            }
            StreamPiece::Operation(operation) => self.execute(id, to, operation),
            StreamPiece::Break => self.break_at_random(id),
        }
    }

    /// Breaks a stream. Sometimes only one end notices, until the other end sends data.
    fn break_at_random(&mut self, id: TransportId) {
        count(&self.counts.breaks);
        let knows = self.random.random_range(0..4);
        if knows < 2 {
            count(&self.counts.half_breaks);
            self.on_reset(id, knows);
        } else {
            self.on_reset(id, 0);
            self.on_reset(id, 1);
        }
    }
}
