//! Bringing a member back: one that was away gets what has changed meanwhile, an empty one everything.
//!
//! While that goes on the member takes part in transactions, for the objects that it has already. It counts as in sync once
//! it has all, and a record that says so is on every member.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use base::block::{BLOCK_SIZE, Payload, crc32c};
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction, WriteSource};
use tokio::time::Instant;

use crate::group::{Group, Link, Session};
use crate::member::Member;
use crate::members::page_by;
use crate::pace::Pace;
use crate::read::{FragmentRead, Whole};
use crate::record::{
    Entry, GroupRecord, MemberRecord, Standing, forget_all_but_dirty, is_own, key_record, key_trimmed,
    own_object,
};

/// How long a group that could not be rebuilt is left alone.
pub const RETRY: Duration = Duration::from_secs(1);
/// Bytes of a fragment that are made and moved at a time.
const SEGMENT: u64 = 1 << 20;
/// Segments of one fragment under way at a time.
const SEGMENTS: usize = 3;
/// Objects worked on at a time.
const OBJECTS: usize = 4;
/// Ids listed at a time.
const PAGE: usize = 256;

/// A member on its way back.
pub(crate) struct Rebuild {
    pub(crate) position: usize,
    /// Number of the session.
    pub(crate) session: u64,
    pub(crate) link: Link,
    missing: Missing,
}

/// What a member does not have yet.
enum Missing {
    /// Those.
    Only(BTreeSet<ObjectId>),
    /// All after the first, but for the second ones. The third ones have changed without the member, and may not be known to
    /// whoever lists what is to be copied.
    After(Option<ObjectId>, BTreeSet<ObjectId>, BTreeSet<ObjectId>),
}

impl Rebuild {
    /// Whether the member does not have the object yet.
    pub(crate) fn lacks(&self, oid: &ObjectId) -> bool {
        match &self.missing {
            Missing::Only(some) => some.contains(oid),
            Missing::After(last, ahead, _) => {
                last.as_ref().is_none_or(|last| oid > last) && !ahead.contains(oid)
            }
        }
    }

    fn has_now(&mut self, oid: &ObjectId) {
        match &mut self.missing {
            Missing::Only(some) => drop(some.remove(oid)),
            Missing::After(_, ahead, changed) => {
                changed.remove(oid);
                ahead.insert(oid.clone());
            }
        }
    }

    /// Says that an object changes, without the member if that lacks it.
    pub(super) fn changes(&mut self, oid: &ObjectId) {
        let lacks = self.lacks(oid);
        if let (Missing::After(_, _, changed), true) = (&mut self.missing, lacks) {
            changed.insert(oid.clone());
        }
    }

    /// All objects up to that one, as far as they were listed, are there: so they all are, unless this returns some that
    /// were made since. Those are to be copied, and this asked again.
    fn passed(&mut self, oid: &ObjectId) -> Vec<ObjectId> {
        let Missing::After(last, ahead, changed) = &mut self.missing else { return Vec::new() };
        let made: Vec<ObjectId> = changed.range(..=oid).cloned().collect();
        if made.is_empty() {
            *ahead = ahead.split_off(oid);
            ahead.remove(oid);
            *last = Some(oid.clone());
        }
        made
    }
}

/// What was rebuilt so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rebuilt {
    /// Objects rebuilt.
    pub objects: u64,
    /// Bytes written.
    pub bytes: u64,
}

/// A rebuild at work.
struct Job<'a> {
    group: &'a Group,
    session: Rc<Session>,
    position: usize,
    link: Link,
    pace: &'a Pace,
    progress: &'a RefCell<Rebuilt>,
}

impl Group {
    /// A position whose member is not in sync and can be rebuilt, as far as a session knows.
    pub fn to_rebuild(&self, session: &Session) -> Option<usize> {
        let members = &session.record.members;
        let usable = |uuid| self.targets.iter().any(|t| t.uuid() == uuid && t.is_usable());
        let can_be = |m: &MemberRecord| m.standing != Standing::InSync && usable(m.target);
        // One that cannot be rebuilt now is not to keep another one waiting.
        let next = self.rebuild_next.get();
        (next..next + members.len()).map(|i| i % members.len()).find(|&i| can_be(&members[i]))
    }

