//! Counts the tasks that were started during the last second, by coding place.

use std::time::Duration;

use base::clock::Instant;

use super::CodingPlace;

/// Number of time slices in which recent tasks are counted.
const SLICES: usize = 10;
/// Length of a slice. All slices together cover one second.
const SLICE: Duration = Duration::from_millis(100);

/// Counters of the tasks that were started during the last second, by coding place.
#[derive(Debug, Default)]
pub(super) struct Recent {
    slices: [[u64; 2]; SLICES],
    /// The current slice, and its start time.
    current: usize,
    since: Option<Instant>,
}

impl Recent {
    pub(super) fn sent(&mut self, place: CodingPlace, now: Instant) {
        let since = *self.since.get_or_insert(now);
        let over = slices_between(since, now);
        for _ in 0..over.min(SLICES) {
            self.current = (self.current + 1) % SLICES;
            self.slices[self.current] = [0; 2];
        }
        if over > 0 {
            self.since = Some(if over < SLICES { since + SLICE * over as u32 } else { now });
        }
        self.slices[self.current][place as usize] += 1;
    }

    /// Returns the numbers of tasks sent to the host and to the DPU.
    pub(super) fn counts(&self, now: Instant) -> [u64; 2] {
        let over = self.since.map_or(SLICES, |since| slices_between(since, now)).min(SLICES);
        // The slices that a call of `sent` at time `now` would clear are too old.
        let old = |at: usize| (1..=over).any(|ahead| (self.current + ahead) % SLICES == at);
        let recent = (0..SLICES).filter(|&at| !old(at)).map(|at| self.slices[at]);
        recent.fold([0; 2], |[host, offload], [h, o]| [host + h, offload + o])
    }
}

fn slices_between(since: Instant, now: Instant) -> usize {
    let over = now.saturating_duration_since(since).as_millis() / SLICE.as_millis();
    usize::try_from(over).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tasks_of_the_last_second_are_counted() {
        let (mut recent, start) = (Recent::default(), Instant::now());
        assert_eq!(recent.counts(start), [0, 0]);
        for ms in 0..3000 {
            let place = if ms % 4 == 0 { CodingPlace::Offload } else { CodingPlace::Host };
            recent.sent(place, start + Duration::from_millis(ms));
        }
        let at = |ms| recent.counts(start + Duration::from_millis(ms));
        assert_eq!(at(2999), [750, 250]);
        assert_eq!(at(3499), [375, 125], "half of the tasks are older than a second");
        assert_eq!(at(5000), [0, 0]);
        assert_eq!(recent.counts(start), [750, 250], "an earlier time counts as the current one");
        recent.sent(CodingPlace::Host, start + Duration::from_secs(60));
        assert_eq!(recent.counts(start + Duration::from_secs(60)), [1, 0]);
    }
}
