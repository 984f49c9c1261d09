//! How the store channel handles a failure of DMA: the control socket takes over, and a probe
//! decides when DMA is used again.
//!
//! ```text
//!  Open ──failure──▶ Closing ──the host has answered──▶ Closed ──cool-down over──▶ Probing ──it worked──▶ Open
//!                                                         ▲                           │
//!                                                         └──────── it failed ────────┘
//! ```
//!
//! *Closing*: The store channel tells the host to stop using the rings, and the host reports which
//! requests it has taken. The host answers those requests over the control socket. The store
//! channel sends all other requests again over the control socket, except for payload that has
//! already arrived. Requests that carry data wait for the host's report, so that they do not
//! overtake lost requests. Other requests do not wait.
//!
//! *Closed*: The control socket carries everything. Memory that transfers may still write is in
//! quarantine. The store channel posts a fence on every queue of the engine, behind these
//! transfers. The quarantine ends when all fences are complete. If they are not complete after the
//! cool-down, the store channel resets the engine.
//!
//! *Probing*: The store channel makes a small transfer in each direction, each with a doorbell. The
//! result decides whether DMA is used again. Some engines lose their peer at a failure. The store
//! channel first attaches such an engine again, to a new offer of host memory.

use std::time::Duration;

use base::clock::Instant;
use bytes::Bytes;
use channel::ofi::OfiOffer;
use channel::ring::CELL;
use channel::{Bell, Chain, ChainCompletion, ChannelEntry, ChannelError, Joined, Transfer, URGENT};

use super::call_table::SentCall;
use super::job::{ChannelKind, Job, Route};
use super::job_queues::JobQueue;
use super::mode::{DmaState, ProbeStep};
use super::reply_side::ReplySide;
use super::{RingSide, State};
use crate::messages::{CallAnswer, CallOutcome, ChannelCall, decode};

/// Length of a probe, in bytes.
const PROBE: usize = 4096;
/// Time limit for the host's report, as a multiple of the limit for a transfer. The incarnation
/// ends if the host exceeds it.
const PATIENCE: u32 = 20;
/// Maximum interval of the checks during recovery.
const SOON: Duration = Duration::from_millis(50);
/// Tag of the fence on queue 0. The fence on queue n has the tag `FENCE - n`.
const FENCE: u64 = u64::MAX - 8;
/// Tag of the probe's transfers.
const PROBE_TAG: u64 = u64::MAX - 1;

impl State {
    pub(super) fn is_open(&self) -> bool {
        self.mode == DmaState::Open
    }

    /// Switches to the control socket after a transfer failed, became overdue or delivered damaged
    /// data.
    pub(super) fn dma_failed(&mut self, why: &str) {
        if !self.is_open() {
            return;
        }
        let Some(ring) = &self.ring else { return };
        let taken = ring.taken();
        self.health.failed(why, Instant::now());
        self.mode = DmaState::Closing { since: Instant::now() };
        // Other transfers may have damaged data without being detected, so verify the next
        // requests.
        self.verify.suspect();
        self.quarantine_everything();
        // Forget all windows: a broken mapping may have caused the failure, and would cause another
        // failure.
        self.regions.forget();
        self.reroute();
        self.enqueue(Job::of_channel(ChannelCall::Close { taken }, ChannelKind::Close));
    }

    /// Posts fences, and quarantines the payload of requests on the ring.
    fn quarantine_everything(&mut self) {
        self.post_fences();
        for call in self.calls.sent_calls().filter(|call| call.job().route() == Route::Ring) {
            let window = call.job().in_window().map(|(_, window)| window.clone());
            self.ranges.keep((call.job().upload().to_vec(), window));
        }
    }

    fn post_fences(&mut self) {
        let Some(ring) = &mut self.ring else { return };
        let queues = ring.engine().queues();
        self.ranges.add_fences(queues);
        for queue in 0..queues {
            ring.post(queue, Chain { tag: Some(FENCE - queue as u64), ..Chain::default() });
        }
    }

