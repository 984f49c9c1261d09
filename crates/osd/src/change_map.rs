//! Changes the node's map: first in the map store, and then on all shards.

use std::cell::Cell;
use std::rc::Rc;

use store::StoreError;
use tokio::sync::Mutex;

use crate::fail::refusal;
use crate::map::{MapStore, MapUnsaved, NodeMap};
use crate::osd::Osd;

/// Saves the changes of the map.
pub(crate) struct MapKeeper {
    /// Lock that is held during a change of the map.
    pub(crate) changing: Mutex<()>,
    pub(crate) store: Rc<dyn MapStore>,
    /// Epoch of the map that was loaded, or of the last map whose save has begun.
    last_epoch: Cell<u64>,
    /// Additional increase of the map epoch at the next change of the map.
    epoch_step: Cell<u64>,
    /// Whether the last change of the map failed, so that a restart may find the changed map.
    is_uncertain: Cell<bool>,
}

impl MapKeeper {
    /// `epoch` is that of the map in the store, and `epoch_step` the additional increase of the map epoch
    /// at the next change.
    pub(crate) fn new(store: Rc<dyn MapStore>, epoch: u64, epoch_step: u64) -> MapKeeper {
        MapKeeper {
            changing: Mutex::default(),
            store,
            last_epoch: Cell::new(epoch),
            epoch_step: Cell::new(epoch_step),
            is_uncertain: Cell::new(false),
        }
    }

    /// Returns whether a map must be saved: it differs from the last saved map, or a restart may find
    /// another map, whose save has failed.
    fn needs_save(&self, saved: &NodeMap, map: &NodeMap) -> bool {
        saved != map || self.is_uncertain.get()
    }

    /// Saves a map under a new epoch. A failed save uses up its epoch, because some targets may have stored
    /// the failed map. The shards keep the last saved map with its own epoch: a target that receives a
    /// copy later must not get another map under the failed epoch. The caller must hold the lock [`MapKeeper::changing`].
    ///
    /// # Errors
    /// If the map was not saved. A restart may find it all the same, until a later save succeeds.
    async fn save(&self, map: &mut NodeMap) -> Result<(), StoreError> {
        map.epoch = self.last_epoch.get() + 1 + self.epoch_step.take();
        self.last_epoch.set(map.epoch);
        let saved = self.store.save(map).await;
        let may_be_found = |e: &MapUnsaved| self.is_uncertain.get() || e.may_be_found;
        self.is_uncertain.set(saved.as_ref().is_err_and(may_be_found));
        saved.map_err(|e| e.why)
    }
}

impl Osd {
    /// Changes the target records of the map. Does nothing if the records stay the same, unless an
    /// earlier change of the map failed.
    pub(crate) async fn change_targets(&self, change: impl AsyncFnOnce(&mut NodeMap)) -> wire::Result<()> {
        let _one_at_a_time = self.map_keeper.changing.lock().await;
        let mut map = self.shard.map.borrow().clone();
        change(&mut map).await;
        if !self.map_keeper.needs_save(&self.shard.map.borrow(), &map) {
            return Ok(());
        }
        self.save_map(map).await
    }

    /// Saves a changed map, and passes it to all shards. The map also records the targets that have
    /// failed by now: otherwise a change would be refused if half of the targets had failed a moment
    /// ago. The caller must hold the lock [`MapKeeper::changing`].
    pub(crate) async fn save_map(&self, mut map: NodeMap) -> wire::Result<()> {
        let shard = &self.shard;
        map.note_lost(&shard.targets);
        self.map_keeper.save(&mut map).await.map_err(|e| refusal(e.into()))?;
        shard.config.users.publish(&map.accounts);
        let known = shard.tell_each(move |shard| {
            map.tell(&shard.targets);
            *shard.map.borrow_mut() = map.clone();
            shard.map_changes.set(shard.map_changes.get() + 1);
        });
        Ok(known.await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::MemMapStore;

    /// Returns a keeper, its store, and the map in the store.
    async fn keeper(epoch_step: u64) -> (MapKeeper, Rc<MemMapStore>, NodeMap) {
        let store = Rc::new(MemMapStore::default());
        let map = store.load().await.unwrap();
        (MapKeeper::new(Rc::clone(&store) as Rc<dyn MapStore>, map.epoch, epoch_step), store, map)
    }

    #[tokio::test]
    async fn each_save_has_an_epoch_of_its_own_even_if_it_fails() {
        let (keeper, store, map) = keeper(10).await;
        let mut epochs = vec![map.epoch];
        for fails in [Some(true), None, Some(false), None] {
            store.fails.set(fails);
            let mut changed = map.clone();
            assert_eq!(keeper.save(&mut changed).await.is_err(), fails.is_some());
            epochs.push(changed.epoch);
        }
        assert_eq!(epochs, [1, 12, 13, 14, 15]);
        assert_eq!(store.stored.borrow().as_ref().unwrap().epoch, 15);
    }

    #[tokio::test]
    async fn an_unchanged_map_is_saved_only_if_a_restart_may_find_another_one() {
        let (keeper, store, mut map) = keeper(0).await;
        assert!(!keeper.needs_save(&map, &map));
        store.fails.set(Some(true));
        keeper.save(&mut map.clone()).await.unwrap_err();
        assert!(keeper.needs_save(&map, &map));
        // The later save may not have begun, but the earlier map may still be found.
        store.fails.set(Some(false));
        keeper.save(&mut map.clone()).await.unwrap_err();
        assert!(keeper.needs_save(&map, &map));
        store.fails.set(None);
        keeper.save(&mut map).await.unwrap();
        assert!(!keeper.needs_save(&map, &map));
        store.fails.set(Some(false));
        keeper.save(&mut map.clone()).await.unwrap_err();
        assert!(!keeper.needs_save(&map, &map), "no restart can find the map");
    }
}
