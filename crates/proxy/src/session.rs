//! The osd's sessions with one store process: opened, watched, and opened again when the store restarts.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::fault::Faults;
use base::health::{self, OffloadHealth};
use base::pool::BufferPool;
use base::thread::ThreadClass;
use base::work;
use channel::{
    Attachment, Bell, ChannelError, DmaEngine, DpuMemory, Hello, MemoryAnswer, MemoryOptions, MemoryRequest,
    Reach, Region, ShmEngine, ShmOptions, Socket, TargetInfo, VERSION, Welcome,
};
use store::StoreError;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Notify, watch};

use crate::link::{CallError, Driver, Link, LinkOptions, RingSide};
use crate::proxy_store::ProxyStore;
use crate::proxy_stripes::ProxyStripes;

/// Most calls that wait for the store's return. The OSD has a lower limit of requests in flight.
const MAX_WAITING: usize = 1 << 14;
/// An engine, which shares its CPU where it is emulated, looks for work no longer than this.
const ENGINE_SPIN: Duration = Duration::from_micros(10);
const BACKOFF_MIN: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_millis(500);

/// Where the store's process listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A UNIX socket.
    Unix(PathBuf),
    /// A TCP address, `host:port`. Payload goes by DMA only if the engine reaches host memory over a network, as `ofi` does.
    /// Not authenticated: for trusted networks.
    Tcp(String),
}

/// How to join a store.
#[derive(Clone)]
pub struct SessionOptions {
    /// Sizes of DPU memory.
    pub memory: MemoryOptions,
    /// The engine that moves payload; `None` starts an emulated one (`shm`).
    pub engine: Option<Arc<dyn DmaEngine>>,
    /// Most requests unanswered on the ring.
    pub outstanding: usize,
    /// Longest payload of one request, in bytes: of one read, or one transaction. At most 16 MiB.
    pub largest_request: usize,
    /// How long calls wait for a store that is away, and how long [`Session::connect`] tries.
    pub wait_for_store: Duration,
    /// Use the control socket alone even where DMA is possible.
    pub socket_only: bool,
    /// After that long a transfer is overdue, and a reply is asked for.
    pub overdue: Duration,
    /// How long DMA is left alone after it has failed.
    pub cool_down: Duration,
    /// The host compares the payload of every so many requests with its checksums; 0 for none. After a failure it looks at
    /// the next 256 in any case.
    pub verify_every: u32,
    /// What can be changed while the session lasts.
    pub tuning: Tuning,
    /// What is to go wrong in this process.
    pub faults: Faults,
}

/// How DMA is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Queues of the engine; 1 puts everything into one, so that short requests wait for long ones.
    pub queues: usize,
    /// Windows of host memory that stay open; 0 has each request negotiate its own.
    pub region_cache: usize,
    /// How long this side looks for completions after one has come, before it sleeps.
    pub poll: Duration,
    /// Longest transfer, in bytes; the engine may have a lower limit. `None` is the engine's.
    pub max_transfer: Option<usize>,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning { queues: usize::MAX, region_cache: 64, poll: Duration::ZERO, max_transfer: None }
    }
}

impl Default for SessionOptions {
    fn default() -> Self {
        SessionOptions {
            memory: MemoryOptions::default(),
            engine: None,
            outstanding: 256,
            largest_request: 16 << 20,
            wait_for_store: Duration::from_secs(30),
            socket_only: false,
            overdue: Duration::from_secs(2),
            cool_down: Duration::from_secs(5),
            verify_every: 64,
            tuning: Tuning::default(),
            faults: Faults::default(),
        }
    }
}

/// How a session stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionStatus {
    /// Whether a store is there.
    pub connected: bool,
    /// Sessions opened so far; more than one if the store restarted.
    pub sessions: u64,
    /// Why the last one ended, if one did.
    pub last_failure: Option<String>,
    /// Stages of the present session.
    pub stages: usize,
    /// Whether the session has host memory, so that payload can go by DMA.
    pub by_dma: bool,
    /// Why not, if it was to have some.
    pub why_no_dma: Option<String>,
    /// Whether it does at present, and what has happened.
    pub offload: Offload,
}

