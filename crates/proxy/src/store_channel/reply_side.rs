//! [`ReplySide`]: which replies in the outbox the osd knows of.

use std::time::Duration;

use base::clock::Instant;
use channel::ChannelError;
use channel::ring::CELL;

/// The doorbell's announcements of replies, and the fetches of the announced replies.
#[derive(Default)]
pub(super) struct ReplySide {
    /// Bytes of replies that the doorbell announced and that are not being fetched yet.
    announced: usize,
    fetch: Option<ReplyFetch>,
    /// Whether the doorbell was rung since the probe began.
    rung_in_probe: bool,
    /// When the host was last asked for its ring positions.
    asked_positions: Option<Instant>,
    /// Replies that no doorbell has announced yet.
    unheard: Option<UnheardReplies>,
}

/// The running fetch of replies. There is at most one at a time, so replies arrive in order.
struct ReplyFetch {
    len: usize,
    since: Instant,
}

/// Replies of which the osd learnt from the host's report of its ring positions.
struct UnheardReplies {
    /// Position up to which the host has put replies.
    head: u64,
    since: Instant,
}

impl ReplySide {
    /// Handles the doorbell, which announces `count` bytes in an outbox of `outbox_len` bytes. The
    /// announced bytes must fit into the outbox, together with the bytes that are being fetched.
    pub(super) fn announce(&mut self, count: u64, outbox_len: usize) -> Result<(), ChannelError> {
        let most = outbox_len.checked_sub(self.known_bytes()).expect("known replies are inside the outbox");
        match usize::try_from(count) {
            Ok(count) if count <= most && count.is_multiple_of(CELL) => {
                self.announced += count;
                Ok(())
            }
            _ => Err(ChannelError::Protocol(format!(
                "the doorbell announced {count} bytes, which exceed the outbox of {outbox_len} bytes or end within a cell"
            ))),
        }
    }

    /// Starts a fetch of all announced replies. Returns their length, in bytes; `None` if a fetch
    /// is running or there are none.
    pub(super) fn begin_fetch(&mut self, now: Instant) -> Option<usize> {
        if self.fetch.is_some() || self.announced == 0 {
            return None;
        }
        let len = std::mem::take(&mut self.announced);
        self.fetch = Some(ReplyFetch { len, since: now });
        Some(len)
    }

    /// Ends the running fetch. Returns its length in bytes, and when it began.
    pub(super) fn end_fetch(&mut self) -> (usize, Instant) {
        let ReplyFetch { len, since } = self.fetch.take().expect("only a running fetch can end");
        (len, since)
    }

    /// Whether the running fetch was started before `then`.
    pub(super) fn is_overdue(&self, then: Instant) -> bool {
        self.fetch.as_ref().is_some_and(|fetch| fetch.since < then)
    }

    /// Bytes in the outbox that are announced or being fetched.
    pub(super) fn known_bytes(&self) -> usize {
        self.announced + self.fetch.as_ref().map_or(0, |fetch| fetch.len)
    }

    /// Decides whether to ask the host for its ring positions now. The host is not asked again if
    /// it was asked since `then`.
    pub(super) fn asks_positions(&mut self, then: Instant, now: Instant) -> bool {
        let asks = self.asked_positions.is_none_or(|asked| asked < then);
        if asks {
            self.asked_positions = Some(now);
        }
        asks
    }

    /// When the host was last asked for its ring positions.
    pub(super) fn asked_positions(&self) -> Option<Instant> {
        self.asked_positions
    }

    /// Records that the host has put replies up to position `head`, which no doorbell has
    /// announced.
    pub(super) fn expect_bell(&mut self, head: u64, now: Instant) {
        self.unheard = Some(UnheardReplies { head, since: now });
    }

    /// Whether the doorbell of replies was lost: it was expected for `patience`, and the osd, which
    /// has taken `taken` bytes, still does not know of the replies.
    pub(super) fn has_missed_bell(&mut self, taken: u64, patience: Duration, now: Instant) -> bool {
        let is_due = |unheard: &mut UnheardReplies| now.duration_since(unheard.since) >= patience;
        let due = self.unheard.take_if(is_due);
        due.is_some_and(|unheard| taken + (self.known_bytes() as u64) < unheard.head)
    }

