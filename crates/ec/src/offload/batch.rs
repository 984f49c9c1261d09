//! The size of a coding task, and the time that a device needs for a batch of coding tasks. The
//! device is modelled on the measurements of Ryu et al. (see [`accelerator`](super::accelerator)).

use std::time::Duration;

/// Fixed time of a batch, expressed as the number of bytes that one host core encodes in this time.
const PER_BATCH: f64 = 24e6;
/// Ratio of the accelerator's time per byte to the time per byte of one host core.
const SLOWER: f64 = 10.3;
/// Number of parity fragments per stripe in the measurement of Ryu et al.
const PAPER_COMPUTED: f64 = 32.0;
/// Size of a coding task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodingWork {
    /// Data that the task reads, in bytes.
    pub bytes: u64,
    /// Number of fragments computed from each stripe: parity when encoding, lost fragments when
    /// decoding.
    pub computed_fragments: u32,
}

/// Speed of a device that works in batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineRate {
    host_rate: f64,
}

impl EngineRate {
    /// Returns the speed of the accelerator that Ryu et al. measured, relative to a host core.
    /// `host_rate` is the number of bytes of data per second that this host core encodes with 128
    /// data and 32 parity fragments.
    #[must_use]
    pub fn paper(host_rate: f64) -> EngineRate {
        EngineRate { host_rate: host_rate.max(1.0) }
    }

    /// Returns the time for a batch: a fixed time, plus a time per byte of data. Each byte is
    /// multiplied and added once for each computed fragment. Therefore the time per byte is
    /// proportional to the number of computed fragments. It does not depend on the number of data
    /// fragments.
    #[must_use]
    pub fn of_batch(&self, batch: &[CodingWork]) -> Duration {
        let as_paper =
            |work: &CodingWork| work.bytes as f64 * f64::from(work.computed_fragments) / PAPER_COMPUTED;
        let core_bytes = PER_BATCH + SLOWER * batch.iter().map(as_paper).sum::<f64>();
        Duration::try_from_secs_f64(core_bytes / self.host_rate).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn work(bytes: u64, computed_fragments: u32) -> CodingWork {
        CodingWork { bytes, computed_fragments }
    }

    #[test]
    fn the_accelerator_is_slower_than_a_core_by_the_factors_that_ryu_et_al_measured() {
        let rate = 4e9;
        let slower = |mb: u64| {
            let core = (mb * MB) as f64 / rate;
            EngineRate::paper(rate).of_batch(&[work(mb * MB, 32)]).as_secs_f64() / core
        };
        assert!((slower(8) - 13.3).abs() < 0.05, "{}", slower(8));
        assert!((slower(128) - 10.5).abs() < 0.05, "{}", slower(128));
    }

    #[test]
    fn a_batch_has_one_fixed_cost_and_computing_fewer_fragments_takes_less_time() {
        let pace = EngineRate::paper(1e9);
        let [one, two] = [1, 2].map(|count| pace.of_batch(&vec![work(10 * MB, 32); count]));
        assert_eq!((one, two), (Duration::from_millis(24 + 103), Duration::from_millis(24 + 206)));
        assert_eq!(pace.of_batch(&[work(10 * MB, 16), work(20 * MB, 8)]), one);
        assert_eq!(pace.of_batch(&[]), Duration::from_millis(24));
    }
}
