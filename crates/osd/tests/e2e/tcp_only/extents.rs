//! Tests of queries for the extents of objects, on every kind of pool, and while targets are missing.

use std::ops::Range;

use bytes::Bytes;
use client::engine::Capability;
use client::{Object, Options};

use crate::common::{Node, data};
use crate::redundancy::{Rig, config, redundancy};

const BLOCK: u64 = 4096;

/// Redundancy schemes, each with the numbers of targets that may be missing.
const SCHEMES: [(&str, usize); 4] = [("single", 0), ("mirror:2", 1), ("ec:2+1", 1), ("ec:2+2", 2)];

/// Writes an object that has holes. Returns its data, and its extents in blocks.
async fn write_sparse(object: &Object) -> (Vec<u8>, Vec<Range<u64>>) {
    // Small data, data that the osd pulls, and staged data.
    let writes = [(2, 1), (9, 5), (40, 100), (300, 700)];
    let mut model = vec![0; (1200 * BLOCK) as usize];
    for (block, blocks) in writes {
        let bytes = data((blocks * BLOCK) as usize, block);
        let start = (block * BLOCK) as usize;
        model[start..start + bytes.len()].copy_from_slice(&bytes);
        object.write(block * BLOCK, bytes).await.unwrap();
    }
    for (block, blocks) in [(11, 1), (50, 60), (400, 300)] {
        object.zero(block * BLOCK, blocks * BLOCK).await.unwrap();
        model[(block * BLOCK) as usize..((block + blocks) * BLOCK) as usize].fill(0);
    }
    object.truncate(900 * BLOCK).await.unwrap();
    object.truncate(1200 * BLOCK).await.unwrap();
    model[(900 * BLOCK) as usize..].fill(0);
    (model, vec![2..3, 9..11, 12..14, 40..50, 110..140, 300..400, 700..900])
}

async fn blocks(object: &Object) -> Vec<Range<u64>> {
    let extents = object.extents(0, u64::MAX).await.unwrap();
    extents.iter().map(|range| range.start / BLOCK..range.end.div_ceil(BLOCK)).collect()
}

fn count(blocks: &[Range<u64>]) -> u64 {
    blocks.iter().map(|range| range.end - range.start).sum()
}

/// Checks that blocks outside the extents are zero.
async fn check_holes(object: &Object, model: &[u8], what: &str) {
    let extents = blocks(object).await;
    for (number, block) in (0..).zip(model.chunks(BLOCK as usize)) {
        let is_hole = !extents.iter().any(|range| range.contains(&number));
        assert!(!is_hole || block.iter().all(|byte| *byte == 0), "block {number} has data, {what}");
    }
    assert_eq!(object.allocated().await.unwrap(), count(&extents) * BLOCK, "{what}");
}

#[tokio::test]
async fn extents_are_the_same_on_every_kind_of_pool() {
    for (scheme, _) in SCHEMES {
        let rig = Rig::new(scheme, 2).await;
        rig.client.require(&[Capability::Extents]).unwrap();
        let object = rig.pool.object("sparse").unwrap();
        let (model, expected) = write_sparse(&object).await;
        assert_eq!(object.get().await.unwrap(), model, "{scheme}");
        assert_eq!(blocks(&object).await, expected, "{scheme}");
        let allocated = object.allocated().await.unwrap();
        assert_eq!(allocated, count(&expected) * BLOCK, "{scheme}: copies and parity do not count");
        let (start, end) = (45 * BLOCK + 7, 120 * BLOCK + 9);
        let part = object.extents(start, end - start).await.unwrap();
        assert_eq!(part, [start..50 * BLOCK, 110 * BLOCK..end], "{scheme}");
    }
}

#[tokio::test]
async fn no_extent_is_missing_while_targets_are_missing() {
    for (scheme, tolerated) in SCHEMES.into_iter().filter(|(_, tolerated)| *tolerated > 0) {
        let targets = redundancy(scheme).targets();
        for first in 0..targets {
            let rig = Rig::new(scheme, 2).await;
            let objects = ["a", "b", "c"].map(|name| rig.pool.object(name).unwrap());
            let mut models = Vec::new();
            for object in &objects {
                models.push(write_sparse(object).await);
            }
            let missing: Vec<usize> = (0..tolerated).map(|n| (first + n) % targets).collect();
            rig.set_down(&missing, true);
            for (object, (model, expected)) in objects.iter().zip(&models) {
                let what = format!("{scheme} without {missing:?}");
                check_holes(object, model, &what).await;
                let found = blocks(object).await;
                if scheme.starts_with("mirror") {
                    assert_eq!(&found, expected, "{what}");
                }
                assert!(count(&found) <= 2 * count(expected), "{what}: holes of whole rows remain");
            }
            // A change while targets are missing also shows.
            let bytes = Bytes::from(vec![1; BLOCK as usize]);
            objects[0].write(1000 * BLOCK, bytes.clone()).await.unwrap();
            let model = &mut models[0].0;
            model[(1000 * BLOCK) as usize..][..BLOCK as usize].copy_from_slice(&bytes);
            check_holes(&objects[0], model, &format!("{scheme} after a write")).await;
            // A rebuild writes holes as zeros.
            rig.bring_back(&missing).await;
            check_holes(&objects[0], model, &format!("{scheme} with all targets")).await;
        }
    }
}

#[tokio::test]
async fn extents_survive_a_restart() {
    let mut node = Node::of(3, config());
    node.restart();
    let client = node.client().await;
    client.create_pool_with("pool", 2, redundancy("ec:2+1")).await.unwrap();
    let object = client.pool("pool").unwrap().object("sparse").unwrap();
    let (_, expected) = write_sparse(&object).await;
    node.restart();
    assert_eq!(blocks(&object).await, expected);
}

#[tokio::test]
async fn the_extents_of_a_striped_object_are_refused() {
    let node = Node::start();
    let (_operator, _) = node.pool().await;
    let options = Options { stripe_threshold: 64 << 10, part_size: 64 << 10, ..Options::default() };
    let client = node.client_with(options).await;
    let object = client.pool("pool").unwrap().object("striped").unwrap();
    object.put(data(200_000, 1)).await.unwrap();
    for refused in [object.allocated().await.map(drop), object.extents(0, 10).await.map(drop)] {
        let error = refused.unwrap_err();
        assert!(matches!(error, client::Error::Node(wire::Error::Striped { .. })), "{error}");
    }
}
