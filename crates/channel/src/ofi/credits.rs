//! Doorbells as messages. Credits ensure that a side never sends more messages than its peer has
//! posted receives.
//!
//! A message has 16 bytes, little endian: `"OBBL"`, the credits that are returned (u32), and the
//! doorbell's count (u64). A message with count 0 is no doorbell and only returns credits. A side
//! may send [`WINDOW`] doorbells before the peer returns credits. It adds up later counts, and
//! sends the sum in one message when credits return. So no count is lost, and no count is delayed
//! by more than one round trip. Messages without a doorbell need no credit. A side sends one of
//! them for each half window of doorbells that it has received, so at most two are in flight.
//! [`RECEIVES`] includes room for them.

use crate::{ChannelError, Result};

/// Maximum number of sent doorbells for which the peer has not returned credits.
const WINDOW: u32 = 8;
/// Number of receives that a side keeps posted.
pub(super) const RECEIVES: usize = WINDOW as usize + 4;
/// Length of a message, in bytes.
pub(super) const MESSAGE: usize = 16;
const MAGIC: [u8; 4] = *b"OBBL";

/// The state of one side of a connection: the doorbell credits of both directions, and the count
/// that this side has not sent yet.
pub(super) struct DoorbellCredits {
    /// Number of doorbells that this side may send before the peer returns credits.
    left: u32,
    /// Number of received doorbells for which this side has not returned credits yet.
    owed: u32,
    /// Sum of the counts that were rung and not sent yet.
    pending: u64,
}

impl Default for DoorbellCredits {
    fn default() -> Self {
        DoorbellCredits { left: WINDOW, owed: 0, pending: 0 }
    }
}

impl DoorbellCredits {
    /// Adds `count` to the next doorbell that this side sends.
    pub(super) fn ring(&mut self, count: u64) {
        self.pending = self.pending.saturating_add(count);
    }

    /// The message to send now, if there is one.
    pub(super) fn message(&self) -> Option<[u8; MESSAGE]> {
        let rings = self.pending > 0 && self.left > 0;
        if !rings && self.owed < WINDOW / 2 {
            return None;
        }
        let count = if rings { self.pending } else { 0 };
        let mut bytes = [0; MESSAGE];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.owed.to_le_bytes());
        bytes[8..].copy_from_slice(&count.to_le_bytes());
        Some(bytes)
    }

    /// Updates the credits after [`message`](Self::message) was sent.
    pub(super) fn sent(&mut self) {
        if self.pending > 0 && self.left > 0 {
            self.left -= 1;
            self.pending = 0;
        }
        self.owed = 0;
    }

    /// Handles a received message. The caller must already have posted the message's receive buffer
    /// again. Returns the doorbell's count, or 0 if the message only returns credits.
    ///
    /// # Errors
    /// Fails if the message is invalid.
    pub(super) fn received(&mut self, message: &[u8]) -> Result<u64> {
        let Ok(bytes) = <[u8; MESSAGE]>::try_from(message) else {
            return Err(ChannelError::protocol(format!(
                "a doorbell message has {} bytes, not {MESSAGE}",
                message.len()
            )));
        };
        let credits = u32::from_le_bytes(bytes[4..8].try_into().expect("the slice has four bytes"));
        let count = u64::from_le_bytes(bytes[8..].try_into().expect("the slice has eight bytes"));
        if bytes[..4] != MAGIC || credits > WINDOW - self.left {
            return Err(ChannelError::protocol(
                "a doorbell message is malformed or returns more credits than were used",
            ));
        }
        self.left += credits;
        if count > 0 {
            self.owed += 1;
            if self.owed > WINDOW {
                return Err(ChannelError::protocol("it sent more doorbells than it had credits for"));
            }
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Ring(u64),
        Send,
        Receive,
    }

    fn step() -> impl Strategy<Value = (usize, Step)> {
        let what = prop_oneof![(1..100_u64).prop_map(Step::Ring), Just(Step::Send), Just(Step::Receive)];
        (0..2_usize, what)
    }

    proptest! {
        /// For any interleaving of the two sides: counts arrive in full, no side has more messages
        /// in flight than receives are posted, and no side waits forever.
        #[test]
        fn no_doorbell_count_is_lost_and_posted_receives_suffice(steps in proptest::collection::vec(step(), 0..400)) {
            let mut sides = [DoorbellCredits::default(), DoorbellCredits::default()];
            let mut wires: [VecDeque<[u8; MESSAGE]>; 2] = Default::default();
            let (mut rung, mut heard) = ([0; 2], [0; 2]);
            let drain = (0..40).flat_map(|_| [(0, Step::Send), (1, Step::Send), (0, Step::Receive), (1, Step::Receive)]);
            for (side, step) in steps.into_iter().chain(drain) {
                match step {
                    Step::Ring(count) => {
                        rung[side] += count;
                        sides[side].ring(count);
                    }
                    Step::Send => {
                        if let Some(message) = sides[side].message() {
                            sides[side].sent();
                            wires[1 - side].push_back(message);
                            prop_assert!(wires[1 - side].len() <= RECEIVES);
                        }
                    }
                    Step::Receive => {
                        if let Some(message) = wires[side].pop_front() {
                            heard[1 - side] += sides[side].received(&message).unwrap();
                        }
                    }
                }
            }
            prop_assert_eq!(rung, heard);
        }

        #[test]
        fn handling_arbitrary_messages_never_panics(messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..30)) {
            let mut credits = DoorbellCredits::default();
            for message in messages {
                let _ = credits.received(&message);
            }
        }
    }
}
