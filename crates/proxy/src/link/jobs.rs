//! Jobs: calls on their way to the host, and what they wait for.

use std::collections::VecDeque;
use std::time::Instant;

use base::block::{BLOCK, Payload, crc32c, verify_pieces};
use base::mem::ArenaBuf;
use base::phases::{self, Clock};
use base::pool::MIN_BUFFER;
use bytes::Bytes;
use channel::{Header, Kind as FrameKind, VERIFY};
use store::stripes::{Coded, FragmentBytes};
use store::{CollectionId, ObjectId, StageId, StoreError};

use super::dma::Opened;
use super::recover::Mode;
use super::{AnswerTo, CallError, HeldRange, MAX_JOBS, MAX_QUERIES, Pending, State};
use crate::messages::{
    Call, ChannelCall, NO_REPLY, ParityFrom, Place, Stripes, encode, pack_checksums, unpack_checksums,
};
use crate::transaction_codec::Encoded;

/// Longest control data and payload together that ride in an entry of the ring, in bytes.
const MAX_INLINE: usize = 12 << 10;
/// Longest read whose data rides in the reply's entry, in bytes.
const MAX_INLINE_READ: usize = 8 << 10;
/// Room for a reply without data, in bytes: an error with its text, a stat.
const SMALL_REPLY: usize = 1024;
/// Payload up to that length goes with its entry, in bytes: one chain, and nobody need be woken in between.
const SHORT: usize = 64 << 10;

/// Which way a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Ring,
    Socket,
}

/// What is done with the answer.
#[derive(Debug)]
pub(crate) enum Kind {
    /// It is passed on.
    Plain,
    /// It names a new stage.
    Stage,
    /// It tells of data that has to be fetched, if possible to there.
    Read(Option<ArenaBuf>),
    /// It concerns the channel itself.
    Channel(ChannelKind),
}

/// What is done with the answer to a call to the channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChannelKind {
    /// This window is open to DMA.
    Export(usize),
    /// Data of this read.
    Get(u64),
    /// How far the host has come.
    Positions,
    /// The rings are closed.
    Close,
    /// Host memory was offered anew.
    Offer,
    /// The probe was copied.
    Probe,
    /// The rings are open.
    Open,
}

/// Whether a job needs a range of host memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RangeUse {
    None,
    Wanted(usize),
    Held(HeldRange),
}

/// Arguments of a read.
pub(crate) struct Read {
    pub(crate) cid: CollectionId,
    pub(crate) oid: ObjectId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Length of the blocks that cover the range, in bytes.
    pub(crate) cover: usize,
    pub(crate) dest: Option<ArenaBuf>,
}

/// A call that has not been sent.
pub(crate) struct Job {
    pub(super) target: u16,
    after: u64,
    call: Call,
    /// Follows the call in the control data.
    tail: Vec<u8>,
    /// Payload, and where it goes: from the start of the range, or of the data section.
    pub(super) upload: Vec<(usize, Bytes)>,
    /// Bytes of the payload that are in the range already.
    pub(super) arrived: usize,
    pub(super) range: RangeUse,
    /// The part of host memory that the range is in, while DMA may use it.
    pub(super) region: Option<Opened>,
    reply_max: usize,
    pub(super) route: Route,
    /// The payload is where it belongs, or goes with the request.
    payload_ready: bool,
    /// Takes its place in the target's lane.
    in_lane: bool,
    /// Counted as unposted write of this stage.
    pub(super) writes_stage: Option<u64>,
    /// The host is to compare the payload with its checksums.
    suspect: bool,
    /// Counted as write of that stage that could be overtaken.
    unsure: bool,
    /// Stages whose writes must have been posted before.
    names_stages: Vec<StageId>,
    pub(super) kind: Kind,
    pub(super) answer_to: Option<AnswerTo>,
    /// Is told when parity was computed.
    pub(super) coded: Option<Coded>,
    /// When it was called, and for which of the OSD's requests.
    pub(super) since: Instant,
    pub(super) clock: Option<Clock>,
}

/// Whether a transaction rides in one entry, so that one transfer carries it all.
pub(super) fn fits_inline(encoded: &Encoded) -> bool {
    encoded.control.len() + encoded.data_len <= MAX_INLINE
}

