//! A client and an osd on two hosts, which exchange data while the network between them is cut,
//! broken and healed at random.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use base::entropy::seed_this_thread;
use bytes::Bytes;
use outboard_messenger::conformance::{self, Buffer};
use outboard_messenger::transport::sim::{CutKind, SimFaults, SimNetwork};
use outboard_messenger::{
    BulkRegion, ConnectOptions, Connection, ConnectionConfig, ConnectionEvent, Ends, Incoming, Message,
    MessengerError, NetworkStack,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};
use wire::BulkDescriptor;

/// Number of requests that the client has in flight.
const IN_FLIGHT: usize = 6;

/// Number of requests of each of them.
const ROUNDS: usize = 12;

/// The server reads the source, and writes what it has read to the sink.
#[derive(Serialize, Deserialize)]
struct Request {
    number: u64,
    source: BulkDescriptor,
    sink: BulkDescriptor,
    /// Time limits of the pull and of the push, in milliseconds.
    limits_ms: (u64, u64),
}

#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    Copied(u64),
    TimedOut(u64),
    Refused(u64),
}

fn message<T: Serialize>(content: &T) -> Message {
    let header = postcard::to_allocvec(content).expect("the message can be encoded");
    Message { header: header.into(), ..Message::default() }
}

/// Answers requests until the connection is lost.
async fn serve((connection, mut incoming): Ends) {
    let pool = conformance::pool();
    loop {
        let header: Bytes = match incoming.next().await {
            ConnectionEvent::Message(message) => message.header,
            ConnectionEvent::Lost(_) => return,
            _ => continue,
        };
        let request: Request = postcard::from_bytes(&header).expect("a request");
        let (connection, pool) = (Arc::clone(&connection), pool.clone());
        tokio::task::spawn_local(async move {
            let reply = copy(&*connection, &pool, &request).await;
            // The connection may be lost only after the client has closed it.
            let _ = connection.send(message(&reply)).await;
        });
    }
}

async fn copy(connection: &dyn Connection, pool: &base::pool::BufferPool, request: &Request) -> Reply {
    let Request { number, source, sink, limits_ms } = request;
    let len = source.segments[0].len as usize;
    let dest = pool.alloc(len).await.expect("a buffer");
    let (pull_limit, push_limit) = (Duration::from_millis(limits_ms.0), Duration::from_millis(limits_ms.1));
    let pulled = match connection.bulk_read(source, 0, dest, pull_limit).await {
        Ok(pulled) => pulled,
        Err(MessengerError::TimedOut(_)) => return Reply::TimedOut(*number),
        // The client has withdrawn the offer.
        Err(MessengerError::BulkRefused(_)) => return Reply::Refused(*number),
        Err(why) => panic!("request {number}: {why}"),
    };
    let payload = Payload::from_parts(7, pulled.buf.freeze(), pulled.checksums).expect("checksums fit");
    payload.verify().expect("the pulled data has the right checksums");
    match connection.bulk_write(sink, 0, payload, push_limit).await {
        Ok(()) => Reply::Copied(*number),
        Err(MessengerError::TimedOut(_)) => Reply::TimedOut(*number),
        // The client has withdrawn the offer.
        Err(MessengerError::BulkRefused(_)) => Reply::Refused(*number),
        Err(why) => panic!("request {number}: {why}"),
    }
}

/// A request of the client in flight.
struct Waiting {
    data: Bytes,
    room: Arc<Buffer>,
    source: BulkRegion,
    sink: BulkRegion,
}

/// Sends requests, and checks their replies.
async fn request(connection: Arc<dyn Connection>, mut incoming: Box<dyn Incoming>, seed: u64) -> (u64, u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut waiting: BTreeMap<u64, Waiting> = BTreeMap::new();
    let mut cancelled = BTreeSet::new();
    let (mut last, mut copied, mut others) = (0, 0, 0);
    loop {
        while waiting.len() < IN_FLIGHT && last < (IN_FLIGHT * ROUNDS) as u64 {
            last += 1;
            let len = random.random_range(1..2_000_000);
            let data = conformance::random_bytes(&mut random, len);
            let from =
                if random.random_bool(0.7) { Buffer::in_memory(7, &data) } else { Buffer::new(7, &data) };
            let room = Buffer::new(7, &vec![0; data.len()]);
            let source = connection.offer_source(from).expect("offered");
            let sink = connection.offer_sink(Arc::clone(&room) as _, 7).expect("offered");
            let mut limit = || if random.random_bool(0.1) { random.random_range(0..50) } else { 600_000 };
            let limits_ms = (limit(), limit());
            let (from, to) = (source.descriptor.clone(), sink.descriptor.clone());
            let request = Request { number: last, source: from, sink: to, limits_ms };
            waiting.insert(last, Waiting { data, room, source, sink });
            connection.send(message(&request)).await.expect("sent");
            // Some requests are cancelled: their offers are dropped before the reply.
            let cancels = random.random_bool(0.05);
            let first = waiting.first_key_value().map(|(number, _)| *number);
            if let Some(number) = first.filter(|_| cancels) {
                drop(waiting.remove(&number));
                cancelled.insert(number);
            }
        }
        if waiting.is_empty() && cancelled.is_empty() {
            return (copied, others);
        }
        let header = match incoming.next().await {
            ConnectionEvent::Message(message) => message.header,
            ConnectionEvent::Lost(why) => panic!("connection lost: {why}"),
            _ => continue,
        };
        let reply: Reply = postcard::from_bytes(&header).expect("a reply");
        let (Reply::Copied(number) | Reply::TimedOut(number) | Reply::Refused(number)) = reply;
        if cancelled.remove(&number) {
            continue;
        }
        assert!(!matches!(reply, Reply::Refused(_)), "the offer of request {number} is valid");
        let Waiting { data, room, source, sink } = waiting.remove(&number).expect("one reply per request");
        source.finish();
        sink.finish();
        if matches!(reply, Reply::Copied(_)) {
            assert!(room.content() == data[..], "the sink of request {number} has wrong data");
            copied += 1;
        } else {
            others += 1;
        }
    }
}

