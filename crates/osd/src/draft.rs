//! Computes the store transaction of a change.
//!
//! The store receives whole blocks with their checksums. Only the last block of an object may be
//! shorter. If a change covers part of a block, the draft reads and verifies the block, merges the
//! new data, and writes the whole block. The host therefore need not merge data or compute
//! checksums.
//!
//! The old content of a block comes from an earlier op of the same change, from a hole, or from the
//! store. The draft pads this content with zeros up to the object's end, so that each written block
//! has the length that the object's size requires. The stored size and the recorded size must agree
//! after every change. [`Draft::apply`] refuses a change whose ops would make them differ.

use base::block::{self, BLOCK, BLOCK_SIZE, Payload};
use bytes::{Bytes, BytesMut};
use store::{ObjectId, Op, ReadData, StoreCalls, WriteSource};
use wire::limits::MAX_OBJECT_SIZE;
use wire::{Error, Manifest, Mutation, OpBytes};

use crate::fail::{Fail, StepResult};
use crate::gather::{Gathered, StagedPayload};
use crate::object::{COMMITTED_XATTR, INFO_XATTR, ObjectInfo, user_xattr};
use crate::pg::Pg;
use crate::written::Written;

/// A change whose transaction is being computed.
pub(crate) struct Draft<'a> {
    pg: &'a Pg,
    oid: &'a ObjectId,
    /// The object that has the data before the change: the object itself, or the one that it copies.
    data: &'a ObjectId,
    name: &'a str,
    exists: bool,
    manifest: Option<Manifest>,
    /// Size of the object before the change, in bytes.
    before: u64,
    /// Size of the object after the ops drafted so far, in bytes.
    size: u64,
    ops: Vec<Op>,
    /// Blocks that earlier ops of this change have written. Later ops merge their data with these
    /// blocks.
    written: Written,
    /// Whether the draft records blocks in `written`. Only a change with more than one op on data
    /// needs this record.
    keeps_written: bool,
    /// Number of the first block that has no data in the store, because the object ended before
    /// this block or the change has truncated the object.
    void_from: u64,
    /// Numbers of the blocks whose new data is staged in the store, so that this process does not
    /// have their bytes.
    staged: std::ops::Range<u64>,
    /// Manifest that the change replaces or removes. After the change, no head object refers to the
    /// parts of this manifest.
    dropped: Option<Manifest>,
    appended_at: u64,
}

/// Result of a draft.
pub(crate) struct Drafted {
    pub(crate) ops: Vec<Op>,
    /// Size and manifest of the object after the change; `None` if the change removes the object.
    pub(crate) object: Option<(u64, Option<Manifest>)>,
    pub(crate) dropped: Option<Manifest>,
    pub(crate) appended_at: u64,
    /// Whether at most one op of the change modifies data.
    in_one_piece: bool,
}

impl Drafted {
    /// Makes the transaction fail if the object exists. Used for a change of an object that is
    /// assumed to be new.
    pub(crate) fn make_exclusive(&mut self, oid: &ObjectId) {
        if !matches!(self.ops.first(), Some(Op::CreateExclusive { .. })) {
            self.ops.insert(0, Op::CreateExclusive { oid: oid.clone() });
        }
    }

    /// Makes the transaction remove all old data if the object exists. Used for a change that
    /// begins by writing the object in full.
    pub(crate) fn make_replacing(&mut self, oid: &ObjectId) {
        let oid = oid.clone();
        match self.object {
            // The change writes whole blocks, which replace the old blocks. The truncation removes
            // any old data after these blocks.
            Some((size, _)) if self.in_one_piece && size > 0 && size.is_multiple_of(BLOCK) => {
                self.ops.push(Op::Truncate { oid, size });
            }
            _ => self.ops.insert(0, Op::Truncate { oid, size: 0 }),
        }
    }
}

/// Returns the size of an object's data in the store after `ops`, in bytes. `before` is the size
/// before `ops`.
fn size_after(before: u64, ops: &[Op]) -> u64 {
    ops.iter().fold(before, |size, op| match op {
        Op::Write { offset, source, .. } if !source.is_empty() => size.max(offset + source.len()),
        Op::Zero { offset, len, .. } if *len > 0 => size.max(offset + len),
        Op::Truncate { size, .. } => *size,
        Op::Remove { .. } => 0,
        _ => size,
    })
}

