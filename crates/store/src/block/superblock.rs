//! The superblock: the identity of the target and the location of its regions. The target has two
//! copies, which the store writes in turn.

use base::block::{BLOCK, BLOCK_SIZE, crc32c};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::drive::{Drive, read_stable};
use super::records::corrupt;
use crate::{Result, StoreError};

/// Size of a sector, in bytes.
pub(crate) const SECTOR: usize = 512;

const MAGIC: &[u8; 8] = b"OUTBOARD";
/// Version of the format that this program writes.
pub(crate) const VERSION: u32 = 4;
/// Earliest version of the format that this program reads. In version 2, onodes contain no leaves. Up
/// to version 3, log records contain no patches. The first write of a superblock changes the version.
const EARLIER_VERSION: u32 = 2;
/// Size of both copies together, in bytes. The copies are at the start of the target.
pub(crate) const SUPERBLOCKS: u64 = 2 * BLOCK;

/// A region of the target. Offset and length are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Region {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The content of a superblock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Superblock {
    pub(crate) uuid: Uuid,
    /// Grows by one with each write of a superblock. The store uses the valid copy with the highest
    /// generation.
    pub(crate) generation: u64,
    /// Size of the target, in bytes.
    pub(crate) size: u64,
    pub(crate) log: Region,
    pub(crate) index: Region,
    pub(crate) data: Region,
    /// Whether the target was unmounted properly.
    pub(crate) clean: bool,
    /// The number of the last checkpoint known to be in the index.
    pub(crate) checkpoint: u64,
    /// Number of the index's newest header when the superblock was written; 0 if the program that
    /// has written the superblock did not record it.
    pub(crate) index_header: u64,
    /// Whether both copies must be written: one of them is damaged or has an earlier version of the
    /// format. Written copies have the current version.
    #[serde(skip)]
    pub(crate) needs_both: bool,
}

