//! The store's side of engine `ofi`: it grants the osd's engine access to the host memory of an
//! attachment.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use base::collections::HashMap;
use base::fault::{Action, Faults, Site};
use base::mem::OutsideAccess;
use base::thread::{ThreadClass, spawn};
use crossbeam_queue::SegQueue;
use fabric::{
    Access, Completion, ConnectionRequest, Domain, Endpoint, EndpointAddress, EndpointQueues, FabricEvent,
    FabricListener, Library, MemoryRegion, Operation,
};

use super::alarm::{Alarm, take_count};
use super::greeting::Greeting;
use super::line::{self, EngineEndpoint};
use super::port::{EngineDomain, query};
use super::token::Token;
use super::{OfiOffer, QUEUES};
use crate::dma::{OnDrop, URGENT};
use crate::{ChannelError, Doorbell, MAX_SEATS, Result};
use base::spinner::Spinner;

/// Delay before a retry when the provider's queue is full.
const RETRY: Duration = Duration::from_millis(1);
/// Time limit for closing an attachment's connections.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(1);

/// Options of an [`OfiHost`].
#[derive(Debug, Clone)]
pub struct OfiHostOptions {
    /// The libfabric provider, e.g. `verbs` or `tcp`.
    pub provider: String,
    /// The address to listen on; port 0 selects a free port. The osd's process must be able to
    /// reach this address.
    pub address: SocketAddr,
    /// Number of concurrent attachments for which the device's queues have room. More grants are
    /// possible, but their connections may fail.
    pub attachments: usize,
    /// How long the thread polls for more work before it sleeps.
    pub spin: Duration,
    /// Faults to inject.
    pub faults: Faults,
}

impl OfiHostOptions {
    /// The default options for a provider and address.
    #[must_use]
    pub fn new(provider: &str, address: SocketAddr) -> OfiHostOptions {
        OfiHostOptions {
            provider: provider.to_owned(),
            address,
            attachments: MAX_SEATS.into(),
            spin: Duration::from_micros(10),
            faults: Faults::default(),
        }
    }
}

/// Listens for connections of the osd's engine and serves them on one thread. Dropping it ends all
/// attachments.
pub struct OfiHost {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    domain: Domain,
    provider: String,
    address: SocketAddr,
}

struct Shared {
    commands: SegQueue<HostCommand>,
    alarm: Alarm,
    next_attachment: AtomicU32,
    spin_ns: AtomicU64,
    /// Set when the thread has ended and all connections are closed.
    stopped: AtomicBool,
}

enum HostCommand {
    Grant(u32, Box<MemoryGrant>),
    /// Revokes a grant. The sender, if any, reports when that is done.
    Revoke(u32, Option<mpsc::SyncSender<()>>),
    Stop,
}

/// Host memory that is granted to one attachment. Dropping the grant closes the attachment's
/// connections and then ends the registration. After that, the osd's process cannot reach the
/// memory.
pub struct OfiGrant {
    /// The offer for the osd's process.
    pub offer: OfiOffer,
    /// The host's doorbell: an eventfd whose count grows when the osd's engine rings it.
    pub host_doorbell: OwnedFd,
    /// The osd's doorbell: an eventfd whose counts are sent to the osd's process.
    pub osd_doorbell: OwnedFd,
    id: u32,
    host: Arc<Shared>,
    _revoke: OnDrop,
}

impl OfiHost {
    /// Loads libfabric, listens, and starts the thread.
    ///
    /// # Errors
    /// Fails if libfabric or the provider is missing, or if the address is in use or does not
    /// belong to this machine.
    pub fn start(options: OfiHostOptions) -> Result<OfiHost> {
        let OfiHostOptions { provider, address, attachments, spin, faults } = options;
        let info = query(Library::load()?, &provider, EndpointAddress::Listen(address))?;
        // Room for one more attachment, because an old attachment may still be ending.
        let port = EngineDomain::open(info, (attachments + 1) * QUEUES * line::DEPTH)?;
        let listener = FabricListener::open(port.domain.info(), &port.events)?;
        let address = listener.address();
        let shared = Arc::new(Shared {
            commands: SegQueue::new(),
            alarm: Alarm::new()?,
            next_attachment: AtomicU32::new(0),
            spin_ns: AtomicU64::new(spin.as_nanos() as u64),
            stopped: AtomicBool::new(false),
        });
        let domain = port.domain.clone();
        let behind = Arc::clone(&shared);
        let worker = HostWorker {
            shared: behind,
            attachments: HashMap::default(),
            _listener: listener,
            port,
            faults,
            retry: false,
            running: true,
        };
        let thread = Mutex::new(Some(spawn(ThreadClass::Fabric, "host", move || worker.run())?));
        Ok(OfiHost { shared, thread, domain, provider, address })
    }

