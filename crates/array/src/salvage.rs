//! Salvages a group with an erasure code, after an operator has accepted the loss of members: the
//! members that are left in sync continue together with stale members.
//!
//! A stale member has the same content as the members in sync, except for the objects that dirty
//! notes or its own intents name. The xattrs of such an object show which members have the same
//! content. If enough members do, and their data can be read, this content is copied to the others: the
//! newest content if possible, otherwise older content (`salvage_object`). If an object has no data, one
//! member suffices. All other objects are lost and are removed, because their fragments do not fit
//! together. A stale member that cannot receive an object, for example because it is full, is only read,
//! and stays stale, unless it is needed.
//!
//! If stale members do not suffice, other targets with objects count as stale members, too: members that
//! have gone back, former members, and members that lack too many changes for dirty notes. Then the
//! dirty notes name all objects.
//!
//! The steps may be repeated. First, a membership record on the members in sync lists the other
//! members as lost, and too few as in sync, so that only another salvage can follow. The objects get
//! dirty notes, which remain until the last record is in force.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use futures::future::try_join_all;
use store::{ObjectId, Op, StoreCalls, Transaction};
use uuid::Uuid;

use crate::decision::Salvage;
use crate::group::Group;
use crate::member_link::MemberLink;
use crate::record::{
    ChangeId, GroupRecord, MemberRecord, Standing, forget_all_but_dirty, is_own, key_proposal, key_record,
    key_settled, own_object,
};
use crate::salvage_object::{PlacedView, Salvaged};
use crate::view::MemberView;

/// Number of objects listed per call.
const PAGE: usize = 256;

/// Returns the term of the last record that lists a stale member as in sync.
fn last_in_sync(record: &GroupRecord, position: usize) -> u64 {
    match record.members[position].standing {
        Standing::Stale { term, .. } => term,
        Standing::InSync | Standing::Blank => 0,
    }
}

