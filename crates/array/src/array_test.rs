//! Tests an array over stores whose reads can be delayed, and with the conformance cases of a store
//! that use only what an array supports.

mod extents;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::block::Payload;
use base::clock::WallClock;
use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;
use futures::future::LocalBoxFuture;
use store::stripes::{EngineOptions, Engines, LocalStoreSet};
use store::{
    CollectionId, MemStore, ObjectId, ObjectStore, Op, ReadData, Result, StoreCalls, StoreError, StoreFuture,
    StoreReply, StoreRequest, Submit, Transaction, WriteSource, conformance,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::LocalSet;
use uuid::Uuid;
use wire::CodingMode;

use super::*;
use crate::damaged_changes::{CERTAIN_AFTER, CERTAIN_ATTEMPTS};
use crate::rebuild::OBJECTS;
use crate::record::is_own;

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

/// A store in memory in which the data of some objects is damaged, or fails to be read.
#[derive(Default)]
struct DamagedStore {
    inner: MemStore,
    damaged: Mutex<Vec<ObjectId>>,
    failing: Mutex<Vec<ObjectId>>,
}

impl Submit for DamagedStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        match &request {
            StoreRequest::Read { oid, .. } if self.damaged.lock().unwrap().contains(oid) => {
                let e = StoreError::Corrupt { what: oid.to_string(), detail: "damaged by a test".into() };
                Box::pin(std::future::ready(Err(e)))
            }
            StoreRequest::Read { oid, .. } if self.failing.lock().unwrap().contains(oid) => {
                Box::pin(std::future::ready(Err(StoreError::Io("failed by a test".into()))))
            }
            _ => self.inner.submit(request),
        }
    }
}

/// A store in memory whose next read returns a flipped bit, as if memory was damaged after the data
/// was verified.
#[derive(Default)]
struct FlippingStore {
    inner: MemStore,
    flips: AtomicBool,
}

impl Submit for FlippingStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let is_read = matches!(&request, StoreRequest::Read { .. });
        let reply = self.inner.submit(request);
        if !is_read || !self.flips.swap(false, Ordering::Relaxed) {
            return reply;
        }
        Box::pin(async move {
            let StoreReply::Read(read) = reply.await? else { panic!("the reply to a read") };
            read.verify().unwrap();
            let mut bytes = read.contiguous().to_vec();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            Ok(StoreReply::Read(ReadData { data: vec![bytes.into()], verified: true, ..read }))
        })
    }
}

/// A target that is used unless a test takes it out of use.
struct TestTarget {
    uuid: Uuid,
    store: Arc<dyn ObjectStore>,
    is_usable: Cell<bool>,
    generation: Cell<u64>,
}

impl TestTarget {
    fn use_it(&self, is_usable: bool) {
        self.is_usable.set(is_usable);
        self.generation.set(self.generation.get() + 1);
    }
}

impl Member for TestTarget {
    fn uuid(&self) -> Uuid {
        self.uuid
    }
    fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }
    fn generation(&self) -> u64 {
        self.generation.get()
    }
    fn is_usable(&self) -> bool {
        self.is_usable.get()
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
    fn fail(&self, _: u64, _: &StoreError) {}
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

/// A witness in memory.
#[derive(Default)]
struct TestWitness(RefCell<Option<WitnessEntry>>);

impl Witness for TestWitness {
    fn entry(&self, _: (u32, u32)) -> Option<WitnessEntry> {
        self.0.borrow().clone()
    }

    fn store(&self, _: (u32, u32), entry: WitnessEntry) -> LocalBoxFuture<'_, Result<()>> {
        *self.0.borrow_mut() = Some(entry);
        Box::pin(std::future::ready(Ok(())))
    }
}

fn put(cid: &CollectionId, oid: &ObjectId, byte: u8) -> Transaction {
    let source = WriteSource::Inline(Payload::compute(0, Bytes::from(vec![byte; 8192])));
    Transaction::new(cid.clone()).with(Op::Write { oid: oid.clone(), offset: 0, source })
}

/// Creates an array over these stores. Must be called in a `LocalSet`.
async fn array_over(cid: &CollectionId, redundancy: &str, stores: Vec<Arc<dyn ObjectStore>>) -> Array {
    Array::new(group_over(cid, redundancy, stores).await.0)
}

