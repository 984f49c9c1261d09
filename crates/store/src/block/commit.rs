//! Group commit: from applied transactions to acknowledgements.
//!
//! Applied transactions gather while a group is being written. A group's data and its log sectors are written at the
//! same time; when both are there, one flush makes the group durable, and then its transactions are answered. Groups
//! become durable in order. Freed blocks are used again only when a group that *says* that the freeing one was flushed
//! is durable itself: until then recovery may still compare those blocks with the checksums of what they held.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use base::block::{BLOCK, BLOCK_SIZE};
use base::mem::{Arena, ArenaBuf};
use base::pool::BufferPool;
use bytes::Bytes;

use super::apply::Outcome;
use super::checkpoint::Checkpoint;
use super::core::{Core, Purpose};
use super::extent::{Extent, total};
use super::io::{IoOp, IoRequest};
use super::log::{GROUP_SECTORS, encode_group, group_sectors, record_bytes};
use super::messages::{Reply, Work, send};
use super::superblock::SECTOR;
use crate::{Result, StoreError};

/// Most bytes that one write request carries.
const MAX_WRITE: usize = 4 << 20;
/// Data that waits for its group, so that the drive gets neighbours in one request; more goes at once, in bytes.
const GATHERED: usize = 256 << 10;
/// Most pieces that one write request carries.
const MAX_PIECES: usize = 128;
/// A checkpoint starts when this many bytes of changes are in memory.
const MAX_CHANGES: usize = 32 << 20;

/// A group between being written and being durable.
#[derive(Debug)]
struct Group {
    number: u64,
    /// Sequence number after its last sector.
    end: u64,
    flushed_through: u64,
    replies: Vec<Reply>,
}

/// Freed blocks that cannot be used again yet.
#[derive(Debug)]
struct Quarantined {
    extents: Vec<Extent>,
    /// Usable when everything before this sequence number is known to be flushed.
    end: u64,
    /// Usable when no read is left that started in this period.
    period: u64,
}

/// Content of blocks that the data region does not have yet.
pub(crate) type Deferred = BTreeMap<u64, Bytes>;

/// The state of committing.
#[derive(Debug)]
pub(crate) struct Commits {
    /// Sectors of the log's ring.
    ring: u64,
    /// First sector that is still needed.
    log_start: u64,
    /// The next group's first sector.
    next: u64,
    next_group: u64,
    /// Applied transactions that are in no group yet.
    records: Vec<Vec<u8>>,
    record_bytes: usize,
    replies: Vec<Reply>,
    /// Data that was not handed to the drive yet: first block and bytes.
    writes: Vec<(u64, Bytes)>,
    write_bytes: usize,
    frees: Vec<Extent>,
    groups: VecDeque<Group>,
    /// Outstanding requests by group, the one being gathered included.
    outstanding: HashMap<u64, usize>,
    /// Number of the last group that a flush under way covers.
    flushing: Option<u64>,
    flushed: u64,
    /// Number of the last group that is durable.
    flushed_group: u64,
    /// Sequence number after the last group that has transactions.
    content_end: u64,
    /// Everything before this is flushed, and the log says so durably.
    witnessed: u64,
    quarantine: VecDeque<Quarantined>,
    quarantined: u64,
    deferred: Deferred,
    deferred_frozen: Option<Arc<Deferred>>,
    /// A checkpoint that waits for its groups, and the sequence number it waits for.
    frozen: Option<(u64, Box<Checkpoint>)>,
    checkpointing: bool,
    want_checkpoint: bool,
    progress: bool,
}

impl Commits {
    pub(crate) fn new(log_start: u64, ring: u64) -> Commits {
        Commits {
            ring,
            log_start,
            next: log_start,
            next_group: 1,
            records: Vec::new(),
            record_bytes: 0,
            replies: Vec::new(),
            writes: Vec::new(),
            write_bytes: 0,
            frees: Vec::new(),
            groups: VecDeque::new(),
            outstanding: HashMap::new(),
            flushing: None,
            flushed: log_start,
            flushed_group: 0,
            content_end: log_start,
            witnessed: log_start,
            quarantine: VecDeque::new(),
            quarantined: 0,
            deferred: Deferred::new(),
            deferred_frozen: None,
            frozen: None,
            checkpointing: false,
            want_checkpoint: false,
            progress: false,
        }
    }

