//! Explores all states of a small group: changes, crashes between any two steps, missing members,
//! members that lose the end of what they have stored, changes that some members refuse, the loss of
//! the witness, and an operator who accepts the loss of members.
//!
//! The decisions are those of the product ([`GroupEvidence::decide`]). The rest is a model: each member
//! is the list of the transactions that its store has committed.
//!
//! Without a word of the operator, no acknowledged change may be lost. With a word, a change may be lost
//! if, apart from the members whose loss is accepted, fewer members had it while they were in sync than
//! are needed to read an object. The last changes are lost: the group serves no change without the
//! changes before it, unless the only member left was being rebuilt. A change that was lost must not
//! come back.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fmt;
use std::hash::{Hash, Hasher};

use uuid::Uuid;

use super::decision::{Decision, GroupEvidence, MemberState, MemberVerdict, Undecided, WitnessEntry};
use super::record::{ChangeId, GroupRecord, MemberRecord, Standing};
use super::terms::LOSS_STEP;

/// Number of a member.
type Number = usize;

/// A transaction that a member has committed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Entry {
    /// The new record, in force.
    Record(GroupRecord),
    /// The record in force, and a proposal of a new record.
    Proposal(GroupRecord, GroupRecord),
    /// A change of one object of its own.
    Change(ChangeId),
    /// A change that also trims the intents up to another change.
    Trim(ChangeId, ChangeId),
    Undo(ChangeId),
    /// The member receives changes that it lacks.
    Forward(BTreeSet<ChangeId>),
    /// Dirty notes for the objects of these changes.
    Notes(BTreeSet<ChangeId>),
    /// The member receives a copy of the objects of these changes, and all records.
    Copied {
        record: GroupRecord,
        settled: ChangeId,
        data: BTreeSet<ChangeId>,
        notes: BTreeSet<ChangeId>,
    },
}

/// What a member has stored.
#[derive(Debug, Clone, Default)]
struct Stored {
    record: Option<GroupRecord>,
    proposal: Option<GroupRecord>,
    settled: ChangeId,
    intents: BTreeSet<ChangeId>,
    notes: BTreeSet<ChangeId>,
    /// Changes whose effect the member's objects show.
    data: BTreeSet<ChangeId>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Entry::Record(record) => write!(f, "R{}", brief(record)),
            Entry::Proposal(_, record) => write!(f, "P{}", brief(record)),
            Entry::Change(change) => write!(f, "{}", show([change])),
            Entry::Trim(change, through) => write!(f, "{}<={}", show([change]), show([through])),
            Entry::Undo(change) => write!(f, "-{}", show([change])),
            Entry::Forward(changes) => write!(f, "+{}", show(changes)),
            Entry::Notes(changes) => write!(f, "notes{}", show(changes)),
            Entry::Copied { record, data, .. } => write!(f, "copy{}{}", brief(record), show(data)),
        }
    }
}

fn show<'a>(changes: impl IntoIterator<Item = &'a ChangeId>) -> String {
    let all: Vec<String> = changes.into_iter().map(|c| format!("{}.{}", c.term, c.number)).collect();
    format!("({})", all.join(" "))
}

fn brief(record: &GroupRecord) -> String {
    let standing = |m: &MemberRecord| match m.standing {
        Standing::InSync => 'i',
        Standing::Stale { .. } => 's',
        Standing::Blank => 'b',
    };
    let members: String = record.members.iter().map(standing).collect();
    format!("{}{members}{}", record.term, show(&record.undone))
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.phase {
            Phase::Down => write!(f, "down")?,
            Phase::Opening { present, refused, steps, pardon } => {
                write!(f, "opening {present:?} refused {} {} steps left", show(refused), steps.len())?;
                pardon.iter().try_for_each(|pardon| write!(f, " {pardon}"))?;
            }
            Phase::Serving { present, record, queue, .. } => {
                let queue: Vec<String> =
                    queue.iter().map(|q| format!("{} refused by {:?}", q.entry, q.refusing)).collect();
                write!(f, "serving {present:?} {} queue {queue:?}", brief(record))?;
            }
        }
        for log in &self.logs {
            let log: Vec<String> = log.iter().map(ToString::to_string).collect();
            write!(f, " | {}", log.join(" "))?;
        }
        let in_sync: Vec<Number> = self.witness.in_sync.iter().map(|uuid| number(*uuid)).collect();
        let witness = (self.witness.term, in_sync);
        write!(
            f,
            " | witness {witness:?}{} damaged {:?} forgotten {:?} acknowledged {} failed {} seen {} gone {}",
            if self.lacks_witness { " lost" } else { "" },
            self.damaged,
            self.forgotten,
            show(&self.acknowledged),
            show(&self.failed),
            show(&self.seen),
            show(&self.gone)
        )?;
        self.pardon.iter().try_for_each(|pardon| write!(f, " {pardon}"))
    }
}

fn replay(log: &[Entry]) -> Stored {
    let mut s = Stored::default();
    for entry in log {
        match entry {
            Entry::Record(record) => {
                if !record.needs_notes() {
                    s.notes.clear();
                }
                (s.record, s.proposal) = (Some(record.clone()), None);
            }
            Entry::Proposal(base, record) => {
                (s.record, s.proposal) = (Some(base.clone()), Some(record.clone()));
            }
            Entry::Change(change) => {
                s.intents.insert(*change);
                s.data.insert(*change);
                if s.record.as_ref().is_some_and(GroupRecord::needs_notes) {
                    s.notes.insert(*change);
                }
            }
            Entry::Trim(change, through) => {
                if s.record.as_ref().is_some_and(GroupRecord::needs_notes) {
                    s.notes.insert(*change);
                }
                s.intents = s.intents.split_off(through);
                s.intents.remove(through);
                s.intents.insert(*change);
                s.data.insert(*change);
                s.settled = *through;
            }
            Entry::Undo(change) => {
                s.intents.remove(change);
                s.data.remove(change);
            }
            Entry::Forward(changes) => {
                s.intents.extend(changes);
                s.data.extend(changes);
            }
            Entry::Notes(changes) => s.notes.extend(changes),
            Entry::Copied { record, settled, data, notes } => {
                s = Stored {
                    record: Some(record.clone()),
                    proposal: None,
                    settled: *settled,
                    intents: BTreeSet::new(),
                    notes: notes.clone(),
                    data: data.clone(),
                };
            }
        }
    }
    s
}