/// Creates a group over these stores. Must be called in a `LocalSet`.
async fn group_over(
    cid: &CollectionId,
    redundancy: &str,
    stores: Vec<Arc<dyn ObjectStore>>,
) -> (Rc<Group>, Vec<Rc<TestTarget>>) {
    let members: Vec<(Uuid, Arc<dyn ObjectStore>)> =
        stores.into_iter().map(|store| (Uuid::new_v4(), store)).collect();
    let engines = Arc::new(Engines::start(EngineOptions::default(), None).unwrap());
    let stripes = Arc::new(LocalStoreSet::new(members.clone(), engines));
    let ranked: Vec<usize> = (0..members.len()).collect();
    let target = |(uuid, store)| {
        Rc::new(TestTarget { uuid, store, is_usable: Cell::new(true), generation: Cell::new(0) })
    };
    let targets: Vec<Rc<TestTarget>> = members.into_iter().map(target).collect();
    let group = Group::new(GroupOptions {
        cid: cid.clone(),
        place: (0, 0),
        meta: ObjectId::new(&b"meta"[..]).unwrap(),
        is_internal: |oid| oid.as_bytes()[..] == *b"meta",
        state_xattr: Bytes::from_static(b"v"),
        redundancy: redundancy.parse().unwrap(),
        targets: Rc::new(targets.iter().map(|target| Rc::clone(target) as Rc<dyn Member>).collect()),
        staging: BufferPool::new(Arena::anonymous(1 << 20).unwrap(), 0, 64 << 10),
        member_timeout: Duration::from_secs(10),
        patience: Duration::from_secs(30),
        dirty_max: 16,
        coding: CodingDispatcher::start(&CodingConfig::default(), stripes, false).unwrap(),
        clock: WallClock::default(),
        witness: Rc::new(TestWitness::default()),
        is_forgotten: Rc::new(|_| false),
        has_left: Rc::new(|_| false),
    });
    let group = Rc::new(group.unwrap());
    group.create(&ranked).await.unwrap();
    (group, targets)
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

/// A stale member may have the fragment that a damaged fragment of another member makes necessary.
#[tokio::test]
async fn a_read_waits_for_a_stale_member_that_has_a_needed_fragment() {
    let stores: Vec<_> = (0..3).map(|_| Arc::new(DamagedStore::default())).collect();
    let test = async {
        let cid = CollectionId::new(&b"c"[..]).unwrap();
        let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn ObjectStore>);
        let (group, targets) = group_over(&cid, "ec:2+1", shared.collect()).await;
        let array = Array::new(Rc::clone(&group));
        let id = |name: &str| ObjectId::new(name.as_bytes().to_vec()).unwrap();
        let (unchanged, changed) = (id("unchanged"), id("changed"));
        array.queue_transaction(put(&cid, &unchanged, 1)).await.unwrap();
        array.queue_transaction(put(&cid, &changed, 1)).await.unwrap();
        targets[2].use_it(false);
        array.queue_transaction(put(&cid, &changed, 2)).await.unwrap();
        *stores[0].damaged.lock().unwrap() = vec![unchanged.clone(), changed.clone()];
        let read = array.read(&cid, &unchanged, 0, 8192, None).await;
        assert!(matches!(read, Err(StoreError::Disconnected(_))), "target 2 has a fragment: {read:?}");
        let read = array.read(&cid, &changed, 0, 8192, None).await;
        assert!(matches!(read, Err(StoreError::Corrupt { .. })), "target 2 missed the change: {read:?}");
        *stores[0].damaged.lock().unwrap() = vec![unchanged.clone()];
        *stores[0].failing.lock().unwrap() = vec![changed.clone()];
        let read = array.read(&cid, &changed, 0, 8192, None).await;
        assert!(matches!(read, Err(StoreError::Disconnected(_))), "target 0 may recover: {read:?}");
        stores[0].failing.lock().unwrap().clear();
        targets[2].use_it(true);
        group.rebuild(2, &Pace::new(0, 1), &RefCell::default()).await.unwrap();
        for (oid, byte) in [(unchanged, 1), (changed, 2)] {
            let read = array.read(&cid, &oid, 0, 8192, None).await.unwrap();
            assert_eq!(read.contiguous(), vec![byte; 8192], "{oid}");
        }
    };
    LocalSet::new().run_until(test).await;
}

/// Bytes that depend on their position.
fn pattern(len: usize) -> Bytes {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 37) as u8).collect()
}

