//! Upkeep tasks of the osd: probe failed targets, rebuild missing fragments, and finish removals of
//! pools.

use std::collections::BTreeSet;
use std::rc::Rc;

use array::{Group, RETRY};
use store::{Space, StoreCalls};
use uuid::Uuid;

use crate::mailbox::ShardGone;
use crate::map::NodeMap;
use crate::osd::Osd;
use crate::shard::Shard;
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
    /// Runs until the osd stops: keeps the map's records of targets up to date, writes the node's age,
    /// and finishes removals of pools.
    pub(crate) async fn look_after_targets(self: Rc<Osd>) {
        tokio::join!(
            self.note_lost_targets_for_ever(),
            self.give_map_for_ever(),
            self.save_age_for_ever(),
            self.save_idle_age_for_ever(),
            self.finish_removals_for_ever()
        );
    }

    /// Writes the map to targets that had no space for it when the node started, and to targets that
    /// were not usable when the map changed. The first kind of target counts as failed until it has
    /// the map.
    async fn give_map_for_ever(&self) {
        let keeper = &self.map_keeper;
        loop {
            tokio::time::sleep(self.shard.config.upkeep_interval * MAP_INTERVALS).await;
            for uuid in keeper.store.targets_behind() {
                let _one_at_a_time = keeper.changing.lock().await;
                let map = self.shard.map.borrow().clone();
                if keeper.store.catch_up(uuid, &map).await {
                    // A further shard may have taken over the failure from the first shard after the
                    // target had returned. The osd is stopping if a shard has ended.
                    let _ = self.try_again(uuid).await;
                }
            }
        }
    }

    /// Writes the node's age while clients change objects. Also compares the ages of remounted targets.
    async fn save_age_for_ever(&self) {
        let mut seen = 0;
        loop {
            tokio::time::sleep(self.shard.config.age_interval).await;
            // The osd is stopping if a shard has ended.
            let _ = self.save_age_if_due(&mut seen).await;
        }
    }

    /// Writes the node's age from time to time, even if clients change nothing.
    async fn save_idle_age_for_ever(&self) {
        loop {
            tokio::time::sleep(self.shard.config.collect_interval).await;
            self.save_age().await;
        }
    }

    async fn save_age_if_due(&self, seen: &mut u64) -> Result<(), ShardGone> {
        let writes = self.shard.each(async |shard: Rc<Shard>| shard.times.requests().write.count).await?;
        let writes = writes.into_iter().sum();
        let is_unknown = |target: &Rc<Target>| target.failure().is_none() && target.went_back().is_none();
        if std::mem::replace(seen, writes) != writes || self.shard.targets.iter().any(is_unknown) {
            self.save_age().await;
        }
        let went_back = self.shard.each(async |shard: Rc<Shard>| shard.targets_that_went_back()).await?;
        let went_back: BTreeSet<Uuid> = went_back.into_iter().flatten().collect();
        for uuid in went_back {
            let is_sole = self.shard.each(async move |shard: Rc<Shard>| shard.is_sole_target(uuid)).await?;
            if !is_sole.contains(&true) && self.is_up_to_date(uuid).await? {
                tracing::info!(target_uuid = %uuid, "the target that had gone back is rebuilt");
                self.accept_older_copy(uuid).await?;
            }
        }
        Ok(())
    }

    /// Returns whether a target lacks the newest map, or changes of any placement group that it is a
    /// member of.
    pub(crate) async fn is_behind(&self, uuid: Uuid) -> Result<bool, ShardGone> {
        let lacks = self.shard.each(async move |shard: Rc<Shard>| shard.lacks_changes(uuid)).await?;
        let missed_map = self.shard.target(uuid).is_some_and(|target| target.missed_map());
        let is_lost = self.shard.map.borrow().record(&uuid).is_some_and(|record| record.lost);
        Ok(is_lost || missed_map || lacks.contains(&true))
    }

    /// Returns whether all placement groups work, and those of the target have it in sync.
    async fn is_up_to_date(&self, uuid: Uuid) -> Result<bool, ShardGone> {
        let works = self.shard.each(async move |shard: Rc<Shard>| shard.works_with(uuid)).await?;
        Ok(!works.contains(&false) && !self.is_behind(uuid).await?)
    }

    async fn finish_removals_for_ever(&self) {
        loop {
            // Attempts are rare, because each failed attempt may write a log message.
            tokio::time::sleep(self.shard.config.upkeep_interval * REMOVAL_INTERVALS).await;
            self.finish_removals().await;
        }
    }

    async fn note_lost_targets_for_ever(&self) {
        loop {
            tokio::time::sleep(self.shard.config.upkeep_interval).await;
            if let Err(e) = self.note_lost_targets().await {
                tracing::warn!(error = %e, "the lost targets could not be recorded in the map; trying again");
            }
        }
    }

    /// Finishes the pending removals of pools once all targets are present.
    async fn finish_removals(&self) {
        if self.removed_pools.borrow().is_empty() || !self.shard.has_all_targets() {
            return;
        }
        for pool in self.removed_pools.take() {
            self.empty_or_wait(pool).await;
        }
    }

    /// Records in the map which targets do not have the map. After a restart, this record shows
    /// whether the other targets have the newest map. Also ends the acceptance of a target's loss as
    /// soon as it is not needed any more, because the operator has not accepted a later loss.
    async fn note_lost_targets(&self) -> wire::Result<()> {
        let mut looked = Ok(());
        self.change_targets(async |map| {
            // Look at the groups only now: the operator may have given a word meanwhile.
            looked = self.end_acceptances(map).await;
            map.note_lost(&self.shard.targets);
        })
        .await?;
        Ok(looked?)
    }

    /// Ends the acceptance of losses that no placement group needs any more, in `map`.
    async fn end_acceptances(&self, map: &mut NodeMap) -> Result<(), ShardGone> {
        if map.targets.iter().any(|record| record.forgotten) {
            let awaited = self.shard.each(async |shard: Rc<Shard>| shard.awaited_targets()).await?;
            // A group without a decision may still need the mark.
            let is_awaited = |uuid: &Uuid| {
                awaited.iter().any(|targets| targets.as_ref().is_none_or(|targets| targets.contains(uuid)))
            };
            map.targets.iter_mut().for_each(|record| record.forgotten &= is_awaited(&record.uuid));
        }
        for record in map.targets.iter_mut().filter(|record| record.given_up) {
            let uuid = record.uuid;
            let is_sole = self.shard.each(async move |shard: Rc<Shard>| shard.is_sole_target(uuid)).await?;
            record.given_up = is_sole.contains(&true) && !self.is_up_to_date(uuid).await?;
        }
        Ok(())
    }
}

