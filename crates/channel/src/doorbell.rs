//! Doorbells: eventfds whose count is the number of new bytes in a ring.
//!
//! [`Doorbell::of_peer`] checks a doorbell that a peer created. Without this check, the peer could
//! send another kind of descriptor or a blocking eventfd. A write to either of them could block the
//! engine's thread until the peer reads.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::task::{Context, Poll, ready};

use rustix::event::EventfdFlags;
use tokio::io::unix::AsyncFd;

use crate::{Bell, ChannelError, Result};

/// The waiting end of a doorbell: an eventfd. Ringing adds to its count. Waiting takes the count and
/// resets it to zero. In a simulation, a doorbell is a count in memory.
#[derive(Debug)]
pub struct Doorbell(WaitingEnd);

#[derive(Debug)]
enum WaitingEnd {
    Fd(AsyncFd<OwnedFd>),
    #[cfg(feature = "sim")]
    Sim(crate::sim::SimBell),
}

/// The ringing end of a doorbell.
#[derive(Debug)]
pub struct Ringer(RingingEnd);

#[derive(Debug)]
enum RingingEnd {
    Fd(OwnedFd),
    #[cfg(feature = "sim")]
    Sim(crate::sim::SimRinger),
}

impl Ringer {
    /// Adds `count` to the doorbell. See [`Doorbell::ring`].
    ///
    /// # Errors
    /// Fails if the descriptor is not an eventfd.
    pub fn ring(&self, count: u64) -> io::Result<()> {
        match &self.0 {
            RingingEnd::Fd(fd) => Doorbell::ring(fd.as_fd(), count),
            #[cfg(feature = "sim")]
            RingingEnd::Sim(ringer) => {
                ringer.ring(count);
                Ok(())
            }
        }
    }
}

impl From<OwnedFd> for Ringer {
    /// Rings a non-blocking eventfd.
    fn from(fd: OwnedFd) -> Ringer {
        Ringer(RingingEnd::Fd(fd))
    }
}

#[cfg(feature = "sim")]
impl From<crate::sim::SimRinger> for Ringer {
    fn from(ringer: crate::sim::SimRinger) -> Ringer {
        Ringer(RingingEnd::Sim(ringer))
    }
}

#[cfg(feature = "sim")]
impl From<crate::sim::SimBell> for Doorbell {
    fn from(bell: crate::sim::SimBell) -> Doorbell {
        Doorbell(WaitingEnd::Sim(bell))
    }
}

impl Doorbell {
    /// Creates an eventfd for the two sides of a doorbell.
    ///
    /// # Errors
    /// Fails if the process is out of file descriptors.
    pub fn create() -> io::Result<OwnedFd> {
        Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
    }

    /// Checks a peer's doorbell and makes it non-blocking. The check rejects other kinds of
    /// descriptors, and the flag prevents accidental blocking. Neither protects against a malicious
    /// peer: both sides share the flag `O_NONBLOCK`, so the peer can clear the flag later and fill
    /// the count. The next write to the eventfd then blocks, and Linux offers no other way to write
    /// to an eventfd.
    ///
    /// # Errors
    /// [`ChannelError::Protocol`] if the descriptor is not an eventfd.
    pub(crate) fn of_peer(fd: OwnedFd) -> Result<OwnedFd> {
        let what = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        if what.as_os_str() != "anon_inode:[eventfd]" {
            let why = format!("a doorbell must be an eventfd, but the peer sent {}", what.display());
            return Err(ChannelError::protocol(why));
        }
        do_not_block(&fd)?;
        Ok(fd)
    }

    /// Creates a doorbell that waits on `fd` in the current tokio runtime.
    ///
    /// # Errors
    /// Fails if `fd` cannot be polled.
    pub fn new(fd: OwnedFd) -> io::Result<Doorbell> {
        do_not_block(&fd)?;
        #[expect(
            deprecated,
            reason = "its replacement is unsafe; an OwnedFd always gives the same descriptor"
        )]
        let fd = AsyncFd::with_interest(fd, tokio::io::Interest::READABLE)?;
        Ok(Doorbell(WaitingEnd::Fd(fd)))
    }

    /// Adds `count` to the doorbell `fd`, which must be non-blocking. If the doorbell's count is at
    /// its maximum, the call succeeds without adding to it.
    ///
    /// # Errors
    /// Fails if `fd` is not an eventfd.
    pub fn ring(fd: BorrowedFd<'_>, count: u64) -> io::Result<()> {
        match rustix::io::write(fd, &count.to_ne_bytes()) {
            Ok(8) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Ok(n) => Err(io::Error::other(format!("a write to a doorbell took {n} of 8 bytes"))),
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
        match &self.0 {
            WaitingEnd::Fd(fd) => poll_eventfd(fd, cx),
            #[cfg(feature = "sim")]
            WaitingEnd::Sim(bell) => bell.poll_wait(cx),
        }
    }
}

/// Waits until the count of an eventfd is not zero, and takes the count.
fn poll_eventfd(fd: &AsyncFd<OwnedFd>, cx: &mut Context<'_>) -> Poll<io::Result<u64>> {
    loop {
        let mut guard = ready!(fd.poll_read_ready(cx))?;
        let mut count = [0; 8];
        match rustix::io::read(fd.as_fd(), &mut count) {
            Ok(8) => {
                // The read has emptied the eventfd, which also consumed its edge-triggered
                // readiness.
                guard.clear_ready();
                return Poll::Ready(Ok(u64::from_ne_bytes(count)));
            }
            Ok(n) => {
                let what = format!("a read of a doorbell returned {n} of 8 bytes");
                return Poll::Ready(Err(io::Error::other(what)));
            }
            Err(rustix::io::Errno::AGAIN) => guard.clear_ready(),
            Err(e) => return Poll::Ready(Err(e.into())),
        }
    }
}