/// Where the data section of a transaction begins in its range: at the start, as the control data rides in the entry, or, if
/// that is too long, behind the control data, on a page of its own.
fn data_at(encoded: &Encoded) -> usize {
    let control_len = encoded.control.len();
    if control_len <= MAX_INLINE { 0 } else { control_len.next_multiple_of(MIN_BUFFER) }
}

/// Length of the range that holds a transaction.
pub(super) fn range_len(encoded: &Encoded) -> usize {
    data_at(encoded) + encoded.data_len
}

impl Job {
    fn new(target: u16, after: u64, call: Call, route: Route, answer_to: Option<AnswerTo>) -> Job {
        Job {
            target,
            after,
            call,
            tail: Vec::new(),
            upload: Vec::new(),
            arrived: 0,
            range: RangeUse::None,
            region: None,
            reply_max: SMALL_REPLY,
            route,
            payload_ready: false,
            in_lane: false,
            writes_stage: None,
            suspect: false,
            unsure: false,
            names_stages: Vec::new(),
            kind: Kind::Plain,
            answer_to,
            coded: None,
            since: Instant::now(),
            clock: phases::current(),
        }
    }

    /// A call to the channel itself.
    pub(super) fn of_channel(call: ChannelCall, kind: ChannelKind) -> Job {
        Job { kind: Kind::Channel(kind), ..Job::new(0, 0, Call::Channel(call), Route::Socket, None) }
    }

    pub(super) fn on_socket(target: u16, after: u64, call: Call, kind: Kind, answer_to: AnswerTo) -> Job {
        Job { kind, ..Job::new(target, after, call, Route::Socket, Some(answer_to)) }
    }

    /// It follows no transaction, only the making of its stage: transactions that are called later wait for it.
    pub(super) fn stage_write(
        target: u16,
        stage: StageId,
        host_id: u64,
        offset: u64,
        payload: Payload,
        by_dma: bool,
        answer_to: AnswerTo,
    ) -> Job {
        let phase = payload.phase() as u16;
        let (data, checksums) = payload.into_parts();
        let checksums = pack_checksums(&checksums);
        let call = Call::StageWrite { stage: host_id, offset, phase, checksums, place: Place::Inline };
        Job {
            range: want(data.len()),
            upload: vec![(0, data)],
            writes_stage: Some(stage.0),
            ..Job::new(target, 0, call, route(by_dma), Some(answer_to))
        }
    }

    /// It follows nothing but the making of its stages, and nothing is called that names them before it is answered.
    pub(super) fn stripes(
        stripes: Stripes,
        data: Vec<FragmentBytes>,
        by_dma: bool,
        answer_to: AnswerTo,
        coded: Option<Coded>,
    ) -> Job {
        let len = stripes.len as usize;
        let fragments =
            if matches!(stripes.parity, ParityFrom::By(_)) { stripes.parts.len() } else { data.len() };
        // Fragment by fragment: DMA puts the pieces together.
        let mut upload = Vec::new();
        let mut at = 0;
        for piece in data.into_iter().flat_map(|fragment| fragment.pieces) {
            upload.push((at, piece.clone()));
            at += piece.len();
        }
        let call = Call::StageStripes { stripes, place: Place::Inline };
        Job {
            range: want(fragments * len),
            upload,
            reply_max: 2 * SMALL_REPLY,
            coded,
            ..Job::new(0, 0, call, route(by_dma), Some(answer_to))
        }
    }

    pub(super) fn transaction(
        target: u16,
        after: u64,
        encoded: Encoded,
        by_dma: bool,
        answer_to: AnswerTo,
    ) -> Job {
        let in_entry = by_dma && fits_inline(&encoded);
        let range = if in_entry { RangeUse::None } else { want(range_len(&encoded)) };
        let data_at = data_at(&encoded);
        let rides = !by_dma || data_at == 0;
        let control_len = encoded.control.len() as u32;
        let control_crc = if rides { 0 } else { crc32c(&encoded.control) };
        let (tail, upload) = if rides {
            (encoded.control, encoded.data)
        } else {
            let control = (0, Bytes::from(encoded.control));
            let data = encoded.data.into_iter().map(|(at, bytes)| (data_at + at, bytes));
            (Vec::new(), std::iter::once(control).chain(data).collect())
        };
        let call = Call::Transaction { control_len, control_crc, place: Place::Inline };
        Job {
            tail,
            upload,
            range,
            in_lane: true,
            names_stages: encoded.stages,
            ..Job::new(target, after, call, route(by_dma), Some(answer_to))
        }
    }

