//! [`MemStore`]: a model of an object store that is as simple as possible. It keeps everything in
//! memory, and nothing is durable.

mod object;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::block::{BLOCK, BLOCK_SIZE, Payload};
use base::collections::HashMap;
use bytes::Bytes;

use object::{MemBlock, MemObject};

use crate::api::check_incarnation;
use crate::stage::{block_not_available, check_stage_write, check_staged_use};
use crate::transaction::{check_guard, guarded};
use crate::{
    Area, CollectionId, MAX_XATTRS, MetadataQuery, ObjectId, Op, Page, QueryReply, Result, Space, StageId,
    Stat, StoreError, StoreFuture, StoreReply, StoreRequest, Submit, Transaction, WriteSource, ready,
};

/// Maximum size of a page of a listing, in bytes.
const PAGE_BYTES: usize = 1 << 20;
/// Capacity that [`MemStore`] reports, in bytes.
const CAPACITY: u64 = 1 << 40;

/// An [`ObjectStore`](crate::ObjectStore) in memory, for tests. It is also the reference model with
/// which tests compare other implementations.
///
/// Every call executes immediately: its future is already complete when the call returns.
#[derive(Default)]
pub struct MemStore {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    collections: BTreeMap<CollectionId, BTreeMap<ObjectId, Arc<MemObject>>>,
    stages: HashMap<StageId, MemStage>,
    last_stage: u64,
    closed: bool,
}

struct MemStage {
    len: u64,
    blocks: BTreeMap<u64, MemBlock>,
}

/// State that an op of a transaction replaced. If the transaction fails, the store restores this
/// state.
enum Rollback {
    /// The object before the op; `None` if it did not exist.
    Object(CollectionId, ObjectId, Option<Arc<MemObject>>),
    /// Whether the collection existed before the op.
    Collection(CollectionId, bool),
    /// A block of a stage, with its number, that the op has moved to an object.
    Staged(StageId, u64, MemBlock),
}

impl MemStore {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> MemStore {
        MemStore::default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn collection(&self, cid: &CollectionId) -> Result<&BTreeMap<ObjectId, Arc<MemObject>>> {
        self.collections.get(cid).ok_or_else(|| StoreError::NoSuchCollection(cid.to_string()))
    }

    fn object(&self, cid: &CollectionId, oid: &ObjectId) -> Result<&MemObject> {
        self.find(cid, oid)?.ok_or_else(|| StoreError::NoSuchObject(oid.to_string()))
    }

    fn find(&self, cid: &CollectionId, oid: &ObjectId) -> Result<Option<&MemObject>> {
        Ok(self.collection(cid)?.get(oid).map(Arc::as_ref))
    }

    fn put(
        &mut self,
        cid: &CollectionId,
        oid: &ObjectId,
        object: Option<Arc<MemObject>>,
    ) -> Result<Rollback> {
        let objects =
            self.collections.get_mut(cid).ok_or_else(|| StoreError::NoSuchCollection(cid.to_string()))?;
        let old = match object {
            Some(object) => objects.insert(oid.clone(), object),
            None => objects.remove(oid),
        };
        Ok(Rollback::Object(cid.clone(), oid.clone(), old))
    }

    fn apply(&mut self, transaction: &Transaction) -> Result<()> {
        transaction.validate()?;
        let mut undo = Vec::new();
        let cid = &transaction.collection;
        if !matches!(transaction.ops.first(), Some(Op::CreateCollection)) {
            self.collection(cid)?;
        }
        let result = transaction.ops.iter().try_for_each(|op| self.step(cid, op, &mut undo));
        if result.is_err() {
            undo.into_iter().rev().for_each(|step| self.undo(step));
        }
        result
    }

    fn undo(&mut self, step: Rollback) {
        match step {
            Rollback::Object(cid, oid, Some(object)) => {
                self.collections.entry(cid).or_default().insert(oid, object);
            }
            Rollback::Object(cid, oid, None) => {
                self.collections.entry(cid).or_default().remove(&oid);
            }
            Rollback::Collection(cid, true) => {
                self.collections.insert(cid, BTreeMap::new());
            }
            Rollback::Collection(cid, false) => {
                self.collections.remove(&cid);
            }
            Rollback::Staged(id, number, block) => {
                if let Some(stage) = self.stages.get_mut(&id) {
                    stage.blocks.insert(number, block);
                }
            }
        }
    }

