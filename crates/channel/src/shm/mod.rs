//! The emulated engine `shm`: a thread that replaces DMA hardware.
//!
//! DPU memory and host memory are memfds, and the thread `dma-N` is the only part of the system
//! that maps both. The thread maps peer memory itself and keeps the mapping in its private table
//! ([`device::ShmDevice`]). It also has its own mapping of local memory, as hardware would
//! ([`DeviceMemory`]). Hardware would save the CPU time of this thread, so Outboard accounts for it
//! separately, by the thread's name.
//!
//! The thread serves several queues, as one device does. It prefers short chains of the urgent
//! queue and serves the other queues in turn, one transfer at a time. When it has no work, it polls
//! for up to [`ShmOptions::spin`] if polling has found work recently, and then parks. An idle
//! engine takes no CPU time.

mod device;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Context;
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use base::fault::Faults;
use base::mem::{DeviceMemory, OutsideAccess};
use base::thread::{ThreadClass, spawn};
use crossbeam_queue::SegQueue;
use futures::future::BoxFuture;
use futures::task::AtomicWaker;
use tokio::sync::oneshot;

use crate::dma::{OnDrop, PeerId, QueueId};
use crate::farewell::share_among_queues;
use crate::{
    Chain, ChainCompletion, ChannelError, Counters, DmaEngine, DmaRegion, Doorbell, EnginePeer, Joined,
    MemoryAccess, MemoryFds, Reach, RegionId, RejectedChain, Result,
};
use device::ShmDevice;

/// Maximum length of a transfer of BlueField-3's DMA engine, in bytes (DoCeph, section 3.3).
pub const MAX_TRANSFER: usize = 2 << 20;
/// Number of queues: the urgent queue, and four queues for payload.
const QUEUES: usize = 5;
const QUEUE_DEPTH: usize = 1024;
/// Lower bound of the maximum transfer length, in bytes.
const LEAST_MAX_TRANSFER: usize = 4096;

/// The speed of the emulated device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Profile {
    /// The speed at which this machine copies memory.
    #[default]
    Memcpy,
    /// The speed of a BlueField-3 as DoCeph measured it (fitted to Table 3, row DMA). Chains of
    /// payload run one at a time, and each takes 2.4 ms plus 0.38 ms per MB. DoCeph's paper has no
    /// figure below 1 MB. Ring entries therefore run at full speed; they correspond to the messages
    /// that DoCeph sends over DOCA's communication channel.
    Bf3Paper,
    /// The same speed, but the fixed time belongs to each request instead of each chain. Requests
    /// that share a chain therefore save nothing, and each segment of a request after the first one
    /// takes only the time that depends on its length. Work without a client's request, such as a
    /// rebuild, has the fixed time in each chain.
    Bf3Serial,
}

impl Profile {
    /// The profile's name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Profile::Memcpy => "memcpy",
            Profile::Bf3Paper => "bf3-paper",
            Profile::Bf3Serial => "bf3-serial",
        }
    }

    /// The fixed time of a payload chain or request, and the time per 1000 bytes. `None` means that
    /// the device adds no delay.
    fn pace(self) -> Option<(Duration, Duration)> {
        match self {
            Profile::Memcpy => None,
            Profile::Bf3Paper | Profile::Bf3Serial => {
                Some((Duration::from_micros(2400), Duration::from_nanos(380)))
            }
        }
    }
}

/// Options of a [`ShmEngine`].
#[derive(Debug, Clone)]
pub struct ShmOptions {
    /// How long the thread polls for more work before it sleeps.
    pub spin: Duration,
    /// The speed of the device.
    pub profile: Profile,
    /// Maximum length of a transfer, in bytes, from 4096 to [`MAX_TRANSFER`]. Tuning can lower it.
    pub max_transfer: usize,
    /// Faults to inject.
    pub faults: Faults,
    /// Number in the name of the engine's thread.
    pub number: u16,
}

impl Default for ShmOptions {
    fn default() -> Self {
        ShmOptions {
            spin: Duration::from_micros(10),
            profile: Profile::Memcpy,
            max_transfer: MAX_TRANSFER,
            faults: Faults::default(),
            number: 0,
        }
    }
}

/// The emulated engine. Dropping its last handle ends the thread.
pub struct ShmEngine {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    name: String,
    profile: Profile,
    configured_max: usize,
}

/// State shared by callers and the device.
struct Shared {
    commands: SegQueue<ShmCommand>,
    queues: [ShmQueue; QUEUES],
    completions: SegQueue<ChainCompletion>,
    waker: AtomicWaker,
    sleeping: AtomicBool,
    worker: OnceLock<Thread>,
    next_id: AtomicU32,
    max_transfer: AtomicUsize,
    spin_ns: AtomicU64,
    bytes: AtomicU64,
    transfers: AtomicU64,
    doorbells: AtomicU64,
    failed: AtomicU64,
}

