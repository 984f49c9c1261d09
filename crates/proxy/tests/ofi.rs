//! Tests of attachments whose engine is `ofi`. They run over `tcp` on the loopback interface,
//! unless `OUTBOARD_TEST_FABRIC` names another provider and address, e.g. `verbs@192.0.2.1`. The
//! tests check that these attachments behave like attachments with the engine `shm`, also if only
//! the network joins osd and store. They also check the store's new offer after a failure, and the
//! reason that the osd learns if a store cannot offer memory.

mod common;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::fault::{Faults, Site};
use channel::DmaEngine;
use channel::ofi::{OfiHostOptions, OfiOptions};
use common::engine::Unlucky;
use common::load::{
    MIB, check, fault, faulty_node, fired_and_recovered, is_whole, load, put, recovered, survives, watched,
};
use common::{
    Node, Path, by_ofi, child_process, fabric, make_collection, node_of, node_with, offering, ofi_engine,
    options, scaled, target,
};
use outboard_proxy::{
    Attachment, AttachmentOptions, AttachmentStatus, Server, ServerOptions, StoreEndpoint, StoreListener,
};
use store::conformance::{random_operations, run, seed};
use store::{MemStore, ObjectStore};
use wire::OffloadState;

const PATHS: [Path; 2] = [Path::Ofi, Path::OfiTcp];

/// Options with longer time limits, because transfers over an emulated network are slow.
fn patient(faults: &Faults) -> AttachmentOptions {
    AttachmentOptions { overdue: scaled(Duration::from_millis(600)), ..watched(faults) }
}

/// The part of a fault's text that delays a transfer by this time, scaled.
fn late(ms: u64) -> String {
    format!("late={}ms", scaled(Duration::from_millis(ms)).as_millis())
}

async fn every_case(path: Path) {
    // A device pins the memory of a node, so each node ends before the next node starts.
    let current: Mutex<Option<Node>> = Mutex::default();
    let make = || async {
        drop(current.lock().unwrap().take());
        let node = node_of(path, Arc::new(MemStore::new()), options()).await;
        let store = Arc::clone(&node.store);
        *current.lock().unwrap() = Some(node);
        store as Arc<dyn ObjectStore>
    };
    run(make).await;
}

#[tokio::test]
async fn the_conformance_suite_passes_with_a_unix_socket() {
    every_case(Path::Ofi).await;
}

#[tokio::test]
async fn the_conformance_suite_passes_with_a_tcp_socket() {
    every_case(Path::OfiTcp).await;
}

#[tokio::test]
async fn random_operations_match_the_model_with_either_socket() {
    for path in PATHS {
        let node = node_of(path, Arc::new(MemStore::new()), options()).await;
        random_operations(Arc::clone(&node.store), seed(), 1000).await;
        let offload = node.attachment.status().offload;
        assert_eq!((offload.health.failures, offload.fallback_bytes), (0, 0), "{offload:?}");
        assert!(node.attachment.engine().counters().bytes > 0);
    }
}

/// Injects a fault and checks the recovery, with both kinds of control socket.
async fn goes_wrong(text: &str, site: Site) {
    for path in PATHS {
        survives(path, patient(&Faults::default()), text, site).await;
    }
}

#[tokio::test]
async fn dma_recovers_from_a_failed_transfer() {
    goes_wrong("dma.transfer=fail,after=20,count=1", Site::DmaTransfer).await;
}

#[tokio::test]
async fn dma_recovers_from_a_transfer_that_completes_late() {
    goes_wrong(&format!("dma.transfer=stall,{},after=20,count=1", late(1500)), Site::DmaTransfer).await;
}

#[tokio::test]
async fn dma_recovers_from_a_transfer_that_never_completes() {
    goes_wrong("dma.transfer=stall,late=3600000ms,after=20,count=1", Site::DmaTransfer).await;
}

#[tokio::test]
async fn corruption_by_transfers_is_detected_and_dma_recovers() {
    goes_wrong("dma.transfer=corrupt,after=20,count=3", Site::DmaTransfer).await;
}

