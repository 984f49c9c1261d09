//! The steps of a job until it is ready to be sent.

use store::StoreError;

use super::job::{Job, Route, WriteState};
use super::job_queues::JobQueue;
use super::mode::DmaState;
use super::regions::OpenedWindow;
use super::{AnswerTo, CallError, MAX_JOBS, State};

impl State {
    /// Checks whether the store channel can take one more call. Returns `answer_to` if so.
    /// Otherwise it sends the reason to the caller and returns `None`.
    pub(super) fn accept(&self, answer_to: AnswerTo) -> Option<AnswerTo> {
        let Some(why) = self.refusal() else { return Some(answer_to) };
        // The caller may have been cancelled; ignore the error.
        let _ = answer_to.send(Err(why));
        None
    }

    /// Why the store channel cannot take one more call; `None` if it can.
    pub(super) fn refusal(&self) -> Option<CallError> {
        match &self.dead {
            Some(why) => Some(CallError::Lost(why.clone())),
            // The error does not blame the drive, so the caller may retry.
            None if self.calls.unanswered() >= MAX_JOBS => {
                Some(StoreError::Disconnected("too many calls wait for the store".into()).into())
            }
            None => None,
        }
    }

    /// Queues a job. The end of the turn sends it as soon as it is ready. The limit in `accept`
    /// does not apply to the store channel's own jobs.
    pub(super) fn enqueue(&mut self, mut job: Job) {
        if self.dead.is_some() {
            return;
        }
        if !self.is_open() {
            job.leave_ring();
        }
        let wants_range = job.wanted_range().is_some();
        let id = self.calls.add(job);
        self.lanes.push_back(id, self.calls.job(id).lanes());
        if wants_range {
            self.queues.wait_for_range(id);
        } else {
            self.job_ready(id);
        }
    }

    /// Continues a job whose payload is in place, or is ready to travel with the request. A job in
    /// a lane then waits for its turn.
    pub(super) fn job_ready(&mut self, id: u64) {
        let job = self.calls.job(id);
        assert!(job.is_ready(), "the payload of job {id} is not ready");
        if !job.is_in_lane() {
            self.doubt(id);
            let queue = self.queue_of(id);
            self.queues.push_back(queue, id);
        }
    }

    /// The queue for a job that is ready to be sent.
    pub(super) fn queue_of(&self, id: u64) -> JobQueue {
        let job = self.calls.job(id);
        match job.route() {
            Route::Ring => JobQueue::Ring,
            Route::Socket if matches!(self.mode, DmaState::Closing { .. }) && job.carries_data() => {
                JobQueue::Held
            }
            Route::Socket if job.is_query() => JobQueue::Query,
            Route::Socket => JobQueue::Socket,
        }
    }

    /// Continues a job whose window is open to DMA.
    pub(super) fn use_window(&mut self, id: u64, opened: OpenedWindow) {
        let job = self.calls.job_mut(id);
        job.use_window(opened);
        if job.is_ready() {
            self.job_ready(id);
        } else {
            self.start_upload(id);
        }
    }

    /// Decides whether a stage write that is about to be posted is suspect, so that the host must
    /// verify its payload. The write is unsure if it is suspect or on the control socket, because a
    /// transaction that names the stage could then overtake it. Transactions that name the stage
    /// wait until the write is answered. No write is unsure without host memory: the control socket
    /// then carries all calls in order, and no call is sent twice.
    pub(super) fn doubt(&mut self, id: u64) {
        let job = self.calls.job_mut(id);
        let Some(stage) = job.written_stage() else { return };
        job.choose_check(&mut self.verify);
        let unsure = self.ring.is_some() && (job.is_suspect() || job.route() == Route::Socket);
        match job.write_posted(unsure) {
            WriteState::Unposted => self.stages.write_posted(stage, unsure),
            WriteState::Sure if unsure => self.stages.write_doubted(stage),
            WriteState::Sure | WriteState::Unsure => {}
        }
    }

    /// Tells the host to free a stage.
    pub(super) fn release_stage(&mut self, target: u16, host_id: u64) {
        let after = self.lanes.last_number(target);
        self.enqueue(Job::stage_release(target, after, host_id));
    }
}
