//! [`Turnstile`]: the order of the requests on one object, and its pending changes.
//!
//! Every request draws a ticket. One request at a time has its *turn*, in the order of the tickets.
//! During its turn, a request inspects the object's latest state, which includes all pending
//! changes, and a change queues its transaction. The request then ends its turn, and its change is
//! *pending* at the end of the object's [`ChangeChain`]. The next request has its turn while this
//! change commits.
//!
//! A request that shows what it has seen waits for the durability of the pending change that it has
//! seen ([`Observation`]). If this change fails, the request looks again.
//!
//! When a change fails or the store becomes unreachable, the pending changes that depend on it, and
//! the request in turn, wait for a new turn with their old tickets. No later request overtakes
//! them: no ticket gets a turn while a change is pending that will fail.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::Range;
use std::task::{Poll, Waker};

use crate::chain::{ChainPosition, ChangeChain, ModifiedRange};
use crate::fail::{Fail, StepResult};
use crate::object::ObjectInfo;
use crate::observers::{ObserverId, Observers, SeenChange};

/// The order of the requests on one object, and its pending changes.
#[derive(Default)]
pub(crate) struct Turnstile {
    inner: RefCell<Inner>,
}

#[derive(Default)]
struct Inner {
    next_ticket: u64,
    in_turn: Option<u64>,
    waiting: BTreeMap<u64, Waker>,
    chain: ChangeChain,
    observers: Observers,
    settling: Option<Waker>,
}

impl Inner {
    /// Keeps a ticket's position in the queue until the request actually waits.
    fn keep_place(&mut self, ticket: u64) {
        // The waker has no effect.
        self.waiting.insert(ticket, Waker::noop().clone());
    }

    /// Wakes the request in turn if it waits until no change is pending.
    fn wake_settling(&mut self) {
        if let Some(settling) = self.settling.take() {
            settling.wake();
        }
    }
}

impl Turnstile {
    /// Draws a ticket.
    pub(crate) fn ticket(&self) -> Ticket<'_> {
        let mut inner = self.inner.borrow_mut();
        inner.next_ticket += 1;
        Ticket { turnstile: self, number: inner.next_ticket }
    }

    /// Returns the state that the object has once all pending changes are durable, if it is known
    /// in this incarnation. The inner `None` means that the object does not exist.
    pub(crate) fn latest(&self, incarnation: u64) -> Option<Option<ObjectInfo>> {
        self.inner.borrow().chain.latest(incarnation)
    }

    fn wake_first(&self) {
        let inner = self.inner.borrow();
        if let (None, Some((_, waker))) = (inner.in_turn, inner.waiting.first_key_value()) {
            waker.wake_by_ref();
        }
    }

    fn observe(&self, position: ChainPosition) -> Observation<'_> {
        let is_pending = position != ChainPosition::default();
        let id = is_pending.then(|| self.inner.borrow_mut().observers.add(position));
        Observation { turnstile: self, id }
    }
}

/// The position of a request in the queue for an object. Dropping the ticket gives up the position.
pub(crate) struct Ticket<'a> {
    turnstile: &'a Turnstile,
    number: u64,
}

impl<'a> Ticket<'a> {
    /// Waits for the ticket's turn. `incarnation` returns the current incarnation.
    pub(crate) async fn enter(&self, incarnation: impl Fn() -> u64) -> Turn<'a> {
        poll_fn(|cx| {
            let mut inner = self.turnstile.inner.borrow_mut();
            let first = inner.waiting.first_key_value().is_none_or(|(first, _)| *first >= self.number);
            if first && inner.in_turn.is_none() && !inner.chain.is_broken(incarnation()) {
                inner.waiting.remove(&self.number);
                inner.in_turn = Some(self.number);
                return Poll::Ready(());
            }
            inner.waiting.insert(self.number, cx.waker().clone());
            Poll::Pending
        })
        .await;
        Turn { turnstile: self.turnstile, ticket: self.number }
    }

    /// Puts the ticket back into the queue after a turn that has queued no transaction. No later
    /// request gets a turn before this ticket.
    pub(crate) fn keep_place(&self) {
        self.turnstile.inner.borrow_mut().keep_place(self.number);
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.turnstile.inner.borrow_mut().waiting.remove(&self.number);
        self.turnstile.wake_first();
    }
}

