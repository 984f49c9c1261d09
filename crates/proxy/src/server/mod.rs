//! The store's side: takes calls from the osd's attachments and executes them on the real stores.
//!
//! Each shard of the osd has one attachment, for which it holds a seat ([`Seats`]). One thread,
//! `chan-0`, serves all attachments, each in a task of its own. A task handles the doorbell, the
//! control socket and the stores' answers. At the end of a slice of work, it rings the osd's doorbell
//! once for all replies. The same thread may also run the stores' drivers. Nothing orders the calls of
//! different attachments.

mod calls;
mod channel_calls;
mod host_attachment;
mod offers;
mod seats;
mod stages;
mod stripes;
mod transactions;

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::pending;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use base::budget::{Budget, PeerAddress};
use base::clock::Instant;
use base::collections::HashMap;
use base::fault::Faults;
use base::task::spawn_local;
use base::thread::{ThreadClass, spawn};
use base::watch;
use base::work::booked;
use channel::ofi::OfiHostOptions;
use channel::{
    Carrier, ChannelError, ChannelHello, ChannelWelcome, HostMemory, MemoryAccess, MemoryAnswer, Reach,
    Socket, TargetInfo, VERSION,
};
use store::stripes::{EngineOptions, Engines};
use store::{Driver, ObjectStore};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::LocalSet;
use uuid::Uuid;

use host_attachment::{HostAttachment, Reached, Rings};
use offers::OfiHostSource;
use seats::{SeatHeld, SeatLimits, Seats};

/// Maximum number of connected peers that have not sent a hello.
const HELLOS: usize = 32;

/// How long a peer may take to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// A target that a server offers.
#[derive(Clone)]
pub struct ServedTarget {
    /// The target's UUID. After a restart, the osd accepts only the same targets.
    pub uuid: Uuid,
    /// The target's store.
    pub store: Arc<dyn ObjectStore>,
}

/// The socket on which a server listens.
#[derive(Debug)]
pub enum StoreListener {
    /// A UNIX socket. It carries file descriptors of host memory.
    Unix(std::os::unix::net::UnixListener),
    /// A TCP socket. It carries all data unless the osd reaches host memory through libfabric. It
    /// is not authenticated, so bind it to a trusted network.
    Tcp(std::net::TcpListener),
    /// A simulated listener.
    #[cfg(feature = "sim")]
    Sim(channel::sim::SimListener),
}

impl StoreListener {
    /// Listens at `path`. Removes any existing file at `path` first, such as the socket of a dead
    /// process.
    ///
    /// # Errors
    /// Fails if the path cannot be bound.
    pub fn unix(path: &Path) -> std::io::Result<StoreListener> {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        Ok(StoreListener::Unix(std::os::unix::net::UnixListener::bind(path)?))
    }
}

/// Options of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Maximum host memory of all attachments together, in bytes.
    pub max_memory: usize,
    /// Maximum number of unanswered requests on the rings of all attachments together.
    pub max_outstanding: usize,
    /// Options for host memory over libfabric, for osds on another machine or on a DPU. `None`
    /// disables libfabric. The device is opened when the first osd asks for memory over libfabric.
    pub ofi: Option<OfiHostOptions>,
    /// Faults to inject.
    pub faults: Faults,
    /// How long the host's side keeps polling after the last event, before it sleeps.
    pub poll: Duration,
    /// The engines that compute parity on the host. `None` starts a minimal set.
    pub engines: Option<Arc<Engines>>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            max_memory: 256 << 20,
            max_outstanding: 1024,
            ofi: None,
            faults: Faults::default(),
            poll: Duration::ZERO,
            engines: None,
        }
    }
}

/// The state of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerStatus {
    /// Number of held seats: of attachments that are open or being opened.
    pub seats: usize,
    /// Number of seats granted so far, which is the number of the last attachment.
    pub attachments: u64,
    /// Number of stages of all current attachments.
    pub stages: usize,
    /// Number of calls of ended attachments that the stores have not answered yet.
    pub leftover_calls: usize,
    /// Number of attachments that ended because the peer broke the protocol.
    pub violations: u64,
}

#[derive(Default)]
struct Counts {
    seats: AtomicUsize,
    attachments: AtomicU64,
    stages: AtomicUsize,
    leftover_calls: AtomicUsize,
    violations: AtomicU64,
}

