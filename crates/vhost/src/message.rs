//! The messages of the vhost-user protocol, as bytes and as values.
//!
//! Source: QEMU's docs/interop/vhost-user.rst. A message is a header of 12 bytes and a payload.
//! Numbers are in the byte order of the machine, because both processes run on it. Only the messages
//! that a block device needs are known. The values are not validated here, except for lengths.

use crate::memory::MemoryRange;

/// Length of the header of a message, in bytes.
pub const HEADER_LEN: usize = 12;
/// Maximum length of the payload of a message, in bytes.
pub const PAYLOAD_MAX: usize = 1024;
/// Maximum number of file descriptors with a message.
pub const FDS_MAX: usize = 8;
/// Maximum number of bytes of the configuration space in a message.
const CONFIG_MAX: u32 = 256;
/// Length of the fields before the bytes of the configuration space, in bytes.
const CONFIG_HEAD_LEN: usize = 12;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// Numbers of requests of the front end.
mod number {
    pub(super) const GET_FEATURES: u32 = 1;
    pub(super) const SET_FEATURES: u32 = 2;
    pub(super) const SET_OWNER: u32 = 3;
    pub(super) const RESET_OWNER: u32 = 4;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_VRING_NUM: u32 = 8;
    pub(super) const SET_VRING_ADDR: u32 = 9;
    pub(super) const SET_VRING_BASE: u32 = 10;
    pub(super) const GET_VRING_BASE: u32 = 11;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
    pub(super) const SET_VRING_ERR: u32 = 14;
    pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(super) const GET_QUEUE_NUM: u32 = 17;
    pub(super) const SET_VRING_ENABLE: u32 = 18;
    pub(super) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(super) const GET_CONFIG: u32 = 24;
    pub(super) const SET_CONFIG: u32 = 25;
    pub(super) const GET_INFLIGHT_FD: u32 = 31;
    pub(super) const SET_INFLIGHT_FD: u32 = 32;
    pub(super) const RESET_DEVICE: u32 = 34;
    pub(super) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(super) const ADD_MEM_REG: u32 = 37;
    pub(super) const REM_MEM_REG: u32 = 38;
}

/// Number of the request of the back end to read the configuration space again.
const BACKEND_CONFIG_CHANGE: u32 = 2;

/// Why bytes are not a message.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeMessageError {
    /// The header is incomplete, has another version, or is one of a reply.
    #[error("the header of a message is invalid: {0:02x?}")]
    Header(Vec<u8>),
    /// The length of the payload is not the length that the request has.
    #[error("request {request} has a payload of {len} bytes")]
    Payload {
        /// Number of the request.
        request: u32,
        /// Length of the payload, in bytes.
        len: usize,
    },
    /// The request is unknown, or does not apply to a block device.
    #[error("request {0} is unknown")]
    Unknown(u32),
}

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageHeader {
    /// Number of the request.
    pub request: u32,
    /// Whether the front end wants a reply to a request that has none by itself.
    pub needs_reply: bool,
    /// Length of the payload, in bytes: at most [`PAYLOAD_MAX`].
    pub len: usize,
}

impl MessageHeader {
    /// Reads the header of a message of the front end, for example to find the end of the message in
    /// a stream.
    ///
    /// # Errors
    /// If the version is unknown, the message is a reply, or the payload is too long.
    pub fn read(bytes: &[u8; HEADER_LEN]) -> Result<MessageHeader, DecodeMessageError> {
        let [request, flags, len] = numbers(bytes);
        let len = len as usize;
        if flags & VERSION_MASK != VERSION || flags & FLAG_REPLY != 0 || len > PAYLOAD_MAX {
            return Err(DecodeMessageError::Header(bytes.to_vec()));
        }
        Ok(MessageHeader { request, needs_reply: flags & FLAG_NEED_REPLY != 0, len })
    }
}

/// A queue, and the file descriptor of an event that comes with the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueEvent {
    /// Number of the queue.
    pub queue: usize,
    /// Whether the message has a file descriptor. Without one, the side polls.
    pub has_fd: bool,
}

