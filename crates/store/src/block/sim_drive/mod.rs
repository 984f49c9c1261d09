//! [`SimDrive`]: a drive in simulated time, with faults and power failures.
//!
//! **Time.** Requests of the I/O ring complete after a latency that depends on the drive's random
//! numbers. The completions are delivered by timers of the Tokio runtime, whose clock a simulation
//! pauses. Requests that are due at the same tick complete in the order of their exact times.
//!
//! **Blocking operations.** Recovery and checkpoints are synchronous code. Their writes and flushes
//! enter a queue, and succeed at once. The drive executes the queue in order, in simulated time.
//! Blocking reads see the content of the queue. A mount or a checkpoint is complete when the drive
//! has executed its operations, so a crash can hit every point of a checkpoint. Blocking reads take
//! no time. The drive sorts the writes between two flushes by offset, because the index writes its
//! pages in the order of a hash table, which depends on the processor.
//!
//! **Durability.** A completed write is visible, but volatile until a flush that was submitted
//! after the write's completion has completed. A [power failure](SimDrive::power_failure) loses any
//! volatile sectors. The [end of a mount](SimDrive::sever) without a power failure loses only
//! writes that have not completed.

mod backend;
mod faults;
mod image;
mod mount;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::block::{BLOCK, BLOCK_SIZE, crc32c};
use base::clock::Instant;
use rand::Rng;
use rand::rngs::StdRng;

use super::io::{IoOp, IoRequest};
use super::superblock::{SECTOR, SUPERBLOCKS, Superblock};

pub(super) use backend::SimBackend;
pub use faults::{DriveCounts, DriveFault, FaultKind};
use faults::{DriveFaults, DriveRequestKind, FaultVerdict};
use image::{Image, ImageDrive, SimPage};

/// Latencies of a simulated drive. A request takes its base latency, a random part of the jitter,
/// and the transfer time of its blocks. Timers of Tokio round the end up to a whole millisecond.
#[derive(Debug, Clone)]
pub struct DriveTimes {
    /// Base latency of a read.
    pub read: Duration,
    /// Base latency of a write.
    pub write: Duration,
    /// Base latency of a flush.
    pub flush: Duration,
    /// Maximum random addition.
    pub jitter: Duration,
    /// Transfer time of a block of 4 KiB.
    pub block: Duration,
    /// Probability that a request takes [`slow`](Self::slow) longer.
    pub slow_probability: f64,
    /// Maximum addition for a slow request.
    pub slow: Duration,
}

impl Default for DriveTimes {
    /// Returns the latencies of a solid-state drive with occasional pauses.
    fn default() -> DriveTimes {
        DriveTimes {
            read: Duration::from_micros(80),
            write: Duration::from_micros(20),
            flush: Duration::from_micros(400),
            jitter: Duration::from_micros(300),
            block: Duration::from_micros(2),
            slow_probability: 0.01,
            slow: Duration::from_millis(20),
        }
    }
}

/// The volatile content that survives a power failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Survivors {
    /// No volatile write.
    Nothing,
    /// All submitted writes.
    Everything,
    /// A random choice of whole writes.
    Writes,
    /// A random choice of 512-byte sectors.
    Sectors,
}

/// A part of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrivePart {
    /// The two copies of the superblock.
    Superblock,
    /// The redo log.
    Log,
    /// The index.
    Index,
    /// The data area.
    Data,
}

/// A copy of a drive's content. Copies share memory with the drive.
#[derive(Clone)]
pub struct DriveImage(Image);

impl fmt::Debug for DriveImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriveImage").field("size", &self.0.size()).finish_non_exhaustive()
    }
}

/// A simulated drive. It outlives the mounts of its target, as a real drive does.
///
/// All random decisions come from the generator that the creator supplies. A drive is used by one
/// thread, inside a Tokio runtime with time enabled.
pub struct SimDrive {
    state: Mutex<State>,
}

impl fmt::Debug for SimDrive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDrive").finish_non_exhaustive()
    }
}

