//! Codes many stripes at once. Verifies the bytes that are read, and computes the checksums of the
//! bytes that are written, while both are in the processor's cache.

use base::block::{BLOCK_SIZE, Payload, crc32c};

use crate::code::{check_count, check_lengths};
use crate::kernel::Transform;
use crate::prefetch::{CACHE_LINE, prefetch};
use crate::{Code, EcError, Result};

/// Number of bytes of all fragments that are coded before they are checksummed. So few bytes are
/// still in the second-level cache when they are checksummed. A smaller value would slow down memory
/// accesses, because it shortens the sequential accesses.
const CHUNK: usize = 1 << 20;

/// A unit of a fragment, with the CRC-32C of each of its blocks.
#[derive(Debug, Clone, Copy)]
pub struct CheckedUnit<'a> {
    /// The bytes: whole blocks of [`BLOCK_SIZE`] bytes.
    pub bytes: &'a [u8],
    /// The checksums that the blocks must have.
    pub checksums: &'a [u32],
}

impl<'a> From<&'a Payload> for CheckedUnit<'a> {
    /// Returns the unit for a payload of whole blocks.
    fn from(payload: &'a Payload) -> CheckedUnit<'a> {
        CheckedUnit { bytes: payload.data(), checksums: payload.checksums() }
    }
}

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
        let units: Vec<CheckedUnit> =
            data.iter().map(|bytes| CheckedUnit { bytes, checksums: &[] }).collect();
        self.check_stripes(&units, parity, checksums)?;
        code_units(self.parity(), &units, SourceCheck::Nothing, parity, checksums)
    }

    /// Like [`Code::encode_units`], and verifies the data. Each block is compared with its checksum
    /// after the parity of the block was computed, so damage of the data before that time is
    /// detected.
    ///
    /// # Errors
    /// Those of [`Code::encode_stripes`], [`EcError::Count`] if a unit does not have one checksum
    /// per block, and [`EcError::Damaged`] if a block does not match its checksum. In the last case,
    /// the content of `parity` and `checksums` is unspecified.
    pub fn encode_checked(
        &self,
        data: &[CheckedUnit<'_>],
        parity: &mut [&mut [u8]],
        checksums: &mut [Vec<u32>],
    ) -> Result<()> {
        self.check_stripes(data, parity, checksums)?;
        code_units(self.parity(), data, SourceCheck::Sources, parity, checksums)
    }

    fn check_stripes(
        &self,
        data: &[CheckedUnit<'_>],
        parity: &[&mut [u8]],
        checksums: &[Vec<u32>],
    ) -> Result<()> {
        let (k, m) = (self.geometry().k(), self.geometry().m());
        let unit = data.first().map_or(BLOCK_SIZE, |unit| unit.bytes.len());
        check_unit(unit, k)?;
        if !data.len().is_multiple_of(k) {
            return Err(EcError::PartialStripe { len: data.len() * unit, stripe: unit * k });
        }
        check_lengths("data", data.iter().map(|d| d.bytes.len()), unit)?;
        check_count("parity", parity.len(), m)?;
        check_count("checksums", checksums.len(), m)?;
        check_lengths("parity", parity.iter().map(|p| p.len()), data.len() / k * unit)
    }
}

/// Whether the sources are compared with their checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SourceCheck {
    Nothing,
    Sources,
}

