//! Lists the objects of a pool.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use wire::{List, ObjectName, PoolName, SkippedGroups};

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
    skips_unavailable: bool,
    skipped: Option<SkippedGroups>,
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
        Listing {
            requests,
            pool,
            namespace,
            prefix,
            cursor,
            page_size: PAGE,
            page,
            ended: false,
            skips_unavailable: false,
            skipped: None,
        }
    }

    /// Sets the maximum number of names per request (1 to 4096, by default 1000).
    #[must_use]
    pub fn page_size(mut self, names: u32) -> Listing {
        self.page_size = names.clamp(1, self.requests.engine().limits().page_entries_max);
        self
    }

    /// Skips placement groups that are not available because targets have failed. By default,
    /// [`Listing::next`] fails in this case.
    #[must_use]
    pub fn skip_unavailable(mut self) -> Listing {
        self.skips_unavailable = true;
        self
    }

    /// Returns the placement groups that were skipped so far.
    #[must_use]
    pub fn skipped(&self) -> Option<&SkippedGroups> {
        self.skipped.as_ref()
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
    /// If the node does not answer, if the pool does not exist, or if a placement group is not
    /// available.
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
            skip_unavailable: self.skips_unavailable,
        };
        let listed = self.requests.list(request).await?;
        for (namespace, object) in listed.names {
            self.page.push_back(ObjectName::new(self.pool.clone(), namespace, object)?);
        }
        if let Some(skipped) = listed.skipped {
            let before = self.skipped.take().map_or(0, |before| before.groups);
            self.skipped =
                Some(SkippedGroups { groups: before.saturating_add(skipped.groups), reason: skipped.reason });
        }
        self.ended = listed.cursor.is_empty();
        self.cursor = listed.cursor;
        Ok(())
    }
}
