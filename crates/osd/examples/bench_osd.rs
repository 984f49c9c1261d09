//! What the request path costs: a client and an OSD over TCP in this process, on a store that forgets nothing and writes
//! nothing. Prints throughput and CPU per op, the OSD's thread beside everything else (client and store).
//!
//! `cargo run --release -p outboard-osd --example bench_osd [seconds]`

#![allow(clippy::print_stdout, reason = "it is a program that prints")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::mem::Arena;
use base::pool::BufferPool;
use base::process::ProcessUsage;
use bytes::Bytes;
use client::{Client, Object, Options, Pool};
use futures::stream::{FuturesUnordered, StreamExt};
use messenger::TcpStack;
use osd::{OsdConfig, OsdServer};
use store::{MemStore, ObjectStore};
use uuid::Uuid;

const IN_FLIGHT: usize = 16;

#[derive(Clone, Copy)]
enum Op {
    Write,
    Read,
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(2.0);
    let pool = BufferPool::new(Arena::anonymous(64 << 20).expect("memory"), 0, 2 << 20);
    let store: Arc<dyn ObjectStore> = Arc::new(MemStore::new());
    let targets = vec![(Uuid::from_u128(1), store)];
    let stack = Arc::new(TcpStack::default());
    let osd = OsdServer::start(OsdConfig::default(), targets, pool, stack, "127.0.0.1:0").expect("OSD");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let client = Client::connect(osd.endpoint(), Options::default()).await.expect("connect");
        client.create_pool("bench").await.expect("pool");
        let pool = client.pool("bench").expect("name");
        println!("op      size      ops/s     MB/s   osd us/op  all us/op  switches/op");
        // The store keeps the buffers it is given, so what is pulled into staging memory must stay below it.
        for (op, size) in [
            (Op::Write, 4096),
            (Op::Read, 4096),
            (Op::Write, 65_536),
            (Op::Read, 65_536),
            (Op::Read, 1 << 20),
        ] {
            run(&pool, op, size, seconds).await;
        }
    });
    osd.stop();
}

async fn run(pool: &Pool, op: Op, size: usize, seconds: f64) {
    let objects: Vec<Object> =
        (0..IN_FLIGHT).map(|i| pool.object(&format!("{size}-{i}")).expect("name")).collect();
    let data = Bytes::from(vec![0x5a; size]);
    for object in &objects {
        object.put(data.clone()).await.expect("put");
    }
    let (before, started) = (ProcessUsage::read(std::process::id()).expect("proc"), Instant::now());
    let end = started + Duration::from_secs_f64(seconds);
    let workers: FuturesUnordered<_> = objects
        .iter()
        .map(async |object| {
            let mut ops = 0u64;
            while Instant::now() < end {
                match op {
                    Op::Write => drop(object.write(0, data.clone()).await.expect("write")),
                    Op::Read => drop(object.get_range(0, size as u64).await.expect("read")),
                }
                ops += 1;
            }
            ops
        })
        .collect();
    let ops: u64 = workers.fold(0, async |sum, ops| sum + ops).await;
    let elapsed = started.elapsed().as_secs_f64();
    let used = ProcessUsage::read(std::process::id()).expect("proc").since(&before);
    let osd_cpu = used.by_class.get("osd").map_or(0.0, |u| u.cpu_seconds);
    let per_op = |seconds: f64| seconds * 1e6 / ops as f64;
    println!(
        "{:<6} {:>6} {:>10.0} {:>8.0} {:>11.1} {:>10.1} {:>12.2}",
        match op {
            Op::Write => "write",
            Op::Read => "read",
        },
        size,
        ops as f64 / elapsed,
        ops as f64 * size as f64 / elapsed / 1e6,
        per_op(osd_cpu),
        per_op(used.total.cpu_seconds),
        used.total.context_switches as f64 / ops as f64
    );
}
