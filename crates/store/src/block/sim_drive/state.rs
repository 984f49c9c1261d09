//! The state of a simulated drive.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::time::Duration;

use base::block::{BLOCK, BLOCK_SIZE, crc32c};
use base::clock::Instant;
use rand::Rng;
use rand::rngs::StdRng;

use super::super::io::{IoOp, IoRequest};
use super::faults::{DriveCounts, DriveFaults, DriveRequestKind, FaultVerdict};
use super::image::{self, Image, SimPage};
use super::{DriveTimes, Survivors};

/// The state of a drive.
pub(super) struct State {
    pub(super) rng: StdRng,
    pub(super) times: DriveTimes,
    pub(super) created: Instant,
    /// The content that reads return.
    pub(super) cache: Image,
    /// The content that survives every power failure.
    pub(super) durable: Image,
    /// Completed writes that are not durable, by the order of their completion.
    pub(super) volatile: BTreeMap<u64, VolatileWrite>,
    /// Number of completed writes.
    pub(super) completed_writes: u64,
    /// Submitted requests, by the times of their completion.
    pub(super) in_flight: BTreeMap<(Instant, u64), SubmittedRequest>,
    /// Number of submitted requests.
    pub(super) submitted: u64,
    pub(super) queue: SyncQueue,
    flushes: SimFlushes,
    /// Completed requests of the I/O ring of the current mount.
    pub(super) done: Vec<Completed>,
    /// Number of the current or last mount.
    pub(super) mount: u64,
    /// Whether a mount is in progress or in use.
    pub(super) mounted: bool,
    /// Whether the drive was removed during the current mount.
    pub(super) lost: bool,
    /// Whether the drive is removed.
    pub(super) absent: bool,
    pub(super) faults: DriveFaults,
    pub(super) counts: DriveCounts,
    /// Hash of all events so far.
    pub(super) trace: u64,
}

/// A completed write that is not durable.
#[derive(Debug)]
pub(super) struct VolatileWrite {
    pub(super) first: usize,
    /// The content of each block; `None` if a later durable write has replaced the block.
    pub(super) pages: Vec<Option<SimPage>>,
    /// Whether a flush that covered the write has failed. Later flushes do not cover it.
    pub(super) orphaned: bool,
}

impl VolatileWrite {
    /// Returns the content of block `number` if the write has it.
    fn page(&self, number: usize) -> Option<&SimPage> {
        self.pages.get(number.checked_sub(self.first)?)?.as_ref()
    }
}

