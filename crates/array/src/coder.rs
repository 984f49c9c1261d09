//! [`Coder`]: computes parity, and reconstructs fragments from other fragments.

use std::ops::Range;
use std::sync::Arc;

use base::block::{BLOCK_SIZE, Payload, ZERO_BLOCK_CRC};
use base::pool::BufferPool;
use bytes::Bytes;
use ec::{CheckedUnit, EcError};
use store::StoreError;
pub(crate) use store::stripes::FragmentBuf as Buffer;

use crate::layout::StripeLayout;

/// Size in bytes of the static buffer of zeros.
const ZEROS: usize = 64 << 10;

/// Why fragments cannot be reconstructed.
#[derive(Debug)]
pub(crate) enum RecoverError {
    /// The bytes of the source with this index do not match their checksums. They were damaged in
    /// memory, because they were verified when they were read.
    Damaged(usize),
    /// The arguments are wrong.
    Refused(StoreError),
}

impl From<RecoverError> for StoreError {
    fn from(e: RecoverError) -> StoreError {
        match e {
            // The caller may read the fragments again.
            RecoverError::Damaged(_) => StoreError::Disconnected(
                "a fragment was damaged in memory before a lost fragment was computed from it".into(),
            ),
            RecoverError::Refused(e) => e,
        }
    }
}

/// Computes parity, and reconstructs fragments from other fragments.
pub(crate) struct Coder {
    layout: StripeLayout,
    /// The erasure code; `None` in a mirror, whose fragments are copies.
    code: Option<ec::Code>,
    pool: BufferPool,
}

impl Coder {
    /// # Errors
    /// [`StoreError::InvalidArgument`] if no erasure code exists for these numbers of data and
    /// parity fragments.
    pub(crate) fn new(layout: StripeLayout, pool: BufferPool) -> store::Result<Coder> {
        let code = match layout.is_mirror() {
            true => None,
            false => {
                let geometry = ec::Geometry::new(layout.k, layout.m).map_err(refused)?;
                Some(ec::Code::new(geometry, ec::KernelChoice::Auto.load().map_err(refused)?))
            }
        };
        Ok(Coder { layout, code, pool })
    }

    /// Allocates a buffer from the pool, or from the heap if the pool is exhausted. It never waits
    /// for pool memory, because a caller that already holds pool memory could wait forever.
    pub(crate) fn buffer(&self, len: usize) -> Buffer {
        match self.pool.try_alloc(len) {
            Ok(Some(buf)) => Buffer::Arena(buf),
            _ => Buffer::heap(len),
        }
    }

    /// Allocates one buffer per parity fragment.
    pub(crate) fn parity_buffers(&self, len: u64) -> Vec<Buffer> {
        (0..self.layout.m).map(|_| self.buffer(len as usize)).collect()
    }

    /// Returns `len` zeros.
    pub(crate) fn zeros(&self, len: usize) -> Bytes {
        static READY: [u8; ZEROS] = [0; ZEROS];
        if len <= ZEROS { Bytes::from_static(&READY[..len]) } else { vec![0; len].into() }
    }

    /// Returns `len` zeros with their checksums. `len` must be a multiple of the block size.
    pub(crate) fn zero_blocks(&self, len: usize) -> Payload {
        let checksums = vec![ZERO_BLOCK_CRC; len / BLOCK_SIZE];
        Payload::from_parts(0, self.zeros(len), checksums).expect("there is one checksum per block")
    }

    /// Computes the parity of the `units` of one stripe, and writes it to the range `out` of each
    /// parity buffer.
    pub(crate) fn encode(
        &self,
        units: &[Bytes],
        parity: &mut [Buffer],
        out: Range<usize>,
    ) -> store::Result<()> {
        let units: Vec<&[u8]> = units.iter().map(|unit| &unit[..]).collect();
        let mut parity: Vec<&mut [u8]> = parity.iter_mut().map(|b| &mut b[out.clone()]).collect();
        self.code()?.encode(&units, &mut parity).map_err(refused)
    }

    /// Computes the parity of whole stripes. Returns the checksums of the blocks of each parity
    /// fragment. `units` contains the units of all stripes in order. All units have the same
    /// length.
    ///
    /// # Errors
    /// [`StoreError::BadPayload`] if a unit does not match its checksums.
    pub(crate) fn encode_units(
        &self,
        units: &[Payload],
        parity: &mut [Buffer],
    ) -> store::Result<Vec<Vec<u32>>> {
        let blocks = parity.first().map_or(0, |b| b.len() / BLOCK_SIZE);
        let mut checksums = vec![Vec::with_capacity(blocks); parity.len()];
        let mut parity: Vec<&mut [u8]> = parity.iter_mut().map(|b| &mut b[..]).collect();
        self.code()?.encode_checked(&checked(units), &mut parity, &mut checksums).map_err(|e| match e {
            EcError::Damaged { .. } => StoreError::BadPayload(e.to_string()),
            e => refused(e),
        })?;
        Ok(checksums)
    }

