//! [`Terms`]: the terms of a group's records that were heard of, and the next one.

use std::cell::{Cell, Ref, RefCell};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::record::GroupRecord;

/// Least distance of a term from all that members may have that were declared lost. In units of
/// this step the term is at least the number of seconds since 1970, so that the last declaration
/// counts.
const LOSS_STEP: u64 = 1 << 32;

/// The terms of a group.
#[derive(Default)]
pub(crate) struct Terms {
    /// Highest term that was ever heard of, or proposed: each new one is beyond that.
    highest: Cell<u64>,
    /// Record of the last interval: up to that one nothing can have happened elsewhere.
    lineage: RefCell<Option<GroupRecord>>,
}

impl Terms {
    /// Highest term that was heard of.
    pub(crate) fn highest(&self) -> u64 {
        self.highest.get()
    }

    /// Notes a term that a member has, or that is proposed.
    pub(crate) fn heard_of(&self, term: u64) {
        self.highest.set(self.highest.get().max(term));
    }

    /// A term beyond all that were heard of. `on_word`: an operator has declared members lost that
    /// may know of higher terms.
    pub(crate) fn next(&self, on_word: bool) -> u64 {
        let next = self.highest.get().saturating_add(1);
        if !on_word {
            return next;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        next.saturating_add(LOSS_STEP).max(now.as_secs().saturating_mul(LOSS_STEP))
    }

    /// Record of the last interval, if this group has had one.
    pub(crate) fn lineage(&self) -> Ref<'_, Option<GroupRecord>> {
        self.lineage.borrow()
    }

    pub(crate) fn set_lineage(&self, record: GroupRecord) {
        *self.lineage.borrow_mut() = Some(record);
    }
}
