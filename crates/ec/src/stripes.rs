//! Encodes many stripes at once, and computes the checksums of their parity blocks.

use base::block::{BLOCK_SIZE, crc32c};

use crate::code::{check_count, check_lengths};
use crate::prefetch::{CACHE_LINE, prefetch};
use crate::{Code, EcError, Result};

/// Number of bytes of data and parity that are encoded before the parity is checksummed. The parity
/// of so few bytes is still in the second-level cache when it is checksummed. A smaller value would
/// slow down memory accesses, because it shortens the sequential accesses.
const CHUNK: usize = 1 << 20;

impl Code {
    /// Computes the parity of whole stripes, and the checksums of the parity blocks.
    ///
    /// `data` consists of units of `unit` bytes. The first `k` units are stripe 0, one for each
    /// data fragment; the next `k` are stripe 1, and so on. `parity[i]` receives the units of
    /// parity fragment `i`, one per stripe. The CRC-32C of each block of parity fragment `i`
    /// ([`BLOCK_SIZE`] bytes) is appended to `checksums[i]`.
    ///
    /// # Errors
    /// [`EcError::Unit`] unless units consist of whole blocks, [`EcError::PartialStripe`] unless
    /// `data` consists of whole stripes, and [`EcError::Count`] or [`EcError::Length`] if `parity`
    /// or `checksums` do not match the code and the data.
    pub fn encode_stripes(
        &self,
        unit: usize,
        data: &[u8],
        parity: &mut [&mut [u8]],
        checksums: &mut [Vec<u32>],
    ) -> Result<()> {
        let k = self.geometry().k();
        check_unit(unit, k)?;
        let stripe = unit * k;
        if !data.len().is_multiple_of(stripe) {
            return Err(EcError::PartialStripe { len: data.len(), stripe });
        }
        let units: Vec<&[u8]> = data.chunks_exact(unit).collect();
        self.encode_units(&units, parity, checksums)
    }

    /// Like [`Code::encode_stripes`], for units that are not contiguous. `data` contains the units
    /// of stripe 0, one for each data fragment, then the units of stripe 1, and so on. All units
    /// must have the same length.
    ///
    /// # Errors
    /// Those of [`Code::encode_stripes`].
    pub fn encode_units(
        &self,
        data: &[&[u8]],
        parity: &mut [&mut [u8]],
        checksums: &mut [Vec<u32>],
    ) -> Result<()> {
        let (k, m) = (self.geometry().k(), self.geometry().m());
        let unit = data.first().map_or(BLOCK_SIZE, |unit| unit.len());
        check_unit(unit, k)?;
        if !data.len().is_multiple_of(k) {
            return Err(EcError::PartialStripe { len: data.len() * unit, stripe: unit * k });
        }
        check_lengths("data", data.iter().map(|d| d.len()), unit)?;
        check_count("parity", parity.len(), m)?;
        check_count("checksums", checksums.len(), m)?;
        check_lengths("parity", parity.iter().map(|p| p.len()), data.len() / k * unit)?;
        let chunk = chunk(self.geometry().fragments(), unit);
        // Positions of all chunks: the stripe, and the offset within its units.
        let stripes = data.chunks_exact(k).enumerate();
        let mut chunks = stripes.flat_map(|s| (0..unit).step_by(chunk).map(move |at| (s, at))).peekable();
        while let Some(((number, units), at)) = chunks.next() {
            let size = chunk.min(unit - at);
            let sources: Vec<&[u8]> = units.iter().map(|u| &u[at..at + size]).collect();
            let mut outputs: Vec<&mut [u8]> =
                parity.iter_mut().map(|p| &mut p[number * unit + at..][..size]).collect();
            self.parity().apply(&sources, &mut outputs);
            let (units, at) = chunks.peek().map_or((&data[..0], 0), |((_, units), at)| (*units, *at));
            let mut ahead = Ahead { units, at };
            for (sums, out) in checksums.iter_mut().zip(outputs) {
                for block in out.chunks_exact(BLOCK_SIZE) {
                    ahead.fetch();
                    sums.push(crc32c(block));
                }
            }
        }
        Ok(())
    }
}

fn check_unit(unit: usize, k: usize) -> Result<()> {
    if unit == 0 || !unit.is_multiple_of(BLOCK_SIZE) || unit > usize::MAX / k {
        return Err(EcError::Unit { unit, multiple: BLOCK_SIZE, max: usize::MAX / k });
    }
    Ok(())
}

/// Number of bytes of each unit that are encoded at a time: whole blocks, at least one.
fn chunk(fragments: usize, unit: usize) -> usize {
    let blocks = CHUNK / fragments / BLOCK_SIZE;
    (blocks.max(1) * BLOCK_SIZE).min(unit)
}

/// The data that is encoded next: the bytes of `units`, beginning at offset `at`. While the parity
/// is checksummed, the first bytes of each unit are prefetched, because checksumming leaves memory
/// bandwidth unused.
#[derive(Debug)]
struct Ahead<'a> {
    units: &'a [&'a [u8]],
    at: usize,
}

impl Ahead<'_> {
    /// Prefetches one more cache line of each unit.
    fn fetch(&mut self) {
        self.units.iter().filter_map(|unit| unit.get(self.at..)).for_each(prefetch);
        self.at += CACHE_LINE;
    }
}
