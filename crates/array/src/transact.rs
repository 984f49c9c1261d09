//! A transaction: from ops on objects to a transaction for each member.

use std::collections::BTreeMap;
use std::rc::Rc;

use bytes::Bytes;
use futures::future::join_all;
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction, WriteSource};
use tokio::sync::OwnedRwLockWriteGuard;

use crate::group::{Group, Interval, Known, Log, MemberLink, over};
use crate::overlay::Overlay;
use crate::read::Whole;
use crate::record::{
    Intent, SIZE_XATTR, Touched, Undo, encode, key_dirty, key_intent, key_trimmed, own_object, undo_object,
};
use crate::split::{Split, Splitter};

/// What a transaction does to one object.
struct Work {
    oid: ObjectId,
    /// `None` for objects of which only the omap counts: those are not locked.
    guard: Option<OwnedRwLockWriteGuard<Known>>,
    /// Its size before, if there was such an object.
    was: Option<u64>,
    exists: bool,
    exclusive: bool,
    /// What there was is moved away.
    moved: bool,
    overlay: Overlay,
    /// Ops on xattrs and omap.
    meta: Vec<Op>,
    xattrs: bool,
    omap_keys: Vec<Bytes>,
    omap_ranges: Vec<(Bytes, Option<Bytes>)>,
    /// Worked out last.
    split: Split,
    live: Vec<Option<MemberLink>>,
}

/// What goes to the members, by position.
struct Prepared {
    number: u64,
    transactions: Vec<Option<(MemberLink, Transaction)>>,
    undo_objects: Vec<Vec<usize>>,
    /// It trims intents up to there.
    trims: Option<u64>,
    /// Objects that it notes as dirty.
    dirty: Vec<ObjectId>,
}

/// How a transaction has failed.
enum Failed {
    /// It has changed nothing.
    Nowhere(StoreError),
    /// It may be on some members.
    Somewhere(StoreError),
}

impl Group {
    /// Carries out a transaction in the interval of that number.
    pub(crate) async fn transact(&self, number: u64, transaction: Transaction) -> store::Result<()> {
        let interval = self.interval(number).await?;
        if transaction.ops.is_empty() {
            return Ok(());
        }
        let _open = self.gate.read().await;
        let mut work = self.lock(&interval, &transaction).await?;
        apply(self, &transaction, &interval, &mut work)?;
        for one in &mut work {
            one.split = self.split(&interval, one).await?;
        }
        self.still(&interval)?;
        let prepared = self.prepare(&interval, &work, transaction.uses_reserve);
        self.commit(&interval, prepared, &mut work).await
    }

    /// Takes away what was kept for transactions that are done.
    pub async fn trim(&self) -> store::Result<()> {
        if self.log.borrow().done.is_empty() {
            return Ok(());
        }
        let interval = self.any_interval().await?;
        let _open = self.gate.read().await;
        self.still(&interval)?;
        let prepared = self.prepare(&interval, &[], true);
        self.commit(&interval, prepared, &mut []).await
    }

    /// Number of undo objects on all members that no transaction has trimmed yet.
    pub fn undo_objects(&self) -> usize {
        self.log.borrow().done.values().flatten().map(Vec::len).sum()
    }

