//! Tests of DMA that fails, stalls, corrupts data and loses doorbells, under load. The control
//! socket takes over at once, and data that had arrived is not sent again. No acknowledged change
//! is lost. Memory that a late transfer may access is in quarantine. After a successful probe, DMA
//! is used again.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use base::block::Payload;
use base::fault::{Faults, Site};
use channel::{ShmEngine, ShmOptions};
use common::engine::Unlucky;
use common::load::{
    self, MIB, check, fault, faulty_node, fired_and_recovered, is_whole, load, put, recovered, watched,
};
use common::{Node, Path, child_process, cid, make_collection, node_of, oid, payload, transaction};
use outboard_proxy::{AttachmentOptions, Server};
use store::{MemStore, Op, StoreCalls, StoreError, WriteSource};
use wire::OffloadState;

async fn faulty(faults: &Faults) -> Node {
    faulty_node(Path::Dma, watched(faults)).await
}

async fn survives(text: &str, site: Site) -> Node {
    load::survives(Path::Dma, watched(&Faults::default()), text, site).await
}

#[tokio::test]
async fn a_failed_transfer_continues_over_the_socket_and_dma_recovers() {
    let node = survives("dma.transfer=fail,after=20,count=1", Site::DmaTransfer).await;
    assert!(node.attachment.status().offload.fallback_bytes > 0);
}

#[tokio::test]
async fn dma_recovers_from_a_transfer_that_completes_late() {
    survives("dma.transfer=stall,late=600ms,after=20,count=1", Site::DmaTransfer).await;
}

#[tokio::test]
async fn a_reset_ends_a_transfer_that_never_completes() {
    survives("dma.transfer=stall,late=3600000ms,after=20,count=1", Site::DmaTransfer).await;
}

#[tokio::test]
async fn corruption_by_transfers_is_detected_and_dma_recovers() {
    // Corrupt three transfers, because one corruption may hit unused bytes at the end of an entry's
    // last cell.
    survives("dma.transfer=corrupt,after=20,count=3", Site::DmaTransfer).await;
}

/// The faults are those of the engine alone, so the attachment verifies as much as in production.
#[tokio::test]
async fn all_payload_that_flips_in_shared_memory_is_detected_with_default_options() {
    let faults = Faults::default();
    let engine = ShmEngine::start(ShmOptions { faults: faults.clone(), ..ShmOptions::default() }).unwrap();
    let engine = Some(engine as _);
    let options = AttachmentOptions { engine, cool_down: Duration::ZERO, ..common::options() };
    let node = faulty_node(Path::Dma, options).await;
    let mut fired = 0;
    for (n, len) in (0..24).flat_map(|n| [(2 * n, 8 * MIB), (2 * n + 1, 80_000)]) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while node.attachment.status().offload.health.state != OffloadState::Active {
            assert!(Instant::now() < deadline, "DMA recovers: {:?}", node.attachment.status());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        faults.arm(fault(&format!("dma.transfer=corrupt,after={},count=1", n % 5))).unwrap();
        put(&node.store, n, n as u64, len).await;
        fired += faults.fired(Site::DmaTransfer);
        faults.clear();
        check(&node.store, n, n as u64, len).await;
        node.store.queue_transaction(transaction(Op::Remove { oid: oid(n) })).await.unwrap();
    }
    assert!(fired > 24, "the fault fired {fired} times");
    assert_eq!(node.attachment.status().incarnations, 1);
}

#[tokio::test]
async fn payload_that_was_damaged_before_it_was_sent_is_refused() {
    for path in [Path::Dma, Path::Ofi, Path::Unix, Path::Tcp] {
        let node = node_of(path, Arc::new(MemStore::new()), common::options()).await;
        make_collection(&node.store).await;
        let damaged = |len: usize| {
            let (data, checksums) = payload(1, len).into_parts();
            let mut data = data.to_vec();
            data[len / 2] ^= 16;
            Payload::from_parts(0, data.into(), checksums).unwrap()
        };
        let write = |source| transaction(Op::Write { oid: oid(0), offset: 0, source });
        let bad = |e: &store::Result<()>| matches!(e, Err(StoreError::BadPayload(_)));
        // 5000 bytes are part of the entry, and 5 MiB are several segments. The later transactions
        // follow the refused transaction.
        for len in [5000, 100_000, 5 * MIB] {
            let refused = node.store.queue_transaction(write(WriteSource::Inline(damaged(len))));
            let next = put(&node.store, 1, 7, len);
            let (refused, ()) = futures::join!(refused, next);
            assert!(bad(&refused), "{path:?}: {refused:?}");
            check(&node.store, 1, 7, len).await;

            let stage = node.store.stage(len as u64).await.unwrap();
            let staged = node.store.stage_write(stage, 0, damaged(len));
            let source = WriteSource::Staged { stage, offset: 0, len: len as u64 };
            let named = node.store.queue_transaction(write(source));
            let (staged, named) = futures::join!(staged, named);
            assert!(bad(&staged) && named.is_err(), "{path:?}: {staged:?} {named:?}");
            node.store.stage_release(stage);
        }
        let found = node.store.stat(&cid(), &oid(0)).await;
        assert!(matches!(found, Err(StoreError::NoSuchObject(_))), "{found:?}");
        assert_eq!(node.attachment.status().incarnations, 1);
        if path.by_dma() {
            is_whole(&node).await;
        }
    }
}

