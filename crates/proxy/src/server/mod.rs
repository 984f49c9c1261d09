//! The store's side: takes calls from the osd's attachments and executes them on the real stores.
//!
//! Each shard of the osd has one attachment, for which it holds a seat ([`Seats`]). A server has one
//! or more event loops, each on a thread (`chan-0`, `chan-1`, ...). A loop serves its attachments, each
//! in a task of its own, and may run the drivers of some of the stores. A task handles the doorbell, the
//! control socket and the stores' answers. At the end of a slice of work, it rings the osd's doorbell
//! once for all replies. Calls reach the driver of a store on another loop through the store's queue.
//! Nothing orders the calls of different attachments.

mod calls;
mod channel_calls;
mod hellos;
mod host_attachment;
mod listener;
mod loops;
mod offers;
mod seats;
mod serving;
mod stages;
mod stripes;
mod transactions;

use std::convert::Infallible;
use std::future::pending;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use base::fault::Faults;
use base::task::spawn_local;
use base::thread::{ThreadClass, spawn};
use base::watch;
use channel::ofi::OfiHostOptions;
use identity::Trust;
use store::stripes::{EngineOptions, Engines};
use store::{Driver, ObjectStore};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::LocalSet;
use uuid::Uuid;

pub use listener::StoreListener;

use listener::AsyncListener;
use loops::{Loops, Peer};
use offers::OfiHostSource;
use seats::{SeatLimits, Seats};
use serving::ServingContext;

/// Maximum number of event loops of a server.
pub const MAX_LOOPS: usize = 64;

/// A target that a server offers.
#[derive(Clone)]
pub struct ServedTarget {
    /// The target's UUID. After a restart, the osd accepts only the same targets.
    pub uuid: Uuid,
    /// The target's store.
    pub store: Arc<dyn ObjectStore>,
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
    /// The store's identity, and the osds that it accepts over TCP.
    pub trust: Trust,
    /// Faults to inject.
    pub faults: Faults,
    /// How long the host's side keeps polling after the last event, before it sleeps.
    pub poll: Duration,
    /// The engines that compute parity on the host. `None` starts a minimal set.
    pub engines: Option<Arc<Engines>>,
    /// Number of event loops, 1 to [`MAX_LOOPS`]. They share the attachments and the drivers. A
    /// [`LocalServer`] has one loop.
    pub loops: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            max_memory: 256 << 20,
            max_outstanding: 1024,
            ofi: None,
            trust: Trust::default(),
            faults: Faults::default(),
            poll: Duration::ZERO,
            engines: None,
            loops: 1,
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
        let (memory, outstanding) = (options.max_memory, options.max_outstanding);
        let serving = ServingContext {
            targets: offered,
            engines,
            counts: Arc::clone(&counts),
            seats: Seats::new(SeatLimits { memory, outstanding }),
            offers: Arc::new(OfiHostSource::new(options.ofi.clone(), &options.faults)),
            options,
            serves,
            stopped,
        };
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

/// Serves stores to the shards of one osd at a time, on threads of its own. Dropping the server ends
/// all attachments.
pub struct Server {
    controls: ServerControls,
    /// For each loop, the sender of further drivers.
    drivers: Vec<UnboundedSender<Driver>>,
    /// Closed when the last serving task has ended.
    ended: Mutex<mpsc::Receiver<Infallible>>,
}

/// The parts of an event loop, for its thread.
struct LoopParts {
    number: usize,
    runtime: Runtime,
    drivers: UnboundedReceiver<Driver>,
    peers: PeersOf,
}

/// How a loop gets its peers.
enum PeersOf {
    /// The first loop accepts all connections, and passes some of them to other loops.
    Listener(AsyncListener, Loops),
    /// A further loop gets connections from the first loop.
    First(UnboundedReceiver<Peer>),
}

impl Server {
    /// Starts to serve `targets`.
    ///
    /// # Errors
    /// Fails if the listener cannot be polled or a thread cannot be started.
    pub fn serve(
        listener: StoreListener,
        targets: Vec<ServedTarget>,
        options: ServerOptions,
    ) -> std::io::Result<Server> {
        Server::serve_and_drive(listener, targets, Vec::new(), options, |_| pending())
    }

