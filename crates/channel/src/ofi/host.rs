//! The store's side: host memory that one session's engine may read and write.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use base::mem::Arena;
use base::thread::{ThreadClass, spawn};
use crossbeam_queue::SegQueue;
use fabric::{
    Access, Completion, ConnectionRequest, Domain, Endpoint, Event, Library, Listener, MemoryRegion,
    Operation, Target,
};

use super::alarm::{Alarm, take_count};
use super::greeting::Greeting;
use super::line::{self, Line};
use super::port::{Port, query};
use super::spinner::Spinner;
use super::{OfiOffer, QUEUES};
use crate::dma::{OnDrop, URGENT};
use crate::{Doorbell, Result};

/// When the provider is full, it is asked again after that.
const RETRY: Duration = Duration::from_millis(1);

/// Settings of an [`OfiHost`].
#[derive(Debug, Clone)]
pub struct OfiHostOptions {
    /// Provider of libfabric, e.g. `verbs` or `tcp`.
    pub provider: String,
    /// Where to listen; port 0 for a free one. The osd's process must be able to reach it.
    pub address: SocketAddr,
    /// Most sessions at a time.
    pub sessions: usize,
    /// How long the thread looks for more work before it sleeps.
    pub spin: Duration,
}

impl OfiHostOptions {
    /// The usual settings for that provider and address.
    #[must_use]
    pub fn new(provider: &str, address: SocketAddr) -> OfiHostOptions {
        OfiHostOptions {
            provider: provider.to_owned(),
            address,
            sessions: 4,
            spin: Duration::from_micros(10),
        }
    }
}

/// Listens for engines and serves them, on one thread. Dropping it ends all sessions.
pub struct OfiHost {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    domain: Domain,
    provider: String,
    address: SocketAddr,
}

struct Shared {
    commands: SegQueue<Command>,
    alarm: Alarm,
    next_session: AtomicU32,
    spin_ns: AtomicU64,
}

enum Command {
    Grant(u32, Session),
    Revoke(u32),
    Stop,
}

/// Host memory, granted to one session. Dropping it closes the session's connections, then ends the registration: after
/// that the osd's process cannot reach the memory.
#[derive(Debug)]
pub struct OfiGrant {
    /// What the osd's process must be told.
    pub offer: OfiOffer,
    /// An eventfd that counts what the osd's process rings.
    pub host_doorbell: OwnedFd,
    /// An eventfd; what it is rung with reaches the osd's process.
    pub osd_doorbell: OwnedFd,
    _revoke: OnDrop,
}

impl OfiHost {
    /// Loads libfabric, listens, and starts the thread.
    ///
    /// # Errors
    /// If there is no libfabric or no such provider, or the address is not one of this machine or in use.
    pub fn start(options: OfiHostOptions) -> Result<OfiHost> {
        let OfiHostOptions { provider, address, sessions, spin } = options;
        let info = query(Library::load()?, &provider, Target::Listen(address))?;
        // One session more, for the one that is just ending.
        let port = Port::open(info, (sessions + 1) * QUEUES * line::DEPTH)?;
        let listener = Listener::open(port.domain.info(), &port.events)?;
        let address = listener.address();
        let shared = Arc::new(Shared {
            commands: SegQueue::new(),
            alarm: Alarm::new()?,
            next_session: AtomicU32::new(0),
            spin_ns: AtomicU64::new(spin.as_nanos() as u64),
        });
        let domain = port.domain.clone();
        let behind = Arc::clone(&shared);
        let worker = Worker {
            shared: behind,
            sessions: HashMap::new(),
            _listener: listener,
            port,
            retry: false,
            running: true,
        };
        let thread = Mutex::new(Some(spawn(ThreadClass::Channel, "ofi-host", move || worker.run())?));
        Ok(OfiHost { shared, thread, domain, provider, address })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Grants `memory` to the one session that gets the offer.
    ///
    /// # Errors
    /// If the memory cannot be registered, or the process is out of file descriptors.
    pub fn grant(&self, memory: &Arc<Arena>) -> Result<OfiGrant> {
        let region = MemoryRegion::register(&self.domain, memory, Access::Remote)?;
        let (host_doorbell, osd_doorbell) = (Doorbell::create()?, Doorbell::create()?);
        let offer = OfiOffer {
            provider: self.provider.clone(),
            address: self.address,
            secret: rand::random(),
            memory: region.remote(),
        };
        let session = Session {
            secret: offer.secret,
            lines: Lines::default(),
            host_doorbell: host_doorbell.try_clone()?,
            osd_doorbell: osd_doorbell.try_clone()?,
            _region: region,
        };
        let id = self.shared.next_session.fetch_add(1, Ordering::Relaxed);
        self.shared.send(Command::Grant(id, session));
        let shared = Arc::clone(&self.shared);
        let revoke = OnDrop::new(move || shared.send(Command::Revoke(id)));
        Ok(OfiGrant { offer, host_doorbell, osd_doorbell, _revoke: revoke })
    }
}

impl Shared {
    fn send(&self, command: Command) {
        self.commands.push(command);
        self.alarm.wake();
    }
}

impl Drop for OfiHost {
    fn drop(&mut self) {
        self.shared.send(Command::Stop);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // A panic in it was reported when it happened.
            let _ = thread.join();
        }
    }
}

