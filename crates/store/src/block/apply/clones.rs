//! Clones of objects that share blocks.

use base::block::{self, BLOCK, BLOCK_SIZE, Payload};
use bytes::Bytes;

use super::{Apply, ApplyResult, KnownOnode};
use crate::block::leaf::{BlockRef, LEAF_BLOCKS, MapLeaf};
use crate::block::records::{Onode, key};
use crate::{CollectionId, ObjectId, StoreError};

/// A piece of a range that is being cloned.
enum ClonedRange {
    Blocks(Vec<Option<BlockRef>>),
    Bytes(Bytes),
}

/// Splits a range of `len` bytes that is cloned from offset `from` to offset `to`. The pieces are
/// runs of whole blocks, which can be shared, and parts of blocks. Returns for each piece its
/// offset in the range, its length, and whether it is a run of whole blocks.
fn pieces(from: u64, to: u64, len: u64) -> Vec<(u64, u64, bool)> {
    let mut pieces: Vec<(u64, u64, bool)> = Vec::new();
    let mut done = 0;
    for piece in block::piece_lengths(to, len) {
        let whole = piece == BLOCK_SIZE && (from + done).is_multiple_of(BLOCK);
        match pieces.last_mut() {
            Some((_, len, true)) if whole => *len += BLOCK,
            _ => pieces.push((done, piece as u64, whole)),
        }
        done += piece as u64;
    }
    pieces
}

/// Whether a block has to be marked as shared before it is shared.
fn is_unmarked(block: &Option<BlockRef>) -> bool {
    block.is_some_and(|block| !block.shared)
}

impl Apply<'_> {
    pub(super) fn clone_object(&mut self, cid: &CollectionId, src: &ObjectId, dst: &ObjectId) -> ApplyResult {
        let (_, source) = self.existing(cid, src)?;
        if src == dst {
            return Ok(());
        }
        let (key, old) = self.find(cid, dst)?;
        let entries = self.leaf_entries(&source, 0, None)?;
        let copy = Onode { nid: self.new_nid(), leaf: Bytes::new(), ..source.clone() };
        self.created(&key, copy.nid);
        for (key, value) in entries {
            let mut leaf = MapLeaf::decode(&value, self.context.data_blocks)?;
            leaf.blocks.iter_mut().flatten().for_each(|block| block.shared = true);
            self.add_references(&leaf.blocks)?;
            let value = Bytes::from(leaf.encode());
            let twin = [&key::range(key::LEAF, copy.nid).0[..], &key::rest(&key)].concat();
            self.put(key, Some(value.clone()))?;
            self.put(twin.into(), Some(value))?;
        }
        if source.has_omap {
            let (from, to) = key::range(key::OMAP, source.nid);
            for (key, value) in self.scan(&from, &to)? {
                self.put(key::omap(copy.nid, &key::rest(&key)), Some(value))?;
            }
        }
        if let Some(old) = old {
            self.drop_content(&old)?;
        }
        self.onodes.insert(key, KnownOnode::changed(Some(copy)));
        Ok(())
    }

    pub(super) fn clone_range(
        &mut self,
        cid: &CollectionId,
        (src, dst): (&ObjectId, &ObjectId),
        from: u64,
        len: u64,
        to: u64,
    ) -> ApplyResult {
        let key = self.look_up(cid, src)?;
        let missing = || StoreError::NoSuchObject(src.to_string());
        let source = self.onodes.get_mut(&key).and_then(|known| known.onode.take()).ok_or_else(missing)?;
        // The ranges may overlap, so read all data and add references to all shared blocks before
        // overwriting anything.
        let mut parts = Vec::new();
        for (done, len, whole) in pieces(from, to, len) {
            let part = match whole {
                true => ClonedRange::Blocks(self.share(&source, (from + done) / BLOCK, len / BLOCK)?),
                false => ClonedRange::Bytes(self.gather(&source, from + done, len as usize)?),
            };
            parts.push((to + done, part));
        }
        if let Some(known) = self.onodes.get_mut(&key) {
            known.onode = Some(source);
        }
        self.change(cid, dst, |this, onode| {
            for (target, part) in parts {
                match part {
                    ClonedRange::Blocks(blocks) => {
                        this.map(onode, target / BLOCK, &blocks)?;
                        onode.size = onode.size.max(target + blocks.len() as u64 * BLOCK);
                    }
                    ClonedRange::Bytes(bytes) => {
                        this.write(onode, target, &Payload::compute(target, bytes))?
                    }
                }
            }
            Ok(())
        })
    }

    /// Adds one reference to each of `count` blocks of an object, beginning with block `first`.
    /// Marks the blocks as shared and returns them.
    fn share(&mut self, onode: &Onode, first: u64, count: u64) -> ApplyResult<Vec<Option<BlockRef>>> {
        let end = first + count;
        self.load_leaves(onode, first / LEAF_BLOCKS, (end - 1) / LEAF_BLOCKS)?;
        let mut blocks = Vec::with_capacity(count as usize);
        let mut at = first;
        while at < end {
            let number = at / LEAF_BLOCKS;
            let stop = end.min((number + 1) * LEAF_BLOCKS);
            let leaf = self.leaves.get_mut(&(onode.nid, number)).expect("leaves were loaded");
            let (limit, first) = (self.context.data_blocks, at % LEAF_BLOCKS);
            let mut found = leaf.leaf.part(limit, first, first + (stop - at))?;
            let mut place = first;
            for run in found.chunk_by_mut(|a, b| is_unmarked(a) == is_unmarked(b)) {
                if run.first().is_some_and(is_unmarked) {
                    run.iter_mut().flatten().for_each(|block| block.shared = true);
                    leaf.replace(limit, place, run)?;
                }
                place += run.len() as u64;
            }
            blocks.append(&mut found);
            at = stop;
        }
        self.add_references(&blocks)?;
        Ok(blocks)
    }
}
