//! What endpoints and shared receive queues have in common: numbers, and the posting of operations.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Slice, library};
use crate::PostError;
use crate::operations::Held;

/// Returns a process-wide unique number for an endpoint or a shared receive queue.
pub(super) fn next_serial() -> u64 {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    SERIAL.fetch_add(1, Ordering::Relaxed)
}

/// The memory that an operation with `slice` must keep until it has ended.
pub(super) fn held(slice: Slice<'_>) -> Held {
    Held::Region(slice.region().clone(), slice.buffer().cloned())
}

/// Converts the result of a libfabric function that posts an operation.
pub(super) fn posted(call: &'static str, code: isize) -> Result<(), PostError> {
    match i32::try_from(code).unwrap_or(-libc::EIO) {
        0 => Ok(()),
        code if code == -libc::EAGAIN => Err(PostError::Full),
        code => Err(library::error(call, -code).into()),
    }
}