    /// Changes an object. Creates the object first if it does not exist.
    fn change(
        &mut self,
        cid: &CollectionId,
        oid: &ObjectId,
        undo: &mut Vec<Rollback>,
        f: impl FnOnce(&mut MemObject) -> Result<()>,
    ) -> Result<()> {
        let mut object = self.find(cid, oid)?.cloned().unwrap_or_default();
        f(&mut object)?;
        undo.push(self.put(cid, oid, Some(Arc::new(object)))?);
        Ok(())
    }

    fn step(&mut self, cid: &CollectionId, op: &Op, undo: &mut Vec<Rollback>) -> Result<()> {
        match op {
            Op::Touch { oid } => self.change(cid, oid, undo, |_| Ok(())),
            Op::CreateExclusive { oid } => {
                self.must_not_exist(cid, oid)?;
                self.change(cid, oid, undo, |_| Ok(()))
            }
            Op::Zero { oid, len: 0, .. } => self.change(cid, oid, undo, |_| Ok(())),
            Op::Write { oid, source, .. } if source.is_empty() => self.change(cid, oid, undo, |_| Ok(())),
            Op::Write { oid, offset, source: WriteSource::Inline(payload) } => {
                self.change(cid, oid, undo, |o| o.write(*offset, payload))
            }
            Op::Write { oid, offset, source: WriteSource::Staged { stage, offset: from, len } } => {
                let size = self.find(cid, oid)?.map_or(0, |o| o.size);
                let blocks = self.take_staged(*stage, (*from, *len), (*offset, size), undo)?;
                self.change(cid, oid, undo, |o| {
                    o.blocks.extend((offset / BLOCK..).zip(blocks));
                    o.size = o.size.max(offset + len);
                    Ok(())
                })
            }
            Op::Zero { oid, offset, len } => self.change(cid, oid, undo, |o| o.zero(*offset, *len)),
            Op::Truncate { oid, size } => self.change(cid, oid, undo, |o| o.truncate(*size)),
            Op::Remove { oid } => {
                self.object(cid, oid)?;
                undo.push(self.put(cid, oid, None)?);
                Ok(())
            }
            Op::SetXattrs { oid, xattrs } => self.change(cid, oid, undo, |o| {
                o.xattrs.extend(xattrs.iter().cloned());
                let size: usize = o.xattrs.iter().map(|(k, v)| k.len() + v.len()).sum();
                if size > MAX_XATTRS {
                    let (size, limit) = (size as u64, MAX_XATTRS as u64);
                    return Err(StoreError::TooLarge {
                        what: "size in bytes of all xattrs of an object".into(),
                        size,
                        limit,
                    });
                }
                Ok(())
            }),
            Op::RemoveXattr { oid, name } => self.change(cid, oid, undo, |o| {
                o.xattrs.remove(name);
                Ok(())
            }),
            Op::RemoveXattrs { oid } => self.change(cid, oid, undo, |o| {
                o.xattrs.clear();
                Ok(())
            }),
            Op::OmapSet { oid, entries } => self.change(cid, oid, undo, |o| {
                o.omap.extend(entries.iter().cloned());
                Ok(())
            }),
            Op::OmapRemove { oid, keys } => self.change(cid, oid, undo, |o| {
                keys.iter().for_each(|key| drop(o.omap.remove(key)));
                Ok(())
            }),
            Op::OmapRemoveRange { oid, from, to } => self.change(cid, oid, undo, |o| {
                o.omap.retain(|key, _| key < from || key >= to);
                Ok(())
            }),
            Op::OmapClear { oid } => self.change(cid, oid, undo, |o| {
                o.omap.clear();
                o.header = Bytes::new();
                Ok(())
            }),
            Op::OmapSetHeader { oid, header } => self.change(cid, oid, undo, |o| {
                o.header = header.clone();
                Ok(())
            }),
            Op::Clone { src, dst } => {
                let copy = Arc::new(self.object(cid, src)?.clone());
                undo.push(self.put(cid, dst, Some(copy))?);
                Ok(())
            }
            Op::CloneRange { src, dst, src_offset, len, dst_offset } => {
                let from = self.object(cid, src)?.clone();
                self.change(cid, dst, undo, |o| o.clone_range(&from, *src_offset, *len, *dst_offset))
            }
            Op::MoveRename { src, dst_collection, dst } => {
                let object = Arc::new(self.object(cid, src)?.clone());
                self.must_not_exist(dst_collection, dst)?;
                undo.push(self.put(cid, src, None)?);
                undo.push(self.put(dst_collection, dst, Some(object))?);
                Ok(())
            }
            Op::GuardXattr { oid, name, value } => {
                let found = self.find(cid, oid)?.and_then(|o| o.xattrs.get(name));
                check_guard(found, value.as_ref(), || guarded("xattr", name, oid))
            }
            Op::GuardOmap { oid, key, value } => {
                let found = self.find(cid, oid)?.and_then(|o| o.omap.get(key));
                check_guard(found, value.as_ref(), || guarded("omap entry", key, oid))
            }
            Op::CreateCollection => {
                if self.collections.contains_key(cid) {
                    return Err(StoreError::Exists(cid.to_string()));
                }
                self.collections.insert(cid.clone(), BTreeMap::new());
                undo.push(Rollback::Collection(cid.clone(), false));
                Ok(())
            }
            Op::RemoveCollection => {
                if !self.collection(cid)?.is_empty() {
                    return Err(StoreError::NotEmpty(cid.to_string()));
                }
                self.collections.remove(cid);
                undo.push(Rollback::Collection(cid.clone(), true));
                Ok(())
            }
            Op::SplitCollection { at, dst } => self.split(cid, at, dst, undo),
        }
    }

