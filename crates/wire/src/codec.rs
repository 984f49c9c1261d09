//! Encodes and decodes requests and replies in postcard format. An encoded request starts with its
//! head.
//!
//! The number of a strand is encoded only if it is not 0: in a request at the end of the head, where a
//! flag announces it, and in a reply at the end. On strand 0, messages are the same as before
//! [`VERSION_STRANDS`].

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Reply, ReplyBody, RequestBody, RequestHead, Result as WireResult};

/// Newest version of the object protocol that this program speaks.
pub const VERSION: u16 = 14;
/// First version of the object protocol in which a connection has several strands.
pub const VERSION_STRANDS: u16 = 13;
/// First version of the object protocol in which a client can fence a session, and objects can inherit
/// from others.
pub const VERSION_OWNERS: u16 = 14;
/// First version of the object protocol in which a client can query an object's extents.
pub const VERSION_EXTENTS: u16 = 14;
/// Oldest version of the object protocol that this program speaks.
pub const VERSION_OLDEST: u16 = 12;

/// Error for bytes that cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} cannot be decoded: {reason}")]
pub struct DecodeError {
    what: &'static str,
    reason: String,
}

/// The head of a request without its strand.
#[derive(Serialize, Deserialize)]
struct EncodedHead {
    seq: u64,
    acked_through: u64,
    /// Bits: [`RETRY`] and [`HAS_STRAND`].
    flags: u8,
    deadline_ms: u32,
}

/// Flag of a head: the request is a retry.
const RETRY: u8 = 1;
/// Flag of a head: the number of a strand follows.
const HAS_STRAND: u8 = 2;

/// Encodes a request as the header of a message.
#[must_use]
pub fn encode_request(head: &RequestHead, body: &RequestBody) -> Bytes {
    let RequestHead { strand, seq, acked_through, retry, deadline_ms } = *head;
    let flags = if retry { RETRY } else { 0 } | if strand > 0 { HAS_STRAND } else { 0 };
    let head = EncodedHead { seq, acked_through, flags, deadline_ms };
    let bytes = encode(&head, Vec::with_capacity(128));
    Bytes::from(encode(body, with_strand(strand, bytes)))
}

/// Encodes a reply as the header of a message.
#[must_use]
pub fn encode_reply(reply: &Reply) -> Bytes {
    let Reply { strand, seq, result } = reply;
    Bytes::from(with_strand(*strand, encode(&(seq, result), Vec::with_capacity(64))))
}

/// Appends the number of a strand other than 0.
fn with_strand(strand: u32, bytes: Vec<u8>) -> Vec<u8> {
    if strand > 0 { encode(&strand, bytes) } else { bytes }
}

/// Decodes a request's head from the start of a message's header. Returns the head, and the bytes
/// that follow the head.
///
/// # Errors
/// If the header does not start with a valid head. In this case, the receiver does not know the
/// request's number, so it cannot reply.
pub fn decode_head(header: &[u8]) -> Result<(RequestHead, &[u8]), DecodeError> {
    const WHAT: &str = "request head";
    let (head, rest): (EncodedHead, &[u8]) =
        postcard::take_from_bytes(header).map_err(|e| error(WHAT, &e))?;
    let EncodedHead { seq, acked_through, flags, deadline_ms } = head;
    let (strand, rest) = match flags & !RETRY {
        0 => (0, rest),
        HAS_STRAND => take_strand(WHAT, rest)?,
        _ => return Err(DecodeError { what: WHAT, reason: format!("its flags {flags} are unknown") }),
    };
    Ok((RequestHead { strand, seq, acked_through, retry: flags & RETRY != 0, deadline_ms }, rest))
}

