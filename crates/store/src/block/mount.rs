//! Mounting: recovers a target and prepares it for calls.

use std::collections::BTreeMap;
use std::sync::Arc;

use uuid::Uuid;

use super::core::{Core, MemoryLimits};
use super::drive::Drive;
use super::index::Index;
use super::records::{decode_collection, key};
use super::recovery::{RecoveryMode, recover};
use super::superblock::Superblock;
use crate::{CollectionId, Result, StoreError};

/// Recovers a target and prepares it for calls.
///
/// # Errors
/// Those of [`recover`], and [`StoreError::WrongUuid`] if the target's UUID is not `uuid`.
pub(crate) fn mount(
    drive: &Arc<dyn Drive>,
    uuid: Option<Uuid>,
    limits: &MemoryLimits,
) -> Result<(Core, Arc<Index>)> {
    let found = Superblock::read(drive.as_ref())?.uuid;
    if let Some(expected) = uuid.filter(|u| *u != found) {
        return Err(StoreError::WrongUuid { found: found.to_string(), expected: expected.to_string() });
    }
    let recovered = recover(drive, limits.page_bytes, RecoveryMode::Mount)?;
    recovered
        .damage
        .iter()
        .for_each(|damage| tracing::warn!(damage, "recovery has ignored damage on the target"));
    let mut collections: BTreeMap<CollectionId, u64> = BTreeMap::new();
    recovered.entries(key::COLLECTION, |name, value| {
        let (cid, number) = decode_collection(&name, &value)?;
        collections.insert(cid, number);
        Ok(())
    })?;
    let ready = recovered.resume(drive.as_ref())?;
    let index = Arc::clone(&ready.index);
    Ok((Core::new(ready, collections, limits)?, index))
}
