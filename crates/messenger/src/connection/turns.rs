//! The order in which bulk transfers may send.
//!
//! All transfers share one connection. If large transfers alternated chunk by chunk, transfers that
//! begin together would also end together. The drive would then be idle while the network is busy,
//! and the network would be idle while the drive is busy. So transfers wait in a queue, called a
//! line. A line is ordered by the seniority of the offers: the offer whose first transfer joined
//! the line earliest comes first. Two transfers of a line are active at a time, so that requests
//! finish one by one. Small, middle and large transfers have a line each. The three lines alternate
//! chunk by chunk, so that a small transfer does not wait for large ones, and a large transfer does
//! not wait for many small ones.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::config::MAX_CHUNK;

/// Maximum size of a middle transfer, in bytes. A small transfer fits in one chunk.
const MIDDLE_MAX_BYTES: u64 = 1 << 20;

/// Number of active transfers of a line: the current one, and the next one, so that the connection
/// is not idle between them.
const AT_A_TIME: usize = 2;

/// Number of bytes after which an active transfer returns to its line.
const TURN_BYTES: u64 = 4 << 20;

/// After a line has sent this many bytes for an offer, the offer loses its seniority and counts as
/// new. So a large offer cannot stay ahead of all others.
const YOUTH_BYTES: u64 = 16 << 20;

/// Maximum number of offers whose seniority a line remembers. A forgotten offer counts as new.
const KNOWN_OFFERS: usize = 512;

/// Error: the connection has ended.
#[derive(Debug)]
pub(super) struct Over;

/// The lines of one connection.
pub(super) struct TransferTurns {
    small: Line,
    middle: Line,
    large: Line,
}

impl TransferTurns {
    pub(super) fn new() -> TransferTurns {
        TransferTurns { small: Line::new(), middle: Line::new(), large: Line::new() }
    }

    /// Fails all waiting transfers, because the connection has ended.
    pub(super) fn close(&self) {
        [&self.small, &self.middle, &self.large].into_iter().for_each(Line::close);
    }

    /// Creates the turn of a transfer of `len` bytes from or to `offer`. The transfer joins its
    /// line at the first call of [`TransferTurn::take`].
    pub(super) fn turn(&self, offer: u64, len: u64) -> TransferTurn<'_> {
        let line = match len {
            _ if len <= MAX_CHUNK as u64 => &self.small,
            _ if len <= MIDDLE_MAX_BYTES => &self.middle,
            _ => &self.large,
        };
        TransferTurn { line, offer, place: None, sent: 0 }
    }
}

/// The right of one transfer to send chunks. The transfer may send only while it holds one of the
/// slots of its line.
pub(super) struct TransferTurn<'a> {
    line: &'a Line,
    offer: u64,
    place: Option<TransferPermit<'a>>,
    /// Number of bytes sent since the transfer got its slot.
    sent: u64,
}

impl TransferTurn<'_> {
    /// Waits until a chunk of `len` bytes may be sent.
    ///
    /// # Errors
    /// If the connection has ended.
    pub(super) async fn take(&mut self, len: usize) -> Result<(), Over> {
        if self.place.is_none() || self.sent >= TURN_BYTES {
            // Join the line before giving up the slot, so that the most senior offer gets its slot
            // back.
            let candidate = self.line.join(self.offer)?;
            self.leave();
            self.place = Some(candidate.enter().await?);
            self.sent = 0;
        }
        self.sent += len as u64;
        self.line.lock().count(self.offer, len as u64);
        Ok(())
    }

    /// Gives up the slot, so that another transfer becomes active.
    pub(super) fn leave(&mut self) {
        self.place = None;
    }
}

/// The transfers of one size class.
struct Line(Mutex<TransferWaiters>);

/// The order of waiting transfers: the seniority of the offer, then the order of arrival.
type Rank = (u64, u64);

struct TransferWaiters {
    closed: bool,
    free: usize,
    waiting: BTreeMap<Rank, oneshot::Sender<()>>,
    /// The offers that the line remembers, the latest first.
    offers: VecDeque<OfferProgress>,
    /// The last number given to an offer or to a waiting transfer.
    last: u64,
}

