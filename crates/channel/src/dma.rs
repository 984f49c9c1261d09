//! The contract between a DMA engine and its callers.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use base::clock::Instant;
use base::mem::OutsideAccess;
use futures::future::BoxFuture;

use crate::{ChannelError, MemoryAccess, Reach, Result};

/// Number of a memory region that is registered with an engine. Only this engine can find the
/// memory by the number. Code that has the number can read and change the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionId(pub(crate) u32);

impl RegionId {
    /// A number that no engine assigns.
    pub const NONE: RegionId = RegionId(u32::MAX);
}

/// Runs a closure when it is dropped.
pub struct OnDrop(Option<Box<dyn FnOnce() + Send + Sync>>);

impl OnDrop {
    /// Creates a value that runs `action` when it is dropped.
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

/// Memory that an engine may read and write. Dropping the region unregisters it. Chains that were
/// posted before the drop can still use it.
#[derive(Debug)]
pub struct DmaRegion {
    id: RegionId,
    len: usize,
    _unregister: OnDrop,
}

impl DmaRegion {
    /// Creates a region. Only engines call this function. Dropping the region drops `unregister`,
    /// which must end the registration.
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

    /// Whether the region has no bytes. This is never true for a registered region.
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

/// A copy of `len` bytes from `src` to `dst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The source.
    pub src: DmaAddress,
    /// The destination.
    pub dst: DmaAddress,
    /// Number of bytes, at most the engine's [`max_transfer`](DmaEngine::max_transfer).
    pub len: usize,
}

/// Index of one of the engine's queues. Queue [`URGENT`] is for short chains.
pub type QueueId = usize;

/// The queue for short chains, which send or fetch ring entries. If all queues share one device
/// (`shm`), the engine serves this queue before the others. If each queue has its own connection
/// (`ofi`), all queues have the same priority.
pub const URGENT: QueueId = 0;

/// A list of transfers that the engine performs in order. After the last transfer, the engine rings
/// a doorbell and reports a completion, if the chain asks for them. If a transfer fails, the engine
/// skips the rest of the chain and reports the failure. The chains of one queue run in the order in
/// which they were posted. An empty chain is therefore a fence: it completes after all earlier
/// chains of its queue. Chains of different queues run in any order.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    /// The transfers.
    pub transfers: Vec<Transfer>,
    /// The peer whose doorbell the engine rings after the last transfer, and the count to add to
    /// the doorbell. An engine may ring once for several chains.
    pub ring: Option<(PeerId, u64)>,
    /// A number that the completion repeats. A chain without a tag has a completion only if the
    /// chain fails. That completion has tag 0.
    pub tag: Option<u64>,
    /// Where the engine records the chain's times, also without a completion.
    pub times: Option<Arc<ChainTimes>>,
    /// The client's request to which the payload belongs, if it is known. An emulated device can have
    /// a fixed cost per request.
    pub request: Option<u64>,
}

/// When an engine performed a chain. An engine that does not know when the bytes of a chain without a
/// completion arrive records nothing.
#[derive(Debug, Default)]
pub struct ChainTimes(OnceLock<(Instant, Instant)>);

impl ChainTimes {
    /// Records when the first transfer began, and when the last one ended. Later calls have no effect.
    pub fn record(&self, started: Instant, finished: Instant) {
        let _ = self.0.set((started, finished));
    }

    /// Returns when the first transfer began, and when the last one ended.
    #[must_use]
    pub fn get(&self) -> Option<(Instant, Instant)> {
        self.0.get().copied()
    }
}

impl Chain {
    /// Total length of all transfers, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.transfers.iter().map(|t| t.len).sum()
    }

    /// Whether the chain contains no transfers, as in a fence.
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
    /// When the chain's first transfer began. Until then, the chain waited in its queue.
    pub started: Instant,
    /// When the chain's last transfer ended.
    pub finished: Instant,
}

/// Why a chain failed, and how many of its transfers were complete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a DMA transfer failed: {why}")]
pub struct ChainFailure {
    /// Number of transfers that were complete before the failure. The bytes that they copied stay
    /// at their destination.
    pub done: usize,
    /// The cause.
    pub why: String,
}

/// A chain that the engine did not accept.
#[derive(Debug)]
pub enum RejectedChain {
    /// The queue is full. When the queue has room again, the engine wakes the task that last called
    /// [`DmaEngine::poll_completions`].
    Full(Chain),
    /// The chain is invalid.
    Refused(ChannelError),
}

