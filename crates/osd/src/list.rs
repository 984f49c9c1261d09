//! Listing of a pool's objects: one placement group after the other, in the order of the store's
//! ids, or one group alone.
//!
//! With ids by name, a listing costs what it returns: it seeks to the first object that matches, and
//! ends behind the last one ([`ListFilter`]). With hashed ids, it examines every object of the pool.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures::future::join_all;
use store::{ObjectId, StoreCalls, StoreError};
use wire::limits::MAX_PAGE;
use wire::{Error, List, Listed, ObjectName, ObjectReply, PoolName, SkippedGroups, placement};

use crate::fail::{Fail, StepResult, refusal};
use crate::ids::{self, IdLayout};
use crate::list_filter::{IdVerdict, ListFilter};
use crate::patience::patiently;
use crate::pool::{ActivePool, ObjectLocation};
use crate::request::RequestContext;
use crate::shard::Shard;

/// Total size of the names at which a page ends, in bytes. The last name may exceed it.
const PAGE_BYTES: usize = 64 * 1024;
/// Maximum work of one request: the number of ids that it examines, and [`CALL_WORK`] for each call
/// to the store.
const WORK_MAX: usize = 8192;
/// Work of one call to the store, in examined ids.
const CALL_WORK: usize = 16;
/// Maximum number of ids that one call to the store returns.
const STEP_MAX: usize = 1024;
/// Number of ids that the first call after a far seek returns. Possibly none of them match.
const STEP_AFTER_SEEK: usize = 32;
/// Maximum number of groups with ids by name that one request lists at the same time.
const GROUPS_AT_ONCE: u32 = 16;

/// Returns one page of a listing.
pub(crate) async fn list(
    shard: &Rc<Shard>,
    request: &RequestContext,
    pool: &ActivePool,
    list: &List,
) -> wire::Result<ObjectReply> {
    let (name, namespace) = (PoolName::from_wire(&list.pool)?, list.checked_namespace()?);
    let filter = ListFilter::new(pool.record.ids, namespace, &list.prefix);
    let Start { group: mut next, mut from, end } = Start::new(pool, list)?;
    if list.group.is_some() {
        pool.index(next)?;
    }
    let mut page = ListPage::new(list, pool.record.pg_count);
    if filter.matches_nothing() {
        return Ok(page.end(Bytes::new()));
    }
    let scanning = Arc::new(ScanOrder {
        list: list.clone(),
        pool_id: pool.record.id,
        patience: request.patience(&shard.config),
    });
    // Most groups have many matching objects or few. The number of groups at a time grows only if the
    // groups before had few, because objects behind the end of the page are listed in vain.
    let mut width = 1;
    let width_max = groups_at_once(pool.record.ids);
    while next < end {
        let groups = next..end.min(next + width);
        let budget = page.budget.share(groups.len());
        let scans = groups.clone().map(|number| {
            let (from, order) = (from.take_if(|_| number == next), Arc::clone(&scanning));
            let owner = shard.share.owner(number);
            shard.on(owner, move |shard| async move { order.scan(&shard, number, from, budget).await })
        });
        let scans = join_all(scans.collect::<Vec<_>>()).await;
        for (number, scan) in groups.clone().zip(scans) {
            let scan = match scan? {
                Ok(scan) => scan,
                Err(Fail::Refused(Error::TargetFailed(why))) if list.skip_unavailable => {
                    page.skip(why);
                    continue;
                }
                Err(fail) => return Err(refusal(fail)),
            };
            let stop = scan.stop.clone();
            page.add(scan);
            match stop {
                Some(stop) if list.group.is_some() => return Ok(page.end(group_cursor(&name, &stop)?)),
                Some(stop) => return Ok(page.end(cursor(number, &stop.next))),
                None if page.budget.is_spent() && number + 1 < end => {
                    return Ok(page.end(cursor(number + 1, &ids::meta_object())));
                }
                None => {}
            }
        }
        next = groups.end;
        width = (width * 2).min(width_max);
    }
    Ok(page.end(Bytes::new()))
}

/// Returns the maximum number of groups that one request lists at the same time.
fn groups_at_once(layout: IdLayout) -> u32 {
    match layout {
        IdLayout::ByName => GROUPS_AT_ONCE,
        // A call to the store returns ids of all objects. With several groups at a time, most of these
        // ids would be behind the end of the page.
        IdLayout::Hashed => 1,
    }
}

/// Where a page begins: the first group, the first id in it, and the group before which the listing
/// ends.
struct Start {
    group: u32,
    from: Option<ObjectId>,
    end: u32,
}

impl Start {
    fn new(pool: &ActivePool, list: &List) -> wire::Result<Start> {
        let groups = pool.record.pg_count;
        match list.group {
            Some(_) if pool.record.ids == IdLayout::Hashed => {
                Err(Error::NotOrdered(pool.record.name.clone()))
            }
            Some(group) => {
                placement::check_group(group, groups)?;
                Ok(Start { group, from: Start::after(pool.record.ids, list)?, end: group + 1 })
            }
            None => {
                let (group, from) = parse_cursor(&list.cursor, groups)?;
                Ok(Start { group, from, end: groups })
            }
        }
    }

