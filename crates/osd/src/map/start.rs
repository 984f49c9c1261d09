//! Finds the newest map on the targets when the node starts.

use std::rc::Rc;

use futures::future::join_all;
use store::StoreError;
use uuid::Uuid;

use super::copy::{is_final, late, read_copy, start_error, write_copy};
use super::target_store::TargetMapStore;
use super::{MISSING_STEP, NodeMap, TargetRecord};
use crate::age;
use crate::ids;
use crate::seal::Sealing;
use crate::start_error::StartError;
use crate::target::Target;

/// Maximum number of attempts to read the map at start, if the node cannot start without slow
/// targets.
const ROUNDS_MAX: usize = 6;

/// Finds the map on the targets. Creates it if all targets are new, and updates outdated
/// copies. The map does not list targets that an operator has replaced. Targets that fail or do
/// not answer in time are not used. The node starts without these targets if the other
/// targets certainly have the newest map. Otherwise, if a target was slow or was remounted
/// meanwhile, the map is read again, in up to [`ROUNDS_MAX`] attempts. The witness knows the epoch
/// of the newest map, unless it is lost.
pub(super) async fn newest_map(at: &TargetMapStore) -> Result<NodeMap, StartError> {
    let targets = &at.targets;
    let incarnations = || targets.iter().map(|target| target.store.incarnation()).collect::<Vec<_>>();
    for _ in 1..ROUNDS_MAX {
        let before = incarnations();
        let error = match newest_map_once(at).await {
            Err(e) if targets.iter().any(|target| target.is_slow()) || incarnations() != before => e,
            opened => return opened,
        };
        tracing::warn!(%error, "the node cannot start without the copy of its map on a slow or remounted target; reading the map again");
        targets.iter().filter(|target| target.is_slow()).for_each(|target| target.try_again());
    }
    newest_map_once(at).await
}

async fn newest_map_once(at: &TargetMapStore) -> Result<NodeMap, StartError> {
    let (targets, witness, forgotten) = (&*at.targets, &*at.witness, &*at.forgotten);
    let uuids: Vec<Uuid> = targets.iter().map(|t| t.uuid).collect();
    if let Some(twice) = uuids.iter().enumerate().find(|(i, u)| uuids[..*i].contains(u)) {
        return Err(StartError::SameTarget(*twice.1));
    }
    if targets.is_empty() {
        return Err(StartError::NoTargets);
    }
    let mut copies = MapCopies::read(at).await?;
    let mut map = match (copies.newest(), at.node) {
        (Some(map), _) => map.clone(),
        (None, _) if !copies.unreadable.is_empty() => return Err(copies.unreadable.remove(0).1),
        (None, Some(node)) => return Err(StartError::NoMap { node }),
        (None, None) => NodeMap::new(uuids),
    };
    if map.epoch == 0 {
        return Err(StartError::AlteredMap { target: targets[0].uuid });
    }
    if let Some(node) = at.node.filter(|node| *node != map.node) {
        return Err(StartError::OtherNode { node, found: map.node });
    }
    let accepts_losses = map.accept_losses(forgotten);
    map.check_targets(targets, &copies.maps)?;
    let counter = age::witness_counter(targets, witness, at.patience).await;
    witness.check(map.node, counter.unwrap_or(0));
    let saved_epoch = witness.map_epoch(map.node);
    let newer = saved_epoch.filter(|epoch| *epoch > map.epoch);
    if newer.is_some() {
        map.check_forgotten(targets, forgotten)?;
    }
    let begun = witness.begun_epoch(map.node);
    if accepts_losses || newer.is_some() {
        map.epoch = map.epoch.max(newer.unwrap_or(0)).max(begun) + MISSING_STEP;
        map.accounts.outdate();
        map.ended.add_all();
    } else if begun > map.epoch {
        // The save of another map has failed. The storage host may have a copy of that map, and offer it
        // later. From now on, that copy is older than this map, and its epoch is not used again.
        map.epoch = begun + 1;
    }
    // The witness confirms that no target has a newer map that was saved.
    let is_newest = saved_epoch.is_some() && newer.is_none();
    if !is_newest {
        map.check_unreadable(&copies.unreadable, forgotten, counter != Some(0))?;
    }
    let unread = targets.iter().filter(|target| map.has(target) && target.failure().is_some());
    unread.for_each(|target| target.set_missed_map(true));
    let was_read = |target: &Target| copies.unreadable.iter().all(|(uuid, _)| *uuid != target.uuid);
    for (target, _) in targets
        .iter()
        .zip(&copies.maps)
        .filter(|(target, copy)| was_read(target) && map.has_lost_map(target, copy.as_ref()))
    {
        tracing::error!(target_uuid = %target.uuid, "the target has no map of the node: it was formatted again, or is a copy from before its first use");
        witness.expect_age(target.uuid);
    }
    map.tell(targets);
    witness.begin_map(map.epoch).await.map_err(StartError::Witness)?;
    bring_up_to_date(at, &map, &copies, is_newest).await?;
    witness.retain_pools(|id| map.pools.iter().any(|pool| pool.id == id));
    witness.retain_targets(|uuid| map.record(&uuid).is_some());
    forgotten.iter().for_each(|uuid| witness.forget_age(*uuid));
    witness.store_map_epoch(map.epoch).await.map_err(StartError::Witness)?;
    Ok(map)
}