    /// Most bytes of one transaction's record.
    pub(crate) fn max_record(&self) -> usize {
        self.ring as usize * SECTOR / 4
    }

    /// Whether no more transactions can be applied before a group is formed, or before the log has room for one more.
    /// What is applied must always fit: a checkpoint, which makes room, begins only when all of it is in the log.
    pub(crate) fn is_full(&self) -> bool {
        let most = self.max_record();
        // The lists of blocks of a record come on top of what is limited.
        let one_more = group_sectors(self.record_bytes + most + most / 4);
        let used = self.next - self.log_start;
        self.record_bytes > most / 2 || used + one_more + 2 * GROUP_SECTORS > self.ring
    }

    /// Has the index brought forward soon.
    pub(crate) fn request_checkpoint(&mut self) {
        self.want_checkpoint = true;
    }

    /// Number of the group that applied transactions will be in.
    pub(crate) fn next_group(&self) -> u64 {
        self.next_group
    }

    /// Whether a group is durable.
    pub(crate) fn is_durable(&self, group: u64) -> bool {
        group <= self.flushed_group
    }

    /// A request of a group was submitted.
    pub(crate) fn add_io(&mut self, group: u64) {
        *self.outstanding.entry(group).or_default() += 1;
    }

    /// A request of a group has completed.
    pub(crate) fn io_done(&mut self, group: u64) {
        if let Some(left) = self.outstanding.get_mut(&group) {
            *left -= 1;
            if *left == 0 {
                self.outstanding.remove(&group);
            }
        }
    }

    /// The flush under way has completed: answers the transactions it covers.
    pub(crate) fn flushed(&mut self) {
        let Some(last) = self.flushing.take() else { return };
        let covered = self.groups.iter().take_while(|g| g.number <= last).count();
        for group in self.groups.drain(..covered) {
            (self.flushed, self.flushed_group) = (group.end, group.number);
            self.witnessed = self.witnessed.max(group.flushed_through);
            group.replies.into_iter().for_each(|reply| send(reply, Ok(())));
        }
    }

    /// Answers everything that is not durable with an error.
    pub(crate) fn fail(&mut self, error: &StoreError) {
        let groups = self.groups.iter_mut().flat_map(|g| std::mem::take(&mut g.replies));
        let replies = groups.chain(std::mem::take(&mut self.replies));
        replies.for_each(|reply| drop(reply.send(Err(error.clone()))));
        self.writes.clear();
        self.write_bytes = 0;
    }

    /// Content of a block that the data region does not have yet.
    pub(crate) fn deferred(&self, block: u64) -> Option<Bytes> {
        self.deferred.get(&block).or_else(|| self.deferred_frozen.as_ref()?.get(&block)).cloned()
    }

    /// Takes an applied transaction.
    pub(crate) fn push(&mut self, outcome: &Outcome, reply: Reply) {
        let record = outcome.record.encode();
        self.record_bytes += record_bytes(record.len());
        self.records.push(record);
        self.replies.push(reply);
        self.write_bytes += outcome.writes.iter().map(|(_, data)| data.len()).sum::<usize>();
        self.writes.extend(outcome.writes.iter().cloned());
        self.frees.extend(&outcome.record.frees);
        self.deferred.extend(outcome.record.deferred.iter().cloned());
        for block in outcome.record.frees.iter().flat_map(|e| e.blocks()) {
            self.deferred.remove(&block);
        }
    }

    /// Whether to wait with the next group, so that groups grow with the load: while one is being written, and while one
    /// is being flushed that has more transactions than the next one would have.
    fn is_too_early(&self) -> bool {
        match self.groups.back() {
            None => false,
            Some(last) if self.outstanding.contains_key(&last.number) => true,
            Some(last) => self.groups.len() > 1 || self.records.len() < last.replies.len(),
        }
    }

