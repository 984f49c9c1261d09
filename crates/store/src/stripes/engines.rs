//! [`Engines`]: the engines that compute parity on the side of the stores.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base::block::Payload;
use base::clock::Instant;
use base::collections::HashMap;
use base::fault::Faults;
use base::process::ProcessUsage;
use base::thread::ThreadClass;
use ec::offload::accelerator::{self, AcceleratorOptions};
use ec::offload::batch::{CodingWork, EngineRate};
use ec::offload::host_load::{HostCpus, LoadCounters};
use ec::offload::software::{self, Processor, SoftwareOptions};
use ec::offload::worker::{Worker, WorkerError, WorkerStats};
use ec::{CheckedUnit, Code, EcError, Geometry, KernelChoice};

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
    host: Worker,
    accelerator: Option<Worker>,
    cpus: Vec<usize>,
    /// Creation time of engines without threads, whose host is simulated.
    simulated_since: Option<Instant>,
    codes: Mutex<HashMap<Geometry, Code>>,
}

/// Speed of a simulated core, for [`EngineRate::paper`]: the bytes of data that it encodes per
/// second.
const SIMULATED_HOST_RATE: f64 = 1e10;

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
        let host = software::start(host)?;
        Ok(Engines { host, accelerator, cpus, simulated_since: None, codes: Mutex::default() })
    }

    /// Creates engines that have no threads and compute parity on the thread of the caller, for a
    /// simulation. With `accelerator`, there is an emulated accelerator. `faults` are injected into
    /// all engines, and the caller may arm and clear them at any time. The futures of the tasks need
    /// a Tokio runtime with time enabled.
    #[must_use]
    pub fn inline(faults: Faults, accelerator: bool) -> Engines {
        let device = AcceleratorOptions::new(EngineRate::paper(SIMULATED_HOST_RATE));
        let device = AcceleratorOptions { faults: faults.clone(), ..device };
        Engines {
            host: software::inline(Processor::Host, faults),
            accelerator: accelerator.then(|| accelerator::inline(device)),
            cpus: Vec::new(),
            simulated_since: Some(Instant::now()),
            codes: Mutex::default(),
        }
    }

    /// Returns the statistics of each engine.
    #[must_use]
    pub fn stats(&self) -> Vec<WorkerStats> {
        std::iter::once(self.host.stats()).chain(self.accelerator.iter().map(Worker::stats)).collect()
    }

    /// Computes the parity of the data fragments `data` into the buffers `parity`. Verifies the
    /// checksums of the data in the same pass.
    pub(super) fn encode(
        &self,
        coder: ParityDevice,
        data: Vec<Payload>,
        parity: Vec<FragmentBuf>,
    ) -> impl Future<Output = Result<EncodedParity, StripeError>> + Send + use<> {
        let begun = self.begin(coder, data, parity);
        async move {
            let (encoded, took) = begun?.await.map_err(|e| StripeError::Coding(e.to_string()))?;
            Ok((encoded?, (coder == ParityDevice::Host).then_some(took)))
        }
    }

    fn begin(
        &self,
        coder: ParityDevice,
        data: Vec<Payload>,
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
        let simulated = engine.simulated_duration(work);
        Ok(engine.submit(work, move || {
            let started = Instant::now();
            let encoded = encode(&code, &data, parity);
            (encoded, simulated.unwrap_or_else(|| started.elapsed()))
        }))
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
    /// of the emulated devices in this process. With `with_store`, also reads the time that this
    /// process has used as a store.
    ///
    /// # Errors
    /// [`StoreError::Io`] if the kernel does not report the load.
    pub fn host_reading(&self, with_store: bool) -> crate::Result<HostReading> {
        let used = |engine: &Worker| Duration::from_nanos(engine.stats().cpu_ns);
        if let Some(since) = self.simulated_since {
            // The simulated host has one CPU, which only computes parity.
            let coding = used(&self.host);
            let all = since.elapsed();
            let reading = LoadCounters { all, busy: coding, coding, ..LoadCounters::default() };
            return Ok(HostReading { reading, cpus: Vec::new() });
        }
        // If the host's CPUs are limited to a list, emulated devices run on other CPUs. The
        // counters then do not include the work of these devices, so it need not be subtracted.
        let device = self.accelerator.as_ref().filter(|_| self.cpus.is_empty());
        let devices = device.map_or(Duration::ZERO, used);
        let mut counters = HostCpus::new(self.cpus.clone(), || devices, || used(&self.host));
        let mut reading = counters.read().map_err(|e| StoreError::Io(e.to_string()))?;
        if with_store {
            reading.store = store_time();
        }
        Ok(HostReading { reading, cpus: self.cpus.clone() })
    }
}

/// Classes of the threads that do the work of a store. The kernel names its threads for I/O rings
/// `iou-wrk-…` and `iou-sqp-…`.
const STORE_CLASSES: [&str; 4] =
    [ThreadClass::Store.prefix(), ThreadClass::Channel.prefix(), ThreadClass::Fabric.prefix(), "iou"];

/// Returns the CPU time that this process has used as a store.
fn store_time() -> Duration {
    // Ignore an error: the time is then 0, so the work of the store counts as work of the host.
    let usage = ProcessUsage::read(std::process::id()).unwrap_or_default();
    // Workers of io_uring end when they are idle. Only the total contains the time of ended threads.
    // So that the result does not decrease, subtract the threads of other classes from the total.
    let others = usage.by_class.iter().filter(|(class, _)| !STORE_CLASSES.contains(&class.as_str()));
    let others = others.map(|(_, used)| used.cpu_ns).sum();
    Duration::from_nanos(usage.total.cpu_ns.saturating_sub(others))
}

type ComputedFragments = (Result<Vec<Payload>, StripeError>, Duration);

fn encode(code: &Code, data: &[Payload], mut parity: Vec<FragmentBuf>) -> Result<Vec<Payload>, StripeError> {
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|buffer| &mut buffer[..]).collect();
    let mut checksums = vec![Vec::new(); outputs.len()];
    let invalid = |e: String| StripeError::Store(StoreError::InvalidArgument(e));
    let encoded = if base::mutant!(CodeUnverifiedData) {
        let sources: Vec<&[u8]> = data.iter().map(|fragment| &fragment.data()[..]).collect();
        code.encode_units(&sources, &mut outputs, &mut checksums)
    } else {
        let sources: Vec<CheckedUnit> = data.iter().map(CheckedUnit::from).collect();
        code.encode_checked(&sources, &mut outputs, &mut checksums)
    };
    encoded.map_err(|e| match e {
        EcError::Damaged { .. } => StripeError::Damaged(e.to_string()),
        e => invalid(e.to_string()),
    })?;
    let fragments = parity.into_iter().zip(checksums);
    fragments
        .map(|(buffer, sums)| {
            Payload::from_parts(0, buffer.freeze(), sums).map_err(|e| invalid(e.to_string()))
        })
        .collect()
}