/// A submitted request.
#[derive(Debug)]
pub(super) struct SubmittedRequest {
    pub(super) source: RequestSource,
    pub(super) op: SubmittedOp,
    pub(super) verdict: FaultVerdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestSource {
    /// The I/O ring; with the id of the request.
    Ring(u64),
    /// The queue of blocking operations; with the number of the operation.
    Queue(u64),
}

#[derive(Debug, Clone)]
pub(super) enum SubmittedOp {
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
pub(super) struct Completed {
    pub(super) id: u64,
    pub(super) result: io::Result<()>,
    /// The data of a read.
    pub(super) pages: Vec<SimPage>,
}

/// The blocking writes and flushes of a mount that the drive has not executed.
#[derive(Debug, Default)]
pub(super) struct SyncQueue {
    pub(super) waiting: VecDeque<QueuedDriveOp>,
    /// Content of the blocks that the queue writes, with the number of the last write.
    pub(super) overlay: BTreeMap<usize, (u64, SimPage)>,
    /// Whether the drive executes an operation of the queue.
    pub(super) busy: bool,
    /// Number of writes at the end of the queue that follow the last flush.
    pub(super) unsorted: usize,
    /// Number of operations that have entered the queue.
    pub(super) entered: u64,
    /// Number of operations that the drive has executed.
    pub(super) executed: u64,
    /// Whether the thread that fills the queue has given up, because an earlier flush has failed.
    pub(super) has_failed: bool,
}

/// The flushes of the I/O ring and of the queue. Like with a real drive
/// ([`FlushGate`](super::super::flush_gate::FlushGate)), one flush runs at a time, and none after a
/// flush has failed.
#[derive(Debug, Default)]
pub(super) struct SimFlushes {
    is_busy: bool,
    has_failed: bool,
    /// Flushes of the ring that wait until another flush has ended.
    held: VecDeque<(u64, FaultVerdict)>,
}

#[derive(Debug)]
pub(super) struct QueuedDriveOp {
    pub(super) number: u64,
    pub(super) op: SubmittedOp,
    pub(super) verdict: FaultVerdict,
}

pub(super) fn io_error() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

/// Adds a value to a hash (the mixing function of splitmix64).
pub(super) fn mix_hash(hash: u64, value: u64) -> u64 {
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
    pub(super) fn new(image: Image, rng: StdRng, times: DriveTimes) -> State {
        State {
            rng,
            times,
            created: Instant::now(),
            cache: image.clone(),
            durable: image,
            volatile: BTreeMap::new(),
            completed_writes: 0,
            in_flight: BTreeMap::new(),
            submitted: 0,
            queue: SyncQueue::default(),
            flushes: SimFlushes::default(),
            done: Vec::new(),
            mount: 0,
            mounted: false,
            lost: false,
            absent: false,
            faults: DriveFaults::default(),
            counts: DriveCounts::default(),
            trace: 0,
        }
    }

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
    pub(super) fn submit(&mut self, request: &IoRequest, now: Instant) -> io::Result<()> {
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
        if let SubmittedOp::Flush(_) = op {
            self.flushes.held.push_back((request.id, verdict));
            self.start_flush(now);
        } else {
            self.start(RequestSource::Ring(request.id), op, verdict, now);
        }
        Ok(())
    }

    /// Starts the next held flush of the ring, unless another flush runs.
    fn start_flush(&mut self, now: Instant) {
        while !self.flushes.is_busy
            && let Some((id, verdict)) = self.flushes.held.pop_front()
        {
            if self.flushes.has_failed {
                self.done.push(Completed { id, result: Err(io_error()), pages: Vec::new() });
            } else {
                self.start(RequestSource::Ring(id), SubmittedOp::Flush(0), verdict, now);
            }
        }
    }

    fn judge(&mut self, op: &SubmittedOp, now: Instant) -> FaultVerdict {
        self.faults.judge(op.kind(), op.range(), now, &mut self.rng, &mut self.counts)
    }

    /// Starts a request at time `now`.
    fn start(&mut self, source: RequestSource, mut op: SubmittedOp, mut verdict: FaultVerdict, now: Instant) {
        // An operation of the queue may start long after its verdict.
        if verdict.stalls_until.is_some_and(|until| now >= until) {
            verdict.stall = Duration::ZERO;
        }
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
                self.flushes.is_busy = true;
                *covered = self.completed_writes;
                self.note(3, now + latency, [self.completed_writes, 0]);
            }
        }
        self.submitted += 1;
        self.in_flight.insert((now + latency, self.submitted), SubmittedRequest { source, op, verdict });
    }

    /// Completes all requests that are due at time `now`.
    pub(super) fn advance(&mut self, now: Instant) {
        self.start_queued(now);
        while let Some(entry) = self.in_flight.first_entry()
            && entry.key().0 <= now
        {
            let ((due, _), request) = entry.remove_entry();
            self.complete(request, due);
        }
    }

    /// Discards the rest of the queue: its next flush fails, so the thread would not have continued.
    /// The mount still reads what it has written, because its index believes that it has written it.
    fn give_up_queue(&mut self) {
        self.queue.waiting.clear();
        (self.queue.unsorted, self.queue.executed) = (0, self.queue.entered);
        self.queue.has_failed = true;
    }

    /// Returns the time at which the next request completes.
    pub(super) fn next_due(&mut self, now: Instant) -> Option<Instant> {
        self.start_queued(now);
        self.in_flight.first_key_value().map(|((due, _), _)| *due)
    }

    /// Starts the next operation of the queue, unless the drive executes an operation of the queue.
    fn start_queued(&mut self, now: Instant) {
        if self.queue.busy {
            return;
        }
        if let Some(QueuedDriveOp { op: SubmittedOp::Flush(_), .. }) = self.queue.waiting.front() {
            if self.flushes.has_failed {
                return self.give_up_queue();
            }
            if self.flushes.is_busy {
                return;
            }
        }
        let Some(QueuedDriveOp { number, op, verdict }) = self.queue.waiting.pop_front() else { return };
        self.queue.busy = true;
        self.queue.unsorted = self.queue.unsorted.min(self.queue.waiting.len());
        self.start(RequestSource::Queue(number), op, verdict, now);
    }

