//! The allocation bitmap: one bit per block, in pages that the index stores.

use bytes::Bytes;

use super::extent::Extent;

/// Number of blocks per bitmap page. A page has 4 KiB, so it covers 128 MiB of data.
pub(crate) const PAGE_BLOCKS: u64 = 32_768;
const PAGE_WORDS: usize = (PAGE_BLOCKS / 64) as usize;

/// A set of blocks, one bit per block. The last page may have more bits than there are blocks;
/// these extra bits are always set.
#[derive(Debug, Clone)]
pub(crate) struct Bitmap {
    words: Vec<u64>,
    blocks: u64,
    /// Number of runs of free blocks. Runs end at page boundaries.
    free_runs: u64,
    /// Number of free blocks in each page.
    free: Vec<u16>,
    dirty: Vec<bool>,
}

impl Bitmap {
    /// Creates an empty set for blocks `0..blocks`.
    pub(crate) fn new(blocks: u64) -> Bitmap {
        let pages = blocks.div_ceil(PAGE_BLOCKS) as usize;
        let words = vec![0; pages * PAGE_WORDS];
        let (free_runs, free, dirty) = (pages as u64, vec![PAGE_BLOCKS as u16; pages], vec![false; pages]);
        let mut bitmap = Bitmap { words, blocks, free_runs, free, dirty };
        for block in blocks..pages as u64 * PAGE_BLOCKS {
            bitmap.words[(block / 64) as usize] |= 1 << (block % 64);
            bitmap.free[pages - 1] -= 1;
        }
        bitmap
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the number of blocks in the set.
    pub(crate) fn used(&self) -> u64 {
        self.blocks - self.free.iter().map(|free| u64::from(*free)).sum::<u64>()
    }

    pub(crate) fn pages(&self) -> usize {
        self.dirty.len()
    }

    pub(crate) fn contains(&self, block: u64) -> bool {
        self.words[(block / 64) as usize] >> (block % 64) & 1 == 1
    }

    /// Whether all blocks of the run have a bit in the bitmap.
    pub(crate) fn covers(&self, extent: Extent) -> bool {
        extent.start.checked_add(extent.len).is_some_and(|end| end <= self.blocks)
    }

    /// Returns the number of runs of free blocks. Runs end at page boundaries.
    pub(crate) fn free_runs(&self) -> u64 {
        self.free_runs
    }

    /// Counts the blocks in these words at which a run of free blocks begins.
    fn run_starts(&self, words: std::ops::Range<usize>) -> u64 {
        let is_page_start = words.start.is_multiple_of(PAGE_WORDS);
        let mut before = if is_page_start { u64::MAX } else { self.words[words.start - 1] };
        let mut starts = 0;
        for at in words {
            if at.is_multiple_of(PAGE_WORDS) {
                before = u64::MAX;
            }
            let word = self.words[at];
            // A run begins at a free block after a taken block.
            starts += u64::from((!word & (word << 1 | before >> 63)).count_ones());
            before = word;
        }
        starts
    }

    /// Adds the blocks of a run to the set if `taken` is true, and removes them otherwise. Returns
    /// the number of blocks that were already in the requested state.
    pub(crate) fn set(&mut self, extent: Extent, taken: bool) -> u64 {
        debug_assert!(self.covers(extent));
        if extent.len == 0 {
            return 0;
        }
        let mut changed = 0;
        // A run may also begin or end at the block after the extent.
        let words = (extent.start / 64) as usize..self.words.len().min((extent.end() / 64) as usize + 1);
        let runs_before = self.run_starts(words.clone());
        let mut at = extent.start;
        while at < extent.end() {
            let count = (64 - at % 64).min(extent.end() - at);
            let bits = (u64::MAX >> (64 - count)) << (at % 64);
            let word = &mut self.words[(at / 64) as usize];
            let before = *word;
            *word = if taken { before | bits } else { before & !bits };
            let flipped = (before ^ *word).count_ones() as u16;
            let page = (at / PAGE_BLOCKS) as usize;
            let free = self.free[page];
            self.free[page] = if taken { free - flipped } else { free + flipped };
            self.dirty[page] |= flipped > 0;
            changed += u64::from(flipped);
            at += count;
        }
        self.free_runs = self.free_runs + self.run_starts(words) - runs_before;
        extent.len - changed
    }

    /// Returns the pages that changed since the last call, with their numbers.
    pub(crate) fn take_dirty(&mut self) -> Vec<(u64, Bytes)> {
        let dirty: Vec<usize> = (0..self.pages()).filter(|&p| std::mem::take(&mut self.dirty[p])).collect();
        dirty.into_iter().map(|p| (p as u64, self.page(p))).collect()
    }

    /// Marks every page as changed.
    pub(crate) fn mark_all_dirty(&mut self) {
        self.dirty.fill(true);
    }

    fn page(&self, page: usize) -> Bytes {
        let mut bytes = vec![0; PAGE_WORDS * 8];
        let words = bytes.chunks_exact_mut(8).zip(self.page_words(page));
        words.for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        bytes.into()
    }

    fn page_words(&self, page: usize) -> &[u64] {
        &self.words[page * PAGE_WORDS..(page + 1) * PAGE_WORDS]
    }

    /// Replaces page number `page` by a stored page. Returns `false` and changes nothing if the
    /// number or the size is wrong, or if one of the extra bits is not set.
    #[must_use]
    pub(crate) fn load_page(&mut self, page: u64, stored: &[u8]) -> bool {
        let Ok(page) = usize::try_from(page) else { return false };
        if page >= self.pages() || stored.len() != PAGE_WORDS * 8 {
            return false;
        }
        let words: Vec<u64> =
            stored.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().expect("eight bytes"))).collect();
        let padding =
            (page as u64 * PAGE_BLOCKS..).take(PAGE_BLOCKS as usize).skip_while(|b| *b < self.blocks);
        if padding.into_iter().any(|b| words[(b % PAGE_BLOCKS / 64) as usize] >> (b % 64) & 1 == 0) {
            return false;
        }
        let range = page * PAGE_WORDS..(page + 1) * PAGE_WORDS;
        let runs_before = self.run_starts(range.clone());
        self.words[range.clone()].copy_from_slice(&words);
        let free: u64 = words.iter().map(|word| u64::from(word.count_zeros())).sum();
        self.free[page] = free as u16;
        self.free_runs = self.free_runs + self.run_starts(range) - runs_before;
        true
    }

    /// Returns the first run of at least `want` free blocks in `page`, shortened to `want` blocks.
    /// If every run is shorter, returns the longest run. Returns `None` if the page has no free
    /// block.
    pub(crate) fn find_free(&self, page: usize, want: u64) -> Option<Extent> {
        let base = page as u64 * PAGE_BLOCKS;
        let mut longest: Option<Extent> = None;
        for run in free_runs(self.page_words(page)) {
            if longest.is_none_or(|l| run.len > l.len) {
                longest = Some(run);
                if run.len >= want {
                    break;
                }
            }
        }
        longest.map(|l| Extent { start: base + l.start, len: l.len.min(want) })
    }

    /// Returns the number of free blocks in `page`.
    pub(crate) fn free_in(&self, page: usize) -> u64 {
        u64::from(self.free[page])
    }

    /// Returns the length of the run of free blocks that contains `extent`, whose blocks are free and
    /// in one page. The run ends at the boundaries of the page.
    pub(crate) fn free_run_around(&self, extent: Extent) -> u64 {
        let words = self.page_words((extent.start / PAGE_BLOCKS) as usize);
        let start = extent.start % PAGE_BLOCKS;
        let before = last_set_bit(words, start).map_or(0, |taken| taken + 1);
        let end = next_bit(words, start + extent.len, true).unwrap_or(PAGE_BLOCKS);
        end - before
    }
}

