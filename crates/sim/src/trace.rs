//! The trace of a simulation: what happened, in order, with the simulated times.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt::Arguments;
use std::rc::Rc;

use base::clock::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Maximum number of events that a trace keeps for a report. The hash covers all events.
const KEPT: usize = 400;

thread_local! {
    /// Start of the simulation that was begun last on this thread.
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Returns the simulated time since the start of the simulation of this thread; `None` if no
/// simulation runs.
#[must_use]
pub fn now() -> Option<std::time::Duration> {
    // Outside of a simulation, there is no simulated clock.
    tokio::runtime::Handle::try_current().ok()?;
    BEGAN.get().map(|began| began.elapsed())
}

/// The events of a simulation. Clones are the same trace.
#[derive(Clone)]
pub struct EventTrace {
    inner: Rc<Inner>,
}

struct Inner {
    began: Instant,
    hash: Cell<u64>,
    count: Cell<u64>,
    kept: RefCell<VecDeque<String>>,
    is_printed: bool,
}

impl EventTrace {
    /// Creates an empty trace. With `is_printed`, each event is printed when it happens.
    #[must_use]
    pub fn new(is_printed: bool) -> EventTrace {
        let inner = Inner {
            began: Instant::now(),
            hash: Cell::new(0),
            count: Cell::new(0),
            kept: RefCell::default(),
            is_printed,
        };
        BEGAN.set(Some(inner.began));
        EventTrace { inner: Rc::new(inner) }
    }

    /// Records an event.
    pub fn event(&self, event: Arguments<'_>) {
        let at = self.inner.began.elapsed();
        let line = format!("{:>10.6} {event}", at.as_secs_f64());
        self.add(line.as_bytes());
        if self.inner.is_printed {
            crate::output::line(&line);
        }
        let mut kept = self.inner.kept.borrow_mut();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(line);
    }

    /// Adds bytes to the hash without keeping them.
    pub fn add(&self, bytes: &[u8]) {
        self.inner.hash.set(xxh3_64_with_seed(bytes, self.inner.hash.get()));
        self.inner.count.set(self.inner.count.get() + 1);
    }

    /// Simulated time since the start of the simulation.
    #[must_use]
    pub fn elapsed(&self) -> std::time::Duration {
        self.inner.began.elapsed()
    }

    /// A hash of all events so far. Equal simulations have equal hashes.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.inner.hash.get()
    }

    /// Number of events so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.inner.count.get()
    }

    /// The most recent events.
    #[must_use]
    pub fn recent(&self) -> Vec<String> {
        self.inner.kept.borrow().iter().cloned().collect()
    }
}