impl Group {
    /// Makes the members of a salvage agree on their objects, and puts a membership record in force
    /// that lists them as in sync. `number` is the number of the interval that is being opened.
    ///
    /// The first calls only record that the other members are lost, so that they can never continue
    /// with objects that this group has changed. The next call does the rest.
    ///
    /// # Errors
    /// If a member fails. Then the next attempt repeats the steps.
    pub(crate) async fn salvage(
        &self,
        number: u64,
        salvage: &Salvage,
        views: &[MemberView],
    ) -> store::Result<()> {
        let Salvage { record, in_sync, stale, others, has_leader } = salvage;
        let view_at = |position: &usize| {
            let target = record.members[*position].target;
            let view = views.iter().find(|view| view.state.target == target);
            (*position, view.expect("a salvage names only members that have answered"))
        };
        let in_sync: Vec<PlacedView<'_>> = in_sync.iter().map(view_at).collect();
        let mut stale: Vec<PlacedView<'_>> = stale.iter().map(view_at).collect();
        // Members that were in sync more recently have newer content.
        stale.sort_by_key(|(position, _)| Reverse(last_in_sync(record, *position)));
        let members: Vec<PlacedView<'_>> = in_sync.iter().chain(&stale).copied().collect();
        let view_of = |(position, target): &(usize, Uuid)| {
            let view = views.iter().find(|view| view.state.target == *target);
            (*position, view.expect("a salvage names only targets that have answered"))
        };
        let others: Vec<PlacedView<'_>> = others.iter().map(view_of).collect();
        views.iter().for_each(|view| self.terms.heard_of(view.heard()));
        // If a member had this record only as a proposal, the record before it would count once the lost
        // members return, although objects have changed.
        let is_in_force = self.terms.witness().is_some_and(|witness| witness.term == record.term)
            && in_sync.iter().all(|(_, view)| view.state.record == *record);
        if !is_in_force || record.in_sync().count() > in_sync.len() || !others.is_empty() {
            if !others.is_empty() {
                let all = self.all_objects(&[&members[..], &others].concat()).await?;
                try_join_all(in_sync.iter().map(|(_, view)| self.note_dirty(&view.link, all.iter()))).await?;
            }
            let is_left = |position| in_sync.iter().any(|(at, _)| *at == position);
            return self
                .put_in_force_on(record, &in_sync, |position, member| {
                    if let Some((_, view)) = others.iter().find(|(at, _)| *at == position) {
                        // Any objects of this member may differ, and dirty notes name all of them.
                        let (term, settled) = (view.state.last_in_sync(), ChangeId::default());
                        let standing = Standing::Stale { term, settled };
                        return MemberRecord { target: view.state.target, standing };
                    }
                    let standing = match member.standing {
                        _ if is_left(position) => Standing::InSync,
                        Standing::InSync => Standing::Blank,
                        _ if *has_leader => Standing::Blank,
                        standing => standing,
                    };
                    MemberRecord { standing, ..member }
                })
                .await;
        }
        let _alone = self.copies.write().await;
        let last = self.settle(&in_sync).await?;
        let differing = self.differing(record, &members);
        stale.retain(|(_, view)| !self.receivers.is_unable(&view.link.target.uuid()));
        let sources = members;
        let members: Vec<PlacedView<'_>> = in_sync.iter().chain(&stale).copied().collect();
        for (_, view) in &members {
            // If a later attempt finds other members, these objects still differ.
            self.note_dirty(&view.link, differing.iter()).await?;
        }
        for (_, view) in &stale {
            self.forget_older_records(&view.link, record).await?;
        }
        let salvaged = Salvaged { number, record, sources: &sources, in_sync: &in_sync, stale: &stale };
        let mut lost = 0;
        for oid in &differing {
            lost += u64::from(!self.salvage_object(&salvaged, oid).await?);
        }
        self.salvage_metadata(&salvaged).await?;
        for (_, view) in &members {
            let replaced = self.replace_records(&view.link, record, last).await;
            // If the target fails, the operator can accept its loss.
            replaced.map_err(|e| view.link.classified(e))?;
        }
        let is_source = |position: usize| sources.iter().any(|(at, _)| *at == position);
        self.put_in_force_on(record, &members, |at, member| {
            let standing = match member.standing {
                _ if salvaged.receives(at) => Standing::InSync,
                // The dirty notes name all objects that differ on this member.
                stale @ Standing::Stale { .. } if is_source(at) => stale,
                _ => Standing::Blank,
            };
            MemberRecord { standing, ..member }
        })
        .await?;
        tracing::warn!(cid = %self.cid, members = members.len(), lost, "the group continues with stale members, because the loss of other members was accepted; objects that had changed are lost");
        metrics::counter!("outboard_osd_objects_given_up_total").increment(lost);
        Ok(())
    }

    /// Stores a record on a stale member. No older record may count any more, because the member's
    /// objects change.
    async fn forget_older_records(&self, link: &MemberLink, record: &GroupRecord) -> store::Result<()> {
        let entries = vec![(key_record(), record.encode())];
        let note = Transaction::new(self.cid.clone())
            .with(Op::OmapSet { oid: own_object(), entries })
            .with(Op::OmapRemove { oid: own_object(), keys: vec![key_proposal()] });
        self.calls.apply_to(link, note.from_reserve()).await
    }

