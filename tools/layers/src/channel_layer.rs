//! Measures the host–DPU channel: 4 KiB and 4 MiB writes and reads through `ProxyStore`, with the
//! store in a process of its own. Compares them with the same calls made directly, and with memcpy.
//!
//! The store is `MemStore`, or a store that does nothing, so that only the cost of the channel
//! remains.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base::block::{BLOCK_SIZE, Payload, ZERO_BLOCK_CRC};
use base::mem::{Arena, DeviceMemory};
use base::pool::BufferPool;
use base::process::{ProcessUsage, Usage};
use base::thread::{ThreadClass, spawn};
use bytes::Bytes;
use clap::{Args, ValueEnum};
use futures::stream::{FuturesUnordered, StreamExt};
use node::failure::{Doing, Failure, Result};
use proxy::{
    Attachment, AttachmentOptions, ServedTarget, Server, ServerOptions, StoreEndpoint, StoreListener,
};
use store::{
    CollectionId, MemStore, MetadataQuery, ObjectId, ObjectStore, Op, QueryReply, ReadData, StageId, Stat,
    StoreCalls, StoreError, StoreFuture, StoreReply, StoreRequest, Submit, Transaction, WriteSource, ready,
};
use uuid::Uuid;

use crate::copies::{self, CHANNEL, copied_bytes};
use crate::output;

const DOING: &str = "measuring the channel";
/// Number of objects of 4 KiB, and of 4 MiB.
const OBJECTS: usize = 64;
const LARGE_OBJECTS: usize = 16;
const KIB4: usize = 4 << 10;
const MIB4: usize = 4 << 20;

/// Measure the host–DPU channel
///
/// Runs a store in a second process. "null" is a store that does nothing, and "mem" is a store in
/// memory. "dma" moves data by the emulated DMA engine, "socket" by the control socket, and
/// "direct" calls the store without a channel. The output shows CPU time and context switches of
/// the host's process, of the osd's threads, and of the threads that emulate the DMA engine.
/// "copies" is the number of bytes that the channel copies in user space per byte of payload,
/// counted in both processes. Transfers of the DMA engine are not included, and neither are copies
/// of the store. If data passes through the control socket, the kernel copies each byte into the
/// socket and out of it, which is not included either.
#[derive(Debug, Args)]
pub struct ChannelLayerArgs {
    /// Seconds of each measurement
    #[arg(long, default_value = "2", value_name = "T", value_parser = crate::seconds)]
    seconds: Duration,
    /// Calls in flight
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    in_flight: u16,
    /// Run as the second process, with this store
    #[arg(long, hide = true, requires = "socket")]
    serve: Option<ServedStore>,
    /// Socket of the second process
    #[arg(long, hide = true)]
    socket: Option<PathBuf>,
}

/// The store of the second process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ServedStore {
    /// `MemStore`.
    Mem,
    /// [`NullStore`].
    Null,
}

impl ServedStore {
    fn name(self) -> &'static str {
        match self {
            ServedStore::Mem => "mem",
            ServedStore::Null => "null",
        }
    }
}

#[derive(Clone, Copy)]
enum ChannelLoad {
    Write(usize),
    Read(usize),
    Stat,
}

/// Runs the command.
pub fn run(args: &ChannelLayerArgs) -> Result<()> {
    if let (Some(store), Some(socket)) = (args.serve, &args.socket) {
        return serve(store, socket);
    }
    copies::record();
    let (time, in_flight) = (args.seconds, usize::from(args.in_flight));
    let shard = spawn(ThreadClass::Osd, "0", move || measure_all(time, in_flight)).doing(DOING)?;
    shard.join().unwrap_or_else(|_| Err(Failure::new(DOING, "the thread panicked; this is a bug")))
}

