//! Opens an interval: reads the group's records on all targets, and makes sure that all members in
//! sync have the same transactions.
//!
//! The membership record with the highest term is valid: the array acknowledges no change before
//! all members in sync have stored the current record. The available members in sync form the new
//! interval. If other members are missing, the available members first store a record that lists
//! the missing members as stale. They store this record as a proposal, and as their membership
//! record once all of them have the proposal. The array keeps a transaction that every member in
//! sync has. A transaction that only some members have was never acknowledged, so the array rolls
//! it back. The intents name all objects that may need a rollback, so the array does not scan the
//! objects.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use store::{ObjectId, StoreError};
use tokio::time::Instant;

use crate::group::Group;
use crate::intents::Intents;
use crate::interval::{Interval, over};
use crate::member::Member;
use crate::record::GroupRecord;
use crate::removal::leftovers;
use crate::task::spawn;
use crate::view::{MemberView, Views};

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
            if let Err(StoreError::Disconnected(why)) = &opened {
                self.intervals.refuse(tried, why.clone());
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
    pub async fn any_interval(&self) -> store::Result<Rc<Interval>> {
        let mut last = over(0);
        for _ in 0..self.layout.fragments() + 2 {
            match self.interval(self.number()).await {
                Err(e @ StoreError::Disconnected(_)) => last = e,
                outcome => return outcome,
            }
        }
        Err(last)
    }

    /// Returns the current interval, or starts a task that opens a new one. Waits for this task for
    /// at most `patience`; the task continues after this timeout. A group has only one opening task
    /// at a time. Returns `None` if no interval is open by the end of the wait, or if another task
    /// is already opening one.
    pub async fn opened(self: &Rc<Self>, patience: Duration) -> Option<Rc<Interval>> {
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
    }

    /// Opens an interval with the available targets.
    async fn open(&self) -> store::Result<Interval> {
        let number = self.number();
        let Views { views, remains } = self.views().await?;
        if self.number() != number {
            return Err(over(number));
        }
        let (record, members, on_word) =
            self.judge_views(&views).map_err(|e| self.calls.unless_hopeful(e))?;
        let in_sync = members.iter().flatten().map(|view| Rc::clone(&view.link.target));
        self.calls.set_in_sync(in_sync.collect());
        let undone = self.take_back(&members).await?;
        let (record, dirty) = self.agree(record, &views, &members, on_word).await?;
        if self.number() != number {
            return Err(over(number));
        }
        *self.intents.borrow_mut() = intents_of(number, &members, &undone, dirty);
        *self.rebuilding.borrow_mut() = None;
        self.terms.set_lineage(record.clone());
        tracing::debug!(cid = %self.cid, number, term = record.term, "opened an interval of the group");
        let leftovers = RefCell::new(leftovers(&record, &views, &members, &remains));
        let links = members.into_iter().map(|view| view.map(|v| v.link)).collect();
        Ok(Interval { number, links, record, undone, leftovers })
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
                if self.judge_views(&found.views).is_ok() {
                    // The group can continue without the targets that have not answered. Report
                    // these targets as slow.
                    waiting.iter().for_each(|target| target.overdue(&self.cid, now - began));
                    break;
                }
                if slow.is_empty() && now >= began + self.calls.patience {
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
                Some((target, looked)) = looks.next() => {
                    waiting.retain(|t| t.uuid() != target.uuid());
                    found.add(target, looked?);
                }
                () = tokio::time::sleep_until(wait_until) => {}
            }
        }
        Ok(found)
    }

    /// Returns the valid membership record and the available members in sync. The returned flag is
    /// true if these members count as current only because an operator has declared other members
    /// lost.
    fn judge_views(
        &self,
        views: &[MemberView],
    ) -> store::Result<(GroupRecord, Vec<Option<MemberView>>, bool)> {
        let records = views.iter().map(|view| &view.record);
        let newest = match base::mutant!(AcceptOldRecord) {
            false => records.max_by_key(|record| record.term),
            true => records.min_by_key(|record| record.term),
        };
        let Some(record) = newest.cloned() else {
            let detail = "no available target stores data of the group; bring missing targets back".into();
            return Err(StoreError::TooFewTargets { there: 0, needed: self.layout.k, detail });
        };
        let (members, on_word) = self.members(&record, views)?;
        Ok((record, members, on_word))
    }
}

/// Returns the intents of earlier intervals that remain when an interval begins.
fn intents_of(
    interval: u64,
    members: &[Option<MemberView>],
    undone: &BTreeSet<u64>,
    dirty: BTreeSet<ObjectId>,
) -> Intents {
    let mut intents = Intents::new(interval, dirty);
    for (position, view) in members.iter().enumerate() {
        let Some(view) = view else { continue };
        intents.number_used(view.trimmed);
        for (&number, intent) in &view.intents {
            intents.number_used(number);
            if undone.contains(&number) {
                continue;
            }
            let objects = intent.objects.iter().enumerate();
            let kept = objects.filter(|(_, t)| t.undo.keeps_object()).map(|(i, _)| i).collect();
            intents.add_done(number, position, members.len(), kept);
        }
    }
    intents
}