/// A step of the beginning of an interval.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Step {
    /// Each of these members commits these transactions, at any time relative to the others.
    Commit(BTreeMap<Number, Vec<Entry>>),
    Witness(u64, BTreeSet<Uuid>),
}

/// A change in progress: its transaction, and the members that refuse it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Queued {
    entry: Entry,
    refusing: BTreeSet<Number>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Phase {
    Down,
    Opening {
        present: BTreeSet<Number>,
        refused: BTreeSet<ChangeId>,
        steps: Vec<Step>,
        /// What this decision may change, if it needs the operator's word.
        pardon: Option<Pardon>,
    },
    Serving {
        present: BTreeSet<Number>,
        record: GroupRecord,
        next: u64,
        queue: Vec<Queued>,
    },
}

/// What may still happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Budget {
    changes: u8,
    trims: u8,
    crashes: u8,
    refusals: u8,
    damages: u8,
    rebuilds: u8,
    /// How often the witness may be lost.
    losses: u8,
    /// How often the operator may accept the loss of members.
    words: u8,
}

/// What a decision that needs the operator's word may change about the past.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Pardon {
    /// Changes that may be lost.
    lost: BTreeSet<ChangeId>,
    /// Changes that were lost or have failed, and may come back, because the members with the newer
    /// state are lost.
    back: BTreeSet<ChangeId>,
    /// A member continues that was being rebuilt. It may have newer objects beside older ones.
    in_any_order: bool,
}

impl Pardon {
    fn both(one: Option<&Pardon>, other: Option<&Pardon>) -> Option<Pardon> {
        let (Some(one), Some(other)) = (one, other) else { return one.or(other).cloned() };
        Some(Pardon {
            lost: one.lost.union(&other.lost).copied().collect(),
            back: one.back.union(&other.back).copied().collect(),
            in_any_order: one.in_any_order || other.in_any_order,
        })
    }
}

impl fmt::Display for Pardon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "may lose {}, may bring back {}", show(&self.lost), show(&self.back))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    logs: Vec<Vec<Entry>>,
    /// What the witness has stored, or had stored when it was lost.
    witness: WitnessEntry,
    /// Whether the witness is lost. A group without a witness never sees it.
    lacks_witness: bool,
    /// Members of which the operator has accepted the loss.
    forgotten: BTreeSet<Number>,
    /// What the last decisions may have changed, since the group has last served requests.
    pardon: Option<Pardon>,
    phase: Phase,
    budget: Budget,
    /// Members that have lost transactions and were not in sync since.
    damaged: BTreeSet<Number>,
    /// Changes that clients know to have succeeded or to have failed, or whose effect they may have
    /// read.
    acknowledged: BTreeSet<ChangeId>,
    failed: BTreeSet<ChangeId>,
    seen: BTreeSet<ChangeId>,
    /// Changes that were lost with the operator's word.
    gone: BTreeSet<ChangeId>,
    /// For each change that was computed from a change in progress: this change.
    bases: BTreeMap<ChangeId, ChangeId>,
    /// For each change that clients may know, the members that had it while they were in sync. Unused if
    /// the operator gives no word.
    holders: BTreeMap<ChangeId, BTreeSet<Number>>,
    has_operator: bool,
}

/// A group with one scheme, and the parts of the protocol that a test leaves out.
#[derive(Debug, Clone, Copy)]
struct Scheme {
    members: usize,
    needed: usize,
    has_witness: bool,
    /// The record with the decision is stored before changes are undone.
    decides_first: bool,
    /// The operator's word ends when the group serves requests. Otherwise it never ends.
    word_ends: bool,
    /// A change may be computed from any change in progress, because both concern the same object.
    has_bases: bool,
}

fn uuid(number: Number) -> Uuid {
    Uuid::from_u128(number as u128 + 1)
}

fn number(uuid: Uuid) -> Number {
    uuid.as_u128() as usize - 1
}

fn id(entry: &Entry) -> ChangeId {
    match entry {
        Entry::Change(change) | Entry::Trim(change, _) => *change,
        _ => unreachable!("only changes are queued"),
    }
}

impl Scheme {
    fn spare(&self) -> usize {
        self.members - self.needed
    }

    fn start(&self, budget: Budget) -> State {
        let members =
            (0..self.members).map(|n| MemberRecord { target: uuid(n), standing: Standing::InSync }).collect();
        let record = GroupRecord { term: 1, members, undone: BTreeSet::new() };
        let in_sync: BTreeSet<Uuid> = (0..self.members).map(uuid).collect();
        State {
            logs: vec![vec![Entry::Record(record.clone())]; self.members],
            witness: WitnessEntry { term: 1, in_sync },
            lacks_witness: false,
            forgotten: BTreeSet::new(),
            pardon: None,
            phase: Phase::Serving {
                present: (0..self.members).collect(),
                record,
                next: 1,
                queue: Vec::new(),
            },
            budget,
            damaged: BTreeSet::new(),
            acknowledged: BTreeSet::new(),
            failed: BTreeSet::new(),
            seen: BTreeSet::new(),
            gone: BTreeSet::new(),
            bases: BTreeMap::new(),
            holders: BTreeMap::new(),
            has_operator: budget.words > 0,
        }
    }

