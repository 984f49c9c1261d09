//! [`ControlServer`]: accepts clients of the control plane and serves their calls.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use base::BoxFuture;
use base::budget::{Budget, PeerAddress};
use base::collections::HashMap;
use base::thread::ThreadClass;
use identity::{Caller, KeyHash, Protocol, Trust, proven_key};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::service::InterceptorLayer;
use tonic::transport::server::Connected;
use tonic::{Request, Status};
use wire::{AdminReply, AdminRequest};

use crate::gateways::GatewayRegistry;
use crate::proto::accounts_server::AccountsServer;
use crate::proto::capabilities_server::CapabilitiesServer;
use crate::proto::debug_server::DebugServer;
use crate::proto::disks_server::DisksServer;
use crate::proto::gateways_server::GatewaysServer;
use crate::proto::node_server::NodeServer;
use crate::proto::pools_server::PoolsServer;
use crate::proto::sessions_server::SessionsServer;
use crate::proto::targets_server::TargetsServer;
use crate::proto::{self};
use crate::services::Services;

/// Maximum number of connections, handshakes included. At this limit, a new connection replaces the
/// longest-silent connection of a party that holds more than its fair share: of a tenant at an address,
/// or of an address whose clients have not proved their keys.
const CONNECTIONS_MAX: usize = 128;

/// Minimum silence after which a connection loses its slot to another connection of its own party.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pause between two checks whether the clients' keys are still known.
const SWEEP_PAUSE: Duration = Duration::from_secs(1);

/// Time limit of a TLS handshake, and lifetime of a connection whose client has an unknown key.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);

/// Maximum number of connections that wait for the server of HTTP/2.
const BACKLOG: usize = 16;

/// Pause after the system failed to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Time between two probes of an idle connection, and time limit of the answer. Both sides probe.
pub(crate) const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// Maximum number of calls of a connection at a time. Further calls wait at the client.
const CALLS_MAX: u32 = 16;

/// Maximum total size of a call's headers, in bytes.
const HEADERS_MAX: u32 = 8 << 10;

/// Maximum size of a request, in bytes. Requests contain names and numbers.
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// Executes administrative requests. The osd implements it. Any thread may call it.
pub trait Administrator: Send + Sync {
    /// Executes a request of `caller`. `is_repeated` says whether an earlier attempt of the request may
    /// have taken effect.
    fn administer(
        &self,
        caller: Caller,
        request: AdminRequest,
        is_repeated: bool,
    ) -> BoxFuture<'static, wire::Result<AdminReply>>;
}

impl<F> Administrator for F
where
    F: Fn(Caller, AdminRequest, bool) -> BoxFuture<'static, wire::Result<AdminReply>> + Send + Sync,
{
    fn administer(
        &self,
        caller: Caller,
        request: AdminRequest,
        is_repeated: bool,
    ) -> BoxFuture<'static, wire::Result<AdminReply>> {
        self(caller, request, is_repeated)
    }
}

/// A bound address at which a [`ControlServer`] will serve calls.
#[derive(Debug)]
pub struct ControlListener {
    listener: std::net::TcpListener,
    address: SocketAddr,
}

impl ControlListener {
    /// Binds `address`, which is `host:port`. Port 0 chooses a free port.
    ///
    /// # Errors
    /// If the address cannot be used.
    pub fn bind(address: &str) -> io::Result<ControlListener> {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(ControlListener { listener, address })
    }

    /// Returns the address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// The server of the control plane, on a thread of its own. Dropping it ends the thread, and all calls
/// in progress fail.
#[derive(Debug)]
pub struct ControlServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Starts to serve calls at the listener's address. `trust` says whose calls the server accepts. The
    /// gateways that connect are registered in `gateways`.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn start(
        listener: ControlListener,
        trust: Trust,
        administrator: Arc<dyn Administrator>,
        gateways: GatewayRegistry,
    ) -> io::Result<ControlServer> {
        let address = listener.address;
        let (stop, stopped) = oneshot::channel();
        let runtime = base::task::runtime()?;
        let body = move || {
            let serving = serve(listener.listener, trust, Services { administrator, gateways });
            runtime.block_on(async {
                tokio::select! {
                    result = serving => if let Err(error) = result {
                        tracing::error!(%error, "the control plane has stopped serving calls");
                    },
                    // Dropping the sender also means to stop.
                    _ = stopped => {}
                }
            });
        };
        let thread = base::thread::spawn(ThreadClass::Admin, "control", body)?;
        Ok(ControlServer { address, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns the address at which the server serves calls.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The panic hook has already reported a panic of the thread.
            drop(thread.join());
        }
    }
}