struct State {
    rng: StdRng,
    times: DriveTimes,
    created: Instant,
    /// The content that reads return.
    cache: Image,
    /// The content that survives every power failure.
    durable: Image,
    /// Completed writes that are not durable, by the order of their completion.
    volatile: BTreeMap<u64, VolatileWrite>,
    /// Number of completed writes.
    completed_writes: u64,
    /// Submitted requests, by the times of their completion.
    in_flight: BTreeMap<(Instant, u64), SubmittedRequest>,
    /// Number of submitted requests.
    submitted: u64,
    queue: SyncQueue,
    /// Completed requests of the I/O ring of the current mount.
    done: Vec<Completed>,
    /// Number of the current or last mount.
    mount: u64,
    /// Whether a mount is in progress or in use.
    mounted: bool,
    /// Whether the drive was removed during the current mount.
    lost: bool,
    /// Whether the drive is removed.
    absent: bool,
    faults: DriveFaults,
    counts: DriveCounts,
    /// Hash of all events so far.
    trace: u64,
}

/// A completed write that is not durable.
#[derive(Debug)]
struct VolatileWrite {
    first: usize,
    /// The content of each block; `None` if a later durable write has replaced the block.
    pages: Vec<Option<SimPage>>,
    /// Whether a flush that covered the write has failed. Later flushes do not cover it.
    orphaned: bool,
}

impl VolatileWrite {
    /// Returns the content of block `number` if the write has it.
    fn page(&self, number: usize) -> Option<&SimPage> {
        self.pages.get(number.checked_sub(self.first)?)?.as_ref()
    }
}

/// A submitted request.
#[derive(Debug)]
struct SubmittedRequest {
    source: RequestSource,
    op: SubmittedOp,
    verdict: FaultVerdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestSource {
    /// The I/O ring; with the id of the request.
    Ring(u64),
    /// The queue of blocking operations; with the number of the operation.
    Queue(u64),
}

#[derive(Debug, Clone)]
enum SubmittedOp {
    Read(Range<usize>),
    Write {
        first: usize,
        pages: Vec<SimPage>,
    },
    /// A flush, with the number of writes that had completed when it was submitted.
    Flush(u64),
}

/// A completed request of the I/O ring.
#[derive(Debug)]
struct Completed {
    id: u64,
    result: io::Result<()>,
    /// The data of a read.
    pages: Vec<SimPage>,
}

/// The blocking writes and flushes of a mount that the drive has not executed.
#[derive(Debug, Default)]
struct SyncQueue {
    waiting: VecDeque<QueuedDriveOp>,
    /// Content of the blocks that the queue writes, with the number of the last write.
    overlay: BTreeMap<usize, (u64, SimPage)>,
    /// Whether the drive executes an operation of the queue.
    busy: bool,
    /// Number of writes at the end of the queue that follow the last flush.
    unsorted: usize,
    /// Number of operations that have entered the queue.
    entered: u64,
    /// Number of operations that the drive has executed.
    executed: u64,
}

#[derive(Debug)]
struct QueuedDriveOp {
    number: u64,
    op: SubmittedOp,
    verdict: FaultVerdict,
}

fn io_error() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

impl SimDrive {
    /// Creates a drive of `size` zero bytes. `size` must be a multiple of the block size.
    ///
    /// # Panics
    /// Outside of a Tokio runtime with time enabled.
    #[must_use]
    pub fn new(size: u64, rng: StdRng, times: DriveTimes) -> Arc<SimDrive> {
        assert!(size.is_multiple_of(BLOCK), "the size of a drive must be a multiple of the block size");
        SimDrive::with_image(&DriveImage(Image::zeros(size)), rng, times)
    }

