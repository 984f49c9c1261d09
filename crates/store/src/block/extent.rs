//! Runs of blocks, and lists of them.

use serde::{Deserialize, Serialize};

/// A run of blocks of the data region, counted in blocks from the region's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Extent {
    /// First block.
    pub(crate) start: u64,
    /// Number of blocks.
    pub(crate) len: u64,
}

impl Extent {
    /// First block after the run.
    pub(crate) fn end(self) -> u64 {
        self.start + self.len
    }

    /// The blocks.
    pub(crate) fn blocks(self) -> std::ops::Range<u64> {
        self.start..self.end()
    }
}

/// Appends a block to a list of runs. Extends the last run if the block follows it.
pub(crate) fn push_block(extents: &mut Vec<Extent>, block: u64) {
    match extents.last_mut() {
        Some(last) if last.end() == block => last.len += 1,
        _ => extents.push(Extent { start: block, len: 1 }),
    }
}

/// Number of blocks in a list of runs.
pub(crate) fn total(extents: &[Extent]) -> u64 {
    extents.iter().map(|e| e.len).sum()
}
