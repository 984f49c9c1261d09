//! The osd's attachment to a store process. It outlives restarts of the store.

use std::sync::Arc;

use base::fault::Faults;
use base::pool::BufferPool;
use base::task;
use base::thread::ThreadClass;
use base::watch;
use channel::{ChannelError, DmaEngine, DpuMemory, ShmEngine, ShmOptions, TargetInfo};
use ec::offload::scheduler::health_status;
use futures::future::BoxFuture;
use wire::{OffloadState, OffloadStatus};

use crate::options::{AttachmentOptions, DmaTuning, StoreEndpoint};
use crate::proxy_store::ProxyStore;
use crate::proxy_store_set::ProxyStoreSet;
use crate::shared::{AttachmentHandle, Shared};
use crate::supervise::supervise;

/// The state of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachmentStatus {
    /// Whether a store is connected.
    pub connected: bool,
    /// Number of incarnations of the store so far. It exceeds 1 if the store restarted.
    pub incarnations: u64,
    /// Why the last incarnation ended, if one has ended.
    pub last_failure: Option<String>,
    /// Number of stages in the current incarnation.
    pub stages: usize,
    /// Whether the attachment has host memory, so that DMA can carry payload.
    pub by_dma: bool,
    /// Why there is no host memory, although it was requested.
    pub why_no_dma: Option<String>,
    /// The current state of DMA. Byte counts are of this incarnation.
    pub offload: OffloadStatus,
}

/// The lasting association of one shard with one store process and its targets. Clones share one attachment. The
/// attachment is closed when its last clone and its last [`ProxyStore`] are dropped.
#[derive(Clone)]
pub struct Attachment {
    handle: Arc<AttachmentHandle>,
}

impl Attachment {
    /// Connects to the store at `endpoint`, and waits for the store if necessary. The attachment's
    /// tasks run on the current tokio runtime. Use the runtime of the osd's shard, so that a reply
    /// wakes the thread that waits for it.
    ///
    /// # Errors
    /// Fails if the seat is invalid, if memory cannot be allocated, or if no store answered in time.
    pub fn connect(
        endpoint: StoreEndpoint,
        options: AttachmentOptions,
    ) -> BoxFuture<'static, Result<Attachment, ChannelError>> {
        // The future is boxed, so that its code is generated only in this crate.
        Box::pin(async move {
            options.seat.check()?;
            let memory = DpuMemory::new(options.memory)?;
            let engine: Arc<dyn DmaEngine> = match &options.engine {
                Some(engine) => Arc::clone(engine),
                None => {
                    ShmEngine::start(ShmOptions { faults: options.faults.clone(), ..ShmOptions::default() })?
                }
            };
            let shared = Shared::new(memory, engine, endpoint, options)?;
            let mut incarnation = shared.incarnation.subscribe();
            let wait = shared.options.wait_for_store;
            let attachment =
                Attachment { handle: Arc::new(AttachmentHandle { shared: Arc::clone(&shared) }) };
            task::spawn(ThreadClass::Channel, supervise(shared));
            match tokio::time::timeout(wait, incarnation.wait_for(|g| *g > 0)).await {
                Ok(Ok(_)) => Ok(attachment),
                _ => Err(attachment.no_store_error()),
            }
        })
    }

    fn no_store_error(&self) -> ChannelError {
        let why = self.handle.shared.lock().last_failure.clone();
        let why = why.unwrap_or_else(|| "the store did not answer".to_owned());
        ChannelError::Refused(format!(
            "no attachment to {:?} could be opened: {why}",
            self.handle.shared.endpoint
        ))
    }

    /// The store's targets, as named in the first handshake. A store that later returns with other
    /// targets is refused; see [`Attachment::superseded`].
    #[must_use]
    pub fn targets(&self) -> Vec<TargetInfo> {
        self.handle.shared.targets()
    }

    /// Resolves once a store with other targets has answered, for example after a target was
    /// replaced. This attachment does not use that store. Drop the attachment and connect again.
    pub async fn superseded(&self) {
        let mut superseded = self.handle.shared.superseded.subscribe();
        // This cannot fail: the sender lives as long as `self`.
        drop(superseded.wait_for(|superseded| *superseded).await);
    }

    /// Returns the object store of the target with this index.
    ///
    /// # Panics
    /// Panics if the target does not exist.
    #[must_use]
    pub fn store(&self, index: usize) -> Arc<ProxyStore> {
        assert!(index < self.targets().len(), "target {index} does not exist");
        Arc::new(ProxyStore::new(Arc::clone(&self.handle), index as u16))
    }

    /// All targets together, for calls that concern several of them.
    #[must_use]
    pub fn store_set(&self) -> Arc<ProxyStoreSet> {
        Arc::new(ProxyStoreSet::new(Arc::clone(&self.handle)))
    }

    /// Staging buffers in DPU memory. Payload in these buffers is not copied on its way to the
    /// host.
    #[must_use]
    pub fn pool(&self) -> &BufferPool {
        self.handle.shared.memory.pool()
    }

    /// The DMA engine.
    #[must_use]
    pub fn engine(&self) -> &Arc<dyn DmaEngine> {
        &self.handle.shared.engine
    }

    /// The current incarnation's number, counted from 1. When it changes, all data that the caller
    /// has cached from the store is invalid.
    #[must_use]
    pub fn incarnation(&self) -> watch::Receiver<u64> {
        self.handle.shared.incarnation.subscribe()
    }

    /// The current state of the attachment.
    #[must_use]
    pub fn status(&self) -> AttachmentStatus {
        let state = self.handle.shared.lock();
        let store_channel = state.store_channel();
        let status = store_channel.map(|store_channel| store_channel.status());
        let by_dma = store_channel.is_some_and(|store_channel| store_channel.by_dma);
        let mut health = health_status(self.handle.shared.health.report());
        if !by_dma || state.why_no_dma.is_some() {
            health.state = OffloadState::NotInUse;
        }
        health.last_failure = state.why_no_dma.clone().or(health.last_failure);
        let armed = self.faults().armed().into_iter();
        AttachmentStatus {
            connected: store_channel.is_some(),
            incarnations: state.incarnations,
            last_failure: state.last_failure.clone(),
            stages: status.map_or(0, |s| s.stages),
            by_dma,
            why_no_dma: state.why_no_dma.clone(),
            offload: OffloadStatus {
                health,
                quarantined_bytes: status.map_or(0, |s| s.quarantined as u64),
                kept_bytes: status.map_or(0, |s| s.kept_bytes),
                fallback_bytes: status.map_or(0, |s| s.put_bytes),
                faults: armed.map(|armed| armed.to_string()).collect(),
            },
        }
    }

    /// Changes the DMA settings from now on.
    pub fn tune(&self, tuning: DmaTuning) {
        self.handle.shared.tune(tuning);
    }

    /// The faults that tests can arm in this process.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.handle.shared.options.faults
    }

    /// Ends the attachment. Unanswered calls fail.
    pub fn close(&self) {
        self.handle.shared.close();
    }
}
