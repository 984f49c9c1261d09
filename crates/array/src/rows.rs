//! [`ArrayChange`]: determines which rows of which stripes a change of an object affects, and how.

use std::collections::BTreeMap;
use std::ops::Range;

use base::block::{BLOCK, Payload};
use store::{ObjectId, Op};

use crate::coder::Coder;
use crate::layout::StripeLayout;
use crate::overlay::{Overlay, OverlayContent, OverlayRange, slice};

/// Ranges of a fragment, as offset and length.
pub(crate) type Ranges = Vec<(u64, u64)>;

/// Changes of an object, divided by fragment.
#[derive(Default)]
pub(crate) struct Split {
    /// Ops for each fragment, by position.
    pub(crate) ops: Vec<Vec<Op>>,
    /// Ranges that the ops overwrite or cut off, by position.
    pub(crate) overwritten: Vec<Ranges>,
}

impl Split {
    /// Creates a split that changes no fragment.
    pub(crate) fn none(fragments: usize) -> Split {
        Split { ops: vec![Vec::new(); fragments], overwritten: vec![Vec::new(); fragments] }
    }
}

/// Consecutive stripes in which the same rows change.
pub(crate) struct StripeRun {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) rows: Range<u64>,
    /// True if the change replaces these rows completely, and the new bytes of each unit lie in one
    /// contiguous piece of memory.
    pub(crate) new: bool,
    /// True if all data of these stripes becomes zero. In that case, the parity becomes zero, too,
    /// and `new` has no meaning.
    pub(crate) zeros: bool,
}

/// New content of the affected rows of one unit.
pub(crate) enum UnitContent {
    /// New bytes in one contiguous piece, with their checksums.
    New(Payload),
    /// Zeros.
    Zeros,
    /// A mix of new and old bytes.
    Mixed,
    /// The old bytes, unchanged.
    Old,
}

/// The part of a unit that a change replaces, within the rows that the change affects.
enum Cover<'a> {
    /// The rows have no new content, and the object has no bytes there.
    Nothing,
    /// No new content; the old bytes stay.
    Old,
    /// One range with new content covers all the rows.
    Whole(&'a OverlayRange),
    /// New content covers a part of the rows, or consists of several pieces.
    Part,
}

/// A change of one object, and the layout that divides it into fragments.
pub(crate) struct ArrayChange<'a> {
    pub(crate) layout: StripeLayout,
    pub(crate) coder: &'a Coder,
    pub(crate) oid: &'a ObjectId,
    pub(crate) overlay: &'a Overlay,
    /// By position: true if the fragment is readable and receives the change.
    pub(crate) live: &'a [bool],
}

