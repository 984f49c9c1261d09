//! [`Pace`]: limits the speed of background work to a rate, and to a share of the time while
//! clients are active.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Time after the last request for which clients count as active.
const BUSY: Duration = Duration::from_millis(100);

/// Limits the rate of rebuilds and scrubs. Shared by all background work of an osd.
#[derive(Clone)]
pub struct Pace(Rc<Inner>);

struct Inner {
    /// Maximum rate in bytes per second; 0 for no limit.
    rate: Cell<u64>,
    /// Maximum share of the time that background work takes while clients are active, in percent.
    share: u32,
    last_request: Cell<Option<Instant>>,
    /// Time until which the rate limit is used up by earlier work.
    paid_until: Cell<Option<Instant>>,
    rate_changed: Notify,
}

impl Pace {
    /// `rate` is in bytes per second, 0 for no limit. `share` is in percent of the time, 1 to 100.
    pub fn new(rate: u64, share: u32) -> Pace {
        Pace(Rc::new(Inner {
            rate: Cell::new(rate),
            share: share.clamp(1, 100),
            last_request: Cell::new(None),
            paid_until: Cell::new(None),
            rate_changed: Notify::new(),
        }))
    }

    /// Sets the maximum rate in bytes per second; 0 for no limit. Work that waits for the old rate
    /// continues at once.
    pub fn set_rate(&self, rate: u64) {
        self.0.rate.set(rate);
        self.0.paid_until.set(None);
        self.0.rate_changed.notify_waiters();
    }

    /// Maximum rate in bytes per second; 0 for no limit.
    pub fn rate(&self) -> u64 {
        self.0.rate.get()
    }

    /// Records a client request.
    pub fn client_served(&self) {
        self.0.last_request.set(Some(Instant::now()));
    }

    /// After a step that moved `bytes` bytes in the time `took`, waits as long as the limits
    /// require.
    pub async fn after(&self, bytes: u64, took: Duration) {
        let rate_changed = self.0.rate_changed.notified();
        let pause = self.due(bytes, took, Instant::now());
        if pause > Duration::ZERO {
            // A timeout and a change of the rate both end the wait.
            let _ = tokio::time::timeout(pause, rate_changed).await;
        }
    }

    fn due(&self, bytes: u64, took: Duration, now: Instant) -> Duration {
        let inner = &self.0;
        let served = inner.last_request.get().is_some_and(|at| now.duration_since(at) < BUSY);
        let yielded = if served { took * (100 - inner.share) / inner.share } else { Duration::ZERO };
        let rate = inner.rate.get();
        if rate == 0 {
            return yielded;
        }
        let cost = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let paid = inner.paid_until.get().filter(|paid| *paid > now).unwrap_or(now) + cost;
        inner.paid_until.set(Some(paid));
        yielded.max(paid.duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn background_work_is_limited_to_a_rate_and_to_a_share_of_the_time() {
        let pace = Pace::new(1000, 25);
        let began = Instant::now();
        for _ in 0..4 {
            pace.after(500, Duration::ZERO).await;
        }
        assert_eq!(began.elapsed().as_millis(), 2000);
        pace.set_rate(0);
        pace.after(1 << 30, Duration::from_millis(10)).await;
        assert_eq!(began.elapsed().as_millis(), 2000, "no client is active, so there is no pause");
        pace.client_served();
        pace.after(1 << 30, Duration::from_millis(10)).await;
        assert_eq!(began.elapsed().as_millis(), 2030, "clients get three quarters of the time");
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_rate_applies_to_background_work_that_already_waits() {
        let pace = Pace::new(1, 100);
        let began = Instant::now();
        let faster = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            pace.set_rate(1000);
        };
        tokio::join!(pace.after(1 << 20, Duration::ZERO), faster);
        assert_eq!(began.elapsed().as_secs(), 1, "the old rate would have required twelve days");
        pace.after(500, Duration::ZERO).await;
        assert_eq!(began.elapsed().as_millis(), 1500);
    }
}