/// Where the rings of a queue are, as addresses of the front end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    /// Number of the queue.
    pub queue: u32,
    /// Descriptor table.
    pub descriptors: u64,
    /// Used ring.
    pub used: u64,
    /// Available ring.
    pub available: u64,
}

/// A part of the configuration space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigPart {
    /// Start of the part, in bytes.
    pub offset: u32,
    /// Flags of the message.
    pub flags: u32,
    /// Bytes of the part. In a request for the part, only their number matters.
    pub bytes: Vec<u8>,
}

/// Where the records of requests in flight are in their file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InflightPlace {
    /// Length of all records, in bytes.
    pub len: u64,
    /// Start of the records, in bytes.
    pub offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Number of descriptors of a queue.
    pub size: u16,
}

/// A request of the front end. Each variant has the name of the request in the specification.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the specification describes the requests")]
pub enum FrontEndRequest {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<MemoryRange>),
    SetVringNum { queue: u32, size: u32 },
    SetVringAddr(RingAddresses),
    SetVringBase { queue: u32, base: u32 },
    GetVringBase { queue: u32 },
    SetVringKick(QueueEvent),
    SetVringCall(QueueEvent),
    SetVringErr(QueueEvent),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable { queue: u32, is_enabled: bool },
    SetBackendReqFd,
    GetConfig(ConfigPart),
    SetConfig(ConfigPart),
    GetInflightFd(InflightPlace),
    SetInflightFd(InflightPlace),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(MemoryRange),
    RemMemReg(MemoryRange),
}

impl FrontEndRequest {
    /// Reads a whole message. Returns the header and the request.
    ///
    /// # Errors
    /// If the bytes are not a message that a block device understands.
    pub fn read(message: &[u8]) -> Result<(MessageHeader, FrontEndRequest), DecodeMessageError> {
        let Some((header, payload)) = message.split_first_chunk::<HEADER_LEN>() else {
            return Err(DecodeMessageError::Header(message.to_vec()));
        };
        let header = MessageHeader::read(header)?;
        let request = header.request;
        let invalid = DecodeMessageError::Payload { request, len: payload.len() };
        if payload.len() != header.len {
            return Err(invalid);
        }
        match read_payload(request, payload) {
            Some(Some(read)) => Ok((header, read)),
            Some(None) => Err(invalid),
            None => Err(DecodeMessageError::Unknown(request)),
        }
    }
}

