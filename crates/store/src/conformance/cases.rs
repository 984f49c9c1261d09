//! The conformance scenarios of [`ObjectStore`].

mod data;
mod extents;
mod guards;

use std::sync::Arc;

use base::block::{BLOCK, Payload};
use bytes::Bytes;

use data::*;
use extents::*;
use guards::*;

use super::{Case, cid, oid, one, pattern, read_all, write};
use crate::{
    MAX_STORED_OBJECT, MAX_XATTRS, ObjectId, ObjectStore, Op, StoreCalls, StoreError, Transaction,
    WriteSource,
};

macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        /// All scenarios, with their names.
        pub const CASES: &[Case] = &[$((stringify!($name), |store| Box::pin($name(store)))),*];
    };
}

cases!(
    collections_are_created_listed_and_removed,
    objects_are_created_and_removed,
    writes_of_no_bytes_change_nothing,
    writes_of_any_alignment_are_read_back,
    holes_and_zeroed_ranges_read_as_zeros,
    extents_are_the_blocks_that_were_written,
    zeroed_and_truncated_blocks_are_holes,
    clones_have_the_extents_of_their_source,
    extents_show_staged_bytes_and_queued_transactions,
    many_extents_need_several_answers,
    a_truncation_discards_the_bytes_after_the_new_end,
    reads_end_at_the_objects_end_and_return_checksums,
    a_read_fills_the_callers_destination,
    xattrs_are_set_read_and_removed,
    omap_entries_are_set_read_and_removed,
    an_omap_is_read_in_pages,
    objects_are_listed_in_bytewise_order_of_their_ids,
    a_clone_and_its_source_change_independently,
    ranges_of_any_alignment_can_be_cloned,
    an_object_can_be_moved_and_renamed,
    a_collection_can_be_split,
    failed_transactions_change_nothing,
    requests_of_a_collection_execute_in_the_order_of_submission,
    a_query_shows_no_later_transaction,
    a_guard_compares_a_value_at_its_point_of_the_transaction,
    a_guard_sees_the_transactions_queued_before_it,
    a_stage_stays_usable_after_a_refused_transaction,
    staged_bytes_become_data_of_objects,
    invalid_uses_of_stages_are_refused,
    damaged_payloads_are_detected,
    arguments_out_of_range_are_refused,
    removed_objects_free_their_space,
    a_full_target_refuses_data_until_objects_are_removed,
);

type Store = Arc<dyn ObjectStore>;

async fn apply(store: &Store, transaction: Transaction) {
    store.queue_transaction(transaction).await.expect("transaction");
}

async fn with_collection(store: &Store) -> crate::CollectionId {
    let c = cid("c");
    apply(store, one(&c, Op::CreateCollection)).await;
    c
}

async fn collections_are_created_listed_and_removed(store: Store) {
    let (a, b) = (cid("a"), cid("b"));
    let missing = store.queue_transaction(one(&a, Op::Touch { oid: oid("x") })).await;
    assert!(matches!(missing, Err(StoreError::NoSuchCollection(_))), "{missing:?}");
    apply(&store, one(&b, Op::CreateCollection)).await;
    apply(&store, one(&a, Op::CreateCollection)).await;
    assert_eq!(store.collections().await.unwrap(), [a.clone(), b.clone()]);
    assert!(matches!(
        store.queue_transaction(one(&a, Op::CreateCollection)).await,
        Err(StoreError::Exists(_))
    ));
    apply(&store, one(&a, Op::Touch { oid: oid("x") })).await;
    assert!(matches!(
        store.queue_transaction(one(&a, Op::RemoveCollection)).await,
        Err(StoreError::NotEmpty(_))
    ));
    apply(&store, one(&a, Op::Remove { oid: oid("x") }).with(Op::RemoveCollection)).await;
    assert_eq!(store.collections().await.unwrap(), [b]);
    assert!(matches!(store.list(&a, None, 9).await, Err(StoreError::NoSuchCollection(_))));
    assert!(matches!(store.stat(&a, &oid("x")).await, Err(StoreError::NoSuchCollection(_))));
}

