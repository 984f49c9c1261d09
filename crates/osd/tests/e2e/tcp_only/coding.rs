//! Tests of large writes to erasure-coded pools, with parity computed at each coding place.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::BoxFuture;
use base::fault::Faults;
use bytes::Bytes;
use client::{Client, CodingStatus, Pool};
use ec::offload::accelerator::{self, AcceleratorOptions};
use ec::offload::batch::EngineRate;
use ec::offload::host_load::LoadCounters;
use osd::{CodingConfig, OsdConfig, StripesAt};
use store::StoreFuture;
use store::stripes::{
    Coded, EngineOptions, Engines, HostReading, LocalStoreSet, StoreSet, StripeError, StripeWrite,
    TargetTransaction,
};
use wire::CodingOffload;

use crate::common::{Node, data};
use crate::redundancy::{config, redundancy, wait_until_whole};

const MIB: usize = 1 << 20;

/// Creates a node whose emulated accelerator computes as fast as this machine can.
async fn node(mode: &str, offload: CodingOffload, faults: &str) -> (Node, Client, Pool) {
    node_with(mode, offload, faults, Faults::default()).await
}

/// Like [`node`], with other faults of the accelerator.
async fn node_with(
    mode: &str,
    offload: CodingOffload,
    faults: &str,
    of_accelerator: Faults,
) -> (Node, Client, Pool) {
    let options = AcceleratorOptions::new(EngineRate::paper(1e12));
    let accelerator = accelerator::start(AcceleratorOptions { faults: of_accelerator, ..options }).unwrap();
    let engines = Arc::new(Engines::start(EngineOptions::default(), Some(accelerator)).unwrap());
    let coding = CodingConfig {
        mode: mode.parse().unwrap(),
        offload: Some(offload),
        stripes: StripesAt::Here(Some(engines)),
        cool_down: Duration::from_millis(20),
        ..CodingConfig::default()
    };
    if !faults.is_empty() {
        coding.faults.arm(faults.parse().unwrap()).unwrap();
    }
    let redundancy = redundancy("ec:4+2");
    let mut node = Node::of(redundancy.targets(), OsdConfig { coding, ..config() });
    node.restart();
    let client = node.client().await;
    client.create_pool_with("pool", 2, redundancy).await.unwrap();
    let pool = client.pool("pool").unwrap();
    (node, client, pool)
}

/// Writes objects completely and then in part, with data that is staged. Returns their final
/// contents.
async fn write(pool: &Pool, seed: u64) -> Vec<(String, Bytes)> {
    let mut objects = Vec::new();
    for (number, len) in [3 * MIB, 5 * MIB + 17, 9 * MIB + 4096].into_iter().enumerate() {
        let (name, bytes) = (format!("o{number}"), data(len, seed + number as u64));
        let object = pool.object(&name).unwrap();
        object.put(bytes.clone()).await.unwrap();
        let (at, part) = (12_345, data(2 * MIB + 50_000, seed ^ 0xff));
        object.write(at, part.clone()).await.unwrap();
        let mut now = bytes.to_vec();
        now[at as usize..at as usize + part.len()].copy_from_slice(&part);
        objects.push((name, now.into()));
    }
    objects
}

async fn check(pool: &Pool, objects: &[(String, Bytes)], what: &str) {
    for (name, bytes) in objects {
        let read = pool.object(name).unwrap().get().await.unwrap_or_else(|e| panic!("{name}, {what}: {e}"));
        assert!(read == *bytes, "{name} has other content, {what}");
    }
}

async fn is_whole_without_any_two(node: &Node, client: &Client, pool: &Pool, objects: &[(String, Bytes)]) {
    for (a, b) in [(0, 1), (2, 5), (3, 4)] {
        [a, b].into_iter().for_each(|target| node.stores[target].set_down(true));
        check(pool, objects, &format!("without {a} and {b}")).await;
        for target in [a, b] {
            node.stores[target].set_down(false);
            client.set_target_out(target as u32, false).await.unwrap();
        }
        wait_until_whole(client).await;
    }
}

