//! Network stacks over any [`Transport`]: connecting, listening, and the connections of a listener.

mod listener;

use std::sync::Arc;

use base::BoxFuture;

use crate::config::ConnectionConfig;
use crate::connection::{self, ConnectionSide, Shared, TransportSupply};
use crate::dialer::Dialer;
use crate::home::Home;
use crate::paths::Path;
use crate::transport::sim::{SimFaults, SimNetwork, SimStreams};
use crate::transport::tcp::Tcp;
use crate::transport::{Road, TicketOffice, Transport};
use crate::{ConnectOptions, Ends, Listener, MessengerError, NetworkStack, Result};
use listener::{ConnectionRegistry, StreamListener};

/// A network stack over a base [`Transport`], with optional faster [`Path`]s.
///
/// The thread that called `listen` serves a listener's connections. The thread that called
/// `connect` serves a client's connection, unless [`on_own_thread`](StreamStack::on_own_thread)
/// gave the stack its own thread. All these threads must run a tokio runtime with timers and I/O
/// enabled. Other threads may use the connections' handles. These threads need a runtime with
/// timers, because transfers have deadlines.
pub struct StreamStack<T> {
    transport: Arc<T>,
    paths: Vec<Arc<Path>>,
    home: Option<Arc<Home>>,
    config: ConnectionConfig,
}

/// A stack of a process on a [simulated network](crate::transport::sim).
pub type SimStack = StreamStack<SimStreams>;

/// The TCP stack. Its endpoints are `host:port`.
pub type TcpStack = StreamStack<Tcp>;

impl StreamStack<Tcp> {
    /// Creates a stack over TCP.
    ///
    /// # Panics
    /// If `config` is inconsistent.
    #[must_use]
    pub fn new(config: ConnectionConfig) -> TcpStack {
        StreamStack::over(Tcp::default(), config)
    }
}

impl StreamStack<SimStreams> {
    /// Creates a stack over a simulated network with one host. `seed` determines when its `faults`
    /// occur. Also returns the network, which counts faults, ends them, or injects them on request.
    ///
    /// # Panics
    /// If `config` is inconsistent.
    #[must_use]
    pub fn simulated(seed: u64, faults: SimFaults, config: ConnectionConfig) -> (SimStack, SimNetwork) {
        let network = SimNetwork::new(seed, faults);
        (network.host("host").stack(config), network)
    }
}

impl Default for TcpStack {
    fn default() -> Self {
        TcpStack::new(ConnectionConfig::default())
    }
}

impl<T: Transport> StreamStack<T> {
    /// Creates a stack over any transport.
    ///
    /// # Panics
    /// If `config` is inconsistent.
    #[must_use]
    pub fn over(transport: T, config: ConnectionConfig) -> StreamStack<T> {
        config.assert_sound();
        StreamStack { transport: Arc::new(transport), paths: Vec::new(), home: None, config }
    }

    /// Adds a path, which the stack prefers to the base transport. The stack prefers paths that
    /// were added earlier to paths that were added later.
    #[must_use]
    pub fn with_path(mut self, path: Path) -> StreamStack<T> {
        self.paths.push(Arc::new(path));
        self
    }

    /// Makes a separate thread serve the connections of clients. Over some paths, one-sided
    /// transfers progress only while the thread that serves the connection runs. A separate thread
    /// keeps these transfers going while the user's thread is busy.
    ///
    /// # Errors
    /// If the system cannot start another thread.
    pub fn on_own_thread(mut self) -> std::io::Result<StreamStack<T>> {
        self.home = Some(Arc::new(Home::start()?));
        Ok(self)
    }

    /// The health of the paths, in order of preference.
    pub fn paths(&self) -> impl Iterator<Item = (&str, base::health::HealthReport)> {
        self.paths.iter().map(|path| (path.name.as_str(), path.health.report()))
    }
}

impl<T: Transport> NetworkStack for StreamStack<T> {
    fn listen<'a>(&'a self, address: &'a str) -> BoxFuture<'a, Result<Box<dyn Listener>>> {
        Box::pin(async move {
            let registry = ConnectionRegistry::new(&self.config);
            let tickets = || Arc::clone(&registry) as Arc<dyn TicketOffice>;
            let bound = self.transport.bind(address, tickets()).await;
            let acceptor = bound.map_err(|e| MessengerError::CannotListen {
                address: address.to_owned(),
                reason: e.to_string(),
            })?;
            let base = acceptor.endpoint();
            let mut others = Vec::new();
            for path in &self.paths {
                let (host, _) = base.rsplit_once(':').unwrap_or((&base, ""));
                let address = path.address.clone().unwrap_or_else(|| format!("{host}:0"));
                match path.transport.bind(&address, tickets()).await {
                    Ok(other) => others.push((path.name.clone(), other)),
                    Err(e) if path.is_required => {
                        let reason = format!("{}: {e}", path.name);
                        return Err(MessengerError::CannotListen { address, reason });
                    }
                    Err(e) => {
                        tracing::info!(path = path.name, address, error = %e, "cannot listen on this path")
                    }
                }
            }
            let listener = StreamListener::start(acceptor, others, self.config.clone(), registry);
            Ok(Box::new(listener) as Box<dyn Listener>)
        })
    }

    fn connect<'a>(&'a self, endpoint: &'a str, options: ConnectOptions) -> BoxFuture<'a, Result<Ends>> {
        Box::pin(async move {
            let transport = Arc::clone(&self.transport) as Arc<dyn Transport>;
            let config = self.config.clone();
            let dialer = Dialer::new(transport, self.paths.clone(), endpoint, options, config.clone());
            match &self.home {
                None => begin(dialer, config).await,
                Some(home) => {
                    let dialer = dialer.at(Arc::clone(home));
                    let gone = || MessengerError::ConnectionLost("the messenger's thread has ended".into());
                    home.run(begin(dialer, config)).await.unwrap_or_else(|| Err(gone()))
                }
            }
        })
    }
}

/// Opens a connection, which the calling thread serves.
async fn begin(mut dialer: Dialer, config: ConnectionConfig) -> Result<Ends> {
    let (settled, wire) = dialer.dial().await?;
    let link = match &wire.road {
        Road::Packets(link) => Some(Arc::clone(link)),
        Road::Stream(..) => None,
    };
    let shared = Shared::new(settled, config, ConnectionSide::Client, link);
    let handles = shared.handles();
    crate::spawn(connection::run(shared, TransportSupply::Client(Box::new(dialer)), wire));
    Ok(handles)
}