/// Reads the payload of a request. Returns `None` if the request is unknown, and `Some(None)` if the
/// payload is invalid.
fn read_payload(request: u32, payload: &[u8]) -> Option<Option<FrontEndRequest>> {
    use FrontEndRequest as R;
    let empty = |read: R| payload.is_empty().then_some(read);
    let word = || payload.try_into().ok().map(u64::from_ne_bytes);
    let pair = || payload.try_into().ok().map(|bytes: [u8; 8]| numbers::<2, 8>(&bytes));
    let event =
        || word().map(|value| QueueEvent { queue: (value & 0xff) as usize, has_fd: value & 1 << 8 == 0 });
    // The region follows 8 bytes of padding.
    let region = || payload.get(8..).filter(|_| payload.len() == 40).and_then(read_range);
    Some(match request {
        number::GET_FEATURES => empty(R::GetFeatures),
        number::SET_FEATURES => word().map(R::SetFeatures),
        number::SET_OWNER => empty(R::SetOwner),
        number::RESET_OWNER => empty(R::ResetOwner),
        number::SET_MEM_TABLE => read_table(payload).map(R::SetMemTable),
        number::SET_VRING_NUM => pair().map(|[queue, size]| R::SetVringNum { queue, size }),
        number::SET_VRING_ADDR => read_addresses(payload).map(R::SetVringAddr),
        number::SET_VRING_BASE => pair().map(|[queue, base]| R::SetVringBase { queue, base }),
        number::GET_VRING_BASE => pair().map(|[queue, _]| R::GetVringBase { queue }),
        number::SET_VRING_KICK => event().map(R::SetVringKick),
        number::SET_VRING_CALL => event().map(R::SetVringCall),
        number::SET_VRING_ERR => event().map(R::SetVringErr),
        number::GET_PROTOCOL_FEATURES => empty(R::GetProtocolFeatures),
        number::SET_PROTOCOL_FEATURES => word().map(R::SetProtocolFeatures),
        number::GET_QUEUE_NUM => empty(R::GetQueueNum),
        number::SET_VRING_ENABLE => {
            pair().map(|[queue, enabled]| R::SetVringEnable { queue, is_enabled: enabled != 0 })
        }
        // Some front ends send a payload, which has no meaning.
        number::SET_BACKEND_REQ_FD => Some(R::SetBackendReqFd),
        number::GET_CONFIG => read_config(payload).map(R::GetConfig),
        number::SET_CONFIG => read_config(payload).map(R::SetConfig),
        number::GET_INFLIGHT_FD => read_inflight(payload).map(R::GetInflightFd),
        number::SET_INFLIGHT_FD => read_inflight(payload).map(R::SetInflightFd),
        number::RESET_DEVICE => empty(R::ResetDevice),
        number::GET_MAX_MEM_SLOTS => empty(R::GetMaxMemSlots),
        number::ADD_MEM_REG => region().map(R::AddMemReg),
        number::REM_MEM_REG => region().map(R::RemMemReg),
        _ => return None,
    })
}

fn read_table(payload: &[u8]) -> Option<Vec<MemoryRange>> {
    let (head, ranges) = payload.split_first_chunk::<8>()?;
    let [count, _padding] = numbers::<2, 8>(head);
    let count = usize::try_from(count).ok().filter(|count| *count <= FDS_MAX)?;
    if ranges.len() != count * 32 {
        return None;
    }
    ranges.chunks_exact(32).map(read_range).collect()
}

fn read_range(bytes: &[u8]) -> Option<MemoryRange> {
    let [guest_address, size, user_address, file_offset] = words(bytes)?;
    Some(MemoryRange { guest_address, size, user_address, file_offset })
}

fn read_addresses(payload: &[u8]) -> Option<RingAddresses> {
    let (head, addresses) = payload.split_first_chunk::<8>()?;
    let [queue, _flags] = numbers::<2, 8>(head);
    let [descriptors, used, available, _log] = words(addresses)?;
    Some(RingAddresses { queue, descriptors, used, available })
}

fn read_config(payload: &[u8]) -> Option<ConfigPart> {
    let (head, bytes) = payload.split_first_chunk::<CONFIG_HEAD_LEN>()?;
    let [offset, len, flags] = numbers(head);
    let is_valid = len <= CONFIG_MAX && bytes.len() == len as usize;
    is_valid.then(|| ConfigPart { offset, flags, bytes: bytes.to_vec() })
}

/// Reads 20 bytes, which some front ends pad to 24.
fn read_inflight(payload: &[u8]) -> Option<InflightPlace> {
    let is_padded = payload.len() == 24;
    let ([len, offset], counts) = (words(payload.get(..16)?)?, payload.get(16..20)?);
    let [queues, size] = [0, 2].map(|at| u16::from_ne_bytes([counts[at], counts[at + 1]]));
    (payload.len() == 20 || is_padded).then_some(InflightPlace { len, offset, queues, size })
}

fn numbers<const N: usize, const LEN: usize>(bytes: &[u8; LEN]) -> [u32; N] {
    const { assert!(LEN == 4 * N) };
    std::array::from_fn(|at| u32::from_ne_bytes(bytes[4 * at..4 * at + 4].try_into().expect("4 bytes")))
}

fn words<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let word = |at| u64::from_ne_bytes(bytes[8 * at..8 * at + 8].try_into().expect("8 bytes"));
    (bytes.len() == 8 * N).then(|| std::array::from_fn(word))
}

