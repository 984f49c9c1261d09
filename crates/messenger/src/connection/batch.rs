//! A batch of frames that are written together, either to a byte stream or as packets of a link.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use base::block::Payload;
use bytes::Bytes;
use tokio::io::AsyncWrite;
use tokio::sync::oneshot;

use super::peer_watch::PeerWatch;
use crate::Message;
use crate::frame::{self, Body, Close, FrameKind, Push, Wrote};
use crate::transport::packets::{Link, PacketContent};

/// Payloads of up to this many bytes are copied behind their headers, because a separate slice
/// would cost more than the copy.
const COPY_MAX_BYTES: usize = 512;

/// Maximum number of slices in one vectored write.
const SLICES: usize = 64;

/// Capacity that the buffer for frame heads keeps between batches, in bytes.
const SCRATCH_BYTES: usize = 64 << 10;

/// A numbered frame, which this side keeps until the peer acknowledges it.
pub(super) enum Sequenced {
    Message(Message),
    Push(Push, Payload, Option<PushDestination>),
}

/// The destination of pushed data in the peer's memory. It is valid only on the transport that it
/// names.
#[derive(Debug, Clone, Copy)]
pub(super) struct PushDestination {
    pub(super) transport: u64,
    pub(super) region: fabric::RemoteRegion,
    /// Offset within the region, in bytes.
    pub(super) offset: usize,
}

enum FrameBytes {
    Head(Range<usize>),
    Data(Bytes),
}

/// Frames that are written together.
#[derive(Default)]
pub(super) struct Batch {
    heads: Vec<u8>,
    parts: Vec<FrameBytes>,
    bytes: usize,
    /// Number of bytes of payload that were copied behind their headers.
    copied: usize,
    frames: usize,
    has_bulk: bool,
    /// Number of messages in the batch that are sent for the first time.
    pub(super) messages: usize,
    /// Number of bulk slots to release once the batch is written.
    pub(super) bulk_slots: usize,
    /// Notify the callers that wait until the position of their pushed chunk in the send order is
    /// fixed.
    pub(super) placed: Vec<oneshot::Sender<()>>,
    /// For each frame: the offset of its end, and whether it ends with data that was not copied.
    ends: Vec<(usize, bool)>,
    /// The link that sends the batch. `None` if a byte stream sends it.
    link: Option<Arc<Link>>,
    /// Data to write to the peer's memory before the frames are sent.
    pub(super) writes: Vec<(Bytes, PushDestination)>,
}

impl Batch {
    /// Creates an empty batch for frames that `link` sends.
    pub(super) fn over(link: &Arc<Link>) -> Batch {
        Batch { link: Some(Arc::clone(link)), ..Batch::default() }
    }

