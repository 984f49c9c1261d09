//! A DMA engine whose first calls fail, as often as a test requests.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Context;
use std::time::Duration;

use base::mem::OutsideAccess;
use channel::{
    Chain, ChainCompletion, ChannelError, Counters, DmaEngine, DmaRegion, EnginePeer, EngineTuning, Joined,
    MemoryAccess, OnDrop, QueueId, Reach, RegionId, RejectedChain,
};
use futures::future::BoxFuture;

/// Wraps another engine. The first `refusals` attempts to attach fail, and the first `bad_windows`
/// registrations of peer memory return an unknown region.
pub struct Unlucky {
    pub engine: Arc<dyn DmaEngine>,
    /// Number of further attempts to attach that will fail.
    pub refusals: AtomicUsize,
    /// Number of further registrations of peer memory for which the engine will return an unknown
    /// region. Chains that use this region fail. The registration of a region at the start of peer
    /// memory is never affected.
    pub bad_windows: AtomicUsize,
}

impl Unlucky {
    pub fn new(engine: Arc<dyn DmaEngine>) -> Unlucky {
        Unlucky { engine, refusals: 0.into(), bad_windows: 0.into() }
    }
}

fn goes_wrong(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

// SAFETY: the inner engine makes all transfers.
unsafe impl DmaEngine for Unlucky {
    fn name(&self) -> &str {
        "unlucky"
    }
    fn is_emulated(&self) -> bool {
        self.engine.is_emulated()
    }
    fn max_transfer(&self) -> usize {
        self.engine.max_transfer()
    }
    fn queues(&self) -> usize {
        self.engine.queues()
    }
    fn queue_depth(&self) -> usize {
        self.engine.queue_depth()
    }
    fn setup_cost(&self) -> Duration {
        self.engine.setup_cost()
    }
    fn register_local(&self, memory: &OutsideAccess) -> channel::Result<DmaRegion> {
        self.engine.register_local(memory)
    }
    fn reach(&self) -> Reach {
        self.engine.reach()
    }
    fn attaches_anew(&self) -> bool {
        self.engine.attaches_anew()
    }
    fn attach(&self, access: MemoryAccess, len: usize) -> BoxFuture<'_, channel::Result<Joined>> {
        if goes_wrong(&self.refusals) {
            return Box::pin(async { Err(ChannelError::Refused("no route".to_owned())) });
        }
        self.engine.attach(access, len)
    }
    fn register_peer(&self, peer: &EnginePeer, range: Range<usize>) -> channel::Result<DmaRegion> {
        if range.start > 0 && goes_wrong(&self.bad_windows) {
            return Ok(DmaRegion::new(RegionId::NONE, range.len(), OnDrop::new(|| ())));
        }
        self.engine.register_peer(peer, range)
    }
    fn post(&self, queue: QueueId, chain: Chain) -> Result<(), RejectedChain> {
        self.engine.post(queue, chain)
    }
    fn poll_completions(&self, cx: &mut Context<'_>, out: &mut Vec<ChainCompletion>) {
        self.engine.poll_completions(cx, out);
    }
    fn tune(&self, tuning: EngineTuning) {
        self.engine.tune(tuning);
    }
    fn reset(&self) {
        self.engine.reset();
    }
    fn counters(&self) -> Counters {
        self.engine.counters()
    }
}