    /// Has the placement group opened anew if more objects are noted as dirty than may be, or any while notes fill an index
    /// (`index_is_full`): then they are forgotten, and members that are away get everything when they come back.
    pub async fn bound_notes(&self, index_is_full: bool) {
        let most = if index_is_full { 0 } else { self.dirty_max };
        // A rebuild that is under way is the sooner done.
        let is_due = || self.log.borrow().dirty.len() > most && self.rebuild.borrow().is_none();
        if !is_due() {
            return;
        }
        let _closed = self.gate.write().await;
        if !is_due() {
            return;
        }
        if let Some(session) = self.current() {
            tracing::warn!(cid = %self.cid, limit = most, "too much has changed without a target; it will get everything anew");
            self.drops_notes.set(true);
            self.end_session(&session);
        }
    }

    /// Rebuilds the member at a position. `progress` counts on.
    ///
    /// # Errors
    /// If the session ends meanwhile, the member fails, or it has no room: to be tried again later.
    pub async fn rebuild(
        &self,
        position: usize,
        pace: &Pace,
        progress: &RefCell<Rebuilt>,
    ) -> store::Result<()> {
        let session = self.any_session().await?;
        let outcome = async {
            if session.record.members[position].standing == Standing::Blank {
                // What it has from before may be much: clients are not to wait for that.
                let target = self.member(&session, position)?;
                self.wipe_in(&session, &target).await?;
            }
            let link = self.admit(&session, position).await?;
            self.no_room.borrow_mut().remove(&link.target.uuid());
            let job = Job { group: self, session: Rc::clone(&session), position, link, pace, progress };
            job.run().await
        };
        let outcome = outcome.await;
        if outcome.is_err() {
            self.rebuild_next.set(position + 1);
        }
        let member = session.record.members[position];
        let is_full =
            matches!(outcome, Err(StoreError::NoSpace { .. })) && member.standing == Standing::Blank;
        if is_full {
            self.no_room.borrow_mut().insert(member.target);
        }
        let moves = is_full && self.spare(&session.record).is_some();
        if outcome.is_err() && (moves || self.rebuild.borrow().is_some()) {
            // What is under way on the member has to end before it is taken for absent.
            self.end_session(&session);
        }
        outcome
    }

    /// Lets a member take part from now on.
    async fn admit(&self, session: &Rc<Session>, position: usize) -> store::Result<Link> {
        let _closed = self.gate.write().await;
        self.still(session)?;
        let record = session.record.clone();
        let target = self.member(session, position)?;
        let link = Link { target: Rc::clone(&target), session: target.store().incarnation() };
        let own = match record.members[position].standing {
            Standing::Stale => self.own_entries(&link).await?,
            _ => None,
        };
        let missing = match own {
            Some(own) => Missing::Only(self.clean(&link, own).await?),
            None => {
                self.wipe(&target).await?;
                self.create_on(&target, &record).await?;
                Missing::After(None, BTreeSet::new(), BTreeSet::new())
            }
        };
        let settled = self.log.borrow().settled();
        let entries = vec![
            (key_record(), record.encode()),
            (key_trimmed(), Bytes::copy_from_slice(&settled.to_be_bytes())),
        ];
        let note = Transaction::new(self.cid.clone()).with(Op::OmapSet { oid: own_object(), entries });
        self.apply_to(&link, note.from_reserve()).await?;
        // What transactions change without a lock is copied while there are none.
        self.copy_object(session, &link, position, &self.meta.clone(), false).await?;
        self.still(session)?;
        let number = session.number;
        let rebuild = Rebuild { position, session: number, link: link.clone(), missing };
        *self.rebuild.borrow_mut() = Some(rebuild);
        tracing::info!(cid = %self.cid, position, target_uuid = %link.target.uuid(), "a member is on its way back");
        Ok(link)
    }

    /// The target that is the member at a position.
    fn member(&self, session: &Session, position: usize) -> store::Result<Rc<dyn Member>> {
        let uuid = session.record.members[position].target;
        let found = self.targets.iter().find(|t| t.uuid() == uuid && t.is_usable()).cloned();
        found.ok_or_else(|| StoreError::Disconnected("the target is not there".into()))
    }

