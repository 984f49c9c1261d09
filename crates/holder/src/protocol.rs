//! The control protocol between holder and gateway, without I/O.
//!
//! Both sides send frames over a UNIX stream socket. A frame has a header of 8 bytes, the length of
//! its body and the number of its descriptors (each a u32, little endian). The body follows. The
//! descriptors arrive with the frame as `SCM_RIGHTS`.
//!
//! The first frame of each side has a fixed layout, so that sides of any versions can compare their
//! versions: [`GatewayHello`] of the gateway, then [`HolderWelcome`] of the holder. All further
//! bodies are encoded by postcard: [`ToHolder`] and [`ToGateway`]. The holder answers the calls of
//! a gateway in their order.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{HolderRefusal, SocketFileError};
use crate::framing::{Framing, RawMessage};

/// Maximum length of the state of a device, in bytes.
pub const STATE_BYTES_MAX: usize = 1 << 20;
/// Maximum length of a message to a front end, in bytes.
pub const REPLY_BYTES_MAX: usize = 64 << 10;
/// Maximum number of descriptors of one call: as many as Linux sends at once (`SCM_MAX_FD`).
pub const CALL_FDS_MAX: usize = 253;
/// Maximum length of the name of a device, in bytes.
pub const DEVICE_NAME_BYTES_MAX: usize = 255;
/// Maximum length of the path of a device's socket, in bytes.
pub const PATH_BYTES_MAX: usize = 4 << 10;
/// Maximum number of messages that wait until a front end reads.
pub const OUTBOX_MAX: usize = 4;
/// Maximum number of calls of a client that wait for their answers.
pub const CALLS_MAX: usize = 4096;
/// Maximum number of keys that one call drops.
pub const DROP_KEYS_MAX: usize = 4096;
/// Maximum length of a frame, in bytes: a state, a message, keys, and the remaining fields.
const FRAME_BYTES_MAX: usize =
    FRAME_HEADER + STATE_BYTES_MAX + REPLY_BYTES_MAX + 10 * DROP_KEYS_MAX + (16 << 10);
/// Length of the header of a frame, in bytes.
const FRAME_HEADER: usize = 8;
/// The first bytes of hello and welcome.
const MAGIC: &[u8; 16] = b"outboard-holder\0";

/// The framing of the control protocol.
pub(crate) const FRAMES: Framing = Framing {
    header_len: FRAME_HEADER as u32,
    length_at: 0,
    length_counts_header: false,
    message_bytes_max: FRAME_BYTES_MAX as u32,
    message_fds_max: CALL_FDS_MAX as u32,
};

/// A descriptor that several owners share. It is closed when the last owner drops it.
pub type SharedFd = Arc<OwnedFd>;

/// A range of versions of the control protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// The oldest version.
    pub min: u32,
    /// The newest version.
    pub max: u32,
}

impl Versions {
    /// The versions that this build supports.
    pub const OWN: Versions = Versions { min: 1, max: 1 };

    /// Returns the newest version that both ranges contain.
    #[must_use]
    pub fn common(self, other: Versions) -> Option<u32> {
        let newest = self.max.min(other.max);
        (newest >= self.min.max(other.min)).then_some(newest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.min, self.max)
    }
}

/// The first frame of a gateway: magic, oldest version, newest version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatewayHello(pub Versions);

/// The first frame of the holder: magic, oldest version, newest version, and the version that the
/// connection uses from now on. The last number is 0 if the sides have no version in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderWelcome {
    /// The versions that the holder supports.
    pub supported: Versions,
    /// The version of the connection.
    pub chosen: Option<u32>,
}

impl GatewayHello {
    pub(crate) fn encode(self) -> Bytes {
        numbers(&[self.0.min, self.0.max])
    }

    /// Decodes the body of a frame.
    ///
    /// # Errors
    /// If the body is not a hello.
    pub fn decode(body: &[u8]) -> Result<GatewayHello, BadFrame> {
        let [min, max] = read_numbers(body)?;
        Ok(GatewayHello(Versions { min, max }))
    }
}

impl HolderWelcome {
    pub(crate) fn encode(self) -> Bytes {
        numbers(&[self.supported.min, self.supported.max, self.chosen.unwrap_or(0)])
    }

