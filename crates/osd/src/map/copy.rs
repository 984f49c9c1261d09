//! The copy of the map on one target.
//!
//! A copy is stored in pieces in the omap of one object. A copy needs only index space, so a target
//! with a full data area can store it. Older versions of the node stored the copy as the object's
//! data. This version reads these copies too, and replaces them when the map changes.

use std::time::Duration;

use bytes::Bytes;
use store::{Op, StoreCalls, StoreError, Transaction};

use super::NodeMap;
use super::format::MapError;
use crate::ids;
use crate::seal::{Seal, Sealing};
use crate::start_error::StartError;
use crate::target::Target;

/// Maximum size of the map, in bytes. The maximum numbers of pools and targets need far less.
pub(crate) const MAP_BYTES_MAX: u64 = 1 << 20;
/// Maximum length of the piece of the map in one omap entry, in bytes.
const PIECE: usize = 32 << 10;

/// Returns the error of a target that has not answered within `patience`.
pub(super) fn late(patience: Duration) -> StoreError {
    StoreError::Io(format!("no answer within {patience:?}"))
}

/// Reads a target's copy of the map; `None` if it has none.
///
/// # Errors
/// If the copy cannot be read, or if the DPU has not written it.
pub(super) async fn read_copy(
    target: &Target,
    seal: &Seal,
) -> Result<Option<(NodeMap, Sealing)>, StartError> {
    let (cid, oid) = (ids::node_collection(), ids::map_object());
    target.backing.settle(&cid, false).await.map_err(|e| start_error(target, e))?;
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
    NodeMap::decode(&bytes, seal).map(Some).map_err(|e| match e {
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

/// Writes the map to a target.
///
/// # Errors
/// If the target does not store it. It may have the map all the same.
pub(super) async fn write_copy(target: &Target, map: &NodeMap, seal: &Seal) -> Result<(), StoreError> {
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
pub(super) fn is_final(e: &StoreError) -> bool {
    use StoreError as E;
    matches!(e, E::Io(_) | E::Absent(_) | E::Poisoned(_) | E::Corrupt { .. })
}

/// Returns the error of a start that fails because of a target.
pub(super) fn start_error(target: &Target, e: StoreError) -> StartError {
    StartError::Target { target: target.uuid, source: e }
}
