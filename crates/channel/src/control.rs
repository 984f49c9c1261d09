//! The control socket: frames over a UNIX or TCP stream.
//!
//! A frame has the format of a ring entry, but may be longer: see [`crate::EntryHeader`]. One task
//! owns the socket and polls it.

use std::collections::VecDeque;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use metrics::Counter;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use crate::frame::ChannelEntry;
use crate::{ChannelError, EntryHeader, HEADER_LEN, Result};

/// Maximum length of a frame, in bytes.
pub const MAX_FRAME: usize = 32 << 20;
/// Minimum buffer space for one read from the socket, in bytes.
const READ_STEP: usize = 64 << 10;

/// A UNIX or TCP byte stream.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// One end of a control socket after the handshake.
pub struct ControlSocket {
    stream: Box<dyn Stream>,
    input: BytesMut,
    output: VecDeque<Bytes>,
    /// Total length of the buffers in `output`, in bytes.
    unsent: usize,
    copied: Counter,
}

impl ControlSocket {
    pub(crate) fn new(stream: Box<dyn Stream>) -> ControlSocket {
        let copied = metrics::counter!("outboard_channel_socket_copy_bytes");
        ControlSocket { stream, input: BytesMut::new(), output: VecDeque::new(), unsent: 0, copied }
    }

    /// Queues a frame; [`poll_flush`](Self::poll_flush) writes it. `data` contains the pieces of
    /// the payload, in order.
    pub fn push(&mut self, header: EntryHeader, control: &[u8], data: impl IntoIterator<Item = Bytes>) {
        let at = self.output.len();
        self.output.push_back(Bytes::new());
        self.output.extend(data.into_iter().filter(|piece| !piece.is_empty()));
        let data_len: usize = self.output.iter().skip(at).map(Bytes::len).sum();
        let header = EntryHeader { data_len: data_len as u32, ..header };
        self.output[at] = Bytes::from(header.seal(control));
        self.unsent += self.output[at].len() + data_len;
    }

    /// Bytes of queued frames that the socket has not accepted yet. If a peer sends requests but
    /// reads no replies, this number grows until the caller stops taking the peer's frames.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.unsent
    }

    /// Writes as much as the socket accepts. Ready when all queued frames are written.
    ///
    /// # Errors
    /// Fails if the socket fails.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        while !self.output.is_empty() {
            let slices: Vec<io::IoSlice<'_>> =
                self.output.iter().take(16).map(|chunk| io::IoSlice::new(chunk)).collect();
            let mut written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, &slices))?;
            if written == 0 {
                return Poll::Ready(Err(io::Error::from(io::ErrorKind::WriteZero).into()));
            }
            self.unsent -= written;
            while let Some(front) = self.output.front_mut() {
                let part = written.min(front.len());
                front.advance(part);
                written -= part;
                if !front.is_empty() {
                    break;
                }
                self.output.pop_front();
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Returns the next frame.
    ///
    /// # Errors
    /// Fails if the socket failed or was closed, or if the peer sent invalid frames.
    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Result<ChannelEntry>> {
        loop {
            if let Some(frame) = self.take_frame()? {
                return Poll::Ready(Ok(frame));
            }
            let (at, len) = (self.input.as_ptr(), self.input.len());
            self.input.reserve(READ_STEP);
            if self.input.as_ptr() != at {
                self.copied.increment(len as u64);
            }
            // `read_buf` is cancel safe, so the future may be dropped while it is not ready.
            let read = pin!(self.stream.read_buf(&mut self.input));
            if ready!(read.poll(cx))? == 0 {
                return Poll::Ready(Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()));
            }
        }
    }

    fn take_frame(&mut self) -> Result<Option<ChannelEntry>> {
        let Some(head) = self.input.first_chunk::<HEADER_LEN>() else { return Ok(None) };
        let header = EntryHeader::parse(head)?;
        let total = (header.control_len as usize).saturating_add(header.data_len as usize);
        if total > MAX_FRAME - HEADER_LEN {
            return Err(ChannelError::protocol(format!(
                "it announced a frame of {total} bytes; the limit is {MAX_FRAME}"
            )));
        }
        if self.input.len() < header.total_len() {
            return Ok(None);
        }
        let sealed = self.input.split_to(header.sealed_len()).to_vec();
        let payload = self.input.split_to(header.data_len as usize);
        // A long payload is not copied. A short payload is copied, because a slice of the read
        // buffer would keep the whole buffer alive.
        let payload = if payload.len() >= READ_STEP {
            payload.freeze()
        } else {
            self.copied.increment(payload.len() as u64);
            Bytes::copy_from_slice(&payload)
        };
        ChannelEntry::from_parts(header, sealed, payload).map(Some)
    }
}
