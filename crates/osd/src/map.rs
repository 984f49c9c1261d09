//! The node's map: its targets and pools. Each target stores a copy; the copy with the highest map
//! epoch is valid.
//!
//! A copy is stored in pieces in the omap of one object. A copy needs only index space, so a target
//! with a full data area can store it. Older versions of the node stored the copy as the object's
//! data. This version reads these copies too, and replaces them when the map changes.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use serde::{Deserialize, Serialize};
use store::{Op, StoreCalls, StoreError, Transaction};
use uuid::Uuid;
use wire::Redundancy;

use crate::accounts::{self, Accounts};
use crate::age;
use crate::config::OsdConfig;
use crate::ids::{self, IdLayout};
use crate::seal::{SEAL_LEN, Seal, Sealing};
use crate::start_error::StartError;
use crate::target::Target;
use crate::witness::NodeWitness;

/// Maximum size of the map, in bytes. The maximum numbers of pools and targets need far less.
pub(crate) const MAP_BYTES_MAX: u64 = 1 << 20;
/// Maximum length of the piece of the map in one omap entry, in bytes.
const PIECE: usize = 32 << 10;
/// Maximum number of attempts to read the map at start, if the node cannot start without slow
/// targets.
const ROUNDS_MAX: usize = 6;
const FORMAT: u8 = 5;
/// Format of maps without accounts and without seal.
const FORMAT_NO_ACCOUNTS: u8 = 4;
/// Format of maps from before pools had a layout of ids.
const FORMAT_HASHED_IDS: u8 = 3;
/// Format of maps without slots.
const FORMAT_NO_SLOTS: u8 = 2;
/// Increase of the map epoch at the first change after a start without some targets. These targets
/// may have stored maps that were not saved, and the next map must be newer. The increase exceeds the
/// number of attempts to save a map between two starts.
pub(crate) const MISSING_STEP: u64 = 1 << 32;
/// Format of maps from before redundancy schemes existed.
const FORMAT_SINGLE: u8 = 1;
/// Label of the proof by which the DPU recognises its maps.
const SEAL: &str = "outboard node map";

/// Why a copy of the map cannot be used.
#[derive(Debug, PartialEq, Eq)]
enum MapError {
    /// The copy cannot be decoded.
    Damaged(String),
    /// The DPU has not written the copy.
    Altered,
}

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

/// The map in [`FORMAT_NO_ACCOUNTS`].
#[derive(Deserialize)]
struct MapWithoutAccounts {
    epoch: u64,
    node: Uuid,
    targets: Vec<TargetRecord>,
    next_pool_id: u32,
    pools: Vec<PoolWithoutTenant>,
}

/// A pool of versions without tenants.
#[derive(Deserialize)]
struct PoolWithoutTenant {
    id: u32,
    name: String,
    pg_count: u32,
    made_ms: u64,
    removing: bool,
    redundancy: Redundancy,
    ids: IdLayout,
}

impl From<PoolWithoutTenant> for PoolRecord {
    fn from(old: PoolWithoutTenant) -> PoolRecord {
        PoolRecord {
            id: old.id,
            name: old.name,
            pg_count: old.pg_count,
            made_ms: old.made_ms,
            removing: old.removing,
            redundancy: old.redundancy,
            ids: old.ids,
            tenant: accounts::MAIN,
        }
    }
}

impl From<MapWithoutAccounts> for NodeMap {
    fn from(old: MapWithoutAccounts) -> NodeMap {
        NodeMap {
            epoch: old.epoch,
            node: old.node,
            targets: old.targets,
            next_pool_id: old.next_pool_id,
            pools: old.pools.into_iter().map(PoolRecord::from).collect(),
            accounts: Accounts::new(0),
        }
    }
}

/// The map in [`FORMAT_HASHED_IDS`].
#[derive(Deserialize)]
struct HashedMap {
    epoch: u64,
    node: Uuid,
    targets: Vec<TargetRecord>,
    next_pool_id: u32,
    pools: Vec<HashedPool>,
}

/// A pool of earlier versions, which has hashed ids.
#[derive(Deserialize)]
struct HashedPool {
    id: u32,
    name: String,
    pg_count: u32,
    made_ms: u64,
    removing: bool,
    redundancy: Redundancy,
}

