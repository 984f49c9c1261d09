//! [`Segments`]: a validated list of ranges of guest memory.

use std::sync::Arc;

use disk::{DiskError, Memory};
use vm_memory::{Bytes, GuestMemoryRegion, MemoryRegionAddress};

use super::{GuestRam, GuestRegion};

/// A scatter-gather list of guest memory. It is validated when it is built, and keeps its regions
/// mapped.
#[derive(Debug, Clone, Default)]
pub struct Segments {
    parts: Vec<RamPart>,
    len: u64,
}

/// A range inside one region.
#[derive(Debug, Clone)]
struct RamPart {
    region: Arc<GuestRegion>,
    offset: u64,
    len: u64,
}

impl Segments {
    /// Appends a range of guest memory, which may span adjacent regions. Returns `false` if a byte
    /// of the range is not guest memory.
    #[must_use]
    pub fn push(&mut self, ram: &GuestRam, address: u64, len: u64) -> bool {
        let (mut address, mut rest) = (address, len);
        while rest > 0 {
            let Some((region, offset)) = ram.locate(address) else { return false };
            let len = rest.min(region.len() - offset);
            self.parts.push(RamPart { region: Arc::clone(region), offset, len });
            self.len += len;
            rest -= len;
            let Some(next) = address.checked_add(len) else { return rest == 0 };
            address = next;
        }
        true
    }

    /// Removes the first `len` bytes and returns them, or `None` if there are fewer.
    #[must_use]
    pub fn take_front(&mut self, len: u64) -> Option<Segments> {
        let rest = self.take_back(self.len.checked_sub(len)?)?;
        Some(std::mem::replace(self, rest))
    }

    /// Removes the last `len` bytes and returns them, or `None` if there are fewer.
    #[must_use]
    pub fn take_back(&mut self, len: u64) -> Option<Segments> {
        let keep = self.len.checked_sub(len)?;
        let mut end = 0;
        let cut = self.parts.iter().position(|part| {
            end += part.len;
            end > keep
        });
        let Some(cut) = cut else { return Some(Segments::default()) };
        let mut parts = self.parts.split_off(cut);
        // The first part of the tail may begin before the cut.
        let before = keep - (end - parts[0].len);
        if before > 0 {
            let RamPart { region, offset, .. } = &parts[0];
            self.parts.push(RamPart { region: Arc::clone(region), offset: *offset, len: before });
            parts[0].offset += before;
            parts[0].len -= before;
        }
        self.len = keep;
        Some(Segments { parts, len })
    }

    /// Calls `copy` for each piece of the bytes `at..at + len`, with the range of the piece within
    /// the `len` bytes.
    fn each(
        &self,
        at: u64,
        len: usize,
        mut copy: impl FnMut(&RamPart, u64, std::ops::Range<usize>) -> Result<(), vm_memory::GuestMemoryError>,
    ) -> Result<(), DiskError> {
        if at.checked_add(len as u64).is_none_or(|end| end > self.len) {
            return Err(DiskError::Memory(format!("{len} bytes at {at} are outside {} bytes", self.len)));
        }
        let (mut skip, mut done) = (at, 0);
        for part in &self.parts {
            if done == len {
                break;
            }
            if skip >= part.len {
                skip -= part.len;
                continue;
            }
            // The piece is not longer than `len`, so its length is a `usize`.
            let piece = (part.len - skip).min((len - done) as u64) as usize;
            copy(part, part.offset + skip, done..done + piece)
                .map_err(|e| DiskError::Memory(e.to_string()))?;
            if part.region.is_broken() {
                return Err(DiskError::Memory("the front end has shrunk its memory".into()));
            }
            done += piece;
            skip = 0;
        }
        assert_eq!(done, len, "the length of the segments is the sum of their parts");
        Ok(())
    }
}

impl Memory for Segments {
    fn len(&self) -> u64 {
        self.len
    }

    fn copy_out(&self, at: u64, to: &mut [u8]) -> disk::Result<()> {
        self.each(at, to.len(), |part, offset, piece| {
            part.region.read_slice(&mut to[piece], MemoryRegionAddress(offset))
        })
    }

    fn copy_in(&self, at: u64, from: &[u8]) -> disk::Result<()> {
        self.each(at, from.len(), |part, offset, piece| {
            part.region.write_slice(&from[piece], MemoryRegionAddress(offset))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustix::fs::MemfdFlags;

    use super::super::MemoryRange;
    use super::*;

    /// Two adjacent regions and one apart, whose bytes are the low bytes of their addresses.
    fn ram() -> GuestRam {
        let regions = [(0x1000, 4096), (0x2000, 8192), (0x10000, 4096)].map(|(guest_address, size)| {
            let file = rustix::fs::memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, size).unwrap();
            let user_address = 0x7000_0000 + guest_address;
            (MemoryRange { guest_address, size, user_address, file_offset: 0 }, file)
        });
        GuestRam::map(&regions).unwrap()
    }

    #[test]
    fn only_ranges_of_guest_memory_are_accepted() {
        let ram = ram();
        for (address, len, is_valid) in [
            (0x1000, 0x3000, true),
            (0x1000, 0x3001, false),
            (0xfff, 1, false),
            (0x10fff, 1, true),
            (0x10fff, 2, false),
            (u64::MAX, 1, false),
            (u64::MAX, u64::MAX, false),
        ] {
            assert_eq!(Segments::default().push(&ram, address, len), is_valid, "{address:x} {len:x}");
        }
    }

    proptest! {
        #[test]
        fn segments_behave_like_a_byte_string(
            pieces in prop::collection::vec((0u64..0x2fff, 1u64..600), 1..8),
            cut in any::<prop::sample::Index>(),
            window in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let ram = ram();
            let (mut segments, mut addresses) = (Segments::default(), Vec::new());
            for (offset, len) in pieces {
                let len = len.min(0x3000 - offset);
                prop_assert!(segments.push(&ram, 0x1000 + offset, len));
                addresses.extend((0x1000 + offset)..(0x1000 + offset + len));
            }
            let cut = cut.index(addresses.len() + 1);
            let tail = segments.clone().take_back((addresses.len() - cut) as u64).unwrap();
            let head = segments.take_front(cut as u64).unwrap();
            prop_assert_eq!(head.len(), cut as u64);
            for (piece, addresses) in
                [(&head, &addresses[..cut]), (&tail, &addresses[cut..]), (&segments, &addresses[cut..])]
            {
                prop_assert_eq!(piece.len(), addresses.len() as u64);
                let (a, b) = (window.0.index(addresses.len() + 1), window.1.index(addresses.len() + 1));
                let (from, to) = (a.min(b), a.max(b));
                // Bytes at equal addresses are equal, so each address gets a byte of its own.
                let bytes: Vec<u8> = addresses[from..to].iter().map(|a| (a % 251) as u8).collect();
                piece.copy_in(from as u64, &bytes).unwrap();
                let mut out = vec![0; to - from];
                piece.copy_out(from as u64, &mut out).unwrap();
                prop_assert_eq!(out, bytes);
                prop_assert!(piece.copy_in(from as u64, &vec![0; addresses.len() + 1]).is_err());
            }
        }
    }
}
