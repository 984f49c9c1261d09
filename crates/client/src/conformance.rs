//! The conformance suite for engines.
//!
//! [`run`] checks that an engine keeps the promises of `docs/semantics.md` and of the trait
//! [`Engine`]. The suite checks nothing beyond these promises. Each case uses a namespace of its
//! own, and panics if a promise does not hold. `inherit` contains the cases about objects that begin as
//! copies of others, `limits` contains the cases about refused requests,
//! `listing` the cases about listings, `concurrency` the cases about concurrent requests, and
//! `model` the comparison with the reference model. `extents` contains the cases about extents, which
//! run only on engines that have this capability.

mod concurrency;
mod extents;
mod inherit;
mod limits;
mod listing;
mod model;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use wire::{AdminRequest, List, Mutation, Query, QueryOp};

use crate::engine::{Capability, ChangeRequest, Engine, ReadRequest, Sink, SinkMemory, Source};
use crate::{Client, Error, NodeError, Object, Options, Pool, PutOptions};

/// Size of a part of the suite's striped objects, in bytes.
const PART: usize = 64 << 10;

/// Runs every case against an engine, in an existing, empty pool. `seed` determines the random
/// operations. Closes the engine at the end.
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
    every_kind_of_source_and_sink_transfers_the_same_bytes(&ground("payload")).await;
    if client.require(&[Capability::Extents]).is_ok() {
        extents::run(&client, &ground("extents")).await;
    }
    listing::run(&client, pool, &ground("listing"), &ground("cursors"), &ground("churn")).await;
    limits::run(&client, &ground("limits")).await;
    inherit::run(&client, &ground("_inherit"), &ground("inherit")).await;
    concurrency::run(&client, &ground("concurrency")).await;
    model::random_operations_agree_with_the_model(&client, &ground("random"), seed).await;
    a_closed_engine_refuses_every_call(&client, &ground("closed")).await;
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

/// Returns the engine's reason to refuse a request. If an answer was lost, the outcome of a refused
/// change may be unknown, but the error still contains the reason.
#[track_caller]
fn node_error<T: std::fmt::Debug>(outcome: Result<T, Error>) -> NodeError {
    let outcome = match outcome {
        Err(Error::OutcomeUnknown(reason)) => Err(*reason),
        outcome => outcome,
    };
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
    let mut grow = |version: u64| {
        assert!(version > seen, "version {version} after {seen}");
        seen = version;
        version
    };
    for round in 0..4 {
        grow(object.put("x").await.unwrap().version);
        grow(object.compound().touch().commit().await.unwrap().version);
        let version = grow(object.set_xattr("round", vec![round]).await.unwrap().version);
        assert!(object.create().await.unwrap_err().is_conflict());
        assert_eq!(object.stat().await.unwrap().version, version, "a refused change has no effect");
        grow(object.remove().await.unwrap().version);
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

async fn a_closed_engine_refuses_every_call(client: &Client, pool: &Pool) {
    let object = object(pool, "closed");
    object.put("x").await.unwrap();
    let (engine, name) = (client.engine(), object.name().clone());
    let deadline = Instant::now() + Duration::from_secs(10);
    let ops = vec![Mutation::Touch];
    let change = ChangeRequest { name: name.clone(), part: None, conditions: vec![], ops, payload: None };
    let mut begun = engine.mutate(change.clone(), deadline);
    client.close().await;
    let closed = |outcome: Result<(), Error>| assert!(matches!(outcome, Err(Error::Closed)), "{outcome:?}");
    closed(begun.attempt().await.map(drop));
    closed(engine.mutate(change, deadline).attempt().await.map(drop));
    let (sink, wire) = (Sink::Bytes, name.to_wire());
    let read = ReadRequest { name, part: None, offset: 0, len: 1, if_version: None, sink, fallbacks: vec![] };
    closed(engine.read(read, deadline).attempt().await.map(drop));
    let list = List {
        pool: wire.pool.clone(),
        namespace: None,
        prefix: Bytes::new(),
        group: None,
        cursor: Bytes::new(),
        limit: 1,
        skip_unavailable: false,
    };
    closed(engine.list(list, deadline).attempt().await.map(drop));
    let query = Query { name: wire, conditions: vec![], ops: vec![QueryOp::Stat] };
    closed(engine.query(query, deadline).attempt().await.map(drop));
    if let Some(admin) = engine.administration() {
        closed(admin.administer(AdminRequest::PoolList { tenant: None }, deadline).attempt().await.map(drop));
    }
    closed(engine.next_upload().map(drop));
    closed(object.get().await.map(drop));
    closed(object.put("y").await.map(drop));
}