    /// Returns the id with which the listing of one group continues; `None` at its start.
    fn after(layout: IdLayout, list: &List) -> wire::Result<Option<ObjectId>> {
        let Some(name) = list.after()? else { return Ok(None) };
        let hash = placement::hash(name.namespace(), name.object(), None);
        let last = layout.id(hash, name.namespace(), name.object(), None);
        after(&last).map(Some).map_err(refusal)
    }
}

/// What a request may still list and examine.
#[derive(Debug, Clone, Copy)]
struct ListBudget {
    names: usize,
    /// Size of the names, in bytes.
    bytes: usize,
    /// See [`WORK_MAX`].
    work: usize,
}

impl ListBudget {
    fn is_spent(&self) -> bool {
        self.names == 0 || self.bytes == 0 || self.work == 0
    }

    /// Returns the budget of each of several groups that are listed at the same time.
    fn share(self, groups: usize) -> ListBudget {
        let share = |amount: usize| (amount / groups).max(1);
        ListBudget { names: share(self.names), bytes: share(self.bytes), work: share(self.work) }
    }

    fn spend_name(&mut self, bytes: usize) {
        self.names -= 1;
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    fn spend_work(&mut self, work: usize) {
        self.work = self.work.saturating_sub(work);
    }
}

struct ListPage {
    names: Vec<(String, String)>,
    budget: ListBudget,
    groups: u32,
    skipped: Option<SkippedGroups>,
}

impl ListPage {
    fn new(list: &List, groups: u32) -> ListPage {
        let names = list.limit.clamp(1, MAX_PAGE) as usize;
        let budget = ListBudget { names, bytes: PAGE_BYTES, work: WORK_MAX };
        ListPage { names: Vec::new(), budget, groups, skipped: None }
    }

    fn end(self, cursor: Bytes) -> ObjectReply {
        let skipped = self.skipped.map(Box::new);
        ObjectReply::Listed(Listed { names: self.names, cursor, groups: self.groups, skipped })
    }

    /// Records that the page lacks the objects of a group.
    fn skip(&mut self, reason: String) {
        let before = self.skipped.as_ref().map_or(0, |skipped| skipped.groups);
        self.skipped = Some(SkippedGroups { groups: before + 1, reason });
    }