impl NodeMap {
    /// Records that the operator has accepted the loss of these targets. Returns whether this
    /// changes the map.
    fn accept_losses(&mut self, forgotten: &[Uuid]) -> bool {
        let records = self.targets.iter_mut().filter(|record| forgotten.contains(&record.uuid));
        records.fold(false, |changes, record| {
            let (forgotten, given_up) = (record.forgotten, record.given_up);
            (record.forgotten, record.given_up) = (true, true);
            changes || !(forgotten && given_up)
        })
    }

    /// Checks, if the newest map is missing, that the operator has accepted the loss of the targets
    /// that may have it, for this start. The marks in an outdated map may have ended since.
    ///
    /// # Errors
    /// [`StartError::OutdatedMap`] or [`StartError::OldCopies`] otherwise.
    fn check_forgotten(&self, targets: &[Rc<Target>], forgotten: &[Uuid]) -> Result<(), StartError> {
        let is_there = |uuid| targets.iter().any(|t| t.uuid == uuid && t.failure().is_none());
        let (there, missing): (Vec<&TargetRecord>, Vec<&TargetRecord>) =
            self.targets.iter().partition(|record| is_there(record.uuid));
        let open: Vec<_> =
            missing.iter().filter(|r| !forgotten.contains(&r.uuid)).map(|r| r.uuid.to_string()).collect();
        if !open.is_empty() {
            return Err(StartError::OutdatedMap { node: self.node, missing: open.join(", ") });
        }
        if missing.is_empty() && !there.iter().any(|record| forgotten.contains(&record.uuid)) {
            return Err(StartError::OldCopies { node: self.node });
        }
        Ok(())
    }

    fn check_targets(&self, targets: &[Rc<Target>], copies: &[Option<NodeMap>]) -> Result<(), StartError> {
        for (target, copy) in targets.iter().zip(copies) {
            let is_of_other_node = copy.as_ref().is_some_and(|copy| copy.node != self.node);
            if is_of_other_node || (!self.has(target) && !self.has_replaced(target, copy.as_ref())) {
                return Err(StartError::ForeignTarget { target: target.uuid, node: self.node });
            }
        }
        let missing = self.targets.iter().find(|record| {
            let may_be_missing = record.out || record.lost || record.given_up;
            !may_be_missing && targets.iter().all(|t| t.uuid != record.uuid)
        });
        match missing {
            Some(record) => Err(StartError::MissingTarget { target: record.uuid, node: self.node }),
            None => Ok(()),
        }
    }

    /// Fails if one of the unreadable targets may have a newer map, although no witness knows the newest
    /// epoch. With a witness, one target is enough to save a map. This target may be one that the map
    /// which was read lists as lost, because it has returned since. So only the operator's word,
    /// `forgotten`, excludes an unreadable target. A version without a witness saved a map only on most
    /// targets, or if the node did without all others. So a node that never had a witness needs most
    /// targets, or the targets that the map does not list as lost or out of use.
    fn check_unreadable(
        &self,
        unreadable: &[(Uuid, StartError)],
        forgotten: &[Uuid],
        had_witness: bool,
    ) -> Result<(), StartError> {
        let may_be_newer = |(uuid, _): &&(Uuid, StartError)| {
            !forgotten.contains(uuid) && (had_witness || !self.does_without(uuid))
        };
        let open: Vec<&(Uuid, StartError)> = unreadable.iter().filter(may_be_newer).collect();
        let most_are_there = unreadable.len() * 2 < self.targets.len();
        let Some((_, why)) = open.first().filter(|_| had_witness || !most_are_there) else { return Ok(()) };
        let unreadable = open.iter().map(|(uuid, _)| uuid.to_string()).collect::<Vec<_>>().join(", ");
        Err(StartError::UncertainMap { node: self.node, unreadable, why: why.to_string() })
    }

    /// Whether a target of the node has lost its map. A target has none if the node is new, if the target
    /// has failed, or if it replaces another target.
    fn has_lost_map(&self, target: &Target, copy: Option<&NodeMap>) -> bool {
        let is_used = self.record(&target.uuid).is_some_and(|record| !record.lost);
        copy.is_none() && self.epoch > 1 && is_used && target.failure().is_none()
    }

    /// Whether a target that the map does not list was a target of the node before the operator
    /// replaced it. The osd may start again before the operator starts the node with the new target.
    /// A target that has failed cannot show that it was the node's, but does no harm.
    fn has_replaced(&self, target: &Target, copy: Option<&NodeMap>) -> bool {
        match copy {
            Some(copy) => copy.node == self.node,
            None => target.failure().is_some(),
        }
    }
}

