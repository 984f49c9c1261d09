//! State machine that decides whether a target is used, and when an unused target is probed. The
//! state machine uses neither a clock nor I/O.
//!
//! There are three kinds of failure:
//!
//! - A *slow* target has not answered in time. It is probed at once, and again after short pauses.
//! - A *failing* target has reported an I/O error or damaged data. It is probed after longer pauses.
//!   Each relapse (a failure soon after the target was used again) makes the pauses longer. After too
//!   many relapses, the osd gives the target up. Damaged data is usually repaired soon: the objects
//!   that changed meanwhile are copied to the target.
//! - A *lost* target is absent, has no readable map of the node, or refuses writes until it is
//!   remounted. It is used again when its store has a new incarnation, or when the operator requests
//!   its use.
//!
//! A target that refuses writes may work again within seconds, because its store remounts it
//! automatically. The osd also probes this target, with long pauses. Without the probes, the target
//! could stay lost: an error of the old mount may arrive after the new incarnation has begun. Only
//! the new mount can execute a probe.

use std::time::Duration;

use store::StoreError;
use tokio::time::Instant;
use wire::TargetState;

use crate::config::TargetRetry;

/// A failure is a relapse if it occurs within this time after the target was used again.
const RELAPSE_WINDOW: Duration = Duration::from_secs(600);

/// An event that concerns a target's health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HealthEvent {
    /// A call was not answered in time.
    Overdue(String),
    /// A call failed with this error, which concerns the whole target and not only the call.
    Failed(StoreError),
    /// The target stays unusable until its store has a new incarnation, for this reason.
    Lost(String),
    /// A probe was sent.
    ProbeSent,
    /// The target answered the last probe. The answer took this time.
    ProbeAnswered(Duration),
    /// The last probe failed with this error of the target.
    ProbeFailed(StoreError),
    /// The last probe was lost, for example because the store's process restarted. The loss says
    /// nothing about the target.
    ProbeLost,
    /// The store has a new incarnation, or the operator has requested that the target is used
    /// again.
    Renewed,
}

/// Effect of a [`HealthEvent`] on the use of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum UsabilityChange {
    /// The use of the target stays the same.
    None,
    /// The target is no longer used, or the kind of its failure has changed.
    Down,
    /// The target is used again.
    Back,
}

/// State of an unused target.
#[derive(Debug, Clone)]
struct Down {
    state: TargetState,
    why: String,
    since: Instant,
    /// Time of the next probe; `None` if no probe will be sent or a probe is running.
    next_probe: Option<Instant>,
    pause: Duration,
    /// Whether the target has failed because it refuses writes, so that a remount by its store ends
    /// the failure.
    awaits_mount: bool,
}

/// Decides whether a target is used, and when an unused target is probed.
pub(crate) struct Health {
    retry: TargetRetry,
    down: Option<Down>,
    is_probing: bool,
    back_at: Option<Instant>,
    slow_relapses: u32,
    failing_relapses: u32,
}

impl Health {
    pub(crate) fn new(retry: TargetRetry) -> Health {
        Health { retry, down: None, is_probing: false, back_at: None, slow_relapses: 0, failing_relapses: 0 }
    }

    pub(crate) fn state(&self) -> TargetState {
        self.down.as_ref().map_or(TargetState::Up, |down| down.state)
    }

    /// Returns why the target is not used; `None` if it is used.
    pub(crate) fn why(&self) -> Option<&str> {
        self.down.as_ref().map(|down| &*down.why)
    }

    /// Returns the time of the next probe; `None` if no probe is scheduled.
    pub(crate) fn next_probe(&self) -> Option<Instant> {
        self.down.as_ref().and_then(|down| down.next_probe)
    }

    /// Returns whether a probe must be sent now.
    pub(crate) fn is_probe_due(&self, now: Instant) -> bool {
        self.next_probe().is_some_and(|due| due <= now)
    }

