//! [`Intents`]: the changes of a group that are in progress, and the finished changes whose intents
//! must be removed (*trimmed*).

use std::collections::{BTreeMap, BTreeSet};

use store::ObjectId;

use crate::record::ChangeId;

/// The undo objects of one change, by position. Each undo object is identified by the index of its
/// object in the intent.
pub(crate) type UndoObjects = Vec<Vec<usize>>;

/// The intents of an interval.
#[derive(Default)]
pub(crate) struct Intents {
    /// Number of the interval that these intents belong to.
    interval: u64,
    /// Id of the next change.
    next: ChangeId,
    under_way: BTreeSet<ChangeId>,
    /// The last change that all members have committed.
    committed: ChangeId,
    /// Changes that only some members may have because a member has refused them.
    refused: BTreeSet<ChangeId>,
    /// Committed changes whose intents are not trimmed yet.
    done: BTreeMap<ChangeId, UndoObjects>,
    /// True while a transaction that trims intents is in progress.
    trimming: bool,
    /// Objects that have dirty notes, because they changed while a member was unavailable.
    dirty: BTreeSet<ObjectId>,
}

impl Intents {
    /// Creates the intents of an interval, whose first change is `next`. All members have committed
    /// the change `committed` of an earlier interval.
    pub(crate) fn new(
        interval: u64,
        next: ChangeId,
        committed: ChangeId,
        dirty: BTreeSet<ObjectId>,
    ) -> Intents {
        Intents { interval, next, committed, dirty, ..Intents::default() }
    }

    /// Adds a committed change of an earlier interval. The member at `position` has the undo objects
    /// `kept`.
    pub(crate) fn add_done(&mut self, change: ChangeId, position: usize, members: usize, kept: Vec<usize>) {
        self.done.entry(change).or_insert_with(|| vec![Vec::new(); members])[position] = kept;
    }

    /// Number of the interval.
    pub(crate) fn interval(&self) -> u64 {
        self.interval
    }

    /// Id of the next change.
    pub(crate) fn next(&self) -> ChangeId {
        self.next
    }

    /// The last change that all members have committed. Earlier changes may still be in progress.
    pub(crate) fn last_committed(&self) -> ChangeId {
        self.committed
    }

    /// Returns true if no committed change has an intent that must be trimmed.
    pub(crate) fn is_trimmed(&self) -> bool {
        self.done.is_empty()
    }

    /// Number of undo objects that are not removed yet, summed over all members.
    pub(crate) fn undo_objects(&self) -> usize {
        self.done.values().flatten().map(Vec::len).sum()
    }

    /// Committed changes up to `through` whose intents are not trimmed yet.
    pub(crate) fn done_through(&self, through: ChangeId) -> impl Iterator<Item = (ChangeId, &UndoObjects)> {
        self.done.range(..=through).map(|(change, undo_objects)| (*change, undo_objects))
    }

    /// Objects that have dirty notes, because they changed while a member was unavailable.
    pub(crate) fn dirty(&self) -> &BTreeSet<ObjectId> {
        &self.dirty
    }

    /// Records that objects have dirty notes.
    pub(crate) fn note_dirty(&mut self, oids: impl IntoIterator<Item = ObjectId>) {
        self.dirty.extend(oids);
    }

    /// The changes that only some members may have because a member has refused them.
    pub(crate) fn refused(&self) -> &BTreeSet<ChangeId> {
        &self.refused
    }

    /// Starts a change and returns its id. If the change must also trim intents, returns the last
    /// change whose intent it trims: a committed change before which no change is in progress.
    pub(crate) fn start(&mut self) -> (ChangeId, Option<ChangeId>) {
        let change = self.next;
        self.next.number += 1;
        self.under_way.insert(change);
        let first = self.under_way.first().copied().unwrap_or(change);
        let settled = self.done.range(..first).next_back().map(|(settled, _)| *settled);
        let trims = settled.filter(|_| !self.trimming);
        self.trimming |= trims.is_some();
        (change, trims)
    }

    /// Records that every member has committed a change. The change has trimmed the intents up to
    /// `trims`.
    pub(crate) fn committed(&mut self, change: ChangeId, undo_objects: UndoObjects, trims: Option<ChangeId>) {
        self.done.insert(change, undo_objects);
        self.committed = self.committed.max(change);
        if let Some(through) = trims {
            self.done = self.done.split_off(&through);
            self.done.remove(&through);
        }
        self.under_way.remove(&change);
        self.trim_ended(trims);
    }

    /// Records that no member has executed a change. Removes the dirty notes `dirty`, which only
    /// this change added.
    pub(crate) fn refused_by_all(&mut self, change: ChangeId, trims: Option<ChangeId>, dirty: &[ObjectId]) {
        self.dirty.retain(|oid| !dirty.contains(oid));
        self.under_way.remove(&change);
        self.trim_ended(trims);
    }

    /// Records that only some members may have a change, and whether a member has refused it. The
    /// change stays in progress, because the next interval decides about it.
    pub(crate) fn left_undecided(&mut self, change: ChangeId, trims: Option<ChangeId>, is_refused: bool) {
        if is_refused {
            self.refused.insert(change);
        }
        self.trim_ended(trims);
    }

    fn trim_ended(&mut self, trims: Option<ChangeId>) {
        self.trimming &= trims.is_none();
    }
}
