//! What the host–DPU channel costs: 4 KiB and 4 MiB writes and reads through `ProxyStore`, the store in a process of
//! its own, beside the same calls made directly and beside memcpy. The store is `MemStore`, or one that does nothing at all, so
//! that what remains is the channel.
//!
//!     cargo run --release -p outboard-proxy --example bench_channel -- [seconds] [in flight]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::block::Payload;
use base::mem::{Arena, ArenaBuf, DeviceMemory};
use base::pool::BufferPool;
use base::process::{ProcessUsage, Usage};
use base::thread::{ThreadClass, spawn};
use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt};
use outboard_proxy::{
    Attachment, AttachmentOptions, ServedTarget, Server, ServerOptions, StoreEndpoint, StoreListener,
};
use store::{
    CollectionId, MemStore, MetadataQuery, ObjectId, ObjectStore, Op, QueryReply, ReadData, StageId, Stat,
    StoreCalls, StoreError, StoreFuture, StoreReply, StoreRequest, Submit, Transaction, WriteSource, ready,
};

const OBJECTS: usize = 64;
const KIB4: usize = 4 << 10;
const MIB4: usize = 4 << 20;

#[derive(Clone, Copy)]
enum Work {
    Write(usize),
    Read(usize),
    Stat,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("mem") => serve(&PathBuf::from(arguments.next().expect("a path")), Arc::new(MemStore::new())),
        Some("null") => serve(&PathBuf::from(arguments.next().expect("a path")), Arc::new(NullStore)),
        seconds => {
            let seconds = seconds.and_then(|s| s.parse().ok()).unwrap_or(2.0);
            let in_flight = arguments.next().and_then(|s| s.parse().ok()).unwrap_or(16);
            let shard =
                spawn(ThreadClass::Osd, "0", move || bench(Duration::from_secs_f64(seconds), in_flight));
            shard.expect("a thread").join().expect("the benchmark");
        }
    }
}

/// The store's process.
fn serve(socket: &Path, store: Arc<dyn ObjectStore>) {
    let targets = vec![ServedTarget { uuid: 1, store }];
    let _server =
        Server::serve(StoreListener::unix(socket).expect("a socket"), targets, ServerOptions::default());
    say("READY");
    // Ends when the benchmark does.
    let _ = std::io::stdin().lines().next();
}

