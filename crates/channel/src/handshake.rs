//! The handshake that opens an attachment over the control socket.
//!
//! The osd sends [`ChannelHello`]: protocol versions, a nonce, the requested memory sizes, how its
//! engine reaches host memory, and the seat that it claims. The store answers with
//! [`ChannelWelcome`] or with a refusal. An engine on the same machine gets host memory and the two
//! doorbells as file descriptors, which only a UNIX socket can carry. An engine that reaches memory over a network gets an offer in the
//! welcome, over any socket. If the store cannot provide memory, the welcome states the reason, and
//! the control socket carries all data.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use base::mem::OutsideAccess;
use bytes::Bytes;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UnixStream};
use uuid::Uuid;

use crate::control::ControlSocket;
use crate::frame::ChannelEntry;
use crate::ofi::OfiOffer;
use crate::{
    ChannelError, Doorbell, EntryHeader, EntryKind, HEADER_LEN, MemoryLayout, Result, Ringer, SeatClaim,
};

/// Version of the channel's protocol.
pub const VERSION: u16 = 13;
/// Maximum length of a handshake frame, in bytes.
const MAX_HANDSHAKE: usize = 64 << 10;
/// Interval of the keepalive probes to a silent TCP peer.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// The connection to a TCP peer fails if sent data stays unacknowledged for this long. TCP sends no
/// keepalive probes while data is unacknowledged.
const UNACKNOWLEDGED: Duration = KEEPALIVE.saturating_mul(4);
/// Number of file descriptors in a welcome: host memory, the host's doorbell, the osd's doorbell.
const DESCRIPTORS: usize = 3;

/// The osd's first frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelHello {
    /// Oldest protocol version that the osd supports.
    pub version_min: u16,
    /// Newest protocol version that the osd supports.
    pub version_max: u16,
    /// A random number, which [`ChannelWelcome`] repeats.
    pub nonce: u64,
    /// The host memory that the osd requests, or `None` for an attachment without host memory.
    pub memory: Option<MemoryRequest>,
    /// Maximum number of unanswered requests that the osd will send.
    pub outstanding: u32,
    /// The seat for the attachment.
    pub seat: SeatClaim,
}

/// The start of a hello, which is the same in all versions of the protocol.
#[derive(Deserialize)]
pub(crate) struct HelloVersions {
    min: u16,
    max: u16,
}

impl HelloVersions {
    /// Refuses an osd that does not support this program's version.
    pub(crate) fn check(&self) -> Result<()> {
        let HelloVersions { min, max } = *self;
        if (min..=max).contains(&VERSION) {
            return Ok(());
        }
        Err(ChannelError::Refused(format!(
            "the store uses protocol version {VERSION}, the osd versions {min} to {max}; \
             update the older program"
        )))
    }
}

/// Host memory that the osd asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRequest {
    /// The sizes of the memory.
    pub layout: MemoryLayout,
    /// How the osd's engine reaches the memory.
    pub reach: Reach,
}

/// How an engine reaches host memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reach {
    /// Through descriptors. Both processes are on one machine and share a UNIX socket. In a
    /// simulation, the control connection carries memory and doorbells in place of descriptors.
    Descriptors,
    /// Through one-sided operations of libfabric, over any socket.
    Ofi {
        /// The libfabric provider, e.g. `verbs` or `tcp`.
        provider: String,
    },
}

impl std::fmt::Display for Reach {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Reach::Descriptors => f.write_str("descriptors"),
            Reach::Ofi { provider } => write!(f, "libfabric's provider {provider}"),
        }
    }
}

/// The store's answer to the request for host memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemoryAnswer {
    /// The store provides no memory. If the osd has requested memory, the text says why.
    None(Option<String>),
    /// Memory and doorbells are attached to the frame, as descriptors.
    Descriptors,
    /// The offer gives access to memory and doorbells.
    Offer(OfiOffer),
}

/// Describes a target to the osd. Encoded as the UUID's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "u128", into = "u128")]
pub struct TargetInfo {
    /// The target's UUID.
    pub uuid: Uuid,
}

impl From<u128> for TargetInfo {
    fn from(number: u128) -> TargetInfo {
        TargetInfo { uuid: Uuid::from_u128(number) }
    }
}

impl From<TargetInfo> for u128 {
    fn from(target: TargetInfo) -> u128 {
        target.uuid.as_u128()
    }
}

