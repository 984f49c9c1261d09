//! The load of a measurement. Each client runs its part in its own thread.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use client::{Client, Pool};
use futures::future::join_all;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use tokio::sync::watch;

use super::entries::{self, EntryWorker};
use super::record::OpRecord;
use super::schedule::Schedule;
use super::{BenchArgs, Workload, session};
use node::failure::{Doing, Result};
use node::progress::ProgressMeter;

/// Longest delay of a wake-up that does not count for the latency of an operation. Timers fire up to
/// 2 ms late on an idle machine. A longer delay means that the client got no CPU time.
const TIMER_TOLERANCE: Duration = Duration::from_millis(2);

/// Maximum number of different latencies of the operations that no worker took before the end.
const MISSED_STEPS: u64 = 10_000;

/// Extra length, in bytes, of the buffer of random data. Objects start at different offsets of the
/// buffer.
const NOISE_SHIFT: usize = 1 << 16;

/// Number of writes in flight while the objects are prepared, and the most data of all of them.
pub const PREPARED_IN_FLIGHT: usize = 64;
const PREPARED_BYTES: usize = 64 << 20;

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// Reads a whole object.
    Read,
    /// Writes a whole object.
    Write,
}

/// What a worker does next.
#[derive(Debug)]
enum NextStep {
    /// Starts an operation whose latency counts from this moment.
    Start(Instant),
    /// Reports that an operation was not started before the end. It has waited for this time.
    Missed(Duration),
    /// Ends.
    End,
}

/// The part of the load that all clients share.
#[derive(Debug)]
pub struct SharedLoad {
    pool: String,
    workload: Workload,
    /// Size of an object; of a value in the workload `omap`.
    size: usize,
    /// Number of bytes that an operation reads or writes; a divisor of `size`.
    block: usize,
    objects: u64,
    /// Share of reads among the operations.
    reads: f64,
    noise: Bytes,
    next: AtomicU64,
    /// `None` if a worker starts an operation as soon as its last one has completed.
    schedule: Option<Schedule>,
    /// Duration of the measurement unless [`SharedLoad::stop`] ends it early.
    duration: Duration,
    /// The moment of the first call of [`SharedLoad::stop`].
    stopped: watch::Sender<Option<Instant>>,
}

/// Returns the number at the end of the name of an object. `None` if [`SharedLoad::name`] does not
/// write the number in this way, as in `007` or `+7`.
fn number_of(digits: &str) -> Option<usize> {
    digits.parse().ok().filter(|number: &usize| number.to_string() == digits)
}

/// The results of one client, or of all clients.
#[derive(Debug)]
pub struct LoadResult {
    pub reads: OpRecord,
    pub writes: OpRecord,
    /// Number of operations that failed.
    pub errors: u64,
    pub first_error: Option<String>,
    /// Number of operations that were due, and that no worker had started at the end.
    pub not_started: u64,
    /// The moment at which the last operation ended; `None` if the measurement did not start.
    pub ended: Option<Instant>,
}

/// The load of one client.
pub struct ClientLoad {
    shared: Arc<SharedLoad>,
    pool: Pool,
    /// Number of the client.
    number: u32,
    rng: RefCell<SmallRng>,
    reads: RefCell<OpRecord>,
    writes: RefCell<OpRecord>,
    errors: Cell<u64>,
    first_error: RefCell<Option<String>>,
    not_started: Cell<u64>,
    /// Numbers of the operations of the schedule that no worker of any client took before the end.
    rest: RefCell<Range<u64>>,
}

impl SharedLoad {
    /// Creates the load that the arguments describe.
    ///
    /// # Errors
    /// If the objects do not fit into the address space.
    pub fn new(args: &BenchArgs) -> Result<SharedLoad> {
        let size = usize::try_from(args.object_size.0).doing("reading --object-size")?;
        let mut noise = vec![0; size + NOISE_SHIFT];
        SmallRng::seed_from_u64(0x0b0a_7d00).fill_bytes(&mut noise);
        Ok(SharedLoad {
            pool: args.pool.clone(),
            workload: args.workload,
            size,
            block: usize::try_from(args.block_bytes()).doing("reading --block-size")?,
            objects: args.object_count(),
            reads: match args.workload {
                Workload::Read | Workload::Randread => 1.0,
                Workload::Write | Workload::Randwrite | Workload::Omap => 0.0,
                Workload::Randrw => f64::from(args.reads) / 100.0,
            },
            noise: noise.into(),
            next: AtomicU64::new(0),
            schedule: args.rate.map(Schedule::new),
            duration: args.duration(),
            stopped: watch::Sender::new(None),
        })
    }