    /// What a member that was away has of its own; `None` if it has nothing.
    async fn own_entries(&self, link: &Link) -> store::Result<Option<Vec<(Bytes, Bytes)>>> {
        match self.all_entries(link, &own_object(), &Bytes::new(), None).await {
            Ok(entries) => Ok(Some(entries)),
            Err(StoreError::NoSuchCollection(_) | StoreError::NoSuchObject(_)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Removes what a member has left from before; returns the objects that it may have otherwise than the others.
    async fn clean(&self, link: &Link, own: Vec<(Bytes, Bytes)>) -> store::Result<BTreeSet<ObjectId>> {
        let mut missing = self.log.borrow().dirty.clone();
        for (key, value) in &own {
            match Entry::decode(key, value)? {
                Entry::Intent(_, intent) => {
                    missing.extend(intent.objects.into_iter().map(|touched| touched.oid));
                }
                Entry::Dirty(oid) => drop(missing.insert(oid)),
                Entry::Record(_) | Entry::Proposal(_) | Entry::Trimmed(_) => {}
            }
        }
        missing.retain(|oid| !(self.is_internal)(oid));
        // Should the rebuild be broken off, nobody else may know what its intents were about.
        self.note_dirty(link, missing.iter()).await?;
        let keep = own_object();
        loop {
            // A group's own objects sort first.
            let (ids, _) = self.answer(link, link.target.store().list(&self.cid, None, PAGE)).await?;
            let left = ids.into_iter().take_while(is_own).filter(|oid| *oid != keep);
            let removals: Vec<Op> = left.map(|oid| Op::Remove { oid }).collect();
            let last = removals.is_empty();
            let ops = if last { vec![forget_all_but_dirty()] } else { removals };
            self.apply_to(link, Transaction { collection: self.cid.clone(), ops, uses_reserve: true })
                .await?;
            if last {
                return Ok(missing);
            }
        }
    }

    /// Gives a member its fragment of an object, whatever it had; returns the bytes. The object must be locked. Until it is done
    /// a member that was empty may have a part of the omap only; one that is `in_sync` keeps the omap that it has.
    async fn copy_object(
        &self,
        session: &Session,
        link: &Link,
        position: usize,
        oid: &ObjectId,
        in_sync: bool,
    ) -> store::Result<u64> {
        let mut peers = self.live_links(session, oid);
        peers[position] = None;
        let there = match self.answer(link, link.target.store().stat(&self.cid, oid)).await {
            Ok(_) => true,
            Err(StoreError::NoSuchObject(_)) => false,
            Err(e) => {
                // One that cannot even say what it has cannot be given anything: the others go on without it, if they can.
                if matches!(e, StoreError::Io(_)) && peers.iter().flatten().count() >= self.layout.k {
                    link.target.fail(&e);
                }
                return Err(e);
            }
        };
        let Some(size) = self.size_by_any(&mut peers, oid).await? else {
            if there {
                self.apply_to(link, self.removal(oid)).await?;
            }
            return Ok(0);
        };
        let whole = Whole { oid, size };
        let put = self.put_fragment(session, link, position, whole, &peers, (there, in_sync)).await;
        match put {
            // On a full member the new fragment takes the place of the old one, which does not count.
            Err(StoreError::NoSpace { .. }) if there && !in_sync => {
                self.apply_to(link, self.removal(oid)).await?;
                self.put_fragment(session, link, position, whole, &peers, (false, false)).await?;
            }
            put => put?,
        }
        if !(there && in_sync) {
            self.copy_omap(link, &peers, oid).await?;
        }
        Ok(self.layout.fragment_size(position, size))
    }

    fn removal(&self, oid: &ObjectId) -> Transaction {
        Transaction::new(self.cid.clone()).with(Op::Remove { oid: oid.clone() }).from_reserve()
    }

    /// Puts a fragment and the xattrs on a member. `there` says whether the member has a fragment of the
    /// object, `in_sync` whether that one counts: its repair may use the reserve.
    async fn put_fragment(
        &self,
        session: &Session,
        link: &Link,
        position: usize,
        whole: Whole<'_>,
        peers: &[Option<Link>],
        (there, in_sync): (bool, bool),
    ) -> store::Result<()> {
        let oid = whole.oid;
        let mut transaction = Transaction::new(self.cid.clone());
        transaction.uses_reserve = in_sync;
        if there && in_sync {
            transaction.ops.push(Op::Truncate { oid: oid.clone(), size: 0 });
            transaction.ops.push(Op::RemoveXattrs { oid: oid.clone() });
        } else if there {
            transaction.ops.push(Op::Remove { oid: oid.clone() });
        }
        let (source, stage) = self.make_fragment(session, link, position, whole).await?;
        transaction.ops.push(Op::Touch { oid: oid.clone() });
        transaction.ops.extend(source.map(|source| Op::Write { oid: oid.clone(), offset: 0, source }));
        let asked = async |peer: &Link| peer.target.store().get_xattrs(&self.cid, oid).await;
        let xattrs = self.ask_one_of(peers, oid, asked).await?;
        transaction.ops.push(Op::SetXattrs { oid: oid.clone(), xattrs });
        let written = self.apply_to(link, transaction).await;
        drop(stage);
        written
    }

    /// Computes a fragment; a long one is on its member already then.
    async fn make_fragment(
        &self,
        session: &Session,
        link: &Link,
        position: usize,
        whole: Whole<'_>,
    ) -> store::Result<(Option<WriteSource>, Option<crate::stage::FragmentStage>)> {
        let len = self.layout.fragment_size(position, whole.size);
        if len == 0 {
            return Ok((None, None));
        }
        if len <= SEGMENT {
            let read = self.reconstruct(session, whole, position, 0..len).await?;
            return Ok((Some(WriteSource::Inline(payload(read)?)), None));
        }
        let store = &link.target.store();
        let id = self.answer(link, store.stage(len)).await?;
        let stage = crate::stage::FragmentStage { link: link.clone(), id };
        let write = |at: u64| async move {
            let range = at..(at + SEGMENT).min(len);
            let read = self.reconstruct(session, whole, position, range).await?;
            self.answer(link, store.stage_write(id, at, payload(read)?)).await
        };
        let segments = stream::iter((0..len).step_by(SEGMENT as usize)).map(Ok);
        segments.try_for_each_concurrent(SEGMENTS, write).await?;
        Ok((Some(WriteSource::Staged { stage: id, offset: 0, len }), Some(stage)))
    }

    async fn copy_omap(&self, link: &Link, peers: &[Option<Link>], oid: &ObjectId) -> store::Result<()> {
        let mut from = Bytes::new();
        loop {
            let asked = async |peer: &Link| {
                peer.target.store().omap_iterate(&self.cid, oid, from.clone(), 1024).await
            };
            let (entries, more) = self.ask_one_of(peers, oid, asked).await?;
            let Some((last, _)) = entries.last() else { return Ok(()) };
            let next = Bytes::from([last, &b"\0"[..]].concat());
            let mut entries = entries.into_iter().peekable();
            while entries.peek().is_some() {
                let entries = page_by(&mut entries, |(key, value)| key.len() + value.len());
                let mut set =
                    Transaction::new(self.cid.clone()).with(Op::OmapSet { oid: oid.clone(), entries });
                // Without the group's own records a full member would never catch up.
                set.uses_reserve = *oid == self.meta;
                self.apply_to(link, set).await?;
            }
            if !more {
                return Ok(());
            }
            from = next;
        }
    }

    /// Ids of objects, without the group's own.
    pub(super) async fn list_in(
        &self,
        session: &Session,
        from: Option<ObjectId>,
        limit: usize,
    ) -> store::Result<(Vec<ObjectId>, bool)> {
        self.list_of(&session.links, from, limit).await
    }

    /// The same, of one of these members.
    pub(super) async fn list_of(
        &self,
        links: &[Option<Link>],
        from: Option<ObjectId>,
        limit: usize,
    ) -> store::Result<(Vec<ObjectId>, bool)> {
        let mut from = from;
        loop {
            let question = async |link: &Link| link.target.store().list(&self.cid, from.clone(), limit).await;
            let (mut ids, more) = self.ask_one_of(links, &own_object(), question).await?;
            let last = ids.last().cloned();
            ids.retain(|oid| !is_own(oid));
            match last {
                Some(last) if ids.is_empty() && more => from = Some(after(&last)?),
                _ => return Ok((ids, more)),
            }
        }
    }

    /// Makes a fragment anew that could not be read.
    pub(crate) async fn repair(&self, oid: &ObjectId, position: usize) -> store::Result<()> {
        let session = self.any_session().await?;
        let _open = self.gate.read().await;
        let locked = self.exclusive_object(oid).await;
        self.still(&session)?;
        locked.forget();
        self.repair_locked(&session, oid, position).await
    }

    async fn repair_locked(&self, session: &Session, oid: &ObjectId, position: usize) -> store::Result<()> {
        let Some(link) = self.live(session, position, oid) else { return Ok(()) };
        self.copy_object(session, &link, position, oid, true).await?;
        metrics::counter!("outboard_osd_fragments_repaired_total").increment(1);
        tracing::info!(%oid, target_uuid = %link.target.uuid(), "a fragment was repaired");
        Ok(())
    }

    /// Repairs what is known to be damaged of an object that is about to be changed: a change is of the fragments that there are.
    pub(super) async fn repair_before_change(&self, session: &Session, oid: &ObjectId) {
        let damaged: Vec<(ObjectId, usize)> =
            self.damaged.borrow().iter().filter(|(damaged, _)| damaged == oid).cloned().collect();
        for (oid, position) in damaged {
            if let Err(e) = self.repair_locked(session, &oid, position).await {
                tracing::warn!(%oid, position, error = %e, "a damaged fragment is not repaired before it changes");
            }
            self.damaged.borrow_mut().remove(&(oid, position));
        }
    }
}

impl Job<'_> {
    async fn run(&self) -> store::Result<()> {
        let some = match self.group.rebuild.borrow().as_ref().map(|rebuild| &rebuild.missing) {
            Some(Missing::Only(some)) => Some(some.iter().cloned().collect()),
            _ => None,
        };
        match some {
            Some(some) => self.copy_objects(some).await?,
            None => self.copy_all().await?,
        }
        self.finish().await
    }

    async fn copy_all(&self) -> store::Result<()> {
        let mut from = None;
        loop {
            let (ids, more) = self.group.list_in(&self.session, from.take(), PAGE).await?;
            let last = if more { ids.last().cloned() } else { None };
            self.copy_objects(ids).await?;
            let end = last.clone().unwrap_or_else(greatest);
            loop {
                let made = self.with_rebuild(|rebuild| rebuild.passed(&end)).unwrap_or_default();
                if made.is_empty() {
                    break;
                }
                self.copy_objects(made).await?;
            }
            match last {
                Some(last) => from = Some(after(&last)?),
                None => return Ok(()),
            }
        }
    }

    async fn copy_objects(&self, oids: Vec<ObjectId>) -> store::Result<()> {
        let wanted = oids.into_iter().filter(|oid| !(self.group.is_internal)(oid)).map(Ok);
        stream::iter(wanted).try_for_each_concurrent(OBJECTS, |oid| self.copy(oid)).await
    }

    async fn copy(&self, oid: ObjectId) -> store::Result<()> {
        let began = Instant::now();
        let locked = self.group.exclusive_object(&oid).await;
        self.group.still(&self.session)?;
        let (session, link) = (&self.session, &self.link);
        let bytes = self.group.copy_object(session, link, self.position, &oid, false).await?;
        self.with_rebuild(|rebuild| rebuild.has_now(&oid));
        drop(locked);
        {
            let mut progress = self.progress.borrow_mut();
            progress.objects += 1;
            progress.bytes += bytes;
        }
        self.pace.after(bytes, began.elapsed()).await;
        Ok(())
    }

    fn with_rebuild<T>(&self, change: impl FnOnce(&mut Rebuild) -> T) -> Option<T> {
        self.group.rebuild.borrow_mut().as_mut().map(change)
    }

    /// Makes a member that has everything one that is in sync. The session ends; the next one has it.
    async fn finish(&self) -> store::Result<()> {
        let group = self.group;
        let _closed = group.gate.write().await;
        let _alone = group.opening.lock().await;
        group.still(&self.session)?;
        let old = self.session.record.clone();
        let mut members = old.members;
        members[self.position].standing = Standing::InSync;
        let record = GroupRecord { epoch: group.next_epoch(false), members };
        // Notes that nobody needs any more are forgotten when the next session begins.
        if record.needs_notes() {
            let dirty = group.log.borrow().dirty.clone();
            group.note_dirty(&self.link, dirty.iter()).await?;
        }
        let links: Vec<&Link> = self.session.links.iter().flatten().chain([&self.link]).collect();
        group.put_in_force(&record, &links).await?;
        *group.lineage.borrow_mut() = Some(record.clone());
        let target = self.link.target.uuid();
        tracing::info!(cid = %group.cid, position = self.position, epoch = record.epoch, target_uuid = %target, "a member is back");
        metrics::counter!("outboard_osd_members_rebuilt_total").increment(1);
        *group.rebuild.borrow_mut() = None;
        group.end_session(&self.session);
        Ok(())
    }
}

/// An id that no object's is greater than.
fn greatest() -> ObjectId {
    ObjectId::new(vec![0xff; store::MAX_OBJECT_ID]).expect("as long as may be")
}

/// The lowest id that is greater.
fn after(oid: &ObjectId) -> store::Result<ObjectId> {
    ObjectId::new([oid.as_bytes(), &b"\0"[..]].concat())
}

/// A fragment's bytes as they are written: the last checksum is that of the bytes alone.
fn payload(read: FragmentRead) -> store::Result<Payload> {
    let FragmentRead { bytes, mut checksums } = read;
    checksums.truncate(bytes.len().div_ceil(BLOCK_SIZE));
    let tail = bytes.len() % BLOCK_SIZE;
    if let (Some(last), true) = (checksums.last_mut(), tail > 0) {
        *last = crc32c(&bytes[bytes.len() - tail..]);
    }
    Payload::from_parts(0, bytes, checksums).map_err(|e| StoreError::InvalidArgument(e.to_string()))
}