/// The store's first frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelWelcome {
    /// The protocol version for the rest of the attachment.
    pub version: u16,
    /// The nonce of the [`ChannelHello`].
    pub nonce: u64,
    /// Number of the attachment, for logs.
    pub attachment: u64,
    /// Host memory and doorbells, or the reason for their absence.
    pub memory: MemoryAnswer,
    /// The targets. Requests name a target by its index.
    pub targets: Vec<TargetInfo>,
}

/// What an engine needs to access host memory.
#[derive(Debug)]
pub enum MemoryAccess {
    /// File descriptors, for engines on the same machine.
    Descriptors(MemoryFds),
    /// An offer, for engines that reach host memory over a network.
    Offer(OfiOffer),
    /// Memory and doorbells of a simulated store, for the simulated engine.
    #[cfg(feature = "sim")]
    Sim(crate::sim::SimMemory),
}

/// Host memory and its doorbells.
#[derive(Debug)]
pub struct MemoryFds {
    /// The memfd of host memory. The osd passes it to a DMA engine and must not map it.
    pub memory: OwnedFd,
    /// The host's doorbell. The engine rings it when entries have arrived in the inbound ring.
    pub host_doorbell: OwnedFd,
    /// The osd's doorbell. The store rings it when new entries are in the outbox.
    pub osd_doorbell: OwnedFd,
}

/// A connected stream before the handshake.
#[derive(Debug)]
pub enum Socket {
    /// A UNIX socket, which can carry file descriptors.
    Unix(UnixStream),
    /// A TCP socket, which cannot carry file descriptors. The osd can then reach host memory only
    /// over a network.
    Tcp(TcpStream),
    /// A simulated connection, which carries simulated memory in place of file descriptors.
    #[cfg(feature = "sim")]
    Sim(crate::sim::SimControlStream),
}

/// A connected stream on its way to another thread.
#[derive(Debug)]
pub struct DetachedSocket(DetachedKind);

#[derive(Debug)]
enum DetachedKind {
    Unix(std::os::unix::net::UnixStream),
    Tcp(std::net::TcpStream),
}

impl DetachedSocket {
    /// Attaches the stream to the event loop of the calling task.
    ///
    /// # Errors
    /// Fails if the event loop cannot poll the stream.
    pub fn attach(self) -> io::Result<Socket> {
        Ok(match self.0 {
            DetachedKind::Unix(stream) => Socket::Unix(UnixStream::from_std(stream)?),
            DetachedKind::Tcp(stream) => Socket::Tcp(TcpStream::from_std(stream)?),
        })
    }
}

/// What a control socket can carry beside bytes.
#[derive(Debug, Clone)]
pub struct Carrier(CarrierKind);

#[derive(Debug, Clone)]
enum CarrierKind {
    Bytes,
    Descriptors,
    #[cfg(feature = "sim")]
    Sim(crate::sim::SimCarrier),
}

/// The store's ends of the two doorbells of host memory.
#[derive(Debug)]
pub struct HostDoorbells {
    /// The doorbell on which the store waits.
    pub host: Doorbell,
    /// Rings the doorbell on which the osd waits.
    pub osd: Ringer,
}

impl Carrier {
    /// Whether the socket can carry access to host memory: [`Reach::Descriptors`] needs it.
    #[must_use]
    pub fn carries_memory(&self) -> bool {
        !matches!(self.0, CarrierKind::Bytes)
    }

    /// Creates doorbells for host memory. Returns the store's ends of the doorbells, and what the
    /// osd's engine needs to access the memory.
    ///
    /// # Errors
    /// Fails if the socket cannot carry access to memory, the memory is not shared, or the process
    /// is out of file descriptors.
    pub fn share(&self, memory: &OutsideAccess) -> Result<(HostDoorbells, MemoryAccess)> {
        let no_fd = || io::Error::other("host memory has no descriptor");
        match &self.0 {
            CarrierKind::Bytes => {
                Err(ChannelError::Refused("the control socket cannot carry file descriptors".to_owned()))
            }
            CarrierKind::Descriptors => {
                let memory = memory.share_fd()?.ok_or_else(no_fd)?;
                let (host_doorbell, osd_doorbell) = (Doorbell::create()?, Doorbell::create()?);
                let host = Doorbell::new(host_doorbell.try_clone()?)?;
                let osd = Ringer::from(osd_doorbell.try_clone()?);
                let theirs = MemoryFds { memory, host_doorbell, osd_doorbell };
                Ok((HostDoorbells { host, osd }, MemoryAccess::Descriptors(theirs)))
            }
            #[cfg(feature = "sim")]
            CarrierKind::Sim(carrier) => {
                let (doorbells, theirs) = carrier.share(memory.share_fd()?.ok_or_else(no_fd)?);
                Ok((doorbells, MemoryAccess::Sim(theirs)))
            }
        }
    }
}

