//! The store behind a placement group, and the incarnation of this store as the osd sees it.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use array::Array;
use futures::future::LocalBoxFuture;
use store::{
    CollectionId, ObjectStore, ReplyOf, StoreCalls, StoreError, StoreReply, StoreRequest, Submit, Transaction,
};

use crate::block_transform::{BlockTransform, Unchanged};
use crate::fail::{Fail, StepResult};
use crate::target::Target;

/// Future of a reply from a [`Backing`].
pub(crate) struct BackingFuture {
    reply: LocalBoxFuture<'static, store::Result<StoreReply>>,
    blocks: Rc<dyn BlockTransform>,
    /// The target that the call was sent to, and the incarnation of its store, in a placement group
    /// without redundancy.
    sole: Option<(Rc<Target>, u64)>,
}

impl Future for BackingFuture {
    type Output = store::Result<StoreReply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let reply = ready!(self.reply.as_mut().poll(cx));
        if let (Err(e), Some((target, incarnation))) = (&reply, self.sole.take()) {
            target.suspect(incarnation, e);
        }
        Poll::Ready(reply.map(|reply| match reply {
            StoreReply::Read(blocks) => StoreReply::Read(self.blocks.incoming(blocks)),
            other => other,
        }))
    }
}

/// A target's store, or an array over several targets. The osd tags all content that it caches with
/// the *incarnation* in which it read the content from the store. A new incarnation begins when the
/// store restarts or a call to it is lost. Cached data from earlier incarnations is then invalid.
pub(crate) struct Backing {
    store: BackingStore,
    /// What happens to blocks on their way to the store and back.
    blocks: Rc<dyn BlockTransform>,
    /// Name of the store in log messages.
    name: String,
    /// The store's incarnation when it was last checked.
    store_incarnation: Cell<u64>,
    /// The osd's own incarnation number. It grows with each new incarnation of the store, and when
    /// a call to the store was lost.
    incarnation: Cell<u64>,
}

enum BackingStore {
    Target(Arc<dyn ObjectStore>),
    Sole(Rc<Target>),
    Array(Array),
}

impl Submit for Backing {
    type Reply = BackingFuture;

    fn submit(&self, request: StoreRequest) -> BackingFuture {
        let (request, blocks) = (self.blocks.request(request), Rc::clone(&self.blocks));
        let reply = match &self.store {
            BackingStore::Target(store) => store.submit(request),
            BackingStore::Array(array) => array.submit(request),
            BackingStore::Sole(target) => {
                let sole = Some((Rc::clone(target), target.store.incarnation()));
                return BackingFuture { reply: target.store.submit(request), blocks, sole };
            }
        };
        BackingFuture { reply, blocks, sole: None }
    }

    fn incarnation(&self) -> u64 {
        match &self.store {
            BackingStore::Target(store) => store.incarnation(),
            BackingStore::Sole(target) => target.store.incarnation(),
            BackingStore::Array(array) => array.incarnation(),
        }
    }

    fn stage_alignment(&self) -> u64 {
        match &self.store {
            BackingStore::Target(store) => store.stage_alignment(),
            BackingStore::Sole(target) => target.store.stage_alignment(),
            BackingStore::Array(array) => array.stage_alignment(),
        }
    }
}

impl Backing {
    /// Whether several targets store the objects.
    pub(crate) fn is_redundant(&self) -> bool {
        matches!(self.store, BackingStore::Array(_))
    }

    /// Creates a backing from the store of one target.
    pub(crate) fn target(store: Arc<dyn ObjectStore>, name: String) -> Backing {
        Backing::new(BackingStore::Target(store), name)
    }

    /// Creates the backing of placement groups without redundancy on a target. Errors of calls also
    /// concern the health of the target.
    pub(crate) fn sole(target: &Rc<Target>) -> Backing {
        Backing::new(BackingStore::Sole(Rc::clone(target)), target.uuid.to_string())
    }

    /// Creates a backing from an array over several targets.
    pub(crate) fn array(array: Array, name: String) -> Backing {
        Backing::new(BackingStore::Array(array), name)
    }

    fn new(store: BackingStore, name: String) -> Backing {
        let (blocks, zero, one) = (Rc::new(Unchanged), Cell::new(0), Cell::new(1));
        let backing = Backing { store, blocks, name, store_incarnation: zero, incarnation: one };
        backing.store_incarnation.set(Submit::incarnation(&backing));
        backing
    }

    /// Returns the current incarnation.
    pub(crate) fn incarnation(&self) -> u64 {
        let found = Submit::incarnation(self);
        if found != self.store_incarnation.replace(found) {
            self.begin_incarnation();
        }
        self.incarnation.get()
    }

    /// Records that a call of incarnation `seen` was lost. Begins a new incarnation unless one has
    /// begun since `seen`.
    pub(crate) fn lost(&self, seen: u64) {
        if self.incarnation() == seen {
            self.begin_incarnation();
        }
    }

    /// Fails if `seen` is no longer the current incarnation. Data that was read in the incarnation
    /// `seen` is valid only if this check succeeds afterwards: `ProxyStore` repeats reads after a
    /// restart of the store, and a repeated read may return changes that are not durable.
    pub(crate) fn still(&self, seen: u64) -> StepResult<()> {
        if self.incarnation() != seen {
            return Err(Fail::Lost("the store restarted or was unreachable during the call".into()));
        }
        Ok(())
    }

    /// Waits until each change that earlier incarnations queued in a collection is durable or has
    /// failed. The osd must not return data that it read before the end of this wait, because this
    /// data could still be lost. Returns false if the store is poisoned: reads from it return only
    /// durable data, but its next mount may replay changes. With `strictly`, fails then.
    pub(crate) async fn settle(&self, cid: &CollectionId, strictly: bool) -> store::Result<bool> {
        self.incarnation();
        match self.queue(Transaction::new(cid.clone())).await {
            Ok(()) | Err(StoreError::NoSuchCollection(_)) => Ok(true),
            Err(StoreError::Poisoned(_)) if !strictly => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn begin_incarnation(&self) {
        self.incarnation.set(self.incarnation.get() + 1);
        metrics::counter!("outboard_osd_store_losses_total").increment(1);
        tracing::info!(store = %self.name, incarnation = self.incarnation.get(), "the store has a new incarnation");
    }

    /// Queues a transaction that was computed in the current incarnation.
    pub(crate) fn queue(&self, transaction: Transaction) -> ReplyOf<BackingFuture, ()> {
        self.queue_transaction_in(self.store_incarnation.get(), transaction)
    }
}
