//! Payload on its way by DMA: uploads to the host and fetches from it.
//!
//! Payload has queues of the engine of its own, chosen by stage or request, so that a long request holds up neither the
//! entries of the rings nor, for longer than a transfer takes, the payload of others. What fails here has not touched the
//! rings: the request alone goes on by the socket, with what had arrived kept.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::phases::{Clock, Phase};
use bytes::Bytes;
use channel::{Chain, ChainCompletion, DmaRegion, QueueId, Transfer, URGENT};

use super::State;
use super::job::{RangeUse, Route};
use super::ring_side::RingSide;

/// Tags of payload chains have this bit; requests, whose numbers count from 1, do not get that far.
const PAYLOAD_TAG: u64 = 1 << 62;
/// Longest chain that is put together for a device that likes long chains, in bytes.
const LONGEST_CHAIN: usize = 16 << 20;

/// What a chain moves, for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cargo {
    /// The payload of a job.
    Upload(u64),
    /// The data of a read.
    Fetch(u64),
}

/// Cargo that waits for its chain.
struct Wish {
    cargo: Cargo,
    queue: QueueId,
    transfers: Vec<Transfer>,
    since: Instant,
    clock: Option<Clock>,
    holds: Holds,
}

/// What must stay as it is until the transfers are done.
#[derive(Default)]
pub(super) struct Holds {
    pub(super) _payload: Vec<(usize, Bytes)>,
    pub(super) _region: Option<Arc<DmaRegion>>,
}

/// A part of a chain that was posted.
struct PostedCargo {
    /// `None` once the request goes on without it.
    cargo: Option<Cargo>,
    /// Length of each transfer, in bytes.
    lens: Vec<usize>,
    since: Instant,
    clock: Option<Clock>,
    _holds: Holds,
}

struct PostedChain {
    parts: Vec<PostedCargo>,
    at: Instant,
}

/// What has become of cargo.
pub(super) struct Landed {
    pub(super) cargo: Cargo,
    /// Bytes that are where they belong, counted from the start.
    pub(super) bytes: usize,
    /// Why that is not all.
    pub(super) failure: Option<String>,
}

/// The chains of payload.
#[derive(Default)]
pub(super) struct Dma {
    waiting: VecDeque<Wish>,
    posted: HashMap<u64, PostedChain>,
    last_tag: u64,
}

impl Dma {
    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.posted.is_empty() && self.waiting.is_empty()
    }

    /// Posts what waits. A device with a high price per chain gets one at a time, made of all that has come together.
    fn post(&mut self, ring: &mut RingSide) {
        if ring.engine().setup_cost() == Duration::ZERO {
            while let Some(wish) = self.waiting.pop_front() {
                let queue = wish.queue;
                self.post_chain(ring, queue, vec![wish]);
            }
            return;
        }
        while self.posted.is_empty() && !self.waiting.is_empty() {
            let (mut together, mut len) = (Vec::new(), 0);
            while let Some(wish) = self.waiting.pop_front() {
                len += wish.transfers.iter().map(|t| t.len).sum::<usize>();
                together.push(wish);
                if len >= LONGEST_CHAIN {
                    break;
                }
            }
            let queue = together.first().map_or(URGENT, |wish| wish.queue);
            self.post_chain(ring, queue, together);
        }
    }

    fn post_chain(&mut self, ring: &mut RingSide, queue: QueueId, wishes: Vec<Wish>) {
        self.last_tag += 1;
        let tag = PAYLOAD_TAG | self.last_tag;
        let mut chain = Chain { tag: Some(tag), ..Chain::default() };
        let mut parts = Vec::with_capacity(wishes.len());
        for wish in wishes {
            parts.push(PostedCargo {
                cargo: Some(wish.cargo),
                lens: wish.transfers.iter().map(|t| t.len).collect(),
                since: wish.since,
                clock: wish.clock,
                _holds: wish.holds,
            });
            chain.transfers.extend(wish.transfers);
        }
        self.posted.insert(tag, PostedChain { parts, at: Instant::now() });
        ring.post(queue, chain);
    }

    /// Takes a completion, if it is of payload.
    fn completed(&mut self, completion: &ChainCompletion) -> Option<Vec<Landed>> {
        let posted = self.posted.remove(&completion.tag)?;
        let (mut done, why) = match &completion.result {
            Ok(()) => (usize::MAX, None),
            Err(failed) => (failed.done, Some(failed.why.clone())),
        };
        let mut landed = Vec::with_capacity(posted.parts.len());
        for part in posted.parts {
            if let Some(clock) = &part.clock {
                clock.record(Phase::DmaWait, part.since, completion.started);
                clock.record(Phase::Dma, completion.started, completion.finished);
            }
            let of_part = done.min(part.lens.len());
            done -= of_part;
            let whole = of_part == part.lens.len();
            let bytes = part.lens[..of_part].iter().sum();
            let failure = if whole { None } else { why.clone() };
            landed.extend(part.cargo.map(|cargo| Landed { cargo, bytes, failure }));
        }
        Some(landed)
    }

    /// Cargo that has been on its way since before `then`: its requests go on without it.
    fn overdue(&mut self, then: Instant) -> Vec<Cargo> {
        let late = self.posted.values_mut().filter(|posted| posted.at < then);
        late.flat_map(|posted| &mut posted.parts).filter_map(|part| part.cargo.take()).collect()
    }

    /// Cargo that no engine has yet.
    fn take_waiting(&mut self) -> Vec<Cargo> {
        self.waiting.drain(..).map(|wish| wish.cargo).collect()
    }
}

