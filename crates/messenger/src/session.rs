//! One session: what both ends agree on while transports come and go below it.
//!
//! [`Shared`] is what the handle, the user's tasks and the session's own task have in common, behind one short lock.
//! The session's task ([`task`]) runs on the thread that made the session; it joins a reader and a writer for as long as
//! a transport lasts, so that one wake-up reads a batch, and writes what it and the users have queued in one system call.

mod batch;
mod connection;
mod exposed;
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
mod task;
mod turns;
mod writer;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, Semaphore, watch};

pub(crate) use task::{BACKOFF, Resumption, TransportSupply, run};

use crate::config::{BULK_SLOTS, MAX_PULLS, SessionConfig};
use crate::metrics::ConnectionMetrics;
use crate::transport::ofi::Link;
use crate::transport::{Road, Wire};
use crate::{ConnectionEvent, Limits, MessengerError, PeerInfo};
use inbound::Inbound;
use offers::Offers;
use outbound::Outbound;
use pulls::Pulls;
use turns::TransferTurns;

/// What the handshake settled.
pub(crate) struct Negotiated {
    pub(crate) peer: PeerInfo,
    pub(crate) secret: [u8; 16],
    /// What the peer takes: the limits of what this side sends.
    pub(crate) limits: Limits,
    /// Credits that the peer granted.
    pub(crate) granted: u64,
}

/// Where the session stands.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ConnectionState {
    Open,
    /// This side wants to end it: what is queued is sent first.
    Closing,
    Lost(MessengerError),
}

/// What is behind the lock.
struct State {
    status: ConnectionState,
    outbound: Outbound,
    inbound: Inbound,
    pulls: Pulls,
    offers: Offers,
    /// The transport now in use, if it is one that moves memory by itself.
    link: Option<Arc<Link>>,
    /// The next heartbeat is due later than usual.
    is_resting: bool,
    /// When the peer was last known to be there; looked at once per heartbeat.
    heard_at: tokio::time::Instant,
}

/// Which side of a session this is. Only clients let their peers reach their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionSide {
    Client,
    Server,
}

/// A session, as its handle, its users' tasks and its own task see it.
pub(crate) struct Shared {
    peer: PeerInfo,
    secret: [u8; 16],
    limits: Limits,
    config: SessionConfig,
    side: ConnectionSide,
    metrics: ConnectionMetrics,
    state: Mutex<State>,
    /// There is something to write.
    wake_writer: Notify,
    /// Credits for messages, in bytes; as granted by the peer.
    message_credit: Semaphore,
    /// Room for pushed data that the peer has not acknowledged, in bytes.
    push_room: Semaphore,
    /// Room in the bulk lane, in chunks. Fair: transfers whose turn it is alternate.
    bulk_slots: Semaphore,
    turns: TransferTurns,
    pull_slots: Semaphore,
    /// A pull was given up: the reader may be writing to its buffer.
    pull_dropped: Notify,
    /// The user wants the session to end.
    close_wanted: watch::Sender<bool>,
    /// It ends because its place is needed for another session.
    reclaimed: AtomicBool,
    /// The session's task has ended.
    ended: watch::Sender<bool>,
    /// Bytes came in since the last heartbeat was due.
    heard: AtomicBool,
    /// Bytes went out since the last heartbeat was due.
    spoke: AtomicBool,
    /// For how long the peer may be silent, as it said, in milliseconds.
    peer_quiet_ms: AtomicU32,
    /// Something was begun while this side rested.
    stirred: Notify,
    /// Something was received that has not been acknowledged, and the timer for that does not run yet.
    ack_wanted: Notify,
}

impl Shared {
    /// A session that goes over `wire` first.
    pub(crate) fn new(
        settled: Negotiated,
        config: SessionConfig,
        side: ConnectionSide,
        wire: &Wire,
    ) -> Arc<Shared> {
        let metrics = ConnectionMetrics::new();
        metrics.sessions.increment(1);
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

    pub(crate) fn session_id(&self) -> u128 {
        self.peer.session
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock with the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why nothing more can be sent, if that is so.
    fn check_open(state: &State) -> Result<(), MessengerError> {
        match &state.status {
            ConnectionState::Open => Ok(()),
            ConnectionState::Closing => Err(MessengerError::SessionLost("closed by this side".into())),
            ConnectionState::Lost(why) => Err(why.clone()),
        }
    }

    /// The error of calls that find the session over.
    fn loss(&self) -> MessengerError {
        Self::check_open(&self.lock())
            .err()
            .unwrap_or_else(|| MessengerError::SessionLost("the session ends".into()))
    }

    /// Asks the session's task to send what is queued and end. May be called again.
    fn close_soon(&self) {
        let mut state = self.lock();
        if state.status == ConnectionState::Open {
            state.status = ConnectionState::Closing;
        }
        drop(state);
        self.close_wanted.send_replace(true);
        self.wake_writer.notify_one();
    }

    /// Ends the session soon, because its place is needed for another one. Its peer is told, and may begin a new session.
    pub(crate) fn reclaim(&self) {
        self.reclaimed.store(true, Ordering::Relaxed);
        self.close_soon();
    }

    fn is_reclaimed(&self) -> bool {
        self.reclaimed.load(Ordering::Relaxed)
    }

    /// Why this side closes the session.
    fn close_reason(&self) -> &'static str {
        if self.is_reclaimed() { "its place was needed for another client" } else { "closed" }
    }

    /// Ends the session: everything that waits fails, everything that is held is let go.
    fn lose(&self, why: MessengerError) {
        let mut state = self.lock();
        if matches!(state.status, ConnectionState::Lost(_)) {
            return;
        }
        state.status = ConnectionState::Lost(why.clone());
        state.link = None;
        // Dropped after the lock is: what drops here is the users', and may call back.
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
        self.metrics.sessions.decrement(1);
    }
}