    /// What the group sees of the witness.
    fn witness<'a>(&self, state: &'a State) -> Option<&'a WitnessEntry> {
        Some(&state.witness).filter(|_| self.has_witness && !state.lacks_witness)
    }

    fn decide(
        &self,
        state: &State,
        present: &BTreeSet<Number>,
        refused: &BTreeSet<ChangeId>,
    ) -> Result<Decision, Undecided> {
        self.with_evidence(state, present, refused, &state.forgotten, |evidence| evidence.decide())
    }

    /// Calls `f` with what the group sees if these members are present and these are forgotten.
    fn with_evidence<T>(
        &self,
        state: &State,
        present: &BTreeSet<Number>,
        refused: &BTreeSet<ChangeId>,
        forgotten: &BTreeSet<Number>,
        f: impl FnOnce(&GroupEvidence<'_>) -> T,
    ) -> T {
        let states: Vec<MemberState> = present
            .iter()
            .filter_map(|&n| {
                let stored = replay(&state.logs[n]);
                Some(MemberState {
                    target: uuid(n),
                    record: stored.record?,
                    proposal: stored.proposal,
                    settled: stored.settled,
                    changes: stored.intents,
                })
            })
            .collect();
        let missing: Vec<Uuid> = (0..self.members).filter(|n| !present.contains(n)).map(uuid).collect();
        f(&GroupEvidence {
            needed: self.needed,
            states: &states,
            witness: self.witness(state),
            refused,
            is_lost: &|target| forgotten.contains(&number(*target)),
            missing: &missing,
        })
    }

    /// The faults that the group must tolerate now: members that are not in sync, that are missing
    /// or that have lost transactions.
    fn faults(&self, state: &State, present: &BTreeSet<Number>) -> usize {
        let in_sync = |n: Number| state.witness.in_sync.contains(&uuid(n));
        let sound = |n: &Number| in_sync(*n) && present.contains(n) && !state.damaged.contains(n);
        (0..self.members).filter(|n| !sound(n)).count()
    }

    /// Whether the model explores what a group does with damaged members. Either the group must tolerate
    /// all faults, or the operator has accepted the loss of all damaged members, and the other members
    /// are available.
    fn is_in_scope(&self, state: &State, present: &BTreeSet<Number>) -> bool {
        state.damaged.is_empty()
            || self.faults(state, present) <= self.spare()
            || state.damaged.is_subset(&state.forgotten)
                && (0..self.members).all(|n| present.contains(&n) || state.damaged.contains(&n))
    }

    /// What a decision may change about the past.
    fn pardon(&self, state: &State, decision: &Decision) -> Option<Pardon> {
        let others = (0..self.members).filter(|n| !state.forgotten.contains(n));
        let others: Vec<(Number, BTreeSet<ChangeId>)> =
            others.map(|n| (n, replay(&state.logs[n]).data)).collect();
        let has_known = |n: &Number, change: &ChangeId| {
            state.holders.get(change).is_some_and(|holders| holders.contains(n))
        };
        let suffice = |change: &&ChangeId| {
            let have_it = others.iter().filter(|(n, data)| data.contains(change) && has_known(n, change));
            have_it.count() >= self.needed
        };
        let is_left = |change: &&ChangeId| others.iter().any(|(_, data)| data.contains(change));
        let known = state.acknowledged.union(&state.seen);
        let undone = state.failed.union(&state.gone);
        let was_rebuilt = |(verdict, member): (&MemberVerdict, &MemberRecord)| {
            matches!(verdict, MemberVerdict::Continues { .. }) && member.standing != Standing::InSync
        };
        // If a member that the operator has given up has lost its last changes, it may continue.
        let applies = decision.on_word || !state.damaged.is_disjoint(&state.forgotten);
        applies.then(|| Pardon {
            lost: known.filter(|change| !suffice(change)).copied().collect(),
            back: undone.filter(is_left).copied().collect(),
            in_any_order: decision.verdicts.iter().zip(&decision.record.members).any(was_rebuilt),
        })
    }

    /// The steps with which an interval begins after a decision.
    fn steps(&self, state: &State, present: &BTreeSet<Number>, decision: &Decision) -> Vec<Step> {
        let stored = |n: Number| replay(&state.logs[n]);
        let mut record = decision.record.clone();
        let mut going_on = BTreeMap::new();
        for (position, verdict) in decision.verdicts.iter().enumerate() {
            let member = &mut record.members[position];
            match verdict {
                MemberVerdict::Continues { lacks } => {
                    member.standing = Standing::InSync;
                    going_on.insert(number(member.target), lacks.clone());
                }
                MemberVerdict::Missing | MemberVerdict::NotInSync if decision.on_word => {
                    member.standing = Standing::Blank;
                }
                MemberVerdict::Missing => {
                    member.standing =
                        Standing::Stale { term: decision.record.term, settled: decision.settled };
                }
                MemberVerdict::WentBack => member.standing = Standing::Blank,
                MemberVerdict::NotInSync => {}
            }
        }
        record.undone = decision.undone.clone();
        let each = |entries: &dyn Fn(Number, &BTreeSet<ChangeId>) -> Vec<Entry>| {
            Step::Commit(going_on.iter().map(|(&n, lacks)| (n, entries(n, lacks))).collect())
        };
        let stores = |n: Number| {
            let Stored { record, proposal, .. } = stored(n);
            record.into_iter().chain(proposal).map(|record| record.term)
        };
        let heard = present.iter().flat_map(|&n| stores(n)).max().unwrap_or(0);
        let heard = heard.max(self.witness(state).map_or(0, |witness| witness.term));
        let is_old = !decision.on_word
            && heard <= decision.record.term
            && record.members == decision.record.members
            && record.undone.iter().all(|change| decision.record.undone.contains(change))
            && going_on.keys().all(|&n| stored(n).record.as_ref() == Some(&decision.record));
        let mut steps = Vec::new();
        let undo = each(&|n, _| {
            let mine: Vec<ChangeId> = stored(n).intents.intersection(&decision.undone).copied().collect();
            mine.into_iter().rev().map(Entry::Undo).collect()
        });
        if !self.decides_first {
            steps.push(undo.clone());
        }
        if !is_old {
            // After a word of the operator, the term exceeds all terms that lost members may have.
            let of_all = (0..self.members).flat_map(stores).chain([state.witness.term]).max();
            record.term = match decision.on_word {
                true => of_all.unwrap_or(0) + LOSS_STEP,
                false => heard + 1,
            };
            let notes = going_on.keys().flat_map(|&n| {
                let stored = stored(n);
                stored.intents.into_iter().chain(stored.notes)
            });
            let notes: BTreeSet<ChangeId> = notes.collect();
            if record.needs_notes() {
                steps.push(each(&|_, _| vec![Entry::Notes(notes.clone())]));
            }
            let base = &decision.record;
            steps.push(each(&|_, _| vec![Entry::Proposal(base.clone(), record.clone())]));
        } else {
            record = decision.record.clone();
        }
        let in_sync: BTreeSet<Uuid> = record.in_sync().map(|p| record.members[p].target).collect();
        let entry = WitnessEntry { term: record.term, in_sync };
        let witness = Step::Witness(entry.term, entry.in_sync.clone());
        if !is_old {
            steps.push(witness.clone());
            steps.push(each(&|_, _| vec![Entry::Record(record.clone())]));
        }
        if self.decides_first {
            steps.push(undo);
        }
        steps.push(each(&|_, lacks| match lacks.is_empty() {
            true => Vec::new(),
            false => vec![Entry::Forward(lacks.clone())],
        }));
        if is_old && (state.lacks_witness || state.witness != entry) {
            steps.push(witness);
        }
        steps
    }

    /// All states that can follow.
    ///
    /// # Errors
    /// A violation.
    fn next(&self, state: &State) -> Result<Vec<State>, String> {
        let mut found = Vec::new();
        match &state.phase {
            Phase::Down => self.after_down(state, &mut found)?,
            Phase::Opening { present, refused, steps, pardon } => {
                self.after_opening(state, (present, refused, pardon), steps, &mut found)?;
            }
            Phase::Serving { .. } => self.after_serving(state, &mut found)?,
        }
        Ok(found)
    }

    fn after_down(&self, state: &State, found: &mut Vec<State>) -> Result<(), String> {
        if state.budget.losses > 0 && !state.lacks_witness {
            let mut next = state.clone();
            next.budget.losses -= 1;
            next.lacks_witness = true;
            found.push(next);
        }
        for bits in 1u32..1 << self.members {
            if state.budget.words > 0 {
                let mut next = state.clone();
                next.budget.words -= 1;
                next.forgotten.extend((0..self.members).filter(|n| bits & 1 << n != 0));
                found.push(next);
            }
        }
        if state.budget.damages > 0 {
            let all: BTreeSet<Number> = (0..self.members).collect();
            for n in 0..self.members {
                for keep in 0..state.logs[n].len() {
                    let mut next = state.clone();
                    next.budget.damages -= 1;
                    next.logs[n].truncate(keep);
                    next.damaged.insert(n);
                    if self.is_in_scope(&next, &all) {
                        found.push(next);
                    }
                }
            }
        }
        for bits in 1u32..1 << self.members {
            let present: BTreeSet<Number> = (0..self.members).filter(|n| bits & 1 << n != 0).collect();
            if !self.is_in_scope(state, &present) {
                continue;
            }
            found.extend(self.open(state, &present, BTreeSet::new())?);
        }
        Ok(())
    }

    /// Checks that the group begins without objects only if it can never serve again with any members
    /// that are not lost, even if the operator accepts more losses, and if they are too few to have a change
    /// that clients know.
    fn check_emptied(
        &self,
        state: &State,
        present: &BTreeSet<Number>,
        refused: &BTreeSet<ChangeId>,
    ) -> Result<(), String> {
        let forgotten = &state.forgotten;
        if !self.with_evidence(state, present, refused, forgotten, |evidence| evidence.is_lost_for_good()) {
            return Ok(());
        }
        let left: Vec<Number> = (0..self.members).filter(|n| !forgotten.contains(n)).collect();
        for bits in 0..1_u32 << left.len() {
            let chosen = left.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1);
            let some: BTreeSet<Number> = chosen.map(|(_, n)| *n).collect();
            let others: BTreeSet<Number> = (0..self.members).filter(|n| !some.contains(n)).collect();
            for words in [forgotten, &others, &(0..self.members).collect()] {
                let serves =
                    |evidence: &GroupEvidence<'_>| evidence.decide().is_ok() || evidence.salvage().is_some();
                let serves = self.with_evidence(state, &some, refused, words, serves);
                check(!serves, || format!("the group is empty, but {some:?} could serve"))?;
            }
        }
        let too_many = |change: &&ChangeId| {
            let had = state.holders.get(change).into_iter().flatten();
            had.filter(|n| !forgotten.contains(n) && !state.damaged.contains(n)).count() >= self.needed
        };
        let kept = state.acknowledged.iter().find(too_many);
        check(kept.is_none(), || format!("the group is empty, but the change {kept:?} is not lost"))
    }

    /// Begins an interval. Returns `None` if the group refuses.
    fn open(
        &self,
        state: &State,
        present: &BTreeSet<Number>,
        refused: BTreeSet<ChangeId>,
    ) -> Result<Option<State>, String> {
        let decision = match self.decide(state, present, &refused) {
            Ok(decision) => decision,
            Err(why) => {
                // Without a witness, members in sync must wait for the operator's word if the
                // missing ones suffice to continue.
                let is_missing = |n: &Number| !present.contains(n) || state.logs[*n].is_empty();
                let awaited = |n: &Number| is_missing(n) && !state.forgotten.contains(n);
                let must_serve = self.faults(state, present) <= self.spare()
                    && (self.witness(state).is_some()
                        || (0..self.members).filter(awaited).count() < self.needed);
                check(!must_serve, || format!("the group does not serve: {why:?}"))?;
                self.check_emptied(state, present, &refused)?;
                return Ok(None);
            }
        };
        let steps = self.steps(state, present, &decision);
        let pardon = self.pardon(state, &decision);
        let phase = Phase::Opening { present: present.clone(), refused, steps, pardon };
        Ok(Some(State { phase, ..state.clone() }))
    }

    fn after_opening(
        &self,
        state: &State,
        (present, refused, pardon): (&BTreeSet<Number>, &BTreeSet<ChangeId>, &Option<Pardon>),
        steps: &[Step],
        found: &mut Vec<State>,
    ) -> Result<(), String> {
        let Some((step, rest)) = steps.split_first() else {
            found.push(self.serve(state, present, refused)?);
            return Ok(());
        };
        let crash = |mut next: State| {
            next.budget.crashes -= 1;
            next.phase = Phase::Down;
            next
        };
        let may_crash = state.budget.crashes > 0;
        let mut done = state.clone();
        match step {
            Step::Witness(term, in_sync) => {
                if may_crash {
                    found.push(crash(state.clone()));
                }
                done.witness = WitnessEntry { term: *term, in_sync: in_sync.clone() };
                done.lacks_witness = false;
                done.pardon = Pardon::both(done.pardon.as_ref(), pardon.as_ref());
            }
            Step::Commit(members) => {
                if may_crash {
                    for kept in prefixes(&members.values().map(Vec::len).collect::<Vec<_>>()) {
                        let mut next = state.clone();
                        for ((&n, entries), &kept) in members.iter().zip(&kept) {
                            next.logs[n].extend_from_slice(&entries[..kept]);
                        }
                        found.push(crash(next));
                    }
                }
                for (&n, entries) in members {
                    done.logs[n].extend_from_slice(entries);
                }
            }
        }
        done.phase = Phase::Opening {
            present: present.clone(),
            refused: refused.clone(),
            steps: rest.to_vec(),
            pardon: pardon.clone(),
        };
        found.push(done);
        Ok(())
    }

    /// Starts to serve, and checks that clients find what they must find.
    fn serve(
        &self,
        state: &State,
        present: &BTreeSet<Number>,
        refused: &BTreeSet<ChangeId>,
    ) -> Result<State, String> {
        let newest = present.iter().filter_map(|&n| replay(&state.logs[n]).record);
        let record = newest.max_by_key(|record| record.term).expect("a member has a record");
        let in_sync: Vec<Number> = record.in_sync().map(|p| number(record.members[p].target)).collect();
        check(in_sync.iter().all(|n| present.contains(n)), || "a missing member is in sync".into())?;
        let contents: Vec<Stored> = in_sync.iter().map(|&n| replay(&state.logs[n])).collect();
        let data = &contents[0].data;
        check(contents.iter().all(|stored| stored.data == *data), || "the members differ".into())?;
        let is_without_base = |change: &&ChangeId| state.bases.get(change).is_some_and(|b| !data.contains(b));
        let change = data.iter().find(is_without_base);
        check(change.is_none(), || format!("the change {change:?} is kept without its base"))?;
        let lacks = |changes: &BTreeSet<ChangeId>| changes.difference(data).copied().collect();
        let has = |changes: &BTreeSet<ChangeId>| changes.intersection(data).copied().collect();
        let pardon = match &state.phase {
            Phase::Opening { pardon, .. } => Pardon::both(state.pardon.as_ref(), pardon.as_ref()),
            _ => None,
        };
        let pardon = pardon.unwrap_or_default();
        let (lost, unseen): (BTreeSet<ChangeId>, BTreeSet<ChangeId>) =
            (lacks(&state.acknowledged), lacks(&state.seen));
        let (failed, back): (BTreeSet<ChangeId>, BTreeSet<ChangeId>) = (has(&state.failed), has(&state.gone));
        check(lost.is_subset(&pardon.lost), || "an acknowledged change is lost".into())?;
        check(unseen.is_subset(&pardon.lost), || "a change that was read is lost".into())?;
        check(failed.is_subset(&pardon.back), || "a failed change is back".into())?;
        check(back.is_subset(&pardon.back), || "a lost change is back".into())?;
        let lost: BTreeSet<ChangeId> = lost.union(&unseen).copied().collect();
        let kept = state.acknowledged.union(&state.seen).filter(|change| data.contains(change)).max();
        let is_prefix = kept < lost.first() || lost.is_empty() || pardon.in_any_order;
        check(is_prefix, || "a change before a kept one is lost".into())?;
        let last = contents.iter().flat_map(|s| s.intents.last().copied().into_iter().chain([s.settled]));
        let next = last.max().unwrap_or_default().number + 1;
        let mut serving = state.clone();
        serving.damaged.retain(|n| !in_sync.contains(n));
        serving.acknowledged.retain(|change| data.contains(change));
        serving.seen.clone_from(data);
        serving.failed.extend(refused);
        serving.failed.retain(|change| !data.contains(change));
        for change in data.iter().filter(|_| state.has_operator) {
            serving.holders.entry(*change).or_default().extend(&in_sync);
        }
        serving.gone.extend(lost);
        serving.gone.retain(|change| !data.contains(change));
        serving.pardon = None;
        if self.word_ends {
            serving.forgotten.clear();
        }
        serving.phase = Phase::Serving { present: present.clone(), record, next, queue: Vec::new() };
        Ok(serving)
    }

    fn after_serving(&self, state: &State, found: &mut Vec<State>) -> Result<(), String> {
        let Phase::Serving { present, record, next, queue } = &state.phase else { return Ok(()) };
        let in_sync: BTreeSet<Number> = record.in_sync().map(|p| number(record.members[p].target)).collect();
        let change = ChangeId { term: record.term, number: *next };
        let enqueue = |entry: Entry, refusing: BTreeSet<Number>| {
            let mut queue = queue.clone();
            queue.push(Queued { entry, refusing });
            Phase::Serving { present: present.clone(), record: record.clone(), next: next + 1, queue }
        };
        let is_used =
            state.logs.iter().flatten().any(|entry| matches!(entry, Entry::Change(c) if *c == change));
        check(!is_used, || format!("the id {} is used twice", show([&change])))?;
        let mut state = state.clone();
        // No member has stored anything of an earlier change with this id.
        state.failed.remove(&change);
        state.gone.remove(&change);
        state.bases.remove(&change);
        let state = &state;
        let bases = queue.iter().filter(|_| self.has_bases).map(|queued| Some(id(&queued.entry)));
        for base in bases.chain([None]).filter(|_| state.budget.changes > 0) {
            let mut queued = state.clone();
            queued.bases.extend(base.map(|base| (change, base)));
            queued.budget.changes -= 1;
            let mut started = queued.clone();
            started.phase = enqueue(Entry::Change(change), BTreeSet::new());
            found.push(started);
            for bits in 1u32..1 << self.members {
                let refusing: BTreeSet<Number> =
                    in_sync.iter().copied().filter(|n| bits & 1 << n != 0).collect();
                if state.budget.refusals > 0 && refusing.len() == bits.count_ones() as usize {
                    let mut started = queued.clone();
                    started.budget.refusals -= 1;
                    started.phase = enqueue(Entry::Change(change), refusing);
                    found.push(started);
                }
            }
        }
        if queue.is_empty() {
            self.trim(state, &in_sync, enqueue, change, found);
            self.rebuild(state, record, present, &in_sync, found);
        } else {
            let full = vec![queue.len(); in_sync.len()];
            found.extend(self.resolve(state, &in_sync, &full)?);
        }
        let lens = vec![queue.len(); in_sync.len()];
        for kept in prefixes(&lens) {
            if state.budget.crashes > 0 {
                let mut next = self.commit_some(state, &in_sync, &kept).0;
                next.budget.crashes -= 1;
                next.phase = Phase::Down;
                found.push(next);
            }
        }
        // One member disappears, with any part of the queue.
        for (at, lost) in in_sync.iter().enumerate() {
            let others: BTreeSet<Number> = present.iter().copied().filter(|n| n != lost).collect();
            if others.is_empty() || state.budget.crashes == 0 {
                continue;
            }
            for kept in 0..=queue.len() {
                let mut lens = lens.clone();
                lens[at] = kept;
                let (mut next, refused) = self.commit_some(state, &in_sync, &lens);
                next.budget.crashes -= 1;
                if !self.is_in_scope(&next, &others) {
                    continue;
                }
                match self.open(&next, &others, refused)? {
                    Some(open) => found.push(open),
                    None => {
                        next.phase = Phase::Down;
                        found.push(next);
                    }
                }
            }
        }
        Ok(())
    }

    fn trim(
        &self,
        state: &State,
        in_sync: &BTreeSet<Number>,
        enqueue: impl Fn(Entry, BTreeSet<Number>) -> Phase,
        change: ChangeId,
        found: &mut Vec<State>,
    ) {
        let through = in_sync.first().and_then(|&n| replay(&state.logs[n]).intents.last().copied());
        if let (Some(through), true) = (through, state.budget.trims > 0) {
            let mut started = state.clone();
            started.budget.trims -= 1;
            started.phase = enqueue(Entry::Trim(change, through), BTreeSet::new());
            found.push(started);
        }
    }

    /// Rebuilds one member, and lists it as in sync.
    fn rebuild(
        &self,
        state: &State,
        record: &GroupRecord,
        present: &BTreeSet<Number>,
        in_sync: &BTreeSet<Number>,
        found: &mut Vec<State>,
    ) {
        let Some(&first) = in_sync.first() else { return };
        let current = replay(&state.logs[first]);
        for (position, member) in record.members.iter().enumerate() {
            let n = number(member.target);
            if member.standing == Standing::InSync || !present.contains(&n) || state.budget.rebuilds == 0 {
                continue;
            }
            let own = replay(&state.logs[n]);
            let settled = current.intents.last().copied().unwrap_or_default().max(current.settled);
            let missing: BTreeSet<ChangeId> =
                current.notes.iter().chain(&own.notes).chain(&own.intents).copied().collect();
            let keeps = match member.standing {
                Standing::Stale { term, settled } => has_kept(&own, term, settled),
                _ => false,
            };
            let data = match keeps {
                true => {
                    let same = own.data.difference(&missing);
                    same.chain(current.data.intersection(&missing)).copied().collect()
                }
                false => current.data.clone(),
            };
            // A crash interrupts the rebuild of a stale member, which then has some of the new objects.
            let differ: Vec<ChangeId> =
                own.data.symmetric_difference(&data).filter(|c| missing.contains(c)).copied().collect();
            for bits in 0u32..1 << differ.len() {
                if state.budget.crashes == 0 || !keeps || !state.has_operator {
                    break;
                }
                let copied = (0..).zip(&differ).filter(|(at, _)| bits & 1 << at != 0).map(|(_, c)| *c);
                let mut next = state.clone();
                next.budget.rebuilds -= 1;
                next.budget.crashes -= 1;
                next.phase = Phase::Down;
                next.logs[n] = vec![Entry::Copied {
                    record: record.clone(),
                    settled,
                    data: own.data.symmetric_difference(&copied.collect()).copied().collect(),
                    notes: missing.clone(),
                }];
                found.push(next);
            }
            let mut new = record.clone();
            new.members[position].standing = Standing::InSync;
            new.term = record.term + 1;
            new.undone = BTreeSet::new();
            let mut next = state.clone();
            next.budget.rebuilds -= 1;
            next.logs[n] =
                vec![Entry::Copied { record: record.clone(), settled, data, notes: current.notes.clone() }];
            let all = || in_sync.iter().copied().chain([n]);
            let each = |entry: Entry| Step::Commit(all().map(|n| (n, vec![entry.clone()])).collect());
            let mut steps = vec![each(Entry::Proposal(record.clone(), new.clone()))];
            steps.push(Step::Witness(new.term, all().map(uuid).collect()));
            steps.push(each(Entry::Record(new)));
            let (present, refused) = (present.clone(), BTreeSet::new());
            next.phase = Phase::Opening { present, refused, steps, pardon: None };
            found.push(next);
        }
    }

    /// Commits a part of the queue on each member in sync. Acknowledges what may be acknowledged.
    /// Returns the changes that only some members have refused.
    fn commit_some(
        &self,
        state: &State,
        in_sync: &BTreeSet<Number>,
        kept: &[usize],
    ) -> (State, BTreeSet<ChangeId>) {
        let Phase::Serving { queue, .. } = &state.phase else { return (state.clone(), BTreeSet::new()) };
        let mut next = state.clone();
        let mut refusing: Vec<BTreeSet<Number>> = vec![BTreeSet::new(); queue.len()];
        for (&n, &kept) in in_sync.iter().zip(kept) {
            let mut data = replay(&next.logs[n]).data;
            for (queued, refusing) in queue[..kept].iter().zip(&mut refusing) {
                let change = id(&queued.entry);
                let lacks_base = state.bases.get(&change).is_some_and(|base| !data.contains(base));
                if queued.refusing.contains(&n) || lacks_base {
                    refusing.insert(n);
                } else {
                    data.insert(change);
                    next.logs[n].push(queued.entry.clone());
                }
            }
        }
        let answered = kept.iter().min().copied().unwrap_or(0);
        let mut refused = BTreeSet::new();
        for (queued, refusing) in queue[..answered].iter().zip(&refusing) {
            let change = id(&queued.entry);
            if refusing.len() == in_sync.len() {
                next.failed.insert(change);
            } else if !refusing.is_empty() {
                refused.insert(change);
            } else if matches!(queued.entry, Entry::Change(_)) {
                next.acknowledged.insert(change);
                next.seen.insert(change);
                if state.has_operator {
                    next.holders.entry(change).or_default().extend(in_sync);
                }
            }
        }
        (next, refused)
    }

    /// All members answer all changes in progress.
    fn resolve(
        &self,
        state: &State,
        in_sync: &BTreeSet<Number>,
        full: &[usize],
    ) -> Result<Option<State>, String> {
        let Phase::Serving { present, record, next, .. } = &state.phase else { return Ok(None) };
        let (mut after, refused) = self.commit_some(state, in_sync, full);
        if refused.is_empty() {
            let (present, record) = (present.clone(), record.clone());
            after.phase = Phase::Serving { present, record, next: *next, queue: Vec::new() };
            return Ok(Some(after));
        }
        self.open(&after, present, refused)
    }

    /// Explores all states. Returns their number.
    ///
    /// # Errors
    /// A violation, and the states that lead to it.
    fn explore(&self, budget: Budget) -> Result<usize, String> {
        let first = self.start(budget);
        let mut seen = HashSet::from([digest(&first)]);
        // For each state: the number of the state before it, and its place among the next states.
        let mut origins = vec![(0, 0)];
        let mut open = VecDeque::from([first]);
        let mut at = 0;
        while let Some(state) = open.pop_front() {
            let found = self.next(&state);
            let found = found
                .map_err(|violation| format!("{violation} after\n{}", self.path(budget, &origins, at)))?;
            for (place, next) in found.into_iter().enumerate() {
                if seen.insert(digest(&next)) {
                    origins.push((at, place));
                    open.push_back(next);
                }
            }
            at += 1;
        }
        Ok(seen.len())
    }

    /// The states that lead to the state with a number.
    fn path(&self, budget: Budget, origins: &[(usize, usize)], mut number: usize) -> String {
        let mut places = Vec::new();
        while number > 0 {
            places.push(origins[number].1);
            number = origins[number].0;
        }
        let mut state = self.start(budget);
        let mut text = state.to_string();
        for place in places.into_iter().rev() {
            state = self.next(&state).expect("the states before have no violation").swap_remove(place);
            text = format!("{text}\n{state}");
        }
        text
    }
}

