//! Where the parity of staged data is computed: by the host's processor, on the DPU's cores here, or by its accelerator.
//!
//! The scheduler of `ec::offload` decides. Data that the host or the accelerator codes goes to host memory without its
//! parity; what the DPU's cores code goes there with it. What an engine has not done another one does, in the end this thread.
//! The host is asked how busy it is ten times a second while there is work, and not at all while there is none.
//!
//! Small changes, and fragments that are computed from others, are not decided upon: their bytes are here.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base::fault::Faults;
use bytes::Bytes;
use ec::Code;
use ec::offload::batch::CodingWork;
use ec::offload::host_load::{HostLoad, LoadLevel, Thresholds};
use ec::offload::scheduler::{
    Capacity, CodingPlace, PlaceSnapshot, Scheduler, SchedulerConfig, TaskRefused, TaskSlot,
};
use ec::offload::software::{self, Processor, SoftwareOptions};
use ec::offload::worker::Worker;
use futures::future::join;
use store::stripes::{
    Engines, FragmentBuf, FragmentBytes, Parity, ParityDevice, StripeError, StripeStores, StripeWrite,
};
use store::{StageId, StoreError};
use tokio::sync::oneshot;
use tokio::time::Instant;
use wire::{CodingMode, CodingOffload, CodingPlaceStatus, CodingStatus, Error};

use crate::task::spawn;

/// Pause between two looks at the host's load.
const WATCH: Duration = Duration::from_millis(100);
/// The host is not looked at any more when there was nothing to code for that long.
const WATCH_IDLE: Duration = Duration::from_secs(1);
/// So often an engine may fail before this thread does the work.
const ATTEMPTS: usize = 4;
/// Most tasks whose data is on its way to the host's processor, beside those that it is at.
const ON_THE_WAY: usize = 3;

/// Where the parity of staged data is computed.
#[derive(Debug, Clone)]
pub struct CodingConfig {
    /// The mode to begin with.
    pub mode: CodingMode,
    /// What of the DPU computes; `None` where there is no DPU, and all is done by the host's processor.
    pub offload: Option<CodingOffload>,
    /// Threads of the DPU's cores that compute.
    pub threads: usize,
    /// Threads of the host's processor that do.
    pub host_threads: usize,
    /// Most tasks that wait.
    pub queue: usize,
    /// How long a place that failed is left alone.
    pub cool_down: Duration,
    /// What takes stripes to the stores.
    pub stripes: StripesAt,
    /// What is to go wrong on the DPU's cores.
    pub faults: Faults,
}

/// What takes stripes to the stores.
#[derive(Clone)]
pub enum StripesAt {
    /// The stores are in this process, with these engines; `None` has the least that there can be.
    Here(Option<Arc<Engines>>),
    /// They are behind this.
    There(Arc<dyn StripeStores>),
}

impl std::fmt::Debug for StripesAt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, StripesAt::Here(_)) { "Here" } else { "There" })
    }
}

impl Default for CodingConfig {
    fn default() -> Self {
        CodingConfig {
            mode: CodingMode::Async,
            offload: Some(CodingOffload::Dpu),
            threads: 1,
            host_threads: 1,
            queue: 1024,
            cool_down: Duration::from_secs(2),
            stripes: StripesAt::Here(None),
            faults: Faults::default(),
        }
    }
}

/// A piece of each fragment of an object that is being staged.
pub(crate) struct StripeBatch {
    /// By fragment: the target's UUID, and its stage; `None` for one that is not written.
    pub(crate) parts: Vec<Option<(u128, StageId)>>,
    /// Where in each stage, in bytes.
    pub(crate) offset: u64,
    /// The data fragments, cut in the same places into pieces of one length.
    pub(crate) data: Vec<FragmentBytes>,
    /// What computes the others; `None` if they are copies.
    pub(crate) code: Option<Code>,
}

/// See the [module](self) documentation.
pub struct CodingDispatcher {
    stores: Arc<dyn StripeStores>,
    scheduler: Scheduler,
    offload: Option<CodingOffload>,
    software: Worker,
    load: RefCell<HostLoad>,
    is_watching: Cell<bool>,
    last_task: Cell<Instant>,
    /// Threads of this process stand for a DPU, on CPUs that may be the host's.
    is_emulated: bool,
}

