//! DPU memory and host memory, and their layouts.
//!
//! Host memory consists of the inbound ring, the outbox ring and the data region. DPU memory starts
//! with a *mirror* of host memory, which has the same layout. The sender writes an entry or a
//! payload into its own memory, and DMA moves the bytes to the same offset of the layout on the
//! other side. A request that holds a range of the data region therefore always has staging memory
//! for that range, and never waits for staging memory. Behind the mirror, DPU memory contains the
//! osd's pool of staging buffers.

use std::sync::Arc;

use base::mem::Arena;
use base::pool::{BufferPool, Lease, MIN_BUFFER};
use serde::{Deserialize, Serialize};

use crate::ring::{MAX_ENTRY, Ring};
use crate::{ChannelError, Result};

/// Maximum length of a ring, in bytes.
const MAX_RING: u64 = 64 << 20;
/// Maximum length of a data region, in bytes.
const MAX_DATA: u64 = 4 << 30;

/// Sizes of host memory, which the osd chooses and the store accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLayout {
    /// Length of each of the two rings, in bytes.
    pub ring_len: u64,
    /// Length of the data region, in bytes.
    pub data_len: u64,
}

impl MemoryLayout {
    /// Checks that the sizes are within the limits.
    ///
    /// # Errors
    /// [`ChannelError::Refused`] with the reason.
    pub fn check(&self) -> Result<()> {
        let MemoryLayout { ring_len, data_len } = *self;
        let sensible =
            |len: u64, least: u64, most: u64| len.is_multiple_of(4096) && (least..=most).contains(&len);
        if !sensible(ring_len, 2 * MAX_ENTRY as u64, MAX_RING) || !sensible(data_len, 1 << 20, MAX_DATA) {
            let what = format!(
                "rings of {ring_len} bytes and a data region of {data_len} bytes are not possible; \
                 use multiples of 4096, 40 KiB to 64 MiB for a ring, and 1 MiB to 4 GiB for the region"
            );
            return Err(ChannelError::Refused(what));
        }
        Ok(())
    }

    /// The ring from osd to store.
    #[must_use]
    pub fn inbound(&self) -> Ring {
        Ring { offset: 0, len: self.ring_len as usize }
    }

    /// The ring from store to osd.
    #[must_use]
    pub fn outbox(&self) -> Ring {
        Ring { offset: self.ring_len as usize, len: self.ring_len as usize }
    }

    /// Offset of the data region from the start of host memory, in bytes.
    #[must_use]
    pub fn data_offset(&self) -> usize {
        2 * self.ring_len as usize
    }

    /// Length of host memory, and of its mirror, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.data_offset() + self.data_len as usize
    }

    /// Whether host memory has no bytes. This is never true for a layout that
    /// [`check`](Self::check) accepts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Sizes of DPU memory.
#[derive(Debug, Clone, Copy)]
pub struct MemoryOptions {
    /// The layout of the mirror.
    pub layout: MemoryLayout,
    /// Total length of the osd's staging buffers, in bytes.
    pub pool_len: usize,
    /// Largest staging buffer, in bytes; a power of two.
    pub largest_buffer: usize,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        MemoryOptions {
            layout: MemoryLayout { ring_len: 1 << 20, data_len: 64 << 20 },
            pool_len: 128 << 20,
            largest_buffer: 4 << 20,
        }
    }
}

/// DPU memory. The osd's process creates it once and keeps it when the store restarts.
#[derive(Debug, Clone)]
pub struct DpuMemory {
    arena: Arc<Arena>,
    layout: MemoryLayout,
    pool: BufferPool,
}

impl DpuMemory {
    /// Allocates DPU memory.
    ///
    /// # Errors
    /// Fails if the sizes are invalid or the system lacks memory.
    pub fn new(options: MemoryOptions) -> Result<DpuMemory> {
        options.layout.check()?;
        let MemoryOptions { pool_len, largest_buffer, .. } = options;
        if !largest_buffer.is_power_of_two() || largest_buffer < MIN_BUFFER || pool_len < largest_buffer {
            let what = format!(
                "staging memory of {pool_len} bytes with buffers of {largest_buffer} bytes is not possible; \
                 a buffer must be a power of two from {MIN_BUFFER} bytes to the size of the staging memory"
            );
            return Err(ChannelError::Refused(what));
        }
        let pool_at = options.layout.len().next_multiple_of(MIN_BUFFER);
        let arena = Arena::shared("outboard-dpu", pool_at + options.pool_len)?;
        let pool = BufferPool::new(Arc::clone(&arena), pool_at, options.largest_buffer);
        Ok(DpuMemory { arena, layout: options.layout, pool })
    }

    /// The whole memory.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// The layout of the mirror, which starts at offset 0.
    #[must_use]
    pub fn layout(&self) -> MemoryLayout {
        self.layout
    }

    /// The staging buffers, which follow the mirror. Payload in them reaches the host without
    /// another copy.
    #[must_use]
    pub fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// Offset of `bytes` from the start of DPU memory, in bytes. `None` if `bytes` is not in the
    /// pool of staging buffers.
    #[must_use]
    pub fn offset_of(&self, bytes: &[u8]) -> Option<usize> {
        self.arena.offset_of(bytes).filter(|&offset| offset >= self.layout.len())
    }
}

/// Host memory. The store's process creates new memory for each attachment.
#[derive(Debug)]
pub struct HostMemory {
    /// The whole memory.
    pub arena: Arc<Arena>,
    /// The layout of the memory.
    pub layout: MemoryLayout,
    /// The data region. The osd assigns ranges of it to requests.
    pub data: Lease,
}

impl HostMemory {
    /// Allocates host memory.
    ///
    /// # Errors
    /// Fails if the sizes are invalid or the system lacks memory.
    pub fn new(layout: MemoryLayout) -> Result<HostMemory> {
        layout.check()?;
        let arena = Arena::shared("outboard-host", layout.len())?;
        let data = Lease::new(Arc::clone(&arena), layout.data_offset(), layout.data_len as usize);
        Ok(HostMemory { arena, layout, data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_memory_sizes_are_refused() {
        let fine = MemoryOptions {
            layout: MemoryLayout { ring_len: 64 << 10, data_len: 1 << 20 },
            pool_len: 1 << 20,
            largest_buffer: 64 << 10,
        };
        let memory = DpuMemory::new(fine).unwrap();
        let buffer = memory.pool().try_alloc(4096).unwrap().unwrap();
        assert_eq!(memory.offset_of(&buffer), Some(fine.layout.len()));
        assert!(DpuMemory::new(MemoryOptions { pool_len: 4096, ..fine }).is_err());
        assert!(DpuMemory::new(MemoryOptions { largest_buffer: 5000, ..fine }).is_err());
        for layout in
            [(66_000, 1 << 20), (4096, 1 << 20), (64 << 10, 4096), (1 << 40, 1 << 20), (64 << 10, 1 << 50)]
        {
            let layout = MemoryLayout { ring_len: layout.0, data_len: layout.1 };
            assert!(layout.check().is_err(), "{layout:?}");
        }
    }
}
