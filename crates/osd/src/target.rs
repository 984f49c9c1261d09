//! [`Target`]: one target of the node, and its health as the osd sees it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use array::Member;
use base::watch;
use futures::future::{LocalBoxFuture, try_join_all};
use store::{CollectionId, ObjectStore, StoreCalls, StoreError, Transaction};
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;
use wire::TargetState;

use crate::backing::Backing;
use crate::config::TargetRetry;
use crate::health::{Health, HealthEvent, UsabilityChange};
use crate::ids;
use crate::task::spawn;

/// One target: its store, and what the osd knows of its health.
pub(crate) struct Target {
    pub(crate) uuid: Uuid,
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The store in the form in which the osd stores data of its own: the map and the age.
    pub(crate) backing: Rc<Backing>,
    /// Number of times that the target's usability has changed.
    generation: Cell<u64>,
    health: RefCell<Health>,
    /// Incarnation of the store that `health` describes.
    health_incarnation: Cell<u64>,
    /// Notified when `health` changes.
    changed: Notify,
    /// Send time of the last probe that was answered.
    answered: watch::Sender<Option<Instant>>,
    /// Whether a probe is running. Only one probe runs at a time, because further probes of a
    /// stalled store would accumulate.
    is_probed: Cell<bool>,
    /// Whether a probe after an I/O error is running.
    is_suspected: Cell<bool>,
    /// Whether the operator has taken the target out of use.
    out: Cell<bool>,
    /// Whether the target had no space for the node's map when the node started.
    lacks_map: Cell<bool>,
    /// Whether the target has not stored a map that other targets have stored.
    missed_map: Cell<bool>,
    /// Whether the target has gone back to an earlier state, and the incarnation of the store in which
    /// this was found out.
    went_back: Cell<Option<(u64, bool)>>,
    /// Whether the operator has replaced the target.
    is_replaced: Cell<bool>,
    /// Collections in which the target did not answer calls in time. Probes also send calls in
    /// these collections.
    suspects: RefCell<Vec<CollectionId>>,
}

/// A failure of a target that the first shard has found at the start of the node.
#[derive(Debug, Clone)]
pub(crate) enum FailureAtStart {
    /// The target stays unusable until its store has a new incarnation.
    Lost(String),
    /// The target has refused a call with this error.
    Refused(StoreError),
}

