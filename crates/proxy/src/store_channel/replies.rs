//! The handling of replies and of the data of reads.

use std::time::Duration;

use base::clock::Instant;
use base::fault::Site;
use base::mem::ArenaBuf;
use base::phases::{Clock, Phase};
use bytes::Bytes;
use channel::{ChannelEntry, ChannelError};
use store::StoreError;

use super::dma::Dma;
use super::fetched_read::{FetchedRead, ReadLanding, ReadOutcome, choose_landing, landed};
use super::host_ranges::{HeldRange, Quarantine};
use super::job::{AnswerUse, AnsweredJob, ChannelKind, Job, JobKind, Route, WriteState};
use super::job_queues::JobQueues;
use super::mode::DmaState;
use super::regions::OpenedWindow;
use super::{AnswerTo, CallAnswered, CallError, Delivered, State, StoreChannel};
use crate::calls::unexpected;
use crate::messages::{CallAnswer, CallOutcome, ChannelCall, decode};

/// A read that the host has answered.
struct DoneRead {
    id: u64,
    dest: Option<ArenaBuf>,
    answer_to: AnswerTo,
    window: Option<OpenedWindow>,
    clock: Option<Clock>,
}

/// When DMA moved a reply: when the fetch was requested, when its first transfer began, and when the
/// last one ended.
pub(super) struct ReplyTimes {
    pub(super) since: Instant,
    pub(super) started: Instant,
    pub(super) finished: Instant,
}

impl State {
    /// Handles a reply that arrived on `route`. `fetched` states when DMA moved it.
    pub(super) fn reply(
        &mut self,
        frame: ChannelEntry,
        route: Route,
        fetched: Option<&ReplyTimes>,
    ) -> Result<(), ChannelError> {
        let id = frame.header.id;
        let mut outcome = decode::<CallOutcome>(&frame.control).and_then(|(outcome, _)| outcome);
        if let Ok(CallAnswer::Coded(took)) = outcome {
            // After a failure of DMA, this answer may arrive twice.
            if let Some(coded) = self.calls.sent_call_mut(id).and_then(|call| call.job_mut().take_coded()) {
                // The caller may not need the timing any more; ignore the error.
                let _ = coded.send(took.map(Duration::from_nanos));
            }
            return Ok(());
        }
        // Injects a fault. The only possible fault here kills the process, so there is no result to
        // handle.
        let _ = self.faults.hit(Site::OsdReply);
        if let Ok(CallAnswer::Transactions(outcomes)) = &mut outcome
            && self.transactions_answered(id, outcomes)?
        {
            return Ok(());
        }
        let call = self.calls.answered(id, route).ok_or_else(|| {
            ChannelError::Protocol(format!("it sent a reply to request {id}, which is not waiting for one"))
        })?;
        let was_on_ring = call.was_on_ring();
        let job = call.into_job();
        match (route, &mut self.ring) {
            (Route::Ring, Some(ring)) => ring.answered(job.reply_max()),
            _ if job.is_query() => self.queues.query_answered(),
            _ => {}
        }
        if let Some(kind) = job.channel_kind() {
            return self.channel_answered(kind, frame);
        }
        job.book_entry();
        if let Some(clock) = job.clock() {
            book_answer(clock, frame.header.elapsed_us, fetched);
        }
        if outcome == Ok(CallAnswer::Damaged) {
            if !job.is_exposed_to_dma(was_on_ring) {
                let what = format!("it found damage in the payload of request {id}, which DMA did not carry");
                return Err(ChannelError::Protocol(what));
            }
            self.damaged(id, job);
            return Ok(());
        }
        // The payload of a request on the control socket was counted when the request was sent.
        let carried = if was_on_ring { job.arrived() } else { 0 };
        let AnsweredJob { target, kind, range, window, clock, .. } = job.into_answered();
        match (kind, outcome) {
            (JobKind::Call { answer_use: AnswerUse::Stage, answer_to }, Ok(CallAnswer::Stage(host_id))) => {
                self.new_stage(target, host_id, answer_to);
            }
            (JobKind::Read { dest, answer_to }, Ok(answer @ CallAnswer::Read { .. })) => {
                let read = DoneRead { id, dest, answer_to, window, clock };
                return self.read_answered(read, answer, frame.data, range, was_on_ring);
            }
            (JobKind::Transactions { parts, .. }, outcome) => {
                let why = outcome.err().unwrap_or_else(unexpected);
                for mut part in parts {
                    part.answer(Err(why.clone()));
                }
                self.give_back(range);
            }
            (kind, outcome) => {
                if let JobKind::StageWrite { stage, state, .. } = kind {
                    self.stages.write_answered(stage, state == WriteState::Unsure, carried);
                }
                let answered = outcome.map(|answer| Delivered::new(answer, Vec::new()));
                let answered = answered.map_err(CallError::Store);
                self.give_back(range);
                // Every other job has a single answer.
                if let Some(answer_to) = kind.into_answers().pop() {
                    // The caller may have been cancelled; ignore the error.
                    let _ = answer_to.send(answered);
                }
            }
        }
        Ok(())
    }

