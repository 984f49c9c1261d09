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

use base::BoxFuture;
use base::block::{BLOCK, Payload};
use base::mem::ArenaBuf;
use base::phases::{self, Clock};
use base::reclaim::Reclaim;
use bytes::Bytes;
use store::{
    CollectionId, ObjectId, ObjectStore, Page, ReadData, Result, StageId, Stat, StatFs, StoreError,
    Transaction,
};
use tokio::sync::{mpsc, oneshot};

pub(crate) use group::{Group, GroupOptions, Session};
pub use probe::NewObjects;
pub(crate) use rebuild::{RETRY, Rebuilt};
pub(crate) use record::SIZE_XATTR;
pub(crate) use scrub::Findings;

use group::Shared;

/// After the last transaction, intents are trimmed when nothing has happened for that long.
const TRIM_IDLE: Duration = Duration::from_secs(1);

type Answer<T> = oneshot::Sender<Result<T>>;

/// What a group is asked to do, in the session of that number.
enum Call {
    Transact(u64, Transaction, Answer<()>),
    Stage(u64, u64, Answer<StageId>),
    StageWrite(StageId, u64, Payload, Answer<()>),
    StageRelease(StageId),
    Read(u64, ObjectId, (u64, u64), Option<ArenaBuf>, Answer<ReadData>),
    Stat(u64, ObjectId, Answer<Stat>),
    Xattr(u64, ObjectId, Bytes, Answer<Bytes>),
    Xattrs(u64, ObjectId, Answer<Vec<(Bytes, Bytes)>>),
    OmapHeader(u64, ObjectId, Answer<Bytes>),
    OmapGet(u64, ObjectId, Vec<Bytes>, Answer<Vec<(Bytes, Bytes)>>),
    OmapIterate(u64, ObjectId, Bytes, usize, Answer<Page<(Bytes, Bytes)>>),
    List(u64, Option<ObjectId>, usize, Answer<Page<ObjectId>>),
}

/// See the [module](self) documentation.
pub(crate) struct Array {
    cid: CollectionId,
    alignment: u64,
    shared: Arc<Shared>,
    calls: mpsc::UnboundedSender<(Call, Option<Clock>)>,
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
            while let Some((call, clock)) = waiting.recv().await {
                // Each goes on by itself; they take their places in the order in which they are first polled.
                let carried_out = carry_out(Rc::clone(&served), call);
                match clock {
                    Some(clock) => crate::spawn(clock.scope(carried_out)),
                    None => crate::spawn(carried_out),
                };
            }
        });
        Ok((Arc::new(array), group))
    }

    fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce(u64, Answer<T>) -> Call,
    ) -> BoxFuture<'static, Result<T>> {
        let answer = self.send(call);
        Box::pin(async move { answer.await.unwrap_or_else(|_| Err(ended())) })
    }

    fn send<T: Send + 'static>(
        &self,
        call: impl FnOnce(u64, Answer<T>) -> Call,
    ) -> oneshot::Receiver<Result<T>> {
        let (answer_to, answer) = oneshot::channel();
        // If the group has ended the answer says so.
        let _ = self.calls.send((call(self.shared.number(), answer_to), phases::current()));
        answer
    }

    /// As [`Array::ask`], about something in a collection.
    fn ask_in<T: Send + 'static>(
        &self,
        cid: &CollectionId,
        call: impl FnOnce(u64, Answer<T>) -> Call,
    ) -> BoxFuture<'static, Result<T>> {
        if *cid == self.cid {
            return self.ask(call);
        }
        Box::pin(std::future::ready(Err(StoreError::NoSuchCollection(cid.to_string()))))
    }
}

fn ended() -> StoreError {
    StoreError::Disconnected("the group has ended".into())
}

async fn carry_out(group: Rc<Group>, call: Call) {
    // The caller may have been cancelled; ignore the error.
    match call {
        Call::Transact(number, transaction, to) => {
            drop(to.send(group.transact(number, transaction).await));
            repair_damaged(&group);
            trim_when_idle(&group);
        }
        Call::Stage(number, len, to) => {
            if let Err(Ok(stage)) = to.send(group.stage(number, len).await) {
                group.stage_release(stage);
            }
        }
        Call::StageWrite(stage, offset, payload, to) => {
            drop(to.send(group.stage_write(stage, offset, payload).await));
        }
        Call::StageRelease(stage) => group.stage_release(stage),
        Call::Read(number, oid, (offset, len), dest, to) => {
            drop(to.send(group.read(number, &oid, offset, len, dest).await));
            repair_damaged(&group);
        }
        Call::Stat(number, oid, to) => drop(to.send(group.stat(number, &oid).await)),
        Call::List(number, from, limit, to) => {
            let list = async { group.list_in(&*group.session(number).await?, from, limit).await };
            drop(to.send(list.await));
        }
        about_metadata => ask_metadata(&group, about_metadata).await,
    }
}

