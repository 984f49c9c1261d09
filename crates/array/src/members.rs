//! Membership: decides which members continue to serve the group, and records the state of the
//! other members.
//!
//! Each new membership record has a higher term than all records that were ever proposed. This
//! matters because a member may have stored a proposed record that the other members lack. When
//! that member returns, its record must not count as the newest one. Sometimes the available
//! members can continue only because an operator has accepted the loss of other members. The lost
//! members may have stored newer records. In this case, the term advances by a step so large that
//! the new term exceeds every term that a lost member can have stored. If a lost member returns
//! nevertheless, the group ignores its data, and a rebuild copies everything to it.

use std::collections::BTreeSet;

use bytes::Bytes;
use futures::future::try_join_all;
use store::{ObjectId, Op, StoreError, Transaction};
use uuid::Uuid;

use crate::decision::{Decision, GroupEvidence, MemberState, MemberVerdict, Salvage, Undecided};
use crate::group::Group;
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::page::page;
use crate::record::{GroupRecord, MemberRecord, Standing, key_dirty, key_proposal, key_record, own_object};
use crate::view::MemberView;

/// The advice for a group that cannot continue in any way.
const NOTHING_LEFT: &str = "the loss of the other targets was accepted, and its objects are lost with them; remove the pool, and restore its objects from a copy";

/// Why a group cannot continue.
pub(crate) struct NotDecided {
    /// The targets that the group needs and that are missing or have gone back.
    pub(crate) waits_for: Vec<Uuid>,
    pub(crate) error: StoreError,
}

impl Group {
    /// Decides how the group continues, from what the available targets have stored.
    ///
    /// # Errors
    /// With [`StoreError::TooFewTargets`] if the group cannot continue with these targets, and with
    /// [`StoreError::Corrupt`] if the membership record does not match the redundancy scheme.
    pub(crate) fn decide(&self, views: &[MemberView]) -> Result<Decision, NotDecided> {
        let mut decision = self
            .with_evidence(views, |evidence| evidence.decide())
            .map_err(|undecided| self.refusal(undecided))?;
        let (there, needed) = (decision.record.members.len(), self.layout.fragments());
        if there != needed {
            let detail = format!("its membership record lists {there} members instead of {needed}");
            let error = StoreError::Corrupt { what: format!("group {}", self.cid), detail };
            return Err(NotDecided { waits_for: Vec::new(), error });
        }
        // A member that could not receive the changes that it lacks is rebuilt instead.
        for (verdict, member) in decision.verdicts.iter_mut().zip(&decision.record.members) {
            let lacks_any = matches!(verdict, MemberVerdict::Continues { lacks } if !lacks.is_empty());
            if lacks_any && self.receivers.is_unable(&member.target) {
                *verdict = MemberVerdict::Missing;
            }
        }
        Ok(decision)
    }

    /// Returns how the group can continue although no decision is possible; `None` if it cannot.
    pub(crate) fn to_salvage(&self, views: &[MemberView]) -> Option<Salvage> {
        let salvage = self.with_evidence(views, |evidence| evidence.salvage())?;
        if salvage.record.members.len() != self.layout.fragments() {
            return None;
        }
        let is_unable =
            |position: &&usize| self.receivers.is_unable(&salvage.record.members[**position].target);
        let unable = salvage.stale.iter().filter(is_unable).count();
        if salvage.in_sync.len() + salvage.stale.len() + salvage.others.len() < self.layout.k + unable {
            // The members that could not receive an object may be able to now.
            self.receivers.reconsider_unable();
        }
        Some(salvage)
    }

