//! Non-blocking requests to a drive, and the buffers that they fill.

use std::io;
use std::sync::Arc;

use base::mem::ArenaBuf;
use bytes::Bytes;

/// A request to a drive. Its completion has the same `id`.
#[derive(Debug)]
pub(crate) struct IoRequest {
    pub(crate) id: u64,
    /// Offset on the drive, in bytes; a multiple of the block size.
    pub(crate) offset: u64,
    pub(crate) op: IoOp,
}

/// The operation of a request. All lengths are multiples of the block size, and all memory is
/// aligned to it.
#[derive(Debug)]
pub(crate) enum IoOp {
    /// Fills the segment with data of the drive.
    Read(Segment),
    /// Writes the pieces to the drive, one directly after another.
    Write(Vec<Bytes>),
    /// Makes every write durable that had completed before the flush was submitted.
    Flush,
}

/// A completed request.
#[derive(Debug)]
pub(crate) struct IoDone {
    pub(crate) id: u64,
    pub(crate) result: io::Result<()>,
}

/// A buffer that was split into [`Segment`]s.
#[derive(Debug)]
pub(crate) struct SplitBuffer(Arc<ArenaBuf>);

/// A part of a buffer that a drive fills. Segments do not overlap, so each has exclusive access to
/// its memory.
#[derive(Debug)]
pub(crate) struct Segment {
    owner: Arc<ArenaBuf>,
    start: *mut u8,
    len: usize,
}

#[allow(unsafe_code)]
// SAFETY: a segment is the only access to its part of the buffer, like a `&mut [u8]` that keeps its
// owner alive.
unsafe impl Send for Segment {}

impl SplitBuffer {
    /// Splits `buffer` into parts of the given lengths.
    ///
    /// # Panics
    /// If the parts are longer than the buffer.
    #[allow(unsafe_code)]
    pub(crate) fn split(mut buffer: ArenaBuf, lens: &[usize]) -> (SplitBuffer, Vec<Segment>) {
        assert!(lens.iter().sum::<usize>() <= buffer.len(), "segments exceed their buffer");
        let base = buffer.as_mut_ptr();
        let owner = Arc::new(buffer);
        let mut at = 0;
        let segments = lens.iter().map(|&len| {
            // SAFETY: the sum of all lengths was checked against the buffer.
            let start = unsafe { base.add(at) };
            at += len;
            Segment { owner: Arc::clone(&owner), start, len }
        });
        let segments = segments.collect();
        (SplitBuffer(owner), segments)
    }

    /// Returns the buffer once every segment has been dropped.
    pub(crate) fn into_buffer(self) -> Option<ArenaBuf> {
        Arc::into_inner(self.0)
    }
}

impl std::ops::Deref for Segment {
    type Target = [u8];
    #[allow(unsafe_code)]
    fn deref(&self) -> &[u8] {
        debug_assert!(Arc::strong_count(&self.owner) > 0);
        // SAFETY: the range lies inside the buffer that `owner` keeps alive, and no other segment
        // overlaps it. The buffer itself is returned only when no segment is left.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl std::ops::DerefMut for Segment {
    #[allow(unsafe_code)]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}
