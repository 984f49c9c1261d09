//! libfabric as a transport: RDMA if the machine has hardware for it (RoCE, InfiniBand, iWARP), and
//! TCP otherwise.
//!
//! ```text
//!   Device ── connection events                     one network
//!     └─ Port ── completions, receive buffers       one protection domain of a tenant
//!          └─ Link ── packets, reads, writes        one connection
//! ```
//!
//! A tenant with many connections may have several ports on one device. [`Tenants`] limits the ports
//! and receive buffers of each tenant. A port without links is closed.
//!
//! **Polling.** A port's task polls its completion queue in the same loop that runs the
//! connections. When the queue is empty, the task continues to poll for a short time, as long as
//! this finds events. Then it sleeps until the runtime's epoll reports that the queue's descriptor
//! is readable. A packet arrives in a buffer of the pool, and the connection receives it without a
//! copy. Another buffer replaces the used buffer at once.
//!
//! **Trust.** The connect request contains a ticket, which proves the connection and therefore its
//! tenant. The server creates the endpoint in the tenant's own protection domain, and creates nothing
//! for a peer without a valid ticket. Packets carry a random token of the connection. A server's
//! memory is registered for its own use only. Memory that a client exposes is registered for one
//! transfer, with a random key if the provider permits choosing the key.
//!
//! **Threads.** All tasks run on the thread that calls [`Transport::bind`] and [`Transport::dial`].
//! Over `tcp`, bytes move only while these tasks run, so blocking this thread stalls the peers.

mod descriptor;
mod device;
mod endpoint;
mod faults;
mod poller;
mod port;
mod tenants;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use base::BoxFuture;
use base::budget::PeerAddress;
use base::collections::HashMap;
use base::fault::Faults;
use base::mem::Arena;
use base::watch;
use fabric::{
    Access, EndpointAddress, FabricError, FabricListener, Info, Library, MemoryRegion, ProviderQuery,
    RemoteRegion,
};
use serde::Deserialize;
use tokio::sync::mpsc;

pub(crate) use endpoint::OfiEndpoint;

use super::packets::{Buffers, Landings, Link, LinkEndpoint};
use super::{Acceptor, ConnectTicket, Road, TicketOffice, Transport, Wire};
use device::Device;
use endpoint::Watcher;
use port::Port;
use tenants::{DomainOwner, Tenants};

/// Maximum number of transports that wait to be accepted.
const BACKLOG: usize = 256;

/// Whether connections share receive buffers. The configuration of a node contains the names in
/// kebab-case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReceiveQueueKind {
    /// All connections of a domain share receive buffers. If the device supports this, idle
    /// connections hold little memory.
    #[default]
    Shared,
    /// Each connection has its own receive buffers.
    PerConnection,
}

/// Configuration of the libfabric transport.
#[derive(Debug, Clone)]
pub struct OfiConfig {
    /// The provider, such as `verbs` or `tcp`.
    pub provider: String,
    /// Whether connections share receive buffers. If the provider does not support shared buffers,
    /// each connection gets its own buffers.
    pub receive_queue: ReceiveQueueKind,
    /// Time for which to poll for events before sleeping. After repeated polls without events, the
    /// thread mostly sleeps without polling first.
    pub spin: Duration,
    /// Maximum amount of memory for the packets of all connections, in bytes.
    pub packet_memory_bytes: usize,
    /// Maximum number of protection domains of all tenants. One tenant may have a quarter of them.
    pub domains_max: usize,
    /// Faults to inject.
    pub faults: Faults,
}

impl OfiConfig {
    /// The default configuration for a provider.
    #[must_use]
    pub fn new(provider: &str) -> OfiConfig {
        OfiConfig {
            provider: provider.to_owned(),
            receive_queue: ReceiveQueueKind::default(),
            spin: Duration::from_micros(20),
            packet_memory_bytes: 256 << 20,
            domains_max: 512,
            faults: Faults::default(),
        }
    }

    /// The query by which libfabric finds the provider for `target`.
    fn query(&self, target: EndpointAddress) -> ProviderQuery {
        let shared_receive = self.receive_queue == ReceiveQueueKind::Shared;
        ProviderQuery { provider: Some(self.provider.clone()), target, shared_receive }
    }
}

/// The state that all devices and ports of a transport share.
struct Common {
    config: OfiConfig,
    buffers: Buffers,
    landings: Landings,
    tenants: Arc<Tenants>,
    control: Arc<OfiControl>,
}

/// Control of the transport for tests and fault injection.
pub struct OfiControl {
    devices: Mutex<Vec<Weak<Device>>>,
    frozen: watch::Sender<bool>,
    refuses: AtomicBool,
    refuses_memory: AtomicBool,
    tenants: Arc<Tenants>,
}

