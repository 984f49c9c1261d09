//! Tests that kill real processes of the store and the osd, and check that their resources are
//! freed.

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path as FsPath, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{by_ofi, cid, make_collection, offering, oid, options, pattern, payload, target, transaction};
use outboard_proxy::{
    Attachment, AttachmentOptions, ServedTarget, Server, ServerOptions, StoreEndpoint, StoreListener,
};
use store::{MemStore, ObjectStore, Op, StageId, StoreCalls, StoreError, WriteSource};

const ROLE: &str = "OUTBOARD_TEST_ROLE";
const SOCKET: &str = "OUTBOARD_TEST_SOCKET";

/// The tests count descriptors of the whole process, so they run one after the other.
static ALONE: Mutex<()> = Mutex::new(());

fn alone(test: impl Future<Output = ()>) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

/// This test binary, run again in another role.
struct Process(Child);

impl Process {
    fn start(role: &str, socket: &FsPath) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "child_process_of_a_node", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(SOCKET, socket)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("READY")), "the {role} process did not start");
        Process(child)
    }

    /// Kills the process with SIGKILL and waits for its end.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn maps(&self) -> String {
        fs::read_to_string(format!("/proc/{}/maps", self.0.id())).unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test: the code that a [`Process`] runs.
#[test]
#[ignore = "runs as a child process of another test"]
fn child_process_of_a_node() {
    let role = std::env::var(ROLE).expect("the parent sets the role");
    let socket = PathBuf::from(std::env::var(SOCKET).unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    match role.as_str() {
        "store" => {
            let store = Arc::new(MemStore::new());
            let _server =
                Server::serve(StoreListener::unix(&socket).unwrap(), vec![target(store)], offering());
            ready();
            std::thread::sleep(Duration::from_secs(60));
        }
        "drive" => {
            let store = common::on_drive(&socket.with_extension("target"));
            let _server =
                Server::serve(StoreListener::unix(&socket).unwrap(), vec![target(store)], offering());
            ready();
            std::thread::sleep(Duration::from_secs(60));
        }
        "osd" => runtime.block_on(async {
            let attachment = Attachment::connect(StoreEndpoint::Unix(socket), options()).await.unwrap();
            let store: Arc<dyn ObjectStore> = attachment.store(0);
            let stage = store.stage(8 << 20).await.unwrap();
            store.stage_write(stage, 0, payload(1, 1 << 20)).await.unwrap();
            ready();
            // The parent kills this process during the writes.
            loop {
                let writes = (0..8).map(|n| store.stage_write(stage, n << 20, payload(n, 1 << 20)));
                for write in writes.collect::<Vec<_>>() {
                    write.await.unwrap();
                }
            }
        }),
        other => panic!("unknown role {other}"),
    }
}

#[expect(clippy::print_stdout, reason = "the parent waits for this line")]
fn ready() {
    println!("READY");
}

/// Numbers of descriptors and of mappings of this process that belong to channels.
fn held() -> (usize, usize) {
    let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let fds = links
        .filter_map(|e| fs::read_link(e.path()).ok())
        .filter(|to| {
            let to = to.to_string_lossy();
            to.contains("outboard-") || to.contains("eventfd") || to.contains("socket")
        })
        .count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    (fds, maps.lines().filter(|line| line.contains("outboard-")).count())
}

async fn until(what: &str, mut met: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !met() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn write(n: usize, len: usize) -> Op {
    Op::Write { oid: oid(n), offset: 0, source: WriteSource::Inline(payload(n as u64, len)) }
}

#[test]
fn an_attachment_continues_after_its_store_was_killed() {
    alone(comes_back(options()));
}

#[test]
fn an_attachment_by_ofi_continues_after_its_store_was_killed() {
    alone(async { comes_back(by_ofi(options())).await });
}

async fn comes_back(osd: AttachmentOptions) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("store");
    let mut process = Process::start("store", &socket);
    let attachment = Attachment::connect(StoreEndpoint::Unix(socket.clone()), osd).await.unwrap();
    let store: Arc<dyn ObjectStore> = attachment.store(0);
    make_collection(&store).await;
    let maps = process.maps();
    assert!(
        maps.contains("outboard-host") && !maps.contains("outboard-dpu"),
        "the store maps host memory only"
    );
    // Open the first window of host memory before counting, because the last write opens it as
    // well.
    store.queue_transaction(transaction(write(1, 3 << 20))).await.unwrap();
    let before = held();
    let mut stage = StageId(0);
    for round in 1..=3u64 {
        stage = store.stage(4 << 20).await.unwrap();
        // Many calls are in progress when the store is killed.
        let writes: Vec<_> =
            (0..64).map(|n| store.queue_transaction(transaction(write(n, 300_000)))).collect();
        let staged: Vec<_> = (0..4).map(|n| store.stage_write(stage, n << 20, payload(n, 1 << 20))).collect();
        process.kill();
        let mut lost = 0;
        for write in writes {
            match write.await {
                Err(StoreError::Disconnected(_)) => lost += 1,
                other => other.unwrap(),
            }
        }
        for write in staged {
            let _ = write.await;
        }
        assert!(lost > 0, "the kill came after all calls had completed");
        // These calls are made while no store is running. The next process executes them.
        until("the loss was not noticed", || !attachment.status().connected).await;
        let collection = store.queue_transaction(transaction(Op::CreateCollection));
        let listing = store.collections();
        process = Process::start("store", &socket);
        collection.await.unwrap();
        assert_eq!(listing.await.unwrap(), [cid()]);
        assert_eq!(attachment.status().incarnations, round + 1);
        assert!(attachment.status().by_dma);
        let gone = store.stage_write(stage, 0, payload(1, 4096)).await;
        assert!(matches!(gone, Err(StoreError::NoSuchStage(_))), "{gone:?}");
        store.queue_transaction(transaction(write(1, 3 << 20))).await.unwrap();
        let read = store.read(&cid(), &oid(1), 0, 3 << 20, None).await.unwrap();
        assert_eq!(read.contiguous(), pattern(1, 3 << 20));
    }
    store.stage_release(stage);
    until(&format!("descriptors and mappings were {before:?}, are {:?}", held()), || held() == before).await;
    assert_eq!(attachment.pool().free_bytes().0, options().memory.pool_len);
    let rebuilt = attachment.incarnation();
    assert_eq!(*rebuilt.borrow(), 4);
}

#[test]
fn reads_are_repeated_and_waiting_calls_fail_after_a_time_limit() {
    alone(async {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("store");
        let mut process = Process::start("store", &socket);
        let options = AttachmentOptions { wait_for_store: Duration::from_millis(1500), ..options() };
        let attachment = Attachment::connect(StoreEndpoint::Unix(socket.clone()), options).await.unwrap();
        let store: Arc<dyn ObjectStore> = attachment.store(0);
        make_collection(&store).await;
        process.kill();
        // These calls are sent to the dead process. The next process, whose store is empty, answers
        // them.
        let stat = store.stat(&cid(), &oid(0));
        let read = store.read(&cid(), &oid(0), 0, 100_000, None);
        process = Process::start("store", &socket);
        assert!(matches!(stat.await, Err(StoreError::NoSuchCollection(_))));
        assert!(matches!(read.await, Err(StoreError::NoSuchCollection(_))));
        process.kill();
        until("the loss was not noticed", || !attachment.status().connected).await;
        let (stat, write) = (store.stat(&cid(), &oid(0)), store.queue_transaction(transaction(write(0, 10))));
        assert!(matches!(stat.await, Err(StoreError::Disconnected(_))));
        assert!(matches!(write.await, Err(StoreError::Disconnected(_))));
    });
}

#[test]
fn the_resources_of_a_killed_osd_are_freed() {
    alone(async {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("store");
        let store: Arc<dyn ObjectStore> = Arc::new(MemStore::new());
        let targets = vec![ServedTarget { uuid: uuid::Uuid::from_u128(1), store: Arc::clone(&store) }];
        let server =
            Server::serve(StoreListener::unix(&socket).unwrap(), targets, ServerOptions::default()).unwrap();
        let before = held();
        for round in 1..=3 {
            let mut osd = Process::start("osd", &socket);
            assert_eq!(server.status().stages, 1);
            assert!(store.space().await.unwrap().staged > 0);
            assert_ne!(held(), before, "host memory exists during the attachment");
            std::thread::sleep(Duration::from_millis(20));
            osd.kill();
            until("the attachment did not end", || server.status().seats == 0).await;
            until("stages or calls are left over", || {
                server.status().stages + server.status().leftover_calls == 0
            })
            .await;
            assert_eq!(store.space().await.unwrap().staged, 0, "the store has its space back");
            until(&format!("descriptors and mappings were {before:?}, are {:?}", held()), || {
                held() == before
            })
            .await;
            assert_eq!(server.status().attachments, round);
            assert_eq!(server.status().violations, 0);
        }
    });
}

#[test]
fn a_second_osd_is_refused_while_the_first_is_attached() {
    alone(async {
        let node = common::node(common::Path::Dma).await;
        let options = AttachmentOptions { wait_for_store: Duration::from_millis(300), ..options() };
        let refused = Attachment::connect(node.endpoint.clone(), options.clone()).await.err().unwrap();
        assert!(refused.to_string().contains("another osd"), "{refused}");
        make_collection(&node.store).await;
        drop((node.store, node.attachment));
        Attachment::connect(node.endpoint.clone(), options).await.unwrap();
    });
}

#[test]
fn an_idle_attachment_wakes_no_thread() {
    alone(idles(common::Path::Dma));
}

#[test]
fn an_idle_attachment_by_ofi_wakes_no_thread() {
    alone(idles(common::Path::OfiTcp));
}

async fn idles(path: common::Path) {
    let node = common::node(path).await;
    make_collection(&node.store).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let switches = || {
        let usage = base::process::ProcessUsage::read(std::process::id()).unwrap();
        ["chan", "dma"].map(|class| usage.by_class.get(class).map(|used| used.context_switches))
    };
    let before = switches();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(switches(), before, "an idle attachment has woken a chan or dma thread");
    node.store.space().await.unwrap();
    assert_ne!(switches(), before, "the wake-ups of a call are counted");
}

#[test]
fn acknowledged_writes_survive_the_kill_of_the_store() {
    alone(survives_kills(options()));
}

#[test]
fn acknowledged_writes_by_ofi_survive_the_kill_of_the_store() {
    alone(async { survives_kills(by_ofi(options())).await });
}

async fn survives_kills(osd: AttachmentOptions) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("store");
    let mut process = Process::start("drive", &socket);
    let attachment = Attachment::connect(StoreEndpoint::Unix(socket.clone()), osd).await.unwrap();
    let store: Arc<dyn ObjectStore> = attachment.store(0);
    make_collection(&store).await;
    let mut acknowledged = Vec::new();
    let mut lost = 0;
    for round in 0..3usize {
        let writes = (0..64).map(|n| {
            let n = round * 100 + n;
            let large = n % 4 == 0;
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                let len = if large { 200_000 } else { 4096 };
                store.queue_transaction(transaction(write(n, len))).await.map(|()| (n, len))
            })
        });
        let writes: Vec<_> = writes.collect();
        // Some writes are acknowledged before the kill, and others are not.
        let mut writes = writes.into_iter();
        for write in writes.by_ref().take(4) {
            acknowledged.extend(write.await.unwrap());
        }
        process.kill();
        for write in writes {
            match write.await.unwrap() {
                Ok(done) => acknowledged.push(done),
                Err(StoreError::Disconnected(_)) => lost += 1,
                Err(e) => panic!("{e}"),
            }
        }
        process = Process::start("drive", &socket);
        store.space().await.unwrap();
        assert!(attachment.status().by_dma);
        for &(n, len) in &acknowledged {
            let read = store.read(&cid(), &oid(n), 0, len as u64, None).await.unwrap();
            read.verify().unwrap();
            assert_eq!(read.contiguous(), pattern(n as u64, len), "object {n}");
        }
    }
    assert!(acknowledged.len() >= 12 && lost > 0, "{lost} were lost, {} acknowledged", acknowledged.len());
}

