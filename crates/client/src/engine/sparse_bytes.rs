//! [`SparseBytes`]: the data of an object in memory, with its holes.

use std::collections::BTreeSet;
use std::ops::Range;

use base::block::BLOCK;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::model::Content;

/// Data of an object in memory. It also records which blocks were written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SparseBytes {
    bytes: Vec<u8>,
    /// Numbers of the blocks that are not holes.
    blocks: BTreeSet<u64>,
}

impl SparseBytes {
    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes
    }
}

impl Content for SparseBytes {
    type Piece = Bytes;

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn piece_len(piece: &Bytes) -> u64 {
        piece.len() as u64
    }

    fn resize(&mut self, size: u64) {
        self.bytes.resize(size as usize, 0);
        self.blocks.split_off(&size.div_ceil(BLOCK));
    }

    fn write(&mut self, offset: u64, piece: &Bytes) {
        self.bytes[offset as usize..][..piece.len()].copy_from_slice(piece);
        self.blocks.extend(offset / BLOCK..(offset + piece.len() as u64).div_ceil(BLOCK));
    }

    fn zero(&mut self, range: Range<u64>) {
        self.bytes[range.start as usize..range.end as usize].fill(0);
        let whole = range.start.div_ceil(BLOCK)..range.end / BLOCK;
        self.blocks.retain(|block| !whole.contains(block));
    }

    fn has_bytes(&self, offset: u64, bytes: &[u8]) -> bool {
        let from = self.bytes.get(offset as usize..).unwrap_or_default();
        from.get(..bytes.len()) == Some(bytes)
    }

    fn extents(&self, range: Range<u64>) -> Option<Vec<Range<u64>>> {
        let end = range.end.min(self.size());
        let mut extents: Vec<Range<u64>> = Vec::new();
        for block in self.blocks.iter().filter(|block| (*block + 1) * BLOCK > range.start) {
            let (start, stop) = ((block * BLOCK).max(range.start), ((block + 1) * BLOCK).min(end));
            if start >= stop {
                break;
            }
            match extents.last_mut() {
                Some(last) if last.end == start => last.end = stop,
                _ => extents.push(start..stop),
            }
        }
        Some(extents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_that_are_zeroed_or_cut_off_become_holes() {
        let mut data = SparseBytes::default();
        data.resize(30_000);
        assert_eq!(data.extents(0..30_000).unwrap(), []);
        data.write(5000, &Bytes::from(vec![1; 20_000]));
        let extents = |data: &SparseBytes, start: u64, end: u64| -> Vec<(u64, u64)> {
            data.extents(start..end).unwrap().into_iter().map(|range| (range.start, range.end)).collect()
        };
        assert_eq!(extents(&data, 0, 30_000), [(4096, 28_672)]);
        assert_eq!(extents(&data, 5000, 6000), [(5000, 6000)]);
        data.zero(8192..17_000);
        assert_eq!(extents(&data, 0, 30_000), [(4096, 8192), (16_384, 28_672)]);
        data.resize(20_000);
        assert_eq!(extents(&data, 0, 30_000), [(4096, 8192), (16_384, 20_000)]);
        data.resize(30_000);
        assert_eq!(extents(&data, 8192, 30_000), [(16_384, 20_480)]);
    }
}
