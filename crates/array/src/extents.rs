//! Finds the extents of objects: the ranges that have blocks.
//!
//! In a mirror, any member knows them. With an erasure code, they are the extents of the data
//! fragments. If a data fragment cannot be asked, `k` other fragments determine its content. Where
//! all of these have holes, they read as zeros, so the missing fragment is zero, too. Everywhere else
//! it may have data.

use std::ops::Range;

use base::block::{BLOCK, align_down};
use futures::future::join_all;
use store::{ExtentsPage, ObjectExtents, ObjectId, Stat, StoreCalls, StoreError};

use crate::group::Group;
use crate::interval::Interval;
use crate::layout::StripeLayout;
use crate::member_link::MemberLink;
use crate::objects::{ObjectPlace, Rows};
use crate::plan::{FragmentSpan, ReadPlan};
use crate::read::WholeObject;

/// Maximum number of bytes of each fragment that one answer covers, unless a stripe has more. A member
/// then needs one answer, and all answers together need little memory.
const FRAGMENT_BYTES_MAX: u64 = 32 << 20;

/// The extents of a range of a fragment, in ascending order.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct FragmentExtents(Vec<Range<u64>>);

impl FragmentExtents {
    /// Merges the extents of several fragments. The result consists of whole blocks: in the last block
    /// of a short fragment, other fragments may have more bytes.
    fn merged<'a>(fragments: impl Iterator<Item = &'a FragmentExtents>) -> FragmentExtents {
        let whole = |range: &Range<u64>| align_down(range.start)..range.end.next_multiple_of(BLOCK);
        let mut all: Vec<Range<u64>> = fragments.flat_map(|fragment| fragment.0.iter().map(whole)).collect();
        all.sort_unstable_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in all {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        FragmentExtents(merged)
    }

    /// Returns the parts of the extents that lie in a range of the fragment.
    fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let first = self.0.partition_point(|extent| extent.end <= range.start);
        let here = self.0[first..].iter().take_while(move |extent| extent.start < range.end);
        here.map(move |extent| extent.start.max(range.start)..extent.end.min(range.end))
    }
}

/// Returns the end of the range that one answer covers, which begins at `start` and is part of a range
/// that ends at `end`.
fn covered_end(layout: &StripeLayout, start: u64, end: u64) -> u64 {
    let stripes = (FRAGMENT_BYTES_MAX / layout.unit).max(1);
    end.min((layout.stripe_of(start) + stripes) * layout.stripe())
}

impl Group {
    /// Returns the extents of an object in a range.
    pub(crate) async fn extents(
        &self,
        number: u64,
        oid: &ObjectId,
        offset: u64,
        len: u64,
    ) -> store::Result<ObjectExtents> {
        let interval = self.interval(number).await?;
        // This place is held until all fragments have answered, so that all answers belong to the same
        // version of the object.
        let held = self.objects.read(oid, Rows::Range(self.layout.rows(offset, len))).await;
        let size = self.size(&interval, oid, &held).await?;
        let size = size.ok_or_else(|| StoreError::NoSuchObject(oid.to_string()))?;
        self.extents_of(&interval, &held, WholeObject { oid, size }, offset, len).await
    }

    /// Returns the size of an object, and the space of its extents. Parity, and the copies of a mirror
    /// beyond the first, do not count.
    pub(crate) async fn stat(&self, number: u64, oid: &ObjectId) -> store::Result<Stat> {
        let interval = self.interval(number).await?;
        let held = self.objects.read(oid, Rows::All).await;
        let size = self.size(&interval, oid, &held).await?;
        let size = size.ok_or_else(|| StoreError::NoSuchObject(oid.to_string()))?;
        let (mut offset, mut allocated) = (0, 0);
        while offset < size {
            let whole = WholeObject { oid, size };
            let found = self.extents_of(&interval, &held, whole, offset, size - offset).await?;
            assert!(found.end > offset, "each answer makes progress");
            let blocks = |range: &Range<u64>| range.end.next_multiple_of(BLOCK) - align_down(range.start);
            allocated += found.ranges.iter().map(blocks).sum::<u64>();
            offset = found.end;
        }
        Ok(Stat { size, allocated })
    }

    async fn extents_of(
        &self,
        interval: &Interval,
        held: &ObjectPlace,
        whole: WholeObject<'_>,
        offset: u64,
        len: u64,
    ) -> store::Result<ObjectExtents> {
        if self.layout.is_mirror() {
            let ask = async |link: &MemberLink| self.answer_of(link, whole, 0, offset, len).await;
            return self.ask(interval, whole.oid, ask).await;
        }
        let mut page = ExtentsPage::new(offset, len, whole.size);
        let wanted = page.wanted();
        if wanted.is_empty() {
            return Ok(page.finish());
        }
        let start = align_down(wanted.start);
        let end = covered_end(&self.layout, start, wanted.end);
        let fragments = self.fragment_extents(interval, held, whole, start..end).await?;
        for piece in self.layout.pieces(start, end - start) {
            for extent in fragments[piece.fragment].within(piece.at..piece.at + piece.len) {
                let from = piece.offset + (extent.start - piece.at);
                if !page.add(from..from + (extent.end - extent.start)) {
                    return Ok(page.finish());
                }
            }
        }
        if end < wanted.end {
            page.end_at(end);
        }
        Ok(page.finish())
    }

