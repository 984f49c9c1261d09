//! Listing of a pool's objects: one placement group after the other, in the order of the store's
//! ids.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use store::{ObjectId, StoreCalls, StoreError};
use wire::limits::MAX_PAGE;
use wire::{Error, List, Listed, ObjectReply, PoolName, SkippedGroups};

use crate::fail::{Fail, StepResult, unavailable};
use crate::ids;
use crate::osd::Osd;
use crate::patience::patiently;
use crate::pool::{ActivePool, ObjectLocation};
use crate::request::RequestContext;

/// Total size of the names at which a page ends, in bytes. The last name may exceed it.
const PAGE_BYTES: usize = 64 * 1024;
/// Maximum number of objects that one request scans, whether their names match or not.
const SCAN_MAX: usize = 8192;
/// Maximum number of ids that one call to the store returns.
const STEP: usize = 1024;

/// Returns one page of a listing.
pub(crate) async fn list(osd: &Osd, request: &RequestContext, list: &List) -> wire::Result<ObjectReply> {
    let pool = osd.open_pool(PoolName::from_wire(&list.pool)?.as_str())?;
    let patience = request.patience(&osd.config);
    let (mut pg, mut from) = parse_cursor(&list.cursor)?;
    let mut page = ListPage { list, names: Vec::new(), bytes: 0, scanned: 0, skipped: None };
    while (pg as usize) < pool.pgs.len() {
        let failure = pool.sole_targets.get(pg as usize).and_then(|sole| sole.failure());
        // If the target has failed, do not wait for it.
        let scanned = match failure.filter(|_| list.skip_unavailable) {
            Some(why) => {
                from = None;
                page.skip(why);
                Ok(None)
            }
            None => scan_group(patience, &pool, pg, from.take(), &mut page).await,
        };
        match scanned {
            Ok(None) => pg += 1,
            Ok(Some(next)) => return Ok(page.end(cursor(pg, &next))),
            Err(Fail::Refused(Error::TargetFailed(why))) if list.skip_unavailable => {
                page.skip(why);
                pg += 1;
            }
            Err(Fail::Refused(e)) => return Err(e),
            Err(Fail::Lost(why)) => return Err(unavailable(why)),
        }
    }
    Ok(page.end(Bytes::new()))
}

struct ListPage<'a> {
    list: &'a List,
    names: Vec<(String, String)>,
    bytes: usize,
    scanned: usize,
    skipped: Option<SkippedGroups>,
}

impl ListPage<'_> {
    fn end(self, cursor: Bytes) -> ObjectReply {
        ObjectReply::Listed(Listed { names: self.names, cursor, skipped: self.skipped.map(Box::new) })
    }

    /// Records that the page lacks the objects of a group.
    fn skip(&mut self, reason: String) {
        let before = self.skipped.as_ref().map_or(0, |skipped| skipped.groups);
        self.skipped = Some(SkippedGroups { groups: before + 1, reason });
    }

    fn is_full(&self) -> bool {
        let limit = self.list.limit.clamp(1, MAX_PAGE) as usize;
        self.names.len() >= limit || self.bytes >= PAGE_BYTES || self.scanned >= SCAN_MAX
    }

    /// Adds an object to the page if it matches the request.
    fn take(&mut self, oid: &ObjectId) {
        self.scanned += 1;
        let Some(name) = ids::parse(oid) else { return };
        let namespace = self.list.namespace.as_ref().is_none_or(|ns| *ns == name.namespace.as_bytes());
        if name.part.is_none() && namespace && name.object.as_bytes().starts_with(&self.list.prefix) {
            self.bytes += name.object.len() + name.namespace.len();
            self.names.push((name.namespace.to_owned(), name.object.to_owned()));
        }
    }
}

/// Scans a group until the page is full. Returns the id from which the next page continues, or
/// `None` at the group's end.
async fn scan_group(
    patience: Duration,
    pool: &ActivePool,
    pg: u32,
    from: Option<ObjectId>,
    page: &mut ListPage<'_>,
) -> StepResult<Option<ObjectId>> {
    let place = ObjectLocation { pg: pool.pgs[pg as usize].clone(), oid: ids::meta_object() };
    let mut from = from;
    loop {
        if page.is_full() {
            return Ok(Some(from.unwrap_or_else(lowest)));
        }
        let (ids, more) = {
            let attempt = async || objects(&place, from.clone(), STEP).await;
            patiently(&place, patience, attempt).await?
        };
        let mut ids = ids.into_iter();
        for id in ids.by_ref() {
            page.take(&id);
            from = Some(after(&id)?);
            if page.is_full() {
                break;
            }
        }
        if !more && ids.len() == 0 {
            return Ok(None);
        }
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

fn lowest() -> ObjectId {
    ids::meta_object()
}

fn cursor(pg: u32, from: &ObjectId) -> Bytes {
    let mut cursor = BytesMut::with_capacity(4 + from.as_bytes().len());
    cursor.put_u32(pg);
    cursor.put_slice(from.as_bytes());
    cursor.freeze()
}

fn parse_cursor(cursor: &Bytes) -> wire::Result<(u32, Option<ObjectId>)> {
    if cursor.is_empty() {
        return Ok((0, None));
    }
    let bad = || Error::BadRequest("the cursor does not come from this node".into());
    let (pg, from) = cursor.split_at_checked(4).ok_or_else(bad)?;
    let pg = u32::from_be_bytes(pg.try_into().map_err(|_| bad())?);
    let from = ObjectId::new(Bytes::copy_from_slice(from)).map_err(|_| bad())?;
    Ok((pg, Some(from)))
}
