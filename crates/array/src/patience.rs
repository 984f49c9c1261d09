//! Waiting for members: how long, and when the group goes on without one.
//!
//! A member that has not answered in time is slow. The group goes on without it only if enough other members in sync answer when
//! they are asked then: if the whole host stands still none does, and everything waits. A call on a member that the group cannot
//! do without is given up after the group's patience; it may be made again then.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use store::StoreError;
use tokio::time::Instant;

use crate::group::{Group, MemberLink};
use crate::member::Member;

impl Group {
    /// What a member answers.
    ///
    /// # Errors
    /// Besides the member's: [`StoreError::Disconnected`] if the group goes on without the member, or has run out of
    /// patience. The call may still take effect, but not after a transaction that is queued later in the same collection.
    pub(super) async fn answer<T>(
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

    /// Resolves when enough members in sync answer, besides one.
    pub(super) async fn can_go_on_without(&self, slow: &Rc<dyn Member>) {
        loop {
            let others: Vec<Rc<dyn Member>> = {
                let in_sync = self.in_sync.borrow();
                in_sync.iter().filter(|t| t.uuid() != slow.uuid() && t.is_usable()).cloned().collect()
            };
            if others.len() >= self.layout.k {
                let answers: FuturesUnordered<_> =
                    others.iter().map(|other| Rc::clone(other).answers()).collect();
                let enough = answers.take(self.layout.k).count();
                if tokio::time::timeout(self.member_timeout, enough).await.is_ok() {
                    return;
                }
            }
            // Others may have come back by then.
            tokio::time::sleep(self.member_timeout / 4).await;
        }
    }

    /// An error that too few targets are there, as one that passes if some of them are being tried again.
    pub(super) fn unless_hopeful(&self, e: StoreError) -> StoreError {
        if !matches!(e, StoreError::TooFewTargets { .. }) {
            return e;
        }
        let hopeful = self.targets.iter().filter(|t| t.is_hopeful());
        let tried: Vec<String> = hopeful
            .map(|t| format!("target {} is tried again ({})", t.uuid(), t.failure().unwrap_or_default()))
            .collect();
        if tried.is_empty() {
            return e;
        }
        StoreError::Disconnected(format!("{e}; {}", tried.join("; ")))
    }
}

/// What a call on a member that does not answer fails with.
pub(super) fn gone_slow(target: &dyn Member, waited: Duration) -> StoreError {
    StoreError::Disconnected(format!("target {} has not answered in {waited:?}", target.uuid()))
}