/// A hasher with 128 bits, so that different states have different hashes.
struct Digest(u128);

impl Digest {
    fn add(&mut self, value: u64) {
        const FACTOR: u128 = 0xda94_2042_e4dd_58b5_2360_ed05_1fc6_5da5;
        self.0 = (self.0 ^ u128::from(value)).wrapping_mul(FACTOR);
        self.0 ^= self.0 >> 67;
    }
}

impl Hasher for Digest {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut value = [0; 8];
            value[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(value));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.add(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.add(value);
    }

    fn write_usize(&mut self, value: usize) {
        self.add(value as u64);
    }

    fn write_isize(&mut self, value: isize) {
        self.add(value as u64);
    }

    fn finish(&self) -> u64 {
        self.0 as u64
    }
}

fn digest(state: &State) -> u128 {
    let mut digest = Digest(1);
    state.hash(&mut digest);
    digest.0
}

fn check(holds: bool, violation: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(violation()) }
}

/// Whether a stale member still has what it had when it was last in sync.
fn has_kept(own: &Stored, term: u64, settled: ChangeId) -> bool {
    let heard = own.record.iter().chain(&own.proposal).map(|record| record.term).max();
    heard >= Some(term) && own.intents.last().copied().unwrap_or_default().max(own.settled) >= settled
}

