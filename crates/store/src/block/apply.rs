//! Turns a transaction into changes of the index and writes of blocks, completely or not at all.
//!
//! [`Apply`] works on copies of the values that it changes. If a value is not in memory, it stops
//! with [`Stop::Need`]. The caller loads the value and runs the transaction again from its start.
//! Therefore no method in this module waits, and no transaction is applied partially.

mod blocks;
mod clones;
mod writes;

use std::collections::BTreeMap;

use base::block::BLOCK_SIZE;
use bytes::{Bytes, BytesMut};

use super::alloc::{Allocator, Purse};
use super::changes::Changes;
use super::extent::{Extent, push_block};
use super::leaf::{BlockRef, PackedLeaf};
use super::log::Record;
use super::need::Need;
use super::records::{Onode, RefPage, decode_oid, key};
use super::staged::StageTable;
use super::view::{IndexView, Loaded};
use crate::transaction::{check_guard, guarded};
use crate::{CollectionId, MAX_XATTRS, ObjectId, Op, Result, StageId, StoreError, Transaction, WriteSource};

/// Reason why a transaction could not be applied.
#[derive(Debug)]
pub(crate) enum Stop {
    /// These items must be loaded first.
    Need(Vec<Need>),
    /// Too few blocks are free. The number is the sum of the blocks of the failed allocation and of
    /// all earlier allocations of the transaction.
    Space(u64),
    /// A checkpoint must run first, because only then is it known whether the index has enough
    /// room. If the index still has too little room, the transaction fails with this error.
    Checkpoint(StoreError),
    /// The log has too little room now.
    Log,
    /// The transaction fails with this error.
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

pub(crate) type ApplyResult<T = ()> = std::result::Result<T, Stop>;

/// State that a transaction reads but does not change.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) view: &'a IndexView,
    pub(crate) loaded: &'a Loaded,
    pub(crate) collections: &'a BTreeMap<CollectionId, u64>,
    pub(crate) stages: &'a StageTable,
    /// Numbers of the stages that the transaction may use.
    pub(crate) usable_stages: &'a [u64],
    /// Returns the content of a block if the data area does not have it yet.
    pub(crate) deferred: &'a dyn Fn(u64) -> Option<Bytes>,
    pub(crate) data_blocks: u64,
    pub(crate) max_record: usize,
}

/// The changes of a transaction.
#[derive(Debug, Default)]
pub(crate) struct TransactionEffect {
    pub(crate) record: Record,
    /// The leaves that the record has patches for, with their keys.
    pub(crate) leaves: Vec<(Bytes, PackedLeaf)>,
    /// Data to be written to newly allocated blocks: first block, bytes (the last block may be
    /// short).
    pub(crate) writes: Vec<(u64, Bytes)>,
    /// Runs of staged blocks that the transaction names: stage, first block in the stage, number of
    /// blocks.
    pub(crate) taken: Vec<(StageId, u64, u64)>,
    /// Created collections with their numbers, and removed collections with `None`.
    pub(crate) collections: Vec<(CollectionId, Option<u64>)>,
}

/// An onode that a transaction has looked up; `None` if the object does not exist.
struct KnownOnode {
    onode: Option<Onode>,
    is_changed: bool,
}

impl KnownOnode {
    fn changed(onode: Option<Onode>) -> KnownOnode {
        KnownOnode { onode, is_changed: true }
    }
}

/// An object that a transaction has looked up.
struct Owner {
    /// Key of the object's onode.
    key: Bytes,
    /// Whether the index may have a key for the object's first leaf, because the onode did not contain
    /// this leaf before the transaction.
    has_leaf_key: bool,
}

/// A leaf that a transaction has looked up.
struct KnownLeaf {
    leaf: PackedLeaf,
    is_changed: bool,
    /// The blocks that the transaction has changed, if the index has the leaf and no block became a
    /// hole.
    patch: Option<PackedLeaf>,
}

impl KnownLeaf {
    /// Maps consecutive positions, beginning with `first`, to the blocks in `new`. Returns the replaced
    /// blocks. All block numbers must be less than `limit`.
    fn replace(&mut self, limit: u64, first: u64, new: &[Option<BlockRef>]) -> Result<Vec<BlockRef>> {
        let mut replaced = Vec::new();
        self.leaf = self.leaf.replaced(limit, first, new, &mut replaced)?;
        self.is_changed = true;
        self.patch = match self.patch.take().filter(|_| new.iter().all(Option::is_some)) {
            Some(patch) => Some(patch.replaced(limit, first, new, &mut Vec::new())?),
            None => None,
        };
        Ok(replaced)
    }
}