    /// Returns whether the target may be used again before a client gives up waiting for it.
    pub(crate) fn is_hopeful(&self, now: Instant) -> bool {
        let is_recent = |down: &Down| now.saturating_duration_since(down.since) < self.retry.hopeful_for;
        self.down.as_ref().is_some_and(|down| match down.state {
            TargetState::Slow => true,
            TargetState::Failing => is_recent(down),
            TargetState::Failed => down.awaits_mount && is_recent(down),
            _ => false,
        })
    }

    /// Processes an event.
    pub(crate) fn step(&mut self, now: Instant, event: HealthEvent) -> UsabilityChange {
        let change = match event {
            HealthEvent::Overdue(why) => self.slow(now, why),
            HealthEvent::Failed(e) => self.failed(now, &e, false),
            HealthEvent::Lost(why) => self.lose(now, why, false, false),
            HealthEvent::ProbeFailed(e) => {
                self.is_probing = false;
                self.failed(now, &e, true)
            }
            HealthEvent::ProbeSent => {
                self.is_probing = true;
                self.down.iter_mut().for_each(|down| down.next_probe = None);
                UsabilityChange::None
            }
            HealthEvent::ProbeAnswered(took) => self.answered(now, took),
            HealthEvent::ProbeLost => {
                self.is_probing = false;
                self.down.iter_mut().for_each(|down| down.wait(now, down.pause));
                UsabilityChange::None
            }
            HealthEvent::Renewed => {
                (self.slow_relapses, self.failing_relapses, self.back_at) = (0, 0, None);
                if self.down.take().is_some() { UsabilityChange::Back } else { UsabilityChange::None }
            }
        };
        let probes = self.down.as_ref().is_some_and(|down| down.next_probe.is_some());
        assert!(!(probes && self.is_probing), "a probe is scheduled only while no probe is running");
        change
    }

    fn slow(&mut self, now: Instant, why: String) -> UsabilityChange {
        if self.down.is_some() {
            return UsabilityChange::None;
        }
        let relapses = if self.is_relapse(now) { self.slow_relapses + 1 } else { 0 };
        self.slow_relapses = relapses;
        // Unless this is a relapse, the first probe is sent at once. Its answer shows when the
        // target works again.
        let pause = self.retry.slow_pause;
        let first = if relapses == 0 {
            Duration::ZERO
        } else {
            doubled(pause, relapses - 1, self.retry.slow_pause_max)
        };
        self.set_down(now, TargetState::Slow, why, pause, Some(first));
        UsabilityChange::Down
    }

    fn failed(&mut self, now: Instant, e: &StoreError, is_probe: bool) -> UsabilityChange {
        let why = e.to_string();
        if is_lasting(e) {
            return self.lose(now, why, matches!(e, StoreError::Poisoned(_)), is_probe);
        }
        let max = self.retry.failing_pause_max;
        match &mut self.down {
            Some(down) if down.state == TargetState::Failing => {
                if is_probe {
                    down.why = why;
                    down.pause = (down.pause * 2).min(max);
                    down.wait(now, down.pause);
                }
                return UsabilityChange::None;
            }
            Some(down) if down.state == TargetState::Failed => return UsabilityChange::None,
            Some(_) => {}
            None => {
                self.failing_relapses = if self.is_relapse(now) { self.failing_relapses + 1 } else { 0 };
                if self.failing_relapses > self.retry.relapses_max {
                    let times = self.failing_relapses + 1;
                    let why = format!(
                        "{why}; the target failed {times} times, each time soon after it had recovered"
                    );
                    return self.lose(now, why, false, is_probe);
                }
            }
        }
        let pause = doubled(self.retry.failing_pause, self.failing_relapses, max);
        self.set_down(now, TargetState::Failing, why, pause, Some(pause));
        UsabilityChange::Down
    }

    fn lose(&mut self, now: Instant, why: String, awaits_mount: bool, is_probe: bool) -> UsabilityChange {
        if let Some(down) = self.down.as_mut().filter(|down| down.state == TargetState::Failed) {
            if is_probe {
                down.wait(now, down.pause);
            }
            return UsabilityChange::None;
        }
        let pause = self.retry.failing_pause_max;
        self.set_down(now, TargetState::Failed, why, pause, awaits_mount.then_some(pause));
        self.down.iter_mut().for_each(|down| down.awaits_mount = awaits_mount);
        UsabilityChange::Down
    }

