//! The decision with which an interval begins: which members continue, and which changes they keep.
//!
//! This module is pure logic over the state that the members have stored. `docs/redundancy.md`
//! states the rules and why they hold. A test explores all states of a small group
//! (`decision_model_test`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use crate::record::{ChangeId, GroupRecord, MemberRecord, Standing};
use crate::terms::LOSS_STEP;

/// What a member has stored about its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemberState {
    pub(crate) target: Uuid,
    pub(crate) record: GroupRecord,
    pub(crate) proposal: Option<GroupRecord>,
    /// Every change up to this one is settled.
    pub(crate) settled: ChangeId,
    /// The changes whose intents the member has.
    pub(crate) changes: BTreeSet<ChangeId>,
}

impl MemberState {
    /// Whether the member has stored a record, as its record or as a proposal.
    pub(crate) fn knows(&self, record: &GroupRecord) -> bool {
        self.record == *record || self.proposal.as_ref() == Some(record)
    }

    /// Whether the member has objects as the member at a position of the group, according to its own
    /// record.
    fn has_content_at(&self, position: usize) -> bool {
        let own = self.record.members.get(position).filter(|member| member.target == self.target);
        own.is_some_and(|member| member.standing != Standing::Blank)
    }

    /// The standing of the member in its own record.
    fn own_standing(&self) -> Option<Standing> {
        let own = self.record.members.iter().find(|member| member.target == self.target);
        own.map(|member| member.standing)
    }

    /// The last term in which the member was in sync, according to its own record; 0 for a blank member.
    pub(crate) fn last_in_sync(&self) -> u64 {
        match self.own_standing() {
            Some(Standing::InSync) => self.record.term,
            Some(Standing::Stale { term, .. }) => term,
            Some(Standing::Blank) | None => 0,
        }
    }

    /// The highest term of the record and the proposal.
    pub(crate) fn heard(&self) -> u64 {
        self.proposal.iter().map(|proposal| proposal.term).fold(self.record.term, u64::max)
    }

    /// The highest term of the record and of the proposal, if the member takes part in the proposal.
    fn took_part(&self) -> u64 {
        let proposal = self.proposal.as_ref().filter(|proposal| proposal.has_objects_on(&self.target));
        proposal.map_or(self.record.term, |proposal| proposal.term.max(self.record.term))
    }

    /// The last change that the member certainly has.
    pub(crate) fn last(&self) -> ChangeId {
        self.changes.last().copied().unwrap_or_default().max(self.settled)
    }
}

/// The entry of the witness about a group: the last term, and the targets that are in sync in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WitnessEntry {
    /// The term of the last membership record that all its members in sync have stored.
    pub term: u64,
    /// The targets that this record calls in sync.
    pub in_sync: BTreeSet<Uuid>,
}

/// What a decision is based on.
pub(crate) struct GroupEvidence<'a> {
    /// Number of members that suffice to read every object.
    pub(crate) needed: usize,
    /// States of the available targets.
    pub(crate) states: &'a [MemberState],
    /// `None` if the witness is lost, or does not know the group.
    pub(crate) witness: Option<&'a WitnessEntry>,
    /// Changes of which no client has received a success: some members have refused them, or too few
    /// members have them intact.
    pub(crate) refused: &'a BTreeSet<ChangeId>,
    /// Targets of which an operator has accepted the loss.
    pub(crate) is_lost: &'a dyn Fn(&Uuid) -> bool,
    /// Targets of the node that are not available.
    pub(crate) missing: &'a [Uuid],
}

/// What happens to the member at a position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MemberVerdict {
    /// The member continues. First it receives the changes that it lacks.
    Continues { lacks: BTreeSet<ChangeId> },
    /// The member was in sync, but is not available.
    Missing,
    /// The member was in sync, but has lost changes that it had stored.
    WentBack,
    /// The member was not in sync before.
    NotInSync,
}

