//! When to look for more work, and when to sleep.

use std::task::Context;
use std::time::{Duration, Instant};

/// Adaptive polling: after something has come, the task asks to be run again at once for a while, as long as that pays;
/// other tasks run in between. Then it waits to be woken.
pub(crate) struct Poller {
    until: Option<Instant>,
    /// How often it paid lately: at 0 it is only tried now and then.
    credit: u32,
    skipped: u32,
}

/// So many failures in a row end polling; then every so many chances it is tried again.
const CREDIT_MAX: u32 = 8;
const RETRY: u32 = 32;

impl Default for Poller {
    fn default() -> Poller {
        Poller { until: None, credit: CREDIT_MAX, skipped: 0 }
    }
}

impl Poller {
    /// To be called at the end of each turn of the task; `progress` says whether something had come.
    pub(crate) fn after_turn(&mut self, progress: bool, poll: Duration, cx: &mut Context<'_>) {
        if poll.is_zero() {
            return;
        }
        let now = Instant::now();
        if progress {
            if self.until.is_some() {
                self.credit = CREDIT_MAX.min(self.credit + 2);
            }
            self.skipped = self.skipped.wrapping_add(1);
            let tries = self.credit > 0 || self.skipped.is_multiple_of(RETRY);
            self.until = tries.then(|| now + poll);
        }
        match self.until {
            Some(until) if now < until => cx.waker().wake_by_ref(),
            Some(_) => {
                self.credit = self.credit.saturating_sub(1);
                self.until = None;
            }
            None => {}
        }
    }
}
