//! Executes transactions: turns the ops on objects into one transaction for each member.

use std::ops::Range;
use std::rc::Rc;

use bytes::Bytes;
use futures::future::LocalBoxFuture;
use store::stripes::TargetTransaction;
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};

use crate::answers::{MemberAnswers, TransactionFailure};
use crate::group::Group;
use crate::intents::{IntentOutcome, Intents, StartedChange};
use crate::interval::{Interval, over};
use crate::member_link::MemberLink;
use crate::objects::{ObjectAccess, ObjectPlace, Rows};
use crate::record::{Intent, StoredIntent, Touched, Undo, UndoObjects, key_dirty, own_object};
use crate::rows::{ArrayChange, Split};
use crate::slots::SlotContent;
use crate::undo::save_ranges;
use crate::work::{ObjectEdit, impossible, is_omap_only, object_of, source_of};

/// A transaction of the array, prepared as one transaction for each member.
struct Prepared {
    started: StartedChange,
    transactions: Vec<Option<(MemberLink, Transaction)>>,
    /// What the slot of the change contains when all members have committed it.
    content: SlotContent,
}

impl Group {
    /// Executes a transaction in the interval with the given number.
    pub(crate) async fn transact(&self, number: u64, transaction: Transaction) -> store::Result<()> {
        let interval = self.interval(number).await?;
        if transaction.ops.is_empty() {
            return Ok(());
        }
        // The places come before the gate, so that later requests on these objects stay behind the
        // transaction while the gate is closed.
        let places = self.enter(&interval, &transaction);
        for place in places.iter().filter_map(|(_, place)| place.as_ref()) {
            place.begin().await;
            // Data that is copied or reconstructed must not mix the versions of a change that fails on
            // one member.
            place.settled().await;
        }
        let _open = self.gate.read().await;
        places.iter().filter_map(|(_, place)| place.as_ref()).for_each(ObjectPlace::computes);
        self.still(&interval)?;
        let mut work = self.edits(&interval, &transaction, places).await?;
        if let Err(e) = apply(self, &transaction, &interval, &mut work) {
            // The ops may contradict the object only because it has not the state that the guards
            // demand.
            return Err(self.failed_guard(&interval, &work).await?.unwrap_or(e));
        }
        for one in &mut work {
            one.split = self.split(&interval, one).await?;
        }
        for place in work.iter().filter_map(|one| one.place.as_ref()) {
            place.may_queue().await;
        }
        self.has_slot(&interval).await?;
        let is_noted = |one: &&ObjectEdit| one.is_changed() && interval.record.needs_notes();
        let noted = work.iter().filter(is_noted);
        let started = self.intents.borrow_mut().start(noted.map(|one| &one.oid));
        let prepared = self.prepare(&interval, started, &work, transaction.uses_reserve);
        for one in work.iter().filter(|one| !one.is_source) {
            let size = one.exists.then_some(one.overlay.size);
            one.place.iter().for_each(|place| place.queued(prepared.started.change, &interval, size));
        }
        self.commit(&interval, prepared, &work).await
    }