impl Socket {
    /// Prepares a TCP stream for the channel. The stream sends small frames without delay. It fails
    /// within 20 s if the peer's machine has disappeared or acknowledges no data.
    ///
    /// # Errors
    /// Fails if the stream is already closed.
    pub fn tcp(stream: TcpStream) -> io::Result<Socket> {
        use rustix::net::sockopt;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, KEEPALIVE)?;
        sockopt::set_tcp_keepintvl(&stream, KEEPALIVE)?;
        sockopt::set_tcp_keepcnt(&stream, 3)?;
        sockopt::set_tcp_user_timeout(&stream, UNACKNOWLEDGED.as_millis() as u32)?;
        Ok(Socket::Tcp(stream))
    }

    /// Detaches the stream from its event loop, so that another loop can serve it.
    ///
    /// # Errors
    /// Fails if the operating system refuses, or if the connection is simulated.
    pub fn detach(self) -> io::Result<DetachedSocket> {
        Ok(DetachedSocket(match self {
            Socket::Unix(stream) => DetachedKind::Unix(stream.into_std()?),
            Socket::Tcp(stream) => DetachedKind::Tcp(stream.into_std()?),
            #[cfg(feature = "sim")]
            Socket::Sim(_) => return Err(io::Error::other("a simulated connection stays at its loop")),
        }))
    }

    /// What the socket can carry beside bytes.
    #[must_use]
    pub fn carrier(&self) -> Carrier {
        Carrier(match self {
            Socket::Unix(_) => CarrierKind::Descriptors,
            Socket::Tcp(_) => CarrierKind::Bytes,
            #[cfg(feature = "sim")]
            Socket::Sim(stream) => CarrierKind::Sim(stream.carrier()),
        })
    }

    fn into_control(self) -> ControlSocket {
        match self {
            Socket::Unix(stream) => ControlSocket::new(Box::new(stream)),
            Socket::Tcp(stream) => ControlSocket::new(Box::new(stream)),
            #[cfg(feature = "sim")]
            Socket::Sim(stream) => ControlSocket::new(Box::new(stream)),
        }
    }

    /// Sends `bytes`, and access to memory with them.
    async fn send(&mut self, bytes: &[u8], access: Option<MemoryAccess>) -> Result<()> {
        match (self, access) {
            (Socket::Unix(stream), Some(MemoryAccess::Descriptors(d))) => {
                let fds = [d.memory.as_fd(), d.host_doorbell.as_fd(), d.osd_doorbell.as_fd()];
                let send = || send_with_fds(stream.as_fd(), bytes, &fds);
                let sent = stream.async_io(Interest::WRITABLE, send).await?;
                stream.write_all(&bytes[sent..]).await?;
            }
            (Socket::Unix(stream), None) => stream.write_all(bytes).await?,
            (Socket::Tcp(stream), None) => stream.write_all(bytes).await?,
            #[cfg(feature = "sim")]
            (Socket::Sim(stream), None) => stream.write_all(bytes).await?,
            #[cfg(feature = "sim")]
            (Socket::Sim(stream), Some(MemoryAccess::Sim(memory))) => {
                stream.hand_over(memory);
                stream.write_all(bytes).await?;
            }
            (_, Some(_)) => {
                let what = "the control socket cannot carry this form of access to memory";
                return Err(io::Error::other(what).into());
            }
        }
        Ok(())
    }

    async fn receive_exact(&mut self, out: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<()> {
        match self {
            Socket::Unix(stream) => {
                let mut at = 0;
                while at < out.len() {
                    let part = &mut out[at..];
                    let read = stream
                        .async_io(Interest::READABLE, || receive_with_fds(stream.as_fd(), part, fds))
                        .await?;
                    if read == 0 {
                        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                    }
                    at += read;
                }
            }
            Socket::Tcp(stream) => {
                stream.read_exact(out).await?;
            }
            #[cfg(feature = "sim")]
            Socket::Sim(stream) => {
                stream.read_exact(out).await?;
            }
        }
        Ok(())
    }

    /// The access to memory that came with a frame.
    fn received_access(&mut self, fds: Vec<OwnedFd>) -> Option<MemoryAccess> {
        #[cfg(feature = "sim")]
        if let Socket::Sim(stream) = self {
            return stream.take_handed().map(MemoryAccess::Sim);
        }
        let [memory, host_doorbell, osd_doorbell] = <[OwnedFd; DESCRIPTORS]>::try_from(fds).ok()?;
        Some(MemoryAccess::Descriptors(MemoryFds { memory, host_doorbell, osd_doorbell }))
    }

    async fn receive(&mut self, kind: EntryKind) -> Result<(ChannelEntry, Option<MemoryAccess>)> {
        let mut fds = Vec::new();
        let mut head = [0; HEADER_LEN];
        self.receive_exact(&mut head, &mut fds).await?;
        let header = EntryHeader::parse(&head)?;
        if header.kind != kind || header.data_len != 0 || header.control_len as usize > MAX_HANDSHAKE {
            return Err(ChannelError::protocol(format!("the first frame is not a valid {kind:?}")));
        }
        let mut bytes = vec![0; header.sealed_len()];
        bytes[..HEADER_LEN].copy_from_slice(&head);
        self.receive_exact(&mut bytes[HEADER_LEN..], &mut fds).await?;
        let access = self.received_access(fds);
        Ok((ChannelEntry::from_parts(header, bytes, Bytes::new())?, access))
    }
}

