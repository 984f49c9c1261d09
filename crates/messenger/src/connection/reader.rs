//! The receiving side of a stream transport: decodes frames, and passes each frame to the part of
//! the connection that handles it.
//!
//! Small frames are slices of one read buffer. The payload of bulk data is read from the transport
//! directly into its destination. After a bulk frame, the reader reads only a few bytes ahead,
//! because payload bytes in the read buffer would have to be copied.

use std::io;
use std::sync::Arc;

use base::block::{Payload, verify_pieces};
use bytes::{Buf, BufMut, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::Shared;
use super::batch::Sequenced;
use super::inbound::Arrival;
use super::pulls::PullBuffer;
use super::read_buffer::ReadBuffer;
use crate::frame::{Body, FrameError, FrameHeader, HEADER_LEN, PullData, Push, Wrote};
use crate::{Message, MessengerError};

/// Payloads longer than this, in bytes, are read into separate memory, unless the read buffer
/// already holds them.
const READ_AHEAD_MAX: usize = 16 << 10;

/// Number of bytes to read ahead after a bulk frame, which is enough for the head of the next
/// frame.
const BULK_AHEAD: usize = 512;

/// Number of bytes after which the reader yields to the connection's writer and to other tasks.
const TURN: usize = 512 << 10;

/// Maximum size of one read when the data of a cancelled pull is discarded, in bytes.
const DISCARD: usize = 64 << 10;

/// The reason why reading ended.
#[derive(Debug)]
pub(super) enum ReadFailure {
    /// The transport broke.
    Broken(String),
    /// Bytes were damaged on the way.
    Damaged(FrameError),
    /// The peer violated the protocol.
    Fatal(MessengerError),
    /// The peer ended the connection.
    Closed(String),
}

impl From<io::Error> for ReadFailure {
    fn from(e: io::Error) -> ReadFailure {
        ReadFailure::Broken(e.to_string())
    }
}

impl From<FrameError> for ReadFailure {
    fn from(e: FrameError) -> ReadFailure {
        if e.is_damage() {
            ReadFailure::Damaged(e)
        } else {
            ReadFailure::Fatal(MessengerError::Protocol(e.to_string()))
        }
    }
}

impl From<MessengerError> for ReadFailure {
    fn from(e: MessengerError) -> ReadFailure {
        ReadFailure::Fatal(e)
    }
}

/// Reads frames from one stream.
pub(super) struct FrameReader<'a> {
    shared: &'a Arc<Shared>,
    io: &'a mut (dyn AsyncRead + Send + Unpin),
    buf: ReadBuffer,
    /// Whether the last frame was a frame of bulk data.
    bulk: bool,
    /// The acknowledgement that the last frame carried.
    last_ack: u64,
    /// Bytes read since the reader last yielded.
    turn: usize,
    freed: Vec<Sequenced>,
}

