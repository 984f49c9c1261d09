//! The block allocator. An allocation returns one free run if a run is long enough. Otherwise it
//! returns several runs, the longest first.
//!
//! The unit of search is a page of the bitmap (128 MiB). When a search of a page fails, the
//! allocator remembers the page's longest free run. It does not search full or fragmented pages
//! again until a block in them is freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::bitmap::{Bitmap, PAGE_BLOCKS};
use super::extent::Extent;

/// The size of the reserve is the target's number of blocks divided by this number, limited to
/// [`RESERVE`].
const RESERVE_SHARE: u64 = 64;
/// Minimum and maximum size of the reserve, in blocks (64 KiB and 4 MiB).
const RESERVE: std::ops::RangeInclusive<u64> = 16..=1024;

/// Purpose of an allocation, which decides whether it may use the reserve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purse {
    /// User data.
    Ordinary,
    /// The node's own records and the freeing of space, which must also work on a full target.
    Reserve,
}

/// Counter of the free blocks that are not promised to a stage. The target's handle promises blocks
/// to new stages, so that a caller gets a stage without waiting for the target's thread. The
/// allocator subtracts the blocks of all other allocations. Any thread may use the counter.
#[derive(Debug)]
pub(crate) struct Room {
    blocks: AtomicU64,
    /// Number of blocks that ordinary allocations must leave free. The reserve is a limit for these
    /// allocations, not a fixed area, so fewer blocks than this may be free.
    reserve: u64,
    closed: AtomicBool,
}

impl Room {
    /// Promises `blocks` blocks if enough blocks are free and the target accepts writes. Returns
    /// whether it promised them.
    pub(crate) fn promise(&self, blocks: u64) -> bool {
        !self.closed.load(Ordering::SeqCst) && self.take(blocks, Purse::Ordinary)
    }

    /// Makes the counter refuse all further promises.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Returns the number of blocks that allocations with this purse must leave free.
    fn kept_from(&self, purse: Purse) -> u64 {
        match purse {
            Purse::Ordinary => self.reserve,
            Purse::Reserve => 0,
        }
    }

    fn take(&self, blocks: u64, purse: Purse) -> bool {
        let kept = self.kept_from(purse);
        let left = |free: u64| free.checked_sub(blocks).filter(|left| *left >= kept);
        self.blocks.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left).is_ok()
    }

    fn give_back(&self, blocks: u64) {
        self.blocks.fetch_add(blocks, Ordering::SeqCst);
    }
}

/// The allocator of a target's blocks.
#[derive(Debug)]
pub(crate) struct Allocator {
    taken: Bitmap,
    /// Upper bound of the length of the longest free run in each page, in blocks.
    longest: Vec<u64>,
    cursor: usize,
    /// Number of free blocks, without promised blocks that were not allocated yet.
    room: Arc<Room>,
}

impl Allocator {
    /// Creates an allocator of the blocks that are not in `taken`.
    pub(crate) fn new(taken: Bitmap) -> Allocator {
        let reserve = (taken.blocks() / RESERVE_SHARE).clamp(*RESERVE.start(), *RESERVE.end());
        Allocator::with_reserve(taken, reserve)
    }

    fn with_reserve(taken: Bitmap, reserve: u64) -> Allocator {
        let pages = taken.pages();
        let free = AtomicU64::new(taken.blocks() - taken.used());
        let room = Arc::new(Room { blocks: free, reserve, closed: AtomicBool::new(false) });
        Allocator { taken, longest: vec![PAGE_BLOCKS; pages], cursor: 0, room }
    }

    /// Returns the number of blocks that calls with this purse could allocate if `more` blocks
    /// became free.
    pub(crate) fn free_blocks(&self, purse: Purse, more: u64) -> u64 {
        (self.room.blocks.load(Ordering::SeqCst) + more).saturating_sub(self.room.kept_from(purse))
    }

    /// Returns the counter of free blocks, which can promise blocks to stages.
    pub(crate) fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// Returns the number of free runs, and the length of the longest run in blocks.
    pub(crate) fn summary(&self) -> (u64, u64) {
        self.taken.free_summary()
    }