    /// Locks the objects that are changed, in an order that all keep to, and learns how they are.
    async fn lock(&self, interval: &Rc<Interval>, transaction: &Transaction) -> store::Result<Vec<Work>> {
        let mut oids: Vec<&ObjectId> = Vec::new();
        for oid in transaction.ops.iter().filter_map(object_of) {
            if !oids.contains(&oid) {
                oids.push(oid);
            }
        }
        oids.sort();
        let mut work = Vec::with_capacity(oids.len());
        for oid in oids {
            let mut own = transaction.ops.iter().filter(|op| object_of(op) == Some(oid)).peekable();
            // A transaction that makes a new object need not look for an old one: the members refuse to make it twice.
            // That needs an op which they can refuse, and a removal would take it back.
            let removes = own.clone().any(|op| matches!(op, Op::Remove { .. }));
            let exclusive = matches!(own.peek(), Some(Op::CreateExclusive { .. })) && !removes;
            let (mut guard, mut was) = (None, None);
            if !own.all(is_omap_only) {
                let locked = self.exclusive_object(oid).await;
                self.still(interval)?;
                was = match locked.get(interval) {
                    None if exclusive && self.rebuild.borrow().is_none() => None,
                    _ => self.size(interval, oid, &locked).await?,
                };
                self.repair_before_change(interval, oid).await;
                guard = Some(locked);
            }
            work.push(Work::new(self, interval, oid, guard, was));
        }
        Ok(work)
    }

    async fn split(&self, interval: &Rc<Interval>, work: &Work) -> store::Result<Split> {
        if work.guard.is_none() || !work.exists || work.overlay.is_unchanged() {
            return Ok(Split::none(self.layout.fragments()));
        }
        let live: Vec<bool> = work.live.iter().map(Option::is_some).collect();
        let (layout, coder, oid, overlay) = (self.layout, &self.coder, &work.oid, &work.overlay);
        let before = Whole { oid, size: work.was.unwrap_or(0) };
        let splitter = Splitter { layout, coder, oid, overlay, live: &live };
        splitter
            .split(async |fragment, range| {
                let len = (range.end - range.start) as usize;
                let mut bytes = self.read_fragment(interval, before, fragment, range).await?.bytes.to_vec();
                bytes.resize(len, 0);
                Ok(bytes)
            })
            .await
    }

    /// Numbers the transaction and makes what goes to each member. Nothing may wait between this and the sending.
    fn prepare(&self, interval: &Interval, work: &[Work], uses_reserve: bool) -> Prepared {
        let mut log = self.log.borrow_mut();
        let number = log.next;
        log.next += 1;
        log.under_way.insert(number);
        let trims = log.settled();
        let trims = (!log.trimming && log.done.first_key_value().is_some_and(|(first, _)| *first <= trims))
            .then_some(trims);
        log.trimming |= trims.is_some();
        let dirty = |one: &&Work| one.guard.is_some() && !log.dirty.contains(&one.oid);
        let dirty: Vec<ObjectId> = match interval.record.needs_notes() {
            false => Vec::new(),
            true => work.iter().filter(dirty).map(|one| one.oid.clone()).collect(),
        };
        let mut common: Vec<(Bytes, Bytes)> =
            dirty.iter().map(|oid| (key_dirty(oid), Bytes::new())).collect();
        common.extend(trims.map(|through| (key_trimmed(), Bytes::copy_from_slice(&through.to_be_bytes()))));
        let (mut transactions, mut undo_objects) = (Vec::new(), Vec::new());
        for position in 0..self.layout.fragments() {
            let Some(link) = self.takes_part(interval, position) else {
                transactions.push(None);
                undo_objects.push(Vec::new());
                continue;
            };
            let mut ops = Vec::new();
            let (intent, kept) = self.member_ops(work, number, position, &mut ops);
            trims.iter().for_each(|&through| trim_ops(&log.done, position, through, &mut ops));
            let mut entries = common.clone();
            entries.push((key_intent(number), encode(&intent)));
            ops.push(Op::OmapSet { oid: own_object(), entries });
            transactions.push(Some((link, Transaction { collection: self.cid.clone(), ops, uses_reserve })));
            undo_objects.push(kept);
        }
        log.dirty.extend(dirty.iter().cloned());
        if let Some(rebuild) = self.rebuild.borrow_mut().as_mut() {
            work.iter().filter(|one| one.guard.is_some()).for_each(|one| rebuild.changes(&one.oid));
        }
        Prepared { number, transactions, undo_objects, trims, dirty }
    }

