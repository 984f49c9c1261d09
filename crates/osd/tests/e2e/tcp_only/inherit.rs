//! Objects that begin as copies of others: races, missing members and rebuilds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use client::engine::{ReadReply, ReadRequest, Sink};
use client::{Client, Object, Pool};
use futures::future::join_all;

use crate::common::data;
use crate::redundancy::{Rig, scrub, wait_until_whole};

/// Size of each object.
const SIZE: usize = 300_000;
/// Number of placement keys.
const KEYS: usize = 16;

fn name(layer: u32, key: usize) -> String {
    format!("{layer}/{key}")
}

fn layered(pool: &Pool, layer: u32, key: usize) -> Object {
    pool.namespace("_test").unwrap().object(&name(layer, key)).unwrap()
}

fn below(layers: &[u32], key: usize) -> Vec<Bytes> {
    layers.iter().map(|layer| name(*layer, key).into()).collect()
}

/// Reads from the first layer in which the object exists.
async fn read(client: &Client, pool: &Pool, layers: &[u32], key: usize) -> client::Result<Bytes> {
    let request = ReadRequest {
        name: layered(pool, layers[0], key).name().clone(),
        part: None,
        offset: 0,
        len: SIZE as u64,
        if_version: None,
        sink: Sink::Bytes,
        fallbacks: below(&layers[1..], key),
    };
    match client.read(request).await? {
        ReadReply::Data { chunks, .. } => Ok(chunks.concat().into()),
        ReadReply::Striped { .. } => panic!("no object is striped"),
    }
}

/// Writes a few bytes to an object of layer 2, which inherits from layer 1.
async fn first_write(pool: &Pool, key: usize) -> client::Result<()> {
    let compound = layered(pool, 2, key).compound().inherit(below(&[1], key));
    compound.write(5000, data(100, key as u64 + 500)).commit().await.map(drop)
}

fn written(key: usize) -> Bytes {
    let mut expected = data(SIZE, key as u64).to_vec();
    expected[5000..5100].copy_from_slice(&data(100, key as u64 + 500));
    expected.into()
}

async fn fill(pool: &Pool) {
    let put = |key| async move { layered(pool, 1, key).put(data(SIZE, key as u64)).await.unwrap() };
    join_all((0..KEYS).map(put)).await;
}

async fn check(rig: &Rig, keys: impl Iterator<Item = usize>, what: &str) {
    for key in keys {
        let found = layered(&rig.pool, 2, key).get().await.unwrap_or_else(|e| panic!("{what}, {key}: {e}"));
        assert!(found == written(key), "{what}: object {key} of layer 2");
        let found = layered(&rig.pool, 1, key).get().await.unwrap();
        assert!(found == data(SIZE, key as u64), "{what}: object {key} of layer 1");
    }
}

#[tokio::test]
async fn first_writes_while_a_target_is_missing_are_whole_after_its_return() {
    for (redundancy, lost) in [("mirror:2", 0), ("ec:4+2", 1), ("ec:4+2", 5)] {
        let rig = Rig::new(redundancy, 4).await;
        fill(&rig.pool).await;
        rig.set_down(&[lost], true);
        for outcome in join_all((0..KEYS).map(|key| first_write(&rig.pool, key))).await {
            outcome.unwrap();
        }
        check(&rig, 0..KEYS, "degraded").await;
        rig.bring_back(&[lost]).await;
        check(&rig, 0..KEYS, "whole").await;
        // Each other member in turn, so that the data of the returned member is needed.
        for other in (0..rig.node.stores.len()).filter(|other| *other != lost) {
            rig.set_down(&[other], true);
            check(&rig, 0..KEYS, &format!("{redundancy} without target {other}")).await;
            rig.bring_back(&[other]).await;
        }
        let status = scrub(&rig.client, false).await;
        assert!((status.damaged, status.inconsistent, status.wrong_size) == (0, 0, 0), "{status:?}");
    }
}

/// The rebuilt member takes part in transactions, but lacks some of the sources.
#[tokio::test]
async fn first_writes_during_a_rebuild_are_whole_afterwards() {
    for (redundancy, lost, is_blank) in
        [("mirror:2", 0, false), ("mirror:2", 1, true), ("ec:4+2", 1, false), ("ec:4+2", 4, true)]
    {
        let mut rig = Rig::new(redundancy, 2).await;
        fill(&rig.pool).await;
        rig.set_down(&[lost], true);
        // The stale member lacks these sources.
        fill(&rig.pool).await;
        if is_blank {
            rig.node.stores[lost] = crate::common::FaultStore::new();
            rig.node.restart();
            rig.client.set_target_out(lost as u32, false).await.unwrap();
        } else {
            rig.set_down(&[lost], false);
            rig.client.set_target_out(lost as u32, false).await.unwrap();
        }
        for key in 0..KEYS {
            first_write(&rig.pool, key).await.unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        wait_until_whole(&rig.client).await;
        check(&rig, 0..KEYS, redundancy).await;
        for other in (0..rig.node.stores.len()).filter(|other| *other != lost) {
            rig.set_down(&[other], true);
            check(&rig, 0..KEYS, &format!("{redundancy} without target {other}")).await;
            rig.bring_back(&[other]).await;
        }
        let status = scrub(&rig.client, false).await;
        assert!((status.damaged, status.inconsistent, status.wrong_size) == (0, 0, 0), "{status:?}");
    }
}

#[tokio::test]
async fn data_that_moves_to_another_layer_is_never_missed() {
    for redundancy in ["single", "mirror:2", "ec:2+1"] {
        let rig = Rig::new(redundancy, 4).await;
        let (client, pool) = (&rig.client, &rig.pool);
        fill(pool).await;
        let has_moved = AtomicBool::new(false);
        let moves = async {
            for layer in 1..4 {
                for key in 0..KEYS {
                    let up = layered(pool, layer + 1, key).compound().inherit(below(&[layer], key));
                    up.commit().await.unwrap();
                    layered(pool, layer, key).remove().await.unwrap();
                }
            }
            has_moved.store(true, Ordering::Relaxed);
        };
        let reads = async {
            let mut count = 0;
            while !has_moved.load(Ordering::Relaxed) {
                for key in 0..KEYS {
                    let found = read(client, pool, &[9, 4, 3, 2, 1], key).await;
                    assert!(found.unwrap() == data(SIZE, key as u64), "{redundancy}: {key}");
                    count += 1;
                }
            }
            count
        };
        let writes = async {
            for layer in 10.. {
                for key in 0..KEYS {
                    let copy = layered(pool, layer, key).compound().inherit(below(&[8, 4, 3, 2, 1], key));
                    let size = copy.commit().await.unwrap().size;
                    assert_eq!(size, SIZE as u64, "{redundancy}: layer {layer}, {key}");
                }
                if has_moved.load(Ordering::Relaxed) {
                    break;
                }
            }
        };
        let ((), count, ()) = tokio::join!(moves, reads, writes);
        assert!(count >= KEYS, "objects were read while they moved");
    }
}
