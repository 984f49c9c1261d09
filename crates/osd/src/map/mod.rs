//! The node's map: its targets and pools, its tenants and users, and the sessions that have ended.
//!
//! [`NodeMap`] is plain data. `format` encodes it, and `marks` relates it to the targets as the osd
//! sees them. [`MapStore`] is the only way to the durable map. [`TargetMapStore`] implements it: each
//! target stores a copy (`copy`), and the witness has the epoch of the newest map. `start` finds the
//! newest map when the node starts.

mod copy;
mod format;
mod marks;
#[cfg(test)]
mod memory;
mod start;
mod store;
#[cfg(test)]
mod suite;
mod target_store;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use wire::Redundancy;

pub(crate) use self::copy::MAP_BYTES_MAX;
#[cfg(test)]
pub(crate) use self::memory::MemMapStore;
pub(crate) use self::store::{MapStore, MapUnsaved};
pub(crate) use self::target_store::TargetMapStore;
use crate::accounts::{self, Accounts};
use crate::ended::EndedSessions;
use crate::ids::IdLayout;

/// Increase of the map epoch at the first change after a start without some targets. These targets
/// may have stored maps that were not saved, and the next map must be newer. The increase exceeds the
/// number of attempts to save a map between two starts.
pub(crate) const MISSING_STEP: u64 = 1 << 32;

/// The node's map: its targets and pools.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeMap {
    pub(crate) epoch: u64,
    pub(crate) node: Uuid,
    /// The targets. The index of a target in this list is its number. Placement does not depend on
    /// the number.
    pub(crate) targets: Vec<TargetRecord>,
    pub(crate) next_pool_id: u32,
    pub(crate) pools: Vec<PoolRecord>,
    /// The tenants and their users.
    pub(crate) accounts: Accounts,
    /// The sessions that may not change anything any more.
    pub(crate) ended: EndedSessions,
}

/// A target in the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TargetRecord {
    pub(crate) uuid: Uuid,
    /// Identifies the target's place in the node. Pools without redundancy place their groups by the
    /// slots. A target that replaces another target takes over its slot, so no other group moves.
    pub(crate) slot: Uuid,
    /// Whether the operator has taken the target out of use.
    pub(crate) out: bool,
    /// Whether the target has failed and does not have this map.
    pub(crate) lost: bool,
    /// Whether the operator has accepted the loss of changes that only this target has, in pools with
    /// redundancy. The mark ends when no placement group waits for the target any more.
    pub(crate) forgotten: bool,
    /// Whether the operator has accepted the loss of the target's objects in pools without redundancy.
    /// The mark ends when the target works again or is replaced.
    pub(crate) given_up: bool,
}

/// A pool in the map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolRecord {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) pg_count: u32,
    pub(crate) made_ms: u64,
    /// Whether the pool is being removed, so that it can no longer be used.
    pub(crate) removing: bool,
    pub(crate) redundancy: Redundancy,
    /// Layout of the ids of the pool's objects. It never changes.
    pub(crate) ids: IdLayout,
    /// Number of the tenant that the pool belongs to.
    pub(crate) tenant: u32,
}

impl TargetRecord {
    fn new(uuid: Uuid) -> TargetRecord {
        TargetRecord { uuid, slot: uuid, out: false, lost: false, forgotten: false, given_up: false }
    }

    /// Returns the record of a new target that takes the place of this one.
    pub(crate) fn replaced_by(&self, uuid: Uuid) -> TargetRecord {
        TargetRecord { slot: self.slot, lost: true, ..TargetRecord::new(uuid) }
    }
}

impl NodeMap {
    /// The map of a new node with these targets.
    pub(crate) fn new(targets: Vec<Uuid>) -> NodeMap {
        let targets = targets.into_iter().map(TargetRecord::new).collect();
        let (node, accounts) = (base::entropy::uuid(), Accounts::new(0));
        let ended = EndedSessions::default();
        NodeMap { epoch: 1, node, targets, next_pool_id: 1, pools: vec![], accounts, ended }
    }

    /// Whether the map lists a target as lost or out of use, or does not list it because an operator
    /// has replaced it.
    fn does_without(&self, target: &Uuid) -> bool {
        self.record(target).is_none_or(|record| record.lost || record.out)
    }

    /// Returns a target's record.
    pub(crate) fn record(&self, uuid: &Uuid) -> Option<&TargetRecord> {
        self.targets.iter().find(|record| record.uuid == *uuid)
    }

    /// Returns a pool's name for operators: `POOL`, or `TENANT/POOL` if the tenant is not `main`. A
    /// tenant that was removed before its pool is named by its number: `#NUMBER/POOL`.
    pub(crate) fn label(&self, pool: &PoolRecord) -> String {
        match (pool.tenant, self.accounts.tenant_name(pool.tenant)) {
            (accounts::MAIN, _) => pool.name.clone(),
            (number, "") => format!("#{number}/{}", pool.name),
            (_, tenant) => format!("{tenant}/{}", pool.name),
        }
    }

    /// Returns the display name of the target with this uuid: its number, if it belongs to the
    /// node.
    pub(crate) fn name_of(&self, uuid: &str) -> String {
        let number = self.targets.iter().position(|record| record.uuid.to_string() == uuid);
        number.map_or_else(|| uuid.to_owned(), |number| number.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_target_takes_over_the_slot_of_the_target_that_it_replaces() {
        let first = TargetRecord::new(Uuid::from_u128(1));
        let second = first.replaced_by(Uuid::from_u128(2)).replaced_by(Uuid::from_u128(3));
        assert_eq!((second.uuid, second.slot, second.lost), (Uuid::from_u128(3), first.slot, true));
    }
}
