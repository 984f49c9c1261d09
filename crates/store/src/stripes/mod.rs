//! Calls that concern several stores of a host ([`StoreSet`]): transactions of several stores, and
//! stripes. A stripe is data and parity for several stores. Each store receives one fragment.
//!
//! One call stages all fragments of a stripe, so the caller need not send each fragment in a
//! separate call. The caller may compute the parity itself and send it with the data.
//! Alternatively, the [`Engines`] on the side of the stores compute the parity, which then need not
//! be sent.

mod engines;
mod local;

use std::sync::Arc;
use std::time::Duration;

use base::BoxFuture;
use base::block::{BLOCK, Payload};
use base::mem::ArenaBuf;
use bytes::{Bytes, BytesMut};
use ec::offload::host_load::LoadCounters;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::{ObjectStore, StageId, StoreError, StoreFuture, Transaction};

pub use engines::{EngineOptions, Engines};
pub use local::{LocalStoreSet, write_parts};

/// The device that computes parity on the side of the stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ParityDevice {
    /// The host's processor.
    Host,
    /// The DPU's accelerator, which reads and writes host memory.
    Accelerator,
}

/// A fragment's bytes in consecutive pieces of whole blocks, with a checksum for each block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FragmentBytes {
    /// The bytes of the fragment, in consecutive pieces.
    pub pieces: Vec<Bytes>,
    /// CRC-32C of each block.
    pub checksums: Vec<u32>,
}

impl FragmentBytes {
    /// Returns the number of bytes of the fragment.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }

    /// Whether the fragment has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Joins the pieces into one payload. Copies the bytes only if there are several pieces.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] if the number of checksums differs from the number of
    /// blocks.
    pub fn into_payload(self) -> Result<Payload, StoreError> {
        let len = self.len();
        let mut pieces = self.pieces;
        let bytes = match pieces.len() {
            1 => pieces.remove(0),
            _ => {
                let mut all = BytesMut::with_capacity(len);
                pieces.iter().for_each(|piece| all.extend_from_slice(piece));
                all.freeze()
            }
        };
        Payload::from_parts(0, bytes, self.checksums).map_err(|e| StoreError::InvalidArgument(e.to_string()))
    }
}

impl From<Payload> for FragmentBytes {
    fn from(payload: Payload) -> FragmentBytes {
        let (data, checksums) = payload.into_parts();
        FragmentBytes { pieces: vec![data], checksums }
    }
}

/// The source of the fragments that follow the data fragments. These fragments contain parity or
/// copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parity {
    /// The caller supplies these fragments.
    Here(Vec<FragmentBytes>),
    /// Each of these fragments is a copy of the only data fragment.
    Copies,
    /// The given device computes the parity, if the stripe has parity fragments.
    By(ParityDevice),
}

/// A write of the fragments of stripes to stages on several targets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StripeWrite {
    /// For each fragment, data fragments first: the UUID of its target and its stage on that
    /// target. `None` means that the fragment is not written.
    pub parts: Vec<Option<(Uuid, StageId)>>,
    /// Offset of the data in the stage of each fragment, in bytes: a multiple of the block size.
    pub offset: u64,
    /// The data fragments, all of the same length.
    pub data: Vec<FragmentBytes>,
    /// The source of the parity fragments.
    pub parity: Parity,
}

impl StripeWrite {
    /// Returns the length of each fragment, in bytes.
    #[must_use]
    pub fn fragment_len(&self) -> usize {
        self.data.first().map_or(0, FragmentBytes::len)
    }

    /// Returns the number of parity fragments.
    #[must_use]
    pub fn parity_count(&self) -> usize {
        self.parts.len().saturating_sub(self.data.len())
    }

    /// Checks that the fields do not contradict each other.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] if two fields contradict each other.
    pub fn check(&self) -> Result<(), StoreError> {
        let (len, k, m) = (self.fragment_len(), self.data.len(), self.parity_count());
        check_shape(len as u64, k, self.parts.len(), self.offset)?;
        let blocks = len / BLOCK as usize;
        let fits = |fragment: &FragmentBytes| fragment.len() == len && fragment.checksums.len() == blocks;
        let wrong = match &self.parity {
            _ if !self.data.iter().all(fits) => {
                "the data fragments differ in length, or a fragment has a wrong number of checksums"
            }
            Parity::Here(parity) if parity.len() != m || !parity.iter().all(fits) => {
                "the number of parity fragments is wrong, or a parity fragment has a wrong length or number of checksums"
            }
            Parity::Copies if k != 1 => "copies need exactly one data fragment",
            _ => return Ok(()),
        };
        Err(StoreError::InvalidArgument(format!(
            "a stripe write of {k}+{m} fragments of {len} bytes is not possible: {wrong}"
        )))
    }
}

