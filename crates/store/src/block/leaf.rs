//! Extent maps. The extent map of an object consists of *leaves*, each for 1 MiB of the object.
//!
//! A leaf is encoded as runs of blocks, ordered by position: {position in the leaf u8, length - 1 u8,
//! first block u48 with *shared* in the top bit, checksums}. Changes are made on the encoded form
//! ([`PackedLeaf`]), because most changes concern a few of its up to 256 blocks.

use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};

use super::records::corrupt;
use crate::Result;

/// Number of blocks that a leaf of an extent map covers (1 MiB).
pub(crate) const LEAF_BLOCKS: u64 = 256;
/// An onode contains the first leaf of its object if the encoded leaf has at most this many bytes. An
/// object of 128 KiB in one run of blocks needs 136 bytes.
pub(crate) const INLINE_LEAF: usize = 144;
/// Length of the head of an encoded run, in bytes.
const RUN_HEAD: usize = 8;
/// Length of a checksum, in bytes.
const CRC: usize = 4;

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

/// The extent map of 1 MiB of an object, decoded for work on the whole leaf. `None` is a hole, and so
/// is every position after the end of the list.
#[derive(Debug, Clone, Default)]
pub(crate) struct MapLeaf {
    /// The blocks by position, at most [`LEAF_BLOCKS`].
    pub(crate) blocks: Vec<Option<BlockRef>>,
}

/// Flag in the first block number of an encoded run. The flag says that the run's blocks may have
/// other references.
const SHARED: u64 = 1 << 47;

impl MapLeaf {
    /// Returns the number of blocks that are not holes.
    pub(crate) fn mapped(&self) -> u64 {
        self.blocks.iter().flatten().count() as u64
    }

    /// Encodes the leaf.
    pub(crate) fn encode(&self) -> PackedLeaf {
        let continues = |pair: &&[Option<BlockRef>]| match pair {
            [Some(one), Some(next)] => next.block == one.block + 1 && next.shared == one.shared,
            _ => false,
        };
        let mapped = self.mapped() as usize;
        let runs = mapped - self.blocks.windows(2).filter(continues).count();
        let mut out = LeafWriter::with_capacity(RUN_HEAD * runs + CRC * mapped);
        out.blocks(0, &self.blocks);
        out.finish()
    }

    /// Decodes a leaf. All its block numbers must be less than `limit`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`](crate::StoreError::Corrupt) if the leaf is invalid.
    pub(crate) fn decode(bytes: &[u8], limit: u64) -> Result<MapLeaf> {
        let mut blocks = Vec::with_capacity((bytes.len() / CRC).min(LEAF_BLOCKS as usize));
        for run in LeafRuns::new(bytes, limit) {
            let run = run?;
            blocks.resize(run.at, None);
            blocks.extend(run.blocks().map(Some));
        }
        Ok(MapLeaf { blocks })
    }
}

/// A run of an encoded leaf.
struct LeafRun<'a> {
    /// Position of the first block in the leaf.
    at: usize,
    start: u64,
    shared: bool,
    /// Checksums of the blocks.
    crcs: &'a [[u8; CRC]],
}

impl<'a> LeafRun<'a> {
    /// Position after the last block in the leaf.
    fn end(&self) -> usize {
        self.at + self.crcs.len()
    }