    pub(super) fn read(target: u16, after: u64, read: Read, by_dma: bool, answer_to: AnswerTo) -> Job {
        let Read { cid, oid, offset, len, cover, dest } = read;
        let small = cover <= MAX_INLINE_READ;
        let range = if small && by_dma { RangeUse::None } else { want(cover) };
        let data = if small { cover } else { 0 };
        let reply_max = SMALL_REPLY + cover.div_ceil(MIN_BUFFER) * 4 + data;
        let call = Call::Read { cid, oid, offset, len, place: Place::Inline };
        Job {
            range,
            reply_max,
            in_lane: true,
            kind: Kind::Read(dest),
            ..Job::new(target, after, call, route(by_dma), Some(answer_to))
        }
    }

    /// Length of the payload, in bytes.
    pub(super) fn upload_len(&self) -> usize {
        self.upload.iter().map(|(_, piece)| piece.len()).sum()
    }

    /// Whether staged data did not fit its checksums before it was sent.
    pub(super) fn was_wrong_before(&self) -> bool {
        match (&self.call, &self.upload[..]) {
            (Call::StageWrite { phase, checksums, .. }, [(_, data)]) => {
                let checksums = unpack_checksums(checksums).unwrap_or_default();
                verify_pieces(u64::from(*phase), data, &checksums).is_err()
            }
            (Call::StageStripes { stripes, .. }, pieces) => {
                let checksums = unpack_checksums(&stripes.checksums).unwrap_or_default();
                let mut checksums = &checksums[..];
                pieces.iter().any(|(_, piece)| {
                    let count = (piece.len() / BLOCK as usize).min(checksums.len());
                    let (of_piece, rest) = checksums.split_at(count);
                    checksums = rest;
                    verify_pieces(0, piece, of_piece).is_err()
                })
            }
            _ => false,
        }
    }

    /// The target's lane, if it takes its place there.
    pub(super) fn lane(&self) -> Option<usize> {
        self.in_lane.then_some(usize::from(self.target))
    }

    /// Whether it must not overtake requests that were lost with the rings.
    pub(super) fn carries_data(&self) -> bool {
        self.in_lane || self.writes_stage.is_some() || matches!(self.call, Call::StageStripes { .. })
    }

    /// Whether any of its payload goes by DMA.
    fn is_by_dma(&self) -> bool {
        self.route == Route::Ring && !self.upload.is_empty() || self.arrived > 0
    }

    /// Whether no other call waits for it.
    pub(super) fn is_query(&self) -> bool {
        self.answer_to.is_some() && matches!(self.kind, Kind::Plain | Kind::Stage) && !self.carries_data()
    }

    /// Whether its payload goes with its entry, in one chain.
    fn is_short(&self) -> bool {
        self.upload_len() <= SHORT
    }

    pub(super) fn reply_max(&self) -> usize {
        self.reply_max
    }

    fn wants_reply(&self) -> bool {
        self.answer_to.is_some() || matches!(self.kind, Kind::Channel(_))
    }

    /// The call, with the place of its payload filled in: the range, if it goes by DMA or the socket fills the range in its
    /// place. `base` is where the data region starts, `None` without one.
    fn placed_call(&self, base: Option<usize>) -> Call {
        let mut call = self.call.clone();
        let (Some(base), RangeUse::Held(range)) = (base, self.range) else { return call };
        match &mut call {
            Call::StageWrite { place, .. }
            | Call::StageStripes { place, .. }
            | Call::Transaction { place, .. } => place.put(base, range),
            Call::Read { place, .. } if self.route == Route::Ring => place.put(base, range),
            _ => {}
        }
        call
    }
}

impl Place {
    fn put(&mut self, base: usize, range: HeldRange) {
        *self = Place::Range { offset: (base + range.offset) as u64, len: range.len as u64 };
    }
}

