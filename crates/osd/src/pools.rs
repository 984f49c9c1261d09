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
use crate::mailbox::ShardGone;
use crate::map::{NodeMap, PoolRecord};
use crate::osd::Osd;
use crate::patience::patiently;
use crate::pool::{ActivePool, ObjectLocation};
use crate::shard::Shard;
use crate::task::spawn;

/// Maximum number of objects that one transaction removes when a pool is removed.
const REMOVE_BATCH: usize = 64;

impl Osd {
    /// Returns the pools for which `name` returns a name, ordered by tenant and name.
    pub(crate) fn list_pools(&self, name: impl Fn(&ActivePool) -> Option<String>) -> Vec<PoolInfo> {
        let info = |pool: Rc<ActivePool>| {
            let name = name(&pool)?;
            let PoolRecord { id, pg_count, redundancy, made_ms, .. } = pool.record;
            Some(PoolInfo { id, name, pg_count, redundancy, made_ms })
        };
        self.shard.pools.all_open().into_iter().filter_map(info).collect()
    }

    /// Creates a pool, if the caller is still permitted to once it is its turn. The pool exists once the map with the pool is durable.
    pub(crate) async fn create_pool(
        &self,
        (tenant, name): (u32, &[u8]),
        pg_count: u32,
        redundancy: Redundancy,
        still_permitted: impl FnOnce() -> wire::Result<()>,
    ) -> wire::Result<()> {
        let name = PoolName::from_wire(name)?.to_string();
        redundancy.check()?;
        let pg_count = placement::pg_count(pg_count)?;
        let _one_at_a_time = self.map_keeper.changing.lock().await;
        still_permitted()?;
        let mut map = self.shard.map.borrow().clone();
        if self.shard.pools.named(tenant, &name).is_some() {
            return Err(Error::PoolExists(name));
        }
        if map.pools.len() >= MAX_POOLS {
            let advice = "remove a pool, or use namespaces".into();
            return Err(Error::Busy { what: "pools".into(), limit: MAX_POOLS as u64, advice });
        }
        let (id, made_ms) = (map.next_pool_id, self.shard.config.clock.now_ms());
        let ids = IdLayout::ByName;
        let removing = false;
        let record = PoolRecord { id, name, pg_count, made_ms, removing, redundancy, ids, tenant };
        map.next_pool_id += 1;
        map.pools.push(record.clone());
        self.check_size(&map)?;
        let created = self.create_on_all_shards(record, map).await;
        let exists = created.is_ok();
        let known = self.shard.tell_each(move |shard| {
            let pool = shard.prepared.remove(id).filter(|_| exists);
            pool.into_iter().for_each(|pool| shard.pools.add(pool));
        });
        known.await?;
        created
    }

    /// Creates the groups of a pool with redundancy. This must happen before the map contains the
    /// pool: a group of a pool in the map would count as lost if no target had any of its data.
    async fn create_on_all_shards(&self, record: PoolRecord, map: NodeMap) -> wire::Result<()> {
        let created = self.shard.each(move |shard| shard.create_share(record)).await?;
        created.into_iter().collect::<wire::Result<()>>()?;
        self.save_map(map).await
    }

    /// Closes a pool and marks it in the map as being removed. A background task then removes the
    /// pool's objects, and finally the pool's record in the map.
    pub(crate) async fn remove_pool(
        self: &Rc<Osd>,
        id: u32,
        force: bool,
        still_permitted: impl FnOnce() -> wire::Result<()>,
    ) -> wire::Result<()> {
        let _one_at_a_time = self.map_keeper.changing.lock().await;
        still_permitted()?;
        let record = self.shard.open_pool(id)?.record.clone();
        self.set_closed(id, true).await?;
        if let Err(e) = self.try_remove(&record, force).await {
            self.set_closed(id, false).await?;
            return Err(e);
        }
        let removed = self.shard.tell_each(move |shard| {
            let pool = shard.pools.remove(id).expect("all shards have the same pools");
            shard.removing.borrow_mut().insert(pool.record.id, pool);
        });
        removed.await?;
        self.empty_in_background(record);
        Ok(())
    }

    async fn set_closed(&self, id: u32, closed: bool) -> Result<(), ShardGone> {
        let told = self.shard.tell_each(move |shard| {
            let pool = shard.pools.get(id).expect("all shards have the same pools");
            pool.closed.set(closed);
        });
        told.await
    }

