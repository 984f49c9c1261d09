//! DMA that fails, stalls, corrupts and loses doorbells, under load: the socket takes over at once, keeping what had
//! arrived; nothing acknowledged is lost; memory that a late transfer may touch is in quarantine; a probe brings DMA back.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use base::fault::{Faults, Site};
use base::health::HealthState;
use channel::{ShmEngine, ShmOptions};
use common::engine::Unlucky;
use common::load::{
    self, MIB, check, fault, faulty_node, fired_and_recovered, is_whole, load, put, recovered, watched,
};
use common::{Node, Path, make_collection, oid, payload, transaction};
use outboard_proxy::{AttachmentOptions, Server};
use store::{MemStore, Op, StoreCalls, WriteSource};

async fn faulty(faults: &Faults) -> Node {
    faulty_node(Path::Dma, watched(faults)).await
}

async fn survives(text: &str, site: Site) -> Node {
    load::survives(Path::Dma, watched(&Faults::default()), text, site).await
}

#[tokio::test]
async fn a_transfer_that_fails() {
    let node = survives("dma.transfer=fail,after=20,count=1", Site::DmaTransfer).await;
    assert!(node.attachment.status().offload.fallback_bytes > 0);
}

#[tokio::test]
async fn a_transfer_that_stalls_and_completes_late() {
    survives("dma.transfer=stall,late=600ms,after=20,count=1", Site::DmaTransfer).await;
}

#[tokio::test]
async fn a_transfer_that_never_completes_is_ended_by_a_reset() {
    survives("dma.transfer=stall,late=3600000ms,after=20,count=1", Site::DmaTransfer).await;
}

#[tokio::test]
async fn a_transfer_that_corrupts() {
    // One alone may hit what nobody reads: the rest of the last cell of an entry.
    survives("dma.transfer=corrupt,after=20,count=3", Site::DmaTransfer).await;
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
    // More than the one failure only if the window was used once more.
    is_whole(&node).await;
    let last = node.attachment.status().offload.health.last_failure.unwrap();
    assert!(last.contains("not registered"), "{last}");
    assert_eq!(node.attachment.status().offload.health.failures, 1);
}

#[tokio::test]
async fn a_doorbell_that_does_not_reach_the_host() {
    survives("dma.doorbell=drop,after=10,count=1", Site::DmaDoorbell).await;
}

#[tokio::test]
async fn a_doorbell_that_does_not_reach_the_osd() {
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
async fn segments_that_had_arrived_are_not_sent_again() {
    let faults = Faults::default();
    let node = faulty(&faults).await;
    // One transaction of four segments, of which the third fails; nothing else moves payload.
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
    assert_eq!(after.fallback_bytes, 4 * MIB as u64, "the rest, once");
    check(&node.store, 1, 7, len).await;

    // The same the other way round.
    load(&node, 1, recovered(1)).await;
    let before = node.attachment.status().offload;
    faults.clear();
    // The entry of the request, the fetch of the reply, then the data in segments.
    faults.arm(fault("dma.transfer=fail,after=4,count=1")).unwrap();
    check(&node.store, 1, 7, len).await;
    assert_eq!(faults.fired(Site::DmaTransfer), 1);
    let after = node.attachment.status().offload;
    assert_eq!(after.kept_bytes - before.kept_bytes, 4 * MIB as u64);
    assert_eq!(after.fallback_bytes - before.fallback_bytes, 4 * MIB as u64);
}

#[tokio::test]
async fn a_late_transfer_never_lands_in_memory_that_has_a_new_owner() {
    let faults = Faults::default();
    // Until the cool-down is over, the engine is not reset.
    let options = AttachmentOptions { cool_down: Duration::from_secs(1), ..watched(&faults) };
    let node = faulty_node(Path::Dma, options).await;
    // All payload queues get one stalled transfer each; the requests are answered long before those complete.
    faults.arm(fault("dma.transfer=stall,late=1500ms,count=3")).unwrap();
    let writes: Vec<_> = (0..3).map(|n| put(&node.store, n, n as u64, MIB)).collect();
    futures::future::join_all(writes).await;
    assert!(faults.fired(Site::DmaTransfer) >= 1);
    let status = node.attachment.status();
    assert!(status.offload.quarantined >= MIB, "{status:?}");
    assert!(node.attachment.engine().counters().bytes < MIB as u64, "they have not completed");
    // The rest of the memory is used all the while, by the socket.
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
async fn a_probe_that_fails_leaves_dma_off_for_another_cool_down() {
    let faults = Faults::default();
    let node = faulty(&faults).await;
    // Whatever is tried fails, three times.
    faults.arm(fault("dma.transfer=fail,count=3")).unwrap();
    load(&node, 2, recovered(1)).await;
    let health = node.attachment.status().offload.health;
    assert_eq!(faults.fired(Site::DmaTransfer), 3);
    assert!(health.failed_probes >= 1 && health.failures >= 1, "{health:?}");
    is_whole(&node).await;
}

#[tokio::test]
async fn faults_of_every_kind_at_random() {
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
        s.offload.health.state == HealthState::Active && s.offload.health.failures >= times
    })
    .await;
    is_whole(&node).await;
}

/// Descriptors and mappings of this process.
fn held() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (
        std::fs::read_dir("/proc/self/fd").unwrap().count(),
        maps.lines().filter(|l| l.contains("memfd")).count(),
    )
}

#[test]
fn attachments_cut_off_in_mid_transfer_leak_nothing() {
    // A process of its own, so that other tests' descriptors do not count.
    if std::env::var_os("OUTBOARD_TEST_ALONE").is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["attachments_cut_off_in_mid_transfer_leak_nothing", "--exact", "--test-threads=1"])
            .env("OUTBOARD_TEST_ALONE", "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
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
            while node.server.status().connected || node.server.status().leftover_calls > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            node.attachment =
                outboard_proxy::Attachment::connect(node.endpoint.clone(), watched(&faults)).await.unwrap();
            node.store = node.attachment.store(0);
            faults.clear();
            put(&node.store, 1, 1, MIB).await;
            check(&node.store, 1, 1, MIB).await;
            // The first rounds make what stays: the runtime's own descriptors.
            if round == 2 {
                before = Some(held());
            }
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(Some(held()), before, "descriptors, mappings");
    });
}