fn route(by_dma: bool) -> Route {
    if by_dma { Route::Ring } else { Route::Socket }
}

fn want(len: usize) -> RangeUse {
    if len == 0 { RangeUse::None } else { RangeUse::Wanted(len) }
}

impl State {
    /// Whether one more call is possible, before it has a number: who waits for its answer, or `None` if that is told why
    /// not.
    pub(super) fn accept(&self, answer_to: AnswerTo) -> Option<AnswerTo> {
        let why = match &self.dead {
            Some(why) => CallError::Lost(why.clone()),
            None if self.jobs.len() + self.pending.len() >= MAX_JOBS => {
                // The drive is not to blame: the call may be made again.
                CallError::Store(StoreError::Disconnected("too many calls wait for the store".into()))
            }
            None => return Some(answer_to),
        };
        // Whoever asked may have gone; then nobody needs to know.
        let _ = answer_to.send(Err(why));
        None
    }

    /// Takes a job, and posts whatever can go. What the link has to say on its own account is never refused.
    pub(super) fn submit(&mut self, mut job: Job) {
        if self.dead.is_some() {
            return;
        }
        self.last_id += 1;
        let id = self.last_id;
        if job.route == Route::Ring && !self.is_open() {
            job.route = Route::Socket;
        }
        if job.in_lane {
            self.lanes[usize::from(job.target)].queue.push_back(id);
        }
        let wants_range = matches!(job.range, RangeUse::Wanted(_));
        self.jobs.insert(id, job);
        if wants_range {
            self.range_queue.push_back(id);
        } else {
            self.payload_ready(id);
        }
        self.pump();
    }

