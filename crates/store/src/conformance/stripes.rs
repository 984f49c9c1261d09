//! Conformance tests that every implementation of [`StoreSet`] must pass.

use std::sync::Arc;

use base::block::Payload;
use bytes::Bytes;
use ec::{Code, Geometry, KernelChoice};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::stripes::{
    FragmentBytes, Parity, ParityDevice, StoreSet, StripeError, StripeWrite, TargetTransaction,
};
use crate::{
    CollectionId, ObjectId, ObjectStore, Op, ReplyOf, StageId, StoreCalls, StoreError, StoreFuture,
    Transaction, WriteSource,
};

/// Size of a block, in bytes.
const BLOCK: usize = base::block::BLOCK as usize;

/// An implementation of [`StoreSet`] and its stores. The tests need at least six stores and an
/// accelerator.
pub struct Striped {
    /// The implementation to test.
    pub stripes: Arc<dyn StoreSet>,
    /// The stores that receive the fragments, with their UUIDs.
    pub stores: Vec<(Uuid, Arc<dyn ObjectStore>)>,
}

fn cid() -> CollectionId {
    CollectionId::new("stripes").expect("a name")
}

/// Returns `count` fragments of random bytes. `cuts` contains the length of each piece of a
/// fragment, in blocks.
fn fragments(rng: &mut StdRng, count: usize, cuts: &[usize]) -> Vec<FragmentBytes> {
    let mut fragment = |_| {
        let mut fragment = FragmentBytes::default();
        for &blocks in cuts {
            let mut piece = vec![0; blocks * BLOCK];
            rng.fill_bytes(&mut piece);
            fragment.checksums.extend(piece.chunks(BLOCK).map(base::block::crc32c));
            fragment.pieces.push(piece.into());
        }
        fragment
    };
    (0..count).map(&mut fragment).collect()
}

fn whole(fragment: &FragmentBytes) -> Bytes {
    fragment.pieces.concat().into()
}

fn parity_of(data: &[FragmentBytes], m: usize) -> Vec<Bytes> {
    let kernel = KernelChoice::Portable.load().expect("the portable kernel");
    let code = Code::new(Geometry::new(data.len(), m).expect("a geometry"), kernel);
    let data: Vec<Bytes> = data.iter().map(whole).collect();
    let sources: Vec<&[u8]> = data.iter().map(|fragment| &fragment[..]).collect();
    let mut parity = vec![vec![0; sources[0].len()]; m];
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
    code.encode(&sources, &mut outputs).expect("equal lengths");
    parity.into_iter().map(Bytes::from).collect()
}

fn in_one_piece(bytes: &Bytes) -> FragmentBytes {
    Payload::compute(0, bytes.clone()).into()
}

impl Striped {
    /// Runs every case.
    ///
    /// # Panics
    /// If a case fails.
    pub async fn run(&self, seed: u64) {
        for (_, store) in &self.stores {
            let create = Transaction { ops: vec![Op::CreateCollection], ..Transaction::new(cid()) };
            store.queue_transaction(create).await.expect("a collection");
        }
        self.run_again(seed).await;
    }

    /// Runs every case on stores on which [`run`](Self::run) was called before.
    ///
    /// # Panics
    /// If a case fails.
    pub async fn run_again(&self, seed: u64) {
        let mut rng = StdRng::seed_from_u64(seed);
        for (k, m) in [(2, 1), (4, 2), (1, 3), (3, 1)] {
            self.every_way(&mut rng, k, m).await;
        }
        self.copies(&mut rng).await;
        self.some_only(&mut rng).await;
        self.damaged(&mut rng).await;
        self.nonsense(&mut rng).await;
        self.transactions(&mut rng).await;
    }

    async fn stages(&self, count: usize, len: u64) -> Vec<Option<(Uuid, StageId)>> {
        let mut stages = Vec::new();
        for (uuid, store) in &self.stores[..count] {
            stages.push(Some((*uuid, store.stage(len).await.expect("a stage"))));
        }
        stages
    }

    /// Writes the staged bytes to objects, reads the objects, and compares them with `expected`.
    async fn check(&self, parts: &[Option<(Uuid, StageId)>], expected: &[Bytes]) {
        let oid = ObjectId::new("o").expect("a name");
        for (part, expected) in parts.iter().zip(expected) {
            let Some((uuid, stage)) = part else { continue };
            let (_, store) = self.stores.iter().find(|(known, _)| known == uuid).expect("a known store");
            let source = WriteSource::Staged { stage: *stage, offset: 0, len: expected.len() as u64 };
            let mut transaction = Transaction::new(cid());
            transaction.ops = vec![Op::Write { oid: oid.clone(), offset: 0, source }];
            store.queue_transaction(transaction).await.expect("a transaction that names staged bytes");
            store.stage_release(*stage);
            let read = store.read(&cid(), &oid, 0, expected.len() as u64, None).await.expect("a read");
            read.verify().expect("the right checksums");
            assert!(read.contiguous() == *expected, "the object differs from the staged bytes");
        }
    }

