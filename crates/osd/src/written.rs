//! Remembers the blocks that the ops of a change have written, so that later ops of the change can
//! merge their data with these blocks. Adjacent blocks are kept as runs. Time and memory therefore
//! grow with the number of ops and with their data, not with the lengths of zeroed ranges.

use std::collections::BTreeMap;
use std::ops::Range;

use base::block::BLOCK_SIZE;
use bytes::Bytes;

/// The blocks that the ops of a change have written. Runs do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// The runs, each by the number of its first block.
    runs: BTreeMap<u64, BlockRun>,
}

#[derive(Debug, Clone)]
struct BlockRun {
    /// Number of the first block after the run.
    end: u64,
    content: RunContent,
}

#[derive(Debug, Clone)]
enum RunContent {
    Zeros,
    /// Whole blocks; the last one may be shorter.
    Bytes(Bytes),
}

impl Written {
    /// Records written bytes, from the start of block `first`.
    pub(crate) fn put(&mut self, first: u64, bytes: Bytes) {
        let end = first + bytes.len().div_ceil(BLOCK_SIZE) as u64;
        self.replace(first..end, RunContent::Bytes(bytes));
    }

    /// Records zeroed blocks.
    pub(crate) fn zero(&mut self, blocks: Range<u64>) {
        self.replace(blocks, RunContent::Zeros);
    }

    fn replace(&mut self, blocks: Range<u64>, content: RunContent) {
        self.remove(blocks.clone());
        if !blocks.is_empty() {
            self.runs.insert(blocks.start, BlockRun { end: blocks.end, content });
        }
    }

    /// Forgets the written content of blocks.
    pub(crate) fn remove(&mut self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        let first = self.runs.range(..blocks.start).next_back().map_or(blocks.start, |(first, _)| *first);
        let met: Vec<u64> = self.runs.range(first..blocks.end).map(|(first, _)| *first).collect();
        for first in met {
            let Some(run) = self.runs.remove(&first) else { continue };
            for part in [first..run.end.min(blocks.start), first.max(blocks.end)..run.end] {
                if !part.is_empty() {
                    self.runs.insert(part.start, run.part(first, part));
                }
            }
        }
    }

    /// Returns the written content of a block; `None` if the block was not written. The content is
    /// shorter than a block if the object ended there.
    pub(crate) fn get(&self, block: u64) -> Option<Bytes> {
        let (first, run) = self.runs.range(..=block).next_back().filter(|(_, run)| block < run.end)?;
        match run.part(*first, block..block + 1).content {
            RunContent::Zeros => Some(Bytes::from_static(&[0; BLOCK_SIZE])),
            RunContent::Bytes(bytes) => Some(bytes),
        }
    }

    /// Forgets all blocks.
    pub(crate) fn clear(&mut self) {
        self.runs.clear();
    }
}

impl BlockRun {
    /// Returns the part of the run that covers `blocks`. `first` is the first block of the run.
    fn part(&self, first: u64, blocks: Range<u64>) -> BlockRun {
        let content = match &self.content {
            RunContent::Zeros => RunContent::Zeros,
            RunContent::Bytes(bytes) => {
                let at = |block: u64| bytes.len().min((block - first) as usize * BLOCK_SIZE);
                RunContent::Bytes(bytes.slice(at(blocks.start)..at(blocks.end)))
            }
        };
        BlockRun { end: blocks.end, content }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCKS: u64 = 24;

    #[derive(Debug, Clone)]
    enum Step {
        Put(u64, usize, u8),
        Zero(Range<u64>),
        Remove(Range<u64>),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let range = || (0..16u64, 0..8u64).prop_map(|(first, count)| first..first + count);
        let put =
            (0..16u64, 1..5 * BLOCK_SIZE, 1u8..255).prop_map(|(at, len, fill)| Step::Put(at, len, fill));
        proptest::collection::vec(
            prop_oneof![put, range().prop_map(Step::Zero), range().prop_map(Step::Remove)],
            1..30,
        )
    }

    proptest! {
        /// The content of each block comes from the last step that touched it.
        #[test]
        fn runs_behave_like_a_map_of_single_blocks(steps in steps()) {
            let mut written = Written::default();
            let mut model: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Put(first, len, fill) => {
                        let bytes: Vec<u8> = (0..len).map(|i| fill.wrapping_add((i / BLOCK_SIZE) as u8)).collect();
                        model.extend((first..).zip(bytes.chunks(BLOCK_SIZE).map(<[u8]>::to_vec)));
                        written.put(first, bytes.into());
                    }
                    Step::Zero(blocks) => {
                        model.extend(blocks.clone().map(|block| (block, vec![0; BLOCK_SIZE])));
                        written.zero(blocks);
                    }
                    Step::Remove(blocks) => {
                        model.retain(|block, _| !blocks.contains(block));
                        written.remove(blocks);
                    }
                }
                for block in 0..BLOCKS {
                    let (found, expected) = (written.get(block), model.get(&block));
                    prop_assert_eq!(found.as_deref(), expected.map(|bytes| &bytes[..]), "{}", block);
                }
                // Each step adds one run and splits at most one other run.
                prop_assert!(written.runs.len() <= 2 * (number + 1));
            }
        }
    }

    #[test]
    fn a_long_zeroed_range_uses_no_memory_per_block() {
        let mut written = Written::default();
        written.zero(0..1 << 32);
        written.put(1 << 20, Bytes::from_static(b"x"));
        assert_eq!(written.runs.len(), 3);
        assert_eq!(written.get(1 << 20).unwrap(), "x");
        assert_eq!(written.get((1 << 32) - 1).unwrap().len(), BLOCK_SIZE);
        assert_eq!(written.get(1 << 32), None);
    }
}