    /// Decodes the body of a frame.
    ///
    /// # Errors
    /// If the body is not a welcome.
    pub fn decode(body: &[u8]) -> Result<HolderWelcome, BadFrame> {
        let [min, max, chosen] = read_numbers(body)?;
        Ok(HolderWelcome { supported: Versions { min, max }, chosen: (chosen != 0).then_some(chosen) })
    }
}

fn numbers(numbers: &[u32]) -> Bytes {
    let mut body = BytesMut::from(&MAGIC[..]);
    numbers.iter().for_each(|number| body.put_u32_le(*number));
    body.freeze()
}

fn read_numbers<const N: usize>(body: &[u8]) -> Result<[u32; N], BadFrame> {
    let rest = body.strip_prefix(MAGIC).ok_or(BadFrame::NotAHello)?;
    let (numbers, []) = rest.as_chunks::<4>() else { return Err(BadFrame::NotAHello) };
    let numbers: &[[u8; 4]; N] = numbers.try_into().map_err(|_| BadFrame::NotAHello)?;
    Ok(numbers.map(u32::from_le_bytes))
}

/// The reason why a frame cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadFrame {
    /// The first frame is neither a hello nor a welcome.
    #[error("the first frame does not begin the holder's protocol")]
    NotAHello,
    /// The body cannot be decoded.
    #[error("a frame cannot be decoded: {0}")]
    Body(String),
    /// The body does not match the descriptors that arrived with it.
    #[error("a frame came with {arrived} descriptors instead of {stated}")]
    Fds {
        /// Number of descriptors that the frame states.
        stated: usize,
        /// Number of descriptors that arrived.
        arrived: usize,
    },
}

/// A frame from the gateway to the holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToHolder {
    /// A call, which the holder answers.
    Call {
        /// Number of the call. Calls of a connection are numbered from 1.
        call: u64,
        /// What the holder shall do.
        body: HolderCall,
    },
    /// The gateway has received [`ToGateway::Disconnected`].
    Acknowledge {
        /// The device.
        device: String,
        /// Number of the connection that ended.
        connection: u64,
    },
}

/// A call of the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HolderCall {
    /// Adds a device and listens at its socket.
    Add {
        /// Name of the device.
        device: String,
        /// Path of its socket.
        path: String,
        /// How the messages of its front ends are cut.
        framing: Framing,
    },
    /// Removes a device, its socket and its state. Its front end is disconnected.
    Remove {
        /// Name of the device.
        device: String,
    },
    /// Answers the pending message. The frame has the descriptors to keep, then those of the reply.
    Done {
        /// Number of the answered message.
        number: u64,
        /// Changes of the device's state.
        change: HeldChange,
        /// Bytes of the reply.
        reply: Option<Bytes>,
        /// Whether the connection of the front end ends after the reply.
        close: bool,
    },
    /// Changes the state without a message. The frame has the descriptors to keep.
    Deposit(HeldChange),
    /// Sends a message to the front end. The frame has the descriptors of the message.
    Send {
        /// Name of the device.
        device: String,
        /// Number of the front end's connection.
        connection: u64,
        /// Bytes of the message.
        bytes: Bytes,
    },
    /// Ends the holder.
    Stop,
}

impl HolderCall {
    /// Checks the lengths of all parts. Both sides check them: so a call fits into a frame, and the
    /// holder can name the device in its answer.
    ///
    /// # Errors
    /// If a part is too long, or if a message to the front end is empty.
    pub(crate) fn check(&self) -> Result<(), HolderRefusal> {
        let (device, change, message) = match self {
            HolderCall::Add { device, .. } | HolderCall::Remove { device } => (device, None, None),
            HolderCall::Done { change, reply, .. } => (&change.device, Some(change), reply.as_ref()),
            HolderCall::Deposit(change) => (&change.device, Some(change), None),
            HolderCall::Send { device, bytes, .. } => (device, None, Some(bytes)),
            HolderCall::Stop => return Ok(()),
        };
        if !(1..=DEVICE_NAME_BYTES_MAX).contains(&device.len()) || device.chars().any(char::is_control) {
            return Err(HolderRefusal::BadName(start_of(device)));
        }
        if let HolderCall::Add { path, .. } = self
            && path.len() > PATH_BYTES_MAX
        {
            return Err(SocketFileError::BadPath(start_of(path)).into());
        }
        if let Some(len) = message.map(Bytes::len).filter(|len| !(1..=REPLY_BYTES_MAX).contains(len)) {
            return Err(HolderRefusal::BadReplyLength(len));
        }
        let Some(change) = change else { return Ok(()) };
        if let Some(len) = change.state.as_ref().map(Bytes::len).filter(|len| *len > STATE_BYTES_MAX) {
            return Err(HolderRefusal::StateTooLong(len));
        }
        if change.drop.len() > DROP_KEYS_MAX {
            return Err(HolderRefusal::TooManyDropKeys(change.drop.len()));
        }
        Ok(())
    }
}