impl OfiControl {
    /// Breaks all links at once. Returns their number.
    pub fn cut(&self) -> usize {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let links: Vec<Arc<Link>> =
            devices.iter().filter_map(Weak::upgrade).flat_map(|device| device.links()).collect();
        links.iter().filter(|link| link.failure().is_none()).map(|link| link.fail("cut")).count()
    }

    /// Number of protection domains that tenants hold.
    #[must_use]
    pub fn domains(&self) -> usize {
        self.tenants.domains()
    }

    /// The registered memory of a tenant's domains, as a peer would name it. The peer has rights to none
    /// of it, except over iWARP to the memory of a read.
    #[must_use]
    pub fn registered(&self, tenant_id: u32) -> Vec<RemoteRegion> {
        self.ports(tenant_id).iter().flat_map(|port| port.registered()).collect()
    }

    /// Registers memory in a domain of a tenant, for its peers if `access` says so. A server never
    /// does this; tests attack the memory.
    ///
    /// # Errors
    /// If the tenant has no domain, or the device refuses.
    pub fn register(&self, tenant_id: u32, arena: &Arc<Arena>, access: Access) -> io::Result<MemoryRegion> {
        let ports = self.ports(tenant_id);
        let port = ports.first().ok_or_else(|| io::Error::other("the tenant has no domain"))?;
        MemoryRegion::register(&port.domain, arena, access).map_err(io::Error::other)
    }

    fn ports(&self, tenant_id: u32) -> Vec<Arc<Port<Link>>> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let owner = DomainOwner::Tenant(tenant_id);
        devices.iter().filter_map(Weak::upgrade).flat_map(|device| device.ports_of(owner)).collect()
    }

    /// While `refuses` is set, no link can be established.
    pub fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::Relaxed);
    }

    /// While `refuses` is set, no more memory is registered, as if the limit on locked memory were
    /// used up.
    pub fn refuse_memory(&self, refuses: bool) {
        self.refuses_memory.store(refuses, Ordering::Relaxed);
    }

    /// Makes all queues of one kind fail, as if they had overrun: the event queues if `of_events`
    /// is true, and otherwise the completion queues. Returns the number of failed queues.
    pub fn fail_queues(&self, of_events: bool) -> usize {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let devices: Vec<Arc<Device>> = devices.iter().filter_map(Weak::upgrade).collect();
        devices.iter().map(|device| device.fail_queues(of_events)).sum()
    }

    /// Returns an error while [`refuse_memory`](Self::refuse_memory) is in force.
    fn check_memory(&self) -> Result<(), String> {
        if self.refuses_memory.load(Ordering::Relaxed) {
            Err("a test refuses to register memory".into())
        } else {
            Ok(())
        }
    }

    /// While `frozen` is set, no data moves.
    pub fn freeze(&self, frozen: bool) {
        self.frozen.send_replace(frozen);
    }

    /// Waits while the transport is frozen.
    async fn thaw(&self) {
        if *self.frozen.borrow() {
            // The sender lives as long as `self`.
            drop(self.frozen.subscribe().wait_for(|frozen| !*frozen).await);
        }
    }

    fn watch(&self, device: &Arc<Device>) {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|device| device.strong_count() > 0);
        devices.push(Arc::downgrade(device));
    }
}

/// The endpoint of a link, if it is an endpoint of libfabric.
fn endpoint_of(link: &Link) -> Option<&OfiEndpoint> {
    match &link.endpoint {
        LinkEndpoint::Ofi(endpoint) => Some(endpoint),
        LinkEndpoint::Sim(_) => None,
    }
}

/// The libfabric transport. Addresses are `host:port`.
pub struct Ofi {
    library: Library,
    common: Arc<Common>,
    /// The devices from which this side dials, by the names of network and network device. An entry
    /// is valid while connections use the device.
    dialing: Mutex<HashMap<(String, String), Weak<Device>>>,
}

impl Ofi {
    /// Loads libfabric, and checks that it has the provider.
    ///
    /// # Errors
    /// If libfabric or the provider is missing.
    pub fn new(mut config: OfiConfig) -> Result<Ofi, FabricError> {
        let library = Library::load()?;
        if library.query(&config.query(EndpointAddress::Any)).is_err() {
            config.receive_queue = ReceiveQueueKind::PerConnection;
            library.query(&config.query(EndpointAddress::Any))?;
            tracing::info!(
                provider = config.provider,
                "the provider has no shared receive queues; each connection has its own"
            );
        }
        let buffers = Buffers::new(config.packet_memory_bytes);
        let tenants = Arc::new(Tenants::new(config.domains_max, buffers.receives_max()));
        let control = Arc::new(OfiControl {
            devices: Mutex::default(),
            frozen: watch::Sender::new(false),
            refuses: AtomicBool::new(false),
            refuses_memory: AtomicBool::new(false),
            tenants: Arc::clone(&tenants),
        });
        let landings = Landings::default();
        Ok(Ofi {
            library,
            common: Arc::new(Common { config, buffers, landings, tenants, control }),
            dialing: Mutex::default(),
        })
    }

