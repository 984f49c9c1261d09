//! Tests of the order of reads and transactions whose metadata is not in memory.

use std::sync::Arc;

use bytes::Bytes;

use super::drive::Drive;
use super::recovery::{TargetSizes, mkfs};
use super::sim::{RecordedDrive, SimStore};
use crate::conformance::{cid, oid, one, pattern, write};
use crate::{ObjectId, Op, StoreCalls, Transaction};

/// Size of the objects, in bytes. Their leaves are too large for their onodes.
const LEN: usize = 200_000;

fn run<T>(future: impl Future<Output = T>) -> T {
    futures::executor::block_on(future)
}

/// Returns the image of an unmounted target with the collections `c` and `d`. Collection `c` has the
/// objects `o` and `p`, with equal data.
fn image() -> Vec<u8> {
    let drive = RecordedDrive::new(vec![0; 12 << 20]);
    let shared: Arc<dyn Drive> = drive.clone();
    let sizes = TargetSizes { uuid: None, log_bytes: Some(1 << 20), index_bytes: Some(4 << 20) };
    mkfs(&shared, &sizes, &mut |_, _| {}).unwrap();
    let store = SimStore::mount(&drive, 1).unwrap();
    run(store.queue_transaction(one(&cid("d"), Op::CreateCollection))).unwrap();
    let mut fill = one(&cid("c"), Op::CreateCollection);
    fill.ops.extend(["o", "p"].map(|name| write(&oid(name), 0, pattern(1, LEN))));
    run(store.queue_transaction(fill)).unwrap();
    run(store.umount()).unwrap();
    drive.image()
}

/// Mounts a target. None of its leaves is in memory.
fn mount(image: &[u8], seed: u64) -> SimStore {
    let store = SimStore::mount(&RecordedDrive::new(image.to_vec()), seed).unwrap();
    // Ends the scan of existing objects.
    while store.lock().step() {}
    store
}

fn read(store: &SimStore, object: &ObjectId) -> impl Future<Output = Bytes> + use<> {
    let read = store.read(&cid("c"), object, 0, LEN as u64, None);
    async { read.await.unwrap().contiguous() }
}

#[test]
fn a_read_sees_no_transaction_that_was_queued_after_it() {
    let (image, c, o) = (image(), cid("c"), oid("o"));
    let changes: [Transaction; 7] = [
        one(&c, Op::Truncate { oid: o.clone(), size: 0 }).with(write(&o, 0, pattern(2, LEN))),
        one(&c, Op::Remove { oid: o.clone() }),
        one(&c, write(&o, 4096, pattern(2, 4096))),
        one(&c, Op::Remove { oid: oid("p") }).with(Op::Zero { oid: o.clone(), offset: 0, len: 8192 }),
        one(&c, Op::MoveRename { src: o.clone(), dst_collection: cid("d"), dst: oid("q") }),
        one(&c, Op::SplitCollection { at: o.clone(), dst: cid("d") }),
        one(&c, write(&oid("p"), 0, pattern(2, 10))).with(Op::Clone { src: oid("p"), dst: o.clone() }),
    ];
    for (number, change) in changes.iter().enumerate() {
        for seed in 0..50 {
            let store = mount(&image, seed);
            let read = read(&store, &o);
            let changed = store.queue_transaction(change.clone());
            run(changed).unwrap();
            assert!(run(read) == pattern(1, LEN), "change {number}, seed {seed}");
        }
    }
}

#[test]
fn a_change_does_not_wait_for_the_metadata_of_another_object() {
    let store = mount(&image(), 1);
    // The metadata of the object to change is in memory.
    run(read(&store, &oid("p")));
    let early = read(&store, &oid("o"));
    let changed = store.queue_transaction(one(&cid("c"), write(&oid("p"), 0, pattern(2, 4096))));
    while store.lock().step_without_loads() {}
    assert_eq!(store.queue_len(), 1, "only the read waits");
    run(changed).unwrap();
    assert!(run(early) == pattern(1, LEN));
}

/// Queues transactions on collection `c` until one of them waits for room in the log, and another
/// transaction behind it. Runs no checkpoint. Returns the results of the transactions, in order.
fn fill_log(store: &SimStore) -> Vec<impl Future<Output = crate::Result<()>> + use<>> {
    let mut queued = Vec::new();
    while store.queue_len() < 2 {
        let number = queued.len() as u64;
        let note = vec![(Bytes::from("k"), pattern(number, 20_000))];
        queued.push(store.queue_transaction(one(&cid("c"), Op::OmapSet { oid: oid("o"), entries: note })));
        while store.queue_len() < 2 && store.lock().step_without_checkpoints() {}
    }
    queued
}

#[test]
fn a_read_waits_for_room_in_the_log_only_if_an_earlier_transaction_changes_its_object() {
    let store = mount(&image(), 1);
    let queued = fill_log(&store);
    let waiting = store.queue_len();
    let (value, size) = (store.omap_get(&cid("c"), &oid("o"), vec![Bytes::from("k")]), LEN as u64);
    let listed = store.list(&cid("c"), None, 10);
    assert_eq!(store.queue_len(), waiting + 2, "the query and the listing wait");
    let other = store.stat(&cid("c"), &oid("p"));
    let mut read = Box::pin(read(&store, &oid("p")));
    while store.lock().step_without_checkpoints() {}
    assert_eq!(store.queue_len(), waiting + 2, "the read and the query of another object do not wait");
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(data) = read.as_mut().poll(&mut cx) else { panic!("the read waits") };
    assert!(data == pattern(1, LEN));
    assert_eq!(run(other).unwrap().size, size);
    let last = queued.len() as u64 - 1;
    queued.into_iter().for_each(|queued| run(queued).unwrap());
    assert_eq!(run(value).unwrap(), [(Bytes::from("k"), pattern(last, 20_000))]);
    assert_eq!(run(listed).unwrap().0.len(), 2);
}

#[test]
fn transactions_get_room_in_the_log_in_their_order() {
    let store = mount(&image(), 1);
    let queued = fill_log(&store);
    // The log has room for a small transaction, but not before the waiting ones.
    let small = store.queue_transaction(one(&cid("d"), Op::Touch { oid: oid("x") }));
    while store.lock().step_without_checkpoints() {}
    assert_eq!(store.queue_len(), 3);
    let checkpoints = store.lock().checkpoints();
    run(small).unwrap();
    assert!(store.lock().checkpoints() > checkpoints);
    queued.into_iter().for_each(|queued| run(queued).unwrap());
}

/// The scan of many objects needs more steps than events.
#[test]
fn after_the_scan_a_new_object_needs_no_load() {
    let drive = RecordedDrive::new(image());
    let store = SimStore::mount(&drive, 1).unwrap();
    for n in 0..300 {
        run(store.queue_transaction(one(&cid("c"), write(&oid(&n.to_string()), 0, pattern(1, 10))))).unwrap();
    }
    run(store.umount()).unwrap();
    let store = mount(&drive.image(), 1);
    let new = store.queue_transaction(one(&cid("c"), write(&oid("new"), 0, pattern(1, 10))));
    while store.lock().step_without_loads() {}
    assert_eq!(store.queue_len(), 0, "the transaction waits for a load");
    run(new).unwrap();
}