/// Opens an attachment from the osd's side.
///
/// # Errors
/// Fails if the store refuses, sends an invalid answer, or the socket fails. The caller must set a
/// deadline.
pub async fn join(
    mut socket: Socket,
    hello: &ChannelHello,
) -> Result<(ChannelWelcome, Option<MemoryAccess>, ControlSocket)> {
    let sealed = EntryHeader::new(EntryKind::Hello, 0, 0).seal(&encode(hello));
    socket.send(&sealed, None).await?;
    let (frame, received) = socket.receive(EntryKind::Welcome).await?;
    let answer: Result<ChannelWelcome, String> = decode(&frame.control)?;
    let welcome = answer.map_err(ChannelError::Refused)?;
    if welcome.nonce != hello.nonce || !(hello.version_min..=hello.version_max).contains(&welcome.version) {
        return Err(ChannelError::protocol(
            "the nonce or the version of the welcome does not match the hello",
        ));
    }
    let access = match &welcome.memory {
        MemoryAnswer::Descriptors => {
            let missing = "the welcome does not carry the file descriptors that it announces";
            Some(received.ok_or_else(|| ChannelError::protocol(missing))?)
        }
        MemoryAnswer::Offer(offer) => Some(MemoryAccess::Offer(offer.clone())),
        MemoryAnswer::None(_) => None,
    };
    Ok((welcome, access, socket.into_control()))
}

/// Opens an attachment from the store's side. `decide` receives the osd's hello, and what the socket
/// can carry. It returns the welcome, the access to memory to send with it, and the caller's own
/// state. If the welcome announces descriptors, `decide` must return the access.
///
/// # Errors
/// Fails if the osd sends no valid hello, if `decide` refuses (the osd then receives the reason),
/// or if the socket fails. The caller must set a deadline.
pub async fn accept<S>(
    mut socket: Socket,
    decide: impl FnOnce(&ChannelHello, &Carrier) -> Result<(ChannelWelcome, Option<MemoryAccess>, S)>,
) -> Result<(ChannelHello, S, ControlSocket)> {
    let (frame, _) = socket.receive(EntryKind::Hello).await?;
    // The rest of a hello of another version may differ, so check the versions first.
    let decision = match decode::<HelloVersions>(&frame.control)?.check() {
        Ok(()) => {
            let hello: ChannelHello = decode(&frame.control)?;
            let decided = hello.seat.check().and_then(|()| decide(&hello, &socket.carrier()));
            decided.map(|decided| (hello, decided))
        }
        Err(e) => Err(e),
    };
    let answer = decision.as_ref().map(|(_, (welcome, ..))| welcome).map_err(reason);
    let sealed = EntryHeader::new(EntryKind::Welcome, 0, 0).seal(&encode(&answer));
    let (access, decision) = match decision {
        Ok((hello, (_, access, attachment))) => (access, Ok((hello, attachment))),
        Err(e) => (None, Err(e)),
    };
    socket.send(&sealed, access).await?;
    let (hello, attachment) = decision?;
    Ok((hello, attachment, socket.into_control()))
}

/// The text of a refusal. The osd adds that the attachment was refused.
fn reason(refusal: &ChannelError) -> String {
    match refusal {
        ChannelError::Refused(why) => why.clone(),
        other => other.to_string(),
    }
}

fn encode(value: &impl Serialize) -> Bytes {
    // Serializing plain data into memory cannot fail.
    Bytes::from(postcard::to_stdvec(value).expect("plain data can be serialized"))
}

pub(crate) fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes)
        .map_err(|e| ChannelError::protocol(format!("handshake cannot be decoded: {e}")))
}

