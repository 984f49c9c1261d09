//! The osd's end of the channel for one incarnation of the store, called a *store channel*.
//!
//! Any thread may submit a [`Job`] to the [`StoreChannel`], under a short lock. The calling thread
//! itself posts every job that can be sent immediately. Each store channel has one
//! [`ChannelDriver`] task, which runs on the osd's runtime and receives the host's replies. The
//! osd's end has no thread of its own: such a thread would cost every call two more wake-ups.
//! Instead, a reply wakes the thread that runs the waiting task.
//!
//! **Order.** Each target has a *lane* for its transactions and reads. The store channel posts the
//! jobs of a lane strictly in the order of the calls. A job with transactions of several targets is
//! posted when it is the first in each of their lanes. Queries are sent over the control socket at
//! once; the header of a query names the transaction that it follows, and the host holds the query
//! back until it has that transaction. A query of an object has a number like a transaction, and
//! the host holds later transactions back until it has the query. A write to a stage waits for no
//! other call. A transaction that names the stage waits for the writes to that stage.
//!
//! Deadlock is impossible: the stage writes that a transaction needs wait for neither transactions
//! nor queries, and the queries of objects that it needs are sent without a limit.
//!
//! **State.** [`State`] combines small types that own their fields: each is in the file with its name
//! and asserts its invariants. A change of the state is a *turn* (module `turn`): an event queues
//! jobs, and then the turn sends every job that is ready.

mod call_table;
mod channel_stages;
mod control_output;
mod dma;
mod driver;
mod fallback_bytes;
mod fetched_read;
mod host_ranges;
mod job;
mod job_queues;
mod jobs;
mod lanes;
mod mode;
mod recover;
mod regions;
mod replies;
mod reply_side;
mod ring_side;
mod turn;
mod verify;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::fault::Faults;
use base::health::OffloadHealth;
use base::pool::MIN_BUFFER;
use bytes::Bytes;
use channel::ofi::OfiOffer;
use channel::{DmaEngine, MemoryLayout, TargetInfo};
use futures::task::AtomicWaker;
use store::stripes::{Coded, FragmentBytes, Parity, StripeWrite};
use store::{StageId, StoreError};
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::messages::{CallAnswer, ParityFrom, StoreCall, Stripes, TransactionPart, pack_checksums};
use crate::transaction_codec::EncodedTransactions;

use call_table::CallTable;
use channel_stages::ChannelStages;
use control_output::ControlOutput;
use dma::Dma;
pub(crate) use driver::ChannelDriver;
use fallback_bytes::FallbackBytes;
use host_ranges::HostRanges;
use job::Job;
pub(crate) use job::{AnswerUse, ReadCall};
use job_queues::JobQueues;
use lanes::Lanes;
use mode::DmaState;
use regions::Regions;
use reply_side::ReplySide;
pub(crate) use ring_side::RingSide;
use verify::Verify;