/// A fragment that is computed from damaged bytes would have correct checksums.
#[tokio::test]
async fn no_fragment_is_computed_from_bytes_that_were_damaged_after_they_were_read() {
    for redundancy in ["ec:2+1", "mirror:3"] {
        let stores: Vec<_> = (0..3).map(|_| Arc::new(FlippingStore::default())).collect();
        let flip = |number: usize| stores[number].flips.store(true, Ordering::Relaxed);
        let test = async {
            let cid = CollectionId::new(&b"c"[..]).unwrap();
            let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn ObjectStore>);
            let (group, targets) = group_over(&cid, redundancy, shared.collect()).await;
            let array = Array::new(Rc::clone(&group));
            for (name, len) in [("short", 5000), ("long", 3 << 20)] {
                let oid = ObjectId::new(name).unwrap();
                let content = pattern(len);
                let put = async || {
                    let source = WriteSource::Inline(Payload::compute(0, content.clone()));
                    let write = Op::Write { oid: oid.clone(), offset: 0, source };
                    array.queue_transaction(Transaction::new(cid.clone()).with(write)).await.unwrap();
                };
                put().await;
                let reads_are_right = async |lost: usize| {
                    targets[lost].use_it(false);
                    let read = array.read(&cid, &oid, 0, len as u64, None).await.unwrap();
                    let read = ReadData { verified: false, ..read };
                    // A copy may have been damaged in memory, but its checksums show the damage.
                    let is_right = read.contiguous() == content;
                    assert!(
                        is_right || redundancy == "mirror:3" && read.verify().is_err(),
                        "{redundancy}, {name}: a read without target {lost}"
                    );
                    targets[lost].use_it(true);
                    group.rebuild(lost, &Pace::new(0, 1), &RefCell::default()).await.unwrap();
                };
                flip(1);
                reads_are_right(0).await;
                flip(1);
                flip(2);
                reads_are_right(0).await;
                // The rebuild of a fragment reads the other fragments.
                targets[0].use_it(false);
                put().await;
                flip(1);
                targets[0].use_it(true);
                // The target may refuse the damaged copy; the rebuild is then repeated.
                let pace = Pace::new(0, 1);
                while group.rebuild(0, &pace, &RefCell::default()).await.is_err() {}
                stores.iter().for_each(|store| store.flips.store(false, Ordering::Relaxed));
                reads_are_right(1).await;
                reads_are_right(2).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), LocalSet::new().run_until(test)).await.unwrap();
    }
}

/// A partial write reads old bytes, and computes new parity from them.
#[tokio::test]
async fn no_parity_is_computed_from_bytes_that_were_damaged_after_they_were_read() {
    let stores: Vec<_> = (0..3).map(|_| Arc::new(FlippingStore::default())).collect();
    let test = async {
        let cid = CollectionId::new(&b"c"[..]).unwrap();
        let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn ObjectStore>);
        let (group, targets) = group_over(&cid, "ec:2+1", shared.collect()).await;
        let array = Array::new(Rc::clone(&group));
        let oid = ObjectId::new("o").unwrap();
        let mut content = pattern(1 << 20).to_vec();
        let write = |offset: u64, bytes: &[u8]| {
            let source = WriteSource::Inline(Payload::compute(0, Bytes::copy_from_slice(bytes)));
            Transaction::new(cid.clone()).with(Op::Write { oid: oid.clone(), offset, source })
        };
        array.queue_transaction(write(0, &content)).await.unwrap();
        for round in 0..12 {
            let at = round * 77 % 256 * 4096;
            content[at..at + 4096].fill(round as u8);
            stores[round % 3].flips.store(true, Ordering::Relaxed);
            let mut attempts = 0;
            while let Err(e) = array.queue_transaction(write(at as u64, &content[at..at + 4096])).await {
                assert!(matches!(e, StoreError::Disconnected(_)), "{e:?}");
                attempts += 1;
                assert!(attempts < 10, "{e:?}");
            }
            stores.iter().for_each(|store| store.flips.store(false, Ordering::Relaxed));
            for (lost, target) in targets.iter().enumerate().take(2) {
                target.use_it(false);
                let read = array.read(&cid, &oid, 0, 1 << 20, None).await.unwrap();
                assert!(read.contiguous() == content, "round {round}, without target {lost}");
                target.use_it(true);
                group.rebuild(lost, &Pace::new(0, 1), &RefCell::default()).await.unwrap();
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), LocalSet::new().run_until(test)).await.unwrap();
}

#[tokio::test]
async fn new_data_that_was_damaged_in_memory_is_refused_before_its_parity_is_stored() {
    let stores: Vec<_> = (0..3).map(|_| Arc::new(MemStore::new())).collect();
    let test = async {
        let cid = CollectionId::new(&b"c"[..]).unwrap();
        let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn ObjectStore>);
        let (group, _) = group_over(&cid, "ec:2+1", shared.collect()).await;
        let array = Array::new(Rc::clone(&group));
        let oid = ObjectId::new("o").unwrap();
        let bad = |e: &Result<()>| matches!(e, Err(StoreError::BadPayload(_)));
        // Whole stripes, a part of a stripe, and a part of a unit.
        for len in [1 << 20, 80_000, 10_000] {
            let (data, checksums) = Payload::compute(0, pattern(len)).into_parts();
            for at in [0, len / 2, len - 1] {
                let mut damaged = data.to_vec();
                damaged[at] ^= 64;
                let payload = Payload::from_parts(0, damaged.into(), checksums.clone()).unwrap();
                let source = WriteSource::Inline(payload.clone());
                let write = Op::Write { oid: oid.clone(), offset: 0, source };
                let written = array.queue_transaction(Transaction::new(cid.clone()).with(write)).await;
                assert!(bad(&written), "{len} bytes, damaged at {at}: {written:?}");
                if len < 1 << 20 {
                    continue;
                }
                for mode in [CodingMode::LatencySensitive, CodingMode::Async] {
                    group.coding.set_mode(mode).unwrap();
                    let stage = array.stage(len as u64).await.unwrap();
                    let staged = array.stage_write(stage, 0, payload.clone()).await;
                    assert!(bad(&staged), "{mode}: {staged:?}");
                    array.stage_release(stage);
                }
            }
        }
    };
    LocalSet::new().run_until(test).await;
}

