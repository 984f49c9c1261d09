//! Copies changes to a member that lacks them, before an interval begins.
//!
//! A member may lack a change that the group keeps, because the member had not committed it before
//! a crash, or has lost it since. The member receives all such changes in one transaction. This
//! transaction leaves the same records on the member as the changes themselves: the intents and the
//! undo objects. If the process ends, another decision therefore finds a member that either has the
//! changes or lacks them.
//!
//! The transaction stores only one way to undo the data of all its changes. The members that lack the
//! fewest changes therefore catch up first. Then every member with the first of the copied changes also
//! has the last one, so a decision keeps all of them or undoes all of them. This assumes that no member
//! goes back between its catch-up and the next change.
//!
//! If the sources cannot read what the changes have written, because their data is damaged, the group
//! undoes the changes that the member lacks. `docs/redundancy.md` states why none of them was
//! acknowledged, within the tolerance of the group. The argument needs the order above: members that
//! lacked fewer changes are among the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::ops::Range;

use base::block::{BLOCK, BLOCK_SIZE, align_down, align_up};
use bytes::Bytes;
use store::{ObjectId, Op, StoreCalls, StoreError, Transaction, WriteSource};

use crate::ask::is_unreadable;
use crate::copy::payload;
use crate::group::Group;
use crate::interval::{Interval, over};
use crate::member_link::{MemberLink, is_refusal};
use crate::read::{FragmentRead, WholeObject};
use crate::record::{ChangeId, Intent, IntentPlace, StoredIntent, Touched, Undo, own_object};
use crate::stage::FragmentStage;
use crate::undo::save_ranges;
use crate::view::MemberView;

/// Number of bytes of a fragment up to which a transaction contains its new data. More data is
/// staged first.
const INLINE: u64 = 1 << 20;

/// What some changes have done to one object, as far as the members that have them know.
#[derive(Default)]
struct ObjectChanges {
    /// The first of the changes, the place of its intent, and the object's index in it.
    first: Option<(ChangeId, IntentPlace, usize)>,
    /// The object was created or removed, so a member that lacks the changes has another object of
    /// this id, or none.
    is_replaced: bool,
    has_data: bool,
    xattrs: bool,
    omap_keys: BTreeSet<Bytes>,
    omap_ranges: Vec<(Bytes, Option<Bytes>)>,
    /// Ranges of fragments that may have changed. The parity of a range changes at the same
    /// offsets.
    ranges: Vec<Range<u64>>,
    /// Lowest offset of a fragment from which on everything may have changed.
    tail: Option<u64>,
}

/// The transaction that a member receives, and the stages that it names.
struct CatchUp<'a> {
    group: &'a Group,
    sources: &'a Interval,
    position: usize,
    view: &'a MemberView,
    ops: Vec<Op>,
    stages: Vec<FragmentStage>,
    /// Whether too few sources could read their data.
    are_sources_damaged: bool,
}

