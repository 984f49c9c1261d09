//! [`BlockQuarantine`]: freed blocks that must not be reused yet.

use std::collections::VecDeque;

use super::extent::{Extent, total};

/// Freed blocks that must not be reused yet. They count as allocated.
///
/// Recovery may still compare the blocks with the checksums of their old content, and reads may
/// still read them.
#[derive(Debug, Default)]
pub(super) struct BlockQuarantine {
    freed: VecDeque<FreedBlocks>,
    blocks: u64,
}

/// The blocks that the transactions of one group have freed.
#[derive(Debug)]
struct FreedBlocks {
    extents: Vec<Extent>,
    /// The blocks must not be reused before the log states that all sectors before this sequence
    /// number were flushed.
    end: u64,
    /// The blocks must not be reused before all reads that started in this period or earlier have
    /// ended.
    period: u64,
}

impl BlockQuarantine {
    /// Number of blocks in quarantine.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Adds the blocks that a group has freed. The group ends before sector `end`, and reads that
    /// started in `period` or earlier may still read the blocks.
    pub(super) fn add(&mut self, extents: Vec<Extent>, end: u64, period: u64) {
        let is_last = self.freed.back().is_none_or(|last| last.end < end && last.period < period);
        assert!(is_last, "groups free blocks in their order: {end}, {period}, {self:?}");
        self.blocks += total(&extents);
        self.freed.push_back(FreedBlocks { extents, end, period });
    }

    /// Removes the blocks that may be reused, and returns them. `witnessed` is the sector before
    /// which all sectors were flushed, according to a durable sector, and `oldest` is the period of
    /// the oldest read in progress.
    pub(super) fn release(&mut self, witnessed: u64, oldest: Option<u64>) -> Vec<Extent> {
        let usable = |q: &&FreedBlocks| q.end <= witnessed && oldest.is_none_or(|o| o > q.period);
        let count = self.freed.iter().take_while(usable).count();
        let released: Vec<Extent> = self.freed.drain(..count).flat_map(|freed| freed.extents).collect();
        self.blocks -= total(&released);
        released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_leave_the_quarantine_when_the_log_and_the_reads_no_longer_need_them() {
        let extent = |start| Extent { start, len: 10 };
        let mut quarantine = BlockQuarantine::default();
        for (n, end) in [(0, 8), (1, 16), (2, 24)] {
            quarantine.add(vec![extent(100 * n)], end, n);
        }
        assert_eq!(quarantine.blocks(), 30);
        assert_eq!(quarantine.release(7, None), []);
        assert_eq!(quarantine.release(16, Some(1)), [extent(0)], "a read of period 1 is in progress");
        assert_eq!(quarantine.release(16, None), [extent(100)]);
        assert_eq!((quarantine.release(100, Some(3)), quarantine.blocks()), (vec![extent(200)], 0));
    }
}
