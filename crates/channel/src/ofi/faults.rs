//! What injected faults do to transfers of this engine.

use std::time::Instant;

use base::fault::{Action, Faults, Site};
use base::mem::Arena;
use fabric::{Access, MemoryRegion};

use super::port::EngineDomain;
use crate::Result;

/// What becomes of a transfer that could be posted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is posted.
    Goes,
    /// It is posted, and one byte of what it brings is wrong.
    Corrupts,
    /// Its chain fails.
    Fails,
    /// It is posted then, not before.
    Stalls(Instant),
}

impl Fate {
    /// Asked once for each transfer.
    pub(super) fn of_transfer(faults: &Faults) -> Fate {
        match faults.hit(Site::DmaTransfer) {
            Some(Action::Fail) => Fate::Fails,
            Some(Action::Stall(late)) => Fate::Stalls(Instant::now() + late),
            Some(Action::Corrupt) => Fate::Corrupts,
            _ => Fate::Goes,
        }
    }
}

/// Bytes of the pages that memory is mapped by.
const PAGE: usize = 4096;

/// Inverts the byte in the middle of `len` bytes at `offset`, as a faulty device would. The bytes
/// may be in a buffer of an allocator.
pub(super) fn damage(arena: &Arena, offset: usize, len: usize) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let at = offset + len / 2;
    let page = at - at % PAGE;
    let inside = arena.for_device(page..page + PAGE)?.invert(at - page);
    debug_assert!(inside, "the byte is in its page");
    Ok(())
}

/// A copy of these bytes with one that is wrong, to be written in their place: they themselves have
/// other readers. The bytes may be in a buffer of an allocator.
pub(super) fn damaged_copy(
    port: &EngineDomain,
    arena: &Arena,
    offset: usize,
    len: usize,
) -> Result<MemoryRegion> {
    let mut bytes = vec![0; len];
    let (start, end) = (offset - offset % PAGE, (offset + len).next_multiple_of(PAGE));
    let copied = len == 0 || arena.for_device(start..end)?.copy_out(offset - start, &mut bytes);
    if let Some(byte) = bytes.get_mut(len / 2) {
        *byte = !*byte;
    }
    let copy = Arena::anonymous(len.max(1))?;
    let copied = copied && copy.copy_in(0, &bytes);
    debug_assert!(copied, "a transfer outside its memory");
    Ok(MemoryRegion::register(&port.domain, &copy, Access::Local)?)
}