    /// The ops of one member; returns the intent, and which objects it keeps something of.
    fn member_ops(
        &self,
        work: &[Work],
        number: u64,
        position: usize,
        ops: &mut Vec<Op>,
    ) -> (Intent, Vec<usize>) {
        let mut intent = Intent { objects: Vec::new() };
        let mut kept = Vec::new();
        for one in work.iter().filter(|one| one.guard.is_none() || one.live[position].is_some()) {
            if !one.exists && one.was.is_none() {
                continue;
            }
            let index = intent.objects.len();
            let undo = one.undo(self, position);
            if undo.keeps_object() {
                kept.push(index);
            }
            let (oid, keep) = (&one.oid, undo_object(number, index));
            if let Undo::Restore { saved, .. } = &undo {
                ops.extend(copy_ranges(oid, &keep, saved));
            }
            if one.moved {
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
        (intent, kept)
    }

    async fn commit(
        &self,
        interval: &Rc<Interval>,
        prepared: Prepared,
        work: &mut [Work],
    ) -> store::Result<()> {
        let Prepared { number, transactions, undo_objects, trims, dirty } = prepared;
        let outcome = self.judge(interval, self.send(transactions).await);
        let failed = {
            let mut log = self.log.borrow_mut();
            // A later interval has a log of its own, which knows what has come of this one's transactions.
            let mut elsewhere = Log::default();
            let log = if log.interval == interval.number { &mut *log } else { &mut elsewhere };
            log.trimming &= trims.is_none();
            match outcome {
                Ok(()) => {
                    log.under_way.remove(&number);
                    log.done.insert(number, undo_objects);
                    if let Some(through) = trims {
                        log.done = log.done.split_off(&(through + 1));
                    }
                    None
                }
                Err(Failed::Nowhere(e)) => {
                    log.under_way.remove(&number);
                    log.done.insert(number, Vec::new());
                    log.dirty.retain(|oid| !dirty.contains(oid));
                    Some(Failed::Nowhere(e))
                }
                Err(failed) => Some(failed),
            }
        };
        let Some(failed) = failed else {
            for one in work {
                let size = one.exists.then_some(one.overlay.size);
                one.guard.iter().for_each(|guard| guard.set(interval, size));
            }
            return Ok(());
        };
        work.iter().flat_map(|one| one.guard.as_ref()).for_each(|guard| guard.forget());
        match failed {
            Failed::Nowhere(e) | Failed::Somewhere(e @ StoreError::Disconnected(_)) => Err(e),
            // The next interval takes it back. Only then it has failed for certain.
            Failed::Somewhere(e) => {
                self.any_interval().await?;
                if self.undone.borrow().contains(&number) { Err(e) } else { Err(over(interval.number)) }
            }
        }
    }

    /// Queues the transactions on the members, all of them before anything is waited for: so every member has them in the
    /// same order.
    async fn send(
        &self,
        transactions: Vec<Option<(MemberLink, Transaction)>>,
    ) -> Vec<(MemberLink, store::Result<()>)> {
        let queue = |(link, transaction): (MemberLink, Transaction)| {
            let queued = link.target.store().queue_transaction_in(link.incarnation, transaction);
            (link, queued)
        };
        let queued: Vec<_> = transactions.into_iter().flatten().map(queue).collect();
        let outcomes = queued.into_iter().map(|(link, queued)| async move {
            let outcome = self.answer(&link, queued).await;
            (link, outcome)
        });
        join_all(outcomes).await
    }

    /// What has come of a transaction.
    fn judge(
        &self,
        interval: &Interval,
        outcomes: Vec<(MemberLink, store::Result<()>)>,
    ) -> Result<(), Failed> {
        let mut refused = None;
        let mut gone = None;
        let mut done = false;
        for (link, outcome) in outcomes {
            match outcome {
                Ok(()) => done = true,
                Err(e) if is_refusal(&e) => refused = refused.or(Some(e)),
                Err(e @ StoreError::Disconnected(_)) => gone = Some(e),
                Err(e) => {
                    link.target.fail(&e);
                    gone = Some(StoreError::Disconnected(e.to_string()));
                }
            }
        }
        match (gone, refused) {
            (None, None) => Ok(()),
            (None, Some(e)) if !done => Err(Failed::Nowhere(e)),
            (gone, refused) => {
                self.end_interval(interval);
                let e = gone.or(refused).unwrap_or_else(|| over(interval.number));
                Err(Failed::Somewhere(e))
            }
        }
    }
}

/// Whether a member has refused something as such, rather than failed.
pub(super) fn is_refusal(e: &StoreError) -> bool {
    use StoreError as E;
    matches!(
        e,
        E::NoSuchObject(_)
            | E::NoSuchXattr(_)
            | E::NoSuchCollection(_)
            | E::Exists(_)
            | E::NotEmpty(_)
            | E::NoSpace { .. }
            | E::InvalidArgument(_)
            | E::TooLarge { .. }
            | E::BadPayload(_)
            | E::NoSuchStage(_)
    )
}

/// The object that an op is about.
fn object_of(op: &Op) -> Option<&ObjectId> {
    match op {
        Op::Touch { oid }
        | Op::CreateExclusive { oid }
        | Op::Write { oid, .. }
        | Op::Zero { oid, .. }
        | Op::Truncate { oid, .. }
        | Op::Remove { oid }
        | Op::SetXattrs { oid, .. }
        | Op::RemoveXattr { oid, .. }
        | Op::OmapSet { oid, .. }
        | Op::OmapRemove { oid, .. }
        | Op::OmapRemoveRange { oid, .. }
        | Op::OmapClear { oid } => Some(oid),
        _ => None,
    }
}

/// Whether an op is one that the objects which several transactions may change at a time are changed with.
fn is_omap_only(op: &Op) -> bool {
    matches!(op, Op::OmapSet { .. } | Op::OmapRemove { .. } | Op::OmapRemoveRange { .. })
}

impl Work {
    fn new(
        group: &Group,
        interval: &Interval,
        oid: &ObjectId,
        guard: Option<OwnedRwLockWriteGuard<Known>>,
        was: Option<u64>,
    ) -> Work {
        Work {
            oid: oid.clone(),
            exists: was.is_some() || guard.is_none(),
            guard,
            was,
            exclusive: false,
            moved: false,
            overlay: Overlay::new(was.unwrap_or(0)),
            meta: Vec::new(),
            xattrs: false,
            omap_keys: Vec::new(),
            omap_ranges: Vec::new(),
            split: Split::default(),
            live: group.live_links(interval, oid),
        }
    }

    /// Takes an op on it in.
    fn apply(&mut self, group: &Group, interval: &Interval, op: &Op) -> store::Result<()> {
        match op {
            Op::CreateExclusive { .. } if self.exists => {
                return Err(StoreError::Exists(self.oid.to_string()));
            }
            Op::CreateExclusive { .. } => self.exclusive = !self.moved,
            Op::Remove { .. } => return self.remove(),
            Op::Touch { .. } => {}
            Op::Write { offset, source: WriteSource::Inline(payload), .. } => {
                self.overlay.write(*offset, payload.clone())?;
            }
            Op::Write { offset, source: WriteSource::Staged { stage, offset: at, len }, .. } => {
                let what = (*stage, *at, *len);
                group.write_staged(interval, &self.live, &mut self.overlay, *offset, what)?;
            }
            Op::Zero { offset, len, .. } => self.overlay.zero(*offset, *len)?,
            Op::Truncate { size, .. } => self.overlay.truncate(*size)?,
            other => self.apply_to_metadata(other)?,
        }
        self.exists = true;
        Ok(())
    }

    fn apply_to_metadata(&mut self, op: &Op) -> store::Result<()> {
        match op {
            Op::SetXattrs { .. } | Op::RemoveXattr { .. } => self.xattrs = true,
            Op::OmapSet { entries, .. } => {
                self.omap_keys.extend(entries.iter().map(|(key, _)| key.clone()));
            }
            Op::OmapRemove { keys, .. } => self.omap_keys.extend(keys.iter().cloned()),
            Op::OmapRemoveRange { from, to, .. } => {
                self.omap_ranges.push((from.clone(), Some(to.clone())));
            }
            Op::OmapClear { .. } => self.omap_ranges.push((Bytes::new(), None)),
            other => return Err(impossible(other)),
        }
        self.meta.push(op.clone());
        Ok(())
    }

    fn remove(&mut self) -> store::Result<()> {
        if !self.exists {
            return Err(StoreError::NoSuchObject(self.oid.to_string()));
        }
        self.moved |= self.was.is_some();
        self.exists = false;
        self.exclusive = false;
        self.overlay = Overlay::new(0);
        self.meta.clear();
        Ok(())
    }

    /// How a member undoes it.
    fn undo(&self, group: &Group, position: usize) -> Undo {
        match self.was {
            _ if self.guard.is_none() => Undo::Unchanged,
            _ if self.moved => Undo::Return,
            None => Undo::Remove,
            Some(_) if self.overlay.is_unchanged() => Undo::Unchanged,
            Some(size) => Undo::Restore {
                size: group.layout.fragment_size(position, size),
                saved: self.split.overwritten[position].clone(),
            },
        }
    }

    /// The ops that give it its new content.
    fn content_ops(&self, position: usize, ops: &mut Vec<Op>) {
        let oid = &self.oid;
        let is_new = self.guard.is_some() && (self.was.is_none() || self.moved);
        if self.exclusive {
            ops.push(Op::CreateExclusive { oid: oid.clone() });
        } else if is_new {
            ops.push(Op::Touch { oid: oid.clone() });
        }
        ops.extend(self.split.ops[position].iter().cloned());
        if self.guard.is_some() && (is_new || self.overlay.size != self.overlay.before) {
            let size = Bytes::copy_from_slice(&self.overlay.size.to_be_bytes());
            ops.push(Op::SetXattrs { oid: oid.clone(), xattrs: vec![(SIZE_XATTR, size)] });
        }
        ops.extend(self.meta.iter().cloned());
    }
}

/// Takes the ops in, one after the other.
fn apply(
    group: &Group,
    transaction: &Transaction,
    interval: &Interval,
    work: &mut [Work],
) -> store::Result<()> {
    for op in &transaction.ops {
        let oid = object_of(op).ok_or_else(|| impossible(op))?;
        let one = work.iter_mut().find(|one| one.oid == *oid).ok_or_else(|| impossible(op))?;
        one.apply(group, interval, op)?;
    }
    Ok(())
}

fn impossible(op: &Op) -> StoreError {
    StoreError::InvalidArgument(format!("{op:?}: not possible on several targets"))
}

/// Copies ranges of an object to the same places of another one.
pub(super) fn copy_ranges(from: &ObjectId, to: &ObjectId, ranges: &[(u64, u64)]) -> impl Iterator<Item = Op> {
    ranges.iter().map(|&(at, len)| Op::CloneRange {
        src: from.clone(),
        dst: to.clone(),
        src_offset: at,
        len,
        dst_offset: at,
    })
}

/// The ops that take away what is no longer needed.
fn trim_ops(done: &BTreeMap<u64, Vec<Vec<usize>>>, position: usize, through: u64, ops: &mut Vec<Op>) {
    let oid = own_object();
    ops.push(Op::OmapRemoveRange { oid, from: key_intent(0), to: key_intent(through + 1) });
    for (number, kept) in done.range(..=through) {
        let kept = kept.get(position).into_iter().flatten();
        ops.extend(kept.map(|index| Op::Remove { oid: undo_object(*number, *index) }));
    }
}
