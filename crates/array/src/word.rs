//! [`OperatorsWord`]: the targets that a group need not wait for, because an operator has accepted
//! their loss.

use std::cell::Cell;
use std::rc::Rc;

use uuid::Uuid;

type TargetFilter = Rc<dyn Fn(&Uuid) -> bool>;

/// The targets that count as lost for a group. The group acts on the word of an operator only for its
/// first interval, and for one more interval after each new word. It does not act on the word later,
/// because the operator has not accepted later losses.
pub(crate) struct OperatorsWord {
    is_forgotten: TargetFilter,
    has_left: TargetFilter,
    is_heeded: Cell<bool>,
}

impl OperatorsWord {
    /// See [`GroupOptions`](crate::GroupOptions) for the arguments.
    pub(crate) fn new(is_forgotten: TargetFilter, has_left: TargetFilter) -> OperatorsWord {
        OperatorsWord { is_forgotten, has_left, is_heeded: Cell::new(true) }
    }

    /// Determines whether the group acts on the operator's word.
    pub(crate) fn heed(&self, is_heeded: bool) {
        self.is_heeded.set(is_heeded);
    }

    /// Returns whether a target counts as lost.
    pub(crate) fn is_lost(&self, target: &Uuid) -> bool {
        (self.has_left)(target) || self.is_heeded.get() && (self.is_forgotten)(target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_has_left_is_always_lost_and_a_forgotten_one_only_while_the_word_is_heeded() {
        let only = |n: u128| Rc::new(move |uuid: &Uuid| uuid.as_u128() == n) as TargetFilter;
        let word = OperatorsWord::new(only(1), only(2));
        let lost = || [1, 2, 3].map(|n| word.is_lost(&Uuid::from_u128(n)));
        assert_eq!(lost(), [true, true, false]);
        word.heed(false);
        assert_eq!(lost(), [false, true, false]);
        word.heed(true);
        assert_eq!(lost(), [true, true, false]);
    }
}