/// Decodes the number of a strand other than 0. Returns the bytes that follow it.
fn take_strand<'a>(what: &'static str, bytes: &'a [u8]) -> Result<(u32, &'a [u8]), DecodeError> {
    match postcard::take_from_bytes(bytes).map_err(|e| error(what, &e))? {
        (0, _) => Err(DecodeError { what, reason: "it names strand 0".into() }),
        taken => Ok(taken),
    }
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
    const WHAT: &str = "reply";
    type Encoded = (u64, WireResult<ReplyBody>);
    let ((seq, result), rest): (Encoded, &[u8]) =
        postcard::take_from_bytes(header).map_err(|e| error(WHAT, &e))?;
    let (strand, rest) = if rest.is_empty() { (0, rest) } else { take_strand(WHAT, rest)? };
    match rest.len() {
        0 => Ok(Reply { strand, seq, result }),
        more => Err(unexpected(WHAT, more)),
    }
}

fn encode<T: Serialize>(value: &T, into: Vec<u8>) -> Vec<u8> {
    // Encoding plain data into a growing vector cannot fail.
    postcard::to_extend(value, into).expect("plain data can be encoded")
}

fn decode<T: for<'a> serde::Deserialize<'a>>(what: &'static str, bytes: &[u8]) -> Result<T, DecodeError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(unexpected(what, rest.len())),
        Err(e) => Err(error(what, &e)),
    }
}

fn unexpected(what: &'static str, bytes: usize) -> DecodeError {
    DecodeError { what, reason: format!("{bytes} unexpected bytes follow it") }
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
        let head = RequestHead { strand: 300, seq: 7, acked_through: 3, retry: true, deadline_ms: 1000 };
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
        for strand in [0, 1, 300, u32::MAX] {
            let head = RequestHead { strand, ..head };
            let bytes = encode_request(&head, &body);
            let (head_back, rest) = decode_head(&bytes).unwrap();
            assert_eq!(head_back, head);
            assert_eq!(decode_body(rest).unwrap(), body);
            for result in [Ok(ReplyBody::Closed), Err(crate::Error::NoSession("gone".into()))] {
                let reply = Reply { strand, seq: 9, result };
                assert_eq!(decode_reply(&encode_reply(&reply)).unwrap(), reply);
            }
        }
    }

    #[test]
    fn messages_on_strand_0_are_the_same_as_before_strands() {
        #[derive(Serialize)]
        struct HeadBefore(u64, u64, bool, u32);
        let (head, body) = sample();
        for retry in [false, true] {
            let head = RequestHead { strand: 0, retry, ..head };
            let before = encode(&HeadBefore(7, 3, retry, 1000), vec![]);
            assert_eq!(encode_request(&head, &body), encode(&body, before));
        }
        let renewed: WireResult<ReplyBody> = Ok(ReplyBody::Renewed);
        let reply = Reply { strand: 0, seq: 9, result: renewed.clone() };
        assert_eq!(encode_reply(&reply), encode(&(9_u64, renewed), vec![]));
    }

    #[test]
    fn a_strand_is_refused_if_its_flag_or_its_number_is_wrong() {
        let (head, body) = sample();
        let with_strand = encode_request(&RequestHead { strand: 1, ..head }, &body).to_vec();
        let (flags, strand) = (2, 5);
        assert_eq!((with_strand[flags], with_strand[strand]), (RETRY | HAS_STRAND, 1));
        let changed = |at: usize, to: u8| {
            let mut bytes = with_strand.clone();
            bytes[at] = to;
            decode_head(&bytes).unwrap_err().to_string()
        };
        assert!(changed(flags, 4).contains("flags 4 are unknown"));
        assert!(changed(strand, 0).contains("names strand 0"));
        let reply = encode_reply(&Reply { strand: 0, seq: 9, result: Ok(ReplyBody::Renewed) });
        let with = |more: &[u8]| decode_reply(&[&reply[..], more].concat()).map(|reply| reply.strand);
        assert_eq!(with(&[5]).unwrap(), 5);
        assert!(with(&[0]).is_err() && with(&[5, 5]).is_err() && with(&[0x80]).is_err());
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
