//! Staged extents: extents that are allocated and written but that no object refers to yet.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::collections::{HashMap, HashSet};

use super::extent::{Extent, total};
use super::messages::ReplySender;
use crate::StageId;

/// State of one staged block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StagedBlock {
    /// No bytes were written to the block.
    Blank,
    /// The block was written, or its write is in progress. The value is the block's checksum.
    Written(u32),
    /// A transaction has named the block.
    Taken,
}

/// State of a stage.
#[derive(Debug)]
pub(crate) struct Stage {
    /// Requested length, in bytes.
    pub(crate) len: u64,
    pub(crate) extents: Vec<Extent>,
    pub(crate) blocks: Vec<StagedBlock>,
    /// Ids of the writes that have not completed.
    pub(crate) in_flight: HashSet<u64>,
    pub(crate) released: bool,
    /// Number of queued transactions that name the stage.
    pub(crate) users: usize,
}

impl Stage {
    pub(crate) fn new(len: u64, extents: Vec<Extent>) -> Stage {
        let blocks = vec![StagedBlock::Blank; total(&extents) as usize];
        Stage { len, extents, blocks, in_flight: HashSet::default(), released: false, users: 0 }
    }

    /// Returns the runs of blocks of the data area that contain blocks `first..first + count` of
    /// the stage, in the order of the stage.
    pub(crate) fn runs(&self, first: u64, count: u64) -> Vec<Extent> {
        let mut runs = Vec::new();
        let (mut skip, mut left) = (first, count);
        for extent in &self.extents {
            if skip >= extent.len {
                skip -= extent.len;
                continue;
            }
            let len = (extent.len - skip).min(left);
            if len > 0 {
                runs.push(Extent { start: extent.start + skip, len });
            }
            (skip, left) = (0, left - len);
        }
        runs
    }

    /// Returns the blocks that no transaction has named.
    pub(crate) fn unnamed(&self) -> Vec<Extent> {
        let mut unnamed = Vec::new();
        let blocks = self.extents.iter().flat_map(|e| e.blocks());
        for (block, state) in blocks.zip(&self.blocks) {
            if *state != StagedBlock::Taken {
                super::extent::push_block(&mut unnamed, block);
            }
        }
        unnamed
    }
}

/// A `stage_write` in progress.
#[derive(Debug)]
pub(crate) struct StageWrite {
    pub(crate) stage: u64,
    pub(crate) left: usize,
    pub(crate) reply: ReplySender,
}

/// A call that waits until enough blocks for a stage are free.
#[derive(Debug)]
pub(crate) struct WaitingStage {
    /// Requested length, in bytes.
    pub(crate) len: u64,
    /// Number of times that the call has waited for blocks.
    pub(crate) parked: u32,
    pub(crate) reply: ReplySender,
}

/// The stages, the writes to them, and the calls that wait for blocks.
#[derive(Debug, Default)]
pub(crate) struct StageTable {
    stages: HashMap<u64, Stage>,
    writes: HashMap<u64, StageWrite>,
    waiting: VecDeque<WaitingStage>,
    /// The highest stage number assigned so far. The target's handle also assigns stage numbers.
    last: Arc<AtomicU64>,
}

impl StageTable {
    /// Returns the highest stage number assigned so far.
    pub(crate) fn last(&self) -> &Arc<AtomicU64> {
        &self.last
    }

    /// Adds a stage. Returns its number.
    pub(crate) fn add(&mut self, stage: Stage) -> StageId {
        let id = next_stage(&self.last);
        self.insert(id, stage);
        id
    }

    /// Adds a stage that already has a number.
    pub(crate) fn insert(&mut self, id: StageId, stage: Stage) {
        self.stages.insert(id.0, stage);
    }

    pub(crate) fn get(&self, id: u64) -> Option<&Stage> {
        self.stages.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: u64) -> Option<&mut Stage> {
        self.stages.get_mut(&id)
    }

    /// Returns the numbers of all stages.
    pub(crate) fn ids(&self) -> Vec<u64> {
        self.stages.keys().copied().collect()
    }

    /// Removes a stage that was released and that nothing uses. Returns its blocks that no
    /// transaction has named.
    pub(crate) fn remove_unused(&mut self, id: u64) -> Vec<Extent> {
        let is_unused = |stage: &&Stage| stage.released && stage.in_flight.is_empty() && stage.users == 0;
        match self.stages.get(&id).filter(is_unused).map(Stage::unnamed) {
            Some(unnamed) => {
                self.stages.remove(&id);
                unnamed
            }
            None => Vec::new(),
        }
    }

    /// Number of blocks in stages that were not released and that no transaction has named.
    pub(crate) fn staged_blocks(&self) -> u64 {
        self.stages.values().filter(|stage| !stage.released).map(|stage| total(&stage.unnamed())).sum()
    }

    /// Adds a write to a stage.
    pub(crate) fn add_write(&mut self, number: u64, write: StageWrite) {
        self.writes.insert(number, write);
    }

    /// Counts the completed request `io` of a write. Returns the stage, and the sender of the reply
    /// if this was the last request of the write.
    pub(crate) fn write_completed(&mut self, number: u64, io: u64) -> Option<(u64, Option<ReplySender>)> {
        let write = self.writes.get_mut(&number)?;
        write.left -= 1;
        let (stage, is_last) = (write.stage, write.left == 0);
        if let Some(stage) = self.stages.get_mut(&stage) {
            stage.in_flight.remove(&io);
        }
        let reply = if is_last { self.writes.remove(&number).map(|write| write.reply) } else { None };
        Some((stage, reply))
    }

    /// Whether calls wait for blocks.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Adds a call that waits for blocks.
    pub(crate) fn wait(&mut self, call: WaitingStage) {
        self.waiting.push_back(call);
    }

    /// Takes all calls that wait for blocks.
    pub(crate) fn take_waiting(&mut self) -> VecDeque<WaitingStage> {
        std::mem::take(&mut self.waiting)
    }
}

/// Returns an unused stage number.
pub(crate) fn next_stage(last: &AtomicU64) -> StageId {
    StageId(last.fetch_add(1, Ordering::Relaxed) + 1)
}