    /// Removes all undo objects of finished transactions, with their intents.
    ///
    /// # Errors
    /// If a member fails, or the interval ends.
    pub fn trim(&self) -> LocalBoxFuture<'_, store::Result<()>> {
        Box::pin(async move {
            loop {
                let before = self.undo_objects();
                self.trim_some().await?;
                if self.undo_objects() >= before {
                    return Ok(());
                }
            }
        })
    }

    /// Removes some undo objects of finished transactions, with their intents.
    ///
    /// # Errors
    /// Those of [`trim`](Self::trim).
    pub(crate) async fn trim_some(&self) -> store::Result<()> {
        if self.undo_objects() == 0 {
            return Ok(());
        }
        let interval = self.any_interval().await?;
        let _open = self.gate.read().await;
        self.has_slot(&interval).await?;
        if !self.intents.borrow().can_trim() {
            return Ok(());
        }
        let started = self.intents.borrow_mut().start_trim();
        let prepared = self.prepare(&interval, started, &[], true);
        self.commit(&interval, prepared, &[]).await
    }

    /// Waits until a change may start. After this call, the caller must prepare its change before it
    /// awaits anything else.
    ///
    /// # Errors
    /// If the interval has ended.
    async fn has_slot(&self, interval: &Interval) -> store::Result<()> {
        loop {
            let ended = self.change_ended.notified();
            self.still(interval)?;
            if self.intents.borrow().may_start() {
                return Ok(());
            }
            ended.await;
        }
    }

    /// Replaces the intents when an interval begins or the group is removed.
    pub(crate) fn replace_intents(&self, intents: Intents) {
        self.intents.replace(intents);
        self.change_ended.notify_waiters();
    }

    /// Number of undo objects that can be removed, summed over all members.
    pub fn undo_objects(&self) -> usize {
        self.intents.borrow().undo_objects()
    }

    /// Gives the transaction its places in the queues of the objects that it changes. An object of
    /// which only the omap changes has no queue.
    fn enter(&self, interval: &Interval, transaction: &Transaction) -> Vec<(ObjectId, Option<ObjectPlace>)> {
        let mut oids: Vec<&ObjectId> = Vec::new();
        for oid in transaction.ops.iter().flat_map(|op| object_of(op).into_iter().chain(source_of(op))) {
            if !oids.contains(&oid) {
                oids.push(oid);
            }
        }
        let is_source = |oid: &ObjectId| is_source(transaction, oid);
        let has_queue = |oid: &ObjectId| is_source(oid) || !ops_on(transaction, oid).all(is_omap_only);
        let is_single = oids.iter().filter(|oid| has_queue(oid) && !is_source(oid)).count() == 1;
        let enter = |oid: &ObjectId| {
            let access = match is_single && self.damaged.positions(oid).is_empty() {
                true if is_source(oid) => ObjectAccess::Read(Rows::All),
                true => self.access(interval, transaction, oid),
                // A repair before the change needs an object without changes in progress.
                false => ObjectAccess::Alone,
            };
            self.objects.enter(oid, access)
        };
        oids.into_iter().map(|oid| (oid.clone(), has_queue(oid).then(|| enter(oid)))).collect()
    }

    /// Returns what the ops of a transaction do with an object.
    fn access(&self, interval: &Interval, transaction: &Transaction, oid: &ObjectId) -> ObjectAccess {
        let is_guard = |op: &Op| matches!(op, Op::GuardXattr { name, .. } if *name == self.state_xattr);
        let has_guard = ops_on(transaction, oid).any(is_guard);
        let is_mirror = self.layout.is_mirror();
        let all = ObjectAccess::Change { rows: Rows::All, has_guard, reads: !is_mirror };
        let Some(size) = self.objects.settled_size(oid, interval) else { return all };
        let mut written: Option<Range<u64>> = None;
        for op in ops_on(transaction, oid) {
            match op {
                Op::Write { offset, source, .. } if offset + source.len() <= size => {
                    let rows = self.layout.rows(*offset, source.len());
                    let known = written.get_or_insert(rows.clone());
                    *known = known.start.min(rows.start)..known.end.max(rows.end);
                }
                Op::SetXattrs { .. }
                | Op::RemoveXattr { .. }
                | Op::OmapSet { .. }
                | Op::OmapRemove { .. }
                | Op::OmapRemoveRange { .. }
                | Op::OmapClear { .. }
                | Op::GuardXattr { .. }
                | Op::GuardOmap { .. } => {}
                _ => return all,
            }
        }
        let reads = written.is_some() && !is_mirror;
        ObjectAccess::Change { rows: written.map_or(Rows::Nothing, Rows::Range), has_guard, reads }
    }

    /// Begins the edits of objects. Reads the sizes of the objects.
    async fn edits(
        &self,
        interval: &Rc<Interval>,
        transaction: &Transaction,
        places: Vec<(ObjectId, Option<ObjectPlace>)>,
    ) -> store::Result<Vec<ObjectEdit>> {
        let mut work = Vec::with_capacity(places.len());
        for (oid, place) in places {
            let mut was = None;
            if let Some(place) = &place {
                // A transaction that creates an object need not check whether the object exists:
                // the members refuse to create an object twice. This works only if the exclusive
                // creation reaches the members. A removal in the same transaction would cancel the
                // creation.
                let mut own = ops_on(transaction, &oid);
                let creates = matches!(own.next(), Some(Op::CreateExclusive { .. }))
                    && !own.any(|op| matches!(op, Op::Remove { .. }));
                was = match place.size(interval) {
                    None if creates && !self.rebuilds.is_running() => None,
                    _ => self.size(interval, &oid, place).await?,
                };
                // A repair while earlier changes are in progress could mix old and new data. A read
                // may have found the damage only now; it also starts a repair.
                if place.is_first_change() {
                    self.repair_before_change(interval, &oid).await;
                }
            }
            let is_source = is_source(transaction, &oid);
            work.push(ObjectEdit::new(self, interval, &oid, place, was, is_source));
        }
        Ok(work)
    }

    /// Returns the error of the first guard that does not hold. Members check guards only as part
    /// of a transaction.
    async fn failed_guard(
        &self,
        interval: &Interval,
        work: &[ObjectEdit],
    ) -> store::Result<Option<StoreError>> {
        for guard in work.iter().flat_map(ObjectEdit::guards) {
            let (found, expected) = match guard {
                Op::GuardXattr { oid, name, value } => {
                    let xattr = async |link: &MemberLink| {
                        link.target.store().get_xattr(&self.cid, oid, name.clone()).await
                    };
                    (self.ask(interval, oid, xattr).await.map(Some), value)
                }
                Op::GuardOmap { oid, key, value } => {
                    let entry = async |link: &MemberLink| {
                        link.target.store().omap_get(&self.cid, oid, vec![key.clone()]).await
                    };
                    let found = self.ask(interval, oid, entry).await;
                    (found.map(|mut found| found.pop().map(|(_, value)| value)), value)
                }
                _ => continue,
            };
            let found = match found {
                Err(StoreError::NoSuchObject(_) | StoreError::NoSuchXattr(_)) => None,
                found => found?,
            };
            if found != *expected {
                let what = "the object has another state than the transaction assumes";
                return Ok(Some(StoreError::GuardFailed(what.into())));
            }
        }
        Ok(None)
    }

    async fn split(&self, interval: &Rc<Interval>, work: &ObjectEdit) -> store::Result<Split> {
        if work.place.is_none() || !work.exists || work.overlay.is_unchanged() {
            return Ok(Split::none(self.layout.fragments()));
        }
        let live: Vec<bool> = work.live.iter().map(Option::is_some).collect();
        let (layout, coder, oid, overlay) = (self.layout, &self.coder, &work.oid, &work.overlay);
        let before = work.old_data();
        let change = ArrayChange { layout, coder, oid, overlay, live: &live };
        change
            .split(async |fragment, range| {
                let len = (range.end - range.start) as usize;
                let mut bytes = self.read_fragment(interval, before, fragment, range).await?.bytes.to_vec();
                bytes.resize(len, 0);
                Ok(bytes)
            })
            .await
    }

    /// Builds a transaction for each member. The caller must queue these transactions on the members
    /// before it awaits anything else, or starts another change.
    fn prepare(
        &self,
        interval: &Interval,
        started: StartedChange,
        work: &[ObjectEdit],
        uses_reserve: bool,
    ) -> Prepared {
        let notes: Vec<(Bytes, Bytes)> =
            started.dirty.iter().map(|oid| (key_dirty(oid), Bytes::new())).collect();
        let mut content = SlotContent::new(started.change);
        // Many members have equal intents.
        let mut encoded: Vec<(StoredIntent, (Bytes, Bytes))> = Vec::new();
        let transactions = (0..self.layout.fragments()).map(|position| {
            let link = self.takes_part(interval, position)?;
            let mut ops = Vec::new();
            let intent = self.member_ops(work, &started, position, &mut ops);
            trim_ops(&started, position, &mut ops);
            content.add(started.change, position, &intent, self.undo_bytes(work, position));
            let StartedChange { change, settled, place, .. } = started;
            let mut entries = notes.clone();
            let intent = StoredIntent { change, settled, place, intent };
            entries.push(match encoded.iter().find(|(known, _)| *known == intent) {
                Some((_, entry)) => entry.clone(),
                None => {
                    let entry = intent.entry();
                    encoded.push((intent, entry.clone()));
                    entry
                }
            });
            ops.push(Op::OmapSet { oid: own_object(), entries });
            Some((link, Transaction { collection: self.cid.clone(), ops, uses_reserve }))
        });
        let transactions = transactions.collect();
        self.rebuilds.with(|rebuilding| {
            // A rebuild does not copy internal objects.
            let is_copied = |oid: &ObjectId| !(self.is_internal)(oid);
            let position = rebuilding.position();
            let missed = work.iter().filter(|one| one.is_changed() && one.live[position].is_none());
            missed.filter(|one| is_copied(&one.oid)).for_each(|one| rebuilding.misses(&one.oid));
        });
        Prepared { started, transactions, content }
    }

    /// Number of bytes that a change saves in undo objects on the member at a position.
    fn undo_bytes(&self, work: &[ObjectEdit], position: usize) -> u64 {
        let saved = |one: &ObjectEdit| match one.was {
            Some(size) if one.moved => self.layout.fragment_size(position, size),
            _ => one.split.overwritten[position].iter().map(|(_, len)| len).sum(),
        };
        work.iter().filter(|one| one.live[position].is_some()).map(saved).sum()
    }

    /// Appends the ops that the member at `position` executes, except those on the array's records.
    /// Returns the intent.
    fn member_ops(
        &self,
        work: &[ObjectEdit],
        started: &StartedChange,
        position: usize,
        ops: &mut Vec<Op>,
    ) -> Intent {
        let mut intent = Intent { objects: Vec::new() };
        // The undo objects in the slot belong to an earlier change, which is settled.
        let mut left: UndoObjects = started.before.undo_objects(position).to_vec();
        for one in work.iter().filter(|one| one.place.is_none() || one.live[position].is_some()) {
            ops.extend(one.guards().iter().cloned());
            if one.is_source || (!one.exists && one.was.is_none()) {
                continue;
            }
            let index = intent.objects.len();
            let undo = one.undo(self, position);
            let (oid, keep) = (&one.oid, started.place.undo_object(index));
            let is_used = undo.keeps_object() && left.contains(&index);
            left.retain(|used| !(is_used && *used == index));
            if let Undo::Restore { saved, .. } = &undo {
                if is_used {
                    ops.push(match started.before.has_renamed() {
                        true => Op::Remove { oid: keep.clone() },
                        false => Op::Truncate { oid: keep.clone(), size: 0 },
                    });
                }
                ops.extend(save_ranges(oid, started.place, index, saved));
            }
            if one.moved {
                if is_used {
                    ops.push(Op::Remove { oid: keep.clone() });
                }
                let (src, dst_collection) = (oid.clone(), self.cid.clone());
                ops.push(Op::MoveRename { src, dst_collection, dst: keep });
            }
            if one.exists {
                one.content_ops(position, ops);
            }
            intent.objects.push(Touched {
                oid: oid.clone(),
                undo,
                xattrs: one.xattrs,
                omap_keys: one.omap_keys.clone(),
                omap_ranges: one.omap_ranges.clone(),
            });
        }
        ops.extend(left.into_iter().map(|index| Op::Remove { oid: started.place.undo_object(index) }));
        intent
    }

    async fn commit(
        &self,
        interval: &Rc<Interval>,
        prepared: Prepared,
        work: &[ObjectEdit],
    ) -> store::Result<()> {
        let Prepared { started, transactions, content } = prepared;
        let change = started.change;
        let outcome = self.judge(self.send(transactions).await);
        let ended = match &outcome {
            Ok(()) => IntentOutcome::Committed,
            Err(TransactionFailure::Nowhere(_)) => IntentOutcome::Refused,
            Err(TransactionFailure::Somewhere { is_refused, .. }) => {
                IntentOutcome::Undecided { is_refused: *is_refused }
            }
        };
        // Only another interval can decide about a transaction that only some members may have.
        if matches!(ended, IntentOutcome::Undecided { .. }) {
            self.end_interval(interval);
        }
        // A later interval has its own intents, which reflect the outcome of this transaction.
        if self.intents.borrow().interval() == interval.number {
            self.intents.borrow_mut().end(started, content, ended);
            self.change_ended.notify_waiters();
        }
        let Err(failed) = outcome else { return Ok(()) };
        work.iter().flat_map(|one| one.place.as_ref()).for_each(ObjectPlace::failed);
        match failed {
            TransactionFailure::Nowhere(e)
            | TransactionFailure::Somewhere { error: e @ StoreError::Disconnected(_), .. } => Err(e),
            // The next interval normally undoes the change. Until it has done so, the failure is not
            // certain, even if the group cannot continue now.
            TransactionFailure::Somewhere { error, .. } => match self.any_interval().await {
                Ok(next) if next.undone.contains(&change) => Err(error),
                Ok(_) => Err(over(interval.number)),
                Err(e) => Err(StoreError::Disconnected(e.to_string())),
            },
        }
    }

    /// Queues the transactions on all members before it waits for any answer. Every member
    /// therefore receives all transactions in the same order.
    async fn send(
        &self,
        transactions: Vec<Option<(MemberLink, Transaction)>>,
    ) -> Vec<(MemberLink, store::Result<()>)> {
        let (links, transactions): (Vec<MemberLink>, Vec<Transaction>) =
            transactions.into_iter().flatten().unzip();
        let of_target = |(link, transaction): (&MemberLink, Transaction)| {
            let (uuid, incarnation) = (link.target.uuid(), Some(link.incarnation));
            TargetTransaction { uuid, incarnation, transaction }
        };
        let transactions = links.iter().zip(transactions).map(of_target).collect();
        let replies = self.coding.stores().queue_transactions(transactions);
        self.calls.answers(links.into_iter().zip(replies.into_iter().map(store::done)).collect()).await
    }

    /// Determines the outcome of a transaction of the array from the answers of the members.
    fn judge(&self, outcomes: Vec<(MemberLink, store::Result<()>)>) -> Result<(), TransactionFailure> {
        let mut answers = MemberAnswers::default();
        for (link, answer) in outcomes {
            if let Err(e) = &answer {
                tracing::debug!(cid = %self.cid, target_uuid = %link.target.uuid(), error = %e, "a member has not committed a transaction");
            }
            answers.add(answer).iter().for_each(|e| link.fail(e));
        }
        answers.outcome()
    }
}

