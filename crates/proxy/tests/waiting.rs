//! Tests in which calls wait for ring credit, for ranges of host memory and for one another, with
//! few of these resources. No deadlock may occur.

mod common;

use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use base::fault::{Faults, Site};
use common::load::{self, MIB, fault, faulty_node, watched};
use common::{
    Node, Path, cid, make_collection, node_of, node_over, offering, oid, options, pattern, payload,
    transaction,
};
use futures::future::join_all;
use outboard_proxy::{AttachmentOptions, DmaTuning, ServedTarget};
use store::stripes::{StoreSet, TargetTransaction};
use store::{
    MemStore, ObjectId, ObjectStore, Op, StageId, StoreCalls, StoreError, StoreFuture, StoreRequest, Submit,
    Transaction, WriteSource,
};
use uuid::Uuid;

/// An attachment with room for one request of 3 MiB at a time.
async fn narrow(path: Path, mut options: AttachmentOptions) -> Node {
    options.memory.layout.data_len = 4 * MIB as u64;
    options.largest_request = 4 * MIB;
    let node = node_of(path, Arc::new(MemStore::new()), options).await;
    make_collection(&node.store).await;
    node
}

fn write(n: usize, len: usize) -> Transaction {
    let source = WriteSource::Inline(payload(n as u64, len));
    transaction(Op::Write { oid: oid(n), offset: 0, source })
}

fn staged(n: usize, stage: StageId, len: usize) -> Transaction {
    let source = WriteSource::Staged { stage, offset: 0, len: len as u64 };
    transaction(Op::Write { oid: oid(n), offset: 0, source })
}

async fn soon<T>(what: &str, of: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), of).await.unwrap_or_else(|_| panic!("{what} for ever"))
}

#[tokio::test]
async fn queries_do_not_block_the_transaction_that_they_follow() {
    let node = narrow(Path::Unix, options()).await;
    // The second transaction already has its number, but waits for the range of the first.
    let writes: Vec<_> = (0..2).map(|n| node.store.queue_transaction(write(n, 3 * MIB))).collect();
    let stats: Vec<_> = (0..300).map(|_| node.store.stat(&cid(), &oid(1))).collect();
    for write in soon("transactions wait", join_all(writes)).await {
        write.unwrap();
    }
    for stat in soon("queries wait", join_all(stats)).await {
        assert_eq!(stat.unwrap().size, 3 * MIB as u64, "a query overtook its transaction");
    }
}

#[tokio::test]
async fn a_stage_write_and_an_earlier_transaction_do_not_deadlock() {
    let node = narrow(Path::Dma, AttachmentOptions { outstanding: 1, ..options() }).await;
    let stage = node.store.stage(4096).await.unwrap();
    // The transaction's payload is sent first, so the short write is posted before the transaction.
    let long = node.store.queue_transaction(write(0, MIB));
    let short = node.store.stage_write(stage, 0, payload(1, 4096));
    soon("the stage write waits", short).await.unwrap();
    soon("the transaction waits", long).await.unwrap();
    node.store.queue_transaction(staged(1, stage, 4096)).await.unwrap();
    node.store.stage_release(stage);
}

#[tokio::test]
async fn a_lost_doorbell_is_detected_even_if_many_queries_follow() {
    let faults = Faults::default();
    let node = faulty_node(Path::Dma, watched(&faults)).await;
    faults.arm(fault("dma.doorbell=drop,count=1")).unwrap();
    let touch = node.store.queue_transaction(transaction(Op::Touch { oid: oid(1) }));
    let stats: Vec<_> = (0..300).map(|_| node.store.stat(&cid(), &oid(1))).collect();
    soon("the transaction waits", touch).await.unwrap();
    for stat in soon("queries wait", join_all(stats)).await {
        stat.unwrap();
    }
    assert_eq!(faults.fired(Site::DmaDoorbell), 1);
    assert_eq!(node.attachment.status().incarnations, 1);
}

