//! Requests to the drive: reads, and writes from memory that is suitable for direct I/O.

use base::block::{BLOCK, BLOCK_SIZE};
use base::mem::{Arena, ArenaBuf};
use base::pool::BufferPool;
use bytes::Bytes;

use super::core::Core;
use super::extent::Extent;
use super::io::{IoOp, IoRequest, Segment};
use super::requests::Purpose;

/// Maximum number of bytes in one write request.
pub(super) const MAX_WRITE: usize = 4 << 20;
/// Maximum number of writes that share one request. A write has at most two pieces.
const MAX_SHARING: usize = 128;

impl Core {
    /// Submits writes of the data of applied transactions. Adjacent blocks share a request.
    pub(crate) fn write_data(&mut self) {
        let mut writes = self.commits.take_writes();
        if writes.is_empty() {
            return;
        }
        writes.sort_by_key(|w| w.0);
        let mut run: Option<(Extent, Vec<Bytes>, usize)> = None;
        let mut runs = Vec::new();
        for (start, data) in writes {
            for (blocks, pieces) in self.pieces(start, &data) {
                match &mut run {
                    Some((all, list, sharing))
                        if all.end() == blocks.start
                            && (all.len + blocks.len) * BLOCK <= MAX_WRITE as u64
                            && *sharing < MAX_SHARING =>
                    {
                        all.len += blocks.len;
                        list.extend(pieces);
                        *sharing += 1;
                    }
                    _ => runs.extend(run.replace((blocks, pieces, 1))),
                }
            }
        }
        runs.extend(run);
        let group = self.commits.next_group();
        for (blocks, pieces, _) in runs {
            self.commits.add_io(group);
            self.submit_write(blocks, pieces, Purpose::Data { blocks, group });
        }
    }

    /// Splits data for consecutive blocks into requests. Copies data whose memory is not suitable
    /// for direct I/O. The division into requests does not depend on the data's address.
    pub(crate) fn pieces(&mut self, start: u64, data: &Bytes) -> Vec<(Extent, Vec<Bytes>)> {
        let aligned = data.as_ptr().align_offset(BLOCK_SIZE) == 0;
        let mut requests = Vec::with_capacity(1);
        let mut at = start;
        for from in (0..data.len()).step_by(MAX_WRITE) {
            let end = data.len().min(from + MAX_WRITE);
            let split = if aligned { end - (end - from) % BLOCK_SIZE } else { from };
            let mut pieces = Vec::with_capacity(1);
            if from < split {
                pieces.push(data.slice(from..split));
            }
            if split < end {
                pieces.push(self.bounce(&data[split..end]));
            }
            let len = (end - from).div_ceil(BLOCK_SIZE) as u64;
            requests.push((Extent { start: at, len }, pieces));
            at += len;
        }
        requests
    }

    /// Copies data to aligned memory and pads it with zeros to whole blocks.
    pub(crate) fn bounce(&self, data: &[u8]) -> Bytes {
        let mut buffer = self.buffer(data.len().next_multiple_of(BLOCK_SIZE));
        buffer[..data.len()].copy_from_slice(data);
        buffer[data.len()..].fill(0);
        buffer.freeze()
    }

    /// Returns `len` bytes of aligned memory from the pool. Allocates new memory if the pool is
    /// exhausted.
    ///
    /// # Panics
    /// If the system cannot allocate memory.
    pub(crate) fn buffer(&self, len: usize) -> ArenaBuf {
        if let Ok(Some(buffer)) = self.pool.try_alloc(len) {
            return buffer;
        }
        let size = len.next_power_of_two().max(BLOCK_SIZE);
        let arena = Arena::anonymous(size).expect("memory for a buffer");
        let pool = BufferPool::new(arena, 0, size);
        pool.try_alloc(len).ok().flatten().expect("a fresh pool has its one buffer")
    }

    /// Submits a write. Returns the id of the request.
    pub(crate) fn submit_write(&mut self, blocks: Extent, pieces: Vec<Bytes>, purpose: Purpose) -> u64 {
        let id = self.requests.add(purpose);
        self.reads.write_started(blocks);
        let offset = self.data_offset(blocks.start);
        self.output.io.push(IoRequest { id, offset, op: IoOp::Write(pieces) });
        id
    }

    pub(crate) fn submit_read(&mut self, id: u64, blocks: Extent, segment: Segment) {
        // Submit the data of applied transactions first, so that the read waits for writes of the
        // same blocks.
        self.write_data();
        let request = IoRequest { id, offset: self.data_offset(blocks.start), op: IoOp::Read(segment) };
        if let Some(request) = self.reads.hold_back(blocks, request) {
            self.output.io.push(request);
        }
    }
}
