//! Chooses where the parity of staged data is computed: on the host's processor, on the DPU's cores
//! (in this process), or on the DPU's accelerator.
//!
//! A DPU can compute parity with its cores and its accelerator at the same time. In this case, one
//! scheduler chooses between host and DPU, and a second one between the two devices of the DPU.
//!
//! The scheduler in `ec::offload` makes the choice. If the host or the accelerator computes the
//! parity, only the data moves to host memory. If the DPU's cores compute the parity, data and
//! parity move to host memory together. If a coding place fails, another coding place takes over.
//! After several failures, the thread of the caller computes the parity itself. While there are
//! coding tasks, the dispatcher samples the host's load ten times per second. If the host is busy when
//! the tasks end, the dispatcher continues until the host is calm: an old reading must not decide where
//! the next tasks run.
//!
//! The bytes from which fragments are reconstructed are in this process, so only the DPU's cores can
//! compute them. A large reconstruction runs on a coding thread if one is free. Otherwise, the thread of
//! the caller computes it. The same applies to small reconstructions and small changes, because a
//! change of threads would take longer than the computation (`outboard-layers ec`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base::block::{BLOCK_SIZE, Payload};
use base::fault::Faults;
use ec::offload::batch::CodingWork;
pub use ec::offload::host_load::Thresholds;
use ec::offload::host_load::{HostLoad, LoadLevel};
use ec::offload::scheduler::{
    Capacity, CodingPlace, Level, PlaceSnapshot, Scheduler, SchedulerConfig, Snapshot, TaskRefused, TaskSlot,
};
use ec::offload::software::{self, Processor, SoftwareOptions};
use ec::offload::worker::Worker;
use ec::{CheckedUnit, Code, EcError};
use futures::future::join;
use store::stripes::{
    Engines, FragmentBuf, FragmentBytes, Parity, ParityDevice, StoreSet, StripeError, StripeWrite,
};
use store::{StageId, StoreError};
use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;
use wire::{CodingMode, CodingOffload, CodingPlaceStatus, CodingStatus, DpuDevices, Error};

use crate::coder::{Reconstruction, RecoverError};
use crate::task::spawn;

/// Pause between two samples of the host's load.
const WATCH: Duration = Duration::from_millis(100);
/// Sampling of a calm host's load stops when there was no coding task for this long.
const WATCH_IDLE: Duration = Duration::from_secs(1);
/// Pause between two samples of a busy host's load when there was no coding task for this long.
const WATCH_BUSY: Duration = Duration::from_millis(500);
/// Number of failed attempts after which the thread of the caller computes the parity itself.
const ATTEMPTS: usize = 4;
/// Maximum number of tasks whose data is in transit to the host's processor, in addition to the
/// tasks that the processor is executing.
const ON_THE_WAY: usize = 3;

/// Minimum number of source bytes of a reconstruction that runs on a coding thread.
const LEAST_RECONSTRUCTION: u64 = 1 << 20;

/// Configuration of a [`CodingDispatcher`].
#[derive(Debug, Clone)]
pub struct CodingConfig {
    /// Initial coding mode.
    pub mode: CodingMode,
    /// The part of the DPU that computes parity. `None` if the node has no DPU; in this case, the
    /// host's processor computes all parity.
    pub offload: Option<CodingOffload>,
    /// Number of coding threads on the DPU's cores. With 0 threads, the osd's thread codes.
    pub threads: usize,
    /// Number of coding threads on the host's processor.
    pub host_threads: usize,
    /// Maximum number of tasks that wait for a coding place.
    pub queue: usize,
    /// Time for which a coding place is not used after a failure.
    pub cool_down: Duration,
    /// Load at which the host's processor counts as busy.
    pub thresholds: Thresholds,
    /// Location of the targets' stores.
    pub stripes: StripesAt,
    /// Faults to inject into coding tasks on the DPU's cores.
    pub faults: Faults,
}

/// Location of the stores that receive the stripes.
#[derive(Clone)]
pub enum StripesAt {
    /// The stores are in this process, with these coding engines. `None` selects the default
    /// engines: one thread on the host's processor.
    Here(Option<Arc<Engines>>),
    /// The stores are called through this interface.
    There(Arc<dyn StoreSet>),
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
            thresholds: Thresholds::default(),
            stripes: StripesAt::Here(None),
            faults: Faults::default(),
        }
    }
}

/// The same range of each fragment of an object, to be written to the fragments' stages.
pub(crate) struct StripeBatch {
    /// For each fragment: the UUID of its target, and the id of its stage on this target. `None`
    /// for a fragment that is not written.
    pub(crate) parts: Vec<Option<(Uuid, StageId)>>,
    /// Offset of the range in each stage, in bytes.
    pub(crate) offset: u64,
    /// The bytes of each data fragment. All fragments are cut at the same offsets, into pieces of
    /// equal length.
    pub(crate) data: Vec<FragmentBytes>,
    /// The erasure code that computes parity; `None` in a mirror, whose fragments are copies.
    pub(crate) code: Option<Code>,
}

