//! The server side of a network stack: accepts transports and performs handshakes. Each transport
//! begins a new connection or resumes an existing one.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use base::BoxFuture;
use base::budget::{Budget, PeerAddress, spare_descriptors};
use base::collections::HashMap;
use identity::ProofKey;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};
use wire::PathStatus;

use crate::admissions::Shortage;
use crate::config::ConnectionConfig;
use crate::connection::{
    self, ConnectionSide, ConnectionSlot, Negotiated, Resumption, Shared, TransportSupply,
};
use crate::frame::{Body, Challenge, Hello, PathOffer, Proof, Reject, RejectCode, Resume, Welcome};
use crate::handshake::{self, EncryptedExchange, FirstFrame, VERSIONS};
use crate::paths::MAX_PATHS;
use crate::transport::{AcceptedTicket, Acceptor, ConnectTicket, TicketOffice, Wire};
use crate::{Admissions, Ends, Limits, Listener, MessengerError, PeerInfo, Result};

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
    registry: Arc<ConnectionRegistry>,
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
pub(super) struct ConnectionRegistry {
    connections: Mutex<ConnectionTable>,
    admissions: Arc<Admissions>,
}

/// What the slots of connections are divided between: a tenant's clients at one address. So neither an
/// address nor a tenant keeps others out.
type TenantPeer = (u32, PeerAddress);

struct ConnectionTable {
    entries: HashMap<u128, RegistryEntry>,
    /// The connections by the numbers that stand for them in their tickets.
    in_tickets: HashMap<u64, u128>,
    places: Budget<u128, TenantPeer>,
    /// Slots of detached connections. A detached connection holds one of these slots in addition to
    /// its slot in `places`.
    detached: Budget<u128, TenantPeer>,
}

struct RegistryEntry {
    proof_key: ProofKey,
    /// Number and name of the tenant to which the connection belongs.
    tenant: (u32, String),
    /// Number of the newest ticket that was accepted; 0 if none was.
    last_ticket: u32,
    resume: mpsc::Sender<Box<Resumption>>,
    shared: Weak<Shared>,
}

/// The slot of a connection in its listener's registry. Dropping this value frees the slot.
struct RegistryPlace {
    registry: Weak<ConnectionRegistry>,
    connection: u128,
    peer: TenantPeer,
    held: AtomicBool,
}

impl ConnectionTable {
    /// Removes a connection from the table and returns it. If it has lost its slot to another
    /// client, the caller must [close](Shared::reclaim) it after releasing the mutex.
    fn forget(&mut self, connection: u128) -> Option<Arc<Shared>> {
        self.places.remove(connection);
        self.detached.remove(connection);
        let entry = self.entries.remove(&connection)?;
        self.in_tickets.remove(&ConnectTicket::connection_in_tickets(&entry.proof_key));
        entry.shared.upgrade()
    }
}

impl TicketOffice for ConnectionRegistry {
    fn redeem(&self, ticket: &ConnectTicket) -> Option<AcceptedTicket> {
        let mut connections = self.lock();
        let connection = *connections.in_tickets.get(&ticket.connection)?;
        let entry = connections.entries.get_mut(&connection)?;
        if !ticket.is_of(&entry.proof_key) || ticket.number <= entry.last_ticket {
            return None;
        }
        entry.last_ticket = ticket.number;
        let (tenant_id, tenant) = entry.tenant.clone();
        Some(AcceptedTicket { connection, tenant_id, tenant, nonce: ticket.nonce })
    }
}

