//! Allocators over an [`Arena`]: the pool of staging buffers, and ranges that a peer allocates.
//!
//! [`BufferPool`] is a buddy allocator, so buffers are naturally aligned and fragmentation is
//! bounded. A request for more memory than is free waits in a queue, which bounds memory use under
//! load. A [`Lease`] covers memory that the peer allocates. This process only checks that no two
//! ranges in use overlap.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::buddy::Buddy;
use crate::mem::{Arena, ArenaBuf};

/// Size of the smallest buffer of a pool, in bytes. The pool rounds each requested size up to a
/// power of two.
pub const MIN_BUFFER: usize = 4096;

/// Size of a guard, in bytes. A guard is a part of a free buffer. Builds with debug assertions check
/// that its content does not change, to find writes into free buffers.
const GUARD: usize = 16;
/// Distance of the guards in a buffer, in bytes. A smaller distance would touch unused pages.
const GUARD_DISTANCE: usize = 64 << 10;

/// Why a pool cannot provide a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The requested size exceeds the largest buffer of the pool.
    #[error(
        "a buffer of {wanted} bytes exceeds the largest buffer of this pool, {largest} bytes; split the request"
    )]
    TooLarge {
        /// Requested size, in bytes.
        wanted: usize,
        /// Size of the largest buffer, in bytes.
        largest: usize,
    },
}

/// A pool of aligned buffers, 4 KiB to `largest` bytes each, in one arena. Clones share the pool.
#[derive(Clone, Debug)]
pub struct BufferPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    arena: Arc<Arena>,
    origin: usize,
    largest: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The free ranges. Their offsets are counted from `origin`.
    free: Buddy,
    waiters: VecDeque<(usize, oneshot::Sender<Grant>)>,
    low_water_bytes: usize,
    /// Offset and content of each guard.
    guards: BTreeMap<usize, [u8; GUARD]>,
}

/// A granted range. It returns to the pool if the waiter is cancelled before it takes the range.
#[derive(Debug)]
struct Grant {
    shared: Option<Arc<Shared>>,
    offset: usize,
    order: usize,
}

impl Grant {
    fn into_buf(mut self, len: usize) -> ArenaBuf {
        let shared = self.shared.take().expect("a grant is converted only once");
        let (offset, order) = (self.offset, self.order);
        let owner = Arc::clone(&shared);
        // SAFETY: the arena assigned the range to the pool in `BufferPool::new`. The buddy
        // allocator has allocated the range, and frees it only in `release`.
        unsafe {
            shared.arena.carve(
                shared.origin + offset,
                len,
                Box::new(move || Shared::release(&owner, offset, order)),
            )
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            Shared::release(&shared, self.offset, self.order);
        }
    }
}

/// A caller's position in the queue for buffers. If the caller is cancelled, the pool serves the
/// callers behind it.
struct BufferWaiter<'a> {
    shared: &'a Arc<Shared>,
    grant: oneshot::Receiver<Grant>,
    has_come: bool,
}

impl Drop for BufferWaiter<'_> {
    fn drop(&mut self) {
        if !self.has_come {
            self.grant.close();
            Shared::serve(self.shared, self.shared.lock());
        }
    }
}

impl State {
    /// Returns true if the queue contains a waiter that was not cancelled.
    fn has_waiters(&mut self) -> bool {
        while self.waiters.front().is_some_and(|(_, waiter)| waiter.is_closed()) {
            self.waiters.pop_front();
        }
        !self.waiters.is_empty()
    }
}

impl BufferPool {
    /// Creates a pool over bytes `origin..` of `arena`, with buffers of up to `largest` bytes.
    ///
    /// If the rest at the end of the arena is smaller than `largest`, it stays unused.
    ///
    /// # Panics
    /// If `largest` is not a power of two of at least [`MIN_BUFFER`], or `origin` is not a multiple
    /// of [`MIN_BUFFER`], or the arena has no space for a buffer of `largest` bytes. Also if a page
    /// from `origin` on is already in use: it belongs to another allocator, or bytes of it were
    /// [copied](Arena::copy_in).
    #[must_use]
    pub fn new(arena: Arc<Arena>, origin: usize, largest: usize) -> BufferPool {
        assert!(origin.is_multiple_of(MIN_BUFFER), "the pool must start at a page boundary");
        let free = Buddy::new(arena.len().saturating_sub(origin), MIN_BUFFER, largest);
        let low_water_bytes = free.free_bytes();
        arena.allocate_from(origin, low_water_bytes);
        let state =
            Mutex::new(State { free, waiters: VecDeque::new(), low_water_bytes, guards: BTreeMap::new() });
        BufferPool { shared: Arc::new(Shared { arena, origin, largest, state }) }
    }

