//! What every network stack offers. See the [crate] documentation for the idea.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base::BoxFuture;
use base::block::Payload;
use base::budget::PeerAddress;
use base::mem::ArenaBuf;
use bytes::Bytes;
use wire::BulkDescriptor;

use crate::Admissions;

/// Result of a messenger's call.
pub type Result<T, E = MessengerError> = std::result::Result<T, E>;

/// Why a message or transfer did not go through.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessengerError {
    /// The peer cannot be reached.
    #[error("cannot reach {endpoint}: {reason}; check that the node is up and the address right")]
    Unreachable {
        /// Where.
        endpoint: String,
        /// The system's or the stack's reason.
        reason: String,
    },
    /// The peer speaks no version or feature set that this side speaks.
    #[error("peer refused the connection: {0}")]
    Refused(String),
    /// The session is over. What had been sent and not answered may or may not have taken effect.
    #[error("session lost: {0}; reconnect and retry")]
    SessionLost(String),
    /// The peer broke the protocol; its session was ended.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// A message is larger than the connection's [`Limits`] allow.
    #[error("message of {size} bytes exceeds the limit of {limit}; offer it as bulk data")]
    TooLarge {
        /// Its size, in bytes.
        size: usize,
        /// The most that is possible.
        limit: usize,
    },
    /// A bulk transfer names memory that was never offered, was withdrawn, or does not have that range.
    #[error("bulk transfer refused: {0}")]
    BulkRefused(String),
    /// A bulk transfer did not end in time. Its buffers are back with their owner.
    #[error("bulk transfer took longer than {0:?}; the peer is stalled or the network too slow")]
    TimedOut(Duration),
    /// Bulk data arrived damaged.
    #[error("bulk data arrived damaged: {0}")]
    Damaged(String),
    /// The source of a bulk transfer failed to produce its data.
    #[error("bulk source failed: {0}")]
    Source(String),
}

/// An ordered message: a header that the users encode, and a small payload.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Message {
    /// Opaque to the messenger. At most [`Limits::max_header`] bytes.
    pub header: Bytes,
    /// Travels with the message, with its checksums; verified by the messenger on arrival.
    /// At most [`Limits::max_inline`] bytes.
    pub payload: Payload,
}

/// What a connection can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest message header, in bytes.
    pub max_header: usize,
    /// Longest inline payload, in bytes. Larger ones are bulk.
    pub max_inline: usize,
    /// Largest single bulk read or write, in bytes.
    pub max_bulk: usize,
    /// Payloads of up to that length, in bytes, are cheaper inline; longer ones are cheaper as bulk.
    pub eager: usize,
    /// Bulk data moves by itself between memories: sources are better held in memory ([`BulkSource::memory`]).
    pub one_sided: bool,
}

/// Who is at the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerInfo {
    /// Transport address, for people.
    pub address: String,
    /// Transport address at which the session began, for budgets.
    pub peer: PeerAddress,
    /// What the peer called itself in [`ConnectOptions::tenant`].
    pub tenant: String,
    /// Unique to this session; stays the same when the session is resumed on a new transport connection.
    pub session: u128,
    /// Features that both sides have, as bits.
    pub features: u64,
}

/// How to connect.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// Name presented to the peer; at most 32 bytes. It travels in the connect request, so that the peer can choose a
    /// protection domain before an endpoint exists.
    pub tenant: String,
    /// Features wanted, as bits; the session gets those that both sides have.
    pub features: u64,
    /// How long to try to reach the peer, at first and when a session is resumed.
    pub timeout: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions { tenant: String::new(), features: 0, timeout: Duration::from_secs(5) }
    }
}

/// Data that a peer may pull. May be called several times for a range, and in any order.
pub trait BulkSource: Send + Sync {
    /// Length, in bytes.
    fn len(&self) -> u64;

    /// Whether there is no data.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Object offset of the first byte modulo 4096: anchors the checksum pieces.
    fn phase(&self) -> u64;

    /// The bytes `offset..offset + len` with the checksums of their pieces. The range starts at a piece boundary and is
    /// inside the source. An error ends the transfer, with its text.
    fn read(&self, offset: u64, len: usize) -> BoxFuture<'_, Result<Payload, String>>;

    /// All of it, if it is in memory anyway: then a peer can fetch it without this side.
    fn memory(&self) -> Option<Payload> {
        None
    }
}

/// Memory that a peer may fill. Filled exactly once; the ranges come in any order and do not overlap, some of them perhaps only
/// when the offer is [finished](BulkRegion::finish).
pub trait BulkSink: Send + Sync {
    /// Room, in bytes.
    fn len(&self) -> u64;

    /// Whether there is no room.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes `payload`, bytes `offset..` of the transfer, already verified against its checksums. Must not block and
    /// returns `false` to refuse (an overlap).
    fn write(&self, offset: u64, payload: Payload) -> bool;
}

