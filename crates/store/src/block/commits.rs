//! Commits in progress: groups of transactions, freed blocks in quarantine, and deferred blocks.

use std::collections::VecDeque;
use std::sync::Arc;

use base::collections::HashMap;
use bytes::Bytes;

use super::apply::TransactionEffect;
use super::checkpoint::{Checkpoint, Deferred};
use super::extent::{Extent, total};
use super::log::{GROUP_SECTORS, group_sectors, record_bytes};
use super::messages::{ReplySender, send};
use super::superblock::SECTOR;
use crate::StoreError;

/// A group whose writes were submitted, but that is not durable yet.
#[derive(Debug)]
pub(super) struct CommitGroup {
    pub(super) number: u64,
    /// Sequence number after the group's last sector.
    pub(super) end: u64,
    pub(super) flushed_through: u64,
    pub(super) replies: Vec<ReplySender>,
}

/// Freed blocks in quarantine.
#[derive(Debug)]
pub(super) struct Quarantined {
    pub(super) extents: Vec<Extent>,
    /// The blocks must not be reused before the log records that all sectors before this sequence
    /// number were flushed.
    pub(super) end: u64,
    /// The blocks must not be reused before all reads that started in this period or earlier have
    /// ended.
    pub(super) period: u64,
}

/// State of commits in progress.
#[derive(Debug)]
pub(crate) struct Commits {
    /// Number of sectors in the log's ring.
    pub(super) ring: u64,
    /// Sequence number of the first sector that recovery still needs.
    pub(super) log_start: u64,
    /// Sequence number of the next group's first sector.
    pub(super) next: u64,
    pub(super) next_group: u64,
    /// Records of applied transactions that belong to no group yet.
    pub(super) records: Vec<Vec<u8>>,
    pub(super) record_bytes: usize,
    pub(super) replies: Vec<ReplySender>,
    /// Data for which no write was submitted yet: first block and bytes.
    pub(super) writes: Vec<(u64, Bytes)>,
    pub(super) write_bytes: usize,
    pub(super) frees: Vec<Extent>,
    pub(super) groups: VecDeque<CommitGroup>,
    /// Number of outstanding drive requests by group number. The next group, which is not formed
    /// yet, may have requests, too.
    pub(super) outstanding: HashMap<u64, usize>,
    /// Number of the last group that the current flush covers.
    pub(super) flushing: Option<u64>,
    pub(super) flushed: u64,
    /// Number of the last group that is durable.
    pub(super) flushed_group: u64,
    /// Sequence number after the last group that has transactions.
    pub(super) content_end: u64,
    /// Sequence number before which all sectors were flushed, according to the durable part of the
    /// log.
    pub(super) witnessed: u64,
    pub(super) quarantine: VecDeque<Quarantined>,
    pub(super) quarantined: u64,
    pub(super) deferred: Deferred,
    pub(super) deferred_frozen: Option<Arc<Deferred>>,
    /// A checkpoint that waits for a flush of the log, and the sequence number up to which the log
    /// must be flushed.
    pub(super) frozen: Option<(u64, Box<Checkpoint>)>,
    pub(super) checkpointing: bool,
    pub(super) want_checkpoint: bool,
    pub(super) progress: bool,
}

impl Commits {
    /// Creates the state for a log whose groups from `log_start` up to `next` are flushed and are not
    /// in the index yet. `deferred` are the deferred blocks of these groups.
    pub(crate) fn new(log_start: u64, next: u64, ring: u64, deferred: Deferred) -> Commits {
        Commits {
            ring,
            log_start,
            next,
            next_group: 1,
            records: Vec::new(),
            record_bytes: 0,
            replies: Vec::new(),
            writes: Vec::new(),
            write_bytes: 0,
            frees: Vec::new(),
            groups: VecDeque::new(),
            outstanding: HashMap::default(),
            flushing: None,
            flushed: next,
            flushed_group: 0,
            content_end: next,
            witnessed: next,
            quarantine: VecDeque::new(),
            quarantined: 0,
            deferred,
            deferred_frozen: None,
            frozen: None,
            checkpointing: false,
            want_checkpoint: false,
            progress: false,
        }
    }

    /// Returns the maximum size of the changes of one transaction, in bytes.
    pub(crate) fn max_record(&self) -> usize {
        self.ring as usize * SECTOR / 4
    }

