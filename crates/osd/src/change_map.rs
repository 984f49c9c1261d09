//! Changes the node's map, first on all targets and then in memory.

use crate::fail::refusal;
use crate::map::NodeMap;
use crate::osd::Osd;

impl Osd {
    /// Changes the target records of the map. Does nothing if the records stay the same, unless an
    /// earlier change of the map failed.
    pub(crate) async fn change_targets(&self, change: impl FnOnce(&mut NodeMap)) -> wire::Result<()> {
        let _one_at_a_time = self.changing_map.lock().await;
        let mut map = self.map.borrow().clone();
        change(&mut map);
        if map == *self.map.borrow() && !self.map_is_uncertain.get() {
            return Ok(());
        }
        let saved = self.save_map(map).await;
        self.map.borrow().tell(&self.targets);
        saved
    }

    /// Saves a changed map. The map also records the targets that have failed by now: otherwise a
    /// change would be refused if half of the targets had failed a moment ago.
    pub(crate) async fn save_map(&self, mut map: NodeMap) -> wire::Result<()> {
        map.note_lost(&self.targets);
        // The map epoch grows even if saving fails, because some targets may have stored the failed
        // map.
        map.epoch += 1 + self.epoch_step.take();
        self.map.borrow_mut().epoch = map.epoch;
        let reaches_any = self.targets.iter().any(|t| t.failure().is_none());
        if let Err(e) = map.save(&self.targets, &self.witness, self.config.target_timeout).await {
            self.map_is_uncertain.set(self.map_is_uncertain.get() || reaches_any);
            return Err(refusal(e.into()));
        }
        self.map_is_uncertain.set(false);
        *self.map.borrow_mut() = map;
        Ok(())
    }
}
