//! Doorbells: eventfds that count bytes of ring entries.
//!
//! A doorbell that a peer made is checked when it comes ([`Doorbell::of_peer`]): writing to anything else than an eventfd that
//! does not block might block the thread of the engine for as long as the peer likes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::task::{Context, Poll, ready};

use rustix::event::EventfdFlags;
use tokio::io::unix::AsyncFd;

use crate::{Bell, ChannelError, Result};

/// An eventfd. Ringing adds to its count, waiting takes the count and sets it to zero.
#[derive(Debug)]
pub struct Doorbell {
    fd: AsyncFd<OwnedFd>,
}

impl Doorbell {
    /// A new eventfd, to be handed to whoever rings or waits.
    ///
    /// # Errors
    /// If the process is out of file descriptors.
    pub fn create() -> io::Result<OwnedFd> {
        Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
    }

    /// A doorbell that came from a peer, made not to block. That keeps out what blocks by mistake or by what it is. The flag
    /// belongs to both sides, though: a peer that takes it back later and fills the count up to its end still holds up whoever
    /// rings, and Linux has no write to an eventfd that could not be held up so.
    ///
    /// # Errors
    /// [`ChannelError::Protocol`] if it is no eventfd.
    pub(crate) fn of_peer(fd: OwnedFd) -> Result<OwnedFd> {
        let what = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        if what.as_os_str() != "anon_inode:[eventfd]" {
            let why = format!("a doorbell must be an eventfd, the peer sent {}", what.display());
            return Err(ChannelError::protocol(why));
        }
        do_not_block(&fd)?;
        Ok(fd)
    }

    /// Waits on `fd` in the current tokio runtime.
    ///
    /// # Errors
    /// If `fd` cannot be polled.
    pub fn new(fd: OwnedFd) -> io::Result<Doorbell> {
        do_not_block(&fd)?;
        #[expect(
            deprecated,
            reason = "its replacement is unsafe; an OwnedFd always gives the same descriptor"
        )]
        let fd = AsyncFd::with_interest(fd, tokio::io::Interest::READABLE)?;
        Ok(Doorbell { fd })
    }

    /// Adds `count` to the doorbell `fd`, which must not block. A doorbell that is full already need not be rung again.
    ///
    /// # Errors
    /// If `fd` is no eventfd.
    pub fn ring(fd: BorrowedFd<'_>, count: u64) -> io::Result<()> {
        match rustix::io::write(fd, &count.to_ne_bytes()) {
            Ok(8) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Ok(n) => Err(io::Error::other(format!("a doorbell took {n} bytes"))),
            Err(e) => Err(e.into()),
        }
    }
}

fn do_not_block(fd: &OwnedFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}

impl Bell for Doorbell {
    fn poll_wait(&self, cx: &mut Context<'_>) -> Poll<io::Result<u64>> {
        loop {
            let mut guard = ready!(self.fd.poll_read_ready(cx))?;
            let mut count = [0; 8];
            match rustix::io::read(self.fd.as_fd(), &mut count) {
                Ok(8) => {
                    // Reading emptied the eventfd, and its edge-triggered readiness with it.
                    guard.clear_ready();
                    return Poll::Ready(Ok(u64::from_ne_bytes(count)));
                }
                Ok(n) => return Poll::Ready(Err(io::Error::other(format!("a doorbell gave {n} bytes")))),
                Err(rustix::io::Errno::AGAIN) => guard.clear_ready(),
                Err(e) => return Poll::Ready(Err(e.into())),
            }
        }
    }
}
