//! Clocks.
//!
//! **Elapsed time.** [`Instant`] is the clock of all timers and of all decisions that depend on
//! elapsed time. It is the clock of the tokio runtime: the system's monotonic clock, or simulated
//! time in a simulation. The standard library's `Instant` is not used, because its time would not
//! agree with the timers of a simulation.
//!
//! **Time of day.** [`WallClock`] is the source of times that users see, such as the time of an
//! object's last change. It may step in either direction at any time, so correctness never depends
//! on it.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

pub use tokio::time::Instant;

/// Source of a role's time of day.
#[derive(Clone)]
pub struct WallClock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl WallClock {
    /// Creates a clock that returns the result of `now`. The threads of the role call `now`.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> WallClock {
        WallClock(Arc::new(now))
    }

    /// Returns milliseconds since 1970, or 0 for earlier times.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        (self.0)().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
    }
}

impl Default for WallClock {
    /// Creates a clock that returns the system time.
    fn default() -> WallClock {
        #[expect(clippy::disallowed_methods, reason = "this is the only use of the system's time of day")]
        WallClock::new(SystemTime::now)
    }
}

impl fmt::Debug for WallClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WallClock").field(&self.now_ms()).finish()
    }
}
