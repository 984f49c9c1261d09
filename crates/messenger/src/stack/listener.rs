//! The server side of a network stack: accepts transports and performs handshakes. Each transport
//! begins a new connection or resumes an existing one.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use base::BoxFuture;
use base::budget::{Budget, spare_descriptors};
use base::collections::HashMap;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};
use wire::PathStatus;

use crate::admissions::Shortage;
use crate::config::ConnectionConfig;
use crate::connection::{self, ConnectionSide, ConnectionSlot, Resumption, Shared, TransportSupply};
use crate::frame::{Body, Hello, PathOffer, Reject, RejectCode, Resume};
use crate::handshake;
use crate::paths::MAX_PATHS;
use crate::transport::{Acceptor, Wire};
use crate::{Admissions, Ends, Listener, MessengerError, Result};

/// Maximum number of new connections that wait until the user accepts them.
const BACKLOG: usize = 64;

/// Pause after the system failed to accept a transport, for example because file descriptors ran
/// out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Minimum time between two warnings that transports cannot be accepted.
const WARNING_PAUSE: Duration = Duration::from_secs(10);

/// If all connection slots are taken, a connection that was silent for this long loses its slot to
/// a new connection from the same address.
const CONNECTION_PATIENCE: Duration = Duration::from_secs(10);

/// A listener on the base transport and on the stack's paths.
pub(super) struct StreamListener {
    endpoint: String,
    paths: Vec<PathOffer>,
    accepted: mpsc::Receiver<Result<Ends>>,
    admissions: Arc<Admissions>,
    acceptors: Vec<AbortHandle>,
}

/// The state that the handshakes of a listener share.
struct Reception {
    config: ConnectionConfig,
    registry: Arc<Registry>,
    /// The paths on which the listener also accepts transports.
    paths: Vec<PathOffer>,
    accepted: mpsc::Sender<Result<Ends>>,
    admissions: Arc<Admissions>,
    handshakes: Mutex<Handshakes>,
}

/// The handshakes in progress.
struct Handshakes {
    last: u64,
    budget: Budget<u64>,
    tasks: HashMap<u64, AbortHandle>,
}

/// The slot that a handshake holds. Dropping this value frees the slot.
struct HandshakePlace<'a>(&'a Reception, u64);

impl Drop for HandshakePlace<'_> {
    fn drop(&mut self) {
        let mut handshakes = self.0.handshakes();
        handshakes.budget.remove(self.1);
        handshakes.tasks.remove(&self.1);
    }
}

/// The connections of a listener.
struct Registry {
    connections: Mutex<ConnectionTable>,
    admissions: Arc<Admissions>,
}

struct ConnectionTable {
    entries: HashMap<u128, RegistryEntry>,
    places: Budget<u128>,
    /// Slots of detached connections. A detached connection holds one of these slots in addition to
    /// its slot in `places`.
    detached: Budget<u128>,
}

struct RegistryEntry {
    secret: [u8; 16],
    resume: mpsc::Sender<Box<Resumption>>,
    shared: Weak<Shared>,
}

/// The slot of a connection in its listener's registry. Dropping this value frees the slot.
struct RegistryPlace {
    registry: Weak<Registry>,
    connection: u128,
    peer: base::budget::PeerAddress,
    held: AtomicBool,
}

impl ConnectionTable {
    /// Removes a connection from the table and returns it. If it has lost its slot to another
    /// client, the caller must [close](Shared::reclaim) it after releasing the mutex.
    fn forget(&mut self, connection: u128) -> Option<Arc<Shared>> {
        self.places.remove(connection);
        self.detached.remove(connection);
        self.entries.remove(&connection).and_then(|entry| entry.shared.upgrade())
    }
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        // No code panics while it holds the mutex.
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes `victim`, a connection that has lost its slot because of `shortage`. Does nothing for
    /// `None`.
    fn reclaim(&self, victim: Option<Arc<Shared>>, shortage: Shortage) {
        if let Some(victim) = victim {
            self.admissions.add_reclaimed(shortage, 1);
            let peer = victim.peer();
            tracing::debug!(
                address = peer.address,
                ?shortage,
                "a connection loses its slot to another client"
            );
            victim.reclaim();
        }
    }

