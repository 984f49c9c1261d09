//! One network at one local address: its connect requests, and the protection domains of the
//! connected peers.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use base::budget::{Budget, PeerAddress};
use base::clock::Instant;
use base::collections::HashMap;
use fabric::{ConnectionRequest, Endpoint, EventQueue, Fabric, FabricEvent, Info, Waitable};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc, oneshot};

use super::Common;
use super::descriptor::{Descriptor, is_readable};
use super::endpoint::{OfiEndpoint, Watcher};
use super::endpoint_of;
use super::port::Port;
use super::tenants::DomainOwner;
use crate::transport::packets::packet::FIRST_GRANT;
use crate::transport::packets::{Link, LinkEndpoint};
use crate::transport::{AcceptedTicket, ConnectTicket, Road, TicketOffice, Wire};

/// Maximum number of links that are being accepted at a time. At this limit, a new link replaces
/// the oldest link of its own address, or of an address that holds more than its fair share.
const SETTLING_MAX: usize = 256;

/// Time after which a link that is still being accepted is dropped.
const SETTLING_TIME: Duration = Duration::from_secs(10);

/// Number of connection events after which the task yields to other tasks.
const EVENTS: usize = 32;

/// One network at one local address: its fabric, its event queue and its ports.
pub(super) struct Device {
    state: Mutex<State>,
    pub(super) events: EventQueue,
    fabric: Fabric,
    common: Arc<Common>,
    /// Wakes the watching task when a link has ended or the device is closed.
    over: Notify,
    /// Whether the event queue has failed, so that the device cannot be used any more.
    failed: AtomicBool,
}

struct State {
    /// The ports by owner and network device. A tenant with many connections has several ports.
    ports: HashMap<(DomainOwner, String), Vec<Weak<Port<Link>>>>,
    /// Links that are not connected yet.
    settling: HashMap<u64, Settling>,
    /// Slots of the links in `settling` that this side accepts.
    accepting: Budget<u64>,
    /// Connected links.
    links: HashMap<u64, Weak<Link>>,
    last_id: u64,
    /// `None` if this side does not accept links.
    accepted: Option<Acceptance>,
}

/// What this side needs to accept links.
#[derive(Clone)]
struct Acceptance {
    /// Receives the accepted links.
    links: mpsc::Sender<io::Result<Wire>>,
    tickets: Arc<dyn TicketOffice>,
}

/// A link that is not connected yet.
struct Settling {
    link: Arc<Link>,
    since: Instant,
    role: SettlingOrigin,
}

enum SettlingOrigin {
    /// This side dialled. The channel receives the data with which the peer accepted, or the reason
    /// of a failure.
    Dialed(oneshot::Sender<Result<Vec<u8>, String>>),
    /// The peer dialled.
    Accepted(AcceptedTicket, PeerAddress),
}

impl Device {
    /// Opens the network of `info`, and starts a task on this runtime that handles its events.
    pub(super) fn open(info: &Info, common: Arc<Common>) -> io::Result<Arc<Device>> {
        let fabric = Fabric::open(info).map_err(io::Error::other)?;
        let events = EventQueue::open(&fabric).map_err(io::Error::other)?;
        let state = Mutex::new(State {
            ports: HashMap::default(),
            settling: HashMap::default(),
            accepting: Budget::new(SETTLING_MAX, Duration::ZERO),
            links: HashMap::default(),
            last_id: 0,
            accepted: None,
        });
        let (over, failed) = (Notify::new(), AtomicBool::new(false));
        let device = Arc::new(Device { state, events, fabric, common, over, failed });
        let fd = Descriptor::register(device.events.clone())?;
        crate::spawn(watch(Arc::downgrade(&device), fd));
        Ok(device)
    }

    /// Starts to accept peers with valid tickets. Their links are sent to `links`.
    pub(super) fn accept_into(&self, links: mpsc::Sender<io::Result<Wire>>, tickets: Arc<dyn TicketOffice>) {
        self.lock().accepted = Some(Acceptance { links, tickets });
    }

    /// Stops accepting peers.
    pub(super) fn close(&self) {
        self.lock().accepted = None;
        self.is_less_used();
    }

    /// This device as a [`Watcher`] for its links.
    fn watcher(self: &Arc<Self>) -> Arc<dyn Watcher> {
        Arc::<Self>::clone(self)
    }

