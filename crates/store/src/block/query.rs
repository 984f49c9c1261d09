//! Execution of reads and queries, which change nothing.

use base::block::{self, BLOCK, BLOCK_SIZE, ZERO_BLOCK_CRC};
use base::mem::ArenaBuf;
use bytes::Bytes;

use super::core::Core;
use super::extent::Extent;
use super::io::{Segment, SplitBuffer};
use super::leaf::{BlockRef, LEAF_BLOCKS, PackedLeaf};
use super::messages::{ReplySender, send};
use super::need::Need;
use super::reads::{Look, PendingRead, ReadRange};
use super::records::{Onode, corrupt, decode_oid, key};
use super::requests::Purpose;
use super::view::{Loaded, Scanned};
use crate::{
    ExtentsPage, MAX_READ, MAX_STORED_OBJECT, MetadataQuery, ObjectExtents, ObjectId, Page, QueryReply,
    ReadData, Result, Stat, StoreError,
};

/// Maximum size of a page of a listing, in bytes.
const PAGE_BYTES: usize = 1 << 20;
/// Length of the part of an object that one leaf covers, in bytes.
const LEAF_BYTES: u64 = LEAF_BLOCKS * BLOCK;

/// Reason why a read or query cannot be executed now.
enum QueryStop {
    /// These entries of the index must be loaded first.
    Needs(Vec<Need>),
    /// The read or query fails with this error.
    Failed(StoreError),
}

impl From<Need> for QueryStop {
    fn from(need: Need) -> QueryStop {
        QueryStop::Needs(vec![need])
    }
}

impl From<StoreError> for QueryStop {
    fn from(error: StoreError) -> QueryStop {
        QueryStop::Failed(error)
    }
}

/// The blocks that a read returns.
struct BlockPlan {
    data: ReadData,
    map: Vec<Option<BlockRef>>,
    /// Number of bytes to return.
    len: usize,
}

/// Source of a run of blocks that a read returns.
enum BlockSource {
    Hole,
    Memory(Bytes),
    Drive(u64),
}

impl Core {
    /// Executes a read or query. If data must be loaded first, returns the read or query, its reply
    /// sender, and a description of the data to load.
    pub(crate) fn look(
        &mut self,
        collection: u64,
        look: Look,
        reply: ReplySender,
        loaded: &Loaded,
    ) -> Option<(Look, ReplySender, Vec<Need>)> {
        let found = match &look {
            Look::Query(query) => self.query(collection, query, loaded),
            Look::Read(range) => match self.plan_read(collection, range, loaded) {
                Ok(plan) => {
                    let Look::Read(ReadRange { dest, .. }) = look else { return None };
                    self.start_read(plan, dest, reply);
                    return None;
                }
                Err(missing) => Err(missing),
            },
        };
        match found {
            Ok(found) => send(reply, Ok(found)),
            Err(QueryStop::Failed(error)) => {
                // Release the destination before the caller learns of the failure.
                drop(look);
                drop(reply.send(Err(error)));
            }
            Err(QueryStop::Needs(needs)) => return Some((look, reply, needs)),
        }
        None
    }

    fn onode(&self, collection: u64, oid: &ObjectId, loaded: &Loaded) -> Result<Onode, QueryStop> {
        match self.view.get(loaded, &key::onode(collection, oid.as_bytes()))? {
            Some(bytes) => Ok(Onode::decode(&bytes)?),
            None => Err(StoreError::NoSuchObject(oid.to_string()).into()),
        }
    }