/// One queue, into which callers put items for the thread.
#[derive(Default)]
struct ShmQueue {
    items: SegQueue<ShmItem>,
    /// Number of chains that are posted and not complete.
    posted: AtomicUsize,
    /// Whether a caller has found the queue full and waits for room.
    was_full: AtomicBool,
}

enum ShmItem {
    Chain(Chain),
    /// Unregisters the region once the thread has taken this item from every queue.
    Unregister(Arc<RegionId>),
    /// Detaches the peer once the thread has taken this item from every queue.
    Detach(Arc<PeerId>),
}

enum ShmCommand {
    Local(RegionId, DeviceMemory),
    Attach { id: PeerId, memory: OwnedFd, len: usize, doorbell: OwnedFd, reply: oneshot::Sender<Result<()>> },
    Window(RegionId, PeerId, Range<usize>),
    Reset,
    Stop,
}

impl ShmEngine {
    /// Starts an engine and its thread.
    ///
    /// # Errors
    /// Fails if the system cannot start another thread.
    pub fn start(options: ShmOptions) -> Result<Arc<ShmEngine>> {
        let configured_max = options.max_transfer.clamp(LEAST_MAX_TRANSFER, MAX_TRANSFER);
        let shared = Arc::new(Shared {
            commands: SegQueue::new(),
            queues: Default::default(),
            completions: SegQueue::new(),
            waker: AtomicWaker::new(),
            sleeping: AtomicBool::new(false),
            worker: OnceLock::new(),
            next_id: AtomicU32::new(0),
            max_transfer: AtomicUsize::new(configured_max),
            spin_ns: AtomicU64::new(options.spin.as_nanos() as u64),
            bytes: AtomicU64::new(0),
            transfers: AtomicU64::new(0),
            doorbells: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        });
        let device = ShmDevice::new(Arc::clone(&shared), options.profile, options.faults);
        let thread = spawn(ThreadClass::Dma, &options.number.to_string(), move || device.run())?;
        let _ = shared.worker.set(thread.thread().clone());
        shared.wake_worker();
        let name = match options.profile {
            Profile::Memcpy => "shm".to_owned(),
            other => format!("shm:{}", other.name()),
        };
        let (thread, profile) = (Mutex::new(Some(thread)), options.profile);
        Ok(Arc::new(ShmEngine { shared, thread, name, profile, configured_max }))
    }

    /// Attaches to a peer. The device maps the peer's memory between two transfers.
    async fn attach_descriptors(&self, descriptors: MemoryFds, len: usize) -> Result<Joined> {
        let MemoryFds { memory, host_doorbell, osd_doorbell } = descriptors;
        let (host_doorbell, osd_doorbell) =
            (Doorbell::of_peer(host_doorbell)?, Doorbell::of_peer(osd_doorbell)?);
        let id = PeerId(self.fresh_id());
        let (reply, answer) = oneshot::channel();
        let shared = Arc::clone(&self.shared);
        // Create `detach` before the wait, so that the peer is detached even if the caller is
        // cancelled.
        let detach = OnDrop::new(move || shared.to_every_queue(id, ShmItem::Detach));
        self.shared.send(ShmCommand::Attach { id, memory, len, doorbell: host_doorbell, reply });
        answer.await.map_err(|_| ChannelError::EngineStopped(self.name.clone()))??;
        Ok((EnginePeer { id, len, detach }, Box::new(Doorbell::new(osd_doorbell)?)))
    }

    fn region(&self, id: RegionId, len: usize) -> DmaRegion {
        let shared = Arc::clone(&self.shared);
        DmaRegion::new(id, len, OnDrop::new(move || shared.to_every_queue(id, ShmItem::Unregister)))
    }

    fn fresh_id(&self) -> u32 {
        self.shared.next_id.fetch_add(1, Ordering::Relaxed)
    }
}

impl Shared {
    fn send(&self, command: ShmCommand) {
        self.commands.push(command);
        self.wake_worker();
    }

    fn to_every_queue<T>(&self, what: T, item: fn(Arc<T>) -> ShmItem) {
        share_among_queues(what, QUEUES, |queue, share| self.queues[queue].items.push(item(share)));
        self.wake_worker();
    }

    /// Wakes the worker if it sleeps. The fence pairs with the fence in [`ShmDevice::sleep`]:
    /// either the worker sees the command, or this call sees that the worker sleeps.
    fn wake_worker(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed)
            && self.sleeping.swap(false, Ordering::AcqRel)
            && let Some(worker) = self.worker.get()
        {
            worker.unpark();
        }
    }
}

impl Drop for ShmEngine {
    fn drop(&mut self) {
        self.shared.send(ShmCommand::Stop);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The thread only copies memory, so it ends soon. A panic of the thread was reported
            // when it happened.
            let _ = thread.join();
        }
    }
}

