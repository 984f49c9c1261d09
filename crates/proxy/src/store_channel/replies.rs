//! The handling of replies and of the data of reads.

use std::sync::Arc;
use std::time::Duration;

use base::clock::Instant;
use base::fault::Site;
use base::mem::ArenaBuf;
use base::phases::{Clock, Phase};
use bytes::Bytes;
use channel::{ChannelEntry, ChannelError};
use store::{ReadData, StoreError};

use super::dma::Dma;
use super::job::{AnswerUse, ChannelKind, Job, RangeUse, Route};
use super::recover::Quarantine;
use super::regions::OpenedWindow;
use super::{
    AnswerTo, CallAnswered, CallError, Delivered, HeldRange, ReadLanding, RingSide, SentCall, State,
    StoreChannel,
};
use crate::calls::unexpected;
use crate::messages::{CallAnswer, CallOutcome, ChannelCall, decode, unpack_checksums};

/// A read whose data is being fetched.
pub(super) struct Fetching {
    answer: CallAnswer,
    landing: ReadLanding,
    len: usize,
    range: HeldRange,
    /// Bytes that DMA moved before it failed.
    fetched: usize,
    /// How the data from DMA differed from its checksums, if it did.
    doubt: Option<String>,
    answer_to: AnswerTo,
}

/// A read that the host has answered.
struct DoneRead {
    id: u64,
    dest: Option<ArenaBuf>,
    answer_to: AnswerTo,
    region: Option<OpenedWindow>,
    clock: Option<Clock>,
}

