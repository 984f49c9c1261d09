//! [`Lanes`]: the order of the transactions and reads of each target.

use std::collections::VecDeque;

/// The lanes of all targets. A *lane* is the ordered queue of one target's transactions and reads.
///
/// A job with transactions of several targets is in several lanes, and leaves them together when it
/// is the first in each. Every lane has its jobs in the order of their ids. Therefore, the job with
/// the lowest id is the first in each of its lanes, and jobs never wait for one another in a
/// circle.
pub(super) struct Lanes {
    lanes: Vec<Lane>,
}

#[derive(Default)]
struct Lane {
    /// Number of the last transaction or query of an object. It only grows.
    last_number: u64,
    /// Ids of the jobs, in ascending order.
    queue: VecDeque<u64>,
}

impl Lanes {
    pub(super) fn new(targets: usize) -> Lanes {
        Lanes { lanes: (0..targets).map(|_| Lane::default()).collect() }
    }

    /// Number of lanes.
    pub(super) fn count(&self) -> usize {
        self.lanes.len()
    }

    /// Number of the last numbered call of a target, which the next call follows.
    pub(super) fn last_number(&self, target: u16) -> u64 {
        self.lanes[usize::from(target)].last_number
    }

    /// Gives the next number of a target to a call.
    pub(super) fn count_call(&mut self, target: u16) {
        self.lanes[usize::from(target)].last_number += 1;
    }

    /// Adds a new job to the end of its lanes.
    pub(super) fn push_back(&mut self, id: u64, targets: impl Iterator<Item = u16>) {
        for target in targets {
            let queue = &mut self.lanes[usize::from(target)].queue;
            assert!(queue.back().is_none_or(|last| *last < id), "job {id} overtakes a job of its lane");
            queue.push_back(id);
        }
    }

    /// Returns a job to the start of its lanes, because it must be sent again.
    pub(super) fn push_front(&mut self, id: u64, targets: impl Iterator<Item = u16>) {
        for target in targets {
            let queue = &mut self.lanes[usize::from(target)].queue;
            assert!(queue.front().is_none_or(|first| *first > id), "job {id} overtakes a job of its lane");
            queue.push_front(id);
        }
    }

    /// The first job of a lane.
    pub(super) fn first(&self, lane: usize) -> Option<u64> {
        self.lanes[lane].queue.front().copied()
    }

    /// Whether a job is the first in each of its lanes.
    pub(super) fn is_first(&self, id: u64, mut targets: impl Iterator<Item = u16>) -> bool {
        targets.all(|target| self.lanes[usize::from(target)].queue.front() == Some(&id))
    }

    /// Removes a job that is the first in each of its lanes.
    pub(super) fn pop(&mut self, id: u64, targets: impl Iterator<Item = u16>) {
        for target in targets {
            let first = self.lanes[usize::from(target)].queue.pop_front();
            assert_eq!(first, Some(id), "a job leaves the lane of target {target} before its turn");
        }
    }

    /// Drops all jobs.
    pub(super) fn clear(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.queue.clear());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets<const N: usize>(targets: [u16; N]) -> impl Iterator<Item = u16> {
        targets.into_iter()
    }

    #[test]
    fn a_job_of_several_targets_waits_until_it_is_first_in_each_lane() {
        let mut lanes = Lanes::new(2);
        lanes.push_back(1, targets([0]));
        lanes.push_back(2, targets([1]));
        lanes.push_back(3, targets([0, 1]));
        lanes.pop(1, targets([0]));
        assert_eq!((lanes.first(0), lanes.first(1)), (Some(3), Some(2)));
        assert!(!lanes.is_first(3, targets([0, 1])), "job 2 precedes job 3 in lane 1");
        lanes.pop(2, targets([1]));
        assert!(lanes.is_first(3, targets([0, 1])));
        lanes.pop(3, targets([0, 1]));
        assert_eq!((lanes.first(0), lanes.first(1)), (None, None));
    }

    #[test]
    fn a_job_that_is_sent_again_precedes_the_later_jobs_of_its_lane() {
        let mut lanes = Lanes::new(1);
        for id in 1..=3 {
            lanes.push_back(id, targets([0]));
        }
        lanes.pop(1, targets([0]));
        lanes.pop(2, targets([0]));
        lanes.push_front(2, targets([0]));
        lanes.push_front(1, targets([0]));
        assert_eq!(lanes.first(0), Some(1));
    }

    #[test]
    #[should_panic(expected = "job 1 overtakes a job of its lane")]
    fn a_job_cannot_return_behind_a_later_job() {
        let mut lanes = Lanes::new(1);
        lanes.push_back(1, targets([0]));
        lanes.push_back(2, targets([0]));
        lanes.pop(1, targets([0]));
        lanes.push_back(1, targets([0]));
    }

    #[test]
    #[should_panic(expected = "a job leaves the lane of target 1 before its turn")]
    fn a_job_cannot_leave_a_lane_before_its_turn() {
        let mut lanes = Lanes::new(2);
        lanes.push_back(1, targets([1]));
        lanes.push_back(2, targets([0, 1]));
        lanes.pop(2, targets([0, 1]));
    }

    #[test]
    fn each_target_counts_its_own_calls() {
        let mut lanes = Lanes::new(2);
        lanes.count_call(1);
        lanes.count_call(1);
        lanes.push_back(9, targets([1]));
        lanes.clear();
        assert_eq!((lanes.last_number(0), lanes.last_number(1), lanes.first(1)), (0, 2, None));
    }
}