/// Questions that a member answers as it stands.
async fn ask_metadata(group: &Group, call: Call) {
    let cid = &group.cid;
    match call {
        Call::Xattr(number, oid, name, to) => {
            let ask = group.ask_in(number, &oid, async |member| {
                member.target.store.get_xattr(cid, &oid, name.clone()).await
            });
            drop(to.send(ask.await));
        }
        Call::Xattrs(number, oid, to) => {
            let ask = group.ask_in(number, &oid, async |member| {
                let mut xattrs = member.target.store.get_xattrs(cid, &oid).await?;
                xattrs.retain(|(name, _)| *name != record::SIZE_XATTR);
                Ok(xattrs)
            });
            drop(to.send(ask.await));
        }
        Call::OmapHeader(number, oid, to) => {
            let ask = group
                .ask_in(number, &oid, async |member| member.target.store.omap_get_header(cid, &oid).await);
            drop(to.send(ask.await));
        }
        Call::OmapGet(number, oid, keys, to) => {
            let ask = group.ask_in(number, &oid, async |member| {
                member.target.store.omap_get(cid, &oid, keys.clone()).await
            });
            drop(to.send(ask.await));
        }
        Call::OmapIterate(number, oid, from, limit, to) => {
            let ask = group.ask_in(number, &oid, async |member| {
                member.target.store.omap_iterate(cid, &oid, from.clone(), limit).await
            });
            drop(to.send(ask.await));
        }
        _ => {}
    }
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

impl ObjectStore for Array {
    fn stage(&self, len: u64) -> BoxFuture<'static, Result<StageId>> {
        let calls = self.calls.clone();
        let made = self.send(|number, to| Call::Stage(number, len, to));
        let staging = Reclaim::new(made, move |made: Result<StageId>| {
            if let Ok(stage) = made {
                let _ = calls.send((Call::StageRelease(stage), None));
            }
        });
        Box::pin(async move { staging.await.unwrap_or_else(|_| Err(ended())) })
    }

    fn stage_alignment(&self) -> u64 {
        self.alignment
    }

    fn stage_write(&self, stage: StageId, offset: u64, payload: Payload) -> BoxFuture<'static, Result<()>> {
        self.ask(|_, to| Call::StageWrite(stage, offset, payload, to))
    }

    fn stage_release(&self, stage: StageId) {
        // If the group has ended, so has the stage.
        let _ = self.calls.send((Call::StageRelease(stage), None));
    }

    fn queue_transaction(&self, transaction: Transaction) -> BoxFuture<'static, Result<()>> {
        if let Err(e) = transaction.validate() {
            return Box::pin(std::future::ready(Err(e)));
        }
        let cid = transaction.collection.clone();
        self.ask_in(&cid, |number, to| Call::Transact(number, transaction, to))
    }

    fn session(&self) -> u64 {
        self.shared.number()
    }

    fn read(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        offset: u64,
        len: u64,
        dest: Option<ArenaBuf>,
    ) -> BoxFuture<'static, Result<ReadData>> {
        self.ask_in(cid, |number, to| Call::Read(number, oid.clone(), (offset, len), dest, to))
    }

    fn stat(&self, cid: &CollectionId, oid: &ObjectId) -> BoxFuture<'static, Result<Stat>> {
        self.ask_in(cid, |number, to| Call::Stat(number, oid.clone(), to))
    }

    fn get_xattr(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        name: Bytes,
    ) -> BoxFuture<'static, Result<Bytes>> {
        self.ask_in(cid, |number, to| Call::Xattr(number, oid.clone(), name, to))
    }

    fn get_xattrs(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>> {
        self.ask_in(cid, |number, to| Call::Xattrs(number, oid.clone(), to))
    }

    fn omap_get_header(&self, cid: &CollectionId, oid: &ObjectId) -> BoxFuture<'static, Result<Bytes>> {
        self.ask_in(cid, |number, to| Call::OmapHeader(number, oid.clone(), to))
    }

    fn omap_get(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        keys: Vec<Bytes>,
    ) -> BoxFuture<'static, Result<Vec<(Bytes, Bytes)>>> {
        self.ask_in(cid, |number, to| Call::OmapGet(number, oid.clone(), keys, to))
    }

    fn omap_iterate(
        &self,
        cid: &CollectionId,
        oid: &ObjectId,
        from: Bytes,
        limit: usize,
    ) -> BoxFuture<'static, Result<Page<(Bytes, Bytes)>>> {
        self.ask_in(cid, |number, to| Call::OmapIterate(number, oid.clone(), from, limit, to))
    }

    fn list(
        &self,
        cid: &CollectionId,
        from: Option<ObjectId>,
        limit: usize,
    ) -> BoxFuture<'static, Result<Page<ObjectId>>> {
        self.ask_in(cid, |number, to| Call::List(number, from, limit, to))
    }

    fn collections(&self) -> BoxFuture<'static, Result<Vec<CollectionId>>> {
        Box::pin(std::future::ready(Ok(vec![self.cid.clone()])))
    }

    /// Space is the targets', not a group's.
    fn statfs(&self) -> BoxFuture<'static, Result<StatFs>> {
        Box::pin(std::future::ready(Ok(StatFs::default())))
    }

    /// The targets are unmounted by whoever has them.
    fn umount(&self) -> BoxFuture<'static, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
