//! The block allocator. An allocation returns one free run if a run is long enough. Otherwise it
//! returns several runs, the longest first.
//!
//! The unit of search is a page of the bitmap (128 MiB). The allocator knows an upper bound of the
//! longest free run in each page. It searches a page only if the bound permits a run that is long
//! enough, and it searches few pages per run, so an allocation costs about the same on any target.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::bitmap::{Bitmap, PAGE_BLOCKS};
use super::extent::Extent;
use super::page_bounds::PageBounds;

/// The size of the reserve is the target's number of blocks divided by this number, limited to
/// [`RESERVE`].
const RESERVE_SHARE: u64 = 64;
/// Minimum and maximum size of the reserve, in blocks (64 KiB and 4 MiB).
const RESERVE: std::ops::RangeInclusive<u64> = 16..=1024;

/// Maximum number of pages that are searched for one run, or for a summary of the free runs.
const SEARCHES: usize = 16;

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
    longest: PageBounds,
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
        let free = AtomicU64::new(taken.blocks() - taken.used());
        let room = Arc::new(Room { blocks: free, reserve, closed: AtomicBool::new(false) });
        let longest = PageBounds::new((0..taken.pages()).map(|page| taken.free_in(page)));
        Allocator { taken, longest, cursor: 0, room }
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

    /// Returns the number of free runs, and the length of the longest run in blocks. The length is an
    /// upper bound if the bounds of many pages are not exact. Runs end at page boundaries.
    pub(crate) fn summary(&mut self) -> (u64, u64) {
        for _ in 0..SEARCHES {
            let Some(best) = self.longest.best() else { break };
            let bound = self.longest.get(best);
            if self.search(best, PAGE_BLOCKS).is_some_and(|found| found.len == bound) {
                break;
            }
        }
        let longest = self.longest.best().map_or(0, |best| self.longest.get(best));
        (self.taken.free_runs(), longest)
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
            let page = (extent.start / PAGE_BLOCKS) as usize;
            self.longest.set(page, self.longest.get(page).min(self.taken.free_in(page)));
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
        let mut at = extent.start;
        while at < extent.end() {
            let page = at / PAGE_BLOCKS;
            let end = extent.end().min((page + 1) * PAGE_BLOCKS);
            let run = self.taken.free_run_around(Extent { start: at, len: end - at });
            let page = page as usize;
            if run > self.longest.get(page) {
                self.longest.set(page, run);
            }
            at = end;
        }
        self.room.give_back(extent.len);
    }

    /// Finds a free run of `want` blocks, or the longest free run if every run is shorter. If the
    /// bounds of many pages are not exact, gives up after [`SEARCHES`] pages and returns the longest
    /// run in them.
    fn find(&mut self, want: u64) -> Option<Extent> {
        let mut longest: Option<Extent> = None;
        for _ in 0..SEARCHES {
            let page = self.longest.first(self.cursor, want).or_else(|| self.longest.best())?;
            let bound = self.longest.get(page).min(want);
            let Some(found) = self.search(page, want) else { continue };
            if found.len == want {
                self.cursor = page;
            }
            if found.len == bound {
                return Some(found);
            }
            longest = longest.filter(|longest| longest.len >= found.len).or(Some(found));
        }
        longest
    }

    /// Returns the first run of `want` free blocks in a page. If every run is shorter, returns the
    /// longest run, whose length is then the bound of the page.
    fn search(&mut self, page: usize, want: u64) -> Option<Extent> {
        // No run is longer than the bound, so the search ends at the first run with this length.
        let possible = want.min(self.longest.get(page));
        if possible == 0 {
            return None;
        }
        let found = self.taken.find_free(page, possible);
        let len = found.map_or(0, |found| found.len);
        if len < possible {
            self.longest.set(page, len);
        }
        found
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

    /// The summary stays exact on a target whose free blocks are scattered, and a long run is found
    /// among them.
    #[test]
    fn a_fragmented_target_finds_its_long_runs() {
        let pages = 40;
        let mut alloc = Allocator::with_reserve(Bitmap::new(pages * PAGE_BLOCKS), 0);
        assert_eq!(alloc.summary(), (pages, PAGE_BLOCKS));
        alloc.alloc(pages * PAGE_BLOCKS, Purse::Ordinary).unwrap();
        assert_eq!(alloc.summary(), (0, 0));
        for start in (0..pages * PAGE_BLOCKS).step_by(4) {
            alloc.free(Extent { start, len: 1 });
        }
        let runs = pages * PAGE_BLOCKS / 4;
        assert_eq!(alloc.summary(), (runs, 1));
        // Joins four runs.
        let long = Extent { start: 17 * PAGE_BLOCKS + 101, len: 11 };
        for start in [101, 105, 109] {
            alloc.free(Extent { start: 17 * PAGE_BLOCKS + start, len: 3 });
        }
        assert_eq!(alloc.summary(), (runs - 3, 13));
        let found = alloc.alloc(12, Purse::Ordinary).unwrap();
        assert!(found.len() == 1 && found[0].start < long.end() && found[0].end() > long.start, "{found:?}");
        assert_eq!(alloc.summary(), (runs - 3, 1));
        // Two pieces, the longest first: every run has one block.
        assert_eq!(alloc.alloc(2, Purse::Ordinary).map(|e| e.len()), Some(2));
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
