//! Estimates the cost of tasks at a coding place from its finished tasks.

use std::time::Duration;

use base::clock::Instant;

/// Time after which a measurement has 1/e of its weight. It is long enough to average out the
/// scatter of single measurements, and short enough for the estimate to follow a change of load
/// within one second.
pub(super) const MEMORY: Duration = Duration::from_millis(200);
/// Minimum total weight of older measurements, in tasks. The estimate of a slow coding place
/// therefore rests on several tasks, too.
const TASKS_KEPT: f64 = 3.0;
/// A task belongs to its predecessor's batch if it ends within this fraction of the batch's time
/// after the predecessor.
const TOGETHER: f64 = 0.02;
/// Maximum number of tasks in one batch.
const MAX_BATCH: f64 = 64.0;
/// If the variance of the sizes is below this fraction of their squared mean, the cost per task and
/// the cost per byte cannot be distinguished.
const LEAST_VARIANCE: f64 = 1e-3;

/// Time that a lane needs for tasks, in seconds: `per_task + per_byte · bytes` for each task.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cost {
    pub(super) per_task: f64,
    pub(super) per_byte: f64,
}

impl Cost {
    /// Returns the cost of `tasks` tasks with `bytes` bytes in total.
    pub(super) fn of(self, tasks: usize, bytes: u64) -> f64 {
        self.per_task * tasks as f64 + self.per_byte * bytes as f64
    }
}

/// Sums for a least-squares fit in which older measurements lose weight. A measurement is a batch:
/// `n` tasks of `x` bytes in total, done in time `y`. Its weight is 1/`n`, because its variance
/// grows with `n`.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    n: f64,
    x: f64,
    xx: f64,
    y: f64,
    xy: f64,
}

impl Sums {
    fn of(n: f64, x: f64, y: f64) -> Sums {
        Sums { n, x, xx: x * x / n, y, xy: x * y / n }
    }

    fn times(self, f: f64) -> Sums {
        Sums { n: self.n * f, x: self.x * f, xx: self.xx * f, y: self.y * f, xy: self.xy * f }
    }

    fn plus(self, other: Sums) -> Sums {
        Sums {
            n: self.n + other.n,
            x: self.x + other.x,
            xx: self.xx + other.xx,
            y: self.y + other.y,
            xy: self.xy + other.xy,
        }
    }

    /// Returns the best fit with non-negative costs. The costs of all measurements according to the
    /// fit add up to the whole measured time.
    fn fit(self) -> Cost {
        let per_byte_only = Cost { per_task: 0.0, per_byte: self.y / self.x.max(1.0) };
        let determinant = self.n * self.xx - self.x * self.x;
        if determinant <= LEAST_VARIANCE * self.x * self.x {
            return per_byte_only;
        }
        let per_byte = (self.n * self.xy - self.x * self.y) / determinant;
        let per_task = (self.y - per_byte * self.x) / self.n;
        match () {
            () if per_task < 0.0 => per_byte_only,
            () if per_byte < 0.0 => Cost { per_task: self.y / self.n, per_byte: 0.0 },
            () => Cost { per_task, per_byte },
        }
    }
}

/// The cost estimate for one coding place.
#[derive(Debug, Default)]
pub(super) struct PlaceEstimate {
    before: Sums,
    /// The last batch: tasks, bytes, seconds.
    last: (f64, f64, f64),
    at: Option<Instant>,
}

impl PlaceEstimate {
    /// Adds a measurement: a task of `bytes` bytes has ended. `took` is the time that a lane spent
    /// on the task: since the task's start, or since the end of its predecessor on the lane.
    pub(super) fn learn(&mut self, bytes: u64, took: Duration, now: Instant) {
        let (x, y) = (bytes as f64, took.as_secs_f64());
        let (tasks, batch_x, batch_y) = self.last;
        let since = self.at.replace(now).map(|at| now.saturating_duration_since(at));
        if since.is_some() && tasks < MAX_BATCH && y <= TOGETHER * batch_y {
            self.last = (tasks + 1.0, batch_x + x, batch_y + y);
            return;
        }
        if let Some(since) = since {
            let kept = (-since.as_secs_f64() / MEMORY.as_secs_f64()).exp();
            let all = self.before.plus(Sums::of(tasks, batch_x, batch_y));
            self.before = all.times(kept.max((TASKS_KEPT / all.n).min(1.0)));
        }
        self.last = (1.0, x, y);
    }

