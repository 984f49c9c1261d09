//! What a node's targets must be for it to start.

use std::sync::Arc;

use osd::{Osd, OsdConfig, StartError};
use store::{MemStore, ObjectStore};
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