/// A rebuild copies the owner's metadata object only at its start. Later changes reach the member
/// with the transactions.
#[tokio::test]
async fn a_rebuild_ends_although_the_owners_metadata_object_changes() {
    let store = || Arc::new(HeldStore { inner: MemStore::new(), held: watch::Sender::new(false) });
    let stores = [store(), store()];
    let test = async {
        let cid = CollectionId::new(&b"c"[..]).unwrap();
        let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn ObjectStore>);
        let (group, targets) = group_over(&cid, "mirror:2", shared.collect()).await;
        let array = Array::new(Rc::clone(&group));
        targets[1].use_it(false);
        let id = |name: String| ObjectId::new(name.into_bytes()).unwrap();
        for n in 0..20 {
            array.queue_transaction(put(&cid, &id(format!("o{n}")), n)).await.unwrap();
        }
        // More objects than `dirty_max` have changed, so the member receives all objects.
        group.bound_notes(false).await;
        targets[1].use_it(true);
        stores[0].held.send_replace(true);
        let (pace, progress) = (Pace::new(0, 1), RefCell::default());
        let change = async {
            let begun = async {
                while !group.rebuilds.is_running() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), begun).await.unwrap();
            let touch = Op::Touch { oid: id("meta".into()) };
            array.queue_transaction(Transaction::new(cid.clone()).with(touch)).await.unwrap();
            assert!(group.rebuilds.is_running(), "the change precedes the end of the rebuild");
            stores[0].held.send_replace(false);
        };
        let (rebuilt, ()) = tokio::join!(group.rebuild(1, &pace, &progress), change);
        rebuilt.unwrap();
        let rebuilt = *progress.borrow();
        assert_eq!(rebuilt.objects, 20, "{rebuilt:?}");
    };
    LocalSet::new().run_until(test).await;
}

/// The member takes part in the transactions, but cannot copy an object that it lacks.
#[tokio::test]
async fn a_copy_of_an_object_that_a_rebuilt_member_lacks_is_rebuilt_too() {
    for is_blank in [false, true] {
        let store = || Arc::new(HeldStore { inner: MemStore::new(), held: watch::Sender::new(false) });
        let stores = [store(), store()];
        let test = async {
            let cid = CollectionId::new(&b"c"[..]).unwrap();
            let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn ObjectStore>);
            let (group, targets) = group_over(&cid, "mirror:2", shared.collect()).await;
            let array = Array::new(Rc::clone(&group));
            targets[1].use_it(false);
            let id = |name: String| ObjectId::new(name.into_bytes()).unwrap();
            // A blank member receives all objects, because more than `dirty_max` have changed.
            let count = if is_blank { 20 } else { 14 };
            for n in 0..count {
                array.queue_transaction(put(&cid, &id(format!("o{n:02}")), n)).await.unwrap();
            }
            group.bound_notes(false).await;
            targets[1].use_it(true);
            stores[0].held.send_replace(true);
            let (pace, progress) = (Pace::new(0, 1), RefCell::default());
            let copies = async {
                while !group.rebuilds.is_running() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                let number = group.number();
                // The rebuild has begun to copy the first objects, and holds them.
                for n in OBJECTS as u8 + 1..count {
                    // Some of the ids precede all objects, and the others follow them.
                    let dst = id(format!("{}{n}", if n % 2 == 0 { "a" } else { "z" }));
                    let copy = Transaction::new(cid.clone());
                    let copy = copy.with(Op::Clone { src: id(format!("o{n:02}")), dst: dst.clone() });
                    array
                        .queue_transaction(copy.with(Op::Zero { oid: dst, offset: 0, len: 4096 }))
                        .await
                        .unwrap();
                }
                assert_eq!(group.number(), number, "no member has failed a transaction");
                assert!(group.rebuilds.is_running(), "the copies precede the end of the rebuild");
                stores[0].held.send_replace(false);
            };
            let (rebuilt, ()) = tokio::join!(group.rebuild(1, &pace, &progress), copies);
            rebuilt.unwrap();
            targets[0].use_it(false);
            for n in OBJECTS as u8 + 1..count {
                let dst = id(format!("{}{n}", if n % 2 == 0 { "a" } else { "z" }));
                let read = array.read(&cid, &dst, 0, 8192, None).await.unwrap();
                assert_eq!(read.contiguous(), [[0; 4096], [n; 4096]].concat(), "{dst}");
                let read = array.read(&cid, &id(format!("o{n:02}")), 0, 8192, None).await.unwrap();
                assert_eq!(read.contiguous(), vec![n; 8192]);
            }
        };
        LocalSet::new().run_until(test).await;
    }
}

