//! Where the node pushes the data of a read.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use base::block::Payload;
use bytes::Bytes;
use messenger::BulkSink;

/// Up to that many bytes are copied, larger chunks kept as they came.
const COPY_MAX_BYTES: usize = 16 << 10;

/// Keeps what arrives, in order.
#[derive(Debug)]
pub(crate) struct ChunkSink {
    len: u64,
    chunks: Mutex<BTreeMap<u64, Bytes>>,
}

impl ChunkSink {
    pub(crate) fn new(len: u64) -> ChunkSink {
        ChunkSink { len, chunks: Mutex::default() }
    }

    /// What arrived, if it is exactly the first `sent` bytes.
    pub(crate) fn take(&self, sent: u64) -> Option<Vec<Bytes>> {
        let chunks = std::mem::take(&mut *self.chunks.lock().unwrap_or_else(PoisonError::into_inner));
        let mut at = 0;
        for (offset, chunk) in &chunks {
            if *offset != at {
                return None;
            }
            at += chunk.len() as u64;
        }
        (at == sent).then(|| chunks.into_values().collect())
    }
}

impl BulkSink for ChunkSink {
    fn len(&self) -> u64 {
        self.len
    }

    fn write(&self, offset: u64, payload: Payload) -> bool {
        let data = match payload.len() {
            // What is kept of a message would keep all of it.
            few if few <= COPY_MAX_BYTES => Bytes::copy_from_slice(payload.data()),
            _ => payload.into_parts().0,
        };
        let Some(end) = offset.checked_add(data.len() as u64).filter(|end| *end <= self.len) else {
            return false;
        };
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        let before = chunks.range(..end).next_back().map_or(0, |(at, chunk)| at + chunk.len() as u64);
        if before > offset {
            return false;
        }
        if !data.is_empty() {
            chunks.insert(offset, data);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(len: usize) -> Payload {
        Payload::compute(0, vec![7; len].into())
    }

    #[test]
    fn chunks_may_come_in_any_order_but_never_overlap() {
        let sink = ChunkSink::new(100);
        assert!(sink.write(50, piece(50)));
        assert!(!sink.write(40, piece(20)), "overlaps from below");
        assert!(!sink.write(99, piece(1)), "overlaps from above");
        assert!(!sink.write(90, piece(20)), "beyond the end");
        assert!(!sink.write(u64::MAX, piece(2)), "overflow");
        assert!(sink.write(0, piece(50)));
        assert_eq!(sink.take(100).unwrap().iter().map(Bytes::len).sum::<usize>(), 100);
        assert!(sink.take(1).is_none());
    }
}
