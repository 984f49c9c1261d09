//! The state of a mounted target.
//!
//! [`Core`] does no I/O and never waits. It accepts commands and events ([`calls`](super::calls)).
//! It puts drive requests and [`BlockingWork`] into [`CoreOutput`], from which the driver takes
//! them. A test can therefore deliver events to the core in any order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use base::block::BLOCK;
use base::collections::HashMap;
use base::mem::Arena;
use base::pool::BufferPool;

use super::alloc::{Allocator, Purse};
use super::bitmap::Bitmap;
use super::commits::Commits;
use super::extent::{Extent, total};
use super::io::SplitBuffer;
use super::messages::{BlockingWork, CoreOutput, ReplySender};
use super::need::Need;
use super::presence::Presence;
use super::reads::{BlockAccess, LoadingReads, Look};
use super::recovery::ReadyTarget;
use super::staged::{Stage, StageWrite, WaitingStage};
use super::superblock::Superblock;
use super::usage::IndexSpace;
use super::view::{IndexView, Loaded};
use crate::{CollectionId, Result, Space, StoreError, Transaction};

/// Call number of the scan that fills [`Presence`].
pub(crate) const SCAN: u64 = 0;

/// A call that waits for its turn, for a load, for free blocks or for a checkpoint.
#[derive(Debug)]
pub(crate) struct PendingCall {
    pub(crate) call: CoreCall,
    pub(crate) collections: Vec<CollectionId>,
    /// Stages that the call names and that were not released when the call arrived. The store keeps
    /// these stages until the call is complete.
    pub(crate) stages: Vec<u64>,
    pub(crate) loaded: Loaded,
    /// Number of outstanding loads.
    pub(crate) loading: usize,
    /// Number of times that the call has waited because too few blocks were free.
    pub(crate) parked: u32,
    /// Number of checkpoints that the call has waited for.
    pub(crate) checkpoints: u32,
    /// The generation of the index in which the call last asked for a checkpoint.
    pub(crate) asked_in: Option<u64>,
    pub(crate) failed: Option<StoreError>,
}

#[derive(Debug)]
pub(crate) enum CoreCall {
    Transaction(Transaction, ReplySender),
    Look(CollectionId, Look, ReplySender),
    Collections(ReplySender),
}

/// Purpose of an I/O request.
#[derive(Debug)]
pub(crate) enum Purpose {
    /// Data of the transactions of a commit group.
    Data { blocks: Extent, group: u64 },
    /// Staged data, with the numbers of the commit groups that wait until it is written.
    Stage { blocks: Extent, write: u64, groups: Vec<u64> },
    /// A part of the log sectors of a commit group.
    Log { group: u64 },
    /// A flush.
    Flush,
    /// A run of blocks of a read.
    Read { read: u64 },
    /// A block that a call reads to merge new data into it.
    Block { op: u64, block: u64, whole: SplitBuffer },
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
    pub(crate) stages: HashMap<u64, Stage>,
    /// The highest stage number assigned so far. The target's handle also assigns stage numbers.
    pub(crate) last_stage: Arc<AtomicU64>,
    pub(crate) stage_writes: HashMap<u64, StageWrite>,
    pub(crate) waiting_stages: VecDeque<WaitingStage>,
    pub(crate) queues: HashMap<CollectionId, VecDeque<u64>>,
    pub(crate) pending: HashMap<u64, PendingCall>,
    pub(crate) runnable: VecDeque<u64>,
    /// Calls that wait for free blocks or for room in the log or the index.
    pub(crate) starved: Vec<u64>,
    pub(crate) commits: Commits,
    pub(crate) loading_reads: LoadingReads,
    pub(crate) reads: BlockAccess,
    pub(crate) io: HashMap<u64, Purpose>,
    pub(crate) next_id: u64,
    /// Counts checkpoints. A load that overlaps a checkpoint must be repeated.
    pub(crate) generation: u64,
    pub(crate) pool: BufferPool,
    pub(crate) index_space: IndexSpace,
    pub(crate) poisoned: Option<String>,
    /// For each collection, the number of the commit group that contains its last transaction.
    pub(crate) changed_in: HashMap<CollectionId, u64>,
    pub(crate) closing: Option<ReplySender>,
    pub(crate) closed: bool,
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
        let index_space = index.space();
        let largest = (limits.buffer_bytes.max(1 << 20) / 4).next_power_of_two().min(4 << 20);
        let arena =
            Arena::anonymous(limits.buffer_bytes.max(largest)).map_err(|e| StoreError::Io(e.to_string()))?;
        let presence = Presence::new(index_space.total - index_space.free);
        let mut core = Core {
            log_generation: target.log_generation,
            view: IndexView::new(meta.next_nid, limits.value_bytes, presence),
            alloc: Allocator::new(taken.clone()),
            taken,
            collections,
            next_nid: target.next_nid,
            stages: HashMap::default(),
            last_stage: Arc::default(),
            stage_writes: HashMap::default(),
            waiting_stages: VecDeque::new(),
            queues: HashMap::default(),
            pending: HashMap::default(),
            runnable: VecDeque::new(),
            starved: Vec::new(),
            commits: Commits::new(meta.log_start, target.log_next, superblock.log_sectors(), deferred),
            loading_reads: LoadingReads::default(),
            reads: BlockAccess::default(),
            io: HashMap::default(),
            next_id: 1,
            generation: 0,
            pool: BufferPool::new(arena, 0, largest),
            index_space,
            poisoned: None,
            changed_in: HashMap::default(),
            closing: None,
            closed: false,
            output: CoreOutput::default(),
            superblock,
        };
        if !changes.is_empty() {
            core.commits.request_checkpoint();
        }
        core.view.apply(changes);
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

    pub(crate) fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Number of calls that wait for their turn, for a load, for free blocks or for a checkpoint.
    #[cfg(test)]
    pub(crate) fn queue_len(&self) -> usize {
        self.pending.len()
    }

    /// Whether no call, read or drive request is in progress.
    pub(crate) fn is_idle(&self) -> bool {
        self.pending.is_empty()
            && self.io.is_empty()
            && self.reads.is_empty()
            && self.waiting_stages.is_empty()
    }

    /// Whether calls wait for free blocks, or for room in the log or the index. If so, the store
    /// should make freed blocks usable soon.
    pub(crate) fn is_starved(&self) -> bool {
        !self.starved.is_empty() || !self.waiting_stages.is_empty()
    }

    pub(crate) fn loaded_mut(&mut self) -> (&mut IndexView, impl Iterator<Item = &mut Loaded>) {
        (&mut self.view, self.pending.values_mut().map(|p| &mut p.loaded))
    }

    pub(crate) fn data_offset(&self, block: u64) -> u64 {
        self.superblock.data.offset + block * BLOCK
    }

    pub(crate) fn space(&self) -> Space {
        let staged: u64 = self.stages.values().filter(|s| !s.released).map(|s| total(&s.unnamed())).sum();
        let (free_extents, largest) = self.alloc.summary();
        Space {
            total: self.superblock.data.len,
            free: self.alloc.free_blocks(Purse::Ordinary, self.commits.reclaimable()) * BLOCK,
            staged: staged * BLOCK,
            free_extents,
            largest_free_extent: largest * BLOCK,
            index_free: self.index_space.free,
            index_total: self.index_space.total,
        }
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
        self.runnable.extend(std::mem::take(&mut self.starved));
        for waiting in std::mem::take(&mut self.waiting_stages) {
            let _ = waiting.reply.send(Err(StoreError::Poisoned(reason.to_owned())));
        }
    }
}
