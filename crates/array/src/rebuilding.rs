//! [`Rebuilding`]: a member that is being rebuilt, and the objects that it still lacks.

use std::collections::BTreeSet;

use store::ObjectId;

use crate::member_link::MemberLink;

/// A member that is being rebuilt.
pub(crate) struct Rebuilding {
    pub(crate) position: usize,
    /// Number of the interval in which the rebuild runs.
    pub(crate) interval: u64,
    pub(crate) link: MemberLink,
    missing: MissingObjects,
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
        /// Objects beyond the cursor that changed while the member lacked them. If one of these
        /// objects is new, the current page of listed ids may not contain it.
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
            MissingObjects::After { cursor, copied_ahead, .. } => {
                cursor.as_ref().is_none_or(|cursor| oid > cursor) && !copied_ahead.contains(oid)
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

    /// Records that an object changes. If the member lacks the object, it does not receive this
    /// change.
    pub(crate) fn changes(&mut self, oid: &ObjectId) {
        let lacks = self.lacks(oid);
        if let (MissingObjects::After { changed, .. }, true) = (&mut self.missing, lacks) {
            changed.insert(oid.clone());
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
