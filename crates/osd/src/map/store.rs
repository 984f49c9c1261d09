//! [`MapStore`]: the contract of the durable storage of the node's map.

use futures::future::LocalBoxFuture;
use store::StoreError;
use uuid::Uuid;

use super::NodeMap;
use crate::start_error::StartError;

/// Durable storage of the node's map: its targets and pools, tenants, users and rights. The osd reaches
/// the durable map only through this contract. All calls come from the thread of the first shard.
///
/// **One writer.** Only one osd at a time uses the map of a node. It calls [`load`](MapStore::load)
/// once, before all other calls. It makes one call at a time.
///
/// **Epochs.** The epoch of a map states its age, and identifies the map. The epoch of each saved map
/// exceeds the epoch of the loaded map and the epochs of all earlier saves, failed saves included. The
/// store guarantees the same across restarts: a load never returns a lower epoch than that of a failed
/// save that had any effect.
///
/// **Durability.** A map that was saved is durable. A later load returns this map, or a map with a
/// higher epoch whose save has failed, or an error. It never returns an older map, even if the place
/// of storage offers one, and never a map that this node has not saved. When a load has returned one of
/// several maps, no later load returns any of the others.
pub(crate) trait MapStore {
    /// Loads the newest map. Creates the map if the node is new.
    ///
    /// # Errors
    /// If the newest map cannot be found with certainty. The call may then be repeated.
    fn load(&self) -> LocalBoxFuture<'_, Result<NodeMap, StartError>>;

    /// Saves a changed map in place of the last one.
    ///
    /// # Errors
    /// [`MapUnsaved`]. The next load may find this map or the last saved one, until a later save
    /// succeeds. The same applies if the future is dropped.
    fn save<'a>(&'a self, map: &'a NodeMap) -> LocalBoxFuture<'a, Result<(), MapUnsaved>>;

    /// Returns the targets that should have a copy of the last map, but lack it. Returns none if the
    /// targets store no copies.
    fn targets_behind(&self) -> Vec<Uuid>;

    /// Writes the last saved map to one of the [`targets_behind`](MapStore::targets_behind). Returns
    /// whether the target has the map now.
    fn catch_up<'a>(&'a self, target: Uuid, map: &'a NodeMap) -> LocalBoxFuture<'a, bool>;
}

/// The reason why a map was not saved.
#[derive(Debug)]
pub(crate) struct MapUnsaved {
    pub(crate) why: StoreError,
    /// Whether the next load may find this map all the same.
    pub(crate) may_be_found: bool,
}