/// A doorbell on which this side waits. The peer rings it with the number of bytes that the peer
/// has put into a ring. Only one task may wait for a doorbell.
pub trait Bell: Send {
    /// Waits until the doorbell's count is not zero. Then returns the count and resets it to zero.
    ///
    /// # Errors
    /// Fails if the peer can no longer ring the doorbell.
    fn poll_wait(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<u64>>;
}

/// Number of a peer that the engine is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerId(pub u32);

/// A store's process that an engine is attached to. Dropping this value detaches the peer after all
/// chains that were posted before the drop.
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
    /// How long the engine polls for more work before it sleeps.
    pub spin: Option<Duration>,
}

/// A peer that the engine has attached to, and the doorbell that the peer rings.
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
    /// Bytes that the CPU copied from a bounce buffer to their destination.
    pub bounced: u64,
}

/// Moves bytes between DPU memory and host memory. The osd's process owns the engine.
///
/// The caller hands the engine a file descriptor or an offer that gives access to a peer's memory,
/// and gets only a number for the memory. The caller can access the memory only by posting
/// transfers. All methods may be called from any thread, and none of them blocks.
///
/// # Safety
/// An engine may use an [`OutsideAccess`] only for the transfers of chains that name the memory's
/// region. After a chain's completion, the engine may not access the memory for this chain.
#[allow(unsafe_code)]
pub unsafe trait DmaEngine: Send + Sync {
    /// The engine's name in status reports and metrics, e.g. `shm`.
    fn name(&self) -> &str;

    /// Whether the engine uses CPU time of this machine in place of DMA hardware.
    fn is_emulated(&self) -> bool;

    /// Maximum length of a transfer, in bytes.
    fn max_transfer(&self) -> usize;

    /// Number of queues, at least one. A chain waits at most for the transfer that another queue is
    /// performing. There are two exceptions: the engine performs chains of the urgent queue as a
    /// whole, because they are short, and an emulated device with a limited rate performs every
    /// chain as a whole.
    fn queues(&self) -> usize;

    /// Maximum number of chains per queue that are posted and not complete.
    fn queue_depth(&self) -> usize;

    /// Fixed time that each payload chain takes, in addition to the time that depends on its
    /// length. If this time is not zero, one long chain of several requests is faster than several
    /// short chains.
    fn setup_cost(&self) -> Duration;

    /// Registers memory of this process, so that chains can use it. The contract of
    /// [`OutsideAccess::new`] covers the transfers of these chains.
    ///
    /// # Errors
    /// Fails if the engine has no room for another region.
    fn register_local(&self, memory: &OutsideAccess) -> Result<DmaRegion>;

    /// How the engine reaches host memory. The osd asks the store for this kind of access.
    fn reach(&self) -> Reach;

    /// Whether the engine must attach to a new offer of the peer after a failure. For an engine
    /// that returns `true`, only the end of the old offer guarantees that no earlier transfer
    /// arrives late.
    fn attaches_anew(&self) -> bool;

    /// Whether the engine has stopped for ever and accesses no memory any more.
    fn has_stopped(&self) -> bool {
        false
    }

    /// Attaches to a store's process. `access`, which that process has sent, gives access to `len`
    /// bytes of host memory and to two doorbells. Returns the peer and the doorbell that the peer
    /// rings. Await the future within a tokio runtime, which then serves the doorbell. The engine
    /// limits the time of the attempt. Dropping the future cancels the attempt.
    ///
    /// # Errors
    /// [`ChannelError::WrongMemoryAccess`] if the engine cannot use this kind of access. Also fails
    /// if the memory is not sealed, if it does not have `len` bytes, or if the peer cannot be
    /// reached.
    fn attach(&self, access: MemoryAccess, len: usize) -> BoxFuture<'_, Result<Joined>>;

    /// Registers part of a peer's memory. The registration may fail after this call has returned.
    /// The chains that use the region then fail.
    ///
    /// # Errors
    /// Fails if the range is outside the peer's memory, or if the engine has no room for another
    /// region.
    fn register_peer(&self, peer: &EnginePeer, range: Range<usize>) -> Result<DmaRegion>;

    /// Queues a chain. The memory that the chain names must stay valid and unchanged until the
    /// chain completes.
    ///
    /// # Errors
    /// See [`RejectedChain`].
    fn post(&self, queue: QueueId, chain: Chain) -> std::result::Result<(), RejectedChain>;

    /// Appends new completions to `out`, and registers `cx` to be woken by the next completion.
    /// Only one task may call this function at a time.
    fn poll_completions(&self, cx: &mut Context<'_>, out: &mut Vec<ChainCompletion>);

    /// Changes settings of the running engine.
    fn tune(&self, tuning: EngineTuning);

    /// Cancels all incomplete chains. They complete with a failure, and access no memory after
    /// their completion.
    fn reset(&self);

    /// The engine's counters.
    fn counters(&self) -> Counters;
}
