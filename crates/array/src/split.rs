//! Cutting what an object becomes into what its fragments become, parity included (see [`parity`](crate::parity)).

use std::collections::BTreeMap;
use std::ops::Range;

use base::block::BLOCK;
use bytes::Bytes;
use store::{ObjectId, Op, WriteSource};

use crate::coder::Coder;
use crate::layout::Layout;
use crate::overlay::{Content, Extent, Overlay};

/// Ranges of a fragment: offset and length.
pub(crate) type Ranges = Vec<(u64, u64)>;

/// What becomes of each fragment of an object.
#[derive(Default)]
pub(crate) struct Split {
    /// Ops, by position.
    pub(crate) ops: Vec<Vec<Op>>,
    /// What they overwrite or cut off, by position.
    pub(crate) overwritten: Vec<Ranges>,
}

impl Split {
    /// Nothing becomes of any fragment.
    pub(crate) fn none(fragments: usize) -> Split {
        Split { ops: vec![Vec::new(); fragments], overwritten: vec![Vec::new(); fragments] }
    }
}

/// Stripes, one after the other, of which the same rows change.
pub(super) struct Run {
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) rows: Range<u64>,
    /// Whether nothing of those rows stays, and each unit's come in one piece.
    pub(super) new: bool,
    /// Whether all of it becomes zero: then so does the parity, and `new` does not count.
    pub(super) zeros: bool,
}

/// The bytes of one unit's rows, as they will be.
pub(super) enum Unit {
    /// As they came, in one piece.
    New(Bytes),
    /// There are none.
    Zeros,
    /// New ones over those that there are.
    Mixed,
    /// They stay.
    Old,
}

/// What new content a unit's rows have.
enum Cover<'a> {
    /// None, and nothing old.
    Nothing,
    /// None over what there is.
    Old,
    /// This.
    Whole(&'a Extent),
    /// Some over what there is, or in several pieces.
    Part,
}

/// See the [module](self) documentation.
pub(crate) struct Splitter<'a> {
    pub(crate) layout: Layout,
    pub(crate) coder: &'a Coder,
    pub(crate) oid: &'a ObjectId,
    pub(crate) overlay: &'a Overlay,
    /// By position: whether the fragment can be read and is to be written.
    pub(crate) live: &'a [bool],
}

