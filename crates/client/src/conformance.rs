//! The conformance suite for engines.
//!
//! [`run`] checks that an engine keeps the promises of `docs/semantics.md`. The suite checks
//! nothing beyond these promises. Each case uses a namespace of its own, and panics if a promise
//! does not hold.

mod model;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::future::join_all;
use wire::{BulkDescriptor, BulkDirection, BulkOwner, MemoryKind};

use crate::engine::{Capability, Engine, SinkMemory, Source};
use crate::{Client, Error, NodeError, Object, Options, Pool, PutOptions};

/// Size of a part of the suite's striped objects, in bytes.
const PART: usize = 64 << 10;

/// Runs every case against an engine, in an existing, empty pool. `seed` determines the random
/// operations.
///
/// # Panics
/// If the engine breaks a promise.
pub async fn run(engine: Arc<dyn Engine>, pool: &str, seed: u64) {
    let options = Options {
        stripe_threshold: 4 * PART as u64,
        part_size: PART as u64,
        read_size: 32 << 10,
        ..Options::default()
    };
    let client = Client::over(engine, options);
    let ground = |namespace: &str| client.pool(pool).unwrap().namespace(namespace).unwrap();
    absent_objects_and_pools_are_not_found(&client, &ground("absent")).await;
    reads_end_at_the_end_of_the_object(&ground("reads")).await;
    ranges_that_were_never_written_read_as_zeros(&ground("writes")).await;
    a_compound_takes_effect_completely_or_not_at_all(&ground("compounds")).await;
    every_condition_is_checked(&ground("conditions")).await;
    versions_grow_and_are_never_reused(&ground("versions")).await;
    puts_keep_xattrs_and_omap_and_removal_removes_them(&ground("metadata")).await;
    omap_pages_together_return_every_entry_of_a_range(&ground("omap")).await;
    a_striped_object_behaves_like_one_object(&ground("striped")).await;
    a_listing_names_every_object_exactly_once(&client, pool, &ground("listing")).await;
    every_kind_of_source_and_sink_transfers_the_same_bytes(&ground("payload")).await;
    bulk_descriptors_are_refused_with_a_typed_error(&ground("descriptors")).await;
    requests_beyond_a_limit_are_refused_with_a_typed_error(&client, &ground("limits")).await;
    concurrent_appends_never_overlap(&ground("appends")).await;
    concurrent_conditional_changes_lose_no_update(&ground("counter")).await;
    a_required_capability_that_the_engine_lacks_is_refused(&client);
    model::random_operations_agree_with_the_model(&ground("random"), seed).await;
}

/// Returns pseudorandom bytes. Different salts yield different bytes.
fn bytes(len: usize, salt: u64) -> Bytes {
    let mut x = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}

fn object(pool: &Pool, name: &str) -> Object {
    pool.object(name).unwrap()
}

#[track_caller]
fn node_error<T: std::fmt::Debug>(outcome: Result<T, Error>) -> NodeError {
    match outcome {
        Err(Error::Node(e)) => e,
        other => panic!("expected a typed error of the engine, got {other:?}"),
    }
}

async fn absent_objects_and_pools_are_not_found(client: &Client, pool: &Pool) {
    let absent = object(pool, "absent");
    let missing = |e: NodeError| assert!(matches!(e, NodeError::NoSuchObject(_)), "{e}");
    missing(node_error(absent.get().await));
    missing(node_error(absent.stat().await));
    missing(node_error(absent.xattrs().await));
    missing(node_error(absent.omap_range("", None, 10).await));
    missing(node_error(absent.remove().await));
    let elsewhere = object(&client.pool("conformance-absent-pool").unwrap(), "x");
    let missing = |e: NodeError| assert!(matches!(e, NodeError::NoSuchPool(_)), "{e}");
    missing(node_error(elsewhere.get().await));
    missing(node_error(elsewhere.put("x").await));
    missing(node_error(elsewhere.stat().await));
}

async fn reads_end_at_the_end_of_the_object(pool: &Pool) {
    for len in [0, 1, 4095, 4096, 4097, 70_001, 200_000] {
        let (object, data) = (object(pool, &format!("{len}")), bytes(len, 1));
        assert_eq!(object.put(data.clone()).await.unwrap().size, len as u64);
        assert_eq!(object.get().await.unwrap(), data);
        assert_eq!(object.stat().await.unwrap().size, len as u64);
        let ranges = [(0, 1), (1, 4096), (4095, 2), (40_000, 100_000), (len as u64, 1), (1 << 40, 5), (7, 0)];
        for (offset, count) in ranges {
            let start = (offset as usize).min(len);
            let expected = data.slice(start..(start + count as usize).min(len));
            assert_eq!(object.get_range(offset, count).await.unwrap(), expected, "{len}: {offset}+{count}");
        }
    }
}

