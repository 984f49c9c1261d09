//! [`Rebuilding`]: a member on its way back, and the objects that it does not have yet.

use std::collections::BTreeSet;

use store::ObjectId;

use crate::member_link::MemberLink;

/// A member on its way back.
pub(crate) struct Rebuilding {
    pub(crate) position: usize,
    /// Number of the interval.
    pub(crate) interval: u64,
    pub(crate) link: MemberLink,
    missing: MissingObjects,
}

/// Objects that a member does not have yet.
pub(crate) enum MissingObjects {
    /// The member was away: it lacks these.
    Only(BTreeSet<ObjectId>),
    /// The member was empty: objects are copied in the order of their ids.
    After {
        /// The member has all objects up to this id.
        cursor: Option<ObjectId>,
        /// Objects beyond the cursor that the member has.
        copied_ahead: BTreeSet<ObjectId>,
        /// Objects that have changed without the member. The list of objects to copy may lack them.
        changed: BTreeSet<ObjectId>,
    },
}

impl MissingObjects {
    /// Everything.
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

    /// The objects that the member lacks, if they are known by id.
    pub(crate) fn known_missing(&self) -> Option<Vec<ObjectId>> {
        match &self.missing {
            MissingObjects::Only(some) => Some(some.iter().cloned().collect()),
            MissingObjects::After { .. } => None,
        }
    }

    /// Whether the member does not have the object yet.
    pub(crate) fn lacks(&self, oid: &ObjectId) -> bool {
        match &self.missing {
            MissingObjects::Only(some) => some.contains(oid),
            MissingObjects::After { cursor, copied_ahead, .. } => {
                cursor.as_ref().is_none_or(|cursor| oid > cursor) && !copied_ahead.contains(oid)
            }
        }
    }

    /// Notes that the member has an object now.
    pub(crate) fn has_now(&mut self, oid: &ObjectId) {
        match &mut self.missing {
            MissingObjects::Only(some) => drop(some.remove(oid)),
            MissingObjects::After { copied_ahead, changed, .. } => {
                changed.remove(oid);
                copied_ahead.insert(oid.clone());
            }
        }
    }

    /// Notes that an object changes, without the member if the member lacks it.
    pub(crate) fn changes(&mut self, oid: &ObjectId) {
        let lacks = self.lacks(oid);
        if let (MissingObjects::After { changed, .. }, true) = (&mut self.missing, lacks) {
            changed.insert(oid.clone());
        }
    }

    /// Moves the cursor to an id after all listed objects up to it were copied. If objects up to
    /// the id were made since they were listed, returns those instead: the caller copies them and
    /// asks again.
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
