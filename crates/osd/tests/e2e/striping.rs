//! Tests of striped objects, which are stored as a head object and parts.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use store::StoreCalls;

use client::{Client, Error, NodeError, Object, Options, PutOptions};
use tokio::io::{AsyncRead, ReadBuf};
use wire::{Data, Manifest, Mutate, Mutation, ObjectRequest, OpBytes, PartId, RequestBody, UploadId};

use crate::common::{Node, data};
use crate::raw::{Raw, head, mutate};

const PART: u64 = 256 << 10;

fn options() -> Options {
    Options { stripe_threshold: 1 << 20, part_size: PART, read_size: 96 << 10, ..Options::default() }
}

async fn object(node: &Node) -> (Client, Object) {
    object_with(node, options()).await
}

async fn object_with(node: &Node, options: Options) -> (Client, Object) {
    let client = node.client_with(options).await;
    client.create_pool("pool").await.unwrap();
    let object = client.pool("pool").unwrap().object("object").unwrap();
    (client, object)
}

#[tokio::test]
async fn a_striped_object_behaves_like_one_object() {
    let node = Node::start();
    let (_client, object) = object(&node).await;
    let bytes = data((3 << 20) + 12_345, 1);
    object.set_xattr("kept", "yes").await.unwrap();
    let put = object.put(bytes.clone()).await.unwrap();
    assert_eq!(put.size, bytes.len() as u64);
    let stat = object.stat().await.unwrap();
    assert_eq!((stat.size, stat.manifest.unwrap().parts()), (bytes.len() as u64, 13));
    assert!(object.get().await.unwrap() == bytes);
    for (offset, len) in [(0, 1), (PART - 1, 2), (100_000, 1 << 20), ((3 << 20) + 12_000, 1000), (1 << 30, 5)]
    {
        let start = (offset as usize).min(bytes.len());
        let expected = bytes.slice(start..(start + len as usize).min(bytes.len()));
        assert!(object.get_range(offset, len).await.unwrap() == expected, "{offset}+{len}");
    }
    let mut out = Vec::new();
    assert_eq!(object.get_to_writer(&mut out).await.unwrap(), bytes.len() as u64);
    assert!(out == bytes);
    assert_eq!(object.xattr("kept").await.unwrap().unwrap(), "yes");
    assert_eq!(object.parts().await, 13);
    let names: Vec<_> = object.xattrs().await.unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["kept"], "the osd's own xattrs are not listed");

    let striped = |r: Result<_, Error>| assert!(matches!(r, Err(Error::Node(NodeError::Striped { .. }))));
    striped(object.write(5, "x").await);
    striped(object.append("x").await);
    striped(object.truncate(5).await);
    striped(object.zero(5, 5).await);
    striped(object.compound().if_bytes(0, "x").touch().commit().await);
}

#[tokio::test]
async fn streams_of_any_length_can_be_stored() {
    let node = Node::start();
    let (_client, object) = object(&node).await;
    for len in [0, 1, PART - 1, PART, PART + 1, 2 * PART, 2 * PART + 77, 9 * PART] {
        let bytes = data(len as usize, len);
        object.put_reader(&bytes[..], PutOptions::default()).await.unwrap();
        assert!(object.get().await.unwrap() == bytes, "{len} bytes");
    }
    let file = tempfile(&data(2 << 20, 3));
    object.put_file(&file.0, PutOptions::default()).await.unwrap();
    assert!(object.get().await.unwrap() == data(2 << 20, 3));
}

#[tokio::test]
async fn parts_are_removed_when_their_object_is_replaced_or_removed() {
    let node = Node::start();
    let (_client, object) = object(&node).await;
    object.put(data(2 << 20, 1)).await.unwrap();
    assert_eq!(object.parts().await, 8);
    object.put(data((1 << 20) + 1, 2)).await.unwrap();
    node.eventually_parts(5).await;
    assert!(object.get().await.unwrap() == data((1 << 20) + 1, 2));
    object.put("small").await.unwrap();
    node.eventually_parts(0).await;
    assert_eq!(object.get().await.unwrap(), "small");
    object.put(data(2 << 20, 1)).await.unwrap();
    object.remove().await.unwrap();
    node.eventually_parts(0).await;
}

