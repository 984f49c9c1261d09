//! Copies that share blocks.

use base::block::{self, BLOCK, BLOCK_SIZE, Payload};
use bytes::Bytes;

use super::{Apply, Step};
use crate::block::records::{BlockRef, Onode, SHARD_BLOCKS, Shard, key};
use crate::{CollectionId, ObjectId};

/// A piece of a range that is being cloned.
enum Part {
    Block(Option<BlockRef>),
    Bytes(Bytes),
}

impl Apply<'_> {
    pub(super) fn clone_object(&mut self, cid: &CollectionId, src: &ObjectId, dst: &ObjectId) -> Step {
        let (_, source) = self.existing(cid, src)?;
        if src == dst {
            return Ok(());
        }
        let (key, old) = self.find(cid, dst)?;
        self.store_shards()?;
        let copy = Onode { nid: self.new_nid(), ..source.clone() };
        let (from, to) = key::range(key::SHARD, source.nid);
        for (key, value) in self.scan(&from, &to)? {
            let mut shard = Shard::decode(&value, self.context.data_blocks)?;
            for block in shard.blocks.iter_mut().flatten() {
                block.shared = true;
                self.add_reference(block.block)?;
            }
            let value = shard.encode();
            let twin = [&key::range(key::SHARD, copy.nid).0[..], &key::rest(&key)].concat();
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
        self.onodes.insert(key, Some(copy));
        Ok(())
    }

    pub(super) fn clone_range(
        &mut self,
        cid: &CollectionId,
        (src, dst): (&ObjectId, &ObjectId),
        from: u64,
        len: u64,
        to: u64,
    ) -> Step {
        let (_, mut source) = self.existing(cid, src)?;
        // Everything is read, and every shared block held, before anything is overwritten: the ranges may overlap.
        let mut parts = Vec::new();
        let mut done = 0;
        for len in block::piece_lengths(to, len) {
            let (at, target) = (from + done, to + done);
            if len == BLOCK_SIZE && at.is_multiple_of(BLOCK) {
                parts.push((target, Part::Block(self.share(&mut source, at / BLOCK)?)));
            } else {
                parts.push((target, Part::Bytes(self.gather(&source, at, len)?)));
            }
            done += len as u64;
        }
        self.change(cid, dst, |this, onode| {
            for (target, part) in parts {
                match part {
                    Part::Block(block) => {
                        this.map(onode, target / BLOCK, &[block])?;
                        onode.size = onode.size.max(target + BLOCK);
                    }
                    Part::Bytes(bytes) => this.write(onode, target, &Payload::compute(target, bytes))?,
                }
            }
            Ok(())
        })
    }

    /// Takes one more reference to a block of an object.
    pub(super) fn share(&mut self, onode: &mut Onode, number: u64) -> Step<Option<BlockRef>> {
        if self.lookup(onode.nid, number)?.is_none() {
            return Ok(None);
        }
        let (shard, dirty) =
            self.shards.get_mut(&(onode.nid, number / SHARD_BLOCKS)).expect("it was just looked up");
        let Some(Some(slot)) = shard.blocks.get_mut((number % SHARD_BLOCKS) as usize) else {
            return Ok(None);
        };
        *dirty |= !slot.shared;
        slot.shared = true;
        let block = *slot;
        self.add_reference(block.block)?;
        Ok(Some(block))
    }
}
