//! Cutting what an object becomes into what its shards become, parity included.
//!
//! Parity of a stripe whose rows are all new is computed from what came. Otherwise something of the stripe must be read first,
//! whichever is less: the bytes that are replaced and the old parity (which then changes by what the data changes by), or the
//! units of those rows that stay.

use std::collections::BTreeMap;
use std::ops::Range;

use base::block::{BLOCK, Payload};
use bytes::Bytes;
use futures::future::{try_join, try_join_all};
use store::{ObjectId, Op, WriteSource};

use super::coder::{Buffer, Coder};
use super::layout::Layout;
use super::overlay::{Content, Extent, Overlay};

/// Ranges of a shard: offset and length.
pub(crate) type Ranges = Vec<(u64, u64)>;

/// What becomes of each shard of an object.
#[derive(Default)]
pub(crate) struct Split {
    /// Ops, by position.
    pub(crate) ops: Vec<Vec<Op>>,
    /// What they overwrite or cut off, by position.
    pub(crate) overwritten: Vec<Ranges>,
}

impl Split {
    /// Nothing becomes of any shard.
    pub(crate) fn none(shards: usize) -> Split {
        Split { ops: vec![Vec::new(); shards], overwritten: vec![Vec::new(); shards] }
    }
}

/// Stripes, one after the other, of which the same rows change.
struct Run {
    first: u64,
    count: u64,
    rows: Range<u64>,
}

/// The bytes of one unit's rows, as they will be.
enum Unit {
    /// As they came, in one piece.
    New(Bytes),
    /// There are none.
    Zeros,
    /// New ones over those that there are.
    Mixed,
    /// They stay.
    Old,
}

/// See the [module](self) documentation.
pub(crate) struct Splitter<'a> {
    pub(crate) layout: Layout,
    pub(crate) coder: &'a Coder,
    pub(crate) oid: &'a ObjectId,
    pub(crate) overlay: &'a Overlay,
    /// By position: whether the shard can be read and is to be written.
    pub(crate) live: &'a [bool],
}

