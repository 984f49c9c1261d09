//! The sending half of a connection's state: the queues of frames to send, and sent frames that may
//! have to be sent again.

use std::collections::VecDeque;
use std::time::Duration;

use base::block::Payload;
use tokio::sync::oneshot;

use super::batch::{Batch, PushDestination, Sequenced};
use super::inbound::charge;
use crate::config::MAX_CREDIT_BYTES;
use crate::frame::{Body, FrameKind, PullData, Push, Window};
use crate::{Message, MessengerError};

/// Maximum number of queued control frames. The number is reached only if the peer sends requests
/// and does not read the answers.
const MAX_CONTROL_FRAMES: usize = 1024;

/// Size of a batch, in bytes, from which no more messages are added to it.
const BATCH_BYTES: usize = 256 << 10;

/// Maximum number of frames in one batch.
const BATCH_FRAMES: usize = 128;

/// A chunk in the queue of bulk data. It holds one bulk slot of [`SendLimits`](super::SendLimits), which
/// the writer frees.
pub(super) enum Chunk {
    Data(PullData, Payload),
    /// The channel notifies the caller when the position of the chunk in the send order is fixed. If
    /// the caller no longer waits, the chunk is sent in a frame: the peer may learn before the
    /// chunk is sent that its memory is no longer used.
    Push(Push, Payload, Option<PushDestination>, Option<oneshot::Sender<()>>),
}

/// The queues of outgoing frames, the highest priority first, and the frames that were sent but not
/// acknowledged.
pub(super) struct Outbound {
    control: VecDeque<Body>,
    window_wanted: bool,
    /// How long this side may be silent, in milliseconds.
    quiet_ms: u32,
    messages: VecDeque<Message>,
    bulk: VecDeque<Chunk>,
    /// Frames that were sent but not acknowledged. The first has number `acked + 1`.
    unacked: VecDeque<Sequenced>,
    acked: u64,
    /// Number of frames in `unacked` that were written to the current transport.
    written: usize,
    /// Credit that the peer has granted since the connection began, in bytes.
    granted: u64,
    /// Credit that acknowledged messages have used since the connection began, in bytes.
    freed: u64,
    /// Credit that senders on this side have received since the connection began, in bytes.
    issued: u64,
    /// Maximum number of bytes that wait to be sent or acknowledged, however much credit the peer
    /// grants.
    window: u64,
}

/// State of the receiving half that outgoing frames report to the peer.
pub(super) struct Piggyback {
    pub(super) received: u64,
    pub(super) granted: u64,
}

impl Outbound {
    pub(super) fn new(granted: u64, window: u64) -> Outbound {
        Outbound {
            control: VecDeque::new(),
            window_wanted: false,
            quiet_ms: 0,
            messages: VecDeque::new(),
            bulk: VecDeque::new(),
            unacked: VecDeque::new(),
            acked: 0,
            written: 0,
            granted,
            freed: 0,
            issued: 0,
            window,
        }
    }

    /// Queues a control frame.
    ///
    /// # Errors
    /// If too many control frames are queued, because the peer does not read them.
    pub(super) fn push_control(&mut self, body: Body) -> Result<(), MessengerError> {
        if self.control.len() >= MAX_CONTROL_FRAMES {
            return Err(MessengerError::Protocol("the peer sends requests but reads no answers".into()));
        }
        self.control.push_back(body);
        Ok(())
    }

    /// Makes the next batch carry new credit and an acknowledgement.
    pub(super) fn want_window(&mut self) {
        self.window_wanted = true;
    }

    /// Sets the longest silence of this side, which the following heartbeats announce.
    pub(super) fn set_quiet(&mut self, quiet: Duration) {
        self.quiet_ms = u32::try_from(quiet.as_millis()).unwrap_or(u32::MAX);
    }

    /// Whether no message or chunk is queued and the peer has acknowledged all sent frames.
    pub(super) fn is_acked(&self) -> bool {
        self.unacked.is_empty() && self.messages.is_empty() && self.bulk.is_empty()
    }

    /// Queues a message. The caller holds credit for it.
    pub(super) fn push_message(&mut self, message: Message) {
        self.messages.push_back(message);
    }

    /// Queues a chunk. The caller holds a bulk slot for it.
    pub(super) fn push_chunk(&mut self, chunk: Chunk) {
        self.bulk.push_back(chunk);
    }

    pub(super) fn queued_messages(&self) -> usize {
        self.messages.len()
    }

    /// Number of the last sequenced frame that the peer has acknowledged.
    pub(super) fn acked(&self) -> u64 {
        self.acked
    }