    /// Delivers outcomes of the transactions of a request. Returns whether further answers follow.
    fn transactions_answered(
        &mut self,
        id: u64,
        outcomes: &mut [Option<Result<(), StoreError>>],
    ) -> Result<bool, ChannelError> {
        let Some(call) = self.calls.sent_call_mut(id) else { return Ok(false) };
        let parts = call.job_mut().parts_mut();
        if parts.len() != outcomes.len() {
            let what = format!(
                "it sent {} outcomes for the {} transactions of request {id}",
                outcomes.len(),
                parts.len()
            );
            return Err(ChannelError::Protocol(what));
        }
        for (part, outcome) in parts.iter_mut().zip(outcomes) {
            if let Some(outcome) = outcome.take() {
                part.answer(outcome);
            }
        }
        Ok(parts.iter().any(|part| !part.is_answered()))
    }

    /// Continues a read that the host has answered. The data came with the answer, or must be
    /// fetched from the range.
    fn read_answered(
        &mut self,
        read: DoneRead,
        answer: CallAnswer,
        data: Bytes,
        range: Option<HeldRange>,
        was_on_ring: bool,
    ) -> Result<(), ChannelError> {
        let CallAnswer::Read { len, .. } = answer else { return Ok(()) };
        if let Some(dest) = read.dest.as_ref().filter(|dest| len > dest.len() as u64) {
            let what = format!("the store read {len} bytes for a buffer of {} bytes", dest.len());
            self.finish(range, read.answer_to, Err(StoreError::InvalidArgument(what).into()));
            return Ok(());
        }
        if !data.is_empty() && data.len() as u64 != len {
            let what = format!("it sent {} bytes of data instead of the announced {len}", data.len());
            return Err(ChannelError::Protocol(what));
        }
        match range {
            Some(range) if was_on_ring && len > 0 => self.fetch_data(read, answer, range),
            range => {
                let delivered = Delivered::new(answer, vec![landed(data, read.dest)]);
                self.finish(range, read.answer_to, Ok(delivered));
                Ok(())
            }
        }
    }

    /// Delivers a call's answer and frees its range.
    fn finish(&mut self, range: Option<HeldRange>, answer_to: AnswerTo, answered: CallAnswered) {
        self.give_back(range);
        // The caller may have been cancelled; ignore the error.
        let _ = answer_to.send(answered);
    }

    /// Gives back a range that an answered call no longer needs.
    fn give_back(&mut self, range: Option<HeldRange>) {
        if let Some(range) = range {
            self.ranges.give_back(range);
        }
    }

    /// Registers a new stage. Releases it at once if the caller was cancelled.
    fn new_stage(&mut self, target: u16, host_id: u64, answer_to: AnswerTo) {
        let id = self.stages.create(host_id);
        let is_gone = answer_to.send(Ok(Delivered::new(CallAnswer::Stage(id.0), Vec::new()))).is_err();
        if is_gone && let Some(host_id) = self.stages.release(id) {
            self.release_stage(target, host_id);
        }
    }

    fn fetch_data(
        &mut self,
        read: DoneRead,
        answer: CallAnswer,
        range: HeldRange,
    ) -> Result<(), ChannelError> {
        let (Some(ring), CallAnswer::Read { len, .. }) = (&self.ring, &answer) else { return Ok(()) };
        let DoneRead { id, dest, answer_to, window, clock } = read;
        let len = usize::try_from(*len).unwrap_or(usize::MAX);
        if len > range.len() {
            return Err(ChannelError::Protocol(format!(
                "it read {len} bytes into a range of {} bytes",
                range.len()
            )));
        }
        let window = window.filter(|_| self.mode == DmaState::Open);
        let landing = match &window {
            Some(_) => choose_landing(ring, dest, len),
            None => ReadLanding::Socket(dest),
        };
        let read = FetchedRead::new(answer, landing, len, range, answer_to);
        let transfers = window.as_ref().map(|window| read.transfers(ring, window));
        self.calls.begin_fetch(id, read);
        match (transfers, window) {
            (Some(transfers), Some(window)) => self.start_fetch(id, transfers, clock, window.region),
            _ => self.get_rest(id),
        }
        Ok(())
    }

