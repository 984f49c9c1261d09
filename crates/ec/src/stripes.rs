//! Encoding for storage: many stripes at once, with the checksums that parity is stored with.

use base::block::{BLOCK_SIZE, crc32c};

use crate::code::{check_count, check_lengths};
use crate::prefetch::{CACHE_LINE, prefetch};
use crate::{Code, EcError, Result};

/// Bytes of data and parity that are worked on before the parity is checksummed: it is still in the second cache then. Memory
/// likes long runs, so this is not chosen smaller.
const CHUNK: usize = 1 << 20;

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
        let units: Vec<&[u8]> = data.chunks_exact(unit).collect();
        for (number, stripe) in units.chunks_exact(k).enumerate() {
            let rows = number * unit..(number + 1) * unit;
            let mut parity: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[rows.clone()]).collect();
            let next = units.get((number + 1) * k..(number + 2) * k).unwrap_or_default();
            self.encode_rows(stripe, &mut parity, checksums, next);
        }
        Ok(())
    }

    /// Computes the parity of shards that are each in one piece, and its checksums as [`Code::encode_stripes`] does.
    ///
    /// # Errors
    /// [`EcError::Unit`] unless shards are whole blocks; [`EcError::Count`], [`EcError::Length`].
    pub fn encode_shards(
        &self,
        data: &[&[u8]],
        parity: &mut [&mut [u8]],
        checksums: &mut [Vec<u32>],
    ) -> Result<()> {
        let (k, m) = (self.geometry().k(), self.geometry().m());
        check_count("data", data.len(), k)?;
        check_count("parity", parity.len(), m)?;
        check_count("checksums", checksums.len(), m)?;
        let len = data[0].len();
        if !len.is_multiple_of(BLOCK_SIZE) {
            return Err(EcError::Unit { unit: len, multiple: BLOCK_SIZE, max: usize::MAX / k });
        }
        check_lengths("data", data.iter().map(|d| d.len()), len)?;
        check_lengths("parity", parity.iter().map(|p| p.len()), len)?;
        self.encode_rows(data, parity, checksums, &[]);
        Ok(())
    }

    /// Computes parity of slices of one length, whole blocks, in pieces that stay in the cache until they are checksummed.
    /// `next` is the data that comes after them.
    fn encode_rows(
        &self,
        data: &[&[u8]],
        parity: &mut [&mut [u8]],
        checksums: &mut [Vec<u32>],
        next: &[&[u8]],
    ) {
        let len = data[0].len();
        let chunk = chunk(self.geometry().shards(), len);
        for at in (0..len).step_by(chunk.max(1)) {
            let rows = at..(at + chunk).min(len);
            let sources: Vec<&[u8]> = data.iter().map(|d| &d[rows.clone()]).collect();
            let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[rows.clone()]).collect();
            self.parity().apply(&sources, &mut outputs);
            let mut ahead = match rows.end < len {
                true => Ahead { data, at: rows.end },
                false => Ahead { data: next, at: 0 },
            };
            for (sums, out) in checksums.iter_mut().zip(outputs) {
                for block in out.chunks_exact(BLOCK_SIZE) {
                    ahead.fetch();
                    sums.push(crc32c(block));
                }
            }
        }
    }
}

/// How many bytes of each unit are worked on at a time: whole blocks, at least one.
fn chunk(shards: usize, unit: usize) -> usize {
    let blocks = CHUNK / shards / BLOCK_SIZE;
    (blocks.max(1) * BLOCK_SIZE).min(unit)
}

/// The data that is encoded next: what follows `at` in each of these. Checksumming leaves memory idle, which can bring the
/// first bytes of each meanwhile.
#[derive(Debug)]
struct Ahead<'a> {
    data: &'a [&'a [u8]],
    at: usize,
}

impl Ahead<'_> {
    /// Has memory bring one more cache line of each.
    fn fetch(&mut self) {
        self.data.iter().filter_map(|shard| shard.get(self.at..)).for_each(prefetch);
        self.at += CACHE_LINE;
    }
}
