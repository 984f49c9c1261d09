//! Salvages a group with an erasure code, after an operator has accepted the loss of members: the
//! members that are left in sync continue together with stale members.
//!
//! A stale member has the same content as the members in sync, except for the objects that dirty
//! notes or its own intents name. The xattrs of such an object show which members have the same
//! content. If enough members do, this content is copied to the others: the newest content if
//! possible, otherwise older content. If an object has no data, one member suffices. All other objects
//! are lost and are removed, because their fragments do not fit together.
//!
//! The steps may be repeated: as long as the new membership record is not in force, the notes and
//! the old record remain.

use std::cell::RefCell;
use std::collections::BTreeSet;

use bytes::Bytes;
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};

use crate::decision::Salvage;
use crate::group::Group;
use crate::interval::Interval;
use crate::member_link::MemberLink;
use crate::record::{
    ChangeId, GroupRecord, SIZE_XATTR, Standing, forget_all_but_dirty, is_own, key_record, key_trimmed,
    own_object,
};
use crate::view::MemberView;

/// Number of objects listed per call.
const PAGE: usize = 256;

/// An interval of only these members, from which objects are copied.
fn interval(number: u64, record: &GroupRecord, members: &[(usize, &MemberView)]) -> Interval {
    let mut links = vec![None; record.members.len()];
    members.iter().for_each(|(position, view)| links[*position] = Some(view.link.clone()));
    let (undone, leftovers) = (BTreeSet::new(), RefCell::default());
    Interval { number, links, record: record.clone(), undone, leftovers }
}

impl Group {
    /// Makes the members of a salvage agree on their objects, and puts a membership record in force
    /// that lists them as in sync. `number` is the number of the interval that is being opened.
    ///
    /// # Errors
    /// If a member fails. Then the next attempt repeats the steps.
    pub(crate) async fn salvage(
        &self,
        number: u64,
        salvage: &Salvage,
        views: &[MemberView],
    ) -> store::Result<()> {
        let Salvage { record, in_sync, stale } = salvage;
        let view_at = |position: &usize| {
            let target = record.members[*position].target;
            let view = views.iter().find(|view| view.state.target == target);
            (*position, view.expect("a salvage names only members that have answered"))
        };
        let in_sync: Vec<(usize, &MemberView)> = in_sync.iter().map(view_at).collect();
        let stale: Vec<(usize, &MemberView)> = stale.iter().map(view_at).collect();
        let last = self.settle(&in_sync).await?;
        let lost = self.salvage_objects(number, record, &in_sync, &stale).await?;
        for (_, view) in in_sync.iter().chain(&stale) {
            self.replace_records(&view.link, record, last).await?;
        }
        let mut members = record.members.clone();
        for (position, member) in members.iter_mut().enumerate() {
            let continues = in_sync.iter().chain(&stale).any(|(at, _)| *at == position);
            member.standing = if continues { Standing::InSync } else { Standing::Blank };
        }
        views.iter().for_each(|view| self.terms.heard_of(view.heard()));
        let new = GroupRecord { term: self.terms.next(true), members, undone: BTreeSet::new() };
        let links: Vec<&MemberLink> = in_sync.iter().chain(&stale).map(|(_, view)| &view.link).collect();
        self.put_in_force(record, &new, &links).await?;
        tracing::warn!(cid = %self.cid, term = new.term, members = links.len(), lost, "the group continues with stale members, because the loss of other members was accepted; objects that had changed are lost");
        metrics::counter!("outboard_osd_objects_given_up_total").increment(lost);
        Ok(())
    }

    /// Undoes the changes that only some of the members have. Returns the last change of all of them.
    async fn settle(&self, members: &[(usize, &MemberView)]) -> store::Result<ChangeId> {
        let views: Vec<&MemberView> = members.iter().map(|(_, view)| *view).collect();
        let trimmed = views.iter().map(|view| view.state.trimmed).max().unwrap_or_default();
        let open = views.iter().flat_map(|view| view.intents.keys()).filter(|change| **change > trimmed);
        let open: BTreeSet<ChangeId> = open.copied().collect();
        let (kept, undone): (BTreeSet<ChangeId>, _) =
            open.into_iter().partition(|change| views.iter().all(|view| view.intents.contains_key(change)));
        self.undo_changes(&undone, &views, &views).await?;
        Ok(kept.last().copied().unwrap_or_default().max(trimmed))
    }

