//! `BlockStore` on real files: conformance, the model, remounts, and targets that must be refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use outboard_store::conformance::{self, compare, random_operations, random_operations_beside, seed};
use outboard_store::{BlockStore, MemStore, MkfsOptions, MountOptions, ObjectStore, StoreError};
use tempfile::TempDir;

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

fn mount(path: &Path) -> Result<Arc<BlockStore>, StoreError> {
    BlockStore::mount(path, &MountOptions { buffer_bytes: 4 << 20, ..MountOptions::default() })
}

#[tokio::test]
async fn conforms() {
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
async fn equals_the_model() {
    let target = Target::new();
    random_operations(target.mount(), seed(), 1500).await;
}

#[tokio::test]
async fn remounts_have_everything() {
    let (target, model, seed) = (Target::new(), MemStore::new(), seed());
    for round in 0..8 {
        let store = target.mount();
        compare(&*store, &model).await;
        random_operations_beside(store.clone(), &model, seed.wrapping_add(round), 150).await;
        if round % 2 == 0 {
            store.umount().await.unwrap();
            assert!(matches!(store.statfs().await, Err(StoreError::Disconnected(_))));
        }
    }
}

#[tokio::test]
async fn a_target_has_one_user() {
    let target = Target::new();
    let store = target.mount();
    assert!(matches!(mount(&target.path()), Err(StoreError::InUse(_))));
    let remade = BlockStore::mkfs(&target.path(), &MkfsOptions::default(), |_, _| {});
    assert!(matches!(remade, Err(StoreError::InUse(_))));
    drop(store);
    assert!(mount(&target.path()).is_ok());
}

#[tokio::test]
async fn wrong_targets_are_refused() {
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
