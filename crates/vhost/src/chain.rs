//! [`BufferChain`]: the buffers of a request, read from a chain of descriptors (virtio 1.2, section
//! 2.7.5).

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};

use crate::memory::{GuestRam, Segments};

/// Maximum number of descriptors in a chain, including those in an indirect table.
const DESCRIPTORS_MAX: u32 = 1024;
const DESCRIPTOR_LEN: u32 = size_of::<Descriptor>() as u32;

/// Why a chain of descriptors is invalid. The driver of the guest is defective or malicious.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChainError {
    /// An index is not less than the size of its table.
    #[error("descriptor {0} is outside its table")]
    Index(u16),
    /// The chain is longer than the limit, or a loop.
    #[error("the chain has more than {DESCRIPTORS_MAX} descriptors")]
    TooLong,
    /// A descriptor cannot be read, or its buffer is not guest memory.
    #[error("{len} bytes at {address:#x} are not guest memory")]
    NotMemory {
        /// Guest address.
        address: u64,
        /// Length, in bytes.
        len: u32,
    },
    /// A buffer has no bytes.
    #[error("a buffer is empty")]
    Empty,
    /// An indirect table is nested, not the end of its chain, or has an invalid length. Also, an
    /// indirect table without the feature.
    #[error("an indirect table of {0} bytes is invalid")]
    Indirect(u32),
    /// A buffer for the device to read follows a buffer for the device to write.
    #[error("a readable buffer follows a writable one")]
    Order,
}

/// The buffers of one request.
#[derive(Debug, Default)]
pub(crate) struct BufferChain {
    /// Bytes that the device reads.
    pub readable: Segments,
    /// Bytes that the device writes.
    pub writable: Segments,
}

/// A table of descriptors in guest memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DescriptorTable {
    pub address: GuestAddress,
    /// Number of descriptors.
    pub size: u16,
    /// Whether descriptors may refer to indirect tables.
    pub may_be_indirect: bool,
}

impl BufferChain {
    /// Reads the chain that begins with descriptor `head`.
    pub(crate) fn read(ram: &GuestRam, table: DescriptorTable, head: u16) -> Result<BufferChain, ChainError> {
        let mut chain = BufferChain::default();
        let (mut table, mut index, mut has_written) = (table, head, false);
        for _ in 0..DESCRIPTORS_MAX {
            if index >= table.size {
                return Err(ChainError::Index(index));
            }
            let descriptor = table.descriptor(ram, index)?;
            if descriptor.refers_to_indirect_table() {
                (table, index) = (table.indirect(&descriptor)?, 0);
                continue;
            }
            let (address, len) = (descriptor.addr().0, descriptor.len());
            if len == 0 {
                return Err(ChainError::Empty);
            }
            if has_written && !descriptor.is_write_only() {
                return Err(ChainError::Order);
            }
            has_written = descriptor.is_write_only();
            let buffers = if has_written { &mut chain.writable } else { &mut chain.readable };
            if !buffers.push(ram, address, len.into()) {
                return Err(ChainError::NotMemory { address, len });
            }
            if !descriptor.has_next() {
                return Ok(chain);
            }
            index = descriptor.next();
        }
        Err(ChainError::TooLong)
    }
}

impl DescriptorTable {
    /// Copies a descriptor out of guest memory.
    fn descriptor(&self, ram: &GuestRam, index: u16) -> Result<Descriptor, ChainError> {
        let offset = u64::from(index) * u64::from(DESCRIPTOR_LEN);
        let address = self.address.0.wrapping_add(offset);
        ram.read_obj(GuestAddress(address))
            .map_err(|_| ChainError::NotMemory { address, len: DESCRIPTOR_LEN })
    }

    fn indirect(&self, descriptor: &Descriptor) -> Result<DescriptorTable, ChainError> {
        let len = descriptor.len();
        let is_allowed = self.may_be_indirect && !descriptor.has_next() && len.is_multiple_of(DESCRIPTOR_LEN);
        let size = u16::try_from(len / DESCRIPTOR_LEN).ok().filter(|size| is_allowed && *size > 0);
        let size = size.ok_or(ChainError::Indirect(len))?;
        Ok(DescriptorTable { address: descriptor.addr(), size, may_be_indirect: false })
    }
}