impl Splitter<'_> {
    /// Works out the ops. `old` reads bytes of a shard as they are now, filled up with zeros, if need be from other shards.
    pub(crate) async fn split(
        &self,
        old: impl AsyncFn(usize, Range<u64>) -> store::Result<Vec<u8>>,
    ) -> store::Result<Split> {
        let shards = self.layout.shards();
        let mut split = Split::none(shards);
        for shard in 0..shards {
            let low = self.layout.shard_size(shard, self.overlay.low);
            if low < self.layout.shard_size(shard, self.overlay.before) {
                split.ops[shard].push(Op::Truncate { oid: self.oid.clone(), size: low });
            }
        }
        if self.layout.is_mirror() {
            (0..shards)
                .for_each(|copy| self.overlay.extents().for_each(|e| self.data(e, Some(copy), &mut split)));
        } else {
            self.overlay.extents().for_each(|extent| self.data(extent, None, &mut split));
            for run in self.runs() {
                self.parity(&run, &old, &mut split).await?;
            }
        }
        for shard in 0..shards {
            self.finish(shard, &mut split);
        }
        Ok(split)
    }

    /// The ops of data shards; of a mirror, those of one `copy`.
    fn data(&self, extent: &Extent, copy: Option<usize>, split: &mut Split) {
        for piece in self.layout.pieces(extent.offset, extent.len) {
            let shard = copy.unwrap_or(piece.shard);
            split.overwritten[shard].push((piece.at, piece.len));
            let part = extent.part(piece.offset..piece.offset + piece.len);
            let source = match part.content {
                Content::Bytes(payload) => WriteSource::Inline(payload),
                Content::Staged(stage, at) => {
                    let Some(staged) = &stage.shards[shard] else { continue };
                    let offset = self.layout.locate(at).1;
                    WriteSource::Staged { stage: staged.id, offset, len: piece.len }
                }
                Content::Zeros => {
                    // Beyond what is left there is nothing to be made zero.
                    let left = self.layout.shard_size(shard, self.overlay.low);
                    if piece.at < left {
                        let len = piece.len.min(left - piece.at);
                        split.ops[shard].push(Op::Zero { oid: self.oid.clone(), offset: piece.at, len });
                    }
                    continue;
                }
            };
            split.ops[shard].push(Op::Write { oid: self.oid.clone(), offset: piece.at, source });
        }
    }

    /// Makes the shard as long as it is to be, and puts what is overwritten in order.
    fn finish(&self, shard: usize, split: &mut Split) {
        let size_at = |size| self.layout.shard_size(shard, size);
        let (before, after) = (size_at(self.overlay.before), size_at(self.overlay.size));
        let mut size = before;
        for op in &split.ops[shard] {
            match op {
                Op::Truncate { size: cut, .. } => size = *cut,
                Op::Write { offset, source, .. } => size = size.max(offset + source.len()),
                _ => {}
            }
        }
        if size != after {
            split.ops[shard].push(Op::Truncate { oid: self.oid.clone(), size: after });
        }
        let low = size_at(self.overlay.low);
        let ranges = &mut split.overwritten[shard];
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
        for extent in self.overlay.extents() {
            for piece in layout.pieces(extent.offset, extent.len) {
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
        let mut runs: Vec<Run> = Vec::new();
        for (stripe, rows) in rows {
            match runs.last_mut() {
                Some(run) if run.first + run.count == stripe && self.joins(run, &rows, stripe) => {
                    run.count += 1;
                }
                _ => runs.push(Run { first: stripe, count: 1, rows }),
            }
        }
        runs
    }

    /// Whether a stripe can be done with those before it: all of them are new as a whole, and in the same way.
    fn joins(&self, run: &Run, rows: &Range<u64>, stripe: u64) -> bool {
        let full = 0..self.layout.unit;
        run.rows == full
            && *rows == full
            && self.is_staged(run.first) == self.is_staged(stripe)
            && self.is_new(run.first)
            && self.is_new(stripe)
    }

    fn is_staged(&self, stripe: u64) -> bool {
        let range = stripe * self.layout.stripe()..(stripe + 1) * self.layout.stripe();
        self.overlay.in_range(range).any(|e| matches!(e.content, Content::Staged(..)))
    }

    fn is_new(&self, stripe: u64) -> bool {
        let full = 0..self.layout.unit;
        (0..self.layout.k).all(|unit| !matches!(self.unit(stripe, unit, &full), Unit::Old | Unit::Mixed))
    }

    /// Where the rows of a unit are in the object.
    fn unit_range(&self, stripe: u64, unit: usize, rows: &Range<u64>) -> Range<u64> {
        let start = stripe * self.layout.stripe() + unit as u64 * self.layout.unit;
        start + rows.start..start + rows.end
    }

    fn unit(&self, stripe: u64, unit: usize, rows: &Range<u64>) -> Unit {
        let range = self.unit_range(stripe, unit, rows);
        let mut new = self.overlay.in_range(range.clone());
        let Some(first) = new.next() else {
            return if range.start >= self.overlay.before { Unit::Zeros } else { Unit::Old };
        };
        if first.offset > range.start || first.end() < range.end {
            return Unit::Mixed;
        }
        match first.part(range).content {
            Content::Bytes(payload) => Unit::New(payload.data().clone()),
            Content::Zeros | Content::Staged(..) => Unit::Zeros,
        }
    }

    /// Whether bytes of a unit's rows stay.
    fn keeps_some(&self, stripe: u64, unit: usize, rows: &Range<u64>) -> bool {
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

    async fn parity(
        &self,
        run: &Run,
        old: &impl AsyncFn(usize, Range<u64>) -> store::Result<Vec<u8>>,
        split: &mut Split,
    ) -> store::Result<()> {
        if self.is_staged(run.first) {
            self.staged_parity(run, split);
            return Ok(());
        }
        let rows = run.rows.end - run.rows.start;
        let mut parity = self.coder.parity_buffers(run.count * rows);
        for index in 0..run.count {
            let out = (index * rows) as usize..((index + 1) * rows) as usize;
            self.stripe_parity(run.first + index, &run.rows, old, &mut parity, out).await?;
        }
        let first = run.first * self.layout.unit + run.rows.start;
        for (row, buffer) in parity.into_iter().enumerate() {
            self.put_parity(self.layout.k + row, first, buffer.freeze(), split);
        }
        Ok(())
    }

    fn staged_parity(&self, run: &Run, split: &mut Split) {
        let start = run.first * self.layout.stripe();
        let staged = self.overlay.in_range(start..start + self.layout.stripe());
        for extent in staged {
            let Content::Staged(stage, at) = &extent.content else { continue };
            let offset = (at + start - extent.offset) / self.layout.k as u64;
            let (at, len) = (run.first * self.layout.unit, run.count * self.layout.unit);
            for shard in self.layout.k..self.layout.shards() {
                split.overwritten[shard].push((at, len));
                if let Some(staged) = &stage.shards[shard] {
                    let source = WriteSource::Staged { stage: staged.id, offset, len };
                    split.ops[shard].push(Op::Write { oid: self.oid.clone(), offset: at, source });
                }
            }
        }
    }

    fn put_parity(&self, shard: usize, at: u64, bytes: Bytes, split: &mut Split) {
        split.overwritten[shard].push((at, bytes.len() as u64));
        let end = self.layout.shard_size(shard, self.overlay.size);
        let len = end.saturating_sub(at).min(bytes.len() as u64);
        if len > 0 {
            let source = WriteSource::Inline(Payload::compute(0, bytes.slice(..len as usize)));
            split.ops[shard].push(Op::Write { oid: self.oid.clone(), offset: at, source });
        }
    }

    /// Parity of a stripe's rows, into the range `out` of the buffers.
    async fn stripe_parity(
        &self,
        stripe: u64,
        rows: &Range<u64>,
        old: &impl AsyncFn(usize, Range<u64>) -> store::Result<Vec<u8>>,
        parity: &mut [Buffer],
        out: Range<usize>,
    ) -> store::Result<()> {
        let (k, m) = (self.layout.k, self.layout.m);
        let units: Vec<Unit> = (0..k).map(|unit| self.unit(stripe, unit, rows)).collect();
        let keeps: Vec<bool> = (0..k).map(|unit| self.keeps_some(stripe, unit, rows)).collect();
        let is_replaced = |unit: usize| {
            let had_bytes = self.unit_range(stripe, unit, rows).start < self.overlay.before;
            !matches!(units[unit], Unit::Old) && had_bytes
        };
        let replaced: Vec<bool> = (0..k).map(is_replaced).collect();
        let here = |shard: usize| self.live[shard];
        let all_here = (0..k).filter(|&unit| replaced[unit]).all(here) && (k..k + m).all(here);
        let to_read = |which: &[bool]| which.iter().filter(|which| **which).count();
        if all_here && to_read(&replaced) + m < to_read(&keeps) {
            return self.change_parity(stripe, rows, old, (&units, &replaced), parity, out).await;
        }
        let kept = self.read_units(stripe, rows, &keeps, old).await?;
        let new: Vec<Bytes> = (0..k)
            .map(|unit| self.unit_bytes(stripe, unit, rows, &units[unit], kept[unit].as_deref()))
            .collect();
        self.coder.encode(&new, parity, out)
    }

    /// Parity from what it was, and what changes.
    async fn change_parity(
        &self,
        stripe: u64,
        rows: &Range<u64>,
        old: &impl AsyncFn(usize, Range<u64>) -> store::Result<Vec<u8>>,
        (units, replaced): (&[Unit], &[bool]),
        parity: &mut [Buffer],
        out: Range<usize>,
    ) -> store::Result<()> {
        let (k, m) = (self.layout.k, self.layout.m);
        let start = stripe * self.layout.unit;
        let at = start + rows.start..start + rows.end;
        let parity_before = try_join_all((k..k + m).map(|shard| old(shard, at.clone())));
        let (before, parity_before) =
            try_join(self.read_units(stripe, rows, replaced, old), parity_before).await?;
        for (buffer, old) in parity.iter_mut().zip(&parity_before) {
            buffer[out.clone()].copy_from_slice(old);
        }
        for (unit, before) in before.into_iter().enumerate() {
            if matches!(units[unit], Unit::Old) {
                continue;
            }
            let mut delta = before.unwrap_or_else(|| vec![0; out.len()]);
            let new = self.unit_bytes(stripe, unit, rows, &units[unit], Some(&delta));
            delta.iter_mut().zip(&new[..]).for_each(|(delta, new)| *delta ^= new);
            self.coder.update(unit, &delta, parity, out.clone())?;
        }
        Ok(())
    }

    /// Reads rows of some of a stripe's units.
    async fn read_units(
        &self,
        stripe: u64,
        rows: &Range<u64>,
        wanted: &[bool],
        old: &impl AsyncFn(usize, Range<u64>) -> store::Result<Vec<u8>>,
    ) -> store::Result<Vec<Option<Vec<u8>>>> {
        let start = stripe * self.layout.unit;
        let reads = wanted.iter().enumerate().map(|(unit, &wanted)| {
            let at = start + rows.start..start + rows.end;
            async move { if wanted { old(unit, at).await.map(Some) } else { Ok(None) } }
        });
        try_join_all(reads).await
    }

    /// A unit's rows as they will be, over `old`. What is beyond the end that the object had was read as zeros.
    fn unit_bytes(
        &self,
        stripe: u64,
        unit: usize,
        rows: &Range<u64>,
        kind: &Unit,
        old: Option<&[u8]>,
    ) -> Bytes {
        let len = (rows.end - rows.start) as usize;
        match (kind, old) {
            (Unit::New(bytes), _) => return bytes.clone(),
            (Unit::Zeros, _) | (Unit::Old, None) => return self.coder.zeros(len),
            _ => {}
        }
        let mut bytes = old.map_or_else(|| vec![0; len], <[u8]>::to_vec);
        let range = self.unit_range(stripe, unit, rows);
        for extent in self.overlay.in_range(range.clone()) {
            let part = extent.part(range.clone());
            let at = (part.offset - range.start) as usize..(part.end() - range.start) as usize;
            match part.content {
                Content::Bytes(payload) => bytes[at].copy_from_slice(payload.data()),
                Content::Zeros | Content::Staged(..) => bytes[at].fill(0),
            }
        }
        bytes.into()
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
