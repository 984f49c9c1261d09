//! [`Engines`]: the engines that compute parity on the side of the stores.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::block::Payload;
use base::clock::Instant;
use base::collections::HashMap;
use base::fault::{Action, Faults, Site};
use bytes::Bytes;
use ec::offload::batch::CodingWork;
use ec::offload::host_load::{HostCpus, LoadCounters};
use ec::offload::software::{self, Processor, SoftwareOptions};
use ec::offload::worker::{Worker, WorkerError, WorkerStats};
use ec::{Code, Geometry, KernelChoice};
use futures::future::Either;

use super::{FragmentBuf, HostReading, ParityDevice, StripeError};
use crate::StoreError;

/// Configuration of the engines.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Number of threads that compute parity on the host's processor, at least 1.
    pub threads: usize,
    /// The CPUs whose load [`Engines::host_reading`] reports; empty for all CPUs.
    pub cpus: Vec<usize>,
    /// Faults injected into the engine that uses the host's processor.
    pub faults: Faults,
}

impl Default for EngineOptions {
    /// Returns the options for one thread and the load of all CPUs.
    fn default() -> EngineOptions {
        EngineOptions { threads: 1, cpus: Vec::new(), faults: Faults::default() }
    }
}

/// The engines that compute parity on the side of the stores: the host's processor and, if there is
/// one, the DPU's accelerator. Any thread may use them.
#[derive(Debug)]
pub struct Engines {
    host: CodingEngine,
    accelerator: Option<CodingEngine>,
    cpus: Vec<usize>,
    codes: Mutex<HashMap<Geometry, Code>>,
}

/// An engine that computes parity.
#[derive(Debug)]
enum CodingEngine {
    Threads(Worker),
    Inline(InlineEngine),
}

/// Computes parity on the thread of the caller. A task takes the time that a thread of a fast
/// processor would need, on the clock of the Tokio runtime.
#[derive(Debug)]
struct InlineEngine {
    name: &'static str,
    started: Instant,
    faults: Faults,
    counts: Arc<InlineCounts>,
}

#[derive(Debug, Default)]
struct InlineCounts {
    tasks: AtomicU64,
    bytes: AtomicU64,
    failed: AtomicU64,
}

/// Speed of the inline engine, in nanoseconds per KiB of data.
const INLINE_NS_PER_KIB: u64 = 100;

impl InlineEngine {
    fn new(name: &'static str, faults: Faults) -> InlineEngine {
        InlineEngine { name, started: Instant::now(), faults, counts: Arc::default() }
    }

    /// Computes a task when the returned future is polled.
    fn submit(
        &self,
        work: CodingWork,
        compute: Box<dyn FnOnce() -> Result<Vec<Payload>, StripeError> + Send>,
    ) -> impl Future<Output = Result<ComputedFragments, WorkerError>> + Send + use<> {
        let (fault, counts) = (self.faults.hit(Site::EcOffload), Arc::clone(&self.counts));
        async move {
            let took = Duration::from_nanos(work.bytes.div_ceil(1024) * INLINE_NS_PER_KIB);
            let late = match fault {
                Some(Action::Stall(late)) => late,
                _ => Duration::ZERO,
            };
            tokio::time::sleep(took + late).await;
            counts.tasks.fetch_add(1, Ordering::Relaxed);
            counts.bytes.fetch_add(work.bytes, Ordering::Relaxed);
            if fault == Some(Action::Fail) {
                counts.failed.fetch_add(1, Ordering::Relaxed);
                return Err(WorkerError::Injected);
            }
            Ok((compute(), Some(took)))
        }
    }

    fn stats(&self) -> WorkerStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let tasks = count(&self.counts.tasks);
        let cpu_ns = count(&self.counts.bytes).div_ceil(1024) * INLINE_NS_PER_KIB;
        WorkerStats {
            name: self.name.to_owned(),
            queued: 0,
            tasks,
            bytes: count(&self.counts.bytes),
            batches: tasks,
            failed: count(&self.counts.failed),
            cpu_ns,
            overruns: 0,
        }
    }

    /// Returns the counters of a host with one CPU, which only computes parity.
    fn reading(&self) -> LoadCounters {
        let coding = Duration::from_nanos(self.stats().cpu_ns);
        LoadCounters { all: self.started.elapsed(), busy: coding, coding, ..LoadCounters::default() }
    }
}

impl CodingEngine {
    fn stats(&self) -> WorkerStats {
        match self {
            CodingEngine::Threads(worker) => worker.stats(),
            CodingEngine::Inline(engine) => engine.stats(),
        }
    }
}

/// The computed parity, and the duration of the computation if it is known.
pub(super) type EncodedParity = (Vec<Payload>, Option<Duration>);

impl Engines {
    /// Starts the threads that compute parity on the host's processor. They run on the CPUs that
    /// the calling thread may use. `accelerator` is the DPU's accelerator, if there is one
    /// ([`ec::offload::accelerator`]).
    ///
    /// # Errors
    /// If the system cannot create a thread.
    pub fn start(options: EngineOptions, accelerator: Option<Worker>) -> io::Result<Engines> {
        let EngineOptions { threads, cpus, faults } = options;
        let host = SoftwareOptions { threads, faults, ..SoftwareOptions::new(Processor::Host) };
        let host = CodingEngine::Threads(software::start(host)?);
        let accelerator = accelerator.map(CodingEngine::Threads);
        Ok(Engines { host, accelerator, cpus, codes: Mutex::default() })
    }

