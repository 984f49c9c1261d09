//! Tests every op from a client through the network to the store and back.

use std::sync::Arc;

use crate::common::{Node, data, moment};
use crate::raw::{Raw, head, name};
use base::block::Payload;
use bytes::Bytes;
use client::{Error, NodeError, PutOptions};
use messenger::BulkSink;
use osd::OsdConfig;
use wire::{Condition, ObjectReply, ObjectRequest, Query, QueryOp, Read, ReplyBody, RequestBody};

#[tokio::test]
async fn objects_of_every_size_are_read_as_they_were_written() {
    let node = Node::start();
    let (_client, pool) = node.pool().await;
    for len in [0, 1, 4095, 4096, 4097, 65_536, 65_537, 300_000, (2 << 20) + 1, 5 << 20] {
        let object = pool.object(&format!("size-{len}")).unwrap();
        let bytes = data(len, len as u64);
        let put = object.put(bytes.clone()).await.unwrap();
        assert_eq!(put.size, len as u64);
        assert!(object.get().await.unwrap() == bytes, "{len} bytes");
        let stat = object.stat().await.unwrap();
        assert_eq!((stat.size, stat.version), (len as u64, put.version));
        let middle = object.get_range(len as u64 / 3, 1000).await.unwrap();
        assert_eq!(middle, bytes.slice(len / 3..(len / 3 + 1000).min(len)));
    }
}

/// A sink that accepts all pushed data.
struct Sink;

impl BulkSink for Sink {
    fn len(&self) -> u64 {
        16 << 20
    }

    fn write(&self, _: u64, _: Payload) -> bool {
        true
    }
}

/// A read of up to 2 MiB returns one version of the object, even if changes run right before and
/// right after the read's turn. The length of segments of writes, which follows the engine, does not
/// matter.
#[tokio::test]
async fn a_read_of_one_segment_of_a_growing_object_sees_one_version() {
    let node = Node::start_with(OsdConfig { segment: 64 << 10, ..OsdConfig::default() });
    let object = node.object().await;
    object.put(data(300_000, 1)).await.unwrap();
    let mut raw = Raw::connect(&node.endpoint, None).await;
    let sink = raw.connection.offer_sink(Arc::new(Sink), 0).unwrap();
    let append = async || object.append(vec![9; 5000]).await.unwrap().size;
    node.hold(true);
    let mut behind = async || {
        moment().await;
        let (name, len, sink) = (name("object"), 2 << 20, Some(sink.descriptor.clone()));
        let read = Read { name, part: None, offset: 0, len, if_version: None, sink };
        raw.call(head(1), RequestBody::Object(ObjectRequest::Read(read))).await
    };
    let last = async || {
        moment().await;
        moment().await;
        let last = async {
            moment().await;
            node.hold(false);
        };
        tokio::join!(append(), last).0
    };
    let (first, second, read, last) = tokio::join!(append(), append(), behind(), last());
    let Ok(ReplyBody::Object(ObjectReply::Read { sent, object_size, .. })) = read else { panic!("{read:?}") };
    assert_eq!((first, second, last), (305_000, 310_000, 315_000), "the appends take effect in order");
    // The read was sent when the object had 305 000 bytes, and may need a second turn.
    assert!(object_size >= 310_000 && sent == object_size, "{sent} of {object_size} bytes");
}

#[tokio::test]
async fn writes_at_any_offset_merge_with_the_existing_data() {
    let node = Node::start();
    let object = node.object().await;
    let mut model = vec![0; 0];
    for (i, (offset, len)) in [
        (100, 50),
        (0, 10),
        (4000, 200),
        (8192, 4096),
        (8000, 9000),
        (5000, 1),
        (20_000, 100_000),
        (119_999, 2),
    ]
    .into_iter()
    .enumerate()
    {
        let bytes = data(len, i as u64);
        object.write(offset as u64, bytes.clone()).await.unwrap();
        if model.len() < offset + len {
            model.resize(offset + len, 0);
        }
        model[offset..offset + len].copy_from_slice(&bytes);
        assert!(object.get().await.unwrap() == model, "after write {i}");
    }
}

