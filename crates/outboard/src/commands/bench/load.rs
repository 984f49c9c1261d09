//! The closed loop: keeps a fixed number of operations in flight.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use client::{Client, Pool};
use futures::future::join_all;
use hdrhistogram::Histogram;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};

use super::accounting::Processes;
use super::breakdown::OsdMeasurement;
use super::report::{BenchReport, MeasuredCounts};
use super::{BenchArgs, Workload, session};
use crate::output;
use node::failure::{Doing, Failure, Result};
use node::progress::ProgressMeter;

/// Largest latency of the histogram, in ns: ten minutes.
const LONGEST_NS: u64 = 600_000_000_000;

/// Extra length, in bytes, of the buffer of random data. Objects start at different offsets of the
/// buffer.
const NOISE_SHIFT: usize = 1 << 16;

struct BenchLoad {
    pool: Pool,
    workload: Workload,
    size: usize,
    objects: u64,
    noise: Bytes,
    next: Cell<u64>,
    rng: RefCell<SmallRng>,
    latency_ns: RefCell<Histogram<u64>>,
    errors: Cell<u64>,
    first_error: RefCell<Option<String>>,
}

/// Prepares the objects, measures, and computes the results.
pub async fn measure(client: &Client, args: &BenchArgs, processes: &Processes) -> Result<BenchReport> {
    let load = Rc::new(BenchLoad::new(session::pool(client, &args.pool)?, args)?);
    if args.workload != Workload::Write {
        load.populate(args).await?;
    }
    // Ignore an error: without the osd's answer, only the breakdown by phase is missing.
    let osd_before = client.status().await.ok();
    let before = processes.read();
    let started = Instant::now();
    let end = started + args.duration();
    let workers = (0..args.in_flight).map(|_| load.work(end));
    let shown = show_time(args.seconds);
    futures::future::select(Box::pin(join_all(workers)), Box::pin(shown)).await;
    let seconds = started.elapsed().as_secs_f64();
    let used = processes.read().since(&before);
    let osd_after = client.status().await.ok();
    let window = osd_before.zip(osd_after).and_then(|(b, a)| OsdMeasurement::between(&b, &a, args.workload));
    if let Some(why) = load.first_error.borrow().as_ref() {
        output::note(format!("{} operations failed; the first one: {why}", load.errors.get()));
    }
    if load.latency_ns.borrow().is_empty() {
        return Err(Failure::new(
            "measuring",
            "no operation succeeded; the message above states the first error",
        ));
    }
    let outcome = MeasuredCounts {
        seconds,
        latency_ns: &load.latency_ns.borrow(),
        errors: load.errors.get(),
        used,
        window,
    };
    Ok(BenchReport::new(args, processes.placement(), outcome))
}

/// Shows the elapsed time; never returns.
async fn show_time(seconds: u32) {
    let progress = ProgressMeter::seconds("measuring", u64::from(seconds));
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        progress.add(1);
    }
}

impl BenchLoad {
    fn new(pool: Pool, args: &BenchArgs) -> Result<BenchLoad> {
        let size = usize::try_from(args.object_size.0).doing("reading --object-size")?;
        let mut noise = vec![0; size + NOISE_SHIFT];
        let mut rng = SmallRng::seed_from_u64(0x0b0a_7d00);
        rng.fill_bytes(&mut noise);
        Ok(BenchLoad {
            pool,
            workload: args.workload,
            size,
            objects: args.object_count(),
            noise: noise.into(),
            next: Cell::new(0),
            rng: RefCell::new(rng),
            // Three significant digits; a longer latency counts as `LONGEST_NS`.
            latency_ns: RefCell::new(
                Histogram::new_with_bounds(1, LONGEST_NS, 3).doing("creating the histogram")?,
            ),
            errors: Cell::new(0),
            first_error: RefCell::new(None),
        })
    }

    fn name(&self, index: u64) -> String {
        format!("bench-{}-{index}", self.size)
    }

    /// Writes the objects that are missing.
    async fn populate(&self, args: &BenchArgs) -> Result<()> {
        let doing = "preparing the objects to read";
        let mut there = HashSet::new();
        let mut names = self.pool.list(&format!("bench-{}-", self.size));
        while let Some(name) = names.next().await.doing(doing)? {
            there.insert(name.object().to_owned());
        }
        let missing: Vec<u64> = (0..self.objects).filter(|i| !there.contains(&self.name(*i))).collect();
        let progress = ProgressMeter::bytes("preparing", missing.len() as u64 * self.size as u64);
        let queue = RefCell::new(missing.into_iter());
        let writer = async || {
            loop {
                let next = queue.borrow_mut().next();
                let Some(index) = next else { return Ok(()) };
                self.write(index).await?;
                progress.add(self.size as u64);
            }
        };
        let written = join_all((0..args.in_flight).map(|_| writer())).await;
        written.into_iter().collect::<client::Result<()>>().doing(doing)
    }

    async fn work(&self, end: Instant) {
        loop {
            let started = Instant::now();
            if started >= end {
                return;
            }
            match self.operation().await {
                Ok(()) => {
                    let ns = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    self.latency_ns.borrow_mut().saturating_record(ns);
                }
                Err(e) => {
                    self.errors.set(self.errors.get() + 1);
                    self.first_error.borrow_mut().get_or_insert_with(|| e.to_string());
                    // Operations on a node that is down fail at once, so pause before the next
                    // operation.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }

    async fn operation(&self) -> client::Result<()> {
        let index = match self.workload {
            Workload::Randread => self.rng.borrow_mut().random_range(0..self.objects),
            Workload::Write | Workload::Read => self.next.replace(self.next.get() + 1) % self.objects,
        };
        match self.workload {
            Workload::Write => self.write(index).await,
            Workload::Read | Workload::Randread => {
                let mut reader = self.pool.object(&self.name(index))?.read_stream(0, u64::MAX);
                let mut found = 0;
                while let Some(chunk) = reader.next().await? {
                    found += chunk.len();
                }
                if found == self.size {
                    return Ok(());
                }
                Err(client::Error::Protocol(format!(
                    "object {index} has {found} bytes instead of {}",
                    self.size
                )))
            }
        }
    }

    async fn write(&self, index: u64) -> client::Result<()> {
        let shift = (index as usize).wrapping_mul(4099) % NOISE_SHIFT;
        let data = self.noise.slice(shift..shift + self.size);
        self.pool.object(&self.name(index))?.put(data).await.map(|_| ())
    }
}
