//! Direct mode: a device whose task owns the socket of its front end. The front end must reconnect
//! after a restart of this process, and loses the requests in flight unless it keeps their record.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use bytes::Bytes;
use disk::Disk;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::device::{BlkDevice, DeviceOptions, VhostControl, VhostError, VhostMessage};
use crate::message::{FDS_MAX, HEADER_LEN, MessageHeader};
use crate::session::SessionAnswer;

/// Serves a front end that has connected, until it disconnects. Must run in a tokio runtime with I/O
/// enabled.
///
/// # Errors
/// As for [`BlkDevice::run`].
pub async fn serve(
    stream: UnixStream,
    disk: Arc<dyn Disk>,
    options: &DeviceOptions,
) -> Result<(), VhostError> {
    BlkDevice::new(disk, options).run(&mut DirectControl::new(stream)).await
}

/// A front end's socket. The state of the session is not stored.
#[derive(Debug)]
pub struct DirectControl {
    stream: UnixStream,
    /// The bytes of the next message that have arrived.
    arrived: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl DirectControl {
    /// Uses a socket from which no bytes were read.
    #[must_use]
    pub fn new(stream: UnixStream) -> DirectControl {
        DirectControl { stream, arrived: Vec::new(), fds: Vec::new() }
    }

    /// Number of bytes of the next message that are missing. The socket is not read past the end of a
    /// message, so that file descriptors belong to the message with which they arrive.
    fn missing(&self) -> io::Result<usize> {
        let Some(header) = self.arrived.first_chunk::<HEADER_LEN>() else {
            return Ok(HEADER_LEN - self.arrived.len());
        };
        let header =
            MessageHeader::read(header).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        Ok(HEADER_LEN + header.len - self.arrived.len())
    }
}

impl VhostControl for DirectControl {
    async fn receive(&mut self) -> io::Result<Option<VhostMessage>> {
        loop {
            let missing = self.missing()?;
            if missing == 0 {
                let (bytes, fds) = (std::mem::take(&mut self.arrived), std::mem::take(&mut self.fds));
                return Ok(Some(VhostMessage { bytes, fds }));
            }
            let received =
                self.stream.async_io(Interest::READABLE, || receive(&self.stream, missing)).await?;
            let (bytes, fds) = received;
            if bytes.is_empty() {
                return match self.arrived.is_empty() {
                    true => Ok(None),
                    false => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
            self.arrived.extend(bytes);
            self.fds.extend(fds);
        }
    }

    async fn answer(&mut self, answer: SessionAnswer) -> io::Result<()> {
        let Some((mut bytes, mut fds)) = answer.reply else { return Ok(()) };
        while !bytes.is_empty() {
            let sent = self.stream.async_io(Interest::WRITABLE, || send(&self.stream, &bytes, &fds)).await?;
            // The file descriptors travel with the first byte.
            fds.clear();
            bytes = Bytes::slice(&bytes, sent..);
        }
        Ok(())
    }

    async fn disconnected(&mut self) {
        // Not READABLE, because the socket may still count as readable after the last message, and
        // because a further message is no reason to return. This interest includes a closed peer.
        match self.stream.ready(Interest::PRIORITY).await {
            Ok(ready) if !ready.is_read_closed() => std::future::pending().await,
            Ok(_) | Err(_) => {}
        }
    }
}

/// Receives up to `len` bytes, and the file descriptors that come with them.
fn receive(socket: impl AsFd, len: usize) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; len];
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    )?;
    let fds: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message has too many file descriptors"));
    }
    bytes.truncate(received.bytes);
    Ok((bytes, fds))
}

/// Sends bytes with file descriptors. Returns the number of bytes sent.
fn send(socket: impl AsFd, bytes: &[u8], fds: &[OwnedFd]) -> io::Result<usize> {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("a reply has too many file descriptors"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?)
}
