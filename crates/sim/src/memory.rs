//! Damage of the osd's memory: bits of data flip between the osd and its attachment to the store.
//! New data is damaged after the osd has received and verified it, and the data of a read after the
//! attachment has verified it.

use std::sync::{Arc, Mutex, PoisonError};

use base::BoxFuture;
use base::block::{BLOCK_SIZE, Payload};
use base::mem::Arena;
use bytes::Bytes;
use rand::Rng;
use rand::rngs::StdRng;
use store::stripes::{
    Coded, FragmentBytes, HostReading, Parity, StoreSet, StripeError, StripeWrite, TargetTransaction,
};
use store::{
    ObjectStore, Op, ReadData, StoreFuture, StoreReply, StoreRequest, Submit, Transaction, WriteSource,
};

/// Minimum length of the data in which bits flip. Shorter data is hit too rarely to matter.
const DAMAGED_MIN: usize = BLOCK_SIZE;

/// Number of flipped bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlipCounts {
    /// Bits flipped in data of transactions and stages.
    pub in_writes: u64,
    /// Bits flipped in the data of reads.
    pub in_reads: u64,
}

#[derive(Debug)]
struct FlipState {
    rng: StdRng,
    /// Probability that a bit of a piece of data flips.
    probability: f64,
    counts: FlipCounts,
}

/// Flips bits of data in memory. Clones share their state.
#[derive(Debug, Clone)]
pub struct MemoryFlips(Arc<Mutex<FlipState>>);

impl MemoryFlips {
    /// Creates memory in which no bits flip yet.
    #[must_use]
    pub fn new(rng: StdRng) -> MemoryFlips {
        MemoryFlips(Arc::new(Mutex::new(FlipState { rng, probability: 0.0, counts: FlipCounts::default() })))
    }

    /// Changes the probability that a bit of a piece of data flips.
    pub fn set(&self, probability: f64) {
        self.with(|state| state.probability = probability);
    }

    /// Number of flipped bits so far.
    #[must_use]
    pub fn counts(&self) -> FlipCounts {
        self.with(|state| state.counts)
    }

    fn with<T>(&self, change: impl FnOnce(&mut FlipState) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the bytes with a flipped bit, or `None` if none flips. `count` selects the counter.
    fn flipped(&self, bytes: &[u8], count: fn(&mut FlipCounts) -> &mut u64) -> Option<Bytes> {
        self.with(|state| {
            if state.probability == 0.0
                || bytes.len() < DAMAGED_MIN
                || !state.rng.random_bool(state.probability)
            {
                return None;
            }
            *count(&mut state.counts) += 1;
            let mut bytes = bytes.to_vec();
            let at = state.rng.random_range(0..bytes.len());
            bytes[at] ^= 1 << state.rng.random_range(0..8);
            Some(bytes.into())
        })
    }

    fn damage_payload(&self, payload: &mut Payload) {
        if let Some(bytes) = self.flipped(payload.data(), |counts| &mut counts.in_writes) {
            let checksums = payload.checksums().to_vec();
            *payload = Payload::from_parts(payload.block_offset(), bytes, checksums)
                .expect("the number of pieces is unchanged");
        }
    }

    fn damage_transaction(&self, transaction: &mut Transaction) {
        for op in &mut transaction.ops {
            if let Op::Write { source: WriteSource::Inline(payload), .. } = op {
                self.damage_payload(payload);
            }
        }
    }

    fn damage_fragment(&self, fragment: &mut FragmentBytes) {
        for piece in &mut fragment.pieces {
            if let Some(bytes) = self.flipped(piece, |counts| &mut counts.in_writes) {
                *piece = bytes;
            }
        }
    }
}

/// A store whose data passes through damaged memory.
pub struct DamagedMemoryStore {
    inner: Arc<dyn ObjectStore>,
    flips: MemoryFlips,
}

impl DamagedMemoryStore {
    /// Puts damaged memory in front of `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn ObjectStore>, flips: MemoryFlips) -> DamagedMemoryStore {
        DamagedMemoryStore { inner, flips }
    }
}

impl Submit for DamagedMemoryStore {
    type Reply = StoreFuture;

    fn submit(&self, mut request: StoreRequest) -> StoreFuture {
        match &mut request {
            StoreRequest::StageWrite { payload, .. } => self.flips.damage_payload(payload),
            StoreRequest::Transact { transaction, .. } => self.flips.damage_transaction(transaction),
            _ => {}
        }
        let is_read = matches!(request, StoreRequest::Read { .. });
        let reply = self.inner.submit(request);
        if !is_read {
            return reply;
        }
        let flips = self.flips.clone();
        Box::pin(async move {
            let StoreReply::Read(read) = reply.await? else { unreachable!("a read has data") };
            if !read.verified {
                // The caller verifies this data, and would take the damage for damage of the drive.
                return Ok(StoreReply::Read(read));
            }
            let flip = |piece: &Bytes| flips.flipped(piece, |counts| &mut counts.in_reads);
            let data = read.data.iter().map(|piece| flip(piece).unwrap_or_else(|| piece.clone())).collect();
            Ok(StoreReply::Read(ReadData { data, ..read }))
        })
    }

    fn incarnation(&self) -> u64 {
        self.inner.incarnation()
    }

    fn stage_alignment(&self) -> u64 {
        self.inner.stage_alignment()
    }

    fn register_memory(&self, arena: &Arc<Arena>) {
        self.inner.register_memory(arena);
    }
}

/// Stores whose stripes and transactions pass through damaged memory.
pub struct DamagedMemorySet {
    inner: Arc<dyn StoreSet>,
    flips: MemoryFlips,
}

impl DamagedMemorySet {
    /// Puts damaged memory in front of `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn StoreSet>, flips: MemoryFlips) -> DamagedMemorySet {
        DamagedMemorySet { inner, flips }
    }
}

impl StoreSet for DamagedMemorySet {
    fn max_bytes(&self) -> usize {
        self.inner.max_bytes()
    }

    fn stage_stripes(
        &self,
        mut write: StripeWrite,
        coded: Option<Coded>,
    ) -> BoxFuture<'static, Result<(), StripeError>> {
        write.data.iter_mut().for_each(|fragment| self.flips.damage_fragment(fragment));
        if let Parity::Here(parity) = &mut write.parity {
            parity.iter_mut().for_each(|fragment| self.flips.damage_fragment(fragment));
        }
        self.inner.stage_stripes(write, coded)
    }

    fn queue_transactions(&self, mut transactions: Vec<TargetTransaction>) -> Vec<StoreFuture> {
        transactions.iter_mut().for_each(|one| self.flips.damage_transaction(&mut one.transaction));
        self.inner.queue_transactions(transactions)
    }

    fn host_reading(&self, with_store: bool) -> BoxFuture<'static, store::Result<HostReading>> {
        self.inner.host_reading(with_store)
    }
}