    /// Creates a drive with the content of `image`.
    ///
    /// # Panics
    /// Outside of a Tokio runtime with time enabled.
    #[must_use]
    pub fn with_image(image: &DriveImage, rng: StdRng, times: DriveTimes) -> Arc<SimDrive> {
        let state = State {
            rng,
            times,
            created: Instant::now(),
            cache: image.0.clone(),
            durable: image.0.clone(),
            volatile: BTreeMap::new(),
            completed_writes: 0,
            in_flight: BTreeMap::new(),
            submitted: 0,
            queue: SyncQueue::default(),
            done: Vec::new(),
            mount: 0,
            mounted: false,
            lost: false,
            absent: false,
            faults: DriveFaults::default(),
            counts: DriveCounts::default(),
            trace: 0,
        };
        Arc::new(SimDrive { state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the drive and completes all requests that are due.
    fn now(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.advance(Instant::now());
        state
    }

    /// Returns the size of the drive, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.lock().cache.size()
    }

    /// Whether a store has mounted the drive's target.
    #[must_use]
    pub fn is_mounted(&self) -> bool {
        self.lock().mounted
    }

    /// Returns the counts of requests and of faults.
    #[must_use]
    pub fn counts(&self) -> DriveCounts {
        self.lock().counts
    }

    /// Returns a hash of all events of the drive and of their times.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.lock().trace
    }

    /// Injects a fault into later requests. Several faults may be active at a time.
    pub fn inject(&self, fault: DriveFault) {
        self.lock().faults.arm(fault);
    }

    /// Ends all injected faults.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// Ends the current mount, as a kill of the store's process does. Each request in progress
    /// either completes or has no effect. From now on, requests of this mount do not reach the
    /// drive.
    pub fn sever(&self) {
        self.now().sever();
    }

    /// Ends the current mount by a power failure. Loses volatile content at random. Returns which
    /// volatile content may have survived.
    pub fn power_failure(&self) -> Survivors {
        let mut state = self.now();
        let survivors = match state.rng.random_range(0..4u32) {
            0 => Survivors::Nothing,
            1 => Survivors::Everything,
            2 => Survivors::Writes,
            _ => Survivors::Sectors,
        };
        state.power_failure(survivors);
        survivors
    }

    /// Like [`power_failure`](Self::power_failure), with a given choice of volatile content.
    pub fn power_failure_with(&self, survivors: Survivors) {
        self.now().power_failure(survivors);
    }

    /// Returns the content that the drive could have after a power failure at this time. The drive
    /// does not change, except for the state of its random numbers.
    #[must_use]
    pub fn image_after_power_failure(&self, survivors: Survivors) -> DriveImage {
        DriveImage(self.now().survived(survivors).0)
    }

    /// Removes the drive. The drive loses volatile content as in a power failure. All requests of
    /// the current mount fail, even after the drive has [returned](Self::reinsert).
    pub fn remove(&self) {
        self.now().remove();
    }

    /// Reinserts a removed drive with its old content.
    pub fn reinsert(&self) {
        self.lock().absent = false;
    }

    /// Creates another drive with the content that reads return at this time, and with the same
    /// latencies.
    #[must_use]
    pub fn copy(&self, rng: StdRng) -> Arc<SimDrive> {
        let times = self.lock().times.clone();
        SimDrive::with_image(&self.image(), rng, times)
    }

    /// Returns a copy of the content that reads return at this time.
    #[must_use]
    pub fn image(&self) -> DriveImage {
        DriveImage(self.now().cache.clone())
    }

    /// Replaces the content of the drive, for example by an older content. Ends the current mount.
    ///
    /// # Panics
    /// If the image has another size than the drive.
    pub fn restore(&self, image: &DriveImage) {
        let mut state = self.now();
        assert_eq!(image.0.size(), state.cache.size(), "the image has the size of the drive");
        state.lose_volatile(Survivors::Nothing);
        state.end_mount();
        state.cache = image.0.clone();
        state.durable = image.0.clone();
    }

    /// Flips one random bit of a random durable block in `range` that is not zero. Returns the
    /// offset of the bit's byte; `None` if the range has no suitable block.
    pub fn flip_bit(&self, range: Range<u64>) -> Option<u64> {
        self.now().flip_bit(range)
    }

    /// Flips one random bit as [`flip_bit`](Self::flip_bit) does, in a part of the target. Returns
    /// `None` if the part has no suitable block, or if the drive has no target.
    pub fn flip_bit_in(&self, part: DrivePart) -> Option<u64> {
        let range = self.part(part)?;
        self.flip_bit(range)
    }

    /// Returns the range of a part of the target, in bytes; `None` if the drive has no target.
    #[must_use]
    pub fn part(&self, part: DrivePart) -> Option<Range<u64>> {
        let superblock = Superblock::read(&ImageDrive::new(self.image().0)).ok()?;
        let region = match part {
            DrivePart::Superblock => return Some(0..SUPERBLOCKS),
            DrivePart::Log => superblock.log,
            DrivePart::Index => superblock.index,
            DrivePart::Data => superblock.data,
        };
        Some(region.offset..region.offset + region.len)
    }
}

/// Adds a value to a hash (the mixing function of splitmix64).
fn mix_hash(hash: u64, value: u64) -> u64 {
    let mut x = (hash ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl SubmittedOp {
    fn kind(&self) -> DriveRequestKind {
        match self {
            SubmittedOp::Read(_) => DriveRequestKind::Read,
            SubmittedOp::Write { .. } => DriveRequestKind::Write,
            SubmittedOp::Flush(_) => DriveRequestKind::Flush,
        }
    }

    /// Returns the range of the access, in bytes.
    fn range(&self) -> Range<u64> {
        let blocks = match self {
            SubmittedOp::Read(blocks) => blocks.clone(),
            SubmittedOp::Write { first, pages } => *first..first + pages.len(),
            SubmittedOp::Flush(_) => 0..0,
        };
        blocks.start as u64 * BLOCK..blocks.end as u64 * BLOCK
    }
}

impl State {
    /// Adds an event to the trace.
    fn note(&mut self, event: u64, at: Instant, values: [u64; 2]) {
        let time = at.saturating_duration_since(self.created).as_nanos() as u64;
        self.trace = [event, time].into_iter().chain(values).fold(self.trace, mix_hash);
    }

    fn latency(&mut self, op: &SubmittedOp, stall: Duration) -> Duration {
        let times = &self.times;
        let base = match op {
            SubmittedOp::Read(_) => times.read,
            SubmittedOp::Write { .. } => times.write,
            SubmittedOp::Flush(_) => times.flush,
        };
        let range = op.range();
        let blocks = ((range.end - range.start) / BLOCK) as u32;
        let part = |rng: &mut StdRng, max: Duration| {
            Duration::from_nanos(rng.random_range(0..=max.as_nanos() as u64))
        };
        let mut latency = base + times.block * blocks + part(&mut self.rng, times.jitter) + stall;
        if self.rng.random_bool(times.slow_probability) {
            latency += part(&mut self.rng, times.slow);
        }
        latency
    }

    /// Submits a request of the I/O ring.
    fn submit(&mut self, request: &IoRequest, now: Instant) -> io::Result<()> {
        let op = match &request.op {
            IoOp::Read(segment) => SubmittedOp::Read(self.cache.range(request.offset, segment.len())?),
            IoOp::Write(pieces) => {
                let len = pieces.iter().map(|piece| piece.len()).sum();
                let first = self.cache.range(request.offset, len)?.start;
                SubmittedOp::Write { first, pages: pieces.iter().flat_map(|p| image::pages(p)).collect() }
            }
            IoOp::Flush => SubmittedOp::Flush(0),
        };
        let verdict = self.judge(&op, now);
        self.start(RequestSource::Ring(request.id), op, verdict, now);
        Ok(())
    }

    fn judge(&mut self, op: &SubmittedOp, now: Instant) -> FaultVerdict {
        self.faults.judge(op.kind(), op.range(), now, &mut self.rng, &mut self.counts)
    }

    /// Starts a request at time `now`.
    fn start(&mut self, source: RequestSource, mut op: SubmittedOp, verdict: FaultVerdict, now: Instant) {
        let latency = self.latency(&op, verdict.stall);
        match &mut op {
            SubmittedOp::Read(blocks) => {
                self.counts.reads += 1;
                let blocks = [blocks.start as u64, blocks.len() as u64];
                self.note(1, now + latency, blocks);
            }
            SubmittedOp::Write { first, pages } => {
                self.counts.writes += 1;
                if verdict.flips && !pages.is_empty() {
                    let damaged = self.rng.random_range(0..pages.len());
                    let bit = self.rng.random_range(0..8 * BLOCK_SIZE);
                    pages[damaged] = image::flip(&pages[damaged], bit);
                }
                let sums = pages.iter().map(|page| page.as_ref().map_or(0, |p| crc32c(&p[..]).into()));
                let content = sums.fold(0, mix_hash);
                let first = *first as u64;
                self.note(2, now + latency, [first, content]);
            }
            SubmittedOp::Flush(covered) => {
                self.counts.flushes += 1;
                *covered = self.completed_writes;
                self.note(3, now + latency, [self.completed_writes, 0]);
            }
        }
        self.submitted += 1;
        self.in_flight.insert((now + latency, self.submitted), SubmittedRequest { source, op, verdict });
    }

    /// Completes all requests that are due at time `now`.
    fn advance(&mut self, now: Instant) {
        self.start_queued(now);
        while let Some(entry) = self.in_flight.first_entry()
            && entry.key().0 <= now
        {
            let ((due, _), request) = entry.remove_entry();
            self.complete(request, due);
        }
    }

    /// Returns the time at which the next request completes.
    fn next_due(&mut self, now: Instant) -> Option<Instant> {
        self.start_queued(now);
        self.in_flight.first_key_value().map(|((due, _), _)| *due)
    }

    /// Starts the next operation of the queue, unless the drive executes an operation of the queue.
    fn start_queued(&mut self, now: Instant) {
        if self.queue.busy {
            return;
        }
        let Some(QueuedDriveOp { number, op, verdict }) = self.queue.waiting.pop_front() else { return };
        self.queue.busy = true;
        self.queue.unsorted = self.queue.unsorted.min(self.queue.waiting.len());
        self.start(RequestSource::Queue(number), op, verdict, now);
    }

    fn complete(&mut self, request: SubmittedRequest, at: Instant) {
        let SubmittedRequest { source, op, verdict } = request;
        let mut read = Vec::new();
        match op {
            SubmittedOp::Read(blocks) => {
                read = blocks.map(|number| self.cache.page(number).clone()).collect();
                if verdict.flips && !read.is_empty() {
                    let damaged = self.rng.random_range(0..read.len());
                    read[damaged] = image::flip(&read[damaged], self.rng.random_range(0..8 * BLOCK_SIZE));
                }
            }
            SubmittedOp::Write { first, pages } if verdict.fails => self.write_partly(first, pages),
            SubmittedOp::Write { first, pages } => self.write(first, pages),
            SubmittedOp::Flush(covered) if verdict.orphans => {
                self.volatile.range_mut(..=covered).for_each(|(_, write)| write.orphaned = true);
            }
            SubmittedOp::Flush(covered) if verdict.fails => self.drop_writes(covered),
            SubmittedOp::Flush(_) if verdict.lies => {}
            SubmittedOp::Flush(covered) => self.persist(covered),
        }
        match source {
            RequestSource::Ring(id) => {
                let result = if verdict.fails { Err(io_error()) } else { Ok(()) };
                self.done.push(Completed { id, result, pages: read });
            }
            RequestSource::Queue(number) => {
                self.queue.overlay.retain(|_, (last, _)| *last != number);
                self.queue.executed += 1;
                self.queue.busy = false;
                self.start_queued(at);
            }
        }
    }

    /// Completes a write.
    fn write(&mut self, first: usize, pages: Vec<SimPage>) {
        for (number, page) in (first..).zip(&pages) {
            self.cache.set(number, page.clone());
        }
        self.completed_writes += 1;
        let pages = pages.into_iter().map(Some).collect();
        self.volatile.insert(self.completed_writes, VolatileWrite { first, pages, orphaned: false });
    }

    /// Completes a write that has failed: the drive stores any of its sectors.
    fn write_partly(&mut self, first: usize, pages: Vec<SimPage>) {
        let chance = [0.0, 0.5, 1.0][self.rng.random_range(0..3)];
        let mixed = (first..).zip(pages).map(|(number, page)| {
            image::mix(self.cache.page(number), &page, || self.rng.random_bool(chance))
        });
        let mixed = mixed.collect();
        self.write(first, mixed);
    }

    /// Drops any of the first `covered` writes, because a flush has failed. Reads return the older
    /// content of their blocks.
    fn drop_writes(&mut self, covered: u64) {
        let chance = [0.0, 0.3, 1.0][self.rng.random_range(0..3)];
        let numbers: Vec<u64> = self.volatile.range(..=covered).map(|(number, _)| *number).collect();
        let mut blocks = BTreeSet::new();
        for number in numbers {
            if self.rng.random_bool(chance)
                && let Some(write) = self.volatile.remove(&number)
            {
                blocks.extend(write.first..write.first + write.pages.len());
            }
        }
        for block in blocks {
            let newest = self.volatile.values().rev().find_map(|write| write.page(block));
            let page = newest.unwrap_or(self.durable.page(block)).clone();
            self.cache.set(block, page);
        }
    }

    /// Makes the first `covered` writes durable.
    fn persist(&mut self, covered: u64) {
        let later = self.volatile.split_off(&(covered + 1));
        let mut orphans: BTreeMap<u64, VolatileWrite> = BTreeMap::new();
        for (completed, write) in std::mem::replace(&mut self.volatile, later) {
            if write.orphaned {
                orphans.insert(completed, write);
                continue;
            }
            for (number, page) in (write.first..).zip(write.pages) {
                let Some(page) = page else { continue };
                self.durable.set(number, page);
                for orphan in orphans.values_mut() {
                    if let Some(old) = number.checked_sub(orphan.first).and_then(|i| orphan.pages.get_mut(i))
                    {
                        *old = None;
                    }
                }
            }
        }
        self.volatile.append(&mut orphans);
    }

    /// Returns the first request in progress and removes it.
    fn take_in_flight(&mut self) -> Option<SubmittedRequest> {
        self.in_flight.pop_first().map(|(_, request)| request)
    }

    fn sever(&mut self) {
        self.counts.severed += u64::from(self.mounted);
        while let Some(request) = self.take_in_flight() {
            if self.rng.random_bool(0.5) {
                self.complete_last(request);
            }
        }
        self.end_mount();
    }

    /// Completes a request of a mount that has ended.
    fn complete_last(&mut self, request: SubmittedRequest) {
        match request.op {
            SubmittedOp::Write { first, pages } if !request.verdict.fails => self.write(first, pages),
            SubmittedOp::Flush(covered) if !request.verdict.fails && !request.verdict.lies => {
                self.persist(covered);
            }
            _ => {}
        }
    }

    /// Forgets the current mount, with its queue.
    fn end_mount(&mut self) {
        self.cut_off();
        self.mounted = false;
        self.mount += 1;
        self.lost = false;
        let now = Instant::now();
        self.note(4, now, [self.mount, self.completed_writes]);
    }

    /// Discards the requests in progress and the queue.
    fn cut_off(&mut self) {
        self.in_flight.clear();
        self.done.clear();
        self.counts.cut_off += self.queue.entered - self.queue.executed;
        self.queue = SyncQueue::default();
    }

    /// Ends the current mount by a power failure.
    fn power_failure(&mut self, survivors: Survivors) {
        self.counts.power_failures += 1;
        self.lose_volatile(survivors);
        self.end_mount();
    }

    /// Loses volatile content and all requests in progress.
    fn lose_volatile(&mut self, survivors: Survivors) {
        let (image, lost) = self.survived(survivors);
        self.counts.lost_sectors += lost;
        self.cache = image.clone();
        self.durable = image;
        self.volatile.clear();
        self.in_flight.clear();
    }

    /// Returns the content after a power failure, and the number of lost sectors.
    fn survived(&mut self, survivors: Survivors) -> (Image, u64) {
        let (mut image, mut lost) = (self.durable.clone(), 0);
        let mut writes: Vec<Vec<(usize, SimPage)>> = Vec::new();
        for VolatileWrite { first, pages, .. } in self.volatile.values() {
            writes.push((*first..).zip(pages).filter_map(|(n, page)| Some((n, page.clone()?))).collect());
        }
        for request in self.in_flight.values() {
            if let SubmittedOp::Write { first, pages } = &request.op {
                writes.push((*first..).zip(pages.iter().cloned()).collect());
            }
        }
        for write in writes {
            let whole = match survivors {
                Survivors::Nothing => Some(false),
                Survivors::Everything => Some(true),
                Survivors::Writes => Some(self.rng.random_bool(0.5)),
                Survivors::Sectors => None,
            };
            for (number, page) in write {
                let mixed = image::mix(image.page(number), &page, || {
                    let survives = whole.unwrap_or_else(|| self.rng.random_bool(0.5));
                    lost += u64::from(!survives);
                    survives
                });
                image.set(number, mixed);
            }
        }
        (image, lost)
    }

    fn remove(&mut self) {
        let survivors = if self.rng.random_bool(0.5) { Survivors::Nothing } else { Survivors::Sectors };
        let ids: Vec<u64> = self
            .in_flight
            .values()
            .filter_map(|r| match r.source {
                RequestSource::Ring(id) => Some(id),
                RequestSource::Queue(_) => None,
            })
            .collect();
        let mut done = std::mem::take(&mut self.done);
        self.lose_volatile(survivors);
        self.cut_off();
        done.extend(ids.into_iter().map(|id| Completed { id, result: Err(io_error()), pages: Vec::new() }));
        self.done = done;
        self.absent = true;
        self.lost = true;
        let now = Instant::now();
        self.note(5, now, [0, 0]);
    }

    fn flip_bit(&mut self, range: Range<u64>) -> Option<u64> {
        let is_volatile = |number: &usize| {
            let blocks = |write: &VolatileWrite| write.first..write.first + write.pages.len();
            self.volatile.values().any(|write| blocks(write).contains(number))
        };
        let mut found = self.cache.written(range);
        found.retain(|number| !is_volatile(number));
        if found.is_empty() {
            return None;
        }
        let number = found[self.rng.random_range(0..found.len())];
        let bit = self.rng.random_range(0..8 * BLOCK_SIZE);
        let flipped = image::flip(self.cache.page(number), bit);
        self.cache.set(number, flipped.clone());
        self.durable.set(number, flipped);
        self.counts.flips_at_rest += 1;
        let at = number as u64 * BLOCK + bit as u64 / 8;
        let now = Instant::now();
        self.note(6, now, [at, bit as u64]);
        Some(at)
    }
}

/// Blocking operations of the mount with number `mount`.
impl State {
    /// Fails if the mount has no access to the drive.
    fn check_access(&mut self, mount: u64) -> io::Result<()> {
        if mount != self.mount || !self.mounted {
            self.counts.refused += 1;
            return Err(io::Error::other("the mount has ended"));
        }
        if self.absent || self.lost {
            self.counts.absent_errors += 1;
            return Err(io_error());
        }
        Ok(())
    }

    fn read_now(&mut self, mount: u64, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.check_access(mount)?;
        let blocks = self.cache.range(offset, out.len())?;
        let range = offset..offset + out.len() as u64;
        let now = Instant::now();
        let verdict =
            self.faults.judge(DriveRequestKind::InstantRead, range, now, &mut self.rng, &mut self.counts);
        if verdict.fails {
            return Err(io_error());
        }
        for (number, block) in blocks.zip(out.chunks_exact_mut(BLOCK_SIZE)) {
            let page = match self.queue.overlay.get(&number) {
                Some((_, page)) => page,
                None => self.cache.page(number),
            };
            block.copy_from_slice(image::bytes(page));
        }
        if verdict.flips && !out.is_empty() {
            let bit = self.rng.random_range(0..8 * out.len());
            out[bit / 8] ^= 1 << (bit % 8);
        }
        Ok(())
    }

    fn write_later(&mut self, mount: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check_access(mount)?;
        let first = self.cache.range(offset, data.len())?.start;
        let mut pages: Vec<SimPage> = image::pages(data).collect();
        let op = SubmittedOp::Write { first, pages: Vec::new() };
        let range = offset..offset + data.len() as u64;
        let now = Instant::now();
        let verdict = self.faults.judge(op.kind(), range, now, &mut self.rng, &mut self.counts);
        if verdict.fails {
            let chance = [0.0, 0.5, 1.0][self.rng.random_range(0..3)];
            for (number, page) in (first..).zip(&mut pages) {
                let old = match self.queue.overlay.get(&number) {
                    Some((_, old)) => old,
                    None => self.cache.page(number),
                };
                *page = image::mix(old, page, || self.rng.random_bool(chance));
            }
        }
        let number = self.queue.entered + 1;
        for (block, page) in (first..).zip(&pages) {
            self.queue.overlay.insert(block, (number, page.clone()));
        }
        self.queue.unsorted += 1;
        let later = FaultVerdict { fails: false, ..verdict };
        self.enqueue(SubmittedOp::Write { first, pages }, later);
        if verdict.fails { Err(io_error()) } else { Ok(()) }
    }

    fn flush_later(&mut self, mount: u64) -> io::Result<()> {
        self.check_access(mount)?;
        let verdict = self.judge(&SubmittedOp::Flush(0), Instant::now());
        let sorted = self.queue.waiting.len() - self.queue.unsorted;
        let first = |queued: &QueuedDriveOp| queued.op.range().start;
        self.queue.waiting.make_contiguous()[sorted..].sort_by_key(first);
        self.queue.unsorted = 0;
        self.enqueue(SubmittedOp::Flush(0), verdict);
        if verdict.fails { Err(io_error()) } else { Ok(()) }
    }

    fn enqueue(&mut self, op: SubmittedOp, verdict: FaultVerdict) {
        self.queue.entered += 1;
        self.queue.waiting.push_back(QueuedDriveOp { number: self.queue.entered, op, verdict });
    }
}

const _: () = assert!(BLOCK_SIZE.is_multiple_of(SECTOR));
