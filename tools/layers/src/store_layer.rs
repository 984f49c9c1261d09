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

/// Measure a block store on a file
///
/// Formats the file, then measures writes and reads of 4 MiB and 4 KiB. "store" is the CPU time of
/// the store's threads, and "all" is the CPU time of the whole process.
#[derive(Debug, Args)]
pub struct StoreLayerArgs {
    /// The file or drive to format; its content is lost
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Size of the target
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
    BlockStore::mkfs(&args.file, &options, |_, _| {}).doing("formatting the target")?;
    output::line(format!("mkfs of {}: {:.1} s", args.size, started.elapsed().as_secs_f64()));
    let mount = || BlockStore::mount(&args.file, &MountOptions::default()).doing("mounting the target");
    let store = mount()?;
    let runtime = tokio::runtime::Builder::new_current_thread().build().doing(DOING)?;
    runtime.block_on(measure_all(&store, args.seconds))?;
    runtime.block_on(store.umount()).doing("unmounting the target")?;
    drop(store);
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

async fn measure_all(store: &Arc<BlockStore>, time: Duration) -> Result<()> {
    let create = Transaction::new(cid()).with(Op::CreateCollection);
    store.queue_transaction(create).await.doing(DOING)?;
    let arena = Arena::anonymous(64 << 20).doing(DOING)?;
    store.register_memory(&arena);
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
    let objects = (store.space().await.doing(DOING)?.total / LARGE / 4).max(1);

    for in_flight in [1, 4] {
        measure(&format!("4 MiB writes, {in_flight} in flight"), time, LARGE, in_flight, |i| {
            write(store, oid(i % objects), 0, large.clone())
        })
        .await?;
    }
    measure("4 MiB staged writes, 4 in flight", time, LARGE, 4, |i| {
        staged(store, oid(i % objects), large.clone())
    })
    .await?;
    for i in 0..objects {
        write(store, oid(i), 0, large.clone()).await.doing(DOING)?;
    }
    for in_flight in [1, 4] {
        measure(&format!("4 MiB reads, {in_flight} in flight"), time, LARGE, in_flight, |i| {
            read(store, oid(i % objects), 0, LARGE)
        })
        .await?;
    }
    let spots = objects * (LARGE / BLOCK);
    let spot = move |i: u64| {
        let at = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % spots;
        (oid(at / (LARGE / BLOCK)), at % (LARGE / BLOCK) * BLOCK)
    };
    for in_flight in [1, 16] {
        measure(&format!("4 KiB durable writes, {in_flight} in flight"), time, BLOCK, in_flight, |i| {
            let (oid, offset) = spot(i);
            write(store, oid, offset, small.clone())
        })
        .await?;
    }
    let piece = Bytes::from(vec![7; 100]);
    measure("100 B overwrites, 16 in flight", time, 100, 16, |i| {
        let (oid, offset) = spot(i % 5000);
        write(store, oid, offset + 8, Payload::compute(offset + 8, piece.clone()))
    })
    .await?;
    for in_flight in [1, 16, 64] {
        measure(&format!("4 KiB random reads, {in_flight} in flight"), time, BLOCK, in_flight, |i| {
            let (oid, offset) = spot(i);
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
    let store = used.by_class.get("store").map_or(0.0, |u| u.cpu_seconds);
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
        used.total.cpu_seconds * 1e6 / count,
        switches as f64 / count
    ));
    Ok(())
}
