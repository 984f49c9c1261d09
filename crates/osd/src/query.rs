//! Execution of queries.
//!
//! A query submits all of its calls to the store during its turn on the object, so that all answers
//! show the same state. It then ends its turn, and answers when this state is durable.

use bytes::Bytes;
use store::{ObjectExtents, ReplyOf, Stat, StoreCalls, StoreError};
use wire::limits::{MAX_PAGE, OMAP_PAGE_BYTES};
use wire::{Error, ObjectName, ObjectReply, Query, QueryAnswer, QueryOp, StatAnswer};

use crate::backing::BackingFuture;
use crate::conditions::check_conditions;
use crate::fail::{StepResult, refusal};
use crate::object::{ObjectInfo, ObjectState, user_xattr, user_xattr_name};
use crate::patience::patiently;
use crate::pool::{ActivePool, ObjectLocation};
use crate::request::RequestContext;
use crate::shard::Shard;

type Pairs = Vec<(Bytes, Bytes)>;

const _: () = assert!(store::MAX_EXTENTS <= MAX_PAGE as usize, "an answer has at most one page of extents");

/// A call to the store that answers one op of a query.
enum AnswerCall {
    /// The answer needs no call.
    Known(QueryAnswer),
    Xattr(ReplyOf<BackingFuture, Bytes>),
    Xattrs(ReplyOf<BackingFuture, Pairs>),
    OmapGet(ReplyOf<BackingFuture, Pairs>),
    /// A range of the omap up to this key, exclusive.
    OmapRange(ReplyOf<BackingFuture, (Pairs, bool)>, Option<Bytes>),
    Allocated(ReplyOf<BackingFuture, Stat>),
    Extents(ReplyOf<BackingFuture, ObjectExtents>),
}

/// Answers queries about one object.
pub(crate) async fn query(
    shard: &Shard,
    request: &RequestContext,
    pool: &ActivePool,
    query: &Query,
) -> wire::Result<ObjectReply> {
    query.check()?;
    let name: ObjectName = query.name.check()?;
    let place = pool.place(name.namespace(), name.object(), None)?;
    let name = name.to_string();
    let object = place.pg.object(&place.oid);
    let attempt = async || try_query(&place, &object, &name, query).await;
    let answers = patiently(&place, request.patience(&shard.config), attempt).await;
    answers.map(ObjectReply::Queried).map_err(refusal)
}

async fn try_query(
    place: &ObjectLocation,
    object: &ObjectState,
    name: &str,
    query: &Query,
) -> StepResult<Vec<QueryAnswer>> {
    let pg = &place.pg;
    let ticket = object.turnstile.ticket();
    let (turn, incarnation) = pg.enter(&ticket, async || pg.settle().await).await?;
    let info = pg.info(&place.oid, &turn, incarnation).await?;
    let seen = turn.observe();
    let checked = check_conditions(place, name, &query.conditions, info.as_ref()).await;
    let submitted = match (checked, &info) {
        (Ok(()), Some(info)) => query.ops.iter().map(|op| submit(place, name, info, op)).collect(),
        (Ok(()), None) => Err(Error::NoSuchObject(name.to_owned()).into()),
        (Err(fail), _) => Err(fail),
    };
    drop(turn);
    let answers = match submitted {
        Ok(calls) => finish_all(calls).await,
        Err(fail) => Err(fail),
    };
    // The answers are valid only in the same incarnation, even if one is an error.
    pg.backing.still(incarnation)?;
    seen.durable().await?;
    answers
}

async fn finish_all(calls: Vec<AnswerCall>) -> StepResult<Vec<QueryAnswer>> {
    let mut answers = Vec::with_capacity(calls.len());
    for call in calls {
        answers.push(call.finish().await?);
    }
    Ok(answers)
}

/// Submits the call that answers an op.
fn submit(place: &ObjectLocation, name: &str, info: &ObjectInfo, op: &QueryOp) -> StepResult<AnswerCall> {
    let (pg, oid) = (&place.pg, &place.oid);
    let store = &pg.backing;
    Ok(match op {
        QueryOp::Stat => AnswerCall::Known(QueryAnswer::Stat(StatAnswer {
            size: info.user_size(),
            version: info.version,
            modified_ms: info.modified_ms,
            manifest: info.manifest,
        })),
        QueryOp::Xattr(name) => AnswerCall::Xattr(store.get_xattr(&pg.cid, oid, user_xattr(name))),
        QueryOp::Xattrs => AnswerCall::Xattrs(store.get_xattrs(&pg.cid, oid)),
        QueryOp::OmapGet(keys) => AnswerCall::OmapGet(store.omap_get(&pg.cid, oid, keys.clone())),
        QueryOp::OmapRange { from, to, limit } => {
            let call = store.omap_iterate(&pg.cid, oid, from.clone(), *limit as usize);
            AnswerCall::OmapRange(call, to.clone())
        }
        op if op.needs_extents() && info.manifest.is_some() => {
            return Err(Error::Striped { name: name.to_owned(), what: "querying extents".into() }.into());
        }
        QueryOp::Allocated => AnswerCall::Allocated(store.stat(&pg.cid, oid)),
        QueryOp::Extents { offset, len } => AnswerCall::Extents(store.extents(&pg.cid, oid, *offset, *len)),
        other => return Err(Error::BadRequest(format!("{other:?} is not supported")).into()),
    })
}

impl AnswerCall {
    async fn finish(self) -> StepResult<QueryAnswer> {
        Ok(match self {
            AnswerCall::Known(answer) => answer,
            AnswerCall::Xattr(call) => match call.await {
                Ok(value) => QueryAnswer::Xattr(Some(value)),
                Err(StoreError::NoSuchXattr(_)) => QueryAnswer::Xattr(None),
                Err(e) => return Err(e.into()),
            },
            AnswerCall::Xattrs(call) => {
                let all = call.await?.into_iter();
                let users = all.filter_map(|(name, value)| Some((user_xattr_name(&name)?, value)));
                QueryAnswer::Xattrs(users.collect())
            }
            AnswerCall::OmapGet(call) => QueryAnswer::Omap { entries: call.await?, more: false },
            AnswerCall::OmapRange(call, to) => {
                let (entries, more) = call.await?;
                cut_page(entries, more, to.as_ref())
            }
            AnswerCall::Allocated(call) => QueryAnswer::Allocated(call.await?.allocated),
            AnswerCall::Extents(call) => {
                let ObjectExtents { ranges, end, .. } = call.await?;
                let ranges = ranges.into_iter().map(|range| (range.start, range.end - range.start));
                QueryAnswer::Extents { ranges: ranges.collect(), end }
            }
        })
    }
}

/// Cuts a page of an omap at the end of the requested range and at the maximum size of a reply.
fn cut_page(mut entries: Vec<(Bytes, Bytes)>, mut more: bool, to: Option<&Bytes>) -> QueryAnswer {
    if let Some(end) = to.and_then(|to| entries.iter().position(|(key, _)| key >= to)) {
        entries.truncate(end);
        more = false;
    }
    let mut bytes = 0;
    let fits = entries.iter().take_while(|(key, value)| {
        bytes += key.len() + value.len() + 10;
        bytes <= OMAP_PAGE_BYTES
    });
    let fits = fits.count().max(1).min(entries.len());
    more |= fits < entries.len();
    entries.truncate(fits);
    QueryAnswer::Omap { entries, more }
}