    fn register(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
    ) -> Option<(mpsc::Receiver<Box<Resumption>>, RegistryPlace)> {
        let (resume, resumptions) = mpsc::channel(1);
        let (connection, peer) = (shared.connection_id(), shared.peer().peer);
        let mut connections = self.lock();
        let Ok(victim) = connections.places.admit(connection, peer, Instant::now()) else {
            drop(connections);
            self.admissions.add_refused(Shortage::Connections, 1);
            return None;
        };
        let victim = victim.and_then(|victim| connections.forget(victim));
        let entry = RegistryEntry { secret: shared.secret(), resume, shared: Arc::downgrade(shared) };
        connections.entries.insert(connection, entry);
        drop(connections);
        self.reclaim(victim, Shortage::Connections);
        let (registry, held) = (Arc::downgrade(self), AtomicBool::new(false));
        Some((resumptions, RegistryPlace { registry, connection, peer, held }))
    }

    /// Finds the connection to resume, if the secret is right. Returns the channel that passes the
    /// new transport to the connection. A wrong secret gives the same result as an unknown
    /// connection.
    fn find(&self, resume: &Resume) -> Option<mpsc::Sender<Box<Resumption>>> {
        let connections = self.lock();
        let entry = connections.entries.get(&resume.connection)?;
        let differs = entry.secret.iter().zip(resume.secret).fold(0, |acc, (a, b)| acc | (a ^ b));
        (differs == 0).then(|| entry.resume.clone())
    }

    /// Ends a connection to free its file descriptor. Returns `false` if no connection can be
    /// ended.
    fn shed(&self) -> bool {
        let mut connections = self.lock();
        let victim = connections.places.shed(Instant::now());
        let victim = victim.and_then(|victim| connections.forget(victim));
        drop(connections);
        let has_victim = victim.is_some();
        self.reclaim(victim, Shortage::Descriptors);
        has_victim
    }
}

impl ConnectionSlot for RegistryPlace {
    fn hold(&self) -> Result<()> {
        let gone = || MessengerError::ConnectionLost("the connection's listener has been closed".into());
        let registry = self.registry.upgrade().ok_or_else(gone)?;
        let mut connections = registry.lock();
        let now = Instant::now();
        let admitted = connections.detached.admit(self.connection, self.peer, now);
        let Ok(victim) = admitted else {
            drop(connections);
            registry.admissions.add_refused(Shortage::Detached, 1);
            return Err(MessengerError::ConnectionLost(
                "too many connections already wait for their clients".into(),
            ));
        };
        self.held.store(true, Ordering::Relaxed);
        connections.places.left(self.connection, now);
        let victim = victim.and_then(|victim| connections.forget(victim));
        drop(connections);
        registry.reclaim(victim, Shortage::Detached);
        Ok(())
    }

    fn release(&self) {
        if self.held.swap(false, Ordering::Relaxed)
            && let Some(registry) = self.registry.upgrade()
        {
            let mut connections = registry.lock();
            connections.detached.remove(self.connection);
            connections.places.heard(self.connection, Instant::now());
        }
    }

    fn heard(&self) {
        if let Some(registry) = self.registry.upgrade() {
            registry.lock().places.heard(self.connection, Instant::now());
        }
    }
}

impl Drop for RegistryPlace {
    fn drop(&mut self) {
        if let Some(registry) = self.registry.upgrade() {
            let forgotten = registry.lock().forget(self.connection);
            drop(forgotten);
        }
    }
}

