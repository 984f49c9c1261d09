//! TCP sockets as a transport.

use std::io;

use base::BoxFuture;
use tokio::net::{TcpListener, TcpStream};

use super::{Acceptor, Claim, Transport, Wire};

/// Bytes that the kernel may hold unsent: what a heartbeat waits behind, beside what the network has in flight.
const UNSENT_MAX_BYTES: u32 = 256 << 10;

/// How a connection within one machine is controlled: it has no network that could be congested, so it needs no timer that
/// paces it (as BBR's does, for a fifth of a bulk transfer's CPU: docs/evaluation.md). Every Linux has it, and every user may choose it.
const LOOPBACK_CONGESTION_CONTROL: &[u8] = b"reno";

/// The TCP transport. Addresses are `host:port`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tcp;

struct TcpAcceptor(TcpListener);

impl Transport for Tcp {
    fn bind<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>> {
        Box::pin(async move {
            let listener = TcpListener::bind(address).await?;
            Ok(Box::new(TcpAcceptor(listener)) as Box<dyn Acceptor>)
        })
    }

    fn dial<'a>(&'a self, endpoint: &'a str, _: &'a Claim) -> BoxFuture<'a, io::Result<Wire>> {
        Box::pin(async move { wire(TcpStream::connect(endpoint).await?) })
    }
}

impl Acceptor for TcpAcceptor {
    fn endpoint(&self) -> String {
        self.0.local_addr().map_or_else(|e| format!("unknown ({e})"), |a| a.to_string())
    }

    fn accept(&mut self) -> BoxFuture<'_, io::Result<Wire>> {
        Box::pin(async { wire(self.0.accept().await?.0) })
    }
}

fn wire(stream: TcpStream) -> io::Result<Wire> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(&stream);
    socket.set_tcp_notsent_lowat(UNSENT_MAX_BYTES)?;
    let peer = stream.peer_addr()?;
    if peer.ip() == stream.local_addr()?.ip() {
        // Refused, it is the system's choice as before, only slower.
        let _ = socket.set_tcp_congestion(LOOPBACK_CONGESTION_CONTROL);
    }
    let address = peer.to_string();
    let (reader, writer) = stream.into_split();
    Ok(Wire::stream(Box::new(reader), Box::new(writer), address))
}