/// All lists of numbers that are at most `lens`.
fn prefixes(lens: &[usize]) -> Vec<Vec<usize>> {
    lens.iter().fold(vec![Vec::new()], |lists, &len| {
        let longer = |list: Vec<usize>| (0..=len).map(move |n| [&list[..], &[n]].concat());
        lists.into_iter().flat_map(longer).collect()
    })
}

const MIRROR_2: Scheme = scheme(2, 1);
const MIRROR_3: Scheme = scheme(3, 1);
const CODE_2_1: Scheme = scheme(3, 2);
const CODE_2_2: Scheme = scheme(4, 2);

const fn scheme(members: usize, needed: usize) -> Scheme {
    Scheme { members, needed, has_witness: true, decides_first: true, word_ends: true, has_bases: false }
}

/// Events that a small exploration allows.
const FEW: Budget =
    Budget { changes: 2, trims: 1, crashes: 2, refusals: 1, damages: 1, rebuilds: 1, losses: 0, words: 0 };
/// Events around one word of the operator and one loss of the witness.
const WORD: Budget = Budget { refusals: 0, damages: 0, losses: 1, words: 1, ..FEW };

fn explore(scheme: Scheme, budget: Budget) {
    let states = scheme.explore(budget).unwrap_or_else(|violation| panic!("{violation}"));
    #[expect(clippy::print_stdout, reason = "the output shows how much was explored")]
    let () = println!("{scheme:?}, {budget:?}: {states} states");
    assert!(states > 1000, "only {states} states");
}

