//! [`Rebuilds`]: progress of the osd's rebuilds.

use std::cell::RefCell;

use array::Rebuilt;
use uuid::Uuid;
use wire::RebuildStatus;

/// State of the osd's rebuilds, of which one runs at a time.
#[derive(Default)]
pub(crate) struct Rebuilds {
    /// Number of objects and bytes rebuilt since the osd started.
    rebuilt: RefCell<Rebuilt>,
    /// Pool and target of the running rebuild.
    under_way: RefCell<Option<(String, Uuid)>>,
    last_failure: RefCell<Option<String>>,
}

impl Rebuilds {
    /// Returns the counters that the rebuild of a group increments.
    pub(crate) fn progress(&self) -> &RefCell<Rebuilt> {
        &self.rebuilt
    }

    pub(crate) fn begin(&self, pool: &str, target: Uuid) {
        *self.under_way.borrow_mut() = Some((pool.to_owned(), target));
    }

    pub(crate) fn end(&self) {
        *self.under_way.borrow_mut() = None;
    }

    pub(crate) fn failed(&self, why: String) {
        *self.last_failure.borrow_mut() = Some(why);
    }

    /// Returns the state of the rebuilds, as the node's status shows it. `rate_limit` is in bytes
    /// per second; 0 means no limit.
    pub(crate) fn status(&self, rate_limit: u64) -> RebuildStatus {
        let rebuilt = *self.rebuilt.borrow();
        let (pool, target) = self.under_way.borrow().clone().unzip();
        RebuildStatus {
            target,
            pool,
            objects: rebuilt.objects,
            bytes: rebuilt.bytes,
            rate_limit,
            last_failure: self.last_failure.borrow().clone(),
        }
    }
}
