//! The osd's attachment to a store process: opened, watched, and opened again when the store restarts.

use std::sync::Arc;

use base::fault::Faults;
use base::health;
use base::pool::BufferPool;
use base::thread::ThreadClass;
use base::work;
use channel::{ChannelError, DmaEngine, DpuMemory, ShmEngine, ShmOptions, TargetInfo};
use tokio::sync::watch;

use crate::options::{AttachmentOptions, DmaTuning, StoreEndpoint};
use crate::proxy_store::ProxyStore;
use crate::proxy_stripes::ProxyStripes;
use crate::shared::{AttachmentHandle, Shared};
use crate::supervise::supervise;

/// How an attachment stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachmentStatus {
    /// Whether a store is there.
    pub connected: bool,
    /// Incarnations of the store so far; more than one if the store restarted.
    pub incarnations: u64,
    /// Why the last one ended, if one did.
    pub last_failure: Option<String>,
    /// Stages of the present incarnation.
    pub stages: usize,
    /// Whether there is host memory, so that payload can go by DMA.
    pub by_dma: bool,
    /// Why not, if it was to have some.
    pub why_no_dma: Option<String>,
    /// Whether it does at present, and what has happened.
    pub offload: Offload,
}

/// How DMA stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offload {
    /// Whether it is used, and why not.
    pub health: health::HealthReport,
    /// Bytes of host memory that transfers may still touch.
    pub quarantined: usize,
    /// Bytes that had come by DMA when it failed and were not sent again, in this incarnation.
    pub kept_bytes: u64,
    /// Bytes that went by the socket in the place of DMA, in this incarnation.
    pub fallback_bytes: u64,
}

/// The lasting association with one store process and its targets. Clones share it; when the last one and the last
/// [`ProxyStore`] are dropped, it is closed.
#[derive(Clone)]
pub struct Attachment {
    handle: Arc<AttachmentHandle>,
}

impl Attachment {
    /// Joins the store at `endpoint`, waiting for it if need be. The attachment lives on the current tokio runtime: best
    /// that of the OSD's shard, so that replies wake the thread that waits for them.
    ///
    /// # Errors
    /// If memory cannot be had, or no store answered in time.
    pub async fn connect(
        endpoint: StoreEndpoint,
        options: AttachmentOptions,
    ) -> Result<Attachment, ChannelError> {
        let memory = DpuMemory::new(options.memory)?;
        let engine: Arc<dyn DmaEngine> = match &options.engine {
            Some(engine) => Arc::clone(engine),
            None => ShmEngine::start(ShmOptions { faults: options.faults.clone(), ..ShmOptions::default() })?,
        };
        let shared = Shared::new(memory, engine, endpoint, options)?;
        let mut incarnation = shared.incarnation.subscribe();
        let wait = shared.options.wait_for_store;
        let attachment = Attachment { handle: Arc::new(AttachmentHandle { shared: Arc::clone(&shared) }) };
        tokio::spawn(work::booked(ThreadClass::Channel, supervise(shared)));
        match tokio::time::timeout(wait, incarnation.wait_for(|g| *g > 0)).await {
            Ok(Ok(_)) => Ok(attachment),
            _ => Err(attachment.no_store_error()),
        }
    }

    fn no_store_error(&self) -> ChannelError {
        let why = self.handle.shared.lock().last_failure.clone();
        let why = why.unwrap_or_else(|| "no answer".to_owned());
        ChannelError::Refused(format!("no attachment to {:?}: {why}", self.handle.shared.endpoint))
    }

    /// The store's targets, as it named them at first. A store with others is refused
    /// later on; see [`Attachment::superseded`].
    #[must_use]
    pub fn targets(&self) -> Vec<TargetInfo> {
        self.handle.shared.targets()
    }

    /// Resolves once a store with other targets has answered, as after a target was replaced. This
    /// attachment does not use that store: drop the attachment, and connect anew.
    pub async fn superseded(&self) {
        let mut superseded = self.handle.shared.superseded.subscribe();
        // The sender lives as long as `self`.
        let _ = superseded.wait_for(|superseded| *superseded).await;
    }

    /// The store of target `index`.
    ///
    /// # Panics
    /// If there is no such target.
    #[must_use]
    pub fn store(&self, index: usize) -> Arc<ProxyStore> {
        assert!(index < self.targets().len(), "there is no target {index}");
        Arc::new(ProxyStore::new(Arc::clone(&self.handle), index as u16))
    }

    /// All targets together, for data that goes to several of them.
    #[must_use]
    pub fn stripes(&self) -> Arc<ProxyStripes> {
        Arc::new(ProxyStripes::new(Arc::clone(&self.handle)))
    }

    /// Staging buffers in DPU memory. Payload in them is not copied on its way to the host.
    #[must_use]
    pub fn pool(&self) -> &BufferPool {
        self.handle.shared.memory.pool()
    }

    /// The engine that moves payload.
    #[must_use]
    pub fn engine(&self) -> &Arc<dyn DmaEngine> {
        &self.handle.shared.engine
    }

    /// The number of the present incarnation, counted from 1: when it changes, what was cached of the store is void.
    #[must_use]
    pub fn incarnation(&self) -> watch::Receiver<u64> {
        self.handle.shared.incarnation.subscribe()
    }

    /// How it stands.
    #[must_use]
    pub fn status(&self) -> AttachmentStatus {
        let state = self.handle.shared.lock();
        let link = state.link();
        let status = link.map(|link| link.status());
        AttachmentStatus {
            connected: link.is_some(),
            incarnations: state.incarnations,
            last_failure: state.last_failure.clone(),
            stages: status.map_or(0, |s| s.stages),
            by_dma: link.is_some_and(|link| link.by_dma),
            why_no_dma: state.why_no_dma.clone(),
            offload: Offload {
                health: self.handle.shared.health.report(),
                quarantined: status.map_or(0, |s| s.quarantined),
                kept_bytes: status.map_or(0, |s| s.kept_bytes),
                fallback_bytes: status.map_or(0, |s| s.put_bytes),
            },
        }
    }

    /// Changes how DMA is used, from now on.
    pub fn tune(&self, tuning: DmaTuning) {
        self.handle.shared.tune(tuning);
    }

    /// Faults that can be armed in this process.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.handle.shared.options.faults
    }

    /// Ends the attachment; calls without an answer fail.
    pub fn close(&self) {
        self.handle.shared.close();
    }
}
