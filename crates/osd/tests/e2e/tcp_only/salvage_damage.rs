//! Tests of groups that continue with stale targets after an operator has accepted a loss, while data on
//! the remaining targets is damaged or a target is full.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use client::Object;
use store::{Area, MetadataQuery, ObjectId, Op, StoreCalls, StoreError, StoreRequest, Transaction};
use uuid::Uuid;

use crate::common::{FaultStore, Refusal, data};
use crate::redundancy::{Rig, wait_until_whole_but};
use crate::tcp_only::damage::{flip_all, fragments};
use crate::tcp_only::recovery::until;

const LEN: usize = 50_000;

/// Whether a request concerns the object `name`.
fn concerns(request: &StoreRequest, name: &str) -> bool {
    let is_it = |oid: &ObjectId| oid.as_bytes().windows(name.len()).any(|part| part == name.as_bytes());
    match request {
        StoreRequest::Read { oid, .. } => is_it(oid),
        StoreRequest::Query { query, .. } => query.oid().is_some_and(is_it),
        StoreRequest::Transact { transaction, .. } => transaction.ops.iter().any(|op| match op {
            Op::Remove { oid } | Op::Touch { oid } | Op::Truncate { oid, .. } => is_it(oid),
            Op::OmapSet { oid, .. } | Op::SetXattrs { oid, .. } => is_it(oid),
            _ => false,
        }),
        _ => false,
    }
}

fn corrupt() -> StoreError {
    StoreError::Corrupt { what: "index".into(), detail: "injected".into() }
}

/// Everything that a target stores about an object is damaged.
fn damaged(name: &'static str) -> Refusal {
    Box::new(move |request| concerns(request, name).then(corrupt))
}

/// The first `count` requests to read an object's data fail.
fn damaged_reads(name: &'static str, count: usize) -> Refusal {
    let mut left = count;
    Box::new(move |request| {
        let is_read = matches!(request, StoreRequest::Read { .. }) && concerns(request, name);
        left = left.checked_sub(usize::from(is_read))?;
        is_read.then(corrupt)
    })
}

/// The first `count` requests for an object's xattrs fail.
fn damaged_xattrs(name: &'static str, count: usize) -> Refusal {
    let mut left = count;
    Box::new(move |request| {
        let is_query = matches!(request, StoreRequest::Query { query: MetadataQuery::Xattrs { .. }, .. })
            && concerns(request, name);
        left = left.checked_sub(usize::from(is_query))?;
        is_query.then(corrupt)
    })
}

/// The omap of an object cannot be read.
fn damaged_omap(name: &'static str) -> Refusal {
    Box::new(move |request| {
        let is_query =
            matches!(request, StoreRequest::Query { query: MetadataQuery::OmapIterate { .. }, .. });
        (is_query && concerns(request, name)).then(corrupt)
    })
}

/// A target has no space for an object.
fn full(name: &'static str) -> Refusal {
    let no_space = || StoreError::NoSpace { target: Uuid::nil(), area: Area::Data, needed: 1, free: 0 };
    Box::new(move |request| {
        let is_change = matches!(request, StoreRequest::Transact { .. });
        (is_change && concerns(request, name)).then(no_space)
    })
}

/// A target has no room for another object in its index.
fn full_index(name: &'static str) -> Refusal {
    Box::new(move |request| {
        let StoreRequest::Transact { transaction, .. } = request else { return None };
        let adds = concerns(request, name) && !matches!(transaction.ops[0], Op::Remove { .. });
        let (target, area) = (Uuid::nil(), Area::Index);
        adds.then_some(StoreError::NoSpace { target, area, needed: 1, free: 0 })
    })
}

/// Damage prevents that an object is removed, and does not prevent reads.
fn damaged_for_removal(name: &'static str) -> Refusal {
    Box::new(move |request| {
        let StoreRequest::Transact { transaction, .. } = request else { return None };
        let removes = |op: &Op| matches!(op, Op::Remove { .. });
        (concerns(request, name) && transaction.ops.iter().any(removes)).then(corrupt)
    })
}

fn fired(store: &FaultStore) -> u64 {
    store.fired.load(Ordering::SeqCst)
}

impl Rig {
    fn object(&self, name: &str) -> Object {
        self.pool.object(name).unwrap()
    }

