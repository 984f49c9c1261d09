//! Reads ranges of objects.
//!
//! The first request determines whether the object is striped. If the object is not striped, this
//! request also reads as much data as all later concurrent requests together. Several concurrent
//! requests read the rest. Three readers share this [`Pipeline`] of requests: [`RangeReader`]
//! returns chunks as they arrive, [`read_into`] fills the caller's memory, and [`get_range`] fills
//! one buffer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::BoxFuture;
use bytes::{Bytes, BytesMut};
use futures::stream::{FuturesOrdered, StreamExt};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use wire::{Manifest, PartId};

use crate::engine::{ReadReply, ReadRequest, Sink, SinkMemory};
use crate::handle::ObjectHandle;
use crate::{Error, Result};

/// Maximum number of attempts of a read while the object keeps changing.
const TRIES: usize = 8;

/// Maximum number of bytes that the first request reads. If the object changes during this request,
/// the whole request is repeated.
const FIRST_MAX: u64 = 16 << 20;

/// Reads up to `len` bytes at `offset` into one buffer.
pub(crate) async fn get_range(object: &ObjectHandle, offset: u64, len: u64) -> Result<Bytes> {
    let mut tries = 1;
    loop {
        match get_once(object, offset, len).await {
            Err(e) if is_changed(&e) && tries < TRIES => tries += 1,
            outcome => return outcome,
        }
    }
}

async fn get_once(object: &ObjectHandle, offset: u64, len: u64) -> Result<Bytes> {
    let likely = len.min(object.requests.options().read_size) as usize;
    let first = Arc::new(PieceBuffer::empty(likely));
    let (mut pipeline, opened) = Pipeline::open(object, offset, len, Sink::Memory(first.clone())).await?;
    let begun = first.take(opened.first_len as usize);
    let rest = opened.len - opened.first_len;
    if rest == 0 {
        return Ok(begun);
    }
    let mut all = BytesMut::from(begun);
    all.reserve(rest as usize);
    // Each piece fills its own part of the buffer, after the bytes of the first request.
    let mut room = all.split_off(all.len());
    let mut filled = Vec::new();
    let mut sink_for = |_, len| {
        let behind = room.split_off(len as usize);
        let buffer = Arc::new(PieceBuffer::within(std::mem::replace(&mut room, behind)));
        filled.push((Arc::clone(&buffer), len as usize));
        Sink::Memory(buffer)
    };
    while pipeline.next(&mut sink_for).await?.is_some() {}
    for (buffer, len) in filled {
        all.unsplit(buffer.take_buffer(len));
    }
    Ok(all.freeze())
}

/// Reads up to `len` bytes at `offset` into memory of the caller. Returns the number of bytes of
/// the range that exist.
pub(crate) async fn read_into(
    object: &ObjectHandle,
    offset: u64,
    len: u64,
    memory: &Arc<dyn SinkMemory>,
) -> Result<u64> {
    let mut tries = 1;
    loop {
        match read_into_once(object, offset, len, memory).await {
            Err(e) if is_changed(&e) && tries < TRIES => tries += 1,
            outcome => return outcome,
        }
    }
}

async fn read_into_once(
    object: &ObjectHandle,
    offset: u64,
    len: u64,
    memory: &Arc<dyn SinkMemory>,
) -> Result<u64> {
    let first = Sink::Memory(Arc::clone(memory));
    let (mut pipeline, opened) = Pipeline::open(object, offset, len, first).await?;
    let mut sink_for = |at, _| Sink::Memory(Arc::new(Shifted { memory: Arc::clone(memory), at }));
    while pipeline.next(&mut sink_for).await?.is_some() {}
    Ok(opened.len)
}

/// Writes all data of an object to a writer; returns the object's size in bytes.
pub(crate) async fn get_to_writer(object: &ObjectHandle, mut writer: impl AsyncWrite + Unpin) -> Result<u64> {
    let mut reader = RangeReader::new(object.clone(), 0, u64::MAX);
    let mut written = 0;
    while let Some(chunk) = reader.next().await? {
        writer.write_all(&chunk).await?;
        written += chunk.len() as u64;
    }
    writer.flush().await?;
    Ok(written)
}

fn is_changed(e: &Error) -> bool {
    matches!(e, Error::Node(wire::Error::Changed { .. }))
}

