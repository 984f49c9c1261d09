//! Erasure coding in a node's processes: its configuration, and the engines that compute parity in
//! the process of the stores.

use std::io;
use std::sync::Arc;

use base::fault::Faults;
use ec::offload::accelerator::{self, AcceleratorOptions};
use ec::offload::batch::EngineRate;
use ec::offload::worker::Worker;
use ec::{Code, Geometry, KernelChoice};
use osd::{CodingConfig, StripesAt, Thresholds};
use store::stripes::{EngineOptions, Engines};
use wire::{CodingOffload, Placement};

use super::config::{CodingSection, Config};
use super::cpus::{ChannelSide, Cpus, kept_to};

/// Number of bytes to encode when a core's rate is measured. The median size in the measurement of
/// Ryu et al. (see `ec::offload::accelerator`) would take longer and yield the same rate.
const SAMPLE: usize = 8 << 20;

/// Starts the emulated accelerator, if one is configured, on the CPUs of the DPU's side. Call this
/// function before the calling thread is restricted to other CPUs.
pub fn accelerator(config: &Config, dpu: Cpus, faults: &Faults) -> io::Result<Option<Worker>> {
    if !config.coding.offload.has_accelerator() {
        return Ok(None);
    }
    let faults = faults.clone();
    dpu.during(ChannelSide::Dpu, || {
        let options =
            AcceleratorOptions { faults, ..AcceleratorOptions::new(EngineRate::paper(host_rate()?)) };
        accelerator::start(options).map(Some)
    })
}

/// Measures how many bytes per second one core encodes with 128 data and 32 parity fragments, as in
/// the measurement of Ryu et al.
fn host_rate() -> io::Result<f64> {
    let code =
        Geometry::new(128, 32).and_then(|geometry| Ok(Code::new(geometry, KernelChoice::Auto.load()?)));
    let code = code.map_err(io::Error::other)?;
    let unit = SAMPLE / 128;
    let data = vec![0x5a; SAMPLE];
    let mut parity = vec![vec![1; unit]; 32];
    Ok(accelerator::host_rate(SAMPLE as u64, || {
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
        let encoded = code.encode_stripes(unit, &data, &mut outputs, &mut vec![Vec::new(); 32]);
        debug_assert!(encoded.is_ok(), "the sample is one stripe");
    }))
}

/// Creates the engines that compute parity in the process of the stores, on the CPUs that this
/// thread may use.
pub fn engines(config: &Config, accelerator: Option<Worker>, faults: &Faults) -> io::Result<Arc<Engines>> {
    let options =
        EngineOptions { threads: config.coding.host_threads, cpus: kept_to()?, faults: faults.clone() };
    Engines::start(options, accelerator).map(Arc::new)
}

fn thresholds(coding: &CodingSection) -> Thresholds {
    let part = |percent: u32| f64::from(percent) / 100.0;
    Thresholds {
        busy_utilization: part(coding.busy_utilization),
        calm_utilization: part(coding.calm_utilization),
        busy_pressure: part(coding.busy_pressure),
        calm_pressure: part(coding.calm_pressure),
        calm_after: coding.calm_after.0,
        counts_store: coding.count_store,
        ..Thresholds::default()
    }
}

/// Returns the configuration with which an osd decides where to compute parity.
/// The shards of the osd divide the configured numbers of threads and of waiting tasks; each has at
/// least one.
pub fn osd_config(
    config: &Config,
    shards: u16,
    placement: Placement,
    stripes: StripesAt,
    faults: Faults,
) -> CodingConfig {
    let coding = &config.coding;
    let offload = match (coding.offload, placement) {
        (offload, Placement::Dpu) => Some(offload),
        // Without a DPU, only the accelerator is left.
        (CodingOffload::Accelerator | CodingOffload::Both, Placement::Host) => {
            Some(CodingOffload::Accelerator)
        }
        (CodingOffload::Dpu, Placement::Host) => None,
    };
    let share = |all: usize| (all / usize::from(shards)).max(1);
    CodingConfig {
        mode: coding.mode,
        offload,
        threads: share(coding.dpu_threads),
        host_threads: share(coding.host_threads),
        queue: share(coding.queue),
        cool_down: coding.cool_down.0,
        thresholds: thresholds(coding),
        stripes,
        faults,
    }
}
