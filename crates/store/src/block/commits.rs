//! [`Commits`]: the way of applied transactions to the log and to the index.

use std::sync::Arc;

use base::block::BLOCK_SIZE;
use bytes::Bytes;

use super::apply::TransactionEffect;
use super::checkpoint::{Checkpoint, Deferred};
use super::extent::Extent;
use super::groups::{CommitGroup, FormedGroup, GroupsInFlight, OpenGroup, acknowledge, fail_groups};
use super::log::{encode_group, group_sectors, record_bytes};
use super::log_space::LogSpace;
use super::messages::ReplySender;
use super::quarantine::BlockQuarantine;
use super::superblock::SECTOR;
use crate::StoreError;

/// Transactions that were applied and are not in the index yet, and the blocks that they have freed.
///
/// A transaction belongs to the open group, then to a group in flight, and is then in the durable
/// part of the log until a checkpoint has written its changes to the index.
#[derive(Debug)]
pub(crate) struct Commits {
    log: LogSpace,
    open: OpenGroup,
    groups: GroupsInFlight,
    quarantine: BlockQuarantine,
    deferred: DeferredBlocks,
    checkpoint: CheckpointState,
    /// Whether a checkpoint should start as soon as possible.
    wants_checkpoint: bool,
    /// Whether calls that wait for room in the log should be tried again.
    has_log_progress: bool,
    /// Whether calls that wait for free blocks or for room in the index should be tried again.
    has_space_progress: bool,
}

/// State of the checkpoints. At most one checkpoint is in progress.
#[derive(Debug)]
enum CheckpointState {
    Idle,
    /// The state of the target is frozen for a checkpoint, which waits until the log is flushed up to
    /// sector `position`.
    Frozen {
        position: u64,
        checkpoint: Box<Checkpoint>,
    },
    Running,
}

/// Blocks whose content is in the log and was not written to the data area yet.
#[derive(Debug, Default)]
struct DeferredBlocks {
    newest: Deferred,
    /// The blocks that the checkpoint in progress writes.
    frozen: Option<Arc<Deferred>>,
}

/// The log sectors of a group, which are to be written.
#[derive(Debug)]
pub(crate) struct GroupSectors {
    /// Number of the group.
    pub(crate) number: u64,
    /// Parts of the log with their content: first slot of the ring, and sectors.
    pub(crate) parts: Vec<(u64, Bytes)>,
}

impl Commits {
    /// Creates the state for a log whose groups, up to the next group of `log`, are flushed and not
    /// in the index yet. `deferred` are the deferred blocks of these groups.
    pub(crate) fn new(log: LogSpace, deferred: Deferred) -> Commits {
        Commits {
            log,
            open: OpenGroup::default(),
            groups: GroupsInFlight::new(),
            quarantine: BlockQuarantine::default(),
            deferred: DeferredBlocks { newest: deferred, frozen: None },
            checkpoint: CheckpointState::Idle,
            wants_checkpoint: false,
            has_log_progress: false,
            has_space_progress: false,
        }
    }

    /// Returns the positions in the log.
    pub(crate) fn log(&self) -> &LogSpace {
        &self.log
    }

    /// Whether a transaction with an encoded record of `record` bytes may be applied now. If not, it
    /// can be applied after a group was formed, or when a checkpoint has made progress.
    pub(crate) fn admits(&self, record: usize) -> bool {
        let is_group_full = self.open.record_bytes() > self.log.max_record() / 2;
        !is_group_full && self.log.admits(self.open.record_bytes() + record_bytes(record))
    }

    /// Whether an encoded record of `record` bytes fits into an empty log.
    pub(crate) fn can_ever_admit(&self, record: usize) -> bool {
        self.log.has_ring_for(record_bytes(record))
    }

