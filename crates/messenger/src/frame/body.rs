//! The bodies of frames: the content of each kind, encoded with `postcard`.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{FrameError, FrameKind};

/// A client's first frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Lowest and highest protocol version that the client speaks.
    pub versions: (u16, u16),
    /// Features wanted.
    pub features: u64,
    /// Name of the tenant, at most 32 bytes.
    pub tenant: String,
    /// Random: tells this attempt from others in logs, and is repeated in the answer.
    pub nonce: [u8; 16],
    /// Longest header and payload of messages that the client takes, in bytes.
    pub limits: (u32, u32),
    /// Credits granted to the server since the session began, in bytes.
    pub granted: u64,
    /// The session to go on with; `None` for a new one.
    pub resume: Option<Resume>,
}

/// Proof and state of a session to be resumed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// The session.
    pub session: u128,
    /// What the server gave out with it.
    pub secret: [u8; 16],
    /// Number of the last sequenced frame received.
    pub received: u64,
}

/// The server's answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Protocol version of the session.
    pub version: u16,
    /// Features that both sides have.
    pub features: u64,
    /// That of the [`Hello`].
    pub nonce: [u8; 16],
    /// The session.
    pub session: u128,
    /// To be presented when the session is resumed.
    pub secret: [u8; 16],
    /// Longest header and payload of messages, in bytes, and longest bulk transfer that the server takes.
    pub limits: (u32, u32, u64),
    /// Credits granted to the client since the session began, in bytes.
    pub granted: u64,
    /// Number of the last sequenced frame received.
    pub received: u64,
    /// Other transports over which the client may go on with the session, at most 8.
    pub paths: Vec<PathOffer>,
}

/// A transport that a server has beside the one of the handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathOffer {
    /// What kind, e.g. `ofi:verbs`; at most 32 bytes.
    pub name: String,
    /// Where it listens.
    pub endpoint: String,
}

/// Why a server does not go on with a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RejectCode {
    /// No common version, or the [`Hello`] is malformed.
    Incompatible,
    /// The server has as many sessions as it takes.
    Full,
    /// The session to be resumed is not there, or the secret is wrong.
    UnknownSession,
}

/// The server's answer to a [`Hello`] that it does not accept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reject {
    /// For programs.
    pub code: RejectCode,
    /// For people.
    pub reason: String,
}

/// Credits, and a sign of life. The acknowledgement is in the fixed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Credits granted to the receiver of the frame since the session began, in bytes.
    pub granted: u64,
    /// How long the sender may be silent while neither side wants anything of the other, in milliseconds.
    pub quiet_ms: u32,
}

/// Asks for data of an offered source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullRequest {
    /// Number of the pull, chosen by who asks.
    pub pull: u64,
    /// The offer's key.
    pub offer: u64,
    /// First byte within the offer.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// The data of a pull is wanted no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullCancel {
    /// The pull.
    pub pull: u64,
}

/// Whose fault a refusal is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// There is no such offer (any more), or it has no such range.
    Offer,
    /// The source failed.
    Source,
}

/// There will be no (more) data for a pull.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullRefused {
    /// The pull.
    pub pull: u64,
    /// Whose fault.
    pub refusal: Refusal,
    /// For people; at most 200 bytes.
    pub reason: String,
}

/// Where the payload of a [`Kind::PullData`] frame belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullData {
    /// The pull.
    pub pull: u64,
    /// First byte, within the offer.
    pub offset: u64,
}

/// Where the payload of a [`Kind::Push`] frame belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Push {
    /// The offer's key.
    pub offer: u64,
    /// First byte, within the offer.
    pub offset: u64,
}

/// Where data was written by a one-sided transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wrote {
    /// The offer's key.
    pub offer: u64,
    /// First byte, within the offer.
    pub offset: u64,
    /// Number of bytes, at most that of a [`Kind::Push`] frame's payload.
    pub len: u32,
    /// Checksums of the pieces, 4 bytes each, little endian.
    pub checksums: Vec<u8>,
}

