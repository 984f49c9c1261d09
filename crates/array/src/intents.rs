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
/// Maximum number of slots that one change trims, so that it delays other changes only briefly.
const TRIM_MAX: usize = 8;

/// The intents of an interval. This type is a state machine without I/O. Its events are the start and
/// the end of a change ([`start`](Self::start), [`end`](Self::end)).
#[derive(Debug, Default)]
pub(crate) struct Intents {
    /// Number of the interval that these intents belong to.
    interval: u64,
    sequence: Sequence,
    slots: Slots,
    /// The slots that changes in progress trim. No change may use them.
    trimming: BTreeSet<IntentPlace>,
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

impl Intents {
    /// Creates the intents of an interval.
    pub(crate) fn new(interval: u64, sequence: Sequence, slots: Slots, dirty: DirtyNotes) -> Intents {
        Intents { interval, sequence, slots, trimming: BTreeSet::new(), dirty }
    }

    /// Number of the interval.
    pub(crate) fn interval(&self) -> u64 {
        self.interval
    }

    /// The numbers of the changes.
    pub(crate) fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Records that too few members have intact data of these changes of earlier intervals. The next
    /// decision undoes them.
    pub(crate) fn give_up(&mut self, changes: &BTreeSet<ChangeId>) {
        self.sequence.give_up(changes);
    }

    /// Whether the next change may start, because its slot is free.
    pub(crate) fn may_start(&self) -> bool {
        self.sequence.may_start() && !self.trimming.contains(&IntentPlace::of(self.sequence.next()))
    }

    /// Whether the group should trim its slots now, because the undo objects take much space.
    pub(crate) fn should_trim(&self) -> bool {
        self.slots.bytes() > UNDO_MAX && self.trimming.is_empty() && self.can_trim()
    }

    /// Whether undo objects of settled changes can be trimmed.
    pub(crate) fn can_trim(&self) -> bool {
        self.slots.can_trim(self.sequence.settled())
    }

    /// Number of undo objects of finished changes, summed over all members.
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
        assert!(!self.trimming.contains(&place), "the slot of {change:?} is trimmed");
        let before = self.slots.take(place);
        let is_slot_empty = before.is_none();
        let before = before.unwrap_or_default();
        assert!(before.change() <= settled, "a change replaces only settled ones");
        StartedChange { change, settled, place, before, trims: Vec::new(), dirty, is_slot_empty }
    }

    /// Starts a change that removes the undo objects of some slots that no change in progress uses,
    /// with the intents in these slots.
    pub(crate) fn start_trim(&mut self) -> StartedChange {
        let started = self.start([].into_iter());
        let trims = self.slots.take_trimmable(started.settled, TRIM_MAX);
        self.trimming.extend(trims.iter().map(|(place, _)| *place));
        StartedChange { trims, ..started }
    }