impl Shard {
    /// Runs until the osd stops: probes failed targets, and rebuilds missing fragments.
    pub(crate) async fn look_after_groups(self: Rc<Shard>) {
        tokio::join!(self.rebuild_for_ever(), self.bound_notes_for_ever(), self.try_targets_for_ever());
    }

    async fn try_targets_for_ever(&self) {
        let number = self.share.shard().to_string();
        loop {
            tokio::time::sleep(self.config.upkeep_interval).await;
            self.targets.iter().for_each(Target::probe_if_due);
            for target in self.targets.iter() {
                let (state, next_try) = target.state();
                let labels = [("target", target.uuid.to_string()), ("shard", number.clone())];
                metrics::gauge!("outboard_osd_target_state", &labels).set(state as u8);
                let seconds = next_try.unwrap_or_default().as_secs_f64();
                metrics::gauge!("outboard_osd_target_next_try_seconds", &labels).set(seconds);
            }
        }
    }

    /// Returns the targets that have gone back to an earlier state, as this shard sees them.
    fn targets_that_went_back(&self) -> Vec<Uuid> {
        let went_back = self.targets.iter().filter(|target| target.went_back() == Some(true));
        went_back.map(|target| target.uuid).collect()
    }

    /// Returns whether a pool without redundancy uses the target.
    fn is_sole_target(&self, uuid: Uuid) -> bool {
        self.pools.all().iter().any(|pool| pool.sole_targets.iter().any(|sole| sole.uuid == uuid))
    }

    /// Returns whether the target is usable, and all groups of the shard work.
    fn works_with(&self, uuid: Uuid) -> bool {
        let groups = self.open_groups();
        self.target(uuid).is_some_and(|target| target.is_usable())
            && groups.iter().all(|(_, group)| group.current().is_some())
    }

    /// Returns the targets that the shard's groups wait for; `None` if a group has no decision yet.
    fn awaited_targets(&self) -> Option<BTreeSet<Uuid>> {
        let groups = self.open_groups();
        let waits: Option<Vec<_>> = groups.iter().map(|(_, group)| group.waits_for()).collect();
        waits.map(|targets| targets.into_iter().flatten().collect())
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

    /// Returns the targets whose index is nearly full and contains many dirty notes of this shard.
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
            if index_free < index_total / INDEX_LOW
                && notes() > index_total / (INDEX_NOTES * u64::from(self.share.shards()))
            {
                full.push(target.uuid);
            }
        }
        full
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
}
