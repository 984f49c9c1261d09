//! [`Objects`]: the locks and the cached sizes of a group's objects.

use std::cell::RefCell;
use std::sync::{self, Arc, MutexGuard, PoisonError};

use base::collections::HashMap;
use store::ObjectId;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

use crate::interval::Interval;

/// Maximum number of objects whose size is cached.
const OBJECTS_MAX: usize = 4096;

/// Cached size of an object.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Number of the interval in which the size was read, and the size (`None` if the object does
    /// not exist). Requests that hold only a shared lock on the object may set this pair, so a
    /// mutex protects it.
    size: sync::Mutex<Option<(u64, Option<u64>)>>,
}

impl Known {
    /// Returns the size if it was cached in this interval. The inner value is `None` if the object
    /// does not exist.
    pub(crate) fn get(&self, interval: &Interval) -> Option<Option<u64>> {
        self.lock().filter(|(learnt, _)| *learnt == interval.number).map(|(_, size)| size)
    }

    pub(crate) fn set(&self, interval: &Interval, size: Option<u64>) {
        *self.lock() = Some((interval.number, size));
    }

    /// Discards the cached size after a failure. The next request asks the members for the size
    /// again.
    pub(crate) fn forget(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<(u64, Option<u64>)>> {
        self.size.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Exclusive lock of an object.
pub(crate) type ObjectLock = OwnedRwLockWriteGuard<Known>;

/// The lock and the cached size of each of a group's objects.
#[derive(Default)]
pub(crate) struct Objects(RefCell<HashMap<ObjectId, Arc<RwLock<Known>>>>);

impl Objects {
    /// Locks an object to read it.
    pub(crate) async fn shared(&self, oid: &ObjectId) -> OwnedRwLockReadGuard<Known> {
        self.object(oid).read_owned().await
    }

    /// Locks an object to change it.
    pub(crate) async fn exclusive(&self, oid: &ObjectId) -> ObjectLock {
        self.object(oid).write_owned().await
    }

    fn object(&self, oid: &ObjectId) -> Arc<RwLock<Known>> {
        let mut objects = self.0.borrow_mut();
        if let Some(known) = objects.get(oid) {
            return Arc::clone(known);
        }
        if objects.len() >= OBJECTS_MAX {
            // Evict half of the entries that no request uses.
            let mut keep = false;
            objects.retain(|_, entry| {
                keep = !keep;
                keep || Arc::strong_count(entry) > 1
            });
        }
        Arc::clone(objects.entry(oid.clone()).or_default())
    }
}
