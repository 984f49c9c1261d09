//! [`SendLimits`]: the limits on what this side may send before the peer answers.

use tokio::sync::{AcquireError, Semaphore, SemaphorePermit};

use crate::config::{BULK_SLOTS, ConnectionConfig, MAX_PULLS};

/// Error: the connection has ended, so its limits are closed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LimitsClosed;

impl From<AcquireError> for LimitsClosed {
    fn from(_: AcquireError) -> LimitsClosed {
        LimitsClosed
    }
}

/// The limits on what this side may send before the peer answers. Each limit is a pool, and callers
/// wait in the order of their calls. Any thread may use this type.
pub(super) struct SendLimits {
    /// Credit for messages that the peer granted, in bytes.
    message_credit: CreditPool,
    /// Number of bytes of pushed data that may still be sent before the peer acknowledges earlier
    /// pushes.
    push_room: CreditPool,
    /// Free slots in the queue of bulk chunks. The pool is fair, so the active transfers alternate.
    bulk_slots: CreditPool,
    pull_slots: CreditPool,
}

/// A part of a limit that a caller holds. Dropping it returns the part, unless it was spent.
#[must_use = "dropping this value returns the credit"]
pub(super) struct HeldCredit<'a>(SemaphorePermit<'a>);

/// The bulk slots of chunks that are being sent. Dropping this value frees the slots, even if the
/// sending was cancelled.
pub(super) struct BulkSlotsInUse<'a> {
    limits: &'a SendLimits,
    count: usize,
}

/// Credit that never exceeds a maximum.
struct CreditPool {
    available: Semaphore,
    max: usize,
}

impl SendLimits {
    /// Creates the limits of a new connection, with `message_credit` bytes of credit for messages.
    pub(super) fn new(message_credit: usize, config: &ConnectionConfig) -> SendLimits {
        let push_window_bytes = config.push_window_bytes as usize;
        SendLimits {
            message_credit: CreditPool::new(message_credit, config.window_bytes as usize),
            push_room: CreditPool::new(push_window_bytes, push_window_bytes),
            bulk_slots: CreditPool::new(BULK_SLOTS, BULK_SLOTS),
            pull_slots: CreditPool::new(MAX_PULLS, MAX_PULLS),
        }
    }

    /// Waits for the credit of a message that uses `bytes` bytes.
    pub(super) async fn message_credit(&self, bytes: u32) -> Result<HeldCredit<'_>, LimitsClosed> {
        self.message_credit.take(bytes).await
    }

    /// Waits until `bytes` bytes may be pushed.
    pub(super) async fn push_room(&self, bytes: u32) -> Result<HeldCredit<'_>, LimitsClosed> {
        self.push_room.take(bytes).await
    }

    /// Waits for a slot in the queue of bulk chunks. The slot of a queued chunk must be spent, and
    /// [freed](Self::free_bulk_slots) once the chunk has left the queue.
    pub(super) async fn bulk_slot(&self) -> Result<HeldCredit<'_>, LimitsClosed> {
        self.bulk_slots.take(1).await
    }

    /// Waits until one more pull may be in progress. The pull must keep the slot until its end.
    pub(super) async fn pull_slot(&self) -> Result<HeldCredit<'_>, LimitsClosed> {
        self.pull_slots.take(1).await
    }

    /// Adds credit for messages, in bytes.
    pub(super) fn add_message_credit(&self, bytes: usize) {
        self.message_credit.add(bytes);
    }

    /// Records that the peer has acknowledged `bytes` bytes of pushed data.
    pub(super) fn add_push_room(&self, bytes: usize) {
        self.push_room.add(bytes);
    }

    /// Frees the slots of `count` chunks that have left the queue of bulk chunks.
    pub(super) fn free_bulk_slots(&self, count: usize) {
        self.bulk_slots.add(count);
    }

    /// Frees the slots of `count` chunks once the returned value is dropped.
    pub(super) fn bulk_slots_in_use(&self, count: usize) -> BulkSlotsInUse<'_> {
        BulkSlotsInUse { limits: self, count }
    }

    /// Fails all waiting and later callers, because the connection has ended.
    pub(super) fn close(&self) {
        for pool in [&self.message_credit, &self.push_room, &self.bulk_slots, &self.pull_slots] {
            pool.available.close();
        }
    }
}

impl HeldCredit<'_> {
    /// Uses the credit up. Only an answer of the peer or the end of the chunk returns it.
    pub(super) fn spend(self) {
        self.0.forget();
    }
}

impl Drop for BulkSlotsInUse<'_> {
    fn drop(&mut self) {
        self.limits.free_bulk_slots(self.count);
    }
}

impl CreditPool {
    fn new(available: usize, max: usize) -> CreditPool {
        assert!(available <= max, "{available} units of credit exceed the limit of {max}");
        CreditPool { available: Semaphore::new(available), max }
    }

    async fn take(&self, amount: u32) -> Result<HeldCredit<'_>, LimitsClosed> {
        Ok(HeldCredit(self.available.acquire_many(amount).await?))
    }

    fn add(&self, amount: usize) {
        if amount == 0 {
            return;
        }
        self.available.add_permits(amount);
        let available = self.available.available_permits();
        assert!(available <= self.max, "{available} units of credit exceed the limit of {}", self.max);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn limits() -> SendLimits {
        SendLimits::new(10_000, &ConnectionConfig::default())
    }

    #[test]
    fn unspent_credit_returns_and_spent_credit_does_not() {
        let limits = limits();
        let take = |bytes| limits.message_credit(bytes).now_or_never();
        drop(take(10_000).expect("there is credit"));
        take(6000).expect("there is credit").expect("the limits are open").spend();
        assert!(take(6000).is_none(), "only 4000 bytes are left");
        limits.add_message_credit(2000);
        assert!(take(6000).is_some());
    }

    #[test]
    fn the_slots_of_a_batch_are_freed_when_its_write_ends() {
        let limits = limits();
        let take = || limits.bulk_slot().now_or_never();
        for _ in 0..BULK_SLOTS {
            take().expect("a slot is free").expect("the limits are open").spend();
        }
        let in_use = limits.bulk_slots_in_use(2);
        assert!(take().is_none(), "all slots are in use");
        drop(in_use);
        assert!(take().is_some());
    }

    #[test]
    fn callers_that_wait_fail_when_the_limits_are_closed() {
        let limits = limits();
        let mut waiting = Box::pin(limits.message_credit(20_000));
        assert!((&mut waiting).now_or_never().is_none());
        limits.close();
        assert!(matches!(waiting.now_or_never(), Some(Err(LimitsClosed))));
        assert!(matches!(limits.pull_slot().now_or_never(), Some(Err(LimitsClosed))));
        limits.add_message_credit(1);
    }

    #[test]
    #[should_panic(expected = "exceed the limit")]
    fn credit_above_the_window_is_a_bug() {
        limits().add_push_room(1);
    }
}
