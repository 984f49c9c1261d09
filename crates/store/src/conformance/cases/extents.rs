//! Scenarios for the extents of objects.

use std::ops::Range;

use base::block::{BLOCK, Payload};

use super::{Store, apply, with_collection};
use crate::conformance::{extents, oid, one, pattern, write};
use crate::{
    CollectionId, MAX_EXTENTS, MAX_STORED_OBJECT, ObjectId, Op, StoreCalls, StoreError, WriteSource,
};

/// Returns all extents of an object.
async fn all(store: &Store, c: &CollectionId, o: &ObjectId) -> Vec<Range<u64>> {
    extents(&**store, c, o).await
}

fn bytes(start: u64, end: u64) -> Range<u64> {
    start..end
}

fn blocks(range: Range<u64>) -> Range<u64> {
    range.start * BLOCK..range.end * BLOCK
}

pub(super) async fn extents_are_the_blocks_that_were_written(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let missing = store.extents(&c, &o, 0, 1).await;
    assert!(matches!(missing, Err(StoreError::NoSuchObject(_))), "{missing:?}");
    apply(&store, one(&c, Op::Truncate { oid: o.clone(), size: 5 << 20 })).await;
    assert_eq!(all(&store, &c, &o).await, [], "an object that only was extended is a hole");
    // A write of a part of a block gives the whole block a place.
    let far = (1 << 30) + 77;
    let ops = one(&c, write(&o, 5000, pattern(1, 10)))
        .with(write(&o, 8 * BLOCK, pattern(2, 8192)))
        .with(write(&o, 10 * BLOCK, pattern(3, 4096)))
        .with(write(&o, 12 * BLOCK, vec![0; 4096].into()))
        .with(write(&o, (1 << 20) - BLOCK, pattern(4, 8192)))
        .with(write(&o, far, pattern(5, 9)));
    apply(&store, ops).await;
    let last = far - 77..far + 9;
    let expected = [blocks(1..2), blocks(8..11), blocks(12..13), blocks(255..257), last];
    assert_eq!(all(&store, &c, &o).await, expected, "zeros that were written count");
    let part = store.extents(&c, &o, 5001, 8 * BLOCK).await.unwrap();
    assert_eq!(
        (&part.ranges[..], part.end),
        (&[5001..8192, 8 * BLOCK..5001 + 8 * BLOCK][..], 5001 + 8 * BLOCK)
    );
    assert_eq!(part.object_size, far + 9);
    let empty = store.extents(&c, &o, 5001, 0).await.unwrap();
    assert_eq!((empty.ranges, empty.end), (vec![], 5001));
    let beyond = store.extents(&c, &o, far + 9, u64::MAX).await.unwrap();
    assert_eq!((beyond.ranges, beyond.end), (vec![], u64::MAX), "nothing follows the object's end");
}

pub(super) async fn zeroed_and_truncated_blocks_are_holes(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    apply(&store, one(&c, write(&o, 0, pattern(6, 600_000)))).await;
    assert_eq!(all(&store, &c, &o).await, [bytes(0, 600_000)]);
    apply(&store, one(&c, Op::Zero { oid: o.clone(), offset: 5000, len: 20_000 })).await;
    assert_eq!(all(&store, &c, &o).await, [0..8192, 24_576..600_000], "parts of blocks stay");
    apply(&store, one(&c, Op::Truncate { oid: o.clone(), size: 50_001 })).await;
    assert_eq!(all(&store, &c, &o).await, [0..8192, 24_576..50_001]);
    apply(&store, one(&c, Op::Truncate { oid: o.clone(), size: 90_000 })).await;
    assert_eq!(all(&store, &c, &o).await, [0..8192, 24_576..53_248], "the new bytes are a hole");
    let huge = Op::Truncate { oid: o.clone(), size: MAX_STORED_OBJECT };
    apply(&store, one(&c, huge).with(Op::Zero { oid: o.clone(), offset: 100, len: MAX_STORED_OBJECT - 100 }))
        .await;
    assert_eq!(all(&store, &c, &o).await, [blocks(0..1)]);
    apply(&store, one(&c, Op::Zero { oid: o.clone(), offset: 0, len: 4096 })).await;
    assert_eq!(all(&store, &c, &o).await, []);
}