/// Writes the map to targets with outdated copies. A target that does not store the map counts
/// as failed if enough other targets have the map, or if `is_newest` is true.
async fn bring_up_to_date(
    at: &TargetMapStore,
    map: &NodeMap,
    copies: &MapCopies,
    is_newest: bool,
) -> Result<(), StartError> {
    let known = at.targets.iter().zip(&copies.maps).filter(|(target, _)| map.has(target));
    let working = known.filter(|(target, _)| target.failure().is_none());
    let (there, behind): (Vec<_>, Vec<_>) = working
        .partition(|(target, copy)| copy.as_ref() == Some(map) && !copies.unsealed.contains(&target.uuid));
    let writes = behind.into_iter().map(|(target, _)| async move {
        tracing::info!(target_uuid = %target.uuid, epoch = map.epoch, "writing the node's map to a target that lacks it");
        let incarnation = target.store.incarnation();
        (target, incarnation, tokio::time::timeout(at.patience, write_copy(target, map, at.witness.seal())).await)
    });
    let written = join_all(writes).await;
    let there = there.len() + written.iter().filter(|(.., outcome)| matches!(outcome, Ok(Ok(())))).count();
    for (target, incarnation, outcome) in written {
        let error = match outcome {
            Ok(Ok(())) => continue,
            Ok(Err(e)) if target.store.incarnation() != incarnation => {
                return Err(start_error(target, e));
            }
            Ok(Err(e)) if is_final(&e) || matches!(e, StoreError::NoSpace { .. }) => {
                target.set_lacks_map(!is_final(&e));
                target.fail(incarnation, &e);
                e
            }
            Ok(Err(e)) => return Err(start_error(target, e)),
            Err(_) => {
                target.overdue(&ids::node_collection(), at.patience);
                late(at.patience)
            }
        };
        let expected = is_newest || map.does_without(&target.uuid);
        if there == 0 || (there * 2 <= map.targets.len() && !expected) {
            return Err(start_error(target, error));
        }
        tracing::warn!(target_uuid = %target.uuid, %error, "the target did not store the node's map");
    }
    Ok(())
}

/// Returns whether an error in reading a target's copy of the map means that the target has failed.
fn is_final_for(e: &StartError) -> bool {
    match e {
        StartError::Target { source, .. } => is_final(source),
        StartError::CorruptMap { .. } | StartError::AlteredMap { .. } => true,
        _ => false,
    }
}

/// What was read of the map on the targets.
struct MapCopies {
    /// By target; `None` if the target has no map, or if its map cannot be read.
    maps: Vec<Option<NodeMap>>,
    /// The targets whose maps cannot be read, and why.
    unreadable: Vec<(Uuid, StartError)>,
    /// The targets whose copies have no seal of the DPU.
    unsealed: Vec<Uuid>,
}

impl MapCopies {
    /// Reads the copies of the map on the targets.
    async fn read(at: &TargetMapStore) -> Result<MapCopies, StartError> {
        let mut maps = Vec::new();
        let (mut unreadable, mut unsealed) = (Vec::new(), Vec::new());
        let incarnations: Vec<u64> = at.targets.iter().map(|target| target.store.incarnation()).collect();
        let reading = at
            .targets
            .iter()
            .map(|target| tokio::time::timeout(at.patience, read_copy(target, at.witness.seal())));
        let read = at.targets.iter().zip(incarnations).zip(join_all(reading).await);
        for ((target, incarnation), copy) in read {
            let copy = match copy {
                Err(_) => {
                    target.overdue(&ids::node_collection(), at.patience);
                    unreadable.push((target.uuid, start_error(target, late(at.patience))));
                    None
                }
                // The target was remounted meanwhile and may work now.
                Ok(Err(e)) if target.store.incarnation() != incarnation => return Err(e),
                Ok(Err(e)) if is_final_for(&e) => {
                    match &e {
                        StartError::Target { source, .. }
                            if !matches!(source, StoreError::Corrupt { .. }) =>
                        {
                            target.fail(incarnation, source);
                        }
                        other => target.lose(other.to_string()),
                    }
                    unreadable.push((target.uuid, e));
                    None
                }
                Ok(copy) => copy?.map(|(mut map, sealing)| {
                    if sealing != Sealing::Own {
                        unsealed.push(target.uuid);
                    }
                    if sealing == Sealing::Missing && at.witness.has_sealed_map(map.node) {
                        // The node has had a sealed map since, so this one is older, whatever it says.
                        map.epoch = 0;
                    }
                    map
                }),
            };
            maps.push(copy);
        }
        Ok(MapCopies { maps, unreadable, unsealed })
    }

    /// Returns the valid map. If two maps have the same epoch, this is the map with more copies: the
    /// other map was not saved on enough targets.
    fn newest(&self) -> Option<&NodeMap> {
        let count = |map: &NodeMap| self.maps.iter().flatten().filter(|copy| *copy == map).count();
        self.maps.iter().flatten().max_by_key(|map| (map.epoch, count(map)))
    }
}