async fn ranges_that_were_never_written_read_as_zeros(pool: &Pool) {
    let object = object(pool, "holes");
    assert_eq!(object.write(10_000, "abc").await.unwrap().size, 10_003);
    let mut expected = vec![0; 10_003];
    expected[10_000..].copy_from_slice(b"abc");
    assert_eq!(object.get().await.unwrap(), expected);
    assert_eq!(
        object.write(50_000, "").await.unwrap().size,
        10_003,
        "an empty write does not extend the object"
    );
    object.truncate(5000).await.unwrap();
    object.truncate(9000).await.unwrap();
    expected.truncate(5000);
    expected.resize(9000, 0);
    assert_eq!(object.get().await.unwrap(), expected);
    let appended = object.append(bytes(6000, 2)).await.unwrap();
    assert_eq!((appended.appended_at, appended.size), (9000, 15_000));
    expected.extend(bytes(6000, 2));
    object.zero(8000, 3000).await.unwrap();
    expected[8000..11_000].fill(0);
    assert_eq!(object.get().await.unwrap(), expected);
    assert_eq!(object.zero(20_000, 1).await.unwrap().size, 20_001);
    expected.resize(20_001, 0);
    assert_eq!(object.get().await.unwrap(), expected);
}

async fn a_compound_takes_effect_completely_or_not_at_all(pool: &Pool) {
    let object = object(pool, "compound");
    let refused = object.compound().write(0, "x").remove().remove().commit().await;
    assert!(matches!(node_error(refused), NodeError::NoSuchObject(_)));
    assert!(object.stat().await.unwrap_err().is_not_found(), "a refused compound creates no object");
    // Each operation sees the operations before it.
    let compound = object.compound().create().write(3, "def").append("g").truncate(6).set_xattr("a", "1");
    let made = compound.omap_set(vec![("k".into(), "v".into())]).commit().await.unwrap();
    assert_eq!((made.size, made.appended_at), (6, 6));
    assert_eq!(object.get().await.unwrap(), &b"\0\0\0def"[..]);
    let refused = object.compound().write_full("other").set_xattr("a", "2").create().commit().await;
    assert!(matches!(node_error(refused), NodeError::Exists(_)));
    assert_eq!(object.get().await.unwrap(), &b"\0\0\0def"[..]);
    assert_eq!(object.xattr("a").await.unwrap().unwrap(), "1");
    // A compound that removes the object and creates it again keeps nothing of the old object.
    object.compound().remove().write(1, "z").commit().await.unwrap();
    assert_eq!(object.get().await.unwrap(), &b"\0z"[..]);
    assert!(object.xattrs().await.unwrap().is_empty());
    assert!(object.omap_range("", None, 10).await.unwrap().entries.is_empty());
}

async fn every_condition_is_checked(pool: &Pool) {
    let object = object(pool, "conditions");
    let failed = |outcome, index: u16| match node_error::<wire::Mutated>(outcome) {
        NodeError::ConditionFailed { index: found, .. } => assert_eq!(found, index),
        other => panic!("{other}"),
    };
    failed(object.compound().if_exists().touch().commit().await, 0);
    let made = object.compound().if_absent().write_full("data").set_xattr("x", "1");
    let version = made.omap_set(vec![("k".into(), "v".into())]).commit().await.unwrap().version;
    failed(object.compound().if_absent().remove().commit().await, 0);
    failed(object.compound().if_exists().if_version(version + 1).remove().commit().await, 1);
    failed(object.compound().if_xattr("x", None).remove().commit().await, 0);
    failed(object.compound().if_xattr("x", Some("2".into())).remove().commit().await, 0);
    failed(object.compound().if_omap("k", Some("w".into())).remove().commit().await, 0);
    failed(object.compound().if_omap("l", Some("v".into())).remove().commit().await, 0);
    failed(object.compound().if_bytes(1, "at_").remove().commit().await, 0);
    let all = object.compound().if_exists().if_version(version).if_xattr("x", Some("1".into()));
    let all = all.if_xattr("y", None).if_omap("k", Some("v".into())).if_omap("l", None).if_bytes(1, "ata");
    all.remove().commit().await.unwrap();
    assert!(object.stat().await.unwrap_err().is_not_found());
}

