//! Keys and values of the index. See `docs/format.md`.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::{CollectionId, ObjectId, Result, StoreError};

/// Number of blocks that a leaf of an extent map covers (1 MiB).
pub(crate) const LEAF_BLOCKS: u64 = 256;
/// An onode contains the first leaf of its object if the encoded leaf has at most this many bytes. An
/// object of 128 KiB in one run of blocks needs 136 bytes.
pub(crate) const INLINE_LEAF: usize = 144;
/// Number of blocks that a page of reference counts covers.
pub(crate) const REF_BLOCKS: u64 = 1024;

/// Builds keys. The first byte of a key is its kind. Numbers are big endian, so that keys sort by
/// number.
pub(crate) mod key {
    use super::{BufMut, Bytes, BytesMut, CollectionId};

    pub(crate) const META: &[u8] = b"M";
    pub(crate) const COLLECTION: u8 = b'C';
    pub(crate) const ONODE: u8 = b'O';
    pub(crate) const LEAF: u8 = b'S';
    pub(crate) const OMAP: u8 = b'P';
    pub(crate) const REFS: u8 = b'R';
    pub(crate) const BITMAP: u8 = b'B';

    fn make(kind: u8, number: u64, rest: &[u8]) -> Bytes {
        let mut key = BytesMut::with_capacity(9 + rest.len());
        key.put_u8(kind);
        key.put_u64(number);
        key.put_slice(rest);
        key.freeze()
    }

    pub(crate) fn collection(cid: &CollectionId) -> Bytes {
        [&[COLLECTION], &cid.as_bytes()[..]].concat().into()
    }

    pub(crate) fn onode(collection: u64, oid: &[u8]) -> Bytes {
        make(ONODE, collection, oid)
    }

    pub(crate) fn leaf(nid: u64, leaf: u64) -> Bytes {
        make(LEAF, nid, &leaf.to_be_bytes())
    }

    pub(crate) fn omap(nid: u64, key: &[u8]) -> Bytes {
        make(OMAP, nid, key)
    }

    pub(crate) fn refs(chunk: u64) -> Bytes {
        make(REFS, chunk, &[])
    }

    pub(crate) fn bitmap(page: u64) -> Bytes {
        make(BITMAP, page, &[])
    }

    /// Returns the first possible key with this kind and number, and the first key after all keys
    /// with this kind and number.
    pub(crate) fn range(kind: u8, number: u64) -> (Bytes, Bytes) {
        (make(kind, number, &[]), make(kind, number + 1, &[]))
    }

    /// Returns the first possible key of a kind, and the first key after all keys of the kind.
    pub(crate) fn kind_range(kind: u8) -> (Bytes, Bytes) {
        (vec![kind].into(), vec![kind + 1].into())
    }

    /// Returns the number in a key that begins with a kind and a number.
    pub(crate) fn number(key: &[u8]) -> Option<u64> {
        Some(u64::from_be_bytes(key.get(1..9)?.try_into().ok()?))
    }

    /// Returns the part of a key after kind and number.
    pub(crate) fn rest(key: &Bytes) -> Bytes {
        key.slice(9.min(key.len())..)
    }
}

/// Returns the error that an item of the target, named `what`, is corrupt.
pub(crate) fn corrupt(what: &str, detail: impl ToString) -> StoreError {
    StoreError::Corrupt { what: what.to_owned(), detail: detail.to_string() }
}

/// State of the index, which each checkpoint stores.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    /// Number of the checkpoint.
    pub(crate) checkpoint: u64,
    /// Generation of the log. Sectors written after the checkpoint carry this number.
    pub(crate) log_generation: u64,
    /// Sequence number of the first log sector whose changes are not in the index.
    pub(crate) log_start: u64,
    /// The number that the next new collection or object gets.
    pub(crate) next_nid: u64,
    /// Estimate of the bytes of storage that the index uses; `None` if an earlier version wrote the
    /// record.
    pub(crate) index_used: Option<u64>,
}

/// The meta record as earlier versions wrote it: without the last field of [`Meta`].
#[derive(Serialize, Deserialize)]
struct EarlierMeta {
    checkpoint: u64,
    log_generation: u64,
    log_start: u64,
    next_nid: u64,
}

/// The onode of an object: all metadata of the object except its omap entries and all leaves of its
/// extent map but the first.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Onode {
    /// The object's number, which is part of the keys of its leaves and omap entries.
    pub(crate) nid: u64,
    /// Size, in bytes.
    pub(crate) size: u64,
    /// Number of blocks that are not holes.
    pub(crate) blocks: u64,
    /// Whether the object may have omap entries.
    pub(crate) has_omap: bool,
    pub(crate) omap_header: Bytes,
    pub(crate) xattrs: BTreeMap<Bytes, Bytes>,
    /// The encoded first leaf of the extent map. If it is empty, the leaf may have a key of its own.
    #[serde(skip)]
    pub(crate) leaf: Bytes,
}

