//! Memory that is read into, and then handed out in parts.
//!
//! Blocks are used again when all their parts are gone, because fresh memory from the system costs as much as copying
//! (page faults). How much is read at once follows what comes: an idle connection holds a small block only.

use bytes::{Bytes, BytesMut};

/// Least and most bytes of a block for frames.
const BLOCK: (usize, usize) = (8 << 10, 256 << 10);

/// Blocks for payloads that are kept for the next ones.
const KEPT: usize = 4;

/// Bytes read and not yet used.
pub(super) struct ReadBuffer {
    /// What was read and not used.
    pub(super) bytes: BytesMut,
    /// The block before this one, when its parts are gone.
    spare: BytesMut,
    ahead: usize,
    payloads: Vec<BytesMut>,
}

impl ReadBuffer {
    pub(super) fn new() -> ReadBuffer {
        ReadBuffer { bytes: BytesMut::new(), spare: BytesMut::new(), ahead: BLOCK.0, payloads: Vec::new() }
    }

    /// Makes room for at least `missing` bytes, and for more where more is to be expected.
    pub(super) fn make_room(&mut self, missing: usize) {
        let room = self.bytes.capacity() - self.bytes.len();
        if room >= missing.max(self.ahead / 4) && !(self.bytes.is_empty() && room > 4 * self.ahead) {
            return;
        }
        let wanted = self.bytes.len() + missing.max(self.ahead);
        if self.bytes.is_empty() && self.spare.capacity() > 4 * self.ahead {
            self.spare = BytesMut::new();
        }
        self.spare.clear();
        self.spare.reserve(wanted);
        self.spare.extend_from_slice(&self.bytes);
        std::mem::swap(&mut self.bytes, &mut self.spare);
        // The old block is given back whole when its last part is dropped.
        self.spare.clear();
    }

    /// Takes note of a read of `n` bytes into a room of `room`.
    pub(super) fn on_read(&mut self, n: usize, room: usize) {
        if n == room {
            self.ahead = (self.ahead * 2).min(BLOCK.1);
        } else if n < self.ahead / 16 {
            self.ahead = (self.ahead / 2).max(BLOCK.0);
            self.payloads.clear();
        }
    }

    /// Empty memory for a payload of `len` bytes.
    pub(super) fn payload(&mut self, len: usize) -> BytesMut {
        match self.payloads.iter_mut().position(|kept| kept.try_reclaim(len)) {
            Some(free) => self.payloads.swap_remove(free),
            None => BytesMut::with_capacity(len),
        }
    }

    /// Hands out a payload, and keeps its memory for later ones.
    pub(super) fn finish(&mut self, mut payload: BytesMut) -> Bytes {
        let data = payload.split().freeze();
        self.payloads.truncate(KEPT - 1);
        self.payloads.insert(0, payload);
        data
    }
}