impl Group {
    /// Copies changes to the member at a position, which lacks them. The members `whole` have all
    /// changes that the group keeps. `sources` links them and the members that have caught up.
    ///
    /// # Errors
    /// If a member fails. If this member refuses the transaction, or is damaged, the next decision
    /// treats it as missing, so that it is rebuilt. If the sources are certainly damaged, the next
    /// decision undoes the changes.
    pub(crate) async fn catch_up(
        &self,
        sources: &Interval,
        whole: &[&MemberView],
        position: usize,
        view: &MemberView,
        lacks: &BTreeSet<ChangeId>,
    ) -> store::Result<()> {
        let (objects, mut intents) = collect(whole, lacks);
        let target = view.link.target.uuid();
        tracing::info!(cid = %self.cid, target_uuid = %target, changes = lacks.len(), objects = objects.len(), "copying changes to a member that lacks them");
        let (ops, stages) = (Vec::new(), Vec::new());
        let mut copy =
            CatchUp { group: self, sources, position, view, ops, stages, are_sources_damaged: false };
        let outcome = async {
            copy.clear_slots(intents.values().map(|stored| stored.place));
            for (oid, changes) in &objects {
                let undo = copy.object(oid, changes).await?;
                if let Some((change, _, index)) = changes.first
                    && let Some(stored) = intents.get_mut(&change)
                {
                    stored.intent.objects[index].undo = undo;
                }
            }
            let entries = intents.values().map(StoredIntent::entry);
            copy.ops.push(Op::OmapSet { oid: own_object(), entries: entries.collect() });
            let ops = std::mem::take(&mut copy.ops);
            let transaction = Transaction { collection: self.cid.clone(), ops, uses_reserve: true };
            self.calls.apply_to(&view.link, transaction).await
        };
        match outcome.await {
            Err(e) if copy.are_sources_damaged => {
                if !self.damaged_changes.add(lacks) {
                    return Err(StoreError::Disconnected(format!(
                        "changes that were in progress cannot be completed: {e}; trying again, and undoing them if the damage remains"
                    )));
                }
                tracing::error!(cid = %self.cid, ?lacks, error = %e, "too few members have intact data of some changes that were in progress; the changes will be undone");
                self.intents.borrow_mut().give_up(lacks);
                self.intervals.end();
                Err(over(sources.number))
            }
            Err(e) if is_refusal(&e) || matches!(e, StoreError::Corrupt { .. }) => {
                tracing::warn!(cid = %self.cid, target_uuid = %target, error = %e, "a member cannot receive the changes that it lacks; it will be rebuilt");
                self.receivers.refuses(target);
                Err(over(sources.number))
            }
            outcome => {
                self.damaged_changes.clear();
                metrics::counter!("outboard_osd_changes_copied_total").increment(lacks.len() as u64);
                outcome
            }
        }
    }
}

/// Collects what the changes have done to each object, and the intents that a member without an own
/// intent gets.
fn collect(
    whole: &[&MemberView],
    lacks: &BTreeSet<ChangeId>,
) -> (BTreeMap<ObjectId, ObjectChanges>, BTreeMap<ChangeId, StoredIntent>) {
    let mut objects: BTreeMap<ObjectId, ObjectChanges> = BTreeMap::new();
    let mut intents = BTreeMap::new();
    for &change in lacks {
        for stored in whole.iter().filter_map(|view| view.intents.get(&change)) {
            let place = stored.place;
            let copied = intents.entry(change).or_insert_with(|| {
                let intent = Intent { objects: Vec::new() };
                StoredIntent { intent, ..stored.clone() }
            });
            let known_objects = &mut copied.intent.objects;
            for touched in &stored.intent.objects {
                let index = known_objects.iter().position(|known| known.oid == touched.oid);
                let index = index.unwrap_or_else(|| {
                    let undo = Undo::Unchanged;
                    known_objects.push(Touched { undo, ..touched.clone() });
                    known_objects.len() - 1
                });
                let changes = objects.entry(touched.oid.clone()).or_default();
                changes.first.get_or_insert((change, place, index));
                changes.add(touched);
            }
        }
    }
    (objects, intents)
}

impl ObjectChanges {
    fn add(&mut self, touched: &Touched) {
        self.xattrs |= touched.xattrs;
        self.omap_keys.extend(touched.omap_keys.iter().cloned());
        self.omap_ranges.extend(touched.omap_ranges.iter().cloned());
        match &touched.undo {
            Undo::Unchanged => {}
            Undo::Remove | Undo::Return => self.is_replaced = true,
            Undo::Restore { size, saved } => {
                (self.has_data, self.xattrs) = (true, true);
                self.ranges.extend(saved.iter().map(|(at, len)| *at..at + len));
                self.tail = Some(self.tail.map_or(*size, |tail| tail.min(*size)));
            }
        }
    }

