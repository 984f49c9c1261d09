//! Sends and receives the frames of a connection over a link. A link carries packets instead of a
//! byte stream. It also carries one-sided transfers of bulk data.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};

use super::Shared;
use super::batch::{Batch, Sequenced};
use super::reader::ReadFailure;
use crate::Message;
use crate::MessengerError;
use crate::frame::{self, Body, Frame, FrameHeader, HEADER_LEN, PullData};
use crate::transport::packets::packet::ROOM_BYTES;
use crate::transport::packets::{Link, LinkFailed};

/// Number of packets after which the reader yields to other tasks.
const TURN: usize = 64;

impl From<LinkFailed> for ReadFailure {
    fn from(e: LinkFailed) -> ReadFailure {
        ReadFailure::Broken(e.0)
    }
}

/// Reads frames from one link.
pub(super) struct PacketReader<'a> {
    shared: &'a Arc<Shared>,
    link: &'a Link,
    /// The received part of a frame that is longer than a packet.
    partial: BytesMut,
    /// Full length of the frame in `partial`, in bytes; 0 if no frame is incomplete.
    expected: usize,
    last_ack: u64,
    freed: Vec<Sequenced>,
}

impl<'a> PacketReader<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>, link: &'a Link) -> PacketReader<'a> {
        let (partial, freed) = (BytesMut::new(), Vec::new());
        PacketReader { shared, link, partial, expected: 0, last_ack: 0, freed }
    }

    /// Reads until the transport fails or the peer ends the connection.
    pub(super) async fn run(mut self) -> ReadFailure {
        let mut turn = 0;
        loop {
            let packet = match self.link.receive().await {
                Ok(packet) => packet,
                Err(e) => return e.into(),
            };
            if let Err(fault) = self.packet(packet) {
                return fault;
            }
            turn += 1;
            if turn % TURN == 0 {
                tokio::task::yield_now().await;
            }
        }
    }

    fn packet(&mut self, mut packet: Bytes) -> Result<(), ReadFailure> {
        self.shared.metrics.received_bytes.increment(packet.len() as u64);
        if self.expected > 0 {
            packet = match self.more(packet)? {
                Some(rest) => rest,
                None => return Ok(()),
            };
        }
        while !packet.is_empty() {
            match frame::decode(&packet, &self.shared.config.limits)? {
                Some((frame, len)) => {
                    packet.advance(len);
                    self.frame(frame)?;
                }
                None => return self.begin(&packet),
            }
        }
        Ok(())
    }

    /// Stores the first part of a frame that continues in the next packet.
    fn begin(&mut self, packet: &Bytes) -> Result<(), ReadFailure> {
        let Some(fixed) = packet.first_chunk::<HEADER_LEN>() else {
            let wrong = "a packet ends inside the header of a frame".to_owned();
            return Err(ReadFailure::Fatal(MessengerError::Protocol(wrong)));
        };
        let header = FrameHeader::decode(fixed, &self.shared.config.limits)?;
        self.expected = HEADER_LEN + header.body_len() + header.payload_len as usize;
        self.partial.reserve(self.expected);
        self.partial.extend_from_slice(packet);
        Ok(())
    }

    /// Adds the next packet to the incomplete frame. Returns the rest of the packet once the frame
    /// is complete.
    fn more(&mut self, mut packet: Bytes) -> Result<Option<Bytes>, ReadFailure> {
        let missing = self.expected - self.partial.len();
        self.partial.extend_from_slice(&packet.split_to(missing.min(packet.len())));
        if self.partial.len() < self.expected {
            return Ok(None);
        }
        self.shared.metrics.copied_bytes.increment(self.expected as u64);
        self.expected = 0;
        let whole = self.partial.split().freeze();
        match frame::decode(&whole, &self.shared.config.limits)? {
            Some((frame, _)) => self.frame(frame)?,
            None => unreachable!("the frame has the length that its header states"),
        }
        Ok(Some(packet))
    }

    fn frame(&mut self, frame: Frame) -> Result<(), ReadFailure> {
        let Frame { header, body, payload } = frame;
        if header.ack != self.last_ack {
            self.shared.on_ack(header.ack, &mut self.freed)?;
            self.freed.clear();
            self.last_ack = header.ack;
        }
        match body {
            Body::Message(text) => self.shared.on_message(header.seq, Message { header: text, payload }),
            Body::Push(push) => self.shared.on_pushed(header.seq, push, payload),
            Body::Wrote(wrote) => self.shared.on_wrote(header.seq, &wrote),
            Body::PullData(data) => self.pull_data(&header, &data, &payload),
            other => self.shared.on_control(other),
        }
    }

    /// Handles data of a pull that the peer sends in frames although a link exists. The data is
    /// copied.
    fn pull_data(
        &mut self,
        header: &FrameHeader,
        data: &PullData,
        payload: &base::block::Payload,
    ) -> Result<(), ReadFailure> {
        if let Some(mut dest) = self.shared.take_dest(data, header.block_offset, payload.len())? {
            dest.bytes().copy_from_slice(payload.data());
            self.shared.metrics.copied_bytes.increment(payload.len() as u64);
            dest.finish(payload.checksums());
        }
        Ok(())
    }
}

impl Shared {
    /// Sends queued frames until the link fails, or until the connection is being closed and
    /// everything is sent.
    pub(super) async fn send_packets(&self, link: &Arc<Link>) -> Result<(), LinkFailed> {
        let mut batch = Batch::over(link);
        loop {
            // A message may tell the peer that its memory is no longer used. So messages wait for
            // the end of reads that their callers have abandoned, for example at a deadline.
            let holds_messages = link.has_abandoned_reads();
            let closing = self.gather(&mut batch, holds_messages);
            if batch.frames() == 0 {
                if closing && !holds_messages {
                    return self.send_batch(link, &Batch::closing(self.end.reason().text())).await;
                }
                // Either event leads to another look at the queue, so neither starves the other.
                tokio::select! {
                    biased;
                    () = self.wake_writer.notified() => {}
                    () = link.abandoned_read_ended() => {}
                }
                continue;
            }
            let slots = self.on_gathered(&mut batch);
            self.send_batch(link, &batch).await?;
            drop(slots);
        }
    }

    async fn send_batch(&self, link: &Arc<Link>, batch: &Batch) -> Result<(), LinkFailed> {
        for (bytes, target) in &batch.writes {
            link.write(bytes, target.region, target.offset).await?;
            self.metrics.sent_bytes.increment(bytes.len() as u64);
        }
        let packets: Vec<Range<usize>> = batch.packets(ROOM_BYTES, link.parts_max());
        for packet in packets {
            // A chunk of bulk data may belong to a large buffer, which must not wait for later
            // packets.
            let frees = batch.has_bulk() && packet.end == batch.bytes();
            link.send(&batch.pieces(packet), frees).await?;
            self.watch.on_sent();
        }
        self.metrics.sent_bytes.increment(batch.bytes() as u64);
        // A short payload is copied behind its header, and with it into the packet.
        self.metrics.copied_bytes.increment(2 * batch.copied_bytes() as u64);
        Ok(())
    }
}