impl CodingDispatcher {
    /// # Errors
    /// If the system has no room for another thread.
    pub fn start(
        config: &CodingConfig,
        stores: Arc<dyn StripeStores>,
        is_emulated: bool,
    ) -> std::io::Result<Rc<CodingDispatcher>> {
        let threads = config.threads.max(1);
        let queue = config.queue.max(1);
        let options = SoftwareOptions { threads, queue, ..SoftwareOptions::new(Processor::Dpu) };
        let software = software::start(SoftwareOptions { faults: config.faults.clone(), ..options })?;
        // Where there is no DPU there is nothing to be chosen.
        let mode = if config.offload.is_some() { config.mode } else { CodingMode::LatencySensitive };
        let offload = match config.offload {
            Some(CodingOffload::Accelerator) => Capacity { slots: 32, lanes: 1 },
            Some(CodingOffload::Dpu) | None => Capacity { slots: 2 * threads, lanes: threads },
        };
        let lanes = config.host_threads.max(1);
        let scheduler = Scheduler::new(SchedulerConfig {
            mode,
            queue,
            host: Capacity { slots: lanes + ON_THE_WAY, lanes },
            offload,
            cool_down: config.cool_down,
        });
        Ok(Rc::new(CodingDispatcher {
            stores,
            scheduler,
            offload: config.offload,
            software,
            load: RefCell::new(HostLoad::new(Thresholds::default())),
            is_watching: Cell::new(false),
            last_task: Cell::new(Instant::now()),
            is_emulated,
        }))
    }

    /// Most bytes of all fragments together that are staged at a time.
    pub(crate) fn max_bytes(&self) -> usize {
        self.stores.max_bytes()
    }

    /// Changes the mode.
    ///
    /// # Errors
    /// If the mode needs a DPU and the node has none.
    pub fn set_mode(&self, mode: CodingMode) -> wire::Result<()> {
        if self.offload.is_none() && mode != CodingMode::LatencySensitive {
            let why = "this node has no DPU to code on: its placement is host; configure coding.offload = \"accelerator\"";
            return Err(Error::BadRequest(why.into()));
        }
        tracing::info!(%mode, "the coding mode was changed");
        self.scheduler.set_mode(mode);
        Ok(())
    }

    /// Computes what is to be computed and writes all fragments to their stages. `buffers` are for parity.
    pub(crate) async fn stage(
        self: &Rc<CodingDispatcher>,
        stripes: &StripeBatch,
        buffers: impl Fn(usize) -> Vec<FragmentBuf>,
    ) -> Result<(), StripeError> {
        let Some(code) = &stripes.code else {
            return self.stores.stage_stripes(stripes.with(Parity::Copies), None).await;
        };
        self.watch();
        let len = stripes.data.first().map_or(0, FragmentBytes::len);
        let bytes = (len * stripes.data.len()) as u64;
        for _ in 0..ATTEMPTS {
            let slot = self.scheduler.admit(bytes).await.map_err(|e| busy(&e))?;
            let coder = match (slot.place(), self.offload) {
                (CodingPlace::Host, _) | (CodingPlace::Offload, None) => Some(ParityDevice::Host),
                (CodingPlace::Offload, Some(CodingOffload::Accelerator)) => Some(ParityDevice::Accelerator),
                (CodingPlace::Offload, Some(CodingOffload::Dpu)) => None,
            };
            let Some(coder) = coder else {
                match self.on_cores(slot, code, stripes, buffers(len)).await {
                    Some(parity) => {
                        return self.stores.stage_stripes(stripes.with(Parity::Here(parity)), None).await;
                    }
                    None => continue,
                }
            };
            match self.in_host_memory(slot, coder, stripes).await {
                Err(StripeError::Coding(_)) => {}
                outcome => return outcome,
            }
        }
        metrics::counter!("outboard_ec_fallbacks_total").increment(1);
        let parity = encode(code, &pieces(&stripes.data), buffers(len)).map_err(StripeError::Store)?;
        self.stores.stage_stripes(stripes.with(Parity::Here(parity)), None).await
    }

    /// On the DPU's cores; `None` if they have failed.
    async fn on_cores(
        &self,
        slot: TaskSlot,
        code: &Code,
        stripes: &StripeBatch,
        buffers: Vec<FragmentBuf>,
    ) -> Option<Vec<FragmentBytes>> {
        let (code, data) = (code.clone(), pieces(&stripes.data));
        let bytes = data.iter().flatten().map(|piece| piece.len() as u64).sum();
        let work = CodingWork { bytes, computed_fragments: buffers.len() as u32 };
        let encoded = self.software.submit(work, move || encode(&code, &data, buffers)).await;
        match encoded.map_err(|e| e.to_string()).and_then(|encoded| encoded.map_err(|e| e.to_string())) {
            Ok(parity) => {
                slot.done();
                Some(parity)
            }
            Err(why) => {
                slot.failed(&why);
                None
            }
        }
    }

