//! The contract of a DMA engine.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use base::mem::Arena;
use futures::future::BoxFuture;

use crate::{ChannelError, MemoryAccess, Reach, Result};

/// Number of a registered region. Only the engine that assigned the number knows its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionId(pub u32);

/// Runs a closure when it is dropped.
pub struct OnDrop(Option<Box<dyn FnOnce() + Send + Sync>>);

impl OnDrop {
    /// Runs `action` when dropped.
    #[must_use]
    pub fn new(action: impl FnOnce() + Send + Sync + 'static) -> OnDrop {
        OnDrop(Some(Box::new(action)))
    }
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(action) = self.0.take() {
            action();
        }
    }
}

impl std::fmt::Debug for OnDrop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OnDrop")
    }
}

/// Memory that an engine may read and write. Dropping the region unregisters it, after all chains
/// that were posted before.
#[derive(Debug)]
pub struct DmaRegion {
    id: RegionId,
    len: usize,
    _unregister: OnDrop,
}

impl DmaRegion {
    /// Creates a region whose registration ends with `unregister`. For engines.
    #[must_use]
    pub fn new(id: RegionId, len: usize, unregister: OnDrop) -> DmaRegion {
        DmaRegion { id, len, _unregister: unregister }
    }

    /// The region's number.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// Length, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a region has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// A location in a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaAddress {
    /// The region.
    pub region: RegionId,
    /// Offset from the region's start, in bytes.
    pub offset: usize,
}

/// One copy of `len` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The source.
    pub src: DmaAddress,
    /// The destination.
    pub dst: DmaAddress,
    /// Number of bytes, at most the engine's [`max_transfer`](DmaEngine::max_transfer).
    pub len: usize,
}

/// Number of a queue of an engine. Queue [`URGENT`] is for short chains.
pub type QueueId = usize;

/// The queue for short chains: ring entries and the fetches of entries. If all queues share one
/// device (`shm`), the engine serves this queue before the others. If each queue has its own
/// connection (`ofi`), all queues are equal.
pub const URGENT: QueueId = 0;

/// Transfers that are performed in order, then a doorbell, then a completion. The first failure
/// ends the chain: the engine skips the rest and reports the completion. The chains of one queue
/// run in the order in which they were posted, so an empty chain is a fence. Chains of different
/// queues run in any order.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    /// The transfers.
    pub transfers: Vec<Transfer>,
    /// The peer's doorbell and the count to add to it after the last transfer. An engine may ring
    /// once for several chains.
    pub ring: Option<(PeerId, u64)>,
    /// Returned in the completion. A chain without a tag has a completion only if it fails, with
    /// tag 0.
    pub tag: Option<u64>,
}

impl Chain {
    /// Total length of all transfers, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.transfers.iter().map(|t| t.len).sum()
    }

    /// Whether the chain has nothing to move, as a fence.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.transfers.is_empty()
    }
}

/// The completion of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainCompletion {
    /// The chain's tag.
    pub tag: u64,
    /// Why the chain failed, if it did.
    pub result: Result<(), ChainFailure>,
    /// When the chain's first transfer began. Before that, the chain waited.
    pub started: Instant,
    /// When the chain's last transfer ended.
    pub finished: Instant,
}

/// A chain that failed before its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a DMA transfer failed: {why}")]
pub struct ChainFailure {
    /// Number of transfers that were complete before the failure. They remain in effect.
    pub done: usize,
    /// The cause.
    pub why: String,
}

/// A chain that the engine did not accept.
#[derive(Debug)]
pub enum RejectedChain {
    /// The queue is full. The engine wakes the waker of [`DmaEngine::poll_completions`] when there
    /// is room again.
    Full(Chain),
    /// The chain is invalid.
    Refused(ChannelError),
}