impl Splitter<'_> {
    /// Works out the ops. `old` reads bytes of a fragment as they are now, filled up with zeros, if need be from other fragments.
    pub(crate) async fn split(
        &self,
        old: impl AsyncFn(usize, Range<u64>) -> store::Result<Vec<u8>>,
    ) -> store::Result<Split> {
        let fragments = self.layout.fragments();
        let mut split = Split::none(fragments);
        for fragment in 0..fragments {
            let low = self.layout.fragment_size(fragment, self.overlay.low);
            if low < self.layout.fragment_size(fragment, self.overlay.before) {
                split.ops[fragment].push(Op::Truncate { oid: self.oid.clone(), size: low });
            }
        }
        if self.layout.is_mirror() {
            (0..fragments)
                .for_each(|copy| self.overlay.extents().for_each(|e| self.data(e, Some(copy), &mut split)));
        } else {
            self.overlay.extents().for_each(|extent| self.data(extent, None, &mut split));
            for run in self.runs() {
                self.parity(&run, &old, &mut split).await?;
            }
        }
        for fragment in 0..fragments {
            self.finish(fragment, &mut split);
        }
        Ok(split)
    }

    /// The ops of data fragments; of a mirror, those of one `copy`.
    fn data(&self, extent: &Extent, copy: Option<usize>, split: &mut Split) {
        if matches!(extent.content, Content::Zeros) {
            return self.zeroed_data(extent, copy, split);
        }
        for piece in self.layout.pieces(extent.offset, extent.len) {
            let fragment = copy.unwrap_or(piece.fragment);
            split.overwritten[fragment].push((piece.at, piece.len));
            let part = extent.part(piece.offset..piece.offset + piece.len);
            let source = match part.content {
                Content::Bytes(payload) => WriteSource::Inline(payload),
                Content::Staged(stage, at) => {
                    let Some(staged) = &stage.fragments[fragment] else { continue };
                    let offset = self.layout.locate(at).1;
                    WriteSource::Staged { stage: staged.id, offset, len: piece.len }
                }
                Content::Zeros => continue,
            };
            split.ops[fragment].push(Op::Write { oid: self.oid.clone(), offset: piece.at, source });
        }
    }

    /// The same of zeros, which may be many: one op for each fragment.
    fn zeroed_data(&self, extent: &Extent, copy: Option<usize>, split: &mut Split) {
        if let Some(copy) = copy {
            return self.zero_fragment(copy, extent.offset..extent.end(), split);
        }
        for (fragment, span) in self.layout.spans(extent.offset, extent.len).into_iter().enumerate() {
            span.into_iter().for_each(|span| self.zero_fragment(fragment, span, split));
        }
    }

    /// Makes a range of a fragment zero.
    pub(super) fn zero_fragment(&self, fragment: usize, range: Range<u64>, split: &mut Split) {
        split.overwritten[fragment].push((range.start, range.end - range.start));
        // Beyond what is left there is nothing to be made zero.
        let end = range.end.min(self.layout.fragment_size(fragment, self.overlay.low));
        if range.start < end {
            let (oid, offset) = (self.oid.clone(), range.start);
            split.ops[fragment].push(Op::Zero { oid, offset, len: end - offset });
        }
    }

    /// Makes the fragment as long as it is to be, and puts what is overwritten in order.
    fn finish(&self, fragment: usize, split: &mut Split) {
        let size_at = |size| self.layout.fragment_size(fragment, size);
        let (before, after) = (size_at(self.overlay.before), size_at(self.overlay.size));
        let mut size = before;
        for op in &split.ops[fragment] {
            match op {
                Op::Truncate { size: cut, .. } => size = *cut,
                Op::Write { offset, source, .. } => size = size.max(offset + source.len()),
                _ => {}
            }
        }
        if size != after {
            split.ops[fragment].push(Op::Truncate { oid: self.oid.clone(), size: after });
        }
        let low = size_at(self.overlay.low);
        let ranges = &mut split.overwritten[fragment];
        if low < before {
            ranges.push((low, before - low));
        }
        *ranges = merged(ranges, before);
    }

    /// Rows whose parity changes.
    fn runs(&self) -> Vec<Run> {
        let layout = &self.layout;
        let mut rows: BTreeMap<u64, Range<u64>> = BTreeMap::new();
        let stripes = self.overlay.size.div_ceil(layout.stripe());
        let mut runs: Vec<Run> = Vec::new();
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
            runs.push(Run { first, count, rows: 0..layout.unit, new: false, zeros: true });
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
                    runs.push(Run { first: stripe, count: 1, rows, new, zeros: false });
                }
            }
        }
        runs
    }

    /// Stripes that become zero as a whole by an extent, of the first `stripes`.
    fn zeroed_stripes(&self, extent: &Extent, stripes: u64) -> Range<u64> {
        if !matches!(extent.content, Content::Zeros) {
            return 0..0;
        }
        let stripe = self.layout.stripe();
        extent.offset.div_ceil(stripe)..(extent.end() / stripe).min(stripes)
    }

    /// Whether a stripe can be done with those before it: all of them are new as a whole, and in the same way.
    fn joins(&self, run: &Run, rows: &Range<u64>, stripe: u64) -> bool {
        let full = 0..self.layout.unit;
        run.rows == full
            && !run.zeros
            && *rows == full
            && run.new
            && self.is_new(stripe, rows)
            && self.is_staged(run.first) == self.is_staged(stripe)
    }

    pub(super) fn is_staged(&self, stripe: u64) -> bool {
        let range = stripe * self.layout.stripe()..(stripe + 1) * self.layout.stripe();
        self.overlay.in_range(range).any(|e| matches!(e.content, Content::Staged(..)))
    }

    fn is_new(&self, stripe: u64, rows: &Range<u64>) -> bool {
        (0..self.layout.k)
            .all(|unit| matches!(self.cover(stripe, unit, rows), Cover::Whole(_) | Cover::Nothing))
    }

    /// Where the rows of a unit are in the object.
    pub(super) fn unit_range(&self, stripe: u64, unit: usize, rows: &Range<u64>) -> Range<u64> {
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

    pub(super) fn unit(&self, stripe: u64, unit: usize, rows: &Range<u64>) -> Unit {
        match self.cover(stripe, unit, rows) {
            Cover::Old => Unit::Old,
            Cover::Part => Unit::Mixed,
            Cover::Nothing => Unit::Zeros,
            Cover::Whole(extent) => match &extent.content {
                Content::Bytes(payload) => {
                    let range = self.unit_range(stripe, unit, rows);
                    let at = |offset: u64| (offset - extent.offset) as usize;
                    Unit::New(payload.data().slice(at(range.start)..at(range.end)))
                }
                Content::Zeros | Content::Staged(..) => Unit::Zeros,
            },
        }
    }

    /// Whether bytes of a unit's rows stay.
    pub(super) fn keeps_some(&self, stripe: u64, unit: usize, rows: &Range<u64>) -> bool {
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
}

/// Ranges in order, as whole blocks, those that meet made one, without blocks beyond `end`.
fn merged(ranges: &[(u64, u64)], end: u64) -> Ranges {
    let end = end.next_multiple_of(BLOCK);
    let whole = |(at, len): &(u64, u64)| at - at % BLOCK..(at + len).next_multiple_of(BLOCK).min(end);
    let mut sorted: Vec<Range<u64>> =
        ranges.iter().map(whole).filter(|range| range.start < range.end).collect();
    sorted.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in sorted {
        match merged.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged.into_iter().map(|range| (range.start, range.end - range.start)).collect()
}