    /// Puts a record in force on members: `old`, with each member changed.
    pub(crate) async fn put_in_force_on(
        &self,
        old: &GroupRecord,
        on: &[PlacedView<'_>],
        changed: impl Fn(usize, MemberRecord) -> MemberRecord,
    ) -> store::Result<()> {
        let mut members = old.members.clone();
        for (position, member) in members.iter_mut().enumerate() {
            *member = changed(position, *member);
        }
        let new = GroupRecord { term: self.terms.next(true), members, undone: BTreeSet::new() };
        tracing::info!(cid = %self.cid, term = new.term, in_sync = new.in_sync().count(), "the group has a new membership record on the operator's word");
        self.put_in_force(old, &new, &on.iter().map(|(_, view)| &view.link).collect::<Vec<_>>()).await
    }

    /// Undoes the changes that only some of the members have. Returns the last change of all of them.
    async fn settle(&self, members: &[PlacedView<'_>]) -> store::Result<ChangeId> {
        let views: Vec<&MemberView> = members.iter().map(|(_, view)| *view).collect();
        let settled = views.iter().map(|view| view.state.settled).max().unwrap_or_default();
        let open = views.iter().flat_map(|view| view.intents.keys()).filter(|change| **change > settled);
        let open: BTreeSet<ChangeId> = open.copied().collect();
        let (kept, undone): (BTreeSet<ChangeId>, _) =
            open.into_iter().partition(|change| views.iter().all(|view| view.intents.contains_key(change)));
        self.undo_changes(&undone, &views, &views).await?;
        Ok(kept.last().copied().unwrap_or_default().max(settled))
    }

    /// Returns all objects that any of the members has, except internal ones.
    async fn all_objects(&self, members: &[PlacedView<'_>]) -> store::Result<BTreeSet<ObjectId>> {
        let mut all = BTreeSet::new();
        for (_, view) in members {
            let mut from = None;
            loop {
                // A page starts with the last object of the page before.
                let listed = view.link.target.store().list(&self.cid, from, PAGE);
                let listed = self.calls.answer(&view.link, listed).await;
                let (ids, more) = listed.map_err(|e| view.link.classified(e))?;
                from = ids.last().cloned();
                all.extend(ids.into_iter().filter(|oid| !is_own(oid) && !(self.is_internal)(oid)));
                if !more {
                    break;
                }
            }
        }
        Ok(all)
    }

    /// Returns the objects that may differ between the members.
    fn differing(&self, record: &GroupRecord, members: &[PlacedView<'_>]) -> BTreeSet<ObjectId> {
        // All members have the changes up to this one.
        let common = members.iter().filter_map(|(position, _)| match record.members[*position].standing {
            Standing::Stale { settled, .. } => Some(settled),
            Standing::InSync | Standing::Blank => None,
        });
        let common = common.min().unwrap_or_default();
        let views = || members.iter().map(|(_, view)| *view);
        let open = views().flat_map(|view| &view.intents).filter(|(change, _)| **change > common);
        let touched = open.flat_map(|(_, stored)| &stored.intent.objects).map(|touched| &touched.oid);
        let named = touched.chain(views().flat_map(|view| &view.dirty));
        named.filter(|oid| !(self.is_internal)(oid)).cloned().collect()
    }

    /// Removes the undo objects of a member, and replaces its records except the dirty notes: it then
    /// has `record`, and all changes up to `last`.
    pub(crate) async fn replace_records(
        &self,
        link: &MemberLink,
        record: &GroupRecord,
        last: ChangeId,
    ) -> store::Result<()> {
        let keep = own_object();
        loop {
            // The array's own objects sort before all other objects.
            let (ids, _) = self.calls.answer(link, link.target.store().list(&self.cid, None, PAGE)).await?;
            let left = ids.into_iter().take_while(is_own).filter(|oid| *oid != keep);
            let removals: Vec<Op> = left.map(|oid| Op::Remove { oid }).collect();
            let is_last = removals.is_empty();
            let entries = vec![(key_record(), record.encode()), (key_settled(), last.encode().into())];
            let note = Op::OmapSet { oid: own_object(), entries };
            let ops = if is_last { vec![forget_all_but_dirty(), note] } else { removals };
            let transaction = Transaction { collection: self.cid.clone(), ops, uses_reserve: true };
            self.calls.apply_to(link, transaction).await?;
            if is_last {
                return Ok(());
            }
        }
    }
}
