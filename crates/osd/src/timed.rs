//! [`Timed`]: a store in the same process, whose calls count as host time of client requests.
//!
//! A store behind the host–DPU channel needs no such wrapper. Its proxy knows how much of a
//! request's time was transfer time and how much was host time.

use std::sync::Arc;

use base::mem::Arena;
use base::phases::{self, Phase};
use store::{ObjectStore, StoreFuture, StoreRequest, Submit};

/// A store whose calls are timed, each from its request to its reply.
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
