//! The workload `omap`: changes of omap entries on condition of their old values.
//!
//! Each worker changes entries of its own. An entry's value begins with the number of changes of
//! the entry, so a change that is lost or that takes effect twice makes a later condition fail, or
//! shows in the check at the end.

use std::cell::RefCell;
use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use client::Pool;
use rand::Rng;
use rand::rngs::SmallRng;

/// Number of entries of a worker in each object.
const ENTRIES: u32 = 64;

/// Gives an object an empty omap.
///
/// # Errors
/// If the change of the object fails.
pub async fn prepare(pool: &Pool, object: u64) -> client::Result<()> {
    pool.object(&name(object))?.compound().touch().omap_clear().commit().await.map(|_| ())
}

fn name(object: u64) -> String {
    format!("bench-omap-{object}")
}

/// Changes the entries of one worker.
pub struct EntryWorker {
    pool: Pool,
    /// Prefix of the keys of the worker.
    worker: String,
    objects: u64,
    /// The bytes of a value. A value begins with a number instead, if it has room for one.
    filling: Bytes,
    /// Number of changes of each entry, by object and entry; `None` if it is unknown, because the
    /// outcome of a change is unknown.
    changes: BTreeMap<(u64, u32), Option<u64>>,
}

impl EntryWorker {
    /// Creates a worker with a unique name. Its entries must not exist. Values have the length of
    /// `filling`, but at least 8 bytes.
    pub fn new(pool: Pool, worker: &str, objects: u64, filling: Bytes) -> EntryWorker {
        EntryWorker { pool, worker: worker.to_owned(), objects, filling, changes: BTreeMap::new() }
    }

    fn key(&self, entry: u32) -> Bytes {
        format!("{}-{entry:02}", self.worker).into()
    }

    /// Returns the value of an entry after some changes.
    fn value(&self, changes: u64) -> Option<Bytes> {
        if changes == 0 {
            return None;
        }
        let mut value = BytesMut::with_capacity(self.filling.len().max(8));
        value.put_u64(changes);
        value.extend_from_slice(self.filling.get(8..).unwrap_or_default());
        Some(value.freeze())
    }

    /// Changes a random entry of a random object.
    ///
    /// # Errors
    /// If the change fails, for example because the entry has not the expected value.
    pub async fn change(&mut self, rng: &RefCell<SmallRng>) -> client::Result<()> {
        let (object, entry) = {
            let mut rng = rng.borrow_mut();
            (rng.random_range(0..self.objects), rng.random_range(0..ENTRIES))
        };
        let before = match self.changes.get(&(object, entry)) {
            Some(Some(changes)) => *changes,
            Some(None) => self.stored(object, entry).await?,
            None => 0,
        };
        let (key, old, new) = (self.key(entry), self.value(before), self.value(before + 1));
        let change = self.pool.object(&name(object))?.compound().if_omap(key.clone(), old);
        let outcome = change.omap_set(new.into_iter().map(|new| (key.clone(), new)).collect()).commit().await;
        let after = match &outcome {
            Ok(_) => Some(before + 1),
            Err(_) => None,
        };
        self.changes.insert((object, entry), after);
        outcome.map(|_| ())
    }

    /// Returns the number of changes that the stored value of an entry states.
    async fn stored(&self, object: u64, entry: u32) -> client::Result<u64> {
        let found = self.pool.object(&name(object))?.omap_get(vec![self.key(entry)]).await?;
        let Some((_, value)) = found.first() else { return Ok(0) };
        let number = value.first_chunk().map(|bytes| u64::from_be_bytes(*bytes));
        number.ok_or_else(|| client::Error::Protocol(format!("entry {entry} has {} bytes", value.len())))
    }

    /// Checks that each entry has the value of its last change. Entries whose last change has an
    /// unknown outcome are not checked.
    ///
    /// # Errors
    /// If an entry cannot be read, or has another value.
    pub async fn check(&self) -> client::Result<()> {
        for ((object, entry), changes) in &self.changes {
            let Some(changes) = changes else { continue };
            let stored = self.stored(*object, *entry).await?;
            if stored != *changes {
                let what = format!(
                    "entry {} of object {} shows {stored} changes instead of {changes}",
                    self.key(*entry).escape_ascii(),
                    name(*object)
                );
                return Err(client::Error::Protocol(what));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use client::engine::MemEngine;
    use client::{Client, Options};
    use rand::SeedableRng;

    use super::*;

    #[tokio::test]
    async fn a_change_that_takes_effect_twice_is_found() {
        let client = Client::over(Arc::new(MemEngine::new()), Options::default());
        client.create_pool("p").await.unwrap();
        let pool = client.pool("p").unwrap();
        prepare(&pool, 0).await.unwrap();
        let rng = RefCell::new(SmallRng::seed_from_u64(1));
        let mut worker = EntryWorker::new(pool.clone(), "0-0", 1, Bytes::from_static(&[7; 20]));
        for _ in 0..200 {
            worker.change(&rng).await.unwrap();
        }
        worker.check().await.unwrap();
        let (&(object, entry), &changes) = worker.changes.first_key_value().unwrap();
        let twice = vec![(worker.key(entry), worker.value(changes.unwrap() + 1).unwrap())];
        pool.object(&name(object)).unwrap().omap_set(twice).await.unwrap();
        assert!(worker.check().await.is_err());
    }
}
