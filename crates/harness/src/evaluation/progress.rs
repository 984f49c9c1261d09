//! How far a run is, on one line of a terminal; nothing in a pipe.

use std::io::{IsTerminal, Write};
use std::time::Instant;

/// The line.
#[derive(Debug)]
pub struct Progress {
    shown: bool,
    started: Instant,
    planned: f64,
    done: f64,
}

impl Progress {
    /// Of work that should take `planned` seconds.
    #[must_use]
    pub fn new(planned: f64) -> Progress {
        Progress { shown: std::io::stderr().is_terminal(), started: Instant::now(), planned, done: 0.0 }
    }

    /// What comes next.
    pub fn show(&self, what: &str) {
        if self.shown {
            let left = minutes(self.seconds_left());
            let _ = write!(std::io::stderr(), "\r\x1b[K  {:>3.0} %, {left} left: {what}", self.percent());
        }
    }

    /// That is done, and was planned to take so many seconds.
    pub fn add(&mut self, seconds: f64) {
        self.done += seconds;
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

    /// What was planned for the rest, corrected by how the plan has held so far.
    fn seconds_left(&self) -> f64 {
        let pace = if self.done > 0.0 { self.started.elapsed().as_secs_f64() / self.done } else { 1.0 };
        (self.planned - self.done).max(0.0) * pace
    }
}

/// `about 40 s`, `about 12 min`.
#[must_use]
pub fn minutes(seconds: f64) -> String {
    if seconds < 90.0 { format!("about {seconds:.0} s") } else { format!("about {:.0} min", seconds / 60.0) }
}