    /// Whether the device can be used for new connections.
    pub(super) fn is_good(&self) -> bool {
        !self.failed.load(Ordering::Relaxed)
    }

    /// Makes the event queue fail if `of_events` is true, and otherwise the completion queues of
    /// all ports. Returns the number of queues.
    pub(super) fn fail_queues(&self, of_events: bool) -> usize {
        if of_events {
            self.fail("a test made the queue of connection events fail");
            return 1;
        }
        let ports: Vec<Arc<Port<Link>>> =
            self.lock().ports.values().flatten().filter_map(Weak::upgrade).collect();
        ports.iter().for_each(|port| port.fail("a test made the completion queue fail"));
        ports.len()
    }

    /// Marks the device as failed: ends its links, and closes the channel of accepted links.
    fn fail(&self, why: &str) {
        self.failed.store(true, Ordering::Relaxed);
        self.fail_dialed(why);
        for link in self.links() {
            link.fail(why);
        }
        self.close();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics in the middle of a change, so a poisoned mutex is safe to use.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connected links.
    pub(super) fn links(&self) -> Vec<Arc<Link>> {
        self.lock().links.values().filter_map(Weak::upgrade).collect()
    }

    /// The ports of `owner`.
    pub(super) fn ports_of(&self, owner: DomainOwner) -> Vec<Arc<Port<Link>>> {
        let state = self.lock();
        let of_owner = state.ports.iter().filter(|((known, _), _)| *known == owner);
        of_owner.flat_map(|(_, ports)| ports).filter_map(Weak::upgrade).collect()
    }

    /// Finds a port of `owner` on the network device that `info` names. Opens a new port if no
    /// existing port has room for another link.
    ///
    /// # Errors
    /// If the owner is a tenant that holds as many domains or receive buffers as it may, or if the
    /// network device refuses.
    fn port(&self, owner: DomainOwner, info: &Info) -> io::Result<Arc<Port<Link>>> {
        let key = (owner, info.domain_name());
        let known: Vec<Arc<Port<Link>>> =
            self.lock().ports.get(&key).into_iter().flatten().filter_map(Weak::upgrade).collect();
        if let Some(port) = known.into_iter().find(|port| port.has_room()) {
            return Ok(port);
        }
        let tenant = self.common.tenants.of(owner);
        tenant.admit_receives(FIRST_GRANT as usize).map_err(io::Error::other)?;
        let slot = tenant.take_domain().map_err(io::Error::other)?;
        let info = info.duplicate().map_err(io::Error::other)?;
        let port =
            Port::open(&self.fabric, info, Arc::clone(&self.common), slot).map_err(io::Error::other)?;
        port.start()?;
        let mut state = self.lock();
        state.ports.retain(|_, ports| {
            ports.retain(|port| port.strong_count() > 0);
            !ports.is_empty()
        });
        state.ports.entry(key).or_default().push(Arc::downgrade(&port));
        Ok(port)
    }

    fn next_id(&self) -> u64 {
        let mut state = self.lock();
        state.last_id += 1;
        state.last_id
    }

    /// Connects to the address for which `info` was queried.
    pub(super) async fn dial(self: &Arc<Self>, info: &Info, ticket: &ConnectTicket) -> io::Result<Arc<Link>> {
        let port = self.port(DomainOwner::Own, info)?;
        let id = self.next_id();
        let endpoint = Endpoint::connecting(info, port.queues(&self.events), id);
        let endpoint = endpoint.inspect_err(|_| port.is_less_used()).map_err(io::Error::other)?;
        let endpoint = LinkEndpoint::Ofi(OfiEndpoint::new(self.watcher(), &port, endpoint));
        let link = Link::new(endpoint, ticket.packet_numbers());
        link.post_first().map_err(io::Error::other)?;
        let (done, connected) = oneshot::channel();
        let guard = SettlingGuard { device: self, id };
        self.lock().settling.insert(
            id,
            Settling { link: Arc::clone(&link), since: Instant::now(), role: SettlingOrigin::Dialed(done) },
        );
        establish(&link, &ticket.encode()).map_err(io::Error::other)?;
        let answer = connected.await.map_err(|_| io::Error::from(io::ErrorKind::ConnectionAborted))?;
        let answer = answer.map_err(io::Error::other)?;
        drop(guard);
        let token = answer.first_chunk::<8>().map(|token| u64::from_le_bytes(*token));
        let token = token.ok_or_else(|| io::Error::other("the peer's answer has no packet token"))?;
        link.set_peer_token(token);
        Ok(link)
    }

    /// Handles one connection event. Returns `false` if the queue was empty or failed.
    fn handle_event(self: &Arc<Self>) -> bool {
        let event = match self.events.read() {
            Ok(Some(event)) => event,
            Ok(None) => return false,
            Err(e) => {
                tracing::warn!(error = %e, "a queue of connection events has failed");
                self.fail("the queue of connection events has failed");
                return false;
            }
        };
        match event {
            FabricEvent::ConnectionRequest(request) => {
                if let Err(why) = self.answer(request) {
                    tracing::debug!(%why, "a connect request is refused");
                }
            }
            FabricEvent::Connected { endpoint, data } => self.on_connected(endpoint, data),
            FabricEvent::Closed { endpoint } => self.on_end(endpoint, "the peer closed the connection"),
            FabricEvent::Failed { endpoint, error, .. } => self.on_end(endpoint, &error.to_string()),
            FabricEvent::SomeFailed { error } => self.fail_dialed(&error.to_string()),
            _ => {}
        }
        true
    }

    /// Begins to accept a peer: creates the peer's endpoint in the protection domain of the tenant
    /// that the peer's ticket proves.
    fn answer(self: &Arc<Self>, request: ConnectionRequest) -> io::Result<()> {
        let ticket = ConnectTicket::decode(request.data())
            .ok_or_else(|| io::Error::other("the connect request is malformed"))?;
        self.drop_late();
        let Some(Acceptance { tickets, .. }) = self.lock().accepted.clone() else {
            return Err(io::Error::other("the listener is closed"));
        };
        let accepted = tickets.redeem(&ticket);
        let accepted = accepted.ok_or_else(|| io::Error::other("the ticket is not valid"))?;
        let peer = request.info().peer_address().map_or(PeerAddress::Local, |address| address.ip().into());
        let port = self.port(DomainOwner::Tenant(accepted.tenant_id), request.info())?;
        let id = self.next_id();
        let endpoint = Endpoint::answer(request, port.queues(&self.events), id);
        let endpoint = endpoint.inspect_err(|_| port.is_less_used()).map_err(io::Error::other)?;
        let (peer_token, transport_number) = ticket.packet_numbers();
        let own_token: u64 = base::entropy::random();
        let endpoint = LinkEndpoint::Ofi(OfiEndpoint::new(self.watcher(), &port, endpoint));
        let link = Link::new(endpoint, (own_token, transport_number));
        link.set_peer_token(peer_token);
        link.post_first().map_err(io::Error::other)?;
        let now = Instant::now();
        let role = SettlingOrigin::Accepted(accepted, peer);
        let settling = Settling { link: Arc::clone(&link), since: now, role };
        self.admit(id, peer, settling)?;
        establish(&link, &own_token.to_le_bytes()).map_err(|why| {
            drop(self.lock().take_settling(id));
            io::Error::other(why)
        })
    }

    /// Gives a link one of the slots for links that are being accepted. The link may replace
    /// another link.
    ///
    /// # Errors
    /// If all slots are taken, and `peer` may not replace another link.
    fn admit(&self, id: u64, peer: PeerAddress, settling: Settling) -> io::Result<()> {
        let mut state = self.lock();
        let victim = state.accepting.admit(id, peer, settling.since).map_err(io::Error::other)?;
        state.settling.insert(id, settling);
        let victim = victim.and_then(|victim| state.settling.remove(&victim));
        drop(state);
        if let Some(victim) = victim {
            metrics::counter!("outboard_messenger_connections_reclaimed_total", "reason" => "connecting")
                .increment(1);
            victim.fail("its slot was needed for another client");
        }
        Ok(())
    }

    /// Drops links that took too long to be accepted. Returns whether links remain that are not
    /// connected yet.
    fn drop_late(&self) -> bool {
        let mut state = self.lock();
        let late: Vec<u64> = state.settling.iter().filter(|(_, s)| s.is_late()).map(|(id, _)| *id).collect();
        let late: Vec<Settling> = late.iter().filter_map(|id| state.take_settling(*id)).collect();
        let has_others = !state.settling.is_empty();
        drop(state);
        late.iter().for_each(|s| s.link.fail("the peer took too long to connect"));
        has_others
    }

    fn on_connected(&self, id: u64, data: Vec<u8>) {
        let mut state = self.lock();
        let Some(settled) = state.take_settling(id) else { return };
        state.links.retain(|_, link| link.strong_count() > 0);
        state.links.insert(id, Arc::downgrade(&settled.link));
        let accepted = state.accepted.clone();
        drop(state);
        match settled.role {
            // The dialling caller may have been cancelled; ignore the error, here and below. The
            // link is closed when it is dropped.
            SettlingOrigin::Dialed(done) => drop(done.send(Ok(data))),
            SettlingOrigin::Accepted(ticket, peer) => {
                let address = format!("{} over {}", ticket.tenant, settled.link.provider());
                let wire = Wire { road: Road::Packets(settled.link), address, peer, ticket: Some(ticket) };
                if let Some(accepted) = accepted
                    && accepted.links.try_send(Ok(wire)).is_err()
                {
                    tracing::debug!("a link is dropped, because too many links wait to be accepted");
                }
            }
        }
    }

    fn on_end(&self, id: u64, why: &str) {
        let mut state = self.lock();
        let link = state.links.remove(&id).and_then(|link| link.upgrade());
        let settling = state.take_settling(id);
        drop(state);
        if let Some(link) = link {
            link.fail(why);
        }
        if let Some(settling) = settling {
            settling.fail(why);
        }
    }

    /// Fails all links that this side is dialling. Called if the device fails, or if a link fails
    /// and libfabric does not report which link it was.
    fn fail_dialed(&self, why: &str) {
        let mut state = self.lock();
        let dialed = |s: &Settling| matches!(s.role, SettlingOrigin::Dialed(_));
        let ids: Vec<u64> = state.settling.iter().filter(|(_, s)| dialed(s)).map(|(id, _)| *id).collect();
        let failed: Vec<Settling> = ids.iter().filter_map(|id| state.take_settling(*id)).collect();
        drop(state);
        failed.into_iter().for_each(|s| s.fail(why));
    }
}

impl Watcher for Device {
    /// Wakes the task that watches the device. The task ends if the device has been dropped.
    fn is_less_used(&self) {
        self.over.notify_one();
    }
}

impl State {
    fn take_settling(&mut self, id: u64) -> Option<Settling> {
        self.accepting.remove(id);
        self.settling.remove(&id)
    }
}

impl Settling {
    fn is_late(&self) -> bool {
        matches!(self.role, SettlingOrigin::Accepted(..)) && self.since.elapsed() > SETTLING_TIME
    }

