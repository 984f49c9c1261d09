//! The gateway's side of the control protocol.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use base::thread::ThreadClass;
use bytes::Bytes;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use crate::error::{ClientError, HolderRefusal, SocketFileError};
use crate::framing::{Cutter, Framing};
use crate::link::{GatewayLink, Queued};
use crate::protocol::{
    CALL_FDS_MAX, CALLS_MAX, FRAMES, GatewayHello, HeldChange, HolderCall, HolderFrame, HolderWelcome,
    SharedFd, Versions, open,
};
use crate::socket::FdStream;
use crate::socket_file;

/// What the holder tells the gateway.
#[derive(Debug)]
#[non_exhaustive]
pub enum HolderEvent {
    /// A device that the holder had before this gateway connected. If its front end has a pending
    /// message, [`HolderEvent::Message`] follows.
    Device(InventoryDevice),
    /// All devices were listed.
    InventoryComplete,
    /// A front end has connected.
    Connected {
        /// Name of the device.
        device: String,
        /// Number of the connection. The holder never uses a number again.
        connection: u64,
    },
    /// The pending message of a front end. The next message follows after [`HolderClient::done`].
    Message(HeldMessage),
    /// The connection of a front end has ended. The holder has dropped its state.
    Disconnected {
        /// Name of the device.
        device: String,
        /// Number of the connection.
        connection: u64,
    },
}

/// A device in the inventory of the holder.
#[derive(Debug)]
pub struct InventoryDevice {
    /// Name of the device.
    pub device: String,
    /// Path of its socket.
    pub path: PathBuf,
    /// How the messages of its front ends are cut.
    pub framing: Framing,
    /// The connected front end.
    pub front_end: Option<HeldConnection>,
}

/// The connection of a front end, with what the holder keeps for it.
#[derive(Debug)]
pub struct HeldConnection {
    /// Number of the connection.
    pub connection: u64,
    /// The state that the gateway stored last; empty for a new connection.
    pub state: Bytes,
    /// The kept descriptors with their keys, in the order of the keys.
    pub kept: Vec<(u64, SharedFd)>,
}

/// A message of a front end.
#[derive(Debug)]
pub struct HeldMessage {
    /// Name of the device.
    pub device: String,
    /// Number of the connection.
    pub connection: u64,
    /// Number of the message. Messages of a connection are numbered from 1.
    pub number: u64,
    /// Header and payload.
    pub bytes: Bytes,
    /// The descriptors that arrived with the message.
    pub fds: Vec<SharedFd>,
}

/// The answer to a message. The holder applies all of it, or nothing.
#[derive(Debug, Clone, Default)]
pub struct Done {
    /// Name of the device.
    pub device: String,
    /// Number of the connection.
    pub connection: u64,
    /// Number of the message.
    pub number: u64,
    /// The new state of the device; `None` leaves the state as it is.
    pub state: Option<Bytes>,
    /// Descriptors to keep. A descriptor replaces the one that the holder keeps under the same key.
    pub keep: Vec<(u64, SharedFd)>,
    /// Keys of descriptors to drop, before others are kept. Unknown keys are ignored.
    pub drop: Vec<u64>,
    /// The reply to the front end.
    pub reply: Option<FrontEndReply>,
    /// Whether to disconnect the front end after the reply.
    pub close: bool,
}

/// A message to a front end.
#[derive(Debug, Clone, Default)]
pub struct FrontEndReply {
    /// Header and payload.
    pub bytes: Bytes,
    /// Descriptors.
    pub fds: Vec<SharedFd>,
}

/// A change of state without a message. The holder applies all of it, or nothing.
#[derive(Debug, Clone, Default)]
pub struct Deposit {
    /// Name of the device.
    pub device: String,
    /// Number of the connection.
    pub connection: u64,
    /// The new state of the device; `None` leaves the state as it is.
    pub state: Option<Bytes>,
    /// Descriptors to keep. A descriptor replaces the one that the holder keeps under the same key.
    pub keep: Vec<(u64, SharedFd)>,
    /// Keys of descriptors to drop, before others are kept. Unknown keys are ignored.
    pub drop: Vec<u64>,
}

/// The answer of the holder to a call. The call is made even if the answer is dropped.
#[derive(Debug)]
#[must_use = "the holder may refuse the call"]
pub struct HolderAnswer(Waiting);

