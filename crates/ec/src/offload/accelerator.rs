//! The DPU's coding engine, emulated: the thread `eca-0`.
//!
//! It computes for real and is as slow as the paper found the engine of a BlueField-3 to be (Ryu et al., figure 2): encoding
//! (128, 32) took 13.3 times as long as one core of the host for 8 MB, and 10.5 times for 128 MB. The line through both:
//! a batch takes what the core takes for 24 MB, and 10.3 times what the core takes for the batch itself. Small pieces of
//! work would be hopeless one by one, so what waits when a batch begins is one batch.

use std::io;
use std::time::{Duration, Instant};

use base::fault::Faults;
use base::thread::ThreadClass;

use super::batch::EngineRate;
use super::worker::{Worker, WorkerSettings};

/// How often the core's rate is measured.
const MEASUREMENTS: usize = 5;

/// Measures what [`EngineRate::paper`] has to know: at how many bytes of data per second this core encodes. `encode` encodes
/// `bytes` bytes at (128, 32), and is called a few times; the fastest counts, as the others were disturbed.
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
    // A clock that has not moved says that it took less than a nanosecond.
    bytes as f64 / fastest.max(Duration::from_nanos(1)).as_secs_f64()
}

/// Settings of an emulated accelerator.
#[derive(Debug, Clone)]
pub struct AcceleratorOptions {
    /// How fast it is.
    pub pace: EngineRate,
    /// Most pieces of work that wait, at least 1.
    pub queue: usize,
    /// Most data of a batch of more than one piece, in bytes.
    pub batch_bytes: u64,
    /// What is to go wrong.
    pub faults: Faults,
}

impl AcceleratorOptions {
    /// With this pace, and defaults for the rest.
    #[must_use]
    pub fn new(pace: EngineRate) -> AcceleratorOptions {
        AcceleratorOptions { pace, queue: 1024, batch_bytes: 32 << 20, faults: Faults::default() }
    }
}

/// Starts the emulated accelerator.
///
/// # Errors
/// If the system has no room for another thread.
pub fn start(options: AcceleratorOptions) -> io::Result<Worker> {
    let AcceleratorOptions { pace, queue, batch_bytes, faults } = options;
    Worker::start(WorkerSettings {
        name: "accelerator (emulated)",
        class: ThreadClass::CodingDevice,
        threads: 1,
        queue,
        device: Some((pace, batch_bytes)),
        faults,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    #[test]
    fn the_fastest_of_some_measurements_counts() {
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
