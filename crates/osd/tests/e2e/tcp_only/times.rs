//! Tests of how the time of requests is divided into phases.

use std::sync::atomic::Ordering;
use std::time::Duration;

use client::{Client, PhaseTimes};
use osd::OsdConfig;

use crate::common::{Node, data};

const SIZE: usize = 4 << 20;

fn assert_adds_up(times: &PhaseTimes) {
    let PhaseTimes { total_ns, host_ns, dma_ns, dma_wait_ns, others_ns, .. } = *times;
    assert_eq!(host_ns + dma_ns + dma_wait_ns + others_ns, total_ns, "{times:?}");
}

async fn write_and_read(client: &Client) {
    client.create_pool("pool").await.unwrap();
    let object = client.pool("pool").unwrap().object("object").unwrap();
    object.put(data(SIZE, 1)).await.unwrap();
    assert_eq!(object.get().await.unwrap().len(), SIZE);
    assert_eq!(object.xattrs().await.unwrap(), []);
}

#[tokio::test]
async fn the_time_of_a_directly_called_store_counts_as_host_time() {
    let node = Node::start();
    let client = node.client().await;
    write_and_read(&client).await;
    let times = client.status().await.unwrap().times;
    assert_eq!(times.write.count, 1);
    assert!(times.read.count >= 1 && times.other.count >= 1, "{times:?}");
    for times in [times.write, times.read, times.other] {
        assert_adds_up(&times);
        assert!(times.host_ns > 0 && times.others_ns > 0, "{times:?}");
        assert_eq!((times.dma_ns, times.dma_wait_ns), (0, 0));
    }
}

#[tokio::test]
async fn time_spent_waiting_for_the_store_counts_as_host_time() {
    let node = Node::start();
    let (client, pool) = node.pool().await;
    let object = pool.object("object").unwrap();
    object.put(data(100, 1)).await.unwrap();
    let before = client.status().await.unwrap().times.write;
    node.hold(true);
    let held = Duration::from_millis(50);
    let letting_go = async {
        node.waited(1).await;
        tokio::time::sleep(held).await;
        node.hold(false);
    };
    let (written, ()) = tokio::join!(object.put(data(100, 2)), letting_go);
    written.unwrap();
    let after = client.status().await.unwrap().times.write;
    assert_eq!(after.count, before.count + 1);
    assert!(u128::from(after.host_ns - before.host_ns) >= held.as_nanos(), "{before:?} {after:?}");
}

#[tokio::test]
async fn the_osd_counts_no_host_time_for_a_store_behind_a_channel() {
    let config = OsdConfig { placement: wire::Placement::Dpu, ..OsdConfig::default() };
    let node = Node::start_with(config);
    node.stores.iter().for_each(|store| store.transfers.store(true, Ordering::SeqCst));
    let client = node.client().await;
    write_and_read(&client).await;
    let times = client.status().await.unwrap().times;
    assert_eq!((times.write.count, times.write.host_ns, times.read.host_ns), (1, 0, 0));
    assert!(times.write.dma_ns > 0, "{times:?}");
    assert_adds_up(&times.write);
}

#[tokio::test]
async fn the_time_of_a_shards_thread_is_reported_by_thread_class() {
    let node = Node::start();
    let client = node.client().await;
    let before = client.status().await.unwrap().thread_ns;
    write_and_read(&client).await;
    let after = client.status().await.unwrap().thread_ns;
    assert!(after.messenger > before.messenger && after.osd > before.osd, "{before:?} {after:?}");
    assert_eq!(after.channel, 0, "there is no channel");
}

#[tokio::test]
async fn refused_requests_are_not_counted_in_the_sums_of_times() {
    let node = Node::start();
    let (client, pool) = node.pool().await;
    assert!(pool.object("nothing").unwrap().get().await.is_err());
    assert_eq!(client.status().await.unwrap().times.read, PhaseTimes::default());
}
