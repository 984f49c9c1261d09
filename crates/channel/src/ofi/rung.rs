//! The doorbell counts of a peer, which the engine's thread passes to the callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use futures::task::AtomicWaker;

use crate::Bell;

/// The sum of the peer's doorbell counts that no caller has taken yet.
#[derive(Default)]
pub(super) struct Rung {
    count: AtomicU64,
    closed: AtomicBool,
    /// Whether the peer was detached, so that no caller waits.
    detached: AtomicBool,
    waker: AtomicWaker,
}

impl Rung {
    pub(super) fn ring(&self, count: u64) {
        self.count.fetch_add(count, Ordering::AcqRel);
        self.waker.wake();
    }

    /// Marks the peer as detached.
    pub(super) fn detach(&self) {
        self.detached.store(true, Ordering::Release);
    }

    pub(super) fn is_detached(&self) -> bool {
        self.detached.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// The doorbell of this side, on which callers wait.
pub(super) struct OfiBell(pub(super) Arc<Rung>);

impl Bell for OfiBell {
    fn poll_wait(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<u64>> {
        self.0.waker.register(cx.waker());
        let closed = self.0.closed.load(Ordering::Acquire);
        match self.0.count.swap(0, Ordering::AcqRel) {
            0 if closed => Poll::Ready(Err(std::io::ErrorKind::ConnectionReset.into())),
            0 => Poll::Pending,
            count => Poll::Ready(Ok(count)),
        }
    }
}