fn say(line: &str) {
    // A closed pipe ends the benchmark soon enough.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// The other process: this program in another role, ended with this value.
struct StoreProcess(Child);

impl StoreProcess {
    fn start(store: &str, socket: &Path) -> StoreProcess {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .arg(store)
            .arg(socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the store's process");
        BufReader::new(child.stdout.take().expect("a pipe")).lines().next();
        StoreProcess(child)
    }
}

impl Drop for StoreProcess {
    fn drop(&mut self) {
        // It may have gone by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn bench(time: Duration, in_flight: usize) {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("store");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    say(&format!(
        "{in_flight} in flight, {:.1} s each; CPU in µs per op, wake-ups per op",
        time.as_secs_f64()
    ));
    say(&format!(
        "{:<26} {:>9} {:>8} | {:>7} {:>7} {:>7} | {:>6} {:>6} {:>6} | {:>6}",
        "", "ops/s", "MB/s", "host", "osd", "dma", "host", "osd", "dma", "DMA/op"
    ));
    runtime.block_on(async {
        for (store, by_dma) in [("null", true), ("null", false), ("mem", true), ("mem", false)] {
            let process = StoreProcess::start(store, &socket);
            let options = AttachmentOptions { socket_only: !by_dma, ..AttachmentOptions::default() };
            let attachment = Attachment::connect(StoreEndpoint::Unix(socket.clone()), options)
                .await
                .expect("an attachment");
            let name = format!("{store}, {}", if by_dma { "dma" } else { "socket" });
            let node = Some((&attachment, process.0.id()));
            run_all(&name, attachment.store(0), attachment.pool(), time, in_flight, node).await;
        }
        let pool = BufferPool::new(Arena::anonymous(128 << 20).expect("memory"), 0, MIB4);
        run_all("mem, direct", Arc::new(MemStore::new()), &pool, time, in_flight, None).await;
    });
    memcpy(time);
}

async fn run_all(
    path: &str,
    store: Arc<dyn ObjectStore>,
    pool: &BufferPool,
    time: Duration,
    in_flight: usize,
    node: Option<(&Attachment, u32)>,
) {
    let cid = CollectionId::new("bench").expect("an id");
    // The second attachment finds what the first one left.
    let _ = store.queue_transaction(Transaction::new(cid.clone()).with(Op::CreateCollection)).await;
    let work = [
        ("write 4 KiB", Work::Write(KIB4), in_flight),
        ("read 4 KiB", Work::Read(KIB4), in_flight),
        ("stat", Work::Stat, in_flight),
        ("write 4 MiB", Work::Write(MIB4), in_flight),
        ("read 4 MiB", Work::Read(MIB4), in_flight),
        ("write 4 KiB, one", Work::Write(KIB4), 1),
        ("read 4 KiB, one", Work::Read(KIB4), 1),
    ];
    for (name, work, in_flight) in work {
        let usage = |pid| ProcessUsage::read(pid).expect("a process");
        let us = std::process::id();
        let (before, host_before) = (usage(us), node.map(|(_, pid)| usage(pid)));
        let dma_before = node.map(|(attachment, _)| attachment.engine().counters());
        let started = Instant::now();
        let ops = run(work, &store, &cid, pool, time, in_flight).await;
        let seconds = started.elapsed().as_secs_f64();
        let here = usage(us).since(&before);
        let host = node.map(|(_, pid)| usage(pid)).zip(host_before).map(|(now, then)| now.since(&then));
        let dma = node.map(|(attachment, _)| attachment.engine().counters()).zip(dma_before);
        let class = |class: ThreadClass| here.by_class.get(class.prefix()).copied().unwrap_or_default();
        let sum = |classes: [ThreadClass; 2], of: &dyn Fn(Usage) -> f64| {
            classes.map(|each| of(class(each))).iter().sum::<f64>()
        };
        // The DPU's software, and what stands for its hardware.
        let [software, hardware] =
            [[ThreadClass::Osd, ThreadClass::Coding], [ThreadClass::Dma, ThreadClass::CodingDevice]];
        let (cpu, switches) =
            (|used: Usage| used.cpu_seconds * 1e6, |used: Usage| used.context_switches as f64);
        let host = host.map(|host| host.total).unwrap_or_default();
        let per = |value: f64| value / ops as f64;
        let bytes = match work {
            Work::Write(len) | Work::Read(len) => len as f64,
            Work::Stat => 0.0,
        };
        let label = format!("{path}: {name}");
        say(&format!(
            "{label:<26} {:>9.0} {:>8.0} | {:>7.2} {:>7.2} {:>7.2} | {:>6.2} {:>6.2} {:>6.2} | {:>6.2}",
            ops as f64 / seconds,
            ops as f64 * bytes / seconds / 1e6,
            per(host.cpu_seconds * 1e6),
            per(sum(software, &cpu)),
            per(sum(hardware, &cpu)),
            per(host.context_switches as f64),
            per(sum(software, &switches)),
            per(sum(hardware, &switches)),
            dma.map_or(0.0, |(now, then)| per((now.transfers - then.transfers) as f64)),
        ));
    }
}

async fn run(
    work: Work,
    store: &Arc<dyn ObjectStore>,
    cid: &CollectionId,
    pool: &BufferPool,
    time: Duration,
    in_flight: usize,
) -> u64 {
    let object = |n: usize, len: usize| ObjectId::new(format!("{len} {}", n % OBJECTS)).expect("an id");
    let objects = |len: usize| if len == MIB4 { 16 } else { OBJECTS };
    let small: Bytes = vec![0x5a; KIB4].into();
    let small = Payload::compute(0, small);
    let checksums = Payload::compute(0, vec![0x5a; MIB4].into()).checksums().to_vec();
    let one = |n: usize| {
        let (store, cid, pool) = (Arc::clone(store), cid.clone(), pool.clone());
        let (small, checksums) = (small.clone(), checksums.clone());
        async move {
            match work {
                Work::Write(len) if len == KIB4 => {
                    let op = Op::Write { oid: object(n, len), offset: 0, source: WriteSource::Inline(small) };
                    store.queue_transaction(Transaction::new(cid).with(op)).await.expect("written");
                }
                Work::Write(len) => {
                    write_large(&store, cid, object(n % objects(len), len), &pool, checksums).await
                }
                Work::Read(len) if len == KIB4 => {
                    store.read(&cid, &object(n, len), 0, len as u64, None).await.expect("read");
                }
                Work::Read(len) => {
                    let oid = object(n % objects(len), len);
                    let windows = (0..len as u64).step_by(2 << 20);
                    let reads: Vec<_> = windows.map(|at| store.read(&cid, &oid, at, 2 << 20, None)).collect();
                    for read in reads {
                        read.await.expect("read");
                    }
                }
                Work::Stat => {
                    store.stat(&cid, &object(n, KIB4)).await.expect("stat");
                }
            }
        }
    };
    let mut running: FuturesUnordered<_> = (0..in_flight).map(one).collect();
    let started = Instant::now();
    let mut ops = 0;
    while running.next().await.is_some() {
        ops += 1;
        if started.elapsed() < time {
            running.push(one(in_flight + ops as usize));
        }
    }
    ops
}

/// Takes staging buffers as the OSD does when it pulls, 2 MiB at a time.
async fn write_large(
    store: &Arc<dyn ObjectStore>,
    cid: CollectionId,
    oid: ObjectId,
    pool: &BufferPool,
    checksums: Vec<u32>,
) {
    let stage = store.stage(MIB4 as u64).await.expect("a stage");
    let mut writes = Vec::new();
    for half in 0..2 {
        let buffer = pool.alloc(2 << 20).await.expect("a buffer");
        let checksums = checksums[half * 512..(half + 1) * 512].to_vec();
        let payload = Payload::from_parts(0, buffer.freeze(), checksums).expect("a payload");
        writes.push(store.stage_write(stage, (half as u64) << 21, payload));
    }
    for write in writes {
        write.await.expect("staged");
    }
    let source = WriteSource::Staged { stage, offset: 0, len: MIB4 as u64 };
    let commit = store.queue_transaction(Transaction::new(cid).with(Op::Write { oid, offset: 0, source }));
    store.stage_release(stage);
    commit.await.expect("committed");
}

/// The bound on large transfers: one thread that copies between two memories larger than its caches.
fn memcpy(time: Duration) {
    const LEN: usize = 64 << 20;
    let memory = || DeviceMemory::private(LEN).expect("memory");
    let (from, to) = (memory(), memory());
    // The first touch is paid by page faults.
    for _ in 0..2 {
        assert!(to.copy_from(0, &from, 0, LEN) && from.copy_from(0, &to, 0, LEN));
    }
    let mut copied = 0usize;
    let cpu = || ProcessUsage::read(std::process::id()).expect("this process").by_class["osd"].cpu_seconds;
    let (started, before) = (Instant::now(), cpu());
    while started.elapsed() < time {
        let at = copied % LEN;
        assert!(to.copy_from(at, &from, at, 2 << 20));
        copied += 2 << 20;
    }
    let (bytes, wall) = (copied as f64 / 1e6, started.elapsed().as_secs_f64());
    let used = cpu() - before;
    say(&format!(
        "memcpy, one thread: {:.0} MB/s; {:.0} MB per second of CPU, {:.0} µs per 4 MiB",
        bytes / wall,
        bytes / used,
        used / copied as f64 * MIB4 as f64 * 1e6
    ));
}

/// Takes everything, keeps nothing, and reads whatever lies in the buffer.
struct NullStore;

impl Submit for NullStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        static ZEROS: [u8; MIB4] = [0; MIB4];
        ready(Ok(match request {
            StoreRequest::Stage { .. } => StageId(1).into(),
            StoreRequest::Read { offset, len, dest, .. } => ReadData {
                offset,
                data: vec![dest.map_or(Bytes::from_static(&ZEROS[..len as usize]), ArenaBuf::freeze)],
                checksums: vec![0; len.div_ceil(4096) as usize],
                object_size: MIB4 as u64,
                verified: false,
            }
            .into(),
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