impl<'a> FrameReader<'a> {
    pub(super) fn new(
        shared: &'a Arc<Shared>,
        io: &'a mut (dyn AsyncRead + Send + Unpin),
    ) -> FrameReader<'a> {
        FrameReader {
            shared,
            io,
            buf: ReadBuffer::new(),
            bulk: false,
            last_ack: 0,
            turn: 0,
            freed: Vec::new(),
        }
    }

    /// Reads until the transport fails or the peer ends the connection.
    pub(super) async fn run(mut self) -> ReadFailure {
        loop {
            if let Err(fault) = self.frame().await {
                return fault;
            }
            if self.turn > TURN {
                self.turn = 0;
                tokio::task::yield_now().await;
            }
        }
    }

    async fn frame(&mut self) -> Result<(), ReadFailure> {
        self.fill(HEADER_LEN).await?;
        let fixed = self.buf.bytes.first_chunk::<HEADER_LEN>().expect("the buffer holds a header");
        let header = FrameHeader::decode(fixed, &self.shared.config.limits)?;
        self.fill(HEADER_LEN + header.body_len()).await?;
        self.buf.bytes.advance(HEADER_LEN);
        let (body, checksums) = header.decode_body(self.buf.bytes.split_to(header.body_len()).freeze())?;
        if header.ack != self.last_ack {
            self.on_ack(header.ack)?;
        }
        self.bulk = matches!(body, Body::PullData(_) | Body::Push(_));
        match body {
            Body::Message(text) => {
                let payload = self.payload(&header, checksums).await?;
                self.shared.on_message(header.seq, Message { header: text, payload })
            }
            Body::Push(push) => {
                let payload = self.payload(&header, checksums).await?;
                self.shared.on_pushed(header.seq, push, payload)
            }
            Body::PullData(data) => self.pull_data(&header, &data, checksums).await,
            other => self.shared.on_control(other),
        }
    }

    fn on_ack(&mut self, ack: u64) -> Result<(), ReadFailure> {
        self.shared.on_ack(ack, &mut self.freed)?;
        self.freed.clear();
        self.last_ack = ack;
        Ok(())
    }

    /// Reads until the buffer holds `len` bytes.
    async fn fill(&mut self, len: usize) -> Result<(), ReadFailure> {
        while self.buf.bytes.len() < len {
            let missing = len - self.buf.bytes.len();
            let n = if self.bulk {
                let room = missing.max(BULK_AHEAD);
                self.make_room(room);
                self.io.read_buf(&mut (&mut self.buf.bytes).limit(room)).await?
            } else {
                self.make_room(missing);
                let room = self.buf.bytes.capacity() - self.buf.bytes.len();
                let n = self.io.read_buf(&mut self.buf.bytes).await?;
                self.buf.on_read(n, room);
                n
            };
            self.heard(n)?;
        }
        Ok(())
    }

    fn make_room(&mut self, len: usize) {
        let copied = self.buf.make_room(len);
        self.count_copied(copied);
    }

    fn count_copied(&self, len: usize) {
        if len > 0 {
            self.shared.metrics.copied_bytes.increment(len as u64);
        }
    }

    fn heard(&mut self, n: usize) -> Result<(), ReadFailure> {
        if n == 0 {
            return Err(ReadFailure::Broken("the peer closed the transport connection".into()));
        }
        self.turn += n;
        self.shared.watch.on_received();
        self.shared.metrics.received_bytes.increment(n as u64);
        Ok(())
    }

    /// Reads and verifies a payload.
    async fn payload(&mut self, header: &FrameHeader, checksums: Vec<u32>) -> Result<Payload, ReadFailure> {
        let len = header.payload_len as usize;
        if len == 0 {
            return Ok(Payload::default());
        }
        let data = self.payload_bytes(len).await?;
        let block_offset = u64::from(header.block_offset);
        verify_pieces(block_offset, &data, &checksums).map_err(FrameError::Payload)?;
        Payload::from_parts(block_offset, data, checksums).map_err(|_| FrameError::Body(header.kind).into())
    }

    async fn payload_bytes(&mut self, len: usize) -> Result<Bytes, ReadFailure> {
        if self.buf.bytes.len() < len && len <= READ_AHEAD_MAX {
            self.fill(len).await?;
        }
        if self.buf.bytes.len() >= len {
            return Ok(self.buf.bytes.split_to(len).freeze());
        }
        let mut data = self.buf.payload(len);
        self.count_copied(self.buf.bytes.len());
        data.extend_from_slice(&self.buf.bytes.split());
        while data.len() < len {
            let missing = len - data.len();
            let n = self.io.read_buf(&mut (&mut data).limit(missing)).await?;
            self.heard(n)?;
        }
        Ok(self.buf.finish(data))
    }

    /// Reads data of a pull into the pull's buffer.
    async fn pull_data(
        &mut self,
        header: &FrameHeader,
        data: &PullData,
        sums: Vec<u32>,
    ) -> Result<(), ReadFailure> {
        let len = header.payload_len as usize;
        let Some(mut dest) = self.shared.take_dest(data, header.block_offset, len)? else {
            return self.discard(len).await;
        };
        let left = self.fill_destination(&mut dest).await?;
        if left > 0 {
            drop(dest);
            return self.discard(left).await;
        }
        match verify_pieces(u64::from(header.block_offset), dest.bytes(), &sums) {
            Ok(()) => dest.finish(&sums),
            Err(mismatch) => dest.damaged(mismatch)?,
        }
        Ok(())
    }

    /// Fills the destination unless its pull is cancelled. Returns how many bytes of the frame
    /// remain to be discarded.
    async fn fill_destination(&mut self, dest: &mut PullBuffer<'_>) -> Result<usize, ReadFailure> {
        let pull = dest.pull();
        let bytes = dest.bytes();
        let mut at = self.buf.bytes.len().min(bytes.len());
        self.shared.metrics.copied_bytes.increment(at as u64);
        self.buf.bytes.copy_to_slice(&mut bytes[..at]);
        while at < bytes.len() {
            tokio::select! {
                biased;
                n = self.io.read(&mut bytes[at..]) => {
                    let n = n?;
                    self.heard(n)?;
                    at += n;
                }
                () = self.shared.pull_dropped.notified() => {
                    if !self.shared.wants_pull(pull) {
                        return Ok(bytes.len() - at);
                    }
                }
            }
        }
        Ok(0)
    }

    async fn discard(&mut self, mut len: usize) -> Result<(), ReadFailure> {
        loop {
            let here = self.buf.bytes.len().min(len);
            self.buf.bytes.advance(here);
            len -= here;
            if len == 0 {
                return Ok(());
            }
            let room = len.min(DISCARD);
            self.make_room(room);
            let n = self.io.read_buf(&mut (&mut self.buf.bytes).limit(room)).await?;
            self.heard(n)?;
        }
    }
}