    /// Ends the measurement. No operation starts from now on.
    pub fn stop(&self) {
        self.stopped.send_if_modified(|stopped| {
            let is_first = stopped.is_none();
            stopped.get_or_insert_with(Instant::now);
            is_first
        });
    }

    /// Returns the time in which operations start in a measurement that started at `start`.
    pub fn measured(&self, start: Instant) -> Duration {
        let stopped = self.stopped.borrow().map(|stopped| stopped.saturating_duration_since(start));
        stopped.map_or(self.duration, |stopped| stopped.min(self.duration))
    }

    /// Returns whether [`SharedLoad::stop`] ended a measurement early that started at `start`.
    pub fn is_stopped_early(&self, start: Instant) -> bool {
        self.measured(start) < self.duration
    }

    /// Returns `len` bytes of random data. Different numbers usually get different data.
    fn noise(&self, number: u64, len: usize) -> Bytes {
        let shift = (number as usize).wrapping_mul(4099) % NOISE_SHIFT;
        self.noise.slice(shift..shift + len)
    }

    fn name(&self, index: u64) -> String {
        format!("{}{index}", self.prefix())
    }

    fn prefix(&self) -> String {
        format!("bench-{}-", self.size)
    }
}

impl LoadResult {
    /// Creates a result without operations.
    ///
    /// # Errors
    /// If a histogram cannot be created.
    pub fn new() -> Result<LoadResult> {
        let (reads, writes) = (OpRecord::new()?, OpRecord::new()?);
        Ok(LoadResult { reads, writes, errors: 0, first_error: None, not_started: 0, ended: None })
    }

    /// Adds the results of a client.
    ///
    /// # Errors
    /// As for [`OpRecord::merge`].
    pub fn add(&mut self, other: LoadResult) -> Result<()> {
        self.reads.merge(&other.reads)?;
        self.writes.merge(&other.writes)?;
        self.errors += other.errors;
        self.not_started += other.not_started;
        self.first_error = self.first_error.take().or(other.first_error);
        self.ended = self.ended.max(other.ended);
        Ok(())
    }
}

impl ClientLoad {
    /// Creates the load of the client with number `number`.
    ///
    /// # Errors
    /// If the pool's name is invalid.
    pub fn new(client: &Client, shared: &Arc<SharedLoad>, number: u32) -> Result<ClientLoad> {
        Ok(ClientLoad {
            pool: session::pool(client, &shared.pool)?,
            shared: Arc::clone(shared),
            number,
            rng: RefCell::new(SmallRng::seed_from_u64(u64::from(number))),
            reads: RefCell::new(OpRecord::new()?),
            writes: RefCell::new(OpRecord::new()?),
            errors: Cell::new(0),
            first_error: RefCell::new(None),
            not_started: Cell::new(0),
            rest: RefCell::default(),
        })
    }

    /// Writes the objects that are missing.
    ///
    /// # Errors
    /// If a listing or a write fails.
    pub async fn prepare(&self) -> Result<()> {
        let doing = "preparing the objects";
        let (size, count) = (self.shared.size, self.shared.objects);
        let mut there = vec![false; usize::try_from(count).doing("reading --objects")?];
        // All omaps are emptied, because the first change of an entry expects that it does not
        // exist.
        if self.shared.workload != Workload::Omap {
            self.find_objects(&mut there).await.doing(doing)?;
        }
        let missing = there.iter().filter(|found| !**found).count();
        let progress = ProgressMeter::bytes("preparing", missing as u64 * size as u64);
        let queue = RefCell::new((0..count).zip(there).filter(|(_, found)| !found));
        let writer = async || {
            loop {
                let next = queue.borrow_mut().next();
                let Some((index, _)) = next else { return Ok(()) };
                match self.shared.workload {
                    Workload::Omap => entries::prepare(&self.pool, index).await?,
                    _ => self.write(index).await?,
                }
                progress.add(size as u64);
            }
        };
        let in_flight = (PREPARED_BYTES / size.max(1)).clamp(1, PREPARED_IN_FLIGHT);
        let written = join_all((0..in_flight).map(|_| writer())).await;
        written.into_iter().collect::<client::Result<()>>().doing(doing)
    }

