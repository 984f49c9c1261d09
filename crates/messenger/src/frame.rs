//! The encoding of frames. All functions are pure. They do not wait, no input makes them panic, and
//! they allocate no more memory than the actual length of their input requires.
//!
//! A frame is a fixed header, a body, and a payload:
//!
//! ```text
//!   0       4   5   6     8          12          16      24      32         36        40
//!   +-------+---+---+-----+----------+-----------+-------+-------+----------+---------+
//!   | magic | v |typ|block_offset|header_len|payload_len|  seq  |  ack  | body_crc |   crc   |
//!   +-------+---+---+-----+----------+-----------+-------+-------+----------+---------+
//!   | header: header_len bytes    | checksums: one u32 per piece of the payload       |  body
//!   +-----------------------------+---------------------------------------------------+
//!   | payload: payload_len bytes                                                      |
//!   +---------------------------------------------------------------------------------+
//! ```
//!
//! `v` is the version and `typ` the kind of the frame. All integers are little endian. `crc` covers
//! bytes 0..36, and `body_crc` covers the body. The payload has one checksum per piece. A piece is
//! the part of the payload inside one 4 KiB block (see [`base::block`]). The first piece begins
//! `block_offset` bytes into its block. A flipped bit is therefore detected before the affected
//! data is used, and each side computes the payload's checksums only once.

mod body;

pub use body::{
    Body, Challenge, Close, Hello, PathOffer, Proof, PullCancel, PullData, PullRefused, PullRequest, Push,
    PushRefused,
};
pub use body::{Refusal, Reject, RejectCode, Resume, Resumed, Welcome, Window, Wrote};

use base::block::{BLOCK_SIZE, Payload, crc32c, piece_count, verify_pieces};
use bytes::Bytes;

use crate::Limits;
use crate::config::MAX_CHUNK;

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"OBF1";
/// Version of the frame format; the fifth byte of every frame.
pub const VERSION: u8 = 1;
/// Length of the fixed header, in bytes.
pub const HEADER_LEN: usize = 40;
/// Maximum length of the header part of a frame that is not a message, in bytes.
pub const MAX_CONTROL: usize = 1024;

/// The kind of a frame. A *sequenced* frame has a number and is acknowledged. Without an
/// acknowledgement, it is sent again on a new transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// A client's request for a new connection, inside the encrypted part of a TLS handshake.
    Hello = 1,
    /// The server's answer that accepts a connection, inside the encrypted part of a TLS handshake.
    Welcome = 2,
    /// The server's answer that rejects a connection.
    Reject = 3,
    /// Bytes of the TLS handshake with which a connection begins.
    Handshake = 4,
    /// A client's request to resume a connection.
    Resume = 5,
    /// The server's answer to a request to resume a connection: a random number.
    Challenge = 6,
    /// The client's proof that the connection is its own.
    Proof = 7,
    /// The server's proof that the connection is its own, which resumes the connection.
    Resumed = 8,
    /// A message of the users. Sequenced.
    Message = 16,
    /// Bulk data for an offered sink. Sequenced.
    Push = 17,
    /// Reports that the sender wrote bulk data to an offered sink by a one-sided transfer.
    /// Sequenced.
    Wrote = 18,
    /// Grants credit. Also carries acknowledgements and serves as heartbeat.
    Window = 32,
    /// Asks for data of an offered source.
    PullRequest = 33,
    /// Cancels a pull.
    PullCancel = 34,
    /// Refuses a pull, or the rest of its data.
    PullRefused = 35,
    /// Refuses pushed data.
    PushRefused = 36,
    /// Ends the connection.
    Close = 37,
    /// Data of an offered source.
    PullData = 48,
}

impl FrameKind {
    /// All kinds.
    pub const ALL: [FrameKind; 18] = [
        FrameKind::Hello,
        FrameKind::Welcome,
        FrameKind::Reject,
        FrameKind::Handshake,
        FrameKind::Resume,
        FrameKind::Challenge,
        FrameKind::Proof,
        FrameKind::Resumed,
        FrameKind::Message,
        FrameKind::Push,
        FrameKind::Wrote,
        FrameKind::Window,
        FrameKind::PullRequest,
        FrameKind::PullCancel,
        FrameKind::PullRefused,
        FrameKind::PushRefused,
        FrameKind::Close,
        FrameKind::PullData,
    ];

    fn from_byte(byte: u8) -> Result<FrameKind, FrameError> {
        FrameKind::ALL.into_iter().find(|k| *k as u8 == byte).ok_or(FrameError::UnknownKind(byte))
    }

