//! `shards`: osds with different numbers of shards, each shard on a store in memory of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use base::mem::Arena;
use base::pool::BufferPool;
use base::process::ProcessUsage;
use bytes::Bytes;
use client::{Client, NodeStatus, Options, Redundancy};
use futures::future::try_join_all;
use messenger::TcpStack;
use node::failure::{Doing, Result};
use osd::{OsdConfig, OsdServer, ShardResources};
use store::{CollectionId, MemStore, ObjectStore, StoreFuture, StoreRequest, Submit};
use uuid::Uuid;

use crate::in_process;
use crate::output;

/// What the command is doing when something fails.
const DOING: &str = "measuring the shards of an osd";
/// Number of placement groups: enough for every shard to have the same number of them.
const GROUPS: u32 = 256;
/// Number of objects that each client uses.
const OBJECTS: usize = 1024;

/// Measure osds with several shards, each on a store in memory of its own
///
/// Prints operations per second, the CPU time of the shards' threads per operation, and the messages
/// between shards per operation. With more shards than CPUs, the rate cannot grow, and the CPU time
/// per operation shows what the shards cost.
///
/// With more shards, each shard has fewer operations in flight, so it wakes up for fewer of them at a
/// time. "x same depth" compares with the first number of shards while each of its shards has this
/// smaller number of operations in flight. This ratio excludes the cost of the shorter queues.
///
/// Examples:
///   outboard-layers shards
///   outboard-layers shards --shards 1,8 --rounds 5
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct ShardsArgs {
    /// Numbers of shards
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16", value_name = "N,N",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    shards: Vec<u16>,
    /// Number of clients, each on its own thread; by default, one per CPU
    #[arg(long, value_name = "N")]
    clients: Option<usize>,
    /// Number of operations that each client has in flight
    #[arg(long, default_value = "64", value_name = "N", value_parser = in_flight)]
    in_flight: usize,
    /// Size of an operation in bytes
    #[arg(long, default_value = "4096", value_name = "BYTES")]
    size: usize,
    /// Seconds of each measurement
    #[arg(long, default_value = "1", value_name = "T", value_parser = crate::seconds)]
    seconds: Duration,
    /// Number of rounds; each round measures all numbers of shards, and the median is printed
    #[arg(long, default_value = "5", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
}

/// A store in memory whose data collections belong to one shard. All shards share the collection of
/// the node's map, as they do on a drive.
struct DividedStore {
    shared: Arc<MemStore>,
    own: MemStore,
    node: CollectionId,
}

impl DividedStore {
    fn new(shared: &Arc<MemStore>) -> DividedStore {
        let node = CollectionId::new(Bytes::from_static(b"N")).expect("the id is valid");
        DividedStore { shared: Arc::clone(shared), own: MemStore::new(), node }
    }
}

impl Submit for DividedStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let is_shared = match &request {
            StoreRequest::Collections => true,
            other => other.collection() == Some(&self.node),
        };
        if is_shared { self.shared.submit(request) } else { self.own.submit(request) }
    }

    fn incarnation(&self) -> u64 {
        self.own.incarnation()
    }
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
struct ShardsMeasurement {
    ops_per_second: f64,
    osd_us_per_op: f64,
    messages_per_op: f64,
}

/// Two measurements in a row.
#[derive(Debug, Clone, Copy)]
struct Pair {
    of_all: ShardsMeasurement,
    /// The first number of shards, with the same number of operations in flight per shard.
    same_depth: ShardsMeasurement,
}

/// Runs the command.
pub fn run(args: &ShardsArgs) -> Result<()> {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let clients = args.clients.unwrap_or(cpus);
    let first = args.shards[0];
    let mut measured: Vec<Vec<Pair>> = vec![Vec::new(); args.shards.len()];
    for round in 0..args.rounds {
        for (shards, measured) in args.shards.iter().zip(&mut measured) {
            output::note(format!("round {} of {}: {shards} shards", round + 1, args.rounds));
            let of_all = measure(*shards, clients, args.in_flight, args)?;
            let depth = (args.in_flight * usize::from(first) / usize::from(*shards)).max(1);
            let same_depth = if *shards == first { of_all } else { measure(first, clients, depth, args)? };
            measured.push(Pair { of_all, same_depth });
        }
    }
    output::line(format!(
        "{cpus} CPUs, {clients} clients with {} operations in flight, {} bytes, half reads and half writes",
        args.in_flight, args.size
    ));
    output::line(
        "shards      ops/s  (lowest - highest)   x first  osd us/op   x first  x same depth  messages/op",
    );
    let mut base = None;
    for (shards, measured) in args.shards.iter().zip(&measured) {
        let (ops, lowest, highest) = median(measured, |m| m.of_all.ops_per_second);
        let (cpu, ..) = median(measured, |m| m.of_all.osd_us_per_op);
        let (messages, ..) = median(measured, |m| m.of_all.messages_per_op);
        let (same_depth, ..) = median(measured, |m| m.of_all.osd_us_per_op / m.same_depth.osd_us_per_op);
        let (base_ops, base_cpu) = *base.get_or_insert((ops, cpu));
        output::line(format!(
            "{shards:>6} {ops:>10.0}  ({lowest:>6.0} - {highest:>7.0}) {:>9.2} {cpu:>10.1} {:>9.2} {same_depth:>13.2} {messages:>12.4}",
            ops / base_ops,
            cpu / base_cpu
        ));
    }
    Ok(())
}

