//! Measures the request path: a client and an osd over TCP in this process, on a store in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::mem::Arena;
use base::pool::BufferPool;
use base::process::ProcessUsage;
use bytes::Bytes;
use clap::Args;
use client::{Client, Object, Pool};
use futures::future::try_join_all;
use messenger::TcpStack;
use node::failure::{Doing, Result};
use osd::{OsdConfig, OsdServer, ShardResources};
use store::{MemStore, ObjectStore};
use uuid::Uuid;

use crate::in_process;
use crate::output;

const DOING: &str = "measuring the osd";
const IN_FLIGHT: usize = 16;

/// Measure the request path between a client and an osd
///
/// Both run in this process over TCP, on a store in memory, with 16 requests in flight. "osd" is
/// the CPU time of the osd's thread, and "all" is the CPU time of the whole process.
#[derive(Debug, Args)]
pub struct OsdLayerArgs {
    /// Seconds of each measurement
    #[arg(long, default_value = "2", value_name = "T", value_parser = crate::seconds)]
    seconds: Duration,
}

#[derive(Clone, Copy)]
enum OsdLoad {
    Write,
    Read,
}

/// The loads, with the size of an operation in bytes. The store in memory keeps the staging buffers
/// of large writes, so writes stay below the size that the osd pulls into staging memory.
const LOADS: [(OsdLoad, usize); 5] = [
    (OsdLoad::Write, 4096),
    (OsdLoad::Read, 4096),
    (OsdLoad::Write, 65_536),
    (OsdLoad::Read, 65_536),
    (OsdLoad::Read, 1 << 20),
];

/// Runs the command.
pub fn run(args: &OsdLayerArgs) -> Result<()> {
    let pool = BufferPool::new(Arena::anonymous(64 << 20).doing(DOING)?, 0, 2 << 20);
    let store: Arc<dyn ObjectStore> = Arc::new(MemStore::new());
    let targets = vec![(Uuid::from_u128(1), store)];
    let stack = Arc::new(TcpStack::default());
    let resources = vec![ShardResources { config: OsdConfig::default(), targets, staging: pool }];
    let osd = OsdServer::start(resources, stack, "127.0.0.1:0");
    let osd = osd.doing("starting an osd")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(DOING)?;
    let outcome = runtime.block_on(async {
        let client = Client::connect(osd.endpoint(), in_process::options(&osd)).await.doing(DOING)?;
        client.create_pool("bench").await.doing(DOING)?;
        let pool = client.pool("bench").doing(DOING)?;
        output::line("op      size      ops/s     MB/s   osd us/op  all us/op  switches/op");
        for (load, size) in LOADS {
            measure(&pool, load, size, args.seconds).await?;
        }
        Ok(())
    });
    osd.stop();
    outcome
}

async fn measure(pool: &Pool, load: OsdLoad, size: usize, time: Duration) -> Result<()> {
    let objects: Result<Vec<Object>, _> =
        (0..IN_FLIGHT).map(|i| pool.object(&format!("{size}-{i}"))).collect();
    let objects = objects.doing(DOING)?;
    let data = Bytes::from(vec![0x5a; size]);
    for object in &objects {
        object.put(data.clone()).await.doing(DOING)?;
    }
    let usage = || ProcessUsage::read(std::process::id()).doing("reading the CPU time of this process");
    let (before, started) = (usage()?, Instant::now());
    let end = started + time;
    let workers = objects.iter().map(async |object| {
        let mut ops = 0u64;
        while Instant::now() < end {
            match load {
                OsdLoad::Write => object.write(0, data.clone()).await.map(drop)?,
                OsdLoad::Read => object.get_range(0, size as u64).await.map(drop)?,
            }
            ops += 1;
        }
        Ok::<u64, client::Error>(ops)
    });
    let ops: u64 = try_join_all(workers).await.doing(DOING)?.into_iter().sum();
    let elapsed = started.elapsed().as_secs_f64();
    let used = usage()?.since(&before);
    let osd_cpu = used.by_class.get("osd").map_or(0.0, |u| u.cpu_seconds());
    let per_op = |seconds: f64| seconds * 1e6 / ops as f64;
    output::line(format!(
        "{:<6} {:>6} {:>10.0} {:>8.0} {:>11.1} {:>10.1} {:>12.2}",
        match load {
            OsdLoad::Write => "write",
            OsdLoad::Read => "read",
        },
        size,
        ops as f64 / elapsed,
        ops as f64 * size as f64 / elapsed / 1e6,
        per_op(osd_cpu),
        per_op(used.total.cpu_seconds()),
        used.total.context_switches as f64 / ops as f64
    ));
    Ok(())
}