#[derive(Debug)]
enum Waiting {
    /// The call was not sent.
    Failed(Option<ClientError>),
    /// The task of the connection sends the answer.
    Sent(oneshot::Receiver<Result<(), ClientError>>),
}

impl Future for HolderAnswer {
    type Output = Result<(), ClientError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Waiting::Failed(error) => {
                Poll::Ready(Err(error.take().expect("the answer was not returned before")))
            }
            Waiting::Sent(receiver) => Pin::new(receiver).poll(context).map(|received| {
                received.unwrap_or_else(|_| Err(ClientError::Lost("its task has ended".to_owned())))
            }),
        }
    }
}

/// The connection of a gateway to the holder. Clones share the connection.
///
/// Each method sends its call at once, in the order in which the methods are called. The returned
/// future only waits for the answer. Any thread may call the methods.
#[derive(Debug, Clone)]
pub struct HolderClient {
    queue: mpsc::UnboundedSender<Queued>,
    /// Number of calls without an answer.
    unanswered: Arc<AtomicUsize>,
}

/// The events of a connection. The connection ends when the events are dropped.
///
/// The number of events that wait here is limited by the protocol: per device, one of each kind.
#[derive(Debug)]
pub struct HolderEvents {
    events: mpsc::UnboundedReceiver<HolderEvent>,
    queue: mpsc::UnboundedSender<Queued>,
    /// The reason why the connection ended.
    end: oneshot::Receiver<ClientError>,
    ended: Option<ClientError>,
}

impl HolderClient {
    /// Connects to the holder whose control socket is at `path`. The new connection replaces the
    /// connection of another gateway. The first events are the devices that the holder has.
    ///
    /// Must be called in a tokio runtime, which then runs the task of the connection.
    ///
    /// # Errors
    /// If no holder of this user answers, or if it has no version of the protocol in common with this
    /// build.
    pub async fn connect(path: &Path) -> Result<(HolderClient, HolderEvents), ClientError> {
        let not_running = |reason: String| ClientError::NotRunning { path: path.to_owned(), reason };
        let socket = match socket_file::connect(path) {
            Ok(socket) => socket,
            Err(SocketFileError::Failed { reason, .. }) => return Err(not_running(reason)),
            Err(e) => return Err(not_running(e.to_string())),
        };
        let stream = FdStream::new(UnixStream::from_std(socket).map_err(|e| not_running(e.to_string()))?);
        let uid = stream.peer_uid().map_err(|e| not_running(e.to_string()))?;
        if uid != rustix::process::geteuid().as_raw() {
            return Err(ClientError::OtherUser { path: path.to_owned(), uid });
        }
        let mut hello = HolderFrame::raw(&GatewayHello(Versions::OWN).encode(), Vec::new()).into();
        stream.send(&mut hello).await.map_err(|e| not_running(e.to_string()))?;
        let welcome =
            stream.receive(&mut Cutter::new(FRAMES)).await.map_err(|e| not_running(e.to_string()))?;
        let welcome = open(welcome).and_then(|(body, _)| HolderWelcome::decode(&body));
        let welcome = welcome.map_err(|e| ClientError::Protocol(e.to_string()))?;
        if welcome
            .chosen
            .is_none_or(|chosen| Versions::OWN.common(Versions { min: chosen, max: chosen }).is_none())
        {
            return Err(ClientError::OtherVersion { holder: welcome.supported, gateway: Versions::OWN });
        }
        let (queue, queued) = mpsc::unbounded_channel();
        let (event_sender, events) = mpsc::unbounded_channel();
        let (end_sender, end) = oneshot::channel();
        let unanswered = Arc::new(AtomicUsize::new(0));
        let link = GatewayLink::new(stream, queued, event_sender, unanswered.clone());
        base::task::spawn(ThreadClass::Client, link.run(end_sender));
        let events = HolderEvents { events, queue: queue.clone(), end, ended: None };
        Ok((HolderClient { queue, unanswered }, events))
    }

