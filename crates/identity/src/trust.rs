//! [`Trust`]: which identity a process proves, and whose proof it accepts.

use std::fmt;
use std::sync::{Arc, LazyLock};

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::SingleCertAndKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};

use crate::provider::provider;
use crate::{Identity, KeyHash};

/// The protocol for which two processes prove their identities. The handshake names the protocol, so
/// a handshake for one protocol cannot serve another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// The messenger, between a client and an osd.
    Messenger,
    /// The control plane: gRPC over HTTP/2.
    Control,
    /// The channel over TCP, between an osd and a store.
    Channel,
}

impl Protocol {
    const ALL: [Protocol; 3] = [Protocol::Messenger, Protocol::Control, Protocol::Channel];

    /// The name in the handshake (ALPN, RFC 7301).
    pub(crate) fn name(self) -> &'static [u8] {
        match self {
            Protocol::Messenger => b"outboard-messenger/3",
            Protocol::Control => b"h2",
            Protocol::Channel => b"outboard-channel/1",
        }
    }
}

/// Number of the tenant `main`, which every node has.
pub const MAIN_TENANT: u32 = 0;
/// Number of the node's own administrator.
pub const NODE_ADMIN: u32 = 0;

/// Who a key belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserName {
    /// Number of the user on the node: [`NODE_ADMIN`], or the number of a user in the node's map.
    pub id: u32,
    /// Number of the tenant on the node.
    pub tenant_id: u32,
    /// Name of the tenant, at most 32 bytes.
    pub tenant: String,
    /// Name of the user within the tenant.
    pub user: String,
}

impl fmt::Display for UserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tenant, self.user)
    }
}

/// A client that has proved its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The key.
    pub key: KeyHash,
    /// The user to whom the key belongs.
    pub user: UserName,
}

impl Caller {
    /// The process itself, which administers the node if the node trusts only this process.
    #[must_use]
    pub fn process() -> Caller {
        let trust = Trust::default();
        let user = trust.user_of(&trust.key()).expect("a process trusts itself");
        Caller { key: trust.key(), user }
    }
}

/// The users that a server accepts. Any thread may call it.
pub trait UserDirectory: Send + Sync {
    /// Returns the user to whom the key belongs; `None` if the server does not accept the key.
    fn find(&self, key: &KeyHash) -> Option<UserName>;
}

/// Which identity a process proves, and whose proof it accepts. Cloning is cheap.
///
/// The default trusts only this process: each end of a connection must use the default of the same
/// process. Its key exists only in the memory of the process.
#[derive(Clone)]
pub struct Trust(Arc<TrustParts>);

struct TrustParts {
    key: KeyHash,
    dials: Option<Dials>,
    accepts: Option<Accepts>,
}

/// What a client needs.
#[derive(Clone)]
struct Dials {
    /// The key of the only server to which the client connects.
    server: KeyHash,
    /// The configuration for each protocol.
    configs: [Arc<ClientConfig>; Protocol::ALL.len()],
}

/// What a server needs.
#[derive(Clone)]
struct Accepts {
    users: Arc<dyn UserDirectory>,
    /// The configuration for each protocol.
    configs: [Arc<ServerConfig>; Protocol::ALL.len()],
}

impl Dials {
    fn new(identity: &Identity, server: KeyHash) -> Dials {
        let configs = Protocol::ALL.map(|protocol| Arc::new(client_config(protocol, identity, server)));
        Dials { server, configs }
    }

    fn without_resumption(&self) -> Dials {
        let configs = self.configs.each_ref().map(|config| {
            let mut config = ClientConfig::clone(config);
            config.resumption = Resumption::disabled();
            Arc::new(config)
        });
        Dials { configs, ..self.clone() }
    }
}

impl Accepts {
    fn new(identity: &Identity, users: Arc<dyn UserDirectory>) -> Accepts {
        let configs = Protocol::ALL.map(|protocol| Arc::new(server_config(protocol, identity)));
        Accepts { users, configs }
    }

    fn without_resumption(&self) -> Accepts {
        let configs = self.configs.each_ref().map(|config| {
            let mut config = ServerConfig::clone(config);
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
            Arc::new(config)
        });
        Accepts { configs, ..self.clone() }
    }
}

impl Trust {
    /// Creates the trust of a client, which only connects to the server with the key `server`.
    #[must_use]
    pub fn client(identity: &Identity, server: KeyHash) -> Trust {
        let dials = Some(Dials::new(identity, server));
        Trust(Arc::new(TrustParts { key: identity.key(), dials, accepts: None }))
    }

    /// Creates the trust of a server, which only accepts these users.
    #[must_use]
    pub fn server(identity: &Identity, users: Arc<dyn UserDirectory>) -> Trust {
        let accepts = Some(Accepts::new(identity, users));
        Trust(Arc::new(TrustParts { key: identity.key(), dials: None, accepts }))
    }

    /// Makes every handshake a complete one. Otherwise, a handshake may continue an earlier one
    /// between the same parties, which saves the signatures.
    #[must_use]
    pub fn without_resumption(&self) -> Trust {
        let TrustParts { key, dials, accepts } = &*self.0;
        let dials = dials.as_ref().map(Dials::without_resumption);
        let accepts = accepts.as_ref().map(Accepts::without_resumption);
        Trust(Arc::new(TrustParts { key: *key, dials, accepts }))
    }