/// Maximum number of unanswered calls. It only bounds memory: the osd has its own, lower limit of
/// requests in flight.
pub(crate) const MAX_JOBS: usize = 1 << 15;
/// Maximum length of a range, in bytes. The checksums of a read of this length still fit into a
/// reply on the ring.
const MAX_RANGE: usize = 16 << 20;
/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallError {
    /// The incarnation ended before the answer came. It is unknown whether the call took effect.
    Lost(String),
    /// The store returned this error.
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

/// The result of a call.
pub(crate) type CallAnswered = Result<Delivered, CallError>;

/// An answer with its payload.
pub(crate) struct Delivered {
    pub(crate) answer: CallAnswer,
    pub(crate) data: Vec<Bytes>,
    /// Whether the data was verified against its checksums.
    pub(crate) verified: bool,
}

impl Delivered {
    fn new(answer: CallAnswer, data: Vec<Bytes>) -> Delivered {
        Delivered { answer, data, verified: false }
    }
}
/// The sender that passes the answer to the caller of a call.
pub(crate) type AnswerTo = oneshot::Sender<CallAnswered>;

/// A transaction to be queued on one target.
pub(crate) struct SubmittedTransaction {
    pub(crate) target: u16,
    /// The only incarnation in which the transaction may be executed; `None` for any incarnation.
    pub(crate) incarnation: Option<u64>,
    pub(crate) transaction: store::Transaction,
    /// The receiver of the outcome, until the outcome is known.
    pub(crate) answer_to: Option<AnswerTo>,
}

impl SubmittedTransaction {
    /// Fails the transaction.
    pub(crate) fn fail(&mut self, why: CallError) {
        if let Some(answer_to) = self.answer_to.take() {
            // The caller may have been cancelled; ignore the error.
            let _ = answer_to.send(Err(why));
        }
    }

    /// Whether the transaction may be executed in this incarnation. Fails it otherwise.
    fn is_current(&mut self, current: u64) -> bool {
        match self.incarnation {
            Some(incarnation) if incarnation != current => {
                self.fail(CallError::Lost(format!("incarnation {incarnation} has ended")));
                false
            }
            _ => true,
        }
    }
}

/// The interface through which callers use the channel during one incarnation of the store.
pub(crate) struct StoreChannel {
    state: Mutex<State>,
    driver: AtomicWaker,
    engine: Option<Arc<dyn DmaEngine>>,
    /// Maximum length of a range of host memory, in bytes.
    pub(crate) max_range: usize,
    /// Whether DMA carries payload.
    pub(crate) by_dma: bool,
    /// The incarnation's number, counted from 1.
    pub(crate) incarnation: u64,
}

struct State {
    /// Why the incarnation has ended.
    dead: Option<String>,
    /// Why the incarnation must end.
    fatal: Option<String>,
    calls: CallTable,
    lanes: Lanes,
    stages: ChannelStages,
    queues: JobQueues,
    ranges: HostRanges,
    regions: Regions,
    ring: Option<RingSide>,
    replies: ReplySide,
    output: ControlOutput,
    /// Transfers of payload by DMA.
    dma: Dma,
    fallback: FallbackBytes,
    verify: Verify,
    mode: DmaState,
    health: Arc<OffloadHealth>,
    probe_pattern: Vec<u8>,
    /// An offer of host memory that the engine must attach to.
    offer: Option<OfiOffer>,
    faults: Faults,
    /// Duration after which a transfer is overdue.
    overdue: Duration,
    /// How long the driver keeps polling after the last event.
    poll: Duration,
    /// Whether the driver has a timer for overdue transfers and replies.
    watched: bool,
}

/// Options of a store channel, mostly for DMA.
pub(crate) struct StoreChannelOptions {
    /// Maximum length of a range, in bytes.
    pub(crate) largest_range: usize,
    /// Duration after which a transfer is overdue.
    pub(crate) overdue: Duration,
    /// The host verifies the payload checksums of every n-th request. With 0, it does so only after
    /// a failure. The host verifies data of which it computes parity in any case.
    pub(crate) verify_every: u32,
    /// Faults to inject.
    pub(crate) faults: Faults,
    /// Maximum number of host-memory windows that stay open.
    pub(crate) region_cache: usize,
    /// How long the driver keeps polling after the last event.
    pub(crate) poll: Duration,
}

/// State of a store channel, for the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreChannelStatus {
    pub(crate) stages: usize,
    pub(crate) quarantined: usize,
    pub(crate) kept_bytes: u64,
    pub(crate) put_bytes: u64,
}

impl StoreChannel {
    /// Creates a store channel over host memory if `ring` is given, else over the control socket
    /// alone.
    pub(crate) fn new(
        incarnation: u64,
        targets: usize,
        layout: MemoryLayout,
        ring: Option<RingSide>,
        health: Arc<OffloadHealth>,
        options: &StoreChannelOptions,
    ) -> Arc<StoreChannel> {
        let data_len = layout.data_len as usize;
        let largest = options.largest_range.min(MAX_RANGE).min(data_len).max(MIN_BUFFER);
        let largest = 1 << largest.ilog2();
        let state = State {
            dead: None,
            calls: CallTable::default(),
            lanes: Lanes::new(targets),
            stages: ChannelStages::new(incarnation),
            queues: JobQueues::default(),
            ranges: HostRanges::new(data_len, largest),
            output: ControlOutput::default(),
            dma: Dma::default(),
            regions: Regions::new(largest, data_len, options.region_cache),
            mode: if ring.is_some() { DmaState::Open } else { DmaState::Closed },
            health,
            verify: Verify::new(options.verify_every),
            faults: options.faults.clone(),
            overdue: options.overdue,
            probe_pattern: Vec::new(),
            offer: None,
            poll: options.poll,
            watched: false,
            replies: ReplySide::default(),
            fallback: FallbackBytes::new(),
            fatal: None,
            ring,
        };
        let by_dma = state.ring.is_some();
        let engine = state.ring.as_ref().map(|ring| Arc::clone(ring.engine()));
        let state = Mutex::new(state);
        let driver = AtomicWaker::new();
        Arc::new(StoreChannel { state, driver, engine, max_range: largest, by_dma, incarnation })
    }

