//! [`GroupMerge`]: merges the listings of a pool's placement groups into one ordered listing.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use bytes::Bytes;
use futures::StreamExt;
use futures::stream;
use wire::limits::MAX_PG_COUNT;
use wire::{List, Listed, ObjectName, PoolName, SkippedGroups};

use crate::requests::Requests;
use crate::{Error, Result};

/// Maximum number of names that the first page of a group contains. Later pages grow, so that the
/// start of a listing is quick.
const FIRST_PAGE: u32 = 64;
/// Maximum number of names that the next pages of all groups contain together. A group contributes
/// at least one name.
const NAMES_AHEAD: u32 = 64 << 10;
/// Maximum number of groups that are listed at the same time.
const GROUPS_AT_ONCE: usize = 32;

/// Merges the listings of a pool's placement groups in the order of namespaces and names.
///
/// The merge keeps some names of each group in memory. When it needs more names of one group, it asks
/// all groups of which less than half a page is left, because the names of a listing are spread
/// evenly over the groups. In all, it keeps at most 1.5 × 65,536 names, or 1.5 names per group.
#[derive(Debug)]
pub(crate) struct GroupMerge {
    groups: Vec<GroupNames>,
    /// The first name of each group that has names, with the number of the group.
    first: BinaryHeap<Reverse<(ObjectName, usize)>>,
    /// Whether `first` may lack the next name of a group.
    needs_pages: bool,
    /// Cursor with which each group begins.
    start: Bytes,
    page_size: u32,
    page_size_max: u32,
    /// Whether pages were fetched before.
    began: bool,
}

/// The listing of one group.
#[derive(Debug, Clone)]
struct GroupNames {
    /// Names that follow the group's name in [`GroupMerge::first`].
    names: VecDeque<ObjectName>,
    /// Cursor of the group's next page.
    cursor: Bytes,
    ended: bool,
    is_in_first: bool,
}

impl GroupMerge {
    /// Creates a merge that begins after the name in `cursor`, and asks for at most `page_size_max`
    /// names at a time.
    pub(crate) fn new(cursor: Bytes, page_size_max: u32) -> GroupMerge {
        GroupMerge {
            // The first answer tells the number of groups.
            groups: vec![GroupNames::new(&cursor)],
            first: BinaryHeap::new(),
            needs_pages: true,
            start: cursor,
            page_size: page_size_max.min(FIRST_PAGE),
            page_size_max,
            began: false,
        }
    }

    /// Returns whether [`GroupMerge::pop`] needs more names first.
    pub(crate) fn needs_pages(&self) -> bool {
        self.needs_pages
    }

    /// Removes and returns the next name of the listing; `None` at its end.
    pub(crate) fn pop(&mut self) -> Option<ObjectName> {
        assert!(!self.needs_pages, "a group may have a smaller name");
        let Reverse((name, number)) = self.first.pop()?;
        let group = &mut self.groups[number];
        match group.names.pop_front() {
            Some(next) => self.first.push(Reverse((next, number))),
            None => {
                group.is_in_first = false;
                self.needs_pages = !group.ended;
            }
        }
        Some(name)
    }

    /// Fetches pages of the groups that need them, until [`GroupMerge::pop`] can return the next name.
    /// `list` is the request without its group, cursor and limit. Calls `on_skip` for each group that
    /// was skipped. If the caller drops the future, the merge only lacks pages that have not arrived.
    pub(crate) async fn fetch(
        &mut self,
        requests: &Requests,
        list: &List,
        mut on_skip: impl FnMut(SkippedGroups),
    ) -> Result<()> {
        let pool = PoolName::from_wire(&list.pool)?;
        if std::mem::replace(&mut self.began, true) {
            self.page_size = self.page_size.saturating_mul(4).min(self.page_size_max);
        }
        while self.needs_pages {
            let few = self.page_size as usize / 2;
            let is_wanted = |group: &GroupNames| !group.ended && group.names.len() <= few;
            let wanted = self.groups.iter().enumerate().filter(|(_, group)| is_wanted(group));
            let pages = wanted.map(|(number, group)| {
                let cursor = group.cursor.clone();
                let list = List { group: Some(number as u32), cursor, limit: self.page_size, ..list.clone() };
                async move { (number, requests.list(list).await) }
            });
            let mut pages = stream::iter(pages.collect::<Vec<_>>()).buffer_unordered(GROUPS_AT_ONCE);
            while let Some((number, page)) = pages.next().await {
                if let Some(skipped) = self.add(number, &pool, page?)? {
                    on_skip(skipped);
                }
            }
            self.needs_pages = self.groups.iter().any(|group| !group.ended && !group.is_in_first);
        }
        Ok(())
    }

