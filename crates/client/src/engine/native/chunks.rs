//! The memory that a read offers to the node, and the chunks that arrive in it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use base::block::{self, Payload};
use bytes::Bytes;
use messenger::BulkSink;

use crate::engine::SinkMemory;

/// Chunks of up to this length, in bytes, are copied. Larger chunks are kept without a copy.
const COPY_MAX_BYTES: usize = 16 << 10;

/// A read is assumed to fill a multiple of this number of bytes. Less memory takes hardly less time
/// to register (`outboard-layers registration`).
const LEAST_LIKELY: u64 = 64 << 10;

/// The blocks that a read transfers, and the range of bytes in these blocks that the caller has
/// requested.
#[derive(Debug, Clone)]
pub(crate) struct BlockWindow {
    /// Number of bytes between the start of the first block and the first requested byte.
    skip: u64,
    /// Number of requested bytes. The object may have fewer bytes in this range.
    len: u64,
    /// Length of all blocks, in bytes.
    pub(crate) room: u64,
    /// Number of bytes at the start of the blocks that are likely to exist.
    likely: u64,
    /// Destination of the requested bytes. With `None`, the answer contains these bytes.
    memory: Option<Arc<dyn SinkMemory>>,
}

impl BlockWindow {
    /// Creates the window for bytes `offset..offset + len` of an object.
    pub(crate) fn new(offset: u64, len: u64, memory: Option<Arc<dyn SinkMemory>>) -> BlockWindow {
        let start = block::align_down(offset);
        let end = block::align_up(offset.saturating_add(len)).unwrap_or(u64::MAX);
        BlockWindow { skip: offset - start, len, room: end - start, likely: end - start, memory }
    }

    /// States how many bytes of the object are likely to follow the start of the first block.
    pub(crate) fn with_likely(self, bytes: u64) -> BlockWindow {
        let likely = bytes.max(1).checked_next_multiple_of(LEAST_LIKELY).unwrap_or(u64::MAX);
        BlockWindow { likely: likely.min(self.room), ..self }
    }

    /// Returns the number of requested bytes among the first `sent` bytes of the blocks.
    pub(crate) fn wanted(&self, sent: u64) -> u64 {
        sent.saturating_sub(self.skip).min(self.len)
    }

    /// Delivers the requested part of `data`, whose first byte is byte `offset` of the blocks. If
    /// the caller gave memory, writes this part to the memory and returns no bytes. Otherwise
    /// returns the part.
    pub(crate) fn deliver(&self, offset: u64, data: Bytes) -> Bytes {
        let end = offset + data.len() as u64;
        let first = offset.max(self.skip);
        let last = end.min(self.skip.saturating_add(self.len));
        if first >= last {
            return Bytes::new();
        }
        let wanted = data.slice((first - offset) as usize..(last - offset) as usize);
        match &self.memory {
            None => wanted,
            Some(memory) => {
                memory.put(first - self.skip, wanted);
                Bytes::new()
            }
        }
    }
}

/// A chunk that arrived.
#[derive(Debug)]
struct ArrivedChunk {
    len: u64,
    /// Requested bytes of the chunk. Empty if these bytes were written to the caller's memory.
    kept: Bytes,
}

/// Receives the chunks of one attempt of a read, and checks that all bytes that the node sent have
/// arrived.
#[derive(Debug)]
pub(crate) struct ChunkSink {
    window: BlockWindow,
    /// Chunks by their offset in the blocks, in bytes.
    chunks: Mutex<BTreeMap<u64, ArrivedChunk>>,
}

impl ChunkSink {
    pub(crate) fn new(window: BlockWindow) -> ChunkSink {
        ChunkSink { window, chunks: Mutex::default() }
    }

