//! Several targets as one store: an object's data on all of them, so that some may be lost.
//!
//! A placement group of a pool with redundancy has one [`Array`]: an [`ObjectStore`] of one collection over the stores of its
//! members, one shard of each object on each. Whoever uses it sees a store like any other, whose session changes
//! when a member fails or comes back. Behind it, `group` is what it remembers; `transact` makes of a transaction one for each
//! member (`overlay`: what becomes of an object; `split`, `parity`: of its shards; `layout`, `coder`: where its bytes are, and
//! their parity; `staging`: large data before its transaction); `read` reads, from other shards where one is lost; `open` settles,
//! when a session begins, what the last one has left (`members`: who counts then; `removal`: what nobody needs); `rebuild` brings members back, `scrub` compares them; `patience`: how long members are waited for. `record` is what
//! the members keep of all that.
//!
//! **What it rests on.** A transaction carries a number, and its intent, on every member. It is acknowledged once every member in
//! sync has committed it. One that some members have and some have not is taken back, with what those have kept of before. Who is
//! in sync is in a record with an epoch, on every member that is, before anything is acknowledged without the others. An object
//! is changed by one transaction at a time. The omap entries that several transactions may change at a time (of a
//! placement group's own object) are either written by one transaction alone or only ever grow. See `docs/adr/0012`.
//!
//! **Threads.** An [`Array`] may be called from anywhere; the group lives on the thread, in the `LocalSet`, that started it.

mod coder;
mod group;
mod layout;
mod members;
mod open;
mod overlay;
mod parity;
mod patience;
mod probe;
mod read;
mod rebuild;
mod record;
mod removal;
mod scrub;
mod split;
mod stage;
mod staging;
mod transact;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base::block::BLOCK;
use base::phases::{self, Clock};
use base::reclaim::Reclaim;
use store::{
    CollectionId, Query, QueryReply, Result, Space, StoreCalls, StoreError, StoreFuture, StoreReply,
    StoreRequest, Submit, check_session, ready,
};
use tokio::sync::{mpsc, oneshot};

pub(crate) use group::{Group, GroupOptions, Session};
pub use probe::NewObjects;
pub(crate) use rebuild::{RETRY, Rebuilt};
pub(crate) use record::SIZE_XATTR;
pub(crate) use scrub::Findings;

use group::{Link, Shared};

/// After the last transaction, intents are trimmed when nothing has happened for that long.
const TRIM_IDLE: Duration = Duration::from_secs(1);

/// A request, in the session of that number.
struct Call {
    number: u64,
    request: StoreRequest,
    /// Of the request of a client that it is made for.
    clock: Option<Clock>,
    reply: oneshot::Sender<Result<StoreReply>>,
}

/// See the [module](self) documentation.
pub(crate) struct Array {
    cid: CollectionId,
    alignment: u64,
    shared: Arc<Shared>,
    calls: mpsc::UnboundedSender<Call>,
}

impl Array {
    /// Starts a group on this thread, which must be in a `LocalSet`. It ends when the array is dropped.
    ///
    /// # Errors
    /// If its redundancy is not possible.
    pub(crate) fn start(options: GroupOptions) -> Result<(Arc<Array>, Rc<Group>)> {
        let group = Rc::new(Group::new(options)?);
        let (calls, mut waiting) = mpsc::unbounded_channel();
        let array = Array {
            cid: group.cid.clone(),
            alignment: if group.layout.is_mirror() { BLOCK } else { group.layout.stripe() },
            shared: Arc::clone(&group.shared),
            calls,
        };
        let served = Rc::clone(&group);
        crate::spawn(async move {
            while let Some(Call { number, request, clock, reply }) = waiting.recv().await {
                // Each goes on by itself; they take their places in the order in which they are first polled.
                let carried_out = carry_out(Rc::clone(&served), number, request, reply);
                match clock {
                    Some(clock) => crate::spawn(clock.scope(carried_out)),
                    None => crate::spawn(carried_out),
                };
            }
        });
        Ok((Arc::new(array), group))
    }

    fn send(&self, number: u64, request: StoreRequest) -> oneshot::Receiver<Result<StoreReply>> {
        let (reply, answer) = oneshot::channel();
        // If the group has ended the answer says so.
        let _ = self.calls.send(Call { number, request, clock: phases::current(), reply });
        answer
    }
}

fn ended() -> StoreError {
    StoreError::Disconnected("the group has ended".into())
}

