//! [`Timed`]: wraps a store in the same process, and counts the time of each call as host time of
//! the client request that made the call.
//!
//! A store behind the host–DPU channel is not wrapped. Its proxy measures how much of a request's
//! time was DMA time, and how much was host time.

use std::sync::Arc;

use base::mem::Arena;
use base::phases::{self, Phase};
use store::{ObjectStore, StoreFuture, StoreRequest, Submit};

/// A store that measures the time of each call, from the call to its reply.
pub(crate) struct Timed(pub(crate) Arc<dyn ObjectStore>);

impl Submit for Timed {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let clock = match &request {
            StoreRequest::StageRelease { .. } => None,
            _ => phases::current(),
        };
        let Some(clock) = clock else { return self.0.submit(request) };
        let lasting = clock.begin(Phase::Host);
        let reply = self.0.submit(request);
        Box::pin(async move {
            let reply = reply.await;
            drop(lasting);
            reply
        })
    }

    fn incarnation(&self) -> u64 {
        self.0.incarnation()
    }

    fn stage_alignment(&self) -> u64 {
        self.0.stage_alignment()
    }

    fn register_memory(&self, arena: &Arc<Arena>) {
        self.0.register_memory(arena);
    }
}

#[cfg(test)]
mod tests {
    use base::phases::Clock;
    use store::{MemStore, conformance};

    use super::*;

    #[tokio::test]
    async fn a_timed_store_passes_the_conformance_suite() {
        let make = || async { Arc::new(Timed(Arc::new(MemStore::new()))) as Arc<dyn ObjectStore> };
        conformance::run(make).await;
        let clock = Clock::start();
        clock.scope(conformance::run(make)).await;
        assert!(clock.finish().host_ns > 0, "the time of the calls is measured");
    }
}
