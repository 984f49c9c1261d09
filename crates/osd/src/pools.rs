//! Creation, listing and removal of pools.

use std::rc::Rc;

use array::Group;
use store::{Op, StoreCalls, StoreError, Transaction};
use uuid::Uuid;
use wire::limits::MAX_POOLS;
use wire::{Error, PoolInfo, PoolName, Redundancy, placement};

use crate::fail::{Fail, StepResult, refusal};
use crate::ids::{self, IdLayout, StoredName};
use crate::list::{after, objects};
use crate::map::PoolRecord;
use crate::osd::Osd;
use crate::patience::patiently;
use crate::pool::{ActivePool, ObjectLocation};
use crate::task::spawn;

/// Maximum number of objects that one transaction removes when a pool is removed.
const REMOVE_BATCH: usize = 64;

impl Osd {
    /// Returns the pools, ordered by name.
    pub(crate) fn list_pools(&self) -> Vec<PoolInfo> {
        let pools = self.pools.borrow();
        let open = pools.values().filter(|pool| !pool.closed.get());
        open.map(|pool| PoolInfo {
            id: pool.record.id,
            name: pool.record.name.clone(),
            pg_count: pool.record.pg_count,
            redundancy: pool.record.redundancy,
            made_ms: pool.record.made_ms,
        })
        .collect()
    }

    /// Creates a pool. The pool exists once the map with the pool is durable.
    pub(crate) async fn create_pool(
        &self,
        name: &[u8],
        pg_count: u32,
        redundancy: Redundancy,
    ) -> wire::Result<()> {
        let name = PoolName::from_wire(name)?.to_string();
        redundancy.check()?;
        let pg_count = placement::pg_count(pg_count)?;
        let _one_at_a_time = self.changing_map.lock().await;
        let mut map = self.map.borrow().clone();
        if self.pools.borrow().contains_key(&name) {
            return Err(Error::PoolExists(name));
        }
        if map.pools.len() >= MAX_POOLS {
            let advice = "remove a pool, or use namespaces".into();
            return Err(Error::Busy { what: "pools".into(), limit: MAX_POOLS as u64, advice });
        }
        let (id, made_ms) = (map.next_pool_id, self.config.clock.now_ms());
        let ids = IdLayout::ByName;
        let record = PoolRecord { id, name, pg_count, made_ms, removing: false, redundancy, ids };
        map.next_pool_id += 1;
        map.pools.push(record.clone());
        let pool = self.make_pool(&record);
        self.create_groups(&pool).await?;
        self.save_map(map).await?;
        self.add_pool(pool);
        Ok(())
    }

    /// Creates the groups of a pool with redundancy. This must happen before the map contains the
    /// pool: a group of a pool in the map would count as lost if no target had any of its data.
    async fn create_groups(&self, pool: &ActivePool) -> wire::Result<()> {
        let uuids: Vec<Uuid> = self.targets.iter().map(|t| t.uuid).collect();
        let create = |group: &Rc<Group>| {
            let ranked = placement::ranked(group.place().0, group.place().1, &uuids);
            let group = Rc::clone(group);
            async move { group.create(&ranked).await }
        };
        let created = futures::future::try_join_all(pool.groups.iter().map(create)).await;
        created.map(drop).map_err(|e| refusal(e.into()))
    }

    /// Closes a pool and marks it in the map as being removed. A background task then removes the
    /// pool's objects, and finally the pool's record in the map.
    pub(crate) async fn remove_pool(self: &Rc<Osd>, name: &[u8], force: bool) -> wire::Result<()> {
        let name = PoolName::from_wire(name)?.to_string();
        let _one_at_a_time = self.changing_map.lock().await;
        let pool = self.open_pool(&name)?;
        pool.closed.set(true);
        let removed = self.try_remove(&pool, force).await;
        if let Err(e) = removed {
            pool.closed.set(false);
            return Err(e);
        }
        self.pools.borrow_mut().remove(&name);
        self.empty_in_background(pool);
        Ok(())
    }