/// Writes the reply to a request.
pub(crate) fn reply(request: u32, payload: &[u8]) -> Vec<u8> {
    message(request, VERSION | FLAG_REPLY, payload)
}

/// Writes the reply to a request for a part of the configuration space.
pub(crate) fn config_reply(request: u32, part: &ConfigPart) -> Vec<u8> {
    let fields = [part.offset, part.bytes.len() as u32, part.flags];
    let mut payload: Vec<u8> = fields.into_iter().flat_map(u32::to_ne_bytes).collect();
    payload.extend(&part.bytes);
    reply(request, &payload)
}

/// Writes the reply to a request for a file of inflight records. The reply has the length of the
/// request.
pub(crate) fn inflight_reply(header: &MessageHeader, place: &InflightPlace) -> Vec<u8> {
    let mut payload = [place.len.to_ne_bytes(), place.offset.to_ne_bytes()].concat();
    payload.extend([place.queues.to_ne_bytes(), place.size.to_ne_bytes()].concat());
    payload.resize(header.len, 0);
    reply(header.request, &payload)
}

/// Returns the request of the back end to read the configuration space again. It needs no reply.
pub(crate) fn config_change() -> Vec<u8> {
    message(BACKEND_CONFIG_CHANGE, VERSION, &[])
}

fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, flags, payload.len() as u32];
    let mut message: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).collect();
    message.extend(payload);
    message
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(request: u32, payload: &[u8]) -> Result<FrontEndRequest, DecodeMessageError> {
        FrontEndRequest::read(&message(request, VERSION, payload)).map(|(_, request)| request)
    }

    #[test]
    fn messages_have_the_layout_of_the_specification() {
        let kick = read(12, &(0x103u64).to_ne_bytes()).unwrap();
        assert_eq!(kick, FrontEndRequest::SetVringKick(QueueEvent { queue: 3, has_fd: false }));
        let words = |words: &[u64]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>();
        let addresses = read(9, &words(&[2, 10, 20, 30, 40])).unwrap();
        let expected = RingAddresses { queue: 2, descriptors: 10, used: 20, available: 30 };
        assert_eq!(addresses, FrontEndRequest::SetVringAddr(expected));
        let table = read(5, &words(&[1, 0x1000, 0x2000, 0x7000, 0x3000])).unwrap();
        let range =
            MemoryRange { guest_address: 0x1000, size: 0x2000, user_address: 0x7000, file_offset: 0x3000 };
        assert_eq!(table, FrontEndRequest::SetMemTable(vec![range]));
        assert_eq!(
            read(37, &words(&[0, 0x1000, 0x2000, 0x7000, 0x3000])),
            Ok(FrontEndRequest::AddMemReg(range))
        );
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        for (request, len) in [(1, 8), (2, 4), (5, 8 + 31), (9, 39), (24, 11), (31, 21), (37, 32), (8, 0)] {
            assert_eq!(read(request, &vec![0; len]), Err(DecodeMessageError::Payload { request, len }));
        }
        let many = [9u64.to_ne_bytes().to_vec(), vec![0; 9 * 32]].concat();
        assert!(matches!(read(5, &many), Err(DecodeMessageError::Payload { .. })));
        assert_eq!(read(6, &[]), Err(DecodeMessageError::Unknown(6)));
        let longer = [message(1, VERSION, &[]), vec![0]].concat();
        assert!(FrontEndRequest::read(&longer).is_err());
        assert!(FrontEndRequest::read(&message(1, 2, &[])).is_err());
        assert!(FrontEndRequest::read(&message(1, VERSION | FLAG_REPLY, &[])).is_err());
        assert!(FrontEndRequest::read(&message(25, VERSION, &[0; PAYLOAD_MAX + 1])).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_decoded(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = FrontEndRequest::read(&bytes);
        }

        #[test]
        fn any_payload_can_be_decoded(
            request in 0u32..50,
            payload in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let _ = FrontEndRequest::read(&message(request, VERSION, &payload));
        }
    }
}
