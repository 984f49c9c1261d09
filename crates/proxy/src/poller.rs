//! Adaptive polling: when a task polls for more work, and when it sleeps.

use std::task::Context;
use std::time::Duration;

use base::clock::Instant;

/// Adaptive polling. After an event, the task reschedules itself for a while, if such polling has
/// found work recently. Other tasks can run in between. Then the task waits to be woken.
pub(crate) struct Poller {
    until: Option<Instant>,
    /// Grows when polling finds work and shrinks when it does not. At 0, polling is only tried
    /// occasionally.
    credit: u32,
    skipped: u32,
    /// Time of the last turn that rescheduled the task.
    rescheduled: Option<Instant>,
}

/// Polling stops after it has found no event this many times in a row.
const CREDIT_MAX: u32 = 8;
/// While polling is stopped, the task still polls after one of every this many events.
const RETRY: u32 = 32;

impl Default for Poller {
    fn default() -> Poller {
        Poller { until: None, credit: CREDIT_MAX, skipped: 0, rescheduled: None }
    }
}

impl Poller {
    /// Must be called at the end of each turn of the task. `progress` says whether the turn handled
    /// an event.
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
        // In a simulation, time stands still until all tasks wait. Polling would then never end.
        let is_still = self.rescheduled == Some(now);
        match self.until {
            Some(until) if now < until && !is_still => {
                self.rescheduled = Some(now);
                cx.waker().wake_by_ref();
            }
            Some(_) => {
                self.credit = self.credit.saturating_sub(1);
                self.until = None;
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    const LONG: Duration = Duration::from_secs(3600);

    /// Runs one turn. Returns whether the task rescheduled itself.
    fn turn(poller: &mut Poller, progress: bool, poll: Duration) -> bool {
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        poller.after_turn(progress, poll, &mut Context::from_waker(&waker));
        wakes.0.load(Ordering::Relaxed) > 0
    }

    /// Simulates one event, after which polling finds nothing until its time is over. Returns
    /// whether the task polled.
    fn in_vain(poller: &mut Poller) -> bool {
        let tried = turn(poller, true, LONG);
        if tried {
            // Simulate the end of the polling time.
            poller.until = Some(Instant::now());
        }
        assert!(!turn(poller, false, LONG), "the task sleeps");
        tried
    }

    #[test]
    fn a_task_polls_for_a_while_after_an_event_and_then_sleeps() {
        let mut poller = Poller::default();
        assert!(!turn(&mut poller, false, LONG), "no event has occurred");
        assert!(
            turn(&mut poller, true, LONG) && turn(&mut poller, false, LONG),
            "the task polls for more events"
        );
        poller.until = Some(Instant::now());
        assert!(
            !turn(&mut poller, false, LONG) && !turn(&mut poller, false, LONG),
            "after the polling time, the task sleeps"
        );
        assert!(!turn(&mut poller, true, Duration::ZERO), "polling is switched off");
    }

    #[tokio::test(start_paused = true)]
    async fn polling_ends_while_time_stands_still() {
        let mut poller = Poller::default();
        assert!(turn(&mut poller, true, LONG), "the task polls once");
        assert!(!turn(&mut poller, false, LONG), "the clock has not advanced, so the task sleeps");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(turn(&mut poller, true, LONG));
    }

    #[test]
    fn futile_polling_becomes_rare_until_it_finds_an_event() {
        let mut poller = Poller::default();
        let tried = (0..CREDIT_MAX + 4 * RETRY).filter(|_| in_vain(&mut poller)).count() as u32;
        assert!((CREDIT_MAX + 3..=CREDIT_MAX + 5).contains(&tried), "{tried} times");
        while !turn(&mut poller, true, LONG) {}
        // An event arrives during polling, so polling is worthwhile again.
        assert!(turn(&mut poller, true, LONG) && in_vain(&mut poller));
    }
}