/// Returns the start of a text that may be too long for a message.
fn start_of(text: &str) -> String {
    const CHARS_MAX: usize = 64;
    let start: String = text.chars().take(CHARS_MAX).collect();
    if start.len() < text.len() { start + "…" } else { start }
}

/// A change of what the holder keeps for a front end's connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldChange {
    /// Name of the device.
    pub device: String,
    /// Number of the front end's connection.
    pub connection: u64,
    /// The new state; `None` leaves the state as it is.
    pub state: Option<Bytes>,
    /// Keys of the descriptors that the frame carries.
    pub keep: Vec<u64>,
    /// Keys whose descriptors are dropped first.
    pub drop: Vec<u64>,
}

/// A frame from the holder to the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGateway {
    /// The answer to a call.
    Answer {
        /// Number of the call.
        call: u64,
        /// Whether the call took effect.
        result: Result<(), HolderRefusal>,
    },
    /// A device of the inventory.
    Device {
        /// Name of the device.
        device: String,
        /// Path of its socket.
        path: String,
        /// How the messages of its front ends are cut.
        framing: Framing,
        /// What the holder keeps for the front end that is connected.
        front_end: Option<Kept>,
    },
    /// Further kept descriptors of the device before. The frame has the descriptors.
    Keys(Vec<u64>),
    /// The inventory is complete.
    InventoryComplete,
    /// A front end has connected.
    Connected {
        /// Name of the device.
        device: String,
        /// Number of the connection.
        connection: u64,
    },
    /// The pending message of a front end. The frame has its descriptors.
    Message {
        /// Name of the device.
        device: String,
        /// Number of the front end's connection.
        connection: u64,
        /// Number of the message. Messages of a connection are numbered from 1.
        number: u64,
        /// Header and payload.
        bytes: Bytes,
    },
    /// A front end's connection has ended. Nothing is told about the device until the gateway
    /// acknowledges this frame.
    Disconnected {
        /// Name of the device.
        device: String,
        /// Number of the connection.
        connection: u64,
    },
    /// Another gateway has connected. This is the last frame.
    Replaced,
}

/// What the holder keeps for a front end's connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Number of the connection.
    pub connection: u64,
    /// State of the device.
    pub state: Bytes,
    /// Number of kept descriptors, which follow in frames [`ToGateway::Keys`].
    pub fds: u32,
}

/// An encoded frame.
#[derive(Debug, Clone)]
pub(crate) struct HolderFrame {
    /// Header and body.
    pub bytes: Bytes,
    /// The descriptors.
    pub fds: Vec<SharedFd>,
}

impl HolderFrame {
    pub fn raw(body: &[u8], fds: Vec<SharedFd>) -> HolderFrame {
        assert!(body.len() <= FRAME_BYTES_MAX - FRAME_HEADER, "parts of a frame are limited");
        assert!(fds.len() <= CALL_FDS_MAX, "descriptors of a frame are limited");
        let mut bytes = BytesMut::with_capacity(FRAME_HEADER + body.len());
        bytes.put_u32_le(body.len() as u32);
        bytes.put_u32_le(fds.len() as u32);
        bytes.put_slice(body);
        HolderFrame { bytes: bytes.freeze(), fds }
    }

    pub fn of(body: &impl Serialize, fds: Vec<SharedFd>) -> HolderFrame {
        // Serializing plain data into memory cannot fail.
        HolderFrame::raw(&postcard::to_stdvec(body).expect("plain data can be serialized"), fds)
    }
}

/// Splits a frame into body and descriptors.
pub(crate) fn open(frame: RawMessage) -> Result<(Bytes, Vec<OwnedFd>), BadFrame> {
    let field = frame.bytes[4..].first_chunk().expect("a frame has a header");
    let (stated, arrived) = (u32::from_le_bytes(*field) as usize, frame.fds.len());
    if stated != arrived {
        return Err(BadFrame::Fds { stated, arrived });
    }
    Ok((frame.bytes.slice(FRAME_HEADER..), frame.fds))
}