    /// Whether frames of this kind have a number and are acknowledged, and are sent again on a new
    /// transport until they are acknowledged.
    #[must_use]
    pub fn is_sequenced(self) -> bool {
        matches!(self, FrameKind::Message | FrameKind::Push | FrameKind::Wrote)
    }

    /// Maximum length of the header part and of the payload of this kind, in bytes.
    fn limits(self, limits: &Limits) -> (usize, usize) {
        match self {
            FrameKind::Message => (limits.max_header, limits.max_inline),
            FrameKind::Push | FrameKind::PullData => (MAX_CONTROL, MAX_CHUNK),
            _ => (MAX_CONTROL, 0),
        }
    }
}

/// The reason why bytes are not a valid frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The first bytes are not [`MAGIC`].
    #[error("not a frame: the first bytes are {0:02x?}")]
    Magic([u8; 4]),
    /// This side does not support the frame's version.
    #[error("frame version {0} is unknown; this side supports version {VERSION}")]
    Version(u8),
    /// The fixed header is damaged.
    #[error("frame header damaged: checksum {found:#010x}, expected {expected:#010x}")]
    HeaderChecksum {
        /// The checksum that was sent.
        expected: u32,
        /// The checksum that was computed.
        found: u32,
    },
    /// The kind of frame is unknown.
    #[error("frame type {0} is unknown")]
    UnknownKind(u8),
    /// The payload's block_offset is not inside a block.
    #[error("the payload's block offset {0} is not below 4096")]
    Phase(u16),
    /// The header part or the payload is longer than this kind of frame permits.
    #[error("{kind:?} frame with a {part} of {len} bytes exceeds the limit of {limit}")]
    TooLong {
        /// The kind of the frame.
        kind: FrameKind,
        /// `header` or `payload`.
        part: &'static str,
        /// Length of the part, in bytes.
        len: u32,
        /// The limit, in bytes.
        limit: usize,
    },
    /// A sequenced frame has no number, or a frame that is not sequenced has a number.
    #[error("{0:?} frame has the invalid sequence number {1}")]
    Sequence(FrameKind, u64),
    /// The body is damaged.
    #[error("frame body damaged: checksum {found:#010x}, expected {expected:#010x}")]
    BodyChecksum {
        /// The checksum that was sent.
        expected: u32,
        /// The checksum that was computed.
        found: u32,
    },
    /// The body is undamaged but malformed.
    #[error("{0:?} frame has a malformed body")]
    Body(FrameKind),
    /// The payload is damaged.
    #[error("frame payload damaged: {0}")]
    Payload(base::block::ChecksumMismatch),
}

impl FrameError {
    /// Whether the bytes may have been damaged on the way, so that sending them again may help.
    /// Otherwise the peer has violated the protocol.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        use FrameError::{BodyChecksum, HeaderChecksum, Magic, Payload, Version};
        matches!(self, Magic(_) | Version(_) | HeaderChecksum { .. } | BodyChecksum { .. } | Payload(_))
    }
}

/// The fixed header of a frame. Its fields have been validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// The kind of the frame.
    pub kind: FrameKind,
    /// Offset of the payload's first byte within the object, modulo 4096.
    pub block_offset: u16,
    /// Length of the header part, in bytes.
    pub header_len: u32,
    /// Length of the payload, in bytes.
    pub payload_len: u32,
    /// Number of a sequenced frame, from 1. For frames that are not sequenced, 0.
    pub seq: u64,
    /// Number of the last sequenced frame that the sender of this frame has received.
    pub ack: u64,
    /// CRC-32C of the body.
    pub body_crc: u32,
}

