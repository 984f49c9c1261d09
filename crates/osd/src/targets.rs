//! Administration of the node's targets: takes them out of use, replaces them and reports their
//! health.

use std::collections::BTreeSet;
use std::rc::Rc;

use array::Group;
use futures::future::join_all;
use uuid::Uuid;
use wire::{Error, PoolHealth};

use crate::map::TargetRecord;
use crate::osd::Osd;
use crate::pool::ActivePool;
use crate::target::Target;

impl Osd {
    /// Takes a target out of use, or back into use.
    pub(crate) async fn set_target_out(&self, index: u32, out: bool) -> wire::Result<()> {
        let target = self.target(index)?;
        // Each group must determine its current interval before the target can return.
        let groups = self.open_groups();
        drop(join_all(groups.iter().map(|(_, group)| group.any_interval())).await);
        if out {
            self.can_spare(&target).await?;
        }
        if !out {
            target.try_again();
        }
        self.change_targets(|map| map.targets[index as usize].out = out).await
    }

    /// Gives a target's number to another target. The node uses the new target from its next start.
    /// Until then, another call may replace it again, because the client may have missed the answer.
    pub(crate) async fn replace_target(&self, index: u32, uuid: Uuid) -> wire::Result<()> {
        let old = self.target_uuid(index)?;
        if let Some(old) = self.targets.iter().find(|target| target.uuid == old) {
            self.can_spare(old).await?;
        }
        if self.map.borrow().record(&uuid).is_some() {
            return Err(Error::BadRequest(format!("target {uuid} belongs to the node already")));
        }
        if self.pools.borrow().values().any(|pool| pool.groups.is_empty()) {
            let what = "a pool without redundancy may have objects on the target; remove the pool, or restore the target";
            return Err(Error::BadRequest(what.into()));
        }
        self.change_targets(|map| {
            map.targets[index as usize] = TargetRecord { uuid, out: false, lost: true };
        })
        .await
    }

    /// Fails if the target is present and has data that too few other targets have. Without this
    /// check, taking the target out of use or replacing it could lose data.
    async fn can_spare(&self, target: &Target) -> wire::Result<()> {
        // A group that cannot determine its interval may need the target.
        let needs = async |(pool, group): (String, Rc<Group>)| {
            let interval = group.any_interval().await;
            let can_spare = interval.is_ok_and(|interval| interval.can_spare(target.uuid, group.needed()));
            (!can_spare).then_some(pool)
        };
        let groups = self.open_groups().into_iter().map(needs);
        let pools: BTreeSet<String> = join_all(groups).await.into_iter().flatten().collect();
        if pools.is_empty() {
            return Ok(());
        }
        // The osd may not have noticed a failure of the target yet. To find out, it writes the map
        // to all targets.
        let written = {
            let _one_at_a_time = self.changing_map.lock().await;
            let map = self.map.borrow().clone();
            self.save_map(map).await
        };
        if !target.is_usable() {
            tracing::info!(target_uuid = %target.uuid, ?written, "the target has failed, so it may be taken out of use or replaced");
            return Ok(());
        }
        let pools = pools.into_iter().collect::<Vec<_>>().join(", ");
        Err(Error::BadRequest(format!(
            "too few other targets are up to date in these pools: {pools}; bring missing targets back and wait until they are rebuilt"
        )))
    }

    fn target_uuid(&self, index: u32) -> wire::Result<Uuid> {
        let map = self.map.borrow();
        map.targets.get(index as usize).map(|record| record.uuid).ok_or_else(|| {
            let detail =
                format!("{index}; the node has targets 0 to {}", map.targets.len().saturating_sub(1));
            Error::OutOfRange { what: "target".into(), detail }
        })
    }

    fn target(&self, index: u32) -> wire::Result<Rc<Target>> {
        let uuid = self.target_uuid(index)?;
        self.targets.iter().find(|target| target.uuid == uuid).cloned().ok_or_else(|| {
            let what = format!(
                "target {uuid} was not present at the start of the node, and is used once the node is restarted with it"
            );
            Error::BadRequest(what)
        })
    }

    /// Returns whether a target lacks the newest map, or is a member of any placement group and lacks
    /// changes of that group.
    pub(crate) fn is_behind(&self, uuid: Uuid) -> bool {
        let missed_map = |target: &Rc<Target>| target.uuid == uuid && target.missed_map();
        if self.map.borrow().record(&uuid).is_some_and(|record| record.lost)
            || self.targets.iter().any(missed_map)
        {
            return true;
        }
        // While a group has no current interval, its last known interval counts.
        let intervals = self.open_groups().into_iter().filter_map(|(_, group)| group.last_interval());
        intervals.into_iter().any(|interval| interval.lacks_target(uuid))
    }

    /// Returns the health of the pools with redundancy.
    pub(crate) fn health(&self) -> Vec<PoolHealth> {
        let health = |pool: &Rc<ActivePool>| {
            let mut health = PoolHealth { pool: pool.record.name.clone(), ..PoolHealth::default() };
            for group in &pool.groups {
                health.groups += 1;
                match group.current() {
                    Some(interval) => health.degraded += u32::from(!interval.is_whole()),
                    None => health.unavailable += 1,
                }
            }
            health
        };
        let pools = self.pools.borrow();
        pools.values().filter(|pool| !pool.groups.is_empty()).map(health).collect()
    }
}