/// A transaction that is being applied.
pub(crate) struct Apply<'a> {
    context: Context<'a>,
    alloc: &'a mut Allocator,
    purse: Purse,
    puts: Changes,
    put_bytes: usize,
    /// The onodes that the transaction has looked up, by their keys.
    onodes: BTreeMap<Bytes, KnownOnode>,
    /// The leaves that the transaction has looked up, by object number and leaf number.
    leaves: BTreeMap<(u64, u64), KnownLeaf>,
    /// The changes of leaves in `puts`, by their keys. A leaf that is absent here was changed as a
    /// whole.
    patches: BTreeMap<Bytes, PackedLeaf>,
    /// The objects that the transaction has looked up, by object number.
    owners: BTreeMap<u64, Owner>,
    /// Pages of reference counts, each with its stored value before the transaction.
    refs: BTreeMap<u64, (RefPage, Option<Bytes>)>,
    pub(crate) allocated: Vec<Extent>,
    staged: Vec<Extent>,
    frees: Vec<u64>,
    deferred: BTreeMap<u64, Bytes>,
    /// Objects and collections with this number or a higher number are created by this transaction.
    first_nid: u64,
    next_nid: u64,
    outcome: TransactionEffect,
}

impl<'a> Apply<'a> {
    pub(crate) fn new(
        context: Context<'a>,
        alloc: &'a mut Allocator,
        purse: Purse,
        next_nid: u64,
    ) -> Apply<'a> {
        Apply {
            context,
            alloc,
            purse,
            puts: Changes::new(),
            put_bytes: 0,
            onodes: BTreeMap::new(),
            leaves: BTreeMap::new(),
            patches: BTreeMap::new(),
            owners: BTreeMap::new(),
            refs: BTreeMap::new(),
            allocated: Vec::new(),
            staged: Vec::new(),
            frees: Vec::new(),
            deferred: BTreeMap::new(),
            first_nid: next_nid,
            next_nid,
            outcome: TransactionEffect::default(),
        }
    }

    /// Runs the transaction. If it fails, the caller must free the blocks in `allocated`.
    pub(crate) fn run(&mut self, transaction: &Transaction) -> ApplyResult<TransactionEffect> {
        transaction.validate()?;
        let cid = &transaction.collection;
        if !matches!(transaction.ops.first(), Some(Op::CreateCollection)) {
            self.collection(cid)?;
        }
        transaction.ops.iter().try_for_each(|op| self.op(cid, op))?;
        self.finish()
    }

    /// Returns the size of the transaction's changes, in bytes.
    pub(crate) fn changed_bytes(&self) -> usize {
        self.put_bytes
    }

    fn finish(&mut self) -> ApplyResult<TransactionEffect> {
        self.store_leaves()?;
        self.inline_leaves()?;
        self.store_onodes()?;
        for (chunk, (page, stored)) in std::mem::take(&mut self.refs) {
            // Skip a page whose counts equal the counts before the transaction.
            let page = page.encode();
            if page != stored {
                self.put(key::refs(chunk), page)?;
            }
        }
        let mut outcome = std::mem::take(&mut self.outcome);
        let mut allocs = self.allocated.clone();
        allocs.append(&mut self.staged);
        self.frees.sort_unstable();
        let mut frees = Vec::new();
        self.frees.iter().for_each(|b| push_block(&mut frees, *b));
        let mut patches = Vec::with_capacity(self.patches.len());
        for (key, patch) in std::mem::take(&mut self.patches) {
            // The transaction may have removed the leaf, or moved it into an onode.
            let Some(leaf) = self.puts.get(&key).cloned().flatten() else { continue };
            self.puts.remove(&key);
            outcome.leaves.push((key.clone(), leaf.into()));
            patches.push((key, patch.into()));
        }
        outcome.record = Record {
            puts: std::mem::take(&mut self.puts).into_iter().collect(),
            patches,
            allocs,
            frees,
            deferred: std::mem::take(&mut self.deferred).into_iter().collect(),
            next_nid: self.next_nid,
        };
        Ok(outcome)
    }

    fn op(&mut self, cid: &CollectionId, op: &Op) -> ApplyResult {
        match op {
            Op::Touch { oid } => self.change(cid, oid, |_, _| Ok(())),
            Op::CreateExclusive { oid } => {
                self.must_not_exist(cid, oid)?;
                self.change(cid, oid, |_, _| Ok(()))
            }
            Op::Zero { oid, len: 0, .. } => self.change(cid, oid, |_, _| Ok(())),
            Op::Write { oid, source, .. } if source.is_empty() => self.change(cid, oid, |_, _| Ok(())),
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
                self.onodes.insert(key, KnownOnode::changed(None));
                Ok(())
            }
            Op::SetXattrs { oid, xattrs } => self.change_xattrs(cid, oid, |all| {
                let mut is_changed = false;
                for (name, value) in xattrs {
                    is_changed |= all.insert(name.clone(), value.clone()).as_ref() != Some(value);
                }
                let size: usize = all.iter().map(|(k, v)| k.len() + v.len()).sum();
                too_large("size in bytes of all xattrs of an object", size, MAX_XATTRS)?;
                Ok(is_changed)
            }),
            Op::RemoveXattr { oid, name } => {
                self.change_xattrs(cid, oid, |all| Ok(all.remove(name).is_some()))
            }
            Op::RemoveXattrs { oid } => {
                self.change_xattrs(cid, oid, |all| Ok(!std::mem::take(all).is_empty()))
            }
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
                self.moved(onode.nid, &to);
                self.onodes.insert(from, KnownOnode::changed(None));
                self.onodes.insert(to, KnownOnode::changed(Some(onode)));
                Ok(())
            }
            Op::GuardXattr { oid, name, value } => {
                let key = self.look_up(cid, oid)?;
                let onode = self.onodes.get(&key).and_then(|known| known.onode.as_ref());
                let found = onode.and_then(|onode| onode.xattrs.get(name));
                Ok(check_guard(found, value.as_ref(), || guarded("xattr", name, oid))?)
            }
            Op::GuardOmap { oid, key, value } => {
                let of_object = self.look_up(cid, oid)?;
                let onode = self.onodes.get(&of_object).and_then(|known| known.onode.as_ref());
                let entry = onode.filter(|onode| onode.has_omap).map(|onode| key::omap(onode.nid, key));
                let found = entry.map(|entry| self.get(&entry)).transpose()?.flatten();
                Ok(check_guard(found.as_ref(), value.as_ref(), || guarded("omap entry", key, oid))?)
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

    /// Sets the value of a key of the index. `None` removes the key.
    fn put(&mut self, key: Bytes, value: Option<Bytes>) -> ApplyResult {
        self.put_bytes += key.len() + value.as_ref().map_or(0, Bytes::len) + 8;
        too_large("size in bytes of the changes of a transaction", self.put_bytes, self.context.max_record)?;
        // The log stores the whole value, unless the caller adds a patch.
        self.patches.remove(&key);
        self.puts.insert(key, value);
        Ok(())
    }

    fn get(&self, key: &Bytes) -> ApplyResult<Option<Bytes>> {
        match self.puts.get(key) {
            Some(value) => Ok(value.clone()),
            None => Ok(self.context.view.get(self.context.loaded, key)?),
        }
    }

    /// Returns all entries of the index in a range.
    fn scan(&self, from: &Bytes, to: &Bytes) -> ApplyResult<Vec<(Bytes, Bytes)>> {
        let limit = self.context.max_record / 16;
        let (view, loaded) = (self.context.view, self.context.loaded);
        let (entries, more) = view.scan(Some(&self.puts), loaded, from, to, limit, usize::MAX)?;
        if more {
            let (size, limit) = (limit as u64 + 1, limit as u64);
            return Err(StoreError::TooLarge {
                what: "number of index entries that an op of a transaction reads".into(),
                size,
                limit,
            }
            .into());
        }
        Ok(entries)
    }

    fn remove_range(&mut self, from: &Bytes, to: &Bytes) -> ApplyResult {
        let entries = self.scan(from, to)?;
        entries.into_iter().try_for_each(|(key, _)| self.put(key, None))
    }

    /// Looks up an object, so that `onodes` has its onode. Returns the onode's key.
    fn look_up(&mut self, cid: &CollectionId, oid: &ObjectId) -> ApplyResult<Bytes> {
        let key = key::onode(self.collection(cid)?, oid.as_bytes());
        if self.onodes.contains_key(&key) {
            return Ok(key);
        }
        let onode = self.get(&key)?.map(|bytes| Onode::decode(&bytes)).transpose()?;
        if let Some(onode) = &onode {
            let found = Owner { key: key.clone(), has_leaf_key: onode.leaf.is_empty() && onode.blocks > 0 };
            self.owners.entry(onode.nid).or_insert(found);
        }
        self.onodes.insert(key.clone(), KnownOnode { onode, is_changed: false });
        Ok(key)
    }

    fn find(&mut self, cid: &CollectionId, oid: &ObjectId) -> ApplyResult<(Bytes, Option<Onode>)> {
        let key = self.look_up(cid, oid)?;
        let onode = self.onodes.get(&key).and_then(|known| known.onode.clone());
        Ok((key, onode))
    }

    /// Records that the transaction creates an object.
    fn created(&mut self, key: &Bytes, nid: u64) {
        self.owners.insert(nid, Owner { key: key.clone(), has_leaf_key: false });
    }

    /// Records that the transaction moves an onode to the key `to`.
    fn moved(&mut self, nid: u64, to: &Bytes) {
        if let Some(owner) = self.owners.get_mut(&nid) {
            owner.key = to.clone();
        }
    }

    fn existing(&mut self, cid: &CollectionId, oid: &ObjectId) -> ApplyResult<(Bytes, Onode)> {
        match self.find(cid, oid)? {
            (key, Some(onode)) => Ok((key, onode)),
            _ => Err(StoreError::NoSuchObject(oid.to_string()).into()),
        }
    }

    fn must_not_exist(&mut self, cid: &CollectionId, oid: &ObjectId) -> ApplyResult {
        match self.find(cid, oid)? {
            (_, Some(_)) => Err(StoreError::Exists(oid.to_string()).into()),
            _ => Ok(()),
        }
    }

    /// Changes an object, except its xattrs. Creates the object first if it does not exist.
    fn change(
        &mut self,
        cid: &CollectionId,
        oid: &ObjectId,
        f: impl FnOnce(&mut Self, &mut Onode) -> ApplyResult,
    ) -> ApplyResult {
        self.change_with(cid, oid, |this, onode| {
            let before = (onode.size, onode.blocks, onode.has_omap, onode.omap_header.clone());
            f(this, onode)?;
            Ok(before != (onode.size, onode.blocks, onode.has_omap, onode.omap_header.clone()))
        })
    }

    /// Changes the xattrs of an object. Creates the object first if it does not exist. `f` returns
    /// whether the xattrs have changed.
    fn change_xattrs(
        &mut self,
        cid: &CollectionId,
        oid: &ObjectId,
        f: impl FnOnce(&mut BTreeMap<Bytes, Bytes>) -> ApplyResult<bool>,
    ) -> ApplyResult {
        self.change_with(cid, oid, |_, onode| f(&mut onode.xattrs))
    }

    fn change_with(
        &mut self,
        cid: &CollectionId,
        oid: &ObjectId,
        f: impl FnOnce(&mut Self, &mut Onode) -> ApplyResult<bool>,
    ) -> ApplyResult {
        let key = self.look_up(cid, oid)?;
        let known = self.onodes.get_mut(&key).map(|known| (known.onode.take(), known.is_changed));
        let (found, was_changed) = known.unwrap_or_default();
        let is_new = found.is_none();
        let mut onode = found.unwrap_or_else(|| Onode { nid: self.new_nid(), ..Onode::default() });
        if is_new {
            self.created(&key, onode.nid);
        }
        let is_changed = f(self, &mut onode)? || is_new || was_changed;
        if let Some(known) = self.onodes.get_mut(&key) {
            *known = KnownOnode { onode: Some(onode), is_changed };
        }
        Ok(())
    }

    /// Moves the onodes that were changed so far into `puts`, so that scans see them.
    fn store_onodes(&mut self) -> ApplyResult {
        for (key, known) in std::mem::take(&mut self.onodes) {
            if known.is_changed {
                self.put(key, known.onode.map(|onode| onode.encode()))?;
            }
        }
        Ok(())
    }

    /// Releases all blocks of an object and removes its omap entries.
    fn drop_content(&mut self, onode: &Onode) -> ApplyResult {
        self.drop_leaves_from(onode, 0)?;
        self.drop_omap(onode)
    }

    fn drop_omap(&mut self, onode: &Onode) -> ApplyResult {
        if !onode.has_omap {
            return Ok(());
        }
        let (from, to) = key::range(key::OMAP, onode.nid);
        self.remove_range(&from, &to)
    }

    fn split(&mut self, cid: &CollectionId, at: &ObjectId, dst: &CollectionId) -> ApplyResult {
        let (from, to) = (self.collection(cid)?, self.collection(dst)?);
        if from == to {
            return Ok(());
        }
        self.store_onodes()?;
        let moving = self.scan(&key::onode(from, at.as_bytes()), &key::range(key::ONODE, from).1)?;
        for (key, value) in moving {
            let oid = decode_oid(&key)?;
            self.must_not_exist(dst, &oid)?;
            let moved = key::onode(to, oid.as_bytes());
            self.moved(Onode::decode(&value)?.nid, &moved);
            self.put(key, None)?;
            self.put(moved, Some(value))?;
        }
        // These onodes are unchanged, but `puts` has newer ones.
        self.onodes.clear();
        Ok(())
    }
}

/// Pads `data` with zeros to a whole block.
pub(crate) fn padded(data: &Bytes) -> Bytes {
    if data.len() == BLOCK_SIZE {
        return data.clone();
    }
    let mut block = BytesMut::zeroed(BLOCK_SIZE);
    block[..data.len()].copy_from_slice(data);
    block.freeze()
}

fn too_large(what: &str, size: usize, limit: usize) -> ApplyResult {
    if size > limit {
        let (what, size, limit) = (what.to_owned(), size as u64, limit as u64);
        return Err(StoreError::TooLarge { what, size, limit }.into());
    }
    Ok(())
}
