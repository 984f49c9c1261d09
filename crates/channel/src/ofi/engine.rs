//! [`OfiEngine`]: the interface of the engine `ofi` to its callers.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Context;
use std::thread::JoinHandle;
use std::time::Duration;

use base::fault::Faults;
use base::mem::OutsideAccess;
use base::thread::{ThreadClass, spawn};
use fabric::Library;
use futures::future::BoxFuture;
use tokio::sync::oneshot;

use super::rung::{OfiBell, Rung};
use super::shared::{OfiCommand, OfiItem, QUEUE_DEPTH, Shared};
use super::worker::EngineWorker;
use super::{OfiOffer, QUEUES};
use crate::dma::{OnDrop, PeerId, QueueId};
use crate::{
    Bell, Chain, ChainCompletion, ChannelError, Counters, DmaEngine, DmaRegion, EnginePeer, EngineTuning,
    Joined, MemoryAccess, Reach, RegionId, RejectedChain, Result,
};

/// Minimum length of host memory, in bytes.
const LEAST_MEMORY: usize = 4096;
/// Lower bound of the maximum transfer length, in bytes.
const LEAST_MAX_TRANSFER: usize = 4096;

/// Options of an [`OfiEngine`].
#[derive(Debug, Clone)]
pub struct OfiOptions {
    /// The only libfabric provider that an offer may name, e.g. `verbs` or `tcp`.
    pub provider: String,
    /// Maximum length of a transfer, in bytes. The provider's own limit still applies.
    pub max_transfer: usize,
    /// How long the thread polls for more work before it sleeps.
    pub spin: Duration,
    /// Whether reads always use a bounce buffer, from which the engine's thread copies their data to
    /// its destination. Over iWARP, reads use a bounce buffer even if this is `false`.
    pub always_bounce: bool,
    /// Time limit for opening the connections to a peer, when attaching and after a failure.
    pub attach_timeout: Duration,
    /// Faults to inject.
    pub faults: Faults,
    /// Number in the name of the engine's thread.
    pub number: u16,
}

impl Default for OfiOptions {
    fn default() -> Self {
        OfiOptions {
            provider: "verbs".to_owned(),
            max_transfer: crate::MAX_TRANSFER,
            spin: Duration::from_micros(10),
            always_bounce: false,
            attach_timeout: Duration::from_secs(3),
            faults: Faults::default(),
            number: 0,
        }
    }
}

/// The engine that moves bytes by one-sided operations of libfabric. Dropping its last handle ends
/// the thread and closes all connections.
pub struct OfiEngine {
    shared: Arc<Shared>,
    next_id: AtomicU32,
    thread: Mutex<Option<JoinHandle<()>>>,
    provider: String,
    configured_max: usize,
    attach_timeout: Duration,
}

impl OfiEngine {
    /// Loads libfabric and starts the engine's thread.
    ///
    /// # Errors
    /// Fails if libfabric is missing, or if the system cannot start another thread.
    pub fn start(options: OfiOptions) -> Result<Arc<OfiEngine>> {
        let library = Library::load()?;
        let configured_max = options.max_transfer.max(LEAST_MAX_TRANSFER);
        let shared = Shared::new(configured_max, options.spin)?;
        let worker = EngineWorker::new(Arc::clone(&shared), library, configured_max, &options);
        let thread = spawn(ThreadClass::Fabric, &options.number.to_string(), move || worker.run())?;
        let OfiOptions { provider, attach_timeout, .. } = options;
        let (next_id, thread) = (AtomicU32::new(0), Mutex::new(Some(thread)));
        Ok(Arc::new(OfiEngine { shared, next_id, thread, provider, configured_max, attach_timeout }))
    }

    /// Number of times that connections were opened again with other local ports, because TCP used
    /// one that rdma_cm had chosen. This happens only over iWARP.
    pub fn ports_in_use(&self) -> u64 {
        self.shared.ports_in_use.load(Ordering::Relaxed)
    }

    /// Attaches to the memory that a store's process [granted](super::OfiGrant). Completes when the
    /// connections are established.
    async fn attach_offer(&self, offer: OfiOffer, len: usize) -> Result<Joined> {
        if offer.provider != self.provider {
            let what = format!(
                "the store offers provider {}, but this osd uses {}; configure the same provider for both",
                offer.provider, self.provider
            );
            return Err(ChannelError::Refused(what));
        }
        if offer.memory.len != len as u64 || len < LEAST_MEMORY {
            let what = format!("it offers {} bytes of host memory instead of {len}", offer.memory.len);
            return Err(ChannelError::protocol(what));
        }
        let (id, rung) = (PeerId(self.fresh_id()), Arc::new(Rung::default()));
        let (shared, detached) = (Arc::clone(&self.shared), Arc::clone(&rung));
        let detach = OnDrop::new(move || {
            detached.detach();
            shared.to_every_queue(id, OfiItem::Detach);
        });
        let (reply, answer) = oneshot::channel();
        self.shared.send(OfiCommand::Attach { id, offer, rung: Arc::clone(&rung), reply });
        // On failure, dropping `detach` makes the thread remove the peer.
        let provider_max = match tokio::time::timeout(self.attach_timeout, answer).await {
            Ok(Ok(result)) => result?,
            Ok(Err(_)) => return Err(ChannelError::EngineStopped(self.name().to_owned())),
            Err(_) => {
                let what = format!("no connection was established within {:?}", self.attach_timeout);
                return Err(ChannelError::Refused(what));
            }
        };
        self.shared.provider_max.store(provider_max, Ordering::Relaxed);
        let bell: Box<dyn Bell> = Box::new(OfiBell(rung));
        Ok((EnginePeer { id, len, detach }, bell))
    }

