//! Calls on members: how long a group waits for an answer, and when it continues without a member.
//!
//! A member that has not answered within the timeout is slow. The group continues without a slow
//! member only if enough other members in sync answer a probe at that time. If the whole host is
//! stalled, no member answers, and all calls wait. A call on a member that the group needs fails
//! after the group's patience. The caller may retry it.

use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt};
use store::{CollectionId, ObjectId, StoreCalls, StoreError, Transaction};
use tokio::time::Instant;

use crate::member::Member;
use crate::member_link::MemberLink;

/// Omap entries read per call.
const PAGE: usize = 1024;

/// State that a group needs for calls on its members.
pub(crate) struct Calls {
    /// The group's collection.
    cid: CollectionId,
    /// All targets of the node.
    targets: Rc<Vec<Rc<dyn Member>>>,
    /// Number of members that the group needs.
    needed: usize,
    /// Time after which a member that has not answered is slow.
    pub(crate) member_timeout: Duration,
    /// Time that a call waits for a member that the group needs.
    pub(crate) patience: Duration,
    /// Members in sync of the current interval, or of the interval that is being opened.
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

    /// Sets the members in sync.
    pub(crate) fn set_in_sync(&self, members: Vec<Rc<dyn Member>>) {
        *self.in_sync.borrow_mut() = members;
    }

    /// Waits for a member's answer to a call.
    ///
    /// # Errors
    /// The member's error, or [`StoreError::Disconnected`] if the group continues without the
    /// member or has run out of patience. After [`StoreError::Disconnected`] the call may still
    /// take effect, but only before all transactions that are queued later in the same collection.
    pub(crate) async fn answer<T>(
        &self,
        link: &MemberLink,
        call: impl Future<Output = store::Result<T>>,
    ) -> store::Result<T> {
        let began = Instant::now();
        let mut call = pin!(call);
        tokio::select! {
            biased;
            answer = &mut call => return answer,
            () = tokio::time::sleep(self.member_timeout) => {}
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

    /// Executes a transaction on one member. Any error other than a refusal marks the member's
    /// target as failed.
    pub(crate) async fn apply_to(&self, link: &MemberLink, transaction: Transaction) -> store::Result<()> {
        let queued = link.target.store().queue_transaction_in(link.incarnation, transaction);
        self.answer(link, queued).await.map_err(|e| link.classified(e))
    }

    /// Reads all omap entries of an object with keys from `from` on and, if `to` is set, before
    /// `to`.
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

    /// Turns an error about too few targets into a temporary one if some targets may become usable
    /// again.
    pub(crate) fn unless_hopeful(&self, e: StoreError) -> StoreError {
        if !matches!(e, StoreError::TooFewTargets { .. }) {
            return e;
        }
        let hopeful = self.targets.iter().filter(|t| t.is_hopeful());
        let tried: Vec<String> = hopeful
            .map(|t| format!("target {} will be tried again ({})", t.uuid(), t.failure().unwrap_or_default()))
            .collect();
        if tried.is_empty() {
            return e;
        }
        StoreError::Disconnected(format!("{e}; {}", tried.join("; ")))
    }
}

/// The error of a call on a member that does not answer.
fn gone_slow(target: &dyn Member, waited: Duration) -> StoreError {
    StoreError::Disconnected(format!("target {} has not answered in {waited:?}", target.uuid()))
}
