//! The handshake by which a connection begins, or resumes over a new transport: one frame each way.

use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::config::ConnectionConfig;
use crate::connection::{Negotiated, Shared};
use crate::frame::{
    self, Body, FrameHeader, FrameKind, HEADER_LEN, Hello, MAX_CONTROL, PathOffer, Reject, RejectCode,
    Resume, Welcome,
};
use crate::home::Home;
use crate::paths::{CommonPath, MAX_PATH_NAME, MAX_PATHS, PATH_TIMEOUT, Path};
use crate::transport::packets::PacketContent;
use crate::transport::{ConnectClaim, Road, Transport, Wire};
use crate::{ConnectOptions, Limits, MessengerError, PeerInfo};

/// Minimum and maximum protocol version that this side supports.
const VERSIONS: (u16, u16) = (2, 2);

/// The reason why a handshake failed.
#[derive(Debug)]
pub(crate) enum HandshakeError {
    /// The transport broke or was too slow.
    Transport { endpoint: String, reason: String },
    /// The peer rejected the handshake.
    Rejected(Reject),
    /// The peer violated the protocol.
    Protocol(String),
}

impl HandshakeError {
    fn is_final(&self) -> bool {
        !matches!(self, HandshakeError::Transport { .. })
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
    let limits = Limits { max_header: MAX_CONTROL, max_inline: 0, max_bulk: 0, eager: 0, one_sided: false };
    let check = |header: &FrameHeader| match header.kind {
        FrameKind::Hello | FrameKind::Welcome | FrameKind::Reject => Ok(()),
        kind => Err(HandshakeError::Protocol(format!("the peer sent a {kind:?} frame before the handshake"))),
    };
    match &mut wire.road {
        Road::Stream(reader, _) => {
            let mut fixed = [0; HEADER_LEN];
            reader.read_exact(&mut fixed).await.map_err(|e| transport(e.to_string()))?;
            let header = FrameHeader::decode(&fixed, &limits).map_err(broken)?;
            check(&header)?;
            let mut body = vec![0; header.body_len()];
            reader.read_exact(&mut body).await.map_err(|e| transport(e.to_string()))?;
            Ok(header.decode_body(Bytes::from(body)).map_err(broken)?.0)
        }
        Road::Packets(link) => {
            let packet = link.receive().await.map_err(|e| transport(e.0))?;
            match frame::decode(&packet, &limits).map_err(broken)? {
                Some((frame, len)) if len == packet.len() => check(&frame.header).map(|()| frame.body),
                _ => {
                    Err(HandshakeError::Protocol("a packet of the handshake does not hold one frame".into()))
                }
            }
        }
    }
}

/// Writes one frame of a handshake.
pub(crate) async fn write(wire: &mut Wire, body: &Body) -> std::io::Result<()> {
    let mut out = Vec::new();
    frame::encode_head(&mut out, body.kind(), 0, 0, &Payload::default(), |o| body.encode(o));
    match &mut wire.road {
        Road::Stream(_, writer) => {
            writer.write_all(&out).await?;
            writer.flush().await
        }
        Road::Packets(link) => {
            link.send(&[PacketContent::Copied(&out)], false).await.map_err(|e| std::io::Error::other(e.0))
        }
    }
}

/// Reads and checks the first frame of a client.
pub(crate) async fn read_hello(wire: &mut Wire) -> Result<Hello, HandshakeError> {
    match read(wire).await? {
        Body::Hello(hello) => Ok(hello),
        other => Err(HandshakeError::Protocol(format!("the peer sent {:?} instead of Hello", other.kind()))),
    }
}

/// Checks whether this side can accept the [`Hello`]. `claim` is the identity in the transport's
/// connect request, if the transport has such a request.
pub(crate) fn check_hello(hello: &Hello, claim: Option<&ConnectClaim>) -> Result<(), Reject> {
    let no = |reason: String| Err(Reject { code: RejectCode::Incompatible, reason });
    if claim.is_some_and(|claim| claim.tenant != hello.tenant || claim.nonce != hello.nonce) {
        return no("the tenant or the nonce in the Hello differs from the connect request".to_owned());
    }
    if hello.versions.0 > VERSIONS.1 || hello.versions.1 < VERSIONS.0 {
        return no(format!(
            "no common protocol version: the client supports {:?}, the server supports {VERSIONS:?}",
            hello.versions
        ));
    }
    if hello.tenant.len() > ConnectClaim::MAX_TENANT {
        return no(format!("the tenant's name is longer than {} bytes", ConnectClaim::MAX_TENANT));
    }
    if hello.resume.is_none() && hello.granted > crate::config::MAX_CREDIT_BYTES {
        return no("the client grants more than 2 GiB of credit".to_owned());
    }
    Ok(())
}

/// Determines the values of a new connection over `wire`, on the server's side. Returns the agreed
/// values, and the [`Welcome`] for the client.
pub(crate) fn settle(
    hello: Hello,
    wire: &Wire,
    config: &ConnectionConfig,
    paths: &[PathOffer],
) -> (Negotiated, Body) {
    let (connection, secret): (u128, [u8; 16]) = base::entropy::random();
    let limits = Limits {
        max_header: config.limits.max_header.min(hello.limits.0 as usize),
        max_inline: config.limits.max_inline.min(hello.limits.1 as usize),
        ..config.limits
    };
    let (address, peer) = (wire.address.clone(), wire.peer);
    let peer = PeerInfo { address, peer, tenant: hello.tenant, connection };
    let progress = (0, config.window_bytes);
    let welcome = welcome(config, hello.nonce, connection, secret, progress, paths.to_vec());
    (Negotiated { peer, secret, limits, granted: hello.granted }, welcome)
}

/// Returns the [`Welcome`] for a client that resumes its connection.
pub(crate) fn welcome_back(shared: &Shared, nonce: [u8; 16]) -> Body {
    let (id, secret) = (shared.connection_id(), shared.secret());
    welcome(shared.config(), nonce, id, secret, shared.resume_point(), Vec::new())
}

fn welcome(
    config: &ConnectionConfig,
    nonce: [u8; 16],
    connection: u128,
    secret: [u8; 16],
    (received, granted): (u64, u64),
    paths: Vec<PathOffer>,
) -> Body {
    let limits =
        (config.limits.max_header as u32, config.limits.max_inline as u32, config.limits.max_bulk as u64);
    let version = VERSIONS.1;
    Body::Welcome(Welcome {
        version,
        reserved: 0,
        nonce,
        connection,
        secret,
        limits,
        granted,
        received,
        paths,
    })
}

/// Dials the transports of a client's connection, with retries and backoff.
pub(crate) struct Dialer {
    transport: Arc<dyn Transport>,
    paths: Vec<Arc<Path>>,
    /// The best path that both sides have. `None` before the first handshake, and if no such path
    /// exists.
    path: Option<CommonPath>,
    endpoint: String,
    options: ConnectOptions,
    config: ConnectionConfig,
    backoff: Duration,
    /// The thread that serves the connection. It lives at least as long as the connection.
    _home: Option<Arc<Home>>,
}

impl Dialer {
    /// Sets the thread that serves the connection.
    pub(crate) fn at(self, home: Arc<Home>) -> Dialer {
        Dialer { _home: Some(home), ..self }
    }