    fn fail(self, why: &str) {
        self.link.fail(why);
        if let SettlingOrigin::Dialed(done) = self.role {
            // The dialling caller may have been cancelled; ignore the error.
            let _ = done.send(Err(why.to_owned()));
        }
    }
}

/// Removes a link that is not connected yet when the dialling caller is cancelled.
struct SettlingGuard<'a> {
    device: &'a Device,
    id: u64,
}

impl Drop for SettlingGuard<'_> {
    fn drop(&mut self) {
        let settling = self.device.lock().take_settling(self.id);
        drop(settling);
    }
}

/// Sends or answers the connect request of a link.
fn establish(link: &Link, data: &[u8]) -> Result<(), String> {
    endpoint_of(link).ok_or("the link is not one of libfabric")?.establish(data)
}

/// Handles the connection events of a device until the device is dropped or has failed. Sleeps
/// while the event queue is empty.
async fn watch(device: Weak<Device>, fd: AsyncFd<Descriptor<EventQueue>>) {
    loop {
        let Some(this) = device.upgrade().filter(|device| device.is_good()) else { return };
        let mut handled = 0;
        while handled < EVENTS && this.handle_event() {
            handled += 1;
        }
        let may_sleep = this.fabric.may_sleep(&[&this.events]);
        if handled > 0 || !matches!(may_sleep, Ok(true)) || is_readable(this.events.wait_fd()) {
            if let Err(e) = may_sleep {
                return tracing::warn!(error = %e, "cannot wait for connection events");
            }
            drop(this);
            tokio::task::yield_now().await;
            continue;
        }
        let has_settling = this.drop_late();
        // Every branch leads to a look at the event queue, so no branch starves another.
        tokio::select! {
            biased;
            readable = fd.readable() => match readable {
                Ok(mut guard) => guard.clear_ready(),
                Err(e) => return tracing::warn!(error = %e, "cannot wait for connection events"),
            },
            () = this.over.notified() => {}
            () = tokio::time::sleep(SETTLING_TIME), if has_settling => {}
        }
    }
}
