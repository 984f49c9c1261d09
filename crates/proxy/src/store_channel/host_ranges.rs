//! [`HostRanges`]: the ranges of the host's data region, and their quarantine.

use base::buddy::Buddy;
use base::pool::MIN_BUFFER;

/// A range of the host's data region that one request uses. It cannot be copied, so it is given
/// back at most once.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HeldRange {
    offset: usize,
    order: usize,
    len: usize,
}

impl HeldRange {
    /// Offset from the start of the data region, in bytes.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    /// Length of the part that the request uses, in bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

/// The ranges of the host's data region: each byte is free, held by a request, or in quarantine.
/// Without host memory, the ranges only limit the bytes in flight.
///
/// After a failure of DMA, a transfer may still access ranges and buffers that its request no
/// longer needs. They stay in *quarantine* until all fences behind these transfers are complete.
pub(super) struct HostRanges {
    free: Buddy,
    total: usize,
    held: usize,
    quarantine: Quarantine,
}

/// Memory that transfers may still access.
#[derive(Default)]
pub(super) struct Quarantine {
    /// Fences that are not complete.
    fences: usize,
    ranges: Vec<HeldRange>,
    /// Bytes in the blocks of `ranges`.
    bytes: usize,
    kept: Vec<Box<dyn Send>>,
    /// Whether the engine was told to cancel its transfers.
    was_reset: bool,
}

impl HostRanges {
    /// Creates the ranges of a region of `len` bytes. `largest` is the maximum length of a range.
    pub(super) fn new(len: usize, largest: usize) -> HostRanges {
        let free = Buddy::new(len, MIN_BUFFER, largest);
        HostRanges { total: free.free_bytes(), free, held: 0, quarantine: Quarantine::default() }
    }

    /// Takes a range of `len` bytes; `None` if no free range is long enough.
    pub(super) fn take(&mut self, len: usize) -> Option<HeldRange> {
        let order = self.free.order_of(len).expect("callers ask for no more than the largest range");
        let offset = self.free.take(order)?;
        self.held += self.free.size_of(order);
        self.check();
        Some(HeldRange { offset, order, len })
    }

    /// Gives back a range that its request no longer needs. The range becomes free now, or at the
    /// end of the quarantine if a transfer may still access it.
    pub(super) fn give_back(&mut self, range: HeldRange) {
        let size = self.free.size_of(range.order);
        self.held = self.held.checked_sub(size).expect("a request gives back only a range that it holds");
        if self.has_quarantine() && !base::mutant!(ReuseQuarantinedBuffer) {
            self.quarantine.bytes += size;
            self.quarantine.ranges.push(range);
        } else {
            self.free.release(range.offset, range.order);
        }
        self.check();
    }

    /// Keeps memory that a transfer may still access until the quarantine ends.
    pub(super) fn keep(&mut self, memory: impl Send + 'static) {
        if self.has_quarantine() && !base::mutant!(ReuseQuarantinedBuffer) {
            self.quarantine.kept.push(Box::new(memory));
        }
    }

    /// Whether transfers from before a failure may still access memory.
    pub(super) fn has_quarantine(&self) -> bool {
        self.quarantine.fences > 0
    }

    /// Starts or extends the quarantine: it ends when this many further fences are complete.
    pub(super) fn add_fences(&mut self, count: usize) {
        self.quarantine.fences += count;
        self.quarantine.was_reset = false;
    }

    /// Handles the completion of a fence. The last completion ends the quarantine.
    pub(super) fn fence_completed(&mut self) {
        let quarantine = &mut self.quarantine;
        quarantine.fences = quarantine.fences.checked_sub(1).expect("only a posted fence can complete");
        if quarantine.fences == 0 {
            quarantine.bytes = 0;
            quarantine.kept.clear();
            for range in quarantine.ranges.drain(..) {
                self.free.release(range.offset, range.order);
            }
            self.check();
        }
    }

    /// Whether the engine must be reset because fences are late. It is reset once for the same
    /// fences.
    pub(super) fn needs_reset(&mut self) -> bool {
        self.has_quarantine() && !std::mem::replace(&mut self.quarantine.was_reset, true)
    }

    /// Bytes of host memory that quarantined requests have used.
    pub(super) fn quarantined(&self) -> usize {
        self.quarantine.ranges.iter().map(HeldRange::len).sum()
    }

    /// Takes the memory in quarantine at the end of the incarnation. Its ranges never become free.
    pub(super) fn take_quarantine(&mut self) -> Quarantine {
        self.total -= self.quarantine.bytes;
        std::mem::take(&mut self.quarantine)
    }

    fn check(&self) {
        let (free, held, quarantined) = (self.free.free_bytes(), self.held, self.quarantine.bytes);
        assert_eq!(
            free + held + quarantined,
            self.total,
            "{free} free, {held} held, {quarantined} quarantined"
        );
        assert!(quarantined == 0 || self.has_quarantine(), "{quarantined} quarantined bytes without a fence");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn ranges() -> HostRanges {
        HostRanges::new(4 * MIN_BUFFER, 2 * MIN_BUFFER)
    }

    #[test]
    fn a_quarantined_range_is_not_free_until_the_last_fence_completes() {
        let mut ranges = ranges();
        let (first, second) = (ranges.take(2 * MIN_BUFFER).unwrap(), ranges.take(MIN_BUFFER + 1).unwrap());
        assert_eq!(ranges.take(1), None);
        ranges.add_fences(2);
        ranges.give_back(first);
        ranges.give_back(second);
        assert_eq!(ranges.quarantined(), 3 * MIN_BUFFER + 1);
        ranges.fence_completed();
        assert_eq!(ranges.take(1), None, "one fence is not complete");
        ranges.fence_completed();
        assert_eq!((ranges.quarantined(), ranges.has_quarantine()), (0, false));
        assert!(ranges.take(2 * MIN_BUFFER).is_some() && ranges.take(2 * MIN_BUFFER).is_some());
    }

    #[test]
    fn a_range_held_through_a_quarantine_is_free_at_once_when_given_back() {
        let mut ranges = ranges();
        let held = ranges.take(2 * MIN_BUFFER).unwrap();
        ranges.add_fences(1);
        ranges.fence_completed();
        ranges.give_back(held);
        assert_eq!((ranges.quarantined(), ranges.free.free_bytes()), (0, 4 * MIN_BUFFER));
    }

    #[test]
    fn memory_is_kept_only_during_a_quarantine() {
        let mut ranges = ranges();
        let memory = Arc::new(());
        ranges.keep(Arc::clone(&memory));
        assert_eq!(Arc::strong_count(&memory), 1, "no transfer can access the memory");
        ranges.add_fences(1);
        ranges.keep(Arc::clone(&memory));
        assert_eq!(Arc::strong_count(&memory), 2);
        ranges.fence_completed();
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn the_engine_is_reset_once_for_the_same_fences() {
        let mut ranges = ranges();
        assert!(!ranges.needs_reset(), "there is no fence");
        ranges.add_fences(1);
        assert!(ranges.needs_reset() && !ranges.needs_reset());
        ranges.add_fences(1);
        assert!(ranges.needs_reset(), "the new fence is behind new transfers");
    }

    #[test]
    #[should_panic(expected = "only a posted fence can complete")]
    fn a_fence_cannot_complete_twice() {
        let mut ranges = ranges();
        ranges.add_fences(1);
        ranges.fence_completed();
        ranges.fence_completed();
    }
}
