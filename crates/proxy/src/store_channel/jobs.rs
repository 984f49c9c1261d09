//! The queues of jobs: what each job waits for, and when the store channel sends it.

use std::collections::VecDeque;

use base::clock::Instant;
use channel::{EntryHeader, EntryKind as FrameKind, REFUSE, VERIFY};
use store::StoreError;

use super::control_output::ControlFrame;
use super::job::{AnswerUse, ChannelKind, Job, RangeUse, Route};
use super::mode::DmaState;
use super::regions::OpenedWindow;
use super::{AnswerTo, CallError, HeldRange, MAX_JOBS, MAX_QUERIES, SentCall, State, Verify};
use crate::messages::{ChannelCall, NO_REPLY, StoreCall, encode};

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
            None if self.jobs.len() + self.pending.len() >= MAX_JOBS => {
                Some(StoreError::Disconnected("too many calls wait for the store".into()).into())
            }
            None => None,
        }
    }

    /// Queues a job, and then sends every job that is ready. The limit in `accept` does not apply
    /// to the store channel's own jobs.
    pub(super) fn submit(&mut self, mut job: Job) {
        if self.dead.is_some() {
            return;
        }
        self.last_id += 1;
        let id = self.last_id;
        if job.route == Route::Ring && !self.is_open() {
            job.route = Route::Socket;
        }
        self.lanes.push_back(id, job.lanes());
        let wants_range = matches!(job.range, RangeUse::Wanted(_));
        self.jobs.insert(id, job);
        if wants_range {
            self.range_queue.push_back(id);
        } else {
            self.payload_ready(id);
        }
        self.pump();
    }

    /// Marks a job's payload as in place, or as ready to travel with the request.
    pub(super) fn payload_ready(&mut self, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if std::mem::replace(&mut job.payload_ready, true) {
            return;
        }
        if !job.is_in_lane() {
            if let Some(stage) = job.writes_stage {
                self.stages.write_posted(stage, false);
            }
            self.doubt(id);
            self.queue_of(id).push_back(id);
        }
    }

    /// Advances every job as far as possible.
    pub(super) fn pump(&mut self) {
        self.grant_ranges();
        self.advance_lanes();
        while self.is_open() && self.ring.as_ref().is_some_and(super::RingSide::has_credit) {
            let Some(id) = self.ring_ready.front().copied() else { break };
            let needed = self.jobs.get(&id).map_or(0, |job| job.reply_max);
            if !self.ring.as_ref().is_some_and(|ring| ring.has_room_for_reply(needed)) {
                break;
            }
            self.ring_ready.pop_front();
            self.send(id);
        }
        while let Some(id) = self.socket_ready.pop_front() {
            self.send(id);
        }
        while self.queries_out < MAX_QUERIES {
            let Some(id) = self.queries.pop_front() else { break };
            self.send(id);
        }
    }

    /// The queue for a job that is ready to be sent.
    fn queue_of(&mut self, id: u64) -> &mut VecDeque<u64> {
        let Some(job) = self.jobs.get(&id) else { return &mut self.socket_ready };
        match job.route {
            Route::Ring => &mut self.ring_ready,
            Route::Socket if matches!(self.mode, DmaState::Closing { .. }) && job.carries_data() => {
                &mut self.held
            }
            Route::Socket if job.is_query() => &mut self.queries,
            Route::Socket => &mut self.socket_ready,
        }
    }

    fn grant_ranges(&mut self) {
        while let Some(&id) = self.range_queue.front() {
            if let Some(job) = self.jobs.get_mut(&id) {
                let RangeUse::Wanted(len) = job.range else {
                    unreachable!("only jobs that want a range wait for one")
                };
                let order =
                    self.ranges.order_of(len).expect("callers ask for no more than the largest range");
                let Some(offset) = self.ranges.take(order) else { return };
                job.range = RangeUse::Held(HeldRange { offset, order, len });
                self.range_queue.pop_front();
                self.granted(id, offset);
            } else {
                self.range_queue.pop_front();
            }
        }
    }

    /// Continues a job that received its range. For a job on the ring, the window that contains the
    /// range must first be open to DMA.
    fn granted(&mut self, id: u64, offset: usize) {
        if self.jobs.get(&id).is_none_or(|job| job.route == Route::Socket) {
            return self.payload_ready(id);
        }
        let window = self.regions.window_of(offset);
        if let Some(region) = self.regions.get(window) {
            let origin =
                self.ring.as_ref().map_or(0, |ring| ring.window_origin(&self.regions.range_of(window)));
            return self.use_region(id, OpenedWindow { region, origin });
        }
        if self.regions.wait(window, id) {
            let range = self.regions.range_of(window);
            let base = self.ring.as_ref().map_or(0, |ring| ring.layout().data_offset());
            let (offset, len) = ((base + range.start) as u64, range.len() as u64);
            let job = Job::of_channel(ChannelCall::Export { offset, len }, ChannelKind::Export(window));
            self.submit(job);
        }
    }

    /// Continues a job whose window is open to DMA.
    pub(super) fn use_region(&mut self, id: u64, opened: OpenedWindow) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.route == Route::Socket {
            return self.payload_ready(id);
        }
        job.region = Some(opened);
        // A short payload travels with the entry.
        if job.is_short() {
            self.payload_ready(id);
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
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(stage) = job.writes_stage else { return };
        job.suspect = job.found_damaged || self.verify.next();
        if (job.suspect || job.route == Route::Socket) && self.ring.is_some() && !job.unsure {
            job.unsure = true;
            self.stages.write_doubted(stage);
        }
    }

    /// Updates the counters of a stage when one of its writes is answered.
    pub(super) fn written(&mut self, job: &Job) {
        if let Some(stage) = job.writes_stage {
            self.stages.write_answered(stage, job.unsure);
        }
    }

    fn advance_lanes(&mut self) {
        let mut is_done = false;
        // A job in several lanes may hold up a lane that was visited before.
        while !is_done {
            is_done = true;
            for lane in 0..self.lanes.count() {
                while let Some(id) = self.next_in_lane(lane) {
                    let Some(job) = self.jobs.get(&id) else { break };
                    is_done &= job.parts.len() <= 1;
                    self.lanes.pop(id, job.lanes());
                    self.queue_of(id).push_back(id);
                }
            }
        }
    }

    /// The first job of a lane, if it may be sent now. A job in several lanes must be the first in
    /// each of them.
    fn next_in_lane(&self, lane: usize) -> Option<u64> {
        let id = self.lanes.first(lane)?;
        let job = self.jobs.get(&id)?;
        let is_first = || self.lanes.is_first(id, job.lanes());
        (job.payload_ready && is_first() && self.stages.writes_precede(&job.names_stages)).then_some(id)
    }

    /// Sends a job that has everything it needs.
    fn send(&mut self, id: u64) {
        let Some(mut job) = self.jobs.remove(&id) else { return };
        let base = self.ring.as_ref().map(|ring| ring.layout().data_offset());
        job.place_payload(base);
        let mut control = encode(&job.call);
        control.extend_from_slice(&job.tail);
        let wants_reply = job.wants_reply();
        if job.writes_stage.is_none() {
            // The host verifies the data of parity that it computes in any case. It asks for damaged
            // data again only if the request is suspect.
            let is_chosen = |verify: &mut Verify| job.is_coded_by_host() || verify.next();
            job.suspect = job.found_damaged || !job.upload.is_empty() && is_chosen(&mut self.verify);
        }
        // Payload that the control socket carries, or that was sent again, was damaged in this
        // process, so sending it again is useless.
        let refuses = job.suspect && (job.found_damaged || !job.is_by_dma());
        let header = EntryHeader {
            after: job.after,
            reply_max: job.reply_max as u32,
            flags: if job.suspect { VERIFY } else { 0 } | if refuses { REFUSE } else { 0 },
            ..EntryHeader::new(FrameKind::Request, job.target, if wants_reply { id } else { NO_REPLY })
        };
        let mut ring_end = 0;
        match (job.route, &mut self.ring, job.range) {
            (Route::Ring, Some(ring), range) => ring_end = ring.send(header, &control, &job, range),
            (_, Some(_), RangeUse::Held(range)) if !matches!(job.kind, AnswerUse::Read(_)) => {
                self.put_rest(&job, range);
                self.output.push(ControlFrame { header, control, data: Vec::new() });
            }
            _ => {
                let data = job.upload.iter().map(|(_, piece)| piece.clone()).collect();
                self.output.push(ControlFrame { header, control, data });
            }
        }
        if wants_reply {
            self.queries_out += usize::from(job.is_query());
            // Keep payload that DMA moved: the host may find it damaged, and the store channel then
            // sends it again.
            if job.route == Route::Socket && job.arrived == 0 {
                job.upload.clear();
            }
            self.pending.insert(id, SentCall { job, ring_end, sent: Instant::now() });
        }
    }

    /// Tells the host to free a stage.
    pub(super) fn release_stage(&mut self, target: u16, host_id: u64) {
        let after = self.lanes.last_number(target);
        let job = Job::new(target, after, StoreCall::StageRelease { stage: host_id }, Route::Socket, None);
        self.submit(job);
    }
}
