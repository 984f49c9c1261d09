//! [`Overlay`]: the changes that a transaction makes to an object's data, before the array divides
//! them into fragments.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use base::block::{self, BLOCK, Payload};
use store::StoreError;

use crate::stage::StagedStripes;

/// New content of a range.
#[derive(Clone)]
pub(crate) enum OverlayContent {
    /// New bytes for the whole range. The range ends at a block boundary or at the object's end.
    Bytes(Payload),
    Zeros,
    /// Whole stripes that the members have already staged. They begin at this offset of the stage.
    Staged(Rc<StagedStripes>, u64),
}

/// A range with new content.
#[derive(Clone)]
pub(crate) struct OverlayRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) content: OverlayContent,
}

impl OverlayRange {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.len
    }

    /// Returns the part of the range that lies within `range`. The two ranges must overlap, and
    /// `range` must start at a block boundary.
    pub(crate) fn part(&self, range: Range<u64>) -> OverlayRange {
        let (from, to) = (range.start.max(self.offset), range.end.min(self.end()));
        let skip = from - self.offset;
        let content = match &self.content {
            OverlayContent::Bytes(payload) => OverlayContent::Bytes(slice(payload, skip, to - from)),
            OverlayContent::Zeros => OverlayContent::Zeros,
            OverlayContent::Staged(stage, at) => OverlayContent::Staged(Rc::clone(stage), at + skip),
        };
        OverlayRange { offset: from, len: to - from, content }
    }
}

/// Returns the bytes `from..from + len` of a payload that starts at a block boundary. `from` must
/// be a multiple of the block size.
pub(crate) fn slice(payload: &Payload, from: u64, len: u64) -> Payload {
    let data = payload.data().slice(from as usize..(from + len) as usize);
    let first = (from / BLOCK) as usize;
    let count = block::piece_count(0, len) as usize;
    let mut checksums = payload.checksums()[first..first + count].to_vec();
    // A shortened last piece needs a new checksum.
    let last = (len % BLOCK) as usize;
    if last > 0 && from + len < payload.len() as u64 {
        let start = (from + len) as usize - last;
        let end = payload.len().min(start + BLOCK as usize);
        let piece = &payload.data()[start..end];
        checksums[count - 1] = block::crc_of_start(piece, checksums[count - 1], last);
    }
    Payload::from_parts(0, data, checksums).expect("there is one checksum per piece")
}

/// The changes that a transaction makes to an object's data, before the array divides them into
/// fragments.
pub(crate) struct Overlay {
    /// Size of the object before the changes, in bytes.
    pub(crate) before: u64,
    /// Size of the object after the changes, in bytes.
    pub(crate) size: u64,
    /// Smallest size of the object during the changes. None of the old bytes beyond this size
    /// remain.
    pub(crate) low: u64,
    extents: BTreeMap<u64, OverlayRange>,
}

impl Overlay {
    pub(crate) fn new(before: u64) -> Overlay {
        Overlay { before, size: before, low: before, extents: BTreeMap::new() }
    }

    /// Ranges with new content, in the order of their offsets, without overlaps. A range that a
    /// truncation removed counts as zeros.
    pub(crate) fn extents(&self) -> impl Iterator<Item = &OverlayRange> {
        self.extents.values()
    }

    /// Ranges with new content that overlap `range`.
    pub(crate) fn in_range(&self, range: Range<u64>) -> impl Iterator<Item = &OverlayRange> {
        let first = self.extents.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        let from = range.start;
        self.extents.range(first..range.end.max(first)).map(|(_, e)| e).filter(move |e| e.end() > from)
    }

    /// Returns true if neither the data nor the size of the object changes.
    pub(crate) fn is_unchanged(&self) -> bool {
        self.extents.is_empty() && self.size == self.before && self.low == self.before
    }

    /// Writes bytes at an offset.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] if the offset is not a multiple of the block size, or if the
    /// bytes end in the middle of a block and before the object's end.
    pub(crate) fn write(&mut self, offset: u64, payload: Payload) -> store::Result<()> {
        let len = payload.len() as u64;
        self.check(offset, len)?;
        self.put(OverlayRange { offset, len, content: OverlayContent::Bytes(payload) })
    }

    /// Writes whole stripes, which the members have already staged, at an offset.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] if the range already has new data other than zeros.
    pub(crate) fn write_staged(
        &mut self,
        offset: u64,
        len: u64,
        stage: &Rc<StagedStripes>,
        at: u64,
    ) -> store::Result<()> {
        if self.in_range(offset..offset + len).any(|e| !matches!(e.content, OverlayContent::Zeros)) {
            return Err(refused("staged data overlaps other data of the transaction"));
        }
        self.put(OverlayRange { offset, len, content: OverlayContent::Staged(Rc::clone(stage), at) })
    }

    /// Sets a range to zeros. Extends the object if the range ends beyond the object's end.
    ///
    /// # Errors
    /// Like [`Overlay::write`].
    pub(crate) fn zero(&mut self, offset: u64, len: u64) -> store::Result<()> {
        self.check(offset, len)?;
        self.put(OverlayRange { offset, len, content: OverlayContent::Zeros })
    }

