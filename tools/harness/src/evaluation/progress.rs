//! Shows the progress of a run: one changing line on a terminal, or one line per round in a pipe.

use std::io::{IsTerminal, Write};
use std::time::Instant;

/// The progress line.
#[derive(Debug)]
pub struct ProgressLine {
    shown: bool,
    started: Instant,
    planned: f64,
    done: f64,
}

impl ProgressLine {
    /// Creates the progress line of a run that should take `planned` seconds.
    #[must_use]
    pub fn new(planned: f64) -> ProgressLine {
        ProgressLine { shown: std::io::stderr().is_terminal(), started: Instant::now(), planned, done: 0.0 }
    }

    /// Shows the next step.
    pub fn show(&self, what: &str) {
        if self.shown {
            let left = minutes(self.seconds_left());
            let _ = write!(std::io::stderr(), "\r\x1b[K  {:>3.0} %, {left} left: {what}", self.percent());
        }
    }

    /// Records a completed step that was planned to take `seconds`.
    pub fn add(&mut self, seconds: f64) {
        self.done += seconds;
    }

    /// Sets the planned time of the remaining work, in seconds.
    pub fn plan_rest(&mut self, seconds: f64) {
        self.planned = self.done + seconds;
    }

    /// Reports the end of a larger step. In a pipe, this prints a line.
    pub fn landmark(&self, what: &str) {
        if !self.shown {
            let left = minutes(self.seconds_left());
            let _ = writeln!(std::io::stderr(), "  {:>3.0} %, {left} left: {what}", self.percent());
        }
    }

    /// Removes the line.
    pub fn clear(&self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }

    fn percent(&self) -> f64 {
        100.0 * (self.done / self.planned.max(1.0)).min(1.0)
    }

    fn seconds_left(&self) -> f64 {
        self.rest_at(self.started.elapsed().as_secs_f64())
    }

    /// Returns the remaining time after `elapsed` seconds. This is the planned time of the
    /// remaining work, times the ratio of elapsed time to the planned time of the completed work.
    /// Numerator and denominator of the ratio are increased by a tenth of the whole planned time,
    /// so that the first steps have little weight.
    fn rest_at(&self, elapsed: f64) -> f64 {
        let before = (self.planned / 10.0).max(1.0);
        (self.planned - self.done).max(0.0) * (elapsed + before) / (self.done + before)
    }
}

/// Formats a duration, such as `about 40 s` or `about 12 minutes`.
#[must_use]
pub fn minutes(seconds: f64) -> String {
    if seconds < 90.0 {
        format!("about {seconds:.0} s")
    } else {
        format!("about {:.0} minutes", seconds / 60.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remaining_time_follows_the_plan_and_the_time_spent_so_far() {
        let mut progress = ProgressLine::new(1000.0);
        assert_eq!(progress.rest_at(0.0), 1000.0);
        progress.add(400.0);
        assert_eq!(progress.rest_at(400.0), 600.0);
        // The ratio is (650 + 100) / (400 + 100) = 1.5, and 600 s of the plan remain.
        assert_eq!(progress.rest_at(650.0), 900.0);
        progress.plan_rest(100.0);
        assert_eq!((progress.rest_at(400.0), progress.percent()), (100.0, 80.0));
    }
}
