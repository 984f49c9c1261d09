//! Tests that staging memory stays bounded, however many large requests clients send at a time.

use std::time::Duration;

use client::{Options, Redundancy};
use futures::stream::{FuturesUnordered, StreamExt};
use osd::OsdConfig;

use crate::common::{Node, STAGING, data};

#[tokio::test]
async fn many_large_writes_and_reads_succeed_with_little_staging_memory() {
    let node = Node::start();
    // An emulated machine may need more than the default of a minute to send a GiB over soft-RoCE.
    let options = Options { request_timeout: Duration::from_secs(300), ..Options::default() };
    let client = node.client_with(options).await;
    client.create_pool("pool").await.unwrap();
    let pool = client.pool("pool").unwrap();
    let bytes = data(16 << 20, 1);
    let puts: FuturesUnordered<_> = (0..64)
        .map(|i| {
            // The writes share a few objects, so that the stores in memory stay small.
            let object = pool.object(&format!("{}", i % 8)).unwrap();
            let bytes = bytes.clone();
            async move { object.put(bytes).await.unwrap() }
        })
        .collect();
    assert_eq!(puts.count().await, 64);
    let gets: FuturesUnordered<_> = (0..8)
        .map(|i| {
            let object = pool.object(&format!("{i}")).unwrap();
            async move { object.get().await.unwrap() }
        })
        .collect();
    assert!(gets.all(async |got| got == data(16 << 20, 1)).await);
    // The messenger keeps the last segments until it knows that they have arrived.
    let all_back = async {
        while node.staging.free_bytes().0 != STAGING {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), all_back).await.expect("all staging memory is freed");
}

#[tokio::test]
async fn requests_beyond_the_clients_limit_in_flight_wait_and_then_succeed() {
    let node = Node::start();
    let client = node.client_with(Options { requests_in_flight: 4, ..Options::default() }).await;
    client.create_pool("pool").await.unwrap();
    let pool = client.pool("pool").unwrap();
    let puts: FuturesUnordered<_> = (0..500)
        .map(|i| {
            let object = pool.object(&format!("{}", i % 50)).unwrap();
            async move { object.put(format!("{i}")).await.unwrap() }
        })
        .collect();
    assert_eq!(puts.count().await, 500);
}

/// Regression test: requests kept staging memory for the bytes before their first stripe while they
/// waited for more. Together, they took all of it and waited for each other.
#[tokio::test]
async fn many_large_writes_inside_stripes_succeed_with_little_staging_memory() {
    const STRIPE: usize = 2 << 20;
    let mut node = Node::of(3, OsdConfig::default());
    node.restart();
    let client = node.client().await;
    let scheme: Redundancy = "ec:2+1".parse().unwrap();
    let scheme = scheme.with_stripe_unit(STRIPE as u32 / 2).unwrap();
    client.create_pool_with("pool", 4, scheme).await.unwrap();
    let pool = client.pool("pool").unwrap();
    let (offset, len) = (8192, 3 * STRIPE);
    let bytes = data(len, 1);
    let writers = 2 * STAGING / STRIPE;
    let writes: FuturesUnordered<_> = (0..writers)
        .map(|i| {
            let object = pool.object(&format!("{i}")).unwrap();
            let bytes = bytes.clone();
            async move { object.write(offset, bytes).await.unwrap() }
        })
        .collect();
    let written = tokio::time::timeout(Duration::from_secs(60), writes.count()).await;
    assert_eq!(written, Ok(writers), "the writes wait for each other");
    let last = pool.object(&format!("{}", writers - 1)).unwrap();
    assert_eq!(last.get_range(offset, len as u64).await.unwrap(), bytes);
}
