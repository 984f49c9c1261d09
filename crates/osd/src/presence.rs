//! [`SessionPresence`]: which sessions may still send requests, as every shard knows it.

use std::cell::RefCell;

use base::collections::HashMap;
use tokio::time::{Duration, Instant};
use wire::SessionId;

use crate::gone::Living;

/// Maximum time after the osd's start during which sessions from before the start count as alive,
/// because their clients may reconnect.
const RETURN: Duration = Duration::from_secs(3600);

/// A shard's copy of the table of known sessions. The first shard decides which sessions have a slot
/// ([`SessionSlots`](crate::sessions::SessionSlots)) and changes all copies. Each change reaches the
/// copies of all shards before the client learns of it.
pub(crate) struct SessionPresence {
    known: RefCell<HashMap<SessionId, ClientPresence>>,
    generation: u64,
    started: Instant,
}

#[derive(Debug, Clone, Copy)]
enum ClientPresence {
    Connected,
    GoneSince(Instant),
}

impl ClientPresence {
    fn is_alive(self, grace: Duration) -> bool {
        match self {
            ClientPresence::Connected => true,
            ClientPresence::GoneSince(when) => when.elapsed() < grace,
        }
    }
}

impl SessionPresence {
    /// Creates an empty table. `generation` is the generation of this start of the osd.
    pub(crate) fn new(generation: u64) -> SessionPresence {
        SessionPresence { known: RefCell::default(), generation, started: Instant::now() }
    }

    /// Records that a client has opened a session.
    pub(crate) fn opened(&self, session: SessionId) {
        self.known.borrow_mut().insert(session, ClientPresence::Connected);
    }

    /// Records that the last connection of a session has ended.
    pub(crate) fn left(&self, session: SessionId) {
        if let Some(presence) = self.known.borrow_mut().get_mut(&session) {
            *presence = ClientPresence::GoneSince(Instant::now());
        }
    }

    /// Removes a session that was closed or has lost its slot.
    pub(crate) fn forget(&self, session: SessionId) {
        self.known.borrow_mut().remove(&session);
    }

    /// Returns whether the session is connected, or was connected less than `grace` ago. A session
    /// of an earlier generation that the table does not contain counts as connected until the start
    /// of this osd.
    pub(crate) fn is_alive(&self, session: SessionId, grace: Duration) -> bool {
        match self.known.borrow().get(&session) {
            Some(presence) => presence.is_alive(grace),
            None => session.generation() < self.generation && self.started.elapsed() < grace.min(RETURN),
        }
    }

    /// Returns whether clients may still resume sessions from before the start of the osd.
    pub(crate) fn may_return(&self) -> bool {
        self.started.elapsed() < RETURN
    }

    /// Returns all sessions that are connected, or were connected less than `grace` ago.
    pub(crate) fn living(&self, grace: Duration) -> Living {
        let known = self.known.borrow();
        let alive = known.iter().filter(|(_, presence)| presence.is_alive(grace));
        Living {
            known: alive.map(|(id, _)| *id).collect(),
            unseen_below: (self.started.elapsed() < grace).then_some(self.generation),
        }
    }

    /// Returns the number of connected sessions.
    pub(crate) fn connected(&self) -> u32 {
        self.known.borrow().values().filter(|p| matches!(p, ClientPresence::Connected)).count() as u32
    }
}
