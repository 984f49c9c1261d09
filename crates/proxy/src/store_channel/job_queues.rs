//! [`JobQueues`]: the queues of the jobs that are not in a lane.

use std::collections::VecDeque;

/// Maximum number of unanswered queries, except queries of objects. The host may hold a query back
/// until a transaction arrives that has not been sent yet. The limit does not apply to queries of
/// objects, so it never delays a call that the transaction needs.
const MAX_QUERIES: usize = 256;

/// The queue of a job that is ready to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JobQueue {
    /// Waits only for space in the rings.
    Ring,
    /// Is sent over the control socket at once.
    Socket,
    /// Is a query that no other call waits for, and waits until few queries are unanswered.
    Query,
    /// Carries data, and waits until the host has reported which earlier requests were lost.
    Held,
}

/// The ids of the jobs that wait for a range, and of the jobs that are ready to be sent.
#[derive(Default)]
pub(super) struct JobQueues {
    /// Jobs that wait for a range of host memory, in arrival order.
    range: VecDeque<u64>,
    ring: VecDeque<u64>,
    socket: VecDeque<u64>,
    queries: VecDeque<u64>,
    held: VecDeque<u64>,
    /// Number of sent, unanswered queries.
    queries_out: usize,
}

impl JobQueues {
    /// Adds a job that waits for a range.
    pub(super) fn wait_for_range(&mut self, id: u64) {
        self.range.push_back(id);
    }

    /// The job that receives the next range.
    pub(super) fn first_for_range(&self) -> Option<u64> {
        self.range.front().copied()
    }

    /// Removes the first job that waits for a range, because it received its range.
    pub(super) fn range_taken(&mut self, id: u64) {
        assert_eq!(self.range.pop_front(), Some(id), "a job receives its range before its turn");
    }

    /// Adds a job to the end of a queue.
    pub(super) fn push_back(&mut self, queue: JobQueue, id: u64) {
        self.queue(queue).push_back(id);
    }

    /// Adds a job that must be sent again to the start of a queue.
    pub(super) fn push_front(&mut self, queue: JobQueue, id: u64) {
        self.queue(queue).push_front(id);
    }

    /// The job that uses the next space in the rings.
    pub(super) fn first_for_ring(&self) -> Option<u64> {
        self.ring.front().copied()
    }

    /// Takes the first job for the rings.
    pub(super) fn take_for_ring(&mut self) -> Option<u64> {
        self.ring.pop_front()
    }

    /// Takes the next job for the control socket. A query counts as unanswered from now on.
    pub(super) fn take_for_socket(&mut self) -> Option<u64> {
        self.socket.pop_front().or_else(|| {
            let id = if self.queries_out < MAX_QUERIES { self.queries.pop_front() } else { None }?;
            self.queries_out += 1;
            Some(id)
        })
    }

    /// Counts a query as answered.
    pub(super) fn query_answered(&mut self) {
        self.queries_out = self.queries_out.checked_sub(1).expect("an answered query was sent");
    }

    /// Moves the jobs for the rings to the control socket, and holds all jobs that carry data.
    pub(super) fn leave_ring(&mut self, carries_data: impl Fn(u64) -> bool) {
        let (ring, socket) = (std::mem::take(&mut self.ring), std::mem::take(&mut self.socket));
        let (held, socket) =
            ring.into_iter().chain(socket).partition::<VecDeque<u64>, _>(|id| carries_data(*id));
        self.held.extend(held);
        self.socket = socket;
    }

    /// Takes the jobs that were held.
    pub(super) fn take_held(&mut self) -> VecDeque<u64> {
        std::mem::take(&mut self.held)
    }

    fn queue(&mut self, queue: JobQueue) -> &mut VecDeque<u64> {
        match queue {
            JobQueue::Ring => &mut self.ring,
            JobQueue::Socket => &mut self.socket,
            JobQueue::Query => &mut self.queries,
            JobQueue::Held => &mut self.held,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_wait_while_many_are_unanswered_and_delay_no_other_call() {
        let mut queues = JobQueues::default();
        let count = MAX_QUERIES as u64 + 1;
        (1..=count).for_each(|id| queues.push_back(JobQueue::Query, id));
        queues.push_back(JobQueue::Socket, 1000);
        assert_eq!(queues.take_for_socket(), Some(1000), "other calls precede queries");
        assert!((1..count).all(|id| queues.take_for_socket() == Some(id)));
        assert_eq!(queues.take_for_socket(), None, "the limit is reached");
        queues.push_back(JobQueue::Socket, 1001);
        assert_eq!(queues.take_for_socket(), Some(1001));
        queues.query_answered();
        assert_eq!(queues.take_for_socket(), Some(count));
    }

    #[test]
    fn jobs_with_data_are_held_when_the_rings_are_left() {
        let mut queues = JobQueues::default();
        [2, 3].into_iter().for_each(|id| queues.push_back(JobQueue::Ring, id));
        [4, 5].into_iter().for_each(|id| queues.push_back(JobQueue::Socket, id));
        queues.push_back(JobQueue::Held, 1);
        queues.leave_ring(|id| id != 5);
        assert_eq!((queues.first_for_ring(), queues.take_for_socket()), (None, Some(5)));
        assert_eq!(queues.take_held(), [1, 2, 3, 4]);
        assert_eq!(queues.take_held(), [0; 0]);
    }

    #[test]
    #[should_panic(expected = "a job receives its range before its turn")]
    fn ranges_are_granted_in_arrival_order() {
        let mut queues = JobQueues::default();
        queues.wait_for_range(1);
        queues.wait_for_range(2);
        queues.range_taken(2);
    }

    #[test]
    #[should_panic(expected = "an answered query was sent")]
    fn a_query_cannot_be_answered_twice() {
        let mut queues = JobQueues::default();
        queues.push_back(JobQueue::Query, 1);
        queues.take_for_socket();
        queues.query_answered();
        queues.query_answered();
    }
}
