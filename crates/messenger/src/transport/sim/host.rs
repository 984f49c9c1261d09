//! [`SimHost`]: the process on a host, and the transports over which it connects and listens.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base::BoxFuture;
use base::budget::PeerAddress;
use rand::Rng;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::SimNetwork;
use super::endpoint::{LinkMemory, SimEndpoint};
use super::state::{Address, DialState, EndIndex, ProcessId, State, TransportId};
use crate::transport::packets::{Link, LinkEndpoint};
use crate::transport::{Acceptor, ConnectTicket, Road, TicketOffice, Transport, Wire};
use crate::{ConnectionConfig, Path, SimStack, StreamStack};

/// A process on a host of a simulated network.
#[derive(Clone)]
pub struct SimHost {
    pub(super) network: SimNetwork,
    pub(super) process: ProcessId,
}

impl SimHost {
    pub(super) fn new(network: SimNetwork, process: ProcessId) -> SimHost {
        SimHost { network, process }
    }

    /// The transport over which this process connects and listens with byte streams. An address is
    /// `HOST:PORT`, where the host is a name or an IP address. To listen, `*` chooses a free port.
    #[must_use]
    pub fn streams(&self) -> SimStreams {
        SimStreams(self.clone())
    }

    /// A stack of this process, over byte streams.
    ///
    /// # Panics
    /// If `config` is inconsistent.
    #[must_use]
    pub fn stack(&self, config: ConnectionConfig) -> SimStack {
        // Simulated transports use no file descriptors, and the limits of this machine must not
        // affect a run.
        let max_descriptors = config.max_descriptors.or(Some(usize::MAX));
        StreamStack::over(self.streams(), ConnectionConfig { max_descriptors, ..config })
    }

    /// The transport over which this process connects and listens with packets and one-sided
    /// transfers.
    #[must_use]
    pub fn packets(&self) -> SimPackets {
        SimPackets { host: self.clone(), memory: Arc::default() }
    }

    /// A stack of this process over byte streams, with a path over packets. A failed path is not
    /// used for the time `cool_down`. If `is_required`, a connection fails if it cannot begin over
    /// packets.
    ///
    /// # Panics
    /// If `config` is inconsistent.
    #[must_use]
    pub fn stack_with_packets(
        &self,
        config: ConnectionConfig,
        cool_down: Duration,
        is_required: bool,
    ) -> SimStack {
        let path = Path::new("sim:packets", Arc::new(self.packets()), cool_down);
        self.stack(config).with_path(path.required(is_required))
    }

    /// The IP address of the host.
    #[must_use]
    pub fn ip(&self) -> std::net::IpAddr {
        State::ip(self.with(|state| state.process(self.process).host))
    }

    pub(super) fn with<T>(&self, call: impl FnOnce(&mut State) -> T) -> T {
        self.network.0.with(call)
    }

    fn is_alive(&self) -> bool {
        self.with(|state| state.process(self.process).is_alive)
    }

    /// Begins to listen at `address`.
    fn listen(&self, address: &str, accepts_links: bool) -> io::Result<Address> {
        let port = match address.rsplit_once(':') {
            None => 0,
            Some((_, port)) => port.parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?,
        };
        self.with(|state| state.listen(self.process, port, accepts_links))
            .ok_or_else(|| io::ErrorKind::AddrInUse.into())
    }

    /// Connects to `endpoint`.
    async fn dial(&self, endpoint: &str) -> io::Result<StreamEnd> {
        let id = self.request(endpoint, None).await?;
        // If this future is dropped, the end closes the transport.
        let end = StreamEnd { host: self.clone(), id, end: 0 };
        self.answered(id).await?;
        Ok(end)
    }

    /// Sends a connect request to `endpoint`: with a ticket for a link, without for a stream.
    async fn request(&self, endpoint: &str, ticket: Option<&ConnectTicket>) -> io::Result<TransportId> {
        if !self.is_alive() {
            return std::future::pending().await;
        }
        let to = self.with(|state| state.resolve(endpoint)).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(self.with(|state| state.dial(self.process, to, ticket.cloned())))
    }