    /// Whether no more transactions can be applied until a group is formed or the log has room for
    /// another transaction. Applied transactions must always fit into the log. A checkpoint makes
    /// room in the log, but it begins only when all applied transactions are in the log.
    pub(crate) fn is_full(&self) -> bool {
        let most = self.max_record();
        // The limit does not include a record's lists of blocks, so add a quarter for them.
        let one_more = group_sectors(self.record_bytes + most + most / 4);
        let used = self.next - self.log_start;
        self.record_bytes > most / 2 || used + one_more + 2 * GROUP_SECTORS > self.ring
    }

    /// Whether a checkpoint should start so that the log gets room. The rest of the log must suffice
    /// for the transactions that arrive while the checkpoint runs.
    pub(super) fn needs_room(&self) -> bool {
        self.next - self.log_start > self.ring / 2 || self.is_full()
    }

    /// Requests a checkpoint, which starts as soon as possible.
    pub(crate) fn request_checkpoint(&mut self) {
        self.want_checkpoint = true;
    }

    /// Returns the number of the group that will contain the applied transactions.
    pub(crate) fn next_group(&self) -> u64 {
        self.next_group
    }

    /// Whether a group is durable.
    pub(crate) fn is_durable(&self, group: u64) -> bool {
        group <= self.flushed_group
    }

    /// Counts a submitted request of a group.
    pub(crate) fn add_io(&mut self, group: u64) {
        *self.outstanding.entry(group).or_default() += 1;
    }

    /// Counts a completed request of a group.
    pub(crate) fn io_done(&mut self, group: u64) {
        if let Some(left) = self.outstanding.get_mut(&group) {
            *left -= 1;
            if *left == 0 {
                self.outstanding.remove(&group);
            }
        }
    }

    /// Handles the completion of the current flush: acknowledges the transactions that it covers.
    pub(crate) fn flushed(&mut self) {
        let Some(last) = self.flushing.take() else { return };
        let covered = self.groups.iter().take_while(|g| g.number <= last).count();
        for group in self.groups.drain(..covered) {
            (self.flushed, self.flushed_group) = (group.end, group.number);
            self.witnessed = self.witnessed.max(group.flushed_through);
            group.replies.into_iter().for_each(|reply| send(reply, Ok(())));
        }
    }

    /// Fails every transaction that is not durable.
    pub(crate) fn fail(&mut self, error: &StoreError) {
        let groups = self.groups.iter_mut().flat_map(|g| std::mem::take(&mut g.replies));
        let replies = groups.chain(std::mem::take(&mut self.replies));
        replies.for_each(|reply| drop(reply.send(Err(error.clone()))));
        self.writes.clear();
        self.write_bytes = 0;
    }

    /// Returns the content of a block if the content was not written to the data area yet.
    pub(crate) fn deferred(&self, block: u64) -> Option<Bytes> {
        self.deferred.get(&block).or_else(|| self.deferred_frozen.as_ref()?.get(&block)).cloned()
    }

    /// Adds an applied transaction.
    pub(crate) fn push(&mut self, outcome: &TransactionEffect, reply: ReplySender) {
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

    /// Returns the number of freed blocks that cannot be reused yet.
    pub(crate) fn reclaimable(&self) -> u64 {
        self.quarantined + total(&self.frees)
    }

    /// Takes the data for which no write was submitted yet.
    pub(crate) fn take_writes(&mut self) -> Vec<(u64, Bytes)> {
        self.write_bytes = 0;
        std::mem::take(&mut self.writes)
    }

    /// Whether the next group should wait, so that groups grow with the load. It waits while
    /// another group is being written. It also waits while a group with more transactions than the
    /// next group is being flushed.
    pub(super) fn is_too_early(&self) -> bool {
        match self.groups.back() {
            None => false,
            Some(last) if self.outstanding.contains_key(&last.number) => true,
            Some(last) => self.groups.len() > 1 || self.records.len() < last.replies.len(),
        }
    }

    /// Whether all applied transactions are durable.
    pub(super) fn is_quiet(&self) -> bool {
        self.records.is_empty() && self.groups.is_empty()
    }

    /// Whether the log does not record yet that its whole content was flushed.
    pub(crate) fn wants_witness(&self) -> bool {
        self.is_quiet() && self.witnessed < self.content_end
    }
}
