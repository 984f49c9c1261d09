//! Opens an interval: reads the group's records on all targets, decides which members continue and
//! which changes they keep, and carries out this decision.
//!
//! `docs/redundancy.md` states the rules. The order of the steps matters, because the process may
//! end after each of them: dirty notes, the proposed record on all members that continue, the
//! witness, the record, the undoing of changes, and the copying of changes to members that lack
//! them. The intents name all objects that these steps concern, so no step scans the objects.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use store::{ObjectId, Op, StoreError, Transaction};
use tokio::time::Instant;
use uuid::Uuid;

use crate::decision::{Decision, MemberVerdict};
use crate::dirty::DirtyNotes;
use crate::group::Group;
use crate::intents::Intents;
use crate::interval::{Interval, over};
use crate::member::Member;
use crate::member_link::is_refusal;
use crate::members::NotDecided;
use crate::record::{
    ChangeId, GroupRecord, IntentPlace, MemberRecord, Standing, StoredIntent, key_settled, own_object,
};
use crate::removal::leftovers;
use crate::sequence::Sequence;
use crate::slots::{SlotContent, Slots};
use crate::task::spawn;
use crate::view::{MemberView, Views};

/// Number of intents removed per transaction.
const ENTRIES: usize = 64;

impl Group {
    /// Returns the interval with the given number. Opens the interval if necessary. Before an
    /// interval is opened, each transaction of earlier intervals is either kept or rolled back.
    ///
    /// # Errors
    /// [`StoreError::Disconnected`] if the interval has ended; other errors if the interval cannot
    /// be opened.
    pub(crate) async fn interval(&self, number: u64) -> store::Result<Rc<Interval>> {
        if let Some(interval) = self.current() {
            return if interval.number == number { Ok(interval) } else { Err(over(number)) };
        }
        let _one_at_a_time = self.intervals.lock().await;
        if self.current().is_none() {
            // Many requests may wait here to open the same interval. After a failed attempt, all of
            // them fail with the error of this attempt.
            if let Some(e) = self.intervals.refusal(self.number()) {
                return Err(e);
            }
            let tried = self.number();
            let opened = self.open().await;
            if let Err(e) = &opened {
                tracing::debug!(cid = %self.cid, number = tried, error = %e, "cannot open an interval of the group");
            }
            if let Err(e @ (StoreError::Disconnected(_) | StoreError::NoSpace { .. })) = &opened {
                self.intervals.refuse(tried, e.clone());
            }
            self.intervals.begin(opened?);
        }
        match self.current() {
            Some(interval) if interval.number == number => Ok(interval),
            _ => Err(over(number)),
        }
    }