    /// The blocks at positions `from..to` of the leaf, which must belong to the run.
    fn part(&self, from: usize, to: usize) -> LeafRun<'a> {
        let skipped = from - self.at;
        LeafRun {
            at: from,
            start: self.start + skipped as u64,
            shared: self.shared,
            crcs: &self.crcs[skipped..to - self.at],
        }
    }

    fn blocks(&self) -> impl Iterator<Item = BlockRef> + use<'a> {
        let shared = self.shared;
        let block =
            move |(crc, block): (&[u8; CRC], u64)| BlockRef { block, crc: u32::from_le_bytes(*crc), shared };
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

    /// Offset of the next run in the whole leaf `all`, in bytes.
    fn offset(&self, all: &[u8]) -> usize {
        all.len() - self.bytes.len()
    }

    fn run(&mut self) -> std::result::Result<LeafRun<'a>, &'static str> {
        let (head, rest) = self.bytes.split_first_chunk::<RUN_HEAD>().ok_or("bytes follow its last run")?;
        let (at, len) = (usize::from(head[0]), usize::from(head[1]) + 1);
        let mut start = [0; 8];
        start[..6].copy_from_slice(&head[2..]);
        let start = u64::from_le_bytes(start);
        let (start, shared) = (start & !SHARED, start & SHARED != 0);
        if at < self.next || at + len > LEAF_BLOCKS as usize || rest.len() < len * CRC {
            return Err("a run overlaps another run, ends outside the leaf or lacks checksums");
        }
        if start + len as u64 > self.limit {
            return Err("a block lies outside the data area");
        }
        let (crcs, rest) = rest.split_at(len * CRC);
        (self.bytes, self.next) = (rest, at + len);
        Ok(LeafRun { at, start, shared, crcs: crcs.as_chunks::<CRC>().0 })
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

/// An encoded leaf. Its content is checked where it is used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PackedLeaf(Bytes);

impl From<Bytes> for PackedLeaf {
    fn from(bytes: Bytes) -> PackedLeaf {
        PackedLeaf(bytes)
    }
}

impl From<PackedLeaf> for Bytes {
    fn from(leaf: PackedLeaf) -> Bytes {
        leaf.0
    }
}

impl PackedLeaf {
    /// Whether the leaf consists of a single hole.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Length of the encoded leaf, in bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the block at position `place`. All block numbers must be less than `limit`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`](crate::StoreError::Corrupt) if the leaf is invalid. Damage behind
    /// `place` is not noticed.
    pub(crate) fn get(&self, limit: u64, place: u64) -> Result<Option<BlockRef>> {
        Ok(self.part(limit, place, place + 1)?.pop().flatten())
    }

    /// Returns the blocks at positions `first..end`. All block numbers must be less than `limit`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`](crate::StoreError::Corrupt) if the leaf is invalid. Damage behind
    /// position `end` is not noticed.
    pub(crate) fn part(&self, limit: u64, first: u64, end: u64) -> Result<Vec<Option<BlockRef>>> {
        let (first, end) = (first as usize, end as usize);
        let mut blocks = vec![None; end - first];
        for run in LeafRuns::new(&self.0, limit) {
            let run = run?;
            if run.at >= end {
                break;
            }
            let places = run.at.max(first)..run.end().min(end);
            if !places.is_empty() {
                let found = run.blocks().skip(places.start - run.at);
                let slots = &mut blocks[places.start - first..places.end - first];
                slots.iter_mut().zip(found).for_each(|(slot, block)| *slot = Some(block));
            }
        }
        Ok(blocks)
    }

    /// Returns the positions that are not holes, as ranges in ascending order. All block numbers must
    /// be less than `limit`.
    pub(crate) fn mapped(&self, limit: u64) -> impl Iterator<Item = Result<Range<u64>>> {
        LeafRuns::new(&self.0, limit).map(|run| run.map(|run| run.at as u64..run.end() as u64))
    }

    /// Returns all blocks. All block numbers must be less than `limit`.
    pub(crate) fn blocks(&self, limit: u64) -> impl Iterator<Item = Result<BlockRef>> {
        LeafRuns::new(&self.0, limit).flat_map(|run| {
            let (run, error) = match run {
                Ok(run) => (Some(run), None),
                Err(e) => (None, Some(Err(e))),
            };
            run.into_iter().flat_map(|run| run.blocks()).map(Ok).chain(error)
        })
    }

    /// Returns the leaf in which consecutive positions, beginning with `first`, are mapped to the
    /// blocks in `new`. Adds the replaced blocks to `released`. All block numbers must be less than
    /// `limit`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`](crate::StoreError::Corrupt) if the leaf is invalid.
    pub(crate) fn replaced(
        &self,
        limit: u64,
        first: u64,
        new: &[Option<BlockRef>],
        released: &mut Vec<BlockRef>,
    ) -> Result<PackedLeaf> {
        let (first, end) = (first as usize, first as usize + new.len());
        let mut out = LeafWriter::with_capacity(self.0.len() + RUN_HEAD + (RUN_HEAD + CRC) * new.len());
        let mut runs = LeafRuns::new(&self.0, limit);
        // The runs before the new blocks remain as they are.
        let mut last = None;
        let mut next = runs.next().transpose()?;
        let mut start = 0;
        while let Some(run) = next.take_if(|run| run.end() <= first) {
            last = Some((start, run));
            start = runs.offset(&self.0);
            next = runs.next().transpose()?;
        }
        out.copy(&self.0[..start], last);
        if let Some(run) = next.as_ref().filter(|run| run.at < first) {
            out.run(run.part(run.at, first));
        }
        out.blocks(first, new);
        while let Some(run) = next.take_if(|run| run.at < end) {
            let places = run.at.max(first)..run.end().min(end);
            released.extend(run.blocks().skip(places.start - run.at).take(places.len()));
            if run.end() > end {
                out.run(run.part(end, run.end()));
            }
            next = runs.next().transpose()?;
        }
        // The first run behind the new blocks may continue them.
        if let Some(run) = next {
            out.run(run);
            let rest = &self.0[runs.offset(&self.0)..];
            runs.try_for_each(|run| run.map(drop))?;
            out.copy(rest, None);
        }
        Ok(out.finish())
    }

    /// Applies a patch: maps the positions of its blocks to these blocks.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`](crate::StoreError::Corrupt) if the leaf or the patch is invalid.
    pub(crate) fn patched(&self, limit: u64, patch: &PackedLeaf) -> Result<PackedLeaf> {
        let mut leaf = self.clone();
        for run in LeafRuns::new(&patch.0, limit) {
            let run = run?;
            let new: Vec<Option<BlockRef>> = run.blocks().map(Some).collect();
            leaf = leaf.replaced(limit, run.at as u64, &new, &mut Vec::new())?;
        }
        Ok(leaf)
    }
}

/// Encodes a leaf run by run. Joins runs that continue one another.
struct LeafWriter {
    out: BytesMut,
    /// The last run, if later blocks may continue it.
    last: Option<LastRun>,
}

/// The last run of a leaf that is being encoded.
struct LastRun {
    /// Offset of the run in the encoded leaf, in bytes.
    offset: usize,
    /// Position after the run's last block in the leaf.
    end: usize,
    len: usize,
    /// The block that would continue the run.
    next: u64,
    shared: bool,
}

impl LeafWriter {
    fn with_capacity(bytes: usize) -> LeafWriter {
        LeafWriter { out: BytesMut::with_capacity(bytes), last: None }
    }

    /// Adds encoded runs. `last` is the last of them and its offset in `bytes`, if later runs may
    /// continue it.
    fn copy(&mut self, bytes: &[u8], last: Option<(usize, LeafRun<'_>)>) {
        let offset = self.out.len();
        self.out.extend_from_slice(bytes);
        self.last = last.map(|(at, run)| LastRun {
            offset: offset + at,
            end: run.end(),
            len: run.crcs.len(),
            next: run.start + run.crcs.len() as u64,
            shared: run.shared,
        });
    }

    /// Adds a run.
    fn run(&mut self, run: LeafRun<'_>) {
        self.begin(run.at, run.start, run.shared, run.crcs.len());
        self.out.extend_from_slice(run.crcs.as_flattened());
    }

    /// Adds the blocks at consecutive positions, beginning with `first`.
    fn blocks(&mut self, first: usize, blocks: &[Option<BlockRef>]) {
        let mut at = 0;
        while let Some(block) = blocks.get(at) {
            let Some(block) = block else {
                at += 1;
                continue;
            };
            let follows = |(block_number, other): (u64, &Option<BlockRef>)| {
                other.is_some_and(|other| other.block == block_number && other.shared == block.shared)
            };
            let len = (block.block..).zip(&blocks[at..]).take_while(|pair| follows(*pair)).count();
            self.begin(first + at, block.block, block.shared, len);
            blocks[at..at + len].iter().flatten().for_each(|block| self.out.put_u32_le(block.crc));
            at += len;
        }
    }

    /// Writes the head of a run, or extends the last run. The checksums must follow.
    fn begin(&mut self, at: usize, start: u64, shared: bool, len: usize) {
        let continues = |last: &&mut LastRun| last.end == at && last.next == start && last.shared == shared;
        if let Some(last) = self.last.as_mut().filter(continues) {
            (last.end, last.len, last.next) = (at + len, last.len + len, start + len as u64);
            self.out[last.offset + 1] = (last.len - 1) as u8;
            return;
        }
        let (offset, end, next) = (self.out.len(), at + len, start + len as u64);
        self.last = Some(LastRun { offset, end, len, next, shared });
        self.out.put_u8(at as u8);
        self.out.put_u8((len - 1) as u8);
        self.out.put_uint_le(start | if shared { SHARED } else { 0 }, 6);
    }

    fn finish(self) -> PackedLeaf {
        PackedLeaf(self.out.freeze())
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

    proptest! {
        #[test]
        fn leaves_of_extent_maps_survive_encoding_and_decoding(leaf in leaves(), first in 0..LEAF_BLOCKS, len in 0..LEAF_BLOCKS) {
            let part = first..LEAF_BLOCKS.min(first + len);
            let at = |place: u64| leaf.blocks.get(place as usize).copied().flatten();
            let packed = leaf.encode();
            let found = MapLeaf::decode(&packed.0, 2000).unwrap();
            prop_assert!(found.blocks.iter().eq(leaf.blocks.iter().take(found.blocks.len())));
            prop_assert_eq!(found.mapped(), leaf.mapped());
            prop_assert!(packed.blocks(2000).map(Result::unwrap).eq(leaf.blocks.iter().flatten().copied()));
            let found = packed.part(2000, part.start, part.end).unwrap();
            prop_assert!(found.into_iter().eq(part.map(at)));
            prop_assert_eq!(packed.get(2000, first).unwrap(), at(first));
            let mapped = packed.mapped(2000).flat_map(Result::unwrap);
            prop_assert!(mapped.eq((0..LEAF_BLOCKS).filter(|place| at(*place).is_some())));
        }

        /// A change of the encoded leaf has the same result as a change of the decoded leaf, byte for
        /// byte.
        #[test]
        fn a_changed_leaf_is_the_encoding_of_its_changed_blocks(
            leaf in leaves(),
            new in leaves(),
            first in 0..LEAF_BLOCKS as usize,
            len in prop_oneof![1usize..4, 1..=LEAF_BLOCKS as usize],
            continues: bool,
        ) {
            let mut new: Vec<Option<BlockRef>> = new.blocks.into_iter().take(len.min(256 - first)).collect();
            // The new blocks often continue the blocks before them.
            if let (true, Some(slot)) = (continues && first > 0, new.first_mut()) {
                let before = leaf.blocks.get(first - 1).copied().flatten();
                *slot = before.map(|before| BlockRef { block: before.block + 1, ..before });
            }
            let mut changed = leaf.clone();
            if changed.blocks.len() < first + new.len() {
                changed.blocks.resize(first + new.len(), None);
            }
            let replaced = changed.blocks[first..first + new.len()].to_vec();
            changed.blocks[first..first + new.len()].clone_from_slice(&new);
            let mut released = Vec::new();
            let found = leaf.encode().replaced(2000, first as u64, &new, &mut released).unwrap();
            prop_assert_eq!(&found, &changed.encode());
            prop_assert!(released.into_iter().eq(replaced.into_iter().flatten()));
            if new.iter().all(Option::is_some) {
                let patch = PackedLeaf::default().replaced(2000, first as u64, &new, &mut Vec::new()).unwrap();
                prop_assert_eq!(leaf.encode().patched(2000, &patch).unwrap(), found);
            }
        }

        #[test]
        fn arbitrary_bytes_as_leaves_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), first in 0..250u64) {
            let _ = MapLeaf::decode(&bytes, 1 << 20);
            let packed = PackedLeaf::from(Bytes::from(bytes));
            let block = Some(BlockRef { block: 7, crc: 1, shared: false });
            let _ = (packed.get(1 << 20, first), packed.part(1 << 20, 3, 200), packed.blocks(1 << 20).count());
            let _ = packed.replaced(1 << 20, first, &[block, None, block], &mut Vec::new());
            let _ = packed.patched(1 << 20, &packed);
        }
    }
}
