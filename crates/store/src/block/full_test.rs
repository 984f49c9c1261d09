//! Tests of full and nearly full targets: no call waits forever, and a refused call changes
//! nothing.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::runtime::Runtime;
use tokio::task::LocalSet;

use super::crash_test::digest_of;
use super::drive::Drive;
use super::recovery::{TargetSizes, mkfs};
use super::sim::{RecordedDrive, SimStore};
use super::sim_drive::{DriveImage, DriveTimes, SimDrive, Survivors};
use super::store::{BlockStore, MkfsOptions, MountOptions};
use crate::conformance::{Workload, cid, oid, pattern, seed, write};
use crate::{Area, CollectionId, MemStore, ObjectStore, Op, StoreCalls, StoreError, Transaction};

const BLOCK: usize = 4096;

thread_local! {
    /// The runtime and the tasks of the test that runs on this thread, in simulated time.
    static SIMULATION: &'static (Runtime, LocalSet) = {
        // The thread ends with the test, so its random numbers need not be restored.
        std::mem::forget(base::entropy::seed_this_thread(seed()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        Box::leak(Box::new((runtime.unwrap(), LocalSet::new())))
    };
}

/// Runs the simulation until `future` is complete. Simulated time stands still between two calls.
fn run<T>(future: impl Future<Output = T>) -> T {
    SIMULATION.with(|(runtime, tasks)| tasks.block_on(runtime, future))
}

/// Returns the content of a drive of `size` bytes with a new target.
fn fresh(size: u64) -> DriveImage {
    run(async {
        let drive = SimDrive::new(size, StdRng::seed_from_u64(0), DriveTimes::default());
        let (log_bytes, index_bytes) = (Some(1 << 20), Some(4 << 20));
        drive.mkfs(&MkfsOptions { log_bytes, index_bytes, ..MkfsOptions::default() }).unwrap();
        drive.image()
    })
}

fn mount(image: &DriveImage) -> (Arc<SimDrive>, Arc<BlockStore>) {
    run(async {
        let rng = StdRng::seed_from_u64(base::entropy::random());
        let drive = SimDrive::with_image(image, rng, DriveTimes::default());
        let options = MountOptions { cache_bytes: 2 << 20, buffer_bytes: 1 << 20, ..MountOptions::default() };
        let (store, driver) = BlockStore::mount_simulated(&drive, &options).await.unwrap();
        base::task::spawn_local(base::thread::ThreadClass::Store, driver.run());
        (drive, store)
    })
}

/// Returns the content of a drive that has just lost its power.
fn after_power_failure(drive: &SimDrive) -> DriveImage {
    let survivors = [Survivors::Nothing, Survivors::Everything, Survivors::Writes, Survivors::Sectors];
    let choice = base::entropy::random::<u64>() as usize % survivors.len();
    run(async { drive.image_after_power_failure(survivors[choice]) })
}

fn is_sound(image: &DriveImage) -> bool {
    run(async {
        let drive = SimDrive::with_image(image, StdRng::seed_from_u64(0), DriveTimes::default());
        drive.fsck(&|_, _, _| None).unwrap().is_clean()
    })
}

/// Mounts a new target of `size` bytes whose events the test controls one by one.
fn mount_stepwise(size: usize) -> SimStore {
    let drive = RecordedDrive::new(vec![0; size]);
    let shared: Arc<dyn Drive> = drive.clone();
    let sizes = TargetSizes { uuid: None, log_bytes: Some(1 << 20), index_bytes: Some(4 << 20) };
    mkfs(&shared, &sizes, &mut |_, _| {}).unwrap();
    SimStore::mount(&drive, seed()).unwrap()
}

fn create(store: &dyn ObjectStore, collections: &[&str]) {
    for c in collections {
        run(store.queue_transaction(Transaction::new(cid(c)).with(Op::CreateCollection))).unwrap();
    }
}

fn put(c: &CollectionId, name: &str, blocks: usize) -> Transaction {
    Transaction::new(c.clone()).with(write(&oid(name), 0, pattern(blocks as u64, blocks * BLOCK)))
}

fn remove(c: &CollectionId, name: &str) -> Transaction {
    Transaction::new(c.clone()).with(Op::Remove { oid: oid(name) })
}

/// Fills the target with objects of collection `full` until `left` blocks are free.
fn fill(store: &dyn ObjectStore, left: u64) {
    create(store, &["full"]);
    let c = cid("full");
    let free = run(store.space()).unwrap().free / BLOCK as u64;
    let mut todo = free - left;
    let mut n = 0;
    while todo > 0 {
        let blocks = todo.min(64);
        run(store.queue_transaction(put(&c, &format!("f{n:04}"), blocks as usize))).unwrap();
        todo -= blocks;
        n += 1;
    }
    assert_eq!(run(store.space()).unwrap().free, left * BLOCK as u64);
}

#[test]
fn a_transaction_whose_writes_do_not_all_fit_is_refused_and_later_calls_run() {
    let (_, store) = mount(&fresh(12 << 20));
    create(&*store, &["c"]);
    let c = cid("c");
    run(store.queue_transaction(put(&c, "old", 1))).unwrap();
    fill(&*store, 10);
    let pieces = Transaction::new(c.clone()).with(write(&oid("a"), 0, pattern(1, 7 * BLOCK))).with(write(
        &oid("b"),
        0,
        pattern(2, 7 * BLOCK),
    ));
    let refused = store.queue_transaction(pieces);
    let read = store.read(&c, &oid("old"), 0, BLOCK as u64, None);
    let removed = store.queue_transaction(remove(&c, "old"));
    let listed = store.list(&c, None, 10);
    let refused = run(refused);
    assert!(
        matches!(refused, Err(StoreError::NoSpace { needed, .. }) if needed == 14 * BLOCK as u64),
        "the error names the bytes that all writes need: {refused:?}"
    );
    assert_eq!(
        run(read).unwrap().contiguous(),
        pattern(1, BLOCK),
        "a read queued behind the transaction gets a reply"
    );
    run(removed).unwrap();
    assert_eq!(run(listed).unwrap(), (vec![], false), "calls execute in the order of submission");
}

#[test]
fn a_transaction_waits_for_freed_blocks_that_suffice_for_all_its_writes() {
    let (_, store) = mount(&fresh(12 << 20));
    create(&*store, &["c", "d"]);
    let (c, d) = (cid("c"), cid("d"));
    run(store.queue_transaction(put(&d, "large", 8))).unwrap();
    fill(&*store, 10);
    let removed = store.queue_transaction(remove(&d, "large"));
    let pieces = Transaction::new(c.clone()).with(write(&oid("a"), 0, pattern(1, 9 * BLOCK))).with(write(
        &oid("b"),
        0,
        pattern(2, 9 * BLOCK),
    ));
    let written = store.queue_transaction(pieces);
    run(removed).unwrap();
    run(written).unwrap();
    assert_eq!(run(store.space()).unwrap().free, 0);
}

#[test]
fn only_one_of_three_calls_that_compete_for_space_succeeds_and_all_get_replies() {
    let (_, store) = mount(&fresh(12 << 20));
    create(&*store, &["c", "d", "e"]);
    let (c, d, e) = (cid("c"), cid("d"), cid("e"));
    run(store.queue_transaction(put(&e, "large", 8))).unwrap();
    fill(&*store, 10);
    let removed = store.queue_transaction(remove(&e, "large"));
    let one = store.queue_transaction(put(&c, "one", 15));
    let staged = store.stage(15 * BLOCK as u64);
    let two = store.queue_transaction(put(&d, "two", 15));
    run(removed).unwrap();
    let outcomes = [run(one), run(staged).map(|stage| store.stage_release(stage)), run(two)];
    let fit = outcomes.iter().filter(|o| o.is_ok()).count();
    assert!(fit == 1, "exactly one of the three calls fits: {outcomes:?}");
    let refused = |o: &Result<(), StoreError>| matches!(o, Ok(()) | Err(StoreError::NoSpace { .. }));
    assert!(outcomes.iter().all(refused), "{outcomes:?}");
}

/// Runs random transactions on a nearly full target, several at a time, and compares the target
/// with the reference model [`MemStore`]. Then checks the target after power failures. The test
/// runs at least three rounds, and more until enough transactions were refused, because the number
/// of refusals in a round depends on the seed.
#[test]
fn a_nearly_full_target_behaves_like_the_reference_model_and_survives_crashes() {
    let (mut refused, mut done) = (0, 0);
    let first = seed();
    let mut round = 0;
    while round < 3 || refused <= 20 || done <= 100 {
        assert!(
            round < 20,
            "after {round} rounds, only {refused} transactions were refused and {done} succeeded"
        );
        let seed = first.wrapping_add(round);
        let start = {
            let (drive, store) = mount(&fresh(8 << 20));
            fill(&*store, 150);
            run(store.umount()).unwrap();
            run(async { drive.image() })
        };
        let (drive, store) = mount(&start);
        let model = MemStore::new();
        let mut workload = Workload::new(seed);
        let mut durable = Vec::new();
        for step in 0..60 {
            let many = workload.rng().random_range(1..6);
            let queued: Vec<_> = (0..many)
                .map(|_| {
                    let transaction = workload.transaction();
                    (transaction.clone(), store.queue_transaction(transaction))
                })
                .collect();
            for (transaction, outcome) in queued {
                match run(outcome) {
                    Err(StoreError::NoSpace { needed, free, .. }) => {
                        assert!(needed > free, "{needed} bytes needed, {free} free");
                        refused += 1;
                    }
                    ours => {
                        let theirs = run(model.queue_transaction(transaction));
                        assert_eq!(ours.is_ok(), theirs.is_ok(), "{ours:?}, the model: {theirs:?}");
                        done += u32::from(ours.is_ok());
                    }
                }
            }
            if step % 5 == 4 {
                durable.push((step, after_power_failure(&drive), contents(&model)));
            }
        }
        assert_eq!(contents(&*store), contents(&model));
        for (step, image, expected) in durable {
            assert!(is_sound(&image), "round {round}, after a power failure at step {step}");
            let (_, store) = mount(&image);
            assert_eq!(contents(&*store), expected, "round {round}, after a power failure at step {step}");
        }
        round += 1;
    }
}

/// Returns a hash of the store's content without the objects that fill the target.
fn contents(store: &dyn ObjectStore) -> u64 {
    let all = run(store.collections()).unwrap();
    let others: Vec<CollectionId> = all.into_iter().filter(|c| *c != cid("full")).collect();
    run(digest_of(store, &others)).unwrap()
}

#[test]
fn a_full_target_accepts_reads_omap_entries_and_removals() {
    let image = {
        let (drive, store) = mount(&fresh(8 << 20));
        fill(&*store, 0);
        run(store.umount()).unwrap();
        run(async { drive.image() })
    };
    let (_, store) = mount(&image);
    let c = cid("full");
    let (objects, more) = run(store.list(&c, None, 10_000)).unwrap();
    assert!(!more && objects.len() > 5);
    for object in &objects {
        run(store.read(&c, object, 0, 1 << 20, None)).unwrap().verify().unwrap();
    }
    let entries = vec![(Bytes::from_static(b"k"), Bytes::from_static(b"v"))];
    let note = Transaction::new(c.clone()).with(Op::OmapSet { oid: objects[0].clone(), entries });
    run(store.queue_transaction(note)).unwrap();
    for object in objects {
        run(store.queue_transaction(Transaction::new(c.clone()).with(Op::Remove { oid: object }))).unwrap();
    }
}

/// Allocates every block, including those of the reserve. Targets could be filled like this before
/// the reserve existed.
fn fill_without_reserve(store: &dyn ObjectStore) {
    fill(store, 0);
    let c = cid("full");
    let mut n = 0;
    while run(store.queue_transaction(put(&c, &format!("r{n:04}"), 1).from_reserve())).is_ok() {
        n += 1;
    }
    assert!(n >= 16, "the reserve had only {n} blocks");
}

fn cut(c: &CollectionId, name: &str, size: u64) -> Transaction {
    Transaction::new(c.clone()).with(Op::Truncate { oid: oid(name), size }).from_reserve()
}

fn is_full(result: &Result<(), StoreError>, full: Area) -> bool {
    matches!(result, Err(StoreError::NoSpace { area, .. }) if *area == full)
}

#[test]
fn transactions_can_use_the_reserve_of_a_full_target_even_after_a_restart() {
    let (drive, store) = mount(&fresh(12 << 20));
    create(&*store, &["c"]);
    let c = cid("c");
    run(store.queue_transaction(put(&c, "old", 3))).unwrap();
    fill(&*store, 0);
    let (mut drive, mut store) = (drive, store);
    for round in 0..3u64 {
        let refused = run(store.queue_transaction(put(&c, "new", 1)));
        assert!(is_full(&refused, Area::Data), "round {round}: {refused:?}");
        assert!(run(store.stage(1)).is_err(), "a stage must not use the reserve");
        for n in 0..50 {
            let write = Transaction::new(c.clone())
                .with(Op::Truncate { oid: oid("record"), size: 0 })
                .with(write(&oid("record"), 0, pattern(n, 9000)))
                .from_reserve();
            run(store.queue_transaction(write)).unwrap();
        }
        let size = 3 * BLOCK as u64 - 1000 * (round + 1);
        run(store.queue_transaction(cut(&c, "old", size))).unwrap();
        let read = run(store.read(&c, &oid("old"), 0, 1 << 20, None)).unwrap();
        read.verify().unwrap();
        assert_eq!(read.contiguous(), pattern(3, 3 * BLOCK).slice(..size as usize));
        if round == 0 {
            run(store.umount()).unwrap();
        }
        let image = after_power_failure(&drive);
        assert!(is_sound(&image));
        (drive, store) = mount(&image);
    }
}

#[test]
fn a_target_without_any_free_block_can_be_mounted_read_and_emptied() {
    let image = {
        let (drive, store) = mount(&fresh(12 << 20));
        create(&*store, &["c"]);
        run(store.queue_transaction(put(&cid("c"), "o", 3))).unwrap();
        fill_without_reserve(&*store);
        run(store.umount()).unwrap();
        run(async { drive.image() })
    };
    let (_, store) = mount(&image);
    let c = cid("c");
    assert_eq!(run(store.space()).unwrap().free, 0);
    // Placement groups undo changes with ops that need no free block. Such ops share whole blocks
    // and write zeros over zeros.
    let keep = Transaction::new(c.clone())
        .with(Op::CloneRange {
            src: oid("o"),
            dst: oid("kept"),
            src_offset: 0,
            len: 3 * BLOCK as u64,
            dst_offset: 0,
        })
        .with(Op::Truncate { oid: oid("kept"), size: 2 * BLOCK as u64 });
    run(store.queue_transaction(keep.from_reserve())).unwrap();
    let refused = run(store.queue_transaction(cut(&c, "o", 5000)));
    assert!(
        is_full(&refused, Area::Data),
        "the truncation needs a free block for the rest of a block: {refused:?}"
    );
    let entries = vec![(Bytes::from_static(b"map"), pattern(1, 5000))];
    let note = Transaction::new(c.clone()).with(Op::OmapSet { oid: oid("map"), entries }).from_reserve();
    run(store.queue_transaction(note)).unwrap();
    let (objects, _) = run(store.list(&cid("full"), None, 10_000)).unwrap();
    for object in objects {
        run(store.read(&cid("full"), &object, 0, 1 << 20, None)).unwrap().verify().unwrap();
        let gone = Transaction::new(cid("full")).with(Op::Remove { oid: object });
        run(store.queue_transaction(gone)).unwrap();
    }
    run(store.queue_transaction(cut(&c, "o", 5000))).unwrap();
    run(store.queue_transaction(put(&c, "new", 100))).unwrap();
}

#[test]
fn a_write_that_changes_nothing_needs_no_free_block() {
    let (_, store) = mount(&fresh(12 << 20));
    create(&*store, &["c"]);
    let c = cid("c");
    run(store.queue_transaction(put(&c, "o", 2))).unwrap();
    run(store.queue_transaction(cut(&c, "o", 5000))).unwrap();
    fill_without_reserve(&*store);
    let longer = Op::Truncate { oid: oid("o"), size: 2 * BLOCK as u64 };
    run(store.queue_transaction(Transaction::new(c.clone()).with(longer))).unwrap();
    run(store.queue_transaction(cut(&c, "o", 5000))).unwrap();
    let read = run(store.read(&c, &oid("o"), 0, 1 << 20, None)).unwrap();
    read.verify().unwrap();
    assert_eq!(read.contiguous(), pattern(2, 2 * BLOCK).slice(..5000));
}

#[test]
fn a_target_with_a_full_index_accepts_changes_that_use_the_reserve() {
    let (drive, store) = mount(&fresh(12 << 20));
    create(&*store, &["c"]);
    let c = cid("c");
    let make = |n: u32| {
        let oid = oid(&format!("{:08x}", n.wrapping_mul(0x9e37_79b1)));
        Transaction::new(c.clone()).with(Op::SetXattrs { oid, xattrs: vec![("x".into(), pattern(1, 3000))] })
    };
    let mut made = 0;
    let refused = loop {
        match run(store.queue_transaction(make(made))) {
            Ok(()) => made += 1,
            refused => break refused,
        }
    };
    assert!(is_full(&refused, Area::Index) && made > 100, "{made} objects, then {refused:?}");
    let (mut drive, mut store) = (drive, store);
    for round in 0..2u64 {
        for n in 0..100 {
            let entries = vec![(Bytes::from(format!("k{}", n % 3)), pattern(n + round, 2000))];
            let note = Op::OmapSet { oid: oid("record"), entries };
            run(store.queue_transaction(Transaction::new(c.clone()).with(note).from_reserve())).unwrap();
        }
        let refused = run(store.queue_transaction(make(made)));
        assert!(is_full(&refused, Area::Index), "{refused:?}");
        (drive, store) = mount(&after_power_failure(&drive));
    }
    let mut removed = 0;
    loop {
        let (objects, more) = run(store.list(&c, None, 10_000)).unwrap();
        for object in objects.into_iter().filter(|object| *object != oid("results")) {
            let note = Op::OmapSet { oid: oid("results"), entries: vec![("k".into(), "v".into())] };
            let gone = Transaction::new(c.clone()).with(Op::Remove { oid: object }).with(note);
            run(store.queue_transaction(gone.from_reserve())).unwrap();
            removed += 1;
        }
        if !more {
            break;
        }
    }
    assert_eq!(removed, made + 1);
    run(store.queue_transaction(make(0))).unwrap();
}

#[test]
fn a_call_fails_if_repeated_checkpoints_make_no_room_in_the_index() {
    const KEYS: usize = 4000;
    let store = mount_stepwise(12 << 20);
    create(&store, &["c", "d"]);
    let (c, d) = (cid("c"), cid("d"));
    let key = |n: usize| Bytes::from(format!("k{n:04}"));
    let entries = (0..KEYS).map(|n| (key(n), Bytes::from_static(b"v"))).collect();
    let many = Transaction::new(d.clone()).with(Op::OmapSet { oid: oid("many"), entries });
    run(store.queue_transaction(many)).unwrap();
    let notes = |n: usize, count: u64| {
        let entries = (0..count).map(|i| (key(i as usize), pattern(i, 16_000))).collect();
        Transaction::new(c.clone()).with(Op::OmapSet { oid: oid(&format!("{n:04}")), entries })
    };
    let mut made = 0;
    while run(store.queue_transaction(notes(made, 1))).is_ok() {
        made += 1;
    }
    let remove = |n: usize| {
        let keys = vec![key(n)];
        store.queue_transaction(Transaction::new(d.clone()).with(Op::OmapRemove { oid: oid("many"), keys }))
    };
    let (refused, before) = {
        run(remove(0)).unwrap();
        (store.queue_transaction(notes(made, 10)), store.lock().checkpoints())
    };
    let is_answered = (1..KEYS).any(|n| {
        // Each checkpoint ends with new changes in memory, made since the checkpoint began.
        drop(remove(n));
        store.lock().step();
        store.queue_len() == 0 || store.lock().checkpoints() > before + 100
    });
    let waited = store.lock().checkpoints() - before;
    assert!(is_answered && (2..=100).contains(&waited), "the call waited for {waited} checkpoints");
    let refused = run(refused);
    assert!(is_full(&refused, Area::Index), "{refused:?}");
}

#[test]
fn the_blocks_of_a_stage_are_freed_if_its_caller_stops_waiting() {
    let (_, store) = mount(&fresh(12 << 20));
    create(&*store, &["e"]);
    let e = cid("e");
    run(store.queue_transaction(put(&e, "large", 8))).unwrap();
    fill(&*store, 10);
    let removed = store.queue_transaction(remove(&e, "large"));
    drop(store.stage(15 * BLOCK as u64));
    run(removed).unwrap();
    run(async { tokio::time::sleep(Duration::from_secs(1)).await });
    let space = run(store.space()).unwrap();
    assert_eq!((space.free, space.staged), (18 * BLOCK as u64, 0));
}
