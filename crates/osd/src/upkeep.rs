//! Upkeep tasks of the osd: probe failed targets, rebuild missing fragments, and finish removals of
//! pools.

use std::rc::Rc;

use array::{Group, RETRY};
use store::{Space, StoreCalls};
use uuid::Uuid;

use crate::map::TargetRecord;
use crate::osd::Osd;
use crate::target::Target;

/// Number of upkeep intervals between two attempts to empty a removed pool.
const REMOVAL_INTERVALS: u32 = 4;
/// An index with less than 1/8 of its space free is nearly full. The store refuses changes if less
/// than 1/16 is free.
const INDEX_LOW: u64 = 8;
/// If an index is nearly full and dirty notes take more than 1/16 of its space, the notes are
/// dropped.
const INDEX_NOTES: u64 = 16;
/// Number of upkeep intervals between two attempts to write the map to a target that had no space
/// for it.
const MAP_INTERVALS: u32 = 4;

impl Osd {
    /// Runs until the osd stops: keeps the map's records of targets up to date, probes failed
    /// targets, and rebuilds missing fragments.
    pub(crate) async fn look_after_redundancy(self: Rc<Osd>) {
        tokio::join!(
            self.note_lost_targets_for_ever(),
            self.rebuild_for_ever(),
            self.bound_notes_for_ever(),
            self.try_targets_for_ever(),
            self.give_map_for_ever(),
            self.save_age_for_ever(),
            self.finish_removals_for_ever()
        );
    }