    /// Allocates `want` blocks. Returns `None` and allocates nothing if too few blocks are free.
    pub(crate) fn alloc(&mut self, want: u64, purse: Purse) -> Option<Vec<Extent>> {
        self.room.take(want, purse).then(|| self.alloc_promised(want))
    }

    /// Allocates `want` promised blocks.
    ///
    /// # Panics
    /// If the blocks were not promised.
    pub(crate) fn alloc_promised(&mut self, want: u64) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        let mut left = want;
        while left > 0 {
            let extent = self.find(left.min(PAGE_BLOCKS)).expect("promised blocks are free");
            self.taken.set(extent, true);
            left -= extent.len;
            match extents.last_mut() {
                Some(last) if last.end() == extent.start => last.len += extent.len,
                _ => extents.push(extent),
            }
        }
        extents
    }

    /// Frees the blocks of a run.
    pub(crate) fn free(&mut self, extent: Extent) {
        let unexpected = self.taken.set(extent, false);
        debug_assert_eq!(unexpected, 0, "{extent:?} freed twice");
        for page in extent.start / PAGE_BLOCKS..=(extent.end() - 1) / PAGE_BLOCKS {
            self.longest[page as usize] = PAGE_BLOCKS;
        }
        self.room.give_back(extent.len);
    }

    /// Finds a free run of `want` blocks, or the longest free run if every run is shorter.
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
        // Each round makes one estimate exact, so the number of rounds is at most the number of
        // pages.
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
        fn allocations_never_overlap_and_fail_only_if_too_few_blocks_are_free(steps in proptest::collection::vec((1u64..5000, any::<bool>()), 1..100)) {
            let blocks = 70_000;
            let mut alloc = Allocator::with_reserve(Bitmap::new(blocks), 0);
            let mut held: Vec<Extent> = Vec::new();
            let mut taken = vec![false; blocks as usize];
            for (want, release) in steps {
                if release && !held.is_empty() {
                    let extent = held.swap_remove(want as usize % held.len());
                    extent.blocks().for_each(|b| taken[b as usize] = false);
                    alloc.free(extent);
                    continue;
                }
                let free = alloc.free_blocks(Purse::Ordinary, 0);
                prop_assert_eq!(free, blocks - total(&held));
                match alloc.alloc(want, Purse::Ordinary) {
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

    #[test]
    fn promised_blocks_are_not_allocated_to_other_calls() {
        let mut alloc = Allocator::with_reserve(Bitmap::new(100), 0);
        let room = Arc::clone(alloc.room());
        assert!(room.promise(60));
        assert!(!room.promise(41));
        assert_eq!((alloc.free_blocks(Purse::Ordinary, 0), alloc.alloc(41, Purse::Reserve)), (40, None));
        let others = alloc.alloc(40, Purse::Ordinary).unwrap();
        assert_eq!(total(&alloc.alloc_promised(60)), 60);
        others.into_iter().for_each(|e| alloc.free(e));
        room.close();
        assert!(!room.promise(1), "a target that refuses writes promises no blocks");
        assert_eq!(alloc.alloc(40, Purse::Ordinary).map(|e| total(&e)), Some(40));
    }

    #[test]
    fn ordinary_allocations_leave_the_reserve_free() {
        let mut alloc = Allocator::new(Bitmap::new(6400));
        assert_eq!(alloc.free_blocks(Purse::Ordinary, 0), 6300);
        assert!(!alloc.room().promise(6301));
        assert_eq!(alloc.alloc(6301, Purse::Ordinary), None);
        assert!(alloc.alloc(6300, Purse::Ordinary).is_some());
        assert_eq!(alloc.alloc(1, Purse::Ordinary), None);
        assert_eq!(alloc.free_blocks(Purse::Ordinary, 7), 7);
        let kept = alloc.alloc(60, Purse::Reserve).unwrap();
        // Now fewer blocks are free than the reserve has, as on a target that was filled by a
        // version without a reserve.
        assert_eq!((alloc.free_blocks(Purse::Ordinary, 7), alloc.free_blocks(Purse::Reserve, 7)), (0, 47));
        kept.into_iter().for_each(|e| alloc.free(e));
        assert_eq!(alloc.alloc(1, Purse::Ordinary), None);
    }
}
