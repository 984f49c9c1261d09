//! Whose turn it is to send bulk data.
//!
//! Chunks of all transfers share one connection. If large transfers took turns chunk by chunk, those that begin together
//! would end together: then the drive has nothing to do while the network is busy, and the other way round. So of large
//! transfers a few go at a time, in the order in which they asked, and leave one by one. Small ones do not wait for large
//! ones: what fits in a chunk waits for a bulk slot only, and transfers of middle size have turns of their own.

use tokio::sync::{AcquireError, Semaphore, SemaphorePermit};

use crate::config::MAX_CHUNK;

/// The largest transfer of middle size, in bytes.
const MIDDLE_MAX_BYTES: u64 = 1 << 20;

/// Transfers of a class that go at a time: one, and the next, so that the line never runs dry between them.
const AT_A_TIME: usize = 2;

/// A transfer that has sent that many bytes goes to the end of its line.
const TURN_BYTES: u64 = 4 << 20;

/// The lines of one session.
pub(super) struct Turns {
    middle: Semaphore,
    large: Semaphore,
}

impl Turns {
    pub(super) fn new() -> Turns {
        Turns { middle: Semaphore::new(AT_A_TIME), large: Semaphore::new(AT_A_TIME) }
    }

    /// Whoever waits is told that the session is over.
    pub(super) fn close(&self) {
        self.middle.close();
        self.large.close();
    }

    fn line(&self, bytes: u64) -> Option<&Semaphore> {
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
    taken: Option<(SemaphorePermit<'a>, u64)>,
}

impl<'a> Turn<'a> {
    /// Waits for the turn of a transfer that has `left` bytes to send, unless it has one that is not used up. To be called
    /// before every chunk.
    ///
    /// # Errors
    /// If the session is over.
    pub(super) async fn take(&mut self, turns: &'a Turns, left: u64) -> Result<(), AcquireError> {
        if self.taken.as_ref().is_some_and(|(_, until)| left > *until) {
            return Ok(());
        }
        self.leave();
        if let Some(line) = turns.line(left) {
            self.taken = Some((line.acquire().await?, left.saturating_sub(TURN_BYTES)));
        }
        Ok(())
    }

    /// Lets others go first.
    pub(super) fn leave(&mut self) {
        self.taken = None;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Poll;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[tokio::test]
    async fn large_transfers_go_two_at_a_time_in_order_and_others_pass_them() {
        let turns = Turns::new();
        let (mut first, mut second, mut third) = (Turn::default(), Turn::default(), Turn::default());
        first.take(&turns, 4 * MIB).await.expect("open");
        second.take(&turns, 2 * MIB).await.expect("open");
        let mut waiting = pin!(third.take(&turns, 2 * MIB));
        assert!(futures::poll!(&mut waiting).is_pending(), "two go already");
        for (left, what) in [(MAX_CHUNK as u64, "small"), (MIB, "middle")] {
            let mut turn = Turn::default();
            let passed = futures::poll!(pin!(turn.take(&turns, left)));
            assert!(matches!(passed, Poll::Ready(Ok(()))), "one of {what} size passes");
        }
        first.take(&turns, MIB / 2).await.expect("open");
        assert!(futures::poll!(&mut waiting).is_pending(), "a turn lasts to the transfer's end");
        drop(first);
        assert!(matches!(futures::poll!(&mut waiting), Poll::Ready(Ok(()))), "one has left");
    }

    #[tokio::test]
    async fn a_turn_is_used_up_and_ends_with_the_session() {
        let turns = Turns::new();
        let (mut long, mut other, mut next) = (Turn::default(), Turn::default(), Turn::default());
        long.take(&turns, 9 * MIB).await.expect("open");
        other.take(&turns, 2 * MIB).await.expect("open");
        let mut waiting = pin!(next.take(&turns, 2 * MIB));
        assert!(futures::poll!(&mut waiting).is_pending());
        long.take(&turns, 5 * MIB + 1).await.expect("4 MiB are not sent yet");
        assert!(futures::poll!(&mut waiting).is_pending());
        let mut again = pin!(long.take(&turns, 5 * MIB));
        assert!(futures::poll!(&mut again).is_pending(), "it is at the end of the line now");
        assert!(futures::poll!(&mut waiting).is_ready(), "the next one goes");
        turns.close();
        assert!(matches!(futures::poll!(&mut again), Poll::Ready(Err(_))));
    }
}
