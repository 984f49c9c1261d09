//! The state of one connection, which both ends keep while the transports below it change.
//!
//! The handle, the user's tasks and the connection's own task share [`Shared`]. One mutex, held
//! only briefly, protects its mutable state. The connection's task ([`task`]) runs on the thread
//! that created the connection. While a transport exists, the task runs a reader and a writer
//! together. One wake-up therefore reads a batch of frames and writes all queued frames in one
//! system call.

mod batch;
mod exposed;
mod handles;
mod heartbeats;
mod inbound;
mod offers;
mod one_sided;
mod outbound;
mod packets;
mod pulls;
mod range;
mod read_buffer;
mod reader;
mod slot;
mod task;
mod turns;
mod writer;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::watch;
use tokio::sync::{Notify, Semaphore};

pub(crate) use slot::ConnectionSlot;
pub(crate) use task::{BACKOFF, Resumption, TransportSupply, run};

use crate::config::{BULK_SLOTS, ConnectionConfig, MAX_PULLS};
use crate::metrics::ConnectionMetrics;
use crate::transport::packets::Link;
use crate::transport::{Road, Wire};
use crate::{ConnectionEvent, Limits, MessengerError, PeerInfo};
use inbound::Inbound;
use offers::Offers;
use outbound::Outbound;
use pulls::Pulls;
use turns::TransferTurns;

/// The values that both sides agreed on in the handshake.
pub(crate) struct Negotiated {
    pub(crate) peer: PeerInfo,
    pub(crate) secret: [u8; 16],
    /// The peer's limits, which apply to what this side sends.
    pub(crate) limits: Limits,
    /// Message credit that the peer granted, in bytes.
    pub(crate) granted: u64,
}

/// Whether the connection can still be used.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ConnectionState {
    Open,
    /// This side is closing the connection: it sends the queued frames, then ends.
    Closing,
    Lost(MessengerError),
}

/// The part of the connection's state that the mutex protects.
struct State {
    status: ConnectionState,
    outbound: Outbound,
    inbound: Inbound,
    pulls: Pulls,
    offers: Offers,
    /// The current transport, if it is a link (libfabric) and not a byte stream.
    link: Option<Arc<Link>>,
    /// Whether the current pause between heartbeats is longer than [`ConnectionConfig::heartbeat`].
    is_resting: bool,
    /// When the peer last showed that it is alive. Updated once per heartbeat.
    heard_at: tokio::time::Instant,
}

/// The side of a connection. Only a client exposes its memory to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionSide {
    Client,
    Server,
}

/// A connection. Its handles, its users' tasks and its own task share this value.
pub(crate) struct Shared {
    peer: PeerInfo,
    secret: [u8; 16],
    limits: Limits,
    config: ConnectionConfig,
    side: ConnectionSide,
    metrics: ConnectionMetrics,
    state: Mutex<State>,
    /// Wakes the writer when there is something to write.
    wake_writer: Notify,
    /// Credit for messages that the peer granted, in bytes.
    message_credit: Semaphore,
    /// Number of bytes of pushed data that may still be sent before the peer acknowledges earlier
    /// pushes.
    push_room: Semaphore,
    /// Free slots in the queue of bulk chunks. Tokio's semaphore is fair, so the active transfers
    /// alternate.
    bulk_slots: Semaphore,
    turns: TransferTurns,
    pull_slots: Semaphore,
    /// Wakes the reader when a pull was cancelled, because the reader may be writing to the pull's
    /// buffer.
    pull_dropped: Notify,
    /// True once this side has asked to close the connection.
    close_wanted: watch::Sender<bool>,
    /// Whether the connection is being closed because its slot is given to another connection.
    reclaimed: AtomicBool,
    /// True once the connection's task has ended.
    ended: watch::Sender<bool>,
    /// Whether bytes were received since the last heartbeat was due.
    heard: AtomicBool,
    /// Whether bytes were sent since the last heartbeat was due.
    spoke: AtomicBool,
    /// The longest silence that the peer has announced for itself, in milliseconds.
    peer_quiet_ms: AtomicU32,
    /// Ends a long pause between heartbeats when work begins.
    stirred: Notify,
    /// Starts the acknowledgement timer when a received frame needs an acknowledgement.
    ack_wanted: Notify,
}

