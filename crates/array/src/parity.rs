//! Computes the parity of a changed object.
//!
//! If a change replaces stripes completely, their parity and its checksums are computed from the
//! new data in one pass. Otherwise the array must read old bytes first. It chooses the one of two
//! methods that reads fewer bytes. Either it reads the replaced bytes and the old parity, and
//! updates the parity by the difference between old and new bytes. Or it reads the unchanged units
//! of the affected rows, and computes the parity from all units.
//!
//! The new bytes are verified before the checksums of the parity are used: otherwise a damaged block
//! could be reconstructed from parity that contains the same damage.

use std::ops::Range;

use base::block::{ChecksumMismatch, Payload, piece_checksums, verify_pieces};
use bytes::Bytes;
use futures::future::{try_join, try_join_all};
use store::{Op, StoreError, WriteSource};

use crate::coder::Buffer;
use crate::overlay::{OverlayContent, slice};
use crate::rows::{ArrayChange, Split, StripeRun, UnitContent};

impl ArrayChange<'_> {
    /// Appends the ops of the parity fragments for a run of stripes.
    pub(crate) async fn parity(
        &self,
        run: &StripeRun,
        old: &impl AsyncFn(usize, Range<u64>) -> store::Result<Vec<u8>>,
        split: &mut Split,
    ) -> store::Result<()> {
        if run.zeros {
            let range = run.first * self.layout.unit..(run.first + run.count) * self.layout.unit;
            (self.layout.k..self.layout.fragments())
                .for_each(|fragment| self.zero_fragment(fragment, range.clone(), split));
            return Ok(());
        }
        if self.is_staged(run.first) {
            self.staged_parity(run, split);
            return Ok(());
        }
        let rows = run.rows.end - run.rows.start;
        let mut parity = self.coder.parity_buffers(run.count * rows);
        let checksums = if run.new {
            self.new_parity(run, &mut parity)?
        } else {
            for index in 0..run.count {
                let out = (index * rows) as usize..((index + 1) * rows) as usize;
                self.stripe_parity(run.first + index, &run.rows, old, &mut parity, out).await?;
            }
            parity.iter().map(|buffer| piece_checksums(0, buffer)).collect()
        };
        let first = run.first * self.layout.unit + run.rows.start;
        for (row, (buffer, checksums)) in parity.into_iter().zip(checksums).enumerate() {
            let payload = Payload::from_parts(0, buffer.freeze(), checksums);
            let payload = payload.map_err(|e| StoreError::InvalidArgument(e.to_string()))?;
            self.put_parity(self.layout.k + row, first, payload, split);
        }
        Ok(())
    }

    /// Computes the parity of completely replaced stripes, and its checksums, in one pass. The same
    /// pass verifies the new bytes.
    fn new_parity(&self, run: &StripeRun, parity: &mut [Buffer]) -> store::Result<Vec<Vec<u32>>> {
        let stripes = run.first..run.first + run.count;
        let units = stripes.flat_map(|stripe| (0..self.layout.k).map(move |unit| (stripe, unit)));
        let len = (run.rows.end - run.rows.start) as usize;
        let bytes = |(stripe, unit)| match self.unit(stripe, unit, &run.rows) {
            UnitContent::New(payload) => payload,
            _ => self.coder.zero_blocks(len),
        };
        let units: Vec<Payload> = units.map(bytes).collect();
        self.coder.encode_units(&units, parity)
    }

    fn staged_parity(&self, run: &StripeRun, split: &mut Split) {
        let start = run.first * self.layout.stripe();
        let staged = self.overlay.in_range(start..start + self.layout.stripe());
        for extent in staged {
            let OverlayContent::Staged(stage, at) = &extent.content else { continue };
            let offset = (at + start - extent.offset) / self.layout.k as u64;
            let (at, len) = (run.first * self.layout.unit, run.count * self.layout.unit);
            for fragment in self.layout.k..self.layout.fragments() {
                split.overwritten[fragment].push((at, len));
                if let Some(staged) = &stage.fragments[fragment] {
                    let source = WriteSource::Staged { stage: staged.id, offset, len };
                    split.ops[fragment].push(Op::Write { oid: self.oid.clone(), offset: at, source });
                }
            }
        }
    }

    fn put_parity(&self, fragment: usize, at: u64, payload: Payload, split: &mut Split) {
        let whole = payload.len() as u64;
        split.overwritten[fragment].push((at, whole));
        let end = self.layout.fragment_size(fragment, self.overlay.size);
        let len = end.saturating_sub(at).min(whole);
        if len > 0 {
            let payload = if len == whole { payload } else { slice(&payload, 0, len) };
            let source = WriteSource::Inline(payload);
            split.ops[fragment].push(Op::Write { oid: self.oid.clone(), offset: at, source });
        }
    }

    /// Computes the parity of a stripe's rows into the range `out` of the buffers.
    async fn stripe_parity(
        &self,
        stripe: u64,
        rows: &Range<u64>,
        old: &impl AsyncFn(usize, Range<u64>) -> store::Result<Vec<u8>>,
        parity: &mut [Buffer],
        out: Range<usize>,
    ) -> store::Result<()> {
        let (k, m) = (self.layout.k, self.layout.m);
        let units: Vec<UnitContent> = (0..k).map(|unit| self.unit(stripe, unit, rows)).collect();
        let keeps: Vec<bool> = (0..k).map(|unit| self.keeps_some(stripe, unit, rows)).collect();
        let is_replaced = |unit: usize| {
            let had_bytes = self.unit_range(stripe, unit, rows).start < self.overlay.before;
            !matches!(units[unit], UnitContent::Old) && had_bytes
        };
        let replaced: Vec<bool> = (0..k).map(is_replaced).collect();
        let here = |fragment: usize| self.live[fragment];
        let all_here = (0..k).filter(|&unit| replaced[unit]).all(here) && (k..k + m).all(here);
        let to_read = |which: &[bool]| which.iter().filter(|which| **which).count();
        if all_here && to_read(&replaced) + m < to_read(&keeps) {
            return self.change_parity(stripe, rows, old, (&units, &replaced), parity, out).await;
        }
        let kept = self.read_units(stripe, rows, &keeps, old).await?;
        let new = (0..k).map(|unit| self.unit_bytes(stripe, unit, rows, &units[unit], kept[unit].as_deref()));
        let new: Vec<Bytes> = new.collect::<store::Result<_>>()?;
        self.coder.encode(&new, parity, out)
    }

    /// Computes the new parity from the old parity and the change of the data.
    async fn change_parity(
        &self,
        stripe: u64,
        rows: &Range<u64>,
        old: &impl AsyncFn(usize, Range<u64>) -> store::Result<Vec<u8>>,
        (units, replaced): (&[UnitContent], &[bool]),
        parity: &mut [Buffer],
        out: Range<usize>,
    ) -> store::Result<()> {
        let (k, m) = (self.layout.k, self.layout.m);
        let start = stripe * self.layout.unit;
        let at = start + rows.start..start + rows.end;
        let parity_before = try_join_all((k..k + m).map(|fragment| old(fragment, at.clone())));
        let (before, parity_before) =
            try_join(self.read_units(stripe, rows, replaced, old), parity_before).await?;
        for (buffer, old) in parity.iter_mut().zip(&parity_before) {
            buffer[out.clone()].copy_from_slice(old);
        }
        for (unit, before) in before.into_iter().enumerate() {
            if matches!(units[unit], UnitContent::Old) {
                continue;
            }
            let mut delta = before.unwrap_or_else(|| vec![0; out.len()]);
            let new = self.unit_bytes(stripe, unit, rows, &units[unit], Some(&delta))?;
            delta.iter_mut().zip(&new[..]).for_each(|(delta, new)| *delta ^= new);
            self.coder.update(unit, &delta, parity, out.clone())?;
        }
        Ok(())
    }

    /// Reads the rows of each unit of a stripe for which `wanted` is true. The result is `None` for
    /// the other units.
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

    /// Returns the new bytes of a unit's rows: the old bytes `old`, overwritten by the new content.
    /// `old` contains zeros beyond the object's old end.
    ///
    /// # Errors
    /// [`StoreError::BadPayload`] if the new content does not match its checksums.
    fn unit_bytes(
        &self,
        stripe: u64,
        unit: usize,
        rows: &Range<u64>,
        kind: &UnitContent,
        old: Option<&[u8]>,
    ) -> store::Result<Bytes> {
        let bad = |e: ChecksumMismatch| StoreError::BadPayload(e.to_string());
        let len = (rows.end - rows.start) as usize;
        match (kind, old) {
            (UnitContent::New(payload), _) => {
                payload.verify().map_err(bad)?;
                return Ok(payload.data().clone());
            }
            (UnitContent::Zeros, _) | (UnitContent::Old, None) => return Ok(self.coder.zeros(len)),
            _ => {}
        }
        let mut bytes = old.map_or_else(|| vec![0; len], <[u8]>::to_vec);
        let range = self.unit_range(stripe, unit, rows);
        for extent in self.overlay.in_range(range.clone()) {
            let part = extent.part(range.clone());
            let at = (part.offset - range.start) as usize..(part.end() - range.start) as usize;
            match part.content {
                OverlayContent::Bytes(payload) => {
                    bytes[at.clone()].copy_from_slice(payload.data());
                    verify_pieces(0, &bytes[at], payload.checksums()).map_err(bad)?;
                }
                OverlayContent::Zeros | OverlayContent::Staged(..) => bytes[at].fill(0),
            }
        }
        Ok(bytes.into())
    }
}
