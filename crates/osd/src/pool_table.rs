//! [`PoolTable`]: the pools of a shard, by number, and by tenant and name.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use wire::Error;

use crate::pool::ActivePool;

/// The shard's share of each pool in use. A closed pool stays in the table until the map lists it as
/// being removed.
#[derive(Default)]
pub(crate) struct PoolTable(RefCell<Pools>);

#[derive(Default)]
struct Pools {
    by_id: BTreeMap<u32, Rc<ActivePool>>,
    /// By tenant, then by name.
    by_name: BTreeMap<u32, BTreeMap<String, Rc<ActivePool>>>,
}

impl PoolTable {
    /// Makes a pool available to requests.
    pub(crate) fn add(&self, pool: Rc<ActivePool>) {
        let mut pools = self.0.borrow_mut();
        let (id, tenant, name) = (pool.record.id, pool.record.tenant, pool.record.name.clone());
        pools.by_name.entry(tenant).or_default().insert(name, Rc::clone(&pool));
        pools.by_id.insert(id, pool);
    }

    /// Removes a pool, and returns it.
    pub(crate) fn remove(&self, id: u32) -> Option<Rc<ActivePool>> {
        let mut pools = self.0.borrow_mut();
        let pool = pools.by_id.remove(&id)?;
        if let Some(named) = pools.by_name.get_mut(&pool.record.tenant) {
            named.remove(&pool.record.name);
        }
        Some(pool)
    }

    /// Returns a pool, open or closed.
    pub(crate) fn get(&self, id: u32) -> Option<Rc<ActivePool>> {
        self.0.borrow().by_id.get(&id).cloned()
    }

    /// Returns a pool that accepts requests.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`] if it does not exist any more.
    pub(crate) fn open(&self, id: u32) -> wire::Result<Rc<ActivePool>> {
        let open = self.get(id).filter(|pool| !pool.closed.get());
        open.ok_or_else(|| Error::NoSuchPool(format!("number {id}")))
    }

    /// Returns the pool of a tenant with this name, open or closed.
    pub(crate) fn named(&self, tenant: u32, name: &str) -> Option<Rc<ActivePool>> {
        self.0.borrow().by_name.get(&tenant)?.get(name).cloned()
    }

    /// Returns the pool of a tenant with this name, if it accepts requests.
    pub(crate) fn open_named(&self, tenant: u32, name: &str) -> Option<Rc<ActivePool>> {
        self.named(tenant, name).filter(|pool| !pool.closed.get())
    }

    /// Returns all pools, in the order of their tenants and names.
    pub(crate) fn all(&self) -> Vec<Rc<ActivePool>> {
        self.0.borrow().by_name.values().flat_map(BTreeMap::values).cloned().collect()
    }

    /// Returns the pools that accept requests, in the order of their tenants and names.
    pub(crate) fn all_open(&self) -> Vec<Rc<ActivePool>> {
        let mut pools = self.all();
        pools.retain(|pool| !pool.closed.get());
        pools
    }
}
