//! Measures a `BlockStore` on a file: 4 MiB and 4 KiB writes and reads, with CPU per operation.
//!
//! `cargo run --release -p outboard-store --example bench_store -- FILE [SIZE_GIB]` (the file is overwritten)

#![expect(clippy::print_stdout, reason = "the output of a benchmark")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::block::Payload;
use base::mem::Arena;
use base::pool::BufferPool;
use base::process::ProcessUsage;
use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use outboard_store::{
    BlockStore, CollectionId, MkfsOptions, MountOptions, ObjectId, Op, StoreCalls, StoreError, Submit,
    Transaction, WriteSource,
};

/// How long each measurement runs.
const RUN: Duration = Duration::from_secs(5);
const BLOCK: u64 = 4096;
const LARGE: u64 = 4 << 20;

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("a file");
    let gib: u64 = args.next().map_or(4, |a| a.parse().expect("a size in GiB"));
    let path = Path::new(&path);
    let started = Instant::now();
    BlockStore::mkfs(path, &MkfsOptions { size: Some(gib << 30), ..MkfsOptions::default() }, |_, _| {})
        .expect("mkfs");
    println!("mkfs of {gib} GiB: {:.1} s", started.elapsed().as_secs_f64());
    let store = BlockStore::mount(path, &MountOptions::default()).expect("mount");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(run(&store));
    runtime.block_on(store.umount()).expect("umount");
    let started = Instant::now();
    drop(store);
    let store = BlockStore::mount(path, &MountOptions::default()).expect("mount");
    println!("mount: {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
    drop(store);
}

fn cid() -> CollectionId {
    CollectionId::new("c").expect("a valid id")
}

fn oid(i: u64) -> ObjectId {
    ObjectId::new(format!("object-{i:08}")).expect("a valid id")
}

async fn run(store: &Arc<BlockStore>) {
    store.queue_transaction(Transaction::new(cid()).with(Op::CreateCollection)).await.expect("create");
    let arena = Arena::anonymous(64 << 20).expect("memory");
    store.register_memory(&arena);
    let pool = BufferPool::new(arena, 0, LARGE as usize);
    let data = |len: usize| {
        let mut buffer = pool.try_alloc(len).expect("it fits").expect("it is free");
        buffer.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7 / 3) as u8);
        Payload::compute(0, buffer.freeze())
    };
    let (large, small) = (data(LARGE as usize), data(BLOCK as usize));
    let objects = store.space().await.expect("statfs").total / LARGE / 4;

    for in_flight in [1, 4] {
        measure(&format!("4 MiB writes, {in_flight} in flight"), LARGE, in_flight, |i| {
            write(store, oid(i % objects), 0, large.clone())
        })
        .await;
    }
    measure("4 MiB staged writes, 4 in flight", LARGE, 4, |i| staged(store, oid(i % objects), large.clone()))
        .await;
    for i in 0..objects {
        write(store, oid(i), 0, large.clone()).await.expect("write");
    }
    for in_flight in [1, 4] {
        measure(&format!("4 MiB reads, {in_flight} in flight"), LARGE, in_flight, |i| {
            read(store, oid(i % objects), 0, LARGE)
        })
        .await;
    }
    let spots = objects * (LARGE / BLOCK);
    let spot = move |i: u64| {
        let at = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % spots;
        (oid(at / (LARGE / BLOCK)), at % (LARGE / BLOCK) * BLOCK)
    };
    for in_flight in [1, 16] {
        measure(&format!("4 KiB durable writes, {in_flight} in flight"), BLOCK, in_flight, |i| {
            let (oid, offset) = spot(i);
            write(store, oid, offset, small.clone())
        })
        .await;
    }
    let piece = Bytes::from(vec![7; 100]);
    measure("100 B overwrites, 16 in flight", 100, 16, |i| {
        let (oid, offset) = spot(i % 5000);
        write(store, oid, offset + 8, Payload::compute(offset + 8, piece.clone()))
    })
    .await;
    for in_flight in [1, 16, 64] {
        measure(&format!("4 KiB random reads, {in_flight} in flight"), BLOCK, in_flight, |i| {
            let (oid, offset) = spot(i);
            read(store, oid, offset, BLOCK)
        })
        .await;
    }
}

type Operation = BoxFuture<'static, Result<(), StoreError>>;

fn write(store: &Arc<BlockStore>, oid: ObjectId, offset: u64, payload: Payload) -> Operation {
    let op = Op::Write { oid, offset, source: WriteSource::Inline(payload) };
    Box::pin(store.queue_transaction(Transaction::new(cid()).with(op)))
}

fn staged(store: &Arc<BlockStore>, oid: ObjectId, payload: Payload) -> Operation {
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

fn read(store: &Arc<BlockStore>, oid: ObjectId, offset: u64, len: u64) -> Operation {
    let found = store.read(&cid(), &oid, offset, len, None);
    Box::pin(async move {
        let found = found.await?;
        assert_eq!(found.len(), len);
        Ok(())
    })
}

async fn measure(name: &str, bytes: u64, in_flight: usize, make: impl Fn(u64) -> Operation) {
    let usage = || ProcessUsage::read(std::process::id()).expect("/proc");
    let before = usage();
    let started = Instant::now();
    let mut running = FuturesUnordered::new();
    let mut latencies = Vec::new();
    let mut next = 0;
    while started.elapsed() < RUN || !running.is_empty() {
        while running.len() < in_flight && started.elapsed() < RUN {
            let operation = make(next);
            let since = Instant::now();
            next += 1;
            running.push(async move {
                operation.await.expect("operation");
                since.elapsed()
            });
        }
        latencies.extend(running.next().await);
    }
    let seconds = started.elapsed().as_secs_f64();
    let (count, used) = (latencies.len() as f64, usage().since(&before));
    let store = used.by_class.get("store").map_or(0.0, |u| u.cpu_seconds);
    let switches = used.by_class.get("store").map_or(0, |u| u.context_switches);
    latencies.sort_unstable();
    let at = |q: f64| latencies[((count - 1.0) * q) as usize].as_secs_f64() * 1e6;
    println!(
        "{name:<38} {:>8.0} op/s {:>8.1} MB/s  p50 {:>6.0} us  p99 {:>6.0} us  CPU/op: store {:>6.1} us, all {:>6.1} us  {:>4.1} switches",
        count / seconds,
        count * bytes as f64 / seconds / 1e6,
        at(0.5),
        at(0.99),
        store * 1e6 / count,
        used.total.cpu_seconds * 1e6 / count,
        switches as f64 / count
    );
}
