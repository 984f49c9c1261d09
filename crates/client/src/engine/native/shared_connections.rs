//! [`SharedConnections`]: connections to a node that several sessions share.
//!
//! A program with many sessions, for example a gateway with one session per disk, needs one connection
//! per shard instead of one per session and shard. Each session has a *strand* on the connection. A task
//! of the connection passes the answers on to their strands.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use base::collections::HashMap;
use base::thread::ThreadClass;
use messenger::{
    ConnectOptions, Connection, ConnectionEvent, Incoming, Message, MessengerError, NetworkStack,
    StackOptions, UseAs,
};
use tokio::sync::{Notify, mpsc};
use wire::limits::MAX_STRANDS;
use wire::{RequestBody, RequestHead};

use super::strand::{Strand, StrandEvent, StrandIncoming, decode};
use crate::{Options, Result};

/// Connections to nodes that several sessions share: one connection per shard for all of them, while
/// they are at most [`MAX_STRANDS`] sessions.
///
/// All sessions prove the same key, that of the network stack. A session may still act for another
/// user of the tenant, if this user has issued a capability for the key. Sessions on one connection
/// share the connection's limits: a session with many requests in flight delays the others. If a
/// session ends or is refused, the others continue.
///
/// A connection runs on the tokio runtime of the session that opened it. If this runtime ends, the
/// other sessions open a new connection. A connection closes when its last session has ended.
/// Clones share the connections.
#[derive(Clone)]
pub struct SharedConnections(Arc<Table>);

struct Table {
    stack: Arc<dyn NetworkStack>,
    /// The newest connection to each endpoint.
    newest: Mutex<HashMap<String, Arc<Newest>>>,
}

/// The newest connection to an endpoint. The lock is held while a connection is being opened.
type Newest = tokio::sync::Mutex<Weak<SharedConnection>>;

impl std::fmt::Debug for SharedConnections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedConnections")
    }
}

impl SharedConnections {
    /// Prepares connections over the network stack that the options [select](Options::stack).
    ///
    /// # Errors
    /// [`Error::Network`](crate::Error::Network) if there is no such stack.
    pub fn open(options: &Options) -> Result<SharedConnections> {
        Ok(SharedConnections::over(stack(options)?))
    }

    /// Prepares connections over the given network stack.
    #[must_use]
    pub fn over(stack: Arc<dyn NetworkStack>) -> SharedConnections {
        SharedConnections(Arc::new(Table { stack, newest: Mutex::default() }))
    }

    /// Returns a new strand of the connection to an endpoint, which is opened if there is none.
    pub(super) async fn strand(&self, endpoint: &str, timeout: Duration) -> Result<(Strand, StrandIncoming)> {
        let newest = self.newest(endpoint);
        let mut newest = newest.lock().await;
        if let Some(strand) = newest.upgrade().and_then(|shared| shared.join()) {
            return Ok(strand);
        }
        let (connection, incoming) = self.0.stack.connect(endpoint, ConnectOptions { timeout }).await?;
        let shared = SharedConnection::start(connection, incoming);
        *newest = Arc::downgrade(&shared);
        Ok(shared.join().expect("a new connection has a free strand"))
    }

    fn newest(&self, endpoint: &str) -> Arc<Newest> {
        let mut table = self.0.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(newest) = table.get(endpoint) {
            return Arc::clone(newest);
        }
        // An osd has other ports after a restart, perhaps. Forget endpoints that have no connection.
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
    /// Receivers of the answers. Each holds at most the answers to the requests in flight of its session.
    open: HashMap<u32, mpsc::UnboundedSender<StrandEvent>>,
    /// Number of the next strand. Numbers are not used again, so a late answer finds no other strand.
    next: u32,
    /// Strands that have ended, but of whose end the node does not know yet.
    leaving: Vec<u32>,
    /// Whether the connection accepts no more strands.
    is_ended: bool,
}

impl SharedConnection {
    /// Starts the task of a new connection on this runtime.
    fn start(connection: Arc<dyn Connection>, incoming: Box<dyn Incoming>) -> Arc<SharedConnection> {
        let (strands, left) = (Mutex::default(), Notify::new());
        let shared = Arc::new(SharedConnection { connection, strands, left });
        base::task::spawn(ThreadClass::Client, Arc::clone(&shared).run(incoming));
        shared
    }

    pub(super) fn connection(&self) -> &Arc<dyn Connection> {
        &self.connection
    }

    /// Opens another strand; `None` if the connection has ended, or has too many strands.
    fn join(self: Arc<Self>) -> Option<(Strand, StrandIncoming)> {
        let (sender, events) = mpsc::unbounded_channel();
        let number = {
            let mut strands = self.lock();
            let next = strands.next.checked_add(1);
            if strands.is_ended || strands.open.len() + strands.leaving.len() >= MAX_STRANDS {
                return None;
            }
            let number = std::mem::replace(&mut strands.next, next?);
            strands.open.insert(number, sender);
            number
        };
        Some(Strand::of(self, number, events))
    }

    /// Ends a strand. `tell` says whether the node must be told.
    pub(super) fn leave(&self, number: u32, tell: bool) {
        let mut strands = self.lock();
        strands.open.remove(&number);
        if tell {
            strands.leaving.push(number);
        }
        drop(strands);
        self.left.notify_one();
    }

    async fn run(self: Arc<Self>, mut incoming: Box<dyn Incoming>) {
        let lost = tokio::select! {
            biased;
            e = self.receive(&mut *incoming) => Some(e),
            () = self.send_leaves() => None,
        };
        let open = {
            let mut strands = self.lock();
            strands.is_ended = true;
            std::mem::take(&mut strands.open)
        };
        match lost {
            Some(e) => open.into_values().for_each(|strand| {
                // The strand may have been dropped meanwhile; ignore the error of the channel.
                drop(strand.send(StrandEvent::Lost(e.clone())));
            }),
            None => self.connection.close().await,
        }
    }

    /// Passes answers on to their strands. Returns when the connection is lost.
    async fn receive(&self, incoming: &mut dyn Incoming) -> MessengerError {
        loop {
            match incoming.next().await {
                ConnectionEvent::Message(message) => {
                    let Some(reply) = decode(&message) else { continue };
                    let strand = self.lock().open.get(&reply.strand).cloned();
                    if let Some(strand) = strand {
                        // A strand that has ended meanwhile needs no more answers.
                        drop(strand.send(StrandEvent::Reply(reply, message.payload)));
                    }
                }
                ConnectionEvent::Interrupted | ConnectionEvent::Resumed => {}
                ConnectionEvent::Lost(e) => return e,
            }
        }
    }

    /// Tells the node which strands have ended. Returns when the last one has ended; then no strand can be
    /// opened any more.
    async fn send_leaves(&self) {
        loop {
            self.left.notified().await;
            loop {
                let strand = {
                    let mut strands = self.lock();
                    let strand = strands.leaving.pop();
                    if strand.is_none() && strands.open.is_empty() {
                        strands.is_ended = true;
                        return;
                    }
                    strand
                };
                let Some(strand) = strand else { break };
                let head = RequestHead { strand, seq: 0, acked_through: 0, retry: false, deadline_ms: 0 };
                let header = wire::encode_request(&head, &RequestBody::Leave);
                // If the connection is lost, the strand is, too.
                drop(self.connection.send(Message { header, payload: Default::default() }).await);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Strands> {
        self.strands.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