#[tokio::test]
async fn the_loss_of_a_doorbell_to_the_host_is_detected() {
    goes_wrong("dma.doorbell=drop,after=10,count=1", Site::DmaDoorbell).await;
}

#[tokio::test]
async fn a_failed_device_of_the_store_is_opened_again_in_the_same_attachment() {
    let faults = Faults::default();
    let store = ServerOptions { faults: faults.clone(), ..offering() };
    let osd = patient(&Faults::default());
    let node = node_with(Path::OfiTcp, Arc::new(MemStore::new()), osd, store).await;
    make_collection(&node.store).await;
    for _ in 0..2 {
        faults.clear();
        faults.arm(fault("store.device=fail,after=20,count=1")).unwrap();
        load(&node, 4, fired_and_recovered(&node, &faults, Site::StoreDevice)).await;
    }
    is_whole(&node).await;
}

#[tokio::test]
async fn dma_recovers_from_a_reset_of_the_engine_under_load() {
    for path in PATHS {
        let node = faulty_node(path, patient(&Faults::default())).await;
        for times in 1..=2 {
            let working = load(&node, 4, recovered(times));
            // A reset without transfers in progress only closes the connections, which is not a
            // failure.
            let reset = async {
                while node.attachment.status().offload.health.failures < times {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    node.attachment.engine().reset();
                }
            };
            tokio::join!(working, reset);
        }
        is_whole(&node).await;
    }
}

#[tokio::test]
async fn dma_recovers_from_random_faults_of_every_kind() {
    let faults = Faults::default();
    let node = faulty_node(Path::OfiTcp, patient(&faults)).await;
    for (seed, text) in [
        "dma.transfer=fail,probability=0.01",
        "dma.transfer=stall,late=30ms,probability=0.02",
        "dma.transfer=corrupt,probability=0.01",
        "dma.doorbell=drop,probability=0.01",
        &format!("dma.transfer=stall,{},probability=0.005", late(900)),
    ]
    .into_iter()
    .enumerate()
    {
        faults.arm(fault(&format!("{text},seed={seed}"))).unwrap();
    }
    let operations = load(&node, 8, recovered(4)).await;
    assert!(faults.fired(Site::DmaTransfer) > 3 && operations > 50);
    faults.clear();
    let active = |status: &AttachmentStatus| status.offload.health.state == OffloadState::Active;
    load(&node, 2, active).await;
    is_whole(&node).await;
}

/// Starts a store with these options and attaches an osd to it.
async fn joined(options: ServerOptions, osd: AttachmentOptions) -> (Attachment, Server, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("s");
    let targets = vec![target(Arc::new(MemStore::new()))];
    let server = Server::serve(StoreListener::unix(&at).unwrap(), targets, options).unwrap();
    let attachment = Attachment::connect(StoreEndpoint::Unix(at), osd).await.unwrap();
    (attachment, server, dir)
}

#[tokio::test]
async fn without_an_offer_the_socket_carries_all_data_and_the_status_states_the_reason() {
    let (provider, address) = fabric();
    let ofi = |provider: &str, address| ServerOptions {
        ofi: Some(OfiHostOptions::new(provider, address)),
        ..ServerOptions::default()
    };
    let elsewhere: std::net::SocketAddr = ([192, 0, 2, 77], 0).into();
    let anywhere: std::net::SocketAddr = ([0, 0, 0, 0], 0).into();
    for (options, why) in [
        (ServerOptions::default(), "offers no memory by libfabric"),
        (ofi("another", (address, 0).into()), "configure the same provider"),
        (ofi(&provider, elsewhere), "cannot offer memory"),
        (ofi(&provider, anywhere), "no osd can connect to"),
    ] {
        let (attachment, _server, _dir) = joined(options, by_ofi(common::options())).await;
        let status = attachment.status();
        assert!(!status.by_dma && status.connected);
        assert!(status.why_no_dma.as_ref().is_some_and(|said| said.contains(why)), "{why}: {status:?}");
        let store: Arc<dyn ObjectStore> = attachment.store(0);
        make_collection(&store).await;
        put(&store, 1, 1, MIB).await;
        check(&store, 1, 1, MIB).await;
    }
}

