//! A fixture for tests: the two sides of a connection, driven by one thread.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use base::mem::Arena;
use fabric::{
    Access, Completion, CompletionQueue, ConnectionRequest, Domain, Endpoint, EndpointAddress,
    EndpointQueues, EventQueue, Fabric, FabricError, FabricEvent, FabricListener, Info, Library,
    MemoryRegion, ProviderQuery, Waitable, wait,
};

pub const PATIENCE: Duration = Duration::from_secs(20);

/// Loads libfabric.
///
/// # Panics
/// If libfabric cannot be loaded.
pub fn library() -> Library {
    Library::load().unwrap_or_else(|e| panic!("libfabric cannot be loaded: {e}; run \"scripts/setup test\""))
}

/// The objects of one side, as a process would have them.
pub struct Side {
    pub domain: Domain,
    pub events: EventQueue,
    pub completions: CompletionQueue,
}

impl Side {
    pub fn open(info: Info) -> Side {
        let fabric = Fabric::open(&info).unwrap();
        let domain = Domain::open(&fabric, info).unwrap();
        let completions = CompletionQueue::open(&domain, 64).unwrap();
        Side { events: EventQueue::open(&fabric).unwrap(), domain, completions }
    }

    pub fn queues(&self) -> EndpointQueues<'_> {
        EndpointQueues::new(&self.events, &self.completions)
    }

    pub fn region(&self, len: usize, access: Access) -> MemoryRegion {
        MemoryRegion::register(&self.domain, &Arena::anonymous(len).unwrap(), access).unwrap()
    }
}

/// Both sides, with the events and completions that the test has not taken yet.
pub struct Pair {
    pub server: Side,
    pub client: Side,
    pub listener: FabricListener,
    pub to_server: Info,
    pub happened: Vec<(Who, FabricEvent)>,
    pub completed: Vec<(Who, Completion)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    Server,
    Client,
}

/// The name of the provider under test, and the address of this machine that it uses.
pub fn provider() -> (String, IpAddr) {
    let chosen = std::env::var("OUTBOARD_TEST_FABRIC").unwrap_or_else(|_| "tcp@127.0.0.1".to_owned());
    let (provider, address) = chosen.split_once('@').expect("PROVIDER@ADDRESS");
    (provider.to_owned(), address.parse().expect("an address"))
}

/// The address of a listener at a free port.
pub fn anywhere() -> EndpointAddress {
    EndpointAddress::Listen(SocketAddr::new(provider().1, 0))
}

pub fn info(library: Library, target: EndpointAddress) -> Result<Info, FabricError> {
    info_with(library, target, false)
}

pub fn info_with(
    library: Library,
    target: EndpointAddress,
    shared_receive: bool,
) -> Result<Info, FabricError> {
    let query = ProviderQuery { provider: Some(provider().0), target, shared_receive };
    Ok(library.query(&query)?.swap_remove(0))
}

impl Pair {
    /// Opens a listening server and a client, without a connection.
    pub fn new() -> Pair {
        Pair::with_shared_receives(false)
    }

    /// Like [`new`](Self::new). If `shared` is true, the server's endpoints can share a receive
    /// queue.
    pub fn with_shared_receives(shared: bool) -> Pair {
        let library = library();
        let listen = info_with(library, anywhere(), shared).unwrap();
        let server = Side::open(listen);
        let listener = FabricListener::open(server.domain.info(), &server.events).unwrap();
        let connect = || info(library, EndpointAddress::Connect(listener.address())).unwrap();
        let client = Side::open(connect());
        let to_server = connect();
        Pair { server, client, listener, to_server, happened: Vec::new(), completed: Vec::new() }
    }

    /// Polls both sides once. If neither side had an event or a completion, sleeps until one may
    /// arrive.
    pub fn drive(&mut self) {
        let before = (self.happened.len(), self.completed.len());
        for (who, side) in [(Who::Server, &self.server), (Who::Client, &self.client)] {
            while let Some(event) = side.events.read().unwrap() {
                self.happened.push((who, event));
            }
            let mut out = Vec::new();
            side.completions.poll(&mut out).unwrap();
            self.completed.extend(out.into_iter().map(|c| (who, c)));
        }
        if before == (self.happened.len(), self.completed.len()) {
            let server: [&dyn Waitable; 2] = [&self.server.events, &self.server.completions];
            let client = [&self.client.events as &dyn Waitable, &self.client.completions];
            if self.client.domain.fabric().may_sleep(&client).unwrap() {
                let client = client.map(Waitable::wait_fd);
                wait(self.server.domain.fabric(), &server, &client, Some(PATIENCE)).unwrap();
            }
        }
    }

    /// Polls both sides for 20 ms, and panics if an event or completion appears.
    pub fn drive_until_idle(&mut self) {
        for _ in 0..20 {
            for side in [&self.server, &self.client] {
                let mut out = Vec::new();
                side.completions.poll(&mut out).unwrap();
                assert!(out.is_empty() && side.events.read().unwrap().is_none());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Drives both sides until `pick` returns a value. `what` names the value in the message of a
    /// timeout.
    pub fn until<T>(&mut self, what: &str, mut pick: impl FnMut(&mut Pair) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = pick(self) {
                return found;
            }
            assert!(
                Instant::now() < deadline,
                "timed out waiting for {what}; events and completions so far: {:?}",
                (&self.happened, &self.completed)
            );
            self.drive();
        }
    }

    pub fn event(&mut self, of: Who) -> FabricEvent {
        self.until("event", |pair| {
            let at = pair.happened.iter().position(|(who, _)| *who == of)?;
            Some(pair.happened.remove(at).1)
        })
    }

    pub fn completion(&mut self, of: Who) -> Completion {
        self.until("completion", |pair| {
            let at = pair.completed.iter().position(|(who, _)| *who == of)?;
            Some(pair.completed.remove(at).1)
        })
    }

    pub fn request(&mut self) -> ConnectionRequest {
        match self.event(Who::Server) {
            FabricEvent::ConnectionRequest(request) => request,
            other => panic!("{other:?} instead of a connection request"),
        }
    }

    pub fn client_endpoint(&self, token: u64) -> Endpoint {
        Endpoint::connecting(&self.to_server, self.client.queues(), token).unwrap()
    }

    /// Establishes a connection. The server's endpoint has token 1, and the client's endpoint has
    /// token 2.
    pub fn connect(&mut self) -> (Endpoint, Endpoint) {
        let client = self.client_endpoint(2);
        client.establish(b"hello").unwrap();
        let request = self.request();
        assert!(request.data().starts_with(b"hello"));
        let server = Endpoint::answer(request, self.server.queues(), 1).unwrap();
        server.establish(b"welcome").unwrap();
        for (who, token, said) in [(Who::Server, 1, &b""[..]), (Who::Client, 2, b"welcome")] {
            match self.event(who) {
                FabricEvent::Connected { endpoint, data } => {
                    assert!(endpoint == token && data.starts_with(said))
                }
                other => panic!("{other:?} instead of a connection"),
            }
        }
        (server, client)
    }
}