    /// Waits for the answer to a connect request.
    async fn answered(&self, id: TransportId) -> io::Result<()> {
        let dialing = poll_fn(|cx| {
            self.with(|state| match state.transports.get_mut(&id) {
                Some(transport) if transport.dialing == DialState::Pending => {
                    transport.ends[0].reader = Some(cx.waker().clone());
                    Poll::Pending
                }
                Some(transport) => Poll::Ready(transport.dialing),
                None => Poll::Ready(DialState::Refused),
            })
        });
        match dialing.await {
            DialState::Connected => Ok(()),
            _ => Err(io::ErrorKind::ConnectionRefused.into()),
        }
    }
}

impl fmt::Debug for SimHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.with(|state| state.name(state.process(self.process).host).to_owned());
        f.debug_tuple("SimHost").field(&name).finish()
    }
}

/// The byte streams of a process on a simulated network.
#[derive(Debug, Clone)]
pub struct SimStreams(SimHost);

impl Transport for SimStreams {
    fn bind<'a>(
        &'a self,
        address: &'a str,
        _: Arc<dyn TicketOffice>,
    ) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>> {
        Box::pin(async move {
            let address = self.0.listen(address, false)?;
            Ok(Box::new(SimAcceptor { host: self.0.clone(), address }) as Box<dyn Acceptor>)
        })
    }

    fn dial<'a>(
        &'a self,
        endpoint: &'a str,
        _: Option<&'a ConnectTicket>,
    ) -> BoxFuture<'a, io::Result<Wire>> {
        Box::pin(async move { Ok(self.0.dial(endpoint).await?.into_wire(endpoint.to_owned())) })
    }
}

/// Accepts streams at one address.
struct SimAcceptor {
    host: SimHost,
    address: Address,
}

impl Acceptor for SimAcceptor {
    fn endpoint(&self) -> String {
        State::endpoint(self.address)
    }

    fn accept(&mut self) -> BoxFuture<'_, io::Result<Wire>> {
        Box::pin(async {
            let SimAcceptor { host, address } = self;
            let id = poll_fn(|cx| {
                let next = host.with(|state| state.accept(host.process, *address, cx.waker()));
                next.map_or(Poll::Pending, Poll::Ready)
            });
            let id = id.await;
            let peer = host.with(|state| state.transports.get(&id).map(|t| t.ends[0].host));
            let ip = State::ip(peer.unwrap_or_default());
            let end = StreamEnd { host: host.clone(), id, end: 1 };
            Ok(Wire { peer: PeerAddress::from(ip), ..end.into_wire(ip.to_string()) })
        })
    }
}

impl Drop for SimAcceptor {
    fn drop(&mut self) {
        let Self { host, address } = self;
        host.with(|state| state.unlisten_of(host.process, *address));
    }
}

/// The packets and one-sided transfers of a process on a simulated network.
#[derive(Clone)]
pub struct SimPackets {
    host: SimHost,
    memory: Arc<LinkMemory>,
}

impl SimPackets {
    /// Creates the link at one end of a transport.
    fn link(&self, id: TransportId, end: EndIndex, numbers: (u64, u64)) -> io::Result<Arc<Link>> {
        let needs_arena = self.host.with(|state| state.random.random_bool(0.5));
        let endpoint = SimEndpoint::new(self.host.clone(), id, end, Arc::clone(&self.memory), needs_arena);
        let link = Link::new(LinkEndpoint::Sim(endpoint), numbers);
        link.post_first().map_err(io::Error::other)?;
        Ok(link)
    }
}

impl fmt::Debug for SimPackets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimPackets").field(&self.host).finish()
    }
}

