//! Where the bytes of an object are among its fragments.
//!
//! ```text
//!  object    │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │ …        units of `unit` bytes; k of them are a stripe
//!
//!  fragment 0   │ 0 │ 4 │ …       fragment 1   │ 1 │ 5 │ …       …  fragment k-1
//!  fragment k   │ parity of stripe 0 │ of stripe 1 │ …        …  fragment k+m-1
//! ```
//!
//! Row `r` of a stripe are the bytes at `r` of each of its units: parity is computed along rows. A fragment ends where the
//! object's last byte of it is; parity is as long as fragment 0, the longest. What a fragment does not have counts as zeros.
//! A mirrored object is one unit of one stripe: every fragment is a copy.

use std::ops::Range;

use store::MAX_OBJECT_SIZE;
use wire::Redundancy;

/// See the [module](self) documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StripeLayout {
    /// Fragments with data.
    pub(crate) k: usize,
    /// Fragments with parity, or further copies.
    pub(crate) m: usize,
    /// Length of a unit, in bytes; a multiple of the block size.
    pub(crate) unit: u64,
}

/// A range of bytes that lies in one unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnitRange {
    pub(crate) fragment: usize,
    /// Offset in the fragment.
    pub(crate) at: u64,
    /// Offset in the object.
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl StripeLayout {
    pub(crate) fn new(redundancy: &Redundancy) -> StripeLayout {
        match *redundancy {
            Redundancy::Single => StripeLayout { k: 1, m: 0, unit: MAX_OBJECT_SIZE },
            Redundancy::Mirror { copies } => {
                StripeLayout { k: 1, m: usize::from(copies) - 1, unit: MAX_OBJECT_SIZE }
            }
            Redundancy::ErasureCode { k, m, stripe_unit } => {
                StripeLayout { k: k.into(), m: m.into(), unit: stripe_unit.into() }
            }
        }
    }

    /// Whether the fragments are copies.
    pub(crate) fn is_mirror(&self) -> bool {
        self.unit == MAX_OBJECT_SIZE
    }

    /// Number of fragments.
    pub(crate) fn fragments(&self) -> usize {
        self.k + self.m
    }

    /// Bytes of an object in a stripe.
    pub(crate) fn stripe(&self) -> u64 {
        self.k as u64 * self.unit
    }

    /// The stripe of an offset.
    pub(crate) fn stripe_of(&self, offset: u64) -> u64 {
        offset / self.stripe()
    }

    /// Length of a fragment of an object of `size` bytes.
    pub(crate) fn fragment_size(&self, fragment: usize, size: u64) -> u64 {
        let unit_index = if fragment < self.k { fragment as u64 } else { 0 };
        let rest = size % self.stripe();
        self.stripe_of(size) * self.unit + rest.saturating_sub(unit_index * self.unit).min(self.unit)
    }

    /// The fragment that has a byte, and where.
    pub(crate) fn locate(&self, offset: u64) -> (usize, u64) {
        let unit = offset / self.unit;
        ((unit % self.k as u64) as usize, unit / self.k as u64 * self.unit + offset % self.unit)
    }

    /// Cuts a range of the object at the ends of units.
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

    /// The bytes of each data fragment that a range of the object takes in, from the first to the last; `None` where it
    /// has none.
    pub(crate) fn spans(&self, offset: u64, len: u64) -> Vec<Option<Range<u64>>> {
        let end = offset + len;
        let span = |fragment| {
            // The fragment's bytes before `offset`, and those before `end`.
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
        fn every_byte_has_one_place(layout in layouts(), offset in 0u64..1_000_000) {
            let (fragment, at) = layout.locate(offset);
            prop_assert!(fragment < layout.k);
            let back = at / layout.unit * layout.stripe() + fragment as u64 * layout.unit + at % layout.unit;
            prop_assert_eq!(back, offset);
        }

        #[test]
        fn fragments_are_as_long_as_the_bytes_in_them(layout in layouts(), size in 0u64..300_000) {
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
        fn spans_hold_exactly_the_pieces(layout in layouts(), offset in 0u64..300_000, len in 0u64..300_000) {
            let mut spans: Vec<Option<Range<u64>>> = vec![None; layout.k];
            for piece in layout.pieces(offset, len) {
                let span = spans[piece.fragment].get_or_insert(piece.at..piece.at);
                prop_assert_eq!(span.end, piece.at, "pieces of a fragment follow one another");
                span.end = piece.at + piece.len;
            }
            prop_assert_eq!(layout.spans(offset, len), spans);
        }
    }
}
