//! Administration of the node's targets: takes them out of use, replaces them and reports their
//! health.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use array::Group;
use futures::future::join_all;
use uuid::Uuid;
use wire::{Error, PoolHealth, PoolLoss, Redundancy};

use crate::ids;
use crate::mailbox::ShardGone;
use crate::map::TargetRecord;
use crate::osd::Osd;
use crate::pool::{ActivePool, ObjectLocation};
use crate::shard::Shard;
use crate::target::Target;

/// Returns whether a group cannot continue without a target.
async fn waits_for(group: &Rc<Group>, target: Uuid) -> bool {
    let is_open = group.any_interval().await.is_ok();
    !is_open && group.waits_for().is_some_and(|targets| targets.contains(&target))
}

/// What each pool would lose with a target, by the pool's name.
type Losses = BTreeMap<String, PoolLoss>;

impl Osd {
    /// Takes a target out of use, or back into use. With the latter, the operator also withdraws the
    /// acceptance of the target's loss.
    pub(crate) async fn set_target_out(&self, index: u32, out: bool) -> wire::Result<()> {
        let target = self.target(index)?;
        // Each group must determine its current interval before the target can return.
        self.shard.each(|shard| shard.determine_intervals()).await?;
        if out {
            self.can_spare(&target).await?;
        }
        if !out {
            self.try_again(target.uuid).await?;
        }
        self.change_targets(async |map| {
            let record = &mut map.targets[index as usize];
            record.out = out;
            record.forgotten &= out;
            record.given_up &= out;
        })
        .await
    }

    /// Uses a failed target again at once, on all shards.
    pub(crate) async fn try_again(&self, uuid: Uuid) -> wire::Result<()> {
        let told = self.shard.tell_each(move |shard| {
            shard.target(uuid).into_iter().for_each(|target| target.try_again());
        });
        Ok(told.await?)
    }

    /// Accepts the loss of what only this target has, if `accept` is true. Returns what each pool
    /// loses.
    pub(crate) async fn forget_target(&self, index: u32, accept: bool) -> wire::Result<Vec<PoolLoss>> {
        let target = self.target(index)?;
        let loss = self.loss(target.uuid).await?;
        if loss.is_empty() {
            let what = format!(
                "no placement group waits for target {index}, so there is no loss to accept; a lost target can be replaced: outboard target replace {index}"
            );
            return Err(Error::CommandRefused(what));
        }
        if accept {
            tracing::warn!(target_uuid = %target.uuid, ?loss, "the operator has accepted the loss of the target");
            let (single, redundant): (Vec<_>, Vec<_>) =
                loss.iter().partition(|loss| loss.redundancy == Redundancy::Single);
            self.change_targets(async |map| {
                let record = &mut map.targets[index as usize];
                record.given_up |= !single.is_empty();
                record.forgotten |= !redundant.is_empty();
            })
            .await?;
            let uuid = target.uuid;
            self.shard.each(move |shard| shard.heed_word(uuid)).await?;
            self.accept_older_copy(uuid).await?;
        }
        Ok(loss)
    }

    /// Uses a target again for pools without redundancy although it has gone back.
    pub(crate) async fn accept_older_copy(&self, uuid: Uuid) -> Result<(), ShardGone> {
        let went_back = move |shard: Rc<Shard>| async move {
            shard.target(uuid).is_some_and(|target| target.went_back() == Some(true))
        };
        if self.shard.each(went_back).await?.contains(&true) {
            self.shard.witness.forget_age(uuid);
            let accepted = self.shard.tell_each(move |shard| {
                if let Some(target) = shard.target(uuid)
                    && target.went_back() == Some(true)
                {
                    target.set_went_back(target.store.incarnation(), false);
                }
            });
            accepted.await?;
            self.save_age().await;
        }
        Ok(())
    }

    /// Writes the node's age to the targets.
    pub(crate) async fn save_age(&self) {
        let shard = &self.shard;
        shard.age.save(&shard.targets, &shard.witness, shard.config.target_timeout).await;
    }

    /// Returns what each pool would lose with a target. Omits pools that lose nothing.
    async fn loss(&self, uuid: Uuid) -> Result<Vec<PoolLoss>, ShardGone> {
        let mut sum = Losses::new();
        for (pool, loss) in self.shard.each(move |shard| shard.loss(uuid)).await?.into_iter().flatten() {
            match sum.get_mut(&pool) {
                Some(known) => {
                    known.waiting += loss.waiting;
                    known.emptied += loss.emptied;
                }
                None => drop(sum.insert(pool, loss)),
            }
        }
        Ok(sum.into_values().collect())
    }

    /// Gives a target's number to another target. The node uses the new target from its next start.
    /// Until then, another call may replace it again, because the client may have missed the answer.
    pub(crate) async fn replace_target(&self, index: u32, uuid: Uuid) -> wire::Result<()> {
        let old = self.target_uuid(index)?;
        if let Some(old) = self.shard.target(old) {
            self.can_replace(index, &old).await?;
        }
        if self.shard.map.borrow().record(&uuid).is_some() {
            return Err(Error::CommandRefused(format!("target {uuid} belongs to the node already")));
        }
        self.change_targets(async |map| {
            let record = &mut map.targets[index as usize];
            *record = record.replaced_by(uuid);
        })
        .await?;
        Ok(self.shard.tell_each(move |shard| shard.stop_using(old)).await?)
    }