async fn serve(
    listener: std::net::TcpListener,
    trust: Trust,
    services: Services,
) -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::from_std(listener)?;
    let config = trust.server_config(Protocol::Control).ok_or("this process may not act as server")?;
    let (accepted, connections) = mpsc::channel(BACKLOG);
    let reception = Arc::new(ControlReception {
        acceptor: TlsAcceptor::from(config),
        trust: trust.clone(),
        places: Arc::default(),
        accepted,
    });
    let sweeping = sweep(trust.clone(), Arc::clone(&reception.places));
    let accepting = accept_all(listener, reception);
    let guard = move |request: Request<()>| check_caller(&trust, request);
    let node = NodeServer::new(services.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
    let pools = PoolsServer::new(services.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
    let targets = TargetsServer::new(services.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
    let accounts = AccountsServer::new(services.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
    let sessions = SessionsServer::new(services.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
    let debug = DebugServer::new(services.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
    let disks = DisksServer::new(services.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
    let gateways = GatewaysServer::new(services.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
    let capabilities = CapabilitiesServer::new(services).max_decoding_message_size(REQUEST_BYTES_MAX);
    let (health, healthy) = tonic_health::server::health_reporter();
    health.set_serving::<NodeServer<Services>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let incoming = futures::stream::unfold(connections, |mut connections| async {
        let next = connections.recv().await?;
        Some((Ok::<_, io::Error>(next), connections))
    });
    let serving = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE.0))
        .http2_keepalive_timeout(Some(KEEPALIVE.1))
        .max_concurrent_streams(CALLS_MAX)
        .concurrency_limit_per_connection(CALLS_MAX as usize)
        .http2_max_header_list_size(HEADERS_MAX)
        // Also refuses calls that no service has, so that a client with an unknown key learns
        // nothing.
        .layer(InterceptorLayer::new(guard))
        .add_service(node)
        .add_service(pools)
        .add_service(targets)
        .add_service(accounts)
        .add_service(capabilities)
        .add_service(sessions)
        .add_service(debug)
        .add_service(disks)
        .add_service(gateways)
        .add_service(healthy)
        .add_service(reflection)
        .serve_with_incoming(incoming);
    tokio::select! {
        never = accepting => match never {},
        never = sweeping => match never {},
        result = serving => Ok(result?),
    }
}

/// Refuses the calls of clients whose keys are unknown now, and tells the services who makes a call. A
/// user may have been removed since the connection began.
fn check_caller(trust: &Trust, mut request: Request<()>) -> Result<Request<()>, Status> {
    let key = request.extensions().get::<ConnectedClient>().map(|client| client.key);
    match key.map(|key| (key, trust.user_of(&key))) {
        Some((key, Some(user))) => {
            request.extensions_mut().insert(Caller { key, user });
            Ok(request)
        }
        Some((_, None)) if base::mutant!(ServeUnknownKeys) => Ok(request),
        Some((key, None)) => Err(Status::unauthenticated(format!(
            "the node refuses the key {key}: it is unknown or was revoked; use the credentials of a user of this node"
        ))),
        None => Err(Status::unauthenticated("the client has proved no key")),
    }
}

/// The client of a connection.
#[derive(Debug, Clone)]
struct ConnectedClient {
    key: KeyHash,
}

/// What the tasks that accept connections share.
struct ControlReception {
    acceptor: TlsAcceptor,
    trust: Trust,
    places: Arc<Places>,
    accepted: mpsc::Sender<ControlStream>,
}

async fn accept_all(listener: TcpListener, reception: Arc<ControlReception>) -> std::convert::Infallible {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let peer = peer.ip().into();
                if let Some(place) = reception.places.take(peer) {
                    base::task::spawn(
                        ThreadClass::Admin,
                        Arc::clone(&reception).receive(stream, peer, place),
                    );
                }
            }
            Err(error) => {
                tracing::warn!(%error, "the control plane cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

impl ControlReception {
    /// Performs the handshake with a client.
    async fn receive(self: Arc<Self>, stream: TcpStream, peer: PeerAddress, place: ConnectionPlace) {
        // Without this option, small messages wait for acknowledgements.
        let _ = stream.set_nodelay(true);
        let shaking = async {
            tokio::select! {
                biased;
                () = place.slot.closed() => None,
                shaken = tokio::time::timeout(HANDSHAKE_TIME, self.acceptor.accept(stream)) => {
                    shaken.ok().and_then(|shaken| {
                        shaken.inspect_err(|error| tracing::debug!(%error, "a handshake has failed")).ok()
                    })
                }
            }
        };
        let Some(stream) = shaking.await else { return };
        let connection = stream.get_ref().1;
        let Some(key) = proven_key(connection) else { return };
        if connection.alpn_protocol() != Some(b"h2") {
            return;
        }
        match self.trust.user_of(&key) {
            Some(user) if !place.belongs_to(key, (Some(user.tenant_id), peer)) => return,
            Some(_) => {}
            None => {
                // The client learns the reason from its first call.
                let slot = Arc::clone(&place.slot);
                base::task::spawn(ThreadClass::Admin, async move {
                    tokio::time::sleep(HANDSHAKE_TIME).await;
                    slot.close();
                });
            }
        }
        // If the server has ended, the connection is dropped.
        let _ = self.accepted.send(ControlStream { stream, place, caller: ConnectedClient { key } }).await;
    }
}

/// Closes the connections of removed users.
async fn sweep(trust: Trust, places: Arc<Places>) -> std::convert::Infallible {
    loop {
        tokio::time::sleep(SWEEP_PAUSE).await;
        places.close_unless(|key| trust.user_of(key).is_some());
    }
}

/// Number of a tenant, or `None` before the client has proved its key, and the client's address.
type Party = (Option<u32>, PeerAddress);

/// The slots of the connections.
struct Places(Mutex<PlaceTable>);

struct PlaceTable {
    last: u64,
    budget: Budget<u64, Party>,
    slots: HashMap<u64, TakenSlot>,
}

struct TakenSlot {
    signal: Arc<ClosingSignal>,
    /// The key of the connection's client, which belonged to a user of the node.
    key: Option<KeyHash>,
}

/// The slot of a connection. Dropping it frees the slot.
struct ConnectionPlace {
    id: u64,
    slot: Arc<ClosingSignal>,
    places: Arc<Places>,
}

/// Whether a connection must end.
#[derive(Default)]
struct ClosingSignal {
    is_closed: AtomicBool,
    reader: Mutex<Option<Waker>>,
}

impl Default for Places {
    fn default() -> Places {
        let budget = Budget::new(CONNECTIONS_MAX, PATIENCE);
        Places(Mutex::new(PlaceTable { last: 0, budget, slots: HashMap::default() }))
    }
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, PlaceTable> {
        // No code panics while it holds the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a slot to a connection from `peer`, perhaps that of another connection. `None` if the
    /// clients at this address that have not proved their keys already hold their fair share.
    fn take(self: &Arc<Self>, peer: PeerAddress) -> Option<ConnectionPlace> {
        let slot = Arc::<ClosingSignal>::default();
        let mut table = self.lock();
        table.last += 1;
        let id = table.last;
        table.admit(id, (None, peer), TakenSlot { signal: Arc::clone(&slot), key: None })?;
        drop(table);
        Some(ConnectionPlace { id, slot, places: Arc::clone(self) })
    }

    /// Closes the connections of users whose keys are not known any more.
    fn close_unless(&self, is_known: impl Fn(&KeyHash) -> bool) {
        let table = self.lock();
        let unknown = table.slots.values().filter(|slot| slot.key.is_some_and(|key| !is_known(&key)));
        unknown.for_each(|slot| slot.signal.close());
    }
}

impl PlaceTable {
    /// Gives a slot to the connection `id` of `party`, perhaps that of another connection, which is
    /// closed. `None` if the party already holds its fair share.
    fn admit(&mut self, id: u64, party: Party, slot: TakenSlot) -> Option<()> {
        let victim = self.budget.admit(id, party, Instant::now()).ok()?;
        if let Some(victim) = victim.and_then(|victim| self.slots.remove(&victim)) {
            victim.signal.close();
        }
        self.slots.insert(id, slot);
        Some(())
    }
}

impl ConnectionPlace {
    /// Counts the slot for the tenant of the client, who has proved `key`. Returns false if the
    /// connection must end, because it has lost its slot or the tenant already holds its fair share.
    fn belongs_to(&self, key: KeyHash, party: Party) -> bool {
        let mut table = self.places.lock();
        let Some(slot) = table.slots.remove(&self.id) else { return false };
        table.budget.remove(self.id);
        table.admit(self.id, party, TakenSlot { key: Some(key), ..slot }).is_some()
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut table = self.places.lock();
        table.budget.remove(self.id);
        table.slots.remove(&self.id);
    }
}

impl ClosingSignal {
    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        let waker = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Returns whether the connection must end. If not, `cx` is woken when it must.
    fn poll_closed(&self, cx: &Context<'_>) -> bool {
        *self.reader.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
        self.is_closed.load(Ordering::Acquire)
    }

    async fn closed(&self) {
        std::future::poll_fn(|cx| if self.poll_closed(cx) { Poll::Ready(()) } else { Poll::Pending }).await;
    }
}

/// A connection whose client has proved its key.
struct ControlStream {
    stream: TlsStream<TcpStream>,
    place: ConnectionPlace,
    caller: ConnectedClient,
}

impl Connected for ControlStream {
    type ConnectInfo = ConnectedClient;

    fn connect_info(&self) -> ConnectedClient {
        self.caller.clone()
    }
}

impl AsyncRead for ControlStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.place.slot.poll_closed(cx) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if read.is_ready() {
            self.place.places.lock().budget.heard(self.place.id, Instant::now());
        }
        read
    }
}

impl AsyncWrite for ControlStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