    /// Returns the hash of this side's key.
    #[must_use]
    pub fn key(&self) -> KeyHash {
        self.0.key
    }

    /// Returns the key of the only server to which this side connects; `None` if this side does not act
    /// as client.
    #[must_use]
    pub fn server_key(&self) -> Option<KeyHash> {
        self.0.dials.as_ref().map(|dials| dials.server)
    }

    /// Returns the user to whom a peer's key belongs; `None` if this side does not accept the key, or
    /// accepts no peers.
    #[must_use]
    pub fn user_of(&self, key: &KeyHash) -> Option<UserName> {
        self.0.accepts.as_ref().and_then(|accepts| accepts.users.find(key))
    }

    /// Returns the configuration of TLS for a client; `None` if this side does not act as client.
    #[must_use]
    pub fn client_config(&self, protocol: Protocol) -> Option<Arc<ClientConfig>> {
        self.0.dials.as_ref().map(|dials| Arc::clone(&dials.configs[protocol as usize]))
    }

    /// Returns the configuration of TLS for a server; `None` if this side accepts no peers.
    #[must_use]
    pub fn server_config(&self, protocol: Protocol) -> Option<Arc<ServerConfig>> {
        self.0.accepts.as_ref().map(|accepts| Arc::clone(&accepts.configs[protocol as usize]))
    }
}

impl Default for Trust {
    fn default() -> Trust {
        static WITHIN_PROCESS: LazyLock<Trust> = LazyLock::new(|| {
            let identity = Identity::of_process();
            let key = identity.key();
            let dials = Some(Dials::new(&identity, key).without_resumption());
            let accepts = Accepts::new(&identity, Arc::new(OnlyProcess(key))).without_resumption();
            Trust(Arc::new(TrustParts { key, dials, accepts: Some(accepts) }))
        });
        WITHIN_PROCESS.clone()
    }
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trust")
            .field("key", &self.0.key)
            .field("server", &self.server_key())
            .finish_non_exhaustive()
    }
}

/// Accepts one key, which belongs to a process and not to a user. The process administers the node.
#[derive(Debug, Clone, Copy)]
pub struct OnlyProcess(pub KeyHash);

impl UserDirectory for OnlyProcess {
    fn find(&self, key: &KeyHash) -> Option<UserName> {
        (*key == self.0).then(|| UserName {
            id: NODE_ADMIN,
            tenant_id: MAIN_TENANT,
            tenant: "main".into(),
            user: "process".into(),
        })
    }
}

const TLS_1_3: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS13];

fn client_config(protocol: Protocol, identity: &Identity, server: KeyHash) -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(TLS_1_3);
    let builder = builder.expect("the provider supports TLS 1.3").dangerous();
    let builder = builder.with_custom_certificate_verifier(Arc::new(PinnedServer(server)));
    let resolver = SingleCertAndKey::from(identity.certified());
    let mut config = builder.with_client_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![protocol.name().to_vec()];
    config.enable_sni = false;
    config
}

fn server_config(protocol: Protocol, identity: &Identity) -> ServerConfig {
    let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(TLS_1_3);
    let builder = builder.expect("the provider supports TLS 1.3");
    let builder = builder.with_client_cert_verifier(Arc::new(AnyKey));
    let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(identity.certified())));
    config.alpn_protocols = vec![protocol.name().to_vec()];
    config.send_tls13_tickets = 1;
    config
}

/// Signature schemes of identities: Ed25519, and ECDSA with P-256.
const SCHEMES: [SignatureScheme; 2] = [SignatureScheme::ED25519, SignatureScheme::ECDSA_NISTP256_SHA256];

fn algorithms() -> WebPkiSupportedAlgorithms {
    provider().signature_verification_algorithms
}

/// Checks a certificate that carries a key: it must be the only one, and well-formed. Its names, its
/// dates and its own signature have no meaning, because the key is the identity.
fn key_in(certificate: &CertificateDer<'_>, chain: &[CertificateDer<'_>]) -> Result<KeyHash, Error> {
    let malformed = || Error::InvalidCertificate(CertificateError::BadEncoding);
    if !chain.is_empty() {
        return Err(malformed());
    }
    KeyHash::of_certificate(certificate).ok_or_else(malformed)
}

/// Accepts only the server with this key.
#[derive(Debug)]
struct PinnedServer(KeyHash);

impl ServerCertVerifier for PinnedServer {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let found = key_in(certificate, chain)?;
        if found == self.0 {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(Error::General(found.to_string()))
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::PeerIncompatible(rustls::PeerIncompatible::ServerDoesNotSupportTls12Or13))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        SCHEMES.to_vec()
    }
}

/// Accepts each client that proves possession of a key. The server then looks the key up.
#[derive(Debug)]
struct AnyKey;

impl ClientCertVerifier for AnyKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        key_in(certificate, chain).map(|_| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOfferedOrEnabled))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        SCHEMES.to_vec()
    }
}
