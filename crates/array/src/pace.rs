//! [`Pace`]: limits the speed of background work to a rate, and to a share of the time while
//! clients are active.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Time after the last request for which clients count as active.
const BUSY: Duration = Duration::from_millis(100);
/// Minimum time between two records of a client's request, so that shards rarely write memory that they
/// share. Clients count as active for up to this much longer or shorter.
const NOTE_EVERY: Duration = Duration::from_millis(20);

/// Limits the rate of rebuilds and scrubs. All background work of an osd shares it, on all shards.
#[derive(Clone)]
pub struct Pace(Arc<Inner>);

struct Inner {
    /// Maximum rate in bytes per second; 0 for no limit.
    rate: AtomicU64,
    /// Maximum share of the time that background work takes while clients are active, in percent.
    share: u32,
    created: Instant,
    /// Time of the last recorded request in ms after `created`, plus 1; 0 if there was none.
    last_request: AtomicU64,
    /// Time until which the rate limit is used up by earlier work.
    paid_until: Mutex<Option<Instant>>,
    rate_changed: Notify,
}

impl Pace {
    /// `rate` is in bytes per second, 0 for no limit. `share` is in percent of the time, 1 to 100.
    pub fn new(rate: u64, share: u32) -> Pace {
        Pace(Arc::new(Inner {
            rate: AtomicU64::new(rate),
            share: share.clamp(1, 100),
            created: Instant::now(),
            last_request: AtomicU64::new(0),
            paid_until: Mutex::new(None),
            rate_changed: Notify::new(),
        }))
    }

    /// Sets the maximum rate in bytes per second; 0 for no limit. Work that waits for the old rate
    /// continues at once.
    pub fn set_rate(&self, rate: u64) {
        self.0.rate.store(rate, Ordering::Relaxed);
        *self.paid_until() = None;
        self.0.rate_changed.notify_waiters();
    }

    /// Maximum rate in bytes per second; 0 for no limit.
    pub fn rate(&self) -> u64 {
        self.0.rate.load(Ordering::Relaxed)
    }

    /// Records a client request.
    pub fn client_served(&self) {
        let inner = &self.0;
        let now = inner.created.elapsed().as_millis() as u64 + 1;
        let last = inner.last_request.load(Ordering::Relaxed);
        if last == 0 || now.saturating_sub(last) >= NOTE_EVERY.as_millis() as u64 {
            inner.last_request.store(now, Ordering::Relaxed);
        }
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
        let yielded =
            if self.serves_clients(now) { took * (100 - inner.share) / inner.share } else { Duration::ZERO };
        let rate = self.rate();
        if rate == 0 {
            return yielded;
        }
        let cost = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let mut paid_until = self.paid_until();
        let paid = paid_until.filter(|paid| *paid > now).unwrap_or(now) + cost;
        *paid_until = Some(paid);
        yielded.max(paid.duration_since(now))
    }

    /// Whether clients are active.
    fn serves_clients(&self, now: Instant) -> bool {
        let last = self.0.last_request.load(Ordering::Relaxed);
        let now = now.duration_since(self.0.created).as_millis() as u64 + 1;
        last > 0 && now.saturating_sub(last) < BUSY.as_millis() as u64
    }

    fn paid_until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.paid_until.lock().unwrap_or_else(PoisonError::into_inner)
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