/// The connections of a session.
enum Lines {
    /// Those that have been asked for so far, by queue.
    Open(Box<[Option<Line>; QUEUES]>),
    /// One was closed, and all the others with it. A session is not taken up again.
    Closed,
}

impl Default for Lines {
    fn default() -> Self {
        Lines::Open(Box::default())
    }
}

struct Session {
    secret: u128,
    lines: Lines,
    host_doorbell: OwnedFd,
    osd_doorbell: OwnedFd,
    /// Closed after the connections.
    _region: MemoryRegion,
}

impl Session {
    fn line(&mut self, queue: usize) -> Option<&mut Line> {
        match &mut self.lines {
            Lines::Open(lines) => lines.get_mut(queue)?.as_mut(),
            Lines::Closed => None,
        }
    }

    /// Sends what the store has rung; `false` if the provider was full.
    fn flush(&mut self) -> Result<bool> {
        let Lines::Open(lines) = &mut self.lines else { return Ok(true) };
        // What is rung before there is a connection stays in the eventfd.
        if let Some(line) = lines[URGENT].as_mut().filter(|line| line.established) {
            let rung = take_count(self.osd_doorbell.as_fd());
            if rung > 0 {
                line.ring(rung);
            }
        }
        let mut sent = true;
        for line in lines.iter_mut().flatten() {
            sent &= line.flush()?;
        }
        Ok(sent)
    }

    fn received(&mut self, queue: usize, completion: &Completion) -> Result<()> {
        let Some(line) = self.line(queue) else { return Ok(()) };
        let count = line.received(completion)?;
        if count > 0 {
            Doorbell::ring(self.host_doorbell.as_fd(), count)?;
        }
        Ok(())
    }
}

struct Worker {
    shared: Arc<Shared>,
    sessions: HashMap<u32, Session>,
    _listener: Listener,
    port: Port,
    /// The provider was full.
    retry: bool,
    running: bool,
}

impl Worker {
    fn run(mut self) {
        let mut spinner = Spinner::default();
        while self.running {
            let mut worked = self.take_commands();
            match self.poll() {
                Ok(polled) => worked |= polled,
                Err(e) => {
                    // Sessions notice that their engines do not answer; new ones cannot join.
                    tracing::error!("the device for engine ofi failed: {e}; restart the store");
                    self.sessions.clear();
                    return;
                }
            }
            self.flush();
            let spin = Duration::from_nanos(self.shared.spin_ns.load(Ordering::Relaxed));
            if worked {
                spinner.worked();
            } else if self.running && !spinner.look_again(spin) {
                self.sleep();
            }
        }
    }

    fn take_commands(&mut self) -> bool {
        let mut worked = false;
        while let Some(command) = self.shared.commands.pop() {
            worked = true;
            match command {
                Command::Grant(id, session) => drop(self.sessions.insert(id, session)),
                Command::Revoke(id) => drop(self.sessions.remove(&id)),
                Command::Stop => self.running = false,
            }
        }
        worked
    }

