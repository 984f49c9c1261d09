//! A client that begins connections frame by frame, for tests that attack the handshake.

use base::block::Payload;
use bytes::Bytes;
use identity::{Handshake, ProofKey, Protocol, Trust};
use outboard_messenger::frame::{self, Body, Challenge, Hello, MAX_CONTROL, Proof, Resume};
use outboard_messenger::{ConnectionConfig, Limits};

/// The TLS handshake of a client, and the encrypted frames in it.
pub(crate) struct Beginning {
    tls: Handshake,
    decrypted: Vec<u8>,
    hello: Option<Hello>,
}

impl Beginning {
    /// Begins with this identity, and sends this `Hello` when the server has proved its identity.
    pub(crate) fn new(trust: &Trust, hello: Hello) -> Beginning {
        let tls = Handshake::client(trust, Protocol::Messenger).expect("this side has an identity");
        Beginning { tls, decrypted: Vec::new(), hello: Some(hello) }
    }

    /// Returns the encoded frames for the server.
    pub(crate) fn output(&mut self) -> Vec<u8> {
        let output = Bytes::from(self.tls.output());
        let pieces = (0..output.len()).step_by(MAX_CONTROL);
        let frame = |at| Body::Handshake(output.slice(at..output.len().min(at + MAX_CONTROL)));
        pieces.flat_map(|at| encode(&frame(at))).collect()
    }

    /// Processes a frame of the server. Returns the server's answer to the `Hello` once it has
    /// arrived.
    pub(crate) fn frame(&mut self, body: &Body) -> Option<Body> {
        let Body::Handshake(bytes) = body else { panic!("{body:?} during the TLS handshake") };
        self.tls.input(bytes).expect("the server is honest");
        if self.tls.peer().is_some()
            && let Some(hello) = self.hello.take()
        {
            self.tls.write(&encode(&Body::Hello(hello)));
        }
        self.decrypted.extend(self.tls.read());
        let limits: Limits = ConnectionConfig::default().limits;
        let decoded = frame::decode(&Bytes::copy_from_slice(&self.decrypted), &limits);
        decoded.expect("the server writes valid frames").map(|(frame, _)| frame.body)
    }

    /// The key that only this client and the server have.
    pub(crate) fn key(&self) -> ProofKey {
        self.tls.proof_key()
    }
}

/// A `Hello` with the usual values.
pub(crate) fn hello() -> Hello {
    Hello { versions: (3, 3), limits: (65_536, 65_536), granted: 1 << 20 }
}

/// The right proof of a client that resumes.
pub(crate) fn proof(key: &ProofKey, resume: &Resume, challenge: &Challenge) -> Body {
    let numbers =
        [&resume.connection.to_le_bytes()[..], &resume.received.to_le_bytes(), &resume.granted.to_le_bytes()];
    let nonces = [resume.nonce, challenge.nonce];
    let proof = key.prove("outboard resume, client", &[&numbers.concat(), nonces.as_flattened()]);
    Body::Proof(Proof { proof })
}

fn encode(body: &Body) -> Vec<u8> {
    let mut out = Vec::new();
    frame::encode_head(&mut out, body.kind(), 0, 0, &Payload::default(), |o| body.encode(o));
    out
}
