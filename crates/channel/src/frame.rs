//! The header at the start of every ring entry and every frame of the control socket.
//!
//! An entry is a header of 64 bytes, `control_len` bytes of control data and `data_len` bytes of
//! payload. The CRC-32C in the header covers header and control data. In a ring entry, it also
//! covers the payload, which is short. Other payload has its own checksums, one per block, which
//! the reader verifies.

use base::block::crc32c_of;
use bytes::Bytes;

use crate::{ChannelError, Result};

/// Length of a header, in bytes. A header fills one cell of a ring.
pub const HEADER_LEN: usize = 64;

const MAGIC: [u8; 4] = *b"OBCH";
const CRC_AT: usize = 8;

/// The kind of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum EntryKind {
    /// First frame of the osd on a control socket.
    Hello = 1,
    /// First frame of the store on a control socket.
    Welcome = 2,
    /// A call from the osd to the store's process.
    Request = 3,
    /// The result of a request.
    Reply = 4,
}

impl EntryKind {
    fn from_byte(byte: u8) -> Option<EntryKind> {
        [EntryKind::Hello, EntryKind::Welcome, EntryKind::Request, EntryKind::Reply]
            .into_iter()
            .find(|k| *k as u8 == byte)
    }
}

/// Header of a ring entry or a control frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryHeader {
    /// The kind of the entry.
    pub kind: EntryKind,
    /// Index of the target that a request is for.
    pub target: u16,
    /// Length of the control data, in bytes.
    pub control_len: u32,
    /// Length of the payload that follows the control data, in bytes.
    pub data_len: u32,
    /// In a request on the ring: bytes of the outbox that the sender has reserved for the reply.
    pub reply_max: u32,
    /// Number of the request, unique within the attachment. A reply has the number of its request.
    pub id: u64,
    /// The store executes the request after this target's transaction with this number. If the
    /// request is itself transaction `n`, this field is `n - 1`.
    pub after: u64,
    /// Bytes that the sender has taken so far from the ring of the other direction.
    pub consumed: u64,
    /// Bytes that were put into this ring before this entry; 0 on a socket. The position
    /// distinguishes a new entry from an old one.
    pub position: u64,
    /// Flags: [`VERIFY`] and [`REFUSE`] in a request, and in any entry whether the header's checksum covers the
    /// payload.
    pub flags: u32,
    /// In a reply: time between the store's receipt of the request and its reply, in microseconds.
    pub elapsed_us: u32,
}

/// Request flag: verify the payload's checksums before use.
pub const VERIFY: u32 = 1;
/// Request flag, together with [`VERIFY`]: refuse damaged payload with an error. Without this flag,
/// the store asks for the payload again.
pub const REFUSE: u32 = 4;
/// Entry flag: the header's checksum also covers the payload.
const WHOLE: u32 = 2;

impl EntryHeader {
    /// Creates a header in which all other fields are zero.
    #[must_use]
    pub fn new(kind: EntryKind, target: u16, id: u64) -> EntryHeader {
        EntryHeader {
            kind,
            target,
            control_len: 0,
            data_len: 0,
            reply_max: 0,
            id,
            after: 0,
            consumed: 0,
            position: 0,
            flags: 0,
            elapsed_us: 0,
        }
    }

    /// Length of header and control data, in bytes.
    #[must_use]
    pub fn sealed_len(&self) -> usize {
        HEADER_LEN + self.control_len as usize
    }

    /// Length of the whole entry, in bytes.
    #[must_use]
    pub fn total_len(&self) -> usize {
        self.sealed_len() + self.data_len as usize
    }

    /// Returns header and control data as one buffer, with the checksum filled in. Sets
    /// `control_len` to the length of `control`.
    #[must_use]
    pub fn seal(self, control: &[u8]) -> Vec<u8> {
        self.seal_with(control, None)
    }

    /// Like [`seal`](Self::seal), but the checksum also covers the payload. Used for ring entries,
    /// whose payload is short.
    #[must_use]
    pub fn seal_whole(self, control: &[u8], data: &[&[u8]]) -> Vec<u8> {
        self.seal_with(control, Some(data))
    }

    fn seal_with(mut self, control: &[u8], data: Option<&[&[u8]]>) -> Vec<u8> {
        self.flags = self.flags & !WHOLE | if data.is_some() { WHOLE } else { 0 };
        self.control_len = control.len() as u32;
        let mut out = Vec::with_capacity(HEADER_LEN + control.len());
        out.extend_from_slice(&MAGIC);
        out.push(self.kind as u8);
        out.push(0);
        out.extend_from_slice(&self.target.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.control_len.to_le_bytes());
        out.extend_from_slice(&self.data_len.to_le_bytes());
        out.extend_from_slice(&self.reply_max.to_le_bytes());
        for v in [self.id, self.after, self.consumed, self.position] {
            out.extend_from_slice(&v.to_le_bytes());
        }
        out.extend_from_slice(&self.flags.to_le_bytes());
        out.extend_from_slice(&self.elapsed_us.to_le_bytes());
        debug_assert_eq!(out.len(), HEADER_LEN);
        out.extend_from_slice(control);
        let crc = crc32c_of(std::iter::once(&out[..]).chain(data.into_iter().flatten().copied()));
        out[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Parses a header. `verify` checks the checksum later, together with the control data.
    ///
    /// # Errors
    /// [`ChannelError::Protocol`] if the bytes are not a header.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<EntryHeader> {
        if bytes[..4] != MAGIC || bytes[5] != 0 {
            return Err(ChannelError::protocol("an entry does not start with a header"));
        }
        let kind = EntryKind::from_byte(bytes[4])
            .ok_or_else(|| ChannelError::protocol(format!("unknown kind of entry {}", bytes[4])))?;
        let u32_at =
            |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("the slice has four bytes"));
        let u64_at =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("the slice has eight bytes"));
        Ok(EntryHeader {
            kind,
            target: u16::from_le_bytes([bytes[6], bytes[7]]),
            control_len: u32_at(12),
            data_len: u32_at(16),
            reply_max: u32_at(20),
            id: u64_at(24),
            after: u64_at(32),
            consumed: u64_at(40),
            position: u64_at(48),
            flags: u32_at(56),
            elapsed_us: u32_at(60),
        })
    }
}