async fn versions_grow_and_are_never_reused(pool: &Pool) {
    let object = object(pool, "versions");
    let mut seen = 0;
    for round in 0..4 {
        let mut grow = |version: u64| {
            assert!(version > seen, "version {version} after {seen}");
            seen = version;
        };
        grow(object.put("x").await.unwrap().version);
        grow(object.set_xattr("round", vec![round]).await.unwrap().version);
        assert_eq!(object.stat().await.unwrap().version, seen);
        seen = object.remove().await.unwrap().version.max(seen);
    }
}

async fn puts_keep_xattrs_and_omap_and_removal_removes_them(pool: &Pool) {
    let object = object(pool, "metadata");
    object.set_xattr("b", "2").await.unwrap();
    object.set_xattr("a", "1").await.unwrap();
    assert_eq!(object.stat().await.unwrap().size, 0, "setting an xattr creates an empty object");
    let pairs = |pairs: &[(&'static str, &'static str)]| -> Vec<(Bytes, Bytes)> {
        pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    };
    assert_eq!(object.xattrs().await.unwrap(), pairs(&[("a", "1"), ("b", "2")]));
    object.put("data").await.unwrap();
    assert_eq!(
        object.describe().await.unwrap().xattrs,
        pairs(&[("a", "1"), ("b", "2")]),
        "a put keeps xattrs"
    );
    object.remove_xattr("a").await.unwrap();
    assert_eq!(object.xattr("a").await.unwrap(), None);
    object.omap_set(pairs(&[("k2", "w"), ("k1", "v"), ("k3", "x")])).await.unwrap();
    let found = object.omap_get(vec!["k3".into(), "k1".into(), "none".into()]).await.unwrap();
    assert_eq!(found, pairs(&[("k1", "v"), ("k3", "x")]));
    object.omap_remove(vec!["k1".into(), "none".into()]).await.unwrap();
    object.compound().omap_remove_range("k3", "k4").commit().await.unwrap();
    assert_eq!(object.omap_range("", None, 10).await.unwrap().entries, pairs(&[("k2", "w")]));
    object.compound().omap_clear().commit().await.unwrap();
    assert!(object.omap_range("", None, 10).await.unwrap().entries.is_empty());
    object.remove().await.unwrap();
    object.create().await.unwrap();
    assert!(object.xattrs().await.unwrap().is_empty(), "the removal of an object removes its xattrs");
}

async fn omap_pages_together_return_every_entry_of_a_range(pool: &Pool) {
    let object = object(pool, "omap");
    let key = |i: usize| Bytes::from(format!("{i:05}"));
    let entries: Vec<_> = (0..300).map(|i| (key(i), bytes(1 + i % 700, i as u64))).collect();
    for chunk in entries.chunks(100) {
        object.omap_set(chunk.to_vec()).await.unwrap();
    }
    for (from, to, limit) in
        [(0, None, 1000), (0, None, 7), (50, Some(260), 1000), (299, None, 1), (50, Some(50), 9)]
    {
        let mut found = Vec::new();
        let mut next = key(from);
        loop {
            let page = object.omap_range(next, to.map(key), limit).await.unwrap();
            assert!(page.entries.len() <= limit as usize && (!page.more || !page.entries.is_empty()));
            found.extend(page.entries);
            match found.last() {
                Some((last, _)) if page.more => next = [last, &b"\0"[..]].concat().into(),
                _ => break,
            }
        }
        assert_eq!(found, entries[from..to.unwrap_or(300)], "{from}..{to:?} by {limit}");
    }
}