/// Iterates over the runs of zero bits.
fn free_runs(words: &[u64]) -> impl Iterator<Item = Extent> + '_ {
    let bits = words.len() as u64 * 64;
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = next_bit(words, at, false).filter(|s| *s < bits)?;
        let end = next_bit(words, start, true).unwrap_or(bits);
        at = end;
        Some(Extent { start, len: end - start })
    })
}

/// Returns the position of the first bit at or after `from` whose value is `set`.
fn next_bit(words: &[u64], from: u64, set: bool) -> Option<u64> {
    let mut index = (from / 64) as usize;
    let flip = if set { 0 } else { u64::MAX };
    let mut word = (words.get(index)? ^ flip) & (u64::MAX << (from % 64));
    while word == 0 {
        index += 1;
        word = words.get(index)? ^ flip;
    }
    Some(index as u64 * 64 + u64::from(word.trailing_zeros()))
}

/// Returns the position of the last bit before `end` that is set.
fn last_set_bit(words: &[u64], end: u64) -> Option<u64> {
    let mut index = (end / 64) as usize;
    let mut word = words.get(index).map_or(0, |word| word & !(u64::MAX << (end % 64)));
    while word == 0 {
        index = index.checked_sub(1)?;
        word = words[index];
    }
    Some(index as u64 * 64 + 63 - u64::from(word.leading_zeros()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_bitmap_behaves_like_a_set_of_blocks(runs in proptest::collection::vec((0u64..40_000, 1u64..300, any::<bool>()), 1..60)) {
            let mut bitmap = Bitmap::new(40_300);
            let mut model = std::collections::BTreeSet::new();
            for (start, len, taken) in runs {
                let extent = Extent { start, len };
                bitmap.set(extent, taken);
                for b in extent.blocks() {
                    if taken { model.insert(b); } else { model.remove(&b); }
                }
            }
            prop_assert_eq!(bitmap.used(), model.len() as u64);
            prop_assert!((0..40_300).all(|b| bitmap.contains(b) == model.contains(&b)));
            let mut copy = Bitmap::new(40_300);
            for (page, bytes) in bitmap.clone().take_dirty() {
                prop_assert!(copy.load_page(page, &bytes));
            }
            prop_assert_eq!(copy.used(), bitmap.used());
            let pages = || (0..2u64).map(|page| page * PAGE_BLOCKS..((page + 1) * PAGE_BLOCKS).min(40_300));
            let free = |b: u64| b < 40_300 && !model.contains(&b);
            let starts = |page: std::ops::Range<u64>| {
                page.clone().filter(|b| free(*b) && (*b == page.start || !free(b - 1))).count() as u64
            };
            let free_runs: u64 = pages().map(starts).sum();
            prop_assert_eq!((bitmap.free_runs(), copy.free_runs()), (free_runs, free_runs));
            for (number, page) in pages().enumerate() {
                let count = page.clone().filter(|b| free(*b)).count() as u64;
                prop_assert_eq!(bitmap.free_in(number), count);
                for b in page.clone().step_by(331).filter(|b| free(*b)) {
                    let before = (page.start..b).rev().take_while(|at| free(*at)).count() as u64;
                    let after = (b..page.end).take_while(|at| free(*at)).count() as u64;
                    prop_assert_eq!(bitmap.free_run_around(Extent { start: b, len: 1 }), before + after);
                }
            }
            if let Some(found) = bitmap.find_free(0, 500) {
                prop_assert!(found.len <= 500 && found.blocks().all(|b| !model.contains(&b)));
            }
        }
    }
}
