//! Writes, zeroing and truncation of objects.

use base::block::{self, BLOCK, BLOCK_SIZE, Payload};
use bytes::{Bytes, BytesMut};

use super::{Apply, ApplyResult, too_large};
use crate::block::leaf::{BlockRef, LEAF_BLOCKS};
use crate::block::records::{Onode, corrupt, key};
use crate::block::staged::StagedBlock;
use crate::stage::{block_not_available, check_staged_use};
use crate::{StageId, StoreError};

impl Apply<'_> {
    pub(super) fn write(&mut self, onode: &mut Onode, offset: u64, payload: &Payload) -> ApplyResult {
        let mut at = offset;
        let mut rest = payload.data().clone();
        let mut run: Vec<u32> = Vec::new();
        let mut run_start = (at, rest.clone());
        let mut run_len = 0;
        for (len, crc) in block::piece_lengths(offset, rest.len() as u64).zip(payload.checksums()) {
            let piece = rest.split_to(len);
            let end = at + len as u64;
            if at.is_multiple_of(BLOCK) && (len == BLOCK_SIZE || end >= onode.size) {
                if run.is_empty() {
                    run_start = (at, payload.data().slice((at - offset) as usize..));
                }
                run.push(block::pad_to_block(*crc, len));
                run_len += len;
            } else {
                self.write_run(onode, run_start.0, &run_start.1.slice(..run_len), &run)?;
                (run_len, run) = (0, Vec::new());
                self.merge(onode, at, &piece, *crc)?;
            }
            at = end;
        }
        self.write_run(onode, run_start.0, &run_start.1.slice(..run_len), &run)?;
        onode.size = onode.size.max(at);
        Ok(())
    }

    /// Writes data for whole blocks of an object to newly allocated blocks. If `data` ends inside a
    /// block, zeros fill the rest of this block.
    pub(super) fn write_run(
        &mut self,
        onode: &mut Onode,
        offset: u64,
        data: &Bytes,
        checksums: &[u32],
    ) -> ApplyResult {
        if checksums.is_empty() {
            return Ok(());
        }
        let extents = self.alloc(checksums.len() as u64)?;
        let mut done = 0;
        for extent in &extents {
            let bytes = (extent.len * BLOCK) as usize;
            let part = data.slice(done..data.len().min(done + bytes));
            done += bytes;
            self.outcome.writes.push((extent.start, part));
        }
        let blocks = extents.iter().flat_map(|e| e.blocks());
        let refs: Vec<_> =
            blocks.zip(checksums).map(|(block, &crc)| Some(BlockRef { block, crc, shared: false })).collect();
        self.map(onode, offset / BLOCK, &refs)
    }

    /// Writes part of a block: merges `piece` with the old content. The log stores the merged
    /// block, and the next checkpoint writes it to the data area.
    pub(super) fn merge(&mut self, onode: &mut Onode, offset: u64, piece: &Bytes, crc: u32) -> ApplyResult {
        if block::crc32c(piece) != crc {
            return Err(StoreError::BadPayload(format!(
                "the data at offset {offset} does not match its checksum"
            ))
            .into());
        }
        let old = match self.lookup(onode, offset / BLOCK)? {
            Some(old) => Some(self.content(old)?),
            None => None,
        };
        let mut merged = BytesMut::zeroed(BLOCK_SIZE);
        old.iter().for_each(|old| merged.copy_from_slice(old));
        let from = (offset % BLOCK) as usize;
        merged[from..from + piece.len()].copy_from_slice(piece);
        let merged = merged.freeze();
        if old.as_ref() == Some(&merged) {
            // A write that changes nothing needs no block. Undoing a transaction therefore works
            // even if no block is free.
            return Ok(());
        }
        let block = self.alloc(1)?[0].start;
        self.put_bytes += BLOCK_SIZE;
        too_large("size in bytes of the changes of a transaction", self.put_bytes, self.context.max_record)?;
        let new = BlockRef { block, crc: block::crc32c(&merged), shared: false };
        self.map(onode, offset / BLOCK, &[Some(new)])?;
        self.deferred.insert(block, merged);
        Ok(())
    }

    pub(super) fn write_staged(
        &mut self,
        onode: &mut Onode,
        offset: u64,
        id: StageId,
        from: u64,
        len: u64,
    ) -> ApplyResult {
        let usable = self.context.usable_stages.contains(&id.0);
        let stage = self.context.stages.get(id.0).filter(|_| usable).ok_or(StoreError::NoSuchStage(id.0))?;
        check_staged_use(stage.len, from, len, offset, onode.size)?;
        let (first, count) = (from / BLOCK, len.div_ceil(BLOCK));
        let runs = stage.runs(first, count);
        let named = |(stage, start, len): &(StageId, u64, u64)| {
            *stage == id && *start < first + count && first < start + len
        };
        if self.outcome.taken.iter().any(named) {
            return Err(block_not_available(first).into());
        }
        let mut refs = Vec::with_capacity(count as usize);
        for (number, block) in (first..).zip(runs.iter().flat_map(|e| e.blocks())) {
            let StagedBlock::Written(crc) = stage.blocks[number as usize] else {
                return Err(block_not_available(number).into());
            };
            refs.push(Some(BlockRef { block, crc, shared: false }));
        }
        self.outcome.taken.push((id, first, count));
        self.staged.extend(runs);
        self.map(onode, offset / BLOCK, &refs)?;
        onode.size = onode.size.max(offset + len);
        Ok(())
    }

    pub(super) fn zero(&mut self, onode: &mut Onode, offset: u64, len: u64) -> ApplyResult {
        let end = offset + len;
        let stop = end.min(onode.size);
        let size = onode.size;
        if offset < stop {
            let (first, last) = (block::align_up(offset).unwrap_or(stop).min(stop), block::align_down(stop));
            if first >= last {
                let mut at = offset;
                for len in block::piece_lengths(offset, stop - offset) {
                    self.zero_part(onode, at, at + len as u64)?;
                    at += len as u64;
                }
            } else {
                self.zero_part(onode, offset, first)?;
                self.drop_blocks(onode, first / BLOCK, last / BLOCK)?;
                self.zero_part(onode, last, stop)?;
            }
        }
        onode.size = size.max(end);
        Ok(())
    }

    /// Sets bytes `from..to` of the object, which lie in one block, to zeros. Does nothing if the
    /// block is a hole.
    pub(super) fn zero_part(&mut self, onode: &mut Onode, from: u64, to: u64) -> ApplyResult {
        if from >= to || self.lookup(onode, from / BLOCK)?.is_none() {
            return Ok(());
        }
        let zeros = Bytes::from(vec![0; (to - from) as usize]);
        let payload = Payload::compute(from, zeros);
        self.write(onode, from, &payload)
    }

    /// Replaces blocks `first..end` of an object by holes.
    pub(super) fn drop_blocks(&mut self, onode: &mut Onode, first: u64, end: u64) -> ApplyResult {
        for (key, _) in self.leaf_entries(onode, first / LEAF_BLOCKS, Some(end.div_ceil(LEAF_BLOCKS)))? {
            let number = key::rest(&key);
            let number = <[u8; 8]>::try_from(&number[..])
                .map_err(|_| corrupt("key of a leaf", "its length is wrong"))?;
            let start = u64::from_be_bytes(number) * LEAF_BLOCKS;
            let (first, end) = (first.max(start), end.min(start + LEAF_BLOCKS));
            self.map(onode, first, &vec![None; (end - first) as usize])?;
        }
        Ok(())
    }

    pub(super) fn truncate(&mut self, onode: &mut Onode, size: u64) -> ApplyResult {
        if size < onode.size {
            let keep = size.div_ceil(BLOCK);
            if !size.is_multiple_of(BLOCK) {
                let end = block::align_down(size) + BLOCK;
                let old = std::mem::replace(&mut onode.size, end);
                self.zero_part(onode, size, end)?;
                onode.size = old;
            }
            let leaf_end = keep.next_multiple_of(LEAF_BLOCKS);
            self.drop_blocks(onode, keep, leaf_end)?;
            onode.blocks -= self.drop_leaves_from(onode, leaf_end / LEAF_BLOCKS)?;
        }
        onode.size = size;
        Ok(())
    }
}
