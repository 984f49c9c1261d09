//! Salvages a group with an erasure code, after an operator has accepted the loss of members: the
//! members that are left in sync continue together with stale members.
//!
//! A stale member has the same content as the members in sync, except for the objects that dirty
//! notes or its own intents name. The xattrs of such an object show which members have the same
//! content. If enough members do, this content is copied to the others: the newest content if
//! possible, otherwise older content. If an object has no data, one member suffices. All other objects
//! are lost and are removed, because their fragments do not fit together. A stale member that cannot
//! receive an object, for example because it is full, is only read, and becomes blank, unless it is needed.
//!
//! If stale members do not suffice, other targets with objects count as stale members, too: members that
//! have gone back, former members, and members that lack too many changes for dirty notes. Then the
//! dirty notes name all objects.
//!
//! The steps may be repeated. First, a membership record on the members in sync lists the other
//! members as lost, and too few as in sync, so that only another salvage can follow. The objects get
//! dirty notes, which remain until the last record is in force.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BTreeSet;

use bytes::Bytes;
use futures::future::try_join_all;
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};
use uuid::Uuid;

use crate::ask::is_damage;
use crate::copy::ReceivingMember;
use crate::decision::Salvage;
use crate::group::Group;
use crate::interval::{Interval, over};
use crate::member_link::MemberLink;
use crate::record::{
    ChangeId, GroupRecord, MemberRecord, SIZE_XATTR, Standing, forget_all_but_dirty, is_own, key_proposal,
    key_record, key_trimmed, own_object,
};
use crate::view::MemberView;

/// Number of objects listed per call.
const PAGE: usize = 256;

/// A member's position, and what the member has stored.
pub(crate) type PlacedView<'a> = (usize, &'a MemberView);

/// The xattrs of an object, `None` if it does not exist, and the positions of the members that have them.
type Holders = (Option<Vec<(Bytes, Bytes)>>, BTreeSet<usize>);

/// The members of a salvage.
struct Salvaged<'a> {
    record: &'a GroupRecord,
    /// All of them, the newest first.
    sources: &'a [PlacedView<'a>],
    in_sync: &'a [PlacedView<'a>],
    /// Stale members that receive objects.
    stale: &'a [PlacedView<'a>],
}

impl Salvaged<'_> {
    /// Whether the member at a position receives objects.
    fn receives(&self, position: usize) -> bool {
        self.in_sync.iter().chain(self.stale).any(|(at, _)| *at == position)
    }
}

/// Returns the term of the last record that lists a stale member as in sync.
fn last_in_sync(record: &GroupRecord, position: usize) -> u64 {
    match record.members[position].standing {
        Standing::Stale { term, .. } => term,
        Standing::InSync | Standing::Blank => 0,
    }
}

