//! The osd's end of the channel during one incarnation of the store.
//!
//! Callers put [`Job`]s into the [`StoreChannel`] from any thread, under a short lock, and what can go at once is posted right
//! there, on the caller's thread. One [`ChannelDriver`](driver::Driver) task per link, on the runtime of the OSD, takes what
//! comes back. There is no thread of the channel's own on this side: with one, every call would cost two more wake-ups
//! (into that thread and back), while this way a reply wakes the very thread that runs the waiting task.
//!
//! **Order.** Transactions and reads of a target go through its *lane* and are posted strictly in the order they were
//! called. Queries go by the socket at once, and say in their header which transaction they follow; the host holds them back.
//! Writes of a stage follow nothing, and transactions that name the stage wait for them. Nothing that a transaction needs
//! waits for the transaction or for a query, so nothing waits in a circle.

mod dma;
mod driver;
mod job;
mod jobs;
mod mode;
mod recover;
mod regions;
mod replies;
mod ring_side;
mod verify;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::buddy::Buddy;
use base::fault::Faults;
use base::health::OffloadHealth;
use base::mem::ArenaBuf;
use base::pool::MIN_BUFFER;
use bytes::Bytes;
use channel::ofi::OfiOffer;
use channel::{DmaEngine, EntryHeader, MemoryLayout, TargetInfo};
use futures::task::AtomicWaker;
use store::stripes::{Coded, FragmentBytes, Parity, StripeWrite};
use store::{StageId, StoreError};
use tokio::sync::oneshot;

use crate::messages::{CallAnswer, ParityFrom, StoreCall, Stripes, pack_checksums};
use crate::transaction_codec::{self, EncodedTransaction};

use dma::Dma;
pub(crate) use driver::ChannelDriver;
use job::Job;
pub(crate) use job::{AnswerUse, ReadCall};
use mode::DmaState;
use recover::Quarantine;
use regions::Regions;
use replies::Fetching;
pub(crate) use ring_side::RingSide;
use verify::Verify;

/// Most calls without an answer. The OSD has its own, lower limit of requests in flight; this one only bounds memory.
pub(crate) const MAX_JOBS: usize = 1 << 15;
/// Longest range, in bytes: the checksums of a read of that length fit into a reply on the ring.
const MAX_RANGE: usize = 16 << 20;
/// Most queries unanswered at a time. The host may hold them back until a transaction comes that has not been sent yet, so
/// this limits nothing else: whatever a transaction may need gets through.
const MAX_QUERIES: usize = 256;

/// Why a call has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallError {
    /// The incarnation ended first. Whether the call took effect is unknown.
    Lost(String),
    /// The store said so.
    Store(StoreError),
}

impl From<StoreError> for CallError {
    fn from(e: StoreError) -> CallError {
        CallError::Store(e)
    }
}

impl From<CallError> for StoreError {
    fn from(e: CallError) -> StoreError {
        match e {
            CallError::Lost(why) => StoreError::Disconnected(why),
            CallError::Store(e) => e,
        }
    }
}

/// What comes back from a call.
pub(crate) type CallAnswered = Result<Delivered, CallError>;

/// An answer, and the payload that came with it.
pub(crate) struct Delivered {
    pub(crate) answer: CallAnswer,
    pub(crate) data: Vec<Bytes>,
    /// The data was compared with its checksums.
    pub(crate) verified: bool,
}

impl Delivered {
    fn new(answer: CallAnswer, data: Vec<Bytes>) -> Delivered {
        Delivered { answer, data, verified: false }
    }
}
/// Where an answer goes.
pub(crate) type AnswerTo = oneshot::Sender<CallAnswered>;

/// The channel during one incarnation of the store, as callers see it.
pub(crate) struct StoreChannel {
    state: Mutex<State>,
    driver: AtomicWaker,
    engine: Option<Arc<dyn DmaEngine>>,
    /// Longest range of host memory, in bytes.
    pub(crate) max_range: usize,
    /// Whether payload goes by DMA.
    pub(crate) by_dma: bool,
    /// The number of the incarnation, counted from 1.
    pub(crate) incarnation: u64,
}

