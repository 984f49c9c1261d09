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
use identity::ProofKey;
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
    /// The connection for which the transport was accepted, if its connect request had a ticket. The
    /// client may only resume this connection over the transport.
    pub ticket: Option<AcceptedTicket>,
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
        Wire { road: Road::Stream(reader, writer), address, peer: PeerAddress::Local, ticket: None }
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The ticket in the connect request of a transport of packets. Before the server creates anything for
/// the transport, the ticket proves which connection will use it. A ticket is valid once.
///
/// ```text
///   0         1            9           13        29           45
///   +---------+------------+-----------+---------+------------+
///   | version | connection | number    | nonce   | proof      |
///   +---------+------------+-----------+---------+------------+
/// ```
///
/// Integers are little endian. `connection` stands for the connection in tickets. `number` grows with
/// each ticket of a connection. `proof` are the first 16 bytes of an HMAC-SHA-256 over the bytes
/// before it. rdma_cm has room for 48 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectTicket {
    /// Stands for the connection in its tickets. It is not the connection's number.
    pub connection: u64,
    /// Number of the ticket, from 1.
    pub number: u32,
    /// A random number that links the later handshake to this request.
    pub nonce: [u8; 16],
    /// The proof.
    pub proof: [u8; 16],
}

/// Version of the format of tickets.
const TICKET_VERSION: u8 = 1;

/// Label of the proof in a ticket.
const TICKET_LABEL: &str = "outboard ticket";

/// Length of the part of an encoded ticket that the proof covers, in bytes.
const PROVEN: usize = 29;

impl ConnectTicket {
    /// Length of an encoded ticket, in bytes.
    pub const LEN: usize = 45;

    /// Returns the number that stands for the connection with this key in its tickets.
    #[must_use]
    pub fn connection_in_tickets(key: &ProofKey) -> u64 {
        let proof = key.prove("outboard ticket, connection", &[]);
        u64::from_le_bytes(*proof.first_chunk().expect("a proof has 32 bytes"))
    }

    /// Makes the ticket `number` of the connection with this key.
    #[must_use]
    pub fn new(key: &ProofKey, number: u32) -> ConnectTicket {
        let connection = ConnectTicket::connection_in_tickets(key);
        let ticket = ConnectTicket { connection, number, nonce: base::entropy::random(), proof: [0; 16] };
        let proof = key.prove(TICKET_LABEL, &[&ticket.encode()[..PROVEN]]);
        ConnectTicket { proof: *proof.first_chunk().expect("a proof has 32 bytes"), ..ticket }
    }

    /// Returns whether the ticket was made with this key.
    #[must_use]
    pub fn is_of(&self, key: &ProofKey) -> bool {
        key.verify(TICKET_LABEL, &[&self.encode()[..PROVEN]], &self.proof)
    }

    /// Encodes the ticket.
    #[must_use]
    pub fn encode(&self) -> [u8; ConnectTicket::LEN] {
        let mut out = [0; ConnectTicket::LEN];
        out[0] = TICKET_VERSION;
        out[1..9].copy_from_slice(&self.connection.to_le_bytes());
        out[9..13].copy_from_slice(&self.number.to_le_bytes());
        out[13..29].copy_from_slice(&self.nonce);
        out[29..].copy_from_slice(&self.proof);
        out
    }

    /// Decodes the ticket in the data of a connect request. The provider may have appended zeros to
    /// the data. Returns `None` if the data is not a ticket.
    #[must_use]
    pub fn decode(data: &[u8]) -> Option<ConnectTicket> {
        let (ticket, rest) = data.split_first_chunk::<{ ConnectTicket::LEN }>()?;
        if ticket[0] != TICKET_VERSION || rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        Some(ConnectTicket {
            connection: u64::from_le_bytes(ticket[1..9].try_into().ok()?),
            number: u32::from_le_bytes(ticket[9..13].try_into().ok()?),
            nonce: ticket[13..29].try_into().ok()?,
            proof: ticket[29..].try_into().ok()?,
        })
    }

    /// The packet token of the dialling side, and the number of the transport.
    fn packet_numbers(&self) -> (u64, u64) {
        let (token, transport_number) = self.nonce.split_at(8);
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        (number(token), number(transport_number))
    }
}

/// The connection for which a transport was accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceptedTicket {
    /// Number of the connection.
    pub connection: u128,
    /// Number of the connection's tenant.
    pub tenant_id: u32,
    /// Name of the connection's tenant, for display.
    pub tenant: String,
    /// The nonce of the ticket.
    pub nonce: [u8; 16],
}

/// Checks the tickets of connect requests. Any thread may call it.
pub trait TicketOffice: Send + Sync {
    /// Accepts a ticket, which is invalid from then on. `None` if the ticket is not valid.
    fn redeem(&self, ticket: &ConnectTicket) -> Option<AcceptedTicket>;
}

/// Creates [`Wire`]s: dials peers and accepts them.
pub trait Transport: Send + Sync + 'static {
    /// Starts to listen at `address`. A transport of packets accepts only peers whose tickets
    /// `tickets` accepts. Streams have no tickets.
    fn bind<'a>(
        &'a self,
        address: &'a str,
        tickets: Arc<dyn TicketOffice>,
    ) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>>;

    /// Connects to an endpoint in the form that [`Acceptor::endpoint`] returns. A transport of
    /// packets needs a ticket.
    fn dial<'a>(
        &'a self,
        endpoint: &'a str,
        ticket: Option<&'a ConnectTicket>,
    ) -> BoxFuture<'a, io::Result<Wire>>;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_decoded_despite_zero_padding_and_is_valid_for_its_key_only() {
        let key = ProofKey::new(&[1; 32]);
        let ticket = ConnectTicket::new(&key, 7);
        let mut bytes = ticket.encode().to_vec();
        assert!(bytes.len() <= 48, "a connect request of rdma_cm has room for 48 bytes");
        assert!(ConnectTicket::decode(&bytes).unwrap().is_of(&key));
        assert!(!ticket.is_of(&ProofKey::new(&[2; 32])));
        for at in 0..bytes.len() {
            bytes[at] ^= 1;
            assert!(ConnectTicket::decode(&bytes).is_none_or(|changed| !changed.is_of(&key)), "byte {at}");
            bytes[at] ^= 1;
        }
        bytes.extend_from_slice(&[0; 30]);
        assert_eq!(ConnectTicket::decode(&bytes), Some(ticket));
        bytes.push(1);
        assert_eq!(ConnectTicket::decode(&bytes), None);
        assert_eq!(ConnectTicket::decode(&bytes[..44]), None);
    }
}
