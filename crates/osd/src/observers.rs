//! [`Observers`]: requests that have seen a pending change of an object, and must not show it
//! before it is durable.

use std::collections::BTreeMap;
use std::task::Waker;

use crate::chain::ChainPosition;

/// What a request has seen of the pending changes of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SeenChange {
    /// The change is durable, so the request may show it.
    Durable,
    Pending,
    /// The change has failed, or its outcome is unknown. The request must look again.
    Withdrawn,
}

/// Number of an observer of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ObserverId {
    position: ChainPosition,
    number: u64,
}

/// The observers of one object, in the order of the changes that they have seen.
#[derive(Debug, Default)]
pub(crate) struct Observers {
    next: u64,
    waiting: BTreeMap<ObserverId, (SeenChange, Waker)>,
}

impl Observers {
    /// Adds an observer of the pending change at `position`.
    pub(crate) fn add(&mut self, position: ChainPosition) -> ObserverId {
        self.next += 1;
        let id = ObserverId { position, number: self.next };
        self.waiting.insert(id, (SeenChange::Pending, Waker::noop().clone()));
        id
    }

    /// Returns what has become of the change that an observer has seen. Wakes `waker` when this
    /// changes.
    pub(crate) fn poll(&mut self, id: ObserverId, waker: &Waker) -> SeenChange {
        let Some((seen, known)) = self.waiting.get_mut(&id) else { return SeenChange::Durable };
        known.clone_from(waker);
        *seen
    }

    /// Removes an observer.
    pub(crate) fn remove(&mut self, id: ObserverId) {
        self.waiting.remove(&id);
    }

    /// Records that the changes up to `position` are durable.
    pub(crate) fn durable(&mut self, position: ChainPosition) {
        let end = ObserverId { position, number: u64::MAX };
        for (seen, waker) in self.waiting.range_mut(..=end).map(|(_, slot)| slot) {
            if *seen == SeenChange::Pending {
                *seen = SeenChange::Durable;
                waker.wake_by_ref();
            }
        }
    }

    /// Records that the change at `position` has failed, so that all later pending changes will
    /// fail.
    pub(crate) fn withdrawn(&mut self, position: ChainPosition) {
        let first = ObserverId { position, number: 0 };
        for (seen, waker) in self.waiting.range_mut(first..).map(|(_, slot)| slot) {
            if *seen == SeenChange::Pending {
                *seen = SeenChange::Withdrawn;
                waker.wake_by_ref();
            }
        }
    }
}
