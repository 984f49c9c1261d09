//! Checks ranges of offers, and divides transfers into chunks.

use base::block::BLOCK;
use wire::{BulkDescriptor, BulkDirection, BulkOwner, MemoryKind};

use crate::config::MAX_CHUNK;
use crate::{MessengerError, Result};

/// A range of one of the peer's offers.
pub(super) struct OfferRange {
    pub(super) key: u64,
    /// Offset of the first byte within the offer.
    pub(super) offset: u64,
    /// Offset of the first byte within the object, modulo 4096.
    pub(super) block_offset: u64,
}

/// Checks a descriptor that the connection's peer created. Returns the position of the descriptor's
/// bytes `offset..offset + len` in the peer's offer.
pub(super) fn locate(
    descriptor: &BulkDescriptor,
    wanted: BulkDirection,
    offset: u64,
    len: u64,
) -> Result<OfferRange> {
    let refused = |why: &str| Err(MessengerError::BulkRefused(why.to_owned()));
    if descriptor.owner != BulkOwner::Peer {
        return refused("the descriptor names memory of a third party, which this stack cannot reach");
    }
    if descriptor.memory != MemoryKind::Host {
        return refused("the descriptor names memory of an accelerator, which this stack cannot reach");
    }
    if descriptor.direction != wanted {
        return refused("the offer is for transfers in the opposite direction");
    }
    let [segment] = descriptor.segments.as_slice() else {
        return refused("the descriptor must have exactly one segment");
    };
    let block_offset = u64::from(descriptor.block_offset);
    if block_offset >= BLOCK {
        return refused("the block offset of the descriptor is not below 4096");
    }
    check_range(offset, len, segment.len, block_offset).map_err(MessengerError::BulkRefused)?;
    let Some(start) = segment.address.checked_add(offset).filter(|s| s.checked_add(len).is_some()) else {
        return refused("the address of the range overflows");
    };
    Ok(OfferRange { key: segment.key, offset: start, block_offset: (block_offset + offset % BLOCK) % BLOCK })
}

/// Checks that `offset..offset + len` is inside an offer of `room` bytes at `block_offset` and
/// starts at a piece boundary.
pub(super) fn check_range(offset: u64, len: u64, room: u64, block_offset: u64) -> Result<(), String> {
    if offset.checked_add(len).is_none_or(|end| end > room) {
        return Err(format!("the range {offset}+{len} is not inside the {room} bytes offered"));
    }
    if offset != 0 && !(block_offset % BLOCK + offset % BLOCK).is_multiple_of(BLOCK) {
        return Err(format!("the range {offset}+{len} does not start at a piece boundary"));
    }
    Ok(())
}

/// Length of the next chunk, which starts at `block_offset` in its block, when `left` bytes remain.
/// Every chunk but the last ends at a piece boundary.
pub(super) fn chunk_len(block_offset: u64, left: u64) -> usize {
    (MAX_CHUNK as u64 - block_offset).min(left) as usize
}
