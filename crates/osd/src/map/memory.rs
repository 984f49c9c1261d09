//! [`MemMapStore`]: a map store in memory, for tests.

use std::cell::{Cell, RefCell};

use futures::future::LocalBoxFuture;
use store::StoreError;
use uuid::Uuid;

use super::{MapStore, MapUnsaved, NodeMap};
use crate::start_error::StartError;

/// Stores the map in memory. The value survives restarts of a node.
#[derive(Default)]
pub(crate) struct MemMapStore {
    pub(crate) stored: RefCell<Option<NodeMap>>,
    /// Saves fail while this is set. With `true`, a failed map is stored all the same.
    pub(crate) fails: Cell<Option<bool>>,
    /// Epoch of the last save.
    begun: Cell<u64>,
}

impl MapStore for MemMapStore {
    fn load(&self) -> LocalBoxFuture<'_, Result<NodeMap, StartError>> {
        let mut stored = self.stored.borrow_mut();
        let map = stored.get_or_insert_with(|| NodeMap::new(vec![Uuid::from_u128(1)]));
        if self.begun.get() > map.epoch {
            map.epoch = self.begun.get() + 1;
        }
        Box::pin(std::future::ready(Ok(map.clone())))
    }

    fn save<'a>(&'a self, map: &'a NodeMap) -> LocalBoxFuture<'a, Result<(), MapUnsaved>> {
        assert!(map.epoch > self.begun.replace(map.epoch), "epochs grow");
        if self.fails.get() != Some(false) {
            *self.stored.borrow_mut() = Some(map.clone());
        }
        let unsaved = |may_be_found| MapUnsaved { why: StoreError::Io("injected".into()), may_be_found };
        Box::pin(std::future::ready(self.fails.get().map_or(Ok(()), |stores| Err(unsaved(stores)))))
    }

    fn targets_behind(&self) -> Vec<Uuid> {
        Vec::new()
    }

    fn catch_up<'a>(&'a self, _: Uuid, _: &'a NodeMap) -> LocalBoxFuture<'a, bool> {
        Box::pin(std::future::ready(false))
    }
}
