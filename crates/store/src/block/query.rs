//! Calls that only look.

use std::collections::BTreeMap;

use base::block::{self, BLOCK, BLOCK_SIZE, ZERO_BLOCK_CRC};
use base::mem::ArenaBuf;
use bytes::Bytes;

use super::core::{Core, Purpose};
use super::extent::Extent;
use super::io::{IoRequest, Segment, Whole};
use super::messages::Reply;
use super::records::{BlockRef, Onode, SHARD_BLOCKS, Shard, decode_oid, key};
use super::view::{Loaded, Need, Scanned};
use crate::{MAX_READ, ObjectId, Page, ReadData, Result, Stat, StoreError};

/// What a listing returns at most, in bytes.
const PAGE_BYTES: usize = 1 << 20;

/// A call on one collection that only looks.
#[derive(Debug)]
pub(crate) enum Query {
    Read { oid: ObjectId, offset: u64, len: u64, dest: Option<ArenaBuf>, reply: Reply<ReadData> },
    Stat(ObjectId, Reply<Stat>),
    GetXattr(ObjectId, Bytes, Reply<Bytes>),
    GetXattrs(ObjectId, Reply<Vec<(Bytes, Bytes)>>),
    OmapGetHeader(ObjectId, Reply<Bytes>),
    OmapGet(ObjectId, Vec<Bytes>, Reply<Vec<(Bytes, Bytes)>>),
    OmapIterate(ObjectId, Bytes, usize, Reply<Page<(Bytes, Bytes)>>),
    List(Option<ObjectId>, usize, Reply<Page<ObjectId>>),
}

impl Query {
    /// Answers with an error.
    pub(crate) fn fail(self, error: StoreError) {
        match self {
            Query::Read { reply, .. } => drop(reply.send(Err(error))),
            Query::Stat(_, reply) => drop(reply.send(Err(error))),
            Query::GetXattr(.., reply) | Query::OmapGetHeader(_, reply) => drop(reply.send(Err(error))),
            Query::GetXattrs(_, reply) | Query::OmapGet(.., reply) => drop(reply.send(Err(error))),
            Query::OmapIterate(.., reply) => drop(reply.send(Err(error))),
            Query::List(.., reply) => drop(reply.send(Err(error))),
        }
    }

    fn oid(&self) -> Option<&ObjectId> {
        match self {
            Query::Read { oid, .. } | Query::Stat(oid, _) | Query::GetXattr(oid, ..) => Some(oid),
            Query::GetXattrs(oid, _) | Query::OmapGetHeader(oid, _) | Query::OmapGet(oid, ..) => Some(oid),
            Query::OmapIterate(oid, ..) => Some(oid),
            Query::List(..) => None,
        }
    }
}

/// A read that waits for the drive.
#[derive(Debug)]
struct Read {
    reply: Reply<ReadData>,
    data: ReadData,
    /// Bytes to be returned.
    len: usize,
    wholes: Vec<Whole>,
    /// Where the data goes in the end, if the drive could not put it there.
    copy_to: Option<ArenaBuf>,
    left: usize,
    period: u64,
    failed: Option<StoreError>,
}

/// Reads and writes of blocks that are under way, and how they keep out of each other's way.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    reads: BTreeMap<u64, Read>,
    period: u64,
    periods: BTreeMap<u64, usize>,
    /// Blocks that are being written: first block to length and number of writes.
    writing: BTreeMap<u64, u64>,
    held_back: Vec<(Extent, IoRequest)>,
}

impl Reads {
    pub(crate) fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }

    /// Starts a new period; returns the last.
    pub(crate) fn next_period(&mut self) -> u64 {
        self.period += 1;
        self.period - 1
    }

    /// The period of the oldest read under way.
    pub(crate) fn oldest_period(&self) -> Option<u64> {
        self.periods.keys().next().copied()
    }

    pub(crate) fn write_started(&mut self, blocks: Extent) {
        self.writing.insert(blocks.start, blocks.len);
    }

    pub(crate) fn is_being_written(&self, blocks: Extent) -> bool {
        let before = self.writing.range(..blocks.end()).next_back();
        before.is_some_and(|(start, len)| start + len > blocks.start)
    }

    /// A write has completed: returns the reads that waited for it.
    pub(crate) fn write_completed(&mut self, blocks: Extent) -> Vec<IoRequest> {
        self.writing.remove(&blocks.start);
        let held = std::mem::take(&mut self.held_back);
        let (wait, go): (Vec<_>, Vec<_>) = held.into_iter().partition(|(e, _)| self.is_being_written(*e));
        self.held_back = wait;
        go.into_iter().map(|(_, request)| request).collect()
    }

    /// Keeps a read back while its blocks are being written.
    pub(crate) fn hold_back(&mut self, blocks: Extent, request: IoRequest) -> Option<IoRequest> {
        if self.is_being_written(blocks) {
            self.held_back.push((blocks, request));
            return None;
        }
        Some(request)
    }
}

