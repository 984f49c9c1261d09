//! [`Gate`]: lets requests in, and closes to wait until none is in progress.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Lets requests in while it is open. A snapshot closes it: it waits until all requests in progress have
/// ended, and keeps later requests waiting.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    inside: usize,
    is_closed: bool,
}

/// A request inside the gate. Dropping it lets the request out.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Gate);

/// A closed gate without requests inside. Dropping it opens the gate.
#[derive(Debug)]
pub(crate) struct Closed<'a>(&'a Gate);

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a request in. Waits while the gate is closed.
    pub(crate) async fn enter(&self) -> Inside<'_> {
        loop {
            let changed = self.changed.notified();
            {
                let mut state = self.lock();
                if !state.is_closed {
                    state.inside += 1;
                    return Inside(self);
                }
            }
            changed.await;
        }
    }

    /// Closes the gate, and waits until no request is inside. Waits while another caller has closed it.
    pub(crate) async fn close(&self) -> Closed<'_> {
        loop {
            let changed = self.changed.notified();
            {
                let mut state = self.lock();
                if !state.is_closed {
                    state.is_closed = true;
                    break;
                }
            }
            changed.await;
        }
        let closed = Closed(self);
        loop {
            let changed = self.changed.notified();
            if self.lock().inside == 0 {
                return closed;
            }
            changed.await;
        }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.inside -= 1;
        if state.inside == 0 && state.is_closed {
            self.0.changed.notify_waiters();
        }
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.lock().is_closed = false;
        self.0.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    async fn waits<T>(f: impl Future<Output = T>) -> bool {
        timeout(Duration::from_millis(20), f).await.is_err()
    }

    #[tokio::test]
    async fn a_closed_gate_has_no_request_inside_and_lets_none_in() {
        let gate = Gate::default();
        let (a, b) = (gate.enter().await, gate.enter().await);
        let mut closing = Box::pin(gate.close());
        assert!(waits(&mut closing).await);
        assert!(waits(gate.enter()).await, "the gate is closing");
        drop(a);
        assert!(waits(&mut closing).await);
        drop(b);
        let closed = closing.await;
        assert!(waits(gate.enter()).await && waits(gate.close()).await);
        drop(closed);
        drop(gate.enter().await);
        drop(gate.close().await);
    }

    #[tokio::test]
    async fn a_caller_that_gives_up_closing_opens_the_gate() {
        let gate = Gate::default();
        let inside = gate.enter().await;
        assert!(waits(gate.close()).await);
        drop(gate.enter().await);
        drop(inside);
    }
}
