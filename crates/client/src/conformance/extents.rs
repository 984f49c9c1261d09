//! Cases about the extents of objects.

use std::ops::Range;

use wire::Query;

use super::{PART, bytes, node_error, object};
use crate::{Client, NodeError, Object, Pool};

/// Size of a block, in bytes.
const BLOCK: u64 = 4096;

pub(super) async fn run(client: &Client, pool: &Pool) {
    extents_are_the_blocks_that_were_written(pool).await;
    zeroed_and_truncated_blocks_are_holes(pool).await;
    many_extents_are_queried_page_by_page(client, pool).await;
    impossible_queries_for_extents_are_refused(client, pool).await;
}

/// Returns all extents of an object as numbers of blocks, after comparing them with the allocated
/// space.
async fn blocks(object: &Object) -> Vec<Range<u64>> {
    let extents = object.extents(0, u64::MAX).await.unwrap();
    let blocks: Vec<Range<u64>> =
        extents.iter().map(|range| range.start / BLOCK..range.end.div_ceil(BLOCK)).collect();
    let count: u64 = blocks.iter().map(|range| range.end - range.start).sum();
    assert_eq!(object.allocated().await.unwrap(), count * BLOCK, "{extents:?}");
    blocks
}

/// Checks that all bytes outside the extents of an object are zero.
pub(super) async fn check_holes(object: &Object, data: &[u8]) {
    let (extents, mut at) = (object.extents(0, u64::MAX).await.unwrap(), 0);
    for range in extents.into_iter().chain(std::iter::once(data.len() as u64..data.len() as u64)) {
        assert!(at <= range.start && range.end <= data.len() as u64, "{range:?}");
        let hole = &data[at as usize..range.start as usize];
        assert!(hole.iter().all(|byte| *byte == 0), "the hole {at}..{} has data", range.start);
        at = range.end;
    }
}

async fn extents_are_the_blocks_that_were_written(pool: &Pool) {
    let object = object(pool, "written");
    object.truncate(40 * BLOCK).await.unwrap();
    assert_eq!(blocks(&object).await, [], "an object that only was extended is a hole");
    object.write(2 * BLOCK + 5, "abc").await.unwrap();
    object.write(20 * BLOCK, bytes(3 * BLOCK as usize, 1)).await.unwrap();
    object.write(30 * BLOCK, vec![0; 100]).await.unwrap();
    assert_eq!(blocks(&object).await, [2..3, 20..23, 30..31], "zeros that were written count");
    let part = object.extents(2 * BLOCK + 1, 19 * BLOCK).await.unwrap();
    assert_eq!(part, [2 * BLOCK + 1..3 * BLOCK, 20 * BLOCK..21 * BLOCK + 1]);
    assert_eq!(object.extents(3 * BLOCK, 17 * BLOCK).await.unwrap(), []);
    assert_eq!(object.extents(40 * BLOCK, u64::MAX).await.unwrap(), [], "nothing follows the end");
    assert_eq!(object.append("abc").await.unwrap().appended_at, 40 * BLOCK);
    let last = 40 * BLOCK..40 * BLOCK + 3;
    let found = object.extents(35 * BLOCK, u64::MAX).await.unwrap();
    assert_eq!(found, std::slice::from_ref(&last), "an extent ends at the object's end");
    object.put(bytes(100, 2)).await.unwrap();
    assert_eq!(blocks(&object).await.len(), 1);
    object.put("").await.unwrap();
    assert_eq!(blocks(&object).await, []);
}

async fn zeroed_and_truncated_blocks_are_holes(pool: &Pool) {
    let object = object(pool, "zeroed");
    object.write(0, bytes(40 * BLOCK as usize, 3)).await.unwrap();
    object.zero(3 * BLOCK - 10, 7 * BLOCK + 20).await.unwrap();
    assert_eq!(blocks(&object).await, [0..3, 10..40], "parts of blocks stay");
    object.truncate(30 * BLOCK).await.unwrap();
    object.truncate(35 * BLOCK).await.unwrap();
    assert_eq!(blocks(&object).await, [0..3, 10..30]);
    object.compound().zero(12 * BLOCK, BLOCK).write(4 * BLOCK, bytes(10, 4)).commit().await.unwrap();
    assert_eq!(blocks(&object).await, [0..3, 4..5, 10..12, 13..30]);
    check_holes(&object, &object.get().await.unwrap()).await;
}

async fn many_extents_are_queried_page_by_page(client: &Client, pool: &Pool) {
    let object = object(pool, "many");
    let count = u64::from(client.engine().limits().page_entries_max) + 10;
    let size = 2 * count * BLOCK;
    object.truncate(size).await.unwrap();
    let per_compound = client.engine().limits().operations_max as u64;
    for first in (0..count).step_by(per_compound as usize) {
        let written = first..count.min(first + per_compound);
        let write = |compound: crate::Compound, i: u64| compound.write(2 * i * BLOCK, "x");
        written.fold(object.compound(), write).commit().await.unwrap();
    }
    let expected: Vec<Range<u64>> = (0..count).map(|i| 2 * i..2 * i + 1).collect();
    assert!(blocks(&object).await == expected, "all pages together have all extents");
    object.remove().await.unwrap();
}

async fn impossible_queries_for_extents_are_refused(client: &Client, pool: &Pool) {
    let object = object(pool, "striped");
    assert!(object.extents(0, 1).await.unwrap_err().is_not_found());
    assert!(object.allocated().await.unwrap_err().is_not_found());
    object.put(bytes(6 * PART, 5)).await.unwrap();
    let striped = |e: NodeError| assert!(matches!(e, NodeError::Striped { .. }), "{e}");
    striped(node_error(object.extents(0, 1).await));
    striped(node_error(object.allocated().await));
    object.put("small").await.unwrap();
    let limit = client.engine().limits().object_bytes_max;
    let ops = |offset, len| vec![wire::QueryOp::Extents { offset, len }];
    for (offset, len) in [(0, limit + 1), (limit, 1), (u64::MAX, 1), (1, u64::MAX)] {
        let query = Query { name: object.name().to_wire(), conditions: Vec::new(), ops: ops(offset, len) };
        let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(30);
        let mut call = client.engine().query(query, deadline);
        let refused = loop {
            match call.attempt().await {
                Err(e) if e.is_transient() => {}
                outcome => break node_error(outcome),
            }
        };
        let is_expected = matches!(refused, NodeError::TooLarge { .. } | NodeError::OutOfRange { .. });
        assert!(is_expected, "{offset}+{len}: {refused}");
    }
}