    /// Maximum payload of one request, in bytes: the smaller of the engine's maximum transfer
    /// length and the maximum length of a range.
    pub(crate) fn max_segment(&self) -> usize {
        let max_transfer = self.engine.as_ref().map_or(2 << 20, |engine| engine.max_transfer());
        (max_transfer.min(self.max_range) / MIN_BUFFER * MIN_BUFFER).max(MIN_BUFFER)
    }

    /// Changes options of a live link: the engine queues in use, the cached windows and the polling
    /// time.
    pub(crate) fn tune(&self, queues: usize, region_cache: usize, poll: Duration) {
        let mut state = self.lock();
        if let Some(ring) = &mut state.ring {
            ring.set_queues(queues);
        }
        state.regions.set_capacity(region_cache);
        state.poll = poll;
    }

    /// Locks the state. The lock is hardly contended: callers and the driver hold it for about a
    /// microsecond. A failed assertion under the lock ends the role, so the state of a poisoned
    /// lock only serves to end the incarnation.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits a call on the control socket.
    pub(crate) fn call(&self, target: u16, call: StoreCall, answer_use: AnswerUse, answer_to: AnswerTo) {
        self.caller_turn(|state| {
            let Some(answer_to) = state.accept(answer_to) else { return };
            let after = state.lanes.last_number(target);
            if call.is_object_query() {
                state.lanes.count_call(target);
            }
            state.enqueue(Job::on_socket(target, after, call, answer_use, answer_to));
        });
    }

    /// Sends one segment of data for a stage.
    pub(crate) fn stage_write(
        &self,
        target: u16,
        stage: StageId,
        offset: u64,
        payload: base::block::Payload,
        answer_to: AnswerTo,
    ) {
        self.caller_turn(|state| {
            let Some(answer_to) = state.accept(answer_to) else { return };
            match state.stages.begin_write(stage) {
                Ok(host_id) => {
                    let by_dma = self.by_dma;
                    let job = Job::stage_write(target, stage, host_id, offset, payload, by_dma, answer_to);
                    state.enqueue(job);
                }
                // The caller may have been cancelled; ignore the error.
                Err(e) => drop(answer_to.send(Err(e.into()))),
            }
        });
    }

    /// Stages one piece of each of several fragments. `targets` maps the UUIDs in `write` to
    /// targets.
    pub(crate) fn stage_stripes(
        &self,
        targets: &[TargetInfo],
        write: StripeWrite,
        answer_to: AnswerTo,
        coded: Option<Coded>,
    ) {
        self.caller_turn(|state| {
            let Some(answer_to) = state.accept(answer_to) else { return };
            match state.stripes(targets, write, self.max_range) {
                Ok((stripes, fragments)) => {
                    state.enqueue(Job::stripes(stripes, fragments, self.by_dma, answer_to, coded));
                }
                // The caller may have been cancelled; ignore the error.
                Err(e) => drop(answer_to.send(Err(e.into()))),
            }
        });
    }

    /// Releases a stage. The host sends no answer.
    pub(crate) fn stage_release(&self, target: u16, stage: StageId) {
        self.caller_turn(|state| {
            if let Some(host_id) = state.stages.release(stage) {
                state.release_stage(target, host_id);
            }
        });
    }

