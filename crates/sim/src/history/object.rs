//! Symbolic state of an object: the data consists of runs of fills.

use std::hash::{Hash, Hasher};
use std::ops::Range;

use bytes::Bytes;
use client::engine::model::{Content, ModelledObject};

use super::{DataOrigin, Fill, Seen};

impl Seen {
    /// Appends the bytes of a range, which lies within `self`, to `out`.
    pub(crate) fn copy_range(&self, range: Range<u64>, out: &mut Seen) {
        let mut at = 0;
        for (len, piece) in self.runs() {
            let (start, end) = (range.start.max(at), range.end.min(at + len));
            if start < end {
                out.push(end - start, if start > at { piece.skip(start - at) } else { piece.clone() });
            }
            at += len;
            if at >= range.end {
                break;
            }
        }
    }

    /// Returns the bytes that a read of a range returns.
    pub(crate) fn read(&self, offset: u64, len: u64) -> Seen {
        let mut out = Seen::default();
        self.copy_range(offset.min(self.len())..offset.saturating_add(len).min(self.len()), &mut out);
        out
    }

    fn replace(&mut self, range: Range<u64>, piece: DataOrigin) {
        let mut out = Seen::default();
        self.copy_range(0..range.start, &mut out);
        out.push(range.end - range.start, piece);
        self.copy_range(range.end..self.len(), &mut out);
        *self = out;
    }
}

impl Content for Seen {
    type Piece = Fill;

    fn size(&self) -> u64 {
        self.len()
    }

    fn piece_len(piece: &Fill) -> u64 {
        piece.len
    }

    fn resize(&mut self, size: u64) {
        if size < self.len() {
            *self = self.read(0, size);
        } else {
            self.push(size - self.len(), DataOrigin::Zeros);
        }
    }

    fn write(&mut self, offset: u64, piece: &Fill) {
        self.replace(offset..offset + piece.len, DataOrigin::Fill { id: piece.id, at: 0 });
    }

    fn zero(&mut self, range: Range<u64>) {
        self.replace(range, DataOrigin::Zeros);
    }

    fn has_bytes(&self, offset: u64, bytes: &[u8]) -> bool {
        // An object has zero bytes at any offset.
        let mut wanted = Seen::default();
        wanted.push(bytes.len() as u64, DataOrigin::Raw(Bytes::copy_from_slice(bytes)));
        self.read(offset, bytes.len() as u64).first_difference(&wanted).is_none()
    }
}

/// Adds the state of an object to a hash.
pub(crate) fn hash_object(object: Option<&ModelledObject<Seen>>, hasher: &mut impl Hasher) {
    let fields = object.map(|o| (o.version, &o.data, &o.xattrs, &o.omap));
    fields.hash(hasher);
}