impl FrameHeader {
    /// Encodes the fixed header, including its checksum.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[5] = self.kind as u8;
        out[6..8].copy_from_slice(&self.block_offset.to_le_bytes());
        out[8..12].copy_from_slice(&self.header_len.to_le_bytes());
        out[12..16].copy_from_slice(&self.payload_len.to_le_bytes());
        out[16..24].copy_from_slice(&self.seq.to_le_bytes());
        out[24..32].copy_from_slice(&self.ack.to_le_bytes());
        out[32..36].copy_from_slice(&self.body_crc.to_le_bytes());
        let crc = crc32c(&out[..36]);
        out[36..40].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Decodes a fixed header, and checks that it is consistent and within `limits`.
    ///
    /// # Errors
    /// If the header is invalid. The checksum is verified before the lengths are used.
    pub fn decode(bytes: &[u8; HEADER_LEN], limits: &Limits) -> Result<FrameHeader, FrameError> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if bytes[..4] != MAGIC {
            return Err(FrameError::Magic([bytes[0], bytes[1], bytes[2], bytes[3]]));
        }
        if bytes[4] != VERSION {
            return Err(FrameError::Version(bytes[4]));
        }
        let (expected, found) = (u32_at(36), crc32c(&bytes[..36]));
        if expected != found {
            return Err(FrameError::HeaderChecksum { expected, found });
        }
        let header = FrameHeader {
            kind: FrameKind::from_byte(bytes[5])?,
            block_offset: u16::from_le_bytes([bytes[6], bytes[7]]),
            header_len: u32_at(8),
            payload_len: u32_at(12),
            seq: u64_at(16),
            ack: u64_at(24),
            body_crc: u32_at(32),
        };
        header.check(limits)?;
        Ok(header)
    }

    fn check(&self, limits: &Limits) -> Result<(), FrameError> {
        if usize::from(self.block_offset) >= BLOCK_SIZE {
            return Err(FrameError::Phase(self.block_offset));
        }
        let (max_header, max_payload) = self.kind.limits(limits);
        let parts = [("header", self.header_len, max_header), ("payload", self.payload_len, max_payload)];
        for (part, len, limit) in parts {
            if len as usize > limit {
                return Err(FrameError::TooLong { kind: self.kind, part, len, limit });
            }
        }
        if self.kind.is_sequenced() == (self.seq == 0) {
            return Err(FrameError::Sequence(self.kind, self.seq));
        }
        Ok(())
    }

    /// Length of the body, in bytes: the header part and the payload's checksums.
    #[must_use]
    pub fn body_len(&self) -> usize {
        self.header_len as usize + 4 * self.pieces()
    }

    fn pieces(&self) -> usize {
        piece_count(u64::from(self.block_offset), u64::from(self.payload_len)) as usize
    }

    /// Verifies and decodes the body, which must be [`FrameHeader::body_len`] bytes long.
    ///
    /// # Errors
    /// If the body is damaged or malformed for this kind of frame.
    pub fn decode_body(&self, mut body: Bytes) -> Result<(Body, Vec<u32>), FrameError> {
        let found = crc32c(&body);
        if body.len() != self.body_len() || found != self.body_crc {
            return Err(FrameError::BodyChecksum { expected: self.body_crc, found });
        }
        let sums = body.split_off(self.header_len as usize);
        let checksums = sums.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
        Ok((Body::decode(self.kind, body)?, checksums))
    }
}

/// Appends the fixed header and the body of a frame to `out`. The caller then appends the payload,
/// if the frame has one.
///
/// `header` writes the header part of the body. The caller ensures that the frame respects the
/// limits of its receiver.
pub fn encode_head(
    out: &mut Vec<u8>,
    kind: FrameKind,
    seq: u64,
    ack: u64,
    payload: &Payload,
    header: impl FnOnce(&mut Vec<u8>),
) {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_LEN]);
    header(out);
    let header_len = out.len() - start - HEADER_LEN;
    for sum in payload.checksums() {
        out.extend_from_slice(&sum.to_le_bytes());
    }
    let fixed = FrameHeader {
        kind,
        block_offset: payload.block_offset() as u16,
        header_len: header_len as u32,
        payload_len: payload.len() as u32,
        seq,
        ack,
        body_crc: crc32c(&out[start + HEADER_LEN..]),
    };
    out[start..start + HEADER_LEN].copy_from_slice(&fixed.encode());
}

/// A complete frame.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// The fixed header.
    pub header: FrameHeader,
    /// The decoded header part.
    pub body: Body,
    /// The payload, which matches its checksums.
    pub payload: Payload,
}

