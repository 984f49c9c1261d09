//! The moments at which operations are due if a measurement has a fixed rate.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Distributes operations of a fixed rate among all workers of all clients.
#[derive(Debug)]
pub struct Schedule {
    ops_per_second: f64,
    next: AtomicU64,
}

impl Schedule {
    /// Creates a schedule of `ops_per_second` operations.
    pub fn new(ops_per_second: u32) -> Schedule {
        Schedule { ops_per_second: f64::from(ops_per_second), next: AtomicU64::new(0) }
    }

    /// Takes the next operation. Returns the moment at which it is due, or `None` if no further operation
    /// is due before `end`.
    pub fn take(&self, start: Instant, end: Instant) -> Option<Instant> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let due = start + Duration::from_secs_f64(number as f64 / self.ops_per_second);
        (due < end).then_some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_due_at_equal_intervals_until_the_end() {
        let (schedule, start) = (Schedule::new(4), Instant::now());
        let end = start + Duration::from_secs(1);
        let due: Vec<u128> = std::iter::from_fn(|| schedule.take(start, end))
            .map(|due| due.duration_since(start).as_millis())
            .collect();
        assert_eq!(due, [0, 250, 500, 750]);
    }
}
