//! Turning a change into a store transaction.
//!
//! The store is only given whole blocks with their checksums (and a last piece at the object's end, which needs no
//! more): where a change covers part of a block, the block is read and verified here, merged, and written whole. So the
//! host behind the store computes nothing.

use std::collections::BTreeMap;

use base::block::{self, BLOCK, BLOCK_SIZE, Payload};
use bytes::{Bytes, BytesMut};
use proto::limits::MAX_OBJECT_SIZE;
use proto::{Error, Manifest, Mutation, Source};
use store::{ObjectId, Op, WriteSource};

use crate::fail::Step;
use crate::gather::{Gathered, Staged};
use crate::object::{COMMITTED_XATTR, INFO_XATTR, ObjectInfo, user_xattr};
use crate::pg::Pg;

/// A change being worked out.
pub(crate) struct Draft<'a> {
    pg: &'a Pg,
    oid: &'a ObjectId,
    name: &'a str,
    exists: bool,
    manifest: Option<Manifest>,
    size: u64,
    ops: Vec<Op>,
    /// Blocks written by this change that later ops of it may have to merge with, if there are such.
    written: BTreeMap<u64, Bytes>,
    keeps_written: bool,
    /// The block from which on the store's data no longer counts.
    void_from: u64,
    /// Blocks that this change stages, whose bytes are not here.
    staged: std::ops::Range<u64>,
    /// Parts that no head will name any more.
    dropped: Option<Manifest>,
    appended_at: u64,
}

/// What came out.
pub(crate) struct Drafted {
    pub(crate) ops: Vec<Op>,
    /// What the object will be, without version and time; `None`: it will not be.
    pub(crate) object: Option<(u64, Option<Manifest>)>,
    pub(crate) dropped: Option<Manifest>,
    pub(crate) appended_at: u64,
    /// Only one op changes data.
    in_one_piece: bool,
}

impl Drafted {
    /// Makes a change of an object that is taken for new fail if there is one.
    pub(crate) fn make_exclusive(&mut self, oid: &ObjectId) {
        if !matches!(self.ops.first(), Some(Op::CreateExclusive { .. })) {
            self.ops.insert(0, Op::CreateExclusive { oid: oid.clone() });
        }
    }

    /// Makes a change of a new object, which begins by writing it in full, one that takes the data of an old one away,
    /// should there be one.
    pub(crate) fn make_replacing(&mut self, oid: &ObjectId) {
        let oid = oid.clone();
        match self.object {
            // Whole blocks replace blocks; what is beyond them goes. From an object of the same size that is nothing.
            Some((size, _)) if self.in_one_piece && size > 0 && size.is_multiple_of(BLOCK) => {
                self.ops.push(Op::Truncate { oid, size });
            }
            _ => self.ops.insert(0, Op::Truncate { oid, size: 0 }),
        }
    }
}

/// Whether ops leave alone everything that others can depend on: they overwrite whole blocks inside the object.
pub(crate) fn is_blind(ops: &[Mutation], data: &Gathered, info: &ObjectInfo) -> bool {
    let [Mutation::Write { offset, source }] = ops else { return false };
    let len = length(source, data);
    let aligned = offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK);
    aligned && info.manifest.is_none() && offset.checked_add(len).is_some_and(|end| end <= info.size)
}

/// Length of an op's data, in bytes.
fn length(source: &Source, data: &Gathered) -> u64 {
    match (source, data) {
        (Source::Embedded(bytes), _) => bytes.len() as u64,
        (Source::Payload, Gathered::Memory(payload)) => payload.len() as u64,
        (Source::Payload, Gathered::Staged(staged)) => staged.head.len() as u64 + staged.len,
        (Source::Payload, Gathered::None) => 0,
    }
}