struct State {
    dead: Option<String>,
    incarnation: u64,
    last_id: u64,
    last_stage: u64,
    jobs: HashMap<u64, Job>,
    pending: HashMap<u64, SentCall>,
    lanes: Vec<Lane>,
    stages: HashMap<u64, StageState>,
    /// Jobs that wait for a range of host memory, in the order they asked.
    range_queue: VecDeque<u64>,
    /// Jobs that are ready but for credit.
    ring_ready: VecDeque<u64>,
    /// Jobs that go by the socket as soon as they are seen here.
    socket_ready: VecDeque<u64>,
    /// Calls that no other call waits for, and how many of them are with the host.
    queries: VecDeque<u64>,
    queries_out: usize,
    /// Free ranges of the host's data region. Without host memory: how many bytes may be in flight.
    ranges: Buddy,
    ring: Option<RingSide>,
    control_out: Vec<(EntryHeader, Vec<u8>, Vec<Bytes>)>,
    /// Payload on its way by DMA.
    dma: Dma,
    fetching: HashMap<u64, Fetching>,
    regions: Regions,
    mode: DmaState,
    /// Jobs that carry data, while the host has not said yet which of those before them were lost.
    held: VecDeque<u64>,
    quarantine: Quarantine,
    health: Arc<OffloadHealth>,
    faults: Faults,
    verify: Verify,
    /// After that long a transfer is overdue.
    overdue: Duration,
    probe_pattern: Vec<u8>,
    /// Host memory that the driver is to attach to.
    offer: Option<OfiOffer>,
    /// How long the driver looks for more after something has come.
    poll: Duration,
    /// The driver has a timer by which it looks for what is overdue.
    watched: bool,
    /// Bytes of replies announced and not asked for yet; during a probe, what the doorbell has said.
    announced: usize,
    /// Bytes of replies that are being fetched, and since when.
    asked: usize,
    fetch_since: Option<Instant>,
    /// When the host was last asked how far it has come, and what it had put into the outbox that was not heard of.
    asked_positions: Option<Instant>,
    unheard: Option<(u64, Instant)>,
    /// Payload that had come by DMA when DMA failed, and payload that went by the socket in its place, in bytes.
    kept_bytes: u64,
    put_bytes: u64,
    /// Why the incarnation has to end.
    fatal: Option<String>,
}

/// Transactions and reads of one target, in order.
#[derive(Default)]
struct Lane {
    last_transaction: u64,
    queue: VecDeque<u64>,
}

/// A stage of this incarnation.
struct StageState {
    host_id: u64,
    /// Writes that were called and not posted yet. A transaction that names the stage is posted after them.
    unposted: u32,
    /// Writes without an answer that a transaction could overtake: those that go by the socket, and those that the host
    /// compares with their checksums, as they may have to be sent again.
    unsure: u32,
    /// Writes that were called and are not answered.
    unanswered: u32,
    /// Given back; forgotten once its writes are answered.
    released: bool,
}

/// A request that was sent.
struct SentCall {
    job: Job,
    /// Where its entry ends in the inbound ring, in bytes; 0 if it went by the socket.
    ring_end: u64,
    sent: Instant,
}

/// A range of the host's data region.
#[derive(Debug, Clone, Copy)]
struct HeldRange {
    /// Bytes from the region's start.
    offset: usize,
    order: usize,
    len: usize,
}

/// Where read data is to land.
enum ReadLanding {
    /// In place.
    Buffers(Vec<ArenaBuf>),
    /// In the mirror of its range, to be copied from there: there was no other memory.
    Mirror(Option<ArenaBuf>),
    /// In a buffer, or in the frame that brings it.
    Socket(Option<ArenaBuf>),
}

/// How a link uses DMA.
pub(crate) struct LinkOptions {
    /// Longest range, in bytes.
    pub(crate) largest_range: usize,
    /// After that long a transfer is overdue.
    pub(crate) overdue: Duration,
    /// Every so many requests' payload is compared with its checksums by the host; 0 for none, but after a failure.
    pub(crate) verify_every: u32,
    /// What is to go wrong.
    pub(crate) faults: Faults,
    /// Windows of host memory that stay open.
    pub(crate) region_cache: usize,
    /// How long the driver looks for more after something has come.
    pub(crate) poll: Duration,
}

/// What an operator may want to know of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkStatus {
    pub(crate) stages: usize,
    pub(crate) quarantined: usize,
    pub(crate) kept_bytes: u64,
    pub(crate) put_bytes: u64,
}

