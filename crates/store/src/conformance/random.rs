//! Random operations on a store and on the reference model [`MemStore`], whose results must agree.

use std::sync::Arc;

use base::block::Payload;
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{cid, extents, oid, pattern, write};
use crate::{CollectionId, MemStore, ObjectId, ObjectStore, Op, StoreCalls, Transaction, WriteSource};

/// Number of collections. This number and the number of objects are small, so that operations often
/// concern the same object.
const COLLECTIONS: u32 = 3;
/// Number of objects per collection.
const OBJECTS: u32 = 6;
/// Number of transactions that are queued before their results are compared.
const IN_FLIGHT: usize = 8;
/// Upper bound of the end of a random range, in bytes.
const LARGEST: u64 = 600_000;

/// Generator of random ops for the comparison with [`MemStore`] and for crash tests.
pub(crate) struct Workload {
    rng: StdRng,
    fill: u64,
}

impl Workload {
    pub(crate) fn new(seed: u64) -> Workload {
        Workload { rng: StdRng::seed_from_u64(seed), fill: seed }
    }

    pub(crate) fn rng(&mut self) -> &mut StdRng {
        &mut self.rng
    }

    pub(crate) fn collection(&mut self) -> CollectionId {
        cid(&format!("c{}", self.rng.random_range(0..COLLECTIONS)))
    }

    fn object(&mut self) -> ObjectId {
        oid(&format!("o{}", self.rng.random_range(0..OBJECTS)))
    }

    fn data(&mut self, len: usize) -> Bytes {
        self.fill += 1;
        pattern(self.fill, len)
    }

    /// Returns the offset and length of a random range: often a small range, often a range of whole
    /// blocks, sometimes a large range.
    fn range(&mut self) -> (u64, u64) {
        match self.rng.random_range(0..10) {
            0..4 => (self.rng.random_range(0..20_000), self.rng.random_range(0..3000)),
            4..8 => (4096 * self.rng.random_range(0..80), 4096 * self.rng.random_range(1..4)),
            8 => (4096 * self.rng.random_range(0..10), self.rng.random_range(1..200_000)),
            _ => (self.rng.random_range(0..LARGEST / 2), self.rng.random_range(0..LARGEST / 2)),
        }
    }

    fn entries(&mut self) -> Vec<(Bytes, Bytes)> {
        (0..self.rng.random_range(1..5))
            .map(|_| {
                let (key, len) = (self.key(), self.rng.random_range(0..300));
                (key, self.data(len))
            })
            .collect()
    }

    fn key(&mut self) -> Bytes {
        format!("k{:02}", self.rng.random_range(0..30)).into()
    }

    pub(crate) fn op(&mut self) -> Op {
        let oid = self.object();
        match self.rng.random_range(0..42) {
            0 => Op::CreateExclusive { oid },
            1 => Op::Touch { oid },
            2..16 => {
                let (offset, len) = self.range();
                write(&oid, offset, self.data(len as usize))
            }
            16..18 => {
                let (offset, len) = self.range();
                Op::Zero { oid, offset, len }
            }
            18..20 => Op::Truncate { oid, size: self.range().0 },
            20..23 => Op::Remove { oid },
            23 => Op::SetXattrs { oid, xattrs: self.entries() },
            24 => Op::RemoveXattr { oid, name: self.key() },
            25 => Op::RemoveXattrs { oid },
            26..29 => Op::OmapSet { oid, entries: self.entries() },
            29 => Op::OmapRemove { oid, keys: vec![self.key(), self.key()] },
            30 => Op::OmapRemoveRange { oid, from: self.key(), to: self.key() },
            31 => Op::OmapClear { oid },
            32 => Op::OmapSetHeader { oid, header: self.data(10) },
            33..35 => Op::Clone { src: oid, dst: self.object() },
            35..37 => {
                let ((src_offset, len), (dst_offset, _)) = (self.range(), self.range());
                Op::CloneRange { src: oid, dst: self.object(), src_offset, len, dst_offset }
            }
            37 => Op::MoveRename { src: oid, dst_collection: self.collection(), dst: self.object() },
            38..40 => {
                let (key, len) = (self.key(), self.rng.random_range(0..2));
                let value = self.rng.random_bool(0.3).then(|| self.data(len));
                match self.rng.random_bool(0.5) {
                    true => Op::GuardXattr { oid, name: key, value },
                    false => Op::GuardOmap { oid, key, value },
                }
            }
            40 => Op::SplitCollection { at: oid, dst: self.collection() },
            _ if self.rng.random_bool(0.5) => Op::CreateCollection,
            _ => Op::RemoveCollection,
        }
    }

    /// Returns a transaction of one to three random ops, or sometimes a transaction that creates a
    /// collection.
    pub(crate) fn transaction(&mut self) -> Transaction {
        let mut t = Transaction::new(self.collection());
        if self.rng.random_bool(0.1) {
            return t.with(Op::CreateCollection);
        }
        for _ in 0..self.rng.random_range(1..4) {
            t.ops.push(self.op());
        }
        t
    }
}