async fn a_striped_object_behaves_like_one_object(pool: &Pool) {
    let object = object(pool, "striped");
    let data = bytes(6 * PART + 1234, 3);
    object.set_xattr("kept", "yes").await.unwrap();
    assert_eq!(object.put(data.clone()).await.unwrap().size, data.len() as u64);
    let stat = object.stat().await.unwrap();
    assert_eq!((stat.size, stat.manifest.unwrap().parts()), (data.len() as u64, 7));
    assert_eq!(object.get().await.unwrap(), data);
    assert_eq!(object.xattr("kept").await.unwrap().unwrap(), "yes");
    for (offset, len) in [(0, 1), (PART - 1, 2), (1000, 3 * PART), (data.len() - 3, 100), (data.len(), 1)] {
        let expected = data.slice(offset..(offset + len).min(data.len()));
        assert_eq!(object.get_range(offset as u64, len as u64).await.unwrap(), expected, "{offset}+{len}");
    }
    let refused = |e: NodeError| assert!(matches!(e, NodeError::Striped { .. }), "{e}");
    refused(node_error(object.write(5, "x").await));
    refused(node_error(object.append("x").await));
    refused(node_error(object.truncate(5).await));
    refused(node_error(object.zero(5, 5).await));
    refused(node_error(object.compound().if_bytes(0, "x").touch().commit().await));
    let other = bytes(5 * PART, 4);
    object.put_reader(&other[..], PutOptions::default()).await.unwrap();
    assert_eq!(object.get().await.unwrap(), other);
    object.put("small").await.unwrap();
    assert_eq!(object.get().await.unwrap(), "small");
    assert_eq!(object.stat().await.unwrap().manifest, None);
    let exclusive = PutOptions { exclusive: true, ..PutOptions::default() };
    assert!(object.put_from(data.into(), exclusive).await.unwrap_err().is_conflict());
    assert_eq!(object.get().await.unwrap(), "small", "the refused put changed nothing");
    assert_eq!(pool.list("").collect().await.unwrap().len(), 1, "parts are not listed");
}

async fn a_listing_names_every_object_exactly_once(client: &Client, pool_name: &str, pool: &Pool) {
    let made: BTreeSet<String> = (0..60).map(|i| format!("{}/{i}", ["a", "b", "ü"][i % 3])).collect();
    let puts = made.iter().map(|name| async move { object(pool, name).put(name.clone()).await.unwrap() });
    join_all(puts).await;
    let listed = pool.list("").collect().await.unwrap();
    assert_eq!(listed.len(), made.len());
    let names = listed.iter().map(|name| name.object().to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(names, made);
    assert_eq!(pool.list("ü/").collect().await.unwrap().len(), 20);
    assert_eq!(pool.list("c").collect().await.unwrap(), []);
    let everywhere = client.pool(pool_name).unwrap().list_all_namespaces("b/").collect().await.unwrap();
    assert_eq!(everywhere.iter().filter(|name| name.namespace() == "listing").count(), 20);
    let first = pool.list("").next().await.unwrap().unwrap();
    object(pool, first.object()).remove().await.unwrap();
    assert_eq!(pool.list("").collect().await.unwrap().len(), made.len() - 1);
}

/// A sink that keeps the data in memory.
#[derive(Debug, Default)]
struct Landed(Mutex<Vec<u8>>);

impl SinkMemory for Landed {
    fn put(&self, offset: u64, data: Bytes) {
        let (mut memory, offset) = (self.0.lock().unwrap(), offset as usize);
        let len = memory.len().max(offset + data.len());
        memory.resize(len, 0);
        memory[offset..offset + data.len()].copy_from_slice(&data);
    }
}

async fn every_kind_of_source_and_sink_transfers_the_same_bytes(pool: &Pool) {
    for len in [0, 100, 70_000, 150_000, 5 * PART + 77] {
        let data = bytes(len, 5);
        let mut file = tempfile_with(&data);
        let third = len / 3;
        let segments = vec![data.slice(..third), data.slice(third..2 * third), data.slice(2 * third..)];
        let file = Source::File { file: Arc::new(file.take().unwrap()), offset: 0, len: len as u64 };
        for (kind, source) in
            [("bytes", data.clone().into()), ("segments", Source::Segments(segments)), ("file", file)]
        {
            let object = object(pool, &format!("{kind}-{len}"));
            object.put_from(source.clone(), PutOptions::default()).await.unwrap();
            let (offset, count) = (third as u64 + 1, 2 * third as u64);
            let from = (third + 1).min(len);
            let expected = data.slice(from..(from + 2 * third).min(len));
            assert_eq!(object.get().await.unwrap(), data, "{kind} {len}");
            assert_eq!(object.get_range(offset, count).await.unwrap(), expected, "{kind} {len}");
            let landed = Arc::new(Landed::default());
            let read = object.read_into(offset, count, landed.clone()).await.unwrap();
            assert_eq!(read, expected.len() as u64);
            assert_eq!(landed.0.lock().unwrap()[..], expected[..], "{kind} {len}");
            let mut stream = object.read_stream(offset, count);
            let mut streamed = Vec::new();
            while let Some(chunk) = stream.next().await.unwrap() {
                streamed.extend_from_slice(&chunk);
            }
            assert_eq!(streamed, expected, "{kind} {len}");
            if len <= 4 * PART {
                object.compound().write_from(4000, source).commit().await.unwrap();
                assert_eq!(object.get_range(4000, len as u64).await.unwrap(), data, "{kind} {len}");
            }
        }
    }
}

/// Returns an unlinked file with this content; `None` after an I/O error.
fn tempfile_with(data: &[u8]) -> Option<std::fs::File> {
    use std::io::Write;
    static NUMBER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("outboard-conformance-{}-{number}", std::process::id()));
    let mut file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).ok()?;
    std::fs::remove_file(&path).ok()?;
    file.write_all(data).ok()?;
    Some(file)
}