pub(super) async fn clones_have_the_extents_of_their_source(store: Store) {
    let c = with_collection(&store).await;
    let (a, b) = (oid("a"), oid("b"));
    apply(&store, one(&c, write(&a, 0, pattern(7, 8192))).with(write(&a, 4 * BLOCK, pattern(8, 4096)))).await;
    apply(&store, one(&c, Op::Clone { src: a.clone(), dst: b.clone() })).await;
    assert_eq!(all(&store, &c, &b).await, [blocks(0..2), blocks(4..5)]);
    apply(&store, one(&c, Op::Zero { oid: a.clone(), offset: 0, len: 4096 })).await;
    assert_eq!(all(&store, &c, &a).await, [blocks(1..2), blocks(4..5)]);
    assert_eq!(all(&store, &c, &b).await, [blocks(0..2), blocks(4..5)], "the clone keeps its blocks");
    let range = |len: u64, to: u64| Op::CloneRange {
        src: a.clone(),
        dst: b.clone(),
        src_offset: 0,
        len: len * BLOCK,
        dst_offset: to * BLOCK,
    };
    apply(&store, one(&c, range(3, 1))).await;
    assert_eq!(
        all(&store, &c, &b).await,
        [blocks(0..1), blocks(2..3), blocks(4..5)],
        "holes are cloned, too"
    );
    apply(&store, one(&c, range(2, 300))).await;
    assert_eq!(all(&store, &c, &b).await, [blocks(0..1), blocks(2..3), blocks(4..5), blocks(301..302)]);
    apply(&store, one(&c, Op::Remove { oid: a.clone() })).await;
    assert_eq!(all(&store, &c, &b).await, [blocks(0..1), blocks(2..3), blocks(4..5), blocks(301..302)]);
}

pub(super) async fn extents_show_staged_bytes_and_queued_transactions(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    let stage = store.stage(3 * BLOCK).await.unwrap();
    let written = store.stage_write(stage, 0, Payload::compute(0, pattern(9, 12_288)));
    let whole = || store.extents(&c, &o, 0, u64::MAX);
    let mut pending = vec![store.queue_transaction(one(&c, Op::Touch { oid: o.clone() }))];
    let before = whole();
    let source = WriteSource::Staged { stage, offset: BLOCK, len: 2 * BLOCK };
    pending.push(store.queue_transaction(one(&c, Op::Write { oid: o.clone(), offset: 4 * BLOCK, source })));
    store.stage_release(stage);
    let staged = whole();
    pending.push(store.queue_transaction(one(&c, write(&o, 0, pattern(10, 4096)))));
    let inline = whole();
    pending
        .push(store.queue_transaction(one(&c, Op::Zero { oid: o.clone(), offset: 4 * BLOCK, len: BLOCK })));
    let zeroed = whole();
    assert_eq!(before.await.unwrap().ranges, [], "the query shows no later transaction");
    assert_eq!(staged.await.unwrap().ranges, [blocks(4..6)]);
    assert_eq!(inline.await.unwrap().ranges, [blocks(0..1), blocks(4..6)]);
    assert_eq!(zeroed.await.unwrap().ranges, [blocks(0..1), blocks(5..6)]);
    written.await.unwrap();
    for pending in pending {
        pending.await.unwrap();
    }
    assert_eq!(all(&store, &c, &o).await, [blocks(0..1), blocks(5..6)]);
}

pub(super) async fn many_extents_need_several_answers(store: Store) {
    let c = with_collection(&store).await;
    let o = oid("o");
    // Every second block is a hole. Clones double the number of extents.
    apply(&store, one(&c, write(&o, 0, pattern(11, 4096)))).await;
    let mut count = 1;
    while count <= MAX_EXTENTS as u64 {
        let len = 2 * count * BLOCK;
        let (src, dst) = (o.clone(), o.clone());
        let double = Op::CloneRange { src, dst, src_offset: 0, len, dst_offset: len };
        apply(&store, one(&c, double)).await;
        count *= 2;
    }
    let first = store.extents(&c, &o, 0, u64::MAX).await.unwrap();
    first.check(0, u64::MAX).unwrap();
    assert!(first.ranges.len() <= MAX_EXTENTS && first.end < u64::MAX, "the answer is not complete");
    assert_eq!(first.end % (2 * BLOCK), 0, "the answer ends before an extent, or before a leaf");
    let expected: Vec<_> = (0..count).map(|i| blocks(2 * i..2 * i + 1)).collect();
    assert!(all(&store, &c, &o).await == expected, "all answers together have all extents");
}
