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
        let idle = self.left.wait_while(self.lock(), |state| state.is_busy && !state.has_failed);
        let mut state = idle.unwrap_or_else(PoisonError::into_inner);
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

    /// Begins a flush, unless another flush runs. Returns whether the flush has begun. If it has, the
    /// caller must call [`end`](Self::end).
    ///
    /// # Errors
    /// If an earlier flush has failed.
    pub(crate) fn try_begin(&self) -> io::Result<bool> {
        let mut state = self.lock();
        if state.has_failed {
            return Err(failed_before());
        }
        Ok(!std::mem::replace(&mut state.is_busy, true))
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
        state.has_failed || !state.is_busy
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
    fn a_blocking_flush_waits_for_the_flush_of_the_ring() {
        let gate = Arc::new(FlushGate::default());
        assert!(gate.try_begin().unwrap() && !gate.is_open());
        let ended = Arc::new(AtomicBool::new(false));
        let (other, has_ended) = (Arc::clone(&gate), Arc::clone(&ended));
        let flush = move || {
            other.run(|| {
                assert!(has_ended.load(Ordering::SeqCst), "the flushes overlap");
                assert!(!other.try_begin().unwrap());
                Ok(())
            })
        };
        let thread = spawn(ThreadClass::Store, "test", flush).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        ended.store(true, Ordering::SeqCst);
        gate.end(true);
        thread.join().unwrap().unwrap();
        assert!(gate.is_open() && gate.try_begin().unwrap());
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
