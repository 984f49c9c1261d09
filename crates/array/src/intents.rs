//! [`Intents`]: the changes of an interval that are in progress, and what the members store about
//! changes that have ended.

use std::collections::BTreeSet;

use store::ObjectId;

use crate::dirty::DirtyNotes;
use crate::record::{ChangeId, IntentPlace};
use crate::sequence::Sequence;
use crate::slots::{SlotContent, Slots};

/// Number of bytes in undo objects, summed over all members, above which the group trims its slots.
const UNDO_MAX: u64 = 16 << 20;

/// The intents of an interval. This type is a state machine without I/O: its events are the start and
/// the end of a change ([`start`](Self::start), [`end`](Self::end)), and the caller carries out the
/// [`IntentActions`].
#[derive(Debug, Default)]
pub(crate) struct Intents {
    /// Number of the interval that these intents belong to.
    interval: u64,
    sequence: Sequence,
    slots: Slots,
    /// True while a change that trims slots is in progress.
    is_trimming: bool,
    dirty: DirtyNotes,
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
    /// The objects that get dirty notes with this change.
    pub(crate) dirty: Vec<ObjectId>,
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

/// What the group does when a change has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct IntentActions {
    /// The interval ends: the members disagree, or may have other contents in their slots than the
    /// group knows.
    pub(crate) ends_interval: bool,
    /// The group trims its slots, because the undo objects take much space.
    pub(crate) trims: bool,
}

impl Intents {
    /// Creates the intents of an interval.
    pub(crate) fn new(interval: u64, sequence: Sequence, slots: Slots, dirty: DirtyNotes) -> Intents {
        Intents { interval, sequence, slots, is_trimming: false, dirty }
    }

    /// Number of the interval.
    pub(crate) fn interval(&self) -> u64 {
        self.interval
    }

    /// The numbers of the changes.
    pub(crate) fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Number of undo objects that can be trimmed, summed over all members.
    pub(crate) fn undo_objects(&self) -> usize {
        self.slots.undo_objects()
    }

    /// The objects that have dirty notes.
    pub(crate) fn dirty(&self) -> &DirtyNotes {
        &self.dirty
    }

    /// Like [`dirty`](Self::dirty).
    pub(crate) fn dirty_mut(&mut self) -> &mut DirtyNotes {
        &mut self.dirty
    }

    /// Starts a change, which writes dirty notes for those of the objects `noted` that have none.
    pub(crate) fn start<'a>(&mut self, noted: impl Iterator<Item = &'a ObjectId>) -> StartedChange {
        let new: BTreeSet<&ObjectId> = noted.filter(|oid| !self.dirty.oids().contains(*oid)).collect();
        let dirty: Vec<ObjectId> = new.into_iter().cloned().collect();
        self.dirty.add(&dirty);
        let settled = self.sequence.settled();
        let change = self.sequence.start();
        assert!(settled < change, "the numbers of changes only grow");
        let place = IntentPlace::of(change);
        let before = self.slots.take(place);
        let is_slot_empty = before.is_none();
        let before = before.unwrap_or_default();
        StartedChange { change, settled, place, before, trims: Vec::new(), dirty, is_slot_empty }
    }

    /// Starts a change that removes the undo objects of all slots that no change in progress uses, with
    /// the intents in these slots.
    pub(crate) fn start_trim(&mut self) -> StartedChange {
        let started = self.start([].into_iter());
        self.is_trimming = true;
        StartedChange { trims: self.slots.take_undo_objects(), ..started }
    }

    /// Ends a change, which has put `content` into its slot if it was committed.
    pub(crate) fn end(
        &mut self,
        started: StartedChange,
        content: SlotContent,
        outcome: IntentOutcome,
    ) -> IntentActions {
        let StartedChange { change, place, before, trims, dirty, is_slot_empty, .. } = started;
        self.is_trimming &= trims.is_empty();
        let mut ends_interval = false;
        match outcome {
            IntentOutcome::Committed => {
                self.sequence.commit(change);
                self.slots.put(place, content);
            }
            IntentOutcome::Refused => {
                self.sequence.drop_refused(change);
                self.dirty.take_back(&dirty);
                if !is_slot_empty {
                    self.slots.put(place, before);
                }
                // Later changes may have assumed that the trimmed slots are empty.
                ends_interval = !trims.is_empty();
            }
            IntentOutcome::Undecided { is_refused } => {
                self.sequence.leave_undecided(change, is_refused);
                ends_interval = true;
            }
        }
        let trims = self.slots.bytes() > UNDO_MAX && !self.is_trimming && !ends_interval;
        IntentActions { ends_interval, trims }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intents() -> Intents {
        let id = |number| ChangeId { term: 1, number };
        Intents::new(0, Sequence::new(id(1), ChangeId::default()), Slots::default(), DirtyNotes::default())
    }

    fn content(bytes: u64) -> SlotContent {
        let mut content = SlotContent::default();
        content.add(0, vec![0], bytes);
        content
    }

    fn start(intents: &mut Intents) -> StartedChange {
        intents.start([].into_iter())
    }

    #[test]
    fn a_refused_change_leaves_the_slot_and_the_notes_as_they_were() {
        let mut intents = intents();
        let oid = ObjectId::new("o").unwrap();
        for _ in 0..crate::record::SLOTS {
            let started = start(&mut intents);
            intents.end(started, content(1), IntentOutcome::Committed);
        }
        let refused = intents.start([&oid, &oid].into_iter());
        assert_eq!((refused.before.undo_objects(0), refused.dirty.len()), (&[0][..], 1));
        assert_eq!((intents.undo_objects(), intents.dirty().oids().len()), (127, 1));
        let actions = intents.end(refused, content(5), IntentOutcome::Refused);
        assert_eq!(actions, IntentActions::default());
        assert_eq!((intents.undo_objects(), intents.dirty().oids().len()), (128, 0));
    }

    #[test]
    fn large_undo_objects_are_trimmed_by_one_change_at_a_time() {
        let mut intents = intents();
        let [first, second] = [(); 2].map(|()| start(&mut intents));
        assert!(intents.end(first, content(UNDO_MAX + 1), IntentOutcome::Committed).trims);
        assert!(intents.end(second, content(1), IntentOutcome::Committed).trims, "no trim has started");
        let trim = intents.start_trim();
        assert_eq!((trim.trims.len(), intents.undo_objects()), (2, 0));
        let later = start(&mut intents);
        assert!(!intents.end(later, content(UNDO_MAX + 1), IntentOutcome::Committed).trims);
        let actions = intents.end(trim, SlotContent::default(), IntentOutcome::Committed);
        assert_eq!(actions, IntentActions { ends_interval: false, trims: true });
        let trim = intents.start_trim();
        assert!(intents.end(trim, SlotContent::default(), IntentOutcome::Refused).ends_interval);
    }

    #[test]
    fn an_undecided_change_ends_the_interval() {
        let mut intents = intents();
        let started = start(&mut intents);
        let outcome = IntentOutcome::Undecided { is_refused: true };
        assert!(intents.end(started, content(1), outcome).ends_interval);
        assert_eq!(intents.sequence().refused().len(), 1);
    }
}