    /// Queues transactions of different targets: assigns to each its number and its position in the
    /// target's lane. One request carries all of them, unless it would hold more host memory until
    /// the slowest target has answered.
    pub(crate) fn transactions(&self, mut transactions: Vec<SubmittedTransaction>) {
        self.caller_turn(|state| {
            transactions.retain_mut(|one| one.is_current(self.incarnation));
            state.enqueue_transactions(transactions, self.by_dma, self.max_range);
        });
    }

    /// Submits a read. The blocks that cover the read bytes must fit in one range.
    pub(crate) fn read(&self, target: u16, read: ReadCall, answer_to: AnswerTo) {
        self.caller_turn(|state| {
            let Some(answer_to) = state.accept(answer_to) else { return };
            let after = state.lanes.last_number(target);
            state.enqueue(Job::read(target, after, read, self.by_dma, answer_to));
        });
    }

    /// Starts without DMA although host memory is present. The control socket carries all calls
    /// until a probe succeeds.
    pub(crate) fn begin_without_dma(&self, why: &str) {
        self.caller_turn(|state| state.dma_failed(why));
    }

    /// The store channel's current state.
    pub(crate) fn status(&self) -> StoreChannelStatus {
        let state = self.lock();
        StoreChannelStatus {
            stages: state.stages.count(),
            quarantined: state.ranges.quarantined(),
            kept_bytes: state.fallback.kept(),
            put_bytes: state.fallback.sent(),
        }
    }
}

impl State {
    /// Translates a stripe write into the message for the host and the fragments to send with it.
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
        let translate = |part: &Option<(Uuid, StageId)>| {
            let Some((uuid, stage)) = part else { return Ok(None) };
            let target = targets.iter().position(|target| target.uuid == *uuid);
            let target = target.ok_or(StoreError::NoSuchStage(stage.0))?;
            Ok(Some((target as u16, self.stages.host_id(*stage)?)))
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

    fn enqueue_transactions(
        &mut self,
        mut transactions: Vec<SubmittedTransaction>,
        by_dma: bool,
        max_range: usize,
    ) {
        if transactions.is_empty() {
            return;
        }
        let encoded = match self.refusal() {
            None => self.encode(&transactions, by_dma, max_range).map_err(CallError::from),
            Some(why) => Err(why),
        };
        match encoded {
            Ok((parts, encoded)) if parts.len() == 1 || job::may_join(&encoded) => {
                parts.iter().for_each(|part| self.lanes.count_call(part.target));
                let answers = transactions.into_iter().filter_map(|mut one| one.answer_to.take());
                self.enqueue(Job::transactions(parts, encoded, by_dma, answers));
            }
            Err(why) if transactions.len() == 1 => transactions[0].fail(why),
            // Each transaction succeeds or fails on its own.
            _ => transactions.into_iter().for_each(|one| {
                self.enqueue_transactions(vec![one], by_dma, max_range);
            }),
        }
    }

    fn encode(
        &self,
        transactions: &[SubmittedTransaction],
        by_dma: bool,
        max_range: usize,
    ) -> Result<(Vec<TransactionPart>, EncodedTransactions), StoreError> {
        let mut encoded = self.encode_aligned(transactions, 1)?;
        if by_dma && !job::fits_inline(&encoded.1) {
            encoded = self.encode_aligned(transactions, MIN_BUFFER)?;
        }
        let size = job::range_len(&encoded.1);
        if size > max_range {
            let what = "transaction".to_owned();
            return Err(StoreError::TooLarge { what, size: size as u64, limit: max_range as u64 });
        }
        Ok(encoded)
    }

    fn encode_aligned(
        &self,
        transactions: &[SubmittedTransaction],
        align: usize,
    ) -> Result<(Vec<TransactionPart>, EncodedTransactions), StoreError> {
        let translate = |stage: StageId| self.stages.host_id(stage);
        let mut encoded = EncodedTransactions::with_capacity(transactions.len());
        let mut parts = Vec::with_capacity(transactions.len());
        for SubmittedTransaction { target, transaction, .. } in transactions {
            let encoding = encoded.add(transaction, align, translate)? as u16;
            let after = self.lanes.last_number(*target);
            parts.push(TransactionPart { target: *target, after, encoding });
        }
        Ok((parts, encoded))
    }
}