    /// Ends a change, which has put `content` into its slot if it was committed. If the change is
    /// undecided, the interval must end.
    pub(crate) fn end(&mut self, started: StartedChange, content: SlotContent, outcome: IntentOutcome) {
        let StartedChange { change, place, before, trims, dirty, is_slot_empty, .. } = started;
        self.trimming.retain(|place| !trims.iter().any(|(trimmed, _)| trimmed == place));
        match outcome {
            IntentOutcome::Committed => {
                self.sequence.commit(change);
                self.slots.put(place, content);
            }
            IntentOutcome::Refused => {
                self.sequence.drop_refused(change);
                self.dirty.take_back(&dirty);
                let slot = (place, before);
                let emptied = trims.into_iter().chain((!is_slot_empty).then_some(slot));
                emptied.for_each(|(place, content)| self.slots.put(place, content));
            }
            IntentOutcome::Undecided { is_refused } => {
                self.sequence.leave_undecided(change, is_refused);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::record::{Intent, SLOTS, Touched, Undo};

    fn intents() -> Intents {
        let id = |number| ChangeId { term: 1, number };
        Intents::new(0, Sequence::new(id(1), ChangeId::default()), Slots::default(), DirtyNotes::default())
    }

    /// Content with one undo object.
    fn content(change: ChangeId, bytes: u64) -> SlotContent {
        let undo = Undo::Restore { size: 4096, saved: vec![(0, 4096)] };
        let (oid, omap_keys, omap_ranges) = (ObjectId::new("o").unwrap(), Vec::new(), Vec::new());
        let touched = Touched { oid, undo, xattrs: false, omap_keys, omap_ranges };
        let mut content = SlotContent::new(change);
        content.add(change, 0, &Intent { objects: vec![touched] }, bytes);
        content
    }

    fn start(intents: &mut Intents) -> StartedChange {
        intents.start([].into_iter())
    }

    fn commit(intents: &mut Intents, started: StartedChange, bytes: u64) {
        let content = content(started.change, bytes);
        intents.end(started, content, IntentOutcome::Committed);
    }

    #[test]
    fn a_refused_change_leaves_the_slot_and_the_notes_as_they_were() {
        let mut intents = intents();
        let oid = ObjectId::new("o").unwrap();
        for _ in 0..SLOTS {
            let started = start(&mut intents);
            commit(&mut intents, started, 1);
        }
        let refused = intents.start([&oid, &oid].into_iter());
        assert_eq!((refused.before.undo_objects(0), refused.dirty.len()), (&[0][..], 1));
        assert_eq!((intents.undo_objects(), intents.dirty().oids().len()), (127, 1));
        let content = content(refused.change, 5);
        intents.end(refused, content, IntentOutcome::Refused);
        assert_eq!((intents.undo_objects(), intents.dirty().oids().len()), (128, 0));
    }

    #[test]
    fn a_trim_takes_no_change_that_is_not_settled() {
        let mut intents = intents();
        let [first, second] = [(); 2].map(|()| start(&mut intents));
        commit(&mut intents, second, UNDO_MAX + 1);
        assert!(!intents.can_trim() && !intents.should_trim());
        assert_eq!(intents.start_trim().trims, [], "an earlier change is in progress");
        commit(&mut intents, first, 1);
        assert!(intents.should_trim());
        assert_eq!(intents.start_trim().trims.len(), 2);
        assert!(!intents.should_trim());
    }

    #[test]
    fn no_change_uses_a_slot_that_is_being_trimmed() {
        let mut intents = intents();
        for _ in 0..SLOTS - 1 {
            let started = start(&mut intents);
            commit(&mut intents, started, 1);
        }
        let trim = intents.start_trim();
        assert_eq!((trim.trims.len(), intents.undo_objects()), (TRIM_MAX, 127 - TRIM_MAX));
        assert!(!intents.may_start(), "the slot of the next change is being trimmed");
        intents.end(trim, SlotContent::default(), IntentOutcome::Refused);
        assert_eq!(intents.undo_objects(), 127, "a refused trim has removed nothing");
        let trim = intents.start_trim();
        let content = SlotContent::new(trim.change);
        intents.end(trim, content, IntentOutcome::Committed);
        assert!(intents.may_start());
    }

    #[test]
    fn no_later_change_is_trimmed_after_an_undecided_one() {
        let mut intents = intents();
        let [undecided, later] = [(); 2].map(|()| start(&mut intents));
        let outcome = IntentOutcome::Undecided { is_refused: true };
        intents.end(undecided, SlotContent::default(), outcome);
        commit(&mut intents, later, 1);
        assert_eq!((intents.sequence().refused().len(), intents.can_trim()), (1, false));
    }

    #[derive(Debug, Clone)]
    enum Event {
        Start,
        Trim,
        End(usize, bool),
    }

    proptest! {
        #[test]
        fn the_slots_follow_the_outcomes_of_changes_and_trims(
            events in proptest::collection::vec(
                prop_oneof![
                    4 => Just(Event::Start),
                    1 => Just(Event::Trim),
                    4 => (0..20usize, any::<bool>()).prop_map(|(at, commits)| Event::End(at, commits)),
                ],
                1..600,
            ),
        ) {
            let (mut intents, mut open) = (intents(), Vec::new());
            // The undo objects that the members store, by place.
            let mut stored: BTreeMap<IntentPlace, ChangeId> = BTreeMap::new();
            for event in events {
                match event {
                    Event::Start | Event::Trim if !intents.may_start() => {}
                    Event::Start => open.push((start(&mut intents), true)),
                    Event::Trim => open.push((intents.start_trim(), false)),
                    Event::End(at, commits) if !open.is_empty() => {
                        let (started, has_undo) = open.remove(at % open.len());
                        prop_assert_eq!(
                            started.before.undo_objects(0).len(),
                            usize::from(stored.contains_key(&started.place))
                        );
                        let is_right = |(place, content): &(IntentPlace, SlotContent)| {
                            let change = content.change();
                            change <= started.settled && stored.get(place) == Some(&change)
                        };
                        prop_assert!(started.trims.iter().all(is_right));
                        let mut content = content(started.change, 1);
                        if !has_undo {
                            content = SlotContent::new(started.change);
                        }
                        let outcome = match commits {
                            true => IntentOutcome::Committed,
                            false => IntentOutcome::Refused,
                        };
                        if commits {
                            stored.remove(&started.place);
                            stored.retain(|place, _| !started.trims.iter().any(|(trimmed, _)| trimmed == place));
                            if has_undo {
                                stored.insert(started.place, started.change);
                            }
                        }
                        intents.end(started, content, outcome);
                    }
                    Event::End(..) => {}
                }
            }
            for (started, _) in open {
                intents.end(started, SlotContent::default(), IntentOutcome::Refused);
            }
            prop_assert_eq!(intents.undo_objects(), stored.len());
        }
    }
}
