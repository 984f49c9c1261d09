//! Fetches a write's data before the write takes its turn on the object.
//!
//! Large data is staged. The osd pulls it from the client in segments, reserves a staging buffer
//! before each pull, and passes each segment to the store when it arrives. Staged data begins at an
//! offset at which the store can stage data. It consists of whole blocks and perhaps a partial
//! block at its end, because the object may end there. The bytes before the staged data are kept in
//! memory instead. A copy of the final partial block is kept in memory, too. The change later
//! merges both with the object's blocks.

use std::rc::Rc;
use std::time::Duration;

use base::block::{BLOCK, Payload};
use base::pool::BufferPool;
use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt};
use messenger::Connection;
use store::{StageId, StoreCalls, Submit};
use wire::limits::{MAX_APPEND, MAX_OBJECT_SIZE};
use wire::{BulkDescriptor, BulkDirection, Data, Error, Mutate, Mutation, OpBytes};

use crate::backing::Backing;
use crate::fail::{Fail, StepResult};
use crate::pull_choice::PullWay;
use crate::times::Times;

/// The data of a change, in memory or staged in the store.
pub(crate) enum Gathered {
    None,
    /// Data in memory, cut into pieces according to the op's offset in the object. For an append,
    /// whose offset is not known yet, the pieces are cut as for offset 0.
    Memory(Payload),
    Staged(StagedPayload),
}

/// Data that is staged in the store and belongs to no object yet.
pub(crate) struct StagedPayload {
    /// Bytes before the first offset at which the store can stage data. They are not staged.
    pub(crate) head: Payload,
    /// The staged data, which follows `head`.
    pub(crate) stage: StageGuard,
    /// Number of staged bytes.
    pub(crate) len: u64,
    /// A copy of the bytes after the last block boundary. These bytes are also staged.
    pub(crate) tail: Bytes,
}

/// Guard for staged data. Dropping the guard frees those extents of the stage that no transaction
/// uses.
pub(crate) struct StageGuard {
    store: Rc<Backing>,
    pub(crate) id: StageId,
}

impl Drop for StageGuard {
    fn drop(&mut self) {
        self.store.stage_release(self.id);
    }
}

/// The op that uses the data of a request.
fn user(mutate: &Mutate) -> Option<&Mutation> {
    mutate.ops.iter().find(|op| matches!(op.source(), Some(OpBytes::Payload)))
}

/// Whether an op concerns the data of the object, and not only its metadata.
fn concerns_data(op: &Mutation) -> bool {
    !matches!(
        op,
        Mutation::Touch
            | Mutation::Create
            | Mutation::SetXattr(..)
            | Mutation::RemoveXattr(_)
            | Mutation::OmapSet(_)
            | Mutation::OmapRemove(_)
            | Mutation::OmapRemoveRange(..)
            | Mutation::OmapClear
    )
}

/// Length of the data that is pulled from the client and may be staged, in bytes. `None` if the
/// request has no such data, or cannot stage it. If several ops concern the data, the osd does not
/// choose to stage it, because ops cannot modify staged data.
pub(crate) fn stageable_bytes(mutate: &Mutate) -> Option<u64> {
    if mutate.ops.iter().filter(|op| concerns_data(op)).count() > 1 {
        return None;
    }
    match (&mutate.data, user(mutate)?) {
        (Data::Bulk(_), Mutation::Append(_)) | (Data::None | Data::Inline, _) => None,
        (Data::Bulk(from), _) => from.len(),
    }
}

/// Pulls the data of a request from its client.
pub(crate) struct Puller<'a> {
    pub(crate) connection: &'a dyn Connection,
    pub(crate) staging: &'a BufferPool,
    pub(crate) times: &'a Times,
    pub(crate) timeout: Duration,
    pub(crate) segments_in_flight: usize,
    /// Maximum length of a segment, in bytes.
    pub(crate) segment: usize,
    /// How data that fits into one buffer is pulled.
    pub(crate) way: PullWay,
}