/// The outcome of a decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Decision {
    /// The record that was in force.
    pub(crate) record: GroupRecord,
    /// By position.
    pub(crate) verdicts: Vec<MemberVerdict>,
    /// Changes that the members which continue undo.
    pub(crate) undone: BTreeSet<ChangeId>,
    /// Every change up to this one is settled.
    pub(crate) settled: ChangeId,
    /// The last change that the group keeps.
    pub(crate) last_kept: ChangeId,
    /// The last change of the members that continue, kept or not.
    pub(crate) last: ChangeId,
    /// Whether the group continues only because an operator has accepted the loss of targets.
    pub(crate) on_word: bool,
}

/// How a group can continue although too few members have the newest changes: with stale members, and
/// without the objects that have changed since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Salvage {
    /// The newest record; with a leader, the leader's own record. Its other members are lost.
    pub(crate) record: GroupRecord,
    /// Positions of the members that are in sync; at least one.
    pub(crate) in_sync: Vec<usize>,
    /// Positions of stale members that have not gone back.
    pub(crate) stale: Vec<usize>,
    /// Other targets that have objects as the member at a position. These objects may differ in any way
    /// from those of the members in sync. Empty unless too few members are left without them.
    pub(crate) others: Vec<(usize, Uuid)>,
    /// Whether no member is left in sync. `in_sync` then names the leader: the target that was in sync last.
    /// All other standings of the record mean nothing.
    pub(crate) has_leader: bool,
}

/// Reason why no interval can begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Undecided {
    /// Too few available targets have the newest objects, or any objects. These targets may have some,
    /// and the operator has not accepted their loss.
    NoData { missing: Vec<Uuid> },
    /// The available members lack acknowledged changes. At least `needed` of these targets have
    /// them.
    Outdated { ahead: Vec<Uuid> },
    /// Too few members in sync are available. These targets are missing, or have gone back.
    TooFew { there: usize, missing: Vec<Uuid> },
    /// The missing targets may have acknowledged changes that the available members lack.
    Doubt { there: usize, ahead: Vec<Uuid> },
    /// Too few members have all acknowledged changes: these targets have lost some.
    Lost { there: usize, back: Vec<Uuid> },
    /// The operator has accepted the loss of so many targets that the group must continue with stale
    /// members. These stale members are missing, and not lost.
    Stale { there: usize, missing: Vec<Uuid> },
}

impl Undecided {
    /// The targets that the reason names.
    pub(crate) fn targets(&self) -> &[Uuid] {
        match self {
            Undecided::NoData { missing: named }
            | Undecided::Outdated { ahead: named }
            | Undecided::TooFew { missing: named, .. }
            | Undecided::Doubt { ahead: named, .. }
            | Undecided::Stale { missing: named, .. }
            | Undecided::Lost { back: named, .. } => named,
        }
    }
}

/// The record in force, as far as the evidence shows.
#[derive(Clone)]
struct Base {
    record: GroupRecord,
    /// A later record under which no change was acknowledged. A member that has it also has what
    /// it had before.
    unused: Option<GroupRecord>,
    /// Whether the witness confirms that no later record is in force.
    is_witnessed: bool,
    on_word: bool,
}

