//! The effect of injected faults on this engine's transfers.

use base::clock::Instant;
use base::fault::{Action, Faults, Site};
use base::mem::{Arena, OutsideAccess};
use fabric::{Access, MemoryRegion};

use super::port::EngineDomain;
use crate::Result;

/// The effect of injected faults on a transfer that is ready to be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// The transfer is posted.
    Goes,
    /// The transfer is posted, and one byte of its data is damaged.
    Corrupts,
    /// The transfer's chain fails.
    Fails,
    /// The transfer is delayed until this time.
    Stalls(Instant),
}

impl Fate {
    /// Decides the effect of injected faults on a transfer. Called once for each transfer.
    pub(super) fn of_transfer(faults: &Faults) -> Fate {
        match faults.hit(Site::DmaTransfer) {
            Some(Action::Fail) => Fate::Fails,
            Some(Action::Stall(late)) => Fate::Stalls(Instant::now() + late),
            Some(Action::Corrupt) => Fate::Corrupts,
            _ => Fate::Goes,
        }
    }
}

/// Page size of the memory mapping, in bytes.
const PAGE: usize = 4096;

/// Inverts the byte in the middle of `len` bytes at `offset`, as a faulty device would. This works
/// even if the bytes belong to an allocated buffer.
pub(super) fn damage(memory: &OutsideAccess, offset: usize, len: usize) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let at = offset + len / 2;
    let page = at - at % PAGE;
    let inside = memory.for_device(page..page + PAGE)?.invert(at - page);
    debug_assert!(inside, "the byte is in its page");
    Ok(())
}

/// Copies the bytes and damages one byte of the copy. The engine sends the copy in place of the
/// original bytes, which may have other readers. This works even if the bytes belong to an
/// allocated buffer.
pub(super) fn damaged_copy(
    port: &EngineDomain,
    memory: &OutsideAccess,
    offset: usize,
    len: usize,
) -> Result<MemoryRegion> {
    let mut bytes = vec![0; len];
    let (start, end) = (offset - offset % PAGE, (offset + len).next_multiple_of(PAGE));
    let copied = len == 0 || memory.for_device(start..end)?.copy_out(offset - start, &mut bytes);
    if let Some(byte) = bytes.get_mut(len / 2) {
        *byte = !*byte;
    }
    let copy = Arena::anonymous(len.max(1))?;
    let copied = copied && copy.copy_in(0, &bytes);
    debug_assert!(copied, "the transfer is inside its memory");
    Ok(MemoryRegion::register(&port.domain, &copy, Access::Outgoing)?)
}
