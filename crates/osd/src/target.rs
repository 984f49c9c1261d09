//! A target and the OSD's view of its session.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::BoxFuture;
use store::{CollectionId, ObjectStore, StoreError, Transaction};
use uuid::Uuid;

use crate::fail::{Fail, Step};

/// One target, or several that are used as one. Everything the OSD remembers of it carries the *epoch* it was learnt in; when
/// the store is lost a new epoch begins, and what was learnt before no longer counts.
pub(crate) struct Target {
    pub(crate) uuid: Uuid,
    pub(crate) store: Arc<dyn ObjectStore>,
    session: Cell<u64>,
    epoch: Cell<u64>,
    /// Counts how often its usability has changed.
    generation: Arc<AtomicU64>,
    /// Why it failed, and in which session.
    failed: RefCell<Option<(u64, String)>>,
    /// The operator has taken it out.
    out: Cell<bool>,
}

impl Target {
    pub(crate) fn new(uuid: Uuid, store: Arc<dyn ObjectStore>) -> Target {
        let session = Cell::new(store.session());
        Target {
            uuid,
            store,
            session,
            epoch: Cell::new(1),
            generation: Arc::default(),
            failed: RefCell::default(),
            out: Cell::new(false),
        }
    }

    /// Counts how often its usability has changed.
    pub(crate) fn generation(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.generation)
    }

    /// Says that it has failed: redundant placement groups go on without it, until its store has a new session or an operator
    /// says so.
    pub(crate) fn fail(&self, why: &str) {
        if self.failure().is_none() {
            tracing::error!(target_uuid = %self.uuid, why, "the target has failed; its placement groups go on without it");
            metrics::counter!("outboard_osd_target_failures_total").increment(1);
            *self.failed.borrow_mut() = Some((self.store.session(), why.to_owned()));
            self.generation.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Why it has failed, in its store's present session.
    pub(crate) fn failure(&self) -> Option<String> {
        let session = self.store.session();
        self.failed.borrow().as_ref().filter(|(since, _)| *since == session).map(|(_, why)| why.clone())
    }

    /// Takes it out, or in again.
    pub(crate) fn set_out(&self, out: bool) {
        self.out.set(out);
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Says that it is to be tried again, if it has failed.
    pub(crate) fn try_again(&self) {
        if self.failed.take().is_some() {
            self.generation.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Whether the operator has taken it out.
    pub(crate) fn is_out(&self) -> bool {
        self.out.get()
    }

    /// Whether redundant placement groups may use it.
    pub(crate) fn is_usable(&self) -> bool {
        !self.is_out() && self.failure().is_none()
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
