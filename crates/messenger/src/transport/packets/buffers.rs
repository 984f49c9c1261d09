//! Memory for packets. All connections of a stack share one pool, which grows as needed. Each
//! protection domain that uses the pool registers its memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::mem::{Arena, ArenaBuf};
use base::pool::BufferPool;

use super::packet::PACKET_BYTES;

/// Number of bytes by which the pool grows.
const CHUNK_BYTES: usize = 2 << 20;

/// Part of each chunk that is reserved for sending, in bytes. A receiver can keep its packets for
/// any time, and may first have to send something before it can release them. The buffers of sent
/// packets always become free soon.
const SENDING_BYTES: usize = CHUNK_BYTES / 8;

/// A pool of buffers of [`PACKET_BYTES`] each.
pub(crate) struct Buffers {
    state: Mutex<State>,
    max_chunks: usize,
}

#[derive(Default)]
struct State {
    chunks: Vec<BufferPool>,
    /// Index of the chunk that supplied the last buffer.
    last: usize,
}

impl Buffers {
    /// Creates a pool of at most `max_bytes`, rounded up to whole chunks.
    pub(in crate::transport) fn new(max_bytes: usize) -> Buffers {
        Buffers { state: Mutex::default(), max_chunks: max_bytes.div_ceil(CHUNK_BYTES).max(1) }
    }

    /// Maximum number of buffers for packets to receive.
    pub(in crate::transport) fn receives_max(&self) -> usize {
        self.max_chunks * (CHUNK_BYTES - SENDING_BYTES) / PACKET_BYTES
    }

    /// Takes a buffer for a packet to send. Returns `None` if all buffers are in use and the pool
    /// cannot grow, because it has reached its maximum size or the system lacks memory.
    pub(in crate::transport) fn take(&self) -> Option<ArenaBuf> {
        self.take_above(0)
    }

    /// Takes a buffer for a further packet to receive. Returns `None` if only the buffers that are
    /// reserved for sending are free, and the pool cannot grow.
    pub(in crate::transport) fn take_to_receive(&self) -> Option<ArenaBuf> {
        self.take_above(SENDING_BYTES)
    }

    /// Takes a buffer from a chunk with more than `kept` free bytes.
    fn take_above(&self, kept: usize) -> Option<ArenaBuf> {
        let mut state = self.lock();
        let State { chunks, last } = &mut *state;
        for at in (*last..chunks.len()).chain(0..*last) {
            if (kept == 0 || chunks[at].free_bytes().0 > kept)
                && let Ok(Some(buf)) = chunks[at].try_alloc(PACKET_BYTES)
            {
                *last = at;
                return Some(buf);
            }
        }
        if chunks.len() == self.max_chunks {
            return None;
        }
        // Use small pages, because the packets of idle connections use only a part of each buffer.
        let arena = Arena::by_pages(CHUNK_BYTES);
        let arena = arena.inspect_err(|e| tracing::warn!("cannot allocate memory for packets: {e}")).ok()?;
        let chunk = BufferPool::new(arena, 0, PACKET_BYTES);
        let buf = chunk.try_alloc(PACKET_BYTES).ok()?;
        *last = chunks.len();
        chunks.push(chunk);
        buf
    }

    /// Whether more than half of the pool's maximum size is free.
    pub(in crate::transport) fn are_plenty(&self) -> bool {
        let chunks = &self.lock().chunks;
        let free: usize = chunks.iter().map(|chunk| chunk.free_bytes().0).sum();
        free + (self.max_chunks - chunks.len()) * CHUNK_BYTES > self.max_chunks * CHUNK_BYTES / 2
    }

    /// Whether `arena` is part of the pool.
    pub(in crate::transport) fn own(&self, arena: &Arc<Arena>) -> bool {
        self.lock().chunks.iter().any(|chunk| Arc::ptr_eq(chunk.arena(), arena))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics in the middle of a change, so a poisoned mutex is safe to use.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_grows_to_its_limit_and_reuses_returned_buffers() {
        let buffers = Buffers::new(2 * CHUNK_BYTES);
        let most = 2 * CHUNK_BYTES / PACKET_BYTES;
        let mut taken: Vec<ArenaBuf> = std::iter::from_fn(|| buffers.take_to_receive()).collect();
        assert_eq!(taken.len(), most - 2 * SENDING_BYTES / PACKET_BYTES);
        assert_eq!(taken.len(), buffers.receives_max());
        taken.extend(std::iter::from_fn(|| buffers.take()));
        assert_eq!(taken.len(), most);
        assert!(!buffers.are_plenty());
        taken.truncate(most / 4);
        assert!(buffers.are_plenty() && buffers.take_to_receive().is_some());
    }
}