    /// Whether everything applied is durable.
    fn is_quiet(&self) -> bool {
        self.records.is_empty() && self.groups.is_empty()
    }

    /// Whether the log does not say yet that everything in it is flushed.
    pub(crate) fn wants_witness(&self) -> bool {
        self.is_quiet() && self.witnessed < self.content_end
    }
}

impl Core {
    /// Moves commits on as far as they go.
    pub(crate) fn commit_step(&mut self) {
        if self.poisoned.is_none() {
            if self.commits.write_bytes > GATHERED {
                self.write_data();
            }
            let due = !self.commits.records.is_empty() || (self.is_starved() && self.commits.wants_witness());
            if due {
                self.form_group();
            }
            self.flush();
        }
        self.checkpoint_step();
    }

    /// A little time has passed since the last activity: writes down that what is in the log was flushed.
    pub(crate) fn idle(&mut self) {
        if self.commits.wants_witness() && self.poisoned.is_none() {
            self.form_group();
        }
        self.advance();
    }

    /// Whether [`idle`](Self::idle) should be called when nothing happens for a while.
    pub(crate) fn wants_idle(&self) -> bool {
        self.commits.wants_witness() && self.poisoned.is_none()
    }

    /// Submits the data of applied transactions, neighbours together.
    pub(crate) fn write_data(&mut self) {
        let mut writes = std::mem::take(&mut self.commits.writes);
        self.commits.write_bytes = 0;
        if writes.is_empty() {
            return;
        }
        writes.sort_by_key(|w| w.0);
        let mut run: Option<(Extent, Vec<Bytes>)> = None;
        let mut runs = Vec::new();
        for (start, data) in writes {
            for (blocks, pieces) in self.pieces(start, &data) {
                match &mut run {
                    Some((all, list))
                        if all.end() == blocks.start
                            && (all.len + blocks.len) * BLOCK <= MAX_WRITE as u64
                            && list.len() + pieces.len() <= MAX_PIECES =>
                    {
                        all.len += blocks.len;
                        list.extend(pieces);
                    }
                    _ => runs.extend(run.replace((blocks, pieces))),
                }
            }
        }
        runs.extend(run);
        let group = self.commits.next_group;
        for (blocks, pieces) in runs {
            self.commits.add_io(group);
            self.submit_write(blocks, pieces, Purpose::Data { blocks, group });
        }
    }

    /// Cuts data for consecutive blocks into requests, with memory that the drive can take.
    pub(crate) fn pieces(&mut self, start: u64, data: &Bytes) -> Vec<(Extent, Vec<Bytes>)> {
        let mut requests = Vec::new();
        let mut at = start;
        let aligned = data.as_ptr().align_offset(BLOCK_SIZE) == 0;
        let whole = if aligned { data.len() - data.len() % BLOCK_SIZE } else { 0 };
        let mut push = |piece: Bytes| {
            let len = (piece.len() / BLOCK_SIZE) as u64;
            requests.push((Extent { start: at, len }, vec![piece]));
            at += len;
        };
        let mut done = 0;
        while done < whole {
            let len = (whole - done).min(MAX_WRITE);
            push(data.slice(done..done + len));
            done += len;
        }
        while done < data.len() {
            let len = (data.len() - done).min(MAX_WRITE);
            push(self.bounce(&data[done..done + len]));
            done += len;
        }
        requests
    }

    /// A copy in aligned memory, filled up with zeros to whole blocks.
    fn bounce(&self, data: &[u8]) -> Bytes {
        let mut buffer = self.buffer(data.len().next_multiple_of(BLOCK_SIZE));
        buffer[..data.len()].copy_from_slice(data);
        buffer[data.len()..].fill(0);
        buffer.freeze()
    }

    /// Aligned memory of `len` bytes: from the pool, or fresh if that is used up.
    ///
    /// # Panics
    /// If the system has no memory.
    pub(crate) fn buffer(&self, len: usize) -> ArenaBuf {
        if let Ok(Some(buffer)) = self.pool.try_alloc(len) {
            return buffer;
        }
        let size = len.next_power_of_two().max(BLOCK_SIZE);
        let arena = Arena::anonymous(size).expect("memory for a buffer");
        let pool = BufferPool::new(arena, 0, size);
        pool.try_alloc(len).ok().flatten().expect("a fresh pool has its one buffer")
    }