async fn objects_are_created_and_removed(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    assert!(matches!(store.stat(&c, &o).await, Err(StoreError::NoSuchObject(_))));
    assert!(matches!(
        store.queue_transaction(one(&c, Op::Remove { oid: o.clone() })).await,
        Err(StoreError::NoSuchObject(_))
    ));
    apply(&store, one(&c, Op::CreateExclusive { oid: o.clone() })).await;
    let twice = store.queue_transaction(one(&c, Op::CreateExclusive { oid: o.clone() })).await;
    assert!(matches!(twice, Err(StoreError::Exists(_))));
    apply(&store, one(&c, write(&o, 0, pattern(1, 10_000)))).await;
    apply(&store, one(&c, Op::Touch { oid: o.clone() })).await;
    assert_eq!(read_all(&*store, &c, &o).await, pattern(1, 10_000));
    apply(&store, one(&c, Op::Remove { oid: o.clone() }).with(Op::Touch { oid: o.clone() })).await;
    assert_eq!(store.stat(&c, &o).await.unwrap().size, 0, "an object that is created again is empty");
    assert!(store.get_xattrs(&c, &o).await.unwrap().is_empty());
}

async fn writes_of_no_bytes_change_nothing(store: Store) {
    let c = with_collection(&store).await;
    let (o, made) = (oid("o"), oid("made"));
    apply(&store, one(&c, write(&o, 0, pattern(1, 5000)))).await;
    let clone = |len| Op::CloneRange { src: o.clone(), dst: o.clone(), src_offset: 0, len, dst_offset: 8192 };
    for op in [write(&o, 17_794, Bytes::new()), Op::Zero { oid: o.clone(), offset: 17_794, len: 0 }, clone(0)]
    {
        apply(&store, one(&c, op)).await;
        assert_eq!(read_all(&*store, &c, &o).await, pattern(1, 5000));
    }
    apply(&store, one(&c, write(&made, 17_794, Bytes::new()))).await;
    assert_eq!(store.stat(&c, &made).await.unwrap().size, 0);
}

async fn xattrs_are_set_read_and_removed(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let pair = |k: &'static str, v: &'static str| (Bytes::from(k), Bytes::from(v));
    let set = Op::SetXattrs { oid: o.clone(), xattrs: vec![pair("b", "2"), pair("a", ""), pair("c", "3")] };
    apply(&store, one(&c, set)).await;
    apply(&store, one(&c, Op::SetXattrs { oid: o.clone(), xattrs: vec![pair("b", "22")] })).await;
    apply(&store, one(&c, Op::RemoveXattr { oid: o.clone(), name: "c".into() })).await;
    assert_eq!(store.get_xattrs(&c, &o).await.unwrap(), [pair("a", ""), pair("b", "22")]);
    assert_eq!(store.get_xattr(&c, &o, "b".into()).await.unwrap(), "22");
    assert!(matches!(store.get_xattr(&c, &o, "c".into()).await, Err(StoreError::NoSuchXattr(_))));
    let large = Op::SetXattrs { oid: o.clone(), xattrs: vec![("z".into(), vec![0; MAX_XATTRS].into())] };
    assert!(matches!(store.queue_transaction(one(&c, large)).await, Err(StoreError::TooLarge { .. })));
    apply(&store, one(&c, Op::RemoveXattrs { oid: o.clone() })).await;
    assert!(store.get_xattrs(&c, &o).await.unwrap().is_empty());
}

async fn omap_entries_are_set_read_and_removed(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let pair = |k: &str, v: &str| (Bytes::from(k.to_owned()), Bytes::from(v.to_owned()));
    let entries = ["a", "b", "c", "d", "e"].map(|k| pair(k, k)).to_vec();
    let set = one(&c, Op::OmapSet { oid: o.clone(), entries })
        .with(Op::OmapSetHeader { oid: o.clone(), header: "head".into() });
    apply(&store, set).await;
    apply(&store, one(&c, Op::OmapRemove { oid: o.clone(), keys: vec!["a".into(), "none".into()] })).await;
    apply(&store, one(&c, Op::OmapRemoveRange { oid: o.clone(), from: "b1".into(), to: "d".into() })).await;
    apply(
        &store,
        one(&c, Op::OmapSet { oid: o.clone(), entries: vec![pair("b", "new"), pair("", "empty key")] }),
    )
    .await;
    let (all, more) = store.omap_iterate(&c, &o, Bytes::new(), 100).await.unwrap();
    assert_eq!(
        (all, more),
        (vec![pair("", "empty key"), pair("b", "new"), pair("d", "d"), pair("e", "e")], false)
    );
    let got = store.omap_get(&c, &o, vec!["e".into(), "c".into(), "b".into()]).await.unwrap();
    assert_eq!(got, [pair("b", "new"), pair("e", "e")]);
    assert_eq!(store.omap_get_header(&c, &o).await.unwrap(), "head");
    apply(&store, one(&c, Op::OmapRemoveRange { oid: o.clone(), from: "z".into(), to: "a".into() })).await;
    apply(
        &store,
        one(&c, Op::OmapClear { oid: o.clone() })
            .with(Op::OmapSet { oid: o.clone(), entries: vec![pair("x", "y")] }),
    )
    .await;
    assert_eq!(store.omap_iterate(&c, &o, Bytes::new(), 100).await.unwrap(), (vec![pair("x", "y")], false));
    assert_eq!(store.omap_get_header(&c, &o).await.unwrap(), "");
}