/// Reports bytes that were put into a ring. Only one task may wait for it.
pub trait Bell: Send {
    /// Takes the count of new bytes once it is not zero.
    ///
    /// # Errors
    /// Fails if no more counts can arrive.
    fn poll_wait(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<u64>>;
}

/// Number of a peer that the engine is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerId(pub u32);

/// A store's process that an engine is attached to. Dropping it detaches the peer, after all chains
/// that were posted before.
pub struct EnginePeer {
    /// The peer's number.
    pub id: PeerId,
    /// Length of the peer's memory, in bytes.
    pub len: usize,
    /// Detaches the peer when dropped.
    pub detach: OnDrop,
}

/// Settings of an engine that can change while it runs. `None` keeps the current value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineTuning {
    /// Maximum length of a transfer, in bytes. The device's own limit still applies.
    pub max_transfer: Option<usize>,
    /// How long software polls for the device's completions before it sleeps.
    pub spin: Option<Duration>,
}

/// A peer, and the doorbell on which it reports bytes.
pub type Joined = (EnginePeer, Box<dyn Bell>);

/// Counters of an engine since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes copied.
    pub bytes: u64,
    /// Transfers made.
    pub transfers: u64,
    /// Doorbells rung.
    pub doorbells: u64,
    /// Chains that failed.
    pub failed: u64,
}

/// Moves bytes between DPU memory and host memory. The osd's process owns the engine.
///
/// A peer's memory arrives as a descriptor or an offer, and the caller gets only a number for it.
/// The only access to that memory is to post transfers. All methods may be called from any thread,
/// and none of them blocks.
pub trait DmaEngine: Send + Sync {
    /// The engine's name for people and metrics, e.g. `shm`.
    fn name(&self) -> &str;

    /// Whether CPU time of this machine replaces hardware.
    fn is_emulated(&self) -> bool;

    /// Maximum length of a transfer, in bytes.
    fn max_transfer(&self) -> usize;

    /// Number of queues, at least one. A chain never waits for a whole chain of another queue, at
    /// most for its current transfer.
    fn queues(&self) -> usize;

    /// Maximum number of chains per queue that are posted and not complete.
    fn queue_depth(&self) -> usize;

    /// Fixed time that each chain of payload costs, regardless of its length. If it is not zero,
    /// longer chains are better.
    fn setup_cost(&self) -> Duration;

    /// Registers memory of this process.
    ///
    /// # Errors
    /// Fails if the engine has no room for another region.
    fn register_local(&self, arena: &Arc<Arena>) -> Result<DmaRegion>;

    /// How the engine reaches host memory. The osd asks the store for this kind of access.
    fn reach(&self) -> Reach;

    /// Whether a peer must make a new offer and the engine must attach again after a failure. For
    /// such an engine, only the end of the old offer guarantees that no earlier transfer arrives
    /// late.
    fn attaches_anew(&self) -> bool;

    /// Attaches to a store's process, through the access that the process sent: `len` bytes of
    /// memory and two doorbells. Also returns the doorbell that the peer rings. Await the future
    /// within a tokio runtime, which then serves the doorbell. The engine limits the time that
    /// attaching takes. Dropping the future cancels it.
    ///
    /// # Errors
    /// [`ChannelError::WrongMemoryAccess`]. Also fails if the memory is not sealed or has another
    /// length, or if the peer cannot be reached.
    fn attach(&self, access: MemoryAccess, len: usize) -> BoxFuture<'_, Result<Joined>>;

    /// Registers part of a peer's memory. If the registration fails later, the chains that use it
    /// fail.
    ///
    /// # Errors
    /// Fails if the range is outside the memory, or if the engine has no room for another region.
    fn register_peer(&self, peer: &EnginePeer, range: Range<usize>) -> Result<DmaRegion>;

    /// Queues a chain. The memory that the chain names must stay valid and unchanged until the
    /// chain completes.
    ///
    /// # Errors
    /// See [`RejectedChain`].
    fn post(&self, queue: QueueId, chain: Chain) -> std::result::Result<(), RejectedChain>;

    /// Appends new completions to `out`, and registers `cx` to be woken when there are more. Only
    /// one caller at a time.
    fn poll_completions(&self, cx: &mut Context<'_>, out: &mut Vec<ChainCompletion>);

    /// Changes settings of the running engine.
    fn tune(&self, tuning: EngineTuning);

    /// Cancels all incomplete chains. They complete as failed, and none of them accesses memory
    /// after that.
    fn reset(&self);

    /// The engine's counters.
    fn counters(&self) -> Counters;
}
