//! Scenarios for the data of objects.

use base::block::{BLOCK, Payload, ZERO_BLOCK_CRC};
use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;

use super::{Store, apply, with_collection};
use crate::conformance::{oid, one, pattern, read_all, write};
use crate::{MAX_STORED_OBJECT, ObjectId, Op, StageId, StoreCalls, StoreError, WriteSource};

pub(super) async fn writes_of_any_alignment_are_read_back(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let mut model = Vec::new();
    let spots = [
        (0, 1),
        (1, 5000),
        (4096, 4096),
        (4095, 2),
        (8000, 9000),
        (16_384, 300_000),
        (262_143, 2),
        (100, 1),
        (299_999, 70_000),
    ];
    for (i, (offset, len)) in spots.into_iter().enumerate() {
        let data = pattern(i as u64 + 2, len);
        apply(&store, one(&c, write(&o, offset as u64, data.clone()))).await;
        model.resize(model.len().max(offset + len), 0);
        model[offset..offset + len].copy_from_slice(&data);
        assert_eq!(read_all(&*store, &c, &o).await, model, "after write {i}");
    }
    apply(&store, one(&c, write(&o, 5, Bytes::new()))).await;
    assert_eq!(store.stat(&c, &o).await.unwrap().size, model.len() as u64, "an empty write changes nothing");
}

pub(super) async fn holes_and_zeroed_ranges_read_as_zeros(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let far = (1 << 30) + 77;
    apply(&store, one(&c, write(&o, far, pattern(3, 9)))).await;
    let stat = store.stat(&c, &o).await.unwrap();
    assert_eq!((stat.size, stat.allocated), (far + 9, BLOCK));
    let read = store.read(&c, &o, 1 << 29, 8192, None).await.unwrap();
    assert_eq!((read.contiguous(), read.checksums), (Bytes::from(vec![0; 8192]), vec![ZERO_BLOCK_CRC; 2]));
    apply(&store, one(&c, Op::Truncate { oid: o.clone(), size: 0 }).with(write(&o, 0, pattern(4, 50_000))))
        .await;
    apply(&store, one(&c, Op::Zero { oid: o.clone(), offset: 5000, len: 20_000 })).await;
    let mut model = pattern(4, 50_000).to_vec();
    model[5000..25_000].fill(0);
    assert_eq!(read_all(&*store, &c, &o).await, model);
    assert_eq!(store.stat(&c, &o).await.unwrap().allocated, 9 * BLOCK, "whole zeroed blocks are freed");
    apply(&store, one(&c, Op::Zero { oid: o.clone(), offset: 60_000, len: 10 })).await;
    model.resize(60_010, 0);
    assert_eq!(read_all(&*store, &c, &o).await, model, "zeroing beyond the end extends the object");
    let huge = Op::Truncate { oid: o.clone(), size: MAX_STORED_OBJECT };
    apply(&store, one(&c, huge).with(Op::Zero { oid: o.clone(), offset: 100, len: MAX_STORED_OBJECT - 100 }))
        .await;
    let stat = store.stat(&c, &o).await.unwrap();
    assert_eq!(
        (stat.size, stat.allocated),
        (MAX_STORED_OBJECT, BLOCK),
        "an object of the maximum size can have a single block"
    );
    assert!(matches!(store.read(&c, &o, 0, u64::MAX, None).await, Err(StoreError::TooLarge { .. })));
}

pub(super) async fn a_truncation_discards_the_bytes_after_the_new_end(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    apply(&store, one(&c, write(&o, 0, pattern(5, 600_000)))).await;
    apply(&store, one(&c, Op::Truncate { oid: o.clone(), size: 5001 })).await;
    assert_eq!(read_all(&*store, &c, &o).await, pattern(5, 600_000)[..5001]);
    assert_eq!(store.stat(&c, &o).await.unwrap().allocated, 2 * BLOCK);
    apply(&store, one(&c, Op::Truncate { oid: o.clone(), size: 9000 })).await;
    let mut model = pattern(5, 600_000)[..5001].to_vec();
    model.resize(9000, 0);
    assert_eq!(read_all(&*store, &c, &o).await, model);
}

pub(super) async fn reads_end_at_the_objects_end_and_return_checksums(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let data = pattern(6, 10_000);
    apply(&store, one(&c, write(&o, 0, data.clone()))).await;
    let read = store.read(&c, &o, 5000, 10, None).await.unwrap();
    assert_eq!((read.offset, read.contiguous()), (4096, data.slice(4096..8192)));
    read.verify().unwrap();
    assert_eq!(read.slice(5000, 10), data.slice(5000..5010));
    let tail = store.read(&c, &o, 9000, u64::MAX - 9000, None).await.unwrap();
    assert_eq!((tail.offset, tail.contiguous(), tail.object_size), (8192, data.slice(8192..), 10_000));
    tail.verify().unwrap();
    assert!(store.read(&c, &o, 10_000, 1, None).await.unwrap().is_empty());
    assert!(store.read(&c, &o, 1, 0, None).await.unwrap().is_empty());
    assert!(matches!(store.read(&c, &oid("none"), 0, 1, None).await, Err(StoreError::NoSuchObject(_))));
}

