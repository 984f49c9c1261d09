//! Network stacks over byte streams: connecting, listening, and the sessions of a listener.

mod listener;

use std::sync::Arc;

use base::BoxFuture;

use crate::config::SessionConfig;
use crate::handshake::Dialer;
use crate::session::{self, Role, Shared, Side};
use crate::transport::Transport;
use crate::transport::faulty::{FaultControl, Faults, Faulty};
use crate::transport::memory::Memory;
use crate::transport::tcp::Tcp;
use crate::{ConnectOptions, Ends, Listener, MessengerError, NetworkStack, Result};
pub(crate) use listener::Registration;
use listener::StreamListener;

/// A network stack over a [`Transport`].
///
/// A listener's sessions are served by the thread that called `listen`, a client's by the one that called `connect`;
/// both must be in a tokio runtime with time and I/O. Handles may be used on other threads; transfers have deadlines, so
/// those threads must be in a runtime with time too.
pub struct StreamStack<T> {
    transport: Arc<T>,
    config: SessionConfig,
}

/// The simulated network: everything that can go wrong, from a seed.
///
/// Replays exactly when its configuration's [`Entropy`](crate::Entropy) comes from a seed too, and it runs on one
/// current-thread runtime with a paused clock.
pub type SimStack = StreamStack<Faulty<Memory>>;

/// The stack that always works: TCP, endpoints `host:port`.
pub type TcpStack = StreamStack<Tcp>;

impl StreamStack<Tcp> {
    /// A stack over TCP.
    ///
    /// # Panics
    /// If `config` contradicts itself.
    #[must_use]
    pub fn new(config: SessionConfig) -> TcpStack {
        StreamStack::over(Tcp, config)
    }
}

impl StreamStack<Faulty<Memory>> {
    /// A network with `faults` from `seed`, and the hand on their switch.
    ///
    /// # Panics
    /// If `config` contradicts itself.
    #[must_use]
    pub fn simulated(seed: u64, faults: Faults, config: SessionConfig) -> (SimStack, Arc<FaultControl>) {
        let network = Faulty::new(Memory::default(), faults, seed);
        let control = network.control();
        (StreamStack::over(network, config), control)
    }
}

impl Default for TcpStack {
    fn default() -> Self {
        TcpStack::new(SessionConfig::default())
    }
}

impl<T: Transport> StreamStack<T> {
    /// A stack over any transport.
    ///
    /// # Panics
    /// If `config` contradicts itself.
    #[must_use]
    pub fn over(transport: T, config: SessionConfig) -> StreamStack<T> {
        config.assert_sound();
        StreamStack { transport: Arc::new(transport), config }
    }
}

impl<T: Transport> NetworkStack for StreamStack<T> {
    fn listen<'a>(&'a self, address: &'a str, features: u64) -> BoxFuture<'a, Result<Box<dyn Listener>>> {
        Box::pin(async move {
            let acceptor = self.transport.bind(address).await.map_err(|e| MessengerError::Unreachable {
                endpoint: address.to_owned(),
                reason: format!("cannot listen there: {e}"),
            })?;
            let listener = StreamListener::start(acceptor, features, self.config.clone());
            Ok(Box::new(listener) as Box<dyn Listener>)
        })
    }

    fn connect<'a>(&'a self, endpoint: &'a str, options: ConnectOptions) -> BoxFuture<'a, Result<Ends>> {
        Box::pin(async move {
            let transport = Arc::clone(&self.transport) as Arc<dyn Transport>;
            let mut dialer = Dialer::new(transport, endpoint, options, self.config.clone())?;
            let (settled, wire) = dialer.dial().await?;
            let shared = Shared::new(settled, self.config.clone(), Side::Client, &wire);
            let handles = shared.handles();
            crate::spawn(session::run(shared, Role::Client(Box::new(dialer)), wire));
            Ok(handles)
        })
    }
}
