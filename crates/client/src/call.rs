//! One request: sent, perhaps repeated, answered or given up.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use wire::RequestBody;

use crate::Error;
use crate::link::{Link, Shared};
use crate::pending::{Bulk, Outcome, Pending};

/// First pause before a request is repeated because the node asked for it; doubles up to a second.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Removes the request from the table when its caller is done with it or gives up.
struct Guard<'a> {
    shared: &'a Shared,
    seq: u64,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.shared.forget(self.seq);
    }
}

impl Link {
    /// Sends a request and waits for its answer, through reconnections, until the request's time is over. Dropping the
    /// future gives the request up; it may still take effect.
    pub(crate) async fn call(&self, body: impl Into<RequestBody>, bulk: Bulk) -> Outcome {
        let timeout = self.shared.options.request_timeout;
        let deadline = Instant::now() + timeout;
        let attempt = self.call_until(body.into(), bulk, deadline);
        tokio::time::timeout_at(deadline, attempt).await.unwrap_or(Err(Error::TimedOut(timeout)))
    }

    async fn call_until(&self, body: RequestBody, bulk: Bulk, deadline: Instant) -> Outcome {
        let shared = &*self.shared;
        let _permit = shared.permits.acquire().await.map_err(|_| Error::Closed)?;
        let pending = Pending::new(body, bulk, deadline);
        let seq = shared.enter(pending).await?;
        let guard = Guard { shared, seq };
        let mut pause = RETRY_PAUSE;
        loop {
            let (done, answer) = oneshot::channel();
            shared.send(guard.seq, done).await?;
            match answer.await.map_err(|_| Error::Closed)? {
                Err(Error::Node(e)) if e.is_transient() => {
                    tracing::debug!(seq, error = %e, "request is repeated");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
                outcome => return outcome,
            }
        }
    }
}
