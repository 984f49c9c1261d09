//! A server with several event loops, which share the attachments and the targets.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use channel::{MemoryLayout, MemoryOptions, SeatClaim};
use common::load::{check, put};
use common::{Path, attach, cid, make_collection, node_over, offering, oid, options, target};
use outboard_proxy::{
    Attachment, AttachmentOptions, ServedTarget, Server, ServerOptions, StoreEndpoint, StoreListener,
};
use store::{
    BlockStore, Driver, MemStore, MkfsOptions, MountOptions, ObjectStore, StoreCalls, StoreFuture,
    StoreRequest, Submit,
};

const LOOPS: usize = 3;

/// Options of seat `number` of 4.
fn seat(number: u16) -> AttachmentOptions {
    let layout = MemoryLayout { ring_len: 128 << 10, data_len: 16 << 20 };
    let memory = MemoryOptions { layout, ..options().memory };
    AttachmentOptions { memory, seat: SeatClaim { osd: 1, seat: number, seats: 4 }, ..options() }
}

/// A store in memory that records which threads call it, and how often.
#[derive(Default)]
struct WatchedStore {
    store: MemStore,
    callers: Arc<Mutex<BTreeMap<String, usize>>>,
}

impl Submit for WatchedStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let thread = std::thread::current().name().unwrap_or("?").to_owned();
        *self.callers.lock().unwrap().entry(thread).or_default() += 1;
        self.store.submit(request)
    }

    fn incarnation(&self) -> u64 {
        self.store.incarnation()
    }
}

/// Returns the only thread that has called the store since `callers` was last read.
fn caller(callers: &Mutex<BTreeMap<String, usize>>) -> String {
    let called = std::mem::take(&mut *callers.lock().unwrap());
    let threads: Vec<String> = called.into_keys().collect();
    assert_eq!(threads.len(), 1, "{threads:?}");
    threads.into_iter().next().unwrap()
}

