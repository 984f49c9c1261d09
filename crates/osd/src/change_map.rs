//! Changes the node's map: first on all targets, and then on all shards.

use std::cell::Cell;

use tokio::sync::Mutex;

use crate::fail::refusal;
use crate::map::NodeMap;
use crate::osd::Osd;

/// State of the changes of the map.
pub(crate) struct MapKeeper {
    /// Lock that is held during a change of the map.
    pub(crate) changing: Mutex<()>,
    /// Additional increase of the map epoch at the next change of the map.
    epoch_step: Cell<u64>,
    /// Whether the last change of the map failed, so that perhaps only some targets have stored the
    /// changed map.
    is_uncertain: Cell<bool>,
}

impl MapKeeper {
    /// `epoch_step` is the additional increase of the map epoch at the next change.
    pub(crate) fn new(epoch_step: u64) -> MapKeeper {
        MapKeeper {
            changing: Mutex::default(),
            epoch_step: Cell::new(epoch_step),
            is_uncertain: Cell::new(false),
        }
    }
}

impl Osd {
    /// Changes the target records of the map. Does nothing if the records stay the same, unless an
    /// earlier change of the map failed.
    pub(crate) async fn change_targets(&self, change: impl AsyncFnOnce(&mut NodeMap)) -> wire::Result<()> {
        let _one_at_a_time = self.map_keeper.changing.lock().await;
        let mut map = self.shard.map.borrow().clone();
        change(&mut map).await;
        if map == *self.shard.map.borrow() && !self.map_keeper.is_uncertain.get() {
            return Ok(());
        }
        self.save_map(map).await
    }

    /// Saves a changed map, and passes it to all shards. The map also records the targets that have
    /// failed by now: otherwise a change would be refused if half of the targets had failed a moment
    /// ago. The caller must hold the lock [`MapKeeper::changing`].
    pub(crate) async fn save_map(&self, mut map: NodeMap) -> wire::Result<()> {
        let (shard, keeper) = (&self.shard, &self.map_keeper);
        map.note_lost(&shard.targets);
        // The map epoch grows even if saving fails, because some targets may have stored the failed
        // map.
        map.epoch += 1 + keeper.epoch_step.take();
        shard.map.borrow_mut().epoch = map.epoch;
        let reaches_any = shard.targets.iter().any(|t| t.failure().is_none());
        if let Err(e) = map.save(&shard.targets, &shard.witness, shard.config.target_timeout).await {
            keeper.is_uncertain.set(keeper.is_uncertain.get() || reaches_any);
            return Err(refusal(e.into()));
        }
        keeper.is_uncertain.set(false);
        shard.config.users.publish(&map.accounts);
        let known = shard.tell_each(move |shard| {
            map.tell(&shard.targets);
            *shard.map.borrow_mut() = map.clone();
            shard.map_changes.set(shard.map_changes.get() + 1);
        });
        Ok(known.await?)
    }
}