    /// The control with which tests inject faults.
    #[must_use]
    pub fn control(&self) -> Arc<OfiControl> {
        Arc::clone(&self.common.control)
    }

    /// Queries libfabric for the first address of `address` that the provider supports.
    async fn query(&self, address: &str, target: impl Fn(SocketAddr) -> EndpointAddress) -> io::Result<Info> {
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in tokio::net::lookup_host(address).await? {
            let query = self.common.config.query(target(address));
            match self.library.query(&query) {
                Ok(mut infos) if !infos.is_empty() => return Ok(infos.swap_remove(0)),
                Ok(_) => {}
                Err(e) => last = io::Error::other(e),
            }
        }
        Err(last)
    }

    /// The device from which to dial the peer that `info` describes.
    fn dialing(&self, info: &Info) -> io::Result<Arc<Device>> {
        let key = (info.fabric_name(), info.domain_name());
        let mut dialing = self.dialing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = dialing.get(&key).and_then(Weak::upgrade).filter(|device| device.is_good()) {
            return Ok(device);
        }
        let device = Device::open(info, Arc::clone(&self.common))?;
        self.common.control.watch(&device);
        dialing.insert(key, Arc::downgrade(&device));
        Ok(device)
    }
}

/// Accepts links at one address.
struct OfiAcceptor {
    library: Library,
    common: Arc<Common>,
    tickets: Arc<dyn TicketOffice>,
    address: SocketAddr,
    /// `None` after the device has failed, until it is open again.
    open: Option<AcceptQueue>,
}

struct AcceptQueue {
    wires: mpsc::Receiver<io::Result<Wire>>,
    /// This field precedes `device`, so that the listener is dropped first and no new connection
    /// arrives.
    listener: FabricListener,
    device: Arc<Device>,
}

impl AcceptQueue {
    fn new(info: &Info, common: &Arc<Common>, tickets: &Arc<dyn TicketOffice>) -> io::Result<AcceptQueue> {
        let device = Device::open(info, Arc::clone(common))?;
        common.control.watch(&device);
        let (accepted, wires) = mpsc::channel(BACKLOG);
        device.accept_into(accepted, Arc::clone(tickets));
        let listener = FabricListener::open(info, &device.events).map_err(io::Error::other)?;
        Ok(AcceptQueue { wires, listener, device })
    }
}

impl Drop for AcceptQueue {
    fn drop(&mut self) {
        self.device.close();
    }
}

impl OfiAcceptor {
    /// Listens again at the same address, after the device's event queue has failed.
    fn reopen(&mut self) -> io::Result<()> {
        let query = self.common.config.query(EndpointAddress::Listen(self.address));
        let infos = self.library.query(&query).map_err(io::Error::other)?;
        let info = infos.first().ok_or(io::ErrorKind::AddrNotAvailable)?;
        self.open = Some(AcceptQueue::new(info, &self.common, &self.tickets)?);
        Ok(())
    }
}

impl Transport for Ofi {
    fn bind<'a>(
        &'a self,
        address: &'a str,
        tickets: Arc<dyn TicketOffice>,
    ) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>> {
        Box::pin(async move {
            let info = self.query(address, EndpointAddress::Listen).await?;
            let open = AcceptQueue::new(&info, &self.common, &tickets)?;
            let address = open.listener.address();
            let (library, common) = (self.library, Arc::clone(&self.common));
            Ok(Box::new(OfiAcceptor { library, common, tickets, address, open: Some(open) })
                as Box<dyn Acceptor>)
        })
    }

    fn dial<'a>(
        &'a self,
        endpoint: &'a str,
        ticket: Option<&'a ConnectTicket>,
    ) -> BoxFuture<'a, io::Result<Wire>> {
        Box::pin(async move {
            let ticket = ticket.ok_or(io::ErrorKind::InvalidInput)?;
            if self.common.control.refuses.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let info = self.query(endpoint, EndpointAddress::Connect).await?;
            let device = self.dialing(&info)?;
            let link = device.dial(&info, ticket).await.inspect_err(|_| device.is_less_used())?;
            let (road, address) = (Road::Packets(link), endpoint.to_owned());
            Ok(Wire { road, address, peer: PeerAddress::Local, ticket: None })
        })
    }
}

impl Acceptor for OfiAcceptor {
    fn endpoint(&self) -> String {
        self.address.to_string()
    }

    fn accept(&mut self) -> BoxFuture<'_, io::Result<Wire>> {
        Box::pin(async {
            if let Some(open) = &mut self.open
                && let Some(wire) = open.wires.recv().await
            {
                return wire;
            }
            // The old listener is dropped first, because it occupies the address.
            self.open = None;
            self.reopen()?;
            Err(io::Error::other("the network device was reopened, because its event queue had failed"))
        })
    }
}
