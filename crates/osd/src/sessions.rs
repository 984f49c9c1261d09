//! Sessions: who is connected.

use std::collections::HashMap;

use base::budget::{Budget, PeerAddress};
use tokio::time::{Duration, Instant};
use wire::{Error, SessionId};

use crate::gone::Living;

/// Numbers the connections of an OSD.
pub(crate) type ConnectionId = u64;

/// How long sessions of the OSD before this one are given to come back.
const RETURN: Duration = Duration::from_secs(3600);

/// The sessions known now. Their durable part is in the placement groups.
pub(crate) struct Sessions {
    known: HashMap<SessionId, ClientPresence>,
    /// Their places. A session that has none is forgotten: the right to its unfinished uploads ends,
    /// and repeats of its requests may be refused. Its client may present it again.
    places: Budget<SessionId>,
    generation: u64,
    /// Number of the session made last.
    last: u32,
    started: Instant,
    shortages: Shortages,
}

/// What became of sessions since the OSD started because all places were taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Shortages {
    /// Connected sessions that lost their place to another one.
    pub(crate) reclaimed: u64,
    /// Sessions that could not be opened.
    pub(crate) refused: u64,
}

/// A session that was opened.
pub(crate) struct OpenedSession {
    pub(crate) id: SessionId,
    /// The connection of the session that lost its place to this one: to be closed.
    pub(crate) reclaimed: Option<ConnectionId>,
}

/// A session that was silent for that long loses its place to a new one of its own address, if all places are taken.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy)]
enum ClientPresence {
    Connected(ConnectionId),
    GoneSince(Instant),
}

impl Sessions {
    /// No sessions yet, and room for `limit`; new ones are of this generation.
    pub(crate) fn new(limit: usize, generation: u64) -> Sessions {
        let places = Budget::new(limit, PATIENCE);
        let (started, shortages) = (Instant::now(), Shortages::default());
        Sessions { known: HashMap::new(), places, generation, last: 0, started, shortages }
    }

    /// Attaches a session to a connection: the one that the client presents, or a new one. Another connection that the
    /// session had is no longer listened to. With all places taken, an address below its fair share takes that of the
    /// longest-silent session at one above.
    pub(crate) fn open(
        &mut self,
        presented: Option<SessionId>,
        connection: ConnectionId,
        peer: PeerAddress,
    ) -> wire::Result<OpenedSession> {
        // A session that was never made would be noted as forgotten one day, and with it all that come before it.
        if let Some(session) =
            presented.filter(|id| (id.generation(), id.number()) > (self.generation, self.last))
        {
            let why = "this node has not made it, or has lost its last state".to_owned();
            return Err(Error::SessionRefused { session, why });
        }
        let id = presented.unwrap_or_else(|| self.make());
        let victim = self.places.admit(id, peer, Instant::now().into_std()).map_err(|full| {
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
        assert_eq!(self.known.len(), self.places.taken(), "a session is known while it has a place");
        Ok(OpenedSession { id, reclaimed })
    }

    /// Marks the session as active, so that it is reclaimed last.
    pub(crate) fn heard(&mut self, session: SessionId) {
        self.places.heard(session, Instant::now().into_std());
    }

    fn make(&mut self) -> SessionId {
        // After more sessions than there are numbers, the last number is used again: ids differ in
        // their random bits.
        self.last = self.last.saturating_add(1);
        SessionId::new(self.generation, self.last, rand::random())
    }

    /// Forgets a session that its client has closed.
    pub(crate) fn close(&mut self, session: SessionId) {
        self.known.remove(&session);
        self.places.remove(session);
    }

    /// Whether a session's requests come from this connection.
    pub(crate) fn is_attached(&self, session: SessionId, connection: ConnectionId) -> bool {
        matches!(self.known.get(&session), Some(ClientPresence::Connected(now)) if *now == connection)
    }

    /// Says that a connection has ended.
    pub(crate) fn detach(&mut self, session: SessionId, connection: ConnectionId) {
        if self.is_attached(session, connection) {
            self.known.insert(session, ClientPresence::GoneSince(Instant::now()));
            self.places.left(session, Instant::now().into_std());
        }
    }

    /// Whether the session is connected, or was less than `grace` ago. Sessions of earlier
    /// generations count as connected until this OSD started.
    pub(crate) fn is_alive(&self, session: SessionId, grace: Duration) -> bool {
        match self.known.get(&session) {
            Some(attachment) => attachment.is_alive(grace),
            None => session.generation() < self.generation && self.started.elapsed() < grace.min(RETURN),
        }
    }

    /// All sessions that are connected or were less than `grace` ago.
    pub(crate) fn living(&self, grace: Duration) -> Living {
        let alive = self.known.iter().filter(|(_, attachment)| attachment.is_alive(grace));
        Living {
            known: alive.map(|(id, _)| *id).collect(),
            unseen_below: (self.started.elapsed() < grace).then_some(self.generation),
        }
    }

    /// What became of sessions because all places were taken.
    pub(crate) fn shortages(&self) -> Shortages {
        self.shortages
    }

    /// Number of sessions that are connected.
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
    async fn connected_sessions_of_a_crowd_make_room_for_another_address() {
        let mut sessions = Sessions::new(3, SessionId::FIRST_GENERATION);
        let mut crowd = Vec::new();
        for connection in 0..3 {
            crowd.push(sessions.open(None, connection, A).unwrap().id);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert!(matches!(sessions.open(None, 9, A), Err(Error::Busy { limit: 3, .. })));
        sessions.heard(crowd[0]);
        let other = sessions.open(None, 10, B).unwrap();
        assert_eq!(other.reclaimed, Some(1), "the connection of the longest silent");
        assert!(!sessions.is_attached(crowd[1], 1));
        // One that has gone is forgotten first, and comes back like a new one.
        sessions.detach(crowd[0], 0);
        let back = sessions.open(Some(crowd[1]), 11, A).unwrap();
        assert_eq!((back.id, back.reclaimed), (crowd[1], None));
        assert!(!sessions.is_alive(crowd[0], Duration::from_secs(60)));
        assert_eq!(sessions.connected(), 3);
        assert_eq!(sessions.shortages(), Shortages { reclaimed: 1, refused: 1 });
    }
}
