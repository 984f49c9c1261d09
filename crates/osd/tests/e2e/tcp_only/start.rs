//! Tests of the conditions that a node's targets must meet before the node starts.

use std::sync::Arc;

use base::block::Payload;
use bytes::Bytes;
use osd::{OsdConfig, OsdServer, ShardResources, StartError};
use store::{CollectionId, MemStore, ObjectId, ObjectStore, Op, StoreCalls, Transaction, WriteSource};
use uuid::Uuid;

use crate::common::{FaultStore, Node, data};
use crate::redundancy::{Rig, config, redundancy, wait_until_whole};
use crate::tcp_only::witness;

fn start(node: &Node, targets: Vec<(Uuid, Arc<dyn ObjectStore>)>) -> StartError {
    let stack = crate::common::stack(messenger::UseAs::Server);
    let config = OsdConfig { node: node.config.node, ..OsdConfig::default() };
    OsdServer::start(
        vec![ShardResources { config, targets, staging: node.staging.clone() }],
        stack,
        "127.0.0.1:0",
    )
    .unwrap_err()
}

#[tokio::test]
async fn missing_foreign_and_duplicate_targets_are_refused() {
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
    let other = Node::start();
    let foreign = start(&node, vec![good[0].clone(), (good[1].0, other.targets()[1].1.clone())]);
    assert!(matches!(foreign, StartError::ForeignTarget { .. }));
    assert!(matches!(start(&node, vec![good[0].clone(), good[0].clone()]), StartError::SameTarget(_)));
    assert!(matches!(start(&node, vec![]), StartError::NoTargets));

    // The node has run before, and its UUID is known.
    let wiped = |number: usize| (good[number].0, Arc::new(MemStore::new()) as Arc<dyn ObjectStore>);
    node.config.node = Some(Uuid::from_u128(7));
    let without_map = start(&node, vec![wiped(0), wiped(1)]);
    assert!(matches!(without_map, StartError::NoMap { node } if node.as_u128() == 7), "{without_map}");
    let other = start(&node, good.clone());
    assert!(matches!(other, StartError::OtherNode { node, .. } if node.as_u128() == 7), "{other}");

    node.config.node = None;
    node.restart();
    let client = node.client().await;
    assert_eq!(client.pool("pool").unwrap().object("x").unwrap().get().await.unwrap(), "x");
}

/// A target was formatted again with the same UUID, or is a copy from before its first use.
#[tokio::test]
async fn a_target_that_has_lost_the_map_is_rebuilt_or_waits_for_the_operator() {
    for has_witness in [true, false] {
        let memory = has_witness.then(Arc::<witness::Memory>::default);
        let config = memory.as_ref().map_or_else(config, |memory| witness::config_with(memory, config()));
        let mut rig = Rig::of("mirror:2", 4, 2, config).await;
        rig.fill(&[1, 5000, 70_001]).await;
        rig.client.create_pool_with("alone", 8, redundancy("single")).await.unwrap();
        let alone = rig.client.pool("alone").unwrap();
        for n in 0..16 {
            alone.object(&format!("{n}")).unwrap().put(data(3000, n)).await.unwrap();
        }
        rig.node.osd.take().unwrap().stop();
        rig.node.stores[1] = FaultStore::new();
        rig.node.restart();
        rig.client = rig.node.client().await;
        rig.pool = rig.client.pool("pool").unwrap();
        if has_witness {
            // Without the witness, the other target may have been outdated.
            rig.check("while a target has lost everything").await;
        }
        let read = async || {
            let alone = rig.client.pool("alone").unwrap();
            let (mut whole, mut refused, mut absent) = (0, 0, 0);
            for n in 0..16 {
                match alone.object(&format!("{n}")).unwrap().get().await {
                    Ok(bytes) => whole += i32::from(bytes == data(3000, n)),
                    Err(e) if e.is_not_found() => absent += 1,
                    Err(e) => refused += i32::from(e.to_string().contains("gone back")),
                }
            }
            (whole, refused, absent)
        };
        let (whole, refused, absent) = read().await;
        assert!(whole > 2 && refused > 2 && (whole + refused, absent) == (16, 0), "{whole}, {refused}");
        rig.client.forget_target(1, true).await.unwrap();
        wait_until_whole(&rig.client).await;
        assert_eq!(read().await, (whole, 0, refused));
        rig.check("after the rebuild").await;
        rig.set_down(&[0], true);
        rig.check("with the rebuilt target alone").await;
    }
}