    /// The arena that contains the buffers.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.shared.arena
    }

    /// Size of the largest buffer, in bytes.
    #[must_use]
    pub fn largest(&self) -> usize {
        self.shared.largest
    }

    /// Returns the bytes free now, and the lowest number of free bytes so far.
    #[must_use]
    pub fn free_bytes(&self) -> (usize, usize) {
        let state = self.shared.lock();
        (state.free.free_bytes(), state.low_water_bytes)
    }

    /// Returns a buffer of `len` bytes if one is free and no caller waits. Its content is
    /// arbitrary.
    ///
    /// # Errors
    /// [`PoolError::TooLarge`] if `len` exceeds the largest buffer.
    pub fn try_alloc(&self, len: usize) -> Result<Option<ArenaBuf>, PoolError> {
        let order = self.order_of(len)?;
        let mut state = self.shared.lock();
        if state.has_waiters() {
            return Ok(None);
        }
        let grant = Shared::take(&self.shared, &mut state, order);
        drop(state);
        Ok(grant.map(|g| g.into_buf(len)))
    }

    /// Returns a buffer of `len` bytes. Waits in the queue until a buffer is free. Its content is
    /// arbitrary. Cancel safe.
    ///
    /// # Errors
    /// [`PoolError::TooLarge`] if `len` exceeds the largest buffer.
    pub async fn alloc(&self, len: usize) -> Result<ArenaBuf, PoolError> {
        let order = self.order_of(len)?;
        let mut turn = {
            let mut state = self.shared.lock();
            let now = if state.has_waiters() { None } else { Shared::take(&self.shared, &mut state, order) };
            match now {
                Some(grant) => {
                    drop(state);
                    return Ok(grant.into_buf(len));
                }
                None => {
                    let (tx, rx) = oneshot::channel();
                    state.waiters.push_back((order, tx));
                    BufferWaiter { shared: &self.shared, grant: rx, has_come: false }
                }
            }
        };
        let grant =
            (&mut turn.grant).await.expect("a waiter leaves the queue only with a grant or when cancelled");
        turn.has_come = true;
        Ok(grant.into_buf(len))
    }

    fn order_of(&self, len: usize) -> Result<usize, PoolError> {
        self.shared
            .lock()
            .free
            .order_of(len)
            .ok_or(PoolError::TooLarge { wanted: len, largest: self.largest() })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic can leave the lists half changed, so ignore that the lock is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(this: &Arc<Self>, state: &mut State, order: usize) -> Option<Grant> {
        let offset = state.free.take(order)?;
        if cfg!(debug_assertions) {
            let range = this.whole(offset, order);
            let mut guards = state.guards.split_off(&offset);
            state.guards.append(&mut guards.split_off(&(offset + range.len())));
            for (guard, before) in guards {
                let at = guard - offset;
                assert_eq!(range[at..at + GUARD], before, "a free buffer at {guard} was written");
            }
        }
        state.low_water_bytes = state.low_water_bytes.min(state.free.free_bytes());
        Some(Grant { shared: Some(Arc::clone(this)), offset, order })
    }

    fn release(this: &Arc<Self>, offset: usize, order: usize) {
        let mut state = this.lock();
        if cfg!(debug_assertions) {
            let range = this.whole(offset, order);
            for at in (0..range.len()).step_by(GUARD_DISTANCE) {
                let guard = range[at..at + GUARD].try_into().expect("the range has this size");
                state.guards.insert(offset + at, guard);
            }
        }
        state.free.release(offset, order);
        Self::serve(this, state);
    }

    /// The memory of an allocated range for which no [`ArenaBuf`] exists.
    fn whole(&self, offset: usize, order: usize) -> ArenaBuf {
        // SAFETY: the arena assigned the range to the pool in `BufferPool::new`. The buddy allocator
        // has allocated the range. The two callers run before the range's buffer is made, and after
        // it was dropped.
        unsafe { self.arena.carve(self.origin + offset, MIN_BUFFER << order, Box::new(|| ())) }
    }

    /// Grants buffers to waiters in the order of the queue, while enough memory is free.
    fn serve(this: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let mut granted = Vec::new();
        while state.has_waiters()
            && let Some(&(wanted, _)) = state.waiters.front()
        {
            let Some(grant) = Self::take(this, &mut state, wanted) else { break };
            let (_, waiter) = state.waiters.pop_front().expect("the queue is not empty");
            granted.push((waiter, grant));
        }
        drop(state);
        for (waiter, grant) in granted {
            // A cancelled waiter drops its grant, and the range returns to the pool.
            drop(waiter.send(grant));
        }
    }
}