    /// Adds the names of a group, of which there are no more than the budget has left.
    fn add(&mut self, scan: GroupScan) {
        for (namespace, object) in scan.names {
            self.budget.spend_name(namespace.len() + object.len());
            self.names.push((namespace, object));
        }
        self.budget.spend_work(scan.work);
    }
}

/// Matching objects of one group.
#[derive(Debug, Default)]
struct GroupScan {
    names: Vec<(String, String)>,
    /// Work of the scan; see [`WORK_MAX`].
    work: usize,
    /// Where the scan has stopped; `None` if it has reached the end of the matching objects.
    stop: Option<ScanStop>,
}

/// Where a scan has stopped because its budget was spent.
#[derive(Debug, Clone)]
struct ScanStop {
    /// The last id that the scan has examined.
    last: Option<ObjectId>,
    /// The id with which the scan continues.
    next: ObjectId,
}

/// A listing that the shards of the groups carry out.
struct ScanOrder {
    list: List,
    pool_id: u32,
    patience: Duration,
}

impl ScanOrder {
    /// Lists matching objects of one group of this shard, from `from` on, until the budget is spent.
    async fn scan(
        &self,
        shard: &Shard,
        number: u32,
        from: Option<ObjectId>,
        budget: ListBudget,
    ) -> StepResult<GroupScan> {
        // The pool may have been removed meanwhile.
        let pool = shard.open_pool(self.pool_id)?;
        let index = pool.index(number)?;
        let failure = pool.sole_targets.get(index).and_then(|sole| sole.failure());
        // If the target has failed, do not wait for it.
        if let Some(why) = failure.filter(|_| self.list.skip_unavailable) {
            return Err(Error::TargetFailed(why).into());
        }
        let filter = ListFilter::new(pool.record.ids, self.list.checked_namespace()?, &self.list.prefix);
        let place = ObjectLocation { pg: pool.pgs[index].clone(), oid: ids::meta_object() };
        let fetch = async |from: Option<ObjectId>, limit: usize| {
            patiently(&place, self.patience, async || objects(&place, from.clone(), limit).await).await
        };
        scan(filter, from, budget, fetch).await
    }
}

/// Lists matching objects, from `from` on, until the budget is spent. `fetch` returns up to the given
/// number of ids in order, beginning at the given id, and whether more ids follow.
async fn scan(
    filter: ListFilter<'_>,
    from: Option<ObjectId>,
    mut budget: ListBudget,
    fetch: impl AsyncFn(Option<ObjectId>, usize) -> StepResult<(Vec<ObjectId>, bool)>,
) -> StepResult<GroupScan> {
    let (mut scan, mut last) = (GroupScan::default(), None);
    let first = filter.first();
    // A page before has ended between matching ids, so more of them probably follow.
    let continues = from > first;
    let mut from = from.max(first);
    let mut step = if filter.reads_everything() || continues { STEP_MAX } else { STEP_AFTER_SEEK };
    loop {
        let limit = filter.fetch_limit(step, budget.names);
        let (ids, more) = fetch(from, limit).await?;
        budget.spend_work(CALL_WORK);
        scan.work += CALL_WORK;
        let (mut seek, mut examined): (Option<ObjectId>, usize) = (None, 0);
        for (at, id) in (1..).zip(&ids) {
            if seek.as_ref().is_some_and(|to| id < to) {
                continue;
            }
            budget.spend_work(1);
            scan.work += 1;
            examined += 1;
            seek = None;
            match filter.examine(id) {
                IdVerdict::Listed(name) => {
                    budget.spend_name(name.namespace.len() + name.object.len());
                    scan.names.push((name.namespace.to_owned(), name.object.to_owned()));
                }
                IdVerdict::Skipped => {}
                IdVerdict::Seek(to) => seek = Some(to),
                IdVerdict::End => return Ok(scan),
            }
            last = Some(id.clone());
            if budget.is_spent() {
                if more || at < ids.len() {
                    let next = seek.map_or_else(|| after(id), Ok)?;
                    scan.stop = Some(ScanStop { last, next });
                }
                return Ok(scan);
            }
        }
        // The seeks are far if a short call for each examined id would have cost no more than this
        // call. The seeks from one small namespace to the next are not far: they stay in the call.
        let cost = |calls: usize, ids: usize| calls * CALL_WORK + ids;
        let seeks_far = seek.is_some() && cost(examined, examined * STEP_AFTER_SEEK) <= cost(1, ids.len());
        step = if seeks_far { STEP_AFTER_SEEK } else { (step * 4).min(STEP_MAX) };
        let next = match (seek, ids.last()) {
            (Some(to), _) if more => to,
            (None, Some(last)) if more => after(last)?,
            _ => return Ok(scan),
        };
        if budget.is_spent() {
            scan.stop = Some(ScanStop { last, next });
            return Ok(scan);
        }
        from = Some(next);
    }
}

/// Returns up to `limit` ids of a group's durable objects, in order and beginning at `from`. The
/// flag says whether more ids follow. Returns no ids if the group was never used.
pub(crate) async fn objects(
    place: &ObjectLocation,
    from: Option<ObjectId>,
    limit: usize,
) -> StepResult<(Vec<ObjectId>, bool)> {
    let incarnation = place.pg.settle().await?;
    let listed = place.pg.backing.list(&place.pg.cid, from, limit).await;
    // The listing includes the changes that were queued before it ended. Each of them must be
    // durable before the osd returns the listing. If a change fails that the listing may include,
    // the incarnation ends.
    place.pg.all_committed().await;
    place.pg.backing.still(incarnation)?;
    match listed {
        Ok(page) => Ok(page),
        Err(StoreError::NoSuchCollection(_)) => Ok((Vec::new(), false)),
        Err(e) => Err(e.into()),
    }
}

/// Returns the smallest id that is greater than `id`.
pub(crate) fn after(id: &ObjectId) -> StepResult<ObjectId> {
    Ok(ObjectId::new([id.as_bytes(), &b"\0"[..]].concat())?)
}

fn cursor(group: u32, from: &ObjectId) -> Bytes {
    let mut cursor = BytesMut::with_capacity(4 + from.as_bytes().len());
    cursor.put_u32(group);
    cursor.put_slice(from.as_bytes());
    cursor.freeze()
}

fn parse_cursor(cursor: &Bytes, groups: u32) -> wire::Result<(u32, Option<ObjectId>)> {
    if cursor.is_empty() {
        return Ok((0, None));
    }
    let bad = || Error::BadRequest("the cursor does not come from a listing of this pool".into());
    let (group, from) = cursor.split_at_checked(4).ok_or_else(bad)?;
    let group = u32::from_be_bytes(group.try_into().map_err(|_| bad())?);
    if group >= groups {
        return Err(bad());
    }
    let from = ObjectId::new(Bytes::copy_from_slice(from)).map_err(|_| bad())?;
    Ok((group, Some(from)))
}

/// Returns the cursor of the listing of one group: the name of the last object that was examined.
fn group_cursor(pool: &PoolName, stop: &ScanStop) -> wire::Result<Bytes> {
    let name = stop.last.as_ref().and_then(ids::parse);
    let name = name.and_then(|name| ObjectName::new(pool.clone(), name.namespace, name.object).ok());
    let broken = || Error::Corrupt(format!("an object id of pool {pool}"));
    Ok(name.ok_or_else(broken)?.to_cursor())
}

#[cfg(test)]
mod tests;
