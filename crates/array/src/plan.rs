//! Which shards a read takes its bytes from: each shard is read at most once, and exactly `k` are if one of several has to
//! be computed.

use std::collections::BTreeMap;
use std::ops::Range;

use base::block::BLOCK;
use store::StoreError;

use crate::coder::too_few;
use crate::layout::Layout;

/// A range of bytes of a shard. It starts at a block.
pub(crate) type Span = (usize, Range<u64>);

/// What is read, and what is computed from it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReadPlan {
    /// The range to read of each shard.
    pub(crate) reads: BTreeMap<usize, Range<u64>>,
    /// Wanted shards that are computed.
    pub(crate) computed: Vec<usize>,
    /// The shards that they are computed from; one, where shards are copies.
    pub(crate) sources: Vec<usize>,
    /// The range, in whole blocks, over which they are computed.
    pub(crate) over: Range<u64>,
}

impl ReadPlan {
    /// Plans to read `wanted`, which names no shard twice, of an object of `size` bytes. `is_there` says which shards can
    /// be read.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if too few shards can be read.
    pub(crate) fn new(
        layout: &Layout,
        size: u64,
        wanted: &[Span],
        is_there: impl Fn(usize) -> bool,
    ) -> Result<ReadPlan, StoreError> {
        let mut reads: BTreeMap<usize, Range<u64>> = BTreeMap::new();
        let mut computed = Vec::new();
        let mut over: Option<Range<u64>> = None;
        for (shard, range) in wanted {
            if is_there(*shard) {
                reads.insert(*shard, range.clone());
                continue;
            }
            computed.push(*shard);
            let range = range.start..range.start + (range.end - range.start).next_multiple_of(BLOCK);
            over = Some(over.map_or(range.clone(), |over| hull(&over, &range)));
        }
        let Some(over) = over else {
            return Ok(ReadPlan { reads, computed, sources: Vec::new(), over: 0..0 });
        };
        // Shards that are read anyway come first.
        let (first, rest): (Vec<usize>, Vec<usize>) = (0..layout.shards())
            .filter(|&shard| is_there(shard))
            .partition(|shard| reads.contains_key(shard));
        let present = first.len() + rest.len();
        let sources: Vec<usize> = first.into_iter().chain(rest).take(layout.k).collect();
        if sources.len() < layout.k {
            return Err(too_few(present, layout.k));
        }
        for &shard in &sources {
            // A shard counts as zeros where it ends.
            if layout.shard_size(shard, size) > over.start {
                let range = reads.entry(shard).or_insert_with(|| over.clone());
                *range = hull(range, &over);
            }
        }
        Ok(ReadPlan { reads, computed, sources, over })
    }
}

/// The shortest range that contains both.
fn hull(a: &Range<u64>, b: &Range<u64>) -> Range<u64> {
    a.start.min(b.start)..a.end.max(b.end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNIT: u64 = 64 << 10;

    fn wanted(layout: &Layout, offset: u64, len: u64) -> Vec<Span> {
        let spans = layout.spans(offset, len);
        (0..).zip(spans).filter_map(|(shard, span)| Some((shard, span?))).collect()
    }

    #[test]
    fn a_full_stripe_without_one_shard_is_read_from_exactly_k_shards() {
        let layout = Layout { k: 4, m: 2, unit: UNIT };
        let stripe = wanted(&layout, 0, layout.stripe());
        for lost in 0..4 {
            let plan = ReadPlan::new(&layout, layout.stripe(), &stripe, |shard| shard != lost).unwrap();
            assert_eq!(plan.reads.len(), 4, "{plan:?}");
            assert!(plan.reads.values().all(|range| *range == (0..UNIT)), "{plan:?}");
            assert_eq!(plan.computed, [lost]);
        }
    }

    #[test]
    fn a_short_object_is_computed_without_reading_shards_that_are_empty() {
        let layout = Layout { k: 4, m: 2, unit: UNIT };
        let plan = ReadPlan::new(&layout, 100, &wanted(&layout, 0, 100), |shard| shard != 0).unwrap();
        assert_eq!(plan.reads, BTreeMap::from([(4, 0..BLOCK)]));
        assert_eq!(plan.sources, [1, 2, 3, 4]);
    }

    proptest! {
        #[test]
        fn plans_cover_what_is_wanted_and_read_no_shard_in_vain(
            k in 1usize..7, m in 0usize..4, blocks in 1u64..4, size in 1u64..600_000,
            at in 0u64..600_000, len in 1u64..600_000, lost in 0u32..1024,
        ) {
            let layout = Layout { k, m, unit: blocks * BLOCK };
            let (start, end) = (base::block::align_down(at.min(size - 1)), (at + len).min(size));
            prop_assume!(start < end);
            let wanted = wanted(&layout, start, end - start);
            let is_there = |shard: usize| lost & (1 << shard) == 0;
            let there = (0..k + m).filter(|&shard| is_there(shard)).count();
            let is_degraded = wanted.iter().any(|(shard, _)| !is_there(*shard));
            let plan = match ReadPlan::new(&layout, size, &wanted, is_there) {
                Ok(plan) => plan,
                Err(_) => {
                    prop_assert!(is_degraded && there < k);
                    return Ok(());
                }
            };
            prop_assert!(plan.reads.keys().all(|&shard| is_there(shard)));
            for (shard, range) in &wanted {
                if is_there(*shard) {
                    let read = &plan.reads[shard];
                    prop_assert!(read.start <= range.start && range.end <= read.end);
                } else {
                    prop_assert!(plan.computed.contains(shard));
                    prop_assert!(plan.over.start <= range.start && range.end <= plan.over.end);
                }
            }
            prop_assert_eq!(plan.sources.len(), if is_degraded { k } else { 0 });
            let in_vain = |shard: &usize| !plan.sources.contains(shard) && !wanted.iter().any(|w| w.0 == *shard);
            prop_assert!(!plan.reads.keys().any(in_vain));
            for shard in &plan.sources {
                match plan.reads.get(shard) {
                    Some(read) => prop_assert!(read.start <= plan.over.start && plan.over.end <= read.end),
                    None => prop_assert!(layout.shard_size(*shard, size) <= plan.over.start),
                }
            }
        }
    }
}