    /// Returns the extents of each data fragment in the part of the fragment that stores bytes of a range
    /// of the object. The range starts at a block boundary and is not empty.
    async fn fragment_extents(
        &self,
        interval: &Interval,
        held: &ObjectPlace,
        whole: WholeObject<'_>,
        range: Range<u64>,
    ) -> store::Result<Vec<FragmentExtents>> {
        let spans = self.layout.spans(range.start, range.end - range.start);
        let wanted: Vec<FragmentSpan> =
            (0..).zip(spans).filter_map(|(fragment, span)| Some((fragment, span?))).collect();
        let mut links = self.live_links(interval, whole.oid);
        let mut unreadable = Vec::new();
        let mut is_degraded = false;
        // Each round but the last finds a fragment that cannot be asked.
        for _ in 0..=links.len() {
            let plan = match ReadPlan::new(&self.layout, whole.size, &wanted, |fragment| {
                links[fragment].is_some()
            }) {
                Ok(plan) => plan,
                Err(e) => {
                    let e = self.unless_awaited(interval, whole.oid, !unreadable.is_empty(), e);
                    return Err(self.unless_failing(&unreadable, e).await);
                }
            };
            if !plan.computed.is_empty() && !std::mem::replace(&mut is_degraded, true) {
                // A member may have refused a change that the other members have accepted. The fragments
                // would then belong to different versions.
                held.settled().await;
                self.still(interval)?;
            }
            let asked = plan.reads.iter().filter_map(|(&fragment, range)| {
                let link = links[fragment].clone()?;
                Some(async move {
                    let found = self.extents_on(&link, whole, fragment, range.clone()).await;
                    (fragment, link, found)
                })
            });
            let mut found = vec![FragmentExtents::default(); links.len()];
            let mut is_complete = true;
            for (fragment, link, answer) in join_all(asked).await {
                match answer {
                    Ok(extents) => found[fragment] = extents,
                    Err(e) => {
                        if matches!(e, StoreError::Io(_)) {
                            unreadable.push(link.clone());
                        }
                        self.lost(fragment, whole.oid, &link, e)?;
                        (links[fragment], is_complete) = (None, false);
                    }
                }
            }
            if is_complete {
                let merged = FragmentExtents::merged(plan.sources.iter().map(|source| &found[*source]));
                plan.computed.iter().for_each(|computed| found[*computed] = merged.clone());
                return Ok(found);
            }
        }
        unreachable!("each round has lost a fragment")
    }

    /// Returns the extents of a range of a member's fragment.
    async fn extents_on(
        &self,
        link: &MemberLink,
        whole: WholeObject<'_>,
        fragment: usize,
        range: Range<u64>,
    ) -> store::Result<FragmentExtents> {
        let (mut all, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let asked = self.answer_of(link, whole, fragment, at, range.end - at);
            let found = self.calls.answer(link, asked).await.map_err(|e| link.classified_read(e))?;
            all.extend(found.ranges);
            at = found.end;
        }
        link.still()?;
        Ok(FragmentExtents(all))
    }

    /// Asks a member once for extents of its fragment, and checks the answer.
    async fn answer_of(
        &self,
        link: &MemberLink,
        whole: WholeObject<'_>,
        fragment: usize,
        offset: u64,
        len: u64,
    ) -> store::Result<ObjectExtents> {
        let found = link.target.store().extents(&self.cid, whole.oid, offset, len).await?;
        found.check(offset, len)?;
        self.expect_len(link, whole, fragment, found.object_size)?;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_extents_consist_of_whole_blocks() {
        let short = FragmentExtents(vec![0..4096, 8192..8200]);
        let long = FragmentExtents(vec![4096..8192, 20_480..24_576]);
        let merged = FragmentExtents::merged([&short, &long].into_iter());
        assert_eq!(merged.0, [0..12_288, 20_480..24_576]);
        let part: Vec<_> = merged.within(4096..20_481).collect();
        assert_eq!(part, [4096..12_288, 20_480..20_481]);
    }

    #[test]
    fn an_answer_covers_whole_stripes_and_at_least_one() {
        let layout = StripeLayout { k: 2, m: 1, unit: 64 << 10 };
        assert_eq!(covered_end(&layout, 5 << 10, 100 << 20), 64 << 20);
        assert_eq!(covered_end(&layout, 5 << 10, 10 << 20), 10 << 20);
        let long = StripeLayout { k: 1, m: 1, unit: 64 << 20 };
        assert_eq!(covered_end(&long, 70 << 20, u64::MAX), 128 << 20);
    }
}