    /// Sets the size of the object.
    ///
    /// # Errors
    /// [`StoreError::InvalidArgument`] if the new size would cut off a part of staged data.
    pub(crate) fn truncate(&mut self, size: u64) -> store::Result<()> {
        if size < self.size {
            self.cut(size..u64::MAX)?;
            self.low = self.low.min(size);
            if size < self.before {
                let (offset, len) = (size, self.before - size);
                self.extents.insert(offset, OverlayRange { offset, len, content: OverlayContent::Zeros });
            }
        }
        self.size = size;
        Ok(())
    }

    fn check(&self, offset: u64, len: u64) -> store::Result<()> {
        let end = offset + len;
        if !offset.is_multiple_of(BLOCK) || (!end.is_multiple_of(BLOCK) && end < self.size) {
            return Err(refused(&format!(
                "bytes {offset}..{end} of an object of {} bytes are not whole blocks",
                self.size
            )));
        }
        Ok(())
    }

    fn put(&mut self, extent: OverlayRange) -> store::Result<()> {
        if extent.len == 0 {
            return Ok(());
        }
        let end = extent.end();
        // A write that ends within the object's last block replaces the whole block.
        self.cut(extent.offset..end.next_multiple_of(BLOCK))?;
        self.extents.insert(extent.offset, extent);
        if end < self.before && !end.is_multiple_of(BLOCK) {
            let len = self.before.min(end.next_multiple_of(BLOCK)) - end;
            self.extents.insert(end, OverlayRange { offset: end, len, content: OverlayContent::Zeros });
        }
        self.size = self.size.max(end);
        Ok(())
    }

    /// Discards the new content of a range, because a later change of the same transaction replaces
    /// or cuts off the range.
    fn cut(&mut self, range: Range<u64>) -> store::Result<()> {
        let met: Vec<u64> = self.in_range(range.clone()).map(|e| e.offset).collect();
        for start in met {
            let Some(old) = self.extents.remove(&start) else { continue };
            let kept = [old.offset..range.start.min(old.end()), range.end.max(old.offset)..old.end()];
            for part in kept.into_iter().filter(|part| part.start < part.end) {
                if matches!(old.content, OverlayContent::Staged(..)) {
                    return Err(refused("the transaction changes a part of its staged data"));
                }
                self.extents.insert(part.start, old.part(part));
            }
        }
        Ok(())
    }
}

fn refused(what: &str) -> StoreError {
    StoreError::InvalidArgument(format!("{what}: this is not supported in a pool with redundancy"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::prelude::*;

    const SPACE: u64 = 12 * BLOCK;

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64, u64, u8),
        Zero(u64, u64),
        Truncate(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let range = || (0..6u64, 1..5u64).prop_map(|(at, len)| (at * BLOCK, len * BLOCK));
        let write = (range(), 0..BLOCK, 1u8..255)
            .prop_map(|((at, len), less, fill)| Step::Write(at, len - less.min(len - 1), fill));
        let zero = range().prop_map(|(at, len)| Step::Zero(at, len));
        proptest::collection::vec(prop_oneof![write, zero, (0..SPACE).prop_map(Step::Truncate)], 1..8)
    }

    proptest! {
        #[test]
        fn applying_an_overlay_to_the_old_data_gives_the_data_of_a_model(before in 0..SPACE, steps in steps()) {
            let old: Vec<u8> = (0..before).map(|i| (i % 250) as u8 + 1).collect();
            let (mut model, mut overlay) = (old.clone(), Overlay::new(before));
            for step in steps {
                match step {
                    Step::Write(at, len, fill) => {
                        // The osd extends a write to the end of its last block, unless the write
                        // reaches the object's end.
                        let len = if at + len < overlay.size { len.next_multiple_of(BLOCK) } else { len };
                        overlay.write(at, Payload::compute(0, Bytes::from(vec![fill; len as usize]))).unwrap();
                        model.resize(model.len().max((at + len) as usize), 0);
                        model[at as usize..(at + len) as usize].fill(fill);
                    }
                    Step::Zero(at, len) => {
                        overlay.zero(at, len).unwrap();
                        model.resize(model.len().max((at + len) as usize), 0);
                        model[at as usize..(at + len) as usize].fill(0);
                    }
                    Step::Truncate(size) => {
                        overlay.truncate(size).unwrap();
                        model.resize(size as usize, 0);
                    }
                }
            }
            prop_assert_eq!(overlay.size, model.len() as u64);
            let mut found = old;
            found.resize(found.len().max(model.len()), 0);
            for extent in overlay.extents() {
                let range = extent.offset as usize..(extent.end() as usize).min(found.len());
                match &extent.content {
                    OverlayContent::Bytes(payload) => {
                        payload.verify().unwrap();
                        found[range].copy_from_slice(payload.data());
                    }
                    _ => found[range].fill(0),
                }
            }
            found.truncate(model.len());
            prop_assert!(found == model);
        }
    }
}
