//! [`SimDevice`]: the state of a simulated DMA device.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use base::block::crc32c;
use base::clock::Instant;
use base::collections::HashMap;
use base::mem::{Arena, DeviceMemory};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::bell::SimRinger;
use super::engine::{DeviceFailure, EngineFaults, SimEngineOptions, SimEngineStats};
use super::trace::DmaTrace;
use crate::{
    Chain, ChainCompletion, ChainFailure, ChannelError, Counters, PeerId, QueueId, RegionId, RejectedChain,
    Result, Transfer,
};

/// Maximum time from the call of `reset` until the device has cancelled its chains.
const RESET: Duration = Duration::from_millis(5);

/// An item of a queue.
#[derive(Debug)]
pub(super) enum SimItem {
    /// A chain, and when it was posted.
    Chain(Chain, Instant),
    /// Unregisters the region once the device has taken this item from every queue.
    Unregister(Arc<RegionId>),
    /// Detaches the peer once the device has taken this item from every queue.
    Detach(Arc<PeerId>),
}

/// A chain that is in progress.
#[derive(Debug)]
struct RunningChain {
    chain: Chain,
    /// Number of completed transfers.
    done: usize,
    started: Instant,
    /// When the current transfer moves its bytes; `None` if it has moved them.
    moves_at: Option<Instant>,
    /// When the current transfer ends.
    ends_at: Instant,
    fault: Option<TransferFault>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TransferFault {
    Fail,
    Corrupt,
}

#[derive(Debug)]
struct SimQueue {
    items: VecDeque<SimItem>,
    head: Option<RunningChain>,
    /// Number of chains that are posted and not complete.
    posted: usize,
    /// Whether a caller found the queue full and waits for room.
    was_full: bool,
    /// When the last chain ended.
    free_at: Instant,
}

#[derive(Debug)]
struct AttachedPeer {
    memory: Arc<Arena>,
    doorbell: SimRinger,
}

/// A device that performs the chains of several queues, each at its own pace.
#[derive(Debug)]
pub(super) struct SimDevice {
    pub(super) options: SimEngineOptions,
    pub(super) max_transfer: usize,
    pub(super) counters: Counters,
    /// Wakes the task that performs the transfers.
    pub(super) waker: Option<Waker>,
    rng: SmallRng,
    trace: DmaTrace,
    stats: SimEngineStats,
    regions: HashMap<RegionId, DeviceMemory>,
    peers: HashMap<PeerId, AttachedPeer>,
    last_id: u32,
    queues: Vec<SimQueue>,
    completions: Vec<ChainCompletion>,
    /// Wakes the caller that polls for completions.
    caller: Option<Waker>,
    failure: Option<DeviceFailure>,
    reset_at: Option<Instant>,
    is_over: bool,
    /// Bytes of the current transfer.
    buffer: Vec<u8>,
}

/// The next event of a device.
#[derive(Debug, Clone, Copy)]
enum Event {
    Reset,
    Queue(QueueId),
}

impl SimDevice {
    pub(super) fn new(options: SimEngineOptions) -> SimDevice {
        let now = Instant::now();
        let queue =
            |_| SimQueue { items: VecDeque::new(), head: None, posted: 0, was_full: false, free_at: now };
        SimDevice {
            max_transfer: options.max_transfer,
            counters: Counters::default(),
            waker: None,
            rng: SmallRng::seed_from_u64(options.seed),
            trace: DmaTrace::default(),
            stats: SimEngineStats::default(),
            regions: HashMap::default(),
            peers: HashMap::default(),
            last_id: 0,
            queues: (0..options.queues).map(queue).collect(),
            completions: Vec::new(),
            caller: None,
            failure: None,
            reset_at: None,
            is_over: false,
            buffer: Vec::new(),
            options,
        }
    }

