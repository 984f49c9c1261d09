//! [`TargetMapStore`]: the map on the node's targets, with its epoch in the witness.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use store::StoreError;
use uuid::Uuid;

use super::copy::{is_final, late, write_copy};
use super::store::{MapStore, MapUnsaved};
use super::{NodeMap, start};
use crate::config::OsdConfig;
use crate::ids;
use crate::start_error::StartError;
use crate::target::Target;
use crate::witness::NodeWitness;

/// Stores a copy of the map on each target. The copy with the highest map epoch is valid. The witness
/// has the epoch of the last saved map, so that older copies are recognised. It notes each epoch before a
/// target receives a map with this epoch, so no two maps ever have the same epoch.
pub(crate) struct TargetMapStore {
    pub(super) targets: Vec<Rc<Target>>,
    pub(super) witness: Arc<NodeWitness>,
    /// Maximum time to wait for an answer of a target.
    pub(super) patience: Duration,
    /// The node that the targets must belong to; `None` if it is unknown.
    pub(super) node: Option<Uuid>,
    /// Targets whose loss the operator has accepted for this start.
    pub(super) forgotten: Vec<Uuid>,
}

impl TargetMapStore {
    pub(crate) fn new(
        targets: &[Rc<Target>],
        witness: Arc<NodeWitness>,
        config: &OsdConfig,
    ) -> TargetMapStore {
        let (node, forgotten) = (config.node, config.forgotten.clone());
        TargetMapStore {
            targets: targets.to_vec(),
            witness,
            patience: config.target_timeout,
            node,
            forgotten,
        }
    }

    /// Writes the map to every target that it lists and that has not failed. For success, most listed
    /// targets must store the map, or the node must do without all other targets according to the
    /// map. If the witness is durable, one target suffices. The witness stores the map epoch. After an
    /// error, possibly only some targets have the map. The next start of the node then updates the other
    /// targets.
    async fn save_copies(&self, map: &NodeMap) -> Result<(), StoreError> {
        // A replaced target does not count: the next start of the node may be without it.
        let listed = || self.targets.iter().filter(|target| map.has(target));
        // A write of the map clears this mark.
        listed().for_each(|target| target.set_missed_map(true));
        let there = listed().filter(|target| target.failure().is_none());
        let copies = there.map(|target| async move {
            let incarnation = target.store.incarnation();
            let Ok(written) =
                tokio::time::timeout(self.patience, write_copy(target, map, self.witness.seal())).await
            else {
                // Placement groups that cannot work without the target wait for the target; saving
                // the map does not wait.
                target.overdue(&ids::node_collection(), self.patience);
                return Ok(Some(late(self.patience)));
            };
            match written {
                Ok(()) => Ok(None),
                Err(e @ StoreError::NoSpace { .. }) => Ok(Some(e)),
                Err(e) if is_final(&e) && target.store.incarnation() != incarnation => {
                    Err(StoreError::Disconnected(format!("{e}; the target was remounted meanwhile")))
                }
                Err(e) if is_final(&e) && self.targets.len() > 1 => {
                    target.fail(incarnation, &e);
                    Ok(Some(e))
                }
                Err(e) => Err(e),
            }
        });
        let refusals = futures::future::try_join_all(copies).await?;
        let written = refusals.iter().filter(|refusal| refusal.is_none()).count();
        // A target without space for the map has not failed, but does not have the map.
        let full = refusals.into_iter().flatten().find(|e| matches!(e, StoreError::NoSpace { .. }));
        let is_settled = |target: &Rc<Target>| {
            target.failure().is_none() || map.does_without(&target.uuid) || has_forgotten(map, target)
        };
        let certain = full.is_none() && self.targets.iter().all(is_settled);
        if written > 0 && (certain || written * 2 > map.targets.len() || self.witness.is_durable()) {
            return self.witness.store_map_epoch(map.epoch).await;
        }
        if let Some(full) = full {
            return Err(full);
        }
        let detail = "more than half of the targets must store the node's map".into();
        let e = StoreError::TooFewTargets { there: written, needed: map.targets.len() / 2 + 1, detail };
        if self.targets.iter().any(|target| target.is_hopeful()) {
            return Err(StoreError::Disconnected(format!("{e}; failed targets are tried again")));
        }
        Err(e)
    }
}

impl MapStore for TargetMapStore {
    fn load(&self) -> LocalBoxFuture<'_, Result<NodeMap, StartError>> {
        Box::pin(start::newest_map(self))
    }

    fn save<'a>(&'a self, map: &'a NodeMap) -> LocalBoxFuture<'a, Result<(), MapUnsaved>> {
        Box::pin(async move {
            let begun = self.witness.begin_map(map.epoch).await;
            begun.map_err(|why| MapUnsaved { why, may_be_found: false })?;
            let may_be_found = self.targets.iter().any(|target| target.failure().is_none());
            self.save_copies(map).await.map_err(|why| MapUnsaved { why, may_be_found })
        })
    }

    /// Returns the targets that had no space for the map when the node started, and then the targets that
    /// were not usable when the map changed. The first kind of target counts as failed until it has the
    /// map.
    fn targets_behind(&self) -> Vec<Uuid> {
        let lack = self.targets.iter().filter(|target| target.lacks_map());
        let missed = self.targets.iter().filter(|target| !target.lacks_map() && is_behind(target));
        lack.chain(missed).map(|target| target.uuid).collect()
    }

    fn catch_up<'a>(&'a self, target: Uuid, map: &'a NodeMap) -> LocalBoxFuture<'a, bool> {
        Box::pin(async move {
            let found = self.targets.iter().find(|behind| behind.uuid == target && is_behind(behind));
            let Some(target) = found else { return false };
            let lacked_map = target.lacks_map();
            let writing = tokio::time::timeout(self.patience, write_copy(target, map, self.witness.seal()));
            let is_written = matches!(writing.await, Ok(Ok(())));
            if is_written && lacked_map {
                tracing::info!(target_uuid = %target.uuid, "the target has space again and has stored the node's map");
            }
            is_written
        })
    }
}

/// Whether a target lacks the last map, and may be able to store it.
fn is_behind(target: &Target) -> bool {
    target.lacks_map() || (target.missed_map() && target.failure().is_none())
}

/// Whether the operator has accepted the loss of changes that only this target has.
fn has_forgotten(map: &NodeMap, target: &Target) -> bool {
    map.record(&target.uuid).is_some_and(|record| record.forgotten || record.given_up)
}
