//! [`Intents`]: the changes of an interval that are in progress, and what the members store about
//! changes that have ended.

use std::collections::BTreeSet;
use std::rc::Rc;

use store::ObjectId;
use tokio::sync::Notify;

use crate::record::{ChangeId, IntentPlace};
use crate::sequence::Sequence;
use crate::slots::{SlotContent, Slots};

/// Number of bytes in undo objects, summed over all members, above which the group trims its slots.
const UNDO_MAX: u64 = 16 << 20;

/// The intents of an interval.
#[derive(Debug, Default)]
pub(crate) struct Intents {
    /// Number of the interval that these intents belong to.
    interval: u64,
    sequence: Sequence,
    slots: Slots,
    /// True while a change that trims slots is in progress.
    is_trimming: bool,
    /// Objects that have dirty notes, because they changed while a member was unavailable.
    dirty: BTreeSet<ObjectId>,
    /// Notified when a change ends.
    ended: Rc<Notify>,
}

/// A change that has started.
#[derive(Debug)]
pub(crate) struct StartedChange {
    pub(crate) change: ChangeId,
    /// A change up to which all changes are settled.
    pub(crate) settled: ChangeId,
    pub(crate) place: IntentPlace,
    /// What the members have in the slot of the change.
    pub(crate) before: SlotContent,
    /// The slots that the change trims, with their contents.
    pub(crate) trims: Vec<(IntentPlace, SlotContent)>,
    /// Whether the slot of the change had no content.
    is_slot_empty: bool,
}

/// The outcome of a change on the members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntentOutcome {
    /// Every member has committed the change.
    Committed,
    /// No member has executed the change.
    Refused,
    /// Only some members may have the change. A member may have refused it.
    Undecided { is_refused: bool },
}

impl Intents {
    /// Creates the intents of an interval.
    pub(crate) fn new(interval: u64, sequence: Sequence, slots: Slots, dirty: BTreeSet<ObjectId>) -> Intents {
        Intents { interval, sequence, slots, dirty, ..Intents::default() }
    }

    /// Number of the interval.
    pub(crate) fn interval(&self) -> u64 {
        self.interval
    }

    /// The numbers of the changes.
    pub(crate) fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Replaces these intents by those of the next interval.
    pub(crate) fn replace(&mut self, next: Intents) {
        self.ended.notify_waiters();
        *self = next;
    }

    /// Whether the undo objects take so much space that the group should trim its slots now.
    pub(crate) fn should_trim(&self) -> bool {
        self.slots.bytes() > UNDO_MAX && !self.is_trimming
    }

    /// Number of undo objects that can be trimmed, summed over all members.
    pub(crate) fn undo_objects(&self) -> usize {
        self.slots.undo_objects()
    }

    /// Objects that have dirty notes, because they changed while a member was unavailable.
    pub(crate) fn dirty(&self) -> &BTreeSet<ObjectId> {
        &self.dirty
    }

    /// Records that objects have dirty notes.
    pub(crate) fn note_dirty(&mut self, oids: impl IntoIterator<Item = ObjectId>) {
        self.dirty.extend(oids);
    }

    /// Returns a handle that is notified whenever a change ends.
    pub(crate) fn ended(&self) -> Rc<Notify> {
        Rc::clone(&self.ended)
    }

    /// Starts a change. `trims` says whether it removes the undo objects of all slots that no change
    /// in progress uses, with the intents in these slots.
    pub(crate) fn start(&mut self, trims: bool) -> StartedChange {
        let settled = self.sequence.settled();
        let change = self.sequence.start();
        let place = IntentPlace::of(change);
        let before = self.slots.take(place);
        self.is_trimming |= trims;
        let trims = if trims { self.slots.take_undo_objects() } else { Vec::new() };
        let is_slot_empty = before.is_none();
        StartedChange { change, settled, place, before: before.unwrap_or_default(), trims, is_slot_empty }
    }

    /// Records the outcome of a change, with its undo objects, and the dirty notes that only this
    /// change added. Returns false if the members have other contents in the slots than this type
    /// knows; then the interval must end.
    pub(crate) fn end(
        &mut self,
        started: StartedChange,
        undo_objects: SlotContent,
        dirty: &[ObjectId],
        outcome: IntentOutcome,
    ) -> bool {
        let StartedChange { change, place, before, trims, is_slot_empty, .. } = started;
        self.is_trimming &= trims.is_empty();
        self.ended.notify_waiters();
        match outcome {
            IntentOutcome::Committed => {
                self.sequence.commit(change);
                self.slots.put(place, undo_objects);
                true
            }
            IntentOutcome::Refused => {
                self.sequence.drop_refused(change);
                self.dirty.retain(|oid| !dirty.contains(oid));
                if !is_slot_empty {
                    self.slots.put(place, before);
                }
                // Later changes may have assumed that the other slots are empty.
                trims.is_empty()
            }
            IntentOutcome::Undecided { is_refused } => {
                self.sequence.leave_undecided(change, is_refused);
                false
            }
        }
    }
}
