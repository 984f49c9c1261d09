//! Cases about requests that an engine refuses.

use bytes::Bytes;
use wire::{
    BulkDescriptor, BulkDirection, BulkOwner, BulkSegment, List, Manifest, MemoryKind, Mutation, Redundancy,
};

use super::{PART, bytes, node_error, object};
use crate::engine::{ChangeRequest, ReadRequest, Sink, Source};
use crate::{Client, Error, NodeError, Pool};

pub(super) async fn run(client: &Client, pool: &Pool) {
    requests_beyond_a_limit_are_refused_with_a_typed_error(client, pool).await;
    requests_at_a_limit_are_executed(client, pool).await;
    all_xattrs_of_an_object_together_have_a_limit(client, pool).await;
    a_compound_cannot_change_a_part_of_a_block_of_its_bulk_data(pool).await;
    an_upload_with_missing_parts_is_not_committed(client, pool).await;
    bulk_descriptors_are_refused_with_a_typed_error(client, pool).await;
    impossible_pools_are_refused_with_a_typed_error(client).await;
    the_first_error_of_a_request_is_reported(client, pool).await;
    the_first_error_of_a_listing_is_reported(client, pool).await;
}

#[track_caller]
fn too_large<T: std::fmt::Debug>(outcome: Result<T, Error>) {
    let error = node_error(outcome);
    assert!(matches!(error, NodeError::TooLarge { .. }), "{error}");
}

#[track_caller]
fn bad_request<T: std::fmt::Debug>(outcome: Result<T, Error>) {
    let error = node_error(outcome);
    assert!(matches!(error, NodeError::BadRequest(_)), "{error}");
}

async fn requests_beyond_a_limit_are_refused_with_a_typed_error(client: &Client, pool: &Pool) {
    let (object, limits) = (object(pool, "beyond"), client.engine().limits());
    let zeros = |len: usize| Bytes::from(vec![0; len]);
    too_large(object.write(limits.object_bytes_max, "x").await);
    too_large(object.truncate(limits.object_bytes_max + 1).await);
    too_large(object.zero(limits.object_bytes_max, 1).await);
    too_large(object.set_xattr("x", zeros(limits.xattr_bytes_max + 1)).await);
    too_large(object.set_xattr(zeros(limits.xattr_name_bytes_max + 1), "x").await);
    too_large(object.omap_set(vec![(zeros(limits.omap_key_bytes_max + 1), Bytes::new())]).await);
    too_large(object.omap_set(vec![("k".into(), zeros(limits.omap_value_bytes_max + 1))]).await);
    let many = (0..=limits.operations_max).fold(object.compound(), |compound, _| compound.touch());
    too_large(many.commit().await);
    let many = (0..=limits.operations_max).fold(object.compound(), |compound, _| compound.if_absent());
    too_large(many.touch().commit().await);
    too_large(object.compound().append(zeros(limits.append_bytes_max as usize + 1)).commit().await);
    let two = zeros(limits.change_bytes_max + 1);
    too_large(object.compound().write(0, two.clone()).write(1 << 20, two).commit().await);
    let entries = (0..3).map(|i| (vec![i].into(), zeros(limits.change_bytes_max / 3))).collect();
    too_large(object.omap_set(entries).await);
    bad_request(object.compound().commit().await);
    assert!(object.stat().await.unwrap_err().is_not_found(), "the refused changes created no object");
}

async fn requests_at_a_limit_are_executed(client: &Client, pool: &Pool) {
    let (object, limits) = (object(pool, "within"), client.engine().limits());
    let zeros = |len: usize| Bytes::from(vec![0; len]);
    object.set_xattr(zeros(limits.xattr_name_bytes_max), zeros(limits.xattr_bytes_max)).await.unwrap();
    let (key, value) = (zeros(limits.omap_key_bytes_max), zeros(limits.omap_value_bytes_max));
    object.omap_set(vec![(key.clone(), value.clone())]).await.unwrap();
    let page = object.omap_range("", None, limits.page_entries_max).await.unwrap();
    assert_eq!(page.entries, [(key, value)]);
    let all = (0..limits.operations_max).fold(object.compound(), |compound, _| compound.if_exists().touch());
    all.commit().await.unwrap();
    let half = zeros(limits.change_bytes_max - 10_000);
    let size =
        object.compound().write(0, half.clone()).write(1 << 20, half.clone()).commit().await.unwrap().size;
    assert_eq!(size, (1 << 20) + half.len() as u64);
    assert_eq!(object.truncate(limits.object_bytes_max).await.unwrap().size, limits.object_bytes_max);
    object.remove().await.unwrap();
}

async fn all_xattrs_of_an_object_together_have_a_limit(client: &Client, pool: &Pool) {
    let (object, limits) = (object(pool, "xattrs"), client.engine().limits());
    // The engine's own xattrs need the remaining bytes.
    let value = Bytes::from(vec![1; limits.xattrs_bytes_max / 2 - 200]);
    object.set_xattr("a", value.clone()).await.unwrap();
    object.set_xattr("b", value.clone()).await.unwrap();
    too_large(object.set_xattr("c", value.clone()).await);
    assert_eq!(object.xattrs().await.unwrap(), [("a".into(), value.clone()), ("b".into(), value.clone())]);
    object.compound().remove_xattr("a").set_xattr("c", value).commit().await.unwrap();
}

