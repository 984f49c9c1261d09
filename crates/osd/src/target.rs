//! A target, and the OSD's view of its health.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use array::Member;
use futures::future::{LocalBoxFuture, try_join_all};
use store::{CollectionId, ObjectStore, StoreCalls, StoreError, Transaction};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use uuid::Uuid;
use wire::TargetState;

use crate::backing::Backing;
use crate::config::TargetRetry;
use crate::health::{Health, HealthEvent, UsabilityChange};
use crate::ids;
use crate::task::spawn;

/// One target: its store, and what the OSD knows of its health.
pub(crate) struct Target {
    pub(crate) uuid: Uuid,
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The store, as placement groups without redundancy use it.
    pub(crate) backing: Rc<Backing>,
    /// Counts how often its usability has changed.
    generation: Cell<u64>,
    health: RefCell<Health>,
    /// Session of the store that `health` is about.
    health_incarnation: Cell<u64>,
    /// Told when `health` has changed.
    changed: Notify,
    /// When the last probe that was answered had been sent.
    answered: watch::Sender<Option<Instant>>,
    /// A probe is under way: one at a time, for a stalled store keeps all of them.
    is_probed: Cell<bool>,
    /// The operator has taken it out.
    out: Cell<bool>,
    /// It had no room for the node's map when the node started.
    lacks_map: Cell<bool>,
    /// Collections in which calls were not answered in time: a probe asks in them, too.
    suspects: RefCell<Vec<CollectionId>>,
}

/// Most collections that a probe asks in. If calls hang in more of them, these stand for all.
const SUSPECTS_MAX: usize = 64;

impl Target {
    pub(crate) fn new(uuid: Uuid, store: Arc<dyn ObjectStore>, retry: TargetRetry) -> Target {
        let incarnation = store.incarnation();
        let backing = Rc::new(Backing::target(Arc::clone(&store), uuid.to_string()));
        Target {
            uuid,
            store,
            backing,
            generation: Cell::new(0),
            health: RefCell::new(Health::new(retry)),
            health_incarnation: Cell::new(incarnation),
            changed: Notify::new(),
            answered: watch::Sender::new(None),
            is_probed: Cell::new(false),
            out: Cell::new(false),
            lacks_map: Cell::new(false),
            suspects: RefCell::default(),
        }
    }

    /// Takes note of an error that is one of the target: redundant placement groups go on without it.
    pub(crate) fn fail(&self, e: &StoreError) {
        self.step(HealthEvent::Failed(e.clone()));
    }

    /// Takes note that a call in a collection of the target was not answered for `waited`: redundant placement groups that can
    /// go on without the target do so, until it answers in that collection.
    pub(crate) fn overdue(&self, cid: &CollectionId, waited: Duration) {
        {
            let mut suspects = self.suspects.borrow_mut();
            if suspects.len() < SUSPECTS_MAX && !suspects.contains(cid) {
                suspects.push(cid.clone());
            }
        }
        self.step(HealthEvent::Overdue(format!("no answer in {waited:?}")));
    }

    /// Takes note whether the target lacks the node's map for want of space.
    pub(crate) fn set_lacks_map(&self, lacks: bool) {
        self.lacks_map.set(lacks);
    }

    /// Whether the target lacks the node's map for want of space.
    pub(crate) fn lacks_map(&self) -> bool {
        self.lacks_map.get()
    }

    /// Why placement groups go on without it.
    pub(crate) fn failure(&self) -> Option<String> {
        self.with_health(|health| health.why().map(str::to_owned))
    }

    /// Whether it is used, and how long from now it is tried again.
    pub(crate) fn state(&self) -> (TargetState, Option<Duration>) {
        let now = Instant::now();
        self.with_health(|health| {
            (health.state(), health.next_probe().map(|due| due.saturating_duration_since(now)))
        })
    }

    /// Takes it out, or in again.
    pub(crate) fn set_out(&self, out: bool) {
        self.out.set(out);
        self.generation.set(self.generation.get() + 1);
    }

    /// Uses it again at once, if it has failed: the operator wants that.
    pub(crate) fn try_again(&self) {
        self.step(HealthEvent::Renewed);
    }

    fn with_health<T>(&self, look: impl FnOnce(&Health) -> T) -> T {
        let incarnation = self.store.incarnation();
        if incarnation != self.health_incarnation.replace(incarnation) {
            // The incarnation is part of what placement groups watch: they need not be told.
            self.suspects.borrow_mut().clear();
            let _ = self.health.borrow_mut().step(Instant::now(), HealthEvent::Renewed);
        }
        look(&self.health.borrow())
    }

    fn step(&self, event: HealthEvent) {
        let before = self.with_health(Health::state);
        let change = self.health.borrow_mut().step(Instant::now(), event);
        let (state, why) = self.with_health(|h| (h.state(), h.why().unwrap_or_default().to_owned()));
        match change {
            UsabilityChange::None => return,
            UsabilityChange::Down => {
                tracing::error!(target_uuid = %self.uuid, ?state, why, "the target is not used where placement groups can go on without it");
                if before == TargetState::Up {
                    metrics::counter!("outboard_osd_target_failures_total").increment(1);
                }
            }
            UsabilityChange::Back => {
                self.suspects.borrow_mut().clear();
                tracing::info!(target_uuid = %self.uuid, "the target is used again");
                metrics::counter!("outboard_osd_target_returns_total").increment(1);
            }
        }
        self.generation.set(self.generation.get() + 1);
        self.changed.notify_waiters();
    }

