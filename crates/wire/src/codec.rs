//! Encodes and decodes requests and replies in postcard format. An encoded request starts with its
//! head.

use bytes::Bytes;
use serde::Serialize;

use crate::{Reply, RequestBody, RequestHead};

/// Newest version of the object protocol that this program speaks.
pub const VERSION: u16 = 12;
/// Oldest version of the object protocol that this program speaks.
pub const VERSION_OLDEST: u16 = 12;

/// Error for bytes that cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} cannot be decoded: {reason}")]
pub struct DecodeError {
    what: &'static str,
    reason: String,
}

/// Encodes a request as the header of a message.
#[must_use]
pub fn encode_request(head: &RequestHead, body: &RequestBody) -> Bytes {
    let bytes = encode(head, Vec::with_capacity(128));
    Bytes::from(encode(body, bytes))
}

/// Encodes a reply as the header of a message.
#[must_use]
pub fn encode_reply(reply: &Reply) -> Bytes {
    Bytes::from(encode(reply, Vec::with_capacity(64)))
}

/// Decodes a request's head from the start of a message's header. Returns the head, and the bytes
/// that follow the head.
///
/// # Errors
/// If the header does not start with a valid head. In this case, the receiver does not know the
/// request's number, so it cannot reply.
pub fn decode_head(header: &[u8]) -> Result<(RequestHead, &[u8]), DecodeError> {
    postcard::take_from_bytes(header).map_err(|e| error("request head", &e))
}

/// Decodes the bytes after a request's head.
///
/// # Errors
/// If the bytes are not exactly one request body.
pub fn decode_body(rest: &[u8]) -> Result<RequestBody, DecodeError> {
    decode("request body", rest)
}

/// Decodes a reply.
///
/// # Errors
/// If the bytes are not exactly one reply.
pub fn decode_reply(header: &[u8]) -> Result<Reply, DecodeError> {
    decode("reply", header)
}

fn encode<T: Serialize>(value: &T, into: Vec<u8>) -> Vec<u8> {
    // Encoding plain data into a growing vector cannot fail.
    postcard::to_extend(value, into).expect("plain data can be encoded")
}

fn decode<T: for<'a> serde::Deserialize<'a>>(what: &'static str, bytes: &[u8]) -> Result<T, DecodeError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => {
            Err(DecodeError { what, reason: format!("{} unexpected bytes follow it", rest.len()) })
        }
        Err(e) => Err(error(what, &e)),
    }
}

fn error(what: &'static str, e: &postcard::Error) -> DecodeError {
    DecodeError { what, reason: e.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Condition, Data, Mutate, Mutation, ObjectName, ObjectRequest, OpBytes};
    use proptest::prelude::*;

    fn sample() -> (RequestHead, RequestBody) {
        let head = RequestHead { seq: 7, acked_through: 3, retry: true, deadline_ms: 1000 };
        let name: ObjectName = "pool:ns/object".parse().unwrap();
        let body = RequestBody::Object(ObjectRequest::Mutate(Mutate {
            name: name.to_wire(),
            part: None,
            conditions: vec![Condition::Version(3), Condition::Xattr("a".into(), None)],
            ops: vec![Mutation::Append(OpBytes::Embedded("xyz".into())), Mutation::OmapClear],
            data: Data::None,
        }));
        (head, body)
    }

    #[test]
    fn a_decoded_request_equals_the_encoded_request() {
        let (head, body) = sample();
        let bytes = encode_request(&head, &body);
        let (head_back, rest) = decode_head(&bytes).unwrap();
        assert_eq!(head_back, head);
        assert_eq!(decode_body(rest).unwrap(), body);
    }

    proptest! {
        #[test]
        fn decoding_requests_and_replies_from_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode_head(&bytes);
            let _ = decode_reply(&bytes);
            if let Ok(RequestBody::Object(ObjectRequest::Mutate(mutate))) = decode_body(&bytes) {
                let _ = (mutate.check(), mutate.name.check());
            }
        }

        #[test]
        fn decoding_a_damaged_request_never_panics(at: usize, with: u8, cut: usize) {
            let (head, body) = sample();
            let mut bytes = encode_request(&head, &body).to_vec();
            let len = bytes.len();
            bytes[at % len] = with;
            bytes.truncate(cut % (len + 1));
            if let Ok((_, rest)) = decode_head(&bytes) {
                let _ = decode_body(rest);
            }
        }
    }
}
