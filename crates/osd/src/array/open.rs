//! Opening a session: who has what, and what of it counts.
//!
//! The record that counts is that of the highest epoch: nothing can have been acknowledged without it. Its members
//! that are there and in sync go on; if some are missing, those that go on first note, durably, that the others are stale: as
//! a proposal, and when all have that, as the record. A
//! transaction that every member in sync has stays; one that only some have was never acknowledged, and is taken back there.
//! Which ones may be in question the intents say: no object is looked for.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bytes::Bytes;
use futures::future::{join_all, try_join_all};
use store::{ObjectId, Op, StoreError, Transaction};
use uuid::Uuid;

use super::group::{Group, Link, Log, Session, over};
use super::record::{
    Entry, GroupRecord, Intent, Member, Standing, Touched, Undo, forget_dirty, key_dirty, key_intent,
    key_proposal, key_record, own_object, undo_object,
};
use super::transact::{copy_ranges, is_refusal};
use crate::target::Target;

/// Entries read at a time.
const PAGE: usize = 1024;

/// What a target has of a group.
#[derive(Clone)]
struct View {
    link: Link,
    record: GroupRecord,
    /// Highest epoch ever heard of.
    heard: u64,
    trimmed: u64,
    intents: BTreeMap<u64, Intent>,
    dirty: BTreeSet<ObjectId>,
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
    pub(crate) async fn create(&self, ranked: &[usize]) -> store::Result<()> {
        let usable = ranked.iter().map(|&i| &self.targets[i]).filter(|t| t.is_usable());
        let needed = self.layout.shards();
        let chosen: Vec<&Rc<Target>> = usable.take(needed).collect();
        if chosen.len() < needed {
            let detail = format!("{} takes as many; the node has no more that can be used", self.redundancy);
            return Err(StoreError::TooFewTargets { there: chosen.len(), needed, detail });
        }
        let members = chosen.iter().map(|t| Member { target: t.uuid, standing: Standing::InSync }).collect();
        let record = GroupRecord { epoch: 1, members };
        let create = |target: &&Rc<Target>| {
            let (target, record) = (Rc::clone(target), &record);
            async move {
                // Of a pool that could not be made there may be something left.
                self.wipe(&target).await?;
                self.create_on(&target, record).await
            }
        };
        try_join_all(chosen.iter().map(create)).await.map(drop)
    }

    /// Makes the collection and the record on one target.
    pub(super) async fn create_on(&self, target: &Target, record: &GroupRecord) -> store::Result<()> {
        let create = Transaction::new(self.cid.clone()).with(Op::CreateCollection);
        match target.store.queue_transaction(create).await {
            Ok(()) | Err(StoreError::Exists(_)) => {}
            Err(e) => return Err(e),
        }
        let entries = vec![(key_record(), record.encode())];
        let write = Transaction::new(self.cid.clone()).with(Op::OmapSet { oid: own_object(), entries });
        target.store.queue_transaction(write).await
    }

    /// Opens a session with whoever is there.
    pub(super) async fn open(&self) -> store::Result<Session> {
        let number = self.shared.number();
        let usable = self.targets.iter().filter(|t| t.is_usable());
        let mut views: Vec<View> = Vec::new();
        for view in join_all(usable.map(|target| self.look(target))).await {
            views.extend(view?);
        }
        self.remove_diverged(&mut views).await?;
        let Some(record) = views.iter().map(|view| &view.record).max_by_key(|r| r.epoch).cloned() else {
            let detail = "no target that is there has a piece of it".into();
            return Err(StoreError::TooFewTargets { there: 0, needed: self.layout.k, detail });
        };
        let members = self.members(&record, &views)?;
        let undone = self.take_back(&members).await?;
        let (record, dirty) = self.agree(record, &views, &members).await?;
        if self.shared.number() != number {
            return Err(over(number));
        }
        *self.log.borrow_mut() = Log { session: number, ..log_of(&members, &undone, dirty) };
        *self.undone.borrow_mut() = undone;
        *self.rebuild.borrow_mut() = None;
        self.lineage.set(record.epoch);
        *self.last_members.borrow_mut() =
            members.iter().flatten().map(|view| view.link.target.uuid).collect();
        tracing::debug!(cid = %self.cid, number, epoch = record.epoch, "the group has a session");
        self.remove_leftovers(&record, &views, &members).await?;
        let links = members.into_iter().map(|view| view.map(|v| v.link)).collect();
        Ok(Session { number, links, record })
    }

