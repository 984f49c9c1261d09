//! Checks that `ProxyStore` behaves like every other `ObjectStore`, on every payload path.

mod common;

use std::sync::{Arc, Mutex};

use base::fault::{Faults, Site};
use common::load::{fault, watched};
use common::{Node, Path, node, node_of, on_drive, options};
use store::conformance::{random_operations, run, seed};
use store::{MemStore, ObjectStore, StoreCalls};

async fn every_case(path: Path) {
    let nodes: Mutex<Vec<Node>> = Mutex::default();
    let make = || async {
        let node = node(path).await;
        let store = Arc::clone(&node.store);
        nodes.lock().unwrap().push(node);
        store as Arc<dyn ObjectStore>
    };
    run(make).await;
}

async fn like_the_model(path: Path) {
    let node = node(path).await;
    random_operations(Arc::clone(&node.store), seed(), 1500).await;
}

#[tokio::test]
async fn the_conformance_suite_passes_by_dma() {
    every_case(Path::Dma).await;
}

#[tokio::test]
async fn the_conformance_suite_passes_over_a_unix_socket() {
    every_case(Path::Unix).await;
}

#[tokio::test]
async fn the_conformance_suite_passes_over_tcp() {
    every_case(Path::Tcp).await;
}

#[tokio::test]
async fn random_operations_by_dma_match_the_model() {
    like_the_model(Path::Dma).await;
}

#[tokio::test]
async fn random_operations_over_a_socket_match_the_model() {
    like_the_model(Path::Unix).await;
}

#[tokio::test]
async fn the_conformance_suite_passes_on_a_drive() {
    let nodes: Mutex<Vec<(Node, tempfile::TempDir)>> = Mutex::default();
    let make = || async {
        let dir = tempfile::tempdir().unwrap();
        let node = node_of(Path::Dma, on_drive(&dir.path().join("target")), options()).await;
        let store = Arc::clone(&node.store);
        nodes.lock().unwrap().push((node, dir));
        store as Arc<dyn ObjectStore>
    };
    run(make).await;
}

#[tokio::test]
async fn random_operations_on_a_drive_match_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let node = node_of(Path::Dma, on_drive(&dir.path().join("target")), options()).await;
    random_operations(Arc::clone(&node.store), seed(), 800).await;
    node.store.umount().await.unwrap();
}

/// Faults of DMA do not change the results of operations.
#[tokio::test]
async fn random_operations_match_the_model_while_dma_fails() {
    let faults = Faults::default();
    let node = node_of(Path::Dma, Arc::new(MemStore::new()), watched(&faults)).await;
    for (n, text) in [
        "dma.transfer=fail,probability=0.005",
        "dma.transfer=stall,late=30ms,probability=0.005",
        "dma.transfer=corrupt,probability=0.005",
        "dma.doorbell=drop,probability=0.002",
    ]
    .into_iter()
    .enumerate()
    {
        faults.arm(fault(&format!("{text},seed={}", seed().wrapping_add(n as u64)))).unwrap();
    }
    random_operations(Arc::clone(&node.store), seed(), 800).await;
    assert!(faults.fired(Site::DmaTransfer) > 0, "the faults fired");
    let status = node.attachment.status();
    assert!(status.offload.health.failures > 0 && status.incarnations == 1, "{status:?}");
}
