//! Load for tests that inject faults, and checks of the state afterwards.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::fault::{Fault, Faults, Site};
use outboard_proxy::{AttachmentOptions, AttachmentStatus};
use store::{MemStore, ObjectStore, Op, StoreCalls, StoreError, WriteSource};
use wire::OffloadState;

use super::{Node, Path, cid, make_collection, node_of, oid, options, pattern, payload, scaled, transaction};

pub const MIB: usize = 1 << 20;

/// Options of an attachment with short time limits for DMA, whose engine injects `faults`.
pub fn watched(faults: &Faults) -> AttachmentOptions {
    AttachmentOptions {
        overdue: Duration::from_millis(250),
        cool_down: Duration::from_millis(100),
        verify_every: 1,
        faults: faults.clone(),
        ..options()
    }
}

pub async fn faulty_node(path: Path, options: AttachmentOptions) -> Node {
    let node = node_of(path, Arc::new(MemStore::new()), options).await;
    make_collection(&node.store).await;
    node
}

pub fn fault(text: &str) -> Fault {
    text.parse().unwrap()
}

pub async fn put(store: &Arc<dyn ObjectStore>, n: usize, seed: u64, len: usize) {
    let payload = payload(seed, len);
    let size = len as u64;
    let op = |source| {
        transaction(Op::Truncate { oid: oid(n), size }).with(Op::Write { oid: oid(n), offset: 0, source })
    };
    if len < 100_000 {
        return store.queue_transaction(op(WriteSource::Inline(payload))).await.unwrap();
    }
    let stage = store.stage(len as u64).await.unwrap();
    store.stage_write(stage, 0, payload).await.unwrap();
    let source = WriteSource::Staged { stage, offset: 0, len: len as u64 };
    let queued = store.queue_transaction(op(source));
    store.stage_release(stage);
    queued.await.unwrap();
}

pub async fn check(store: &Arc<dyn ObjectStore>, n: usize, seed: u64, len: usize) {
    let read = loop {
        match store.read(&cid(), &oid(n), 0, len as u64, None).await {
            // A damaged reply makes the read fail. Repeat the read: no other task changes the
            // object.
            Err(StoreError::Disconnected(_)) => {}
            read => break read.unwrap(),
        }
    };
    read.verify().unwrap();
    assert!(read.contiguous() == pattern(seed, len), "object {n} of {len} bytes");
}

/// Runs several tasks that write objects of many sizes, read them back and compare the bytes, until
/// `until` returns true for the attachment's status. Returns the number of operations.
pub async fn load(
    node: &Node,
    tasks: usize,
    until: impl Fn(&AttachmentStatus) -> bool + Send + Sync + 'static,
) -> u64 {
    let (until, attachment) = (Arc::new(until), node.attachment.clone());
    let tasks: Vec<_> = (0..tasks)
        .map(|task| {
            let (store, until, attachment) =
                (Arc::clone(&node.store), Arc::clone(&until), attachment.clone());
            tokio::spawn(async move {
                let (mut round, mut operations) = (0u64, 0);
                let deadline = Instant::now() + scaled(Duration::from_secs(90));
                while round < 3 || !until(&attachment.status()) {
                    assert!(
                        Instant::now() < deadline,
                        "the awaited status was not reached: {:?}",
                        attachment.status()
                    );
                    let sizes = [3, 5000, 40_000, 70_000, MIB, 3 * MIB + 17];
                    let len = sizes[(round as usize + task) % sizes.len()];
                    let seed = round * 10 + task as u64;
                    put(&store, task, seed, len).await;
                    check(&store, task, seed, len).await;
                    round += 1;
                    operations += 2;
                }
                operations
            })
        })
        .collect();
    let mut operations = 0;
    for task in tasks {
        operations += task.await.unwrap();
    }
    operations
}

/// A condition for [`load`]: DMA has recovered at least `times` times.
pub fn recovered(times: u64) -> impl Fn(&AttachmentStatus) -> bool {
    move |status| status.offload.health.recoveries >= times
}

/// A condition for [`load`]: the fault that is armed at `site` has fired, and DMA has recovered
/// since this call.
pub fn fired_and_recovered(
    node: &Node,
    faults: &Faults,
    site: Site,
) -> impl Fn(&AttachmentStatus) -> bool + use<> {
    let (before, faults) = (node.attachment.status().offload.health.recoveries, faults.clone());
    move |status| {
        let health = &status.offload.health;
        faults.fired(site) > 0 && health.recoveries > before && health.state == OffloadState::Active
    }
}

/// Checks after faults that the attachment never ended, that DMA is in use, and that no memory or
/// stage is left over.
pub async fn is_whole(node: &Node) {
    let status = node.attachment.status();
    assert_eq!((status.incarnations, status.last_failure), (1, None), "the attachment survived the faults");
    // On a busy machine a transfer may be overdue without any fault.
    let deadline = Instant::now() + scaled(Duration::from_secs(20));
    loop {
        let before = node.attachment.engine().counters().bytes;
        put(&node.store, 99, 1, MIB).await;
        check(&node.store, 99, 1, MIB).await;
        if node.attachment.engine().counters().bytes >= before + 2 * MIB as u64 {
            break;
        }
        assert!(Instant::now() < deadline, "DMA is not used again: {:?}", node.attachment.status());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for _ in 0..200 {
        let status = node.attachment.status();
        if node.attachment.pool().free_bytes().0 == 16 * MIB
            && node.server.status().stages == 0
            && status.offload.quarantined_bytes == 0
        {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!(
        "memory or stages are left over: {:?} {:?}",
        node.attachment.status(),
        node.attachment.pool().free_bytes()
    );
}

/// Arms a fault under load and waits for the recovery, twice in a row.
pub async fn survives(path: Path, options: AttachmentOptions, text: &str, site: Site) -> Node {
    let faults = options.faults.clone();
    let node = faulty_node(path, options).await;
    for _ in 0..2 {
        faults.clear();
        faults.arm(fault(text)).unwrap();
        let operations = load(&node, 6, fired_and_recovered(&node, &faults, site)).await;
        assert!(operations > 6, "the load continued during the faults");
    }
    assert!(node.attachment.status().offload.health.failures >= 2);
    is_whole(&node).await;
    node
}
