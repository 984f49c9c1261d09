//! Undoes changes that too few members have.
//!
//! Each member undoes all of its undone changes in one transaction. The metadata of a member without
//! these changes shows the state before the first of them. A member with this metadata that still had
//! the data of the first change would have a state that never was.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};

use crate::ask::is_unreadable;
use crate::group::Group;
use crate::member_link::MemberLink;
use crate::record::{ChangeId, IntentPlace, StoredIntent, Touched, Undo, key_settled, own_object};
use crate::view::MemberView;

/// Which metadata of an object undone changes have touched.
#[derive(Default)]
struct TouchedMetadata<'a> {
    xattrs: bool,
    omap_keys: BTreeSet<Bytes>,
    omap_ranges: Vec<(Bytes, Option<Bytes>)>,
    /// Members without these changes.
    peers: &'a [&'a MemberLink],
}

/// The transaction in which a member undoes changes.
struct UndoTransaction<'a> {
    group: &'a Group,
    view: &'a MemberView,
    ops: Vec<Op>,
    /// Objects that exist, or do not exist, once the ops so far have been executed.
    exist: BTreeMap<&'a ObjectId, bool>,
    metadata: BTreeMap<&'a ObjectId, TouchedMetadata<'a>>,
}

impl Group {
    /// Undoes changes on the members that have them. `whole` are the members that have all changes
    /// which the group keeps.
    ///
    /// # Errors
    /// If a member fails. Then another interval undoes the rest.
    pub(crate) async fn undo_changes(
        &self,
        undone: &BTreeSet<ChangeId>,
        members: &[&MemberView],
        whole: &[&MemberView],
    ) -> store::Result<()> {
        // The metadata of these members shows the state without the change.
        let peers = |change: &ChangeId| -> Vec<&MemberLink> {
            whole.iter().filter(|view| !view.intents.contains_key(change)).map(|view| &view.link).collect()
        };
        let undone: BTreeMap<ChangeId, Vec<&MemberLink>> = undone
            .iter()
            .map(|change| (*change, peers(change)))
            .filter(|(_, peers)| !peers.is_empty())
            .collect();
        for view in members {
            let has = |(change, peers)| Some((view.intents.get(change)?, peers));
            let intents: Vec<(&StoredIntent, &Vec<&MemberLink>)> = undone.iter().filter_map(has).collect();
            if intents.is_empty() {
                continue;
            }
            let changes: Vec<ChangeId> = intents.iter().map(|(stored, _)| stored.change).collect();
            let target = view.link.target.uuid();
            tracing::info!(cid = %self.cid, ?changes, target_uuid = %target, "undoing changes that too few members have");
            let (ops, exist, metadata) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
            let mut undo = UndoTransaction { group: self, view, ops, exist, metadata };
            for (stored, peers) in intents.into_iter().rev() {
                undo.add(stored, peers).await?;
            }
            let undo = undo.end().await?;
            if base::mutant!(SkipUndo) {
                continue;
            }
            self.calls.apply_to(&view.link, undo).await?;
        }
        metrics::counter!("outboard_osd_group_undone_total").increment(undone.len() as u64);
        Ok(())
    }
}

