//! Staging: whole stripes go to the members as they come, with their parity.

use std::cell::RefCell;
use std::rc::Rc;

use base::block::{BLOCK, Payload, PieceCountMismatch};
use bytes::Bytes;
use futures::future::try_join_all;
use store::{ObjectId, StageId, Stat, StoreError};

use super::coder::Buffer;
use super::group::{Group, Link, Session, over};
use super::overlay::{Overlay, slice};
use super::stage::{ShardStage, Staged};
use super::transact::is_refusal;

impl Group {
    /// Makes room for `len` bytes that will lie at a whole stripe of their object.
    pub(crate) async fn stage(&self, number: u64, len: u64) -> store::Result<StageId> {
        let session = self.session(number).await?;
        let full = if self.layout.is_mirror() { len } else { len - len % self.layout.stripe() };
        let shard_len = full / self.layout.k as u64;
        let mut shards = Vec::new();
        for position in 0..self.layout.shards() {
            let link = self.takes_part(&session, position).filter(|_| shard_len > 0);
            let shard = match link {
                Some(link) => {
                    let staged = self.in_time(link.target.store.stage(shard_len)).await;
                    let id = staged.map_err(|e| gone(&link, e))?;
                    Some(ShardStage { link, id })
                }
                None => None,
            };
            shards.push(shard);
        }
        self.still(&session)?;
        let id = StageId(self.next_stage.get());
        self.next_stage.set(id.0 + 1);
        let staged = Staged { full, len, session: session.number, shards, tail: RefCell::default() };
        self.stages.borrow_mut().insert(id, Rc::new(staged));
        Ok(id)
    }

    pub(crate) fn stage_release(&self, stage: StageId) {
        self.stages.borrow_mut().remove(&stage);
    }

    fn staged(&self, id: StageId) -> store::Result<Rc<Staged>> {
        let found = self.stages.borrow().get(&id).cloned();
        let staged = found.ok_or(StoreError::NoSuchStage(id.0))?;
        if staged.session != self.shared.number() {
            return Err(over(staged.session));
        }
        Ok(staged)
    }

    /// Writes staged bytes: whole stripes, or up to the stage's end.
    pub(crate) async fn stage_write(
        &self,
        stage: StageId,
        offset: u64,
        payload: Payload,
    ) -> store::Result<()> {
        let staged = self.staged(stage)?;
        let len = payload.len() as u64;
        if self.layout.is_mirror() {
            let pieces = vec![payload; staged.shards.len()];
            return self.write_shards(&staged, offset, pieces).await;
        }
        let stripe = self.layout.stripe();
        let ends = offset + len == staged.len;
        if payload.phase() != 0 || !offset.is_multiple_of(stripe) || (!len.is_multiple_of(stripe) && !ends) {
            let what = format!("staged bytes {offset}..{} of stripes of {stripe}", offset + len);
            return Err(StoreError::InvalidArgument(what));
        }
        let whole = len.min(staged.full.saturating_sub(offset));
        if whole < len {
            // It waits for its transaction, so it must not keep staging memory from others.
            let (data, checksums) = slice(&payload, whole, len - whole).into_parts();
            let tail = Payload::from_parts(0, Bytes::copy_from_slice(&data), checksums);
            *staged.tail.borrow_mut() = Some(tail.map_err(invalid)?);
        }
        if whole == 0 {
            return Ok(());
        }
        self.stage_stripes(&staged, offset, &slice(&payload, 0, whole)).await
    }

    /// Cuts whole stripes into shards, computes their parity, and writes all of it.
    async fn stage_stripes(&self, staged: &Staged, offset: u64, payload: &Payload) -> store::Result<()> {
        let (k, unit) = (self.layout.k, self.layout.unit as usize);
        let stripes = payload.len() / (k * unit);
        let mut parity = self.coder.parity_buffers((stripes * unit) as u64);
        let parity_checksums = self.coder.encode_stripes(payload.data(), &mut parity)?;
        let (shards, checksums) = self.cut(payload, stripes);
        let checksums = checksums.into_iter().chain(parity_checksums);
        let mut pieces = Vec::with_capacity(self.layout.shards());
        for (buffer, checksums) in shards.into_iter().chain(parity).zip(checksums) {
            pieces.push(Payload::from_parts(0, buffer.freeze(), checksums).map_err(invalid)?);
        }
        self.write_shards(staged, offset / k as u64, pieces).await
    }