impl Onode {
    /// Encodes the onode. The first leaf follows the other fields.
    pub(crate) fn encode(&self) -> Bytes {
        let out = Vec::with_capacity(64 + self.leaf.len());
        let mut out = postcard::to_extend(self, out).expect("an onode can always be encoded");
        out.extend_from_slice(&self.leaf);
        out.into()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Onode> {
        let (onode, leaf): (Onode, &[u8]) =
            postcard::take_from_bytes(bytes).map_err(|e| corrupt("onode", e))?;
        Ok(Onode { leaf: Bytes::copy_from_slice(leaf), ..onode })
    }
}

impl Meta {
    pub(crate) fn encode(&self) -> Bytes {
        postcard::to_allocvec(self).expect("the meta record can always be encoded").into()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Meta> {
        if let Ok(meta) = postcard::from_bytes(bytes) {
            return Ok(meta);
        }
        let EarlierMeta { checkpoint, log_generation, log_start, next_nid } =
            postcard::from_bytes(bytes).map_err(|e| corrupt("meta record of the index", e))?;
        Ok(Meta { checkpoint, log_generation, log_start, next_nid, index_used: None })
    }
}

/// Decodes the entry of a collection: its id from the key, and its number from the value.
pub(crate) fn decode_collection(key: &[u8], value: &[u8]) -> Result<(CollectionId, u64)> {
    let id =
        CollectionId::new(key.get(1..).unwrap_or_default().to_vec()).map_err(|e| corrupt("collection", e))?;
    let number = value.try_into().map_err(|_| corrupt("collection", "its number does not have 8 bytes"))?;
    Ok((id, u64::from_le_bytes(number)))
}

/// Returns the object id in an onode's key.
pub(crate) fn decode_oid(key: &Bytes) -> Result<ObjectId> {
    ObjectId::new(key::rest(key)).map_err(|e| corrupt("key of an onode", e))
}

/// Location of one block of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockRef {
    /// Number of the block in the data area.
    pub(crate) block: u64,
    /// CRC-32C of the whole block.
    pub(crate) crc: u32,
    /// Whether the block may have other references. The page of reference counts says how many
    /// references the block has.
    pub(crate) shared: bool,
}

/// The extent map of 1 MiB of an object. `None` is a hole, and so is every position after the end
/// of the list.
#[derive(Debug, Clone, Default)]
pub(crate) struct MapLeaf {
    /// The blocks by position, at most [`LEAF_BLOCKS`].
    pub(crate) blocks: Vec<Option<BlockRef>>,
}

/// Flag in the first block number of an encoded run. The flag says that the run's blocks may have
/// other references.
const SHARED: u64 = 1 << 47;

impl MapLeaf {
    /// Returns the block at position `place`.
    pub(crate) fn get(&self, place: u64) -> Option<BlockRef> {
        self.blocks.get(place as usize).copied().flatten()
    }

    /// Maps consecutive positions, beginning with `first`, to the blocks in `new`. Passes each
    /// replaced block to `released`.
    pub(crate) fn replace<E>(
        &mut self,
        first: u64,
        new: &[Option<BlockRef>],
        mut released: impl FnMut(BlockRef) -> Result<(), E>,
    ) -> Result<(), E> {
        let end = first as usize + new.len();
        if self.blocks.len() < end {
            self.blocks.resize(end, None);
        }
        for (slot, new) in self.blocks[first as usize..end].iter_mut().zip(new) {
            if let Some(old) = std::mem::replace(slot, *new) {
                released(old)?;
            }
        }
        Ok(())
    }

    /// Returns the number of blocks that are not holes.
    pub(crate) fn mapped(&self) -> u64 {
        self.blocks.iter().flatten().count() as u64
    }

    /// Encodes the leaf as runs of blocks: {position in the leaf u8, length - 1 u8, first block u48
    /// with *shared* in the top bit, checksums}.
    pub(crate) fn encode(&self) -> Bytes {
        let continues = |pair: &&[Option<BlockRef>]| match pair {
            [Some(one), Some(next)] => next.block == one.block + 1 && next.shared == one.shared,
            _ => false,
        };
        let mapped = self.mapped() as usize;
        let runs = mapped - self.blocks.windows(2).filter(continues).count();
        let mut out = BytesMut::with_capacity(8 * runs + 4 * mapped);
        let mut at = 0;
        while at < self.blocks.len() {
            let Some(first) = self.blocks[at] else {
                at += 1;
                continue;
            };
            let follows = |i: usize| {
                let expected = first.block + (i - at) as u64;
                self.blocks[i].is_some_and(|b| b.block == expected && b.shared == first.shared)
            };
            let len = 1 + (at + 1..self.blocks.len()).take_while(|&i| follows(i)).count();
            out.put_u8(at as u8);
            out.put_u8((len - 1) as u8);
            out.put_uint_le(first.block | if first.shared { SHARED } else { 0 }, 6);
            self.blocks[at..at + len].iter().flatten().for_each(|b| out.put_u32_le(b.crc));
            at += len;
        }
        out.freeze()
    }