    fn query(
        &self,
        collection: u64,
        query: &MetadataQuery,
        loaded: &Loaded,
    ) -> Result<QueryReply, QueryStop> {
        let onode = match query.oid() {
            Some(oid) => self.onode(collection, oid, loaded)?,
            None => Onode::default(),
        };
        Ok(match query {
            MetadataQuery::Stat { .. } => {
                QueryReply::Stat(Stat { size: onode.size, allocated: onode.blocks * BLOCK })
            }
            MetadataQuery::Xattr { name, .. } => {
                let missing = || StoreError::NoSuchXattr(format!("\"{}\"", name.escape_ascii()));
                QueryReply::Bytes(onode.xattrs.get(name).cloned().ok_or_else(missing)?)
            }
            MetadataQuery::Xattrs { .. } => QueryReply::Pairs(onode.xattrs.into_iter().collect()),
            MetadataQuery::OmapHeader { .. } => QueryReply::Bytes(onode.omap_header),
            MetadataQuery::OmapGet { keys, .. } => {
                let mut keys = keys.clone();
                keys.sort_unstable();
                keys.dedup();
                QueryReply::Pairs(self.omap_get(&onode, &keys, loaded).map_err(QueryStop::Needs)?)
            }
            MetadataQuery::OmapIterate { .. } if !onode.has_omap => {
                QueryReply::PairsPage((Vec::new(), false))
            }
            MetadataQuery::OmapIterate { from, limit, .. } => {
                let (start, end) = (key::omap(onode.nid, from), key::range(key::OMAP, onode.nid).1);
                let limit = usize::try_from(*limit).unwrap_or(usize::MAX);
                let (found, more) = self.view.scan(None, loaded, &start, &end, limit, PAGE_BYTES)?;
                let found = found.into_iter().map(|(k, v)| (key::rest(&k), v)).collect();
                QueryReply::PairsPage((found, more))
            }
            MetadataQuery::List { from, limit } => {
                let start = key::onode(collection, from.as_ref().map_or(&[], |o| &o.as_bytes()[..]));
                let end = key::range(key::ONODE, collection).1;
                let limit = usize::try_from(*limit).unwrap_or(usize::MAX);
                let scanned = self.view.scan(None, loaded, &start, &end, limit, PAGE_BYTES)?;
                QueryReply::Objects(list_page(scanned)?)
            }
            MetadataQuery::Extents { offset, len, .. } => {
                QueryReply::Extents(self.extents(&onode, *offset, *len, loaded)?)
            }
        })
    }

    /// Returns the extents of an object in a range. One answer examines leaves of about
    /// [`PAGE_BYTES`].
    fn extents(
        &self,
        onode: &Onode,
        offset: u64,
        len: u64,
        loaded: &Loaded,
    ) -> Result<ObjectExtents, QueryStop> {
        let mut page = ExtentsPage::new(offset, len, onode.size);
        let wanted = page.wanted();
        if wanted.is_empty() || onode.blocks == 0 {
            return Ok(page.finish());
        }
        let (mut first, end) =
            (wanted.start / LEAF_BYTES, wanted.end.min(MAX_STORED_OBJECT).div_ceil(LEAF_BYTES));
        if first == 0 && !onode.leaf.is_empty() {
            self.add_leaf(&mut page, 0, onode.leaf.clone())?;
            first = 1;
        }
        let (from, to) = (key::leaf(onode.nid, first), key::leaf(onode.nid, end));
        let (leaves, more) = self.view.scan(None, loaded, &from, &to, usize::MAX, PAGE_BYTES)?;
        let mut next = first;
        for (key, leaf) in leaves {
            let number = <[u8; 8]>::try_from(&key::rest(&key)[..])
                .map_err(|_| corrupt("key of a leaf", "its length is wrong"))?;
            let number = u64::from_be_bytes(number);
            if !self.add_leaf(&mut page, number, leaf)? {
                return Ok(page.finish());
            }
            next = number + 1;
        }
        if more {
            page.end_at(next * LEAF_BYTES);
        }
        Ok(page.finish())
    }

