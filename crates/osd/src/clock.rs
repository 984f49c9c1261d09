//! The wall clock: source of the times that users see, such as the time of an object's last change.
//!
//! The wall clock may step in either direction at any time, so correctness never depends on it. The
//! expiry of sessions is measured by the node's [age](crate::age) instead.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Source of an osd's wall-clock time.
#[derive(Clone)]
pub struct WallClock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl WallClock {
    /// Creates a clock that returns the result of `now`. The osd's thread calls `now`.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> WallClock {
        WallClock(Arc::new(now))
    }

    /// Returns milliseconds since 1970, or 0 for earlier times.
    pub(crate) fn now_ms(&self) -> u64 {
        (self.0)().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
    }
}

impl Default for WallClock {
    /// Creates a clock that returns the system time.
    fn default() -> WallClock {
        WallClock::new(SystemTime::now)
    }
}

impl fmt::Debug for WallClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WallClock").field(&self.now_ms()).finish()
    }
}