async fn bulk_descriptors_are_refused_with_a_typed_error(pool: &Pool) {
    let descriptor = BulkDescriptor {
        owner: BulkOwner::Fabric(vec![1]),
        memory: MemoryKind::Host,
        segments: vec![wire::BulkSegment { address: 0, key: 1, len: 8192 }],
        direction: BulkDirection::Read,
        block_offset: 0,
        expires_ms: 1000,
        remote: None,
    };
    let object = object(pool, "descriptor");
    let put = object.compound().write_full_from(Source::Descriptor(descriptor)).commit().await;
    assert!(matches!(put, Err(Error::Unsupported(_))), "{put:?}");
    assert!(object.stat().await.unwrap_err().is_not_found());
}

async fn requests_beyond_a_limit_are_refused_with_a_typed_error(client: &Client, pool: &Pool) {
    let (object, limits) = (object(pool, "limits"), client.engine().limits());
    let too_large = |e: NodeError| assert!(matches!(e, NodeError::TooLarge { .. }), "{e}");
    too_large(node_error(object.write(limits.object_bytes_max, "x").await));
    too_large(node_error(object.truncate(limits.object_bytes_max + 1).await));
    let value = Bytes::from(vec![0; limits.xattr_bytes_max + 1]);
    too_large(node_error(object.set_xattr("x", value).await));
    let key = Bytes::from(vec![b'k'; limits.omap_key_bytes_max + 1]);
    too_large(node_error(object.omap_set(vec![(key, Bytes::new())]).await));
    let value = Bytes::from(vec![0; limits.omap_value_bytes_max + 1]);
    too_large(node_error(object.omap_set(vec![("k".into(), value)]).await));
    let many = (0..=limits.operations_max).fold(object.compound(), |compound, _| compound.touch());
    too_large(node_error(many.commit().await));
    assert!(matches!(node_error(object.compound().commit().await), NodeError::BadRequest(_)));
    assert!(object.stat().await.unwrap_err().is_not_found(), "the refused changes created no object");
}

async fn concurrent_appends_never_overlap(pool: &Pool) {
    let object = object(pool, "appends");
    let lens = (0..24).map(|i| 1 + i * 997).collect::<Vec<_>>();
    let appends = lens.iter().map(|&len| {
        let object = object.clone();
        async move { (object.append(bytes(len, len as u64)).await.unwrap().appended_at as usize, len) }
    });
    let mut places = join_all(appends).await;
    places.sort_unstable();
    let data = object.get().await.unwrap();
    let mut end = 0;
    for (at, len) in places {
        assert_eq!(at, end, "an append of {len} bytes");
        assert_eq!(data.slice(at..at + len), bytes(len, len as u64));
        end = at + len;
    }
    assert_eq!(data.len(), end);
}

async fn concurrent_conditional_changes_lose_no_update(pool: &Pool) {
    let object = object(pool, "counter");
    object.put("0").await.unwrap();
    let count = |object: Object| async move {
        for _ in 0..8 {
            loop {
                let seen = object.stat().await.unwrap().version;
                let value = object.get().await.unwrap();
                let next: u64 = std::str::from_utf8(&value).unwrap().parse::<u64>().unwrap() + 1;
                let change = object.compound().if_version(seen).write_full(next.to_string());
                match change.commit().await {
                    Ok(_) => break,
                    Err(e) => assert!(e.is_conflict(), "{e}"),
                }
            }
        }
    };
    join_all((0..4).map(|_| count(object.clone()))).await;
    assert_eq!(object.get().await.unwrap(), "32");
}

fn a_required_capability_that_the_engine_lacks_is_refused(client: &Client) {
    client.require(&[]).unwrap();
    for capability in Capability::ALL {
        let outcome = client.require(&[capability]);
        assert_eq!(outcome.is_ok(), client.engine().capabilities().has(capability));
        if let Err(e) = outcome {
            assert!(matches!(&e, Error::Unsupported(what) if what.contains(capability.name())), "{e}");
        }
    }
}