    /// Adds a page of a group. Returns what the page says about the group if it was skipped.
    fn add(&mut self, number: usize, pool: &PoolName, page: Listed) -> Result<Option<SkippedGroups>> {
        if page.groups > MAX_PG_COUNT {
            let groups = page.groups;
            return Err(Error::Protocol(format!("the pool cannot have {groups} placement groups")));
        }
        let count = self.groups.len().max(page.groups as usize);
        self.groups.resize(count, GroupNames::new(&self.start));
        let share = NAMES_AHEAD / count as u32;
        self.page_size_max = self.page_size_max.min(share.max(1));
        self.page_size = self.page_size.min(self.page_size_max);
        let group = &mut self.groups[number];
        for (namespace, object) in page.names {
            group.names.push_back(ObjectName::new(pool.clone(), namespace, object)?);
        }
        group.ended = page.cursor.is_empty();
        group.cursor = page.cursor;
        if !group.is_in_first
            && let Some(name) = group.names.pop_front()
        {
            group.is_in_first = true;
            self.first.push(Reverse((name, number)));
        }
        Ok(page.skipped.map(|skipped| *skipped))
    }
}

impl GroupNames {
    fn new(cursor: &Bytes) -> GroupNames {
        GroupNames { names: VecDeque::new(), cursor: cursor.clone(), ended: false, is_in_first: false }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::time::timeout;

    use crate::engine::{Engine, FaultRates, FaultyEngine, MemEngine};
    use crate::{Client, Error, Options};

    /// Faults delay requests, so that fetches fail, or the caller drops them before their end.
    #[tokio::test(start_paused = true)]
    async fn a_merge_continues_after_failed_and_dropped_fetches() {
        let inner: Arc<dyn Engine> = Arc::new(MemEngine::new());
        let client = Client::over(Arc::clone(&inner), Options::default());
        client.create_pool_with("pool", 16, wire::Redundancy::Single).await.unwrap();
        let names: Vec<_> = (0..300).map(|n| format!("{n:03}")).collect();
        for name in &names {
            client.pool("pool").unwrap().object(name).unwrap().create().await.unwrap();
        }
        for (seed, page) in [1, 2, 7, 1000].into_iter().enumerate() {
            let rates =
                FaultRates { delay: 0.3, delay_max: Duration::from_secs(40), ..FaultRates::default() };
            let faulty = Arc::new(FaultyEngine::new(Arc::clone(&inner), rates, seed as u64));
            let options = Options { request_timeout: Duration::from_secs(20), ..Options::default() };
            let client = Client::over(faulty, options);
            let mut listing = client.pool("pool").unwrap().list("").ordered().page_size(page);
            let (mut listed, mut failed, mut dropped) = (Vec::new(), 0, 0);
            for patience_s in (10..60).cycle() {
                match timeout(Duration::from_secs(patience_s), listing.next()).await {
                    Err(_) => dropped += 1,
                    Ok(Err(Error::TimedOut(_))) => failed += 1,
                    Ok(Ok(Some(name))) => listed.push(name.object().to_owned()),
                    Ok(Ok(None)) => break,
                    Ok(Err(e)) => panic!("{e}"),
                }
            }
            assert_eq!(listed, names, "{page} names per page");
            assert!(
                page == 1000 || (failed > 0 && dropped > 0),
                "{page}: {failed} failed, {dropped} dropped"
            );
        }
    }
}