#[tokio::test]
async fn parts_of_a_failed_upload_are_removed() {
    let node = Node::start();
    let (_client, object) = object(&node).await;
    object.put("before").await.unwrap();
    let failing = Broken { left: 5 * PART as usize, fails: true };
    let e = object.put_reader(failing, PutOptions::default()).await.unwrap_err();
    assert!(matches!(e, Error::Io(_)));
    assert_eq!(node.parts(), 0);
    let exclusive = PutOptions { exclusive: true, ..PutOptions::default() };
    assert!(object.put_with(data(2 << 20, 1), exclusive).await.unwrap_err().is_conflict());
    assert_eq!(node.parts(), 0);
    assert_eq!(object.get().await.unwrap(), "before");
}

#[tokio::test]
async fn parts_of_an_abandoned_upload_are_removed_once_its_client_disconnects() {
    let node = Node::start();
    let (client, object) = object_with(&node, Options { parts_in_flight: 1, ..options() }).await;
    object.put("before").await.unwrap();
    let hanging = Broken { left: 5 * PART as usize, fails: false };
    tokio::select! {
        outcome = object.put_reader(hanging, PutOptions::default()) => panic!("the stream hangs: {outcome:?}"),
        // One part is sent at a time, the fifth only when the stream goes on.
        () = node.eventually_parts(4) => {}
    }
    let other = node.client().await;
    assert_eq!(other.collect_orphans(Duration::ZERO).await.unwrap(), 0, "its client is still connected");
    client.close().await;
    while other.collect_orphans(Duration::ZERO).await.unwrap() == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(node.parts(), 0);
    assert_eq!(other.pool("pool").unwrap().object("object").unwrap().get().await.unwrap(), "before");
}

#[tokio::test]
async fn parts_of_a_replaced_uncached_object_are_removed_by_the_next_collector_run() {
    let mut node = Node::start();
    let (client, object) = object(&node).await;
    object.put(data(2 << 20, 1)).await.unwrap();
    let kept = client.pool("pool").unwrap().object("kept").unwrap();
    kept.put(data(2 << 20, 2)).await.unwrap();
    node.restart();
    object.put("small").await.unwrap();
    assert_eq!(node.parts(), 16, "a full write by an osd that has not cached the object keeps the old parts");
    let an_hour = Duration::from_secs(3600);
    assert_eq!(
        client.collect_orphans(an_hour).await.unwrap(),
        8,
        "replaced parts are collected although their client is connected"
    );
    assert_eq!(object.get().await.unwrap(), "small");
    assert_eq!(kept.get().await.unwrap(), data(2 << 20, 2));
}

#[tokio::test]
async fn the_collector_needs_no_query_per_part_if_the_head_object_is_cached() {
    let node = Node::start();
    let (client, object) = object(&node).await;
    let bytes = data(2 << 20, 1);
    object.put(bytes.clone()).await.unwrap();
    let asked = node.listed_xattrs();
    assert_eq!(client.collect_orphans(Duration::ZERO).await.unwrap(), 0);
    assert_eq!((node.parts(), node.listed_xattrs()), (8, asked));
    assert!(object.get().await.unwrap() == bytes);
}

