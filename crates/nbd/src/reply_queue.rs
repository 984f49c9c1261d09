//! [`ReplyQueue`]: the replies that wait to be written to the socket.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncWrite, AsyncWriteExt};

use crate::execution::ExecutedRequest;
use crate::reply::encode;
use crate::reservation::Reservation;

/// Maximum number of pieces in one write.
const SLICES_MAX: usize = 64;
/// Memory for heads of replies that is reserved at once, in bytes.
const HEADS_RESERVED: usize = 4096;

/// Encoded replies, in the order in which their requests have completed. The reservations of the
/// requests in flight bound the queue.
#[derive(Debug, Default)]
pub(crate) struct ReplyQueue {
    is_structured: bool,
    /// The end of the queue: heads of replies, after which no data follows yet.
    heads: BytesMut,
    /// The beginning of the queue. No piece is empty.
    pieces: VecDeque<Bytes>,
    /// Number of bytes that were ever queued.
    queued: u64,
    /// Number of bytes that were ever written.
    written: u64,
    /// The reservation of each queued reply, with the value of `written` that ends the reply.
    reservations: VecDeque<(u64, Reservation)>,
    /// Whether the writer may keep bytes in a buffer.
    needs_flush: bool,
}

impl ReplyQueue {
    /// Creates an empty queue.
    pub fn new(is_structured: bool) -> ReplyQueue {
        ReplyQueue { is_structured, ..ReplyQueue::default() }
    }

    /// Returns true if all replies were written and flushed.
    pub fn is_empty(&self) -> bool {
        self.queued == self.written && !self.needs_flush
    }

    /// Queues the reply to a request.
    pub fn push(&mut self, mut executed: ExecutedRequest) {
        if self.heads.capacity() - self.heads.len() < HEADS_RESERVED / 2 {
            self.heads.reserve(HEADS_RESERVED);
        }
        let old_len = self.heads.len();
        let data = encode(&mut executed, self.is_structured, &mut self.heads);
        self.queued += (self.heads.len() - old_len) as u64;
        if !data.is_empty() {
            self.seal_heads();
            for piece in data.into_iter().filter(|piece| !piece.is_empty()) {
                self.queued += piece.len() as u64;
                self.pieces.push_back(piece);
            }
        }
        self.reservations.extend(executed.reservation.map(|reservation| (self.queued, reservation)));
    }

    /// Writes a part of the queue by one call, or flushes the writer if the queue is empty. A dropped
    /// future has written nothing.
    ///
    /// # Errors
    /// If the writer fails.
    pub async fn send<W: AsyncWrite + Unpin>(&mut self, writer: &mut W) -> io::Result<()> {
        self.seal_heads();
        if self.pieces.is_empty() {
            writer.flush().await?;
            self.needs_flush = false;
            return Ok(());
        }
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
            *slice = IoSlice::new(piece);
            count += 1;
        }
        let len = writer.write_vectored(&slices[..count]).await?;
        if len == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.advance(len);
        Ok(())
    }

    /// Writes and flushes the whole queue.
    ///
    /// # Errors
    /// If the writer fails.
    pub async fn send_all<W: AsyncWrite + Unpin>(&mut self, writer: &mut W) -> io::Result<()> {
        while !self.is_empty() {
            self.send(writer).await?;
        }
        Ok(())
    }

    /// Appends the heads to the pieces.
    fn seal_heads(&mut self) {
        if !self.heads.is_empty() {
            self.pieces.push_back(self.heads.split().freeze());
        }
    }

    /// Removes `len` written bytes, and releases the reservations of complete replies.
    fn advance(&mut self, len: usize) {
        self.written += len as u64;
        self.needs_flush = true;
        assert!(self.written <= self.queued, "the writer accepts only bytes that exist");
        let mut left = len;
        while left > 0 {
            let piece = self.pieces.front_mut().expect("the written bytes were queued");
            if left < piece.len() {
                piece.advance(left);
                break;
            }
            left -= piece.len();
            self.pieces.pop_front();
        }
        while self.reservations.front().is_some_and(|(end, _)| *end <= self.written) {
            self.reservations.pop_front();
        }
    }
}
