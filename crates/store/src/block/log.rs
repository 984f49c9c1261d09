//! The redo log: a ring of 512-byte sectors, each with a checksum. See `docs/format.md`.
//!
//! A *record* describes one transaction. A *group* is the unit of writing and flushing. A group
//! consists of consecutively numbered sectors with the group's records, padded to 4 KiB. `mkfs`
//! fills the ring with valid sectors. After a torn write, each sector therefore has its old or its
//! new content, and any other content is damage.

use base::block::{BLOCK_SIZE, crc32c};
use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use super::drive::{Drive, read_stable};
use super::extent::Extent;
use super::records::corrupt;
use super::superblock::{SECTOR, Superblock};
use crate::Result;

/// Alignment of groups, in sectors. Each group starts at a multiple of this number and is padded to
/// a multiple of this number.
pub(crate) const GROUP_SECTORS: u64 = 8;
const HEADER: usize = 32;
const PAYLOAD: usize = SECTOR - HEADER;
const FIRST: u8 = 1;
const LAST: u8 = 2;
/// Number of bytes that a scan reads at once.
const SCAN_BYTES: usize = 1 << 20;

/// The record of a transaction in the log: its changes of the index and of the set of allocated
/// blocks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Keys of the index with their new values. `None` removes the key.
    pub(crate) puts: Vec<(Bytes, Option<Bytes>)>,
    /// Allocated blocks.
    pub(crate) allocs: Vec<Extent>,
    /// Freed blocks. They are freed after `allocs` are allocated, so a block may be in both lists.
    pub(crate) frees: Vec<Extent>,
    /// Blocks whose content is in this record and not yet in the data area.
    pub(crate) deferred: Vec<(u64, Bytes)>,
    /// The number that the next new collection or object gets.
    pub(crate) next_nid: u64,
    /// Changed leaves of extent maps: their keys, and the changed blocks in the form of a leaf. A leaf
    /// is in this list or in `puts`.
    pub(crate) patches: Vec<(Bytes, Bytes)>,
}

/// A record as earlier versions wrote it: without the last field of [`Record`].
#[derive(Serialize, Deserialize)]
struct EarlierRecord {
    puts: Vec<(Bytes, Option<Bytes>)>,
    allocs: Vec<Extent>,
    frees: Vec<Extent>,
    deferred: Vec<(u64, Bytes)>,
    next_nid: u64,
}

impl Record {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let of_puts = self.puts.iter().map(|(key, value)| key.len() + value.as_ref().map_or(0, Bytes::len));
        let of_patches = self.patches.iter().map(|(key, patch)| key.len() + patch.len());
        let lists = self.puts.len() + self.patches.len() + self.allocs.len() + self.frees.len();
        let blocks = self.deferred.len() * (BLOCK_SIZE + 16);
        let len = of_puts.chain(of_patches).sum::<usize>() + 16 * lists + blocks + 32;
        postcard::to_extend(self, Vec::with_capacity(len)).expect("a record can always be encoded")
    }

    /// Encodes a record without patches as earlier versions did.
    #[cfg(test)]
    pub(crate) fn encode_earlier(&self) -> Vec<u8> {
        assert!(self.patches.is_empty(), "earlier versions know no patches");
        let Record { puts, allocs, frees, deferred, next_nid, .. } = self.clone();
        let earlier = EarlierRecord { puts, allocs, frees, deferred, next_nid };
        postcard::to_allocvec(&earlier).expect("a record can always be encoded")
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Record> {
        if let Ok(record) = postcard::from_bytes(bytes) {
            return Ok(record);
        }
        let (earlier, rest) = postcard::take_from_bytes(bytes).map_err(|e| corrupt("log record", e))?;
        let EarlierRecord { puts, allocs, frees, deferred, next_nid } = earlier;
        if !rest.is_empty() {
            return Err(corrupt("log record", "its last bytes are invalid"));
        }
        Ok(Record { puts, allocs, frees, deferred, next_nid, patches: Vec::new() })
    }
}