    pub(crate) fn new(
        transport: Arc<dyn Transport>,
        paths: Vec<Arc<Path>>,
        endpoint: &str,
        options: ConnectOptions,
        config: ConnectionConfig,
    ) -> Result<Dialer, MessengerError> {
        if options.tenant.len() > ConnectClaim::MAX_TENANT {
            let (len, limit) = (options.tenant.len(), ConnectClaim::MAX_TENANT);
            return Err(MessengerError::TenantTooLong { len, limit });
        }
        let (backoff, endpoint) = (crate::connection::BACKOFF.0, endpoint.to_owned());
        Ok(Dialer { transport, paths, path: None, endpoint, options, config, backoff, _home: None })
    }

    /// Opens a new connection over the best transport that both sides have. Retries failed attempts
    /// until [`ConnectOptions::timeout`] has passed.
    pub(crate) async fn dial(&mut self) -> Result<(Negotiated, Wire), MessengerError> {
        let granted = self.config.window_bytes;
        let (welcome, wire) = self.retry(None, granted).await?;
        let limits = Limits {
            max_header: self.config.limits.max_header.min(welcome.limits.0 as usize),
            max_inline: self.config.limits.max_inline.min(welcome.limits.1 as usize),
            max_bulk: self.config.limits.max_bulk.min(welcome.limits.2 as usize),
            ..self.config.limits
        };
        let peer = PeerInfo {
            address: wire.address.clone(),
            peer: wire.peer,
            tenant: self.options.tenant.clone(),
            connection: welcome.connection,
        };
        let settled = Negotiated { peer, secret: welcome.secret, limits, granted: welcome.granted };
        let wire = self.move_to_path(&welcome, wire).await?;
        Ok((settled, wire))
    }

