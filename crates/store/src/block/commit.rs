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

use super::checkpoint::{Checkpoint, CheckpointOutcome};
use super::core::{Core, Lifecycle};
use super::io::{IoOp, IoRequest};
use super::messages::{BlockingWork, send};
use super::records::Meta;
use super::requests::Purpose;
use super::superblock::SECTOR;
use super::transfers::MAX_WRITE;
use super::usage::SPREAD;
use crate::{Result, StoreError};

/// Maximum amount of data that waits for its group to be formed, in bytes. The data waits so that
/// adjacent blocks can share a request. If more data waits, the store writes all waiting data
/// immediately.
const GATHERED: usize = 256 << 10;
/// No checkpoint starts for lack of room in the index when at most this many keys are changed.
const MIN_KEYS: usize = 64;

impl Core {
    /// Advances the commits in progress as far as possible.
    pub(crate) fn commit_step(&mut self) {
        if self.poisoned.is_none() {
            if self.commits.write_bytes() > GATHERED {
                self.write_data();
            }
            let due = self.commits.has_transactions() || (self.is_starved() && self.commits.wants_witness());
            if due {
                self.form_group();
            }
            if self.commits.begin_flush() {
                let id = self.requests.add(Purpose::Flush);
                self.output.io.push(IoRequest { id, offset: 0, op: IoOp::Flush });
            }
        }
        self.checkpoint_step();
    }

    /// Whether the driver should call [`idle`](Self::idle) after a short idle time.
    pub(crate) fn wants_idle(&self) -> bool {
        self.commits.wants_witness() && self.poisoned.is_none()
    }

    /// Forms a group of all applied transactions and writes its data and log sectors. Does nothing
    /// if it is too early for another group, or if the log has no room.
    pub(super) fn form_group(&mut self) {
        if !self.commits.may_form_group() {
            return;
        }
        self.write_data();
        let group = self.commits.form_group(self.log_generation, || self.reads.next_period());
        for (slot, sectors) in group.parts {
            for (i, chunk) in sectors.chunks(MAX_WRITE).enumerate() {
                let offset = self.superblock.log.offset + slot * SECTOR as u64 + (i * MAX_WRITE) as u64;
                let piece = self.bounce(chunk);
                self.commits.add_io(group.number);
                let id = self.requests.add(Purpose::Log { group: group.number });
                self.output.io.push(IoRequest { id, offset, op: IoOp::Write(vec![piece]) });
            }
        }
        if self.has_many_changes() && !self.commits.has_checkpoint() {
            self.commits.request_checkpoint();
        }
        self.update_gauges();
    }

    /// Whether a checkpoint should write the queued changes, although the log has room: half of the
    /// memory for changes is in use, or half of the free space of the index. The other half is for
    /// transactions that arrive before the checkpoint has ended.
    fn has_many_changes(&self) -> bool {
        let (keys, size) = self.view.active();
        let space = self.index_space;
        let room = space.free.saturating_sub(space.reserve()).max(space.reserve());
        size.memory as u64 > self.changes_limit() / 2
            || SPREAD * size.growth() > room / 2
            || keys > space.keys_in(space.free / 2).max(MIN_KEYS)
    }

    /// Frees blocks that have left the quarantine.
    pub(crate) fn reclaim(&mut self) {
        let released = self.commits.reclaim(self.reads.oldest_period());
        released.into_iter().for_each(|e| self.alloc.free(e));
    }

    /// Requests a checkpoint if transactions wait for room in the log and nothing else will give them
    /// room.
    pub(crate) fn make_log_room(&mut self) {
        let is_idle = !self.commits.has_checkpoint() && !self.commits.has_transactions();
        if is_idle && self.calls.awaits_log() && !self.commits.log().is_empty() && self.poisoned.is_none() {
            self.commits.request_checkpoint();
            self.checkpoint_step();
        }
    }

    /// Whether calls wait for space or for room in the log while a checkpoint runs.
    pub(crate) fn awaits_checkpoint(&self) -> bool {
        self.commits.is_checkpointing() && self.is_starved()
    }

    /// If a checkpoint is requested, freezes the state for it. Starts a frozen checkpoint when the
    /// log is flushed up to the checkpoint's position.
    fn checkpoint_step(&mut self) {
        if self.poisoned.is_none() && self.commits.may_freeze() {
            self.freeze();
        }
        if let Some(checkpoint) = self.commits.start_checkpoint() {
            self.output.work.push(BlockingWork::Checkpoint(checkpoint));
        }
    }

    /// Prepares a checkpoint of the current state.
    fn freeze(&mut self) {
        let mut superblock = self.superblock.clone();
        superblock.checkpoint += 1;
        superblock.clean = self.lifecycle.is_closing() && self.is_idle() && self.commits.is_quiet();
        let (changes, bitmap) = (self.view.freeze(), self.taken.take_dirty());
        let (log_generation, next_nid) = (self.log_generation, self.next_nid);
        self.commits.freeze(|log_start, deferred| {
            let checkpoint = superblock.checkpoint;
            let meta = Meta { checkpoint, log_generation, log_start, next_nid, index_used: None };
            Checkpoint { changes, bitmap, deferred, meta, superblock }
        });
    }

    /// Handles the end of a checkpoint. Drops from memory the changes that the checkpoint has
    /// written, and frees the log space of these changes.
    pub(crate) fn checkpointed(&mut self, result: Result<CheckpointOutcome>) {
        self.commits.checkpoint_ended(result.is_ok());
        match result {
            Ok((meta, superblock, space)) => {
                self.superblock = superblock;
                self.index_space = space;
                self.generation += 1;
                let written = self.view.thaw(meta.next_nid, self.calls.loaded_mut());
                self.output.work.extend(written.map(BlockingWork::Discard));
                self.update_gauges();
                metrics::counter!("outboard_store_checkpoints_total").increment(1);
            }
            Err(error) => self.poison(&format!("checkpoint ({error})")),
        }
    }

    /// Completes an unmount when no work is left.
    pub(crate) fn try_close(&mut self) {
        if !self.lifecycle.is_closing() || self.commits.has_checkpoint() || !self.is_idle() {
            return;
        }
        if let Some(reason) = self.poisoned.clone() {
            return self.close(Err(StoreError::Poisoned(reason)));
        }
        if !self.commits.is_quiet() {
            return;
        }
        if self.superblock.clean {
            return self.close(Ok(()));
        }
        self.freeze();
        self.checkpoint_step();
    }

    fn close(&mut self, result: Result<()>) {
        if let Lifecycle::Closing(reply) = std::mem::replace(&mut self.lifecycle, Lifecycle::Closed) {
            send(reply, result);
        }
    }
}