impl ArrayChange<'_> {
    /// Returns the stripes and rows whose parity changes, grouped into runs of stripes.
    pub(crate) fn runs(&self) -> Vec<StripeRun> {
        let layout = &self.layout;
        let mut rows: BTreeMap<u64, Range<u64>> = BTreeMap::new();
        let stripes = self.overlay.size.div_ceil(layout.stripe());
        let mut runs: Vec<StripeRun> = Vec::new();
        let mut cut: Vec<(u64, u64)> = Vec::new();
        for extent in self.overlay.extents() {
            let zeroed = self.zeroed_stripes(extent, stripes);
            if zeroed.is_empty() {
                cut.push((extent.offset, extent.len));
                continue;
            }
            let (start, end) = (zeroed.start * layout.stripe(), zeroed.end * layout.stripe());
            cut.extend([(extent.offset, start - extent.offset), (end, extent.end() - end)]);
            let (first, count) = (zeroed.start, zeroed.end - zeroed.start);
            runs.push(StripeRun { first, count, rows: 0..layout.unit, new: false, zeros: true });
        }
        for (offset, len) in cut {
            for piece in layout.pieces(offset, len) {
                let stripe = layout.stripe_of(piece.offset);
                if stripe >= stripes {
                    break;
                }
                let from = piece.at % layout.unit;
                let to = (from + piece.len).next_multiple_of(BLOCK);
                let from = from - from % BLOCK;
                let known = rows.entry(stripe).or_insert(from..to);
                *known = known.start.min(from)..known.end.max(to);
            }
        }
        for (stripe, rows) in rows {
            match runs.last_mut() {
                Some(run) if run.first + run.count == stripe && self.joins(run, &rows, stripe) => {
                    run.count += 1;
                }
                _ => {
                    let new = self.is_new(stripe, &rows);
                    runs.push(StripeRun { first: stripe, count: 1, rows, new, zeros: false });
                }
            }
        }
        runs
    }

    /// Returns the stripes that an extent fills completely with zeros, considering only the first
    /// `stripes` stripes of the object.
    fn zeroed_stripes(&self, extent: &OverlayRange, stripes: u64) -> Range<u64> {
        if !matches!(extent.content, OverlayContent::Zeros) {
            return 0..0;
        }
        let stripe = self.layout.stripe();
        extent.offset.div_ceil(stripe)..(extent.end() / stripe).min(stripes)
    }

    /// Returns true if a stripe can join the run of the stripes before it. All stripes of a run
    /// must be replaced completely, and either all of them or none of them must be staged.
    fn joins(&self, run: &StripeRun, rows: &Range<u64>, stripe: u64) -> bool {
        let full = 0..self.layout.unit;
        run.rows == full
            && !run.zeros
            && *rows == full
            && run.new
            && self.is_new(stripe, rows)
            && self.is_staged(run.first) == self.is_staged(stripe)
    }

    pub(crate) fn is_staged(&self, stripe: u64) -> bool {
        let range = stripe * self.layout.stripe()..(stripe + 1) * self.layout.stripe();
        self.overlay.in_range(range).any(|e| matches!(e.content, OverlayContent::Staged(..)))
    }

    fn is_new(&self, stripe: u64, rows: &Range<u64>) -> bool {
        (0..self.layout.k)
            .all(|unit| matches!(self.cover(stripe, unit, rows), Cover::Whole(_) | Cover::Nothing))
    }

    /// Returns the range of the object that the rows of a unit cover.
    pub(crate) fn unit_range(&self, stripe: u64, unit: usize, rows: &Range<u64>) -> Range<u64> {
        let start = stripe * self.layout.stripe() + unit as u64 * self.layout.unit;
        start + rows.start..start + rows.end
    }

    fn cover(&self, stripe: u64, unit: usize, rows: &Range<u64>) -> Cover<'_> {
        let range = self.unit_range(stripe, unit, rows);
        let Some(first) = self.overlay.in_range(range.clone()).next() else {
            return if range.start >= self.overlay.before { Cover::Nothing } else { Cover::Old };
        };
        if first.offset > range.start || first.end() < range.end {
            return Cover::Part;
        }
        Cover::Whole(first)
    }

    pub(crate) fn unit(&self, stripe: u64, unit: usize, rows: &Range<u64>) -> UnitContent {
        match self.cover(stripe, unit, rows) {
            Cover::Old => UnitContent::Old,
            Cover::Part => UnitContent::Mixed,
            Cover::Nothing => UnitContent::Zeros,
            Cover::Whole(extent) => match &extent.content {
                OverlayContent::Bytes(payload) => {
                    let range = self.unit_range(stripe, unit, rows);
                    let at = |offset: u64| offset - extent.offset;
                    UnitContent::New(slice(payload, at(range.start), range.end - range.start))
                }
                OverlayContent::Zeros | OverlayContent::Staged(..) => UnitContent::Zeros,
            },
        }
    }

    /// Returns true if the change keeps some old bytes in a unit's rows.
    pub(crate) fn keeps_some(&self, stripe: u64, unit: usize, rows: &Range<u64>) -> bool {
        let range = self.unit_range(stripe, unit, rows);
        let end = range.end.min(self.overlay.before);
        let mut at = range.start;
        for extent in self.overlay.in_range(range) {
            if at < extent.offset.min(end) {
                return true;
            }
            at = at.max(extent.end());
        }
        at < end
    }

    /// Appends an op that sets a range of a fragment to zeros.
    pub(crate) fn zero_fragment(&self, fragment: usize, range: Range<u64>, split: &mut Split) {
        split.overwritten[fragment].push((range.start, range.end - range.start));
        // An earlier op truncates the fragment to its smallest size, so the bytes beyond that size
        // are already zeros.
        let end = range.end.min(self.layout.fragment_size(fragment, self.overlay.low));
        if range.start < end {
            let (oid, offset) = (self.oid.clone(), range.start);
            split.ops[fragment].push(Op::Zero { oid, offset, len: end - offset });
        }
    }
}