impl Transport for SimPackets {
    fn bind<'a>(
        &'a self,
        address: &'a str,
        tickets: Arc<dyn TicketOffice>,
    ) -> BoxFuture<'a, io::Result<Box<dyn Acceptor>>> {
        Box::pin(async move {
            let address = self.host.listen(address, true)?;
            Ok(Box::new(LinkAcceptor { packets: self.clone(), address, tickets }) as Box<dyn Acceptor>)
        })
    }

    fn dial<'a>(
        &'a self,
        endpoint: &'a str,
        ticket: Option<&'a ConnectTicket>,
    ) -> BoxFuture<'a, io::Result<Wire>> {
        Box::pin(async move {
            let ticket = ticket.ok_or(io::ErrorKind::InvalidInput)?;
            let id = self.host.request(endpoint, Some(ticket)).await?;
            let link = self.link(id, 0, ticket.packet_numbers())?;
            self.host.answered(id).await?;
            let token = self.host.with(|state| Some(state.transports.get(&id)?.link.as_ref()?.accept_token));
            link.set_peer_token(token.ok_or(io::ErrorKind::ConnectionReset)?);
            let (road, address) = (Road::Packets(link), endpoint.to_owned());
            Ok(Wire { road, address, peer: PeerAddress::Local, ticket: None })
        })
    }
}

/// Accepts links at one address.
struct LinkAcceptor {
    packets: SimPackets,
    address: Address,
    tickets: Arc<dyn TicketOffice>,
}

impl Acceptor for LinkAcceptor {
    fn endpoint(&self) -> String {
        State::endpoint(self.address)
    }

    fn accept(&mut self) -> BoxFuture<'_, io::Result<Wire>> {
        Box::pin(async {
            let LinkAcceptor { packets, address, tickets } = self;
            let host = &packets.host;
            let accepted = poll_fn(|cx| {
                host.with(|state| {
                    while let Some(id) = state.accept(host.process, *address, cx.waker()) {
                        // A transport that has ended meanwhile is skipped.
                        let Some(transport) = state.transports.get(&id) else { continue };
                        let Some(link) = &transport.link else { continue };
                        let Some(accepted) = tickets.redeem(&link.ticket) else {
                            state.decline(id);
                            continue;
                        };
                        let (peer, numbers) = (transport.ends[0].host, link.ticket.packet_numbers());
                        return Poll::Ready((id, peer, accepted, numbers, link.accept_token));
                    }
                    Poll::Pending
                })
            });
            let (id, peer, ticket, (peer_token, transport_number), own_token) = accepted.await;
            let link = packets.link(id, 1, (own_token, transport_number))?;
            link.set_peer_token(peer_token);
            host.with(|state| state.answer(id));
            let address = format!("{} over {}", ticket.tenant, link.provider());
            let (road, peer) = (Road::Packets(link), State::ip(peer).into());
            Ok(Wire { road, address, peer, ticket: Some(ticket) })
        })
    }
}

impl Drop for LinkAcceptor {
    fn drop(&mut self) {
        let Self { packets: SimPackets { host, .. }, address, .. } = self;
        host.with(|state| state.unlisten_of(host.process, *address));
    }
}

/// One end of a stream. Closes the stream when it is dropped.
struct StreamEnd {
    host: SimHost,
    id: TransportId,
    end: EndIndex,
}

impl StreamEnd {
    fn into_wire(self, address: String) -> Wire {
        let end = Arc::new(self);
        Wire::stream(Box::new(StreamHalf(Arc::clone(&end))), Box::new(StreamHalf(end)), address)
    }
}

impl Drop for StreamEnd {
    fn drop(&mut self) {
        // The network has already closed the streams of a process that has ended.
        self.host.with(|state| state.close(self.id, self.end, false));
    }
}

/// The receiving or the sending half of an end.
struct StreamHalf(Arc<StreamEnd>);

impl AsyncRead for StreamHalf {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let StreamEnd { host, id, end } = &*self.0;
        host.with(|state| state.read(*id, *end, buf, cx.waker()))
    }
}

impl AsyncWrite for StreamHalf {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let StreamEnd { host, id, end } = &*self.0;
        host.with(|state| state.write(*id, *end, slices, cx.waker()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let StreamEnd { host, id, end } = &*self.0;
        host.with(|state| state.finish(*id, *end));
        Poll::Ready(Ok(()))
    }
}
