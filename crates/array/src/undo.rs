//! Rolls back transactions that only some members have.

use std::collections::BTreeSet;

use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};

use crate::group::Group;
use crate::member_link::MemberLink;
use crate::record::{Intent, Touched, Undo, key_intent, own_object, undo_object};
use crate::view::MemberView;

impl Group {
    /// Rolls back all transactions that only some members have. Returns the numbers of these
    /// transactions.
    pub(crate) async fn take_back(&self, members: &[Option<MemberView>]) -> store::Result<BTreeSet<u64>> {
        let trimmed = members.iter().flatten().map(MemberView::finished).max().unwrap_or(0);
        let intents = members.iter().flatten().flat_map(|v| v.intents.keys().copied());
        let partial =
            |number: &u64| *number > trimmed && !members.iter().flatten().all(|view| view.has(*number));
        let undone: BTreeSet<u64> = intents.filter(partial).collect();
        // Roll back the newest transaction first. The member `peer` never had this transaction, and
        // has already rolled back all newer transactions. Its metadata is therefore the metadata
        // before this transaction.
        for &number in undone.iter().rev() {
            let Some(peer) = members.iter().flatten().find(|view| !view.has(number)) else { continue };
            for view in members.iter().flatten() {
                let Some(intent) = view.intents.get(&number) else { continue };
                let target = view.link.target.uuid();
                tracing::info!(cid = %self.cid, number, target_uuid = %target, "rolling back a transaction that only some members have");
                let undo = self.undo(view, number, intent, &peer.link).await?;
                if base::mutant!(SkipUndo) {
                    continue;
                }
                self.calls.apply_to(&view.link, undo).await?;
            }
            metrics::counter!("outboard_osd_group_undone_total").increment(1);
        }
        Ok(undone)
    }

    /// Builds the transaction that rolls back transaction `number` on one member. `peer` is a
    /// member without that transaction.
    async fn undo(
        &self,
        view: &MemberView,
        number: u64,
        intent: &Intent,
        peer: &MemberLink,
    ) -> store::Result<Transaction> {
        let mut ops = Vec::new();
        for (index, touched) in intent.objects.iter().enumerate() {
            self.undo_object(view, undo_object(number, index), touched, peer, &mut ops).await?;
        }
        ops.push(Op::OmapRemove { oid: own_object(), keys: vec![key_intent(number)] });
        Ok(Transaction { collection: self.cid.clone(), ops, uses_reserve: true })
    }

    async fn undo_object(
        &self,
        view: &MemberView,
        keep: ObjectId,
        touched: &Touched,
        peer: &MemberLink,
        ops: &mut Vec<Op>,
    ) -> store::Result<()> {
        let oid = &touched.oid;
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
                ops.extend(copy_ranges(&keep, oid, saved));
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
    /// `peer` still has the old metadata.
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
            let xattrs = self.calls.answer(peer, store.get_xattrs(&self.cid, oid)).await?;
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

/// Copies ranges of an object to the same offsets of another object.
pub(crate) fn copy_ranges(from: &ObjectId, to: &ObjectId, ranges: &[(u64, u64)]) -> impl Iterator<Item = Op> {
    ranges.iter().map(|&(at, len)| Op::CloneRange {
        src: from.clone(),
        dst: to.clone(),
        src_offset: at,
        len,
        dst_offset: at,
    })
}
