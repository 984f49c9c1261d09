//! The extents of an object: the ranges of the object that have blocks in the store.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Result, StoreError};

/// Maximum number of ranges in one [`ObjectExtents`].
pub const MAX_EXTENTS: usize = 4096;

/// Result of [`StoreCalls::extents`](crate::StoreCalls::extents): the ranges of an object that have
/// blocks in the store. All other bytes before `end` are holes, which read as zeros.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectExtents {
    /// The ranges, in bytes and in ascending order. They neither overlap nor touch. Each starts and
    /// ends at a block boundary, or at a boundary of the requested range, or at the object's end.
    pub ranges: Vec<Range<u64>>,
    /// Offset up to which the answer is complete. It is the end of the requested range, unless the
    /// answer would be too large. The caller then continues at this offset, which is greater than the
    /// start of the requested range.
    pub end: u64,
    /// Size of the whole object, in bytes.
    pub object_size: u64,
}

impl ObjectExtents {
    /// Checks the answer to a query of `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the answer violates the rules of its fields.
    pub fn check(&self, offset: u64, len: u64) -> Result<()> {
        let wanted = offset..offset.saturating_add(len);
        let makes_progress = wanted.is_empty() || self.end > wanted.start;
        let stop = self.end.min(self.object_size);
        let mut last = None;
        let is_ordered = self.ranges.iter().all(|range| {
            let follows = last.replace(range.end).is_none_or(|last| last < range.start);
            follows && wanted.start <= range.start && range.start < range.end && range.end <= stop
        });
        if makes_progress && self.end <= wanted.end && is_ordered && self.ranges.len() <= MAX_EXTENTS {
            return Ok(());
        }
        let what = format!("list of the extents of bytes {}..{} of an object", wanted.start, wanted.end);
        let detail = "it is not in ascending order, or does not match the requested range".to_owned();
        Err(StoreError::Corrupt { what, detail })
    }
}

/// Collects the extents of an object for one answer. The caller adds ranges in ascending order.
#[derive(Debug)]
pub struct ExtentsPage {
    /// The requested range, up to the object's end.
    wanted: Range<u64>,
    found: ObjectExtents,
    is_full: bool,
}

impl ExtentsPage {
    /// Starts the answer to a query of `len` bytes at `offset`. Without further calls, the answer
    /// says that the whole range is a hole.
    #[must_use]
    pub fn new(offset: u64, len: u64, object_size: u64) -> ExtentsPage {
        let end = offset.saturating_add(len);
        let wanted = offset.min(object_size)..end.min(object_size);
        let found = ObjectExtents { ranges: Vec::new(), end, object_size };
        ExtentsPage { wanted, found, is_full: false }
    }

    /// Returns the requested range, in bytes, up to the object's end.
    #[must_use]
    pub fn wanted(&self) -> Range<u64> {
        self.wanted.clone()
    }

    /// Adds a range that has blocks. Bytes outside the requested range do not count. Returns `false`
    /// if the answer is full: it then ends before the range.
    ///
    /// # Panics
    /// If the range starts before the end of a range that was added before.
    pub fn add(&mut self, range: Range<u64>) -> bool {
        let range = range.start.max(self.wanted.start)..range.end.min(self.wanted.end);
        if self.is_full || range.is_empty() {
            return !self.is_full;
        }
        let count = self.found.ranges.len();
        match self.found.ranges.last_mut() {
            Some(last) if last.end >= range.start => {
                assert!(last.end == range.start, "ranges are added in ascending order");
                last.end = range.end;
            }
            _ if count == MAX_EXTENTS => {
                self.found.end = range.start;
                self.is_full = true;
            }
            _ => self.found.ranges.push(range),
        }
        !self.is_full
    }

    /// Ends the answer at offset `end`, unless it ends before. All ranges before `end` were added.
    pub fn end_at(&mut self, end: u64) {
        self.found.end = self.found.end.min(end);
        self.is_full = true;
    }

    /// Returns the answer.
    #[must_use]
    pub fn finish(self) -> ObjectExtents {
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_merges_ranges_that_touch_and_ends_at_the_object() {
        let mut page = ExtentsPage::new(100, 10_000, 9000);
        assert_eq!(page.wanted(), 100..9000);
        assert!(page.add(0..50) && page.add(60..4096) && page.add(4096..8192) && page.add(8500..12_288));
        let found = page.finish();
        assert_eq!((&found.ranges[..], found.end), (&[100..8192, 8500..9000][..], 10_100));
        found.check(100, 10_000).unwrap();
    }

    #[test]
    fn a_full_answer_ends_before_the_next_range() {
        let mut page = ExtentsPage::new(0, u64::MAX, u64::MAX);
        let range = |i: u64| 8192 * i..8192 * i + 4096;
        let last = MAX_EXTENTS as u64;
        assert!((0..last).all(|i| page.add(range(i))));
        assert!(!page.add(range(last)) && !page.add(range(last + 1)));
        let found = page.finish();
        assert_eq!((found.ranges.len(), found.end), (MAX_EXTENTS, 8192 * last));
        found.check(0, u64::MAX).unwrap();
    }

    #[test]
    fn an_answer_that_does_not_match_the_query_is_refused() {
        let good = ObjectExtents { ranges: vec![0..4096, 8192..9000], end: 20_000, object_size: 9000 };
        good.check(0, 20_000).unwrap();
        let mut bad = vec![good.clone(); 5];
        bad[0].ranges[1] = 4096..8192;
        bad[1].ranges[1] = 8192..9001;
        bad[2].ranges.swap(0, 1);
        bad[3].end = 8999;
        bad[4].end = 20_001;
        bad.iter().for_each(|bad| assert!(bad.check(0, 20_000).is_err(), "{bad:?}"));
        assert!(good.check(1, 19_999).is_err());
        let stuck = ObjectExtents { ranges: Vec::new(), end: 5, object_size: 9000 };
        assert!(stuck.check(5, 10).is_err());
    }
}
