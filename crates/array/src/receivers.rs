//! [`Receivers`]: which targets could not receive objects of the group.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use uuid::Uuid;

/// Targets that were to receive objects of the group and could not. The group prefers other targets.
#[derive(Debug, Default)]
pub(crate) struct Receivers {
    /// Targets that had too little free space for the rebuild of a member.
    full: RefCell<BTreeSet<Uuid>>,
    /// Targets that could not receive the changes that they lacked at the beginning of an interval.
    unable: RefCell<BTreeSet<Uuid>>,
    /// Targets whose last rebuild has failed although its interval had not ended.
    not_rebuilt: RefCell<BTreeSet<Uuid>>,
    /// Position at which the search for a member to rebuild starts.
    next: Cell<usize>,
}

impl Receivers {
    /// Whether a target had too little space for a rebuild.
    pub(crate) fn is_full(&self, target: &Uuid) -> bool {
        self.full.borrow().contains(target)
    }

    /// Records that a target has too little space for a rebuild.
    pub(crate) fn fills(&self, target: Uuid) {
        self.full.borrow_mut().insert(target);
    }

    /// Reconsiders all targets that had too little space.
    pub(crate) fn reconsider_full(&self) {
        self.full.borrow_mut().clear();
    }

    /// Whether a target has refused changes that it lacked.
    pub(crate) fn is_unable(&self, target: &Uuid) -> bool {
        self.unable.borrow().contains(target)
    }

    /// Records that a target has refused changes that it lacked.
    pub(crate) fn refuses(&self, target: Uuid) {
        self.unable.borrow_mut().insert(target);
    }

    /// Reconsiders all targets that have refused changes.
    pub(crate) fn reconsider_unable(&self) {
        self.unable.borrow_mut().clear();
    }

    /// Whether the last rebuild on a target has failed.
    pub(crate) fn has_failed(&self, target: &Uuid) -> bool {
        self.not_rebuilt.borrow().contains(target)
    }

    /// Records that a rebuild on a target begins to copy objects, so the target has space again.
    pub(crate) fn begins(&self, target: &Uuid) {
        self.full.borrow_mut().remove(target);
    }

    /// Records that the member at a position was rebuilt.
    pub(crate) fn rebuilt(&self, target: &Uuid) {
        self.not_rebuilt.borrow_mut().remove(target);
    }

    /// Records that the rebuild of the member at a position has failed. `in_interval` says whether the
    /// interval of the rebuild has not ended, so that the target is the reason.
    pub(crate) fn failed(&self, position: usize, target: Uuid, in_interval: bool) {
        self.next.set(position + 1);
        if in_interval {
            self.not_rebuilt.borrow_mut().insert(target);
        }
    }

    /// Returns positions of `members` members in the order in which the group should try to rebuild
    /// them: first those after the last rebuild that has failed, so that this member does not block the
    /// rebuilds of the others.
    pub(crate) fn positions(&self, members: usize) -> impl Iterator<Item = usize> + use<> {
        let next = self.next.get();
        (next..next + members).map(move |position| position % members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_rebuild_lets_the_other_members_go_first() {
        let (receivers, target) = (Receivers::default(), Uuid::from_u128(1));
        assert!(receivers.positions(3).eq([0, 1, 2]));
        receivers.failed(1, target, false);
        assert!(receivers.positions(3).eq([2, 0, 1]) && !receivers.has_failed(&target));
        receivers.failed(2, target, true);
        assert!(receivers.positions(3).eq([0, 1, 2]) && receivers.has_failed(&target));
        receivers.rebuilt(&target);
        assert!(!receivers.has_failed(&target));
    }

    #[test]
    fn a_target_that_was_full_is_used_again_after_it_was_reconsidered() {
        let (receivers, target) = (Receivers::default(), Uuid::from_u128(1));
        receivers.fills(target);
        receivers.refuses(target);
        assert!(receivers.is_full(&target) && receivers.is_unable(&target));
        receivers.reconsider_full();
        assert!(!receivers.is_full(&target) && receivers.is_unable(&target));
        receivers.reconsider_unable();
        assert!(!receivers.is_unable(&target));
    }
}
