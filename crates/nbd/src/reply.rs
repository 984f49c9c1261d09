//! Encodes replies to requests.
//!
//! Source: the sections "Simple reply message" and "Structured reply chunk message" of the NBD
//! protocol.

use bytes::{BufMut, Bytes, BytesMut};
use disk::DiskExtent;

use crate::execution::{ExecutedRequest, NbdOutcome};
use crate::failure::NbdFailure;
use crate::negotiation::ALLOCATION_ID;
use crate::request::RequestHeader;

const SIMPLE_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;

/// The reply has no further parts.
const DONE: u16 = 1 << 0;
const OFFSET_DATA: u16 = 1;
const BLOCK_STATUS: u16 = 5;
const ERROR: u16 = (1 << 15) + 1;

const HOLE: u32 = 1 << 0;
const ZERO: u32 = 1 << 1;

/// Maximum number of extents in a reply. The client asks again for the rest.
const EXTENTS_MAX: usize = 8192;
/// Maximum length of an error text, in bytes.
const TEXT_MAX: usize = 1024;

/// Appends the reply to a request to `heads`, except the data of the disk, which is returned.
pub(crate) fn encode(
    executed: &mut ExecutedRequest,
    is_structured: bool,
    heads: &mut BytesMut,
) -> Vec<Bytes> {
    let header = executed.header;
    match &mut executed.outcome {
        NbdOutcome::Done => simple(heads, 0, header.cookie),
        NbdOutcome::Failed(failure) if is_structured => error(heads, failure, header.cookie),
        NbdOutcome::Failed(failure) => simple(heads, failure.errno as u32, header.cookie),
        NbdOutcome::Data(data) => {
            if is_structured {
                structured(heads, OFFSET_DATA, header.cookie, 8 + header.len as usize);
                heads.put_u64(header.offset);
            } else {
                simple(heads, 0, header.cookie);
            }
            return std::mem::take(data);
        }
        NbdOutcome::Extents(extents) => {
            assert!(is_structured, "base:allocation needs structured replies");
            block_status(heads, extents, &header);
        }
    }
    Vec::new()
}

fn simple(heads: &mut BytesMut, errno: u32, cookie: u64) {
    heads.put_u32(SIMPLE_MAGIC);
    heads.put_u32(errno);
    heads.put_u64(cookie);
}

fn structured(heads: &mut BytesMut, kind: u16, cookie: u64, len: usize) {
    heads.put_u32(STRUCTURED_MAGIC);
    heads.put_u16(DONE);
    heads.put_u16(kind);
    heads.put_u64(cookie);
    heads.put_u32(u32::try_from(len).expect("limits bound the length of a reply"));
}

fn error(heads: &mut BytesMut, failure: &NbdFailure, cookie: u64) {
    let mut end = failure.text.len().min(TEXT_MAX);
    while !failure.text.is_char_boundary(end) {
        end -= 1;
    }
    structured(heads, ERROR, cookie, 4 + 2 + end);
    heads.put_u32(failure.errno as u32);
    heads.put_u16(end as u16);
    heads.put_slice(&failure.text.as_bytes()[..end]);
}

fn block_status(heads: &mut BytesMut, extents: &[DiskExtent], header: &RequestHeader) {
    let extents = &extents[..extents.len().min(if header.wants_one() { 1 } else { EXTENTS_MAX })];
    structured(heads, BLOCK_STATUS, header.cookie, 4 + 8 * extents.len());
    heads.put_u32(ALLOCATION_ID);
    for extent in extents {
        heads.put_u32(u32::try_from(extent.len).expect("an extent lies within its request"));
        heads.put_u32(if extent.has_data { 0 } else { HOLE | ZERO });
    }
}