/// Returns the median, the lowest and the highest value of `of`.
fn median(measured: &[Pair], of: fn(&Pair) -> f64) -> (f64, f64, f64) {
    let mut sorted: Vec<f64> = measured.iter().map(of).collect();
    sorted.sort_by(f64::total_cmp);
    (sorted[sorted.len() / 2], sorted[0], sorted[sorted.len() - 1])
}

fn measure(shards: u16, clients: usize, in_flight: usize, args: &ShardsArgs) -> Result<ShardsMeasurement> {
    let shared = Arc::new(MemStore::new());
    let resources = |_| {
        let store: Arc<dyn ObjectStore> = Arc::new(DividedStore::new(&shared));
        let staging = BufferPool::new(Arena::anonymous(16 << 20).doing(DOING)?, 0, 2 << 20);
        Ok(ShardResources {
            config: OsdConfig::default(),
            targets: vec![(Uuid::from_u128(1), store)],
            staging,
        })
    };
    let resources = (0..shards).map(resources).collect::<Result<Vec<_>>>()?;
    let osd = OsdServer::start(resources, Arc::new(TcpStack::default()), "127.0.0.1:0");
    let osd = osd.doing("starting an osd")?;
    let measured = load(&osd, clients, in_flight, args);
    osd.stop();
    measured
}

fn in_flight(text: &str) -> std::result::Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=OBJECTS).contains(number));
    number.ok_or_else(|| format!("must be 1 to {OBJECTS}"))
}

/// What the clients' threads share.
#[derive(Default)]
struct SharedCounts {
    ready: AtomicU64,
    stop: AtomicBool,
    ops: AtomicU64,
}

fn load(osd: &OsdServer, clients: usize, in_flight: usize, args: &ShardsArgs) -> Result<ShardsMeasurement> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(DOING)?;
    let watching = runtime.block_on(async {
        let client = Client::connect(osd.endpoint(), in_process::options(osd)).await.doing(DOING)?;
        client.create_pool_with("bench", GROUPS, Redundancy::Single).await.doing(DOING)?;
        Ok(client)
    })?;
    let counts = Arc::new(SharedCounts::default());
    let workers: Vec<_> = (0..clients)
        .map(|number| {
            let counts = Arc::clone(&counts);
            let node = (osd.endpoint().to_owned(), in_process::options(osd));
            let size = args.size;
            thread::spawn(move || work(node, number, size, in_flight, &counts))
        })
        .collect();
    while counts.ready.load(Ordering::Acquire) < clients as u64 && !workers.iter().all(|w| w.is_finished()) {
        thread::sleep(Duration::from_millis(5));
    }
    let status = || runtime.block_on(watching.status()).doing("asking for the status of the osd");
    let usage = || ProcessUsage::read(std::process::id()).doing("reading the CPU time of this process");
    let messages = |status: &NodeStatus| status.shards.iter().map(|shard| shard.messages).sum::<u64>();
    let (before, used, ops, began) =
        (status()?, usage()?, counts.ops.load(Ordering::Relaxed), Instant::now());
    thread::sleep(args.seconds);
    let ops = (counts.ops.load(Ordering::Relaxed) - ops) as f64;
    let (elapsed, used) = (began.elapsed().as_secs_f64(), usage()?.since(&used));
    let after = status()?;
    counts.stop.store(true, Ordering::Release);
    for worker in workers {
        worker.join().expect("a client does not panic")?;
    }
    let osd = used.by_class.get("osd").map_or(0.0, |u| u.cpu_seconds());
    Ok(ShardsMeasurement {
        ops_per_second: ops / elapsed,
        osd_us_per_op: osd * 1e6 / ops,
        messages_per_op: (messages(&after) - messages(&before)) as f64 / ops,
    })
}

/// Reads and writes objects until the measurement ends.
fn work(
    (endpoint, options): (String, Options),
    number: usize,
    size: usize,
    in_flight: usize,
    counts: &SharedCounts,
) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(DOING)?;
    runtime.block_on(async {
        let client = Client::connect(&endpoint, options).await.doing(DOING)?;
        let pool = client.pool("bench").doing(DOING)?;
        let object = |i: usize| pool.object(&format!("{number}-{i}")).doing(DOING);
        let objects = (0..OBJECTS).map(object).collect::<Result<Vec<_>>>()?;
        let data = Bytes::from(vec![0x5a; size]);
        for object in &objects {
            object.put(data.clone()).await.doing(DOING)?;
        }
        counts.ready.fetch_add(1, Ordering::Release);
        let workers = (0..in_flight).map(async |worker| {
            let own = || objects.iter().skip(worker).step_by(in_flight);
            while !counts.stop.load(Ordering::Acquire) {
                for object in own() {
                    object.write(0, data.clone()).await?;
                    object.get_range(0, size as u64).await?;
                    counts.ops.fetch_add(2, Ordering::Relaxed);
                }
            }
            Ok::<(), client::Error>(())
        });
        try_join_all(workers).await.doing(DOING)?;
        Ok(())
    })
}
