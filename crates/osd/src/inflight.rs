//! Changes under way, so that a retry joins the first attempt instead of racing it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use tokio::sync::watch;
use wire::{Mutated, SessionId};

/// What became of a change; `None` while it goes on.
type ChangeOutcome = Option<wire::Result<Mutated>>;

/// See the [module](self) documentation.
#[derive(Default)]
pub(crate) struct InFlight {
    changes: RefCell<HashMap<(SessionId, u64), watch::Receiver<ChangeOutcome>>>,
}

/// A request's relation to the table.
pub(crate) enum RequestClaim<'a> {
    /// It is the only one.
    First(RunningChange<'a>),
    /// An earlier attempt is still running.
    Join(watch::Receiver<ChangeOutcome>),
}

/// A change under way; out of the table when dropped.
pub(crate) struct RunningChange<'a> {
    table: &'a InFlight,
    id: (SessionId, u64),
    outcome: watch::Sender<ChangeOutcome>,
}

impl InFlight {
    /// Claims a request's number.
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

impl RunningChange<'_> {
    /// Tells those who joined.
    pub(crate) fn finish(self, result: &wire::Result<Mutated>) {
        self.outcome.send_replace(Some(result.clone()));
    }
}

impl Drop for RunningChange<'_> {
    fn drop(&mut self) {
        self.table.changes.borrow_mut().remove(&self.id);
    }
}

/// Waits for the outcome of the attempt that was joined; `None` if it went away without one.
pub(crate) async fn joined(mut attempt: watch::Receiver<ChangeOutcome>) -> ChangeOutcome {
    attempt.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone())
}