/// Pushed data was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushRefused {
    /// The offer's key.
    pub offer: u64,
    /// For people; at most 200 bytes.
    pub reason: String,
}

/// The session ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Close {
    /// For people; at most 200 bytes.
    pub reason: String,
}

/// A frame's header part.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant is the struct of the same name")]
pub enum Body {
    Hello(Hello),
    Welcome(Welcome),
    Reject(Reject),
    /// The header of the users' message.
    Message(Bytes),
    Push(Push),
    Wrote(Wrote),
    Window(Window),
    PullRequest(PullRequest),
    PullCancel(PullCancel),
    PullRefused(PullRefused),
    PushRefused(PushRefused),
    Close(Close),
    PullData(PullData),
}

impl Body {
    /// Reads the header part of a frame of kind `kind`.
    pub(super) fn decode(kind: FrameKind, bytes: Bytes) -> Result<Body, FrameError> {
        fn parse<'a, T: Deserialize<'a>>(kind: FrameKind, bytes: &'a [u8]) -> Result<T, FrameError> {
            match postcard::take_from_bytes(bytes) {
                Ok((value, [])) => Ok(value),
                _ => Err(FrameError::Body(kind)),
            }
        }
        Ok(match kind {
            FrameKind::Message => Body::Message(bytes),
            FrameKind::Hello => Body::Hello(parse(kind, &bytes)?),
            FrameKind::Welcome => Body::Welcome(parse(kind, &bytes)?),
            FrameKind::Reject => Body::Reject(parse(kind, &bytes)?),
            FrameKind::Push => Body::Push(parse(kind, &bytes)?),
            FrameKind::Wrote => Body::Wrote(parse(kind, &bytes)?),
            FrameKind::Window => Body::Window(parse(kind, &bytes)?),
            FrameKind::PullRequest => Body::PullRequest(parse(kind, &bytes)?),
            FrameKind::PullCancel => Body::PullCancel(parse(kind, &bytes)?),
            FrameKind::PullRefused => Body::PullRefused(parse(kind, &bytes)?),
            FrameKind::PushRefused => Body::PushRefused(parse(kind, &bytes)?),
            FrameKind::Close => Body::Close(parse(kind, &bytes)?),
            FrameKind::PullData => Body::PullData(parse(kind, &bytes)?),
        })
    }

    /// The kind of frame that this is the header part of.
    #[must_use]
    pub fn kind(&self) -> FrameKind {
        match self {
            Body::Hello(_) => FrameKind::Hello,
            Body::Welcome(_) => FrameKind::Welcome,
            Body::Reject(_) => FrameKind::Reject,
            Body::Message(_) => FrameKind::Message,
            Body::Push(_) => FrameKind::Push,
            Body::Wrote(_) => FrameKind::Wrote,
            Body::Window(_) => FrameKind::Window,
            Body::PullRequest(_) => FrameKind::PullRequest,
            Body::PullCancel(_) => FrameKind::PullCancel,
            Body::PullRefused(_) => FrameKind::PullRefused,
            Body::PushRefused(_) => FrameKind::PushRefused,
            Body::Close(_) => FrameKind::Close,
            Body::PullData(_) => FrameKind::PullData,
        }
    }

    /// Appends the header part to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Body::Message(header) => out.extend_from_slice(header),
            Body::Hello(b) => append(out, b),
            Body::Welcome(b) => append(out, b),
            Body::Reject(b) => append(out, b),
            Body::Push(b) => append(out, b),
            Body::Wrote(b) => append(out, b),
            Body::Window(b) => append(out, b),
            Body::PullRequest(b) => append(out, b),
            Body::PullCancel(b) => append(out, b),
            Body::PullRefused(b) => append(out, b),
            Body::PushRefused(b) => append(out, b),
            Body::Close(b) => append(out, b),
            Body::PullData(b) => append(out, b),
        }
    }
}

fn append<T: Serialize>(out: &mut Vec<u8>, value: &T) {
    postcard::to_io(value, out).expect("plain structs always encode into memory");
}
