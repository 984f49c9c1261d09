//! The state of one connection, which both ends keep while the transports below it change.
//!
//! The handle, the user's tasks and the connection's own task share [`Shared`]. One mutex, held
//! only briefly, protects its mutable state. The connection's task ([`task`]) runs on the thread
//! that created the connection. While a transport exists, the task runs a reader and a writer
//! together. One wake-up therefore reads a batch of frames and writes all queued frames in one
//! system call.

mod batch;
mod connection_end;
mod exposed;
mod handles;
mod heartbeats;
mod inbound;
mod offers;
mod on_wake;
mod one_sided;
mod outbound;
mod packets;
mod peer_watch;
mod pulls;
mod range;
mod read_buffer;
mod reader;
mod send_limits;
mod slot;
mod task;
mod turns;
mod writer;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use identity::ProofKey;
use tokio::sync::Notify;

pub(crate) use slot::ConnectionSlot;
pub(crate) use task::{BACKOFF, Resumption, TransportSupply, run};

use crate::config::ConnectionConfig;
use crate::metrics::ConnectionMetrics;
use crate::transport::packets::Link;
use crate::{ConnectionEvent, Limits, MessengerError, PeerInfo};
use connection_end::{CloseReason, ConnectionEnd};
use inbound::Inbound;
use offers::Offers;
use outbound::Outbound;
use peer_watch::PeerWatch;
use pulls::Pulls;
use send_limits::SendLimits;
use turns::TransferTurns;

/// The values that both sides agreed on in the handshake.
pub(crate) struct Negotiated {
    pub(crate) peer: PeerInfo,
    /// The key that only the two sides have.
    pub(crate) proof_key: ProofKey,
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
    proof_key: ProofKey,
    limits: Limits,
    config: ConnectionConfig,
    side: ConnectionSide,
    metrics: ConnectionMetrics,
    state: Mutex<State>,
    /// Wakes the writer when there is something to write.
    wake_writer: Notify,
    send_limits: SendLimits,
    turns: TransferTurns,
    /// Wakes the reader when a pull was cancelled, because the reader may be writing to the pull's
    /// buffer.
    pull_dropped: Notify,
    end: ConnectionEnd,
    watch: PeerWatch,
    /// Starts the acknowledgement timer when a received frame needs an acknowledgement.
    ack_wanted: Notify,
}

impl Shared {
    /// Creates a connection. `link` is its first transport, if it is not a byte stream.
    pub(crate) fn new(
        settled: Negotiated,
        config: ConnectionConfig,
        side: ConnectionSide,
        link: Option<Arc<Link>>,
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
            link,
        };
        Arc::new(Shared {
            side,
            peer: settled.peer,
            proof_key: settled.proof_key,
            limits: settled.limits,
            metrics,
            state: Mutex::new(state),
            wake_writer: Notify::new(),
            send_limits: SendLimits::new(credit, &config),
            turns: TransferTurns::new(),
            pull_dropped: Notify::new(),
            end: ConnectionEnd::new(),
            watch: PeerWatch::new(),
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
    fn close_soon(&self, reason: CloseReason) {
        // The writer reads the reason once it sees the status.
        self.end.close(reason);
        let mut state = self.lock();
        if state.status == ConnectionState::Open {
            state.status = ConnectionState::Closing;
        }
        drop(state);
        self.wake_writer.notify_one();
    }

    /// Closes the connection soon, because its slot is given to another connection. The peer
    /// receives this reason, and may open a new connection.
    pub(crate) fn reclaim(&self) {
        self.close_soon(CloseReason::Reclaimed);
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
        self.send_limits.close();
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
