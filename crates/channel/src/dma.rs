//! The contract of a DMA engine.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use base::mem::Arena;
use futures::future::BoxFuture;

use crate::{ChannelError, MemoryAccess, Reach, Result};

/// Number of a registered region. Only the engine that gave it knows what memory it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionId(pub u32);

/// Runs when it is dropped.
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

/// Memory that an engine may read and write; unregistered when dropped, after the chains posted before.
#[derive(Debug)]
pub struct DmaRegion {
    id: RegionId,
    len: usize,
    _unregister: OnDrop,
}

impl DmaRegion {
    /// For engines: a region whose registration ends with `unregister`.
    #[must_use]
    pub fn new(id: RegionId, len: usize, unregister: OnDrop) -> DmaRegion {
        DmaRegion { id, len, _unregister: unregister }
    }

    /// Its number.
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

/// A place in a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaAddress {
    /// The region.
    pub region: RegionId,
    /// Bytes from its start.
    pub offset: usize,
}

/// One copy of `len` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// From where.
    pub src: DmaAddress,
    /// To where.
    pub dst: DmaAddress,
    /// Number of bytes, at most the engine's [`max_transfer`](DmaEngine::max_transfer).
    pub len: usize,
}

/// Number of a queue of an engine. Queue [`URGENT`] is for short chains.
pub type QueueId = usize;

/// The queue of short chains: entries of rings and what fetches them. An engine whose queues share one device of its own
/// (`shm`) takes it before the others; where each has a connection of its own (`ofi`), it is one like the others.
pub const URGENT: QueueId = 0;

/// Transfers that are carried out one after the other, then a doorbell, then a completion. The first failure ends the
/// chain: nothing after it happens but the completion. The chains of one queue are carried out in the order posted, so
/// an empty one is a fence; chains of different queues in any order.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    /// The copies.
    pub transfers: Vec<Transfer>,
    /// The peer's doorbell, rung after the last copy with this count. An engine may ring once for several chains.
    pub ring: Option<(PeerId, u64)>,
    /// Wanted in the completion. Without a tag there is a completion only if the chain fails, with tag 0.
    pub tag: Option<u64>,
}

impl Chain {
    /// Bytes of all its transfers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.transfers.iter().map(|t| t.len).sum()
    }

    /// Whether it moves nothing: a fence.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.transfers.is_empty()
    }
}

/// The end of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainCompletion {
    /// The chain's tag.
    pub tag: u64,
    /// Why it failed, if it did.
    pub result: Result<(), ChainFailure>,
    /// When its first transfer began. Until then it waited.
    pub started: Instant,
    /// When its last transfer ended.
    pub finished: Instant,
}

/// A chain that was not carried out to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a DMA transfer failed: {why}")]
pub struct ChainFailure {
    /// So many of its transfers were done before, and stay done.
    pub done: usize,
    /// What went wrong.
    pub why: String,
}

/// A chain that was not taken.
#[derive(Debug)]
pub enum RejectedChain {
    /// The queue is full. The waker of [`DmaEngine::poll_completions`] is woken when there is room again.
    Full(Chain),
    /// The chain asks for something impossible.
    Refused(ChannelError),
}

/// Tells of bytes put into a ring. Waited for by one task.
pub trait Bell: Send {
    /// Takes the count of new bytes, once it is not zero.
    ///
    /// # Errors
    /// If nothing can come any more.
    fn poll_wait(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<u64>>;
}

/// Number of a peer that an engine is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerId(pub u32);

/// A store's process that an engine is attached to. When it is dropped, the engine forgets the peer after the chains
/// posted before.
pub struct EnginePeer {
    /// Its number.
    pub id: PeerId,
    /// Length of its memory, in bytes.
    pub len: usize,
    /// Detaches.
    pub detach: OnDrop,
}

/// Settings of an engine that can be changed while it runs; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineTuning {
    /// Longest single transfer, in bytes. The device's own limit holds in any case.
    pub max_transfer: Option<usize>,
    /// How long software that waits for the device looks for completions before it sleeps.
    pub spin: Option<Duration>,
}

/// A peer, and the bell that it rings.
pub type Joined = (EnginePeer, Box<dyn Bell>);

/// What an engine has done since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes copied.
    pub bytes: u64,
    /// Copies made.
    pub transfers: u64,
    /// Doorbells rung.
    pub doorbells: u64,
    /// Chains that failed.
    pub failed: u64,
}

/// Moves bytes between DPU memory and host memory. The osd's process owns it.
///
/// Peer memory comes as a descriptor, and what is got for it is a number: no caller can reach the memory but by posting
/// transfers. All methods may be called from any thread and do not block.
pub trait DmaEngine: Send + Sync {
    /// For people and metrics, e.g. `shm`.
    fn name(&self) -> &str;

    /// Whether CPU time of this machine stands for hardware.
    fn is_emulated(&self) -> bool;

    /// Longest single transfer, in bytes.
    fn max_transfer(&self) -> usize;

    /// Number of queues, at least one. Chains in one do not wait for those in another, but for the transfer that is
    /// being made.
    fn queues(&self) -> usize;

    /// Most chains that can be posted to one queue and not completed.
    fn queue_depth(&self) -> usize;

    /// Time that a chain of payload takes whatever its length. Where it is not zero, longer chains are better.
    fn setup_cost(&self) -> Duration;

    /// Registers memory of this process.
    ///
    /// # Errors
    /// If the engine has no room for it.
    fn register_local(&self, arena: &Arc<Arena>) -> Result<DmaRegion>;

    /// How it reaches host memory: what a store's process is asked for.
    fn reach(&self) -> Reach;

    /// Whether a peer's memory must be offered and attached anew before it is used again after a failure: only the end of the
    /// old offer makes sure that nothing arrives late from before.
    fn attaches_anew(&self) -> bool;

    /// Joins a store's process by what that process sent: `len` bytes of memory and two doorbells. Also gives the bell
    /// that the peer rings. Awaited within a tokio runtime, which serves the bell; it ends in the time that the engine has
    /// for it. Dropping the future gives up.
    ///
    /// # Errors
    /// [`ChannelError::WrongMemoryAccess`]; or if the memory is not sealed or not of that length, or the peer cannot be reached.
    fn attach(&self, access: MemoryAccess, len: usize) -> BoxFuture<'_, Result<Joined>>;

    /// Registers part of a peer's memory. What fails later on, fails the chains that use it.
    ///
    /// # Errors
    /// If the range is not inside the memory, or the engine has no room for it.
    fn register_peer(&self, peer: &EnginePeer, range: Range<usize>) -> Result<DmaRegion>;

    /// Queues a chain. The memory it names must stay as it is until the chain has completed.
    ///
    /// # Errors
    /// See [`RejectedChain`].
    fn post(&self, queue: QueueId, chain: Chain) -> std::result::Result<(), RejectedChain>;

    /// Moves what has completed to `out` and arranges for `cx` to be woken when there is more. One caller at a time.
    fn poll_completions(&self, cx: &mut Context<'_>, out: &mut Vec<ChainCompletion>);

    /// Changes settings while it runs.
    fn tune(&self, tuning: EngineTuning);

    /// Gives up all chains that are not completed: they complete as failed, and none of them touches memory after that.
    fn reset(&self);

    /// What was done so far.
    fn counters(&self) -> Counters;
}