#[tokio::test]
async fn large_writes_at_odd_offsets_merge_with_old_data_at_both_ends() {
    let node = Node::start();
    let object = node.object().await;
    let mut model = data(1 << 20, 1).to_vec();
    object.put(model.clone()).await.unwrap();
    let piece = data(300_001, 2);
    object.write(4097, piece.clone()).await.unwrap();
    model[4097..4097 + 300_001].copy_from_slice(&piece);
    assert!(object.get().await.unwrap() == model);
    object.write((1 << 20) - 5, piece.clone()).await.unwrap();
    model.truncate((1 << 20) - 5);
    model.extend_from_slice(&piece);
    assert!(object.get().await.unwrap() == model);
}

#[tokio::test]
async fn appends_truncations_and_zeroing_match_a_byte_vector() {
    let node = Node::start();
    let object = node.object().await;
    let mut model = Vec::new();
    for (i, len) in [10, 5000, 1, 100_000, 3_000_000, 7].into_iter().enumerate() {
        let bytes = data(len, i as u64);
        let appended = object.append(bytes.clone()).await.unwrap();
        assert_eq!(appended.appended_at, model.len() as u64);
        model.extend_from_slice(&bytes);
    }
    assert!(object.get().await.unwrap() == model);
    for size in [3_000_000, 2_999_999, 8192, 8191, 20_000] {
        object.truncate(size).await.unwrap();
        model.resize(size as usize, 0);
        assert!(object.get().await.unwrap() == model, "truncated to {size}");
    }
    for (offset, len) in [(10, 5), (4090, 10), (4000, 9000), (0, 4096), (19_990, 100), (30_000, 10)] {
        object.zero(offset as u64, len as u64).await.unwrap();
        model.resize(model.len().max(offset + len), 0);
        model[offset..offset + len].fill(0);
        assert!(object.get().await.unwrap() == model, "zeroed {offset}+{len}");
    }
}

#[tokio::test]
async fn xattrs_and_omap_entries_can_be_set_listed_and_removed() {
    let node = Node::start();
    let object = node.object().await;
    object.set_xattr("b", "2").await.unwrap();
    object.set_xattr("_", "not the osd's own xattr").await.unwrap();
    assert_eq!(object.xattr("b").await.unwrap(), Some(Bytes::from("2")));
    assert_eq!(object.xattr("missing").await.unwrap(), None);
    let names: Vec<Bytes> = object.xattrs().await.unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["_", "b"]);
    object.remove_xattr("_").await.unwrap();
    assert_eq!(object.describe().await.unwrap().xattrs.len(), 1);

    let entries: Vec<(Bytes, Bytes)> = (0..100).map(|i| (format!("k{i:03}").into(), "v".into())).collect();
    object.omap_set(entries.clone()).await.unwrap();
    let page = object.omap_range("k010", Some("k020".into()), 5).await.unwrap();
    assert_eq!((page.entries.as_slice(), page.more), (&entries[10..15], true));
    let page = object.omap_range("k018", Some("k020".into()), 5).await.unwrap();
    assert_eq!((page.entries.as_slice(), page.more), (&entries[18..20], false));
    object.omap_remove(vec!["k000".into()]).await.unwrap();
    let found = object.omap_get(vec!["k000".into(), "k001".into()]).await.unwrap();
    assert_eq!(found, [entries[1].clone()]);
    object.compound().omap_remove_range("k001", "k098").commit().await.unwrap();
    assert_eq!(object.omap_range("", None, 100).await.unwrap().entries, entries[98..]);
}

#[tokio::test]
async fn versions_grow_even_if_an_object_is_removed_and_created_again() {
    let node = Node::start();
    let object = node.object().await;
    let first = object.put("1").await.unwrap().version;
    let second = object.put("2").await.unwrap().version;
    let removed = object.remove().await.unwrap().version;
    assert!(object.stat().await.unwrap_err().is_not_found());
    let again = object.create().await.unwrap().version;
    assert!(first < second && second < removed && removed < again);
    assert!(object.create().await.unwrap_err().is_conflict());
    assert!(matches!(object.create().await, Err(Error::Node(NodeError::Exists(_)))));
}