async fn coding(client: &Client) -> CodingStatus {
    client.status().await.unwrap().coding
}

fn total(sent: client::CodingSent) -> u64 {
    sent.mode + sent.busy + sent.cool_down + sent.probe + sent.explore + sent.only
}

#[tokio::test]
async fn every_coding_place_computes_parity_that_restores_lost_data() {
    for (mode, offload, host, other) in [
        ("latency-sensitive", CodingOffload::Dpu, true, false),
        ("async", CodingOffload::Dpu, false, true),
        ("async", CodingOffload::Accelerator, false, true),
        ("hybrid:1:1", CodingOffload::Accelerator, true, true),
        ("hybrid:auto", CodingOffload::Dpu, true, false),
        ("async", CodingOffload::Both, false, true),
        ("hybrid:1:1", CodingOffload::Both, true, true),
    ] {
        let (node, client, pool) = node(mode, offload, "").await;
        let objects = write(&pool, 1).await;
        check(&pool, &objects, mode).await;
        let coding = coding(&client).await;
        let sent = [coding.host.sent.mode, coding.offload.sent.mode];
        assert!(!host || sent[0] > 0, "{mode}: {coding:?}");
        assert!(!other || sent[1] > 0, "{mode}: {coding:?}");
        // Even if this machine is busy, no rule sends tasks to the host in this mode.
        assert!(mode != "async" || total(coding.host.sent) == 0, "{mode}: {coding:?}");
        assert_eq!((&*coding.mode.to_string(), coding.engine), (mode, Some(offload)));
        is_whole_without_any_two(&node, &client, &pool, &objects).await;
        // With the accelerator alone, the place is the accelerator. The cores reconstruct.
        let reconstructed = self::coding(&client).await.offload.sent.only;
        assert_eq!(reconstructed > 0, offload != CodingOffload::Accelerator, "{mode}, {offload:?}");
    }
}

#[tokio::test]
async fn reads_succeed_although_the_coding_threads_fail_to_reconstruct() {
    let (node, client, pool) = node("latency-sensitive", CodingOffload::Dpu, "").await;
    let objects = write(&pool, 7).await;
    let before = coding(&client).await.offload;
    assert_eq!((before.sent.only, before.health.failures), (0, 0));
    node.config.coding.faults.arm("ec.offload=fail".parse().unwrap()).unwrap();
    is_whole_without_any_two(&node, &client, &pool, &objects).await;
    let after = coding(&client).await.offload;
    assert!(after.health.failures > 0, "the fault fired: {after:?}");
    node.config.coding.faults.clear();
    tokio::time::sleep(Duration::from_millis(40)).await;
    is_whole_without_any_two(&node, &client, &pool, &objects).await;
    let last = coding(&client).await.offload;
    assert!(last.sent.only > after.sent.only, "the threads are used again: {after:?} {last:?}");
    assert_eq!((last.health.failures, last.health.recoveries), (after.health.failures, 1), "{last:?}");
}

#[tokio::test]
async fn a_dpu_uses_its_cores_and_its_accelerator_and_one_of_them_suffices() {
    let (node, client, pool) = node("async", CodingOffload::Both, "ec.offload=fail").await;
    let objects = write(&pool, 6).await;
    let status = coding(&client).await;
    let devices = status.devices.clone().unwrap();
    assert!(devices.cores.health.failures > 0, "the fault of the cores fired: {status:?}");
    assert!(total(devices.accelerator.sent) > 0, "the accelerator took over: {status:?}");
    assert_eq!((status.offload.health.failures, total(status.host.sent)), (0, 0), "{status:?}");
    node.config.coding.faults.clear();
    // While many tasks wait, both devices work.
    let writes = (0..12).map(|number| {
        let object = pool.object(&format!("more{number}")).unwrap();
        async move { object.put(data(12 * MIB, number)).await.unwrap() }
    });
    futures::future::join_all(writes).await;
    let after = coding(&client).await.devices.unwrap();
    assert!(total(after.cores.sent) > total(devices.cores.sent), "{after:?}");
    assert!(total(after.accelerator.sent) > total(devices.accelerator.sent), "{after:?}");
    is_whole_without_any_two(&node, &client, &pool, &objects).await;
}