    /// Creates a batch with a frame that tells the peer that the connection ends.
    pub(super) fn closing(reason: &str) -> Batch {
        let mut batch = Batch::default();
        batch.push_control(&Body::Close(Close { reason: reason.chars().take(100).collect() }), 0);
        batch
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn copied_bytes(&self) -> usize {
        self.copied
    }

    pub(super) fn frames(&self) -> usize {
        self.frames
    }

    /// Whether the batch holds bulk data.
    pub(super) fn has_bulk(&self) -> bool {
        self.has_bulk
    }

    pub(super) fn push_control(&mut self, body: &Body, ack: u64) {
        self.push(body.kind(), 0, ack, &Payload::default(), |out| body.encode(out));
    }

    pub(super) fn push_bulk(&mut self, kind: FrameKind, seq: u64, ack: u64, body: &Body, payload: &Payload) {
        self.has_bulk |= !payload.is_empty();
        self.push(kind, seq, ack, payload, |out| body.encode(out));
    }

    pub(super) fn push_sequenced(&mut self, frame: &Sequenced, seq: u64, ack: u64) {
        match frame {
            Sequenced::Message(Message { header, payload }) => {
                self.push(FrameKind::Message, seq, ack, payload, |out| out.extend_from_slice(header));
            }
            Sequenced::Push(push, payload, target) => match target.filter(|t| self.can_write(t, payload)) {
                Some(target) => {
                    let checksums = payload.checksums().iter().flat_map(|sum| sum.to_le_bytes()).collect();
                    let Push { offer, offset } = *push;
                    let wrote = Wrote { offer, offset, len: payload.len() as u32, checksums };
                    self.push_bulk(FrameKind::Wrote, seq, ack, &Body::Wrote(wrote), &Payload::default());
                    self.writes.push((payload.data().clone(), target));
                }
                None => self.push_bulk(FrameKind::Push, seq, ack, &Body::Push(*push), payload),
            },
        }
    }

    fn can_write(&self, target: &PushDestination, payload: &Payload) -> bool {
        let link = self.link.as_ref().filter(|link| link.transport_number() == target.transport);
        link.is_some_and(|link| link.can_write(payload.data()))
    }

    fn push(
        &mut self,
        kind: FrameKind,
        seq: u64,
        ack: u64,
        payload: &Payload,
        header: impl FnOnce(&mut Vec<u8>),
    ) {
        let start = self.heads.len();
        frame::encode_head(&mut self.heads, kind, seq, ack, payload, header);
        let copied = payload.len() <= COPY_MAX_BYTES;
        if copied {
            self.heads.extend_from_slice(payload.data());
            self.copied += payload.len();
        }
        let end = self.heads.len();
        match self.parts.last_mut() {
            Some(FrameBytes::Head(last)) => last.end = end,
            _ => self.parts.push(FrameBytes::Head(start..end)),
        }
        if !copied {
            self.parts.push(FrameBytes::Data(payload.data().clone()));
        }
        self.frames += 1;
        self.bytes += end - start + if copied { 0 } else { payload.len() };
        self.ends.push((self.bytes, !copied));
    }

    /// Divides the frames into packets of at most `room` bytes. Each packet is gathered from at
    /// most `most` memory areas. A packet holds whole frames, but a frame longer than `room` is
    /// divided over several packets. Returns the range of bytes of each packet.
    pub(super) fn packets(&self, room: usize, most: usize) -> Vec<Range<usize>> {
        let mut packets = Vec::new();
        let mut start = 0;
        let mut last = 0;
        // Adjacent frame heads form one memory area, together with the packet's own header.
        let (mut parts, mut after_data) = (1, false);
        for &(end, has_data) in &self.ends {
            parts += usize::from(after_data) + usize::from(has_data);
            after_data = has_data;
            if (end - start > room || parts > most) && last > start {
                packets.push(start..last);
                start = last;
                parts = 1 + usize::from(has_data);
            }
            while end - start > room {
                packets.push(start..start + room);
                start += room;
            }
            // The last packet of a divided frame holds nothing else: the next frame begins a new
            // packet.
            if start > last {
                packets.push(start..end);
                start = end;
                (parts, after_data) = (1, false);
            }
            last = end;
        }
        if last > start {
            packets.push(start..last);
        }
        packets
    }

    /// The contents of the bytes in `range`, as a list of copied and shared slices.
    pub(super) fn pieces(&self, range: Range<usize>) -> Vec<PacketContent<'_>> {
        let mut pieces = Vec::new();
        let mut at = 0;
        for part in &self.parts {
            let len = match part {
                FrameBytes::Head(head) => head.len(),
                FrameBytes::Data(data) => data.len(),
            };
            let (from, to) = (range.start.max(at), range.end.min(at + len));
            if from < to {
                let inside = from - at..to - at;
                pieces.push(match part {
                    FrameBytes::Head(head) => PacketContent::Copied(&self.heads[head.clone()][inside]),
                    FrameBytes::Data(data) => PacketContent::Shared(data.slice(inside)),
                });
            }
            at += len;
        }
        pieces
    }

    /// Empties the batch for the next frames.
    pub(super) fn clear(&mut self) {
        self.heads.clear();
        self.heads.shrink_to(SCRATCH_BYTES);
        self.parts.clear();
        self.placed.clear();
        self.ends.clear();
        self.writes.clear();
        (self.bytes, self.copied, self.frames, self.messages, self.bulk_slots) = (0, 0, 0, 0, 0);
        self.has_bulk = false;
    }

    /// All bytes of the batch.
    #[cfg(test)]
    pub(super) fn to_bytes(&self) -> Bytes {
        (0..self.parts.len()).flat_map(|i| self.part(i)).copied().collect()
    }

