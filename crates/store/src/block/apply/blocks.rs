//! Extent maps of objects, their blocks, and the reference counts of blocks.

use std::collections::btree_map::Entry;

use base::block::{self, BLOCK, BLOCK_SIZE};
use bytes::{Bytes, BytesMut};

use super::{Apply, ApplyResult, KnownLeaf, KnownOnode, Stop, padded};
use crate::block::extent::{Extent, total};
use crate::block::leaf::{BlockRef, INLINE_LEAF, LEAF_BLOCKS, PackedLeaf};
use crate::block::need::Need;
use crate::block::records::{Onode, REF_BLOCKS, RefPage, corrupt, key};

impl Apply<'_> {
    /// Loads leaves `first..=last` of an object into `leaves`. If some of the leaves are not in
    /// memory, returns one [`Stop::Need`] for all missing leaves.
    pub(super) fn load_leaves(&mut self, onode: &Onode, first: u64, last: u64) -> ApplyResult {
        let nid = onode.nid;
        let mut missing = Vec::new();
        for number in first..=last {
            if self.leaves.contains_key(&(nid, number)) {
                continue;
            }
            let key = key::leaf(nid, number);
            let mut patch = None;
            let stored = match self.puts.get(&key) {
                Some(changed) => Ok(changed.clone()),
                None if number == 0 && !onode.leaf.is_empty() => Ok(Some(onode.leaf.clone())),
                None if nid < self.first_nid => self.get(&key).inspect(|stored| {
                    patch = stored.is_some().then(PackedLeaf::default);
                }),
                // If this transaction has created the object, all its leaves are in `puts`.
                None => Ok(None),
            };
            match stored {
                Ok(stored) => {
                    let leaf = stored.unwrap_or_default().into();
                    self.leaves.insert((nid, number), KnownLeaf { leaf, is_changed: false, patch });
                }
                Err(Stop::Need(needs)) => missing.extend(needs),
                Err(stop) => return Err(stop),
            }
        }
        if missing.is_empty() { Ok(()) } else { Err(Stop::Need(missing)) }
    }

    pub(super) fn lookup(&mut self, onode: &Onode, number: u64) -> ApplyResult<Option<BlockRef>> {
        let leaf = number / LEAF_BLOCKS;
        self.load_leaves(onode, leaf, leaf)?;
        Ok(self.leaves[&(onode.nid, leaf)].leaf.get(self.context.data_blocks, number % LEAF_BLOCKS)?)
    }

    /// Moves the changed leaves into `puts`, so that scans see them.
    pub(super) fn store_leaves(&mut self) -> ApplyResult {
        for ((nid, number), KnownLeaf { leaf, is_changed, patch }) in std::mem::take(&mut self.leaves) {
            if !is_changed {
                continue;
            }
            let key = key::leaf(nid, number);
            let patch = patch.filter(|patch| patch.len() < leaf.len());
            self.put(key.clone(), (!leaf.is_empty()).then(|| leaf.into()))?;
            if let Some(patch) = patch {
                self.patches.insert(key, patch);
            }
        }
        Ok(())
    }

    /// Returns the entries of the leaves of an object, from leaf `first` up to leaf `end`, exclusive.
    /// If the onode contains the first leaf, first moves this leaf to its own key in `puts`;
    /// [`inline_leaves`](Self::inline_leaves) moves it back.
    pub(super) fn leaf_entries(
        &mut self,
        onode: &Onode,
        first: u64,
        end: Option<u64>,
    ) -> ApplyResult<Vec<(Bytes, Bytes)>> {
        self.store_leaves()?;
        let own = key::leaf(onode.nid, 0);
        if first == 0 && !onode.leaf.is_empty() && !self.puts.contains_key(&own) {
            self.put(own.clone(), Some(onode.leaf.clone()))?;
        }
        if !onode.leaf.is_empty() && onode.size <= LEAF_BLOCKS * BLOCK {
            // The object has no other leaves, so the index need not be searched for them.
            let leaf = self.puts.get(&own).cloned().flatten().filter(|_| first == 0);
            return Ok(leaf.into_iter().map(|leaf| (own.clone(), leaf)).collect());
        }
        let to = end.map_or_else(|| key::range(key::LEAF, onode.nid).1, |end| key::leaf(onode.nid, end));
        self.scan(&key::leaf(onode.nid, first), &to)
    }

    /// Moves the first leaf of each changed object into the object's onode if the leaf is small.
    /// Removes its own key if the index has this key.
    pub(super) fn inline_leaves(&mut self) -> ApplyResult {
        for (nid, owner) in std::mem::take(&mut self.owners) {
            let own = key::leaf(nid, 0);
            let Some(leaf) = self.puts.get(&own) else { continue };
            let inline = leaf.clone().filter(|leaf| leaf.len() <= INLINE_LEAF);
            if inline.is_some() || leaf.is_none() {
                match owner.has_leaf_key {
                    true => drop(self.puts.insert(own, None)),
                    false => drop(self.puts.remove(&own)),
                }
            }
            let leaf = inline.unwrap_or_default();
            if let Some(known) = self.onodes.get_mut(&owner.key) {
                // Another object may have taken the key.
                if let Some(onode) = known.onode.as_mut().filter(|onode| onode.nid == nid) {
                    known.is_changed |= onode.leaf != leaf;
                    onode.leaf = leaf;
                }
                continue;
            }
            let stored = self.get(&owner.key)?.map(|bytes| Onode::decode(&bytes)).transpose()?;
            if let Some(onode) = stored.filter(|onode| onode.nid == nid) {
                self.onodes.insert(owner.key, KnownOnode::changed(Some(Onode { leaf, ..onode })));
            }
        }
        Ok(())
    }

    /// Maps consecutive blocks of an object, beginning with block `first`, to the blocks in `new`.
    /// Releases the blocks to which they were mapped before.
    pub(super) fn map(&mut self, onode: &mut Onode, first: u64, new: &[Option<BlockRef>]) -> ApplyResult {
        if new.is_empty() {
            return Ok(());
        }
        let end = first + new.len() as u64;
        self.load_leaves(onode, first / LEAF_BLOCKS, (end - 1) / LEAF_BLOCKS)?;
        let mut at = first;
        while at < end {
            let number = at / LEAF_BLOCKS;
            let stop = end.min((number + 1) * LEAF_BLOCKS);
            let leaf = self.leaves.get_mut(&(onode.nid, number)).expect("leaves were loaded");
            let new = &new[(at - first) as usize..(stop - first) as usize];
            let replaced = leaf.replace(self.context.data_blocks, at % LEAF_BLOCKS, new)?;
            onode.blocks += new.iter().flatten().count() as u64;
            onode.blocks -= replaced.len() as u64;
            replaced.into_iter().try_for_each(|old| self.release(old))?;
            at = stop;
        }
        Ok(())
    }

    /// Releases all blocks in leaf `first` and in later leaves. Returns the number of released
    /// blocks.
    pub(super) fn drop_leaves_from(&mut self, onode: &Onode, first: u64) -> ApplyResult<u64> {
        let mut dropped = 0;
        for (key, value) in self.leaf_entries(onode, first, None)? {
            for block in PackedLeaf::from(value).blocks(self.context.data_blocks) {
                dropped += 1;
                self.release(block?)?;
            }
            self.put(key, None)?;
        }
        Ok(dropped)
    }

    fn ref_page(&mut self, chunk: u64) -> ApplyResult<&mut RefPage> {
        if !self.refs.contains_key(&chunk) {
            let stored = self.get(&key::refs(chunk))?;
            let page = stored.as_ref().map(|b| RefPage::decode(b)).transpose()?;
            self.refs.insert(chunk, (page.unwrap_or_default(), stored));
        }
        Ok(&mut self.refs.get_mut(&chunk).expect("it was just inserted").0)
    }

    /// Adds one reference to each block.
    pub(super) fn add_references(&mut self, blocks: &[Option<BlockRef>]) -> ApplyResult {
        let mut blocks =
            blocks.iter().flatten().map(|b| (b.block / REF_BLOCKS, b.block % REF_BLOCKS)).peekable();
        while let Some(&(chunk, _)) = blocks.peek() {
            let page = self.ref_page(chunk)?;
            while let Some((_, place)) = blocks.next_if(|(next, _)| *next == chunk) {
                let extra = page.extra.entry(place as u16).or_default();
                *extra = extra.checked_add(1).ok_or_else(|| corrupt("reference count", "overflow"))?;
            }
        }
        Ok(())
    }

    /// Removes one reference to a block, and frees the block if this was its last reference.
    pub(super) fn release(&mut self, block: BlockRef) -> ApplyResult {
        if block.shared {
            let page = self.ref_page(block.block / REF_BLOCKS)?;
            if let Entry::Occupied(mut extra) = page.extra.entry((block.block % REF_BLOCKS) as u16) {
                *extra.get_mut() -= 1;
                if *extra.get() == 0 {
                    extra.remove();
                }
                return Ok(());
            }
        }
        self.deferred.remove(&block.block);
        self.frees.push(block.block);
        Ok(())
    }

    /// Allocates blocks. If too few blocks are free, returns [`Stop::Space`]. The number in
    /// [`Stop::Space`] includes the blocks that the transaction has allocated so far, because the
    /// caller frees them before it tries the transaction again.
    pub(super) fn alloc(&mut self, blocks: u64) -> ApplyResult<Vec<Extent>> {
        let extents = self
            .alloc
            .alloc(blocks, self.purse)
            .ok_or_else(|| Stop::Space(total(&self.allocated) + blocks))?;
        self.allocated.extend(&extents);
        Ok(extents)
    }

    /// Returns the content of a block after comparing it with its checksum.
    pub(super) fn content(&mut self, block: BlockRef) -> ApplyResult<Bytes> {
        let own = self.deferred.get(&block.block).cloned().or_else(|| self.own_write(block.block));
        let content = own.or_else(|| (self.context.deferred)(block.block));
        let content = content.or_else(|| self.context.loaded.blocks.get(&block.block).cloned());
        let content = content.ok_or(Need::Block(block.block))?;
        if block::crc32c(&content) != block.crc {
            return Err(corrupt(&format!("block {}", block.block), "checksum mismatch").into());
        }
        Ok(content)
    }

    /// Returns the content of a block that this transaction has written.
    pub(super) fn own_write(&self, block: u64) -> Option<Bytes> {
        let covers = |(start, data): &&(u64, Bytes)| {
            *start <= block && block < start + (data.len() as u64).div_ceil(BLOCK)
        };
        let (start, data) = self.outcome.writes.iter().rev().find(covers)?;
        let at = ((block - start) * BLOCK) as usize;
        Some(padded(&data.slice(at..data.len().min(at + BLOCK_SIZE))))
    }

    /// Returns bytes `offset..offset + len` of an object, with zeros for holes and beyond the
    /// object's end.
    pub(super) fn gather(&mut self, onode: &Onode, offset: u64, len: usize) -> ApplyResult<Bytes> {
        let mut out = BytesMut::zeroed(len);
        let mut done = 0;
        for piece in block::piece_lengths(offset, len as u64) {
            let at = offset + done as u64;
            if let Some(block) = self.lookup(onode, at / BLOCK)? {
                let content = self.content(block)?;
                let from = (at % BLOCK) as usize;
                out[done..done + piece].copy_from_slice(&content[from..from + piece]);
            }
            done += piece;
        }
        Ok(out.freeze())
    }
}