    /// Returns the current interval, or opens a new one. Tries several times, because members may
    /// fail during an attempt.
    pub fn any_interval(&self) -> LocalBoxFuture<'_, store::Result<Rc<Interval>>> {
        Box::pin(async move {
            let mut last = over(0);
            for _ in 0..self.layout.fragments() + 2 {
                match self.interval(self.number()).await {
                    Err(e @ StoreError::Disconnected(_)) => last = e,
                    outcome => return outcome,
                }
            }
            Err(last)
        })
    }

    /// Returns the current interval, or starts a task that opens a new one. Waits for this task for
    /// at most `patience`; the task continues after this timeout. A group has only one opening task
    /// at a time. Returns `None` if no interval is open by the end of the wait, or if another task
    /// is already opening one.
    pub fn opened(self: &Rc<Self>, patience: Duration) -> LocalBoxFuture<'_, Option<Rc<Interval>>> {
        Box::pin(async move {
            if let Some(interval) = self.current() {
                return Some(interval);
            }
            if !self.intervals.claim_opening_task() {
                return None;
            }
            let group = Rc::clone(self);
            let opening = spawn(async move {
                // If the interval cannot be opened now, the caller tries again later.
                drop(group.any_interval().await);
                group.intervals.release_opening_task();
            });
            drop(tokio::time::timeout(patience, opening).await);
            self.current()
        })
    }

    /// Opens an interval with the available targets.
    async fn open(&self) -> store::Result<Interval> {
        let number = self.number();
        let Views { views, remains } = self.views().await?;
        if self.number() != number {
            return Err(over(number));
        }
        self.terms.witness().iter().for_each(|witness| self.terms.heard_of(witness.term));
        let decision = match self.decide(&views) {
            Ok(decision) => decision,
            Err(NotDecided { waits_for, error }) => {
                let lost = self.lost_targets(&views);
                let lacks_objects = self.with_evidence(&views, |evidence| evidence.lacks_content());
                self.obstacle.meets(waits_for.into_iter().chain(lost).collect(), lacks_objects);
                if let Some(salvage) = self.to_salvage(&views) {
                    let salvaged = self.salvage(number, &salvage, &views).await;
                    let salvaged = salvaged.map_err(|e| match e {
                        // These errors concern an object of the salvage, and not that of a request.
                        e if is_refusal(&e) && !matches!(e, StoreError::NoSpace { .. }) => {
                            StoreError::Disconnected(e.to_string())
                        }
                        e => e,
                    });
                    salvaged.inspect_err(|e| self.intervals.refuse(number, e.clone()))?;
                } else if self.with_evidence(&views, |evidence| evidence.is_lost_for_good()) {
                    self.begin_empty(&views).await?;
                } else {
                    return Err(self.calls.unless_hopeful(error));
                }
                self.intervals.end();
                return Err(over(number));
            }
        };
        let mut members = continuing(&decision, &views);
        let in_sync = members.iter().flatten().map(|view| Rc::clone(&view.link.target));
        self.calls.set_in_sync(in_sync.collect());
        self.rebuilds.end();
        let (record, dirty) = self.agree(&decision, &views, &members).await?;
        self.carry_out(number, &decision, &record, &mut members).await?;
        self.terms.testify(&record).await?;
        if self.number() != number {
            return Err(over(number));
        }
        self.obstacle.overcome();
        self.word.heed(false);
        let intents = intents_of(number, &record, &members, &decision, dirty);
        self.replace_intents(intents);
        self.receivers.reconsider_unable();
        tracing::debug!(cid = %self.cid, number, term = record.term, "opened an interval of the group");
        let leftovers = RefCell::new(leftovers(&record, &views, &members, &remains));
        let links = members.into_iter().map(|view| view.map(|v| v.link)).collect();
        Ok(Interval { number, links, record, undone: decision.undone, leftovers })
    }

    /// Returns the targets whose loss the next decision still takes into account: they are missing, are
    /// members without a record of the group, or were in sync and have gone back.
    fn lost_targets(&self, views: &[MemberView]) -> Vec<Uuid> {
        let newest = views.iter().map(|view| &view.state.record).max_by_key(|record| record.term);
        let members = newest.iter().flat_map(|r| r.in_sync().map(|position| r.members[position].target));
        let mut named: BTreeSet<Uuid> = members.collect();
        named.extend(self.terms.witness().iter().flat_map(|witness| witness.in_sync.iter().copied()));
        let is_current = |target: &Uuid| self.with_evidence(views, |evidence| evidence.is_current(target));
        let is_member = |target: &Uuid| {
            let mut records = views.iter().map(|view| &view.state.record);
            records.any(|record| record.members.iter().any(|member| member.target == *target))
        };
        let has_record = |target: &Uuid| views.iter().any(|view| view.state.target == *target);
        let lacks_record =
            |target: &Uuid| !has_record(target) && (is_member(target) || named.contains(target));
        let counts = |target: &&Rc<dyn Member>| {
            !target.is_usable()
                || lacks_record(&target.uuid())
                || named.contains(&target.uuid()) && !is_current(&target.uuid())
        };
        let lost = self.targets.iter().filter(counts).map(|target| target.uuid());
        lost.filter(|target| self.word.is_lost(target)).collect()
    }

    /// Carries out a decision that is stored: undoes changes, and then copies changes to the members
    /// that lack them. Updates the views of these members.
    async fn carry_out(
        &self,
        number: u64,
        decision: &Decision,
        record: &GroupRecord,
        members: &mut [Option<MemberView>],
    ) -> store::Result<()> {
        let lacks = |position: usize| match &decision.verdicts[position] {
            MemberVerdict::Continues { lacks } => lacks.clone(),
            _ => BTreeSet::new(),
        };
        let whole: Vec<Option<MemberView>> = (0..)
            .zip(members.iter())
            .map(|(position, view)| view.clone().filter(|_| lacks(position).is_empty()))
            .collect();
        let have: Vec<&MemberView> = whole.iter().flatten().collect();
        self.undo_changes(&decision.undone, &members.iter().flatten().collect::<Vec<_>>(), &have).await?;
        let links = whole.iter().map(|view| view.as_ref().map(|view| view.link.clone())).collect();
        let (mut record, undone, leftovers) = (record.clone(), BTreeSet::new(), RefCell::default());
        // A member that is not in sync cannot have what the changes have written, so no call on the
        // sources should wait for its rebuild.
        record.members.iter_mut().for_each(|member| member.standing = Standing::InSync);
        let mut sources = Interval { number, links, record, undone, leftovers };
        // The module `catch_up` states why the order matters.
        let mut behind: Vec<usize> =
            (0..members.len()).filter(|&position| !lacks(position).is_empty()).collect();
        behind.sort_by_key(|&position| lacks(position).len());
        for position in behind {
            let Some(view) = &mut members[position] else { continue };
            if !decision.undone.is_empty() {
                *view = self.view(&view.link).await?;
            }
            self.catch_up(&sources, &have, position, view, &lacks(position)).await?;
            *view = self.view(&view.link).await?;
            sources.links[position] = Some(view.link.clone());
        }
        for view in members.iter_mut().flatten() {
            if self.remove_entries(view, decision).await? {
                *view = self.view(&view.link).await?;
            }
        }
        Ok(())
    }

    /// Removes the intents that an earlier version has stored in entries of their own, with their undo
    /// objects. All changes are settled. Returns whether the member had such intents.
    async fn remove_entries(&self, view: &MemberView, decision: &Decision) -> store::Result<bool> {
        let is_entry = |stored: &&StoredIntent| matches!(stored.place, IntentPlace::Entry(_));
        let is_kept = |stored: &&StoredIntent| !decision.undone.contains(&stored.change);
        let old: Vec<&StoredIntent> = view.stored_intents().filter(is_entry).filter(is_kept).collect();
        for some in old.chunks(ENTRIES) {
            let undo_objects = |stored: &StoredIntent| {
                let place = stored.place;
                stored.intent.undo_objects().into_iter().map(move |index| place.undo_object(index))
            };
            let removals = some.iter().flat_map(|stored| undo_objects(stored)).map(|oid| Op::Remove { oid });
            let oid = own_object();
            let settled = decision.last_kept.max(view.state.settled);
            let settled =
                Op::OmapSet { oid: oid.clone(), entries: vec![(key_settled(), settled.encode().into())] };
            let keys = some.iter().map(|stored| stored.place.key()).collect();
            let ops = removals.chain([Op::OmapRemove { oid, keys }, settled]).collect();
            let transaction = Transaction { collection: self.cid.clone(), ops, uses_reserve: true };
            self.calls.apply_to(&view.link, transaction).await?;
        }
        Ok(!old.is_empty())
    }

    /// Whether the group can continue with these targets although no decision is possible.
    fn goes_on_without_decision(&self, views: &[MemberView]) -> bool {
        self.with_evidence(views, |evidence| evidence.salvage().is_some() || evidence.is_lost_for_good())
    }

    /// Reads the group's records on the targets. Asks slow targets only if too few other targets
    /// have answered.
    async fn views(&self) -> store::Result<Views> {
        let began = Instant::now();
        let there = self.targets.iter().filter(|t| t.is_usable());
        let mut waiting: Vec<Rc<dyn Member>> = there.cloned().collect();
        let mut slow: Vec<Rc<dyn Member>> = self.targets.iter().filter(|t| t.is_slow()).cloned().collect();
        let mut looks: FuturesUnordered<_> =
            waiting.iter().map(|target| self.look(Rc::clone(target))).collect();
        let mut found = Views::default();
        let mut wait_until = began + self.calls.member_timeout;
        while !(waiting.is_empty() && slow.is_empty()) {
            let now = Instant::now();
            if waiting.is_empty() || now >= wait_until {
                let silent: Vec<Uuid> = waiting.iter().chain(&slow).map(|target| target.uuid()).collect();
                let decision = self.decide(&found.views);
                let are_lost = silent.iter().all(|target| self.word.is_lost(target));
                let is_over = slow.is_empty() && now >= began + self.calls.patience;
                let goes_on = match &decision {
                    // A target that has not answered may have newer objects than those that an operator's
                    // word leaves.
                    Ok(decision) => !decision.on_word || are_lost,
                    Err(_) => is_over && are_lost && self.goes_on_without_decision(&found.views),
                };
                if goes_on {
                    // The group can continue without the targets that have not answered. Report
                    // these targets as slow.
                    waiting.iter().for_each(|target| target.overdue(&self.cid, now - began));
                    break;
                }
                if is_over {
                    // The operator can accept the loss of these targets, too.
                    let lost = self.lost_targets(&found.views);
                    let named = decision.err().map(|refused| refused.waits_for).unwrap_or_default();
                    let waits_for: BTreeSet<Uuid> = silent.into_iter().chain(named).chain(lost).collect();
                    let lacks_objects = self.with_evidence(&found.views, |evidence| evidence.lacks_content());
                    self.obstacle.meets(waits_for.into_iter().collect(), lacks_objects);
                    let silent = waiting.iter().map(|t| t.uuid().to_string()).collect::<Vec<_>>().join(", ");
                    let why = format!(
                        "too few targets answered within {:?}; no answer from the targets {silent}",
                        self.calls.patience
                    );
                    return Err(StoreError::Disconnected(why));
                }
                looks.extend(slow.iter().map(|target| self.look(Rc::clone(target))));
                waiting.append(&mut slow);
                // Targets that stalled together usually answer again at the same time, so wait a
                // little longer for the other targets.
                wait_until = now + self.calls.member_timeout / 10;
            }
            tokio::select! {
                biased;
                Some((target, looked)) = looks.next() => match looked {
                    // The target has not answered either.
                    Err(StoreError::Disconnected(_)) if began.elapsed() >= self.calls.patience => {}
                    looked => {
                        waiting.retain(|t| t.uuid() != target.uuid());
                        found.add(target, looked?);
                    }
                },
                () = tokio::time::sleep_until(wait_until) => {}
            }
        }
        Ok(found)
    }
}

