//! Bulk descriptors, which name memory that one peer offers to the other.

use serde::{Deserialize, Serialize};

/// Kind of memory that a bulk segment lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory of a CPU.
    Host,
    /// Memory of the device with this index, such as a GPU. The messenger does not support it yet.
    Device(u16),
}

/// Owner of the memory that a descriptor names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BulkOwner {
    /// The peer on this connection.
    Peer,
    /// A third party, named by its fabric address. With this variant, a gateway can pass on a
    /// descriptor of an application's memory. The messenger does not support it yet.
    Fabric(Vec<u8>),
}

/// Direction of the transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum BulkDirection {
    /// The receiver of the descriptor reads the memory. A client's write uses this direction.
    Read,
    /// The receiver of the descriptor writes the memory. A client's read uses this direction.
    Write,
}

/// A range of offered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BulkSegment {
    /// Address within the registered memory: a virtual address or an offset, depending on the
    /// network stack.
    pub address: u64,
    /// Remote key, which permits access to the memory. On network stacks without keys, this field
    /// contains the random id of the offer.
    pub key: u64,
    /// Length, in bytes.
    pub len: u64,
}

/// Memory that is offered to a peer for one transfer. The descriptor travels inside a message's
/// header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BulkDescriptor {
    /// Owner of the memory.
    pub owner: BulkOwner,
    /// Kind of the memory.
    pub memory: MemoryKind,
    /// Ranges of the memory, at most 64. The sum of their lengths is the transfer's length.
    pub segments: Vec<BulkSegment>,
    /// Direction of the transfer: whether the receiver of the descriptor reads or writes the
    /// memory.
    pub direction: BulkDirection,
    /// Offset of the transfer's first byte within its 4 KiB block of the object (0 to 4095). Each
    /// piece ends at a block boundary and has its own checksum, so the offset determines the
    /// pieces.
    pub block_offset: u16,
    /// Time after which the offer of the memory expires, in milliseconds.
    pub expires_ms: u32,
    /// Memory ranges for one-sided transfers. If `None`, the data is sent in frames instead.
    pub remote: Option<RemoteMemory>,
}

impl BulkDescriptor {
    /// Returns the length of the transfer, in bytes; `None` if the sum of the lengths overflows.
    #[must_use]
    pub fn len(&self) -> Option<u64> {
        self.segments.iter().try_fold(0u64, |sum, s| sum.checked_add(s.len))
    }

    /// Returns whether the transfer has no data.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }
}

/// Memory that a peer may access by one-sided transfers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteMemory {
    /// Number of the connection's transport for which the memory is registered.
    pub transport: u64,
    /// Ranges of the memory, in the order of the transfer.
    pub segments: Vec<BulkSegment>,
    /// Checksums of the pieces of the data, 4 bytes each, little-endian. Empty if the peer writes
    /// the memory.
    pub checksums: Vec<u8>,
}

impl RemoteMemory {
    /// Returns the segment that contains the bytes `offset..offset + len` of the transfer, and the
    /// offset of the first byte in that segment. Returns `None` if no single segment contains all
    /// these bytes.
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