/// Memory on offer. Dropping it withdraws the offer: later transfers are refused.
pub struct BulkRegion {
    /// To be sent to the peer.
    pub descriptor: BulkDescriptor,
    end: Option<EndOffer>,
}

/// Ends an offer; told whether the peer is known to be done with it.
type EndOffer = Box<dyn FnOnce(bool) + Send + Sync>;

impl BulkRegion {
    /// An offer that runs `end` when it is finished (`true`) or dropped (`false`). For network stacks.
    #[must_use]
    pub fn new(descriptor: BulkDescriptor, end: EndOffer) -> BulkRegion {
        BulkRegion { descriptor, end: Some(end) }
    }

    /// The peer has said that it is done: a sink has everything when this returns. What an offer that is dropped instead has
    /// exposed stays unused until the peer can no longer be using it.
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

/// Data that a bulk read brought.
#[derive(Debug)]
pub struct Pulled {
    /// The destination buffer, filled to the length asked for.
    pub buf: ArenaBuf,
    /// One checksum per piece, verified against the data by the messenger.
    pub checksums: Vec<u32>,
}

/// One end of a session. Cheap to share; any thread may call it, the work happens on the thread that made it.
pub trait Connection: Send + Sync {
    /// Who is at the other end.
    fn peer(&self) -> &PeerInfo;

    /// What the connection can take.
    fn limits(&self) -> Limits;

    /// Queues a message behind those queued before. Resolves when it is queued, waiting while the bounded queue is full;
    /// it then arrives exactly once, or the session is lost.
    fn send(&self, message: Message) -> BoxFuture<'_, Result<()>>;

    /// Offers data that the peer may pull.
    fn offer_source(&self, source: Arc<dyn BulkSource>) -> Result<BulkRegion>;

    /// Offers room that the peer may fill. `phase` is the object offset of the first byte modulo 4096.
    fn offer_sink(&self, sink: Arc<dyn BulkSink>, phase: u16) -> Result<BulkRegion>;

    /// Pulls bytes `offset..offset + dest.len()` of what the peer offered into `dest`. `offset` must be at a piece boundary.
    /// The data comes in chunks of at most 256 KiB, interleaved with other traffic. Ends within `timeout`.
    fn bulk_read<'a>(
        &'a self,
        from: &'a BulkDescriptor,
        offset: u64,
        dest: ArenaBuf,
        timeout: Duration,
    ) -> BoxFuture<'a, Result<Pulled>>;

    /// Pushes `payload` to bytes `offset..` of what the peer offered. Resolves when its place in the order is fixed: it
    /// arrives before any message that is queued after that. The payload's memory is let go of when the peer has it.
    /// A range outside the descriptor is refused here; a withdrawn offer drops the data, and later pushes are refused.
    /// `offset` must be at a piece boundary.
    fn bulk_write<'a>(
        &'a self,
        to: &'a BulkDescriptor,
        offset: u64,
        payload: Payload,
        timeout: Duration,
    ) -> BoxFuture<'a, Result<()>>;

    /// Ends the session. What was queued is sent first if that takes no longer than a second.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// What a connection's owner learns, in order.
#[derive(Debug)]
pub enum ConnectionEvent {
    /// A message arrived.
    Message(Message),
    /// The transport broke; the session is being resumed. Nothing is lost so far. For information.
    Interrupted,
    /// The session goes on over a new transport connection. For information.
    Resumed,
    /// The session is over; nothing more will come.
    Lost(MessengerError),
}

/// The receiving half of a connection. Messages not taken count against the peer's credits: that is the backpressure.
pub trait Incoming: Send {
    /// The next event; after [`Event::Lost`], that again. Cancel safe.
    fn next(&mut self) -> BoxFuture<'_, ConnectionEvent>;
}

/// This side's end of a session: its sending and its receiving half. The session is closed when both are dropped.
pub type Ends = (Arc<dyn Connection>, Box<dyn Incoming>);

/// Where peers connect to.
pub trait Listener: Send {
    /// The address bound to, in the form that [`NetworkStack::connect`] takes.
    fn endpoint(&self) -> String;

    /// Other paths that sessions can go over: what kind, e.g. `ofi:verbs`, and where they listen.
    fn paths(&self) -> Vec<(String, String)>;

    /// What it had to refuse or reclaim, kept up to date.
    fn admissions(&self) -> Arc<Admissions>;

    /// The next new session. (Resumed ones go on where they are.) An error here is one failed attempt of one peer.
    fn accept(&mut self) -> BoxFuture<'_, Result<Ends>>;
}

/// A way to make connections. Calls must be made on a tokio runtime: its thread serves the connection.
pub trait NetworkStack: Send + Sync {
    /// Listens at `address` (`host:port`, port 0 for any).
    fn listen<'a>(&'a self, address: &'a str, features: u64) -> BoxFuture<'a, Result<Box<dyn Listener>>>;

    /// Starts a session with the peer at `endpoint`.
    fn connect<'a>(&'a self, endpoint: &'a str, options: ConnectOptions) -> BoxFuture<'a, Result<Ends>>;
}
