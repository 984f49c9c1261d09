//! The rules for when an operation on an endpoint must wait for earlier operations.
//!
//! Providers order writes after writes, and reads after writes. They do not order a write after a
//! read: an InfiniBand device may perform the read after the write. They also do not order
//! operations that use the same local bytes.

use std::ops::Range;

use crate::RegionId;

/// The memory that an operation accesses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Footprint {
    /// Whether the operation reads remote memory into local memory. Otherwise it writes remote
    /// memory.
    pub(super) read: bool,
    /// The local bytes, and the region that contains them.
    pub(super) local: (RegionId, Range<usize>),
    /// The remote bytes, as offsets from the start of the peer's memory.
    pub(super) remote: Range<usize>,
}

impl Footprint {
    /// Whether this operation must wait until `earlier` has completed.
    pub(super) fn must_follow(&self, earlier: &Footprint) -> bool {
        let same_region = self.local.0 == earlier.local.0;
        let local = same_region && overlap(&self.local.1, &earlier.local.1) && (self.read || earlier.read);
        let remote = earlier.read && !self.read && overlap(&self.remote, &earlier.remote);
        local || remote
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn footprint(read: bool, region: u32, local: Range<usize>, remote: Range<usize>) -> Footprint {
        Footprint { read, local: (RegionId(region), local), remote }
    }

    #[test]
    fn an_operation_waits_only_for_overlapping_operations_that_a_provider_may_reorder() {
        let write = footprint(false, 1, 0..10, 100..110);
        let read = footprint(true, 1, 50..60, 100..110);
        assert!(!write.must_follow(&write), "providers order writes");
        assert!(!read.must_follow(&write), "a read sees the writes before it");
        assert!(write.must_follow(&read), "a write must not overtake a read of the same bytes");
        assert!(
            !footprint(false, 1, 0..10, 110..120).must_follow(&read),
            "a write may overtake a read of other bytes"
        );
        assert!(
            footprint(false, 1, 59..61, 0..2).must_follow(&read),
            "a write waits for the read that fills its source"
        );
        assert!(
            !footprint(false, 2, 59..61, 0..2).must_follow(&read),
            "operations on different local regions are independent"
        );
        assert!(footprint(true, 1, 9..12, 0..3).must_follow(&write), "the write's source is still needed");
        assert!(footprint(true, 1, 50..51, 7..8).must_follow(&read), "both write the same bytes");
    }
}
