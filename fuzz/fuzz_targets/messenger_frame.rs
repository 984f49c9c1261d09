//! Fuzzes the decoder of the messenger's frames. The fuzz target decodes each input three times:
//! unchanged; with a correct magic number, version and checksums, so that decoding continues after
//! these checks; and as the body of a frame without payload, so that the bodies of the handshake
//! are decoded even if the input contains no lengths.
#![no_main]

use base::block::{Payload, crc32c, piece_count};
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use messenger::Limits;
use messenger::frame::{self, FrameKind, HEADER_LEN};

const LIMITS: Limits =
    Limits { max_header: 4096, max_inline: 8192, max_bulk: 1 << 20, eager: 4096, one_sided: false };

fuzz_target!(|data: &[u8]| {
    // Ignore the result: the decoder may refuse the frame, but must not panic.
    let _ = frame::decode(&Bytes::copy_from_slice(data), &LIMITS);
    body(data);
    if data.len() < HEADER_LEN {
        return;
    }
    let mut sealed = data.to_vec();
    sealed[..4].copy_from_slice(&frame::MAGIC);
    sealed[4] = frame::VERSION;
    let u32_at = |at: usize| u32::from_le_bytes([sealed[at], sealed[at + 1], sealed[at + 2], sealed[at + 3]]);
    let block_offset = u64::from(u16::from_le_bytes([sealed[6], sealed[7]]));
    let pieces = piece_count(block_offset, u64::from(u32_at(12)));
    let end = (HEADER_LEN as u64 + u64::from(u32_at(8)) + 4 * pieces).min(sealed.len() as u64) as usize;
    let body = crc32c(&sealed[HEADER_LEN..end]);
    sealed[32..36].copy_from_slice(&body.to_le_bytes());
    let head = crc32c(&sealed[..36]);
    sealed[36..40].copy_from_slice(&head.to_le_bytes());
    let _ = frame::decode(&Bytes::from(sealed), &LIMITS);
});

/// Decodes the input as the body of a frame, whose kind is in the first byte.
fn body(data: &[u8]) {
    let Some((kind, body)) = data.split_first() else { return };
    let kind = FrameKind::ALL[usize::from(*kind) % FrameKind::ALL.len()];
    let encode = |append: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        let seq = u64::from(kind.is_sequenced());
        frame::encode_head(&mut out, kind, seq, 0, &Payload::default(), |out| append(out));
        Bytes::from(out)
    };
    let bytes = encode(&|out| out.extend_from_slice(body));
    let Ok(decoded) = frame::decode(&bytes, &LIMITS) else { return };
    let (decoded, len) = decoded.expect("the frame is complete");
    assert_eq!((decoded.body.kind(), len), (kind, bytes.len()));
    let again = encode(&|out| decoded.body.encode(out));
    let again = frame::decode(&again, &LIMITS).expect("a decoded body can be encoded");
    assert_eq!(again.map(|(frame, _)| frame.body), Some(decoded.body));
}
