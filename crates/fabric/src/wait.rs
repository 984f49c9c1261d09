//! Waiting for events of queues and descriptors.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::{Fabric, Result, Waitable};

/// Sleeps until a queue of `queues` may have an entry, a descriptor of `others` can be read, or
/// `timeout` has passed. Returns at once if a queue must be read first, because its descriptor
/// would not become readable. The function may also return without an event.
///
/// # Errors
/// If the provider or the system reports an error, which means that a descriptor is invalid.
pub fn wait(
    fabric: &Fabric,
    queues: &[&dyn Waitable],
    others: &[BorrowedFd<'_>],
    timeout: Option<Duration>,
) -> Result<()> {
    if !fabric.may_sleep(queues)? {
        return Ok(());
    }
    let all = queues.iter().map(|queue| queue.wait_fd()).chain(others.iter().copied());
    let mut fds: Vec<PollFd<'_>> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(fabric.call_error("poll", e.raw_os_error())),
    }
}
