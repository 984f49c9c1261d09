//! Stripes: data that goes to several stores at once, each of which gets a fragment of it, and the parity that goes with it.
//!
//! Whoever writes a fragment to each of them would send the data, take it apart and compute its parity on its own side. Here
//! it is one call, so that the data goes to the stores once, comes to lie fragment by fragment on its way, and parity may be
//! computed there, by the [`Engines`] beside the stores: it need not go there, then.

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

use crate::{ObjectStore, StageId, StoreError};

pub use engines::{EngineOptions, Engines};
pub use local::{LocalStripes, write_parts};

/// Who computes parity, where the stores are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ParityDevice {
    /// The host's processor.
    Host,
    /// The DPU's accelerator, which reads and writes host memory.
    Accelerator,
}

/// A fragment's bytes, in pieces that follow one another: whole blocks, and a checksum for each block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FragmentBytes {
    /// The bytes.
    pub pieces: Vec<Bytes>,
    /// CRC-32C of each block.
    pub checksums: Vec<u32>,
}

impl FragmentBytes {
    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same in one piece, copied only if it is in several.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] if the checksums are not those of so many blocks.
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

/// What goes to the parts that have no data fragment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parity {
    /// These.
    Here(Vec<FragmentBytes>),
    /// Each of them gets the only data fragment, too.
    Copies,
    /// What is computed there. Nothing if there are no such parts.
    By(ParityDevice),
}

/// Staged bytes of several targets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StripeWrite {
    /// By fragment, data fragments first: the target's UUID, and its stage; `None` for one that is not written.
    pub parts: Vec<Option<(u128, StageId)>>,
    /// Where in each stage, in bytes: a multiple of the block size.
    pub offset: u64,
    /// The data fragments, of one length.
    pub data: Vec<FragmentBytes>,
    /// The others.
    pub parity: Parity,
}

impl StripeWrite {
    /// Length of each fragment, in bytes.
    #[must_use]
    pub fn fragment_len(&self) -> usize {
        self.data.first().map_or(0, FragmentBytes::len)
    }

    /// Number of fragments that are not data.
    #[must_use]
    pub fn parity_count(&self) -> usize {
        self.parts.len().saturating_sub(self.data.len())
    }

    /// Whether it makes sense.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] says what does not.
    pub fn check(&self) -> Result<(), StoreError> {
        let (len, k, m) = (self.fragment_len(), self.data.len(), self.parity_count());
        check_shape(len as u64, k, self.parts.len(), self.offset)?;
        let blocks = len / BLOCK as usize;
        let fits = |fragment: &FragmentBytes| fragment.len() == len && fragment.checksums.len() == blocks;
        let wrong = match &self.parity {
            _ if !self.data.iter().all(fits) => "data fragments differ in length, or from their checksums",
            Parity::Here(parity) if parity.len() != m || !parity.iter().all(fits) => {
                "not the parity fragments"
            }
            Parity::Copies if k != 1 => "copies of several fragments",
            _ => return Ok(()),
        };
        Err(StoreError::InvalidArgument(format!("stripes of {k}+{m} fragments of {len} bytes: {wrong}")))
    }
}

/// Whether there can be `k` data fragments of `len` bytes among `parts`, written at `offset`.
///
/// # Errors
/// [`StoreError::InvalidArgument`] if not.
pub fn check_shape(len: u64, k: usize, parts: usize, offset: u64) -> Result<(), StoreError> {
    let is_possible = len > 0
        && len.is_multiple_of(BLOCK)
        && offset.is_multiple_of(BLOCK)
        && (1..=parts).contains(&k)
        && parts <= ec::MAX_FRAGMENTS;
    if is_possible {
        return Ok(());
    }
    let what = format!("{k} data fragments of {len} bytes among {parts}, staged at {offset}");
    Err(StoreError::InvalidArgument(what))
}

/// Why stripes have not been staged. Parts that were written stay in their stages; the same can be written again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StripeError {
    /// No parity was computed, and nothing was written: another engine may do better.
    #[error("no parity was computed: {0}")]
    Coding(String),
    /// The store of this part said so.
    #[error("fragment {0}: {1}")]
    Part(usize, StoreError),
    /// It concerns no single part.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The host's counters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostReading {
    /// What they say.
    pub reading: LoadCounters,
    /// Of which CPUs.
    pub cpus: Vec<usize>,
}

/// Is told when parity has been computed, and how much time of an engine that took; dropped if it was not. Engines that do
/// several pieces of work at a time do not say how long each took.
pub type Coded = oneshot::Sender<Option<Duration>>;

/// Stores that are in one place, which take stripes.
///
/// **Threads.** As [`ObjectStore`].
pub trait StripeStores: Send + Sync {
    /// Most bytes of all fragments of a call together, parity included.
    fn max_bytes(&self) -> usize;

    /// Writes a piece of each fragment to its stage, as [`ObjectStore::stage_write`] does, and computes parity before, if that is
    /// asked for. Transactions that name the stages are to be queued when this is done.
    fn stage_stripes(
        &self,
        write: StripeWrite,
        coded: Option<Coded>,
    ) -> BoxFuture<'static, Result<(), StripeError>>;

    /// How busy the host's processor is.
    fn host_reading(&self) -> BoxFuture<'static, crate::Result<HostReading>>;
}

/// Memory that parity is computed into: of a staging arena, from which it can be moved as it is, or any.
#[derive(Debug)]
pub enum FragmentBuf {
    /// Of an arena.
    Arena(ArenaBuf),
    /// Of the heap.
    Heap(BytesMut),
}

impl FragmentBuf {
    /// Of the heap, zeros.
    #[must_use]
    pub fn heap(len: usize) -> FragmentBuf {
        FragmentBuf::Heap(BytesMut::zeroed(len))
    }

    /// No longer to be written.
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

/// A part of a write: a store, and the stage in it.
pub type StoreStage = (Arc<dyn ObjectStore>, StageId);