    /// Adds an applied transaction with its encoded record.
    pub(crate) fn push(&mut self, effect: &TransactionEffect, record: Vec<u8>, reply: ReplySender) {
        self.open.push(effect, record, reply);
        let deferred = &mut self.deferred.newest;
        deferred.extend(effect.record.deferred.iter().cloned());
        for extent in &effect.record.frees {
            let freed: Vec<u64> = deferred.range(extent.blocks()).map(|(block, _)| *block).collect();
            freed.iter().for_each(|block| drop(deferred.remove(block)));
        }
    }

    /// Returns the content of a block if the content was not written to the data area yet.
    pub(crate) fn deferred(&self, block: u64) -> Option<Bytes> {
        let DeferredBlocks { newest, frozen } = &self.deferred;
        newest.get(&block).or_else(|| frozen.as_ref()?.get(&block)).cloned()
    }

    /// Number of freed blocks that cannot be reused yet.
    pub(crate) fn reclaimable(&self) -> u64 {
        self.quarantine.blocks() + self.open.freed_blocks()
    }

    /// Number of bytes of data for which no write was submitted yet.
    pub(crate) fn write_bytes(&self) -> usize {
        self.open.write_bytes()
    }

    /// Takes the data for which no write was submitted yet: first block and bytes.
    pub(crate) fn take_writes(&mut self) -> Vec<(u64, Bytes)> {
        self.open.take_writes()
    }

    /// Returns the number of the group that will contain the applied transactions.
    pub(crate) fn next_group(&self) -> u64 {
        self.groups.next_number()
    }

    /// Whether a group is durable.
    pub(crate) fn is_durable(&self, group: u64) -> bool {
        self.groups.is_durable(group)
    }

    /// Counts a submitted request of a group.
    pub(crate) fn add_io(&mut self, group: u64) {
        self.groups.add_io(group);
    }

    /// Counts a completed request of a group.
    pub(crate) fn io_done(&mut self, group: u64) {
        self.groups.io_done(group);
    }

    /// Whether transactions were applied that belong to no group yet.
    pub(crate) fn has_transactions(&self) -> bool {
        !self.open.is_empty()
    }

    /// Whether all applied transactions are durable.
    pub(crate) fn is_quiet(&self) -> bool {
        self.open.is_empty() && self.groups.is_empty()
    }

    /// Whether the log does not state yet that its whole content was flushed, and no group is in
    /// progress that could state it.
    pub(crate) fn wants_witness(&self) -> bool {
        self.is_quiet() && self.log.wants_witness()
    }

    /// Whether a group may be formed now. If the log has no room for the group, requests a
    /// checkpoint. If a group may be formed, the caller submits the writes of the transactions' data
    /// ([`take_writes`](Self::take_writes)), and then forms the group
    /// ([`form_group`](Self::form_group)).
    pub(crate) fn may_form_group(&mut self) -> bool {
        if self.groups.is_too_early(self.open.transactions()) {
            return false;
        }
        let has_room = self.log.fits(group_sectors(self.open.record_bytes()));
        self.wants_checkpoint |= !has_room && !self.has_checkpoint();
        has_room
    }

    /// Forms a group of all applied transactions in the log generation `generation`. Reads that
    /// started in `period` or earlier may still read the blocks that the transactions free. Requests
    /// a checkpoint if the log should get room.
    pub(crate) fn form_group(&mut self, generation: u64, period: impl FnOnce() -> u64) -> GroupSectors {
        let sectors = group_sectors(self.open.record_bytes());
        let FormedGroup { records, replies, frees } = self.open.form();
        metrics::histogram!("outboard_store_group_transactions").record(records.len() as f64);
        let flushed_through = self.log.flushed();
        let start = self.log.append(sectors, !records.is_empty());
        let end = start + sectors;
        let mut bytes = encode_group(generation, start, flushed_through, &records).freeze();
        let number = self.groups.push(CommitGroup { end, flushed_through, replies });
        if !frees.is_empty() {
            self.quarantine.add(frees, end, period());
        }
        self.has_log_progress = true;
        self.wants_checkpoint |= !self.has_checkpoint() && self.should_checkpoint();
        let slots = self.log.slots(start, sectors).into_iter().filter(|(_, sectors)| *sectors > 0);
        let parts = slots.map(|(slot, sectors)| (slot, bytes.split_to(sectors as usize * SECTOR)));
        GroupSectors { number, parts: parts.collect() }
    }

