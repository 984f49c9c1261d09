//! Bulk descriptors: memory that one peer offers to another, as a message's header carries it.

use serde::{Deserialize, Serialize};

/// Kind of memory that a bulk segment lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory of a CPU.
    Host,
    /// Memory of the accelerator with this index. The messenger refuses it today.
    Device(u16),
}

/// Owner of the memory that a descriptor names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BulkOwner {
    /// The peer of this session.
    Session,
    /// A third party, by its fabric address: a gateway passes on the memory of an application.
    /// The messenger refuses it today.
    Fabric(Vec<u8>),
}

/// What the receiver of a descriptor may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum BulkDirection {
    /// The receiver of the descriptor reads the memory (a client's write).
    Read,
    /// The receiver of the descriptor writes the memory (a client's read).
    Write,
}

/// A range of offered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BulkSegment {
    /// Address within the registration: a virtual address or an offset, as the network stack has it.
    pub address: u64,
    /// Remote key; on network stacks without keys, the random id of the offer.
    pub key: u64,
    /// Length, in bytes.
    pub len: u64,
}

/// Memory offered to a peer for one transfer. It travels inside a message's header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BulkDescriptor {
    /// Owner of the memory.
    pub owner: BulkOwner,
    /// Kind of the memory.
    pub memory: MemoryKind,
    /// Ranges of the memory; their lengths add up to the transfer's length. At most 64.
    pub segments: Vec<BulkSegment>,
    /// What the receiver may do with the memory.
    pub direction: BulkDirection,
    /// Offset of the first byte within its 4 KiB block of the object (0..4096): anchors the checksum
    /// pieces.
    pub phase: u16,
    /// Milliseconds after which the offer is void.
    pub expires_ms: u32,
    /// The memory's addresses for one-sided transfers. Without them, data travels in frames.
    pub remote: Option<RemoteMemory>,
}

impl BulkDescriptor {
    /// Length of the transfer, in bytes; `None` if the segments' lengths overflow.
    #[must_use]
    pub fn len(&self) -> Option<u64> {
        self.segments.iter().try_fold(0u64, |sum, s| sum.checked_add(s.len))
    }

    /// Whether there is nothing to transfer.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }
}

/// Memory that a peer may read or write by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteMemory {
    /// Number of the session's transport that the memory is registered for.
    pub transport: u64,
    /// Ranges of the memory, in the order of the transfer.
    pub segments: Vec<BulkSegment>,
    /// Checksums of the pieces, 4 bytes each, little endian; empty if the memory is to be written.
    pub checksums: Vec<u8>,
}

impl RemoteMemory {
    /// Returns the segment that holds bytes `offset..offset + len` of the transfer, and where they begin
    /// in it. `None` if no single segment holds them.
    #[must_use]
    pub fn find(&self, offset: u64, len: u64) -> Option<(BulkSegment, u64)> {
        let mut start = 0u64;
        for &segment in &self.segments {
            let end = start.checked_add(segment.len)?;
            if offset >= start && offset.checked_add(len)? <= end {
                return Some((segment, offset - start));
            }
            start = end;
        }
        None
    }

    /// Returns the checksums of pieces `first..first + count`, or `None` if there are fewer pieces.
    #[must_use]
    pub fn checksums(&self, first: usize, count: usize) -> Option<Vec<u32>> {
        let bytes = self.checksums.get(first.checked_mul(4)?..first.checked_add(count)?.checked_mul(4)?)?;
        Some(bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
    }
}
