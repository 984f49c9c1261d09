//! Tests of the data path: payload of all sizes, the order of calls on the rings and on the control
//! socket, copies, and resources that are freed.

mod common;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::task::Context;
use std::time::Duration;

use base::block::Payload;
use base::mem::OutsideAccess;
use bytes::Bytes;
use channel::{
    Chain, ChainCompletion, Counters, DmaEngine, DmaRegion, EnginePeer, EngineTuning, Joined, MemoryAccess,
    QueueId, Reach, RejectedChain, ShmEngine, ShmOptions,
};
use common::{Node, Path, cid, make_collection, node, node_of, oid, options, pattern, payload, transaction};
use futures::future::BoxFuture;
use outboard_proxy::{Attachment, AttachmentOptions};
use store::{MemStore, ObjectStore, Op, StageId, StoreCalls, StoreError, WriteSource};

const MIB: usize = 1 << 20;
const SIZES: [usize; 9] = [0, 1, 4095, 4096, 8193, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 16 * MIB + 3];

fn staged(stage: StageId, n: usize, len: usize) -> Op {
    Op::Write { oid: oid(n), offset: 0, source: WriteSource::Staged { stage, offset: 0, len: len as u64 } }
}

async fn put(store: &Arc<dyn ObjectStore>, n: usize, payload: Payload) {
    let len = payload.len();
    if len == 0 {
        // Zero bytes cannot be staged. An empty inline write creates the object.
        let source = WriteSource::Inline(payload);
        return store
            .queue_transaction(transaction(Op::Write { oid: oid(n), offset: 0, source }))
            .await
            .unwrap();
    }
    let stage = store.stage(len as u64).await.unwrap();
    let written = store.stage_write(stage, 0, payload);
    let queued = store.queue_transaction(transaction(staged(stage, n, len)));
    store.stage_release(stage);
    queued.await.unwrap();
    written.await.unwrap();
}

async fn get(store: &Arc<dyn ObjectStore>, n: usize, len: usize) -> Bytes {
    let read = store.read(&cid(), &oid(n), 0, len as u64, None).await.unwrap();
    read.verify().unwrap();
    assert_eq!(read.object_size, len as u64);
    read.contiguous()
}

async fn all_sizes(path: Path) {
    let node = node(path).await;
    make_collection(&node.store).await;
    for (n, size) in SIZES.into_iter().enumerate() {
        put(&node.store, n, payload(n as u64, size)).await;
        assert_eq!(get(&node.store, n, size).await, pattern(n as u64, size), "{size} bytes");
    }
    assert_eq!(node.attachment.status().stages, 0);
}

#[tokio::test]
async fn payload_of_every_size_is_read_back_unchanged_by_dma() {
    all_sizes(Path::Dma).await;
}

#[tokio::test]
async fn payload_of_every_size_is_read_back_unchanged_over_a_socket() {
    all_sizes(Path::Tcp).await;
}

#[tokio::test]
async fn inline_payload_up_to_the_largest_request_is_read_back() {
    let node = node(Path::Dma).await;
    make_collection(&node.store).await;
    for (n, size) in SIZES.into_iter().take(8).enumerate() {
        let source = WriteSource::Inline(payload(n as u64, size));
        node.store
            .queue_transaction(transaction(Op::Write { oid: oid(n), offset: 0, source }))
            .await
            .unwrap();
        assert_eq!(get(&node.store, n, size).await, pattern(n as u64, size), "{size} bytes");
    }
    let source = WriteSource::Inline(payload(1, 17 * MIB));
    let too_large =
        node.store.queue_transaction(transaction(Op::Write { oid: oid(0), offset: 0, source })).await;
    assert!(matches!(too_large, Err(StoreError::TooLarge { .. })), "{too_large:?}");
    node.store.queue_transaction(transaction(Op::Touch { oid: oid(99) })).await.unwrap();
}

#[tokio::test]
async fn a_transaction_needs_no_more_host_memory_than_its_payload() {
    let mut small = options();
    small.memory.layout.data_len = 2 * MIB as u64;
    small.largest_request = 2 * MIB;
    let node = node_of(Path::Dma, Arc::new(MemStore::new()), small).await;
    make_collection(&node.store).await;
    let source = WriteSource::Inline(payload(1, 2 * MIB));
    let write = Op::Write { oid: oid(0), offset: 0, source };
    node.store.queue_transaction(transaction(write)).await.unwrap();
    assert_eq!(get(&node.store, 0, 2 * MIB).await, pattern(1, 2 * MIB));
}

