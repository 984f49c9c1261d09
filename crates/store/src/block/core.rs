//! The state of a mounted target.
//!
//! [`Core`] does no I/O and never waits. It accepts commands and events ([`calls`](super::calls)).
//! It puts drive requests and [`BlockingWork`] into [`CoreOutput`], from which the driver takes
//! them. A test can therefore deliver events to the core in any order.

use std::collections::BTreeMap;

use base::block::BLOCK;
use base::collections::HashMap;
use base::mem::Arena;
use base::pool::BufferPool;

use super::alloc::{Allocator, Purse};
use super::bitmap::Bitmap;
use super::commits::Commits;
use super::gauges::SpaceGauges;
use super::log_space::LogSpace;
use super::messages::{BlockingWork, CoreOutput, ReplySender};
use super::need::Need;
use super::presence::{Presence, ScanPace};
use super::queues::CallQueues;
use super::reads::{BlockAccess, Look};
use super::recovery::ReadyTarget;
use super::requests::DriveRequests;
use super::staged::StageTable;
use super::superblock::Superblock;
use super::usage::{IndexSpace, SPREAD};
use super::view::{IndexView, Loaded};
use crate::{CollectionId, Result, Space, StoreError, Transaction};

/// Maximum number of calls in progress that the steps of a scan of existing objects may delay.
const FEW_CALLS: usize = 4;

/// Call number of the scan that fills [`Presence`].
pub(crate) const SCAN: u64 = 0;

/// A call that waits for its turn, for a load, for free blocks or for a checkpoint.
#[derive(Debug)]
pub(crate) struct PendingCall {
    pub(crate) call: CoreCall,
    /// The collections of a transaction.
    pub(crate) collections: Vec<CollectionId>,
    /// Stages that the call names and that were not released when the call arrived. The store keeps
    /// these stages until the call is complete.
    pub(crate) stages: Vec<u64>,
    pub(crate) loaded: Loaded,
    /// Number of outstanding loads.
    pub(crate) loading: usize,
    /// Number of transactions that the read or query waits for.
    pub(crate) waits_for: usize,
    /// What the transaction waits for before it is tried again.
    pub(crate) lacks: Lack,
    /// Number of times that the call has waited because too few blocks were free.
    pub(crate) parked: u32,
    /// Number of checkpoints that the call has waited for.
    pub(crate) checkpoints: u32,
    /// The generation of the index in which the call last asked for a checkpoint.
    pub(crate) asked_in: Option<u64>,
    pub(crate) failed: Option<StoreError>,
}

/// What a transaction waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    Nothing,
    /// Room in the log.
    Log,
    /// Free blocks, or room in the index.
    Space,
}

impl PendingCall {
    /// A call that has just arrived.
    pub(crate) fn new(call: CoreCall, collections: Vec<CollectionId>, stages: Vec<u64>) -> PendingCall {
        PendingCall {
            call,
            collections,
            stages,
            loaded: Loaded::default(),
            loading: 0,
            waits_for: 0,
            lacks: Lack::Nothing,
            parked: 0,
            checkpoints: 0,
            asked_in: None,
            failed: None,
        }
    }
}

#[derive(Debug)]
pub(crate) enum CoreCall {
    Transaction(Transaction, ReplySender),
    Look(CollectionId, Look, ReplySender),
    Collections(ReplySender),
}

/// Memory limits of a mounted target.
#[derive(Debug, Clone)]
pub(crate) struct MemoryLimits {
    /// Limit of the cache of index pages, in bytes.
    pub(crate) page_bytes: usize,
    /// Limit of the cache of index values, in bytes.
    pub(crate) value_bytes: usize,
    /// Total size of the buffers for reads without a destination and for unaligned writes, in
    /// bytes.
    pub(crate) buffer_bytes: usize,
}

