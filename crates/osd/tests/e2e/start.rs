//! What a node's targets must be for it to start.

use std::sync::Arc;

use base::block::Payload;
use bytes::Bytes;
use osd::{Osd, OsdConfig, StartError};
use store::{CollectionId, MemStore, ObjectId, ObjectStore, Op, Transaction, WriteSource};
use uuid::Uuid;

use crate::common::Node;

fn start(node: &Node, targets: Vec<(Uuid, Arc<dyn ObjectStore>)>) -> StartError {
    let stack = crate::common::stack(messenger::UseAs::Server);
    Osd::start(OsdConfig::default(), targets, node.staging.clone(), stack, "127.0.0.1:0").unwrap_err()
}

#[tokio::test]
async fn missing_foreign_and_doubled_targets_are_refused() {
    let mut node = Node::start();
    let (_client, pool) = node.pool().await;
    pool.object("x").unwrap().put("x").await.unwrap();
    node.osd.take().unwrap().stop();
    let good = node.targets();
    let new: Arc<dyn ObjectStore> = Arc::new(MemStore::new());

    let missing = start(&node, good[..1].to_vec());
    assert!(matches!(missing, StartError::MissingTarget { target, .. } if target == good[1].0));
    let extra = start(&node, [&good[..], &[(Uuid::new_v4(), new.clone())]].concat());
    assert!(matches!(extra, StartError::ForeignTarget { .. }));
    let wiped = start(&node, vec![good[0].clone(), (good[1].0, new)]);
    assert!(matches!(wiped, StartError::ForeignTarget { target, .. } if target == good[1].0));
    let other = Node::start();
    let foreign = start(&node, vec![good[0].clone(), (good[1].0, other.targets()[1].1.clone())]);
    assert!(matches!(foreign, StartError::ForeignTarget { .. }));
    assert!(matches!(start(&node, vec![good[0].clone(), good[0].clone()]), StartError::SameTarget(_)));
    assert!(matches!(start(&node, vec![]), StartError::NoTargets));

    node.restart();
    let client = node.client().await;
    assert_eq!(client.pool("pool").unwrap().object("x").unwrap().get().await.unwrap(), "x");
}

/// Where a target has the node's map.
async fn map_object(store: &dyn ObjectStore) -> (CollectionId, ObjectId) {
    let mut collections = store.collections().await.unwrap();
    collections.retain(|cid| !cid.as_bytes().starts_with(b"P"));
    let cid = collections.remove(0);
    let (mut ids, _) = store.list(&cid, None, 10).await.unwrap();
    (cid, ids.remove(0))
}

/// Writes over the map.
async fn write_map(store: &dyn ObjectStore, bytes: Bytes) {
    let (cid, oid) = map_object(store).await;
    let source = WriteSource::Inline(Payload::compute(0, bytes));
    let write = Transaction::new(cid).with(Op::Truncate { oid: oid.clone(), size: 0 }).with(Op::Write {
        oid,
        offset: 0,
        source,
    });
    store.queue_transaction(write).await.unwrap();
}

async fn garble(node: &Node, target: usize) {
    write_map(&*node.stores[target], "\x02nonsense".into()).await;
}

/// A copy of the map that cannot be read costs its target, as long as most others can be.
#[tokio::test]
async fn a_damaged_map_costs_one_target() {
    let mut node = Node::of(3, OsdConfig::default());
    node.restart();
    node.osd.take().unwrap().stop();
    garble(&node, 1).await;
    node.restart();
    let status = node.client().await.status().await.unwrap();
    let failed: Vec<bool> = status.targets.iter().map(|target| target.failure.is_some()).collect();
    assert_eq!(failed, [false, true, false]);
    node.client().await.set_target_out(1, false).await.unwrap();
    node.client().await.create_pool("pool").await.unwrap();
    node.osd.take().unwrap().stop();
    // It has a new copy now; with two that are damaged nobody knows what the newest map was.
    garble(&node, 0).await;
    garble(&node, 2).await;
    let refused = start(&node, node.targets());
    assert!(matches!(refused, StartError::CorruptMap { .. }), "{refused}");
}

/// A map that could be saved on one target only, and was not acknowledged, does not count beside one that is as new.
#[tokio::test]
async fn of_two_maps_that_are_as_new_the_one_on_most_targets_counts() {
    for odd in 0..3 {
        let mut node = Node::of(3, OsdConfig::default());
        node.restart();
        let maps = async |node: &Node| {
            let mut maps = vec![];
            for store in &node.stores {
                let (cid, oid) = map_object(&**store).await;
                maps.push(store.read(&cid, &oid, 0, 1 << 20, None).await.unwrap().contiguous());
            }
            maps
        };
        let before = maps(&node).await;
        node.client().await.create_pool("not-saved").await.unwrap();
        let not_saved = maps(&node).await;
        node.osd.take().unwrap().stop();
        for (store, map) in node.stores.iter().zip(before) {
            write_map(&**store, map).await;
        }
        node.restart();
        node.client().await.create_pool("saved").await.unwrap();
        node.osd.take().unwrap().stop();
        write_map(&*node.stores[odd], not_saved[odd].clone()).await;
        node.restart();
        let pools = node.client().await.pools().await.unwrap();
        let names: Vec<String> = pools.iter().map(|pool| pool.name.to_string()).collect();
        assert_eq!(names, ["saved"], "{odd}");
    }
}