impl<'a> Draft<'a> {
    pub(crate) fn new(pg: &'a Pg, oid: &'a ObjectId, name: &'a str, info: Option<&ObjectInfo>) -> Draft<'a> {
        Draft {
            pg,
            oid,
            name,
            exists: info.is_some(),
            manifest: info.and_then(|i| i.manifest),
            size: info.map_or(0, |i| i.size),
            ops: Vec::with_capacity(4),
            written: BTreeMap::new(),
            keeps_written: false,
            void_from: u64::MAX,
            staged: 0..0,
            dropped: None,
            appended_at: 0,
        }
    }

    /// Applies the ops one after the other.
    pub(crate) async fn apply(mut self, ops: &[Mutation], data: &Gathered) -> Step<Drafted> {
        let on_data = |op: &&Mutation| {
            op.source().is_some() || matches!(op, Mutation::Zero { .. } | Mutation::Truncate(_))
        };
        self.keeps_written = ops.iter().filter(on_data).count() > 1;
        for op in ops {
            self.step(op, data).await?;
        }
        let object = self.exists.then_some((self.size, self.manifest));
        Ok(Drafted {
            ops: self.ops,
            object,
            dropped: self.dropped,
            appended_at: self.appended_at,
            in_one_piece: !self.keeps_written,
        })
    }

    async fn step(&mut self, op: &Mutation, data: &Gathered) -> Step<()> {
        let oid = self.oid.clone();
        match op {
            Mutation::Touch => self.ops.push(Op::Touch { oid }),
            Mutation::Create if self.exists => return Err(Error::Exists(self.name.into()).into()),
            Mutation::Create => self.ops.push(Op::CreateExclusive { oid }),
            Mutation::Write { offset, source } => {
                self.refuse_striped("writing at an offset")?;
                self.write(*offset, source, data).await?;
            }
            Mutation::WriteFull(source) => {
                self.clear(length(source, data));
                self.write(0, source, data).await?;
            }
            Mutation::Append(source) => {
                self.refuse_striped("appending")?;
                self.appended_at = self.size;
                self.write(self.size, source, data).await?;
            }
            Mutation::Truncate(size) => {
                self.refuse_striped("truncating")?;
                self.truncate(*size).await?;
            }
            Mutation::Zero { offset, len } => {
                self.refuse_striped("zeroing")?;
                self.zero(*offset, *len).await?;
            }
            Mutation::Remove => return self.remove(),
            Mutation::SetXattr(name, value) => {
                let xattrs = vec![(user_xattr(name), value.clone())];
                self.ops.push(Op::SetXattrs { oid, xattrs });
            }
            Mutation::RemoveXattr(name) => self.ops.push(Op::RemoveXattr { oid, name: user_xattr(name) }),
            Mutation::OmapSet(entries) => self.ops.push(Op::OmapSet { oid, entries: entries.clone() }),
            Mutation::OmapRemove(keys) => self.ops.push(Op::OmapRemove { oid, keys: keys.clone() }),
            Mutation::OmapRemoveRange(from, to) => {
                self.ops.push(Op::OmapRemoveRange { oid, from: from.clone(), to: to.clone() });
            }
            Mutation::OmapClear => self.ops.push(Op::OmapClear { oid }),
            Mutation::SetManifest(manifest) => {
                self.clear(0);
                self.manifest = Some(*manifest);
            }
            other => return Err(Error::BadRequest(format!("{other:?} is not known here")).into()),
        }
        self.exists = true;
        Ok(())
    }

    fn refuse_striped(&self, what: &str) -> Step<()> {
        match self.manifest {
            Some(_) => Err(Error::Striped { name: self.name.into(), what: what.into() }.into()),
            None => Ok(()),
        }
    }

    /// Takes all data away; the first `covered` bytes are about to be written.
    fn clear(&mut self, covered: u64) {
        self.dropped = self.manifest.take().or(self.dropped);
        if self.size > covered {
            self.ops.push(Op::Truncate { oid: self.oid.clone(), size: 0 });
        }
        self.size = 0;
        self.void_from = 0;
        self.written.clear();
    }

    fn remove(&mut self) -> Step<()> {
        if !self.exists {
            return Err(Error::NoSuchObject(self.name.into()).into());
        }
        self.dropped = self.manifest.take().or(self.dropped);
        self.ops.push(Op::Remove { oid: self.oid.clone() });
        self.exists = false;
        self.size = 0;
        self.void_from = 0;
        self.written.clear();
        Ok(())
    }

    async fn write(&mut self, offset: u64, source: &Source, data: &Gathered) -> Step<()> {
        match (source, data) {
            (Source::Embedded(bytes), _) => {
                self.write_bytes(offset, Payload::compute(offset, bytes.clone())).await
            }
            (Source::Payload, Gathered::Memory(payload)) if payload.phase() == offset % BLOCK => {
                self.write_bytes(offset, payload.clone()).await
            }
            (Source::Payload, Gathered::Memory(payload)) => {
                // An append whose pieces turn out to lie elsewhere; the data itself was verified on arrival.
                self.write_bytes(offset, Payload::compute(offset, payload.data().clone())).await
            }
            (Source::Payload, Gathered::Staged(staged)) => self.write_staged(offset, staged).await,
            (Source::Payload, Gathered::None) => {
                Err(Error::BadRequest("an op without its data".into()).into())
            }
        }
    }

    async fn write_bytes(&mut self, offset: u64, payload: Payload) -> Step<()> {
        let len = payload.len() as u64;
        let end = self.end(offset, len)?;
        if len == 0 {
            return self.touch();
        }
        let (data, crcs) = payload.into_parts();
        let first = if offset.is_multiple_of(BLOCK) { offset } else { block::align_down(offset) + BLOCK };
        // Up to there blocks need no merging with what follows.
        let whole_end = if end >= self.size { end } else { block::align_down(end) };
        if whole_end > first {
            let skip = (first - offset) as usize;
            let pieces = data.slice(skip..(whole_end - offset) as usize);
            let start = usize::from(first > offset);
            let count = block::piece_count(first, pieces.len() as u64) as usize;
            let crcs = crcs[start..start + count].to_vec();
            let middle =
                Payload::from_parts(first, pieces, crcs).map_err(|e| Error::BadRequest(e.to_string()))?;
            self.put(first, middle);
        }
        if first > offset {
            let part = data.slice(..(first.min(end) - offset) as usize);
            self.merge(offset, part).await?;
        }
        if end > whole_end.max(first) {
            let from = whole_end.max(first);
            self.merge(from, data.slice((from - offset) as usize..)).await?;
        }
        self.size = self.size.max(end);
        Ok(())
    }

    async fn write_staged(&mut self, offset: u64, staged: &Staged) -> Step<()> {
        let head_len = staged.head.len() as u64;
        let start = offset + head_len;
        let end = self.end(start, staged.len)?;
        let tail_len = staged.tail.len() as u64;
        let named = if end >= self.size { staged.len } else { staged.len - tail_len };
        if named > 0 {
            let source = WriteSource::Staged { stage: staged.stage.id, offset: 0, len: named };
            self.ops.push(Op::Write { oid: self.oid.clone(), offset: start, source });
            self.staged = start / BLOCK..(start + named).div_ceil(BLOCK);
            self.written.retain(|n, _| !(start / BLOCK..(start + named).div_ceil(BLOCK)).contains(n));
        }
        if head_len > 0 {
            self.write_bytes(offset, staged.head.clone()).await?;
        }
        if named < staged.len {
            self.merge(start + named, staged.tail.clone()).await?;
        }
        self.size = self.size.max(end);
        Ok(())
    }

    async fn truncate(&mut self, size: u64) -> Step<()> {
        let cut = size % BLOCK;
        if size < self.size && cut != 0 {
            // The last block's end is cut off here, so that its checksum is computed here.
            let kept = self.block(size / BLOCK).await?;
            let start = block::align_down(size);
            self.shorten(start);
            let kept = kept.slice(..kept.len().min(cut as usize));
            self.put(start, Payload::compute(start, kept));
            self.size = start + cut;
        } else if size < self.size {
            self.shorten(size);
        }
        if size > self.size || !self.exists {
            self.ops.push(Op::Truncate { oid: self.oid.clone(), size });
        }
        self.size = size;
        Ok(())
    }

    fn shorten(&mut self, size: u64) {
        self.ops.push(Op::Truncate { oid: self.oid.clone(), size });
        self.void_from = self.void_from.min(size / BLOCK);
        self.written.split_off(&(size / BLOCK));
    }

    async fn zero(&mut self, offset: u64, len: u64) -> Step<()> {
        let end = self.end(offset, len)?;
        if len == 0 {
            return self.touch();
        }
        let stop = end.min(self.size);
        let mut at = offset;
        while at < stop {
            let next = (block::align_down(at) + BLOCK).min(stop);
            if at.is_multiple_of(BLOCK) && (next.is_multiple_of(BLOCK) || next == self.size) {
                let whole = if stop == self.size { stop } else { block::align_down(stop) };
                let zeroed = block::align_up(whole).unwrap_or(whole) - at;
                let size = self.size;
                self.ops.push(Op::Zero { oid: self.oid.clone(), offset: at, len: zeroed });
                if at + zeroed > size {
                    // Zeroing the last block whole made the object longer.
                    self.ops.push(Op::Truncate { oid: self.oid.clone(), size });
                }
                if self.keeps_written {
                    let zeros = Bytes::from_static(&[0; BLOCK_SIZE]);
                    self.written.extend((at / BLOCK..(at + zeroed) / BLOCK).map(|n| (n, zeros.clone())));
                }
                at = whole;
            } else {
                self.merge(at, Bytes::from_static(&[0; BLOCK_SIZE]).slice(..(next - at) as usize)).await?;
                at = next;
            }
        }
        if end > self.size {
            self.ops.push(Op::Truncate { oid: self.oid.clone(), size: end });
            self.size = end;
        }
        Ok(())
    }

    fn touch(&mut self) -> Step<()> {
        if !self.exists {
            self.ops.push(Op::Touch { oid: self.oid.clone() });
        }
        Ok(())
    }

    fn end(&self, offset: u64, len: u64) -> Step<u64> {
        match offset.checked_add(len) {
            Some(end) if end <= MAX_OBJECT_SIZE => Ok(end),
            end => {
                let size = end.unwrap_or(u64::MAX);
                Err(Error::TooLarge { what: "the object".into(), size, limit: MAX_OBJECT_SIZE }.into())
            }
        }
    }

    /// Writes `data`, which lies within one block, into that block as it is now.
    async fn merge(&mut self, offset: u64, data: Bytes) -> Step<()> {
        let number = offset / BLOCK;
        let start = number * BLOCK;
        let at = (offset - start) as usize;
        let old = self.block(number).await?;
        // Up to the object's end or that of the new data, whichever is later; so the block is whole or the last one.
        let size = self.size.max(offset + data.len() as u64);
        let mut merged = BytesMut::zeroed((size - start).min(BLOCK) as usize);
        let kept = old.len().min(merged.len());
        merged[..kept].copy_from_slice(&old[..kept]);
        merged[at..at + data.len()].copy_from_slice(&data);
        self.put(start, Payload::compute(start, merged.freeze()));
        Ok(())
    }

    /// The content of a block as it is now, perhaps shorter than a block at the object's end.
    async fn block(&self, number: u64) -> Step<Bytes> {
        if let Some(bytes) = self.written.get(&number) {
            return Ok(bytes.clone());
        }
        if self.staged.contains(&number) {
            return Err(Error::BadRequest("pieces of one change share a block with bulk data".into()).into());
        }
        if number >= self.void_from || number * BLOCK >= self.size {
            return Ok(Bytes::new());
        }
        let store = &self.pg.target.store;
        let read = store.read(&self.pg.cid, self.oid, number * BLOCK, BLOCK, None).await?;
        read.verify().map_err(|e| Error::Corrupt(format!("{}: {e}", self.name)))?;
        Ok(read.contiguous())
    }

    /// Writes whole blocks, or a last one that ends the object.
    fn put(&mut self, offset: u64, payload: Payload) {
        if self.keeps_written {
            let mut rest = payload.data().clone();
            let lengths = block::piece_lengths(offset, rest.len() as u64);
            self.written.extend((offset / BLOCK..).zip(lengths.map(|len| rest.split_to(len))));
        }
        let source = WriteSource::Inline(payload);
        self.ops.push(Op::Write { oid: self.oid.clone(), offset, source });
    }
}

/// The op that gives an object its information.
pub(crate) fn set_info(oid: &ObjectId, info: &ObjectInfo) -> Op {
    let mut xattrs = vec![(INFO_XATTR, info.encode())];
    if let Some(manifest) = info.manifest {
        xattrs.push((COMMITTED_XATTR, Bytes::copy_from_slice(&manifest.upload.to_bytes())));
    }
    Op::SetXattrs { oid: oid.clone(), xattrs }
}