    /// Moves a new connection to a better transport, if one exists.
    async fn move_to_path(&mut self, welcome: &Welcome, wire: Wire) -> Result<Wire, MessengerError> {
        self.path = CommonPath::choose(&self.paths, &welcome.paths, &self.endpoint);
        let required = self.paths.iter().find(|path| path.is_required);
        let Some(path) = self.path.clone() else {
            return match required {
                Some(path) => Err(self.no_path(&path.name, "the server does not offer this path")),
                None => Ok(wire),
            };
        };
        // A client that requires a path tries it even during the path's cool-down.
        if !path.is_active() && !path.path.is_required {
            return Ok(wire);
        }
        let resume = Resume { connection: welcome.connection, secret: welcome.secret, received: 0 };
        match self.attempt_path(&path, Some(resume), self.config.window_bytes).await {
            Ok((_, better)) => Ok(better),
            Err(e) => {
                let why = MessengerError::from(e).to_string();
                path.failed(&why);
                if path.path.is_required { Err(self.no_path(&path.path.name, &why)) } else { Ok(wire) }
            }
        }
    }

    fn no_path(&self, name: &str, why: &str) -> MessengerError {
        let reason = format!("the required path {name} cannot be used: {why}");
        MessengerError::Unreachable { endpoint: self.endpoint.clone(), reason }
    }

    /// Resumes a connection whose transport broke. The first attempt starts without a pause if the
    /// old transport `was_useful`.
    pub(crate) async fn redial(&mut self, shared: &Shared, was_useful: bool) -> Result<Wire, MessengerError> {
        if was_useful {
            self.backoff = crate::connection::BACKOFF.0;
        } else {
            self.pause().await;
        }
        let (received, granted) = shared.resume_point();
        let resume = Resume { connection: shared.connection_id(), secret: shared.secret(), received };
        let (welcome, wire) = self.retry(Some(resume), granted).await.map_err(lost)?;
        self.go_on(shared, &welcome)?;
        Ok(wire)
    }

    fn go_on(&self, shared: &Shared, welcome: &Welcome) -> Result<(), MessengerError> {
        if welcome.connection != shared.connection_id() {
            return Err(MessengerError::Protocol("the server resumed a different connection".into()));
        }
        shared.resume(welcome.received, welcome.granted)
    }

    /// Waits until a better transport than the current one is available and dials it. Never returns
    /// if no better transport exists. `is_base` says whether the current transport is the base
    /// transport.
    pub(crate) async fn upgrade(&self, is_base: bool) -> (Wire, ConnectClaim) {
        match &self.path {
            Some(path) if is_base => path.upgrade(|| self.claim()).await,
            _ => std::future::pending().await,
        }
    }

    /// Resumes the connection over a transport that [`upgrade`](Self::upgrade) returned.
    pub(crate) async fn redial_over(
        &mut self,
        shared: &Shared,
        (wire, claim): (Wire, ConnectClaim),
    ) -> Result<Wire, MessengerError> {
        let (received, granted) = shared.resume_point();
        let resume = Resume { connection: shared.connection_id(), secret: shared.secret(), received };
        let shaken = timeout(PATH_TIMEOUT, self.shake(wire, claim, Some(resume), granted)).await;
        match shaken.unwrap_or_else(|_| Err(self.too_slow())) {
            Ok((welcome, wire)) => {
                self.go_on(shared, &welcome)?;
                Ok(wire)
            }
            Err(e) => {
                if let Some(path) = &self.path {
                    path.failed(&MessengerError::from(e).to_string());
                }
                self.redial(shared, true).await
            }
        }
    }

    /// Records a failure of the path: a transport over the path ended soon without delivering a
    /// frame, or because the peer was silent.
    pub(crate) fn path_was_useless(&self, why: &str) {
        if let Some(path) = &self.path {
            path.failed(why);
        }
    }

    async fn pause(&mut self) {
        sleep(self.backoff.mul_f64(0.5 + 0.5 * base::entropy::random::<f64>())).await;
        self.backoff = (self.backoff * 2).min(crate::connection::BACKOFF.1);
    }

