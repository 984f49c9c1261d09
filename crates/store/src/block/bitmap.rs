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
    used: u64,
    dirty: Vec<bool>,
}

impl Bitmap {
    /// Creates an empty set for blocks `0..blocks`.
    pub(crate) fn new(blocks: u64) -> Bitmap {
        let pages = blocks.div_ceil(PAGE_BLOCKS) as usize;
        let mut bitmap =
            Bitmap { words: vec![0; pages * PAGE_WORDS], blocks, used: 0, dirty: vec![false; pages] };
        for block in blocks..pages as u64 * PAGE_BLOCKS {
            bitmap.words[(block / 64) as usize] |= 1 << (block % 64);
        }
        bitmap
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the number of blocks in the set.
    pub(crate) fn used(&self) -> u64 {
        self.used
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

    /// Adds the blocks of a run to the set if `taken` is true, and removes them otherwise. Returns
    /// the number of blocks that were already in the requested state.
    pub(crate) fn set(&mut self, extent: Extent, taken: bool) -> u64 {
        debug_assert!(self.covers(extent));
        let mut changed = 0;
        let mut at = extent.start;
        while at < extent.end() {
            let count = (64 - at % 64).min(extent.end() - at);
            let bits = (u64::MAX >> (64 - count)) << (at % 64);
            let word = &mut self.words[(at / 64) as usize];
            let before = *word;
            *word = if taken { before | bits } else { before & !bits };
            let flipped = u64::from((before ^ *word).count_ones());
            self.dirty[(at / PAGE_BLOCKS) as usize] |= flipped > 0;
            changed += flipped;
            at += count;
        }
        self.used = if taken { self.used + changed } else { self.used - changed };
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
        self.page_words(page).iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>().into()
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
        self.words[page * PAGE_WORDS..(page + 1) * PAGE_WORDS].copy_from_slice(&words);
        let total: u64 = self.words.iter().map(|w| u64::from(w.count_ones())).sum();
        self.used = total - (self.pages() as u64 * PAGE_BLOCKS - self.blocks);
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

    /// Returns the number of runs of free blocks, and the length of the longest run, in blocks.
    /// Runs end at page boundaries.
    pub(crate) fn free_summary(&self) -> (u64, u64) {
        let runs = (0..self.pages()).flat_map(|p| free_runs(self.page_words(p)));
        runs.fold((0, 0), |(count, longest), run| (count + 1, longest.max(run.len)))
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
            if let Some(found) = bitmap.find_free(0, 500) {
                prop_assert!(found.len <= 500 && found.blocks().all(|b| !model.contains(&b)));
            }
        }
    }
}
