//! The node's map: which targets it has, and its pools. A copy is on every target; the highest epoch counts.

use std::rc::Rc;
use std::time::Duration;

use base::block::Payload;
use bytes::Bytes;
use proto::Redundancy;
use serde::{Deserialize, Serialize};
use store::{Op, StoreError, Transaction, WriteSource};
use uuid::Uuid;

use crate::StartError;
use crate::ids;
use crate::target::Target;

/// Largest map, in bytes: far more than the most pools and targets take.
const MAP_BYTES_MAX: u64 = 1 << 20;
const FORMAT: u8 = 2;
/// Before there was redundancy.
const FORMAT_SINGLE: u8 = 1;

/// See the [module](self) documentation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeMap {
    pub(crate) epoch: u64,
    pub(crate) node: Uuid,
    /// In the order of their numbers; placement does not depend on it.
    pub(crate) targets: Vec<TargetRecord>,
    pub(crate) next_pool_id: u32,
    pub(crate) pools: Vec<PoolRecord>,
}

/// A target in the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TargetRecord {
    pub(crate) uuid: Uuid,
    /// The operator has taken it out.
    pub(crate) out: bool,
    /// It has failed, and does not have this map.
    pub(crate) lost: bool,
}

/// A pool in the map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolRecord {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) pg_count: u32,
    pub(crate) made_ms: u64,
    /// Its objects are being removed; it can no longer be used.
    pub(crate) removing: bool,
    pub(crate) redundancy: Redundancy,
}

/// The map as it was in [`FORMAT_SINGLE`].
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
        };
        NodeMap {
            epoch: old.epoch,
            node: old.node,
            targets: old.targets.into_iter().map(TargetRecord::new).collect(),
            next_pool_id: old.next_pool_id,
            pools: old.pools.into_iter().map(pool).collect(),
        }
    }
}

impl TargetRecord {
    fn new(uuid: Uuid) -> TargetRecord {
        TargetRecord { uuid, out: false, lost: false }
    }
}

impl NodeMap {
    /// Finds the map on the targets, makes it if all of them are new, and brings those up to date that lag behind. Targets that
    /// fail are marked so; without them the node starts if what is there is certain to have the newest map.
    pub(crate) async fn open(targets: &[Rc<Target>]) -> Result<NodeMap, StartError> {
        let uuids: Vec<Uuid> = targets.iter().map(|t| t.uuid).collect();
        if let Some(twice) = uuids.iter().enumerate().find(|(i, u)| uuids[..*i].contains(u)) {
            return Err(StartError::SameTarget(*twice.1));
        }
        if targets.is_empty() {
            return Err(StartError::NoTargets);
        }
        let mut copies = Vec::new();
        let mut failure = None;
        for target in targets {
            let copy = match read_copy(target).await {
                Err(e) if is_final_for(&e) => {
                    match &e {
                        StartError::Target { source, .. } => target.fail(source),
                        other => {
                            let (what, detail) = ("the node's map".into(), other.to_string());
                            target.fail(&StoreError::Corrupt { what, detail });
                        }
                    }
                    failure = Some(e);
                    None
                }
                copy => copy?,
            };
            copies.push(copy);
        }
        // Of two that are as new, the one that counts is on most targets: the other one could not be saved.
        let count = |map: &NodeMap| copies.iter().flatten().filter(|copy| *copy == map).count();
        let newest = copies.iter().flatten().max_by_key(|map| (map.epoch, count(map))).cloned();
        let map = match (newest, failure.take_if(|_| newest_is_missing(&copies))) {
            (_, Some(failure)) => return Err(failure),
            (Some(map), _) => map,
            (None, _) => {
                let targets = uuids.into_iter().map(TargetRecord::new).collect();
                NodeMap { epoch: 1, node: Uuid::new_v4(), targets, next_pool_id: 1, pools: vec![] }
            }
        };
        map.check_targets(targets, &copies)?;
        map.check_failed(targets, failure)?;
        map.tell(targets);
        for (target, copy) in targets.iter().zip(&copies) {
            if target.failure().is_none() && copy.as_ref() != Some(&map) {
                tracing::info!(target_uuid = %target.uuid, epoch = map.epoch, "the target gets the node's map");
                write_copy(target, &map).await.map_err(|e| start_error(target, e))?;
            }
        }
        Ok(map)
    }

    fn check_targets(&self, targets: &[Rc<Target>], copies: &[Option<NodeMap>]) -> Result<(), StartError> {
        for (target, copy) in targets.iter().zip(copies) {
            let foreign = match copy {
                Some(copy) => copy.node != self.node,
                // A target without a map: when the node is first made, or one that has failed, or that takes another's place.
                None => {
                    let may_be_empty = self.record(&target.uuid).is_some_and(|r| r.lost);
                    self.epoch > 1 && target.failure().is_none() && !may_be_empty
                }
            };
            if foreign || self.record(&target.uuid).is_none() {
                return Err(StartError::ForeignTarget { target: target.uuid, node: self.node });
            }
        }
        let missing = self
            .targets
            .iter()
            .find(|record| !record.out && !record.lost && targets.iter().all(|t| t.uuid != record.uuid));
        match missing {
            Some(record) => Err(StartError::MissingTarget { target: record.uuid, node: self.node }),
            None => Ok(()),
        }
    }