/// The turn of a request. Dropping this value ends the turn.
pub(crate) struct Turn<'a> {
    turnstile: &'a Turnstile,
    ticket: u64,
}

impl<'a> Turn<'a> {
    /// Waits until no change is pending.
    pub(crate) async fn settled(&self) {
        poll_fn(|cx| {
            let mut inner = self.turnstile.inner.borrow_mut();
            if inner.chain.is_empty() {
                return Poll::Ready(());
            }
            inner.settling = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Whether all pending changes were queued in this incarnation, and none of them is known to
    /// fail.
    pub(crate) fn is_of(&self, incarnation: u64) -> bool {
        !self.turnstile.inner.borrow().chain.is_broken(incarnation)
    }

    /// Number of changes of the object that have failed. If it grows during the turn, the request
    /// may have seen a change that has failed.
    pub(crate) fn epoch(&self) -> u64 {
        self.turnstile.inner.borrow().chain.epoch()
    }

    /// Whether a change is pending.
    pub(crate) fn has_pending(&self) -> bool {
        !self.turnstile.inner.borrow().chain.is_empty()
    }

    /// Returns the object's latest state (see [`Turnstile::latest`]).
    pub(crate) fn latest(&self, incarnation: u64) -> Option<Option<ObjectInfo>> {
        self.turnstile.latest(incarnation)
    }

    /// Records the state of the object in the store. No change may be pending.
    pub(crate) fn learn(&self, incarnation: u64, info: Option<ObjectInfo>) {
        self.turnstile.inner.borrow_mut().chain.learn(incarnation, info);
    }

    /// Observes the latest state of the object.
    pub(crate) fn observe(&self) -> Observation<'a> {
        let position = self.turnstile.inner.borrow().chain.position();
        self.turnstile.observe(position)
    }

    /// Observes the oldest state of which a read of `range` sees the same bytes as of the latest
    /// state; if a later one has the version `wanted`, this one. `None` if the state is not known
    /// in this incarnation.
    pub(crate) fn observe_range(
        &self,
        incarnation: u64,
        range: &Range<u64>,
        wanted: Option<u64>,
    ) -> Option<(Option<ObjectInfo>, Observation<'a>)> {
        let (info, position) = self.turnstile.inner.borrow().chain.visible(incarnation, range, wanted)?;
        Some((info, self.turnstile.observe(position)))
    }

    /// Ends the turn after a transaction was queued in `incarnation` that makes the state `after`.
    /// The change is pending until the caller reports its outcome.
    pub(crate) fn pend(
        self,
        incarnation: u64,
        modified: ModifiedRange,
        after: Option<ObjectInfo>,
    ) -> PendingChange<'a> {
        let position = self.turnstile.inner.borrow_mut().chain.push(incarnation, modified, after);
        PendingChange { turnstile: self.turnstile, ticket: self.ticket, position, is_concluded: false }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turnstile.inner.borrow_mut().in_turn = None;
        self.turnstile.wake_first();
    }
}

/// What a request has seen of an object's pending changes.
#[must_use]
pub(crate) struct Observation<'a> {
    turnstile: &'a Turnstile,
    /// `None` if the request has seen only durable changes.
    id: Option<ObserverId>,
}

impl Observation<'_> {
    /// Waits until the change that the request has seen is durable.
    ///
    /// # Errors
    /// [`Fail::Withdrawn`] if the change has failed.
    pub(crate) async fn durable(&self) -> StepResult<()> {
        let Some(id) = self.id else { return Ok(()) };
        poll_fn(|cx| match self.turnstile.inner.borrow_mut().observers.poll(id, cx.waker()) {
            SeenChange::Pending => Poll::Pending,
            SeenChange::Durable => Poll::Ready(Ok(())),
            SeenChange::Withdrawn => Poll::Ready(Err(Fail::Withdrawn)),
        })
        .await
    }
}

impl Drop for Observation<'_> {
    fn drop(&mut self) {
        self.id.iter().for_each(|id| self.turnstile.inner.borrow_mut().observers.remove(*id));
    }
}

/// A change whose transaction is queued. Dropping this value without an outcome means that the
/// outcome is unknown.
pub(crate) struct PendingChange<'a> {
    turnstile: &'a Turnstile,
    ticket: u64,
    position: ChainPosition,
    is_concluded: bool,
}

