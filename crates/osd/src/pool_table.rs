//! [`PoolTable`]: the pools of a shard, by name.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use wire::Error;

use crate::pool::ActivePool;

/// The shard's share of each pool in use. A closed pool stays in the table until the map lists it as
/// being removed.
#[derive(Default)]
pub(crate) struct PoolTable(RefCell<BTreeMap<String, Rc<ActivePool>>>);

impl PoolTable {
    /// Makes a pool available to requests.
    pub(crate) fn add(&self, pool: Rc<ActivePool>) {
        self.0.borrow_mut().insert(pool.record.name.clone(), pool);
    }

    /// Removes a pool, and returns it.
    pub(crate) fn remove(&self, name: &str) -> Option<Rc<ActivePool>> {
        self.0.borrow_mut().remove(name)
    }

    /// Returns a pool, open or closed.
    pub(crate) fn get(&self, name: &str) -> Option<Rc<ActivePool>> {
        self.0.borrow().get(name).cloned()
    }

    /// Returns a pool that accepts requests.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`] if there is none of this name.
    pub(crate) fn open(&self, name: &str) -> wire::Result<Rc<ActivePool>> {
        let open = self.get(name).filter(|pool| !pool.closed.get());
        open.ok_or_else(|| Error::NoSuchPool(name.to_owned()))
    }

    /// Returns all pools, in the order of their names.
    pub(crate) fn all(&self) -> Vec<Rc<ActivePool>> {
        self.0.borrow().values().cloned().collect()
    }

    /// Returns the pools that accept requests, in the order of their names.
    pub(crate) fn all_open(&self) -> Vec<Rc<ActivePool>> {
        self.0.borrow().values().filter(|pool| !pool.closed.get()).cloned().collect()
    }
}