    /// Adds the blocks of a leaf to an answer. Returns `false` if the answer is full.
    fn add_leaf(&self, page: &mut ExtentsPage, number: u64, leaf: Bytes) -> Result<bool> {
        for run in PackedLeaf::from(leaf).mapped(self.superblock.data_blocks()) {
            let run = run?;
            let start = number * LEAF_BYTES;
            if !page.add(start + run.start * BLOCK..start + run.end * BLOCK) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn omap_get(
        &self,
        onode: &Onode,
        keys: &[Bytes],
        loaded: &Loaded,
    ) -> Result<Vec<(Bytes, Bytes)>, Vec<Need>> {
        let (mut found, mut needs) = (Vec::new(), Vec::new());
        for name in keys.iter().filter(|_| onode.has_omap) {
            match self.view.get(loaded, &key::omap(onode.nid, name)) {
                Ok(Some(value)) => found.push((name.clone(), value)),
                Ok(None) => {}
                Err(need) => needs.push(need),
            }
        }
        if needs.is_empty() { Ok(found) } else { Err(needs) }
    }

    /// Returns the locations of blocks `first..end` of an object; `Err` if leaves must be loaded
    /// first.
    fn map_of(
        &self,
        onode: &Onode,
        first: u64,
        end: u64,
        loaded: &Loaded,
    ) -> Result<Result<Vec<Option<BlockRef>>>, Vec<Need>> {
        let (mut map, mut needs) = (Vec::with_capacity((end - first) as usize), Vec::new());
        for number in first / LEAF_BLOCKS..=(end - 1) / LEAF_BLOCKS {
            let stored = match number {
                0 if !onode.leaf.is_empty() => Ok(Some(onode.leaf.clone())),
                _ => self.view.get(loaded, &key::leaf(onode.nid, number)),
            };
            let start = number * LEAF_BLOCKS;
            let (from, to) = (first.max(start) - start, end.min(start + LEAF_BLOCKS) - start);
            let limit = self.superblock.data_blocks();
            let places = match stored {
                Err(need) => {
                    needs.push(need);
                    continue;
                }
                Ok(bytes) => PackedLeaf::from(bytes.unwrap_or_default()).part(limit, from, to),
            };
            match places {
                Ok(places) => map.extend(places),
                Err(error) => return Ok(Err(error)),
            }
        }
        if needs.is_empty() { Ok(Ok(map)) } else { Err(needs) }
    }

    /// Finds the blocks that a read returns.
    fn plan_read(&self, collection: u64, range: &ReadRange, loaded: &Loaded) -> Result<BlockPlan, QueryStop> {
        let ReadRange { oid, offset, len, dest } = range;
        let onode = self.onode(collection, oid, loaded)?;
        let data =
            ReadData { offset: block::align_down(*offset), object_size: onode.size, ..ReadData::default() };
        if *len == 0 || *offset >= onode.size {
            return Ok(BlockPlan { data, map: Vec::new(), len: 0 });
        }
        let end = offset.checked_add(*len).and_then(block::align_up).unwrap_or(u64::MAX).min(onode.size);
        let bytes = end - data.offset;
        if bytes > MAX_READ {
            let what = "size in bytes of the result of one read".to_owned();
            return Err(StoreError::TooLarge { what, size: bytes, limit: MAX_READ }.into());
        }
        let room = bytes.next_multiple_of(BLOCK) as usize;
        if let Some(have) = dest.as_ref().map(|d| d.len()).filter(|have| *have < room) {
            let what = format!("the destination has {have} bytes, but the read needs {room}");
            return Err(StoreError::InvalidArgument(what).into());
        }
        let map = self.map_of(&onode, data.offset / BLOCK, end.div_ceil(BLOCK), loaded);
        Ok(BlockPlan { data, map: map.map_err(QueryStop::Needs)??, len: bytes as usize })
    }

    fn start_read(&mut self, plan: BlockPlan, dest: Option<ArenaBuf>, reply: ReplySender) {
        let BlockPlan { mut data, map, len } = plan;
        if map.is_empty() {
            return send(reply, Ok(data));
        }
        data.checksums = map.iter().map(|b| b.map_or(ZERO_BLOCK_CRC, |b| b.crc)).collect();
        let room = map.len() * BLOCK_SIZE;
        let aligned = |d: &ArenaBuf| d.as_ptr().align_offset(BLOCK_SIZE) == 0;
        let (direct, copy_to) = match dest {
            Some(dest) if aligned(&dest) => (Some(dest), None),
            other => (None, other),
        };
        let mut buffers: Vec<ArenaBuf> = direct.into_iter().collect();
        let mut reserved = if buffers.is_empty() { 0 } else { room };
        while reserved < room {
            let part = (room - reserved).min(self.pool.largest());
            buffers.push(self.buffer(part));
            reserved += part;
        }
        let id = self.requests.next_id();
        let period = self.reads.period;
        *self.reads.periods.entry(period).or_default() += 1;
        let read =
            PendingRead { reply, data, len, wholes: Vec::new(), copy_to, left: 1, period, failed: None };
        self.reads.reads.insert(id, read);
        let mut map = &map[..];
        for buffer in buffers {
            let (part, rest) = map.split_at((buffer.len() / BLOCK_SIZE).min(map.len()));
            map = rest;
            self.fill_buffer(id, buffer, part);
        }
        self.read_done(id, Ok(()));
    }

    /// Fills `buffer` with the blocks in `map`. Copies blocks that are in memory, and starts reads
    /// of the other blocks.
    fn fill_buffer(&mut self, read: u64, buffer: ArenaBuf, map: &[Option<BlockRef>]) {
        let mut runs: Vec<(BlockSource, usize)> = Vec::new();
        for block in map {
            let source = match block {
                None => BlockSource::Hole,
                Some(b) => match self.commits.deferred(b.block) {
                    Some(content) => BlockSource::Memory(content),
                    None => BlockSource::Drive(b.block),
                },
            };
            match (runs.last_mut(), &source) {
                (Some((BlockSource::Hole, len)), BlockSource::Hole) => *len += 1,
                (Some((BlockSource::Drive(start), len)), BlockSource::Drive(b))
                    if *start + *len as u64 == *b =>
                {
                    *len += 1
                }
                _ => runs.push((source, 1)),
            }
        }
        let lens: Vec<usize> = runs.iter().map(|(_, len)| len * BLOCK_SIZE).collect();
        let (whole, segments) = SplitBuffer::split(buffer, &lens);
        if let Some(state) = self.reads.reads.get_mut(&read) {
            state.wholes.push(whole);
        }
        for ((source, len), mut segment) in runs.into_iter().zip(segments) {
            match source {
                BlockSource::Hole => segment.fill(0),
                BlockSource::Memory(content) => segment.copy_from_slice(&content),
                BlockSource::Drive(start) => self.read_run(read, Extent { start, len: len as u64 }, segment),
            }
        }
    }

    fn read_run(&mut self, read: u64, blocks: Extent, segment: Segment) {
        if let Some(state) = self.reads.reads.get_mut(&read) {
            state.left += 1;
        }
        let id = self.requests.add(Purpose::Read { read });
        self.submit_read(id, blocks, segment);
    }

    /// Records that one part of a read has completed. Replies to the read after its last part.
    pub(crate) fn read_done(&mut self, id: u64, result: std::io::Result<()>) {
        let Some(read) = self.reads.reads.get_mut(&id) else { return };
        read.left -= 1;
        if let Err(e) = result {
            read.failed = Some(StoreError::Io(format!("the read failed: {e}")));
        }
        if read.left > 0 {
            return;
        }
        let Some(read) = self.reads.reads.remove(&id) else { return };
        if let Some(count) = self.reads.periods.get_mut(&read.period) {
            *count -= 1;
            if *count == 0 {
                self.reads.periods.remove(&read.period);
            }
        }
        read.finish();
    }
}

fn list_page((found, more): Scanned) -> Result<Page<ObjectId>> {
    Ok((found.iter().map(|(k, _)| decode_oid(k)).collect::<Result<_>>()?, more))
}