/// Verifies the checksum over header and control data, which are in one buffer, and over the
/// payload if the header's flags say that the checksum covers it.
///
/// # Errors
/// [`ChannelError::Protocol`] if the checksum does not match.
fn verify(header: EntryHeader, sealed: &mut [u8], data: &[u8]) -> Result<()> {
    let stored = u32::from_le_bytes(sealed[CRC_AT..CRC_AT + 4].try_into().expect("the slice has four bytes"));
    sealed[CRC_AT..CRC_AT + 4].fill(0);
    let covered = if header.flags & WHOLE != 0 { data } else { &[] };
    let found = crc32c_of([&*sealed, covered]);
    if found == stored {
        Ok(())
    } else {
        Err(ChannelError::protocol(format!("an entry has checksum {found:#010x} instead of {stored:#010x}")))
    }
}

/// A ring entry or a control-socket frame, copied and verified.
#[derive(Debug, Clone)]
pub struct ChannelEntry {
    /// The header.
    pub header: EntryHeader,
    /// The control data.
    pub control: Bytes,
    /// The payload. The checksum of a ring entry's payload is already verified.
    pub data: Bytes,
}

impl ChannelEntry {
    /// Creates an entry. `sealed` is header and control data; `header` was parsed from its start.
    /// The payload has its own buffer, so that a small slice of the control data does not keep the
    /// payload alive.
    pub(crate) fn from_parts(header: EntryHeader, mut sealed: Vec<u8>, data: Bytes) -> Result<ChannelEntry> {
        if sealed.len() != header.sealed_len() || data.len() != header.data_len as usize {
            return Err(ChannelError::protocol("an entry does not have the length that its header states"));
        }
        verify(header, &mut sealed, &data)?;
        Ok(ChannelEntry { header, control: Bytes::from(sealed).slice(HEADER_LEN..), data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_sealed_entry_is_read_back_unchanged(target: u16, id: u64, after: u64, consumed: u64, position: u64, flags: u32, elapsed_us: u32,
            control in proptest::collection::vec(any::<u8>(), 0..300), data in proptest::collection::vec(any::<u8>(), 0..300)) {
            let flags = flags & !WHOLE;
            let header = EntryHeader { after, consumed, position, flags, elapsed_us, data_len: data.len() as u32, reply_max: 7,
                control_len: control.len() as u32, ..EntryHeader::new(EntryKind::Request, target, id) };
            let bytes = header.seal(&control);
            let parsed = EntryHeader::parse(bytes[..HEADER_LEN].try_into().unwrap()).unwrap();
            prop_assert_eq!(parsed, header);
            let frame = ChannelEntry::from_parts(parsed, bytes, Bytes::from(data.clone())).unwrap();
            prop_assert_eq!(&frame.control[..], &control[..]);
            prop_assert_eq!(&frame.data[..], &data[..]);
            let whole = header.seal_whole(&control, &[&data]);
            let parsed = EntryHeader::parse(whole[..HEADER_LEN].try_into().unwrap()).unwrap();
            prop_assert!(ChannelEntry::from_parts(parsed, whole.clone(), Bytes::from(data.clone())).is_ok());
            if let Some(last) = data.len().checked_sub(1) {
                let mut changed = data.clone();
                changed[last] ^= 1;
                prop_assert!(ChannelEntry::from_parts(parsed, whole, Bytes::from(changed)).is_err());
            }
        }

        #[test]
        fn parsing_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), HEADER_LEN..400), fix_magic: bool) {
            let mut bytes = bytes;
            if fix_magic {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4] %= 6;
                bytes[5] = 0;
            }
            if let Ok(header) = EntryHeader::parse(bytes[..HEADER_LEN].try_into().unwrap()) {
                let data = Bytes::from(bytes.split_off(bytes.len().min(header.sealed_len())));
                let _ = ChannelEntry::from_parts(header, bytes, data);
            }
        }

        #[test]
        fn a_flipped_bit_in_header_or_control_data_is_detected(control in proptest::collection::vec(any::<u8>(), 0..100), bit: usize) {
            let mut bytes = EntryHeader::new(EntryKind::Reply, 1, 2).seal(&control);
            let bit = bit % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            let parsed = EntryHeader::parse(bytes[..HEADER_LEN].try_into().unwrap());
            prop_assert!(parsed.and_then(|h| ChannelEntry::from_parts(h, bytes, Bytes::new())).is_err());
        }
    }
}