    /// Updates the range `out` of each parity buffer after the data of fragment `column` has
    /// changed by `delta` (XOR of old and new data).
    pub(crate) fn update(
        &self,
        column: usize,
        delta: &[u8],
        parity: &mut [Buffer],
        out: Range<usize>,
    ) -> store::Result<()> {
        let mut parity: Vec<(usize, &mut [u8])> =
            parity.iter_mut().enumerate().map(|(row, b)| (row, &mut b[out.clone()])).collect();
        self.code()?.update(column, delta, &mut parity).map_err(refused)
    }

    /// Prepares the reconstruction of the fragments `wanted` from the `k` fragments `sources` or,
    /// in a mirror, from one copy. `blocks` contains whole blocks of each source, of all sources
    /// the same number.
    pub(crate) fn reconstruction(
        &self,
        sources: &[usize],
        wanted: &[usize],
        blocks: Vec<Payload>,
    ) -> Result<Reconstruction, RecoverError> {
        let recovery = self.code.as_ref().map(|code| code.recovery(sources, wanted));
        let recovery = recovery.transpose().map_err(wrong)?.map(Arc::new);
        Ok(Reconstruction { recovery, wanted: wanted.len(), blocks })
    }

    /// Allocates one buffer for each fragment that a reconstruction computes.
    pub(crate) fn buffers_for(&self, task: &Reconstruction) -> Vec<Buffer> {
        (0..task.wanted).map(|_| self.buffer(task.len())).collect()
    }

    /// The erasure code; `None` in a mirror, whose fragments are copies.
    pub(crate) fn parity_code(&self) -> Option<&ec::Code> {
        self.code.as_ref()
    }

    fn code(&self) -> store::Result<&ec::Code> {
        self.code
            .as_ref()
            .ok_or_else(|| StoreError::InvalidArgument("a mirrored object has no parity".into()))
    }
}

/// The reconstruction of fragments, which any thread can compute.
#[derive(Clone)]
pub(crate) struct Reconstruction {
    /// `None` in a mirror, whose fragments are copies.
    recovery: Option<Arc<ec::Recovery>>,
    /// Number of fragments to compute.
    wanted: usize,
    /// Whole blocks of each source, of all sources the same number.
    blocks: Vec<Payload>,
}

impl Reconstruction {
    /// Number of bytes of each fragment.
    fn len(&self) -> usize {
        self.blocks.first().map_or(0, Payload::len)
    }

    /// Number of fragments to compute; 0 if nothing is computed, because fragments are copies.
    pub(crate) fn computed(&self) -> usize {
        if self.recovery.is_some() { self.wanted } else { 0 }
    }

    /// Number of bytes that are read from all sources together.
    pub(crate) fn source_bytes(&self) -> u64 {
        (self.blocks.len() * self.len()) as u64
    }

    /// Computes the fragments into `buffers`. Verifies the sources, because otherwise the new
    /// checksums would hide their damage.
    pub(crate) fn run(self, mut buffers: Vec<Buffer>) -> Result<Vec<Payload>, RecoverError> {
        let Reconstruction { recovery, wanted, blocks } = self;
        // A copy keeps its checksums.
        let Some(recovery) = recovery else { return Ok(vec![blocks[0].clone(); wanted]) };
        let mut checksums = vec![Vec::with_capacity(blocks[0].len() / BLOCK_SIZE); wanted];
        let mut into: Vec<&mut [u8]> = buffers.iter_mut().map(|buffer| &mut buffer[..]).collect();
        if base::mutant!(RecoverFromUnverified) {
            let from: Vec<&[u8]> = blocks.iter().map(|b| &b.data()[..]).collect();
            recovery.run(&from, &mut into).map_err(wrong)?;
            let computed = buffers.into_iter().map(|buffer| Payload::compute(0, buffer.freeze()));
            return Ok(computed.collect());
        }
        recovery.run_checked(&checked(&blocks), &mut into, &mut checksums).map_err(|e| match e {
            EcError::Damaged { index, .. } => RecoverError::Damaged(index),
            e => wrong(e),
        })?;
        let payload = |(buffer, sums): (Buffer, Vec<u32>)| Payload::from_parts(0, buffer.freeze(), sums);
        let computed = buffers.into_iter().zip(checksums).map(payload);
        Ok(computed.collect::<Result<_, _>>().expect("there is one checksum per block"))
    }
}

/// The error that too few fragments of an object are readable.
pub(crate) fn too_few(found: usize, needed: usize) -> StoreError {
    StoreError::Corrupt {
        what: "object".into(),
        detail: format!("only {found} of its fragments can be read, but {needed} are needed"),
    }
}

fn checked(units: &[Payload]) -> Vec<CheckedUnit<'_>> {
    units.iter().map(CheckedUnit::from).collect()
}

fn wrong(e: EcError) -> RecoverError {
    RecoverError::Refused(refused(e))
}

fn refused(e: ec::EcError) -> StoreError {
    StoreError::InvalidArgument(e.to_string())
}