    /// Removes what targets have that were members once, when nobody needs it any more: so it can never count again.
    async fn remove_leftovers(
        &self,
        record: &GroupRecord,
        views: &[View],
        members: &[Option<View>],
    ) -> store::Result<()> {
        if members.iter().any(Option::is_none) {
            return Ok(());
        }
        let target = |view: &View| Rc::clone(&view.link.target);
        let is_member = |t: &Rc<Target>| record.members.iter().any(|m| m.target == t.uuid);
        for target in views.iter().map(target).filter(|t| !is_member(t)) {
            tracing::info!(cid = %self.cid, target_uuid = %target.uuid, "what a former member has is removed");
            self.wipe(&target).await?;
        }
        Ok(())
    }

    /// Leaves out, and removes, what a target has that went on by itself while the session before this one went on without it:
    /// an operator had said that it was lost, and it has come back all the same.
    async fn remove_diverged(&self, views: &mut Vec<View>) -> store::Result<()> {
        let known = self.lineage.get();
        let diverged = |view: &View| {
            known > 0
                && view.record.epoch > known
                && !self.last_members.borrow().contains(&view.link.target.uuid)
        };
        for view in views.extract_if(.., |view| diverged(view)) {
            let (target, epoch) = (&view.link.target, view.record.epoch);
            tracing::warn!(cid = %self.cid, target_uuid = %target.uuid, epoch, "the target went on by itself; what it has is removed");
            self.wipe(target).await?;
        }
        Ok(())
    }

    /// What a target has of the group; nothing if it was never a member.
    async fn look(&self, target: &Rc<Target>) -> store::Result<Option<View>> {
        let link = Link { target: Rc::clone(target), session: target.store.session() };
        match self.view(&link).await {
            Ok(view) => Ok(Some(view)),
            Err(StoreError::NoSuchCollection(_) | StoreError::NoSuchObject(_)) => Ok(None),
            Err(e @ StoreError::Disconnected(_)) => Err(e),
            Err(e) => {
                target.fail(&e.to_string());
                Err(StoreError::Disconnected(e.to_string()))
            }
        }
    }

