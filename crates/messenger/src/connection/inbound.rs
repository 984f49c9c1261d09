//! The receiving half of a connection's state: frame order, the peer's credit, and the queue of
//! events for the user.

use std::collections::VecDeque;
use std::task::Waker;

use crate::config::MESSAGE_OVERHEAD;
use crate::{ConnectionEvent, Message, MessengerError};

/// After this many received bytes, including [`MESSAGE_OVERHEAD`] per frame, an acknowledgement is
/// sent without waiting for its timer.
const ACK_BYTES: u64 = 512 << 10;

/// Maximum number of queued events that are not messages. Further events are dropped.
const MAX_INFO: usize = 64;

/// The credit that a message uses, in bytes.
pub(super) fn charge(message: &Message) -> u64 {
    (message.header.len() + message.payload.len()) as u64 + MESSAGE_OVERHEAD
}

/// The receiving half of a connection's state.
pub(super) struct Inbound {
    events: VecDeque<ConnectionEvent>,
    info: usize,
    waker: Option<Waker>,
    /// Whether the user has dropped the receiving handle. If so, messages are discarded.
    deaf: bool,
    /// Maximum credit of the peer beyond the messages that the user has taken, in bytes.
    window: u64,
    /// Credit that the peer has used since the connection began, in bytes.
    used: u64,
    /// Credit of the messages that the user has taken since the connection began, in bytes.
    taken: u64,
    /// Credit granted to the peer since the connection began, in bytes.
    granted: u64,
    /// Number of the last sequenced frame that was received.
    received: u64,
    /// Number of the frame with the last message that was queued for the user.
    queued: u64,
    /// Number of the last sequenced frame that was acknowledged to the peer.
    reported: u64,
    /// Bytes of received frames that were not acknowledged yet.
    unreported_bytes: u64,
}

/// Whether a sequenced frame is new or a repetition.
pub(super) enum Arrival {
    Next,
    /// The frame arrived before, so it is dropped.
    Repeated,
}

impl Inbound {
    pub(super) fn new(window: u64) -> Inbound {
        Inbound {
            events: VecDeque::new(),
            info: 0,
            waker: None,
            deaf: false,
            window,
            used: 0,
            taken: 0,
            granted: window,
            received: 0,
            queued: 0,
            reported: 0,
            unreported_bytes: 0,
        }
    }

    /// Number of the last sequenced frame that was received.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Credit granted to the peer since the connection began, in bytes.
    pub(super) fn granted(&self) -> u64 {
        self.granted
    }

    /// Records the arrival of sequenced frame `seq` with `len` payload bytes.
    ///
    /// # Errors
    /// If an earlier frame is missing.
    pub(super) fn on_sequenced(&mut self, seq: u64, len: usize) -> Result<Arrival, MessengerError> {
        let order = self.order(seq)?;
        if matches!(order, Arrival::Next) {
            self.received = seq;
            self.unreported_bytes += len as u64 + MESSAGE_OVERHEAD;
        }
        Ok(order)
    }

    /// Whether sequenced frame `seq` is new. Does not record its arrival.
    ///
    /// # Errors
    /// If an earlier frame is missing.
    pub(super) fn order(&self, seq: u64) -> Result<Arrival, MessengerError> {
        let expected = self.received + 1;
        match seq {
            _ if seq < expected => Ok(Arrival::Repeated),
            _ if seq == expected => Ok(Arrival::Next),
            _ => Err(MessengerError::Protocol(format!("frame {seq} arrived instead of frame {expected}"))),
        }
    }

    /// Queues the message of sequenced frame `seq` for the user. Returns whether to send new credit
    /// to the peer at once.
    ///
    /// # Errors
    /// If the peer had no credit for the message.
    pub(super) fn push_message(&mut self, seq: u64, message: Message) -> Result<bool, MessengerError> {
        debug_assert!(seq > self.queued, "message {seq} is delivered after message {}", self.queued);
        self.queued = seq;
        let charge = charge(&message);
        self.used += charge;
        if self.used > self.granted {
            return Err(MessengerError::Protocol("the peer sent a message without credit".into()));
        }
        if self.deaf {
            return Ok(self.give_back(charge));
        }
        self.events.push_back(ConnectionEvent::Message(message));
        Ok(false)
    }

    /// Forgets that the last frame was received, if it was a message that the peer may send again.
    /// Only a planted bug calls this.
    pub(super) fn forget_last_message(&mut self) {
        if self.queued == self.received && self.owes_ack() {
            self.received -= 1;
        }
    }

    /// Queues an event that is not a message.
    pub(super) fn push_info(&mut self, event: ConnectionEvent) {
        if matches!(event, ConnectionEvent::Lost(_)) || (self.info < MAX_INFO && !self.deaf) {
            self.info += 1;
            self.events.push_back(event);
        }
    }