impl MemoryLimits {
    /// Divides `cache_bytes` between the caches. A page has about as many bytes as the values in it,
    /// but a cached value needs much more memory than its bytes. Checkpoints need the pages of all
    /// changed values, so pages come first.
    pub(crate) fn new(cache_bytes: usize, buffer_bytes: usize) -> MemoryLimits {
        let value_bytes = cache_bytes / 4;
        MemoryLimits { page_bytes: cache_bytes - value_bytes, value_bytes, buffer_bytes }
    }
}

/// Whether a target accepts calls.
#[derive(Debug)]
pub(crate) enum Lifecycle {
    Open,
    /// The target is being unmounted. It completes the calls that it has accepted.
    Closing(ReplySender),
    Closed,
}

impl Lifecycle {
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Lifecycle::Open)
    }

    pub(crate) fn is_closing(&self) -> bool {
        matches!(self, Lifecycle::Closing(_))
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self, Lifecycle::Closed)
    }
}

/// The state of a mounted target.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) superblock: Superblock,
    pub(crate) log_generation: u64,
    pub(crate) view: IndexView,
    pub(crate) alloc: Allocator,
    /// The allocated blocks according to the log and the index. Staged blocks are not among them.
    pub(crate) taken: Bitmap,
    pub(crate) collections: BTreeMap<CollectionId, u64>,
    pub(crate) next_nid: u64,
    pub(crate) stages: StageTable,
    pub(crate) calls: CallQueues,
    pub(crate) commits: Commits,
    pub(crate) reads: BlockAccess,
    pub(crate) requests: DriveRequests,
    /// Counts checkpoints. A load that overlaps a checkpoint must be repeated.
    pub(crate) generation: u64,
    pub(crate) pool: BufferPool,
    /// Limit of the cached values of the index, in bytes.
    pub(crate) cache_limit: usize,
    pub(crate) gauges: SpaceGauges,
    pub(crate) index_space: IndexSpace,
    pub(crate) poisoned: Option<String>,
    /// For each collection, the number of the commit group that contains its last transaction.
    pub(crate) changed_in: HashMap<CollectionId, u64>,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) output: CoreOutput,
}

impl Core {
    /// Creates the core of a target that has just been recovered.
    pub(crate) fn new(
        target: ReadyTarget,
        collections: BTreeMap<CollectionId, u64>,
        limits: &MemoryLimits,
    ) -> Result<Core> {
        let ReadyTarget { superblock, meta, taken, index, changes, deferred, .. } = target;
        // A measurement may take long, so the first checkpoint makes it.
        let index_space = index.estimate();
        let largest = (limits.buffer_bytes.max(1 << 20) / 4).next_power_of_two().min(4 << 20);
        let arena =
            Arena::anonymous(limits.buffer_bytes.max(largest)).map_err(|e| StoreError::Io(e.to_string()))?;
        let presence = Presence::new(index_space.total - index_space.free);
        let log = LogSpace::new(meta.log_start, target.log_next, superblock.log_sectors());
        let mut core = Core {
            log_generation: target.log_generation,
            view: IndexView::new(meta.next_nid, limits.value_bytes, presence),
            alloc: Allocator::new(taken.clone()),
            taken,
            collections,
            next_nid: target.next_nid,
            stages: StageTable::default(),
            calls: CallQueues::default(),
            commits: Commits::new(log, deferred),
            reads: BlockAccess::default(),
            requests: DriveRequests::new(),
            generation: 0,
            pool: BufferPool::new(arena, 0, largest),
            cache_limit: limits.value_bytes,
            gauges: SpaceGauges::new(superblock.uuid),
            index_space,
            poisoned: None,
            changed_in: HashMap::default(),
            lifecycle: Lifecycle::Open,
            output: CoreOutput::default(),
            superblock,
        };
        if !changes.is_empty() || index_space.may_be_more {
            core.commits.request_checkpoint();
        }
        core.view.apply(changes);
        // The growth of the recovered changes is overestimated, because the earlier values of their
        // keys were not read. The changes were admitted, so they fit. The rest of the room is for
        // transactions that arrive before the first checkpoint has ended.
        let room = index_space.free.saturating_sub(index_space.reserve()) / SPREAD;
        core.view.limit_growth(room / 4 * 3);
        core.update_gauges();
        core.scan(Presence::first_piece());
        Ok(core)
    }

