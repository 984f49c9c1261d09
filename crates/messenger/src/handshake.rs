//! How a session begins, and how it goes on over a new transport: one frame each way.

use std::sync::Arc;
use std::time::Duration;

use base::block::Payload;
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::config::SessionConfig;
use crate::frame::{
    self, Body, FrameHeader, HEADER_LEN, Hello, Kind, MAX_CONTROL, Reject, RejectCode, Resume, Welcome,
};
use crate::session::{Settled, Shared};
use crate::transport::ofi::Piece;
use crate::transport::{Claim, Road, Transport, Wire};
use crate::{ConnectOptions, Limits, MessengerError, PeerInfo};

/// Protocol versions that this side speaks, lowest and highest.
const VERSIONS: (u16, u16) = (1, 1);

/// Why a handshake failed.
#[derive(Debug)]
pub(crate) enum HandshakeError {
    /// The transport broke or was too slow.
    Transport { endpoint: String, reason: String },
    /// The peer does not want to.
    Rejected(Reject),
    /// The peer does not speak this protocol.
    Protocol(String),
}

impl HandshakeError {
    fn is_final(&self) -> bool {
        !matches!(self, HandshakeError::Transport { .. })
    }
}

/// Reads one frame of a handshake, and not a byte more.
async fn read(wire: &mut Wire) -> Result<Body, HandshakeError> {
    let transport = |reason: String| HandshakeError::Transport { endpoint: wire.address.clone(), reason };
    // What was damaged on its way may be whole the next time.
    let broken = |e: frame::FrameError| match e.is_damage() {
        true => transport(e.to_string()),
        false => HandshakeError::Protocol(e.to_string()),
    };
    let limits = Limits { max_header: MAX_CONTROL, max_inline: 0, max_bulk: 0, eager: 0, one_sided: false };
    let check = |header: &FrameHeader| match header.kind {
        Kind::Hello | Kind::Welcome | Kind::Reject => Ok(()),
        kind => Err(HandshakeError::Protocol(format!("a {kind:?} frame before the handshake"))),
    };
    match &mut wire.road {
        Road::Stream(reader, _) => {
            let mut fixed = [0; HEADER_LEN];
            reader.read_exact(&mut fixed).await.map_err(|e| transport(e.to_string()))?;
            let header = FrameHeader::decode(&fixed, &limits).map_err(&broken)?;
            check(&header)?;
            let mut body = vec![0; header.body_len()];
            reader.read_exact(&mut body).await.map_err(|e| transport(e.to_string()))?;
            Ok(header.decode_body(Bytes::from(body)).map_err(broken)?.0)
        }
        Road::Packets(link) => {
            let packet = link.receive().await.map_err(|e| transport(e.0))?;
            match frame::decode(&packet, &limits).map_err(broken)? {
                Some((frame, len)) if len == packet.len() => check(&frame.header).map(|()| frame.body),
                _ => Err(HandshakeError::Protocol("a packet that is not one frame".into())),
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
            link.send(&[Piece::Copied(&out)]).await.map_err(|e| std::io::Error::other(e.0))
        }
    }
}

/// Reads and checks what a client says first.
pub(crate) async fn read_hello(wire: &mut Wire) -> Result<Hello, HandshakeError> {
    match read(wire).await? {
        Body::Hello(hello) => Ok(hello),
        other => Err(HandshakeError::Protocol(format!("{:?} instead of Hello", other.kind()))),
    }
}

/// Whether this side can make a session of that, over a transport whose connect request made that `claim`.
pub(crate) fn check_hello(hello: &Hello, claim: Option<&Claim>) -> Result<(), Reject> {
    let no = |reason: String| Err(Reject { code: RejectCode::Incompatible, reason });
    if claim.is_some_and(|claim| claim.tenant != hello.tenant || claim.nonce != hello.nonce) {
        return no("the handshake is not that of who asked to connect".to_owned());
    }
    if hello.versions.0 > VERSIONS.1 || hello.versions.1 < VERSIONS.0 {
        return no(format!(
            "no common version: the client speaks {:?}, the server {VERSIONS:?}",
            hello.versions
        ));
    }
    if hello.tenant.len() > Claim::MAX_TENANT {
        return no(format!("the tenant's name is longer than {} bytes", Claim::MAX_TENANT));
    }
    if hello.resume.is_none() && hello.granted > crate::config::MAX_CREDIT_BYTES {
        return no("more credit than any window has".to_owned());
    }
    Ok(())
}

/// The server's side of a new session: what was settled, and what to tell the client.
pub(crate) fn settle(hello: Hello, address: &str, features: u64, config: &SessionConfig) -> (Settled, Body) {
    let (session, secret): (u128, [u8; 16]) = config.entropy.random();
    let features = features & hello.features;
    let limits = Limits {
        max_header: config.limits.max_header.min(hello.limits.0 as usize),
        max_inline: config.limits.max_inline.min(hello.limits.1 as usize),
        ..config.limits
    };
    let peer = PeerInfo { address: address.to_owned(), tenant: hello.tenant, session, features };
    let welcome = welcome(config, features, hello.nonce, session, secret, (0, config.window_bytes));
    (Settled { peer, secret, limits, granted: hello.granted }, welcome)
}

/// What to tell a client that goes on with its session.
pub(crate) fn welcome_back(shared: &Shared, nonce: [u8; 16]) -> Body {
    let features = shared.peer().features;
    welcome(shared.config(), features, nonce, shared.session_id(), shared.secret(), shared.resume_point())
}

fn welcome(
    config: &SessionConfig,
    features: u64,
    nonce: [u8; 16],
    session: u128,
    secret: [u8; 16],
    (received, granted): (u64, u64),
) -> Body {
    let limits =
        (config.limits.max_header as u32, config.limits.max_inline as u32, config.limits.max_bulk as u64);
    let version = VERSIONS.1;
    Body::Welcome(Welcome { version, features, nonce, session, secret, limits, granted, received })
}

/// What a client needs to make transports for its session.
pub(crate) struct Dialer {
    transport: Arc<dyn Transport>,
    endpoint: String,
    options: ConnectOptions,
    config: SessionConfig,
    backoff: Duration,
}

impl Dialer {
    pub(crate) fn new(
        transport: Arc<dyn Transport>,
        endpoint: &str,
        options: ConnectOptions,
        config: SessionConfig,
    ) -> Result<Dialer, MessengerError> {
        if options.tenant.len() > Claim::MAX_TENANT {
            let limit = Claim::MAX_TENANT;
            return Err(MessengerError::Refused(format!("the tenant's name is longer than {limit} bytes")));
        }
        let backoff = crate::session::BACKOFF.0;
        Ok(Dialer { transport, endpoint: endpoint.to_owned(), options, config, backoff })
    }

    /// Starts a new session, trying again until the time is over.
    pub(crate) async fn dial(&mut self) -> Result<(Settled, Wire), MessengerError> {
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
            tenant: self.options.tenant.clone(),
            session: welcome.session,
            features: welcome.features & self.options.features,
        };
        Ok((Settled { peer, secret: welcome.secret, limits, granted: welcome.granted }, wire))
    }

    /// Goes on with a session whose transport broke; at once, if that `was_useful`.
    pub(crate) async fn redial(&mut self, shared: &Shared, was_useful: bool) -> Result<Wire, MessengerError> {
        if was_useful {
            self.backoff = crate::session::BACKOFF.0;
        } else {
            self.pause().await;
        }
        let (received, granted) = shared.resume_point();
        let resume = Resume { session: shared.session_id(), secret: shared.secret(), received };
        let (welcome, wire) = self.retry(Some(resume), granted).await.map_err(lost)?;
        if welcome.session != shared.session_id() {
            return Err(MessengerError::Protocol("the server went on with another session".into()));
        }
        shared.resume(welcome.received, welcome.granted)?;
        Ok(wire)
    }

    async fn pause(&mut self) {
        sleep(self.backoff.mul_f64(0.5 + 0.5 * self.config.entropy.random::<f64>())).await;
        self.backoff = (self.backoff * 2).min(crate::session::BACKOFF.1);
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
        let reason = "no answer in time".to_owned();
        HandshakeError::Transport { endpoint: self.endpoint.clone(), reason }
    }

    async fn attempt(&self, resume: Option<Resume>, granted: u64) -> Result<(Welcome, Wire), HandshakeError> {
        let broken = |e: std::io::Error| HandshakeError::Transport {
            endpoint: self.endpoint.clone(),
            reason: e.to_string(),
        };
        let claim = Claim { tenant: self.options.tenant.clone(), nonce: self.config.entropy.random() };
        let mut wire = self.transport.dial(&self.endpoint, &claim).await.map_err(broken)?;
        let hello = Hello {
            versions: VERSIONS,
            features: self.options.features,
            tenant: claim.tenant,
            nonce: claim.nonce,
            limits: (self.config.limits.max_header as u32, self.config.limits.max_inline as u32),
            granted,
            resume,
        };
        let (nonce, resumes) = (hello.nonce, hello.resume.is_some());
        write(&mut wire, &Body::Hello(hello)).await.map_err(broken)?;
        let answer = timeout(self.config.handshake_timeout, read(&mut wire)).await;
        match answer.unwrap_or_else(|_| Err(self.too_slow()))? {
            Body::Welcome(welcome) => {
                if welcome.nonce != nonce || welcome.version != VERSIONS.1 {
                    return Err(HandshakeError::Protocol("the answer is not to this request".into()));
                }
                if !resumes && welcome.granted > crate::config::MAX_CREDIT_BYTES {
                    return Err(HandshakeError::Protocol("more credit than any window has".into()));
                }
                Ok((welcome, wire))
            }
            Body::Reject(reject) => Err(HandshakeError::Rejected(reject)),
            other => Err(HandshakeError::Protocol(format!("{:?} instead of Welcome", other.kind()))),
        }
    }
}

fn lost(e: MessengerError) -> MessengerError {
    match e {
        MessengerError::Refused(reason) => {
            MessengerError::SessionLost(format!("the peer does not know it (any more): {reason}"))
        }
        MessengerError::Unreachable { endpoint, reason } => {
            MessengerError::SessionLost(format!("{endpoint} cannot be reached: {reason}"))
        }
        other => other,
    }
}
