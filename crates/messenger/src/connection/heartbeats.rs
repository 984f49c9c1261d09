//! Detection of a lost peer.
//!
//! A side with outstanding work (an unacknowledged frame, a pull, an offer or a one-sided read)
//! sends a frame at least once per [`heartbeat`](ConnectionConfig::heartbeat). It treats the peer
//! as lost after a silence of [`grace`](ConnectionConfig::grace). While neither side has
//! outstanding work, the pauses between heartbeats double, up to [`rest`](ConnectionConfig::rest),
//! so that an idle connection uses almost no CPU time or bandwidth. Each heartbeat announces how
//! long its sender may be silent from now on.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::slot::ConnectionSlot;
use super::task::TransportEnd;
use super::{Shared, State};
use crate::config::ConnectionConfig;
use crate::transport::packets::Link;

impl State {
    /// Whether no message, pull, offer or one-sided read is outstanding.
    fn is_idle(&self) -> bool {
        let link_reads = self.link.as_ref().is_some_and(|link| link.is_reading());
        self.outbound.is_acked() && self.pulls.is_empty() && self.offers.is_empty() && !link_reads
    }
}

impl Shared {
    /// Sends a heartbeat when no other frame was sent during a pause. Returns when the transport
    /// has to end: the peer was silent for too long, or the peer may still use memory that only the
    /// end of the transport can reclaim. Activity of the peer other than heartbeats protects
    /// `place`, the connection's slot, from being given to another client.
    pub(super) async fn watch_peer(
        &self,
        link: Option<&Link>,
        place: Option<&dyn ConnectionSlot>,
    ) -> TransportEnd {
        let ConnectionConfig { heartbeat, grace, rest, .. } = self.config;
        let mut pause = heartbeat;
        self.lock().outbound.set_quiet(heartbeat);
        let mut progress = self.progress();
        if let Some(place) = place {
            place.heard();
        }
        loop {
            let stirred = self.pause(pause, heartbeat).await;
            let heard = self.watch.take_heard() | link.is_some_and(Link::take_heard);
            // While this side was idle, the peer owed no answer. If work has just begun, the peer's
            // silence counts from now.
            if heard || stirred {
                self.watch.on_alive(Instant::now());
            }
            let silent = self.watch.silence();
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

    /// Whether this side is pulling data from the peer.
    fn is_fed(&self, link: Option<&Link>) -> bool {
        link.is_some_and(Link::is_reading) || !self.lock().pulls.is_empty()
    }

    /// Whether the peer owes an answer and was silent for half of the grace period. If the
    /// transport ends in this state, the silence counts as the reason, even if the peer ended the
    /// transport.
    pub(super) fn is_missing_peer(&self) -> bool {
        !self.lock().is_idle() && self.watch.silence() >= self.config.grace / 2
    }

    /// The time to add to the grace period, because an idle peer announced longer pauses than one
    /// heartbeat.
    fn peer_quiet(&self, heartbeat: Duration) -> Duration {
        if !self.lock().is_idle() {
            return Duration::ZERO;
        }
        self.watch.announced_quiet().saturating_sub(heartbeat)
    }

    /// Sends a heartbeat if no other frame was sent since the last call. If `must_know` is true,
    /// always sends a heartbeat, because the peer must learn the length of the next pause.
    fn beat(&self, must_know: bool, pause: Duration) {
        let spoke = self.watch.take_spoke();
        let mut state = self.lock();
        state.outbound.set_quiet(pause);
        if spoke && !must_know {
            return;
        }
        state.outbound.want_window();
        drop(state);
        self.wake_writer.notify_one();
    }

    /// Waits for the length of `pause`. A pause longer than a heartbeat ends early when work
    /// begins. Returns whether the pause ended early.
    async fn pause(&self, pause: Duration, heartbeat: Duration) -> bool {
        if pause <= heartbeat {
            sleep(pause).await;
            return false;
        }
        let rest = {
            let state = self.lock();
            if !state.is_idle() {
                return true;
            }
            self.watch.begin_rest()
        };
        tokio::select! {
            biased;
            () = rest.stirred() => true,
            () = sleep(pause) => false,
        }
    }

    /// Ends a long pause if this side has outstanding work. Must be called after frames are sent.
    pub(super) fn stir_if_busy(&self, state: &State) {
        if self.watch.is_resting() && !state.is_idle() {
            self.watch.stir();
        }
    }

    /// Ends a long pause, because work has begun and the peer now owes an answer.
    pub(super) fn stir(&self) {
        // The mutex orders this call and the beginning of a pause.
        let _state = self.lock();
        self.watch.stir();
    }
}
