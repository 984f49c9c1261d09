//! Opening a session: who has what, and what of it counts.
//!
//! The record that counts is that of the highest epoch: nothing can have been acknowledged without it. Its members
//! that are there and in sync go on; if some are missing, those that go on first note, durably, that the others are stale: as
//! a proposal, and when all have that, as the record. A
//! transaction that every member in sync has stays; one that only some have was never acknowledged, and is taken back there.
//! Which ones may be in question the intents say: no object is looked for.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bytes::Bytes;
use futures::future::try_join_all;
use futures::stream::{FuturesUnordered, StreamExt};
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction};
use tokio::time::Instant;

use crate::group::{Group, Link, Log, Session, over};
use crate::member::Member;
use crate::record::{
    Entry, GroupRecord, Intent, MemberRecord, Standing, Touched, Undo, key_intent, key_record, own_object,
    undo_object,
};
use crate::removal::leftovers;
use crate::transact::{copy_ranges, is_refusal};

/// Entries read at a time.
const PAGE: usize = 1024;

/// What a target has of a group.
#[derive(Clone)]
pub(super) struct View {
    pub(super) link: Link,
    pub(super) record: GroupRecord,
    /// Highest epoch ever heard of.
    pub(super) heard: u64,
    trimmed: u64,
    pub(super) intents: BTreeMap<u64, Intent>,
    pub(super) dirty: BTreeSet<ObjectId>,
}

/// What a target has of a group.
enum Found {
    Nothing,
    /// Objects without a group record: an interrupted removal.
    Remains,
    View(View),
}

/// What the targets have of a group.
#[derive(Default)]
struct Views {
    views: Vec<View>,
    /// Targets with objects but without a group record.
    remains: Vec<Rc<dyn Member>>,
}

impl Views {
    fn add(&mut self, target: Rc<dyn Member>, found: Found) {
        match found {
            Found::Nothing => {}
            Found::Remains => self.remains.push(target),
            Found::View(view) => self.views.push(view),
        }
    }
}

impl View {
    /// Whether a transaction is there, or was and is settled.
    fn has(&self, number: u64) -> bool {
        number <= self.trimmed || self.intents.contains_key(&number)
    }
}

impl Group {
    /// Makes the group on the node's targets: its first members are those that come first of `ranked`.
    ///
    /// # Errors
    /// [`StoreError::TooFewTargets`] if there are not enough.
    pub async fn create(&self, ranked: &[usize]) -> store::Result<()> {
        let usable = ranked.iter().map(|&i| &self.targets[i]).filter(|t| t.is_usable());
        let needed = self.layout.fragments();
        let chosen: Vec<&Rc<dyn Member>> = usable.take(needed).collect();
        if chosen.len() < needed {
            let detail = format!("{} takes as many; the node has no more that can be used", self.redundancy);
            let e = StoreError::TooFewTargets { there: chosen.len(), needed, detail };
            return Err(self.unless_hopeful(e));
        }
        let members =
            chosen.iter().map(|t| MemberRecord { target: t.uuid(), standing: Standing::InSync }).collect();
        let record = GroupRecord { epoch: 1, members };
        *self.in_sync.borrow_mut() = chosen.iter().map(|target| Rc::clone(target)).collect();
        let create = |target: &&Rc<dyn Member>| {
            let (target, record) = (Rc::clone(target), &record);
            async move {
                // Of a pool that could not be made there may be something left.
                self.wipe(&target).await?;
                self.create_on(&target, record).await
            }
        };
        try_join_all(chosen.iter().map(create)).await?;
        // No member can have gone on without the others before the first session.
        *self.lineage.borrow_mut() = Some(record);
        Ok(())
    }

    /// Makes the collection and the record on one target.
    pub(super) async fn create_on(&self, target: &Rc<dyn Member>, record: &GroupRecord) -> store::Result<()> {
        let link = Link { target: Rc::clone(target), session: target.store().incarnation() };
        let create = Transaction::new(self.cid.clone()).with(Op::CreateCollection);
        match self.answer(&link, target.store().queue_transaction(create)).await {
            Ok(()) | Err(StoreError::Exists(_)) => {}
            Err(e) => return Err(e),
        }
        let entries = vec![(key_record(), record.encode())];
        let write = Transaction::new(self.cid.clone()).with(Op::OmapSet { oid: own_object(), entries });
        self.answer(&link, target.store().queue_transaction(write.from_reserve())).await
    }

