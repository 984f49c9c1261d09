//! The interface of network stacks. See the [crate] documentation for an overview.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base::BoxFuture;
use base::block::Payload;
use base::budget::PeerAddress;
use base::mem::ArenaBuf;
use bytes::Bytes;
use identity::{IdentityError, KeyHash, UserName};
use wire::{BulkDescriptor, PathStatus};

use crate::Admissions;

/// Result of a call to the messenger.
pub type Result<T, E = MessengerError> = std::result::Result<T, E>;

/// The reason why a call to the messenger failed, or why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessengerError {
    /// The peer cannot be reached.
    #[error("cannot reach {endpoint}: {reason}; check that the node is running and the address is correct")]
    Unreachable {
        /// The endpoint that was dialled.
        endpoint: String,
        /// The reason that the system or the stack gave.
        reason: String,
    },
    /// This side cannot listen at an address.
    #[error("cannot listen at {address}: {reason}; choose another address")]
    CannotListen {
        /// The address.
        address: String,
        /// The reason that the system or the provider gave.
        reason: String,
    },
    /// A network that the configuration requires cannot be used on this machine.
    #[error("cannot use the network {network}: {reason}; run `outboard doctor`, or choose another network")]
    NetworkUnusable {
        /// The network, for example `ofi:verbs`.
        network: String,
        /// The reason that the provider or the system gave.
        reason: String,
    },
    /// The peer could not prove its identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The server does not accept this side's key.
    #[error("{0}")]
    KeyRefused(String),
    /// The handshake failed, for example because the two sides support no common version or because
    /// all connection slots of the server are taken.
    #[error("peer refused the connection: {0}")]
    Refused(String),
    /// The connection has ended. Requests without an answer may or may not have taken effect.
    #[error("connection lost: {0}; reconnect and retry")]
    ConnectionLost(String),
    /// The peer violated the protocol, so this side ended the connection.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// A message or bulk transfer is larger than the connection's [`Limits`] allow.
    #[error("{size} bytes exceed the limit of {limit} bytes; divide the data, or offer it as bulk data")]
    TooLarge {
        /// Size of the message's header or payload, or of the bulk transfer, in bytes.
        size: usize,
        /// The limit, in bytes.
        limit: usize,
    },
    /// A bulk transfer names memory that was never offered or was withdrawn, or a range outside the
    /// offer.
    #[error("bulk transfer refused: {0}")]
    BulkRefused(String),
    /// A bulk transfer exceeded its time limit. Its buffer has been released.
    #[error("bulk transfer took longer than {0:?}; the peer is stalled or the network is too slow")]
    TimedOut(Duration),
    /// Bulk data arrived damaged.
    #[error("bulk data arrived damaged: {0}")]
    Damaged(String),
    /// The source of a bulk transfer failed to produce its data.
    #[error("bulk source failed: {0}")]
    Source(String),
}

/// An ordered message: a header, which the users encode, and a small payload.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Message {
    /// Bytes that the messenger does not interpret, at most [`Limits::max_header`].
    pub header: Bytes,
    /// Data that travels in the message, with its checksums, at most [`Limits::max_inline`] bytes.
    /// The receiving messenger verifies the data.
    pub payload: Payload,
}

/// The maximum sizes of messages and transfers on a connection, and hints for choosing between
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum length of a message header, in bytes.
    pub max_header: usize,
    /// Maximum length of an inline payload, in bytes. Longer data must be sent as bulk data.
    pub max_inline: usize,
    /// Maximum length of one bulk read or write, in bytes.
    pub max_bulk: usize,
    /// Payloads of up to this length, in bytes, are sent faster inline. Longer payloads are sent
    /// faster as bulk data.
    pub eager: usize,
    /// Whether bulk data moves by one-sided transfers. If true, sources should hold their data in
    /// memory ([`BulkSource::memory`]).
    pub one_sided: bool,
}

/// The identity of a connection's peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerInfo {
    /// Transport address, for display.
    pub address: String,
    /// The peer's address on the first transport of the connection. The server divides its limited
    /// resources fairly between the addresses of its peers ([`base::budget`]).
    pub peer: PeerAddress,
    /// The key that the peer has proved.
    pub key: KeyHash,
    /// The user to whom the key belongs. `None` on the client's side.
    pub user: Option<UserName>,
    /// Unique number of the connection. It stays the same when the connection resumes on a new
    /// transport.
    pub connection: u128,
}