    /// Starts to listen for the doorbell that answers a probe.
    pub(super) fn begin_probe(&mut self) {
        self.rung_in_probe = false;
    }

    /// Handles the doorbell while the rings are not in use.
    pub(super) fn ring_in_probe(&mut self, count: u64) {
        self.rung_in_probe |= count > 0;
    }

    /// Whether the doorbell was rung since the probe began.
    pub(super) fn was_rung_in_probe(&self) -> bool {
        self.rung_in_probe
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTBOX: usize = 16 * CELL;
    const BYTES: u64 = CELL as u64;

    #[tokio::test(start_paused = true)]
    async fn replies_announced_during_a_fetch_wait_for_the_next_fetch() {
        let mut replies = ReplySide::default();
        let now = Instant::now();
        assert_eq!(replies.begin_fetch(now), None, "nothing was announced");
        replies.announce(2 * BYTES, OUTBOX).unwrap();
        assert_eq!(replies.begin_fetch(now), Some(2 * CELL));
        replies.announce(BYTES, OUTBOX).unwrap();
        replies.announce(BYTES, OUTBOX).unwrap();
        assert_eq!((replies.begin_fetch(now), replies.known_bytes()), (None, 4 * CELL));
        assert!(!replies.is_overdue(now) && replies.is_overdue(now + Duration::from_secs(1)));
        assert_eq!(replies.end_fetch(), (2 * CELL, now));
        assert_eq!(replies.begin_fetch(now), Some(2 * CELL));
        assert_eq!(replies.end_fetch(), (2 * CELL, now));
        assert_eq!((replies.begin_fetch(now), replies.known_bytes()), (None, 0));
    }

    #[test]
    fn impossible_announcements_are_refused() {
        let mut replies = ReplySide::default();
        assert!(replies.announce(BYTES - 1, OUTBOX).is_err(), "replies fill whole cells");
        assert!(replies.announce(u64::MAX - BYTES + 1, OUTBOX).is_err());
        replies.announce(10 * BYTES, OUTBOX).unwrap();
        replies.begin_fetch(Instant::now());
        assert!(replies.announce(7 * BYTES, OUTBOX).is_err(), "bytes that are being fetched count as well");
        replies.announce(6 * BYTES, OUTBOX).unwrap();
        assert_eq!(replies.known_bytes(), OUTBOX);
    }

    #[test]
    fn a_doorbell_is_lost_only_if_its_replies_stay_unknown() {
        let mut replies = ReplySide::default();
        let (now, patience) = (Instant::now(), Duration::from_secs(1));
        let later = now + patience;
        assert!(!replies.has_missed_bell(0, patience, later), "no doorbell is expected");
        replies.expect_bell(3 * BYTES, now);
        assert!(!replies.has_missed_bell(0, patience, now), "the doorbell may be on its way");
        assert!(replies.has_missed_bell(0, patience, later));
        assert!(!replies.has_missed_bell(0, patience, later), "a lost doorbell is reported once");
        replies.expect_bell(3 * BYTES, now);
        replies.announce(BYTES, OUTBOX).unwrap();
        assert!(!replies.has_missed_bell(2 * BYTES, patience, later), "the osd knows of all replies");
    }

    #[test]
    fn the_host_is_asked_for_its_positions_once_per_interval() {
        let mut replies = ReplySide::default();
        let (now, interval) = (Instant::now(), Duration::from_secs(1));
        let start = now + interval;
        assert!(replies.asks_positions(start - interval, start));
        assert_eq!(replies.asked_positions(), Some(start));
        assert!(!replies.asks_positions(start, start + interval));
        assert!(replies.asks_positions(start + interval, start + 2 * interval));
    }

    #[test]
    fn a_doorbell_before_a_probe_does_not_answer_it() {
        let mut replies = ReplySide::default();
        replies.ring_in_probe(BYTES);
        replies.begin_probe();
        assert!(!replies.was_rung_in_probe());
        replies.ring_in_probe(BYTES);
        assert!(replies.was_rung_in_probe());
    }
}