    fn must_not_exist(&self, cid: &CollectionId, oid: &ObjectId) -> Result<()> {
        match self.find(cid, oid)? {
            Some(_) => Err(StoreError::Exists(oid.to_string())),
            None => Ok(()),
        }
    }

    fn split(
        &mut self,
        cid: &CollectionId,
        at: &ObjectId,
        dst: &CollectionId,
        undo: &mut Vec<Rollback>,
    ) -> Result<()> {
        self.collection(dst)?;
        let moving: Vec<_> = self
            .collection(cid)?
            .range(at.clone()..)
            .map(|(oid, object)| (oid.clone(), Arc::clone(object)))
            .collect();
        if cid == dst {
            return Ok(());
        }
        for (oid, object) in moving {
            self.must_not_exist(dst, &oid)?;
            undo.push(self.put(cid, &oid, None)?);
            undo.push(self.put(dst, &oid, Some(object))?);
        }
        Ok(())
    }

    fn take_staged(
        &mut self,
        id: StageId,
        (from, len): (u64, u64),
        (offset, object_size): (u64, u64),
        undo: &mut Vec<Rollback>,
    ) -> Result<Vec<MemBlock>> {
        let stage = self.stages.get_mut(&id).ok_or(StoreError::NoSuchStage(id.0))?;
        check_staged_use(stage.len, from, len, offset, object_size)?;
        let mut blocks = Vec::new();
        for number in from / BLOCK..(from + len).div_ceil(BLOCK) {
            let block = stage.blocks.remove(&number).ok_or_else(|| block_not_available(number))?;
            undo.push(Rollback::Staged(id, number, block.clone()));
            blocks.push(block);
        }
        Ok(blocks)
    }
}

/// Returns as many of the first `items` as fit on a page, and whether more items follow.
fn page<T>(items: impl Iterator<Item = T>, limit: u64, bytes: impl Fn(&T) -> usize) -> Page<T> {
    let mut page = Vec::new();
    let mut total = 0;
    for item in items {
        if page.len() as u64 >= limit || (total > 0 && total + bytes(&item) > PAGE_BYTES) {
            return (page, true);
        }
        total += bytes(&item);
        page.push(item);
    }
    (page, false)
}

impl Submit for MemStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let mut state = self.lock();
        if let StoreRequest::StageRelease { stage } = request {
            state.stages.remove(&stage);
            return ready(Ok(StoreReply::Done));
        }
        if state.closed {
            return ready(Err(StoreError::Disconnected("the store was unmounted".into())));
        }
        ready(state.carry_out(request))
    }
}