/// Returns the ops of a transaction on one object.
fn ops_on<'a>(transaction: &'a Transaction, oid: &ObjectId) -> impl Iterator<Item = &'a Op> {
    transaction.ops.iter().filter(move |op| object_of(op) == Some(oid))
}

/// Applies each op of a transaction, in order, to the edit of the op's object.
fn apply(
    group: &Group,
    transaction: &Transaction,
    interval: &Interval,
    work: &mut [ObjectEdit],
) -> store::Result<()> {
    for op in &transaction.ops {
        let oid = object_of(op).ok_or_else(|| impossible(op))?;
        let source = source_of(op).map(|source| work.iter().find(|one| one.oid == *source));
        let source = source.map(|one| one.ok_or_else(|| impossible(op))).transpose()?;
        let source = source.map(ObjectEdit::as_source);
        let one = work.iter_mut().find(|one| one.oid == *oid).ok_or_else(|| impossible(op))?;
        match source {
            Some(source) => one.copy(&source, op)?,
            None => one.apply(group, interval, op)?,
        }
    }
    Ok(())
}

/// Returns whether a transaction copies an object.
fn is_source(transaction: &Transaction, oid: &ObjectId) -> bool {
    transaction.ops.iter().any(|op| source_of(op) == Some(oid))
}

/// Appends the ops that remove intents and undo objects from the slots that a change trims.
fn trim_ops(started: &StartedChange, position: usize, ops: &mut Vec<Op>) {
    if started.trims.is_empty() {
        return;
    }
    let keys = started.trims.iter().map(|(place, _)| place.key()).collect();
    ops.push(Op::OmapRemove { oid: own_object(), keys });
    for (place, content) in &started.trims {
        let indices = content.undo_objects(position).iter();
        ops.extend(indices.map(|index| Op::Remove { oid: place.undo_object(*index) }));
    }
}