    /// Moves all unsent jobs from the ring to the control socket.
    fn reroute(&mut self) {
        self.calls.jobs_mut().for_each(Job::leave_ring);
        self.queues.leave_ring(|id| self.calls.job(id).carries_data());
        for id in self.regions.give_up() {
            self.calls.job_mut(id).skip_window();
            self.job_ready(id);
        }
        self.give_up_waiting();
    }

    /// Handles the host's report that it no longer uses the rings. The host has taken `taken` bytes
    /// of requests.
    fn closed(&mut self, taken: u64) {
        self.mode = DmaState::Closed;
        let mut ids = self.calls.leave_ring(taken);
        metrics::counter!("outboard_proxy_lost_entries").increment(ids.len() as u64);
        // A job without a lane is sent at once. Other jobs return to their lanes, and wait there
        // for the stage writes that they depend on. These writes may be sent again.
        ids.extend(self.queues.take_held());
        let has_lane = |id: &u64| self.calls.job(*id).is_in_lane();
        let (mut in_lanes, at_once): (Vec<u64>, Vec<u64>) = ids.into_iter().partition(has_lane);
        in_lanes.sort_unstable();
        for id in in_lanes.into_iter().rev() {
            self.lanes.push_front(id, self.calls.job(id).lanes());
        }
        for id in at_once.into_iter().rev() {
            self.doubt(id);
            self.queues.push_front(JobQueue::Socket, id);
        }
    }

    /// Sends a request again over the control socket, because the host found its payload damaged.
    /// If the payload was damaged in this process, the host refuses the request.
    pub(super) fn damaged(&mut self, id: u64, mut job: Job) {
        if !job.was_wrong_before() {
            self.dma_failed("payload was damaged during its transfer");
        }
        job.found_damaged();
        self.calls.put_back(id, job);
        self.doubt(id);
        let is_closing = matches!(self.mode, DmaState::Closing { .. });
        self.queues.push_front(if is_closing { JobQueue::Held } else { JobQueue::Socket }, id);
    }

    /// Handles a completion that belongs to the recovery. Returns `false` for any other completion.
    pub(super) fn recovery_completed(&mut self, completion: &ChainCompletion) -> bool {
        if completion.tag == PROBE_TAG {
            self.probe_moved(completion);
            return true;
        }
        let queues = self.ring.as_ref().map_or(0, |ring| ring.engine().queues()) as u64;
        if !(FENCE - queues < completion.tag && completion.tag <= FENCE) {
            return false;
        }
        // A fence that a reset has cancelled counts as well: after the reset, no earlier transfer
        // moves data.
        self.ranges.fence_completed();
        true
    }

    /// Handles transfers, replies and recovery steps that are overdue.
    pub(super) fn tick(&mut self, now: Instant) {
        if let Some(then) = now.checked_sub(self.overdue) {
            self.give_up_overdue(then);
            self.look_at_rings(then, now);
        }
        match self.mode {
            DmaState::Open => {}
            DmaState::Closing { since } => {
                if now.duration_since(since) > self.overdue * PATIENCE {
                    self.fatal = Some("the store did not report its ring positions in time".to_owned());
                }
            }
            DmaState::Closed => {
                if self.health.probe_at().is_some_and(|at| at <= now) {
                    self.try_probe(now);
                }
            }
            DmaState::Probing { since, step } => {
                if step != ProbeStep::Attaching && now.duration_since(since) > self.overdue {
                    self.probe_failed("the probe is overdue");
                } else if step == ProbeStep::Unheard {
                    self.ask_for_echo();
                }
            }
        }
    }

    /// When to call `tick` next, or `None` if nothing can become overdue.
    pub(super) fn next_tick(&self, now: Instant) -> Option<Instant> {
        let step = self.overdue / 4;
        self.has_work().then(|| match self.mode {
            DmaState::Open | DmaState::Closing { .. } => now + step,
            DmaState::Closed | DmaState::Probing { .. } => now + step.min(SOON),
        })
    }

