//! Plans which fragments to read. The plan reads each fragment at most once. If a requested
//! fragment must be reconstructed, the plan uses exactly `k` fragments as sources.

use std::collections::BTreeMap;
use std::ops::Range;

use base::block::BLOCK;
use store::StoreError;

use crate::coder::too_few;
use crate::layout::StripeLayout;

/// A fragment and a range of its bytes. The range starts at a block boundary.
pub(crate) type FragmentSpan = (usize, Range<u64>);

/// The ranges to read, and the fragments to reconstruct from them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReadPlan {
    /// The fragments to read, and the range to read of each fragment.
    pub(crate) reads: BTreeMap<usize, Range<u64>>,
    /// Requested fragments that must be reconstructed.
    pub(crate) computed: Vec<usize>,
    /// The fragments used for reconstruction: `k` of them, or one if fragments are copies.
    pub(crate) sources: Vec<usize>,
    /// The range to reconstruct, in whole blocks.
    pub(crate) over: Range<u64>,
}

impl ReadPlan {
    /// Plans to read `wanted` from an object of `size` bytes. `wanted` names each fragment at most
    /// once. `is_there` returns true if a fragment is readable.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if too few fragments are readable.
    pub(crate) fn new(
        layout: &StripeLayout,
        size: u64,
        wanted: &[FragmentSpan],
        is_there: impl Fn(usize) -> bool,
    ) -> Result<ReadPlan, StoreError> {
        let mut reads: BTreeMap<usize, Range<u64>> = BTreeMap::new();
        let mut computed = Vec::new();
        let mut over: Option<Range<u64>> = None;
        for (fragment, range) in wanted {
            if is_there(*fragment) {
                reads.insert(*fragment, range.clone());
                continue;
            }
            computed.push(*fragment);
            let range = range.start..range.start + (range.end - range.start).next_multiple_of(BLOCK);
            over = Some(over.map_or(range.clone(), |over| hull(&over, &range)));
        }
        let Some(over) = over else {
            return Ok(ReadPlan { reads, computed, sources: Vec::new(), over: 0..0 });
        };
        // Prefer fragments that the plan reads anyway.
        let (first, rest): (Vec<usize>, Vec<usize>) = (0..layout.fragments())
            .filter(|&fragment| is_there(fragment))
            .partition(|fragment| reads.contains_key(fragment));
        let present = first.len() + rest.len();
        let sources: Vec<usize> = first.into_iter().chain(rest).take(layout.k).collect();
        if sources.len() < layout.k {
            return Err(too_few(present, layout.k));
        }
        for &fragment in &sources {
            // Beyond its end, a fragment counts as zeros and need not be read.
            if layout.fragment_size(fragment, size) > over.start {
                let range = reads.entry(fragment).or_insert_with(|| over.clone());
                *range = hull(range, &over);
            }
        }
        Ok(ReadPlan { reads, computed, sources, over })
    }
}

/// Returns the shortest range that contains both ranges.
fn hull(a: &Range<u64>, b: &Range<u64>) -> Range<u64> {
    a.start.min(b.start)..a.end.max(b.end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNIT: u64 = 64 << 10;

    fn wanted(layout: &StripeLayout, offset: u64, len: u64) -> Vec<FragmentSpan> {
        let spans = layout.spans(offset, len);
        (0..).zip(spans).filter_map(|(fragment, span)| Some((fragment, span?))).collect()
    }

    #[test]
    fn a_full_stripe_without_one_fragment_is_read_from_exactly_k_fragments() {
        let layout = StripeLayout { k: 4, m: 2, unit: UNIT };
        let stripe = wanted(&layout, 0, layout.stripe());
        for lost in 0..4 {
            let plan = ReadPlan::new(&layout, layout.stripe(), &stripe, |fragment| fragment != lost).unwrap();
            assert_eq!(plan.reads.len(), 4, "{plan:?}");
            assert!(plan.reads.values().all(|range| *range == (0..UNIT)), "{plan:?}");
            assert_eq!(plan.computed, [lost]);
        }
    }

    #[test]
    fn a_short_object_is_reconstructed_without_reading_empty_fragments() {
        let layout = StripeLayout { k: 4, m: 2, unit: UNIT };
        let plan = ReadPlan::new(&layout, 100, &wanted(&layout, 0, 100), |fragment| fragment != 0).unwrap();
        assert_eq!(plan.reads, BTreeMap::from([(4, 0..BLOCK)]));
        assert_eq!(plan.sources, [1, 2, 3, 4]);
    }

    proptest! {
        #[test]
        fn read_plans_cover_the_requested_ranges_and_read_no_unneeded_fragment(
            k in 1usize..7, m in 0usize..4, blocks in 1u64..4, size in 1u64..600_000,
            at in 0u64..600_000, len in 1u64..600_000, lost in 0u32..1024,
        ) {
            let layout = StripeLayout { k, m, unit: blocks * BLOCK };
            let (start, end) = (base::block::align_down(at.min(size - 1)), (at + len).min(size));
            prop_assume!(start < end);
            let wanted = wanted(&layout, start, end - start);
            let is_there = |fragment: usize| lost & (1 << fragment) == 0;
            let there = (0..k + m).filter(|&fragment| is_there(fragment)).count();
            let is_degraded = wanted.iter().any(|(fragment, _)| !is_there(*fragment));
            let plan = match ReadPlan::new(&layout, size, &wanted, is_there) {
                Ok(plan) => plan,
                Err(_) => {
                    prop_assert!(is_degraded && there < k);
                    return Ok(());
                }
            };
            prop_assert!(plan.reads.keys().all(|&fragment| is_there(fragment)));
            for (fragment, range) in &wanted {
                if is_there(*fragment) {
                    let read = &plan.reads[fragment];
                    prop_assert!(read.start <= range.start && range.end <= read.end);
                } else {
                    prop_assert!(plan.computed.contains(fragment));
                    prop_assert!(plan.over.start <= range.start && range.end <= plan.over.end);
                }
            }
            prop_assert_eq!(plan.sources.len(), if is_degraded { k } else { 0 });
            let in_vain = |fragment: &usize| !plan.sources.contains(fragment) && !wanted.iter().any(|w| w.0 == *fragment);
            prop_assert!(!plan.reads.keys().any(in_vain));
            for fragment in &plan.sources {
                // A source that ends before the range counts as zeros, even if the plan reads other
                // bytes of the source.
                if layout.fragment_size(*fragment, size) > plan.over.start {
                    let read = &plan.reads[fragment];
                    prop_assert!(read.start <= plan.over.start && plan.over.end <= read.end);
                }
            }
        }
    }
}
