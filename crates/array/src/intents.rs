//! [`Intents`]: which transactions of a group are under way, and which are done and to be trimmed.

use std::collections::{BTreeMap, BTreeSet};

use store::ObjectId;

/// Numbers of undo objects of one transaction, by position: each is the index of an object in the
/// intent.
pub(crate) type UndoObjects = Vec<Vec<usize>>;

/// The intents of an interval.
#[derive(Default)]
pub(crate) struct Intents {
    /// Number of the interval.
    interval: u64,
    /// Number of the next transaction.
    next: u64,
    under_way: BTreeSet<u64>,
    /// Transactions that are done and not trimmed yet.
    done: BTreeMap<u64, UndoObjects>,
    /// A transaction that trims is under way.
    trimming: bool,
    /// Objects changed while a member is away.
    dirty: BTreeSet<ObjectId>,
}

impl Intents {
    pub(crate) fn new(interval: u64, dirty: BTreeSet<ObjectId>) -> Intents {
        Intents { interval, dirty, ..Intents::default() }
    }

    /// Notes that a transaction has this number: the next one has a higher number.
    pub(crate) fn number_used(&mut self, number: u64) {
        self.next = self.next.max(number + 1);
    }

    /// Adds a transaction of an earlier interval, of which the member at a position has undo
    /// objects.
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

    /// All transactions up to this number are done.
    pub(crate) fn settled(&self) -> u64 {
        self.under_way.first().copied().unwrap_or(self.next).saturating_sub(1)
    }

    /// Whether there is nothing to trim.
    pub(crate) fn is_trimmed(&self) -> bool {
        self.done.is_empty()
    }

    /// Number of undo objects on all members that no transaction has trimmed yet.
    pub(crate) fn undo_objects(&self) -> usize {
        self.done.values().flatten().map(Vec::len).sum()
    }

    /// Transactions up to a number that are done and not trimmed yet.
    pub(crate) fn done_through(&self, through: u64) -> impl Iterator<Item = (u64, &UndoObjects)> {
        self.done.range(..=through).map(|(number, undo_objects)| (*number, undo_objects))
    }

    /// Objects changed while a member is away.
    pub(crate) fn dirty(&self) -> &BTreeSet<ObjectId> {
        &self.dirty
    }

    /// Notes objects as dirty.
    pub(crate) fn note_dirty(&mut self, oids: impl IntoIterator<Item = ObjectId>) {
        self.dirty.extend(oids);
    }

    /// Starts a transaction; returns its number. If the transaction is to trim intents, also
    /// returns the number up to which it does.
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

    /// Every member has committed a transaction, which trimmed intents up to `trims`.
    pub(crate) fn committed(&mut self, number: u64, undo_objects: UndoObjects, trims: Option<u64>) {
        self.trim_ended(trims);
        self.under_way.remove(&number);
        self.done.insert(number, undo_objects);
        if let Some(through) = trims {
            self.done = self.done.split_off(&(through + 1));
        }
    }

    /// No member has changed anything: the objects that only this transaction noted as dirty are
    /// not.
    pub(crate) fn refused(&mut self, number: u64, trims: Option<u64>, dirty: &[ObjectId]) {
        self.trim_ended(trims);
        self.under_way.remove(&number);
        self.done.insert(number, Vec::new());
        self.dirty.retain(|oid| !dirty.contains(oid));
    }

    /// Some members may have a transaction. It stays under way: the next interval takes it back.
    pub(crate) fn left_open(&mut self, trims: Option<u64>) {
        self.trim_ended(trims);
    }

    fn trim_ended(&mut self, trims: Option<u64>) {
        self.trimming &= trims.is_none();
    }
}
