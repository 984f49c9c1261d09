//! The header parts of frame bodies: one struct per kind of frame, encoded with `postcard`. The
//! rest of a body consists of the payload's checksums.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{FrameError, FrameKind};

/// A client's request for a new connection. It travels inside the encrypted part of a TLS handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Minimum and maximum protocol version that the client supports.
    pub versions: (u16, u16),
    /// Maximum lengths of a message's header and of its payload that the client accepts, in bytes.
    pub limits: (u32, u32),
    /// Credit granted to the server, in bytes.
    pub granted: u64,
}

/// The server's answer to [`Hello`]. It travels inside the encrypted part of a TLS handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Protocol version of the connection.
    pub version: u16,
    /// Number of the connection.
    pub connection: u128,
    /// Maximum lengths of a message's header, of its payload and of a bulk transfer that the server
    /// accepts, in bytes.
    pub limits: (u32, u32, u64),
    /// Credit granted to the client, in bytes.
    pub granted: u64,
    /// Transports besides the base transport on which the client may resume the connection, at most
    /// 8.
    pub paths: Vec<PathOffer>,
}

/// A client's request to resume a connection over a new transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// Number of the connection.
    pub connection: u128,
    /// A random number. Over libfabric, it equals the nonce of the connect request.
    pub nonce: [u8; 16],
    /// Number of the last sequenced frame that the client has received.
    pub received: u64,
    /// Credit granted to the server since the connection began, in bytes.
    pub granted: u64,
}

/// The server's answer to [`Resume`], also if it does not know the connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// A random number.
    pub nonce: [u8; 16],
}

/// The client's proof that the connection is its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// The proof: an HMAC-SHA-256 over the [`Resume`] and the [`Challenge`].
    pub proof: [u8; 32],
}

/// The server's answer to a right [`Proof`], with which the connection continues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resumed {
    /// Number of the last sequenced frame that the server has received.
    pub received: u64,
    /// Credit granted to the client since the connection began, in bytes.
    pub granted: u64,
    /// The server's proof: an HMAC-SHA-256 over the [`Resume`], the [`Challenge`] and this frame.
    pub proof: [u8; 32],
}

/// A transport besides the base transport that the server offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathOffer {
    /// The transport's kind, such as `ofi:verbs`; at most 32 bytes.
    pub name: String,
    /// The address at which the server listens on this transport.
    pub endpoint: String,
}

/// The reason why a server rejects a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RejectCode {
    /// The two sides have no common version, or a value in the [`Hello`] is not allowed.
    Incompatible,
    /// The server has reached its maximum number of connections, and the client's address already
    /// holds its fair share of them.
    Full,
    /// The connection to resume does not exist, or the proof is wrong.
    UnknownConnection,
    /// The server does not accept the client's key.
    UnknownKey,
}

/// The server's answer to a [`Hello`] or a [`Proof`] that it does not accept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reject {
    /// The reason, as a code for programs.
    pub code: RejectCode,
    /// The reason, as text for people.
    pub reason: String,
}

/// Grants credit and serves as a heartbeat. The acknowledgement is in the fixed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Credit granted to the receiver of the frame since the connection began, in bytes.
    pub granted: u64,
    /// How long the sender may be silent while neither side has outstanding work, in milliseconds.
    pub quiet_ms: u32,
}

/// Requests data of an offered source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullRequest {
    /// Number of the pull, chosen by the requesting side.
    pub pull: u64,
    /// Key of the offer.
    pub offer: u64,
    /// Offset of the first requested byte within the offer.
    pub offset: u64,
    /// Number of requested bytes.
    pub len: u64,
}

/// Cancels a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullCancel {
    /// Number of the pull.
    pub pull: u64,
}

/// The cause of a refused pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The offer does not exist or was withdrawn, or the range is not inside it.
    Offer,
    /// The source failed.
    Source,
}

