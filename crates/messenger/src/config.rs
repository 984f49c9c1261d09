//! What can be set about the sessions of a stack.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::distr::{Distribution, StandardUniform};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::Limits;

/// Bytes that every message costs beside its content, in credits and in memory.
pub(crate) const MESSAGE_OVERHEAD: u64 = 4096;

/// Largest piece of bulk data in one frame, in bytes.
pub(crate) const MAX_CHUNK: usize = 256 << 10;

/// Most pulls that one side has under way in one session.
pub(crate) const MAX_PULLS: usize = 256;

/// Bulk chunks queued for one transport connection at a time.
pub(crate) const BULK_SLOTS: usize = 4;

/// Most credit that a peer may have granted and not seen used, in bytes.
pub(crate) const MAX_CREDIT_BYTES: u64 = 2 << 30;

/// Longest silence that a peer may announce.
pub(crate) const REST_MAX: Duration = Duration::from_secs(300);

/// How the sessions of a stack behave. The defaults are for daemons; tests shorten the times.
///
/// **Memory of one session** is bounded by: received and not taken, `window_bytes`; sent and not acknowledged,
/// `window_bytes` for messages, whatever the peer grants, and `push_window_bytes` for pushed data (counted while their [`bytes::Bytes`] live);
/// queued bulk chunks, 1 MiB; chunks that the sources of pulls hold ready, one (256 KiB) for each of at most 256 pulls,
/// and none where sources return parts of what is in memory anyway; read buffers of up to 1.5 MiB, which shrink to 16 KiB
/// when little comes. Messages are parts of read buffers: one that is kept may keep up to 256 KiB around it.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// The longest silence: whoever has sent nothing for so long sends a heartbeat.
    pub heartbeat: Duration,
    /// The longest silence of an idle session: while neither side wants anything of the other, the pauses between heartbeats
    /// double up to that. From `heartbeat` to 5 min.
    pub rest: Duration,
    /// A peer that was silent for so long, or for so much longer than it had announced, is taken for gone; its transport
    /// connection is closed. At least three times `heartbeat`.
    pub grace: Duration,
    /// How long a connection may take to come about, and again how long its handshake. Who connects tries anew then, as long as it wants to.
    pub handshake_timeout: Duration,
    /// Most handshakes of one listener at a time. One more replaces the oldest, first of an address above its fair share.
    pub max_handshakes: usize,
    /// How long a server keeps a session whose transport broke.
    pub hold: Duration,
    /// Most sessions of one listener, those without a transport included. One more replaces the longest-silent session of an
    /// address above its fair share ([`base::budget`]); it is refused if its own address holds that share and uses it.
    pub max_sessions: usize,
    /// Most sessions of one listener that are kept without a transport; one more replaces another, or is lost at once, by
    /// the same rule.
    pub max_held: usize,
    /// Most descriptors that a listener's connections take, handshakes and sessions; less than their limits lowers these.
    /// `None` asks the system when the listener starts ([`base::budget::spare_descriptors`]).
    pub max_descriptors: Option<usize>,
    /// Bytes of messages, each counted with 4 KiB on top, that a peer may send before the user takes them, and
    /// that wait here to be sent or acknowledged.
    pub window_bytes: u64,
    /// Bytes of pushed bulk data that wait for the peer's acknowledgement.
    pub push_window_bytes: u32,
    /// What this side takes.
    pub limits: Limits,
    /// How long an offer of memory holds.
    pub offer_ttl: Duration,
    /// How many transports in a row may bring damaged frames, without anything new getting through, before the session
    /// is given up.
    pub max_damaged_transports: u32,
    /// Where session ids, secrets, offer keys and the length of pauses come from.
    pub entropy: Entropy,
}

/// A source of random numbers: the system's, or a seed, so that a simulation can be replayed.
#[derive(Clone, Default)]
pub struct Entropy(Option<Arc<Mutex<StdRng>>>);

impl Entropy {
    /// Numbers that anybody who knows the seed can guess. For tests.
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
    /// Checks what the parts of a session rely on.
    ///
    /// # Panics
    /// If a largest message could never be sent, or a limit does not fit a frame.
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
