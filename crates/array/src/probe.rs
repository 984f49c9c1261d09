//! Divides new objects into fragments without a store, so that a benchmark can measure this step
//! alone.

use base::block::Payload;
use base::pool::BufferPool;
use futures::FutureExt;
use store::{ObjectId, Op, StoreError};
use wire::Redundancy;

use crate::coder::Coder;
use crate::layout::StripeLayout;
use crate::overlay::Overlay;
use crate::rows::ArrayChange;

/// Divides new objects into fragments, as the osd does with data that is part of its transaction
/// instead of being staged.
pub struct NewObjects {
    layout: StripeLayout,
    coder: Coder,
    oid: ObjectId,
    live: Vec<bool>,
}

impl NewObjects {
    /// Creates the state for a redundancy scheme. Parity uses memory of `pool`, or the heap if the
    /// pool is exhausted.
    ///
    /// # Errors
    /// If the redundancy scheme is invalid.
    pub fn new(redundancy: Redundancy, pool: BufferPool) -> store::Result<NewObjects> {
        let layout = StripeLayout::new(&redundancy);
        let coder = Coder::new(layout, pool)?;
        Ok(NewObjects { layout, coder, oid: ObjectId::new("new")?, live: vec![true; layout.fragments()] })
    }

    /// Divides a new object that contains these bytes. Returns, for each fragment, the ops that
    /// create the fragment.
    ///
    /// # Errors
    /// If the parity cannot be computed.
    pub fn cut(&self, bytes: Payload) -> store::Result<Vec<Vec<Op>>> {
        let mut overlay = Overlay::new(0);
        overlay.write(0, bytes)?;
        let NewObjects { layout, coder, oid, live } = self;
        let change = ArrayChange { layout: *layout, coder, oid, overlay: &overlay, live };
        let unread = || StoreError::InvalidArgument("a new object has no old data to read".into());
        let split = change.split(async |_, _| Err(unread())).now_or_never();
        Ok(split.ok_or_else(unread)??.ops)
    }
}

#[cfg(test)]
mod tests {
    use base::mem::Arena;
    use bytes::Bytes;
    use proptest::prelude::*;
    use store::WriteSource;

    use super::*;

    /// Returns the fragment that the ops create.
    fn fragment(ops: &[Op]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for op in ops {
            match op {
                Op::Write { offset, source: WriteSource::Inline(payload), .. } => {
                    payload.verify().unwrap();
                    let end = *offset as usize + payload.len();
                    bytes.resize(end.max(bytes.len()), 0);
                    bytes[*offset as usize..end].copy_from_slice(payload.data());
                }
                Op::Truncate { size, .. } => bytes.resize(*size as usize, 0),
                other => panic!("{other:?}"),
            }
        }
        bytes
    }

    proptest! {
        /// The parity equals the parity that the erasure code computes, and its checksums are
        /// correct, even if the last stripe is partial.
        #[test]
        fn parity_fragments_of_new_objects_match_the_erasure_code(
            (k, m, blocks) in (1u8..6, 1u8..4, 1u32..4),
            len in 1usize..400_000,
            salt: u8,
        ) {
            let unit = blocks * 4096;
            let pool = BufferPool::new(Arena::anonymous(1 << 20).unwrap(), 0, 1 << 20);
            let objects =
                NewObjects::new(Redundancy::ErasureCode { k, m, stripe_unit: unit }, pool).unwrap();
            let data: Vec<u8> = (0..len).map(|i| (i.wrapping_mul(i >> 7) >> 3) as u8 ^ salt).collect();
            let ops = objects.cut(Payload::compute(0, Bytes::from(data.clone()))).unwrap();
            let fragments: Vec<Vec<u8>> = ops.iter().map(|ops| fragment(ops)).collect();
            let longest = fragments[0].len();
            let padded = |fragment: &Vec<u8>| { let mut s = fragment.clone(); s.resize(longest, 0); s };
            let sources: Vec<Vec<u8>> = fragments[..k as usize].iter().map(padded).collect();
            let (k, unit) = (k as usize, unit as usize);
            for (number, piece) in data.chunks(unit).enumerate() {
                let at = number / k * unit;
                prop_assert!(fragments[number % k][at..at + piece.len()] == *piece);
            }
            let code = ec::Code::new(
                ec::Geometry::new(k, m.into()).unwrap(),
                ec::KernelChoice::Portable.load().unwrap(),
            );
            let mut parity = vec![vec![0; longest]; m.into()];
            let sources: Vec<&[u8]> = sources.iter().map(|s| &s[..]).collect();
            code.encode(&sources, &mut parity.iter_mut().map(|p| &mut p[..]).collect::<Vec<_>>()).unwrap();
            prop_assert!(fragments[k..] == parity[..]);
        }
    }
}
