//! [`Coder`]: computes parity, and reconstructs fragments from other fragments.

use std::ops::Range;

use base::block::BLOCK_SIZE;
use base::pool::BufferPool;
use bytes::Bytes;
use store::StoreError;
pub(crate) use store::stripes::FragmentBuf as Buffer;

use crate::layout::StripeLayout;

/// Size in bytes of the static buffer of zeros.
const ZEROS: usize = 64 << 10;

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
    pub(crate) fn encode_units(
        &self,
        units: &[Bytes],
        parity: &mut [Buffer],
    ) -> store::Result<Vec<Vec<u32>>> {
        let blocks = parity.first().map_or(0, |b| b.len() / BLOCK_SIZE);
        let mut checksums = vec![Vec::with_capacity(blocks); parity.len()];
        let units: Vec<&[u8]> = units.iter().map(|unit| &unit[..]).collect();
        let mut parity: Vec<&mut [u8]> = parity.iter_mut().map(|b| &mut b[..]).collect();
        self.code()?.encode_units(&units, &mut parity, &mut checksums).map_err(refused)?;
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

    /// Reconstructs the fragments `wanted` from the `k` fragments `sources` or, in a mirror, from
    /// one copy. `bytes` contains the bytes of each source, all of the same length.
    pub(crate) fn recover(
        &self,
        sources: &[usize],
        wanted: &[usize],
        bytes: &[Bytes],
    ) -> store::Result<Vec<Bytes>> {
        let Some(code) = &self.code else { return Ok(vec![bytes[0].clone(); wanted.len()]) };
        let recovery = code.recovery(sources, wanted).map_err(refused)?;
        let mut buffers: Vec<Buffer> = wanted.iter().map(|_| self.buffer(bytes[0].len())).collect();
        let from: Vec<&[u8]> = bytes.iter().map(|b| &b[..]).collect();
        let mut into: Vec<&mut [u8]> = buffers.iter_mut().map(|buffer| &mut buffer[..]).collect();
        recovery.run(&from, &mut into).map_err(refused)?;
        Ok(buffers.into_iter().map(Buffer::freeze).collect())
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

/// The error that too few fragments of an object are readable.
pub(crate) fn too_few(found: usize, needed: usize) -> StoreError {
    StoreError::Corrupt {
        what: "object".into(),
        detail: format!("only {found} of its fragments can be read, but {needed} are needed"),
    }
}

fn refused(e: ec::EcError) -> StoreError {
    StoreError::InvalidArgument(e.to_string())
}
