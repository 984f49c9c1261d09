//! [`SharedConnections`]: connections to a node that several sessions share.
//!
//! A program with many sessions, for example a gateway with one session per disk, needs one
//! connection per shard instead of one per session and shard. Each session has a *strand* on the
//! connection. A task of the connection passes the answers on to their strands.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use base::collections::HashMap;
use base::thread::ThreadClass;
use messenger::{
    ConnectOptions, Connection, ConnectionEvent, Incoming, Message, MessengerError, NetworkStack,
    StackOptions, UseAs,
};
use tokio::sync::{Notify, mpsc, oneshot};
use wire::limits::{MAX_STRANDS, REQUEST_WINDOW};
use wire::{ReplyBody, RequestBody, RequestHead};

use super::strand::{Strand, StrandEvent, StrandIncoming, decode};
use crate::options::ControlWay;
use crate::{Error, Options, Result};

/// Maximum number of events that wait for the task of a strand: answers to all requests of the
/// session that can be in flight, and a few more for requests that have no number.
const EVENTS_MAX: usize = REQUEST_WINDOW as usize + 16;

/// Connections to nodes that several sessions share. Up to [`MAX_STRANDS`] sessions share one
/// connection per shard.
///
/// All sessions prove the same key, that of the network stack. The options of each session must name
/// the same identity. A session may act for another user of the tenant, if this user has issued a
/// capability for the key. Sessions on one connection share its transport: its bandwidth, and the
/// order of messages. A session with more requests in progress than the node accepts
/// (`osd.requests_per_connection`, 256 by default) delays the others. If a session ends or is
/// refused, the others continue.
///
/// A connection runs on the tokio runtime of the session that opened it. If this runtime ends, the
/// other sessions open a new connection. A connection closes when its last session has ended.
/// Clones share the connections.
#[derive(Clone)]
pub struct SharedConnections(Arc<SharedTable>);

struct SharedTable {
    stack: Arc<dyn NetworkStack>,
    /// The way to the control plane that the sessions share.
    control: OnceLock<ControlWay>,
    /// The newest connection to each endpoint.
    newest: Mutex<HashMap<String, Arc<Newest>>>,
}

/// The newest connection to an endpoint. The lock is held while a connection is being opened.
type Newest = tokio::sync::Mutex<Weak<SharedConnection>>;

/// A strand, and whether its connection was open before.
pub(super) struct JoinedStrand {
    pub(super) strand: Strand,
    pub(super) incoming: StrandIncoming,
    pub(super) was_open: bool,
}

impl std::fmt::Debug for SharedConnections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedConnections")
    }
}

impl SharedConnections {
    /// Prepares connections over the network stack that the options [select](Options::stack).
    ///
    /// # Errors
    /// [`Error::Network`] if there is no such stack.
    pub fn open(options: &Options) -> Result<SharedConnections> {
        Ok(SharedConnections::over(stack(options)?))
    }

    /// Prepares connections over the given network stack.
    #[must_use]
    pub fn over(stack: Arc<dyn NetworkStack>) -> SharedConnections {
        SharedConnections(Arc::new(SharedTable { stack, control: OnceLock::new(), newest: Mutex::default() }))
    }

    /// Returns the way to the control plane over gRPC, which all sessions share.
    pub(super) fn control(&self, options: &Options) -> ControlWay {
        self.0.control.get_or_init(|| ControlWay::over_grpc(options)).clone()
    }

    /// Returns a new strand of the connection to an endpoint, which is opened if there is none.
    pub(super) async fn strand(&self, endpoint: &str, timeout: Duration) -> Result<JoinedStrand> {
        // The time limit also covers the wait for another session that opens the connection.
        let joined = tokio::time::timeout(timeout, self.join(endpoint, timeout)).await;
        joined.unwrap_or_else(|_| Err(Error::TimedOut(timeout.into())))
    }

    async fn join(&self, endpoint: &str, timeout: Duration) -> Result<JoinedStrand> {
        let newest = self.newest(endpoint);
        let mut newest = newest.lock().await;
        if let Some((strand, incoming)) = newest.upgrade().and_then(|shared| shared.join()) {
            return Ok(JoinedStrand { strand, incoming, was_open: true });
        }
        let (connection, answers) = self.0.stack.connect(endpoint, ConnectOptions { timeout }).await?;
        let shared = SharedConnection::new(connection);
        let joined = Arc::clone(&shared).join();
        let (strand, incoming) = joined.expect("a connection without task has not ended");
        *newest = Arc::downgrade(&shared);
        shared.start(answers);
        Ok(JoinedStrand { strand, incoming, was_open: false })
    }

    fn newest(&self, endpoint: &str) -> Arc<Newest> {
        let mut table = self.0.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(newest) = table.get(endpoint) {
            return Arc::clone(newest);
        }
        // An osd may have other ports after a restart, so the table forgets endpoints without connection.
        table.retain(|_, newest| {
            Arc::strong_count(newest) > 1 || newest.try_lock().is_ok_and(|newest| newest.strong_count() > 0)
        });
        Arc::clone(table.entry(endpoint.to_owned()).or_default())
    }
}

/// Opens the network stack that the options select.
pub(super) fn stack(options: &Options) -> Result<Arc<dyn NetworkStack>> {
    let mut network = StackOptions { source: options.source, ..StackOptions::default() };
    network.connection.trust = options.trust.clone();
    Ok(messenger::open(&options.stack, &network, UseAs::Client)?)
}

/// A connection with several strands.
pub(super) struct SharedConnection {
    connection: Arc<dyn Connection>,
    strands: Mutex<Strands>,
    /// Notified when a strand has ended.
    left: Notify,
}