/// How DMA stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offload {
    /// Whether it is used, and why not.
    pub health: health::Report,
    /// Bytes of host memory that transfers may still touch.
    pub quarantined: usize,
    /// Bytes that had come by DMA when it failed and were not sent again, in this session.
    pub kept_bytes: u64,
    /// Bytes that went by the socket in the place of DMA, in this session.
    pub fallback_bytes: u64,
}

/// A lasting connection to one store process and its targets. Clones share it; when the last one and the last
/// [`ProxyStore`] are dropped, it is closed.
#[derive(Clone)]
pub struct Session {
    handle: Arc<Handle>,
}

/// Closes the session when the last user is gone.
pub(crate) struct Handle {
    pub(crate) shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

pub(crate) struct Shared {
    state: Mutex<State>,
    pub(crate) memory: DpuMemory,
    engine: Arc<dyn DmaEngine>,
    local: Region,
    endpoint: Endpoint,
    pub(crate) options: SessionOptions,
    closing: Notify,
    generation: watch::Sender<u64>,
    /// The store has come back with other targets.
    superseded: watch::Sender<bool>,
    health: Arc<OffloadHealth>,
    tuning: Mutex<Tuning>,
}

struct State {
    phase: Phase,
    targets: Option<Vec<TargetInfo>>,
    sessions: u64,
    last_failure: Option<String>,
    why_no_dma: Option<String>,
}

enum Phase {
    Up(Arc<Link>),
    Away(VecDeque<Waiting>),
    Closed,
}

/// A call made while the store was away.
struct Waiting {
    deadline: Instant,
    call: LinkCall,
}

type LinkCall = Box<dyn FnOnce(Result<&Arc<Link>, CallError>) + Send>;

impl Session {
    /// Joins the store at `endpoint`, waiting for it if need be. The session lives on the current tokio runtime: best
    /// that of the OSD's shard, so that replies wake the thread that waits for them.
    ///
    /// # Errors
    /// If memory cannot be had, or no store answered in time.
    pub async fn connect(endpoint: Endpoint, options: SessionOptions) -> Result<Session, ChannelError> {
        let memory = DpuMemory::new(options.memory)?;
        let engine: Arc<dyn DmaEngine> = match &options.engine {
            Some(engine) => Arc::clone(engine),
            None => ShmEngine::start(ShmOptions { faults: options.faults.clone(), ..ShmOptions::default() })?,
        };
        let health = Arc::new(OffloadHealth::new("dma", options.cool_down));
        let tuning = options.tuning;
        let local = engine.register_local(memory.arena())?;
        let state = State {
            phase: Phase::Away(VecDeque::new()),
            targets: None,
            sessions: 0,
            last_failure: None,
            why_no_dma: None,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            memory,
            engine,
            local,
            endpoint,
            options,
            closing: Notify::new(),
            generation: watch::Sender::new(0),
            superseded: watch::Sender::new(false),
            health,
            tuning: Mutex::new(tuning),
        });
        shared.tune_engine(tuning);
        let mut generation = shared.generation.subscribe();
        let wait = shared.options.wait_for_store;
        let session = Session { handle: Arc::new(Handle { shared: Arc::clone(&shared) }) };
        tokio::spawn(work::booked(ThreadClass::Channel, supervise(shared)));
        match tokio::time::timeout(wait, generation.wait_for(|g| *g > 0)).await {
            Ok(Ok(_)) => Ok(session),
            _ => Err(session.no_store_error()),
        }
    }

    fn no_store_error(&self) -> ChannelError {
        let why = self.handle.shared.lock().last_failure.clone();
        let why = why.unwrap_or_else(|| "no answer".to_owned());
        ChannelError::Refused(format!("no session with {:?}: {why}", self.handle.shared.endpoint))
    }

    /// The store's targets, as it named them at the first session. A store with others is refused
    /// later on; see [`Session::superseded`].
    #[must_use]
    pub fn targets(&self) -> Vec<TargetInfo> {
        self.handle.shared.targets()
    }