async fn an_omap_is_read_in_pages(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let key = |i: u32| Bytes::from(format!("{i:06}"));
    for chunk in 0..10 {
        let entries = (0..100).map(|i| (key(i * 10 + chunk), pattern(u64::from(i), 20))).collect();
        apply(&store, one(&c, Op::OmapSet { oid: o.clone(), entries })).await;
    }
    let (mut from, mut seen) = (Bytes::new(), Vec::new());
    loop {
        let (page, more) = store.omap_iterate(&c, &o, from, 77).await.unwrap();
        assert!(page.len() <= 77 && (!page.is_empty() || !more));
        seen.extend(page.into_iter().map(|(k, _)| k));
        if !more {
            break;
        }
        from = [seen.last().expect("a page has entries"), &b"\0"[..]].concat().into();
    }
    assert_eq!(seen, (0..1000).map(key).collect::<Vec<_>>());
    let large = (0..5).map(|i| (key(i), pattern(1, 400_000))).collect();
    apply(
        &store,
        one(&c, Op::OmapClear { oid: o.clone() }).with(Op::OmapSet { oid: o.clone(), entries: large }),
    )
    .await;
    let (page, more) = store.omap_iterate(&c, &o, Bytes::new(), 100).await.unwrap();
    assert!(more && !page.is_empty() && page.len() < 5, "a page has at most about 1 MiB");
}

async fn objects_are_listed_in_bytewise_order_of_their_ids(store: Store) {
    let c = with_collection(&store).await;
    let names: Vec<ObjectId> = [&b"\0"[..], b"\0\0", b"a", b"a\0", b"ab", b"b", b"\xff", b"\xff\xff"]
        .map(|n| ObjectId::new(Bytes::from_static(n)).unwrap())
        .to_vec();
    let touch =
        names.iter().rev().fold(Transaction::new(c.clone()), |t, o| t.with(Op::Touch { oid: o.clone() }));
    apply(&store, touch).await;
    assert_eq!(store.list(&c, None, 100).await.unwrap(), (names.clone(), false));
    assert_eq!(store.list(&c, None, 3).await.unwrap(), (names[..3].to_vec(), true));
    assert_eq!(store.list(&c, Some(oid("aa")), 2).await.unwrap(), (names[4..6].to_vec(), true));
    assert_eq!(store.list(&c, Some(names[7].clone()), 2).await.unwrap(), (names[7..].to_vec(), false));
}

async fn an_object_can_be_moved_and_renamed(store: Store) {
    let c = with_collection(&store).await;
    let d = cid("d");
    apply(&store, one(&d, Op::CreateCollection)).await;
    let (a, b) = (oid("a"), oid("b"));
    apply(&store, one(&c, write(&a, 0, pattern(13, 10_000)))).await;
    let rename = |src: &ObjectId, to: &crate::CollectionId, dst: &ObjectId| Op::MoveRename {
        src: src.clone(),
        dst_collection: to.clone(),
        dst: dst.clone(),
    };
    apply(&store, one(&c, rename(&a, &d, &b))).await;
    assert_eq!(read_all(&*store, &d, &b).await, pattern(13, 10_000));
    assert!(matches!(store.stat(&c, &a).await, Err(StoreError::NoSuchObject(_))));
    assert!(matches!(
        store.queue_transaction(one(&c, rename(&a, &d, &b))).await,
        Err(StoreError::NoSuchObject(_))
    ));
    apply(&store, one(&c, Op::Touch { oid: a.clone() })).await;
    assert!(matches!(store.queue_transaction(one(&c, rename(&a, &d, &b))).await, Err(StoreError::Exists(_))));
    let nowhere = store.queue_transaction(one(&c, rename(&a, &cid("nowhere"), &b))).await;
    assert!(matches!(nowhere, Err(StoreError::NoSuchCollection(_))));
    apply(&store, one(&d, rename(&b, &d, &a))).await;
    assert_eq!(store.list(&d, None, 9).await.unwrap().0, [a]);
}

