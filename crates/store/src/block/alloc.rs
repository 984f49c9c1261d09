//! The allocator: hands out free blocks, in one run where there is one, else the longest runs first.
//!
//! A page of the bitmap (128 MiB) is the unit of search; per page it remembers the longest run that a failed search
//! found, so that full or fragmented pages are not searched again until something in them is freed.

use super::bitmap::{Bitmap, PAGE_BLOCKS};
use super::extent::Extent;

/// Free space of a target.
#[derive(Debug)]
pub(crate) struct Allocator {
    taken: Bitmap,
    /// No run in the page is longer than this.
    longest: Vec<u64>,
    cursor: usize,
}

impl Allocator {
    /// An allocator for the blocks that `taken` does not have.
    pub(crate) fn new(taken: Bitmap) -> Allocator {
        let pages = taken.pages();
        Allocator { taken, longest: vec![PAGE_BLOCKS; pages], cursor: 0 }
    }

    /// Free blocks.
    pub(crate) fn free_blocks(&self) -> u64 {
        self.taken.blocks() - self.taken.used()
    }

    /// Number of free runs, and the length of the longest, in blocks.
    pub(crate) fn summary(&self) -> (u64, u64) {
        self.taken.free_summary()
    }

    /// Takes `want` blocks; `None`, with nothing taken, if there are not that many.
    pub(crate) fn alloc(&mut self, want: u64) -> Option<Vec<Extent>> {
        if want > self.free_blocks() {
            return None;
        }
        let mut extents: Vec<Extent> = Vec::new();
        let mut left = want;
        while left > 0 {
            let extent = self.find(left.min(PAGE_BLOCKS))?;
            self.taken.set(extent, true);
            left -= extent.len;
            match extents.last_mut() {
                Some(last) if last.end() == extent.start => last.len += extent.len,
                _ => extents.push(extent),
            }
        }
        Some(extents)
    }

    /// Gives blocks back.
    pub(crate) fn free(&mut self, extent: Extent) {
        let unexpected = self.taken.set(extent, false);
        debug_assert_eq!(unexpected, 0, "{extent:?} freed twice");
        for page in extent.start / PAGE_BLOCKS..=(extent.end() - 1) / PAGE_BLOCKS {
            self.longest[page as usize] = PAGE_BLOCKS;
        }
    }

    /// A run of `want` blocks, or the longest there is.
    fn find(&mut self, want: u64) -> Option<Extent> {
        let pages = self.taken.pages();
        for i in 0..pages {
            let page = (self.cursor + i) % pages;
            if self.longest[page] < want {
                continue;
            }
            match self.taken.find_free(page, want) {
                Some(found) if found.len == want => {
                    self.cursor = page;
                    return Some(found);
                }
                other => self.longest[page] = other.map_or(0, |e| e.len),
            }
        }
        // Each round makes one estimate exact, so this ends after at most as many rounds as there are pages.
        loop {
            let best = (0..pages).max_by_key(|&p| self.longest[p]).filter(|&p| self.longest[p] > 0)?;
            let found = self.taken.find_free(best, want);
            let len = found.map_or(0, |e| e.len);
            if len == self.longest[best] {
                return found;
            }
            self.longest[best] = len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::extent::total;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn never_hands_out_a_block_twice_and_fails_only_when_full(steps in proptest::collection::vec((1u64..5000, any::<bool>()), 1..100)) {
            let blocks = 70_000;
            let mut alloc = Allocator::new(Bitmap::new(blocks));
            let mut held: Vec<Extent> = Vec::new();
            let mut taken = vec![false; blocks as usize];
            for (want, release) in steps {
                if release && !held.is_empty() {
                    let extent = held.swap_remove(want as usize % held.len());
                    extent.blocks().for_each(|b| taken[b as usize] = false);
                    alloc.free(extent);
                    continue;
                }
                let free = alloc.free_blocks();
                match alloc.alloc(want) {
                    Some(extents) => {
                        prop_assert_eq!(total(&extents), want);
                        for b in extents.iter().flat_map(|e| e.blocks()) {
                            prop_assert!(!std::mem::replace(&mut taken[b as usize], true));
                        }
                        held.extend(extents);
                    }
                    None => prop_assert!(want > free),
                }
            }
        }
    }
}
