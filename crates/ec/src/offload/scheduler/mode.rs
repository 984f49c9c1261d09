//! [`RatioInterleaver`]: divides tasks between the coding places at a fixed ratio.

use wire::CodingRatio;

use super::CodingPlace;

/// Chooses the coding place of the next task under a fixed ratio.
///
/// Algorithm 1 of Ryu et al. takes α tasks from the queue for the host, and then β tasks for the
/// DPU. Here the tasks are interleaved as evenly as possible (Bresenham's line). Any α + β
/// consecutive tasks contain exactly α for the host and β for the DPU. No coding place receives its
/// share as a burst while the other place is idle.
#[derive(Debug, Default)]
pub(super) struct RatioInterleaver {
    /// Share that the DPU has not received yet, in units of 1/(α + β) of a task.
    owed: u32,
}

impl RatioInterleaver {
    /// Returns the place of the next task.
    pub(super) fn next(&self, ratio: CodingRatio) -> CodingPlace {
        if self.owed + ratio.beta() >= ratio.alpha() + ratio.beta() {
            CodingPlace::Offload
        } else {
            CodingPlace::Host
        }
    }

    /// Records that a task was started at the place that [`next`](Self::next) returned.
    pub(super) fn taken(&mut self, ratio: CodingRatio) {
        self.owed = (self.owed + ratio.beta()) % (ratio.alpha() + ratio.beta());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn turns(ratio: CodingRatio, count: u32) -> Vec<CodingPlace> {
        let mut turns = RatioInterleaver::default();
        let mut turn = |_| {
            let place = turns.next(ratio);
            turns.taken(ratio);
            place
        };
        (0..count).map(&mut turn).collect()
    }

    #[test]
    fn tasks_are_interleaved_as_evenly_as_the_ratio_allows() {
        let text = |alpha, beta| -> String {
            let ratio = CodingRatio::new(alpha, beta).unwrap();
            let letter = |place| if place == CodingPlace::Host { 'h' } else { 'o' };
            turns(ratio, alpha + beta).into_iter().map(letter).collect()
        };
        assert_eq!(text(3, 1), "hhho");
        assert_eq!(text(3, 2), "hhoho");
        assert_eq!(text(1, 3), "hooo");
        assert_eq!(text(0, 2), "oo");
        assert_eq!(text(2, 0), "hh");
    }

    proptest! {
        /// The number of tasks sent to the DPU never differs from its share by a whole task.
        #[test]
        fn no_coding_place_gets_a_whole_task_more_than_its_share(alpha in 0u32..=40, beta in 0u32..=40) {
            prop_assume!(alpha + beta > 0);
            let mut offloaded = 0;
            for (so_far, place) in (1u32..).zip(turns(CodingRatio::new(alpha, beta).unwrap(), 3 * (alpha + beta))) {
                offloaded += u32::from(place == CodingPlace::Offload);
                let (due, done) = (so_far * beta, offloaded * (alpha + beta));
                prop_assert!(due.abs_diff(done) < alpha + beta, "{offloaded} of {so_far}");
            }
        }
    }
}