/// Returns the collection and the object in which a target stores the node's map.
async fn map_object(store: &dyn ObjectStore) -> (CollectionId, ObjectId) {
    let mut collections = store.collections().await.unwrap();
    collections.retain(|cid| !cid.as_bytes().starts_with(b"P"));
    let cid = collections.remove(0);
    let (mut ids, _) = store.list(&cid, None, 10).await.unwrap();
    (cid, ids.remove(0))
}

/// Returns a target's copy of the map in its stored form.
pub(crate) async fn read_map(store: &dyn ObjectStore) -> Bytes {
    let (cid, oid) = map_object(store).await;
    let (pieces, more) = store.omap_iterate(&cid, &oid, Bytes::new(), 100).await.unwrap();
    assert!(!more);
    pieces.into_iter().flat_map(|(_, piece)| piece).collect()
}

/// Overwrites a target's copy of the map.
pub(crate) async fn write_map(store: &dyn ObjectStore, bytes: Bytes) {
    let (cid, oid) = map_object(store).await;
    let write = Transaction::new(cid)
        .with(Op::OmapClear { oid: oid.clone() })
        .with(Op::OmapSet { oid, entries: vec![("map".into(), bytes)] });
    store.queue_transaction(write).await.unwrap();
}

/// Stores the map in the way of older versions of the node: as the data of the object.
async fn write_map_as_before(store: &dyn ObjectStore, bytes: Bytes) {
    let (cid, oid) = map_object(store).await;
    let source = WriteSource::Inline(Payload::compute(0, bytes));
    let write = Transaction::new(cid)
        .with(Op::OmapClear { oid: oid.clone() })
        .with(Op::Truncate { oid: oid.clone(), size: 0 })
        .with(Op::Write { oid, offset: 0, source });
    store.queue_transaction(write).await.unwrap();
}

async fn garble(node: &Node, target: usize) {
    write_map(&*node.stores[target], "\x02nonsense".into()).await;
}

/// A target with a damaged copy of the map is not used. The node starts if most copies are
/// readable.
#[tokio::test]
async fn a_damaged_copy_of_the_map_makes_only_its_target_unusable() {
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
    // Target 1 has a new copy now. With two damaged copies, the newest map cannot be determined.
    garble(&node, 0).await;
    garble(&node, 2).await;
    let refused = start(&node, node.targets());
    assert!(matches!(refused, StartError::UncertainMap { .. }), "{refused}");
    assert!(refused.to_string().contains("corrupt") && refused.to_string().contains("run fsck"), "{refused}");
}

