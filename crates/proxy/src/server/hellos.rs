//! The slots of connected peers that have not sent a hello.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::budget::{Budget, PeerAddress};
use base::clock::Instant;
use base::collections::HashMap;
use channel::MAX_SEATS;
use tokio::sync::Notify;

/// Maximum number of connected peers that have not sent a hello. All shards of an osd may connect at
/// the same time.
const HELLOS: usize = MAX_SEATS as usize + 32;

/// The slots of peers that have not sent a hello. Few slots suffice, because a shard sends the hello
/// as soon as it has connected. When a new peer needs a slot and none is free, a silent peer loses
/// its slot, preferably a peer of an address that holds more than its fair share of slots.
pub(super) struct Hellos(Mutex<HelloTable>);

struct HelloTable {
    budget: Budget<u64>,
    /// Notifies each peer when it has lost its slot.
    peers: HashMap<u64, Arc<Notify>>,
    last: u64,
}

impl HelloTable {
    fn end(&mut self, victim: Option<u64>) {
        if let Some(lost) = victim.and_then(|victim| self.peers.remove(&victim)) {
            metrics::counter!("outboard_store_connections_reclaimed_total").increment(1);
            lost.notify_one();
        }
    }
}

impl Hellos {
    pub(super) fn new() -> Arc<Hellos> {
        let budget = Budget::new(HELLOS, Duration::ZERO);
        Arc::new(Hellos(Mutex::new(HelloTable { budget, peers: HashMap::default(), last: 0 })))
    }

    /// Gives a peer a slot, or returns `None` if the peer must be dropped.
    pub(super) fn admit(self: &Arc<Self>, peer: PeerAddress) -> Option<HelloPlace> {
        let mut table = self.table();
        table.last += 1;
        let id = table.last;
        let victim = table.budget.admit(id, peer, Instant::now()).ok()?;
        table.end(victim);
        let lost = Arc::new(Notify::new());
        table.peers.insert(id, Arc::clone(&lost));
        drop(table);
        Some(HelloPlace { hellos: Arc::clone(self), id, lost })
    }

    /// Drops one peer to free its file descriptor.
    pub(super) fn shed(&self) {
        let mut table = self.table();
        let victim = table.budget.shed(Instant::now());
        table.end(victim);
    }

    fn table(&self) -> MutexGuard<'_, HelloTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The slot of one peer that has not sent a hello. Dropping it frees the slot.
pub(super) struct HelloPlace {
    hellos: Arc<Hellos>,
    id: u64,
    lost: Arc<Notify>,
}

impl HelloPlace {
    /// Resolves when another peer has taken the slot.
    pub(super) async fn lost(&self) {
        self.lost.notified().await;
    }
}

impl Drop for HelloPlace {
    fn drop(&mut self) {
        let mut table = self.hellos.table();
        table.budget.remove(self.id);
        table.peers.remove(&self.id);
    }
}
