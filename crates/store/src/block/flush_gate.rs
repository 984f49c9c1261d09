//! [`FlushGate`]: one flush of a drive at a time.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use super::uring::Waker;

/// Lets one flush of a drive run at a time, and none after a flush has failed.
///
/// When a flush fails, the drive may have dropped all data that no earlier flush has made durable.
/// Another flush that overlaps the failed flush may then succeed although data that it covers is
/// lost. The I/O ring and the checkpoint thread of a target share a gate, so their flushes never
/// overlap.
#[derive(Debug, Default)]
pub(crate) struct FlushGate {
    state: Mutex<GateState>,
    left: Condvar,
    /// Wakes the thread of the I/O ring.
    ring: OnceLock<Waker>,
}

#[derive(Debug, Default)]
struct GateState {
    is_busy: bool,
    has_failed: bool,
    /// Number of threads that wait in [`FlushGate::run`]. Their flushes go first: the I/O ring would
    /// otherwise begin its next flush before a waiting thread can run.
    waiting: usize,
}

fn failed_before() -> io::Error {
    io::Error::other("an earlier flush of the drive has failed")
}

impl FlushGate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the waker of the thread that begins flushes with [`try_begin`](Self::try_begin). Only the
    /// first call has an effect.
    pub(crate) fn set_ring(&self, waker: Waker) {
        let _ = self.ring.set(waker);
    }

    /// Runs `flush`. Blocks the thread while another flush runs.
    ///
    /// # Errors
    /// The error of `flush`, or an error if an earlier flush has failed.
    pub(crate) fn run(&self, flush: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = self.lock();
        state.waiting += 1;
        let idle = self.left.wait_while(state, |state| state.is_busy && !state.has_failed);
        let mut state = idle.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        if state.has_failed {
            return Err(failed_before());
        }
        state.is_busy = true;
        drop(state);
        let result = flush();
        self.end(result.is_ok());
        if let Some(ring) = self.ring.get() {
            ring.wake();
        }
        result
    }

    /// Begins a flush, unless another flush runs or waits. Returns whether the flush has begun. If it
    /// has, the caller must call [`end`](Self::end).
    ///
    /// # Errors
    /// If an earlier flush has failed.
    pub(crate) fn try_begin(&self) -> io::Result<bool> {
        let mut state = self.lock();
        if state.has_failed {
            return Err(failed_before());
        }
        if state.is_busy || state.waiting > 0 {
            return Ok(false);
        }
        state.is_busy = true;
        Ok(true)
    }

    /// Whether a thread waits until another flush ends.
    pub(crate) fn has_waiting(&self) -> bool {
        self.lock().waiting > 0
    }

    /// Ends a flush. `succeeded` says whether the covered data is durable.
    pub(crate) fn end(&self, succeeded: bool) {
        let mut state = self.lock();
        state.is_busy = false;
        state.has_failed |= !succeeded;
        drop(state);
        self.left.notify_all();
    }

    /// Whether [`try_begin`](Self::try_begin) would return an error or `true`.
    pub(crate) fn is_open(&self) -> bool {
        let state = self.lock();
        state.has_failed || (!state.is_busy && state.waiting == 0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use base::thread::{ThreadClass, spawn};

    use super::*;

    #[test]
    fn a_blocking_flush_waits_for_the_flush_of_the_ring_but_not_for_its_next_one() {
        let gate = Arc::new(FlushGate::default());
        assert!(gate.try_begin().unwrap() && !gate.is_open());
        let is_over = Arc::new(AtomicBool::new(false));
        let (other, has_run) = (Arc::clone(&gate), Arc::clone(&is_over));
        let flush = move || {
            other.run(|| {
                assert!(!other.try_begin().unwrap(), "the flushes overlap");
                has_run.store(true, Ordering::SeqCst);
                Ok(())
            })
        };
        let thread = spawn(ThreadClass::Store, "test", flush).unwrap();
        while !gate.has_waiting() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!is_over.load(Ordering::SeqCst));
        gate.end(true);
        while !gate.try_begin().unwrap() {
            std::thread::yield_now();
        }
        assert!(is_over.load(Ordering::SeqCst), "the ring has overtaken the waiting flush");
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn no_flush_runs_after_a_failed_flush() {
        let gate = Arc::new(FlushGate::default());
        assert!(gate.try_begin().unwrap());
        let other = Arc::clone(&gate);
        let flush = move || other.run(|| unreachable!("the flush of the ring has failed"));
        let thread = spawn(ThreadClass::Store, "test", flush).unwrap();
        gate.end(false);
        thread.join().unwrap().unwrap_err();
        assert!(gate.try_begin().is_err() && gate.is_open());

        let gate = FlushGate::default();
        gate.run(|| Err(io::Error::other("injected"))).unwrap_err();
        assert!(gate.try_begin().is_err());
    }
}