/// A region of an arena whose ranges a peer allocates. This process refuses a range that is outside
/// the region, or that is still in use.
#[derive(Clone, Debug)]
pub struct Lease {
    arena: Arc<Arena>,
    origin: usize,
    len: usize,
    in_use: Arc<Mutex<BTreeMap<usize, usize>>>,
}

/// Resolves when a claimed range of a [`Lease`] is free again.
#[derive(Debug)]
pub struct Released(oneshot::Receiver<()>);

impl Released {
    /// Waits until the last user of the range has dropped it.
    pub async fn wait(self) {
        // An error means that the sender was dropped. In this case, the range is free, too.
        let _ = self.0.await;
    }
}

/// Why a range of a [`Lease`] cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The range is empty, overflows, or is not inside the leased region.
    #[error(
        "the range of {len} bytes at offset {offset} is not inside the leased region of {region} bytes at offset {origin}"
    )]
    Outside {
        /// Offset of the range from the start of the arena, in bytes.
        offset: u64,
        /// Length of the range, in bytes.
        len: u64,
        /// Offset of the region from the start of the arena, in bytes.
        origin: usize,
        /// Length of the region, in bytes.
        region: usize,
    },
    /// The range overlaps another range that is still in use.
    #[error("the range of {len} bytes at offset {offset} overlaps a range that is still in use")]
    InUse {
        /// Offset of the range from the start of the arena, in bytes.
        offset: u64,
        /// Length of the range, in bytes.
        len: u64,
    },
}

impl Lease {
    /// Leases `len` bytes at `origin` of `arena`.
    ///
    /// # Panics
    /// If the region is not inside the arena, or one of its pages is in use already: it belongs to
    /// another allocator, or bytes of it were [copied](Arena::copy_in).
    #[must_use]
    pub fn new(arena: Arc<Arena>, origin: usize, len: usize) -> Lease {
        arena.allocate_from(origin, len);
        Lease { arena, origin, len, in_use: Arc::default() }
    }

    /// Claims the exclusive use of a range that a peer named. The returned [`Released`] resolves
    /// when the range is free again. Report the end of a call to the peer only after this, because
    /// the call's memory is in use until then.
    ///
    /// # Errors
    /// If the range is outside the region, or overlaps a range that is in use.
    pub fn claim(&self, offset: u64, len: u64) -> Result<(ArenaBuf, Released), LeaseError> {
        let outside = LeaseError::Outside { offset, len, origin: self.origin, region: self.len };
        let (Ok(start), Ok(size)) = (usize::try_from(offset), usize::try_from(len)) else {
            return Err(outside);
        };
        let end = start.checked_add(size).ok_or(outside)?;
        if size == 0 || start < self.origin || end > self.origin + self.len {
            return Err(outside);
        }
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        if in_use.range(..end).next_back().is_some_and(|(_, &last_end)| last_end > start) {
            return Err(LeaseError::InUse { offset, len });
        }
        in_use.insert(start, end);
        drop(in_use);
        let map = Arc::clone(&self.in_use);
        let (tx, rx) = oneshot::channel();
        let release = Box::new(move || {
            map.lock().unwrap_or_else(PoisonError::into_inner).remove(&start);
            // The receiver may have been dropped; ignore the error.
            let _ = tx.send(());
        });
        // SAFETY: the arena assigned the region to the lease in `Lease::new`, and `in_use` keeps
        // claimed ranges disjoint.
        Ok((unsafe { self.arena.carve(start, size, release) }, Released(rx)))
    }

