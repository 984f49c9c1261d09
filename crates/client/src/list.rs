//! Lists the objects of a pool.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use wire::{List, ObjectName, PoolName, SkippedGroups};

use crate::Result;
use crate::group_merge::GroupMerge;
use crate::requests::Requests;

/// Default maximum number of names per request.
const PAGE: u32 = 1000;

/// A listing in progress. Names arrive in pages. Objects that exist during the whole listing are
/// listed exactly once.
///
/// By default, the names have no particular order, and the listing needs little memory.
/// [`Listing::ordered`] chooses the order of namespaces and names. A cursor continues the listing
/// later. It stays valid for as long as the pool exists, no matter which objects are created or
/// removed. A cursor is valid only for listings with the same choice of order.
#[derive(Debug)]
pub struct Listing {
    requests: Arc<Requests>,
    /// The request for a page, without its cursor.
    request: List,
    pool: PoolName,
    cursor: Bytes,
    page: VecDeque<ObjectName>,
    /// Whether names are in the order of namespaces and names.
    is_ordered: bool,
    /// The merge of an ordered listing, from the first name on.
    merge: Option<GroupMerge>,
    ended: bool,
    skipped: Option<SkippedGroups>,
}

impl Listing {
    pub(crate) fn new(
        requests: Arc<Requests>,
        pool: PoolName,
        namespace: Option<String>,
        prefix: &str,
    ) -> Listing {
        let request = List {
            pool: pool.to_string().into(),
            namespace: namespace.map(Bytes::from),
            prefix: Bytes::copy_from_slice(prefix.as_bytes()),
            group: None,
            cursor: Bytes::new(),
            limit: PAGE,
            skip_unavailable: false,
        };
        Listing {
            requests,
            request,
            pool,
            cursor: Bytes::new(),
            page: VecDeque::new(),
            is_ordered: false,
            merge: None,
            ended: false,
            skipped: None,
        }
    }

    /// Lists the objects in the order of their namespaces and names, by their bytes.
    ///
    /// The listing asks all placement groups of the pool and merges their answers. It keeps up to
    /// about 100,000 names in memory. Pools that an earlier version of Outboard created cannot be
    /// listed in order: [`Listing::next`] then fails with
    /// [`NodeError::NotOrdered`](crate::NodeError::NotOrdered).
    ///
    /// A listing that has begun starts again at its cursor, which must be the cursor of an ordered
    /// listing.
    #[must_use]
    pub fn ordered(mut self) -> Listing {
        self.is_ordered = true;
        self.restart();
        self
    }

    /// Sets the maximum number of names per request (1 to 4096, by default 1000).
    #[must_use]
    pub fn page_size(mut self, names: u32) -> Listing {
        self.request.limit = names.clamp(1, self.requests.engine().limits().page_entries_max);
        self
    }

    /// Skips placement groups that are not available because targets have failed. By default,
    /// [`Listing::next`] fails in this case.
    #[must_use]
    pub fn skip_unavailable(mut self) -> Listing {
        self.request.skip_unavailable = true;
        self
    }

    /// Returns the placement groups that were skipped so far.
    #[must_use]
    pub fn skipped(&self) -> Option<&SkippedGroups> {
        self.skipped.as_ref()
    }

    /// Continues an earlier listing of the same pool from its [`Listing::cursor`]. With an empty
    /// cursor, lists all names. [`Listing::next`] fails if the cursor is invalid. A listing that has
    /// begun starts again at the cursor.
    #[must_use]
    pub fn from_cursor(mut self, cursor: Bytes) -> Listing {
        self.cursor = cursor;
        self.restart();
        self
    }

    /// Returns the cursor with which a later listing continues this one. The cursor is empty before
    /// the first name.
    ///
    /// The cursor of an ordered listing is the last name that [`Listing::next`] has returned. The
    /// cursor of any other listing is the end of the current page: a listing from this cursor skips
    /// the names of the page that [`Listing::next`] has not returned yet. This cursor is empty after
    /// the last page.
    #[must_use]
    pub fn cursor(&self) -> &Bytes {
        &self.cursor
    }

    /// Returns the next name, or `None` at the end.
    ///
    /// # Errors
    /// If the node does not answer, if the pool does not exist, or if a placement group is not
    /// available. If the caller calls again after an error, the listing continues.
    pub async fn next(&mut self) -> Result<Option<ObjectName>> {
        if self.is_ordered {
            return self.next_in_order().await;
        }
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

    /// Forgets all names that were fetched, so that [`Listing::next`] continues at the cursor.
    fn restart(&mut self) {
        self.page.clear();
        self.merge = None;
        self.ended = false;
    }

    async fn next_in_order(&mut self) -> Result<Option<ObjectName>> {
        let Listing { requests, request, pool, cursor, merge, skipped, .. } = self;
        if merge.is_none() && !cursor.is_empty() {
            ObjectName::from_cursor(pool.clone(), cursor)?;
        }
        let merge = merge.get_or_insert_with(|| GroupMerge::new(cursor.clone(), request.limit));
        if merge.needs_pages() {
            merge.fetch(requests, request, |found| add_skipped(skipped, found)).await?;
        }
        let name = merge.pop();
        if let Some(name) = &name {
            *cursor = name.to_cursor();
        }
        Ok(name)
    }

    async fn fetch(&mut self) -> Result<()> {
        let request = List { cursor: self.cursor.clone(), ..self.request.clone() };
        let listed = self.requests.list(request).await?;
        for (namespace, object) in listed.names {
            self.page.push_back(ObjectName::new(self.pool.clone(), namespace, object)?);
        }
        if let Some(found) = listed.skipped {
            add_skipped(&mut self.skipped, *found);
        }
        self.ended = listed.cursor.is_empty();
        self.cursor = listed.cursor;
        Ok(())
    }
}

/// Adds groups that were skipped to those that were skipped before.
fn add_skipped(skipped: &mut Option<SkippedGroups>, found: SkippedGroups) {
    let before = skipped.take().map_or(0, |before| before.groups);
    *skipped = Some(SkippedGroups { groups: before.saturating_add(found.groups), reason: found.reason });
}