pub(super) async fn a_read_fills_the_callers_destination(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let data = pattern(7, 20_000);
    apply(&store, one(&c, write(&o, 0, data.clone()))).await;
    let pool = BufferPool::new(Arena::anonymous(1 << 16).unwrap(), 0, 1 << 16);
    let dest = pool.try_alloc(32_768).unwrap().unwrap();
    let read = store.read(&c, &o, 4096, 12_288, Some(dest)).await.unwrap();
    read.verify().unwrap();
    assert_eq!(read.contiguous(), data.slice(4096..16_384));
    assert!(read.data.iter().all(|d| pool.arena().offset_of(d).is_some()), "the data is in the destination");
    drop(read);
    let small = pool.try_alloc(4096).unwrap().unwrap();
    assert!(matches!(store.read(&c, &o, 0, 8192, Some(small)).await, Err(StoreError::InvalidArgument(_))));
    assert_eq!(pool.free_bytes().0, 1 << 16, "all buffers are released");
}

pub(super) async fn a_clone_and_its_source_change_independently(store: Store) {
    let c = with_collection(&store).await;
    let (a, b) = (oid("a"), oid("b"));
    let data = pattern(8, 300_001);
    let pair = |k: &'static str, v: &'static str| (Bytes::from(k), Bytes::from(v));
    let make = one(&c, write(&a, 0, data.clone()))
        .with(Op::SetXattrs { oid: a.clone(), xattrs: vec![pair("x", "1")] })
        .with(Op::OmapSet { oid: a.clone(), entries: vec![pair("k", "v")] })
        .with(Op::OmapSetHeader { oid: a.clone(), header: "h".into() });
    apply(&store, make).await;
    apply(&store, one(&c, write(&b, 0, pattern(9, 500_000)))).await;
    apply(&store, one(&c, Op::Clone { src: a.clone(), dst: b.clone() })).await;
    assert_eq!(read_all(&*store, &c, &b).await, data);
    assert_eq!(store.get_xattrs(&c, &b).await.unwrap(), [pair("x", "1")]);
    assert_eq!(store.omap_iterate(&c, &b, Bytes::new(), 9).await.unwrap().0, [pair("k", "v")]);
    assert_eq!(store.omap_get_header(&c, &b).await.unwrap(), "h");
    apply(&store, one(&c, write(&b, 100_000, pattern(10, 10)))).await;
    apply(&store, one(&c, Op::OmapSet { oid: b.clone(), entries: vec![pair("k", "w")] })).await;
    assert_eq!(read_all(&*store, &c, &a).await, data, "a write to the copy does not change the source");
    assert_eq!(store.omap_get(&c, &a, vec!["k".into()]).await.unwrap(), [pair("k", "v")]);
    let mut copy = data.to_vec();
    copy[100_000..100_010].copy_from_slice(&pattern(10, 10));
    apply(&store, one(&c, Op::Remove { oid: a.clone() })).await;
    assert_eq!(read_all(&*store, &c, &b).await, copy, "removing the source does not change the copy");
    apply(&store, one(&c, Op::Clone { src: b.clone(), dst: b.clone() })).await;
    assert_eq!(read_all(&*store, &c, &b).await, copy, "a clone onto itself changes nothing");
    let missing = store.queue_transaction(one(&c, Op::Clone { src: a, dst: b })).await;
    assert!(matches!(missing, Err(StoreError::NoSuchObject(_))));
}

pub(super) async fn ranges_of_any_alignment_can_be_cloned(store: Store) {
    let c = with_collection(&store).await;
    let (a, b) = (oid("a"), oid("b"));
    let data = pattern(11, 50_000);
    apply(&store, one(&c, write(&a, 0, data.clone())).with(write(&b, 0, pattern(12, 30_000)))).await;
    let mut model = pattern(12, 30_000).to_vec();
    let spots = [
        (0, 8192, 4096),
        (100, 20_000, 4196),
        (3, 10_000, 8000),
        (45_000, 10_000, 29_000),
        (60_000, 5, 50_000),
        (8192, 0, 70_000),
    ];
    for (from, len, to) in spots {
        let range = Op::CloneRange { src: a.clone(), dst: b.clone(), src_offset: from, len, dst_offset: to };
        apply(&store, one(&c, range)).await;
        let mut source = data.to_vec();
        source.resize(100_000, 0);
        if len > 0 {
            model.resize(model.len().max((to + len) as usize), 0);
            model[to as usize..(to + len) as usize]
                .copy_from_slice(&source[from as usize..(from + len) as usize]);
        }
        assert_eq!(read_all(&*store, &c, &b).await, model, "range {from}+{len} to {to}");
    }
    apply(
        &store,
        one(
            &c,
            Op::CloneRange { src: a.clone(), dst: a.clone(), src_offset: 0, len: 12_288, dst_offset: 4096 },
        ),
    )
    .await;
    let mut overlapped = data.to_vec();
    overlapped[4096..16_384].copy_from_slice(&data[..12_288]);
    assert_eq!(read_all(&*store, &c, &a).await, overlapped, "the source is read before it is written");
}