    /// Checks for late replies: either the store is slow, or a doorbell or an entry was lost.
    fn look_at_rings(&mut self, then: Instant, now: Instant) {
        if !self.is_open() {
            return;
        }
        if self.replies.is_overdue(then) {
            return self.dma_failed("the fetch of replies is overdue");
        }
        let taken = self.ring.as_ref().map_or(0, RingSide::taken);
        if self.replies.has_missed_bell(taken, self.overdue / 4, now) {
            return self.dma_failed("a doorbell did not reach the osd");
        }
        let late = self.calls.sent_calls().any(|call| call.was_on_ring() && call.sent() < then);
        if late && self.replies.asks_positions(then, now) {
            self.enqueue(Job::of_channel(ChannelCall::Positions, ChannelKind::Positions));
        }
    }

    /// Handles the host's report of its ring positions.
    fn positions(&mut self, taken: u64, head: u64) {
        let Some(asked) = self.replies.asked_positions() else { return };
        let is_late = |call: &SentCall| call.is_missing(taken) && call.sent() + self.overdue < asked;
        if self.calls.sent_calls().any(is_late) {
            self.dma_failed("an entry or a doorbell did not reach the host");
        } else {
            // The doorbell for new replies may still be on the way.
            self.replies.expect_bell(head, Instant::now());
        }
    }

    fn try_probe(&mut self, now: Instant) {
        if self.ranges.has_quarantine() {
            if let Some(ring) = self.ring.as_ref().filter(|_| self.ranges.needs_reset()) {
                tracing::warn!("transfers are still under way after the cool-down: the engine is reset");
                metrics::counter!("outboard_channel_engine_resets").increment(1);
                ring.engine().reset();
            }
            return;
        }
        // Wait while the host still works on requests from the rings.
        if self.calls.sent_calls().any(SentCall::was_on_ring) || !self.health.begin_probe(now) {
            return;
        }
        self.mode = DmaState::Probing { since: now, step: ProbeStep::Offering };
        if self.ring.as_ref().is_some_and(|ring| ring.engine().attaches_anew()) {
            self.enqueue(Job::of_channel(ChannelCall::Offer, ChannelKind::Offer));
        } else {
            self.probe();
        }
    }

    /// Handles a new offer of memory from the host. The driver then attaches to the offered memory.
    fn offered(&mut self, offer: OfiOffer) {
        if matches!(self.mode, DmaState::Probing { step: ProbeStep::Offering, .. }) {
            self.step(ProbeStep::Attaching);
            self.offer = Some(offer);
        }
    }

    /// Takes the host's offer that the driver must attach to, if there is one.
    pub(super) fn take_offer(&mut self) -> Option<OfiOffer> {
        self.offer.take()
    }

    /// Whether the driver should continue to attach the engine.
    pub(super) fn is_attaching(&self) -> bool {
        matches!(self.mode, DmaState::Probing { step: ProbeStep::Attaching, .. })
    }

    /// Handles the result of an attempt to attach. Returns the new doorbell if it succeeded.
    pub(super) fn attached(&mut self, joined: Result<Joined, ChannelError>) -> Option<Box<dyn Bell>> {
        let ring = self.ring.as_mut()?;
        match joined.and_then(|(peer, bell)| ring.join(peer).map(|()| bell)) {
            Ok(bell) => {
                self.regions.forget();
                self.probe();
                Some(bell)
            }
            Err(e) => {
                self.probe_failed(&format!("the engine cannot attach to host memory again: {e}"));
                None
            }
        }
    }

