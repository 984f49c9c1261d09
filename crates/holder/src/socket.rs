//! A UNIX stream socket that carries messages with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use bytes::Bytes;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::framing::{Cutter, FramingViolation, RawMessage};
use crate::protocol::{CALL_FDS_MAX, HolderFrame, SharedFd};

/// Space for the descriptors of one read or write.
const FDS_SPACE: usize = rustix::cmsg_space!(ScmRights(CALL_FDS_MAX));
/// Pause before a write is repeated that had to wait for other readers.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(20);

/// The reason why no further message can be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    /// The peer has closed the connection, perhaps in the middle of a message.
    #[error("the peer has closed the connection")]
    Closed,
    /// The peer violates the framing.
    #[error(transparent)]
    Violation(#[from] FramingViolation),
    /// The operating system reports an error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A message that is being written.
#[derive(Debug)]
pub(crate) struct Sending {
    rest: Bytes,
    /// The descriptors, until the first bytes are written.
    fds: Vec<SharedFd>,
    is_begun: bool,
}

impl Sending {
    /// Prepares a message, which must not be empty.
    pub fn new(bytes: Bytes, fds: Vec<SharedFd>) -> Sending {
        assert!(!bytes.is_empty(), "descriptors travel with bytes");
        Sending { rest: bytes, fds, is_begun: false }
    }

    /// Whether a part of the message was written.
    pub fn is_begun(&self) -> bool {
        self.is_begun
    }

    fn wrote(&mut self, len: usize) {
        let _ = self.rest.split_to(len);
        self.is_begun = true;
        self.fds.clear();
    }
}

impl From<HolderFrame> for Sending {
    fn from(frame: HolderFrame) -> Sending {
        Sending::new(frame.bytes, frame.fds)
    }
}

/// A connected socket. One task may read while another one writes.
#[derive(Debug)]
pub(crate) struct FdStream(UnixStream);

impl FdStream {
    pub fn new(stream: UnixStream) -> FdStream {
        FdStream(stream)
    }

    /// Returns the effective uid that the peer had when it connected or listened.
    pub fn peer_uid(&self) -> io::Result<u32> {
        Ok(rustix::net::sockopt::socket_peercred(&self.0)?.uid.as_raw())
    }

    /// Reads until `cutter` has a complete message. This method is cancel safe: what was read stays in
    /// the cutter.
    pub async fn receive(&self, cutter: &mut Cutter) -> Result<RawMessage, ReceiveError> {
        loop {
            let fds_max = cutter.fds_left();
            let read =
                self.0.async_io(Interest::READABLE, || receive_once(self.0.as_fd(), cutter.space(), fds_max));
            let read = read.await?;
            if read.is_cut_off {
                return Err(cutter.fds_lost().into());
            }
            if read.len == 0 {
                return Err(ReceiveError::Closed);
            }
            if let Some(message) = cutter.fill(read.len, read.fds)? {
                return Ok(message);
            }
        }
    }

    /// Writes the rest of a message. This method is cancel safe: `sending` has the progress.
    pub async fn send(&self, sending: &mut Sending) -> io::Result<()> {
        while !sending.rest.is_empty() {
            let write = self.0.async_io(Interest::WRITABLE, || send_once(self.0.as_fd(), sending));
            match write.await {
                Ok(len) => sending.wrote(len),
                // Too many descriptors of this user are in flight between processes. They become fewer
                // when the processes read.
                Err(e) if e.raw_os_error() == Some(Errno::TOOMANYREFS.raw_os_error()) => {
                    tokio::time::sleep(IN_FLIGHT_PAUSE).await;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Writes as much of a message as is possible without waiting.
    pub fn send_now(&self, sending: &mut Sending) -> io::Result<()> {
        let len = self.0.try_io(Interest::WRITABLE, || send_once(self.0.as_fd(), sending))?;
        sending.wrote(len);
        Ok(())
    }

    /// Waits until the peer has closed the connection, without reading. This method is cancel safe.
    pub async fn closed(&self) -> io::Result<()> {
        // A wait for this interest also ends when the peer has closed its side, but not when bytes
        // arrive: the socket is not registered for urgent data.
        let ready = self.0.ready(Interest::PRIORITY).await?;
        if ready.is_read_closed() { Ok(()) } else { Err(io::Error::other("the peer has sent urgent data")) }
    }
}

/// The result of one read.
struct SocketRead {
    len: usize,
    fds: Vec<OwnedFd>,
    /// Whether the kernel discarded descriptors.
    is_cut_off: bool,
}

fn receive_once(socket: BorrowedFd<'_>, space: &mut [u8], fds_max: usize) -> io::Result<SocketRead> {
    let mut control_space = [MaybeUninit::uninit(); FDS_SPACE];
    let control_len = if fds_max == 0 { 0 } else { rustix::cmsg_space!(ScmRights(fds_max)) };
    let mut control = RecvAncillaryBuffer::new(&mut control_space[..control_len]);
    let received =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(space)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(arrived) = message {
            fds.extend(arrived);
        }
    }
    Ok(SocketRead { len: received.bytes, fds, is_cut_off: received.flags.contains(ReturnFlags::CTRUNC) })
}

fn send_once(socket: BorrowedFd<'_>, sending: &Sending) -> io::Result<usize> {
    let mut control_space = [MaybeUninit::uninit(); FDS_SPACE];
    let mut control = SendAncillaryBuffer::new(&mut control_space);
    let fds: Vec<BorrowedFd<'_>> = sending.fds.iter().map(|fd| fd.as_fd()).collect();
    let fits = fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds));
    assert!(fits, "the descriptors of a message are limited");
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(&sending.rest)], &mut control, SendFlags::NOSIGNAL)?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;

    use super::*;
    use crate::framing::Framing;

    fn pair() -> (FdStream, FdStream) {
        let (a, b) = UnixStream::pair().unwrap();
        (FdStream(a), FdStream(b))
    }

    fn message(payload_len: usize) -> Bytes {
        [&[0; 8][..], &(payload_len as u32).to_le_bytes(), &vec![5; payload_len]].concat().into()
    }

    fn null() -> SharedFd {
        Arc::new(File::open("/dev/null").unwrap().into())
    }

    #[tokio::test]
    async fn descriptors_arrive_with_their_message_and_are_closed_on_exec() {
        let (ours, theirs) = pair();
        let mut cutter = Cutter::new(Framing::VHOST_USER);
        for fds in [1, 0, 8, 2] {
            ours.send(&mut Sending::new(message(10), vec![null(); fds])).await.unwrap();
        }
        for fds in [1, 0, 8, 2] {
            let received = theirs.receive(&mut cutter).await.unwrap();
            assert_eq!((received.bytes, received.fds.len()), (message(10), fds));
            for fd in received.fds {
                assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
                let null = std::fs::metadata("/dev/null").unwrap();
                assert_eq!(File::from(fd).metadata().unwrap().ino(), null.ino());
            }
        }
    }

    #[tokio::test]
    async fn a_flood_of_descriptors_is_a_violation_and_leaks_no_descriptor() {
        let (probe, held) = std::os::unix::net::UnixStream::pair().unwrap();
        let held: SharedFd = Arc::new(held.into());
        for fds in [9, 12, 253] {
            let (ours, theirs) = pair();
            let mut cutter = Cutter::new(Framing::VHOST_USER);
            ours.send(&mut Sending::new(message(0), vec![held.clone(); fds])).await.unwrap();
            let refused = theirs.receive(&mut cutter).await.unwrap_err();
            assert!(
                matches!(
                    refused,
                    ReceiveError::Violation(
                        FramingViolation::TooManyFds { max: 8 } | FramingViolation::FdsLost { max: 8 }
                    )
                ),
                "{fds}: {refused:?}"
            );
        }
        // Descriptors that arrive in several parts of one message count together.
        let (ours, theirs) = pair();
        let mut cutter = Cutter::new(Framing::VHOST_USER);
        for byte in message(0).chunks(1) {
            ours.send(&mut Sending::new(Bytes::copy_from_slice(byte), vec![held.clone(); 4])).await.unwrap();
        }
        assert!(matches!(theirs.receive(&mut cutter).await, Err(ReceiveError::Violation(_))));
        drop((ours, theirs, cutter, held));
        // The socket ends when its last descriptor is closed.
        probe.set_nonblocking(true).unwrap();
        assert_eq!(io::Read::read(&mut &probe, &mut [0]).unwrap(), 0, "a descriptor is still open");
    }

    #[tokio::test]
    async fn a_long_message_needs_several_writes() {
        let (ours, theirs) = pair();
        let framing = Framing { message_bytes_max: 4 << 20, ..Framing::VHOST_USER };
        let mut cutter = Cutter::new(framing);
        let mut sending = Sending::new(message(3 << 20), vec![null(); 2]);
        let (sent, received) = tokio::join!(ours.send(&mut sending), theirs.receive(&mut cutter));
        sent.unwrap();
        let received = received.unwrap();
        assert_eq!((received.bytes.len(), received.fds.len()), (12 + (3 << 20), 2));
    }

    #[tokio::test]
    async fn the_end_of_the_peer_is_noticed_without_reading() {
        let (ours, theirs) = pair();
        ours.send(&mut Sending::new(message(0), vec![])).await.unwrap();
        let mut closed = Box::pin(theirs.closed());
        tokio::select! {
            biased;
            _ = &mut closed => panic!("the peer is connected"),
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
        drop(ours);
        closed.await.unwrap();
        let mut cutter = Cutter::new(Framing::VHOST_USER);
        theirs.receive(&mut cutter).await.unwrap();
        assert!(matches!(theirs.receive(&mut cutter).await, Err(ReceiveError::Closed)));
    }
}