    pub(super) fn stats(&self) -> SimEngineStats {
        SimEngineStats { trace: self.trace.hash(), operations: self.trace.operations(), ..self.stats }
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Number of chains that are posted and not complete.
    pub(super) fn pending(&self) -> usize {
        self.queues.iter().map(|queue| queue.posted).sum()
    }

    /// Stops the device for ever.
    pub(super) fn sever(&mut self) {
        self.is_over = true;
        for queue in &mut self.queues {
            queue.items.clear();
            (queue.head, queue.posted) = (None, 0);
        }
        self.regions.clear();
        self.peers.clear();
        self.completions.clear();
        self.caller = None;
        self.wake_device();
    }

    pub(super) fn break_down(&mut self, failure: DeviceFailure) {
        if self.failure.is_none() && !self.is_over {
            match failure {
                DeviceFailure::Fails => self.stats.device_failures += 1,
                DeviceFailure::Hangs => self.stats.device_hangs += 1,
            }
            self.trace.add("the device fails", &[u64::from(failure == DeviceFailure::Hangs)]);
            self.failure = Some(failure);
        }
    }

    pub(super) fn begin_reset(&mut self) {
        if self.reset_at.is_none() && !self.is_over {
            self.reset_at = Some(Instant::now() + self.rng.random_range(Duration::ZERO..=RESET));
            self.wake_device();
        }
    }

    fn fresh_id(&mut self) -> u32 {
        self.last_id += 1;
        self.last_id
    }

    pub(super) fn register(&mut self, memory: DeviceMemory) -> RegionId {
        let id = RegionId(self.fresh_id());
        if !self.is_over {
            self.regions.insert(id, memory);
        }
        id
    }

    pub(super) fn attach(&mut self, memory: Arc<Arena>, doorbell: SimRinger) -> Result<PeerId> {
        if self.is_over {
            return Err(ChannelError::EngineStopped("sim".to_owned()));
        }
        let id = PeerId(self.fresh_id());
        self.peers.insert(id, AttachedPeer { memory, doorbell });
        self.trace.add("attach", &[id.0.into()]);
        Ok(id)
    }

    pub(super) fn register_window(&mut self, peer: PeerId, range: Range<usize>) -> Result<RegionId> {
        let Some(peer) = self.peers.get(&peer) else {
            return Err(ChannelError::Transfer("the peer is not attached".to_owned()));
        };
        let memory = peer.memory.for_device(range)?;
        Ok(self.register(memory))
    }

    /// Puts an item into a queue.
    pub(super) fn push(&mut self, queue: QueueId, item: SimItem) {
        if !self.is_over {
            self.queues[queue].items.push_back(item);
            self.wake_device();
        }
    }

    pub(super) fn post(&mut self, queue: QueueId, chain: Chain) -> Result<(), RejectedChain> {
        let depth = self.options.queue_depth;
        let into = &mut self.queues[queue];
        if into.posted >= depth {
            into.was_full = true;
            return Err(RejectedChain::Full(chain));
        }
        if !self.is_over {
            into.posted += 1;
            self.push(queue, SimItem::Chain(chain, Instant::now()));
        }
        Ok(())
    }

    pub(super) fn poll_completions(&mut self, cx: &Context<'_>, out: &mut Vec<ChainCompletion>) {
        self.caller = Some(cx.waker().clone());
        out.append(&mut self.completions);
    }

    fn wake_device(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn wake_caller(&mut self) {
        if let Some(caller) = self.caller.take() {
            caller.wake();
        }
    }

    /// Performs everything that is due, in the order of the times.
    pub(super) fn work(&mut self) {
        let now = Instant::now();
        self.start_chains();
        while let Some((at, event)) = self.next().filter(|(at, _)| *at <= now) {
            match event {
                Event::Reset => self.reset(at),
                Event::Queue(queue) => self.advance(queue, at),
            }
            self.start_chains();
        }
    }

    /// When the device next has work to do.
    pub(super) fn next_event(&self) -> Option<Instant> {
        self.next().map(|(at, _)| at)
    }

    fn next(&self) -> Option<(Instant, Event)> {
        let hangs = self.failure == Some(DeviceFailure::Hangs);
        let heads = self.queues.iter().enumerate().filter(|_| !hangs).filter_map(|(number, queue)| {
            let head = queue.head.as_ref()?;
            Some((head.moves_at.unwrap_or(head.ends_at), Event::Queue(number)))
        });
        let reset = self.reset_at.map(|at| (at, Event::Reset));
        // `min_by_key` returns the first of several events with the same time.
        reset.into_iter().chain(heads).min_by_key(|(at, _)| *at)
    }

    fn start_chains(&mut self) {
        for queue in 0..self.queues.len() {
            while self.queues[queue].head.is_none() {
                let Some(item) = self.queues[queue].items.pop_front() else { break };
                self.start(queue, item);
            }
        }
    }

    fn start(&mut self, queue: QueueId, item: SimItem) {
        match item {
            SimItem::Chain(chain, posted_at) => {
                let started = posted_at.max(self.queues[queue].free_at);
                let (moves_at, ends_at, fault) = (None, started, None);
                let head = RunningChain { chain, done: 0, started, moves_at, ends_at, fault };
                self.queues[queue].head = Some(head);
                self.prepare(queue, started);
            }
            SimItem::Unregister(id) => drop(Arc::into_inner(id).map(|id| self.regions.remove(&id))),
            SimItem::Detach(id) => drop(Arc::into_inner(id).map(|id| self.peers.remove(&id))),
        }
    }

    /// Decides the times and the fault of the next transfer of a queue, which begins at `at`. An
    /// empty chain takes a random time, too.
    fn prepare(&mut self, queue: QueueId, at: Instant) {
        let options = &self.options;
        let (rng, faults) = (&mut self.rng, options.faults);
        let Some(head) = &mut self.queues[queue].head else { return };
        let jitter = rng.random_range(Duration::ZERO..=options.jitter);
        let Some(transfer) = head.chain.transfers.get(head.done) else {
            (head.moves_at, head.ends_at, head.fault) = (None, at + jitter, None);
            return;
        };
        let faults = if transfer.len < faults.min_len { EngineFaults::default() } else { faults };
        let kib = u32::try_from(transfer.len.div_ceil(1024)).unwrap_or(u32::MAX);
        let setup = options.setup + if head.done == 0 { options.setup_cost } else { Duration::ZERO };
        let usual = at + setup + options.per_kib * kib + jitter;
        (head.moves_at, head.ends_at, head.fault) = (Some(usual), usual, None);
        if rng.random_bool(faults.stall) {
            head.ends_at = usual + rng.random_range(Duration::ZERO..=faults.stall_max);
            self.stats.stalled += 1;
            if rng.random_bool(0.5) {
                head.moves_at = Some(head.ends_at);
                self.stats.moved_late += 1;
            }
        }
        if rng.random_bool(faults.fail) {
            head.fault = Some(TransferFault::Fail);
        } else if rng.random_bool(faults.corrupt) {
            head.fault = Some(TransferFault::Corrupt);
        }
        if rng.random_bool(faults.device) {
            let hangs = rng.random_bool(0.5);
            self.break_down(if hangs { DeviceFailure::Hangs } else { DeviceFailure::Fails });
        }
    }

    /// Performs the next step of the chain at the head of a queue.
    fn advance(&mut self, queue: QueueId, at: Instant) {
        let Some(mut head) = self.queues[queue].head.take() else { return };
        if head.moves_at.take().is_some() {
            let transfer = head.chain.transfers[head.done];
            if let Err(why) = self.carry_out(queue, &transfer, head.fault) {
                let failed = ChainFailure { done: head.done, why };
                return self.finish(queue, head, Err(failed), at);
            }
            self.queues[queue].head = Some(head);
            return;
        }
        head.done += 1;
        if head.done < head.chain.transfers.len() {
            self.queues[queue].head = Some(head);
            return self.prepare(queue, at);
        }
        self.finish(queue, head, Ok(()), at);
    }

    /// Moves the bytes of a transfer. A transfer that fails because of a fault moves a part of them.
    fn carry_out(
        &mut self,
        queue: QueueId,
        transfer: &Transfer,
        fault: Option<TransferFault>,
    ) -> Result<(), String> {
        if self.failure == Some(DeviceFailure::Fails) {
            return Err("the device has failed".to_owned());
        }
        let fails = fault == Some(TransferFault::Fail);
        let len = if fails { self.rng.random_range(0..=transfer.len) } else { transfer.len };
        let region = |id| self.regions.get(&id).ok_or_else(|| format!("{id:?} is not registered"));
        let (src, dst) = (region(transfer.src.region)?, region(transfer.dst.region)?);
        self.buffer.resize(len, 0);
        if !src.copy_out(transfer.src.offset, &mut self.buffer) {
            return Err(format!("{transfer:?} is outside its regions"));
        }
        if fault == Some(TransferFault::Corrupt) && len > 0 {
            let at = self.rng.random_range(0..len);
            self.buffer[at] ^= 1 << self.rng.random_range(0..8);
            self.stats.corrupted += 1;
        }
        if !dst.copy_in(transfer.dst.offset, &self.buffer) {
            return Err(format!("{transfer:?} is outside its regions"));
        }
        let (from, to) = (transfer.src, transfer.dst);
        let numbers = [
            queue as u64,
            from.region.0.into(),
            from.offset as u64,
            to.region.0.into(),
            to.offset as u64,
            len as u64,
            crc32c(&self.buffer).into(),
        ];
        self.trace.add("transfer", &numbers);
        if fails {
            self.stats.failed += 1;
            return Err("a fault was injected".to_owned());
        }
        self.counters.bytes += len as u64;
        self.counters.transfers += 1;
        Ok(())
    }

    fn finish(&mut self, queue: QueueId, head: RunningChain, result: Result<(), ChainFailure>, at: Instant) {
        let RunningChain { chain, started, .. } = head;
        if let (Some(times), Ok(())) = (&chain.times, &result) {
            times.record(started, at);
        }
        let tag = chain.tag.unwrap_or(0);
        self.trace.add("end of a chain", &[queue as u64, tag, result.is_err().into()]);
        match (&result, chain.ring) {
            (Ok(()), Some((peer, count))) => self.ring(peer, count),
            (Ok(()), None) => {}
            (Err(_), _) => self.counters.failed += 1,
        }
        if chain.tag.is_some() || result.is_err() {
            self.completions.push(ChainCompletion { tag, result, started, finished: at });
            self.wake_caller();
        }
        let from = &mut self.queues[queue];
        from.posted -= 1;
        from.free_at = at;
        if from.posted <= self.options.queue_depth / 2 && std::mem::take(&mut from.was_full) {
            self.wake_caller();
        }
    }

    fn ring(&mut self, peer: PeerId, count: u64) {
        if self.rng.random_bool(self.options.faults.drop_doorbell) {
            self.stats.dropped_doorbells += 1;
            return self.trace.add("a doorbell is dropped", &[peer.0.into(), count]);
        }
        self.trace.add("doorbell", &[peer.0.into(), count]);
        if let Some(peer) = self.peers.get(&peer) {
            self.counters.doorbells += 1;
            peer.doorbell.ring(count);
        }
    }

    /// Cancels all chains and repairs the device.
    fn reset(&mut self, at: Instant) {
        (self.reset_at, self.failure) = (None, None);
        self.stats.resets += 1;
        self.trace.add("reset", &[]);
        for queue in 0..self.queues.len() {
            loop {
                if let Some(head) = self.queues[queue].head.take() {
                    let failed = ChainFailure { done: head.done, why: "the engine was reset".to_owned() };
                    self.finish(queue, head, Err(failed), at);
                }
                let Some(item) = self.queues[queue].items.pop_front() else { break };
                match item {
                    SimItem::Chain(chain, _) => {
                        let (moves_at, ends_at, fault) = (None, at, None);
                        let head = RunningChain { chain, done: 0, started: at, moves_at, ends_at, fault };
                        self.queues[queue].head = Some(head);
                    }
                    other => self.start(queue, other),
                }
            }
        }
    }
}
