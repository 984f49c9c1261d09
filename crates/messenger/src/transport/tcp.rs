//! TCP sockets as a transport.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use base::BoxFuture;
use tokio::net::{TcpListener, TcpStream};

use super::{Acceptor, ConnectTicket, TicketOffice, Transport, Wire};

/// Limit of unsent bytes in the kernel. A heartbeat waits behind these bytes and behind the bytes
/// in flight.
const UNSENT_MAX_BYTES: u32 = 256 << 10;

/// Congestion control of connections within one machine. No network can be congested there, so
/// these connections need no pacing. The pacing timer of BBR costs a fifth of the CPU time of a
/// bulk transfer (docs/evaluation.md). Every Linux kernel has `reno`, and every user may choose it.
const LOOPBACK_CONGESTION_CONTROL: &[u8] = b"reno";

/// The TCP transport. Addresses are `host:port`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tcp {
    /// Local address from which clients connect. `None` lets the system choose.
    pub source: Option<IpAddr>,
}

struct TcpAcceptor(TcpListener);

impl Transport for Tcp {
    fn bind<'a>(
        &'a self,
        address: &'a str,
        _: Arc<dyn TicketOffice>,
    ) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>> {
        Box::pin(async move {
            let listener = TcpListener::bind(address).await?;
            Ok(Box::new(TcpAcceptor(listener)) as Box<dyn Acceptor>)
        })
    }

    fn dial<'a>(
        &'a self,
        endpoint: &'a str,
        _: Option<&'a ConnectTicket>,
    ) -> BoxFuture<'a, io::Result<Wire>> {
        Box::pin(async move {
            let stream = base::dial::tcp(endpoint, self.source).await?;
            let peer = stream.peer_addr()?;
            wire(stream, peer)
        })
    }
}

impl Acceptor for TcpAcceptor {
    fn endpoint(&self) -> String {
        self.0.local_addr().map_or_else(|e| format!("unknown ({e})"), |a| a.to_string())
    }

    fn accept(&mut self) -> BoxFuture<'_, io::Result<Wire>> {
        Box::pin(async {
            loop {
                let (stream, peer) = match self.0.accept().await {
                    Ok(accepted) => accepted,
                    Err(e) if ended_early(&e) => continue,
                    Err(e) => return Err(e),
                };
                match wire(stream, peer) {
                    Ok(wire) => return Ok(wire),
                    Err(e) => tracing::debug!(%peer, error = %e, "a connection ended before it was accepted"),
                }
            }
        })
    }
}

/// Whether an error of accept(2) concerns only the new socket, so that the listener can go on to
/// the next one.
fn ended_early(e: &io::Error) -> bool {
    use io::ErrorKind::{
        ConnectionAborted, ConnectionReset, HostUnreachable, NetworkDown, NetworkUnreachable,
    };
    let kinds = [ConnectionAborted, ConnectionReset, HostUnreachable, NetworkDown, NetworkUnreachable];
    kinds.contains(&e.kind())
}

fn wire(stream: TcpStream, peer: SocketAddr) -> io::Result<Wire> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(&stream);
    socket.set_tcp_notsent_lowat(UNSENT_MAX_BYTES)?;
    if peer.ip() == stream.local_addr()?.ip() {
        // If the system refuses `reno`, its default congestion control stays in force, which is
        // only slower.
        let _ = socket.set_tcp_congestion(LOOPBACK_CONGESTION_CONTROL);
    }
    let address = peer.to_string();
    let (reader, writer) = stream.into_split();
    let wire = Wire::stream(Box::new(reader), Box::new(writer), address);
    Ok(Wire { peer: peer.ip().into(), ..wire })
}
