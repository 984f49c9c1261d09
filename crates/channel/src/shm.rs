//! The emulated engine `shm`: a thread that stands for DMA hardware.
//!
//! Both memories are memfds. The thread `dma-0` is the only place in the system that maps both: peer memory is mapped
//! by that thread, held in that thread's own table ([`Device`]), and never leaves it. Its CPU time is what hardware
//! would save, and it is booked apart by its name.
//!
//! When its queue is empty it spins for up to [`ShmOptions::spin`], as long as that keeps finding work, and then parks;
//! an idle engine takes no CPU time.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::task::Context;
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use base::mem::Arena;
use base::thread::{ThreadClass, spawn};
use crossbeam_queue::SegQueue;
use futures::task::AtomicWaker;

use crate::{
    Chain, ChannelError, Completion, Counters, DmaEngine, Doorbell, DoorbellId, Region, RegionId, Result,
    Transfer, Unposted,
};

/// Transfers of BlueField-3's DMA engine are at most that long (DoCeph, section 3.3).
const MAX_TRANSFER: usize = 2 << 20;
const QUEUE_DEPTH: usize = 1024;
/// Doorbells and completions are held back while small chains keep coming, as interrupt coalescing does, but never
/// behind more than this many chains or bytes.
const COALESCE_CHAINS: usize = 16;
const COALESCE_BYTES: usize = 64 << 10;
/// So many failures in a row end spinning; then every so many sleeps it is tried again.
const SPIN_CREDIT_MAX: u32 = 8;
const SPIN_RETRY: u32 = 32;

/// Settings of a [`ShmEngine`].
#[derive(Debug, Clone, Copy)]
pub struct ShmOptions {
    /// How long the thread looks for more work before it sleeps.
    pub spin: Duration,
}

impl Default for ShmOptions {
    fn default() -> Self {
        ShmOptions { spin: Duration::from_micros(10) }
    }
}

/// The emulated engine. Dropping the last handle and the last region ends its thread.
pub struct ShmEngine {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    commands: SegQueue<Command>,
    completions: SegQueue<Completion>,
    waker: AtomicWaker,
    sleeping: AtomicBool,
    posted: AtomicUsize,
    was_full: AtomicBool,
    stopped: AtomicBool,
    worker: OnceLock<Thread>,
    next_id: AtomicU32,
    bytes: AtomicU64,
    transfers: AtomicU64,
    doorbells: AtomicU64,
    failed: AtomicU64,
}

enum Command {
    Chain(Chain),
    Local(RegionId, Arc<Arena>),
    Peer(RegionId, OwnedFd, usize, mpsc::SyncSender<Result<()>>),
    Doorbell(DoorbellId, OwnedFd, RegionId),
    Unregister(RegionId),
    Stop,
}

impl ShmEngine {
    /// Starts an engine and its thread.
    ///
    /// # Errors
    /// If the system has no room for another thread.
    pub fn start(options: ShmOptions) -> Result<Arc<ShmEngine>> {
        let shared = Arc::new(Shared {
            commands: SegQueue::new(),
            completions: SegQueue::new(),
            waker: AtomicWaker::new(),
            sleeping: AtomicBool::new(false),
            posted: AtomicUsize::new(0),
            was_full: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            worker: OnceLock::new(),
            next_id: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            transfers: AtomicU64::new(0),
            doorbells: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        });
        let device = Device::new(Arc::clone(&shared), options);
        let thread = spawn(ThreadClass::Dma, "0", move || device.run())?;
        let _ = shared.worker.set(thread.thread().clone());
        shared.wake_worker();
        Ok(Arc::new(ShmEngine { shared, thread: Mutex::new(Some(thread)) }))
    }

    fn region(&self, id: RegionId, len: usize) -> Region {
        let shared = Arc::clone(&self.shared);
        Region::new(id, len, Box::new(move || shared.send(Command::Unregister(id))))
    }

    fn fresh_id(&self) -> u32 {
        self.shared.next_id.fetch_add(1, Ordering::Relaxed)
    }
}

impl Shared {
    fn send(&self, command: Command) {
        self.commands.push(command);
        self.wake_worker();
    }

    /// Pairs with the fence in [`Device::sleep`]: either the worker sees the command, or we see that it sleeps.
    fn wake_worker(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed)
            && self.sleeping.swap(false, Ordering::AcqRel)
            && let Some(worker) = self.worker.get()
        {
            worker.unpark();
        }
    }
}