/// A sector's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SectorHeader {
    len: u16,
    flags: u8,
    generation: u64,
    sequence: u64,
    /// All sectors before this sequence number were flushed before this sector was written.
    flushed_through: u64,
}

fn put_sector(out: &mut BytesMut, header: SectorHeader, payload: &[u8]) {
    let start = out.len();
    out.resize(start + SECTOR, 0);
    let sector = &mut out[start..];
    sector[4..6].copy_from_slice(&header.len.to_le_bytes());
    sector[6] = header.flags;
    sector[8..16].copy_from_slice(&header.generation.to_le_bytes());
    sector[16..24].copy_from_slice(&header.sequence.to_le_bytes());
    sector[24..32].copy_from_slice(&header.flushed_through.to_le_bytes());
    sector[HEADER..HEADER + payload.len()].copy_from_slice(payload);
    let crc = crc32c(&sector[4..]);
    sector[..4].copy_from_slice(&crc.to_le_bytes());
}

/// Returns the header and payload of a valid sector.
fn get_sector(sector: &[u8]) -> Option<(SectorHeader, &[u8])> {
    let word = |at: usize| u64::from_le_bytes(sector[at..at + 8].try_into().expect("eight bytes"));
    let len = u16::from_le_bytes([sector[4], sector[5]]);
    if crc32c(&sector[4..]).to_le_bytes() != sector[..4] || usize::from(len) > PAYLOAD {
        return None;
    }
    let header = SectorHeader {
        len,
        flags: sector[6],
        generation: word(8),
        sequence: word(16),
        flushed_through: word(24),
    };
    Some((header, &sector[HEADER..HEADER + usize::from(len)]))
}

/// Returns the number of sectors of a group with `bytes` bytes of records, including their length
/// prefixes.
pub(crate) fn group_sectors(bytes: usize) -> u64 {
    (bytes.div_ceil(PAYLOAD).max(1) as u64).next_multiple_of(GROUP_SECTORS)
}

/// Returns the number of bytes that a record of `len` bytes adds to a group.
pub(crate) fn record_bytes(len: usize) -> usize {
    len + 4
}

/// Encodes a group that starts at `sequence`.
pub(crate) fn encode_group(
    generation: u64,
    sequence: u64,
    flushed_through: u64,
    records: &[Vec<u8>],
) -> BytesMut {
    let mut stream = Vec::with_capacity(records.iter().map(|r| record_bytes(r.len())).sum());
    for record in records {
        stream.extend_from_slice(&(record.len() as u32).to_le_bytes());
        stream.extend_from_slice(record);
    }
    let sectors = group_sectors(stream.len());
    let mut out = BytesMut::with_capacity(sectors as usize * SECTOR);
    let mut pieces = stream.chunks(PAYLOAD);
    for i in 0..sectors {
        let payload = pieces.next().unwrap_or_default();
        let flags = if i == 0 { FIRST } else { 0 } | if i + 1 == sectors { LAST } else { 0 };
        let header = SectorHeader {
            len: payload.len() as u16,
            flags,
            generation,
            sequence: sequence + i,
            flushed_through,
        };
        put_sector(&mut out, header, payload);
    }
    out
}

/// Decodes the records of a group from its payload.
pub(crate) fn decode_group(mut stream: &[u8]) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    while let Some((len, rest)) = stream.split_first_chunk::<4>() {
        let len = u32::from_le_bytes(*len) as usize;
        let Some((record, rest)) = rest.split_at_checked(len) else {
            return Err(corrupt("log group", "a record extends beyond the end of its group"));
        };
        records.push(Record::decode(record)?);
        stream = rest;
    }
    if stream.is_empty() { Ok(records) } else { Err(corrupt("log group", "bytes follow its last record")) }
}

/// Returns a part of the initial content of a log: valid sectors of generation 0 with the given
/// sequence numbers.
pub(crate) fn blank(sequences: std::ops::Range<u64>) -> BytesMut {
    let mut out = BytesMut::with_capacity(sequences.clone().count() * SECTOR);
    for sequence in sequences {
        put_sector(
            &mut out,
            SectorHeader { len: 0, flags: 0, generation: 0, sequence, flushed_through: 0 },
            &[],
        );
    }
    out
}

