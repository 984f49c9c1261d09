//! Points at which a test stops this process, in order to restart it from what it has shared.

/// Marks the point after a change of memory that survives this process. A test can stop here.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn stop_point() {}

#[cfg(test)]
pub(crate) use stops::{Stopped, stop_at, stop_point};

#[cfg(test)]
mod stops {
    use std::cell::Cell;

    thread_local! {
        /// Number of points to pass before the stop, or `None` if the thread does not stop.
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// The payload of the panic at a stop point.
    pub(crate) struct Stopped;

    /// Stops this thread at the point number `count` from now, counted from 0.
    pub(crate) fn stop_at(count: Option<u32>) {
        LEFT.set(count);
    }

    pub(crate) fn stop_point() {
        match LEFT.get() {
            Some(0) => {
                LEFT.set(None);
                std::panic::resume_unwind(Box::new(Stopped));
            }
            left => LEFT.set(left.map(|left| left - 1)),
        }
    }
}