    fn part(&self, index: usize) -> &[u8] {
        match &self.parts[index] {
            FrameBytes::Head(range) => &self.heads[range.clone()],
            FrameBytes::Data(data) => data,
        }
    }

    /// Writes the whole batch. Tells `watch` each time bytes were written.
    pub(super) async fn write(
        &self,
        writer: &mut (dyn AsyncWrite + Send + Unpin),
        watch: &PeerWatch,
    ) -> io::Result<()> {
        let (mut part, mut skip) = (0, 0);
        while part < self.parts.len() {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = SLICES.min(self.parts.len() - part);
            for (i, slice) in slices[..count].iter_mut().enumerate() {
                let data = self.part(part + i);
                *slice = IoSlice::new(if i == 0 { &data[skip..] } else { data });
            }
            let mut written =
                std::future::poll_fn(|cx| Pin::new(&mut *writer).poll_write_vectored(cx, &slices[..count]))
                    .await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            watch.on_sent();
            while part < self.parts.len() && written >= self.part(part).len() - skip {
                written -= self.part(part).len() - skip;
                (part, skip) = (part + 1, 0);
            }
            skip += written;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_hold_whole_frames_and_only_long_frames_are_divided() {
        let mut batch = Batch::default();
        let sizes = [100, 200, 5000, 300, 20_000, 50, 60];
        for size in sizes {
            let message = Message { header: vec![7; size].into(), payload: Payload::default() };
            batch.push_sequenced(&Sequenced::Message(message), 1, 0);
        }
        let all = batch.to_bytes();
        let packets = batch.packets(8000, 4);
        let lens: Vec<usize> = packets.iter().map(Range::len).collect();
        let head = frame::HEADER_LEN;
        assert_eq!(lens, [5600 + 4 * head, 8000, 8000, 4000 + head, 110 + 2 * head]);
        let pieces = packets.into_iter().flat_map(|range| batch.pieces(range));
        let again: Vec<u8> = pieces.flat_map(|piece| piece.bytes().to_vec()).collect();
        assert_eq!(again, all);
    }

    #[test]
    fn long_payloads_are_sent_without_a_copy() {
        let mut batch = Batch::default();
        let payload = Payload::compute(0, vec![3; 4096].into());
        let message = Message { header: "h".into(), payload: payload.clone() };
        batch.push_sequenced(&Sequenced::Message(message), 1, 0);
        assert_eq!(batch.copied_bytes(), 0);
        let packets = batch.packets(8000, 4);
        assert_eq!(packets.len(), 1);
        match batch.pieces(packets[0].clone()).as_slice() {
            [PacketContent::Copied(_), PacketContent::Shared(data)] => {
                assert_eq!(data.as_ptr(), payload.data().as_ptr())
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn copies_of_short_payloads_are_counted() {
        let mut batch = Batch::default();
        for len in [COPY_MAX_BYTES, 100, COPY_MAX_BYTES + 1] {
            let message = Message { header: "h".into(), payload: Payload::compute(0, vec![3; len].into()) };
            batch.push_sequenced(&Sequenced::Message(message), 1, 0);
        }
        assert_eq!(batch.copied_bytes(), COPY_MAX_BYTES + 100);
        batch.clear();
        assert_eq!(batch.copied_bytes(), 0);
    }

    #[test]
    fn a_packet_consists_of_at_most_the_allowed_number_of_memory_areas() {
        let mut batch = Batch::default();
        for size in [1000, 1000, 0, 1000, 0, 0, 1000, 1000, 1000] {
            let message = Message { header: "h".into(), payload: Payload::compute(0, vec![3; size].into()) };
            batch.push_sequenced(&Sequenced::Message(message), 1, 0);
        }
        let cut = |most| -> Vec<usize> {
            let packets = batch.packets(16_000, most);
            packets.iter().map(|packet| batch.pieces(packet.clone()).len()).collect()
        };
        assert_eq!(cut(4), [4, 4, 4], "head, data, head, data");
        assert_eq!(cut(100), [12]);
        assert_eq!(cut(2), [2, 2, 2, 2, 2, 2]);
    }
}
