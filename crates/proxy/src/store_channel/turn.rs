//! The turns of the store channel: an event changes the state, and then every job advances as far
//! as possible.
//!
//! An event only queues jobs. The functions that send them are private to this module and run at
//! the end of the turn, so a job is never sent while another job is being queued or sent.

use base::clock::Instant;
use channel::ChannelError;

use super::control_output::ControlFrame;
use super::job::{ChannelKind, Job, Route};
use super::regions::OpenedWindow;
use super::{RingSide, State, StoreChannel};
use crate::messages::ChannelCall;

impl StoreChannel {
    /// Handles a call of the osd. Wakes the driver if it has work afterwards: frames for the
    /// control socket, chains to post, or transfers to watch.
    pub(super) fn caller_turn(&self, call: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        call(&mut state);
        state.advance();
        let output = !state.output.is_empty() || state.ring.as_ref().is_some_and(RingSide::has_unposted);
        let unwatched = !state.watched && state.has_work();
        drop(state);
        if output || unwatched {
            self.driver.wake();
        }
    }

    /// Handles an event of the driver. After an error, the incarnation ends, so no job advances.
    pub(super) fn driver_turn<R>(
        &self,
        event: impl FnOnce(&mut State) -> Result<R, ChannelError>,
    ) -> Result<R, ChannelError> {
        let mut state = self.lock();
        let result = event(&mut state)?;
        state.advance();
        Ok(result)
    }
}

impl State {
    /// Advances every job as far as possible. No step makes work for an earlier step, so each step
    /// runs once.
    fn advance(&mut self) {
        self.grant_ranges();
        self.advance_lanes();
        while let Some(id) = self.next_for_ring() {
            self.send(id);
        }
        while let Some(id) = self.queues.take_for_socket() {
            self.send(id);
        }
    }

    fn grant_ranges(&mut self) {
        while let Some(id) = self.queues.first_for_range() {
            let job = self.calls.job_mut(id);
            let len = job.wanted_range().expect("only jobs that want a range wait for one");
            let Some(range) = self.ranges.take(len) else { return };
            self.queues.range_taken(id);
            let offset = range.offset();
            job.grant(range);
            self.granted(id, offset);
        }
    }

    /// Continues a job that received its range. For a job on the ring, the window that contains the
    /// range must first be open to DMA.
    fn granted(&mut self, id: u64, offset: usize) {
        let job = self.calls.job_mut(id);
        if job.route() == Route::Socket {
            job.skip_window();
            return self.job_ready(id);
        }
        let window = self.regions.window_of(offset);
        let range = self.regions.range_of(window);
        let origin = self.ring.as_ref().expect("a job on the ring has a ring").window_origin(&range);
        if let Some(region) = self.regions.get(window) {
            return self.use_window(id, OpenedWindow { region, origin });
        }
        if self.regions.wait(window, id) {
            let call = ChannelCall::Export { offset: origin as u64, len: range.len() as u64 };
            self.enqueue(Job::of_channel(call, ChannelKind::Export(window)));
        }
    }

    fn advance_lanes(&mut self) {
        let mut is_done = false;
        // A job in several lanes may hold up a lane that was visited before.
        while !is_done {
            is_done = true;
            for lane in 0..self.lanes.count() {
                while let Some(id) = self.next_in_lane(lane) {
                    let job = self.calls.job(id);
                    is_done &= job.lanes().count() <= 1;
                    self.lanes.pop(id, job.lanes());
                    let queue = self.queue_of(id);
                    self.queues.push_back(queue, id);
                }
            }
        }
    }

    /// The first job of a lane, if it may be sent now. A job in several lanes must be the first in
    /// each of them.
    fn next_in_lane(&self, lane: usize) -> Option<u64> {
        let id = self.lanes.first(lane)?;
        let job = self.calls.job(id);
        let may_go = job.is_ready()
            && self.lanes.is_first(id, job.lanes())
            && self.stages.writes_precede(job.named_stages());
        may_go.then_some(id)
    }

    /// Takes the next job for the ring, if the rings have room for it and its reply.
    fn next_for_ring(&mut self) -> Option<u64> {
        let id = self.queues.first_for_ring().filter(|_| self.is_open())?;
        let ring = self.ring.as_ref()?;
        let has_room = ring.has_credit() && ring.has_room_for_reply(self.calls.job(id).reply_max());
        if has_room { self.queues.take_for_ring() } else { None }
    }

    /// Sends a job that has everything it needs.
    fn send(&mut self, id: u64) {
        let mut job = self.calls.take(id);
        let control = job.encode(self.ring.as_ref().map(|ring| ring.layout().data_offset()));
        if job.written_stage().is_none() {
            job.choose_check(&mut self.verify);
        }
        let header = job.header(id);
        let mut ring_end = 0;
        match (job.route(), &mut self.ring) {
            (Route::Ring, Some(ring)) => ring_end = ring.send(header, &control, &mut job),
            (Route::Ring, None) => panic!("a job on the ring has a ring"),
            (Route::Socket, Some(_)) if job.is_put() => {
                self.put_rest(&job);
                self.output.push(ControlFrame { header, control, data: Vec::new() });
            }
            (Route::Socket, _) => {
                let data = job.upload().iter().map(|(_, piece)| piece.clone()).collect();
                self.output.push(ControlFrame { header, control, data });
            }
        }
        if job.wants_reply() {
            job.drop_sent_payload();
            self.calls.sent(id, job, ring_end, Instant::now());
        }
    }
}
