//! The node's map: which targets it has, and its pools. A copy is on every target; the highest epoch counts.

use std::rc::Rc;

use base::block::Payload;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use store::{Op, StoreError, Transaction, WriteSource};
use uuid::Uuid;

use crate::StartError;
use crate::ids;
use crate::target::Target;

/// Largest map, in bytes: far more than the most pools and targets take.
const MAP_BYTES_MAX: u64 = 1 << 20;
const FORMAT: u8 = 1;

/// See the [module](self) documentation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeMap {
    pub(crate) epoch: u64,
    pub(crate) node: Uuid,
    /// In the order that placement does not depend on.
    pub(crate) targets: Vec<Uuid>,
    pub(crate) next_pool_id: u32,
    pub(crate) pools: Vec<PoolRecord>,
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
}

impl NodeMap {
    /// Finds the map on the targets, makes it if all of them are new, and brings those up to date that lag behind.
    pub(crate) async fn open(targets: &[Rc<Target>]) -> Result<NodeMap, StartError> {
        let uuids: Vec<Uuid> = targets.iter().map(|t| t.uuid).collect();
        if let Some(twice) = uuids.iter().enumerate().find(|(i, u)| uuids[..*i].contains(u)) {
            return Err(StartError::SameTarget(*twice.1));
        }
        if targets.is_empty() {
            return Err(StartError::NoTargets);
        }
        let mut copies = Vec::new();
        for target in targets {
            copies.push(read_copy(target).await?);
        }
        let newest = copies.iter().flatten().max_by_key(|map| map.epoch).cloned();
        let map = match newest {
            Some(map) => map,
            None => {
                NodeMap { epoch: 1, node: Uuid::new_v4(), targets: uuids, next_pool_id: 1, pools: vec![] }
            }
        };
        map.check_targets(targets, &copies)?;
        for (target, copy) in targets.iter().zip(&copies) {
            if copy.as_ref() != Some(&map) {
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
                // Only when a node is first made can a target of it be without a map.
                None => self.epoch > 1,
            };
            if foreign || !self.targets.contains(&target.uuid) {
                return Err(StartError::ForeignTarget { target: target.uuid, node: self.node });
            }
        }
        let missing = self.targets.iter().find(|uuid| targets.iter().all(|t| t.uuid != **uuid));
        match missing {
            Some(uuid) => Err(StartError::MissingTarget { target: *uuid, node: self.node }),
            None => Ok(()),
        }
    }

    /// Puts the map on every target. On an error some have it and some do not, which the next start mends.
    pub(crate) async fn save(&self, targets: &[Rc<Target>]) -> Result<(), StoreError> {
        let copies = targets.iter().map(|target| write_copy(target, self));
        futures::future::try_join_all(copies).await.map(drop)
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

fn start_error(target: &Target, e: StoreError) -> StartError {
    StartError::Target { target: target.uuid, source: e }
}