/// The strands of a connection.
#[derive(Default)]
struct Strands {
    /// Receivers of the answers.
    open: HashMap<u32, mpsc::Sender<StrandEvent>>,
    /// Number of the next strand. Numbers are not used again, so a late answer finds no other strand.
    next: u32,
    /// Strands that have ended, but of whose end the node was not told yet.
    leaving: Vec<u32>,
    /// Strands on which the node answers that it has ended the session.
    ending: HashMap<u32, oneshot::Sender<()>>,
    /// Whether the connection accepts no more strands.
    is_full: bool,
}

impl Strands {
    fn close(&mut self) -> HashMap<u32, mpsc::Sender<StrandEvent>> {
        self.is_full = true;
        self.ending.clear();
        std::mem::take(&mut self.open)
    }
}

/// Ends all strands of a connection when its task ends, or when the runtime drops the task.
struct StrandsEnding {
    shared: Arc<SharedConnection>,
    why: MessengerError,
}

impl Drop for StrandsEnding {
    fn drop(&mut self) {
        let open = self.shared.lock().close();
        for strand in open.into_values() {
            // A strand whose queue is full ends when its sender is dropped.
            drop(strand.try_send(StrandEvent::Lost(self.why.clone())));
        }
    }
}

impl SharedConnection {
    fn new(connection: Arc<dyn Connection>) -> Arc<SharedConnection> {
        Arc::new(SharedConnection { connection, strands: Mutex::default(), left: Notify::new() })
    }

    /// Starts the task of the connection on this runtime.
    fn start(self: Arc<Self>, mut incoming: Box<dyn Incoming>) {
        let why = MessengerError::ConnectionLost("the runtime of the shared connection has ended".into());
        let mut ending = StrandsEnding { shared: self, why };
        base::task::spawn(ThreadClass::Client, async move {
            let shared = Arc::clone(&ending.shared);
            let lost = tokio::select! {
                biased;
                e = shared.receive(&mut *incoming) => Some(e),
                () = shared.send_leaves() => None,
            };
            match lost {
                Some(e) => ending.why = e,
                None => shared.connection.close().await,
            }
            drop(ending);
        });
    }

    pub(super) fn connection(&self) -> &Arc<dyn Connection> {
        &self.connection
    }

    /// Opens another strand; `None` if the connection has ended, or has too many strands.
    fn join(self: Arc<Self>) -> Option<(Strand, StrandIncoming)> {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let number = {
            let mut strands = self.lock();
            let next = strands.next.checked_add(1)?;
            if strands.is_full || strands.open.len() + strands.leaving.len() >= MAX_STRANDS {
                return None;
            }
            let number = std::mem::replace(&mut strands.next, next);
            strands.open.insert(number, sender);
            number
        };
        Some(Strand::of(self, number, events))
    }

    /// Keeps further strands from joining.
    pub(super) fn admit_no_more(&self) {
        self.lock().is_full = true;
    }

    /// Ends a strand. `tell` says whether the node must be told.
    pub(super) fn leave(&self, number: u32, tell: bool) {
        let mut strands = self.lock();
        strands.open.remove(&number);
        strands.ending.remove(&number);
        if tell {
            strands.leaving.push(number);
        }
        drop(strands);
        self.left.notify_one();
    }

    /// Returns a receiver that learns when the node has ended the session of a strand, or when the
    /// connection is lost.
    pub(super) fn await_end(&self, number: u32) -> oneshot::Receiver<()> {
        let (sender, ended) = oneshot::channel();
        let mut strands = self.lock();
        if strands.open.contains_key(&number) {
            strands.ending.insert(number, sender);
        }
        ended
    }

    /// Passes answers on to their strands. Returns when the connection is lost.
    async fn receive(&self, incoming: &mut dyn Incoming) -> MessengerError {
        loop {
            match incoming.next().await {
                ConnectionEvent::Message(message) => {
                    let Some(reply) = decode(&message) else { continue };
                    let number = reply.strand;
                    let mut strands = self.lock();
                    if matches!(reply.result, Ok(ReplyBody::Closed) | Err(wire::Error::NoSession(_)))
                        && let Some(ending) = strands.ending.remove(&number)
                    {
                        // The caller may have been cancelled; ignore the error of the channel.
                        let _ = ending.send(());
                    }
                    let Some(strand) = strands.open.get(&number) else { continue };
                    let passed = strand.try_send(StrandEvent::Reply(reply, message.payload));
                    if matches!(passed, Err(mpsc::error::TrySendError::Full(_))) {
                        tracing::warn!(strand = number, "the node has sent too many answers on a strand");
                        strands.open.remove(&number);
                    }
                }
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
                ConnectionEvent::Lost(e) => return e,
            }
        }
    }

    /// Tells the node which strands have ended. Returns when the last one has ended; then no strand
    /// can be opened any more.
    async fn send_leaves(&self) {
        loop {
            self.left.notified().await;
            loop {
                let next = {
                    let mut strands = self.lock();
                    let next = strands.leaving.last().copied();
                    if next.is_none() && strands.open.is_empty() {
                        strands.is_full = true;
                        return;
                    }
                    next
                };
                let Some(strand) = next else { break };
                let head = RequestHead { strand, seq: 0, acked_through: 0, retry: false, deadline_ms: 0 };
                let header = wire::encode_request(&head, &RequestBody::Leave);
                // If the connection is lost, the strand is, too.
                drop(self.connection.send(Message { header, payload: Default::default() }).await);
                // Until now, the strand counts as one of the connection's.
                self.lock().leaving.retain(|leaving| *leaving != strand);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Strands> {
        self.strands.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