/// Checks the shape of a write: `parts` fragments of `len` bytes each, `k` of them data fragments,
/// at byte `offset` of their stages.
///
/// # Errors
/// [`StoreError::InvalidArgument`] if `len` is 0, if `len` or `offset` is not a multiple of the
/// block size, if `k` is not in `1..=parts`, or if `parts` exceeds [`ec::MAX_FRAGMENTS`].
pub fn check_shape(len: u64, k: usize, parts: usize, offset: u64) -> Result<(), StoreError> {
    let is_possible = len > 0
        && len.is_multiple_of(BLOCK)
        && offset.is_multiple_of(BLOCK)
        && (1..=parts).contains(&k)
        && parts <= ec::MAX_FRAGMENTS;
    if is_possible {
        return Ok(());
    }
    let what = format!(
        "a stripe write of {parts} fragments at offset {offset}, with {k} data fragments of {len} bytes each, is not possible: a write has at most 255 fragments, at least one data fragment, and a positive length and an offset that are multiples of {BLOCK} bytes"
    );
    Err(StoreError::InvalidArgument(what))
}

/// Reason why staging stripes failed. Fragments that were written remain in their stages, and the
/// caller may write the same bytes again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StripeError {
    /// No parity was computed and nothing was written. The caller may try another engine.
    #[error("no parity was computed: {0}")]
    Coding(String),
    /// A data fragment does not match its checksums, so its parity would be wrong. Nothing was
    /// written. The caller must supply the data again.
    #[error("the data is damaged, and no parity was written: {0}; send the data again")]
    Damaged(String),
    /// The store of this fragment failed.
    #[error("writing fragment {0} failed: {1}")]
    Part(usize, StoreError),
    /// The call failed for a reason that does not concern a single fragment.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Values of the load counters of the host's CPUs at one time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostReading {
    /// The values of the counters.
    pub reading: LoadCounters,
    /// The CPUs that the counters cover.
    pub cpus: Vec<usize>,
}

/// Sender through which the stores report that the parity has been computed, and how long the
/// engine worked on it. The time is `None` if the engine works on several tasks at once. If no
/// parity is computed, the stores drop the sender.
pub type Coded = oneshot::Sender<Option<Duration>>;

/// A transaction for one store of a [`StoreSet`].
#[derive(Debug)]
pub struct TargetTransaction {
    /// The UUID of the store's target.
    pub uuid: Uuid,
    /// The only incarnation in which the store may execute the transaction; `None` for any
    /// incarnation.
    pub incarnation: Option<u64>,
    /// The transaction.
    pub transaction: Transaction,
}

/// The stores of one host. The methods make calls that concern several of these stores.
///
/// **Threads.** Any thread may call the methods, as with [`ObjectStore`].
pub trait StoreSet: Send + Sync {
    /// Returns the maximum total size of all fragments of one call, parity included, in bytes.
    fn max_bytes(&self) -> usize;

    /// Writes a part of each fragment to the fragment's stage, as
    /// [`StoreCalls::stage_write`](crate::StoreCalls::stage_write) does. Computes the parity first if
    /// `write` requests that, and then verifies the checksums of the data. Queue transactions that
    /// name the stages only after the future has resolved.
    fn stage_stripes(
        &self,
        write: StripeWrite,
        coded: Option<Coded>,
    ) -> BoxFuture<'static, Result<(), StripeError>>;

    /// Queues a transaction on each of several stores, as
    /// [`StoreCalls::queue_transaction_in`](crate::StoreCalls::queue_transaction_in) does. Returns the
    /// replies in the order of the transactions. Each transaction succeeds or fails on its own, and
    /// keeps its place in the order of its store's requests. The reply of a fast store may be delayed
    /// by a few milliseconds, so that one message carries several replies. Before this call, wait for
    /// the writes to stages that the transactions name, because a transaction that waits for such a
    /// write may hold up the others.
    fn queue_transactions(&self, transactions: Vec<TargetTransaction>) -> Vec<StoreFuture>;

    /// Reads the load counters of the host's CPUs. With `with_store`, also reads the time that the store
    /// itself has used, which takes about half a millisecond; otherwise this time is 0.
    fn host_reading(&self, with_store: bool) -> BoxFuture<'static, crate::Result<HostReading>>;
}

/// Memory for computed parity. An arena buffer of a staging arena can be transferred without a
/// copy.
#[derive(Debug)]
pub enum FragmentBuf {
    /// A buffer of an arena.
    Arena(ArenaBuf),
    /// A buffer on the heap.
    Heap(BytesMut),
}

impl FragmentBuf {
    /// Returns a heap buffer of `len` zeros.
    #[must_use]
    pub fn heap(len: usize) -> FragmentBuf {
        FragmentBuf::Heap(BytesMut::zeroed(len))
    }

    /// Makes the bytes immutable.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        match self {
            FragmentBuf::Arena(buf) => buf.freeze(),
            FragmentBuf::Heap(buf) => buf.freeze(),
        }
    }
}

impl std::ops::Deref for FragmentBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            FragmentBuf::Arena(buf) => buf,
            FragmentBuf::Heap(buf) => buf,
        }
    }
}

impl std::ops::DerefMut for FragmentBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            FragmentBuf::Arena(buf) => buf,
            FragmentBuf::Heap(buf) => buf,
        }
    }
}

/// The store of one fragment, and the fragment's stage in it.
pub type StoreStage = (Arc<dyn ObjectStore>, StageId);
