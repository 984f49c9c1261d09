//! Turns a transaction into changes of the index and writes of blocks, all or nothing.
//!
//! [`Apply`] works on a copy of what it changes. Where something is not in memory it stops with [`Stop::Need`]; the
//! caller has that loaded and runs the transaction from its start again, so nothing here waits and nothing is half done.

use std::collections::{BTreeMap, HashMap, HashSet};

use base::block::{self, BLOCK, BLOCK_SIZE, Payload};
use bytes::{Bytes, BytesMut};

use super::alloc::Allocator;
use super::extent::{Extent, push_block};
use super::index::Changes;
use super::log::Record;
use super::records::{BlockRef, Onode, REF_BLOCKS, RefPage, SHARD_BLOCKS, Shard, corrupt, decode_oid, key};
use super::staged::{Stage, StagedBlock};
use super::view::{Loaded, Need, View};
use crate::stage::{block_not_available, check_staged_use};
use crate::{CollectionId, MAX_XATTRS, ObjectId, Op, Result, StageId, StoreError, Transaction, WriteSource};

/// Why a transaction did not go through.
#[derive(Debug)]
pub(crate) enum Stop {
    /// These must be loaded first.
    Need(Vec<Need>),
    /// That many blocks must be free.
    Space(u64),
    /// It fails.
    Fail(StoreError),
}

impl From<StoreError> for Stop {
    fn from(e: StoreError) -> Stop {
        Stop::Fail(e)
    }
}

impl From<Need> for Stop {
    fn from(need: Need) -> Stop {
        Stop::Need(vec![need])
    }
}

pub(crate) type Step<T = ()> = std::result::Result<T, Stop>;

/// What a transaction looks at and does not change.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) view: &'a View,
    pub(crate) loaded: &'a Loaded,
    pub(crate) collections: &'a BTreeMap<CollectionId, u64>,
    pub(crate) stages: &'a HashMap<u64, Stage>,
    /// Those that the transaction may use.
    pub(crate) usable_stages: &'a [u64],
    /// Content of blocks that is in memory because the data region does not have it yet.
    pub(crate) deferred: &'a dyn Fn(u64) -> Option<Bytes>,
    pub(crate) data_blocks: u64,
    pub(crate) max_record: usize,
}

/// What a transaction changes.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) record: Record,
    /// Data to be written to newly allocated blocks: first block, bytes (the last block may be short).
    pub(crate) writes: Vec<(u64, Bytes)>,
    /// Blocks of stages that were named.
    pub(crate) taken: Vec<(StageId, u64)>,
    pub(crate) collections: Vec<(CollectionId, Option<u64>)>,
}

/// A transaction under way.
pub(crate) struct Apply<'a> {
    context: Context<'a>,
    alloc: &'a mut Allocator,
    puts: Changes,
    put_bytes: usize,
    onodes: BTreeMap<Bytes, Option<Onode>>,
    shards: BTreeMap<(u64, u64), (Shard, bool)>,
    refs: BTreeMap<u64, (RefPage, bool)>,
    pub(crate) allocated: Vec<Extent>,
    staged: Vec<Extent>,
    frees: Vec<u64>,
    deferred: BTreeMap<u64, Bytes>,
    named: HashSet<(StageId, u64)>,
    next_nid: u64,
    outcome: Outcome,
}