/// Decodes the frame at the start of `bytes`, and returns it with its length. Returns `None` if the
/// frame is incomplete.
///
/// # Errors
/// If `bytes` cannot be the start of a valid frame within `limits`.
pub fn decode(bytes: &Bytes, limits: &Limits) -> Result<Option<(Frame, usize)>, FrameError> {
    let Some(fixed) = bytes.first_chunk::<HEADER_LEN>() else { return Ok(None) };
    let header = FrameHeader::decode(fixed, limits)?;
    let body_end = HEADER_LEN + header.body_len();
    let end = body_end + header.payload_len as usize;
    if bytes.len() < body_end {
        return Ok(None);
    }
    let (body, checksums) = header.decode_body(bytes.slice(HEADER_LEN..body_end))?;
    if bytes.len() < end {
        return Ok(None);
    }
    let data = bytes.slice(body_end..end);
    let block_offset = u64::from(header.block_offset);
    verify_pieces(block_offset, &data, &checksums).map_err(FrameError::Payload)?;
    let payload =
        Payload::from_parts(block_offset, data, checksums).map_err(|_| FrameError::Body(header.kind))?;
    Ok(Some((Frame { header, body, payload }, end)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits =
        Limits { max_header: 4096, max_inline: 16384, max_bulk: 1 << 20, eager: 16384, one_sided: false };

    fn message(header: &[u8], block_offset: u64, data: &[u8]) -> Vec<u8> {
        let payload = Payload::compute(block_offset, Bytes::copy_from_slice(data));
        let mut out = Vec::new();
        encode_head(&mut out, FrameKind::Message, 7, 3, &payload, |o| o.extend_from_slice(header));
        out.extend_from_slice(data);
        out
    }

    proptest! {
        #[test]
        fn decoding_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&Bytes::from(bytes), &LIMITS);
        }

        #[test]
        fn decoding_arbitrary_headers_with_correct_checksums_never_panics(
            mut fixed: [u8; HEADER_LEN], rest in proptest::collection::vec(any::<u8>(), 0..6000), kind in 0usize..18,
            header_len in 0u32..1200, payload_len in 0u32..6000,
        ) {
            fixed[..4].copy_from_slice(&MAGIC);
            fixed[4] = VERSION;
            fixed[5] = FrameKind::ALL[kind] as u8;
            fixed[7] &= 0x0f;
            fixed[8..12].copy_from_slice(&header_len.to_le_bytes());
            fixed[12..16].copy_from_slice(&payload_len.to_le_bytes());
            let body_len = header_len as usize
                + 4 * piece_count(u64::from(u16::from_le_bytes([fixed[6], fixed[7]])), u64::from(payload_len)) as usize;
            let body_crc = crc32c(&rest[..body_len.min(rest.len())]);
            fixed[32..36].copy_from_slice(&body_crc.to_le_bytes());
            let crc = crc32c(&fixed[..36]);
            fixed[36..].copy_from_slice(&crc.to_le_bytes());
            let mut bytes = fixed.to_vec();
            bytes.extend_from_slice(&rest);
            let _ = decode(&Bytes::from(bytes), &LIMITS);
        }

        #[test]
        fn an_encoded_frame_is_decoded_unchanged_and_its_prefixes_are_incomplete(
            header in proptest::collection::vec(any::<u8>(), 0..300), block_offset in 0u64..4096,
            data in proptest::collection::vec(any::<u8>(), 0..10_000), cut: usize,
        ) {
            let bytes = Bytes::from(message(&header, block_offset, &data));
            let (frame, len) = decode(&bytes, &LIMITS).unwrap().unwrap();
            prop_assert_eq!(len, bytes.len());
            prop_assert_eq!(frame.payload.data().as_ref(), data.as_slice());
            prop_assert_eq!((frame.header.seq, frame.header.ack), (7, 3));
            prop_assert_eq!(frame.body, Body::Message(Bytes::from(header)));
            prop_assert_eq!(decode(&bytes.slice(..cut % bytes.len()), &LIMITS), Ok(None));
        }

        #[test]
        fn a_flipped_bit_is_always_detected(
            header in proptest::collection::vec(any::<u8>(), 0..100),
            data in proptest::collection::vec(any::<u8>(), 0..9_000), bit: usize,
        ) {
            let mut bytes = message(&header, 100, &data);
            let bit = bit % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            let wrong = decode(&Bytes::from(bytes), &LIMITS).unwrap_err();
            prop_assert!(wrong.is_damage(), "{}", wrong);
        }
    }

    #[test]
    fn a_frame_header_with_a_length_over_the_limits_is_refused() {
        let bytes = message(&[0; 4097], 0, b"");
        let wrong = decode(&Bytes::from(bytes), &LIMITS).unwrap_err();
        assert!(
            matches!(wrong, FrameError::TooLong { part: "header", len: 4097, limit: 4096, .. }),
            "{wrong}"
        );
        assert!(!wrong.is_damage());
        let bytes = message(b"", 0, &[0; 16385]);
        assert!(matches!(decode(&bytes.into(), &LIMITS), Err(FrameError::TooLong { part: "payload", .. })));
    }
}
