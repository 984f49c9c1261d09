//! Jobs: calls on their way to the host, and what they wait for.

use base::block::Payload;
use base::mem::ArenaBuf;
use base::pool::MIN_BUFFER;
use bytes::Bytes;
use channel::{Header, Kind as FrameKind};
use store::{CollectionId, ObjectId, StageId, StoreError};

use super::{AnswerTo, CallError, HeldRange, MAX_JOBS, MAX_ON_SOCKET, Pending, State};
use crate::transaction_codec::Encoded;
use crate::wire::{Call, NO_REPLY, Place, encode, pack_checksums};

/// Longest control data and payload together that ride in an entry of the ring, in bytes.
const MAX_INLINE: usize = 12 << 10;
/// Longest read whose data rides in the reply's entry, in bytes.
const MAX_INLINE_READ: usize = 8 << 10;
/// Room for a reply without data, in bytes: an error with its text, a stat.
const SMALL_REPLY: usize = 1024;

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
    target: u16,
    after: u64,
    call: Call,
    /// Follows the call in the control data.
    tail: Vec<u8>,
    /// Payload, and where it goes: from the start of the range, or of the data section.
    upload: Vec<(usize, Bytes)>,
    range: RangeUse,
    reply_max: usize,
    route: Route,
    /// Takes its place in the target's lane.
    in_lane: bool,
    /// Counted as unposted write of this stage.
    writes_stage: Option<u64>,
    /// Stages whose writes must have been posted before.
    names_stages: Vec<StageId>,
    kind: Kind,
    answer_to: Option<AnswerTo>,
}

/// Whether a transaction rides in one entry, so that one transfer carries it all.
pub(super) fn fits_inline(encoded: &Encoded) -> bool {
    encoded.control.len() + encoded.data_len <= MAX_INLINE
}

/// Length of the range that holds a transaction: control data, then the data section on a page of its own.
pub(super) fn range_len(encoded: &Encoded) -> usize {
    encoded.control.len().next_multiple_of(MIN_BUFFER) + encoded.data_len
}

impl Job {
    fn new(target: u16, after: u64, call: Call, route: Route, answer_to: Option<AnswerTo>) -> Job {
        Job {
            target,
            after,
            call,
            tail: Vec::new(),
            upload: Vec::new(),
            range: RangeUse::None,
            reply_max: SMALL_REPLY,
            route,
            in_lane: false,
            writes_stage: None,
            names_stages: Vec::new(),
            kind: Kind::Plain,
            answer_to,
        }
    }

    pub(super) fn on_socket(target: u16, after: u64, call: Call, kind: Kind, answer_to: AnswerTo) -> Job {
        Job { kind, ..Job::new(target, after, call, Route::Socket, Some(answer_to)) }
    }

    #[expect(clippy::too_many_arguments, reason = "each is one field of the message")]
    pub(super) fn stage_write(
        target: u16,
        after: u64,
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
            ..Job::new(target, after, call, route(by_dma), Some(answer_to))
        }
    }

    pub(super) fn transaction(
        target: u16,
        after: u64,
        encoded: Encoded,
        by_dma: bool,
        answer_to: AnswerTo,
    ) -> Job {
        let inline = !by_dma || fits_inline(&encoded);
        let range = if inline && by_dma { RangeUse::None } else { want(range_len(&encoded)) };
        let control_len = encoded.control.len() as u32;
        let (tail, upload) = if inline {
            (encoded.control, encoded.data)
        } else {
            let data_at = encoded.control.len().next_multiple_of(MIN_BUFFER);
            let control = (0, Bytes::from(encoded.control));
            let data = encoded.data.into_iter().map(|(at, bytes)| (data_at + at, bytes));
            (Vec::new(), std::iter::once(control).chain(data).collect())
        };
        let call = Call::Transaction { control_len, place: Place::Inline };
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

    pub(super) fn take_answer_to(&mut self) -> Option<AnswerTo> {
        self.answer_to.take()
    }

    /// The call, with the place of its payload filled in; `base` is where the data region starts.
    fn placed_call(&self, base: usize) -> Call {
        let mut call = self.call.clone();
        if let (
            Call::StageWrite { place, .. } | Call::Transaction { place, .. } | Call::Read { place, .. },
            RangeUse::Held(range),
            Route::Ring,
        ) = (&mut call, self.range, self.route)
        {
            *place = Place::Range { offset: (base + range.offset) as u64, len: range.len as u64 };
        }
        call
    }
}

fn route(by_dma: bool) -> Route {
    if by_dma { Route::Ring } else { Route::Socket }
}

fn want(len: usize) -> RangeUse {
    if len == 0 { RangeUse::None } else { RangeUse::Wanted(len) }
}