    /// Submits a write; returns the request's id.
    pub(crate) fn submit_write(&mut self, blocks: Extent, pieces: Vec<Bytes>, purpose: Purpose) -> u64 {
        let id = self.next_id();
        self.reads.write_started(blocks);
        self.io.insert(id, purpose);
        let offset = self.data_offset(blocks.start);
        self.output.io.push(IoRequest { id, offset, op: IoOp::Write(pieces) });
        id
    }

    /// Puts everything applied into a group and writes its data and log sectors; not when it is too early for that, or
    /// when the log has no room.
    fn form_group(&mut self) {
        let max_changes = MAX_CHANGES.min((self.index_space.1 / 16) as usize).max(64 << 10);
        let commits = &mut self.commits;
        if commits.is_too_early() {
            return;
        }
        let sectors = group_sectors(commits.record_bytes);
        let used = commits.next - commits.log_start;
        if used + sectors + GROUP_SECTORS > commits.ring {
            commits.want_checkpoint = true;
            return;
        }
        self.write_data();
        let commits = &mut self.commits;
        let records = std::mem::take(&mut commits.records);
        let bytes = encode_group(self.epoch, commits.next, commits.flushed, &records);
        metrics::histogram!("outboard_store_group_transactions").record(records.len() as f64);
        let number = commits.next_group;
        let start = commits.next;
        commits.next += sectors;
        commits.next_group += 1;
        if !records.is_empty() {
            commits.content_end = commits.next;
        }
        commits.record_bytes = 0;
        commits.progress = true;
        let replies = std::mem::take(&mut commits.replies);
        let extents = std::mem::take(&mut commits.frees);
        if !extents.is_empty() {
            commits.quarantined += total(&extents);
            let period = self.reads.next_period();
            commits.quarantine.push_back(Quarantined { extents, end: commits.next, period });
        }
        let group = Group { number, end: commits.next, flushed_through: commits.flushed, replies };
        commits.groups.push_back(group);
        if used + sectors > commits.ring / 2 || self.view.active_bytes() > max_changes {
            commits.want_checkpoint = true;
        }
        if commits.deferred.len() * BLOCK_SIZE > commits.max_record() {
            commits.want_checkpoint = true;
        }
        self.write_log(number, start, &bytes);
    }

    /// Writes a group's sectors, in two requests where the ring ends in between.
    fn write_log(&mut self, group: u64, start: u64, sectors: &[u8]) {
        let slot = start % self.commits.ring;
        let first = sectors.len().min((self.commits.ring - slot) as usize * SECTOR);
        let (head, tail) = sectors.split_at(first);
        for (slot, part) in [(slot, head), (0, tail)] {
            for (i, chunk) in part.chunks(MAX_WRITE).enumerate() {
                let offset = self.superblock.log.offset + slot * SECTOR as u64 + (i * MAX_WRITE) as u64;
                let id = self.next_id();
                self.commits.add_io(group);
                self.io.insert(id, Purpose::Log { group });
                let piece = self.bounce(chunk);
                self.output.io.push(IoRequest { id, offset, op: IoOp::Write(vec![piece]) });
            }
        }
    }

    /// Flushes the groups that are completely written.
    fn flush(&mut self) {
        let commits = &mut self.commits;
        if commits.flushing.is_some() {
            return;
        }
        let written = commits.groups.iter().take_while(|g| !commits.outstanding.contains_key(&g.number));
        let Some(last) = written.last().map(|g| g.number) else { return };
        commits.flushing = Some(last);
        let id = self.next_id();
        self.io.insert(id, Purpose::Flush);
        self.output.io.push(IoRequest { id, offset: 0, op: IoOp::Flush });
    }

    /// Freed blocks that will be free in a while.
    pub(crate) fn reclaimable(&self) -> u64 {
        self.commits.quarantined + total(&self.commits.frees)
    }