/// Refuses a pull, or the rest of its data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullRefused {
    /// Number of the pull.
    pub pull: u64,
    /// The cause of the refusal, as a code for programs.
    pub refusal: Refusal,
    /// The reason, as text for people; at most 100 characters.
    pub reason: String,
}

/// The destination of the payload of a [`FrameKind::PullData`] frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullData {
    /// Number of the pull.
    pub pull: u64,
    /// Offset of the payload's first byte within the offer.
    pub offset: u64,
}

/// The destination of the payload of a [`FrameKind::Push`] frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Push {
    /// Key of the offer.
    pub offer: u64,
    /// Offset of the payload's first byte within the offer.
    pub offset: u64,
}

/// The range of a sink that the sender of the frame has written by a one-sided transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wrote {
    /// Key of the offer.
    pub offer: u64,
    /// Offset of the first written byte within the offer.
    pub offset: u64,
    /// Number of written bytes, at most 256 KiB (the maximum payload of a [`FrameKind::Push`]
    /// frame).
    pub len: u32,
    /// Checksums of the pieces of the written data, 4 bytes each, little endian.
    pub checksums: Vec<u8>,
}

/// Refuses pushed data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushRefused {
    /// Key of the offer.
    pub offer: u64,
    /// The reason, as text for people.
    pub reason: String,
}

/// Ends the connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Close {
    /// The reason, as text for people; at most 100 characters.
    pub reason: String,
}

/// The decoded header part of a frame: the fields of a control frame, the destination of bulk data,
/// or the header of a user's message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant is the struct of the same name")]
pub enum Body {
    Hello(Hello),
    Welcome(Welcome),
    Reject(Reject),
    /// Bytes of TLS.
    Handshake(Bytes),
    Resume(Resume),
    Challenge(Challenge),
    Proof(Proof),
    Resumed(Resumed),
    /// The header of a user's message.
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
    /// Decodes the header part of a frame of kind `kind`.
    pub(super) fn decode(kind: FrameKind, bytes: Bytes) -> Result<Body, FrameError> {
        fn parse<'a, T: Deserialize<'a>>(kind: FrameKind, bytes: &'a [u8]) -> Result<T, FrameError> {
            match postcard::take_from_bytes(bytes) {
                Ok((value, [])) => Ok(value),
                _ => Err(FrameError::Body(kind)),
            }
        }
        Ok(match kind {
            FrameKind::Message => Body::Message(bytes),
            FrameKind::Handshake => Body::Handshake(bytes),
            FrameKind::Hello => Body::Hello(parse(kind, &bytes)?),
            FrameKind::Welcome => Body::Welcome(parse(kind, &bytes)?),
            FrameKind::Reject => Body::Reject(parse(kind, &bytes)?),
            FrameKind::Resume => Body::Resume(parse(kind, &bytes)?),
            FrameKind::Challenge => Body::Challenge(parse(kind, &bytes)?),
            FrameKind::Proof => Body::Proof(parse(kind, &bytes)?),
            FrameKind::Resumed => Body::Resumed(parse(kind, &bytes)?),
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

    /// The kind of frame that has this header part.
    #[must_use]
    pub fn kind(&self) -> FrameKind {
        match self {
            Body::Hello(_) => FrameKind::Hello,
            Body::Welcome(_) => FrameKind::Welcome,
            Body::Reject(_) => FrameKind::Reject,
            Body::Handshake(_) => FrameKind::Handshake,
            Body::Resume(_) => FrameKind::Resume,
            Body::Challenge(_) => FrameKind::Challenge,
            Body::Proof(_) => FrameKind::Proof,
            Body::Resumed(_) => FrameKind::Resumed,
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
            Body::Message(bytes) | Body::Handshake(bytes) => out.extend_from_slice(bytes),
            Body::Hello(b) => append(out, b),
            Body::Welcome(b) => append(out, b),
            Body::Reject(b) => append(out, b),
            Body::Resume(b) => append(out, b),
            Body::Challenge(b) => append(out, b),
            Body::Proof(b) => append(out, b),
            Body::Resumed(b) => append(out, b),
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
