//! Calls on members: how long a group waits for an answer, and when it continues without a member.
//!
//! A member that has not answered within the timeout is slow. The group continues without a slow
//! member only if enough other members in sync answer a probe. If the whole host is stalled, no
//! member answers, and all calls wait. A call on a member without which the group cannot continue
//! fails after the timeout `patience`. The caller may retry it.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{MaybeDone, join_all, maybe_done};
use futures::stream::{FuturesUnordered, StreamExt};
use store::{CollectionId, ObjectId, StoreCalls, StoreError, Transaction};
use tokio::time::Instant;

use crate::member::Member;
use crate::member_link::MemberLink;

/// Time after the start of calls on several members, during which the group only waits for answers.
const PROMPT: Duration = Duration::from_millis(50);
/// Why a call that has ended has an output.
const NOT_TAKEN: &str = "the output was not taken before";
/// Number of omap entries read per call.
const PAGE: usize = 1024;

/// State that a group needs for calls on its members.
pub(crate) struct Calls {
    /// The group's collection.
    cid: CollectionId,
    /// All targets of the node.
    targets: Rc<Vec<Rc<dyn Member>>>,
    /// Minimum number of members with which the group can continue.
    needed: usize,
    /// Time after which a member that has not answered is slow.
    pub(crate) member_timeout: Duration,
    /// Timeout of a call on a member without which the group cannot continue.
    pub(crate) patience: Duration,
    /// The members that are in sync in the current interval, or in the interval that is being
    /// opened.
    in_sync: RefCell<Vec<Rc<dyn Member>>>,
}

impl Calls {
    pub(crate) fn new(
        cid: CollectionId,
        targets: Rc<Vec<Rc<dyn Member>>>,
        needed: usize,
        member_timeout: Duration,
        patience: Duration,
    ) -> Calls {
        Calls { cid, targets, needed, member_timeout, patience, in_sync: RefCell::default() }
    }

    /// Replaces the list of members in sync.
    pub(crate) fn set_in_sync(&self, members: Vec<Rc<dyn Member>>) {
        *self.in_sync.borrow_mut() = members;
    }

    /// Waits for a member's answer to a call.
    ///
    /// # Errors
    /// The member's error, or [`StoreError::Disconnected`] if the group continues without the
    /// member or the timeout `patience` expires. After [`StoreError::Disconnected`], the call may
    /// still take effect. If it does, it takes effect before all transactions that are queued later
    /// on the member for the same collection.
    pub(crate) async fn answer<T>(
        &self,
        link: &MemberLink,
        call: impl Future<Output = store::Result<T>>,
    ) -> store::Result<T> {
        self.answer_since(Instant::now(), link, call).await
    }

    /// Waits for the answers to calls that were made at the same time, as [`answer`](Self::answer)
    /// does.
    pub(crate) async fn answers<F>(&self, calls: Vec<(MemberLink, F)>) -> Vec<(MemberLink, F::Output)>
    where
        F: Future<Output = store::Result<()>> + Unpin,
    {
        let began = Instant::now();
        let (links, calls): (Vec<MemberLink>, Vec<F>) = calls.into_iter().unzip();
        let mut calls: Vec<MaybeDone<F>> = calls.into_iter().map(maybe_done).collect();
        let all = poll_fn(|cx| {
            let is_done = |call: &mut MaybeDone<F>| Pin::new(call).poll(cx).is_ready();
            let open = calls.iter_mut().map(is_done).filter(|is_done| !is_done).count();
            if open == 0 { Poll::Ready(()) } else { Poll::Pending }
        });
        // Nearly all calls end promptly. One timer is enough for them.
        let has_slow = links.iter().any(|link| link.target.is_slow());
        let prompt = PROMPT.min(self.member_timeout);
        if !has_slow && tokio::time::timeout(prompt, all).await.is_ok() {
            let answers = calls.iter_mut().map(|call| Pin::new(call).take_output());
            return links.into_iter().zip(answers.map(|answer| answer.expect(NOT_TAKEN))).collect();
        }
        let answer = async |(link, call): (MemberLink, MaybeDone<F>)| {
            let answer = self.answer_since(began, &link, output(call)).await;
            (link, answer)
        };
        join_all(links.into_iter().zip(calls).map(answer)).await
    }