fn send_with_fds(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

fn receive_with_fds(socket: BorrowedFd<'_>, out: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(out)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            // Close surplus descriptors at once.
            fds.extend(received.take(DESCRIPTORS.saturating_sub(fds.len())));
        }
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decoding_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<ChannelHello>(&bytes);
            let _ = decode::<Result<ChannelWelcome, String>>(&bytes);
        }
    }

    #[tokio::test]
    async fn a_tcp_socket_detects_a_vanished_peer_within_20_seconds() {
        use rustix::net::sockopt;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let Socket::Tcp(stream) = Socket::tcp(stream).unwrap() else {
            panic!("the socket is not a TCP socket")
        };
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        let asked = sockopt::tcp_keepidle(&stream).unwrap()
            + sockopt::tcp_keepintvl(&stream).unwrap() * sockopt::tcp_keepcnt(&stream).unwrap();
        let owed = Duration::from_millis(sockopt::tcp_user_timeout(&stream).unwrap().into());
        assert_eq!((asked, owed), (Duration::from_secs(20), Duration::from_secs(20)));
    }

    #[tokio::test]
    async fn the_welcome_carries_file_descriptors() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let layout = MemoryLayout { ring_len: 64 << 10, data_len: 1 << 20 };
        let memory = Some(MemoryRequest { layout, reach: Reach::Descriptors });
        let seat = SeatClaim { osd: 1, seat: 0, seats: 1 };
        let (version_min, version_max) = (VERSION, VERSION);
        let hello = ChannelHello { version_min, version_max, nonce: 3, memory, outstanding: 1, seat };
        let store = accept(Socket::Unix(theirs), |hello, carrier| {
            assert!(carrier.carries_memory() && hello.memory.as_ref().is_some_and(|m| m.layout == layout));
            let fd = || crate::Doorbell::create().unwrap();
            let descriptors = MemoryFds { memory: fd(), host_doorbell: fd(), osd_doorbell: fd() };
            let (nonce, memory, targets) =
                (hello.nonce, MemoryAnswer::Descriptors, vec![TargetInfo { uuid: Uuid::from_u128(7) }]);
            Ok((
                ChannelWelcome { version: VERSION, nonce, attachment: 1, memory, targets },
                Some(MemoryAccess::Descriptors(descriptors)),
                (),
            ))
        });
        let (joined, accepted) = tokio::join!(biased; join(Socket::Unix(ours), &hello), store);
        accepted.unwrap();
        let (welcome, access, _control) = joined.unwrap();
        assert_eq!(welcome.targets, [TargetInfo { uuid: Uuid::from_u128(7) }]);
        assert!(matches!(access, Some(MemoryAccess::Descriptors(_))));
    }

    /// Sends a hello with this control data. Returns why the store refuses it, as the osd is told.
    async fn refusal(hello: &[u8]) -> String {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let store = accept::<()>(Socket::Unix(theirs), |_, _| panic!("the hello was accepted"));
        let osd = async {
            let mut socket = Socket::Unix(ours);
            socket.send(&EntryHeader::new(EntryKind::Hello, 0, 0).seal(hello), None).await.unwrap();
            let (frame, _) = socket.receive(EntryKind::Welcome).await.unwrap();
            decode::<Result<ChannelWelcome, String>>(&frame.control).unwrap().unwrap_err()
        };
        let (accepted, told) = tokio::join!(store, osd);
        let why = accepted.err().unwrap().to_string();
        assert!(why.contains(&told), "the osd is told {told:?}, the store reports {why:?}");
        told
    }

    #[tokio::test]
    async fn an_osd_of_another_version_is_told_the_versions() {
        // Up to version 10, a hello had no seat.
        let (nonce, memory, outstanding) = (3u64, None::<MemoryRequest>, 1u32);
        let told = refusal(&encode(&(10u16, 10u16, nonce, memory, outstanding))).await;
        let expected = format!("the store uses protocol version {VERSION}, the osd versions 10 to 10");
        assert!(told.contains(&expected), "{told}");
    }

    #[tokio::test]
    async fn a_seat_that_does_not_exist_is_refused() {
        let (version_min, version_max) = (VERSION, VERSION);
        let seat = SeatClaim { osd: 1, seat: 4, seats: 4 };
        let hello = ChannelHello { version_min, version_max, nonce: 3, memory: None, outstanding: 1, seat };
        let told = refusal(&encode(&hello)).await;
        assert!(told.starts_with("seat 4 of 4 does not exist"), "{told}");
    }
}