    /// Resolves once a store with other targets has answered, as after a target was replaced. This
    /// session does not use that store: drop the session, and connect anew.
    pub async fn superseded(&self) {
        let mut superseded = self.handle.shared.superseded.subscribe();
        // The sender lives as long as `self`.
        let _ = superseded.wait_for(|superseded| *superseded).await;
    }

    /// The store of target `index`.
    ///
    /// # Panics
    /// If there is no such target.
    #[must_use]
    pub fn store(&self, index: usize) -> Arc<ProxyStore> {
        assert!(index < self.targets().len(), "there is no target {index}");
        Arc::new(ProxyStore::new(Arc::clone(&self.handle), index as u16))
    }

    /// All targets together, for data that goes to several of them.
    #[must_use]
    pub fn stripes(&self) -> Arc<ProxyStripes> {
        Arc::new(ProxyStripes::new(Arc::clone(&self.handle)))
    }

    /// Staging buffers in DPU memory. Payload in them is not copied on its way to the host.
    #[must_use]
    pub fn pool(&self) -> &BufferPool {
        self.handle.shared.memory.pool()
    }

    /// The engine that moves payload.
    #[must_use]
    pub fn engine(&self) -> &Arc<dyn DmaEngine> {
        &self.handle.shared.engine
    }

    /// The number of the present session, counted from 1: when it changes, what was cached of the store is void.
    #[must_use]
    pub fn generation(&self) -> watch::Receiver<u64> {
        self.handle.shared.generation.subscribe()
    }

    /// How it stands.
    #[must_use]
    pub fn status(&self) -> SessionStatus {
        let state = self.handle.shared.lock();
        let link = match &state.phase {
            Phase::Up(link) => Some(link),
            _ => None,
        };
        let status = link.map(|link| link.status());
        SessionStatus {
            connected: link.is_some(),
            sessions: state.sessions,
            last_failure: state.last_failure.clone(),
            stages: status.map_or(0, |s| s.stages),
            by_dma: link.is_some_and(|link| link.by_dma),
            why_no_dma: state.why_no_dma.clone(),
            offload: Offload {
                health: self.handle.shared.health.report(),
                quarantined: status.map_or(0, |s| s.quarantined),
                kept_bytes: status.map_or(0, |s| s.kept_bytes),
                fallback_bytes: status.map_or(0, |s| s.put_bytes),
            },
        }
    }

    /// Changes how DMA is used, from now on.
    pub fn tune(&self, tuning: Tuning) {
        let shared = &self.handle.shared;
        *shared.tuning.lock().unwrap_or_else(PoisonError::into_inner) = tuning;
        shared.tune_engine(tuning);
        if let Phase::Up(link) = &shared.lock().phase {
            link.tune(tuning.queues, tuning.region_cache, tuning.poll);
        }
    }

    /// Faults that can be armed in this process.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.handle.shared.options.faults
    }

    /// Ends the session; calls without an answer fail.
    pub fn close(&self) {
        self.handle.shared.close();
    }
}

impl Shared {
    pub(crate) fn targets(&self) -> Vec<TargetInfo> {
        self.lock().targets.clone().unwrap_or_default()
    }

