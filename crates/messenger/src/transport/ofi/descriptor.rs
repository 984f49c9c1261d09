//! Integration of libfabric's queues into the runtime's event loop.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use fabric::Waitable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The descriptor of a queue, which stays open as long as this.
pub(super) struct Descriptor<Q>(Q);

impl<Q: Waitable> Descriptor<Q> {
    /// Has this thread's runtime watch the queue.
    pub(super) fn register(queue: Q) -> std::io::Result<AsyncFd<Descriptor<Q>>> {
        #[expect(
            deprecated,
            reason = "its replacement is unsafe; a queue always gives the same descriptor, which is open as long as it"
        )]
        AsyncFd::with_interest(Descriptor(queue), Interest::READABLE)
    }
}

impl<Q: Waitable> AsRawFd for Descriptor<Q> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.wait_fd().as_raw_fd()
    }
}

impl<Q: Waitable> AsFd for Descriptor<Q> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.wait_fd()
    }
}

/// Whether a descriptor can be read now. The runtime's own notification tells of changes only, and what the provider has not
/// taken from the system makes none.
pub(super) fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    !matches!(poll(&mut fds, Some(&now)), Ok(0))
}