/// Serves a store until standard input ends.
fn serve(store: ServedStore, socket: &Path) -> Result<()> {
    copies::record();
    let store: Arc<dyn ObjectStore> = match store {
        ServedStore::Mem => Arc::new(MemStore::new()),
        ServedStore::Null => Arc::new(NullStore::default()),
    };
    let listener = StoreListener::unix(socket).doing("listening for the osd")?;
    let _server = Server::serve(
        listener,
        vec![ServedTarget { uuid: Uuid::from_u128(1), store }],
        ServerOptions::default(),
    );
    output::line("READY");
    // Each line asks how many bytes the channel has copied. When the first process ends, the pipe is
    // closed.
    for _ in std::io::stdin().lines().map_while(std::io::Result::ok) {
        output::line(copied_bytes(CHANNEL));
    }
    Ok(())
}

/// The second process. Dropping it ends the process.
struct StoreProcess {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl StoreProcess {
    fn start(store: ServedStore, socket: &Path) -> Result<StoreProcess> {
        let doing = "starting the store's process";
        let mut child = Command::new(std::env::current_exe().doing(doing)?)
            .args(["channel", "--serve", store.name(), "--socket"])
            .arg(socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .doing(doing)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::new(doing, "the process has no pipes; this is a bug"));
        };
        let mut process = StoreProcess { child, input, output: BufReader::new(output).lines() };
        process.line(doing)?;
        Ok(process)
    }

    fn line(&mut self, doing: &str) -> Result<String> {
        match self.output.next() {
            Some(Ok(line)) => Ok(line),
            _ => Err(Failure::new(doing, "the process has ended; see its error above")),
        }
    }

    /// Queries how many bytes the channel has copied in the process.
    fn copied_bytes(&mut self) -> Result<u64> {
        let doing = "querying the store's process";
        writeln!(self.input, "copied").doing(doing)?;
        self.line(doing)?.parse().doing(doing)
    }
}

