//! The configuration of a stack's connections.

use std::sync::Arc;
use std::time::Duration;

use identity::Trust;

use crate::Limits;
use crate::records::{PlainRecords, RecordLayer};

/// Credit and memory that a message uses in addition to its content, in bytes.
pub(crate) const MESSAGE_OVERHEAD: u64 = 4096;

/// Maximum size of the bulk data in one frame, in bytes.
pub(crate) const MAX_CHUNK: usize = 256 << 10;

/// Maximum number of pulls that one side has in progress on one connection.
pub(crate) const MAX_PULLS: usize = 256;

/// Maximum number of bulk chunks queued for one transport.
pub(crate) const BULK_SLOTS: usize = 4;

/// Maximum amount of unused credit that a peer may grant, in bytes.
pub(crate) const MAX_CREDIT_BYTES: u64 = 2 << 30;

/// Longest pause between heartbeats that a peer may announce.
pub(crate) const REST_MAX: Duration = Duration::from_secs(300);

/// Configuration of a stack's connections. The defaults suit daemons; tests shorten the times.
///
/// **Memory of one connection** is bounded by the sum of these:
///
/// - Received messages that the user has not taken: `window_bytes`.
/// - Sent messages without acknowledgement: `window_bytes`, even if the peer grants more credit.
/// - Pushed data without acknowledgement: `push_window_bytes`.
/// - Queued bulk chunks: 1 MiB.
/// - Data that this side has read from its sources for the peer's pulls: one chunk of 256 KiB for
///   each of at most 256 pulls. A source that returns slices of data in memory needs no additional
///   memory for chunks.
/// - Read buffers: up to 1.5 MiB, which shrink to 16 KiB while little data arrives.
///
/// A received message is a slice of a read buffer. A user that keeps one message may therefore
/// occupy up to 256 KiB of memory.
#[derive(Debug, Clone)]
pub struct ConnectionConfig {
    /// The longest silence of a busy connection: a side that has sent nothing for this long sends a
    /// heartbeat.
    pub heartbeat: Duration,
    /// The longest silence of an idle connection, from `heartbeat` to 5 min. While neither side has
    /// outstanding work, the pauses between heartbeats double up to this limit.
    pub rest: Duration,
    /// After this time, a silent peer counts as lost, and its transport is closed. If an idle peer
    /// announced a longer pause than `heartbeat`, the difference is added to this time. `grace`
    /// must be at least three times `heartbeat`.
    pub grace: Duration,
    /// Time limit for dialling a transport. The same limit applies separately to the handshake over
    /// the transport. After a timeout, the client retries until
    /// [`ConnectOptions::timeout`](crate::ConnectOptions::timeout) has passed.
    pub handshake_timeout: Duration,
    /// Maximum number of handshakes of one listener at a time. At this limit, a new handshake
    /// replaces the oldest handshake of its own address, or of an address that holds more than its
    /// fair share ([`base::budget`]).
    pub max_handshakes: usize,
    /// How long a server keeps a connection whose transport broke.
    pub hold: Duration,
    /// Maximum number of connections of one listener, including detached connections. At this
    /// limit, a new connection replaces the longest-silent connection of an address that holds more
    /// than its fair share ([`base::budget`]). If the new connection's own address already holds
    /// its fair share, the new connection replaces only a detached connection, or a silent
    /// connection of this address. It is refused if there is none.
    pub max_connections: usize,
    /// Maximum number of detached connections of one listener. At this limit, a connection that
    /// loses its transport replaces the longest-detached connection of an address that holds more
    /// than its fair share of these slots ([`base::budget`]). If the connection's own address
    /// already holds its fair share, the connection is lost at once.
    pub max_held: usize,
    /// Maximum number of file descriptors that a listener's handshakes and connections use. If the
    /// number is too low for `max_handshakes` and `max_connections`, the listener lowers these
    /// limits. `None` means the number of descriptors that the process can spare when the listener
    /// starts ([`base::budget::spare_descriptors`]).
    pub max_descriptors: Option<usize>,
    /// Maximum total size of the received messages that the user has not taken, in bytes, with 4
    /// KiB added per message. The same limit applies to outgoing messages that are queued or
    /// unacknowledged.
    pub window_bytes: u64,
    /// Maximum amount of pushed bulk data without acknowledgement, in bytes.
    pub push_window_bytes: u32,
    /// The maximum sizes of messages and transfers that this side accepts.
    pub limits: Limits,
    /// How long an offer of memory is valid.
    pub offer_ttl: Duration,
    /// Maximum number of consecutive transports that end with a damaged frame and deliver no new
    /// frame. One more such transport ends the connection.
    pub max_damaged_transports: u32,
    /// The identity of this side, and the peers that it accepts. By default, this side connects only
    /// within its own process.
    pub trust: Trust,
    /// What protects the frames on each transport.
    pub records: Arc<dyn RecordLayer>,
}

impl Default for ConnectionConfig {
    fn default() -> Self {
        ConnectionConfig {
            heartbeat: Duration::from_secs(2),
            rest: Duration::from_secs(60),
            grace: Duration::from_secs(8),
            handshake_timeout: Duration::from_secs(5),
            max_handshakes: 256,
            hold: Duration::from_secs(30),
            max_connections: 4096,
            max_held: 256,
            max_descriptors: None,
            window_bytes: 4 << 20,
            push_window_bytes: 4 << 20,
            limits: Limits {
                max_header: wire::limits::MAX_HEADER,
                max_inline: 256 << 10,
                max_bulk: 1 << 30,
                eager: 256 << 10,
                one_sided: false,
            },
            offer_ttl: Duration::from_secs(600),
            max_damaged_transports: 4,
            trust: Trust::default(),
            records: Arc::new(PlainRecords),
        }
    }
}

impl ConnectionConfig {
    /// Checks that each value is in its valid range, and that the values are consistent with each
    /// other.
    ///
    /// # Panics
    /// If a check fails.
    pub(crate) fn assert_sound(&self) {
        let largest = self.limits.max_header as u64 + self.limits.max_inline as u64 + MESSAGE_OVERHEAD;
        assert!(self.window_bytes >= 2 * largest, "window_bytes must hold two messages of the largest size");
        assert!(self.window_bytes <= 1 << 30, "window_bytes must be at most 1 GiB");
        assert!(self.push_window_bytes as usize >= MAX_CHUNK, "push_window_bytes must be at least 256 KiB");
        assert!(
            self.limits.max_header <= 1 << 20 && self.limits.max_inline <= 1 << 20,
            "max_header and max_inline must be at most 1 MiB each"
        );
        let rests = self.heartbeat..=REST_MAX;
        assert!(rests.contains(&self.rest), "rest must be from the heartbeat to 5 min");
        assert!(self.grace >= self.heartbeat * 3, "grace must be at least three times the heartbeat");
    }
}