    fn answered(&mut self, now: Instant, took: Duration) -> UsabilityChange {
        self.is_probing = false;
        let Some(down) = &mut self.down else { return UsabilityChange::None };
        if down.is_lost_for_good() {
            return UsabilityChange::None;
        }
        if down.state == TargetState::Failed && now - took < down.since {
            // The probe was sent before the target failed, so its answer does not show that the
            // target works again.
            down.wait(now, down.pause);
            return UsabilityChange::None;
        }
        if took > self.retry.probe_max {
            // The target has just begun to answer again. The next probe shows whether it answers in
            // time.
            down.wait(now, Duration::ZERO);
            return UsabilityChange::None;
        }
        self.down = None;
        self.back_at = Some(now);
        UsabilityChange::Back
    }

    fn set_down(
        &mut self,
        now: Instant,
        state: TargetState,
        why: String,
        pause: Duration,
        first: Option<Duration>,
    ) {
        let first = first.filter(|_| !self.is_probing);
        self.down = Some(Down {
            state,
            why,
            since: now,
            next_probe: first.map(|first| now + first),
            pause,
            awaits_mount: false,
        });
    }

    fn is_relapse(&self, now: Instant) -> bool {
        self.back_at.is_some_and(|back| now.saturating_duration_since(back) < RELAPSE_WINDOW)
    }
}

impl Down {
    fn wait(&mut self, now: Instant, pause: Duration) {
        self.next_probe = (!self.is_lost_for_good()).then(|| now + pause);
    }

    /// Returns whether the target is lost and no probe can bring it back into use.
    fn is_lost_for_good(&self) -> bool {
        self.state == TargetState::Failed && !self.awaits_mount
    }
}

/// Returns `pause` doubled `times` times, but at most `max`.
fn doubled(pause: Duration, times: u32, max: Duration) -> Duration {
    pause.saturating_mul(1 << times.min(16)).min(max)
}