    /// Returns whether a flush should be submitted: groups are completely written, and no flush is in
    /// progress. The caller then submits the flush.
    pub(crate) fn begin_flush(&mut self) -> bool {
        let begins = self.groups.begin_flush();
        if begins && base::mutant!(AcknowledgeBeforeFlush) {
            self.groups.acknowledge_early();
        }
        begins
    }

    /// Handles the completion of the current flush: acknowledges the transactions that it covers.
    pub(crate) fn flushed(&mut self) {
        for group in self.groups.flushed() {
            self.log.flushed_group(group.end, group.flushed_through);
            acknowledge(group.replies);
        }
    }

    /// Fails every transaction that is not durable. No further group becomes durable.
    pub(crate) fn fail(&mut self, error: &StoreError) {
        fail_groups(&mut self.open, &mut self.groups, error);
        // The frozen checkpoint waits for log sectors that will never be flushed.
        if let CheckpointState::Frozen { .. } = self.checkpoint {
            self.checkpoint = CheckpointState::Idle;
        }
    }

    /// Returns freed blocks that may be reused now. `oldest` is the period of the oldest read in
    /// progress.
    pub(crate) fn reclaim(&mut self, oldest: Option<u64>) -> Vec<Extent> {
        // The checkpoint in progress still writes to its deferred blocks.
        if self.deferred.frozen.as_ref().is_some_and(|frozen| !frozen.is_empty()) {
            return Vec::new();
        }
        let released = self.quarantine.release(self.log.witnessed(), oldest);
        self.has_space_progress |= !released.is_empty();
        released
    }

    /// Records that blocks have become free, so that calls that wait for blocks are tried again.
    pub(crate) fn blocks_freed(&mut self) {
        self.has_space_progress = true;
    }

    /// Returns whether calls should be tried again that wait for room in the log, and whether calls
    /// should be tried again that wait for free blocks or for room in the index.
    pub(crate) fn take_progress(&mut self) -> (bool, bool) {
        (std::mem::take(&mut self.has_log_progress), std::mem::take(&mut self.has_space_progress))
    }

    /// Whether a checkpoint should start, so that the log and the memory of deferred blocks get room.
    fn should_checkpoint(&self) -> bool {
        let (_, log_bytes) = self.log.used_bytes();
        self.log.needs_room() || (self.deferred.newest.len() * BLOCK_SIZE) as u64 > log_bytes / 4
    }

    /// Requests a checkpoint, which starts as soon as possible.
    pub(crate) fn request_checkpoint(&mut self) {
        self.wants_checkpoint = true;
    }

    /// Whether a checkpoint was requested and can be prepared now.
    pub(crate) fn may_freeze(&self) -> bool {
        self.wants_checkpoint && self.open.is_empty() && matches!(self.checkpoint, CheckpointState::Idle)
    }

    /// Whether a checkpoint is prepared or running.
    pub(crate) fn has_checkpoint(&self) -> bool {
        !matches!(self.checkpoint, CheckpointState::Idle)
    }

    /// Whether a checkpoint is running.
    pub(crate) fn is_checkpointing(&self) -> bool {
        matches!(self.checkpoint, CheckpointState::Running)
    }

