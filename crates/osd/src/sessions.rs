//! Table of the known sessions and their connections.

use base::budget::{Budget, PeerAddress};
use base::collections::HashMap;
use tokio::time::{Duration, Instant};
use wire::{Error, SessionId};

use crate::gone::Living;

/// Number that identifies a connection to this osd.
pub(crate) type ConnectionId = u64;

/// Maximum time after the osd's start during which sessions from before the start count as alive,
/// because their clients may reconnect.
const RETURN: Duration = Duration::from_secs(3600);

/// Table of the sessions that the osd knows now. Placement groups store the durable state of
/// sessions.
pub(crate) struct Sessions {
    known: HashMap<SessionId, ClientPresence>,
    /// Divides the slots of the table between peer addresses. A session that loses its slot is
    /// removed from the table: the collector may then remove the parts of its unfinished uploads,
    /// and the osd may refuse retries of its requests. Its client may still present the session
    /// again.
    places: Budget<SessionId>,
    generation: u64,
    /// Number of the newest session of this generation.
    last: u32,
    started: Instant,
    shortages: Shortages,
}

/// Counts of sessions that lost their slot or got no slot, since the osd started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Shortages {
    /// Connected sessions that lost their slot to another session.
    pub(crate) reclaimed: u64,
    /// Sessions that could not be opened because all slots were taken.
    pub(crate) refused: u64,
}

/// Result of opening a session.
pub(crate) struct OpenedSession {
    pub(crate) id: SessionId,
    /// Connection of the session that lost its slot to this one; `None` if no connected session
    /// lost its slot. The caller must close this connection.
    pub(crate) reclaimed: Option<ConnectionId>,
}

/// Minimum time that a session must be disconnected or silent before it can lose its slot to a new
/// session whose address already has its fair share of slots.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy)]
enum ClientPresence {
    Connected(ConnectionId),
    GoneSince(Instant),
}

impl Sessions {
    /// Creates an empty table with `limit` slots. `generation` is the generation of new sessions.
    pub(crate) fn new(limit: usize, generation: u64) -> Sessions {
        let places = Budget::new(limit, PATIENCE);
        let (started, shortages) = (Instant::now(), Shortages::default());
        Sessions { known: HashMap::default(), places, generation, last: 0, started, shortages }
    }

    /// Attaches a session to a connection: the session that the client presents, or a new one. From
    /// then on, the osd refuses the session's requests on an earlier connection. If all slots are
    /// taken, another session may lose its slot by the rules of [`Budget`].
    pub(crate) fn open(
        &mut self,
        presented: Option<SessionId>,
        connection: ConnectionId,
        peer: PeerAddress,
    ) -> wire::Result<OpenedSession> {
        // The osd must refuse a session id that it never issued. Otherwise a placement group could
        // later mark the id as forgotten, together with all lower numbers.
        if let Some(session) =
            presented.filter(|id| (id.generation(), id.number()) > (self.generation, self.last))
        {
            let why = "this node did not create the session, or has lost its latest state".to_owned();
            return Err(Error::SessionRefused { session, why });
        }
        let id = presented.unwrap_or_else(|| self.make());
        let victim = self.places.admit(id, peer, Instant::now()).map_err(|full| {
            self.shortages.refused += 1;
            Error::Busy {
                what: "sessions".into(),
                limit: full.limit as u64,
                advice: "close clients that are not needed".to_owned(),
            }
        })?;
        let reclaimed = match victim.and_then(|victim| self.known.remove(&victim)) {
            Some(ClientPresence::Connected(connection)) => {
                self.shortages.reclaimed += 1;
                Some(connection)
            }
            Some(ClientPresence::GoneSince(_)) | None => None,
        };
        self.known.insert(id, ClientPresence::Connected(connection));
        assert_eq!(
            self.known.len(),
            self.places.taken(),
            "the table contains exactly the sessions with a slot"
        );
        Ok(OpenedSession { id, reclaimed })
    }