    /// Like [`answer`](Self::answer), for a call that was made at the time `began`.
    async fn answer_since<T>(
        &self,
        began: Instant,
        link: &MemberLink,
        call: impl Future<Output = store::Result<T>>,
    ) -> store::Result<T> {
        let mut call = pin!(call);
        tokio::select! {
            biased;
            answer = &mut call => return answer,
            () = tokio::time::sleep_until(began + self.member_timeout) => {}
            () = link.target.until_slow() => {}
        }
        tokio::select! {
            biased;
            answer = &mut call => answer,
            () = self.can_go_on_without(&link.target) => {
                link.target.overdue(&self.cid, self.member_timeout);
                Err(gone_slow(&*link.target, began.elapsed()))
            }
            () = tokio::time::sleep_until(began + self.patience) => {
                Err(gone_slow(&*link.target, self.patience))
            }
        }
    }

    /// Executes a transaction on one member. Any error other than a refusal or a lost connection
    /// marks the member's target as failed.
    pub(crate) async fn apply_to(&self, link: &MemberLink, transaction: Transaction) -> store::Result<()> {
        let queued = link.target.store().queue_transaction_in(link.incarnation, transaction);
        self.answer(link, queued).await.map_err(|e| link.classified(e))
    }

    /// Like [`apply_to`](Calls::apply_to), but a target does not fail because stored data is damaged.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if stored data is damaged.
    pub(crate) async fn apply_unless_damaged(
        &self,
        link: &MemberLink,
        transaction: Transaction,
    ) -> store::Result<()> {
        let queued = link.target.store().queue_transaction_in(link.incarnation, transaction);
        self.answer(link, queued).await.map_err(|e| match e {
            StoreError::Corrupt { .. } => e,
            e => link.classified(e),
        })
    }

    /// Reads all omap entries of an object whose keys are at least `from` and, if `to` is set, less
    /// than `to`.
    pub(crate) async fn all_entries(
        &self,
        link: &MemberLink,
        oid: &ObjectId,
        from: &Bytes,
        to: Option<&Bytes>,
    ) -> store::Result<Vec<(Bytes, Bytes)>> {
        let mut all = Vec::new();
        let mut from = from.clone();
        loop {
            let page = link.target.store().omap_iterate(&self.cid, oid, from.clone(), PAGE);
            let (page, more) = self.answer(link, page).await?;
            let next = page.last().map(|(last, _)| Bytes::from([last, &b"\0"[..]].concat()));
            let (before, count) = (all.len(), page.len());
            all.extend(page.into_iter().take_while(|(key, _)| to.is_none_or(|to| key < to)));
            match next {
                Some(next) if more && all.len() - before == count => from = next,
                _ => return Ok(all),
            }
        }
    }

    /// Resolves when enough members in sync, other than `slow`, have answered a probe.
    async fn can_go_on_without(&self, slow: &Rc<dyn Member>) {
        loop {
            let others: Vec<Rc<dyn Member>> = {
                let in_sync = self.in_sync.borrow();
                in_sync.iter().filter(|t| t.uuid() != slow.uuid() && t.is_usable()).cloned().collect()
            };
            if others.len() >= self.needed {
                let answers: FuturesUnordered<_> =
                    others.iter().map(|other| Rc::clone(other).answers()).collect();
                let enough = answers.take(self.needed).count();
                if tokio::time::timeout(self.member_timeout, enough).await.is_ok() {
                    return;
                }
            }
            // Try again after a pause, because other members may have returned by then.
            tokio::time::sleep(self.member_timeout / 4).await;
        }
    }

    /// Converts a [`StoreError::TooFewTargets`] to a temporary error if some targets may become
    /// usable again. Returns other errors unchanged.
    pub(crate) fn unless_hopeful(&self, e: StoreError) -> StoreError {
        if !matches!(e, StoreError::TooFewTargets { .. }) {
            return e;
        }
        let hopeful = self.targets.iter().filter(|t| t.is_hopeful());
        let tried: Vec<String> = hopeful
            .map(|t| {
                format!(
                    "target {} is not usable now, but may recover ({})",
                    t.uuid(),
                    t.failure().unwrap_or_default()
                )
            })
            .collect();
        if tried.is_empty() {
            return e;
        }
        StoreError::Disconnected(format!("{e}; {}", tried.join("; ")))
    }
}

/// Waits for a call. Its output must not have been taken.
async fn output<F: Future + Unpin>(mut call: MaybeDone<F>) -> F::Output {
    let mut call = Pin::new(&mut call);
    call.as_mut().await;
    call.take_output().expect(NOT_TAKEN)
}

/// The error of a call on a member that does not answer.
fn gone_slow(target: &dyn Member, waited: Duration) -> StoreError {
    StoreError::Disconnected(format!("target {} has not answered within {waited:?}", target.uuid()))
}