impl<'a> UndoTransaction<'a> {
    /// Appends the ops that undo a change, after those of all later changes.
    async fn add(&mut self, stored: &'a StoredIntent, peers: &'a [&'a MemberLink]) -> store::Result<()> {
        for (index, touched) in stored.intent.objects.iter().enumerate() {
            self.object(stored.place, index, touched, peers).await?;
        }
        self.ops.push(Op::OmapRemove { oid: own_object(), keys: vec![stored.place.key()] });
        Ok(())
    }

    async fn object(
        &mut self,
        place: IntentPlace,
        index: usize,
        touched: &'a Touched,
        peers: &'a [&'a MemberLink],
    ) -> store::Result<()> {
        let (oid, keep) = (&touched.oid, place.undo_object(index));
        match &touched.undo {
            Undo::Remove => {
                self.ops.push(Op::Remove { oid: oid.clone() });
                self.metadata.remove(oid);
                self.exist.insert(oid, false);
                return Ok(());
            }
            Undo::Return => {
                if self.exists(oid).await? {
                    self.ops.push(Op::Remove { oid: oid.clone() });
                }
                let (src, dst_collection) = (keep, self.group.cid.clone());
                self.ops.push(Op::MoveRename { src, dst_collection, dst: oid.clone() });
                self.metadata.remove(oid);
                self.exist.insert(oid, true);
                return Ok(());
            }
            Undo::Restore { size, saved } => {
                // The saved ranges are whole blocks, so the last one may end beyond the old end of
                // the fragment. The truncation corrects this.
                self.ops.extend(restore_ranges(oid, place, index, saved));
                self.ops.push(Op::Truncate { oid: oid.clone(), size: *size });
                if touched.undo.keeps_object() {
                    self.ops.push(Op::Remove { oid: keep });
                }
            }
            Undo::Unchanged => {}
        }
        let are_others = |known: &TouchedMetadata<'_>| {
            let uuids = |peers: &[&MemberLink]| peers.iter().map(|p| p.target.uuid()).collect::<Vec<_>>();
            uuids(known.peers) != uuids(peers)
        };
        if self.metadata.get(oid).is_some_and(are_others)
            && let Some(later) = self.metadata.remove(oid)
        {
            self.restore(oid, &later).await?;
        }
        let metadata = self.metadata.entry(oid).or_default();
        metadata.xattrs |= touched.xattrs || matches!(touched.undo, Undo::Restore { .. });
        metadata.omap_keys.extend(touched.omap_keys.iter().cloned());
        metadata.omap_ranges.extend(touched.omap_ranges.iter().cloned());
        metadata.peers = peers;
        Ok(())
    }

    /// Whether an object exists on the member once the ops so far have been executed.
    async fn exists(&self, oid: &ObjectId) -> store::Result<bool> {
        if let Some(exists) = self.exist.get(oid) {
            return Ok(*exists);
        }
        let (group, link) = (self.group, &self.view.link);
        match group.calls.answer(link, link.target.store().stat(&group.cid, oid)).await {
            Ok(_) => Ok(true),
            Err(StoreError::NoSuchObject(_)) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Appends the ops that restore the metadata of an object, as the first peer that can read it has it.
    async fn restore(&mut self, oid: &ObjectId, touched: &TouchedMetadata<'_>) -> store::Result<()> {
        let mut restoring = Ok(Vec::new());
        for peer in touched.peers {
            restoring = self.group.old_metadata(oid, touched, peer).await;
            if !matches!(&restoring, Err(e) if is_unreadable(e)) {
                break;
            }
        }
        self.ops.extend(restoring?);
        Ok(())
    }

    /// Appends the ops that restore the metadata, and returns the transaction.
    async fn end(mut self) -> store::Result<Transaction> {
        for (oid, touched) in std::mem::take(&mut self.metadata) {
            self.restore(oid, &touched).await?;
        }
        // The intents may be the only ones that say which changes are settled.
        let settled = self.view.state.settled.encode().into();
        self.ops.push(Op::OmapSet { oid: own_object(), entries: vec![(key_settled(), settled)] });
        Ok(Transaction { collection: self.group.cid.clone(), ops: self.ops, uses_reserve: true })
    }
}

impl Group {
    /// Returns the ops that restore the old metadata of an object. Metadata is the same on all members,
    /// so `peer` still has the old metadata. If it lacks the object, an earlier change that is also
    /// undone has created the object.
    async fn old_metadata(
        &self,
        oid: &ObjectId,
        touched: &TouchedMetadata<'_>,
        peer: &MemberLink,
    ) -> store::Result<Vec<Op>> {
        let store = peer.target.store();
        let none_if_gone = |e| match e {
            StoreError::NoSuchObject(_) => Ok(Vec::new()),
            e => Err(e),
        };
        let mut ops = Vec::new();
        if touched.xattrs {
            let xattrs = self.calls.answer(peer, store.get_xattrs(&self.cid, oid)).await;
            let xattrs = xattrs.or_else(none_if_gone)?;
            ops.push(Op::RemoveXattrs { oid: oid.clone() });
            ops.push(Op::SetXattrs { oid: oid.clone(), xattrs });
        }
        let mut entries = Vec::new();
        if !touched.omap_keys.is_empty() {
            let keys: Vec<Bytes> = touched.omap_keys.iter().cloned().collect();
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
        Ok(ops)
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
