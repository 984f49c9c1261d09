//! [`Sequence`]: the numbers of an interval's changes, and which changes are settled.

use std::collections::BTreeSet;

use crate::record::{ChangeId, SLOTS};

/// The changes of an interval in their order. This type is pure state.
///
/// A change is *settled* when no decision can undo it any more: every member has committed it, and no
/// earlier change is in progress.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    next: ChangeId,
    in_progress: BTreeSet<ChangeId>,
    /// Changes that every member has committed, and that are not settled.
    committed: BTreeSet<ChangeId>,
    /// The last change that is settled.
    settled: ChangeId,
    /// The last change that every member has committed.
    last_committed: ChangeId,
    /// Changes that only some members may have because a member has refused them, or because too few
    /// members have them intact.
    refused: BTreeSet<ChangeId>,
}

impl Sequence {
    /// Creates the sequence of an interval, whose first change is `next`. All changes of earlier
    /// intervals are settled; `settled` is the last one that the group keeps.
    pub(crate) fn new(next: ChangeId, settled: ChangeId) -> Sequence {
        assert!(settled < next, "the numbers of changes only grow");
        Sequence { next, settled, last_committed: settled, ..Sequence::default() }
    }

    /// Id of the next change.
    pub(crate) fn next(&self) -> ChangeId {
        self.next
    }

    /// The last settled change. All changes up to it are settled.
    pub(crate) fn settled(&self) -> ChangeId {
        self.settled
    }

    /// The last change that all members have committed. Earlier changes may still be in progress.
    pub(crate) fn last_committed(&self) -> ChangeId {
        self.last_committed
    }

    /// The changes that only some members may have because a member has refused them, or because too
    /// few members have them intact.
    pub(crate) fn refused(&self) -> &BTreeSet<ChangeId> {
        &self.refused
    }

    /// Whether the next change may start: the slot of its intent contains a settled change.
    pub(crate) fn may_start(&self) -> bool {
        self.in_progress.first().is_none_or(|first| self.next.number - first.number < SLOTS)
    }

    /// Starts the next change and returns its id.
    pub(crate) fn start(&mut self) -> ChangeId {
        assert!(self.may_start(), "the slot of change {:?} is in use", self.next);
        let change = self.next;
        self.next.number += 1;
        self.in_progress.insert(change);
        change
    }

    /// Records that every member has committed a change.
    pub(crate) fn commit(&mut self, change: ChangeId) {
        self.end(change);
        self.last_committed = self.last_committed.max(change);
        self.committed.insert(change);
        self.settle();
    }

    /// Records that no member has executed a change.
    pub(crate) fn drop_refused(&mut self, change: ChangeId) {
        self.end(change);
        self.settle();
    }

    /// Records that only some members may have a change, and whether a member has refused it. The
    /// change stays in progress, because the next interval decides about it.
    pub(crate) fn leave_undecided(&mut self, change: ChangeId, is_refused: bool) {
        if is_refused {
            self.refused.insert(change);
        }
    }

    /// Records that too few members have intact data of these changes.
    pub(crate) fn give_up(&mut self, changes: &BTreeSet<ChangeId>) {
        self.refused.extend(changes);
    }

    fn end(&mut self, change: ChangeId) {
        let was_in_progress = self.in_progress.remove(&change);
        assert!(was_in_progress, "change {change:?} ends only once");
    }

    fn settle(&mut self) {
        let open = match self.in_progress.first() {
            Some(first) => self.committed.split_off(first),
            None => BTreeSet::new(),
        };
        let settled = std::mem::replace(&mut self.committed, open);
        if let Some(&last) = settled.last() {
            assert!(self.settled < last, "a change is settled after all earlier ones");
            self.settled = last;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(number: u64) -> ChangeId {
        ChangeId { term: 3, number }
    }

    fn sequence() -> Sequence {
        Sequence::new(id(10), ChangeId { term: 2, number: 7 })
    }

    #[test]
    fn a_change_is_settled_when_no_earlier_change_is_in_progress() {
        let mut changes = sequence();
        let [a, b, c] = [(); 3].map(|()| changes.start());
        changes.commit(b);
        assert_eq!((changes.settled().number, changes.last_committed()), (7, b));
        changes.commit(a);
        assert_eq!(changes.settled(), b);
        changes.drop_refused(c);
        assert_eq!(changes.settled(), b, "no member has a refused change");
    }

    #[test]
    fn an_undecided_change_lets_no_later_change_settle() {
        let mut changes = sequence();
        let [a, b] = [(); 2].map(|()| changes.start());
        changes.leave_undecided(a, true);
        changes.commit(b);
        assert_eq!((changes.settled().number, changes.refused().len()), (7, 1));
    }

    #[test]
    fn as_many_changes_are_in_progress_as_there_are_slots() {
        let mut changes = sequence();
        let first = changes.start();
        let mut last = first;
        while changes.may_start() {
            last = changes.start();
        }
        assert_eq!(last.number - first.number + 1, SLOTS);
        changes.commit(last);
        assert!(!changes.may_start(), "the first change still needs its slot");
        changes.commit(first);
        assert!(changes.may_start());
    }

    #[derive(Debug, Clone)]
    enum Event {
        Start,
        Commit(usize),
        Refuse(usize),
    }

    proptest! {
        #[test]
        fn settled_changes_grow_and_precede_all_changes_in_progress(
            events in proptest::collection::vec(
                prop_oneof![
                    Just(Event::Start),
                    (0..40usize).prop_map(Event::Commit),
                    (0..40usize).prop_map(Event::Refuse)
                ],
                1..400,
            ),
        ) {
            let (mut changes, mut open, mut committed) = (sequence(), Vec::new(), BTreeSet::new());
            let mut settled = changes.settled();
            for event in events {
                match event {
                    Event::Start if changes.may_start() => open.push(changes.start()),
                    Event::Commit(at) if !open.is_empty() => {
                        let change = open.swap_remove(at % open.len());
                        committed.insert(change);
                        changes.commit(change);
                    }
                    Event::Refuse(at) if !open.is_empty() => {
                        changes.drop_refused(open.swap_remove(at % open.len()));
                    }
                    _ => {}
                }
                let first = open.iter().min().copied().unwrap_or(changes.next());
                let expected = committed.range(..first).next_back().copied().unwrap_or(settled);
                prop_assert!(changes.settled() >= settled);
                prop_assert_eq!(changes.settled(), expected);
                settled = changes.settled();
            }
        }
    }
}
