//! Which arena some bytes are part of: for devices that want to know the memory they send from, while data travels as
//! [`bytes::Bytes`], which does not say.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::mem::Arena;

/// By address of the first byte. Arenas do not overlap; those that are gone leave a weak handle, until the next one comes.
static ARENAS: Mutex<BTreeMap<usize, Weak<Arena>>> = Mutex::new(BTreeMap::new());

fn arenas() -> MutexGuard<'static, BTreeMap<usize, Weak<Arena>>> {
    // Nothing panics while it holds the lock.
    ARENAS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new arena.
pub(crate) fn enter(arena: &Arc<Arena>) {
    let mut arenas = arenas();
    arenas.retain(|_, arena| arena.strong_count() > 0);
    arenas.insert(arena.as_raw().0 as usize, Arc::downgrade(arena));
}

/// The arena of this process that `bytes` are wholly part of.
#[must_use]
pub fn containing(bytes: &[u8]) -> Option<Arc<Arena>> {
    let start = bytes.as_ptr() as usize;
    let arena = arenas().range(..=start).next_back().and_then(|(_, arena)| arena.upgrade())?;
    arena.offset_of(bytes).map(|_| arena)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::BufferPool;

    #[test]
    fn bytes_are_found_in_their_arena_and_in_no_other() {
        let arenas = [Arena::anonymous(1 << 20).unwrap(), Arena::anonymous(1 << 20).unwrap()];
        for arena in &arenas {
            let pool = BufferPool::new(Arc::clone(arena), 0, 64 << 10);
            let bytes = pool.try_alloc(5000).unwrap().unwrap().freeze();
            assert!(Arc::ptr_eq(&containing(&bytes[10..4000]).unwrap(), arena));
        }
        assert!(containing(&[1, 2, 3]).is_none());
        let bytes = BufferPool::new(Arena::anonymous(1 << 20).unwrap(), 0, 4096).try_alloc(1).unwrap();
        assert!(containing(&bytes.unwrap()).is_some());
    }
}
