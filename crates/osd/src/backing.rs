//! The store behind a placement group, and the OSD's view of its session.

use std::cell::Cell;
use std::sync::Arc;

use array::Array;
use futures::future::LocalBoxFuture;
use store::{
    CollectionId, ObjectStore, ReplyOf, StoreCalls, StoreError, StoreReply, StoreRequest, Submit, Transaction,
};

use crate::fail::{Fail, Step};

/// The future of a reply of a [`Backing`].
pub(crate) type BackingFuture = LocalBoxFuture<'static, store::Result<StoreReply>>;

/// A target's store, or an array over several targets. Everything the OSD remembers of its content carries the *epoch* in
/// which it was learnt. When the store is lost a new epoch begins, and what was learnt before no longer counts.
pub(crate) struct Backing {
    store: Store,
    /// For the log.
    name: String,
    session: Cell<u64>,
    epoch: Cell<u64>,
}

enum Store {
    Target(Arc<dyn ObjectStore>),
    Array(Array),
}

impl Submit for Backing {
    type Reply = BackingFuture;

    fn submit(&self, request: StoreRequest) -> BackingFuture {
        match &self.store {
            Store::Target(store) => store.submit(request),
            Store::Array(array) => array.submit(request),
        }
    }

    fn incarnation(&self) -> u64 {
        match &self.store {
            Store::Target(store) => store.incarnation(),
            Store::Array(array) => array.incarnation(),
        }
    }

    fn stage_alignment(&self) -> u64 {
        match &self.store {
            Store::Target(store) => store.stage_alignment(),
            Store::Array(array) => array.stage_alignment(),
        }
    }
}

impl Backing {
    /// The store of one target.
    pub(crate) fn target(store: Arc<dyn ObjectStore>, name: String) -> Backing {
        Backing::new(Store::Target(store), name)
    }

    /// Several targets.
    pub(crate) fn array(array: Array, name: String) -> Backing {
        Backing::new(Store::Array(array), name)
    }

    fn new(store: Store, name: String) -> Backing {
        let backing = Backing { store, name, session: Cell::new(0), epoch: Cell::new(1) };
        backing.session.set(Submit::incarnation(&backing));
        backing
    }

    /// The current epoch.
    pub(crate) fn epoch(&self) -> u64 {
        let session = Submit::incarnation(self);
        if session != self.session.replace(session) {
            self.begin_epoch();
        }
        self.epoch.get()
    }

    /// Says that something of epoch `seen` failed because the store was lost.
    pub(crate) fn lost(&self, seen: u64) {
        if self.epoch() == seen {
            self.begin_epoch();
        }
    }

    /// Fails if `seen` is no longer the current epoch. What was read since it was counts only if this succeeds: the store
    /// repeats reads that lose their session, and then they may see changes that are not durable.
    pub(crate) fn still(&self, seen: u64) -> Step<()> {
        if self.epoch() != seen {
            return Err(Fail::Lost("the store's session has changed".into()));
        }
        Ok(())
    }

    /// Waits until everything that earlier sessions have left queued in a collection is durable or has failed. Nothing
    /// read before that may be told to anybody: it could still vanish.
    pub(crate) async fn settle(&self, cid: &CollectionId) -> store::Result<()> {
        self.epoch();
        match self.queue(Transaction::new(cid.clone())).await {
            // A poisoned store shows only what is durable.
            Ok(()) | Err(StoreError::NoSuchCollection(_) | StoreError::Poisoned(_)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn begin_epoch(&self) {
        self.epoch.set(self.epoch.get() + 1);
        metrics::counter!("outboard_osd_store_losses_total").increment(1);
        tracing::info!(store = %self.name, epoch = self.epoch.get(), "the store's session has changed");
    }

    /// Queues a transaction that was computed in the current epoch.
    pub(crate) fn queue(&self, transaction: Transaction) -> ReplyOf<BackingFuture, ()> {
        self.queue_transaction_in(self.session.get(), transaction)
    }
}
