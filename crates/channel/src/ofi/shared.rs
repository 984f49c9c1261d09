//! What the engine's callers and its thread have in common: commands, queues of chains, completions.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use base::mem::Arena;
use crossbeam_queue::SegQueue;
use futures::task::AtomicWaker;
use tokio::sync::oneshot;

use super::alarm::Alarm;
use super::rung::Rung;
use super::{OfiOffer, QUEUES};
use crate::dma::{PeerId, QueueId};
use crate::farewell::share_among_queues;
use crate::{Chain, ChainCompletion, RegionId, RejectedChain, Result};

/// Chains that a queue takes before the first has completed.
pub(super) const QUEUE_DEPTH: usize = 1024;

/// What callers and the thread have in common.
pub(super) struct Shared {
    pub(super) commands: SegQueue<OfiCommand>,
    pub(super) queues: [OfiQueue; QUEUES],
    pub(super) completions: SegQueue<ChainCompletion>,
    pub(super) waker: AtomicWaker,
    pub(super) alarm: Alarm,
    /// The smallest of what is configured, what was tuned, and what the provider can do.
    pub(super) max_transfer: AtomicUsize,
    /// What the provider can do.
    pub(super) provider_max: AtomicUsize,
    pub(super) spin_ns: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) transfers: AtomicU64,
    pub(super) doorbells: AtomicU64,
    pub(super) failed: AtomicU64,
}

/// One queue, from the callers' side.
#[derive(Default)]
pub(super) struct OfiQueue {
    pub(super) items: SegQueue<OfiItem>,
    /// Chains posted and not completed.
    posted: AtomicUsize,
    /// Whether somebody waits for room.
    was_full: AtomicBool,
}

pub(super) enum OfiItem {
    Chain(Chain),
    /// The region ends when this has come out of every queue.
    Unregister(Arc<RegionId>),
    /// The peer is forgotten when this has come out of every queue.
    Detach(Arc<PeerId>),
    /// What is behind it was posted after a reset, whose command follows.
    Reset,
}

pub(super) enum OfiCommand {
    Local(RegionId, Arc<Arena>),
    Attach { id: PeerId, offer: OfiOffer, rung: Arc<Rung>, reply: oneshot::Sender<Result<usize>> },
    Window(RegionId, PeerId, Range<usize>),
    Reset,
    Stop,
}

impl Shared {
    /// For an engine whose transfers are `max_transfer` bytes long at most, and whose thread spins for `spin`.
    pub(super) fn new(max_transfer: usize, spin: Duration) -> Result<Arc<Shared>> {
        Ok(Arc::new(Shared {
            commands: SegQueue::new(),
            queues: Default::default(),
            completions: SegQueue::new(),
            waker: AtomicWaker::new(),
            alarm: Alarm::new()?,
            max_transfer: AtomicUsize::new(max_transfer),
            provider_max: AtomicUsize::new(usize::MAX),
            spin_ns: AtomicU64::new(spin.as_nanos() as u64),
            bytes: AtomicU64::new(0),
            transfers: AtomicU64::new(0),
            doorbells: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }))
    }

    pub(super) fn send(&self, command: OfiCommand) {
        self.commands.push(command);
        self.alarm.wake();
    }

    pub(super) fn to_every_queue<T>(&self, what: T, item: fn(Arc<T>) -> OfiItem) {
        share_among_queues(what, QUEUES, |queue, share| self.queues[queue].items.push(item(share)));
        self.alarm.wake();
    }

    /// A chain of that queue has completed; `true` if somebody waits for the room.
    pub(super) fn chain_ended(&self, queue: QueueId) -> bool {
        let queue = &self.queues[queue];
        queue.posted.fetch_sub(1, Ordering::SeqCst) <= QUEUE_DEPTH / 2
            && queue.was_full.swap(false, Ordering::SeqCst)
    }
}

impl OfiQueue {
    /// Takes a chain, or gives it back if there is no room.
    pub(super) fn post(&self, chain: Chain) -> Result<(), RejectedChain> {
        while self.posted.fetch_add(1, Ordering::SeqCst) >= QUEUE_DEPTH {
            self.posted.fetch_sub(1, Ordering::SeqCst);
            self.was_full.store(true, Ordering::SeqCst);
            // If it has emptied meanwhile, nobody might wake us any more; then there is room.
            if self.posted.load(Ordering::SeqCst) > QUEUE_DEPTH / 2 {
                return Err(RejectedChain::Full(chain));
            }
        }
        self.items.push(OfiItem::Chain(chain));
        Ok(())
    }
}