/// Chooses where the parity of a coding task is computed, and writes the fragments to the members.
pub struct CodingDispatcher {
    stores: Arc<dyn StoreSet>,
    scheduler: Scheduler,
    /// Schedules tasks on the DPU's cores and its accelerator. `None` if the DPU uses only its cores.
    devices: Option<Scheduler>,
    offload: Option<CodingOffload>,
    software: Worker,
    load: RefCell<HostLoad>,
    /// Whether the store's own work counts for the host's load.
    counts_store: bool,
    is_watching: Cell<bool>,
    last_task: Cell<Instant>,
    /// True if threads of this process emulate a DPU, on CPUs that may belong to the host.
    is_emulated: bool,
}

impl CodingDispatcher {
    /// Starts the scheduler, and the coding threads on the DPU's cores.
    ///
    /// # Errors
    /// If the system cannot create another thread.
    pub fn start(
        config: &CodingConfig,
        stores: Arc<dyn StoreSet>,
        is_emulated: bool,
    ) -> std::io::Result<Rc<CodingDispatcher>> {
        let queue = config.queue.max(1);
        let options =
            SoftwareOptions { threads: config.threads, queue, ..SoftwareOptions::new(Processor::Dpu) };
        let software = software::start(SoftwareOptions { faults: config.faults.clone(), ..options })?;
        // Without a DPU, the host's processor is the only coding place.
        let mode = if config.offload.is_some() { config.mode } else { CodingMode::LatencySensitive };
        let accelerator = Capacity { slots: 32, lanes: 1 };
        let lanes = config.threads.max(1);
        let cores = Capacity { slots: 2 * lanes, lanes };
        let offload = match config.offload {
            Some(CodingOffload::Accelerator) => accelerator,
            Some(CodingOffload::Dpu) | None => cores,
            // The second scheduler has a free slot for each task that the first one admits.
            Some(CodingOffload::Both) => {
                Capacity { slots: cores.slots + accelerator.slots, lanes: cores.lanes + accelerator.lanes }
            }
        };
        let devices = config.offload.filter(|offload| offload.has_accelerator()).map(|_| {
            Scheduler::new(SchedulerConfig {
                mode: CodingMode::Auto,
                queue,
                host: cores,
                offload: accelerator,
                cool_down: config.cool_down,
                level: Level::Dpu,
            })
        });
        let lanes = config.host_threads.max(1);
        let scheduler = Scheduler::new(SchedulerConfig {
            mode,
            queue,
            host: Capacity { slots: lanes + ON_THE_WAY, lanes },
            offload,
            cool_down: config.cool_down,
            level: Level::Node,
        });
        Ok(Rc::new(CodingDispatcher {
            stores,
            scheduler,
            devices,
            offload: config.offload,
            software,
            load: RefCell::new(HostLoad::new(config.thresholds)),
            counts_store: config.thresholds.counts_store,
            is_watching: Cell::new(false),
            last_task: Cell::new(Instant::now()),
            is_emulated,
        }))
    }

    /// The stores of the targets.
    pub(crate) fn stores(&self) -> &dyn StoreSet {
        &*self.stores
    }

    /// Maximum size in bytes of all fragments together in one staging call.
    pub(crate) fn max_bytes(&self) -> usize {
        self.stores.max_bytes()
    }

    /// Changes the coding mode.
    ///
    /// # Errors
    /// If the mode needs a DPU, but the node has no DPU.
    pub fn set_mode(&self, mode: CodingMode) -> wire::Result<()> {
        if self.offload.is_none() && mode != CodingMode::LatencySensitive {
            let why = "this node has no DPU that could compute parity, because its placement is host; configure coding.offload = \"accelerator\"";
            return Err(Error::BadRequest(why.into()));
        }
        tracing::info!(%mode, "the coding mode was changed");
        self.scheduler.set_mode(mode);
        Ok(())
    }