/// Returns the length of an op's data, in bytes.
fn length(source: &OpBytes, data: &Gathered) -> u64 {
    match (source, data) {
        (OpBytes::Embedded(bytes), _) => bytes.len() as u64,
        (OpBytes::Payload, Gathered::Memory(payload)) => payload.len() as u64,
        (OpBytes::Payload, Gathered::Staged(staged)) => staged.head.len() as u64 + staged.len,
        (OpBytes::Payload, Gathered::None) => 0,
    }
}

impl<'a> Draft<'a> {
    pub(crate) fn new(pg: &'a Pg, oid: &'a ObjectId, name: &'a str, info: Option<&ObjectInfo>) -> Draft<'a> {
        let before = info.map_or(0, |i| i.size);
        Draft {
            pg,
            oid,
            data: oid,
            name,
            exists: info.is_some(),
            manifest: info.and_then(|i| i.manifest),
            before,
            size: before,
            ops: Vec::with_capacity(4),
            written: Written::default(),
            keeps_written: false,
            void_from: before.div_ceil(BLOCK),
            staged: 0..0,
            dropped: None,
            appended_at: 0,
        }
    }

    /// Creates a draft for an object that does not exist and begins as a copy of another object.
    ///
    /// # Errors
    /// [`Error::Striped`] if the other object is striped.
    pub(crate) fn of_copy(
        pg: &'a Pg,
        oid: &'a ObjectId,
        name: &'a str,
        (source, info): (&'a ObjectId, &ObjectInfo),
    ) -> StepResult<Draft<'a>> {
        let mut draft = Draft { data: source, ..Draft::new(pg, oid, name, Some(info)) };
        draft.refuse_striped("copying")?;
        draft.ops.push(Op::Clone { src: source.clone(), dst: oid.clone() });
        Ok(draft)
    }

    /// Applies the ops in order.
    pub(crate) async fn apply(mut self, ops: &[Mutation], data: &Gathered) -> StepResult<Drafted> {
        let on_data = |op: &&Mutation| {
            op.source().is_some() || matches!(op, Mutation::Zero { .. } | Mutation::Truncate(_))
        };
        self.keeps_written = ops.iter().filter(on_data).count() > 1;
        for op in ops {
            self.step(op, data).await?;
        }
        let made = size_after(self.before, &self.ops);
        if made != self.size {
            let detail = format!(
                "{}: the change would record a size of {} bytes but store {made} bytes, which is a \
                 bug in the node; nothing was changed; split the change into several requests",
                self.name, self.size
            );
            return Err(Error::BadRequest(detail).into());
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

    async fn step(&mut self, op: &Mutation, data: &Gathered) -> StepResult<()> {
        let oid = self.oid.clone();
        match op {
            // The draft was created with the copy.
            Mutation::Inherit(_) => return Ok(()),
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
                self.touch()?;
                self.clear(0);
                self.manifest = Some(*manifest);
            }
            other => return Err(Error::BadRequest(format!("{other:?} is not supported")).into()),
        }
        self.exists = true;
        Ok(())
    }

    fn refuse_striped(&self, what: &str) -> StepResult<()> {
        match self.manifest {
            Some(_) => Err(Error::Striped { name: self.name.into(), what: what.into() }.into()),
            None => Ok(()),
        }
    }

    /// Removes all data of the object. The caller then writes the first `covered` bytes, so an
    /// object that is not longer needs no truncation.
    fn clear(&mut self, covered: u64) {
        self.dropped = self.manifest.take().or(self.dropped);
        if self.size > covered {
            self.ops.push(Op::Truncate { oid: self.oid.clone(), size: 0 });
        }
        self.forget_data();
    }

    /// Records that the object has no data any more.
    fn forget_data(&mut self) {
        self.size = 0;
        self.void_from = 0;
        self.staged = 0..0;
        self.written.clear();
    }

    fn remove(&mut self) -> StepResult<()> {
        if !self.exists {
            return Err(Error::NoSuchObject(self.name.into()).into());
        }
        self.dropped = self.manifest.take().or(self.dropped);
        self.ops.push(Op::Remove { oid: self.oid.clone() });
        self.exists = false;
        self.forget_data();
        Ok(())
    }

    async fn write(&mut self, offset: u64, source: &OpBytes, data: &Gathered) -> StepResult<()> {
        match (source, data) {
            (OpBytes::Embedded(bytes), _) => {
                self.write_bytes(offset, Payload::compute(offset, bytes.clone())).await
            }
            (OpBytes::Payload, Gathered::Memory(payload)) if payload.block_offset() == offset % BLOCK => {
                self.write_bytes(offset, payload.clone()).await
            }
            (OpBytes::Payload, Gathered::Memory(payload)) => {
                // The payload of an append was cut into pieces before its offset was known. The
                // pieces do not match the object's blocks, so the checksums are computed again. The
                // data was verified on arrival, but may have been damaged in memory since then.
                payload.verify().map_err(|e| Error::TransferFailed(e.to_string()))?;
                self.write_bytes(offset, Payload::compute(offset, payload.data().clone())).await
            }
            (OpBytes::Payload, Gathered::Staged(staged)) => self.write_staged(offset, staged).await,
            (OpBytes::Payload, Gathered::None) => {
                Err(Error::BadRequest("an op refers to data that the request does not contain".into()).into())
            }
        }
    }

    async fn write_bytes(&mut self, offset: u64, payload: Payload) -> StepResult<()> {
        let len = payload.len() as u64;
        let end = self.end(offset, len)?;
        if len == 0 {
            return self.touch();
        }
        let (data, crcs) = payload.into_parts();
        let first = if offset.is_multiple_of(BLOCK) { offset } else { block::align_down(offset) + BLOCK };
        // Blocks that end at or before this offset are written whole, without a merge with old
        // data.
        let whole_end = if end >= self.size { end } else { block::align_down(end) };
        if whole_end > first {
            let skip = (first - offset) as usize;
            let pieces = data.slice(skip..(whole_end - offset) as usize);
            let start = usize::from(first > offset);
            let count = block::piece_count(first, pieces.len() as u64) as usize;
            let whole = crcs[start..start + count].to_vec();
            let middle =
                Payload::from_parts(first, pieces, whole).map_err(|e| Error::BadRequest(e.to_string()))?;
            self.put(first, middle);
        }
        if first > offset {
            let part = data.slice(..(first.min(end) - offset) as usize);
            verify_piece(&part, crcs.first())?;
            self.merge(offset, part).await?;
        }
        if end > whole_end.max(first) {
            let from = whole_end.max(first);
            let part = data.slice((from - offset) as usize..);
            verify_piece(&part, crcs.last())?;
            self.merge(from, part).await?;
        }
        self.size = self.size.max(end);
        Ok(())
    }

    async fn write_staged(&mut self, offset: u64, staged: &StagedPayload) -> StepResult<()> {
        let head_len = staged.head.len() as u64;
        let start = offset + head_len;
        let end = self.end(start, staged.len)?;
        let tail_len = staged.tail.len() as u64;
        let named = if end >= self.size { staged.len } else { staged.len - tail_len };
        if named > 0 {
            let source = WriteSource::Staged { stage: staged.stage.id, offset: 0, len: named };
            self.ops.push(Op::Write { oid: self.oid.clone(), offset: start, source });
            self.staged = start / BLOCK..(start + named).div_ceil(BLOCK);
            self.written.remove(self.staged.clone());
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

    async fn truncate(&mut self, size: u64) -> StepResult<()> {
        let cut = size % BLOCK;
        if size < self.size && cut != 0 {
            // The osd itself shortens the last block, and computes the new checksum of this block.
            let kept = self.block(size / BLOCK).await?.slice(..cut as usize);
            let start = block::align_down(size);
            self.shorten(start);
            self.put(start, Payload::compute(start, kept));
            self.size = size;
        } else if size < self.size {
            self.shorten(size);
        }
        if size > self.size || !self.exists {
            self.ops.push(Op::Truncate { oid: self.oid.clone(), size });
        }
        self.size = size;
        Ok(())
    }

    /// Truncates the object at `size`, which must be a block boundary.
    fn shorten(&mut self, size: u64) {
        self.ops.push(Op::Truncate { oid: self.oid.clone(), size });
        let end = size / BLOCK;
        self.void_from = self.void_from.min(end);
        self.staged = self.staged.start.min(end)..self.staged.end.min(end);
        self.written.remove(end..u64::MAX);
        self.size = size;
    }

    async fn zero(&mut self, offset: u64, len: u64) -> StepResult<()> {
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
                    // Zeroing the whole last block made the object longer; truncate the object to
                    // its old size.
                    self.ops.push(Op::Truncate { oid: self.oid.clone(), size });
                }
                if self.keeps_written {
                    self.written.zero(at / BLOCK..(at + zeroed) / BLOCK);
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

    fn touch(&mut self) -> StepResult<()> {
        if !self.exists {
            self.ops.push(Op::Touch { oid: self.oid.clone() });
        }
        Ok(())
    }

    fn end(&self, offset: u64, len: u64) -> StepResult<u64> {
        match offset.checked_add(len) {
            Some(end) if end <= MAX_OBJECT_SIZE => Ok(end),
            end => {
                let size = end.unwrap_or(u64::MAX);
                Err(Error::TooLarge { what: "the object".into(), size, limit: MAX_OBJECT_SIZE }.into())
            }
        }
    }

    /// Merges `data`, which lies within one block, into the current content of that block.
    async fn merge(&mut self, offset: u64, data: Bytes) -> StepResult<()> {
        let number = offset / BLOCK;
        let start = number * BLOCK;
        let at = (offset - start) as usize;
        let old = self.block(number).await?;
        // The merged block ends at the later of the object's end and the end of the new data. It is
        // therefore a whole block or the object's last block.
        let size = self.size.max(offset + data.len() as u64);
        let mut merged = BytesMut::zeroed((size - start).min(BLOCK) as usize);
        merged[..old.len()].copy_from_slice(&old);
        merged[at..at + data.len()].copy_from_slice(&data);
        self.put(start, Payload::compute(start, merged.freeze()));
        Ok(())
    }

    /// Returns the content of a block after the ops drafted so far: a whole block, or less at the
    /// object's end. Holes read as zeros.
    async fn block(&self, number: u64) -> StepResult<Bytes> {
        let len = self.size.saturating_sub(number * BLOCK).min(BLOCK) as usize;
        let found = if len == 0 {
            Bytes::new()
        } else if let Some(bytes) = self.written.get(number) {
            bytes
        } else if self.staged.contains(&number) {
            let what =
                "an op modifies bulk data that the same change writes; send the op in a separate change";
            return Err(Error::BadRequest(what.into()).into());
        } else if number >= self.void_from {
            Bytes::new()
        } else {
            self.stored_block(number).await?
        };
        if found.len() >= len {
            return Ok(found.slice(..len));
        }
        let mut filled = BytesMut::zeroed(len);
        filled[..found.len()].copy_from_slice(&found);
        Ok(filled.freeze())
    }

    /// Returns a block as it was before the change.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the block does not match its checksum. [`Error::WrongSize`] if the
    /// store has fewer bytes of the block than the object's record says.
    async fn stored_block(&self, number: u64) -> StepResult<Bytes> {
        let start = number * BLOCK;
        let store = &self.pg.backing;
        let read = store.read(&self.pg.cid, self.data, start, BLOCK, None).await?;
        read.verify().map_err(|e| Error::Corrupt(format!("{} ({e})", self.name)))?;
        // The change computes a new checksum, so a verified block is verified again.
        let read = ReadData { verified: false, ..read };
        read.verify().map_err(|e| Fail::Lost(format!("a block was damaged in memory: {e}")))?;
        if read.len() < (self.before - start).min(BLOCK) {
            let (stored, recorded) = (read.object_size, self.before);
            return Err(Error::WrongSize { name: self.name.into(), stored, recorded }.into());
        }
        Ok(read.contiguous())
    }

    /// Writes whole blocks. The last block may be shorter if the object ends there.
    fn put(&mut self, offset: u64, payload: Payload) {
        if self.keeps_written {
            self.written.put(offset / BLOCK, payload.data().clone());
        }
        let source = WriteSource::Inline(payload);
        self.ops.push(Op::Write { oid: self.oid.clone(), offset, source });
    }
}

/// Compares a piece of a request's data with its checksum, before the piece becomes part of a block
/// with a new checksum.
///
/// # Errors
/// [`Error::TransferFailed`] if the piece was damaged in memory after its arrival.
fn verify_piece(piece: &[u8], crc: Option<&u32>) -> StepResult<()> {
    if crc == Some(&block::crc32c(piece)) {
        return Ok(());
    }
    Err(Error::TransferFailed("the data of the request was damaged in memory".into()).into())
}

/// Returns the op that stores an object's record in its xattrs.
pub(crate) fn set_info(oid: &ObjectId, info: &ObjectInfo) -> Op {
    let mut xattrs = vec![(INFO_XATTR, info.encode())];
    if let Some(manifest) = info.manifest {
        xattrs.push((COMMITTED_XATTR, Bytes::copy_from_slice(&manifest.upload.to_bytes())));
    }
    Op::SetXattrs { oid: oid.clone(), xattrs }
}

/// Returns the op that refuses a transaction unless the object has this record; `None` if the
/// object must not exist.
pub(crate) fn guard_info(oid: &ObjectId, info: Option<&ObjectInfo>) -> Op {
    Op::GuardXattr { oid: oid.clone(), name: INFO_XATTR, value: info.map(ObjectInfo::encode) }
}
