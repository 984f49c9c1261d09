//! The header of a fragment file.

use base::block::crc32c;

use super::{FileLayout, UNIT_MAX, UNIT_MULTIPLE};
use crate::Geometry;

/// Length of a header, in bytes.
pub(super) const LEN: usize = 64;
const MAGIC: [u8; 8] = *b"obshard\0";
const VERSION: u16 = 1;

/// Contents of a fragment's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FragmentHeader {
    /// Layout of the encoding, the same in all its fragments.
    pub layout: FileLayout,
    /// Index of the fragment.
    pub index: usize,
}

/// Reason why bytes are not a valid header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadHeader {
    #[error("it does not begin with the magic number of a fragment, or was never finished")]
    Magic,
    #[error("its header is damaged")]
    Checksum,
    #[error("it has format version {0}, which this program does not support")]
    Version(u16),
    #[error("its header contains an impossible value")]
    Value,
}

impl FragmentHeader {
    pub(super) fn to_bytes(self) -> [u8; LEN] {
        let FileLayout { geometry, unit, len, id } = self.layout;
        let mut bytes = [0; LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        // These values fit into their fields: a geometry has at most 255 fragments, and a unit at
        // most UNIT_MAX bytes.
        bytes[10] = geometry.k() as u8;
        bytes[11] = geometry.m() as u8;
        bytes[12] = self.index as u8;
        bytes[16..20].copy_from_slice(&(unit as u32).to_le_bytes());
        bytes[24..32].copy_from_slice(&len.to_le_bytes());
        bytes[32..48].copy_from_slice(&id);
        let crc = crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; LEN]) -> Result<FragmentHeader, BadHeader> {
        if bytes[..8] != MAGIC {
            return Err(BadHeader::Magic);
        }
        if crc32c(&bytes[..60]) != u32::from_le_bytes(part(bytes, 60)) {
            return Err(BadHeader::Checksum);
        }
        let version = u16::from_le_bytes(part(bytes, 8));
        if version != VERSION {
            return Err(BadHeader::Version(version));
        }
        let geometry = Geometry::new(usize::from(bytes[10]), usize::from(bytes[11]));
        let geometry = geometry.map_err(|_| BadHeader::Value)?;
        let (index, unit) = (usize::from(bytes[12]), u32::from_le_bytes(part(bytes, 16)) as usize);
        let reserved = [&bytes[13..16], &bytes[20..24], &bytes[48..60]].concat();
        let len = u64::from_le_bytes(part(bytes, 24));
        let layout = FileLayout { geometry, unit, len, id: part(bytes, 32) };
        let possible = index < geometry.fragments() && is_unit(unit) && layout.is_possible();
        if possible && reserved.iter().all(|byte| *byte == 0) {
            Ok(FragmentHeader { layout, index })
        } else {
            Err(BadHeader::Value)
        }
    }
}

/// Returns true if `unit` is a valid size for the units of fragment files.
pub(super) fn is_unit(unit: usize) -> bool {
    unit > 0 && unit <= UNIT_MAX && unit.is_multiple_of(UNIT_MULTIPLE)
}

fn part<const N: usize>(bytes: &[u8; LEN], at: usize) -> [u8; N] {
    std::array::from_fn(|n| bytes[at + n])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> FragmentHeader {
        let geometry = Geometry::new(4, 2).unwrap();
        FragmentHeader {
            layout: FileLayout { geometry, unit: 65536, len: 1_000_000, id: *b"0123456789abcdef" },
            index: 5,
        }
    }

    /// Corrects the checksum of a header, so that the checks after the checksum are tested.
    fn sealed(mut bytes: [u8; LEN]) -> [u8; LEN] {
        let crc = crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    #[test]
    fn the_bytes_of_a_header_match_the_documented_format() {
        let mut expected = [0; LEN];
        expected[..13].copy_from_slice(b"obshard\0\x01\0\x04\x02\x05");
        expected[16..20].copy_from_slice(&[0, 0, 1, 0]);
        expected[24..27].copy_from_slice(&[0x40, 0x42, 0x0f]);
        expected[32..48].copy_from_slice(b"0123456789abcdef");
        assert_eq!(header().to_bytes(), sealed(expected));
        assert_eq!(FragmentHeader::from_bytes(&sealed(expected)), Ok(header()));
    }

    #[test]
    fn headers_with_impossible_values_are_refused() {
        let changed = |at: usize, value: &[u8]| {
            let mut bytes = header().to_bytes();
            bytes[at..at + value.len()].copy_from_slice(value);
            FragmentHeader::from_bytes(&sealed(bytes))
        };
        assert_eq!(changed(0, b"x"), Err(BadHeader::Magic));
        assert_eq!(changed(8, &[2]), Err(BadHeader::Version(2)));
        // No data fragments; too many fragments; index too high; reserved bytes set; unit zero;
        // unit not a multiple of 64; unit too long; length that overflows.
        let values: [(usize, &[u8]); 9] = [
            (10, &[0]),
            (10, &[254]),
            (12, &[6]),
            (13, &[1]),
            (59, &[1]),
            (16, &[0, 0, 0, 0]),
            (16, &[1, 0, 1, 0]),
            (16, &[0, 0, 0, 1]),
            (24, &[0xff; 8]),
        ];
        for (at, value) in values {
            assert_eq!(changed(at, value), Err(BadHeader::Value), "{value:?} at {at}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_decode_to_a_header_or_an_error(bytes: [u8; LEN], begins: bool) {
            let mut bytes = bytes;
            if begins {
                bytes[..10].copy_from_slice(b"obshard\0\x01\0");
            }
            if let Ok(header) = FragmentHeader::from_bytes(&sealed(bytes)) {
                prop_assert_eq!(header.to_bytes(), sealed(bytes));
            }
        }

        #[test]
        fn a_flipped_bit_in_a_header_is_detected(bit in 0..LEN * 8) {
            let mut bytes = header().to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(FragmentHeader::from_bytes(&bytes).is_err());
        }
    }
}
