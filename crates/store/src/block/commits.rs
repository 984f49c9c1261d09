//! Commits in progress: groups of transactions, freed blocks in quarantine, and deferred blocks.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use super::apply::TransactionEffect;
use super::checkpoint::{Checkpoint, Deferred};
use super::extent::{Extent, total};
use super::log::{GROUP_SECTORS, group_sectors, record_bytes};
use super::messages::{ReplySender, send};
use super::superblock::SECTOR;
use crate::StoreError;

/// A group between being written and being durable.
#[derive(Debug)]
pub(super) struct CommitGroup {
    pub(super) number: u64,
    /// Sequence number after its last sector.
    pub(super) end: u64,
    pub(super) flushed_through: u64,
    pub(super) replies: Vec<ReplySender>,
}

/// Freed blocks that cannot be used again yet.
#[derive(Debug)]
pub(super) struct Quarantined {
    pub(super) extents: Vec<Extent>,
    /// Usable when everything before this sequence number is known to be flushed.
    pub(super) end: u64,
    /// Usable when no read is left that started in this period.
    pub(super) period: u64,
}

/// The state of committing.
#[derive(Debug)]
pub(crate) struct Commits {
    /// Sectors of the log's ring.
    pub(super) ring: u64,
    /// First sector that is still needed.
    pub(super) log_start: u64,
    /// The next group's first sector.
    pub(super) next: u64,
    pub(super) next_group: u64,
    /// Applied transactions that are in no group yet.
    pub(super) records: Vec<Vec<u8>>,
    pub(super) record_bytes: usize,
    pub(super) replies: Vec<ReplySender>,
    /// Data that was not handed to the drive yet: first block and bytes.
    pub(super) writes: Vec<(u64, Bytes)>,
    pub(super) write_bytes: usize,
    pub(super) frees: Vec<Extent>,
    pub(super) groups: VecDeque<CommitGroup>,
    /// Outstanding requests by group, the one being gathered included.
    pub(super) outstanding: HashMap<u64, usize>,
    /// Number of the last group that a flush under way covers.
    pub(super) flushing: Option<u64>,
    pub(super) flushed: u64,
    /// Number of the last group that is durable.
    pub(super) flushed_group: u64,
    /// Sequence number after the last group that has transactions.
    pub(super) content_end: u64,
    /// Everything before this is flushed, and the log says so durably.
    pub(super) witnessed: u64,
    pub(super) quarantine: VecDeque<Quarantined>,
    pub(super) quarantined: u64,
    pub(super) deferred: Deferred,
    pub(super) deferred_frozen: Option<Arc<Deferred>>,
    /// A checkpoint that waits for its groups, and the sequence number it waits for.
    pub(super) frozen: Option<(u64, Box<Checkpoint>)>,
    pub(super) checkpointing: bool,
    pub(super) want_checkpoint: bool,
    pub(super) progress: bool,
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

    /// Freed blocks that will be free in a while.
    pub(crate) fn reclaimable(&self) -> u64 {
        self.quarantined + total(&self.frees)
    }

    /// Takes the data that no request was made for yet.
    pub(crate) fn take_writes(&mut self) -> Vec<(u64, Bytes)> {
        self.write_bytes = 0;
        std::mem::take(&mut self.writes)
    }

    /// Whether to wait with the next group, so that groups grow with the load: while one is being written, and while one
    /// is being flushed that has more transactions than the next one would have.
    pub(super) fn is_too_early(&self) -> bool {
        match self.groups.back() {
            None => false,
            Some(last) if self.outstanding.contains_key(&last.number) => true,
            Some(last) => self.groups.len() > 1 || self.records.len() < last.replies.len(),
        }
    }

    /// Whether everything applied is durable.
    pub(super) fn is_quiet(&self) -> bool {
        self.records.is_empty() && self.groups.is_empty()
    }

    /// Whether the log does not say yet that everything in it is flushed.
    pub(crate) fn wants_witness(&self) -> bool {
        self.is_quiet() && self.witnessed < self.content_end
    }
}