impl<'a> Apply<'a> {
    pub(crate) fn new(context: Context<'a>, alloc: &'a mut Allocator, next_nid: u64) -> Apply<'a> {
        Apply {
            context,
            alloc,
            puts: Changes::new(),
            put_bytes: 0,
            onodes: BTreeMap::new(),
            shards: BTreeMap::new(),
            refs: BTreeMap::new(),
            allocated: Vec::new(),
            staged: Vec::new(),
            frees: Vec::new(),
            deferred: BTreeMap::new(),
            named: HashSet::new(),
            next_nid,
            outcome: Outcome::default(),
        }
    }

    /// Runs the transaction. On [`Stop`] the caller must give `allocated` back.
    pub(crate) fn run(&mut self, transaction: &Transaction) -> Step<Outcome> {
        transaction.validate()?;
        let cid = &transaction.collection;
        if !matches!(transaction.ops.first(), Some(Op::CreateCollection)) {
            self.collection(cid)?;
        }
        transaction.ops.iter().try_for_each(|op| self.op(cid, op))?;
        self.finish()
    }

    /// Bytes of the index that change.
    pub(crate) fn changed_bytes(&self) -> usize {
        self.put_bytes
    }

    fn finish(&mut self) -> Step<Outcome> {
        self.store_shards()?;
        for (key, onode) in std::mem::take(&mut self.onodes) {
            self.put(key, onode.map(|o| o.encode()))?;
        }
        for (chunk, (page, dirty)) in std::mem::take(&mut self.refs) {
            if dirty {
                self.put(key::refs(chunk), page.encode())?;
            }
        }
        let mut outcome = std::mem::take(&mut self.outcome);
        let mut allocs = self.allocated.clone();
        allocs.append(&mut self.staged);
        self.frees.sort_unstable();
        let mut frees = Vec::new();
        self.frees.iter().for_each(|b| push_block(&mut frees, *b));
        outcome.taken.extend(&self.named);
        outcome.record = Record {
            puts: std::mem::take(&mut self.puts).into_iter().collect(),
            allocs,
            frees,
            deferred: std::mem::take(&mut self.deferred).into_iter().collect(),
            next_nid: self.next_nid,
        };
        Ok(outcome)
    }

    fn op(&mut self, cid: &CollectionId, op: &Op) -> Step {
        match op {
            Op::Touch { oid } => self.change(cid, oid, |_, _| Ok(())),
            Op::CreateExclusive { oid } => {
                self.must_not_exist(cid, oid)?;
                self.change(cid, oid, |_, _| Ok(()))
            }
            Op::Write { oid, offset, source: WriteSource::Inline(payload) } => {
                self.change(cid, oid, |this, o| this.write(o, *offset, payload))
            }
            Op::Write { oid, offset, source: WriteSource::Staged { stage, offset: from, len } } => {
                self.change(cid, oid, |this, o| this.write_staged(o, *offset, *stage, *from, *len))
            }
            Op::Zero { oid, offset, len } => self.change(cid, oid, |this, o| this.zero(o, *offset, *len)),
            Op::Truncate { oid, size } => self.change(cid, oid, |this, o| this.truncate(o, *size)),
            Op::Remove { oid } => {
                let (key, onode) = self.existing(cid, oid)?;
                self.drop_content(&onode)?;
                self.onodes.insert(key, None);
                Ok(())
            }
            Op::SetXattrs { oid, xattrs } => self.change(cid, oid, |_, o| {
                o.xattrs.extend(xattrs.iter().cloned());
                let size: usize = o.xattrs.iter().map(|(k, v)| k.len() + v.len()).sum();
                too_large("xattrs of an object", size, MAX_XATTRS)
            }),
            Op::RemoveXattr { oid, name } => self.change(cid, oid, |_, o| {
                o.xattrs.remove(name);
                Ok(())
            }),
            Op::RemoveXattrs { oid } => self.change(cid, oid, |_, o| {
                o.xattrs.clear();
                Ok(())
            }),
            Op::OmapSet { oid, entries } => self.change(cid, oid, |this, o| {
                o.has_omap = true;
                entries.iter().try_for_each(|(k, v)| this.put(key::omap(o.nid, k), Some(v.clone())))
            }),
            Op::OmapRemove { oid, keys } => self.change(cid, oid, |this, o| {
                keys.iter().filter(|_| o.has_omap).try_for_each(|k| this.put(key::omap(o.nid, k), None))
            }),
            Op::OmapRemoveRange { oid, from, to } => self.change(cid, oid, |this, o| {
                if !o.has_omap {
                    return Ok(());
                }
                this.remove_range(&key::omap(o.nid, from), &key::omap(o.nid, to))
            }),
            Op::OmapClear { oid } => self.change(cid, oid, |this, o| {
                this.drop_omap(o)?;
                (o.has_omap, o.omap_header) = (false, Bytes::new());
                Ok(())
            }),
            Op::OmapSetHeader { oid, header } => self.change(cid, oid, |_, o| {
                o.omap_header = header.clone();
                Ok(())
            }),
            Op::Clone { src, dst } => self.clone_object(cid, src, dst),
            Op::CloneRange { src, dst, src_offset, len, dst_offset } => {
                self.clone_range(cid, (src, dst), *src_offset, *len, *dst_offset)
            }
            Op::MoveRename { src, dst_collection, dst } => {
                let (from, onode) = self.existing(cid, src)?;
                self.must_not_exist(dst_collection, dst)?;
                let to = key::onode(self.collection(dst_collection)?, dst.as_bytes());
                self.onodes.insert(from, None);
                self.onodes.insert(to, Some(onode));
                Ok(())
            }
            Op::CreateCollection => {
                if self.collection(cid).is_ok() {
                    return Err(StoreError::Exists(cid.to_string()).into());
                }
                let number = self.new_nid();
                self.outcome.collections.push((cid.clone(), Some(number)));
                self.put(key::collection(cid), Some(number.to_le_bytes().to_vec().into()))
            }
            Op::RemoveCollection => {
                let number = self.collection(cid)?;
                let (from, to) = key::range(key::ONODE, number);
                self.store_onodes()?;
                let (objects, _) =
                    self.context.view.scan(Some(&self.puts), self.context.loaded, &from, &to, 1, 1)?;
                if !objects.is_empty() {
                    return Err(StoreError::NotEmpty(cid.to_string()).into());
                }
                self.outcome.collections.push((cid.clone(), None));
                self.put(key::collection(cid), None)
            }
            Op::SplitCollection { at, dst } => self.split(cid, at, dst),
        }
    }

    fn new_nid(&mut self) -> u64 {
        self.next_nid += 1;
        self.next_nid - 1
    }

    fn collection(&self, cid: &CollectionId) -> Result<u64> {
        let changed =
            self.outcome.collections.iter().rev().find(|(id, _)| id == cid).map(|(_, number)| *number);
        let number = changed.unwrap_or_else(|| self.context.collections.get(cid).copied());
        number.ok_or_else(|| StoreError::NoSuchCollection(cid.to_string()))
    }

    /// Sets a key of the index.
    fn put(&mut self, key: Bytes, value: Option<Bytes>) -> Step {
        self.put_bytes += key.len() + value.as_ref().map_or(0, Bytes::len) + 8;
        too_large("what the transaction changes", self.put_bytes, self.context.max_record)?;
        self.puts.insert(key, value);
        Ok(())
    }

    fn get(&self, key: &Bytes) -> Step<Option<Bytes>> {
        match self.puts.get(key) {
            Some(value) => Ok(value.clone()),
            None => Ok(self.context.view.get(self.context.loaded, key)?),
        }
    }

    /// All entries in a range.
    fn scan(&self, from: &Bytes, to: &Bytes) -> Step<Vec<(Bytes, Bytes)>> {
        let limit = self.context.max_record / 16;
        let (view, loaded) = (self.context.view, self.context.loaded);
        let (entries, more) = view.scan(Some(&self.puts), loaded, from, to, limit, usize::MAX)?;
        if more {
            let (size, limit) = (limit as u64 + 1, limit as u64);
            return Err(StoreError::TooLarge {
                what: "number of entries that the transaction changes".into(),
                size,
                limit,
            }
            .into());
        }
        Ok(entries)
    }

    fn remove_range(&mut self, from: &Bytes, to: &Bytes) -> Step {
        let entries = self.scan(from, to)?;
        entries.into_iter().try_for_each(|(key, _)| self.put(key, None))
    }

    // Objects.

    fn find(&mut self, cid: &CollectionId, oid: &ObjectId) -> Step<(Bytes, Option<Onode>)> {
        let key = key::onode(self.collection(cid)?, oid.as_bytes());
        if let Some(onode) = self.onodes.get(&key) {
            return Ok((key, onode.clone()));
        }
        let onode = self.get(&key)?.map(|bytes| Onode::decode(&bytes)).transpose()?;
        Ok((key, onode))
    }

    fn existing(&mut self, cid: &CollectionId, oid: &ObjectId) -> Step<(Bytes, Onode)> {
        match self.find(cid, oid)? {
            (key, Some(onode)) => Ok((key, onode)),
            _ => Err(StoreError::NoSuchObject(oid.to_string()).into()),
        }
    }

    fn must_not_exist(&mut self, cid: &CollectionId, oid: &ObjectId) -> Step {
        match self.find(cid, oid)? {
            (_, Some(_)) => Err(StoreError::Exists(oid.to_string()).into()),
            _ => Ok(()),
        }
    }

    /// Changes an object, made if it does not exist.
    fn change(
        &mut self,
        cid: &CollectionId,
        oid: &ObjectId,
        f: impl FnOnce(&mut Self, &mut Onode) -> Step,
    ) -> Step {
        let (key, found) = self.find(cid, oid)?;
        let old = found.clone();
        let mut onode = found.unwrap_or_else(|| Onode { nid: self.new_nid(), ..Onode::default() });
        f(self, &mut onode)?;
        if old.as_ref() != Some(&onode) {
            self.onodes.insert(key, Some(onode));
        }
        Ok(())
    }

    /// Moves the onodes changed so far into the changes, so that scans see them.
    fn store_onodes(&mut self) -> Step {
        for (key, onode) in std::mem::take(&mut self.onodes) {
            self.put(key, onode.map(|o| o.encode()))?;
        }
        Ok(())
    }

    /// Gives back all blocks and omap entries of an object.
    fn drop_content(&mut self, onode: &Onode) -> Step {
        self.drop_shards_from(onode.nid, 0)?;
        self.drop_omap(onode)
    }

    fn drop_omap(&mut self, onode: &Onode) -> Step {
        if !onode.has_omap {
            return Ok(());
        }
        let (from, to) = key::range(key::OMAP, onode.nid);
        self.remove_range(&from, &to)
    }

    fn split(&mut self, cid: &CollectionId, at: &ObjectId, dst: &CollectionId) -> Step {
        let (from, to) = (self.collection(cid)?, self.collection(dst)?);
        if from == to {
            return Ok(());
        }
        self.store_onodes()?;
        let moving = self.scan(&key::onode(from, at.as_bytes()), &key::range(key::ONODE, from).1)?;
        for (key, value) in moving {
            let oid = decode_oid(&key)?;
            self.must_not_exist(dst, &oid)?;
            self.put(key, None)?;
            self.put(key::onode(to, oid.as_bytes()), Some(value))?;
        }
        Ok(())
    }

    // Maps of blocks.

    /// Has shards `first..=last` loaded, all that are missing at once.
    fn load_shards(&mut self, nid: u64, first: u64, last: u64) -> Step {
        let mut missing = Vec::new();
        for number in first..=last {
            if self.shards.contains_key(&(nid, number)) {
                continue;
            }
            match self.get(&key::shard(nid, number)) {
                Ok(Some(bytes)) => {
                    let shard = Shard::decode(&bytes, self.context.data_blocks)?;
                    self.shards.insert((nid, number), (shard, false));
                }
                Ok(None) => {
                    self.shards.insert((nid, number), (Shard::default(), false));
                }
                Err(Stop::Need(needs)) => missing.extend(needs),
                Err(stop) => return Err(stop),
            }
        }
        if missing.is_empty() { Ok(()) } else { Err(Stop::Need(missing)) }
    }

    fn lookup(&mut self, nid: u64, number: u64) -> Step<Option<BlockRef>> {
        let shard = number / SHARD_BLOCKS;
        self.load_shards(nid, shard, shard)?;
        Ok(self.shards[&(nid, shard)].0.blocks[(number % SHARD_BLOCKS) as usize])
    }

    /// Moves the changed shards into the changes, so that scans see them.
    fn store_shards(&mut self) -> Step {
        for ((nid, number), (shard, dirty)) in std::mem::take(&mut self.shards) {
            if dirty {
                let value = (shard.mapped() > 0).then(|| shard.encode());
                self.put(key::shard(nid, number), value)?;
            }
        }
        Ok(())
    }

    /// Maps blocks `first..` of an object to `new`, releasing what they were mapped to.
    fn map(&mut self, onode: &mut Onode, first: u64, new: &[Option<BlockRef>]) -> Step {
        if new.is_empty() {
            return Ok(());
        }
        let end = first + new.len() as u64;
        self.load_shards(onode.nid, first / SHARD_BLOCKS, (end - 1) / SHARD_BLOCKS)?;
        let mut at = first;
        while at < end {
            let number = at / SHARD_BLOCKS;
            let stop = end.min((number + 1) * SHARD_BLOCKS);
            let (mut shard, _) = self.shards.remove(&(onode.nid, number)).expect("shards were loaded");
            for block in at..stop {
                let slot = &mut shard.blocks[(block % SHARD_BLOCKS) as usize];
                let old = std::mem::replace(slot, new[(block - first) as usize]);
                onode.blocks += u64::from(slot.is_some());
                if let Some(old) = old {
                    onode.blocks -= 1;
                    self.release(old)?;
                }
            }
            self.shards.insert((onode.nid, number), (shard, true));
            at = stop;
        }
        Ok(())
    }

    /// Releases all blocks in shards from `first` on; returns how many they were.
    fn drop_shards_from(&mut self, nid: u64, first: u64) -> Step<u64> {
        self.store_shards()?;
        let mut dropped = 0;
        for (key, value) in self.scan(&key::shard(nid, first), &key::range(key::SHARD, nid).1)? {
            let shard = Shard::decode(&value, self.context.data_blocks)?;
            for block in shard.blocks.into_iter().flatten() {
                dropped += 1;
                self.release(block)?;
            }
            self.put(key, None)?;
        }
        Ok(dropped)
    }

    // Blocks.

    fn ref_page(&mut self, chunk: u64) -> Step<&mut (RefPage, bool)> {
        if !self.refs.contains_key(&chunk) {
            let page = self.get(&key::refs(chunk))?.map(|b| RefPage::decode(&b)).transpose()?;
            self.refs.insert(chunk, (page.unwrap_or_default(), false));
        }
        Ok(self.refs.get_mut(&chunk).expect("it was just inserted"))
    }

    fn add_reference(&mut self, block: u64) -> Step {
        let (page, dirty) = self.ref_page(block / REF_BLOCKS)?;
        let extra = page.extra.entry((block % REF_BLOCKS) as u16).or_default();
        *extra = extra.checked_add(1).ok_or_else(|| corrupt("reference count", "overflow"))?;
        *dirty = true;
        Ok(())
    }

    /// Takes one reference from a block, and frees it if that was the last.
    fn release(&mut self, block: BlockRef) -> Step {
        if block.shared {
            let (page, dirty) = self.ref_page(block.block / REF_BLOCKS)?;
            let place = (block.block % REF_BLOCKS) as u16;
            if let Some(extra) = page.extra.get_mut(&place) {
                *extra -= 1;
                if *extra == 0 {
                    page.extra.remove(&place);
                }
                *dirty = true;
                return Ok(());
            }
        }
        self.deferred.remove(&block.block);
        self.frees.push(block.block);
        Ok(())
    }

    fn alloc(&mut self, blocks: u64) -> Step<Vec<Extent>> {
        let extents = self.alloc.alloc(blocks).ok_or(Stop::Space(blocks))?;
        self.allocated.extend(&extents);
        Ok(extents)
    }

    /// The content of a block, verified.
    fn content(&mut self, block: BlockRef) -> Step<Bytes> {
        let own = self.deferred.get(&block.block).cloned().or_else(|| self.own_write(block.block));
        let content = own.or_else(|| (self.context.deferred)(block.block));
        let content = content.or_else(|| self.context.loaded.blocks.get(&block.block).cloned());
        let content = content.ok_or(Need::Block(block.block))?;
        if block::crc32c(&content) != block.crc {
            return Err(corrupt(&format!("block {}", block.block), "checksum mismatch").into());
        }
        Ok(content)
    }

    /// A block that this transaction itself has written.
    fn own_write(&self, block: u64) -> Option<Bytes> {
        let covers = |(start, data): &&(u64, Bytes)| {
            *start <= block && block < start + (data.len() as u64).div_ceil(BLOCK)
        };
        let (start, data) = self.outcome.writes.iter().rev().find(covers)?;
        let at = ((block - start) * BLOCK) as usize;
        Some(padded(&data.slice(at..data.len().min(at + BLOCK_SIZE))))
    }

    /// Content of object bytes `offset..offset + len`, zeros where there is none.
    fn gather(&mut self, onode: &Onode, offset: u64, len: usize) -> Step<Bytes> {
        let mut out = BytesMut::zeroed(len);
        let mut done = 0;
        for piece in block::piece_lengths(offset, len as u64) {
            let at = offset + done as u64;
            if let Some(block) = self.lookup(onode.nid, at / BLOCK)? {
                let content = self.content(block)?;
                let from = (at % BLOCK) as usize;
                out[done..done + piece].copy_from_slice(&content[from..from + piece]);
            }
            done += piece;
        }
        Ok(out.freeze())
    }

    // Writes.

    fn write(&mut self, onode: &mut Onode, offset: u64, payload: &Payload) -> Step {
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

    /// Writes whole blocks (the last may be short, zeros follow) into fresh space.
    fn write_run(&mut self, onode: &mut Onode, offset: u64, data: &Bytes, checksums: &[u32]) -> Step {
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

    /// Writes part of a block: the merged block goes to the log, and to its place with the next checkpoint.
    fn merge(&mut self, onode: &mut Onode, offset: u64, piece: &Bytes, crc: u32) -> Step {
        if block::crc32c(piece) != crc {
            return Err(StoreError::BadPayload(format!("piece at {offset} has another checksum")).into());
        }
        let mut merged = BytesMut::zeroed(BLOCK_SIZE);
        if let Some(old) = self.lookup(onode.nid, offset / BLOCK)? {
            merged.copy_from_slice(&self.content(old)?);
        }
        let from = (offset % BLOCK) as usize;
        merged[from..from + piece.len()].copy_from_slice(piece);
        let merged = merged.freeze();
        let block = self.alloc(1)?[0].start;
        self.put_bytes += BLOCK_SIZE;
        too_large("what the transaction changes", self.put_bytes, self.context.max_record)?;
        let new = BlockRef { block, crc: block::crc32c(&merged), shared: false };
        self.map(onode, offset / BLOCK, &[Some(new)])?;
        self.deferred.insert(block, merged);
        Ok(())
    }

    fn write_staged(&mut self, onode: &mut Onode, offset: u64, id: StageId, from: u64, len: u64) -> Step {
        let usable = self.context.usable_stages.contains(&id.0);
        let stage = self.context.stages.get(&id.0).filter(|_| usable).ok_or(StoreError::NoSuchStage(id.0))?;
        check_staged_use(stage.len, from, len, offset, onode.size)?;
        let (first, count) = (from / BLOCK, len.div_ceil(BLOCK));
        let runs = stage.runs(first, count);
        let mut refs = Vec::with_capacity(count as usize);
        for (number, block) in (first..).zip(runs.iter().flat_map(|e| e.blocks())) {
            match stage.blocks[number as usize] {
                StagedBlock::Written(crc) if self.named.insert((id, number)) => {
                    refs.push(Some(BlockRef { block, crc, shared: false }));
                }
                _ => return Err(block_not_available(number).into()),
            }
        }
        self.staged.extend(runs);
        self.map(onode, offset / BLOCK, &refs)?;
        onode.size = onode.size.max(offset + len);
        Ok(())
    }

    fn zero(&mut self, onode: &mut Onode, offset: u64, len: u64) -> Step {
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

    /// Zeros bytes `from..to` of one block, if it is not a hole.
    fn zero_part(&mut self, onode: &mut Onode, from: u64, to: u64) -> Step {
        if from >= to || self.lookup(onode.nid, from / BLOCK)?.is_none() {
            return Ok(());
        }
        let zeros = Bytes::from(vec![0; (to - from) as usize]);
        let payload = Payload::compute(from, zeros);
        self.write(onode, from, &payload)
    }

    /// Makes blocks `first..end` holes.
    fn drop_blocks(&mut self, onode: &mut Onode, first: u64, end: u64) -> Step {
        self.store_shards()?;
        let from = key::shard(onode.nid, first / SHARD_BLOCKS);
        let to = key::shard(onode.nid, end.div_ceil(SHARD_BLOCKS));
        for (key, _) in self.scan(&from, &to)? {
            let number = key::rest(&key);
            let number =
                <[u8; 8]>::try_from(&number[..]).map_err(|_| corrupt("key of a shard", "wrong length"))?;
            let start = u64::from_be_bytes(number) * SHARD_BLOCKS;
            let (first, end) = (first.max(start), end.min(start + SHARD_BLOCKS));
            self.map(onode, first, &vec![None; (end - first) as usize])?;
        }
        Ok(())
    }

    fn truncate(&mut self, onode: &mut Onode, size: u64) -> Step {
        if size < onode.size {
            let keep = size.div_ceil(BLOCK);
            if !size.is_multiple_of(BLOCK) {
                let end = block::align_down(size) + BLOCK;
                let old = std::mem::replace(&mut onode.size, end);
                self.zero_part(onode, size, end)?;
                onode.size = old;
            }
            let shard_end = keep.next_multiple_of(SHARD_BLOCKS);
            self.drop_blocks(onode, keep, shard_end)?;
            onode.blocks -= self.drop_shards_from(onode.nid, shard_end / SHARD_BLOCKS)?;
        }
        onode.size = size;
        Ok(())
    }

    // Clones.

    fn clone_object(&mut self, cid: &CollectionId, src: &ObjectId, dst: &ObjectId) -> Step {
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

    fn clone_range(
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
    fn share(&mut self, onode: &mut Onode, number: u64) -> Step<Option<BlockRef>> {
        if self.lookup(onode.nid, number)?.is_none() {
            return Ok(None);
        }
        let (shard, dirty) =
            self.shards.get_mut(&(onode.nid, number / SHARD_BLOCKS)).expect("it was just looked up");
        let slot = &mut shard.blocks[(number % SHARD_BLOCKS) as usize];
        *dirty |= slot.is_some_and(|b| !b.shared);
        if let Some(block) = slot {
            block.shared = true;
        }
        let block = *slot;
        if let Some(block) = block {
            self.add_reference(block.block)?;
        }
        Ok(block)
    }
}

/// A piece of a range that is being cloned.
enum Part {
    Block(Option<BlockRef>),
    Bytes(Bytes),
}

/// `data` filled up with zeros to a whole block.
pub(crate) fn padded(data: &Bytes) -> Bytes {
    if data.len() == BLOCK_SIZE {
        return data.clone();
    }
    let mut block = BytesMut::zeroed(BLOCK_SIZE);
    block[..data.len()].copy_from_slice(data);
    block.freeze()
}

fn too_large(what: &str, size: usize, limit: usize) -> Step {
    if size > limit {
        let (what, size, limit) = (what.to_owned(), size as u64, limit as u64);
        return Err(StoreError::TooLarge { what, size, limit }.into());
    }
    Ok(())
}