    /// Whether targets that cannot be read may have a newer map: not if most can be read, since a map is on most of them
    /// before it counts, and not if the newest one that was read says that the others are lost.
    fn check_failed(&self, targets: &[Rc<Target>], failure: Option<StartError>) -> Result<(), StartError> {
        let Some(failure) = failure else { return Ok(()) };
        let failed = targets.iter().filter(|t| t.failure().is_some());
        let surprising = failed.clone().filter(|t| self.record(&t.uuid).is_none_or(|r| !r.lost && !r.out));
        if surprising.count() == 0 || failed.count() * 2 < self.targets.len() {
            return Ok(());
        }
        Err(failure)
    }

    /// A target's record.
    pub(crate) fn record(&self, uuid: &Uuid) -> Option<&TargetRecord> {
        self.targets.iter().find(|record| record.uuid == *uuid)
    }

    /// Tells the targets what the map says of them.
    pub(crate) fn tell(&self, targets: &[Rc<Target>]) {
        for target in targets {
            let Some(record) = self.record(&target.uuid) else { continue };
            if target.is_out() != record.out {
                target.set_out(record.out);
            }
        }
    }

    /// Puts the map on every target that has not failed: those are to be most of them, or else the map says which are lost. On
    /// an error some have it and some do not, which the next start mends.
    pub(crate) async fn save(&self, targets: &[Rc<Target>], timeout: Duration) -> Result<(), StoreError> {
        let there = targets.iter().filter(|target| target.failure().is_none());
        let copies = there.map(|target| async move {
            let Ok(written) = tokio::time::timeout(timeout, write_copy(target, self)).await else {
                // Placement groups that cannot do without the target wait for it; the map need not.
                target.overdue(timeout);
                return Ok(0);
            };
            match written {
                Err(e) if is_final(&e) && targets.len() > 1 => {
                    target.fail(&e);
                    Ok(0)
                }
                written => written.map(|()| 1),
            }
        });
        let written: usize = futures::future::try_join_all(copies).await?.into_iter().sum();
        let says_so = |target: &Rc<Target>| self.record(&target.uuid).is_some_and(|r| r.lost || r.out);
        let certain = targets.iter().all(|target| target.failure().is_none() || says_so(target));
        if written > 0 && (certain || written * 2 > targets.len()) {
            return Ok(());
        }
        let detail = "most targets are needed to change the node's map".into();
        let e = StoreError::TooFewTargets { there: written, needed: targets.len() / 2 + 1, detail };
        if targets.iter().any(|target| target.is_hopeful()) {
            return Err(StoreError::Disconnected(format!("{e}; targets that have failed are tried again")));
        }
        Err(e)
    }
}

async fn read_copy(target: &Target) -> Result<Option<NodeMap>, StartError> {
    let (cid, oid) = (ids::node_collection(), ids::map_object());
    target.settle(&cid).await.map_err(|e| start_error(target, e))?;
    let read = match target.store.read(&cid, &oid, 0, MAP_BYTES_MAX, None).await {
        Ok(read) => read,
        Err(StoreError::NoSuchCollection(_) | StoreError::NoSuchObject(_)) => return Ok(None),
        Err(e) => return Err(start_error(target, e)),
    };
    let corrupt = |detail: String| StartError::CorruptMap { target: target.uuid, detail };
    read.verify().map_err(|e| corrupt(e.to_string()))?;
    let bytes = read.contiguous();
    match bytes.split_first() {
        Some((&FORMAT, rest)) => postcard::from_bytes(rest).map(Some).map_err(|e| corrupt(e.to_string())),
        Some((&FORMAT_SINGLE, rest)) => {
            let old: SingleMap = postcard::from_bytes(rest).map_err(|e| corrupt(e.to_string()))?;
            Ok(Some(old.into()))
        }
        Some((format, _)) => Err(corrupt(format!("format {format} is not known"))),
        None => Err(corrupt("it is empty".into())),
    }
}

async fn write_copy(target: &Target, map: &NodeMap) -> Result<(), StoreError> {
    let (cid, oid) = (ids::node_collection(), ids::map_object());
    let known = target.store.collections().await?.contains(&cid);
    let mut transaction = Transaction::new(cid);
    if !known {
        transaction.ops.push(Op::CreateCollection);
    }
    // Growing a vector cannot fail, and the type is plain data.
    let bytes: Bytes = postcard::to_extend(map, vec![FORMAT]).expect("plain data can be encoded").into();
    let source = WriteSource::Inline(Payload::compute(0, bytes));
    transaction.ops.push(Op::Truncate { oid: oid.clone(), size: 0 });
    transaction.ops.push(Op::Write { oid, offset: 0, source });
    target.epoch();
    target.queue(transaction).await
}

/// Whether an error says that a target has failed, rather than that it is not there yet.
fn is_final(e: &StoreError) -> bool {
    use StoreError as E;
    matches!(e, E::Io(_) | E::Absent(_) | E::Poisoned(_) | E::Corrupt { .. })
}

/// The same of what a target's copy of the map was read with.
fn is_final_for(e: &StartError) -> bool {
    match e {
        StartError::Target { source, .. } => is_final(source),
        StartError::CorruptMap { .. } => true,
        _ => false,
    }
}

/// Whether no target that can be read has a map.
fn newest_is_missing(copies: &[Option<NodeMap>]) -> bool {
    copies.iter().all(Option::is_none)
}

fn start_error(target: &Target, e: StoreError) -> StartError {
    StartError::Target { target: target.uuid, source: e }
}
