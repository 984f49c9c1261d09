//! Membership: decides which members continue to serve the group, and records the state of the
//! other members.
//!
//! Each new membership record has a higher term than all records that were ever proposed. This
//! matters because a member may have stored a proposed record that the other members lack. When
//! that member returns, its record must not count as the newest one. Sometimes the available
//! members can continue only because an operator has declared other members lost. The lost members
//! may have stored newer records. In this case, the term advances by a step so large that the new
//! term exceeds every term that a lost member can have stored. If a lost member returns
//! nevertheless, the group ignores its data, and a rebuild copies everything to it.

use std::collections::BTreeSet;

use bytes::Bytes;
use futures::future::try_join_all;
use store::{ObjectId, Op, StoreError, Transaction};
use uuid::Uuid;

use crate::group::Group;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::page::page;
use crate::record::{GroupRecord, MemberRecord, Standing, key_dirty, key_proposal, key_record, own_object};
use crate::view::MemberView;

impl Group {
    /// Returns the available members in sync, by position. The returned flag is true if these
    /// members count as current only because an operator has declared other members lost.
    ///
    /// # Errors
    /// [`StoreError::TooFewTargets`] if too few members are available, or if missing members may
    /// have newer changes.
    pub(crate) fn members(
        &self,
        record: &GroupRecord,
        views: &[MemberView],
    ) -> store::Result<(Vec<Option<MemberView>>, bool)> {
        if record.members.len() != self.layout.fragments() {
            let detail = format!(
                "its membership record lists {} members instead of {}",
                record.members.len(),
                self.layout.fragments()
            );
            return Err(StoreError::Corrupt { what: format!("group {}", self.cid), detail });
        }
        let mut members = vec![None; record.members.len()];
        let mut missing = Vec::new();
        for position in record.in_sync() {
            let uuid = record.members[position].target;
            members[position] = views.iter().find(|view| view.link.target.uuid() == uuid).cloned();
            if members[position].is_none() {
                missing.push(uuid);
            }
        }
        let (there, needed) = (members.iter().flatten().count(), self.layout.k);
        let known = self.terms.lineage();
        let newer = known.as_ref().filter(|last| last.term > record.term);
        // Members that may have accepted changes without the available members: either in the last
        // interval, or before this process opened its first interval.
        let ahead: Vec<Uuid> = match (newer, &*known) {
            (Some(last), _) => last.in_sync().map(|position| last.members[position].target).collect(),
            (None, Some(_)) => Vec::new(),
            (None, None) => missing.clone(),
        };
        let list = |uuids: &[Uuid]| uuids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let on_word = newer.is_some() || ahead.len() >= needed;
        let away = ahead.iter().filter(|uuid| !self.is_written_off(uuid)).count();
        if newer.is_some() && away >= needed {
            let detail = format!(
                "the available members lack acknowledged changes; bring back {needed} of the targets {}, or take these targets out if they are lost",
                list(&ahead)
            );
            return Err(StoreError::TooFewTargets { there: 0, needed, detail });
        }
        if there < needed {
            let detail = format!("bring back one of the targets {}", list(&missing));
            return Err(StoreError::TooFewTargets { there, needed, detail });
        }
        if away >= needed {
            let detail = format!(
                "these missing targets may have acknowledged changes that the available targets lack: {}; bring them back, or take them out if they are lost",
                list(&ahead)
            );
            return Err(StoreError::TooFewTargets { there, needed: there + 1, detail });
        }
        Ok((members, on_word))
    }

    /// Returns true if an operator has declared a target lost, or if the target has left the node.
    fn is_written_off(&self, uuid: &Uuid) -> bool {
        self.targets.iter().find(|t| t.uuid() == *uuid).is_none_or(|t| t.is_out())
    }

    /// Makes the members agree on a membership record. Returns the record, and the objects that
    /// have dirty notes.
    pub(crate) async fn agree(
        &self,
        old: GroupRecord,
        views: &[MemberView],
        members: &[Option<MemberView>],
        on_word: bool,
    ) -> store::Result<(GroupRecord, BTreeSet<ObjectId>)> {
        let there = || members.iter().flatten();
        let mut dirty: BTreeSet<ObjectId> = there().flat_map(|view| view.dirty.iter().cloned()).collect();
        let mut record = old;
        for (member, view) in record.members.iter_mut().zip(members) {
            if on_word && view.is_none() {
                member.standing = Standing::Blank;
            } else if view.is_none() && member.standing == Standing::InSync {
                member.standing = Standing::Stale;
                // The intents name every object whose last change the missing member may lack.
                let intents = there().flat_map(|view| view.intents.values());
                dirty.extend(intents.flat_map(|intent| &intent.objects).map(|t| t.oid.clone()));
            }
        }
        let drops_notes = self.drops_notes.replace(false);
        if drops_notes || dirty.len() > self.dirty_max {
            let stale = record.members.iter_mut().filter(|m| m.standing == Standing::Stale);
            stale.for_each(|m| m.standing = Standing::Blank);
        }
        self.find_replacements(&mut record);
        let needs_notes = record.needs_notes();
        if !needs_notes {
            dirty.clear();
        }
        let heard = views.iter().map(|view| view.heard).max().unwrap_or(0);
        self.terms.heard_of(heard);
        let has_it = |view: &MemberView| view.record == record && (view.dirty == dirty || !needs_notes);
        if on_word || self.terms.highest() > record.term || !there().all(has_it) {
            record.term = self.terms.next(on_word);
            // Write the dirty notes before the record, in case a crash separates the two writes: an
            // unnecessary note is harmless, but a missing note is not.
            let lacking = there().map(|view| (&view.link, dirty.difference(&view.dirty)));
            try_join_all(lacking.map(|(link, lacking)| self.note_dirty(link, lacking))).await?;
            self.put_in_force(&record, &there().map(|view| &view.link).collect::<Vec<_>>()).await?;
            let (in_sync, of) = (record.in_sync().count(), record.members.len());
            tracing::info!(cid = %self.cid, term = record.term, in_sync, of, on_word, "the group has a new membership record");
        }
        if !needs_notes {
            try_join_all(there().map(|view| self.forget_dirty(&view.link, &view.dirty))).await?;
        }
        Ok((record, dirty))
    }

