//! [`CallTable`]: the unanswered calls.

use base::clock::Instant;
use base::collections::HashMap;

use super::fetched_read::FetchedRead;
use super::job::{Job, Route};

/// The unanswered calls of one incarnation. Each call has an id, counted from 1, and is in exactly
/// one state: waiting to be sent, sent, or a read whose data is being fetched.
#[derive(Default)]
pub(super) struct CallTable {
    last_id: u64,
    waiting: HashMap<u64, Job>,
    sent: HashMap<u64, SentCall>,
    fetched: HashMap<u64, FetchedRead>,
}

/// A request that was sent and is not answered.
pub(super) struct SentCall {
    job: Job,
    /// End of the request's entry in the inbound ring, in bytes; 0 if the control socket carried
    /// the request.
    ring_end: u64,
    sent: Instant,
}

impl SentCall {
    /// Whether the ring carried the request.
    pub(super) fn was_on_ring(&self) -> bool {
        self.ring_end > 0
    }

    /// Whether the ring carried the request and the host, which has taken `taken` bytes from the
    /// ring, has not taken it.
    pub(super) fn is_missing(&self, taken: u64) -> bool {
        self.ring_end > taken
    }

    pub(super) fn sent(&self) -> Instant {
        self.sent
    }

    pub(super) fn job(&self) -> &Job {
        &self.job
    }

    pub(super) fn job_mut(&mut self) -> &mut Job {
        &mut self.job
    }

    pub(super) fn into_job(self) -> Job {
        self.job
    }
}

impl CallTable {
    /// Adds a new job. Returns its id.
    pub(super) fn add(&mut self, job: Job) -> u64 {
        self.last_id += 1;
        self.put_back(self.last_id, job);
        self.last_id
    }

    /// Number of jobs and sent requests.
    pub(super) fn unanswered(&self) -> usize {
        self.waiting.len() + self.sent.len()
    }

    /// A job that was not sent yet.
    pub(super) fn job(&self, id: u64) -> &Job {
        self.waiting.get(&id).expect("a queued job waits to be sent")
    }

    /// A job that was not sent yet.
    pub(super) fn job_mut(&mut self, id: u64) -> &mut Job {
        self.waiting.get_mut(&id).expect("a queued job waits to be sent")
    }

    /// All jobs that were not sent yet.
    pub(super) fn jobs_mut(&mut self) -> impl Iterator<Item = &mut Job> {
        self.waiting.values_mut()
    }

    /// Takes a job to send it.
    pub(super) fn take(&mut self, id: u64) -> Job {
        self.waiting.remove(&id).expect("a queued job waits to be sent")
    }

    /// Registers a job that was taken and sent, and whose answer is expected. `ring_end` is the end
    /// of the request's entry in the inbound ring, or 0 if the control socket carries it.
    pub(super) fn sent(&mut self, id: u64, job: Job, ring_end: u64, now: Instant) {
        assert!(!self.waiting.contains_key(&id) && !self.fetched.contains_key(&id), "call {id} is in use");
        let before = self.sent.insert(id, SentCall { job, ring_end, sent: now });
        assert!(before.is_none(), "call {id} was sent twice");
    }

    pub(super) fn sent_call_mut(&mut self, id: u64) -> Option<&mut SentCall> {
        self.sent.get_mut(&id)
    }

    /// All sent requests.
    pub(super) fn sent_calls(&self) -> impl Iterator<Item = &SentCall> {
        self.sent.values()
    }

    /// Takes a sent request because its answer arrived on `route`; `None` if no request with this
    /// id waits for an answer on this route.
    pub(super) fn answered(&mut self, id: u64, route: Route) -> Option<SentCall> {
        self.sent.get(&id).filter(|sent| sent.job.route() == route)?;
        self.sent.remove(&id)
    }

    /// Returns an answered job to the jobs that wait to be sent.
    pub(super) fn put_back(&mut self, id: u64, job: Job) {
        assert!(id <= self.last_id, "call {id} was never made");
        assert!(!self.sent.contains_key(&id) && !self.fetched.contains_key(&id), "call {id} is in use");
        assert!(self.waiting.insert(id, job).is_none(), "call {id} waits twice");
    }