impl<'a> PendingChange<'a> {
    /// Records that the change is durable.
    pub(crate) fn committed(mut self) {
        self.is_concluded = true;
        {
            let mut inner = self.turnstile.inner.borrow_mut();
            inner.chain.committed(self.position);
            inner.observers.durable(self.position);
            inner.wake_settling();
        }
        self.turnstile.wake_first();
    }

    /// Whether an earlier change has failed from which this change was computed.
    pub(crate) fn has_failed_base(&self) -> bool {
        self.turnstile.inner.borrow().chain.has_failed_base(self.position)
    }

    /// Records that the change has failed. Observes the state that the store has seen when it
    /// refused the change.
    pub(crate) fn failed(mut self) -> Observation<'a> {
        self.is_concluded = true;
        let before = self.turnstile.inner.borrow().chain.before(self.position);
        let observation = self.turnstile.observe(before);
        self.conclude_failure();
        observation
    }

    /// Records that the change has failed, or that its outcome is unknown. Puts its old ticket back
    /// into the queue for a new turn. No later request gets a turn before this ticket.
    pub(crate) fn back_in_line(mut self) {
        self.is_concluded = true;
        self.turnstile.inner.borrow_mut().keep_place(self.ticket);
        self.conclude_failure();
    }

    fn conclude_failure(&self) {
        {
            let mut inner = self.turnstile.inner.borrow_mut();
            if inner.chain.failed(self.position) {
                inner.observers.withdrawn(self.position);
            }
            inner.wake_settling();
        }
        self.turnstile.wake_first();
    }
}