/// Decodes a body that [`HolderFrame::of`] has encoded.
///
/// # Errors
/// If the body has another form, or is too long or too short.
pub(crate) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, BadFrame> {
    match postcard::take_from_bytes(body) {
        Ok((decoded, [])) => Ok(decoded),
        Ok((_, rest)) => Err(BadFrame::Body(format!("{} bytes follow its end", rest.len()))),
        Err(e) => Err(BadFrame::Body(e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn versions_agree_on_the_newest_common_version() {
        let range = |min, max| Versions { min, max };
        assert_eq!(range(1, 3).common(range(2, 5)), Some(3));
        assert_eq!(range(2, 5).common(range(1, 3)), Some(3));
        assert_eq!(range(1, 1).common(range(2, 5)), None);
        assert_eq!(range(4, 3).common(range(1, 9)), None, "an empty range has nothing in common");
    }

    #[test]
    fn hello_and_welcome_keep_their_layout_in_all_versions() {
        let hello = GatewayHello(Versions { min: 1, max: 0x0203 });
        assert_eq!(&hello.encode()[..], b"outboard-holder\0\x01\0\0\0\x03\x02\0\0");
        assert_eq!(GatewayHello::decode(&hello.encode()), Ok(hello));
        for chosen in [None, Some(2)] {
            let welcome = HolderWelcome { supported: hello.0, chosen };
            assert_eq!(HolderWelcome::decode(&welcome.encode()), Ok(welcome));
        }
        assert_eq!(GatewayHello::decode(b"outboard-holder\0\x01\0\0\0"), Err(BadFrame::NotAHello));
        assert_eq!(GatewayHello::decode(b"GET / HTTP/1.1\r\n\r\n"), Err(BadFrame::NotAHello));
    }

    #[test]
    fn a_frame_states_its_descriptors() {
        let null: SharedFd = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
        let frame = HolderFrame::of(&ToGateway::Keys(vec![7]), vec![null]);
        let arrived = |fds| RawMessage { bytes: frame.bytes.clone(), fds };
        assert_eq!(open(arrived(vec![])).unwrap_err(), BadFrame::Fds { stated: 1, arrived: 0 });
        let (body, fds) = open(arrived(vec![std::fs::File::open("/dev/null").unwrap().into()])).unwrap();
        assert_eq!((decode(&body), fds.len()), (Ok(ToGateway::Keys(vec![7])), 1));
        assert!(decode::<ToGateway>(&[&body[..], &[0]].concat()).is_err());
    }

    #[test]
    fn the_longest_call_fits_into_a_frame() {
        let change = HeldChange {
            device: "d".repeat(DEVICE_NAME_BYTES_MAX),
            connection: u64::MAX,
            state: Some(vec![0; STATE_BYTES_MAX].into()),
            keep: vec![u64::MAX; CALL_FDS_MAX],
            drop: vec![u64::MAX; DROP_KEYS_MAX],
        };
        let reply = Some(vec![0; REPLY_BYTES_MAX].into());
        let body = HolderCall::Done { number: u64::MAX, change, reply, close: true };
        let call = ToHolder::Call { call: u64::MAX, body };
        assert!(HolderFrame::of(&call, Vec::new()).bytes.len() <= FRAME_BYTES_MAX);
    }

    #[test]
    fn long_parts_of_a_call_are_refused_without_repeating_them() {
        let long = "x".repeat(FRAME_BYTES_MAX);
        let framing = Framing::VHOST_USER;
        for call in [
            HolderCall::Remove { device: long.clone() },
            HolderCall::Add { device: "d".into(), path: long.clone(), framing },
            HolderCall::Add { device: long.clone(), path: "/d".into(), framing },
            HolderCall::Send { device: long, connection: 1, bytes: Bytes::from_static(b"x") },
        ] {
            let refused = call.check().unwrap_err();
            assert!(refused.to_string().len() < 400, "{refused}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bodies_never_panic(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            // The decoders may refuse the bytes.
            let _ = (decode::<ToHolder>(&body), decode::<ToGateway>(&body));
            let _ = (GatewayHello::decode(&body), HolderWelcome::decode(&body));
        }
    }
}