    /// Puts a record in force in two steps. First all members store the record as a proposal. When
    /// all members have the proposal, they store the record as their membership record.
    pub(crate) async fn put_in_force(
        &self,
        record: &GroupRecord,
        links: &[&MemberLink],
    ) -> store::Result<()> {
        self.terms.heard_of(record.term);
        let oid = own_object();
        let proposal = vec![(key_proposal(), record.encode())];
        let propose =
            Transaction::new(self.cid.clone()).with(Op::OmapSet { oid: oid.clone(), entries: proposal });
        let propose = propose.from_reserve();
        try_join_all(links.iter().map(|link| self.calls.apply_to(link, propose.clone()))).await?;
        let entries = vec![(key_record(), record.encode())];
        let note = Transaction::new(self.cid.clone())
            .with(Op::OmapSet { oid: oid.clone(), entries })
            .with(Op::OmapRemove { oid, keys: vec![key_proposal()] })
            .from_reserve();
        try_join_all(links.iter().map(|link| self.calls.apply_to(link, note.clone()))).await.map(drop)
    }

    /// Writes to a member a dirty note for each of the objects `oids`.
    pub(crate) async fn note_dirty(
        &self,
        link: &MemberLink,
        oids: impl Iterator<Item = &ObjectId>,
    ) -> store::Result<()> {
        let mut keys = oids.map(key_dirty).peekable();
        while keys.peek().is_some() {
            let entries = page(&mut keys).into_iter().map(|key| (key, Bytes::new())).collect();
            let note = Op::OmapSet { oid: own_object(), entries };
            self.calls.apply_to(link, Transaction::new(self.cid.clone()).with(note).from_reserve()).await?;
        }
        Ok(())
    }

    /// Removes the dirty notes of the objects `oids` from a member.
    async fn forget_dirty(&self, link: &MemberLink, oids: &BTreeSet<ObjectId>) -> store::Result<()> {
        let mut keys = oids.iter().map(key_dirty).peekable();
        while keys.peek().is_some() {
            let forget = Op::OmapRemove { oid: own_object(), keys: page(&mut keys) };
            self.calls.apply_to(link, Transaction::new(self.cid.clone()).with(forget)).await?;
        }
        Ok(())
    }

    /// Replaces unsuitable members in `record` with targets that are not members yet. A member is
    /// unsuitable if it is not in sync and its target is out of use, has left the node, or had too
    /// little space for the rebuild of this member.
    fn find_replacements(&self, record: &mut GroupRecord) {
        for position in 0..record.members.len() {
            let member = record.members[position];
            let known = self.targets.iter().find(|t| t.uuid() == member.target);
            let is_full =
                member.standing == Standing::Blank && self.no_room.borrow().contains(&member.target);
            let stays = known.is_some_and(|t| !t.is_out()) && !is_full;
            if member.standing == Standing::InSync || stays {
                continue;
            }
            let spare = self.spare(record).or_else(|| {
                // Reconsider the targets that had too little space. If the member itself is
                // replaced only for lack of space, these targets are no better.
                self.no_room.borrow_mut().clear();
                self.spare(record).filter(|_| !is_full)
            });
            if let Some(target) = spare {
                record.members[position] = MemberRecord { target, standing: Standing::Blank };
            }
        }
    }

    /// Returns the highest-ranked usable target that is not a member, without the targets that had
    /// too little space.
    pub(crate) fn spare(&self, record: &GroupRecord) -> Option<Uuid> {
        let no_room = self.no_room.borrow();
        let taken = |t: &dyn Member| record.members.iter().any(|m| m.target == t.uuid());
        let free =
            self.targets.iter().filter(|t| t.is_usable() && !taken(&***t) && !no_room.contains(&t.uuid()));
        let free: Vec<Uuid> = free.map(|t| t.uuid()).collect();
        wire::placement::ranked(self.place.0, self.place.1, &free).first().map(|&best| free[best])
    }
}