    async fn view(&self, link: &Link) -> store::Result<View> {
        let store = &link.target.store;
        // Whatever earlier sessions have left queued has an outcome after this.
        let settle = store.queue_transaction_in(link.session, Transaction::new(self.cid.clone()));
        self.in_time(settle).await?;
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
            let (page, more) = link.target.store.omap_iterate(&self.cid, oid, from.clone(), PAGE).await?;
            let next = page.last().map(|(last, _)| Bytes::from([last, &b"\0"[..]].concat()));
            let (before, count) = (all.len(), page.len());
            all.extend(page.into_iter().take_while(|(key, _)| to.is_none_or(|to| key < to)));
            match next {
                Some(next) if more && all.len() - before == count => from = next,
                _ => return Ok(all),
            }
        }
    }

    /// The members in sync that are there, by position.
    fn members(&self, record: &GroupRecord, views: &[View]) -> store::Result<Vec<Option<View>>> {
        if record.members.len() != self.layout.shards() {
            let detail = format!("it has {} members, not {}", record.members.len(), self.layout.shards());
            return Err(StoreError::Corrupt { what: format!("group {}", self.cid), detail });
        }
        let mut members = vec![None; record.members.len()];
        let mut missing = Vec::new();
        for position in record.in_sync() {
            let uuid = record.members[position].target;
            members[position] = views.iter().find(|view| view.link.target.uuid == uuid).cloned();
            if members[position].is_none() {
                missing.push(uuid);
            }
        }
        let (there, needed) = (members.iter().flatten().count(), self.layout.k);
        let list = || missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        if there < needed {
            let detail = format!("bring back one of {}", list());
            return Err(StoreError::TooFewTargets { there, needed, detail });
        }
        // As many as could have gone on without those that are here must not be merely away.
        let away = missing.iter().filter(|uuid| !self.is_written_off(uuid)).count();
        if away >= needed && self.lineage.get() < record.epoch {
            let detail = format!(
                "whether these have gone on alone cannot be told: {}; bring them back, or take them out if they are lost",
                list()
            );
            return Err(StoreError::TooFewTargets { there, needed: there + 1, detail });
        }
        Ok(members)
    }

    /// Whether an operator has said that a target is lost.
    fn is_written_off(&self, uuid: &Uuid) -> bool {
        self.targets.iter().find(|t| t.uuid == *uuid).is_none_or(|t| t.is_out())
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
                let target = view.link.target.uuid;
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
        let queued = link.target.store.queue_transaction_in(link.session, transaction);
        match self.in_time(queued).await {
            Ok(()) => Ok(()),
            Err(e) if is_refusal(&e) || matches!(e, StoreError::Disconnected(_)) => Err(e),
            Err(e) => {
                link.target.fail(&e.to_string());
                Err(StoreError::Disconnected(e.to_string()))
            }
        }
    }

    /// What a member answers, if it does in time.
    pub(super) async fn in_time<T>(
        &self,
        answer: impl Future<Output = store::Result<T>>,
    ) -> store::Result<T> {
        match tokio::time::timeout(self.member_timeout, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(StoreError::Io(format!("no answer in {:?}", self.member_timeout))),
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
        Ok(Transaction { collection: self.cid.clone(), ops })
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
                match view.link.target.store.stat(&self.cid, oid).await {
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
        let (oid, store) = (&touched.oid, &peer.target.store);
        let none_if_gone = |e| match e {
            StoreError::NoSuchObject(_) => Ok(Vec::new()),
            e => Err(e),
        };
        if touched.xattrs || matches!(touched.undo, Undo::Restore { .. }) {
            let xattrs = store.get_xattrs(&self.cid, oid).await?;
            ops.push(Op::RemoveXattrs { oid: oid.clone() });
            ops.push(Op::SetXattrs { oid: oid.clone(), xattrs });
        }
        let mut entries = Vec::new();
        if !touched.omap_keys.is_empty() {
            let keys = touched.omap_keys.clone();
            let found = store.omap_get(&self.cid, oid, keys.clone()).await.or_else(none_if_gone)?;
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

    /// Makes the members agree on a record that says who is in sync; returns it and the objects that are dirty.
    async fn agree(
        &self,
        old: GroupRecord,
        views: &[View],
        members: &[Option<View>],
    ) -> store::Result<(GroupRecord, BTreeSet<ObjectId>)> {
        let mut dirty: BTreeSet<ObjectId> =
            members.iter().flatten().flat_map(|view| view.dirty.iter().cloned()).collect();
        let mut record = old;
        for (position, member) in record.members.iter_mut().enumerate() {
            if members[position].is_none() && member.standing == Standing::InSync {
                member.standing = Standing::Stale;
                // Whatever may not have reached it is among the intents.
                let intents = members.iter().flatten().flat_map(|view| view.intents.values());
                dirty.extend(intents.flat_map(|intent| &intent.objects).map(|t| t.oid.clone()));
            }
        }
        self.find_replacements(&mut record);
        let mut ops = Vec::new();
        if dirty.len() > self.dirty_max {
            let stale = record.members.iter_mut().filter(|m| m.standing == Standing::Stale);
            stale.for_each(|m| m.standing = Standing::Blank);
        }
        if !record.needs_notes() {
            dirty.clear();
            ops.push(forget_dirty());
        }
        if members.iter().flatten().all(|view| view.record == record && view.dirty == dirty) {
            return Ok((record, dirty));
        }
        record.epoch = views.iter().map(|view| view.heard).max().unwrap_or(0) + 1;
        let links: Vec<&Link> = members.iter().flatten().map(|view| &view.link).collect();
        // Before the record: one note too many does no harm.
        let lacking = members.iter().flatten().map(|view| (&view.link, dirty.difference(&view.dirty)));
        try_join_all(lacking.map(|(link, lacking)| self.note_dirty(link, lacking))).await?;
        self.put_in_force(&record, &links, ops).await?;
        let (in_sync, of) = (record.in_sync().count(), record.members.len());
        tracing::info!(cid = %self.cid, epoch = record.epoch, in_sync, of, "the group's members have changed");
        Ok((record, dirty))
    }

    /// Puts a record in force: as a proposal first. Only once all have that may one of them take it for what counts, and nobody
    /// is told anything before. `ops` go with it.
    pub(super) async fn put_in_force(
        &self,
        record: &GroupRecord,
        links: &[&Link],
        ops: Vec<Op>,
    ) -> store::Result<()> {
        let oid = own_object();
        let proposal = vec![(key_proposal(), record.encode())];
        let propose =
            Transaction::new(self.cid.clone()).with(Op::OmapSet { oid: oid.clone(), entries: proposal });
        try_join_all(links.iter().map(|link| self.apply_to(link, propose.clone()))).await?;
        let mut note = Transaction { collection: self.cid.clone(), ops };
        let entries = vec![(key_record(), record.encode())];
        note.ops.push(Op::OmapSet { oid: oid.clone(), entries });
        note.ops.push(Op::OmapRemove { oid, keys: vec![key_proposal()] });
        try_join_all(links.iter().map(|link| self.apply_to(link, note.clone()))).await.map(drop)
    }

    /// Notes objects as dirty on a member, however many those are.
    pub(super) async fn note_dirty(
        &self,
        link: &Link,
        oids: impl Iterator<Item = &ObjectId>,
    ) -> store::Result<()> {
        let mut entries = oids.map(|oid| (key_dirty(oid), Bytes::new())).peekable();
        while entries.peek().is_some() {
            let page = entries.by_ref().take(PAGE).collect();
            let note = Op::OmapSet { oid: own_object(), entries: page };
            self.apply_to(link, Transaction::new(self.cid.clone()).with(note)).await?;
        }
        Ok(())
    }

    /// Gives the places of members that are out, or no longer the node's, to targets that are not members yet.
    fn find_replacements(&self, record: &mut GroupRecord) {
        for position in 0..record.members.len() {
            let member = record.members[position];
            let known = self.targets.iter().find(|t| t.uuid == member.target);
            if member.standing == Standing::InSync || known.is_some_and(|t| !t.is_out()) {
                continue;
            }
            let taken = |t: &Target| record.members.iter().any(|m| m.target == t.uuid);
            let free = self.targets.iter().filter(|t| t.is_usable() && !taken(t));
            let free: Vec<Uuid> = free.map(|t| t.uuid).collect();
            if let Some(&best) = proto::placement::ranked(self.place.0, self.place.1, &free).first() {
                record.members[position] = Member { target: free[best], standing: Standing::Blank };
            }
        }
    }

    /// Removes all that the targets which are there have of the group, objects included. Whatever is under way ends before.
    ///
    /// # Errors
    /// If a target does not do it; one that fails is left out from then on.
    pub(crate) async fn remove(&self) -> store::Result<()> {
        let _closed = self.gate.write().await;
        let _alone = self.opening.lock().await;
        *self.log.borrow_mut() = Log::default();
        *self.rebuild.borrow_mut() = None;
        if let Some(session) = self.current() {
            self.end_session(&session);
        }
        for target in self.targets.iter().filter(|t| t.is_usable()) {
            match self.wipe(target).await {
                Err(e @ (StoreError::Io(_) | StoreError::Poisoned(_))) => target.fail(&e.to_string()),
                wiped => wiped?,
            }
        }
        Ok(())
    }

    /// Removes everything that a target has of the group.
    pub(super) async fn wipe(&self, target: &Target) -> store::Result<()> {
        while self.wipe_some(target).await? {}
        Ok(())
    }

    /// Removes a few of the objects that a target has of the group, at last their collection; returns whether there may be more.
    pub(super) async fn wipe_some(&self, target: &Target) -> store::Result<bool> {
        let ids = match target.store.list(&self.cid, None, 64).await {
            Ok((ids, _)) => ids,
            Err(StoreError::NoSuchCollection(_)) => return Ok(false),
            Err(e) => return Err(e),
        };
        let mut transaction = Transaction::new(self.cid.clone());
        if ids.is_empty() {
            transaction.ops.push(Op::RemoveCollection);
        }
        transaction.ops.extend(ids.into_iter().map(|oid| Op::Remove { oid }));
        match target.store.queue_transaction(transaction).await {
            Ok(()) | Err(StoreError::NotEmpty(_) | StoreError::NoSuchObject(_)) => Ok(true),
            Err(StoreError::NoSuchCollection(_)) => Ok(false),
            Err(e) => Err(e),
        }
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
