//! [`SimEngine`]: the simulated DMA engine.

use std::future::poll_fn;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use base::mem::{Arena, OutsideAccess};
use futures::future::BoxFuture;
use tokio::time::Sleep;

use super::device::{SimDevice, SimItem};
use super::lock;
use crate::dma::OnDrop;
use crate::farewell::share_among_queues;
use crate::{
    Chain, ChainCompletion, ChannelError, Counters, DmaEngine, DmaRegion, EnginePeer, EngineTuning, Joined,
    MAX_TRANSFER, MemoryAccess, QueueId, Reach, RegionId, RejectedChain, Result,
};

/// Name of the engine in errors and reports.
const NAME: &str = "sim";

/// How a device behaves after it has failed, until a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFailure {
    /// Every transfer fails.
    Fails,
    /// No chain completes.
    Hangs,
}

/// How often a simulated engine injects each fault. Each probability is from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineFaults {
    /// Minimum length of the transfers that faults hit, in bytes. Ring entries have up to 20 KiB.
    pub min_len: usize,
    /// Probability that a transfer fails. Part of its bytes may have arrived.
    pub fail: f64,
    /// Probability that a transfer completes late. Half of these transfers move their bytes at the
    /// end of the delay, the others at its start.
    pub stall: f64,
    /// Maximum delay of a late transfer.
    pub stall_max: Duration,
    /// Probability that a transfer damages one byte.
    pub corrupt: f64,
    /// Probability that the device does not ring a doorbell.
    pub drop_doorbell: f64,
    /// Probability per transfer that the device fails: all transfers fail, or no chain completes.
    pub device: f64,
}

/// Options of a simulated engine.
#[derive(Debug, Clone)]
pub struct SimEngineOptions {
    /// Determines all delays and faults.
    pub seed: u64,
    /// Number of queues.
    pub queues: usize,
    /// Maximum number of chains per queue that are posted and not complete.
    pub queue_depth: usize,
    /// Maximum length of a transfer, in bytes. Tuning can lower it.
    pub max_transfer: usize,
    /// Fixed time of each transfer.
    pub setup: Duration,
    /// Additional time of a transfer per KiB.
    pub per_kib: Duration,
    /// Maximum of the random time that is added to each transfer.
    pub jitter: Duration,
    /// Fixed time that the engine reports for a payload chain ([`DmaEngine::setup_cost`]).
    pub setup_cost: Duration,
    /// Faults to inject.
    pub faults: EngineFaults,
}

impl Default for SimEngineOptions {
    /// Returns the options of the device that `shm` stands for, a BlueField-3, without faults.
    fn default() -> Self {
        SimEngineOptions {
            seed: 0,
            queues: 5,
            queue_depth: 1024,
            max_transfer: MAX_TRANSFER,
            setup: Duration::from_micros(2),
            per_kib: Duration::from_nanos(50),
            jitter: Duration::from_micros(20),
            setup_cost: Duration::ZERO,
            faults: EngineFaults::default(),
        }
    }
}

/// What a simulated engine has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SimEngineStats {
    /// Hash of all operations with their times.
    pub trace: u64,
    /// Number of operations in the trace.
    pub operations: u64,
    /// Transfers that failed because a fault was injected.
    pub failed: u64,
    /// Transfers that a fault delayed.
    pub stalled: u64,
    /// Delayed transfers that moved their bytes at the end of the delay.
    pub moved_late: u64,
    /// Transfers in which a byte was damaged.
    pub corrupted: u64,
    /// Doorbells that were not rung.
    pub dropped_doorbells: u64,
    /// Failures of the device after which transfers failed.
    pub device_failures: u64,
    /// Failures of the device after which no chain completed.
    pub device_hangs: u64,
    /// Resets.
    pub resets: u64,
}

/// A DMA engine in simulated time.
///
/// The engine belongs to the osd's role, but its device runs outside: the future that
/// [`SimEngine::new`] returns performs the transfers. The device goes on while the osd is paused.
/// Before the osd is killed, [`SimEngine::sever`] stops the device.
#[derive(Debug)]
pub struct SimEngine {
    device: Arc<Mutex<SimDevice>>,
    options: SimEngineOptions,
}

impl SimEngine {
    /// Creates an engine, and the future that performs its transfers. The simulation polls the
    /// future outside of the roles. It completes when the engine was severed or dropped.
    pub fn new(options: SimEngineOptions) -> (Arc<SimEngine>, impl Future<Output = ()> + Send + 'static) {
        let device = Arc::new(Mutex::new(SimDevice::new(options.clone())));
        let running = run(Arc::clone(&device));
        (Arc::new(SimEngine { device, options }), running)
    }

    /// Stops the device for ever. Incomplete chains vanish: they move no more bytes, ring no
    /// doorbells and do not complete.
    pub fn sever(&self) {
        lock(&self.device).sever();
    }

    /// Changes the faults from now on. Transfers in progress keep their faults.
    pub fn set_faults(&self, faults: EngineFaults) {
        lock(&self.device).options.faults = faults;
    }

    /// Makes the device fail until it is reset.
    pub fn fail_device(&self, failure: DeviceFailure) {
        lock(&self.device).break_down(failure);
    }