/// A complete group found by [`scan`].
#[derive(Debug)]
pub(crate) struct FoundGroup {
    /// Sequence number after its last sector.
    pub(crate) end: u64,
    pub(crate) records: Vec<Record>,
}

/// Content of the log after the last checkpoint.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// The complete groups, in the order of the log.
    pub(crate) groups: Vec<FoundGroup>,
    /// Sequence number before which all sectors are known to have been flushed.
    pub(crate) witnessed: u64,
    /// The highest generation of a sector after the checkpoint.
    pub(crate) generation: u64,
    /// Descriptions of the damage, each with its location. Empty unless `repair` is set.
    pub(crate) damage: Vec<String>,
}

/// Reads sectors that a scan has found, and writes them again.
///
/// # Errors
/// If the drive fails, or a sector is damaged in the meantime.
pub(crate) fn rewrite(drive: &dyn Drive, sb: &Superblock, sectors: std::ops::Range<u64>) -> Result<()> {
    let are_valid = |bytes: &[u8]| bytes.chunks_exact(SECTOR).all(|sector| get_sector(sector).is_some());
    for (first, count, offset) in chunks(sb, sectors) {
        let mut content = vec![0; count * SECTOR];
        read_stable(drive, offset, &mut content, are_valid)?;
        if !are_valid(&content) {
            return Err(corrupt("log", format!("a sector after sector {first} has a wrong checksum")));
        }
        drive.write_at(offset, &content)?;
    }
    Ok(())
}

/// Writes valid sectors without content over these sectors.
///
/// # Errors
/// If the drive fails.
pub(crate) fn erase(drive: &dyn Drive, sb: &Superblock, sectors: std::ops::Range<u64>) -> Result<()> {
    for (first, count, offset) in chunks(sb, sectors) {
        drive.write_at(offset, &blank(first..first + count as u64))?;
    }
    Ok(())
}

/// Divides sectors into chunks that are contiguous on the drive: first sector, number of sectors and
/// offset on the drive.
fn chunks(sb: &Superblock, sectors: std::ops::Range<u64>) -> impl Iterator<Item = (u64, usize, u64)> {
    let (ring, log) = (sb.log_sectors(), sb.log.offset);
    let mut at = sectors.start;
    std::iter::from_fn(move || {
        let (first, slot) = (at, at % ring);
        let left = sectors.end.saturating_sub(first).min(ring - slot) as usize;
        let count = left.min(SCAN_BYTES / SECTOR);
        at += count as u64;
        (count > 0).then_some((first, count, log + slot * SECTOR as u64))
    })
}

/// Returns the sequence number of the newest valid sector of the log; `None` if there is none.
///
/// # Errors
/// If the drive cannot be read.
#[cfg(feature = "sim")]
pub(crate) fn newest_sector(drive: &dyn Drive, sb: &Superblock) -> Result<Option<u64>> {
    let mut ring = vec![0; sb.log.len as usize];
    drive.read_at(sb.log.offset, &mut ring)?;
    let valid = ring.chunks_exact(SECTOR).filter_map(get_sector);
    let newest = valid.map(|(header, _)| header).max_by_key(|header| (header.generation, header.sequence));
    Ok(newest.map(|header| header.sequence))
}