    /// Requests the next read of the index for the scan of existing objects.
    pub(crate) fn scan(&mut self, piece: Need) {
        self.output.work.push(BlockingWork::Load {
            op: SCAN,
            generation: self.generation,
            needs: vec![piece],
        });
    }

    /// Number of calls that wait for their turn, for a load, for free blocks or for a checkpoint.
    #[cfg(test)]
    pub(crate) fn queue_len(&self) -> usize {
        self.calls.len()
    }

    /// Whether no call, read or drive request is in progress.
    pub(crate) fn is_idle(&self) -> bool {
        self.calls.is_empty()
            && self.requests.is_empty()
            && self.reads.is_empty()
            && !self.stages.has_waiting()
    }

    /// Returns how fast the scan of existing objects may proceed.
    pub(crate) fn scan_pace(&self) -> ScanPace {
        let calls_use_drive = !self.requests.is_empty() || !self.reads.is_empty();
        match self.calls.len() {
            _ if calls_use_drive || self.stages.has_waiting() => ScanPace::Busy,
            0 => ScanPace::Idle,
            1..=FEW_CALLS => ScanPace::Light,
            _ => ScanPace::Busy,
        }
    }

    /// Whether the driver should call [`advance`](Self::advance) again without an event: the scan of
    /// existing objects has work, and the scan would delay at most a few calls.
    pub(crate) fn has_spare_time(&self) -> bool {
        self.lifecycle.is_open() && self.scan_pace() != ScanPace::Busy && self.view.presence.has_step()
    }

    /// Whether calls wait for free blocks, or for room in the log or the index. If so, the store
    /// should make freed blocks usable soon.
    pub(crate) fn is_starved(&self) -> bool {
        self.calls.is_starved() || self.stages.has_waiting()
    }

    pub(crate) fn data_offset(&self, block: u64) -> u64 {
        self.superblock.data.offset + block * BLOCK
    }

    pub(crate) fn space(&mut self) -> Space {
        let (free_extents, largest) = self.alloc.summary();
        let (log_used, log_total) = self.commits.log().used_bytes();
        Space {
            total: self.superblock.data.len,
            free: self.alloc.free_blocks(Purse::Ordinary, self.commits.reclaimable()) * BLOCK,
            staged: self.stages.staged_blocks() * BLOCK,
            free_extents,
            largest_free_extent: largest * BLOCK,
            index_free: self.index_space.free,
            index_total: self.index_space.total,
            log_free: log_total - log_used,
            log_total,
            cache_used: self.view.cached_bytes() as u64,
            cache_limit: self.cache_limit as u64,
        }
    }

    /// Updates the metrics of the target's space.
    pub(crate) fn update_gauges(&self) {
        let cache = (self.view.cached_bytes(), self.cache_limit);
        self.gauges.set(self.index_space, self.commits.log().used_bytes(), cache);
    }

    /// Makes the target refuse all writes from now on. Fails all transactions that are not durable
    /// yet.
    pub(crate) fn poison(&mut self, reason: &str) {
        if self.poisoned.is_none() {
            tracing::error!(reason, "the target refuses writes until a remount");
            metrics::counter!("outboard_store_poisoned_total").increment(1);
            self.poisoned = Some(reason.to_owned());
            self.alloc.room().close();
        }
        self.commits.fail(&StoreError::Poisoned(reason.to_owned()));
        self.calls.run_all_starved();
        for waiting in self.stages.take_waiting() {
            let _ = waiting.reply.send(Err(StoreError::Poisoned(reason.to_owned())));
        }
    }
}
