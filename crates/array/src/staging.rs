//! Staging: writes whole stripes and their parity to the members as the data arrives.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use base::block::{BLOCK, Payload, PieceCountMismatch};
use bytes::Bytes;
use futures::future::{join_all, try_join_all};
use store::stripes::{FragmentBytes, StripeError};
use store::{StageId, StoreCalls, StoreError, Transaction};
use tokio::time::Instant;

use crate::coding::StripeBatch;
use crate::group::Group;
use crate::interval::{Interval, over};
use crate::member_link::MemberLink;
use crate::overlay::{Overlay, slice};
use crate::stage::{FragmentStage, StagedStripes};

impl Group {
    /// Creates a stage for `len` bytes, which a transaction will later write at a stripe boundary.
    pub(crate) async fn stage(&self, number: u64, len: u64) -> store::Result<StageId> {
        let interval = self.interval(number).await?;
        let full = if self.layout.is_mirror() { len } else { len - len % self.layout.stripe() };
        let fragment_len = full / self.layout.k as u64;
        let mut fragments = Vec::new();
        for position in 0..self.layout.fragments() {
            let link = self.takes_part(&interval, position).filter(|_| fragment_len > 0);
            let fragment = match link {
                Some(link) => {
                    let staged = self.calls.answer(&link, link.target.store().stage(fragment_len)).await;
                    let id = staged.map_err(|e| link.classified(e))?;
                    Some(FragmentStage { link, id })
                }
                None => None,
            };
            fragments.push(fragment);
        }
        self.still(&interval)?;
        let staged =
            StagedStripes { full, len, interval: interval.number, fragments, tail: RefCell::default() };
        Ok(self.stages.add(staged))
    }

    pub(crate) fn stage_release(&self, stage: StageId) {
        self.stages.remove(stage);
    }

    fn staged(&self, id: StageId) -> store::Result<Rc<StagedStripes>> {
        let staged = self.stages.get(id)?;
        if staged.interval != self.number() {
            return Err(over(staged.interval));
        }
        Ok(staged)
    }

    /// Writes bytes to a stage: either whole stripes, or all bytes up to the stage's end.
    pub(crate) async fn stage_write(
        &self,
        stage: StageId,
        offset: u64,
        payload: Payload,
    ) -> store::Result<()> {
        let staged = self.staged(stage)?;
        let len = payload.len() as u64;
        if self.layout.is_mirror() {
            return self.stage_copies(&staged, offset, payload).await;
        }
        let stripe = self.layout.stripe();
        let ends = offset + len == staged.len;
        if payload.block_offset() != 0
            || !offset.is_multiple_of(stripe)
            || (!len.is_multiple_of(stripe) && !ends)
        {
            let what =
                format!("staged bytes {offset}..{} are not whole stripes of {stripe} bytes", offset + len);
            return Err(StoreError::InvalidArgument(what));
        }
        let whole = len.min(staged.full.saturating_sub(offset));
        if whole < len {
            // The bytes after the last whole stripe wait for their transaction. They are copied to
            // the heap, so that they do not occupy staging memory.
            let (data, checksums) = slice(&payload, whole, len - whole).into_parts();
            let tail = Payload::from_parts(0, Bytes::copy_from_slice(&data), checksums);
            *staged.tail.borrow_mut() = Some(tail.map_err(invalid)?);
        }
        if whole == 0 {
            return Ok(());
        }
        self.stage_stripes(&staged, offset, &slice(&payload, 0, whole)).await
    }

    /// Writes the same bytes to all members of a mirror.
    async fn stage_copies(&self, staged: &StagedStripes, offset: u64, payload: Payload) -> store::Result<()> {
        let (data, checksums) = payload.into_parts();
        let end = data.len() - data.len() % BLOCK as usize;
        let (whole, rest) = (data.slice(..end), data.slice(end..));
        let (sums, last) = checksums.split_at(end / BLOCK as usize);
        if !rest.is_empty() {
            // A partial block at the end is written to each member separately.
            let tail = Payload::from_parts(0, rest, last.to_vec()).map_err(invalid)?;
            self.write_tail(staged, offset + end as u64, tail).await?;
        }
        if whole.is_empty() {
            return Ok(());
        }
        let most = self.most_per_fragment();
        for at in (0..end).step_by(most) {
            let to = (at + most).min(end);
            let sums = sums[at / BLOCK as usize..to / BLOCK as usize].to_vec();
            let data = vec![FragmentBytes { pieces: vec![whole.slice(at..to)], checksums: sums }];
            self.stage_fragments(staged, offset + at as u64, data).await?;
        }
        Ok(())
    }

    /// Writes the last partial block of a stage to all copies.
    async fn write_tail(&self, staged: &StagedStripes, at: u64, tail: Payload) -> store::Result<()> {
        let writes = staged.fragments.iter().flatten().map(|fragment| {
            let written = fragment.link.target.store().stage_write(fragment.id, at, tail.clone());
            async move {
                self.calls.answer(&fragment.link, written).await.map_err(|e| fragment.link.classified(e))
            }
        });
        try_join_all(writes).await.map(drop)
    }

    /// Divides whole stripes into fragments, and writes the fragments with their parity.
    async fn stage_stripes(
        &self,
        staged: &StagedStripes,
        offset: u64,
        payload: &Payload,
    ) -> store::Result<()> {
        let (k, unit) = (self.layout.k, self.layout.unit as usize);
        let (most, fragment_len) = (self.most_per_fragment(), payload.len() / k);
        // Each step covers whole units, or a part of one unit.
        let step = if most >= unit { most - most % unit } else { most };
        let mut at = 0;
        while at < fragment_len {
            // A step smaller than a unit does not cross the end of the unit.
            let end = (at + step).min(if step < unit { (at / unit + 1) * unit } else { fragment_len });
            let data = (0..k).map(|fragment| self.cut(payload, fragment, at..end)).collect();
            self.stage_fragments(staged, offset / k as u64 + at as u64, data).await?;
            at = end;
        }
        Ok(())
    }