#[tokio::test]
async fn a_copy_of_an_object_that_does_not_exist_or_changes_is_refused() {
    let test = async {
        let cid = CollectionId::new(&b"c"[..]).unwrap();
        let stores = (0..3).map(|_| Arc::new(MemStore::new()) as Arc<dyn ObjectStore>);
        let array = array_over(&cid, "ec:2+1", stores.collect()).await;
        let id = |name: &str| ObjectId::new(name.as_bytes().to_vec()).unwrap();
        let copy = |src, dst| Transaction::new(cid.clone()).with(Op::Clone { src: id(src), dst: id(dst) });
        let missing = array.queue_transaction(copy("none", "copy")).await;
        assert!(matches!(missing, Err(StoreError::NoSuchObject(_))), "{missing:?}");
        array.queue_transaction(put(&cid, &id("one"), 1)).await.unwrap();
        array.queue_transaction(put(&cid, &id("two"), 2)).await.unwrap();
        let existing = array.queue_transaction(copy("one", "two")).await;
        assert!(matches!(existing, Err(StoreError::InvalidArgument(_))), "{existing:?}");
        let changed = copy("one", "copy").with(Op::Truncate { oid: id("one"), size: 0 });
        let changed = array.queue_transaction(changed).await;
        assert!(matches!(changed, Err(StoreError::InvalidArgument(_))), "{changed:?}");
        let guard = Op::GuardXattr { oid: id("one"), name: "v".into(), value: Some("x".into()) };
        let mut guarded = copy("one", "copy");
        guarded.ops.insert(0, guard);
        let guarded = array.queue_transaction(guarded).await;
        assert!(matches!(guarded, Err(StoreError::GuardFailed(_))), "{guarded:?}");
        let read = array.read(&cid, &id("copy"), 0, 8192, None).await;
        assert!(matches!(read, Err(StoreError::NoSuchObject(_))), "{read:?}");
        let twice = copy("one", "copy").with(Op::Clone { src: id("two"), dst: id("copy") });
        let twice = array.queue_transaction(twice).await;
        assert!(matches!(twice, Err(StoreError::InvalidArgument(_))), "{twice:?}");
        array.queue_transaction(copy("one", "copy")).await.unwrap();
        assert_eq!(array.read(&cid, &id("copy"), 0, 8192, None).await.unwrap().contiguous(), vec![1; 8192]);
    };
    LocalSet::new().run_until(test).await;
}

/// A store in memory that executes transactions at once, and answers them while `held` is not set.
struct HeldCommits {
    inner: MemStore,
    held: watch::Sender<bool>,
    /// Number of transactions on objects other than those of the group.
    received: AtomicUsize,
    /// Whether the store refuses the next of these transactions.
    refuses: AtomicBool,
    /// How many of the next of these transactions the store does not execute, because it ends.
    loses: AtomicUsize,
    /// How many of the next transactions that undo changes the store executes without an answer, because
    /// it ends.
    undos: AtomicUsize,
    /// Whether the data of all objects is damaged.
    is_damaged: AtomicBool,
}

impl HeldCommits {
    fn new() -> Arc<HeldCommits> {
        let (inner, held) = (MemStore::new(), watch::Sender::new(false));
        Arc::new(HeldCommits {
            inner,
            held,
            received: AtomicUsize::default(),
            refuses: AtomicBool::default(),
            loses: AtomicUsize::default(),
            undos: AtomicUsize::default(),
            is_damaged: AtomicBool::default(),
        })
    }
}

impl Submit for HeldCommits {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        if let StoreRequest::Read { oid, .. } = &request
            && self.is_damaged.load(Ordering::Relaxed)
        {
            let e = StoreError::Corrupt { what: oid.to_string(), detail: "damaged by a test".into() };
            return Box::pin(std::future::ready(Err(e)));
        }
        let one_less = |count: usize| count.checked_sub(1);
        // An undo removes an intent.
        let undoes =
            |op: &Op| matches!(op, Op::OmapRemove { oid, keys } if is_own(oid) && keys[0][0] == b's');
        let is_undo = matches!(&request, StoreRequest::Transact { transaction, .. }
            if transaction.ops.iter().any(undoes));
        if is_undo && self.undos.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok() {
            let reply = self.inner.submit(request);
            return Box::pin(async move {
                reply.await?;
                Err(StoreError::Disconnected("ended by a test".into()))
            });
        }
        let is_change = matches!(&request, StoreRequest::Transact { transaction, .. }
            if transaction.ops.iter().any(|op| matches!(op, Op::Write { .. })));
        if !is_change {
            return self.inner.submit(request);
        }
        self.received.fetch_add(1, Ordering::Relaxed);
        let is_lost = self.loses.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok();
        let reply: StoreFuture = if is_lost {
            Box::pin(std::future::ready(Err(StoreError::Disconnected("ended by a test".into()))))
        } else if self.refuses.swap(false, Ordering::Relaxed) {
            let (target, area) = (Uuid::nil(), store::Area::Data);
            Box::pin(std::future::ready(Err(StoreError::NoSpace { target, area, needed: 4096, free: 0 })))
        } else {
            self.inner.submit(request)
        };
        let mut held = self.held.subscribe();
        Box::pin(async move {
            drop(held.wait_for(|held| !held).await);
            reply.await
        })
    }
}

