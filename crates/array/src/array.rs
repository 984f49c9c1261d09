//! [`Array`]: the object store that keeps a placement group on several targets.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use base::block::BLOCK;
use base::phases;
use base::reclaim::Reclaim;
use futures::future::LocalBoxFuture;
use store::{
    MetadataQuery, QueryReply, Result, Space, StoreCalls, StoreError, StoreReply, StoreRequest, Submit,
    check_incarnation,
};
use tokio::sync::oneshot;

use crate::group::Group;
use crate::member_link::MemberLink;
use crate::record::SIZE_XATTR;
use crate::task::spawn;

/// If no new transaction starts for this long, the array removes the remaining undo objects.
const TRIM_IDLE: Duration = Duration::from_secs(1);
/// Pause between two transactions that remove undo objects of an idle group.
const TRIM_PAUSE: Duration = Duration::from_millis(100);

/// The future of an [`Array`]'s reply.
pub type ArrayFuture = LocalBoxFuture<'static, Result<StoreReply>>;

/// An object store that keeps one placement group redundantly on its members. A clone is another
/// handle to the same group.
#[derive(Clone)]
pub struct Array(Rc<Group>);

impl Array {
    /// Creates a handle to a group.
    #[must_use]
    pub fn new(group: Rc<Group>) -> Array {
        Array(group)
    }
}

/// Runs the rest of a request in its own task, and returns a future of the reply. The caller may
/// drop this future, or may stop polling it while a client receives data. In both cases, the task
/// releases the place of the request, so that other requests for the object do not wait.
fn detached(task: ArrayFuture) -> ArrayFuture {
    let task = match phases::current() {
        Some(clock) => spawn(clock.scope(task)),
        None => spawn(task),
    };
    Box::pin(async move { task.await.unwrap_or_else(|_| Err(ended())) })
}

fn ended() -> StoreError {
    StoreError::Disconnected("the task that executed the request ended without a reply".into())
}

/// Polls a request once, so that requests queue for their locks in the order in which they were
/// submitted. Returns the reply if it is ready, or else the pending request.
fn begin(mut task: ArrayFuture) -> std::result::Result<Result<StoreReply>, ArrayFuture> {
    match Pin::new(&mut task).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(reply) => Ok(reply),
        Poll::Pending => Err(task),
    }
}

fn ready(reply: Result<StoreReply>) -> ArrayFuture {
    Box::pin(std::future::ready(reply))
}

async fn carry_out(group: Rc<Group>, number: u64, request: StoreRequest) -> Result<StoreReply> {
    let repairs = matches!(
        request,
        StoreRequest::Transact { .. }
            | StoreRequest::Read { .. }
            | StoreRequest::Query { query: MetadataQuery::Stat { .. } | MetadataQuery::Extents { .. }, .. }
    );
    let trims = matches!(request, StoreRequest::Transact { .. });
    let reply = reply_to(&group, number, request).await;
    if repairs {
        repair_damaged(&group);
    }
    if trims {
        trim_if_large(&group);
        trim_when_idle(&group);
    }
    reply
}

async fn reply_to(group: &Rc<Group>, number: u64, request: StoreRequest) -> Result<StoreReply> {
    Ok(match request {
        StoreRequest::Transact { transaction, .. } => group.transact(number, transaction).await?.into(),
        StoreRequest::Stage { len } => group.stage(number, len).await?.into(),
        StoreRequest::StageWrite { stage, offset, payload } => {
            group.stage_write(stage, offset, payload).await?.into()
        }
        StoreRequest::StageRelease { stage } => {
            group.stage_release(stage);
            StoreReply::Done
        }
        StoreRequest::Read { oid, offset, len, dest, .. } => {
            group.read(number, &oid, offset, len, dest).await?.into()
        }
        StoreRequest::Query { query: MetadataQuery::Stat { oid }, .. } => {
            QueryReply::Stat(group.stat(number, &oid).await?).into()
        }
        StoreRequest::Query { query: MetadataQuery::Extents { oid, offset, len }, .. } => {
            QueryReply::Extents(group.extents(number, &oid, offset, len).await?).into()
        }
        StoreRequest::Query { query: MetadataQuery::List { from, limit }, .. } => {
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            let interval = group.interval(number).await?;
            QueryReply::Objects(group.list_in(&interval, from, limit).await?).into()
        }
        StoreRequest::Query { query, .. } => ask_metadata(group, number, query).await?,
        StoreRequest::Collections => vec![group.cid.clone()].into(),
        // Space is counted per target, so a group reports zero.
        StoreRequest::Space => Space::default().into(),
        // The owner of the targets unmounts them, so the array does nothing.
        StoreRequest::Umount => StoreReply::Done,
    })
}