#[tokio::test]
async fn the_limit_of_calls_does_not_apply_to_calls_of_the_store_channel_itself() {
    let faults = Faults::default();
    let node = faulty_node(Path::Dma, watched(&faults)).await;
    faults.arm(fault("dma.transfer=stall,late=3600000ms,count=1")).unwrap();
    let stalled = node.store.queue_transaction(write(0, MIB));
    let stats: Vec<_> = (0..40_000).map(|_| node.store.stat(&cid(), &oid(0))).collect();
    soon("the transaction waits", stalled).await.unwrap();
    assert_eq!(faults.fired(Site::DmaTransfer), 1);
    let mut refused = 0;
    for stat in soon("queries wait", join_all(stats)).await {
        match stat {
            Err(StoreError::Disconnected(why)) if why.contains("too many calls") => refused += 1,
            stat => assert_eq!(stat.unwrap().size, MIB as u64),
        }
    }
    assert!(refused > 5000, "only {refused} of 40000 calls were refused");
    assert_eq!(node.attachment.status().incarnations, 1, "{:?}", node.attachment.status());
}

/// Waits until the attachment has been idle for so long that no timer is running.
async fn idle() {
    tokio::time::sleep(Duration::from_millis(600)).await;
}

#[tokio::test]
async fn a_stalled_transfer_in_an_idle_attachment_is_detected() {
    let faults = Faults::default();
    let node = faulty_node(Path::Dma, watched(&faults)).await;
    for (n, len) in [(0, MIB), (1, 70_000)] {
        let stage = node.store.stage(len as u64).await.unwrap();
        // This opens the window of host memory that the stage write uses.
        node.store.queue_transaction(write(n, len)).await.unwrap();
        idle().await;
        faults.clear();
        faults.arm(fault("dma.transfer=stall,late=3600000ms,count=1")).unwrap();
        let before = node.attachment.status().offload.health;
        // No other call is in progress.
        soon("the stage write waits", node.store.stage_write(stage, 0, payload(1, len))).await.unwrap();
        assert_eq!(faults.fired(Site::DmaTransfer), 1);
        let after = node.attachment.status().offload.health;
        assert_eq!(after.failures, before.failures + 1, "{after:?}");
        node.store.stage_release(stage);
        faults.clear();
        let recovered = async {
            while node.attachment.status().offload.health.recoveries == before.recoveries {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        soon("the recovery takes", recovered).await;
    }
}

/// The transaction is queued right behind the write of the stage that it names.
#[tokio::test]
async fn a_transaction_waits_for_writes_to_its_stage_that_may_be_sent_again() {
    let faults = Faults::default();
    let node = faulty_node(Path::Dma, watched(&faults)).await;
    for n in 0..6 {
        // The long payload has its own chain. The short payload shares a chain with its entry.
        let len = if n % 2 == 0 { MIB } else { 20_000 };
        let stage = node.store.stage(len as u64).await.unwrap();
        let recoveries = node.attachment.status().offload.health.recoveries;
        faults.clear();
        faults.arm(fault("dma.transfer=corrupt,count=1")).unwrap();
        let written = node.store.stage_write(stage, 0, payload(n as u64, len));
        let queued = node.store.queue_transaction(staged(n, stage, len));
        if n < 3 {
            node.store.stage_release(stage);
        }
        soon("the transaction waits", queued).await.unwrap();
        soon("the stage write waits", written).await.unwrap();
        if n >= 3 {
            node.store.stage_release(stage);
        }
        assert_eq!(faults.fired(Site::DmaTransfer), 1);
        load::check(&node.store, n, n as u64, len).await;
        let recovered = async {
            while node.attachment.status().offload.health.recoveries == recoveries {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        soon("the recovery takes", recovered).await;
    }
    assert_eq!(node.attachment.status().incarnations, 1);
}

/// Without a cache, each job asks the host to open its window. Jobs that shared one `Export` call
/// before the cache was switched off also share its answer.
#[tokio::test]
async fn jobs_that_wait_for_a_window_continue_when_the_cache_is_switched_off() {
    let node = node_of(Path::Dma, Arc::new(MemStore::new()), options()).await;
    make_collection(&node.store).await;
    let writes: Vec<_> = (0..4).map(|n| node.store.queue_transaction(write(n, 100_000))).collect();
    node.attachment.tune(DmaTuning { region_cache: 0, ..DmaTuning::default() });
    for write in soon("transactions wait", join_all(writes)).await {
        write.unwrap();
    }
    let writes: Vec<_> = (0..4).map(|n| node.store.queue_transaction(write(n, 100_000))).collect();
    node.attachment.tune(DmaTuning::default());
    for write in soon("transactions wait", join_all(writes)).await {
        write.unwrap();
    }
}

/// The runtime of an attachment is dropped while the engine may still read a staging buffer.
#[test]
fn a_buffer_that_dma_may_use_is_not_freed_with_the_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let faults = Faults::default();
    let node = runtime.block_on(async {
        // The long cool-down prevents a reset of the engine during the test.
        let options = AttachmentOptions { cool_down: Duration::from_secs(600), ..watched(&faults) };
        let node = faulty_node(Path::Dma, options).await;
        let stage = node.store.stage(MIB as u64).await.unwrap();
        let mut buffer = node.attachment.pool().alloc(MIB).await.unwrap();
        buffer.copy_from_slice(&pattern(1, MIB));
        let staged = Payload::compute(0, buffer.freeze());
        faults.arm(fault("dma.transfer=stall,late=3600000ms,count=1")).unwrap();
        soon("the stage write waits", node.store.stage_write(stage, 0, staged)).await.unwrap();
        assert_eq!(faults.fired(Site::DmaTransfer), 1);
        node
    });
    let pool = node.attachment.pool().clone();
    assert_eq!(
        pool.free_bytes().0,
        15 * MIB,
        "the socket carried the data, but the engine may still read the buffer"
    );
    drop(runtime);
    drop((node.store, node.attachment));
    assert_eq!(pool.free_bytes().0, 15 * MIB, "the buffer was freed although the engine may still read it");
}

#[tokio::test]
async fn calls_above_the_limit_of_waiting_calls_fail_immediately() {
    let options = AttachmentOptions { wait_for_store: Duration::from_secs(600), ..options() };
    let node = node_of(Path::Dma, Arc::new(MemStore::new()), options).await;
    make_collection(&node.store).await;
    drop(node.server);
    let gone = async {
        while node.attachment.status().connected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("the attachment goes on", gone).await;
    let mut stats: Vec<_> = (0..(1 << 14) + 5).map(|_| node.store.stat(&cid(), &oid(0))).collect();
    for stat in soon("calls wait", join_all(stats.split_off(1 << 14))).await {
        assert!(matches!(&stat, Err(StoreError::Disconnected(why)) if why.contains("too many")), "{stat:?}");
    }
}

/// A store in memory whose transactions are answered only when it is released.
struct HeldStore {
    inner: MemStore,
    held: tokio::sync::watch::Sender<bool>,
}

impl Submit for HeldStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let is_held = matches!(request, StoreRequest::Transact { .. });
        let (reply, mut held) = (self.inner.submit(request), self.held.subscribe());
        Box::pin(async move {
            if is_held {
                drop(held.wait_for(|held| !held).await);
            }
            reply.await
        })
    }
}

type HeldStores = [Arc<HeldStore>; 4];

fn uuid(at: usize) -> Uuid {
    Uuid::from_u128(at as u128 + 1)
}

/// A node with four targets whose answers can be held back.
async fn held_node(path: Path, options: AttachmentOptions) -> (Node, HeldStores) {
    let store =
        || Arc::new(HeldStore { inner: MemStore::new(), held: tokio::sync::watch::Sender::new(false) });
    let stores = [(); 4].map(|()| store());
    let served = |(at, store): (usize, &Arc<HeldStore>)| ServedTarget {
        uuid: uuid(at),
        store: Arc::clone(store) as Arc<dyn ObjectStore>,
    };
    let node = node_over(path, stores.iter().enumerate().map(served).collect(), options, offering()).await;
    for at in 0..4 {
        make_collection(&(node.attachment.store(at) as Arc<dyn ObjectStore>)).await;
    }
    (node, stores)
}

/// Queues a transaction on each of the first targets together.
fn queue(
    node: &Node,
    transactions: impl IntoIterator<Item = Transaction>,
) -> Vec<store::ReplyOf<StoreFuture, ()>> {
    let part = |(at, transaction)| TargetTransaction { uuid: uuid(at), incarnation: None, transaction };
    let parts = transactions.into_iter().enumerate().map(part).collect();
    node.attachment.store_set().queue_transactions(parts).into_iter().map(store::done).collect()
}

#[tokio::test]
async fn a_slow_target_does_not_delay_the_outcomes_of_the_others() {
    for (path, len, is_mirror) in [
        (Path::Dma, 4096, false),
        (Path::Dma, MIB, false),
        (Path::Dma, MIB, true),
        (Path::Unix, 4096, false),
        (Path::Unix, MIB, true),
    ] {
        let (node, stores) = held_node(path, options()).await;
        for at in [1, 2] {
            stores[at].held.send_replace(true);
        }
        let equal = write(7, len);
        let transaction = |at| if is_mirror { equal.clone() } else { write(at, len) };
        let mut replies = queue(&node, (0..4).map(transaction)).into_iter();
        let [first, mut second, mut third, fourth] = [(); 4].map(|()| replies.next().unwrap());
        soon("a fast target waits", first).await.unwrap();
        soon("a fast target waits", fourth).await.unwrap();
        assert!(futures::poll!(&mut second).is_pending() && futures::poll!(&mut third).is_pending());
        stores[1].held.send_replace(false);
        soon("a released target waits", second).await.unwrap();
        assert!(futures::poll!(&mut third).is_pending());
        // The other targets continue meanwhile.
        let next = node.attachment.store(0).queue_transaction(write(9, 4096));
        soon("a fast target waits", next).await.unwrap();
        stores[2].held.send_replace(false);
        soon("a released target waits", third).await.unwrap();
        assert_eq!((node.attachment.status().incarnations, node.server.status().violations), (1, 0));
    }
}

/// Transactions with different payload hold host memory only until their own targets have answered.
#[tokio::test]
async fn a_hung_target_holds_no_host_memory_of_the_others() {
    let mut options = options();
    (options.memory.layout.data_len, options.largest_request) = (8 * MIB as u64, 8 * MIB);
    let (node, stores) = held_node(Path::Dma, options).await;
    stores[3].held.send_replace(true);
    let mut replies = Vec::new();
    for round in 0..4 {
        replies.extend(queue(&node, (0..4).map(|at| write(round * 4 + at, MIB / 2))));
    }
    let large = node.attachment.store(0).queue_transaction(write(99, MIB / 2));
    soon("a large write to a fast target waits", large).await.unwrap();
    let probe = node.attachment.store(0).queue_transaction(Transaction::new(cid()));
    soon("an empty transaction of a fast target waits", probe).await.unwrap();
    stores[3].held.send_replace(false);
    for reply in soon("the hung target waits", join_all(replies)).await {
        reply.unwrap();
    }
}

/// The texts of errors name objects, whose ids may be long. All errors must fit into the answers.
#[tokio::test]
async fn long_errors_do_not_change_the_outcomes_of_transactions() {
    let long = ObjectId::new("ü".repeat(500)).unwrap();
    let guard = || Op::GuardXattr { oid: long.clone(), name: "v".into(), value: Some("x".into()) };
    let is_failed = |outcome: &store::Result<()>| matches!(outcome, Err(StoreError::GuardFailed(_)));
    for path in [Path::Unix, Path::Dma] {
        let cases: [(&[usize], Option<usize>); 3] =
            [(&[1], None), (&[0, 1, 2, 3], None), (&[0, 1, 2], Some(3))];
        for (failing, slow) in cases {
            let (node, stores) = held_node(path, options()).await;
            if let Some(at) = slow {
                stores[at].held.send_replace(true);
            }
            for has_data in [true, false] {
                let change = |at: usize| {
                    let change = if has_data { write(at, MIB) } else { Transaction::new(cid()) };
                    let mut change = change.with(Op::Touch { oid: long.clone() });
                    change.ops.splice(0..0, failing.contains(&at).then(guard));
                    change
                };
                for (at, reply) in queue(&node, (0..4).map(change)).into_iter().enumerate() {
                    if slow == Some(at) {
                        continue;
                    }
                    let outcome = soon("a fast target waits", reply).await;
                    assert_eq!(is_failed(&outcome), failing.contains(&at), "target {at}: {outcome:?}");
                    assert_eq!(outcome.is_ok(), !failing.contains(&at), "target {at}: {outcome:?}");
                }
            }
            for store in &stores {
                store.held.send_replace(false);
            }
            let alone = node.attachment.store(0).queue_transaction(Transaction::new(cid()).with(guard()));
            if failing.contains(&0) {
                assert!(is_failed(&soon("a transaction waits", alone).await));
            }
            assert_eq!((node.attachment.status().incarnations, node.server.status().violations), (1, 0));
        }
    }
}