#[test]
fn two_copies_keep_acknowledged_changes() {
    explore(MIRROR_2, FEW);
}

#[test]
fn three_copies_keep_acknowledged_changes() {
    explore(MIRROR_3, Budget { rebuilds: 0, crashes: 1, ..FEW });
}

#[test]
fn two_data_fragments_and_one_parity_fragment_keep_acknowledged_changes() {
    explore(CODE_2_1, Budget { rebuilds: 0, crashes: 1, ..FEW });
}

#[test]
fn two_parity_fragments_tolerate_two_damaged_logs() {
    let budget = Budget { changes: 1, trims: 0, crashes: 1, refusals: 0, damages: 2, rebuilds: 0, ..FEW };
    explore(CODE_2_2, budget);
}

#[test]
fn a_group_keeps_acknowledged_changes_over_several_crashes() {
    let without = Budget { trims: 0, refusals: 0, rebuilds: 0, ..FEW };
    explore(CODE_2_1, without);
    explore(CODE_2_1, Budget { changes: 1, crashes: 3, damages: 0, rebuilds: 1, ..without });
}

#[test]
fn a_change_is_kept_only_with_the_change_from_which_it_was_computed() {
    let budget = Budget { trims: 0, crashes: 1, damages: 0, rebuilds: 0, changes: 3, ..FEW };
    for scheme in [MIRROR_2, MIRROR_3, CODE_2_1] {
        explore(Scheme { has_bases: true, ..scheme }, budget);
    }
    explore(Scheme { has_bases: true, ..MIRROR_2 }, FEW);
    explore(Scheme { has_bases: true, ..CODE_2_1 }, Budget { rebuilds: 0, crashes: 1, ..FEW });
}

