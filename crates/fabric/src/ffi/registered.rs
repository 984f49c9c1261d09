//! The memory of a region.

use std::sync::Arc;

use base::mem::{Arena, OutsideAccess};
use bytes::Bytes;

use super::PeerBuffer;

/// The memory that a region keeps mapped.
#[derive(Clone)]
pub(crate) enum RegisteredMemory {
    Arena(Arc<Arena>),
    Outside(OutsideAccess),
    Exposed(ExposedMemory),
}

/// Memory that is registered separately, for one peer and one purpose.
#[derive(Debug, Clone)]
pub enum ExposedMemory {
    /// Memory that peers may read. The bytes never change.
    Bytes(Bytes),
    /// Memory that peers may read or write.
    Buffer(PeerBuffer),
}

impl RegisteredMemory {
    /// Address of the first byte, and length in bytes.
    pub(super) fn span(&self) -> (*mut u8, usize) {
        match self {
            RegisteredMemory::Arena(arena) => arena.as_raw(),
            RegisteredMemory::Outside(access) => access.arena().as_raw(),
            RegisteredMemory::Exposed(ExposedMemory::Bytes(bytes)) => {
                (bytes.as_ptr().cast_mut(), bytes.len())
            }
            RegisteredMemory::Exposed(ExposedMemory::Buffer(buf)) => (buf.start(), buf.len()),
        }
    }
}