/// Options for opening a connection.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// Time limit for reaching the peer: for the first handshake, and again for each resumption.
    pub timeout: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions { timeout: Duration::from_secs(5) }
    }
}

/// Data that a peer may pull. Each range may be read several times, and ranges may be read in any
/// order.
pub trait BulkSource: Send + Sync {
    /// Length of the data, in bytes.
    fn len(&self) -> u64;

    /// Whether there is no data.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Offset of the first byte within the object, modulo 4096. The block_offset determines the
    /// boundaries of the pieces, each of which has its own checksum.
    fn block_offset(&self) -> u64;

    /// Reads the bytes `offset..offset + len` with the checksums of their pieces. The range starts
    /// at a piece boundary and is inside the source. An error ends the transfer, and the peer
    /// receives the text of the error.
    fn read(&self, offset: u64, len: usize) -> BoxFuture<'_, Result<Payload, String>>;

    /// The whole data, if it is in memory. A peer can then read it by one-sided transfers.
    fn memory(&self) -> Option<Payload> {
        None
    }
}

/// Memory that a peer may fill once. The ranges arrive in any order and do not overlap. Some ranges
/// may arrive only when the offer is [finished](BulkRegion::finish).
pub trait BulkSink: Send + Sync {
    /// Capacity, in bytes.
    fn len(&self) -> u64;

    /// Whether the capacity is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of bytes from the start of the sink that the peer is likely to fill. Only these bytes
    /// are exposed to one-sided transfers, because the exposure of memory takes time in proportion
    /// to its length. The peer sends other data in messages.
    fn likely_len(&self) -> u64 {
        self.len()
    }

    /// Stores `payload` at byte `offset` of the sink. The messenger has verified the checksums. The
    /// implementation must not block. It returns `false` to refuse the data, for example because
    /// ranges overlap.
    fn write(&self, offset: u64, payload: Payload) -> bool;
}

/// An offer of memory. Dropping this value withdraws the offer, and the messenger refuses later
/// transfers.
pub struct BulkRegion {
    /// The descriptor to send to the peer.
    pub descriptor: BulkDescriptor,
    end: Option<EndOffer>,
}

/// Callback that ends an offer. The argument is true if the peer has said that it no longer uses
/// the memory.
type EndOffer = Box<dyn FnOnce(bool) + Send + Sync>;

impl BulkRegion {
    /// Creates an offer that calls `end` with `true` when it is finished, or with `false` when it
    /// is dropped. Only implementations of network stacks need this constructor.
    #[must_use]
    pub fn new(descriptor: BulkDescriptor, end: EndOffer) -> BulkRegion {
        BulkRegion { descriptor, end: Some(end) }
    }

    /// Ends the offer after the peer has said that its transfers are complete. A sink has all its
    /// data when this call returns. If an offer is dropped instead, its exposed memory is not
    /// reused until the peer can no longer access it.
    ///
    /// **Limitation.** The stack cannot check the peer's statement. If the caller finishes an offer
    /// too early, or the peer lies, a software provider of libfabric may still write a part of a
    /// transfer into memory that has another use already. A caller must trust the peer of an offer,
    /// as clients trust their node.
    pub fn finish(mut self) {
        if let Some(end) = self.end.take() {
            end(true);
        }
    }
}

impl fmt::Debug for BulkRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BulkRegion").field("descriptor", &self.descriptor).finish_non_exhaustive()
    }
}

impl Drop for BulkRegion {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end(false);
        }
    }
}

/// Data that a bulk read fetched.
#[derive(Debug)]
pub struct Pulled {
    /// The destination buffer, filled to the requested length.
    pub buf: ArenaBuf,
    /// One checksum per piece. The messenger has verified them against the data.
    pub checksums: Vec<u32>,
}

/// The sending half of one end of a connection. Threads can share it, and any thread may call it.
/// Its I/O runs on the thread that created the connection, or on the stack's own thread.
pub trait Connection: Send + Sync {
    /// The peer of the connection.
    fn peer(&self) -> &PeerInfo;

