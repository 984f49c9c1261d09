//! Divides the change of an object into changes of its fragments, including parity (see
//! [`parity`](crate::parity)).

use std::ops::Range;

use base::block::BLOCK;
use store::{Op, WriteSource};

use crate::overlay::{OverlayContent, OverlayRange};
use crate::rows::{ArrayChange, Ranges, Split};

impl ArrayChange<'_> {
    /// Computes the ops that apply the change to all fragments. `old` reads the current bytes of a
    /// fragment, padded with zeros, and reconstructs them if necessary.
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
                if base::mutant!(SkipParity) && !run.new && !run.zeros {
                    continue;
                }
                self.parity(&run, &old, &mut split).await?;
            }
        }
        for fragment in 0..fragments {
            self.finish(fragment, &mut split);
        }
        Ok(split)
    }

    /// Appends the ops that apply `extent` to the data fragments or, in a mirror, to the fragment
    /// `copy`.
    fn data(&self, extent: &OverlayRange, copy: Option<usize>, split: &mut Split) {
        if matches!(extent.content, OverlayContent::Zeros) {
            return self.zeroed_data(extent, copy, split);
        }
        for piece in self.layout.pieces(extent.offset, extent.len) {
            let fragment = copy.unwrap_or(piece.fragment);
            split.overwritten[fragment].push((piece.at, piece.len));
            let part = extent.part(piece.offset..piece.offset + piece.len);
            let source = match part.content {
                OverlayContent::Bytes(payload) => WriteSource::Inline(payload),
                OverlayContent::Staged(stage, at) => {
                    let Some(staged) = &stage.fragments[fragment] else { continue };
                    let offset = self.layout.locate(at).1;
                    WriteSource::Staged { stage: staged.id, offset, len: piece.len }
                }
                OverlayContent::Zeros => continue,
            };
            split.ops[fragment].push(Op::Write { oid: self.oid.clone(), offset: piece.at, source });
        }
    }

    /// Like [`ArrayChange::data`], for a range of zeros. Appends at most one op per fragment for a
    /// range of any length.
    fn zeroed_data(&self, extent: &OverlayRange, copy: Option<usize>, split: &mut Split) {
        if let Some(copy) = copy {
            return self.zero_fragment(copy, extent.offset..extent.end(), split);
        }
        for (fragment, span) in self.layout.spans(extent.offset, extent.len).into_iter().enumerate() {
            span.into_iter().for_each(|span| self.zero_fragment(fragment, span, split));
        }
    }

    /// Appends an op that sets the final length of the fragment, if the earlier ops do not. Sorts
    /// and merges the ranges that are overwritten.
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
}

/// Rounds ranges to whole blocks, sorts and merges them, and drops blocks beyond `end`.
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