async fn write_and_read(attachment: &Attachment, target: usize, first: usize) {
    let store: Arc<dyn ObjectStore> = attachment.store(target);
    for (n, len) in [3, 70_000, (1 << 20) + 17].into_iter().enumerate() {
        put(&store, first + n, first as u64, len).await;
        check(&store, first + n, first as u64, len).await;
    }
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn divides_attachments(path: Path) {
    let behind = WatchedStore::default();
    let callers = Arc::clone(&behind.callers);
    let options = ServerOptions { loops: LOOPS, ..offering() };
    let node = node_over(path, vec![target(Arc::new(behind))], seat(0), options).await;
    make_collection(&node.store).await;
    let mut loops = vec![caller(&callers)];
    let mut attachments = vec![node.attachment.clone()];
    for number in 1..4 {
        let attachment = attach(path, node.endpoint.clone(), seat(number)).await;
        write_and_read(&attachment, 0, usize::from(number) * 10).await;
        loops.push(caller(&callers));
        attachments.push(attachment);
    }
    assert_eq!(loops, ["chan-0", "chan-1", "chan-2", "chan-0"], "{path:?}");
    // The next attachment goes to the loop that has lost one.
    attachments[2].close();
    until("the seat is not free", || node.server.status().seats == 3).await;
    callers.lock().unwrap().clear();
    let attachment = attach(path, node.endpoint.clone(), seat(2)).await;
    write_and_read(&attachment, 0, 100).await;
    assert_eq!(caller(&callers), "chan-2", "{path:?}");
    let status = node.server.status();
    assert_eq!((status.seats, status.stages, status.violations), (4, 0, 0));
    node.server.stop();
    assert_eq!(node.server.status().seats, 0);
}

#[tokio::test]
async fn the_loops_divide_the_attachments_among_them() {
    for path in [Path::Dma, Path::Unix, Path::Tcp] {
        divides_attachments(path).await;
    }
}

#[tokio::test]
async fn the_loops_divide_the_attachments_over_libfabric() {
    for path in [Path::Ofi, Path::OfiTcp] {
        divides_attachments(path).await;
    }
}

/// Two targets on files, and a server with two loops that runs their drivers.
struct Drives {
    server: Server,
    endpoint: StoreEndpoint,
    stores: Vec<Arc<BlockStore>>,
    started: mpsc::Receiver<usize>,
    /// Lets the second loop, which waits for it, continue.
    release: mpsc::Sender<()>,
    /// Makes the second loop wait.
    block: Arc<tokio::sync::Notify>,
    dir: tempfile::TempDir,
}

fn mount(at: &std::path::Path) -> (Arc<BlockStore>, Driver) {
    BlockStore::mount_driven(at, &MountOptions::default()).unwrap()
}

impl Drives {
    fn new() -> Drives {
        let dir = tempfile::tempdir().unwrap();
        let (mut targets, mut drivers, mut stores) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..2 {
            let at = dir.path().join(number.to_string());
            let options = MkfsOptions {
                size: Some(48 << 20),
                log_bytes: Some(9 << 20),
                index_bytes: Some(16 << 20),
                ..MkfsOptions::default()
            };
            BlockStore::mkfs(&at, &options, |_, _| {}).unwrap();
            let (store, driver) = mount(&at);
            targets.push(ServedTarget { uuid: store.uuid(), store: Arc::clone(&store) as _ });
            drivers.push(driver);
            stores.push(store);
        }
        // The order of the drivers does not matter.
        drivers.reverse();
        let socket = dir.path().join("store.sock");
        let (tell, started) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let (block, released) = (Arc::new(tokio::sync::Notify::new()), Arc::new(Mutex::new(released)));
        let blocked = Arc::clone(&block);
        let beside = move |number| {
            tell.send(number).unwrap();
            let (blocked, released) = (Arc::clone(&blocked), Arc::clone(&released));
            async move {
                if number == 1 {
                    blocked.notified().await;
                    let _ = released.lock().unwrap().recv();
                }
            }
        };
        let options = ServerOptions { loops: 2, ..ServerOptions::default() };
        let listener = StoreListener::unix(&socket).unwrap();
        let server = Server::serve_and_drive(listener, targets, drivers, options, beside).unwrap();
        Drives { server, endpoint: StoreEndpoint::Unix(socket), stores, started, release, block, dir }
    }
}

#[tokio::test]
async fn the_loops_divide_the_targets_among_them() {
    let drives = Drives::new();
    let started: BTreeSet<usize> = drives.started.iter().take(2).collect();
    assert_eq!(started, BTreeSet::from([0, 1]));
    let first = attach(Path::Dma, drives.endpoint.clone(), seat(0)).await;
    let second = attach(Path::Dma, drives.endpoint.clone(), seat(1)).await;
    for target in 0..2 {
        make_collection(&(first.store(target) as _)).await;
        write_and_read(&first, target, 0).await;
        write_and_read(&second, target, 10).await;
    }
    // While the second loop does not run, the attachment and the target of the first loop continue.
    drives.block.notify_one();
    let store = first.store(1);
    let stat = |n: usize| store.stat(&cid(), &oid(n));
    while tokio::time::timeout(Duration::from_millis(100), stat(0)).await.is_ok() {}
    write_and_read(&first, 0, 20).await;
    let waiting = tokio::spawn(stat(1));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waiting.is_finished());
    drives.release.send(()).unwrap();
    waiting.await.unwrap().unwrap();
    for target in 0..2 {
        write_and_read(&second, target, 30).await;
    }
}

#[tokio::test]
async fn a_remounted_target_stays_at_its_loop() {
    let mut drives = Drives::new();
    let first = attach(Path::Dma, drives.endpoint.clone(), seat(0)).await;
    let second = attach(Path::Dma, drives.endpoint.clone(), seat(1)).await;
    for target in 0..2 {
        make_collection(&(first.store(target) as _)).await;
        write_and_read(&first, target, 0).await;
    }
    let old = drives.stores.remove(1);
    let uuid = old.uuid();
    // The server drops its store when it gets the new one, which must open the file again.
    drives.server.replace(uuid, Arc::new(MemStore::new()), None);
    until("an attachment has not ended", || {
        [&first, &second].iter().all(|attachment| attachment.status().incarnations == 2)
    })
    .await;
    old.umount().await.unwrap();
    drop(old);
    let (fresh, driver) = mount(&drives.dir.path().join("1"));
    drives.server.replace(uuid, Arc::clone(&fresh) as _, Some(driver));
    until("an attachment has not ended again", || {
        [&first, &second].iter().all(|attachment| attachment.status().incarnations == 3)
    })
    .await;
    let fresh: Arc<dyn ObjectStore> = fresh;
    check(&fresh, 2, 0, (1 << 20) + 17).await;
    for target in 0..2 {
        write_and_read(&second, target, 10).await;
    }
    drives.server.stop();
    assert_eq!(drives.server.status().seats, 0);
}
