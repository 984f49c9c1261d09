//! Whose turn it is to send bulk data.
//!
//! Chunks of all transfers share one connection. If large transfers took turns chunk by chunk, those that begin together
//! would end together: then the drive has nothing to do while the network is busy, and the other way round. So of large
//! transfers a few go at a time, those of the oldest offer first, and requests leave one by one. Small ones do not wait
//! for large ones: what fits in a chunk waits for a bulk slot only, and transfers of middle size have turns of their own.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::config::MAX_CHUNK;

/// The largest transfer of middle size, in bytes.
const MIDDLE_MAX_BYTES: u64 = 1 << 20;

/// Transfers of a class that go at a time: one, and the next, so that the line never runs dry between them.
const AT_A_TIME: usize = 2;

/// A transfer that has sent that many bytes gives others a turn.
const TURN_BYTES: u64 = 4 << 20;

/// An offer of which that much was sent counts as new: the largest does not keep all others waiting.
const YOUTH_BYTES: u64 = 16 << 20;

/// Offers whose age is known. One that is forgotten counts as new.
const KNOWN_OFFERS: usize = 512;

/// The session is over.
#[derive(Debug)]
pub(super) struct Over;

/// The lines of one session.
pub(super) struct Turns {
    middle: Line,
    large: Line,
}

impl Turns {
    pub(super) fn new() -> Turns {
        Turns { middle: Line::new(), large: Line::new() }
    }

    /// Whoever waits is told that the session is over.
    pub(super) fn close(&self) {
        self.middle.close();
        self.large.close();
    }

    fn line(&self, bytes: u64) -> Option<&Line> {
        match bytes {
            _ if bytes <= MAX_CHUNK as u64 => None,
            _ if bytes <= MIDDLE_MAX_BYTES => Some(&self.middle),
            _ => Some(&self.large),
        }
    }
}

/// The turn of one transfer: taken, or not yet.
#[derive(Default)]
pub(super) struct Turn<'a> {
    taken: Option<(Place<'a>, u64)>,
}

impl<'a> Turn<'a> {
    /// Waits for the turn of a transfer of `offer` that has `left` bytes to send, unless it has one that is not used up. To
    /// be called before every chunk.
    ///
    /// # Errors
    /// If the session is over.
    pub(super) async fn take(&mut self, turns: &'a Turns, offer: u64, left: u64) -> Result<(), Over> {
        if self.taken.as_ref().is_some_and(|(_, until)| left > *until) {
            return Ok(());
        }
        let bytes = left.min(TURN_BYTES);
        // In line again before the place is free: the oldest offer keeps it.
        let candidate = turns.line(left).map(|line| line.join(offer, bytes)).transpose()?;
        self.leave();
        if let Some(candidate) = candidate {
            self.taken = Some((candidate.enter().await?, left - bytes));
        }
        Ok(())
    }

    /// Lets others go first.
    pub(super) fn leave(&mut self) {
        self.taken = None;
    }
}

/// Transfers of one class.
struct Line(Mutex<Waiting>);

struct Waiting {
    closed: bool,
    free: usize,
    /// By the age of their offers, and the order in which they came.
    waiting: BTreeMap<(u64, u64), oneshot::Sender<()>>,
    offers: VecDeque<Offer>,
    /// Counts offers and whoever waits.
    last: u64,
}

struct Offer {
    key: u64,
    age: u64,
    sent: u64,
}

impl Waiting {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The age of an offer of which `bytes` more are to be sent.
    fn age(&mut self, key: u64, bytes: u64) -> u64 {
        let known = self.offers.iter().position(|o| o.key == key && o.sent < YOUTH_BYTES);
        if let Some(at) = known {
            self.offers[at].sent += bytes;
            return self.offers[at].age;
        }
        let age = self.next();
        self.offers.retain(|o| o.key != key);
        self.offers.truncate(KNOWN_OFFERS - 1);
        self.offers.push_front(Offer { key, age, sent: bytes });
        age
    }

    /// Gives a free place to the next in line.
    fn admit(&mut self) {
        while self.free > 0
            && let Some((_, waiter)) = self.waiting.pop_first()
        {
            // One that has gone away is passed over.
            if waiter.send(()).is_ok() {
                self.free -= 1;
            }
        }
    }
}

impl Line {
    fn new() -> Line {
        let offers = VecDeque::new();
        let waiting = BTreeMap::new();
        Line(Mutex::new(Waiting { closed: false, free: AT_A_TIME, waiting, offers, last: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // No code panics while it holds the lock with the line half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut line = self.lock();
        line.closed = true;
        line.waiting.clear();
    }

    fn join(&self, offer: u64, bytes: u64) -> Result<Candidate<'_>, Over> {
        let mut line = self.lock();
        if line.closed {
            return Err(Over);
        }
        let place = (line.age(offer, bytes), line.next());
        let (admit, admitted) = oneshot::channel();
        line.waiting.insert(place, admit);
        line.admit();
        Ok(Candidate { line: self, admitted, has_entered: false })
    }
}

/// One who waits. Whoever is admitted and has gone away by then leaves the place to the next.
struct Candidate<'a> {
    line: &'a Line,
    admitted: oneshot::Receiver<()>,
    has_entered: bool,
}

impl<'a> Candidate<'a> {
    async fn enter(mut self) -> Result<Place<'a>, Over> {
        (&mut self.admitted).await.map_err(|_| Over)?;
        self.has_entered = true;
        Ok(Place(self.line))
    }
}

