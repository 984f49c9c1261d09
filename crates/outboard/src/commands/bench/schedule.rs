//! The moments at which operations are due if a measurement has a fixed rate. All moments count from
//! the start of the measurement.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const NS_PER_SECOND: u128 = 1_000_000_000;

/// Distributes operations of a fixed rate among all workers of all clients.
#[derive(Debug)]
pub struct Schedule {
    ops_per_second: u32,
    /// Number of the first operation that no worker has taken.
    next: AtomicU64,
}

impl Schedule {
    /// Creates a schedule of `ops_per_second` operations, at least one.
    pub fn new(ops_per_second: u32) -> Schedule {
        assert!(ops_per_second > 0, "a schedule needs a rate");
        Schedule { ops_per_second, next: AtomicU64::new(0) }
    }

    /// Takes the next operation. Returns the moment at which it is due, or `None` if no further operation
    /// is due before `end`.
    pub fn take(&self, end: Duration) -> Option<Duration> {
        let due = self.due(self.next.fetch_add(1, Ordering::Relaxed));
        (due < end).then_some(due)
    }

    /// Takes all operations that are due before `end` and that no worker has taken. Returns their numbers.
    pub fn take_rest(&self, end: Duration) -> Range<u64> {
        let count = self.due_before(end);
        self.next.fetch_max(count, Ordering::Relaxed).min(count)..count
    }

    /// Returns the moment at which the operation with the number `number` is due.
    pub fn due(&self, number: u64) -> Duration {
        let ns = u128::from(number) * NS_PER_SECOND / u128::from(self.ops_per_second);
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// Returns the number of operations that are due before `end`.
    fn due_before(&self, end: Duration) -> u64 {
        let count = (end.as_nanos() * u128::from(self.ops_per_second)).div_ceil(NS_PER_SECOND);
        u64::try_from(count).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn operations_are_due_at_equal_intervals_until_the_end() {
        let schedule = Schedule::new(4);
        let due: Vec<u128> =
            std::iter::from_fn(|| schedule.take(SECOND)).map(|due| due.as_millis()).collect();
        assert_eq!(due, [0, 250, 500, 750]);
        assert!(schedule.take_rest(SECOND).is_empty());
    }

    #[test]
    fn the_rest_is_taken_once_and_contains_all_operations_that_no_worker_took() {
        for (rate, seconds) in [(3, 1), (7, 3), (10_000_000, 86_400)] {
            let (schedule, end) = (Schedule::new(rate), seconds * SECOND);
            schedule.take(end).unwrap();
            let rest = schedule.take_rest(end);
            assert_eq!(rest, 1..u64::from(rate) * u64::from(seconds), "{rate} op/s");
            assert!(schedule.due(rest.end - 1) < end && schedule.due(rest.end) >= end, "{rate} op/s");
            assert_eq!((schedule.take(end), schedule.take_rest(end).count()), (None, 0), "{rate} op/s");
        }
    }
}
