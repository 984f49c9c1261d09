//! Conformance tests that every implementation of [`ObjectStore`] must pass.
//!
//! [`CASES`] contains small scenarios. Each scenario needs an empty store. [`random_operations`]
//! compares a store with [`MemStore`] over a random workload. [`Striped`] tests an implementation
//! of [`StoreSet`](crate::stripes::StoreSet). A case panics if the store does not conform.

mod cases;
mod random;
mod stripes;

use std::ops::Range;
use std::sync::Arc;

use base::BoxFuture;
use base::block::{BLOCK, Payload};
use bytes::Bytes;

use crate::{CollectionId, ObjectId, ObjectStore, Op, StoreCalls, Transaction, WriteSource};

pub use cases::CASES;
#[cfg(test)]
pub(crate) use random::Workload;
pub use random::{compare, random_operations, random_operations_beside};
pub use stripes::Striped;

/// A scenario: its name, and the test to run on an empty store.
pub type Case = (&'static str, fn(Arc<dyn ObjectStore>) -> BoxFuture<'static, ()>);

/// Runs every case on a new store from `make`, and unmounts the store afterwards.
pub async fn run<F: Future<Output = Arc<dyn ObjectStore>>>(make: impl Fn() -> F) {
    for (name, case) in CASES {
        tracing::info!(name, "running a conformance case");
        let store = make().await;
        case(Arc::clone(&store)).await;
        store.umount().await.unwrap_or_else(|e| panic!("{name}: umount: {e}"));
    }
}

/// Returns the seed from the environment variable `OUTBOARD_SEED`, or a new seed if the variable is
/// not set. Prints the seed, so that a failure can be reproduced.
#[must_use]
pub fn seed() -> u64 {
    let seed = std::env::var("OUTBOARD_SEED").ok().and_then(|s| s.parse().ok());
    let seed = seed.unwrap_or_else(base::entropy::random);
    #[expect(clippy::print_stdout, reason = "the test harness shows the seed when a test fails")]
    {
        println!("OUTBOARD_SEED={seed}");
    }
    seed
}

/// Returns the id of the collection `name`.
pub(crate) fn cid(name: &str) -> CollectionId {
    CollectionId::new(name.to_owned()).expect("a valid id")
}

/// Returns the id of the object `name`.
pub(crate) fn oid(name: &str) -> ObjectId {
    ObjectId::new(name.to_owned()).expect("a valid id")
}

/// Returns `len` pseudorandom bytes that depend on `seed`.
pub(crate) fn pattern(seed: u64, len: usize) -> Bytes {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut step = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()
    };
    let mut out: Vec<u8> = std::iter::repeat_with(&mut step).take(len.div_ceil(8)).flatten().collect();
    out.truncate(len);
    out.into()
}

/// Returns a write of `data` with correct checksums.
pub(crate) fn write(oid: &ObjectId, offset: u64, data: Bytes) -> Op {
    Op::Write { oid: oid.clone(), offset, source: WriteSource::Inline(Payload::compute(offset, data)) }
}

/// Returns a transaction of one op on collection `c`.
pub(crate) fn one(c: &CollectionId, op: Op) -> Transaction {
    Transaction::new(c.clone()).with(op)
}

/// Reads a whole object and verifies its checksums.
pub(crate) async fn read_all(store: &dyn ObjectStore, c: &CollectionId, o: &ObjectId) -> Bytes {
    let size = store.stat(c, o).await.expect("stat").size;
    let read = store.read(c, o, 0, size, None).await.expect("read");
    read.verify().expect("checksums");
    assert_eq!(read.object_size, size);
    read.contiguous()
}

/// Returns all extents of an object. Checks each answer, and the drive space of the object.
pub(crate) async fn extents(store: &dyn ObjectStore, c: &CollectionId, o: &ObjectId) -> Vec<Range<u64>> {
    let mut all: Vec<Range<u64>> = Vec::new();
    let stat = store.stat(c, o).await.expect("stat");
    let mut offset = 0;
    while offset < stat.size {
        let found = store.extents(c, o, offset, stat.size - offset).await.expect("extents");
        found.check(offset, stat.size - offset).expect("a valid answer");
        assert_eq!(found.object_size, stat.size);
        for range in found.ranges {
            match all.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => all.push(range),
            }
        }
        offset = found.end;
    }
    let allocated: u64 = all.iter().map(|range| range.end.next_multiple_of(BLOCK) - range.start).sum();
    assert_eq!(stat.allocated, allocated, "the space of an object is the space of its extents");
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemStore;

    #[tokio::test]
    async fn mem_store_passes_the_conformance_suite() {
        run(|| async { Arc::new(MemStore::new()) as Arc<dyn ObjectStore> }).await;
    }

    #[tokio::test]
    async fn two_mem_stores_agree_on_random_operations() {
        random_operations(Arc::new(MemStore::new()), seed(), 500).await;
    }
}