    /// Returns the requested bytes that were not written to the caller's memory, in order. `sent`
    /// is the number of bytes that the node has sent, counted from the start of the window. Returns
    /// `None` if fewer, more or other bytes have arrived.
    pub(crate) fn take(&self, sent: u64) -> Option<Vec<Bytes>> {
        let chunks = std::mem::take(&mut *self.chunks.lock().unwrap_or_else(PoisonError::into_inner));
        let mut at = 0;
        for (offset, chunk) in &chunks {
            if *offset != at {
                return None;
            }
            at += chunk.len;
        }
        let kept = chunks.into_values().map(|chunk| chunk.kept).filter(|kept| !kept.is_empty());
        (at == sent).then(|| kept.collect())
    }
}

impl BulkSink for ChunkSink {
    #[expect(
        clippy::misnamed_getters,
        reason = "the node fills whole blocks, but the caller requested only a part of them"
    )]
    fn len(&self) -> u64 {
        self.window.room
    }

    fn likely_len(&self) -> u64 {
        self.window.likely
    }

    fn write(&self, offset: u64, payload: Payload) -> bool {
        let len = payload.len() as u64;
        let Some(end) = offset.checked_add(len).filter(|end| *end <= self.window.room) else {
            return false;
        };
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        let before = chunks.range(..end).next_back().map_or(0, |(at, chunk)| at + chunk.len);
        if before > offset {
            return false;
        }
        if len > 0 {
            let mut kept = self.window.deliver(offset, payload.into_parts().0);
            if kept.len() <= COPY_MAX_BYTES {
                // A slice of a message would keep the whole message in memory.
                kept = Bytes::copy_from_slice(&kept);
            }
            chunks.insert(offset, ArrivedChunk { len, kept });
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use super::*;

    fn piece(len: usize) -> Payload {
        Payload::compute(0, vec![7; len].into())
    }

    #[test]
    fn a_sink_accepts_chunks_in_any_order_but_refuses_overlaps() {
        let sink = ChunkSink::new(BlockWindow { skip: 0, len: 100, room: 100, likely: 100, memory: None });
        assert!(sink.write(50, piece(50)));
        assert!(!sink.write(40, piece(20)), "overlaps from below");
        assert!(!sink.write(99, piece(1)), "overlaps from above");
        assert!(!sink.write(90, piece(20)), "beyond the end");
        assert!(!sink.write(u64::MAX, piece(2)), "overflow");
        assert!(sink.write(0, piece(50)));
        assert_eq!(sink.take(100).unwrap().iter().map(Bytes::len).sum::<usize>(), 100);
        assert!(sink.take(1).is_none());
    }

    /// Memory of 6 bytes.
    #[derive(Debug, Default)]
    struct Six(Mutex<[u8; 6]>);

    impl SinkMemory for Six {
        fn put(&self, offset: u64, data: Bytes) {
            self.0.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(&data);
        }
    }

    #[test]
    fn a_window_delivers_exactly_the_requested_bytes() {
        let object = Bytes::from_static(b"0123456789");
        let payload = |from: usize, to: usize| Payload::compute(0, object.slice(from..to));
        // The read requests bytes 4098 to 4103 of an object whose second block begins with
        // `object`.
        for cuts in [&[0, 10][..], &[0, 1, 10], &[0, 2, 8, 10], &[0, 3, 5, 9, 10]] {
            let six = Arc::new(Six::default());
            for memory in [None, Some(Arc::clone(&six) as Arc<dyn SinkMemory>)] {
                let window = BlockWindow::new(4098, 6, memory.clone());
                assert_eq!((window.room, window.wanted(10), window.wanted(5)), (4096, 6, 3));
                let sink = ChunkSink::new(window);
                for cut in cuts.windows(2).rev() {
                    assert!(sink.write(cut[0] as u64, payload(cut[0], cut[1])));
                }
                let kept = sink.take(10).unwrap();
                let kept = kept.iter().fold(BytesMut::new(), |mut all, chunk| {
                    all.extend_from_slice(chunk);
                    all
                });
                assert_eq!(kept, if memory.is_some() { "" } else { "234567" });
            }
            assert_eq!(*six.0.lock().unwrap(), *b"234567");
        }
    }
}