struct OfferProgress {
    key: u64,
    age: u64,
    sent: u64,
}

impl TransferWaiters {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The seniority of an offer. The smaller the number, the more senior the offer.
    fn age(&mut self, key: u64) -> u64 {
        let known = self.offers.iter().position(|o| o.key == key);
        if let Some(at) = known {
            if self.offers[at].sent < YOUTH_BYTES {
                return self.offers[at].age;
            }
            self.offers.remove(at);
        }
        let age = self.next();
        self.offers.truncate(KNOWN_OFFERS - 1);
        self.offers.push_front(OfferProgress { key, age, sent: 0 });
        age
    }

    fn count(&mut self, key: u64, bytes: u64) {
        if let Some(offer) = self.offers.iter_mut().find(|o| o.key == key) {
            offer.sent += bytes;
        }
    }

    /// Gives free slots to the next transfers in line.
    fn admit(&mut self) {
        while self.free > 0
            && let Some((_, waiter)) = self.waiting.pop_first()
        {
            // If the waiting transfer was cancelled, the slot stays free for the next transfer.
            if waiter.send(()).is_ok() {
                self.free -= 1;
            }
        }
    }
}

impl Line {
    fn new() -> Line {
        let (waiting, offers) = (BTreeMap::new(), VecDeque::new());
        Line(Mutex::new(TransferWaiters { closed: false, free: AT_A_TIME, waiting, offers, last: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, TransferWaiters> {
        // No code panics in the middle of a change, so a poisoned mutex is safe to use.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut line = self.lock();
        line.closed = true;
        line.waiting.clear();
    }

    fn join(&self, offer: u64) -> Result<Candidate<'_>, Over> {
        let mut line = self.lock();
        if line.closed {
            return Err(Over);
        }
        let rank = (line.age(offer), line.next());
        let (admit, admitted) = oneshot::channel();
        line.waiting.insert(rank, admit);
        line.admit();
        Ok(Candidate { line: self, rank, admitted, has_entered: false })
    }
}

/// A waiting transfer. If it is dropped after it was admitted, its slot passes to the next
/// transfer.
struct Candidate<'a> {
    line: &'a Line,
    rank: Rank,
    admitted: oneshot::Receiver<()>,
    has_entered: bool,
}

impl<'a> Candidate<'a> {
    async fn enter(mut self) -> Result<TransferPermit<'a>, Over> {
        (&mut self.admitted).await.map_err(|_| Over)?;
        self.has_entered = true;
        Ok(TransferPermit(self.line))
    }
}

impl Drop for Candidate<'_> {
    fn drop(&mut self) {
        if !self.has_entered {
            self.admitted.close();
            self.line.lock().waiting.remove(&self.rank);
            if self.admitted.try_recv().is_ok() {
                drop(TransferPermit(self.line));
            }
        }
    }
}

/// One of the slots of a line, each of which lets one transfer be active.
struct TransferPermit<'a>(&'a Line);

