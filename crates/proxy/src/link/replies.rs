//! What is done with replies, and with the data of reads.

use std::sync::Arc;

use base::mem::ArenaBuf;
use bytes::Bytes;
use channel::{Chain, ChannelError, Frame};
use store::StoreError;

use super::jobs::{Kind, Route};
use super::{AnswerTo, Answered, CallError, HeldRange, Landing, Link, Pending, RingSide, Staged, State};
use crate::wire::{Answer, Outcome, decode};

/// A read whose data is on its way.
pub(super) struct Fetching {
    answer: Answer,
    landing: Landing,
    len: usize,
    range: HeldRange,
    answer_to: AnswerTo,
}

impl State {
    /// Takes a reply. What has to be fetched first goes to `fetching`, by the request's number.
    pub(super) fn reply(
        &mut self,
        frame: Frame,
        route: Route,
        fetching: &mut std::collections::HashMap<u64, Fetching>,
    ) -> Result<(), ChannelError> {
        let id = frame.header.id;
        let pending = self.pending.remove(&id).filter(|p| p.route == route);
        let Some(Pending { target, kind, answer_to: Some(answer_to), range, reply_max, .. }) = pending else {
            return Err(ChannelError::Protocol(format!("a reply to request {id}, which nobody waits for")));
        };
        match (route, &mut self.ring) {
            (Route::Ring, Some(ring)) => ring.answered(reply_max),
            _ => self.on_socket -= 1,
        }
        let outcome = decode::<Outcome>(&frame.control).and_then(|(outcome, _)| outcome);
        let answered: Answered = match outcome {
            Ok(answer) => match (kind, answer) {
                (Kind::Stage, Answer::Stage(host_id)) => {
                    self.new_stage(target, host_id, answer_to);
                    return Ok(());
                }
                (Kind::Read(Some(dest)), Answer::Read { len, .. }) if len > dest.len() as u64 => {
                    let what = format!("{len} bytes were read for a buffer of {}", dest.len());
                    Err(StoreError::InvalidArgument(what).into())
                }
                (Kind::Read(_), Answer::Read { len, .. })
                    if !frame.data.is_empty() && frame.data.len() as u64 != len =>
                {
                    let what = format!("{} bytes came where {len} were announced", frame.data.len());
                    return Err(ChannelError::Protocol(what));
                }
                (Kind::Read(dest), answer @ Answer::Read { len, .. }) => match (range, &self.ring) {
                    (Some(range), Some(_)) if len > 0 => {
                        return self.fetch_data(id, answer, dest, range, answer_to, fetching);
                    }
                    _ => Ok((answer, vec![landed(frame.data, dest)])),
                },
                (_, answer) => Ok((answer, Vec::new())),
            },
            Err(e) => Err(CallError::Store(e)),
        };
        self.free_range(range);
        // Whoever asked may have gone; then nobody needs to know.
        let _ = answer_to.send(answered);
        Ok(())
    }

    pub(super) fn free_range(&mut self, range: Option<HeldRange>) {
        if let Some(range) = range {
            self.ranges.release(range.offset, range.order);
        }
    }

    /// A stage that nobody waits for any more is given back.
    fn new_stage(&mut self, target: u16, host_id: u64, answer_to: AnswerTo) {
        self.last_stage += 1;
        // Unlike those of other sessions, so that a stage that was lost with its session is never taken for another.
        let id = (self.generation << 40) | self.last_stage;
        self.stages.insert(id, Staged { host_id, unposted: 0, released: false });
        if answer_to.send(Ok((Answer::Stage(id), Vec::new()))).is_err() {
            self.stages.remove(&id);
            self.release_stage(target, host_id);
        }
    }