    async fn store(&self, name: &str, salt: u64) -> Bytes {
        let bytes = data(LEN, salt);
        self.object(name).put(bytes.clone()).await.unwrap();
        bytes
    }

    /// Loses a target, and waits until the group waits for it.
    async fn lose(&self, target: usize) {
        self.set_down(&[target], true);
        let is_lost = async || {
            let put = self.object("probe").put("x").await;
            put.is_err_and(|e| e.to_string().contains("outboard target forget"))
        };
        until("the group waits", is_lost).await;
    }

    /// Brings stale targets back, and accepts the loss of another.
    async fn go_on(&self, stale: &[usize], lost: usize) {
        self.set_down(stale, false);
        for target in stale {
            self.client.set_target_out(*target as u32, false).await.unwrap();
        }
        self.client.forget_target(lost as u32, true).await.unwrap();
    }

    async fn is_removed(&self, name: &str) -> bool {
        self.object(name).get().await.is_err_and(|e| e.is_not_found())
    }
}

/// Two stale targets have older content, and that of one is damaged.
#[tokio::test]
async fn a_salvage_takes_damaged_older_content_for_lost() {
    let rig = Rig::new("ec:2+2", 1).await;
    let other = rig.store("other", 1).await;
    rig.store("object", 2).await;
    rig.set_down(&[2, 3], true);
    rig.store("object", 3).await;
    rig.lose(0).await;
    assert_eq!(flip_all(rig.node.stores[3].inner()).await, 2);
    rig.go_on(&[2, 3], 0).await;
    assert!(rig.object("other").get().await.unwrap() == other);
    assert!(rig.is_removed("object").await);
}

/// The newest content is on the target in sync and on one stale target.
#[tokio::test]
async fn a_salvage_repeats_a_read_that_fails() {
    let faults: [(usize, fn() -> Refusal); 3] = [
        (2, || damaged_reads("object", 2)),
        (2, || damaged_xattrs("object", 1)),
        (1, || damaged_xattrs("object", 2)),
    ];
    for (target, fault) in faults {
        let rig = Rig::new("ec:2+2", 1).await;
        rig.store("object", 1).await;
        rig.set_down(&[3], true);
        let newest = rig.store("object", 2).await;
        rig.set_down(&[2], true);
        rig.store("other", 3).await;
        rig.lose(0).await;
        let before = fired(&rig.node.stores[target]);
        rig.node.stores[target].refuse(Some(fault()));
        rig.go_on(&[2, 3], 0).await;
        let read = rig.object("object").get().await;
        assert!(read.as_ref().is_ok_and(|read| *read == newest), "{:?}", read.map(|read| read.len()));
        assert!(fired(&rig.node.stores[target]) > before);
    }
}

/// A full target does not receive the newest content of an object, and is the only one with an intact
/// fragment of another object.
#[tokio::test]
async fn a_salvage_keeps_the_fragments_of_a_full_target() {
    let rig = Rig::new("ec:2+2", 1).await;
    let damaged = rig.store("other", 1).await;
    assert_eq!(flip_all(rig.node.stores[3].inner()).await, 1);
    rig.set_down(&[2], true);
    let newest = rig.store("object", 2).await;
    rig.set_down(&[3], true);
    rig.store("further", 3).await;
    rig.lose(0).await;
    rig.node.stores[2].refuse(Some(full("object")));
    rig.go_on(&[2, 3], 0).await;
    assert!(rig.object("object").get().await.unwrap() == newest);
    assert!(fired(&rig.node.stores[2]) > 0);
    rig.node.stores[2].refuse(None);
    let other = rig.object("other");
    until("the full target is used again", async || other.get().await.is_ok_and(|read| read == damaged))
        .await;
    wait_until_whole_but(&rig.client, 1).await;
}

