//! Tests of `BlockStore` on real files: conformance, comparison with the reference model, remounts,
//! and targets that must be refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::block::Payload;
use bytes::Bytes;
use outboard_store::conformance::{self, compare, random_operations, random_operations_beside, seed};
use outboard_store::{
    BlockStore, CollectionId, MemStore, MkfsOptions, MountOptions, ObjectId, ObjectStore, Op, StoreCalls,
    StoreError, Transaction, WriteSource, fsck,
};
use tempfile::TempDir;
use tokio::task::{JoinHandle, LocalSet};

const SIZE: u64 = 48 << 20;

struct Target {
    dir: TempDir,
}

impl Target {
    fn new() -> Target {
        let target = Target { dir: tempfile::tempdir().unwrap() };
        let options = MkfsOptions {
            size: Some(SIZE),
            log_bytes: Some(9 << 20),
            index_bytes: Some(16 << 20),
            ..MkfsOptions::default()
        };
        BlockStore::mkfs(&target.path(), &options, |done, all| assert!(done <= all)).unwrap();
        target
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("target")
    }

    fn mount(&self) -> Arc<BlockStore> {
        mount(&self.path()).unwrap()
    }
}

fn options() -> MountOptions {
    MountOptions { buffer_bytes: 4 << 20, ..MountOptions::default() }
}

fn mount(path: &Path) -> Result<Arc<BlockStore>, StoreError> {
    BlockStore::mount(path, &options())
}

/// Mounts a target as a task of this thread's event loop.
fn mount_here(path: &Path) -> (Arc<BlockStore>, JoinHandle<()>) {
    let (store, driver) = BlockStore::mount_driven(path, &options()).unwrap();
    (store, tokio::task::spawn_local(driver.run()))
}

#[tokio::test]
async fn block_store_passes_the_conformance_suite() {
    let targets = std::sync::Mutex::new(Vec::new());
    conformance::run(|| async {
        let target = Target::new();
        let store = target.mount();
        targets.lock().unwrap().push(target);
        store as Arc<dyn ObjectStore>
    })
    .await;
}

#[tokio::test]
async fn block_store_behaves_like_the_reference_model() {
    let target = Target::new();
    random_operations(target.mount(), seed(), 1500).await;
}

#[tokio::test]
async fn a_store_driven_by_the_callers_thread_passes_the_conformance_suite() {
    let mounted = std::cell::RefCell::new(Vec::new());
    let run = conformance::run(|| async {
        let target = Target::new();
        let (store, task) = mount_here(&target.path());
        mounted.borrow_mut().push((target, task));
        store as Arc<dyn ObjectStore>
    });
    LocalSet::new().run_until(run).await;
}

#[tokio::test]
async fn a_store_driven_by_the_callers_thread_behaves_like_the_reference_model() {
    let run = async {
        let (target, model, seed) = (Target::new(), MemStore::new(), seed());
        for round in 0..4 {
            let (store, task) = mount_here(&target.path());
            compare(&*store, &model).await;
            random_operations_beside(store.clone(), &model, seed.wrapping_add(round), 300).await;
            if round % 2 == 0 {
                store.umount().await.unwrap();
            } else {
                drop(store);
            }
            // An unmount and a drop of the handle both end the task. Afterwards the target can be
            // mounted again.
            task.await.unwrap();
        }
    };
    LocalSet::new().run_until(run).await;
}

/// Calls from other threads wake the thread that runs the target.
#[tokio::test]
async fn a_store_driven_by_another_thread_behaves_like_the_reference_model() {
    let target = Target::new();
    let (store, driver) = BlockStore::mount_driven(&target.path(), &options()).unwrap();
    let other = std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(driver.run());
    });
    random_operations(store.clone(), seed(), 1500).await;
    store.umount().await.unwrap();
    other.join().unwrap();
}

#[tokio::test]
async fn a_remounted_target_has_all_acknowledged_changes() {
    let (target, model, seed) = (Target::new(), MemStore::new(), seed());
    for round in 0..8 {
        let store = target.mount();
        compare(&*store, &model).await;
        random_operations_beside(store.clone(), &model, seed.wrapping_add(round), 150).await;
        if round % 2 == 0 {
            store.umount().await.unwrap();
            assert!(matches!(store.space().await, Err(StoreError::Disconnected(_))));
        }
    }
}

#[tokio::test]
async fn a_mounted_target_cannot_be_mounted_or_formatted() {
    let target = Target::new();
    let store = target.mount();
    assert!(matches!(mount(&target.path()), Err(StoreError::InUse(_))));
    let remade = BlockStore::mkfs(&target.path(), &MkfsOptions::default(), |_, _| {});
    assert!(matches!(remade, Err(StoreError::InUse(_))));
    drop(store);
    assert!(mount(&target.path()).is_ok());
}

#[tokio::test]
async fn targets_with_a_wrong_uuid_wrong_content_or_too_small_size_are_refused() {
    let target = Target::new();
    let options = MountOptions { expected_uuid: Some(uuid::Uuid::nil()), ..MountOptions::default() };
    assert!(matches!(BlockStore::mount(&target.path(), &options), Err(StoreError::WrongUuid { .. })));
    let other = target.dir.path().join("other");
    std::fs::write(&other, vec![0; 1 << 20]).unwrap();
    assert!(matches!(mount(&other), Err(StoreError::NotATarget(_))));
    std::fs::write(&other, b"short").unwrap();
    assert!(matches!(mount(&other), Err(StoreError::NotATarget(_))));
    assert!(matches!(mount(&target.dir.path().join("none")), Err(StoreError::Io(_))));
    let small = MkfsOptions { size: Some(1 << 20), ..MkfsOptions::default() };
    let refused = BlockStore::mkfs(&target.dir.path().join("small"), &small, |_, _| {});
    assert!(matches!(refused, Err(StoreError::InvalidArgument(_))));
}