    /// Probes the target if it is not used and a probe is due.
    pub(crate) fn probe_if_due(self: &Rc<Self>) {
        if self.with_health(|health| health.is_probe_due(Instant::now())) {
            self.step(HealthEvent::ProbeSent);
            self.probe();
        }
    }

    /// Sends a probe, unless one is under way.
    fn probe(self: &Rc<Self>) {
        if self.is_probed.replace(true) {
            return;
        }
        let target = Rc::clone(self);
        spawn(async move {
            let (sent, incarnation) = (Instant::now(), target.store.incarnation());
            let probed = target.ask_something().await;
            target.is_probed.set(false);
            if target.store.incarnation() != incarnation {
                return target.step(HealthEvent::ProbeLost);
            }
            match probed {
                Ok(()) => {
                    target.answered.send_replace(Some(sent));
                    target.step(HealthEvent::ProbeAnswered(sent.elapsed()));
                }
                Err(StoreError::Disconnected(_)) => target.step(HealthEvent::ProbeLost),
                Err(e) => target.step(HealthEvent::ProbeFailed(e)),
            }
        });
    }

    /// Asks the target something, and takes note if it fails; whether it does.
    pub(crate) async fn fails(&self) -> bool {
        match self.ask_something().await {
            Ok(()) => false,
            Err(StoreError::Disconnected(_)) => true,
            Err(e) => {
                self.fail(&e);
                true
            }
        }
    }

    /// Asks what is little work: an empty transaction, which becomes durable all the same, and a look at the map. The same
    /// where calls were not answered in time.
    async fn ask_something(&self) -> store::Result<()> {
        let suspects = self.suspects.borrow().clone();
        let all = suspects.into_iter().chain([ids::node_collection()]);
        try_join_all(all.map(|cid| self.ask_in(cid))).await.map(drop)
    }

    async fn ask_in(&self, cid: CollectionId) -> store::Result<()> {
        match self.store.queue_transaction(Transaction::new(cid.clone())).await {
            Ok(()) | Err(StoreError::NoSuchCollection(_)) => {}
            Err(e) => return Err(e),
        }
        match self.store.stat(&cid, &ids::map_object()).await {
            Ok(_) | Err(StoreError::NoSuchCollection(_) | StoreError::NoSuchObject(_)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Resolves once the target has answered a probe that is sent from now on. If a probe fails it never does.
    pub(crate) async fn answers(self: &Rc<Self>) {
        let asked = Instant::now();
        let mut answered = self.answered.subscribe();
        self.probe();
        loop {
            match *answered.borrow_and_update() {
                Some(sent) if sent >= asked => return,
                // That was an earlier one.
                Some(_) => self.probe(),
                None => {}
            }
            if answered.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Resolves at once, or as soon as it is so, when the target is slow.
    pub(crate) async fn until_slow(&self) {
        loop {
            let changed = self.changed.notified();
            if self.state().0 == TargetState::Slow {
                return;
            }
            changed.await;
        }
    }

    /// Whether the target may well be used again before clients give up.
    pub(crate) fn is_hopeful(&self) -> bool {
        !self.is_out() && self.with_health(|health| health.is_hopeful(Instant::now()))
    }

    /// Whether it is slow: placement groups that cannot do without it wait for it.
    pub(crate) fn is_slow(&self) -> bool {
        !self.is_out() && self.state().0 == TargetState::Slow
    }

    /// Whether the operator has taken it out.
    pub(crate) fn is_out(&self) -> bool {
        self.out.get()
    }

    /// Whether redundant placement groups may use it.
    pub(crate) fn is_usable(&self) -> bool {
        !self.is_out() && self.state().0 == TargetState::Up
    }
}

impl Member for Target {
    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    fn generation(&self) -> u64 {
        self.generation.get()
    }

    fn is_usable(&self) -> bool {
        Target::is_usable(self)
    }

    fn is_out(&self) -> bool {
        Target::is_out(self)
    }

    fn is_slow(&self) -> bool {
        Target::is_slow(self)
    }

    fn is_hopeful(&self) -> bool {
        Target::is_hopeful(self)
    }

    fn failure(&self) -> Option<String> {
        Target::failure(self)
    }

    fn fail(&self, e: &StoreError) {
        Target::fail(self, e);
    }

    fn overdue(&self, cid: &CollectionId, waited: Duration) {
        Target::overdue(self, cid, waited);
    }

    fn fails(&self) -> LocalBoxFuture<'_, bool> {
        Box::pin(Target::fails(self))
    }

    fn until_slow(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(Target::until_slow(self))
    }

    fn answers(self: Rc<Self>) -> LocalBoxFuture<'static, ()> {
        Box::pin(async move { Target::answers(&self).await })
    }
}
