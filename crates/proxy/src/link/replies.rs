//! What is done with replies, and with the data of reads.

use std::sync::Arc;
use std::time::{Duration, Instant};

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
    AnswerTo, CallAnswered, CallError, Delivered, HeldRange, ReadLanding, RingSide, SentCall, StageState,
    State, StoreChannel,
};
use crate::messages::{CallAnswer, CallOutcome, ChannelCall, decode, unpack_checksums};

/// A read whose data is on its way.
pub(super) struct Fetching {
    answer: CallAnswer,
    landing: ReadLanding,
    len: usize,
    range: HeldRange,
    /// Bytes that came by DMA before it failed.
    fetched: usize,
    /// In what the data that came by DMA differed from its checksums.
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
    /// Takes a reply.
    pub(super) fn reply(&mut self, frame: ChannelEntry, route: Route) -> Result<(), ChannelError> {
        let id = frame.header.id;
        let outcome = decode::<CallOutcome>(&frame.control).and_then(|(outcome, _)| outcome);
        if let Ok(CallAnswer::Coded(took)) = outcome {
            // After a failure of DMA it may come twice.
            if let Some(coded) = self.pending.get_mut(&id).and_then(|pending| pending.job.coded.take()) {
                // If nobody wants to know, all the better.
                let _ = coded.send(took.map(Duration::from_nanos));
            }
            return Ok(());
        }
        // A kill does not return, and nothing else can happen here.
        let _ = self.faults.hit(Site::OsdReply);
        let pending = self.pending.remove(&id).filter(|p| p.job.route == route);
        let Some(SentCall { job, ring_end, .. }) = pending else {
            return Err(ChannelError::Protocol(format!("a reply to request {id}, which nobody waits for")));
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
                let what = format!("the payload of request {id}, which did not come by DMA, was damaged");
                return Err(ChannelError::Protocol(what));
            }
            self.damaged(id, job);
            return Ok(());
        }
        self.written(&job);
        let Job { target, kind, answer_to: Some(answer_to), region, clock, .. } = job else {
            return Err(ChannelError::Protocol(format!("request {id} wants no answer")));
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

    /// The host has read: the data came with the answer, or is in the range and has to be fetched.
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
                let what = format!("{len} bytes were read for a buffer of {}", dest.len());
                Err(StoreError::InvalidArgument(what).into())
            }
            _ if !data.is_empty() && data.len() as u64 != len => {
                let what = format!("{} bytes came where {len} were announced", data.len());
                return Err(ChannelError::Protocol(what));
            }
            (_, Some(range)) if in_range && len > 0 => return self.fetch_data(read, answer, range),
            _ => Ok(Delivered::new(answer, vec![landed(data, read.dest)])),
        };
        self.finish(range, read.answer_to, answered);
        Ok(())
    }

    /// A call has its answer and needs its range no longer.
    fn finish(&mut self, range: Option<HeldRange>, answer_to: AnswerTo, answered: CallAnswered) {
        self.free_range(range);
        // Whoever asked may have gone; then nobody needs to know.
        let _ = answer_to.send(answered);
    }

    /// A stage that nobody waits for any more is given back.
    fn new_stage(&mut self, target: u16, host_id: u64, answer_to: AnswerTo) {
        self.last_stage += 1;
        // Unlike those of other incarnations, so that a stage that was lost with its incarnation is never taken for another.
        let id = (self.incarnation << 40) | self.last_stage;
        self.stages
            .insert(id, StageState { host_id, unposted: 0, unsure: 0, unanswered: 0, released: false });
        if answer_to.send(Ok(Delivered::new(CallAnswer::Stage(id), Vec::new()))).is_err() {
            self.stages.remove(&id);
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
                "{len} bytes were read into a range of {}",
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

    /// The DMA of a read's data has ended.
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
            // Either DMA has damaged it, or it is damaged where it was read from: the socket will tell.
            Err(why) => {
                done.doubt = Some(why);
                self.fetching.insert(id, done);
                self.get_rest(id);
            }
        }
    }

    /// The DMA of a read's data takes too long: the data comes by the socket, to other memory.
    pub(super) fn fetch_given_up(&mut self, id: u64) {
        let Some(late) = self.fetching.get_mut(&id) else { return };
        let landing = std::mem::replace(&mut late.landing, ReadLanding::Socket(None));
        self.keep(landing);
        self.get_rest(id);
    }

    /// Asks for the data of a read that has not come by DMA.
    fn get_rest(&mut self, id: u64) {
        let (Some(rest), Some(ring)) = (self.fetching.get(&id), &self.ring) else { return };
        let offset = (ring.range_offset(rest.range) + rest.fetched) as u64;
        let len = (rest.len - rest.fetched) as u64;
        let fetched = rest.fetched as u64;
        self.kept_bytes += fetched;
        self.put_bytes += len;
        metrics::counter!("outboard_proxy_kept_bytes").increment(fetched);
        metrics::counter!("outboard_proxy_fallback_bytes").increment(len);
        self.submit(Job::of_channel(ChannelCall::Get { offset, len }, ChannelKind::Get(id)));
    }

    /// Data of a read has come by the socket.
    pub(super) fn got(&mut self, id: u64, rest: Bytes) -> Result<(), ChannelError> {
        let Some(done) = self.fetching.remove(&id) else { return Ok(()) };
        if rest.len() != done.len - done.fetched {
            let what = format!("{} bytes came where {} were asked for", rest.len(), done.len - done.fetched);
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
                self.dma_failed(&format!("data of a read was damaged on its way: {why}"));
            }
            // What came by DMA before it failed may be what is wrong.
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
                debug_assert!(inside, "a range outside the mirror");
                dest.freeze()
            }
            None => {
                let mut copy = vec![0; len];
                let inside = ring.arena().copy_out(at, &mut copy);
                debug_assert!(inside, "a range outside the mirror");
                Bytes::from(copy)
            }
        }
    }
}

