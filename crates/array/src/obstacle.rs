//! [`Obstacle`]: why a group has no open interval.

use std::cell::{Cell, RefCell};

use uuid::Uuid;

/// What the last decision of a group has lacked.
#[derive(Debug, Default)]
pub(crate) struct Obstacle {
    /// The targets that the group waits for; `None` before the first decision.
    waits_for: RefCell<Option<Vec<Uuid>>>,
    /// Whether too few available targets have objects of the group.
    lacks_objects: Cell<bool>,
}

impl Obstacle {
    /// Records that a decision was possible and carried out.
    pub(crate) fn overcome(&self) {
        self.meets(Vec::new(), false);
    }

    /// Records that no decision was possible.
    pub(crate) fn meets(&self, waits_for: Vec<Uuid>, lacks_objects: bool) {
        self.waits_for.replace(Some(waits_for));
        self.lacks_objects.set(lacks_objects);
    }

    /// The targets that the group waits for, because its last decision has failed; `None` before the
    /// first decision.
    pub(crate) fn waits_for(&self) -> Option<Vec<Uuid>> {
        self.waits_for.borrow().clone()
    }

    /// Whether the last decision has failed, and too few available targets have objects of the group.
    pub(crate) fn lacks_objects(&self) -> bool {
        self.lacks_objects.get()
    }
}
