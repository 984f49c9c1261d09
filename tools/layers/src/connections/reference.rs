//! A minimal server and client over TCP and epoll, without frames, as a reference for the messenger.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use base::thread::{self, ThreadClass};
use hdrhistogram::Histogram;
use node::failure::{Doing, Failure, Result};
use rustix::event::epoll;
use rustix::fd::OwnedFd;

use super::{ConnectionSample, ConnectionShape, ConnectionsArgs, DOING, WARM_UP, histogram, usage};

/// Number of events that one call of epoll returns at most.
const EVENTS: usize = 64;

const BUFFER_BYTES: usize = 256 << 10;

/// A socket, with the number of received bytes that are no whole request or reply yet.
struct BareSocket {
    stream: TcpStream,
    partial: usize,
    is_open: bool,
    /// When the requests in flight were sent.
    sent: VecDeque<Instant>,
}

/// The sockets of one side, and the epoll instance that watches them.
struct BareSockets {
    sockets: Vec<BareSocket>,
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
    buf: Vec<u8>,
}

/// Measures requests over bare sockets.
pub fn measure(shape: ConnectionShape, args: &ConnectionsArgs) -> Result<ConnectionSample> {
    let (request, reply) = (args.request_bytes as usize, args.reply_bytes as usize);
    let listener = TcpListener::bind("127.0.0.1:0").doing(DOING)?;
    let address = listener.local_addr().doing(DOING)?;
    let body = move || -> Result<()> {
        let accepted = (0..shape.connections).map(|_| Ok(listener.accept()?.0));
        let mut sockets = BareSockets::new(accepted).doing(DOING)?;
        let mut open = shape.connections;
        while open > 0 {
            sockets.wait().doing(DOING)?;
            while let Some(at) = sockets.next_ready() {
                match sockets.read(at, request).doing(DOING)? {
                    Some(whole) => sockets.write(at, whole * reply).doing(DOING)?,
                    None => open -= u32::from(sockets.end(at)),
                }
            }
        }
        Ok(())
    };
    let server = thread::spawn(ThreadClass::Osd, "0", body).doing(DOING)?;
    let streams = (0..shape.connections).map(|_| TcpStream::connect(address));
    let mut sockets = BareSockets::new(streams).doing(DOING)?;
    sockets.load(shape, request, reply, WARM_UP)?;
    let (before, began) = (usage()?, Instant::now());
    let latency = sockets.load(shape, request, reply, args.seconds)?;
    let (elapsed, used) = (began.elapsed(), usage()?.since(&before));
    drop(sockets);
    server.join().unwrap_or_else(|_| Err(Failure::new(DOING, "the server panicked; this is a bug")))?;
    Ok(ConnectionSample::new(latency, elapsed, &used))
}

impl BareSockets {
    fn new(streams: impl Iterator<Item = std::io::Result<TcpStream>>) -> std::io::Result<BareSockets> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut sockets = Vec::new();
        for (at, stream) in streams.enumerate() {
            let stream = stream?;
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            // Edge-triggered, as tokio uses epoll.
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            epoll::add(&epoll, &stream, epoll::EventData::new_u64(at as u64), flags)?;
            sockets.push(BareSocket { stream, partial: 0, is_open: true, sent: VecDeque::new() });
        }
        let (events, buf) = (Vec::with_capacity(EVENTS), vec![7; BUFFER_BYTES]);
        Ok(BareSockets { sockets, epoll, events, buf })
    }

    fn wait(&mut self) -> std::io::Result<()> {
        self.events.clear();
        epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut self.events), None)?;
        Ok(())
    }

    fn next_ready(&mut self) -> Option<usize> {
        self.events.pop().map(|event| event.data.u64() as usize)
    }

    /// Reads from a socket that is ready. Returns the number of whole records of `record` bytes, or
    /// `None` if the peer has closed the socket.
    fn read(&mut self, at: usize, record: usize) -> std::io::Result<Option<usize>> {
        let socket = &mut self.sockets[at];
        let mut whole = 0;
        loop {
            match socket.stream.read(&mut self.buf) {
                Ok(0) => return Ok(None),
                Ok(len) => {
                    socket.partial += len;
                    whole += socket.partial / record;
                    socket.partial %= record;
                    // A shorter read than the buffer has emptied the socket.
                    if len < self.buf.len() {
                        return Ok(Some(whole));
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Some(whole)),
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(None),
                Err(e) => return Err(e),
            }
        }
    }

    /// Records that the peer has closed a socket. Returns false if that is known: epoll may report the
    /// end of a connection several times.
    fn end(&mut self, at: usize) -> bool {
        std::mem::replace(&mut self.sockets[at].is_open, false)
    }

    fn write(&mut self, at: usize, mut len: usize) -> std::io::Result<()> {
        while len > 0 {
            match self.sockets[at].stream.write(&self.buf[..len.min(BUFFER_BYTES)]) {
                Ok(written) => len -= written,
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Keeps requests in flight on all sockets for the given time.
    fn load(
        &mut self,
        shape: ConnectionShape,
        request: usize,
        reply: usize,
        time: Duration,
    ) -> Result<Histogram<u64>> {
        let mut latency = histogram()?;
        let end = Instant::now() + time;
        for at in 0..self.sockets.len() {
            self.sockets[at].sent.extend(std::iter::repeat_n(Instant::now(), shape.in_flight as usize));
            self.write(at, shape.in_flight as usize * request).doing(DOING)?;
        }
        let mut in_flight = self.sockets.len() * shape.in_flight as usize;
        while in_flight > 0 {
            self.wait().doing(DOING)?;
            while let Some(at) = self.next_ready() {
                let whole = self.read(at, reply).doing(DOING)?;
                let whole = whole.ok_or_else(|| Failure::new(DOING, "the server closed a socket"))?;
                let now = Instant::now();
                let answered = self.sockets[at].sent.drain(..whole);
                answered.for_each(|since| latency.saturating_record((now - since).as_nanos() as u64));
                if now < end {
                    self.sockets[at].sent.extend(std::iter::repeat_n(now, whole));
                    self.write(at, whole * request).doing(DOING)?;
                } else {
                    in_flight -= whole;
                }
            }
        }
        Ok(latency)
    }
}
