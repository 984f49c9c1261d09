//! [`ActivePool`]: a pool in use, and [`ObjectLocation`]: where an object of it lives.

use std::cell::Cell;
use std::rc::Rc;

use array::Group;
use store::ObjectId;
use wire::{PartId, placement};

use crate::ids;
use crate::map::PoolRecord;
use crate::pg::Pg;

/// A pool in use.
pub(crate) struct ActivePool {
    pub(crate) record: PoolRecord,
    pub(crate) pgs: Vec<Rc<Pg>>,
    /// What is behind the placement groups of a pool with redundancy; of others, nothing.
    pub(crate) groups: Vec<Rc<Group>>,
    /// No requests are taken: the pool is about to be removed.
    pub(crate) closed: Cell<bool>,
}

/// Where an object lives.
pub(crate) struct ObjectLocation {
    pub(crate) pg: Rc<Pg>,
    pub(crate) oid: ObjectId,
}

impl ActivePool {
    /// Where an object, or a part of it, lives.
    pub(crate) fn place(&self, namespace: &str, object: &str, part: Option<&PartId>) -> ObjectLocation {
        let hash = placement::hash(namespace, object, part);
        let pg = placement::group(hash, self.record.pg_count) as usize;
        ObjectLocation { pg: Rc::clone(&self.pgs[pg]), oid: ids::object(hash, namespace, object, part) }
    }
}
