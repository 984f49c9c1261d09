//! Begins a group without objects, after an operator has accepted the loss of so many targets that none
//! of its objects can ever be read again.
//!
//! First, a membership record without a member in sync gives up the old objects: from then on, the group
//! waits for no target. Then the members remove what they have, and a record in force lists them as in
//! sync. Each step may be repeated.

use std::collections::BTreeSet;
use std::rc::Rc;

use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};
use uuid::Uuid;

use crate::group::Group;
use crate::member_link::MemberLink;
use crate::record::{ChangeId, GroupRecord, MemberRecord, Standing, own_object};
use crate::salvage_object::PlacedView;
use crate::view::MemberView;

/// Number of objects removed per transaction.
const OBJECTS: usize = 64;

impl Group {
    /// Makes the next step towards a group without objects. `views` are the views of all available
    /// targets.
    ///
    /// # Errors
    /// [`StoreError::TooFewTargets`] if fewer targets are usable than an object needs; other errors if a
    /// member fails. Then the next attempt repeats the step, without members that have refused it for
    /// lack of space or because of damage.
    pub(crate) async fn begin_empty(&self, views: &[MemberView]) -> store::Result<()> {
        views.iter().for_each(|view| self.terms.heard_of(view.heard()));
        let Some(record) = self.with_evidence(views, |evidence| evidence.has_given_up()) else {
            return self.give_up_objects(views).await;
        };
        let view_of = |member: &MemberRecord| {
            views.iter().find(|view| view.state.target == member.target && view.state.knows(&record))
        };
        let members = record.members.iter().enumerate();
        let can_take_part = |member: &&MemberRecord| !self.receivers.is_full(&member.target);
        let members: Vec<PlacedView<'_>> = members
            .filter(|(_, member)| can_take_part(member))
            .filter_map(|(position, member)| Some((position, view_of(member)?)))
            .collect();
        if members.len() < self.layout.k {
            return self.give_up_objects(views).await;
        }
        self.begin_with(&record, &members).await
    }

    /// Puts a record in force without a member in sync. Its members are the usable targets.
    async fn give_up_objects(&self, views: &[MemberView]) -> store::Result<()> {
        let (needed, members) = (self.layout.k, self.layout.fragments());
        let mut record = self.blank_record();
        if record.members.len() < needed {
            // A member without objects needs little space.
            self.receivers.reconsider_full();
            record = self.blank_record();
        }
        let there = record.members.len();
        let links: Vec<MemberLink> = record.members.iter().filter_map(|m| self.link_of(m.target)).collect();
        for target in self.targets.iter().map(|target| target.uuid()) {
            if record.members.len() < members && record.members.iter().all(|m| m.target != target) {
                record.members.push(MemberRecord { target, standing: Standing::Blank });
            }
        }
        if there < needed || record.members.len() < members {
            let detail = "its objects are lost, and too few other targets are usable to begin without them; bring missing targets back, or replace them".into();
            return Err(self.calls.unless_hopeful(StoreError::TooFewTargets { there, needed, detail }));
        }
        let base = self.with_evidence(views, |evidence| evidence.last_record());
        let blank = record.clone();
        record.term = self.terms.next(true);
        for link in &links {
            // A target must not seem to have what the last record says, unless it has this record.
            let view = views.iter().find(|view| view.state.target == link.target.uuid());
            let own = match view {
                Some(view) => base.as_ref().filter(|base| view.state.knows(base)),
                None => Some(&blank),
            };
            self.create_collection(link).await.map_err(|e| self.without(link, e))?;
            self.propose(link, own, &record).await.map_err(|e| self.without(link, e))?;
        }
        self.put_proposal_in_force(&record, &links.iter().collect::<Vec<_>>()).await
    }

    /// Returns a record of term 0 without a member in sync. Its members are the best usable targets, and
    /// may be too few.
    fn blank_record(&self) -> GroupRecord {
        let mut record = GroupRecord { term: 0, members: Vec::new(), undone: BTreeSet::new() };
        while record.members.len() < self.layout.fragments()
            && let Some(target) = self.spare(&record)
        {
            record.members.push(MemberRecord { target, standing: Standing::Blank });
        }
        record
    }

    fn link_of(&self, target: Uuid) -> Option<MemberLink> {
        let known = self.targets.iter().find(|known| known.uuid() == target)?;
        Some(MemberLink::new(Rc::clone(known)))
    }

    /// If a target refuses a transaction, the next attempt goes on without this target.
    fn without(&self, link: &MemberLink, e: StoreError) -> StoreError {
        if matches!(e, StoreError::NoSpace { .. } | StoreError::Corrupt { .. }) {
            tracing::warn!(cid = %self.cid, target_uuid = %link.target.uuid(), error = %e, "the next attempt to begin without objects leaves out this target");
            self.receivers.fills(link.target.uuid());
            return StoreError::Disconnected(e.to_string());
        }
        e
    }

    /// Removes all objects of the members of a record in force, and puts a record in force that lists
    /// these members as in sync.
    async fn begin_with(&self, record: &GroupRecord, members: &[PlacedView<'_>]) -> store::Result<()> {
        let _alone = self.copies.write().await;
        for (_, view) in members {
            let cleared = self.clear(view, record).await;
            cleared.map_err(|e| view.link.classified(self.without(&view.link, e)))?;
        }
        let is_there = |position: usize| members.iter().any(|(at, _)| *at == position);
        self.put_in_force_on(record, members, |at, member| match is_there(at) {
            true => MemberRecord { standing: Standing::InSync, ..member },
            false => MemberRecord { standing: Standing::Blank, ..member },
        })
        .await?;
        tracing::warn!(cid = %self.cid, members = members.len(), "the group begins without objects, because the loss of all of its objects was accepted");
        metrics::counter!("outboard_osd_groups_begun_empty_total").increment(1);
        Ok(())
    }

    /// Removes everything of a member except the record.
    async fn clear(&self, view: &MemberView, record: &GroupRecord) -> store::Result<()> {
        // From here on, the member's own record does not show older objects any more.
        self.replace_records(&view.link, record, ChangeId::default()).await?;
        self.forget_dirty(&view.link, &view.dirty).await?;
        self.remove_objects(&view.link).await
    }

    /// Removes all objects of a member, except the group's records.
    async fn remove_objects(&self, link: &MemberLink) -> store::Result<()> {
        let own = own_object();
        loop {
            // The object of the records stays.
            let listed = link.target.store().list(&self.cid, None, OBJECTS + 1);
            let (ids, _) = self.calls.answer(link, listed).await?;
            let others: Vec<ObjectId> = ids.into_iter().filter(|oid| *oid != own).collect();
            if others.is_empty() {
                return Ok(());
            }
            let ops = others.into_iter().map(|oid| Op::Remove { oid }).collect();
            let remove = Transaction { collection: self.cid.clone(), ops, uses_reserve: true };
            self.calls.apply_to(link, remove).await?;
        }
    }
}
