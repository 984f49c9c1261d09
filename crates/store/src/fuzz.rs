//! Entry point for fuzzing the decoders of the on-disk format. A decoder must not panic on any
//! input.

use crate::block::decode_all;

/// Feeds `bytes` to every decoder of the on-disk format.
pub fn decode(bytes: &[u8]) {
    decode_all(bytes);
}