/// Returns whether a target with this error stays unusable until its store has a new incarnation.
fn is_lasting(e: &StoreError) -> bool {
    !matches!(e, StoreError::Io(_) | StoreError::Corrupt { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY: TargetRetry = TargetRetry {
        slow_pause: Duration::from_millis(250),
        slow_pause_max: Duration::from_secs(4),
        probe_max: Duration::from_secs(1),
        failing_pause: Duration::from_secs(1),
        failing_pause_max: Duration::from_secs(10),
        relapses_max: 3,
        hopeful_for: Duration::from_secs(20),
    };

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn overdue() -> HealthEvent {
        HealthEvent::Overdue("no answer".into())
    }

    fn failed() -> HealthEvent {
        HealthEvent::Failed(StoreError::Io("EIO".into()))
    }

    #[test]
    fn a_slow_target_is_probed_at_once_and_used_when_it_answers_in_time() {
        let now = Instant::now();
        let mut health = Health::new(RETRY);
        assert_eq!(health.step(now, overdue()), UsabilityChange::Down);
        assert_eq!(health.state(), TargetState::Slow);
        assert!(health.is_probe_due(now) && health.is_hopeful(now + secs(3600)));
        assert_eq!(health.step(now, overdue()), UsabilityChange::None);
        assert_eq!(health.step(now, HealthEvent::ProbeSent), UsabilityChange::None);
        assert!(!health.is_probe_due(now + secs(3600)), "only one probe runs at a time");
        // The first probe is answered only after the stall, so its answer is too slow.
        let later = now + secs(13);
        assert_eq!(health.step(later, HealthEvent::ProbeAnswered(secs(13))), UsabilityChange::None);
        assert!(health.is_probe_due(later));
        assert_eq!(health.step(later, HealthEvent::ProbeSent), UsabilityChange::None);
        assert_eq!(health.step(later, HealthEvent::ProbeAnswered(Duration::ZERO)), UsabilityChange::Back);
        assert_eq!((health.state(), health.why(), health.next_probe()), (TargetState::Up, None, None));
    }

    #[test]
    fn a_target_with_damaged_data_is_probed_but_a_lost_target_is_not() {
        let now = Instant::now();
        let damaged = StoreError::Corrupt { what: "block 7".into(), detail: "wrong checksum".into() };
        let mut health = Health::new(RETRY);
        assert_eq!(health.step(now, HealthEvent::Failed(damaged)), UsabilityChange::Down);
        assert_eq!((health.state(), health.next_probe()), (TargetState::Failing, Some(now + secs(1))));
        assert!(health.is_hopeful(now));
        assert_eq!(health.step(now, HealthEvent::Lost("no map".into())), UsabilityChange::Down);
        assert_eq!((health.state(), health.next_probe()), (TargetState::Failed, None));
        assert!(!health.is_hopeful(now));
    }

    #[test]
    fn each_relapse_of_a_slow_target_lengthens_the_pause_up_to_the_limit() {
        let mut now = Instant::now();
        let mut health = Health::new(RETRY);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert_eq!(health.step(now, overdue()), UsabilityChange::Down);
            let due = health.next_probe().unwrap();
            pauses.push((due - now).as_millis());
            now = due;
            assert_eq!(health.step(now, HealthEvent::ProbeSent), UsabilityChange::None);
            assert_eq!(health.step(now, HealthEvent::ProbeAnswered(Duration::ZERO)), UsabilityChange::Back);
        }
        assert_eq!(pauses, [0, 250, 500, 1000, 2000, 4000, 4000, 4000]);
        now += RELAPSE_WINDOW;
        assert_eq!(health.step(now, overdue()), UsabilityChange::Down);
        assert!(health.is_probe_due(now), "after a long time without failures, a target is probed at once");
    }

    #[test]
    fn a_failing_target_is_probed_for_ever_with_a_bounded_pause() {
        let began = Instant::now();
        let mut now = began;
        let mut health = Health::new(RETRY);
        assert_eq!(health.step(now, failed()), UsabilityChange::Down);
        assert_eq!(health.state(), TargetState::Failing);
        let mut pauses = Vec::new();
        for _ in 0..100 {
            let due = health.next_probe().unwrap();
            pauses.push((due - now).as_secs());
            now = due;
            assert_eq!(health.step(now, HealthEvent::ProbeSent), UsabilityChange::None);
            let failed = HealthEvent::ProbeFailed(StoreError::Io("EIO".into()));
            assert_eq!(health.step(now, failed), UsabilityChange::None);
        }
        assert_eq!(pauses[..6], [1, 2, 4, 8, 10, 10]);
        assert_eq!(pauses[99], 10);
        assert!(health.is_hopeful(began + secs(19)) && !health.is_hopeful(began + secs(20)));
        now = health.next_probe().unwrap();
        assert_eq!(health.step(now, HealthEvent::ProbeSent), UsabilityChange::None);
        assert_eq!(health.step(now, HealthEvent::ProbeAnswered(Duration::ZERO)), UsabilityChange::Back);
    }

    #[test]
    fn a_failing_target_is_given_up_after_too_many_relapses() {
        let mut now = Instant::now();
        let mut health = Health::new(RETRY);
        for relapse in 0..=RETRY.relapses_max {
            assert_eq!(health.step(now, failed()), UsabilityChange::Down, "{relapse}");
            assert_eq!(health.state(), TargetState::Failing, "{relapse}");
            now = health.next_probe().unwrap();
            assert_eq!(health.step(now, HealthEvent::ProbeSent), UsabilityChange::None);
            assert_eq!(health.step(now, HealthEvent::ProbeAnswered(Duration::ZERO)), UsabilityChange::Back);
        }
        assert_eq!(health.step(now, failed()), UsabilityChange::Down);
        assert_eq!((health.state(), health.next_probe()), (TargetState::Failed, None));
        assert!(!health.is_hopeful(now));
        assert_eq!(health.step(now, HealthEvent::Renewed), UsabilityChange::Back);
        assert_eq!(health.step(now, failed()), UsabilityChange::Down);
        assert_eq!(
            health.state(),
            TargetState::Failing,
            "a request of the operator resets the number of relapses"
        );
    }

    #[test]
    fn an_absent_target_stays_lost_without_probes_until_a_remount_or_request() {
        let now = Instant::now();
        let mut health = Health::new(RETRY);
        assert_eq!(health.step(now, overdue()), UsabilityChange::Down);
        assert_eq!(health.step(now, HealthEvent::ProbeSent), UsabilityChange::None);
        let lost = HealthEvent::Failed(StoreError::Absent("no drive".into()));
        assert_eq!(health.step(now, lost.clone()), UsabilityChange::Down);
        assert!(!health.is_hopeful(now), "only an operator can bring the drive back");
        for event in
            [lost, overdue(), failed(), HealthEvent::ProbeAnswered(Duration::ZERO), HealthEvent::ProbeLost]
        {
            assert_eq!(health.step(now, event), UsabilityChange::None);
            assert_eq!((health.state(), health.next_probe()), (TargetState::Failed, None));
        }
        assert_eq!(health.step(now, HealthEvent::Renewed), UsabilityChange::Back);
        assert_eq!(health.step(now, HealthEvent::Renewed), UsabilityChange::None);
    }

    fn poisoned() -> StoreError {
        StoreError::Poisoned("write".into())
    }

    #[test]
    fn a_target_that_refuses_writes_is_awaited_briefly_and_probed_with_long_pauses() {
        let began = Instant::now();
        let mut now = began;
        let mut health = Health::new(RETRY);
        assert_eq!(health.step(now, HealthEvent::Failed(poisoned())), UsabilityChange::Down);
        assert!(health.is_hopeful(began + secs(19)) && !health.is_hopeful(began + secs(20)));
        for _ in 0..10 {
            for event in [HealthEvent::Failed(poisoned()), overdue(), failed()] {
                assert_eq!(health.step(now, event), UsabilityChange::None);
            }
            assert_eq!(health.next_probe(), Some(now + RETRY.failing_pause_max));
            now += RETRY.failing_pause_max;
            assert_eq!(health.step(now, HealthEvent::ProbeSent), UsabilityChange::None);
            assert_eq!(health.next_probe(), None);
            assert_eq!(health.step(now, HealthEvent::ProbeFailed(poisoned())), UsabilityChange::None);
            assert_eq!(health.state(), TargetState::Failed);
        }
        // Only a remounted store executes the probe's transaction.
        now += RETRY.failing_pause_max;
        assert_eq!(health.step(now, HealthEvent::ProbeSent), UsabilityChange::None);
        assert_eq!(health.step(now, HealthEvent::ProbeAnswered(Duration::ZERO)), UsabilityChange::Back);
    }

    #[test]
    fn the_answer_to_a_probe_sent_before_a_failure_does_not_end_the_failure() {
        let now = Instant::now();
        let mut health = Health::new(RETRY);
        assert_eq!(health.step(now, overdue()), UsabilityChange::Down);
        assert_eq!(health.step(now, HealthEvent::ProbeSent), UsabilityChange::None);
        let later = now + secs(1);
        assert_eq!(health.step(later, HealthEvent::Failed(poisoned())), UsabilityChange::Down);
        assert_eq!(health.step(later, HealthEvent::ProbeAnswered(secs(1))), UsabilityChange::None);
        assert_eq!(health.state(), TargetState::Failed);
        assert_eq!(health.next_probe(), Some(later + RETRY.failing_pause_max));
    }

    #[test]
    fn the_answer_to_an_old_probe_does_not_end_a_failure_after_a_remount() {
        let now = Instant::now();
        let mut health = Health::new(RETRY);
        assert_eq!(health.step(now, overdue()), UsabilityChange::Down);
        assert_eq!(health.step(now, HealthEvent::ProbeSent), UsabilityChange::None);
        assert_eq!(health.step(now, HealthEvent::Renewed), UsabilityChange::Back);
        assert_eq!(health.step(now, overdue()), UsabilityChange::Down);
        assert_eq!(health.next_probe(), None, "the old probe is still running");
        assert_eq!(health.step(now + secs(9), HealthEvent::ProbeAnswered(secs(9))), UsabilityChange::None);
        assert!(health.is_probe_due(now + secs(9)));
    }
}