impl State {
    /// Sends the payload of a job on its way.
    pub(super) fn start_upload(&mut self, id: u64) {
        let (Some(job), Some(ring)) = (self.jobs.get_mut(&id), &mut self.ring) else { return };
        let RangeUse::Held(range) = job.range else { return };
        let Some(region) = job.region.clone() else { return };
        let transfers = ring.upload_transfers(&job.upload, range, &region);
        let queue = ring.bulk_queue(job.writes_stage.unwrap_or(id));
        self.dma.waiting.push_back(Wish {
            cargo: Cargo::Upload(id),
            queue,
            transfers,
            since: job.since,
            clock: job.clock.clone(),
            holds: Holds { _payload: job.upload.clone(), _region: Some(region.region) },
        });
        self.dma.post(ring);
    }

    /// Sends for the data of a read.
    pub(super) fn start_fetch(
        &mut self,
        id: u64,
        transfers: Vec<Transfer>,
        clock: Option<Clock>,
        region: Option<Arc<DmaRegion>>,
    ) {
        let Some(ring) = &mut self.ring else { return };
        let queue = ring.bulk_queue(id);
        let holds = Holds { _payload: Vec::new(), _region: region };
        let wish = Wish { cargo: Cargo::Fetch(id), queue, transfers, since: Instant::now(), clock, holds };
        self.dma.waiting.push_back(wish);
        self.dma.post(ring);
    }

    /// Takes a completion of payload; `false` if it is of something else.
    pub(super) fn payload_completed(&mut self, completion: &ChainCompletion) -> bool {
        let Some(landed) = self.dma.completed(completion) else { return false };
        if let Err(failed) = &completion.result {
            self.dma_failed(&failed.to_string());
        }
        for landed in landed {
            match landed.cargo {
                Cargo::Upload(id) => self.uploaded(id, landed.bytes),
                Cargo::Fetch(id) => self.fetched(id, landed.bytes, landed.failure.is_none()),
            }
        }
        if let Some(ring) = &mut self.ring {
            self.dma.post(ring);
        }
        true
    }

    /// What has been under way for too long is given up, but for its memory: its requests go on by the socket.
    pub(super) fn give_up_overdue(&mut self, then: Instant) {
        let overdue = self.dma.overdue(then);
        if !overdue.is_empty() {
            self.dma_failed("a transfer is overdue");
            self.go_on_without(overdue);
        }
    }

    /// What waits for the engine goes by the socket.
    pub(super) fn give_up_waiting(&mut self) {
        let waiting = self.dma.take_waiting();
        self.go_on_without(waiting);
    }

    fn go_on_without(&mut self, cargo: Vec<Cargo>) {
        for cargo in cargo {
            match cargo {
                Cargo::Upload(id) => self.uploaded(id, 0),
                Cargo::Fetch(id) => self.fetch_given_up(id),
            }
        }
    }

    /// So much of a job's payload has arrived, and no more will.
    fn uploaded(&mut self, id: u64, bytes: usize) {
        if let Some(job) = self.jobs.get_mut(&id) {
            job.arrived = bytes;
            job.region = None;
            if job.arrived < job.upload_len() {
                job.route = Route::Socket;
            }
            self.payload_ready(id);
        }
    }
}
