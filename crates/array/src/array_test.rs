//! Tests an array over stores whose reads can be delayed, and with the conformance cases of a store
//! that use only what an array supports.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use base::clock::WallClock;
use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;
use futures::future::LocalBoxFuture;
use store::stripes::{EngineOptions, Engines, LocalStripes};
use store::{
    CollectionId, MemStore, ObjectId, ObjectStore, Op, Result, StoreCalls, StoreError, StoreFuture,
    StoreReply, StoreRequest, Submit, Transaction, WriteSource, conformance,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::LocalSet;
use uuid::Uuid;

use super::*;

/// A store in memory whose reads wait while `held` is set.
struct HeldStore {
    inner: MemStore,
    held: watch::Sender<bool>,
}

impl Submit for HeldStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let is_read = matches!(request, StoreRequest::Read { .. });
        let (reply, mut held) = (self.inner.submit(request), self.held.subscribe());
        if !is_read {
            return reply;
        }
        Box::pin(async move {
            drop(held.wait_for(|held| !held).await);
            reply.await
        })
    }
}

/// A target that never fails.
struct Healthy(Uuid, Arc<dyn ObjectStore>);

impl Member for Healthy {
    fn uuid(&self) -> Uuid {
        self.0
    }
    fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.1
    }
    fn generation(&self) -> u64 {
        0
    }
    fn is_usable(&self) -> bool {
        true
    }
    fn is_out(&self) -> bool {
        false
    }
    fn is_slow(&self) -> bool {
        false
    }
    fn is_hopeful(&self) -> bool {
        true
    }
    fn failure(&self) -> Option<String> {
        None
    }
    fn fail(&self, _: &StoreError) {}
    fn overdue(&self, _: &CollectionId, _: Duration) {}
    fn fails(&self) -> LocalBoxFuture<'_, bool> {
        Box::pin(std::future::ready(false))
    }
    fn until_slow(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
    fn answers(self: Rc<Self>) -> LocalBoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}

fn put(cid: &CollectionId, oid: &ObjectId, byte: u8) -> Transaction {
    let source = WriteSource::Inline(Payload::compute(0, Bytes::from(vec![byte; 8192])));
    Transaction::new(cid.clone()).with(Op::Write { oid: oid.clone(), offset: 0, source })
}

/// Creates an array over these stores. Must be called in a `LocalSet`.
async fn array_over(cid: &CollectionId, redundancy: &str, stores: Vec<Arc<dyn ObjectStore>>) -> Array {
    let members: Vec<(Uuid, Arc<dyn ObjectStore>)> =
        stores.into_iter().map(|store| (Uuid::new_v4(), store)).collect();
    let engines = Arc::new(Engines::start(EngineOptions::default(), None).unwrap());
    let stripes = Arc::new(LocalStripes::new(members.clone(), engines));
    let ranked: Vec<usize> = (0..members.len()).collect();
    let targets = members.into_iter().map(|(uuid, store)| Rc::new(Healthy(uuid, store)) as Rc<dyn Member>);
    let group = Group::new(GroupOptions {
        cid: cid.clone(),
        place: (0, 0),
        meta: ObjectId::new(&b"meta"[..]).unwrap(),
        is_internal: |_| false,
        redundancy: redundancy.parse().unwrap(),
        targets: Rc::new(targets.collect()),
        staging: BufferPool::new(Arena::anonymous(1 << 20).unwrap(), 0, 64 << 10),
        member_timeout: Duration::from_secs(10),
        patience: Duration::from_secs(30),
        dirty_max: 16,
        coding: CodingDispatcher::start(&CodingConfig::default(), stripes, false).unwrap(),
        clock: WallClock::default(),
    });
    let group = Rc::new(group.unwrap());
    group.create(&ranked).await.unwrap();
    Array::new(group)
}

/// A request, and the channel for its reply.
type Forwarded = (StoreRequest, oneshot::Sender<Result<StoreReply>>);

/// Forwards requests from any thread to an array.
struct ForwardingStore(mpsc::UnboundedSender<Forwarded>);

impl ForwardingStore {
    /// Creates a store that forwards to `array`. Must be called in a `LocalSet`.
    fn new(array: Array) -> ForwardingStore {
        let (requests, mut received) = mpsc::unbounded_channel::<Forwarded>();
        tokio::task::spawn_local(async move {
            while let Some((request, done)) = received.recv().await {
                let reply = array.submit(request);
                // The test may have dropped the future of the reply.
                tokio::task::spawn_local(async move { drop(done.send(reply.await)) });
            }
        });
        ForwardingStore(requests)
    }
}

impl Submit for ForwardingStore {
    type Reply = StoreFuture;

    fn submit(&self, mut request: StoreRequest) -> StoreFuture {
        if let StoreRequest::Transact { transaction, .. } = &mut request {
            // The collection of an array exists from the start.
            transaction.ops.retain(|op| !matches!(op, Op::CreateCollection));
        }
        let (done, reply) = oneshot::channel();
        self.0.send((request, done)).unwrap();
        Box::pin(async move { reply.await.unwrap() })
    }
}

/// Conformance cases that use only what an array supports: one collection, writes of whole blocks,
/// and neither clones nor headers of omaps. They also accept pages of a listing that are not full.
const CASES: [&str; 3] = [
    "objects_are_created_and_removed",
    "reads_end_at_the_objects_end_and_return_checksums",
    "an_omap_is_read_in_pages",
];

#[tokio::test]
async fn an_array_passes_the_conformance_cases_that_it_supports() {
    for (redundancy, targets) in [("mirror:2", 2), ("ec:2+1", 3)] {
        for (name, case) in conformance::CASES.iter().filter(|(name, _)| CASES.contains(name)) {
            let test = async {
                let cid = CollectionId::new(&b"c"[..]).unwrap();
                let stores = (0..targets).map(|_| Arc::new(MemStore::new()) as Arc<dyn ObjectStore>);
                let array = array_over(&cid, redundancy, stores.collect()).await;
                case(Arc::new(ForwardingStore::new(array))).await;
            };
            tracing::info!(name, redundancy, "running a conformance case");
            LocalSet::new().run_until(test).await;
        }
    }
}

/// Simulates a client that receives data slowly: its read is not polled for a while.
#[tokio::test]
async fn a_read_that_is_not_polled_does_not_block_a_later_write() {
    let within = |what| async move { tokio::time::timeout(Duration::from_secs(20), what).await };
    let store = || Arc::new(HeldStore { inner: MemStore::new(), held: watch::Sender::new(false) });
    let stores = [store(), store()];
    let hold = |held| {
        for store in &stores {
            store.held.send_replace(held);
        }
    };
    let test = async {
        let cid = CollectionId::new(&b"c"[..]).unwrap();
        let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn ObjectStore>);
        let array = array_over(&cid, "mirror:2", shared.collect()).await;
        let oid = ObjectId::new(&b"o"[..]).unwrap();
        array.queue_transaction(put(&cid, &oid, 1)).await.unwrap();
        hold(true);
        let read = array.read(&cid, &oid, 0, 8192, None);
        let mut written = array.queue_transaction(put(&cid, &oid, 2));
        let early = tokio::time::timeout(Duration::from_millis(50), &mut written).await;
        assert!(early.is_err(), "the write waits for the earlier read");
        hold(false);
        within(written).await.expect("the write completes although the read is not polled").unwrap();
        assert_eq!(read.await.unwrap().contiguous(), vec![1; 8192], "the read precedes the write");
    };
    LocalSet::new().run_until(test).await;
}
