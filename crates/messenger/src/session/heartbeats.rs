//! Whether the peer is still there.
//!
//! Whoever has something to say says it at least every [`heartbeat`](SessionConfig::heartbeat), and whoever waits for something takes
//! a silence of [`grace`](SessionConfig::grace) for the peer's end. Between two sides that want nothing of each other the
//! pauses double, up to [`rest`](SessionConfig::rest): an idle session costs next to nothing. Each heartbeat says for how
//! long its sender may be silent now.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::task::TransportEnd;
use super::{Shared, State};
use crate::config::{REST_MAX, SessionConfig};
use crate::stack::RegistryPlace;
use crate::transport::ofi::Link;

impl State {
    /// Whether nothing is under way.
    fn is_idle(&self) -> bool {
        let link_reads = self.link.as_ref().is_some_and(|link| link.is_reading());
        self.outbound.is_acked() && self.pulls.is_empty() && self.offers.is_empty() && !link_reads
    }
}

impl Shared {
    /// Sends a heartbeat when there was nothing else to send; ends when the peer was silent for too long, or keeps memory of
    /// this side that only the transport's end gives back. What the peer does beside heartbeats keeps the session's `place`.
    pub(super) async fn watch_peer(
        &self,
        link: Option<&Link>,
        place: Option<&RegistryPlace>,
    ) -> TransportEnd {
        let SessionConfig { heartbeat, grace, rest, .. } = self.config;
        // What was promised on another transport holds no longer.
        self.peer_quiet_ms.store(0, Ordering::Relaxed);
        let mut pause = heartbeat;
        {
            let mut state = self.lock();
            state.heard_at = Instant::now();
            state.outbound.set_quiet(heartbeat);
        }
        let mut progress = self.progress();
        if let Some(place) = place {
            place.heard();
        }
        loop {
            let stirred = self.pause(pause, heartbeat).await;
            let heard = self.heard.swap(false, Ordering::Relaxed) | link.is_some_and(Link::take_heard);
            // While this side rested nothing was due from the peer.
            let silent = {
                let mut state = self.lock();
                if heard || stirred {
                    state.heard_at = Instant::now();
                }
                state.heard_at.elapsed()
            };
            if silent >= grace + self.peer_quiet(heartbeat) {
                self.metrics.heartbeats_missed.increment(1);
                return TransportEnd::Silent(format!("the peer was silent for {silent:?}"));
            }
            if let Some(link) = link {
                link.rest();
                if let Some(reason) = self.overstayed(link) {
                    return TransportEnd::Broken(reason);
                }
            }
            let before = std::mem::replace(&mut progress, self.progress());
            if let Some(place) = place.filter(|_| progress != before || (heard && self.is_fed(link))) {
                place.heard();
            }
            let is_idle = !stirred && progress == before && self.lock().is_idle();
            pause = if is_idle { (pause * 2).min(rest) } else { heartbeat };
            self.beat(pause > heartbeat, pause);
        }
    }

    /// Whether the peer is sending bulk data.
    fn is_fed(&self, link: Option<&Link>) -> bool {
        link.is_some_and(Link::is_reading) || !self.lock().pulls.is_empty()
    }

    /// Whether the peer was silent for half of the time that it has, while something was expected of it: the side that gives up first
    /// breaks the transport for both.
    pub(super) fn is_missing_peer(&self) -> bool {
        let state = self.lock();
        !state.is_idle() && state.heard_at.elapsed() >= self.config.grace / 2
    }

    /// How much longer than usual the peer may be silent.
    fn peer_quiet(&self, heartbeat: Duration) -> Duration {
        if !self.lock().is_idle() {
            return Duration::ZERO;
        }
        let quiet = Duration::from_millis(u64::from(self.peer_quiet_ms.load(Ordering::Relaxed)));
        quiet.min(REST_MAX).saturating_sub(heartbeat)
    }

    /// Sends a heartbeat if nothing else was sent, or if the peer `must_know` how long the next pause is.
    fn beat(&self, must_know: bool, pause: Duration) {
        let spoke = self.spoke.swap(false, Ordering::Relaxed);
        let mut state = self.lock();
        state.outbound.set_quiet(pause);
        if spoke && !must_know {
            return;
        }
        state.outbound.want_window();
        drop(state);
        self.wake_writer.notify_one();
    }

    /// Waits. A pause longer than a heartbeat ends when something is begun: then this returns true.
    async fn pause(&self, pause: Duration, heartbeat: Duration) -> bool {
        if pause <= heartbeat {
            sleep(pause).await;
            return false;
        }
        {
            let mut state = self.lock();
            if !state.is_idle() {
                return true;
            }
            state.is_resting = true;
        }
        let stirred = tokio::select! {
            () = self.stirred.notified() => true,
            () = sleep(pause) => false,
        };
        self.lock().is_resting = false;
        stirred
    }

    /// To be called when something is sent.
    pub(super) fn stir_if_busy(&self, state: &mut State) {
        if state.is_resting && !state.is_idle() {
            self.stir(state);
        }
    }

    /// Something was begun: from now on the peer is expected to answer.
    pub(super) fn stir(&self, state: &mut State) {
        if std::mem::take(&mut state.is_resting) {
            self.stirred.notify_one();
        }
    }
}