    /// Handles the acknowledgement of all frames up to `ack`. Moves these frames to `freed`, so
    /// that the caller can drop them after releasing the mutex.
    ///
    /// # Errors
    /// If frame `ack` was never sent.
    pub(super) fn on_ack(&mut self, ack: u64, freed: &mut Vec<Sequenced>) -> Result<(), MessengerError> {
        let newly = ack.saturating_sub(self.acked);
        if newly > self.unacked.len() as u64 {
            return Err(MessengerError::Protocol(format!("the peer acknowledged the unsent frame {ack}")));
        }
        for frame in self.unacked.drain(..newly as usize) {
            if let Sequenced::Message(message) = &frame {
                self.freed += charge(message);
            }
            freed.push(frame);
        }
        self.acked += newly;
        self.written = self.written.saturating_sub(newly as usize);
        Ok(())
    }

    /// Handles a grant: the peer has granted `granted` bytes of credit since the connection began.
    ///
    /// # Errors
    /// If the grant exceeds the issued credit by more than [`MAX_CREDIT_BYTES`].
    pub(super) fn on_granted(&mut self, granted: u64) -> Result<(), MessengerError> {
        self.granted = self.granted.max(granted);
        if self.granted - self.issued > MAX_CREDIT_BYTES {
            return Err(MessengerError::Protocol(format!(
                "the peer granted {granted} bytes of credit, which exceeds the used credit by more than 2 GiB"
            )));
        }
        Ok(())
    }

    /// Issues credit to senders. Returns the additional credit that they may use now, in bytes.
    pub(super) fn issue(&mut self) -> usize {
        let allowed = self.granted.min(self.freed + self.window);
        let more = allowed.saturating_sub(self.issued);
        self.issued += more;
        more as usize
    }

    /// Prepares for a new transport: sent frames without acknowledgement will be sent again.
    /// Returns the queued chunks of the peer's pulls. The caller drops them, because the peer will
    /// request the data again.
    pub(super) fn rewind(&mut self) -> Vec<Chunk> {
        self.written = 0;
        self.control.clear();
        self.window_wanted = true;
        let (data, pushes) = self.bulk.drain(..).partition(|c| matches!(c, Chunk::Data(..)));
        self.bulk = pushes;
        Vec::from(data)
    }

    /// Removes the chunks of a cancelled pull from the queue of bulk data, and returns them.
    pub(super) fn drop_data(&mut self, pull: u64) -> Vec<Chunk> {
        let (dropped, kept) =
            self.bulk.drain(..).partition(|c| matches!(c, Chunk::Data(data, _) if data.pull == pull));
        self.bulk = kept;
        Vec::from(dropped)
    }

    /// Fills `batch` with the next frames: all control frames, messages up to a size limit, and one
    /// chunk of bulk data. If `holds_messages` is true, only with control frames.
    pub(super) fn gather(&mut self, batch: &mut Batch, piggyback: &Piggyback, holds_messages: bool) {
        let ack = piggyback.received;
        if std::mem::take(&mut self.window_wanted) {
            batch.push_control(
                &Body::Window(Window { granted: piggyback.granted, quiet_ms: self.quiet_ms }),
                ack,
            );
        }
        while let Some(body) = self.control.pop_front() {
            batch.push_control(&body, ack);
        }
        if holds_messages {
            return;
        }
        while batch.bytes() < BATCH_BYTES && batch.frames() < BATCH_FRAMES {
            if let Some(again) = self.unacked.get(self.written) {
                let seq = self.acked + self.written as u64 + 1;
                batch.push_sequenced(again, seq, ack);
            } else if let Some(message) = self.messages.pop_front() {
                self.push_new(batch, Sequenced::Message(message), ack);
                batch.messages += 1;
                continue;
            } else {
                break;
            }
            self.written += 1;
        }
        // A pushed chunk gets its number here, so all repeated frames must be written before it.
        if self.written == self.unacked.len() {
            match self.bulk.pop_front() {
                Some(Chunk::Data(data, payload)) => {
                    batch.push_bulk(FrameKind::PullData, 0, ack, &Body::PullData(data), &payload);
                    batch.bulk_slots += 1;
                }
                Some(Chunk::Push(push, payload, target, placed)) => {
                    let is_abandoned = placed.as_ref().is_some_and(oneshot::Sender::is_closed);
                    let target = target.filter(|_| !is_abandoned);
                    self.push_new(batch, Sequenced::Push(push, payload, target), ack);
                    batch.bulk_slots += 1;
                    batch.placed.extend(placed);
                }
                None => {}
            }
        }
    }