    fn tuning(&self) -> Tuning {
        *self.tuning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tune_engine(&self, tuning: Tuning) {
        let spin = tuning.poll.min(ENGINE_SPIN);
        self.engine.tune(channel::Tuning { max_transfer: tuning.max_transfer, spin: Some(spin) });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call on the present session at once, or on the next one, in the order of the calls.
    pub(crate) fn with_link(&self, call: impl FnOnce(Result<&Arc<Link>, CallError>) + Send + 'static) {
        let mut state = self.lock();
        match &mut state.phase {
            Phase::Up(link) => {
                let link = Arc::clone(link);
                // Still under the lock, so that calls of one thread keep their order with those that waited.
                call(Ok(&link));
            }
            Phase::Away(waiting) if waiting.len() < MAX_WAITING => {
                let deadline = Instant::now() + self.options.wait_for_store;
                waiting.push_back(Waiting { deadline, call: Box::new(call) });
            }
            // Not one that is made again by itself: it would only be refused once more.
            Phase::Away(_) => {
                let why = "too many calls wait for the store".to_owned();
                call(Err(StoreError::Disconnected(why).into()));
            }
            Phase::Closed => call(Err(CallError::Lost("the session was closed".into()))),
        }
    }

    /// The number of the session that a call made now goes to: the present one, or the next.
    pub(crate) fn session_number(&self) -> u64 {
        let state = self.lock();
        if matches!(state.phase, Phase::Up(_)) { state.sessions } else { state.sessions + 1 }
    }

    /// Whether a call that failed with its session may be made again.
    pub(crate) fn may_retry(&self) -> bool {
        !matches!(self.lock().phase, Phase::Closed)
    }

    fn close(&self) {
        let before = std::mem::replace(&mut self.lock().phase, Phase::Closed);
        self.closing.notify_waiters();
        self.closing.notify_one();
        if let Phase::Away(waiting) = before {
            fail(waiting, "the session was closed");
        }
    }

    fn closed(&self) -> bool {
        matches!(self.lock().phase, Phase::Closed)
    }

    /// Fails the calls that waited long enough.
    fn expire(&self) {
        let mut state = self.lock();
        let Phase::Away(waiting) = &mut state.phase else { return };
        let now = Instant::now();
        let due = waiting.iter().take_while(|w| w.deadline <= now).count();
        let due: VecDeque<Waiting> = waiting.drain(..due).collect();
        let why = state.last_failure.clone().unwrap_or_else(|| "it does not answer".into());
        drop(state);
        fail(due, &format!("the store stayed away: {why}"));
    }

    /// The session has ended: calls wait from now on.
    fn away(&self, why: &str) {
        let mut state = self.lock();
        state.last_failure = Some(why.to_owned());
        if matches!(state.phase, Phase::Up(_)) {
            state.phase = Phase::Away(VecDeque::new());
        }
    }

    /// A session was opened: makes the calls that waited, then lets new ones through.
    fn up(&self, link: &Arc<Link>, targets: Vec<TargetInfo>) {
        let mut state = self.lock();
        let Phase::Away(waiting) = &mut state.phase else { return };
        for waiting in std::mem::take(waiting) {
            (waiting.call)(Ok(link));
        }
        state.phase = Phase::Up(Arc::clone(link));
        state.targets = Some(targets);
        state.sessions += 1;
    }
}

fn fail(waiting: VecDeque<Waiting>, why: &str) {
    for waiting in waiting {
        (waiting.call)(Err(CallError::Lost(why.to_owned())));
    }
}

struct CloseOnDrop(Arc<Shared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Keeps a session open until it is closed.
async fn supervise(shared: Arc<Shared>) {
    // If the runtime is dropped, nobody opens sessions any more: calls must not wait for one.
    let _closing = CloseOnDrop(Arc::clone(&shared));
    let mut backoff = BACKOFF_MIN;
    let mut generation = 0;
    while !shared.closed() {
        match tokio::time::timeout(Duration::from_secs(5), open(&shared, generation + 1)).await {
            Ok(Ok((link, driver, targets))) => {
                generation += 1;
                backoff = BACKOFF_MIN;
                shared.up(&link, targets);
                shared.generation.send_replace(generation);
                let why = driver.run(shared.closing.notified(), |why| shared.away(why)).await;
                drop(link);
                tracing::warn!("session {generation} with {:?} ended: {why}", shared.endpoint);
                metrics::counter!("outboard_proxy_sessions_ended").increment(1);
            }
            Ok(Err(e)) => shared.away(&e.to_string()),
            Err(_) => shared.away("it does not answer"),
        }
        shared.expire();
        tokio::select! {
            () = tokio::time::sleep(backoff) => {}
            () = shared.closing.notified() => {}
        }
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

async fn open(
    shared: &Arc<Shared>,
    generation: u64,
) -> Result<(Arc<Link>, Driver, Vec<TargetInfo>), ChannelError> {
    let socket = match &shared.endpoint {
        Endpoint::Unix(path) => Socket::Unix(UnixStream::connect(path).await?),
        Endpoint::Tcp(address) => Socket::tcp(TcpStream::connect(address).await?)?,
    };
    let memory = memory_request(shared, &socket);
    let wanted = memory.is_some();
    let hello = Hello {
        version_min: VERSION,
        version_max: VERSION,
        nonce: rand::random(),
        memory,
        outstanding: shared.options.outstanding as u32,
    };
    let (welcome, attachment, control) = channel::join(socket, &hello).await?;
    check_targets(shared, &welcome)?;
    let why_no_dma = match &welcome.memory {
        MemoryAnswer::None(why) if wanted => {
            Some(why.clone().unwrap_or_else(|| "the store gave no host memory and no reason".to_owned()))
        }
        _ => None,
    };
    if let Some(why) = &why_no_dma {
        tracing::warn!("payload goes through the socket in this session, which is slow: {why}");
    }
    shared.lock().why_no_dma = why_no_dma;
    let attached = match attachment.filter(|_| wanted) {
        Some(attachment) => Some(attach(shared, attachment).await?),
        None => None,
    };
    let (ring, bell, failure) = attached.map_or((None, None, None), |a| (Some(a.ring), a.bell, a.failure));
    let targets = welcome.targets;
    let options = LinkOptions {
        largest_range: shared.options.largest_request,
        overdue: shared.options.overdue,
        verify_every: shared.options.verify_every,
        faults: shared.options.faults.clone(),
        region_cache: shared.tuning().region_cache,
        poll: shared.tuning().poll,
    };
    // The host's memory is another: what was wrong with the last one need not be wrong with this one.
    shared.health.renewed();
    let health = Arc::clone(&shared.health);
    let layout = shared.memory.layout();
    let link = Link::new(generation, targets.len(), layout, ring, health, &options);
    if let Some(failure) = failure {
        link.begin_without_dma(&failure);
    }
    let driver = Driver::new(Arc::clone(&link), control, bell);
    tracing::info!("session {generation} with {:?}: store's session {}", shared.endpoint, welcome.session);
    Ok((link, driver, targets))
}

/// The host memory that is asked for: what the engine can reach from here, if anything.
fn memory_request(shared: &Shared, socket: &Socket) -> Option<MemoryRequest> {
    let reach = shared.engine.reach();
    let reaches = matches!(socket, Socket::Unix(_)) || reach != Reach::Descriptors;
    let layout = shared.memory.layout();
    (reaches && !shared.options.socket_only).then_some(MemoryRequest { layout, reach })
}

/// The rings of a session that has host memory.
struct Attached {
    ring: RingSide,
    bell: Option<Box<dyn Bell>>,
    /// Why the engine does not reach the memory at present.
    failure: Option<String>,
}

/// Joins host memory. If the network does not let the engine, that is no reason to do without for good. A store that offers
/// what it should not is an error.
async fn attach(shared: &Arc<Shared>, attachment: Attachment) -> Result<Attached, ChannelError> {
    let (memory, engine) = (shared.memory.clone(), Arc::clone(&shared.engine));
    let outstanding = shared.options.outstanding.min(engine.queue_depth());
    let (local, queues) = (shared.local.id(), shared.tuning().queues);
    let mut ring = RingSide::new(memory, Arc::clone(&engine), local, outstanding, queues);
    match engine.attach(attachment, shared.memory.layout().len()).await {
        Ok((peer, bell)) => {
            ring.join(peer)?;
            Ok(Attached { ring, bell: Some(bell), failure: None })
        }
        Err(e @ (ChannelError::Refused(_) | ChannelError::Fabric(_))) if engine.attaches_anew() => {
            let failure = format!("host memory cannot be reached: {e}");
            Ok(Attached { ring, bell: None, failure: Some(failure) })
        }
        Err(e) => Err(e),
    }
}

fn check_targets(shared: &Shared, welcome: &Welcome) -> Result<(), ChannelError> {
    match &shared.lock().targets {
        Some(known) if *known != welcome.targets => {
            shared.superseded.send_replace(true);
            Err(ChannelError::Refused("the store came back with other targets; restart the osd".into()))
        }
        _ if welcome.targets.is_empty() => Err(ChannelError::Refused("the store has no targets".into())),
        _ => Ok(()),
    }
}