impl From<HashedPool> for PoolRecord {
    fn from(old: HashedPool) -> PoolRecord {
        PoolRecord {
            id: old.id,
            name: old.name,
            pg_count: old.pg_count,
            made_ms: old.made_ms,
            removing: old.removing,
            redundancy: old.redundancy,
            ids: IdLayout::Hashed,
            tenant: accounts::MAIN,
        }
    }
}

impl From<HashedMap> for NodeMap {
    fn from(old: HashedMap) -> NodeMap {
        NodeMap {
            epoch: old.epoch,
            node: old.node,
            targets: old.targets,
            next_pool_id: old.next_pool_id,
            pools: old.pools.into_iter().map(PoolRecord::from).collect(),
            accounts: Accounts::new(0),
        }
    }
}

/// The map in [`FORMAT_NO_SLOTS`].
#[derive(Deserialize)]
struct SlotlessMap {
    epoch: u64,
    node: Uuid,
    targets: Vec<SlotlessTarget>,
    next_pool_id: u32,
    pools: Vec<HashedPool>,
}

#[derive(Deserialize)]
struct SlotlessTarget {
    uuid: Uuid,
    out: bool,
    lost: bool,
}

impl From<SlotlessMap> for NodeMap {
    fn from(old: SlotlessMap) -> NodeMap {
        let target =
            |t: SlotlessTarget| TargetRecord { out: t.out, lost: t.lost, ..TargetRecord::new(t.uuid) };
        NodeMap {
            epoch: old.epoch,
            node: old.node,
            targets: old.targets.into_iter().map(target).collect(),
            next_pool_id: old.next_pool_id,
            pools: old.pools.into_iter().map(PoolRecord::from).collect(),
            accounts: Accounts::new(0),
        }
    }
}

/// The map in [`FORMAT_SINGLE`].
#[derive(Deserialize)]
struct SingleMap {
    epoch: u64,
    node: Uuid,
    targets: Vec<Uuid>,
    next_pool_id: u32,
    pools: Vec<SinglePool>,
}

#[derive(Deserialize)]
struct SinglePool {
    id: u32,
    name: String,
    pg_count: u32,
    made_ms: u64,
    removing: bool,
}

impl From<SingleMap> for NodeMap {
    fn from(old: SingleMap) -> NodeMap {
        let pool = |p: SinglePool| PoolRecord {
            id: p.id,
            name: p.name,
            pg_count: p.pg_count,
            made_ms: p.made_ms,
            removing: p.removing,
            redundancy: Redundancy::Single,
            ids: IdLayout::Hashed,
            tenant: accounts::MAIN,
        };
        NodeMap {
            epoch: old.epoch,
            node: old.node,
            targets: old.targets.into_iter().map(TargetRecord::new).collect(),
            next_pool_id: old.next_pool_id,
            pools: old.pools.into_iter().map(pool).collect(),
            accounts: Accounts::new(0),
        }
    }
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
    fn new(targets: Vec<Uuid>) -> NodeMap {
        let targets = targets.into_iter().map(TargetRecord::new).collect();
        let (node, accounts) = (base::entropy::uuid(), Accounts::new(0));
        NodeMap { epoch: 1, node, targets, next_pool_id: 1, pools: vec![], accounts }
    }

    /// Finds the map on the targets. Creates it if all targets are new, and updates outdated
    /// copies. The map does not list targets that an operator has replaced. Targets that fail or do
    /// not answer within `patience` are not used. The node starts without these targets if the other
    /// targets certainly have the newest map. Otherwise, if a target was slow or was remounted
    /// meanwhile, the map is read again, in up to [`ROUNDS_MAX`] attempts. `witness` knows the epoch
    /// of the newest map, unless it is lost.
    pub(crate) async fn open(
        targets: &[Rc<Target>],
        config: &OsdConfig,
        witness: &NodeWitness,
    ) -> Result<NodeMap, StartError> {
        let incarnations = || targets.iter().map(|target| target.store.incarnation()).collect::<Vec<_>>();
        for _ in 1..ROUNDS_MAX {
            let before = incarnations();
            let error = match NodeMap::open_once(targets, config, witness).await {
                Err(e) if targets.iter().any(|target| target.is_slow()) || incarnations() != before => e,
                opened => return opened,
            };
            tracing::warn!(%error, "the node cannot start without the copy of its map on a slow or remounted target; reading the map again");
            targets.iter().filter(|target| target.is_slow()).for_each(|target| target.try_again());
        }
        NodeMap::open_once(targets, config, witness).await
    }