#[tokio::test]
async fn a_window_that_could_not_be_mapped_is_opened_again() {
    let engine = Arc::new(Unlucky {
        bad_windows: 1.into(),
        ..Unlucky::new(ShmEngine::start(ShmOptions::default()).unwrap())
    });
    let options = AttachmentOptions { engine: Some(engine.clone()), ..watched(&Faults::default()) };
    let node = faulty_node(Path::Dma, options).await;
    load(&node, 4, recovered(1)).await;
    assert_eq!(engine.bad_windows.load(Ordering::Relaxed), 0);
    // A second failure would show that the broken window was used again.
    is_whole(&node).await;
    let last = node.attachment.status().offload.health.last_failure.unwrap();
    assert!(last.contains("not registered"), "{last}");
    assert_eq!(node.attachment.status().offload.health.failures, 1);
}

#[tokio::test]
async fn the_loss_of_a_doorbell_to_the_host_is_detected() {
    survives("dma.doorbell=drop,after=10,count=1", Site::DmaDoorbell).await;
}

#[tokio::test]
async fn the_loss_of_a_doorbell_to_the_osd_is_detected() {
    let (here, there) = (Faults::default(), Faults::default());
    let mut node = faulty(&here).await;
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("s");
    let listener = outboard_proxy::StoreListener::unix(&at).unwrap();
    let targets = vec![common::target(Arc::new(MemStore::new()))];
    let options = outboard_proxy::ServerOptions { faults: there.clone(), ..Default::default() };
    node.server = Server::serve(listener, targets, options).unwrap();
    node.attachment =
        outboard_proxy::Attachment::connect(outboard_proxy::StoreEndpoint::Unix(at), watched(&here))
            .await
            .unwrap();
    node.store = node.attachment.store(0);
    make_collection(&node.store).await;
    for _ in 0..2 {
        there.clear();
        there.arm(fault("store.doorbell=drop,after=10,count=1")).unwrap();
        load(&node, 6, fired_and_recovered(&node, &there, Site::StoreDoorbell)).await;
    }
    is_whole(&node).await;
}

#[tokio::test]
async fn segments_that_arrived_before_a_failure_are_not_sent_again() {
    let faults = Faults::default();
    let node = faulty(&faults).await;
    // The third of the four segments of a transaction fails. No other call moves payload.
    put(&node.store, 0, 1, 10).await;
    let before = node.attachment.status().offload;
    assert_eq!((before.kept_bytes, before.fallback_bytes), (0, 0));
    faults.arm(fault("dma.transfer=fail,after=2,count=1")).unwrap();
    let len = 8 * MIB;
    let source = WriteSource::Inline(payload(7, len));
    node.store.queue_transaction(transaction(Op::Write { oid: oid(1), offset: 0, source })).await.unwrap();
    assert_eq!(faults.fired(Site::DmaTransfer), 1);
    let after = node.attachment.status().offload;
    // Two segments of 2 MiB had arrived.
    assert_eq!(after.kept_bytes, 4 * MIB as u64);
    assert_eq!(after.fallback_bytes, 4 * MIB as u64, "the rest is sent once");
    check(&node.store, 1, 7, len).await;

    // Check the same for a read.
    load(&node, 1, recovered(1)).await;
    let before = node.attachment.status().offload;
    faults.clear();
    // The transfers are the request's entry, the fetch of the reply, and then the segments of the
    // data.
    faults.arm(fault("dma.transfer=fail,after=4,count=1")).unwrap();
    check(&node.store, 1, 7, len).await;
    assert_eq!(faults.fired(Site::DmaTransfer), 1);
    let after = node.attachment.status().offload;
    assert_eq!(after.kept_bytes - before.kept_bytes, 4 * MIB as u64);
    assert_eq!(after.fallback_bytes - before.fallback_bytes, 4 * MIB as u64);
}