    async fn try_remove(&self, record: &PoolRecord, force: bool) -> wire::Result<()> {
        if !force {
            let id = record.id;
            let found = self.shard.each(move |shard| shard.share_has_objects(id)).await?;
            if found.into_iter().collect::<wire::Result<Vec<bool>>>()?.contains(&true) {
                return Err(Error::PoolNotEmpty(record.name.clone()));
            }
        }
        let mut map = self.shard.map.borrow().clone();
        map.pools.iter_mut().filter(|p| p.id == record.id).for_each(|p| p.removing = true);
        map.accounts.forget_pool(record.id);
        self.save_map(map).await
    }

    /// Starts a task that removes the content of a closed pool, and then the pool from the map.
    pub(crate) fn empty_in_background(self: &Rc<Osd>, record: PoolRecord) {
        let osd = Rc::clone(self);
        spawn(async move { osd.empty_or_wait(record).await });
    }

    /// Removes the content of a closed pool and then the pool from the map, within the calling
    /// task. If this fails, the osd tries again once all targets are present.
    pub(crate) async fn empty_or_wait(&self, record: PoolRecord) {
        let Err(e) = self.empty(&record).await else { return };
        let name = &record.name;
        tracing::warn!(name, error = ?e, "the space of a removed pool is freed once all targets are present");
        self.removed_pools.borrow_mut().push(record);
    }

    async fn empty(&self, record: &PoolRecord) -> StepResult<()> {
        let (id, record) = (record.id, record.clone());
        let emptied = self.shard.each(move |shard| shard.empty_share(record)).await.map_err(Error::from)?;
        emptied.into_iter().collect::<StepResult<()>>()?;
        let _one_at_a_time = self.map_keeper.changing.lock().await;
        let mut map = self.shard.map.borrow().clone();
        map.pools.retain(|p| p.id != id);
        self.save_map(map).await?;
        let forgotten = self.shard.tell_each(move |shard| drop(shard.removing.borrow_mut().remove(&id)));
        Ok(forgotten.await.map_err(Error::from)?)
    }
}

impl Shard {
    /// Prepares the shard's share of a new pool: creates its groups if they have redundancy.
    async fn create_share(self: Rc<Self>, record: PoolRecord) -> wire::Result<()> {
        let pool = self.make_pool(&record);
        let uuids: Vec<Uuid> = self.targets.iter().map(|t| t.uuid).collect();
        let create = |group: &Rc<Group>| {
            let ranked = placement::ranked(group.place().0, group.place().1, &uuids);
            let group = Rc::clone(group);
            async move { group.create(&ranked).await }
        };
        let created = futures::future::try_join_all(pool.groups.iter().map(create)).await;
        created.map_err(|e| refusal(e.into()))?;
        self.prepared.add(pool);
        Ok(())
    }

    /// Returns whether the shard's share of a closed pool has objects of users.
    async fn share_has_objects(self: Rc<Self>, id: u32) -> wire::Result<bool> {
        let Some(pool) = self.pools.get(id) else { return Ok(false) };
        for pg in &pool.pgs {
            let place = ObjectLocation { pg: Rc::clone(pg), oid: ids::meta_object() };
            if self.has_objects(&place, |name| name.part.is_none()).await? {
                return Ok(true);
            }
        }
        Ok(false)
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

    /// Removes the content of the shard's share of a closed pool.
    async fn empty_share(self: Rc<Self>, record: PoolRecord) -> StepResult<()> {
        let known = self.removing.borrow().get(&record.id).cloned();
        let pool = known.unwrap_or_else(|| {
            let pool = self.make_pool(&record);
            self.removing.borrow_mut().insert(record.id, Rc::clone(&pool));
            pool
        });
        let mut is_complete = true;
        for group in &pool.groups {
            is_complete &= group.remove().await?;
            tokio::task::yield_now().await;
        }
        for pg in pool.pgs.iter().filter(|_| pool.groups.is_empty()) {
            let place = ObjectLocation { pg: Rc::clone(pg), oid: ids::meta_object() };
            patiently(&place, self.config.store_patience, async || self.empty_group(&place).await).await?;
        }
        // Groups with redundancy leave out targets that are not usable. A target may have returned since.
        if !is_complete || (!pool.groups.is_empty() && !self.has_all_targets()) {
            return Err(Fail::Lost("a target is not present".into()));
        }
        Ok(())
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