    async fn try_targets_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval).await;
            self.targets.iter().for_each(Target::probe_if_due);
            for target in self.targets.iter() {
                let (state, next_try) = target.state();
                let uuid = target.uuid.to_string();
                metrics::gauge!("outboard_osd_target_state", "target" => uuid.clone()).set(state as u8);
                let seconds = next_try.unwrap_or_default().as_secs_f64();
                metrics::gauge!("outboard_osd_target_next_try_seconds", "target" => uuid).set(seconds);
            }
        }
    }

    /// Writes the map to targets that had no space for it when the node started, and to targets that
    /// were not usable when the map changed. The first kind of target counts as failed until it has
    /// the map.
    async fn give_map_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval * MAP_INTERVALS).await;
            for target in self.targets.iter().filter(|target| target.lacks_map()) {
                let _one_at_a_time = self.changing_map.lock().await;
                let map = self.map.borrow().clone();
                if map.give(target, self.config.target_timeout).await {
                    tracing::info!(target_uuid = %target.uuid, "the target has space again and has stored the node's map");
                    target.try_again();
                }
            }
            let is_back = |target: &&Rc<Target>| target.missed_map() && target.failure().is_none();
            for target in self.targets.iter().filter(is_back) {
                let _one_at_a_time = self.changing_map.lock().await;
                let map = self.map.borrow().clone();
                map.give(target, self.config.target_timeout).await;
            }
        }
    }

    /// Writes the node's age while clients change objects. Also compares the ages of remounted targets.
    async fn save_age_for_ever(&self) {
        let mut seen = 0;
        loop {
            tokio::time::sleep(self.config.age_interval).await;
            let writes = self.times.requests().write.count;
            let is_unknown = |target: &Rc<Target>| target.failure().is_none() && target.went_back().is_none();
            if std::mem::replace(&mut seen, writes) != writes || self.targets.iter().any(is_unknown) {
                self.save_age().await;
            }
            for target in self.targets.iter().filter(|target| target.went_back() == Some(true)) {
                if !self.is_a_sole_target(target) && self.is_up_to_date(target) {
                    tracing::info!(target_uuid = %target.uuid, "the target that had gone back is rebuilt");
                    self.accept_older_copy(target).await;
                }
            }
        }
    }

    /// Returns whether a pool without redundancy uses the target.
    fn is_a_sole_target(&self, target: &Rc<Target>) -> bool {
        self.pools.borrow().values().any(|pool| pool.sole_targets.iter().any(|sole| Rc::ptr_eq(sole, target)))
    }

    /// Returns whether all placement groups work, and those of the target have it in sync.
    fn is_up_to_date(&self, target: &Target) -> bool {
        let groups = self.open_groups();
        target.is_usable()
            && !self.is_behind(target.uuid)
            && groups.iter().all(|(_, group)| group.current().is_some())
    }

    async fn finish_removals_for_ever(&self) {
        loop {
            // Attempts are rare, because each failed attempt may write a log message.
            tokio::time::sleep(self.config.upkeep_interval * REMOVAL_INTERVALS).await;
            self.finish_removals().await;
        }
    }

    async fn bound_notes_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval).await;
            let groups = self.open_groups();
            let full = self.targets_full_of_notes(&groups).await;
            for (_, group) in groups {
                let index_is_full = full.iter().any(|target| group.is_in_sync_on(target));
                group.bound_notes(index_is_full).await;
            }
        }
    }

    /// Returns the targets whose index is nearly full and contains many dirty notes.
    async fn targets_full_of_notes(&self, groups: &[(String, Rc<Group>)]) -> Vec<Uuid> {
        let mut full = Vec::new();
        for target in self.targets.iter().filter(|target| target.is_usable()) {
            let noted = || groups.iter().filter(|(_, group)| group.is_in_sync_on(&target.uuid));
            if !noted().any(|(_, group)| group.has_notes()) {
                continue;
            }
            let notes = || noted().map(|(_, group)| group.notes_bytes()).sum::<u64>();
            let asked = tokio::time::timeout(self.config.target_timeout, target.store.space());
            let Ok(Ok(Space { index_free, index_total, .. })) = asked.await else { continue };
            if index_free < index_total / INDEX_LOW && notes() > index_total / INDEX_NOTES {
                full.push(target.uuid);
            }
        }
        full
    }

    async fn note_lost_targets_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval).await;
            if let Err(e) = self.note_lost_targets().await {
                tracing::warn!(error = %e, "the lost targets could not be recorded in the map; trying again");
            }
        }
    }

    async fn rebuild_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval).await;
            let groups = self.open_groups();
            for (pool, group) in groups {
                self.rebuild_group(&pool, &group).await;
            }
        }
    }

    /// Finishes the pending removals of pools once all targets are present.
    async fn finish_removals(&self) {
        if self.removed_pools.borrow().is_empty() || !self.has_all_targets() {
            return;
        }
        for pool in self.removed_pools.take() {
            self.empty_or_wait(pool).await;
        }
    }

    async fn rebuild_group(&self, pool: &str, group: &Rc<Group>) {
        let Some(interval) = group.opened(self.config.target_timeout).await else { return };
        if let Err(e) = group.remove_leftovers(&interval).await {
            tracing::warn!(pool, error = %e, "data of a former member could not be removed yet");
        }
        let Some(position) = group.to_rebuild(&interval) else { return };
        let target = interval.target(position);
        self.rebuilds.begin(pool, target);
        let rebuilt = group.rebuild(position, &self.pace, self.rebuilds.progress()).await;
        self.rebuilds.end();
        if let Err(e) = rebuilt {
            tracing::warn!(pool, position, error = %e, "a rebuild of a placement group failed and starts again");
            self.rebuilds.failed(e.to_string());
            tokio::time::sleep(RETRY.min(self.config.upkeep_interval * 10)).await;
        }
    }

    /// Records in the map which targets do not have the map. After a restart, this record shows
    /// whether the other targets have the newest map. Also ends the acceptance of a target's loss as
    /// soon as it is not needed any more, because the operator has not accepted a later loss.
    async fn note_lost_targets(&self) -> wire::Result<()> {
        let is_up_to_date = |record: &TargetRecord| {
            self.targets.iter().find(|t| t.uuid == record.uuid).is_some_and(|t| self.is_up_to_date(t))
        };
        let is_sole = |record: &TargetRecord| {
            let pools = self.pools.borrow();
            pools.values().flat_map(|pool| &pool.sole_targets).any(|sole| sole.uuid == record.uuid)
        };
        self.change_targets(|map| {
            // Look at the groups only now: the operator may have given a word meanwhile.
            let is_forgotten = map.targets.iter().any(|record| record.forgotten);
            let groups = if is_forgotten { self.open_groups() } else { Vec::new() };
            // A group without a decision may still need the mark.
            let is_awaited = |record: &TargetRecord| {
                let mut waits = groups.iter().map(|(_, group)| group.waits_for());
                waits.any(|targets| targets.is_none_or(|targets| targets.contains(&record.uuid)))
            };
            for record in &mut map.targets {
                record.forgotten = record.forgotten && is_awaited(record);
                record.given_up = record.given_up && is_sole(record) && !is_up_to_date(record);
            }
            map.note_lost(&self.targets);
        })
        .await
    }
}
