//! Tests of nodes that an earlier version of Outboard created.

use bytes::Bytes;
use client::Redundancy;
use osd::OsdConfig;
use store::StoreCalls;

use crate::common::{Node, data};
use crate::redundancy::redundancy;
use crate::tcp_only::start::{read_map, write_map};

/// Format of the node's map before pools had a layout of ids.
const FORMAT_HASHED_IDS: u8 = 3;

/// Returns a running node with the empty pool `pool`, as an earlier version left it: the ids of the
/// pool's objects begin with hashes, and the node's map does not mention the layout of ids.
pub(crate) async fn node_of_earlier_version(targets: usize, groups: u32, redundancy: Redundancy) -> Node {
    let mut node = Node::of(targets, OsdConfig::default());
    node.restart();
    node.client().await.create_pool_with("pool", groups, redundancy).await.unwrap();
    node.osd.take().unwrap().stop();
    for store in &node.stores {
        let map = read_map(&**store).await;
        // A seal of 32 bytes follows the format. The map ends with the layout of ids and the tenant of the
        // last pool, the accounts (one tenant, no users, and the next number), and no ended sessions.
        let (format, rest) = map.split_first().unwrap();
        let accounts = b"\x01\x00\x04main\x00\x00\x01";
        let rest = rest[32..].strip_suffix(&[0; 4]).and_then(|rest| rest.strip_suffix(accounts)).unwrap();
        let (pool, rest) = rest.split_last_chunk::<2>().map(|(rest, pool)| (pool, rest)).unwrap();
        assert_eq!((*format, *pool), (6, [1, 0]), "the form of the map has changed");
        write_map(&**store, Bytes::from([&[FORMAT_HASHED_IDS], rest].concat())).await;
    }
    node.restart();
    node
}

/// Returns the ids of all objects of placement groups on all targets, without internal objects.
async fn stored_ids(node: &Node) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    for store in &node.stores {
        for cid in store.collections().await.unwrap() {
            if cid.as_bytes().starts_with(b"P") {
                let (ids, more) = store.list(&cid, None, 10_000).await.unwrap();
                assert!(!more);
                found.extend(ids.iter().map(|id| id.as_bytes().to_vec()));
            }
        }
    }
    found.retain(|id| !id.starts_with(b"\0\0\0\0\0"));
    found
}

#[tokio::test]
async fn pools_of_an_earlier_version_keep_the_ids_of_their_objects() {
    for scheme in ["single", "mirror:2"] {
        let mut node = node_of_earlier_version(2, 4, redundancy(scheme)).await;
        let names: Vec<String> = (0..50).map(|n| format!("o{n:02}")).collect();
        for (change, restarts) in [(1, true), (2, false)] {
            let client = node.client().await;
            let pool = client.pool("pool").unwrap();
            for name in &names {
                pool.object(name).unwrap().put(data(3000, change)).await.unwrap();
            }
            // A change of the map stores it in the new form.
            client.create_pool(&format!("new{change}")).await.unwrap();
            client.close().await;
            if restarts {
                node.restart();
            }
        }
        let client = node.client().await;
        let pool = client.pool("pool").unwrap();
        for name in &names {
            assert_eq!(pool.object(name).unwrap().get().await.unwrap(), data(3000, 2), "{name}, {scheme}");
        }
        let mut listed: Vec<String> =
            pool.list("").collect().await.unwrap().iter().map(|name| name.object().to_owned()).collect();
        listed.sort();
        assert_eq!(listed, names, "{scheme}");
        let ids = stored_ids(&node).await;
        assert!(ids.len() >= names.len() && ids.iter().all(|id| id[4] == 1), "{scheme}: {ids:?}");
        let by_name = client.pool("new1").unwrap();
        by_name.object("o").unwrap().put("x").await.unwrap();
        assert!(stored_ids(&node).await.contains(&b"\0\0\0\0\x03\0o".to_vec()), "{scheme}");
        pool.object("o00").unwrap().remove().await.unwrap();
        assert_eq!(pool.list("").collect().await.unwrap().len(), names.len() - 1, "{scheme}");
    }
}