    /// Returns the estimate; `None` before the first measurement.
    pub(super) fn cost(&self) -> Option<Cost> {
        self.at?;
        let (tasks, x, y) = self.last;
        Some(self.before.plus(Sums::of(tasks, x, y)).fit())
    }

    /// Returns true if the last measurement is older than `age`.
    pub(super) fn is_older_than(&self, age: Duration, now: Instant) -> bool {
        self.at.is_none_or(|at| now.saturating_duration_since(at) > age)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds measurements of tasks with these sizes, one after another. Each takes `per_task +
    /// per_byte · size` microseconds.
    fn feed(estimate: &mut PlaceEstimate, now: &mut Instant, sizes: &[u64], cost: impl Fn(u64) -> u64) {
        for &bytes in sizes {
            let took = Duration::from_micros(cost(bytes));
            *now += took;
            estimate.learn(bytes, took, *now);
        }
    }

    fn is_near(actual: f64, expected: f64) -> bool {
        (actual - expected).abs() <= 0.01 * expected
    }

    #[test]
    fn costs_per_task_and_per_byte_are_estimated_separately() {
        let (mut estimate, mut now) = (PlaceEstimate::default(), Instant::now());
        assert!(estimate.cost().is_none());
        feed(&mut estimate, &mut now, &[1000, 64_000, 8000, 500].repeat(20), |bytes| 300 + bytes / 100);
        let cost = estimate.cost().unwrap();
        assert!(is_near(cost.per_task, 300e-6) && is_near(cost.per_byte, 1e-8), "{cost:?}");
        assert!(is_near(cost.of(2, 100_000), 1600e-6));
    }

    #[test]
    fn tasks_of_equal_size_yield_an_estimate_of_the_cost_at_that_size() {
        let (mut estimate, mut now) = (PlaceEstimate::default(), Instant::now());
        feed(&mut estimate, &mut now, &[4096; 50], |_| 700);
        assert!(is_near(estimate.cost().unwrap().of(3, 3 * 4096), 2100e-6));
    }

    #[test]
    fn tasks_that_end_together_are_measured_as_one_batch() {
        let (mut estimate, mut now) = (PlaceEstimate::default(), Instant::now());
        for size in [1000, 2000, 4000, 500].repeat(10) {
            let took = Duration::from_micros(80 + 4 * size / 100);
            now += took;
            for took in [took, Duration::ZERO, Duration::ZERO, Duration::ZERO] {
                estimate.learn(size, took, now);
            }
        }
        let cost = estimate.cost().unwrap();
        assert!(is_near(cost.per_task, 20e-6) && is_near(cost.per_byte, 1e-8), "{cost:?}");
    }

    #[test]
    fn the_estimate_follows_a_change_of_the_cost_within_a_second() {
        for (before, after) in [(10_000, 1000), (1000, 10_000), (100_000, 10_000), (10_000, 100_000)] {
            let (mut estimate, mut now) = (PlaceEstimate::default(), Instant::now());
            feed(&mut estimate, &mut now, &[4096; 50], |_| before);
            let tasks = 1_000_000 / after as usize;
            feed(&mut estimate, &mut now, &vec![4096; tasks], |_| after);
            let cost = estimate.cost().unwrap().of(1, 4096) * 1e6;
            assert!((cost - after as f64).abs() < 0.1 * after as f64, "{before} to {after}: {cost}");
            assert!(!estimate.is_older_than(MEMORY, now + MEMORY));
            assert!(estimate.is_older_than(MEMORY, now + 2 * MEMORY));
        }
    }
}