/// Reads the log from sequence number `start` on, which has generation `generation` or a higher one.
/// Each mount begins a higher generation with a group directly behind the groups that it has
/// recovered, so that later sectors of earlier generations do not continue the log. With `repair`,
/// damage is listed and ends the log. Without `repair`, damage is an error.
///
/// # Errors
/// [`StoreError::Corrupt`](crate::StoreError::Corrupt) for damage.
pub(crate) fn scan(
    drive: &dyn Drive,
    sb: &Superblock,
    mut generation: u64,
    start: u64,
    repair: bool,
) -> Result<Scan> {
    let ring = sb.log_sectors();
    let mut found = Scan { generation, ..Scan::default() };
    let mut stream = Vec::new();
    let mut open = false;
    let mut end = start;
    let mut ended = false;
    let mut buffer = vec![0; SCAN_BYTES];
    let mut sequence = start;
    while sequence < start + ring {
        let slot = sequence % ring;
        let sectors =
            (SCAN_BYTES / SECTOR).min((ring - slot) as usize).min((start + ring - sequence) as usize);
        let chunk = &mut buffer[..sectors * SECTOR];
        drive.read_at(sb.log.offset + slot * SECTOR as u64, chunk)?;
        for sector in chunk.chunks_exact(SECTOR) {
            let valid = get_sector(sector);
            let current = valid.filter(|(h, _)| h.generation >= generation && h.sequence == sequence);
            if let Some((header, _)) = current {
                found.generation = found.generation.max(header.generation);
                found.witnessed = found.witnessed.max(header.flushed_through);
                let begins_generation = !open && !ended && header.flags & FIRST != 0;
                if begins_generation {
                    generation = header.generation;
                }
            }
            match (current.filter(|(h, _)| h.generation == generation), valid) {
                (Some((header, payload)), _) => {
                    let first = header.flags & FIRST != 0;
                    if !ended && first == open {
                        found.damage.push(format!(
                            "sector {sequence} of the log does not continue the sectors before it"
                        ));
                        ended = true;
                    }
                    if !ended {
                        open = true;
                        stream.extend_from_slice(payload);
                        if header.flags & LAST != 0 {
                            found
                                .groups
                                .push(FoundGroup { end: sequence + 1, records: decode_group(&stream)? });
                            stream.clear();
                            open = false;
                            end = sequence + 1;
                        }
                    }
                }
                (None, Some(_)) => ended = true,
                (None, None) if ended => tracing::warn!(sequence, "a sector beyond the log's end is damaged"),
                (None, None) => {
                    found.damage.push(format!("sector {sequence} of the log has a wrong checksum"));
                    ended = true;
                }
            }
            sequence += 1;
        }
    }
    if found.witnessed > end {
        found.damage.push(format!(
            "the log ends at sector {end}, but all sectors before {} were flushed",
            found.witnessed
        ));
    }
    match found.damage.first() {
        Some(damage) if !repair && !base::mutant!(DamageAsTornTail) => Err(corrupt("log", damage)),
        _ => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::recovery::{TargetSizes, layout};
    use super::super::sim::RecordedDrive;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn log_groups_survive_encoding_and_decoding(lens in proptest::collection::vec(0usize..3000, 0..6)) {
            let records: Vec<Record> = lens.iter().map(|&len| Record {
                puts: vec![(Bytes::from(vec![1; len]), Some(Bytes::from(vec![2; len]))), (Bytes::from("k"), None)],
                allocs: vec![Extent { start: len as u64, len: 3 }],
                patches: vec![(Bytes::from("leaf"), Bytes::from(vec![3; len / 2]))],
                ..Record::default()
            }).collect();
            let encoded: Vec<Vec<u8>> = records.iter().map(Record::encode).collect();
            let group = encode_group(5, 16, 8, &encoded);
            prop_assert_eq!(group.len() as u64, SECTOR as u64 * group_sectors(encoded.iter().map(|r| record_bytes(r.len())).sum()));
            let stream: Vec<u8> = group.chunks(SECTOR).flat_map(|s| get_sector(s).unwrap().1.to_vec()).collect();
            prop_assert_eq!(decode_group(&stream).unwrap(), records);
        }

        #[test]
        fn decoding_arbitrary_bytes_as_log_groups_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = decode_group(&bytes);
            let mut sector = bytes;
            sector.resize(SECTOR, 0);
            let _ = get_sector(&sector);
            let crc = crc32c(&sector[4..]);
            sector[..4].copy_from_slice(&crc.to_le_bytes());
            let _ = get_sector(&sector);
        }
    }

    #[test]
    fn a_record_of_an_earlier_version_can_be_read() {
        let (puts, extent) = (vec![(Bytes::from("k"), Some(Bytes::from("v")))], Extent { start: 1, len: 2 });
        let (allocs, frees, deferred) = (vec![extent], vec![extent], vec![(7, Bytes::from("block"))]);
        let record = Record { puts, allocs, frees, deferred, next_nid: 9, patches: Vec::new() };
        let bytes = record.encode_earlier();
        assert_eq!(Record::decode(&bytes).unwrap(), record);
        Record::decode(&[&bytes[..], &[1]].concat()).unwrap_err();
    }

    /// A log with these groups: generation, sequence number, number up to which the log was flushed,
    /// and a record's number.
    fn log_with(groups: &[(u64, u64, u64, u64)]) -> (Arc<RecordedDrive>, Superblock) {
        let sizes = TargetSizes { log_bytes: Some(256 << 10), ..TargetSizes::default() };
        let sb = layout(8 << 20, &sizes).unwrap();
        let drive = RecordedDrive::new(vec![0; sb.size as usize]);
        drive.write_at(sb.log.offset, &blank(0..sb.log_sectors())).unwrap();
        for (generation, sequence, flushed_through, next_nid) in groups {
            let record = Record { next_nid: *next_nid, ..Record::default() }.encode();
            let group = encode_group(*generation, *sequence, *flushed_through, &[record]);
            drive.write_at(sb.log.offset + sequence * SECTOR as u64, &group).unwrap();
        }
        (drive, sb)
    }

    /// Returns the numbers of the records that a scan from sector 8 and generation 1 finds.
    fn records(drive: &RecordedDrive, sb: &Superblock) -> Result<Vec<u64>> {
        let found = scan(drive, sb, 1, 8, false)?;
        Ok(found.groups.iter().flat_map(|group| group.records.iter().map(|r| r.next_nid)).collect())
    }

    /// Groups 1 to 3 of generation 1. A mount discarded groups 2 and 3 and began generation 2.
    const DISCARDED: [(u64, u64, u64, u64); 5] =
        [(1, 8, 8, 1), (1, 16, 8, 2), (1, 24, 8, 3), (2, 16, 16, 4), (2, 24, 24, 5)];

    #[test]
    fn discarded_groups_do_not_continue_the_log_of_a_later_mount() {
        for (written, expected) in [(3, vec![1, 2, 3]), (4, vec![1, 4]), (5, vec![1, 4, 5])] {
            let (drive, sb) = log_with(&DISCARDED[..written]);
            assert_eq!(records(&drive, &sb).unwrap(), expected);
            let newest = if written > 3 { 2 } else { 1 };
            assert_eq!(scan(&*drive, &sb, 1, 8, false).unwrap().generation, newest);
        }
    }

    #[test]
    fn a_torn_first_group_of_a_mount_ends_the_log() {
        let record = Record { next_nid: 4, ..Record::default() }.encode();
        let group = encode_group(2, 16, 16, &[record]);
        for at in (1..GROUP_SECTORS as usize).map(|sectors| sectors * SECTOR) {
            for (first, part) in [(0, &group[..at]), (at, &group[at..])] {
                let (drive, sb) = log_with(&DISCARDED[..3]);
                drive.write_at(sb.log.offset + (16 * SECTOR + first) as u64, part).unwrap();
                assert_eq!(records(&drive, &sb).unwrap(), [1]);
                assert_eq!(scan(&*drive, &sb, 1, 8, false).unwrap().generation, 2);
            }
        }
    }

    #[test]
    fn a_lost_first_group_of_a_mount_is_damage() {
        let (drive, sb) = log_with(&DISCARDED);
        drive.write_at(sb.log.offset + 16 * SECTOR as u64, &blank(16..24)).unwrap();
        let found = records(&drive, &sb);
        assert!(
            found.as_ref().is_err_and(|e| e.to_string().contains("the log ends at sector 16")),
            "{found:?}"
        );
    }
}