#[tokio::test]
async fn a_store_that_makes_offers_also_serves_engines_on_its_machine() {
    let (attachment, server, dir) = joined(offering(), options()).await;
    assert!(attachment.status().by_dma, "host memory through descriptors");
    drop(attachment);
    while server.status().seats > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let endpoint = StoreEndpoint::Unix(dir.path().join("s"));
    let attachment = Attachment::connect(endpoint, by_ofi(options())).await.unwrap();
    assert!(attachment.status().by_dma, "host memory through an offer");
}

/// Numbers of open descriptors, of memfd mappings and of threads of this process.
fn held() -> (usize, usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let count = |at: &str| std::fs::read_dir(at).unwrap().count();
    (count("/proc/self/fd"), maps.lines().filter(|l| l.contains("memfd")).count(), count("/proc/self/task"))
}

/// The child process counts descriptors, so it runs no other test.
#[test]
fn ended_attachments_leave_no_descriptors_mappings_or_threads() {
    child_process("child_process_that_ends_attachments");
}

/// Not a test: the child process of [`ended_attachments_leave_no_descriptors_mappings_or_threads`].
#[test]
#[ignore = "runs as a child process of another test"]
fn child_process_that_ends_attachments() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let faults = Faults::default();
        let mut node = faulty_node(Path::Ofi, patient(&faults)).await;
        let mut before = None;
        for round in 0..6 {
            faults.clear();
            faults.arm(fault("dma.transfer=fail,after=5,count=1")).unwrap();
            load(&node, 2, recovered(1)).await;
            node.attachment.close();
            while node.server.status().seats > 0 || node.server.status().leftover_calls > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let options = by_ofi(patient(&faults));
            node.attachment = Attachment::connect(node.endpoint.clone(), options).await.unwrap();
            node.store = node.attachment.store(0);
            // The first rounds create resources that stay, those of the runtime and of libfabric.
            if round == 2 {
                tokio::time::sleep(Duration::from_millis(300)).await;
                before = Some(held());
            }
        }
        let deadline = Instant::now() + scaled(Duration::from_secs(5));
        while Some(held()) != before {
            assert!(
                Instant::now() < deadline,
                "descriptors, mappings and threads were {before:?}, are {:?}",
                held()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
}

#[tokio::test]
async fn dma_is_used_once_the_network_works_even_if_it_was_down_at_first() {
    const ALL: usize = usize::MAX;
    let engine = Unlucky::new(ofi_engine(OfiOptions::default()));
    let engine = Arc::new(Unlucky { refusals: ALL.into(), ..engine });
    let osd_engine = Arc::clone(&engine) as Arc<dyn DmaEngine>;
    let osd = AttachmentOptions { engine: Some(osd_engine), ..patient(&Faults::default()) };
    let (attachment, server, _dir) = joined(offering(), osd).await;
    let health = attachment.status().offload.health;
    assert!(health.last_failure.is_some_and(|why| why.contains("cannot be reached")));
    let store: Arc<dyn ObjectStore> = attachment.store(0);
    make_collection(&store).await;
    let tasks = [1u64, 2, 3].map(|seed| {
        let store = Arc::clone(&store);
        async move {
            put(&store, seed as usize, seed, MIB).await;
            check(&store, seed as usize, seed, MIB).await;
        }
    });
    futures::future::join_all(tasks).await;
    assert_eq!(engine.counters().bytes, 0, "the control socket carries everything");
    // The network refuses one more attempt, and then works. The first attempt was not a probe.
    let refused_probes = ALL - engine.refusals.swap(1, Ordering::Relaxed);
    let deadline = Instant::now() + Duration::from_secs(30);
    while attachment.status().offload.health.state != OffloadState::Active {
        assert!(Instant::now() < deadline, "{:?}", attachment.status());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(attachment.status().offload.health.failed_probes, refused_probes as u64);
    let before = engine.counters().bytes;
    put(&store, 9, 9, MIB).await;
    check(&store, 9, 9, MIB).await;
    assert!(engine.counters().bytes >= before + 2 * MIB as u64, "DMA carries the payload");
    assert_eq!((attachment.status().incarnations, server.status().violations), (1, 0));
}