impl Drop for Candidate<'_> {
    fn drop(&mut self) {
        if !self.has_entered {
            self.admitted.close();
            if self.admitted.try_recv().is_ok() {
                drop(Place(self.line));
            }
        }
    }
}

/// One of the places of a line.
struct Place<'a>(&'a Line);

impl Drop for Place<'_> {
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

    /// Whether something gets its turn at once; given up if not.
    async fn goes(turns: &Turns, offer: u64, left: u64) -> bool {
        matches!(futures::poll!(pin!(Turn::default().take(turns, offer, left))), Poll::Ready(Ok(())))
    }

    #[tokio::test]
    async fn large_transfers_go_two_at_a_time_and_others_pass_them() {
        let turns = Turns::new();
        let (mut first, mut second) = (Turn::default(), Turn::default());
        first.take(&turns, 1, 4 * MIB).await.expect("open");
        second.take(&turns, 2, 2 * MIB).await.expect("open");
        assert!(!goes(&turns, 3, 2 * MIB).await, "two go already");
        assert!(goes(&turns, 4, MAX_CHUNK as u64).await && goes(&turns, 5, MIB).await, "others pass");
        first.take(&turns, 1, MIB / 2).await.expect("open");
        assert!(!goes(&turns, 3, 2 * MIB).await, "a turn lasts to the transfer's end");
        drop(first);
        assert!(goes(&turns, 3, 2 * MIB).await, "one has left");
    }

    #[tokio::test]
    async fn the_oldest_offer_goes_first_whichever_transfer_asked_first() {
        let turns = Turns::new();
        let (mut old, mut other) = (Turn::default(), Turn::default());
        old.take(&turns, 1, 2 * MIB).await.expect("open");
        other.take(&turns, 2, 2 * MIB).await.expect("open");
        let (mut young, mut same) = (Turn::default(), Turn::default());
        let mut young = pin!(young.take(&turns, 3, 2 * MIB));
        assert!(futures::poll!(&mut young).is_pending());
        let mut same = pin!(same.take(&turns, 1, 2 * MIB));
        assert!(futures::poll!(&mut same).is_pending());
        drop(other);
        assert!(futures::poll!(&mut young).is_pending() && futures::poll!(&mut same).is_ready());
        drop(old);
        assert!(futures::poll!(&mut young).is_ready());
    }

    #[tokio::test]
    async fn a_turn_is_used_up_and_so_is_age() {
        let turns = Turns::new();
        let (mut long, mut other, mut next) = (Turn::default(), Turn::default(), Turn::default());
        other.take(&turns, 9, 2 * MIB).await.expect("open");
        let mut left = 32 * MIB;
        long.take(&turns, 1, left).await.expect("open");
        let mut next = pin!(next.take(&turns, 2, 2 * MIB));
        assert!(futures::poll!(&mut next).is_pending());
        while left > 16 * MIB {
            let again = futures::poll!(pin!(long.take(&turns, 1, left)));
            assert!(again.is_ready(), "the oldest offer, with {left} bytes left");
            assert!(futures::poll!(&mut next).is_pending());
            left -= MIB;
        }
        let mut again = pin!(long.take(&turns, 1, left));
        assert!(futures::poll!(&mut again).is_pending() && futures::poll!(&mut next).is_ready());
        turns.close();
        assert!(matches!(futures::poll!(&mut again), Poll::Ready(Err(Over))));
    }

    #[tokio::test]
    async fn whoever_goes_away_leaves_no_gap() {
        let turns = Turns::new();
        let (mut first, mut second) = (Turn::default(), Turn::default());
        first.take(&turns, 1, 2 * MIB).await.expect("open");
        second.take(&turns, 2, 2 * MIB).await.expect("open");
        {
            let mut gone = Turn::default();
            let mut gone = pin!(gone.take(&turns, 3, 2 * MIB));
            assert!(futures::poll!(&mut gone).is_pending());
            drop((first, second));
            // It is admitted, and goes away without having noticed.
        }
        let (mut third, mut fourth) = (Turn::default(), Turn::default());
        assert!(futures::poll!(pin!(third.take(&turns, 4, 2 * MIB))).is_ready());
        assert!(futures::poll!(pin!(fourth.take(&turns, 5, 2 * MIB))).is_ready());
    }
}
