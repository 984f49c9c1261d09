//! State shared by the engine's callers and its thread: commands, queues of chains, completions.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use base::mem::OutsideAccess;
use crossbeam_queue::SegQueue;
use futures::task::AtomicWaker;
use tokio::sync::oneshot;

use super::alarm::Alarm;
use super::rung::Rung;
use super::{OfiOffer, QUEUES};
use crate::dma::{PeerId, QueueId};
use crate::farewell::share_among_queues;
use crate::{Chain, ChainCompletion, RegionId, RejectedChain, Result};

/// Maximum number of incomplete chains in a queue.
pub(super) const QUEUE_DEPTH: usize = 1024;

/// State shared by callers and the thread.
pub(super) struct Shared {
    pub(super) commands: SegQueue<OfiCommand>,
    pub(super) queues: [OfiQueue; QUEUES],
    pub(super) completions: SegQueue<ChainCompletion>,
    pub(super) waker: AtomicWaker,
    pub(super) alarm: Alarm,
    /// The configured or tuned limit of a transfer, in bytes. The provider's limit applies as well.
    pub(super) max_transfer: AtomicUsize,
    /// The provider's limit of a transfer, in bytes.
    pub(super) provider_max: AtomicUsize,
    pub(super) spin_ns: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) transfers: AtomicU64,
    pub(super) doorbells: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) bounced: AtomicU64,
    pub(super) ports_in_use: AtomicU64,
}

/// One queue, into which callers put items for the thread.
#[derive(Default)]
pub(super) struct OfiQueue {
    pub(super) items: SegQueue<OfiItem>,
    /// Number of chains that are posted and not complete.
    posted: AtomicUsize,
    /// Whether a caller has found the queue full and waits for room.
    was_full: AtomicBool,
}

pub(super) enum OfiItem {
    Chain(Chain),
    /// Unregisters the region once the thread has taken this item from every queue.
    Unregister(Arc<RegionId>),
    /// Detaches the peer once the thread has taken this item from every queue.
    Detach(Arc<PeerId>),
    /// Separates the items that a reset cancels from later items. The command [`OfiCommand::Reset`]
    /// follows.
    Reset,
}

pub(super) enum OfiCommand {
    Local(RegionId, OutsideAccess),
    Attach { id: PeerId, offer: OfiOffer, rung: Arc<Rung>, reply: oneshot::Sender<Result<usize>> },
    Window(RegionId, PeerId, Range<usize>),
    Reset,
    Stop,
}

impl Shared {
    /// Creates the state of an engine with this maximum transfer length and polling time.
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
            bounced: AtomicU64::new(0),
            ports_in_use: AtomicU64::new(0),
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

    /// Counts a chain of the queue as complete. Returns `true` if a caller waits for room and must
    /// be woken.
    pub(super) fn chain_ended(&self, queue: QueueId) -> bool {
        let queue = &self.queues[queue];
        queue.posted.fetch_sub(1, Ordering::SeqCst) <= QUEUE_DEPTH / 2
            && queue.was_full.swap(false, Ordering::SeqCst)
    }
}

impl OfiQueue {
    /// Accepts a chain, or returns it if the queue is full.
    pub(super) fn post(&self, chain: Chain) -> Result<(), RejectedChain> {
        while self.posted.fetch_add(1, Ordering::SeqCst) >= QUEUE_DEPTH {
            self.posted.fetch_sub(1, Ordering::SeqCst);
            self.was_full.store(true, Ordering::SeqCst);
            // The thread wakes the caller only if it sees `was_full`. If the thread has emptied the
            // queue before the flag was set, it wakes no caller, but the queue has room now. Try
            // again in that case.
            if self.posted.load(Ordering::SeqCst) > QUEUE_DEPTH / 2 {
                return Err(RejectedChain::Full(chain));
            }
        }
        self.items.push(OfiItem::Chain(chain));
        Ok(())
    }
}