    /// The address on which the host listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether the host still serves. It stops when its network device fails, and must then be
    /// replaced.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.shared.stopped.load(Ordering::Acquire)
    }

    /// Grants `memory` to the one attachment that gets the offer. The contract of
    /// [`OutsideAccess::new`] covers the accesses of the osd's engine.
    ///
    /// # Errors
    /// Fails if the host [does not serve](Self::is_running), if the memory cannot be registered, or
    /// if the process is out of file descriptors.
    pub fn grant(&self, memory: &OutsideAccess) -> Result<OfiGrant> {
        let region = MemoryRegion::register_outside(&self.domain, memory, Access::Remote)?;
        let (host_doorbell, osd_doorbell) = (Doorbell::create()?, Doorbell::create()?);
        let offer = OfiOffer {
            provider: self.provider.clone(),
            address: self.address,
            secret: base::entropy::random(),
            memory: region.remote(),
        };
        let attachment = Box::new(MemoryGrant {
            secret: offer.secret,
            lines: Default::default(),
            engine: None,
            attempt: 0,
            host_doorbell: host_doorbell.try_clone()?,
            osd_doorbell: osd_doorbell.try_clone()?,
            _region: region,
        });
        let id = self.shared.next_attachment.fetch_add(1, Ordering::Relaxed);
        self.shared.send(HostCommand::Grant(id, attachment));
        if !self.is_running() {
            return Err(stopped());
        }
        let (shared, host) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        let revoke = OnDrop::new(move || shared.send(HostCommand::Revoke(id, None)));
        Ok(OfiGrant { offer, host_doorbell, osd_doorbell, id, host, _revoke: revoke })
    }
}

impl OfiGrant {
    /// Ends the attachment, and returns when its connections are closed. After that, no transfer
    /// reaches the memory. The call blocks until the host's thread has closed the connections,
    /// which usually takes far less than a millisecond. It does not block if the host's device has
    /// failed.
    ///
    /// # Errors
    /// Fails if this takes more than a second.
    pub fn revoke(self) -> Result<()> {
        let (done, answer) = mpsc::sync_channel(1);
        self.host.send(HostCommand::Revoke(self.id, Some(done)));
        match answer.recv_timeout(REVOKE_TIMEOUT) {
            // If the thread has ended, it has closed its connections.
            Ok(()) => Ok(()),
            Err(_) if self.host.stopped.load(Ordering::Acquire) => Ok(()),
            Err(_) => Err(stopped()),
        }
    }
}

fn stopped() -> ChannelError {
    ChannelError::EngineStopped("ofi (host side)".to_owned())
}

impl Shared {
    fn send(&self, command: HostCommand) {
        self.commands.push(command);
        self.alarm.wake();
        fence(Ordering::SeqCst);
        if self.stopped.load(Ordering::Acquire) {
            self.discard();
        }
    }

    /// Marks the thread as ended. The fence pairs with the fence in [`send`](Self::send): either
    /// this call sees a command, or the sender sees that the thread has ended.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        self.discard();
    }

    /// Drops the commands that the thread will not handle. This informs waiting senders, and frees
    /// descriptors and registrations.
    fn discard(&self) {
        while self.commands.pop().is_some() {}
    }
}

impl Drop for OfiHost {
    fn drop(&mut self) {
        self.shared.send(HostCommand::Stop);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // A panic of the thread was reported when it happened; ignore the result.
            let _ = thread.join();
        }
    }
}