    /// Makes the stale members agree with the members in sync about all objects that may differ.
    /// Returns the number of objects that are lost.
    async fn salvage_objects(
        &self,
        number: u64,
        record: &GroupRecord,
        in_sync: &[(usize, &MemberView)],
        stale: &[(usize, &MemberView)],
    ) -> store::Result<u64> {
        let views = || in_sync.iter().chain(stale).map(|(_, view)| *view);
        // All members have the changes up to this one.
        let common = stale.iter().filter_map(|(position, _)| match record.members[*position].standing {
            Standing::Stale { trimmed, .. } => Some(trimmed),
            Standing::InSync | Standing::Blank => None,
        });
        let common = common.min().unwrap_or_default();
        let open = views().flat_map(|view| &view.intents).filter(|(change, _)| **change > common);
        let touched = open.flat_map(|(_, intent)| &intent.objects).map(|touched| &touched.oid);
        let named = touched.chain(views().flat_map(|view| &view.dirty));
        let differing: BTreeSet<ObjectId> = named.filter(|oid| !(self.is_internal)(oid)).cloned().collect();
        let members: Vec<(usize, &MemberView)> = in_sync.iter().chain(stale).copied().collect();
        let mut lost = 0;
        for oid in &differing {
            let kept = self.holders(oid, &members).await?;
            let (holders, others): (Vec<_>, Vec<_>) =
                members.iter().copied().partition(|(position, _)| kept.contains(position));
            if holders.is_empty() {
                tracing::warn!(cid = %self.cid, %oid, "an object is lost, because too few members have the same content");
                self.remove_from(&members, oid).await?;
                lost += 1;
                continue;
            }
            self.copy_from(&interval(number, record, &holders), oid, &others).await?;
            // A rebuild may have copied the data, but only a part of the omap.
            let newest: Vec<_> = in_sync.iter().filter(|(position, _)| kept.contains(position)).collect();
            let newest: Vec<_> = newest.iter().map(|(_, view)| Some(view.link.clone())).collect();
            for (_, view) in stale.iter().filter(|(at, _)| kept.contains(at) && !newest.is_empty()) {
                match self.copy_omap(&view.link, &newest, oid).await {
                    // The members agree that the object does not exist.
                    Ok(()) | Err(StoreError::NoSuchObject(_)) => {}
                    Err(e) => return Err(e),
                }
            }
        }
        // The owner's metadata object consists of an omap, and its xattrs show nothing.
        self.copy_from(&interval(number, record, in_sync), &self.meta, stale).await?;
        Ok(lost)
    }

    async fn copy_from(
        &self,
        sources: &Interval,
        oid: &ObjectId,
        to: &[(usize, &MemberView)],
    ) -> store::Result<()> {
        for (position, view) in to {
            self.copy_object(sources, &view.link, *position, oid, false).await?;
        }
        Ok(())
    }

    /// Returns the positions of the members whose content of an object the group keeps: the newest
    /// content if possible, otherwise older content. There are none if too few members have the same
    /// content. The first of `members` is in sync.
    async fn holders(
        &self,
        oid: &ObjectId,
        members: &[(usize, &MemberView)],
    ) -> store::Result<BTreeSet<usize>> {
        let mut found = Vec::new();
        for (position, view) in members {
            let asked = view.link.target.store().get_xattrs(&self.cid, oid);
            let xattrs = match self.calls.answer(&view.link, asked).await {
                Ok(xattrs) => Some(xattrs),
                Err(StoreError::NoSuchObject(_)) => None,
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
        let kept = candidates.find(|(_, xattrs)| suffices(xattrs));
        Ok(kept.map(|(_, xattrs)| alike(xattrs)).unwrap_or_default())
    }

    /// Removes an object from members, of which some may not have it.
    async fn remove_from(&self, members: &[(usize, &MemberView)], oid: &ObjectId) -> store::Result<()> {
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
