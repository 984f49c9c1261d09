//! Rings of entries, at the same offsets in DPU memory and in host memory.
//!
//! A ring is an array of 64-byte cells. An entry takes as many consecutive cells as it needs, and
//! may wrap around the ring's end. Cells are better than fixed slots of 16 KiB, because a transfer
//! moves only the used bytes: a reply takes one or two cells. Positions count bytes since the rings
//! were opened, and never wrap.
//!
//! The sides share no producer or consumer index. The doorbell announces the number of new bytes.
//! The reader reports its progress in the headers of the entries that it sends
//! ([`EntryHeader::consumed`]).

use std::ops::Range;

use base::mem::Arena;
use bytes::Bytes;

use crate::frame::ChannelEntry;
use crate::{ChannelError, EntryHeader, HEADER_LEN, Result};

/// Size of a cell, in bytes.
pub const CELL: usize = HEADER_LEN;
/// Maximum length of an entry, in bytes, header included. An entry can hold the checksums of a 16
/// MiB read, or a transaction of usual size with two blocks of payload.
pub const MAX_ENTRY: usize = 20 * 1024;

/// The location of a ring in its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// Offset of the ring from the start of the memory, in bytes.
    pub offset: usize,
    /// Length of the ring in bytes, a multiple of [`CELL`].
    pub len: usize,
}

/// Number of bytes of the ring that an entry of `len` bytes occupies.
#[must_use]
pub fn footprint(len: usize) -> usize {
    len.next_multiple_of(CELL)
}

impl Ring {
    /// The one or two ranges of memory that hold `len` bytes at `position`. The second range is
    /// empty unless the bytes wrap around the ring's end.
    ///
    /// # Panics
    /// Panics if `len` exceeds the ring, because the ranges would overlap other memory.
    #[must_use]
    pub fn spans(&self, position: u64, len: usize) -> [Range<usize>; 2] {
        assert!(len <= self.len, "{len} bytes do not fit in a ring of {}", self.len);
        let start = (position % self.len as u64) as usize;
        let first = len.min(self.len - start);
        [self.offset + start..self.offset + start + first, self.offset..self.offset + len - first]
    }

    /// Writes `parts`, one after the other, at `position`.
    ///
    /// # Panics
    /// Panics if the ring is outside the memory, or if the parts are longer than the ring. Both are
    /// bugs of the caller.
    pub fn write(&self, memory: &Arena, position: u64, parts: &[&[u8]]) {
        let whole: usize = parts.iter().map(|part| part.len()).sum();
        assert!(whole <= self.len, "an entry of {whole} bytes does not fit in a ring of {}", self.len);
        let mut at = position;
        for part in parts {
            let [first, second] = self.spans(at, part.len());
            let (head, tail) = part.split_at(first.len());
            assert!(
                memory.copy_in(first.start, head) && memory.copy_in(second.start, tail),
                "the ring is not inside its memory"
            );
            at += part.len() as u64;
        }
    }

    /// Copies the entry at `position` and verifies the copy, because a peer may write to the memory
    /// at the same time. `available` is the number of bytes that the doorbell has announced from
    /// `position` on.
    ///
    /// # Errors
    /// [`ChannelError::Protocol`] if there is no valid entry at `position`.
    pub fn read(&self, memory: &Arena, position: u64, available: usize) -> Result<ChannelEntry> {
        let mut head = [0; HEADER_LEN];
        let available = available.min(self.len);
        if available < HEADER_LEN {
            return Err(ChannelError::protocol("the doorbell announced fewer bytes than a header has"));
        }
        self.copy_out(memory, position, &mut head)?;
        let header = EntryHeader::parse(&head)?;
        if header.position != position {
            let found = header.position;
            return Err(ChannelError::protocol(format!(
                "the entry at position {position} is stale: its header states position {found}"
            )));
        }
        (header.control_len as usize)
            .checked_add(header.data_len as usize)
            .and_then(|len| len.checked_add(HEADER_LEN))
            .filter(|&len| len <= MAX_ENTRY && footprint(len) <= available)
            .ok_or_else(|| {
                ChannelError::protocol("an entry is longer than the announced bytes or than 20 KiB")
            })?;
        let mut sealed = vec![0; header.sealed_len()];
        sealed[..HEADER_LEN].copy_from_slice(&head);
        self.copy_out(memory, position + HEADER_LEN as u64, &mut sealed[HEADER_LEN..])?;
        let mut data = vec![0; header.data_len as usize];
        self.copy_out(memory, position + sealed.len() as u64, &mut data)?;
        ChannelEntry::from_parts(header, sealed, Bytes::from(data))
    }

