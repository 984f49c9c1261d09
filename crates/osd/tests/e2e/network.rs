//! Tests with networks that break and clients that stall.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::BoxFuture;
use base::block::Payload;
use client::{Client, Error, Options};
use futures::future::{join_all, pending};
use messenger::transport::sim::{SimFaults, SimRoute};
use messenger::{BulkSource, ConnectionConfig, SimStack};
use osd::{OsdConfig, OsdServer, OsdStarted, ShardResources};
use tokio::sync::oneshot;
use tokio::task::LocalSet;
use wire::{Data, Mutation, OpBytes};

use crate::common::{Node, administered, data, seed};
use crate::raw::{Raw, head, mutate};

/// Everything runs in one thread and on simulated time, so that the seed replays the run.
#[tokio::test(start_paused = true)]
async fn each_append_takes_effect_once_over_a_network_that_breaks_often() {
    let _seeded = base::entropy::seed_this_thread(seed());
    let jitter = Duration::from_millis(3);
    let faults = SimFaults {
        route: SimRoute { latency: Duration::ZERO, jitter, bandwidth: None },
        break_after_bytes: 12_000,
        refuse_one_in: 3,
        stall_one_in: 200,
        stall: Duration::from_millis(300),
        ..SimFaults::NONE
    };
    // The node keeps a detached connection for so short a time that it is often dropped before its
    // client returns.
    let config = ConnectionConfig { hold: Duration::from_millis(30), ..ConnectionConfig::default() };
    let (stack, network) = SimStack::simulated(seed(), faults, config);
    let stack = Arc::new(stack);
    let local = LocalSet::new();
    let (started, endpoint) = oneshot::channel();
    let (_stop, stopped) = oneshot::channel::<()>();
    let node = Node::new(OsdConfig::default());
    let (targets, staging, listening) = (node.targets(), node.staging.clone(), stack.clone());
    local.spawn_local(async move {
        let ready = |announcement| drop(started.send(announcement));
        let stop = async { drop(stopped.await) };
        let resources = vec![ShardResources { config: OsdConfig::default(), targets, staging }];
        OsdServer::serve_on_one_thread(resources, listening, "*", ready, stop).await;
    });
    let work = async {
        let OsdStarted { endpoint, administrator, .. } = endpoint.await.unwrap().unwrap();
        let current = Arc::new(Mutex::new(Some(administrator)));
        let options = || administered(Options { inline_max: 1000, ..Options::default() }, &current);
        let connect = async || loop {
            // The network may refuse an attempt to connect.
            if let Ok(client) = Client::connect_over(stack.clone(), &endpoint, options()).await {
                return client;
            }
        };
        let (one, other) = (connect().await, connect().await);
        one.create_pool("pool").await.unwrap();
        let object = |client: &Client| client.pool("pool").unwrap().object("object").unwrap();
        let appends = (0..120u64).map(|i| {
            let object = object(if i % 2 == 0 { &one } else { &other });
            // Some data travels inside messages, and some data is pulled.
            let bytes = data(if i % 3 == 0 { 3000 } else { 100 }, i);
            async move { (object.append(bytes.clone()).await.unwrap().appended_at as usize, bytes) }
        });
        let appended = join_all(appends).await;
        network.calm();
        let all = object(&one).get().await.unwrap();
        assert_eq!(all.len(), appended.iter().map(|(_, bytes)| bytes.len()).sum::<usize>());
        for (at, bytes) in appended {
            assert!(all[at..at + bytes.len()] == bytes[..]);
        }
        assert!(network.counts().breaks.load(Ordering::Relaxed) > 3, "the network broke connections");
    };
    local.run_until(work).await;
}

/// A source whose data never arrives.
struct Stalled;

impl BulkSource for Stalled {
    fn len(&self) -> u64 {
        8 << 20
    }
    fn block_offset(&self) -> u64 {
        0
    }
    fn read(&self, _: u64, _: usize) -> BoxFuture<'_, Result<Payload, String>> {
        Box::pin(pending())
    }
}

#[tokio::test]
async fn a_stalled_client_does_not_block_other_clients() {
    let node = Node::start();
    // The first shard serves the only group.
    let (_client, pool) = node.pool_of(1).await;
    let object = pool.object("object").unwrap();
    let stalled = Raw::connect(&node.endpoint, None).await;
    let offer = stalled.connection.offer_source(Arc::new(Stalled)).unwrap();
    let ops = vec![Mutation::WriteFull(OpBytes::Payload)];
    let body = mutate("object", ops, Data::Bulk(offer.descriptor.clone()));
    stalled.send(wire::encode_request(&head(1), &body), Payload::default()).await;
    while node.staging.free_bytes().1 == node.staging.arena().len() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The pull from the stalled client is in progress, but the object and the rest of the staging
    // memory are free.
    object.put(data(3 << 20, 1)).await.unwrap();
    assert!(object.get().await.unwrap() == data(3 << 20, 1));
}

#[tokio::test]
async fn requests_to_a_stopped_node_fail_after_the_request_timeout() {
    let mut node = Node::start();
    let options = Options { request_timeout: Duration::from_millis(300), ..Options::default() };
    let client = node.client_with(options).await;
    // On a busy machine, answers of the node can take longer than the short timeout.
    let patient = node.client().await;
    patient.create_pool("pool").await.unwrap();
    let object = client.pool("pool").unwrap().object("object").unwrap();
    node.osd.take().unwrap().stop();
    assert!(matches!(object.put("x").await, Err(Error::TimedOut(_))));
    node.restart();
    // The client reconnects by itself, and does not repeat the request that has timed out.
    while object.put("").await.is_err() {}
    assert_eq!(patient.pool("pool").unwrap().object("object").unwrap().get().await.unwrap(), "");
    client.close().await;
    assert!(matches!(object.get().await, Err(Error::Closed)));
}