    async fn retry(
        &mut self,
        resume: Option<Resume>,
        granted: u64,
    ) -> Result<(Welcome, Wire), MessengerError> {
        let deadline = Instant::now() + self.options.timeout;
        loop {
            let attempt = timeout_at(deadline, self.attempt(resume.clone(), granted)).await;
            let error = match attempt {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(e)) => e,
                Err(_) => self.too_slow(),
            };
            if error.is_final() || Instant::now() + self.backoff >= deadline {
                return Err(error.into());
            }
            self.pause().await;
        }
    }

    fn too_slow(&self) -> HandshakeError {
        let reason = "the peer did not answer in time".to_owned();
        HandshakeError::Transport { endpoint: self.endpoint.clone(), reason }
    }

    fn claim(&self) -> ConnectClaim {
        ConnectClaim { tenant: self.options.tenant.clone(), nonce: base::entropy::random() }
    }

    /// Makes one attempt: over the path while the path is healthy, and otherwise over the base
    /// transport.
    async fn attempt(&self, resume: Option<Resume>, granted: u64) -> Result<(Welcome, Wire), HandshakeError> {
        if let Some(path) = self.path.as_ref().filter(|path| path.is_active()) {
            match self.attempt_path(path, resume.clone(), granted).await {
                Err(HandshakeError::Transport { reason, .. }) => path.failed(&reason),
                decided => return decided,
            }
        }
        let claim = self.claim();
        let dialed =
            timeout(self.config.handshake_timeout, self.transport.dial(&self.endpoint, &claim)).await;
        let wire = dialed.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        self.shake(wire.map_err(|e| self.broken(&e))?, claim, resume, granted).await
    }

    async fn attempt_path(
        &self,
        path: &CommonPath,
        resume: Option<Resume>,
        granted: u64,
    ) -> Result<(Welcome, Wire), HandshakeError> {
        let attempt = async {
            let claim = self.claim();
            let wire = path.path.transport.dial(&path.endpoint, &claim).await;
            self.shake(wire.map_err(|e| self.broken(&e))?, claim, resume, granted).await
        };
        timeout(PATH_TIMEOUT, attempt).await.unwrap_or_else(|_| Err(self.too_slow()))
    }

    fn broken(&self, e: &std::io::Error) -> HandshakeError {
        HandshakeError::Transport { endpoint: self.endpoint.clone(), reason: e.to_string() }
    }

    async fn shake(
        &self,
        mut wire: Wire,
        claim: ConnectClaim,
        resume: Option<Resume>,
        granted: u64,
    ) -> Result<(Welcome, Wire), HandshakeError> {
        let hello = Hello {
            versions: VERSIONS,
            reserved: 0,
            tenant: claim.tenant,
            nonce: claim.nonce,
            limits: (self.config.limits.max_header as u32, self.config.limits.max_inline as u32),
            granted,
            resume,
        };
        let (nonce, resumes) = (hello.nonce, hello.resume.is_some());
        write(&mut wire, &Body::Hello(hello)).await.map_err(|e| self.broken(&e))?;
        let answer = timeout(self.config.handshake_timeout, read(&mut wire)).await;
        match answer.unwrap_or_else(|_| Err(self.too_slow()))? {
            Body::Welcome(welcome) => {
                if welcome.nonce != nonce
                    || welcome.version != VERSIONS.1
                    || welcome.paths.len() > MAX_PATHS
                    || welcome.paths.iter().any(|path| path.name.len() > MAX_PATH_NAME)
                {
                    return Err(HandshakeError::Protocol(
                        "the server's Welcome does not match the Hello".into(),
                    ));
                }
                if !resumes && welcome.granted > crate::config::MAX_CREDIT_BYTES {
                    return Err(HandshakeError::Protocol(
                        "the server grants more than 2 GiB of credit".into(),
                    ));
                }
                Ok((welcome, wire))
            }
            Body::Reject(reject) => Err(HandshakeError::Rejected(reject)),
            other => Err(HandshakeError::Protocol(format!(
                "the server sent {:?} instead of Welcome",
                other.kind()
            ))),
        }
    }
}

fn lost(e: MessengerError) -> MessengerError {
    match e {
        MessengerError::Refused(reason) => {
            MessengerError::ConnectionLost(format!("the peer refused to resume the connection: {reason}"))
        }
        MessengerError::Unreachable { endpoint, reason } => {
            MessengerError::ConnectionLost(format!("{endpoint} cannot be reached: {reason}"))
        }
        other => other,
    }
}