    /// Handles the end of the DMA that fetches a read's data. `bytes` is the number of bytes that
    /// have arrived; `whole` says whether they are all of the data.
    pub(super) fn fetched(&mut self, id: u64, bytes: usize, whole: bool) {
        let Some(ring) = self.ring.as_ref().filter(|_| whole) else {
            self.calls.fetched_mut(id).interrupt(bytes);
            return self.get_rest(id);
        };
        let outcome = self.calls.end_fetch(id).moved(ring);
        self.read_fetched(id, outcome);
    }

    /// Gives up the DMA of a read's data because it is overdue. The control socket then carries the
    /// data, which is placed in other memory.
    pub(super) fn fetch_given_up(&mut self, id: u64) {
        let landing = self.calls.fetched_mut(id).abandon_landing();
        self.ranges.keep(landing);
        self.get_rest(id);
    }

    /// Asks over the control socket for the part of a read's data that DMA has not moved.
    fn get_rest(&mut self, id: u64) {
        let Some(ring) = &self.ring else { return };
        let read = self.calls.fetched_mut(id);
        let rest = read.rest();
        let offset = (ring.range_offset(read.range()) + rest.start) as u64;
        self.fallback.keep(rest.start);
        self.fallback.send(rest.len());
        let call = ChannelCall::Get { offset, len: rest.len() as u64 };
        self.enqueue(Job::of_channel(call, ChannelKind::Get(id)));
    }

    /// Handles data of a read that came over the control socket.
    pub(super) fn got(&mut self, id: u64, rest: Bytes) -> Result<(), ChannelError> {
        let Some(ring) = &self.ring else { return Ok(()) };
        let outcome = self.calls.end_fetch(id).completed(rest, ring)?;
        self.read_fetched(id, outcome);
        Ok(())
    }

    fn read_fetched(&mut self, id: u64, outcome: ReadOutcome) {
        match outcome {
            ReadOutcome::Complete { range, answer_to, delivered, damage } => {
                if let Some(why) = damage {
                    self.dma_failed(&format!("the data of a read was damaged during its transfer: {why}"));
                }
                self.finish(Some(range), answer_to, Ok(delivered));
            }
            ReadOutcome::FetchAll(read) => {
                self.calls.begin_fetch(id, read);
                self.get_rest(id);
            }
        }
    }
}

/// Records how long the host worked on a request that was just answered, and how long DMA moved the
/// reply.
fn book_answer(clock: &Clock, elapsed_us: u32, fetched: Option<&ReplyTimes>) {
    let answered = fetched.map_or_else(Instant::now, |fetched| fetched.since);
    if let Some(from) = answered.checked_sub(Duration::from_micros(elapsed_us.into())) {
        clock.record(Phase::Host, from, answered);
    }
    if let Some(ReplyTimes { since, started, finished }) = fetched {
        clock.record(Phase::DmaWait, *since, *started);
        clock.record(Phase::Dma, *started, *finished);
    }
}

impl StoreChannel {
    /// Ends the incarnation for its callers: every unanswered call fails. Returns the memory that
    /// DMA may still use.
    pub(super) fn end(&self, why: &str) -> Leftovers {
        let mut state = self.lock();
        state.dead = Some(why.to_owned());
        state.stages.clear();
        state.lanes.clear();
        state.queues = JobQueues::default();
        state.output.take();
        let (jobs, sent, reads) = state.calls.take_all();
        let mut leftovers = Leftovers {
            _dma: std::mem::take(&mut state.dma),
            _quarantine: state.ranges.take_quarantine(),
            ..Leftovers::default()
        };
        drop(state);
        let mut waiting = Vec::new();
        for job in jobs {
            waiting.extend(job.into_answered().kind.into_answers());
        }
        for call in sent {
            let AnsweredJob { kind, upload, window, .. } = call.into_job().into_answered();
            waiting.extend(kind.into_answers());
            leftovers.requests.push(SentPayload { _upload: upload, _window: window });
        }
        for read in reads {
            let (answer_to, landing) = read.into_unfinished();
            waiting.push(answer_to);
            leftovers.landings.push(landing);
        }
        for answer_to in waiting {
            // The caller may have been cancelled; ignore the error.
            let _ = answer_to.send(Err(CallError::Lost(why.to_owned())));
        }
        leftovers
    }
}

/// Memory of the calls of an ended incarnation, kept until the engine no longer uses it.
#[derive(Default)]
pub(super) struct Leftovers {
    requests: Vec<SentPayload>,
    landings: Vec<ReadLanding>,
    _dma: Dma,
    _quarantine: Quarantine,
}

/// Payload of a sent request, and the window of its range.
struct SentPayload {
    _upload: Vec<(usize, Bytes)>,
    _window: Option<OpenedWindow>,
}