/// What the server's owner shares with the server's tasks.
struct ServerControls {
    counts: Arc<Counts>,
    stop: watch::Sender<bool>,
    /// The served targets. A change ends all attachments, and later attachments get the new targets.
    targets: watch::Sender<Arc<[ServedTarget]>>,
}

impl ServerControls {
    /// Creates a server's controls, and the context in which its tasks serve. The receiver is closed
    /// when no task serves any more.
    fn new(
        targets: Vec<ServedTarget>,
        options: ServerOptions,
    ) -> std::io::Result<(ServerControls, ServingContext, mpsc::Receiver<Infallible>)> {
        let counts = Arc::new(Counts::default());
        let (stop, stopped) = watch::channel(false);
        let (serves, ended) = mpsc::channel();
        let engines = match &options.engines {
            Some(engines) => Arc::clone(engines),
            None => Arc::new(Engines::start(EngineOptions::default(), None)?),
        };
        let (targets, offered) = watch::channel(targets.into());
        let counts_of = Arc::clone(&counts);
        let serving =
            ServingContext { targets: offered, engines, options, counts: counts_of, serves, stopped };
        Ok((ServerControls { counts, stop, targets }, serving, ended))
    }

    fn replace(&self, uuid: Uuid, store: &Arc<dyn ObjectStore>) {
        self.targets.send_modify(|targets| {
            let renewed = |target: &ServedTarget| {
                let store = if target.uuid == uuid { store } else { &target.store };
                ServedTarget { uuid: target.uuid, store: Arc::clone(store) }
            };
            *targets = targets.iter().map(renewed).collect();
        });
    }

    fn status(&self) -> ServerStatus {
        ServerStatus {
            seats: self.counts.seats.load(Ordering::Relaxed),
            attachments: self.counts.attachments.load(Ordering::Relaxed),
            stages: self.counts.stages.load(Ordering::Relaxed),
            leftover_calls: self.counts.leftover_calls.load(Ordering::Relaxed),
            violations: self.counts.violations.load(Ordering::Relaxed),
        }
    }
}

/// Serves stores to the shards of one osd at a time, on a thread of its own. Dropping the server ends
/// all attachments.
pub struct Server {
    controls: ServerControls,
    drivers: UnboundedSender<Driver>,
    /// Closed when the last serving task has ended.
    ended: Mutex<mpsc::Receiver<Infallible>>,
}

impl Server {
    /// Starts to serve `targets`.
    ///
    /// # Errors
    /// Fails if the listener cannot be polled or the thread cannot be started.
    pub fn serve(
        listener: StoreListener,
        targets: Vec<ServedTarget>,
        options: ServerOptions,
    ) -> std::io::Result<Server> {
        Server::serve_and_drive(listener, targets, Vec::new(), options, pending)
    }

