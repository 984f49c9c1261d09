//! Rebuilds a member. A stale member receives the objects that changed while it was unavailable. A
//! blank member receives all objects.
//!
//! During a rebuild the member takes part in transactions on the objects that it already has. The
//! member is in sync when it has all objects, and every member has stored a membership record that
//! lists it as in sync.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::LocalBoxFuture;
use futures::stream::{self, Stream, TryStreamExt};
use store::{ObjectId, StoreCalls, StoreError};
use tokio::time::Instant;

use crate::ask::after;
use crate::copy::{ReceivingMember, SEGMENT};
use crate::group::Group;
use crate::interval::{Interval, over};
use crate::member::Member;
use crate::member_link::MemberLink;
use crate::pace::Pace;
use crate::read::WholeObject;
use crate::rebuilding::{MissingObjects, Rebuilding};
use crate::record::{ChangeId, GroupRecord, MemberRecord, Standing, own_object};
use crate::view::StoredRecords;

/// Pause before a failed rebuild of a group's member is retried.
pub const RETRY: Duration = Duration::from_secs(1);
/// Number of objects that are copied concurrently.
pub(crate) const OBJECTS: usize = 4;
/// Number of object ids listed per call.
const PAGE: usize = 256;

/// Progress of a rebuild.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rebuilt {
    /// Number of objects rebuilt.
    pub objects: u64,
    /// Number of bytes written.
    pub bytes: u64,
}

/// A rebuild in progress.
struct RebuildRun<'a> {
    group: &'a Group,
    interval: Rc<Interval>,
    position: usize,
    link: MemberLink,
    pace: &'a Pace,
    progress: &'a RefCell<Rebuilt>,
}

impl Group {
    /// Returns the position of a member that is not in sync but can be rebuilt in this interval.
    pub fn to_rebuild(&self, interval: &Interval) -> Option<usize> {
        let members = &interval.record.members;
        let usable = |uuid| self.targets.iter().any(|t| t.uuid() == uuid && t.is_usable());
        let can_be = |m: &MemberRecord| m.standing != Standing::InSync && usable(m.target);
        self.receivers.positions(members.len()).find(|&position| can_be(&members[position]))
    }