impl Drop for TransferPermit<'_> {
    fn drop(&mut self) {
        let mut line = self.0.lock();
        line.free += 1;
        line.admit();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Poll;

    use super::*;

    const MIB: u64 = 1 << 20;
    const CHUNK: usize = MAX_CHUNK;

    /// Whether a new transfer would become active at once. The transfer is dropped afterwards.
    async fn goes(turns: &TransferTurns, offer: u64, len: u64) -> bool {
        matches!(futures::poll!(pin!(turns.turn(offer, len).take(CHUNK))), Poll::Ready(Ok(())))
    }

    /// Two active transfers of 2 MiB, from offers 1 and 2.
    async fn two_that_go(turns: &TransferTurns) -> (TransferTurn<'_>, TransferTurn<'_>) {
        let (mut first, mut second) = (turns.turn(1, 2 * MIB), turns.turn(2, 2 * MIB));
        first.take(CHUNK).await.expect("the line is open");
        second.take(CHUNK).await.expect("the line is open");
        (first, second)
    }

    #[tokio::test]
    async fn each_size_class_has_two_active_transfers_and_blocks_no_other_class() {
        let turns = TransferTurns::new();
        for len in [4096, CHUNK as u64, MIB, 4 * MIB] {
            let (mut first, mut second) = (turns.turn(1, len), turns.turn(2, len));
            first.take(CHUNK).await.expect("the line is open");
            second.take(CHUNK).await.expect("the line is open");
            assert!(!goes(&turns, 3, len).await, "two transfers are already active");
            for other in [4096, MIB, 4 * MIB].into_iter().filter(|other| other.abs_diff(len) > MIB / 3) {
                assert!(goes(&turns, 4, other).await, "{other} bytes beside {len}");
            }
            first.take(CHUNK).await.expect("the line is open");
            assert!(!goes(&turns, 3, len).await, "a transfer stays active until its end");
            drop(first);
            assert!(goes(&turns, 3, len).await, "a slot is free");
        }
    }

    #[tokio::test]
    async fn a_transfer_of_a_senior_offer_starts_before_transfers_that_waited_longer() {
        let turns = TransferTurns::new();
        let (old, other) = two_that_go(&turns).await;
        let (mut young, mut same) = (turns.turn(3, 2 * MIB), turns.turn(1, 2 * MIB));
        let mut young = pin!(young.take(CHUNK));
        assert!(futures::poll!(&mut young).is_pending());
        let mut same = pin!(same.take(CHUNK));
        assert!(futures::poll!(&mut same).is_pending());
        drop(other);
        assert!(futures::poll!(&mut young).is_pending() && futures::poll!(&mut same).is_ready());
        drop(old);
        assert!(futures::poll!(&mut young).is_ready());
    }

    #[tokio::test]
    async fn an_offer_keeps_its_seniority_until_its_transfers_have_sent_16_mib() {
        let turns = TransferTurns::new();
        let (mut long, mut other, mut next) =
            (turns.turn(1, 64 * MIB), turns.turn(9, 2 * MIB), turns.turn(2, 2 * MIB));
        other.take(CHUNK).await.expect("the line is open");
        long.take(CHUNK).await.expect("the line is open");
        let mut next = pin!(next.take(CHUNK));
        assert!(futures::poll!(&mut next).is_pending());
        for sent in 1..YOUTH_BYTES / CHUNK as u64 {
            // The transfer stays active even if it returns to the line between chunks, as a
            // transfer with a slow source does.
            if sent % 7 == 0 {
                long.sent = TURN_BYTES;
            }
            assert!(futures::poll!(pin!(long.take(CHUNK))).is_ready(), "after {sent} chunks");
            assert!(futures::poll!(&mut next).is_pending());
        }
        long.sent = TURN_BYTES;
        let mut again = pin!(long.take(CHUNK));
        assert!(futures::poll!(&mut again).is_pending() && futures::poll!(&mut next).is_ready());
        turns.close();
        assert!(matches!(futures::poll!(&mut again), Poll::Ready(Err(Over))));
    }

    #[tokio::test]
    async fn cancelled_transfers_free_their_slots_and_stop_waiting() {
        let turns = TransferTurns::new();
        let (first, second) = two_that_go(&turns).await;
        for offer in 10..20 {
            assert!(!goes(&turns, offer, 2 * MIB).await);
        }
        assert!(turns.large.lock().waiting.is_empty(), "a dropped transfer still waits");
        {
            let mut gone = turns.turn(3, 2 * MIB);
            let mut gone = pin!(gone.take(CHUNK));
            assert!(futures::poll!(&mut gone).is_pending());
            drop((first, second));
            // The transfer is admitted, but is dropped before it notices.
        }
        let (mut third, mut fourth) = (turns.turn(4, 2 * MIB), turns.turn(5, 2 * MIB));
        assert!(futures::poll!(pin!(third.take(CHUNK))).is_ready());
        assert!(futures::poll!(pin!(fourth.take(CHUNK))).is_ready());
    }
}