    async fn try_remove(&self, pool: &ActivePool, force: bool) -> wire::Result<()> {
        if !force {
            for pg in &pool.pgs {
                let place = ObjectLocation { pg: Rc::clone(pg), oid: ids::meta_object() };
                if self.has_objects(&place, |name| name.part.is_none()).await? {
                    return Err(Error::PoolNotEmpty(pool.record.name.clone()));
                }
            }
        }
        let mut map = self.map.borrow().clone();
        map.pools.iter_mut().filter(|p| p.id == pool.record.id).for_each(|p| p.removing = true);
        self.save_map(map).await
    }

    /// Returns whether a placement group has an object, or a part of an object, for which `counts`
    /// returns true.
    pub(crate) async fn has_objects(
        &self,
        place: &ObjectLocation,
        counts: impl Fn(&StoredName<'_>) -> bool,
    ) -> wire::Result<bool> {
        let mut from = None;
        loop {
            let attempt = async || objects(place, from.clone(), REMOVE_BATCH).await;
            let (ids, more) = patiently(place, self.config.store_patience, attempt).await.map_err(refusal)?;
            if ids.iter().any(|id| ids::parse(id).is_some_and(|name| counts(&name))) {
                return Ok(true);
            }
            match ids.last() {
                Some(last) if more => from = Some(after(last).map_err(refusal)?),
                _ => return Ok(false),
            }
        }
    }

    /// Starts a task that removes the content of a closed pool, and then the pool from the map.
    pub(crate) fn empty_in_background(self: &Rc<Osd>, pool: Rc<ActivePool>) {
        let osd = Rc::clone(self);
        spawn(async move { osd.empty_or_wait(pool).await });
    }

    /// Removes the content of a closed pool and then the pool from the map, within the calling
    /// task. If this fails, the osd tries again once all targets are present.
    pub(crate) async fn empty_or_wait(&self, pool: Rc<ActivePool>) {
        let Err(e) = self.empty(&pool).await else { return };
        let name = &pool.record.name;
        tracing::warn!(name, error = ?e, "the space of a removed pool is freed once all targets are present");
        self.removed_pools.borrow_mut().push(pool);
    }

    async fn empty(&self, pool: &ActivePool) -> StepResult<()> {
        for group in &pool.groups {
            group.remove().await?;
            tokio::task::yield_now().await;
        }
        if !pool.groups.is_empty() && !self.has_all_targets() {
            return Err(Fail::Lost("a target is not present".into()));
        }
        for pg in pool.pgs.iter().filter(|_| pool.groups.is_empty()) {
            let place = ObjectLocation { pg: Rc::clone(pg), oid: ids::meta_object() };
            patiently(&place, self.config.store_patience, async || self.empty_group(&place).await).await?;
        }
        let _one_at_a_time = self.changing_map.lock().await;
        let mut map = self.map.borrow().clone();
        map.pools.retain(|p| p.id != pool.record.id);
        Ok(self.save_map(map).await?)
    }

    async fn empty_group(&self, place: &ObjectLocation) -> StepResult<()> {
        let pg = &place.pg;
        pg.backing.incarnation();
        // The store passes over removed objects before it finds others, so a listing from the beginning
        // would take longer each time.
        let mut from = None;
        loop {
            let begins = from.is_none();
            let ids = match pg.backing.list(&pg.cid, from.take(), REMOVE_BATCH).await {
                Ok((ids, _)) => ids,
                Err(StoreError::NoSuchCollection(_)) => return Ok(()),
                Err(e) => return Err(e.into()),
            };
            let mut transaction = Transaction::new(pg.cid.clone());
            match ids.last() {
                Some(last) => from = Some(after(last)?),
                None if begins => transaction.ops.push(Op::RemoveCollection),
                // A change that was in progress when the pool was closed may have created an object.
                None => continue,
            }
            transaction.ops.extend(ids.into_iter().map(|oid| Op::Remove { oid }));
            match pg.backing.queue(transaction).await {
                // A change that was in progress when the pool was closed may have created or
                // removed an object in between. The next listing from the beginning finds what is left.
                Ok(()) | Err(StoreError::NotEmpty(_) | StoreError::NoSuchObject(_)) => {}
                Err(StoreError::NoSuchCollection(_)) => return Ok(()),
                Err(e) => return Err(e.into()),
            }
            tokio::task::yield_now().await;
        }
    }
}
