//! Encoding for storage: many stripes at once, with the checksums that parity is stored with.

use base::block::{BLOCK_SIZE, crc32c};

use crate::code::{check_count, check_lengths};
use crate::{Code, EcError, Result};

/// Bytes of data and parity that are worked on before the parity is checksummed: they are to be in the nearest cache then.
const CHUNK: usize = 128 << 10;

impl Code {
    /// Computes the parity of whole stripes, and its checksums as stored blocks have them.
    ///
    /// `data` is cut into units of `unit` bytes: the first `k` are stripe 0, one for each data shard, the next `k` are
    /// stripe 1, and so on. `parity[i]` gets the units of parity shard `i`, one for each stripe. `checksums[i]` is what
    /// comes of it: the CRC-32C of each of its blocks of [`BLOCK_SIZE`] bytes is appended.
    ///
    /// # Errors
    /// [`EcError::Unit`] unless units are whole blocks; [`EcError::PartialStripe`], [`EcError::Count`], [`EcError::Length`].
    pub fn encode_stripes(
        &self,
        unit: usize,
        data: &[u8],
        parity: &mut [&mut [u8]],
        checksums: &mut [Vec<u32>],
    ) -> Result<()> {
        let (k, m) = (self.geometry().k(), self.geometry().m());
        if unit == 0 || !unit.is_multiple_of(BLOCK_SIZE) || unit > usize::MAX / k {
            return Err(EcError::Unit { unit, multiple: BLOCK_SIZE, max: usize::MAX / k });
        }
        let stripe = unit * k;
        if !data.len().is_multiple_of(stripe) {
            return Err(EcError::PartialStripe { len: data.len(), stripe });
        }
        check_count("parity", parity.len(), m)?;
        check_count("checksums", checksums.len(), m)?;
        check_lengths("parity", parity.iter().map(|p| p.len()), data.len() / k)?;
        let chunk = chunk(self.geometry().shards(), unit);
        for (index, stripe) in data.chunks_exact(stripe).enumerate() {
            for at in (0..unit).step_by(chunk) {
                let size = chunk.min(unit - at);
                let sources: Vec<&[u8]> = stripe.chunks_exact(unit).map(|u| &u[at..at + size]).collect();
                let mut outputs: Vec<&mut [u8]> =
                    parity.iter_mut().map(|p| &mut p[index * unit + at..][..size]).collect();
                self.parity().apply(&sources, &mut outputs);
                for (sums, out) in checksums.iter_mut().zip(outputs) {
                    sums.extend(out.chunks_exact(BLOCK_SIZE).map(crc32c));
                }
            }
        }
        Ok(())
    }
}

/// How many bytes of each unit are worked on at a time: whole blocks, at least one.
fn chunk(shards: usize, unit: usize) -> usize {
    let blocks = CHUNK / shards / BLOCK_SIZE;
    (blocks.max(1) * BLOCK_SIZE).min(unit)
}
