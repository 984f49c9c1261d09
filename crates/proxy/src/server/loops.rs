//! The event loops of a server, and which of them serves a peer.
//!
//! The first loop accepts connections. It passes each connection to the loop that serves the fewest.
//! A connection stays at its loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use channel::{DetachedSocket, Socket};
use metrics::{Gauge, gauge};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::hellos::HelloPlace;

/// A connected peer on its way to the loop that serves it.
pub(super) struct Peer {
    pub(super) socket: DetachedSocket,
    pub(super) place: HelloPlace,
    pub(super) on_loop: OnLoop,
}

/// The number of peers that a loop serves.
struct Load {
    peers: AtomicUsize,
    shown: Gauge,
}

/// Counts a peer of a loop. Dropping it ends the count.
pub(super) struct OnLoop(Arc<Load>);

impl OnLoop {
    fn new(load: &Arc<Load>) -> OnLoop {
        load.peers.fetch_add(1, Ordering::Relaxed);
        load.shown.increment(1.0);
        OnLoop(Arc::clone(load))
    }
}

impl Drop for OnLoop {
    fn drop(&mut self) {
        self.0.peers.fetch_sub(1, Ordering::Relaxed);
        self.0.shown.decrement(1.0);
    }
}

/// The event loops of a server, as the first loop knows them. Only the first loop adds peers.
pub(super) struct Loops {
    first: Arc<Load>,
    further: Vec<(Arc<Load>, UnboundedSender<Peer>)>,
}

/// What becomes of a peer.
pub(super) enum Placed {
    /// The first loop serves it.
    Here(Socket, HelloPlace, OnLoop),
    /// Another loop has received it.
    Sent,
}

impl Loops {
    /// Creates `count` loops, at least 1. Returns the receivers of the loops after the first.
    pub(super) fn new(count: usize) -> (Loops, Vec<UnboundedReceiver<Peer>>) {
        let load = |number: usize| {
            let shown = gauge!("outboard_store_loop_connections", "loop" => number.to_string());
            Arc::new(Load { peers: AtomicUsize::new(0), shown })
        };
        let (further, receivers) = (1..count)
            .map(|number| {
                let (send, receive) = unbounded_channel();
                ((load(number), send), receive)
            })
            .unzip();
        (Loops { first: load(0), further }, receivers)
    }

    /// Places a peer at the loop with the fewest peers.
    ///
    /// # Errors
    /// Fails if the socket cannot be passed to another thread.
    pub(super) fn place(&self, socket: Socket, place: HelloPlace) -> std::io::Result<Placed> {
        let peers = |load: &Load| load.peers.load(Ordering::Relaxed);
        let least = self.further.iter().min_by_key(|(load, _)| peers(load));
        match least {
            Some((load, send)) if peers(load) < peers(&self.first) => {
                let peer = Peer { socket: socket.detach()?, place, on_loop: OnLoop::new(load) };
                // Sending fails only if the loop's thread has ended, and then the server stops.
                let _ = send.send(peer);
                Ok(Placed::Sent)
            }
            _ => Ok(Placed::Here(socket, place, OnLoop::new(&self.first))),
        }
    }
}
