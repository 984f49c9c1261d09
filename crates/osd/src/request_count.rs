//! [`RequestCount`]: the number of requests in progress on a shard.

use std::cell::Cell;

/// Counts the requests in progress, and all requests since the shard started.
#[derive(Default)]
pub(crate) struct RequestCount {
    now: Cell<u32>,
    completed: Cell<u64>,
}

/// A request in progress. Dropping it ends the request.
pub(crate) struct CountedRequest<'a>(&'a RequestCount);

impl RequestCount {
    /// Records that a request begins.
    pub(crate) fn enter(&self) -> CountedRequest<'_> {
        self.now.set(self.now.get() + 1);
        CountedRequest(self)
    }

    /// Returns the number of requests in progress.
    pub(crate) fn now(&self) -> u32 {
        self.now.get()
    }

    /// Returns the number of requests that have ended.
    pub(crate) fn completed(&self) -> u64 {
        self.completed.get()
    }
}

impl Drop for CountedRequest<'_> {
    fn drop(&mut self) {
        let left = self.0.now.get().checked_sub(1).expect("a request that ends was counted");
        self.0.now.set(left);
        self.0.completed.set(self.0.completed.get() + 1);
    }
}