/// Applies `transform` to the units of each stripe. `sources` contains the units of stripe 0, then
/// the units of stripe 1, and so on. Each output receives one unit per stripe, and the checksums of
/// its blocks are appended to its entry of `checksums`. The caller must check the number and the
/// length of the slices.
///
/// # Errors
/// [`EcError::Count`] if a source does not have one checksum per block, and [`EcError::Damaged`] if
/// a block does not match its checksum. Both are possible only with [`SourceCheck::Sources`].
pub(crate) fn code_units(
    transform: &dyn Transform,
    sources: &[CheckedUnit<'_>],
    check: SourceCheck,
    outputs: &mut [&mut [u8]],
    checksums: &mut [Vec<u32>],
) -> Result<()> {
    let unit = sources.first().map_or(0, |unit| unit.bytes.len());
    let total = outputs.first().map_or(0, |output| output.len());
    if unit == 0 || total == 0 {
        return Ok(());
    }
    if check == SourceCheck::Sources {
        let blocks = unit / BLOCK_SIZE;
        sources
            .iter()
            .try_for_each(|unit| check_count("checksums of a unit", unit.checksums.len(), blocks))?;
    }
    let k = sources.len() / (total / unit);
    let chunk = chunk(k + outputs.len(), unit);
    // Positions of all chunks: the stripe, and the offset within its units.
    let stripes = sources.chunks_exact(k).enumerate();
    let mut chunks = stripes.flat_map(|s| (0..unit).step_by(chunk).map(move |at| (s, at))).peekable();
    while let Some(((number, units), at)) = chunks.next() {
        let size = chunk.min(unit - at);
        let parts: Vec<&[u8]> = units.iter().map(|u| &u.bytes[at..at + size]).collect();
        let mut results: Vec<&mut [u8]> =
            outputs.iter_mut().map(|output| &mut output[number * unit + at..][..size]).collect();
        transform.apply(&parts, &mut results);
        let (units_ahead, at_ahead) =
            chunks.peek().map_or((&sources[..0], 0), |((_, units), at)| (*units, *at));
        let mut ahead = Ahead { units: units_ahead, at: at_ahead };
        if check == SourceCheck::Sources {
            for (index, (part, unit)) in parts.iter().zip(units).enumerate() {
                let expected = &unit.checksums[at / BLOCK_SIZE..];
                let damaged = |(block, expected, found)| EcError::Damaged {
                    index: number * k + index,
                    offset: at + block * BLOCK_SIZE,
                    expected,
                    found,
                };
                ahead.verify(part, expected).map_err(damaged)?;
            }
        }
        for (sums, result) in checksums.iter_mut().zip(results) {
            for block in result.chunks_exact(BLOCK_SIZE) {
                ahead.fetch();
                sums.push(crc32c(block));
            }
        }
    }
    Ok(())
}

fn check_unit(unit: usize, k: usize) -> Result<()> {
    if unit == 0 || !unit.is_multiple_of(BLOCK_SIZE) || unit > usize::MAX / k {
        return Err(EcError::Unit { unit, multiple: BLOCK_SIZE, max: usize::MAX / k });
    }
    Ok(())
}

/// Number of bytes of each unit that are coded at a time: whole blocks, at least one.
fn chunk(fragments: usize, unit: usize) -> usize {
    let blocks = CHUNK / fragments / BLOCK_SIZE;
    (blocks.max(1) * BLOCK_SIZE).min(unit)
}

/// The bytes that are coded next: the bytes of `units`, beginning at offset `at`. While blocks are
/// checksummed, the first bytes of each unit are prefetched, because checksumming leaves memory
/// bandwidth unused.
#[derive(Debug)]
struct Ahead<'a> {
    units: &'a [CheckedUnit<'a>],
    at: usize,
}

impl Ahead<'_> {
    /// Prefetches one more cache line of each unit.
    fn fetch(&mut self) {
        self.units.iter().filter_map(|unit| unit.bytes.get(self.at..)).for_each(prefetch);
        self.at += CACHE_LINE;
    }

    /// Compares each block with its checksum.
    ///
    /// # Errors
    /// The number of the first block that does not match its checksum, the expected checksum, and
    /// the checksum of the block.
    fn verify(&mut self, bytes: &[u8], expected: &[u32]) -> Result<(), (usize, u32, u32)> {
        for (number, (block, &expected)) in bytes.chunks_exact(BLOCK_SIZE).zip(expected).enumerate() {
            self.fetch();
            let found = crc32c(block);
            if found != expected {
                return Err((number, expected, found));
            }
        }
        Ok(())
    }
}