    /// Opens a session with the targets that are there.
    pub(super) async fn open(&self) -> store::Result<Session> {
        let number = self.number();
        let Views { views, remains } = self.views().await?;
        if self.number() != number {
            return Err(over(number));
        }
        let (record, members, on_word) = self.judge_views(&views).map_err(|e| self.unless_hopeful(e))?;
        let in_sync = members.iter().flatten().map(|view| Rc::clone(&view.link.target));
        *self.in_sync.borrow_mut() = in_sync.collect();
        let undone = self.take_back(&members).await?;
        let (record, dirty) = self.agree(record, &views, &members, on_word).await?;
        if self.number() != number {
            return Err(over(number));
        }
        *self.log.borrow_mut() = Log { session: number, ..log_of(&members, &undone, dirty) };
        *self.undone.borrow_mut() = undone;
        *self.rebuild.borrow_mut() = None;
        *self.lineage.borrow_mut() = Some(record.clone());
        tracing::debug!(cid = %self.cid, number, epoch = record.epoch, "the group has a session");
        let leftovers = RefCell::new(leftovers(&record, &views, &members, &remains));
        let links = members.into_iter().map(|view| view.map(|v| v.link)).collect();
        Ok(Session { number, links, record, leftovers })
    }

    /// What the targets have of the group. Slow targets are asked only if the others do not suffice.
    async fn views(&self) -> store::Result<Views> {
        let began = Instant::now();
        let there = self.targets.iter().filter(|t| t.is_usable());
        let mut waiting: Vec<Rc<dyn Member>> = there.cloned().collect();
        let mut slow: Vec<Rc<dyn Member>> = self.targets.iter().filter(|t| t.is_slow()).cloned().collect();
        let mut looks: FuturesUnordered<_> =
            waiting.iter().map(|target| self.look(Rc::clone(target))).collect();
        let mut found = Views::default();
        let mut wait_until = began + self.member_timeout;
        while !(waiting.is_empty() && slow.is_empty()) {
            let now = Instant::now();
            if waiting.is_empty() || now >= wait_until {
                if self.judge_views(&found.views).is_ok() {
                    // The others go on; those that were slow before are known to be.
                    waiting.iter().for_each(|target| target.overdue(&self.cid, now - began));
                    break;
                }
                if slow.is_empty() && now >= began + self.patience {
                    let silent = waiting.iter().map(|t| t.uuid().to_string()).collect::<Vec<_>>().join(", ");
                    let why = format!("too few targets answer in {:?}; not these: {silent}", self.patience);
                    return Err(StoreError::Disconnected(why));
                }
                looks.extend(slow.iter().map(|target| self.look(Rc::clone(target))));
                waiting.append(&mut slow);
                // Targets that stood still together come back together.
                wait_until = now + self.member_timeout / 10;
            }
            tokio::select! {
                Some((target, looked)) = looks.next() => {
                    waiting.retain(|t| t.uuid() != target.uuid());
                    found.add(target, looked?);
                }
                () = tokio::time::sleep_until(wait_until) => {}
            }
        }
        Ok(found)
    }

    /// Which record counts, and the members in sync that are there.
    fn judge_views(&self, views: &[View]) -> store::Result<(GroupRecord, Vec<Option<View>>, bool)> {
        let Some(record) = views.iter().map(|view| &view.record).max_by_key(|r| r.epoch).cloned() else {
            let detail = "no target that is there has a piece of it".into();
            return Err(StoreError::TooFewTargets { there: 0, needed: self.layout.k, detail });
        };
        let (members, on_word) = self.members(&record, views)?;
        Ok((record, members, on_word))
    }

    /// What a target has of the group.
    async fn look(&self, target: Rc<dyn Member>) -> (Rc<dyn Member>, store::Result<Found>) {
        let link = Link { target: Rc::clone(&target), session: target.store().incarnation() };
        let found = match self.view(&link).await {
            Ok(view) => Ok(Found::View(view)),
            Err(StoreError::NoSuchCollection(_)) => Ok(Found::Nothing),
            Err(StoreError::NoSuchObject(_)) => Ok(Found::Remains),
            Err(e) if is_refusal(&e) || matches!(e, StoreError::Disconnected(_)) => Err(e),
            Err(e) => {
                target.fail(&e);
                Err(StoreError::Disconnected(e.to_string()))
            }
        };
        (target, found)
    }