pub(super) async fn staged_bytes_become_data_of_objects(store: Store) {
    let c = with_collection(&store).await;
    let (a, b) = (oid("a"), oid("b"));
    let data = pattern(16, 700_100);
    let stage = store.stage(data.len() as u64).await.unwrap();
    let half = 352_256;
    let second = store.stage_write(stage, half as u64, Payload::compute(0, data.slice(half..)));
    let first = store.stage_write(stage, 0, Payload::compute(0, data.slice(..half)));
    let t = one(&c, staged(&a, 0, stage, 8192, 691_908)).with(staged(&b, 4096, stage, 0, 8192));
    let commit = store.queue_transaction(t);
    store.stage_release(stage);
    let (first, second, commit) = (first.await, second.await, commit.await);
    first.unwrap();
    second.unwrap();
    commit.unwrap();
    assert_eq!(read_all(&*store, &c, &a).await, data.slice(8192..));
    let read = store.read(&c, &b, 4096, 8192, None).await.unwrap();
    assert_eq!(read.contiguous(), data.slice(..8192));
    assert_eq!(store.space().await.unwrap().staged, 0);
    let abandoned = store.stage(10_000).await.unwrap();
    assert_eq!(store.space().await.unwrap().staged, 3 * BLOCK);
    store.stage_write(abandoned, 0, Payload::compute(0, pattern(1, 4096))).await.unwrap();
    store.stage_release(abandoned);
    assert_eq!(store.space().await.unwrap().staged, 0);
}

pub(super) async fn invalid_uses_of_stages_are_refused(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let stage = store.stage(10_000).await.unwrap();
    let payload = |len| Payload::compute(0, pattern(17, len));
    let invalid =
        |r: Result<(), StoreError>| assert!(matches!(r, Err(StoreError::InvalidArgument(_))), "{r:?}");
    invalid(store.stage_write(stage, 4095, payload(10)).await);
    invalid(store.stage_write(stage, 0, payload(100)).await);
    invalid(store.stage_write(stage, 8192, payload(4096)).await);
    invalid(store.stage_write(stage, u64::MAX - 4095, payload(4096)).await);
    store.stage_write(stage, 0, payload(8192)).await.unwrap();
    invalid(store.queue_transaction(one(&c, staged(&o, 0, stage, 8192, 1808))).await);
    invalid(store.queue_transaction(one(&c, staged(&o, 0, stage, 0, 100))).await);
    invalid(store.queue_transaction(one(&c, staged(&o, 0, stage, 4096, u64::MAX))).await);
    invalid(store.queue_transaction(one(&c, staged(&o, 1, stage, 0, 4096))).await);
    let twice = one(&c, staged(&o, 0, stage, 0, 4096)).with(staged(&o, 8192, stage, 0, 4096));
    invalid(store.queue_transaction(twice).await);
    apply(&store, one(&c, staged(&o, 0, stage, 0, 4096))).await;
    invalid(store.queue_transaction(one(&c, staged(&o, 0, stage, 0, 4096))).await);
    apply(&store, one(&c, staged(&o, 4096, stage, 4096, 4096))).await;
    store.stage_release(stage);
    let gone = store.queue_transaction(one(&c, staged(&o, 0, stage, 0, 4096))).await;
    assert!(matches!(gone, Err(StoreError::NoSuchStage(_))));
    let gone = store.stage_write(StageId(u64::MAX), 0, payload(4096)).await;
    assert!(matches!(gone, Err(StoreError::NoSuchStage(_))));
    assert_eq!(read_all(&*store, &c, &o).await, pattern(17, 8192));
    invalid(store.stage(0).await.map(drop));
}

pub(super) async fn damaged_payloads_are_detected(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    apply(&store, one(&c, write(&o, 0, pattern(18, 8192)))).await;
    let damaged = |offset: u64, len: usize| {
        let mut bytes = pattern(19, len).to_vec();
        let checksums = base::block::piece_checksums(offset, &bytes);
        bytes[len / 2] ^= 1;
        let payload = Payload::from_parts(offset, bytes.into(), checksums).unwrap();
        Op::Write { oid: o.clone(), offset, source: WriteSource::Inline(payload) }
    };
    let merged = store.queue_transaction(one(&c, damaged(10, 100))).await;
    assert!(matches!(merged, Err(StoreError::BadPayload(_))), "damage is found before blocks are merged");
    assert_eq!(read_all(&*store, &c, &o).await, pattern(18, 8192));
    let whole = store.queue_transaction(one(&c, damaged(4096, 4096))).await;
    let read = store.read(&c, &o, 4096, 4096, None).await.unwrap();
    assert!(
        whole.is_err() || read.verify().is_err(),
        "the store refuses the damage, or the reader detects it"
    );
}

fn staged(oid: &ObjectId, offset: u64, stage: StageId, from: u64, len: u64) -> Op {
    Op::Write { oid: oid.clone(), offset, source: WriteSource::Staged { stage, offset: from, len } }
}