#[tokio::test]
async fn ops_that_are_too_long_for_an_entry_are_sent_with_the_payload() {
    let node = node(Path::Dma).await;
    make_collection(&node.store).await;
    for len in [5000, MIB] {
        // Each omap entry has about 100 bytes. The transaction also has payload.
        let entries: Vec<_> =
            (0..1000).map(|n| (Bytes::from(format!("key {n:092}")), Bytes::from("v"))).collect();
        let source = WriteSource::Inline(payload(2, len));
        let write = transaction(Op::Write { oid: oid(len), offset: 0, source })
            .with(Op::OmapSet { oid: oid(len), entries: entries.clone() });
        let before = node.attachment.engine().counters().bytes;
        node.store.queue_transaction(write).await.unwrap();
        assert!(node.attachment.engine().counters().bytes - before >= (100_000 + len) as u64);
        assert_eq!(get(&node.store, len, len).await, pattern(2, len));
        let (found, _) = node.store.omap_iterate(&cid(), &oid(len), Bytes::new(), 2000).await.unwrap();
        assert_eq!(found, entries);
    }
}

#[tokio::test]
async fn payload_in_staging_buffers_is_transferred_without_a_copy() {
    let node = node(Path::Dma).await;
    make_collection(&node.store).await;
    let pool = node.attachment.pool();
    let before = node.attachment.engine().counters();
    let mut buffer = pool.alloc(MIB).await.unwrap();
    buffer.copy_from_slice(&pattern(5, MIB));
    let stage = node.store.stage(MIB as u64).await.unwrap();
    node.store.stage_write(stage, 0, Payload::compute(0, buffer.freeze())).await.unwrap();
    node.store.queue_transaction(transaction(staged(stage, 0, MIB))).await.unwrap();
    let written = node.attachment.engine().counters();
    assert!(written.bytes - before.bytes >= MIB as u64, "the engine moved every byte to the host");

    let dest = pool.alloc(MIB).await.unwrap();
    let at = dest.offset();
    let read = node.store.read(&cid(), &oid(0), 0, MIB as u64, Some(dest)).await.unwrap();
    assert_eq!(pool.arena().offset_of(&read.data[0]), Some(at), "the data is in the caller's buffer");
    assert_eq!(read.contiguous(), pattern(5, MIB));
    let fetched = node.attachment.engine().counters();
    assert!(fetched.bytes - written.bytes >= MIB as u64, "the engine moved every byte back");
    assert!(fetched.bytes - before.bytes < 2 * MIB as u64 + 64 * 1024, "the engine moved no byte twice");
    assert_eq!(fetched.failed, 0);
}

#[tokio::test]
async fn reads_do_not_wait_for_staging_buffers() {
    let node = node(Path::Dma).await;
    make_collection(&node.store).await;
    put(&node.store, 0, payload(1, 3 * MIB)).await;
    let pool = node.attachment.pool();
    let mut held = Vec::new();
    while let Ok(Some(buffer)) = pool.try_alloc(4096) {
        held.push(buffer);
    }
    assert_eq!(get(&node.store, 0, 3 * MIB).await, pattern(1, 3 * MIB));
}

/// Creates a node with little memory for data and a short ring.
async fn small_node() -> Node {
    let mut small = options();
    small.memory.layout.data_len = 4 * MIB as u64;
    small.memory.layout.ring_len = 40 << 10;
    small.largest_request = 4 * MIB;
    let node = node_of(Path::Dma, Arc::new(MemStore::new()), small).await;
    make_collection(&node.store).await;
    node
}

#[tokio::test]
async fn transactions_behind_many_queries_do_not_deadlock() {
    let node = small_node().await;
    node.store.queue_transaction(transaction(Op::Touch { oid: oid(0) })).await.unwrap();
    // Many more calls of each kind than the channel sends at a time.
    let calls = (0..1000).map(|n| {
        let stage = node.store.stage(4096);
        let source = WriteSource::Inline(payload(n, 32 << 10));
        let write = node.store.queue_transaction(transaction(Op::Write { oid: oid(0), offset: 0, source }));
        let stat = node.store.stat(&cid(), &oid(0));
        async move {
            let (stage, write, stat) = futures::join!(stage, write, stat);
            write.unwrap();
            assert_eq!(stat.unwrap().size, 32 << 10, "the query follows a write");
            stage.unwrap()
        }
    });
    let calls = futures::future::join_all(calls.collect::<Vec<_>>());
    let stages = tokio::time::timeout(Duration::from_secs(60), calls).await.expect("all calls end");
    stages.into_iter().for_each(|stage| node.store.stage_release(stage));
}