    /// Returns the offset of `bytes` in the arena; `None` if `bytes` lies elsewhere.
    #[must_use]
    pub fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        self.arena.offset_of(bytes).map(|offset| offset as u64)
    }

    /// Number of ranges in use.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pool(buffers: usize) -> BufferPool {
        BufferPool::new(Arena::anonymous(buffers << 16).unwrap(), 0, 1 << 16)
    }

    #[test]
    fn frozen_bytes_return_their_buffer_when_the_last_clone_is_dropped() {
        let pool = pool(1);
        let mut buf = pool.try_alloc(1 << 16).unwrap().unwrap();
        buf[0] = 7;
        let bytes = buf.freeze();
        let part = bytes.slice(..10);
        drop(bytes);
        assert!(pool.try_alloc(1).unwrap().is_none());
        assert_eq!(pool.arena().offset_of(&part), Some(0));
        drop(part);
        assert_eq!(pool.free_bytes(), (1 << 16, 0));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic = "a free buffer at 0 was written"]
    fn a_write_into_a_free_buffer_is_found() {
        let pool = pool(1);
        drop(pool.try_alloc(1 << 16).unwrap());
        pool.shared.whole(0, 4)[8] = 7;
        drop(pool.try_alloc(1 << 16));
    }

    #[tokio::test]
    async fn a_pool_serves_waiters_in_order_and_a_cancelled_waiter_leaks_no_memory() {
        let pool = pool(1);
        let held = pool.try_alloc(1 << 16).unwrap().unwrap();
        let mut first = Box::pin(pool.alloc(1 << 16));
        let mut second = Box::pin(pool.alloc(4096));
        assert!(futures_poll(&mut first).is_none());
        assert!(futures_poll(&mut second).is_none(), "a small request does not overtake a large one");
        drop(held);
        drop(first);
        assert_eq!(second.await.unwrap().len(), 4096);
        assert_eq!(pool.free_bytes().0, 1 << 16);
    }

    #[tokio::test]
    async fn a_cancelled_waiter_does_not_block_the_waiters_behind_it() {
        let pool = pool(1);
        let held = pool.try_alloc(1 << 15).unwrap().unwrap();
        let mut first = Box::pin(pool.alloc(1 << 16));
        let mut second = Box::pin(pool.alloc(4096));
        assert!(futures_poll(&mut first).is_none() && futures_poll(&mut second).is_none());
        drop(first);
        assert!(futures_poll(&mut second).is_some(), "enough memory is free for the second waiter");
        let mut third = Box::pin(pool.alloc(1 << 16));
        assert!(futures_poll(&mut third).is_none());
        assert!(pool.try_alloc(4096).unwrap().is_none(), "try_alloc does not overtake a waiter");
        drop(third);
        assert!(pool.try_alloc(4096).unwrap().is_some(), "no waiter is left");
        drop(held);
        assert_eq!(pool.free_bytes().0, 1 << 16);
    }

    fn futures_poll<F: Future + Unpin>(f: &mut F) -> Option<F::Output> {
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(f).poll(&mut cx) {
            std::task::Poll::Ready(v) => Some(v),
            std::task::Poll::Pending => None,
        }
    }

    proptest! {
        #[test]
        fn buffers_never_overlap_and_all_memory_is_returned(sizes in proptest::collection::vec((1usize..70_000, 0usize..8), 1..80)) {
            let pool = pool(4);
            let mut held: Vec<ArenaBuf> = Vec::new();
            for (size, victim) in sizes {
                match pool.try_alloc(size) {
                    Ok(Some(buf)) => {
                        for other in &held {
                            prop_assert!(buf.offset() + buf.len() <= other.offset() || other.offset() + other.len() <= buf.offset());
                        }
                        held.push(buf);
                    }
                    Ok(None) => { if !held.is_empty() { held.swap_remove(victim % held.len()); } }
                    Err(PoolError::TooLarge { .. }) => prop_assert!(size > 1 << 16),
                }
            }
            held.clear();
            prop_assert_eq!(pool.free_bytes().0, 4 << 16);
            prop_assert!(pool.try_alloc(1 << 16).unwrap().is_some(), "buddies were merged");
        }
    }

    #[test]
    fn a_lease_refuses_ranges_outside_it_and_ranges_in_use() {
        let lease = Lease::new(Arena::anonymous(1 << 16).unwrap(), 4096, 8192);
        let (held, mut released) = lease.claim(4096, 4096).unwrap();
        assert!(matches!(lease.claim(8191, 2), Err(LeaseError::InUse { .. })));
        assert!(matches!(lease.claim(0, 4096), Err(LeaseError::Outside { .. })));
        assert!(matches!(lease.claim(8192, 4097), Err(LeaseError::Outside { .. })));
        assert!(matches!(lease.claim(u64::MAX, 2), Err(LeaseError::Outside { .. })));
        assert!(matches!(lease.claim(8192, 0), Err(LeaseError::Outside { .. })));
        let other = lease.claim(8192, 4096).unwrap();
        assert!(released.0.try_recv().is_err(), "the buffer is still held");
        let bytes = held.freeze();
        let clone = bytes.clone();
        drop((bytes, other));
        assert!(released.0.try_recv().is_err(), "a clone of the bytes still holds the range");
        drop(clone);
        assert!(released.0.try_recv().is_ok());
        assert_eq!(lease.in_use(), 0);
        assert!(lease.claim(4096, 8192).is_ok());
    }
}
