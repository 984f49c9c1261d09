//! [`Uses`]: what each page of an arena is used for. The first use of a page is final for the
//! lifetime of the arena.
//!
//! A page has one of two uses. Either an allocator hands out the page's bytes as slices, or code
//! copies bytes into and out of the page while other threads or processes may change them. A page
//! never has both uses: a copy into a slice's bytes would break the slice's promise that its bytes
//! do not change. Because a decision is final, a copy needs no lock.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

/// Size in bytes of a page, for which the use is decided as a whole.
const PAGE: usize = 4096;

const UNDECIDED: u8 = 0;
const COPIED: u8 = 1;
const ALLOCATED: u8 = 2;

/// The use of each page of one arena.
#[derive(Debug)]
pub(super) struct Uses(Box<[AtomicU8]>);

impl Uses {
    /// Creates the record for an arena of `len` bytes. The use of all pages is undecided.
    pub(super) fn new(len: usize) -> Uses {
        Uses((0..len.div_ceil(PAGE)).map(|_| AtomicU8::new(UNDECIDED)).collect())
    }

    /// Claims the pages of `range` for copies. Returns `false` if an allocator owns one of the
    /// pages. After the result `true`, no allocator can own any of the pages. The range must be
    /// inside the arena.
    pub(super) fn claim_for_copies(&self, range: Range<usize>) -> bool {
        self.pages(range).iter().all(|page| {
            let mut now = page.load(Ordering::Relaxed);
            if now == UNDECIDED {
                now = decide(page, COPIED);
            }
            now == COPIED
        })
    }

    /// Claims the pages of `range` for the caller, an allocator. Returns `false` if one of the
    /// pages is already used. In this case, the pages before the first used page become unusable.
    /// The range must be inside the arena.
    pub(super) fn claim_for_allocator(&self, range: Range<usize>) -> bool {
        self.pages(range).iter().all(|page| {
            page.compare_exchange(UNDECIDED, ALLOCATED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
    }

    fn pages(&self, range: Range<usize>) -> &[AtomicU8] {
        if range.is_empty() {
            return &[];
        }
        &self.0[range.start / PAGE..range.end.div_ceil(PAGE)]
    }
}

/// Decides the use of a page, unless another thread has decided it first. Returns the decision.
fn decide(page: &AtomicU8, wanted: u8) -> u8 {
    match page.compare_exchange(UNDECIDED, wanted, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => wanted,
        Err(decided) => decided,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_use_of_a_page_is_final() {
        let uses = Uses::new(4 * PAGE);
        assert!(uses.claim_for_copies(0..1), "a copy of one byte claims the whole page");
        assert!(uses.claim_for_copies(0..PAGE), "copies may overlap");
        assert!(!uses.claim_for_allocator(100..200), "the first page is copied");
        assert!(uses.claim_for_allocator(PAGE..2 * PAGE));
        assert!(!uses.claim_for_allocator(PAGE..2 * PAGE), "two allocators cannot own the same page");
        assert!(!uses.claim_for_copies(PAGE - 1..PAGE + 1), "a copy may not touch an allocator's page");
        assert!(uses.claim_for_copies(PAGE..PAGE), "an empty range claims no page");
        assert!(uses.claim_for_copies(2 * PAGE..4 * PAGE));
    }
}