impl Drop for PendingChange<'_> {
    fn drop(&mut self) {
        if !self.is_concluded {
            self.conclude_failure();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: ObjectInfo = ObjectInfo { version: 1, size: 100, modified_ms: 0, manifest: None };

    fn pend(turn: Turn<'_>, incarnation: u64) -> PendingChange<'_> {
        turn.pend(incarnation, ModifiedRange::All, Some(INFO))
    }

    #[tokio::test]
    async fn turns_follow_the_order_of_tickets_not_of_arrival() {
        let turnstile = Turnstile::default();
        let held = turnstile.ticket();
        let held = held.enter(|| 1).await;
        let (a, b) = (turnstile.ticket(), turnstile.ticket());
        let order = RefCell::new(Vec::new());
        let run = async |ticket: &Ticket<'_>, name| {
            let _turn = ticket.enter(|| 1).await;
            order.borrow_mut().push(name);
        };
        let release = async { drop(held) };
        tokio::join!(run(&b, "b"), run(&a, "a"), release);
        assert_eq!(*order.borrow(), ["a", "b"]);
    }

    #[tokio::test]
    async fn no_request_overtakes_a_request_whose_outcome_was_lost() {
        let turnstile = Turnstile::default();
        let (lost, later) = (turnstile.ticket(), turnstile.ticket());
        let pending = pend(lost.enter(|| 1).await, 1);
        let mut waiting = Box::pin(later.enter(|| 2));
        assert!(
            poll_once(&mut waiting).is_none(),
            "the older request is pending from an earlier incarnation"
        );
        pending.back_in_line();
        assert!(poll_once(&mut waiting).is_none(), "the older request is first in the queue again");
        pend(lost.enter(|| 2).await, 2).committed();
        assert!(poll_once(&mut waiting).is_some());
    }

    #[tokio::test]
    async fn no_request_has_its_turn_while_a_change_is_pending_that_will_fail() {
        let turnstile = Turnstile::default();
        let (first, second, third) = (turnstile.ticket(), turnstile.ticket(), turnstile.ticket());
        let refused = pend(first.enter(|| 1).await, 1);
        let dependent = pend(second.enter(|| 1).await, 1);
        drop(refused.failed());
        let mut waiting = Box::pin(third.enter(|| 1));
        assert!(poll_once(&mut waiting).is_none(), "the dependent change will fail");
        dependent.back_in_line();
        assert!(poll_once(&mut waiting).is_none(), "the dependent change has an older ticket");
        pend(second.enter(|| 1).await, 1).committed();
        assert!(poll_once(&mut waiting).is_some());
    }

    #[tokio::test]
    async fn a_request_that_drops_its_ticket_blocks_no_other_request() {
        let turnstile = Turnstile::default();
        let (lost, later) = (turnstile.ticket(), turnstile.ticket());
        pend(lost.enter(|| 1).await, 1).back_in_line();
        let mut waiting = Box::pin(later.enter(|| 2));
        assert!(poll_once(&mut waiting).is_none());
        drop(lost);
        assert!(poll_once(&mut waiting).is_some());
    }

    #[tokio::test]
    async fn settled_waits_until_no_change_is_pending() {
        let turnstile = Turnstile::default();
        let (first, second) = (turnstile.ticket(), turnstile.ticket());
        let pending = pend(first.enter(|| 1).await, 1);
        let turn = second.enter(|| 1).await;
        let mut settled = Box::pin(turn.settled());
        assert!(poll_once(&mut settled).is_none());
        pending.committed();
        assert!(poll_once(&mut settled).is_some());
    }

    #[tokio::test]
    async fn no_request_overtakes_a_request_whose_turn_was_in_vain() {
        let turnstile = Turnstile::default();
        let (first, second) = (turnstile.ticket(), turnstile.ticket());
        drop(first.enter(|| 1).await);
        first.keep_place();
        let mut waiting = Box::pin(second.enter(|| 2));
        assert!(poll_once(&mut waiting).is_none(), "the older request is first in the queue again");
        pend(first.enter(|| 2).await, 2).committed();
        assert!(poll_once(&mut waiting).is_some());
    }

    #[tokio::test]
    async fn an_observer_waits_for_the_change_that_it_has_seen() {
        let turnstile = Turnstile::default();
        let (first, second, third) = (turnstile.ticket(), turnstile.ticket(), turnstile.ticket());
        let one = pend(first.enter(|| 1).await, 1);
        let turn = second.enter(|| 1).await;
        let (seen, no_pending) = (turn.observe(), turnstile.observe(ChainPosition::default()));
        let two = pend(turn, 1);
        let late = third.enter(|| 1).await.observe();
        assert!(matches!(poll_once(&mut Box::pin(no_pending.durable())), Some(Ok(()))));
        let (mut seen_durable, mut late_durable) = (Box::pin(seen.durable()), Box::pin(late.durable()));
        assert!(poll_once(&mut seen_durable).is_none() && poll_once(&mut late_durable).is_none());
        one.committed();
        assert!(matches!(poll_once(&mut seen_durable), Some(Ok(()))));
        assert!(poll_once(&mut late_durable).is_none());
        drop(two.failed());
        assert!(matches!(poll_once(&mut late_durable), Some(Err(Fail::Withdrawn))));
    }

    #[tokio::test]
    async fn an_observer_of_a_withdrawn_change_never_sees_it_as_durable() {
        let turnstile = Turnstile::default();
        let (first, second) = (turnstile.ticket(), turnstile.ticket());
        let one = pend(first.enter(|| 1).await, 1);
        let seen = second.enter(|| 1).await.observe();
        one.back_in_line();
        pend(first.enter(|| 1).await, 1).committed();
        assert!(matches!(seen.durable().await, Err(Fail::Withdrawn)));
    }

    #[tokio::test]
    async fn a_change_without_an_outcome_counts_as_failed() {
        let turnstile = Turnstile::default();
        let (first, second) = (turnstile.ticket(), turnstile.ticket());
        let dropped = pend(first.enter(|| 1).await, 1);
        assert_eq!(turnstile.latest(1), Some(Some(INFO)));
        drop(dropped);
        assert_eq!(turnstile.latest(1), None, "the state must be read again");
        let turn = second.enter(|| 1).await;
        assert!(turn.epoch() == 1 && !turn.has_pending());
    }

    #[tokio::test]
    async fn a_refused_change_observes_the_changes_before_it() {
        let turnstile = Turnstile::default();
        let (first, second) = (turnstile.ticket(), turnstile.ticket());
        let one = pend(first.enter(|| 1).await, 1);
        let seen = pend(second.enter(|| 1).await, 1).failed();
        let mut durable = Box::pin(seen.durable());
        assert!(poll_once(&mut durable).is_none(), "the refusal may rest on the first change");
        one.committed();
        assert!(matches!(poll_once(&mut durable), Some(Ok(()))));
    }

    fn poll_once<F: Future + Unpin>(f: &mut F) -> Option<F::Output> {
        let mut cx = std::task::Context::from_waker(Waker::noop());
        match std::pin::Pin::new(f).poll(&mut cx) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }
}
