//! [`ActivePool`]: a pool in use, and [`ObjectLocation`]: the location of one of its objects.

use std::cell::Cell;
use std::rc::Rc;

use array::Group;
use store::ObjectId;
use wire::{PartId, placement};

use crate::map::PoolRecord;
use crate::pg::Pg;
use crate::target::Target;

/// A pool in use.
pub(crate) struct ActivePool {
    pub(crate) record: PoolRecord,
    pub(crate) pgs: Vec<Rc<Pg>>,
    /// Array groups behind the placement groups of a pool with redundancy; empty without
    /// redundancy.
    pub(crate) groups: Vec<Rc<Group>>,
    /// The target of each placement group of a pool without redundancy; empty with redundancy.
    pub(crate) sole_targets: Vec<Rc<Target>>,
    /// Whether the pool is being removed, so that it accepts no requests.
    pub(crate) closed: Cell<bool>,
}

/// Location of an object: its placement group and its id in the store.
pub(crate) struct ObjectLocation {
    pub(crate) pg: Rc<Pg>,
    pub(crate) oid: ObjectId,
}

impl ActivePool {
    /// Returns the location of an object or of one part of it.
    pub(crate) fn place(&self, namespace: &str, object: &str, part: Option<&PartId>) -> ObjectLocation {
        let hash = placement::hash(namespace, object, part);
        let pg = placement::group(hash, self.record.pg_count) as usize;
        ObjectLocation {
            pg: Rc::clone(&self.pgs[pg]),
            oid: self.record.ids.id(hash, namespace, object, part),
        }
    }
}
