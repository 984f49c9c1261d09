//! [`Turnstile`]: the order of the requests on one object.
//!
//! Every request draws a ticket. One request at a time has its *turn*, in the order of the tickets.
//! During its turn, a request inspects the object and queues its transaction. It then ends its
//! turn, and its transaction is *pending*.
//!
//! A request that depends on the outcome of other requests waits, during its turn, until no
//! transaction is pending. A *blind* change modifies nothing that other requests depend on.
//! Several blind changes may be pending at the same time. A blind change still waits for pending
//! changes that are not blind, because the object's state is uncertain until their outcome is
//! known.
//!
//! When the store becomes unreachable, the pending requests and the request in turn wait for a new
//! turn with their old tickets. No later request overtakes them: a ticket gets no turn while an older ticket is pending
//! from an earlier incarnation.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// The order of the requests on one object.
#[derive(Default)]
pub(crate) struct Turnstile {
    inner: RefCell<Inner>,
}

#[derive(Default)]
struct Inner {
    next_ticket: u64,
    in_turn: Option<u64>,
    waiting: BTreeMap<u64, Waker>,
    pending: BTreeMap<u64, QueuedOp>,
    settling: Option<Waker>,
}

/// State of a pending request.
struct QueuedOp {
    incarnation: u64,
    blind: bool,
}

impl Inner {
    /// Keeps a ticket's position in the queue until the request actually waits.
    fn keep_place(&mut self, ticket: u64) {
        // The waker has no effect.
        self.waiting.insert(ticket, Waker::noop().clone());
    }
}

impl Turnstile {
    /// Draws a ticket.
    pub(crate) fn ticket(&self) -> Ticket<'_> {
        let mut inner = self.inner.borrow_mut();
        inner.next_ticket += 1;
        Ticket { turnstile: self, number: inner.next_ticket }
    }

    fn wake_first(&self) {
        let inner = self.inner.borrow();
        if let (None, Some((_, waker))) = (inner.in_turn, inner.waiting.first_key_value()) {
            waker.wake_by_ref();
        }
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
            if first && inner.in_turn.is_none() {
                let now = incarnation();
                if inner.pending.range(..self.number).all(|(_, queued)| queued.incarnation == now) {
                    inner.waiting.remove(&self.number);
                    inner.in_turn = Some(self.number);
                    return Poll::Ready(());
                }
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
    /// Waits until no request is pending.
    pub(crate) async fn settled(&self) {
        poll_fn(|cx| {
            let mut inner = self.turnstile.inner.borrow_mut();
            if inner.pending.is_empty() {
                return Poll::Ready(());
            }
            inner.settling = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Returns whether all pending requests are blind. If so, neither their
    /// success nor their failure changes the object's size, or whether the object is striped.
    pub(crate) fn follows_blind_ones(&self) -> bool {
        let inner = self.turnstile.inner.borrow();
        inner.pending.values().all(|queued| queued.blind)
    }

    /// Ends the turn after a transaction was queued in `incarnation`. The transaction is pending
    /// until the returned value is dropped. `blind` says that the transaction changes nothing that
    /// other requests depend on, whether it succeeds or not.
    pub(crate) fn pend(self, incarnation: u64, blind: bool) -> PendingTransaction<'a> {
        self.turnstile.inner.borrow_mut().pending.insert(self.ticket, QueuedOp { incarnation, blind });
        PendingTransaction { turnstile: self.turnstile, ticket: self.ticket }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turnstile.inner.borrow_mut().in_turn = None;
        self.turnstile.wake_first();
    }
}

/// A pending transaction. The owner drops this value when the transaction's outcome is known.
pub(crate) struct PendingTransaction<'a> {
    turnstile: &'a Turnstile,
    ticket: u64,
}

impl PendingTransaction<'_> {
    /// Ends the pending state, and puts the old ticket back into the queue for a new turn. No later
    /// request gets a turn before this ticket.
    pub(crate) fn back_in_line(self) {
        self.turnstile.inner.borrow_mut().keep_place(self.ticket);
    }
}

impl Drop for PendingTransaction<'_> {
    fn drop(&mut self) {
        let mut inner = self.turnstile.inner.borrow_mut();
        inner.pending.remove(&self.ticket);
        if let Some(settling) = inner.settling.take() {
            settling.wake();
        }
        drop(inner);
        self.turnstile.wake_first();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let pending = lost.enter(|| 1).await.pend(1, false);
        let mut waiting = Box::pin(later.enter(|| 2));
        assert!(
            poll_once(&mut waiting).is_none(),
            "the older request is pending from an earlier incarnation"
        );
        pending.back_in_line();
        assert!(poll_once(&mut waiting).is_none(), "the older request is first in the queue again");
        drop(lost.enter(|| 2).await.pend(2, false));
        assert!(poll_once(&mut waiting).is_some());
    }

    #[tokio::test]
    async fn a_request_that_drops_its_ticket_blocks_no_other_request() {
        let turnstile = Turnstile::default();
        let (lost, later) = (turnstile.ticket(), turnstile.ticket());
        lost.enter(|| 1).await.pend(1, false).back_in_line();
        let mut waiting = Box::pin(later.enter(|| 2));
        assert!(poll_once(&mut waiting).is_none());
        drop(lost);
        assert!(poll_once(&mut waiting).is_some());
    }

    #[tokio::test]
    async fn settled_waits_until_no_request_is_pending() {
        let turnstile = Turnstile::default();
        let (first, second) = (turnstile.ticket(), turnstile.ticket());
        let pending = first.enter(|| 1).await.pend(1, false);
        let turn = second.enter(|| 1).await;
        let mut settled = Box::pin(turn.settled());
        assert!(poll_once(&mut settled).is_none());
        drop(pending);
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
        drop(first.enter(|| 2).await.pend(2, false));
        assert!(poll_once(&mut waiting).is_some());
    }

    #[tokio::test]
    async fn settled_also_waits_for_a_request_that_has_overtaken() {
        let turnstile = Turnstile::default();
        let (first, second) = (turnstile.ticket(), turnstile.ticket());
        let pending = second.enter(|| 1).await.pend(1, false);
        let turn = first.enter(|| 1).await;
        assert!(!turn.follows_blind_ones());
        let mut settled = Box::pin(turn.settled());
        assert!(poll_once(&mut settled).is_none());
        drop(pending);
        assert!(poll_once(&mut settled).is_some());
    }

    #[tokio::test]
    async fn a_turn_follows_blind_changes_only_if_all_older_pending_changes_are_blind() {
        let turnstile = Turnstile::default();
        let (first, second, third) = (turnstile.ticket(), turnstile.ticket(), turnstile.ticket());
        let sighted = first.enter(|| 1).await.pend(1, false);
        let turn = second.enter(|| 1).await;
        assert!(!turn.follows_blind_ones());
        drop(sighted);
        assert!(turn.follows_blind_ones(), "nothing is pending");
        let blind = turn.pend(1, true);
        let turn = third.enter(|| 1).await;
        assert!(turn.follows_blind_ones());
        drop(blind);
    }

    fn poll_once<F: Future + Unpin>(f: &mut F) -> Option<F::Output> {
        let mut cx = std::task::Context::from_waker(Waker::noop());
        match std::pin::Pin::new(f).poll(&mut cx) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }
}
