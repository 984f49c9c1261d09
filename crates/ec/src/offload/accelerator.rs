//! Emulates the DPU's coding accelerator, in the thread `eca-0`.
//!
//! The emulation computes real results, at the speed that Ryu et al. measured for a BlueField-3
//! (figure 2 of the paper that [`scheduler`](super::scheduler) names). In that measurement with 128
//! data and 32 parity fragments, the accelerator needed 13.3 times the time of one host core for 8
//! MB, and 10.5 times the time for 128 MB. A linear fit gives the time of a batch: the time that
//! the core needs for 24 MB, plus 10.3 times the time that the core needs for the data of the
//! batch. The fixed time makes single small tasks very slow. Therefore all tasks that wait when a
//! batch begins form one batch.

use std::io;
use std::time::Duration;

use base::clock::Instant;
use base::fault::Faults;
use base::thread::ThreadClass;

use super::batch::EngineRate;
use super::worker::{Worker, WorkerSettings};

/// Number of runs in which [`host_rate`] measures the core's rate.
const MEASUREMENTS: usize = 5;

/// Measures the rate for [`EngineRate::paper`]: the bytes of data per second that this core
/// encodes. `encode` must encode `bytes` bytes with 128 data and 32 parity fragments. This function
/// calls `encode` several times and uses the fastest run, because interference only slows a run
/// down.
#[must_use]
pub fn host_rate(bytes: u64, encode: impl FnMut()) -> f64 {
    fastest_rate(bytes, Instant::now, encode)
}

fn fastest_rate(bytes: u64, mut clock: impl FnMut() -> Instant, mut encode: impl FnMut()) -> f64 {
    let mut measure = |_| {
        let started = clock();
        encode();
        clock() - started
    };
    let fastest = (0..MEASUREMENTS).map(&mut measure).min().unwrap_or_default();
    // If the clock has not moved, the run took less than a nanosecond.
    bytes as f64 / fastest.max(Duration::from_nanos(1)).as_secs_f64()
}

/// Settings of an emulated accelerator.
#[derive(Debug, Clone)]
pub struct AcceleratorOptions {
    /// Speed of the accelerator.
    pub pace: EngineRate,
    /// Maximum number of waiting tasks, at least 1.
    pub queue: usize,
    /// Maximum number of bytes of data in a batch of several tasks. A batch of a single task may be
    /// larger.
    pub batch_bytes: u64,
    /// Faults to inject.
    pub faults: Faults,
}

impl AcceleratorOptions {
    /// Returns the settings for this speed, with default limits.
    #[must_use]
    pub fn new(pace: EngineRate) -> AcceleratorOptions {
        AcceleratorOptions { pace, queue: 1024, batch_bytes: 32 << 20, faults: Faults::default() }
    }
}

/// Starts the emulated accelerator.
///
/// # Errors
/// If the system cannot create another thread.
pub fn start(options: AcceleratorOptions) -> io::Result<Worker> {
    Worker::start(settings(options, 1))
}

/// Creates an emulated accelerator that has no thread, for a simulation. Each task is a batch of its
/// own, and batches run in parallel.
#[must_use]
pub fn inline(options: AcceleratorOptions) -> Worker {
    Worker::inline(settings(options, 0))
}

fn settings(options: AcceleratorOptions, threads: usize) -> WorkerSettings {
    let AcceleratorOptions { pace, queue, batch_bytes, faults } = options;
    WorkerSettings {
        name: "accelerator (emulated)",
        class: ThreadClass::CodingDevice,
        threads,
        queue,
        device: Some((pace, batch_bytes)),
        faults,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    #[test]
    fn the_host_rate_is_the_rate_of_the_fastest_measurement() {
        let start = Instant::now();
        let mut times = [30, 20, 50, 20, 90].map(Duration::from_millis).into_iter();
        let mut now = start;
        let mut running = false;
        let clock = || {
            now += if running { times.next().unwrap() } else { Duration::from_secs(1) };
            running = !running;
            now
        };
        let mut runs = 0;
        assert_eq!(fastest_rate(40 * MB, clock, || runs += 1), 2e9);
        assert_eq!(runs, MEASUREMENTS);
        assert!(fastest_rate(MB, || start, || ()).is_finite());
    }
}
