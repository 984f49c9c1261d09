//! The store behind a placement group, and the OSD's view of its incarnation.

use std::cell::Cell;
use std::sync::Arc;

use array::Array;
use futures::future::LocalBoxFuture;
use store::{
    CollectionId, ObjectStore, ReplyOf, StoreCalls, StoreError, StoreReply, StoreRequest, Submit, Transaction,
};

use crate::fail::{Fail, StepResult};

/// The future of a reply of a [`Backing`].
pub(crate) type BackingFuture = LocalBoxFuture<'static, store::Result<StoreReply>>;

/// A target's store, or an array over several targets. Everything the OSD remembers of its content
/// carries the *incarnation* in which it was learnt. When the store is lost a new incarnation
/// begins, and what was learnt before no longer counts.
pub(crate) struct Backing {
    store: BackingStore,
    /// For the log.
    name: String,
    /// Incarnation that the store had last.
    store_incarnation: Cell<u64>,
    /// The OSD's count: a new one begins with each of the store's, and when a call to the store was
    /// lost.
    incarnation: Cell<u64>,
}

enum BackingStore {
    Target(Arc<dyn ObjectStore>),
    Array(Array),
}

impl Submit for Backing {
    type Reply = BackingFuture;

    fn submit(&self, request: StoreRequest) -> BackingFuture {
        match &self.store {
            BackingStore::Target(store) => store.submit(request),
            BackingStore::Array(array) => array.submit(request),
        }
    }

    fn incarnation(&self) -> u64 {
        match &self.store {
            BackingStore::Target(store) => store.incarnation(),
            BackingStore::Array(array) => array.incarnation(),
        }
    }

    fn stage_alignment(&self) -> u64 {
        match &self.store {
            BackingStore::Target(store) => store.stage_alignment(),
            BackingStore::Array(array) => array.stage_alignment(),
        }
    }
}

impl Backing {
    /// The store of one target.
    pub(crate) fn target(store: Arc<dyn ObjectStore>, name: String) -> Backing {
        Backing::new(BackingStore::Target(store), name)
    }

    /// Several targets.
    pub(crate) fn array(array: Array, name: String) -> Backing {
        Backing::new(BackingStore::Array(array), name)
    }

    fn new(store: BackingStore, name: String) -> Backing {
        let backing = Backing { store, name, store_incarnation: Cell::new(0), incarnation: Cell::new(1) };
        backing.store_incarnation.set(Submit::incarnation(&backing));
        backing
    }

    /// The current incarnation.
    pub(crate) fn incarnation(&self) -> u64 {
        let found = Submit::incarnation(self);
        if found != self.store_incarnation.replace(found) {
            self.begin_incarnation();
        }
        self.incarnation.get()
    }

    /// Notes that a call of incarnation `seen` failed because the store was lost.
    pub(crate) fn lost(&self, seen: u64) {
        if self.incarnation() == seen {
            self.begin_incarnation();
        }
    }

    /// Fails if `seen` is no longer the current incarnation. Data read since then counts only if
    /// this succeeds: reads are repeated after the store has restarted, and then may see changes
    /// that are not durable.
    pub(crate) fn still(&self, seen: u64) -> StepResult<()> {
        if self.incarnation() != seen {
            return Err(Fail::Lost("the store has another incarnation".into()));
        }
        Ok(())
    }

    /// Waits until everything that earlier incarnations have left queued in a collection is durable
    /// or has failed. Data read before that may not be passed on: it could still vanish.
    pub(crate) async fn settle(&self, cid: &CollectionId) -> store::Result<()> {
        self.incarnation();
        match self.queue(Transaction::new(cid.clone())).await {
            // A poisoned store shows only what is durable.
            Ok(()) | Err(StoreError::NoSuchCollection(_) | StoreError::Poisoned(_)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn begin_incarnation(&self) {
        self.incarnation.set(self.incarnation.get() + 1);
        metrics::counter!("outboard_osd_store_losses_total").increment(1);
        tracing::info!(store = %self.name, incarnation = self.incarnation.get(), "the store has another incarnation");
    }

    /// Queues a transaction that was computed in the current incarnation.
    pub(crate) fn queue(&self, transaction: Transaction) -> ReplyOf<BackingFuture, ()> {
        self.queue_transaction_in(self.store_incarnation.get(), transaction)
    }
}
