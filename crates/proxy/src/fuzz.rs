//! The decoders that read what a peer sent, for fuzzing. Not part of the API.

use bytes::Bytes;

use crate::messages::{CallOutcome, StoreCall, decode, unpack_checksums};
use crate::transaction_codec;

/// Control data of requests and replies.
pub fn control(bytes: &[u8]) {
    // Whether it decodes is not the question here.
    let _ = (decode::<StoreCall>(bytes), decode::<CallOutcome>(bytes), unpack_checksums(bytes));
}

/// An encoded transaction: control data, and a data section of `data_len` bytes.
pub fn transaction(control: &[u8], data_len: u16) {
    let data = Bytes::from(vec![0; usize::from(data_len)]);
    // Whether it decodes is not the question here.
    let _ = transaction_codec::decode(Bytes::copy_from_slice(control), &data);
}
