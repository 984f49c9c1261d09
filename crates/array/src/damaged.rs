//! [`Damaged`]: the set of fragments that could not be read and must be repaired.

use std::cell::RefCell;
use std::collections::BTreeSet;

use store::ObjectId;

/// Fragments that could not be read, by object and position.
#[derive(Default)]
pub(crate) struct Damaged(RefCell<BTreeSet<(ObjectId, usize)>>);

impl Damaged {
    pub(crate) fn add(&self, oid: &ObjectId, position: usize) {
        self.0.borrow_mut().insert((oid.clone(), position));
    }

    pub(crate) fn remove(&self, oid: &ObjectId, position: usize) {
        self.0.borrow_mut().remove(&(oid.clone(), position));
    }

    /// Removes and returns all damaged fragments.
    pub(crate) fn take(&self) -> BTreeSet<(ObjectId, usize)> {
        std::mem::take(&mut *self.0.borrow_mut())
    }

    /// Positions of an object's damaged fragments.
    pub(crate) fn positions(&self, oid: &ObjectId) -> Vec<usize> {
        self.0.borrow().iter().filter(|(damaged, _)| damaged == oid).map(|(_, position)| *position).collect()
    }
}