    fn region(&self, id: RegionId, len: usize) -> DmaRegion {
        let shared = Arc::clone(&self.shared);
        DmaRegion::new(id, len, OnDrop::new(move || shared.to_every_queue(id, OfiItem::Unregister)))
    }

    fn fresh_id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }
}

impl Drop for OfiEngine {
    fn drop(&mut self) {
        self.shared.send(OfiCommand::Stop);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // A panic of the thread was reported when it happened; ignore the result.
            let _ = thread.join();
        }
    }
}

// SAFETY: only the engine's thread has the registrations, and only the transfers of a chain use
// them. The thread reports a chain's completion after its last operation has completed, or after the
// operation's endpoint is closed.
#[allow(unsafe_code)]
unsafe impl DmaEngine for OfiEngine {
    fn name(&self) -> &str {
        "ofi"
    }

    /// Returns `false` for every provider: `tcp` is slow, but it emulates no hardware.
    fn is_emulated(&self) -> bool {
        false
    }

    fn max_transfer(&self) -> usize {
        let get = |v: &AtomicUsize| v.load(Ordering::Relaxed);
        get(&self.shared.max_transfer).min(get(&self.shared.provider_max))
    }

    fn queues(&self) -> usize {
        QUEUES
    }

    fn queue_depth(&self) -> usize {
        QUEUE_DEPTH
    }

    fn setup_cost(&self) -> Duration {
        Duration::ZERO
    }

    fn register_local(&self, memory: &OutsideAccess) -> Result<DmaRegion> {
        let id = RegionId(self.fresh_id());
        self.shared.send(OfiCommand::Local(id, memory.clone()));
        Ok(self.region(id, memory.arena().len()))
    }

    fn reach(&self) -> Reach {
        Reach::Ofi { provider: self.provider.clone() }
    }

    fn attaches_anew(&self) -> bool {
        true
    }

    /// Accepts only offers, because a descriptor is useless on another machine.
    fn attach(&self, access: MemoryAccess, len: usize) -> BoxFuture<'_, Result<Joined>> {
        Box::pin(async move {
            match access {
                MemoryAccess::Offer(offer) => self.attach_offer(offer, len).await,
                MemoryAccess::Descriptors(_) => Err(ChannelError::WrongMemoryAccess {
                    engine: self.name().to_owned(),
                    what: "file descriptors of this machine",
                }),
                #[cfg(feature = "sim")]
                MemoryAccess::Sim(_) => Err(ChannelError::WrongMemoryAccess {
                    engine: self.name().to_owned(),
                    what: "simulated memory",
                }),
            }
        })
    }

    fn register_peer(&self, peer: &EnginePeer, range: Range<usize>) -> Result<DmaRegion> {
        if range.is_empty() || range.end > peer.len {
            let what = format!("the range {range:?} is not inside the {} bytes of peer memory", peer.len);
            return Err(ChannelError::Transfer(what));
        }
        let (id, len) = (RegionId(self.fresh_id()), range.len());
        self.shared.send(OfiCommand::Window(id, peer.id, range));
        Ok(self.region(id, len))
    }

    fn post(&self, queue: QueueId, chain: Chain) -> Result<(), RejectedChain> {
        // Check against the configured limit: a chain prepared before tuning may exceed the tuned
        // limit.
        let most = self.configured_max.min(self.shared.provider_max.load(Ordering::Relaxed));
        if let Some(long) = chain.transfers.iter().find(|t| t.len > most) {
            let what = format!("a transfer has {} bytes, but the limit is {most}", long.len);
            return Err(RejectedChain::Refused(ChannelError::Transfer(what)));
        }
        let Some(queue) = self.shared.queues.get(queue) else {
            let what = format!("queue {queue} does not exist; the engine has {QUEUES} queues");
            return Err(RejectedChain::Refused(ChannelError::Transfer(what)));
        };
        queue.post(chain)?;
        self.shared.alarm.wake();
        Ok(())
    }

    fn poll_completions(&self, cx: &mut Context<'_>, out: &mut Vec<ChainCompletion>) {
        self.shared.waker.register(cx.waker());
        while let Some(completion) = self.shared.completions.pop() {
            out.push(completion);
        }
    }

    fn tune(&self, tuning: EngineTuning) {
        if let Some(most) = tuning.max_transfer {
            let most = most.clamp(LEAST_MAX_TRANSFER, self.configured_max);
            self.shared.max_transfer.store(most, Ordering::Relaxed);
        }
        if let Some(spin) = tuning.spin {
            self.shared.spin_ns.store(spin.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// Closes the connections to all peers. Only closed connections guarantee that no transfer
    /// accesses memory any more. The next chain for a peer opens its connections again.
    fn reset(&self) {
        self.shared.queues.iter().for_each(|queue| queue.items.push(OfiItem::Reset));
        self.shared.send(OfiCommand::Reset);
    }

    fn counters(&self) -> Counters {
        let get = |v: &AtomicU64| v.load(Ordering::Relaxed);
        Counters {
            bytes: get(&self.shared.bytes),
            transfers: get(&self.shared.transfers),
            doorbells: get(&self.shared.doorbells),
            failed: get(&self.shared.failed),
            bounced: get(&self.shared.bounced),
        }
    }
}
