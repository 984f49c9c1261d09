//! The serving side: transports come in, shake hands, and become new sessions or go to the session they belong to.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use base::BoxFuture;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::config::SessionConfig;
use crate::frame::{Body, Hello, PathOffer, Reject, RejectCode, Resume};
use crate::handshake;
use crate::paths::MAX_PATHS;
use crate::session::{self, Resumption, Role, Shared, Side};
use crate::transport::{Acceptor, Wire};
use crate::{Ends, Listener, MessengerError, Result};

/// Most handshakes at a time; further peers wait in the system's queue.
const MAX_HANDSHAKES: usize = 256;

/// New sessions that wait to be accepted by the user.
const BACKLOG: usize = 64;

/// Pause after the system refused to give a connection (out of file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listener over a byte stream transport.
pub(super) struct StreamListener {
    endpoint: String,
    paths: Vec<PathOffer>,
    accepted: mpsc::Receiver<Result<Ends>>,
    acceptors: Vec<AbortHandle>,
}

/// What the handshakes of a listener share.
struct Reception {
    features: u64,
    config: SessionConfig,
    registry: Arc<Registry>,
    /// The other transports of the listener.
    paths: Vec<PathOffer>,
    accepted: mpsc::Sender<Result<Ends>>,
    handshakes: Arc<Semaphore>,
}

/// The sessions of a listener.
struct Registry {
    sessions: Mutex<Sessions>,
    max: usize,
    max_held: usize,
}

#[derive(Default)]
struct Sessions {
    entries: HashMap<u128, Entry>,
    /// Those without a transport.
    held: usize,
}

struct Entry {
    secret: [u8; 16],
    resume: mpsc::Sender<Box<Resumption>>,
}

/// A session's place in its listener's registry; dropping it gives the place up.
pub(crate) struct Registration {
    registry: Weak<Registry>,
    session: u128,
    held: bool,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Sessions> {
        // Nothing panics while it holds the lock.
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(
        self: &Arc<Self>,
        shared: &Shared,
    ) -> Option<(mpsc::Receiver<Box<Resumption>>, Registration)> {
        let (resume, resumptions) = mpsc::channel(1);
        let session = shared.session_id();
        let mut sessions = self.lock();
        if sessions.entries.len() >= self.max {
            return None;
        }
        sessions.entries.insert(session, Entry { secret: shared.secret(), resume });
        Some((resumptions, Registration { registry: Arc::downgrade(self), session, held: false }))
    }

    /// Where to bring a transport for the session, if the secret is right. A wrong one is no different from no session.
    fn find(&self, resume: &Resume) -> Option<mpsc::Sender<Box<Resumption>>> {
        let sessions = self.lock();
        let entry = sessions.entries.get(&resume.session)?;
        let differs = entry.secret.iter().zip(resume.secret).fold(0, |acc, (a, b)| acc | (a ^ b));
        (differs == 0).then(|| entry.resume.clone())
    }
}

impl Registration {
    /// The session has lost its transport and wants to be kept.
    pub(crate) fn hold(&mut self) -> Result<()> {
        let gone = || MessengerError::SessionLost("its listener is gone".into());
        let registry = self.registry.upgrade().ok_or_else(gone)?;
        let mut sessions = registry.lock();
        if sessions.held >= registry.max_held {
            return Err(MessengerError::SessionLost("too many sessions wait for their peers".into()));
        }
        sessions.held += 1;
        self.held = true;
        Ok(())
    }

    /// The session has a transport again.
    pub(crate) fn release(&mut self) {
        if std::mem::take(&mut self.held)
            && let Some(registry) = self.registry.upgrade()
        {
            registry.lock().held -= 1;
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.release();
        if let Some(registry) = self.registry.upgrade() {
            registry.lock().entries.remove(&self.session);
        }
    }
}

impl StreamListener {
    /// Takes sessions that come over `acceptor`, and transports for them also over the others, which have names.
    pub(super) fn start(
        acceptor: Box<dyn Acceptor>,
        others: Vec<(String, Box<dyn Acceptor>)>,
        features: u64,
        config: SessionConfig,
    ) -> StreamListener {
        let endpoint = acceptor.endpoint();
        let paths: Vec<PathOffer> = others
            .iter()
            .map(|(name, other)| PathOffer { name: name.clone(), endpoint: other.endpoint() })
            .take(MAX_PATHS)
            .collect();
        let (sender, accepted) = mpsc::channel(BACKLOG);
        let (max, max_held) = (config.max_sessions, config.max_held);
        let registry = Arc::new(Registry { sessions: Mutex::default(), max, max_held });
        let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
        let reception = Arc::new(Reception {
            features,
            config,
            registry,
            paths: paths.clone(),
            accepted: sender,
            handshakes,
        });
        let all = std::iter::once(acceptor).chain(others.into_iter().map(|(_, other)| other));
        let acceptors = all.map(|a| crate::spawn(accept_loop(a, Arc::clone(&reception))).abort_handle());
        StreamListener { endpoint, paths, accepted, acceptors: acceptors.collect() }
    }
}

impl Listener for StreamListener {
    fn endpoint(&self) -> String {
        self.endpoint.clone()
    }

