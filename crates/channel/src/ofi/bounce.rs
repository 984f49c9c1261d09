//! The bounce buffer of a connection: memory that receives the data of reads, from which the engine
//! copies the data to the reads' destinations.
//!
//! Over iWARP, the memory that receives the data of a read must be writable for the peer, and the
//! read request tells the peer the memory's key. So a hostile peer can write to this memory at any
//! time until its connections are closed. The engine therefore exposes only bounce buffers. A bounce
//! buffer contains nothing but the data of reads from one peer. When a read has completed, the
//! engine copies its data once to the destination, which no peer can write. A peer can thus change
//! only data that it delivers itself, and only before the copy. All checks, for example of checksums
//! and ring entries, use the copy.

use std::collections::VecDeque;
use std::ops::Range;

use base::mem::{Arena, DeviceMemory};
use fabric::{Access, Domain, MemoryRegion, Slice};

use crate::Result;

/// Number of transfers of maximum length for which a bounce buffer has room.
const TRANSFERS: usize = 2;
/// Slots begin at multiples of this number of bytes. So no two slots share a cache line.
const ALIGNMENT: usize = 64;

/// The bounce buffer of one connection. Drop it after the connection's endpoint.
pub(super) struct BounceBuffer {
    region: MemoryRegion,
    /// The bytes of the region, for copies to the destinations.
    bytes: DeviceMemory,
    slots: BounceSlots,
}

impl BounceBuffer {
    /// Allocates and exposes a buffer for transfers of up to `max_transfer` bytes.
    pub(super) fn open(domain: &Domain, max_transfer: usize) -> Result<BounceBuffer> {
        let arena = Arena::shared("outboard-bounce", TRANSFERS * max_transfer.next_multiple_of(ALIGNMENT))?;
        let (_, len) = arena.as_raw();
        let bytes = arena.for_device(0..len)?;
        let region = MemoryRegion::register(domain, &arena, Access::ReadSink)?;
        Ok(BounceBuffer { region, bytes, slots: BounceSlots::new(len) })
    }

    /// Whether a read of `len` bytes can have a slot now.
    pub(super) fn has_room_for(&self, len: usize) -> bool {
        self.slots.place(len).is_some()
    }

    /// Reserves a slot for the read with this operation number. Returns `None` if there is no room.
    pub(super) fn reserve(&mut self, number: u64, len: usize) -> fabric::Result<Option<Slice<'_>>> {
        match self.slots.reserve(number, len) {
            Some(start) => self.region.slice(start, len).map(Some),
            None => Ok(None),
        }
    }

    /// Frees the slot of a read that was not posted.
    pub(super) fn cancel(&mut self, number: u64) {
        self.slots.free(number);
    }

    /// Copies the data of a completed read to the range `to` of `destination`, and frees the read's
    /// slot. Returns `false` if nothing was copied, because the read has no slot of this length or
    /// the range is not inside the destination.
    pub(super) fn deliver(&mut self, number: u64, destination: &DeviceMemory, to: Range<usize>) -> bool {
        let Some(slot) = self.slots.free(number) else { return false };
        to.len() <= slot.len() && destination.copy_from(to.start, &self.bytes, slot.start, to.len())
    }
}

/// The slots of a bounce buffer: a ring of ranges in the order of reservation. A slot is not reserved again
/// before its read has ended and its data was copied.
struct BounceSlots {
    len: usize,
    /// The reserved slots, and freed slots behind a slot that is still reserved.
    slots: VecDeque<BounceSlot>,
}

struct BounceSlot {
    number: u64,
    range: Range<usize>,
    free: bool,
}

impl BounceSlots {
    fn new(len: usize) -> BounceSlots {
        BounceSlots { len, slots: VecDeque::new() }
    }

    /// The range of the next slot, for a read of `len` bytes.
    fn place(&self, len: usize) -> Option<Range<usize>> {
        let len = len.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let fits = |room: Range<usize>| (len <= room.len()).then(|| room.start..room.start + len);
        let (Some(oldest), Some(newest)) = (self.slots.front(), self.slots.back()) else {
            return fits(0..self.len);
        };
        let (oldest, newest) = (&oldest.range, &newest.range);
        if newest.start < oldest.start {
            return fits(newest.end..oldest.start);
        }
        fits(newest.end..self.len).or_else(|| fits(0..oldest.start))
    }

    /// Reserves a slot and returns its start.
    fn reserve(&mut self, number: u64, len: usize) -> Option<usize> {
        let range = self.place(len)?;
        debug_assert!(self.slots.iter().all(|slot| slot.number != number), "the number is in use");
        let start = range.start;
        self.slots.push_back(BounceSlot { number, range, free: false });
        Some(start)
    }

    /// Frees the slot of the read `number` and returns its range. Returns `None` if the read has no
    /// slot.
    fn free(&mut self, number: u64) -> Option<Range<usize>> {
        let slot = self.slots.iter_mut().find(|slot| slot.number == number && !slot.free)?;
        slot.free = true;
        let range = slot.range.clone();
        while self.slots.front().is_some_and(|slot| slot.free) {
            self.slots.pop_front();
        }
        Some(range)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LEN: usize = 1024;

    proptest! {
        /// Reads end in any order.
        #[test]
        fn reserved_slots_are_inside_the_buffer_and_never_overlap(
            steps in proptest::collection::vec((0..600_usize, any::<bool>(), any::<prop::sample::Index>()), 0..200),
        ) {
            let mut slots = BounceSlots::new(LEN);
            let mut reserved: Vec<(u64, Range<usize>)> = Vec::new();
            for (number, (len, ends, which)) in (1..).zip(steps) {
                if ends && !reserved.is_empty() {
                    let (number, range) = reserved.swap_remove(which.index(reserved.len()));
                    let freed = slots.free(number).unwrap();
                    prop_assert!(freed.start == range.start && freed.len() >= range.len());
                    prop_assert_eq!(slots.free(number), None);
                } else if let Some(start) = slots.reserve(number, len) {
                    let range = start..start + len;
                    prop_assert!(range.end <= LEN && start.is_multiple_of(ALIGNMENT));
                    prop_assert!(reserved.iter().all(|(_, other)| range.end <= other.start || other.end <= range.start));
                    reserved.push((number, range));
                }
            }
            for (number, _) in reserved {
                prop_assert!(slots.free(number).is_some());
            }
            prop_assert_eq!(slots.reserve(0, LEN), Some(0), "an empty buffer has room for a read of its length");
        }
    }
}
