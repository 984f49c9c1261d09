//! Scenarios for the guards of transactions.

use base::block::Payload;
use bytes::Bytes;

use super::{Store, apply, with_collection};
use crate::conformance::{oid, one, pattern, read_all, write};
use crate::{ObjectId, Op, Result, StoreCalls, StoreError, WriteSource};

pub(super) async fn a_guard_compares_a_value_at_its_point_of_the_transaction(store: Store) {
    let c = with_collection(&store).await;
    let (o, none) = (oid("o"), oid("none"));
    let pair = |value: &'static str| vec![(Bytes::from("k"), Bytes::from(value))];
    let xattr = |oid: &ObjectId, value: Option<&'static str>| Op::GuardXattr {
        oid: oid.clone(),
        name: "k".into(),
        value: value.map(Bytes::from),
    };
    let entry = |oid: &ObjectId, value: Option<&'static str>| Op::GuardOmap {
        oid: oid.clone(),
        key: "k".into(),
        value: value.map(Bytes::from),
    };
    apply(&store, one(&c, xattr(&none, None)).with(entry(&none, None))).await;
    assert!(store.list(&c, None, 9).await.unwrap().0.is_empty(), "a guard creates no object");
    for guard in [xattr(&none, Some("v")), entry(&none, Some("v"))] {
        let refused = store.queue_transaction(one(&c, guard)).await;
        assert!(matches!(refused, Err(StoreError::GuardFailed(_))), "{refused:?}");
    }
    let made = one(&c, Op::SetXattrs { oid: o.clone(), xattrs: pair("a") })
        .with(xattr(&o, Some("a")))
        .with(entry(&o, None))
        .with(Op::OmapSet { oid: o.clone(), entries: pair("b") })
        .with(entry(&o, Some("b")));
    apply(&store, made).await;
    for guard in [xattr(&o, None), xattr(&o, Some("b")), entry(&o, None), entry(&o, Some("a"))] {
        let write = one(&c, write(&o, 0, pattern(1, 5000))).with(guard.clone());
        let refused = store.queue_transaction(write).await;
        assert!(matches!(refused, Err(StoreError::GuardFailed(_))), "{guard:?}: {refused:?}");
    }
    assert_eq!(store.stat(&c, &o).await.unwrap().size, 0, "a refused transaction changes nothing");
    let removed = one(&c, Op::OmapRemove { oid: o.clone(), keys: vec!["k".into()] }).with(entry(&o, None));
    apply(&store, removed).await;
    apply(&store, one(&c, Op::Remove { oid: o.clone() }).with(xattr(&o, None)).with(entry(&o, None))).await;
}

pub(super) async fn a_guard_sees_the_transactions_queued_before_it(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let value = |number: u64| Bytes::from(number.to_string());
    let step = |number: u64| {
        let before = (number > 0).then(|| value(number - 1));
        one(&c, Op::GuardOmap { oid: o.clone(), key: "k".into(), value: before.clone() })
            .with(Op::GuardXattr { oid: o.clone(), name: "k".into(), value: before })
            .with(Op::OmapSet { oid: o.clone(), entries: vec![("k".into(), value(number))] })
            .with(Op::SetXattrs { oid: o.clone(), xattrs: vec![("k".into(), value(number))] })
    };
    // The third transaction skips a step, so it and all that depend on it are refused.
    let queued = [0, 1, 3, 4, 5].map(|number| store.queue_transaction(step(number)));
    let outcomes = futures::future::join_all(queued).await;
    assert!(outcomes[..2].iter().all(Result::is_ok), "{outcomes:?}");
    let is_refused = |outcome: &Result<()>| matches!(outcome, Err(StoreError::GuardFailed(_)));
    assert!(outcomes[2..].iter().all(is_refused), "{outcomes:?}");
    assert_eq!(store.get_xattr(&c, &o, "k".into()).await.unwrap(), value(1));
}

pub(super) async fn a_stage_stays_usable_after_a_refused_transaction(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let stage = store.stage(8192).await.unwrap();
    store.stage_write(stage, 0, Payload::compute(0, pattern(1, 8192))).await.unwrap();
    let source = WriteSource::Staged { stage, offset: 0, len: 8192 };
    let use_it = || one(&c, Op::Write { oid: o.clone(), offset: 0, source: source.clone() });
    let guard = Op::GuardXattr { oid: o.clone(), name: "k".into(), value: Some("v".into()) };
    let refused = store.queue_transaction(use_it().with(guard)).await;
    assert!(matches!(refused, Err(StoreError::GuardFailed(_))), "{refused:?}");
    apply(&store, use_it()).await;
    assert_eq!(read_all(&*store, &c, &o).await, pattern(1, 8192));
    store.stage_release(stage);
}