#[tokio::test]
async fn a_manifest_whose_parts_were_removed_by_the_collector_is_refused() {
    let node = Node::start();
    let (client, object) = object(&node).await;
    object.put("before").await.unwrap();
    let mut away = Raw::connect(&node.endpoint, None).await;
    let upload = UploadId { session: away.session, number: 1 };
    let whole = Mutation::WriteFull(OpBytes::Embedded(data(4096, 7)));
    let part = |index| match mutate("object", vec![whole.clone()], Data::None) {
        RequestBody::Object(ObjectRequest::Mutate(change)) => {
            RequestBody::Object(ObjectRequest::Mutate(Mutate {
                part: Some(PartId { upload, index }),
                ..change
            }))
        }
        other => other,
    };
    away.changed(head(1), part(0)).await.unwrap();
    away.connection.close().await;
    while client.collect_orphans(Duration::ZERO).await.unwrap() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut back = Raw::connect(&node.endpoint, Some(away.session)).await;
    back.changed(head(2), part(1)).await.unwrap();
    let manifest = Mutation::SetManifest(Manifest { upload, part_size: 4096, size: 8192 });
    let commit = || mutate("object", vec![manifest.clone()], Data::None);
    let refused = back.changed(head(3), commit()).await;
    assert!(matches!(&refused, Err(NodeError::BadRequest(why)) if why.contains("part 0")), "{refused:?}");
    assert_eq!(object.get().await.unwrap(), "before");
    back.changed(head(4), part(0)).await.unwrap();
    back.changed(head(5), commit()).await.unwrap();
    assert!(object.get().await.unwrap() == [data(4096, 7), data(4096, 7)].concat());
}

#[tokio::test]
async fn a_read_of_an_object_that_is_being_replaced_never_mixes_versions() {
    let node = Node::start();
    let (_client, object) = object(&node).await;
    let versions: Vec<_> = (0..4).map(|i| data((1 << 20) + 1000 * i, i as u64)).collect();
    object.put(versions[0].clone()).await.unwrap();
    let writer = async {
        for i in 0..24 {
            object.put(versions[i % 4].clone()).await.unwrap();
        }
    };
    let reader = async {
        let mut whole = 0;
        for _ in 0..24 {
            match object.get().await {
                Ok(bytes) => {
                    assert!(versions.contains(&bytes), "a read mixed several versions");
                    whole += 1;
                }
                Err(Error::Node(NodeError::Changed { .. })) => {}
                Err(e) => panic!("{e}"),
            }
        }
        whole
    };
    let ((), whole) = tokio::join!(writer, reader);
    assert!(whole > 0, "some reads succeed");
}

/// A stream that fails or hangs after some bytes.
struct Broken {
    left: usize,
    fails: bool,
}

impl AsyncRead for Broken {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.left == 0 && !self.fails {
            return Poll::Pending;
        }
        if self.left == 0 {
            return Poll::Ready(Err(io::Error::other("the stream broke")));
        }
        let len = buf.remaining().min(self.left).min(10_000);
        buf.put_slice(&vec![7; len]);
        self.left -= len;
        Poll::Ready(Ok(()))
    }
}

/// A file that is removed when the test ends.
struct TempFile(std::path::PathBuf);

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn tempfile(content: &[u8]) -> TempFile {
    let path = std::env::temp_dir().join(format!("outboard-striping-{}", std::process::id()));
    std::fs::write(&path, content).unwrap();
    TempFile(path)
}

trait Parts {
    async fn parts(&self) -> u64;
}

impl Parts for Object {
    async fn parts(&self) -> u64 {
        self.stat().await.unwrap().manifest.map_or(0, |m| m.parts())
    }
}

impl Node {
    /// Returns the number of store objects that are parts.
    fn parts(&self) -> usize {
        use futures::FutureExt;
        let mut parts = 0;
        for store in &self.stores {
            let store = &store.inner;
            let now = "a memory store answers at once";
            for cid in store.collections().now_or_never().expect(now).unwrap() {
                let (ids, _) = store.list(&cid, None, 10_000).now_or_never().expect(now).unwrap();
                parts += ids.iter().filter(|id| id.as_bytes().get(4) == Some(&4)).count();
            }
        }
        parts
    }

    async fn eventually_parts(&self, wanted: usize) {
        for _ in 0..3000 {
            if self.parts() == wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} parts instead of {wanted}", self.parts());
    }
}
