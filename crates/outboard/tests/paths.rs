//! Tests of a node whose client uses a path over libfabric, while faults hit the path: the client
//! goes on over TCP, loses no acknowledged change, and returns to the path when the faults are
//! disarmed.
//!
//! The default is the provider `tcp` on the loopback interface. The environment variable
//! `OUTBOARD_TEST_FABRIC=verbs@192.0.2.1` chooses another provider and address, here those of an
//! RDMA device. If `OUTBOARD_TARGETS` is set, the node formats and uses this empty drive instead of a file.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base::health::{HealthReport, HealthState};
use client::{Client, Options, Pool};
use common::Node;
use identity::Credentials;
use messenger::transport::ofi::{Ofi, OfiConfig};
use messenger::transport::tcp::Tcp;
use messenger::{ConnectionConfig, Path, StreamStack};
use serde_json::Value;

/// Maximum time until an expected state. An emulated machine needs much of it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Time for which the client does not use a failed path.
const COOL_DOWN: Duration = Duration::from_secs(2);

/// Sizes of the written objects, in bytes: data that travels inside a message, in several packets,
/// and by one-sided transfers of one and of several segments.
const SIZES: [usize; 4] = [700, 20_000, 300_000, 2_500_000];

/// Number of objects of each size.
const OBJECTS: u64 = 4;

/// The provider, and the address at which the osd listens for it.
fn fabric() -> (String, String) {
    let chosen = std::env::var("OUTBOARD_TEST_FABRIC").unwrap_or_else(|_| "tcp@127.0.0.1".to_owned());
    let (provider, address) = chosen.split_once('@').expect("PROVIDER@ADDRESS");
    (provider.to_owned(), format!("{address}:0"))
}

/// A node that offers a path, and the pool `p`.
struct PathNode(Node);

impl PathNode {
    fn up(placement: &str) -> PathNode {
        let node = PathNode(Node::new());
        let up = ["up", "--detach", "--listen", "127.0.0.1:0", "--placement", placement];
        let own_drive = std::env::var_os("OUTBOARD_TARGETS").is_some();
        let drive: &[&str] =
            if own_drive { &["--format"] } else { &["--targets", "1", "--target-size", "256MiB"] };
        node.run(&[&up[..], drive].concat());
        node.run(&["pool", "create", "p"]);
        node
    }

    /// Runs a command, which itself uses TCP, so that it does not count as a user of the path.
    fn run(&self, args: &[&str]) -> String {
        let mut command = self.0.command(args);
        let (provider, address) = fabric();
        command.env("OUTBOARD_NETWORK_STACKS", format!("ofi:{provider}@{address}"));
        command.env("OUTBOARD_OSD_SHARDS", "1").env("OUTBOARD_NETWORK", "tcp");
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.run(args)).unwrap()
    }

    /// Returns how often the only armed fault has fired.
    fn fired(&self) -> u64 {
        self.json(&["debug", "faults", "--json"])[0]["fired"].as_u64().unwrap()
    }

    /// Returns the number of clients that use the path now; `None` if the osd does not answer in
    /// time, as may happen in an emulated machine.
    fn clients_by_path(&self) -> Option<u64> {
        self.json(&["status", "--json"])["osd"]["sessions_by_path"].as_u64()
    }
}

/// A client that writes and reads all the time on a thread of its own.
struct Load {
    stack: Arc<StreamStack<Tcp>>,
    ends: Arc<AtomicBool>,
    /// Number of changes that were acknowledged.
    acknowledged: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<()>,
}