/// Disturbs the network until `is_over`.
async fn disturb(network: SimNetwork, is_over: Rc<Cell<bool>>, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    while !is_over.get() {
        sleep(Duration::from_millis(random.random_range(0..1500))).await;
        match random.random_range(0..6) {
            0 => network.cut("client", "osd", CutKind::Silent),
            1 => network.cut_one_way("client", "osd", CutKind::Silent),
            2 => network.cut_one_way("osd", "client", CutKind::Silent),
            3 => network.cut("client", "osd", CutKind::Reset),
            4 => network.links_down(true),
            _ => drop(network.break_all()),
        }
        let most = if random.random_bool(0.2) { 15_000 } else { 500 };
        sleep(Duration::from_millis(random.random_range(0..most))).await;
        network.heal_all();
        network.links_down(false);
    }
}

/// Runs the client and the osd. Returns the trace and the counters.
fn run(faults: SimFaults, seed: u64) -> (u64, Vec<(&'static str, u64)>) {
    let _seeded = seed_this_thread(seed);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    let work = async {
        let network = SimNetwork::new(seed, faults);
        let config = || ConnectionConfig { hold: Duration::from_secs(600), ..ConnectionConfig::default() };
        let stack = |name| network.host(name).stack_with_packets(config(), Duration::from_secs(1), false);
        let (osd, client) = (stack("osd"), stack("client"));
        let mut listener = osd.listen("osd:7700").await.expect("listens");
        let serving = tokio::task::spawn_local(async move {
            loop {
                // A handshake may fail; its client tries again.
                if let Ok(ends) = listener.accept().await {
                    tokio::task::spawn_local(serve(ends));
                }
            }
        });
        let options = ConnectOptions { timeout: Duration::from_secs(600) };
        let (connection, incoming) = client.connect("osd:7700", options).await.expect("connects");
        let is_over = Rc::new(Cell::new(false));
        let disturbing = disturb(network.clone(), Rc::clone(&is_over), seed);
        let disturbing = tokio::task::spawn_local(disturbing);
        let outcome = request(Arc::clone(&connection), incoming, seed).await;
        is_over.set(true);
        disturbing.await.expect("the network is healed");
        network.calm();
        connection.close().await;
        drop(connection);
        sleep(Duration::from_secs(60)).await;
        serving.abort();
        sleep(Duration::from_secs(60)).await;
        assert_eq!(network.exposed_regions(), 0, "memory is still exposed after its offers ended");
        assert_eq!(network.transports(), 0, "a transport is still open after its connection ended");
        assert!(outcome.0 > 0, "no data was copied");
        (network.trace(), network.counts().all())
    };
    let local = LocalSet::new();
    let limit = Duration::from_secs(36_000);
    local.block_on(&runtime, async { timeout(limit, work).await.expect("the requests hang") })
}

#[test]
fn requests_are_answered_once_with_the_right_data_while_the_network_is_disturbed() {
    let seeds: u64 = std::env::var("OUTBOARD_SEEDS").map_or(8, |n| n.parse().expect("a number"));
    let first = conformance::seed();
    let mut fired = BTreeMap::new();
    for seed in first..first + seeds {
        println!("seed {seed}");
        for (name, count) in run(super::packets::MODERATE, seed).1 {
            *fired.entry(name).or_insert(0) += count;
        }
    }
    println!("{fired:?}");
    assert_eq!(fired["released_accesses"], 0, "memory was released during an access: {fired:?}");
    if seeds >= 8 {
        for name in ["cuts", "held", "late", "flips", "losses", "late_reports", "refused_memory"] {
            assert!(fired[name] > 0, "a kind of fault never occurred: {name}: {fired:?}");
        }
    }
}

#[test]
fn the_same_seed_replays_the_same_disturbed_run() {
    assert_eq!(run(super::packets::MODERATE, 42), run(super::packets::MODERATE, 42));
}