    /// The maximum sizes of messages and transfers on the connection.
    fn limits(&self) -> Limits;

    /// Queues a message behind all messages that are already queued. The future resolves when the
    /// message is queued; it waits while the bounded queue is full. A queued message arrives
    /// exactly once, unless the connection is lost.
    fn send(&self, message: Message) -> BoxFuture<'_, Result<()>>;

    /// Offers data that the peer may pull.
    fn offer_source(&self, source: Arc<dyn BulkSource>) -> Result<BulkRegion>;

    /// Offers memory that the peer may fill. `block_offset` is the offset of the first byte within
    /// the object, modulo 4096.
    fn offer_sink(&self, sink: Arc<dyn BulkSink>, block_offset: u16) -> Result<BulkRegion>;

    /// Pulls bytes `offset..offset + dest.len()` of the peer's offer into `dest`. `offset` must be
    /// at a piece boundary. The data arrives in chunks of at most 256 KiB, interleaved with other
    /// traffic. Fails with [`MessengerError::TimedOut`] after `timeout`.
    fn bulk_read<'a>(
        &'a self,
        from: &'a BulkDescriptor,
        offset: u64,
        dest: ArenaBuf,
        timeout: Duration,
    ) -> BoxFuture<'a, Result<Pulled>>;

    /// Pushes `payload` to byte `offset` of the peer's offer. `offset` must be at a piece boundary.
    /// The future resolves when the position of the data in the send order is fixed. The data then
    /// arrives before any message that is queued later. The payload's memory is released when the
    /// peer has the data. This call refuses a range outside the memory that the descriptor names.
    /// If the peer has withdrawn the offer, the peer drops the data, and later pushes to the offer
    /// are refused.
    fn bulk_write<'a>(
        &'a self,
        to: &'a BulkDescriptor,
        offset: u64,
        payload: Payload,
        timeout: Duration,
    ) -> BoxFuture<'a, Result<()>>;

    /// Closes the connection. Queued frames are sent first, for up to one second.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// An event of a connection. Events arrive in order.
#[derive(Debug)]
pub enum ConnectionEvent {
    /// A message arrived.
    Message(Message),
    /// The transport broke, and the connection is being resumed. Nothing is lost so far, and the
    /// user need not act.
    Interrupted,
    /// The connection continues over a new transport. The user need not act.
    Resumed,
    /// The connection has ended. No other event follows.
    Lost(MessengerError),
}

/// The receiving half of a connection. Messages that the user has not taken use up the peer's
/// credit, which provides backpressure.
pub trait Incoming: Send {
    /// Waits for the next event. After [`ConnectionEvent::Lost`], every call returns that event
    /// again. No event is lost if the returned future is dropped.
    fn next(&mut self) -> BoxFuture<'_, ConnectionEvent>;
}

/// The sending and the receiving half of one end of a connection. The connection is closed when
/// both halves are dropped.
pub type Ends = (Arc<dyn Connection>, Box<dyn Incoming>);

/// Accepts connections from clients.
pub trait Listener: Send {
    /// The address of the listener, in the form that [`NetworkStack::connect`] takes.
    fn endpoint(&self) -> String;

    /// The paths that connections can use besides the base transport.
    fn paths(&self) -> Vec<PathStatus>;

    /// Live counters of refused peers, and of handshakes and connections that lost their slot to
    /// another peer.
    fn admissions(&self) -> Arc<Admissions>;

    /// Waits for the next new connection. A resumed connection is not returned again. An error
    /// reports that the handshake of one peer failed; the listener continues.
    fn accept(&mut self) -> BoxFuture<'_, Result<Ends>>;
}

/// Creates connections and listeners. Each call must run on a tokio runtime. The thread of this
/// runtime serves the connection, unless the stack has its own thread.
pub trait NetworkStack: Send + Sync {
    /// Listens at `address`, which is `host:port`. Port 0 chooses a free port.
    fn listen<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Result<Box<dyn Listener>>>;

    /// Opens a connection to the peer at `endpoint`.
    fn connect<'a>(&'a self, endpoint: &'a str, options: ConnectOptions) -> BoxFuture<'a, Result<Ends>>;
}
