//! Undoes changes that too few members have.

use std::collections::BTreeSet;

use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};

use crate::group::Group;
use crate::member_link::MemberLink;
use crate::record::{ChangeId, IntentPlace, StoredIntent, Touched, Undo, key_settled, own_object};
use crate::view::MemberView;

impl Group {
    /// Undoes changes on the members that have them, the last change first. `whole` are the members
    /// that have all changes which the group keeps.
    ///
    /// # Errors
    /// If a member fails. Then another interval undoes the rest.
    pub(crate) async fn undo_changes(
        &self,
        undone: &BTreeSet<ChangeId>,
        members: &[&MemberView],
        whole: &[&MemberView],
    ) -> store::Result<()> {
        for &change in undone.iter().rev() {
            // The metadata of these members shows the state without the change.
            let peers: Vec<&MemberLink> =
                whole.iter().filter(|view| !view.intents.contains_key(&change)).map(|v| &v.link).collect();
            if peers.is_empty() {
                continue;
            }
            for view in members {
                let Some(intent) = view.intents.get(&change) else { continue };
                let target = view.link.target.uuid();
                tracing::info!(cid = %self.cid, ?change, target_uuid = %target, "undoing a change that too few members have");
                let undo = self.undo_with(view, intent, &peers).await?;
                if base::mutant!(SkipUndo) {
                    continue;
                }
                self.calls.apply_to(&view.link, undo).await?;
            }
            metrics::counter!("outboard_osd_group_undone_total").increment(1);
        }
        Ok(())
    }

    /// Builds the transaction that undoes a change on one member. `peers` are members without that
    /// change; at least one. Uses the first of them that is not damaged.
    async fn undo_with(
        &self,
        view: &MemberView,
        stored: &StoredIntent,
        peers: &[&MemberLink],
    ) -> store::Result<Transaction> {
        let (last, others) = peers.split_last().expect("at least one peer");
        for peer in others {
            match self.undo(view, stored, peer).await {
                Err(StoreError::Corrupt { .. }) => {}
                outcome => return outcome,
            }
        }
        self.undo(view, stored, last).await
    }

    async fn undo(
        &self,
        view: &MemberView,
        stored: &StoredIntent,
        peer: &MemberLink,
    ) -> store::Result<Transaction> {
        let mut ops = Vec::new();
        for (index, touched) in stored.intent.objects.iter().enumerate() {
            self.undo_object(view, (stored.place, index), touched, peer, &mut ops).await?;
        }
        let oid = own_object();
        ops.push(Op::OmapRemove { oid: oid.clone(), keys: vec![stored.place.key()] });
        // The intent may be the only one that says which changes are settled.
        let settled = view.state.settled.encode().into();
        ops.push(Op::OmapSet { oid, entries: vec![(key_settled(), settled)] });
        Ok(Transaction { collection: self.cid.clone(), ops, uses_reserve: true })
    }

    async fn undo_object(
        &self,
        view: &MemberView,
        (place, index): (IntentPlace, usize),
        touched: &Touched,
        peer: &MemberLink,
        ops: &mut Vec<Op>,
    ) -> store::Result<()> {
        let (oid, keep) = (&touched.oid, place.undo_object(index));
        match &touched.undo {
            Undo::Remove => {
                ops.push(Op::Remove { oid: oid.clone() });
                return Ok(());
            }
            Undo::Return => {
                match self.calls.answer(&view.link, view.link.target.store().stat(&self.cid, oid)).await {
                    Ok(_) => ops.push(Op::Remove { oid: oid.clone() }),
                    Err(StoreError::NoSuchObject(_)) => {}
                    Err(e) => return Err(e),
                }
                let (src, dst_collection) = (keep, self.cid.clone());
                ops.push(Op::MoveRename { src, dst_collection, dst: oid.clone() });
                return Ok(());
            }
            Undo::Restore { size, saved } => {
                // The saved ranges are whole blocks, so the last one may end beyond the old end of
                // the fragment. The truncation corrects this.
                ops.extend(restore_ranges(oid, place, index, saved));
                ops.push(Op::Truncate { oid: oid.clone(), size: *size });
                if touched.undo.keeps_object() {
                    ops.push(Op::Remove { oid: keep });
                }
            }
            Undo::Unchanged => {}
        }
        self.undo_metadata(touched, peer, ops).await
    }

    /// Appends the ops that restore the old metadata. Metadata is the same on all members, so
    /// `peer` still has the old metadata. If it lacks the object, an earlier change that is also
    /// undone has created the object.
    async fn undo_metadata(
        &self,
        touched: &Touched,
        peer: &MemberLink,
        ops: &mut Vec<Op>,
    ) -> store::Result<()> {
        let (oid, store) = (&touched.oid, &peer.target.store());
        let none_if_gone = |e| match e {
            StoreError::NoSuchObject(_) => Ok(Vec::new()),
            e => Err(e),
        };
        if touched.xattrs || matches!(touched.undo, Undo::Restore { .. }) {
            let xattrs = self.calls.answer(peer, store.get_xattrs(&self.cid, oid)).await;
            let xattrs = xattrs.or_else(none_if_gone)?;
            ops.push(Op::RemoveXattrs { oid: oid.clone() });
            ops.push(Op::SetXattrs { oid: oid.clone(), xattrs });
        }
        let mut entries = Vec::new();
        if !touched.omap_keys.is_empty() {
            let keys = touched.omap_keys.clone();
            let found = self.calls.answer(peer, store.omap_get(&self.cid, oid, keys.clone())).await;
            let found = found.or_else(none_if_gone)?;
            ops.push(Op::OmapRemove { oid: oid.clone(), keys });
            entries.extend(found);
        }
        for (from, to) in &touched.omap_ranges {
            let found = self.calls.all_entries(peer, oid, from, to.as_ref()).await.or_else(none_if_gone)?;
            ops.push(match to {
                Some(to) => Op::OmapRemoveRange { oid: oid.clone(), from: from.clone(), to: to.clone() },
                None => Op::OmapClear { oid: oid.clone() },
            });
            entries.extend(found);
        }
        if !entries.is_empty() {
            ops.push(Op::OmapSet { oid: oid.clone(), entries });
        }
        Ok(())
    }
}

/// Copies ranges of an object to its undo object.
pub(crate) fn save_ranges(
    oid: &ObjectId,
    place: IntentPlace,
    index: usize,
    ranges: &[(u64, u64)],
) -> impl Iterator<Item = Op> {
    let keep = place.undo_object(index);
    place.saved_at(ranges).map(move |(at, kept_at, len)| clone_range((oid, at), (&keep, kept_at), len))
}

/// Copies ranges of an undo object back to its object.
fn restore_ranges(
    oid: &ObjectId,
    place: IntentPlace,
    index: usize,
    ranges: &[(u64, u64)],
) -> impl Iterator<Item = Op> {
    let keep = place.undo_object(index);
    place.saved_at(ranges).map(move |(at, kept_at, len)| clone_range((&keep, kept_at), (oid, at), len))
}

fn clone_range((src, src_offset): (&ObjectId, u64), (dst, dst_offset): (&ObjectId, u64), len: u64) -> Op {
    Op::CloneRange { src: src.clone(), dst: dst.clone(), src_offset, len, dst_offset }
}