/// A full target has one of two fragments of an object, which another target cannot receive.
#[tokio::test]
async fn a_salvage_waits_for_a_full_target_that_it_needs() {
    let rig = Rig::new("ec:2+2", 1).await;
    rig.store("object", 1).await;
    rig.store("short", 2).await;
    rig.set_down(&[3], true);
    let newest = rig.store("object", 3).await;
    rig.set_down(&[2], true);
    rig.object("short").put("").await.unwrap();
    rig.lose(0).await;
    rig.node.stores[2].refuse(Some(full("short")));
    rig.node.stores[3].refuse(Some(damaged("object")));
    let before = [2, 3].map(|target: usize| fired(&rig.node.stores[target]));
    rig.go_on(&[2, 3], 0).await;
    let have_fired =
        async || [2, 3].iter().zip(before).all(|(t, before)| fired(&rig.node.stores[*t]) > before);
    until("both targets have refused requests", have_fired).await;
    let read = rig.object("object").get().await;
    assert!(read.as_ref().is_err_and(|e| !e.is_not_found()), "{:?}", read.map(|read| read.len()));
    rig.node.stores[2].refuse(None);
    let object = rig.object("object");
    until("the group continues", async || object.get().await.is_ok_and(|read| read == newest)).await;
    assert_eq!(rig.object("short").get().await.unwrap(), "");
}

/// Neither of two full targets can receive an object at first. One of them can later.
#[tokio::test]
async fn a_salvage_tries_all_full_targets_again() {
    let rig = Rig::new("ec:2+2", 1).await;
    rig.store("short", 1).await;
    rig.set_down(&[2, 3], true);
    rig.object("short").put("").await.unwrap();
    rig.lose(0).await;
    [2, 3].iter().for_each(|n: &usize| rig.node.stores[*n].refuse(Some(full("short"))));
    let before = [2, 3].map(|target: usize| fired(&rig.node.stores[target]));
    rig.go_on(&[2, 3], 0).await;
    let have_fired =
        async || [2, 3].iter().zip(before).all(|(t, before)| fired(&rig.node.stores[*t]) > before);
    until("both targets are full", have_fired).await;
    rig.node.stores[2].refuse(None);
    until("the group continues", async || rig.object("short").get().await.is_ok()).await;
}

/// An object is lost, and what the target in sync stores about it is damaged.
#[tokio::test]
async fn a_salvage_goes_on_although_a_lost_object_cannot_be_removed() {
    let rig = Rig::new("ec:2+2", 1).await;
    let other = rig.store("other", 1).await;
    rig.store("object", 2).await;
    rig.set_down(&[3], true);
    rig.store("object", 3).await;
    rig.set_down(&[2], true);
    rig.store("object", 4).await;
    rig.lose(0).await;
    rig.node.stores[1].refuse(Some(damaged("object")));
    rig.go_on(&[2, 3], 0).await;
    assert!(rig.object("other").get().await.unwrap() == other);
    assert!(rig.object("object").get().await.is_err());
    assert!(fired(&rig.node.stores[1]) > 0);
    let status = rig.client.status().await.unwrap();
    assert_eq!(status.targets[1].failure, None);
}

/// A full target that the group does not need lacks an object.
#[tokio::test]
async fn a_salvage_goes_on_without_a_target_that_has_no_room_for_a_new_object() {
    let rig = Rig::new("ec:2+2", 1).await;
    rig.set_down(&[2], true);
    let newest = rig.store("object", 1).await;
    rig.set_down(&[3], true);
    rig.store("other", 2).await;
    rig.lose(0).await;
    let before = fired(&rig.node.stores[2]);
    rig.node.stores[2].refuse(Some(full_index("object")));
    rig.go_on(&[2, 3], 0).await;
    assert!(rig.object("object").get().await.unwrap() == newest);
    assert!(fired(&rig.node.stores[2]) > before);
}

/// The target in sync has newest content that is lost, and cannot receive the older content of the stale
/// targets.
#[tokio::test]
async fn a_salvage_mixes_no_content_with_that_of_a_target_that_cannot_replace_it() {
    let rig = Rig::new("ec:2+2", 1).await;
    let older = rig.store("object", 1).await;
    rig.set_down(&[2, 3], true);
    rig.store("object", 2).await;
    rig.lose(0).await;
    rig.node.stores[1].refuse(Some(damaged_for_removal("object")));
    rig.go_on(&[2, 3], 0).await;
    let read = rig.object("object").get().await;
    assert!(read.as_ref().is_err_and(|e| !e.is_not_found()), "{:?}", read.map(|read| read.len()));
    assert!(fired(&rig.node.stores[1]) > 0);
    rig.client.forget_target(1, true).await.unwrap();
    assert!(rig.object("object").get().await.unwrap() == older);
}