    /// By the host's processor or the accelerator, where the stores are.
    async fn in_host_memory(
        &self,
        slot: TaskSlot,
        coder: ParityDevice,
        stripes: &StripeBatch,
    ) -> Result<(), StripeError> {
        let (coded, is_coded) = oneshot::channel();
        let staging = self.stores.stage_stripes(stripes.with(Parity::By(coder)), Some(coded));
        // The place is free for the next task while the drives write.
        let coding = async {
            match is_coded.await {
                Ok(Some(took)) => slot.done_in(took),
                Ok(None) => slot.done(),
                Err(_) => return Some(slot),
            }
            None
        };
        let (slot, outcome) = join(coding, staging).await;
        if let (Some(slot), Err(StripeError::Coding(why))) = (slot, &outcome) {
            slot.failed(why);
        }
        outcome
    }

    /// Looks at the host's load while there is work.
    fn watch(self: &Rc<CodingDispatcher>) {
        self.last_task.set(Instant::now());
        if self.offload.is_none() || self.is_watching.replace(true) {
            return;
        }
        let coding = Rc::downgrade(self);
        spawn(async move {
            while let Some(coding) = coding.upgrade() {
                if coding.last_task.get().elapsed() >= WATCH_IDLE {
                    return coding.is_watching.set(false);
                }
                coding.look_at_host().await;
                drop(coding);
                tokio::time::sleep(WATCH).await;
            }
        });
    }

    async fn look_at_host(&self) {
        let mut host = match self.stores.host_reading().await {
            Ok(host) => host,
            Err(e) => return tracing::debug!(error = %e, "the host does not say how busy it is"),
        };
        if self.is_emulated
            && host.cpus.is_empty()
            && let Ok(used) = base::process::ProcessUsage::read(std::process::id())
        {
            host.reading.dpu += Duration::from_secs_f64(used.total.cpu_seconds);
        }
        let load = self.load.borrow_mut().sample(Instant::now().into_std(), host.reading);
        self.scheduler.set_host_busy(load == LoadLevel::Busy);
    }

    /// What it does, for people.
    pub fn status(&self) -> CodingStatus {
        let snapshot = self.scheduler.snapshot();
        let load = self.load.borrow();
        let percent = |part: f64| (part * 100.0).round() as u32;
        CodingStatus {
            mode: snapshot.mode,
            engine: self.offload,
            emulated: self.offload == Some(CodingOffload::Accelerator),
            host_busy: snapshot.host_busy,
            host_utilization_percent: percent(load.utilization()),
            host_pressure_percent: load.pressure().map(percent),
            queued: snapshot.queued as u64,
            queued_bytes: snapshot.queued_bytes,
            refused: snapshot.refused,
            alpha: snapshot.alpha,
            beta: snapshot.beta,
            host: place_status(snapshot.host),
            offload: place_status(snapshot.offload),
        }
    }
}

fn place_status(place: PlaceSnapshot) -> CodingPlaceStatus {
    let ns = |us: f64| (us * 1000.0).round() as u64;
    CodingPlaceStatus {
        in_service: place.in_service as u64,
        slots: place.slots as u64,
        sent: place.sent,
        ns_per_task: place.us_per_task.map(ns),
        ns_per_mb: place.us_per_mb.map(ns),
        health: place.health,
    }
}

impl StripeBatch {
    fn with(&self, parity: Parity) -> StripeWrite {
        StripeWrite { parts: self.parts.clone(), offset: self.offset, data: self.data.clone(), parity }
    }
}

/// Too much waits: whoever asked tries again.
fn busy(e: &TaskRefused) -> StripeError {
    StripeError::Store(StoreError::Disconnected(e.to_string()))
}

fn pieces(data: &[FragmentBytes]) -> Vec<Vec<Bytes>> {
    data.iter().map(|fragment| fragment.pieces.clone()).collect()
}

/// Parity of fragments whose pieces are cut in the same places, all of them of one length.
fn encode(
    code: &Code,
    data: &[Vec<Bytes>],
    mut parity: Vec<FragmentBuf>,
) -> store::Result<Vec<FragmentBytes>> {
    let count = data.first().map_or(0, Vec::len);
    let units: Vec<&[u8]> = (0..count).flat_map(|n| data.iter().map(move |pieces| &pieces[n][..])).collect();
    let mut checksums = vec![Vec::new(); parity.len()];
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|buffer| &mut buffer[..]).collect();
    code.encode_units(&units, &mut outputs, &mut checksums)
        .map_err(|e| StoreError::InvalidArgument(e.to_string()))?;
    let fragments = parity.into_iter().zip(checksums);
    Ok(fragments
        .map(|(buffer, checksums)| FragmentBytes { pieces: vec![buffer.freeze()], checksums })
        .collect())
}