impl GroupEvidence<'_> {
    /// Decides how the group continues.
    ///
    /// # Errors
    /// If the group cannot continue.
    pub(crate) fn decide(&self) -> Result<Decision, Undecided> {
        let base = self.base()?;
        let decided = self.decide_on(&base);
        let decided = match self.base_before(&base).filter(|_| decided.is_err()) {
            Some(before) => self.decide_on(&before).or(decided),
            None => decided,
        };
        decided.or_else(|undecided| {
            if !self.is_given_up(&base.record) {
                return Err(undecided);
            }
            let missing = self.missing_stale(&base.record);
            if !missing.is_empty() {
                let there = base.record.in_sync().filter(|at| self.state_at(&base.record, *at).is_some());
                return Err(Undecided::Stale { there: there.count(), missing });
            }
            // In an erasure code, a salvage keeps newer content than an older record.
            let is_awaited = !self.all_missing_are_lost() && self.has_given_up().is_none();
            if self.needed > 1 || is_awaited {
                return Err(self.awaits_more(undecided));
            }
            self.decide_on_word(&base.record).map_err(|doubt| self.awaits_more(doubt.unwrap_or(undecided)))
        })
    }

    /// Returns what the member of a record at a position has stored; `None` if the member is missing.
    fn state_at(&self, record: &GroupRecord, position: usize) -> Option<&MemberState> {
        let target = record.members[position].target;
        self.states.iter().find(|state| state.target == target)
    }

    /// Whether the members of a record that are in sync will never suffice, because the operator has
    /// accepted the loss of others.
    fn is_given_up(&self, record: &GroupRecord) -> bool {
        let left = record.in_sync().filter(|&position| !(self.is_lost)(&record.members[position].target));
        left.count() < self.needed
    }

    /// Whether the operator has accepted the loss of all members of a record that are in sync.
    fn is_lost_in_sync(&self, record: &GroupRecord) -> bool {
        record.in_sync().all(|position| (self.is_lost)(&record.members[position].target))
    }

    /// Whether the operator has accepted the loss of all targets that are missing. Otherwise one of them may
    /// have newer objects than the targets that are left.
    fn all_missing_are_lost(&self) -> bool {
        self.missing.iter().all(self.is_lost)
    }

    /// Returns the stale members of a record that are missing, and that the operator has not given up.
    fn missing_stale(&self, record: &GroupRecord) -> Vec<Uuid> {
        let members = (0..).zip(&record.members);
        let is_missing = |(position, member): &(usize, &MemberRecord)| {
            matches!(member.standing, Standing::Stale { .. })
                && self.state_at(record, *position).is_none()
                && !(self.is_lost)(&member.target)
        };
        members.filter(is_missing).map(|(_, member)| member.target).collect()
    }

    /// Decides with the newest record before `newest` that leaves enough members.
    ///
    /// # Errors
    /// If there is no such record; with the reason if other targets may have newer objects.
    fn decide_on_word(&self, newest: &GroupRecord) -> Result<Decision, Option<Undecided>> {
        let records = self.states.iter().map(|state| &state.record);
        let mut older: Vec<&GroupRecord> = records.filter(|record| record.term < newest.term).collect();
        older.sort_unstable_by_key(|record| Reverse(record.term));
        let base = |record: &GroupRecord, unused: Option<&GroupRecord>| Base {
            record: record.clone(),
            unused: unused.cloned(),
            is_witnessed: false,
            on_word: true,
        };
        let is_doubt = |e: &Undecided| matches!(e, Undecided::Doubt { .. });
        let mut doubt = None;
        let mut decide = |record: &GroupRecord, unused: Option<&GroupRecord>| {
            let decided = self.decide_on(&base(record, unused));
            decided.map_err(|e| doubt = doubt.take().or(Some(e).filter(is_doubt))).ok()
        };
        let stale = self.with_stale_member();
        let since = stale.as_ref().map_or(0, |(term, ..)| *term);
        let (newer, older): (Vec<&GroupRecord>, Vec<_>) = older.into_iter().partition(|r| r.term > since);
        let mut decision = newer.iter().find_map(|record| decide(record, None));
        if let (None, Some((_, own, with_stale))) = (&decision, &stale) {
            let decided = decide(with_stale, Some(own));
            decision = decided.map(|decision| Decision { record: (*own).clone(), ..decision });
        }
        let decision = decision.or_else(|| older.iter().find_map(|record| decide(record, None)));
        decision.ok_or(doubt)
    }

    /// Returns the own record of the stale member that was in sync last, and this record changed so that
    /// only this member is in sync, with the term in which it was. This member was being rebuilt. A
    /// mirror can continue with it, because each of its objects is a complete copy: an older one, or the
    /// newest one. Members of an erasure code have fragments of different changes, which do not fit
    /// together.
    fn with_stale_member(&self) -> Option<(u64, &GroupRecord, GroupRecord)> {
        let last_term = |state: &&MemberState| match state.own_standing() {
            Some(Standing::Stale { term, .. }) => Some((term, state.record.term)),
            _ => None,
        };
        let stale = self.states.iter().filter(|_| self.needed == 1);
        let stale = stale.filter(|state| last_term(state).is_some()).max_by_key(last_term)?;
        let mut record = stale.record.clone();
        for member in &mut record.members {
            member.standing = if member.target == stale.target { Standing::InSync } else { Standing::Blank };
        }
        Some((last_term(&stale)?.0, &stale.record, record))
    }

    /// Returns how a group can continue with stale members, if no decision is possible and the operator
    /// has accepted the loss of all missing members. A mirror needs no salvage, because any member
    /// suffices.
    pub(crate) fn salvage(&self) -> Option<Salvage> {
        let newest = self.base().ok().filter(|_| self.all_missing_are_lost())?.record;
        let salvage = self.salvage_on(&newest);
        if salvage.is_some() || self.has_given_up().is_some() || !self.is_lost_in_sync(&newest) {
            return salvage;
        }
        self.salvage_without_in_sync()
    }

    /// Like [`salvage`](Self::salvage), with the members of a record that are in sync.
    fn salvage_on(&self, record: &GroupRecord) -> Option<Salvage> {
        let state_at = |position: usize| self.state_at(record, position);
        let knows = |position: &usize| state_at(*position).is_some_and(|state| state.knows(record));
        let last = |position: usize| state_at(position).map(MemberState::last).unwrap_or_default();
        let current: Vec<usize> = record.in_sync().filter(knows).collect();
        let settled = current.iter().filter_map(|at| state_at(*at)).map(|state| state.settled).max()?;
        let in_sync: Vec<usize> = current.into_iter().filter(|at| last(*at) >= settled).collect();
        // A stale member that has gone back has unknown content.
        let is_stale = |position: &usize| match (record.members[*position].standing, state_at(*position)) {
            (Standing::Stale { term, settled }, Some(state)) => {
                state.took_part() >= term && state.last() >= settled
            }
            _ => false,
        };
        let stale: Vec<usize> = (0..record.members.len()).filter(is_stale).collect();
        let others = match in_sync.len() + stale.len() < self.needed {
            true => self.others(record, &[&in_sync[..], &stale].concat()),
            false => Vec::new(),
        };
        let suffices =
            in_sync.len() < self.needed && in_sync.len() + stale.len() + others.len() >= self.needed;
        let is_given_up =
            |position: usize| in_sync.contains(&position) || (self.is_lost)(&record.members[position].target);
        let is_allowed = record.in_sync().all(is_given_up) && self.missing_stale(record).is_empty();
        let record = record.clone();
        (suffices && is_allowed).then_some(Salvage { record, in_sync, stale, others, has_leader: false })
    }

    /// Like [`salvage`](Self::salvage), if no member is left that is in sync: the leader takes this part,
    /// and all other targets may differ in any object.
    fn salvage_without_in_sync(&self) -> Option<Salvage> {
        let (position, leader) = self.leader()?;
        let record = leader.record.clone();
        let (in_sync, stale, others) = (vec![position], Vec::new(), self.others(&record, &[position]));
        let suffices = self.needed > 1 && 1 + others.len() >= self.needed;
        suffices.then_some(Salvage { record, in_sync, stale, others, has_leader: true })
    }

    /// Returns the available target with objects of the group that was in sync last, and its position in its
    /// own record. A stale member may have the newest record, because its rebuild had begun.
    fn leader(&self) -> Option<(usize, &MemberState)> {
        let position = |state: &MemberState| {
            (0..state.record.members.len()).find(|position| state.has_content_at(*position))
        };
        let with_content = self.states.iter().filter_map(|state| Some((position(state)?, state)));
        with_content.max_by_key(|(_, state)| (state.last_in_sync(), state.record.term))
    }

    /// Returns targets that have objects as the members at other positions of a record than `taken`: members
    /// and former members.
    fn others(&self, record: &GroupRecord, taken: &[usize]) -> Vec<(usize, Uuid)> {
        let is_elsewhere = |target: Uuid, position: usize| {
            record.members.iter().enumerate().any(|(at, member)| member.target == target && at != position)
        };
        let other = |position: usize| {
            let has_content = |state: &&MemberState| {
                state.has_content_at(position) && !is_elsewhere(state.target, position)
            };
            let with_content = self.states.iter().filter(has_content);
            let newest = with_content.max_by_key(|state| (state.last_in_sync(), state.record.term))?;
            Some((position, newest.target))
        };
        (0..record.members.len()).filter(|position| !taken.contains(position)).filter_map(other).collect()
    }

    /// Returns whether the group can never continue with any of its objects: too few available targets
    /// have them, and the operator has accepted the loss of all targets that are missing.
    pub(crate) fn is_lost_for_good(&self) -> bool {
        let left = |in_sync: &BTreeSet<Uuid>| in_sync.iter().filter(|uuid| !(self.is_lost)(uuid)).count();
        let is_given_up = match self.base() {
            Ok(base) => self.is_given_up(&base.record),
            Err(Undecided::NoData { .. }) => match self.witness {
                Some(witness) => left(&witness.in_sync) < self.needed,
                None => !self.missing.is_empty(),
            },
            Err(_) => false,
        };
        let is_lost = is_given_up && self.lacks_content() && self.all_missing_are_lost();
        is_lost || self.has_given_up().is_some()
    }

    /// Whether too few available targets have objects of the group.
    pub(crate) fn lacks_content(&self) -> bool {
        let base = self.base().ok().map(|base| base.record);
        let base = base.filter(|record| !self.is_lost_in_sync(record));
        let record = base.or_else(|| Some(self.leader()?.1.record.clone()));
        record.is_none_or(|record| self.others(&record, &[]).len() < self.needed)
    }

    /// Whether a target is in sync, and has all changes that the group has settled.
    pub(crate) fn is_current(&self, target: &Uuid) -> bool {
        let Ok(Base { record, on_word: false, .. }) = self.base() else { return false };
        let current = record.in_sync().filter_map(|position| self.state_at(&record, position));
        let current: Vec<&MemberState> = current.filter(|state| state.knows(&record)).collect();
        let settled = current.iter().map(|state| state.settled).max().unwrap_or_default();
        current.iter().any(|state| state.target == *target && state.last() >= settled)
    }

    /// Returns the record in force, as far as the evidence shows.
    pub(crate) fn last_record(&self) -> Option<GroupRecord> {
        self.base().ok().map(|base| base.record)
    }

    /// Returns the record with which the group has given up its content, if it is in force.
    pub(crate) fn has_given_up(&self) -> Option<GroupRecord> {
        let base = self.base().ok().filter(|base| base.is_witnessed)?;
        (base.record.in_sync().count() == 0).then_some(base.record)
    }

    /// Returns the reason why the group must wait, or cannot continue at all: any missing target may have
    /// objects, and if enough members have objects, also the targets that `undecided` names.
    fn awaits_more(&self, undecided: Undecided) -> Undecided {
        let mut awaited = self.may_have_objects();
        if !self.lacks_content() {
            let named = undecided.targets().iter().filter(|target| !(self.is_lost)(target));
            awaited.extend(named.copied());
            if awaited.is_empty() {
                return undecided;
            }
        }
        Undecided::NoData { missing: awaited.into_iter().collect() }
    }

    fn no_data(&self) -> Undecided {
        Undecided::NoData { missing: self.may_have_objects().into_iter().collect() }
    }

    /// Returns the targets that are missing, or that should have objects and have none, and that the
    /// operator has not given up.
    fn may_have_objects(&self) -> BTreeSet<Uuid> {
        let is_there = |target: &&Uuid| self.states.iter().any(|state| state.target == **target);
        let named = self.witness.iter().flat_map(|witness| &witness.in_sync).filter(|uuid| !is_there(uuid));
        let targets = self.missing.iter().chain(named);
        targets.filter(|uuid| !(self.is_lost)(uuid)).copied().collect()
    }

    fn decide_on(&self, base: &Base) -> Result<Decision, Undecided> {
        let Base { record, unused, is_witnessed, mut on_word } = base.clone();
        let state_of = |uuid: &Uuid| self.states.iter().find(|state| state.target == *uuid);
        let in_sync: Vec<(usize, Uuid)> =
            record.in_sync().map(|position| (position, record.members[position].target)).collect();
        let missing: Vec<Uuid> =
            in_sync.iter().map(|(_, uuid)| *uuid).filter(|uuid| state_of(uuid).is_none()).collect();
        let current: BTreeMap<usize, &MemberState> = in_sync
            .iter()
            .filter_map(|(position, uuid)| Some((*position, state_of(uuid)?)))
            .filter(|(_, state)| state.knows(&record) || Some(&state.record) == unused.as_ref())
            .collect();
        let settled = match base::mutant!(RollBackAcknowledged) {
            false => current.values().map(|state| state.settled).max().unwrap_or_default(),
            true => ChangeId::default(),
        };
        let has_settled = |state: &MemberState| state.last() >= settled || base::mutant!(TrustReturnedTarget);
        let counted: BTreeMap<usize, &MemberState> =
            current.iter().filter(|(_, state)| has_settled(state)).map(|(&p, &s)| (p, s)).collect();
        if counted.len() < self.needed {
            let there = counted.len();
            let back = in_sync.iter().filter(|(p, uuid)| !counted.contains_key(p) && !missing.contains(uuid));
            let back = back.map(|(_, uuid)| *uuid);
            if in_sync.len() - missing.len() < self.needed {
                let missing = missing.iter().copied().chain(back).collect();
                return Err(Undecided::TooFew { there, missing });
            }
            return Err(Undecided::Lost { there, back: back.collect() });
        }
        if !is_witnessed && missing.len() >= self.needed {
            on_word = true;
            if missing.iter().filter(|uuid| !(self.is_lost)(uuid)).count() >= self.needed {
                return Err(Undecided::Doubt { there: counted.len(), ahead: missing });
            }
        }
        let (whole, undone) = self.keep(&record, &counted, settled);
        let kept: BTreeSet<ChangeId> =
            whole.iter().flat_map(|p| counted[p].changes.difference(&undone)).copied().collect();
        let verdict = |position: usize| match counted.get(&position) {
            Some(state) => {
                let lacks =
                    kept.iter().filter(|change| **change > settled && !state.changes.contains(change));
                MemberVerdict::Continues { lacks: lacks.copied().collect() }
            }
            None if record.members[position].standing != Standing::InSync => MemberVerdict::NotInSync,
            None if missing.contains(&record.members[position].target) => MemberVerdict::Missing,
            None => MemberVerdict::WentBack,
        };
        let verdicts = (0..record.members.len()).map(verdict).collect();
        let last = counted.values().map(|state| state.last()).max().unwrap_or_default();
        let last_kept = kept.last().copied().unwrap_or_default().max(settled);
        Ok(Decision { record, verdicts, undone, settled, last_kept, last, on_word })
    }

    /// Finds the record in force.
    fn base(&self) -> Result<Base, Undecided> {
        let records = self.states.iter().map(|state| &state.record);
        if base::mutant!(AcceptOldRecord) {
            let oldest = records.min_by_key(|record| record.term).ok_or_else(|| self.no_data())?;
            return Ok(Base { record: oldest.clone(), unused: None, is_witnessed: true, on_word: false });
        }
        let newest = records.max_by_key(|record| record.term).ok_or_else(|| self.no_data())?;
        if base::mutant!(IgnoreWitness) {
            return Ok(Base { record: newest.clone(), unused: None, is_witnessed: true, on_word: false });
        }
        // The witness is written before any member stores the record.
        let Some(witness) = self.witness.filter(|witness| newest.term <= witness.term) else {
            return Ok(Base { record: newest.clone(), unused: None, is_witnessed: false, on_word: false });
        };
        let stored = self.states.iter().flat_map(|state| [Some(&state.record), state.proposal.as_ref()]);
        let is_witnessed = |record: &&GroupRecord| {
            let in_sync = record.in_sync().map(|position| record.members[position].target);
            record.term == witness.term && in_sync.collect::<BTreeSet<Uuid>>() == witness.in_sync
        };
        if let Some(record) = stored.flatten().find(is_witnessed) {
            return Ok(Base { record: record.clone(), unused: None, is_witnessed: true, on_word: false });
        }
        let left = witness.in_sync.iter().filter(|uuid| !(self.is_lost)(uuid)).count();
        if left >= self.needed {
            return Err(Undecided::Outdated { ahead: witness.in_sync.iter().copied().collect() });
        }
        if !self.all_missing_are_lost() {
            return Err(self.no_data());
        }
        Ok(Base { record: newest.clone(), unused: None, is_witnessed: false, on_word: true })
    }

    /// Returns the record before the witnessed one, if a member in sync shows that the witnessed
    /// record was not in force on all members: the member has it, or a later one, only as a proposal.
    /// No change of its term was acknowledged then, so the record before it suffices. A later proposal
    /// shows nothing if it was made on the operator's word: the member may have gone back to the record
    /// before it.
    fn base_before(&self, base: &Base) -> Option<Base> {
        let witnessed = &base.record;
        let in_sync = |uuid: &Uuid| witnessed.in_sync().any(|p| witnessed.members[p].target == *uuid);
        let shows_it = |state: &MemberState| {
            state.proposal.as_ref().is_some_and(|proposal| {
                let is_on_word = proposal.term.saturating_sub(state.record.term) >= LOSS_STEP;
                proposal.term == witnessed.term || proposal.term > witnessed.term && !is_on_word
            })
        };
        let is_before = |state: &&MemberState| {
            in_sync(&state.target) && state.record.term < witnessed.term && shows_it(state)
        };
        let state = self.states.iter().filter(|_| base.is_witnessed).find(is_before)?;
        // Members may be missing that have gone on with a later record, if the operator has accepted their
        // loss. A salvage may have changed the objects of the members that have the witnessed record.
        let on_word = witnessed.term.saturating_sub(state.record.term) >= LOSS_STEP;
        let unused = Some(witnessed.clone()).filter(|_| !on_word);
        Some(Base { record: state.record.clone(), unused, is_witnessed: true, on_word })
    }

    /// Decides which changes after `settled` the group keeps. Returns the positions of the members
    /// that have all of them, and the changes to undo.
    fn keep(
        &self,
        record: &GroupRecord,
        counted: &BTreeMap<usize, &MemberState>,
        settled: ChangeId,
    ) -> (BTreeSet<usize>, BTreeSet<ChangeId>) {
        let mut holders: BTreeMap<ChangeId, BTreeSet<usize>> = BTreeMap::new();
        for (&position, state) in counted {
            let is_open = |change: &&ChangeId| **change > settled || record.undone.contains(change);
            for &change in state.changes.iter().filter(is_open) {
                holders.entry(change).or_default().insert(position);
            }
        }
        let mut whole: BTreeSet<usize> = counted.keys().copied().collect();
        let mut undone = BTreeSet::new();
        for (change, have_it) in &holders {
            let rest: BTreeSet<usize> = whole.intersection(have_it).copied().collect();
            // A member commits changes in their order, so it has refused a change that it lacks
            // although it has a later one.
            let has_later = |position: &usize| counted[position].last() > *change;
            let is_refused = self.refused.contains(change) && rest != whole
                || counted.keys().any(|position| !have_it.contains(position) && has_later(position));
            if rest.len() < self.needed || is_refused || record.undone.contains(change) {
                undone.insert(*change);
            } else {
                whole = rest;
            }
        }
        // A member without the change provides the old metadata. If every member has the change, then
        // no member has undone it yet, and the group keeps it.
        undone.retain(|change| !whole.is_subset(&holders[change]));
        (whole, undone)
    }
}