impl StreamListener {
    /// Accepts connections over `acceptor`, which belongs to the base transport. Clients may also
    /// resume connections over `others`: the acceptors of the stack's paths, each with the name of
    /// its path.
    pub(super) fn start(
        acceptor: Box<dyn Acceptor>,
        others: Vec<(String, Box<dyn Acceptor>)>,
        config: ConnectionConfig,
    ) -> StreamListener {
        let endpoint = acceptor.endpoint();
        let paths: Vec<PathOffer> = others
            .iter()
            .map(|(name, other)| PathOffer { name: name.clone(), endpoint: other.endpoint() })
            .take(MAX_PATHS)
            .collect();
        let (sender, accepted) = mpsc::channel(BACKLOG);
        let descriptors = config.max_descriptors.unwrap_or_else(spare_descriptors);
        let admissions = Arc::new(Admissions::new(&config, descriptors));
        let connections = Mutex::new(ConnectionTable {
            entries: HashMap::default(),
            places: Budget::new(admissions.max_connections(), CONNECTION_PATIENCE),
            detached: Budget::new(config.max_held, Duration::MAX),
        });
        let registry = Arc::new(Registry { connections, admissions: Arc::clone(&admissions) });
        let budget = Budget::new(admissions.max_handshakes(), Duration::ZERO);
        let handshakes = Mutex::new(Handshakes { last: 0, budget, tasks: HashMap::default() });
        let reception = Arc::new(Reception {
            config,
            registry,
            paths: paths.clone(),
            accepted: sender,
            admissions: Arc::clone(&admissions),
            handshakes,
        });
        let all = std::iter::once(acceptor).chain(others.into_iter().map(|(_, other)| other));
        let acceptors = all.map(|a| crate::spawn(accept_loop(a, Arc::clone(&reception))).abort_handle());
        StreamListener { endpoint, paths, accepted, admissions, acceptors: acceptors.collect() }
    }
}

impl Listener for StreamListener {
    fn endpoint(&self) -> String {
        self.endpoint.clone()
    }

    fn paths(&self) -> Vec<PathStatus> {
        let status =
            |path: &PathOffer| PathStatus { name: path.name.clone(), endpoint: path.endpoint.clone() };
        self.paths.iter().map(status).collect()
    }

    fn admissions(&self) -> Arc<Admissions> {
        Arc::clone(&self.admissions)
    }