impl Drop for StoreProcess {
    fn drop(&mut self) {
        // Ignore errors: the process may already have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn measure_all(time: Duration, in_flight: usize) -> Result<()> {
    let dir = tempfile::tempdir().doing("creating a directory for a socket")?;
    let socket = dir.path().join("store");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(DOING)?;
    output::line(format_args!(
        "{in_flight} calls in flight, {:.1} s each; CPU in µs per op, context switches per op",
        time.as_secs_f64()
    ));
    output::line(format_args!(
        "{:<26} {:>9} {:>8} | {:>7} {:>7} {:>7} | {:>6} {:>6} {:>6} | {:>6} {:>6}",
        "", "ops/s", "MB/s", "host", "osd", "dma", "host", "osd", "dma", "DMA/op", "copies"
    ));
    runtime.block_on(async {
        for (store, by_dma) in
            [ServedStore::Null, ServedStore::Mem].into_iter().flat_map(|s| [(s, true), (s, false)])
        {
            let mut process = StoreProcess::start(store, &socket)?;
            let options = AttachmentOptions { socket_only: !by_dma, ..AttachmentOptions::default() };
            let attaching = Attachment::connect(StoreEndpoint::Unix(socket.clone()), options).await;
            let attachment = attaching.doing("attaching to the store's process")?;
            let name = format!("{}, {}", store.name(), if by_dma { "dma" } else { "socket" });
            let far = Some((&attachment, &mut process));
            run_all(&name, attachment.store(0), attachment.pool(), time, in_flight, far).await?;
        }
        let pool = BufferPool::new(Arena::anonymous(128 << 20).doing(DOING)?, 0, MIB4);
        run_all("mem, direct", Arc::new(MemStore::new()), &pool, time, in_flight, None).await
    })?;
    memcpy(time)
}

/// Runs every load on a store. `far` is the attachment and the store's process, if the store runs in
/// the second process.
async fn run_all(
    path: &str,
    store: Arc<dyn ObjectStore>,
    pool: &BufferPool,
    time: Duration,
    in_flight: usize,
    mut far: Option<(&Attachment, &mut StoreProcess)>,
) -> Result<()> {
    let cid = CollectionId::new("bench").expect("a valid id");
    // Ignore an error: the store may already have the collection.
    let _ = store.queue_transaction(Transaction::new(cid.clone()).with(Op::CreateCollection)).await;
    populate(&store, &cid, pool).await.doing(DOING)?;
    let loads = [
        ("write 4 KiB", ChannelLoad::Write(KIB4), in_flight),
        ("read 4 KiB", ChannelLoad::Read(KIB4), in_flight),
        ("stat", ChannelLoad::Stat, in_flight),
        ("write 4 MiB", ChannelLoad::Write(MIB4), in_flight),
        ("read 4 MiB", ChannelLoad::Read(MIB4), in_flight),
        ("write 4 KiB, one", ChannelLoad::Write(KIB4), 1),
        ("read 4 KiB, one", ChannelLoad::Read(KIB4), 1),
    ];
    for (name, load, in_flight) in loads {
        let usage = |pid| ProcessUsage::read(pid).doing("reading the CPU time of a process");
        let us = std::process::id();
        let host_usage = |far: &Option<(&Attachment, &mut StoreProcess)>| {
            far.as_ref().map(|(_, process)| usage(process.child.id())).transpose()
        };
        let (before, host_before) = (usage(us)?, host_usage(&far)?);
        let dma_before = far.as_ref().map(|(attachment, _)| attachment.engine().counters());
        let copied_before = copied_by_both(&mut far)?;
        let started = Instant::now();
        let ops = measure(load, &store, &cid, pool, time, in_flight).await?;
        let seconds = started.elapsed().as_secs_f64();
        let here = usage(us)?.since(&before);
        let host_after = host_usage(&far)?;
        let copied = copied_by_both(&mut far)? - copied_before;
        let host = host_after.zip(host_before).map(|(now, then)| now.since(&then));
        let dma = far.as_ref().map(|(attachment, _)| attachment.engine().counters()).zip(dma_before);
        let class = |class: ThreadClass| here.by_class.get(class.prefix()).copied().unwrap_or_default();
        let sum = |classes: [ThreadClass; 2], of: &dyn Fn(Usage) -> f64| {
            classes.map(|each| of(class(each))).iter().sum::<f64>()
        };
        // The software of the DPU, and the threads that emulate its hardware.
        let [software, hardware] =
            [[ThreadClass::Osd, ThreadClass::Coding], [ThreadClass::Dma, ThreadClass::CodingDevice]];
        let (cpu, switches) =
            (|used: Usage| used.cpu_seconds() * 1e6, |used: Usage| used.context_switches as f64);
        let host = host.map(|host| host.total).unwrap_or_default();
        let per = |value: f64| value / ops as f64;
        let bytes = match load {
            ChannelLoad::Write(len) | ChannelLoad::Read(len) => len as f64,
            ChannelLoad::Stat => 0.0,
        };
        let copies = match far.is_some() && bytes > 0.0 {
            true => format!("{:.3}", per(copied as f64) / bytes),
            false => "-".to_owned(),
        };
        let label = format!("{path}: {name}");
        output::line(format_args!(
            "{label:<26} {:>9.0} {:>8.0} | {:>7.2} {:>7.2} {:>7.2} | {:>6.2} {:>6.2} {:>6.2} | {:>6.2} {copies:>6}",
            ops as f64 / seconds,
            ops as f64 * bytes / seconds / 1e6,
            per(host.cpu_seconds() * 1e6),
            per(sum(software, &cpu)),
            per(sum(hardware, &cpu)),
            per(host.context_switches as f64),
            per(sum(software, &switches)),
            per(sum(hardware, &switches)),
            dma.map_or(0.0, |(now, then)| per((now.transfers - then.transfers) as f64)),
        ));
    }
    Ok(())
}

/// Returns how many bytes the channel has copied in this process and in the store's process.
fn copied_by_both(far: &mut Option<(&Attachment, &mut StoreProcess)>) -> Result<u64> {
    let there = far.as_mut().map(|(_, process)| process.copied_bytes()).transpose()?;
    Ok(copied_bytes(CHANNEL) + there.unwrap_or(0))
}

/// Returns the object of operation `n`, for operations of `len` bytes.
fn object(n: usize, len: usize) -> ObjectId {
    let objects = if len == MIB4 { LARGE_OBJECTS } else { OBJECTS };
    ObjectId::new(format!("{len} {}", n % objects)).expect("a valid id")
}

/// Writes every object once, so that reads find the objects.
async fn populate(
    store: &Arc<dyn ObjectStore>,
    cid: &CollectionId,
    pool: &BufferPool,
) -> Result<(), StoreError> {
    for n in 0..OBJECTS {
        let source = WriteSource::Inline(Payload::compute(0, vec![0x5a; KIB4].into()));
        let op = Op::Write { oid: object(n, KIB4), offset: 0, source };
        store.queue_transaction(Transaction::new(cid.clone()).with(op)).await?;
    }
    let payloads = large_payloads(pool, LARGE_OBJECTS).await;
    for (n, halves) in payloads.into_iter().enumerate() {
        write_large(store, cid.clone(), object(n, MIB4), halves).await?;
    }
    Ok(())
}

/// Runs one load, and returns the number of operations.
async fn measure(
    load: ChannelLoad,
    store: &Arc<dyn ObjectStore>,
    cid: &CollectionId,
    pool: &BufferPool,
    time: Duration,
    in_flight: usize,
) -> Result<u64> {
    let small = Payload::compute(0, vec![0x5a; KIB4].into());
    let large = match load {
        ChannelLoad::Write(MIB4) => large_payloads(pool, in_flight.min(LARGE_OBJECTS)).await,
        _ => Vec::new(),
    };
    let one = |n: usize| {
        let (store, cid, small) = (Arc::clone(store), cid.clone(), small.clone());
        let halves = large.get(n % large.len().max(1)).cloned();
        async move {
            match load {
                ChannelLoad::Write(len) if len == KIB4 => {
                    let op = Op::Write { oid: object(n, len), offset: 0, source: WriteSource::Inline(small) };
                    store.queue_transaction(Transaction::new(cid).with(op)).await?;
                }
                ChannelLoad::Write(len) => {
                    let halves = halves.expect("a load of large writes has payload");
                    write_large(&store, cid, object(n, len), halves).await?;
                }
                ChannelLoad::Read(len) if len == KIB4 => {
                    store.read(&cid, &object(n, len), 0, len as u64, None).await?;
                }
                ChannelLoad::Read(len) => {
                    let oid = object(n, len);
                    let windows = (0..len as u64).step_by(2 << 20);
                    let reads: Vec<_> = windows.map(|at| store.read(&cid, &oid, at, 2 << 20, None)).collect();
                    for read in reads {
                        read.await?;
                    }
                }
                ChannelLoad::Stat => {
                    store.stat(&cid, &object(n, KIB4)).await?;
                }
            }
            Ok::<(), StoreError>(())
        }
    };
    let mut running: FuturesUnordered<_> = (0..in_flight).map(one).collect();
    let started = Instant::now();
    let mut ops = 0;
    while let Some(outcome) = running.next().await {
        outcome.doing(DOING)?;
        ops += 1;
        if started.elapsed() < time {
            running.push(one(in_flight + ops as usize));
        }
    }
    Ok(ops)
}

/// The payload of a write of 4 MiB, in two staging buffers.
type Halves = [Payload; 2];

/// Fills the staging buffers of `count` writes of 4 MiB.
async fn large_payloads(pool: &BufferPool, count: usize) -> Vec<Halves> {
    let mut payloads = Vec::with_capacity(count);
    for _ in 0..count {
        payloads.push([large_payload(pool).await, large_payload(pool).await]);
    }
    payloads
}

async fn large_payload(pool: &BufferPool) -> Payload {
    let mut buffer = pool.alloc(MIB4 / 2).await.expect("the pool has buffers of this size");
    buffer.fill(0x5a);
    Payload::compute(0, buffer.freeze())
}

/// Writes 4 MiB as the osd does: in staging buffers of 2 MiB.
async fn write_large(
    store: &Arc<dyn ObjectStore>,
    cid: CollectionId,
    oid: ObjectId,
    halves: Halves,
) -> Result<(), StoreError> {
    let stage = store.stage(MIB4 as u64).await?;
    let places = (0..).step_by(MIB4 / 2).zip(halves);
    let writes: Vec<_> = places.map(|(at, half)| store.stage_write(stage, at, half)).collect();
    for write in writes {
        write.await?;
    }
    let source = WriteSource::Staged { stage, offset: 0, len: MIB4 as u64 };
    let commit = store.queue_transaction(Transaction::new(cid).with(Op::Write { oid, offset: 0, source }));
    store.stage_release(stage);
    commit.await
}

/// Measures the upper limit of large transfers: one thread copies between two memory regions that
/// are larger than the CPU's caches.
fn memcpy(time: Duration) -> Result<()> {
    const LEN: usize = 64 << 20;
    let memory = || DeviceMemory::private(LEN).doing("measuring memcpy");
    let (from, to) = (memory()?, memory()?);
    // Copy twice without measuring, because the first access to each page causes a page fault.
    for _ in 0..2 {
        assert!(to.copy_from(0, &from, 0, LEN) && from.copy_from(0, &to, 0, LEN));
    }
    let mut copied = 0usize;
    let cpu = || -> Result<f64> {
        let used = ProcessUsage::read(std::process::id()).doing("measuring memcpy")?;
        Ok(used.by_class.get("osd").map_or(0.0, |u| u.cpu_seconds()))
    };
    let (started, before) = (Instant::now(), cpu()?);
    while started.elapsed() < time {
        let at = copied % LEN;
        assert!(to.copy_from(at, &from, at, 2 << 20));
        copied += 2 << 20;
    }
    let (bytes, wall) = (copied as f64 / 1e6, started.elapsed().as_secs_f64());
    let used = cpu()? - before;
    output::line(format_args!(
        "memcpy, one thread: {:.0} MB/s; {:.0} MB per second of CPU, {:.0} µs per 4 MiB",
        bytes / wall,
        bytes / used,
        used / copied as f64 * MIB4 as f64 * 1e6
    ));
    Ok(())
}

/// A store that accepts all requests and stores nothing. Reads return zeros, so that the data
/// matches its checksums.
#[derive(Default)]
struct NullStore {
    /// Number of stages that were allocated.
    stages: AtomicU64,
}

impl Submit for NullStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        static ZEROS: [u8; MIB4] = [0; MIB4];
        ready(Ok(match request {
            StoreRequest::Stage { .. } => StageId(self.stages.fetch_add(1, Ordering::Relaxed) + 1).into(),
            StoreRequest::Read { offset, len, dest, .. } => {
                let zeros = &ZEROS[..len as usize];
                let data = match dest {
                    Some(mut dest) => {
                        dest.copy_from_slice(zeros);
                        dest.freeze()
                    }
                    None => Bytes::from_static(zeros),
                };
                let checksums = vec![ZERO_BLOCK_CRC; len.div_ceil(BLOCK_SIZE as u64) as usize];
                let object_size = MIB4 as u64;
                ReadData { offset, data: vec![data], checksums, object_size, verified: false }.into()
            }
            StoreRequest::Query { query: MetadataQuery::Stat { .. }, .. } => {
                QueryReply::Stat(Stat { size: 0, allocated: 0 }).into()
            }
            StoreRequest::Query { .. } | StoreRequest::Collections | StoreRequest::Space => {
                return ready(Err(StoreError::InvalidArgument("this store does nothing".into())));
            }
            _ => StoreReply::Done,
        }))
    }
}