/// Where a run of blocks of a read comes from.
enum Source {
    Hole,
    Memory(Bytes),
    Drive(u64),
}

impl Core {
    /// Carries out a query, or returns it with what must be loaded first.
    pub(crate) fn query(
        &mut self,
        collection: u64,
        query: Query,
        loaded: &Loaded,
    ) -> Option<(Query, Vec<Need>)> {
        let onode = match query.oid() {
            None => None,
            Some(oid) => match self.view.get(loaded, &key::onode(collection, oid.as_bytes())) {
                Err(need) => return Some((query, vec![need])),
                Ok(None) => {
                    let error = StoreError::NoSuchObject(oid.to_string());
                    query.fail(error);
                    return None;
                }
                Ok(Some(bytes)) => match Onode::decode(&bytes) {
                    Ok(onode) => Some(onode),
                    Err(error) => {
                        query.fail(error);
                        return None;
                    }
                },
            },
        };
        let onode = onode.unwrap_or_default();
        match query {
            Query::Read { oid, offset, len, dest, reply } => {
                self.read(&onode, oid, offset, len, dest, reply, loaded)
            }
            Query::Stat(_, reply) => {
                let _ = reply.send(Ok(Stat { size: onode.size, allocated: onode.blocks * BLOCK }));
                None
            }
            Query::GetXattr(_, name, reply) => {
                let missing = || StoreError::NoSuchXattr(format!("\"{}\"", name.escape_ascii()));
                let _ = reply.send(onode.xattrs.get(&name).cloned().ok_or_else(missing));
                None
            }
            Query::GetXattrs(_, reply) => {
                let _ = reply.send(Ok(onode.xattrs.into_iter().collect()));
                None
            }
            Query::OmapGetHeader(_, reply) => {
                let _ = reply.send(Ok(onode.omap_header));
                None
            }
            Query::OmapGet(oid, mut keys, reply) => {
                keys.sort_unstable();
                keys.dedup();
                match self.omap_get(&onode, &keys, loaded) {
                    Err(needs) => return Some((Query::OmapGet(oid, keys, reply), needs)),
                    Ok(found) => drop(reply.send(Ok(found))),
                }
                None
            }
            Query::OmapIterate(oid, from, limit, reply) => {
                if !onode.has_omap {
                    let _ = reply.send(Ok((Vec::new(), false)));
                    return None;
                }
                let (start, end) = (key::omap(onode.nid, &from), key::range(key::OMAP, onode.nid).1);
                match self.view.scan(None, loaded, &start, &end, limit, PAGE_BYTES) {
                    Err(need) => return Some((Query::OmapIterate(oid, from, limit, reply), vec![need])),
                    Ok((found, more)) => {
                        let found = found.into_iter().map(|(k, v)| (key::rest(&k), v)).collect();
                        let _ = reply.send(Ok((found, more)));
                    }
                }
                None
            }
            Query::List(from, limit, reply) => {
                let start = key::onode(collection, from.as_ref().map_or(&[], |o| &o.as_bytes()[..]));
                let end = key::range(key::ONODE, collection).1;
                match self.view.scan(None, loaded, &start, &end, limit, PAGE_BYTES) {
                    Err(need) => return Some((Query::List(from, limit, reply), vec![need])),
                    Ok(scanned) => drop(reply.send(list_page(scanned))),
                }
                None
            }
        }
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

    /// The map of blocks `first..end` of an object.
    fn map_of(
        &self,
        onode: &Onode,
        first: u64,
        end: u64,
        loaded: &Loaded,
    ) -> Result<Result<Vec<Option<BlockRef>>>, Vec<Need>> {
        let (mut map, mut needs) = (Vec::with_capacity((end - first) as usize), Vec::new());
        for number in first / SHARD_BLOCKS..=(end - 1) / SHARD_BLOCKS {
            let shard = match self.view.get(loaded, &key::shard(onode.nid, number)) {
                Err(need) => {
                    needs.push(need);
                    continue;
                }
                Ok(None) => Shard::default(),
                Ok(Some(bytes)) => match Shard::decode(&bytes, self.superblock.data_blocks()) {
                    Ok(shard) => shard,
                    Err(error) => return Ok(Err(error)),
                },
            };
            let start = number * SHARD_BLOCKS;
            map.extend(shard.places(first.max(start) - start, end.min(start + SHARD_BLOCKS) - start));
        }
        if needs.is_empty() { Ok(Ok(map)) } else { Err(needs) }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one call")]
    fn read(
        &mut self,
        onode: &Onode,
        oid: ObjectId,
        offset: u64,
        len: u64,
        dest: Option<ArenaBuf>,
        reply: Reply<ReadData>,
        loaded: &Loaded,
    ) -> Option<(Query, Vec<Need>)> {
        let data =
            ReadData { offset: block::align_down(offset), object_size: onode.size, ..ReadData::default() };
        if len == 0 || offset >= onode.size {
            let _ = reply.send(Ok(data));
            return None;
        }
        let end = offset.checked_add(len).and_then(block::align_up).unwrap_or(u64::MAX).min(onode.size);
        let bytes = end - data.offset;
        if bytes > MAX_READ {
            let what = "what one read returns".to_owned();
            let _ = reply.send(Err(StoreError::TooLarge { what, size: bytes, limit: MAX_READ }));
            return None;
        }
        let room = bytes.next_multiple_of(BLOCK) as usize;
        if let Some(have) = dest.as_ref().map(|d| d.len()).filter(|have| *have < room) {
            drop(dest);
            let what = format!("a destination of {have} bytes is too small for {room}");
            let _ = reply.send(Err(StoreError::InvalidArgument(what)));
            return None;
        }
        match self.map_of(onode, data.offset / BLOCK, end.div_ceil(BLOCK), loaded) {
            Err(needs) => return Some((Query::Read { oid, offset, len, dest, reply }, needs)),
            Ok(Err(error)) => drop(reply.send(Err(error))),
            Ok(Ok(map)) => self.start_read(data, &map, bytes as usize, dest, reply),
        }
        None
    }

    fn start_read(
        &mut self,
        mut data: ReadData,
        map: &[Option<BlockRef>],
        len: usize,
        dest: Option<ArenaBuf>,
        reply: Reply<ReadData>,
    ) {
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
        let id = self.next_id();
        let period = self.reads.period;
        *self.reads.periods.entry(period).or_default() += 1;
        let read = Read { reply, data, len, wholes: Vec::new(), copy_to, left: 1, period, failed: None };
        self.reads.reads.insert(id, read);
        let mut map = map;
        for buffer in buffers {
            let (part, rest) = map.split_at((buffer.len() / BLOCK_SIZE).min(map.len()));
            map = rest;
            self.fill_buffer(id, buffer, part);
        }
        self.read_done(id, Ok(()));
    }

    /// Has the blocks of `map` put into `buffer`.
    fn fill_buffer(&mut self, read: u64, buffer: ArenaBuf, map: &[Option<BlockRef>]) {
        let mut runs: Vec<(Source, usize)> = Vec::new();
        for block in map {
            let source = match block {
                None => Source::Hole,
                Some(b) => match self.commits.deferred(b.block) {
                    Some(content) => Source::Memory(content),
                    None => Source::Drive(b.block),
                },
            };
            match (runs.last_mut(), &source) {
                (Some((Source::Hole, len)), Source::Hole) => *len += 1,
                (Some((Source::Drive(start), len)), Source::Drive(b)) if *start + *len as u64 == *b => {
                    *len += 1
                }
                _ => runs.push((source, 1)),
            }
        }
        let lens: Vec<usize> = runs.iter().map(|(_, len)| len * BLOCK_SIZE).collect();
        let (whole, segments) = Whole::split(buffer, &lens);
        if let Some(state) = self.reads.reads.get_mut(&read) {
            state.wholes.push(whole);
        }
        for ((source, len), mut segment) in runs.into_iter().zip(segments) {
            match source {
                Source::Hole => segment.fill(0),
                Source::Memory(content) => segment.copy_from_slice(&content),
                Source::Drive(start) => self.read_run(read, Extent { start, len: len as u64 }, segment),
            }
        }
    }

    fn read_run(&mut self, read: u64, blocks: Extent, segment: Segment) {
        if let Some(state) = self.reads.reads.get_mut(&read) {
            state.left += 1;
        }
        let id = self.next_id();
        self.io.insert(id, Purpose::Read { read });
        self.submit_read(id, blocks, segment);
    }

    /// One part of a read is there.
    pub(crate) fn read_done(&mut self, id: u64, result: std::io::Result<()>) {
        let Some(read) = self.reads.reads.get_mut(&id) else { return };
        read.left -= 1;
        if let Err(e) = result {
            read.failed = Some(StoreError::Io(format!("read: {e}")));
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

impl Read {
    fn finish(self) {
        let Read { reply, mut data, len, wholes, copy_to, failed, .. } = self;
        if let Some(error) = failed {
            return drop(reply.send(Err(error)));
        }
        let mut left = len;
        for whole in wholes {
            let Some(mut buffer) = whole.into_buffer() else {
                return drop(reply.send(Err(StoreError::Io("a read buffer is still in use".into()))));
            };
            buffer.truncate(left);
            left -= buffer.len();
            data.data.push(buffer.freeze());
        }
        if let Some(mut dest) = copy_to {
            let mut at = 0;
            for part in data.data.drain(..) {
                dest[at..at + part.len()].copy_from_slice(&part);
                at += part.len();
            }
            dest.truncate(at);
            data.data.push(dest.freeze());
        }
        let _ = reply.send(Ok(data));
    }
}

fn list_page((found, more): Scanned) -> Result<Page<ObjectId>> {
    Ok((found.iter().map(|(k, _)| decode_oid(k)).collect::<Result<_>>()?, more))
}