/// Streams a range of an object in chunks of arbitrary sizes. Created by
/// [`Object::read_stream`](crate::Object::read_stream).
pub struct RangeReader {
    object: ObjectHandle,
    offset: u64,
    len: u64,
    /// `None` before the first request.
    pipeline: Option<Pipeline>,
    /// Chunks that have arrived but were not returned yet.
    ready: VecDeque<Bytes>,
}

impl std::fmt::Debug for RangeReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("RangeReader");
        shown.field("object", &self.object.name).field("offset", &self.offset).field("len", &self.len);
        shown.finish_non_exhaustive()
    }
}

impl RangeReader {
    pub(crate) fn new(object: ObjectHandle, offset: u64, len: u64) -> RangeReader {
        RangeReader { object, offset, len, pipeline: None, ready: VecDeque::new() }
    }

    /// Returns the next chunk, or `None` at the end of the range. This method is cancel safe.
    ///
    /// # Errors
    /// [`Changed`](wire::Error::Changed) if the object changed after the first chunks were
    /// returned. The returned chunks are then invalid.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        let mut tries = 1;
        while self.ready.is_empty() {
            let Some(pipeline) = &mut self.pipeline else {
                match Pipeline::open(&self.object, self.offset, self.len, Sink::Bytes).await {
                    Ok((pipeline, opened)) => {
                        self.ready.extend(opened.chunks);
                        self.pipeline = Some(pipeline);
                    }
                    Err(e) if is_changed(&e) && tries < TRIES => tries += 1,
                    Err(e) => return Err(e),
                }
                continue;
            };
            match pipeline.next(&mut |_, _| Sink::Bytes).await {
                Ok(Some(chunks)) => self.ready.extend(chunks),
                Ok(None) => return Ok(None),
                // The read can start again, because no data was returned yet. The first request to
                // a striped object returns no data.
                Err(e) if is_changed(&e) && !pipeline.has_given && tries < TRIES => {
                    tries += 1;
                    self.pipeline = None;
                }
                Err(e) => return Err(e),
            }
        }
        if let Some(pipeline) = &mut self.pipeline {
            pipeline.has_given = true;
        }
        Ok(self.ready.pop_front())
    }
}

/// The range that one request reads, in an object that is not striped or in one part.
struct Piece {
    part: Option<PartId>,
    if_version: Option<u64>,
    offset: u64,
    len: u64,
}

/// Iterator over the pieces of a range that were not requested yet. Pieces end at multiples of
/// `step` and at the ends of parts.
struct Pieces {
    /// Manifest of the object, if the object is striped.
    manifest: Option<Manifest>,
    if_version: Option<u64>,
    at: u64,
    end: u64,
    step: u64,
}

impl Iterator for Pieces {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let left = self.end.checked_sub(self.at).filter(|left| *left > 0)?;
        let part_size = self.manifest.map_or(u64::MAX, |manifest| manifest.part_size);
        let offset = self.at % part_size;
        let len = left.min(part_size - offset).min(self.step - offset % self.step);
        let part = self
            .manifest
            .map(|manifest| PartId { upload: manifest.upload, index: (self.at / part_size) as u32 });
        self.at += len;
        Some(Piece { part, if_version: self.if_version, offset, len })
    }
}

/// Result of the first request.
struct Opened {
    /// Length of the range, in bytes, cut at the object's end.
    len: u64,
    /// Number of bytes of the range that the first request read.
    first_len: u64,
    /// The bytes that the first request read, for [`Sink::Bytes`]; otherwise empty.
    chunks: Vec<Bytes>,
}

/// Reads the pieces of a range in order, with several requests in flight.
struct Pipeline {
    object: ObjectHandle,
    /// Version of the object at the first request.
    version: u64,
    is_striped: bool,
    /// Offset of the range in the object.
    offset: u64,
    pieces: Pieces,
    reads: FuturesOrdered<BoxFuture<'static, Result<Vec<Bytes>>>>,
    /// Whether the reader has returned data to its user.
    has_given: bool,
}