    fn sleep(&self) {
        let timeout = self.retry.then_some(RETRY);
        self.shared.alarm.sleep(
            || !self.shared.commands.is_empty(),
            |alarm| {
                // The doorbell of a session without a connection is not looked at, and must not keep us awake.
                let connected = |s: &&Session| {
                    matches!(&s.lines, Lines::Open(l) if l[URGENT].as_ref().is_some_and(|l| l.established))
                };
                let bells = self.sessions.values().filter(connected).map(|s| s.osd_doorbell.as_fd());
                let others: Vec<_> = std::iter::once(alarm).chain(bells).collect();
                self.port.wait(&others, timeout);
            },
        );
    }

    /// Takes what the port has; `false` if that is nothing.
    fn poll(&mut self) -> Result<bool> {
        let (mut events, mut completions) = (Vec::new(), Vec::new());
        self.port.poll(&mut events, &mut completions)?;
        let worked = !events.is_empty() || !completions.is_empty();
        // A doorbell may have come together with the end of its connection.
        for completion in &completions {
            self.completed(completion);
        }
        for event in events {
            match event {
                Event::ConnectionRequest(request) => self.answer(request),
                Event::Connected { endpoint, .. } => {
                    let session = self.sessions.get_mut(&session_of(endpoint));
                    if let Some(line) = session.and_then(|s| s.line(queue_of(endpoint))) {
                        line.established = true;
                    }
                }
                Event::Closed { endpoint } => {
                    self.lose(session_of(endpoint), "the osd closed the connection")
                }
                Event::Failed { endpoint, error, .. } => self.lose(session_of(endpoint), &error.to_string()),
                _ => {}
            }
        }
        Ok(worked)
    }

    fn completed(&mut self, completion: &Completion) {
        let (id, queue) = (session_of(completion.endpoint), queue_of(completion.endpoint));
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let result = match &completion.result {
            Ok(()) if completion.operation == Operation::Receive => session.received(queue, completion),
            Ok(()) => {
                // The only other thing that a host does is to send.
                if let Some(line) = session.line(queue) {
                    line.sent(completion);
                }
                Ok(())
            }
            Err(e) => Err(e.clone().into()),
        };
        if let Err(e) = result {
            self.lose(id, &e.to_string());
        }
    }

    /// Takes a connection in, if it belongs to a session and is not there yet.
    fn answer(&mut self, request: ConnectionRequest) {
        // Its session was granted before it was made.
        self.take_commands();
        let refuse = |request: ConnectionRequest, why: &str| {
            tracing::debug!("a connection was refused: {why}");
            if let Err(e) = request.refuse(why.as_bytes()) {
                tracing::debug!("it could not be told: {e}");
            }
        };
        let Some(Greeting { queue, secret }) = Greeting::decode(request.data()) else {
            return refuse(request, "not an engine of this version");
        };
        let session = self.sessions.iter_mut().find(|(_, session)| session.secret == secret);
        let Some((id, session)) = session else { return refuse(request, "no such session") };
        let Lines::Open(lines) = &mut session.lines else { return refuse(request, "the session is over") };
        if lines[queue].is_some() {
            return refuse(request, "the session is taken");
        }
        match accept(request, &self.port, token_of(*id, queue)) {
            Ok(line) => lines[queue] = Some(line),
            Err(e) => tracing::debug!("a connection could not be accepted: {e}"),
        }
    }

    /// Closes a session's connections.
    fn lose(&mut self, id: u32, why: &str) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if matches!(session.lines, Lines::Open(_)) {
            tracing::debug!("session {id}: {why}");
            session.lines = Lines::Closed;
        }
    }

    fn flush(&mut self) {
        self.retry = false;
        let mut lost = Vec::new();
        for (id, session) in &mut self.sessions {
            match session.flush() {
                Ok(sent) => self.retry |= !sent,
                Err(e) => lost.push((*id, e.to_string())),
            }
        }
        for (id, why) in lost {
            self.lose(id, &why);
        }
    }
}

fn accept(request: ConnectionRequest, port: &Port, token: u64) -> Result<Line> {
    let endpoint = Endpoint::answer(request, &port.events, &port.completions, token)?;
    let line = Line::new(endpoint, &port.domain)?;
    line.endpoint.establish(&[])?;
    Ok(line)
}

/// Endpoints are named by session and queue.
fn token_of(session: u32, queue: usize) -> u64 {
    u64::from(session) << 8 | queue as u64
}

fn session_of(token: u64) -> u32 {
    (token >> 8) as u32
}

fn queue_of(token: u64) -> usize {
    (token & 0xff) as usize
}