struct MemoryGrant {
    secret: u128,
    /// The connections that were requested so far, by queue.
    lines: [Option<EngineEndpoint>; QUEUES],
    /// The engine that connected first. No other engine can use the grant.
    engine: Option<u64>,
    /// Number of the engine's connection attempt to which the connections belong.
    attempt: u32,
    host_doorbell: OwnedFd,
    osd_doorbell: OwnedFd,
    /// Declared after the connections, so that it is dropped after them.
    _region: MemoryRegion,
}

impl MemoryGrant {
    /// The connection that `token` identifies, unless a newer connection has replaced it.
    fn line(&mut self, token: Token) -> Option<&mut EngineEndpoint> {
        if !token.is_of(self.attempt) {
            return None;
        }
        self.lines.get_mut(token.queue)?.as_mut()
    }

    /// Whether the connection that carries the osd's doorbell is established.
    fn hears(&self) -> bool {
        self.lines[URGENT].as_ref().is_some_and(|line| line.established)
    }

    /// Sends the osd the doorbell counts that the store has rung. Returns `false` if the provider's
    /// queue was full.
    fn flush(&mut self) -> Result<bool> {
        // Counts that are rung before the connection is established stay in the eventfd.
        if self.hears()
            && let Some(line) = &mut self.lines[URGENT]
        {
            let rung = take_count(self.osd_doorbell.as_fd());
            if rung > 0 {
                line.ring(rung);
            }
        }
        let mut sent = true;
        for line in self.lines.iter_mut().flatten() {
            sent &= line.flush()?;
        }
        Ok(sent)
    }

    /// Handles the completion of a receive or a send.
    fn completed(&mut self, token: Token, completion: &Completion) -> Result<()> {
        let Some(line) = self.line(token) else { return Ok(()) };
        if let Err(e) = &completion.result {
            return Err(e.clone().into());
        }
        if completion.operation != Operation::Receive {
            line.sent(completion);
            return Ok(());
        }
        let count = line.received(completion)?;
        if count > 0 {
            Doorbell::ring(self.host_doorbell.as_fd(), count)?;
        }
        Ok(())
    }
}

struct HostWorker {
    shared: Arc<Shared>,
    attachments: HashMap<u32, Box<MemoryGrant>>,
    _listener: FabricListener,
    port: EngineDomain,
    faults: Faults,
    /// Whether the provider's queue was full, so that the thread must soon try again to send.
    retry: bool,
    running: bool,
}

/// Closes all connections when the thread ends, even after a panic.
impl Drop for HostWorker {
    fn drop(&mut self) {
        self.attachments.clear();
        self.shared.stop();
    }
}