impl State {
    /// Takes a job, and posts whatever can go.
    pub(super) fn submit(&mut self, mut job: Job) {
        let refusal = match &self.dead {
            Some(why) => Some(CallError::Lost(why.clone())),
            // A transaction that has its number must go.
            None if self.jobs.len() >= MAX_JOBS && !job.in_lane => {
                Some(CallError::Store(StoreError::Io("too many calls wait for the store".into())))
            }
            None => None,
        };
        if let Some(why) = refusal {
            self.write_posted(job.writes_stage);
            if let Some(answer_to) = job.answer_to.take() {
                // Whoever asked may have gone; then nobody needs to know.
                let _ = answer_to.send(Err(why));
            }
            return;
        }
        self.last_id += 1;
        let id = self.last_id;
        if job.in_lane {
            self.lanes[usize::from(job.target)].queue.push_back(id);
        }
        match job.range {
            RangeUse::Wanted(_) => self.range_queue.push_back(id),
            _ if !job.in_lane => {
                self.queue_of(job.route).push_back(id);
                self.write_posted(job.writes_stage);
            }
            _ => {}
        }
        self.jobs.insert(id, job);
        self.pump();
    }

    /// Moves every job as far as it can go.
    pub(super) fn pump(&mut self) {
        self.grant_ranges();
        self.advance_lanes();
        while self.ring.as_ref().is_some_and(super::RingSide::has_credit) {
            let Some(id) = self.ring_ready.front().copied() else { break };
            let needed = self.jobs.get(&id).map_or(0, |job| job.reply_max);
            if !self.ring.as_ref().is_some_and(|ring| ring.has_room_for_reply(needed)) {
                break;
            }
            self.ring_ready.pop_front();
            self.send(id);
        }
        while self.on_socket < MAX_ON_SOCKET {
            let Some(id) = self.socket_ready.pop_front() else { break };
            self.send(id);
        }
    }

    fn queue_of(&mut self, route: Route) -> &mut std::collections::VecDeque<u64> {
        match route {
            Route::Ring => &mut self.ring_ready,
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
                if !job.in_lane {
                    let (route, stage) = (job.route, job.writes_stage);
                    self.queue_of(route).push_back(id);
                    self.write_posted(stage);
                }
            }
            self.range_queue.pop_front();
        }
    }

    /// A write of this stage is ahead of whatever gets ready from here on.
    fn write_posted(&mut self, stage: Option<u64>) {
        let Some(stage) = stage else { return };
        if let Some(staged) = self.stages.get_mut(&stage) {
            staged.unposted = staged.unposted.saturating_sub(1);
            self.forget_if_done(stage);
        }
    }

    /// Forgets a stage that was given back, once nothing of it is on the way to be posted.
    pub(super) fn forget_if_done(&mut self, stage: u64) {
        if self.stages.get(&stage).is_some_and(|staged| staged.released && staged.unposted == 0) {
            self.stages.remove(&stage);
        }
    }

    fn advance_lanes(&mut self) {
        for lane in &mut self.lanes {
            while let Some(job) = lane.queue.front().and_then(|id| self.jobs.get(id)) {
                let stages_posted = || {
                    job.names_stages
                        .iter()
                        .all(|stage| self.stages.get(&stage.0).is_none_or(|staged| staged.unposted == 0))
                };
                if matches!(job.range, RangeUse::Wanted(_)) || !stages_posted() {
                    break;
                }
                let ready = match job.route {
                    Route::Ring => &mut self.ring_ready,
                    Route::Socket => &mut self.socket_ready,
                };
                ready.extend(lane.queue.pop_front());
            }
        }
    }

    /// Sends a job that has everything it needs.
    fn send(&mut self, id: u64) {
        let Some(mut job) = self.jobs.remove(&id) else { return };
        let base = self.ring.as_ref().map_or(0, |ring| ring.layout().data_offset());
        let mut control = encode(&job.placed_call(base));
        control.append(&mut job.tail);
        let header = Header {
            after: job.after,
            reply_max: job.reply_max as u32,
            ..Header::new(FrameKind::Request, job.target, if job.answer_to.is_some() { id } else { NO_REPLY })
        };
        let range = match job.range {
            RangeUse::Held(range) => Some(range),
            _ => None,
        };
        let holds = match (job.route, &mut self.ring) {
            (Route::Ring, Some(ring)) => {
                ring.send(header, &control, &job.upload, range);
                job.upload
            }
            _ => {
                let pieces = job.upload.into_iter().map(|(_, piece)| piece).collect();
                self.control_out.push((header, control, pieces));
                Vec::new()
            }
        };
        let Job { target, kind, answer_to, reply_max, route, .. } = job;
        if answer_to.is_some() {
            self.on_socket += usize::from(route == Route::Socket);
            self.pending.insert(id, Pending { target, kind, answer_to, range, holds, reply_max, route });
        }
    }

    /// Tells the host to free a stage.
    pub(super) fn release_stage(&mut self, target: u16, host_id: u64) {
        let after = self.lanes[usize::from(target)].last_transaction;
        let job = Job::new(target, after, Call::StageRelease { stage: host_id }, Route::Socket, None);
        self.submit(job);
    }
}
