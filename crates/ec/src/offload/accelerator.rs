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

use super::worker::{Settings, Work, Worker};

/// What the core encodes in the time that every batch costs, in bytes.
const PER_BATCH: f64 = 24e6;
/// For so long does the engine work on what takes the core 1.
const SLOWER: f64 = 10.3;
/// The paper computed so many shards from each stripe.
const PAPER_COMPUTED: f64 = 32.0;
/// How often the core's rate is measured.
const MEASUREMENTS: usize = 5;

/// How long a batch takes the engine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    host_rate: f64,
}

impl Pace {
    /// As the paper found it, beside a core that encodes (128, 32) at `host_rate` bytes of data per second.
    #[must_use]
    pub fn paper(host_rate: f64) -> Pace {
        Pace { host_rate: host_rate.max(1.0) }
    }

    /// How long this batch takes. Each byte of data is multiplied and added once for every shard that is computed from it,
    /// so other geometries than the paper's take time in proportion to those shards, however many the data is cut into; what
    /// every batch costs is the same.
    #[must_use]
    pub fn of_batch(&self, batch: &[Work]) -> Duration {
        let as_paper = |work: &Work| work.bytes as f64 * f64::from(work.computed_shards) / PAPER_COMPUTED;
        let core_bytes = PER_BATCH + SLOWER * batch.iter().map(as_paper).sum::<f64>();
        Duration::try_from_secs_f64(core_bytes / self.host_rate).unwrap_or(Duration::MAX)
    }
}

/// Measures what [`Pace::paper`] has to know: at how many bytes of data per second this core encodes. `encode` encodes
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
    pub pace: Pace,
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
    pub fn new(pace: Pace) -> AcceleratorOptions {
        AcceleratorOptions { pace, queue: 1024, batch_bytes: 32 << 20, faults: Faults::default() }
    }
}

/// Starts the emulated accelerator.
///
/// # Errors
/// If the system has no room for another thread.
pub fn start(options: AcceleratorOptions) -> io::Result<Worker> {
    let AcceleratorOptions { pace, queue, batch_bytes, faults } = options;
    Worker::start(Settings {
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

    fn work(bytes: u64, computed_shards: u32) -> Work {
        Work { bytes, computed_shards }
    }

    #[test]
    fn it_is_as_much_slower_than_a_core_as_the_paper_found() {
        let rate = 4e9;
        let slower = |mb: u64| {
            let core = (mb * MB) as f64 / rate;
            Pace::paper(rate).of_batch(&[work(mb * MB, 32)]).as_secs_f64() / core
        };
        assert!((slower(8) - 13.3).abs() < 0.05, "{}", slower(8));
        assert!((slower(128) - 10.5).abs() < 0.05, "{}", slower(128));
    }

    #[test]
    fn a_batch_pays_once_and_fewer_shards_take_less() {
        let pace = Pace::paper(1e9);
        let [one, two] = [1, 2].map(|count| pace.of_batch(&vec![work(10 * MB, 32); count]));
        assert_eq!((one, two), (Duration::from_millis(24 + 103), Duration::from_millis(24 + 206)));
        assert_eq!(pace.of_batch(&[work(10 * MB, 16), work(20 * MB, 8)]), one);
        assert_eq!(pace.of_batch(&[]), Duration::from_millis(24));
    }

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
