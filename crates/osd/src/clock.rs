//! The time of day, for people: when an object was changed, when a pool was made.
//!
//! It may step in either direction at any time, so nothing that has to be right depends on it. What
//! expires is measured by the node's [age](crate::age).

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Where an OSD gets the time of day from.
#[derive(Clone)]
pub struct WallClock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl WallClock {
    /// A clock that shows what `now` returns. The OSD's thread calls it.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> WallClock {
        WallClock(Arc::new(now))
    }

    /// Milliseconds since 1970; 0 before.
    pub(crate) fn now_ms(&self) -> u64 {
        (self.0)().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
    }
}

impl Default for WallClock {
    /// The system's clock.
    fn default() -> WallClock {
        WallClock::new(SystemTime::now)
    }
}

impl fmt::Debug for WallClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WallClock").field(&self.now_ms()).finish()
    }
}
