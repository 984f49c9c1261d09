//! Upkeep: tries failed targets again, rebuilds what is missing, and finishes removals.

use std::rc::Rc;

use array::{Group, RETRY};
use store::{Space, StoreCalls};
use uuid::Uuid;

use crate::map::TargetRecord;
use crate::osd::Osd;
use crate::target::Target;

/// A pool that could not be emptied is tried again after so many intervals of the upkeep.
const REMOVAL_INTERVALS: u32 = 4;
/// An index with less than that part free is nearly full: changes are refused from half of that on.
const INDEX_LOW: u64 = 8;
/// Notes that take more than that part of an index are given up when it is nearly full.
const INDEX_NOTES: u64 = 16;
/// A target without room for the node's map is offered it again after so many intervals of the
/// upkeep.
const MAP_INTERVALS: u32 = 4;

impl Osd {
    /// Runs for ever: keeps the map's word on targets true, tries targets again that have failed,
    /// and rebuilds.
    pub(crate) async fn look_after_redundancy(self: Rc<Osd>) {
        tokio::join!(
            self.rebuild_for_ever(),
            self.bound_notes_for_ever(),
            self.try_targets_for_ever(),
            self.give_map_for_ever(),
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

    /// Gives the map to targets that had no room for it when the node started: they count as failed
    /// until they have it.
    async fn give_map_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval * MAP_INTERVALS).await;
            for target in self.targets.iter().filter(|target| target.lacks_map()) {
                let _one_at_a_time = self.changing_map.lock().await;
                let map = self.map.borrow().clone();
                if map.give(target, self.config.target_timeout).await {
                    tracing::info!(target_uuid = %target.uuid, "the target has room for the node's map again");
                    target.try_again();
                }
            }
        }
    }

    async fn finish_removals_for_ever(&self) {
        loop {
            // Each attempt may say in the log why it came to nothing.
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

    /// Targets whose index is nearly full and largely filled by notes of dirty objects.
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

    async fn rebuild_for_ever(&self) {
        loop {
            tokio::time::sleep(self.config.upkeep_interval).await;
            let groups = self.open_groups();
            if groups.is_empty() {
                continue;
            }
            if let Err(e) = self.note_lost_targets().await {
                tracing::warn!(error = %e, "the map does not say yet which targets are lost");
            }
            for (pool, group) in groups {
                self.rebuild_group(&pool, &group).await;
            }
        }
    }

    /// Removes, once all targets are there, what pools have left that were removed before.
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
            tracing::warn!(pool, error = %e, "what a former member has is removed later");
        }
        let Some(position) = group.to_rebuild(&interval) else { return };
        let target = interval.target(position);
        self.rebuilds.begin(pool, target);
        let rebuilt = group.rebuild(position, &self.pace, self.rebuilds.progress()).await;
        self.rebuilds.end();
        if let Err(e) = rebuilt {
            tracing::warn!(pool, position, error = %e, "a placement group's rebuild starts again");
            self.rebuilds.failed(e.to_string());
            tokio::time::sleep(RETRY.min(self.config.upkeep_interval * 10)).await;
        }
    }

    /// Notes in the map which targets do not have it: after a restart that tells whether the others
    /// have the newest one.
    async fn note_lost_targets(&self) -> wire::Result<()> {
        let lost = |record: &TargetRecord| {
            let target = self.targets.iter().find(|t| t.uuid == record.uuid);
            target.map_or(record.lost, |t| t.failure().is_some() || t.lacks_map())
        };
        let lost: Vec<bool> = self.map.borrow().targets.iter().map(lost).collect();
        self.change_targets(|map| {
            map.targets.iter_mut().zip(lost).for_each(|(record, lost)| record.lost = lost);
        })
        .await
    }
}
