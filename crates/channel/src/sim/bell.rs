//! Simulated doorbells.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use base::clock::Instant;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::time::Sleep;

use super::{Life, lock};
use crate::Bell;

/// The waiting end of a simulated doorbell.
#[derive(Debug)]
pub struct SimBell {
    rung: Arc<Mutex<PendingRings>>,
    /// Fires when the earliest ring arrives.
    timer: Mutex<Option<Pin<Box<Sleep>>>>,
}

/// The ringing end of a simulated doorbell.
#[derive(Debug, Clone)]
pub struct SimRinger {
    rung: Arc<Mutex<PendingRings>>,
    /// The role that rings.
    life: Life,
}

#[derive(Debug)]
struct PendingRings {
    /// Rings that the waiting end has not taken: when each arrives, and its count.
    rings: VecDeque<(Instant, u64)>,
    waker: Option<Waker>,
    delays: BellDelays,
    rng: SmallRng,
}

/// The delays of a doorbell.
#[derive(Debug, Clone)]
pub(super) struct BellDelays {
    /// Maximum of the usual delay.
    pub(super) usual_max: Duration,
    /// Probability that a ring is late.
    pub(super) late: f64,
    /// Maximum delay of a late ring.
    pub(super) late_max: Duration,
    /// Counts the late rings.
    pub(super) late_rings: Arc<AtomicU64>,
}

/// Creates a doorbell that the role with this life rings. Each ring arrives after a random delay.
/// Rings arrive in order.
pub(super) fn doorbell(life: Life, delays: BellDelays, seed: u64) -> (SimRinger, SimBell) {
    let rng = SmallRng::seed_from_u64(seed);
    let rung = Arc::new(Mutex::new(PendingRings { rings: VecDeque::new(), waker: None, delays, rng }));
    (SimRinger { rung: Arc::clone(&rung), life }, SimBell { rung, timer: Mutex::new(None) })
}

impl SimRinger {
    /// Adds `count` to the doorbell.
    pub(crate) fn ring(&self, count: u64) {
        if self.life.is_severed() {
            return;
        }
        let rung = &mut *lock(&self.rung);
        let is_late = rung.rng.random_bool(rung.delays.late);
        rung.delays.late_rings.fetch_add(is_late.into(), Ordering::Relaxed);
        let most = if is_late { rung.delays.late_max } else { rung.delays.usual_max };
        let at = Instant::now() + rung.rng.random_range(Duration::ZERO..=most);
        let at = rung.rings.back().map_or(at, |(last, _)| at.max(*last));
        rung.rings.push_back((at, count));
        if let Some(waker) = rung.waker.take() {
            waker.wake();
        }
    }
}

impl Bell for SimBell {
    fn poll_wait(&self, cx: &mut Context<'_>) -> Poll<io::Result<u64>> {
        let mut timer = lock(&self.timer);
        loop {
            let mut rung = lock(&self.rung);
            let now = Instant::now();
            let mut sum = 0u64;
            while let Some((_, count)) = rung.rings.front().copied().filter(|(at, _)| *at <= now) {
                sum = sum.saturating_add(count);
                rung.rings.pop_front();
            }
            if sum > 0 {
                return Poll::Ready(Ok(sum));
            }
            rung.waker = Some(cx.waker().clone());
            let Some((at, _)) = rung.rings.front() else { return Poll::Pending };
            let mut sleep = Box::pin(tokio::time::sleep_until(*at));
            drop(rung);
            let is_due = sleep.as_mut().poll(cx).is_ready();
            *timer = Some(sleep);
            if !is_due {
                return Poll::Pending;
            }
        }
    }
}