    /// Fails if replacing the target would lose data, unless the operator has accepted the loss.
    async fn can_replace(&self, index: u32, target: &Rc<Target>) -> wire::Result<()> {
        self.can_spare(target).await?;
        self.has_no_objects_alone(index, target.uuid).await?;
        let TargetRecord { forgotten, given_up, .. } = self.shard.map.borrow().targets[index as usize];
        let waits = |loss: &PoolLoss| match loss.redundancy {
            Redundancy::Single => !given_up,
            _ => !forgotten,
        };
        let pools: Vec<String> =
            self.loss(target.uuid).await?.into_iter().filter(waits).map(|loss| loss.pool).collect();
        if pools.is_empty() {
            return Ok(());
        }
        Err(Error::CommandRefused(format!(
            "these pools wait for target {index}: {}; bring the target back, or accept that what only this target has is lost: outboard target forget {index} --accept-loss",
            pools.join(", ")
        )))
    }

    /// Fails if the working target has objects of pools without redundancy.
    async fn has_no_objects_alone(&self, index: u32, uuid: Uuid) -> wire::Result<()> {
        for pool in self.shard.each(move |shard| shard.pool_with_objects_alone(uuid)).await? {
            if let Some(pool) = pool? {
                return Err(Error::CommandRefused(format!(
                    "target {index} works and has objects of pool {pool}, which has no redundancy; copy the objects to another pool and remove them, or remove the pool",
                )));
            }
        }
        Ok(())
    }

    /// Fails if the target is present and has data that too few other targets have. Without this
    /// check, taking the target out of use or replacing it could lose data.
    async fn can_spare(&self, target: &Target) -> wire::Result<()> {
        let uuid = target.uuid;
        let pools = self.shard.each(move |shard| shard.pools_that_need(uuid)).await?;
        let pools: BTreeSet<String> = pools.into_iter().flatten().collect();
        if pools.is_empty() {
            return Ok(());
        }
        // The osd may not have noticed a failure of the target yet. To find out, it writes the map
        // to all targets, and each shard sends a call to the target.
        let written = {
            let _one_at_a_time = self.map_keeper.changing.lock().await;
            let map = self.shard.map.borrow().clone();
            self.save_map(map).await
        };
        let pools = self.shard.each(move |shard| shard.pools_that_need_working(uuid)).await?;
        let pools: Vec<String> = pools.into_iter().flatten().collect::<BTreeSet<_>>().into_iter().collect();
        if pools.is_empty() {
            tracing::info!(target_uuid = %target.uuid, ?written, "the target has failed, so it may be taken out of use or replaced");
            return Ok(());
        }
        let pools = pools.join(", ");
        Err(Error::CommandRefused(format!(
            "too few other targets are up to date in these pools: {pools}; bring missing targets back and wait until they are rebuilt"
        )))
    }

    fn target_uuid(&self, index: u32) -> wire::Result<Uuid> {
        let map = self.shard.map.borrow();
        map.targets.get(index as usize).map(|record| record.uuid).ok_or_else(|| {
            let detail =
                format!("{index}; the node has targets 0 to {}", map.targets.len().saturating_sub(1));
            Error::OutOfRange { what: "target".into(), detail }
        })
    }

    fn target(&self, index: u32) -> wire::Result<Rc<Target>> {
        let uuid = self.target_uuid(index)?;
        self.shard.target(uuid).ok_or_else(|| {
            let what = format!(
                "target {uuid} was not present at the start of the node, and is used once the node is restarted with it"
            );
            Error::CommandRefused(what)
        })
    }

    /// Returns the health of the pools.
    pub(crate) async fn health(&self) -> Result<Vec<PoolHealth>, ShardGone> {
        let mut sum: BTreeMap<String, PoolHealth> = BTreeMap::new();
        let shares = self.shard.each(async |shard: Rc<Shard>| shard.health()).await?;
        for share in shares.into_iter().flatten() {
            let pool = sum.entry(share.pool.clone()).or_default();
            pool.groups += share.groups;
            pool.degraded += share.degraded;
            pool.unavailable += share.unavailable;
            pool.pool = share.pool;
        }
        Ok(sum.into_values().collect())
    }
}

impl Shard {
    /// Returns the shard's view of a target.
    pub(crate) fn target(&self, uuid: Uuid) -> Option<Rc<Target>> {
        self.targets.iter().find(|target| target.uuid == uuid).cloned()
    }

    /// Makes each group determine its current interval, if it can.
    async fn determine_intervals(self: Rc<Self>) {
        let groups = self.open_groups();
        drop(join_all(groups.iter().map(|(_, group)| group.any_interval())).await);
    }

