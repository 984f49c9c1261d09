//! The configuration of a stack's connections.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::distr::{Distribution, StandardUniform};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::Limits;

/// Cost of a message besides its content, in bytes of credit and of memory.
pub(crate) const MESSAGE_OVERHEAD: u64 = 4096;

/// Maximum size of the bulk data in one frame, in bytes.
pub(crate) const MAX_CHUNK: usize = 256 << 10;

/// Maximum number of pulls that one side has in progress on one connection.
pub(crate) const MAX_PULLS: usize = 256;

/// Maximum number of bulk chunks queued for one transport.
pub(crate) const BULK_SLOTS: usize = 4;

/// Maximum credit that a peer may have granted and that is unused, in bytes.
pub(crate) const MAX_CREDIT_BYTES: u64 = 2 << 30;

/// Longest silence that a peer may announce.
pub(crate) const REST_MAX: Duration = Duration::from_secs(300);

/// Configuration of a stack's connections. The defaults suit daemons; tests shorten the times.
///
/// **Memory of one connection** is bounded by the sum of these:
///
/// - Received messages that the user has not taken: `window_bytes`.
/// - Sent messages without acknowledgement: `window_bytes`, whatever the peer grants.
/// - Pushed data without acknowledgement: `push_window_bytes`, counted while its [`bytes::Bytes`]
///   live.
/// - Queued bulk chunks: 1 MiB.
/// - Chunks that the sources of pulls hold ready: one of 256 KiB for each of at most 256 pulls, and
///   none if a source returns parts of data that is in memory.
/// - Read buffers: up to 1.5 MiB, which shrink to 16 KiB while little data arrives.
///
/// Messages are parts of read buffers, so one message that is kept may keep up to 256 KiB around
/// it.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// The longest silence of a busy connection: a side that has sent nothing for this long sends a
    /// heartbeat.
    pub heartbeat: Duration,
    /// The longest silence of an idle connection, from `heartbeat` to 5 min. While neither side has
    /// anything outstanding, the pauses between heartbeats double up to this limit.
    pub rest: Duration,
    /// A peer counts as gone when it was silent for this long, beyond any longer silence that it
    /// announced. Its transport is then closed. At least three times `heartbeat`.
    pub grace: Duration,
    /// Time limit for dialling a transport, and again for its handshake. The client then tries
    /// again, as long as its own timeout permits.
    pub handshake_timeout: Duration,
    /// Maximum number of handshakes of one listener at a time. Another handshake replaces the
    /// oldest one, first that of an address above its fair share.
    pub max_handshakes: usize,
    /// How long a server keeps a connection whose transport broke.
    pub hold: Duration,
    /// Maximum number of connections of one listener, including detached ones. A new connection
    /// replaces the longest-silent connection of an address above its fair share
    /// ([`base::budget`]). It is refused if its own address holds its fair share and uses it.
    pub max_sessions: usize,
    /// Maximum number of detached connections of one listener. Another one replaces an existing
    /// one, or is lost at once, by the same rule.
    pub max_held: usize,
    /// Maximum number of file descriptors that a listener's handshakes and connections use. A value
    /// below their limits lowers these limits. `None` asks the system when the listener starts
    /// ([`base::budget::spare_descriptors`]).
    pub max_descriptors: Option<usize>,
    /// Limit for received messages that the user has not taken, and for queued or unacknowledged
    /// sent messages. In bytes, with 4 KiB added per message.
    pub window_bytes: u64,
    /// Maximum amount of pushed bulk data without acknowledgement, in bytes.
    pub push_window_bytes: u32,
    /// The limits of what this side accepts.
    pub limits: Limits,
    /// How long an offer of memory is valid.
    pub offer_ttl: Duration,
    /// The connection is ended when more than this number of transports in a row deliver damaged
    /// frames and nothing new.
    pub max_damaged_transports: u32,
    /// The source of connection numbers, secrets, offer keys and random pauses.
    pub entropy: Entropy,
}

/// A source of random numbers: the system's generator, or a seed, so that a simulation can be
/// replayed.
#[derive(Clone, Default)]
pub struct Entropy(Option<Arc<Mutex<StdRng>>>);

impl Entropy {
    /// A generator for tests. Its numbers are predictable for everyone who knows the seed.
    #[must_use]
    pub fn seeded(seed: u64) -> Entropy {
        Entropy(Some(Arc::new(Mutex::new(StdRng::seed_from_u64(seed)))))
    }

    pub(crate) fn random<T>(&self) -> T
    where
        StandardUniform: Distribution<T>,
    {
        match &self.0 {
            None => rand::random(),
            Some(seeded) => seeded.lock().unwrap_or_else(PoisonError::into_inner).random(),
        }
    }
}

impl fmt::Debug for Entropy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "seeded" } else { "system" })
    }
}

impl Default for SessionConfig {
    fn default() -> Self {
        SessionConfig {
            heartbeat: Duration::from_secs(2),
            rest: Duration::from_secs(60),
            grace: Duration::from_secs(8),
            handshake_timeout: Duration::from_secs(5),
            max_handshakes: 256,
            hold: Duration::from_secs(30),
            max_sessions: 4096,
            max_held: 256,
            max_descriptors: None,
            window_bytes: 4 << 20,
            push_window_bytes: 4 << 20,
            limits: Limits {
                max_header: 256 << 10,
                max_inline: 256 << 10,
                max_bulk: 1 << 30,
                eager: 64 << 10,
                one_sided: false,
            },
            offer_ttl: Duration::from_secs(600),
            max_damaged_transports: 4,
            entropy: Entropy::default(),
        }
    }
}

impl SessionConfig {
    /// Checks the relations between values that a connection relies on.
    ///
    /// # Panics
    /// If a message of the largest size could never be sent, or a limit does not fit a frame.
    pub(crate) fn assert_sound(&self) {
        let largest = self.limits.max_header as u64 + self.limits.max_inline as u64 + MESSAGE_OVERHEAD;
        assert!(self.window_bytes >= 2 * largest, "window_bytes must hold two messages of the largest size");
        assert!(self.window_bytes <= 1 << 30, "window_bytes is at most 1 GiB");
        assert!(self.push_window_bytes as usize >= MAX_CHUNK, "push_window_bytes must hold a chunk");
        assert!(self.limits.max_header <= 1 << 20 && self.limits.max_inline <= 1 << 20, "at most 1 MiB each");
        let rests = self.heartbeat..=REST_MAX;
        assert!(rests.contains(&self.rest), "rest must be from the heartbeat to 5 min");
        assert!(self.grace >= self.heartbeat * 3, "grace must be at least three times the heartbeat");
    }
}
