//! The encoded map, as a copy stores it: a format byte, the seal, and the content. Maps of earlier
//! versions have older formats, and no seal.

use bytes::Bytes;
use serde::Deserialize;
use uuid::Uuid;
use wire::Redundancy;

use super::{NodeMap, PoolRecord, TargetRecord};
use crate::accounts::{self, Accounts};
use crate::ended::EndedSessions;
use crate::ids::IdLayout;
use crate::seal::{SEAL_LEN, Seal, Sealing};

const FORMAT: u8 = 6;
/// Format of maps without ended sessions.
const FORMAT_NO_ENDED: u8 = 5;
/// Format of maps without accounts and without seal.
const FORMAT_NO_ACCOUNTS: u8 = 4;
/// Format of maps from before pools had a layout of ids.
const FORMAT_HASHED_IDS: u8 = 3;
/// Format of maps without slots.
const FORMAT_NO_SLOTS: u8 = 2;
/// Format of maps from before redundancy schemes existed.
const FORMAT_SINGLE: u8 = 1;
/// Highest epoch of a map without a seal.
const EPOCH_MAX: u64 = 1 << 62;
/// Label of the proof by which the DPU recognises its maps.
const SEAL: &str = "outboard node map";

/// Why a copy of the map cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum MapError {
    /// The copy cannot be decoded.
    Damaged(String),
    /// The DPU has not written the copy.
    Altered,
}

impl NodeMap {
    /// Encodes the map: the format, the seal, and the content.
    pub(super) fn encode(&self, seal: &Seal) -> Bytes {
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
    pub(super) fn decode(bytes: &[u8], seal: &Seal) -> Result<(NodeMap, Sealing), MapError> {
        let text = |e: postcard::Error| MapError::Damaged(e.to_string());
        let (format, rest) =
            bytes.split_first().ok_or_else(|| MapError::Damaged("the copy is empty".into()))?;
        let map = match *format {
            FORMAT | FORMAT_NO_ENDED => {
                let (proof, content) = rest.split_at_checked(SEAL_LEN).ok_or(MapError::Altered)?;
                let sealing = seal.check(SEAL, &[content], proof).ok_or(MapError::Altered)?;
                let map = match *format {
                    FORMAT_NO_ENDED => postcard::from_bytes::<MapWithoutEnded>(content).map(NodeMap::from),
                    _ => postcard::from_bytes(content),
                };
                return map.map(|map| (map, sealing)).map_err(text);
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
        let map = map.map_err(text)?;
        // Nothing has checked the epoch of a map without a seal. Epochs grow by steps, and must not overflow.
        if map.epoch > EPOCH_MAX {
            return Err(MapError::Damaged(format!("its epoch {} is too high", map.epoch)));
        }
        Ok((map, Sealing::Missing))
    }
}

/// The map in [`FORMAT_NO_ENDED`].
#[derive(Deserialize)]
struct MapWithoutEnded {
    epoch: u64,
    node: Uuid,
    targets: Vec<TargetRecord>,
    next_pool_id: u32,
    pools: Vec<PoolRecord>,
    accounts: Accounts,
}

impl From<MapWithoutEnded> for NodeMap {
    fn from(old: MapWithoutEnded) -> NodeMap {
        NodeMap {
            epoch: old.epoch,
            node: old.node,
            targets: old.targets,
            next_pool_id: old.next_pool_id,
            pools: old.pools,
            accounts: old.accounts,
            ended: EndedSessions::default(),
        }
    }
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
            ended: EndedSessions::default(),
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
            ended: EndedSessions::default(),
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
            ended: EndedSessions::default(),
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
            ended: EndedSessions::default(),
        }
    }
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
            ended: EndedSessions::default(),
        };
        assert_eq!(NodeMap::decode(&map.encode(&seal), &seal), Ok((map.clone(), Sealing::Own)));
        let parts = (map.epoch, map.node, &map.targets, map.next_pool_id, &map.pools, &map.accounts);
        let content = postcard::to_allocvec(&parts).unwrap();
        let without_ended = [&[FORMAT_NO_ENDED][..], &seal.prove(SEAL, &[&content]), &content].concat();
        assert_eq!(NodeMap::decode(&without_ended, &seal), Ok((map.clone(), Sealing::Own)));
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
}
