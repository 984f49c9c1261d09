//! Self-describing data. Each 64-byte record names its object, its change and its position in the
//! data of the change, and ends with a checksum. A reader can therefore tell where any part of an
//! object's data comes from.

use std::fmt;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

/// Length of a record, in bytes.
pub const RECORD_LEN: usize = 64;
const MAGIC: [u8; 4] = *b"OBT1";
const HASHED_LEN: usize = RECORD_LEN - 8;

/// Returns record `index` of the data of a change.
fn record(object: u64, change: u64, index: u32) -> [u8; RECORD_LEN] {
    let mut record = [0; RECORD_LEN];
    record[..4].copy_from_slice(&MAGIC);
    record[4..8].copy_from_slice(&index.to_le_bytes());
    record[8..16].copy_from_slice(&object.to_le_bytes());
    record[16..24].copy_from_slice(&change.to_le_bytes());
    let seed = object.rotate_left(40) ^ change.rotate_left(20) ^ u64::from(index);
    for (n, word) in record[24..HASHED_LEN].chunks_exact_mut(8).enumerate() {
        // The step and the first multiplication of splitmix64 suffice for filler.
        let mixed = (seed.wrapping_add(n as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&(mixed ^ (mixed >> 29)).to_le_bytes());
    }
    let hash = xxh3_64(&record[..HASHED_LEN]);
    record[HASHED_LEN..].copy_from_slice(&hash.to_le_bytes());
    record
}

/// Writes the data of a change from byte `at` to `out`.
pub fn stamp_into(object: u64, change: u64, at: u64, out: &mut [u8]) {
    let mut at = at;
    let mut rest = out;
    while !rest.is_empty() {
        let record = record(object, change, (at / RECORD_LEN as u64) as u32);
        let within = (at % RECORD_LEN as u64) as usize;
        let len = rest.len().min(RECORD_LEN - within);
        let (part, others) = rest.split_at_mut(len);
        part.copy_from_slice(&record[within..within + len]);
        rest = others;
        at += len as u64;
    }
}

/// Returns `len` bytes of the data of a change, from byte `at`.
pub fn stamped(object: u64, change: u64, at: u64, len: u64) -> Bytes {
    let mut data = vec![0; len as usize];
    stamp_into(object, change, at, &mut data);
    data.into()
}

/// The origin of a part of an object's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StampOrigin {
    /// Zeros.
    Zeros,
    /// Complete records of a change of an object.
    Records {
        /// The object for which the data was written.
        object: u64,
        /// The change that wrote the data.
        change: u64,
        /// Position in the data of the change.
        at: u64,
    },
    /// Bytes that are no complete record, for example a part of a record.
    Unrecognised,
}

/// A part of an object's data that has one origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StampedRun {
    /// Offset of the part.
    pub offset: u64,
    /// Length of the part.
    pub len: u64,
    /// Origin of the part.
    pub origin: StampOrigin,
}

impl fmt::Display for StampedRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StampedRun { offset, len, origin } = self;
        write!(f, "{offset}+{len}: ")?;
        match origin {
            StampOrigin::Zeros => write!(f, "zeros"),
            StampOrigin::Records { object, change, at } => {
                write!(f, "change {change} of object {object:x} from its byte {at}")
            }
            StampOrigin::Unrecognised => write!(f, "unrecognised"),
        }
    }
}

/// Returns the origin of every part of `data`, for the report of a violation.
pub fn recognise(data: &[u8]) -> Vec<StampedRun> {
    let mut runs: Vec<StampedRun> = Vec::new();
    let mut offset = 0;
    while offset < data.len() {
        let (len, origin) = recognise_at(&data[offset..]);
        match runs.last_mut() {
            Some(last) if continues(last, &origin) => last.len += len as u64,
            _ => runs.push(StampedRun { offset: offset as u64, len: len as u64, origin }),
        }
        offset += len;
    }
    runs
}

/// Returns whether a part with the origin `origin` continues the run.
fn continues(last: &StampedRun, origin: &StampOrigin) -> bool {
    match (last.origin, *origin) {
        (
            StampOrigin::Records { object, change, at },
            StampOrigin::Records { object: next_object, change: next_change, at: next },
        ) => (object, change, at + last.len) == (next_object, next_change, next),
        (StampOrigin::Zeros, StampOrigin::Zeros) | (StampOrigin::Unrecognised, StampOrigin::Unrecognised) => {
            true
        }
        _ => false,
    }
}

/// Returns the length and the origin of the first part of `data`.
fn recognise_at(data: &[u8]) -> (usize, StampOrigin) {
    if let Some(record) = data.first_chunk::<RECORD_LEN>()
        && record[..4] == MAGIC
        && record[HASHED_LEN..] == xxh3_64(&record[..HASHED_LEN]).to_le_bytes()
    {
        let word = |from: usize| u64::from_le_bytes(record[from..from + 8].try_into().unwrap_or_default());
        let index = u64::from(u32::from_le_bytes([record[4], record[5], record[6], record[7]]));
        let origin =
            StampOrigin::Records { object: word(8), change: word(16), at: index * RECORD_LEN as u64 };
        return (RECORD_LEN, origin);
    }
    // Short runs of zeros also occur within records.
    match data.iter().take_while(|byte| **byte == 0).count() {
        zeros @ 16.. => (zeros, StampOrigin::Zeros),
        _ => (1, StampOrigin::Unrecognised),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_names_its_object_change_and_position() {
        let mut data = stamped(7, 3, 0, 128).to_vec();
        data.extend([0; 100]);
        data.extend(stamped(8, 4, 64, 64));
        data.extend(stamped(7, 3, 128, 10));
        let origins: Vec<_> = recognise(&data).iter().map(|run| (run.len, run.origin)).collect();
        let records = |object, change, at| StampOrigin::Records { object, change, at };
        assert_eq!(
            origins,
            [
                (128, records(7, 3, 0)),
                (100, StampOrigin::Zeros),
                (64, records(8, 4, 64)),
                (10, StampOrigin::Unrecognised)
            ]
        );
    }

    #[test]
    fn a_part_of_the_data_equals_the_same_part_of_the_whole() {
        let whole = stamped(1, 2, 0, 1000);
        assert_eq!(stamped(1, 2, 333, 500), whole.slice(333..833));
    }

    #[test]
    fn a_damaged_record_is_not_recognised() {
        let mut data = stamped(1, 2, 0, 64).to_vec();
        data[30] ^= 1;
        assert!(recognise(&data).iter().all(|run| run.origin == StampOrigin::Unrecognised));
    }
}