async fn a_collection_can_be_split(store: Store) {
    let c = with_collection(&store).await;
    let d = cid("d");
    apply(&store, one(&d, Op::CreateCollection)).await;
    for name in ["a", "b", "c", "d"] {
        apply(&store, one(&c, write(&oid(name), 0, Bytes::from(name.to_owned())))).await;
    }
    apply(&store, one(&c, Op::SplitCollection { at: oid("c"), dst: d.clone() })).await;
    assert_eq!(store.list(&c, None, 9).await.unwrap().0, [oid("a"), oid("b")]);
    assert_eq!(store.list(&d, None, 9).await.unwrap().0, [oid("c"), oid("d")]);
    assert_eq!(read_all(&*store, &d, &oid("d")).await, "d");
    let nowhere = Op::SplitCollection { at: oid("a"), dst: cid("nowhere") };
    assert!(matches!(store.queue_transaction(one(&c, nowhere)).await, Err(StoreError::NoSuchCollection(_))));
}

async fn failed_transactions_change_nothing(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    apply(&store, one(&c, write(&o, 0, pattern(14, 10_000)))).await;
    let pair = || vec![(Bytes::from("k"), Bytes::from("v"))];
    let failing = one(&c, write(&o, 100, pattern(15, 9000)))
        .with(Op::Touch { oid: oid("new") })
        .with(Op::OmapSet { oid: o.clone(), entries: pair() })
        .with(Op::SetXattrs { oid: o.clone(), xattrs: pair() })
        .with(Op::Truncate { oid: o.clone(), size: 1 })
        .with(Op::Clone { src: o.clone(), dst: oid("copy") })
        .with(Op::Remove { oid: oid("missing") });
    assert!(matches!(store.queue_transaction(failing).await, Err(StoreError::NoSuchObject(_))));
    assert_eq!(read_all(&*store, &c, &o).await, pattern(14, 10_000));
    assert_eq!(store.list(&c, None, 9).await.unwrap().0, std::slice::from_ref(&o));
    assert!(store.get_xattrs(&c, &o).await.unwrap().is_empty());
    assert!(store.omap_iterate(&c, &o, Bytes::new(), 9).await.unwrap().0.is_empty());
}

async fn requests_of_a_collection_execute_in_the_order_of_submission(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let mut pending = Vec::new();
    for i in 0..50u64 {
        pending.push(store.queue_transaction(one(&c, write(&o, i * 1000, pattern(i, 1500)))));
    }
    let read = store.read(&c, &o, 0, 1 << 20, None);
    let (stat, xattrs) = (store.stat(&c, &o), store.get_xattrs(&c, &o));
    let xattr = Op::SetXattrs { oid: o.clone(), xattrs: vec![("k".into(), "v".into())] };
    let after = store.queue_transaction(one(&c, Op::Truncate { oid: o.clone(), size: 0 }).with(xattr));
    let mut model = vec![0; 50_500];
    for i in 0..50u64 {
        model[i as usize * 1000..][..1500].copy_from_slice(&pattern(i, 1500));
    }
    after.await.unwrap();
    let read = read.await.unwrap();
    read.verify().unwrap();
    assert_eq!(read.contiguous(), model, "a read sees exactly the transactions queued before it");
    let seen = (stat.await.unwrap().size, xattrs.await.unwrap());
    assert_eq!(seen, (50_500, Vec::new()), "so do queries of an object");
    for commit in pending.into_iter().rev() {
        commit.await.unwrap();
    }
    assert_eq!(store.stat(&c, &o).await.unwrap().size, 0);
    drop(store.queue_transaction(one(&c, Op::Touch { oid: oid("dropped") })));
    assert!(
        store.stat(&c, &oid("dropped")).await.is_ok(),
        "dropping the future does not undo the transaction"
    );
}

