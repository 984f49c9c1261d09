//! [`DiskLoad`]: the requests of a measurement on a disk.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use bytes::Bytes;
use disk::Disk;
use futures::future::join_all;
use futures::stream::{self, TryStreamExt};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngCore, SeedableRng};
use vdisk::AttachedDisk;

use super::{DiskLayout, DiskWorkload};
use crate::commands::bench::load::{LoadResult, OpKind};
use crate::commands::disk::transfer;
use node::failure::{Doing, Result};
use node::progress::ProgressMeter;

/// Extra length, in bytes, of the buffer of random data. Writes start at different offsets of the buffer.
const NOISE_SHIFT: usize = 1 << 16;

/// Length of the parts of a measurement whose longest requests are compared.
pub const WINDOW: Duration = Duration::from_millis(500);

/// The load of one round on a disk.
pub struct DiskLoad {
    disk: AttachedDisk,
    workload: DiskWorkload,
    layout: DiskLayout,
    noise: Bytes,
    rng: RefCell<SmallRng>,
    /// Number of requests that were started.
    started: Cell<u64>,
    /// Chunks that were not written yet, in the workload `clone-first-write`.
    chunks: RefCell<Vec<u64>>,
    result: RefCell<LoadResult>,
    /// The longest request that completed in each [`WINDOW`].
    longest: RefCell<Vec<Duration>>,
}

impl DiskLoad {
    /// Creates the load of a round.
    ///
    /// # Errors
    /// If a histogram cannot be created.
    pub fn new(
        disk: &AttachedDisk,
        workload: DiskWorkload,
        layout: DiskLayout,
        round: u64,
    ) -> Result<DiskLoad> {
        let mut rng = SmallRng::seed_from_u64(round);
        let mut noise = vec![0; layout.block as usize + NOISE_SHIFT];
        rng.fill_bytes(&mut noise);
        let mut chunks: Vec<u64> = (0..layout.span / layout.chunk).collect();
        chunks.shuffle(&mut rng);
        Ok(DiskLoad {
            disk: disk.clone(),
            workload,
            layout,
            noise: noise.into(),
            rng: RefCell::new(rng),
            started: Cell::new(0),
            chunks: RefCell::new(chunks),
            result: RefCell::new(LoadResult::new()?),
            longest: RefCell::default(),
        })
    }

    /// Runs the load from `start` on for `duration`, with `depth` requests in flight. Returns the result,
    /// and the longest request that completed in each [`WINDOW`].
    pub async fn run(self, start: Instant, duration: Duration, depth: u32) -> (LoadResult, Vec<Duration>) {
        join_all((0..depth).map(|_| self.operate(start, duration))).await;
        let mut result = self.result.into_inner();
        result.ended = Some(Instant::now());
        (result, self.longest.into_inner())
    }

    async fn operate(&self, start: Instant, duration: Duration) {
        loop {
            let due = Instant::now();
            if due - start >= duration {
                return;
            }
            let Some((kind, offset)) = self.next_request() else { return };
            let outcome = self.request(kind, offset).await;
            let has_failed = outcome.is_err();
            self.record(kind, outcome, start, due);
            if has_failed {
                // Requests on a disk that was taken over fail at once.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }

    /// Records a request that has just ended.
    fn record(&self, kind: OpKind, outcome: disk::Result<()>, start: Instant, due: Instant) {
        let now = Instant::now();
        let window = ((now - start).as_nanos() / WINDOW.as_nanos()) as usize;
        let mut longest = self.longest.borrow_mut();
        if longest.len() <= window {
            longest.resize(window + 1, Duration::ZERO);
        }
        longest[window] = longest[window].max(now - due);
        let mut result = self.result.borrow_mut();
        match outcome {
            Ok(()) => match kind {
                OpKind::Read => result.reads.complete(now - start, now - due),
                OpKind::Write => result.writes.complete(now - start, now - due),
            },
            Err(e) => {
                result.errors += 1;
                result.first_error.get_or_insert(e.to_string());
            }
        }
    }

    /// Chooses the next request: its kind and its offset. `None` if there are no more.
    fn next_request(&self) -> Option<(OpKind, u64)> {
        let DiskLayout { block, chunk, span } = self.layout;
        let number = self.started.replace(self.started.get() + 1);
        let mut rng = self.rng.borrow_mut();
        let mut random = |size: u64| rng.random_range(0..size / block) * block;
        Some(match self.workload {
            DiskWorkload::Seqwrite => (OpKind::Write, number * block % span),
            DiskWorkload::Randwrite | DiskWorkload::Snapshots => (OpKind::Write, random(span)),
            DiskWorkload::Randread => (OpKind::Read, random(span)),
            DiskWorkload::Mix => {
                let offset = random(span);
                (if rng.random_bool(0.5) { OpKind::Read } else { OpKind::Write }, offset)
            }
            DiskWorkload::HotChunk => (OpKind::Write, random(chunk)),
            DiskWorkload::CloneFirstWrite => {
                let index = self.chunks.borrow_mut().pop()?;
                (OpKind::Write, index * chunk + random(chunk))
            }
        })
    }

    async fn request(&self, kind: OpKind, offset: u64) -> disk::Result<()> {
        match kind {
            OpKind::Read => self.disk.read(offset, self.layout.block).await.map(drop),
            OpKind::Write => {
                let shift = (offset as usize).wrapping_mul(4099) % NOISE_SHIFT;
                let data = self.noise.slice(shift..shift + self.layout.block as usize);
                self.disk.write(offset, vec![data]).await
            }
        }
    }
}

/// Writes all chunks of the used part of a disk.
///
/// # Errors
/// If a write fails.
pub async fn fill(disk: &AttachedDisk, layout: DiskLayout) -> Result<()> {
    let mut noise = vec![0; layout.chunk as usize];
    SmallRng::seed_from_u64(layout.chunk).fill_bytes(&mut noise);
    let (noise, progress) = (Bytes::from(noise), ProgressMeter::bytes("preparing", layout.span));
    let write = |index: u64| {
        let written = disk.write(index * layout.chunk, vec![noise.clone()]);
        let progress = &progress;
        Ok(async move { written.await.map(|()| progress.add(layout.chunk)) })
    };
    let writes = stream::iter((0..layout.span / layout.chunk).map(write));
    let filled = writes.try_buffer_unordered(transfer::in_flight(layout.chunk)).try_collect::<()>();
    filled.await.doing("preparing the disk")
}
