//! Transports carry the bytes of a connection, reliably and in order. A transport may break at any
//! byte.
//!
//! [`tcp`] carries a byte stream between machines. [`ofi`] has no byte stream: it carries
//! [`packets`] and one-sided transfers. [`sim`] is a simulated network with faults, within a
//! process, for both. A
//! transport does not interpret the bytes. One connection may use several transports in turn, even
//! of different kinds.

pub mod ofi;
pub mod packets;
pub mod sim;
pub mod tcp;

use std::fmt;
use std::io;
use std::sync::Arc;

use base::BoxFuture;
use base::budget::PeerAddress;
use tokio::io::{AsyncRead, AsyncWrite};

/// The receiving half of a stream.
pub type TransportReader = Box<dyn AsyncRead + Send + Unpin>;

/// The sending half of a stream. It should implement vectored writes efficiently.
pub type TransportWriter = Box<dyn AsyncWrite + Send + Unpin>;

/// One transport of a connection.
pub struct Wire {
    /// The way in which bytes move: a stream or packets.
    pub road: Road,
    /// The peer's address, for display.
    pub address: String,
    /// The peer's address. The accepting side divides its limited resources between the addresses
    /// of its peers.
    pub peer: PeerAddress,
    /// The identity that the peer claimed in the connect request, if the transport has such a
    /// request. The handshake must state the same identity.
    pub claim: Option<ConnectClaim>,
}

/// The way in which bytes move on a [`Wire`].
pub enum Road {
    /// A stream of bytes in each direction.
    Stream(TransportReader, TransportWriter),
    /// Packets, and one-sided transfers.
    Packets(Arc<packets::Link>),
}

impl Wire {
    /// Creates a wire from the two halves of a stream. The peer's address for budgets is
    /// [`PeerAddress::Local`].
    #[must_use]
    pub fn stream(reader: TransportReader, writer: TransportWriter, address: String) -> Wire {
        Wire { road: Road::Stream(reader, writer), address, peer: PeerAddress::Local, claim: None }
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The identity that a client claims in the connect request. With this identity, a server can
/// choose a protection domain before it creates an endpoint. The claim is not authenticated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectClaim {
    /// The tenant, at most [`ConnectClaim::MAX_TENANT`] bytes.
    pub tenant: String,
    /// A random number that links the later handshake to this request.
    pub nonce: [u8; 16],
}

impl ConnectClaim {
    /// Maximum length of a tenant's name, in bytes.
    pub const MAX_TENANT: usize = 32;

    /// The packet token of the dialling side, and the number of the transport.
    fn packet_numbers(&self) -> (u64, u64) {
        let (token, transport_number) = self.nonce.split_at(8);
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        (number(token), number(transport_number))
    }
}

/// Creates [`Wire`]s: dials peers and accepts them.
pub trait Transport: Send + Sync + 'static {
    /// Starts to listen at `address`.
    fn bind<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>>;

    /// Connects to an endpoint in the form that [`Acceptor::endpoint`] returns.
    fn dial<'a>(&'a self, endpoint: &'a str, claim: &'a ConnectClaim) -> BoxFuture<'a, io::Result<Wire>>;
}

/// Accepts transports from clients.
pub trait Acceptor: Send {
    /// The address at which the acceptor listens.
    fn endpoint(&self) -> String;

    /// Waits for the next transport. No transport is lost if the returned future is dropped. Skips
    /// transports that end before they are accepted. An error therefore concerns the acceptor or
    /// the process, for example a lack of file descriptors.
    fn accept(&mut self) -> BoxFuture<'_, io::Result<Wire>>;
}
