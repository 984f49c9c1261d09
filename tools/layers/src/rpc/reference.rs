//! A minimal TCP echo over epoll, as a reference for the messenger.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use base::process::ProcessUsage;
use hdrhistogram::Histogram;
use rustix::event::epoll;

use super::RpcArgs;
use super::figures::RpcSample;
use super::peer::{PeerJob, PeerProcess, sum};
use crate::output;
use node::failure::{Doing, Result};

/// A socket that is read when epoll reports data.
struct Echo {
    stream: TcpStream,
    epoll: rustix::fd::OwnedFd,
    buf: Vec<u8>,
}

impl Echo {
    fn new(stream: TcpStream) -> std::io::Result<Echo> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &stream, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Echo { stream, epoll, buf: vec![0; 1 << 20] })
    }

    /// Waits for bytes and reads them; returns 0 if the peer has closed the socket.
    fn read(&mut self) -> std::io::Result<usize> {
        loop {
            let mut events = Vec::with_capacity(1);
            epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None)?;
            match self.stream.read(&mut self.buf) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }

    fn write(&mut self, len: usize) -> std::io::Result<()> {
        let mut at = 0;
        while at < len {
            match self.stream.write(&self.buf[at..len]) {
                Ok(written) => at += written,
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// Runs the server: accepts a connection, and sends back all bytes that arrive.
pub fn serve(address: &str) -> Result<()> {
    let doing = "echoing";
    let listener = TcpListener::bind(address).doing(doing)?;
    output::line(listener.local_addr().doing(doing)?);
    let mut echo = Echo::new(listener.accept().doing(doing)?.0).doing(doing)?;
    loop {
        match echo.read().doing(doing)? {
            0 => return Ok(()),
            len => echo.write(len).doing(doing)?,
        }
    }
}

/// Measures the echo between this process and a second process.
pub fn echo(args: &RpcArgs) -> Result<RpcSample> {
    let doing = "measuring a bare echo";
    let mut peer = PeerProcess::start(&PeerJob::BareEcho {
        address: std::net::SocketAddr::new(args.address, 0).to_string(),
    })?;
    let stream = TcpStream::connect(peer.line()?).doing(doing)?;
    let mut echo = Echo::new(stream).doing(doing)?;
    let mut latency: Histogram<u64> = Histogram::new_with_bounds(1, 600_000_000_000, 3).doing(doing)?;
    let (size, depth) = (args.size.0 as usize, args.in_flight as usize);
    echo.buf.resize(echo.buf.len().max(size * depth), 0);
    let own = || ProcessUsage::read(std::process::id()).doing(doing);
    let (before, peer_before, began) = (own()?.total, peer.usage()?, Instant::now());
    let end = began + args.duration();
    let mut sent = std::collections::VecDeque::from(vec![Instant::now(); depth]);
    echo.write(size * depth).doing(doing)?;
    let mut partial = 0;
    while !sent.is_empty() {
        partial += echo.read().doing(doing)?;
        let now = Instant::now();
        let whole = partial / size;
        partial %= size;
        for since in sent.drain(..whole.min(sent.len())) {
            latency.saturating_record((now - since).as_nanos() as u64);
        }
        if now < end {
            sent.extend(std::iter::repeat_n(now, whole));
            echo.write(whole * size).doing(doing)?;
        }
    }
    let elapsed = began.elapsed();
    let usage = sum(own()?.total.since(&before), peer.usage()?.since(&peer_before));
    Ok(RpcSample::of_reference(latency, elapsed, usage))
}