impl Puller<'_> {
    /// Fetches a request's data into memory, or stages it in the object's store.
    pub(crate) async fn gather(
        &self,
        mutate: &Mutate,
        inline: Payload,
        store: &Rc<Backing>,
    ) -> StepResult<Gathered> {
        let Some(user) = user(mutate) else { return Ok(Gathered::None) };
        let offset = match user {
            Mutation::Write { offset, .. } => *offset,
            _ => 0,
        };
        match &mutate.data {
            Data::None => Ok(Gathered::None),
            Data::Inline => {
                check_place(offset, inline.block_offset(), inline.len() as u64)?;
                Ok(Gathered::Memory(inline))
            }
            Data::Bulk(from) => {
                let len = check_descriptor(from, offset)?;
                if matches!(user, Mutation::Append(_)) {
                    return self.pull_whole(from, len).await.map(Gathered::Memory);
                }
                if self.way == PullWay::Whole && len <= self.staging.largest() as u64 {
                    return self.pull(from, 0, len as usize, offset).await.map(Gathered::Memory);
                }
                self.stage(from, offset, len, store).await.map(Gathered::Staged)
            }
        }
    }

    /// Pulls the data of an append into memory. The data cannot be staged, because the offset of an
    /// append is known only during its turn.
    async fn pull_whole(&self, from: &BulkDescriptor, len: u64) -> StepResult<Payload> {
        let limit = MAX_APPEND.min(self.staging.largest() as u64);
        if len > limit {
            return Err(Error::TooLarge { what: "append".into(), size: len, limit }.into());
        }
        self.pull(from, 0, len as usize, 0).await
    }

    async fn stage(
        &self,
        from: &BulkDescriptor,
        offset: u64,
        len: u64,
        store: &Rc<Backing>,
    ) -> StepResult<StagedPayload> {
        let alignment = store.stage_alignment();
        let head_len = (alignment - offset % alignment).min(len) % alignment;
        let head = match head_len {
            0 => Payload::default(),
            some => self.pull_head(from, some as usize, offset).await?,
        };
        let staged_len = len - head_len;
        if staged_len == 0 {
            return Err(Error::BadRequest("the bulk data is too short to be staged".into()).into());
        }
        let stage = StageGuard { store: Rc::clone(store), id: store.stage(staged_len).await? };
        // A pipeline has at least two segments.
        let step = (self.segment as u64).min(staged_len.div_ceil(2));
        let step = (step - step % alignment).max(alignment);
        let mut tail = Bytes::new();
        let mut segments = FuturesUnordered::new();
        let mut at = 0;
        while at < staged_len || !segments.is_empty() {
            if at < staged_len && segments.len() < self.segments_in_flight.max(1) {
                let segment = step.min(staged_len - at);
                segments.push(self.stage_segment(from, head_len, at, segment as usize, &stage));
                at += segment;
                continue;
            }
            if let Some(done) = segments.next().await {
                let rest: Bytes = done?;
                if !rest.is_empty() {
                    tail = rest;
                }
            }
        }
        drop(segments);
        Ok(StagedPayload { head, stage, len: staged_len, tail })
    }

    /// Pulls the bytes before the staged range, and copies them out of the staging memory. A request
    /// that kept staging memory while it waits for more could wait forever, because all requests could
    /// do so.
    async fn pull_head(&self, from: &BulkDescriptor, len: usize, anchor: u64) -> StepResult<Payload> {
        let (data, checksums) = self.pull(from, 0, len, anchor).await?.into_parts();
        Payload::from_parts(anchor, Bytes::copy_from_slice(&data), checksums)
            .map_err(|e| Fail::Refused(Error::TransferFailed(e.to_string())))
    }

    /// Pulls bytes `at..at + len` of the staged range and stages them. Returns a copy of the bytes
    /// after the last whole block.
    async fn stage_segment(
        &self,
        from: &BulkDescriptor,
        head_len: u64,
        at: u64,
        len: usize,
        stage: &StageGuard,
    ) -> StepResult<Bytes> {
        let payload = self.pull(from, head_len + at, len, 0).await?;
        let tail = Bytes::copy_from_slice(&payload.data()[len - len % BLOCK as usize..]);
        stage.store.stage_write(stage.id, at, payload).await?;
        Ok(tail)
    }

    /// Pulls `len` bytes from offset `at` of the client's offer. `anchor` is the object offset of
    /// the first byte; only its value modulo the block size matters.
    async fn pull(&self, from: &BulkDescriptor, at: u64, len: usize, anchor: u64) -> StepResult<Payload> {
        let buf = self.staging.alloc(len).await?;
        let pulled = self.connection.bulk_read(from, at, buf, self.timeout).await?;
        self.times.pulled(len);
        Payload::from_parts(anchor, pulled.buf.freeze(), pulled.checksums)
            .map_err(|e| Fail::Refused(Error::TransferFailed(e.to_string())))
    }
}

fn check_descriptor(from: &BulkDescriptor, offset: u64) -> StepResult<u64> {
    let Some(len) = from.len() else {
        return Err(Error::OutOfRange {
            what: "bulk data".into(),
            detail: "its length does not fit into 64 bits".into(),
        }
        .into());
    };
    if from.direction != BulkDirection::Read || len == 0 {
        return Err(Error::BadRequest("the bulk descriptor does not offer data to be read".into()).into());
    }
    check_place(offset, u64::from(from.block_offset), len)?;
    Ok(len)
}

fn check_place(offset: u64, block_offset: u64, len: u64) -> StepResult<()> {
    if len > 0 && block_offset != offset % BLOCK {
        return Err(Error::BadRequest(format!(
            "the data begins at offset {block_offset} of a block, which does not match object offset {offset}"
        ))
        .into());
    }
    match offset.checked_add(len) {
        Some(end) if end <= MAX_OBJECT_SIZE => Ok(()),
        Some(end) => {
            Err(Error::TooLarge { what: "end of the write".into(), size: end, limit: MAX_OBJECT_SIZE }.into())
        }
        None => Err(Error::OutOfRange {
            what: "write".into(),
            detail: "its end does not fit into 64 bits".into(),
        }
        .into()),
    }
}
