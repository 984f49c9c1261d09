//! Wakes a thread that sleeps on file descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{Doorbell, Result};

/// An eventfd that wakes a thread. Waking costs a system call only if the thread sleeps.
pub(super) struct Alarm {
    sleeping: AtomicBool,
    fd: OwnedFd,
}

impl Alarm {
    pub(super) fn new() -> Result<Alarm> {
        Ok(Alarm { sleeping: AtomicBool::new(false), fd: Doorbell::create()? })
    }

    /// Wakes the thread. Call it after new work is visible to the thread. The fence pairs with the
    /// fence in [`sleep`](Self::sleep): either the thread sees the work, or this call sees that the
    /// thread sleeps.
    pub(super) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::AcqRel) {
            self.ring();
        }
    }

    fn ring(&self) {
        if let Err(e) = Doorbell::ring(self.fd.as_fd(), 1) {
            tracing::error!("a thread of engine ofi cannot be woken: {e}");
        }
    }

    /// Runs `wait` with the descriptor that wakes the thread, unless `has_work` already returns
    /// true.
    pub(super) fn sleep(&self, has_work: impl FnOnce() -> bool, wait: impl FnOnce(BorrowedFd<'_>)) {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !has_work() {
            wait(self.fd.as_fd());
        }
        self.sleeping.store(false, Ordering::Relaxed);
        take_count(self.fd.as_fd());
    }
}

/// Sleeps until `fd` is readable or `timeout` has passed.
pub(super) fn wait_for(fd: BorrowedFd<'_>, timeout: Option<Duration>) {
    let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
    // The caller checks for work even if `poll` fails; ignore the error.
    let _ = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], timeout.as_ref());
}

/// Returns the count of an eventfd and resets it to zero.
pub(super) fn take_count(fd: BorrowedFd<'_>) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(8) => u64::from_ne_bytes(count),
        _ => 0,
    }
}