impl Pipeline {
    /// Sends the first request and waits for the answer.
    async fn open(object: &ObjectHandle, offset: u64, len: u64, sink: Sink) -> Result<(Pipeline, Opened)> {
        let options = object.requests.options();
        let step = options.read_size;
        let wanted = len.min(step.saturating_mul(options.reads_in_flight as u64)).min(FIRST_MAX);
        let piece = Piece { part: None, if_version: None, offset, len: wanted };
        let reply = read(object, &piece, sink).await?;
        let (version, manifest, size, first_len, chunks) = match reply {
            ReadReply::Data { version, object_size, len, chunks, .. } => {
                (version, None, object_size, len, chunks)
            }
            ReadReply::Striped { version, manifest } => (version, Some(manifest), manifest.size, 0, vec![]),
        };
        let range_len = offset.saturating_add(len).min(size).saturating_sub(offset);
        if manifest.is_none() && first_len != wanted.min(range_len) {
            let expected = wanted.min(range_len);
            let what =
                format!("{first_len} bytes arrived from an object of {size} bytes, expected {expected}");
            return Err(Error::Protocol(what));
        }
        let pieces = Pieces {
            manifest,
            // Parts never change, so the read of a part needs no condition.
            if_version: manifest.is_none().then_some(version),
            at: offset.saturating_add(first_len),
            end: offset.saturating_add(range_len),
            step,
        };
        let pipeline = Pipeline {
            object: object.clone(),
            version,
            is_striped: manifest.is_some(),
            offset,
            pieces,
            reads: FuturesOrdered::new(),
            has_given: false,
        };
        Ok((pipeline, Opened { len: range_len, first_len, chunks }))
    }

    /// Waits for the next piece, and requests later pieces. Returns the chunks of the piece, or
    /// `None` after the last piece. `sink_for` returns the destination of a piece, given the
    /// piece's offset in the range and its length in bytes. This method is cancel safe.
    async fn next(&mut self, sink_for: &mut impl FnMut(u64, u64) -> Sink) -> Result<Option<Vec<Bytes>>> {
        let in_flight = self.object.requests.options().reads_in_flight;
        while self.reads.len() < in_flight {
            let at = self.pieces.at - self.offset;
            let Some(piece) = self.pieces.next() else { break };
            let sink = sink_for(at, piece.len);
            let object = self.object.clone();
            self.reads.push_back(Box::pin(async move { read_whole(&object, &piece, sink).await }));
        }
        match self.reads.next().await.transpose() {
            Err(e) if self.is_striped && e.is_not_found() => {
                Err(part_missing(&self.object, self.version).await)
            }
            outcome => outcome,
        }
    }
}

/// Returns the error for a missing part of an object whose version was `version` at the first
/// request. Either the object was replaced, or it is damaged.
async fn part_missing(object: &ObjectHandle, version: u64) -> Error {
    match object.stat().await {
        Ok(stat) if stat.version == version => {
            wire::Error::Corrupt(format!("{} (a part is missing)", object.name)).into()
        }
        Ok(stat) => wire::Error::Changed { wanted: version, found: stat.version }.into(),
        Err(e) => e,
    }
}

/// Reads a piece, and fails unless the whole piece exists.
async fn read_whole(object: &ObjectHandle, piece: &Piece, sink: Sink) -> Result<Vec<Bytes>> {
    let version = match read(object, piece, sink).await? {
        ReadReply::Data { len, chunks, .. } if len == piece.len => return Ok(chunks),
        ReadReply::Data { version, .. } | ReadReply::Striped { version, .. } => version,
    };
    let error = match piece.part {
        Some(_) => wire::Error::Corrupt(format!("{} (a part is too short)", object.name)),
        None => wire::Error::Changed { wanted: piece.if_version.unwrap_or(0), found: version },
    };
    Err(error.into())
}

async fn read(object: &ObjectHandle, piece: &Piece, sink: Sink) -> Result<ReadReply> {
    let Piece { part, if_version, offset, len } = *piece;
    let name = object.name.clone();
    object.requests.read(ReadRequest { name, part, offset, len, if_version, sink, fallbacks: vec![] }).await
}

/// The part of the caller's memory that begins at byte `at`.
#[derive(Debug)]
struct Shifted {
    memory: Arc<dyn SinkMemory>,
    at: u64,
}

impl SinkMemory for Shifted {
    fn put(&self, offset: u64, data: Bytes) {
        self.memory.put(self.at + offset, data);
    }
}

/// A buffer that one piece fills. Data that arrives in a single chunk is kept without a copy,
/// unless the buffer already has capacity.
#[derive(Debug)]
struct PieceBuffer(Mutex<BufferContent>);

#[derive(Debug)]
struct BufferContent {
    /// The only chunk that has arrived. It begins at offset 0.
    single: Option<Bytes>,
    buffer: BytesMut,
    /// Number of bytes to reserve in `buffer` before the first copy.
    reserve: usize,
}