    /// If there are too many dirty notes, ends the interval, so that the next interval discards the
    /// notes. If the index of a target is full (`index_is_full`), even one note is too many.
    /// Without the notes, stale members become blank: a rebuild copies everything to them.
    pub fn bound_notes(&self, index_is_full: bool) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            let most = if index_is_full { 0 } else { self.dirty_max };
            // A rebuild in progress finishes sooner with the notes, so keep the notes until it has
            // ended.
            let is_due = || self.intents.borrow().dirty().oids().len() > most && !self.rebuilds.is_running();
            if !is_due() {
                return;
            }
            let _closed = self.gate.write().await;
            if !is_due() {
                return;
            }
            if let Some(interval) = self.current() {
                tracing::warn!(cid = %self.cid, limit = most, "too many objects changed while a member was unavailable; a rebuild will copy all objects to this member");
                self.intents.borrow_mut().dirty_mut().discard();
                self.end_interval(&interval);
            }
        })
    }

    /// Rebuilds the member at a position, and adds the copied objects and bytes to `progress`.
    ///
    /// # Errors
    /// If the interval ends, the member fails, or it has no space. The caller retries later.
    pub fn rebuild<'a>(
        &'a self,
        position: usize,
        pace: &'a Pace,
        progress: &'a RefCell<Rebuilt>,
    ) -> LocalBoxFuture<'a, store::Result<()>> {
        Box::pin(async move {
            let interval = self.any_interval().await?;
            let outcome = async {
                if interval.record.members[position].standing == Standing::Blank {
                    // The old data may be large. Remove it before `Group::gate` is locked against
                    // transactions, so that clients do not wait.
                    let target = self.member(&interval, position)?;
                    self.wipe_in(&interval, &target).await?;
                }
                let link = self.admit(&interval, position).await?;
                self.receivers.begins(&link.target.uuid());
                let job = RebuildRun {
                    group: self,
                    interval: Rc::clone(&interval),
                    position,
                    link,
                    pace,
                    progress,
                };
                job.run().await
            };
            let outcome = outcome.await;
            let member = interval.record.members[position];
            if outcome.is_err() {
                self.receivers.failed(position, member.target, self.still(&interval).is_ok());
            } else {
                self.receivers.rebuilt(&member.target);
            }
            let is_full =
                matches!(outcome, Err(StoreError::NoSpace { .. })) && member.standing == Standing::Blank;
            if is_full {
                self.receivers.fills(member.target);
            }
            let moves = is_full && self.spare(&interval.record).is_some();
            if outcome.is_err() && (moves || self.rebuilds.is_running()) {
                // The member takes part in transactions that are in progress. Only a new interval
                // may exclude it from transactions.
                self.end_interval(&interval);
            }
            outcome
        })
    }

    /// Prepares a member for its rebuild. From then on, the member takes part in transactions.
    async fn admit(&self, interval: &Rc<Interval>, position: usize) -> store::Result<MemberLink> {
        let _closed = self.gate.write().await;
        self.still(interval)?;
        let record = interval.record.clone();
        let target = self.member(interval, position)?;
        let link = MemberLink::new(Rc::clone(&target));
        let own = match record.members[position].standing {
            Standing::Stale { term, settled } => match self.own_entries(&link, term, settled).await? {
                None => return Err(self.make_blank(interval, position).await?),
                own => own,
            },
            _ => None,
        };
        // No change is in progress, so all committed changes are settled.
        let settled = self.intents.borrow().sequence().last_committed();
        let missing = match own {
            Some(own) => MissingObjects::Only(self.clean(&link, own, &record, settled).await?),
            None => {
                self.wipe(&target).await?;
                self.create_on(&target, &record).await?;
                self.replace_records(&link, &record, settled).await?;
                MissingObjects::all()
            }
        };
        // Transactions change the owner's metadata object without a lock. Copy this object while
        // `Group::gate` is locked against transactions.
        self.copy_object(interval, &link, position, &self.meta.clone(), ReceivingMember::NotInSync).await?;
        self.still(interval)?;
        self.rebuilds.begin(Rebuilding::new(position, interval.number, link.clone(), missing));
        tracing::info!(cid = %self.cid, position, target_uuid = %link.target.uuid(), "started to rebuild a member");
        Ok(link)
    }

    /// Puts a membership record in force that lists a stale member as blank, because the member has
    /// gone back. Ends the interval, and returns the error of calls of the ended interval. The rebuild
    /// of a blank member replaces the records that show how far the member has gone back, and may be
    /// interrupted.
    async fn make_blank(&self, interval: &Rc<Interval>, position: usize) -> store::Result<StoreError> {
        let _alone = self.intervals.lock().await;
        self.still(interval)?;
        let mut members = interval.record.members.clone();
        members[position].standing = Standing::Blank;
        let record = GroupRecord { term: self.terms.next(false), members, undone: BTreeSet::new() };
        let links: Vec<&MemberLink> = interval.links.iter().flatten().collect();
        self.put_in_force(&interval.record, &record, &links).await?;
        self.end_interval(interval);
        Ok(over(interval.number))
    }

    /// Returns the target of the member at a position.
    fn member(&self, interval: &Interval, position: usize) -> store::Result<Rc<dyn Member>> {
        let uuid = interval.record.members[position].target;
        let found = self.targets.iter().find(|t| t.uuid() == uuid && t.is_usable()).cloned();
        found.ok_or_else(|| {
            StoreError::Disconnected("the target of the member to rebuild is not available".into())
        })
    }

    /// Reads the group's records on a stale member. Returns `None` if the member has no records, or
    /// lacks changes that it had stored when it was last in sync: the record of `term`, and the
    /// changes up to `settled`. Then the dirty notes do not name all objects that it lacks, and the
    /// member must become blank.
    async fn own_entries(
        &self,
        link: &MemberLink,
        term: u64,
        settled: ChangeId,
    ) -> store::Result<Option<StoredRecords>> {
        let entries = match self.calls.all_entries(link, &own_object(), &Bytes::new(), None).await {
            Ok(entries) => entries,
            Err(StoreError::NoSuchCollection(_) | StoreError::NoSuchObject(_)) => return Ok(None),
            Err(e) => return Err(e),
        };
        let own = StoredRecords::decode(&entries)?;
        let proposal = own.proposal.iter().filter(|proposal| proposal.has_objects_on(&link.target.uuid()));
        let heard = own.record.iter().chain(proposal).map(|record| record.term).max().unwrap_or(0);
        if heard < term || own.last() < settled {
            tracing::warn!(cid = %self.cid, target_uuid = %link.target.uuid(), "a stale member has lost changes that it had stored, and becomes blank; all objects will be copied to it");
            metrics::counter!("outboard_osd_members_went_back_total").increment(1);
            return Ok(None);
        }
        Ok(Some(own))
    }

    /// Removes the old undo objects of a member, and replaces its old records. Returns the objects
    /// whose content on this member may differ from their content on the other members.
    async fn clean(
        &self,
        link: &MemberLink,
        own: StoredRecords,
        record: &GroupRecord,
        settled: ChangeId,
    ) -> store::Result<BTreeSet<ObjectId>> {
        let mut missing = self.intents.borrow().dirty().oids().clone();
        let touched = own.intents.into_values().flat_map(|stored| stored.intent.objects);
        missing.extend(touched.map(|touched| touched.oid).chain(own.dirty));
        missing.retain(|oid| !(self.is_internal)(oid));
        // Write dirty notes for these objects. If the rebuild is interrupted, the notes replace the
        // member's intents, which are removed next.
        self.note_dirty(link, missing.iter()).await?;
        self.replace_records(link, record, settled).await?;
        Ok(missing)
    }
}