impl State {
    /// Handles a reply that arrived on `route`.
    pub(super) fn reply(&mut self, frame: ChannelEntry, route: Route) -> Result<(), ChannelError> {
        let id = frame.header.id;
        let mut outcome = decode::<CallOutcome>(&frame.control).and_then(|(outcome, _)| outcome);
        if let Ok(CallAnswer::Coded(took)) = outcome {
            // After a failure of DMA, this answer may arrive twice.
            if let Some(coded) = self.pending.get_mut(&id).and_then(|pending| pending.job.coded.take()) {
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
        let pending = self.pending.remove(&id).filter(|p| p.job.route == route);
        let Some(SentCall { mut job, ring_end, .. }) = pending else {
            return Err(ChannelError::Protocol(format!(
                "it sent a reply to request {id}, which is not waiting for one"
            )));
        };
        match (route, &mut self.ring) {
            (Route::Ring, Some(ring)) => ring.answered(job.reply_max()),
            _ => self.queries_out -= usize::from(job.is_query()),
        }
        if let AnswerUse::Channel(kind) = job.kind {
            return self.channel_answered(kind, frame);
        }
        book_host_time(job.clock.as_ref(), frame.header.elapsed_us);
        let range = match job.range {
            RangeUse::Held(range) => Some(range),
            _ => None,
        };
        let in_range = ring_end > 0;
        if outcome == Ok(CallAnswer::Damaged) {
            let by_dma = in_range || job.arrived > 0;
            if range.is_none() || job.upload.is_empty() || !by_dma {
                let what = format!("it found damage in the payload of request {id}, which DMA did not carry");
                return Err(ChannelError::Protocol(what));
            }
            self.damaged(id, job);
            return Ok(());
        }
        self.written(&job);
        if job.is_transactions() {
            let why = outcome.err().unwrap_or_else(unexpected);
            job.take_answers().for_each(|answer_to| drop(answer_to.send(Err(why.clone().into()))));
            self.free_range(range);
            return Ok(());
        }
        let Job { target, kind, answer_to: Some(answer_to), region, clock, .. } = job else {
            return Err(ChannelError::Protocol(format!("it answered request {id}, which expects no answer")));
        };
        let answered = match (kind, outcome) {
            (AnswerUse::Stage, Ok(CallAnswer::Stage(host_id))) => {
                self.new_stage(target, host_id, answer_to);
                return Ok(());
            }
            (AnswerUse::Read(dest), Ok(answer @ CallAnswer::Read { .. })) => {
                let read = DoneRead { id, dest, answer_to, region, clock };
                return self.read_answered(read, answer, frame.data, range, in_range);
            }
            (_, Ok(answer)) => Ok(Delivered::new(answer, Vec::new())),
            (_, Err(e)) => Err(CallError::Store(e)),
        };
        self.finish(range, answer_to, answered);
        Ok(())
    }

    /// Delivers outcomes of the transactions of a request. Returns whether further answers follow.
    fn transactions_answered(
        &mut self,
        id: u64,
        outcomes: &mut [Option<Result<(), StoreError>>],
    ) -> Result<bool, ChannelError> {
        let Some(SentCall { job, .. }) = self.pending.get_mut(&id) else { return Ok(false) };
        if job.parts.len() != outcomes.len() {
            let what = format!(
                "it sent {} outcomes for the {} transactions of request {id}",
                outcomes.len(),
                job.parts.len()
            );
            return Err(ChannelError::Protocol(what));
        }
        // After a failure of DMA, an outcome may arrive twice.
        for (part, outcome) in job.parts.iter_mut().zip(outcomes) {
            let Some(outcome) = outcome.take() else { continue };
            let Some(answer_to) = part.answer_to.take() else { continue };
            let answered = outcome.map(|()| Delivered::new(CallAnswer::Done, Vec::new()));
            // The caller may have been cancelled; ignore the error.
            let _ = answer_to.send(answered.map_err(CallError::Store));
        }
        Ok(job.parts.iter().any(|part| part.answer_to.is_some()))
    }

    /// Continues a read that the host has answered. The data came with the answer, or must be
    /// fetched from the range.
    fn read_answered(
        &mut self,
        read: DoneRead,
        answer: CallAnswer,
        data: Bytes,
        range: Option<HeldRange>,
        in_range: bool,
    ) -> Result<(), ChannelError> {
        let CallAnswer::Read { len, .. } = answer else { return Ok(()) };
        let answered = match (&read.dest, range) {
            (Some(dest), _) if len > dest.len() as u64 => {
                let what = format!("the store read {len} bytes for a buffer of {} bytes", dest.len());
                Err(StoreError::InvalidArgument(what).into())
            }
            _ if !data.is_empty() && data.len() as u64 != len => {
                let what = format!("it sent {} bytes of data instead of the announced {len}", data.len());
                return Err(ChannelError::Protocol(what));
            }
            (_, Some(range)) if in_range && len > 0 => return self.fetch_data(read, answer, range),
            _ => Ok(Delivered::new(answer, vec![landed(data, read.dest)])),
        };
        self.finish(range, read.answer_to, answered);
        Ok(())
    }

    /// Delivers a call's answer and frees its range.
    fn finish(&mut self, range: Option<HeldRange>, answer_to: AnswerTo, answered: CallAnswered) {
        self.free_range(range);
        // The caller may have been cancelled; ignore the error.
        let _ = answer_to.send(answered);
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
        let DoneRead { id, dest, answer_to, region, clock } = read;
        let len = usize::try_from(*len).unwrap_or(usize::MAX);
        if len > range.len {
            return Err(ChannelError::Protocol(format!(
                "it read {len} bytes into a range of {} bytes",
                range.len
            )));
        }
        let opened = region.filter(|_| self.is_open());
        let landing = match &opened {
            Some(_) => choose_landing(ring, dest, len),
            None => ReadLanding::Socket(dest),
        };
        let mut transfers = Vec::new();
        if let Some(opened) = &opened {
            let from = ring.range_offset(range);
            match &landing {
                ReadLanding::Buffers(buffers) => {
                    let mut at = from;
                    for buffer in buffers {
                        ring.fetch_range(&mut transfers, at, buffer.offset(), buffer.len(), opened);
                        at += buffer.len();
                    }
                }
                _ => ring.fetch_range(&mut transfers, from, from, len, opened),
            }
        }
        self.fetching
            .insert(id, Fetching { answer, landing, len, range, fetched: 0, doubt: None, answer_to });
        match opened {
            Some(opened) => self.start_fetch(id, transfers, clock, Some(opened.region)),
            None => self.get_rest(id),
        }
        Ok(())
    }

    /// Handles the end of the DMA that fetches a read's data. `bytes` is the number of bytes that
    /// have arrived; `whole` says whether they are all of the data.
    pub(super) fn fetched(&mut self, id: u64, bytes: usize, whole: bool) {
        let Some(done) = self.fetching.get_mut(&id) else { return };
        if !whole {
            done.fetched = bytes;
            return self.get_rest(id);
        }
        let Some(mut done) = self.fetching.remove(&id) else { return };
        let landing = std::mem::replace(&mut done.landing, ReadLanding::Socket(None));
        let data: Vec<Bytes> = match landing {
            ReadLanding::Buffers(buffers) => buffers.into_iter().map(ArenaBuf::freeze).collect(),
            ReadLanding::Mirror(dest) | ReadLanding::Socket(dest) => {
                vec![self.copy_from_mirror(done.range, done.len, dest)]
            }
        };
        match verified(&done.answer, data) {
            Ok(data) => self.deliver(done, data, true),
            // The data was damaged either by DMA or before DMA. The copy from the control socket
            // shows which is the case.
            Err(why) => {
                done.doubt = Some(why);
                self.fetching.insert(id, done);
                self.get_rest(id);
            }
        }
    }

    /// Gives up the DMA of a read's data because it is overdue. The control socket then carries the
    /// data, which is placed in other memory.
    pub(super) fn fetch_given_up(&mut self, id: u64) {
        let Some(late) = self.fetching.get_mut(&id) else { return };
        let landing = std::mem::replace(&mut late.landing, ReadLanding::Socket(None));
        self.keep(landing);
        self.get_rest(id);
    }

    /// Asks over the control socket for the part of a read's data that DMA has not moved.
    fn get_rest(&mut self, id: u64) {
        let (Some(rest), Some(ring)) = (self.fetching.get(&id), &self.ring) else { return };
        let offset = (ring.range_offset(rest.range) + rest.fetched) as u64;
        let len = rest.len - rest.fetched;
        self.fallback.keep(rest.fetched);
        self.fallback.send(len);
        let len = len as u64;
        self.submit(Job::of_channel(ChannelCall::Get { offset, len }, ChannelKind::Get(id)));
    }

    /// Handles data of a read that came over the control socket.
    pub(super) fn got(&mut self, id: u64, rest: Bytes) -> Result<(), ChannelError> {
        let Some(done) = self.fetching.remove(&id) else { return Ok(()) };
        if rest.len() != done.len - done.fetched {
            let what = format!(
                "it sent {} bytes of data instead of the requested {}",
                rest.len(),
                done.len - done.fetched
            );
            return Err(ChannelError::Protocol(what));
        }
        let mut done = done;
        let landing = std::mem::replace(&mut done.landing, ReadLanding::Socket(None));
        let data = match landing {
            ReadLanding::Buffers(mut buffers) if done.fetched > 0 => {
                fill(&mut buffers, done.fetched, &rest);
                buffers.into_iter().map(ArenaBuf::freeze).collect()
            }
            ReadLanding::Mirror(_) if done.fetched > 0 => {
                vec![self.copy_from_mirror(done.range, done.fetched, None), rest]
            }
            ReadLanding::Socket(dest) if done.fetched == 0 => vec![landed(rest, dest)],
            _ => vec![rest],
        };
        let verified = verified(&done.answer, data.clone());
        let is_right = verified.is_ok();
        match (verified, &done.doubt) {
            (Ok(_), Some(why)) => {
                self.dma_failed(&format!("the data of a read was damaged during its transfer: {why}"));
            }
            // The data that DMA moved before it failed may be damaged. Fetch it again.
            (Err(_), _) if done.fetched > 0 => {
                done.fetched = 0;
                self.fetching.insert(id, done);
                self.get_rest(id);
                return Ok(());
            }
            _ => {}
        }
        self.deliver(done, data, is_right);
        Ok(())
    }

    fn deliver(&mut self, done: Fetching, data: Vec<Bytes>, verified: bool) {
        self.finish(Some(done.range), done.answer_to, Ok(Delivered { answer: done.answer, data, verified }));
    }

    fn copy_from_mirror(&self, range: HeldRange, len: usize, dest: Option<ArenaBuf>) -> Bytes {
        let Some(ring) = &self.ring else { return Bytes::new() };
        metrics::counter!("outboard_proxy_landing_copy_bytes").increment(len as u64);
        let at = ring.range_offset(range);
        match dest {
            Some(mut dest) => {
                dest.truncate(len);
                let inside = ring.arena().copy_out(at, &mut dest);
                debug_assert!(inside, "the range is inside the mirror");
                dest.freeze()
            }
            None => {
                let mut copy = vec![0; len];
                let inside = ring.arena().copy_out(at, &mut copy);
                debug_assert!(inside, "the range is inside the mirror");
                Bytes::from(copy)
            }
        }
    }
}

/// Records how long the host worked on a request that was just answered.
fn book_host_time(clock: Option<&Clock>, elapsed_us: u32) {
    let Some(clock) = clock else { return };
    let now = Instant::now();
    if let Some(from) = now.checked_sub(Duration::from_micros(elapsed_us.into())) {
        clock.record(Phase::Host, from, now);
    }
}

/// Verifies the checksums of a read's data.
fn verified(answer: &CallAnswer, data: Vec<Bytes>) -> Result<Vec<Bytes>, String> {
    let CallAnswer::Read { offset, checksums, object_size, .. } = answer else { return Ok(data) };
    let checksums = unpack_checksums(checksums).map_err(|e| e.to_string())?;
    let read = ReadData { offset: *offset, data, checksums, object_size: *object_size, verified: false };
    read.verify().map_err(|e| e.to_string())?;
    Ok(read.data)
}

/// Copies `rest` into the buffers, which count as one contiguous range, starting at byte `at`.
fn fill(buffers: &mut [ArenaBuf], at: usize, rest: &[u8]) {
    let (mut skip, mut rest) = (at, rest);
    for buffer in buffers {
        let from = skip.min(buffer.len());
        skip -= from;
        let part = (buffer.len() - from).min(rest.len());
        buffer[from..from + part].copy_from_slice(&rest[..part]);
        rest = &rest[part..];
    }
}

/// Returns data that came inside a frame, copied into the caller's buffer if there is one. The
/// buffer must be large enough.
fn landed(data: Bytes, dest: Option<ArenaBuf>) -> Bytes {
    match dest {
        Some(mut dest) => {
            dest.truncate(data.len());
            dest.copy_from_slice(&data);
            dest.freeze()
        }
        None => data,
    }
}

/// Chooses the memory for a read's data. If the engine can reach the caller's buffer, the function
/// chooses this buffer. If the caller has no buffer, the function allocates staging buffers from
/// the pool. Otherwise it chooses the mirror. The function never waits for a free buffer: the
/// buffer's holder may itself wait for this incarnation, which would be a deadlock.
fn choose_landing(ring: &RingSide, dest: Option<ArenaBuf>, len: usize) -> ReadLanding {
    if let Some(mut dest) = dest {
        if Arc::ptr_eq(dest.arena(), ring.arena()) {
            dest.truncate(len);
            return ReadLanding::Buffers(vec![dest]);
        }
        return ReadLanding::Mirror(Some(dest));
    }
    let pool = ring.memory().pool();
    let mut buffers = Vec::new();
    for at in (0..len).step_by(pool.largest()) {
        match pool.try_alloc(pool.largest().min(len - at)) {
            Ok(Some(buffer)) => buffers.push(buffer),
            _ => return ReadLanding::Mirror(None),
        }
    }
    ReadLanding::Buffers(buffers)
}

impl StoreChannel {
    /// Ends the incarnation for its callers: every unanswered call fails. Returns the memory that
    /// DMA may still use.
    pub(super) fn end(&self, why: &str) -> Leftovers {
        let mut state = self.lock();
        state.dead = Some(why.to_owned());
        state.stages.clear();
        state.range_queue.clear();
        state.ring_ready.clear();
        state.socket_ready.clear();
        state.queries.clear();
        state.held.clear();
        state.output.take();
        state.lanes.clear();
        let jobs = std::mem::take(&mut state.jobs);
        let pending = std::mem::take(&mut state.pending);
        let fetching = std::mem::take(&mut state.fetching);
        let mut leftovers = Leftovers {
            _dma: std::mem::take(&mut state.dma),
            _quarantine: std::mem::take(&mut state.quarantine),
            ..Leftovers::default()
        };
        drop(state);
        let mut waiting: Vec<AnswerTo> =
            jobs.into_values().flat_map(|mut job| job.take_answers().collect::<Vec<_>>()).collect();
        for mut request in pending.into_values() {
            waiting.extend(request.job.take_answers());
            leftovers.requests.push(request.job);
        }
        for read in fetching.into_values() {
            waiting.push(read.answer_to);
            leftovers.landings.push(read.landing);
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
    requests: Vec<Job>,
    landings: Vec<ReadLanding>,
    _dma: Dma,
    _quarantine: Quarantine,
}