impl PieceBuffer {
    /// Creates an empty buffer. `reserve` is the likely length of the piece, in bytes.
    fn empty(reserve: usize) -> PieceBuffer {
        PieceBuffer(Mutex::new(BufferContent { single: None, buffer: BytesMut::new(), reserve }))
    }

    /// Creates a buffer over memory with capacity for the whole piece.
    fn within(buffer: BytesMut) -> PieceBuffer {
        PieceBuffer(Mutex::new(BufferContent { single: None, buffer, reserve: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, BufferContent> {
        // No code panics while it holds the lock and has written only a part of a chunk.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first `len` bytes. All of them must have arrived.
    fn take(&self, len: usize) -> Bytes {
        let mut filling = self.lock();
        if let Some(mut single) = filling.single.take() {
            single.truncate(len);
            return single;
        }
        let mut buffer = std::mem::take(&mut filling.buffer);
        buffer.truncate(len);
        if buffer.capacity() > 2 * len {
            // The piece was much shorter than expected. A copy frees the unused memory.
            return Bytes::copy_from_slice(&buffer);
        }
        buffer.freeze()
    }

    /// Returns the buffer itself, cut to its first `len` bytes.
    fn take_buffer(&self, len: usize) -> BytesMut {
        let mut buffer = std::mem::take(&mut self.lock().buffer);
        buffer.truncate(len);
        buffer
    }
}

impl SinkMemory for PieceBuffer {
    fn put(&self, offset: u64, data: Bytes) {
        let BufferContent { single, buffer, reserve } = &mut *self.lock();
        if buffer.capacity() == 0 {
            if offset == 0 {
                *single = Some(data);
                return;
            }
            buffer.reserve(*reserve);
            if let Some(first) = single.take() {
                buffer.extend_from_slice(&first);
            }
        }
        write_at(buffer, offset as usize, &data);
    }
}

/// Writes `data` at an offset. Fills a gap before the offset with zeros.
fn write_at(buffer: &mut BytesMut, offset: usize, data: &[u8]) {
    if buffer.len() < offset {
        buffer.resize(offset, 0);
    }
    let (over, beyond) = data.split_at(data.len().min(buffer.len() - offset));
    buffer[offset..offset + over.len()].copy_from_slice(over);
    buffer.extend_from_slice(beyond);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(manifest: Option<Manifest>, at: u64, end: u64, step: u64) -> Vec<(Option<u32>, u64, u64)> {
        let pieces = Pieces { manifest, if_version: None, at, end, step };
        pieces.map(|p| (p.part.map(|part| part.index), p.offset, p.len)).collect()
    }

    #[test]
    fn ranges_are_cut_into_pieces_at_steps_and_at_part_ends() {
        assert_eq!(pieces(None, 5, 25, 10), [(None, 5, 5), (None, 10, 10), (None, 20, 5)]);
        assert_eq!(pieces(None, 25, 5, 10), []);
        let upload = wire::UploadId { session: wire::SessionId(1), number: 1 };
        let manifest = Some(Manifest { upload, part_size: 8192, size: 20_000 });
        let expected = [(Some(0), 8000, 192), (Some(1), 0, 4096), (Some(1), 4096, 4096), (Some(2), 0, 616)];
        assert_eq!(pieces(manifest, 8000, 17_000, 4096), expected);
    }

    #[test]
    fn a_piece_buffer_accepts_chunks_in_any_order_and_returns_the_last_attempt() {
        let chunk = |at: usize| (at as u64, Bytes::from_static(b"0123456789").slice(at..(at + 3).min(10)));
        for order in [[0, 3, 6, 9], [9, 6, 3, 0], [3, 0, 9, 6]] {
            let room = BytesMut::with_capacity(10);
            for buffer in [PieceBuffer::empty(4), PieceBuffer::empty(100), PieceBuffer::within(room)] {
                // Data of an earlier attempt that was abandoned.
                buffer.put(0, Bytes::from_static(b"xxxxxxxxxxxxxxxx"));
                for at in order {
                    let (offset, data) = chunk(at);
                    buffer.put(offset, data);
                }
                assert_eq!(buffer.take(10), "0123456789");
            }
        }
    }

    #[test]
    fn a_single_chunk_is_not_copied() {
        let (buffer, chunk) = (PieceBuffer::empty(1 << 20), Bytes::from(vec![7; 100]));
        buffer.put(0, chunk.clone());
        assert_eq!(buffer.take(60).as_ptr(), chunk.as_ptr());
    }
}