/// A store may receive queries and transactions on different paths. Nothing else is in progress, so
/// each call is executed as soon as it has arrived.
async fn a_query_shows_no_later_transaction(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let set = |n: u32| {
        let entries = vec![(Bytes::from_static(b"k"), Bytes::from(n.to_string()))];
        store.queue_transaction(one(&c, Op::OmapSet { oid: o.clone(), entries }))
    };
    set(0).await.unwrap();
    for n in 0..50 {
        let query = || store.omap_iterate(&c, &o, Bytes::new(), 10);
        let (before, change, after) = (query(), set(n + 1), query());
        let value = |page: (Vec<(Bytes, Bytes)>, bool)| page.0[0].1.clone();
        assert_eq!(value(before.await.unwrap()), n.to_string(), "the query precedes the transaction");
        assert_eq!(value(after.await.unwrap()), (n + 1).to_string(), "the query follows the transaction");
        change.await.unwrap();
    }
}

async fn arguments_out_of_range_are_refused(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let invalid = [
        write(&o, MAX_STORED_OBJECT, Bytes::from("x")),
        write(&o, u64::MAX, Bytes::from("xy")),
        Op::Zero { oid: o.clone(), offset: 1, len: u64::MAX },
        Op::Truncate { oid: o.clone(), size: MAX_STORED_OBJECT + 1 },
        Op::CloneRange { src: o.clone(), dst: o.clone(), src_offset: u64::MAX, len: 1, dst_offset: 0 },
        Op::Write {
            oid: o.clone(),
            offset: 1,
            source: WriteSource::Inline(Payload::compute(0, Bytes::from("x"))),
        },
    ];
    for op in invalid {
        let result = store.queue_transaction(one(&c, op.clone())).await;
        assert!(matches!(result, Err(StoreError::InvalidArgument(_))), "{op:?}: {result:?}");
    }
    let huge = store
        .queue_transaction(one(
            &c,
            Op::OmapSet { oid: o.clone(), entries: vec![(vec![0; 3000].into(), Bytes::new())] },
        ))
        .await;
    assert!(matches!(huge, Err(StoreError::TooLarge { .. })));
    assert!(matches!(store.stat(&c, &o).await, Err(StoreError::NoSuchObject(_))));
    assert!(ObjectId::new(Bytes::new()).is_err());
}

async fn removed_objects_free_their_space(store: Store) {
    let c = with_collection(&store).await;
    let (a, b) = (oid("a"), oid("b"));
    let before = store.space().await.unwrap();
    for round in 0..3 {
        apply(&store, one(&c, write(&a, 0, pattern(round, 400_000)))).await;
        apply(&store, one(&c, Op::Clone { src: a.clone(), dst: b.clone() })).await;
        apply(&store, one(&c, write(&b, 4096, pattern(round, 5000)))).await;
    }
    assert!(store.space().await.unwrap().free < before.free);
    apply(&store, one(&c, Op::Remove { oid: a }).with(Op::Remove { oid: b })).await;
    let after = store.space().await.unwrap();
    assert_eq!(after.free, before.free);
    assert!(after.free <= after.total && after.largest_free_extent <= after.total);
}

/// Runs only on stores of at most 1 GiB, because larger stores take too long to fill.
async fn a_full_target_refuses_data_until_objects_are_removed(store: Store) {
    let c = with_collection(&store).await;
    let total = store.space().await.unwrap().total;
    if total > 1 << 30 {
        return;
    }
    let huge = store.stage(total + BLOCK).await;
    assert!(matches!(huge, Err(StoreError::NoSpace { .. })), "{huge:?}");
    let data = pattern(20, 1 << 20);
    let mut filled = 0;
    let error = loop {
        match store.queue_transaction(one(&c, write(&oid(&format!("{filled:06}")), 0, data.clone()))).await {
            Ok(()) => filled += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error:?}");
    assert!(filled > 0);
    assert!(matches!(store.stat(&c, &oid(&format!("{filled:06}"))).await, Err(StoreError::NoSuchObject(_))));
    for i in 0..filled {
        apply(&store, one(&c, Op::Remove { oid: oid(&format!("{i:06}")) })).await;
    }
    apply(&store, one(&c, write(&oid("again"), 0, data.clone()))).await;
    assert_eq!(read_all(&*store, &c, &oid("again")).await, data);
}
