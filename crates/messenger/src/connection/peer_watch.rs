//! [`PeerWatch`]: what one side knows about the liveness of its peer, and what the peer can know
//! about this side.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config::REST_MAX;

/// The signs of life of the peer and of this side, and the rest of this side: a long pause between
/// its heartbeats. Any thread may use this type.
pub(super) struct PeerWatch {
    /// Whether bytes were received since the last heartbeat was due.
    heard: AtomicBool,
    /// Whether bytes were sent since the last heartbeat was due.
    spoke: AtomicBool,
    /// The longest silence that the peer has announced for itself, in milliseconds.
    peer_quiet_ms: AtomicU32,
    /// When the peer last showed that it is alive. Updated once per heartbeat.
    heard_at: Mutex<Instant>,
    /// Whether the current pause between heartbeats is longer than
    /// [`heartbeat`](crate::ConnectionConfig::heartbeat).
    is_resting: AtomicBool,
    /// Ends the rest.
    stirred: Notify,
}

/// The rest of this side, which ends when this value is dropped.
#[must_use = "the rest ends when this is dropped"]
pub(super) struct Rest<'a>(&'a PeerWatch);

impl PeerWatch {
    pub(super) fn new() -> PeerWatch {
        PeerWatch {
            heard: AtomicBool::new(false),
            spoke: AtomicBool::new(false),
            peer_quiet_ms: AtomicU32::new(0),
            heard_at: Mutex::new(Instant::now()),
            is_resting: AtomicBool::new(false),
            stirred: Notify::new(),
        }
    }

    /// Starts anew on another transport: the peer counts as heard, and a pause that it announced on
    /// an earlier transport no longer applies.
    pub(super) fn begin_transport(&self) {
        self.heard.store(true, Ordering::Relaxed);
        self.peer_quiet_ms.store(0, Ordering::Relaxed);
        self.on_alive(Instant::now());
    }

    /// Records that bytes of the peer arrived.
    pub(super) fn on_received(&self) {
        self.heard.store(true, Ordering::Relaxed);
    }

    /// Records that bytes were sent to the peer.
    pub(super) fn on_sent(&self) {
        self.spoke.store(true, Ordering::Relaxed);
    }

    /// Records that the peer may be silent for `quiet_ms` milliseconds.
    pub(super) fn on_quiet_announced(&self, quiet_ms: u32) {
        self.peer_quiet_ms.store(quiet_ms, Ordering::Relaxed);
    }

    /// Records that the peer is alive, or that it need not have answered until `now`.
    pub(super) fn on_alive(&self, now: Instant) {
        let mut heard_at = self.heard_at.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(*heard_at <= now, "the peer is heard in the order of time");
        *heard_at = now;
    }

    /// Whether bytes were received since the last call.
    pub(super) fn take_heard(&self) -> bool {
        self.heard.swap(false, Ordering::Relaxed)
    }

    /// Whether bytes were sent since the last call.
    pub(super) fn take_spoke(&self) -> bool {
        self.spoke.swap(false, Ordering::Relaxed)
    }

    /// How long the peer has been silent.
    pub(super) fn silence(&self) -> Duration {
        self.heard_at.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// The longest silence that the peer has announced for itself, at most [`REST_MAX`].
    pub(super) fn announced_quiet(&self) -> Duration {
        Duration::from_millis(u64::from(self.peer_quiet_ms.load(Ordering::Relaxed))).min(REST_MAX)
    }

    /// Begins a rest. The caller holds the connection's mutex and has seen that no work is
    /// outstanding, so that work which begins later ends the rest.
    pub(super) fn begin_rest(&self) -> Rest<'_> {
        let was_resting = self.is_resting.swap(true, Ordering::Relaxed);
        assert!(!was_resting, "a side has one rest at a time");
        Rest(self)
    }

    /// Whether this side is resting. The caller holds the connection's mutex.
    pub(super) fn is_resting(&self) -> bool {
        self.is_resting.load(Ordering::Relaxed)
    }

    /// Ends the rest, if there is one, because work has begun. The caller holds the connection's
    /// mutex.
    pub(super) fn stir(&self) {
        if self.is_resting.swap(false, Ordering::Relaxed) {
            self.stirred.notify_one();
        }
    }
}

impl Rest<'_> {
    /// Waits until work begins.
    pub(super) async fn stirred(&self) {
        self.0.stirred.notified().await;
    }
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        self.0.is_resting.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn signs_of_life_are_counted_once() {
        let watch = PeerWatch::new();
        assert!(!watch.take_heard() && !watch.take_spoke());
        watch.on_received();
        watch.on_sent();
        assert!(watch.take_heard() && watch.take_spoke());
        assert!(!watch.take_heard() && !watch.take_spoke());
    }

    #[tokio::test(start_paused = true)]
    async fn silence_counts_from_the_last_sign_of_life_of_the_current_transport() {
        let watch = PeerWatch::new();
        watch.on_quiet_announced(5000);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(watch.silence(), Duration::from_secs(3));
        assert_eq!(watch.announced_quiet(), Duration::from_secs(5));
        watch.begin_transport();
        assert_eq!(watch.silence(), Duration::ZERO);
        assert_eq!(watch.announced_quiet(), Duration::ZERO);
        assert!(watch.take_heard());
        watch.on_quiet_announced(u32::MAX);
        assert_eq!(watch.announced_quiet(), REST_MAX);
    }

    #[test]
    fn work_ends_a_rest_and_does_not_shorten_the_next_one() {
        let watch = PeerWatch::new();
        watch.stir();
        let rest = watch.begin_rest();
        assert!(rest.stirred().now_or_never().is_none(), "work before the rest does not end it");
        watch.stir();
        assert!(rest.stirred().now_or_never().is_some());
        drop(rest);
        drop(watch.begin_rest());
        assert!(!watch.is_resting(), "a cancelled rest is over");
    }
}
