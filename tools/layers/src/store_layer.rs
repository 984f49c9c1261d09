//! Measures a `BlockStore` on a drive or a file: 4 MiB and 4 KiB writes and reads, with the CPU
//! time per operation.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::block::Payload;
use base::mem::Arena;
use base::pool::BufferPool;
use base::process::ProcessUsage;
use bytes::Bytes;
use clap::Args;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use node::failure::{Doing, Failure, Result};
use node::units::ByteSize;
use store::{
    BlockStore, CollectionId, MkfsOptions, MountOptions, ObjectId, Op, StoreCalls, StoreError, Submit,
    Transaction, WriteSource,
};

use crate::output;

const DOING: &str = "measuring the store";
const BLOCK: u64 = 4096;
const LARGE: u64 = 4 << 20;

/// Measure block stores on files
///
/// Formats the files, then measures writes and reads of 4 MiB and 4 KiB. "store" is the CPU time of
/// the stores' threads, and "all" is the CPU time of the whole process.
///
/// With several files, the objects are divided among their stores, each of which has a thread. Two
/// partitions of a drive show what a second target on the drive would gain.
#[derive(Debug, Args)]
pub struct StoreLayerArgs {
    /// The files or drives to format; their content is lost
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Size of each target
    #[arg(long, default_value = "4GiB", value_name = "S")]
    size: ByteSize,
    /// Seconds of each measurement
    #[arg(long, default_value = "5", value_name = "T", value_parser = crate::seconds)]
    seconds: Duration,
}

/// Runs the command.
pub fn run(args: &StoreLayerArgs) -> Result<()> {
    let started = Instant::now();
    let options = MkfsOptions { size: Some(args.size.0), ..MkfsOptions::default() };
    for file in &args.files {
        BlockStore::mkfs(file, &options, |_, _| {}).doing("formatting a target")?;
    }
    output::line(format!("mkfs of {}: {:.1} s", args.size, started.elapsed().as_secs_f64()));
    let mount = || {
        let mount =
            |file: &PathBuf| BlockStore::mount(file, &MountOptions::default()).doing("mounting a target");
        args.files.iter().map(mount).collect::<Result<Vec<_>>>()
    };
    let stores = mount()?;
    let runtime = tokio::runtime::Builder::new_current_thread().build().doing(DOING)?;
    runtime.block_on(measure_all(&stores, args.seconds))?;
    for store in stores {
        runtime.block_on(store.umount()).doing("unmounting a target")?;
    }
    let started = Instant::now();
    drop(mount()?);
    output::line(format!("mount: {:.1} ms", started.elapsed().as_secs_f64() * 1e3));
    Ok(())
}

fn cid() -> CollectionId {
    CollectionId::new("c").expect("a valid id")
}

fn oid(i: u64) -> ObjectId {
    ObjectId::new(format!("object-{i:08}")).expect("a valid id")
}

async fn measure_all(stores: &[Arc<BlockStore>], time: Duration) -> Result<()> {
    let arena = Arena::anonymous(64 << 20).doing(DOING)?;
    for store in stores {
        let create = Transaction::new(cid()).with(Op::CreateCollection);
        store.queue_transaction(create).await.doing(DOING)?;
        store.register_memory(&arena);
    }
    let of = |object: u64| &stores[(object % stores.len() as u64) as usize];
    let pool = BufferPool::new(arena, 0, LARGE as usize);
    let data = |len: usize| -> Result<Payload> {
        let mut buffer = pool
            .try_alloc(len)
            .doing(DOING)?
            .ok_or_else(|| Failure::new(DOING, "the memory of the benchmark is used up"))?;
        buffer.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7 / 3) as u8);
        Ok(Payload::compute(0, buffer.freeze()))
    };
    let (large, small) = (data(LARGE as usize)?, data(BLOCK as usize)?);
    let each = (stores[0].space().await.doing(DOING)?.total / LARGE / 4).max(1);
    let objects = each * stores.len() as u64;

    for in_flight in [1, 4] {
        measure(&format!("4 MiB writes, {in_flight} in flight"), time, LARGE, in_flight, |i| {
            write(of(i % objects), oid(i % objects), 0, large.clone())
        })
        .await?;
    }
    measure("4 MiB staged writes, 4 in flight", time, LARGE, 4, |i| {
        staged(of(i % objects), oid(i % objects), large.clone())
    })
    .await?;
    for i in 0..objects {
        write(of(i), oid(i), 0, large.clone()).await.doing(DOING)?;
    }
    for in_flight in [1, 4] {
        measure(&format!("4 MiB reads, {in_flight} in flight"), time, LARGE, in_flight, |i| {
            read(of(i % objects), oid(i % objects), 0, LARGE)
        })
        .await?;
    }
    let spots = objects * (LARGE / BLOCK);
    let spot = move |i: u64| {
        let at = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % spots;
        let object = at / (LARGE / BLOCK);
        (of(object), oid(object), at % (LARGE / BLOCK) * BLOCK)
    };
    for in_flight in [1, 16, 64] {
        measure(&format!("4 KiB durable writes, {in_flight} in flight"), time, BLOCK, in_flight, |i| {
            let (store, oid, offset) = spot(i);
            write(store, oid, offset, small.clone())
        })
        .await?;
    }
    let piece = Bytes::from(vec![7; 100]);
    measure("100 B overwrites, 16 in flight", time, 100, 16, |i| {
        let (store, oid, offset) = spot(i % 5000);
        write(store, oid, offset + 8, Payload::compute(offset + 8, piece.clone()))
    })
    .await?;
    for in_flight in [1, 16, 64] {
        measure(&format!("4 KiB random reads, {in_flight} in flight"), time, BLOCK, in_flight, |i| {
            let (store, oid, offset) = spot(i);
            read(store, oid, offset, BLOCK)
        })
        .await?;
    }
    Ok(())
}