/// Books the time that the host had a request, which has just been answered.
fn book_host_time(clock: Option<&Clock>, elapsed_us: u32) {
    let Some(clock) = clock else { return };
    let now = Instant::now();
    if let Some(from) = now.checked_sub(Duration::from_micros(elapsed_us.into())) {
        clock.record(Phase::Host, from, now);
    }
}

/// Compares data that came by DMA with its checksums.
fn verified(answer: &CallAnswer, data: Vec<Bytes>) -> Result<Vec<Bytes>, String> {
    let CallAnswer::Read { offset, checksums, object_size, .. } = answer else { return Ok(data) };
    let checksums = unpack_checksums(checksums).map_err(|e| e.to_string())?;
    let read = ReadData { offset: *offset, data, checksums, object_size: *object_size, verified: false };
    read.verify().map_err(|e| e.to_string())?;
    Ok(read.data)
}

/// Copies `rest` to byte `at` of the buffers, one after the other.
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

/// Data that came inside a frame: in the caller's buffer, which is large enough, if there is one.
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

/// The caller's buffer if the engine can reach it, else buffers of the pool. If it has none to spare just now, the
/// mirror serves: waiting here for a buffer whose holder waits for this very incarnation could last for ever.
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
    /// Ends the incarnation for its callers: every call that has no answer fails. Returns what DMA may still use.
    pub(super) fn end(&self, why: &str) -> Leftovers {
        let mut state = self.lock();
        state.dead = Some(why.to_owned());
        state.stages.clear();
        state.range_queue.clear();
        state.ring_ready.clear();
        state.socket_ready.clear();
        state.queries.clear();
        state.held.clear();
        state.control_out.clear();
        state.lanes.iter_mut().for_each(|lane| lane.queue.clear());
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
            jobs.into_values().filter_map(|mut job| job.answer_to.take()).collect();
        for mut request in pending.into_values() {
            waiting.extend(request.job.answer_to.take());
            leftovers.requests.push(request.job);
        }
        for read in fetching.into_values() {
            waiting.push(read.answer_to);
            leftovers.landings.push(read.landing);
        }
        for answer_to in waiting {
            // Whoever asked may have gone; then nobody needs to know.
            let _ = answer_to.send(Err(CallError::Lost(why.to_owned())));
        }
        leftovers
    }
}

/// Memory of calls of a dead incarnation, kept until the engine is done with it.
#[derive(Default)]
pub(super) struct Leftovers {
    requests: Vec<Job>,
    landings: Vec<ReadLanding>,
    _dma: Dma,
    _quarantine: Quarantine,
}
