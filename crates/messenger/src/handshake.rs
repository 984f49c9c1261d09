//! The handshakes of a connection. A connection begins with a TLS handshake over the base transport,
//! which carries the [`Hello`] and the [`Welcome`] in its encrypted part. It resumes over a new
//! transport with a [`Resume`], a [`Challenge`] and two proofs, by which each side shows that it took
//! part in the first handshake.

use std::io;

use base::block::Payload;
use bytes::Bytes;
use identity::{Handshake, IdentityError, KeyHash, ProofKey, Protocol, Trust};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::Limits;
use crate::frame::{
    self, Body, Challenge, FrameHeader, FrameKind, HEADER_LEN, Hello, MAX_CONTROL, Proof, Reject, RejectCode,
    Resume, Resumed, Welcome,
};
use crate::transport::packets::PacketContent;
use crate::transport::{Road, Wire};

/// Minimum and maximum protocol version that this side supports.
pub(crate) const VERSIONS: (u16, u16) = (3, 3);

/// The limits of the frames of a handshake.
const LIMITS: Limits =
    Limits { max_header: MAX_CONTROL, max_inline: 0, max_bulk: 0, eager: 0, one_sided: false };

/// Label of the client's proof that it may resume a connection.
const CLIENT_RESUMES: &str = "outboard resume, client";

/// Label of the server's proof that it has resumed a connection.
const SERVER_RESUMES: &str = "outboard resume, server";

/// The reason why a handshake failed.
#[derive(Debug)]
pub(crate) enum HandshakeError {
    /// The transport broke or was too slow.
    Transport { endpoint: String, reason: String },
    /// The peer rejected the handshake.
    Rejected(Reject),
    /// The peer could not prove its identity.
    Identity(IdentityError),
    /// The peer violated the protocol.
    Protocol(String),
}

impl From<IdentityError> for HandshakeError {
    fn from(e: IdentityError) -> HandshakeError {
        HandshakeError::Identity(e)
    }
}

impl HandshakeError {
    /// Whether a further attempt cannot succeed. A handshake that an attacker disturbs may succeed in
    /// the next attempt.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            HandshakeError::Transport { .. } => false,
            HandshakeError::Identity(e) => !matches!(e, IdentityError::Handshake(_)),
            HandshakeError::Rejected(_) | HandshakeError::Protocol(_) => true,
        }
    }
}

/// Reads one frame of a handshake, and no byte beyond it.
async fn read(wire: &mut Wire) -> Result<Body, HandshakeError> {
    let transport = |reason: String| HandshakeError::Transport { endpoint: wire.address.clone(), reason };
    // A damaged frame may arrive intact on the next attempt, so treat damage like a broken
    // transport.
    let broken = |e: frame::FrameError| match e.is_damage() {
        true => transport(e.to_string()),
        false => HandshakeError::Protocol(e.to_string()),
    };
    match &mut wire.road {
        Road::Stream(reader, _) => {
            let mut fixed = [0; HEADER_LEN];
            reader.read_exact(&mut fixed).await.map_err(|e| transport(e.to_string()))?;
            let header = FrameHeader::decode(&fixed, &LIMITS).map_err(broken)?;
            check_kind(&header)?;
            let mut body = vec![0; header.body_len()];
            reader.read_exact(&mut body).await.map_err(|e| transport(e.to_string()))?;
            Ok(header.decode_body(Bytes::from(body)).map_err(broken)?.0)
        }
        Road::Packets(link) => {
            let packet = link.receive().await.map_err(|e| transport(e.0))?;
            match frame::decode(&packet, &LIMITS).map_err(broken)? {
                Some((frame, len)) if len == packet.len() => check_kind(&frame.header).map(|()| frame.body),
                _ => {
                    Err(HandshakeError::Protocol("a packet of the handshake does not hold one frame".into()))
                }
            }
        }
    }
}

/// Checks that an unencrypted frame of this kind belongs to a handshake.
fn check_kind(header: &FrameHeader) -> Result<(), HandshakeError> {
    match header.kind {
        FrameKind::Handshake
        | FrameKind::Resume
        | FrameKind::Challenge
        | FrameKind::Proof
        | FrameKind::Resumed
        | FrameKind::Reject => Ok(()),
        FrameKind::Hello => Err(HandshakeError::Protocol(OLD_CLIENT.into())),
        kind => Err(HandshakeError::Protocol(format!("the peer sent a {kind:?} frame before the handshake"))),
    }
}

/// Why a client of an earlier version is rejected.
const OLD_CLIENT: &str = "the client does not prove its identity; use a client of the node's version";

/// Writes frames of a handshake.
pub(crate) async fn write(wire: &mut Wire, frames: &[Body]) -> io::Result<()> {
    match &mut wire.road {
        Road::Stream(_, writer) => {
            let mut out = Vec::new();
            frames.iter().for_each(|body| encode(&mut out, body));
            writer.write_all(&out).await?;
            writer.flush().await
        }
        Road::Packets(link) => {
            for body in frames {
                let mut out = Vec::new();
                encode(&mut out, body);
                let sent = link.send(&[PacketContent::Copied(&out)], false).await;
                sent.map_err(|e| io::Error::other(e.0))?;
            }
            Ok(())
        }
    }
}