    fn copy_out(&self, memory: &Arena, position: u64, out: &mut [u8]) -> Result<()> {
        let [first, second] = self.spans(position, out.len());
        let (head, tail) = out.split_at_mut(first.len());
        if memory.copy_out(first.start, head) && memory.copy_out(second.start, tail) {
            Ok(())
        } else {
            Err(ChannelError::protocol("the ring is not inside its memory"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EntryKind;
    use proptest::prelude::*;

    const RING: Ring = Ring { offset: 4096, len: 8192 };

    fn put(memory: &Arena, position: u64, control: &[u8], data: &[u8]) -> usize {
        let header = EntryHeader {
            position,
            data_len: data.len() as u32,
            ..EntryHeader::new(EntryKind::Request, 0, 9)
        };
        let sealed = header.seal(control);
        RING.write(memory, position, &[&sealed, data]);
        footprint(sealed.len() + data.len())
    }

    proptest! {
        #[test]
        fn entries_are_read_back_unchanged_even_if_they_wrap(sizes in proptest::collection::vec((0usize..2000, 0usize..2000), 1..40)) {
            let memory = Arena::anonymous(16384).unwrap();
            let mut position = 0;
            for (control, data) in sizes {
                let (control, data) = (vec![3; control], vec![5; data]);
                let len = put(&memory, position, &control, &data);
                let frame = RING.read(&memory, position, len).unwrap();
                prop_assert_eq!((&frame.control[..], &frame.data[..]), (&control[..], &data[..]));
                position += len as u64;
            }
            let mut outside = [1; 4096];
            prop_assert!(memory.copy_out(12288, &mut outside));
            prop_assert_eq!(outside, [0; 4096], "nothing outside the ring was written");
        }

        #[test]
        fn reading_arbitrary_memory_never_panics(bytes in proptest::collection::vec(any::<u8>(), 128), position in 0u64..100_000, available in 0usize..9000) {
            let memory = Arena::anonymous(16384).unwrap();
            let position = position / CELL as u64 * CELL as u64;
            put(&memory, position, b"x", b"y");
            RING.write(&memory, position + 12, &[&bytes[..20]]);
            let _ = RING.read(&memory, position, available);
        }
    }

    #[test]
    #[should_panic(expected = "in a ring of 8192")]
    fn writing_more_bytes_than_the_ring_holds_panics() {
        let memory = Arena::anonymous(16384).unwrap();
        RING.write(&memory, 64, &[&[1; 8000], &[1; 193]]);
    }

    #[test]
    fn stale_torn_and_oversized_entries_are_refused() {
        let memory = Arena::anonymous(16384).unwrap();
        let len = put(&memory, 0, b"control", b"data");
        assert!(RING.read(&memory, 0, len).is_ok());
        assert!(RING.read(&memory, 0, 0).is_err(), "a doorbell without an entry");
        assert!(
            RING.read(&memory, RING.len as u64, len).is_err(),
            "an entry of the previous pass through the ring"
        );
        assert!(RING.read(&memory, 64, 8000).is_err(), "no entry at this position");
        RING.write(&memory, HEADER_LEN as u64 + 2, &[b"X"]);
        assert!(RING.read(&memory, 0, len).is_err(), "changed after it was sealed");
        put(&memory, 0, &[0; 5000], b"");
        assert!(RING.read(&memory, 0, 64).is_err(), "longer than announced");
        let short = Ring { len: 128, ..RING };
        assert!(short.read(&memory, 0, usize::MAX).is_err(), "longer than the ring");
    }
}