    async fn view(&self, link: &Link) -> store::Result<View> {
        let store = &link.target.store();
        // Whatever earlier sessions have left queued has an outcome after this.
        let settle = store.queue_transaction_in(link.session, Transaction::new(self.cid.clone()));
        self.answer(link, settle).await?;
        let (mut record, mut trimmed, mut heard) = (None, 0, 0);
        let (mut intents, mut dirty) = (BTreeMap::new(), BTreeSet::new());
        for (key, value) in self.all_entries(link, &own_object(), &Bytes::new(), None).await? {
            match Entry::decode(&key, &value)? {
                Entry::Record(found) => {
                    heard = heard.max(found.epoch);
                    record = Some(found);
                }
                Entry::Proposal(found) => heard = heard.max(found.epoch),
                Entry::Trimmed(through) => trimmed = through,
                Entry::Intent(number, intent) => drop(intents.insert(number, intent)),
                Entry::Dirty(oid) => {
                    dirty.insert(oid);
                }
            }
        }
        let record = record.ok_or_else(|| StoreError::NoSuchObject(own_object().to_string()))?;
        Ok(View { link: link.clone(), record, heard, trimmed, intents, dirty })
    }

    /// All entries of an omap in a range.
    pub(super) async fn all_entries(
        &self,
        link: &Link,
        oid: &ObjectId,
        from: &Bytes,
        to: Option<&Bytes>,
    ) -> store::Result<Vec<(Bytes, Bytes)>> {
        let mut all = Vec::new();
        let mut from = from.clone();
        loop {
            let page = link.target.store().omap_iterate(&self.cid, oid, from.clone(), PAGE);
            let (page, more) = self.answer(link, page).await?;
            let next = page.last().map(|(last, _)| Bytes::from([last, &b"\0"[..]].concat()));
            let (before, count) = (all.len(), page.len());
            all.extend(page.into_iter().take_while(|(key, _)| to.is_none_or(|to| key < to)));
            match next {
                Some(next) if more && all.len() - before == count => from = next,
                _ => return Ok(all),
            }
        }
    }

    /// Takes back what only some members have; returns which transactions.
    async fn take_back(&self, members: &[Option<View>]) -> store::Result<BTreeSet<u64>> {
        let trimmed = members.iter().flatten().map(|v| v.trimmed).max().unwrap_or(0);
        let intents = members.iter().flatten().flat_map(|v| v.intents.keys().copied());
        let partial =
            |number: &u64| *number > trimmed && !members.iter().flatten().all(|view| view.has(*number));
        let undone: BTreeSet<u64> = intents.filter(partial).collect();
        // One after the other: each learns from a member that has got rid of it, or never had it.
        for &number in undone.iter().rev() {
            let Some(peer) = members.iter().flatten().find(|view| !view.has(number)) else { continue };
            for view in members.iter().flatten() {
                let Some(intent) = view.intents.get(&number) else { continue };
                let target = view.link.target.uuid();
                tracing::info!(cid = %self.cid, number, target_uuid = %target, "a transaction is taken back");
                let undo = self.undo(view, number, intent, &peer.link).await?;
                self.apply_to(&view.link, undo).await?;
            }
            metrics::counter!("outboard_osd_group_undone_total").increment(1);
        }
        Ok(undone)
    }

    /// Carries out a transaction on one member; should that fail, so has the member.
    pub(super) async fn apply_to(&self, link: &Link, transaction: Transaction) -> store::Result<()> {
        let queued = link.target.store().queue_transaction_in(link.session, transaction);
        match self.answer(link, queued).await {
            Ok(()) => Ok(()),
            Err(e) if is_refusal(&e) || matches!(e, StoreError::Disconnected(_)) => Err(e),
            Err(e) => {
                link.target.fail(&e);
                Err(StoreError::Disconnected(e.to_string()))
            }
        }
    }