fn encode(out: &mut Vec<u8>, body: &Body) {
    frame::encode_head(out, body.kind(), 0, 0, &Payload::default(), |o| body.encode(o));
}

/// A TLS handshake over a wire. Once the peer has proved its key, frames can be exchanged in encrypted
/// form.
pub(crate) struct EncryptedExchange<'a> {
    wire: &'a mut Wire,
    tls: Handshake,
    /// Decrypted bytes that do not form a whole frame yet.
    decrypted: Vec<u8>,
}

impl<'a> EncryptedExchange<'a> {
    /// Begins as client.
    pub(crate) fn client(wire: &'a mut Wire, trust: &Trust) -> Result<EncryptedExchange<'a>, HandshakeError> {
        Ok(EncryptedExchange {
            wire,
            tls: Handshake::client(trust, Protocol::Messenger)?,
            decrypted: Vec::new(),
        })
    }

    /// Begins as server, with the first bytes of the client.
    pub(crate) async fn server(
        wire: &'a mut Wire,
        trust: &Trust,
        first: &[u8],
    ) -> Result<EncryptedExchange<'a>, HandshakeError> {
        let mut exchange = EncryptedExchange {
            wire,
            tls: Handshake::server(trust, Protocol::Messenger)?,
            decrypted: Vec::new(),
        };
        exchange.input(first).await?;
        Ok(exchange)
    }

    /// Waits until the peer has proved its key, and returns the key. This side's last bytes of the
    /// handshake travel with the next frame.
    pub(crate) async fn prove(&mut self) -> Result<KeyHash, HandshakeError> {
        loop {
            if let Some(peer) = self.tls.peer() {
                return Ok(peer);
            }
            self.flush().await?;
            self.advance().await?;
        }
    }

    /// Returns the key that only the two sides have.
    pub(crate) fn proof_key(&self) -> ProofKey {
        self.tls.proof_key()
    }

    /// Sends an encrypted frame.
    pub(crate) async fn send(&mut self, body: &Body) -> Result<(), HandshakeError> {
        let mut frame = Vec::new();
        encode(&mut frame, body);
        self.tls.write(&frame);
        self.flush().await
    }

    /// Receives an encrypted frame.
    pub(crate) async fn receive(&mut self) -> Result<Body, HandshakeError> {
        loop {
            self.decrypted.extend(self.tls.read());
            let bytes = Bytes::copy_from_slice(&self.decrypted);
            // Encrypted bytes cannot be damaged on the way.
            let decoded = frame::decode(&bytes, &LIMITS);
            match decoded.map_err(|e| HandshakeError::Protocol(e.to_string()))? {
                Some((frame, len)) if len == bytes.len() => return Ok(frame.body),
                Some(_) => return Err(HandshakeError::Protocol("bytes follow the encrypted frame".into())),
                None => self.advance().await?,
            }
        }
    }

    /// Processes the next bytes of the peer.
    async fn advance(&mut self) -> Result<(), HandshakeError> {
        match read(self.wire).await? {
            Body::Handshake(bytes) => self.input(&bytes).await,
            Body::Reject(reject) => Err(HandshakeError::Rejected(reject)),
            other => Err(HandshakeError::Protocol(format!(
                "the peer sent {:?} during the TLS handshake",
                other.kind()
            ))),
        }
    }

    async fn input(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let processed = self.tls.input(bytes);
        if processed.is_err() {
            // TLS may have an alert for the peer. The peer may have disconnected; ignore the error.
            let _ = self.flush().await;
        }
        Ok(processed?)
    }

    async fn flush(&mut self) -> Result<(), HandshakeError> {
        let output = Bytes::from(self.tls.output());
        let pieces = (0..output.len()).step_by(MAX_CONTROL);
        let frames = pieces.map(|at| Body::Handshake(output.slice(at..output.len().min(at + MAX_CONTROL))));
        let written = write(self.wire, &frames.collect::<Vec<_>>()).await;
        written.map_err(|e| broken(self.wire, &e))
    }
}

fn broken(wire: &Wire, e: &io::Error) -> HandshakeError {
    HandshakeError::Transport { endpoint: wire.address.clone(), reason: e.to_string() }
}

/// Begins a connection as client. Returns the server's answer, and the key that only the two sides
/// have.
pub(crate) async fn begin(
    wire: &mut Wire,
    trust: &Trust,
    hello: Hello,
) -> Result<(Welcome, ProofKey, KeyHash), HandshakeError> {
    let mut exchange = EncryptedExchange::client(wire, trust)?;
    let server = exchange.prove().await?;
    exchange.send(&Body::Hello(hello)).await?;
    match exchange.receive().await? {
        Body::Welcome(welcome) => Ok((welcome, exchange.proof_key(), server)),
        Body::Reject(reject) => Err(HandshakeError::Rejected(reject)),
        other => {
            Err(HandshakeError::Protocol(format!("the server sent {:?} instead of Welcome", other.kind())))
        }
    }
}