    fn complete(&mut self, request: SubmittedRequest, at: Instant) {
        let SubmittedRequest { source, op, verdict } = request;
        let is_flush = matches!(op, SubmittedOp::Flush(_));
        if is_flush {
            self.flushes.is_busy = false;
            self.flushes.has_failed |= verdict.fails;
        }
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
            }
        }
        if is_flush {
            self.start_flush(at);
        }
        self.start_queued(at);
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
    pub(super) fn take_in_flight(&mut self) -> Option<SubmittedRequest> {
        self.in_flight.pop_first().map(|(_, request)| request)
    }

    pub(super) fn sever(&mut self) {
        self.counts.severed += u64::from(self.mounted);
        while let Some(request) = self.take_in_flight() {
            if self.rng.random_bool(0.5) {
                self.complete_last(request);
            }
        }
        self.end_mount();
    }

    /// Completes a request of a mount that has ended.
    pub(super) fn complete_last(&mut self, request: SubmittedRequest) {
        match request.op {
            SubmittedOp::Write { first, pages } if !request.verdict.fails => self.write(first, pages),
            SubmittedOp::Flush(covered) if !request.verdict.fails && !request.verdict.lies => {
                self.persist(covered);
            }
            _ => {}
        }
    }

    /// Forgets the current mount, with its queue.
    pub(super) fn end_mount(&mut self) {
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
        self.flushes = SimFlushes::default();
    }

    /// Ends the current mount by a power failure.
    pub(super) fn power_failure(&mut self, survivors: Survivors) {
        self.counts.power_failures += 1;
        self.lose_volatile(survivors);
        self.end_mount();
    }

    /// Loses volatile content and all requests in progress.
    pub(super) fn lose_volatile(&mut self, survivors: Survivors) {
        let (image, lost) = self.survived(survivors);
        self.counts.lost_sectors += lost;
        self.cache = image.clone();
        self.durable = image;
        self.volatile.clear();
        self.in_flight.clear();
        self.flushes = SimFlushes::default();
    }

    /// Returns the content after a power failure, and the number of lost sectors.
    pub(super) fn survived(&mut self, survivors: Survivors) -> (Image, u64) {
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

    pub(super) fn remove(&mut self) {
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

    pub(super) fn flip_bit(&mut self, range: Range<u64>) -> Option<u64> {
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

/// Replaces content that a later write with another first block overwrites by the content of that write.
/// Then the order of these writes does not matter. Writes with the same first block keep their order.
fn keep_newest(writes: &mut [QueuedDriveOp]) {
    let mut newest: BTreeMap<usize, (usize, SimPage)> = BTreeMap::new();
    for queued in writes.iter_mut().rev() {
        let SubmittedOp::Write { first, pages } = &mut queued.op else { continue };
        for (block, page) in (*first..).zip(pages) {
            match newest.get(&block) {
                Some((by, content)) if by != first => *page = content.clone(),
                Some(_) => {}
                None => drop(newest.insert(block, (*first, page.clone()))),
            }
        }
    }
}

/// Blocking operations of the mount with number `mount`.
impl State {
    /// Fails if the mount has no access to the drive.
    pub(super) fn check_access(&mut self, mount: u64) -> io::Result<()> {
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

    pub(super) fn read_now(&mut self, mount: u64, offset: u64, out: &mut [u8]) -> io::Result<()> {
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

    pub(super) fn write_later(&mut self, mount: u64, offset: u64, data: &[u8]) -> io::Result<()> {
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

    pub(super) fn flush_later(&mut self, mount: u64) -> io::Result<()> {
        self.check_access(mount)?;
        let verdict = self.judge(&SubmittedOp::Flush(0), Instant::now());
        let sorted = self.queue.waiting.len() - self.queue.unsorted;
        let writes = &mut self.queue.waiting.make_contiguous()[sorted..];
        keep_newest(writes);
        writes.sort_by_key(|queued| queued.op.range().start);
        self.queue.unsorted = 0;
        self.enqueue(SubmittedOp::Flush(0), verdict);
        if verdict.fails { Err(io_error()) } else { Ok(()) }
    }

    fn enqueue(&mut self, op: SubmittedOp, verdict: FaultVerdict) {
        self.queue.entered += 1;
        self.queue.waiting.push_back(QueuedDriveOp { number: self.queue.entered, op, verdict });
    }
}