#[tokio::test]
async fn the_host_computes_parity_if_both_devices_of_the_dpu_fail() {
    let broken = Faults::default();
    broken.arm("ec.offload=fail".parse().unwrap()).unwrap();
    let (node, client, pool) =
        node_with("async", CodingOffload::Both, "ec.offload=fail", broken.clone()).await;
    let objects = write(&pool, 8).await;
    let status = coding(&client).await;
    let devices = status.devices.clone().unwrap();
    assert!(devices.cores.health.failures > 0 && devices.accelerator.health.failures > 0, "{status:?}");
    assert!(status.offload.health.failures > 0, "{status:?}");
    assert!(status.host.sent.cool_down > 0, "the host took over: {status:?}");
    check(&pool, &objects, "both devices fail").await;
    broken.clear();
    node.config.coding.faults.clear();
    tokio::time::sleep(Duration::from_millis(40)).await;
    write(&pool, 9).await;
    let after = coding(&client).await;
    assert!(total(after.offload.sent) > total(status.offload.sent), "the DPU is used again: {after:?}");
    assert_eq!(after.offload.health.recoveries, 1, "{after:?}");
}

/// The osd measures two ways to pull the data of such writes. Some of them are shorter than a stripe.
#[tokio::test]
async fn many_writes_around_the_length_of_a_stripe_succeed() {
    let redundancy = redundancy("ec:16+1");
    let mut node = Node::of(redundancy.targets(), config());
    node.restart();
    let client = node.client().await;
    client.create_pool_with("pool", 1, redundancy).await.unwrap();
    let pool = client.pool("pool").unwrap();
    for (number, len) in [600 << 10, MIB - 5000, MIB + 4096, 2 * MIB].into_iter().enumerate() {
        let object = pool.object(&format!("o{number}")).unwrap();
        let bytes = data(len, number as u64);
        // The third group of 64 writes uses the other way.
        for _ in 0..200 {
            object.put(bytes.clone()).await.unwrap();
        }
        assert!(object.get().await.unwrap() == bytes, "{len}");
    }
}

#[tokio::test]
async fn writes_succeed_although_the_coding_offload_fails() {
    for faults in ["ec.offload=fail,probability=0.5,seed=7", "ec.offload=fail"] {
        let (node, client, pool) = node("async", CodingOffload::Dpu, faults).await;
        let objects = write(&pool, 2).await;
        check(&pool, &objects, faults).await;
        let coding = coding(&client).await;
        assert!(coding.offload.health.failures > 0, "the fault fired: {coding:?}");
        assert!(coding.host.sent.cool_down > 0, "the host took over: {coding:?}");
        is_whole_without_any_two(&node, &client, &pool, &objects).await;
    }
}

#[tokio::test]
async fn the_coding_mode_can_be_changed_while_the_node_runs() {
    let (_node, client, pool) = node("async", CodingOffload::Dpu, "").await;
    write(&pool, 3).await;
    let mode = "hybrid:2:1".parse().unwrap();
    client.set_coding_mode(mode).await.unwrap();
    write(&pool, 4).await;
    let coding = coding(&client).await;
    assert_eq!(coding.mode, mode);
}

/// Stripe stores on a host that reports the load that the test sets.
struct Moody {
    inner: LocalStoreSet,
    is_busy: AtomicBool,
    reading: Mutex<LoadCounters>,
}

impl StoreSet for Moody {
    fn max_bytes(&self) -> usize {
        self.inner.max_bytes()
    }

