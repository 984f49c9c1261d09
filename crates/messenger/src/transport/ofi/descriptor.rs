//! Integration of libfabric's queues into the runtime's event loop.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use fabric::Waitable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A queue with its file descriptor. The descriptor stays open as long as this value exists.
pub(super) struct Descriptor<Q>(Q);

impl<Q: Waitable> Descriptor<Q> {
    /// Registers the queue's descriptor with this thread's runtime, which then reports when it
    /// becomes readable.
    pub(super) fn register(queue: Q) -> std::io::Result<AsyncFd<Descriptor<Q>>> {
        #[expect(
            deprecated,
            reason = "the replacement is unsafe; a queue's descriptor never changes and stays open as long as the queue"
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

/// Whether a descriptor is readable now. The runtime reports only changes. Events that the provider
/// has not yet read from the system cause no change, so the runtime does not report them.
pub(super) fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    !matches!(poll(&mut fds, Some(&now)), Ok(0))
}
