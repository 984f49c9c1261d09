//! Latency phases: the breakdown of a request's time from the paper about DoCeph (section 5.4,
//! Table 3), measured for every request.
//!
//! Code that works for a request records when its work began and ended. At the end, the request's
//! [`Clock`] turns these intervals, which may overlap, into exclusive times that add up to the
//! request's time:
//!
//! ```text
//! dma       some payload or entry of the request was being transferred                    |T| host
//! the store on the host worked on the request, and nothing was transferred      |H \ T| dma wait
//! a payload or entry waited for its transfer, and neither of the above applied  |W \ (T ∪ H)|
//! others    the rest: network, messenger, the osd's own work, waiting for other requests  total −
//! |T ∪ H ∪ W|
//! ```
//!
//! Calls do not pass the clock as an argument. [`Clock::scope`] sets the clock of a future, and
//! code that the future calls gets it from [`current`].

mod union;

use std::cell::Cell;
use std::ops::AddAssign;
use std::sync::{Arc, Mutex, PoisonError};

use union::{Span, Union};

use crate::clock::Instant;

tokio::task_local! {
    static CURRENT: Clock;
}

thread_local! {
    /// Number of the last clock that this thread started.
    static LAST: Cell<u64> = const { Cell::new(0) };
}

/// A phase of a request that the clock records. The remaining time counts as *others*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The store on the host has received a call of the request, and has not finished it.
    Host,
    /// Bytes are being transferred between the memories of DPU and host.
    Dma,
    /// A payload or entry was handed to the channel and waits for memory, credit or its turn before
    /// its transfer.
    DmaWait,
}

/// Records how a request spends its time. Clones are handles to the same clock, and may be used on
/// other threads.
///
/// Memory is bounded: the clock keeps at most 64 disjoint intervals per phase. If there are more,
/// it counts the shortest pauses as part of the phase.
#[derive(Debug, Clone)]
pub struct Clock(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    number: u64,
    started: Instant,
    taken: Mutex<PhaseUnions>,
}

#[derive(Debug, Default)]
struct PhaseUnions {
    host: Union,
    dma: Union,
    dma_wait: Union,
}

/// A request's time by phase, or a sum over several requests. The phases are exclusive and add up
/// exactly to the total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Breakdown {
    /// Time from the request's arrival to the end of its work, in ns.
    pub total_ns: u64,
    /// Time in which the store worked and nothing was being transferred, in ns.
    pub host_ns: u64,
    /// Time in which a payload or entry was being transferred, in ns.
    pub dma_ns: u64,
    /// Time in ns in which a payload or entry waited for its transfer, while no transfer was in
    /// progress and the store was idle.
    pub dma_wait_ns: u64,
    /// Time of the request that belongs to none of the phases above, in ns.
    pub others_ns: u64,
}

/// Guard of a running phase. The clock records the phase when the guard is dropped.
#[derive(Debug)]
#[must_use = "the phase ends when this is dropped"]
pub struct Lasting {
    clock: Clock,
    phase: Phase,
    from: Instant,
}

/// Returns the clock of the request that the running task works for, if there is one.
#[must_use]
pub fn current() -> Option<Clock> {
    CURRENT.try_with(Clock::clone).ok()
}

impl Clock {
    /// Starts a clock now.
    #[must_use]
    pub fn start() -> Clock {
        Clock::started_at(Instant::now())
    }

    /// Starts a clock for a request that arrived at `started`.
    #[must_use]
    pub fn started_at(started: Instant) -> Clock {
        let number = LAST.get().wrapping_add(1);
        LAST.set(number);
        Clock(Arc::new(Inner { number, started, taken: Mutex::default() }))
    }

    /// Identifies the clock among all clocks that the same thread starts.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Makes this clock the [`current`] one while the returned future is polled. Tasks that the
    /// future spawns do not inherit the clock.
    pub fn scope<F: Future>(&self, future: F) -> impl Future<Output = F::Output> + use<F> {
        CURRENT.scope(self.clone(), future)
    }

    /// Records a phase from `start` to `end`. Intervals may be recorded in any order and may
    /// overlap. Time before the request's arrival or after its end does not count.
    pub fn record(&self, phase: Phase, start: Instant, end: Instant) {
        let span = Span { start: self.ns(start), end: self.ns(end) };
        // No code panics while it holds the lock.
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match phase {
            Phase::Host => taken.host.add_bounded(span),
            Phase::Dma => taken.dma.add_bounded(span),
            Phase::DmaWait => taken.dma_wait.add_bounded(span),
        }
    }

    /// Begins a phase that lasts until the returned guard is dropped.
    pub fn begin(&self, phase: Phase) -> Lasting {
        Lasting { clock: self.clone(), phase, from: Instant::now() }
    }

    /// Ends the request and returns its time by phase. Phases that have not ended do not count.
    #[must_use]
    pub fn finish(&self) -> Breakdown {
        self.finish_at(Instant::now())
    }

    /// Like [`finish`](Self::finish), for a request that ended at `end`.
    #[must_use]
    pub fn finish_at(&self, end: Instant) -> Breakdown {
        let total_ns = self.ns(end);
        let taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let mut covered = Union::default();
        let mut more = |by: &Union| {
            let before = covered.covered();
            covered.add_all(by, total_ns);
            covered.covered() - before
        };
        let (dma_ns, host_ns, dma_wait_ns) = (more(&taken.dma), more(&taken.host), more(&taken.dma_wait));
        Breakdown {
            total_ns,
            host_ns,
            dma_ns,
            dma_wait_ns,
            others_ns: total_ns - dma_ns - host_ns - dma_wait_ns,
        }
    }

    /// Returns the time since the request's arrival, in ns; 0 for earlier times.
    fn ns(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.0.started).as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Drop for Lasting {
    fn drop(&mut self) {
        self.clock.record(self.phase, self.from, Instant::now());
    }
}

impl AddAssign for Breakdown {
    fn add_assign(&mut self, other: Breakdown) {
        self.total_ns += other.total_ns;
        self.host_ns += other.host_ns;
        self.dma_ns += other.dma_ns;
        self.dma_wait_ns += other.dma_wait_ns;
        self.others_ns += other.others_ns;
    }
}

#[cfg(test)]
mod tests;
