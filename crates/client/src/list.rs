//! Lists the objects of a pool.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use wire::{List, ObjectName, PoolName};

use crate::Result;
use crate::requests::Requests;

/// Default maximum number of names per request.
const PAGE: u32 = 1000;

/// A listing in progress. Names arrive in pages, and the cursor stays valid while objects change.
/// Objects that exist during the whole listing are listed exactly once.
#[derive(Debug)]
pub struct Listing {
    requests: Arc<Requests>,
    pool: PoolName,
    namespace: Option<String>,
    prefix: Bytes,
    cursor: Bytes,
    page_size: u32,
    page: VecDeque<ObjectName>,
    ended: bool,
}

impl Listing {
    pub(crate) fn new(
        requests: Arc<Requests>,
        pool: PoolName,
        namespace: Option<String>,
        prefix: &str,
    ) -> Listing {
        let prefix = Bytes::copy_from_slice(prefix.as_bytes());
        let (cursor, page) = (Bytes::new(), VecDeque::new());
        Listing { requests, pool, namespace, prefix, cursor, page_size: PAGE, page, ended: false }
    }

    /// Sets the maximum number of names per request (1 to 4096, by default 1000).
    #[must_use]
    pub fn page_size(mut self, names: u32) -> Listing {
        self.page_size = names.clamp(1, self.requests.engine().limits().page_entries_max);
        self
    }

    /// Continues an earlier listing of the same pool and prefix from its [`Listing::cursor`]. With
    /// an empty cursor, lists all names.
    #[must_use]
    pub fn from_cursor(mut self, cursor: Bytes) -> Listing {
        self.cursor = cursor;
        self
    }

    /// Returns the cursor for the next page. A listing from this cursor skips the current page,
    /// including names that [`Listing::next`] has not returned yet. The cursor is empty before the
    /// first page and after the last page.
    #[must_use]
    pub fn cursor(&self) -> &Bytes {
        &self.cursor
    }

    /// Returns the next name, or `None` at the end.
    ///
    /// # Errors
    /// If the node does not answer, or if the pool does not exist.
    pub async fn next(&mut self) -> Result<Option<ObjectName>> {
        while self.page.is_empty() && !self.ended {
            self.fetch().await?;
        }
        Ok(self.page.pop_front())
    }

    /// Collects all remaining names, for listings that fit in memory.
    ///
    /// # Errors
    /// The same errors as [`Listing::next`].
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
            limit: self.page_size,
        };
        let listed = self.requests.list(request).await?;
        for (namespace, object) in listed.names {
            self.page.push_back(ObjectName::new(self.pool.clone(), namespace, object)?);
        }
        self.ended = listed.cursor.is_empty();
        self.cursor = listed.cursor;
        Ok(())
    }
}