    /// Computes parity if the scheme needs it, and writes all fragments to their stages. `buffers`
    /// allocates the memory for parity.
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
            let place = slot.place();
            let device = match (&self.devices, place) {
                (Some(devices), CodingPlace::Offload) if self.offload == Some(CodingOffload::Both) => {
                    Some(devices.admit(bytes).await.map_err(|e| busy(&e))?)
                }
                _ => None,
            };
            let coder = match (place, self.offload, device.as_ref().map(TaskSlot::place)) {
                (CodingPlace::Host, ..) | (CodingPlace::Offload, None, _) => Some(ParityDevice::Host),
                (CodingPlace::Offload, Some(CodingOffload::Accelerator), _)
                | (CodingPlace::Offload, _, Some(CodingPlace::Offload)) => Some(ParityDevice::Accelerator),
                (CodingPlace::Offload, Some(CodingOffload::Dpu | CodingOffload::Both), _) => None,
            };
            let slot = CodingSlot { slot, device };
            let Some(coder) = coder else {
                match self.on_cores(slot, code, stripes, buffers(len)).await? {
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
        let parity = encode(code, &stripes.data, buffers(len))?;
        self.stores.stage_stripes(stripes.with(Parity::Here(parity)), None).await
    }

    /// Computes parity on the DPU's cores. Returns `None` if that failed.
    ///
    /// # Errors
    /// [`StripeError::Damaged`] if the data does not match its checksums.
    async fn on_cores(
        &self,
        slot: CodingSlot,
        code: &Code,
        stripes: &StripeBatch,
        buffers: Vec<FragmentBuf>,
    ) -> Result<Option<Vec<FragmentBytes>>, StripeError> {
        let (code, data) = (code.clone(), stripes.data.clone());
        let bytes = data.iter().map(|fragment| fragment.len() as u64).sum();
        let work = CodingWork { bytes, computed_fragments: buffers.len() as u32 };
        let encoded = self.software.submit(work, move || encode(&code, &data, buffers)).await;
        let why = match encoded {
            Ok(Ok(parity)) => {
                slot.done();
                return Ok(Some(parity));
            }
            Ok(Err(damaged @ StripeError::Damaged(_))) => {
                slot.done();
                return Err(damaged);
            }
            Ok(Err(e)) => e.to_string(),
            Err(e) => e.to_string(),
        };
        slot.failed(&why);
        Ok(None)
    }

    /// Reconstructs fragments. `buffers` allocates the memory for them.
    pub(crate) async fn reconstruct(
        &self,
        task: Reconstruction,
        buffers: impl Fn(&Reconstruction) -> Vec<FragmentBuf>,
    ) -> Result<Vec<Payload>, RecoverError> {
        let work = CodingWork { bytes: task.source_bytes(), computed_fragments: task.computed() as u32 };
        if let Some(slot) = self.thread_for(work) {
            let (copy, into) = (task.clone(), buffers(&task));
            match self.software.submit(work, move || copy.run(into)).await {
                Ok(reconstructed) => {
                    slot.done();
                    return reconstructed;
                }
                Err(e) => slot.failed(&e.to_string()),
            }
        }
        let into = buffers(&task);
        task.run(into)
    }

    /// A slot for a reconstruction on the DPU's cores. `None` if the reconstruction is small, or if
    /// no coding thread is free.
    fn thread_for(&self, work: CodingWork) -> Option<CodingSlot> {
        if work.computed_fragments == 0 || work.bytes < LEAST_RECONSTRUCTION {
            return None;
        }
        let node = || self.scheduler.admit_at(CodingPlace::Offload, work.bytes);
        let cores = |devices: &Scheduler| devices.admit_at(CodingPlace::Host, work.bytes);
        match (self.offload?, &self.devices) {
            // The node's place for the DPU is the accelerator.
            (CodingOffload::Accelerator, devices) => {
                Some(CodingSlot { slot: cores(devices.as_ref()?)?, device: None })
            }
            (_, None) => Some(CodingSlot { slot: node()?, device: None }),
            (_, Some(devices)) => {
                let has_both = self.scheduler.can_admit_at(CodingPlace::Offload)
                    && devices.can_admit_at(CodingPlace::Host);
                if has_both { Some(CodingSlot { slot: node()?, device: cores(devices) }) } else { None }
            }
        }
    }

    /// Computes parity with the host's processor or the accelerator, in the memory of the stores'
    /// process.
    async fn in_host_memory(
        &self,
        slot: CodingSlot,
        coder: ParityDevice,
        stripes: &StripeBatch,
    ) -> Result<(), StripeError> {
        let (coded, is_coded) = oneshot::channel();
        let staging = self.stores.stage_stripes(stripes.with(Parity::By(coder)), Some(coded));
        // Free the coding place for the next task while the drives write.
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

    /// Starts a task that samples the host's load while there are coding tasks.
    fn watch(self: &Rc<CodingDispatcher>) {
        self.last_task.set(Instant::now());
        if self.offload.is_none() || self.is_watching.replace(true) {
            return;
        }
        let coding = Rc::downgrade(self);
        spawn(async move {
            while let Some(coding) = coding.upgrade() {
                let is_idle = coding.last_task.get().elapsed() >= WATCH_IDLE;
                if is_idle && !coding.scheduler.is_host_busy() {
                    return coding.is_watching.set(false);
                }
                coding.look_at_host().await;
                drop(coding);
                tokio::time::sleep(if is_idle { WATCH_BUSY } else { WATCH }).await;
            }
        });
    }

    async fn look_at_host(&self) {
        let mut host = match self.stores.host_reading(!self.counts_store).await {
            Ok(host) => host,
            Err(e) => {
                tracing::debug!(error = %e, "cannot read the load of the host");
                let mut load = self.load.borrow_mut();
                if !load.is_current(Instant::now()) {
                    load.forget();
                    self.scheduler.set_host_busy(false);
                }
                return;
            }
        };
        if self.is_emulated
            && host.cpus.is_empty()
            && let Ok(used) = base::process::ProcessUsage::read(std::process::id())
        {
            host.reading.dpu += Duration::from_nanos(used.total.cpu_ns);
        }
        let load = self.load.borrow_mut().sample(Instant::now(), host.reading);
        self.scheduler.set_host_busy(load == LoadLevel::Busy);
    }

    /// The devices of the DPU, if it uses several. If only the accelerator computes parity, the
    /// cores reconstruct fragments.
    fn devices_status(&self, offload: &PlaceSnapshot) -> Option<DpuDevices> {
        let Snapshot { host: cores, offload: accelerator, .. } = self.devices.as_ref()?.snapshot();
        let alone = self.offload == Some(CodingOffload::Accelerator);
        let accelerator = if alone { offload.clone() } else { accelerator };
        Some(DpuDevices { cores: place_status(cores), accelerator: place_status(accelerator) })
    }

    /// Returns the state of the scheduler and of the coding places, for display.
    pub fn status(&self) -> CodingStatus {
        let snapshot = self.scheduler.snapshot();
        let load = self.load.borrow();
        let percent = |part: f64| (part * 100.0).round() as u32;
        CodingStatus {
            mode: snapshot.mode,
            engine: self.offload,
            emulated: self.offload.is_some_and(CodingOffload::has_accelerator),
            host_busy: snapshot.host_busy,
            host_utilization_percent: percent(load.utilization()),
            host_pressure_percent: load.pressure().map(percent),
            queued: snapshot.queued as u64,
            queued_bytes: snapshot.queued_bytes,
            refused: snapshot.refused,
            alpha: snapshot.alpha,
            beta: snapshot.beta,
            host: place_status(snapshot.host),
            devices: self.devices_status(&snapshot.offload),
            offload: place_status(snapshot.offload),
        }
    }
}

/// The slot of a task at a coding place, and on a device of the DPU if the DPU uses several.
struct CodingSlot {
    slot: TaskSlot,
    device: Option<TaskSlot>,
}

impl CodingSlot {
    fn done(self) {
        self.slot.done();
        if let Some(device) = self.device {
            device.done();
        }
    }

    fn done_in(self, took: Duration) {
        self.slot.done_in(took);
        if let Some(device) = self.device {
            device.done_in(took);
        }
    }

    /// Reports a failure. If one device of the DPU fails, the DPU remains usable, because the other
    /// device takes over.
    fn failed(self, why: &str) {
        let is_usable = self.device.is_some_and(|device| device.failed(why));
        if !is_usable {
            self.slot.failed(why);
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

/// The error of a coding task that was refused because too many tasks wait. The caller may retry.
fn busy(e: &TaskRefused) -> StripeError {
    StripeError::Store(StoreError::Disconnected(e.to_string()))
}

/// Computes the parity of data fragments that are cut at the same offsets, into pieces of equal
/// length. Verifies the data in the same pass.
fn encode(
    code: &Code,
    data: &[FragmentBytes],
    mut parity: Vec<FragmentBuf>,
) -> Result<Vec<FragmentBytes>, StripeError> {
    let count = data.first().map_or(0, |fragment| fragment.pieces.len());
    let units = (0..count).flat_map(|number| data.iter().map(move |fragment| piece(fragment, number)));
    let units: Vec<CheckedUnit<'_>> = units.collect();
    let mut checksums = vec![Vec::new(); parity.len()];
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|buffer| &mut buffer[..]).collect();
    code.encode_checked(&units, &mut outputs, &mut checksums).map_err(|e| match e {
        EcError::Damaged { .. } => StripeError::Damaged(e.to_string()),
        e => StripeError::Store(StoreError::InvalidArgument(e.to_string())),
    })?;
    let fragments = parity.into_iter().zip(checksums);
    Ok(fragments
        .map(|(buffer, checksums)| FragmentBytes { pieces: vec![buffer.freeze()], checksums })
        .collect())
}

/// Returns a piece of a fragment whose pieces have equal length.
fn piece(fragment: &FragmentBytes, number: usize) -> CheckedUnit<'_> {
    let bytes = &fragment.pieces[number];
    let blocks = bytes.len() / BLOCK_SIZE;
    CheckedUnit { bytes, checksums: &fragment.checksums[number * blocks..(number + 1) * blocks] }
}
