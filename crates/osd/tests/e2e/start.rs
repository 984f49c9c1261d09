//! What a node's targets must be for it to start.

use std::sync::Arc;

use base::block::Payload;
use osd::{Osd, OsdConfig, StartError};
use store::{MemStore, ObjectStore, Op, Transaction, WriteSource};
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

/// Writes nonsense over the map of a node without objects.
async fn garble(node: &Node, target: usize) {
    let store = &node.stores[target];
    for cid in store.collections().await.unwrap() {
        let (ids, _) = store.list(&cid, None, 10).await.unwrap();
        for oid in ids {
            let source = WriteSource::Inline(Payload::compute(0, "\x02nonsense".into()));
            let write = Op::Write { oid, offset: 0, source };
            store.queue_transaction(Transaction::new(cid.clone()).with(write)).await.unwrap();
        }
    }
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
