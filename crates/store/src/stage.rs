//! Ids of stages, and checks of requests on stages, which all implementations of a store share.

use base::block::{BLOCK, Payload};
use serde::{Deserialize, Serialize};

use crate::{Result, StoreError};

/// Identifies a stage: extents that [`StoreCalls::stage`](crate::StoreCalls::stage) allocated and
/// that no object owns yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StageId(pub u64);

/// Checks a `stage_write` of `payload` at `offset` into a stage of `stage_len` bytes.
pub(crate) fn check_stage_write(stage_len: u64, offset: u64, payload: &Payload) -> Result<()> {
    let len = payload.len() as u64;
    let end = offset.checked_add(len).filter(|end| *end <= stage_len);
    let Some(end) = end else {
        return Err(StoreError::InvalidArgument(format!(
            "{len} bytes at offset {offset} do not fit into a stage of {stage_len} bytes"
        )));
    };
    if !offset.is_multiple_of(BLOCK)
        || payload.block_offset() != 0
        || (!len.is_multiple_of(BLOCK) && end != stage_len)
    {
        return Err(StoreError::InvalidArgument(format!(
            "{len} bytes at offset {offset} are not whole blocks of their stage of {stage_len} bytes"
        )));
    }
    Ok(())
}

/// Checks an [`Op::Write`](crate::Op::Write) of staged bytes `from..from + len` to byte `offset` of
/// an object of `object_size` bytes.
pub(crate) fn check_staged_use(
    stage_len: u64,
    from: u64,
    len: u64,
    offset: u64,
    object_size: u64,
) -> Result<()> {
    let end = from.checked_add(len).filter(|end| *end <= stage_len);
    let Some(end) = end else {
        return Err(StoreError::InvalidArgument(format!(
            "{len} staged bytes at offset {from} lie outside their stage of {stage_len} bytes"
        )));
    };
    if !len.is_multiple_of(BLOCK) && (end != stage_len || offset + len < object_size) {
        return Err(StoreError::InvalidArgument(format!(
            "{len} staged bytes end inside a block; only the last bytes of a stage may end inside a block, and only if they are written to the end of an object"
        )));
    }
    Ok(())
}

/// Returns the error for a staged block that was never written, or that an earlier write has
/// already used.
pub(crate) fn block_not_available(block: u64) -> StoreError {
    StoreError::InvalidArgument(format!(
        "staged block {block} was never written, or an earlier write has already used the block"
    ))
}