/// Writes a block, on condition that the object has the state `from`, and gives it the state `to`.
fn step(cid: &CollectionId, oid: &ObjectId, block: u64, from: Option<u8>, to: u8) -> Transaction {
    let xattr = |value: u8| Bytes::from(vec![value]);
    let guard = |from| Op::GuardXattr { oid: oid.clone(), name: "v".into(), value: Some(xattr(from)) };
    let source = WriteSource::Inline(Payload::compute(0, Bytes::from(vec![to; 4096])));
    let mut transaction = Transaction::new(cid.clone());
    transaction.ops.extend(from.map(guard));
    transaction
        .with(Op::Write { oid: oid.clone(), offset: block * 4096, source })
        .with(Op::SetXattrs { oid: oid.clone(), xattrs: vec![("v".into(), xattr(to))] })
}

#[tokio::test]
async fn changes_of_one_object_are_queued_on_all_members_before_the_first_one_commits() {
    for (redundancy, count) in [("mirror:2", 2), ("ec:2+1", 3)] {
        let stores: Vec<_> = (0..count).map(|_| HeldCommits::new()).collect();
        let test = async {
            let cid = CollectionId::new(&b"c"[..]).unwrap();
            let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn ObjectStore>);
            let array = array_over(&cid, redundancy, shared.collect()).await;
            let oid = ObjectId::new(&b"o"[..]).unwrap();
            array.queue_transaction(put(&cid, &oid, 0)).await.unwrap();
            array.queue_transaction(step(&cid, &oid, 0, None, 1)).await.unwrap();
            let received =
                || stores.iter().map(|store| store.received.load(Ordering::Relaxed)).sum::<usize>();
            let before = received();
            let hold = |held| stores.iter().for_each(|store| _ = store.held.send_replace(held));
            hold(true);
            let queue = |block, from, to| array.queue_transaction(step(&cid, &oid, block, from, to));
            let (first, second) = (queue(0, Some(1), 2), queue(1, Some(2), 3));
            // This change was computed from a state that never was, and the next one from this
            // change.
            let (third, fourth) = (queue(0, Some(9), 4), queue(1, Some(4), 5));
            let unguarded = queue(0, None, 6);
            let settle = tokio::time::timeout(Duration::from_millis(200), std::future::pending::<()>());
            assert!(settle.await.is_err());
            // In the erasure code, a change of one block has data for one data fragment and for the
            // parity. The third change reads old data, and waits until the first one has committed.
            let expected = if redundancy == "mirror:2" { 8 } else { 4 };
            assert_eq!(received() - before, expected, "{redundancy}: the change without a guard waits");
            hold(false);
            first.await.unwrap();
            second.await.unwrap();
            for refused in [third.await, fourth.await] {
                assert!(matches!(refused, Err(StoreError::GuardFailed(_))), "{refused:?}");
            }
            let read = array.read(&cid, &oid, 0, 8192, None).await.unwrap().contiguous();
            unguarded.await.unwrap();
            assert_eq!(read[4096..], [3; 4096]);
            let read = array.read(&cid, &oid, 0, 8192, None).await.unwrap().contiguous();
            assert_eq!((&read[..4096], &read[4096..]), (&[6; 4096][..], &[3; 4096][..]));
            assert_eq!(array.get_xattr(&cid, &oid, "v".into()).await.unwrap(), vec![6]);
        };
        LocalSet::new().run_until(test).await;
    }
}

/// An erasure-coded group with two data fragments, and an object of one stripe, whose state is 1.
struct Stripe {
    stores: Vec<Arc<HeldCommits>>,
    targets: Vec<Rc<TestTarget>>,
    array: Array,
    cid: CollectionId,
    oid: ObjectId,
}

impl Stripe {
    /// Number of the first block of the second data fragment.
    const SECOND: u64 = 16;

    async fn create(redundancy: &str) -> Stripe {
        let count = redundancy.parse::<wire::Redundancy>().unwrap().targets();
        let stores: Vec<_> = (0..count).map(|_| HeldCommits::new()).collect();
        let cid = CollectionId::new(&b"c"[..]).unwrap();
        let shared = stores.iter().map(|store| Arc::clone(store) as Arc<dyn ObjectStore>);
        let (group, targets) = group_over(&cid, redundancy, shared.collect()).await;
        let stripe =
            Stripe { stores, targets, array: Array::new(group), cid, oid: ObjectId::new(&b"o"[..]).unwrap() };
        stripe.change(2 * Self::SECOND - 1, None, 0).await.unwrap();
        stripe.change(1, Some(0), 1).await.unwrap();
        stripe
    }

