//! Maps the bytes of an object to its fragments.
//!
//! ```text
//!  object    │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │ …        units of `unit` bytes; k of them are a stripe
//!
//!  fragment 0   │ 0 │ 4 │ …       fragment 1   │ 1 │ 5 │ …       …  fragment k-1
//!  fragment k   │ parity of stripe 0 │ of stripe 1 │ …        …  fragment k+m-1
//! ```
//!
//! Row `r` of a stripe consists of byte `r` of each unit of the stripe. Parity is computed row by
//! row. A data fragment ends at the last byte of the object that it contains. Parity fragments are
//! as long as fragment 0, which is the longest data fragment. Parity counts the missing bytes of
//! shorter fragments as zeros. A mirrored object is a single unit: every fragment is a full copy.

use std::ops::Range;

use base::block::{align_down, align_up};
use store::MAX_STORED_OBJECT;
use wire::Redundancy;

/// Maps the bytes of an object to its fragments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StripeLayout {
    /// Number of data fragments.
    pub(crate) k: usize,
    /// Number of parity fragments, or of copies beyond the first.
    pub(crate) m: usize,
    /// Length of a unit, in bytes; a multiple of the block size.
    pub(crate) unit: u64,
}

/// A range of bytes that lies in one unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnitRange {
    pub(crate) fragment: usize,
    /// Offset of the first byte in the fragment.
    pub(crate) at: u64,
    /// Offset of the first byte in the object.
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl StripeLayout {
    pub(crate) fn new(redundancy: &Redundancy) -> StripeLayout {
        match *redundancy {
            Redundancy::Single => StripeLayout { k: 1, m: 0, unit: MAX_STORED_OBJECT },
            Redundancy::Mirror { copies } => {
                StripeLayout { k: 1, m: usize::from(copies) - 1, unit: MAX_STORED_OBJECT }
            }
            Redundancy::ErasureCode { k, m, stripe_unit } => {
                StripeLayout { k: k.into(), m: m.into(), unit: stripe_unit.into() }
            }
        }
    }

    /// Returns true if each fragment is a full copy of the object.
    pub(crate) fn is_mirror(&self) -> bool {
        self.unit == MAX_STORED_OBJECT
    }

    /// Total number of fragments.
    pub(crate) fn fragments(&self) -> usize {
        self.k + self.m
    }

    /// Number of object bytes in a stripe.
    pub(crate) fn stripe(&self) -> u64 {
        self.k as u64 * self.unit
    }

    /// Index of the stripe that contains an offset.
    pub(crate) fn stripe_of(&self, offset: u64) -> u64 {
        offset / self.stripe()
    }

    /// Length in bytes of a fragment of an object that has `size` bytes.
    pub(crate) fn fragment_size(&self, fragment: usize, size: u64) -> u64 {
        let unit_index = if fragment < self.k { fragment as u64 } else { 0 };
        let rest = size % self.stripe();
        self.stripe_of(size) * self.unit + rest.saturating_sub(unit_index * self.unit).min(self.unit)
    }

    /// Returns the fragment that contains a byte of the object, and the byte's offset in the
    /// fragment.
    pub(crate) fn locate(&self, offset: u64) -> (usize, u64) {
        let unit = offset / self.unit;
        ((unit % self.k as u64) as usize, unit / self.k as u64 * self.unit + offset % self.unit)
    }

    /// Splits a range of the object at unit boundaries.
    pub(crate) fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = UnitRange> + use<> {
        let layout = *self;
        let end = offset + len;
        let mut next = offset;
        std::iter::from_fn(move || {
            (next < end).then(|| {
                let offset = next;
                next = ((offset / layout.unit + 1) * layout.unit).min(end);
                let (fragment, at) = layout.locate(offset);
                UnitRange { fragment, at, offset, len: next - offset }
            })
        })
    }

    /// Returns the range of each fragment, in whole blocks, that stores the bytes of a range of the
    /// object or their parity.
    pub(crate) fn rows(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len);
        let (first, last) = (self.stripe_of(offset), self.stripe_of(end.saturating_sub(1)));
        if first < last {
            return first * self.unit..(last + 1).saturating_mul(self.unit);
        }
        let hull = self.pieces(offset, end - offset).map(|piece| piece.at..piece.at + piece.len);
        let hull = hull.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        align_down(hull.start)..align_up(hull.end).unwrap_or(u64::MAX)
    }

    /// For each data fragment, returns the range of the fragment that stores bytes of a range of
    /// the object. Returns `None` for a fragment that stores no bytes of the object's range.
    pub(crate) fn spans(&self, offset: u64, len: u64) -> Vec<Option<Range<u64>>> {
        let end = offset + len;
        let span = |fragment| {
            // Lengths of the fragment's parts before `offset` and before `end`.
            let (from, to) = (self.fragment_size(fragment, offset), self.fragment_size(fragment, end));
            (from < to).then_some(from..to)
        };
        (0..self.k).map(span).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::block::BLOCK;
    use proptest::prelude::*;

    fn layouts() -> impl Strategy<Value = StripeLayout> {
        (1usize..12, 0usize..5, 1u64..5).prop_map(|(k, m, blocks)| StripeLayout {
            k,
            m,
            unit: blocks * BLOCK,
        })
    }

    proptest! {
        #[test]
        fn each_object_byte_maps_to_a_unique_fragment_and_offset(layout in layouts(), offset in 0u64..1_000_000) {
            let (fragment, at) = layout.locate(offset);
            prop_assert!(fragment < layout.k);
            let back = at / layout.unit * layout.stripe() + fragment as u64 * layout.unit + at % layout.unit;
            prop_assert_eq!(back, offset);
        }

        #[test]
        fn fragment_size_equals_the_end_of_the_fragments_last_piece(layout in layouts(), size in 0u64..300_000) {
            let mut sizes = vec![0; layout.k];
            for piece in layout.pieces(0, size) {
                sizes[piece.fragment] = piece.at + piece.len;
            }
            for fragment in 0..layout.fragments() {
                let wanted = sizes.get(fragment).copied().unwrap_or(sizes[0]);
                prop_assert_eq!(layout.fragment_size(fragment, size), wanted, "fragment {}", fragment);
            }
            prop_assert_eq!(sizes.iter().sum::<u64>(), size);
        }

        #[test]
        fn the_rows_of_a_range_contain_all_of_its_pieces(layout in layouts(), offset in 0u64..300_000, len in 0u64..300_000) {
            let rows = layout.rows(offset, len);
            prop_assert!(rows.start.is_multiple_of(BLOCK) && rows.end.is_multiple_of(BLOCK));
            for piece in layout.pieces(offset, len) {
                prop_assert!(rows.start <= piece.at && piece.at + piece.len <= rows.end);
            }
        }

        #[test]
        fn the_span_of_each_fragment_covers_exactly_its_pieces(layout in layouts(), offset in 0u64..300_000, len in 0u64..300_000) {
            let mut spans: Vec<Option<Range<u64>>> = vec![None; layout.k];
            for piece in layout.pieces(offset, len) {
                let span = spans[piece.fragment].get_or_insert(piece.at..piece.at);
                prop_assert_eq!(span.end, piece.at, "the pieces of a fragment are contiguous");
                span.end = piece.at + piece.len;
            }
            prop_assert_eq!(layout.spans(offset, len), spans);
        }
    }
}