type BenchCall = BoxFuture<'static, Result<(), StoreError>>;

fn write(store: &Arc<BlockStore>, oid: ObjectId, offset: u64, payload: Payload) -> BenchCall {
    let op = Op::Write { oid, offset, source: WriteSource::Inline(payload) };
    Box::pin(store.queue_transaction(Transaction::new(cid()).with(op)))
}

fn staged(store: &Arc<BlockStore>, oid: ObjectId, payload: Payload) -> BenchCall {
    let store = Arc::clone(store);
    Box::pin(async move {
        let len = payload.len() as u64;
        let stage = store.stage(len).await?;
        let mut writes = Vec::new();
        let (data, checksums) = payload.into_parts();
        let half = data.len() / 2;
        let (first, second) = checksums.split_at(checksums.len() / 2);
        for (offset, data, checksums) in [(0, data.slice(..half), first), (half, data.slice(half..), second)]
        {
            let part = Payload::from_parts(0, data, checksums.to_vec()).expect("one checksum per block");
            writes.push(store.stage_write(stage, offset as u64, part));
        }
        let op = Op::Write { oid, offset: 0, source: WriteSource::Staged { stage, offset: 0, len } };
        let commit = store.queue_transaction(Transaction::new(cid()).with(op));
        store.stage_release(stage);
        commit.await
    })
}

fn read(store: &Arc<BlockStore>, oid: ObjectId, offset: u64, len: u64) -> BenchCall {
    let found = store.read(&cid(), &oid, offset, len, None);
    Box::pin(async move {
        assert_eq!(found.await?.len(), len, "the object has this range");
        Ok(())
    })
}

async fn measure(
    name: &str,
    time: Duration,
    bytes: u64,
    in_flight: usize,
    make: impl Fn(u64) -> BenchCall,
) -> Result<()> {
    let usage = || ProcessUsage::read(std::process::id()).doing("reading the CPU time of this process");
    let before = usage()?;
    let started = Instant::now();
    let mut running = FuturesUnordered::new();
    let mut latencies = Vec::new();
    let mut next = 0;
    while started.elapsed() < time || !running.is_empty() {
        while running.len() < in_flight && started.elapsed() < time {
            let call = make(next);
            let since = Instant::now();
            next += 1;
            running.push(async move { call.await.map(|()| since.elapsed()) });
        }
        if let Some(latency) = running.next().await {
            latencies.push(latency.doing(DOING)?);
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let (count, used) = (latencies.len() as f64, usage()?.since(&before));
    let store = used.by_class.get("store").map_or(0.0, |u| u.cpu_seconds());
    let switches = used.by_class.get("store").map_or(0, |u| u.context_switches);
    latencies.sort_unstable();
    let at = |q: f64| latencies[((count - 1.0) * q) as usize].as_secs_f64() * 1e6;
    output::line(format!(
        "{name:<38} {:>8.0} op/s {:>8.1} MB/s  p50 {:>6.0} us  p99 {:>6.0} us  CPU/op: store {:>6.1} us, all {:>6.1} us  {:>4.1} switches",
        count / seconds,
        count * bytes as f64 / seconds / 1e6,
        at(0.5),
        at(0.99),
        store * 1e6 / count,
        used.total.cpu_seconds() * 1e6 / count,
        switches as f64 / count
    ));
    Ok(())
}