    fn paths(&self) -> Vec<(String, String)> {
        self.paths.iter().map(|path| (path.name.clone(), path.endpoint.clone())).collect()
    }

    fn accept(&mut self) -> BoxFuture<'_, Result<Ends>> {
        Box::pin(async {
            let gone = || Err(MessengerError::SessionLost("the listener's runtime has ended".into()));
            self.accepted.recv().await.unwrap_or_else(gone)
        })
    }
}

impl Drop for StreamListener {
    fn drop(&mut self) {
        self.acceptors.iter().for_each(AbortHandle::abort);
    }
}

async fn accept_loop(mut acceptor: Box<dyn Acceptor>, reception: Arc<Reception>) {
    loop {
        let Ok(permit) = Arc::clone(&reception.handshakes).acquire_owned().await else { return };
        match acceptor.accept().await {
            Ok(wire) => {
                let reception = Arc::clone(&reception);
                crate::spawn(async move {
                    reception.receive(wire).await;
                    drop(permit);
                });
            }
            Err(e) => {
                tracing::warn!(error = %e, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

impl Reception {
    /// Shakes hands with one peer.
    async fn receive(&self, mut wire: Wire) {
        let shaken = timeout(self.config.handshake_timeout, self.shake(&mut wire)).await;
        let late = || Err(MessengerError::Refused("the peer's handshake took too long".into()));
        match shaken.unwrap_or_else(|_| late()) {
            Ok(Outcome::New(shared, role)) => self.open(shared, role, wire).await,
            Ok(Outcome::Resume(session, hello, resume)) => {
                let Hello { nonce, granted, .. } = hello;
                let resumption = Box::new(Resumption { wire, nonce, received: resume.received, granted });
                // A second transport while one is being taken is dropped; its client will come again.
                let _ = session.try_send(resumption);
            }
            Err(why) => {
                tracing::debug!(peer = wire.address, %why, "handshake failed");
                // For information only: when nobody takes the news, they are dropped.
                let _ = self.accepted.try_send(Err(why));
            }
        }
    }

    async fn shake(&self, wire: &mut Wire) -> Result<Outcome> {
        let hello = handshake::read_hello(wire).await?;
        if let Err(reject) = handshake::check_hello(&hello, wire.claim.as_ref()) {
            return self.reject(wire, reject).await;
        }
        if let Some(resume) = hello.resume.clone() {
            return match self.registry.find(&resume) {
                Some(session) => Ok(Outcome::Resume(session, hello, resume)),
                None => {
                    let reason = "no such session".to_owned();
                    self.reject(wire, Reject { code: RejectCode::UnknownSession, reason }).await
                }
            };
        }
        let (settled, welcome) =
            handshake::settle(hello, &wire.address, self.features, &self.config, &self.paths);
        let shared = Shared::new(settled, self.config.clone(), Side::Server, wire);
        let Some((resumptions, registration)) = self.registry.register(&shared) else {
            let reason = format!("the server has {} sessions already", self.registry.max);
            return self.reject(wire, Reject { code: RejectCode::Full, reason }).await;
        };
        handshake::write(wire, &welcome).await.map_err(|e| MessengerError::Unreachable {
            endpoint: wire.address.clone(),
            reason: e.to_string(),
        })?;
        Ok(Outcome::New(shared, Role::Server { resumptions, registration }))
    }

    async fn reject(&self, wire: &mut Wire, reject: Reject) -> Result<Outcome> {
        let reason = reject.reason.clone();
        // The peer may be gone already; it is refused either way.
        let _ = handshake::write(wire, &Body::Reject(reject)).await;
        Err(MessengerError::Refused(reason))
    }

    async fn open(&self, shared: Arc<Shared>, role: Role, wire: Wire) {
        let handles = shared.handles();
        crate::spawn(session::run(shared, role, wire));
        // With nobody to accept it, the handles are dropped, which ends the session.
        let _ = self.accepted.send(Ok(handles)).await;
    }
}

enum Outcome {
    New(Arc<Shared>, Role),
    Resume(mpsc::Sender<Box<Resumption>>, Hello, Resume),
}