#[tokio::test]
async fn a_wrong_guess_that_an_uncached_object_is_new_has_no_effect() {
    // The old object is longer than the new data, as long as it, or shorter, with and without
    // partial blocks.
    for (old, len) in [(6, 5), (10_000, 4096), (8192, 8192), (0, 8192), (3 << 20, (2 << 20) + 7)] {
        let mut node = Node::start();
        let name = "object";
        let object = node.object().await;
        object.put(data(old, 1)).await.unwrap();
        let before = object.compound().set_xattr("a", "1").commit().await.unwrap();
        assert_eq!(node.not_new(), 0, "the object was new, and is cached from then on");

        node.restart();
        let client = node.client().await;
        let object = client.pool("pool").unwrap().object(name).unwrap();
        let refused = object.compound().if_absent().write_full("no").commit().await.unwrap_err();
        assert!(matches!(refused, Error::Node(NodeError::ConditionFailed { .. })), "{refused}");
        assert_eq!(node.not_new(), 1, "the osd first assumed that the object is new");

        node.restart();
        let client = node.client().await;
        let object = client.pool("pool").unwrap().object(name).unwrap();
        let changed = object.put(data(len, 2)).await.unwrap();
        assert_eq!(node.not_new(), 1, "a full write does not depend on whether the object is new");
        assert!(changed.version > before.version);
        assert_eq!(object.get().await.unwrap(), data(len, 2));
        assert_eq!(object.xattr("a").await.unwrap(), Some("1".into()), "a full write keeps the xattrs");

        node.restart();
        let client = node.client().await;
        let object = client.pool("pool").unwrap().object(name).unwrap();
        object.compound().write_full("ab").truncate(8192).write(4096, "cd").commit().await.unwrap();
        let mut expected = vec![0; 8192];
        expected[..2].copy_from_slice(b"ab");
        expected[4096..4098].copy_from_slice(b"cd");
        assert_eq!(object.get().await.unwrap(), expected, "no old data is visible");
    }
}

#[tokio::test]
async fn a_query_of_an_unused_group_finds_that_the_object_has_no_xattr_and_no_entry() {
    let node = Node::start();
    let (client, _pool) = node.pool().await;
    let query = async |condition: Condition| {
        let query = Query { name: name("object"), conditions: vec![condition], ops: vec![QueryOp::Xattrs] };
        client.query(query).await.unwrap_err()
    };
    for (absent, present) in [
        (Condition::Omap("k".into(), None), Condition::Omap("k".into(), Some("v".into()))),
        (Condition::Xattr("x".into(), None), Condition::Xattr("x".into(), Some("v".into()))),
    ] {
        let holds = query(absent).await;
        assert!(matches!(&holds, Error::Node(NodeError::NoSuchObject(_))), "{holds}");
        let refused = query(present).await;
        assert!(matches!(&refused, Error::Node(NodeError::ConditionFailed { index: 0, .. })), "{refused}");
    }
}