    /// What the engine has done so far.
    #[must_use]
    pub fn stats(&self) -> SimEngineStats {
        lock(&self.device).stats()
    }

    /// Number of chains that are posted and not complete.
    #[must_use]
    pub fn pending(&self) -> usize {
        lock(&self.device).pending()
    }

    fn region(&self, id: RegionId, len: usize) -> DmaRegion {
        let (device, queues) = (Arc::clone(&self.device), self.options.queues);
        let unregister = OnDrop::new(move || {
            share_among_queues(id, queues, |queue, share| {
                lock(&device).push(queue, SimItem::Unregister(share));
            });
        });
        DmaRegion::new(id, len, unregister)
    }
}

/// Performs the transfers of a device.
async fn run(device: Arc<Mutex<SimDevice>>) {
    let mut timer: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|cx| {
        loop {
            let mut state = lock(&device);
            if state.is_over() {
                return Poll::Ready(());
            }
            state.work();
            let next = state.next_event();
            state.waker = Some(cx.waker().clone());
            drop(state);
            let Some(at) = next else {
                timer = None;
                return Poll::Pending;
            };
            let mut sleep = Box::pin(tokio::time::sleep_until(at));
            let is_due = sleep.as_mut().poll(cx).is_ready();
            timer = Some(sleep);
            if !is_due {
                return Poll::Pending;
            }
        }
    })
    .await;
    drop(timer);
}

impl Drop for SimEngine {
    fn drop(&mut self) {
        self.sever();
    }
}

// SAFETY: only the device has the mappings, and it uses them only for the transfers of a chain. It
// reports a chain's completion after its last transfer, and a reset discards the transfers of a
// chain before it reports the chain's completion.
#[allow(unsafe_code)]
unsafe impl DmaEngine for SimEngine {
    fn name(&self) -> &str {
        NAME
    }

    fn is_emulated(&self) -> bool {
        true
    }

    fn max_transfer(&self) -> usize {
        lock(&self.device).max_transfer
    }

    fn queues(&self) -> usize {
        self.options.queues
    }

    fn queue_depth(&self) -> usize {
        self.options.queue_depth
    }

    fn setup_cost(&self) -> Duration {
        self.options.setup_cost
    }

    fn register_local(&self, memory: &OutsideAccess) -> Result<DmaRegion> {
        let len = memory.arena().len();
        let id = lock(&self.device).register(memory.for_device(0..len)?);
        Ok(self.region(id, len))
    }

    fn reach(&self) -> Reach {
        Reach::Descriptors
    }

    fn attaches_anew(&self) -> bool {
        false
    }

    fn has_stopped(&self) -> bool {
        lock(&self.device).is_over()
    }

    fn attach(&self, access: MemoryAccess, len: usize) -> BoxFuture<'_, Result<Joined>> {
        Box::pin(async move {
            let MemoryAccess::Sim(memory) = access else {
                let what = "memory that is not simulated";
                return Err(ChannelError::WrongMemoryAccess { engine: NAME.to_owned(), what });
            };
            let arena = Arena::from_peer(memory.memory, len)?;
            let id = lock(&self.device).attach(arena, memory.host_doorbell)?;
            let (device, queues) = (Arc::clone(&self.device), self.options.queues);
            let detach = OnDrop::new(move || {
                share_among_queues(id, queues, |queue, share| {
                    lock(&device).push(queue, SimItem::Detach(share));
                });
            });
            Ok((EnginePeer { id, len, detach }, Box::new(memory.osd_doorbell) as Box<_>))
        })
    }

    fn register_peer(&self, peer: &EnginePeer, range: Range<usize>) -> Result<DmaRegion> {
        if range.is_empty() || range.end > peer.len {
            let what = format!("the range {range:?} is not inside the {} bytes of peer memory", peer.len);
            return Err(ChannelError::Transfer(what));
        }
        let len = range.len();
        let id = lock(&self.device).register_window(peer.id, range)?;
        Ok(self.region(id, len))
    }

    fn post(&self, queue: QueueId, chain: Chain) -> Result<(), RejectedChain> {
        let most = self.options.max_transfer;
        if let Some(long) = chain.transfers.iter().find(|t| t.len > most) {
            let what = format!("a transfer has {} bytes, but the limit is {most}", long.len);
            return Err(RejectedChain::Refused(ChannelError::Transfer(what)));
        }
        if queue >= self.options.queues {
            let what = format!("queue {queue} does not exist; the engine has {} queues", self.options.queues);
            return Err(RejectedChain::Refused(ChannelError::Transfer(what)));
        }
        lock(&self.device).post(queue, chain)
    }

    fn poll_completions(&self, cx: &mut Context<'_>, out: &mut Vec<ChainCompletion>) {
        lock(&self.device).poll_completions(cx, out);
    }

    fn tune(&self, tuning: EngineTuning) {
        if let Some(most) = tuning.max_transfer {
            lock(&self.device).max_transfer = most.clamp(4096, self.options.max_transfer);
        }
    }

    fn reset(&self) {
        lock(&self.device).begin_reset();
    }

    fn counters(&self) -> Counters {
        lock(&self.device).counters
    }
}