impl StoreChannel {
    /// A link over host memory (`ring`), or over the control socket alone.
    pub(crate) fn new(
        incarnation: u64,
        targets: usize,
        layout: MemoryLayout,
        ring: Option<RingSide>,
        health: Arc<OffloadHealth>,
        options: &LinkOptions,
    ) -> Arc<StoreChannel> {
        let data_len = layout.data_len as usize;
        let largest = options.largest_range.min(MAX_RANGE).min(data_len).max(MIN_BUFFER);
        let largest = 1 << largest.ilog2();
        let state = State {
            dead: None,
            incarnation,
            last_id: 0,
            last_stage: 0,
            jobs: HashMap::new(),
            pending: HashMap::new(),
            lanes: (0..targets).map(|_| Lane::default()).collect(),
            stages: HashMap::new(),
            range_queue: VecDeque::new(),
            ring_ready: VecDeque::new(),
            socket_ready: VecDeque::new(),
            queries: VecDeque::new(),
            queries_out: 0,
            ranges: Buddy::new(data_len, MIN_BUFFER, largest),
            control_out: Vec::new(),
            dma: Dma::default(),
            fetching: HashMap::new(),
            regions: Regions::new(largest, data_len, options.region_cache),
            mode: if ring.is_some() { DmaState::Open } else { DmaState::Closed },
            held: VecDeque::new(),
            quarantine: Quarantine::default(),
            health,
            verify: Verify::new(options.verify_every),
            faults: options.faults.clone(),
            overdue: options.overdue,
            probe_pattern: Vec::new(),
            offer: None,
            poll: options.poll,
            watched: false,
            announced: 0,
            asked: 0,
            fetch_since: None,
            asked_positions: None,
            unheard: None,
            kept_bytes: 0,
            put_bytes: 0,
            fatal: None,
            ring,
        };
        let by_dma = state.ring.is_some();
        let engine = state.ring.as_ref().map(|ring| Arc::clone(ring.engine()));
        let state = Mutex::new(state);
        let driver = AtomicWaker::new();
        Arc::new(StoreChannel { state, driver, engine, max_range: largest, by_dma, incarnation })
    }

    /// Longest payload that one request carries, in bytes: one transfer, one range.
    pub(crate) fn max_segment(&self) -> usize {
        let max_transfer = self.engine.as_ref().map_or(2 << 20, |engine| engine.max_transfer());
        (max_transfer.min(self.max_range) / MIN_BUFFER * MIN_BUFFER).max(MIN_BUFFER)
    }

    /// Changes how DMA is used.
    pub(crate) fn tune(&self, queues: usize, region_cache: usize, poll: Duration) {
        let mut state = self.lock();
        if let Some(ring) = &mut state.ring {
            ring.set_queues(queues);
        }
        state.regions.set_capacity(region_cache);
        state.poll = poll;
    }

    /// Not contended: held for about a microsecond, by callers and by the driver. Nothing panics while it is held with
    /// the state half changed.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the driver write what was put on the control socket, post what is to be posted, and watch over what the caller
    /// has posted by itself.
    fn unlock(&self, state: MutexGuard<'_, State>) {
        let output = !state.control_out.is_empty() || state.ring.as_ref().is_some_and(RingSide::has_unposted);
        let unwatched = !state.watched && state.has_work();
        drop(state);
        if output || unwatched {
            self.driver.wake();
        }
    }

    /// A call on the control socket.
    pub(crate) fn call(&self, target: u16, call: StoreCall, kind: AnswerUse, answer_to: AnswerTo) {
        let mut state = self.lock();
        let Some(answer_to) = state.accept(answer_to) else { return };
        let after = state.lanes[usize::from(target)].last_transaction;
        state.submit(Job::on_socket(target, after, call, kind, answer_to));
        self.unlock(state);
    }

    /// Sends one segment of staged data.
    pub(crate) fn stage_write(
        &self,
        target: u16,
        stage: StageId,
        offset: u64,
        payload: base::block::Payload,
        answer_to: AnswerTo,
    ) {
        let mut state = self.lock();
        let Some(answer_to) = state.accept(answer_to) else { return };
        let Some(staged) = state.stages.get_mut(&stage.0).filter(|staged| !staged.released) else {
            drop(state);
            // Whoever asked may have gone; then nobody needs to know.
            let _ = answer_to.send(Err(StoreError::NoSuchStage(stage.0).into()));
            return;
        };
        staged.unposted += 1;
        staged.unanswered += 1;
        let host_id = staged.host_id;
        let job = Job::stage_write(target, stage, host_id, offset, payload, self.by_dma, answer_to);
        state.submit(job);
        self.unlock(state);
    }

    /// Sends a piece of each of several fragments. `targets` says which target has a UUID.
    pub(crate) fn stage_stripes(
        &self,
        targets: &[TargetInfo],
        write: StripeWrite,
        answer_to: AnswerTo,
        coded: Option<Coded>,
    ) {
        let mut state = self.lock();
        let Some(answer_to) = state.accept(answer_to) else { return };
        match state.stripes(targets, write, self.max_range) {
            Ok((stripes, fragments)) => {
                state.submit(Job::stripes(stripes, fragments, self.by_dma, answer_to, coded));
            }
            // Whoever asked may have gone; then nobody needs to know.
            Err(e) => drop(answer_to.send(Err(e.into()))),
        }
        self.unlock(state);
    }