impl Superblock {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let body = postcard::to_allocvec(self).expect("a superblock can always be encoded");
        let mut out = vec![0; BLOCK_SIZE];
        out[12..12 + body.len()].copy_from_slice(&body);
        seal(out)
    }

    /// Encodes the superblock with another version of the format.
    #[cfg(test)]
    pub(crate) fn encode_as(&self, version: u8) -> Vec<u8> {
        let mut bytes = self.encode();
        bytes[8] = version;
        let crc = crc32c(&bytes[..BLOCK_SIZE - 4]);
        bytes[BLOCK_SIZE - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes one copy of the superblock.
    ///
    /// # Errors
    /// [`StoreError::NotATarget`] if the magic number is missing, [`StoreError::WrongVersion`], or
    /// [`StoreError::Corrupt`].
    pub(crate) fn decode(bytes: &[u8]) -> Result<Superblock> {
        if bytes.len() != BLOCK_SIZE || &bytes[..8] != MAGIC {
            return Err(StoreError::NotATarget("the file or drive".into()));
        }
        let (body, crc) = bytes.split_at(BLOCK_SIZE - 4);
        if crc32c(body).to_le_bytes() != crc {
            return Err(corrupt("superblock", "checksum mismatch"));
        }
        let version = u32::from_le_bytes(body[8..12].try_into().expect("four bytes"));
        if !(EARLIER_VERSION..=VERSION).contains(&version) {
            return Err(StoreError::WrongVersion { found: version, supported: VERSION });
        }
        let mut superblock: Superblock =
            postcard::from_bytes(&body[12..]).map_err(|e| corrupt("superblock", e))?;
        superblock.needs_both = version < VERSION;
        superblock.check()?;
        Ok(superblock)
    }

    fn check(&self) -> Result<()> {
        let mut end = SUPERBLOCKS;
        for region in [self.log, self.index, self.data] {
            let next = region.offset.checked_add(region.len);
            match next {
                Some(next) if region.offset >= end && region.len > 0 && next <= self.size => end = next,
                _ => return Err(corrupt("superblock", "regions overlap or lie outside the target")),
            }
            if !region.offset.is_multiple_of(BLOCK) || !region.len.is_multiple_of(BLOCK) {
                return Err(corrupt("superblock", "a region is not aligned to the block size"));
            }
        }
        Ok(())
    }

    /// Reads both copies and returns the newer valid copy. If only one copy is valid, the other one
    /// may be newer, so that the target may have changed since it was unmounted: the result is then
    /// not `clean`.
    ///
    /// # Errors
    /// Those of [`decode`](Self::decode) if neither copy is valid.
    pub(crate) fn read(drive: &dyn Drive) -> Result<Superblock> {
        let mut bytes = vec![0; SUPERBLOCKS as usize];
        if drive.size() < SUPERBLOCKS {
            return Err(StoreError::NotATarget("a file or drive of this small size".into()));
        }
        read_stable(drive, 0, &mut bytes, |bytes| {
            bytes.chunks(BLOCK_SIZE).all(|copy| Superblock::decode(copy).is_ok())
        })?;
        let (a, b) = bytes.split_at(BLOCK_SIZE);
        let superblock = match (Superblock::decode(a), Superblock::decode(b)) {
            (Ok(a), Ok(b)) => {
                let needs_both = a.needs_both || b.needs_both;
                let newer = if a.generation > b.generation { a } else { b };
                Superblock { needs_both, ..newer }
            }
            (Ok(one), Err(error)) | (Err(error), Ok(one)) => {
                tracing::warn!(%error, "one copy of the superblock is not valid; the other copy is used");
                Superblock { clean: false, needs_both: true, ..one }
            }
            (Err(a), Err(StoreError::NotATarget(_))) | (Err(_), Err(a)) => return Err(a),
        };
        if superblock.size > drive.size() {
            return Err(corrupt(
                "superblock",
                "the file or drive is smaller than it was when the target was created",
            ));
        }
        Ok(superblock)
    }

    /// Writes the next generation over the older copy and flushes. Writes both copies if
    /// [`needs_both`](Self::needs_both) is set: a program of an earlier version would use a copy that
    /// it can read.
    pub(crate) fn write(&mut self, drive: &dyn Drive) -> Result<()> {
        for _ in 0..=u32::from(std::mem::take(&mut self.needs_both)) {
            self.generation += 1;
            drive.write_at((self.generation % 2) * BLOCK, &self.encode())?;
            drive.flush()?;
        }
        Ok(())
    }

    /// Returns the number of sectors in the log's ring.
    pub(crate) fn log_sectors(&self) -> u64 {
        self.log.len / SECTOR as u64
    }

    /// Returns the number of blocks in the data area.
    pub(crate) fn data_blocks(&self) -> u64 {
        self.data.len / BLOCK
    }
}

/// Adds magic number, version and checksum to the body of a superblock.
pub(crate) fn seal(mut block: Vec<u8>) -> Vec<u8> {
    block[..8].copy_from_slice(MAGIC);
    block[8..12].copy_from_slice(&VERSION.to_le_bytes());
    let crc = crc32c(&block[..BLOCK_SIZE - 4]);
    block[BLOCK_SIZE - 4..].copy_from_slice(&crc.to_le_bytes());
    block
}

#[cfg(test)]
mod tests {
    use super::super::sim::RecordedDrive;
    use super::*;
    use proptest::prelude::*;

    fn example() -> Superblock {
        let region = |offset, len| Region { offset, len };
        Superblock {
            uuid: Uuid::from_u128(7),
            generation: 3,
            size: 1 << 20,
            log: region(8192, 8192),
            index: region(16_384, 8192),
            data: region(24_576, 65_536),
            clean: true,
            checkpoint: 9,
            index_header: 12,
            needs_both: false,
        }
    }

    #[test]
    fn a_superblock_of_another_format_version_is_refused() {
        let mut bytes = example().encode();
        assert_eq!(Superblock::decode(&bytes).unwrap(), example());
        for version in [1, 2, 3, 5, 9] {
            bytes[8] = version;
            assert!(matches!(Superblock::decode(&bytes), Err(StoreError::Corrupt { .. })));
            let crc = crc32c(&bytes[..BLOCK_SIZE - 4]);
            bytes[BLOCK_SIZE - 4..].copy_from_slice(&crc.to_le_bytes());
            match Superblock::decode(&bytes) {
                Ok(found) => {
                    assert!([2, 3].contains(&version));
                    assert_eq!(found, Superblock { needs_both: true, ..example() });
                }
                Err(StoreError::WrongVersion { found, .. }) => {
                    assert_eq!(found, u32::from(version));
                    assert!(![2, 3].contains(&version));
                }
                Err(other) => panic!("version {version}: {other}"),
            }
        }
    }

    #[test]
    fn a_write_leaves_no_copy_of_an_earlier_version() {
        let drive = RecordedDrive::new(vec![0; 1 << 20]);
        let earlier = example().encode_as(EARLIER_VERSION as u8);
        for copy in [0, BLOCK] {
            drive.write_at(copy, &earlier).unwrap();
        }
        let mut superblock = Superblock::read(&*drive).unwrap();
        assert!(superblock.needs_both);
        superblock.write(&*drive).unwrap();
        let image = drive.image();
        for copy in image[..SUPERBLOCKS as usize].chunks(BLOCK_SIZE) {
            assert_eq!(copy[8..12], VERSION.to_le_bytes());
        }
        let written = Superblock::read(&*drive).unwrap();
        assert_eq!(written, superblock);
        assert_eq!(written.generation, example().generation + 2);
    }

    proptest! {
        #[test]
        fn a_flipped_bit_in_a_superblock_is_detected(bit in 0usize..BLOCK_SIZE * 8) {
            let mut bytes = example().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Superblock::decode(&bytes).is_err());
        }

        #[test]
        fn decoding_arbitrary_bytes_as_a_superblock_never_panics(bytes in proptest::collection::vec(any::<u8>(), BLOCK_SIZE)) {
            let _ = Superblock::decode(&seal(bytes));
        }
    }
}