    /// Starts the probe: writes random bytes into the inbound ring by DMA and rings the host's
    /// doorbell.
    fn probe(&mut self) {
        self.mode = DmaState::Probing { since: Instant::now(), step: ProbeStep::There };
        self.replies.begin_probe();
        let Some(ring) = &mut self.ring else { return };
        let (inbound, pattern) =
            (ring.layout().inbound(), base::entropy::random::<[u8; 32]>().repeat(PROBE / 32));
        let inside = ring.arena().copy_in(inbound.offset, &pattern);
        assert!(inside, "the ring is inside its memory");
        self.probe_pattern = pattern;
        let transfer = ring.rings_transfer(inbound.offset, PROBE, true);
        self.post_probe(transfer, true);
    }

    fn post_probe(&mut self, transfer: Transfer, rings: bool) {
        let Some(ring) = &mut self.ring else { return };
        let bell = ring.peer().filter(|_| rings).map(|peer| (peer, CELL as u64));
        ring.post(
            URGENT,
            Chain { transfers: vec![transfer], ring: bell, tag: Some(PROBE_TAG), ..Chain::default() },
        );
    }

    fn step(&mut self, to: ProbeStep) {
        if let DmaState::Probing { step, .. } = &mut self.mode {
            *step = to;
        }
    }

    fn probe_moved(&mut self, completion: &ChainCompletion) {
        let DmaState::Probing { step, .. } = self.mode else { return };
        match (&completion.result, step) {
            (Err(failed), _) => {
                self.reset_failed_device();
                self.probe_failed(&failed.to_string());
            }
            (Ok(()), ProbeStep::There) => self.ask_for_echo(),
            (Ok(()), ProbeStep::Back) => {
                let Some(ring) = &self.ring else { return };
                let mut bytes = vec![0; PROBE];
                let inside = ring.arena().copy_out(ring.layout().outbox().offset, &mut bytes);
                if !inside || bytes != self.probe_pattern {
                    return self.probe_failed("the probe's data came back damaged");
                }
                self.step(ProbeStep::Bell);
                self.bell_during_probe();
            }
            _ => {}
        }
    }

    /// Resets the engine after a transfer of a probe has failed, because a device may fail all
    /// transfers until it is reset. An engine that attaches again for each probe needs no reset.
    fn reset_failed_device(&self) {
        if let Some(ring) = self.ring.as_ref().filter(|ring| !ring.engine().attaches_anew()) {
            tracing::warn!("a transfer of a probe has failed: the engine is reset");
            metrics::counter!("outboard_channel_engine_resets").increment(1);
            ring.engine().reset();
        }
    }

    fn ask_for_echo(&mut self) {
        self.step(ProbeStep::Echo);
        self.enqueue(Job::of_channel(ChannelCall::Probe { len: PROBE as u32 }, ChannelKind::Probe));
    }

    /// Handles the answer to the request to copy the probe. `rung` is 0 if the host has not
    /// received the doorbell yet; otherwise the host has copied the probe.
    fn echoed(&mut self, rung: u64) {
        if !matches!(self.mode, DmaState::Probing { step: ProbeStep::Echo, .. }) {
            return;
        }
        if rung == 0 {
            return self.step(ProbeStep::Unheard);
        }
        self.step(ProbeStep::Back);
        let Some(ring) = &self.ring else { return };
        let transfer = ring.rings_transfer(ring.layout().outbox().offset, PROBE, false);
        self.post_probe(transfer, false);
    }

    /// Opens the rings if the probe's data was correct and the host has rung the osd's doorbell.
    pub(super) fn bell_during_probe(&mut self) {
        if matches!(self.mode, DmaState::Probing { step: ProbeStep::Bell, .. })
            && self.replies.was_rung_in_probe()
        {
            self.step(ProbeStep::Opening);
            self.enqueue(Job::of_channel(ChannelCall::Open, ChannelKind::Open));
        }
    }