    /// Takes the next event. Also returns whether to send new credit to the peer.
    /// [`ConnectionEvent::Lost`] stays in the queue, so every later call returns it again.
    pub(super) fn pop(&mut self) -> Option<(ConnectionEvent, bool)> {
        match self.events.pop_front()? {
            ConnectionEvent::Message(message) => {
                let grant = self.give_back(charge(&message));
                Some((ConnectionEvent::Message(message), grant))
            }
            ConnectionEvent::Lost(why) => {
                self.events.push_front(ConnectionEvent::Lost(why.clone()));
                Some((ConnectionEvent::Lost(why), false))
            }
            info => {
                self.info -= 1;
                Some((info, false))
            }
        }
    }

    /// Records that the user has taken a message. Returns whether to send new credit to the peer.
    fn give_back(&mut self, charge: u64) -> bool {
        self.taken += charge;
        let possible = self.taken + self.window;
        let worth_a_frame = possible - self.granted >= self.window / 2;
        if worth_a_frame {
            self.granted = possible;
        }
        worth_a_frame
    }

    /// Discards messages from now on, because the user has dropped the receiving handle. Returns
    /// the queued events.
    pub(super) fn deafen(&mut self) -> VecDeque<ConnectionEvent> {
        self.deaf = true;
        for event in &self.events {
            if let ConnectionEvent::Message(message) = event {
                self.taken += charge(message);
            }
        }
        self.granted = self.taken + self.window;
        std::mem::take(&mut self.events)
    }

    pub(super) fn set_waker(&mut self, waker: &Waker) {
        match &mut self.waker {
            Some(old) => old.clone_from(waker),
            None => self.waker = Some(waker.clone()),
        }
    }

    pub(super) fn take_waker(&mut self) -> Option<Waker> {
        self.waker.take()
    }

    /// Whether the peer still lacks an acknowledgement of a received frame.
    pub(super) fn owes_ack(&self) -> bool {
        self.reported < self.received
    }

    /// Whether enough data was received to send an acknowledgement now, without waiting for the
    /// timer.
    pub(super) fn owes_ack_now(&self) -> bool {
        self.unreported_bytes >= ACK_BYTES
    }

    /// Records that a frame with the acknowledgement is being sent.
    pub(super) fn on_reported(&mut self) {
        self.reported = self.received;
        self.unreported_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::block::Payload;

    fn message(len: usize) -> Message {
        Message { header: vec![0; len].into(), payload: Payload::default() }
    }

    #[test]
    fn credit_is_granted_again_when_half_a_window_of_messages_is_taken() {
        let mut inbound = Inbound::new(10 * 5096);
        for seq in 1..=10 {
            assert!(!inbound.push_message(seq, message(1000)).expect("the peer has credit"));
        }
        let grants: Vec<bool> = (0..10).map_while(|_| inbound.pop().map(|(_, grant)| grant)).collect();
        let expected = [false, false, false, false, true, false, false, false, false, true];
        assert_eq!(grants, expected);
        assert_eq!(inbound.granted(), 20 * 5096);
    }

    #[test]
    fn a_message_without_credit_is_a_protocol_violation() {
        let mut inbound = Inbound::new(5096);
        inbound.push_message(1, message(1000)).expect("the peer has credit");
        assert!(inbound.push_message(2, message(0)).is_err());
    }

    #[test]
    fn a_repeated_frame_is_dropped_and_a_missing_frame_is_an_error() {
        let mut inbound = Inbound::new(1 << 20);
        assert!(matches!(inbound.on_sequenced(1, 0), Ok(Arrival::Next)));
        assert!(matches!(inbound.on_sequenced(1, 0), Ok(Arrival::Repeated)));
        assert!(inbound.on_sequenced(3, 0).is_err());
        assert!(inbound.owes_ack());
        inbound.on_reported();
        assert!(!inbound.owes_ack());
    }

    #[test]
    fn the_loss_of_a_connection_is_reported_repeatedly_and_queued_events_are_bounded() {
        let mut inbound = Inbound::new(1 << 20);
        for _ in 0..1000 {
            inbound.push_info(ConnectionEvent::Interrupted);
        }
        inbound.push_info(ConnectionEvent::Lost(MessengerError::ConnectionLost("gone".into())));
        let mut news = 0;
        while let Some((ConnectionEvent::Interrupted, _)) = inbound.pop() {
            news += 1;
        }
        assert_eq!(news, MAX_INFO);
        assert!(matches!(inbound.pop(), Some((ConnectionEvent::Lost(_), _))));
        assert!(matches!(inbound.pop(), Some((ConnectionEvent::Lost(_), _))));
    }
}