    fn change(&self, block: u64, from: Option<u8>, to: u8) -> impl Future<Output = Result<()>> + use<> {
        self.array.queue_transaction(step(&self.cid, &self.oid, block, from, to))
    }

    fn hold(&self, held: bool) {
        self.stores.iter().for_each(|store| _ = store.held.send_replace(held));
    }

    async fn block(&self, block: u64) -> Result<Bytes> {
        Ok(self.array.read(&self.cid, &self.oid, block * 4096, 4096, None).await?.contiguous())
    }
}

/// Waits until all tasks wait for a store.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(200)).await;
}

/// The member of the second data fragment refuses a change and fails, so the other members keep the
/// change. The parity of the next change of the same row must not be computed from the old data of
/// the member.
#[tokio::test]
async fn no_parity_is_computed_from_a_member_that_has_refused_a_change() {
    let test = async {
        let stripe = Stripe::create("ec:2+1").await;
        stripe.hold(true);
        stripe.stores[1].refuses.store(true, Ordering::Relaxed);
        let (first, second) = (stripe.change(Stripe::SECOND, Some(1), 2), stripe.change(0, Some(2), 3));
        settle().await;
        assert!(!stripe.stores[1].refuses.load(Ordering::Relaxed), "the member has refused the change");
        stripe.targets[1].use_it(false);
        stripe.hold(false);
        assert!(first.await.is_err() && second.await.is_err(), "the caller looks up the outcome");
        let state = stripe.array.get_xattr(&stripe.cid, &stripe.oid, "v".into()).await.unwrap()[0];
        let blocks = [stripe.block(Stripe::SECOND).await.unwrap(), stripe.block(0).await.unwrap()];
        let expected = [if state >= 2 { 2 } else { 0 }, if state >= 3 { 3 } else { 0 }];
        assert_eq!(blocks.map(|block| block[0]), expected, "state {state}");
        assert_eq!(state, 2, "the other members have kept the first change");
    };
    LocalSet::new().run_until(test).await;
}

/// The first data fragment is missing. A read reconstructs it while another member refuses a change
/// of the same row.
#[tokio::test]
async fn no_data_is_reconstructed_from_different_versions() {
    let test = async {
        let stripe = Stripe::create("ec:2+1").await;
        stripe.targets[0].use_it(false);
        stripe.change(1, Some(1), 2).await.unwrap();
        stripe.hold(true);
        stripe.stores[1].refuses.store(true, Ordering::Relaxed);
        let change = stripe.change(Stripe::SECOND, Some(2), 3);
        settle().await;
        assert!(!stripe.stores[1].refuses.load(Ordering::Relaxed), "the member has refused the change");
        let read = async {
            // The read may fail, because the interval has ended.
            let read = stripe.block(0).await.map_or(0, |block| block[0]);
            assert_eq!(read, 0, "the read mixed the old data of one member with the new parity");
        };
        let (_, ()) = tokio::join!(read, async {
            settle().await;
            stripe.hold(false);
        });
        assert!(change.await.is_err());
        assert_eq!(stripe.block(0).await.unwrap(), [0; 4096][..]);
    };
    LocalSet::new().run_until(test).await;
}

/// The store of the first data fragment ends before it executes a change, and the new parity is damaged.
/// The change cannot be completed. It was not acknowledged, so the group undoes it and serves requests.
#[tokio::test]
async fn a_change_that_too_few_members_have_intact_is_undone() {
    let test = async {
        let stripe = Stripe::create("ec:2+1").await;
        stripe.stores[0].loses.store(1, Ordering::Relaxed);
        let change = stripe.change(0, Some(1), 2).await;
        assert!(matches!(change, Err(StoreError::Disconnected(_))), "{change:?}");
        let damaged = |damaged| stripe.stores[2].is_damaged.store(damaged, Ordering::Relaxed);
        damaged(true);
        let state = async || stripe.array.get_xattr(&stripe.cid, &stripe.oid, "v".into()).await;
        // The data may be readable later, so the group waits at first.
        for _ in 0..=CERTAIN_ATTEMPTS {
            let waiting = state().await;
            assert!(matches!(waiting, Err(StoreError::Disconnected(_))), "{waiting:?}");
            tokio::time::pause();
            tokio::time::advance(CERTAIN_AFTER / CERTAIN_ATTEMPTS).await;
            tokio::time::resume();
        }
        assert_eq!(state().await.unwrap(), vec![1]);
        assert_eq!(stripe.block(0).await.unwrap(), [0; 4096][..]);
        damaged(false);
        stripe.change(Stripe::SECOND, Some(1), 2).await.unwrap();
        stripe.targets[0].use_it(false);
        for (block, byte) in [(0, 0), (1, 1), (Stripe::SECOND, 2)] {
            assert_eq!(stripe.block(block).await.unwrap(), vec![byte; 4096], "block {block}");
        }
        assert_eq!(state().await.unwrap(), vec![2]);
    };
    LocalSet::new().run_until(test).await;
}