async fn a_compound_cannot_change_a_part_of_a_block_of_its_bulk_data(pool: &Pool) {
    let object = object(pool, "bulk");
    let data = bytes((5 << 20) + 100, 6);
    let write = || object.compound().write_full(data.clone());
    bad_request(write().write(10, "x").commit().await);
    bad_request(write().append("x").commit().await);
    bad_request(write().truncate(5000).commit().await);
    bad_request(write().zero(4096, 100).commit().await);
    assert!(object.stat().await.unwrap_err().is_not_found(), "the refused changes created no object");
    write().write(6 << 20, "end").set_xattr("a", "1").commit().await.unwrap();
    let found = object.get().await.unwrap();
    assert!(found[..data.len()] == data[..] && found[data.len()..6 << 20].iter().all(|byte| *byte == 0));
    assert_eq!(found[6 << 20..], b"end"[..]);
    object.remove().await.unwrap();
}

async fn an_upload_with_missing_parts_is_not_committed(client: &Client, pool: &Pool) {
    let object = object(pool, "upload");
    let upload = client.engine().next_upload().unwrap();
    assert_ne!(client.engine().next_upload().unwrap(), upload);
    let manifest = Manifest { upload, part_size: PART as u64, size: 2 * PART as u64 };
    let commit = ChangeRequest {
        name: object.name().clone(),
        part: None,
        conditions: vec![],
        ops: vec![Mutation::SetManifest(manifest)],
        payload: None,
    };
    bad_request(client.requests.mutate(commit).await);
    assert!(object.stat().await.unwrap_err().is_not_found());
}

fn descriptor(direction: BulkDirection) -> BulkDescriptor {
    BulkDescriptor {
        owner: BulkOwner::Fabric(vec![1]),
        memory: MemoryKind::Host,
        segments: vec![BulkSegment { address: 0, key: 1, len: 8192 }],
        direction,
        block_offset: 0,
        expires_ms: 1000,
        remote: None,
    }
}

async fn bulk_descriptors_are_refused_with_a_typed_error(client: &Client, pool: &Pool) {
    let object = object(pool, "descriptor");
    let source = Source::Descriptor(descriptor(BulkDirection::Read));
    let put = object.compound().write_full_from(source).commit().await;
    assert!(matches!(put, Err(Error::Unsupported(_))), "{put:?}");
    assert!(object.stat().await.unwrap_err().is_not_found());
    object.put("x").await.unwrap();
    let sink = Sink::Descriptor(descriptor(BulkDirection::Write));
    let name = object.name().clone();
    let read = ReadRequest { name, part: None, offset: 0, len: 1, if_version: None, sink, fallbacks: vec![] };
    let read = client.requests.read(read).await;
    assert!(matches!(read, Err(Error::Unsupported(_))), "{read:?}");
}

/// An engine may refuse to manage pools at all.
async fn impossible_pools_are_refused_with_a_typed_error(client: &Client) {
    let (most, single) = (wire::limits::MAX_PG_COUNT, Redundancy::Single);
    for (pg_count, redundancy) in [(3, single), (2 * most, single), (4, Redundancy::Mirror { copies: 1 })] {
        let made = client.create_pool_with("conformance-impossible-pool", pg_count, redundancy).await;
        let is_refused =
            matches!(made, Err(Error::Node(NodeError::OutOfRange { .. }) | Error::Unsupported(_)));
        assert!(is_refused, "{pg_count} {redundancy}: {made:?}");
    }
}

async fn the_first_error_of_a_request_is_reported(client: &Client, pool: &Pool) {
    let (present, limits) = (object(pool, "present"), client.engine().limits());
    present.put("x").await.unwrap();
    let elsewhere = object(&client.pool("conformance-absent-pool").unwrap(), "x");
    // Sizes and counts of the request come first, then the pool.
    too_large(elsewhere.compound().if_exists().truncate(limits.object_bytes_max + 1).commit().await);
    let error = node_error(elsewhere.compound().if_exists().touch().commit().await);
    assert!(matches!(error, NodeError::NoSuchPool(_)), "{error}");
    // Then come the size of the data, and the conditions.
    too_large(present.compound().if_absent().write(limits.object_bytes_max, "x").commit().await);
    let error = node_error(present.compound().if_absent().create().commit().await);
    assert!(matches!(error, NodeError::ConditionFailed { index: 0, .. }), "{error}");
    // The ops come last, in order.
    let error = node_error(present.compound().create().remove().remove().commit().await);
    assert!(matches!(error, NodeError::Exists(_)), "{error}");
    let error = node_error(present.compound().remove().remove().touch().create().commit().await);
    assert!(matches!(error, NodeError::NoSuchObject(_)), "{error}");
    let error = node_error(present.compound().touch().create().remove().remove().commit().await);
    assert!(matches!(error, NodeError::Exists(_)), "{error}");
    assert_eq!(present.get().await.unwrap(), "x");
}

async fn the_first_error_of_a_listing_is_reported(client: &Client, pool: &Pool) {
    let present = pool.name().to_owned();
    let list = async |pool: &str, namespace: &'static [u8]| {
        let list = List {
            pool: pool.to_owned().into(),
            namespace: Some(Bytes::from_static(namespace)),
            prefix: Bytes::new(),
            group: Some(u32::MAX),
            cursor: Bytes::new(),
            limit: 1,
            skip_unavailable: false,
        };
        node_error(client.requests.list(list).await)
    };
    // Names come first, then the pool, then the group.
    for pool in ["conformance-absent-pool", &present] {
        let error = list(pool, b"a\0").await;
        assert!(matches!(error, NodeError::BadName(_)), "{pool}: {error}");
    }
    let error = list("conformance-absent-pool", b"a").await;
    assert!(matches!(error, NodeError::NoSuchPool(_)), "{error}");
    let error = list(&present, b"a").await;
    assert!(matches!(error, NodeError::OutOfRange { .. }), "{error}");
}
