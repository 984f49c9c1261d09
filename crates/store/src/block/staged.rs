//! Staged extents: extents that are allocated and written but that no object refers to yet.

use std::sync::atomic::{AtomicU64, Ordering};

use base::collections::HashSet;

use super::extent::Extent;
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
        let blocks = vec![StagedBlock::Blank; super::extent::total(&extents) as usize];
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

/// Returns an unused stage number.
pub(crate) fn next_stage(last: &AtomicU64) -> StageId {
    StageId(last.fetch_add(1, Ordering::Relaxed) + 1)
}