#[test]
fn threads_end_when_their_attachment_and_server_are_dropped() {
    alone(async {
        let threads = || {
            let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
            let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
            names.filter(|name| name.starts_with("dma-") || name.starts_with("chan-")).count()
        };
        // Threads of the previous test may still be ending.
        until("a thread of another test is left", || threads() == 0).await;
        let node = common::node(common::Path::Dma).await;
        make_collection(&node.store).await;
        assert_eq!(threads(), 2);
        drop(node);
        until("a thread is left", || threads() == 0).await;
    });
}

#[test]
fn a_transaction_of_an_ended_incarnation_is_never_applied() {
    alone(async {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("store");
        let mut process = Process::start("drive", &socket);
        let attachment = Attachment::connect(StoreEndpoint::Unix(socket.clone()), options()).await.unwrap();
        let store: Arc<dyn ObjectStore> = attachment.store(0);
        make_collection(&store).await;
        let first = store.incarnation();
        store.queue_transaction_in(first, transaction(write(1, 10))).await.unwrap();
        process.kill();
        until("the loss was not noticed", || !attachment.status().connected).await;
        let second = store.incarnation();
        assert_ne!(first, second, "the incarnation changes before a call is queued in it");
        let stale = store.queue_transaction_in(first, transaction(write(2, 10)));
        let fresh = store.queue_transaction_in(second, transaction(write(3, 10)));
        process = Process::start("drive", &socket);
        assert!(matches!(stale.await, Err(StoreError::Disconnected(_))));
        fresh.await.unwrap();
        assert_eq!(store.incarnation(), second);
        assert!(matches!(store.stat(&cid(), &oid(2)).await, Err(StoreError::NoSuchObject(_))));
        assert_eq!(store.stat(&cid(), &oid(3)).await.unwrap().size, 10);
        drop(process);
    });
}