    /// Calls `f` with what a decision is based on.
    pub(crate) fn with_evidence<T>(
        &self,
        views: &[MemberView],
        f: impl FnOnce(&GroupEvidence<'_>) -> T,
    ) -> T {
        let states: Vec<MemberState> = views.iter().map(|view| view.state.clone()).collect();
        let missing = self.targets.iter().filter(|target| !(target.is_usable() || target.is_slow()));
        let missing: Vec<Uuid> = missing.map(|target| target.uuid()).collect();
        let (witness, intents) = (self.terms.witness(), self.intents.borrow());
        f(&GroupEvidence {
            needed: self.layout.k,
            states: &states,
            witness: witness.as_ref(),
            refused: intents.sequence().refused(),
            is_lost: &|target| self.word.is_lost(target),
            missing: &missing,
        })
    }

    /// Returns the targets that the group needs and that are missing or have gone back; `None` before
    /// the group's first decision. There are none if the group can continue.
    #[must_use]
    pub fn waits_for(&self) -> Option<Vec<Uuid>> {
        self.obstacle.waits_for()
    }

    /// Whether the group waits, and loses all of its objects if the targets for which it waits are lost.
    #[must_use]
    pub fn lacks_objects(&self) -> bool {
        self.obstacle.lacks_objects()
    }

    /// Describes why the group cannot continue.
    fn refusal(&self, undecided: Undecided) -> NotDecided {
        let waits_for = undecided.targets().to_vec();
        let list = |uuids: &[Uuid]| uuids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let needed = self.layout.k;
        // The list is empty if all members of the record are there, but are too few since a salvage began.
        let are_lost = |uuids: &[Uuid]| uuids.iter().all(|uuid| self.word.is_lost(uuid));
        let (there, needed, detail) = match undecided {
            Undecided::TooFew { there, missing: lost } | Undecided::Lost { there, back: lost }
                if are_lost(&lost) =>
            {
                (there, needed, NOTHING_LEFT.to_owned())
            }
            Undecided::NoData { missing } if missing.is_empty() => (0, needed, NOTHING_LEFT.to_owned()),
            Undecided::NoData { missing } => {
                let detail = format!(
                    "bring these targets back, or accept their loss (`outboard target forget`), so that the group continues with what is left: {}",
                    list(&missing)
                );
                (0, needed, detail)
            }
            Undecided::Outdated { ahead } => {
                let detail = format!(
                    "the available targets lack acknowledged changes; bring back {needed} of the targets {}, or accept the loss of these targets (`outboard target forget`)",
                    list(&ahead)
                );
                (0, needed, detail)
            }
            Undecided::TooFew { there, missing } => {
                let detail = format!(
                    "bring back one of the targets {}, or accept their loss (`outboard target forget`)",
                    list(&missing)
                );
                (there, needed, detail)
            }
            Undecided::Doubt { there, ahead } => {
                let detail = format!(
                    "these missing targets may have acknowledged changes that the available targets lack: {}; bring them back, or accept their loss (`outboard target forget`)",
                    list(&ahead)
                );
                (there, there + 1, detail)
            }
            Undecided::Stale { there, missing } => {
                let detail = format!(
                    "it can continue with older content once these targets are back, or once their loss is accepted, too (`outboard target forget`): {}",
                    list(&missing)
                );
                (there, needed, detail)
            }
            Undecided::Lost { there, back } => {
                let detail = format!(
                    "the targets {} have lost acknowledged changes; replace their content by a newer copy, or accept the loss (`outboard target forget`)",
                    list(&back)
                );
                (there, needed, detail)
            }
        };
        NotDecided { waits_for, error: StoreError::TooFewTargets { there, needed, detail } }
    }

    /// Makes the members that continue agree on a membership record. Returns the record, and the
    /// objects that have dirty notes. `members` are the views of these members, by position.
    pub(crate) async fn agree(
        &self,
        decision: &Decision,
        views: &[MemberView],
        members: &[Option<MemberView>],
    ) -> store::Result<(GroupRecord, BTreeSet<ObjectId>)> {
        let there = || members.iter().flatten();
        let mut dirty: BTreeSet<ObjectId> = there().flat_map(|view| view.dirty.iter().cloned()).collect();
        let Decision { record: old, verdicts, undone, settled, on_word, .. } = decision;
        let mut record = old.clone();
        for (member, verdict) in record.members.iter_mut().zip(verdicts) {
            match verdict {
                MemberVerdict::Continues { .. } => member.standing = Standing::InSync,
                MemberVerdict::Missing | MemberVerdict::NotInSync if *on_word => {
                    member.standing = Standing::Blank
                }
                MemberVerdict::Missing => {
                    member.standing = Standing::Stale { term: old.term, settled: *settled };
                    // The intents name every object whose last change the missing member may lack.
                    let intents = there().flat_map(|view| view.intents.values());
                    dirty.extend(intents.flat_map(|stored| &stored.intent.objects).map(|t| t.oid.clone()));
                }
                MemberVerdict::WentBack => {
                    tracing::warn!(cid = %self.cid, target_uuid = %member.target, "a member has lost changes that it had stored; it will be rebuilt");
                    metrics::counter!("outboard_osd_members_went_back_total").increment(1);
                    member.standing = Standing::Blank;
                }
                MemberVerdict::NotInSync => {}
            }
        }
        let drops_notes = self.intents.borrow_mut().dirty_mut().take_discarded();
        if drops_notes || dirty.len() > self.dirty_max {
            let stale = record.members.iter_mut().filter(|m| matches!(m.standing, Standing::Stale { .. }));
            stale.for_each(|m| m.standing = Standing::Blank);
        }
        self.find_replacements(&mut record);
        if record.members != old.members || !undone.is_subset(&old.undone) {
            record.undone = undone.clone();
        }
        let needs_notes = record.needs_notes();
        if !needs_notes {
            dirty.clear();
        }
        views.iter().for_each(|view| self.terms.heard_of(view.heard()));
        let has_it = |view: &MemberView| view.state.record == record && (view.dirty == dirty || !needs_notes);
        if *on_word || self.terms.highest() > record.term || !there().all(has_it) {
            record.term = self.terms.next(*on_word);
            // Write the dirty notes before the record, in case a crash separates the two writes: an
            // unnecessary note is harmless, but a missing note is not.
            let lacking = there().map(|view| (&view.link, dirty.difference(&view.dirty)));
            try_join_all(lacking.map(|(link, lacking)| self.note_dirty(link, lacking))).await?;
            self.put_in_force(old, &record, &there().map(|view| &view.link).collect::<Vec<_>>()).await?;
            let (in_sync, of) = (record.in_sync().count(), record.members.len());
            tracing::info!(cid = %self.cid, term = record.term, in_sync, of, on_word, "the group has a new membership record");
        }
        if !needs_notes {
            try_join_all(there().map(|view| self.forget_dirty(&view.link, &view.dirty))).await?;
        }
        Ok((record, dirty))
    }

    /// Puts a record in force, which replaces the record `old`. First all members store the record
    /// as a proposal. When all members have the proposal, the witness stores the term. Then the
    /// members store the record as their membership record. With the proposal, the members also
    /// store `old` as their record, because it may be in force without that: a new proposal replaces
    /// an older one.
    pub(crate) async fn put_in_force(
        &self,
        old: &GroupRecord,
        record: &GroupRecord,
        links: &[&MemberLink],
    ) -> store::Result<()> {
        try_join_all(links.iter().map(|link| self.propose(link, Some(old), record))).await?;
        self.put_proposal_in_force(record, links).await
    }

    /// Stores a record on a member as a proposal, together with the member's own record unless it stays
    /// the same.
    pub(crate) async fn propose(
        &self,
        link: &MemberLink,
        own: Option<&GroupRecord>,
        record: &GroupRecord,
    ) -> store::Result<()> {
        self.terms.heard_of(record.term);
        let own = own.map(|own| (key_record(), own.encode()));
        let entries = own.into_iter().chain([(key_proposal(), record.encode())]).collect();
        let propose = Op::OmapSet { oid: own_object(), entries };
        let propose = Transaction::new(self.cid.clone()).with(propose).from_reserve();
        self.calls.apply_to(link, propose).await
    }

    /// Puts a record in force that all of its members have as a proposal.
    pub(crate) async fn put_proposal_in_force(
        &self,
        record: &GroupRecord,
        links: &[&MemberLink],
    ) -> store::Result<()> {
        let oid = own_object();
        self.terms.testify(record).await?;
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
    pub(crate) async fn forget_dirty(
        &self,
        link: &MemberLink,
        oids: &BTreeSet<ObjectId>,
    ) -> store::Result<()> {
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
            let is_full = member.standing == Standing::Blank && self.receivers.is_full(&member.target);
            let stays = known.is_some_and(|t| !t.is_out()) && !is_full;
            if member.standing == Standing::InSync || stays {
                continue;
            }
            let spare = self.spare(record).or_else(|| {
                // Reconsider the targets that had too little space. If the member itself is
                // replaced only for lack of space, these targets are no better.
                self.receivers.reconsider_full();
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
        let taken = |t: &dyn Member| record.members.iter().any(|m| m.target == t.uuid());
        let free = self
            .targets
            .iter()
            .filter(|t| t.is_usable() && !taken(&***t) && !self.receivers.is_full(&t.uuid()));
        let free: Vec<Uuid> = free.map(|t| t.uuid()).collect();
        wire::placement::ranked(self.place.0, self.place.1, &free).first().map(|&best| free[best])
    }
}
