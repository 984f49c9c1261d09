//! Entry points for fuzzing the decoders of peer input. Not part of the API.

use bytes::Bytes;

use crate::messages::{CallOutcome, StoreCall, decode, unpack_checksums};
use crate::transaction_codec;

/// Decodes the control data of requests and replies.
pub fn control(bytes: &[u8]) {
    // Fuzzing checks for panics only; ignore the results.
    let _ = (decode::<StoreCall>(bytes), decode::<CallOutcome>(bytes), unpack_checksums(bytes));
}

/// Decodes a transaction from `control` and a data section of `data_len` bytes.
pub fn transaction(control: &[u8], data_len: u16) {
    let data = Bytes::from(vec![0; usize::from(data_len)]);
    // Fuzzing checks for panics only; ignore the result.
    let _ = transaction_codec::decode(Bytes::copy_from_slice(control), &data);
}
