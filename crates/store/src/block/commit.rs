//! Group commit: from applied transactions to acknowledgements.
//!
//! Applied transactions gather while the drive writes the previous group. The store writes a
//! group's data and its log sectors at the same time. When both writes have completed, one flush
//! makes the group durable, and the store acknowledges its transactions. Groups become durable in
//! the order in which they were formed.
//!
//! The store does not reuse freed blocks immediately, because recovery may still compare them with
//! the checksums of their old content. A later group records that the group with the freeing
//! transaction was flushed. When this later group is durable, the store may reuse the blocks.

use std::sync::Arc;

use base::block::BLOCK_SIZE;

use super::checkpoint::Checkpoint;
use super::commits::{CommitGroup, Quarantined};
use super::core::{Core, Purpose};
use super::extent::total;
use super::io::{IoOp, IoRequest};
use super::log::{GROUP_SECTORS, encode_group, group_sectors};
use super::messages::{BlockingWork, send};
use super::superblock::SECTOR;
use super::transfers::MAX_WRITE;
use crate::{Result, StoreError};

/// Maximum amount of data that waits for its group to be formed, in bytes. The data waits so that
/// adjacent blocks can share a request. If more data waits, the store writes all waiting data
/// immediately.
const GATHERED: usize = 256 << 10;
/// A checkpoint starts at the latest when this many bytes of changes of the index are in memory.
const MAX_CHANGES: usize = 32 << 20;
/// No checkpoint starts for lack of room in the index when at most this many keys are changed.
const MIN_KEYS: usize = 64;

impl Core {
    /// Advances the commits in progress as far as possible.
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

    /// Whether the driver should call [`idle`](Self::idle) after a short idle time.
    pub(crate) fn wants_idle(&self) -> bool {
        self.commits.wants_witness() && self.poisoned.is_none()
    }

    /// Forms a group of all applied transactions and writes its data and log sectors. Does nothing
    /// if it is too early for another group. If the log has no room, requests a checkpoint instead.
    pub(super) fn form_group(&mut self) {
        // Use only half of the free space, because more keys may change before the checkpoint starts.
        let space = self.index_space;
        let max_keys = space.keys_in(space.free / 2).max(MIN_KEYS);
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
        let bytes = encode_group(self.log_generation, commits.next, commits.flushed, &records);
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
        let group = CommitGroup { number, end: commits.next, flushed_through: commits.flushed, replies };
        commits.groups.push_back(group);
        let (keys, changed) = self.view.active();
        if commits.needs_room() || changed > MAX_CHANGES || keys > max_keys {
            commits.want_checkpoint = true;
        }
        if commits.deferred.len() * BLOCK_SIZE > commits.max_record() {
            commits.want_checkpoint = true;
        }
        self.write_log(number, start, &bytes);
    }

    /// Writes a group's sectors. Splits the write if the group wraps around the end of the ring.
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

    /// Starts a flush of the groups that are completely written, unless a flush is in progress.
    fn flush(&mut self) {
        let commits = &mut self.commits;
        if commits.flushing.is_some() {
            return;
        }
        let written = commits.groups.iter().take_while(|g| !commits.outstanding.contains_key(&g.number));
        let Some(last) = written.last().map(|g| g.number) else { return };
        commits.flushing = Some(last);
        if base::mutant!(AcknowledgeBeforeFlush) {
            let covered = commits.groups.iter_mut().take_while(|group| group.number <= last);
            covered.flat_map(|g| std::mem::take(&mut g.replies)).for_each(|reply| send(reply, Ok(())));
        }
        let id = self.next_id();
        self.io.insert(id, Purpose::Flush);
        self.output.io.push(IoRequest { id, offset: 0, op: IoOp::Flush });
    }

    /// Takes freed blocks out of the quarantine if reusing them is safe. Returns whether waiting
    /// calls should be tried again.
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

    /// Whether calls wait for space or for room in the log while a checkpoint runs.
    pub(crate) fn awaits_checkpoint(&self) -> bool {
        self.commits.checkpointing && self.is_starved()
    }

    /// If a checkpoint is requested, freezes the state for it. Starts a frozen checkpoint when the
    /// log is flushed up to the checkpoint's position.
    fn checkpoint_step(&mut self) {
        let commits = &mut self.commits;
        let busy = commits.frozen.is_some() || commits.checkpointing;
        if commits.want_checkpoint && !busy && commits.records.is_empty() && self.poisoned.is_none() {
            self.freeze();
        }
        if let Some((_, checkpoint)) = self.commits.frozen.take_if(|(end, _)| *end <= self.commits.flushed) {
            self.commits.checkpointing = true;
            self.output.work.push(BlockingWork::Checkpoint(checkpoint));
        }
    }

    /// Prepares a checkpoint of the current state.
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
                log_generation: self.log_generation,
                log_start: self.commits.next,
                next_nid: self.next_nid,
                index_used: None,
            },
            superblock,
        };
        self.commits.frozen = Some((self.commits.next, Box::new(checkpoint)));
    }

    /// Handles the end of a checkpoint. Drops from memory the changes that the checkpoint has
    /// written, and frees the log space of these changes.
    pub(crate) fn checkpointed(&mut self, result: Result<super::checkpoint::CheckpointOutcome>) {
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

    /// Completes an unmount when no work is left.
    pub(crate) fn try_close(&mut self) {
        if self.poisoned.is_some() {
            // Drop the frozen checkpoint, because it waits for log sectors that will never be
            // flushed.
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
