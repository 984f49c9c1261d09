//! The loop of the emulated device's thread.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base::clock::Instant;
use base::collections::HashMap;
use base::fault::{Action, Faults, Site};
use base::mem::{Arena, DeviceMemory};

use super::{Profile, QUEUE_DEPTH, QUEUES, Shared, ShmCommand, ShmItem};
use crate::dma::{ChainFailure, PeerId, URGENT};
use crate::{Chain, ChainCompletion, ChannelError, Doorbell, RegionId, Result, Transfer};

/// Maximum number of chains whose doorbells and completions the device holds back. While short
/// chains keep arriving, it reports them together, as interrupt coalescing does.
const COALESCE_CHAINS: usize = 16;
/// Length in bytes above which a chain counts as payload. Before a longer transfer, the device
/// reports all doorbells and completions that it holds back.
const COALESCE_BYTES: usize = 64 << 10;
/// After this many urgent chains in a row, the other queues get a turn.
const URGENT_RUN: usize = 32;
/// Polling stops after it has found no work this many times in a row.
const SPIN_CREDIT_MAX: u32 = 8;
/// While polling is stopped, the thread still polls before one of every this many sleeps.
const SPIN_RETRY: u32 = 32;
/// Number of requests that the device remembers. It exceeds the number of requests whose payload is in
/// transfer at a time.
const REQUESTS: usize = 256;

/// A chain that is in progress.
struct CopyingChain {
    chain: Chain,
    /// Number of completed transfers.
    done: usize,
    started: Option<Instant>,
    /// Time until which a fault delays the next transfer.
    stalled: Option<Instant>,
    /// Whether an injected fault has already delayed the next transfer, so that no other fault
    /// applies to it.
    excused: bool,
}

/// The result of checking the queues.
enum PollOutcome {
    Worked,
    /// Nothing can be done before this time.
    Wait(Instant),
    Idle,
}

/// The state of the device's thread. Only this thread maps the memory of both sides.
pub(super) struct ShmDevice {
    shared: Arc<Shared>,
    pace: Option<(Duration, Duration)>,
    /// The latest requests whose fixed time has passed, if the fixed time belongs to requests.
    set_up: Option<VecDeque<u64>>,
    faults: Faults,
    regions: HashMap<RegionId, DeviceMemory>,
    peers: HashMap<PeerId, (Arc<Arena>, OwnedFd)>,
    /// The chain at the head of each queue.
    heads: [Option<CopyingChain>; QUEUES],
    /// The queue that had the last turn.
    last: usize,
    urgent_run: usize,
    /// The chain that a paced device has copied but not completed: its queue, the chain, and its
    /// end time.
    paced: Option<(usize, CopyingChain, Instant)>,
    /// Doorbells that the device holds back, with the sums of their counts.
    ringing: Vec<(PeerId, u64)>,
    completions: Vec<ChainCompletion>,
    completed: bool,
    held_chains: usize,
    /// Grows when polling finds work and shrinks when it does not. At 0, polling is only tried
    /// occasionally.
    spin_credit: u32,
    sleeps: u32,
    running: bool,
    bytes_metric: metrics::Counter,
    transfers_metric: metrics::Counter,
}

impl ShmDevice {
    pub(super) fn new(shared: Arc<Shared>, profile: Profile, faults: Faults) -> ShmDevice {
        ShmDevice {
            shared,
            pace: profile.pace(),
            set_up: (profile == Profile::Bf3Serial).then(VecDeque::new),
            faults,
            regions: HashMap::default(),
            peers: HashMap::default(),
            heads: Default::default(),
            last: URGENT,
            urgent_run: 0,
            paced: None,
            ringing: Vec::new(),
            completions: Vec::new(),
            completed: false,
            held_chains: 0,
            spin_credit: SPIN_CREDIT_MAX,
            sleeps: 0,
            running: true,
            bytes_metric: metrics::counter!("outboard_channel_dma_bytes"),
            transfers_metric: metrics::counter!("outboard_channel_dma_transfers"),
        }
    }

    pub(super) fn run(mut self) {
        while self.running {
            self.take_commands();
            match self.turn() {
                PollOutcome::Worked => {}
                PollOutcome::Wait(until) => {
                    self.announce();
                    if self.running {
                        self.sleep(Some(until));
                    }
                }
                PollOutcome::Idle => {
                    self.announce();
                    if self.running && !self.spin() {
                        self.sleep(None);
                    }
                }
            }
        }
    }