impl Shared {
    /// Creates a connection whose first transport is `wire`.
    pub(crate) fn new(
        settled: Negotiated,
        config: ConnectionConfig,
        side: ConnectionSide,
        wire: &Wire,
    ) -> Arc<Shared> {
        let metrics = ConnectionMetrics::new();
        metrics.connections.increment(1);
        let mut outbound = Outbound::new(settled.granted, config.window_bytes);
        let credit = outbound.issue();
        let state = State {
            status: ConnectionState::Open,
            outbound,
            inbound: Inbound::new(config.window_bytes),
            pulls: Pulls::default(),
            offers: Offers::default(),
            link: match &wire.road {
                Road::Packets(link) => Some(Arc::clone(link)),
                Road::Stream(..) => None,
            },
            is_resting: false,
            heard_at: tokio::time::Instant::now(),
        };
        Arc::new(Shared {
            side,
            peer: settled.peer,
            secret: settled.secret,
            limits: settled.limits,
            metrics,
            state: Mutex::new(state),
            wake_writer: Notify::new(),
            message_credit: Semaphore::new(credit),
            push_room: Semaphore::new(config.push_window_bytes as usize),
            bulk_slots: Semaphore::new(BULK_SLOTS),
            turns: TransferTurns::new(),
            pull_slots: Semaphore::new(MAX_PULLS),
            pull_dropped: Notify::new(),
            close_wanted: watch::Sender::new(false),
            reclaimed: AtomicBool::new(false),
            ended: watch::Sender::new(false),
            heard: AtomicBool::new(false),
            spoke: AtomicBool::new(false),
            peer_quiet_ms: AtomicU32::new(0),
            stirred: Notify::new(),
            ack_wanted: Notify::new(),
            config,
        })
    }

    pub(crate) fn peer(&self) -> &PeerInfo {
        &self.peer
    }

    pub(crate) fn connection_id(&self) -> u128 {
        self.peer.connection
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics in the middle of a change, so a poisoned mutex is safe to use.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an error if the connection is closing or lost, so that nothing more can be sent.
    fn check_open(state: &State) -> Result<(), MessengerError> {
        match &state.status {
            ConnectionState::Open => Ok(()),
            ConnectionState::Closing => {
                Err(MessengerError::ConnectionLost("this side closed the connection".into()))
            }
            ConnectionState::Lost(why) => Err(why.clone()),
        }
    }

    /// The error for calls on a connection that has ended.
    fn loss(&self) -> MessengerError {
        Self::check_open(&self.lock())
            .err()
            .unwrap_or_else(|| MessengerError::ConnectionLost("the connection is ending".into()))
    }

    /// Asks the connection's task to send the queued frames and to end. May be called more than
    /// once.
    fn close_soon(&self) {
        let mut state = self.lock();
        if state.status == ConnectionState::Open {
            state.status = ConnectionState::Closing;
        }
        drop(state);
        self.close_wanted.send_replace(true);
        self.wake_writer.notify_one();
    }

    /// Closes the connection soon, because its slot is given to another connection. The peer
    /// receives this reason, and may open a new connection.
    pub(crate) fn reclaim(&self) {
        self.reclaimed.store(true, Ordering::Relaxed);
        self.close_soon();
    }

    fn is_reclaimed(&self) -> bool {
        self.reclaimed.load(Ordering::Relaxed)
    }

    /// The reason that this side sends to the peer when it closes the connection.
    fn close_reason(&self) -> &'static str {
        if self.is_reclaimed() { "its slot was needed for another client" } else { "its user closed it" }
    }

    /// Ends the connection: all waiting calls fail, and all held memory is released.
    fn lose(&self, why: MessengerError) {
        let mut state = self.lock();
        if matches!(state.status, ConnectionState::Lost(_)) {
            return;
        }
        state.status = ConnectionState::Lost(why.clone());
        state.link = None;
        // Drop these parts after releasing the mutex, because the destructors of the users' objects
        // may call back into the connection.
        let (outbound, pulls, offers) = (
            std::mem::replace(&mut state.outbound, Outbound::new(0, 0)),
            std::mem::take(&mut state.pulls),
            std::mem::take(&mut state.offers),
        );
        state.inbound.push_info(ConnectionEvent::Lost(why.clone()));
        let waker = state.inbound.take_waker();
        drop(state);
        for limit in [&self.message_credit, &self.push_room, &self.bulk_slots, &self.pull_slots] {
            limit.close();
        }
        self.turns.close();
        self.metrics.queue_depth.decrement(outbound.queued_messages() as f64);
        drop((outbound, offers));
        pulls.fail_all(&why);
        self.pull_dropped.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.metrics.connections.decrement(1);
    }
}
