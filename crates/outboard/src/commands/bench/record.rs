//! Records of the operations of a measurement: their latency, and their number over time.

use std::time::Duration;

use hdrhistogram::Histogram;

use node::failure::{Doing, Result};

/// Largest latency of a histogram: ten minutes. A longer latency counts as this one.
const LONGEST: Duration = Duration::from_secs(600);

/// Resolution of the time of completions.
const SLICE: Duration = Duration::from_millis(10);
const SLICES_PER_SECOND: usize = 100;

/// The operations of one kind. An operation that failed or was not started has only a latency.
#[derive(Debug, Clone)]
pub struct OpRecord {
    /// In ns, with three significant digits.
    latency: Histogram<u64>,
    /// Number of completions in each slice since the start of the measurement.
    completed: Vec<u32>,
    ops: u64,
}

impl OpRecord {
    /// Creates an empty record.
    ///
    /// # Errors
    /// If the histogram cannot be created.
    pub fn new() -> Result<OpRecord> {
        let latency =
            Histogram::new_with_bounds(1, nanos(LONGEST), 3).doing("creating the histogram of latencies")?;
        Ok(OpRecord { latency, completed: Vec::new(), ops: 0 })
    }

    /// Records an operation that completed `at` after the start of the measurement.
    pub fn complete(&mut self, at: Duration, latency: Duration) {
        let slice = usize::try_from(at.as_nanos() / SLICE.as_nanos()).unwrap_or(usize::MAX - 1);
        if self.completed.len() <= slice {
            self.completed.resize(slice + 1, 0);
        }
        self.completed[slice] += 1;
        self.ops += 1;
        self.latency.saturating_record(nanos(latency));
    }

    /// Records `count` operations of a schedule that failed, or were not started before the end of the
    /// measurement. They have the latency `waited`, and do not count as operations.
    pub fn without_success(&mut self, waited: Duration, count: u64) {
        // A count of zero would change the histogram's maximum.
        if count > 0 {
            self.latency.saturating_record_n(nanos(waited), count);
        }
    }

    /// Adds the operations of another record of the same measurement.
    ///
    /// # Errors
    /// If the histograms do not fit, which does not happen.
    pub fn merge(&mut self, other: &OpRecord) -> Result<()> {
        self.latency.add(&other.latency).doing("adding up the latencies of all clients")?;
        if self.completed.len() < other.completed.len() {
            self.completed.resize(other.completed.len(), 0);
        }
        self.completed.iter_mut().zip(&other.completed).for_each(|(sum, more)| *sum += more);
        self.ops += other.ops;
        Ok(())
    }

    /// Number of operations that succeeded.
    pub fn ops(&self) -> u64 {
        self.ops
    }

    /// Latency in ns.
    pub fn latency(&self) -> &Histogram<u64> {
        &self.latency
    }

    /// Returns the number of completions in each of the first `seconds` seconds.
    pub fn per_second(&self, seconds: u64) -> Vec<u64> {
        let of = |second: usize| {
            let slices = self.completed.iter().skip(second * SLICES_PER_SECOND).take(SLICES_PER_SECOND);
            slices.map(|count| u64::from(*count)).sum()
        };
        (0..usize::try_from(seconds).unwrap_or(usize::MAX)).map(of).collect()
    }

    /// Returns the longest time without a completion, rounded down to slices of 10 ms. A pause counts
    /// if it begins in the first `measured`. It ends with the next completion, also after that time. If
    /// no completion follows, it ends with that time.
    pub fn longest_pause(&self, measured: Duration) -> Duration {
        let end = usize::try_from(measured.as_nanos() / SLICE.as_nanos()).unwrap_or(usize::MAX);
        let (mut longest, mut begin) = (0, 0);
        for (slice, _) in self.completed.iter().enumerate().filter(|(_, count)| **count > 0) {
            if begin >= end {
                break;
            }
            longest = longest.max(slice - begin);
            begin = slice + 1;
        }
        longest = longest.max(end.saturating_sub(begin));
        SLICE * u32::try_from(longest).unwrap_or(u32::MAX)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn completions_are_counted_by_second_and_pauses_end_with_a_completion() {
        let (mut one, mut other) = (OpRecord::new().unwrap(), OpRecord::new().unwrap());
        for ms in [5, 300, 999, 1000] {
            one.complete(ms * MS, 2 * MS);
        }
        other.complete(700 * MS, 4 * MS);
        other.complete(3500 * MS, 8 * MS);
        one.merge(&other).unwrap();
        assert_eq!(one.per_second(3), [4, 1, 0]);
        assert_eq!(one.ops(), 6, "the last one completed after the end");
        assert_eq!(one.longest_pause(3000 * MS), 2490 * MS, "from 1.01 s to 3.50 s");
        assert_eq!(one.longest_pause(1000 * MS), 390 * MS, "from 0.31 s to 0.70 s");
        assert_eq!(one.longest_pause(9000 * MS), 5490 * MS, "from 3.51 s to the end");
        assert_eq!(one.latency().len(), 6);
    }

    #[test]
    fn an_operation_without_success_has_a_latency_and_is_not_counted() {
        let mut record = OpRecord::new().unwrap();
        record.complete(MS, MS);
        record.without_success(4000 * MS, 2);
        record.without_success(9000 * MS, 0);
        assert_eq!((record.ops(), record.per_second(1), record.latency().len()), (1, vec![1], 3));
        assert!((nanos(4000 * MS)..nanos(5000 * MS)).contains(&record.latency().max()));
    }

    #[test]
    fn a_measurement_without_operations_is_one_pause() {
        assert_eq!(OpRecord::new().unwrap().longest_pause(7000 * MS), 7000 * MS);
    }
}