    /// Whether a command or an item can be handled now. Items behind an unfinished chain do not
    /// count.
    fn has_input(&self) -> bool {
        let open = |queue: usize| self.heads[queue].is_none() && !self.is_paced(queue);
        let mut queues = self.shared.queues.iter().enumerate();
        !self.shared.commands.is_empty() || queues.any(|(i, queue)| open(i) && !queue.items.is_empty())
    }

    /// Polls for work for a while if polling has found work recently. Returns `true` if there is
    /// work.
    fn spin(&mut self) -> bool {
        self.sleeps = self.sleeps.wrapping_add(1);
        let spin = Duration::from_nanos(self.shared.spin_ns.load(Ordering::Relaxed));
        if spin.is_zero() || self.spin_credit == 0 && !self.sleeps.is_multiple_of(SPIN_RETRY) {
            return false;
        }
        let started = Instant::now();
        while !self.has_input() {
            if started.elapsed() >= spin {
                self.spin_credit = self.spin_credit.saturating_sub(1);
                return false;
            }
            std::hint::spin_loop();
        }
        self.spin_credit = SPIN_CREDIT_MAX.min(self.spin_credit + 2);
        true
    }

    /// Sleeps until there is work, or until the given time.
    fn sleep(&self, until: Option<Instant>) {
        self.shared.sleeping.store(true, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
        while !self.has_input() && self.shared.sleeping.load(Ordering::Acquire) {
            match until.map(|until| until.saturating_duration_since(Instant::now())) {
                Some(left) if left.is_zero() => break,
                Some(left) => std::thread::park_timeout(left),
                None => std::thread::park(),
            }
        }
        self.shared.sleeping.store(false, Ordering::Relaxed);
    }

    fn take_commands(&mut self) {
        while let Some(command) = self.shared.commands.pop() {
            match command {
                ShmCommand::Local(id, memory) => drop(self.regions.insert(id, memory)),
                ShmCommand::Attach { id, memory, len, doorbell, reply } => {
                    let mapped = Arena::from_peer(memory, len).map_err(ChannelError::from);
                    let result = mapped.map(|arena| drop(self.peers.insert(id, (arena, doorbell))));
                    // The caller may have been cancelled; the peer is then being detached.
                    let _ = reply.send(result);
                }
                ShmCommand::Window(id, peer, range) => match self.window(peer, range) {
                    Ok(memory) => drop(self.regions.insert(id, memory)),
                    Err(e) => tracing::error!("peer memory cannot be mapped: {e}"),
                },
                ShmCommand::Reset => self.reset(),
                ShmCommand::Stop => self.running = false,
            }
        }
    }

    fn window(&self, peer: PeerId, range: std::ops::Range<usize>) -> Result<DeviceMemory> {
        let (whole, _) =
            self.peers.get(&peer).ok_or_else(|| ChannelError::Transfer("the peer is not attached".into()))?;
        Ok(whole.pinned_for_device(range)?)
    }

    /// Ensures that a queue has a chain at its head. Returns `false` if the queue is empty.
    fn fill(&mut self, queue: usize) -> bool {
        while self.heads[queue].is_none() {
            match self.shared.queues[queue].items.pop() {
                None => return false,
                Some(ShmItem::Chain(chain)) => {
                    self.heads[queue] =
                        Some(CopyingChain { chain, done: 0, started: None, stalled: None, excused: false });
                    // Handle commands first: they register the memory that the chain uses.
                    self.take_commands();
                }
                // Handle commands first: the command that created the region or the peer may not
                // have been handled yet.
                Some(ShmItem::Unregister(id)) => {
                    if let Some(id) = Arc::into_inner(id) {
                        self.take_commands();
                        self.announce();
                        self.regions.remove(&id);
                    }
                }
                Some(ShmItem::Detach(id)) => {
                    if let Some(id) = Arc::into_inner(id) {
                        self.take_commands();
                        self.announce();
                        self.peers.remove(&id);
                    }
                }
            }
        }
        true
    }

    /// Takes one step: a whole urgent chain, or one transfer of another chain.
    fn turn(&mut self) -> PollOutcome {
        let now = self.waits_for_time().then(Instant::now);
        let mut earliest = None;
        let mut wait = |until: Instant| {
            earliest = Some(earliest.map_or(until, |e: Instant| e.min(until)));
        };
        if let (Some((.., until)), Some(now)) = (&self.paced, now) {
            if *until <= now {
                if let Some((queue, work, until)) = self.paced.take() {
                    self.finish(queue, work, Ok(()), until);
                }
                return PollOutcome::Worked;
            }
            wait(*until);
        }
        let urgent_first = self.urgent_run < URGENT_RUN;
        let mut order: [usize; QUEUES] =
            std::array::from_fn(|i| if i == 0 { URGENT } else { 1 + (self.last + i - 1) % (QUEUES - 1) });
        if !urgent_first {
            order.rotate_left(1);
        }
        for queue in order {
            if self.is_paced(queue) || !self.fill(queue) || self.paced.is_some() && self.has_payload(queue) {
                continue;
            }
            if let Some(until) = self.heads[queue].as_ref().and_then(|work| work.stalled) {
                if until > now.unwrap_or_else(Instant::now) {
                    wait(until);
                    continue;
                }
                self.heads[queue].as_mut().expect("the queue has a chain at its head").stalled = None;
            }
            self.urgent_run = if queue == URGENT { self.urgent_run + 1 } else { 0 };
            if queue != URGENT {
                self.last = queue;
            }
            self.advance(queue);
            return PollOutcome::Worked;
        }
        self.urgent_run = 0;
        earliest.map_or(PollOutcome::Idle, PollOutcome::Wait)
    }

    /// Whether the unfinished paced chain belongs to this queue, so that the queue must wait.
    fn is_paced(&self, queue: usize) -> bool {
        self.paced.as_ref().is_some_and(|(of, ..)| *of == queue)
    }

    fn has_payload(&self, queue: usize) -> bool {
        self.heads[queue].as_ref().is_some_and(|work| is_payload(&work.chain))
    }

    fn waits_for_time(&self) -> bool {
        self.paced.is_some() || self.heads.iter().flatten().any(|work| work.stalled.is_some())
    }

    /// Performs the next transfer of the chain at the head of a queue. On the urgent queue or a
    /// paced device, performs all transfers of the chain.
    fn advance(&mut self, queue: usize) {
        let Some(mut work) = self.heads[queue].take() else { return };
        let whole = queue == URGENT || self.pace.is_some();
        let started = *work.started.get_or_insert_with(Instant::now);
        while let Some(transfer) = work.chain.transfers.get(work.done).copied() {
            if transfer.len > COALESCE_BYTES || self.held_chains >= COALESCE_CHAINS {
                self.announce();
            }
            match self.carry_out(&transfer, &mut work) {
                Ok(true) => work.done += 1,
                Ok(false) => {
                    self.heads[queue] = Some(work);
                    return;
                }
                Err(why) => {
                    let failed = ChainFailure { done: work.done, why };
                    return self.finish(queue, work, Err(failed), Instant::now());
                }
            }
            if !whole && work.done < work.chain.transfers.len() {
                self.heads[queue] = Some(work);
                return;
            }
        }
        match self.pace {
            Some((setup, per_1000_bytes)) if is_payload(&work.chain) => {
                let bytes = u32::try_from(work.chain.len()).unwrap_or(u32::MAX);
                let setup = if self.is_set_up(work.chain.request) { Duration::ZERO } else { setup };
                let until = started + setup + per_1000_bytes * bytes / 1000;
                self.paced = Some((queue, work, until));
            }
            _ => self.finish(queue, work, Ok(()), Instant::now()),
        }
    }

    /// Performs one transfer. Returns `false` if an injected fault delays it.
    fn carry_out(&mut self, transfer: &Transfer, work: &mut CopyingChain) -> Result<bool, String> {
        let fault = match std::mem::take(&mut work.excused) {
            true => None,
            false => self.faults.hit(Site::DmaTransfer),
        };
        match fault {
            Some(Action::Fail) => return Err("a fault was injected".to_owned()),
            Some(Action::Stall(late)) => {
                work.stalled = Some(Instant::now() + late);
                work.excused = true;
                return Ok(false);
            }
            _ => {}
        }
        let region = |id| self.regions.get(&id).ok_or_else(|| format!("{id:?} is not registered"));
        let (src, dst) = (region(transfer.src.region)?, region(transfer.dst.region)?);
        if !dst.copy_from(transfer.dst.offset, src, transfer.src.offset, transfer.len) {
            return Err(format!("{transfer:?} is outside its regions"));
        }
        if fault == Some(Action::Corrupt) && transfer.len > 0 {
            let at = transfer.dst.offset + transfer.len / 2;
            let inside = dst.invert(at);
            debug_assert!(inside, "the byte was just written");
        }
        self.shared.bytes.fetch_add(transfer.len as u64, Ordering::Relaxed);
        self.shared.transfers.fetch_add(1, Ordering::Relaxed);
        self.bytes_metric.increment(transfer.len as u64);
        self.transfers_metric.increment(1);
        Ok(true)
    }

    /// Whether the fixed time of this request has passed. From now on, it has.
    fn is_set_up(&mut self, request: Option<u64>) -> bool {
        let (Some(set_up), Some(request)) = (&mut self.set_up, request) else { return false };
        if set_up.contains(&request) {
            return true;
        }
        if set_up.len() == REQUESTS {
            set_up.pop_front();
        }
        set_up.push_back(request);
        false
    }

    fn finish(
        &mut self,
        queue: usize,
        work: CopyingChain,
        result: Result<(), ChainFailure>,
        finished: Instant,
    ) {
        let CopyingChain { chain, started, .. } = work;
        if let (Some(times), Ok(())) = (&chain.times, &result) {
            times.record(started.unwrap_or(finished), finished);
        }
        match &result {
            Ok(()) => {
                if let Some((peer, count)) = chain.ring {
                    self.hold_ring(peer, count);
                }
            }
            Err(_) => drop(self.shared.failed.fetch_add(1, Ordering::Relaxed)),
        }
        if chain.tag.is_some() || result.is_err() {
            let (tag, started) = (chain.tag.unwrap_or(0), started.unwrap_or(finished));
            self.completions.push(ChainCompletion { tag, result, started, finished });
            self.completed = true;
        }
        self.held_chains += 1;
        let queue = &self.shared.queues[queue];
        if queue.posted.fetch_sub(1, Ordering::SeqCst) <= QUEUE_DEPTH / 2
            && queue.was_full.swap(false, Ordering::SeqCst)
        {
            self.completed = true;
        }
    }

    /// Cancels all chains.
    fn reset(&mut self) {
        let paced = self.paced.take().map(|(queue, work, _)| (queue, work));
        let mut given_up: Vec<(usize, CopyingChain)> = paced.into_iter().collect();
        for queue in 0..QUEUES {
            while self.heads[queue].is_some() || self.fill(queue) {
                given_up.extend(self.heads[queue].take().map(|work| (queue, work)));
            }
        }
        for (queue, work) in given_up {
            let failed = ChainFailure { done: work.done, why: "the engine was reset".to_owned() };
            self.finish(queue, work, Err(failed), Instant::now());
        }
        self.announce();
    }

    fn hold_ring(&mut self, peer: PeerId, count: u64) {
        if self.faults.hit(Site::DmaDoorbell) == Some(Action::Drop) {
            return;
        }
        match self.ringing.iter_mut().find(|(held, _)| *held == peer) {
            Some((_, held)) => *held += count,
            None => self.ringing.push((peer, count)),
        }
    }

    /// Rings the doorbells and reports the completions that were held back.
    fn announce(&mut self) {
        self.held_chains = 0;
        for (peer, count) in self.ringing.drain(..) {
            if let Some((_, fd)) = self.peers.get(&peer) {
                self.shared.doorbells.fetch_add(1, Ordering::Relaxed);
                if let Err(e) = Doorbell::ring(fd.as_fd(), count) {
                    tracing::error!("the doorbell of {peer:?} cannot be rung: {e}");
                }
            }
        }
        // Report completions after the doorbells: a completion promises that the doorbell of its
        // chain was rung.
        for completion in self.completions.drain(..) {
            self.shared.completions.push(completion);
        }
        if std::mem::take(&mut self.completed) {
            self.shared.waker.wake();
        }
    }
}

/// Whether a chain is long enough to count as payload. Shorter chains move ring entries.
fn is_payload(chain: &Chain) -> bool {
    chain.len() > COALESCE_BYTES
}