    /// Maximum number of bytes of one fragment in a staging call; a multiple of the block size.
    fn most_per_fragment(&self) -> usize {
        let most = self.coding.max_bytes() / self.layout.fragments();
        (most - most % BLOCK as usize).max(BLOCK as usize)
    }

    /// Extracts a range of a data fragment from whole stripes.
    fn cut(&self, payload: &Payload, fragment: usize, range: Range<usize>) -> FragmentBytes {
        let (k, unit, block) = (self.layout.k, self.layout.unit as usize, BLOCK as usize);
        let mut cut = FragmentBytes::default();
        let mut at = range.start;
        while at < range.end {
            let end = ((at / unit + 1) * unit).min(range.end);
            let start = (at / unit * k + fragment) * unit + at % unit;
            let len = end - at;
            cut.pieces.push(payload.data().slice(start..start + len));
            cut.checksums.extend(&payload.checksums()[start / block..(start + len) / block]);
            at = end;
        }
        cut
    }

    /// Writes the same range of each fragment to the fragment's stage.
    async fn stage_fragments(
        &self,
        staged: &StagedStripes,
        at: u64,
        data: Vec<FragmentBytes>,
    ) -> store::Result<()> {
        let part = |fragment: &Option<FragmentStage>| {
            fragment.as_ref().map(|fragment| (fragment.link.target.uuid(), fragment.id))
        };
        let parts = staged.fragments.iter().map(part).collect();
        let stripes = StripeBatch { parts, offset: at, data, code: self.coder.parity_code().cloned() };
        let buffers = |len| self.coder.parity_buffers(len as u64);
        let staging = self.coding.stage(&stripes, buffers);
        let outcome = tokio::select! {
            biased;
            outcome = staging => outcome,
            e = self.find_stalled(staged) => return Err(e),
        };
        match outcome {
            Ok(()) => Ok(()),
            Err(StripeError::Part(number, e)) => match staged.fragments.get(number) {
                Some(Some(fragment)) => Err(fragment.link.classified(e)),
                _ => Err(e),
            },
            Err(StripeError::Store(e)) => Err(e),
            Err(StripeError::Damaged(what)) => Err(StoreError::BadPayload(what)),
            // No coding place could compute the parity. This does not indicate a failure of a
            // target.
            Err(StripeError::Coding(why)) => Err(StoreError::Disconnected(why)),
        }
    }

    /// Waits for the member timeout, and then checks which member does not answer. Resolves when
    /// the group continues without that member, or when the timeout `patience` expires.
    async fn find_stalled(&self, staged: &StagedStripes) -> StoreError {
        let began = Instant::now();
        tokio::time::sleep(self.calls.member_timeout).await;
        let asked = staged.fragments.iter().flatten().map(|fragment| async move {
            // An empty transaction must become durable, so a stalled drive does not answer it.
            let nothing = Transaction::new(self.cid.clone());
            let call = fragment.link.target.store().queue_transaction(nothing);
            self.calls.answer(&fragment.link, call).await.map_err(|e| fragment.link.classified(e)).err()
        });
        let found = join_all(asked).await.into_iter().flatten().next();
        if let Some(found) = found {
            return found;
        }
        // All members answer, so the write of the stripes may finish soon.
        tokio::time::sleep_until(began + self.calls.patience).await;
        StoreError::Disconnected(
            "the targets answer, but they did not write the staged stripes in time".into(),
        )
    }

    /// Adds staged bytes to the changes of an object.
    pub(crate) fn write_staged(
        &self,
        interval: &Interval,
        live: &[Option<MemberLink>],
        overlay: &mut Overlay,
        offset: u64,
        (id, at, len): (StageId, u64, u64),
    ) -> store::Result<()> {
        let staged = self.staged(id)?;
        if staged.interval != interval.number {
            return Err(over(staged.interval));
        }
        // A member that returned after the data was staged does not have the staged data.
        if staged.full > 0
            && live.iter().zip(&staged.fragments).any(|(l, fragment)| l.is_some() && fragment.is_none())
        {
            return Err(StoreError::NoSuchStage(id.0));
        }
        let mirror = self.layout.is_mirror();
        let aligned = mirror || (offset.is_multiple_of(self.layout.stripe()) && at == 0);
        if !aligned || at + len > staged.len {
            let what = format!(
                "cannot write {len} bytes from offset {at} of a stage to offset {offset} of an object: they are not whole stripes of the stage"
            );
            return Err(StoreError::InvalidArgument(what));
        }
        let whole = len.min(staged.full.saturating_sub(at));
        let whole = if mirror { whole } else { whole - whole % self.layout.stripe() };
        if whole > 0 {
            overlay.write_staged(offset, whole, &staged, at)?;
        }
        if whole == len {
            return Ok(());
        }
        let tail = staged.tail.borrow().clone().filter(|_| whole == staged.full);
        let Some(tail) = tail else {
            let what = format!(
                "cannot write {len} bytes of a stage of {} bytes: some of these bytes were not staged",
                staged.len
            );
            return Err(StoreError::InvalidArgument(what));
        };
        overlay.write(offset + whole, slice(&tail, 0, len - whole))
    }
}

fn invalid(e: PieceCountMismatch) -> StoreError {
    StoreError::InvalidArgument(e.to_string())
}