    /// Ranges of a fragment that may differ, in order and without overlaps. The fragment has now
    /// `len` bytes.
    fn differing(&self, len: u64) -> Vec<Range<u64>> {
        let tail = self.tail.map(|tail| align_down(tail)..len);
        let mut all: Vec<Range<u64>> = self
            .ranges
            .iter()
            .cloned()
            .chain(tail)
            .map(|range| align_down(range.start)..align_up(range.end).unwrap_or(u64::MAX).min(len))
            .filter(|range| range.start < range.end)
            .collect();
        all.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in all {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        merged
    }
}

impl CatchUp<'_> {
    /// Appends the ops that bring one object up to date. Returns how to undo them.
    async fn object(&mut self, oid: &ObjectId, changes: &ObjectChanges) -> store::Result<Undo> {
        let (group, view) = (self.group, self.view);
        let store = view.link.target.store();
        let size = match group.calls.answer(&view.link, store.stat(&group.cid, oid)).await {
            Ok(stat) => Some(stat.size),
            Err(StoreError::NoSuchObject(_)) => None,
            Err(e) => return Err(e),
        };
        let undo = if changes.is_replaced {
            self.replace(oid, changes, size.is_some()).await?
        } else if changes.has_data {
            self.data(oid, changes, size.unwrap_or(0)).await?
        } else {
            Undo::Unchanged
        };
        if !changes.is_replaced {
            self.metadata(oid, changes).await?;
        }
        Ok(undo)
    }

    /// Notes whether an answer of the sources shows that too few of them can read their data.
    fn noted<T>(&mut self, answer: store::Result<T>) -> store::Result<T> {
        let is_damage = |e: &StoreError| is_unreadable(e) || matches!(e, StoreError::TooFewTargets { .. });
        self.are_sources_damaged |= answer.as_ref().is_err_and(is_damage);
        answer
    }

    /// Appends ops that remove the undo objects of settled changes from slots.
    fn clear_slots(&mut self, places: impl Iterator<Item = IntentPlace>) {
        for stored in places.filter_map(|place| self.view.in_place(place)) {
            let undo_objects = stored.intent.undo_objects().into_iter();
            self.ops.extend(undo_objects.map(|index| Op::Remove { oid: stored.place.undo_object(index) }));
        }
    }

    /// Place of the intent that has the undo object, and the object's index in it.
    fn keep(changes: &ObjectChanges) -> (IntentPlace, usize) {
        let (_, place, index) = changes.first.expect("a change has touched the object");
        (place, index)
    }

    /// Replaces the whole object, which may exist on the member (`is_there`).
    async fn replace(
        &mut self,
        oid: &ObjectId,
        changes: &ObjectChanges,
        is_there: bool,
    ) -> store::Result<Undo> {
        if is_there {
            let (src, dst_collection) = (oid.clone(), self.group.cid.clone());
            let (place, index) = Self::keep(changes);
            self.ops.push(Op::MoveRename { src, dst_collection, dst: place.undo_object(index) });
        }
        if let Some(size) = self.size(oid).await? {
            self.ops.push(Op::Touch { oid: oid.clone() });
            let len = self.group.layout.fragment_size(self.position, size);
            self.write(WholeObject { oid, size }, iter::once(0..len).collect()).await?;
            let whole = ObjectChanges {
                xattrs: true,
                omap_ranges: vec![(Bytes::new(), None)],
                ..ObjectChanges::default()
            };
            self.metadata(oid, &whole).await?;
        }
        Ok(if is_there { Undo::Return } else { Undo::Remove })
    }

    /// Replaces the ranges of the data that may differ. The member's fragment has `old` bytes.
    async fn data(&mut self, oid: &ObjectId, changes: &ObjectChanges, old: u64) -> store::Result<Undo> {
        let size = self.size(oid).await?.unwrap_or(0);
        let len = self.group.layout.fragment_size(self.position, size);
        let differing = changes.differing(len.max(old));
        let saved: Vec<(u64, u64)> = differing
            .iter()
            .map(|range| range.start..range.end.min(old.next_multiple_of(BLOCK)))
            .filter(|range| range.start < range.end)
            .map(|range| (range.start, range.end.next_multiple_of(BLOCK) - range.start))
            .collect();
        let (place, index) = Self::keep(changes);
        self.ops.extend(save_ranges(oid, place, index, &saved));
        let new = differing.into_iter().map(|range| range.start..range.end.min(len));
        let new = new.filter(|range| range.start < range.end).collect();
        self.ops.push(Op::Truncate { oid: oid.clone(), size: len });
        self.write(WholeObject { oid, size }, new).await?;
        Ok(Undo::Restore { size: old, saved })
    }