/// Resumes a connection as client.
pub(crate) async fn resume(
    wire: &mut Wire,
    key: &ProofKey,
    resume: Resume,
) -> Result<Resumed, HandshakeError> {
    let unexpected = |body: Body| match body {
        Body::Reject(reject) => HandshakeError::Rejected(reject),
        other => {
            HandshakeError::Protocol(format!("the server sent {:?} to a client that resumes", other.kind()))
        }
    };
    write(wire, &[Body::Resume(resume.clone())]).await.map_err(|e| broken(wire, &e))?;
    let challenge = match read(wire).await? {
        Body::Challenge(challenge) => challenge,
        other => return Err(unexpected(other)),
    };
    let proof = client_proof(key, &resume, &challenge);
    write(wire, &[Body::Proof(Proof { proof })]).await.map_err(|e| broken(wire, &e))?;
    match read(wire).await? {
        Body::Resumed(resumed) if is_right(key, &resume, &challenge, &resumed) => Ok(resumed),
        Body::Resumed(_) => {
            let reason = "the server's proof of the connection is wrong".into();
            Err(HandshakeError::Identity(IdentityError::Handshake(reason)))
        }
        other => Err(unexpected(other)),
    }
}

/// The first frame of a client.
pub(crate) enum FirstFrame {
    /// The client begins a connection.
    Begin(Bytes),
    /// The client resumes a connection.
    Resume(Resume),
}

/// Reads the first frame of a client. The client of an earlier version is told why it is rejected.
pub(crate) async fn read_first(wire: &mut Wire) -> Result<FirstFrame, HandshakeError> {
    match read(wire).await {
        Ok(Body::Handshake(bytes)) => Ok(FirstFrame::Begin(bytes)),
        Ok(Body::Resume(resume)) => Ok(FirstFrame::Resume(resume)),
        Ok(other) => {
            Err(HandshakeError::Protocol(format!("a client's first frame is not {:?}", other.kind())))
        }
        Err(HandshakeError::Protocol(reason)) if reason == OLD_CLIENT => {
            let reject = Reject { code: RejectCode::Incompatible, reason };
            // The peer may have disconnected already; ignore the error.
            let _ = write(wire, &[Body::Reject(reject.clone())]).await;
            Err(HandshakeError::Rejected(reject))
        }
        Err(e) => Err(e),
    }
}

/// Sends a challenge to a client that resumes a connection, and receives the client's proof.
pub(crate) async fn challenge(wire: &mut Wire) -> Result<(Challenge, Proof), HandshakeError> {
    let challenge = Challenge { nonce: base::entropy::random() };
    write(wire, &[Body::Challenge(challenge.clone())]).await.map_err(|e| broken(wire, &e))?;
    match read(wire).await? {
        Body::Proof(proof) => Ok((challenge, proof)),
        other => {
            Err(HandshakeError::Protocol(format!("the client sent {:?} instead of a proof", other.kind())))
        }
    }
}

/// Returns whether a client's proof is right.
pub(crate) fn proves(key: &ProofKey, resume: &Resume, challenge: &Challenge, proof: &Proof) -> bool {
    let (numbers, nonces) = proven(resume, challenge);
    key.verify(CLIENT_RESUMES, &[&numbers, &nonces], &proof.proof)
}

/// Makes the server's answer that resumes a connection.
pub(crate) fn resumed(
    key: &ProofKey,
    resume: &Resume,
    challenge: &Challenge,
    (received, granted): (u64, u64),
) -> Resumed {
    let (numbers, nonces) = proven(resume, challenge);
    let own = [received.to_le_bytes(), granted.to_le_bytes()];
    let proof = key.prove(SERVER_RESUMES, &[&numbers, &nonces, own.as_flattened()]);
    Resumed { received, granted, proof }
}

fn client_proof(key: &ProofKey, resume: &Resume, challenge: &Challenge) -> [u8; 32] {
    let (numbers, nonces) = proven(resume, challenge);
    key.prove(CLIENT_RESUMES, &[&numbers, &nonces])
}

fn is_right(key: &ProofKey, resume: &Resume, challenge: &Challenge, resumed: &Resumed) -> bool {
    let (numbers, nonces) = proven(resume, challenge);
    let own = [resumed.received.to_le_bytes(), resumed.granted.to_le_bytes()];
    key.verify(SERVER_RESUMES, &[&numbers, &nonces, own.as_flattened()], &resumed.proof)
}

/// What both proofs cover: the numbers in the request, and the random numbers of both sides.
fn proven(resume: &Resume, challenge: &Challenge) -> ([u8; 32], [u8; 32]) {
    let mut numbers = [0; 32];
    numbers[..16].copy_from_slice(&resume.connection.to_le_bytes());
    numbers[16..24].copy_from_slice(&resume.received.to_le_bytes());
    numbers[24..].copy_from_slice(&resume.granted.to_le_bytes());
    let mut nonces = [0; 32];
    nonces[..16].copy_from_slice(&resume.nonce);
    nonces[16..].copy_from_slice(&challenge.nonce);
    (numbers, nonces)
}