impl Drop for ShmEngine {
    fn drop(&mut self) {
        self.shared.send(Command::Stop);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The thread only copies memory, so it ends soon; a panic in it was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl DmaEngine for ShmEngine {
    fn name(&self) -> &str {
        "shm"
    }

    fn is_emulated(&self) -> bool {
        true
    }

    fn max_transfer(&self) -> usize {
        MAX_TRANSFER
    }

    fn queue_depth(&self) -> usize {
        QUEUE_DEPTH
    }

    fn register_local(&self, arena: &Arc<Arena>) -> Result<Region> {
        let id = RegionId(self.fresh_id());
        self.shared.send(Command::Local(id, Arc::clone(arena)));
        Ok(self.region(id, arena.len()))
    }

    fn register_peer(&self, fd: OwnedFd, len: usize) -> Result<Region> {
        let id = RegionId(self.fresh_id());
        let (tx, rx) = mpsc::sync_channel(1);
        self.shared.send(Command::Peer(id, fd, len, tx));
        rx.recv().map_err(|_| ChannelError::EngineStopped("shm".into()))??;
        Ok(self.region(id, len))
    }

    fn register_doorbell(&self, fd: OwnedFd, with: &Region) -> Result<DoorbellId> {
        let id = DoorbellId(self.fresh_id());
        self.shared.send(Command::Doorbell(id, fd, with.id()));
        Ok(id)
    }

    fn post(&self, chain: Chain) -> Result<(), Unposted> {
        if let Some(long) = chain.transfers.iter().find(|t| t.len > MAX_TRANSFER) {
            let what = format!("{} bytes in one transfer, at most {MAX_TRANSFER} are possible", long.len);
            return Err(Unposted::Refused(ChannelError::Transfer(what)));
        }
        if self.shared.stopped.load(Ordering::Relaxed) {
            return Err(Unposted::Refused(ChannelError::EngineStopped("shm".into())));
        }
        while self.shared.posted.fetch_add(1, Ordering::SeqCst) >= QUEUE_DEPTH {
            self.shared.posted.fetch_sub(1, Ordering::SeqCst);
            self.shared.was_full.store(true, Ordering::SeqCst);
            // If it has emptied meanwhile, nobody might wake us any more; then there is room.
            if self.shared.posted.load(Ordering::SeqCst) > QUEUE_DEPTH / 2 {
                return Err(Unposted::Full(chain));
            }
        }
        self.shared.send(Command::Chain(chain));
        Ok(())
    }

    fn poll_completions(&self, cx: &mut Context<'_>, out: &mut Vec<Completion>) {
        self.shared.waker.register(cx.waker());
        while let Some(completion) = self.shared.completions.pop() {
            out.push(completion);
        }
    }

    fn counters(&self) -> Counters {
        let get = |v: &AtomicU64| v.load(Ordering::Relaxed);
        Counters {
            bytes: get(&self.shared.bytes),
            transfers: get(&self.shared.transfers),
            doorbells: get(&self.shared.doorbells),
            failed: get(&self.shared.failed),
        }
    }
}

/// What the thread owns: the only holder of both sides' mappings.
struct Device {
    shared: Arc<Shared>,
    options: ShmOptions,
    regions: HashMap<RegionId, Arc<Arena>>,
    doorbells: HashMap<DoorbellId, (OwnedFd, RegionId)>,
    /// Doorbells to be rung, and whether there are completions to tell of.
    ringing: Vec<(DoorbellId, u64)>,
    completed: bool,
    held_chains: usize,
    /// How often spinning paid lately: at 0 it is only tried now and then.
    spin_credit: u32,
    sleeps: u32,
    running: bool,
    bytes_metric: metrics::Counter,
    transfers_metric: metrics::Counter,
}

impl Device {
    fn new(shared: Arc<Shared>, options: ShmOptions) -> Device {
        Device {
            shared,
            options,
            regions: HashMap::new(),
            doorbells: HashMap::new(),
            ringing: Vec::new(),
            completed: false,
            held_chains: 0,
            spin_credit: SPIN_CREDIT_MAX,
            sleeps: 0,
            running: true,
            bytes_metric: metrics::counter!("outboard_channel_dma_bytes"),
            transfers_metric: metrics::counter!("outboard_channel_dma_transfers"),
        }
    }

    fn run(mut self) {
        while self.running {
            while let Some(command) = self.shared.commands.pop() {
                self.execute(command);
            }
            self.announce();
            if self.running && !self.spin() {
                self.sleep();
            }
        }
        self.shared.stopped.store(true, Ordering::Relaxed);
    }

    /// Looks for a command for a while, if that paid lately; `true` if there is one.
    fn spin(&mut self) -> bool {
        self.sleeps = self.sleeps.wrapping_add(1);
        if self.spin_credit == 0 && !self.sleeps.is_multiple_of(SPIN_RETRY) {
            return false;
        }
        let started = Instant::now();
        while self.shared.commands.is_empty() {
            if started.elapsed() >= self.options.spin {
                self.spin_credit = self.spin_credit.saturating_sub(1);
                return false;
            }
            std::hint::spin_loop();
        }
        self.spin_credit = SPIN_CREDIT_MAX.min(self.spin_credit + 2);
        true
    }

    fn sleep(&self) {
        self.shared.sleeping.store(true, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
        while self.shared.commands.is_empty() && self.shared.sleeping.load(Ordering::Acquire) {
            std::thread::park();
        }
        self.shared.sleeping.store(false, Ordering::Relaxed);
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Chain(chain) => self.carry_out(chain),
            Command::Local(id, arena) => drop(self.regions.insert(id, arena)),
            Command::Peer(id, fd, len, reply) => {
                let mapped = Arena::from_peer(fd, len).map(|arena| drop(self.regions.insert(id, arena)));
                // The caller waits for this and cannot have gone.
                let _ = reply.send(mapped.map_err(ChannelError::from));
            }
            Command::Doorbell(id, fd, with) => drop(self.doorbells.insert(id, (fd, with))),
            Command::Unregister(id) => {
                self.announce();
                self.regions.remove(&id);
                self.doorbells.retain(|_, (_, with)| *with != id);
            }
            Command::Stop => self.running = false,
        }
    }

    fn carry_out(&mut self, chain: Chain) {
        let len: usize = chain.transfers.iter().map(|t| t.len).sum();
        if len > COALESCE_BYTES || self.held_chains >= COALESCE_CHAINS {
            self.announce();
        }
        let result = chain.transfers.iter().try_for_each(|t| self.copy(t));
        if result.is_ok() {
            self.shared.bytes.fetch_add(len as u64, Ordering::Relaxed);
            self.shared.transfers.fetch_add(chain.transfers.len() as u64, Ordering::Relaxed);
            self.bytes_metric.increment(len as u64);
            self.transfers_metric.increment(chain.transfers.len() as u64);
            if let Some((bell, count)) = chain.ring {
                self.hold_ring(bell, count);
            }
        } else {
            self.shared.failed.fetch_add(1, Ordering::Relaxed);
        }
        if chain.tag.is_some() || result.is_err() {
            self.shared.completions.push(Completion { tag: chain.tag.unwrap_or(0), result });
            self.completed = true;
        }
        self.held_chains += 1;
        if self.shared.posted.fetch_sub(1, Ordering::SeqCst) <= QUEUE_DEPTH / 2
            && self.shared.was_full.load(Ordering::SeqCst)
        {
            self.shared.was_full.store(false, Ordering::SeqCst);
            self.completed = true;
        }
    }

    fn copy(&self, transfer: &Transfer) -> Result<(), String> {
        let region = |id| self.regions.get(&id).ok_or_else(|| format!("{id:?} is not registered"));
        let (src, dst) = (region(transfer.src.region)?, region(transfer.dst.region)?);
        if dst.copy_from(transfer.dst.offset, src, transfer.src.offset, transfer.len) {
            Ok(())
        } else {
            Err(format!("{transfer:?} is outside its regions"))
        }
    }

    fn hold_ring(&mut self, bell: DoorbellId, count: u64) {
        match self.ringing.iter_mut().find(|(held, _)| *held == bell) {
            Some((_, held)) => *held += count,
            None => self.ringing.push((bell, count)),
        }
    }

    /// Rings what is held back and tells of completions.
    fn announce(&mut self) {
        self.held_chains = 0;
        for (bell, count) in self.ringing.drain(..) {
            if let Some((fd, _)) = self.doorbells.get(&bell) {
                self.shared.doorbells.fetch_add(1, Ordering::Relaxed);
                if let Err(e) = Doorbell::ring(fd.as_fd(), count) {
                    tracing::error!("doorbell {bell:?} cannot be rung: {e}");
                }
            }
        }
        if std::mem::take(&mut self.completed) {
            self.shared.waker.wake();
        }
    }
}