    async fn open_once(
        targets: &[Rc<Target>],
        config: &OsdConfig,
        witness: &NodeWitness,
    ) -> Result<NodeMap, StartError> {
        let (forgotten, patience) = (&*config.forgotten, config.target_timeout);
        let uuids: Vec<Uuid> = targets.iter().map(|t| t.uuid).collect();
        if let Some(twice) = uuids.iter().enumerate().find(|(i, u)| uuids[..*i].contains(u)) {
            return Err(StartError::SameTarget(*twice.1));
        }
        if targets.is_empty() {
            return Err(StartError::NoTargets);
        }
        let MapCopies { copies, mut unreadable, unsealed } = read_copies(targets, witness, patience).await?;
        let mut map = match (newest(&copies), config.node) {
            (Some(map), _) => map.clone(),
            (None, _) if !unreadable.is_empty() => return Err(unreadable.remove(0).1),
            (None, Some(node)) => return Err(StartError::NoMap { node }),
            (None, None) => NodeMap::new(uuids),
        };
        if map.epoch == 0 {
            return Err(StartError::AlteredMap { target: targets[0].uuid });
        }
        if let Some(node) = config.node.filter(|node| *node != map.node) {
            return Err(StartError::OtherNode { node, found: map.node });
        }
        let accepts_losses = map.accept_losses(forgotten);
        map.check_targets(targets, &copies)?;
        let counter = age::witness_counter(targets, witness, patience).await;
        witness.check(map.node, counter.unwrap_or(0));
        let saved_epoch = witness.map_epoch(map.node);
        let newer = saved_epoch.filter(|epoch| *epoch > map.epoch);
        if newer.is_some() {
            map.check_forgotten(targets, forgotten)?;
        }
        if accepts_losses || newer.is_some() {
            map.epoch = map.epoch.max(newer.unwrap_or(0)) + MISSING_STEP;
        }
        // The witness confirms that no target has a newer map that was saved.
        let is_newest = saved_epoch.is_some() && newer.is_none();
        if !is_newest {
            map.check_unreadable(&unreadable, forgotten, counter != Some(0))?;
        }
        let unread = targets.iter().filter(|target| map.has(target) && target.failure().is_some());
        unread.for_each(|target| target.set_missed_map(true));
        let was_read = |target: &Target| unreadable.iter().all(|(uuid, _)| *uuid != target.uuid);
        for (target, _) in targets
            .iter()
            .zip(&copies)
            .filter(|(target, copy)| was_read(target) && map.has_lost_map(target, copy.as_ref()))
        {
            tracing::error!(target_uuid = %target.uuid, "the target has no map of the node: it was formatted again, or is a copy from before its first use");
            witness.expect_age(target.uuid);
        }
        map.tell(targets);
        map.bring_up_to_date(targets, (&copies, &unsealed), is_newest, (witness, patience)).await?;
        witness.retain_pools(|id| map.pools.iter().any(|pool| pool.id == id));
        witness.retain_targets(|uuid| map.record(&uuid).is_some());
        forgotten.iter().for_each(|uuid| witness.forget_age(*uuid));
        witness.store_map_epoch(map.epoch).await.map_err(StartError::Witness)?;
        Ok(map)
    }

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

