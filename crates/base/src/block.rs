//! The 4 KiB block grid and its checksums.
//!
//! Every object is divided into blocks of [`BLOCK_SIZE`] bytes, counted from the object's first
//! byte. A *piece* is the part of one block that a payload covers. Only a payload's first and last
//! pieces may be shorter than a block. A payload carries one CRC-32C (Castagnoli, RFC 3720 appendix
//! B.4) per piece. A stored block carries the checksum of the whole block. The checksum of the
//! block that contains an object's end covers the block padded with zeros.

use bytes::Bytes;

/// Size of a block, in bytes: the unit of checksums, of allocation on a drive and of copy-on-write.
pub const BLOCK_SIZE: usize = 4096;

/// [`BLOCK_SIZE`] as a `u64`, the type of object offsets.
pub const BLOCK: u64 = BLOCK_SIZE as u64;

/// CRC-32C of a block of zeros.
pub const ZERO_BLOCK_CRC: u32 = 0x98f9_4189;

/// CRC-32C of `data`.
#[must_use]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// CRC-32C of the concatenation of several byte slices.
#[must_use]
pub fn crc32c_of<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    pieces.into_iter().for_each(|piece| digest.update(piece));
    digest.finalize() as u32
}

/// Returns the CRC-32C of the bytes `a` followed by the bytes `b`. `crc_a` and `crc_b` are the
/// checksums of `a` and `b`, and `len_b` is the length of `b` in bytes.
#[must_use]
pub fn crc32c_concat(crc_a: u32, crc_b: u32, len_b: u64) -> u32 {
    crc_fast::checksum_combine(crc_fast::CrcAlgorithm::Crc32Iscsi, u64::from(crc_a), u64::from(crc_b), len_b)
        as u32
}

/// The checksum of a block whose first `len` bytes have checksum `crc` and whose rest is zeros.
///
/// # Panics
/// If `len` exceeds [`BLOCK_SIZE`].
#[must_use]
pub fn pad_to_block(crc: u32, len: usize) -> u32 {
    assert!(len <= BLOCK_SIZE, "a piece of {len} bytes is longer than a block");
    if len == BLOCK_SIZE {
        return crc;
    }
    static ZEROS: [u8; BLOCK_SIZE] = [0; BLOCK_SIZE];
    let pad = &ZEROS[len..];
    crc32c_concat(crc, crc32c(pad), pad.len() as u64)
}

/// The checksum of the first `len` bytes of `piece`, whose checksum should be `crc`. If `piece` is
/// damaged, the result does not match these bytes either, so later readers detect the damage.
///
/// # Panics
/// If `len` exceeds the length of `piece`.
#[must_use]
pub fn crc_of_start(piece: &[u8], crc: u32, len: usize) -> u32 {
    crc32c(&piece[..len]) ^ crc32c(piece) ^ crc
}

/// The checksum of `piece` alone. `crc` is the checksum that a block must have that consists of
/// `piece` and zeros. If `piece` is damaged, the result does not match it either, so later readers
/// detect the damage.
///
/// # Panics
/// If `piece` is longer than [`BLOCK_SIZE`].
#[must_use]
pub fn crc_without_padding(piece: &[u8], crc: u32) -> u32 {
    let alone = crc32c(piece);
    alone ^ pad_to_block(alone, piece.len()) ^ crc
}

/// `offset` rounded down to the start of its block.
#[must_use]
pub const fn align_down(offset: u64) -> u64 {
    offset - offset % BLOCK
}

/// `offset` rounded up to a multiple of the block size, or `None` if the result overflows.
#[must_use]
pub const fn align_up(offset: u64) -> Option<u64> {
    offset.checked_next_multiple_of(BLOCK)
}

/// Number of pieces in a payload of `len` bytes at object offset `offset`.
#[must_use]
pub fn piece_count(offset: u64, len: u64) -> u64 {
    if len == 0 {
        return 0;
    }
    (offset % BLOCK + len).div_ceil(BLOCK)
}

/// The lengths of the pieces of a payload of `len` bytes at object offset `offset`, in order.
pub fn piece_lengths(offset: u64, len: u64) -> impl Iterator<Item = usize> {
    let mut at = offset;
    let mut left = len;
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let piece = left.min(BLOCK - at % BLOCK);
        at = at.wrapping_add(piece);
        left -= piece;
        Some(piece as usize)
    })
}

/// Checksums of the pieces of `data`, a payload at object offset `offset`.
#[must_use]
pub fn piece_checksums(offset: u64, data: &[u8]) -> Vec<u32> {
    let mut rest = data;
    piece_lengths(offset, data.len() as u64)
        .map(|len| {
            let (piece, tail) = rest.split_at(len);
            rest = tail;
            crc32c(piece)
        })
        .collect()
}

/// Error: the content of a piece does not match the checksum that came with the piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("checksum mismatch at offset {offset}: expected {expected:#010x}, found {found:#010x}")]
pub struct ChecksumMismatch {
    /// Object offset of the piece's first byte.
    pub offset: u64,
    /// The checksum that came with the data.
    pub expected: u32,
    /// The checksum computed from the data.
    pub found: u32,
}

/// Bytes that belong at an object offset, with the checksum of each piece; see the [module](self)
/// documentation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Payload {
    data: Bytes,
    checksums: Vec<u32>,
    block_offset: u16,
}

