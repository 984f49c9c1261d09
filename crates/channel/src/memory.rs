//! DPU memory and host memory, and what lies where in them.
//!
//! Host memory consists of the inbound ring, the outbox ring and the data region. DPU memory starts with a *mirror* of
//! it, laid out alike: an entry or a payload is written into the mirror and moved to the same offset on the other side,
//! or the other way round. So whoever has a range of the data region has staging memory for it too, and never waits
//! for it. Behind the mirror lies the pool of staging buffers that the OSD uses.

use std::sync::Arc;

use base::mem::Arena;
use base::pool::{BufferPool, Lease, MIN_BUFFER};
use serde::{Deserialize, Serialize};

use crate::ring::{MAX_ENTRY, Ring};
use crate::{ChannelError, Result};

/// Longest ring that an attachment can have, in bytes.
const MAX_RING: u64 = 64 << 20;
/// Longest data region that an attachment can have, in bytes.
const MAX_DATA: u64 = 4 << 30;

/// Sizes that the osd chooses and the store agrees to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLayout {
    /// Length of each of the two rings, in bytes.
    pub ring_len: u64,
    /// Length of the data region, in bytes.
    pub data_len: u64,
}

impl MemoryLayout {
    /// Refuses sizes that are not sensible.
    ///
    /// # Errors
    /// [`ChannelError::Refused`] with what is wrong.
    pub fn check(&self) -> Result<()> {
        let MemoryLayout { ring_len, data_len } = *self;
        let sensible =
            |len: u64, least: u64, most: u64| len.is_multiple_of(4096) && (least..=most).contains(&len);
        if !sensible(ring_len, 2 * MAX_ENTRY as u64, MAX_RING) || !sensible(data_len, 1 << 20, MAX_DATA) {
            let what =
                format!("rings of {ring_len} bytes and a data region of {data_len} bytes are not possible");
            return Err(ChannelError::Refused(what));
        }
        Ok(())
    }

    /// Osd to store.
    #[must_use]
    pub fn inbound(&self) -> Ring {
        Ring { offset: 0, len: self.ring_len as usize }
    }

    /// Store to osd.
    #[must_use]
    pub fn outbox(&self) -> Ring {
        Ring { offset: self.ring_len as usize, len: self.ring_len as usize }
    }

    /// Where the data region starts, in bytes from the memory's start.
    #[must_use]
    pub fn data_offset(&self) -> usize {
        2 * self.ring_len as usize
    }

    /// Length of host memory, and of its mirror, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.data_offset() + self.data_len as usize
    }

    /// Never true for a layout that [`check`](Self::check) accepts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How much memory the osd's side has.
#[derive(Debug, Clone, Copy)]
pub struct MemoryOptions {
    /// What is mirrored on the host.
    pub layout: MemoryLayout,
    /// Bytes of staging buffers for the OSD.
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

/// DPU memory: made once by the osd's process, and kept when the store restarts.
#[derive(Debug, Clone)]
pub struct DpuMemory {
    arena: Arc<Arena>,
    layout: MemoryLayout,
    pool: BufferPool,
}

impl DpuMemory {
    /// Makes DPU memory.
    ///
    /// # Errors
    /// If the sizes are not sensible or the system has not that much memory.
    pub fn new(options: MemoryOptions) -> Result<DpuMemory> {
        options.layout.check()?;
        let MemoryOptions { pool_len, largest_buffer, .. } = options;
        if !largest_buffer.is_power_of_two() || largest_buffer < MIN_BUFFER || pool_len < largest_buffer {
            let what = format!(
                "staging memory of {pool_len} bytes in buffers of up to {largest_buffer} is not possible"
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

    /// Layout of the mirror at its start.
    #[must_use]
    pub fn layout(&self) -> MemoryLayout {
        self.layout
    }

    /// Staging buffers behind the mirror. Payload in them goes to the host without another copy.
    #[must_use]
    pub fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// Where `bytes` lies in the pool's part, in bytes from the start of the memory; `None` if it is elsewhere.
    #[must_use]
    pub fn offset_of(&self, bytes: &[u8]) -> Option<usize> {
        self.arena.offset_of(bytes).filter(|&offset| offset >= self.layout.len())
    }
}

/// Host memory: made by the store's process, afresh for each attachment.
#[derive(Debug)]
pub struct HostMemory {
    /// The whole memory.
    pub arena: Arc<Arena>,
    /// What lies where.
    pub layout: MemoryLayout,
    /// The data region, whose ranges the osd gives out.
    pub data: Lease,
}

impl HostMemory {
    /// Makes host memory.
    ///
    /// # Errors
    /// If the sizes are not sensible or the system has not that much memory.
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
    fn sizes_that_cannot_be_are_refused() {
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
