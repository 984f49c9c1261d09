//! A target and the OSD's view of its session.

use std::cell::Cell;
use std::sync::Arc;

use base::BoxFuture;
use store::{CollectionId, ObjectStore, StoreError, Transaction};
use uuid::Uuid;

use crate::fail::{Fail, Step};

/// One target. Everything the OSD remembers of it carries the *epoch* it was learnt in; when the store is lost a new
/// epoch begins, and what was learnt before no longer counts.
pub(crate) struct Target {
    pub(crate) uuid: Uuid,
    pub(crate) store: Arc<dyn ObjectStore>,
    session: Cell<u64>,
    epoch: Cell<u64>,
}

impl Target {
    pub(crate) fn new(uuid: Uuid, store: Arc<dyn ObjectStore>) -> Target {
        let session = Cell::new(store.session());
        Target { uuid, store, session, epoch: Cell::new(1) }
    }

    /// The current epoch.
    pub(crate) fn epoch(&self) -> u64 {
        let session = self.store.session();
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
        tracing::info!(target_uuid = %self.uuid, epoch = self.epoch.get(), "the store's session has changed");
    }

    /// Queues a transaction that was computed in the current epoch.
    pub(crate) fn queue(&self, transaction: Transaction) -> BoxFuture<'static, store::Result<()>> {
        self.store.queue_transaction_in(self.session.get(), transaction)
    }
}