// SAFETY: only the device's thread has the mappings, and only the transfers of a chain use them. The
// thread reports a chain's completion after its last transfer.
#[allow(unsafe_code)]
unsafe impl DmaEngine for ShmEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn is_emulated(&self) -> bool {
        true
    }

    fn max_transfer(&self) -> usize {
        self.shared.max_transfer.load(Ordering::Relaxed)
    }

    fn queues(&self) -> usize {
        QUEUES
    }

    fn queue_depth(&self) -> usize {
        QUEUE_DEPTH
    }

    fn setup_cost(&self) -> Duration {
        match (self.profile, self.profile.pace()) {
            (Profile::Bf3Paper, Some((setup, _))) => setup,
            _ => Duration::ZERO,
        }
    }

    fn register_local(&self, memory: &OutsideAccess) -> Result<DmaRegion> {
        let (id, len) = (RegionId(self.fresh_id()), memory.arena().len());
        self.shared.send(ShmCommand::Local(id, memory.for_device(0..len)?));
        Ok(self.region(id, len))
    }

    fn reach(&self) -> Reach {
        Reach::Descriptors
    }

    fn attaches_anew(&self) -> bool {
        false
    }

    fn attach(&self, access: MemoryAccess, len: usize) -> BoxFuture<'_, Result<Joined>> {
        Box::pin(async move {
            match access {
                MemoryAccess::Descriptors(descriptors) => self.attach_descriptors(descriptors, len).await,
                MemoryAccess::Offer(_) => {
                    let what = "a libfabric offer";
                    Err(ChannelError::WrongMemoryAccess { engine: self.name.clone(), what })
                }
                #[cfg(feature = "sim")]
                MemoryAccess::Sim(_) => {
                    let what = "simulated memory";
                    Err(ChannelError::WrongMemoryAccess { engine: self.name.clone(), what })
                }
            }
        })
    }

    fn register_peer(&self, peer: &EnginePeer, range: Range<usize>) -> Result<DmaRegion> {
        if range.is_empty() || range.end > peer.len {
            let what = format!("the range {range:?} is not inside the {} bytes of peer memory", peer.len);
            return Err(ChannelError::Transfer(what));
        }
        let (id, len) = (RegionId(self.fresh_id()), range.len());
        self.shared.send(ShmCommand::Window(id, peer.id, range));
        Ok(self.region(id, len))
    }

    fn post(&self, queue: QueueId, chain: Chain) -> Result<(), RejectedChain> {
        // Check against the configured limit: a chain prepared before tuning may exceed the tuned
        // limit.
        let most = self.configured_max;
        if let Some(long) = chain.transfers.iter().find(|t| t.len > most) {
            let what = format!("a transfer has {} bytes, but the limit is {most}", long.len);
            return Err(RejectedChain::Refused(ChannelError::Transfer(what)));
        }
        let Some(queue) = self.shared.queues.get(queue) else {
            let what = format!("queue {queue} does not exist; the engine has {QUEUES} queues");
            return Err(RejectedChain::Refused(ChannelError::Transfer(what)));
        };
        while queue.posted.fetch_add(1, Ordering::SeqCst) >= QUEUE_DEPTH {
            queue.posted.fetch_sub(1, Ordering::SeqCst);
            queue.was_full.store(true, Ordering::SeqCst);
            // The thread wakes the caller only if it sees `was_full`. If the thread has emptied the
            // queue before the flag was set, it wakes no caller, but the queue has room now. Try
            // again in that case.
            if queue.posted.load(Ordering::SeqCst) > QUEUE_DEPTH / 2 {
                return Err(RejectedChain::Full(chain));
            }
        }
        queue.items.push(ShmItem::Chain(chain));
        self.shared.wake_worker();
        Ok(())
    }

    fn poll_completions(&self, cx: &mut Context<'_>, out: &mut Vec<ChainCompletion>) {
        self.shared.waker.register(cx.waker());
        while let Some(completion) = self.shared.completions.pop() {
            out.push(completion);
        }
    }

    fn reset(&self) {
        self.shared.send(ShmCommand::Reset);
    }

    fn tune(&self, tuning: crate::EngineTuning) {
        if let Some(most) = tuning.max_transfer {
            self.shared
                .max_transfer
                .store(most.clamp(LEAST_MAX_TRANSFER, self.configured_max), Ordering::Relaxed);
        }
        if let Some(spin) = tuning.spin {
            self.shared.spin_ns.store(spin.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    fn counters(&self) -> Counters {
        let get = |v: &AtomicU64| v.load(Ordering::Relaxed);
        Counters {
            bytes: get(&self.shared.bytes),
            transfers: get(&self.shared.transfers),
            doorbells: get(&self.shared.doorbells),
            failed: get(&self.shared.failed),
            bounced: 0,
        }
    }
}