    /// Starts to serve `targets`, and runs their `drivers` on the same thread. A call and its
    /// answer then pass between server and driver without a wake-up. The drivers run until their
    /// stores are unmounted or dropped, even after the server has stopped. The future of `beside`
    /// also runs on this thread, until it completes or the server stops.
    ///
    /// # Errors
    /// Fails if the listener cannot be polled or the thread cannot be started.
    pub fn serve_and_drive<F>(
        listener: StoreListener,
        targets: Vec<ServedTarget>,
        drivers: Vec<Driver>,
        options: ServerOptions,
        beside: impl FnOnce() -> F + Send + 'static,
    ) -> std::io::Result<Server>
    where
        F: Future<Output = ()> + 'static,
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _entered = runtime.enter();
            AsyncListener::new(listener)?
        };
        let (controls, serving, ended) = ServerControls::new(targets, options)?;
        let (drive, more_drivers) = unbounded_channel();
        let mut stopped = controls.stop.subscribe();
        // The thread ends by itself when nothing is left to do.
        spawn(ThreadClass::Channel, "0", move || {
            let local = LocalSet::new();
            for driver in drivers {
                local.spawn_local(booked(ThreadClass::Store, driver.run()));
            }
            local.spawn_local(async move {
                tokio::select! {
                    biased;
                    _ = stopped.wait_for(|stop| *stop) => {}
                    () = beside() => {}
                }
            });
            local.spawn_local(drive_more(more_drivers));
            local.spawn_local(serving.run(listener));
            runtime.block_on(local);
        })?;
        Ok(Server { controls, drivers: drive, ended: Mutex::new(ended) })
    }

    /// Serves a new store under the UUID of a target that was remounted. Runs the store's driver as
    /// [`serve_and_drive`](Self::serve_and_drive) does. Ends all attachments, so that the osd learns
    /// of the change. Calls of the old attachments never reach the new store.
    pub fn replace(&self, uuid: Uuid, store: Arc<dyn ObjectStore>, driver: Option<Driver>) {
        if let Some(driver) = driver {
            // Sending fails only if the thread has panicked.
            let _ = self.drivers.send(driver);
        }
        self.controls.replace(uuid, &store);
    }

    /// The current state of the server.
    #[must_use]
    pub fn status(&self) -> ServerStatus {
        self.controls.status()
    }

    /// Ends all attachments and stops serving. The stores stay mounted.
    pub fn stop(&self) {
        self.controls.stop.send_replace(true);
        // No message is ever sent. `recv` returns when no task serves any more.
        let _ = self.ended.lock().unwrap_or_else(PoisonError::into_inner).recv();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A server whose tasks run in the caller's `LocalSet`. Simulations and programs with their own
/// event loop use it. The caller runs the drivers of the stores in the same `LocalSet`, with
/// [`base::task::spawn_local`]. Dropping the value ends all attachments.
pub struct LocalServer(ServerControls);

impl LocalServer {
    /// Creates a server, and the future that serves `targets`. The future must be polled in a
    /// `LocalSet`. It completes when the server was stopped and its attachments have ended.
    ///
    /// # Errors
    /// Fails if the listener cannot be polled, or the engines that compute parity cannot be started.
    pub fn new(
        listener: StoreListener,
        targets: Vec<ServedTarget>,
        options: ServerOptions,
    ) -> std::io::Result<(LocalServer, impl Future<Output = ()> + use<>)> {
        let listener = AsyncListener::new(listener)?;
        let (controls, serving, _) = ServerControls::new(targets, options)?;
        Ok((LocalServer(controls), serving.run(listener)))
    }

    /// Serves a new store under the UUID of a target that was remounted. Ends all attachments, so
    /// that the osd learns of the change. Calls of the old attachments never reach the new store.
    pub fn replace(&self, uuid: Uuid, store: &Arc<dyn ObjectStore>) {
        self.0.replace(uuid, store);
    }

    /// The current state of the server.
    #[must_use]
    pub fn status(&self) -> ServerStatus {
        self.0.status()
    }

    /// Ends all attachments and stops serving. The stores stay mounted.
    pub fn stop(&self) {
        self.0.stop.send_replace(true);
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Runs drivers that are added later, each in its own task.
async fn drive_more(mut drivers: UnboundedReceiver<Driver>) {
    while let Some(driver) = drivers.recv().await {
        spawn_local(ThreadClass::Store, driver.run());
    }
}

enum AsyncListener {
    Unix(UnixListener),
    Tcp(TcpListener),
    #[cfg(feature = "sim")]
    Sim(channel::sim::SimListener),
}

impl AsyncListener {
    fn new(listener: StoreListener) -> std::io::Result<AsyncListener> {
        Ok(match listener {
            StoreListener::Unix(listener) => {
                listener.set_nonblocking(true)?;
                AsyncListener::Unix(UnixListener::from_std(listener)?)
            }
            StoreListener::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                AsyncListener::Tcp(TcpListener::from_std(listener)?)
            }
            #[cfg(feature = "sim")]
            StoreListener::Sim(listener) => AsyncListener::Sim(listener),
        })
    }

    async fn accept(&self) -> std::io::Result<(Socket, PeerAddress)> {
        match self {
            AsyncListener::Unix(listener) => {
                Ok((Socket::Unix(listener.accept().await?.0), PeerAddress::Local))
            }
            AsyncListener::Tcp(listener) => loop {
                let (stream, peer) = listener.accept().await?;
                match Socket::tcp(stream) {
                    Ok(socket) => return Ok((socket, peer.ip().into())),
                    Err(e) => tracing::debug!(%peer, "a connection ended before it was accepted: {e}"),
                }
            },
            #[cfg(feature = "sim")]
            AsyncListener::Sim(listener) => Ok((listener.accept().await?, PeerAddress::Local)),
        }
    }
}

struct ServingContext {
    targets: watch::Receiver<Arc<[ServedTarget]>>,
    engines: Arc<Engines>,
    options: ServerOptions,
    counts: Arc<Counts>,
    serves: mpsc::Sender<Infallible>,
    stopped: watch::Receiver<bool>,
}

/// The slots of peers that have not sent a hello. Few slots suffice, because an osd sends the hello
/// as soon as it has connected. When a new peer needs a slot and none is free, a silent peer loses
/// its slot, preferably a peer of an address that holds more than its fair share of slots.
struct Hellos {
    budget: RefCell<Budget<u64>>,
    /// Notifies each peer when it has lost its slot.
    peers: RefCell<HashMap<u64, Rc<Notify>>>,
    last: Cell<u64>,
}

impl Default for Hellos {
    fn default() -> Hellos {
        let budget = RefCell::new(Budget::new(HELLOS, Duration::ZERO));
        Hellos { budget, peers: RefCell::default(), last: Cell::new(0) }
    }
}

impl Hellos {
    fn admit(self: &Rc<Self>, peer: PeerAddress) -> Option<HelloPlace> {
        let id = self.last.get() + 1;
        self.last.set(id);
        let victim = self.budget.borrow_mut().admit(id, peer, Instant::now()).ok()?;
        self.end(victim);
        let lost = Rc::new(Notify::new());
        self.peers.borrow_mut().insert(id, Rc::clone(&lost));
        Some(HelloPlace { hellos: Rc::clone(self), id, lost })
    }

    /// Drops one peer to free its file descriptor.
    fn shed(&self) {
        let victim = self.budget.borrow_mut().shed(Instant::now());
        self.end(victim);
    }

    fn end(&self, victim: Option<u64>) {
        if let Some(lost) = victim.and_then(|victim| self.peers.borrow_mut().remove(&victim)) {
            metrics::counter!("outboard_store_connections_reclaimed_total").increment(1);
            lost.notify_one();
        }
    }
}

/// The slot of one peer that has not sent a hello. Dropping it frees the slot.
struct HelloPlace {
    hellos: Rc<Hellos>,
    id: u64,
    lost: Rc<Notify>,
}

impl HelloPlace {
    /// Resolves when another peer has taken the slot.
    async fn lost(&self) {
        self.lost.notified().await;
    }
}

impl Drop for HelloPlace {
    fn drop(&mut self) {
        self.hellos.budget.borrow_mut().remove(self.id);
        self.hellos.peers.borrow_mut().remove(&self.id);
    }
}

/// The seat of an attachment, which the server's status counts. Dropping it frees the seat.
struct AttachedSeat {
    held: SeatHeld,
    counts: Arc<Counts>,
    _serves: mpsc::Sender<Infallible>,
}

impl AttachedSeat {
    fn new(held: SeatHeld, counts: &Arc<Counts>, serves: mpsc::Sender<Infallible>) -> AttachedSeat {
        counts.seats.fetch_add(1, Ordering::Relaxed);
        AttachedSeat { held, counts: Arc::clone(counts), _serves: serves }
    }
}

impl Drop for AttachedSeat {
    fn drop(&mut self) {
        self.counts.seats.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ServingContext {
    /// Serves osds until the server is stopped and all attachments have ended.
    async fn run(self, listener: AsyncListener) {
        let (memory, outstanding) = (self.options.max_memory, self.options.max_outstanding);
        let seats = Seats::new(SeatLimits { memory, outstanding });
        let offers = Rc::new(OfiHostSource::new(self.options.ofi.clone(), &self.options.faults));
        let hellos = Rc::new(Hellos::default());
        let mut stopped = self.stopped.clone();
        loop {
            let socket = tokio::select! {
                biased;
                _ = stopped.wait_for(|stop| *stop) => break,
                socket = listener.accept() => socket,
            };
            match socket {
                Ok((socket, peer)) => {
                    let Some(place) = hellos.admit(peer) else { continue };
                    self.open(socket, place, &seats, &offers);
                    // A dropped peer frees its descriptor before the next peer takes another.
                    tokio::task::yield_now().await;
                }
                Err(e) => {
                    tracing::error!("cannot accept a connection of an osd: {e}");
                    hellos.shed();
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        drop((self, listener));
        seats.all_free().await;
    }

    /// Performs the handshake and serves the peer, in its own task, so that a silent peer does not
    /// delay others.
    fn open(&self, socket: Socket, place: HelloPlace, seats: &Rc<Seats>, offers: &Rc<OfiHostSource>) {
        let mut offered = self.targets.clone();
        let mut stopped = self.stopped.clone();
        let targets = Arc::clone(&offered.borrow_and_update());
        let (options, counts) = (self.options.clone(), Arc::clone(&self.counts));
        let engines = Arc::clone(&self.engines);
        let (seats, offers, serves) = (Rc::clone(seats), Rc::clone(offers), self.serves.clone());
        spawn_local(ThreadClass::Channel, async move {
            let decide = |hello: &ChannelHello, carrier: &Carrier| {
                let seat = AttachedSeat::new(seats.claim(hello.seat)?, &counts, serves);
                let number = counts.attachments.fetch_add(1, Ordering::Relaxed) + 1;
                let name = format!("attachment {number} ({})", hello.seat);
                let (welcome, access, rings) =
                    decide(hello, carrier, &targets, &options, &offers, &seat.held, number)?;
                Ok((welcome, access, (name, seat, rings)))
            };
            let opened = tokio::select! {
                biased;
                _ = stopped.wait_for(|stop| *stop) => return,
                () = place.lost() => return tracing::debug!("a peer that has sent no hello has lost its slot"),
                opened = tokio::time::timeout(HELLO_TIMEOUT, channel::accept(socket, decide)) => opened,
            };
            let ((name, seat, rings), control) = match opened {
                Ok(Ok((_, admitted, control))) => (admitted, control),
                Ok(Err(e)) => return tracing::warn!("no attachment was opened: {e}"),
                Err(_) => return tracing::warn!("no attachment was opened: the peer sent no hello in time"),
            };
            drop(place);
            let attachment = HostAttachment::new(targets, engines, rings, control, counts, &options);
            let stop = async {
                tokio::select! {
                    biased;
                    _ = stopped.wait_for(|stop| *stop) => {}
                    Ok(()) = offered.changed() => {
                        tracing::info!("{name} ends because a target was remounted");
                    }
                }
            };
            attachment.run(&name, stop, || drop(seat)).await;
        });
    }
}

/// Decides how to serve an osd. If possible, the server provides the host memory that the osd asks
/// for, and reserves it for the `seat`. Otherwise it states the reason, and the control socket carries
/// all data, which is slower. A request above the server's limits is refused.
fn decide(
    hello: &ChannelHello,
    carrier: &Carrier,
    targets: &[ServedTarget],
    options: &ServerOptions,
    offers: &Rc<OfiHostSource>,
    seat: &SeatHeld,
    attachment: u64,
) -> channel::Result<(ChannelWelcome, Option<MemoryAccess>, Option<Rings>)> {
    let targets_info = targets.iter().map(|target| TargetInfo { uuid: target.uuid }).collect();
    let memory = MemoryAnswer::None(None);
    let welcome =
        ChannelWelcome { version: VERSION, nonce: hello.nonce, attachment, memory, targets: targets_info };
    let Some(request) = &hello.memory else { return Ok((welcome, None, None)) };
    request.layout.check()?;
    seat.reserve(request.layout.len(), hello.outstanding as usize)?;
    let without_memory = |welcome: ChannelWelcome, why: String| {
        tracing::warn!("attachment {attachment} has no host memory: {why}");
        seat.release_memory();
        Ok((ChannelWelcome { memory: MemoryAnswer::None(Some(why)), ..welcome }, None, None))
    };
    let memory = HostMemory::new(request.layout)?;
    let opened = match &request.reach {
        Reach::Descriptors if carrier.carries_memory() => Reached::by_descriptors(&memory, carrier),
        Reach::Descriptors => {
            let why = "file descriptors cannot be sent over TCP; use a UNIX socket, or the engine ofi";
            return without_memory(welcome, why.to_owned());
        }
        Reach::Ofi { provider } => Reached::by_offer(offers, provider, &memory),
    };
    let (reached, answer, access) = match opened {
        Ok(opened) => opened,
        Err(ChannelError::Refused(why)) => return without_memory(welcome, why),
        Err(e) => return without_memory(welcome, e.to_string()),
    };
    for target in targets {
        target.store.register_memory(&memory.arena);
    }
    let rings = Rings::new(memory, reached, hello.outstanding as usize, options.faults.clone());
    Ok((ChannelWelcome { memory: answer, ..welcome }, access, Some(rings)))
}