#[test]
fn a_group_without_a_witness_keeps_acknowledged_changes() {
    explore(Scheme { has_witness: false, ..MIRROR_2 }, FEW);
}

#[test]
#[should_panic(expected = "the id (1.1) is used twice")]
fn changes_that_are_undone_before_the_decision_is_stored_are_lost() {
    explore(Scheme { decides_first: false, ..CODE_2_1 }, Budget { rebuilds: 0, ..FEW });
}

#[test]
fn a_group_keeps_acknowledged_changes_when_its_witness_is_lost() {
    explore(MIRROR_2, Budget { refusals: 0, losses: 1, ..FEW });
    explore(MIRROR_3, Budget { changes: 1, trims: 0, refusals: 0, rebuilds: 0, losses: 1, ..FEW });
    explore(CODE_2_1, Budget { crashes: 1, refusals: 0, rebuilds: 0, losses: 1, ..FEW });
}

#[test]
fn two_copies_lose_only_what_the_operator_accepts() {
    explore(MIRROR_2, WORD);
    explore(MIRROR_2, Budget { changes: 1, damages: 1, losses: 0, ..WORD });
    explore(MIRROR_2, Budget { trims: 0, losses: 0, words: 2, ..WORD });
    // A lost member returns, and has a settled change that the group has lost.
    explore(MIRROR_2, Budget { changes: 1, crashes: 3, losses: 0, ..WORD });
    explore(Scheme { word_ends: false, ..MIRROR_2 }, Budget { changes: 1, ..WORD });
}

#[test]
fn three_copies_lose_only_what_the_operator_accepts() {
    explore(MIRROR_3, Budget { changes: 1, trims: 0, rebuilds: 0, ..WORD });
}

#[test]
fn fragments_are_lost_only_if_the_operator_accepts_it() {
    explore(CODE_2_1, Budget { trims: 0, rebuilds: 0, losses: 0, ..WORD });
    explore(CODE_2_1, Budget { changes: 1, trims: 0, rebuilds: 0, ..WORD });
    explore(CODE_2_2, Budget { changes: 1, trims: 0, rebuilds: 0, losses: 0, crashes: 1, ..WORD });
}