impl RebuildRun<'_> {
    async fn run(&self) -> store::Result<()> {
        let some = self.with_rebuilding(|rebuilding| rebuilding.known_missing()).flatten();
        match some {
            Some(some) => self.copy_missing(some).await?,
            None => self.copy_all().await?,
        }
        // Meanwhile, objects may have begun as copies of objects that the member lacked.
        loop {
            let missing = self.with_rebuilding(|rebuilding| rebuilding.still_missing()).unwrap_or_default();
            self.copy_objects(missing).await?;
            if self.finish().await? {
                return Ok(());
            }
        }
    }

    /// Copies the objects that a stale member lacks. If the member has no space for some of them, they
    /// are tried again after the others: objects that were removed or became smaller free space.
    async fn copy_missing(&self, oids: Vec<ObjectId>) -> store::Result<()> {
        let too_large = RefCell::new(Vec::new());
        let copy = async |oid: ObjectId| match self.copy(oid.clone()).await {
            Err(StoreError::NoSpace { .. }) => {
                too_large.borrow_mut().push(oid);
                Ok(())
            }
            copied => copied,
        };
        self.wanted(oids).try_for_each_concurrent(OBJECTS, copy).await?;
        self.copy_objects(too_large.into_inner()).await
    }

    async fn copy_all(&self) -> store::Result<()> {
        let mut from = None;
        loop {
            let (ids, more) = self.group.list_in(&self.interval, from.take(), PAGE).await?;
            let last = if more { ids.last().cloned() } else { None };
            self.copy_objects(ids).await?;
            let end = last.clone().unwrap_or_else(greatest);
            loop {
                let made = self.with_rebuilding(|rebuilding| rebuilding.passed(&end)).unwrap_or_default();
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
        self.wanted(oids).try_for_each_concurrent(OBJECTS, |oid| self.copy(oid)).await
    }

    /// Returns those of the objects that a rebuild copies.
    fn wanted(&self, oids: Vec<ObjectId>) -> impl Stream<Item = store::Result<ObjectId>> {
        stream::iter(oids.into_iter().filter(|oid| !(self.group.is_internal)(oid)).map(Ok))
    }

    async fn copy(&self, oid: ObjectId) -> store::Result<()> {
        let began = Instant::now();
        let locked = self.group.objects.alone(&oid).await;
        self.group.still(&self.interval)?;
        let (interval, link) = (&self.interval, &self.link);
        let bytes = match self.has_current(&oid).await? {
            true => 0,
            false => {
                let receiver = ReceivingMember::NotInSync;
                self.group.copy_object(interval, link, self.position, &oid, receiver).await?
            }
        };
        self.with_rebuilding(|rebuilding| rebuilding.has_now(&oid));
        drop(locked);
        {
            let mut progress = self.progress.borrow_mut();
            progress.objects += 1;
            progress.bytes += bytes;
        }
        self.pace.after(bytes, began.elapsed()).await;
        Ok(())
    }

    /// Whether a stale member has an intact fragment of the current content of an object. The other
    /// members may be unable to provide it again. The xattrs show this, because the owner changes an xattr
    /// with each change of the object, but an earlier version has copied the omap after the xattrs.
    async fn has_current(&self, oid: &ObjectId) -> store::Result<bool> {
        let (group, link, position) = (self.group, &self.link, self.position);
        if !matches!(self.interval.record.members[position].standing, Standing::Stale { .. }) {
            return Ok(false);
        }
        let own = group.calls.answer(link, link.target.store().get_xattrs(&group.cid, oid)).await;
        let Ok(own) = own else { return Ok(false) };
        let mut peers = self.interval.links.clone();
        let Some(size) = group.size_by_any(&mut peers, oid).await? else { return Ok(false) };
        if group.xattrs_of_any(&peers, oid).await? != own || group.has_omap(&peers, oid).await? {
            return Ok(false);
        }
        let len = group.layout.fragment_size(position, size);
        for at in (0..len.max(1)).step_by(SEGMENT as usize) {
            let range = at..(at + SEGMENT).min(len);
            if group.read_from(link, WholeObject { oid, size }, position, range, None).await.is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn with_rebuilding<T>(&self, change: impl FnOnce(&mut Rebuilding) -> T) -> Option<T> {
        self.group.rebuilds.with(change)
    }

    /// Puts a membership record in force that lists the rebuilt member as in sync. Ends the
    /// interval; the next one includes the member. Returns false if the member still lacks objects.
    async fn finish(&self) -> store::Result<bool> {
        let group = self.group;
        let _closed = group.gate.write().await;
        let _alone = group.intervals.lock().await;
        group.still(&self.interval)?;
        if self.with_rebuilding(|rebuilding| !rebuilding.still_missing().is_empty()) == Some(true) {
            return Ok(false);
        }
        let old = &self.interval.record;
        let mut members = old.members.clone();
        members[self.position].standing = Standing::InSync;
        let record = GroupRecord { term: group.terms.next(false), members, undone: BTreeSet::new() };
        // If other members still need dirty notes, the rebuilt member must have the notes, too. The
        // next interval removes notes that no member needs any more.
        if record.needs_notes() {
            let dirty = group.intents.borrow().dirty().oids().clone();
            group.note_dirty(&self.link, dirty.iter()).await?;
        }
        let links: Vec<&MemberLink> = self.interval.links.iter().flatten().chain([&self.link]).collect();
        group.put_in_force(old, &record, &links).await?;
        let target = self.link.target.uuid();
        tracing::info!(cid = %group.cid, position = self.position, term = record.term, target_uuid = %target, "a rebuilt member is in sync again");
        metrics::counter!("outboard_osd_members_rebuilt_total").increment(1);
        group.rebuilds.end();
        group.end_interval(&self.interval);
        Ok(true)
    }
}

/// Returns the greatest possible object id.
fn greatest() -> ObjectId {
    ObjectId::new(vec![0xff; store::MAX_OBJECT_ID]).expect("the id has the maximum length")
}