#[tokio::test]
async fn a_late_transfer_never_writes_to_memory_with_a_new_owner() {
    let faults = Faults::default();
    // The engine is not reset before the end of the cool-down.
    let options = AttachmentOptions { cool_down: Duration::from_secs(1), ..watched(&faults) };
    let node = faulty_node(Path::Dma, options).await;
    // Stall one transfer of each write. The requests are answered long before these transfers
    // complete.
    faults.arm(fault("dma.transfer=stall,late=1500ms,count=3")).unwrap();
    let writes: Vec<_> = (0..3).map(|n| put(&node.store, n, n as u64, MIB)).collect();
    futures::future::join_all(writes).await;
    assert!(faults.fired(Site::DmaTransfer) >= 1);
    let status = node.attachment.status();
    assert!(status.offload.quarantined_bytes >= MIB as u64, "{status:?}");
    assert!(
        node.attachment.engine().counters().bytes < MIB as u64,
        "the stalled transfers have not completed"
    );
    // Meanwhile, requests on the control socket use the rest of host memory.
    let operations = load(&node, 4, recovered(1)).await;
    assert!(operations > 10);
    is_whole(&node).await;
    for n in 0..3 {
        let seed = n as u64;
        put(&node.store, n + 50, seed, MIB).await;
        check(&node.store, n + 50, seed, MIB).await;
    }
}

#[tokio::test]
async fn a_failed_probe_leaves_dma_unused_for_another_cool_down() {
    let faults = Faults::default();
    let node = faulty(&faults).await;
    // The next three transfers fail, including those of probes.
    faults.arm(fault("dma.transfer=fail,count=3")).unwrap();
    load(&node, 2, recovered(1)).await;
    let health = node.attachment.status().offload.health;
    assert_eq!(faults.fired(Site::DmaTransfer), 3);
    assert!(health.failed_probes >= 1 && health.failures >= 1, "{health:?}");
    is_whole(&node).await;
}

#[tokio::test]
async fn dma_recovers_from_random_faults_of_every_kind() {
    let faults = Faults::default();
    let node = faulty(&faults).await;
    for (seed, text) in [
        "dma.transfer=fail,probability=0.02",
        "dma.transfer=stall,late=30ms,probability=0.02",
        "dma.transfer=corrupt,probability=0.02",
        "dma.doorbell=drop,probability=0.02",
        "dma.transfer=stall,late=350ms,probability=0.01",
    ]
    .into_iter()
    .enumerate()
    {
        faults.arm(fault(&format!("{text},seed={seed}"))).unwrap();
    }
    let operations = load(&node, 8, recovered(4)).await;
    assert!(faults.fired(Site::DmaTransfer) > 3, "the faults fired");
    assert!(operations > 50);
    faults.clear();
    let times = node.attachment.status().offload.health.failures;
    load(&node, 2, move |s| {
        s.offload.health.state == OffloadState::Active && s.offload.health.failures >= times
    })
    .await;
    is_whole(&node).await;
}

/// Numbers of open descriptors and of memfd mappings of this process.
fn held() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (
        std::fs::read_dir("/proc/self/fd").unwrap().count(),
        maps.lines().filter(|l| l.contains("memfd")).count(),
    )
}

/// The child process counts descriptors, so it runs no other test.
#[test]
fn attachments_that_are_closed_during_transfers_leak_nothing() {
    child_process("child_process_that_closes_attachments");
}

/// Not a test: the child process of [`attachments_that_are_closed_during_transfers_leak_nothing`].
#[test]
#[ignore = "runs as a child process of another test"]
fn child_process_that_closes_attachments() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let faults = Faults::default();
        let mut node = faulty(&faults).await;
        let mut before = None;
        for round in 0..6 {
            faults.clear();
            faults.arm(fault("dma.transfer=stall,late=60ms,after=1,count=8")).unwrap();
            let writes: Vec<_> = (0..8)
                .map(|n| {
                    let store = Arc::clone(&node.store);
                    let source = WriteSource::Inline(payload(n, MIB));
                    let op = Op::Write { oid: oid(n as usize), offset: 0, source };
                    store.queue_transaction(transaction(op))
                })
                .collect();
            let deadline = Instant::now() + Duration::from_secs(5);
            while faults.fired(Site::DmaTransfer) == 0 && Instant::now() < deadline {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            node.attachment.close();
            futures::future::join_all(writes).await;
            assert!(faults.fired(Site::DmaTransfer) > 0, "the fault fired");
            while node.server.status().seats > 0 || node.server.status().leftover_calls > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            node.attachment =
                outboard_proxy::Attachment::connect(node.endpoint.clone(), watched(&faults)).await.unwrap();
            node.store = node.attachment.store(0);
            faults.clear();
            put(&node.store, 1, 1, MIB).await;
            check(&node.store, 1, 1, MIB).await;
            // The first rounds create descriptors that stay open, such as those of the runtime.
            if round == 2 {
                before = Some(held());
            }
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(Some(held()), before, "open descriptors and mappings");
    });
}