/// Returns the views of the members that continue, by position.
fn continuing(decision: &Decision, views: &[MemberView]) -> Vec<Option<MemberView>> {
    let continues = decision.record.members.iter().zip(&decision.verdicts);
    let view = |(member, verdict): (&MemberRecord, &MemberVerdict)| {
        let view = views.iter().find(|view| view.state.target == member.target)?;
        matches!(verdict, MemberVerdict::Continues { .. }).then(|| view.clone())
    };
    continues.map(view).collect()
}

/// Returns the intents of a new interval. The slots contain the intents of earlier intervals.
fn intents_of(
    interval: u64,
    record: &GroupRecord,
    members: &[Option<MemberView>],
    decision: &Decision,
    dirty: BTreeSet<ObjectId>,
) -> Intents {
    let next = ChangeId { term: record.term, number: decision.last.number + 1 };
    let mut contents: BTreeMap<IntentPlace, SlotContent> = BTreeMap::new();
    for (position, view) in members.iter().enumerate() {
        let stored = view.iter().flat_map(MemberView::stored_intents);
        for stored in stored.filter(|stored| !decision.undone.contains(&stored.change)) {
            let (change, bytes) = (stored.change, stored.intent.undo_bytes());
            contents.entry(stored.place).or_default().add(change, position, &stored.intent, bytes);
        }
    }
    let mut slots = Slots::default();
    contents.into_iter().for_each(|(place, content)| slots.put(place, content));
    Intents::new(interval, Sequence::new(next, decision.last_kept), slots, DirtyNotes::new(dirty))
}