async fn carry_out(
    group: Rc<Group>,
    number: u64,
    request: StoreRequest,
    to: oneshot::Sender<Result<StoreReply>>,
) {
    let repairs = matches!(request, StoreRequest::Transact { .. } | StoreRequest::Read { .. });
    let trims = matches!(request, StoreRequest::Transact { .. });
    let reply = reply_to(&group, number, request).await;
    // The caller may no longer wait.
    if let Err(Ok(StoreReply::Stage(stage))) = to.send(reply) {
        group.stage_release(stage);
    }
    if repairs {
        repair_damaged(&group);
    }
    if trims {
        trim_when_idle(&group);
    }
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
        StoreRequest::Query { query: Query::Stat { oid }, .. } => {
            QueryReply::Stat(group.stat(number, &oid).await?).into()
        }
        StoreRequest::Query { query: Query::List { from, limit }, .. } => {
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            let session = group.session(number).await?;
            QueryReply::Objects(group.list_in(&session, from, limit).await?).into()
        }
        StoreRequest::Query { query, .. } => ask_metadata(group, number, query).await?,
        StoreRequest::Collections => vec![group.cid.clone()].into(),
        // Space is the targets', not a group's.
        StoreRequest::Space => Space::default().into(),
        // The targets are unmounted by their owner.
        StoreRequest::Umount => StoreReply::Done,
    })
}

/// Questions about an object that any member with the object can answer.
async fn ask_metadata(group: &Group, number: u64, query: Query) -> Result<StoreReply> {
    let Some(oid) = query.oid() else {
        return Err(StoreError::InvalidArgument("the question is about no object".into()));
    };
    let ask = async |member: &Link| member.target.store.query(&group.cid, query.clone()).await;
    let mut reply = group.ask_in(number, oid, ask).await?;
    if let StoreReply::Query(QueryReply::Pairs(xattrs)) = &mut reply
        && matches!(query, Query::Xattrs { .. })
    {
        xattrs.retain(|(name, _)| *name != record::SIZE_XATTR);
    }
    Ok(reply)
}

/// Repairs what was found damaged, in the background.
fn repair_damaged(group: &Rc<Group>) {
    let damaged = std::mem::take(&mut *group.damaged.borrow_mut());
    for (oid, position) in damaged {
        let group = Rc::clone(group);
        crate::spawn(async move {
            if let Err(e) = group.repair(&oid, position).await {
                tracing::warn!(%oid, position, error = %e, "a damaged shard is left to the next scrub");
            }
        });
    }
}

/// Takes away, when nothing has happened for a while, what was kept in case a transaction had to be taken back.
fn trim_when_idle(group: &Rc<Group>) {
    if group.trim_scheduled.replace(true) {
        return;
    }
    let group = Rc::downgrade(group);
    crate::spawn(async move {
        let mut seen = None;
        loop {
            tokio::time::sleep(TRIM_IDLE).await;
            let Some(group) = group.upgrade() else { return };
            let next = group.log.borrow().next;
            if seen.replace(next) == Some(next) {
                group.trim_scheduled.set(false);
                if let Err(e) = group.trim().await {
                    tracing::debug!(error = %e, "intents are trimmed later");
                }
                return;
            }
        }
    });
}

impl Submit for Array {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        if let Some(cid) = request.collection().filter(|cid| **cid != self.cid) {
            return ready(Err(StoreError::NoSuchCollection(cid.to_string())));
        }
        let number = match &request {
            StoreRequest::Transact { transaction, session } => {
                if let Err(e) = transaction.validate().and_then(|()| check_session(*session, self.session()))
                {
                    return ready(Err(e));
                }
                session.unwrap_or_else(|| self.session())
            }
            _ => self.session(),
        };
        let is_stage = matches!(request, StoreRequest::Stage { .. });
        let sent = self.send(number, request);
        if !is_stage {
            return Box::pin(async move { sent.await.unwrap_or_else(|_| Err(ended())) });
        }
        let calls = self.calls.clone();
        let staging = Reclaim::new(sent, move |made: Result<StoreReply>| {
            if let Ok(StoreReply::Stage(stage)) = made {
                let (reply, _) = oneshot::channel();
                let request = StoreRequest::StageRelease { stage };
                let _ = calls.send(Call { number, request, clock: None, reply });
            }
        });
        Box::pin(async move { staging.await.unwrap_or_else(|_| Err(ended())) })
    }

    fn session(&self) -> u64 {
        self.shared.number()
    }

    fn stage_alignment(&self) -> u64 {
        self.alignment
    }
}