    /// What takes a transaction back on one member. `peer` is one that does not have it.
    async fn undo(
        &self,
        view: &View,
        number: u64,
        intent: &Intent,
        peer: &Link,
    ) -> store::Result<Transaction> {
        let mut ops = Vec::new();
        for (index, touched) in intent.objects.iter().enumerate() {
            self.undo_object(view, undo_object(number, index), touched, peer, &mut ops).await?;
        }
        ops.push(Op::OmapRemove { oid: own_object(), keys: vec![key_intent(number)] });
        Ok(Transaction { collection: self.cid.clone(), ops, uses_reserve: true })
    }

    async fn undo_object(
        &self,
        view: &View,
        keep: ObjectId,
        touched: &Touched,
        peer: &Link,
        ops: &mut Vec<Op>,
    ) -> store::Result<()> {
        let oid = &touched.oid;
        match &touched.undo {
            Undo::Remove => {
                ops.push(Op::Remove { oid: oid.clone() });
                return Ok(());
            }
            Undo::Return => {
                match self.answer(&view.link, view.link.target.store().stat(&self.cid, oid)).await {
                    Ok(_) => ops.push(Op::Remove { oid: oid.clone() }),
                    Err(StoreError::NoSuchObject(_)) => {}
                    Err(e) => return Err(e),
                }
                let (src, dst_collection) = (keep, self.cid.clone());
                ops.push(Op::MoveRename { src, dst_collection, dst: oid.clone() });
                return Ok(());
            }
            Undo::Restore { size, saved } => {
                // Whole blocks were kept, also of the last one.
                ops.extend(copy_ranges(&keep, oid, saved));
                ops.push(Op::Truncate { oid: oid.clone(), size: *size });
                if touched.undo.keeps_object() {
                    ops.push(Op::Remove { oid: keep });
                }
            }
            Undo::Unchanged => {}
        }
        self.undo_metadata(touched, peer, ops).await
    }

    /// Metadata is the same on all members, so that of another one is what it was.
    async fn undo_metadata(&self, touched: &Touched, peer: &Link, ops: &mut Vec<Op>) -> store::Result<()> {
        let (oid, store) = (&touched.oid, &peer.target.store());
        let none_if_gone = |e| match e {
            StoreError::NoSuchObject(_) => Ok(Vec::new()),
            e => Err(e),
        };
        if touched.xattrs || matches!(touched.undo, Undo::Restore { .. }) {
            let xattrs = self.answer(peer, store.get_xattrs(&self.cid, oid)).await?;
            ops.push(Op::RemoveXattrs { oid: oid.clone() });
            ops.push(Op::SetXattrs { oid: oid.clone(), xattrs });
        }
        let mut entries = Vec::new();
        if !touched.omap_keys.is_empty() {
            let keys = touched.omap_keys.clone();
            let found = self.answer(peer, store.omap_get(&self.cid, oid, keys.clone())).await;
            let found = found.or_else(none_if_gone)?;
            ops.push(Op::OmapRemove { oid: oid.clone(), keys });
            entries.extend(found);
        }
        for (from, to) in &touched.omap_ranges {
            let found = self.all_entries(peer, oid, from, to.as_ref()).await.or_else(none_if_gone)?;
            ops.push(match to {
                Some(to) => Op::OmapRemoveRange { oid: oid.clone(), from: from.clone(), to: to.clone() },
                None => Op::OmapClear { oid: oid.clone() },
            });
            entries.extend(found);
        }
        if !entries.is_empty() {
            ops.push(Op::OmapSet { oid: oid.clone(), entries });
        }
        Ok(())
    }
}

/// The intents that stay, as the log of a new session.
fn log_of(members: &[Option<View>], undone: &BTreeSet<u64>, dirty: BTreeSet<ObjectId>) -> Log {
    let mut log = Log { dirty, ..Log::default() };
    for (position, view) in members.iter().enumerate() {
        let Some(view) = view else { continue };
        log.next = log.next.max(view.trimmed + 1);
        for (&number, intent) in &view.intents {
            log.next = log.next.max(number + 1);
            if undone.contains(&number) {
                continue;
            }
            let kept = log.done.entry(number).or_insert_with(|| vec![Vec::new(); members.len()]);
            let objects = intent.objects.iter().enumerate();
            kept[position] = objects.filter(|(_, t)| t.undo.keeps_object()).map(|(i, _)| i).collect();
        }
    }
    log
}