/// Maximum number of collections in which a probe sends calls. If calls hang in more collections,
/// the recorded collections represent all of them.
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
            is_suspected: Cell::new(false),
            out: Cell::new(false),
            lacks_map: Cell::new(false),
            missed_map: Cell::new(false),
            went_back: Cell::new(None),
            is_replaced: Cell::new(false),
            suspects: RefCell::default(),
        }
    }

    /// Records an error of a call in an incarnation of the store, if the error concerns the whole
    /// target. Placement groups with redundancy continue without the target. If the store has begun
    /// another incarnation since, the error is outdated and has no effect.
    pub(crate) fn fail(&self, incarnation: u64, e: &StoreError) {
        if self.store.incarnation() == incarnation {
            self.step(HealthEvent::Failed(e.clone()));
        }
    }

    /// Records an error of a call of a placement group without redundancy. Such a group uses the target
    /// regardless of its health. An I/O error may concern only one object, so a probe finds out whether
    /// the target has failed.
    pub(crate) fn suspect(self: &Rc<Self>, incarnation: u64, e: &StoreError) {
        match e {
            StoreError::Absent(_) | StoreError::Poisoned(_) => self.fail(incarnation, e),
            StoreError::Io(_) if self.failure().is_none() && !self.is_suspected.replace(true) => {
                let target = Rc::clone(self);
                spawn(async move {
                    target.fails().await;
                    target.is_suspected.set(false);
                });
            }
            _ => {}
        }
    }

    /// Records that the target stays unusable until its store has a new incarnation.
    pub(crate) fn lose(&self, why: String) {
        self.step(HealthEvent::Lost(why));
    }

    /// Returns the failure of the target that the first shard has found at the start of the node;
    /// `None` if there is none, or if the target is only slow, which each shard finds out by itself.
    pub(crate) fn failure_at_start(&self) -> Option<FailureAtStart> {
        let why = self.failure()?;
        match self.state().0 {
            TargetState::Failed if self.may_return_soon() => {
                Some(FailureAtStart::Refused(StoreError::Poisoned(why)))
            }
            TargetState::Failed => Some(FailureAtStart::Lost(why)),
            TargetState::Failing => Some(FailureAtStart::Refused(StoreError::Io(why))),
            TargetState::Up | TargetState::Slow => None,
        }
    }

    /// Takes over a failure that the first shard has found at the start of the node.
    pub(crate) fn take_over(&self, failure: &FailureAtStart) {
        match failure {
            FailureAtStart::Lost(why) => self.lose(why.clone()),
            FailureAtStart::Refused(e) => self.fail(self.store.incarnation(), e),
        }
    }

    /// Records that a call in a collection of the target was not answered for `waited`. Placement
    /// groups with redundancy continue without the target if they can, until it answers in that
    /// collection.
    pub(crate) fn overdue(&self, cid: &CollectionId, waited: Duration) {
        {
            let mut suspects = self.suspects.borrow_mut();
            if suspects.len() < SUSPECTS_MAX && !suspects.contains(cid) {
                suspects.push(cid.clone());
            }
        }
        self.step(HealthEvent::Overdue(format!("no answer within {waited:?}")));
    }

    /// Records whether the target lacks the node's map because it has no space.
    pub(crate) fn set_lacks_map(&self, lacks: bool) {
        self.lacks_map.set(lacks);
    }

    /// Returns whether the target lacks the node's map because it has no space.
    pub(crate) fn lacks_map(&self) -> bool {
        self.lacks_map.get()
    }

    /// Records whether the target has not stored a map that other targets have stored.
    pub(crate) fn set_missed_map(&self, missed: bool) {
        self.missed_map.set(missed);
    }

    /// Returns whether the target has not stored a map that other targets have stored.
    pub(crate) fn missed_map(&self) -> bool {
        self.missed_map.get()
    }

    /// Records whether the target has gone back to an earlier state in an incarnation of its store.
    pub(crate) fn set_went_back(&self, incarnation: u64, went_back: bool) {
        self.went_back.set(Some((incarnation, went_back)));
    }

    /// Returns whether the target has gone back to an earlier state; `None` if this is unknown in the
    /// current incarnation of the store.
    pub(crate) fn went_back(&self) -> Option<bool> {
        let incarnation = self.store.incarnation();
        self.went_back.get().filter(|(checked, _)| *checked == incarnation).map(|(_, went_back)| went_back)
    }

    /// Records that the operator has replaced the target. Its later changes would be lost when the node
    /// starts with the new target, so the osd does not use it any more.
    pub(crate) fn set_replaced(&self) {
        self.is_replaced.set(true);
        self.generation.set(self.generation.get() + 1);
        self.changed.notify_waiters();
    }

    /// Returns whether the operator has replaced the target.
    pub(crate) fn is_replaced(&self) -> bool {
        self.is_replaced.get()
    }

    /// Returns whether a pool without redundancy can use the target.
    pub(crate) fn serves_alone(&self) -> bool {
        self.state().0 == TargetState::Up && self.went_back() != Some(true) && !self.is_replaced()
    }

    /// Returns why placement groups do not use the target; `None` if it is used.
    pub(crate) fn failure(&self) -> Option<String> {
        self.with_health(|health| health.why().map(str::to_owned))
    }

    /// Returns the target's state, and the time until the next probe.
    pub(crate) fn state(&self) -> (TargetState, Option<Duration>) {
        let now = Instant::now();
        self.with_health(|health| {
            (health.state(), health.next_probe().map(|due| due.saturating_duration_since(now)))
        })
    }

    /// Takes the target out of use, or back into use.
    pub(crate) fn set_out(&self, out: bool) {
        self.out.set(out);
        self.generation.set(self.generation.get() + 1);
    }

    /// Uses a failed target again at once, for example on the operator's request.
    pub(crate) fn try_again(&self) {
        self.step(HealthEvent::Renewed);
    }

    fn with_health<T>(&self, look: impl FnOnce(&Health) -> T) -> T {
        let incarnation = self.store.incarnation();
        if incarnation != self.health_incarnation.replace(incarnation) {
            // Placement groups watch the incarnation themselves, so they need no notification.
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
                tracing::error!(target_uuid = %self.uuid, ?state, why, "the target has failed; placement groups continue without it if they can");
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

    /// Sends a probe if the target is unused and a probe is due.
    pub(crate) fn probe_if_due(self: &Rc<Self>) {
        if self.with_health(|health| health.is_probe_due(Instant::now())) {
            self.step(HealthEvent::ProbeSent);
            self.probe();
        }
    }

    /// Sends a probe, unless a probe is running.
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

    /// Sends cheap calls to the target and records a failure. Returns whether a call failed.
    pub(crate) async fn fails(&self) -> bool {
        let incarnation = self.store.incarnation();
        match self.ask_something().await {
            Ok(()) => false,
            Err(StoreError::Disconnected(_)) => true,
            Err(e) => {
                self.fail(incarnation, &e);
                true
            }
        }
    }

    /// Sends two cheap calls: an empty transaction, which waits until it is durable, and a query of
    /// the map's object. Sends them in the node's collection and in each collection in which the
    /// target did not answer calls in time.
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

    /// Resolves once the target has answered a probe that is sent after this call. Never resolves
    /// if the probe fails.
    pub(crate) async fn answers(self: &Rc<Self>) {
        let asked = Instant::now();
        let mut answered = self.answered.subscribe();
        self.probe();
        loop {
            match *answered.borrow_and_update() {
                Some(sent) if sent >= asked => return,
                // This answer belongs to a probe that was sent before this call of `answers`.
                Some(_) => self.probe(),
                None => {}
            }
            if answered.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Resolves as soon as the target is slow.
    pub(crate) async fn until_slow(&self) {
        loop {
            let changed = self.changed.notified();
            if self.state().0 == TargetState::Slow {
                return;
            }
            changed.await;
        }
    }

    /// Returns whether the target may be used again before clients give up waiting for it.
    pub(crate) fn is_hopeful(&self) -> bool {
        !self.is_out() && self.may_return_soon()
    }

    /// Like [`Target::is_hopeful`], also for a target that is out of use.
    pub(crate) fn may_return_soon(&self) -> bool {
        self.with_health(|health| health.is_hopeful(Instant::now()))
    }

    /// Returns whether the target is slow. Placement groups that cannot work without a slow target
    /// wait for it.
    pub(crate) fn is_slow(&self) -> bool {
        !self.is_out() && self.state().0 == TargetState::Slow
    }

    /// Returns whether the operator has taken the target out of use.
    pub(crate) fn is_out(&self) -> bool {
        self.out.get()
    }

    /// Returns whether placement groups with redundancy may use the target.
    pub(crate) fn is_usable(&self) -> bool {
        !self.is_out() && !self.is_replaced() && self.state().0 == TargetState::Up
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

    fn fail(&self, incarnation: u64, e: &StoreError) {
        Target::fail(self, incarnation, e);
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

#[cfg(test)]
mod tests {
    use store::{MemStore, RemountedStore, Submit};

    use super::*;

    #[tokio::test]
    async fn an_error_of_a_call_before_a_remount_does_not_fail_the_target() {
        let store = Arc::new(RemountedStore::new(Arc::new(MemStore::new())));
        let target = Target::new(Uuid::new_v4(), Arc::clone(&store) as _, TargetRetry::default());
        let absent = StoreError::Absent("the drive was removed".into());
        let before = store.incarnation();
        store.replace(Arc::new(MemStore::new()));
        target.fail(before, &absent);
        assert!(target.is_usable(), "{:?}", target.failure());
        target.fail(store.incarnation(), &absent);
        assert_eq!(target.state(), (TargetState::Failed, None));
        store.replace(Arc::new(MemStore::new()));
        assert!(target.is_usable(), "a remounted target is used again");
    }
}
