//! Values that a store returns for an object or a collection: its size, its data, or a page of a
//! listing.

use base::block::{self, BLOCK, ChecksumMismatch};
use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Size of an object, and the drive space that it occupies. A store reports both without reading
/// the object's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// Size, in bytes.
    pub size: u64,
    /// Drive space that the object's blocks occupy, in bytes. A shared block counts in full in each
    /// object that refers to it.
    pub allocated: u64,
}

/// Result of [`StoreCalls::read`](crate::StoreCalls::read): the blocks that cover the requested range, up to the object's
/// end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadData {
    /// Offset in the object at which `data` starts, in bytes. It is the start of the requested
    /// range, rounded down to a block boundary.
    pub offset: u64,
    /// The data, in consecutive buffers. The data ends with the last requested block, or at the
    /// object's end if the object ends before.
    pub data: Vec<Bytes>,
    /// One CRC-32C per block, as stored. If the object ends inside its last block, that block's
    /// checksum covers the block padded with zeros.
    pub checksums: Vec<u32>,
    /// Size of the whole object, in bytes.
    pub object_size: u64,
    /// Whether the data was already compared with the checksums, for example by the channel between
    /// DPU and host.
    pub verified: bool,
}

impl ReadData {
    /// Returns the number of bytes in `data`.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.data.iter().map(|d| d.len() as u64).sum()
    }

    /// Whether `data` contains no bytes. A read returns no data if its range is empty or starts at
    /// or after the object's end.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.data.iter().all(Bytes::is_empty)
    }

    /// Returns the data in one buffer. Copies the data only if it consists of several buffers.
    #[must_use]
    pub fn contiguous(&self) -> Bytes {
        match self.data.as_slice() {
            [] => Bytes::new(),
            [one] => one.clone(),
            many => {
                let mut all = BytesMut::with_capacity(self.len() as usize);
                many.iter().for_each(|d| all.extend_from_slice(d));
                all.freeze()
            }
        }
    }

    /// Compares every block with its checksum, unless `verified` is already set.
    ///
    /// # Errors
    /// [`ChecksumMismatch`] names the first block that does not match its checksum.
    pub fn verify(&self) -> std::result::Result<(), ChecksumMismatch> {
        if self.verified {
            return Ok(());
        }
        let all = self.contiguous();
        let mut at = self.offset;
        for (i, piece) in all.chunks(BLOCK as usize).enumerate() {
            let found = block::pad_to_block(block::crc32c(piece), piece.len());
            let expected = self.checksums.get(i).copied().unwrap_or(0);
            if found != expected {
                return Err(ChecksumMismatch { offset: at, expected, found });
            }
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Returns the part of the data that lies in bytes `offset..offset + len` of the object.
    #[must_use]
    pub fn slice(&self, offset: u64, len: u64) -> Bytes {
        let all = self.contiguous();
        let start = offset.saturating_sub(self.offset).min(all.len() as u64) as usize;
        let end = offset.saturating_add(len).saturating_sub(self.offset).min(all.len() as u64) as usize;
        all.slice(start..end.max(start))
    }
}

/// A page of an ordered listing: its items, and `true` if more items follow the page.
pub type Page<T> = (Vec<T>, bool);