    /// Prepares a checkpoint of the current state. `make` creates the checkpoint from its position in
    /// the log and the deferred blocks.
    pub(crate) fn freeze(&mut self, make: impl FnOnce(u64, Arc<Deferred>) -> Checkpoint) {
        assert!(!self.has_checkpoint() && self.open.is_empty(), "checkpoints do not overlap: {self:?}");
        self.wants_checkpoint = false;
        let deferred = Arc::new(std::mem::take(&mut self.deferred.newest));
        self.deferred.frozen = Some(Arc::clone(&deferred));
        let position = self.log.next();
        self.log.checkpoint_began(position);
        let checkpoint = Box::new(make(position, deferred));
        self.checkpoint = CheckpointState::Frozen { position, checkpoint };
    }

    /// Returns the prepared checkpoint if the log is flushed up to its position. The caller runs it.
    pub(crate) fn start_checkpoint(&mut self) -> Option<Box<Checkpoint>> {
        match &self.checkpoint {
            CheckpointState::Frozen { position, .. } if *position <= self.log.flushed() => {}
            _ => return None,
        }
        match std::mem::replace(&mut self.checkpoint, CheckpointState::Running) {
            CheckpointState::Frozen { checkpoint, .. } => Some(checkpoint),
            CheckpointState::Idle | CheckpointState::Running => None,
        }
    }

    /// Records the progress of the checkpoint, in thousandths.
    pub(crate) fn checkpoint_advanced(&mut self, progress: u64) {
        self.log.checkpoint_advanced(progress);
        self.has_log_progress = true;
    }

    /// Records that the checkpoint has ended. If it has failed, its changes stay in the log.
    pub(crate) fn checkpoint_ended(&mut self, succeeded: bool) {
        self.checkpoint = CheckpointState::Idle;
        if succeeded {
            self.log.checkpoint_ended();
            self.deferred.frozen = None;
            (self.has_log_progress, self.has_space_progress) = (true, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::channel::oneshot;
    use uuid::Uuid;

    use super::super::records::Meta;
    use super::super::recovery::{TargetSizes, layout};
    use super::*;

    const RING: u64 = 1024;

    /// Adds a transaction, and writes and flushes its group of eight sectors.
    fn commit(commits: &mut Commits) {
        commits.push(&TransactionEffect::default(), vec![0; 3000], oneshot::channel().0);
        assert!(commits.may_form_group());
        assert!(commits.take_writes().is_empty());
        let group = commits.form_group(1, || 0);
        assert_eq!(group.parts.iter().map(|(_, sectors)| sectors.len()).sum::<usize>(), 8 * SECTOR);
        commits.add_io(group.number);
        commits.io_done(group.number);
        assert!(commits.begin_flush());
        commits.flushed();
    }

    fn freeze(commits: &mut Commits) {
        let meta = Meta { checkpoint: 1, log_generation: 1, log_start: 0, next_nid: 1, index_used: None };
        let sizes = TargetSizes { uuid: Some(Uuid::nil()), ..TargetSizes::default() };
        let superblock = layout(64 << 20, &sizes).unwrap();
        let (changes, bitmap) = (Arc::default(), Vec::new());
        commits.freeze(|_, deferred| Checkpoint { changes, bitmap, deferred, meta, superblock });
        assert!(commits.start_checkpoint().is_some());
    }

    #[test]
    fn a_checkpoint_follows_another_only_if_the_log_needs_room() {
        let mut commits = Commits::new(LogSpace::new(0, 0, RING), Deferred::new());
        while !commits.may_freeze() {
            commit(&mut commits);
        }
        assert!(commits.log().used_bytes().0 > RING * SECTOR as u64 / 2);
        freeze(&mut commits);
        commit(&mut commits);
        assert!(commits.log().needs_room(), "the checkpoint did not free its part of the log yet");
        commits.checkpoint_ended(true);
        commit(&mut commits);
        assert!(!commits.may_freeze(), "the log is nearly empty");
        while !commits.may_freeze() {
            commit(&mut commits);
        }
        assert!(commits.log().used_bytes().0 > RING * SECTOR as u64 / 2);
    }
}