/// Two changes of an object are in progress when a store ends. Members 0 and 1 have both of them, member
/// 3 has only the first one, and member 2 has none. Then the members that have both fail before all
/// members have caught up. The other two must agree about the content.
#[tokio::test]
async fn members_agree_although_only_one_has_caught_up() {
    let test = async {
        let stripe = Stripe::create("ec:2+2").await;
        stripe.hold(true);
        stripe.stores[2].loses.store(2, Ordering::Relaxed);
        let first = stripe.change(0, Some(1), 2);
        settle().await;
        stripe.stores[3].loses.store(1, Ordering::Relaxed);
        let second = stripe.change(2, Some(2), 3);
        settle().await;
        let left = || stripe.stores.iter().map(|store| store.loses.load(Ordering::Relaxed)).sum::<usize>();
        assert_eq!(left(), 0, "the stores have lost the changes");
        stripe.hold(false);
        assert!(first.await.is_err() && second.await.is_err());
        // Member 3 ends again, before it executes the change that it lacks.
        stripe.stores[3].loses.store(1, Ordering::Relaxed);
        let state = async || stripe.array.get_xattr(&stripe.cid, &stripe.oid, "v".into()).await;
        let early = state().await;
        assert!(matches!(early, Err(StoreError::Disconnected(_))) && left() == 0, "{early:?}");
        stripe.targets[0].use_it(false);
        stripe.targets[1].use_it(false);
        let mut state_now = state().await;
        while matches!(state_now, Err(StoreError::Disconnected(_))) {
            tokio::time::sleep(Duration::from_millis(25)).await;
            state_now = state().await;
        }
        let state_now = state_now.unwrap()[0];
        let blocks = [stripe.block(0).await.unwrap(), stripe.block(2).await.unwrap()];
        let expected = [if state_now >= 2 { 2 } else { 0 }, if state_now >= 3 { 3 } else { 0 }];
        assert_eq!(blocks.map(|block| block[0]), expected, "state {state_now}");
    };
    tokio::time::timeout(Duration::from_secs(60), LocalSet::new().run_until(test)).await.unwrap();
}

/// A member lacks two changes of an object, and another one is damaged, so the group undoes both changes.
/// A member ends during this. If the member that lacked the changes is missing afterwards, the others must
/// still agree about data and metadata.
#[tokio::test]
async fn changes_are_undone_together() {
    for ends in 0..2 {
        let test = async {
            let stripe = Stripe::create("ec:2+1").await;
            stripe.hold(true);
            stripe.stores[2].loses.store(2, Ordering::Relaxed);
            let (first, second) = (stripe.change(0, Some(1), 2), stripe.change(2, Some(2), 3));
            settle().await;
            assert_eq!(stripe.stores[2].loses.load(Ordering::Relaxed), 0, "the store has lost the changes");
            stripe.hold(false);
            assert!(first.await.is_err() && second.await.is_err());
            let damaged = |damaged| stripe.stores[0].is_damaged.store(damaged, Ordering::Relaxed);
            damaged(true);
            stripe.stores[ends].undos.store(1, Ordering::Relaxed);
            let state = async || stripe.array.get_xattr(&stripe.cid, &stripe.oid, "v".into()).await;
            let fired = || stripe.stores[ends].undos.load(Ordering::Relaxed) == 0;
            let mut attempts = 0;
            while !fired() {
                let waiting = state().await;
                assert!(matches!(waiting, Err(StoreError::Disconnected(_))), "{waiting:?}");
                tokio::time::pause();
                tokio::time::advance(CERTAIN_AFTER / CERTAIN_ATTEMPTS).await;
                tokio::time::resume();
                attempts += 1;
                assert!(attempts < 3 * CERTAIN_ATTEMPTS, "the member ends during the undo");
            }
            stripe.targets[2].use_it(false);
            damaged(false);
            let mut state_now = state().await;
            while matches!(state_now, Err(StoreError::Disconnected(_))) {
                tokio::time::sleep(Duration::from_millis(25)).await;
                state_now = state().await;
            }
            let state_now = state_now.unwrap()[0];
            let expected = [if state_now >= 2 { 2 } else { 0 }, if state_now >= 3 { 3 } else { 0 }];
            let blocks = [stripe.block(0).await.unwrap(), stripe.block(2).await.unwrap()];
            assert_eq!(blocks.map(|block| block[0]), expected, "member {ends} ended: state {state_now}");
        };
        tokio::time::timeout(Duration::from_secs(60), LocalSet::new().run_until(test)).await.unwrap();
    }
}