impl ConnectionRegistry {
    /// Creates an empty registry with the limits of `config`.
    pub(super) fn new(config: &ConnectionConfig) -> Arc<ConnectionRegistry> {
        let descriptors = config.max_descriptors.unwrap_or_else(spare_descriptors);
        let admissions = Arc::new(Admissions::new(config, descriptors));
        let connections = Mutex::new(ConnectionTable {
            entries: HashMap::default(),
            in_tickets: HashMap::default(),
            places: Budget::new(admissions.max_connections(), CONNECTION_PATIENCE),
            detached: Budget::new(config.max_held, Duration::MAX),
        });
        Arc::new(ConnectionRegistry { connections, admissions })
    }

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
        let (connection, user) = (shared.connection_id(), shared.peer().user.as_ref());
        let tenant = user.map(|user| (user.tenant_id, user.tenant.clone())).unwrap_or_default();
        let peer = (tenant.0, shared.peer().peer);
        let mut connections = self.lock();
        let Ok(victim) = connections.places.admit(connection, peer, Instant::now()) else {
            drop(connections);
            self.admissions.add_refused(Shortage::Connections, 1);
            return None;
        };
        let victim = victim.and_then(|victim| connections.forget(victim));
        let (proof_key, shared) = (shared.proof_key().clone(), Arc::downgrade(shared));
        let in_tickets = ConnectTicket::connection_in_tickets(&proof_key);
        let entry = RegistryEntry { proof_key, tenant, last_ticket: 0, resume, shared };
        connections.entries.insert(connection, entry);
        connections.in_tickets.insert(in_tickets, connection);
        drop(connections);
        self.reclaim(victim, Shortage::Connections);
        let (registry, held) = (Arc::downgrade(self), AtomicBool::new(false));
        Some((resumptions, RegistryPlace { registry, connection, peer, held }))
    }

    /// Finds the connection to resume, if the client's proof is right. Returns the channel that passes
    /// the new transport to the connection. A wrong proof gives the same result as an unknown
    /// connection.
    fn find(
        &self,
        resume: &Resume,
        challenge: &Challenge,
        proof: &Proof,
    ) -> Option<mpsc::Sender<Box<Resumption>>> {
        let connections = self.lock();
        let entry = connections.entries.get(&resume.connection)?;
        handshake::proves(&entry.proof_key, resume, challenge, proof).then(|| entry.resume.clone())
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
        registry: Arc<ConnectionRegistry>,
    ) -> StreamListener {
        let endpoint = acceptor.endpoint();
        let paths: Vec<PathOffer> = others
            .iter()
            .map(|(name, other)| PathOffer { name: name.clone(), endpoint: other.endpoint() })
            .take(MAX_PATHS)
            .collect();
        let (sender, accepted) = mpsc::channel(BACKLOG);
        let admissions = Arc::clone(&registry.admissions);
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
            Ok(HandshakeOutcome::Resume(connection, request, challenge)) => {
                let resumption = Box::new(Resumption { wire, request, challenge });
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
        match handshake::read_first(wire).await? {
            FirstFrame::Begin(first) if wire.ticket.is_none() => self.begin_connection(wire, &first).await,
            FirstFrame::Begin(_) => Err(MessengerError::Protocol(
                "a client began a connection over a transport that it opened to resume one".into(),
            )),
            FirstFrame::Resume(resume) => self.resume_connection(wire, resume).await,
        }
    }

    /// Begins a connection with a client that proves its key. Before the proof, the client has a slot
    /// for its handshake, and nothing else.
    async fn begin_connection(&self, wire: &mut Wire, first: &[u8]) -> Result<HandshakeOutcome> {
        let (address, peer) = (wire.address.clone(), wire.peer);
        let trust = &self.config.trust;
        let mut exchange = EncryptedExchange::server(wire, trust, first).await?;
        let key = exchange.prove().await?;
        let hello = match exchange.receive().await? {
            Body::Hello(hello) => hello,
            other => {
                let what = format!("the client sent {:?} instead of Hello", other.kind());
                return Err(MessengerError::Protocol(what));
            }
        };
        let Some(user) = trust.user_of(&key) else {
            let reason = format!(
                "the node refuses the key {key}: it is unknown or was revoked; use the credentials of a user of this \
                 node"
            );
            return refuse(exchange, RejectCode::UnknownKey, reason).await;
        };
        if let Err(reason) = check_hello(&hello) {
            return refuse(exchange, RejectCode::Incompatible, reason).await;
        }
        let peer = PeerInfo { address, peer, key, user: Some(user), connection: base::entropy::random() };
        let (settled, welcome) = settle(&hello, peer, exchange.proof_key(), &self.config, &self.paths);
        let shared = Shared::new(settled, self.config.clone(), ConnectionSide::Server, None);
        let Some((resumptions, registration)) = self.registry.register(&shared) else {
            let max = self.admissions.max_connections();
            let reason =
                format!("all {max} connections are in use, and this client's address has its fair share");
            return refuse(exchange, RejectCode::Full, reason).await;
        };
        exchange.send(&Body::Welcome(welcome)).await?;
        Ok(HandshakeOutcome::New(
            shared,
            TransportSupply::Server { resumptions, registration: Arc::new(registration) },
        ))
    }

    /// Resumes a connection with a client that proves that the connection is its own.
    async fn resume_connection(&self, wire: &mut Wire, resume: Resume) -> Result<HandshakeOutcome> {
        let (challenge, proof) = handshake::challenge(wire).await?;
        let is_for =
            |ticket: &AcceptedTicket| (ticket.connection, ticket.nonce) == (resume.connection, resume.nonce);
        let connection = match &wire.ticket {
            Some(ticket) if !is_for(ticket) => None,
            _ => self.registry.find(&resume, &challenge, &proof),
        };
        let Some(connection) = connection else {
            let reason = "the server has no connection with this id and proof".to_owned();
            let reject = Reject { code: RejectCode::UnknownConnection, reason: reason.clone() };
            // The peer may have disconnected already; ignore the error.
            let _ = handshake::write(wire, &[Body::Reject(reject)]).await;
            return Err(MessengerError::Refused(reason));
        };
        Ok(HandshakeOutcome::Resume(connection, resume, challenge))
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
    Resume(mpsc::Sender<Box<Resumption>>, Resume, Challenge),
}

/// Rejects a client that has proved its key.
async fn refuse(
    mut exchange: EncryptedExchange<'_>,
    code: RejectCode,
    reason: String,
) -> Result<HandshakeOutcome> {
    // The peer may have disconnected already; ignore the error.
    let _ = exchange.send(&Body::Reject(Reject { code, reason: reason.clone() })).await;
    Err(MessengerError::Refused(reason))
}

/// Checks whether this side can accept the [`Hello`]. Returns the reason if it cannot.
fn check_hello(hello: &Hello) -> Result<(), String> {
    if hello.versions.0 > VERSIONS.1 || hello.versions.1 < VERSIONS.0 {
        return Err(format!(
            "no common protocol version: the client supports {:?}, the server supports {VERSIONS:?}",
            hello.versions
        ));
    }
    if hello.granted > crate::config::MAX_CREDIT_BYTES {
        return Err("the client grants more than 2 GiB of credit".to_owned());
    }
    Ok(())
}

/// Determines the values of a new connection. Returns the agreed values, and the [`Welcome`] for the
/// client.
fn settle(
    hello: &Hello,
    peer: PeerInfo,
    proof_key: ProofKey,
    config: &ConnectionConfig,
    paths: &[PathOffer],
) -> (Negotiated, Welcome) {
    let own = &config.limits;
    let limits = Limits {
        max_header: own.max_header.min(hello.limits.0 as usize),
        max_inline: own.max_inline.min(hello.limits.1 as usize),
        ..*own
    };
    let welcome = Welcome {
        version: VERSIONS.1,
        connection: peer.connection,
        limits: (own.max_header as u32, own.max_inline as u32, own.max_bulk as u64),
        granted: config.window_bytes,
        paths: paths.to_vec(),
    };
    (Negotiated { peer, proof_key, limits, granted: hello.granted }, welcome)
}