/// Error: the number of checksums of a payload differs from the number of its pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a payload of {len} bytes at offset {offset} has {expected} pieces, but came with {found} checksums")]
pub struct PieceCountMismatch {
    offset: u64,
    len: u64,
    expected: u64,
    found: u64,
}

impl Payload {
    /// Computes the checksums of `data` for object offset `offset`.
    #[must_use]
    pub fn compute(offset: u64, data: Bytes) -> Payload {
        let checksums = piece_checksums(offset, &data);
        Payload { data, checksums, block_offset: (offset % BLOCK) as u16 }
    }

    /// Creates a payload with existing checksums. Does not verify the checksums: see
    /// [`Payload::verify`].
    ///
    /// # Errors
    /// If there is not exactly one checksum per piece.
    pub fn from_parts(offset: u64, data: Bytes, checksums: Vec<u32>) -> Result<Payload, PieceCountMismatch> {
        let expected = piece_count(offset, data.len() as u64);
        if checksums.len() as u64 != expected {
            let found = checksums.len() as u64;
            return Err(PieceCountMismatch { offset, len: data.len() as u64, expected, found });
        }
        Ok(Payload { data, checksums, block_offset: (offset % BLOCK) as u16 })
    }

    /// The bytes.
    #[must_use]
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// One checksum per piece.
    #[must_use]
    pub fn checksums(&self) -> &[u32] {
        &self.checksums
    }

    /// Offset of the first byte within its block: 0 when the payload starts on a block boundary.
    #[must_use]
    pub fn block_offset(&self) -> u64 {
        u64::from(self.block_offset)
    }

    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Returns true if the payload has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// The data and its checksums.
    #[must_use]
    pub fn into_parts(self) -> (Bytes, Vec<u32>) {
        (self.data, self.checksums)
    }

    /// Compares every piece with its checksum.
    ///
    /// # Errors
    /// If a piece does not match its checksum; the error describes the first mismatch. The offset
    /// in the error is relative to the start of the payload's first block.
    pub fn verify(&self) -> Result<(), ChecksumMismatch> {
        verify_pieces(self.block_offset(), &self.data, &self.checksums)
    }
}

/// Compares every piece of `data`, a payload at object offset `offset`, with its checksum.
///
/// # Errors
/// If a piece does not match its checksum; the error describes the first mismatch. A missing
/// checksum counts as zero.
pub fn verify_pieces(offset: u64, data: &[u8], checksums: &[u32]) -> Result<(), ChecksumMismatch> {
    let mut rest = data;
    let mut at = offset;
    let mut expected = checksums.iter();
    for len in piece_lengths(offset, data.len() as u64) {
        let (piece, tail) = rest.split_at(len);
        rest = tail;
        let found = crc32c(piece);
        let expected = expected.next().copied().unwrap_or(0);
        if found != expected {
            return Err(ChecksumMismatch { offset: at, expected, found });
        }
        at += len as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn crc32c_returns_the_check_value_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; BLOCK_SIZE]), ZERO_BLOCK_CRC);
    }

    proptest! {
        #[test]
        fn pad_to_block_equals_the_checksum_of_the_padded_block(data in proptest::collection::vec(any::<u8>(), 0..=BLOCK_SIZE)) {
            let mut block = data.clone();
            block.resize(BLOCK_SIZE, 0);
            prop_assert_eq!(pad_to_block(crc32c(&data), data.len()), crc32c(&block));
        }

        #[test]
        fn the_checksum_of_a_shortened_piece_matches_it_only_if_the_piece_is_intact(
            mut piece in proptest::collection::vec(any::<u8>(), 1..=BLOCK_SIZE),
            cut: usize,
            bit: usize,
        ) {
            let len = cut % piece.len() + 1;
            let (crc, padded) = (crc32c(&piece), pad_to_block(crc32c(&piece), piece.len()));
            prop_assert_eq!(crc_of_start(&piece, crc, len), crc32c(&piece[..len]));
            prop_assert_eq!(crc_without_padding(&piece, padded), crc);
            let bit = bit % (piece.len() * 8);
            piece[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(crc_of_start(&piece, crc, len), crc32c(&piece[..len]));
            prop_assert_ne!(crc_without_padding(&piece, padded), crc32c(&piece));
        }

        #[test]
        fn the_pieces_of_a_payload_cover_it_exactly(offset in 0u64..20_000, len in 0u64..20_000) {
            let lengths: Vec<usize> = piece_lengths(offset, len).collect();
            prop_assert_eq!(lengths.len() as u64, piece_count(offset, len));
            prop_assert_eq!(lengths.iter().sum::<usize>() as u64, len);
            for inner in lengths.iter().skip(1).rev().skip(1) {
                prop_assert_eq!(*inner, BLOCK_SIZE);
            }
        }

        #[test]
        fn verification_detects_a_flipped_bit_in_a_payload(offset in 0u64..9_000, mut data in proptest::collection::vec(any::<u8>(), 1..9_000), bit: usize) {
            let checksums = piece_checksums(offset, &data);
            prop_assert!(verify_pieces(offset, &data, &checksums).is_ok());
            let bit = bit % (data.len() * 8);
            data[bit / 8] ^= 1 << (bit % 8);
            let wrong = verify_pieces(offset, &data, &checksums).unwrap_err();
            prop_assert!(wrong.offset <= offset + bit as u64 / 8);
        }
    }
}