/// The newest content has no data, and its omap cannot be read on the only target that has it.
#[tokio::test]
async fn a_salvage_takes_older_content_if_the_newest_omap_is_damaged() {
    let rig = Rig::new("ec:2+2", 1).await;
    let older = rig.store("object", 1).await;
    rig.set_down(&[2, 3], true);
    rig.object("object").remove().await.unwrap();
    rig.object("object").omap_set(vec![("key".into(), "value".into())]).await.unwrap();
    rig.lose(0).await;
    rig.node.stores[1].refuse(Some(damaged_omap("object")));
    rig.go_on(&[2, 3], 0).await;
    let read = rig.object("object").get().await;
    assert!(read.as_ref().is_ok_and(|read| *read == older), "{:?}", read.map(|read| read.len()));
    assert!(fired(&rig.node.stores[1]) > 0);
}

/// The newest content of a short object is damaged, and a target that lacks it would receive an empty
/// fragment.
#[tokio::test]
async fn a_salvage_replaces_no_content_before_all_copies_are_certain() {
    for turn in 0..4 {
        let rig = Rig::new("ec:2+3", 1).await;
        rig.object("object").put("older").await.unwrap();
        let mut others = Vec::new();
        let mut without_data = None;
        for target in 0..5 {
            match fragments(rig.node.stores[target].inner()).await.is_empty() {
                true => without_data = Some(target),
                false => others.push(target),
            }
        }
        others.rotate_left(turn);
        let [early, late, lost, _] = others[..] else { panic!("{others:?}") };
        let without_data = without_data.unwrap();
        rig.set_down(&[without_data, early], true);
        rig.object("object").put("newer").await.unwrap();
        rig.set_down(&[late], true);
        rig.store("other", 3).await;
        rig.lose(lost).await;
        assert_eq!(flip_all(rig.node.stores[late].inner()).await, 1);
        rig.go_on(&[without_data, early, late], lost).await;
        let read = rig.object("object").get().await;
        assert!(read.as_ref().is_ok_and(|read| *read == "older"), "{read:?}");
    }
}

/// The removal of an object was acknowledged. One of two targets in sync cannot answer whether the object
/// exists.
#[tokio::test]
async fn a_salvage_brings_no_removed_object_back() {
    let rig = Rig::new("ec:3+3", 1).await;
    rig.store("object", 1).await;
    rig.set_down(&[2, 3, 4], true);
    rig.object("object").remove().await.unwrap();
    rig.lose(5).await;
    let before = fired(&rig.node.stores[0]);
    rig.node.stores[0].refuse(Some(damaged_xattrs("object", 100)));
    rig.go_on(&[2, 3, 4], 5).await;
    assert!(rig.is_removed("object").await);
    assert!(fired(&rig.node.stores[0]) > before);
}

/// The copy of the group's metadata to the target that is left in sync was interrupted, before or after
/// the target had an incomplete object.
#[tokio::test]
async fn a_salvage_uses_no_incomplete_metadata() {
    for is_there in [true, false] {
        let rig = Rig::new("ec:2+2", 1).await;
        let other = rig.store("other", 1).await;
        rig.set_down(&[2, 3], true);
        rig.store("object", 2).await;
        rig.lose(0).await;
        let store = rig.node.stores[1].inner();
        let collections = store.collections().await.unwrap();
        let cid = collections.into_iter().find(|cid| cid.as_bytes().starts_with(b"P")).unwrap();
        let oid = ObjectId::new(&b"\0\0\0\0\0meta"[..]).unwrap();
        let mut interrupted = Transaction::new(cid.clone()).with(Op::Remove { oid: oid.clone() });
        if is_there {
            let xattrs = vec![("unfinished".into(), "x".into())];
            interrupted = interrupted
                .with(Op::Touch { oid: oid.clone() })
                .with(Op::SetXattrs { oid: oid.clone(), xattrs });
        }
        store.queue_transaction(interrupted).await.unwrap();
        rig.go_on(&[2, 3], 0).await;
        assert!(rig.object("other").get().await.unwrap() == other);
        let xattrs = store.get_xattrs(&cid, &oid).await.unwrap();
        assert!(xattrs.iter().all(|(name, _)| name != "unfinished"), "{xattrs:?}");
        let (entries, _) = store.omap_iterate(&cid, &oid, Bytes::new(), 10).await.unwrap();
        assert!(!entries.is_empty());
    }
}
