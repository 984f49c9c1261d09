//! Entry point for fuzzing the decoders of the on-disk format. No decoder may panic on any bytes.

use crate::block::decode_all;

/// Feeds `bytes` to every decoder of the on-disk format.
pub fn decode(bytes: &[u8]) {
    decode_all(bytes);
}
