//! The space of the index: [`IndexUsage`] estimates how many bytes of its storage the index uses,
//! and [`IndexSpace`] tells how many changes fit.

use base::block::BLOCK;

/// The use is measured again when the content has changed by this share of the storage, as a
/// divisor. A measurement reads the whole index.
const CHANGED: u64 = 32;
/// Number of bytes of storage that an added byte of keys and values takes at most. Keys that are
/// added in ascending order may leave pages half full, and long keys need as many bytes in inner
/// pages as in leaves.
pub(super) const SPREAD: u64 = 4;
/// Minimum size of the index reserve, in bytes.
const RESERVE_MIN: u64 = 256 << 10;

/// Estimate of the bytes of storage that the index uses. A measurement is exact, but reads the whole
/// index. Between measurements, the estimate follows the number of bytes of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IndexUsage {
    /// Bytes in use at the last measurement.
    measured: u64,
    /// Bytes of keys and values that were added since, minus the bytes that were removed.
    growth: i64,
    /// Bytes of keys and values that were added or removed since.
    changed: u64,
    /// Whether `measured` is only an upper limit.
    is_limit: bool,
}

impl IndexUsage {
    /// The use that was measured.
    pub(super) fn of(bytes: u64) -> IndexUsage {
        IndexUsage { measured: bytes, growth: 0, changed: 0, is_limit: false }
    }

    /// A use of at most `bytes`.
    pub(super) fn at_most(bytes: u64) -> IndexUsage {
        IndexUsage { measured: bytes, growth: 0, changed: 0, is_limit: true }
    }

    /// Records that an entry with `after` bytes of key and value has replaced one with `before`
    /// bytes. An entry that does not exist has 0 bytes.
    pub(super) fn replace(&mut self, before: usize, after: usize) {
        self.growth += after as i64 - before as i64;
        self.changed += before.max(after) as u64;
    }

    /// Returns the estimate, in bytes. Removed bytes count only at the next measurement, because their
    /// pages may stay in use.
    pub(super) fn bytes(&self) -> u64 {
        self.measured.saturating_add(SPREAD * self.growth.max(0) as u64)
    }

    /// Whether the use should be measured: the storage of `total` bytes seems to be more than three
    /// quarters full, and the content has changed since the last measurement. A replaced page counts
    /// as used until the second commit after its replacement, so replaced entries are changes, too.
    /// If the storage seems to be more than seven eighths full, any change counts, because calls may
    /// be refused.
    pub(super) fn is_worth_measuring(&self, total: u64) -> bool {
        let tolerated = if self.bytes() > total / 8 * 7 { 0 } else { total / CHANGED };
        let has_changed = self.is_limit || self.changed > tolerated;
        self.bytes() > total / 4 * 3 && has_changed
    }
}

/// Total and free space of the index, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IndexSpace {
    pub(crate) total: u64,
    pub(crate) free: u64,
    /// Whether a measurement may find more free space.
    pub(crate) may_be_more: bool,
}

impl IndexSpace {
    /// Returns the size of the index reserve, in bytes: space for the node's own records, for freeing
    /// space, and for checkpoints, which write new copies of pages.
    pub(crate) fn reserve(&self) -> u64 {
        (self.total / 16).max(RESERVE_MIN)
    }

    /// Returns the number of changed keys for which a commit certainly needs at most `room` bytes. A
    /// commit writes a new copy of each page that it changes.
    pub(crate) fn keys_in(&self, room: u64) -> usize {
        if self.total - self.free <= room { usize::MAX } else { (room / BLOCK) as usize }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_use_is_measured_only_if_little_is_free_and_the_content_has_changed() {
        let total = 1 << 20;
        let mut usage = IndexUsage::of(0);
        usage.replace(0, 150 << 10);
        assert_eq!((usage.bytes(), usage.is_worth_measuring(total)), (600 << 10, false));
        usage.replace(0, 100 << 10);
        assert_eq!((usage.bytes(), usage.is_worth_measuring(total)), (1000 << 10, true));
        for (before, after) in [(20 << 10, 0), (20 << 10, 20 << 10), (0, 20 << 10)] {
            let mut usage = IndexUsage::of(800 << 10);
            usage.replace(before, after);
            assert!(!usage.is_worth_measuring(total));
            usage.replace(before, after);
            assert!(usage.is_worth_measuring(total), "{before} {after}");
            assert_eq!(usage.bytes(), (800 << 10) + if before == 0 { 160 << 10 } else { 0 });
        }
        let mut usage = IndexUsage::of(900 << 10);
        assert!(!usage.is_worth_measuring(total));
        usage.replace(0, 1);
        assert!(usage.is_worth_measuring(total));
        assert!(IndexUsage::at_most(800 << 10).is_worth_measuring(total));
        assert!(!IndexUsage::at_most(700 << 10).is_worth_measuring(total));
    }

    #[test]
    fn the_number_of_keys_is_limited_only_if_a_copy_of_the_index_does_not_fit() {
        let space = |free| IndexSpace { total: 1000 * BLOCK, free: free * BLOCK, may_be_more: false };
        assert_eq!(space(700).keys_in(300 * BLOCK), usize::MAX);
        assert_eq!(space(600).keys_in(300 * BLOCK), 300);
        assert_eq!(space(600).keys_in(0), 0);
    }
}