fn receiver_at(position: usize, in_sync: &[PlacedView<'_>]) -> ReceivingMember {
    match in_sync.iter().any(|(at, _)| *at == position) {
        true => ReceivingMember::Salvaged,
        false => ReceivingMember::NotInSync,
    }
}

/// An interval of only these members, from which objects are copied.
fn interval(number: u64, record: &GroupRecord, members: &[PlacedView<'_>]) -> Interval {
    let mut links = vec![None; record.members.len()];
    members.iter().for_each(|(position, view)| links[*position] = Some(view.link.clone()));
    let (undone, leftovers) = (BTreeSet::new(), RefCell::default());
    // A read must not wait for the rebuild of a member.
    let mut record = record.clone();
    record.members.iter_mut().for_each(|member| member.standing = Standing::InSync);
    Interval { number, links, record, undone, leftovers }
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
                        let (term, trimmed) = (view.state.last_in_sync(), ChangeId::default());
                        let standing = Standing::Stale { term, trimmed };
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
        stale.retain(|(_, view)| self.can_receive(&view.link.target.uuid()));
        let sources = members;
        let members: Vec<PlacedView<'_>> = in_sync.iter().chain(&stale).copied().collect();
        for (_, view) in &members {
            // If a later attempt finds other members, these objects still differ.
            self.note_dirty(&view.link, differing.iter()).await?;
        }
        for (_, view) in &stale {
            self.forget_older_records(&view.link, record).await?;
        }
        let salvaged = Salvaged { record, sources: &sources, in_sync: &in_sync, stale: &stale };
        let lost = self.salvage_objects(number, &salvaged, &differing).await?;
        for (_, view) in &members {
            self.replace_records(&view.link, record, last).await?;
        }
        let continues = |position: usize| members.iter().any(|(at, _)| *at == position);
        self.put_in_force_on(record, &members, |at, member| match continues(at) {
            true => MemberRecord { standing: Standing::InSync, ..member },
            false => MemberRecord { standing: Standing::Blank, ..member },
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
        let trimmed = views.iter().map(|view| view.state.trimmed).max().unwrap_or_default();
        let open = views.iter().flat_map(|view| view.intents.keys()).filter(|change| **change > trimmed);
        let open: BTreeSet<ChangeId> = open.copied().collect();
        let (kept, undone): (BTreeSet<ChangeId>, _) =
            open.into_iter().partition(|change| views.iter().all(|view| view.intents.contains_key(change)));
        self.undo_changes(&undone, &views, &views).await?;
        Ok(kept.last().copied().unwrap_or_default().max(trimmed))
    }

    /// Returns all objects that any of the members has, except internal ones.
    async fn all_objects(&self, members: &[PlacedView<'_>]) -> store::Result<BTreeSet<ObjectId>> {
        let mut all = BTreeSet::new();
        for (_, view) in members {
            let mut from = None;
            loop {
                // A page starts with the last object of the page before.
                let listed = view.link.target.store().list(&self.cid, from, PAGE);
                let (ids, more) = self.calls.answer(&view.link, listed).await?;
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
            Standing::Stale { trimmed, .. } => Some(trimmed),
            Standing::InSync | Standing::Blank => None,
        });
        let common = common.min().unwrap_or_default();
        let views = || members.iter().map(|(_, view)| *view);
        let open = views().flat_map(|view| &view.intents).filter(|(change, _)| **change > common);
        let touched = open.flat_map(|(_, intent)| &intent.objects).map(|touched| &touched.oid);
        let named = touched.chain(views().flat_map(|view| &view.dirty));
        named.filter(|oid| !(self.is_internal)(oid)).cloned().collect()
    }

    /// Makes the members agree about objects that may differ. Returns the number of objects that are
    /// lost.
    async fn salvage_objects(
        &self,
        number: u64,
        salvaged: &Salvaged<'_>,
        differing: &BTreeSet<ObjectId>,
    ) -> store::Result<u64> {
        let Salvaged { record, sources, in_sync, stale } = *salvaged;
        let members: Vec<PlacedView<'_>> = in_sync.iter().chain(stale).copied().collect();
        let mut lost = 0;
        for oid in differing {
            let mut tried = Vec::new();
            let is_kept = loop {
                let Some((xattrs, kept)) = self.holders(oid, sources, &tried).await? else { break false };
                let is_holder = |(position, _): &PlacedView<'_>| kept.contains(position);
                let holders: Vec<PlacedView<'_>> = sources.iter().copied().filter(is_holder).collect();
                let others: Vec<PlacedView<'_>> = members.iter().copied().filter(|m| !is_holder(m)).collect();
                self.merge_omaps(number, &holders, salvaged, oid).await?;
                if self.copy_from(&interval(number, record, &holders), oid, &others, salvaged).await? {
                    // A holder that is only read may have received a part of the omap.
                    self.complete_omaps(number, &holders, &others, salvaged, oid).await?;
                    break true;
                }
                // Fragments of this content are damaged, so try older content.
                tried.push(xattrs);
            };
            if !is_kept {
                tracing::warn!(cid = %self.cid, %oid, "an object is lost, because too few members have the same content");
                self.remove_from(&members, oid).await?;
                lost += 1;
            }
        }
        // The owner's metadata object consists of an omap, and its xattrs show nothing.
        if !self.copy_from(&interval(number, record, in_sync), &self.meta, stale, salvaged).await? {
            let detail = "no member can read the object with the group's metadata".into();
            return Err(StoreError::TooFewTargets { there: 0, needed: 1, detail });
        }
        Ok(lost)
    }

    /// Copies an object from the members that `sources` links. Returns false if too many of these members
    /// have damaged data.
    ///
    /// # Errors
    /// If a member fails.
    async fn copy_from(
        &self,
        sources: &Interval,
        oid: &ObjectId,
        to: &[PlacedView<'_>],
        salvaged: &Salvaged<'_>,
    ) -> store::Result<bool> {
        for (position, view) in to {
            let receiver = receiver_at(*position, salvaged.in_sync);
            let there = match self.is_there(sources, &view.link, *position, oid).await {
                Ok(there) => there,
                Err(e) => {
                    self.unless_unneeded(view, (*position, salvaged), sources.number, e)?;
                    continue;
                }
            };
            match self.copy_from_sources(sources, &view.link, *position, oid, (there, receiver)).await {
                Ok(_) => {}
                Err(StoreError::TooFewTargets { .. } | StoreError::Corrupt { .. }) => return Ok(false),
                Err(e) => self.unless_unneeded(view, (*position, salvaged), sources.number, e)?,
            }
        }
        Ok(true)
    }

    /// Handles the error of a member that receives an object. The next attempt only reads a stale member
    /// that cannot receive it, if enough others can. A member that is needed keeps a damaged part of an
    /// object, because reads find the damage, but the group waits until such a member has space.
    fn unless_unneeded(
        &self,
        view: &MemberView,
        (position, salvaged): (usize, &Salvaged<'_>),
        number: u64,
        e: StoreError,
    ) -> store::Result<()> {
        let is_damaged = matches!(e, StoreError::Corrupt { .. });
        if !is_damaged && !matches!(e, StoreError::NoSpace { .. }) {
            return Err(e);
        }
        let is_stale = salvaged.stale.iter().any(|(at, _)| *at == position);
        let is_needed = !is_stale || salvaged.in_sync.len() + salvaged.stale.len() <= self.layout.k;
        tracing::warn!(cid = %self.cid, target_uuid = %view.link.target.uuid(), error = %e, is_needed, "a member cannot receive an object that other members have");
        if is_needed {
            return if is_damaged { Ok(()) } else { Err(e) };
        }
        self.cannot_catch_up.borrow_mut().insert(view.link.target.uuid());
        Err(over(number))
    }

    /// Makes the omaps of an object equal on members that have the same content. An interrupted copy may
    /// have copied the data to one of them, but only a part of the omap.
    async fn merge_omaps(
        &self,
        number: u64,
        holders: &[PlacedView<'_>],
        salvaged: &Salvaged<'_>,
        oid: &ObjectId,
    ) -> store::Result<()> {
        let receives = |holder: &&PlacedView<'_>| salvaged.receives(holder.0);
        let Some(first) = holders.iter().find(receives) else { return Ok(()) };
        let to_first = holders.iter().map(|other| (first, other));
        let from_first = holders.iter().filter(receives).map(|other| (other, first));
        for (to, from) in to_first.chain(from_first).filter(|(to, from)| to.0 != from.0) {
            let copied = self.copy_missing_omap(&to.1.link, &from.1.link, oid).await;
            copied.or_else(|e| self.unless_unneeded(to.1, (to.0, salvaged), number, e))?;
        }
        Ok(())
    }

    /// Copies the entries of an object's omap that receiving members lack, if holders may lack some, too,
    /// because they do not receive any.
    async fn complete_omaps(
        &self,
        number: u64,
        holders: &[PlacedView<'_>],
        to: &[PlacedView<'_>],
        salvaged: &Salvaged<'_>,
        oid: &ObjectId,
    ) -> store::Result<()> {
        if holders.iter().all(|(position, _)| salvaged.receives(*position)) {
            return Ok(());
        }
        for (position, view) in to {
            for (_, from) in holders {
                let copied = self.copy_missing_omap(&view.link, &from.link, oid).await;
                copied.or_else(|e| self.unless_unneeded(view, (*position, salvaged), number, e))?;
            }
        }
        Ok(())
    }

    /// Returns the content of an object that the group keeps, as its xattrs, and the positions of the
    /// members that have it: the newest content if possible, otherwise older content, without the contents
    /// in `tried`. `None` if too few members have the same content. The first of `members` are those with
    /// the newest content.
    async fn holders(
        &self,
        oid: &ObjectId,
        members: &[PlacedView<'_>],
        tried: &[Option<Vec<(Bytes, Bytes)>>],
    ) -> store::Result<Option<Holders>> {
        let mut found = Vec::new();
        for (position, view) in members {
            let asked = view.link.target.store().get_xattrs(&self.cid, oid);
            let xattrs = match self.calls.answer(&view.link, asked).await {
                Ok(xattrs) => Some(xattrs),
                Err(StoreError::NoSuchObject(_)) => None,
                // The member's content is of no use.
                Err(e) if is_damage(&e) => continue,
                Err(e) => return Err(e),
            };
            found.push((*position, xattrs));
        }
        // The owner changes an xattr of an object with each change of its data.
        let alike = |like: &Option<Vec<(Bytes, Bytes)>>| {
            let alike = found.iter().filter(|(_, xattrs)| xattrs == like);
            alike.map(|(position, _)| *position).collect::<BTreeSet<usize>>()
        };
        let suffices = |xattrs: &Option<Vec<(Bytes, Bytes)>>| {
            let is_size =
                |(name, size): &(Bytes, Bytes)| *name == SIZE_XATTR && size[..] != 0_u64.to_be_bytes();
            let has_data = xattrs.iter().flatten().any(is_size);
            !has_data || alike(xattrs).len() >= self.layout.k
        };
        // If only stale members lack the object, it was created later.
        let newest = members.first().map(|(position, _)| *position);
        let mut candidates = found.iter().filter(|(at, xattrs)| xattrs.is_some() || Some(*at) == newest);
        let kept = candidates.find(|(_, xattrs)| suffices(xattrs) && !tried.contains(xattrs));
        Ok(kept.map(|(_, xattrs)| (xattrs.clone(), alike(xattrs))))
    }

    /// Removes an object from members, of which some may not have it.
    async fn remove_from(&self, members: &[PlacedView<'_>], oid: &ObjectId) -> store::Result<()> {
        for (_, view) in members {
            let remove = Op::Remove { oid: oid.clone() };
            let remove = Transaction::new(self.cid.clone()).with(remove).from_reserve();
            match self.calls.apply_to(&view.link, remove).await {
                Ok(()) | Err(StoreError::NoSuchObject(_)) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
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
            let entries = vec![(key_record(), record.encode()), (key_trimmed(), last.encode().into())];
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
