//! [`Intents`]: the transactions of a group that are in progress, and the finished transactions
//! whose intents must be removed (*trimmed*).

use std::collections::{BTreeMap, BTreeSet};

use store::ObjectId;

/// The undo objects of one transaction, by position. Each undo object is identified by the index of
/// its object in the intent.
pub(crate) type UndoObjects = Vec<Vec<usize>>;

/// The intents of an interval.
#[derive(Default)]
pub(crate) struct Intents {
    /// Number of the interval that these intents belong to.
    interval: u64,
    /// Number of the next transaction.
    next: u64,
    under_way: BTreeSet<u64>,
    /// Finished transactions whose intents are not trimmed yet.
    done: BTreeMap<u64, UndoObjects>,
    /// True while a transaction that trims intents is in progress.
    trimming: bool,
    /// Objects that have dirty notes, because they changed while a member was unavailable.
    dirty: BTreeSet<ObjectId>,
}

impl Intents {
    pub(crate) fn new(interval: u64, dirty: BTreeSet<ObjectId>) -> Intents {
        Intents { interval, dirty, ..Intents::default() }
    }

    /// Records that a transaction has used this number. Later transactions get higher numbers.
    pub(crate) fn number_used(&mut self, number: u64) {
        self.next = self.next.max(number + 1);
    }

    /// Adds a finished transaction of an earlier interval. The member at `position` has the undo
    /// objects `kept`.
    pub(crate) fn add_done(&mut self, number: u64, position: usize, members: usize, kept: Vec<usize>) {
        self.done.entry(number).or_insert_with(|| vec![Vec::new(); members])[position] = kept;
    }

    /// Number of the interval.
    pub(crate) fn interval(&self) -> u64 {
        self.interval
    }

    /// Number of the next transaction.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Highest number up to which all transactions are finished.
    pub(crate) fn settled(&self) -> u64 {
        self.under_way.first().copied().unwrap_or(self.next).saturating_sub(1)
    }

    /// Returns true if no finished transaction has an intent that must be trimmed.
    pub(crate) fn is_trimmed(&self) -> bool {
        self.done.is_empty()
    }

    /// Number of undo objects that are not removed yet, summed over all members.
    pub(crate) fn undo_objects(&self) -> usize {
        self.done.values().flatten().map(Vec::len).sum()
    }

    /// Finished transactions up to number `through` whose intents are not trimmed yet.
    pub(crate) fn done_through(&self, through: u64) -> impl Iterator<Item = (u64, &UndoObjects)> {
        self.done.range(..=through).map(|(number, undo_objects)| (*number, undo_objects))
    }

    /// Objects that have dirty notes, because they changed while a member was unavailable.
    pub(crate) fn dirty(&self) -> &BTreeSet<ObjectId> {
        &self.dirty
    }

    /// Records that objects have dirty notes.
    pub(crate) fn note_dirty(&mut self, oids: impl IntoIterator<Item = ObjectId>) {
        self.dirty.extend(oids);
    }

    /// Starts a transaction and returns its number. If the transaction must also trim intents,
    /// returns the highest intent number to trim.
    pub(crate) fn start(&mut self) -> (u64, Option<u64>) {
        let number = self.next;
        self.next += 1;
        self.under_way.insert(number);
        let settled = self.settled();
        let has_settled = self.done.first_key_value().is_some_and(|(first, _)| *first <= settled);
        let trims = (!self.trimming && has_settled).then_some(settled);
        self.trimming |= trims.is_some();
        (number, trims)
    }

    /// Records that every member has committed a transaction. The transaction has trimmed the
    /// intents up to number `trims`.
    pub(crate) fn committed(&mut self, number: u64, undo_objects: UndoObjects, trims: Option<u64>) {
        self.trim_ended(trims);
        self.under_way.remove(&number);
        self.done.insert(number, undo_objects);
        if let Some(through) = trims {
            self.done = self.done.split_off(&(through + 1));
        }
    }

    /// Records that no member has executed transaction `number`. Removes the dirty notes `dirty`,
    /// which only this transaction added.
    pub(crate) fn refused(&mut self, number: u64, trims: Option<u64>, dirty: &[ObjectId]) {
        self.trim_ended(trims);
        self.under_way.remove(&number);
        self.done.insert(number, Vec::new());
        self.dirty.retain(|oid| !dirty.contains(oid));
    }

    /// Records that only some members may have a transaction. The transaction stays in progress
    /// until the next interval rolls it back.
    pub(crate) fn left_open(&mut self, trims: Option<u64>) {
        self.trim_ended(trims);
    }

    fn trim_ended(&mut self, trims: Option<u64>) {
        self.trimming &= trims.is_none();
    }
}
