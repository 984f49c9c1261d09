//! A simulated DMA engine and simulated control connections.
//!
//! Osd, store and device run on one thread in simulated time. A seed determines all delays and
//! faults. The osd uses a [`SimEngine`]. A [`ControlWire`] joins osd and store in place of a UNIX
//! socket: it carries bytes, and access to host memory in place of file descriptors.
//!
//! The simulated parts are outside of the roles that use them, as hardware and the kernel are
//! outside of a process. They go on while a role is paused. When a role is killed, its destructors
//! run, which no killed process does. Therefore the simulation first *severs* the role's end of
//! each simulated part. From then on, the role's calls have no effect, and the other role observes
//! what it would observe after the death of a process.
//!
//! Timers of the runtime have a resolution of 1 ms, so an event with a delay of less takes effect
//! at the next millisecond. Events of one engine still take effect in the order of their times.

mod bell;
mod device;
mod engine;
mod stream;
mod trace;
mod wire;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use bell::{SimBell, SimRinger};
pub use engine::{DeviceFailure, EngineFaults, SimEngine, SimEngineOptions, SimEngineStats};
pub use stream::SimControlStream;
pub(crate) use wire::SimCarrier;
pub use wire::{ControlWire, SimListener, SimMemory, WireOptions, WireStats};

/// Whether a role still affects the outside. Clones share the state.
#[derive(Debug, Clone, Default)]
struct Life(Arc<AtomicBool>);

impl Life {
    fn is_severed(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn sever(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Locks the state of a simulated part. A check that fails in a test may poison the lock while the
/// state is consistent.
fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