    /// Records that the session is active, so that silent sessions lose their slots first.
    pub(crate) fn heard(&mut self, session: SessionId) {
        self.places.heard(session, Instant::now());
    }

    fn make(&mut self) -> SessionId {
        // If all numbers of a generation are used up, further sessions share the last number. Their
        // ids still differ in the random bits.
        self.last = self.last.saturating_add(1);
        SessionId::new(self.generation, self.last, base::entropy::random())
    }

    /// Forgets a session that its client has closed.
    pub(crate) fn close(&mut self, session: SessionId) {
        self.known.remove(&session);
        self.places.remove(session);
    }

    /// Returns whether the session is attached to this connection.
    pub(crate) fn is_attached(&self, session: SessionId, connection: ConnectionId) -> bool {
        matches!(self.known.get(&session), Some(ClientPresence::Connected(now)) if *now == connection)
    }

    /// Records that `connection` has ended. Does nothing if the session is attached to another
    /// connection.
    pub(crate) fn detach(&mut self, session: SessionId, connection: ConnectionId) {
        if self.is_attached(session, connection) {
            self.known.insert(session, ClientPresence::GoneSince(Instant::now()));
            self.places.left(session, Instant::now());
        }
    }

    /// Returns whether the session is connected, or was connected less than `grace` ago. A session
    /// of an earlier generation that the table does not contain counts as connected until the start
    /// of this osd.
    pub(crate) fn is_alive(&self, session: SessionId, grace: Duration) -> bool {
        match self.known.get(&session) {
            Some(attachment) => attachment.is_alive(grace),
            None => session.generation() < self.generation && self.started.elapsed() < grace.min(RETURN),
        }
    }

    /// Returns all sessions that are connected, or were connected less than `grace` ago.
    pub(crate) fn living(&self, grace: Duration) -> Living {
        let alive = self.known.iter().filter(|(_, attachment)| attachment.is_alive(grace));
        Living {
            known: alive.map(|(id, _)| *id).collect(),
            unseen_below: (self.started.elapsed() < grace).then_some(self.generation),
        }
    }

    /// Returns the counts of sessions that lost their slot or got no slot.
    pub(crate) fn shortages(&self) -> Shortages {
        self.shortages
    }

    /// Returns the number of connected sessions.
    pub(crate) fn connected(&self) -> u32 {
        self.known.values().filter(|a| matches!(a, ClientPresence::Connected(_))).count() as u32
    }
}

impl ClientPresence {
    fn is_alive(&self, grace: Duration) -> bool {
        match self {
            ClientPresence::Connected(_) => true,
            ClientPresence::GoneSince(when) => when.elapsed() < grace,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PeerAddress = PeerAddress::V4([192, 0, 2, 1]);
    const B: PeerAddress = PeerAddress::V4([192, 0, 2, 2]);

    #[tokio::test(start_paused = true)]
    async fn an_address_with_too_many_sessions_loses_a_slot_to_a_new_address() {
        let mut sessions = Sessions::new(3, SessionId::FIRST_GENERATION);
        let mut crowd = Vec::new();
        for connection in 0..3 {
            crowd.push(sessions.open(None, connection, A).unwrap().id);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert!(matches!(sessions.open(None, 9, A), Err(Error::Busy { limit: 3, .. })));
        sessions.heard(crowd[0]);
        let other = sessions.open(None, 10, B).unwrap();
        assert_eq!(
            other.reclaimed,
            Some(1),
            "the session that was silent for the longest time loses its slot"
        );
        assert!(!sessions.is_attached(crowd[1], 1));
        // A disconnected session loses its slot first. The session that lost its slot earlier can
        // be opened again.
        sessions.detach(crowd[0], 0);
        let back = sessions.open(Some(crowd[1]), 11, A).unwrap();
        assert_eq!((back.id, back.reclaimed), (crowd[1], None));
        assert!(!sessions.is_alive(crowd[0], Duration::from_secs(60)));
        assert_eq!(sessions.connected(), 3);
        assert_eq!(sessions.shortages(), Shortages { reclaimed: 1, refused: 1 });
    }
}
