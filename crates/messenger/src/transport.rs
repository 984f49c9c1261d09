//! Transports: reliable ways to carry a connection's bytes, which may break at any byte.
//!
//! [`tcp`] is the real stream. [`memory`] works within one process, and [`faulty`] adds faults to
//! another transport. [`ofi`] has no stream: it carries packets and one-sided transfers. A
//! transport does not interpret the bytes. One connection may use several transports in turn, even
//! of different kinds.

pub mod faulty;
pub mod memory;
pub mod ofi;
pub mod tcp;

use std::fmt;
use std::io;
use std::sync::Arc;

use base::BoxFuture;
use base::budget::PeerAddress;
use tokio::io::{AsyncRead, AsyncWrite};

/// What goes in.
pub type TransportReader = Box<dyn AsyncRead + Send + Unpin>;

/// What goes out. Vectored writes should be real ones.
pub type TransportWriter = Box<dyn AsyncWrite + Send + Unpin>;

/// One connection of a transport.
pub struct Wire {
    /// How bytes move.
    pub road: Road,
    /// The peer's address, for people.
    pub address: String,
    /// The peer's address, for the budgets of the side that accepted the connection.
    pub peer: PeerAddress,
    /// What the peer said of itself before the connection stood, where the transport has room for that. To be proven by
    /// its handshake.
    pub claim: Option<ConnectClaim>,
}

/// How bytes move on a [`Wire`].
pub enum Road {
    /// A stream of bytes in each direction.
    Stream(TransportReader, TransportWriter),
    /// Packets, and one-sided transfers.
    Packets(Arc<ofi::Link>),
}

impl Wire {
    /// A wire that is two streams, to a peer without an address of its own.
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

/// Who wants to connect, in the connect request itself: so a server can choose a protection domain before there is an
/// endpoint. It proves nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectClaim {
    /// The tenant, at most [`Claim::MAX_TENANT`] bytes.
    pub tenant: String,
    /// Random: says that the handshake which comes later belongs to this request.
    pub nonce: [u8; 16],
}

impl ConnectClaim {
    /// Longest name of a tenant, in bytes.
    pub const MAX_TENANT: usize = 32;
}

/// A way to make [`Wire`]s.
pub trait Transport: Send + Sync + 'static {
    /// Starts to take connections at `address`.
    fn bind<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>>;

    /// Connects to an endpoint as [`Acceptor::endpoint`] gives it.
    fn dial<'a>(&'a self, endpoint: &'a str, claim: &'a ConnectClaim) -> BoxFuture<'a, io::Result<Wire>>;
}

/// Where connections arrive.
pub trait Acceptor: Send {
    /// The address bound to.
    fn endpoint(&self) -> String;

    /// The next connection. Cancel safe. Connections that end before they are accepted are passed over: an error is about
    /// the acceptor or the process, such as a lack of descriptors.
    fn accept(&mut self) -> BoxFuture<'_, io::Result<Wire>>;
}
