//! Osds with several shards.

use std::time::Duration;

use client::{Options, Redundancy};
use osd::OsdConfig;
use wire::{ReplyBody, RequestBody};

use crate::common::{Node, data, free_endpoint};
use crate::raw::{Raw, append, head};
use crate::sessions::{of_session, records};

/// Starts a node with these numbers of shards in turn, at an address that stays the same.
fn node(shards: &[u16], config: OsdConfig) -> Node {
    let mut node = Node::new(config);
    node.endpoint = free_endpoint();
    node.shards = shards.iter().copied().collect();
    node.restart();
    node
}

#[tokio::test]
async fn objects_and_listings_survive_restarts_with_other_numbers_of_shards() {
    let mut node = node(&[3, 1, 4, 2], OsdConfig::default());
    let client = node.client().await;
    client.create_pool_with("pool", 8, Redundancy::Single).await.unwrap();
    let pool = client.pool("pool").unwrap();
    let mut expected = Vec::new();
    for round in 0..4u64 {
        for i in 0..24 {
            let name = format!("{round}-{i}");
            let object = pool.object(&name).unwrap();
            object.put(data(5000, round * 100 + i)).await.unwrap();
            expected.push((name, round * 100 + i));
        }
        for (name, salt) in &expected {
            assert!(pool.object(name).unwrap().get().await.unwrap() == data(5000, *salt), "{name}");
        }
        let mut names: Vec<String> = expected.iter().map(|(name, _)| name.clone()).collect();
        let listed = client.pool("pool").unwrap().list("").collect().await.unwrap();
        let mut listed: Vec<String> = listed.iter().map(|name| name.object().to_owned()).collect();
        names.sort();
        listed.sort();
        assert_eq!(listed, names);
        node.restart();
    }
}

#[tokio::test]
async fn a_retry_after_a_restart_with_another_number_of_shards_takes_effect_once() {
    let mut node = node(&[4, 3, 1, 2], OsdConfig::default());
    let client = node.client().await;
    client.create_pool_with("pool", 4, Redundancy::Single).await.unwrap();
    let mut raw = Raw::connect(&node.endpoint, None).await;
    for (seq, object) in (1u64..).zip(["a", "b", "c", "d", "e", "f", "g", "h"]) {
        raw.changed(head(seq), append(object, "once")).await.unwrap();
    }
    for _ in 0..4 {
        node.restart();
        raw = Raw::connect(&node.endpoint, Some(raw.session)).await;
        for (seq, object) in (1u64..).zip(["a", "b", "c", "d", "e", "f", "g", "h"]) {
            let retry = wire::RequestHead { retry: true, ..head(seq) };
            let mutated = raw.changed(retry, append(object, "once")).await.unwrap();
            assert_eq!((mutated.size, mutated.appended_at), (4, 0), "{object}");
        }
    }
}

#[tokio::test]
async fn a_closed_session_is_forgotten_on_all_shards() {
    let node = node(&[3], OsdConfig::default());
    let client = node.client().await;
    client.create_pool_with("pool", 8, Redundancy::Single).await.unwrap();
    let mut raw = Raw::connect(&node.endpoint, None).await;
    let objects = ["a", "b", "c", "d", "e", "f"];
    for (seq, object) in (1u64..).zip(objects) {
        raw.changed(head(seq), append(object, "data")).await.unwrap();
    }
    let session = raw.session;
    let closed = raw.call(head(7), RequestBody::CloseSession).await.unwrap();
    assert_eq!(closed, ReplyBody::Closed);
    let resume = raw.opening(Some(session));
    let refused = raw.call(head(0), resume).await;
    assert!(matches!(refused, Err(wire::Error::SessionRefused { .. })), "{refused:?}");
    // The next changes in the groups of all shards remove the session's records.
    for object in objects {
        client.pool("pool").unwrap().object(object).unwrap().append("more").await.unwrap();
    }
    assert_eq!(of_session(&records(&node.stores).await, session), 0);
}

#[tokio::test]
async fn striped_objects_use_the_parts_of_all_shards() {
    let config = OsdConfig { orphan_grace: Duration::ZERO, ..OsdConfig::default() };
    let node = node(&[4], config);
    let options = Options { part_size: 1 << 20, stripe_threshold: 1 << 20, ..Options::default() };
    let client = node.client_with(options).await;
    client.create_pool_with("pool", 8, Redundancy::Single).await.unwrap();
    let object = client.pool("pool").unwrap().object("striped").unwrap();
    let (first, second) = (data(9 << 20, 1), data((7 << 20) + 5, 2));
    object.put(first.clone()).await.unwrap();
    assert!(object.get().await.unwrap() == first);
    object.put(second.clone()).await.unwrap();
    let removed = client.collect_orphans(Duration::ZERO).await.unwrap();
    assert!(removed <= 9, "the parts of the second upload are not orphans: {removed}");
    assert!(object.get().await.unwrap() == second);
}

#[tokio::test]
async fn the_status_shows_all_shards_and_the_data_path_sends_no_messages_between_them() {
    let node = node(&[4], OsdConfig::default());
    let client = node.client().await;
    client.create_pool_with("pool", 8, Redundancy::Single).await.unwrap();
    let pool = client.pool("pool").unwrap();
    let object = |i: u64| pool.object(&format!("{i}")).unwrap();
    for i in 0..40 {
        object(i).put(data(100, i)).await.unwrap();
    }
    let before = client.status().await.unwrap();
    for i in 0..400 {
        object(i % 40).put(data(100, i)).await.unwrap();
        object(i % 40).get().await.unwrap();
    }
    let after = client.status().await.unwrap();
    assert_eq!(after.shards.len(), 4);
    let messages = |status: &client::NodeStatus| status.shards.iter().map(|s| s.messages).sum::<u64>();
    let sent = messages(&after) - messages(&before);
    assert!(sent < 80, "{sent} messages between shards for 800 requests and one status");
    for (before, after) in before.shards.iter().zip(&after.shards) {
        assert!(after.completed > before.completed, "each shard serves requests: {after:?}");
        assert_eq!(after.sessions, 1);
    }
}
