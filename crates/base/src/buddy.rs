//! [`Buddy`]: the bookkeeping of a buddy allocator, which knows offsets and sizes but has no
//! memory.
//!
//! [`crate::pool::BufferPool`] uses this bookkeeping for memory of its own process. The host–DPU
//! channel uses it for memory of the peer, which this process never maps. Blocks are naturally
//! aligned, and merging bounds fragmentation.

use std::collections::BTreeSet;

/// The free blocks of a region. The region consists of whole blocks of the largest size.
#[derive(Debug)]
pub struct Buddy {
    /// `free[k]`: offsets of free blocks of `smallest << k` bytes.
    free: Vec<BTreeSet<usize>>,
    smallest: usize,
    free_bytes: usize,
}

impl Buddy {
    /// Creates the bookkeeping for as many blocks of `largest` bytes as fit into `len` bytes. All
    /// blocks are free.
    ///
    /// # Panics
    /// If `smallest` or `largest` is not a power of two, `largest` is less than `smallest`, or
    /// `len` is less than `largest`.
    #[must_use]
    pub fn new(len: usize, smallest: usize, largest: usize) -> Buddy {
        assert!(smallest.is_power_of_two() && largest.is_power_of_two(), "block sizes must be powers of two");
        assert!(largest >= smallest, "the largest block is smaller than the smallest");
        let orders = (largest / smallest).trailing_zeros() as usize;
        let count = len / largest;
        assert!(count > 0, "the region is smaller than one block");
        let mut free = vec![BTreeSet::new(); orders + 1];
        free[orders] = (0..count).map(|i| i * largest).collect();
        Buddy { free, smallest, free_bytes: count * largest }
    }

    /// Returns the order of the smallest block that holds `len` bytes, or `None` if no block is
    /// that large. A block of order `k` has `smallest << k` bytes.
    #[must_use]
    pub fn order_of(&self, len: usize) -> Option<usize> {
        let blocks = len.max(1).checked_next_power_of_two()?.max(self.smallest) / self.smallest;
        let order = blocks.trailing_zeros() as usize;
        (order < self.free.len()).then_some(order)
    }

    /// Size of a block of `order`, in bytes.
    #[must_use]
    pub fn size_of(&self, order: usize) -> usize {
        self.smallest << order
    }

    /// Size of the largest block, in bytes.
    #[must_use]
    pub fn largest(&self) -> usize {
        self.size_of(self.free.len() - 1)
    }

    /// Total number of free bytes.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.free_bytes
    }

    /// Allocates a block of an order and returns its offset, a multiple of the block's size.
    /// Returns `None` if no free block is large enough.
    pub fn take(&mut self, order: usize) -> Option<usize> {
        let from = (order..self.free.len()).find(|&k| !self.free[k].is_empty())?;
        let offset = self.free[from].pop_first()?;
        for k in (order..from).rev() {
            self.free[k].insert(offset + (self.smallest << k));
        }
        self.free_bytes -= self.smallest << order;
        Some(offset)
    }

    /// Frees a block that [`take`](Self::take) returned for the same `order`.
    pub fn release(&mut self, mut offset: usize, order: usize) {
        self.free_bytes += self.smallest << order;
        let mut k = order;
        while k + 1 < self.free.len() {
            let buddy = offset ^ (self.smallest << k);
            if !self.free[k].remove(&buddy) {
                break;
            }
            offset = offset.min(buddy);
            k += 1;
        }
        let fresh = self.free[k].insert(offset);
        debug_assert!(fresh, "block {offset} of order {order} was released twice");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_split_on_demand_and_merged_when_freed() {
        let mut buddy = Buddy::new(64 << 10, 4 << 10, 32 << 10);
        let (small, large) = (buddy.order_of(1).unwrap(), buddy.order_of(20_000).unwrap());
        assert_eq!(buddy.order_of(32_769), None);
        let a = buddy.take(small).unwrap();
        let b = buddy.take(large).unwrap();
        assert_eq!((a, b), (0, 32 << 10));
        assert_eq!(buddy.take(large), None, "the first half is split");
        buddy.release(a, small);
        assert_eq!(buddy.take(large), Some(0), "the parts of the first half were merged");
        assert_eq!(buddy.free_bytes(), 0);
    }
}