    /// Gives a stage back. No answer comes.
    pub(crate) fn stage_release(&self, target: u16, stage: StageId) {
        let mut state = self.lock();
        if let Some(staged) = state.stages.get_mut(&stage.0).filter(|staged| !staged.released) {
            staged.released = true;
            let host_id = staged.host_id;
            state.forget_if_done(stage.0);
            state.release_stage(target, host_id);
        }
        self.unlock(state);
    }

    /// Queues a transaction: gives it its number and its place in the target's lane.
    pub(crate) fn transaction(&self, target: u16, transaction: &store::Transaction, answer_to: AnswerTo) {
        let mut state = self.lock();
        let Some(answer_to) = state.accept(answer_to) else { return };
        match state.encode(transaction, self.by_dma, self.max_range) {
            Ok(encoded) => {
                let lane = &mut state.lanes[usize::from(target)];
                let after = lane.last_transaction;
                lane.last_transaction += 1;
                let job = Job::transaction(target, after, encoded, self.by_dma, answer_to);
                state.submit(job);
            }
            // Whoever asked may have gone; then nobody needs to know.
            Err(e) => drop(answer_to.send(Err(e.into()))),
        }
        self.unlock(state);
    }

    /// A read of at most one range.
    pub(crate) fn read(&self, target: u16, read: job::ReadCall, answer_to: AnswerTo) {
        let mut state = self.lock();
        let Some(answer_to) = state.accept(answer_to) else { return };
        let after = state.lanes[usize::from(target)].last_transaction;
        state.submit(Job::read(target, after, read, self.by_dma, answer_to));
        self.unlock(state);
    }

    /// Host memory is there, but DMA does not work from the start: the socket serves until it does.
    pub(crate) fn begin_without_dma(&self, why: &str) {
        let mut state = self.lock();
        state.dma_failed(why);
        state.pump();
        self.unlock(state);
    }

    /// How it stands.
    pub(crate) fn status(&self) -> LinkStatus {
        let state = self.lock();
        LinkStatus {
            stages: state.stages.values().filter(|staged| !staged.released).count(),
            quarantined: state.quarantined(),
            kept_bytes: state.kept_bytes,
            put_bytes: state.put_bytes,
        }
    }
}

impl State {
    /// What is said of stripes, and the fragments that go with it.
    fn stripes(
        &self,
        targets: &[TargetInfo],
        write: StripeWrite,
        max_range: usize,
    ) -> Result<(Stripes, Vec<FragmentBytes>), StoreError> {
        write.check()?;
        let size = write.fragment_len().saturating_mul(write.parts.len());
        if size > max_range {
            let what = "stripes".to_owned();
            return Err(StoreError::TooLarge { what, size: size as u64, limit: max_range as u64 });
        }
        let translate = |part: &Option<(u128, StageId)>| {
            let Some((uuid, stage)) = part else { return Ok(None) };
            let gone = StoreError::NoSuchStage(stage.0);
            let target = targets.iter().position(|target| target.uuid == *uuid).ok_or(gone.clone())?;
            let staged = self.stages.get(&stage.0).filter(|staged| !staged.released).ok_or(gone)?;
            Ok(Some((target as u16, staged.host_id)))
        };
        let parts = write.parts.iter().map(translate).collect::<Result<Vec<_>, StoreError>>()?;
        let (len, data) = (write.fragment_len() as u64, write.data.len() as u16);
        let parity = ParityFrom::from(&write.parity);
        let mut fragments = write.data;
        if let Parity::Here(parity) = write.parity {
            fragments.extend(parity);
        }
        let checksums: Vec<u32> =
            fragments.iter().flat_map(|fragment| &fragment.checksums).copied().collect();
        let checksums = pack_checksums(&checksums);
        Ok((Stripes { parts, data, len, offset: write.offset, parity, checksums }, fragments))
    }

    fn encode(
        &mut self,
        transaction: &store::Transaction,
        by_dma: bool,
        max_range: usize,
    ) -> Result<EncodedTransaction, StoreError> {
        let stages = &self.stages;
        let translate = |stage: StageId| {
            let staged = stages.get(&stage.0).filter(|staged| !staged.released);
            staged.map(|staged| staged.host_id).ok_or(StoreError::NoSuchStage(stage.0))
        };
        let mut encoded = transaction_codec::encode(transaction, 1, translate)?;
        if by_dma && !job::fits_inline(&encoded) {
            encoded = transaction_codec::encode(transaction, MIN_BUFFER, translate)?;
        }
        let size = job::range_len(&encoded);
        if size > max_range {
            let what = "transaction".to_owned();
            return Err(StoreError::TooLarge { what, size: size as u64, limit: max_range as u64 });
        }
        Ok(encoded)
    }
}
