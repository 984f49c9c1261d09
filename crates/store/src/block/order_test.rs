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