    /// Makes the groups that wait for a target look at the map, in which the operator has accepted the
    /// loss of the target.
    async fn heed_word(self: Rc<Self>, uuid: Uuid) {
        let groups = self.open_groups().into_iter().map(|(_, group)| group);
        let waits = groups.map(async |group| waits_for(&group, uuid).await.then_some(group));
        join_all(waits).await.into_iter().flatten().for_each(|group| group.heed_word());
    }

    /// Returns what the shard's groups would lose with a target, for each pool that loses anything.
    async fn loss(self: Rc<Self>, uuid: Uuid) -> Losses {
        let mut losses = Losses::new();
        for pool in self.pools.all_open() {
            let waits = pool.groups.iter().map(|group| waits_for(group, uuid));
            let waits = join_all(waits).await;
            let waiting = waits.iter().filter(|waits| **waits).count();
            let lacks =
                pool.groups.iter().zip(&waits).filter(|(group, waits)| **waits && group.lacks_objects());
            let emptied = lacks.count();
            let is_gone = |sole: &&Rc<Target>| sole.uuid == uuid && !sole.serves_alone();
            let on_it = pool.sole_targets.iter().filter(is_gone).count();
            if waiting + on_it > 0 {
                let loss = PoolLoss {
                    pool: pool.label.clone(),
                    redundancy: pool.record.redundancy,
                    groups: pool.record.pg_count,
                    waiting: (waiting + on_it) as u32,
                    emptied: (emptied + on_it) as u32,
                };
                losses.insert(loss.pool.clone(), loss);
            }
        }
        losses
    }

    /// Stops using a target that was replaced.
    fn stop_using(&self, replaced: Uuid) {
        self.target(replaced).into_iter().for_each(|target| target.set_replaced());
        for pool in self.pools.all() {
            for (pg, _) in pool.pgs.iter().zip(&pool.sole_targets).filter(|(_, sole)| sole.uuid == replaced) {
                pg.backing.lost(pg.backing.incarnation());
            }
        }
    }

    /// Returns a pool without redundancy of which the target has objects, if the target works. A pool
    /// without redundancy also uses a target that is out.
    async fn pool_with_objects_alone(self: Rc<Self>, uuid: Uuid) -> wire::Result<Option<String>> {
        for pool in self.pools.all() {
            let is_on_it = |sole: &Target| sole.uuid == uuid && sole.serves_alone();
            for (pg, _) in pool.pgs.iter().zip(&pool.sole_targets).filter(|(_, sole)| is_on_it(sole)) {
                let place = ObjectLocation { pg: Rc::clone(pg), oid: ids::meta_object() };
                if self.has_objects(&place, |_| true).await? {
                    return Ok(Some(pool.label.clone()));
                }
            }
        }
        Ok(None)
    }

    /// Returns the pools of which too few other targets have all data.
    async fn pools_that_need(self: Rc<Self>, uuid: Uuid) -> BTreeSet<String> {
        // A group that cannot determine its interval may need the target.
        let needs = async |(pool, group): (String, Rc<Group>)| {
            let interval = group.any_interval().await;
            let can_spare = interval.is_ok_and(|interval| interval.can_spare(uuid, group.needed()));
            (!can_spare).then_some(pool)
        };
        let groups = self.open_groups().into_iter().map(needs);
        join_all(groups).await.into_iter().flatten().collect()
    }

    /// Like [`Shard::pools_that_need`], but returns no pools if the target does not work. Sends a call
    /// to the target to find this out.
    async fn pools_that_need_working(self: Rc<Self>, uuid: Uuid) -> BTreeSet<String> {
        let Some(target) = self.target(uuid) else { return BTreeSet::new() };
        let patience = self.config.target_timeout;
        if target.is_usable() && tokio::time::timeout(patience, target.fails()).await.is_err() {
            target.overdue(&ids::node_collection(), patience);
        }
        if target.is_usable() { self.pools_that_need(uuid).await } else { BTreeSet::new() }
    }

    /// Returns whether a target is a member of any group of this shard and lacks changes of that
    /// group.
    pub(crate) fn lacks_changes(&self, uuid: Uuid) -> bool {
        // While a group has no current interval, its last known interval counts.
        let intervals = self.open_groups().into_iter().filter_map(|(_, group)| group.last_interval());
        intervals.into_iter().any(|interval| interval.lacks_target(uuid))
    }

    /// Returns the health of the shard's share of the pools.
    fn health(&self) -> Vec<PoolHealth> {
        let health = |pool: Rc<ActivePool>| {
            let mut health = PoolHealth { pool: pool.label.clone(), ..PoolHealth::default() };
            health.groups = pool.pgs.len() as u32;
            for group in &pool.groups {
                match group.current() {
                    Some(interval) => health.degraded += u32::from(!interval.is_whole()),
                    None => health.unavailable += 1,
                }
            }
            let unavailable = pool.sole_targets.iter().filter(|sole| !sole.serves_alone());
            health.unavailable += unavailable.count() as u32;
            health
        };
        self.pools.all().into_iter().map(health).collect()
    }
}