    fn fetch_data(
        &mut self,
        id: u64,
        answer: Answer,
        dest: Option<ArenaBuf>,
        range: HeldRange,
        answer_to: AnswerTo,
        fetching: &mut std::collections::HashMap<u64, Fetching>,
    ) -> Result<(), ChannelError> {
        let (Some(ring), Answer::Read { len, .. }) = (&mut self.ring, &answer) else { return Ok(()) };
        let len = usize::try_from(*len).unwrap_or(usize::MAX);
        if len > range.len {
            return Err(ChannelError::Protocol(format!(
                "{len} bytes were read into a range of {}",
                range.len
            )));
        }
        let landing = choose_landing(ring, dest, len);
        let mut chain = Chain { tag: Some(id), ..Chain::default() };
        let from = ring.range_offset(range);
        match &landing {
            Landing::Mirror(_) => ring.fetch_range(&mut chain, from, from, len),
            Landing::Buffers(buffers) => {
                let mut at = from;
                for buffer in buffers {
                    ring.fetch_range(&mut chain, at, buffer.offset(), buffer.len());
                    at += buffer.len();
                }
            }
        }
        ring.post(chain);
        fetching.insert(id, Fetching { answer, landing, len, range, answer_to });
        Ok(())
    }

    /// The data of a read has arrived.
    pub(super) fn fetched(&mut self, done: Fetching) {
        let Fetching { answer, landing, len, range, answer_to } = done;
        let data = match landing {
            Landing::Buffers(buffers) => buffers.into_iter().map(ArenaBuf::freeze).collect(),
            Landing::Mirror(dest) => vec![self.copy_from_mirror(range, len, dest)],
        };
        self.free_range(Some(range));
        // Whoever asked may have gone; then nobody needs to know.
        let _ = answer_to.send(Ok((answer, data)));
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
/// mirror serves: waiting here for a buffer whose holder waits for this very session could last for ever.
fn choose_landing(ring: &RingSide, dest: Option<ArenaBuf>, len: usize) -> Landing {
    if let Some(mut dest) = dest {
        if Arc::ptr_eq(dest.arena(), ring.arena()) {
            dest.truncate(len);
            return Landing::Buffers(vec![dest]);
        }
        return Landing::Mirror(Some(dest));
    }
    let pool = ring.memory().pool();
    let mut buffers = Vec::new();
    for at in (0..len).step_by(pool.largest()) {
        match pool.try_alloc(pool.largest().min(len - at)) {
            Ok(Some(buffer)) => buffers.push(buffer),
            _ => return Landing::Mirror(None),
        }
    }
    Landing::Buffers(buffers)
}

impl Link {
    /// Ends the session for its callers: every call that has no answer fails. Returns what DMA may still use.
    pub(super) fn end(&self, why: &str) -> Vec<Leftover> {
        let mut state = self.lock();
        state.dead = Some(why.to_owned());
        state.stages.clear();
        state.range_queue.clear();
        state.ring_ready.clear();
        state.socket_ready.clear();
        state.control_out.clear();
        state.lanes.iter_mut().for_each(|lane| lane.queue.clear());
        let jobs = std::mem::take(&mut state.jobs);
        let pending = std::mem::take(&mut state.pending);
        drop(state);
        let mut waiting: Vec<AnswerTo> =
            jobs.into_values().filter_map(|mut job| job.take_answer_to()).collect();
        let mut leftovers = Vec::new();
        for mut request in pending.into_values() {
            waiting.extend(request.answer_to.take());
            leftovers.push(Leftover { _holds: request.holds, _kind: request.kind });
        }
        for answer_to in waiting {
            // Whoever asked may have gone; then nobody needs to know.
            let _ = answer_to.send(Err(CallError::Lost(why.to_owned())));
        }
        leftovers
    }
}

impl Fetching {
    /// Fails the read; its buffers stay until DMA is done.
    pub(super) fn fail(self, why: &str) -> Landing {
        // Whoever asked may have gone; then nobody needs to know.
        let _ = self.answer_to.send(Err(CallError::Store(StoreError::Disconnected(why.to_owned()))));
        self.landing
    }
}

/// Memory of a request of a dead session, kept until the engine is done with it.
pub(super) struct Leftover {
    _holds: Vec<(usize, Bytes)>,
    _kind: Kind,
}