    /// Starts to serve `targets`, and runs their `drivers` on the same threads. The loops take the
    /// targets in turn. A call and its answer pass between an attachment and a driver of the same loop
    /// without a wake-up. The drivers run until their stores are unmounted or dropped, even after the
    /// server has stopped. On each loop, the future that `beside` returns for the loop's number also
    /// runs, until it completes or the server stops.
    ///
    /// # Errors
    /// Fails if the listener cannot be polled or a thread cannot be started.
    pub fn serve_and_drive<F>(
        listener: StoreListener,
        targets: Vec<ServedTarget>,
        drivers: Vec<Driver>,
        options: ServerOptions,
        beside: impl Fn(usize) -> F + Clone + Send + 'static,
    ) -> std::io::Result<Server>
    where
        F: Future<Output = ()> + 'static,
    {
        let count = options.loops.clamp(1, MAX_LOOPS);
        let runtime = || base::task::runtime();
        let first = runtime()?;
        let listener = {
            let _entered = first.enter();
            AsyncListener::new(listener)?
        };
        let (controls, serving, ended) = ServerControls::new(targets, options)?;
        let (loops, receivers) = Loops::new(count);
        let peers = std::iter::once(PeersOf::Listener(listener, loops))
            .chain(receivers.into_iter().map(PeersOf::First));
        let runtimes = std::iter::once(Ok(first)).chain(std::iter::repeat_with(runtime));
        let mut server = Server { controls, drivers: Vec::new(), ended: Mutex::new(ended) };
        // If a thread cannot be started, the context is dropped before the server, which waits for that.
        let serving = serving;
        for (number, (peers, runtime)) in peers.zip(runtimes).enumerate() {
            let (drive, drivers) = unbounded_channel();
            let parts = LoopParts { number, runtime: runtime?, drivers, peers };
            let (serving, stopped) = (serving.clone(), server.controls.stop.subscribe());
            let beside = beside.clone();
            // The thread ends by itself when nothing is left to do.
            spawn(ThreadClass::Channel, &number.to_string(), move || parts.run(serving, stopped, beside))?;
            server.drivers.push(drive);
        }
        drivers.into_iter().for_each(|driver| server.drive(driver));
        Ok(server)
    }

    /// Runs a driver on the loop of its target.
    fn drive(&self, driver: Driver) {
        let place = self.controls.targets.borrow().iter().position(|t| t.uuid == driver.target());
        // Sending fails only if the thread has panicked.
        let _ = self.drivers[place.unwrap_or(0) % self.drivers.len()].send(driver);
    }

    /// Serves a new store under the UUID of a target that was remounted. Runs the store's driver as
    /// [`serve_and_drive`](Self::serve_and_drive) does. Ends all attachments, so that the osd learns
    /// of the change. Calls of the old attachments never reach the new store.
    pub fn replace(&self, uuid: Uuid, store: Arc<dyn ObjectStore>, driver: Option<Driver>) {
        if let Some(driver) = driver {
            self.drive(driver);
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
        let (loops, _) = Loops::new(1);
        Ok((LocalServer(controls), serving.accept(listener, loops)))
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

impl LoopParts {
    /// Runs the loop until the server is stopped, its attachments have ended, and its drivers have
    /// ended.
    fn run<F>(self, serving: ServingContext, stopped: watch::Receiver<bool>, beside: impl FnOnce(usize) -> F)
    where
        F: Future<Output = ()> + 'static,
    {
        let LoopParts { number, runtime, drivers, peers } = self;
        let local = LocalSet::new();
        local.spawn_local(drive(drivers));
        let beside = beside(number);
        let mut until_stopped = stopped;
        local.spawn_local(async move {
            tokio::select! {
                biased;
                _ = until_stopped.wait_for(|stop| *stop) => {}
                () = beside => {}
            }
        });
        match peers {
            PeersOf::Listener(listener, loops) => local.spawn_local(serving.accept(listener, loops)),
            PeersOf::First(peers) => local.spawn_local(serving.serve_peers(peers)),
        };
        runtime.block_on(local);
    }
}

/// Runs drivers, each in its own task.
async fn drive(mut drivers: UnboundedReceiver<Driver>) {
    while let Some(driver) = drivers.recv().await {
        spawn_local(ThreadClass::Store, driver.run());
    }
}