    fn probe_failed(&mut self, why: &str) {
        if !matches!(self.mode, DmaState::Probing { .. }) {
            // The answer belongs to a probe that has ended.
            return;
        }
        let opening = matches!(self.mode, DmaState::Probing { step: ProbeStep::Opening, .. });
        self.mode = DmaState::Closed;
        self.health.probed(Err(why), Instant::now());
        self.post_fences();
        if opening {
            // The host may have opened its rings, but the store channel has sent no requests
            // through them yet.
            if let Some(ring) = &mut self.ring {
                ring.start_over();
            }
            self.mode = DmaState::Closing { since: Instant::now() };
            self.enqueue(Job::of_channel(ChannelCall::Close { taken: 0 }, ChannelKind::Close));
        }
    }

    fn opened(&mut self) {
        if !matches!(self.mode, DmaState::Probing { step: ProbeStep::Opening, .. }) {
            return;
        }
        if let Some(ring) = &mut self.ring {
            ring.start_over();
        }
        self.replies = ReplySide::default();
        self.mode = DmaState::Open;
        self.health.probed(Ok(()), Instant::now());
    }

    /// Handles the answer to a call to the channel.
    pub(super) fn channel_answered(
        &mut self,
        kind: ChannelKind,
        frame: ChannelEntry,
    ) -> Result<(), ChannelError> {
        let outcome = decode::<CallOutcome>(&frame.control).and_then(|(outcome, _)| outcome);
        match (kind, outcome) {
            (ChannelKind::Export(window), Ok(CallAnswer::Done)) => self.exported(window),
            (ChannelKind::Get(id), Ok(CallAnswer::Done)) => return self.got(id, frame.data),
            (ChannelKind::Positions, Ok(CallAnswer::Positions { taken, head })) => {
                self.positions(taken, head)
            }
            (ChannelKind::Close, Ok(CallAnswer::Positions { taken, .. })) => self.closed(taken),
            (ChannelKind::Probe, Ok(CallAnswer::Probed { rung })) => self.echoed(rung),
            (ChannelKind::Offer, Ok(CallAnswer::Offer(offer))) => self.offered(offer),
            (ChannelKind::Offer | ChannelKind::Probe | ChannelKind::Open, Err(e)) => {
                self.probe_failed(&e.to_string())
            }
            (ChannelKind::Open, Ok(CallAnswer::Done)) => self.opened(),
            (kind, outcome) => {
                let what = format!("{outcome:?} is not a valid answer to {kind:?}");
                return Err(ChannelError::Protocol(what));
            }
        }
        Ok(())
    }

    /// Handles the host's answer that a window is open to DMA, and resumes the jobs that wait for
    /// it.
    fn exported(&mut self, window: usize) {
        let Some(ring) = &self.ring else { return };
        match ring.open_window(self.regions.range_of(window)) {
            Ok(opened) => {
                for id in self.regions.opened(window, &opened.region) {
                    self.use_window(id, opened.clone());
                }
            }
            Err(e) => self.dma_failed(&e.to_string()),
        }
    }
}

/// Maximum payload of one frame that replaces a DMA transfer, in bytes.
const PUT: usize = 1 << 20;

impl State {
    /// Sends the part of a job's payload that DMA has not moved yet, over the control socket into
    /// the job's range.
    pub(super) fn put_rest(&mut self, job: &Job) {
        let (Some(ring), Some(range)) = (&self.ring, job.range()) else { return };
        let at = ring.range_offset(range);
        // A large change of an object consists of several writes to a stage. Those that DMA has carried
        // are not sent again either.
        self.fallback.keep(job.written_stage().map_or(0, |stage| self.stages.take_carried(stage)));
        let mut arrived = job.arrived();
        for (offset, piece) in job.upload() {
            let skip = arrived.min(piece.len());
            arrived -= skip;
            self.fallback.keep(skip);
            let mut rest: Bytes = piece.slice(skip..);
            let mut to = at + offset + skip;
            while !rest.is_empty() {
                let part = rest.split_to(PUT.min(rest.len()));
                let len = part.len();
                self.fallback.send(len);
                self.output.push_unanswered(ChannelCall::Put { offset: to as u64 }, part);
                to += len;
            }
        }
    }
}
