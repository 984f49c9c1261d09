//! Listing of a pool.

use std::collections::VecDeque;

use bytes::Bytes;
use wire::{List, ObjectName, PoolName};

use crate::{Client, Result};

/// Names asked for at a time.
const PAGE: u32 = 1000;

/// A listing under way: names come in pages, with a cursor that stays good whatever changes meanwhile. Objects that
/// exist all the while are listed exactly once.
#[derive(Debug)]
pub struct Listing {
    client: Client,
    pool: PoolName,
    namespace: Option<String>,
    prefix: Bytes,
    cursor: Bytes,
    page: VecDeque<ObjectName>,
    ended: bool,
}

impl Listing {
    pub(crate) fn new(client: Client, pool: PoolName, namespace: Option<String>, prefix: &str) -> Listing {
        let prefix = Bytes::copy_from_slice(prefix.as_bytes());
        Listing { client, pool, namespace, prefix, cursor: Bytes::new(), page: VecDeque::new(), ended: false }
    }

    /// Goes on where an earlier listing of the same pool and prefix stood: see [`Listing::cursor`].
    #[must_use]
    pub fn from_cursor(mut self, cursor: Bytes) -> Listing {
        self.cursor = cursor;
        self
    }

    /// Where the next page starts: names taken so far, and the rest of the page they came from, will not come again.
    #[must_use]
    pub fn cursor(&self) -> &Bytes {
        &self.cursor
    }

    /// The next name, or `None` at the end.
    ///
    /// # Errors
    /// If the node does not answer or does not have the pool.
    pub async fn next(&mut self) -> Result<Option<ObjectName>> {
        while self.page.is_empty() && !self.ended {
            self.fetch().await?;
        }
        Ok(self.page.pop_front())
    }

    /// All names that are left. For listings that fit in memory.
    ///
    /// # Errors
    /// As [`Listing::next`].
    pub async fn collect(mut self) -> Result<Vec<ObjectName>> {
        let mut all = Vec::new();
        while let Some(name) = self.next().await? {
            all.push(name);
        }
        Ok(all)
    }

    async fn fetch(&mut self) -> Result<()> {
        let request = List {
            pool: self.pool.to_string().into(),
            namespace: self.namespace.clone().map(Bytes::from),
            prefix: self.prefix.clone(),
            cursor: self.cursor.clone(),
            limit: PAGE,
        };
        let listed = self.client.requests().list(request).await?;
        for (namespace, object) in listed.names {
            self.page.push_back(ObjectName::new(self.pool.clone(), namespace, object)?);
        }
        self.ended = listed.cursor.is_empty();
        self.cursor = listed.cursor;
        Ok(())
    }
}