    /// Decodes a leaf. All its block numbers must be less than `limit`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the leaf is invalid.
    pub(crate) fn decode(bytes: &[u8], limit: u64) -> Result<MapLeaf> {
        let mut blocks = Vec::with_capacity((bytes.len() / 4).min(LEAF_BLOCKS as usize));
        for run in LeafRuns::new(bytes, limit) {
            let run = run?;
            blocks.resize(run.at, None);
            blocks.extend(run.blocks().map(Some));
        }
        Ok(MapLeaf { blocks })
    }

    /// Returns the blocks at positions `first..end` of an encoded leaf, whose block numbers must be
    /// less than `limit`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the leaf is invalid. Damage behind position `end` is not noticed.
    pub(crate) fn decode_part(
        bytes: &[u8],
        limit: u64,
        first: u64,
        end: u64,
    ) -> Result<Vec<Option<BlockRef>>> {
        let (first, end) = (first as usize, end as usize);
        let mut blocks = vec![None; end - first];
        for run in LeafRuns::new(bytes, limit) {
            let run = run?;
            if run.at >= end {
                break;
            }
            let places = run.at.max(first)..(run.at + run.crcs.len()).min(end);
            if !places.is_empty() {
                let found = run.blocks().skip(places.start - run.at);
                let slots = &mut blocks[places.start - first..places.end - first];
                slots.iter_mut().zip(found).for_each(|(slot, block)| *slot = Some(block));
            }
        }
        Ok(blocks)
    }
}

/// A run of an encoded leaf.
struct LeafRun<'a> {
    /// Position of the first block in the leaf.
    at: usize,
    start: u64,
    shared: bool,
    /// Checksums of the blocks.
    crcs: &'a [[u8; 4]],
}

impl LeafRun<'_> {
    fn blocks(&self) -> impl Iterator<Item = BlockRef> {
        let shared = self.shared;
        let block =
            move |(crc, block): (&[u8; 4], u64)| BlockRef { block, crc: u32::from_le_bytes(*crc), shared };
        self.crcs.iter().zip(self.start..).map(block)
    }
}

/// The runs of an encoded leaf. The iterator ends after an error.
struct LeafRuns<'a> {
    bytes: &'a [u8],
    limit: u64,
    /// Position after the last run.
    next: usize,
}

impl<'a> LeafRuns<'a> {
    fn new(bytes: &'a [u8], limit: u64) -> LeafRuns<'a> {
        LeafRuns { bytes, limit, next: 0 }
    }

    fn run(&mut self) -> std::result::Result<LeafRun<'a>, &'static str> {
        let (head, rest) = self.bytes.split_first_chunk::<8>().ok_or("bytes follow its last run")?;
        let (at, len) = (usize::from(head[0]), usize::from(head[1]) + 1);
        let mut start = [0; 8];
        start[..6].copy_from_slice(&head[2..]);
        let start = u64::from_le_bytes(start);
        let (start, shared) = (start & !SHARED, start & SHARED != 0);
        if at < self.next || at + len > LEAF_BLOCKS as usize || rest.len() < len * 4 {
            return Err("a run overlaps another run, ends outside the leaf or lacks checksums");
        }
        if start + len as u64 > self.limit {
            return Err("a block lies outside the data area");
        }
        let (crcs, rest) = rest.split_at(len * 4);
        (self.bytes, self.next) = (rest, at + len);
        Ok(LeafRun { at, start, shared, crcs: crcs.as_chunks::<4>().0 })
    }
}

impl<'a> Iterator for LeafRuns<'a> {
    type Item = Result<LeafRun<'a>>;

    fn next(&mut self) -> Option<Result<LeafRun<'a>>> {
        if self.bytes.is_empty() {
            return None;
        }
        Some(self.run().map_err(|detail| {
            self.bytes = &[];
            corrupt("leaf", detail)
        }))
    }
}

/// Reference counts of 1024 blocks: the number of references of each block beyond the first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct RefPage {
    pub(crate) extra: BTreeMap<u16, u32>,
}