    async fn every_way(&self, rng: &mut StdRng, k: usize, m: usize) {
        for way in [None, Some(ParityDevice::Host), Some(ParityDevice::Accelerator)] {
            let cuts = [[1, 3, 2], [5, 1, 16]];
            let [first, second] = cuts.map(|cuts| fragments(rng, k, &cuts));
            let len = first[0].len() + second[0].len();
            let parts = self.stages(k + m, len as u64).await;
            let mut expected = vec![Vec::new(); k + m];
            let mut offset = 0;
            for data in [first, second] {
                let computed = parity_of(&data, m);
                let all = data.iter().map(whole).chain(computed.iter().cloned());
                expected.iter_mut().zip(all).for_each(|(sum, fragment)| sum.extend_from_slice(&fragment));
                let here = || Parity::Here(computed.iter().map(in_one_piece).collect());
                let next = offset + data[0].len() as u64;
                let write = StripeWrite {
                    parts: parts.clone(),
                    offset,
                    data,
                    parity: way.map_or_else(here, Parity::By),
                };
                let (coded, is_coded) = oneshot::channel();
                self.stripes.stage_stripes(write, Some(coded)).await.expect("stripes");
                assert_eq!(
                    is_coded.await.is_ok(),
                    way.is_some(),
                    "the store uses the sender only if it computes parity"
                );
                offset = next;
            }
            let expected: Vec<Bytes> = expected.into_iter().map(Bytes::from).collect();
            self.check(&parts, &expected).await;
        }
    }

    async fn copies(&self, rng: &mut StdRng) {
        let data = fragments(rng, 1, &[7]);
        let parts = self.stages(3, data[0].len() as u64).await;
        let expected = vec![whole(&data[0]); 3];
        let write = StripeWrite { parts: parts.clone(), offset: 0, data, parity: Parity::Copies };
        self.stripes.stage_stripes(write, None).await.expect("copies");
        self.check(&parts, &expected).await;
    }

    /// The stores refuse to compute the parity of damaged data.
    async fn damaged(&self, rng: &mut StdRng) {
        for device in [ParityDevice::Host, ParityDevice::Accelerator] {
            let intact = fragments(rng, 2, &[3, 3]);
            let mut data = intact.clone();
            let (fragment, piece) = (rng.random_range(0..2), rng.random_range(0..2));
            let mut bytes = data[fragment].pieces[piece].to_vec();
            let at = rng.random_range(0..bytes.len());
            bytes[at] ^= 1 << rng.random_range(0..8);
            data[fragment].pieces[piece] = bytes.into();
            let parts = self.stages(3, data[0].len() as u64).await;
            let expected: Vec<Bytes> = intact.iter().map(whole).chain(parity_of(&intact, 1)).collect();
            let write =
                |data| StripeWrite { parts: parts.clone(), offset: 0, data, parity: Parity::By(device) };
            let refused = self.stripes.stage_stripes(write(data), None).await;
            let is_refusal = matches!(
                &refused,
                Err(StripeError::Damaged(_) | StripeError::Store(StoreError::BadPayload(_)))
            );
            assert!(is_refusal, "{refused:?}");
            // The caller sends the data again.
            self.stripes.stage_stripes(write(intact), None).await.expect("stripes");
            self.check(&parts, &expected).await;
        }
    }

    /// Stages stripes without writing every fragment. The parity still depends on a data fragment
    /// that is not written.
    async fn some_only(&self, rng: &mut StdRng) {
        let data = fragments(rng, 3, &[2, 2]);
        let mut parts = self.stages(5, data[0].len() as u64).await;
        for lost in [1, 3] {
            let (uuid, stage) = parts[lost].take().expect("a stage");
            let (_, store) = self.stores.iter().find(|(known, _)| *known == uuid).expect("a known store");
            store.stage_release(stage);
        }
        let expected: Vec<Bytes> = data.iter().map(whole).chain(parity_of(&data, 2)).collect();
        let parity = Parity::By(ParityDevice::Host);
        let write = StripeWrite { parts: parts.clone(), offset: 0, data, parity };
        self.stripes.stage_stripes(write, None).await.expect("stripes");
        self.check(&parts, &expected).await;
    }

