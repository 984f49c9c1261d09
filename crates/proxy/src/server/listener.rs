//! The socket on which osds reach a server.

use std::path::Path;

use base::budget::PeerAddress;
use channel::Socket;
use tokio::net::{TcpListener, UnixListener};

/// The socket on which a server listens.
#[derive(Debug)]
pub enum StoreListener {
    /// A UNIX socket. It carries file descriptors of host memory.
    Unix(std::os::unix::net::UnixListener),
    /// A TCP socket. It carries all data unless the osd reaches host memory through libfabric. Both
    /// ends prove their keys, but what follows is not encrypted.
    Tcp(std::net::TcpListener),
    /// A simulated listener.
    #[cfg(feature = "sim")]
    Sim(channel::sim::SimListener),
}

impl StoreListener {
    /// Listens at `path`. Removes any existing file at `path` first, such as the socket of a dead
    /// process.
    ///
    /// # Errors
    /// Fails if the path cannot be bound.
    pub fn unix(path: &Path) -> std::io::Result<StoreListener> {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        Ok(StoreListener::Unix(std::os::unix::net::UnixListener::bind(path)?))
    }
}

/// A listener of an event loop.
pub(super) enum AsyncListener {
    Unix(UnixListener),
    Tcp(TcpListener),
    #[cfg(feature = "sim")]
    Sim(channel::sim::SimListener),
}

impl AsyncListener {
    pub(super) fn new(listener: StoreListener) -> std::io::Result<AsyncListener> {
        Ok(match listener {
            StoreListener::Unix(listener) => {
                listener.set_nonblocking(true)?;
                AsyncListener::Unix(UnixListener::from_std(listener)?)
            }
            StoreListener::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                AsyncListener::Tcp(TcpListener::from_std(listener)?)
            }
            #[cfg(feature = "sim")]
            StoreListener::Sim(listener) => AsyncListener::Sim(listener),
        })
    }

    pub(super) async fn accept(&self) -> std::io::Result<(Socket, PeerAddress)> {
        match self {
            AsyncListener::Unix(listener) => {
                Ok((Socket::Unix(listener.accept().await?.0), PeerAddress::Local))
            }
            AsyncListener::Tcp(listener) => loop {
                let (stream, peer) = listener.accept().await?;
                match Socket::tcp(stream) {
                    Ok(socket) => return Ok((socket, peer.ip().into())),
                    Err(e) => tracing::debug!(%peer, "a connection ended before it was accepted: {e}"),
                }
            },
            #[cfg(feature = "sim")]
            AsyncListener::Sim(listener) => Ok((listener.accept().await?, PeerAddress::Local)),
        }
    }
}