    fn stage_stripes(
        &self,
        write: StripeWrite,
        coded: Option<Coded>,
    ) -> BoxFuture<'static, Result<(), StripeError>> {
        self.inner.stage_stripes(write, coded)
    }

    fn queue_transactions(&self, transactions: Vec<TargetTransaction>) -> Vec<StoreFuture> {
        self.inner.queue_transactions(transactions)
    }

    fn host_reading(&self, _with_store: bool) -> BoxFuture<'static, store::Result<HostReading>> {
        let mut reading = self.reading.lock().unwrap();
        let step = Duration::from_millis(100);
        reading.all += step;
        reading.busy += if self.is_busy.load(Ordering::SeqCst) { step } else { step / 10 };
        Box::pin(std::future::ready(Ok(HostReading { reading: *reading, cpus: vec![0] })))
    }
}

#[tokio::test]
async fn a_busy_host_gets_no_coding_tasks_until_it_is_idle_again() {
    let redundancy = redundancy("ec:4+2");
    let mut node = Node::of(redundancy.targets(), config());
    let engines = Arc::new(Engines::start(EngineOptions::default(), None).unwrap());
    let host = Arc::new(Moody {
        inner: LocalStoreSet::new(node.targets(), engines),
        is_busy: AtomicBool::new(true),
        reading: Mutex::default(),
    });
    node.config.coding.mode = "latency-sensitive".parse().unwrap();
    node.config.coding.stripes = StripesAt::There(Arc::clone(&host) as Arc<dyn StoreSet>);
    node.restart();
    let client = node.client().await;
    client.create_pool_with("pool", 2, redundancy).await.unwrap();
    let object = client.pool("pool").unwrap().object("o").unwrap();
    // Writes until the parity of one write is computed entirely at one coding place. Earlier writes
    // may use both places.
    let settles = async |busy: bool| {
        host.is_busy.store(busy, Ordering::SeqCst);
        let settled = async {
            loop {
                let before = coding(&client).await;
                object.put(data(3 * MIB, 5)).await.unwrap();
                let after = coding(&client).await;
                let sent = |coding: &CodingStatus| (total(coding.host.sent), coding.offload.sent.busy);
                let (host, offload) = (sent(&after).0 - sent(&before).0, sent(&after).1 - sent(&before).1);
                if if busy { host == 0 && offload > 0 } else { host > 0 && offload == 0 } {
                    return after;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(20), settled).await.unwrap()
    };
    for busy in [true, false, true] {
        let coding = settles(busy).await;
        assert_eq!(coding.host_busy, busy, "{coding:?}");
        assert_eq!(coding.host_utilization_percent, if busy { 100 } else { 10 });
    }
    // The host stays busy after the last write. When it is calm again, the node notices that without
    // further writes, so that the next write is not placed by the old reading.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(coding(&client).await.host_busy, "the host is still busy");
    host.is_busy.store(false, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let coding = coding(&client).await;
    assert!(!coding.host_busy, "{coding:?}");
}

#[tokio::test]
async fn only_the_stalled_drive_of_a_group_is_marked_as_failed() {
    let redundancy = redundancy("ec:2+1");
    let mut node = Node::of(3, OsdConfig { target_timeout: Duration::from_millis(500), ..config() });
    node.restart();
    let client = node.client().await;
    client.create_pool_with("pool", 1, redundancy).await.unwrap();
    let object = client.pool("pool").unwrap().object("o").unwrap();
    object.put(data(3 * MIB, 1)).await.unwrap();
    // Wait until no background task is left that could notice the stall.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    node.stores[1].hold(true);
    let bytes = data(3 * MIB, 2);
    let put = object.put(bytes.clone());
    tokio::time::timeout(Duration::from_secs(15), put).await.unwrap().unwrap();
    let status = client.status().await.unwrap();
    let failed: Vec<bool> = status.targets.iter().map(|target| target.failure.is_some()).collect();
    assert_eq!(failed, [false, true, false]);
    assert!(object.get().await.unwrap() == bytes);
    node.stores[1].hold(false);
}
