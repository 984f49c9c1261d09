//! Features and configuration space of the block device (virtio 1.2, sections 5.2.3 and 5.2.4).

use disk::BLOCK;

/// Length of the configuration space, in bytes.
pub(crate) const CONFIG_LEN: usize = 60;

/// Maximum number of data buffers in a request. With header and status, a request of this number
/// fits into a ring of 128 descriptors.
pub(crate) const SEGMENTS_MAX: u32 = 126;
/// Maximum length of a data buffer, in bytes.
pub(crate) const SEGMENT_LEN_MAX: u32 = 256 << 10;
/// Maximum length of the data of a request, in bytes.
pub(crate) const DATA_MAX: u64 = 32 << 20;
/// Maximum length of a range to discard or to zero, in blocks: 1 GiB.
pub(crate) const CLEAR_BLOCKS_MAX: u32 = 1 << 21;
/// Maximum number of ranges in a request to discard or to zero.
pub(crate) const CLEAR_RANGES_MAX: u32 = 32;

const _: () = assert!(SEGMENTS_MAX as u64 * SEGMENT_LEN_MAX as u64 <= DATA_MAX);

/// Size of a physical block as a power of two of logical blocks: 4 KiB. Requests that are aligned to
/// physical blocks are fast.
const PHYSICAL_BLOCK_EXP: u8 = 3;

/// Feature bits of the block device, and of its transport and rings.
mod feature {
    pub(super) const SIZE_MAX: u64 = 1 << 1;
    pub(super) const SEG_MAX: u64 = 1 << 2;
    pub(super) const BLK_SIZE: u64 = 1 << 6;
    pub(super) const FLUSH: u64 = 1 << 9;
    pub(super) const TOPOLOGY: u64 = 1 << 10;
    pub(super) const MQ: u64 = 1 << 12;
    pub(super) const DISCARD: u64 = 1 << 13;
    pub(super) const WRITE_ZEROES: u64 = 1 << 14;
}

/// Returns the features of the block device. It has no cache to control: a completed write is
/// durable, so a flush completes at once.
pub(crate) fn device_features() -> u64 {
    feature::SIZE_MAX
        | feature::SEG_MAX
        | feature::BLK_SIZE
        | feature::FLUSH
        | feature::TOPOLOGY
        | feature::MQ
        | feature::DISCARD
        | feature::WRITE_ZEROES
}

/// Returns the configuration space of a disk of `size` bytes with `queues` queues.
pub(crate) fn config_space(size: u64, queues: u16) -> [u8; CONFIG_LEN] {
    let mut space = [0; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(size / BLOCK).to_le_bytes()); // capacity
    put(8, &SEGMENT_LEN_MAX.to_le_bytes()); // size_max
    put(12, &SEGMENTS_MAX.to_le_bytes()); // seg_max
    put(20, &(BLOCK as u32).to_le_bytes()); // blk_size
    put(24, &[PHYSICAL_BLOCK_EXP, 0]); // physical_block_exp, alignment_offset
    put(26, &(1u16 << PHYSICAL_BLOCK_EXP).to_le_bytes()); // min_io_size, in logical blocks
    put(28, &(1u32 << PHYSICAL_BLOCK_EXP).to_le_bytes()); // opt_io_size, in logical blocks
    // Byte 32, writeback, stays 0: the disk writes through.
    put(34, &queues.to_le_bytes()); // num_queues
    put(36, &CLEAR_BLOCKS_MAX.to_le_bytes()); // max_discard_sectors
    put(40, &CLEAR_RANGES_MAX.to_le_bytes()); // max_discard_seg
    put(44, &(1u32 << PHYSICAL_BLOCK_EXP).to_le_bytes()); // discard_sector_alignment
    put(48, &CLEAR_BLOCKS_MAX.to_le_bytes()); // max_write_zeroes_sectors
    put(52, &CLEAR_RANGES_MAX.to_le_bytes()); // max_write_zeroes_seg
    put(56, &[1]); // write_zeroes_may_unmap
    space
}