    fn push_new(&mut self, batch: &mut Batch, frame: Sequenced, ack: u64) {
        debug_assert_eq!(self.written, self.unacked.len(), "a new frame follows all repeated frames");
        let seq = self.acked + self.unacked.len() as u64 + 1;
        batch.push_sequenced(&frame, seq, ack);
        self.unacked.push_back(frame);
        self.written += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{self, Frame};
    use bytes::Bytes;

    const HERE: Piggyback = Piggyback { received: 9, granted: 100 };

    fn message(text: &'static str) -> Message {
        Message { header: Bytes::from_static(text.as_bytes()), payload: Payload::default() }
    }

    fn push(len: usize) -> Chunk {
        Chunk::Push(Push { offer: 1, offset: 0 }, Payload::compute(0, vec![1; len].into()), None, None)
    }

    fn gathered(outbound: &mut Outbound) -> Vec<Frame> {
        let mut batch = Batch::default();
        outbound.gather(&mut batch, &HERE, false);
        let mut bytes = batch.to_bytes();
        let limits = crate::ConnectionConfig::default().limits;
        let mut frames = Vec::new();
        while let Some((frame, len)) = frame::decode(&bytes, &limits).expect("good frames") {
            assert_eq!(frame.header.ack, HERE.received, "every frame carries the acknowledgement");
            frames.push(frame);
            bytes = bytes.slice(len..);
        }
        frames
    }

    fn numbers(frames: &[Frame]) -> Vec<u64> {
        frames.iter().map(|f| f.header.seq).filter(|seq| *seq > 0).collect()
    }

    #[test]
    fn unacknowledged_frames_are_repeated_with_their_numbers_before_new_frames() {
        let mut outbound = Outbound::new(1 << 20, 1 << 20);
        for text in ["a", "b"] {
            outbound.push_message(message(text));
        }
        outbound.push_chunk(push(5000));
        assert_eq!(numbers(&gathered(&mut outbound)), [1, 2, 3]);
        let mut freed = Vec::new();
        outbound.on_ack(1, &mut freed).expect("it was sent");
        assert_eq!(freed.len(), 1);
        outbound.push_message(message("c"));
        assert!(outbound.rewind().is_empty(), "no data of pulls was queued");
        outbound.push_chunk(push(10));
        let again = gathered(&mut outbound);
        assert_eq!(numbers(&again), [2, 3, 4, 5]);
        let kinds: Vec<FrameKind> = again.iter().map(|f| f.header.kind).collect();
        assert_eq!(
            kinds,
            [FrameKind::Window, FrameKind::Message, FrameKind::Push, FrameKind::Message, FrameKind::Push]
        );
        assert!(outbound.on_ack(6, &mut freed).is_err(), "frame 6 was never sent");
        outbound.on_ack(5, &mut freed).expect("it was sent");
        outbound.on_ack(3, &mut freed).expect("an old acknowledgement has no effect");
        assert_eq!(freed.len(), 5);
    }

    #[test]
    fn control_frames_precede_messages_and_a_batch_ends_with_one_bulk_chunk() {
        let mut outbound = Outbound::new(1 << 20, 1 << 20);
        outbound.push_chunk(push(10));
        outbound.push_chunk(push(10));
        outbound.push_message(message("m"));
        outbound.push_control(Body::PullCancel(frame::PullCancel { pull: 1 })).expect("room");
        let kinds = |frames: Vec<Frame>| frames.iter().map(|f| f.header.kind).collect::<Vec<_>>();
        assert_eq!(
            kinds(gathered(&mut outbound)),
            [FrameKind::PullCancel, FrameKind::Message, FrameKind::Push]
        );
        assert_eq!(kinds(gathered(&mut outbound)), [FrameKind::Push]);
        assert_eq!(kinds(gathered(&mut outbound)), []);
    }

    #[test]
    fn credit_is_limited_by_both_the_grant_and_the_window() {
        let mut outbound = Outbound::new(10_000, 50_000);
        assert_eq!(outbound.issue(), 10_000);
        outbound.on_granted(1 << 30).expect("a large grant is allowed");
        assert_eq!(outbound.issue(), 40_000, "the window limits the unacknowledged bytes");
        outbound.push_message(message("four"));
        gathered(&mut outbound);
        outbound.on_ack(1, &mut Vec::new()).expect("it was sent");
        assert_eq!(outbound.issue(), 4 + 4096, "an acknowledgement frees the message's credit");
        outbound.on_granted(5).expect("an old grant has no effect");
        assert!(outbound.on_granted(u64::MAX).is_err());
    }
}