    /// Adds a device. The holder listens for its front ends at `path`, an absolute path.
    pub fn add(&self, device: &str, path: &Path, framing: Framing) -> HolderAnswer {
        let Some(text) = path.to_str() else {
            let bad = SocketFileError::BadPath(path.to_string_lossy().into_owned());
            return HolderAnswer::refused(bad.into());
        };
        self.call(HolderCall::Add { device: device.to_owned(), path: text.to_owned(), framing }, Vec::new())
    }

    /// Removes a device with its socket and state. Its front end is disconnected. After the answer,
    /// no further event of the device is received, but earlier events may still wait in
    /// [`HolderEvents`].
    pub fn remove(&self, device: &str) -> HolderAnswer {
        self.call(HolderCall::Remove { device: device.to_owned() }, Vec::new())
    }

    /// Answers the pending message of a front end. Of several answers, also of several gateways, the
    /// holder applies one. It refuses the answer if the front end has disconnected.
    pub fn done(&self, done: Done) -> HolderAnswer {
        let (keys, mut fds): (Vec<_>, Vec<_>) = done.keep.into_iter().unzip();
        let (device, connection) = (done.device, done.connection);
        let change = HeldChange { device, connection, state: done.state, keep: keys, drop: done.drop };
        let reply = done.reply.map(|reply| {
            fds.extend(reply.fds);
            reply.bytes
        });
        self.call(HolderCall::Done { number: done.number, change, reply, close: done.close }, fds)
    }

    /// Changes the state of a device without a message of the front end.
    pub fn deposit(&self, deposit: Deposit) -> HolderAnswer {
        let (keep, fds) = deposit.keep.into_iter().unzip();
        let (device, connection) = (deposit.device, deposit.connection);
        self.call(
            HolderCall::Deposit(HeldChange {
                device,
                connection,
                state: deposit.state,
                keep,
                drop: deposit.drop,
            }),
            fds,
        )
    }

    /// Sends a message to the front end that is not a reply. The holder sends it at most once. It
    /// refuses the message while the front end does not read.
    pub fn send(&self, device: &str, connection: u64, message: FrontEndReply) -> HolderAnswer {
        let call = HolderCall::Send { device: device.to_owned(), connection, bytes: message.bytes };
        self.call(call, message.fds)
    }

    /// Ends the holder, which disconnects all front ends.
    pub fn stop(&self) -> HolderAnswer {
        self.call(HolderCall::Stop, Vec::new())
    }

    fn call(&self, body: HolderCall, fds: Vec<SharedFd>) -> HolderAnswer {
        if fds.len() > CALL_FDS_MAX {
            return HolderAnswer::refused(HolderRefusal::TooManyCallFds(fds.len()));
        }
        if let Err(refusal) = body.check() {
            return HolderAnswer::refused(refusal);
        }
        if self.unanswered.fetch_add(1, Ordering::Relaxed) >= CALLS_MAX {
            self.unanswered.fetch_sub(1, Ordering::Relaxed);
            return HolderAnswer(Waiting::Failed(Some(ClientError::TooManyCalls)));
        }
        let (answer, receiver) = oneshot::channel();
        // If the task has ended, it has dropped the answer's sender, which the future reports.
        let _ = self.queue.send(Queued::Call { body, fds, answer });
        HolderAnswer(Waiting::Sent(receiver))
    }
}

impl HolderAnswer {
    fn refused(refusal: HolderRefusal) -> HolderAnswer {
        HolderAnswer(Waiting::Failed(Some(refusal.into())))
    }
}

impl HolderEvents {
    /// Waits for the next event. This method is cancel safe.
    ///
    /// # Errors
    /// If the connection has ended. [`ClientError::Replaced`] means that another gateway has connected;
    /// after all other errors, the gateway should connect again.
    pub async fn next(&mut self) -> Result<HolderEvent, ClientError> {
        match self.events.recv().await {
            Some(event) => {
                if let HolderEvent::Disconnected { device, connection } = &event {
                    let acknowledge = Queued::Acknowledge { device: device.clone(), connection: *connection };
                    // If the task has ended, the next call of this method returns the reason.
                    let _ = self.queue.send(acknowledge);
                }
                Ok(event)
            }
            None => {
                if self.ended.is_none() {
                    let lost = |_| ClientError::Lost("its task has ended".to_owned());
                    self.ended = Some((&mut self.end).await.unwrap_or_else(lost));
                }
                Err(self.ended.clone().expect("the reason is known"))
            }
        }
    }
}