/// Answers a metadata query about an object. All members have the same metadata, so any member that
/// has the object can answer.
async fn ask_metadata(group: &Group, number: u64, query: MetadataQuery) -> Result<StoreReply> {
    let Some(oid) = query.oid() else {
        return Err(StoreError::InvalidArgument("this metadata query names no object".into()));
    };
    let ask = async |member: &MemberLink| member.target.store().query(&group.cid, query.clone()).await;
    let mut reply = group.ask_in(number, oid, ask).await?;
    if let StoreReply::Query(QueryReply::Pairs(xattrs)) = &mut reply
        && matches!(query, MetadataQuery::Xattrs { .. })
    {
        xattrs.retain(|(name, _)| *name != SIZE_XATTR);
    }
    Ok(reply)
}

/// Starts a background task for each damaged fragment, which repairs the fragment.
fn repair_damaged(group: &Rc<Group>) {
    for (oid, position) in group.damaged.take() {
        let group = Rc::clone(group);
        spawn(async move {
            if let Err(e) = group.repair(&oid, position).await {
                tracing::warn!(%oid, position, error = %e, "cannot repair a damaged fragment; the next scrub tries to repair it again");
            }
        });
    }
}

/// Starts a task that removes the undo objects of finished transactions, if they take much space.
fn trim_if_large(group: &Rc<Group>) {
    if !group.intents.borrow().should_trim() {
        return;
    }
    let group = Rc::clone(group);
    spawn(async move {
        if let Err(e) = group.trim_some().await {
            tracing::debug!(error = %e, "cannot remove undo objects now; a later transaction removes them");
        }
    });
}

/// Removes the remaining undo objects after `TRIM_IDLE` without a new transaction, a few at a time.
fn trim_when_idle(group: &Rc<Group>) {
    if !group.idle_trim.claim() {
        return;
    }
    let group = Rc::downgrade(group);
    spawn(async move {
        let mut seen = None;
        let mut pause = TRIM_IDLE;
        loop {
            tokio::time::sleep(pause).await;
            let Some(group) = group.upgrade() else { return };
            let next = || group.intents.borrow().sequence().next();
            if seen.replace(next()) != Some(next()) {
                pause = TRIM_IDLE;
                continue;
            }
            let trimmed = group.trim_some().await;
            if let Err(e) = &trimmed {
                tracing::debug!(error = %e, "cannot remove undo objects now; a later transaction removes them");
            }
            if trimmed.is_err() || group.undo_objects() == 0 {
                return group.idle_trim.release();
            }
            (seen, pause) = (Some(next()), TRIM_PAUSE);
        }
    });
}

impl Submit for Array {
    type Reply = ArrayFuture;

    fn submit(&self, request: StoreRequest) -> ArrayFuture {
        let group = &self.0;
        if let Some(cid) = request.collection().filter(|cid| **cid != group.cid) {
            return ready(Err(StoreError::NoSuchCollection(cid.to_string())));
        }
        let mut number = group.number();
        if let StoreRequest::Transact { transaction, incarnation } = &request {
            if let Err(e) = transaction.validate().and_then(|()| check_incarnation(*incarnation, number)) {
                return ready(Err(e));
            }
            number = incarnation.unwrap_or(number);
        }
        let is_stage = matches!(request, StoreRequest::Stage { .. });
        match begin(Box::pin(carry_out(Rc::clone(group), number, request))) {
            Ok(reply) => ready(reply),
            Err(task) if is_stage => self.staging(task),
            Err(task) => detached(task),
        }
    }

    fn incarnation(&self) -> u64 {
        self.0.number()
    }

    fn stage_alignment(&self) -> u64 {
        if self.0.layout.is_mirror() { BLOCK } else { self.0.layout.stripe() }
    }
}

impl Array {
    /// Runs a task that creates a stage. Releases the stage if the caller drops the returned future
    /// before the stage is ready.
    fn staging(&self, task: ArrayFuture) -> ArrayFuture {
        let (reply, made) = oneshot::channel();
        let group = Rc::clone(&self.0);
        let release = move |made: Result<StoreReply>| {
            if let Ok(StoreReply::Stage(stage)) = made {
                group.stage_release(stage);
            }
        };
        let unwanted = release.clone();
        drop(detached(Box::pin(async move {
            if let Err(made) = reply.send(task.await) {
                unwanted(made);
            }
            Ok(StoreReply::Done)
        })));
        let staging = Reclaim::new(made, release);
        Box::pin(async move { staging.await.unwrap_or_else(|_| Err(ended())) })
    }
}
