//! [`Rebuilding`]: a member that is being rebuilt, and the objects that it still lacks.

use std::cell::RefCell;
use std::collections::BTreeSet;

use store::ObjectId;

use crate::member_link::MemberLink;

/// A member that is being rebuilt.
pub(crate) struct Rebuilding {
    position: usize,
    /// Number of the interval in which the rebuild runs.
    interval: u64,
    link: MemberLink,
    missing: MissingObjects,
}

/// The rebuild of a group that is in progress, if there is one.
#[derive(Default)]
pub(crate) struct RebuildInProgress(RefCell<Option<Rebuilding>>);

impl RebuildInProgress {
    /// Whether a rebuild is in progress.
    pub(crate) fn is_running(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Records that a rebuild begins. From now on, the member takes part in transactions.
    pub(crate) fn begin(&self, rebuilding: Rebuilding) {
        let before = self.0.replace(Some(rebuilding));
        assert!(before.is_none(), "a group rebuilds one member at a time");
    }

    /// Records that the rebuild in progress has ended, or that its interval has.
    pub(crate) fn end(&self) {
        *self.0.borrow_mut() = None;
    }

    /// Returns the member at a position if it is being rebuilt in this interval and, if `oid` is given,
    /// has this object.
    pub(crate) fn member(
        &self,
        interval: u64,
        position: usize,
        oid: Option<&ObjectId>,
    ) -> Option<MemberLink> {
        let rebuilding = self.0.borrow();
        let one = rebuilding.as_ref().filter(|r| r.position == position && r.interval == interval)?;
        oid.is_none_or(|oid| !one.lacks(oid)).then(|| one.link.clone())
    }

    /// Calls `f` with the rebuild in progress.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut Rebuilding) -> T) -> Option<T> {
        self.0.borrow_mut().as_mut().map(f)
    }
}

/// Objects that a member still lacks.
pub(crate) enum MissingObjects {
    /// A stale member lacks only these objects.
    Only(BTreeSet<ObjectId>),
    /// A blank member receives all objects, in the order of their ids.
    After {
        /// The member has all objects up to this id.
        cursor: Option<ObjectId>,
        /// Objects beyond the cursor that the member already has.
        copied_ahead: BTreeSet<ObjectId>,
        /// Objects that changed while the member lacked them. If one of these objects is new, the current
        /// page of listed ids may not contain it, and it may lie before the cursor.
        changed: BTreeSet<ObjectId>,
    },
}

impl MissingObjects {
    /// The member lacks all objects.
    pub(crate) fn all() -> MissingObjects {
        MissingObjects::After { cursor: None, copied_ahead: BTreeSet::new(), changed: BTreeSet::new() }
    }
}

impl Rebuilding {
    pub(crate) fn new(
        position: usize,
        interval: u64,
        link: MemberLink,
        missing: MissingObjects,
    ) -> Rebuilding {
        Rebuilding { position, interval, link, missing }
    }

    /// Returns the ids of the objects that a stale member lacks, or `None` for a blank member.
    pub(crate) fn known_missing(&self) -> Option<Vec<ObjectId>> {
        match &self.missing {
            MissingObjects::Only(some) => Some(some.iter().cloned().collect()),
            MissingObjects::After { .. } => None,
        }
    }

    /// Returns true if the member still lacks the object.
    pub(crate) fn lacks(&self, oid: &ObjectId) -> bool {
        match &self.missing {
            MissingObjects::Only(some) => some.contains(oid),
            MissingObjects::After { cursor, copied_ahead, changed } => {
                changed.contains(oid)
                    || (cursor.as_ref().is_none_or(|cursor| oid > cursor) && !copied_ahead.contains(oid))
            }
        }
    }

    /// Records that the member now has an object.
    pub(crate) fn has_now(&mut self, oid: &ObjectId) {
        match &mut self.missing {
            MissingObjects::Only(some) => drop(some.remove(oid)),
            MissingObjects::After { copied_ahead, changed, .. } => {
                changed.remove(oid);
                copied_ahead.insert(oid.clone());
            }
        }
    }

    /// Position of the member.
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    /// Records that an object changes, and that the member does not receive this change: the member lacks
    /// the object, or the object begins as a copy of one that the member lacks.
    pub(crate) fn misses(&mut self, oid: &ObjectId) {
        match &mut self.missing {
            MissingObjects::Only(some) => drop(some.insert(oid.clone())),
            MissingObjects::After { copied_ahead, changed, .. } => {
                copied_ahead.remove(oid);
                changed.insert(oid.clone());
            }
        }
    }

    /// Returns objects that the member still lacks after the copies of all objects that were known to be
    /// missing.
    pub(crate) fn still_missing(&self) -> Vec<ObjectId> {
        match &self.missing {
            MissingObjects::Only(some) => some.iter().cloned().collect(),
            MissingObjects::After { changed, .. } => changed.iter().cloned().collect(),
        }
    }

    /// Moves the cursor to the id `oid`, after all listed objects up to `oid` were copied. More
    /// objects up to `oid` may have been created since the ids were listed. In that case, returns
    /// the new objects and does not move the cursor. The caller copies these objects and calls this
    /// method again.
    pub(crate) fn passed(&mut self, oid: &ObjectId) -> Vec<ObjectId> {
        let MissingObjects::After { cursor, copied_ahead, changed } = &mut self.missing else {
            return Vec::new();
        };
        let made: Vec<ObjectId> = changed.range(..=oid).cloned().collect();
        if made.is_empty() {
            *copied_ahead = copied_ahead.split_off(oid);
            copied_ahead.remove(oid);
            *cursor = Some(oid.clone());
        }
        made
    }
}
