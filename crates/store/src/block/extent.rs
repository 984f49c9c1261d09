//! Extents, which are runs of adjacent blocks, and lists of extents.

use serde::{Deserialize, Serialize};

/// A run of adjacent blocks in the data area. Block numbers count from the start of the data area.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Extent {
    /// Number of the first block.
    pub(crate) start: u64,
    /// Number of blocks.
    pub(crate) len: u64,
}

impl Extent {
    /// Returns the number of the first block after the run.
    pub(crate) fn end(self) -> u64 {
        self.start + self.len
    }

    /// Returns the numbers of the blocks.
    pub(crate) fn blocks(self) -> std::ops::Range<u64> {
        self.start..self.end()
    }
}

/// Appends a block to a list of runs. Extends the last run if the block directly follows that run.
pub(crate) fn push_block(extents: &mut Vec<Extent>, block: u64) {
    match extents.last_mut() {
        Some(last) if last.end() == block => last.len += 1,
        _ => extents.push(Extent { start: block, len: 1 }),
    }
}

/// Returns the total number of blocks in a list of runs.
pub(crate) fn total(extents: &[Extent]) -> u64 {
    extents.iter().map(|e| e.len).sum()
}