    /// Marks the objects that exist, by their numbers.
    async fn find_objects(&self, there: &mut [bool]) -> client::Result<()> {
        let prefix = self.shared.prefix();
        let mut names = self.pool.list(&prefix);
        while let Some(name) = names.next().await? {
            let index = name.object().strip_prefix(&prefix).and_then(number_of);
            if let Some(found) = index.and_then(|index| there.get_mut(index)) {
                *found = true;
            }
        }
        Ok(())
    }

    /// Runs the client's part of the load from `start` on, with `in_flight` operations in flight.
    pub async fn run(self, start: Instant, in_flight: u32) -> LoadResult {
        let workers = join_all((0..in_flight).map(|lane| self.work(start, lane))).await;
        let ended = Some(Instant::now());
        for checked in join_all(workers.iter().flatten().map(EntryWorker::check)).await {
            checked.unwrap_or_else(|e| self.failed(e.to_string()));
        }
        self.record_rest(self.shared.measured(start));
        LoadResult {
            reads: self.reads.into_inner(),
            writes: self.writes.into_inner(),
            errors: self.errors.get(),
            first_error: self.first_error.into_inner(),
            not_started: self.not_started.get(),
            ended,
        }
    }

    /// Executes operations one after another. `lane` is the number of the worker in its client. In the
    /// workload `omap`, returns the worker, whose entries the caller checks.
    async fn work(&self, start: Instant, lane: u32) -> Option<EntryWorker> {
        let of_omap = self.shared.workload == Workload::Omap;
        let mut entries = of_omap.then(|| {
            let worker = format!("{}-{lane}", self.number);
            EntryWorker::new(
                self.pool.clone(),
                &worker,
                self.shared.objects,
                self.shared.noise(0, self.shared.size),
            )
        });
        self.operate(start, entries.as_mut()).await;
        entries
    }

    /// Records that an operation or a check has failed.
    fn failed(&self, why: String) {
        self.errors.set(self.errors.get() + 1);
        self.first_error.borrow_mut().get_or_insert(why);
    }