    /// Writes the map to targets with outdated copies. A target that does not store the map counts
    /// as failed if enough other targets have the map, or if `is_newest` is true.
    async fn bring_up_to_date(
        &self,
        targets: &[Rc<Target>],
        (copies, unsealed): (&[Option<NodeMap>], &[Uuid]),
        is_newest: bool,
        (witness, patience): (&NodeWitness, Duration),
    ) -> Result<(), StartError> {
        let known = targets.iter().zip(copies).filter(|(target, _)| self.has(target));
        let working = known.filter(|(target, _)| target.failure().is_none());
        let (there, behind): (Vec<_>, Vec<_>) = working
            .partition(|(target, copy)| copy.as_ref() == Some(self) && !unsealed.contains(&target.uuid));
        let writes = behind.into_iter().map(|(target, _)| async move {
            tracing::info!(target_uuid = %target.uuid, epoch = self.epoch, "writing the node's map to a target that lacks it");
            let incarnation = target.store.incarnation();
            (target, incarnation, tokio::time::timeout(patience, write_copy(target, self, witness.seal())).await)
        });
        let written = join_all(writes).await;
        let there =
            there.len() + written.iter().filter(|(.., outcome)| matches!(outcome, Ok(Ok(())))).count();
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
                    target.overdue(&ids::node_collection(), patience);
                    late(patience)
                }
            };
            let expected = is_newest || self.does_without(&target.uuid);
            if there == 0 || (there * 2 <= self.targets.len() && !expected) {
                return Err(start_error(target, error));
            }
            tracing::warn!(target_uuid = %target.uuid, %error, "the target did not store the node's map");
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

    /// Whether the map lists a target.
    pub(crate) fn has(&self, target: &Target) -> bool {
        self.record(&target.uuid).is_some()
    }

    /// Whether the map lists a target as lost or out of use, or does not list it because an operator
    /// has replaced it.
    fn does_without(&self, target: &Uuid) -> bool {
        self.record(target).is_none_or(|record| record.lost || record.out)
    }

    /// Records which targets have failed or have no space for the map.
    pub(crate) fn note_lost(&mut self, targets: &[Rc<Target>]) {
        for record in &mut self.targets {
            if let Some(target) = targets.iter().find(|target| target.uuid == record.uuid) {
                record.lost = target.failure().is_some() || target.lacks_map();
            }
        }
    }

    /// Whether the operator has accepted the loss of changes that only this target has.
    fn has_forgotten(&self, target: &Target) -> bool {
        self.record(&target.uuid).is_some_and(|record| record.forgotten || record.given_up)
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

    /// Returns a target's record.
    pub(crate) fn record(&self, uuid: &Uuid) -> Option<&TargetRecord> {
        self.targets.iter().find(|record| record.uuid == *uuid)
    }

    /// Tells each target whether the map lists it as out of use.
    pub(crate) fn tell(&self, targets: &[Rc<Target>]) {
        for target in targets {
            let Some(record) = self.record(&target.uuid) else { continue };
            if target.is_out() != record.out {
                target.set_out(record.out);
            }
        }
    }

    /// Writes the map to every target that it lists and that has not failed. For success, most listed
    /// targets must store the map, or the node must do without all other targets according to the
    /// map. If the witness is durable, one target suffices. The witness stores the map epoch. Waits at
    /// most `patience` for each target. After an error, possibly only some targets have the map. The
    /// next start of the node then updates the other targets.
    pub(crate) async fn save(
        &self,
        targets: &[Rc<Target>],
        witness: &NodeWitness,
        patience: Duration,
    ) -> Result<(), StoreError> {
        // A replaced target does not count: the next start of the node may be without it.
        let listed = || targets.iter().filter(|target| self.has(target));
        // A write of the map clears this mark.
        listed().for_each(|target| target.set_missed_map(true));
        let there = listed().filter(|target| target.failure().is_none());
        let copies = there.map(|target| async move {
            let incarnation = target.store.incarnation();
            let Ok(written) = tokio::time::timeout(patience, write_copy(target, self, witness.seal())).await
            else {
                // Placement groups that cannot work without the target wait for the target; saving
                // the map does not wait.
                target.overdue(&ids::node_collection(), patience);
                return Ok(Some(late(patience)));
            };
            match written {
                Ok(()) => Ok(None),
                Err(e @ StoreError::NoSpace { .. }) => Ok(Some(e)),
                Err(e) if is_final(&e) && target.store.incarnation() != incarnation => {
                    Err(StoreError::Disconnected(format!("{e}; the target was remounted meanwhile")))
                }
                Err(e) if is_final(&e) && targets.len() > 1 => {
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
            target.failure().is_none() || self.does_without(&target.uuid) || self.has_forgotten(target)
        };
        let certain = full.is_none() && targets.iter().all(is_settled);
        if written > 0 && (certain || written * 2 > self.targets.len() || witness.is_durable()) {
            return witness.store_map_epoch(self.epoch).await;
        }
        if let Some(full) = full {
            return Err(full);
        }
        let detail = "more than half of the targets must store the node's map".into();
        let e = StoreError::TooFewTargets { there: written, needed: self.targets.len() / 2 + 1, detail };
        if targets.iter().any(|target| target.is_hopeful()) {
            return Err(StoreError::Disconnected(format!("{e}; failed targets are tried again")));
        }
        Err(e)
    }

    /// Writes the map to a target that had no space for it earlier. Returns whether the target has
    /// the map now.
    pub(crate) async fn give(&self, target: &Target, witness: &NodeWitness, patience: Duration) -> bool {
        matches!(tokio::time::timeout(patience, write_copy(target, self, witness.seal())).await, Ok(Ok(())))
    }

    /// Encodes the map: the format, the seal, and the content.
    fn encode(&self, seal: &Seal) -> Bytes {
        // Encoding plain data cannot fail.
        let content = postcard::to_allocvec(self).expect("plain data can be encoded");
        let proof = seal.prove(SEAL, &[&content]);
        [&[FORMAT][..], &proof, &content].concat().into()
    }

    /// Returns the size of the encoded map, in bytes.
    pub(crate) fn encoded_len(&self) -> usize {
        let content = postcard::to_allocvec(self).expect("plain data can be encoded");
        1 + SEAL_LEN + content.len()
    }

    /// Decodes a map of this version or of an older one, which has no seal.
    ///
    /// # Errors
    /// A description of what is wrong.
    fn decode(bytes: &[u8], seal: &Seal) -> Result<(NodeMap, Sealing), MapError> {
        let text = |e: postcard::Error| MapError::Damaged(e.to_string());
        let (format, rest) =
            bytes.split_first().ok_or_else(|| MapError::Damaged("the copy is empty".into()))?;
        let map = match *format {
            FORMAT => {
                let (proof, content) = rest.split_at_checked(SEAL_LEN).ok_or(MapError::Altered)?;
                let sealing = seal.check(SEAL, &[content], proof).ok_or(MapError::Altered)?;
                return postcard::from_bytes(content).map(|map| (map, sealing)).map_err(text);
            }
            FORMAT_NO_ACCOUNTS => postcard::from_bytes::<MapWithoutAccounts>(rest).map(NodeMap::from),
            FORMAT_HASHED_IDS => postcard::from_bytes::<HashedMap>(rest).map(NodeMap::from),
            FORMAT_NO_SLOTS => postcard::from_bytes::<SlotlessMap>(rest).map(NodeMap::from),
            FORMAT_SINGLE => postcard::from_bytes::<SingleMap>(rest).map(NodeMap::from),
            other => {
                return Err(MapError::Damaged(format!(
                    "its format {other} is unknown; use the version of Outboard that wrote it, or a later one"
                )));
            }
        };
        map.map(|map| (map, Sealing::Missing)).map_err(text)
    }

    /// Returns a pool's name for operators: `POOL`, or `TENANT/POOL` if the tenant is not `main`.
    pub(crate) fn label(&self, pool: &PoolRecord) -> String {
        match pool.tenant {
            accounts::MAIN => pool.name.clone(),
            tenant => format!("{}/{}", self.accounts.tenant_name(tenant), pool.name),
        }
    }

    /// Returns the display name of the target with this uuid: its number, if it belongs to the
    /// node.
    pub(crate) fn name_of(&self, uuid: &str) -> String {
        let number = self.targets.iter().position(|record| record.uuid.to_string() == uuid);
        number.map_or_else(|| uuid.to_owned(), |number| number.to_string())
    }
}

fn late(patience: Duration) -> StoreError {
    StoreError::Io(format!("no answer within {patience:?}"))
}

async fn read_copy(target: &Target, witness: &NodeWitness) -> Result<Option<(NodeMap, Sealing)>, StartError> {
    let (cid, oid) = (ids::node_collection(), ids::map_object());
    target.backing.settle(&cid).await.map_err(|e| start_error(target, e))?;
    let corrupt = |detail: String| StartError::CorruptMap { target: target.uuid, detail };
    let mut bytes = match read_pieces(target).await {
        Ok(bytes) => bytes,
        Err(StoreError::NoSuchCollection(_) | StoreError::NoSuchObject(_)) => return Ok(None),
        Err(e) => return Err(start_error(target, e)),
    };
    if bytes.is_empty() {
        let read = target.store.read(&cid, &oid, 0, MAP_BYTES_MAX, None).await;
        let read = read.map_err(|e| start_error(target, e))?;
        read.verify().map_err(|e| corrupt(e.to_string()))?;
        bytes = read.contiguous().to_vec();
    }
    NodeMap::decode(&bytes, witness.seal()).map(Some).map_err(|e| match e {
        MapError::Damaged(detail) => corrupt(detail),
        MapError::Altered => StartError::AlteredMap { target: target.uuid },
    })
}

/// Reads the bytes of a target's copy of the map; empty if the omap does not contain a copy.
async fn read_pieces(target: &Target) -> store::Result<Vec<u8>> {
    let (cid, oid) = (ids::node_collection(), ids::map_object());
    let mut bytes = Vec::new();
    let mut from = Bytes::new();
    loop {
        let limit = MAP_BYTES_MAX as usize / PIECE;
        let (page, more) = target.store.omap_iterate(&cid, &oid, from, limit).await?;
        page.iter().for_each(|(_, piece)| bytes.extend_from_slice(piece));
        let too_long = bytes.len() as u64 > MAP_BYTES_MAX;
        match page.last() {
            Some((last, _)) if more && !too_long => from = [last, &b"\0"[..]].concat().into(),
            _ => return Ok(bytes),
        }
    }
}

async fn write_copy(target: &Target, map: &NodeMap, seal: &Seal) -> Result<(), StoreError> {
    let (cid, oid) = (ids::node_collection(), ids::map_object());
    let known = target.store.collections().await?.contains(&cid);
    let mut transaction = Transaction::new(cid).from_reserve();
    if !known {
        transaction.ops.push(Op::CreateCollection);
    }
    let bytes = map.encode(seal);
    let pieces = (0..bytes.len()).step_by(PIECE);
    let piece = |at: usize| bytes.slice(at..bytes.len().min(at + PIECE));
    let key = |at: usize| Bytes::copy_from_slice(&(at as u32).to_be_bytes());
    let entries = pieces.map(|at| (key(at), piece(at))).collect();
    transaction.ops.push(Op::Truncate { oid: oid.clone(), size: 0 });
    transaction.ops.push(Op::OmapClear { oid: oid.clone() });
    transaction.ops.push(Op::OmapSet { oid, entries });
    target.backing.incarnation();
    target.backing.queue(transaction).await?;
    target.set_lacks_map(false);
    target.set_missed_map(false);
    Ok(())
}

/// Returns whether an error means that a target has failed, and not just that the target is not
/// reachable yet.
fn is_final(e: &StoreError) -> bool {
    use StoreError as E;
    matches!(e, E::Io(_) | E::Absent(_) | E::Poisoned(_) | E::Corrupt { .. })
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
    copies: Vec<Option<NodeMap>>,
    /// The targets whose maps cannot be read, and why.
    unreadable: Vec<(Uuid, StartError)>,
    /// The targets whose copies have no seal of the DPU.
    unsealed: Vec<Uuid>,
}

/// Reads the copies of the map on the targets. Waits at most `patience` for each target.
async fn read_copies(
    targets: &[Rc<Target>],
    witness: &NodeWitness,
    patience: Duration,
) -> Result<MapCopies, StartError> {
    let mut copies = Vec::new();
    let (mut unreadable, mut unsealed) = (Vec::new(), Vec::new());
    let incarnations: Vec<u64> = targets.iter().map(|target| target.store.incarnation()).collect();
    let reading = targets.iter().map(|target| tokio::time::timeout(patience, read_copy(target, witness)));
    let read = targets.iter().zip(incarnations).zip(join_all(reading).await);
    for ((target, incarnation), copy) in read {
        let copy = match copy {
            Err(_) => {
                target.overdue(&ids::node_collection(), patience);
                unreadable.push((target.uuid, start_error(target, late(patience))));
                None
            }
            // The target was remounted meanwhile and may work now.
            Ok(Err(e)) if target.store.incarnation() != incarnation => return Err(e),
            Ok(Err(e)) if is_final_for(&e) => {
                match &e {
                    StartError::Target { source, .. } if !matches!(source, StoreError::Corrupt { .. }) => {
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
                if sealing == Sealing::Missing && witness.has_sealed_map(map.node) {
                    // The node has had a sealed map since, so this one is older, whatever it says.
                    map.epoch = 0;
                }
                map
            }),
        };
        copies.push(copy);
    }
    Ok(MapCopies { copies, unreadable, unsealed })
}

/// Returns the valid map. If two maps have the same epoch, this is the map with more copies: the other
/// map was not saved on enough targets.
fn newest(copies: &[Option<NodeMap>]) -> Option<&NodeMap> {
    let count = |map: &NodeMap| copies.iter().flatten().filter(|copy| *copy == map).count();
    copies.iter().flatten().max_by_key(|map| (map.epoch, count(map)))
}

fn start_error(target: &Target, e: StoreError) -> StartError {
    StartError::Target { target: target.uuid, source: e }
}

#[cfg(test)]
mod tests {
    use identity::ProofKey;

    use super::*;

    #[test]
    fn maps_of_older_versions_can_be_read() {
        let (node, uuid) = (Uuid::from_u128(7), Uuid::from_u128(1));
        let seal = Seal::default();
        let redundancy: Redundancy = "mirror:2".parse().unwrap();
        let name = "p".to_owned();
        let ids = IdLayout::ByName;
        let pool =
            PoolRecord { id: 1, name, pg_count: 8, made_ms: 9, removing: false, redundancy, ids, tenant: 0 };
        let targets = vec![TargetRecord { out: true, ..TargetRecord::new(uuid) }];
        let mut map = NodeMap {
            epoch: 3,
            node,
            targets,
            next_pool_id: 2,
            pools: vec![pool],
            accounts: Accounts::new(0),
        };
        assert_eq!(NodeMap::decode(&map.encode(&seal), &seal), Ok((map.clone(), Sealing::Own)));
        map.pools[0].ids = IdLayout::Hashed;
        assert_eq!(NodeMap::decode(&map.encode(&seal), &seal), Ok((map.clone(), Sealing::Own)));
        let pools = vec![(1u32, "p", 8u32, 9u64, false, redundancy)];
        let target = (uuid, uuid, true, false, false, false);
        let hashed = (3u64, node, vec![target], 2u32, pools.clone());
        let hashed = postcard::to_extend(&hashed, vec![FORMAT_HASHED_IDS]).unwrap();
        assert_eq!(NodeMap::decode(&hashed, &seal), Ok((map.clone(), Sealing::Missing)));
        let pool = (1u32, "p", 8u32, 9u64, false, redundancy, IdLayout::Hashed);
        let unsealed = (3u64, node, vec![target], 2u32, vec![pool]);
        let unsealed = postcard::to_extend(&unsealed, vec![FORMAT_NO_ACCOUNTS]).unwrap();
        assert_eq!(NodeMap::decode(&unsealed, &seal), Ok((map.clone(), Sealing::Missing)));
        let slotless = (3u64, node, vec![(uuid, true, false)], 2u32, pools);
        let slotless = postcard::to_extend(&slotless, vec![FORMAT_NO_SLOTS]).unwrap();
        assert_eq!(NodeMap::decode(&slotless, &seal), Ok((map.clone(), Sealing::Missing)));
        let single = (3u64, node, vec![uuid], 2u32, vec![(1u32, "p", 8u32, 9u64, false)]);
        let single = postcard::to_extend(&single, vec![FORMAT_SINGLE]).unwrap();
        let single = NodeMap::decode(&single, &seal).unwrap().0;
        assert_eq!(single.targets, [TargetRecord::new(uuid)]);
        assert_eq!(single.pools[0].redundancy, Redundancy::Single);
        assert_eq!(single.pools[0].ids, IdLayout::Hashed);
        let unknown = NodeMap::decode(&[9, 1], &seal);
        assert!(matches!(unknown, Err(MapError::Damaged(why)) if why.contains("format 9")));
        let sealed = map.encode(&seal);
        let other = |accepts| Seal::new(ProofKey::new(&[1; 32]), accepts);
        assert_eq!(NodeMap::decode(&sealed, &other(false)), Err(MapError::Altered));
        assert_eq!(NodeMap::decode(&sealed, &other(true)), Ok((map.clone(), Sealing::Accepted)));
        for at in 1..sealed.len() {
            let mut altered = sealed.to_vec();
            altered[at] ^= 1;
            assert_eq!(NodeMap::decode(&altered, &seal), Err(MapError::Altered), "byte {at}");
        }
    }

    #[test]
    fn a_new_target_takes_over_the_slot_of_the_target_that_it_replaces() {
        let first = TargetRecord::new(Uuid::from_u128(1));
        let second = first.replaced_by(Uuid::from_u128(2)).replaced_by(Uuid::from_u128(3));
        assert_eq!((second.uuid, second.slot, second.lost), (Uuid::from_u128(3), first.slot, true));
    }
}