    /// The payload of a job is where it belongs, or goes with the request.
    pub(super) fn payload_ready(&mut self, id: u64) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if std::mem::replace(&mut job.payload_ready, true) {
            return;
        }
        if !job.in_lane {
            let stage = job.writes_stage;
            self.doubt(id);
            self.queue_of(id).push_back(id);
            self.write_posted(stage);
        }
    }

    /// Moves every job as far as it can go.
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

    /// Where a job waits that can be sent.
    fn queue_of(&mut self, id: u64) -> &mut VecDeque<u64> {
        let Some(job) = self.jobs.get(&id) else { return &mut self.socket_ready };
        match job.route {
            Route::Ring => &mut self.ring_ready,
            Route::Socket if matches!(self.mode, Mode::Closing { .. }) && job.carries_data() => {
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

    /// A job has its range. What goes by DMA needs the window that the range is in.
    fn granted(&mut self, id: u64, offset: usize) {
        if self.jobs.get(&id).is_none_or(|job| job.route == Route::Socket) {
            return self.payload_ready(id);
        }
        let window = self.regions.window_of(offset);
        if let Some(region) = self.regions.get(window) {
            let origin =
                self.ring.as_ref().map_or(0, |ring| ring.window_origin(&self.regions.range_of(window)));
            return self.use_region(id, Opened { region, origin });
        }
        if self.regions.wait(window, id) {
            let range = self.regions.range_of(window);
            let base = self.ring.as_ref().map_or(0, |ring| ring.layout().data_offset());
            let (offset, len) = ((base + range.start) as u64, range.len() as u64);
            let job = Job::of_channel(ChannelCall::Export { offset, len }, ChannelKind::Export(window));
            self.submit(job);
        }
    }

    /// A job may use DMA on its range.
    pub(super) fn use_region(&mut self, id: u64, opened: Opened) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.route == Route::Socket {
            return self.payload_ready(id);
        }
        job.region = Some(opened);
        // A short payload goes with the entry.
        if job.is_short() {
            self.payload_ready(id);
        } else {
            self.start_upload(id);
        }
    }

    /// A write of this stage is ahead of whatever gets ready from here on.
    fn write_posted(&mut self, stage: Option<u64>) {
        let Some(stage) = stage else { return };
        if let Some(staged) = self.stages.get_mut(&stage) {
            staged.unposted -= 1;
        }
    }

    /// A job is about to be posted. If it writes a stage, and a transaction that names the stage could overtake it,
    /// such transactions wait until it is answered. Without host memory all goes by the socket, in order, and nothing is
    /// sent twice.
    pub(super) fn doubt(&mut self, id: u64) {
        let (Some(job), Some(_)) = (self.jobs.get_mut(&id), &self.ring) else { return };
        let Some(stage) = job.writes_stage else { return };
        job.suspect = job.is_by_dma() && self.verify.next(&self.faults);
        if (job.suspect || job.route == Route::Socket)
            && let Some(staged) = self.stages.get_mut(&stage)
        {
            staged.unsure += u32::from(!std::mem::replace(&mut job.unsure, true));
        }
    }

    /// A write of a stage is answered.
    pub(super) fn written(&mut self, job: &Job) {
        let Some(stage) = job.writes_stage else { return };
        if let Some(staged) = self.stages.get_mut(&stage) {
            staged.unsure -= u32::from(job.unsure);
            staged.unanswered -= 1;
            self.forget_if_done(stage);
        }
    }

    /// Forgets a stage that was given back, once its writes are answered.
    pub(super) fn forget_if_done(&mut self, stage: u64) {
        if self.stages.get(&stage).is_some_and(|staged| staged.released && staged.unanswered == 0) {
            self.stages.remove(&stage);
        }
    }

    fn advance_lanes(&mut self) {
        for lane in 0..self.lanes.len() {
            while let Some(&id) = self.lanes[lane].queue.front() {
                let Some(job) = self.jobs.get(&id) else { break };
                if !job.payload_ready || !self.stages_posted(job) {
                    break;
                }
                self.lanes[lane].queue.pop_front();
                self.queue_of(id).push_back(id);
            }
        }
    }

    /// Whether the writes of the stages that a transaction names are ahead of it, and stay so.
    fn stages_posted(&self, job: &Job) -> bool {
        let mut stages = job.names_stages.iter().filter_map(|stage| self.stages.get(&stage.0));
        stages.all(|staged| staged.unposted == 0 && staged.unsure == 0)
    }

    /// Sends a job that has everything it needs.
    fn send(&mut self, id: u64) {
        let Some(mut job) = self.jobs.remove(&id) else { return };
        let base = self.ring.as_ref().map(|ring| ring.layout().data_offset());
        let mut control = encode(&job.placed_call(base));
        control.extend_from_slice(&job.tail);
        let wants_reply = job.wants_reply();
        if job.writes_stage.is_none() {
            job.suspect = job.is_by_dma() && self.verify.next(&self.faults);
        }
        let header = Header {
            after: job.after,
            reply_max: job.reply_max as u32,
            flags: if job.suspect { VERIFY } else { 0 },
            ..Header::new(FrameKind::Request, job.target, if wants_reply { id } else { NO_REPLY })
        };
        let mut ring_end = 0;
        match (job.route, &mut self.ring, job.range) {
            (Route::Ring, Some(ring), range) => ring_end = ring.send(header, &control, &job, range),
            (_, Some(_), RangeUse::Held(range)) if !matches!(job.kind, Kind::Read(_)) => {
                self.put_rest(&job, range);
                self.control_out.push((header, control, Vec::new()));
            }
            _ => {
                let pieces = job.upload.iter().map(|(_, piece)| piece.clone()).collect();
                self.control_out.push((header, control, pieces));
            }
        }
        if wants_reply {
            self.queries_out += usize::from(job.is_query());
            // What came by DMA may turn out to be damaged; then it is needed once more.
            if job.route == Route::Socket && job.arrived == 0 {
                job.upload.clear();
            }
            self.pending.insert(id, Pending { job, ring_end, sent: Instant::now() });
        }
    }

    /// A frame for the channel that is not answered.
    pub(super) fn put_on_socket(&mut self, call: ChannelCall, data: Bytes) {
        let header = Header::new(FrameKind::Request, 0, NO_REPLY);
        self.control_out.push((header, encode(&Call::Channel(call)), vec![data]));
    }

    /// Tells the host to free a stage.
    pub(super) fn release_stage(&mut self, target: u16, host_id: u64) {
        let after = self.lanes[usize::from(target)].last_transaction;
        let job = Job::new(target, after, Call::StageRelease { stage: host_id }, Route::Socket, None);
        self.submit(job);
    }
}