    fn accept(&mut self) -> BoxFuture<'_, Result<Ends>> {
        Box::pin(async {
            let gone = || Err(MessengerError::ConnectionLost("the listener's runtime has ended".into()));
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
    let mut warned: Option<Instant> = None;
    loop {
        match acceptor.accept().await {
            Ok(wire) => {
                reception.begin(wire);
                // Cancelled handshakes must close their file descriptors before the next handshake
                // opens one.
                tokio::task::yield_now().await;
            }
            Err(e) => {
                if warned.is_none_or(|at| at.elapsed() >= WARNING_PAUSE) {
                    tracing::warn!(error = %e, "cannot accept connections");
                    warned = Some(Instant::now());
                }
                if is_want_of_descriptors(&e) {
                    reception.shed();
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Whether `e` says that the process or the system has run out of file descriptors.
fn is_want_of_descriptors(e: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| e.raw_os_error() == Some(errno.raw_os_error()))
}

impl Reception {
    fn handshakes(&self) -> MutexGuard<'_, Handshakes> {
        // No code panics while it holds the mutex.
        self.handshakes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a handshake in a new task. If all handshake slots are taken, it replaces another
    /// handshake or is refused.
    fn begin(self: &Arc<Self>, wire: Wire) {
        let mut handshakes = self.handshakes();
        handshakes.last += 1;
        let id = handshakes.last;
        let Ok(victim) = handshakes.budget.admit(id, wire.peer, Instant::now()) else {
            drop(handshakes);
            return self.admissions.add_refused(Shortage::Handshakes, 1);
        };
        if let Some(task) = victim.and_then(|victim| handshakes.tasks.remove(&victim)) {
            task.abort();
            self.admissions.add_reclaimed(Shortage::Handshakes, 1);
        }
        let reception = Arc::clone(self);
        let task = crate::spawn(async move {
            let place = HandshakePlace(&reception, id);
            reception.receive(wire).await;
            drop(place);
        });
        handshakes.tasks.insert(id, task.abort_handle());
    }

    /// Frees a file descriptor: cancels a handshake, or ends a connection if no handshake can be
    /// cancelled.
    fn shed(&self) {
        self.admissions.add_refused(Shortage::Descriptors, 1);
        let mut handshakes = self.handshakes();
        let victim = handshakes.budget.shed(Instant::now());
        if let Some(task) = victim.and_then(|victim| handshakes.tasks.remove(&victim)) {
            task.abort();
            return self.admissions.add_reclaimed(Shortage::Descriptors, 1);
        }
        drop(handshakes);
        if !self.registry.shed() {
            tracing::debug!("no handshake or connection can be ended to free a file descriptor");
        }
    }

    /// Performs the handshake with one peer.
    async fn receive(&self, mut wire: Wire) {
        let shaken = timeout(self.config.handshake_timeout, self.shake(&mut wire)).await;
        let late = || Err(MessengerError::Refused("the peer's handshake took too long".into()));
        match shaken.unwrap_or_else(|_| late()) {
            Ok(HandshakeOutcome::New(shared, role)) => self.open(shared, role, wire).await,
            Ok(HandshakeOutcome::Resume(connection, hello, resume)) => {
                let Hello { nonce, granted, .. } = hello;
                let resumption = Box::new(Resumption { wire, nonce, received: resume.received, granted });
                // If another transport already waits for the connection, the new transport is
                // dropped, and the client tries again.
                let _ = connection.try_send(resumption);
            }
            Err(why) => {
                tracing::debug!(peer = wire.address, %why, "handshake failed");
                // The error is for information only. If the queue is full, it is dropped.
                let _ = self.accepted.try_send(Err(why));
            }
        }
    }

    async fn shake(&self, wire: &mut Wire) -> Result<HandshakeOutcome> {
        let hello = handshake::read_hello(wire).await?;
        if let Err(reject) = handshake::check_hello(&hello, wire.claim.as_ref()) {
            return self.reject(wire, reject).await;
        }
        if let Some(resume) = hello.resume.clone() {
            return match self.registry.find(&resume) {
                Some(connection) => Ok(HandshakeOutcome::Resume(connection, hello, resume)),
                None => {
                    let reason = "the server has no connection with this id and secret".to_owned();
                    self.reject(wire, Reject { code: RejectCode::UnknownConnection, reason }).await
                }
            };
        }
        let (settled, welcome) = handshake::settle(hello, wire, &self.config, &self.paths);
        let shared = Shared::new(settled, self.config.clone(), ConnectionSide::Server, wire);
        let Some((resumptions, registration)) = self.registry.register(&shared) else {
            let max = self.admissions.max_connections();
            let reason =
                format!("all {max} connections are in use, and this client's address has its fair share");
            return self.reject(wire, Reject { code: RejectCode::Full, reason }).await;
        };
        handshake::write(wire, &welcome).await.map_err(|e| MessengerError::Unreachable {
            endpoint: wire.address.clone(),
            reason: e.to_string(),
        })?;
        Ok(HandshakeOutcome::New(
            shared,
            TransportSupply::Server { resumptions, registration: Arc::new(registration) },
        ))
    }

    async fn reject(&self, wire: &mut Wire, reject: Reject) -> Result<HandshakeOutcome> {
        let reason = reject.reason.clone();
        // The peer may have disconnected already; ignore the error.
        let _ = handshake::write(wire, &Body::Reject(reject)).await;
        Err(MessengerError::Refused(reason))
    }

    async fn open(&self, shared: Arc<Shared>, role: TransportSupply, wire: Wire) {
        let handles = shared.handles();
        crate::spawn(connection::run(shared, role, wire));
        // If the listener has been closed, the handles are dropped, which ends the connection.
        let _ = self.accepted.send(Ok(handles)).await;
    }
}

enum HandshakeOutcome {
    New(Arc<Shared>, TransportSupply),
    Resume(mpsc::Sender<Box<Resumption>>, Hello, Resume),
}
