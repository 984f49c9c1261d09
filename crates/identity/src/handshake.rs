//! [`Handshake`]: TLS 1.3 over any way of exchanging bytes.

use std::io::{Read, Write};

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, CommonState, Connection, Error, HandshakeKind, ServerConnection};

use crate::{IdentityError, KeyHash, ProofKey, Protocol, Trust};

/// Maximum number of bytes that a side accepts during a handshake.
pub const MAX_HANDSHAKE_BYTES: usize = 16 << 10;

/// Label of the exporter (RFC 8446, section 7.5) from which both sides derive their [`ProofKey`].
const EXPORTER: &[u8] = b"EXPORTER-outboard-proof";

/// One side of a TLS 1.3 handshake in which both sides prove possession of their keys.
///
/// The handshake does no I/O. The user passes the bytes between the two sides: what
/// [`output`](Handshake::output) returns on one side is the [`input`](Handshake::input) of the
/// other. The client begins. When [`peer`](Handshake::peer) returns a key, this side has verified
/// the peer's proof, and the two sides can exchange short encrypted messages.
///
/// A server that returns a key knows that the client has verified the server's proof. The opposite
/// is true only after the client has received a message.
pub struct Handshake {
    connection: Connection,
    protocol: Protocol,
    /// The key of the server that a client expects.
    server: Option<KeyHash>,
    /// Number of bytes that the peer may still send.
    allowance: usize,
}

impl Handshake {
    /// Begins a handshake as client.
    ///
    /// # Errors
    /// [`IdentityError::NoRole`] if this side accepts no server.
    pub fn client(trust: &Trust, protocol: Protocol) -> Result<Handshake, IdentityError> {
        let config = trust.client_config(protocol).ok_or(IdentityError::NoRole("client"))?;
        let connection = ClientConnection::new(config, server_name()).map_err(|e| refused(&e))?;
        Ok(Handshake::over(Connection::Client(connection), protocol, trust.server_key()))
    }

    /// Begins a handshake as server.
    ///
    /// # Errors
    /// [`IdentityError::NoRole`] if this side accepts no clients.
    pub fn server(trust: &Trust, protocol: Protocol) -> Result<Handshake, IdentityError> {
        let config = trust.server_config(protocol).ok_or(IdentityError::NoRole("server"))?;
        let connection = ServerConnection::new(config).map_err(|e| refused(&e))?;
        Ok(Handshake::over(Connection::Server(connection), protocol, None))
    }

    fn over(connection: Connection, protocol: Protocol, server: Option<KeyHash>) -> Handshake {
        Handshake { connection, protocol, server, allowance: MAX_HANDSHAKE_BYTES }
    }

    /// Processes bytes of the peer. After an error, [`output`](Handshake::output) may return an
    /// alert for the peer, and the handshake must be dropped.
    ///
    /// # Errors
    /// If the peer's proof is wrong, or if the bytes violate the protocol.
    pub fn input(&mut self, mut bytes: &[u8]) -> Result<(), IdentityError> {
        let limit = MAX_HANDSHAKE_BYTES;
        self.allowance =
            self.allowance.checked_sub(bytes.len()).ok_or(IdentityError::HandshakeTooLong { limit })?;
        while !bytes.is_empty() {
            match self.connection.read_tls(&mut bytes) {
                Ok(0) => return Err(IdentityError::Handshake("the peer has ended the handshake".into())),
                Ok(_) => {}
                Err(e) => return Err(IdentityError::Handshake(e.to_string())),
            }
            self.connection.process_new_packets().map_err(|e| self.failure(&e))?;
        }
        if !self.connection.is_handshaking() && self.connection.alpn_protocol() != Some(self.protocol.name())
        {
            return Err(IdentityError::Handshake("the peer did not name the protocol".into()));
        }
        Ok(())
    }

    fn failure(&self, e: &Error) -> IdentityError {
        server_refused(e, self.server)
    }

    /// Returns the bytes for the peer; empty if there are none.
    #[must_use]
    pub fn output(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while self.connection.wants_write() {
            self.connection.write_tls(&mut bytes).expect("a vector accepts all bytes");
        }
        bytes
    }

    /// Returns the key that the peer has proved; `None` until then.
    #[must_use]
    pub fn peer(&self) -> Option<KeyHash> {
        proven_key(&self.connection)
    }

    /// Appends an encrypted message to the output.
    ///
    /// # Panics
    /// If the peer has not proved its key yet.
    pub fn write(&mut self, message: &[u8]) {
        assert!(self.peer().is_some(), "only a peer with a proven key receives messages");
        self.connection.writer().write_all(message).expect("a short message fits into the buffer");
    }

    /// Takes the decrypted bytes that the peer has sent since the last call.
    #[must_use]
    pub fn read(&mut self) -> Vec<u8> {
        let mut message = Vec::new();
        // The end of the available data is an error of kind `WouldBlock`.
        let _ = self.connection.reader().read_to_end(&mut message);
        message
    }

    /// Returns the key that only this side and the peer have.
    ///
    /// # Panics
    /// If the peer has not proved its key yet.
    #[must_use]
    pub fn proof_key(&self) -> ProofKey {
        let secret = self.connection.export_keying_material([0; 32], EXPORTER, None);
        ProofKey::new(&secret.expect("the handshake is complete"))
    }

    /// Returns whether the handshake continued an earlier one, so that it needed no signatures.
    #[must_use]
    pub fn is_resumed(&self) -> bool {
        self.connection.handshake_kind() == Some(HandshakeKind::Resumed)
    }
}

/// Returns the name of every server in TLS. It has no meaning, because the server's key is pinned, and
/// the handshake does not send it.
///
/// # Panics
/// Never: the name is valid.
#[must_use]
pub fn server_name() -> ServerName<'static> {
    ServerName::try_from("outboard").expect("a valid name")
}

/// Returns the reason why a client that expects the key `server` failed with `e`.
#[must_use]
pub fn server_refused(e: &Error, server: Option<KeyHash>) -> IdentityError {
    match (e, server) {
        // Only the check of the server's key reports a general error, with the key that it found.
        (Error::General(found), Some(expected)) => match found.parse() {
            Ok(found) => IdentityError::OtherServer { expected, found },
            Err(_) => refused(e),
        },
        _ => refused(e),
    }
}

/// Returns the key that the peer of a connection has proved; `None` before the end of the handshake.
#[must_use]
pub fn proven_key(connection: &CommonState) -> Option<KeyHash> {
    if connection.is_handshaking() {
        return None;
    }
    connection.peer_certificates()?.first().and_then(KeyHash::of_certificate)
}

fn refused(e: &Error) -> IdentityError {
    IdentityError::Handshake(e.to_string())
}