impl Load {
    fn start(node: &PathNode, endpoint: &str) -> Load {
        let (provider, _) = fabric();
        let ofi = Ofi::new(OfiConfig::new(&provider))
            .unwrap_or_else(|e| panic!("libfabric cannot be used: {e}; run \"scripts/setup test\""));
        let path = Path::new(&format!("ofi:{provider}"), Arc::new(ofi), COOL_DOWN);
        let credentials = Credentials::load(node.0.path("node/credentials.toml").as_ref()).unwrap();
        let trust = credentials.trust();
        let config = ConnectionConfig { trust: trust.clone(), ..ConnectionConfig::default() };
        let stack = StreamStack::over(Tcp::default(), config).with_path(path);
        let stack = Arc::new(stack.on_own_thread().unwrap());
        let (ends, acknowledged) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let work = {
            let (stack, endpoint) = (Arc::clone(&stack), endpoint.to_owned());
            let (ends, acknowledged) = (Arc::clone(&ends), Arc::clone(&acknowledged));
            async move {
                let options = Options { request_timeout: PATIENCE, trust, ..Options::default() };
                let client = Client::connect_over(stack, &endpoint, options).await.unwrap();
                let pool = client.pool("p").unwrap();
                let writers = SIZES.map(|size| write(&pool, size, &ends, &acknowledged));
                tokio::join!(futures::future::join_all(writers), append(&pool, &ends, &acknowledged));
                client.close().await;
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let thread = std::thread::spawn(move || runtime.block_on(work));
        Load { stack, ends, acknowledged, thread }
    }

    fn health(&self) -> HealthReport {
        self.stack.paths().next().expect("the stack has a path").1
    }

    /// Waits until `holds` returns true.
    fn eventually(&self, what: &str, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(!self.thread.is_finished(), "the load has failed while the test waited: {what}");
            assert!(Instant::now() < deadline, "{what}: {:?}", self.health());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the node acknowledges further changes.
    fn goes_on(&self) {
        let until = self.acknowledged.load(Ordering::Relaxed) + 8;
        let what = "the node acknowledges no further changes";
        self.eventually(what, || self.acknowledged.load(Ordering::Relaxed) >= until);
    }

    /// Ends the load. Fails if a call has failed or data was lost.
    fn end(self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

/// Writes objects of `size` bytes in turn, and reads an older one after each write. At the end,
/// checks that each object has the data of its last acknowledged write.
async fn write(pool: &Pool, size: usize, ends: &AtomicBool, acknowledged: &AtomicU64) {
    let mut written = BTreeMap::new();
    let check = async |object: u64, round: u64| {
        let data = pool.object(&format!("{size}-{object}")).unwrap().get().await.unwrap();
        assert!(
            data == noise(round, size),
            "object {object} of {size} bytes lacks the data of round {round}"
        );
    };
    for round in 0.. {
        let (object, older) = (round % OBJECTS, (round + 1) % OBJECTS);
        let data = noise(round, size);
        pool.object(&format!("{size}-{object}")).unwrap().put(data).await.unwrap();
        acknowledged.fetch_add(1, Ordering::Relaxed);
        written.insert(object, round);
        if let Some(round) = written.get(&older) {
            check(older, *round).await;
        }
        if ends.load(Ordering::Relaxed) {
            break;
        }
    }
    for (object, round) in written {
        check(object, round).await;
    }
}

/// Appends numbers to an object. At the end, checks that the object has each number once.
async fn append(pool: &Pool, ends: &AtomicBool, acknowledged: &AtomicU64) {
    let log = pool.object("log").unwrap();
    let mut expected = String::new();
    for number in 0.. {
        let entry = format!("{number}\n");
        log.append(entry.clone()).await.unwrap();
        acknowledged.fetch_add(1, Ordering::Relaxed);
        expected.push_str(&entry);
        if ends.load(Ordering::Relaxed) {
            break;
        }
    }
    assert!(log.get().await.unwrap() == expected, "the log does not have each entry once");
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + seed * 7).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 41) as u8).collect()
}

#[test]
fn a_client_leaves_a_faulty_path_and_returns_without_losing_a_change() {
    let node = PathNode::up("dpu");
    let endpoint = node.json(&["status", "--json"])["endpoint"].as_str().unwrap().to_owned();
    let load = Load::start(&node, &endpoint);
    load.eventually("the client does not begin to use the path", || node.clients_by_path() == Some(1));
    load.goes_on();
    for fault in ["messenger.path=fail", "messenger.path=stall,late=3600000ms", "messenger.path=drop"] {
        let before = load.health();
        node.run(&["debug", "fault", fault]);
        let avoided = || load.health().failures > before.failures && node.clients_by_path() == Some(0);
        load.eventually("the client does not leave the path", avoided);
        assert!(node.fired() > 0, "{fault} did not fire");
        load.goes_on();
        // The path still fails when the client tries it again, and the client goes on over TCP.
        let tried = load.health().failures;
        load.eventually("the client does not try the path again", || load.health().failures > tried);
        load.goes_on();
        let problems = node.json(&["status", "--json"])["problems"].to_string();
        assert!(problems.contains(&format!("FAULT ARMED in the osd: {fault}")), "{problems}");

        node.run(&["debug", "clear"]);
        let is_back = || node.clients_by_path() == Some(1) && load.health().state == HealthState::Active;
        load.eventually("the client does not return to the path", is_back);
        assert!(load.health().recoveries > before.recoveries, "{:?}", load.health());
        load.goes_on();
        assert_ne!(node.clients_by_path(), Some(0), "the client still uses the path");
    }
    load.end();
}

#[test]
fn in_host_placement_faults_also_hit_paths() {
    let node = PathNode::up("host");
    let own_path = format!("ofi:{}", fabric().0);
    let status = node.json(&["--network", &own_path, "status", "--json"]);
    assert_eq!(status["osd"]["sessions_by_path"], 1, "`status` uses the network of its option");
    assert_eq!(node.clients_by_path(), Some(0));
    node.run(&["debug", "fault", "messenger.path=fail,count=1"]);
    let endpoint = node.json(&["status", "--json"])["endpoint"].as_str().unwrap().to_owned();
    let load = Load::start(&node, &endpoint);
    load.eventually("the fault does not fire", || node.fired() == 1);
    load.eventually("the client does not use the path", || node.clients_by_path() == Some(1));
    load.goes_on();
    load.end();
}
