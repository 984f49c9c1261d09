//! [`BulkBlocks`]: the blocks of bulk data, of which a later op cannot change a part.

use std::collections::BTreeSet;
use std::ops::Range;

use base::block::BLOCK;
use wire::Error as E;

use crate::Result;

/// Payloads of more than this size, in bytes, are bulk data. A node may send them to the store
/// before their transaction.
const BULK_MIN: u64 = 2 << 20;

/// Ops that an engine refuses after an op with bulk data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BulkRule {
    /// Ops that change a part of a block of bulk data.
    #[default]
    Parts,
    /// Ops that change a part of a block of bulk data, or whole blocks of it.
    Blocks,
    /// No ops. This is allowed for payloads of up to 4 MiB, and for data before the first stripe
    /// boundary of an object with an erasure code.
    Nothing,
}

/// Numbers of the blocks that consist of bulk data of the change in progress.
#[derive(Debug, Default)]
pub(super) struct BulkBlocks {
    numbers: BTreeSet<u64>,
    rule: BulkRule,
}

impl BulkBlocks {
    pub(super) fn new(rule: BulkRule) -> BulkBlocks {
        BulkBlocks { numbers: BTreeSet::new(), rule }
    }

    /// Records that the payload of the change is written to `range`, in bytes, of an object of
    /// `size` bytes.
    pub(super) fn fill(&mut self, range: Range<u64>, size: u64) {
        if range.end - range.start > BULK_MIN && self.rule != BulkRule::Nothing {
            self.numbers = whole_blocks(&range, size).collect();
        }
    }

    /// Records that another op changes `range`, in bytes, of an object of `size` bytes.
    ///
    /// # Errors
    /// [`BadRequest`](E::BadRequest) if the rule forbids the change.
    pub(super) fn change(&mut self, range: Range<u64>, size: u64) -> Result<()> {
        let is_cut = |at: u64| !at.is_multiple_of(BLOCK) && self.numbers.contains(&(at / BLOCK));
        if is_cut(range.start) || (range.end < size && is_cut(range.end)) {
            let what = "an op changes a part of a block of bulk data that the same change writes; send the op in a separate change";
            return Err(E::BadRequest(what.into()).into());
        }
        for block in whole_blocks(&range, size) {
            if self.numbers.remove(&block) && self.rule == BulkRule::Blocks {
                let what = "an op changes blocks of bulk data that the same change writes; send the op in a separate change";
                return Err(E::BadRequest(what.into()).into());
            }
        }
        Ok(())
    }

    /// Records that the object is truncated to `size` bytes.
    ///
    /// # Errors
    /// The same errors as [`BulkBlocks::change`].
    pub(super) fn truncate(&mut self, size: u64, old_size: u64) -> Result<()> {
        if size < old_size {
            self.change(size..old_size, old_size)?;
        }
        Ok(())
    }

    /// Records that the object has no data any more.
    pub(super) fn clear(&mut self) {
        self.numbers.clear();
    }
}

/// Returns the numbers of the blocks that a write of `range` replaces as a whole. The last block of
/// the object may be shorter than other blocks.
fn whole_blocks(range: &Range<u64>, size: u64) -> Range<u64> {
    let end = if range.end >= size { range.end.div_ceil(BLOCK) } else { range.end / BLOCK };
    range.start.div_ceil(BLOCK)..end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_of_bulk_data_can_be_changed() {
        let end = (3 << 20) + 100;
        let filled = || {
            let mut blocks = BulkBlocks::default();
            blocks.fill(50..end, 0);
            blocks
        };
        let is_refused = |range: Range<u64>| filled().change(range, end).is_err();
        assert!(is_refused(5000..5001) && is_refused(4096..5000) && is_refused(end - 1..end));
        assert!(!is_refused(60..70), "the first block is not written as a whole");
        assert!(!is_refused(4096..8192) && !is_refused(3 << 20..end) && !is_refused(4 << 20..(4 << 20) + 1));
        assert!(filled().truncate(5000, end).is_err() && filled().truncate(4096, end).is_ok());
        assert!(filled().truncate(end + 1, end).is_ok());
        let mut overwritten = filled();
        overwritten.change(4096..8192, end).unwrap();
        overwritten.change(5000..5001, end).unwrap();
        let filled_under = |rule| {
            let mut blocks = BulkBlocks::new(rule);
            blocks.fill(50..end, 0);
            blocks
        };
        assert!(filled_under(BulkRule::Blocks).change(4096..8192, end).is_err());
        assert!(filled_under(BulkRule::Nothing).change(5000..5001, end).is_ok());
        let mut small = BulkBlocks::default();
        small.fill(0..BULK_MIN, 0);
        small.change(1..2, BULK_MIN).unwrap();
    }
}
