//! A buffer for received bytes, which hands out parts of its memory without copying.
//!
//! A block of memory is reused when all its parts have been dropped, because the page faults of
//! fresh memory cost as much as copying. The size of a read adapts to the traffic, so an idle
//! connection holds only a small block.

use bytes::{Bytes, BytesMut};

/// Minimum and maximum size of a block for frames, in bytes.
const BLOCK: (usize, usize) = (8 << 10, 256 << 10);

/// Maximum number of payload blocks that are kept for reuse.
const KEPT: usize = 4;

/// A buffer for received bytes.
pub(super) struct ReadBuffer {
    /// Received bytes that have not been used yet.
    pub(super) bytes: BytesMut,
    /// The previous block, which is reused once all its parts have been dropped.
    spare: BytesMut,
    /// Number of bytes to read at a time, which adapts to the traffic.
    ahead: usize,
    /// Blocks of earlier payloads, which are reused once their parts have been dropped.
    payloads: Vec<BytesMut>,
}

impl ReadBuffer {
    pub(super) fn new() -> ReadBuffer {
        ReadBuffer { bytes: BytesMut::new(), spare: BytesMut::new(), ahead: BLOCK.0, payloads: Vec::new() }
    }

    /// Makes room for at least `missing` bytes, and for more when more data is expected. Returns the
    /// number of bytes that were copied.
    pub(super) fn make_room(&mut self, missing: usize) -> usize {
        let room = self.bytes.capacity() - self.bytes.len();
        if self.bytes.is_empty() && room > 4 * self.ahead {
            self.bytes = BytesMut::new();
            self.spare = BytesMut::new();
        } else if room >= missing.max(self.ahead / 4) {
            return 0;
        }
        let copied = self.bytes.len();
        self.spare.clear();
        self.spare.reserve(copied + missing.max(self.ahead));
        self.spare.extend_from_slice(&self.bytes);
        std::mem::swap(&mut self.bytes, &mut self.spare);
        // The old block becomes reusable as a whole when its last part is dropped.
        self.spare.clear();
        copied
    }

    /// Adapts the size of reads after a read of `n` bytes into `room` free bytes.
    pub(super) fn on_read(&mut self, n: usize, room: usize) {
        if n == room {
            self.ahead = (self.ahead * 2).min(BLOCK.1);
        } else if n < self.ahead / 16 {
            self.ahead = (self.ahead / 2).max(BLOCK.0);
            self.payloads.clear();
        }
    }

    /// Returns empty memory for a payload of `len` bytes.
    pub(super) fn payload(&mut self, len: usize) -> BytesMut {
        match self.payloads.iter_mut().position(|kept| kept.try_reclaim(len)) {
            Some(free) => self.payloads.swap_remove(free),
            None => BytesMut::with_capacity(len),
        }
    }

    /// Returns the payload and keeps its memory for reuse.
    pub(super) fn finish(&mut self, mut payload: BytesMut) -> Bytes {
        let data = payload.split().freeze();
        self.payloads.truncate(KEPT - 1);
        self.payloads.insert(0, payload);
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_block_is_reused_when_all_its_parts_are_dropped() {
        let mut buffer = ReadBuffer::new();
        let mut places = base::collections::HashSet::default();
        for _ in 0..50 {
            buffer.make_room(8000);
            buffer.bytes.extend_from_slice(&[1; 8000]);
            places.insert(buffer.bytes.as_ptr() as usize / (64 << 10));
            drop(buffer.bytes.split_to(8000).freeze());
        }
        assert!(places.len() <= 4, "50 reads used {} blocks", places.len());
    }

    #[test]
    fn parts_of_a_block_that_are_still_in_use_are_never_overwritten() {
        let mut buffer = ReadBuffer::new();
        let mut kept = Vec::new();
        for i in 0..50u8 {
            buffer.make_room(8000);
            buffer.bytes.extend_from_slice(&[i; 8000]);
            kept.push(buffer.bytes.split_to(7000).freeze());
            assert!(buffer.bytes.iter().all(|b| *b == i), "unused bytes are kept");
            buffer.bytes.clear();
            let mut payload = buffer.payload(100_000);
            payload.extend_from_slice(&vec![i; 100_000]);
            kept.push(buffer.finish(payload));
        }
        for (i, part) in kept.iter().enumerate() {
            assert!(part.iter().all(|b| usize::from(*b) == i / 2));
        }
    }

    #[test]
    fn only_unused_bytes_are_copied_when_a_block_is_full() {
        let mut buffer = ReadBuffer::new();
        assert_eq!(buffer.make_room(100), 0);
        buffer.bytes.extend_from_slice(&[1; 100]);
        assert_eq!(buffer.make_room(100), 0, "the block has room");
        buffer.bytes.resize(buffer.bytes.capacity(), 1);
        drop(buffer.bytes.split_to(buffer.bytes.len() - 30));
        assert_eq!(buffer.make_room(100), 30);
    }

    #[test]
    fn the_read_size_adapts_to_the_received_amount_of_data() {
        let mut buffer = ReadBuffer::new();
        for _ in 0..10 {
            buffer.make_room(40);
            let room = buffer.bytes.capacity();
            buffer.bytes.resize(room, 0);
            buffer.on_read(room, room);
            drop(buffer.bytes.split());
        }
        buffer.make_room(40);
        let room = buffer.bytes.capacity();
        assert!(room >= BLOCK.1 / 2, "the room is only {room} bytes after large reads");
        for _ in 0..10 {
            buffer.make_room(40);
            buffer.on_read(44, buffer.bytes.capacity());
        }
        buffer.make_room(40);
        buffer.make_room(40);
        let held = buffer.bytes.capacity() + buffer.spare.capacity();
        assert!(held <= 4 * BLOCK.0, "{held} bytes are held after small reads");
    }
}
