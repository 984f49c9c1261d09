//! [`ActivePool`]: a pool in use, and [`ObjectLocation`]: the location of one of its objects.

use std::cell::Cell;
use std::rc::Rc;

use array::Group;
use bytes::Bytes;
use store::ObjectId;
use wire::{Error, ObjectName, PartId, placement};

use crate::map::PoolRecord;
use crate::pg::Pg;
use crate::share::GroupShare;
use crate::target::Target;

/// A shard's share of a pool in use. The lists contain the shard's own groups, in ascending order.
pub(crate) struct ActivePool {
    pub(crate) record: PoolRecord,
    /// The pool's name for operators: `POOL`, or `TENANT/POOL` if the tenant is not `main`.
    pub(crate) label: String,
    pub(crate) share: GroupShare,
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
    ///
    /// # Errors
    /// [`Error::WrongShard`] if another shard serves its placement group.
    pub(crate) fn place(
        &self,
        namespace: &str,
        object: &str,
        part: Option<&PartId>,
    ) -> wire::Result<ObjectLocation> {
        let hash = placement::hash(namespace, object, part);
        let index = self.index(placement::group(hash, self.record.pg_count))?;
        let oid = self.record.ids.id(hash, namespace, object, part);
        Ok(ObjectLocation { pg: Rc::clone(&self.pgs[index]), oid })
    }

    /// Returns the ids of other objects with the placement key of `name`, whose names arrived over the
    /// wire.
    ///
    /// # Errors
    /// [`Error::BadName`] or [`Error::BadRequest`] if one of the names is invalid, or has another
    /// placement key.
    pub(crate) fn siblings(&self, name: &ObjectName, others: &[Bytes]) -> wire::Result<Vec<ObjectId>> {
        let id = |other: &Bytes| {
            let other = name.sibling(other)?;
            let hash = placement::hash(other.namespace(), other.object(), None);
            Ok(self.record.ids.id(hash, other.namespace(), other.object(), None))
        };
        others.iter().map(id).collect()
    }

    /// Returns the index of a group in the lists of the shard's groups.
    ///
    /// # Errors
    /// [`Error::WrongShard`] if another shard serves the group.
    pub(crate) fn index(&self, group: u32) -> wire::Result<usize> {
        let (groups, shards) = (self.record.pg_count, self.share.shards());
        self.share.index(group).ok_or(Error::WrongShard { groups, shards })
    }

    /// Returns the number of the shard that serves an object or one part of it.
    pub(crate) fn owner(&self, namespace: &str, object: &str, part: Option<&PartId>) -> u16 {
        let hash = placement::hash(namespace, object, part);
        self.share.owner(placement::group(hash, self.record.pg_count))
    }
}
