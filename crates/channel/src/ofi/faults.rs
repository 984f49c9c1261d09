//! What injected faults do to transfers of this engine.

use std::time::Instant;

use base::fault::{Action, Faults, Site};
use base::mem::Arena;
use fabric::{Access, MemoryRegion};

use super::port::Port;
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

/// Makes the byte in the middle of `len` bytes at `offset` another one.
pub(super) fn damage(arena: &Arena, offset: usize, len: usize) {
    let (at, mut byte) = (offset + len / 2, [0]);
    let inside = len == 0 || arena.copy_out(at, &mut byte) && arena.copy_in(at, &[!byte[0]]);
    debug_assert!(inside, "a transfer outside its memory");
}

/// A copy of these bytes with one that is wrong, to be written in their place: they themselves have other readers.
pub(super) fn damaged_copy(port: &Port, arena: &Arena, offset: usize, len: usize) -> Result<MemoryRegion> {
    let mut bytes = vec![0; len];
    let copy = Arena::anonymous(len.max(1))?;
    let copied = arena.copy_out(offset, &mut bytes) && copy.copy_in(0, &bytes);
    debug_assert!(copied, "a transfer outside its memory");
    damage(&copy, 0, len);
    Ok(MemoryRegion::register(&port.domain, &copy, Access::Local)?)
}