    /// Gives freed blocks back to the allocator where that is safe; whether waiting calls should be tried again.
    pub(crate) fn reclaim(&mut self) -> bool {
        let mut progress = std::mem::take(&mut self.commits.progress);
        if self.commits.deferred_frozen.as_ref().is_some_and(|d| !d.is_empty()) {
            return progress;
        }
        let oldest = self.reads.oldest_period();
        let witnessed = self.commits.witnessed;
        let usable = |q: &&Quarantined| q.end <= witnessed && oldest.is_none_or(|o| o > q.period);
        let count = self.commits.quarantine.iter().take_while(usable).count();
        for freed in self.commits.quarantine.drain(..count) {
            self.commits.quarantined -= total(&freed.extents);
            freed.extents.into_iter().for_each(|e| self.alloc.free(e));
            progress = true;
        }
        progress
    }

    /// Whether calls wait for space or for room in the log while a checkpoint is carried out.
    pub(crate) fn awaits_checkpoint(&self) -> bool {
        self.commits.checkpointing && self.is_starved()
    }

    /// Starts and continues checkpoints.
    fn checkpoint_step(&mut self) {
        let commits = &mut self.commits;
        let busy = commits.frozen.is_some() || commits.checkpointing;
        if commits.want_checkpoint && !busy && commits.records.is_empty() && self.poisoned.is_none() {
            self.freeze();
        }
        if let Some((_, checkpoint)) = self.commits.frozen.take_if(|(end, _)| *end <= self.commits.flushed) {
            self.commits.checkpointing = true;
            self.output.work.push(Work::Checkpoint(checkpoint));
        }
    }

    /// Sets the state as of now apart for a checkpoint.
    fn freeze(&mut self) {
        self.commits.want_checkpoint = false;
        let deferred = Arc::new(std::mem::take(&mut self.commits.deferred));
        self.commits.deferred_frozen = Some(Arc::clone(&deferred));
        let mut superblock = self.superblock.clone();
        superblock.checkpoint += 1;
        superblock.clean = self.closing.is_some() && self.is_idle() && self.commits.is_quiet();
        let checkpoint = Checkpoint {
            changes: self.view.freeze(),
            bitmap: self.taken.take_dirty(),
            deferred,
            meta: super::records::Meta {
                checkpoint: superblock.checkpoint,
                epoch: self.epoch,
                log_start: self.commits.next,
                next_nid: self.next_nid,
            },
            superblock,
        };
        self.commits.frozen = Some((self.commits.next, Box::new(checkpoint)));
    }

    /// A checkpoint is done: what it brought to the drive is no longer needed in memory and in the log.
    pub(crate) fn checkpointed(&mut self, result: Result<super::checkpoint::Done>) {
        self.commits.checkpointing = false;
        match result {
            Ok((meta, superblock, space)) => {
                self.superblock = superblock;
                self.index_space = space;
                self.generation += 1;
                self.commits.log_start = meta.log_start;
                self.commits.deferred_frozen = None;
                self.commits.progress = true;
                let (view, loaded) = self.loaded_mut();
                view.thaw(meta.next_nid, loaded);
                metrics::counter!("outboard_store_checkpoints_total").increment(1);
            }
            Err(error) => self.poison(&format!("checkpoint ({error})")),
        }
    }

    /// Ends the unmount when nothing is left to do.
    pub(crate) fn try_close(&mut self) {
        if self.poisoned.is_some() {
            // Its log is never flushed.
            self.commits.frozen = None;
        }
        if self.closing.is_none()
            || self.commits.checkpointing
            || self.commits.frozen.is_some()
            || !self.is_idle()
        {
            return;
        }
        if let Some(reason) = self.poisoned.clone() {
            self.closed = true;
            let reply = self.closing.take();
            let error = StoreError::Poisoned(reason);
            return drop(reply.map(|r| r.send(Err(error))));
        }
        if !self.commits.is_quiet() {
            return;
        }
        if self.superblock.clean {
            self.closed = true;
            if let Some(reply) = self.closing.take() {
                send(reply, Ok(()));
            }
            return;
        }
        self.freeze();
        self.checkpoint_step();
    }
}
