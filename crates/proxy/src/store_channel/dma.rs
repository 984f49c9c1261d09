//! Payload transfers by DMA: uploads to the host and fetches from the host.
//!
//! Payload has its own engine queues, and the stage or the request selects the queue. A long
//! request therefore does not delay ring entries, and it delays other payload by one transfer at
//! most. A failed payload transfer has not touched the rings. Its request continues over the
//! control socket, and the bytes that had arrived are not sent again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use base::clock::Instant;
use base::collections::HashMap;
use base::phases::{Clock, Phase};
use bytes::Bytes;
use channel::{Chain, ChainCompletion, DmaRegion, QueueId, Transfer, URGENT};

use super::State;
use super::ring_side::RingSide;

/// This bit marks the tags of payload chains. Request numbers, which count from 1, never reach it.
const PAYLOAD_TAG: u64 = 1 << 62;
/// Length at which a combined chain stops growing, in bytes. Chains are combined for devices with a
/// high setup cost per chain.
const LONGEST_CHAIN: usize = 16 << 20;

/// The request whose data a chain moves, and the direction of the transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cargo {
    /// The payload of this job, to the host.
    Upload(u64),
    /// The data of this read, from the host.
    Fetch(u64),
}

/// The transfers of one request that were not posted in a chain yet.
struct Wish {
    cargo: Cargo,
    queue: QueueId,
    transfers: Vec<Transfer>,
    since: Instant,
    clock: Option<Clock>,
    holds: Holds,
}

/// Memory that must stay valid until the transfers are complete.
#[derive(Default)]
pub(super) struct Holds {
    pub(super) _payload: Vec<(usize, Bytes)>,
    pub(super) _region: Option<Arc<DmaRegion>>,
}

/// The transfers of one request in a posted chain.
struct PostedCargo {
    /// `None` once the request continues without the chain.
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

/// The outcome of the transfers of one request.
pub(super) struct Landed {
    pub(super) cargo: Cargo,
    /// Number of bytes that reached their destination, from the start of the request's data.
    pub(super) bytes: usize,
    /// Why some bytes did not arrive, if any are missing.
    pub(super) failure: Option<String>,
}

/// The chains that carry payload.
#[derive(Default)]
pub(super) struct Dma {
    waiting: VecDeque<Wish>,
    posted: HashMap<u64, PostedChain>,
    last_tag: u64,
}

impl Dma {
    /// Whether no transfer is waiting or in progress.
    pub(super) fn is_idle(&self) -> bool {
        self.posted.is_empty() && self.waiting.is_empty()
    }

    /// Posts the waiting transfers. A device with a setup cost gets one chain at a time, which
    /// combines the transfers of several requests.
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
        chain.request = match &parts[..] {
            [PostedCargo { clock, .. }] => clock.as_ref().map(Clock::number),
            _ => None,
        };
        self.posted.insert(tag, PostedChain { parts, at: Instant::now() });
        ring.post(queue, chain);
    }

    /// Handles a completion. Returns `None` if it does not belong to a payload chain.
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

    /// Returns the requests whose transfers were posted before `then` and are not complete. The
    /// caller continues these requests without DMA.
    fn overdue(&mut self, then: Instant) -> Vec<Cargo> {
        let late = self.posted.values_mut().filter(|posted| posted.at < then);
        late.flat_map(|posted| &mut posted.parts).filter_map(|part| part.cargo.take()).collect()
    }

    /// Drops the transfers that were not handed to the engine yet, and returns their requests.
    fn take_waiting(&mut self) -> Vec<Cargo> {
        self.waiting.drain(..).map(|wish| wish.cargo).collect()
    }
}

impl State {
    /// Starts the upload of a job's payload.
    pub(super) fn start_upload(&mut self, id: u64) {
        let Some(ring) = &mut self.ring else { return };
        let job = self.calls.job(id);
        let Some((range, window)) = job.uploading() else { return };
        let transfers = ring.upload_transfers(job.upload(), range, window);
        let queue = ring.bulk_queue(job.written_stage().map_or(id, |stage| stage.0));
        self.dma.waiting.push_back(Wish {
            cargo: Cargo::Upload(id),
            queue,
            transfers,
            since: job.since(),
            clock: job.clock().cloned(),
            holds: Holds { _payload: job.upload().to_vec(), _region: Some(Arc::clone(&window.region)) },
        });
        self.dma.post(ring);
    }

    /// Starts to fetch the data of a read.
    pub(super) fn start_fetch(
        &mut self,
        id: u64,
        transfers: Vec<Transfer>,
        clock: Option<Clock>,
        region: Arc<DmaRegion>,
    ) {
        let Some(ring) = &mut self.ring else { return };
        let queue = ring.bulk_queue(id);
        let holds = Holds { _payload: Vec::new(), _region: Some(region) };
        let wish = Wish { cargo: Cargo::Fetch(id), queue, transfers, since: Instant::now(), clock, holds };
        self.dma.waiting.push_back(wish);
        self.dma.post(ring);
    }

    /// Handles the completion of a payload chain. Returns `false` for any other completion.
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

    /// Gives up transfers that are overdue. Their memory stays reserved, and their requests
    /// continue over the control socket.
    pub(super) fn give_up_overdue(&mut self, then: Instant) {
        let overdue = self.dma.overdue(then);
        if !overdue.is_empty() {
            self.dma_failed("a transfer is overdue");
            self.go_on_without(overdue);
        }
    }

    /// Moves the requests whose transfers were not handed to the engine yet to the control socket.
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

    /// Records that DMA has moved `bytes` of a job's payload and will move no more of it.
    fn uploaded(&mut self, id: u64, bytes: usize) {
        self.calls.job_mut(id).uploaded(bytes);
        self.job_ready(id);
    }
}
