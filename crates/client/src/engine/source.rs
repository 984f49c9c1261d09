//! Sources of the data of changes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use wire::BulkDescriptor;

use crate::{Error, Result};

/// Source of the data of a change. Clones share the bytes.
#[derive(Debug, Clone)]
pub enum Source {
    /// Bytes in one piece of memory.
    Bytes(Bytes),
    /// Bytes in several pieces of memory, such as registered segments of a virtual machine's memory
    /// ([`Bytes::from_owner`] keeps the registration alive).
    Segments(Vec<Bytes>),
    /// Bytes `offset..offset + len` of a file. The engine reads them when it needs them. The file
    /// must not change before the change of the object is complete.
    File {
        /// The file.
        file: Arc<File>,
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Memory that a bulk descriptor names. A gateway could use this variant to let the node read
    /// the memory of an application directly. All engines refuse this variant today, with
    /// [`Error::Unsupported`].
    Descriptor(BulkDescriptor),
}

impl Source {
    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Source::Bytes(bytes) => bytes.len() as u64,
            Source::Segments(segments) => segments.iter().map(|segment| segment.len() as u64).sum(),
            Source::File { len, .. } => *len,
            Source::Descriptor(descriptor) => descriptor.len().unwrap_or(u64::MAX),
        }
    }

    /// Returns whether the source has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a source with only the bytes `start..end`, which must exist.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a descriptor.
    pub(crate) fn slice(&self, start: u64, end: u64) -> Result<Source> {
        Ok(match self {
            Source::Bytes(bytes) => Source::Bytes(bytes.slice(start as usize..end as usize)),
            Source::Segments(segments) => {
                Source::Segments(cut_segments(segments, start as usize, (end - start) as usize))
            }
            Source::File { file, offset, .. } => {
                Source::File { file: Arc::clone(file), offset: offset + start, len: end - start }
            }
            Source::Descriptor(_) => return Err(Error::Unsupported(NO_DESCRIPTORS.into())),
        })
    }

    /// Returns all bytes, in contiguous memory.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Unsupported`] for a descriptor.
    pub(crate) async fn load(&self) -> Result<Bytes> {
        match self {
            Source::Bytes(bytes) => Ok(bytes.clone()),
            Source::Descriptor(_) => Err(Error::Unsupported(NO_DESCRIPTORS.into())),
            other => Ok(other.read(0, other.len() as usize).await?),
        }
    }

    /// Returns bytes `at..at + len`, which must exist, in contiguous memory.
    pub(crate) async fn read(&self, at: u64, len: usize) -> std::io::Result<Bytes> {
        match self {
            Source::Bytes(bytes) => Ok(bytes.slice(at as usize..at as usize + len)),
            Source::Segments(segments) => Ok(join(cut_segments(segments, at as usize, len))),
            Source::File { file, offset, .. } => {
                let (file, from) = (Arc::clone(file), offset + at);
                let read = move || {
                    let mut buf = vec![0; len];
                    file.read_exact_at(&mut buf, from).map(|()| Bytes::from(buf))
                };
                #[expect(clippy::disallowed_methods, reason = "the data of a simulated client is in memory")]
                tokio::task::spawn_blocking(read).await.map_err(std::io::Error::other)?
            }
            Source::Descriptor(_) => Err(std::io::Error::other(NO_DESCRIPTORS)),
        }
    }
}

/// Reason why bulk descriptors are refused.
pub(crate) const NO_DESCRIPTORS: &str =
    "bulk descriptors of an application's memory are not supported; pass the bytes or the memory itself";

impl From<Bytes> for Source {
    fn from(bytes: Bytes) -> Source {
        Source::Bytes(bytes)
    }
}

/// Returns bytes `at..at + len` of segments, without a copy.
fn cut_segments(segments: &[Bytes], mut at: usize, mut len: usize) -> Vec<Bytes> {
    let mut cut = Vec::new();
    for segment in segments {
        if len == 0 {
            break;
        }
        let skipped = at.min(segment.len());
        let taken = len.min(segment.len() - skipped);
        if taken > 0 {
            cut.push(segment.slice(skipped..skipped + taken));
        }
        (at, len) = (at - skipped, len - taken);
    }
    assert_eq!(len, 0, "the range lies outside the segments");
    cut
}

/// Joins pieces into contiguous memory. A single piece is not copied.
fn join(mut pieces: Vec<Bytes>) -> Bytes {
    if pieces.len() <= 1 {
        return pieces.pop().unwrap_or_default();
    }
    let mut joined = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
    pieces.iter().for_each(|piece| joined.extend_from_slice(piece));
    joined.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments() -> Source {
        Source::Segments(["ab", "", "cdef", "g"].map(Bytes::from).to_vec())
    }

    #[tokio::test]
    async fn segments_read_like_contiguous_memory() {
        let (whole, source) = (Bytes::from("abcdefg"), segments());
        assert_eq!(source.len(), 7);
        assert_eq!(source.load().await.unwrap(), whole);
        for start in 0..=7 {
            for end in start..=7 {
                let expected = whole.slice(start..end);
                assert_eq!(source.read(start as u64, end - start).await.unwrap(), expected);
                let cut = source.slice(start as u64, end as u64).unwrap();
                assert_eq!(cut.load().await.unwrap(), expected);
            }
        }
    }

    #[test]
    fn a_range_within_one_segment_is_not_copied() {
        let segment = Bytes::from(vec![7; 100]);
        let cut = cut_segments(&[Bytes::from("x"), segment.clone()], 11, 20);
        assert_eq!(cut.len(), 1);
        assert_eq!(cut[0].as_ptr(), segment[10..].as_ptr());
    }
}