    async fn operate(&self, start: Instant, mut entries: Option<&mut EntryWorker>) {
        let mut stopped = self.shared.stopped.subscribe();
        loop {
            let (kind, due) = match self.next_step(start, &mut stopped).await {
                NextStep::Start(due) => (self.kind(), due),
                NextStep::Missed(waited) => {
                    self.not_started.set(self.not_started.get() + 1);
                    self.record(self.kind()).borrow_mut().without_success(waited, 1);
                    continue;
                }
                NextStep::End => return,
            };
            let outcome = match &mut entries {
                Some(entries) => entries.change(&self.rng).await,
                None => self.operation(kind).await,
            };
            match outcome {
                Ok(()) => {
                    let now = Instant::now();
                    self.record(kind).borrow_mut().complete(now - start, now - due);
                }
                Err(e) => {
                    self.failed(e.to_string());
                    if self.shared.schedule.is_some() {
                        self.record(kind).borrow_mut().without_success(due.elapsed(), 1);
                    }
                    // Operations on a node that is down fail at once, so pause before the next
                    // operation.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }

    /// Waits until the worker may start an operation, or the measurement is over.
    async fn next_step(&self, start: Instant, stopped: &mut watch::Receiver<Option<Instant>>) -> NextStep {
        let Some(schedule) = &self.shared.schedule else {
            let now = Instant::now();
            let is_over = now - start >= self.shared.measured(start);
            return if is_over { NextStep::End } else { NextStep::Start(now) };
        };
        let Some(due_after) = schedule.take(self.shared.measured(start)) else { return NextStep::End };
        let due = start + due_after;
        let is_early = Instant::now() < due;
        if is_early {
            tokio::select! {
                () = tokio::time::sleep_until(due.into()) => {}
                _ = stopped.wait_for(Option::is_some) => {}
            }
        }
        let (now, measured) = (Instant::now(), self.shared.measured(start));
        if now - start >= measured {
            // All at once: with a high rate, taking one operation at a time would take seconds, in
            // which the operations in flight could not complete.
            let rest = schedule.take_rest(measured);
            if !rest.is_empty() {
                *self.rest.borrow_mut() = rest;
            }
            // The measurement may have been stopped before the operation was due.
            let waited = measured.checked_sub(due_after).filter(|waited| !waited.is_zero());
            return waited.map_or(NextStep::End, NextStep::Missed);
        }
        NextStep::Start(if is_early { counted_from(due, now) } else { due })
    }

    /// Records the operations that no worker took. Many operations are recorded in a limited number of
    /// steps. All operations of a step have the latency of the first one, which waited longest.
    fn record_rest(&self, measured: Duration) {
        let Some(schedule) = &self.shared.schedule else { return };
        let rest = self.rest.take();
        let count = rest.end - rest.start;
        let step = count.div_ceil(MISSED_STEPS).max(1);
        let mut done = 0;
        let reads_of = |ops: u64| (ops as f64 * self.shared.reads).round() as u64;
        while done < count {
            let until = (done + step).min(count);
            let waited = measured.saturating_sub(schedule.due(rest.start + done));
            let reads = reads_of(until) - reads_of(done);
            self.reads.borrow_mut().without_success(waited, reads);
            self.writes.borrow_mut().without_success(waited, until - done - reads);
            done = until;
        }
        self.not_started.set(self.not_started.get() + count);
    }

    fn kind(&self) -> OpKind {
        let is_read = self.rng.borrow_mut().random_bool(self.shared.reads);
        if is_read { OpKind::Read } else { OpKind::Write }
    }

    fn record(&self, kind: OpKind) -> &RefCell<OpRecord> {
        match kind {
            OpKind::Read => &self.reads,
            OpKind::Write => &self.writes,
        }
    }

    async fn operation(&self, kind: OpKind) -> client::Result<()> {
        let blocks = (self.shared.size / self.shared.block) as u64;
        let count = self.shared.objects * blocks;
        let number = match self.shared.workload {
            Workload::Write | Workload::Read => self.shared.next.fetch_add(1, Ordering::Relaxed) % count,
            Workload::Randread | Workload::Randwrite | Workload::Randrw | Workload::Omap => {
                self.rng.borrow_mut().random_range(0..count)
            }
        };
        let (index, offset) = (number / blocks, number % blocks * self.shared.block as u64);
        match kind {
            OpKind::Write if blocks > 1 => self.write_block(index, offset).await,
            OpKind::Write => self.write(index).await,
            OpKind::Read if blocks > 1 => self.read(index, offset, self.shared.block as u64).await,
            OpKind::Read => self.read(index, 0, u64::MAX).await,
        }
    }

    async fn read(&self, index: u64, offset: u64, len: u64) -> client::Result<()> {
        let mut reader = self.pool.object(&self.shared.name(index))?.read_stream(offset, len);
        let (mut found, size) = (0, self.shared.block);
        while let Some(chunk) = reader.next().await? {
            found += chunk.len();
        }
        if found == size {
            return Ok(());
        }
        Err(client::Error::Protocol(format!("object {index} has {found} bytes instead of {size}")))
    }

    async fn write(&self, index: u64) -> client::Result<()> {
        let data = self.shared.noise(index, self.shared.size);
        self.pool.object(&self.shared.name(index))?.put(data).await.map(|_| ())
    }

    async fn write_block(&self, index: u64, offset: u64) -> client::Result<()> {
        let data = self.shared.noise(index + offset, self.shared.block);
        self.pool.object(&self.shared.name(index))?.write(offset, data).await.map(|_| ())
    }
}

/// Returns the moment from which the latency of an operation counts, if a worker slept until the
/// operation was due at `due`, and woke up at `now`.
fn counted_from(due: Instant, now: Instant) -> Instant {
    now.min(due + TIMER_TOLERANCE)
}

#[cfg(test)]
mod tests {
    use client::engine::MemEngine;

    use super::*;

    /// Returns a client of an engine in memory that has the pool of [`BenchArgs::of`].
    async fn client() -> Client {
        let client = Client::over(Arc::new(MemEngine::new()), client::Options::default());
        client.create_pool("p").await.unwrap();
        client
    }

    fn load(client: &Client, args: &BenchArgs) -> ClientLoad {
        ClientLoad::new(client, &Arc::new(SharedLoad::new(args).unwrap()), 0).unwrap()
    }

    #[test]
    fn the_latency_includes_the_delay_of_a_wake_up_except_the_tolerance_of_timers() {
        let due = Instant::now();
        let latency = |ms: u64| {
            let now = due + Duration::from_millis(ms);
            now - counted_from(due, now)
        };
        assert_eq!([1, 2, 100].map(latency), [0, 0, 98].map(Duration::from_millis));
    }

    /// The measurement of a day ended a moment ago, so its 864 billion operations were not started.
    /// Taking one at a time would take hours.
    #[tokio::test]
    async fn the_operations_that_no_worker_started_are_recorded_at_once() {
        let day = 86_400;
        let rate = Some(10_000_000);
        let args = BenchArgs { rate, seconds: day, reads: 25, ..BenchArgs::of(Workload::Randrw) };
        let start = Instant::now().checked_sub(args.duration()).unwrap();
        let result = load(&client().await, &args).run(start, 2).await;
        assert_eq!((result.not_started, result.reads.ops() + result.writes.ops()), (864_000_000_000, 0));
        let (reads, writes) = (result.reads.latency(), result.writes.latency());
        assert_eq!(reads.len() + writes.len(), result.not_started);
        assert!((reads.len() * 4).abs_diff(result.not_started) < 10, "{} reads", reads.len());
        for quantile in [0.1, 0.5, 0.9, 1.0] {
            // A histogram records no latency above ten minutes, so most operations have this one.
            assert!(writes.value_at_quantile(quantile) >= 599_000_000_000, "{quantile}");
        }
    }

    #[tokio::test]
    async fn the_latencies_of_operations_that_were_not_started_are_evenly_distributed() {
        let args = BenchArgs { rate: Some(1_000_000), seconds: 100, ..BenchArgs::of(Workload::Write) };
        let start = Instant::now().checked_sub(args.duration()).unwrap();
        let result = load(&client().await, &args).run(start, 2).await;
        for (quantile, seconds) in [(0.001, 0.1), (0.25, 25.0), (0.5, 50.0), (0.999, 99.9), (1.0, 100.0)] {
            let found = result.writes.latency().value_at_quantile(quantile) as f64 / 1e9;
            assert!((found / seconds - 1.0).abs() < 0.15, "{quantile}: {found} s");
        }
    }

    #[tokio::test]
    async fn a_failed_operation_has_a_latency_if_operations_are_due_at_a_rate() {
        let client = client().await;
        for rate in [Some(100), None] {
            // The objects do not exist, so all reads fail.
            let args = BenchArgs { rate, ..BenchArgs::of(Workload::Read) };
            let result = load(&client, &args).run(Instant::now(), 1).await;
            assert!(result.errors > 0 && result.reads.ops() == 0, "{rate:?}: {result:?}");
            let recorded = if rate.is_some() { result.errors + result.not_started } else { 0 };
            assert_eq!(result.reads.latency().len(), recorded, "{rate:?}");
        }
    }

    #[tokio::test]
    async fn a_stopped_measurement_contains_only_operations_that_were_due_before() {
        let client = client().await;
        for rate in [None, Some(1), Some(1_000_000)] {
            let args = BenchArgs { rate, seconds: 3600, ..BenchArgs::of(Workload::Write) };
            let load = load(&client, &args);
            let (start, shared) = (Instant::now(), Arc::clone(&load.shared));
            let stop = async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                shared.stop();
            };
            let (result, ()) = tokio::join!(load.run(start, 2), stop);
            assert!(shared.is_stopped_early(start) && result.writes.ops() > 0, "{rate:?}");
            let due = rate.map(|rate| Schedule::new(rate).take_rest(shared.measured(start)).end);
            let found = result.writes.ops() + result.not_started;
            assert_eq!(due.unwrap_or(result.writes.ops()), found, "{rate:?}");
        }
    }

    #[tokio::test]
    async fn an_object_with_another_spelling_of_a_number_does_not_replace_a_missing_object() {
        let client = client().await;
        let load = load(&client, &BenchArgs::of(Workload::Read));
        for number in ["007", "+7"] {
            load.pool.object(&format!("bench-4096-{number}")).unwrap().put("x").await.unwrap();
        }
        load.prepare().await.unwrap();
        assert_eq!(load.pool.object("bench-4096-7").unwrap().stat().await.unwrap().size, 4096);
    }
}
