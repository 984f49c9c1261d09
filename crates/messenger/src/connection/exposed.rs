//! Memory of an offer that the peer can read or write by one-sided transfers.

use std::sync::Arc;

use base::block::{BLOCK, ChecksumMismatch, Payload, piece_count, verify_pieces};
use fabric::PeerBuffer;
use wire::{BulkSegment, RemoteMemory};

use super::range::check_range;
use crate::frame::Wrote;
use crate::transport::packets::{Link, Registration};
use crate::{BulkSink, BulkSource};

/// The source or sink that a user offers to the peer. The number is the block_offset of the sink:
/// the offset of its first byte within the object, modulo 4096.
pub(super) enum Offered {
    Source(Arc<dyn BulkSource>),
    Sink(Arc<dyn BulkSink>, u16),
}

/// The memory of an offer that the peer can access by one-sided transfers.
pub(super) struct ExposedOffer {
    /// The registered memory. `None` once the peer's access has ended.
    region: Option<Registration>,
    remote: RemoteMemory,
    /// For a sink: the memory that the peer writes to.
    room: Option<PeerBuffer>,
    written: Vec<PeerWrite>,
}

/// A range of a sink that the peer has written.
pub(super) struct PeerWrite {
    offset: u64,
    payload_offset: u64,
    len: usize,
    checksums: Vec<u32>,
}

impl ExposedOffer {
    /// Exposes the memory of an offer to the peer over `link`. Returns `None` if the memory cannot
    /// be exposed.
    pub(super) fn of(what: &Offered, link: &Link) -> Option<ExposedOffer> {
        let (memory, checksums, room) = match what {
            Offered::Source(source) => {
                let (data, checksums) = source.memory()?.into_parts();
                let checksums = checksums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
                (fabric::ExposedMemory::Bytes(data), checksums, None)
            }
            Offered::Sink(sink, _) => {
                let len = usize::try_from(sink.likely_len().min(sink.len())).ok().filter(|len| *len > 0)?;
                let room = PeerBuffer::new(link.room(len)?);
                (fabric::ExposedMemory::Buffer(room.clone()), Vec::new(), Some(room))
            }
        };
        let region = link.expose(memory).inspect_err(|e| {
            metrics::counter!("outboard_messenger_not_exposed").increment(1);
            tracing::debug!(error = %e, "an offer's memory cannot be exposed; its data is sent in frames");
        });
        let region = region.ok()?;
        let fabric::RemoteRegion { key, base, len } = region.remote();
        let segments = vec![BulkSegment { address: base, key, len }];
        let remote = RemoteMemory { transport: link.transport_number(), segments, checksums };
        Some(ExposedOffer { region: Some(region), remote, room, written: Vec::new() })
    }

    pub(super) fn remote(&self) -> RemoteMemory {
        self.remote.clone()
    }

    pub(super) fn transport(&self) -> u64 {
        self.remote.transport
    }

    /// Removes the registration of the memory from the offer, and returns it. The peer's access
    /// ends when the caller drops the registration.
    pub(super) fn hide(&mut self) -> Option<Registration> {
        self.region.take()
    }

    /// Removes the registration of the memory from the offer, and returns it. The peer's access has
    /// ended: the transport on which the memory was exposed has ended, or the offer was
    /// [finished](crate::BulkRegion::finish), whose documentation states whom it trusts.
    #[allow(unsafe_code)]
    pub(super) fn hide_settled(&mut self) -> Option<Registration> {
        let region = self.region.take()?;
        // SAFETY: only the peer on that transport has the key, and it has ended its accesses. For a
        // finished offer, this is the peer's own statement (see the limitation at `finish`).
        unsafe { region.settle() };
        Some(region)
    }

    /// Ends the offer. If `is_done` is false, the peer may still use the memory, so the memory is
    /// kept until the transport ends.
    pub(super) fn end(mut self, is_done: bool) {
        drop(if is_done { self.hide_settled() } else { self.hide() });
    }

    /// Ends the peer's access and hands the written data to `sink`.
    pub(super) fn deliver(mut self, sink: &dyn BulkSink) {
        drop(self.hide_settled());
        let Some(room) = self.room.take().and_then(PeerBuffer::into_inner) else { return };
        let data = room.freeze();
        for PeerWrite { offset, payload_offset, len, checksums } in self.written.drain(..) {
            let part = data.slice(offset as usize..offset as usize + len);
            let taken = Payload::from_parts(payload_offset, part, checksums)
                .is_ok_and(|payload| sink.write(offset, payload));
            if !taken {
                tracing::debug!(offset, len, "a sink refused data that the peer had written");
            }
        }
    }

    /// Checks the peer's statement that it wrote a range. Returns the memory and the range.
    pub(super) fn place(&self, wrote: &Wrote, block_offset: u64) -> Result<(PeerBuffer, PeerWrite), String> {
        Ok((self.written_room(wrote, block_offset)?, PeerWrite::new(wrote, block_offset)?))
    }

    /// Records a range that the peer has written and that passed verification.
    pub(super) fn keep(&mut self, written: PeerWrite) {
        self.written.push(written);
    }

    fn written_room(&self, wrote: &Wrote, block_offset: u64) -> Result<PeerBuffer, String> {
        let room = self.room.as_ref().ok_or("the offer is for pulling only")?;
        check_range(wrote.offset, u64::from(wrote.len), room.len() as u64, block_offset)?;
        let end = wrote.offset + u64::from(wrote.len);
        if self.written.iter().any(|w| wrote.offset < w.offset + w.len as u64 && w.offset < end) {
            return Err("the range overlaps a range that was written before".into());
        }
        Ok(room.clone())
    }
}

impl PeerWrite {
    fn new(wrote: &Wrote, block_offset: u64) -> Result<PeerWrite, String> {
        let payload_offset = (block_offset + wrote.offset % BLOCK) % BLOCK;
        let (sums, rest) = wrote.checksums.as_chunks::<4>();
        let checksums: Vec<u32> = sums.iter().map(|sum| u32::from_le_bytes(*sum)).collect();
        if checksums.len() as u64 != piece_count(payload_offset, u64::from(wrote.len)) || !rest.is_empty() {
            return Err("the number of checksums differs from the number of pieces".into());
        }
        Ok(PeerWrite { offset: wrote.offset, payload_offset, len: wrote.len as usize, checksums })
    }

    /// Compares the checksums that the peer sent with the data in the sink's memory.
    #[allow(unsafe_code)]
    pub(super) fn verify(&self, room: &PeerBuffer) -> Result<(), ChecksumMismatch> {
        let start = self.offset as usize;
        // SAFETY: no operation of this process uses the memory of an offer. The protocol forbids
        // the peer to change bytes after it has announced that it has written them. The bytes are
        // payload, and are only compared with their checksums.
        let bytes = unsafe { room.bytes(start..start + self.len) };
        verify_pieces(self.payload_offset, bytes, &self.checksums)
    }
}