#[tokio::test]
async fn many_concurrent_requests_succeed_in_little_memory() {
    let node = small_node().await;
    let tasks = (0..48).map(|n| {
        let store = Arc::clone(&node.store);
        tokio::spawn(async move {
            for round in 0..4 {
                let len = (n * 77_777 + round * 4097) % (3 * MIB) + 1;
                let seed = (n * 10 + round) as u64;
                store.queue_transaction(transaction(Op::Truncate { oid: oid(n), size: 0 })).await.unwrap();
                if n % 3 == 0 {
                    let source = WriteSource::Inline(payload(seed, len));
                    let write = transaction(Op::Write { oid: oid(n), offset: 0, source });
                    store.queue_transaction(write).await.unwrap();
                } else {
                    put(&store, n, payload(seed, len)).await;
                }
                assert_eq!(get(&store, n, len).await, pattern(seed, len));
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    assert_eq!(node.attachment.pool().free_bytes().0, 16 * MIB);
    assert_eq!(node.server.status().stages, 0);
}

#[tokio::test]
async fn dropping_futures_undoes_no_change_and_leaks_nothing() {
    let node = node(Path::Dma).await;
    make_collection(&node.store).await;
    for n in 0..20 {
        let source = WriteSource::Inline(payload(n, MIB));
        drop(node.store.queue_transaction(transaction(Op::Write {
            oid: oid(n as usize),
            offset: 0,
            source,
        })));
        drop(node.store.read(&cid(), &oid(n as usize), 0, MIB as u64, None));
        drop(node.store.stage(4096));
    }
    for n in 0..20 {
        assert_eq!(get(&node.store, n, MIB).await, pattern(n as u64, MIB));
    }
    for _ in 0..100 {
        if node.server.status().stages == 0 && node.attachment.pool().free_bytes().0 == 16 * MIB {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!(
        "stages or buffers are left over: {:?}, {:?}",
        node.server.status(),
        node.attachment.pool().free_bytes()
    );
}

/// An engine with a thread that calls a closure with every chain before the chain is performed.
struct Meddling {
    engine: Arc<ShmEngine>,
    chains: mpsc::Sender<(QueueId, Chain)>,
    posted: AtomicUsize,
}

impl Meddling {
    fn start(mut meddle: impl FnMut(&mut Chain) + Send + 'static) -> Arc<Meddling> {
        let engine = ShmEngine::start(ShmOptions::default()).unwrap();
        let (chains, queue) = mpsc::channel::<(QueueId, Chain)>();
        let behind = Arc::clone(&engine);
        std::thread::spawn(move || {
            for (to, mut chain) in queue {
                meddle(&mut chain);
                behind.post(to, chain).unwrap();
            }
        });
        Arc::new(Meddling { engine, chains, posted: AtomicUsize::new(0) })
    }
}

// SAFETY: the inner engine makes all transfers. The tests change only chains whose memory no other
// code uses.
unsafe impl DmaEngine for Meddling {
    fn name(&self) -> &str {
        "meddling"
    }
    fn is_emulated(&self) -> bool {
        true
    }
    fn max_transfer(&self) -> usize {
        64 << 10
    }
    fn queue_depth(&self) -> usize {
        self.engine.queue_depth()
    }
    fn register_local(&self, memory: &OutsideAccess) -> channel::Result<DmaRegion> {
        self.engine.register_local(memory)
    }
    fn reach(&self) -> Reach {
        self.engine.reach()
    }
    fn attaches_anew(&self) -> bool {
        false
    }
    fn attach(&self, access: MemoryAccess, len: usize) -> BoxFuture<'_, channel::Result<Joined>> {
        self.engine.attach(access, len)
    }
    fn register_peer(&self, peer: &EnginePeer, range: Range<usize>) -> channel::Result<DmaRegion> {
        self.engine.register_peer(peer, range)
    }
    fn queues(&self) -> usize {
        self.engine.queues()
    }
    fn setup_cost(&self) -> Duration {
        Duration::ZERO
    }
    fn tune(&self, _: EngineTuning) {}
    fn reset(&self) {
        self.engine.reset();
    }
    fn post(&self, queue: QueueId, chain: Chain) -> Result<(), RejectedChain> {
        assert!(
            chain.transfers.iter().all(|t| t.len <= self.max_transfer()),
            "transfers respect the engine's limit"
        );
        self.posted.fetch_add(1, Ordering::Relaxed);
        self.chains.send((queue, chain)).unwrap();
        Ok(())
    }
    fn poll_completions(&self, cx: &mut Context<'_>, out: &mut Vec<ChainCompletion>) {
        self.engine.poll_completions(cx, out);
    }
    fn counters(&self) -> Counters {
        self.engine.counters()
    }
}

#[tokio::test]
async fn a_call_on_the_socket_waits_for_the_transactions_on_the_ring() {
    // The engine is slow, so calls on the control socket reach the host first.
    let slow = Meddling::start(|_| std::thread::sleep(Duration::from_millis(5)));
    let engine: Arc<dyn DmaEngine> = slow.clone();
    let options = AttachmentOptions { engine: Some(engine), ..options() };
    let node = node_of(Path::Dma, Arc::new(MemStore::new()), options).await;
    make_collection(&node.store).await;
    for n in 1..=10u64 {
        let size = n * 100_000;
        let write = node.store.queue_transaction(transaction(Op::Truncate { oid: oid(0), size }));
        let stat = node.store.stat(&cid(), &oid(0)).await.unwrap();
        assert_eq!(stat.size, size, "the stat overtook the transaction");
        write.await.unwrap();
        let payload = payload(n, 150_000);
        put(&node.store, n as usize, payload).await;
        assert_eq!(get(&node.store, n as usize, 150_000).await, pattern(n, 150_000));
    }
    assert!(slow.posted.load(Ordering::Relaxed) > 40, "the delays fired");
}

#[tokio::test]
async fn two_targets_of_an_attachment_are_independent() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("s");
    let uuids = (0..2).map(uuid::Uuid::from_u128);
    let target = |uuid| outboard_proxy::ServedTarget { uuid, store: Arc::new(MemStore::new()) };
    let targets = uuids.map(target).collect();
    let listener = outboard_proxy::StoreListener::unix(&at).unwrap();
    let _server = outboard_proxy::Server::serve(listener, targets, Default::default()).unwrap();
    let attachment = outboard_proxy::Attachment::connect(outboard_proxy::StoreEndpoint::Unix(at), options())
        .await
        .unwrap();
    let stores: Vec<Arc<dyn ObjectStore>> =
        (0..2).map(|n| attachment.store(n) as Arc<dyn ObjectStore>).collect();
    make_collection(&stores[0]).await;
    assert!(matches!(stores[1].stat(&cid(), &oid(0)).await, Err(StoreError::NoSuchCollection(_))));
    make_collection(&stores[1]).await;
    put(&stores[1], 0, payload(1, 5000)).await;
    assert_eq!(get(&stores[1], 0, 5000).await, pattern(1, 5000));
    assert!(matches!(stores[0].stat(&cid(), &oid(0)).await, Err(StoreError::NoSuchObject(_))));
}

#[tokio::test]
async fn threads_can_share_a_store_and_calls_of_each_thread_keep_their_order() {
    let node = node(Path::Dma).await;
    make_collection(&node.store).await;
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let store = Arc::clone(&node.store);
            std::thread::spawn(move || {
                futures::executor::block_on(async {
                    for round in 1..=100usize {
                        let len = round * 50 + thread;
                        let source = WriteSource::Inline(payload(thread as u64, len));
                        let write = Op::Write { oid: oid(thread), offset: 0, source };
                        let write = store.queue_transaction(transaction(write));
                        let stat = store.stat(&cid(), &oid(thread)).await.unwrap();
                        assert_eq!(stat.size, len as u64);
                        let read = store.read(&cid(), &oid(thread), 0, len as u64, None).await.unwrap();
                        assert_eq!(read.contiguous(), pattern(thread as u64, len));
                        write.await.unwrap();
                    }
                });
            })
        })
        .collect();
    while threads.iter().any(|thread| !thread.is_finished()) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn calls_fail_when_the_runtime_of_their_attachment_is_dropped() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let node = runtime.block_on(node(Path::Dma));
    let calls: Vec<_> = (0..10).map(|_| node.store.stat(&cid(), &oid(0))).collect();
    let writes: Vec<_> =
        (0..10).map(|_| node.store.queue_transaction(transaction(Op::CreateCollection))).collect();
    drop(runtime);
    futures::executor::block_on(async {
        for call in calls {
            assert!(matches!(call.await, Err(StoreError::Disconnected(_))));
        }
        for write in writes {
            assert!(matches!(write.await, Err(StoreError::Disconnected(_))));
        }
        assert!(matches!(node.store.space().await, Err(StoreError::Disconnected(_))));
    });
}

#[tokio::test]
async fn a_closed_attachment_fails_its_calls() {
    let node = node(Path::Dma).await;
    make_collection(&node.store).await;
    let stat = node.store.stat(&cid(), &oid(0));
    node.attachment.close();
    // The answer may arrive before or after the close.
    assert!(matches!(stat.await, Err(StoreError::Disconnected(_) | StoreError::NoSuchObject(_))));
    assert!(matches!(node.store.space().await, Err(StoreError::Disconnected(_))));
    assert!(!node.attachment.status().connected);
}

#[tokio::test]
async fn a_stage_whose_caller_was_cancelled_is_released() {
    let behind: Arc<dyn ObjectStore> = Arc::new(MemStore::new());
    let node = node_of(Path::Dma, Arc::clone(&behind), options()).await;
    let untaken = node.store.stage(1 << 20);
    // Queries are answered in order, so the answer to `stage` has arrived.
    node.store.space().await.unwrap();
    assert!(behind.space().await.unwrap().staged > 0);
    drop(untaken);
    let released = async {
        while behind.space().await.unwrap().staged > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), released).await.unwrap();
}

#[tokio::test]
async fn a_server_frees_the_stages_of_its_attachment_when_it_stops() {
    let behind: Arc<dyn ObjectStore> = Arc::new(MemStore::new());
    let node = node_of(Path::Dma, Arc::clone(&behind), options()).await;
    node.store.stage(1 << 20).await.unwrap();
    assert!(behind.space().await.unwrap().staged > 0);
    node.server.stop();
    assert_eq!((behind.space().await.unwrap().staged, node.server.status().stages), (0, 0));
}

/// The numbers of all existing objects.
async fn objects(store: &Arc<dyn ObjectStore>) -> BTreeSet<usize> {
    let (ids, more) = store.list(&cid(), None, usize::MAX).await.unwrap();
    assert!(!more);
    let number = |id: &store::ObjectId| std::str::from_utf8(&id.as_bytes()[7..]).unwrap().parse().unwrap();
    ids.iter().map(number).collect()
}

#[tokio::test]
async fn calls_of_an_ended_attachment_precede_all_calls_of_the_next_attachment() {
    const EACH: usize = 64;
    let dir = tempfile::tempdir().unwrap();
    let mut node = node_of(Path::Dma, common::on_drive(&dir.path().join("target")), options()).await;
    make_collection(&node.store).await;
    let (mut cut_off, mut left_over) = (0, 0);
    // On a busy machine, the first rounds may all end before the server has received a call.
    for round in 0..300 {
        if round >= 30 && cut_off > 0 && left_over > 0 {
            break;
        }
        let base = round * EACH;
        let touch = |n| node.store.queue_transaction(transaction(Op::Touch { oid: oid(n) }));
        let queued: Vec<_> = (base..base + EACH).map(touch).collect();
        for _ in 0..round {
            tokio::task::yield_now().await;
        }
        node.attachment.close();
        node.attachment = Attachment::connect(node.endpoint.clone(), options()).await.unwrap();
        node.store = node.attachment.store(0);
        left_over += node.server.status().leftover_calls;
        let found = objects(&node.store).await;
        let of_round = found.range(base..).count();
        assert!(
            found.range(base..).copied().eq(base..base + of_round),
            "transactions were executed in order and without gaps"
        );
        let mut acknowledged = 0;
        for done in queued {
            acknowledged += usize::from(done.await.is_ok());
        }
        assert!(of_round >= acknowledged, "only {of_round} of {acknowledged} acknowledged objects exist");
        while node.server.status().leftover_calls > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(
            objects(&node.store).await == found,
            "a transaction of the ended attachment was executed late"
        );
        cut_off += usize::from(acknowledged < EACH);
    }
    assert!(cut_off > 0 && left_over > 0, "{cut_off} attachments cut off, {left_over} calls left over");
}