    /// Creates engines that have no threads and compute parity on the thread of the caller, for a
    /// simulation. With `accelerator`, one of them takes the place of the DPU's accelerator. The
    /// futures of their tasks need a Tokio runtime with time enabled.
    #[must_use]
    pub fn inline(faults: Faults, accelerator: bool) -> Engines {
        let engine = |name| CodingEngine::Inline(InlineEngine::new(name, faults.clone()));
        let accelerator = accelerator.then(|| engine("inline accelerator"));
        Engines { host: engine("inline"), accelerator, cpus: Vec::new(), codes: Mutex::default() }
    }

    /// Returns the statistics of each engine.
    #[must_use]
    pub fn stats(&self) -> Vec<WorkerStats> {
        std::iter::once(self.host.stats()).chain(self.accelerator.iter().map(CodingEngine::stats)).collect()
    }

    /// Computes the parity of the data fragments `data` into the buffers `parity`.
    pub(super) fn encode(
        &self,
        coder: ParityDevice,
        data: Vec<Bytes>,
        parity: Vec<FragmentBuf>,
    ) -> impl Future<Output = Result<EncodedParity, StripeError>> + Send + use<> {
        let begun = self.begin(coder, data, parity);
        async move {
            let (encoded, took) = begun?.await.map_err(|e| StripeError::Coding(e.to_string()))?;
            Ok((encoded?, took.filter(|_| coder == ParityDevice::Host)))
        }
    }

    fn begin(
        &self,
        coder: ParityDevice,
        data: Vec<Bytes>,
        parity: Vec<FragmentBuf>,
    ) -> Result<impl Future<Output = Result<ComputedFragments, WorkerError>> + Send + use<>, StripeError>
    {
        let none = || StripeError::Coding("this store has no accelerator for parity; configure one".into());
        let code = self.code(data.len(), parity.len())?;
        let bytes = data.iter().map(|fragment| fragment.len() as u64).sum();
        let work = CodingWork { bytes, computed_fragments: parity.len() as u32 };
        let engine = match coder {
            ParityDevice::Host => &self.host,
            ParityDevice::Accelerator => self.accelerator.as_ref().ok_or_else(none)?,
        };
        Ok(match engine {
            CodingEngine::Threads(worker) => Either::Left(worker.submit(work, move || {
                let started = Instant::now();
                (encode(&code, &data, parity), Some(started.elapsed()))
            })),
            CodingEngine::Inline(engine) => {
                let compute = Box::new(move || encode(&code, &data, parity));
                Either::Right(engine.submit(work, compute))
            }
        })
    }

    fn code(&self, k: usize, m: usize) -> Result<Code, StripeError> {
        let invalid = |e: ec::EcError| StripeError::Store(StoreError::InvalidArgument(e.to_string()));
        let geometry = Geometry::new(k, m).map_err(invalid)?;
        let mut codes = self.codes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(code) = codes.get(&geometry) {
            return Ok(code.clone());
        }
        let code = Code::new(geometry, KernelChoice::Auto.load().map_err(invalid)?);
        codes.insert(geometry, code.clone());
        Ok(code)
    }

    /// Reads the load counters of the host's CPUs. The values exclude the work of these engines and
    /// of the emulated devices in this process.
    ///
    /// # Errors
    /// [`StoreError::Io`] if the kernel does not report the load.
    pub fn host_reading(&self) -> crate::Result<HostReading> {
        if let CodingEngine::Inline(engine) = &self.host {
            return Ok(HostReading { reading: engine.reading(), cpus: self.cpus.clone() });
        }
        let used = |engine: &CodingEngine| Duration::from_nanos(engine.stats().cpu_ns);
        // If the host's CPUs are limited to a list, emulated devices run on other CPUs. The
        // counters then do not include the work of these devices, so it need not be subtracted.
        let device = self.accelerator.as_ref().filter(|_| self.cpus.is_empty());
        let devices = device.map_or(Duration::ZERO, used);
        let mut counters = HostCpus::new(self.cpus.clone(), || devices, || used(&self.host));
        let reading = counters.read().map_err(|e| StoreError::Io(e.to_string()))?;
        Ok(HostReading { reading, cpus: self.cpus.clone() })
    }
}

type ComputedFragments = (Result<Vec<Payload>, StripeError>, Option<Duration>);

fn encode(code: &Code, data: &[Bytes], mut parity: Vec<FragmentBuf>) -> Result<Vec<Payload>, StripeError> {
    let sources: Vec<&[u8]> = data.iter().map(|fragment| &fragment[..]).collect();
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|buffer| &mut buffer[..]).collect();
    let mut checksums = vec![Vec::new(); outputs.len()];
    let invalid = |e: String| StripeError::Store(StoreError::InvalidArgument(e));
    code.encode_units(&sources, &mut outputs, &mut checksums).map_err(|e| invalid(e.to_string()))?;
    let fragments = parity.into_iter().zip(checksums);
    fragments
        .map(|(buffer, sums)| {
            Payload::from_parts(0, buffer.freeze(), sums).map_err(|e| invalid(e.to_string()))
        })
        .collect()
}