    async fn nonsense(&self, rng: &mut StdRng) {
        let data = fragments(rng, 2, &[2]);
        let parts = self.stages(3, data[0].len() as u64).await;
        let good = StripeWrite { parts, offset: 0, data, parity: Parity::By(ParityDevice::Host) };
        let stage = async |change: &dyn Fn(&mut StripeWrite)| {
            let mut write = good.clone();
            change(&mut write);
            self.stripes.stage_stripes(write, None).await
        };
        let is_refused = |outcome: Result<(), StripeError>| {
            matches!(outcome, Err(StripeError::Store(StoreError::InvalidArgument(_))))
        };
        assert!(is_refused(stage(&|w| w.offset = 1).await), "an offset inside a block is refused");
        assert!(
            is_refused(stage(&|w| w.parity = Parity::Copies).await),
            "copies of two fragments are refused"
        );
        assert!(
            is_refused(stage(&|w| w.parity = Parity::Here(Vec::new())).await),
            "missing parity fragments are refused"
        );
        assert!(is_refused(stage(&|w| w.data.clear()).await), "a write without data is refused");
        assert!(
            is_refused(stage(&|w| w.data[1].checksums.truncate(1)).await),
            "a missing checksum is refused"
        );
        assert!(
            is_refused(stage(&|w| w.parts.truncate(1)).await),
            "more data fragments than stages are refused"
        );
        let beyond = stage(&|w| w.offset = 1 << 30).await;
        assert!(matches!(beyond, Err(StripeError::Part(..))), "{beyond:?}");
        let unknown = u64::MAX - rng.random_range(0..1000);
        let gone = stage(&|w| w.parts[2] = w.parts[2].map(|(uuid, _)| (uuid, StageId(unknown)))).await;
        let is_gone = matches!(
            gone,
            Err(StripeError::Part(2, StoreError::NoSuchStage(_))
                | StripeError::Store(StoreError::NoSuchStage(_)))
        );
        assert!(is_gone, "{gone:?}");
        stage(&|_| ()).await.expect("a valid write still succeeds");
        for (uuid, stage) in good.parts.iter().flatten() {
            let (_, store) = self.stores.iter().find(|(known, _)| known == uuid).expect("a known store");
            store.stage_release(*stage);
        }
    }

    /// Queues transactions of several stores together.
    async fn transactions(&self, rng: &mut StdRng) {
        let (oid, key) = (ObjectId::new("joint").expect("a name"), Bytes::from_static(b"k"));
        let block = |rng: &mut StdRng, blocks: usize| {
            let mut bytes = vec![0; blocks * BLOCK];
            rng.fill_bytes(&mut bytes);
            Payload::compute(0, Bytes::from(bytes))
        };
        let write = |payload: &Payload| {
            let source = WriteSource::Inline(payload.clone());
            let (oid, entries) = (oid.clone(), vec![(key.clone(), payload.data().slice(..8))]);
            Transaction::new(cid())
                .with(Op::Write { oid: oid.clone(), offset: 0, source })
                .with(Op::OmapSet { oid, entries })
        };
        let guarded = |payload: &Payload, value: &Bytes| {
            let guard = Op::GuardOmap { oid: oid.clone(), key: key.clone(), value: Some(value.clone()) };
            let mut transaction = write(payload);
            transaction.ops.insert(0, guard);
            transaction
        };
        // Small transactions travel inside a message, and large ones beside it.
        for blocks in [1, 2, 64] {
            let [first, second, third] = [(); 3].map(|()| block(rng, blocks));
            // Equal payload for all stores, as in a mirror.
            let all = self.stores.iter().map(|(uuid, _)| (*uuid, write(&first))).collect();
            let replies = self.queue(all);
            // Each store has the transactions in their order, whether they are queued together or
            // alone.
            let (_, alone) = &self.stores[0];
            let value = first.data().slice(..8);
            let own = alone.queue_transaction(guarded(&second, &value));
            let [zero, one, two] = [0, 1, 2].map(|at| self.stores[at].0);
            let value_now = second.data().slice(..8);
            let mixed = self.queue(vec![
                (zero, guarded(&third, &value_now)),
                (one, guarded(&third, &value_now)),
                (two, guarded(&second, &value)),
                // A second transaction of a store follows its first.
                (zero, guarded(&second, &third.data().slice(..8))),
                (Uuid::from_u128(u128::MAX), write(&first)),
            ]);
            for reply in replies {
                reply.await.expect("a transaction of several stores");
            }
            own.await.expect("a transaction of one store");
            let mixed = futures::future::join_all(mixed).await;
            let is_failed = |outcome: &crate::Result<()>| matches!(outcome, Err(StoreError::GuardFailed(_)));
            assert!(is_failed(&mixed[1]), "the guard of one store does not hold: {:?}", mixed[1]);
            assert!(matches!(mixed[4], Err(StoreError::Absent(_))), "{:?}", mixed[4]);
            for number in [0, 2, 3] {
                assert_eq!(mixed[number], Ok(()), "transaction {number} succeeds on its own");
            }
            let expected = [&second, &first, &second, &first, &first, &first];
            for ((_, store), expected) in self.stores.iter().zip(expected) {
                let read = store.read(&cid(), &oid, 0, expected.len() as u64, None).await.expect("a read");
                read.verify().expect("the right checksums");
                assert!(read.contiguous() == *expected.data(), "the object has other data");
            }
        }
    }

    fn queue(&self, transactions: Vec<(Uuid, Transaction)>) -> Vec<ReplyOf<StoreFuture, ()>> {
        let one = |(uuid, transaction)| TargetTransaction { uuid, incarnation: None, transaction };
        let transactions = transactions.into_iter().map(one).collect();
        self.stripes.queue_transactions(transactions).into_iter().map(crate::done).collect()
    }
}