impl Shared {
    /// Handles the acknowledgement of all frames up to `ack`. Moves these frames to `freed`.
    pub(super) fn on_ack(&self, ack: u64, freed: &mut Vec<Sequenced>) -> Result<(), MessengerError> {
        let mut state = self.lock();
        state.outbound.on_ack(ack, freed)?;
        let credit = state.outbound.issue();
        drop(state);
        let pushed = freed.iter().map(|f| if let Sequenced::Push(_, p, _) = f { p.len() } else { 0 }).sum();
        self.send_limits.add_push_room(pushed);
        self.send_limits.add_message_credit(credit);
        Ok(())
    }

    /// Handles a grant: the peer has granted `granted` bytes of credit since the connection began.
    pub(super) fn on_granted(&self, granted: u64) -> Result<(), MessengerError> {
        let mut state = self.lock();
        state.outbound.on_granted(granted)?;
        let credit = state.outbound.issue();
        drop(state);
        self.send_limits.add_message_credit(credit);
        Ok(())
    }

    /// Handles a frame whose processing does not depend on the kind of transport.
    pub(super) fn on_control(self: &Arc<Self>, body: Body) -> Result<(), ReadFailure> {
        match body {
            Body::Window(window) => {
                self.watch.on_quiet_announced(window.quiet_ms);
                Ok(self.on_granted(window.granted)?)
            }
            Body::PullRequest(request) => Ok(self.on_pull_request(request)?),
            Body::PullCancel(cancel) => {
                self.on_pull_cancel(cancel.pull);
                Ok(())
            }
            Body::PullRefused(refused) => {
                self.on_pull_refused(refused);
                Ok(())
            }
            Body::PushRefused(refused) => {
                self.lock().offers.on_push_refused(refused);
                Ok(())
            }
            Body::Close(close) => Err(ReadFailure::Closed(close.reason)),
            other => {
                let wrong = format!("the peer sent an unexpected {:?} frame", other.kind());
                Err(ReadFailure::Fatal(MessengerError::Protocol(wrong)))
            }
        }
    }

    pub(super) fn on_pushed(&self, seq: u64, push: Push, payload: Payload) -> Result<(), ReadFailure> {
        match self.on_sequenced(seq, payload.len())? {
            Arrival::Next => Ok(self.on_push(push, payload)?),
            Arrival::Repeated => Ok(()),
        }
    }

    pub(super) fn on_wrote(&self, seq: u64, wrote: &Wrote) -> Result<(), ReadFailure> {
        let order = self.lock().inbound.order(seq)?;
        if matches!(order, Arrival::Next) {
            // The frame counts as received only once the written data is verified. Otherwise the
            // peer would not send damaged data again.
            self.on_landed(wrote)?;
            self.on_sequenced(seq, wrote.len as usize)?;
        }
        Ok(())
    }

    fn on_sequenced(&self, seq: u64, len: usize) -> Result<Arrival, MessengerError> {
        let mut state = self.lock();
        let order = state.inbound.on_sequenced(seq, len)?;
        self.note_owed_ack(&mut state);
        Ok(order)
    }

    fn note_owed_ack(&self, state: &mut super::State) {
        if state.inbound.owes_ack_now() {
            state.outbound.want_window();
            self.wake_writer.notify_one();
        } else {
            self.ack_wanted.notify_one();
        }
    }

    pub(super) fn on_message(&self, seq: u64, message: Message) -> Result<(), ReadFailure> {
        let mut state = self.lock();
        match state.inbound.on_sequenced(seq, message.payload.len())? {
            Arrival::Repeated => return Ok(()),
            Arrival::Next => {}
        }
        if state.inbound.push_message(seq, message)? {
            state.outbound.want_window();
            self.wake_writer.notify_one();
        }
        self.note_owed_ack(&mut state);
        let waker = state.inbound.take_waker();
        drop(state);
        self.metrics.received_messages.increment(1);
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }
}
