//! Table of changes in flight. A retry joins the running attempt instead of racing with it.

use std::cell::RefCell;
use std::collections::hash_map::Entry;

use base::collections::HashMap;
use base::watch;
use wire::{Mutated, SessionId};

/// Outcome of a change; `None` while the change is running.
type ChangeOutcome = Option<wire::Result<Mutated>>;

/// The changes in flight.
#[derive(Default)]
pub(crate) struct InFlight {
    changes: RefCell<HashMap<(SessionId, u64), watch::Receiver<ChangeOutcome>>>,
}

/// Result of claiming a request's number.
pub(crate) enum RequestClaim<'a> {
    /// No other attempt is running; the caller must execute the change.
    First(RunningChange<'a>),
    /// An earlier attempt is still running; the receiver gets its outcome.
    Join(watch::Receiver<ChangeOutcome>),
}

/// A change in flight. Dropping it removes it from the table.
pub(crate) struct RunningChange<'a> {
    table: &'a InFlight,
    id: (SessionId, u64),
    outcome: watch::Sender<ChangeOutcome>,
}

impl InFlight {
    /// Claims the number `seq` of a session's request.
    pub(crate) fn claim(&self, session: SessionId, seq: u64) -> RequestClaim<'_> {
        match self.changes.borrow_mut().entry((session, seq)) {
            Entry::Occupied(running) => RequestClaim::Join(running.get().clone()),
            Entry::Vacant(free) => {
                let (outcome, receiver) = watch::channel(None);
                free.insert(receiver);
                RequestClaim::First(RunningChange { table: self, id: (session, seq), outcome })
            }
        }
    }
}

impl InFlight {
    /// Waits until the session has no change in flight.
    pub(crate) async fn until_idle(&self, session: SessionId) {
        loop {
            let running = {
                let changes = self.changes.borrow();
                changes.iter().find(|((of, _), _)| *of == session).map(|(_, running)| running.clone())
            };
            let Some(running) = running else { return };
            drop(joined(running).await);
            // The change leaves the table when its task runs again.
            tokio::task::yield_now().await;
        }
    }
}

impl RunningChange<'_> {
    /// Passes the result to the retries that joined this attempt.
    pub(crate) fn finish(self, result: &wire::Result<Mutated>) {
        self.outcome.send_replace(Some(result.clone()));
    }
}

impl Drop for RunningChange<'_> {
    fn drop(&mut self) {
        self.table.changes.borrow_mut().remove(&self.id);
    }
}

/// Waits for the outcome of the joined attempt; `None` if the attempt was dropped without an
/// outcome.
pub(crate) async fn joined(mut attempt: watch::Receiver<ChangeOutcome>) -> ChangeOutcome {
    attempt.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone())
}
