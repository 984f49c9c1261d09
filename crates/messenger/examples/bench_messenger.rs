//! What the messenger costs beside bare TCP, measured in one run: `cargo run --release --example bench_messenger`.
//!
//! A server and a client thread, each with its own current-thread runtime, over loopback. For every workload: rate,
//! CPU time of both threads, and context switches, per operation. An argument chooses workloads by a part of their name;
//! `OUTBOARD_BENCH_SECONDS` (2) is how long each runs.

#![expect(clippy::print_stdout, reason = "a benchmark prints")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base::BoxFuture;
use base::block::Payload;
use base::mem::Arena;
use base::pool::BufferPool;
use base::process::{ProcessUsage, Usage};
use bytes::Bytes;
use outboard_messenger::{
    BulkDescriptor, BulkSink, BulkSource, ConnectOptions, Event, Incoming, Message, NetworkStack, TcpStack,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const CHUNK: usize = 256 << 10;
const SEGMENT: usize = 2 << 20;
const LONG: Duration = Duration::from_secs(60);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Result<()> {
    let filter = std::env::args().nth(1).unwrap_or_default();
    println!("{:<34} {:>10} {:>9} {:>10} {:>11}", "workload", "ops/s", "MB/s", "CPU µs/op", "switches/op");
    for depth in [1, 16] {
        measure(&filter, &format!("bare TCP echo 4 KiB, {depth} in flight"), 4096, |run| {
            bare_echo(run, depth)
        })?;
        measure(&filter, &format!("messenger echo 4 KiB, {depth} in flight"), 4096, |run| echo(run, depth))?;
    }
    measure(&filter, "bare TCP stream 256 KiB", CHUNK, |run| bare_stream(run, CHUNK, 1))?;
    measure(&filter, "bare TCP stream 2 MiB, 1 buffer", SEGMENT, |run| bare_stream(run, SEGMENT, 1))?;
    measure(&filter, "bare TCP stream 2 MiB, 4 buffers", SEGMENT, |run| bare_stream(run, SEGMENT, 4))?;
    measure(&filter, "messenger pull 2 MiB, 1 in flight", SEGMENT, |run| pull(run, 1))?;
    measure(&filter, "messenger pull 2 MiB, 4 in flight", SEGMENT, |run| pull(run, 4))?;
    measure(&filter, "messenger push 2 MiB, 4 in flight", SEGMENT, |run| push(run, 4))?;
    if "idle".contains(&filter) {
        idle(1000)?;
    }
    Ok(())
}

/// What sessions cost that do nothing, both ends of them in this process.
fn idle(sessions: usize) -> Result<()> {
    runtime()?.block_on(async {
        let stack = TcpStack::default();
        let mut listener = stack.listen("127.0.0.1:0", 0).await?;
        let endpoint = listener.endpoint();
        let resident = || -> Result<f64> {
            let pages = std::fs::read_to_string("/proc/self/statm")?;
            Ok(pages.split_ascii_whitespace().nth(1).ok_or("statm")?.parse::<f64>()? * 4096.0 / 1e6)
        };
        let memory = resident()?;
        let mut ends = Vec::new();
        for _ in 0..sessions {
            let options = ConnectOptions::default();
            let (client, server) = tokio::join!(stack.connect(&endpoint, options), listener.accept());
            ends.push((client?, server?));
        }
        let before = ProcessUsage::read(std::process::id())?;
        let seconds = 6.0;
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        let used = ProcessUsage::read(std::process::id())?.since(&before).total.cpu_seconds / seconds;
        println!(
            "idle: {sessions} sessions, both ends: {:.2} % of a core, {:.1} MB more resident",
            used * 100.0,
            resident()? - memory
        );
        Ok(())
    })
}

/// One measurement: how long it runs, and how far it got.
struct Run {
    end: Instant,
    ops: AtomicU64,
}

impl Run {
    fn goes_on(&self) -> bool {
        Instant::now() < self.end
    }

    fn done(&self, ops: usize) {
        self.ops.fetch_add(ops as u64, Ordering::Relaxed);
    }
}

fn measure(filter: &str, name: &str, bytes: usize, body: impl FnOnce(Arc<Run>) -> Result<()>) -> Result<()> {
    if !name.contains(filter) {
        return Ok(());
    }
    let seconds: f64 = std::env::var("OUTBOARD_BENCH_SECONDS").map_or(Ok(2.0), |s| s.parse())?;
    let before = ProcessUsage::read(std::process::id())?;
    let began = Instant::now();
    let run = Arc::new(Run { end: began + Duration::from_secs_f64(seconds), ops: AtomicU64::new(0) });
    body(Arc::clone(&run))?;
    let elapsed = began.elapsed().as_secs_f64();
    let Usage { cpu_seconds, context_switches } =
        ProcessUsage::read(std::process::id())?.since(&before).total;
    let ops = run.ops.load(Ordering::Relaxed) as f64;
    println!(
        "{name:<34} {:>10.0} {:>9.0} {:>10.2} {:>11.3}",
        ops / elapsed,
        ops * bytes as f64 / elapsed / 1e6,
        cpu_seconds * 1e6 / ops,
        context_switches as f64 / ops
    );
    Ok(())
}

/// Runs `server` on a thread of its own and `client`, given the server's address, on this one. The threads are only
/// joined after the measurement was read, so that their switches count.
fn both<S, C>(
    server: impl FnOnce(std::sync::mpsc::Sender<String>) -> S + Send + 'static,
    client: impl FnOnce(String) -> C,
) -> Result<()>
where
    S: Future<Output = Result<()>> + Send + 'static,
    C: Future<Output = Result<()>> + Send + 'static,
{
    let (address, addresses) = std::sync::mpsc::channel();
    std::thread::Builder::new().name("msgr-server".into()).spawn(move || {
        // The client leaves when it has seen enough, which a server may notice as an error.
        let _ = runtime().and_then(|runtime| runtime.block_on(spawned(server(address))));
        // Its usage is read after the client has ended.
        std::thread::sleep(Duration::from_millis(200));
    })?;
    let address = addresses.recv()?;
    runtime()?.block_on(spawned(client(address)))
}

/// Runs `work` as a task: the future that a runtime blocks on costs a system call more whenever it is woken.
async fn spawned(work: impl Future<Output = Result<()>> + Send + 'static) -> Result<()> {
    tokio::spawn(work).await?
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

fn bare_echo(run: Arc<Run>, depth: usize) -> Result<()> {
    both(
        |address| async move {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            address.send(listener.local_addr()?.to_string())?;
            let (mut stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let mut buf = vec![0; 64 << 10];
            loop {
                let n = stream.read(&mut buf).await?;
                if n == 0 {
                    return Ok(());
                }
                stream.write_all(&buf[..n]).await?;
            }
        },
        |address| async move {
            let mut stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let mut buf = vec![0; 64 << 10];
            stream.write_all(&buf[..depth * 4096]).await?;
            let mut partial = 0;
            while run.goes_on() {
                partial += stream.read(&mut buf).await?;
                let whole = partial / 4096;
                partial %= 4096;
                run.done(whole);
                stream.write_all(&buf[..whole * 4096]).await?;
            }
            Ok(())
        },
    )
}

async fn next(incoming: &mut dyn Incoming) -> Option<Message> {
    loop {
        match incoming.next().await {
            Event::Message(message) => return Some(message),
            Event::Lost(_) => return None,
            _ => {}
        }
    }
}

fn echo(run: Arc<Run>, depth: usize) -> Result<()> {
    both(
        |address| async move {
            let mut listener = TcpStack::default().listen("127.0.0.1:0", 0).await?;
            address.send(listener.endpoint())?;
            let (connection, mut incoming) = listener.accept().await?;
            while let Some(message) = next(&mut *incoming).await {
                connection.send(message).await?;
            }
            Ok(())
        },
        |address| async move {
            let (connection, mut incoming) =
                TcpStack::default().connect(&address, ConnectOptions::default()).await?;
            let payload = Payload::compute(0, vec![7; 4096].into());
            for _ in 0..depth {
                connection
                    .send(Message { header: "0123456789abcdef".into(), payload: payload.clone() })
                    .await?;
            }
            while run.goes_on() {
                let message = next(&mut *incoming).await.ok_or("the session was lost")?;
                run.done(1);
                connection.send(message).await?;
            }
            Ok(())
        },
    )
}

/// One direction, from one buffer of `size` bytes into `buffers` in turn: what a transfer of that size touches.
fn bare_stream(run: Arc<Run>, size: usize, buffers: usize) -> Result<()> {
    both(
        move |address| async move {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            address.send(listener.local_addr()?.to_string())?;
            let (mut stream, _) = listener.accept().await?;
            let buf = vec![7; size];
            while stream.write_all(&buf).await.is_ok() {}
            Ok(())
        },
        |address| async move {
            let mut stream = TcpStream::connect(address).await?;
            let mut bufs = vec![vec![0; size]; buffers];
            while run.goes_on() {
                for buf in &mut bufs {
                    stream.read_exact(buf).await?;
                    run.done(1);
                }
            }
            Ok(())
        },
    )
}

/// Data whose checksums are known, as a client's are that has computed them.
struct Ready(Payload);

impl BulkSource for Ready {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn phase(&self) -> u64 {
        self.0.phase()
    }

    fn read(&self, offset: u64, len: usize) -> BoxFuture<'_, std::result::Result<Payload, String>> {
        let start = offset as usize;
        let data = self.0.data().slice(start..start + len);
        let pieces = start / 4096..(start + len).div_ceil(4096);
        let payload = Payload::from_parts(offset, data, self.0.checksums()[pieces].to_vec());
        Box::pin(std::future::ready(payload.map_err(|e| e.to_string())))
    }
}

/// Takes and drops.
struct Void;

impl BulkSink for Void {
    fn len(&self) -> u64 {
        SEGMENT as u64
    }

    fn write(&self, _offset: u64, _payload: Payload) -> bool {
        true
    }
}

fn pull(run: Arc<Run>, depth: usize) -> Result<()> {
    both(
        |address| async move {
            let mut listener = TcpStack::default().listen("127.0.0.1:0", 0).await?;
            address.send(listener.endpoint())?;
            let (connection, mut incoming) = listener.accept().await?;
            let data = Payload::compute(0, vec![7; SEGMENT].into());
            let region = connection.offer_source(Arc::new(Ready(data)))?;
            let BulkDescriptor { segments, .. } = &region.descriptor;
            let header = Bytes::copy_from_slice(&segments[0].key.to_le_bytes());
            connection.send(Message { header, payload: Payload::default() }).await?;
            while next(&mut *incoming).await.is_some() {}
            Ok(())
        },
        |address| async move {
            let (connection, mut incoming) =
                TcpStack::default().connect(&address, ConnectOptions::default()).await?;
            let offer = next(&mut *incoming).await.ok_or("the session was lost")?;
            let template =
                connection.offer_source(Arc::new(Ready(Payload::compute(0, vec![0; SEGMENT].into()))))?;
            let mut from = template.descriptor.clone();
            from.segments[0].key = u64::from_le_bytes(offer.header.as_ref().try_into()?);
            let pool = BufferPool::new(Arena::anonymous(depth * SEGMENT)?, 0, SEGMENT);
            let mut pulls = tokio::task::JoinSet::new();
            while run.goes_on() {
                while pulls.len() < depth {
                    let (connection, from, pool) = (Arc::clone(&connection), from.clone(), pool.clone());
                    pulls.spawn(async move {
                        let dest = pool.alloc(SEGMENT).await.map_err(|e| e.to_string())?;
                        connection.bulk_read(&from, 0, dest, LONG).await.map_err(|e| e.to_string())
                    });
                }
                pulls.join_next().await.ok_or("no pull is under way")???;
                run.done(1);
            }
            Ok(())
        },
    )
}

fn push(run: Arc<Run>, depth: usize) -> Result<()> {
    both(
        |address| async move {
            let mut listener = TcpStack::default().listen("127.0.0.1:0", 0).await?;
            address.send(listener.endpoint())?;
            let (connection, mut incoming) = listener.accept().await?;
            let region = connection.offer_sink(Arc::new(Void), 0)?;
            let header = Bytes::copy_from_slice(&region.descriptor.segments[0].key.to_le_bytes());
            connection.send(Message { header, payload: Payload::default() }).await?;
            while next(&mut *incoming).await.is_some() {}
            Ok(())
        },
        |address| async move {
            let (connection, mut incoming) =
                TcpStack::default().connect(&address, ConnectOptions::default()).await?;
            let offer = next(&mut *incoming).await.ok_or("the session was lost")?;
            let template = connection.offer_sink(Arc::new(Void), 0)?;
            let mut to = template.descriptor.clone();
            to.segments[0].key = u64::from_le_bytes(offer.header.as_ref().try_into()?);
            let data = Payload::compute(0, vec![7; SEGMENT].into());
            let mut pushes = tokio::task::JoinSet::new();
            while run.goes_on() {
                while pushes.len() < depth {
                    let (connection, to, data) = (Arc::clone(&connection), to.clone(), data.clone());
                    pushes.spawn(async move { connection.bulk_write(&to, 0, data, LONG).await });
                }
                pushes.join_next().await.ok_or("no push is under way")???;
                run.done(1);
            }
            Ok(())
        },
    )
}
