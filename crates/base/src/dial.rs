//! TCP connections from a chosen local address.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::net::{TcpSocket, TcpStream, lookup_host};

/// Connects to `endpoint` (`host:port`), from the local address `source` if there is one. Then it uses
/// the first address of `endpoint` that has the same address family and answers.
///
/// # Errors
/// If no address of the endpoint answers, or the machine does not have the address `source`.
pub async fn tcp(endpoint: &str, source: Option<IpAddr>) -> io::Result<TcpStream> {
    let Some(source) = source else { return TcpStream::connect(endpoint).await };
    let mut last = io::Error::new(
        io::ErrorKind::AddrNotAvailable,
        format!("the endpoint has no address of the same family as {source}"),
    );
    for address in lookup_host(endpoint).await?.filter(|a| a.is_ipv4() == source.is_ipv4()) {
        let socket = if source.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        let bound = socket.bind(SocketAddr::new(source, 0));
        bound.map_err(|e| io::Error::new(e.kind(), format!("cannot connect from {source}: {e}")))?;
        match socket.connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}