    async fn size(&mut self, oid: &ObjectId) -> store::Result<Option<u64>> {
        let mut links = self.sources.links.clone();
        let size = self.group.size_by_any(&mut links, oid).await;
        self.noted(size)
    }

    /// Appends ops that write ranges of the member's fragment, reconstructed from the sources.
    async fn write(&mut self, whole: WholeObject<'_>, ranges: Vec<Range<u64>>) -> store::Result<()> {
        let (group, link) = (self.group, &self.view.link);
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let store = link.target.store();
        let stage = match total > INLINE {
            true => Some(group.calls.answer(link, store.stage(total)).await?),
            false => None,
        };
        self.stages.extend(stage.map(|id| FragmentStage { link: link.clone(), id }));
        let mut at = 0;
        for range in ranges {
            let mut from = range.start;
            while from < range.end {
                let part = from..range.end.min(from + INLINE);
                let (offset, len) = (part.start, part.end - part.start);
                let read = group.reconstruct(self.sources, whole, self.position, part.clone()).await;
                let read = self.noted(read)?;
                let blocks = group.filled(&read, (len as usize).next_multiple_of(BLOCK_SIZE));
                let (bytes, checksums) = blocks.into_parts();
                let payload = payload(FragmentRead { bytes: bytes.slice(..len as usize), checksums })?;
                let source = match stage {
                    None => WriteSource::Inline(payload),
                    Some(stage) => {
                        group.calls.answer(link, store.stage_write(stage, at, payload)).await?;
                        WriteSource::Staged { stage, offset: at, len }
                    }
                };
                self.ops.push(Op::Write { oid: whole.oid.clone(), offset, source });
                (from, at) = (part.end, at + len);
            }
        }
        Ok(())
    }

    /// Appends the ops that copy changed xattrs and omap entries.
    async fn metadata(&mut self, oid: &ObjectId, changes: &ObjectChanges) -> store::Result<()> {
        let (group, sources) = (self.group, self.sources);
        let links = &sources.links;
        let none_if_gone = |e| match e {
            StoreError::NoSuchObject(_) => Ok(Vec::new()),
            e => Err(e),
        };
        if changes.xattrs {
            let asked = async |peer: &MemberLink| peer.target.store().get_xattrs(&group.cid, oid).await;
            let xattrs = group.ask_one_of(links, oid, asked).await.or_else(none_if_gone);
            let xattrs = self.noted(xattrs)?;
            self.ops.push(Op::RemoveXattrs { oid: oid.clone() });
            self.ops.push(Op::SetXattrs { oid: oid.clone(), xattrs });
        }
        let mut entries = Vec::new();
        if !changes.omap_keys.is_empty() {
            let keys: Vec<Bytes> = changes.omap_keys.iter().cloned().collect();
            let asked =
                async |peer: &MemberLink| peer.target.store().omap_get(&group.cid, oid, keys.clone()).await;
            let found = group.ask_one_of(links, oid, asked).await.or_else(none_if_gone);
            entries.extend(self.noted(found)?);
            self.ops.push(Op::OmapRemove { oid: oid.clone(), keys });
        }
        for (from, to) in &changes.omap_ranges {
            let mut found = Ok(Vec::new());
            for peer in links.iter().flatten() {
                found = group.calls.all_entries(peer, oid, from, to.as_ref()).await.or_else(none_if_gone);
                if !matches!(&found, Err(e) if is_unreadable(e)) {
                    break;
                }
            }
            entries.extend(self.noted(found)?);
            self.ops.push(match to {
                Some(to) => Op::OmapRemoveRange { oid: oid.clone(), from: from.clone(), to: to.clone() },
                None => Op::OmapClear { oid: oid.clone() },
            });
        }
        if !entries.is_empty() {
            self.ops.push(Op::OmapSet { oid: oid.clone(), entries });
        }
        Ok(())
    }
}