    /// Moves all requests on the ring to the control socket, after the host has taken `taken` bytes
    /// from the ring. Returns the ids of the requests that it has not taken, in ascending order.
    /// These requests wait to be sent again. The control socket will carry the other answers.
    pub(super) fn leave_ring(&mut self, taken: u64) -> Vec<u64> {
        let on_ring = self.sent.iter_mut().filter(|(_, sent)| sent.job.route() == Route::Ring);
        let mut lost: Vec<u64> = Vec::new();
        for (id, sent) in on_ring {
            sent.job.leave_ring();
            if sent.is_missing(taken) {
                lost.push(*id);
            }
        }
        lost.sort_unstable();
        for id in &lost {
            let sent = self.sent.remove(id).expect("a lost request was sent");
            self.put_back(*id, sent.job);
        }
        lost
    }

    /// Registers an answered read whose data is being fetched.
    pub(super) fn begin_fetch(&mut self, id: u64, read: FetchedRead) {
        assert!(!self.waiting.contains_key(&id) && !self.sent.contains_key(&id), "call {id} is in use");
        assert!(self.fetched.insert(id, read).is_none(), "read {id} is fetched twice");
    }

    /// A read whose data is being fetched.
    pub(super) fn fetched_mut(&mut self, id: u64) -> &mut FetchedRead {
        self.fetched.get_mut(&id).expect("the data of this read is being fetched")
    }

    /// Takes a read whose data has arrived.
    pub(super) fn end_fetch(&mut self, id: u64) -> FetchedRead {
        self.fetched.remove(&id).expect("the data of this read is being fetched")
    }

    /// Takes all calls at the end of the incarnation.
    pub(super) fn take_all(&mut self) -> (Vec<Job>, Vec<SentCall>, Vec<FetchedRead>) {
        let (waiting, sent) = (std::mem::take(&mut self.waiting), std::mem::take(&mut self.sent));
        let fetched = std::mem::take(&mut self.fetched);
        (waiting.into_values().collect(), sent.into_values().collect(), fetched.into_values().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::ChannelCall;
    use crate::store_channel::ReadCall;
    use crate::store_channel::job::ChannelKind;
    use store::{CollectionId, ObjectId};
    use tokio::sync::oneshot;

    fn job() -> Job {
        Job::of_channel(ChannelCall::Positions, ChannelKind::Positions)
    }

    fn read_on_ring() -> Job {
        let (cid, oid) = (CollectionId::new("c").unwrap(), ObjectId::new("o").unwrap());
        let read = ReadCall { cid, oid, offset: 0, len: 1, cover: 4096, dest: None };
        Job::read(0, 0, read, true, oneshot::channel().0)
    }

    #[test]
    fn an_answer_counts_only_on_the_route_of_its_request() {
        let mut calls = CallTable::default();
        let id = calls.add(job());
        let taken = calls.take(id);
        assert_eq!(calls.unanswered(), 0);
        calls.sent(id, taken, 0, Instant::now());
        assert!(calls.answered(id, Route::Ring).is_none(), "the socket carried the request");
        assert!(calls.answered(id + 1, Route::Socket).is_none(), "there is no other request");
        assert!(!calls.answered(id, Route::Socket).unwrap().was_on_ring());
        assert!(calls.answered(id, Route::Socket).is_none(), "a request is answered once");
    }

    #[test]
    fn requests_that_the_host_has_not_taken_wait_to_be_sent_again_in_order() {
        let mut calls = CallTable::default();
        for end in [100, 200, 300] {
            let id = calls.add(read_on_ring());
            let taken = calls.take(id);
            calls.sent(id, taken, end, Instant::now());
        }
        let id = calls.add(job());
        let taken = calls.take(id);
        calls.sent(id, taken, 0, Instant::now());
        assert_eq!(calls.leave_ring(100), [2, 3]);
        assert_eq!(calls.unanswered(), 4);
        assert!(calls.sent_calls().all(|sent| sent.job().route() == Route::Socket));
        assert_eq!((calls.job(2).route(), calls.job(3).route()), (Route::Socket, Route::Socket));
        assert!(calls.answered(1, Route::Socket).unwrap().was_on_ring());
    }

    #[test]
    #[should_panic(expected = "call 1 is in use")]
    fn a_call_cannot_wait_and_be_sent_at_once() {
        let mut calls = CallTable::default();
        let id = calls.add(job());
        calls.sent(id, job(), 0, Instant::now());
    }

    #[test]
    #[should_panic(expected = "call 1 was never made")]
    fn an_unknown_call_cannot_be_put_back() {
        CallTable::default().put_back(1, job());
    }
}
