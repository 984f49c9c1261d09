//! [`SimControlStream`]: one end of a simulated control connection.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use base::clock::Instant;
use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::wire::{ControlWire, SimCarrier, SimMemory};
use super::{Life, lock};

/// Bytes that a direction of a connection holds before its writer must wait.
const CAPACITY: usize = 256 << 10;
/// Maximum length of the bytes that arrive together.
const SEGMENT: usize = 64 << 10;

/// One direction of a connection.
#[derive(Debug, Default)]
pub(super) struct Pipe {
    /// Bytes on their way, each with the time of their arrival.
    segments: VecDeque<(Instant, Bytes)>,
    /// Total length of the segments, in bytes.
    len: usize,
    /// Memory that travels with the bytes.
    handed: Option<SimMemory>,
    /// When the end of the stream arrives.
    closed: Option<Instant>,
    /// Whether the reading end is gone.
    is_unread: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Pipe {
    /// Arrival of something that is sent now. Everything arrives in order.
    fn arrival(&self, wire: &ControlWire) -> Instant {
        let at = Instant::now() + wire.delay();
        self.segments.back().map_or(at, |(last, _)| at.max(*last))
    }

    fn wake(&mut self) {
        [self.reader.take(), self.writer.take()].into_iter().flatten().for_each(Waker::wake);
    }
}

/// A connection. Direction 0 leads from the osd to the store.
#[derive(Debug, Default)]
pub(super) struct ControlConnection {
    pipes: [Pipe; 2],
    /// Whether the connection was cut: both ends fail at once.
    is_reset: bool,
    lives: [Life; 2],
}

impl ControlConnection {
    pub(super) fn new(lives: [Life; 2]) -> ControlConnection {
        ControlConnection { lives, ..ControlConnection::default() }
    }

    /// Cuts the connection. Bytes on their way are lost.
    pub(super) fn cut(&mut self) {
        self.is_reset = true;
        for pipe in &mut self.pipes {
            pipe.segments.clear();
            pipe.handed = None;
        }
        self.wake();
    }

    /// Closes the end `side`. The other end reads the bytes that are on their way, and then the end
    /// of the stream.
    pub(super) fn close(&mut self, side: usize, wire: &ControlWire) {
        let out = &mut self.pipes[side];
        let at = out.arrival(wire);
        out.closed.get_or_insert(at);
        let back = &mut self.pipes[1 - side];
        back.is_unread = true;
        back.segments.clear();
        (back.len, back.handed) = (0, None);
        self.wake();
    }

    pub(super) fn is_closed_at(&self, side: usize) -> bool {
        self.is_reset || self.pipes[side].closed.is_some()
    }

    pub(super) fn wake(&mut self) {
        self.pipes.iter_mut().for_each(Pipe::wake);
    }
}

/// One end of a simulated control connection.
#[derive(Debug)]
pub struct SimControlStream {
    connection: Arc<Mutex<ControlConnection>>,
    wire: ControlWire,
    side: usize,
    life: Life,
    /// Fires when the next bytes arrive.
    timer: Option<Pin<Box<Sleep>>>,
}

impl SimControlStream {
    pub(super) fn new(
        connection: &Arc<Mutex<ControlConnection>>,
        wire: &ControlWire,
        side: usize,
    ) -> SimControlStream {
        let life = lock(connection).lives[side].clone();
        let (connection, wire) = (Arc::clone(connection), wire.clone());
        SimControlStream { connection, wire, side, life, timer: None }
    }

    pub(crate) fn carrier(&self) -> SimCarrier {
        SimCarrier { wire: self.wire.clone(), life: self.life.clone() }
    }

    /// Sends access to memory to the other end, together with the next bytes.
    pub(crate) fn hand_over(&mut self, memory: SimMemory) {
        if !self.life.is_severed() {
            lock(&self.connection).pipes[self.side].handed = Some(memory);
        }
    }

    /// Takes the access to memory that the other end has sent.
    pub(crate) fn take_handed(&mut self) -> Option<SimMemory> {
        lock(&self.connection).pipes[1 - self.side].handed.take()
    }

    /// Writes the slices, as far as there is room.
    fn write(&self, cx: &Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
        if self.life.is_severed() {
            return Poll::Ready(Ok(wanted));
        }
        let mut connection = lock(&self.connection);
        if connection.is_reset {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let pipe = &mut connection.pipes[self.side];
        if pipe.is_unread || pipe.closed.is_some() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let room = CAPACITY.saturating_sub(pipe.len).min(SEGMENT).min(wanted);
        if room == 0 && wanted > 0 {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let mut bytes = Vec::with_capacity(room);
        for slice in slices {
            let part = slice.len().min(room - bytes.len());
            bytes.extend_from_slice(&slice[..part]);
        }
        let at = pipe.arrival(&self.wire);
        pipe.segments.push_back((at, Bytes::from(bytes)));
        pipe.len += room;
        if let Some(reader) = pipe.reader.take() {
            reader.wake();
        }
        Poll::Ready(Ok(room))
    }
}

impl AsyncRead for SimControlStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if this.life.is_severed() {
                return Poll::Pending;
            }
            let mut connection = lock(&this.connection);
            if connection.is_reset {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            let pipe = &mut connection.pipes[1 - this.side];
            let is_held = this.wire.holds(pipe.len);
            if !is_held {
                let now = Instant::now();
                let before = buf.filled().len();
                while buf.remaining() > 0
                    && let Some((_, bytes)) = pipe.segments.front_mut().filter(|(at, _)| *at <= now)
                {
                    let part = bytes.len().min(buf.remaining());
                    buf.put_slice(&bytes[..part]);
                    bytes.advance(part);
                    pipe.len -= part;
                    if bytes.is_empty() {
                        pipe.segments.pop_front();
                    }
                }
                let is_end = pipe.segments.is_empty() && pipe.closed.is_some_and(|at| at <= now);
                if buf.filled().len() > before || is_end {
                    if let Some(writer) = pipe.writer.take() {
                        writer.wake();
                    }
                    return Poll::Ready(Ok(()));
                }
            }
            pipe.reader = Some(cx.waker().clone());
            let next = pipe.segments.front().map(|(at, _)| *at).or(pipe.closed);
            drop(connection);
            let Some(at) = next.filter(|_| !is_held) else { return Poll::Pending };
            let mut sleep = Box::pin(tokio::time::sleep_until(at));
            let is_due = sleep.as_mut().poll(cx).is_ready();
            this.timer = Some(sleep);
            if !is_due {
                return Poll::Pending;
            }
        }
    }
}

impl AsyncWrite for SimControlStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.write(cx, &[io::IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.life.is_severed() {
            let mut connection = lock(&self.connection);
            let out = &mut connection.pipes[self.side];
            let at = out.arrival(&self.wire);
            out.closed.get_or_insert(at);
            out.wake();
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for SimControlStream {
    fn drop(&mut self) {
        if !self.life.is_severed() {
            lock(&self.connection).close(self.side, &self.wire);
        }
    }
}