/// Two maps have the same epoch. One of them was saved on only one target and therefore not
/// acknowledged; it must be ignored.
#[tokio::test]
async fn of_two_maps_with_the_same_epoch_the_one_on_most_targets_is_used() {
    for odd in 0..3 {
        let mut node = Node::of(3, OsdConfig::default());
        node.restart();
        let maps = async |node: &Node| {
            let mut maps = vec![];
            for store in &node.stores {
                maps.push(read_map(&**store).await);
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

fn failed(status: &client::NodeStatus) -> Vec<bool> {
    status.targets.iter().map(|target| target.failure.is_some()).collect()
}

#[tokio::test]
async fn a_map_stored_as_object_data_is_read_and_moves_to_the_omap() {
    let mut node = Node::start();
    let (_client, pool) = node.pool().await;
    pool.object("x").unwrap().put("x").await.unwrap();
    node.osd.take().unwrap().stop();
    for store in &node.stores {
        write_map_as_before(&**store, read_map(&**store).await).await;
    }
    node.restart();
    let client = node.client().await;
    assert_eq!(client.pool("pool").unwrap().object("x").unwrap().get().await.unwrap(), "x");
    client.create_pool("more").await.unwrap();
    for store in &node.stores {
        assert!(!read_map(&**store).await.is_empty());
        let (cid, oid) = map_object(&**store).await;
        assert_eq!(store.stat(&cid, &oid).await.unwrap().size, 0);
    }
    node.restart();
    assert_eq!(node.client().await.pools().await.unwrap().len(), 2);
}

/// Returns a stopped node of three targets. The first target lacks the newest map and has no space
/// for it.
async fn behind_and_full() -> Node {
    let mut node = Node::of(3, OsdConfig::default());
    node.restart();
    node.stores[0].set_full_for_map(true);
    let fired = node.fired();
    node.client().await.create_pool("pool").await.unwrap();
    assert!(node.fired() > fired, "the map was refused");
    node.osd.take().unwrap().stop();
    node
}

#[tokio::test]
async fn a_target_without_space_for_the_map_fails_only_at_the_next_start() {
    let mut node = behind_and_full().await;
    let fired = node.fired();
    node.restart();
    assert!(node.fired() > fired, "the map was refused");
    let client = node.client().await;
    assert_eq!(failed(&client.status().await.unwrap()), [true, false, false]);
    assert_eq!(client.pools().await.unwrap().len(), 1);
    node.stores[0].set_full_for_map(false);
    client.set_target_out(0, false).await.unwrap();
    assert_eq!(failed(&client.status().await.unwrap()), [false, false, false]);
    node.restart();
    assert_eq!(failed(&node.client().await.status().await.unwrap()), [false, false, false]);
}

#[tokio::test]
async fn a_node_does_not_start_if_too_many_targets_lack_space_for_the_map() {
    let mut node = behind_and_full().await;
    let newest = read_map(&*node.stores[1]).await;
    let old = read_map(&*node.stores[0]).await;
    write_map(&*node.stores[1], old).await;
    node.stores[1].set_full_for_map(true);
    let refused = start(&node, node.targets());
    let names_it = matches!(&refused, StartError::Target { source: store::StoreError::NoSpace { .. }, .. });
    assert!(names_it, "{refused}");
    node.stores[1].set_full_for_map(false);
    node.restart();
    assert_eq!(read_map(&*node.stores[1]).await, newest);
}

#[tokio::test]
async fn a_node_starts_without_a_target_that_does_not_answer() {
    let config = OsdConfig { target_timeout: std::time::Duration::from_millis(300), ..OsdConfig::default() };
    let mut node = Node::of(3, config);
    node.restart();
    node.client().await.create_pool("pool").await.unwrap();
    node.osd.take().unwrap().stop();
    node.stores[2].hold(true);
    let waited = node.stores[2].waited.load(std::sync::atomic::Ordering::SeqCst);
    node.restart();
    assert!(node.stores[2].waited.load(std::sync::atomic::Ordering::SeqCst) > waited);
    let client = node.client().await;
    assert_eq!(failed(&client.status().await.unwrap()), [false, false, true]);
    assert_eq!(client.pools().await.unwrap().len(), 1);
    node.stores[2].hold(false);
}

#[tokio::test]
async fn a_target_that_lacks_space_for_the_map_is_used_again_once_it_has_space() {
    let mut node = behind_and_full().await;
    let fired = node.fired();
    node.restart();
    let client = node.client().await;
    assert_eq!(failed(&client.status().await.unwrap()), [true, false, false]);
    assert!(node.fired() > fired, "the map was refused");
    node.stores[0].set_full_for_map(false);
    let back = async {
        while failed(&client.status().await.unwrap())[0] {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), back).await.expect("the target is used again");
    let same = async {
        while read_map(&*node.stores[0]).await != read_map(&*node.stores[1]).await {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), same)
        .await
        .expect("the target has the newest map");
    node.restart();
    assert_eq!(failed(&node.client().await.status().await.unwrap()), [false, false, false]);
}