impl HostWorker {
    fn run(mut self) {
        let mut spinner = Spinner::default();
        while self.running {
            let mut worked = self.take_commands();
            match self.poll() {
                Ok(polled) => worked |= polled,
                Err(e) => {
                    tracing::error!(
                        "the network device of engine ofi failed: {e}; the next offer of host memory opens it again"
                    );
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
                HostCommand::Grant(id, attachment) => drop(self.attachments.insert(id, attachment)),
                HostCommand::Revoke(id, done) => {
                    drop(self.attachments.remove(&id));
                    // The caller may have stopped waiting; ignore the error.
                    let _ = done.map(|done| done.try_send(()));
                }
                HostCommand::Stop => self.running = false,
            }
        }
        worked
    }

    fn sleep(&self) {
        let timeout = self.retry.then_some(RETRY);
        self.shared.alarm.sleep(
            || !self.shared.commands.is_empty(),
            |alarm| {
                // Ignore the doorbell of an attachment without a connection, because it would keep
                // the thread awake.
                let hearing = self.attachments.values().filter(|attachment| attachment.hears());
                let bells = hearing.map(|attachment| attachment.osd_doorbell.as_fd());
                let others: Vec<_> = std::iter::once(alarm).chain(bells).collect();
                self.port.wait(&others, timeout);
            },
        );
    }

    /// Handles the network device's events and completions. Returns `false` if there were none.
    fn poll(&mut self) -> Result<bool> {
        if self.faults.hit(Site::StoreDevice) == Some(Action::Fail) {
            return Err(ChannelError::Transfer("a fault was injected".to_owned()));
        }
        let (mut events, mut completions) = (Vec::new(), Vec::new());
        self.port.poll(&mut events, &mut completions)?;
        let worked = !events.is_empty() || !completions.is_empty();
        // Handle completions first: a doorbell may have arrived together with the end of its
        // connection.
        for completion in &completions {
            self.completed(completion);
        }
        for event in events {
            match event {
                FabricEvent::ConnectionRequest(request) => self.answer(request),
                FabricEvent::Connected { endpoint, .. } => {
                    let token = Token::decode(endpoint);
                    if let Some(line) = self.attachments.get_mut(&token.owner).and_then(|s| s.line(token)) {
                        line.established = true;
                    }
                }
                FabricEvent::Closed { endpoint } => {
                    self.lose(Token::decode(endpoint), "the osd closed the connection")
                }
                FabricEvent::Failed { endpoint, error, .. } => {
                    self.lose(Token::decode(endpoint), &error.to_string())
                }
                // A connection that was never established needs no handling.
                _ => {}
            }
        }
        Ok(worked)
    }

    fn completed(&mut self, completion: &Completion) {
        let token = Token::decode(completion.endpoint);
        let Some(attachment) = self.attachments.get_mut(&token.owner) else { return };
        if let Err(e) = attachment.completed(token, completion) {
            self.lose(token, &e.to_string());
        }
    }

    /// Accepts a connection request if it belongs to an attachment and is not outdated.
    fn answer(&mut self, request: ConnectionRequest) {
        // The store granted the memory before the osd sent this request, but the thread may not
        // have handled the grant's command yet.
        self.take_commands();
        let refuse = |request: ConnectionRequest, why: &str| {
            tracing::debug!("a connection was refused: {why}");
            if let Err(e) = request.refuse(why.as_bytes()) {
                tracing::debug!("the refusal of a connection could not be sent: {e}");
            }
        };
        let Some(Greeting { queue, attempt, secret, engine }) = Greeting::decode(request.data()) else {
            return refuse(request, "the request is not from an engine of this version");
        };
        let attachment = self.attachments.iter_mut().find(|(_, attachment)| attachment.secret == secret);
        let Some((id, attachment)) = attachment else { return refuse(request, "no such attachment") };
        if *attachment.engine.get_or_insert(engine) != engine {
            return refuse(request, "the attachment is already taken by another engine");
        }
        if attempt > attachment.attempt {
            attachment.lines = Default::default();
            attachment.attempt = attempt;
        }
        if attempt < attachment.attempt || attachment.lines[queue].is_some() {
            return refuse(request, "the attachment is already taken");
        }
        match accept(request, &self.port, Token::new(*id, attempt, queue)) {
            Ok(line) => attachment.lines[queue] = Some(line),
            Err(e) => tracing::debug!("a connection could not be accepted: {e}"),
        }
    }

    /// Closes an attachment's connections unless they are newer than `token`. The engine may
    /// connect again.
    fn lose(&mut self, token: Token, why: &str) {
        let Some(attachment) = self.attachments.get_mut(&token.owner) else { return };
        if token.is_of(attachment.attempt) && attachment.lines.iter().any(Option::is_some) {
            tracing::debug!("attachment {}: {why}", token.owner);
            attachment.lines = Default::default();
        }
    }

    fn flush(&mut self) {
        self.retry = false;
        let mut lost = Vec::new();
        for (id, attachment) in &mut self.attachments {
            match attachment.flush() {
                Ok(sent) => self.retry |= !sent,
                Err(e) => lost.push((Token::new(*id, attachment.attempt, URGENT), e.to_string())),
            }
        }
        for (token, why) in lost {
            self.lose(token, &why);
        }
    }
}

fn accept(request: ConnectionRequest, port: &EngineDomain, token: Token) -> Result<EngineEndpoint> {
    let endpoint =
        Endpoint::answer(request, EndpointQueues::new(&port.events, &port.completions), token.encode())?;
    let line = EngineEndpoint::new(endpoint, &port.domain)?;
    line.endpoint.establish(&[])?;
    Ok(line)
}