#[tokio::test]
async fn readers_and_fsck_detect_a_damaged_extent() {
    let target = Target::new();
    let store = target.mount();
    let (c, o) = (CollectionId::new("c").unwrap(), ObjectId::new("o").unwrap());
    let data = Bytes::from(vec![0x5a; 100_000]);
    let source = WriteSource::Inline(Payload::compute(0, data.clone()));
    let write = Transaction::new(c.clone()).with(Op::CreateCollection).with(Op::Write {
        oid: o.clone(),
        offset: 0,
        source,
    });
    store.queue_transaction(write).await.unwrap();
    store.umount().await.unwrap();
    drop(store);
    let report = fsck(&target.path(), false, &|_, _, _| None, |_, _| {}).unwrap();
    assert!(report.is_clean() && report.was_clean, "{report:?}");
    assert_eq!((report.objects, report.blocks), (1, 25));

    let mut bytes = std::fs::read(target.path()).unwrap();
    let at = bytes.windows(64).position(|w| w == [0x5a; 64]).expect("the object's data");
    bytes[at + 5000] ^= 4;
    std::fs::write(target.path(), bytes).unwrap();
    let report = fsck(&target.path(), true, &|_, _, _| None, |_, _| {}).unwrap();
    assert_eq!((report.problem_count, report.is_clean()), (1, false), "{report:?}");
    assert!(report.problems[0].what.contains("at 4096"), "{report:?}");

    let store = target.mount();
    let read = store.read(&c, &o, 0, 100_000, None).await.unwrap();
    assert_eq!(read.verify().unwrap_err().offset, 4096);
    let merge = Op::Write {
        oid: o.clone(),
        offset: 4100,
        source: WriteSource::Inline(Payload::compute(4100, Bytes::from_static(b"x"))),
    };
    let merged = store.queue_transaction(Transaction::new(c.clone()).with(merge)).await;
    assert!(
        matches!(merged, Err(StoreError::Corrupt { .. })),
        "a damaged block must not get a new checksum: {merged:?}"
    );
    let other = store.read(&c, &o, 8192, 4096, None).await.unwrap();
    assert!(other.verify().is_ok(), "other blocks are not affected");
}

/// Applies a transaction for each of `numbers`, 200 at a time. Returns the numbers whose
/// transactions had enough space.
async fn apply_many(
    store: &BlockStore,
    numbers: impl Iterator<Item = u32>,
    transaction: impl Fn(u32) -> Transaction,
) -> Vec<u32> {
    let numbers: Vec<u32> = numbers.collect();
    let mut done = Vec::new();
    for some in numbers.chunks(200) {
        let results =
            futures::future::join_all(some.iter().map(|n| store.queue_transaction(transaction(*n)))).await;
        for (n, result) in some.iter().zip(results) {
            match result {
                Ok(()) => done.push(*n),
                Err(StoreError::NoSpace { .. }) => {}
                Err(e) => panic!("object {n}: {e}"),
            }
        }
    }
    done
}

#[tokio::test]
async fn a_full_index_refuses_new_objects_and_keeps_the_existing_objects() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("target");
    let options = MkfsOptions { size: Some(16 << 20), ..MkfsOptions::default() };
    BlockStore::mkfs(&path, &options, |_, _| {}).unwrap();
    let c = CollectionId::new("c").unwrap();
    let log = ObjectId::new("log").unwrap();
    // Objects that are created one after the other are far apart in the index, so every change
    // concerns a different page.
    let oid =
        |n: u32| ObjectId::new(format!("{:08x}-{}", n.wrapping_mul(0x9e37_79b1), "n".repeat(80))).unwrap();
    let note =
        |n: u32| Op::OmapSet { oid: log.clone(), entries: vec![("last".into(), vec![n as u8; 32].into())] };
    let make = |n: u32| {
        let value = Bytes::from(vec![n as u8; 120]);
        Transaction::new(c.clone())
            .with(Op::CreateExclusive { oid: oid(n) })
            .with(Op::SetXattrs { oid: oid(n), xattrs: vec![("meta".into(), value)] })
            .with(note(n))
    };
    let remove = |n: u32| Transaction::new(c.clone()).with(Op::Remove { oid: oid(n) }).with(note(n));

    let store = mount(&path).unwrap();
    store.queue_transaction(Transaction::new(c.clone()).with(Op::CreateCollection)).await.unwrap();
    let made = apply_many(&store, 0..20_000, make).await;
    assert!((500..20_000).contains(&made.len()), "the index was filled: {} objects", made.len());
    drop(store);
    let store = mount(&path).expect("a full target is mounted after a crash");
    for n in &made {
        assert_eq!(store.get_xattr(&c, &oid(*n), "meta".into()).await.unwrap(), vec![*n as u8; 120]);
    }
    let removed = apply_many(&store, made.iter().copied().step_by(2), remove).await;
    assert_eq!(removed.len(), made.len().div_ceil(2), "objects can be removed when no object can be created");
    store.umount().await.unwrap();
    drop(store);
    let report = fsck(&path, false, &|_, _, _| None, |_, _| {}).unwrap();
    assert!(report.is_clean(), "{report:?}");
    let store = mount(&path).unwrap();
    let again = apply_many(&store, removed.iter().copied().take(100), make).await;
    assert_eq!(again.len(), 100, "removals make room for new objects");
    store.umount().await.unwrap();
}
