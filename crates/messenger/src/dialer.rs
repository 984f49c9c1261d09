//! [`Dialer`]: dials the transports of a client's connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use identity::ProofKey;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::config::{ConnectionConfig, MAX_CREDIT_BYTES};
use crate::connection::{BACKOFF, Negotiated, Shared};
use crate::frame::{Hello, Resume, Resumed, Welcome};
use crate::handshake::{self, HandshakeError, VERSIONS};
use crate::home::Home;
use crate::paths::{CommonPath, MAX_PATH_NAME, MAX_PATHS, PATH_TIMEOUT, Path};
use crate::transport::{ConnectTicket, Transport, Wire};
use crate::{ConnectOptions, Limits, MessengerError, PeerInfo};

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
    /// Number of the last ticket.
    last_ticket: AtomicU32,
    /// The thread that serves the connection. It lives at least as long as the connection.
    _home: Option<Arc<Home>>,
}

/// The point at which a connection resumes.
struct ResumePoint<'a> {
    connection: u128,
    key: &'a ProofKey,
    /// Number of the last sequenced frame that this side has received.
    received: u64,
    /// Credit that this side has granted since the connection began, in bytes.
    granted: u64,
}

impl ResumePoint<'_> {
    fn of(shared: &Shared) -> ResumePoint<'_> {
        let (received, granted) = shared.resume_point();
        ResumePoint { connection: shared.connection_id(), key: shared.proof_key(), received, granted }
    }

    fn request(&self, nonce: [u8; 16]) -> Resume {
        let ResumePoint { connection, received, granted, .. } = *self;
        Resume { connection, nonce, received, granted }
    }
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
    ) -> Dialer {
        let (backoff, endpoint, last_ticket) = (BACKOFF.0, endpoint.to_owned(), AtomicU32::new(0));
        Dialer { transport, paths, path: None, endpoint, options, config, backoff, last_ticket, _home: None }
    }

    /// Opens a new connection over the best transport that both sides have. Retries failed attempts
    /// until [`ConnectOptions::timeout`] has passed.
    pub(crate) async fn dial(&mut self) -> Result<(Negotiated, Wire), MessengerError> {
        let deadline = Instant::now() + self.options.timeout;
        let (welcome, settled, wire) = loop {
            match timeout_at(deadline, self.begin()).await.unwrap_or_else(|_| Err(self.too_slow())) {
                Ok(begun) => break begun,
                Err(e) => self.back_off(e, deadline).await?,
            }
        };
        let wire = self.move_to_path(&welcome, &settled.proof_key, wire, deadline).await?;
        Ok((settled, wire))
    }

    /// Makes one attempt to begin a connection over the base transport.
    async fn begin(&self) -> Result<(Welcome, Negotiated, Wire), HandshakeError> {
        let config = &self.config;
        let mut wire = self.dial_base().await?;
        let hello = Hello {
            versions: VERSIONS,
            limits: (config.limits.max_header as u32, config.limits.max_inline as u32),
            granted: config.window_bytes,
        };
        let begun = handshake::begin(&mut wire, &config.trust, hello);
        let begun = timeout(config.handshake_timeout, begun).await.unwrap_or_else(|_| Err(self.too_slow()));
        let (welcome, proof_key, key) = begun?;
        if welcome.version != VERSIONS.1
            || welcome.paths.len() > MAX_PATHS
            || welcome.paths.iter().any(|path| path.name.len() > MAX_PATH_NAME)
        {
            return Err(HandshakeError::Protocol("the server's Welcome does not match the Hello".into()));
        }
        if welcome.granted > MAX_CREDIT_BYTES {
            return Err(HandshakeError::Protocol("the server grants more than 2 GiB of credit".into()));
        }
        let limits = Limits {
            max_header: config.limits.max_header.min(welcome.limits.0 as usize),
            max_inline: config.limits.max_inline.min(welcome.limits.1 as usize),
            max_bulk: config.limits.max_bulk.min(welcome.limits.2 as usize),
            ..config.limits
        };
        let (address, connection) = (wire.address.clone(), welcome.connection);
        let peer = PeerInfo { address, peer: wire.peer, key, user: None, connection };
        let settled = Negotiated { peer, proof_key, limits, granted: welcome.granted };
        Ok((welcome, settled, wire))
    }

    /// Moves a new connection to a better transport, if one exists. Repeats failed attempts until
    /// `deadline` if the client requires the transport.
    async fn move_to_path(
        &mut self,
        welcome: &Welcome,
        key: &ProofKey,
        wire: Wire,
        deadline: Instant,
    ) -> Result<Wire, MessengerError> {
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
        let (connection, granted) = (welcome.connection, self.config.window_bytes);
        let point = ResumePoint { connection, key, received: 0, granted };
        loop {
            let error = match self.attempt_path(&path, &point).await {
                Ok((_, better)) => return Ok(better),
                Err(e) => e,
            };
            if !path.path.is_required {
                path.failed(&MessengerError::from(error).to_string());
                return Ok(wire);
            }
            if let Err(e) = self.back_off(error, deadline).await {
                let why = e.to_string();
                path.failed(&why);
                return Err(self.no_path(&path.path.name, &why));
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
            self.backoff = BACKOFF.0;
        } else {
            self.pause().await;
        }
        let point = ResumePoint::of(shared);
        let deadline = Instant::now() + self.options.timeout;
        let (resumed, wire) = loop {
            match timeout_at(deadline, self.attempt(&point)).await.unwrap_or_else(|_| Err(self.too_slow())) {
                Ok(resumed) => break resumed,
                Err(e) => self.back_off(e, deadline).await.map_err(lost)?,
            }
        };
        shared.resume(resumed.received, resumed.granted)?;
        Ok(wire)
    }

    /// Waits until a better transport than the current one is available and dials it. Never returns
    /// if no better transport exists. `is_base` says whether the current transport is the base
    /// transport.
    pub(crate) async fn upgrade(&self, shared: &Shared, is_base: bool) -> (Wire, ConnectTicket) {
        match &self.path {
            Some(path) if is_base => path.upgrade(|| self.ticket(shared.proof_key())).await,
            _ => std::future::pending().await,
        }
    }

    /// Resumes the connection over a transport that [`upgrade`](Self::upgrade) returned.
    pub(crate) async fn redial_over(
        &mut self,
        shared: &Shared,
        (mut wire, ticket): (Wire, ConnectTicket),
    ) -> Result<Wire, MessengerError> {
        let point = ResumePoint::of(shared);
        let resuming = handshake::resume(&mut wire, point.key, point.request(ticket.nonce));
        match timeout(PATH_TIMEOUT, resuming).await.unwrap_or_else(|_| Err(self.too_slow())) {
            Ok(resumed) => {
                shared.resume(resumed.received, resumed.granted)?;
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
        self.backoff = (self.backoff * 2).min(BACKOFF.1);
    }

    /// Waits before the next attempt. Returns the error of the last attempt if a further attempt
    /// cannot succeed, or would come too late.
    async fn back_off(&mut self, error: HandshakeError, deadline: Instant) -> Result<(), MessengerError> {
        if error.is_final() || Instant::now() + self.backoff >= deadline {
            return Err(error.into());
        }
        self.pause().await;
        Ok(())
    }

    fn too_slow(&self) -> HandshakeError {
        let reason = "the peer did not answer in time".to_owned();
        HandshakeError::Transport { endpoint: self.endpoint.clone(), reason }
    }

    fn ticket(&self, key: &ProofKey) -> ConnectTicket {
        ConnectTicket::new(key, self.last_ticket.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Makes one attempt to resume: over the path while the path is healthy, and otherwise over the
    /// base transport.
    async fn attempt(&self, point: &ResumePoint<'_>) -> Result<(Resumed, Wire), HandshakeError> {
        if let Some(path) = self.path.as_ref().filter(|path| path.is_active()) {
            match self.attempt_path(path, point).await {
                Err(HandshakeError::Transport { reason, .. }) => path.failed(&reason),
                decided => return decided,
            }
        }
        let mut wire = self.dial_base().await?;
        let resuming = handshake::resume(&mut wire, point.key, point.request(base::entropy::random()));
        let resumed = timeout(self.config.handshake_timeout, resuming).await;
        Ok((resumed.unwrap_or_else(|_| Err(self.too_slow()))?, wire))
    }

    async fn dial_base(&self) -> Result<Wire, HandshakeError> {
        let dialed = timeout(self.config.handshake_timeout, self.transport.dial(&self.endpoint, None)).await;
        dialed.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())).map_err(|e| self.broken(&e))
    }

    async fn attempt_path(
        &self,
        path: &CommonPath,
        point: &ResumePoint<'_>,
    ) -> Result<(Resumed, Wire), HandshakeError> {
        let attempt = async {
            let ticket = self.ticket(point.key);
            let wire = path.path.transport.dial(&path.endpoint, Some(&ticket)).await;
            let mut wire = wire.map_err(|e| self.broken(&e))?;
            let resumed = handshake::resume(&mut wire, point.key, point.request(ticket.nonce)).await?;
            Ok((resumed, wire))
        };
        timeout(PATH_TIMEOUT, attempt).await.unwrap_or_else(|_| Err(self.too_slow()))
    }

    fn broken(&self, e: &std::io::Error) -> HandshakeError {
        HandshakeError::Transport { endpoint: self.endpoint.clone(), reason: e.to_string() }
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