#[tokio::test]
async fn a_compound_applies_either_all_of_its_ops_or_none() {
    let node = Node::start();
    let object = node.object().await;
    let made = object
        .compound()
        .if_absent()
        .create()
        .write(0, "hello")
        .append(" world")
        .write(0, "H")
        .set_xattr("a", "1")
        .omap_set(vec![("k".into(), "v".into())])
        .commit()
        .await
        .unwrap();
    assert_eq!(object.get().await.unwrap(), "Hello world");
    assert_eq!((made.size, made.appended_at), (11, 5));

    let refused = |e: Error| assert!(matches!(e, Error::Node(NodeError::ConditionFailed { .. })), "{e}");
    let change = || object.compound().write_full("changed").remove_xattr("a");
    refused(change().if_absent().commit().await.unwrap_err());
    refused(change().if_version(made.version + 1).commit().await.unwrap_err());
    refused(change().if_xattr("a", None).commit().await.unwrap_err());
    refused(change().if_omap("k", Some("other".into())).commit().await.unwrap_err());
    refused(change().if_bytes(6, "there").commit().await.unwrap_err());
    assert_eq!(object.get().await.unwrap(), "Hello world");

    let good = change().if_exists().if_version(made.version).if_xattr("a", Some("1".into()));
    good.if_omap("x", None).if_bytes(6, "world").commit().await.unwrap();
    assert_eq!(object.get().await.unwrap(), "changed");
    assert_eq!(object.xattr("a").await.unwrap(), None);

    // The last op fails, so the op before it takes no effect.
    let e = object.compound().write(0, "C").create().commit().await.unwrap_err();
    assert!(matches!(e, Error::Node(NodeError::Exists(_))));
    assert_eq!(object.get().await.unwrap(), "changed");
    let options = PutOptions { exclusive: true, ..PutOptions::default() };
    assert!(object.put_with("no", options).await.unwrap_err().is_conflict());
}

#[tokio::test]
async fn a_change_can_write_large_and_small_data_unless_the_ranges_overlap() {
    let node = Node::start();
    let object = node.object().await;
    let large = data(3 << 20, 1);
    object.compound().write(0, large.clone()).write(4 << 20, "end").commit().await.unwrap();
    let all = object.get().await.unwrap();
    assert!(all[..3 << 20] == large[..] && &all[4 << 20..] == b"end" && all.len() == (4 << 20) + 3);
    let overlapping = object.compound().write(0, large).write(10, "x").commit().await;
    assert!(matches!(overlapping, Err(Error::Node(NodeError::BadRequest(_)))));
}

#[tokio::test]
async fn pools_can_be_created_listed_and_removed_with_their_objects() {
    let node = Node::start();
    let (client, pool) = node.pool().await;
    assert!(matches!(client.create_pool("pool").await, Err(Error::Node(NodeError::PoolExists(_)))));
    let mut expected = Vec::new();
    for i in 0..2500 {
        let name = format!("{}/{i:04}", if i % 2 == 0 { "even" } else { "odd" });
        expected.push(name);
    }
    let puts =
        expected.iter().map(|name| pool.object(name).unwrap()).map(|o| async move { o.create().await });
    futures::future::try_join_all(puts).await.unwrap();
    pool.namespace("other").unwrap().object("even/x").unwrap().create().await.unwrap();

    let names = |listing: client::Listing| async {
        let mut names: Vec<String> =
            listing.collect().await.unwrap().into_iter().map(|n| n.object().to_owned()).collect();
        names.sort();
        names
    };
    expected.sort();
    assert_eq!(names(pool.list("")).await, expected);
    assert_eq!(names(pool.list("odd/")).await.len(), 1250);
    assert_eq!(names(pool.list_all_namespaces("even/")).await.len(), 1251);
    assert_eq!(names(pool.namespace("other").unwrap().list("")).await, ["even/x"]);
    let mut half = pool.list("");
    let first = half.next().await.unwrap();
    assert!(first.is_some());

    assert!(matches!(client.remove_pool("pool", false).await, Err(Error::Node(NodeError::PoolNotEmpty(_)))));
    client.remove_pool("pool", true).await.unwrap();
    assert!(pool.object("x").unwrap().put("x").await.unwrap_err().is_not_found());
    assert!(client.pools().await.unwrap().is_empty());
    client.create_pool("pool").await.unwrap();
    assert!(pool.list("").collect().await.unwrap().is_empty());
}

#[tokio::test]
async fn the_status_reports_targets_pools_and_sessions() {
    let node = Node::start();
    let (client, _pool) = node.pool().await;
    let status = client.status().await.unwrap();
    assert_eq!((status.targets.len(), status.pools.len(), status.sessions), (2, 1, 1));
    assert!(status.targets.iter().all(|t| t.space.as_ref().is_ok_and(|s| s.total > 0)));
}
