//! [`ChunkPiece`]: the part of a request within one chunk.

use std::ops::Range;

use disk::{DiskExtent, check_range};

/// A part of a request within one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkPiece {
    /// Number of the chunk.
    pub(crate) index: u64,
    /// Offset within the chunk, in bytes.
    pub(crate) within: u64,
    /// Offset within the request, in bytes.
    pub(crate) at: u64,
    /// Length, in bytes.
    pub(crate) len: u64,
}

impl ChunkPiece {
    /// Cuts a range of a disk of `size` bytes into parts within chunks of `chunk` bytes.
    ///
    /// # Errors
    /// [`OutOfRange`](disk::DiskError::OutOfRange) if the range is not aligned to blocks, or ends after the
    /// disk.
    pub(crate) fn cut(offset: u64, len: u64, size: u64, chunk: u64) -> disk::Result<Vec<ChunkPiece>> {
        check_range(offset, len, size)?;
        let end = offset + len;
        let mut parts = Vec::with_capacity(1);
        let mut at = offset;
        while at < end {
            let next = ((at / chunk + 1) * chunk).min(end);
            parts.push(ChunkPiece { index: at / chunk, within: at % chunk, at: at - offset, len: next - at });
            at = next;
        }
        Ok(parts)
    }

    /// Appends the extents of the part to those of the parts before it. `data` has the ranges of the chunk
    /// that have data, in ascending order and within the part.
    pub(crate) fn append_extents(self, data: Vec<Range<u64>>, all: &mut Vec<DiskExtent>) {
        let mut push = |len: u64, has_data: bool| match all.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.has_data == has_data => last.len += len,
            _ => all.push(DiskExtent { len, has_data }),
        };
        let mut at = self.within;
        for range in data {
            push(range.start - at, false);
            push(range.end - range.start, true);
            at = range.end;
        }
        push(self.within + self.len - at, false);
    }
}
