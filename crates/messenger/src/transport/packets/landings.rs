//! Memory that peers write to by one-sided transfers. A single pool owns and reuses this
//! memory. A request that does not fit into the pool gets separate memory.

use std::sync::OnceLock;

use base::mem::{Arena, ArenaBuf};
use base::pool::BufferPool;

/// Size of the pool, in bytes.
const POOL_BYTES: usize = 64 << 20;

/// Maximum size of a buffer from the pool, in bytes.
const LARGEST_BYTES: usize = 16 << 20;

#[derive(Default)]
pub(crate) struct Landings {
    /// Created at the first request, because a server exposes no memory and needs no pool. The
    /// inner value is `None` if the system had no memory for the pool.
    pool: OnceLock<Option<BufferPool>>,
}

impl Landings {
    /// Takes a buffer of `len` bytes. Returns `None` if the system lacks this much memory.
    pub(in crate::transport) fn take(&self, len: usize) -> Option<ArenaBuf> {
        let pool = self.pool.get_or_init(|| {
            let arena = Arena::anonymous(POOL_BYTES).ok()?;
            Some(BufferPool::new(arena, 0, LARGEST_BYTES))
        });
        let pooled = pool.as_ref().and_then(|pool| pool.try_alloc(len).ok().flatten());
        pooled.or_else(|| {
            let whole = len.checked_next_power_of_two()?.max(base::pool::MIN_BUFFER);
            let own = BufferPool::new(Arena::anonymous(whole).ok()?, 0, whole);
            own.try_alloc(len).ok().flatten()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_do_not_fit_into_the_pool_get_separate_memory() {
        let landings = Landings::default();
        let taken: Vec<ArenaBuf> = (0..6).filter_map(|_| landings.take(LARGEST_BYTES - 1)).collect();
        assert_eq!(taken.len(), 6);
        assert_eq!(landings.take(LARGEST_BYTES + 1).map(|buf| buf.len()), Some(LARGEST_BYTES + 1));
    }
}