    /// Writes a piece of each shard.
    async fn write_shards(&self, staged: &Staged, at: u64, pieces: Vec<Payload>) -> store::Result<()> {
        let writes = staged.shards.iter().zip(pieces);
        let writes = writes.filter_map(|(shard, piece)| Some((shard.as_ref()?, piece)));
        let writes = writes.map(|(shard, piece)| async move {
            let written = shard.link.target.store.stage_write(shard.id, at, piece);
            self.in_time(written).await.map_err(|e| gone(&shard.link, e))
        });
        try_join_all(writes).await.map(drop)
    }

    /// The data shards of whole stripes, each in one piece: fewer calls are worth the copy.
    fn cut(&self, payload: &Payload, stripes: usize) -> (Vec<Buffer>, Vec<Vec<u32>>) {
        let (k, unit) = (self.layout.k, self.layout.unit as usize);
        let blocks = unit / BLOCK as usize;
        let cut = |shard: usize| {
            let mut buffer = self.coder.buffer(stripes * unit);
            let mut checksums = Vec::with_capacity(stripes * blocks);
            for stripe in 0..stripes {
                let number = stripe * k + shard;
                let data = &payload.data()[number * unit..(number + 1) * unit];
                buffer[stripe * unit..(stripe + 1) * unit].copy_from_slice(data);
                checksums.extend(&payload.checksums()[number * blocks..(number + 1) * blocks]);
            }
            (buffer, checksums)
        };
        (0..k).map(cut).unzip()
    }

    /// Names staged bytes in a transaction.
    pub(super) fn write_staged(
        &self,
        session: &Session,
        live: &[Option<Link>],
        overlay: &mut Overlay,
        offset: u64,
        (id, at, len): (StageId, u64, u64),
    ) -> store::Result<()> {
        let staged = self.staged(id)?;
        if staged.session != session.number {
            return Err(over(staged.session));
        }
        // A member that has come back since has nothing of it.
        if staged.full > 0 && live.iter().zip(&staged.shards).any(|(l, shard)| l.is_some() && shard.is_none())
        {
            return Err(StoreError::NoSuchStage(id.0));
        }
        let mirror = self.layout.is_mirror();
        let aligned = mirror || (offset.is_multiple_of(self.layout.stripe()) && at == 0);
        if !aligned || at + len > staged.len {
            let what = format!("{len} staged bytes from {at} on written at {offset}: not whole stripes");
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
            let what = format!("{len} bytes of a stage of {}, of which some are not there", staged.len);
            return Err(StoreError::InvalidArgument(what));
        };
        overlay.write(offset + whole, slice(&tail, 0, len - whole))
    }

    /// Size of an object, and the space that it takes on all members.
    pub(crate) async fn stat(&self, number: u64, oid: &ObjectId) -> store::Result<Stat> {
        let session = self.session(number).await?;
        let locked = self.exclusive_object(oid).await;
        self.still(&session)?;
        let size = self.size(&session, oid, &locked).await?;
        let size = size.ok_or_else(|| StoreError::NoSuchObject(oid.to_string()))?;
        let links = self.live_links(&session, oid);
        let stats = links.iter().flatten().map(|link| link.target.store.stat(&self.cid, oid));
        let stats = try_join_all(stats).await?;
        Ok(Stat { size, allocated: stats.iter().map(|stat| stat.allocated).sum() })
    }
}

/// An error of a member: if it has failed, the session is over, and whoever asked tries again without it.
fn gone(link: &Link, e: StoreError) -> StoreError {
    if is_refusal(&e) || matches!(e, StoreError::Disconnected(_)) {
        return e;
    }
    link.target.fail(&e.to_string());
    StoreError::Disconnected(e.to_string())
}

fn invalid(e: PieceCountMismatch) -> StoreError {
    StoreError::InvalidArgument(e.to_string())
}
