//! The contract of a DMA engine.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::Context;

use base::mem::Arena;

use crate::{ChannelError, Result};

/// Number of a registered region. Only the engine that gave it knows what memory it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionId(pub u32);

/// Number of a registered doorbell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DoorbellId(pub u32);

/// Memory that an engine may read and write; unregistered when dropped, after the transfers posted before.
pub struct Region {
    id: RegionId,
    len: usize,
    unregister: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Region {
    /// For engines: a region whose registration ends with `unregister`.
    #[must_use]
    pub fn new(id: RegionId, len: usize, unregister: Box<dyn FnOnce() + Send + Sync>) -> Region {
        Region { id, len, unregister: Some(unregister) }
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

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("id", &self.id).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(unregister) = self.unregister.take() {
            unregister();
        }
    }
}

/// A place in a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The region.
    pub region: RegionId,
    /// Bytes from its start.
    pub offset: usize,
}

/// One copy of `len` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// From where.
    pub src: Place,
    /// To where.
    pub dst: Place,
    /// Number of bytes, at most the engine's [`max_transfer`](DmaEngine::max_transfer).
    pub len: usize,
}

/// Transfers that are carried out one after the other, then a doorbell, then a completion. The first failure ends the
/// chain: nothing after it happens but the completion. Chains are carried out in the order posted, so an empty one
/// is a fence.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    /// The copies.
    pub transfers: Vec<Transfer>,
    /// Rung after the last copy, with this count. An engine may ring once for several chains.
    pub ring: Option<(DoorbellId, u64)>,
    /// Wanted in the completion. Without a tag there is a completion only if the chain fails, with tag 0.
    pub tag: Option<u64>,
}

/// The end of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// The chain's tag.
    pub tag: u64,
    /// Why it failed, if it did.
    pub result: Result<(), String>,
}

/// A chain that was not taken.
#[derive(Debug)]
pub enum Unposted {
    /// The queue is full. The waker of [`DmaEngine::poll_completions`] is woken when there is room again.
    Full(Chain),
    /// The chain asks for something impossible, or the engine has stopped.
    Refused(ChannelError),
}

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
/// Peer memory is handed over as a file descriptor, and what comes back is a number: no caller can reach the memory
/// but by posting transfers. All methods may be called from any thread and do not block, except for registering.
pub trait DmaEngine: Send + Sync {
    /// For people and metrics, e.g. `shm`.
    fn name(&self) -> &str;

    /// Whether CPU time of this machine stands for hardware.
    fn is_emulated(&self) -> bool;

    /// Longest single transfer, in bytes.
    fn max_transfer(&self) -> usize;

    /// Most chains that can be posted and not completed.
    fn queue_depth(&self) -> usize;

    /// Registers memory of this process.
    ///
    /// # Errors
    /// If the engine has no room for it.
    fn register_local(&self, arena: &Arc<Arena>) -> Result<Region>;

    /// Registers memory of the peer, `len` bytes behind `fd`.
    ///
    /// # Errors
    /// If the memory is not sealed or not of that length, or the engine has no room for it.
    fn register_peer(&self, fd: OwnedFd, len: usize) -> Result<Region>;

    /// Registers an eventfd that chains can ring. It stays registered until the region `with` is dropped.
    ///
    /// # Errors
    /// If the engine has stopped.
    fn register_doorbell(&self, fd: OwnedFd, with: &Region) -> Result<DoorbellId>;

    /// Queues a chain. The memory it names must stay as it is until the chain has completed.
    ///
    /// # Errors
    /// See [`Unposted`].
    fn post(&self, chain: Chain) -> std::result::Result<(), Unposted>;

    /// Moves what has completed to `out` and arranges for `cx` to be woken when there is more. One caller at a time.
    fn poll_completions(&self, cx: &mut Context<'_>, out: &mut Vec<Completion>);

    /// What was done so far.
    fn counters(&self) -> Counters;
}