impl RefPage {
    /// Encodes the counts as runs of equal counts: {first block u16, number of blocks u16, extra
    /// references u32}. Returns `None` if no block has extra references.
    pub(crate) fn encode(&self) -> Option<Bytes> {
        let mut runs: Vec<(u16, u16, u32)> = Vec::new();
        for (&block, &extra) in &self.extra {
            match runs.last_mut() {
                Some((start, len, same)) if *start + *len == block && *same == extra => *len += 1,
                _ => runs.push((block, 1, extra)),
            }
        }
        let mut out = BytesMut::with_capacity(runs.len() * 8);
        for (start, len, extra) in runs {
            out.put_u16_le(start);
            out.put_u16_le(len);
            out.put_u32_le(extra);
        }
        (!out.is_empty()).then(|| out.freeze())
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<RefPage> {
        let mut page = RefPage::default();
        if !bytes.len().is_multiple_of(8) {
            return Err(corrupt("reference counts", "the length is not a multiple of 8"));
        }
        let mut next = 0;
        for run in bytes.chunks_exact(8) {
            let start = u16::from_le_bytes([run[0], run[1]]);
            let len = u16::from_le_bytes([run[2], run[3]]);
            let extra = u32::from_le_bytes([run[4], run[5], run[6], run[7]]);
            let end = u64::from(start) + u64::from(len);
            if start < next || len == 0 || extra == 0 || end > REF_BLOCKS {
                return Err(corrupt("reference counts", "a run is out of order, out of range or empty"));
            }
            page.extra.extend((start..start + len).map(|b| (b, extra)));
            next = start + len;
        }
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn leaves() -> impl Strategy<Value = MapLeaf> {
        let block = proptest::option::of((0u64..1000, any::<u32>(), any::<bool>()));
        proptest::collection::vec((block, any::<bool>()), 0..=LEAF_BLOCKS as usize).prop_map(|items| {
            let mut leaf = MapLeaf { blocks: vec![None; items.len()] };
            let mut last: Option<BlockRef> = None;
            for (slot, (item, follow)) in leaf.blocks.iter_mut().zip(items) {
                *slot = match (last, item) {
                    (Some(l), Some((_, crc, _))) if follow => {
                        Some(BlockRef { block: l.block + 1, crc, shared: l.shared })
                    }
                    (_, item) => item.map(|(block, crc, shared)| BlockRef { block, crc, shared }),
                };
                last = *slot;
            }
            leaf
        })
    }

    #[test]
    fn a_meta_record_of_an_earlier_version_can_be_read() {
        let (checkpoint, log_generation, log_start, next_nid) = (300, 2, 1 << 40, 77);
        let earlier = EarlierMeta { checkpoint, log_generation, log_start, next_nid };
        let found = Meta::decode(&postcard::to_allocvec(&earlier).unwrap()).unwrap();
        let meta = Meta { checkpoint, log_generation, log_start, next_nid, index_used: None };
        assert_eq!(found, meta);
        let meta = Meta { index_used: Some(5 << 20), ..meta };
        assert_eq!(Meta::decode(&meta.encode()).unwrap(), meta);
    }

    proptest! {
        #[test]
        fn leaves_of_extent_maps_survive_encoding_and_decoding(leaf in leaves(), first in 0..LEAF_BLOCKS, len in 0..LEAF_BLOCKS) {
            let part = first..LEAF_BLOCKS.min(first + len);
            let places = part.clone();
            let encoded = leaf.encode();
            let found = MapLeaf::decode(&encoded, 2000).unwrap();
            prop_assert!((0..LEAF_BLOCKS).all(|place| found.get(place) == leaf.get(place)));
            prop_assert_eq!(found.mapped(), leaf.mapped());
            let part = MapLeaf::decode_part(&encoded, 2000, part.start, part.end).unwrap();
            prop_assert!(part.into_iter().eq(places.map(|place| leaf.get(place))));
        }

        #[test]
        fn reference_counts_survive_encoding_and_decoding(extra in proptest::collection::btree_map(0u16..1024, 1u32..3, 0..200)) {
            let page = RefPage { extra };
            let found = page.encode().map_or(RefPage::default(), |b| RefPage::decode(&b).unwrap());
            prop_assert_eq!(found, page);
        }

        #[test]
        fn decoding_arbitrary_bytes_as_index_entries_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = MapLeaf::decode_part(&bytes, 1 << 20, 3, 200);
            let _ = (MapLeaf::decode(&bytes, 1 << 20), RefPage::decode(&bytes), Onode::decode(&bytes), Meta::decode(&bytes));
            let _ = decode_collection(&bytes, &bytes);
        }
    }
}