/// Runs `steps` random transactions on `store`, which must be empty, and on a [`MemStore`].
/// Compares the results of the transactions and of reads between them. Compares the whole content
/// after every 50 transactions and at the end.
///
/// # Panics
/// If the stores differ.
pub async fn random_operations(store: Arc<dyn ObjectStore>, seed: u64, steps: usize) {
    random_operations_beside(store, &MemStore::new(), seed, steps).await;
}

/// Like [`random_operations`], for a `store` that need not be empty but has the same content as
/// `model`.
///
/// # Panics
/// If the stores differ.
pub async fn random_operations_beside(
    store: Arc<dyn ObjectStore>,
    model: &MemStore,
    seed: u64,
    steps: usize,
) {
    let mut workload = Workload::new(seed);
    let mut pending = Vec::new();
    let mut reads = Vec::new();
    for step in 0..steps {
        if workload.rng().random_bool(0.3) {
            let (c, o) = (workload.collection(), workload.object());
            let expected = model.read(&c, &o, 0, LARGEST, None).await;
            reads.push((step, store.read(&c, &o, 0, LARGEST, None), expected));
        }
        let (mut ours, mut theirs) = (workload.transaction(), Vec::new());
        let mut stages = Vec::new();
        if workload.rng().random_bool(0.2) {
            let len = workload.rng().random_range(1..300_000);
            let data = Payload::compute(0, workload.data(len));
            let stage = store.stage(len as u64).await.expect("stage");
            let twin = model.stage(len as u64).await.expect("stage");
            theirs.push(model.stage_write(twin, 0, data.clone()));
            stages.push((stage, twin, store.stage_write(stage, 0, data)));
            let source = WriteSource::Staged { stage, offset: 0, len: len as u64 };
            ours.ops.push(Op::Write { oid: workload.object(), offset: 0, source });
        }
        let mut twin = ours.clone();
        if let (Some((_, id, _)), Some(Op::Write { source: WriteSource::Staged { stage, .. }, .. })) =
            (stages.first(), twin.ops.last_mut())
        {
            *stage = *id;
        }
        let expected = model.queue_transaction(twin).await;
        pending.push((step, ours.clone(), expected, store.queue_transaction(ours)));
        for (stage, twin, written) in stages {
            store.stage_release(stage);
            model.stage_release(twin);
            written.await.expect("stage_write");
        }
        if pending.len() >= IN_FLIGHT {
            for (step, transaction, expected, found) in pending.drain(..) {
                let found = found.await;
                let same = match (&found, &expected) {
                    (Ok(()), Ok(())) => true,
                    (Err(a), Err(b)) => std::mem::discriminant(a) == std::mem::discriminant(b),
                    _ => false,
                };
                assert!(same, "step {step}: {found:?}, expected {expected:?}, for {transaction:?}");
            }
            for (step, found, expected) in reads.drain(..) {
                let same = match (found.await, expected) {
                    (Ok(found), Ok(expected)) => found.contiguous() == expected.contiguous(),
                    (found, expected) => found.is_err() && expected.is_err(),
                };
                assert!(
                    same,
                    "the read before step {step} sees other transactions than those queued before it"
                );
            }
        }
        if step % 50 == 49 {
            compare(&*store, model).await;
        }
    }
    drop(pending);
    compare(&*store, model).await;
}

/// Compares the whole content of two stores.
///
/// # Panics
/// If the stores differ.
pub async fn compare(store: &dyn ObjectStore, model: &dyn ObjectStore) {
    let collections = model.collections().await.expect("collections");
    assert_eq!(store.collections().await.expect("collections"), collections);
    for c in &collections {
        let objects = model.list(c, None, usize::MAX).await.expect("list");
        assert_eq!(store.list(c, None, usize::MAX).await.expect("list"), objects, "objects of {c}");
        for o in &objects.0 {
            assert_eq!(
                store.stat(c, o).await.expect("stat"),
                model.stat(c, o).await.expect("stat"),
                "stat of {c}/{o}"
            );
            assert!(extents(store, c, o).await == extents(model, c, o).await, "extents of {c}/{o} differ");
            let (ours, theirs) =
                (store.read(c, o, 0, 1 << 30, None).await, model.read(c, o, 0, 1 << 30, None).await);
            let (ours, theirs) = (ours.expect("read"), theirs.expect("read"));
            ours.verify().unwrap_or_else(|e| panic!("{c}/{o}: {e}"));
            assert!(ours.contiguous() == theirs.contiguous(), "data of {c}/{o} differs");
            assert_eq!(ours.checksums, theirs.checksums, "checksums of {c}/{o}");
            assert_eq!(store.get_xattrs(c, o).await, model.get_xattrs(c, o).await, "xattrs of {c}/{o}");
            assert_eq!(
                store.omap_get_header(c, o).await,
                model.omap_get_header(c, o).await,
                "header of {c}/{o}"
            );
            let ours = store.omap_iterate(c, o, Bytes::new(), usize::MAX).await;
            assert_eq!(ours, model.omap_iterate(c, o, Bytes::new(), usize::MAX).await, "omap of {c}/{o}");
        }
    }
}