impl State {
    fn carry_out(&mut self, request: StoreRequest) -> Result<StoreReply> {
        Ok(match request {
            StoreRequest::Stage { len } => self.stage(len)?.into(),
            StoreRequest::StageWrite { stage, offset, payload } => {
                self.stage_write(stage, offset, payload)?.into()
            }
            StoreRequest::StageRelease { stage } => {
                self.stages.remove(&stage);
                StoreReply::Done
            }
            StoreRequest::Transact { transaction, incarnation } => {
                check_incarnation(incarnation, 0)?;
                self.apply(&transaction)?.into()
            }
            StoreRequest::Read { cid, oid, offset, len, dest } => {
                self.object(&cid, &oid)?.read(offset, len, dest)?.into()
            }
            StoreRequest::Query { cid, query } => self.query(&cid, query)?.into(),
            StoreRequest::Collections => self.collections.keys().cloned().collect::<Vec<_>>().into(),
            StoreRequest::Space => self.space().into(),
            StoreRequest::Umount => {
                self.closed = true;
                StoreReply::Done
            }
        })
    }

    fn stage(&mut self, len: u64) -> Result<StageId> {
        if len == 0 {
            return Err(StoreError::InvalidArgument("a stage must have at least one byte".into()));
        }
        if len > CAPACITY {
            let target = uuid::Uuid::nil();
            return Err(StoreError::NoSpace { target, area: Area::Data, needed: len, free: CAPACITY });
        }
        self.last_stage += 1;
        let id = StageId(self.last_stage);
        self.stages.insert(id, MemStage { len, blocks: BTreeMap::new() });
        Ok(id)
    }

    fn stage_write(&mut self, id: StageId, offset: u64, payload: Payload) -> Result<()> {
        let stage = self.stages.get_mut(&id).ok_or(StoreError::NoSuchStage(id.0))?;
        check_stage_write(stage.len, offset, &payload)?;
        let (mut data, checksums) = payload.into_parts();
        for (number, crc) in (offset / BLOCK..).zip(checksums) {
            let piece = data.split_to(data.len().min(BLOCK_SIZE));
            stage.blocks.insert(number, MemBlock::padded(piece, crc));
        }
        Ok(())
    }

    fn query(&self, cid: &CollectionId, query: MetadataQuery) -> Result<QueryReply> {
        let object = match query.oid() {
            Some(oid) => self.object(cid, oid)?,
            None => &MemObject::default(),
        };
        Ok(match query {
            MetadataQuery::Stat { .. } => {
                let allocated = object.blocks.len() as u64 * BLOCK;
                QueryReply::Stat(Stat { size: object.size, allocated })
            }
            MetadataQuery::Xattr { name, .. } => {
                let missing = || StoreError::NoSuchXattr(format!("\"{}\"", name.escape_ascii()));
                QueryReply::Bytes(object.xattrs.get(&name).cloned().ok_or_else(missing)?)
            }
            MetadataQuery::Xattrs { .. } => QueryReply::Pairs(object.xattrs.clone().into_iter().collect()),
            MetadataQuery::OmapHeader { .. } => QueryReply::Bytes(object.header.clone()),
            MetadataQuery::OmapGet { mut keys, .. } => {
                keys.sort();
                keys.dedup();
                let entry = |key: Bytes| object.omap.get(&key).cloned().map(|value| (key, value));
                QueryReply::Pairs(keys.into_iter().filter_map(entry).collect())
            }
            MetadataQuery::OmapIterate { from, limit, .. } => {
                let entries = object.omap.range(from..).map(|(k, v)| (k.clone(), v.clone()));
                QueryReply::PairsPage(page(entries, limit, |(k, v)| k.len() + v.len()))
            }
            MetadataQuery::Extents { offset, len, .. } => QueryReply::Extents(object.extents(offset, len)),
            MetadataQuery::List { from, limit } => {
                let ids = self.collection(cid)?.keys();
                let ids = ids.filter(|oid| from.as_ref().is_none_or(|from| *oid >= from)).cloned();
                QueryReply::Objects(page(ids, limit, |oid| oid.as_bytes().len()))
            }
        })
    }

    fn space(&self) -> Space {
        let objects = self.collections.values().flat_map(BTreeMap::values);
        let used = objects.map(|o| o.blocks.len() as u64 * BLOCK).sum::<u64>();
        let staged = self.stages.values().map(|s| s.len.next_multiple_of(BLOCK)).sum::<u64>();
        let free = CAPACITY.saturating_sub(used + staged);
        Space {
            total: CAPACITY,
            free,
            staged,
            free_extents: 1,
            largest_free_extent: free,
            index_free: CAPACITY,
            index_total: CAPACITY,
            ..Space::default()
        }
    }
}
